"""The update rules, on numpy arrays and as ONNX nodes, and the constructors."""

from __future__ import annotations

import functools
import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from optimizer_cases import (
    ATTRIBUTE_SETS,
    FLOATS,
    OFFICIAL,
    SQUARED,
    a_update,
    assert_expected,
    float32,
    official_cases,
    with_defaults,
)
from running import run
from violations import all_violations

from ortops import Tape
from ortops import optimizers as optimizers_module
from ortops.errors import ArgumentError
from ortops.optimizers import (
    OPERATORS,
    OPTIMIZERS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Custom,
    Momentum,
    resolve,
)

DOMAIN = "ai.onnx.preview.training"
# What attributes are drawn from; rounding to float32 is part of the draw.
ATTRIBUTES: dict[str, dict[str, st.SearchStrategy[Any]]] = {}
_decay = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.999, 0.9999999]), st.floats(0, 0.9999)).map(
    float32
)
_epsilon = st.sampled_from([1e-10, 1e-8, 1e-6, 1e-3, 1.0]).map(float32)
_norm = st.sampled_from([0.0, 0.001, 0.123456789, 0.5]).map(float32)
ATTRIBUTES["Adagrad"] = {
    "norm_coefficient": _norm,
    "decay_factor": st.sampled_from([0.0, 0.1, 2.0]).map(float32),
    "epsilon": _epsilon,
}
ATTRIBUTES["Adam"] = {
    "norm_coefficient": _norm,
    "norm_coefficient_post": _norm,
    "alpha": _decay,
    "beta": _decay,
    "epsilon": _epsilon,
}
ATTRIBUTES["Momentum"] = {
    "norm_coefficient": _norm,
    "alpha": _decay,
    "beta": st.sampled_from([0.0, 0.1, 1.0, 1.5]).map(float32),
    "mode": st.sampled_from(["standard", "nesterov"]),
}
ATTRIBUTES["SGD"] = {"norm_coefficient": _norm}
ATTRIBUTES["AdamW"] = {
    "alpha": _decay,
    "beta": _decay,
    "epsilon": _epsilon,
    "weight_decay": st.sampled_from([0.0, 0.01, 0.5]).map(float32),
}


