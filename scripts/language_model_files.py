"""Writes folders of tiny random language models with the tools that people use.

Each kind of `KINDS` is a tool, a precision and an architecture, and writes a folder that users of
the tool would have. Nothing is downloaded: the weights are random.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from models import llama

__all__ = ["KINDS", "Kind", "write_checkpoint"]

SIZES: dict[str, Any] = {
    "vocab_size": llama.WORDS,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
"""The settings of a model in transformers; the vocabulary is the tokenizer's, of bytes."""

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {}),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Gemma": ("GemmaConfig", {}),
    "Gemma 2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
    "Phi-3": ("Phi3Config", {"original_max_position_embeddings": 128}),
    "SmolLM": ("LlamaConfig", {"tie_word_embeddings": True}),
}
"""The class of the settings in transformers, and what differs from `SIZES`, by architecture."""


@dataclass(frozen=True)
class Kind:
    """A kind of folder.

    Attributes:
        tool: What writes it.
        form: The precision, as the tool calls it.
        architecture: A key of `ARCHITECTURES`.
        write: Writes the folder (second argument) from a folder of transformers (first argument).
        optimum: Whether `write` needs the interpreter that has Optimum, its third argument.
    """

    tool: str
    form: str
    architecture: str
    write: Callable[[Path, Path, str], None]
    optimum: bool = False

    @property
    def is_float(self) -> bool:
        """Whether no weight is quantized."""
        return self.form in ("float32", "float16")


def write_checkpoint(folder: Path, architecture: str, *, spread: float = 0.1) -> Any:
    """Writes a random model as transformers does, with a tokenizer of bytes and a chat template.

    Args:
        folder: The folder, which is created.
        architecture: A key of `ARCHITECTURES`.
        spread: The standard deviation of the weights; large enough for attention to matter.

    Returns:
        The module of transformers.
    """
    import torch
    import transformers

    settings, more = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, settings)(**SIZES | {"initializer_range": spread} | more)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in module.parameters():
            if weight.ndim == 1:  # of a norm: all equal at first, and exporters merge them
                weight += torch.rand(weight.shape) / 2
    module.save_pretrained(folder)
    llama.write_tokenizer(folder)
    return module


def _run(command: list[str]) -> None:
    """Runs a command; raises RuntimeError with the last line that it wrote if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])


def _genai(precision: str, provider: str = "cpu", *options: str) -> Callable[..., None]:
    def write(checkpoint: Path, folder: Path, _: str) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += ["-m", str(checkpoint), "-o", str(folder), "-p", precision, "-e", provider]
        command += ["-c", str(folder.parent / "cache")]
        _run(command + (["--extra_options", *options] if options else []))
        file = folder / "genai_config.json"  # other providers are not on this machine
        settings = json.loads(file.read_text(encoding="utf-8"))
        settings["model"]["decoder"]["session_options"]["provider_options"] = []
        file.write_text(json.dumps(settings, indent=4), encoding="utf-8")

    return write


def _optimum(checkpoint: Path, folder: Path, python: str) -> None:
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "onnx"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past", str(folder)]
    _run(command)


def _copied(checkpoint: Path, folder: Path) -> None:
    """Copies all but the weights of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)


def _dynamo(checkpoint: Path, folder: Path, _: str) -> None:
    """Exports with torch.onnx.export(dynamo=True), with the cache as inputs and outputs."""
    import torch
    import transformers

    module = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    layers, heads, size = 2, SIZES["num_key_value_heads"], SIZES["head_dim"]

    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(
            self, input_ids: Any, attention_mask: Any, position_ids: Any, *past: Any
        ) -> Any:
            cache = transformers.DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            found = self.module(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
            )
            kept = found.past_key_values.layers
            return found.logits, *(x for layer in kept for x in (layer.keys, layer.values))

    names = [f"{layer}.{kind}" for layer in range(layers) for kind in ("key", "value")]
    pasts = tuple(torch.zeros(2, heads, 5, size) for _ in names)
    ids = torch.ones(2, 3, dtype=torch.int64)
    given = (ids, torch.ones(2, 8, dtype=torch.int64), ids + 4, *pasts)
    batch, time, past = (torch.export.Dim(name) for name in ("batch", "time", "past"))
    total = torch.export.Dim("total")
    shapes = ({0: batch, 1: time}, {0: batch, 1: total}, {0: batch, 1: time})
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            Cached(),
            given,
            folder / "model.onnx",
            dynamo=True,
            input_names=["input_ids", "attention_mask", "position_ids"]
            + [f"past_key_values.{name}" for name in names],
            output_names=["logits", *(f"present.{name}" for name in names)],
            dynamic_shapes=(*shapes, tuple({0: batch, 2: past} for _ in names)),
            external_data=False,
            verbose=False,
        )
    _copied(checkpoint, folder)


