"""Losses of boxes and of detectors, against the formulas of the papers in torch's float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from ortops import (
    ArgumentError,
    ModelError,
    Tape,
    TrainingSession,
    build_training_model,
    losses,
    op,
)
from tests.loss_models import Array, loss_and_gradients, value_and_count

RNG = np.random.default_rng(0)

# ------------------------------------------------------------------------- the formulas in torch


def corners(boxes: Any, box_format: str) -> Any:
    """The smaller and the larger corner of boxes with four numbers on the last axis."""
    import torch

    a, b = boxes[..., :2], boxes[..., 2:]
    if box_format == "yxyx":
        a, b = a.flip(-1), b.flip(-1)
    if box_format == "xywh":
        b = a + b
    elif box_format == "cxcywh":
        a, b = a - b / 2, a + b / 2
    return torch.minimum(a, b), torch.maximum(a, b)


def box_loss(name: str, boxes: Any, targets: Any, box_format: str = "xyxy") -> Any:
    """1 − GIoU or 1 − CIoU, with the names of the papers."""
    import torch

    (p_low, p_high), (g_low, g_high) = corners(boxes, box_format), corners(targets, box_format)
    p, g = (p_high - p_low).prod(-1), (g_high - g_low).prod(-1)
    i = (torch.minimum(p_high, g_high) - torch.maximum(p_low, g_low)).clamp(min=0).prod(-1)
    iou = i / (p + g - i)
    c = torch.maximum(p_high, g_high) - torch.minimum(p_low, g_low)
    if name == "GIoU":
        return 1 - (iou - (c.prod(-1) - (p + g - i)) / c.prod(-1))
    rho = ((p_low + p_high) / 2 - (g_low + g_high) / 2).square().sum(-1)
    angles = [
        torch.atan2(*(high - low).unbind(-1)) for low, high in ((p_low, p_high), (g_low, g_high))
    ]
    v = 4 / math.pi**2 * (angles[0] - angles[1]) ** 2
    alpha = (v / (1 - iou + v)).detach()
    return 1 - iou + rho / c.square().sum(-1) + alpha * v


def random_boxes(shape: tuple[int, ...], box_format: str) -> Array:
    low = RNG.uniform(0, 10, (*shape, 2))
    size = RNG.uniform(1, 10, (*shape, 2))
    second = low + size if box_format in ("xyxy", "yxyx") else size
    return np.concatenate([low, second], axis=-1)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.torch
@pytest.mark.parametrize(
    ("box_format", "axis", "dtype"),
    [
        *(("xyxy", -1, np.float64), ("xywh", -1, np.float64), ("cxcywh", -1, np.float64)),
        *(("cxcywh", 1, np.float32), ("xyxy", -1, np.float32), ("yxyx", -1, np.float64)),
    ],
)
@pytest.mark.parametrize("name", ["GIoU", "CIoU"])
def test_box_losses_are_those_of_the_papers(
    name: str, box_format: str, axis: int, dtype: Any
) -> None:
    """Boxes that overlap and boxes apart; two targets of 14 are padding."""
    import torch

    y, t = (random_boxes((2, 7), box_format).astype(dtype) for _ in range(2))
    t[0, 3], t[1, 1] = 0, 0
    y[0, 0, :2] += 30  # apart
    counted = torch.ones(2, 7, dtype=torch.bool)
    counted[0, 3] = counted[1, 1] = False
    boxes = torch.tensor(y.astype(np.float64), requires_grad=True)
    goals = torch.tensor(t.astype(np.float64))
    expected = box_loss(name, boxes[counted], goals[counted], box_format).mean()
    expected.backward()
    loss = getattr(losses, name)(box_format=box_format, axis=axis)
    y, t = (np.ascontiguousarray(np.moveaxis(each, -1, axis)) for each in (y, t))
    value, gradients = loss_and_gradients(loss, {"y": y}, {"targets": t})
    tolerance: Any = {"rtol": 1e-10} if dtype == np.float64 else {"rtol": 2e-5, "atol": 1e-6}
    np.testing.assert_allclose(value, expected.item(), **tolerance)
    found = np.moveaxis(gradients["y"], axis, -1)
    np.testing.assert_allclose(found, boxes.grad.numpy(), **{"atol": 1e-12, **tolerance})


@pytest.mark.quick(1)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_giou_against_finite_differences(reduction: str) -> None:
    y, t = random_boxes((5,), "xyxy"), random_boxes((5,), "xyxy")
    loss = losses.GIoU(reduction=reduction)
    _, gradients = loss_and_gradients(loss, {"y": y}, {"targets": t})
    step = 1e-6 * np.random.default_rng(1).normal(size=y.shape)
    above, below = (value_and_count(loss, y + s * step, t)[0] for s in (1, -1))
    np.testing.assert_allclose((gradients["y"] * step).sum(), (above - below) / 2, rtol=1e-5)


DEGENERATE = {
    "a point at the origin": [0, 0, 0, 0],
    "a point inside": [2, 2, 2, 2],
    "a line": [1, 2, 3, 2],
    "the target": [1, 1, 3, 3],
    "corners swapped": [3, 3, 1, 1],
    "a border shared": [3, 1, 5, 3],
    "a corner shared": [3, 3, 5, 5],
    "far and huge": [1e6, -1e6, 2e6, 1e6],
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["GIoU", "CIoU"])
@pytest.mark.parametrize("target", [[1, 1, 3, 3], [0, 0, 0, 0], [1, 2, 3, 2]])
def test_degenerate_boxes_have_finite_gradients(name: str, dtype: Any, target: list[float]) -> None:
    y = np.array(list(DEGENERATE.values()), np.float64).clip(-6e4, 6e4).astype(dtype)
    t = np.tile(np.array(target, np.float64), (len(y), 1))
    fed = t.astype(np.float32 if dtype == np.float16 else dtype)
    value, gradients = loss_and_gradients(getattr(losses, name)(), {"y": y}, {"targets": fed})
    assert math.isfinite(value)
    assert np.isfinite(gradients["y"]).all()
    if target != [1, 1, 3, 3]:  # without an area, it does not count
        assert value == 0
        assert not gradients["y"].any()
    else:
        kinds = list(DEGENERATE)
        np.testing.assert_allclose(gradients["y"][kinds.index("the target")], 0, atol=1e-6)
        same = loss_and_gradients(getattr(losses, name)(), {"y": y[3:5]}, {"targets": fed[3:5]})[0]
        assert abs(same) < 1e-6  # both are the target


def test_boxes_need_four_numbers() -> None:
    with pytest.raises(ModelError, match=r"must have four numbers .* axis -1, got shape \[2, 5\]"):
        loss_and_gradients(losses.GIoU(), {"y": np.ones((2, 5))}, {"targets": np.ones((2, 5))})
    with pytest.raises(ArgumentError, match=r"box_format must be .*got 'ltrb'"):
        losses.CIoU(box_format="ltrb")


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["GIoU", "CIoU"])
def test_weights_of_boxes_and_parts_of_a_batch(name: str) -> None:
    y, t = random_boxes((6, 3), "xyxy"), random_boxes((6, 3), "xyxy")
    t[:2, 1:] = 0
    plain = getattr(losses, name)()
    whole, count = value_and_count(plain, y, t)
    parts = [value_and_count(plain, y[part], t[part]) for part in (slice(2), slice(2, None))]
    assert (count, [n for _, n in parts]) == (14, [2, 12])
    np.testing.assert_allclose(whole, sum(v * n for v, n in parts) / count, rtol=1e-12)
    weighted = getattr(losses, name)(sample_weight="w")
    w = np.array([2.0, 0, 1, 0, 0, 3])
    value, _ = loss_and_gradients(weighted, {"y": y}, {"targets": t, "w": w})
    repeated = np.repeat(np.arange(6), w.astype(int))
    expected, _ = value_and_count(plain, y[repeated], t[repeated])
    np.testing.assert_allclose(value, expected, rtol=1e-12)


# ---------------------------------------------------------------------- distribution focal loss


def focal_distribution(logits: Array, targets: Array) -> float:
    """The paper's formula, number by number; bins are on the last axis."""
    total, numbers = 0.0, targets.reshape(-1)
    for row, y in zip(logits.reshape(-1, logits.shape[-1]), numbers, strict=True):
        log_s = row - np.log(np.exp(row).sum())
        y = min(max(y, 0), len(row) - 1)
        i = min(int(y), len(row) - 2)
        total -= (i + 1 - y) * log_s[i] + (y - i) * log_s[i + 1]
    return total / numbers.size