@st.composite
def updates(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Draws the inputs of one update.

    Numbers are multiples of 1/64 times a power of two, of which X and G share one: then
    norm_coefficient · X + G does not cancel in a way that no implementation could survive.
    """
    optimizer = OPTIMIZERS[name]()
    dtype = draw(st.sampled_from(FLOATS))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
    exponent = draw(st.integers(-20, 20))
    numbers = st.integers(-512, 512).map(lambda number: number / 64)
    x, g = (
        np.ldexp(draw(hnp.arrays(dtype, shape, elements=numbers)), exponent).astype(dtype)
        for _ in range(2)
    )
    states = []
    for state in optimizer.states:
        array = draw(hnp.arrays(dtype, shape, elements=numbers))
        array = np.ldexp(array, draw(st.integers(-20, 20))).astype(dtype)
        states.append(np.abs(array) if state in SQUARED.get(name, ()) else array)
    return {
        "r": np.asarray(
            draw(st.sampled_from([0.0, 1e-3, 0.5, 10.0])), draw(st.sampled_from(FLOATS))
        ),
        "t": np.asarray(
            draw(st.one_of(st.sampled_from([0, 1, 2, 2**40]), st.integers(0, 10**6))), np.int64
        ),
        "tensors": [np.asarray(array) for array in (x, g, *states)],
        "attributes": {key: draw(values) for key, values in ATTRIBUTES[name].items()},
    }


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", ATTRIBUTES)
@given(data=st.data())
def test_a_rule_on_arrays_follows_the_pseudo_code(name: str, data: st.DataObject) -> None:
    update = data.draw(updates(name))
    before = [array.copy() for array in update["tensors"]]
    rule = OPTIMIZERS[name]().rule
    results = rule(update["r"], update["t"], *update["tensors"], **update["attributes"])
    assert_expected(name, results, update)
    for array, copy in zip(update["tensors"], before, strict=True):
        np.testing.assert_array_equal(array, copy)


def torchs_adam(
    x: Any, gradients: Any, *, rate: float, alpha: float, beta: float, epsilon: float, decay: float
) -> Any:
    """Algorithm 1 of the paper in float64, epsilon after the correction; with decay AdamW."""
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        x = x * (1 - rate * decay)
        mean = alpha * mean + (1 - alpha) * g
        square = beta * square + (1 - beta) * g**2
        root = np.sqrt(square / (1 - beta**t)) + epsilon
        x = x - rate * (mean / (1 - alpha**t)) / root
    return x


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("epsilon", [1e-8, 1e-3, 1.0])
@pytest.mark.parametrize("decay", [None, 0.5])
def test_epsilon_after_correction(dtype: Any, epsilon: float, decay: float | None) -> None:
    """On arrays, and as nodes that stock onnxruntime runs."""
    settings: Any = {"learning_rate": 0.25, "alpha": 0.875, "beta": 0.96875, "epsilon": epsilon}
    settings["epsilon_after_correction"] = True
    optimizer = Adam(**settings) if decay is None else AdamW(**settings, weight_decay=decay)
    assert optimizer.operator is None
    assert optimizer.operator_attributes == {}
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=(3, 4)).astype(dtype), rng.normal(size=(10, 3, 4))
    gradients = gradients.astype(dtype)
    with Tape() as tape:
        t = tape.input("t", np.int64, [])
        tensors = [tape.input(name, dtype, [3, 4]) for name in "xgvh"]
        r = tape.input("r", dtype, [])
        for name, new in zip("xvh", optimizer.update(r, t, *tensors), strict=True):
            tape.output(new, f"{name}_new")
    rate = np.asarray(0.25, dtype)
    on_arrays = as_nodes = (start, np.zeros_like(start), np.zeros_like(start))
    for number, g in enumerate(gradients, 1):
        count = np.asarray(number, np.int64)
        on_arrays = optimizer.update(rate, count, on_arrays[0], g, *on_arrays[1:])
        x, v, h = as_nodes
        as_nodes = tuple(run(tape.model(), {"t": count, "r": rate, "x": x, "g": g, "v": v, "h": h}))
    expected = torchs_adam(
        *(start.astype(np.float64), gradients.astype(np.float64)),
        rate=0.25,
        alpha=0.875,
        beta=0.96875,
        epsilon=float32(epsilon),
        decay=decay or 0.0,
    )
    for found in (on_arrays, as_nodes):
        assert found[0].dtype == dtype
        np.testing.assert_allclose(found[0], expected, atol=32 * np.finfo(dtype).eps)


def test_epsilon_after_correction_counts() -> None:
    """The two forms differ where epsilon is not small, by the root of 1 - beta^T."""
    x, zero, r, t = np.float64([0.0]), np.zeros(1), np.float64(1.0), np.int64(1)
    before, *_ = Adam(epsilon=1.0).update(r, t, x, np.float64([1.0]), zero, zero)
    after, *_ = Adam(epsilon=1.0, epsilon_after_correction=True).update(
        *(r, t, x), np.float64([1.0]), zero, zero
    )
    assert after == pytest.approx(-1 / 2, rel=1e-6)
    assert before == pytest.approx(-1 / (1 + 1 / math.sqrt(1 - float32(0.999))), rel=1e-6)


def test_epsilon_after_correction_is_true_or_false() -> None:
    with pytest.raises(
        ArgumentError, match=r"Adam: epsilon_after_correction must be True or False, got 1"
    ):
        Adam(epsilon_after_correction=1)  # type: ignore[arg-type]


def test_the_oracle_tells_wrong_rules_apart() -> None:
    """The bounds see PyTorch's place of epsilon, and noise in the fifth digit."""
    x = np.linspace(-1, 1, 6, dtype=np.float32)
    optimizer = Adam(epsilon=1e-3)
    update = {
        "r": np.asarray(1.0),
        "t": np.asarray(3),
        "tensors": [x, x / 3, x / 5, abs(x)],
        "attributes": optimizer.attributes,
    }
    scalars, tensors = (update["r"], update["t"]), update["tensors"]
    right = optimizer.update(*scalars, *tensors)
    assert_expected("Adam", right, update)
    after_correction = 1e-3 * math.sqrt(1 - float32(0.999) ** 3)
    with pytest.raises(AssertionError, match="rounding allows"):
        assert_expected("Adam", Adam(epsilon=after_correction).update(*scalars, *tensors), update)
    noisy = tuple(result * np.float32(1 + 1e-5) for result in right)
    with pytest.raises(AssertionError, match="rounding allows"):
        assert_expected("Adam", noisy, update)


def test_a_0d_parameter_stays_an_array_of_its_dtype() -> None:
    with all_violations() as check:
        for name, r_dtype, x_dtype in itertools.product(OPTIMIZERS, FLOATS, FLOATS):
            with check(f"{name}, R of {r_dtype}, X of {x_dtype}"):
                optimizer = OPTIMIZERS[name]().of(())
                tensors = [np.asarray(0.5, x_dtype)] * (2 + len(optimizer.states))
                for result in optimizer.update(np.asarray(0.1, r_dtype), np.asarray(1), *tensors):
                    assert isinstance(result, np.ndarray)
                    assert (result.shape, result.dtype) == ((), x_dtype)


def test_scalar_coefficients_are_computed_in_float64() -> None:
    """In float32, 1 - beta^T would lose half its digits."""
    beta = float32(1 - 1e-6)
    x, g = np.zeros(1, np.float32), np.ones(1, np.float32)
    x_new, _, h_new = optimizers_module.adam(
        np.float32(1), np.int64(1), x, g, x, x, alpha=0.0, beta=beta, epsilon=1e-20
    )
    assert x_new[0] == pytest.approx(-math.sqrt(1 - beta) / math.sqrt(float(h_new[0])), rel=1e-7)


def test_legal_input_gives_no_warning_at_t_0() -> None:
    """1 - alpha^0 is a division by zero, in a branch that is not taken. Warnings are errors."""
    zero = np.zeros(3, np.float32)
    x_new, *_ = Adam().update(np.float32(0.1), np.int64(0), zero, zero, zero, zero)
    np.testing.assert_array_equal(x_new, zero)


# -------------------------------------------------------------------------------- as ONNX nodes


def run_as_nodes(name: str, update: dict[str, Any], *, symbolic: bool) -> list[Any]:
    """Applies a rule to Tensors, and runs the graph in stock onnxruntime."""
    optimizer = OPTIMIZERS[name]()
    letters = ["X", "G", *optimizer.states]
    x = update["tensors"][0]
    shape = [f"d{axis}" if symbolic else size for axis, size in enumerate(x.shape)]
    with Tape() as tape:
        r = tape.input("R", update["r"].dtype, [])
        t = tape.input("T", np.int64, [])
        tensors = [tape.input(letter, x.dtype, shape) for letter in letters]
        results = optimizer.rule(r, t, *tensors, **update["attributes"])
        for result, letter in zip(results, ["X", *optimizer.states], strict=True):
            tape.output(result, f"{letter}_new")
    feeds = {"R": update["r"], "T": update["t"]}
    feeds |= dict(zip(letters, update["tensors"], strict=True))
    return run(tape.model(), feeds)


@pytest.mark.nightly
@pytest.mark.quick(54)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("r_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("t", [0, 1, 1000])
@pytest.mark.parametrize("setting", [0, 1])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_rule_as_nodes_follows_the_pseudo_code(
    name: str, setting: int, t: int, r_dtype: np.dtype[Any], x_dtype: np.dtype[Any]
) -> None:
    attributes = ATTRIBUTE_SETS[name][setting]
    update = a_update(name, attributes, t=t, r_dtype=r_dtype, x_dtype=x_dtype)
    assert_expected(name, run_as_nodes(name, update, symbolic=False), update)


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_rule_as_nodes_takes_any_shape(name: str, shape: tuple[int, ...], symbolic: bool) -> None:
    update = a_update(name, ATTRIBUTE_SETS[name][1], shape=shape)
    assert_expected(name, run_as_nodes(name, update, symbolic=symbolic), update)


def test_terms_with_coefficient_0_emit_no_nodes() -> None:
    def count(**attributes: float) -> int:
        with Tape() as tape:
            scalars = tape.input("R", np.float32, []), tape.input("T", np.int64, [])
            tensors = [tape.input(letter, np.float32, [3]) for letter in "XGVH"]
            optimizers_module.adam(*scalars, *tensors, **attributes)
        return len(tape.nodes)

    assert count(norm_coefficient=0.5) == count() + 3  # a constant, Mul, Add
    assert count(norm_coefficient_post=0.5) == count() + 2  # a constant, Mul


# ------------------------------------------------------------------- the tables and the schemas


@pytest.mark.parametrize("name", OPERATORS)
def test_the_table_of_attributes_is_the_schema(name: str) -> None:
    schema = onnx.defs.get_schema(name, 1, DOMAIN)
    operator = OPERATORS[name]
    kinds = {
        onnx.defs.OpSchema.AttrType.FLOAT: float,
        onnx.defs.OpSchema.AttrType.STRING: str,
    }
    assert operator.attribute_types == {
        key: kinds[attribute.type] for key, attribute in schema.attributes.items()
    }
    assert sorted(operator.required) == sorted(
        key for key, attribute in schema.attributes.items() if attribute.required
    )
    assert operator.defaults == {
        key: onnx.helper.get_attribute_value(attribute.default_value)
        for key, attribute in schema.attributes.items()
        if not attribute.required
    }


def test_the_table_of_states_is_the_order_of_inputs() -> None:
    assert {name: operator.states for name, operator in OPERATORS.items()} == {
        "Adagrad": ("H",),
        "Adam": ("V", "H"),
        "Momentum": ("V",),
    }


@pytest.mark.parametrize("name", ["Adagrad", "Adam", "Momentum"])
def test_a_constructor_has_the_attributes_of_its_operator(name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    assert optimizer.operator == name
    assert optimizer.rule is OPERATORS[name].rule
    assert optimizer.attributes.keys() == OPERATORS[name].attribute_types.keys()
    assert optimizer.operator_attributes == optimizer.attributes


def test_all_official_cases_are_there() -> None:
    assert official_cases().keys() == OFFICIAL


@pytest.mark.parametrize(
    "name",
    [
        # Before onnx 1.22, the case expected other values.
        pytest.param(name, marks=[pytest.mark.needs("onnx>=1.22")] * (name == "test_adam_multiple"))
        for name in sorted(OFFICIAL)
    ],
)
def test_an_official_case_passes_through_the_rule(name: str) -> None:
    case = official_cases()[name]
    node = case["node"]
    operator = OPERATORS[node.op_type]
    attributes = with_defaults(node)
    r, t, *rest = case["inputs"]
    count = len(rest) // (2 + len(operator.states))
    for index in range(count):
        results = operator.rule(r, t, *rest[index::count], **attributes)
        for result, want in zip(results, case["outputs"][index::count], strict=True):
            np.testing.assert_allclose(result, want, rtol=1e-6)


# --------------------------------------------------------------------------------- constructors


def test_attributes_are_float32_values() -> None:
    assert Adam(alpha=0.9).attributes["alpha"] == 0.8999999761581421
    assert Adam(alpha=0.9).alpha == 0.9


def test_the_first_t() -> None:
    assert {name: optimizer.first_step for name, optimizer in OPTIMIZERS.items()} == {
        **dict.fromkeys(("SGD", "Momentum", "Adagrad", "RMSprop", "Adadelta", "Lion"), 0),
        **dict.fromkeys(("Adam", "AdamW", "AMSGrad", "NAdam", "RAdam", "Adamax"), 1),
        **dict.fromkeys(("LAMB", "Adafactor", "Muon", "ScheduleFreeAdamW", "Prodigy"), 1),
        "Adam8bit": 1,
    }


def test_adamw_is_a_shrink_and_then_the_domains_adam() -> None:
    rng = np.random.default_rng(0)
    x, g, v, h = rng.random((4, 5))
    r, t = np.asarray(0.1), np.asarray(3)
    optimizer = AdamW(weight_decay=0.3)
    assert optimizer.operator == "Adam"
    shrunk = optimizer.before_operator(r, x)
    np.testing.assert_allclose(shrunk, (1 - 0.1 * float32(0.3)) * x, rtol=1e-15)
    domain = OPERATORS["Adam"].rule(r, t, shrunk, g, v, h, **optimizer.operator_attributes)
    for result, want in zip(optimizer.update(r, t, x, g, v, h), domain, strict=True):
        np.testing.assert_array_equal(result, want)


def test_operators_without_a_shrink_leave_the_parameter() -> None:
    x = np.ones(2)
    assert Adam().before_operator(np.asarray(0.1), x) is x
    assert AdamW(weight_decay=0.0).before_operator(np.asarray(0.1), x) is x
    assert SGD().operator is None
    assert SGD().operator_attributes == {}


DECAY = "must be a finite number >= 0 and < 1, got "
POSITIVE = "must be a finite number > 0, got "
NON_NEGATIVE = "must be a finite number >= 0, got "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Adam(alpha=1.0),
            rf"optimizer Adam: alpha {DECAY}1.0",
        ),
        (lambda: Adam(alpha=1 - 1e-9), rf"alpha=0.999999999 in float32 {DECAY}1.0"),
        (lambda: Adam(beta=-0.1), rf"optimizer Adam: beta {DECAY}-0.1"),
        (lambda: Adam(epsilon=0.0), rf"epsilon {POSITIVE}0.0"),
        (lambda: Adam(epsilon=1e-60), rf"epsilon=1e-60 in float32 {POSITIVE}0.0"),
        (lambda: Adam(learning_rate=-1), rf"learning_rate {NON_NEGATIVE}-1.0"),
        (lambda: SGD(learning_rate=math.nan), r"learning_rate must be a finite number, got nan"),
        (
            lambda: SGD(learning_rate=1e39),
            r"learning_rate=1e\+39 in float32 must be a finite number >= 0, got inf",
        ),
        (lambda: SGD(learning_rate=10**400), r"learning_rate must be a finite number, got 10+"),
        (
            lambda: SGD(norm_coefficient=math.inf),
            r"norm_coefficient must be a finite number, got inf",
        ),
        (lambda: SGD(learning_rate="0.1"), r"learning_rate must be a finite number, got '0.1'"),
        (lambda: SGD(learning_rate=True), r"learning_rate must be a finite number, got True"),
        (lambda: AdamW(weight_decay=-1), rf"optimizer AdamW: weight_decay {NON_NEGATIVE}-1.0"),
        (lambda: AdamW(alpha=2), rf"optimizer AdamW: alpha {DECAY}2.0"),
        (lambda: Adagrad(epsilon=-1), rf"optimizer Adagrad: epsilon {POSITIVE}-1.0"),
        (lambda: Adagrad(decay_factor=-1), rf"decay_factor {NON_NEGATIVE}-1.0"),
        (lambda: Momentum(alpha=1), rf"optimizer Momentum: alpha {DECAY}1.0"),
        (lambda: Momentum(beta=-1), rf"beta {NON_NEGATIVE}-1.0"),
        (
            lambda: Momentum(mode="nestorov"),
            r"optimizer Momentum: mode must be 'standard' or 'nesterov', got 'nestorov'",
        ),
    ],
)
def test_a_value_outside_its_range_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_numpy_numbers_and_integers_become_floats() -> None:
    optimizer = SGD(learning_rate=np.float32(0.5), norm_coefficient=1)
    assert (type(optimizer.learning_rate), type(optimizer.norm_coefficient)) == (float, float)
    assert optimizer == SGD(learning_rate=0.5, norm_coefficient=1.0)


