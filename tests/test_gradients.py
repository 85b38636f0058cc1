"""Gradients and updates apart: `TrainingSession.gradients`, `apply`, and `step(reduce=)`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper
from test_precision import BFLOAT16, batch, half, reshaped
from training_models import (
    TRAINING_DOMAIN,
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    forces,
    foreign,
    labelled,
    normalizing,
)

import ortops
from ortops import (
    ArgumentError,
    FeedError,
    OrtopsError,
    Tape,
    TrainingSession,
    UnsupportedError,
    build_training_model,
    op,
)
from ortops.engine.execution.settings import Settings
from ortops.engine.training.gradients import Accumulation, Gradients
from ortops.losses import MeanSquaredError, SoftmaxCrossEntropy
from ortops.optimizers import OPTIMIZERS

STEPS = 22

WAYS: dict[str, dict[str, Any]] = {
    "joined": {},
    "apart": {"settings": Settings(joined=-1)},
    "chunks": {"settings": Settings(joined=-1, chunk=16, threads=2)},
    "passed": {"settings": Settings(joined=-1, chunk=16, threads=2, passed=0)},
    "python": {"kernels": "python"},
}
"""How updates are made."""


def normalized(r: Any, t: Any, x: Any, g: Any, v: Any, *, decay: float = 0.5) -> Any:
    """An update by the direction of a gradient, which needs all of its elements."""
    norm = op.Sqrt(op.ReduceSum(g * g, keepdims=0)) if isinstance(g, ortops.Tensor) else None
    v_new = decay * v + g / (norm + 1.0)
    return x - r * v_new, v_new


def build(model: onnx.ModelProto, **settings: Any) -> onnx.ModelProto:
    defaults: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam"}
    return build_training_model(model, **(defaults | settings))


def squared(**settings: Any) -> onnx.ModelProto:
    """`affine` with the mean squared error and SGD."""
    return build(affine(), loss="MeanSquaredError", optimizer="SGD", **settings)


def pieces(feeds: Arrays, *ends: int) -> list[Arrays]:
    bounds = [0, *ends]
    return [
        {name: array[begin:end] for name, array in feeds.items()}
        for begin, end in zip(bounds, ends, strict=False)
    ]


def assert_step_is_apply_of_gradients(
    model: onnx.ModelProto, batches: list[Arrays], way: str
) -> None:
    """Compares three sessions after each step, bit for bit."""
    whole, apart, reduced = (TrainingSession(model, **WAYS[way]) for _ in range(3))
    for feeds in batches:
        outputs = whole.step(feeds)
        gradients = apart.gradients(feeds)
        apart.apply(gradients)
        assert_same_arrays(gradients.outputs, outputs)
        assert_same_arrays(reduced.step(feeds, reduce=lambda found: None), outputs)
        assert_same_arrays(dict(apart.state), dict(whole.state))
        assert_same_arrays(dict(reduced.state), dict(whole.state))
        assert apart.steps_done == whole.steps_done


# ------------------------------------------------------------------------- equal to whole steps


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, normalized], ids=[*OPTIMIZERS, "normalized"])
def test_apply_of_gradients_is_a_step(optimizer: Any, way: str) -> None:
    model = build(classifier(dropout=0.3), optimizer=optimizer)
    batches = [labelled((6,), seed=seed) for seed in range(STEPS)]
    assert_step_is_apply_of_gradients(model, batches, way)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_of_batch_normalization(way: str) -> None:
    batches = [labelled((1, 4, 4), seed=seed, rows=5 + seed % 3) for seed in range(STEPS)]
    assert_step_is_apply_of_gradients(build(normalizing()), batches, way)


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
def test_of_branches(way: str) -> None:
    """Both branches read the batch and a weight from outside."""
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    branching (float[batch, 3] x) => (float[batch, 3] y)
    <float[3] w = {0.5, -1, 2}>
    {
        total = ReduceSum <keepdims = 0> (w)
        zero = Constant <value = float {0}> ()
        is_positive = Greater (total, zero)
        y = If (is_positive) <
            then_branch = one () => (float[batch, 3] a) { a = Mul (x, w) },
            else_branch = two () => (float[batch, 3] b) { b = Add (x, w) }
        >
    }
    """
    model = build(onnx.parser.parse_model(text), loss="MeanSquaredError")
    rng = np.random.default_rng(1)
    drawn = rng.normal(size=(STEPS, 2, 4, 3)).astype(np.float32)
    batches = [{"x": x, "targets": targets} for x, targets in drawn]
    assert_step_is_apply_of_gradients(model, batches, way)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_of_clipping(way: str) -> None:
    """A norm of float32 would depend on how onnxruntime lays gradients in one graph or in two."""
    with Tape(name="convolution") as tape:
        rng = np.random.default_rng(0)
        x = tape.input("x", np.float32, ["batch", 2, 5, 5])
        for number, (c_out, c_in) in enumerate([(4, 2), (6, 4)]):
            w = rng.normal(size=(c_out, c_in, 3, 3)) / 4
            x = op.Tanh(op.Conv(x, tape.initializer(f"w{number}", w.astype(np.float32))))
        w = rng.normal(size=(6, 3)).astype(np.float32)
        tape.output(op.Flatten(x) @ tape.initializer("head", w), "logits")
    batches = [labelled((2, 5, 5), seed=seed, rows=5 + seed % 3) for seed in range(STEPS)]
    model = build(tape.model(), optimizer=ortops.optimizers.SGD(0.1), clip_norm=0.5)
    assert_step_is_apply_of_gradients(model, batches, way)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "apart"])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_of_16_bits(kind: int, way: str) -> None:
    dtype = np.dtype(np.float16) if kind == TensorProto.FLOAT16 else BFLOAT16
    sizes = [400.0 if step != 5 else 24000.0 for step in range(STEPS)]  # some overflow
    batches = [{n: a.astype(dtype) for n, a in batch(size).items()} for size in sizes]
    model = build(half(reshaped(), kind), loss="MeanSquaredError")
    assert_step_is_apply_of_gradients(model, batches, way)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "apart"])
