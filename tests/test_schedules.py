"""Learning-rate schedules: as formulas, in the graph, and wherever the file is driven from."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import classifier, labelled
from violations import all_violations

import ortops
from ortops import ArgumentError, ModelError, TrainingSession, build_training_model, schedules
from ortops.callbacks import ReduceLROnPlateau
from ortops.engine.execution.settings import Settings
from ortops.engine.trainable.metadata import training_metadata
from ortops.optimizers import SGD, Adam, Momentum
from ortops.schedules import Schedule

STEPS = 24

EACH = {
    "constant": schedules.constant(0.5),
    "constant, warmup": schedules.constant(0.5, warmup=5),
    "step": schedules.step(0.5, every=5, factor=0.3, warmup=3),
    "exponential": schedules.exponential(0.5, factor=0.7, every=3),
    "polynomial": schedules.polynomial(0.5, steps=20, power=1.5, end=0.1, warmup=2),
    "cosine": schedules.cosine(0.5, steps=20, end=0.05),
    "restarts": schedules.cosine(0.5, steps=22, restarts=2, warmup=4),
    "one_cycle": schedules.one_cycle(0.5, steps=20),
    "fraction": schedules.cosine(0.5, steps=20, warmup=0.26),
    "warmup_cosine": schedules.warmup_cosine(0.5, steps=20, warmup=6),
    "warmup_linear": schedules.warmup_linear(0.5, steps=20, warmup=6),
    "sequence": schedules.sequence(
        schedules.constant(0.5, warmup=4), schedules.cosine(0.3, steps=10), at=9
    ),
    "long warm-up": schedules.warmup_cosine(0.5, steps=9, warmup=20),
}


def trainable(optimizer: Any, **options: Any) -> onnx.ModelProto:
    return build_training_model(
        classifier(), loss="SoftmaxCrossEntropy", optimizer=optimizer, **options
    )


def batch(seed: int) -> dict[str, Any]:
    return labelled((6,), seed=seed)


# ------------------------------------------------------------------------------------- formulas


def from_zero(n: int, warmup: int, rest: Callable[[int], float]) -> float:
    """A warm-up as Hugging Face's transformers write it."""
    return n / warmup if n < warmup else rest(n - warmup)


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        (EACH["constant"], lambda n: 1.0),
        (EACH["constant, warmup"], lambda n: from_zero(n, 5, lambda k: 1.0)),
        (EACH["step"], lambda n: from_zero(n, 3, lambda k: 0.3 ** (k // 5))),
        (EACH["exponential"], lambda n: 0.7 ** (n / 3)),
        (
            EACH["polynomial"],
            lambda n: from_zero(n, 2, lambda k: 0.1 + 0.9 * max(0.0, 1 - k / 18) ** 1.5),
        ),
        (
            EACH["restarts"],
            lambda n: from_zero(
                n, 4, lambda k: 0.0 if k >= 18 else (1 + math.cos(math.pi * (k % 6) / 6)) / 2
            ),
        ),
        (
            EACH["warmup_cosine"],
            lambda n: from_zero(n, 6, lambda k: (1 + math.cos(math.pi * min(1.0, k / 14))) / 2),
        ),
        (EACH["warmup_linear"], lambda n: from_zero(n, 6, lambda k: max(0.0, 1 - k / 14))),
        (EACH["long warm-up"], lambda n: from_zero(n, 20, lambda k: float(k < 1))),
    ],
    ids=lambda value: value.description if isinstance(value, Schedule) else "",
)
def test_formulas(schedule: Schedule, factor: Callable[[int], float]) -> None:
    expected = [0.5 * factor(n) for n in range(STEPS)]
    np.testing.assert_allclose(schedule(np.arange(STEPS)), expected, rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(
        [schedule(n) for n in range(STEPS)], expected, rtol=1e-14, atol=1e-16
    )


@pytest.mark.quick(1)
@pytest.mark.torch
@pytest.mark.parametrize(
    ("schedule", "name", "settings"),
    [
        (schedules.step(0.5, every=5, factor=0.3), "StepLR", {"step_size": 5, "gamma": 0.3}),
        (schedules.exponential(0.5, factor=0.9), "ExponentialLR", {"gamma": 0.9}),
        (
            schedules.polynomial(0.5, steps=20, power=2),
            "PolynomialLR",
            {"total_iters": 20, "power": 2},
        ),
        (schedules.cosine(0.5, steps=24), "CosineAnnealingLR", {"T_max": 24}),
        (
            schedules.cosine(0.5, steps=24, end=0.2),
            "CosineAnnealingLR",
            {"T_max": 24, "eta_min": 0.1},
        ),
        (
            schedules.cosine(0.5, steps=28, restarts=3),
            "CosineAnnealingWarmRestarts",
            {"T_0": 7},
        ),
        (schedules.one_cycle(0.5, steps=24), "OneCycleLR", {"max_lr": 0.5, "total_steps": 24}),
        (
            schedules.one_cycle(0.5, steps=24, rise=0.5, start=0.1, end=0.01),
            "OneCycleLR",
            {
                "max_lr": 0.5,
                "total_steps": 24,
                "pct_start": 0.5,
                "div_factor": 10,
                "final_div_factor": 10,
            },
        ),
    ],
    ids=lambda value: value.description if isinstance(value, Schedule) else "",
)
def test_formulas_are_torchs(schedule: Schedule, name: str, settings: dict[str, Any]) -> None:
    import torch

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **settings)
    expected = []
    for _ in range(STEPS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(expected) < STEPS:
            scheduler.step()
    np.testing.assert_allclose(schedule(np.arange(STEPS)), expected, rtol=1e-10, atol=1e-15)


@pytest.mark.slow
@pytest.mark.optional("transformers", "export")
def test_a_fraction_of_warm_up_steps_is_that_of_transformers() -> None:
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    with all_violations() as check:
        for steps in (1, 2, 7, 30, 70, 101):
            for ratio in (0.03, 0.1, 0.5):
                with check((steps, ratio)):
                    warmup = math.ceil(steps * ratio)  # TrainingArguments.get_warmup_steps
                    theirs = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, steps)
                    expected = [0.5 * theirs.lr_lambdas[0](n) for n in range(steps)]
                    found = schedules.warmup_cosine(0.5, steps=steps, warmup=ratio)
                    np.testing.assert_allclose(found(np.arange(steps)), expected, atol=1e-12)


@pytest.mark.slow
def test_a_fraction_of_the_steps_of_fit() -> None:
    """Each schedule then needs the number of steps, which `fit` tells the graph."""
    for schedule, known in (
        (schedules.constant(0.5, warmup=0.3), schedules.constant(0.5, warmup=3)),
        (schedules.cosine(0.5, warmup=0.25), schedules.cosine(0.5, steps=10, warmup=3)),
    ):
        assert schedule.needs_steps
        session = TrainingSession(trainable(SGD(schedule)))
        history = session.fit([batch(n) for n in range(10)], progress=False, callbacks=[])
        assert history[-1]["steps"] == 10
        assert session.state["schedule_steps"] == 10
        other = TrainingSession(trainable(SGD(known)))
        other.fit([batch(n) for n in range(10)], progress=False)
        np.testing.assert_array_equal(session.state["b1"], other.state["b1"])


def test_a_description_says_how_to_write_it() -> None:
    assert EACH["warmup_cosine"].description == "warmup_cosine(steps=20, end=0.0, warmup=6)"
    assert EACH["step"].description == "step(every=5, factor=0.3, warmup=3)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: schedules.constant(-1),
            "constant(): peak must be a finite number >= 0 and <= 3.40282e+38, got -1",
        ),
        (
            lambda: schedules.constant(math.nan),
            "peak must be a finite number >= 0 and <= 3.40282e+38, got nan",
        ),
        (lambda: schedules.constant(1e300), "and <= 3.40282e+38, got 1e+300"),
        (lambda: schedules.constant(True), "and <= 3.40282e+38, got True"),
        (
            lambda: schedules.constant(1, warmup=-1),
            "constant: warmup must be an integer >= 0 and <= 9223372036854775807, got -1",
        ),
        (
            lambda: schedules.constant(1, warmup=1.5),
            "9223372036854775807, got 1.5; or give a fraction of the steps, > 0 and < 1",
        ),
        (
            lambda: schedules.constant(1, warmup=2**63),
            "9223372036854775807, got 9223372036854775808",
        ),
        (lambda: schedules.constant(10**400), "<= 3.40282e+38, got 1000000000"),
        (
            lambda: schedules.step(1, every=0),
            "schedule step: every must be an integer >= 1 and <= 9223372036854775807, got 0",
        ),
        (
            lambda: schedules.step(1, every=2, factor=0),
            "step: factor must be a finite number > 0 and <= 1, got 0",
        ),
        (
            lambda: schedules.exponential(1, factor=2),
            "exponential: factor must be a finite number > 0 and <= 1, got 2",
        ),
        (
            lambda: schedules.polynomial(1, steps=5, power=0),
            "polynomial: power must be a finite number > 0, got 0",
        ),
        (
            lambda: schedules.polynomial(1, steps=5, end=-0.1),
            "polynomial: end must be a finite number >= 0 and <= 1, got -0.1",
        ),
        (
            lambda: schedules.cosine(1, steps=5.0),
            "cosine: steps must be an integer >= 1 and <= 9223372036854775807, got 5.0",
        ),
        (
            lambda: schedules.cosine(1, steps=5, restarts="x"),
            "cosine: restarts must be an integer >= 0 and <= 9223372036854775807, got 'x'",
        ),
        (
            lambda: schedules.sequence(0.0, 0.1, at=3),
            "the peak of the first schedule must be above",
        ),
        (lambda: schedules.sequence(0.1, 0.1, at=0), "sequence: at must be an integer >= 1"),
        (
            lambda: SGD(schedules.cosine),
            "learning_rate must be a schedule, such as schedules.cosine(0.1, …)",
        ),
        (
            lambda: schedules.one_cycle(1, steps=3, rise=0.3),
            "one_cycle: rise must cover more than 1 and fewer than 3 steps, got 0.3 (0.9 steps)",
        ),
        (lambda: schedules.one_cycle(1, steps=9, rise=1), "fewer than 9 steps, got 1.0 (9 steps)"),
        (
            lambda: Schedule(1.0, 3),  # type: ignore[arg-type]
            "Schedule: factor must be a function of the number of completed steps, got 3",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        make()
    assert message in str(refused.value)


def test_schedules_need_numpy_alone() -> None:
    code = (
        "import sys, ortops.schedules; print({'onnx', 'onnxruntime', 'onnx_ir'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ------------------------------------------------------------------------------------- in steps


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", EACH)
def test_steps_follow_the_formula(name: str, joined: bool) -> None:
    settings = Settings() if joined else Settings(joined=0)
    session = TrainingSession(trainable(SGD(EACH[name])), settings=settings)
    rates = []
    for number in range(STEPS):
        before = session.state["b1"]
        following = session.learning_rate
        found = session.step(batch(number))
        rates.append(found["scheduled_learning_rate"])
        assert rates[-1] == following
        moved = not np.array_equal(session.state["b1"], before)
        assert moved == (rates[-1] > 0)
    assert {rate.dtype for rate in rates} == {np.dtype(np.float32)}
    np.testing.assert_allclose(rates, EACH[name](np.arange(STEPS)), rtol=2e-7, atol=1e-12)
    assert session.peak_learning_rate == session.state["learning_rate"] == 0.5


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("joined", [True, False])
def test_a_training_follows_torchs_schedule(joined: bool) -> None:
    import torch

    model = trainable(Momentum(schedules.one_cycle(0.2, steps=STEPS), alpha=0.9))
    session = TrainingSession(model, settings=Settings() if joined else Settings(joined=0))
    names = ("w1", "b1", "w2")
    w1, b1, w2 = parameters = [torch.tensor(session.state[n], requires_grad=True) for n in names]
    optimizer = torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.2, total_steps=STEPS, cycle_momentum=False
    )
    for number in range(STEPS):
        feeds = batch(number)
        found = session.step(feeds)["loss"]
        logits = torch.tanh(torch.from_numpy(feeds["x"]) @ w1 + b1) @ w2
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(feeds["labels"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number + 1 < STEPS:
            scheduler.step()
        np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    for name, parameter in zip(names, parameters, strict=True):
        np.testing.assert_allclose(
            session.state[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("optimizer", [SGD, Adam])
def test_a_step_graph_in_a_plain_session_follows_it(optimizer: Any, lowered: bool) -> None:
    schedule = EACH["restarts"]
    options: dict[str, Any] = {
        "clip_norm": 0.5,
        "ema_decay": 0.8,
        "groups": {"b1": {"learning_rate": 0.05}},
    }
    model = trainable(optimizer(schedule), **options)
    graph = ortops.step_graph(model)
    graph = ortops.lower(graph) if lowered else graph
    updates = json.loads(next(e.value for e in graph.metadata_props if "step_graph" in e.key))
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3
    plain = onnxruntime.InferenceSession(graph.SerializeToString(), quiet)
    ours = TrainingSession(model)
    state: dict[str, Any] = {}
    for number in range(12):
        found = dict(
            zip(
                [value.name for value in plain.get_outputs()],
                plain.run(None, {**batch(number), **state}),
                strict=True,
            )
        )
        state = {name: found[output] for name, output in updates.items()}
        ours.step(batch(number))
        np.testing.assert_allclose(
            found["scheduled_learning_rate"], schedule(number), rtol=2e-7, atol=1e-12
        )
    for name, array in state.items():
        np.testing.assert_allclose(array, ours.state[name], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["peak_learning_rate", "learning_rate"])
def test_to_set_the_learning_rate_rescales(name: str) -> None:
    groups = {"b1": {"learning_rate": 0.05}}
    session = TrainingSession(trainable(SGD(EACH["cosine"]), groups=groups))
    for number in range(5):
        session.step(batch(number))
    present = float(EACH["cosine"](5)) if name == "learning_rate" else 0.5
    setattr(session, name, present / 2)
    assert getattr(session, name) == pytest.approx(present / 2, rel=2e-7)
    again = TrainingSession(session.model())
    assert again.learning_rate == session.learning_rate
    rates, before = [], session.state["b1"]
    gradient = session.gradients(batch(5))["b1"]
    for number in range(5, STEPS):
        rates.append(session.step(batch(number))["scheduled_learning_rate"])
        if number == 5:
            moved = (before - session.state["b1"]) / gradient
            np.testing.assert_allclose(moved, rates[0] * 0.05 / 0.5, rtol=1e-3)
    np.testing.assert_allclose(rates, EACH["cosine"](np.arange(5, STEPS)) / 2, rtol=3e-7)


def test_a_rate_of_0_cannot_be_scaled() -> None:
    session = TrainingSession(trainable(SGD(schedules.constant(0.5, warmup=4))))
    assert (session.learning_rate, session.peak_learning_rate) == (0.0, 0.5)
    with pytest.raises(ortops.ArgumentError) as refused:
        session.learning_rate = 0.1
    assert str(refused.value) == (
        "learning_rate cannot be 0.1 now, because the schedule constant(warmup=4) multiplies it by "
        "0 in the next step; set peak_learning_rate, the schedule's peak"
    )
    session.peak_learning_rate = 0.0
    session.step(batch(0))
    assert session.learning_rate == 0.0
    session.learning_rate = 0.25  # a quarter of the peak
    assert session.peak_learning_rate == pytest.approx(1.0)
    with pytest.raises(ortops.ArgumentError, match="must be a finite number >= 0, got -"):
        session.learning_rate = -1.0
    with pytest.raises(ortops.ArgumentError, match="must be a finite number >= 0, got 'x'"):
        session.learning_rate = "x"


def test_the_rate_of_a_schedule_without_steps_is_not_known() -> None:
    session = TrainingSession(trainable(SGD(schedules.cosine(0.5))))
    assert session.peak_learning_rate == 0.5
    message = r"learning_rate: the schedule cosine\(.*\) has no number of steps; fit sets it"
    with pytest.raises(ortops.OrtopsError, match=message):
        _ = session.learning_rate
    with pytest.raises(ortops.OrtopsError, match=message):
        session.learning_rate = 0.1


def test_a_plateau_scales_the_peak() -> None:
    session = TrainingSession(trainable(SGD(EACH["cosine"])))
    plateau = ReduceLROnPlateau(0, 0.1, "loss", mode="max", threshold=1e6)
    data = [batch(number) for number in range(3)]
    history = session.fit(data, epochs=3, callbacks=[plateau], progress=False)
    wanted = EACH["cosine"](np.array([2, 5, 8])) * [1, 1, 0.1]
    np.testing.assert_allclose(history.history["learning_rate"], wanted, rtol=1e-6)
    assert session.peak_learning_rate == pytest.approx(0.005)


def test_a_schedule_of_ones_own() -> None:
    def inverse_root(n: Any) -> Any:
        xp = n.__array_namespace__()
        return 1.0 / xp.sqrt(n + 1.0)

    session = TrainingSession(trainable(SGD(Schedule(0.1, inverse_root))))
    rates = [session.step(batch(n))["scheduled_learning_rate"] for n in range(9)]
    np.testing.assert_allclose(rates, 0.1 / np.sqrt(np.arange(1, 10)), rtol=2e-7)
    flat = TrainingSession(trainable(SGD(Schedule(0.1, lambda n: 0.5))))
    assert flat.step(batch(0))["scheduled_learning_rate"] == np.float32(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.int64, np.uint8])
def test_counts_may_be_numpys(kind: Callable[[int], Any]) -> None:
    """As of lengths that numpy computed; where Tensors are divided they are floats as ever."""
    for schedule, plain in (
        (schedules.constant(0.5, warmup=kind(2)), schedules.constant(0.5, warmup=2)),
        (schedules.step(0.5, every=kind(3)), schedules.step(0.5, every=3)),
        (
            schedules.exponential(np.float32(0.5), factor=np.float32(0.5), every=kind(3)),
            schedules.exponential(0.5, factor=0.5, every=3),
        ),
        (
            schedules.polynomial(0.5, steps=kind(8), warmup=kind(2), power=kind(2)),
            schedules.polynomial(0.5, steps=8, warmup=2, power=2),
        ),
        (
            schedules.cosine(0.5, steps=kind(8), warmup=kind(2), restarts=kind(1)),
            schedules.cosine(0.5, steps=8, warmup=2, restarts=1),
        ),
        (schedules.one_cycle(0.5, steps=kind(9)), schedules.one_cycle(0.5, steps=9)),
    ):
        session = TrainingSession(trainable(SGD(schedule)))
        rates = [session.step(batch(n))["scheduled_learning_rate"] for n in range(9)]
        np.testing.assert_allclose(rates, plain(np.arange(9)), rtol=2e-7)
        assert schedule.description == plain.description


@pytest.mark.parametrize("wrong", [lambda n: "fast", lambda n: n > 3, lambda n: n.reshape([1])])
def test_a_schedule_that_gives_no_number_is_refused(wrong: Any) -> None:
    wrong.__name__ = "wrong"
    with pytest.raises(
        ModelError, match="schedule wrong: its factor must be a floating-point scalar, got "
    ):
        trainable(SGD(Schedule(0.1, wrong)))


def test_the_file_says_what_the_schedule_is() -> None:
    noted = training_metadata(trainable(SGD(EACH["cosine"])))
    assert noted.schedule == "cosine(steps=20, restarts=0, end=0.05)"
    assert noted.scheduled_learning_rate == "scheduled_learning_rate"
    assert training_metadata(trainable(SGD(0.1))).schedule == ""


def test_a_second_schedule_is_refused() -> None:
    noted = training_metadata(trainable(SGD(EACH["cosine"])))
    with pytest.raises(ortops.OrtopsError) as refused:
        noted.refuse_second_schedule()
    assert str(refused.value) == (
        "schedule: the model has the schedule cosine(steps=20, restarts=0, end=0.05) already; set "
        "session.peak_learning_rate to rescale it, or build the model with a number as learning "
        "rate"
    )
    training_metadata(trainable(SGD(0.1))).refuse_second_schedule()


# -------------------------------------------------------------------------------------- copies


@pytest.mark.nightly
@pytest.mark.quick(19)
@pytest.mark.parametrize(
    "duplicate",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy],
    ids=["pickle", "deepcopy", "copy"],
)
@pytest.mark.parametrize("name", EACH)
def test_copies_are_the_same_schedule(name: str, duplicate: Callable[[Any], Any]) -> None:
    found = duplicate(EACH[name])
    assert found == EACH[name]
    assert hash(found) == hash(EACH[name])
    assert found.description == EACH[name].description
    n = np.arange(STEPS)
    assert found(n).tobytes() == EACH[name](n).tobytes()
    given, copied = (trainable(duplicate(SGD(each))) for each in (EACH[name], found))
    assert given.SerializeToString(deterministic=True) == copied.SerializeToString(
        deterministic=True
    )


def test_schedules_of_other_arguments_differ() -> None:
    assert len(set(EACH.values())) == len(EACH)
    assert schedules.cosine(0.5, steps=20) != schedules.cosine(0.5, steps=21)
    assert schedules.cosine(0.5, steps=20) != schedules.cosine(0.4, steps=20)


# --------------------------------------------------------------- functions, and one after another


@pytest.mark.slow
@pytest.mark.torch
def test_functions_and_sequences_are_those_of_torch() -> None:
    """Also in the session's graph, after it was saved, scaled and reset."""
    import torch
    from torch.optim import lr_scheduler

    weight = torch.zeros(1, requires_grad=True)

    def rates_of(make: Callable[[Any], Any], base: float) -> list[float]:
        optimizer = torch.optim.SGD([weight], lr=base)
        scheduler, found = make(optimizer), []
        for _ in range(12):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    def after(optimizer: Any) -> Any:
        parts = [
            lr_scheduler.LinearLR(optimizer, 1e-9, total_iters=3),
            lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[5])

    falling = lambda n: 0.4 * 0.8**n  # noqa: E731
    warm = schedules.constant(0.4, warmup=3)
    cases: list[tuple[Any, list[float]]] = [
        (falling, rates_of(lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.8**n), 0.4)),
        (
            schedules.sequence(warm, schedules.cosine(0.4, steps=6), at=5),
            rates_of(after, 0.4),
        ),
    ]
    for rate, expected in cases:
        session = TrainingSession(trainable(SGD(rate)))
        found = []
        for number in range(12):
            found.append(session.learning_rate)
            session.step(batch(0))
            if number == 6:
                session = TrainingSession(session.model())
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)
        session.reset()
        assert session.learning_rate == pytest.approx(expected[0], abs=1e-8)
        session.peak_learning_rate *= 0.5
        session.step(batch(0))
        assert session.learning_rate == pytest.approx(expected[1] / 2, rel=1e-6)
    assert TrainingSession(trainable(SGD(falling))).peak_learning_rate == 1.0


@pytest.mark.slow
def test_sequences_of_the_steps_of_fit() -> None:
    """The first has `at` steps, the second those that are left."""
    rate = schedules.sequence(schedules.polynomial(0.4), schedules.polynomial(0.2), at=4)
    session = TrainingSession(trainable(SGD(rate)))
    history = session.fit([batch(0)] * 4, epochs=3, progress=False)
    assert history[0]["learning_rate"] == pytest.approx(0.1)  # 0.4 · (1 - 3 / 4)
    assert history[1]["learning_rate"] == pytest.approx(0.2 * 5 / 8)
    assert history[2]["learning_rate"] == pytest.approx(0.2 * 1 / 8)
    again = session.fit([batch(0)] * 4, epochs=1, progress=False)
    assert again[0]["learning_rate"] == pytest.approx(0.1)


def test_functions_that_cannot_be_written_into_a_graph() -> None:
    for function in (lambda n: 0.1 if n < 5 else 0.01, math.cos, lambda n: None):
        with pytest.raises(ModelError, match=r"schedule .*: .*(Tensor|None)"):
            trainable(SGD(function))
