"""Losses on logits read them behind Concat, Split, Slice and the like, or say that they cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ModelError, TrainingSession
from ortops.engine.training.probabilities import warn_of_probabilities
from ortops.losses import BinaryCrossEntropy, BinaryCrossEntropyWithLogits, SoftmaxCrossEntropy

WEIGHTS = ", ".join(map(str, np.random.default_rng(0).standard_normal(48).round(2).tolist()))


def parsed(body: str, shape: str, output: str = "y") -> onnx.ModelProto:
    """A model whose nodes read z [batch, 12] of a MatMul, split into a [batch, 4] and b [8]."""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 4] x) => (float[{shape}] {output})
    <float[4, 12] w = {{{WEIGHTS}}}, int64[2] sizes = {{4, 8}}, int64[1] zero = {{0}},
     int64[1] two = {{2}}, int64[1] four = {{4}}, int64[1] ten = {{10}}, int64[1] end = {{99}},
     int64[1] one = {{1}}, int64[3] image = {{0, 4, 2}}, float stride = {{8.0}},
     int64[2] second = {{5, 6}}, int64[2] blocks = {{6, 6}}, float half = {{0.5}}>
    {{ z = MatMul(x, w) a, b = Split<axis=1>(z, sizes) {body} }}""")


def x() -> Any:
    return np.random.default_rng(1).standard_normal((5, 4), np.float32) * 3


def loss_of(model: onnx.ModelProto, loss: Any, targets: Any) -> tuple[float, Any]:
    """The loss of a step, and the gradient of the weights by a step of rate 1."""
    made = TrainingSession(
        ortops.build_training_model(
            model, loss=loss, optimizer=ortops.optimizers.SGD(1.0), trainable=["w"]
        )
    )
    before = made.state["w"].copy()
    name = next(name for name in made.inputs if name != "x")
    value = float(made.step({"x": x(), name: targets})["loss"])
    return value, before - made.state["w"]


def expected(pick: Any, targets: Any, *, classes: int | None = None) -> tuple[float, Any]:
    """The same in PyTorch, from logits that a function picks from z."""
    import torch

    numbers = [float(each) for each in WEIGHTS.split(",")]
    w = torch.tensor(numbers, dtype=torch.float64).reshape(4, 12).requires_grad_()
    logits = pick(torch.tensor(x()).double() @ w)
    if classes is None:
        target = torch.tensor(targets).double()
        value = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
    else:
        scores = logits.movedim(classes, 1)
        value = torch.nn.functional.cross_entropy(scores, torch.tensor(targets))
    value.backward()
    return value.item(), w.grad.numpy()


SIGMOIDS = {
    "split of a sigmoid": ("p = Sigmoid(z) q, y = Split<axis=1>(p, sizes)", 8, lambda z: z[:, 4:]),
    "first part": ("p = Sigmoid(z) y, q = Split<axis=1>(p, sizes)", 4, lambda z: z[:, :4]),
    "equal parts": (
        "p = Sigmoid(z) q, y = Split<axis=1, num_outputs=2>(p)",
        6,
        lambda z: z[:, 6:],
    ),
    "slice of a mixed concat": (
        "p = Sigmoid(b) c = Concat<axis=1>(a, p) y = Slice(c, four, end, one)",
        8,
        lambda z: z[:, 4:],
    ),
    "part of the branch": (
        "p = Sigmoid(b) c = Concat<axis=-1>(a, p) y = Slice(c, four, ten, one)",
        6,
        lambda z: z[:, 4:10],
    ),
    "split of a mixed concat": (
        "p = Sigmoid(a) c = Concat<axis=1>(p, b) y, r = Split<axis=1>(c, sizes)",
        4,
        lambda z: z[:, :4],
    ),
    "gather": (
        "p = Sigmoid(b) c = Concat<axis=1>(a, p) y = Gather<axis=1>(c, second)",
        2,
        lambda z: z[:, 5:7],
    ),
    "concat of sigmoids": (
        "p = Sigmoid(a) q = Sigmoid(b) y = Concat<axis=1>(q, p)",
        12,
        lambda z: z[:, [*range(4, 12), *range(4)]],
    ),
    "concat of a concat": (
        (
            "p = Sigmoid(a) q = Sigmoid(b) c = Concat<axis=1>(q, p) s = Sigmoid(z) "
            "d = Concat<axis=1>(c, s) y = Slice(d, two, ten, one)"
        ),
        8,
        lambda z: z[:, [*range(6, 12), *range(2)]],
    ),
    "sigmoid of a concat": (
        "c = Concat<axis=1>(b, a) p = Sigmoid(c) y = Slice(p, two, end, one)",
        10,
        lambda z: z[:, [*range(6, 12), *range(4)]],
    ),
}


@pytest.mark.quick(2)
@pytest.mark.torch
@pytest.mark.parametrize("case", SIGMOIDS)
def test_logits_of_sigmoids(case: str) -> None:
    body, size, pick = SIGMOIDS[case]
    targets = np.random.default_rng(2).random((5, size), np.float32)
    value, gradient = loss_of(
        parsed(body, f"batch, {size}"), BinaryCrossEntropyWithLogits(), targets
    )
    wanted, wanted_gradient = expected(pick, targets)
    assert value == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-5)


def both_signs(z: Any) -> Any:
    import torch

    return torch.cat([z, -z], 1)


