"""What the builder puts between gradients and parameters: clipping, averages, groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import Arrays, affine, affine_batch, classifier, initializers, labelled

import ortops
from models.lenet import lenet
from ortops import (
    ArgumentError,
    ModelError,
    OrtopsError,
    TrainingSession,
    build_training_model,
    schedules,
)
from ortops.engine.check import check
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.update_groups import Group, split
from ortops.engine.lowering import lower_optimizers
from ortops.engine.trainable.metadata import training_metadata
from ortops.engine.trainable.step_graph import flatten
from ortops.graph.edit import remove_defaults
from ortops.graph.files.external import detach
from ortops.graph.names import Names
from ortops.graph.tensor import Tape
from ortops.optimizers import SGD, Adam, AdamW, Custom, Momentum, Optimizer

STEPS = 20
WAYS = {
    "joined": {},
    "apart": {"settings": Settings(joined=0)},
    "apart, in chunks": {"settings": Settings(joined=0, chunk=64)},
    "passed on": {"settings": Settings(joined=0, chunk=64, passed=0)},
    "python": {"kernels": "python"},
}


def trainable(optimizer: Any = "SGD", model: Any = None, **options: Any) -> onnx.ModelProto:
    model = classifier() if model is None else model
    return build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=optimizer, **options)


def batch(seed: int, scale: float = 1.0) -> Arrays:
    feeds = labelled((6,), seed=seed)
    return feeds | {"x": feeds["x"] * np.float32(scale)}


class Torch:
    """The classifier in PyTorch, with the same weights."""

    def __init__(self, model: onnx.ModelProto) -> None:
        import torch

        self.parameters = {
            name: torch.tensor(array, requires_grad=True)
            for name, array in initializers(model.graph).items()
        }

    def step(self, feeds: Arrays, optimizer: Any, clip: Callable[[Any], object]) -> None:
        import torch

        w1, b1, w2 = (self.parameters[name] for name in ("w1", "b1", "w2"))
        logits = torch.tanh(torch.from_numpy(feeds["x"]) @ w1 + b1) @ w2
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(feeds["labels"]))
        optimizer.zero_grad()
        loss.backward()
        clip(list(self.parameters.values()))
        optimizer.step()

    def assert_same(self, state: Any) -> None:
        for name, parameter in self.parameters.items():
            np.testing.assert_allclose(
                state[name], parameter.detach().numpy(), rtol=1e-4, atol=2e-6, err_msg=name
            )


def no_clip(parameters: Any) -> None:
    pass


# ------------------------------------------------------------------------------------- clipping


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"clip_value": 0.02}, {"both": True}])
def test_gradients_are_clipped_as_in_torch(options: dict[str, Any], way: str) -> None:
    import torch

    norms = []

    def clip(parameters: Any) -> None:
        before = torch.cat([p.grad.flatten() for p in parameters]).clone()
        if "clip_value" in given:
            torch.nn.utils.clip_grad_value_(parameters, given["clip_value"])
        if "clip_norm" in given:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, given["clip_norm"])))
        after = torch.cat([p.grad.flatten() for p in parameters])
        clipped.append(not torch.equal(before, after))

    given = {"clip_norm": 0.05, "clip_value": 0.03} if "both" in options else options
    clipped: list[bool] = []
    model = classifier()
    twin = Torch(model)
    optimizer = torch.optim.SGD(twin.parameters.values(), lr=0.5, momentum=0.9)
    ours = trainable(Momentum(0.5, alpha=0.9), model, **given)
    session = TrainingSession(ours, **WAYS[way])
    for number in range(STEPS):
        feeds = batch(number, scale=3.0 if number % 2 else 0.1)
        session.step(feeds)
        twin.step(feeds, optimizer, clip)
    assert any(clipped)
    twin.assert_same(session.state)
    if options == {"clip_norm": 1.0}:
        assert min(norms) < 1.0 < max(norms), norms


def test_a_norm_that_is_small_is_left_alone() -> None:
    plain, clipped = (
        TrainingSession(trainable(SGD(0.5), **options)) for options in ({}, {"clip_norm": 1e3})
    )
    for number in range(5):
        plain.step(batch(number))
        clipped.step(batch(number))
    for name in ("w1", "b1", "w2"):
        np.testing.assert_array_equal(clipped.state[name], plain.state[name])


def test_the_norm_is_that_of_all_parameters_in_float64_too() -> None:
    model, feeds = affine(dtype=np.float64), affine_batch(dtype=np.float64)
    built = build_training_model(model, loss="MeanSquaredError", optimizer=SGD(1.0), clip_norm=1e-3)
    session = TrainingSession(built)
    before = dict(session.state)
    session.step(feeds)
    moved = [session.state[name] - before[name] for name in ("w", "b")]
    norm = math.sqrt(sum(float(np.sum(m.astype(np.float64) ** 2)) for m in moved))
    residual = feeds["x"] @ before["w"] + before["b"] - feeds["targets"]
    gradient = 2 * feeds["x"].T @ residual / residual.size
    total = math.hypot(
        float(np.linalg.norm(gradient)), float(np.linalg.norm(2 * residual.sum(0) / residual.size))
    )
    assert norm == pytest.approx(1e-3 * total / (total + 1e-6), rel=1e-9)


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"clip_value": 0.01}])
def test_gradients_that_are_no_numbers_stay_so(options: dict[str, Any]) -> None:
    session = TrainingSession(trainable(SGD(0.5), **options))
    session.step(batch(0) | {"x": np.full((8, 6), np.nan, np.float32)})
    assert np.isnan(session.state["w1"]).all()


def half(seed: int = 2) -> onnx.ModelProto:
    """A linear model of float16, y = x · w."""
    rng = np.random.default_rng(seed)
    with Tape(name="half") as tape:
        x = tape.input("x", np.float16, ["batch", 4])
        w = tape.initializer("w", rng.normal(size=(4, 2)).astype(np.float16))
        tape.output(x @ w, "y")
    return tape.model()


def half_batch(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    x = rng.integers(-4, 5, (8, 4)).astype(np.float16)
    return {"x": x, "targets": rng.integers(-4, 5, (8, 2)).astype(np.float32)}


@pytest.mark.quick(2)
@pytest.mark.parametrize("way", ["joined", "apart"])
@pytest.mark.parametrize("options", [{"clip_norm": 0.5}, {"clip_value": 0.25}])
def test_gradients_of_float16_are_clipped_unscaled(options: dict[str, Any], way: str) -> None:
    built = build_training_model(
        half(), loss="MeanSquaredError", optimizer=SGD(0.25), ema_decay=0.5, **options
    )
    session = TrainingSession(built, **WAYS[way])
    session.state["loss_scale"] = np.float32(64)
    master = session.state["w.master"].astype(np.float64)
    average = master.copy()
    for number in range(STEPS):
        feeds = half_batch(number)
        x = feeds["x"].astype(np.float64)
        residual = x @ master.astype(np.float16).astype(np.float64) - feeds["targets"]
        gradient = 2 * x.T @ residual / residual.size
        if "clip_value" in options:
            gradient = np.clip(gradient, -0.25, 0.25)
        else:
            gradient *= min(1.0, 0.5 / (np.linalg.norm(gradient) + 1e-6))
        master = master - 0.25 * gradient
        average = 0.5 * average + 0.5 * master
        session.step(feeds)
        # What float16 rounds is a residual, to 2^-11 of it.
        np.testing.assert_allclose(session.state["w.master"], master, atol=2e-3)
        np.testing.assert_allclose(session.state["w.ema"], average, atol=2e-3)
        master = session.state["w.master"].astype(np.float64)
        average = session.state["w.ema"].astype(np.float64)
    assert session.state["w.ema"].dtype == np.float32


def test_a_skipped_step_moves_no_average_and_no_schedule() -> None:
    schedule = schedules.warmup_linear(0.1, steps=10, warmup=5)
    built = build_training_model(
        half(),
        loss="MeanSquaredError",
        optimizer=SGD(schedule),
        ema_decay=0.5,
        clip_norm=1.0,
        clip_value=1.0,
    )
    session = TrainingSession(built)
    for number in range(3):
        session.step(half_batch(number))
    before = dict(session.state)
    found = session.step(half_batch(3) | {"x": np.full((8, 4), np.inf, np.float16)})
    for name in ("w", "w.master", "w.ema", "step"):
        np.testing.assert_array_equal(session.state[name], before[name], err_msg=name)
    assert session.state["loss_scale"] == before["loss_scale"] / 2
    again = session.step(half_batch(4))
    assert found["scheduled_learning_rate"] == again["scheduled_learning_rate"]
    assert not np.array_equal(session.state["w.ema"], before["w.ema"])


@pytest.mark.slow
def test_hundreds_of_parameters_of_float16_are_clipped() -> None:
    # Each formula reads what depends on all gradients; a chain of sums would be too deep.
    count = 600
    with Tape(name="deep") as tape:
        y = tape.input("x", np.float16, ["batch", 2])
        for number in range(count):
            y = y + tape.initializer(f"b{number}", np.zeros(2, np.float16))
        tape.output(y, "y")
    built = build_training_model(
        tape.model(), loss="MeanSquaredError", optimizer=SGD(1.0), clip_norm=1.0
    )
    session = TrainingSession(built)
    session.step({"x": np.ones((1, 2), np.float16), "targets": np.zeros((1, 2), np.float32)})
    expected = -1 / math.sqrt(2 * count)  # all gradients are 1
    np.testing.assert_allclose(session.state["b7.master"], [expected] * 2, rtol=1e-3)


def test_a_norm_whose_square_float32_does_not_hold() -> None:
    with Tape(name="steep") as tape:
        x = tape.input("x", np.float32, ["batch", 2])
        tape.output(x @ tape.initializer("w", np.zeros((2, 1), np.float32)), "y")
    built = build_training_model(
        tape.model(),
        loss=lambda y: ortops.op.ReduceSum(y, keepdims=0),
        optimizer=SGD(1.0),
        clip_norm=1.0,
    )
    session = TrainingSession(built)
    session.step({"x": np.float32([[3e25, 4e25]])})
    np.testing.assert_allclose(session.state["w"], [[-0.6], [-0.8]], rtol=1e-6)


@pytest.mark.parametrize("name", ["clip_norm", "clip_value"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, 1e-60, 1e60, 10**400, True, "1"])
def test_clipping_out_of_range_is_refused(name: str, value: Any) -> None:
    given = f"{name} must be a finite number > 0, got {value!r:.80}"
    rounded = {1e-60: "0.0", 1e60: "inf"}
    if value in rounded:
        given = f"{name}={value!r} in float32 must be a finite number > 0, got {rounded[value]}"
    with pytest.raises(ArgumentError, match=f"^{re.escape(given)}$"):
        trainable(**{name: value})


# ------------------------------------------------------------------------------------- averages


@pytest.mark.quick(2)
@pytest.mark.torch
@pytest.mark.parametrize("way", WAYS)
def test_averages_are_torchs(way: str) -> None:
    import torch

    model = classifier()
    twin = Torch(model)
    module = torch.nn.ParameterDict(twin.parameters)
    twin.parameters = {name: module[name] for name in ("w1", "b1", "w2")}
    averaged = torch.optim.swa_utils.AveragedModel(
        module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    averaged.update_parameters(module)  # the first call copies
    optimizer = torch.optim.SGD(module.values(), lr=0.5)
    session = TrainingSession(trainable(SGD(0.5), model, ema_decay=0.9), **WAYS[way])
    for number in range(STEPS):
        session.step(batch(number))
        twin.step(batch(number), optimizer, no_clip)
        averaged.update_parameters(module)
    twin.assert_same(session.state)
    for name in twin.parameters:
        np.testing.assert_allclose(
            session.state[f"{name}.ema"],
            averaged.module[name].detach().numpy(),
            rtol=1e-4,
            atol=2e-6,
        )
        assert not np.allclose(session.state[f"{name}.ema"], session.state[name], rtol=1e-3)


def test_an_average_of_what_stays_stays() -> None:
    session = TrainingSession(trainable(SGD(0.0), ema_decay=0.9999))
    before = session.state["w1"]
    for number in range(50):
        session.step(batch(number))
    np.testing.assert_array_equal(session.state["w1.ema"], before)


def test_averages_take_the_place_of_parameters() -> None:
    built = build_training_model(
        half(), loss="MeanSquaredError", optimizer=SGD(0.25), ema_decay=0.5
    )
    noted = training_metadata(built)
    assert noted.averages == {"w": "w.ema"}
    assert noted.averaging == "ema_decay=0.5"
    session = TrainingSession(built)
    session.step(half_batch(0))
    state = dict(session.state)
    found = noted.averaged(state)
    assert found.keys() == state.keys()
    np.testing.assert_array_equal(found["w"], state["w.ema"].astype(np.float16))
    assert found["w"].dtype == np.float16
    assert not np.array_equal(found["w"], state["w"])
    np.testing.assert_array_equal(found["w.master"], state["w.master"])


@pytest.mark.parametrize("original", [True, False])
def test_the_inference_model_of_averages(original: bool) -> None:
    model = classifier()
    session = TrainingSession(trainable(Adam(0.1), model, ema_decay=0.5, trainable=["w1", "b1"]))
    for number in range(3):
        session.step(batch(number))
    found = session.inference_model(model if original else None, ema=True)
    weights = initializers(found.graph)
    for name in ("w1", "b1"):
        np.testing.assert_array_equal(weights[name], session.state[f"{name}.ema"])
        assert not np.array_equal(weights[name], session.state[name])
    assert weights.keys() == {"w1", "b1", "w2"}
    np.testing.assert_array_equal(weights["w2"], initializers(model.graph)["w2"])
    plain = initializers(session.inference_model(model if original else None).graph)
    np.testing.assert_array_equal(plain["w1"], session.state["w1"])


def test_an_inference_model_without_averages_is_refused() -> None:
    session = TrainingSession(trainable())
    with pytest.raises(ModelError, match=r"ema: the model has no averages of its parameters"):
        session.inference_model(ema=True)


def test_no_averages_are_said() -> None:
    noted = training_metadata(trainable())
    with pytest.raises(ModelError, match=r"has no averages .* build it with ema_decay="):
        noted.averaged({})
    noted = training_metadata(trainable(ema_decay=0.5))
    with pytest.raises(ModelError, match=r"'averages' has 'w1.ema' for 'w1', which must be vari"):
        noted.averaged({"w1": np.zeros(3)})


@pytest.mark.parametrize("value", [-0.1, 1, 1e300, 10**400, math.nan, True, "0.9"])
def test_a_decay_out_of_range_is_refused(value: Any) -> None:
    expected = f"ema_decay must be a finite number >= 0 and < 1, got {value!r:.80}"
    with pytest.raises(ArgumentError, match=f"^{re.escape(expected)}$"):
        trainable(ema_decay=value)


def test_bfloat16_has_averages_in_float32() -> None:
    dtype = ml_dtypes.bfloat16
    with Tape(name="narrow") as tape:
        x = tape.input("x", dtype, ["batch", 4])
        tape.output(x @ tape.initializer("w", np.ones((4, 2), dtype)), "y")
    built = build_training_model(
        tape.model(),
        loss="MeanSquaredError",
        optimizer=SGD(schedules.constant(0.25, warmup=2)),
        ema_decay=0.5,
        clip_norm=1.0,
    )
    session = TrainingSession(built)
    average = np.ones((4, 2))
    for number in range(4):
        feeds = half_batch(number)
        session.step(feeds | {"x": feeds["x"].astype(dtype)})
        average = (average + session.state["w.master"]) / 2
    np.testing.assert_allclose(session.state["w.ema"], average, rtol=1e-6)
    assert session.state["w.ema"].dtype == np.float32
    averaged = session.metadata.averaged(dict(session.state))["w"]
    np.testing.assert_array_equal(averaged, session.state["w.ema"].astype(dtype))


def test_reset_starts_averages_anew() -> None:
    session = TrainingSession(trainable(SGD(0.5), ema_decay=0.5))
    before = dict(session.state)
    session.step(batch(0))
    session.reset()
    for name, array in before.items():
        np.testing.assert_array_equal(session.state[name], array, err_msg=name)


# --------------------------------------------------------------------------------------- groups


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.torch
@pytest.mark.parametrize("way", WAYS)
def test_groups_are_torchs(way: str) -> None:
    import torch

    model = classifier()
    twin = Torch(model)
    w1, b1, w2 = (twin.parameters[name] for name in ("w1", "b1", "w2"))
    optimizer = torch.optim.AdamW(
        [
            {"params": [w1]},
            {"params": [b1], "weight_decay": 0.0},
            {"params": [w2], "lr": 0.05, "betas": (0.8, 0.999)},
        ],
        lr=0.01,
        weight_decay=0.1,
        eps=1e-3,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * STEPS)
    ours = AdamW(
        schedules.cosine(0.01, steps=2 * STEPS),
        epsilon=1e-3,
        weight_decay=0.1,
        epsilon_after_correction=True,
    )
    groups = {"b*": {"weight_decay": 0.0}, "w2": {"learning_rate": 0.05, "alpha": 0.8}}
    session = TrainingSession(trainable(ours, model, groups=groups), **WAYS[way])
    for number in range(STEPS):
        session.step(batch(number))
        twin.step(batch(number), optimizer, no_clip)
        scheduler.step()
    twin.assert_same(session.state)


def moved(groups: Any, optimizer: Any, rate: float | None = None) -> dict[str, float]:
    """Returns by how much each parameter moves, relative to its gradient."""
    plain = TrainingSession(trainable(SGD(1.0)))
    session = TrainingSession(trainable(optimizer, groups=groups))
    if rate is not None:
        session.learning_rate = rate
    before = dict(session.state)
    plain.step(batch(0))
    session.step(batch(0))
    return {
        name: float(
            np.linalg.norm(session.state[name].astype(np.float64) - before[name])
            / np.linalg.norm(plain.state[name].astype(np.float64) - before[name])
        )
        for name in ("w1", "b1", "w2")
    }


def test_a_learning_rate_is_a_ratio() -> None:
    groups = {"w*": {"learning_rate": 0.3}, "w2": {"learning_rate": 0}}
    expected = pytest.approx({"w1": 0.3, "b1": 0.1, "w2": 0.0}, rel=1e-4)
    assert moved(groups, SGD(0.1)) == expected
    halved = pytest.approx({"w1": 0.15, "b1": 0.05, "w2": 0.0}, rel=1e-4)
    assert moved(groups, SGD(0.1), rate=0.05) == halved
    quarter = schedules.Schedule(0.1, lambda n: 0.5)
    assert moved(groups, SGD(quarter)) == halved


def test_the_last_match_wins_setting_by_setting() -> None:
    noted = training_metadata(
        trainable(
            AdamW(1e-3),
            groups={
                "*": {"weight_decay": 0.5, "epsilon": 1e-6},
                "w*": {"weight_decay": 0.25},
                "w2": {"learning_rate": 0.25},
                "b1": {"weight_decay": 0.01, "epsilon": 1e-8},
            },
        )
    )
    assert noted.groups == {
        "w1": "epsilon=1e-06, weight_decay=0.25",
        "b1": "",
        "w2": "learning_rate=0.25, epsilon=1e-06, weight_decay=0.25",
    }


def test_groups_go_by_scopes_too() -> None:
    model = lenet(channels=(4, 4), hidden=8, seed=1)
    scope = model.graph.node[0].name
    noted = training_metadata(trainable(AdamW(), model, groups={scope: {"weight_decay": 0.0}}))
    read = set(model.graph.node[0].input) & set(initializers(model.graph))
    assert noted.groups.keys() == read


def test_a_rule_of_ones_own_has_groups() -> None:
    def scaled(r: Any, t: Any, x: Any, g: Any, *, factor: float = 1.0) -> Any:
        return x - (r * factor).astype(x.dtype) * g

    groups = {"w1": {"factor": 2.0}, "b1": {"learning_rate": 0.4, "factor": 0.5}}
    found = moved(groups, Custom(scaled, learning_rate=0.1))
    assert found == pytest.approx({"w1": 0.2, "b1": 0.2, "w2": 0.1}, rel=1e-4)


def test_attributes_of_a_rule_of_ones_own_stay_numbers() -> None:
    def scaled(r: Any, t: Any, x: Any, g: Any, *, factor: float = 1.0) -> Any:
        return (x - (r.astype(np.float64) * factor).astype(x.dtype) * g,)

    with pytest.raises(
        ArgumentError, match="optimizer scaled: factor must be a finite number, got 'x'"
    ):
        trainable(Custom(scaled, learning_rate=0.1), groups={"w1": {"factor": "x"}})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"v*": {"weight_decay": 0.0}}, "groups: 'v*' matches no parameter that is trained; known"),
        (
            {"w1": {"weigth_decay": 0.0}},
            "groups: 'w1' sets 'weigth_decay', which AdamW does not have; did you mean 'weight_de",
        ),
        (
            {"w1": {"weight_decay": -1}},
            "groups: optimizer AdamW: weight_decay must be a finite number >= 0, got -1.0",
        ),
        (
            {"w1": {"learning_rate": -1}},
            "groups: 'w1': learning_rate must be a finite number >= 0, got -1; the optimizer's",
        ),
        (
            {"w1": {"learning_rate": schedules.constant(0.1)}},
            "; the optimizer's schedule applies to it as well",
        ),
        ({"w1": 0.1}, "groups: 'w1' must have a dict of optimizer settings, got 0.1"),
        ({3: {}}, "groups: names and patterns must be strings, got 3"),
        (
            {"w1": {"learning_rate": 10**400}},
            "learning_rate must be a finite number >= 0, got 1000",
        ),
        (
            "w1",
            (
                "groups must be a dict of settings for each name or pattern, such as "
                "{'*.bias': {'weight_decay': 0.0}}, got 'w1'"
            ),
        ),
        (
            ["w1"],
            (
                "groups must be a dict of settings for each name or pattern, such as "
                "{'*.bias': {'weight_decay': 0.0}}, got ['w1']"
            ),
        ),
    ],
)
def test_bad_groups_are_refused(groups: Any, message: str) -> None:
    with pytest.raises(OrtopsError) as refused:
        trainable("AdamW", groups=groups)
    assert type(refused.value) is (ModelError if "v*" in groups else ArgumentError)
    assert message in str(refused.value)


def test_a_ratio_to_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"ratio to that of SGD, which must be > 0, got 0\.0"):
        trainable(SGD(0.0), groups={"w1": {"learning_rate": 0.1}})


def test_an_optimizer_for_some_shapes_keeps_its_ratio() -> None:
    @dataclass(frozen=True)
    class Mixed(SGD):
        def of(self, shape: Sequence[int]) -> Optimizer:
            return self if len(shape) == 2 else Adam(0.2)

    found = moved(None, Mixed(0.1), rate=0.05)
    assert (found["w1"], found["w2"]) == pytest.approx((0.05, 0.05), rel=1e-4)
    session = TrainingSession(trainable(Mixed(0.1)))
    assert {"b1.V", "b1.H"} <= set(session.state)
    assert "w1.V" not in session.state
    session.step(batch(0))  # the first step of Adam is of the length of the rate
    np.testing.assert_allclose(np.abs(session.state["b1"]), 0.2, rtol=1e-4)
    with pytest.raises(ArgumentError, match=r"Mixed: its learning rate must be > 0, got 0\.0"):
        trainable(Mixed(0.0))


def test_what_is_not_trained_is_in_no_group() -> None:
    with pytest.raises(ModelError, match=r"groups: 'b1' matches no parameter that is trained"):
        trainable("AdamW", trainable=["w1"], groups={"b1": {"weight_decay": 0.0}})


# --------------------------------------------------------------------- how updates are executed


def groups_of(model: onnx.ModelProto) -> tuple[Sequence[Group], dict[str, str]]:
    step = flatten(detach(model))
    graph = step.model.graph
    remove_defaults(graph, step.variables)
    lower_optimizers(graph, Names(graph), lambda node: True)
    return split(graph, step.updates, step.feeds, step.outputs)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [3]),
        ({"clip_norm": 1.0}, [3]),
        ({"clip_value": 1.0}, [3]),
        ({"clip_norm": 1.0, "clip_value": 1.0, "ema_decay": 0.9}, [3]),
        ({"groups": {"b1": {"learning_rate": 0.1}}}, [1, 2]),
        ({"groups": {"b1": {"beta": 0.9}, "w2": {"beta": 0.9}}, "clip_norm": 1.0}, [1, 2]),
    ],
)
@pytest.mark.parametrize("rate", [1e-3, schedules.cosine(1e-3, steps=9)])
def test_updates_pack(rate: Any, options: dict[str, Any], sizes: list[int]) -> None:
    groups, left = groups_of(trainable(Adam(rate), **options))
    assert sorted(len(group.shapes) for group in groups) == sizes
    assert set(left) == {"step"}
    for group in groups:  # whatever is a scalar is computed once, outside
        assert len(group.scalars) <= 2
        assert "Cos" not in [node.op_type for node in group.formula]
        updated = [role.updated for role in group.roles].count(True)
        assert updated == (4 if "ema_decay" in options else 3)


@pytest.mark.slow
def test_clipping_in_a_convolutional_net_is_that_of_the_plain_graph() -> None:
    """With the passes that make graphs of known sizes fast, and without them."""
    rng = np.random.default_rng(0)
    built = trainable(
        Momentum(0.05), lenet(channels=(8, 16), hidden=32, seed=1), clip_norm=0.1, clip_value=0.01
    )
    fast, plain = TrainingSession(built), TrainingSession(built, settings=Settings(passes=[]))
    for _ in range(5):
        feeds = {
            "images": rng.normal(size=(16, 1, 8, 8)).astype(np.float32),
            "labels": rng.integers(0, 10, 16),
        }
        np.testing.assert_allclose(fast.step(feeds)["loss"], plain.step(feeds)["loss"], rtol=1e-5)
    for name in initializers(built.graph):
        np.testing.assert_allclose(fast.state[name], plain.state[name], rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------- what is told


def test_check_tells_schedule_clipping_averages_and_groups() -> None:
    options: dict[str, Any] = {
        "optimizer": AdamW(schedules.constant(0.1, warmup=3)),
        "clip_norm": 1.0,
        "clip_value": 0.5,
        "ema_decay": 0.99,
        "groups": {"b1": {"weight_decay": 0.0}},
    }
    report = check(classifier(), loss="SoftmaxCrossEntropy", **options)
    for line in (
        "  b1  FLOAT[8]  weight_decay=0.0",
        "learning rate: constant(warmup=3)",
        "gradient clipping: clip_value=0.5, clip_norm=1.0",
        "parameter averaging: ema_decay=0.99",
        "no problems: ready to train",
    ):
        assert line in str(report).splitlines()
    built = build_training_model(classifier(), loss="SoftmaxCrossEntropy", **options)
    again = check(built)  # a file says what it has
    told = ("schedule", "clipping", "averaging", "groups")
    assert [getattr(again, name) for name in told] == [getattr(report, name) for name in told]
    assert again.as_dict()["clipping"] == "clip_value=0.5, clip_norm=1.0"
    plain = str(check(classifier()))
    assert not any(word in plain for word in ("clipping", "averaging", "learning rate"))


def test_check_tells_what_is_refused() -> None:
    report = check(classifier(), clip_norm=-1)
    assert report.problems == ["clip_norm must be a finite number > 0, got -1"]


def test_the_file_runs_as_before_and_lowers() -> None:
    built = trainable("AdamW", clip_norm=1.0, clip_value=0.5, ema_decay=0.9)
    feeds = {"x": batch(0)["x"]}
    expected = onnxruntime.InferenceSession(classifier().SerializeToString()).run(None, feeds)
    found = onnxruntime.InferenceSession(built.SerializeToString()).run(None, feeds)
    np.testing.assert_array_equal(found[0], expected[0])
    lowered = ortops.lower(ortops.step_graph(built))
    assert not {node.domain for node in lowered.graph.node} - {""}
    onnx.checker.check_model(lowered, full_check=True)
