"""Losses against formulae in numpy's float64, at their limits, and in parts of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from violations import all_violations

from ortops import Tape, Tensor, TrainingSession, build_training_model, losses, lower, op
from ortops.errors import ArgumentError, KernelError, ModelError
from tests.loss_models import Array, loss_and_gradients, shifted, value_and_count
from tests.running import run

RNG = np.random.default_rng(0)
Y = RNG.normal(size=(6, 4))
MAPS = RNG.normal(size=(3, 4, 2, 5))
ROWS_LAST = RNG.normal(size=(2, 3, 4))
SHARES = RNG.uniform(size=(6, 4))
MAP_SHARES = (RNG.uniform(size=(3, 4, 2, 5)) < 0.4).astype(np.float64)
LABELS = np.array([0, 2, 1, 3, 0, 2])
MAP_LABELS = RNG.integers(0, 4, (3, 2, 5))
LAST_LABELS = RNG.integers(0, 4, (2, 3))
TEACHER = RNG.normal(size=(6, 4)) * 3
LAST_TEACHER = RNG.normal(size=(2, 3, 4)) * 3
PER_CLASS = (0.5, 2.0, 1.0, 0.25)


def softmax(y: Array, axis: int = 1) -> Array:
    exp = np.exp(y - y.max(axis=axis, keepdims=True))
    return exp / exp.sum(axis=axis, keepdims=True)


def sigmoid(y: Array) -> Array:
    return 1 / (1 + np.exp(-y))


def at(p: Array, labels: Array) -> Array:
    """The probabilities of labels, whose axis is 1."""
    return np.take_along_axis(p, np.expand_dims(labels, 1), 1).squeeze(1)


def focal(y: Array, t: Array, gamma: float, alpha: float | None = None) -> Array:
    """−α (1 − q)^γ log q for targets that are 0 or 1."""
    q = np.where(t == 1, sigmoid(y), 1 - sigmoid(y))
    factor = 1.0 if alpha is None else np.where(t == 1, alpha, 1 - alpha)
    return -factor * (1 - q) ** gamma * np.log(q)


def focal_labels(y: Array, labels: Array, gamma: float, alpha: Any = (1, 1, 1, 1)) -> Array:
    q = at(softmax(y), labels)
    return -np.take(np.array(alpha), labels) * (1 - q) ** gamma * np.log(q)


def dice(p: Array, t: Array, smooth: float, power: int, axes: tuple[int, ...]) -> Array:
    """1 − D of probabilities, for whatever is not summed over."""
    both, all_ = (p * t).sum(axes), (p**power).sum(axes) + (t**power).sum(axes)
    return 1 - (2 * both + smooth) / (all_ + smooth)


def one_hot(labels: Array) -> Array:
    return np.moveaxis(np.eye(4)[labels], -1, 1)


def distilled(y: Array, teacher: Array, labels: Any, t: float, alpha: float) -> Array:
    q, p = softmax(teacher / t, -1), softmax(y / t, -1)
    soft = t * t * (q * np.log(q / p)).sum(-1)
    hard = (
        0 if labels is None else -np.log(np.take_along_axis(softmax(y, -1), labels[..., None], -1))
    )
    return (1 - alpha) * soft + alpha * (0 if labels is None else hard[..., 0])


def info_nce(a: Array, b: Array, temperature: float, normalize: bool, symmetric: bool) -> Array:
    """The loss of each row."""
    if normalize:
        a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    similar = a @ b.T / temperature
    rows = -np.log(np.diag(softmax(similar, 1)))
    columns = -np.log(np.diag(softmax(similar, 0)))
    return (rows + columns) / 2 if symmetric else rows


COUNTED = MAP_LABELS != 2
FOCAL_TARGETS = (SHARES > 0.5).astype(np.float64)

CASES: dict[str, tuple[losses.Loss, dict[str, Array], dict[str, Array], Callable[..., Array]]] = {
    "focal": (
        losses.Focal(),
        {"y": Y},
        {"targets": FOCAL_TARGETS},
        lambda y: focal(y, FOCAL_TARGETS, 2).mean(),
    ),
    "focal with alpha": (
        losses.Focal(alpha=0.25, gamma=1.5, reduction="sum"),
        {"y": Y},
        {"targets": FOCAL_TARGETS},
        lambda y: focal(y, FOCAL_TARGETS, 1.5, 0.25).sum(),
    ),
    "focal with a small exponent": (
        losses.Focal(gamma=0.5),
        {"y": Y},
        {"targets": FOCAL_TARGETS},
        lambda y: focal(y, FOCAL_TARGETS, 0.5).mean(),
    ),
    "focal without a focus": (
        losses.Focal(gamma=0),
        {"y": Y},
        {"targets": SHARES},
        lambda y: -(SHARES * np.log(sigmoid(y)) + (1 - SHARES) * np.log(sigmoid(-y))).mean(),
    ),
    "focal with shares": (
        losses.Focal(alpha=0.7, gamma=2),
        {"y": Y},
        {"targets": SHARES},
        # As torchvision has it: of binary cross-entropy, p_t and α_t that are linear in t.
        lambda y: (
            -(SHARES * np.log(sigmoid(y)) + (1 - SHARES) * np.log(sigmoid(-y)))
            * (1 - (SHARES * sigmoid(y) + (1 - SHARES) * sigmoid(-y))) ** 2
            * (0.7 * SHARES + 0.3 * (1 - SHARES))
        ).mean(),
    ),
    "focal of labels": (
        losses.Focal(multiclass=True, gamma=3, alpha=PER_CLASS),
        {"y": Y},
        {"labels": LABELS},
        lambda y: focal_labels(y, LABELS, 3, PER_CLASS).mean(),
    ),
    "focal of pixels, some of which do not count": (
        losses.Focal(multiclass=True, ignore_index=2),
        {"y": MAPS},
        {"labels": MAP_LABELS},
        lambda y: focal_labels(y, MAP_LABELS, 2)[COUNTED].mean(),
    ),
    "focal on the last axis": (
        losses.Focal(multiclass=True, axis=-1, gamma=1),
        {"y": ROWS_LAST},
        {"labels": LAST_LABELS},
        lambda y: focal_labels(y.reshape(-1, 4), LAST_LABELS.reshape(-1), 1).mean(),
    ),
    "Dice": (
        losses.Dice(),
        {"y": MAPS},
        {"targets": MAP_SHARES},
        lambda y: dice(sigmoid(y), MAP_SHARES, 1, 2, (0, 2, 3)).mean(),
    ),
    "Dice without squares or smoothing": (
        losses.Dice(squared=False, smooth=0, reduction="sum"),
        {"y": MAPS},
        {"targets": MAP_SHARES},
        lambda y: dice(sigmoid(y), MAP_SHARES, 0, 1, (0, 2, 3)).sum(),
    ),
    "Dice of each row": (
        losses.Dice(per_sample=True, smooth=0.5),
        {"y": MAPS},
        {"targets": MAP_SHARES},
        lambda y: dice(sigmoid(y), MAP_SHARES, 0.5, 2, (2, 3)).mean(),
    ),
    "Dice of labels": (
        losses.Dice(multiclass=True),
        {"y": MAPS},
        {"labels": MAP_LABELS},
        lambda y: dice(softmax(y), one_hot(MAP_LABELS), 1, 2, (0, 2, 3)).mean(),
    ),
    "Dice of labels, some of which do not count": (
        losses.Dice(multiclass=True, ignore_index=2, per_sample=True, squared=False),
        {"y": MAPS},
        {"labels": np.where(COUNTED, MAP_LABELS, 2)},
        lambda y: dice(
            softmax(y) * COUNTED[:, None], one_hot(MAP_LABELS) * COUNTED[:, None], 1, 1, (2, 3)
        ).mean(),
    ),
    "Dice on the last axis": (
        losses.Dice(multiclass=True, axis=-1, per_sample=True),
        {"y": ROWS_LAST},
        {"labels": LAST_LABELS},
        lambda y: dice(softmax(y, -1), np.eye(4)[LAST_LABELS], 1, 2, (1,)).mean(),
    ),
    "distillation": (
        losses.Distillation(temperature=3),
        {"y": Y},
        {"teacher": TEACHER},
        lambda y: distilled(y, TEACHER, None, 3, 0).mean(),
    ),
    "distillation with labels": (
        losses.Distillation(teacher="logits", alpha=0.3, reduction="sum"),
        {"y": Y},
        {"logits": TEACHER, "labels": LABELS},
        lambda y: distilled(y, TEACHER, LABELS, 2, 0.3).sum(),
    ),
    "distillation on the last axis": (
        losses.Distillation(axis=-1, alpha=0.9, temperature=1),
        {"y": ROWS_LAST},
        {"teacher": LAST_TEACHER, "labels": LAST_LABELS},
        lambda y: distilled(y, LAST_TEACHER, LAST_LABELS, 1, 0.9).mean(),
    ),
    "InfoNCE": (
        losses.InfoNCE(query="a", key="b"),
        {"a": Y, "b": TEACHER},
        {},
        lambda a, b: info_nce(a, b, 0.1, True, False).mean(),
    ),
    "InfoNCE of products": (
        losses.InfoNCE(query="a", key="b", normalize=False, temperature=2, reduction="sum"),
        {"a": Y, "b": TEACHER},
        {},
        lambda a, b: info_nce(a, b, 2, False, False).sum(),
    ),
    "symmetric InfoNCE": (
        losses.InfoNCE(query="a", key="b", temperature=0.5, symmetric=True),
        {"a": Y, "b": TEACHER},
        {},
        lambda a, b: info_nce(a, b, 0.5, True, True).mean(),
    ),
}


def numeric_gradient(function: Callable[..., Any], ys: dict[str, Array], name: str) -> Array:
    gradient = np.zeros_like(ys[name])
    for index in np.ndindex(gradient.shape):
        step = np.zeros_like(gradient)
        step[index] = 1e-6
        above = function(**{**ys, name: ys[name] + step})
        gradient[index] = (above - function(**{**ys, name: ys[name] - step})) / 2e-6
    return gradient


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str, dtype: Any) -> None:
    loss, ys, feeds, formula = CASES[case]
    value, gradients = loss_and_gradients(
        loss,
        {name: y.astype(dtype) for name, y in ys.items()},
        {k: f.astype(dtype) if f.dtype.kind == "f" else f for k, f in feeds.items()},
    )
    exact = dtype == np.float64
    np.testing.assert_allclose(value, formula(**ys), rtol=1e-12 if exact else 1e-5)
    for name in ys:
        expected = numeric_gradient(formula, ys, name)
        assert np.any(expected != 0)
        np.testing.assert_allclose(
            gradients[name], expected, rtol=1e-6 if exact else 1e-4, atol=1e-8 if exact else 1e-5
        )


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CASES)
def test_sizes_that_only_a_run_tells(case: str) -> None:
    loss, ys, feeds, formula = CASES[case]
    value, gradients = loss_and_gradients(loss, ys, feeds, symbolic=True)
    np.testing.assert_allclose(value, formula(**ys), rtol=1e-12)
    for name in ys:  # one parameter is added to all elements
        (total,) = gradients[name].reshape(-1)
        np.testing.assert_allclose(total, numeric_gradient(formula, ys, name).sum(), atol=1e-7)


# ----------------------------------------------------------------------------- parts of a batch

_LOG_P = np.log(softmax(Y))
_EMBEDDINGS = (Y, TEACHER, Y[::-1].copy())
_CTC = (
    np.log(softmax(RNG.normal(size=(6, 5, 4)), 2)),
    RNG.integers(1, 4, (6, 2)),
    np.array([5, 4, 5, 3, 5, 5]),
    np.array([2, 0, 1, 1, 2, 1]),
)

PARTS: dict[str, tuple[losses.Loss, tuple[Array, ...]]] = {
    "cross-entropy": (
        losses.SoftmaxCrossEntropy(weights=PER_CLASS, ignore_index=1, label_smoothing=0.2),
        (Y, LABELS),
    ),
    "cross-entropy of pixels": (losses.SoftmaxCrossEntropy(ignore_index=0), (MAPS, MAP_LABELS)),
    "plain cross-entropy": (losses.SoftmaxCrossEntropy(), (Y, LABELS)),
    "negative log-likelihood": (losses.NegativeLogLikelihood(weights=PER_CLASS), (_LOG_P, LABELS)),
    "hinge": (losses.Hinge(weights=PER_CLASS), (Y, LABELS)),
    "binary cross-entropy": (losses.BinaryCrossEntropy(), (SHARES, FOCAL_TARGETS)),
    "with logits": (losses.BinaryCrossEntropyWithLogits(positive_weight=PER_CLASS), (Y, SHARES)),
    "Huber": (losses.Huber(), (Y, TEACHER)),
    "smooth L1": (losses.SmoothL1(), (Y, TEACHER)),
    "L1": (losses.L1(), (Y, TEACHER)),
    "squared": (losses.MeanSquaredError(), (Y, TEACHER)),
    "Kullback-Leibler": (losses.KullbackLeibler(reduction="batchmean"), (_LOG_P, SHARES)),
    "Kullback-Leibler's mean": (losses.KullbackLeibler(), (_LOG_P, SHARES)),
    "cosine": (losses.CosineEmbedding(first="a", second="b"), (Y, TEACHER, np.sign(Y[:, 0]))),
    "triplet": (losses.Triplet(anchor="a", positive="b", negative="c"), _EMBEDDINGS),
    "CTC": (losses.CTC(batch_first=True), _CTC),
    "focal": (losses.Focal(), (Y, SHARES)),
    "focal of labels": (losses.Focal(multiclass=True, ignore_index=2), (Y, LABELS)),
    "Dice": (losses.Dice(per_sample=True), (MAPS, MAP_SHARES)),
    "distillation": (losses.Distillation(alpha=0.5), (Y, TEACHER, LABELS)),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_a_batch_add_up(case: str) -> None:
    loss, tensors = PARTS[case]
    assert not loss.couples_rows
    split = len(tensors[0]) // 3
    whole, all_ = value_and_count(loss, *tensors)
    parts = [
        value_and_count(loss, *(tensor[part] for tensor in tensors))
        for part in (slice(split), slice(split, None))
    ]
    counts = [count for _, count in parts]
    assert all(count.shape == () and count.dtype == np.float64 for count in counts)
    np.testing.assert_allclose(sum(counts), all_, rtol=1e-12)
    np.testing.assert_allclose(sum(v * c for v, c in parts) / all_, whole, rtol=1e-12)
    # The average of averages would be another number, or the parts would be too alike to tell.
    assert abs(sum(value for value, _ in parts) / 2 / whole - 1) > 1e-6


@pytest.mark.parametrize(
    "loss",
    [
        losses.SoftmaxCrossEntropy(ignore_index=1, label_smoothing=0.5),
        losses.NegativeLogLikelihood(weights=(1, 0)),
        losses.Focal(multiclass=True, ignore_index=1),
        losses.Hinge(),
    ],
)
def test_float16_counts_beyond_its_range(loss: losses.Loss) -> None:
    y = np.repeat(np.array([[-0.5, -1.5]], np.float16), 80_000, axis=0)
    one = value_and_count(loss, y[:1].astype(np.float64), np.zeros(1, np.int64))
    value, count = value_and_count(loss, y, np.zeros(80_000, np.int64))
    assert value.dtype == np.float16
    assert count == 80_000
    assert value == pytest.approx(one[0], rel=2e-3)


@pytest.mark.parametrize(
    "loss",
    [losses.InfoNCE(query="a", key="b"), losses.Dice(), losses.Dice(multiclass=True)],
)
def test_some_losses_couple_rows(loss: losses.Loss) -> None:
    assert loss.couples_rows


# --------------------------------------------------------------------------------- second order


def gradient_and_curvature(
    loss: losses.Loss, direction: Array, *tensors: Array
) -> tuple[Array, Array]:
    """The gradient of a loss by its first tensor, and the Hessian times a direction."""
    with Tape() as tape:
        inputs = [tape.input(f"x_{i}", t.dtype, t.shape) for i, t in enumerate(tensors)]
        first = _gradient(loss(*inputs), inputs[0])
        second = _gradient(op.ReduceSum(first * direction, keepdims=0), inputs[0])
        tape.output(first, "first")
        tape.output(second, "second")
    model = ir.to_proto(ir.Model(tape.graph, ir_version=10))
    model.opset_import.add(domain="ai.onnx.preview.training", version=1)
    found = run(lower(model), {f"x_{i}": t for i, t in enumerate(tensors)})
    return found[0], found[1]


def _gradient(y: Tensor, x: Tensor) -> Tensor:
    node = ir.Node(
        "ai.onnx.preview.training",
        "Gradient",
        [x.value, *(value for value in y.tape.graph.inputs if value is not x.value)],
        ir.convenience.convert_attributes(
            {
                "xs": [x.name],
                "y": y.name,
                "zs": [v.name for v in y.tape.graph.inputs if v is not x.value],
            }
        ),
    )
    y.tape.append(node)
    node.outputs[0].type, node.outputs[0].shape = x.value.type, x.value.shape
    return y.tape.tensor(node.outputs[0])


SMOOTH = [name for name in PARTS if name not in ("L1", "hinge", "Huber", "smooth L1")]


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", SMOOTH)
def test_second_derivatives(case: str) -> None:
    loss, tensors = PARTS[case]
    direction = np.random.default_rng(1).normal(size=tensors[0].shape)
    _, found = gradient_and_curvature(loss, direction, *tensors)
    above, below = (
        gradient_and_curvature(loss, direction, tensors[0] + step * direction, *tensors[1:])[0]
        for step in (1e-6, -1e-6)
    )
    np.testing.assert_allclose(found, (above - below) / 2e-6, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------- the limits

FAR = np.array([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]], np.float32)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("loss", "feeds", "value", "gradient"),
    [
        (
            losses.SoftmaxCrossEntropy(label_smoothing=0.3),
            {"labels": np.array([1, 1])},
            (0.8 * 2e4 + 0.1 * 1e4 + 0.1 * 2e4 + np.log(2)) / 2,
            [[0.45, -0.4, -0.05], [-0.05, -0.15, 0.2]],
        ),
        (
            losses.BinaryCrossEntropyWithLogits(positive_weight=3.0),
            {"targets": np.array([[0, 1, 1], [0, 1, 0]], np.float32)},
            (1e4 + 3e4 + 3 * np.log(2) + 1e4) / 6,
            [[1 / 6, -3 / 6, -1.5 / 6], [0, 0, 1 / 6]],
        ),
        (
            losses.Focal(gamma=0.5),
            {"targets": np.array([[0, 1, 1], [0, 1, 1]], np.float32)},
            (2e4 + np.log(2) / np.sqrt(2)) / 6,
            # At 0 with q = 1/2: −√½ (½ − ¼ log ½) … with γ = ½ is −√½ (1 + ½ log 2) / 2.
            [[1 / 6, -1 / 6, -np.sqrt(0.5) * (1 + 0.5 * np.log(2)) / 12], [0, 0, 0]],
        ),
        (
            losses.Focal(multiclass=True, gamma=2),
            {"labels": np.array([1, 0])},
            2e4 + np.log(2) / 2,
            [[0.5, -0.5, 0], [-0.5, 0.25, 0.25]],
        ),
        (
            losses.Distillation(temperature=1, alpha=0.5),
            {
                "teacher": np.array([[-1e4, 1e4, 0], [-1e4, 1e4, 1e4]], np.float32),
                "labels": np.array([0, 1]),
            },
            (0.5 * 2e4 + 0.5 * np.log(2)) / 2,
            [[0.25, -0.25, 0], [0, -0.125, 0.125]],
        ),
        (
            losses.Huber(delta=2.0),
            {"targets": np.zeros((2, 3), np.float32)},
            (5 * (2e4 - 2)) / 6,
            [[2 / 6, -2 / 6, 0], [-2 / 6, 2 / 6, 2 / 6]],
        ),
        (
            losses.Hinge(p=2),
            {"labels": np.array([0, 1])},
            1 / 6,
            [[0, 0, 0], [0, -1 / 3, 1 / 3]],
        ),
        (
            losses.Dice(multiclass=True, smooth=0),
            {"labels": np.array([0, 1])},
            # p = [1, 0, 0], [0, ½, ½]: 1 − 2/2, 1 − 2·½ / (¼ + 1), 1 − 0 / ¼
            (0 + 0.2 + 1) / 3,
            None,
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_logits_far_apart(
    loss: losses.Loss, feeds: dict[str, Array], value: float, gradient: Any
) -> None:
    found, gradients = loss_and_gradients(loss, {"y": FAR}, feeds)
    assert found == pytest.approx(value, rel=1e-6)
    assert np.all(np.isfinite(gradients["y"]))
    if gradient is not None:
        np.testing.assert_allclose(gradients["y"], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [losses.Dice, losses.Focal])
def test_the_end_of_the_model_decides_whether_classes_are_exclusive(kind: Any) -> None:
    """By multiclass=None: with a Softmax they are, and targets are labels."""
    ends: list[tuple[bool, Any, dict[str, Array]]] = [
        (True, lambda y: op.Softmax(y, axis=1), {"labels": MAP_LABELS}),
        (False, op.Sigmoid, {"targets": MAP_SHARES}),
        (False, None, {"targets": MAP_SHARES}),
    ]
    for multiclass, squash, feeds in ends:
        found, expected = (
            loss_and_gradients(kind(multiclass=given), {"y": MAPS}, feeds, squash)
            for given in (None, multiclass)
        )
        assert found[0] == expected[0] > 0
        np.testing.assert_array_equal(found[1]["y"], expected[1]["y"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_of_0_and_1(dtype: Any) -> None:
    y = np.array([[0.0, 0.0, 1.0, 1.0, 1e-30]], dtype)
    targets = np.array([[1, 0, 0, 1, 1]], dtype)
    value, gradients = loss_and_gradients(
        losses.BinaryCrossEntropy(reduction="sum"), {"y": y}, {"targets": targets}
    )
    assert value == pytest.approx(200 + 30 * np.log(10), rel=1e-6)
    np.testing.assert_allclose(gradients["y"], [[0, 1, 0, -1, -1e30]], rtol=1e-5)


def test_probabilities_below_the_normal_numbers_of_float16() -> None:
    y = np.array([[3e-5, 1e-6]], np.float16)
    value, _ = loss_and_gradients(
        losses.BinaryCrossEntropy(), {"y": y}, {"targets": np.ones((1, 2), np.float16)}
    )
    assert value == pytest.approx(-np.log(y.astype(np.float64)).mean(), rel=1e-3)


def test_divergence_from_targets_that_are_0() -> None:
    y = np.log(np.array([[0.5, 0.25, 0.25]]))
    value, gradients = loss_and_gradients(
        losses.KullbackLeibler(reduction="sum"), {"y": y}, {"targets": np.array([[0, 1.0, 0]])}
    )
    assert value == pytest.approx(np.log(4))
    np.testing.assert_allclose(gradients["y"], [[0, -1, 0]])


@pytest.mark.slow
def test_embeddings_that_are_equal_or_0() -> None:
    a = np.array([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    for p in (1, 2, 2.5, np.inf):
        loss = losses.Triplet(anchor="a", positive="b", negative="c", p=p, eps=0)
        value, gradients = loss_and_gradients(loss, {"a": a, "b": a, "c": a}, {})
        assert value == 1
        assert all(np.all(gradient == 0) for gradient in gradients.values())
    for other in (
        losses.CosineEmbedding(first="a", second="b"),
        losses.InfoNCE(query="a", key="b"),
    ):
        feeds = {"targets": np.ones(3)} if isinstance(other, losses.CosineEmbedding) else {}
        value, gradients = loss_and_gradients(other, {"a": a, "b": a}, feeds)
        assert np.isfinite(value)
        assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


# ----------------------------------------------------------------------------------------- CTC


def all_alignments(y: Array, label: list[int]) -> float:
    """−log of the probabilities of all paths that collapse to a label, one by one."""
    p, total = softmax(y, 1), 0.0
    for path in np.ndindex(*[y.shape[1]] * len(y)):
        merged = [c for i, c in enumerate(path) if i == 0 or c != path[i - 1]]
        if [c for c in merged if c != 0] == label:
            total += np.prod(p[np.arange(len(y)), list(path)])
    return -np.log(total)


def ctc_feeds(labels: Any, inputs: Any, targets: Any) -> dict[str, Array]:
    given = {"labels": labels, "input_lengths": inputs, "target_lengths": targets}
    return {name: np.array(each, np.int64) for name, each in given.items()}


def as_log_probabilities(x: Any) -> Any:
    return op.LogSoftmax(x, axis=2)


@pytest.mark.quick(1)
@pytest.mark.parametrize("label", [[], [1], [2, 2], [1, 2, 1], [1, 1]])
def test_ctc_sums_over_all_alignments(label: list[int]) -> None:
    y = RNG.normal(size=(4, 1, 3))
    feeds = ctc_feeds([label + [0] * (3 - len(label))], [4], [len(label)])
    value, gradients = loss_and_gradients(
        losses.CTC(reduction="sum"), {"y": y}, feeds, as_log_probabilities
    )
    assert value == pytest.approx(all_alignments(y[:, 0], label), rel=1e-12)
    expected = numeric_gradient(lambda y: all_alignments(y[:, 0], label), {"y": y}, "y")
    np.testing.assert_allclose(gradients["y"], expected, atol=1e-8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_of_a_target_that_does_not_fit(zero_infinity: bool) -> None:
    y = np.zeros((2, 2, 3), np.float32)
    value, gradients = loss_and_gradients(
        losses.CTC(zero_infinity=zero_infinity),
        {"y": y},
        ctc_feeds([[1, 1], [1, 2]], [2, 2], [2, 2]),
        as_log_probabilities,
    )
    assert value == (pytest.approx(np.log(9) / 4) if zero_infinity else np.inf)
    assert np.all(gradients["y"][:, 0] == 0)
    # The one path 1, 2 has p = 1 at each time; (1/3 − 1) / 2 of the target / 2 of the batch.
    expected = np.array([[1 / 3, -2 / 3, 1 / 3], [1 / 3, 1 / 3, -2 / 3]]) / 4
    np.testing.assert_allclose(gradients["y"][:, 1], expected, rtol=1e-5)


def test_ctc_of_classes_that_cannot_be() -> None:
    y = np.array([[[0, -np.inf, 0]], [[-np.inf, 0, 0]], [[0, 0, 0]]], np.float32)
    feeds = ctc_feeds([[2]], [3], [1])
    value, gradients = loss_and_gradients(losses.CTC(), {"y": y}, feeds)
    # Blank or 2, then 2 (1 is out of place), then blank or 2: four paths of 1/2 · 1/2 · 1/3.
    assert value == pytest.approx(np.log(3), rel=1e-6)
    softmax = np.array([[1 / 2, 0, 1 / 2], [0, 1 / 2, 1 / 2], [1 / 3, 1 / 3, 1 / 3]])
    occupancy = np.array([[1 / 2, 0, 1 / 2], [0, 0, 1], [1 / 2, 0, 1 / 2]])
    np.testing.assert_allclose(gradients["y"][:, 0], softmax - occupancy, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch_first", [False, True])
def test_ctc_of_sizes_that_only_a_run_tells(batch_first: bool) -> None:
    y, labels, inputs, targets = _CTC
    feeds = {"labels": labels, "input_lengths": inputs, "target_lengths": targets}
    y = y if batch_first else y.swapaxes(0, 1)
    loss = losses.CTC(batch_first=batch_first)
    value, gradients = loss_and_gradients(loss, {"y": y}, feeds, symbolic=True)
    assert value == pytest.approx(loss_and_gradients(loss, {"y": y}, feeds)[0], rel=1e-12)
    # Something happens at each time: occupancies of the classes sum up to one, as softmaxes do.
    assert gradients["y"].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("inputs", "targets"), [([4], [1]), ([3], [3])])
def test_ctc_of_lengths_beyond_the_sizes(inputs: list[int], targets: list[int]) -> None:
    y = np.zeros((3, 1, 3), np.float32)
    model = build_training_model(
        shifted({"y": y}, as_log_probabilities), loss="CTC", optimizer="SGD"
    )
    session = TrainingSession(model)
    with pytest.raises(KernelError, match=r"node\. Name:'loss/Gather"):
        session.step({"x_y": y, **ctc_feeds([[1, 2]], inputs, targets)})


# -------------------------------------------------------------------------------- wrong arguments

BAD: list[tuple[Callable[[], losses.Loss], str]] = [
    (lambda: losses.L1(reduction="none"), "L1: reduction must be 'mean' or 'sum', got 'none'"),
    (
        lambda: losses.KullbackLeibler(reduction="none"),
        "KullbackLeibler: reduction must be 'mean', 'batchmean' or 'sum', got 'none'",
    ),
    (
        lambda: losses.SoftmaxCrossEntropy(reduction="batchmean"),
        "SoftmaxCrossEntropy: reduction must be 'mean' or 'sum', got 'batchmean'",
    ),
    (
        lambda: losses.SoftmaxCrossEntropy(label_smoothing=1.5),
        "SoftmaxCrossEntropy: label_smoothing must be a finite number >= 0 and <= 1, got 1.5",
    ),
    (
        lambda: losses.SoftmaxCrossEntropy(label_smoothing="much"),  # type: ignore[arg-type]
        "label_smoothing must be a finite number >= 0 and <= 1, got 'much'",
    ),
    (
        lambda: losses.NegativeLogLikelihood(weights=(1, -2)),
        "NegativeLogLikelihood: weights must be one finite number >= 0 for each class, got (1, -2)",
    ),
    (
        lambda: losses.SoftmaxCrossEntropy(weights=2.0),  # type: ignore[arg-type]
        "weights must be one finite number >= 0 for each class, got 2.0",
    ),
    (
        lambda: losses.SoftmaxCrossEntropy(ignore_index=1.0),  # type: ignore[arg-type]
        "ignore_index must be an integer, got 1.0",
    ),
    (
        lambda: losses.BinaryCrossEntropy(weights=("a",)),
        "BinaryCrossEntropy: weights must be finite numbers >= 0, got ('a',)",
    ),
    (
        lambda: losses.BinaryCrossEntropyWithLogits(positive_weight=float("nan")),
        "positive_weight must be finite numbers >= 0, got nan",
    ),
    (lambda: losses.Huber(delta=0), "Huber: delta must be a finite number > 0, got 0"),
    (
        lambda: losses.SmoothL1(beta=-1),
        "SmoothL1: beta must be a finite number >= 0, got -1",
    ),
    (lambda: losses.Hinge(p=3), "Hinge: p must be 1 or 2, got 3"),
    (
        lambda: losses.Hinge(margin=float("inf")),
        "Hinge: margin must be a finite number, got inf",
    ),
    (
        lambda: losses.CosineEmbedding(first="a", second="b", margin=2),
        "CosineEmbedding: margin must be a finite number >= -1 and <= 1, got 2",
    ),
    (
        lambda: losses.CosineEmbedding("y", first="a", second="b"),
        (
            "CosineEmbedding: reads several tensors; instead of output='y', name them: first=…, "
            "second=…"
        ),
    ),
    (
        lambda: losses.InfoNCE(query="a", key=3),  # type: ignore[arg-type]
        "InfoNCE: key must be the name of a tensor of the model, got 3",
    ),
    (
        lambda: losses.Triplet(anchor="a", positive="b", negative="c", target="t"),
        "Triplet: compares tensors of the model and has no target; leave out target='t'",
    ),
    (
        lambda: losses.Triplet(anchor="a", positive="b", negative="c", p=0.5),
        "Triplet: p must be a number >= 1, got 0.5",
    ),
    (
        lambda: losses.Triplet(anchor="a", positive="b", negative="c", margin=0),
        "Triplet: margin must be a finite number > 0, got 0",
    ),
    (
        lambda: losses.Triplet(anchor="a", positive="b", negative="c", eps=-1),
        "Triplet: eps must be a finite number >= 0, got -1",
    ),
    (
        lambda: losses.InfoNCE(query="a", key="b", temperature=0),
        "InfoNCE: temperature must be a finite number > 0, got 0",
    ),
    (lambda: losses.CTC(blank=-1), "CTC: blank must be an integer >= 0, got -1"),
    (
        lambda: losses.CTC(input_lengths=[3]),
        "CTC: input_lengths must be the name of an input, got [3]",
    ),
    (
        lambda: losses.CTC(target_lengths=""),
        "CTC: target_lengths must be the name of an input, got ''",
    ),
    (
        lambda: losses.Focal(gamma=-1),
        "Focal: gamma must be a finite number >= 0, got -1",
    ),
    (
        lambda: losses.Focal(alpha=(1.0, 2.0)),
        (
            "Focal: without multiclass=True, alpha must be a finite number >= 0 and <= 1, got "
            "(1.0, 2.0)"
        ),
    ),
    (
        lambda: losses.Focal(multiclass=True, alpha=0.25),
        "Focal: alpha must be one finite number >= 0 for each class, got 0.25",
    ),
    (
        lambda: losses.Focal(axis=-1),
        "Focal: axis requires multiclass=True, got axis=-1; set multiclass=True or leave axis out",
    ),
    (
        lambda: losses.Dice(ignore_index=3),
        (
            "Dice: ignore_index requires multiclass=True, got ignore_index=3; set multiclass=True "
            "or leave"
        ),
    ),
    (
        lambda: losses.Dice(smooth=-1),
        "Dice: smooth must be a finite number >= 0, got -1",
    ),
    (
        lambda: losses.Distillation(teacher=["logits"]),
        "Distillation: teacher must be the name of an input, got ['logits']",
    ),
    (
        lambda: losses.Distillation(temperature=0),
        "Distillation: temperature must be a finite number > 0, got 0",
    ),
    (
        lambda: losses.Distillation(alpha=1),
        "Distillation: alpha must be a finite number >= 0 and < 1, got 1",
    ),
    (
        lambda: losses.Distillation(target="labels"),
        "Distillation: target='labels' is not read with alpha=0; set alpha > 0 or leave target out",
    ),
]


def test_arguments_that_make_no_sense() -> None:
    with all_violations() as check:
        for make, message in BAD:
            with check(message):
                with pytest.raises(ArgumentError) as raised:
                    make()
                assert str(raised.value).startswith("loss ")
                assert message in str(raised.value)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (losses.CTC(), Y, "loss CTC: 'y' must have shape (T, N, C) with C > blank = 0, got [6, 4]"),
        (
            losses.CTC(blank=5, batch_first=True),
            ROWS_LAST,
            "'y' must have shape (N, T, C) with C > blank = 5, got [2, 3, 4]",
        ),
        (
            losses.Dice(per_sample=True),
            Y,
            (
                "loss Dice: per_sample=True requires a tensor of shape (N, C, d1, …), but 'y' has "
                "shape [6, 4]"
            ),
        ),
        (
            losses.Dice(),
            Y[0],
            (
                "loss Dice: axis must be the class axis of 'y', which has shape [4], and not the "
                "first, got 1"
            ),
        ),
        (
            losses.Hinge(weights=(1, 2)),
            Y,
            "loss Hinge: weights must have one number for each of the 4 classes, got shape [2]",
        ),
        (
            losses.Focal(multiclass=True, alpha=(1, 2, 3)),
            Y,
            "loss Focal: alpha must have one number for each of the 4 classes, got shape [3]",
        ),
        (
            losses.BinaryCrossEntropy(weights=(1, 2)),
            Y,
            "Entropy: weights must broadcast to the shape of 'y', [6, 4], got shape [2]",
        ),
        (
            losses.BinaryCrossEntropyWithLogits(positive_weight=(1, 2, 3)),
            Y[:, :1],
            "BinaryCrossEntropyWithLogits: positive_weight must broadcast to the shape of",
        ),
        (
            losses.BinaryCrossEntropyWithLogits(weights=(((1,),),)),
            Y,
            "BinaryCrossEntropyWithLogits: weights must broadcast to the shape of",
        ),
    ],
)
def test_outputs_that_do_not_fit(loss: Any, y: Array, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        build_training_model(shifted({"y": y}), loss=loss, optimizer="SGD")
    assert message in str(raised.value)


def test_a_loss_of_several_tensors_has_no_defaults() -> None:
    expected = r"loss 'Triplet' reads several tensors; name them: ortops.losses.Triplet\("
    with pytest.raises(ArgumentError, match=expected):
        build_training_model(shifted({"y": Y}), loss="Triplet", optimizer="SGD")


@pytest.mark.parametrize(
    ("loss", "instead"),
    [
        (losses.BinaryCrossEntropyWithLogits(), "use SoftmaxCrossEntropy"),
        (losses.Focal(multiclass=False), "set multiclass=True"),
        (losses.Dice(axis=-1), "set multiclass=True"),
    ],
)
def test_independent_classes_are_not_those_of_a_softmax(loss: losses.Loss, instead: str) -> None:
    with pytest.raises(ModelError) as raised:
        build_training_model(
            shifted({"y": Y}, lambda x: op.Softmax(x, axis=-1)), loss=loss, optimizer="SGD"
        )
    assert str(raised.value) == (
        f"loss {loss.name}: 'Add_output' are the logits of a Softmax, whose classes are "
        f"mutually exclusive; {instead}, or name other logits with output="
    )


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("loss", "squash", "feeds", "formula"),
    [
        (
            losses.Dice(),
            op.Sigmoid,
            {"targets": MAP_SHARES},
            lambda y: dice(sigmoid(y), MAP_SHARES, 1, 2, (0, 2, 3)).mean(),
        ),
        (
            losses.Focal(multiclass=True),
            lambda x: op.Softmax(x, axis=1),
            {"labels": MAP_LABELS},
            lambda y: focal_labels(y, MAP_LABELS, 2).mean(),
        ),
        (
            losses.KullbackLeibler(reduction="sum", log_target=True),
            lambda x: op.Softmax(x, axis=1),
            {"targets": np.log(softmax(MAPS[::-1]))},
            lambda y: (softmax(MAPS[::-1]) * np.log(softmax(MAPS[::-1]) / softmax(y))).sum(),
        ),
        (
            losses.NegativeLogLikelihood(),
            lambda x: op.Softmax(x, axis=1),
            {"labels": MAP_LABELS},
            lambda y: -np.log(at(softmax(y), MAP_LABELS)).mean(),
        ),
        (
            losses.Distillation(temperature=2),
            lambda x: op.Softmax(x, axis=-1),
            {"teacher": MAPS[::-1].copy()},
            lambda y: distilled(y, MAPS[::-1], None, 2, 0).mean(),
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_ends_a_model_is_seen(
    loss: losses.Loss, squash: Any, feeds: dict[str, Array], formula: Callable[[Array], Any]
) -> None:
    value, gradients = loss_and_gradients(loss, {"y": MAPS}, feeds, squash)
    assert value == pytest.approx(formula(MAPS), rel=1e-12)
    expected = numeric_gradient(formula, {"y": MAPS}, "y")
    np.testing.assert_allclose(gradients["y"], expected, atol=1e-8)


@pytest.mark.quick(2)
@pytest.mark.parametrize("logit", [-30.0, -19.0, -5.0])
def test_a_step_and_evaluate_have_the_same_precision(logit: float) -> None:
    """onnxruntime's Sigmoid is 0 for these logits, whose loss was 100 in evaluate."""
    with Tape(name="confident") as tape:
        x = tape.input("x", np.float32, ["n", 1])
        tape.output(op.Sigmoid(x @ tape.initializer("w", np.ones((1, 1), np.float32))), "p")
    model = build_training_model(tape.model(), loss="BinaryCrossEntropy", optimizer="SGD")
    session = TrainingSession(model)
    feeds = {"x": np.float32([[logit]]), "targets": np.float32([[1]])}
    expected = np.log1p(np.exp(-logit))
    assert session.evaluate(feeds)["loss"] == pytest.approx(expected, rel=1e-6)
    assert session.step(feeds)["loss"] == pytest.approx(expected, rel=1e-6)