@pytest.mark.quick(2)
@pytest.mark.parametrize("squash", [None, "Softmax"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_distribution_focal_loss(axis: int, squash: str | None) -> None:
    logits = RNG.normal(size=(3, 4, 5)) * 2
    targets = RNG.uniform(-0.5, 4.5, (3, 4))
    targets[0] = [0, 4, 2, 3.999]
    moved = np.ascontiguousarray(np.moveaxis(logits, -1, axis))
    loss = losses.DistributionFocal(axis=axis)
    end = None if squash is None else lambda x: op.Softmax(x, axis=axis)
    value, gradients = loss_and_gradients(loss, {"y": moved}, {"targets": targets}, end)
    np.testing.assert_allclose(value, focal_distribution(logits, targets), rtol=1e-10)
    step = np.random.default_rng(1).normal(size=logits.shape)
    change = focal_distribution(logits + 1e-6 * step, targets)
    change -= focal_distribution(logits - 1e-6 * step, targets)
    found = (np.moveaxis(gradients["y"], axis, -1) * step).sum()
    np.testing.assert_allclose(found, change / 2e-6, rtol=1e-6)


# ------------------------------------------------------------------------- task-aligned detection

STRIDES, SIZE, CLASSES = (8, 16), (32, 48), 3
POINTS = 4 * 6 + 2 * 3


def grid() -> tuple[Array, Array]:
    """The centers of the cells, and their sizes, written down cell by cell."""
    points, sizes = [], []
    for stride in STRIDES:
        for row, column in itertools.product(range(SIZE[0] // stride), range(SIZE[1] // stride)):
            points.append((stride * column + stride / 2, stride * row + stride / 2))
            sizes.append(stride)
    return np.array(points), np.array(sizes)


def plain_overlap(kind: str, box: Array, other: Array) -> float:
    """GIoU or CIoU of two boxes of sides, at least 0."""
    inner = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
    shared = max(inner[0], 0) * max(inner[1], 0)
    union = np.prod(box[2:] - box[:2]) + np.prod(other[2:] - other[:2]) - shared
    outer = np.maximum(box[2:], other[2:]) - np.minimum(box[:2], other[:2])
    if kind == "GIoU":
        return float(max(shared / union - (np.prod(outer) - union) / np.prod(outer), 0))
    apart = ((box[:2] + box[2:] - other[:2] - other[2:]) ** 2).sum() / 4
    angle, angle_ = (math.atan2(*(each[2:] - each[:2])) for each in (box, other))
    v = 4 / math.pi**2 * (angle - angle_) ** 2
    alpha = 0 if v == 0 else v / (1 - shared / union + v)
    return float(max(shared / union - apart / (outer**2).sum() - alpha * v, 0))


def assign(
    boxes: Array, scores: Array, objects: Array, top_k: int, alpha: float, beta: float, kind: str
) -> list[tuple[int, int, float]]:
    """The assignment of one image in loops: (point, object, target score) for each point.

    Args:
        boxes: The sides of predicted boxes (A, 4).
        scores: Probabilities (C, A).
        objects: Classes and sides (M, 5).
    """
    points, _ = grid()
    wanted: dict[int, list[tuple[float, int, float]]] = {}
    for number, (label, *sides) in enumerate(objects):
        left, top, right, bottom = sides
        if right <= left or bottom <= top or label < 0:
            continue
        found = []
        for a, (x, y) in enumerate(points):
            if left < x < right and top < y < bottom:
                u = plain_overlap(kind, np.array(sides), boxes[a])
                t = scores[int(label), a] ** alpha * u**beta
                if t > 0:
                    found.append((t, a, u))
        for t, a, u in sorted(found, reverse=True)[:top_k]:
            wanted.setdefault(a, []).append((u, number, t))
    chosen = [(a, *max(claims)) for a, claims in wanted.items()]  # (point, u, object, t)
    result = []
    for a, _, number, t in chosen:
        own = [(each_t, each_u) for _, each_u, each, each_t in chosen if each == number]
        result.append((a, number, t / max(own)[0] * max(each_u for _, each_u in own)))
    return result


def detection_loss(
    torch: Any, boxes: Any, logits: Any, objects: Array, distances: Any, options: dict[str, Any]
) -> tuple[list[Any], Any]:
    """The losses of one image (box, class, distribution), not divided, and the divisor.

    Args:
        torch: The module.
        boxes: Predicted boxes (4, A), as centers and sizes.
        logits: Logits of classes (C, A).
        objects: Classes, and boxes as centers and sizes (M, 5).
        distances: Logits (4 · bins, A), or None.
        options: Arguments of the loss.
    """
    low, high = corners(torch.tensor(objects[:, 1:]), "cxcywh")
    sides = np.concatenate([objects[:, :1], low.numpy(), high.numpy()], axis=1)
    p_low, p_high = corners(boxes.T, "cxcywh")
    predicted = torch.cat([p_low, p_high], dim=1)
    kind = options.get("box_loss", "CIoU")
    matches = assign(
        *(predicted.detach().numpy(), logits.detach().sigmoid().numpy(), sides),
        *(options.get("top_k", 10), options.get("alpha", 0.5), options.get("beta", 6.0), kind),
    )
    points, sizes = grid()
    scores = torch.zeros_like(logits)
    of_boxes = of_distances = torch.zeros((), dtype=torch.float64)
    for a, number, score in matches:
        goal = torch.tensor(sides[number, 1:])
        scores[int(sides[number, 0]), a] = score
        of_boxes = of_boxes + score * box_loss(kind, predicted[a], goal)
        if distances is not None:
            x, y = points[a]
            left, top, right, bottom = sides[number, 1:]
            four = np.array([x - left, y - top, right - x, bottom - y]) / sizes[a]
            bins = distances[:, a].reshape(4, -1)
            four = torch.tensor(four.clip(0, bins.shape[1] - 1))
            i = four.floor().long().clamp(max=bins.shape[1] - 2)
            log_p = bins.log_softmax(1)
            each = (i + 1 - four) * log_p[range(4), i] + (four - i) * log_p[range(4), i + 1]
            of_distances = of_distances - score * each.mean()
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(logits, scores, reduction="sum")
    found = [of_boxes, entropy] + ([] if distances is None else [of_distances])
    return found, max(float(scores.sum()), 1.0)


def image(rng: np.random.Generator, objects: int) -> tuple[Array, Array, Array]:
    """Predicted boxes (4, A), logits (C, A) and objects (M, 5) that they overlap."""
    points, _ = grid()
    centers = points + rng.normal(size=points.shape) * 3
    wide = rng.uniform(8, 30, points.shape)
    boxes = np.concatenate([centers, wide], axis=1).T
    logits = rng.normal(size=(CLASSES, POINTS)) * 2
    middle = rng.uniform((12, 8), (36, 24), (objects, 2))
    found = np.concatenate(
        [rng.integers(0, CLASSES, (objects, 1)), middle, rng.uniform(8, 28, (objects, 2))], axis=1
    )
    return boxes, logits, found


def batch(rng: np.random.Generator, counts: tuple[int, ...], most: int) -> tuple[Array, ...]:
    """Images with these numbers of objects, in targets with padding between and behind them."""
    images = [image(rng, count) for count in counts]
    targets = np.zeros((len(counts), most, 5))
    for row, (_, _, objects) in zip(targets, images, strict=True):
        places = np.sort(rng.permutation(most)[: len(objects)])
        row[places] = objects
        if len(objects) < most:  # another form of padding
            row[np.setdiff1d(np.arange(most), places)[0]] = [-1, 16, 16, 20, 20]
    return np.stack([b for b, _, _ in images]), np.stack([s for _, s, _ in images]), targets


OPTIONS: list[dict[str, Any]] = [
    {},
    {"top_k": 3, "alpha": 1.0, "beta": 2.0},
    {"box_loss": "GIoU", "box_gain": 1.0, "class_gain": 2.0, "distribution_gain": 0.25},
    {"top_k": 1000, "beta": 0.5},
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("form", ["boxes", "boxes and distances", "distances"])
def test_task_aligned_against_loops(options: dict[str, Any], form: str) -> None:
    import torch

    rng = np.random.default_rng(3)
    boxes, logits, targets = batch(rng, (3, 1, 0, 5), 6)
    distances = None if form == "boxes" else rng.normal(size=(4, 4 * 6, POINTS))
    y, s = (torch.tensor(each, requires_grad=True) for each in (boxes, logits))
    d = None if distances is None else torch.tensor(distances, requires_grad=True)
    if d is not None and form == "distances":
        points, sizes = (torch.tensor(each) for each in grid())
        means = (d.reshape(4, 4, 6, POINTS).softmax(2) * torch.arange(6.0)[:, None]).sum(2) * sizes
        low, high = points.T - means[:, :2], points.T + means[:, 2:]
        y = torch.cat([(low + high) / 2, high - low], dim=1)
    sums: list[Any] = [0.0, 0.0, 0.0]
    divisor = 0.0
    for n in range(4):
        found, count = detection_loss(
            torch, y[n], s[n], targets[n], None if d is None else d[n], options
        )
        sums = [a + b for a, b in itertools.zip_longest(sums, found, fillvalue=0.0)]
        divisor += count
    gains = [
        options.get(f"{name}_gain", default)
        for name, default in (("box", 7.5), ("class", 0.5), ("distribution", 1.5))
    ]
    expected = sum(g * each for g, each in zip(gains, sums, strict=True)) / divisor
    expected.backward()
    assert min(sums[0].item(), divisor - 4) > 0.1  # the case is not trivial
    more = {"distribution": "d"} if form == "boxes and distances" else {}
    first = "d" if form == "distances" else "y"
    loss = losses.TaskAligned(
        first, scores="s", strides=STRIDES, image_size=SIZE, **options, **more
    )
    outputs = {"y": boxes, "s": logits} | ({} if distances is None else {"d": distances})
    if form == "distances":
        del outputs["y"]
    value, gradients = loss_and_gradients(loss, outputs, {"targets": targets})
    np.testing.assert_allclose(value, expected.item(), rtol=1e-10)
    for name, tensor in (("y", y), ("s", s), ("d", d)):
        if name in outputs:
            np.testing.assert_allclose(gradients[name], tensor.grad.numpy(), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_task_aligned_without_objects() -> None:
    """Only the scores have a gradient: the loss is binary cross-entropy against zeros."""
    boxes, logits, targets = batch(np.random.default_rng(0), (0, 0), 2)
    loss = losses.TaskAligned("y", scores="s", strides=STRIDES, image_size=SIZE)
    expected = 0.5 * np.log1p(np.exp(logits)).sum() / 2
    for given in (targets, np.zeros((2, 3, 5)), np.zeros((2, 0, 5))):
        value, gradients = loss_and_gradients(loss, {"y": boxes, "s": logits}, {"targets": given})
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_array_equal(gradients["y"], 0)
        np.testing.assert_allclose(gradients["s"], 0.25 / (1 + np.exp(-logits)), rtol=1e-10)


def detector(
    dtype: Any = np.float32, end: str = "Sigmoid", points: int | str = POINTS
) -> onnx.ModelProto:
    """y [N, 4 + 3, A] of x, as YOLOv8 ends: boxes in pixels, and Sigmoids, behind a Concat."""
    with Tape(opset=21) as tape:
        x = tape.input("x", dtype, ["batch", 4 + CLASSES, points])
        moved = op.Mul(x, tape.initializer("scale", np.ones((4 + CLASSES, 1), dtype)))
        boxes, scores = op.Split(moved, np.array([4, CLASSES]), axis=1, outputs=2)
        scores = {
            "Sigmoid": lambda: op.Sigmoid(scores),
            "Softmax": lambda: op.Softmax(scores, axis=1),
            "logits": lambda: scores,
        }[end]()
        boxes = op.Mul(boxes, np.array(8, dtype))
        tape.output(op.Concat(boxes, scores, axis=1), "y")
    return tape.model()


def detections(dtype: Any = np.float32, rows: int = 4) -> dict[str, Array]:
    boxes, logits, targets = batch(np.random.default_rng(5), (3, 1, 0, 5)[:rows], 6)
    x = np.concatenate([boxes / 8, logits], axis=1).astype(dtype)
    wide = np.float32 if dtype == np.float16 else dtype
    return {"x": x, "targets": targets.astype(wide)}


def session(loss: losses.Loss, model: onnx.ModelProto | None = None) -> TrainingSession:
    trainable = build_training_model(
        detector() if model is None else model,
        loss=loss,
        optimizer=ortops.optimizers.SGD(0.01),
        trainable=["scale"],
    )
    return TrainingSession(trainable)


ALIGNED = losses.TaskAligned(strides=STRIDES, image_size=SIZE)


def separate(data: dict[str, Array], **more: Any) -> float:
    """The loss of boxes and logits that are outputs of their own."""
    x = data["x"].astype(np.float64)
    outputs = {"y": x[:, :4] * 8, "s": x[:, 4:]}
    loss = losses.TaskAligned("y", scores="s", strides=STRIDES, image_size=SIZE, **more)
    return loss_and_gradients(loss, outputs, {"targets": data["targets"].astype(np.float64)})[0]


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("end", ["Sigmoid", "logits"])
def test_it_reads_the_logits_of_a_joined_output(end: str, caplog: pytest.LogCaptureFixture) -> None:
    data = detections()
    data["x"][:, 4:] -= 30  # where the logarithm of a Sigmoid in float32 is inaccurate
    data["x"][:, 4:, 3] += 30
    value = session(ALIGNED, detector(end=end)).evaluate(data)
    assert value["loss"] == pytest.approx(separate(data), rel=1e-5)
    gains = {"loss_box": 7.5, "loss_class": 0.5}
    assert value["loss"] == pytest.approx(sum(g * value[name] for name, g in gains.items()))
    said = "the logits before Sigmoid node" if end == "Sigmoid" else "scores of 'y' as logits"
    assert said in caplog.text


def test_a_softmax_is_refused() -> None:
    with pytest.raises(ModelError, match=r"logits of independent classes.*come from Softmax node"):
        session(ALIGNED, detector(end="Softmax"))


@pytest.mark.slow
def test_float16(caplog: pytest.LogCaptureFixture) -> None:
    data = detections(np.float16)
    made = session(ALIGNED, detector(np.float16))
    assert "as the class scores of 'y'" in caplog.text
    before = made.evaluate(data)["loss"]
    assert before == pytest.approx(separate(data), rel=1e-2)
    made.fit(data, epochs=20, batch_size=4, progress=False)  # finds the loss scale first
    assert made.evaluate(data)["loss"] < before


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_parts_of_a_batch_and_weights_of_images(batch_size: int) -> None:
    weighted = losses.TaskAligned(strides=STRIDES, image_size=SIZE, sample_weight="w")
    data, made = detections(), session(weighted)
    whole = made.evaluate(data)["loss"]
    assert made.evaluate(data, batch_size=batch_size)["loss"] == pytest.approx(whole, rel=1e-6)
    weights = np.array([2, 0, 1, 3], np.float32)
    repeated = {name: np.repeat(each, weights.astype(int), 0) for name, each in data.items()}
    expected = session(ALIGNED).evaluate(repeated)["loss"]
    assert abs(expected - whole) > 0.01
    found = made.evaluate(data, batch_size=batch_size, sample_weight=weights)["loss"]
    assert found == pytest.approx(expected, rel=1e-5)
    once, many = session(weighted), session(ALIGNED)
    once.fit(data, sample_weight=weights, batch_size=4, progress=False)
    many.fit(repeated, batch_size=6, progress=False)
    np.testing.assert_allclose(once.state["scale"], many.state["scale"], rtol=1e-4)


@pytest.mark.slow
def test_accumulated_parts_and_other_weights_to_train() -> None:
    data, whole, parts = detections(), session(ALIGNED), session(ALIGNED)
    whole.fit(data, batch_size=4, epochs=2, shuffle=False, progress=False)
    parts.fit(data, batch_size=1, accumulate=4, epochs=2, shuffle=False, progress=False)
    assert np.abs(whole.state["scale"] - 1).max() > 1e-3
    np.testing.assert_allclose(parts.state["scale"], whole.state["scale"], rtol=1e-5)
    again = whole.with_trainable(["scale"])
    assert again.evaluate(data) == pytest.approx(whole.evaluate(data))
    with pytest.raises(ArgumentError, match="class_weight needs a loss"):
        session(losses.TaskAligned(strides=STRIDES, image_size=SIZE, sample_weight="w")).fit(
            data, class_weight={1: 2.0}
        )


@pytest.mark.slow
@pytest.mark.parametrize("label", [CLASSES, 0.5])
def test_a_class_that_does_not_exist_fails(label: float) -> None:
    data = detections()
    data["targets"][0, :, 0] = label
    with pytest.raises(ortops.OrtopsError, match="Out of range value in index"):
        session(ALIGNED).step(data)


@pytest.mark.slow
def test_square_images_are_found_by_the_number_of_points() -> None:
    points, strides = losses.TaskAligned().points(8400)
    assert points.max() == 640 - 4
    assert np.unique(strides, return_counts=True)[1].tolist() == [6400, 1600, 400]
    with pytest.raises(ModelError, match=r"30 boxes, but images of \d+ × \d+ have \d+ cells"):
        session(losses.TaskAligned(strides=STRIDES))
    with pytest.raises(ModelError, match="give the size of images as image_size="):
        session(losses.TaskAligned(strides=STRIDES), detector(points="points"))
    made = session(ALIGNED, detector(points="points"))
    assert made.evaluate(detections())["loss"] == pytest.approx(separate(detections()), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.TaskAligned(strides=[]), r"strides must be .*got \[\]"),
        (lambda: losses.TaskAligned(strides=[8, 0]), "strides must be an integer >= 1, got 0"),
        (lambda: losses.TaskAligned(image_size=(1, 2, 3)), r"image_size must be .*got \(1, 2, 3\)"),
        (lambda: losses.TaskAligned(image_size=0), "image_size must be an integer >= 1, got 0"),
        (lambda: losses.TaskAligned(top_k=0), "top_k must be an integer >= 1, got 0"),
        (lambda: losses.TaskAligned(beta=-1), "beta must be .*got -1"),
        (lambda: losses.TaskAligned(box_loss="IoU"), "box_loss must be .*got 'IoU'"),
        (lambda: losses.DistributionFocal(axis=0.5), "axis must be an integer, got 0.5"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_tensors_of_another_shape() -> None:
    of_two = losses.TaskAligned("y", scores="y", strides=STRIDES, image_size=SIZE)
    with pytest.raises(ModelError, match=r"'y' must have shape .* multiple of 4.*got \[2, 7, 30\]"):
        loss_and_gradients(of_two, {"y": np.zeros((2, 7, POINTS))}, {})
    with pytest.raises(ModelError, match=r"'y' must have shape .* 5 or more .*got \[2, 4, 30\]"):
        loss_and_gradients(ALIGNED, {"y": np.zeros((2, 4, POINTS))}, {})


@pytest.mark.slow
def test_the_model_still_runs_in_onnxruntime() -> None:
    made = session(ALIGNED)
    made.fit(detections(), batch_size=2, epochs=2, progress=False)
    stock = onnxruntime.InferenceSession(made.inference_model().SerializeToString())
    assert stock.run(None, {"x": detections()["x"]})[0].shape == (4, 4 + CLASSES, POINTS)
