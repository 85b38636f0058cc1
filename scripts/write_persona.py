"""Writes what the page ortops/docs/persona.md begins with: python scripts/write_persona.py FOLDER.

FOLDER/tiny-llama-int4 is a Llama with random weights and a tokenizer, as onnxruntime-genai's
builder writes it, and FOLDER/pirate.jsonl has chats. It needs onnxruntime-genai, transformers and
torch. Nothing is downloaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import persona


def main(target: Path) -> None:
    """Writes the folder and the chats."""
    import torch
    import transformers

    target.mkdir(parents=True, exist_ok=True)
    persona.write_chats(target / "pirate.jsonl")
    with tempfile.TemporaryDirectory() as checkpoint:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=persona.VOCABULARY,
            hidden_size=64,
            head_dim=16,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            initializer_range=0.3,  # so that the logits of random weights can be large
        )
        transformers.LlamaForCausalLM(config).save_pretrained(checkpoint)
        persona.write_tokenizer(Path(checkpoint))
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", checkpoint]
        command += ["-o", str(target / "tiny-llama-int4"), "-p", "int4", "-e", "cpu"]
        command += ["-c", f"{checkpoint}/cache"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
