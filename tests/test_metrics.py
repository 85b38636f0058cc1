"""Metrics: their numbers, batch by batch as at once, and what they compare in a session."""

from __future__ import annotations

import functools
import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import line
from ortops import (
    ArgumentError,
    ModelError,
    OrtopsError,
    Tape,
    Tensor,
    TrainingSession,
    build_training_model,
    losses,
    op,
)
from ortops.metrics import (
    AUC,
    F1,
    METRICS,
    R2,
    Accuracy,
    EditDistance,
    Function,
    IoU,
    MeanAbsoluteError,
    MeanSquaredError,
    Perplexity,
    Precision,
    Recall,
    RootMeanSquaredError,
    StreamingMetric,
    TopK,
    resolve,
)

Array = np.ndarray[Any, Any]
F = np.float32


def scores(shape: tuple[int, ...], seed: int = 0) -> Array:
    # Few different numbers, so that there are ties.
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(F) / 4


def labels(shape: tuple[int, ...], classes: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, classes, shape)


def yes(shape: tuple[int, ...], seed: int = 1) -> Array:
    return (np.random.default_rng(seed).uniform(size=shape) > 0.4).astype(F)


def softmax(z: Array, axis: int = 1) -> Array:
    e = np.exp(z.astype(np.float64) - z.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def share(outputs: Array, targets: Array) -> float:
    """The fraction of rows whose greatest score is that of their class."""
    return float(np.mean(outputs.argmax(axis=1) == targets))


def distance(outputs: Array, targets: Array) -> float:
    return float(np.mean(np.abs(outputs.astype(np.float64) - targets)))


def measured(metric: StreamingMetric, outputs: Array, targets: Array) -> float:
    metric.reset()
    metric.update(outputs, targets)
    return metric.result()


# --------------------------------------------------------------- in parts as at once

CASES: dict[str, tuple[StreamingMetric, Array, Array]] = {
    "accuracy": (Accuracy(), scores((40, 3)), labels((40,), 3)),
    "accuracy of yes": (Accuracy(kind="probabilities"), yes((40, 2), 3), yes((40, 2))),
    "top-k": (TopK(2), scores((40, 4)), labels((40,), 4)),
    "precision": (Precision(average="macro"), scores((40, 4)), labels((40,), 4)),
    "recall of labels": (Recall(), labels((40,), 5, 4), labels((40,), 5)),
    "f1 of questions": (F1(), scores((40, 3)), yes((40, 3))),
    "iou": (IoU(ignored=2), scores((40, 3, 2, 2)), labels((40, 2, 2), 3)),
    "auc": (AUC(), scores((40, 2)), labels((40,), 2)),
    "auc of classes": (AUC(), scores((40, 3)), labels((40,), 3)),
    "auc in bins": (AUC(bins=7), scores((40,)), yes((40,))),
    "mean absolute error": (MeanAbsoluteError(), scores((40, 2)), scores((40, 2), 1)),
    "mean squared error": (MeanSquaredError(), scores((40, 2)), scores((40, 2), 1)),
    "root mean squared error": (RootMeanSquaredError(), scores((40,)), scores((40,), 1)),
    "r2": (R2(), scores((40, 2)), 1e6 + scores((40, 2), 1).astype(np.float64)),
    "perplexity": (Perplexity(axis=-1), scores((40, 5, 3)), labels((40, 5), 3)),
    "edit distance": (EditDistance(padding=0), labels((40, 6), 4, 3), labels((40, 5), 4)),
    "edit distance of scores": (
        EditDistance(batch_first=True),
        scores((40, 6, 4)),
        labels((40, 5), 4),
    ),
    "function": (Function(distance), scores((40, 2)), scores((40, 2), 1)),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=6))
def test_batches_add_up(case: str, cuts: list[int]) -> None:
    metric, outputs, targets = CASES[case]
    expected = measured(metric, outputs, targets)
    assert math.isfinite(expected)
    metric.reset()
    assert math.isnan(metric.result())
    for start, end in itertools.pairwise([0, *sorted(cuts), 40]):
        metric.update(outputs[start:end], targets[start:end])
    assert metric.result() == pytest.approx(expected, rel=1e-9)


def test_every_name_stands_for_a_metric() -> None:
    for name, kind in METRICS.items():
        assert list(resolve(name)) == [name]
        assert type(resolve([kind])[name]) is kind


# ------------------------------------------------------------------------- by formulas


def test_metrics_by_hand() -> None:
    z = np.array([[1.0, 2.0, 0.0], [3.0, 3.0, 1.0], [0.0, 5.0, 6.0], [1.0, 1.0, 1.0]])
    t = np.array([1, 1, 1, 0])
    assert measured(Accuracy(), z, t) == 0.5
    assert measured(TopK(2), z, t) == 1.0
    assert measured(TopK(1), z, t) == measured(Accuracy(), z, t)
    pixels = np.zeros((2, 3, 4, 4))
    pixels[:, 2] = 1
    assert measured(Accuracy(), pixels, np.full((2, 4, 4), 2)) == 1.0
    assert measured(Accuracy(axis=-1), np.moveaxis(pixels, 1, -1), np.full((2, 4, 4), 2)) == 1.0
    # Answers 1 0 2 0, targets 1 1 1 0: class 0 has ½ · 1, class 1 1 · ⅓, class 2 0.
    assert measured(Precision(), z, t) == pytest.approx((1 / 2 + 1 + 0) / 3)
    assert measured(Recall(), z, t) == pytest.approx((1 + 1 / 3 + 0) / 3)
    overlaps = IoU()
    assert measured(overlaps, z, t) == pytest.approx((1 / 2 + 1 / 3 + 0) / 3)
    np.testing.assert_allclose(overlaps.per_class(), [1 / 2, 1 / 3, 0])
    assert measured(Recall(average="binary", positive=0), z, t) == 1.0
    assert measured(F1(average="micro"), z, t) == 0.5
    assert measured(Recall(average="weighted"), z, t) == 0.5


