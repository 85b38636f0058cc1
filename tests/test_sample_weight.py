"""Losses with a weight for each row: against repeated rows, PyTorch and scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from violations import all_violations

import ortops
from ortops import ArgumentError, ModelError, Tape, TrainingSession, build_training_model, losses
from ortops.losses import LOSSES
from tests import test_losses_torch
from tests.loss_models import loss_and_gradients
from tests.test_losses_torch import Case

Array = np.ndarray[Any, Any]
REFUSING = {"DPO", "Dice", "InfoNCE"}


def by_row(case: Case) -> bool:
    """Whether the loss has factors for a fixed number of rows."""
    factors = (getattr(case.loss, name, None) for name in ("weights", "weight", "positive_weight"))
    return any(np.ndim(each) > 1 and len(each) > 1 for each in factors if each is not None)


WEIGHED = [
    case for case in test_losses_torch.CASES if case.loss.name not in REFUSING and not by_row(case)
]


def weighed(loss: losses.Loss) -> losses.Loss:
    return replace(loss, sample_weight="weight")


def tokens(rng: np.random.Generator) -> dict[str, Array]:
    return {"labels": np.where(rng.random((6, 4)) < 0.3, -100, rng.integers(0, 5, (6, 4)))}


def taught(rng: np.random.Generator) -> dict[str, Array]:
    return {"labels": rng.integers(0, 5, 6), "teacher": rng.normal(size=(6, 5))}


def words(rng: np.random.Generator) -> dict[str, Array]:
    return {
        "labels": rng.integers(1, 5, (4, 2)),
        "input_lengths": np.array([7, 6, 5, 7]),
        "target_lengths": np.array([2, 1, 0, 2]),
    }


def boxes(rng: np.random.Generator) -> dict[str, Array]:
    """Boxes, a third of which has no area."""
    drawn = rng.uniform(1, 2, (6, 3, 4)) * np.array([-1, -1, 1, 1])
    drawn.reshape(-1, 4)[::3] = 0
    return {"targets": drawn}


def objects(rng: np.random.Generator) -> dict[str, Array]:
    """A class, and the center and sizes of a box."""
    drawn = np.zeros((6, 2, 5))
    drawn[:, 0] = np.c_[rng.integers(0, 2, 6), rng.uniform(0.5, 1.5, (6, 2)), np.full((6, 2), 1.9)]
    return {"targets": drawn}


def none(*_: Any) -> None:
    """Stands for PyTorch's form, which is not needed."""


FURTHER = [
    Case("NextToken", losses.NextToken(), none, {"y": (6, 4, 5)}, tokens),
    Case(
        "NextToken, smoothed, weights",
        losses.NextToken(label_smoothing=0.2, weights=[0.5, 2.0, 0.0, 1.0, 3.0]),
        *(none, {"y": (6, 4, 5)}, tokens),
    ),
    *(
        Case(
            f"Focal {reduction}",
            losses.Focal(
                multiclass=True,
                axis=-1,
                ignore_index=-100,
                alpha=[1, 2, 0, 4, 5],
                reduction=reduction,
            ),
            *(none, {"y": (6, 4, 5)}, tokens),
        )
        for reduction in ("mean", "sum")
    ),
    Case(
        "Focal, independent",
        losses.Focal(alpha=0.3),
        none,
        {"y": (6, 3)},
        lambda rng: {"targets": rng.uniform(size=(6, 3))},
    ),
    *(
        Case(
            f"CTC {reduction}",
            losses.CTC(batch_first=True, reduction=reduction),
            *(none, {"y": (4, 7, 5)}, words),
        )
        for reduction in ("mean", "sum")
    ),
    Case(
        "Distillation",
        losses.Distillation(alpha=0.5),
        *(none, {"y": (6, 5)}, taught),
    ),
    Case("GIoU", losses.GIoU(), none, {"y": (6, 3, 4)}, boxes),
    Case("CIoU, sum", losses.CIoU(reduction="sum"), none, {"y": (6, 3, 4)}, boxes),
    Case(
        "distributions",
        losses.DistributionFocal(),
        *(none, {"y": (6, 3, 5)}, lambda rng: {"targets": rng.uniform(0, 4, (6, 3))}),
    ),
    *(
        Case(
            f"detection {reduction}",
            losses.TaskAligned(strides=[1, 2], reduction=reduction),
            *(none, {"y": (6, 6, 5)}, objects),
        )
        for reduction in ("mean", "sum")
    ),
]


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len([*WEIGHED, *FURTHER]), 8))
def test_a_weight_of_three_is_the_row_three_times(first: int) -> None:
    with all_violations() as check:
        for case in [*WEIGHED, *FURTHER][first : first + 8]:
            with check(case.name):
                is_the_row_three_times(case)


