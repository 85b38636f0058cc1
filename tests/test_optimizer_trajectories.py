"""50 steps of each optimizer that the domain has no operator for, next to oracles in float64.

The gradients are given: the loss is the sum of parameters times inputs. Errors are relative to how
large a parameter is and how far it moved. Measured: at most 1e-15 in float64, and 3e-7 in float32,
where each step rounds to 6e-8. The bounds are three to ten times that, and a setting that is off by
a hundredth exceeds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from optimizer_oracle import trajectory
from running import run
from violations import all_violations

from ortops import ArgumentError, Tape, TrainingSession, build_training_model
from ortops.engine.execution.settings import Settings
from ortops.optimizers import (
    LAMB,
    OPTIMIZERS,
    SGD,
    Adadelta,
    Adafactor,
    Adamax,
    AMSGrad,
    Lion,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    ScheduleFreeAdamW,
)

Arrays = dict[str, np.ndarray[Any, Any]]

STEPS = 50
RATE = 0.0625
SHAPES = {
    "matrix": (4, 3),
    "wide": (2, 5),
    "vector": (3,),
    "kernel": (2, 3, 2, 2),
    "scalar": (),
}


@dataclass(frozen=True)
class Case:
    """An optimizer, the settings with which the oracle is the same, and torch's name and settings.

    The numbers are those of float32, as attributes are. The inert settings do not count here.
    """

    optimizer: Optimizer
    oracle: dict[str, Any]
    torch: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    packed: bool = True
    inert: tuple[str, ...] = ()


BETAS = {"beta1": 0.875, "beta2": 0.96875}
GREEK = {"alpha": 0.875, "beta": 0.96875}
TORCH_BETAS = {"betas": (0.875, 0.96875)}
TINY, SMALL = 2.0**-20, 2.0**-7

CASES = {
    "SGD": Case(SGD(RATE, 0.125), {"l2": 0.125}, "SGD", {"weight_decay": 0.125}),
    "SGD momentum": Case(
        SGD(RATE, momentum=0.75, dampening=0.25),
        {"momentum": 0.75, "dampening": 0.25},
        *("SGD", {"momentum": 0.75, "dampening": 0.25}),
    ),
    "SGD nesterov": Case(
        SGD(RATE, 0.125, momentum=0.75, nesterov=True),
        {"momentum": 0.75, "nesterov": True, "l2": 0.125},
        *("SGD", {"momentum": 0.75, "nesterov": True, "weight_decay": 0.125}),
    ),
    "RMSprop": Case(
        RMSprop(RATE, rho=0.9375, epsilon=TINY, norm_coefficient=0.125),
        {"rho": 0.9375, "epsilon": TINY, "l2": 0.125},
        *("RMSprop", {"alpha": 0.9375, "eps": TINY, "weight_decay": 0.125}),
    ),
    "RMSprop momentum": Case(
        RMSprop(RATE, rho=0.9375, epsilon=SMALL, momentum=0.5),
        {"rho": 0.9375, "epsilon": SMALL, "momentum": 0.5},
        *("RMSprop", {"alpha": 0.9375, "eps": SMALL, "momentum": 0.5}),
    ),
    "RMSprop centered": Case(
        RMSprop(RATE, rho=0.9375, epsilon=SMALL, centered=True),
        {"rho": 0.9375, "epsilon": SMALL, "centered": True},
        *("RMSprop", {"alpha": 0.9375, "eps": SMALL, "centered": True}),
    ),
    "RMSprop with all": Case(
        RMSprop(RATE, rho=0.9375, epsilon=SMALL, momentum=0.5, centered=True),
        {"rho": 0.9375, "epsilon": SMALL, "momentum": 0.5, "centered": True},
        *("RMSprop", {"alpha": 0.9375, "eps": SMALL, "momentum": 0.5, "centered": True}),
    ),
    "Adadelta": Case(
        Adadelta(1.0, rho=0.875, epsilon=SMALL, norm_coefficient=0.125),
        {"rho": 0.875, "epsilon": SMALL, "l2": 0.125},
        *("Adadelta", {"rho": 0.875, "eps": SMALL, "weight_decay": 0.125}),
    ),
    "AMSGrad": Case(
        AMSGrad(RATE, **GREEK, epsilon=SMALL, norm_coefficient=0.125),
        {**BETAS, "epsilon": SMALL, "l2": 0.125},
        *("Adam", {**TORCH_BETAS, "eps": SMALL, "weight_decay": 0.125, "amsgrad": True}),
    ),
    "AMSGrad decayed": Case(
        AMSGrad(RATE, **GREEK, epsilon=SMALL, weight_decay=0.125),
        {**BETAS, "epsilon": SMALL, "decay": 0.125},
        *("AdamW", {**TORCH_BETAS, "eps": SMALL, "weight_decay": 0.125, "amsgrad": True}),
    ),
    "NAdam": Case(
        NAdam(RATE, **BETAS, epsilon=SMALL, momentum_decay=2.0**-8, norm_coefficient=0.125),
        {**BETAS, "epsilon": SMALL, "momentum_decay": 2.0**-8, "l2": 0.125},
        *("NAdam", {**TORCH_BETAS, "eps": SMALL, "momentum_decay": 2.0**-8, "weight_decay": 0.125}),
    ),
    "NAdam decayed": Case(
        NAdam(RATE, **BETAS, epsilon=SMALL, momentum_decay=2.0, weight_decay=0.125),
        {**BETAS, "epsilon": SMALL, "momentum_decay": 2.0, "decay": 0.125},
        "NAdam",
        {
            **TORCH_BETAS,
            "eps": SMALL,
            "momentum_decay": 2.0,
            "weight_decay": 0.125,
            "decoupled_weight_decay": True,
        },
    ),
    "NAdam of slow momentum": Case(
        NAdam(RATE, **BETAS, epsilon=SMALL, momentum_decay=2.0**-36),
        {**BETAS, "epsilon": SMALL, "momentum_decay": 2.0**-36},
        *("NAdam", {**TORCH_BETAS, "eps": SMALL, "momentum_decay": 2.0**-36}),
    ),
    "NAdam, momentum as it is": Case(
        NAdam(RATE, **BETAS, epsilon=SMALL, momentum_decay=0.0),
        {**BETAS, "epsilon": SMALL, "momentum_decay": 0.0},
        *("NAdam", {**TORCH_BETAS, "eps": SMALL, "momentum_decay": 0.0}),
    ),
    "RAdam": Case(
        RAdam(RATE, **BETAS, epsilon=SMALL, norm_coefficient=0.125),
        {**BETAS, "epsilon": SMALL, "l2": 0.125},
        *("RAdam", {**TORCH_BETAS, "eps": SMALL, "weight_decay": 0.125}),
    ),
    "RAdam decayed": Case(
        RAdam(RATE, **BETAS, epsilon=SMALL, weight_decay=0.125),
        {**BETAS, "epsilon": SMALL, "decay": 0.125},
        "RAdam",
        {**TORCH_BETAS, "eps": SMALL, "weight_decay": 0.125, "decoupled_weight_decay": True},
    ),
    "RAdam of few": Case(
        RAdam(RATE, beta1=0.875, beta2=0.5, epsilon=SMALL),
        {"beta1": 0.875, "beta2": 0.5, "epsilon": SMALL},
        *("RAdam", {"betas": (0.875, 0.5), "eps": SMALL}),
        inert=("epsilon", "beta2"),
    ),
    "Adamax": Case(
        Adamax(RATE, **BETAS, epsilon=SMALL, norm_coefficient=0.125),
        {**BETAS, "epsilon": SMALL, "l2": 0.125},
        *("Adamax", {**TORCH_BETAS, "eps": SMALL, "weight_decay": 0.125}),
    ),
    "Lion": Case(Lion(RATE, **BETAS, weight_decay=0.125), {**BETAS, "decay": 0.125}),
    "LAMB": Case(
        LAMB(RATE, **BETAS, epsilon=SMALL, weight_decay=0.125),
        {**BETAS, "epsilon": SMALL, "decay": 0.125},
        packed=False,
    ),
    "Adafactor": Case(
        Adafactor(RATE, beta2_decay=-0.75, weight_decay=0.125),
        {"beta2_decay": -0.75, "eps": (2.0**-23, float(np.float32(1e-3))), "decay": 0.125},
        "Adafactor",
        {"beta2_decay": -0.75, "eps": (2.0**-23, float(np.float32(1e-3))), "weight_decay": 0.125},
        packed=False,
        inert=("epsilon2", "clipping_threshold"),
    ),
    "Adafactor of relative steps": Case(
        Adafactor(1.0, beta2_decay=-0.75, epsilon2=4.0),
        {"beta2_decay": -0.75, "eps": (2.0**-23, 4.0)},
        *("Adafactor", {"beta2_decay": -0.75, "eps": (2.0**-23, 4.0)}),
        packed=False,
        inert=("learning_rate", "clipping_threshold"),
    ),
    "Adafactor of a given rate": Case(
        Adafactor(
            *(RATE, -0.75), clipping_threshold=0.5, relative_step=False, scale_parameter=False
        ),
        {
            "beta2_decay": -0.75,
            "eps": (2.0**-23, 0.0),
            "d": 0.5,
            "relative": False,
            "scaled": False,
        },
        packed=False,
        inert=("epsilon2",),
    ),
    "Adafactor unfactored": Case(
        Adafactor(RATE, beta2_decay=-0.75, factored=False),
        {"beta2_decay": -0.75, "eps": (2.0**-23, float(np.float32(1e-3))), "factored": False},
        packed=False,
        inert=("epsilon2", "clipping_threshold"),
    ),
    "ScheduleFreeAdamW": Case(
        ScheduleFreeAdamW(RATE, **BETAS, epsilon=SMALL, weight_decay=0.125, count_power=0.5),
        {**BETAS, "epsilon": SMALL, "decay": 0.125, "r": 0.5},
        packed=False,
        inert=("rate_power",),
    ),
    "Muon": Case(
        Muon(
            *(RATE, 0.125, 0.875, True, 5, "match_rms_adamw", TINY),
            **BETAS,
            adamw_epsilon=SMALL,
        ),
        {
            "momentum": 0.875,
            "nesterov": True,
            "steps": 5,
            "adjustment": "match_rms_adamw",
            "epsilon": TINY,
            "decay": 0.125,
            "adamw": {**BETAS, "epsilon": SMALL},
        },
        "Muon",
        {
            "momentum": 0.875,
            "nesterov": True,
            "ns_steps": 5,
            "eps": TINY,
            "weight_decay": 0.125,
            "adjust_lr_fn": "match_rms_adamw",
        },
        packed=False,
    ),
    "Muon as it was": Case(
        Muon(
            *(RATE, 0.0, 0.75, False, 3, "original", TINY),
            **BETAS,
            adamw_epsilon=SMALL,
        ),
        {
            "momentum": 0.75,
            "nesterov": False,
            "steps": 3,
            "adjustment": "original",
            "epsilon": TINY,
            "decay": 0.0,
            "adamw": {**BETAS, "epsilon": SMALL},
        },
        "Muon",
        {
            "momentum": 0.75,
            "nesterov": False,
            "ns_steps": 3,
            "eps": TINY,
            "weight_decay": 0.0,
            "adjust_lr_fn": "original",
        },
        packed=False,
    ),
}


def starts(dtype: Any = np.float32) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(dtype: Any = np.float32) -> list[Arrays]:
    """Gradients of each step, which have a direction, and become smaller."""
    rng = np.random.default_rng(1)
    toward = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}

    def noisy(name: str, step: int) -> Any:
        noise = rng.normal(size=SHAPES[name])
        return np.asarray(0.96**step * (toward[name] + noise), dtype)

    return [{name: noisy(name, step) for name in SHAPES} for step in range(STEPS)]


def expected(case: Case, start: Arrays, given: list[Arrays]) -> Arrays:
    name, rate = case.optimizer.name, case.optimizer.peak
    return {
        key: trajectory(name, x, [step[key] for step in given], rate, **case.oracle)
        for key, x in start.items()
    }


def by_arrays(optimizer: Optimizer, start: Arrays, given: list[Arrays]) -> Arrays:
    """Applies the rule to numpy arrays."""
    found = {}
    for name, x in start.items():
        own = optimizer.of(x.shape)
        state = [
            x.copy() if letter in own.copies else np.zeros(s, x.dtype)
            for letter, s in own.state_shapes(x.shape).items()
        ]
        for t, step in enumerate(given, optimizer.first_step):
            r, count = np.asarray(optimizer.peak, np.float32), np.asarray(t, np.int64)
            x, *state = own.update(r, count, x, step[name], *state)
            assert [s.shape for s in state] == list(own.state_shapes(x.shape).values())
            assert {each.dtype for each in (x, *state)} == {start[name].dtype}
        found[name] = x
    return found


def assert_close(found: Arrays, wanted: Arrays, start: Arrays, relative: float) -> None:
    for name, x in wanted.items():
        size = np.abs(x).max() + np.abs(x - start[name]).max()
        np.testing.assert_allclose(found[name], x, rtol=0, atol=relative * size, err_msg=name)


def model(dtype: Any = np.float32) -> onnx.ModelProto:
    """Returns the sum of parameters times inputs, whose gradients are the inputs."""
    with Tape() as tape:
        products = [
            (tape.initializer(name, x) * tape.input(f"d_{name}", dtype, x.shape)).sum()
            for name, x in starts(dtype).items()
        ]
        tape.output(sum(products[1:], products[0]), "y")
    return tape.model()


def build(optimizer: Optimizer, dtype: Any = np.float32) -> onnx.ModelProto:
    return build_training_model(
        model(dtype), loss=lambda y: y, optimizer=optimizer, trainable=list(SHAPES)
    )


def feeds(step: Arrays) -> Arrays:
    return {f"d_{name}": g for name, g in step.items()}


def trained(session: TrainingSession, given: list[Arrays]) -> Arrays:
    for step in given:
        session.step(feeds(step))
    return {name: session.state[name].copy() for name in SHAPES}


WAYS: dict[str, dict[str, Any]] = {
    "joined": {},
    "apart": {"settings": Settings(joined=-1)},
    "python": {"kernels": "python"},
}


def test_all_optimizers_without_an_operator_are_here() -> None:
    older = {"Adam", "AdamW", "Adagrad", "Momentum"}
    older |= {"Prodigy", "Adam8bit"}  # in test_prodigy.py and test_adam8bit.py
    assert {case.optimizer.name for case in CASES.values()} == OPTIMIZERS.keys() - older


@pytest.mark.quick(11)
@pytest.mark.parametrize("name", CASES)
def test_arrays(name: str) -> None:
    case = CASES[name]
    wide, given = starts(np.float64), gradients(np.float64)
    wanted = expected(case, wide, given)
    assert_close(by_arrays(case.optimizer, wide, given), wanted, wide, 1e-14)
    start, given = starts(), gradients()
    wanted = expected(case, start, given)
    assert_close(by_arrays(case.optimizer, start, given), wanted, start, 1e-6)


@pytest.mark.nightly(8)
@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_sessions(name: str, way: str) -> None:
    case, start, given = CASES[name], starts(), gradients()
    session = TrainingSession(build(case.optimizer), **WAYS[way])
    assert_close(trained(session, given), expected(case, start, given), start, 1e-6)


@pytest.mark.quick(4)
@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.torch])
def test_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64; so is Newton and Schulz's iteration, which torch rounds to bfloat16."""
    import torch

    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    case, start, given = CASES[name], starts(np.float64), gradients(np.float64)
    shapes = {name: s for name, s in SHAPES.items() if case.torch != "Muon" or len(s) == 2}
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # for scalars that torch keeps
    try:
        parameters = {name: torch.nn.Parameter(torch.tensor(start[name])) for name in shapes}
        theirs = getattr(torch.optim, case.torch)(
            parameters.values(), lr=case.optimizer.peak, **case.settings
        )
        for step in given:
            for name, parameter in parameters.items():
                parameter.grad = torch.tensor(step[name])
            theirs.step()
    finally:
        torch.set_default_dtype(kind)
    wanted = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
    # Adamw of Muon is torch's too, which tests of AdamW show.
    assert_close(by_arrays(case.optimizer, start, given), wanted, start, 1e-14)