@pytest.mark.parametrize(
    ("kind", "border"),
    [
        (None, 0.0),
        ("logits", 0.0),
        ("probabilities", 0.5),
        ("values", 0.5),
        ("log_probabilities", math.log(0.5)),
    ],
)
def test_the_border_of_yes(kind: str | None, border: float) -> None:
    z, t = scores((50,)), yes((50,))
    said = z > border
    assert measured(Accuracy(kind=kind), z, t) == np.mean(said == (t > 0))
    assert measured(Precision(kind=kind), z, t) == (said & (t > 0)).sum() / said.sum()
    moved = measured(Recall(kind=kind, threshold=1.0), z, t)
    assert moved == ((z > 1) & (t > 0)).sum() / (t > 0).sum()
    assert measured(Accuracy(threshold=1.0), z, t) == np.mean((z > 1) == (t > 0))


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_area_is_the_share_of_ordered_pairs(seed: int) -> None:
    z, t = scores((30,), seed), yes((30,), seed)
    pairs = [(p > n) + 0.5 * (p == n) for p in z[t == 1] for n in z[t == 0]]
    assert measured(AUC(), z, t) == pytest.approx(np.mean(pairs), rel=1e-12)
    two = np.stack([-z, z], axis=1)
    assert measured(AUC(), two, t.astype(int)) == pytest.approx(np.mean(pairs), rel=1e-12)
    p = np.round(1 / (1 + np.exp(-z.astype(np.float64))), 9)
    bins = np.floor(p * 4)
    pairs = [(a > b) + 0.5 * (a == b) for a in bins[t == 1] for b in bins[t == 0]]
    for numbers, kind in ((z, "logits"), (p, "probabilities")):
        if not np.isin(p * 4, np.arange(5)).any():  # where a border is met, rounding decides
            found = measured(AUC(bins=4, kind=kind), numbers, t)
            assert found == pytest.approx(np.mean(pairs), rel=1e-12)


def test_the_area_of_one_kind_is_undefined() -> None:
    assert math.isnan(measured(AUC(), scores((5,)), np.ones(5)))
    assert math.isnan(measured(AUC(), scores((5,)), np.zeros(5)))


@pytest.mark.parametrize("kind", ["logits", "probabilities", "log_probabilities"])
def test_perplexity(kind: str) -> None:
    z, t = scores((8, 5, 4)), labels((8, 4), 5)
    p = softmax(z)
    given = {"logits": z, "probabilities": p, "log_probabilities": np.log(p)}[kind]
    picked = np.take_along_axis(p, t[:, None], axis=1)[:, 0]
    found = measured(Perplexity(kind=kind), given, t)
    assert found == pytest.approx(np.exp(-np.log(picked).mean()), rel=1e-12)
    found = measured(Perplexity(kind=kind, ignored=2), given, t)
    assert found == pytest.approx(np.exp(-np.log(picked[t != 2]).mean()), rel=1e-12)
    certain = np.array([[1.0, 0.0]])
    assert measured(Perplexity(kind="probabilities"), certain, np.array([1])) == math.inf
    assert measured(Perplexity(), 2000 * certain, np.array([1])) == math.inf


def distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    @functools.cache
    def rest(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        if one[i] == other[j]:
            return rest(i + 1, j + 1)
        return 1 + min(rest(i + 1, j), rest(i, j + 1), rest(i + 1, j + 1))

    return rest(0, 0)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_edit_distance(seed: int) -> None:
    random = np.random.default_rng(seed)
    found, true = random.integers(0, 4, (3, 7)), random.integers(0, 4, (3, 6))
    pairs = [
        (tuple(f for f in a if f), tuple(t for t in b if t))
        for a, b in zip(found, true, strict=True)
    ]
    edits, length = sum(distance(*pair) for pair in pairs), sum(len(b) for _, b in pairs)
    if length:
        assert measured(EditDistance(padding=0), found, true) == pytest.approx(edits / length)
    assert measured(EditDistance(padding=0, normalize=False), found, true) == edits / 3


def test_edit_distance_decodes_greedily() -> None:
    paths = np.array([[1, 1, 0, 1, 2, 2], [0, 0, 3, 3, 0, 1]])  # 1 1 2, and 3 1
    z = np.eye(4)[paths]
    true = np.array([[1, 1, 2, 0], [3, 2, 2, 0]])
    for first, shaped in ((True, z), (False, np.moveaxis(z, 0, 1))):
        assert measured(EditDistance(batch_first=first), shaped, true) == 2 / 6
    metric = EditDistance(batch_first=True)
    metric.update(z, true, input_lengths=np.array([4, 6]), target_lengths=np.array([2, 1]))
    assert metric.result() == 1 / 3  # 1 1 and 1 1; 3 1 and 3
    metric = EditDistance(batch_first=True, blank=3)
    assert measured(metric, z[1:], np.array([[0, 0, 1]])) == 0.0


def test_r2_of_equal_targets_and_of_one_row() -> None:
    t = np.full((9, 1), 0.1)
    metric = R2()
    for part in np.split(t, 3):
        metric.update(part, part)
    assert metric.result() == 1.0
    assert measured(R2(), t + np.arange(9)[:, None], t) == 0.0
    assert math.isnan(measured(R2(), t[:1], t[:1]))
    with_far_mean = 1e9 + np.arange(10.0)
    assert measured(R2(), with_far_mean + 1, with_far_mean) == pytest.approx(1 - 10 / 82.5)


NAN_CASES = [name for name in CASES if name not in ("recall of labels", "edit distance")]


@pytest.mark.parametrize("case", NAN_CASES)
def test_nan_is_told(case: str) -> None:
    metric, outputs, targets = CASES[case]
    if case == "accuracy of yes":
        targets = targets.astype(F)
    broken = outputs.astype(F)
    broken[3] = np.nan
    assert math.isnan(measured(metric, broken, targets))


def test_nan_that_does_not_count_is_not_told() -> None:
    z, t = scores((6, 3)), labels((6,), 3)
    t[:2], z[0] = 2, np.nan
    for metric in (Accuracy(ignored=2), F1(ignored=2), Perplexity(ignored=2), TopK(1, ignored=2)):
        kept = t != 2
        alone = metric.begun()
        assert measured(metric, z, t) == measured(alone, z[kept], t[kept])
    y = scores((6, 2), 4)
    z = z[:, :2]
    for error in (MeanAbsoluteError(ignored=-7), R2(ignored=-7)):
        expected = measured(error, z[1:], y[1:])
        held = y.copy()
        held[0] = -7
        assert measured(error, z, held) == pytest.approx(expected)
    t = yes((6, 2))
    t[0] = -1
    if len(np.unique(t[1:, 0])) == len(np.unique(t[1:, 1])) == 2:
        assert measured(AUC(ignored=-1), z, t) == measured(AUC(), z[1:], t[1:])
    assert measured(Recall(ignored=-1), z, t) == measured(Recall(), z[1:], t[1:])


# -------------------------------------------------------------------------- scikit-learn


@pytest.mark.sklearn
def test_against_scikit_learn() -> None:
    from sklearn import metrics as sk

    z, t = scores((60, 4)), labels((60,), 4)
    p, said = softmax(z), z.argmax(axis=1)
    per_class = ((Precision, sk.precision_score), (Recall, sk.recall_score))
    per_class += ((F1, sk.f1_score), (IoU, sk.jaccard_score))  # type: ignore[assignment]
    for ours, theirs in per_class:
        for average in ("macro", "micro", "weighted"):
            expected = theirs(t, said, average=average)
            assert measured(ours(average=average), z, t) == pytest.approx(expected)
            assert measured(ours(average=average), said, t) == pytest.approx(expected)
            few = np.where(t == 3, 0, t)[:6]  # a class that does not occur
            expected = theirs(few, said[:6], average=average, zero_division=0)
            assert measured(ours(average=average), z[:6], few) == pytest.approx(expected)
        two, of_two = scores((60, 2), 5), labels((60,), 2)
        for positive in (0, 1):
            expected = theirs(of_two, two.argmax(axis=1), pos_label=positive)
            metric = ours(average="binary", positive=positive)
            assert measured(metric, two, of_two) == pytest.approx(expected)
            z1, t1 = scores((60, 1), 6), yes((60, 1))
            expected = theirs(t1[:, 0], z1[:, 0] > 0, pos_label=positive)
            assert measured(metric, z1, t1) == pytest.approx(expected)
        for average in ("macro", "micro", "weighted"):
            many, sure = yes((60, 4)), (z > 0).astype(F)
            many[:, 1] = sure[:, 1] = 0  # a question that nothing says yes to
            expected = theirs(many, sure, average=average, zero_division=0)
            assert measured(ours(average=average), sure - 0.5, many) == pytest.approx(expected)
    expected = sk.top_k_accuracy_score(t, z + 1e-3 * np.arange(4)[::-1], k=2)
    assert measured(TopK(2), z, t) == pytest.approx(expected)
    for average in ("macro", "weighted"):
        expected = sk.roc_auc_score(t, p, multi_class="ovr", average=average)
        assert measured(AUC(average=average), z, t) == pytest.approx(expected)
        assert measured(AUC(average=average, kind="probabilities"), p, t) == pytest.approx(expected)
        many = yes((60, 4))
        expected = sk.roc_auc_score(many, z, average=average)
        assert measured(AUC(average=average), z, many) == pytest.approx(expected)
    y, x = scores((60, 3)), scores((60, 3), 1)
    for metric, theirs in (
        (MeanAbsoluteError(), sk.mean_absolute_error),
        (MeanSquaredError(), sk.mean_squared_error),
        (RootMeanSquaredError(), lambda a, b: np.sqrt(sk.mean_squared_error(a, b))),
        (R2(), sk.r2_score),
    ):
        assert measured(metric, x, y) == pytest.approx(theirs(y, x))
    assert measured(Perplexity(), z, t) == pytest.approx(np.exp(sk.log_loss(t, p)))


@pytest.mark.sklearn
def test_functions_of_scikit_learn() -> None:
    from sklearn import metrics as sk

    def found(function: Any, outputs: Array, targets: Array, **known: Any) -> float:
        takes = known.pop("takes", None)
        metric = Function(function, takes).begun(**known)
        half = len(outputs) // 2
        metric.update(outputs[:half], targets[:half])
        metric.update(outputs[half:], targets[half:])
        return metric.result()

    z, t = scores((60, 4)), labels((60,), 4)
    p, said = softmax(z), z.argmax(axis=1)
    macro = functools.partial(sk.f1_score, average="macro")
    assert resolve([macro])["f1_score"].label == "f1_score"
    assert found(macro, z, t, kind="logits") == pytest.approx(macro(t, said))
    kept = t != 2
    assert found(sk.accuracy_score, z, t, ignored=2) == sk.accuracy_score(t[kept], said[kept])
    assert found(sk.log_loss, z, t, kind="logits") == pytest.approx(sk.log_loss(t, p))
    assert found(sk.log_loss, np.log(p), t, kind="log_probabilities") == pytest.approx(
        sk.log_loss(t, p)
    )
    auc = functools.partial(sk.roc_auc_score, multi_class="ovr")
    assert found(auc, z, t, kind="logits") == pytest.approx(auc(t, p))
    maps, of_maps = scores((6, 4, 3, 3)), labels((6, 3, 3), 4)
    expected = sk.accuracy_score(of_maps.ravel(), maps.argmax(axis=1).ravel())
    assert found(sk.accuracy_score, maps, of_maps, kind="logits") == pytest.approx(expected)
    last = np.moveaxis(maps, 1, -1)
    assert found(sk.accuracy_score, last, of_maps, axis=3) == pytest.approx(expected)
    two, of_two = scores((60, 2), 5), labels((60,), 2)
    q = softmax(two)[:, 1]
    assert found(sk.roc_auc_score, two, of_two) == pytest.approx(sk.roc_auc_score(of_two, q))
    assert found(sk.brier_score_loss, two, of_two) == pytest.approx(sk.brier_score_loss(of_two, q))
    assert found(sk.hinge_loss, two, of_two) == pytest.approx(
        sk.hinge_loss(of_two, two[:, 1] - two[:, 0])
    )
    z1, t1 = scores((60, 1), 6), yes((60, 1))
    sigmoid = 1 / (1 + np.exp(-z1.astype(np.float64)))[:, 0]
    assert found(sk.f1_score, z1, t1) == pytest.approx(sk.f1_score(t1[:, 0], z1[:, 0] > 0))
    assert found(sk.log_loss, z1, t1) == pytest.approx(sk.log_loss(t1[:, 0], sigmoid))
    expected = sk.average_precision_score(t1[:, 0], z1[:, 0])
    assert found(sk.average_precision_score, z1, t1) == pytest.approx(expected)
    y, x = scores((60, 3)), scores((60, 3), 1)
    assert found(sk.r2_score, x, y, kind="logits") == pytest.approx(sk.r2_score(y, x))
    assert found(sk.mean_squared_error, z1, t1, kind="probabilities") == pytest.approx(
        sk.mean_squared_error(t1, z1)
    )
    assert found(sk.mean_squared_error, sigmoid, t1[:, 0], takes="labels") == pytest.approx(
        np.mean((sigmoid > 0) != (t1[:, 0] > 0))
    )


def test_functions_are_told_apart_by_the_names_of_their_parameters() -> None:
    z, t = scores((6, 3)), labels((6,), 3)
    said = z.argmax(axis=1)

    def theirs(y_true: Array, y_pred: Array) -> float:
        np.testing.assert_array_equal(y_true, t)
        np.testing.assert_array_equal(y_pred, said)
        return 1.0

    def reversed_names(y_pred: Array, y_true: Array) -> float:
        return theirs(y_true, y_pred)

    def positional(y_true: Array, y_pred: Array, /) -> float:
        return theirs(y_true, y_pred)

    def ours(outputs: Array, targets: Array) -> float:
        np.testing.assert_array_equal(outputs, z)
        np.testing.assert_array_equal(targets, t)
        return 1.0

    def swapped(targets: Array, outputs: Array) -> float:
        return ours(outputs, targets)

    def other(a: Array, b: Array, *, kind: str = "?", ignored: Any = 0) -> float:
        assert (kind, ignored) == ("logits", None)
        return ours(a, b)

    def raw(y_true: Array, scores: Array) -> float:
        return ours(scores, y_true)

    for function in (theirs, reversed_names, positional, ours, swapped, other):
        assert measured(Function(function).begun("logits", 1), z, t) == 1.0
    assert measured(Function(raw, takes="values").begun("logits", 1), z, t) == 1.0
    with pytest.raises(OrtopsError) as raised:
        Function(raw)
    assert str(raised.value) == (
        "metric 'raw': the function has a parameter 'y_true', but none of 'y_pred', 'y_score', "
        "'y_prob', 'y_proba', 'pred_decision'; rename one, or use Function(…, takes=)"
    )
    assert measured(Function(share), z, t) == np.mean(said == t)


# ----------------------------------------------------------------------------- messages


def refused(metric: Any, outputs: Array, targets: Array) -> str:
    with pytest.raises(OrtopsError) as raised:
        measured(metric, outputs, targets)
    return str(raised.value)


def test_outputs_that_do_not_fit() -> None:
    z, t = scores((6, 3)), labels((6,), 3)
    assert refused(Accuracy(), z, yes((6, 2))) == (
        "metric 'accuracy': outputs have shape [6, 3], targets [6, 2]; both must have the same "
        "shape, or outputs with an additional class axis"
    )
    assert refused(Accuracy(axis=2), z, t) == (
        "metric 'accuracy': axis 2 is out of range for outputs of shape [6, 3]"
    )
    assert refused(F1(), z[:, :1], t) == (
        "metric 'f1': outputs of shape [6, 1] have only one class, targets have shape [6]; use "
        "targets of 0 and 1 in the shape of the outputs"
    )
    assert refused(TopK(), z, t) == (
        "metric 'top_k': with k = 5 and 3 classes, every prediction is correct; use TopK(k) with a "
        "smaller k"
    )
    assert refused(Perplexity(), z, z) == (
        "metric 'perplexity': outputs must have an additional class axis, but outputs and targets "
        "have the same shape, [6, 3]"
    )
    assert refused(Perplexity(kind="values"), z, t) == (
        "metric 'perplexity': outputs of kind 'values' cannot be converted to probabilities; set "
        "kind='probabilities' or kind='logits'"
    )
    assert refused(Recall(), z, t - 1) == (
        "metric 'recall': labels must be from 0 to 2, got -1; a label to ignore is set with "
        "ignored="
    )
    assert refused(Recall(), t, t - 1) == (
        "metric 'recall': labels must be >= 0, got -1; a label to ignore is set with ignored="
    )
    assert refused(Recall(), t - 1, t) == (
        "metric 'recall': labels in outputs must be >= 0, got -1"
    )
    assert refused(IoU(), z, t + 0.5) == (
        f"metric 'iou': labels must be integers, got {t[0] + 0.5}"
    )
    assert refused(F1(average="binary"), z, yes((6, 3))) == (
        "metric 'f1': average='binary' requires a single question and positive=1 or 0, got 3 "
        "questions and positive=1; use another average"
    )
    assert refused(F1(average="binary", positive=3), z, t) == (
        "metric 'f1': positive must be from 0 to 2, got 3"
    )
    assert refused(AUC(bins=4, kind="probabilities"), z[:, 0] + 3, yes((6,))).endswith(
        "set kind='logits', or leave bins= out"
    )
    assert refused(MeanSquaredError(), z, t) == (
        "metric 'mean_squared_error': outputs have shape [6, 3], targets [6]; both must have the "
        "same shape (accuracy compares classes with labels)"
    )
    assert refused(EditDistance(), scores((6, 5, 3)), labels((6, 4), 3)) == (
        "metric 'edit_distance': outputs must be scores of shape (T, N, classes) (batch_first=True "
        "is for (N, T, classes)) or integers of shape (N, T), and targets (N, S), got shapes "
        "[6, 5, 3] and [6, 4]"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "metric 'top_k': k must be an integer >= 1, got 0"),
        (
            lambda: F1(average="mean"),
            "metric 'f1': average must be 'binary', 'macro', 'weighted' or 'micro', got 'mean'",
        ),
        (
            lambda: AUC(average="micro"),
            "metric 'auc': average must be 'macro' or 'weighted', got 'micro'",
        ),
        (
            lambda: AUC(bins=1),
            "metric 'auc': bins must be an integer >= 2 and <= 2147483647, got 1",
        ),
        (
            lambda: AUC(bins=2**63),
            f"metric 'auc': bins must be an integer >= 2 and <= 2147483647, got {2**63}",
        ),
        (
            lambda: EditDistance(input_lengths=[3]),  # type: ignore[arg-type]
            "metric 'edit_distance': input_lengths must be the name of an input, got [3]",
        ),
        (
            lambda: EditDistance(padding=True),
            "metric 'edit_distance': padding must be an integer, got True",
        ),
        (
            lambda: Accuracy(threshold="0.1"),  # type: ignore[arg-type]
            "metric 'accuracy': threshold must be a finite number, got '0.1'",
        ),
        (lambda: F1(positive=True), "metric 'f1': positive must be an integer, got True"),
        (
            lambda: F1(threshold=math.nan),
            "metric 'f1': threshold must be a finite number, got nan",
        ),
        (lambda: Accuracy(output=3), "metric 'accuracy_3': output must be a name, got 3"),  # type: ignore[arg-type]
        (lambda: Accuracy(axis=0.5), "metric 'accuracy': axis must be an integer, got 0.5"),  # type: ignore[arg-type]
        (
            lambda: Accuracy(kind="scores"),
            (
                "metric 'accuracy': kind must be 'logits', 'probabilities', 'log_probabilities' or "
                "'values', got 'scores'"
            ),
        ),
        (
            lambda: Function(share, takes="all"),
            (
                "metric 'share': takes must be 'labels', 'probabilities', 'scores' or 'values', "
                "got 'all'"
            ),
        ),
        (lambda: Function("f"), "metric must be a function, got 'f'"),  # type: ignore[arg-type]
        (
            lambda: resolve([TopK(1), TopK(2)]),
            "metric 'top_k': this is also the name of another metric; rename one with name=",
        ),
        (
            lambda: resolve([Accuracy(name="loss")]),
            "metric 'loss': this is also the name of the loss; rename one with name=",
        ),
        (
            lambda: resolve(["accurracy"]),
            "unknown metric 'accurracy'; did you mean 'accuracy'?",
        ),
    ],
)
def test_arguments_that_are_none(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        make()
    assert str(raised.value) == message


def test_batches_of_several_forms_are_refused() -> None:
    z, t = scores((6, 3)), labels((6,), 3)
    f1 = F1()
    f1.update(z, t)
    with pytest.raises(
        OrtopsError, match="metric 'f1': batches contain classes and labels; use one form"
    ):
        f1.update(t, t)
    auc, r2 = AUC(), R2()
    auc.update(z, t)
    r2.update(z, z)
    with pytest.raises(
        OrtopsError, match="batches have 3 and 1 questions; the number must be the same"
    ):
        auc.update(z[:, :2], t % 2)
    with pytest.raises(
        OrtopsError, match="batches have 3 and 2 columns; the number must be the same"
    ):
        r2.update(z[:, :2], z[:, :2])
    function = Function(share)
    function.update(scores((2, 3, 4)), labels((2, 4), 3))
    function.update(scores((2, 3, 5)), labels((2, 5), 3))
    with pytest.raises(OrtopsError) as raised:
        function.result()
    assert str(raised.value) == (
        "metric 'share': cannot concatenate outputs of shapes [2, 3, 4] and [2, 3, 5]; use "
        "batches of one shape, or a StreamingMetric"
    )


# ---------------------------------------------------------------------------- in a session

RNG = np.random.default_rng(3)
X = RNG.normal(size=(11, 4)).astype(F)
V, U = RNG.normal(size=(4, 3)).astype(F), RNG.normal(size=(4, 2)).astype(F)
LABELS, BOXES = labels((11,), 3), RNG.normal(size=(11, 2)).astype(F)
DATA = {"x": X, "labels": LABELS, "targets": BOXES}


def detector() -> Any:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        hidden = op.Identity(x * 1.0)
        hidden.value.name = "hidden"
        tape.output(op.Softmax(hidden @ tape.initializer("v", V), axis=1), "classes")
        tape.output(hidden @ tape.initializer("u", U), "boxes")
        tape.output(op.ReduceSum(hidden, keepdims=0), "total")
    return tape.model()


def combined(**arguments: Any) -> TrainingSession:
    loss = 0.5 * losses.SoftmaxCrossEntropy("classes") + 0.5 * losses.MeanSquaredError("boxes")
    return TrainingSession(
        build_training_model(detector(), loss=loss, optimizer="Adam", **arguments)
    )


def test_metrics_of_any_output() -> None:
    session = combined()
    right = float(np.mean((X @ V).argmax(axis=1) == LABELS))
    p = softmax(X @ V)
    found = session.evaluate(
        DATA,
        batch_size=4,
        metrics=[
            "accuracy",
            Accuracy(output="classes"),
            Perplexity(output="classes", name="perplexity"),
            MeanSquaredError(output="boxes"),
            R2(output="boxes"),
            MeanAbsoluteError(output="hidden", target="x", name="nothing"),
        ],
    )
    boxes = (X @ U).astype(np.float64)
    assert found == pytest.approx(
        {
            "loss": found["loss"],
            "loss_classes": -np.log(p[np.arange(11), LABELS]).mean(),
            "loss_boxes": np.square(boxes - BOXES).mean(),
            "accuracy": right,
            "accuracy_classes": right,
            "perplexity": np.exp(-np.log(p[np.arange(11), LABELS]).mean()),
            "mean_squared_error_boxes": np.square(boxes - BOXES).mean(),
            "r2_boxes": np.mean(
                1 - np.square(boxes - BOXES).sum(0) / np.square(BOXES - BOXES.mean(0)).sum(0)
            ),
            "nothing": 0.0,
        },
        rel=1e-5,
    )
    by_target = session.evaluate(DATA, metrics=[MeanSquaredError(target="targets")])
    assert by_target["mean_squared_error"] == pytest.approx(found["loss_boxes"], rel=1e-5)


class Constant(StreamingMetric):
    """Has the same result for all data.

    Args:
        value: The result.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        super().__init__()

    def update(self, outputs: Array, targets: Array) -> None: ...

    def reset(self) -> None: ...

    def result(self) -> Any:
        return self.value


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float16(2), 2.0),
        (np.int64(7), 7.0),
        (np.bool_(True), 1.0),
        (True, 1.0),
        (3, 3.0),
        (np.array(0.25), 0.25),
        (np.array([0.25]), 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32("nan"), math.nan),
        (-np.float64("inf"), -math.inf),
    ],
    ids=repr,
)
def test_results_are_floats_of_python(result: Any, expected: float) -> None:
    session, batch = line.session(), line.BATCH
    for metric in (Constant(result), lambda outputs, targets: result):
        (found,) = [
            value
            for name, value in session.evaluate(batch, metrics=[metric]).items()
            if name != "loss"
        ]
        assert type(found) is float
        assert found == expected or (math.isnan(found) and math.isnan(expected))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "result",
    [None, "0.5", np.array("0.5"), 1j, np.complex64(1), [0.5], {}, 10**400, np.ma.masked],
    ids=repr,
)
def test_a_result_that_is_not_a_number_is_refused_by_the_name_of_the_metric(result: Any) -> None:
    def mine(outputs: Array, targets: Array) -> Any:
        return result

    session = line.session()
    with pytest.raises(OrtopsError, match="metric 'constant': the result must be a number, got"):
        session.evaluate(line.BATCH, metrics=[Constant(result)])
    with pytest.raises(OrtopsError, match="metric 'mine': the result must be a number, got"):
        session.evaluate(line.BATCH, metrics=[mine])
    with pytest.raises(OrtopsError, match="metric 'mine': the result must be a number, got"):
        session.evaluate(line.BATCH, metrics=[in_the_form_of_scikit_learn(mine)])


def in_the_form_of_scikit_learn(function: Any) -> Any:
    """Returns a metric of scikit-learn's form."""

    def mine(y_true: Array, y_pred: Array) -> Any:
        return function(y_pred, y_true)

    return mine


def test_a_session_leaves_metrics_alone() -> None:
    session, own = combined(), Accuracy(output="classes")
    own.update(scores((4, 3)), labels((4,), 3))
    before = own.result(), own.kind
    session.evaluate(DATA, metrics=own)
    assert (own.result(), own.kind) == before


def test_named_outputs_and_their_numbers() -> None:
    def first(outputs: Array, targets: Array, *, kind: str) -> float:
        seen[kind] = outputs
        return 0.0

    seen: dict[str, Array] = {}
    session = combined()
    session.evaluate(DATA, metrics=[first, Function(first, output="classes", name="named")])
    np.testing.assert_allclose(seen["logits"], X @ V, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen["probabilities"], softmax(X @ V), rtol=1e-5)


def test_lengths_come_from_the_inputs_of_the_loss() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["time", "batch", 4])
        tape.output(op.LogSoftmax(x * tape.initializer("s", np.ones(4, F)), axis=2), "y")
    session = TrainingSession(build_training_model(tape.model(), loss="CTC", optimizer="SGD"))
    paths = np.array([[1, 1, 0, 1, 2, 2], [0, 0, 3, 3, 0, 1]])
    batch = {
        "x": 5 * np.moveaxis(np.eye(4, dtype=F)[paths], 0, 1),
        "labels": np.array([[1, 1, 2], [3, 2, 2]]),
        "input_lengths": np.array([4, 6]),
        "target_lengths": np.array([2, 1]),
    }
    assert session.evaluate([batch], metrics="edit_distance")["edit_distance"] == 1 / 3


