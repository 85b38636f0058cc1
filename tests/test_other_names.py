"""Names of other libraries: each leads to the one of ortops, or to a message that explains it."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from violations import all_violations

import ortops
from models import echo, line, mlp
from ortops import callbacks, losses, metrics, op, optimizers
from ortops._common.other_names import CALLBACKS
from ortops.callbacks import EarlyStopping
from ortops.engine.building.builder import BuildSettings
from ortops.optimizers import SGD, Adam

BATCH = {"images": np.ones((4, 4), np.float32), "labels": np.array([0, 1, 2, 1])}


def session(**arguments: Any) -> ortops.TrainingSession:
    given = {"loss": "cross_entropy", "optimizer": "sgd"} | arguments
    return ortops.TrainingSession(ortops.build_training_model(mlp.mlp((4, 3)), **given))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "SoftmaxCrossEntropy") for name in ("CrossEntropyLoss", "cross_entropy", "ce")),
        ("sparse_categorical_crossentropy", "SoftmaxCrossEntropy"),
        *((name, "MeanSquaredError") for name in ("mse", "MSELoss", "mse_loss")),
        *((name, "L1") for name in ("mae", "L1Loss", "MeanAbsoluteError", "l1")),
        ("binary_crossentropy", "BinaryCrossEntropy"),
        ("BCEWithLogitsLoss", "BinaryCrossEntropyWithLogits"),
        ("NLLLoss", "NegativeLogLikelihood"),
        ("KLDivLoss", "KullbackLeibler"),
        ("CTCLoss", "CTC"),
        ("SmoothL1Loss", "SmoothL1"),
        ("TripletMarginLoss", "Triplet"),
    ],
)
def test_losses_of_other_libraries(name: str, expected: str) -> None:
    found, _ = ortops._common.other_names.find_name(name, losses.LOSSES, losses.OTHER_NAMES)
    assert found == expected


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("bce", "'BinaryCrossEntropyWithLogits' for logits"),
        ("BCELoss", "'BinaryCrossEntropy' for other"),
        ("rmse", "'MeanSquaredError'"),
        ("categorical_crossentropy", r"probabilities=True"),
        ("log_loss", "'SoftmaxCrossEntropy' for classes"),
        ("kl_divergence", 'reduction="batchmean"'),
        ("KLD", 'reduction="batchmean"'),
        ("poisson", "log_input=False"),
    ],
)
def test_losses_with_several_meanings_are_explained(name: str, part: str) -> None:
    with pytest.raises(ortops.ArgumentError, match=f"^unknown loss '{name}'; use .*{part}"):
        losses.resolve(name)


def test_names_of_keras_are_its_formulas() -> None:
    """What the hints name; under these names, gradients were 1/C of them, or of exp(y)."""
    draw = np.random.default_rng(0)
    t, y = (draw.dirichlet(np.ones(5), 6).astype(np.float32) for _ in range(2))
    divergence = losses.KullbackLeibler(reduction="batchmean")
    found = echo.loss_at(divergence, np.log(y), targets=t)
    assert found == pytest.approx((t * np.log(t / y)).sum(-1).mean(), rel=1e-3)
    found = echo.loss_at(losses.PoissonNLL(log_input=False), y, targets=t)
    assert found == pytest.approx((y - t * np.log(y + 1e-7)).mean(), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adamw", "AdamW"), ("sgd", "SGD"), ("RMSProp", "RMSprop"), ("adam", "Adam")],
)
def test_optimizers_in_lower_case(name: str, expected: str) -> None:
    assert optimizers.resolve(name).name == expected


def test_metrics_of_other_libraries_keep_their_names_in_results() -> None:
    found = session().evaluate(BATCH, metrics=["accuracy", "acc", "f1_score"])
    assert found["acc"] == found["accuracy"]
    assert "f1_score" in found
    assert {type(metrics.resolve(name)[name]).__name__ for name in ("mse", "MSE")} == {
        "MeanSquaredError"
    }
    with pytest.raises(ortops.ArgumentError, match="one-hot"):
        metrics.resolve("categorical_accuracy")


def test_every_other_name_is_a_name_or_a_hint() -> None:
    tables: list[tuple[Any, Any]] = [
        (losses.LOSSES, losses.OTHER_NAMES),
        (optimizers.OPTIMIZERS, optimizers.OTHER_NAMES),
        (metrics.METRICS, metrics.OTHER_NAMES),
    ]
    for known, others in tables:
        for name, meaning in others.items():
            assert name == name.lower().replace("_", "")
            assert meaning in known or meaning.startswith("use '") or "use Momentum" in meaning


@pytest.mark.torch
def test_objects_of_torch_are_refused_by_name() -> None:
    import torch

    for given in (torch.nn.MSELoss(), torch.nn.MSELoss, torch.nn.functional.mse_loss):
        with pytest.raises(ortops.ArgumentError, match=r"use ortops\.losses\.MeanSquaredError\(\)"):
            losses.resolve(given)  # type: ignore[arg-type]
    with pytest.raises(ortops.ArgumentError, match=r"use ortops\.optimizers\.AdamW\("):
        optimizers.resolve(torch.optim.AdamW)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "labels",
    [
        np.eye(3)[[0, 1, 2, 1]],
        np.eye(3, dtype=np.int64)[[0, 1, 2, 1]],
        np.eye(3, dtype=bool)[[0] * 4],
    ],
    ids=["float64", "int64", "bool"],
)
def test_one_hot_labels_are_explained(labels: np.ndarray[Any, Any]) -> None:
    own = session()
    given = {**BATCH, "labels": labels}
    for call in (own.step, lambda data: own.fit(data, progress=False), own.evaluate):
        with pytest.raises(ortops.FeedError, match=r", or give labels\.argmax\(axis=1\)$"):
            call(given)
    own.step({**given, "labels": labels.argmax(axis=1)})


def test_a_column_of_labels_is_explained() -> None:
    with pytest.raises(ortops.FeedError, match=r"the axis of size 1: labels\[\.\.\., 0\]"):
        session().step({**BATCH, "labels": BATCH["labels"][:, None]})


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"x": 0}, "data set"),
        ({"validation_data": 0}, "use validation="),
        ({"verbose": 0}, "use progress="),
        ({"steps_per_epoch": 3}, "iterable"),
        ({"validation_freq": 2}, "validate_every="),
        ({"device": "cuda"}, "providers="),
        ({"collate_fn": len}, "use collate="),
        ({"epoch": 1}, "did you mean 'epochs'?"),
        ({"loss": "mse"}, "build_training_model"),
    ],
)
def test_arguments_of_keras_are_explained(arguments: dict[str, Any], remedy: str) -> None:
    (name,) = arguments
    own = line.session()
    with pytest.raises(TypeError) as error:
        own.fit(line.BATCH, **arguments)
    assert isinstance(error.value, ortops.ArgumentError)
    assert str(error.value).startswith(f"fit has no argument '{name}'; ")
    assert remedy in str(error.value)


def test_data_and_labels_by_position_are_explained() -> None:
    own: Any = line.session()
    for method in (own.fit, own.evaluate, own.predict):
        with pytest.raises(TypeError, match="one data set") as error:
            method(line.BATCH["x"], line.BATCH["targets"])
        assert isinstance(error.value, ortops.ArgumentError)


def test_the_builders_have_the_same_settings() -> None:
    declared = typing.get_type_hints(BuildSettings).keys()
    own = inspect.signature(ortops.build_training_model).parameters.values()
    expected = {each.name: each.default for each in own if each.kind is each.KEYWORD_ONLY}
    assert declared == expected.keys()
    for call, more in ((ortops.build_training_file, set()), (ortops.add_training, {"name"})):
        given = inspect.signature(call).parameters.values()
        found = {each.name: each.default for each in given if each.kind is each.KEYWORD_ONLY}
        assert {n: default for n, default in found.items() if n not in more} == expected
        with pytest.raises(TypeError, match="missing a required argument"):
            call("model.onnx")


def test_arguments_of_the_builder_are_explained() -> None:
    for name, remedy in (
        *(("lr", "learning_rate"), ("criterion", "loss="), ("metrics", "evaluate")),
        *(("requires_grad", "trainable="), ("frozen_params", r"patterns such as '!layer\.\*'")),
        *(("lr_scheduler", "a schedule"), ("class_weight", "to fit or evaluate")),
        *(("param_groups", "groups="), ("additional_output_names", "outputs=")),
    ):
        with pytest.raises(TypeError, match=f"has no argument '{name}'; .*{remedy}"):
            session(**{name: 1})


def named_layers() -> onnx.ModelProto:
    with ortops.Tape(name="layers") as tape:
        x = tape.input("x", np.float32, ["batch", 2])
        for number in range(3):
            weight = np.eye(2, dtype=np.float32) * (number + 2)
            x = x @ tape.initializer(f"encoder.layer.{number}.dense.weight", weight)
        tape.output(x, "y")
    return tape.model()


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("encoder.layers.1.*", "'encoder.layer.1.*'"),
        ("encoder.layer.11.*", "'encoder.layer.1.*'"),
        ("model.dense", "dense"),
        ("encoder.layer.2.dense.wieght", "'encoder.layer.2.dense.weight'"),
    ],
)
def test_a_pattern_without_matches_shows_the_nearest_names(pattern: str, near: str) -> None:
    with pytest.raises(ortops.ModelError) as error:
        ortops.build_training_model(
            named_layers(), loss="mse", optimizer="sgd", trainable=[pattern]
        )
    assert f"'{pattern}'; did you mean " in str(error.value)
    assert near in str(error.value)


FUNCTIONS: list[tuple[Callable[..., Any], type[Exception]]] = [
    (lambda: 0.0, ortops.ArgumentError),
    (lambda prediction: 0.0, ortops.ModelError),
    (lambda prediction: prediction, ortops.ModelError),
]


@pytest.mark.parametrize(("function", "kind"), FUNCTIONS, ids=["none", "a float", "no scalar"])
def test_functions_that_are_no_losses_are_explained(
    function: Callable[..., Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="a loss is a function of Tensors, the prediction"):
        session(loss=function)


def test_a_loss_may_have_one_parameter() -> None:
    own = session(loss=lambda prediction: op.ReduceMean(prediction * prediction, keepdims=0))
    assert own.step({"images": BATCH["images"]})["loss"] >= 0


def test_weights_of_an_adapter_lead_to_merge() -> None:
    base = mlp.mlp((4, 3))
    model = ortops.lora.add(base, targets=["fc1"], rank=2)
    own = ortops.TrainingSession(
        ortops.build_training_model(model, loss="cross_entropy", optimizer="sgd")
    )
    with pytest.raises(ortops.ModelError, match=r"ortops\.lora\.merge"):
        own.inference_model(original=base)


def test_arguments_and_callbacks_of_other_libraries_lead_to_ours() -> None:
    own: Any = line.session()
    fit = lambda name: own.fit(line.BATCH, **{name: 1})  # noqa: E731
    cases: list[tuple[Any, list[str], str]] = [
        (fit, ["load_best_model_at_end"], r"EarlyStopping\(restore_best=True\)"),
        (fit, ["per_device_train_batch_size", "train_batch_size"], "batch_size="),
        (fit, ["num_train_epochs", "max_epochs"], "epochs="),
        (fit, ["warmup_steps", "lr_scheduler_type"], "learning_rate= of the optimizer"),
        (fit, ["max_grad_norm", "gradient_clip_val"], "clip_norm="),
        (fit, ["eval_strategy"], "validate_every="),
        (fit, ["save_steps", "save_strategy"], "Checkpoint"),
        (fit, ["early_stopping", "early_stopping_rounds", "patience"], "EarlyStopping"),
        (fit, ["fp16", "bf16", "precision"], "types of the model"),
        (fit, ["weight_decay"], "AdamW"),
        (fit, ["logging_steps", "report_to"], "TensorBoard"),
        (fit, ["dataloader_num_workers"], "prefetch="),
        (lambda name: SGD(**{name: 1}), ["lr"], "learning_rate="),
        (lambda name: Adam(**{name: 1}), ["eps"], "epsilon="),
        (lambda name: Adam(**{name: 1}), ["betas"], "alpha= and beta="),
        (lambda name: EarlyStopping(**{name: 1}), ["restore_best_weights"], "restore_best="),
        (lambda name: EarlyStopping(**{name: 1}), ["min_delta"], "minimum_change="),
        (lambda name: callbacks.BestModel(**{name: 1}), ["filepath"], "path first"),
    ]
    with all_violations() as check:
        for call, names, remedy in cases:
            for name in names:
                with (
                    check(name),
                    pytest.raises(
                        ortops.ArgumentError, match=f"has no argument '{name}'; .*{remedy}"
                    ),
                ):
                    call(name)
        for name, remedy in CALLBACKS.items():
            with check(name), pytest.raises(AttributeError, match=re.escape(remedy)):
                getattr(callbacks, name)
    assert not hasattr(callbacks, "Unknown")
    for name in re.findall(r"\b[A-Z]\w+", " ".join(CALLBACKS.values())):
        assert hasattr(callbacks, name), name