def nudged(case: Case) -> Iterator[Optimizer]:
    """Yields the optimizer with each of its settings that count here off by a hundredth."""
    optimizer = case.optimizer
    for name, value in vars(optimizer).items():
        if isinstance(value, float) and abs(value) > TINY and name not in case.inert:
            factor = 1 - value if name in ("beta1", "beta2", "alpha", "beta", "rho") else value
            yield replace(optimizer, **{name: value + 0.01 * factor})


@pytest.mark.nightly(9)
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_the_bounds_can_fail(name: str) -> None:
    case, start, given = CASES[name], starts(), gradients()
    wanted = expected(case, start, given)
    for other in nudged(case):
        found = by_arrays(other, start, given)
        with pytest.raises(AssertionError):
            assert_close(found, wanted, start, 1e-6)


@pytest.mark.nightly(5)
@pytest.mark.quick(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_resumes_exactly(name: str, way: str, tmp_path: Path) -> None:
    given, path = gradients(), tmp_path / "saved.onnx"
    unbroken = TrainingSession(build(CASES[name].optimizer), **WAYS[way])
    trained(unbroken, given[:7])
    unbroken.save(path)
    resumed = TrainingSession(path, **WAYS[way])
    for session in (unbroken, resumed):
        trained(session, given[7:12])
    assert resumed.state.keys() == unbroken.state.keys()
    for key, array in unbroken.state.items():
        np.testing.assert_array_equal(resumed.state[key], array, strict=True)


@pytest.mark.nightly(9)
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", CASES)
def test_float16(name: str) -> None:
    """Masters follow the oracle, of gradients and starts that float16 has."""
    case, start, given = CASES[name], starts(np.float16), gradients(np.float16)
    session = TrainingSession(build(case.optimizer, np.float16))
    for number, step in enumerate(given):
        while session.steps_done == number:  # the scale of the loss falls until all is finite
            session.step(feeds(step))
    wanted = expected(case, start, given)
    masters = {name: session.state[f"{name}.master"] for name in SHAPES}
    assert {master.dtype for master in masters.values()} == {np.dtype(np.float32)}
    assert_close(masters, wanted, start, 1e-6)
    for name, master in masters.items():
        np.testing.assert_array_equal(session.state[name], master.astype(np.float16), strict=True)


# ------------------------------------------------------------------------------------- shapes

ONNXRUNTIME = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])


