"""Metrics of a sum of losses: a number for each prediction that a metric fits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from violations import all_violations

from ortops import (
    ArgumentError,
    OrtopsError,
    Tape,
    TrainingSession,
    build_training_model,
    losses,
    op,
)
from ortops.callbacks import EarlyStopping
from ortops.metrics import METRICS, Accuracy, ConfusionMatrix, MeanSquaredError, resolve

RNG = np.random.default_rng(0)
WEIGHTS = {
    "a": RNG.normal(size=(4, 3)),
    "b": RNG.normal(size=(4, 2)),
    "yes": RNG.normal(size=(4, 1)),
    "number": RNG.normal(size=(4, 2)),
    "share": RNG.normal(size=(4, 2)),
}
X = RNG.normal(size=(60, 4)).astype(np.float32)
Z = {name: X.astype(np.float64) @ w.astype(np.float32) for name, w in WEIGHTS.items()}
P = 1 / (1 + np.exp(-Z["share"]))
DATA: dict[str, Any] = {
    "x": X,
    "la": RNG.integers(0, 3, 60),
    "lb": RNG.integers(0, 2, 60),
    "ty": RNG.integers(0, 2, (60, 1)).astype(np.float32),
    "tn": RNG.normal(size=(60, 2)).astype(np.float32),
    "ts": RNG.random((60, 2)).astype(np.float32),
}
LOSSES = {
    "a": losses.SoftmaxCrossEntropy("a", target="la"),
    "b": losses.SoftmaxCrossEntropy("b", target="lb"),
    "yes": losses.BinaryCrossEntropyWithLogits("yes", target="ty"),
    "number": losses.MeanSquaredError("number", target="tn"),
    "share": losses.MeanSquaredError("share", target="ts"),  # of what a Sigmoid computes
}


@functools.cache
def session(*heads: str) -> TrainingSession:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 4])
        for name, w in WEIGHTS.items():
            y = x @ tape.initializer(f"w_{name}", w.astype(np.float32))
            tape.output(op.Sigmoid(y) if name == "share" else y, name)
    loss = functools.reduce(lambda one, two: one + two, [LOSSES[head] for head in heads])
    return TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))


def measured(*heads: str, metrics: Any) -> dict[str, float]:
    own = session(*heads)
    data = {name: value for name, value in DATA.items() if name in own.inputs}
    found = own.evaluate(data, metrics=metrics, batch_size=16)
    return {name: value for name, value in found.items() if not name.startswith("loss")}


RIGHT = {
    "a": (Z["a"].argmax(1) == DATA["la"]).mean(),
    "b": (Z["b"].argmax(1) == DATA["lb"]).mean(),
    "yes": ((Z["yes"] > 0) == (DATA["ty"] > 0.5)).mean(),
}
SQUARES = {
    "number": np.square(Z["number"] - DATA["tn"]).mean(),
    "share": np.square(P - DATA["ts"]).mean(),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("heads", [("a", "b"), ("b", "a"), ("number", "b", "share", "a", "yes")])
def test_a_metric_has_a_number_for_each_head_that_it_fits(heads: tuple[str, ...]) -> None:
    found = measured(*heads, metrics=["accuracy"])
    assert list(found) == [f"accuracy_{name}" for name in heads if name in RIGHT]
    assert found == pytest.approx({f"accuracy_{n}": RIGHT[n] for n in heads if n in RIGHT})


@pytest.mark.slow
def test_one_head_that_fits_has_the_bare_name() -> None:
    found = measured("number", "a", metrics=["acc", "mse"])
    assert found == pytest.approx({"acc": RIGHT["a"], "mse": SQUARES["number"]}, rel=1e-4)
    found = measured("share", "a", metrics=["accuracy", "mse"])
    assert found == pytest.approx({"accuracy": RIGHT["a"], "mse": SQUARES["share"]}, rel=1e-4)
    square = MeanSquaredError(output="yes")
    found = measured("share", "number", "yes", metrics=["rmse", Accuracy, square])
    squares = np.square(Z["yes"] - DATA["ty"]).mean()
    expected = {f"rmse_{name}": value**0.5 for name, value in SQUARES.items()}
    expected |= {"accuracy": RIGHT["yes"], "mean_squared_error_yes": squares}
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.sklearn
def test_functions() -> None:
    from sklearn import metrics

    def total(outputs: Any, targets: Any) -> float:
        return float(targets.sum())

    found = measured(
        *("number", "a", "yes"),
        metrics=[metrics.balanced_accuracy_score, metrics.mean_absolute_error, total],
    )
    assert found == pytest.approx(
        {
            "balanced_accuracy_score_a": metrics.balanced_accuracy_score(
                DATA["la"], Z["a"].argmax(1)
            ),
            "balanced_accuracy_score_yes": metrics.balanced_accuracy_score(
                DATA["ty"][:, 0], Z["yes"][:, 0] > 0
            ),
            "mean_absolute_error": np.abs(Z["number"] - DATA["tn"]).mean(),
            "total_number": DATA["tn"].sum(),
            "total_a": DATA["la"].sum(),
            "total_yes": DATA["ty"].sum(),
        },
        rel=1e-4,
    )


def test_each_metric_measures_heads_or_says_that_none_fits() -> None:
    several = dict.fromkeys(["edit_distance", "mean_average_precision"], 0)
    several |= dict.fromkeys(["ndcg", "r2", "mean_absolute_error", "mean_squared_error"], 1)
    several |= {"root_mean_squared_error": 1}
    own, wrong = session("a", "b", "number"), {}
    for name in METRICS:
        expected = [[], [name], [f"{name}_a", f"{name}_b"]][several.get(name, 2)]
        try:
            found = list(own.directions(resolve([name])))
        except ArgumentError as error:
            found = (
                []
                if "fits none of the predictions 'a', 'b', 'number' of" in str(error)
                else [str(error)]
            )
        if found != expected:
            wrong[name] = found
    assert not wrong


def test_one_head_is_named_with_output() -> None:
    matrix = ConfusionMatrix(output="b")
    found = measured("a", "b", metrics=[matrix, Accuracy(target="la")])
    assert found == pytest.approx({"confusion_matrix_b": RIGHT["b"], "accuracy": RIGHT["a"]})
    assert matrix.matrix.sum() == 60


def test_one_head_with_two_targets() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 4])
        tape.output(x @ tape.initializer("w", WEIGHTS["b"].astype(np.float32)), "b")
    own = losses.SoftmaxCrossEntropy
    loss = own("b", target="one") + own("b", target="two")
    built = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))
    data = {"x": X, "one": DATA["lb"], "two": 1 - DATA["lb"]}
    found = built.evaluate(data, metrics=["accuracy"])
    assert found["accuracy_b_one"] == pytest.approx(RIGHT["b"])
    assert found["accuracy_b_two"] == pytest.approx(1 - RIGHT["b"])
    other = built.evaluate(data | {"two": DATA["lb"]}, metrics=[Accuracy(output="b")])
    assert other["accuracy_b_one"] == other["accuracy_b_two"] == pytest.approx(RIGHT["b"])


def test_names_that_meet() -> None:
    with pytest.raises(ArgumentError, match="'accuracy_b': this is also the name of another"):
        measured("a", "b", metrics=["accuracy", Accuracy(output="b")])


def test_an_unknown_output_is_answered_with_names_of_the_model() -> None:
    """Whatever is known of targets: the name is what is wrong."""
    own = session("a", "number")
    data = {name: value for name, value in DATA.items() if name in own.inputs}
    calls: Any = (
        lambda metrics: own.evaluate(data, metrics=metrics),
        lambda metrics: own.fit(data, validation=data, metrics=metrics, progress=False),
        lambda metrics: own.fit(data, metrics=metrics, train_metrics=True, progress=False),
    )
    with all_violations() as check:
        for metrics, hint in (
            ({"numbr": "mse"}, "'numbr'; did you mean 'number'?"),
            ({"??": ["acc"]}, "'??'; known names: 'a', 'b', 'yes', 'number', 'share'"),
            ([Accuracy(output="numbr")], "'numbr'; did you mean 'number'?"),
            ([Accuracy(output="numbr", target="l")], "'numbr'; did you mean 'number'?"),
        ):
            for number, call in enumerate(calls):
                with check((metrics, number)), pytest.raises(OrtopsError) as raised:
                    call(metrics)
                with check((metrics, number)):
                    assert f"the model has no tensor {hint}" in str(raised.value)
    assert own.steps_done == 0


def test_fit_and_what_is_monitored(tmp_path: Path) -> None:
    own = session("a", "b", "number")
    data = {name: value for name, value in DATA.items() if name in own.inputs}
    options: dict[str, Any] = {"metrics": ["acc", "r2"], "train_metrics": True, "progress": False}
    early = EarlyStopping(9, "validation_acc_b")
    history = own.fit(data, validation=data, epochs=2, callbacks=[early], **options)
    names = {"acc_a", "acc_b", "r2"}
    assert names | {f"validation_{name}" for name in names} <= history.history.keys()
    assert early.best == max(history.history["validation_acc_b"])
    steps = own.steps_done
    with pytest.raises(ArgumentError) as raised:
        own.fit(data, validation=data, callbacks=[EarlyStopping(9, "validation_acc")], **options)
    assert str(raised.value) == (
        "EarlyStopping: there are several 'validation_acc': validation_acc_a, validation_acc_b; "
        "monitor one of them"
    )
    assert own.steps_done == steps