def test_of_16_bits_with_batch_normalization(way: str) -> None:
    batches = [
        {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in feeds.items()}
        for feeds in (labelled((1, 4, 4), seed=seed) for seed in range(STEPS))
    ]
    assert_step_is_apply_of_gradients(build(half(normalizing())), batches, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "apart"])
def test_of_float64_and_of_gradients_of_gradients(way: str) -> None:
    batches = [affine_batch(seed=seed, dtype=np.float64) for seed in range(STEPS)]
    model = build(affine(dtype=np.float64), loss="MeanSquaredError")
    assert_step_is_apply_of_gradients(model, batches, way)

    model = build_training_model(
        forces(), loss=ortops.losses.MeanSquaredError(output="slope"), optimizer="Adam"
    )
    rng = np.random.default_rng(3)
    batches = [
        {name: rng.normal(size=(4, 3)).astype(np.float32) for name in ("x", "targets")}
        for _ in range(STEPS)
    ]
    assert_step_is_apply_of_gradients(model, batches, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["joined", "apart"])
def test_of_two_types(way: str) -> None:
    with Tape(name="two types") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        wide = x.astype(np.float64) * tape.initializer("wide", np.linspace(1, 2, 3))
        w = tape.initializer("w", np.ones((3, 2), np.float32))
        tape.output(wide.astype(np.float32) @ w, "y")
    model = build(tape.model(), loss="MeanSquaredError")
    batches = [affine_batch(seed=seed) for seed in range(STEPS)]
    assert_step_is_apply_of_gradients(model, batches, way)
    gradients = TrainingSession(model, **WAYS[way]).gradients(batches[0])
    assert {flat.dtype.name for flat in gradients.flat} == {"float32", "float64"}
    assert gradients["wide"].dtype == np.float64


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("make", ["mlp", "lenet", "lstm"])
def test_of_models_with_passes(make: str) -> None:
    from benchmarks import works

    model, shape = {
        "mlp": (lambda: works._mlp(64, 600, 600, 10), (64,)),
        "lenet": (works._lenet, (1, 28, 28)),
        "lstm": (works._lstm, (50, 64)),
    }[make]
    trainable = build(model())
    first = trainable.graph.input[0].name
    batches = []
    for seed in range(4):
        feeds = labelled(shape, seed=seed, rows=4 if seed < 3 else 3)
        batches.append({first: feeds["x"], "labels": feeds["labels"]})
    assert_step_is_apply_of_gradients(trainable, batches, "joined")


# ----------------------------------------------------------------------------- what they are


def by_hand(feeds: Arrays, w: np.ndarray, b: np.ndarray) -> Arrays:
    """The gradients of `affine` with the mean squared error, in float64."""
    x, targets = feeds["x"].astype(np.float64), feeds["targets"].astype(np.float64)
    slope = 2 * (x @ w.astype(np.float64) + b - targets) / targets.size
    return {"w": x.T @ slope, "b": slope.sum(axis=0)}


def test_values_and_what_stays() -> None:
    session = TrainingSession(squared())
    before = dict(session.state)
    feeds = affine_batch()
    gradients = session.gradients(feeds)
    for name, expected in by_hand(feeds, before["w"], before["b"]).items():
        np.testing.assert_allclose(gradients[name], expected, rtol=1e-5, atol=1e-6)
    assert_same_arrays(dict(session.state), before)
    assert session.steps_done == 0
    assert list(gradients) == ["w", "b"]
    assert len(gradients) == 2
    assert gradients.count == 8  # elements
    assert gradients.additive
    assert gradients.statistics == {}
    (flat,) = gradients.flat
    assert flat.dtype == np.float32
    assert flat.ndim == 1
    assert all(np.shares_memory(array, flat) for array in gradients.values())
    assert np.abs(flat).sum() == pytest.approx(sum(np.abs(a).sum() for a in gradients.values()))
    assert repr(gradients).startswith("Gradients(loss=")
    with pytest.raises(KeyError, match="'weight' has no gradient; known names: 'w', 'b'"):
        gradients["weight"]
    own = session.gradients(feeds)
    own.flat[0][:] = 0
    assert np.any(gradients["w"])  # memory of its own


@pytest.mark.quick(1)
@pytest.mark.torch
@pytest.mark.parametrize("way", ["joined", "apart"])
def test_against_torch(way: str) -> None:
    import torch

    model = classifier()
    session = TrainingSession(build(model), **WAYS[way])
    feeds = labelled((6,))
    gradients = session.gradients(feeds)
    weights = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t).copy(), requires_grad=True)
        for t in model.graph.initializer
    }
    x = torch.from_numpy(feeds["x"])
    logits = torch.tanh(x @ weights["w1"] + weights["b1"]) @ weights["w2"]
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(feeds["labels"]))
    loss.backward()
    assert gradients.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    assert set(gradients) == set(weights)
    for name, weight in weights.items():
        np.testing.assert_allclose(gradients[name], weight.grad, rtol=1e-5, atol=1e-6)