SMALLEST = [(), (0,), (1,), (0, 3), (2, 0), (2, 0, 3), (1, 1)]


@pytest.mark.nightly(9)
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_shape(name: str) -> None:
    """On arrays, without a warning, and as nodes: the same, of the same types and shapes."""
    with all_violations() as check:
        for dtype, shape in itertools.product((np.float32, np.float64), SMALLEST):
            if (name, dtype, shape) == ("Muon", np.float64, (1, 1)) and ONNXRUNTIME < (1, 27):
                continue  # it fuses MatMul of float64 into a kernel that it lacks
            with check(f"{dtype.__name__}, shape {shape}"):
                takes_shape(name, dtype, shape)


def takes_shape(name: str, dtype: Any, shape: tuple[int, ...]) -> None:
    optimizer = OPTIMIZERS[name]().of(shape)
    states = optimizer.state_shapes(shape)
    assert tuple(states) == optimizer.states
    kinds = {"x": shape, "g": shape, **states}
    rng = np.random.default_rng(0)
    feeds = {key: np.asarray(rng.random(size), dtype) for key, size in kinds.items()}
    scalars = {"r": np.asarray(0.125), "t": np.asarray(3)}
    found = optimizer.update(*scalars.values(), *feeds.values())
    with Tape() as tape:
        inputs = [tape.input(key, v.dtype, v.shape) for key, v in (scalars | feeds).items()]
        for key, new in zip(("x", *states), optimizer.update(*inputs), strict=True):
            tape.output(new, f"{key}_new")
    kinds.pop("g")
    nodes = run(tape.model(), scalars | feeds)
    for array, node, size in zip(found, nodes, kinds.values(), strict=True):
        assert isinstance(array, np.ndarray)
        assert (array.shape, array.dtype) == (node.shape, node.dtype) == (size, dtype)
        assert np.isfinite(array).all()
        # onnxruntime fuses a product of matrices and a scalar, which it rounds to float32.
        precise = np.finfo(np.float32 if optimizer.name == "Muon" else dtype).eps
        np.testing.assert_allclose(node, array, rtol=300 * precise)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zero_gradients_from_the_start_stay_finite(name: str) -> None:
    optimizer = OPTIMIZERS[name]().of((2, 3))
    x = np.zeros((2, 3), np.float32)
    state = [np.zeros(s, np.float32) for s in optimizer.state_shapes((2, 3)).values()]
    for t in range(3):
        x, *state = optimizer.update(np.float32(0.1), np.int64(t), x, np.zeros_like(x), *state)
        np.testing.assert_array_equal(x, np.zeros((2, 3)))
        assert all(np.isfinite(array).all() for array in state)