def _transformers_js(bits: str) -> Callable[..., None]:
    """Quantizes as the conversion script of transformers.js does: onnx/model_q4.onnx and others."""

    def write(checkpoint: Path, folder: Path, python: str) -> None:
        exported = folder.parent / "exported"
        _optimum(checkpoint, exported, python)
        model = onnx.load(exported / "model.onnx")
        (folder / "onnx").mkdir(parents=True)
        if bits == "q8":
            _quantize_dynamic(exported / "model.onnx", folder / "onnx" / "model_quantized.onnx")
        else:
            if bits == "q4f16":
                model = _in_float16(model)
            onnx.save(_in_blocks(model), folder / "onnx" / f"model_{bits}.onnx")
        _copied(checkpoint, folder)

    return write


def _in_float16(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers that float16 rounds to zero
        return convert_float_to_float16(model, keep_io_types=["logits"])


def _in_blocks(model: onnx.ModelProto, *, bits: int = 4) -> onnx.ModelProto:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        model, bits=bits, block_size=32, is_symmetric=True, accuracy_level=4
    )
    logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.ERROR)
    quantizer.process()
    return quantizer.model.model


def _quantize_dynamic(source: Path, target: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    logging.getLogger().setLevel(logging.WARNING)  # it writes a line for each node
    quantize_dynamic(source, target, weight_type=QuantType.QInt8)


def _quantizer(bits: int) -> Callable[..., None]:
    """Quantizes the file of torch's exporter with one of onnxruntime's quantizers."""

    def write(checkpoint: Path, folder: Path, python: str) -> None:
        exported = folder.parent / "exported"
        _dynamo(checkpoint, exported, python)
        _copied(checkpoint, folder)
        if bits == 0:
            _quantize_dynamic(exported / "model.onnx", folder / "model.onnx")
        else:
            model = _in_blocks(onnx.load(exported / "model.onnx"), bits=bits)
            onnx.save(model, folder / "model.onnx")

    return write


GENAI = "onnxruntime-genai's builder"

KINDS = [
    *(Kind(GENAI, "float32", each, _genai("fp32")) for each in ARCHITECTURES),
    *(Kind(GENAI, "int4", each, _genai("int4")) for each in ARCHITECTURES),
    *(Kind(GENAI, "int4, float16", each, _genai("int4", "webgpu")) for each in ARCHITECTURES),
    Kind(GENAI, "float16", "Llama", _genai("fp16", "cuda")),
    Kind(GENAI, "int8", "Llama", _genai("int8")),
    *(
        Kind("Optimum", "float32", each, _optimum, optimum=True)
        for each in ("Llama", "Qwen2", "Qwen3", "Gemma")
    ),
    *(
        Kind("transformers.js", bits, "Llama", _transformers_js(bits), optimum=True)
        for bits in ("q4", "q4f16", "q8")
    ),
    *(
        Kind("PyTorch's exporter", "float32", each, _dynamo)
        for each in ("Llama", "Qwen2", "Qwen3", "Gemma 2", "Phi-3")
    ),
    Kind("onnxruntime's quantizers", "MatMulNBits, 4 bits", "Llama", _quantizer(4)),
    Kind("onnxruntime's quantizers", "MatMulNBits, 8 bits", "Llama", _quantizer(8)),
    Kind("onnxruntime's quantizers", "dynamic, 8 bits", "Llama", _quantizer(0)),
]