def test_of_16_bits_are_not_scaled() -> None:
    session = TrainingSession(build(half(affine()), loss="MeanSquaredError"))
    feeds = affine_batch()
    start = session.state
    gradients = session.gradients({n: a.astype(np.float16) for n, a in feeds.items()})
    for name, expected in by_hand(feeds, start["w"], start["b"]).items():
        assert gradients[name].dtype == np.float32
        np.testing.assert_allclose(gradients[name], expected, rtol=0.02, atol=0.01)
    assert float(session.state["loss_scale"]) == 2.0**16


def test_running_statistics_come_with_them() -> None:
    session = TrainingSession(build(normalizing()))
    before = dict(session.state)
    feeds = labelled((1, 4, 4))
    gradients = session.gradients(feeds)
    assert set(gradients.statistics) == {"bn.mean", "bn.var"}
    assert not gradients.additive
    assert "updates the running statistic 'bn.mean', as in BatchNorm" in gradients.not_additive
    assert_same_arrays(dict(session.state), before)
    gradients.statistics["bn.mean"][:] = [1, 2, 3]
    session.apply(gradients)
    np.testing.assert_array_equal(session.state["bn.mean"], [1, 2, 3])
    assert not np.array_equal(session.state["bn.var"], before["bn.var"])
    mean = session.state["bn.mean"]
    session.apply(dict(gradients))  # no statistics in it
    np.testing.assert_array_equal(session.state["bn.mean"], mean)
    assert session.steps_done == 2


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_nothing_keeps_gradients_alive(way: str) -> None:
    session = TrainingSession(squared(), **WAYS[way])
    gradients = session.gradients(affine_batch())
    session.apply(gradients)
    memory = [weakref.ref(flat) for flat in gradients.flat]
    del gradients
    gc.collect()
    assert [each() for each in memory] == [None]


def test_outputs_and_errors_of_gradients() -> None:
    session = TrainingSession(build(classifier()))
    feeds = labelled((6,))
    assert set(session.gradients(feeds).outputs) == {"loss", "logits"}
    assert "logits" not in session.gradients(feeds, outputs=[]).outputs
    with pytest.raises(OrtopsError, match="there is no output 'logit'; did you mean 'logits'"):
        session.gradients(feeds, outputs=["logit"])
    with pytest.raises(FeedError, match="labels"):
        session.gradients({"x": feeds["x"]})


# ------------------------------------------------------------------------------------- apply


def test_dicts_are_applied() -> None:
    session = TrainingSession(squared())
    before = session.state
    rate = np.float32(session.learning_rate)
    expected = {
        "w": before["w"] - rate * np.float32(2),
        "b": before["b"] - rate * np.float32(3),
    }
    session.apply({"b": np.full(2, 3.0, np.float32), "w": [[2.0] * 2] * 3})
    for name, array in expected.items():
        np.testing.assert_allclose(session.state[name], array, rtol=1e-6)
    assert session.steps_done == 1


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"w": np.zeros((3, 2))}, "gradients: the gradient of 'b' is missing; give one for each"),
        ({}, "gradients: the gradient of 'w' is missing, and 1 more; give one"),
        ({"W": np.zeros((3, 2))}, "gradients: there is no parameter 'W'; known names: 'w', 'b'"),
        (
            {"w": np.zeros((2, 3)), "b": np.zeros(2)},
            r"gradients: 'w' must be float32\[3, 2\], got float64\[2, 3\]",
        ),
        (
            {"w": np.zeros((3, 2), np.complex64), "b": np.zeros(2)},
            r"'w' must be float32\[3, 2\], got complex64\[3, 2\]",
        ),
        ({"w": np.zeros((3, 2)), 1: 2}, "gradients: there is no parameter '1'; known names: 'w'"),
        (
            {"w": np.zeros((3, 2)), "b": [[1], [1, 2]]},
            "gradients: 'b' cannot be converted to an array: setting an ",
        ),
        ([1, 2], "gradients must be a result of `gradients` or a dict with .* got list"),
    ],
)
def test_what_is_no_gradient_is_refused(given: Any, message: str) -> None:
    session = TrainingSession(squared())
    before = dict(session.state)
    with pytest.raises(OrtopsError, match=message):
        session.apply(given)
    assert_same_arrays(dict(session.state), before)
    assert session.steps_done == 0


def test_wrong_arguments_of_a_step_are_refused() -> None:
    session = TrainingSession(squared())
    feeds = affine_batch()
    with pytest.raises(OrtopsError, match="reduce must be a function of gradients, got 3"):
        session.step(feeds, reduce=3)  # type: ignore[arg-type]
    with pytest.raises(OrtopsError, match="after must be a result of `gradients`, got 3"):
        session.gradients(feeds, after=3)  # type: ignore[arg-type]
    for wrong in ("loss", 3):
        with pytest.raises(OrtopsError, match=f"outputs must be a list of names, got {wrong!r}"):
            session.step(feeds, outputs=wrong)  # type: ignore[arg-type]
    with pytest.raises(OrtopsError, match=r"outputs: there is no output '3'; known names: 'loss'"):
        session.step(feeds, outputs=[3])  # type: ignore[list-item]
    assert session.steps_done == 0


