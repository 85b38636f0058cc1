"""Attention of exporters and of operators, whose probabilities the backward pass computes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_llm_attention_forms import FORMS, ROWS, Graph, grouped_alibi, packed, packed_alibi, write
from torch_exports import EXPORTERS, quietly_exported

from ortops import Tape, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.graph.autodiff.rules._blocks import gradients_in_blocks
from ortops.graph.passes import attention_blocks
from ortops.llm import FineTuning
from ortops.losses import MeanSquaredError
from ortops.optimizers import SGD
from tests.spies import Spy

Array = np.ndarray[Any, Any]

WIDTH, HEADS, LENGTH = 8, 2, 260
SIZE = WIDTH // HEADS


@pytest.fixture(autouse=True)
def _pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from 256 × 256 pairs on, so that files are small."""
    monkeypatch.setattr(attention_blocks, "_PAIRS", 2**16)


def projected(form: str) -> Any:
    """A module of attention over its input."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            nn.init.normal_(self.whole.out_proj.bias)  # exporters merge equal biases
            nn.init.normal_(self.whole.in_proj_bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if form == "module":
                y, _ = self.whole(x, x, x, need_weights=False)
                return self.o(y)
            sizes = (len(x), LENGTH, HEADS, SIZE)
            parts = (layer(x).view(*sizes) for layer in (self.q, self.k, self.v))
            q, k, v = (part.transpose(1, 2) for part in parts)
            keep = (x[:, :, 0] > -0.5) & (x[:, :1, 1] > 0)  # no key of some samples
            if form == "written":
                scores = q @ k.transpose(-1, -2) / SIZE**0.5
                bias = torch.where(keep, 0.0, -1e9)[:, None, None]
                y = torch.softmax(scores + bias, -1) @ v
            else:
                mask = (
                    keep[:, None, None].expand(len(x), 1, LENGTH, LENGTH)
                    if form == "mask"
                    else None
                )
                attend = functional.scaled_dot_product_attention
                rate = 0.5 if form == "dropout" else 0.0
                y = attend(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=form == "causal")
            return self.o(y.transpose(1, 2).reshape(len(x), LENGTH, WIDTH))

    torch.manual_seed(0)
    return Attention()


def step(
    proto: onnx.ModelProto, feeds: dict[str, Array], settings: Settings, **options: Any
) -> tuple[float, dict[str, Array], int]:
    """Returns the loss of a step, the gradients, and the number of Scans in its graph."""
    spy = Spy()
    made = build_training_model(proto, loss=MeanSquaredError(), optimizer=SGD(1.0))
    session = TrainingSession(made, settings=spy.watching(settings), **options)
    before = {name: array.copy() for name, array in session.parameters.items()}
    loss = float(session.step(feeds)["loss"])
    found = {name: before[name] - array for name, array in session.parameters.items()}
    return loss, found, spy.operators[-1].count("Scan")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("form", ["plain", "causal", "mask", "written", "module"])
def test_files_of_exporters(form: str, exporter: str) -> None:
    import torch

    module = projected(form)
    x, targets = torch.randn(2, 3, LENGTH, WIDTH)
    x[:, 0, 1] = torch.tensor([-1.0, 1.0, 1.0])
    proto = quietly_exported(module, {"x": x}, exporter=exporter, axes={0: "batch"}, output="y")
    feeds = {"x": x.numpy(), "targets": targets.numpy()}
    loss, found, scans = step(proto, feeds, Settings())
    assert scans == 1
    expected, plain, scans = step(proto, feeds, Settings().without("attention_blocks"))
    assert (loss, scans) == (expected, 0)
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-7, err_msg=name)
    if (form, exporter) == ("mask", "dynamo"):
        return  # its rows without keys are means, not zeros
    torch.nn.functional.mse_loss(module(x), targets).backward()
    wanted = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    squares = [sum(float(np.square(a).sum()) for a in each.values()) for each in (found, wanted)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-4)
    for name in {*wanted} & {*found}:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-3, atol=1e-7, err_msg=name)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_dropout_of_probabilities_stays() -> None:
    import torch

    module, x = projected("dropout").train(), torch.randn(2, LENGTH, WIDTH)
    proto = quietly_exported(module, {"x": x}, exporter="training", axes={0: "batch"}, output="y")
    _, _, scans = step(proto, {"x": x.numpy(), "targets": x.numpy()}, Settings())
    assert scans == 0


def attention(length: int | str, *, trained_bias: bool = False) -> onnx.ModelProto:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    with Tape(name="attention") as tape:
        x = tape.input("x", np.float32, ["batch", length, WIDTH])
        heads = [
            op.Transpose(
                op.Reshape(x @ tape.initializer(n, draw(WIDTH, WIDTH)), [0, 0, HEADS, SIZE]),
                perm=[0, 2, 1, 3],
            )
            for n in ("q", "k", "v")
        ]
        q, k, v = (y.with_shape(["batch", HEADS, length, SIZE]) for y in heads)
        scores = q @ k.mT * 0.5
        if trained_bias:
            assert isinstance(length, int)
            scores = scores + tape.initializer("bias", draw(1, HEADS, length, length))
        y = op.Softmax(scores, axis=-1) @ v
        tape.output(op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, WIDTH]), "y")
    return tape.model()


@pytest.mark.parametrize(
    ("given", "length", "count"), [(128, 128, 0), (300, 300, 1), ("time", 40, 1), ("time", 300, 1)]
)
def test_lengths(given: int | str, length: int, count: int) -> None:
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((2, length, WIDTH), np.float32) for n in ("x", "targets")}
    loss, found, scans = step(attention(given), feeds, Settings())
    expected, plain, _ = step(attention(given), feeds, Settings().without("attention_blocks"))
    assert (loss, scans) == (expected, count)
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_trained_bias() -> None:
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((2, 300, WIDTH), np.float32) for n in ("x", "targets")}
    proto = attention(300, trained_bias=True)
    _, found, scans = step(proto, feeds, Settings())
    _, plain, _ = step(proto, feeds, Settings().without("attention_blocks"))
    assert scans == 1
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "options", [{"recompute": 1}, {"recompute": "sqrt"}, {"optimizer_in_backward": True}], ids=str
)
def test_options_of_sessions(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((2, 300, WIDTH), np.float32) for n in ("x", "targets")}
    loss, found, scans = step(attention("time"), feeds, Settings(), **options)
    expected, plain, _ = step(attention("time"), feeds, Settings().without("attention_blocks"))
    assert (loss, scans) == (expected, 1)
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "opset"), FORMS)
def test_operators(
    form: Callable[[Graph, str], str],
    opset: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their gradients are compared with PyTorch's in tests/test_llm_attention_forms.py."""
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return gradients_in_blocks(*arguments)

    monkeypatch.setattr(attention_blocks, "gradients_in_blocks", counted)
    write(tmp_path, form, opset)
    tuning = FineTuning(tmp_path, rank=2, alpha=4)
    (batch,) = tuning._batches.of(tuning._batches.read(ROWS, 10, "all"), 9)
    tuning.session.gradients(batch)
    # GroupQueryAttention has a rule of its own, and packed layers have no adapter.
    assert bool(calls) == (form not in (grouped_alibi, packed, packed_alibi))