def test_declared_inputs_are_no_targets() -> None:
    def loss(boxes: Tensor, mask: Tensor) -> Tensor:
        return op.ReduceMean(boxes * boxes * op.Unsqueeze(mask, [1]), keepdims=0)

    declared = {"mask": (F, ["batch"])}
    session = TrainingSession(
        build_training_model(detector(), loss=loss, optimizer="SGD", inputs=declared)
    )
    data = {"x": X, "mask": np.ones(11, F)}
    with pytest.raises(OrtopsError) as raised:
        session.evaluate(data, metrics=["mean_absolute_error"])
    assert str(raised.value) == (
        "metric 'mean_absolute_error': the loss has 1 inputs (mask), and it is not known "
        "which one outputs are compared with; name it with target="
    )
    metric = MeanAbsoluteError(output="hidden", target="x")
    assert session.evaluate(data, metrics=metric)["mean_absolute_error_hidden"] == 0.0


def test_an_unknown_output_is_answered_with_those_of_the_model() -> None:
    """Without inputs, weights and what the algorithm adds, such as the moments of the optimizer."""
    session = combined()
    graph = session.inference_model().graph
    computed = [name for node in graph.node for name in node.output]
    offered = list(dict.fromkeys([*(value.name for value in graph.output), *computed]))
    with pytest.raises(OrtopsError) as raised:
        session.evaluate(DATA, metrics=[Accuracy(output="??", target="labels")])
    assert re.findall("'([^']*)'", str(raised.value).split("names:")[1]) == offered[:10]


