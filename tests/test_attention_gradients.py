"""The gradient of attention's Softmax in fewer passes, and where it stays as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import numpy as np
import onnx
import pytest

from models.transformer import transformer
from ortops import Tape, Tensor, TrainingSession, build_training_model, lora, op
from ortops.engine.execution.settings import Settings
from ortops.graph.passes.draft import Draft
from ortops.optimizers import SGD
from tests.spies import Spy

Array = np.ndarray[Any, Any]

WIDTH = 4  # of a value


class Shapes(Spy):
    """Records the last sizes of the outputs of elementwise nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[tuple[Any, ...]] = []

    def finish(self, draft: Draft) -> None:
        super().finish(draft)
        nodes = (node for node in draft.graph if node.op_type in ("Add", "Mul", "Sub"))
        shapes = (node.outputs[0].shape for node in nodes)
        self.last = [tuple(shape[-2:]) for shape in shapes if shape is not None]


def weights(heads: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shape = (6, heads * WIDTH)
    return {name: rng.standard_normal(shape).astype(np.float32) for name in ("q", "k", "v")}


def attention(
    sizes: tuple[Any, Any],
    *,
    heads: int = 1,
    shown: bool = False,
    between: Literal["", "Dropout", "Mul"] = "",
    again: bool = False,
) -> onnx.ModelProto:
    """Attention with a causal mask.

    Args:
        sizes: The sizes of batch and sequence.
        heads: The number of heads; with several, they are moved in front of the sequence.
        shown: Whether the probabilities are an output.
        between: A node between the probabilities and their product with the values.
        again: Whether the output depends on the probabilities in another way, too.
    """

    def projected(name: str) -> Tensor:
        y = x @ tape.initializer(name, weights(heads)[name])
        if heads == 1:
            return y
        return op.Transpose(op.Reshape(y, [0, 0, heads, WIDTH]), perm=[0, 2, 1, 3])

    with Tape(name="attention") as tape:
        x = tape.input("x", np.float32, [*sizes, 6])
        mask = tape.input("mask", np.float32, [sizes[1], sizes[1]])
        q, k, v = projected("q"), projected("k"), projected("v")
        p = op.Softmax(q @ k.mT * WIDTH**-0.5 + mask, axis=-1)
        used = p
        if between == "Dropout":
            used = op.Dropout(p, np.float32(0.5), np.bool_(True))
        elif between == "Mul":
            used = p * 2.0
        y = used @ v
        if again:
            y = y + op.ReduceSum(p * p, [-1])
        if heads > 1:
            y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, heads * WIDTH])
        tape.output(y, "y")
        if shown:
            tape.output(p, "probabilities")
    return tape.model()


def oracle(x: Array, targets: Array, heads: int) -> dict[str, Array]:
    """Returns the gradients of the mean squared error in float64."""
    batch, length, _ = x.shape
    x = x.astype(np.float64)

    def split(y: Array) -> Array:
        return y.reshape(batch, length, heads, WIDTH).transpose(0, 2, 1, 3)

    q, k, v = (split(x @ w.astype(np.float64)) for w in weights(heads).values())
    e = np.exp(q @ k.swapaxes(2, 3) / np.sqrt(WIDTH)) * np.tri(length)
    p = e / e.sum(3, keepdims=True)
    dy = 2 * (p @ v - split(targets.astype(np.float64))) / targets.size
    dp = dy @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(3, keepdims=True)) / np.sqrt(WIDTH)
    gradients = {"q": ds @ k, "k": ds.swapaxes(2, 3) @ q, "v": p.swapaxes(2, 3) @ dy}
    rows = x.reshape(-1, x.shape[2])
    return {
        name: rows.T @ g.transpose(0, 2, 1, 3).reshape(len(rows), heads * WIDTH)
        for name, g in gradients.items()
    }


def gradients(
    model: onnx.ModelProto, length: int, heads: int, *without: str
) -> tuple[dict[str, Array], Shapes, dict[str, Array]]:
    """Returns the gradients of a session, what its graph looks like, and the batch."""
    rng, spy = np.random.default_rng(1), Shapes()
    trainable = build_training_model(model, loss="MeanSquaredError", optimizer=SGD(0.1))
    session = TrainingSession(
        trainable, settings=spy.watching(Settings().without("attention_blocks", *without))
    )
    feeds = {
        "x": rng.standard_normal((3, length, 6)).astype(np.float32),
        "mask": np.where(np.tri(length), 0, -np.inf).astype(np.float32),
        "targets": rng.standard_normal((3, length, heads * WIDTH)).astype(np.float32),
    }
    return dict(session.gradients(feeds)), spy, feeds


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("sizes", "length", "passes"),
    [
        ((3, 3), 3, 4),  # mask, P · dP, the difference, and the result
        ((3, 9), 9, 3),  # without P · dP
        (("batch", 9), 9, 3),
        ((3, 17), 17, 2),  # without the difference
        (("batch", 17), 17, 2),
        (("batch", "time"), 17, 3),
    ],
)
def test_gradients(
    sizes: tuple[Any, Any], length: int, passes: int, heads: int, shown: bool
) -> None:
    model = attention(sizes, heads=heads, shown=shown)
    found, spy, feeds = gradients(model, length, heads)
    for name, wanted in oracle(feeds["x"], feeds["targets"], heads).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=2e-6)
    side = sizes[1]
    assert sum(last == (side, side) for last in spy.last) == passes


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("changes", [{"between": "Mul"}, {"between": "Dropout"}, {"again": True}])
def test_other_uses_of_the_probabilities(changes: dict[str, Any], heads: int) -> None:
    """The sum of rows is another one: the gradient stays as it is."""
    model = attention((3, 17), heads=heads, **changes)
    found, spy, _ = gradients(model, 17, heads)
    wanted, other, _ = gradients(model, 17, heads, "attention")
    assert Counter(spy.operators[-1]) == Counter(other.operators[-1])
    if "Dropout" not in changes.values():
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"recompute": "sqrt"}, {"optimizer_in_backward": True}, {"outputs": []}]
)
@pytest.mark.parametrize("adapted", [False, True])
def test_training(options: dict[str, Any], adapted: bool) -> None:
    """Losses of steps with batches of other sizes are those without the pass."""
    model = transformer(depth=2, width=16, length=40)
    if adapted:
        model = lora.add(model, rank=2, targets="*self_attn*")
    trainable = build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    losses: list[list[float]] = []
    for without in ((), ("attention",)):
        rng, spy = np.random.default_rng(0), Spy()
        settings = spy.watching(Settings().without(*without))
        session = TrainingSession(trainable, settings=settings, **options)
        losses.append([])
        for rows, length in ((4, 40), (4, 40), (2, 7), (3, 16), (4, 40)):
            tokens = rng.standard_normal((rows, length, 8)).astype(np.float32)
            batch = {"tokens": tokens, "labels": rng.integers(0, 10, rows)}
            losses[-1].append(float(session.step(batch)["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] != losses[0][0]
