"""The table of folders of language models, for a few of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.language_model_files import GENAI, KINDS, Kind
from scripts.language_models import COLUMNS, DONE, NOT_TRIED, table, try_kind

FORMS = ("float32", "int4", "int4, float16")
WRITTEN = [kind for kind in KINDS if kind.tool == GENAI and kind.form in FORMS]
SOME = [kind for kind in WRITTEN if kind.architecture in ("Llama", "Qwen3", "Phi-3")]
EXPORTED = [kind for kind in KINDS if kind.tool == "PyTorch's exporter"][:2]


def name(kind: Kind) -> str:
    return f"{kind.form}-{kind.architecture}"


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("transformers", "export")
@pytest.mark.optional("onnxruntime_genai", "genai")
@pytest.mark.filterwarnings("ignore")  # of transformers, torch and onnxruntime-genai
@pytest.mark.parametrize("kind", SOME, ids=name)
def test_folders_of_onnxruntime_genai(kind: Kind, tmp_path: Path) -> None:
    if (kind.form, kind.architecture) == ("int4, float16", "Qwen3"):
        pytest.skip("stock onnxruntime computes it on WebGPU only")
    cells = try_kind(kind, tmp_path, "")
    assert cells == [DONE, DONE if kind.is_float else NOT_TRIED, DONE, DONE, DONE]


@pytest.mark.nightly(0)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("transformers", "export")
@pytest.mark.optional("onnxscript", "export")
@pytest.mark.filterwarnings("ignore")  # of transformers and torch
@pytest.mark.parametrize("kind", EXPORTED, ids=name)
def test_folders_of_pytorch(kind: Kind, tmp_path: Path) -> None:
    assert try_kind(kind, tmp_path, "")[:4] == [DONE] * 4


def test_rows_of_equal_results_are_one() -> None:
    first, second, third = WRITTEN[:3]
    refused = ["node: refused", *[NOT_TRIED] * 4]
    cells = {first: [DONE] * len(COLUMNS), second: [DONE] * len(COLUMNS), third: refused}
    lines = table(cells).splitlines()
    assert lines[2].startswith(f"| {first.tool} | float32 | Llama, Qwen2 | ✓ | ✓ |")
    assert lines[3].startswith(f"| {first.tool} | float32 | Qwen3 | no (1) | – |")
    assert lines[5] == "1. node: refused"