def test_what_a_session_refuses() -> None:
    session = combined()
    for metric, message in (
        (
            Accuracy(output="clases", target="labels"),
            "outputs: the model has no tensor 'clases'; did you mean 'classes'?",
        ),
        (
            Accuracy(target="label"),
            "metric 'accuracy': there is no input 'label'; did you mean 'labels'?",
        ),
        (
            Accuracy(output="hidden"),
            (
                "metric 'accuracy_hidden': no loss compares 'hidden' with an input; name the input "
                "with target=, for example target='labels'"
            ),
        ),
        (
            Accuracy(name="loss_boxes"),
            (
                "metric 'loss_boxes': a summand of the loss has this name; give the metric another "
                "one with name="
            ),
        ),
    ):
        with pytest.raises(OrtopsError) as raised:
            session.evaluate(DATA, metrics=[metric])
        assert str(raised.value) == message


# -------------------------------------------------------------------------------- predict


def test_predict() -> None:
    session = combined()
    found = session.predict({"x": X}, batch_size=4, outputs=["classes", "hidden"])
    assert list(found) == ["classes", "hidden"]
    np.testing.assert_allclose(found["classes"], softmax(X @ V), rtol=1e-5)
    np.testing.assert_array_equal(found["hidden"], X)
    for data in (DATA, [{"x": X[:5]}, {"x": X[5:]}], X):
        boxes = session.predict(data, outputs="boxes")
        np.testing.assert_allclose(boxes, X @ U, rtol=1e-4, atol=1e-5)
    assert session.steps_done == 0
    session.fit(DATA, progress=False)
    np.testing.assert_allclose(
        session.predict({"x": X}, outputs="boxes"), X @ session.state["u"], rtol=1e-4, atol=1e-5
    )


