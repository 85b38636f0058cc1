"""``ortops check`` of the folder of a language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_llm_pruning import pruned

from models import llama
from ortops import UnsupportedError
from ortops.cli import main
from ortops.llm import FineTuning

_LINES = """language model model.onnx
inputs: input_ids, attention_mask
caches, empty in training: 4 (past_key_values.0.key … past_key_values.1.value)
loss: NextToken of output 'logits'
layers that get an adapter: qkv_proj × 2, o_proj × 2, gate_proj × 2, up_proj × 2, down_proj × 2
adapter of rank 8: 7,168 values
"""


def test_a_float_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama.write(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert found.startswith(_LINES)
    assert found.endswith("no problems: ready for ortops tune\n")


def test_a_quantized_folder_that_prunes_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pruned(tmp_path, 4)
    assert main(["check", str(tmp_path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["quantized"] == 11
    assert found["adapter_size"] == 7168
    assert found["said"] == ["the file computes the logits of the last token only; tuning, of all"]


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["check", str(tmp_path)]) == 2
    assert "cannot choose the model among 0 .onnx files" in capsys.readouterr().err


def test_generation_that_onnxruntime_refuses(tmp_path: Path) -> None:
    folder = llama.write(tmp_path)
    tuning = FineTuning(folder, rank=1)
    with pytest.raises(UnsupportedError, match=r"generate: onnxruntime's CPU provider cannot run"):
        tuning.generate([llama.WORDS + 1])  # a token that the embedding does not have
