"""Models trained with CTC: what predict needs, metrics, and logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import DivergedError, TrainingSession
from ortops.losses import CTC
from ortops.metrics import EditDistance

TIMES, ROWS, CLASSES = 9, 4, 5


def parsed(last: str, dims: str = "time, batch", opset: int = 21) -> onnx.ModelProto:
    """A model of [time, batch, 4] with random weights, and a last node that computes y from a."""
    numbers = np.random.default_rng(0).standard_normal(4 * CLASSES).round(2).tolist()
    weights = ", ".join(map(str, numbers))
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]>
    g (float[{dims}, 4] x) => (float[{dims}, {CLASSES}] y) <float[4, {CLASSES}] w = {{{weights}}}>
    {{ a = MatMul(x, w) {last} }}""")


LOG_SOFTMAX = "y = LogSoftmax<axis=2>(a)"


def session(model: onnx.ModelProto, **loss: Any) -> TrainingSession:
    return TrainingSession(ortops.build_training_model(model, loss=CTC(**loss), optimizer="SGD"))


def batch(blank: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    classes = [each for each in range(CLASSES) if each != blank]
    return {
        "x": draw.standard_normal((TIMES, ROWS, 4), np.float32),
        "labels": draw.choice(classes, (ROWS, 3)),
        "input_lengths": np.array([9, 8, 9, 7]),
        "target_lengths": np.array([3, 2, 1, 3]),
    }


def rate(scores: Any, given: dict[str, Any], blank: int) -> float:
    """The edit distance per label in plain Python, of scores (T, N, C)."""
    edits = labels = 0
    for row in range(ROWS):
        path = scores[: given["input_lengths"][row], row].argmax(-1).tolist()
        merged = [c for n, c in enumerate(path) if (n == 0 or path[n - 1] != c) and c != blank]
        target = given["labels"][row, : given["target_lengths"][row]].tolist()
        table = [[i + j for j in range(len(target) + 1)] for i in range(len(merged) + 1)]
        for i, one in enumerate(merged, 1):
            for j, other in enumerate(target, 1):
                ways = table[i - 1][j] + 1, table[i][j - 1] + 1
                table[i][j] = min(*ways, table[i - 1][j - 1] + (one != other))
        edits, labels = edits + table[-1][-1], labels + len(target)
    return edits / labels


@pytest.mark.nightly(4)
@pytest.mark.quick(1)
@pytest.mark.parametrize("last", [LOG_SOFTMAX, "y = Softmax<axis=2>(a)", "y = Identity(a)"])
@pytest.mark.parametrize("outputs", [None, "y", "a"])
def test_predict_needs_no_labels(last: str, outputs: str | None) -> None:
    given = {"x": batch()["x"]}
    for opset in (17, 21):
        found = session(parsed(last, opset=opset)).predict(given, outputs=outputs, batch_size=3)
        found = found if isinstance(found, np.ndarray) else found["y"]
        assert found.shape == (TIMES, ROWS, CLASSES)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("blank", [0, 2, CLASSES - 1])
@pytest.mark.parametrize("first", [False, True])
def test_the_edit_distance_has_the_arguments_of_the_loss(blank: int, *, first: bool) -> None:
    given = batch(blank)
    model = parsed(LOG_SOFTMAX, "batch, time" if first else "time, batch")
    names = {"input_lengths": "frames", "target_lengths": "letters"}
    made = session(model, blank=blank, batch_first=first, **names)
    fed = {names.get(name, name): array for name, array in given.items()}
    fed["x"] = np.swapaxes(given["x"], 0, 1) if first else given["x"]
    y = made.predict({"x": fed["x"]}, outputs="y")
    y = np.swapaxes(y, 0, 1) if first else y
    found = made.evaluate(fed, metrics=["edit_distance"], batch_size=3)
    assert found["edit_distance"] == pytest.approx(rate(y, given, blank))
    other = (blank + 1) % CLASSES  # what the metric was given counts
    metric = EditDistance(blank=other, name="other")
    assert made.evaluate(fed, metrics=[metric])["other"] != found["edit_distance"]
    assert metric.blank == other


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("last", ["y = Identity(a)", LOG_SOFTMAX, "y = Softmax<axis=2>(a)"])
def test_logits_are_normalized(last: str) -> None:
    """The loss of raw scores fell below 0, and training followed it down."""
    import torch

    made = session(parsed(last))
    given = batch()
    y = torch.tensor(made.predict({"x": given["x"]}, outputs="a")).double().log_softmax(2)
    labels, times, letters = (torch.tensor(array) for array in list(given.values())[1:])
    expected = float(torch.nn.CTCLoss()(y, labels, times, letters))
    assert made.evaluate([given])["loss"] == pytest.approx(expected, rel=1e-5)
    losses = made.fit([given], epochs=30, progress=False)
    assert all(0 < record["loss"] < 10 for record in losses)


def test_fit_stops_at_a_loss_that_cannot_be() -> None:
    made = TrainingSession(
        ortops.build_training_model(
            parsed("y = Identity(a)"),
            loss=ortops.losses.NegativeLogLikelihood(axis=2),
            optimizer=ortops.optimizers.SGD(1.0),
        )
    )
    given = {"x": batch()["x"], "labels": np.random.default_rng(0).integers(0, 5, (TIMES, ROWS))}
    with pytest.raises(DivergedError, match="loss NegativeLogLikelihood cannot be negative") as e:
        made.fit([given], epochs=50, progress=False)
    assert "such as scores in place of log-probabilities" in str(e.value)
    made.fit([given], epochs=3, progress=False, stop_on_nan=False)


def test_a_loss_of_the_user_may_be_negative() -> None:
    def loss(y: ortops.Tensor) -> ortops.Tensor:
        return ortops.op.ReduceMean(y, keepdims=0) - 100.0

    class Reward(ortops.losses.L1):
        def elements(self, *tensors: Any, **named: Any) -> ortops.Tensor:
            return tensors[0] - 100.0

    x = batch()["x"]
    for each in (loss, Reward("y"), -1.0 * ortops.losses.MeanSquaredError("y")):
        made = TrainingSession(
            ortops.build_training_model(parsed(LOG_SOFTMAX), loss=each, optimizer="SGD")
        )
        targets = np.ones((TIMES, ROWS, CLASSES), np.float32)
        given = {n: {"x": x, "targets": targets}[n] for n in made.inputs}
        assert made.fit([given], progress=False)[-1]["loss"] < -1
