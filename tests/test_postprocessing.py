"""Detectors that end in NonMaxSuppression, cut before it and trained."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from ortops import ModelError, Tape, TrainingSession, UnsupportedError, losses, op
from ortops.surgery import before_postprocessing, free_batch, name_output

POINTS, CLASSES = 20, 3  # a grid of 4 · 4 cells of size 8, and one of 2 · 2 of size 16


def corners(found: Any) -> Any:
    """Boxes (N, A, 4) with corners of centers and sizes (N, 4, A), as people write it."""
    centers, sizes = op.Split(found, axis=1, num_outputs=2)
    half = sizes * np.float32(0.5)
    return op.Transpose(op.Concat(centers - half, centers + half, axis=1), perm=[0, 2, 1])


def suppressed(tape: Tape, boxes: Any, scores: Any, name: str = "detections") -> None:
    """Ends a model with the boxes that are left, and their classes."""
    limits = (np.array([50]), np.float32([0.5]), np.float32([0.1]))
    selected = op.NonMaxSuppression(boxes, scores, *limits)
    points = op.Gather(selected, np.array(2), axis=1)
    row = op.Gather(boxes, np.array(0), axis=0)
    tape.output(op.Gather(row, points, axis=0), name)
    tape.output(op.Gather(selected, np.array(1), axis=1), f"{name}_classes")


def detector(form: str = "joined") -> onnx.ModelProto:
    """A detector of features x [1, 8, A]."""
    with Tape(opset=18) as tape:
        x = tape.input("x", np.float32, [1, 8, POINTS])
        # From most weights, training ends elsewhere: the features are random.
        drawn = 0.3 * np.random.default_rng(1).normal(size=(4 + CLASSES, 8))
        weight = tape.initializer("w", drawn.astype(np.float32))
        raw = op.MatMul(weight, x)
        boxes = op.Mul(op.Sigmoid(raw[:, :4]), np.full((4, 1), 32, np.float32))
        scores = op.Sigmoid(raw[:, 4:])
        if form == "apart":
            suppressed(tape, corners(boxes), scores)
            return tape.model()
        joined = op.Concat(boxes, scores, axis=1)
        joined.value.name = "joined"
        moved = op.Transpose(joined, perm=[0, 2, 1])
        back = op.Transpose(moved, perm=[0, 2, 1])
        suppressed(tape, corners(back[:, :4]), back[:, 4:])
        if form == "two":
            suppressed(tape, corners(back[:, :4]), op.ReduceMax(back[:, 4:], [1]), "any")
        tape.output(op.ReduceMean(raw, [1, 2], keepdims=0), "average")
    return tape.model()


def targets(rows: int = 1) -> np.ndarray[Any, Any]:
    found = np.zeros((rows, 3, 5), np.float32)
    found[:, 0], found[:, 1] = [1, 10, 10, 12, 14], [2, 22, 20, 14, 10]
    return found


def features(rows: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).normal(size=(rows, 8, POINTS)).astype(np.float32)


def run(model: onnx.ModelProto, *names: str) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(list(names) or None, {"x": features()})


@pytest.mark.parametrize("form", ["joined", "two"])
def test_the_joined_predictions_become_the_first_output(
    form: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = detector(form)
    before = model.SerializeToString()
    with caplog.at_level(logging.WARNING, "ortops"):
        cut = before_postprocessing(model)
    assert model.SerializeToString() == before
    onnx.checker.check_model(cut, full_check=True)
    assert [value.name for value in cut.graph.output] == ["joined", "average"]
    assert not {"NonMaxSuppression", "Transpose"} & {node.op_type for node in cut.graph.node}
    (said,) = [record.getMessage() for record in caplog.records]
    assert "ends before NonMaxSuppression node" in said
    assert f"'joined' [1, {4 + CLASSES}, {POINTS}]" in said
    assert "in place of 'detections', 'detections_classes'" in said
    assert cut.opset_import[0].version == 18
    expected = run(name_output(model, "joined"), "joined")
    np.testing.assert_array_equal(run(cut, "joined"), expected)


def test_boxes_and_scores_that_are_never_joined() -> None:
    model = detector("apart")
    cut = before_postprocessing(model)
    boxes, scores = (value.name for value in cut.graph.output)
    (suppression,) = [n for n in model.graph.node if n.op_type == "NonMaxSuppression"]
    assert [boxes, scores] == list(suppression.input[:2])
    assert [each.shape for each in run(cut)] == [(1, POINTS, 4), (1, CLASSES, POINTS)]


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["joined", "apart"])
def test_trained_and_written_back(form: str, caplog: pytest.LogCaptureFixture) -> None:
    """The loss falls, and the complete file finds the objects afterwards."""
    model = detector(form)
    cut = free_batch(before_postprocessing(model))
    loss = losses.TaskAligned(strides=[8, 16])
    goal = targets()
    if form == "apart":
        boxes, scores = (value.name for value in cut.graph.output)
        loss = losses.TaskAligned(boxes, scores=scores, strides=[8, 16], box_format="xyxy")
        goal[..., 1:3] -= goal[..., 3:] / 2
        goal[..., 3:] += goal[..., 1:3]
    session = TrainingSession(
        ortops.build_training_model(cut, loss=loss, optimizer=ortops.optimizers.Adam(0.05))
    )
    assert "the logits before Sigmoid node" in caplog.text
    data = {"x": features(), "targets": goal}
    before = session.evaluate(data)["loss"]
    session.fit(data, epochs=150, batch_size=1, progress=False)
    assert session.evaluate(data)["loss"] < before / 2
    complete = session.inference_model(original=model)
    assert [value.name for value in complete.graph.output][:2] == [
        "detections",
        "detections_classes",
    ]
    found, classes = run(complete, "detections", "detections_classes")
    assert {1, 2} <= set(classes.tolist())
    for kind, expected in ((1, [10, 10]), (2, [22, 20])):
        center = found[classes.tolist().index(kind)].reshape(2, 2).mean(axis=0)
        np.testing.assert_allclose(center, expected, atol=3)


def test_the_loss_tells_of_the_cut() -> None:
    with pytest.raises(ModelError, match=r"ortops\.surgery\.before_postprocessing"):
        ortops.build_training_model(detector(), loss="TaskAligned", optimizer="Adam")


def test_what_cannot_be_cut() -> None:
    cut = before_postprocessing(detector())
    with pytest.raises(ModelError, match="has no NonMaxSuppression, so nothing is cut"):
        before_postprocessing(cut)
    trainable = ortops.build_training_model(
        cut, loss=losses.TaskAligned(strides=[8, 16]), optimizer="SGD"
    )
    with pytest.raises(ModelError, match="cut the model before build_training_model"):
        before_postprocessing(trainable)
    with Tape(opset=18) as tape:
        pairs = [
            (tape.input(f"b{n}", np.float32, [1, 9, 4]), tape.input(f"s{n}", np.float32, [1, 2, 9]))
            for n in range(2)
        ]
        for number, (boxes, scores) in enumerate(pairs):
            suppressed(tape, op.Neg(boxes), op.Neg(scores), f"d{number}")
    with pytest.raises(UnsupportedError, match="do not read parts of one tensor; name"):
        before_postprocessing(tape.model())
    inner = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
    f (float[1, 9, 4] b, float[1, 2, 9] s, bool c) => (int64[n, 3] y) {
        y = If (c) <
            then_branch = t () => (int64[n, 3] p) { p = NonMaxSuppression (b, s) },
            else_branch = e () => (int64[m, 3] q) { q = NonMaxSuppression (b, s) }
        >
    }""")
    with pytest.raises(UnsupportedError, match="NonMaxSuppression node 'p': it is inside a"):
        before_postprocessing(inner)