def test_momentum_refuses_another_mode_in_the_rule() -> None:
    one = np.ones(1)
    with pytest.raises(
        ArgumentError, match="Momentum: mode must be 'standard' or 'nesterov', got 'fast'"
    ):
        OPERATORS["Momentum"].rule(
            one[0], one[0], one, one, one, norm_coefficient=0, alpha=0, beta=1, mode="fast"
        )


# -------------------------------------------------------------------------------------- resolve


def centered(r: Any, t: Any, x: Any, g: Any, m: Any, *, decay: float = 0.5) -> Any:
    m_new = decay * m + g
    return x - r.astype(x.dtype) * m_new, m_new


def test_names_classes_and_optimizers_resolve() -> None:
    for name, constructor in OPTIMIZERS.items():
        assert resolve(name) == constructor()
    assert resolve(Adam) == Adam()
    optimizer = Momentum(alpha=0.5)
    assert resolve(optimizer) is optimizer


def test_a_function_resolves_to_an_optimizer_of_its_own() -> None:
    optimizer = resolve(centered)
    assert optimizer == Custom(centered)
    assert (optimizer.name, optimizer.states, optimizer.attributes) == (
        "centered",
        ("M",),
        {"decay": 0.5},
    )
    assert (optimizer.operator, optimizer.first_step, optimizer.learning_rate) == (None, 0, 0.01)
    x_new, m_new = optimizer.update(np.float64(0.5), np.int64(0), *np.float64([[1], [2], [4]]))
    assert (x_new.tolist(), m_new.tolist()) == ([-1.0], [4.0])