# ------------------------------------------------------------------------------------- packing


@pytest.mark.nightly(10)
@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.packed])
def test_rules_by_element_are_packed(name: str) -> None:
    """One formula for all parameters but the scalar, whose update stays in the graph."""
    (update,) = TrainingSession(build(CASES[name].optimizer)).report().packed
    assert set(update.shapes) == set(SHAPES.values()) - {()}
    assert len(update.variables) == 1 + len(CASES[name].optimizer.states)


@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", [LAMB(), Adafactor()], ids=["LAMB", "Adafactor"])
def test_rules_by_parameter_stay_in_the_graph(optimizer: Optimizer) -> None:
    assert TrainingSession(build(optimizer)).report().packed == ()


def test_what_muon_leaves_to_adamw_is_packed() -> None:
    packed = TrainingSession(build(Muon())).report().packed
    assert ((3,), (2, 3, 2, 2)) in [update.shapes for update in packed]


# ---------------------------------------------------------------------------------- in a file


def test_sgd_with_momentum_is_the_domains_operator() -> None:
    nodes = build(SGD(momentum=0.5, dampening=0.25)).training_info[0].algorithm.node
    found = [node for node in nodes if node.op_type == "Momentum"]
    assert len(found) == len(SHAPES)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in found[0].attribute}
    assert attributes == {"alpha": 0.5, "beta": 0.75, "mode": b"standard", "norm_coefficient": 0}
    assert SGD(momentum=0.0).operator is None


