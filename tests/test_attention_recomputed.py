"""Attention of exporters and of operators, whose probabilities the backward pass computes again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import value
from onnx import TensorProto, helper, numpy_helper
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
PLAIN = ["plain", "causal", "mask", "written", "module"]


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
            self.pair = nn.Linear(WIDTH, 2 * SIZE)
            self.norms = nn.Parameter(1 + torch.rand(2, SIZE))
            self.whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
            nn.init.normal_(self.whole.out_proj.bias)  # exporters merge equal biases
            nn.init.normal_(self.whole.in_proj_bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if form == "module":
                y, _ = self.whole(x, x, x, need_weights=False)
                return self.o(y)
            batch, length = x.shape[:2]
            parts = (layer(x).view(batch, length, -1, SIZE) for layer in (self.q, self.k, self.v))
            q, k, v = (part.transpose(1, 2) for part in parts)
            if form in ("grouped", "repeated"):  # as in Qwen3: norms, and a pair for all heads
                k, v = self.pair(x).view(batch, length, 2, SIZE).transpose(1, 2).split(1, 1)
                q, k = (
                    y * (y * y).mean(-1, keepdim=True).rsqrt() * w
                    for y, w in zip((q, k), self.norms, strict=True)
                )
                if form == "repeated":
                    k, v = (y.repeat_interleave(HEADS, 1) for y in (k, v))
                else:
                    sizes = (batch, 1, HEADS, length, SIZE)
                    k, v = (y[:, :, None].expand(*sizes).flatten(1, 2) for y in (k, v))
            keep = (x[:, :, 0] > -0.5) & (x[:, :1, 1] > 0)  # no key of some samples
            if form in ("written", "capped", "upcast"):
                scores = q @ k.transpose(-1, -2) / SIZE**0.5
                if form == "capped":  # as in Gemma 2
                    scores = torch.tanh(scores / 0.5) * 0.5
                bias = torch.where(keep, 0.0, -6e4)[:, None, None].to(x.dtype)
                wide = torch.float32 if form == "upcast" else None
                y = torch.softmax(scores + bias, -1, dtype=wide).to(v.dtype) @ v
            else:
                mask = (
                    keep[:, None, None].expand(batch, 1, length, length) if form == "mask" else None
                )
                attend = functional.scaled_dot_product_attention
                rate = 0.5 if form == "dropout" else 0.0
                y = attend(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=form == "causal")
            return self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))

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
@pytest.mark.parametrize("form", [*PLAIN, "capped"])
def test_files_of_exporters(form: str, exporter: str) -> None:
    compare(form, exporter, {0: "batch"})


@pytest.mark.nightly(7)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("form", [*PLAIN, "capped", "grouped", "repeated"])
def test_files_of_free_lengths(form: str, exporter: str) -> None:
    compare(form, exporter, {0: "batch", 1: "time"})


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("form", ["mask", "upcast"])
def test_files_of_float16(form: str, exporter: str) -> None:
    """The loss has the bits of a step without blocks; gradients are near to those in float32."""
    import torch

    module = projected(form)
    x, targets = torch.randn(2, 3, LENGTH, WIDTH)
    x = x.half().float()  # no mask changes by rounding
    x[:, 0, 1] = 1.0
    half, axes = copy.deepcopy(module).half(), {0: "batch", 1: "time"}
    proto = quietly_exported(half, {"x": x.half()}, exporter=exporter, axes=axes, output="y")
    feeds = {"x": x.half().numpy(), "targets": targets.numpy()}
    loss, found, scans = step(proto, feeds, Settings())
    expected, plain, without = step(proto, feeds, Settings().without("attention_blocks"))
    assert (loss, scans, without) == (expected, 1, 0)
    torch.nn.functional.mse_loss(module(x), targets).backward()
    wanted = {n: p.grad.numpy() for n, p in module.named_parameters() if p.grad is not None}
    scale = max(np.abs(array).max() for array in plain.values())
    # Float16 has 11 bits; a step without blocks rounds the gradient at each operator.
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-2, atol=1e-3 * scale, err_msg=name)
    squares = [sum(float(np.square(a).sum()) for a in each.values()) for each in (found, wanted)]
    assert squares[0] == pytest.approx(squares[1], rel=2e-2)


def compare(form: str, exporter: str, axes: dict[int, str]) -> None:
    """Compares the gradients of a file with those without blocks, and with PyTorch's."""
    import torch

    module = projected(form)
    x, targets = torch.randn(2, 3, LENGTH, WIDTH)
    x[:, 0, 1] = torch.tensor([-1.0, 1.0, 1.0])
    proto = quietly_exported(module, {"x": x}, exporter=exporter, axes=axes, output="y")
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


def attention(
    length: int | str, *, trained_bias: bool = False, capped: bool = False
) -> onnx.ModelProto:
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
        if capped:
            scores = op.Tanh(scores * 3.0) * 0.25
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