def is_the_row_three_times(case: Case) -> None:
    rng = np.random.default_rng(3)
    outputs = {name: rng.normal(size=shape) for name, shape in case.outputs.items()}
    feeds = case.feeds(rng)
    rows = len(next(iter(outputs.values())))
    times = np.array([3, 0, 1, 2, 5, 1, 0, 4])[:rows]
    repeat = lambda arrays: {name: np.repeat(a, times, axis=0) for name, a in arrays.items()}  # noqa: E731
    expected, wide = loss_and_gradients(case.loss, repeat(outputs), repeat(feeds), case.squash)
    weights = {"weight": times.astype(np.float64)}
    value, found = loss_and_gradients(weighed(case.loss), outputs, feeds | weights, case.squash)
    assert value == pytest.approx(expected, rel=1e-10, abs=1e-12)
    places = np.repeat(np.arange(rows), times)
    for name, gradient in found.items():
        summed = np.zeros_like(gradient)
        np.add.at(summed, places, wide[name])
        np.testing.assert_allclose(gradient, summed, rtol=1e-9, atol=1e-12)


def test_every_loss_has_sample_weights_or_refuses_them() -> None:
    assert {case.loss.name for case in [*WEIGHED, *FURTHER]} | REFUSING >= set(LOSSES)


def line(weight: float = 0.5) -> Any:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 1])
        tape.output(x * tape.initializer("w", np.full((1, 1), weight, np.float32)), "y")
    return tape.model()


def data(rows: int = 11) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 1)).astype(np.float32)
    noise = rng.normal(size=(rows, 1)).astype(np.float32)
    weight = rng.uniform(0, 3, rows).astype(np.float32)
    weight[1] = 0
    return {"x": x, "targets": 2 * x + noise, "weight": weight}


def session(**options: Any) -> TrainingSession:
    loss = losses.MeanSquaredError(sample_weight="weight")
    return TrainingSession(build_training_model(line(), loss=loss, trainable=["w"], **options))


