"""Models trained with CTC: what predict needs, metrics, and logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import TrainingSession
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


@pytest.mark.parametrize("last", [LOG_SOFTMAX, "y = Softmax<axis=2>(a)", "y = Identity(a)"])
@pytest.mark.parametrize("outputs", [None, "y", "a"])
def test_predict_needs_no_labels(last: str, outputs: str | None) -> None:
    given = {"x": batch()["x"]}
    for opset in (17, 21):
        found = session(parsed(last, opset=opset)).predict(given, outputs=outputs, batch_size=3)
        found = found if isinstance(found, np.ndarray) else found["y"]
        assert found.shape == (TIMES, ROWS, CLASSES)


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