@pytest.mark.parametrize("length", [300, "time"])
def test_a_soft_cap_of_any_slope(length: int | str) -> None:
    rng = np.random.default_rng(1)
    feeds = {n: rng.standard_normal((2, 300, WIDTH), np.float32) for n in ("x", "targets")}
    proto = attention(length, capped=True)
    loss, found, scans = step(proto, feeds, Settings())
    expected, plain, _ = step(proto, feeds, Settings().without("attention_blocks"))
    assert (loss, scans) == (expected, 1)
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


OPERATORS = [
    ("", "Attention", {"is_causal": 1}),
    ("", "Attention", {"softcap": 0.5}),
    ("com.microsoft", "MultiHeadAttention", {"unidirectional": 1}),
    ("com.microsoft", "Attention", {"unidirectional": 1}),
    ("com.microsoft", "Attention", {"mask": True}),
    ("com.microsoft", "Attention", {"mask": True, "unidirectional": 1}),
]


@pytest.mark.needs("onnxruntime>=1.23")
@pytest.mark.parametrize("length", [300, "time"])
@pytest.mark.parametrize(("domain", "kind", "attributes"), OPERATORS, ids=str)
def test_trained_operators(
    domain: str, kind: str, attributes: dict[str, Any], length: int | str
) -> None:
    """Operators whose projections are trained, also if they are packed."""
    rng = np.random.default_rng(0)
    attributes = dict(attributes)
    mask = attributes.pop("mask", False)
    counts = ("num_heads",) if domain else ("q_num_heads", "kv_num_heads")
    packed = (domain, kind) == ("com.microsoft", "Attention")
    given = {"x": ["batch", length, WIDTH]}
    weights = {"w": (WIDTH, 3 * WIDTH), "b": (3 * WIDTH,)} if packed else {}
    weights = weights or dict.fromkeys("qkv", (WIDTH, WIDTH))
    stored = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in weights.items()}
    nodes = [] if packed else [helper.make_node("MatMul", ["x", n], [f"x{n}"], n) for n in "qkv"]
    inputs = ["x", "w", "b", *["mask"] * mask] if packed else ["xq", "xk", "xv"]
    attributes |= dict.fromkeys(counts, HEADS)
    nodes.append(helper.make_node(kind, inputs, ["y"], "attention", domain=domain, **attributes))
    values = [value(n, shape) for n, shape in given.items()]
    values += [value("mask", ["batch", length], TensorProto.INT32)] * mask
    initializers = [numpy_helper.from_array(array, n) for n, array in stored.items()]
    graph = helper.make_graph(
        nodes, "operator", values, [value("y", ["batch", length, WIDTH])], initializers
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    feeds: dict[str, Array] = {
        n: rng.standard_normal((2, 300, WIDTH), np.float32) for n in ("x", "targets")
    }
    if mask:
        feeds["mask"] = np.arange(300) < np.array([[300], [170]])
        feeds["mask"] = feeds["mask"].astype(np.int32)
    loss, found, scans = step(proto, feeds, Settings())
    expected, plain, _ = step(proto, feeds, Settings().without("attention_blocks"))
    assert (loss, scans) == (expected, 1)
    assert set(plain) == set(stored)
    for name, array in plain.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("pairs", "sizes"),
    [
        (1, (2, 1, 1, 300)),
        (HEADS, (1, 1, 300, 300)),
        (HEADS, (3, HEADS, 1, 1)),
        (HEADS, (3, 1, 300, 1)),
    ],
)
def test_sizes_that_differ_at_run_time(pairs: int, sizes: tuple[int, ...]) -> None:
    """A bias may have more rows than the queries, and queries more heads than the keys."""
    rng = np.random.default_rng(0)
    with Tape(name="attention") as tape:
        x = tape.input("x", np.float32, ["batch", "time", WIDTH])
        bias = tape.input("bias", np.float32, ["rows", "heads", "queries", "keys"])
        parts = []
        for name, count in (("q", HEADS), ("k", pairs), ("v", pairs)):
            w = rng.standard_normal((WIDTH, count * SIZE)).astype(np.float32)
            y = op.Reshape(x @ tape.initializer(name, w), [0, 0, count, SIZE])
            parts.append(op.Transpose(y, perm=[0, 2, 1, 3]))
        q, k, v = parts
        y = op.Softmax(q @ k.mT * 0.5 + bias, axis=-1) @ v
        tape.output(op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, WIDTH]), "y")
    batch = 2 if sizes[0] == 2 else 1
    feeds = {
        "x": rng.standard_normal((batch, 300, WIDTH), np.float32),
        "bias": rng.standard_normal(sizes, np.float32),
        "targets": rng.standard_normal((max(batch, sizes[0]), 300, WIDTH), np.float32),
    }
    loss, found, scans = step(tape.model(), feeds, Settings())
    expected, plain, _ = step(tape.model(), feeds, Settings().without("attention_blocks"))
    assert (loss, scans) == (expected, 1)
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
