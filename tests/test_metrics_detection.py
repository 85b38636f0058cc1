"""Mean average precision: by hand, and next to pycocotools."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

import ortops
from ortops import ArgumentError, OrtopsError, Tape, TrainingSession, build_training_model, losses
from ortops.metrics import MeanAveragePrecision

Array = np.ndarray[Any, Any]

RNG = np.random.default_rng(0)


def detections(rows: list[list[list[float]]]) -> Array:
    """Images of detections, filled up with rows of zeros."""
    most = max(len(row) for row in rows)
    return np.array([[*row, *[[0.0] * 6] * (most - len(row))] for row in rows])


def test_by_hand() -> None:
    """Two objects and three detections: right, wrong, right.

    Precisions are 1, ½ and ⅔ at the recalls ½, ½ and 1, so that the best precision is 1 for the 51
    recalls up to ½, and ⅔ for the other 50.
    """
    found = detections(
        [
            [[0, 0, 10, 10, 0.9, 0], [20, 20, 30, 30, 0.8, 0]],
            [[5, 5, 15, 15, 0.7, 0]],
        ]
    )
    wanted = np.array([[[0.0, 0, 0, 10, 10]], [[0, 5, 5, 15, 15]]])
    metric = MeanAveragePrecision(layout="detections", box_format="xyxy")
    metric.update(found, wanted)
    assert metric.result() == pytest.approx((51 + 50 * 2 / 3) / 101)
    one_by_one = MeanAveragePrecision(layout="detections", box_format="xyxy")
    for row in (0, 1):
        one_by_one.update(found[row : row + 1], wanted[row : row + 1])
    assert one_by_one.result() == metric.result()


def test_an_object_is_found_once() -> None:
    """The second detection of an object is wrong, and an object of another class is not found."""
    found = detections([[[0, 0, 10, 10, 0.9, 1], [0, 0, 10, 10, 0.8, 1]]])
    wanted = np.array([[[1.0, 0, 0, 10, 10], [0, 0, 0, 10, 10], [0, 0, 0, 0, 0]]])
    metric = MeanAveragePrecision(layout="detections", box_format="xyxy")
    metric.update(found, wanted)
    np.testing.assert_array_equal(metric.per_class(), [0, 1])
    assert metric.result() == 0.5
    metric.update(found[:, 1:], np.array([[[1.0, 40, 40, 50, 50]]]))  # missed in another image
    assert metric.per_class()[1] == pytest.approx(51 / 101)


def test_nothing() -> None:
    metric = MeanAveragePrecision()
    assert np.isnan(metric.result())
    metric.update(np.zeros((2, 6, 4)), np.zeros((2, 3, 5)))
    metric.update(np.zeros((2, 6, 4)), np.zeros((2, 0, 5)))
    assert np.isnan(metric.result())
    assert np.isnan(metric.at(0.5))


def coco(found: list[Array], wanted: Array, classes: int) -> tuple[float, float, Array]:
    """The mean, that at an IoU of 0.5, and those of the classes, by pycocotools.

    Args:
        found: x1, y1, x2, y2, score and class of detections, image by image.
        wanted: Class, x1, y1, x2, y2 of objects (N, M, 5); zeros do not count.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    objects = []
    for image, rows in enumerate(wanted):
        for label, *box in rows:
            if box[2] > box[0]:
                size = [box[2] - box[0], box[3] - box[1]]
                one = {"bbox": [*box[:2], *size], "area": size[0] * size[1], "iscrowd": 0}
                objects.append(
                    {**one, "id": len(objects) + 1, "image_id": image, "category_id": int(label)}
                )
    results = [
        {"image_id": image, "category_id": int(row[5]), "score": float(row[4])}
        | {"bbox": [*row[:2].tolist(), *(row[2:4] - row[:2]).tolist()]}
        for image, rows in enumerate(found)
        for row in rows
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": [{"id": image} for image in range(len(wanted))],
            "annotations": objects,
            "categories": [{"id": label} for label in range(classes)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    precision = evaluation.eval["precision"][:, :, :, 0, 2]  # thresholds, recalls, classes
    per_class = np.where(precision[0, 0] < 0, np.nan, precision.mean(axis=(0, 1)))
    return evaluation.stats[0], evaluation.stats[1], per_class


def scene(rng: np.random.Generator, images: int, classes: int) -> tuple[list[Array], Array]:
    """Detections near objects, of all kinds of quality, and objects without any."""
    wanted = np.zeros((images, 6, 5))
    found = []
    for image in range(images):
        count = rng.integers(0, 6)
        low = rng.uniform(0, 60, (count, 2))
        boxes = np.concatenate([low, low + rng.uniform(8, 40, (count, 2))], axis=1)
        labels = rng.integers(0, classes - 1, count)  # the last class has no object
        wanted[image, :count] = np.concatenate([labels[:, None], boxes], axis=1)
        rows = []
        for label, box in zip(labels, boxes, strict=True):
            for _ in range(rng.integers(0, 4)):
                kind = label if rng.random() < 0.8 else rng.integers(0, classes)
                moved = box + rng.normal(size=4) * rng.choice([0.3, 2.0, 6.0])
                rows.append([*np.sort(moved[::2]), *np.sort(moved[1::2]), rng.random(), kind])
        rows = [[r[0], r[2], r[1], r[3], *r[4:]] for r in rows]
        found.append(np.array(rows).reshape(-1, 6))
    return found, wanted


@pytest.mark.quick(2)
@pytest.mark.optional("pycocotools", "compare")
@pytest.mark.parametrize("seed", range(3))
def test_it_is_that_of_pycocotools(seed: int) -> None:
    found, wanted = scene(np.random.default_rng(seed), 30, 4)
    mean, at_half, per_class = coco(found, wanted, 4)
    assert 0.05 < mean < at_half < 0.95
    metric = MeanAveragePrecision(layout="detections", box_format="xyxy")
    padded = detections([rows.tolist() for rows in found])
    for start in range(0, 30, 7):
        metric.update(padded[start : start + 7], wanted[start : start + 7])
    assert metric.result() == pytest.approx(mean, rel=1e-9)
    assert metric.at(0.5) == pytest.approx(at_half, rel=1e-9)
    np.testing.assert_allclose(metric.per_class(), per_class[: len(metric.per_class())], rtol=1e-9)


@pytest.mark.optional("pycocotools", "compare")
def test_no_more_than_a_hundred_detections_of_a_class_count() -> None:
    found = np.zeros((1, 150, 6))
    found[0, :, :4] = [0, 0, 5, 5]
    found[0, 120, :4] = [50, 50, 60, 60]
    found[0, :, 4] = np.linspace(0.9, 0.1, 150)
    found[0, 149, :4] = [50, 50, 60, 60]
    wanted = np.array([[[0.0, 50, 50, 60, 60]]])
    for limit in (100, 130):
        metric = MeanAveragePrecision(layout="detections", box_format="xyxy", max_detections=limit)
        metric.update(found, wanted)
        expected = coco([found[0]], wanted, 1)[0] if limit == 100 else 1 / 121
        assert metric.result() == pytest.approx(expected)


def test_weights_count_images_several_times() -> None:
    found, wanted = scene(np.random.default_rng(4), 20, 3)
    padded = detections([rows.tolist() for rows in found])
    weights = np.random.default_rng(0).integers(0, 4, 20)
    weighted, repeated = (
        MeanAveragePrecision(layout="detections", box_format="xyxy") for _ in range(2)
    )
    weighted.update(padded, wanted, sample_weight=weights.astype(np.float32))
    repeated.update(np.repeat(padded, weights, 0), np.repeat(wanted, weights, 0))
    assert 0 < repeated.result() < 1
    assert weighted.result() == pytest.approx(repeated.result(), rel=1e-9)


# ------------------------------------------------------------------ predictions of a detector


def suppressed(boxes: Array, scores: Array, limit: float) -> list[list[float]]:
    """The detections that are left of one image, class by class, in loops."""
    left = []
    for label, own in enumerate(scores):
        kept: list[int] = []
        for point in np.argsort(-own, kind="stable"):
            x1, y1, x2, y2 = boxes[:, point]
            for other in kept:
                u1, v1, u2, v2 = boxes[:, other]
                shared = max(min(x2, u2) - max(x1, u1), 0) * max(min(y2, v2) - max(y1, v1), 0)
                both = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared
                if shared > limit * both:
                    break
            else:
                kept.append(int(point))
        left += [[*boxes[:, point], own[point], label] for point in kept]
    return left


@pytest.mark.parametrize("form", ["xyxy", "yxyx", "xywh", "cxcywh"])
@pytest.mark.parametrize("axis", [1, 2])
def test_predictions_are_suppressed(form: str, axis: int) -> None:
    rng = np.random.default_rng(1)
    low = rng.uniform(0, 40, (3, 2, 50))
    boxes = np.concatenate([low, low + rng.uniform(10, 30, (3, 2, 50))], axis=1)
    scores = rng.random((3, 2, 50)) + 0.01
    wanted = np.zeros((3, 4, 5))
    for image in range(3):  # objects near some of the predictions
        points = rng.permutation(50)[:3]
        wanted[image, :3, 0] = rng.integers(0, 2, 3)
        wanted[image, :3, 1:] = boxes[image][:, points].T + rng.normal(size=(3, 4))
    left = detections([suppressed(b, s, 0.4) for b, s in zip(boxes, scores, strict=True)])
    expected = MeanAveragePrecision(layout="detections", box_format="xyxy")
    expected.update(left, wanted)
    assert 0.005 < expected.result() < 1
    corners = [boxes, np.moveaxis(wanted[..., 1:], 2, 1)]
    for number, each in enumerate(corners):
        if form == "yxyx":
            corners[number] = each[:, [1, 0, 3, 2]]
        if form in ("xyxy", "yxyx"):
            continue
        each[:, 2:] -= each[:, :2]
        if form == "cxcywh":
            each[:, :2] += each[:, 2:] / 2
    metric = MeanAveragePrecision(box_format=form, suppression=0.4, axis=axis)
    outputs = np.concatenate([corners[0], scores], axis=1)
    targets = np.concatenate([wanted[..., :1], np.moveaxis(corners[1], 1, 2)], axis=2)
    metric.update(outputs if axis == 1 else np.moveaxis(outputs, 1, 2), targets)
    assert metric.result() == pytest.approx(expected.result())
    np.testing.assert_allclose(metric.per_class(), expected.per_class())


@pytest.mark.slow
def test_in_a_session_it_reads_what_the_loss_reads() -> None:
    """Predictions that equal the objects: one point each, and the format is that of the loss."""
    rng = np.random.default_rng(2)
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 6, 5])
        tape.output(x * tape.initializer("w", np.ones((6, 1), np.float32)), "y")
    loss = losses.TaskAligned(strides=[8, 16], box_format="xywh", sample_weight="weight")
    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="Adam"))
    targets = np.zeros((4, 2, 5), np.float32)
    targets[:, 0] = [1, 2, 3, 10, 12]
    x = np.full((4, 6, 5), -9, np.float32)
    x[:, :4] = rng.uniform(0, 2, (4, 4, 5))
    x[:, :4, 2], x[:, 5, 2] = [2, 3, 10, 12], [0.9, 0.7, 0.5, 0.6]
    x[2, 0, 2] += 100  # not found in one of the images
    metric, data = MeanAveragePrecision(name="map"), {"x": x, "targets": targets}
    found = session.evaluate(data, metrics=[metric], batch_size=3)
    # Right three times, then wrong, as the score of the wrong one is the lowest.
    assert found["map"] == pytest.approx(76 / 101)
    assert metric.at(0.5) == pytest.approx(76 / 101)
    np.testing.assert_array_equal(np.isnan(metric.per_class()), [True, False])
    weights = np.array([1, 1, 0, 1])
    found = session.evaluate(data, metrics=["mAP"], sample_weight=weights)
    assert found["mAP"] == 1
    history = session.fit(
        data,
        validation=data,
        metrics=["mean_average_precision"],
        epochs=1,
        batch_size=4,
        progress=False,
    )
    assert 0 <= history[0]["validation_mean_average_precision"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"box_format": "ltrb"}, "box_format must be .*got 'ltrb'"),
        ({"layout": "raw"}, "layout must be .*got 'raw'"),
        ({"iou_thresholds": []}, r"iou_thresholds must be .*got \[\]"),
        ({"iou_thresholds": [0.0]}, "iou_thresholds must be .*got 0.0"),
        ({"suppression": 2}, "suppression must be .*got 2"),
        ({"candidates": 0}, "candidates must be an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MeanAveragePrecision(**arguments)


def test_what_does_not_fit() -> None:
    metric, one = MeanAveragePrecision(), np.array([[[0.0, 1, 1, 2, 2]]])
    with pytest.raises(OrtopsError, match=r"targets must have shape \(N, objects, 5\).*\[1, 4\]"):
        metric.update(np.zeros((1, 6, 3)), np.zeros((1, 4)))
    with pytest.raises(OrtopsError, match=r"outputs must have shape \(N, 4 \+ classes, points\)"):
        metric.update(np.zeros((1, 3, 6)), one)
    with pytest.raises(OrtopsError, match=r"labels must be from 0 to 1, got 2"):
        metric.update(np.zeros((1, 6, 3)), one + 2)
    with pytest.raises(OrtopsError, match="outputs contain NaN"):
        metric.update(np.full((1, 6, 3), np.nan), one)
    with pytest.raises(OrtopsError, match=r"outputs must have shape \(N, detections, 6\)"):
        MeanAveragePrecision(layout="detections").update(np.zeros((1, 6, 3)), one)
    with pytest.raises(ArgumentError, match=r"must be one of iou_thresholds, .*got 0\.51"):
        metric.at(0.51)
    with pytest.raises(ArgumentError, match=r"MeanAveragePrecision\(iou_thresholds=\[0\.5\]\)"):
        ortops.metrics.resolve("mAP50")
