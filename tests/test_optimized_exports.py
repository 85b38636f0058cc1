"""Gradients of exported models that onnxruntime's tools have optimized, next to PyTorch's autograd.

The models are those of `test_exported_models`. What onnxruntime saves after its extended
optimizations, and what its tool for transformers writes, holds its fused operators.
"""

from __future__ import annotations

import contextlib
import functools
import io
from pathlib import Path

import onnx
import pytest
from running import optimized
from test_exported_models import (
    EXPORTS,
    TOLERANCE,
    built,
    compare,
    exported,
    quiet_exporters,  # noqa: F401  a fixture for every test
)

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MICROSOFT = "com.microsoft"


def fused(path: Path, kind: str) -> onnx.ModelProto:
    """Returns what the tool for transformers makes of a model with two heads of size 8."""
    from onnxruntime.transformers.optimizer import optimize_model

    with contextlib.redirect_stdout(io.StringIO()):
        made = optimize_model(
            str(path), kind, num_heads=2, hidden_size=16, opt_level=0, use_gpu=False
        )
        made.save_model_to_file(str(path.with_suffix(".fused.onnx")))
    return onnx.load(path.with_suffix(".fused.onnx"))


CASES = {
    "bert": ("bert", {"BiasGelu", "FusedMatMul"}, {"BiasGelu", "SkipLayerNormalization"}),
    "gpt2": ("gpt2", {"FastGelu", "FusedMatMul"}, {"FastGelu", "SkipLayerNormalization"}),
    "llama": (
        "gpt2",
        {"FusedMatMul", "QuickGelu"},
        {"SkipSimplifiedLayerNormalization"},
    ),
    "t5": ("t5", {"FusedMatMul"}, {"SkipSimplifiedLayerNormalization"}),
    "vit": ("vit", {"BiasGelu", "FusedMatMul"}, {"BiasGelu", "SkipLayerNormalization"}),
    "resnet": (None, {"FusedConv"}, set()),
    "whisper": ("bart", {"BiasGelu", "Gelu"}, {"BiasGelu", "SkipLayerNormalization"}),
    "segformer": ("vit", {"FusedConv", "FusedMatMul"}, {"SkipLayerNormalization"}),
    "unet": (None, {"QuickGelu"}, set()),
}


@functools.cache
def as_exported(name: str) -> onnx.ModelProto:
    """Returns what PyTorch writes, once for all tools; `built` makes the same each time."""
    return exported(EXPORTS[name], *built(EXPORTS[name]), "torchscript")


@pytest.mark.nightly(3)
@pytest.mark.parametrize(
    ("name", "tool"),
    [
        (name, tool)
        for name, (kind, _, _) in CASES.items()
        for tool in ("session", "transformers", "both")
        if kind is not None or tool == "session"
    ],
)
def test_gradients(name: str, tool: str, tmp_path: Path) -> None:
    kind, by_session, by_tool = CASES[name]
    example = EXPORTS[name]
    module, inputs = built(example)
    path = tmp_path / "model.onnx"
    onnx.save(as_exported(name), path)
    expected = by_session
    if kind is not None and tool != "session":
        made = fused(path, kind)
        path, expected = path.with_suffix(".fused.onnx"), by_tool
    if tool != "transformers":
        made = optimized(path, path.with_suffix(".optimized.onnx"))
    found = {n.op_type for n in made.graph.node if n.domain == MICROSOFT}
    assert expected <= found
    errors = compare(made, module, inputs, (*example.unused, *example.folded))
    assert errors
    assert max(errors.values()) < TOLERANCE, sorted(errors.items(), key=lambda e: -e[1])[:5]