def test_a_partial_function_sets_attributes() -> None:
    optimizer = resolve(functools.partial(centered, decay=0.25))
    assert (optimizer.name, optimizer.states, optimizer.attributes) == (
        "centered",
        ("M",),
        {"decay": 0.25},
    )
    assert Custom(centered, learning_rate=2).learning_rate == 2.0


class NotAnOptimizer:
    def __init__(self, rate: float = 0.1) -> None:
        self.rate = rate


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("Adamm", r"unknown optimizer 'Adamm'; did you mean 'Adam'\?"),
        ("Rprop", "unknown optimizer 'Rprop'; did you mean 'RMSprop'"),
        (
            3,
            r"must be one of ortops.optimizers, the name of .*or an update function.*got 3",
        ),
        (None, r"optimizer must be one of ortops.optimizers,.*got None"),
        (dict, r"optimizer dict: cannot inspect its parameters; wrap it in a `def`$"),
        (NotAnOptimizer, r"optimizer NotAnOptimizer\(rate.*\).*: wrong signature"),
        (
            lambda x, g: x - g,
            r"optimizer <lambda>\(x, g\): wrong signature; .*r, t, x and g",
        ),
        (lambda *tensors: tensors, r"optimizer <lambda>\(\*tensors\): wrong signature"),
        (lambda r, t, x, g, **a: (x,), r"\*\*a\): wrong signature"),
        (
            lambda r, t, x, g, *, a: (x,),
            r"attribute 'a' has no value; give the parameter a default",
        ),
        (lambda r, t, x, g, a=1: (x,), r"parameter 'a' has a default.*putting '\*' before it"),
    ],
)
def test_what_does_not_resolve_says_why(optimizer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        resolve(optimizer)


def test_the_module_needs_numpy_only() -> None:
    """The rules can be read and run without onnx, onnx_ir or onnxruntime."""
    code = (
        "import sys\n"
        "for name in ('onnx', 'onnx_ir', 'onnxruntime'):\n"
        "    sys.modules[name] = None\n"
        "from ortops.optimizers import Adam\n"
        "assert Adam().states == ('V', 'H')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