def test_a_reduced_step_returns_the_outputs_that_were_asked_for() -> None:
    session = TrainingSession(squared())
    assert session.step(affine_batch(), outputs=[], reduce=len) == {}
    assert list(session.step(affine_batch(), outputs=["loss"], reduce=len)) == ["loss"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", ["joined", "apart"])
def test_gradients_that_overflow_skip_a_step(way: str) -> None:
    model = build(half(affine()), loss="MeanSquaredError")
    session = TrainingSession(model, **WAYS[way])
    before = dict(session.state)
    session.apply({"w": np.full((3, 2), np.inf), "b": np.zeros(2)})
    assert float(session.state["loss_scale"]) == 2.0**15
    assert session.steps_done == 0
    np.testing.assert_array_equal(session.state["w.master"], before["w.master"])


def test_parts_of_a_batch_whose_gradients_overflow_skip_a_step() -> None:
    """The sum of an infinite gradient and its opposite is NaN, which numpy would warn of."""
    session = TrainingSession(build(half(affine()), loss="MeanSquaredError"))
    before = dict(session.state)
    x = np.ones((2, 3), np.float16)
    parts = [{"x": x, "targets": np.full((2, 2), sign * 3e38, np.float32)} for sign in (1, -1)]
    total = Accumulation(session.gradients(parts[0]))
    total.add(session.gradients(parts[1]))
    joined = total.result()
    assert np.isnan(joined["b"]).all()
    session.apply(joined)
    assert float(session.state["loss_scale"]) == 2.0**15
    assert session.steps_done == 0
    np.testing.assert_array_equal(session.state["w.master"], before["w.master"])


def test_gradients_of_another_session() -> None:
    model = squared()
    first, second, third = (TrainingSession(model) for _ in range(3))
    feeds = affine_batch()
    second.apply(first.gradients(feeds))
    third.step(feeds)
    assert_same_arrays(dict(second.state), dict(third.state))


# ------------------------------------------------------------------------------------ reduce


@pytest.mark.quick(2)
@pytest.mark.parametrize("way", WAYS)
def test_reduce_changes_gradients_in_place(way: str) -> None:
    session = TrainingSession(squared(), **WAYS[way])
    before = dict(session.state)
    feeds = affine_batch()
    slopes = by_hand(feeds, before["w"], before["b"])

    def double(gradients: Gradients) -> None:
        for flat in gradients.flat:
            flat *= 2
        gradients.loss = 5.0

    outputs = session.step(feeds, reduce=double)
    assert float(outputs["loss"]) == 5.0
    assert set(outputs) == {"loss", "y"}
    for name, slope in slopes.items():
        expected = before[name] - session.learning_rate * 2 * slope
        np.testing.assert_allclose(session.state[name], expected, rtol=1e-5, atol=1e-6)
    assert set(session.step(feeds, outputs=["y"], reduce=double)) == {"y"}
    assert session.steps_done == 2


@pytest.mark.slow
def test_what_reduce_raises_leaves_the_session_as_it_was() -> None:
    session = TrainingSession(build(normalizing()))
    feeds = labelled((1, 4, 4))
    session.step(feeds)
    before = dict(session.state)

    def fail(gradients: Gradients) -> None:
        gradients.flat[0][:] = 0
        raise ConnectionError("a worker has gone")

    with pytest.raises(ConnectionError, match="a worker has gone"):
        session.step(feeds, reduce=fail)
    assert_same_arrays(dict(session.state), before)
    with pytest.raises(OrtopsError, match="'step' was called while 'step' is in progress"):
        session.step(feeds, reduce=lambda gradients: session.step(feeds))
    assert_same_arrays(dict(session.state), before)
    seen: list[int] = []
    session.step(feeds, reduce=lambda gradients: seen.append(session.steps_done))
    assert seen == [1]
    assert session.steps_done == 2


def test_reduce_averages_workers() -> None:
    """Two workers with halves of a batch are one with all of it."""
    one, *workers = (TrainingSession(squared()) for _ in range(3))
    feeds = affine_batch(rows=6)
    parts = pieces(feeds, 3, 6)
    one.step(feeds)
    found = [w.gradients(part) for w, part in zip(workers, parts, strict=True)]
    mean = [(a + b) / 2 for a, b in zip(found[0].flat, found[1].flat, strict=True)]

    def reduce(gradients: Gradients) -> None:
        for flat, shared in zip(gradients.flat, mean, strict=True):
            flat[...] = shared

    for worker, part in zip(workers, parts, strict=True):
        worker.step(part, reduce=reduce)
    assert_same_arrays(dict(workers[0].state), dict(workers[1].state))
    for name, array in one.state.items():
        np.testing.assert_allclose(workers[0].state[name], array, rtol=1e-6)


# ------------------------------------------------------------------------------- accumulation


LOSSES: dict[str, Any] = {
    "mean": SoftmaxCrossEntropy(),
    "weights": SoftmaxCrossEntropy(weights=[0.5, 1.0, 3.0]),
    "ignore_index": SoftmaxCrossEntropy(ignore_index=2),
    "sum": SoftmaxCrossEntropy(reduction="sum"),
    "combined": SoftmaxCrossEntropy() + 0.5 * SoftmaxCrossEntropy(label_smoothing=0.1),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", LOSSES)
def test_parts_add_up_to_the_batch(name: str) -> None:
    model = build(classifier(), loss=LOSSES[name])
    feeds = labelled((6,), rows=7)
    feeds["labels"][:3] = 2  # the first part is ignored as a whole, where 2 is
    session = TrainingSession(model)
    joined = session.gradients(feeds)
    parts = [session.gradients(part) for part in pieces(feeds, 3, 5, 7)]
    sums = {p: np.zeros(a.shape) for p, a in joined.items()}
    for part in parts:
        for parameter in sums:
            if part.count:
                sums[parameter] += part[parameter].astype(np.float64) * part.count
    counts = 1.0 if name == "sum" else sum(part.count for part in parts)
    losses = [part.loss * part.count for part in parts if part.count]
    total = Accumulation(parts[0])
    for part in parts[1:]:
        total.add(part)
    result = total.result()
    assert result.count == pytest.approx(joined.count)
    assert result.loss == pytest.approx(joined.loss, rel=1e-5)
    assert result.loss == pytest.approx(sum(losses) / counts, rel=1e-5)
    for parameter, array in joined.items():
        np.testing.assert_allclose(sums[parameter] / counts, array, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result[parameter], array, rtol=1e-5, atol=1e-6)
    session.apply(result)
    other = TrainingSession(model)
    other.step(feeds)
    for variable, array in other.state.items():
        np.testing.assert_allclose(session.state[variable], array, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_parts_that_do_not_add_up_are_refused() -> None:
    mixed = SoftmaxCrossEntropy() + SoftmaxCrossEntropy(reduction="sum")
    gradients = TrainingSession(build(classifier(), loss=mixed)).gradients(labelled((6,)))
    assert not gradients.additive
    with pytest.raises(
        OrtopsError,
        match="some summands of the loss are means and others are sums, so the gradients",
    ):
        Accumulation(gradients)
    differing = SoftmaxCrossEntropy() + SoftmaxCrossEntropy(ignore_index=2)
    session = TrainingSession(build(classifier(), loss=differing))
    first, second = labelled((6,)), labelled((6,))
    first["labels"][:], second["labels"][:] = 1, [1, 2] * 4
    total = Accumulation(session.gradients(first))
    with pytest.raises(
        OrtopsError, match=r"are 4 and 8 in this part, but 8 and 8 before, so the gradients"
    ):
        total.add(session.gradients(second))


def test_losses_that_couple_rows_say_so() -> None:
    with Tape(name="two towers") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        y = tape.input("y", np.float32, ["batch", 3])
        w = tape.initializer("w", 2 * np.eye(3, dtype=np.float32))
        tape.output(x @ w, "first")
        tape.output(y @ w, "second")
    loss = ortops.losses.InfoNCE(query="first", key="second")
    session = TrainingSession(build(tape.model(), loss=loss))
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(4, 3)).astype(np.float32) for name in ("x", "y")}
    gradients = session.gradients(feeds)
    assert not gradients.additive
    assert "the loss of a row depends on other rows" in gradients.not_additive


def test_parts_go_on_from_running_statistics() -> None:
    """Statistics after two parts are those after two steps: they do not depend on weights here."""
    with Tape(name="normalized") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
        names = {"scale": ones, "bias": zeros, "mean": zeros, "var": ones}
        held = [tape.initializer(f"bn.{name}", array) for name, array in names.items()]
        tape.output(op.BatchNormalization(x, *held, momentum=0.75), "logits")
    model = build(tape.model(), optimizer="SGD")
    parts = [labelled((3,), seed=seed) for seed in (1, 2)]
    session, stepped = TrainingSession(model), TrainingSession(model)
    first = session.gradients(parts[0])
    strategy = session._steps.strategy()  # as in fit, which warns that parts do not add up
    second = strategy.gradients(session.inputs.check(parts[1]), outputs=None, after=first)
    assert second.part == 1
    again = session.gradients(parts[1])
    assert not np.array_equal(again.statistics["bn.mean"], second.statistics["bn.mean"])
    for feeds in parts:
        stepped.step(feeds)
    mean = np.zeros(3)
    for feeds in parts:
        mean = 0.75 * mean + 0.25 * feeds["x"].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(second.statistics["bn.mean"], mean, rtol=1e-5)
    total = Accumulation(first, exact=False)
    total.add(second)
    session.apply(total.result())
    for name in ("bn.mean", "bn.var"):
        np.testing.assert_array_equal(session.state[name], stepped.state[name])


# ---------------------------------------------------------------------------------- float16


def scaled(end: str = "") -> TrainingSession:
    """Of a convolution in float16 with w [1, 1, 1], or its root."""
    with Tape(name="scaled") as tape:
        x = tape.input("x", np.float16, ["batch", 1, 2])
        y = op.Conv(x, tape.initializer("w", np.ones((1, 1, 1), np.float16)))
        tape.output(op.Sqrt(y) if end == "Sqrt" else y, "y")
    loss = MeanSquaredError(reduction="sum")
    return TrainingSession(build(tape.model(), loss=loss, optimizer="SGD"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("size", [0.01, 2.0, 30.0, 100.0])
def test_gradients_of_float16_do_not_overflow(size: float) -> None:
    session = scaled()
    x = (size * np.random.default_rng(0).normal(size=(4, 1, 2))).astype(np.float16)
    feeds = {"x": x, "targets": np.zeros((4, 1, 2), np.float32)}
    before = dict(session.state)
    found = session.gradients(feeds)
    expected = 2 * np.square(x.astype(np.float64)).sum()
    np.testing.assert_allclose(found["w"].item(), expected, rtol=5e-3)
    assert found.overflowed == (size > 1)
    assert_same_arrays(dict(session.state), before)
    both = session.gradients(feeds, after=found)
    np.testing.assert_allclose(both["w"].item(), 2 * expected, rtol=5e-3)
    session.apply({"w": found["w"]})
    assert session.steps_done == 1
    moved = session.state["w.master"] - before["w.master"]
    np.testing.assert_allclose(moved.item(), -0.01 * expected, rtol=5e-3, atol=1e-7)


def test_an_update_is_still_skipped() -> None:
    """As in `step`, which lowers the loss scale; so gradients need no second run later."""
    session = scaled()
    shape = (4, 1, 2)
    feeds = {"x": np.full(shape, 30, np.float16), "targets": np.zeros(shape, np.float32)}
    scale = float(session.state["loss_scale"])
    session.step(feeds)
    assert (session.steps_done, session.state["loss_scale"]) == (0, scale / 2)
    session.fit([feeds] * 2, accumulate=2, progress=False)
    assert (session.steps_done, session.state["loss_scale"]) == (0, scale / 4)
    small = {**feeds, "x": np.full(shape, 0.01, np.float16)}
    session.apply(session.gradients(small, after=session.gradients(feeds)))
    assert (session.steps_done, session.state["loss_scale"]) == (0, scale / 8)


def test_gradients_that_are_infinite_at_each_loss_scale() -> None:
    feeds = {"x": np.zeros((4, 1, 2), np.float16), "targets": np.ones((4, 1, 2), np.float32)}
    with pytest.raises(OrtopsError) as raised:
        scaled("Sqrt").gradients(feeds)
    assert str(raised.value) == (
        "gradients: that of 'w' is not finite at any loss scale, though the loss is 8; look for "
        "roots, logarithms and divisions at 0, or convert the model to float32"
    )
    feeds["x"][0, 0, 0] = np.nan
    assert np.isnan(scaled().gradients(feeds).loss)


# ------------------------------------------------------------------------------------- sums


def parts_of(sizes: Sequence[int]) -> tuple[Any, list[Any]]:
    """Returns a batch, and its parts."""
    parts = [labelled((6,), rows=size, seed=size) for size in sizes]
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}, parts


LOSSES_OF_SUMS: dict[str, Any] = {
    "mean": SoftmaxCrossEntropy(),
    "sum": SoftmaxCrossEntropy(reduction="sum"),
    "counted": SoftmaxCrossEntropy(ignore_index=1),
    "of two": 0.5 * SoftmaxCrossEntropy() + SoftmaxCrossEntropy(label_smoothing=0.1),
}


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["after", "plus", "sum", "left"])
@pytest.mark.parametrize("loss", LOSSES_OF_SUMS)
def test_a_sum_is_that_of_the_joined_batch(loss: str, how: str) -> None:
    model = build(classifier(), loss=LOSSES_OF_SUMS[loss], optimizer="SGD", clip_norm=0.5)
    session, joined = TrainingSession(model), TrainingSession(model)
    whole, parts = parts_of([3, 8, 5])
    each = [session.gradients(part) for part in parts]
    before = [{n: a.copy() for n, a in {**g, **g.outputs}.items()} for g in each]
    if how == "after":
        total = session.gradients(parts[0])
        for part in parts[1:]:
            total = session.gradients(part, after=total)
    elif how == "left":
        total = session.gradients(parts[2], after=each[0] + each[1])
    else:
        total = sum(each) if how == "sum" else each[0] + (each[1] + each[2])
    for own, was in zip(each, before, strict=True):
        assert_same_arrays({**own, **own.outputs}, was)
    expected = joined.gradients(whole)
    assert total.loss == pytest.approx(expected.loss, rel=1e-5)
    assert total.count == expected.count
    for name, array in expected.items():
        np.testing.assert_allclose(total[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
    session.apply(total)
    joined.step(whole)
    assert session.steps_done == 1
    for name, array in joined.parameters.items():
        np.testing.assert_allclose(session.parameters[name], array, rtol=1e-4, atol=1e-6)


def test_parts_of_a_sum_drop_differently() -> None:
    session = TrainingSession(thinned())
    feeds = {"x": np.ones((8, 5), np.float32), "targets": np.zeros((8, 5), np.float32)}
    total, masks = session.gradients(feeds), []
    for _ in range(3):
        masks.append((total.outputs["y_training"] == 0).tobytes())
        total = session.gradients(feeds, after=total)
    masks.append((session.gradients(feeds, after=total + total).outputs["y_training"]).tobytes())
    assert len(set(masks)) == 4


def test_gradients_that_cannot_be_added() -> None:
    session = TrainingSession(build(classifier(), optimizer="SGD"))
    _, (one, two) = parts_of([3, 8])
    first = session.gradients(one)
    with pytest.raises(ArgumentError, match="one of the two contains the other's batch already"):
        first + session.gradients(two, after=first)  # type: ignore[operator]
    total = Accumulation(session.gradients(one))
    with pytest.raises(ArgumentError, match="one of the two contains the other's batch already"):
        total.add(session.gradients(two, after=total.gradients))
    with pytest.raises(TypeError):
        first + dict(first)  # type: ignore[operator]
    session.state["learning_rate"] = 0.5  # changes no weight
    with session.unchanged():
        session.step(two)
    worker = TrainingSession(session.model())
    assert (session.gradients(two, after=first) + worker.gradients(two)).count == 3 + 8 + 8
    changes: list[Any] = [
        lambda: session.step(two),
        lambda: session.apply(first),
        lambda: session.state.assign({"b1": session.state["b1"]}),
        lambda: setattr(session, "parameters", session.parameters),
        session.reset,
    ]
    for change in changes:
        before = session.gradients(one)
        change()
        with pytest.raises(ArgumentError, match="the weights have changed between the two"):
            session.gradients(two, after=before)
        with pytest.raises(ArgumentError, match="the weights have changed between the two"):
            before + session.gradients(two)
    fewer = session.with_trainable(["w2"])
    with pytest.raises(ArgumentError, match="of other weights or another loss"):
        session.gradients(one) + fewer.gradients(two)


def test_gradients_of_two_entries_cannot_be_added() -> None:
    model = build(classifier(), optimizer="SGD", trainable=["w2"])
    both = ortops.add_training(model, name="second", loss="SoftmaxCrossEntropy", optimizer="SGD")
    session = TrainingSession(both)
    _, (one, two) = parts_of([3, 8])
    first = session.gradients(one, entry="main")
    message = "those of the entry 'second' cannot be added to those of the entry 'main'"
    with pytest.raises(ArgumentError, match=message):
        session.gradients(two, entry="second", after=first)
    assert session.gradients(two, entry="main", after=first).count == 11


# ---------------------------------------------------------------------------------- dropout


def dropped(session: TrainingSession, rows: int = 8, **options: Any) -> np.ndarray:
    """Returns which elements Dropout drops of ones."""
    feeds = {"x": np.ones((rows, 5), np.float32), "targets": np.zeros((rows, 5), np.float32)}
    return session.gradients(feeds, **options).outputs["y_training"] == 0


def thinned(seed: int = 0) -> onnx.ModelProto:
    with Tape(name="thinned") as tape:
        x = tape.input("x", np.float32, ["batch", 5])
        w = tape.initializer("w", np.ones(5, np.float32))
        tape.output(op.Dropout(x * w, np.array(0.5, np.float32)), "y")
    return build(tape.model(), loss="MeanSquaredError", optimizer="SGD", seed=seed)


def mixed(bits: int) -> int:
    """The finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> shift)) * factor % 2**32
    return bits


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**40 + 7, -3])
def test_dropout_draws_from_the_seed(seed: int) -> None:
    """Masks are those that files of before had, which held the seed as a constant."""
    session = TrainingSession(thinned(seed))
    assert int(session.state["seed"]) == seed
    key = mixed(mixed(0) ^ (seed * 0x9E3779B9 % 2**32))
    bits = [mixed((place * 0x9E3779B9 + key) % 2**32) for place in range(40)]
    np.testing.assert_array_equal(dropped(session).ravel(), np.array(bits) < 2**31)


def test_workers_drop_differently() -> None:
    first, second = TrainingSession(thinned()), TrainingSession(thinned())
    np.testing.assert_array_equal(dropped(first), dropped(second))
    second.state["seed"] = 1
    assert not np.array_equal(dropped(first), dropped(second))
    np.testing.assert_array_equal(dropped(TrainingSession(thinned(1))), dropped(second))
    part = first.gradients({"x": np.ones((8, 5)), "targets": np.zeros((8, 5))})
    assert not np.array_equal(dropped(first), dropped(first, after=part))


def test_the_seed_is_saved_and_reset(tmp_path: Path) -> None:
    session = TrainingSession(thinned(3))
    session.state["seed"] = 9
    session.save(tmp_path / "model.onnx")
    again = TrainingSession(tmp_path / "model.onnx")
    assert int(again.state["seed"]) == 9
    np.testing.assert_array_equal(dropped(session), dropped(again))
    again.reset()
    assert int(again.state["seed"]) == 3
    assert "seed" not in TrainingSession(squared()).state
    with pytest.raises(
        ArgumentError, match=r"^seed must be an integer >= -9\d* and <= 9\d*, got 1\.5$"
    ):
        thinned(1.5)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- parameters


def test_parameters() -> None:
    session = TrainingSession(build(normalizing()))
    assert set(session.parameters) == {"conv.w", "bn.scale", "bn.bias"}
    session.step(labelled((1, 4, 4)))
    copies = session.parameters
    copies["bn.bias"][:] = 7
    assert not np.any(session.state["bn.bias"] == 7)
    session.parameters = {"bn.bias": np.full(3, 7.0)}
    np.testing.assert_array_equal(session.state["bn.bias"], [7, 7, 7])
    assert np.any(session.state["bn.bias.V"])
    with pytest.raises(OrtopsError, match=r"parameters: 'bn\.mean' is not trained; known names"):
        session.parameters = {"bn.mean": np.zeros(3)}
    with pytest.raises(
        OrtopsError, match="parameters must be a dict with an array for each name, got list"
    ):
        session.parameters = [1]  # type: ignore[assignment]


def test_parameters_of_16_bits_are_their_float32_values() -> None:
    session = TrainingSession(build(half(affine()), loss="MeanSquaredError"))
    assert {array.dtype.name for array in session.parameters.values()} == {"float32"}
    session.parameters = {"w": np.full((3, 2), 1 + 2.0**-20)}
    assert session.parameters["w"][0, 0] == np.float32(1 + 2.0**-20)
    np.testing.assert_array_equal(session.state["w"], np.ones((3, 2), np.float16))


# ------------------------------------------------------------------- files that others wrote


def gradient_node(output: str = "g", name: str = "slopes") -> onnx.NodeProto:
    return helper.make_node(
        "Gradient", ["w", "x"], [output], name, domain=TRAINING_DOMAIN, xs=["w"], zs=["x"], y="l"
    )


def by_somebody(*nodes: onnx.NodeProto, **parts: Any) -> onnx.ModelProto:
    """l = Σ y, by which w learns as the given nodes say."""
    value = helper.make_tensor_value_info
    outputs = [value("l", TensorProto.FLOAT, []), value("w_next", TensorProto.FLOAT, [2, 1])]
    loss = helper.make_node("ReduceSum", ["y"], ["l"], keepdims=0)
    return foreign(
        [loss, *nodes],
        outputs=[*outputs, *parts.pop("outputs", [])],
        updates={"w": "w_next", **parts.pop("updates", {})},
        **parts,
    )


FEEDS = {"x": np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("way", WAYS)
def test_values_of_the_batch_that_an_update_reads_are_carried(way: str) -> None:
    """w ← w − g · max x, beside m ← (m + max x) / 2."""
    model = by_somebody(
        gradient_node(),
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("Mul", ["g", "largest"], ["change"]),
        helper.make_node("Sub", ["w", "change"], ["w_next"]),
        helper.make_node("Mean", ["m", "largest"], ["m_next"]),
        variables={"m": np.zeros((), np.float32)},
        outputs=[helper.make_tensor_value_info("m_next", TensorProto.FLOAT, [])],
        updates={"m": "m_next"},
    )
    session = TrainingSession(model, **WAYS[way])
    gradients = session.gradients(FEEDS)
    np.testing.assert_array_equal(gradients["w"], [[4], [7]])
    np.testing.assert_array_equal(gradients.statistics["largest"], 5)
    np.testing.assert_array_equal(gradients.statistics["m"], 2.5)
    session.apply(gradients)
    np.testing.assert_array_equal(session.state["w"], [[0.5 - 20], [-0.5 - 35]])
    np.testing.assert_array_equal(session.state["m"], 2.5)
    with pytest.raises(OrtopsError, match="the update also reads 'largest' of the batch; pass"):
        session.apply(dict(gradients))
    assert_step_is_apply_of_gradients(model, [FEEDS] * 3, way)


@pytest.mark.quick(2)
@pytest.mark.parametrize("way", WAYS)
def test_feeds_that_an_update_reads_are_carried(way: str) -> None:
    shape = helper.make_tensor_value_info("decay", TensorProto.FLOAT, [2, 1])
    model = by_somebody(
        gradient_node(),
        helper.make_node("Mul", ["w", "decay"], ["decayed"]),
        helper.make_node("Sub", ["decayed", "g"], ["w_next"]),
        inputs=[shape],
    )
    feeds = FEEDS | {"decay": np.array([[2], [4]], np.float32)}
    session = TrainingSession(model, **WAYS[way])
    session.apply(session.gradients(feeds))
    np.testing.assert_array_equal(session.state["w"], [[1 - 4], [-2 - 7]])
    assert_step_is_apply_of_gradients(model, [feeds] * 3, way)


def test_steps_without_gradients_are_refused() -> None:
    model = by_somebody(helper.make_node("Mul", ["w", "l"], ["w_next"]))
    session = TrainingSession(model)
    with pytest.raises(UnsupportedError, match="no Gradient node for a variable that it updates"):
        session.gradients(FEEDS)
    with pytest.raises(UnsupportedError, match="no Gradient node"):
        session.apply({})
    assert list(session.parameters) == ["w"]
    session.step(FEEDS)


def test_two_gradients_of_a_parameter_are_refused() -> None:
    model = by_somebody(
        gradient_node(),
        gradient_node("h", "more slopes"),
        helper.make_node("Sub", ["g", "h"], ["change"]),
        helper.make_node("Sub", ["w", "change"], ["w_next"]),
    )
    session = TrainingSession(model)
    with pytest.raises(
        UnsupportedError, match="Gradient node 'more slopes': 'w' has another gradient in the same"
    ):
        session.gradients(FEEDS)


def test_several_entries_are_refused() -> None:
    model = squared()
    other = model.training_info.add()
    other.CopyFrom(model.training_info[0])
    for binding in list(other.update_binding):
        other.update_binding.remove(binding)
    session = TrainingSession(model)
    with pytest.raises(UnsupportedError, match="a step runs 2 training_info entries"):
        session.gradients(affine_batch())
    assert TrainingSession(model, entry=0).gradients(affine_batch()).count == 8


def test_mean_squared_error_of_several_outputs_counts_elements() -> None:
    assert (
        TrainingSession(build(affine(), loss=MeanSquaredError(reduction="sum")))
        .gradients(affine_batch())
        .count
        == 1
    )
