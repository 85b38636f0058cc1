"""Losses and metrics by output, in a dict: several heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_models import assert_same_arrays

from ortops import (
    ArgumentError,
    ModelError,
    OrtopsError,
    Tape,
    TrainingSession,
    build_training_model,
    losses,
    op,
)
from ortops.callbacks import EarlyStopping
from ortops.losses import L1, BinaryCrossEntropyWithLogits, MeanSquaredError, SoftmaxCrossEntropy
from ortops.metrics import Accuracy, MeanAbsoluteError, TopK
from ortops.optimizers import SGD

Array = np.ndarray[Any, Any]


def heads() -> Any:
    rng = np.random.default_rng(1)
    with Tape(name="heads") as tape:
        x = tape.input("x", np.float32, ["batch", 4])

        def dense(y: Any, name: str, shape: tuple[int, int]) -> Any:
            weight = rng.standard_normal(shape).astype(np.float32)
            return y @ tape.initializer(f"{name}.weight", weight)

        trunk = op.Tanh(dense(x, "trunk", (4, 5)))
        tape.output(dense(trunk, "kind", (5, 3)), "kind")
        tape.output(dense(trunk, "color", (5, 2)), "color")
        tape.output(dense(trunk, "price", (5, 1)), "price")
    return tape.model()


def data(count: int = 12) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((count, 4)).astype(np.float32),
        "labels_kind": rng.integers(3, size=count),
        "labels_color": rng.integers(2, size=count),
        "targets_price": rng.standard_normal((count, 1)).astype(np.float32),
    }


LOSSES: dict[str, Any] = {
    "kind": "SoftmaxCrossEntropy",
    "color": SoftmaxCrossEntropy(label_smoothing=0.1),
    "price": 0.3 * MeanSquaredError(),
}


def session(loss: Any = None, **more: Any) -> TrainingSession:
    given = {"loss": loss or LOSSES, "optimizer": SGD(0.1), **more}
    return TrainingSession(build_training_model(heads(), **given))


@pytest.mark.torch
def test_steps_are_those_of_torch() -> None:
    import torch
    from torch.nn.functional import cross_entropy, mse_loss

    made, batch = session(), data()
    own = {n: torch.tensor(a.copy(), requires_grad=True) for n, a in made.parameters.items()}
    given = {name: torch.tensor(array) for name, array in batch.items()}
    for _ in range(3):
        trunk = torch.tanh(given["x"] @ own["trunk.weight"])
        found = {name: trunk @ own[f"{name}.weight"] for name in LOSSES}
        parts = {
            "loss_kind": cross_entropy(found["kind"], given["labels_kind"]),
            "loss_color": cross_entropy(found["color"], given["labels_color"], label_smoothing=0.1),
            "loss_price": mse_loss(found["price"], given["targets_price"]),
        }
        loss = parts["loss_kind"] + parts["loss_color"] + 0.3 * parts["loss_price"]
        gradients = torch.autograd.grad(loss, list(own.values()))
        outputs = made.step(batch)
        for name, value in {**parts, "loss": loss}.items():
            assert outputs[name] == pytest.approx(value.item(), rel=1e-5)
        with torch.no_grad():
            for weight, gradient in zip(own.values(), gradients, strict=True):
                weight -= 0.1 * gradient
    for name, weight in own.items():
        np.testing.assert_allclose(made.parameters[name], weight.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_is_the_sum_with_default_targets() -> None:
    by_hand = (
        SoftmaxCrossEntropy("kind", target="labels_kind")
        + SoftmaxCrossEntropy("color", target="labels_color", label_smoothing=0.1)
        + 0.3 * MeanSquaredError("price", target="targets_price")
    )
    assert losses.resolve(LOSSES) == by_hand
    one, other = session(), session(by_hand)
    for made in (one, other):
        made.fit(data(), epochs=2, batch_size=5, sample_weight=np.arange(12) % 3, progress=False)
    assert_same_arrays(dict(one.state), dict(other.state))
    more = one.with_trainable(["kind.*"])  # the file describes the sum
    assert more.loss_names() == ["loss", "loss_kind", "loss_color", "loss_price"]


def test_other_forms_of_losses() -> None:
    found: Any = losses.resolve({"a": L1, "b": L1(target="y") + 2 * BinaryCrossEntropyWithLogits()})
    assert [(w, each.name, each.output, each.target) for w, each in found.summands] == [
        (1.0, "L1", "a", "targets_a"),
        (1.0, "L1", "b", "y"),
        (2.0, "BinaryCrossEntropyWithLogits", "b", "targets_b"),
    ]
    alone = session({"price": "mse"})
    assert sorted(alone.inputs) == ["targets_price", "x"]


def test_metrics_by_output() -> None:
    made, rows = session(), data()
    metrics = {"kind": ["accuracy", TopK(2)], "color": "acc", "price": [MeanAbsoluteError, worst]}
    found = made.evaluate(rows, metrics=metrics, batch_size=5)
    y = made.predict({"x": rows["x"]})
    expected = {
        "accuracy_kind": (y["kind"].argmax(1) == rows["labels_kind"]).mean(),
        "acc_color": (y["color"].argmax(1) == rows["labels_color"]).mean(),
        "mean_absolute_error_price": abs(y["price"] - rows["targets_price"]).mean(),
        "worst_price": abs(y["price"] - rows["targets_price"]).max(),
    }
    kind = np.argsort(y["kind"], axis=1)[:, 1:]
    expected["top_k_kind"] = (kind == rows["labels_kind"][:, None]).any(1).mean()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    assert found.keys() == {"loss", "loss_kind", "loss_color", "loss_price", *expected}
    assert found["accuracy_kind"] == made.evaluate(rows, metrics=[Accuracy()])["accuracy_kind"]


def worst(outputs: Array, targets: Array) -> Any:
    return abs(outputs - targets).max()


@pytest.mark.slow
def test_metrics_by_output_in_fit() -> None:
    stop = EarlyStopping(monitor="validation_accuracy_kind", patience=3)
    given: dict[str, Any] = {"metrics": {"kind": ["accuracy"], "price": ["mae"]}}
    given |= {"validation": data(5), "train_metrics": True, "callbacks": [stop]}
    entry = session().fit(data(), progress=False, **given)[-1]
    names = {"accuracy_kind", "mae_price"}
    assert names | {f"validation_{name}" for name in names} <= entry.keys()


def test_what_does_not_fit_is_refused() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        ({"kinds": "L1"}, ModelError, r"'kinds'.*outputs are 'kind', 'color', 'price'"),
        ({}, ArgumentError, "a loss for each output that counts"),
        ({"kind": len}, ArgumentError, r"loss\['kind'\] must be one of ortops.losses"),
        (
            {"kind": L1("price")},
            ArgumentError,
            r"loss\['kind'\] must leave out output=, got 'price'",
        ),
        ({"kind": "Triplet"}, ArgumentError, "reads several tensors"),
        ({"kind": 3}, ArgumentError, "loss must be one of"),
    ]
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            build_training_model(heads(), loss=given, optimizer="SGD")
    for metrics, message in (
        ({"kinds": "accuracy"}, "'kinds'"),
        (
            {"kind": Accuracy(output="color")},
            r"metrics\['kind'\] must leave out output=, got 'color'",
        ),
        ({"kind": 3}, "metrics must be a list of metrics, got 3"),
        ({"kind": ["accuracy", "accuracy"]}, "'accuracy_kind': this is also the name of another"),
    ):
        with pytest.raises(OrtopsError, match=message):
            session().evaluate(data(), metrics=metrics)
