"""What metrics take from the loss: the label to ignore, the classes' axis, the threshold."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import TrainingSession, losses
from ortops.metrics import TopK

RNG = np.random.default_rng


def session(dims: str, nodes: str, loss: Any, *shape: int) -> TrainingSession:
    """A model from x to y with the weights w."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[{dims}] x) => (float[{dims}] y) {{ {nodes} }}""")
    w = RNG(0).normal(size=shape).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    built = ortops.build_training_model(model, loss=loss, optimizer="SGD")
    return TrainingSession(built)


def f1_of(found: Any, labels: Any, classes: int) -> float:
    """The mean F1 of classes that occur, in plain numpy."""
    scores = []
    for each in range(classes):
        right = ((found == each) & (labels == each)).sum()
        either = (found == each).sum() + (labels == each).sum()
        if either:
            scores.append(2 * right / either)
    return float(np.mean(scores))


@pytest.mark.quick(1)
@pytest.mark.parametrize("ignored", [-1, -100, 2])
def test_ignored_labels_do_not_count(ignored: int) -> None:
    loss = losses.SoftmaxCrossEntropy(ignore_index=ignored)
    own = session("batch, 4", "y = MatMul(x, w)", loss, 4, 4)
    x, labels = RNG(1).normal(size=(40, 4)).astype(np.float32), RNG(2).integers(0, 4, 40)
    labels[::3] = ignored
    y, kept = own.predict({"x": x}, outputs="y"), labels != ignored
    found = own.evaluate(
        {"x": x, "labels": labels},
        metrics=["accuracy", "f1", "perplexity", TopK(2), "confusion_matrix"],
        batch_size=7,
    )
    best, right = y[kept].argmax(1), labels[kept]
    second = np.argsort(-y[kept], 1)[:, :2]
    assert found["accuracy"] == pytest.approx((best == right).mean())
    assert found["confusion_matrix"] == pytest.approx((best == right).mean())
    assert found["f1"] == pytest.approx(f1_of(best, right, 4))
    assert found["top_k"] == pytest.approx((second == right[:, None]).any(1).mean())
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("axis", [1, 2, -1])
def test_classes_are_along_the_axis_of_the_loss(axis: int) -> None:
    shape = (3, 5) if axis == 1 else (5, 3)
    dims = f"batch, {shape[0]}, {shape[1]}"
    own = session(dims, "y = Mul(x, w)", losses.SoftmaxCrossEntropy(axis=axis), *shape)
    x, labels = RNG(3).normal(size=(9, *shape)).astype(np.float32), RNG(4).integers(0, 3, (9, 5))
    best = own.predict({"x": x}, outputs="y").argmax(axis)
    found = own.evaluate({"x": x, "labels": labels}, metrics=["accuracy", "f1"], batch_size=4)
    assert found["accuracy"] == pytest.approx((best == labels).mean())
    assert found["f1"] == pytest.approx(f1_of(best, labels, 3))


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", ["MeanSquaredError", "BinaryCrossEntropy", "KullbackLeibler"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_one_hot_targets_of_a_softmax_are_classes(loss: str, axis: int) -> None:
    """As in Keras, whatever the loss is; metrics of numbers compare the numbers."""
    shape = (5, 3) if axis == -1 else (3, 5)
    nodes = f"a = Mul(x, w) y = Softmax<axis = {axis}>(a)"
    own = session(f"batch, {shape[0]}, {shape[1]}", nodes, loss, *shape)
    x, labels = RNG(3).normal(size=(9, *shape)).astype(np.float32), RNG(4).integers(0, 3, (9, 5))
    targets = np.moveaxis(np.eye(3, dtype=np.float32)[labels], -1, axis)
    y = own.predict({"x": x}, outputs="y")
    data = {"x": x, "targets": targets}
    found = own.evaluate(data, metrics=["accuracy", "f1", TopK(2), "mae"], batch_size=4)
    best = y.argmax(axis)
    assert found["accuracy"] == pytest.approx((best == labels).mean())
    assert found["f1"] == pytest.approx(f1_of(best, labels, 3))
    second = np.argsort(-np.moveaxis(y, axis, -1), -1)[..., :2]
    assert found["top_k"] == pytest.approx((second == labels[..., None]).any(-1).mean())
    if loss != "KullbackLeibler":  # it reads logarithms
        assert found["mae"] == pytest.approx(np.abs(y - targets).mean(), rel=1e-5)
    last = own.fit(data, metrics=["accuracy"], train_metrics=True, batch_size=9, progress=False)[-1]
    assert last["accuracy"] == found["accuracy"]
    named = own.evaluate(data, metrics={"y": ["accuracy"]})["accuracy_y"]
    best = own.predict({"x": x}, outputs="y").argmax(axis)
    assert named == pytest.approx((best == labels).mean())


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("loss", "nodes", "threshold"),
    [
        ("BinaryCrossEntropyWithLogits", "y = Mul(x, w)", 0.0),
        (losses.Focal(), "y = Mul(x, w)", 0.0),
        ("BinaryCrossEntropy", "a = Mul(x, w) y = Sigmoid(a)", 0.5),
        ("BinaryCrossEntropyWithLogits", "a = Mul(x, w) y = Sigmoid(a)", 0.5),
    ],
)
def test_answers_are_positive_above_the_threshold_of_the_loss(
    loss: Any, nodes: str, threshold: float
) -> None:
    own = session("batch, 4", nodes, loss, 4)
    x = RNG(5).normal(size=(30, 4)).astype(np.float32)
    targets = (RNG(6).random((30, 4)) > 0.6).astype(np.float32)
    positive = own.predict({"x": x}, outputs="y") > threshold
    found = own.evaluate(
        {"x": x, "targets": targets}, metrics=["accuracy", "precision", "recall"], batch_size=8
    )
    right = (positive & (targets > 0)).sum(0)  # of each question, whose scores are averaged
    assert found["accuracy"] == pytest.approx((positive == (targets > 0)).mean())
    assert found["precision"] == pytest.approx((right / positive.sum(0)).mean())
    assert found["recall"] == pytest.approx((right / targets.sum(0)).mean())


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("loss", "nodes", "targets"),
    [
        ("BinaryCrossEntropyWithLogits", "h = MatMul(x, w) y = Sigmoid(h)", "targets"),
        ("BinaryCrossEntropy", "h = MatMul(x, w) y = Sigmoid(h)", "targets"),
        (
            losses.SoftmaxCrossEntropy(probabilities=True),
            "h = MatMul(x, w) y = Softmax<axis = 1>(h)",
            "labels",
        ),
    ],
)
def test_errors_are_those_of_the_output(loss: Any, nodes: str, targets: str) -> None:
    """Not of the logits that the loss reads before it."""
    own = session("batch, 4", nodes, loss, 4, 4)
    x, y = (RNG(seed).normal(size=(40, 4)).astype(np.float32) for seed in (1, 2))
    y = np.exp(y) / np.exp(y).sum(1, keepdims=True)
    given = {"x": x, targets: y}
    errors = own.predict({"x": x}, outputs="y") - y
    names = ["mean_squared_error", "mean_absolute_error", "r2"]
    found = own.evaluate(given, metrics=names, batch_size=7)
    assert found["mean_squared_error"] == pytest.approx(np.square(errors).mean(), rel=1e-5)
    assert found["mean_absolute_error"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    variance = np.square(y - y.mean(0)).sum(0)
    assert found["r2"] == pytest.approx(1 - (np.square(errors).sum(0) / variance).mean(), rel=1e-4)
    if not isinstance(loss, str) or loss.endswith("WithLogits"):
        with pytest.raises(ortops.OrtopsError, match="a training step does not compute 'y'"):
            own.fit(given, metrics="r2", train_metrics=True)