@pytest.mark.quick(2)
@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_evaluate_is_scikit_learns_weighted_error_with_any_batches(batch_size: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rows = data()
    expected = metrics.mean_squared_error(
        rows["targets"], 0.5 * rows["x"].astype(np.float64), sample_weight=rows["weight"]
    )
    found = session(optimizer="SGD").evaluate(rows, batch_size=batch_size)
    assert found["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("part", [2, 3, 4])
def test_accumulated_parts_make_the_step_of_the_whole_batch(part: int) -> None:
    rows = data(12)
    x, y, w = (rows[name].astype(np.float64).ravel() for name in ("x", "targets", "weight"))
    expected = 0.5 - 0.1 * (w * 2 * (0.5 * x - y) * x).sum() / w.sum()
    trained = session(optimizer=ortops.optimizers.SGD(0.1))
    history = trained.fit(rows, epochs=1, batch_size=part, accumulate=12 // part, progress=False)
    assert trained.state["w"].item() == pytest.approx(expected, rel=1e-5)
    assert history[0]["loss"] == pytest.approx((w * (0.5 * x - y) ** 2).sum() / w.sum(), rel=1e-5)


def test_the_loss_of_an_epoch_is_weighted_across_batches() -> None:
    rows = data()
    trained = session(optimizer=ortops.optimizers.SGD(0.0))
    history = trained.fit(rows, epochs=1, batch_size=4, progress=False)
    x, y, w = (rows[name].astype(np.float64).ravel() for name in ("x", "targets", "weight"))
    assert history[0]["loss"] == pytest.approx((w * (0.5 * x - y) ** 2).sum() / w.sum(), rel=1e-5)


def test_rows_without_weight_have_loss_zero() -> None:
    rows = data(4)
    rows["weight"][:] = 0
    trained = session(optimizer="SGD")
    assert trained.step(rows)["loss"] == 0
    assert trained.state["w"].item() == 0.5


def test_a_declared_input_weighs_tokens() -> None:
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(2, 4, 3)), rng.integers(0, 3, (2, 4))
    weight = rng.uniform(size=(2, 4))
    with Tape() as tape:
        x = tape.input("x", np.float64, ["N", 4, 3])
        tape.output(x + tape.initializer("p", np.zeros((1, 1, 1))), "y")
    loss = losses.SoftmaxCrossEntropy(axis=-1, sample_weight="weight")
    inputs = {"weight": (np.float64, ["N", 4])}
    model = build_training_model(
        tape.model(), loss=loss, optimizer="SGD", inputs=inputs, trainable=["p"]
    )
    found = TrainingSession(model).step({"x": logits, "labels": labels, "weight": weight})
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    each = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    assert found["loss"] == pytest.approx((weight * each).sum() / weight.sum())


def test_summands_share_weights() -> None:
    both = losses.MeanSquaredError(sample_weight="weight") + losses.L1(sample_weight="weight")
    rows = data()
    model = build_training_model(line(), loss=both, optimizer="SGD", trainable=["w"])
    found = TrainingSession(model).step(rows)
    error = np.abs(rows["targets"] - 0.5 * rows["x"]).ravel().astype(np.float64)
    assert found["loss"] == pytest.approx(np.average(error**2 + error, weights=rows["weight"]))


@pytest.mark.parametrize("name", ["Dice", "InfoNCE", "own"])
def test_losses_that_are_no_average_of_rows_refuse_weights(name: str) -> None:
    class Own(losses.Loss):
        def terms(self, prediction: Any, target: Any) -> Any:
            return losses.MeanSquaredError().terms(prediction, target)

    made: dict[str, Any] = {
        "Dice": losses.Dice(sample_weight="w8"),
        "InfoNCE": losses.InfoNCE(query="y", key="y", sample_weight="w8"),
        "own": Own(sample_weight="w8"),
    }
    with pytest.raises(ModelError, match="sample_weight needs a loss that is an average over rows"):
        build_training_model(line(), loss=made[name], optimizer="SGD")


def test_weights_of_a_sequence_are_not_taken_for_weights_of_rows() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float64, ["time", "batch", 2])
        tape.output(x + tape.initializer("p", np.zeros((1, 1, 2))), "y")
    loss = losses.MeanSquaredError(sample_weight="weight")
    with pytest.raises(ModelError, match="whose rows are on another; declare its dimensions"):
        build_training_model(tape.model(), loss=loss, optimizer="SGD")
    inputs = {"weight": (np.float64, [1, "batch"])}
    model = build_training_model(
        tape.model(), loss=loss, optimizer="SGD", inputs=inputs, trainable=["p"]
    )
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 4, 2)), rng.uniform(size=(1, 4))
    feeds = {"x": x, "targets": np.zeros_like(x), "weight": weight}
    expected = (weight[..., None] * x**2).sum() / (weight.sum() * 3 * 2)
    assert TrainingSession(model).step(feeds)["loss"] == pytest.approx(expected)