SOFTMAXES = {
    "slice of a mixed concat": (
        "p = Softmax<axis=1>(b) c = Concat<axis=1>(a, p) y = Slice(c, four, end, one)",
        "batch, 8",
        lambda z: z[:, 4:],
        1,
    ),
    "concat along another axis": (
        (
            "h = Reshape(b, image) p = Softmax<axis=2>(h) n = Neg(h) q = Softmax<axis=2>(n) "
            "y = Concat<axis=1>(p, q)"
        ),
        "batch, 8, 2",
        lambda z: both_signs(z[:, 4:].reshape(-1, 4, 2)),
        2,
    ),
    "slice along another axis": (
        "h = Reshape(b, image) p = Softmax<axis=2>(h) y = Slice(p, two, end, one)",
        "batch, 2, 2",
        lambda z: z[:, 4:].reshape(-1, 4, 2)[:, 2:],
        2,
    ),
    "split along another axis": (
        "h = Reshape(b, image) p = LogSoftmax<axis=2>(h) y, r = Split<axis=1, num_outputs=2>(p)",
        "batch, 2, 2",
        lambda z: z[:, 4:].reshape(-1, 4, 2)[:, :2],
        2,
    ),
    "one position": (
        (
            "h = Reshape(b, image) p = Softmax<axis=2>(h) k = Gather<axis=1>(p, one) "
            "y = Squeeze(k, one)"
        ),
        "batch, 2",
        lambda z: z[:, 4:].reshape(-1, 4, 2)[:, 1],
        1,
    ),
}


@pytest.mark.quick(3)
@pytest.mark.torch
@pytest.mark.parametrize("case", SOFTMAXES)
def test_logits_of_softmaxes(case: str) -> None:
    body, shape, pick, axis = SOFTMAXES[case]
    sizes = [5, *map(int, shape.split(",")[1:])]
    count = sizes.pop(axis)
    labels = np.random.default_rng(2).integers(0, count, sizes)
    value, gradient = loss_of(parsed(body, shape), SoftmaxCrossEntropy(), labels)
    wanted, wanted_gradient = expected(pick, labels, classes=axis)
    assert value == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "p = Sigmoid(b) y = Concat<axis=1>(a, p)",
        "p = Sigmoid(b) m = Mul(a, stride) c = Concat<axis=1>(m, p) y = Identity(c)",
        "q = Sigmoid(a) m = Mul(q, stride) p = Sigmoid(b) y = Concat<axis=1>(m, p)",
        "p = Sigmoid(b) c = Concat<axis=1>(a, p) y = Concat<axis=1>(c)",
    ],
)
def test_a_part_of_the_prediction_that_holds_probabilities(body: str) -> None:
    """The loss applied the Sigmoid twice: its gradient was 1e-9 where it should have been 1."""
    with pytest.raises(ModelError) as raised:
        loss_of(parsed(body, "batch, 12"), BinaryCrossEntropyWithLogits(), np.zeros((5, 12)))
    assert str(raised.value).startswith(
        "loss BinaryCrossEntropyWithLogits reads logits, but a part of 'y' comes from Sigmoid node"
    )
    assert str(raised.value).endswith("; name the logits with output='b'")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "body",
    [
        "p = Sigmoid(a) q, r = Split<axis=1, num_outputs=2>(b) s = Sigmoid(q) y = Mul(p, s)",
        "p = Sigmoid(a) m = Mul(p, half) y = Sqrt(m)",
        "p = Sigmoid(a) q = Softmax(a) y = Max(p, q)",
    ],
)
def test_products_of_probabilities_have_no_logits(body: str) -> None:
    model, targets = parsed(body, "batch, 4"), np.full((5, 4), 0.5, np.float32)
    with pytest.raises(ModelError, match=r"'y' holds probabilities, from .*use a loss of probabil"):
        loss_of(model, BinaryCrossEntropyWithLogits(), targets)
    assert np.isfinite(loss_of(model, BinaryCrossEntropy(), targets)[0])


def test_a_class_of_a_softmax_has_no_logit() -> None:
    body = "p = Softmax(b) c = Concat<axis=1>(a, p) y = Slice(c, ten, end, one)"
    with pytest.raises(ModelError, match="'y' holds probabilities"):
        loss_of(parsed(body, "batch, 2"), BinaryCrossEntropyWithLogits(), np.zeros((5, 2)))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("h = Mul(a, half) t = Tanh(h) p = Mul(t, half) y = Add(p, half)", True),  # a Sigmoid
        ("t = Tanh(a) y = Mul(t, stride)", False),
        ("y = Identity(a)", False),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_logits_that_look_like_probabilities(
    body: str, warned: bool, accumulate: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = TrainingSession(
        ortops.build_training_model(
            parsed(body, "batch, 4"), loss=BinaryCrossEntropyWithLogits(), optimizer="Adam"
        )
    )
    assert made.metadata.prediction.bounded == ("Tanh" in body)
    data = {"x": x(), "targets": np.ones((5, 4), np.float32)}
    made.fit(data, epochs=2, batch_size=2, accumulate=accumulate, progress=False)
    said = [each.message for each in caplog.records if "as probabilities do" in each.message]
    assert len(said) == warned
    if said:
        assert said[0].startswith("fit: the loss reads 'y' as logits, but its values in the first")


@pytest.mark.parametrize(
    ("values", "warned"),
    [([0.5], False), ([0.5, 0.2], True), ([0, 1], True), ([0.5, 1.5], False), ([-0.1, 0], False)],
)
def test_two_numbers_may_look_like_probabilities(
    values: list[float], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    note = SimpleNamespace(output="y", bounded=True)
    session = SimpleNamespace(
        metadata=SimpleNamespace(predictions=[note]),
        predict=lambda batch, outputs: np.array(values, np.float32),
    )
    warn_of_probabilities(session, {})
    assert ["as probabilities do" in each.message for each in caplog.records] == [True] * warned