def test_states_of_their_own_shapes() -> None:
    session = TrainingSession(build(Adafactor()))
    shapes = {key: array.shape for key, array in session.state.items() if "." in key}
    assert shapes == {
        "matrix.ROW": (4, 1),
        "matrix.COLUMN": (1, 3),
        "wide.ROW": (2, 1),
        "wide.COLUMN": (1, 5),
        "kernel.ROW": (2, 3, 2, 1),
        "kernel.COLUMN": (2, 3, 1, 2),
        "vector.H": (3,),
        "scalar.H": (),
    }


DECAY = "must be a finite number >= 0 and < 1, got "
POSITIVE = "must be a finite number > 0, got "
NON_NEGATIVE = "must be a finite number >= 0, got "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(momentum=1), rf"SGD: momentum {DECAY}1.0"),
        (
            lambda: SGD(momentum=0.5, dampening=2),
            r"SGD: dampening must be a finite number >= 0 and <= 1, got 2.0",
        ),
        (lambda: SGD(dampening=0.5), r"SGD: dampening must be 0 without momentum, got 0.5"),
        (lambda: SGD(nesterov=True), r"SGD: nesterov must be False without momentum, got True"),
        (
            lambda: SGD(momentum=0.5, dampening=0.5, nesterov=True),
            r"SGD: nesterov must be False with dampening, got True",
        ),
        (lambda: SGD(momentum=0.5, nesterov=1), r"SGD: nesterov must be True or False, got 1"),
        (lambda: RMSprop(rho=1), rf"optimizer RMSprop: rho {DECAY}1.0"),
        (lambda: RMSprop(momentum=-1), rf"RMSprop: momentum {DECAY}-1.0"),
        (lambda: RMSprop(epsilon=0), rf"RMSprop: epsilon {POSITIVE}0.0"),
        (lambda: RMSprop(centered="yes"), r"RMSprop: centered must be True or False, got 'yes'"),
        (lambda: Adadelta(rho=-0.5), rf"Adadelta: rho {DECAY}-0.5"),
        (lambda: Adadelta(epsilon=-1), rf"Adadelta: epsilon {POSITIVE}-1.0"),
        (lambda: AMSGrad(alpha=1), rf"AMSGrad: alpha {DECAY}1.0"),
        (lambda: AMSGrad(epsilon=0), rf"AMSGrad: epsilon {POSITIVE}0.0"),
        (lambda: AMSGrad(weight_decay=-1), rf"AMSGrad: weight_decay {NON_NEGATIVE}-1.0"),
        (lambda: NAdam(beta1=1), rf"NAdam: beta1 {DECAY}1.0"),
        (lambda: NAdam(momentum_decay=-1), rf"NAdam: momentum_decay {NON_NEGATIVE}-1.0"),
        (lambda: NAdam(epsilon=0), rf"NAdam: epsilon {POSITIVE}0.0"),
        (lambda: RAdam(beta2=1 - 1e-9), rf"RAdam: beta2=0.999999999 in float32 {DECAY}1.0"),
        (lambda: RAdam(epsilon=0), rf"RAdam: epsilon {POSITIVE}0.0"),
        (lambda: RAdam(weight_decay=-1), rf"RAdam: weight_decay {NON_NEGATIVE}-1.0"),
        (lambda: Adamax(beta2=1), rf"Adamax: beta2 {DECAY}1.0"),
        (lambda: Adamax(epsilon=1e-60), rf"Adamax: epsilon=1e-60 in float32 {POSITIVE}0.0"),
        (lambda: Lion(beta1=2), rf"Lion: beta1 {DECAY}2.0"),
        (lambda: Lion(weight_decay=-1), rf"Lion: weight_decay {NON_NEGATIVE}-1.0"),
        (lambda: LAMB(beta2=1), rf"LAMB: beta2 {DECAY}1.0"),
        (lambda: LAMB(epsilon=0), rf"LAMB: epsilon {POSITIVE}0.0"),
        (lambda: LAMB(weight_decay=-1), rf"LAMB: weight_decay {NON_NEGATIVE}-1.0"),
        (
            lambda: Adafactor(beta2_decay=1),
            r"Adafactor: beta2_decay must be a finite number <= 0, got 1.0",
        ),
        (
            lambda: Adafactor(epsilon1=1e-30),
            r"Adafactor: epsilon1 must be .* >= 1.08\d*e-19 and < 9.22\d*e\+18, got 1e-30",
        ),
        (lambda: Adafactor(epsilon2=0), rf"Adafactor: epsilon2 {POSITIVE}0.0"),
        (lambda: Adafactor(clipping_threshold=0), rf"clipping_threshold {POSITIVE}0.0"),
        (lambda: Adafactor(weight_decay=-1), rf"Adafactor: weight_decay {NON_NEGATIVE}-1.0"),
        (
            lambda: Adafactor(relative_step=1),
            r"Adafactor: relative_step must be True or False, got 1",
        ),
        (lambda: Muon(momentum=1), rf"Muon: momentum {DECAY}1.0"),
        (lambda: Muon(epsilon=0), rf"Muon: epsilon {POSITIVE}0.0"),
        (lambda: Muon(adamw_epsilon=0), rf"Muon: adamw_epsilon {POSITIVE}0.0"),
        (lambda: Muon(weight_decay=-1), rf"Muon: weight_decay {NON_NEGATIVE}-1.0"),
        (lambda: Muon(steps=0), r"Muon: steps must be an integer >= 1 and <= 99, got 0"),
        (lambda: Muon(steps=True), r"Muon: steps must be an integer >= 1 and <= 99, got True"),
        (
            lambda: Muon(adjustment="none"),
            r"Muon: adjustment must be 'match_rms_adamw' or 'original', got 'none'",
        ),
    ],
)
def test_a_value_outside_its_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