def test_predict_is_in_inference_mode() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        hidden = op.Dropout(x * tape.initializer("s", np.ones(4, F)), 0.5)
        tape.output(hidden, "y")
    session = TrainingSession(
        build_training_model(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    )
    np.testing.assert_array_equal(session.predict({"x": X})["y"], X)
    found = session.evaluate({"x": X, "targets": X}, metrics=["r2", MeanSquaredError(output="y")])
    assert found == {"loss": 0.0, "r2": 1.0, "mean_squared_error_y": 0.0}


def test_what_predict_refuses() -> None:
    session = combined()
    for outputs, message in (
        (
            None,
            (
                "predict: axis 0 of 'total' must have the rows of the batch, got shape [] for a "
                "batch of 11 rows; leave it out of outputs=, or run session.inference_model()"
            ),
        ),
        ("box", "outputs: the model has no tensor 'box'; did you mean 'boxes'?"),
        ([], "outputs must be the name of a tensor or a list of names, got []"),
        ([3], "outputs must be the name of a tensor or a list of names, got [3]"),
    ):
        with pytest.raises(OrtopsError) as raised:
            session.predict({"x": X}, outputs=outputs)  # type: ignore[call-overload]
        assert str(raised.value) == message
    with pytest.raises(OrtopsError, match="feeds: input 'x' is missing"):
        session.predict({"labels": LABELS}, outputs="boxes")
    with pytest.raises(OrtopsError) as raised:
        session.predict({"x": X}, outputs="boxes", ema=True)
    assert str(raised.value) == (
        "ema: the model has no averages of its parameters; build it with ema_decay="
    )


def test_predict_joins_batches_of_one_shape_only() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", "time"])
        tape.output(x * tape.initializer("s", np.ones(1, F)), "y")
    session = TrainingSession(
        build_training_model(
            tape.model(), loss="MeanSquaredError", optimizer="SGD", trainable=["s"]
        )
    )
    with pytest.raises(OrtopsError) as raised:
        session.predict([{"x": X[:, :2]}, {"x": X[:, :3]}])
    assert str(raised.value) == (
        "predict: 'y' has shape [11, 2] for one batch and [11, 3] for another, and cannot be "
        "concatenated; give batches of one shape, or predict them separately"
    )


def test_averaged_parameters() -> None:
    session = combined(ema_decay=0.9)
    session.fit(DATA, epochs=3, batch_size=4, progress=False)
    averaged, state = session.predict({"x": X}, outputs="boxes", ema=True), session.state
    np.testing.assert_allclose(averaged, X @ state["u.ema"], rtol=1e-4, atol=1e-5)
    assert np.abs(state["u.ema"] - state["u"]).max() > 1e-4
    found = session.evaluate(DATA, metrics=MeanSquaredError(output="boxes"), ema=True)
    expected = np.square(X @ state["u.ema"] - BOXES).mean()
    assert found["mean_squared_error_boxes"] == pytest.approx(expected, rel=1e-4)
    assert found["loss_boxes"] == pytest.approx(expected, rel=1e-4)


def test_predict_reads_inputs_that_the_loss_does_not() -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        z = tape.input("z", F, ["batch", 2])
        tape.output(x @ tape.initializer("u", U), "y")
        tape.output(z + 1.0, "more")
    session = TrainingSession(
        build_training_model(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    )
    found = session.predict({"x": X, "z": BOXES})
    np.testing.assert_allclose(found["more"], BOXES + 1)
    metric = MeanAbsoluteError(output="more", target="targets")
    measured = session.evaluate({"x": X, "z": BOXES, "targets": BOXES}, metrics=metric)
    assert measured["mean_absolute_error_more"] == pytest.approx(1.0)


def test_predictions_of_a_file_that_are_none() -> None:
    model = build_training_model(detector(), loss="MeanSquaredError", optimizer="SGD")
    (entry,) = (each for each in model.metadata_props if each.key == "ortops.training")
    entry.value = '{"predictions": {"tensor": "boxes"}}'
    with pytest.raises(ModelError) as raised:
        TrainingSession(model)
    assert str(raised.value) == (
        "metadata_props 'ortops.training': 'predictions' must be an array, got {'tensor': 'boxes'}"
    )


def test_accuracy_of_classes_and_of_soft_answers() -> None:
    """Outputs may be classes already; a target of 0.5 is no yes."""
    classes = np.array([1, 2, 3]), np.array([1, 2, 0])
    assert measured(Accuracy(), *classes) == pytest.approx(2 / 3)
    answers = np.array([0.9, 0.9, 0.1]), np.array([0.5, 1.0, 0.0])
    assert measured(Accuracy(threshold=0.5), *answers) == pytest.approx(2 / 3)