def test_wrong_names_and_calls_are_refused() -> None:
    with pytest.raises(ModelError, match="already has a tensor 'x'; give sample_weight another"):
        build_training_model(line(), loss=losses.L1(sample_weight="x"), optimizer="SGD")
    with pytest.raises(ModelError, match="'targets' is already the target of a loss"):
        build_training_model(line(), loss=losses.L1(sample_weight="targets"), optimizer="SGD")
    with pytest.raises(ArgumentError, match="sample_weight must be the name of an input"):
        losses.L1(sample_weight=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a sum of losses has no sample_weight"):
        losses.loss.Combined(summands=((1.0, losses.L1()),), sample_weight="w8")


def linear(features: int, outputs: int) -> Any:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", features])
        w = tape.initializer("w", np.zeros((features, outputs), np.float32))
        tape.output(x @ w + tape.initializer("b", np.zeros(outputs, np.float32)), "y")
    return tape.model()


WHOLE: dict[str, Any] = {"epochs": 1500, "batch_size": 1000, "learning_rate": 0.05}


@pytest.mark.slow
@pytest.mark.sklearn
def test_the_regressor_finds_scikit_learns_weighted_line() -> None:
    from sklearn.linear_model import LinearRegression

    from ortops.sklearn import OnnxRegressor

    rng = np.random.default_rng(2)
    X, w = rng.normal(size=(40, 2)), rng.uniform(0, 3, 40)
    y = X @ [1.0, -2.0] + rng.normal(size=40)
    theirs = LinearRegression().fit(X, y, sample_weight=w)
    ours = OnnxRegressor(linear, **WHOLE).fit(X, y, sample_weight=w)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=1e-3)
    score = ours.score(X, y, sample_weight=w)
    assert score == pytest.approx(theirs.score(X, y, sample_weight=w), abs=1e-4)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.sklearn
@pytest.mark.parametrize("class_weight", [None, "balanced", {"a": 5.0}])
def test_the_classifier_finds_scikit_learns_weighted_probabilities(class_weight: Any) -> None:
    import pickle

    from sklearn.linear_model import LogisticRegression

    from ortops.sklearn import OnnxClassifier

    rng = np.random.default_rng(2)
    X, w = rng.normal(size=(90, 2)), rng.uniform(0.1, 3, 90)
    over = np.stack([X[:, 0] + rng.normal(size=90) > 0, rng.random(90) > 0.7])
    y = np.array(["a", "b", "c"])[over.sum(axis=0)]
    factors = np.ones(90)
    if class_weight == "balanced":  # newer versions of LogisticRegression count weights, not rows
        factors = np.array([90 / (3 * (y == label).sum()) for label in y])
    elif class_weight:
        factors[y == "a"] = 5
    theirs = LogisticRegression(C=np.inf, tol=1e-8).fit(X, y, sample_weight=w * factors)
    ours = OnnxClassifier(linear, class_weight=class_weight, **WHOLE).fit(X, y, sample_weight=w)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=2e-3)
    again = pickle.loads(pickle.dumps(ours))
    np.testing.assert_array_equal(again.predict_proba(X), ours.predict_proba(X))
    if class_weight != "balanced":
        again.partial_fit(X, y)  # each row counts 1, or as its class


@pytest.mark.sklearn
def test_estimators_refuse_weights_that_they_cannot_use() -> None:
    from ortops.sklearn import OnnxClassifier, OnnxRegressor

    X, y = np.arange(4.0)[:, None], np.array([0, 1, 0, 1])
    begun = OnnxRegressor(linear, epochs=1).fit(X, y)
    with pytest.raises(ArgumentError, match="sample_weight must be None now"):
        begun.partial_fit(X, y, sample_weight=np.ones(4))
    both = losses.MeanSquaredError() + losses.L1()
    with pytest.raises(ArgumentError, match=r"need one loss of ortops\.losses"):
        OnnxRegressor(linear, loss=both).fit(X, y, sample_weight=np.ones(4))
    with pytest.raises(ValueError, match="Negative values"):
        OnnxRegressor(linear).fit(X, y, sample_weight=-np.ones(4))
    with pytest.raises(ArgumentError, match="class_weight must be a dict or None for partial_fit"):
        OnnxClassifier(linear, class_weight="balanced").partial_fit(X, y, classes=[0, 1])
