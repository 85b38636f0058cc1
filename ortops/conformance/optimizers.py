"""Cases of Adagrad, Adam and Momentum."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from ortops.conformance.case import DOMAIN, Array, Case, Citation, Run, float32, parse
from ortops.conformance.formulas import FORMULAS

_STATES = {"Adagrad": "H", "Adam": "VH", "Momentum": "V"}
_REQUIRED: dict[str, dict[str, Any]] = {
    "Adagrad": {},
    "Adam": {},
    "Momentum": {"alpha": 0.75, "beta": 0.5, "mode": "standard", "norm_coefficient": 0.0},
}

_EXACT: dict[str, dict[str, Any]] = {
    "Adagrad": {"epsilon": 2.0**-20},
    "Adam": {"alpha": 0.75, "beta": 0.5, "epsilon": 2.0**-20},
    "Momentum": {},
}
"""Attributes that float32 holds exactly, so that float64 results do not depend on its rounding."""

_WHOLE = {
    "Adagrad": "X_new = X - r * G_regularized / H_adaptive;",
    "Adam": "X_new = X - R_adjusted * V_new / H_sqrt",
    "Momentum": "X_new = X - R * V_new",
}
_REGULARIZED = {
    "Adagrad": "G_regularized = norm_coefficient * X + G;",
    "Adam": "G_regularized = norm_coefficient * X + G",
    "Momentum": "G_regularized = norm_coefficient * X + G",
}
_SEVERAL = {
    "Adagrad": 'we can view "X" as a concatenation of "X_1" and "X_2"',
    "Adam": "If there are multiple inputs to be optimized, the pseudo code will be applied "
    "independently to each of them.",
    "Momentum": 'we can view "X" as a concatenation of "X_1" and "X_2"',
}
_FLOATS = {
    "Adagrad": "Constrain input and output types to float tensors.",
    "Adam": "Constrain input and output types to float tensors.",
    "Momentum": "Constrain input types to float tensors.",
}
_BIAS = "R_adjusted = T > 0 ? R * Sqrt(1 - beta**T) / (1 - alpha**T) : R"
_BETA = "beta_adjusted = T > 0 ? beta : 1"
_NESTEROV = "X_new = X - R * (G_regularized + alpha * V_new)"
_DECAY = "r = R / (1 + T * decay_factor);"

_PRECISION = (
    "The specification does not say in which type a coefficient is computed if R and X have "
    "different types. The case assumes that results have the type of X and are as exact as it is."
)
_SUBNORMAL = (
    "The specification does not say whether subnormal numbers may be taken for 0. The case assumes "
    "that they may not, as IEEE 754 has it."
)


def _tensors(
    op_type: str, shapes: Sequence[tuple[int, ...]], dtype: npt.DTypeLike, scale: float
) -> list[list[Array]]:
    """Returns for each tensor X, G and states, of fixed random numbers."""
    rng = np.random.default_rng(len(op_type))
    groups = []
    for shape in shapes:
        x, g, *states = (rng.uniform(-1, 1, shape) for _ in "XG" + _STATES[op_type])
        if _STATES[op_type].endswith("H"):
            states[-1] = states[-1] ** 2
        groups.append([np.asarray(a * scale, dtype) for a in (x, g, *states)])
    return groups


def float32_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the values that attributes have in a file, where they are float32."""
    return {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in attributes.items()
    }


def expected(op_type: str, r: Array, t: int, group: list[Array], **attributes: Any) -> list[Array]:
    """Returns what the node returns, computed in float64, in the type of X."""
    formula = FORMULAS[op_type]
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(formula).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    exact = [a.astype(np.float64) for a in group]
    values = float32_attributes({**defaults, **attributes})
    with np.errstate(under="ignore"):
        results = formula(float(r), t, *exact, **values)
        return [np.asarray(result).astype(group[0].dtype) for result in results]


def _case(
    name: str,
    op_type: str,
    *texts: str,
    t: int = 3,
    rate: float = 0.1,
    rate_dtype: npt.DTypeLike = np.float32,
    dtype: npt.DTypeLike = np.float32,
    shapes: Sequence[tuple[int, ...]] = ((2, 3),),
    scale: float = 1.0,
    groups: list[list[Array]] | None = None,
    declared: Sequence[int | str] | None = None,
    attributes: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """Returns the case of one node: ``R, T, X…, G…, states…`` to ``X_new…, states_new…``."""
    written = {**_REQUIRED[op_type], **(attributes or {})}
    groups = groups or _tensors(op_type, shapes, dtype, scale)
    letters = ["X", "G", *_STATES[op_type]]
    suffixes = [f"_{i + 1}" for i in range(len(groups))] if len(groups) > 1 else [""]
    kept = [0, *range(2, len(letters))]  # all but the gradients
    names = [letter + suffix for letter in letters for suffix in suffixes]
    results = [f"{letters[k]}{suffix}_new" for k in kept for suffix in suffixes]
    r = np.asarray(rate, rate_dtype)
    inputs = {"R": r, "T": np.asarray(t, np.int64)}
    inputs |= {name: groups[i % len(groups)][i // len(groups)] for i, name in enumerate(names)}
    returned = [expected(op_type, r, t, group, **written) for group in groups]
    outputs = {name: returned[i % len(groups)][i // len(groups)] for i, name in enumerate(results)}
    node = helper.make_node(op_type, list(inputs), results, "update", domain=DOMAIN, **written)

    def value(name: str, array: Array) -> onnx.ValueInfoProto:
        shape = declared if declared is not None and array.ndim else array.shape
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(array.dtype), shape
        )

    graph = helper.make_graph(
        [node],
        "update",
        [value(name, array) for name, array in inputs.items()],
        [value(name, array) for name, array in outputs.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    if np.dtype(dtype) == np.float64 and np.dtype(rate_dtype) == np.float64:
        options.setdefault("rtol", 1e-12)
        options.setdefault("atol", 1e-14)
    elif op_type == "Adam":  # 1 - beta is small, and beta is rounded
        options.setdefault("rtol", 1e-4)
    cites = [Citation(op_type, text) for text in texts]  # type: ignore[arg-type]
    return Case(f"test_{name}", model, cites, [Run(inputs, outputs)], **options)


def _of_each(op_type: str) -> Iterator[Case]:
    """Yields the cases that all three operators have in common."""
    name = op_type.lower()
    whole, floats = _WHOLE[op_type], _FLOATS[op_type]
    double: dict[str, Any] = {"dtype": np.float64, "rate_dtype": np.float64}
    double["attributes"] = _EXACT[op_type]
    yield _case(f"{name}_first_update", op_type, whole, t=0)
    yield _case(f"{name}_second_update", op_type, whole, t=1)
    yield _case(f"{name}_many_updates", op_type, whole, t=100_000)
    yield _case(f"{name}_float64", op_type, floats, **double)
    yield _case(f"{name}_float64_several", op_type, floats, shapes=[(4,), (2, 2)], **double)
    yield _case(f"{name}_rate_float64", op_type, floats, rate_dtype=np.float64, proposal=_PRECISION)
    yield _case(
        f"{name}_rate_float32",
        op_type,
        floats,
        dtype=np.float64,
        attributes=_EXACT[op_type],
        proposal=_PRECISION,
        rtol=1e-12,
        atol=1e-14,
    )
    yield _case(
        f"{name}_norm_coefficient",
        op_type,
        _REGULARIZED[op_type],
        attributes={"norm_coefficient": 0.25},
    )
    several = _SEVERAL[op_type]
    yield _case(f"{name}_two_tensors", op_type, several, shapes=[(2, 3), (4,)], t=2)
    yield _case(f"{name}_five_tensors", op_type, several, shapes=[(1,), (2,), (3,), (2, 2), (5,)])
    yield _case(f"{name}_scalar", op_type, whole, shapes=[()])
    yield _case(f"{name}_empty", op_type, several, shapes=[(0, 3), (2,)])
    yield _case(f"{name}_dynamic_shape", op_type, whole, declared=["rows", "columns"])
    yield _case(f"{name}_zero_rate", op_type, whole, rate=0.0)
    yield _case(f"{name}_large", op_type, whole, scale=1e15)
    yield from _exact_attributes(op_type)
    yield from _subnormal(op_type)


def _exact_attributes(op_type: str) -> Iterator[Case]:
    """Yields a case in which the attributes' value in float32 shows."""
    attributes: dict[str, Any] = {
        "Adagrad": {"decay_factor": 0.1, "epsilon": 0.3, "norm_coefficient": 0.7},
        "Adam": {"alpha": 0.123456789, "beta": 0.7, "epsilon": 0.3},
        "Momentum": {"alpha": 0.123456789, "beta": 0.7, "norm_coefficient": 0.1},
    }[op_type]
    wide = {"dtype": np.float64, "rate_dtype": np.float64}
    text = {
        "Adagrad": "A L2-norm regularization coefficient",
        "Adam": "Other parameters are given as attributes because they are constants.",
        "Momentum": "A decay coefficient of previous accumulated gradient",
    }[op_type]
    proposal = (
        "Attributes are float32 in the file, and the specification does not say whether 0.1 then "
        "means 0.100000001490116 or 0.1 where X is float64. The case assumes the former."
    )
    name = f"{op_type.lower()}_exact_attributes"
    yield _case(name, op_type, text, attributes=attributes, proposal=proposal, **wide)  # type: ignore[arg-type]


def _subnormal(op_type: str) -> Iterator[Case]:
    """Yields a case of the smallest numbers, which an update by 0 keeps."""
    x = float32([1e-40, -1e-45, 1.5e-38, 0])
    zero = np.zeros(4, np.float32)
    groups = [[x, zero, *(zero for _ in _STATES[op_type])]]
    if op_type == "Momentum":  # which is linear
        groups = [[x, float32([2e-39, 0, 1e-38, 0]), float32([4e-40, 0, 0, 1e-44])]]
    name = f"{op_type.lower()}_subnormal"
    text = _WHOLE[op_type]
    # two units in the last place
    tiny = 3e-45
    yield _case(name, op_type, text, groups=groups, rate=0.5, proposal=_SUBNORMAL, atol=tiny)


def _of_adagrad() -> Iterator[Case]:
    for t in (0, 1, 7):
        attributes = {"decay_factor": 0.5}
        yield _case(f"adagrad_decay_{t}", "Adagrad", _DECAY, attributes=attributes, t=t)
    text = "H_adaptive = Sqrt(H_new) + epsilon"
    yield _case("adagrad_epsilon", "Adagrad", text, attributes={"epsilon": 0.5})
    zero = np.zeros(3, np.float32)
    groups = [[float32([1, -2, 3]), zero, zero]]
    yield _case("adagrad_zero_gradient", "Adagrad", text, groups=groups)
    everything = {"decay_factor": 0.25, "epsilon": 0.01, "norm_coefficient": 0.5}
    shapes = [(3,), (2, 2)]
    texts = (_DECAY, _SEVERAL["Adagrad"])
    yield _case("adagrad_everything", "Adagrad", *texts, attributes=everything, shapes=shapes)


def _of_adam() -> Iterator[Case]:
    # Gradients and state that make X_new all update: what is wrong in it is not hidden by X.
    x = np.zeros(3, np.float32)
    groups = [[x, float32([1, -2, 0.5]), float32([0.5, 1, -1]), float32([4, 1, 0.25])]]
    for t in (0, 1, 2, 10):
        name = f"adam_bias_corrections_{t}"
        yield _case(name, "Adam", _BIAS, t=t, groups=groups, rtol=1e-4)
    options: dict[str, Any] = {"t": 2, "groups": groups}
    text = "V_new = alpha * V + (1 - alpha) * G_regularized"
    yield _case("adam_alpha", "Adam", text, attributes={"alpha": 0.25}, **options)
    text = "H_new = beta * H + (1 - beta) * G_regularized * G_regularized"
    yield _case("adam_beta", "Adam", text, attributes={"beta": 0.25}, **options)
    text = "H_sqrt = Sqrt(H_new) + epsilon"
    name = "adam_epsilon_before_correction"
    yield _case(name, "Adam", text, _BIAS, attributes={"epsilon": 1.0}, rtol=1e-4, **options)
    text = "X_final = (1 - norm_coefficient_post) * X_new"
    post = {"norm_coefficient_post": 0.25}
    yield _case("adam_norm_coefficient_post", "Adam", text, attributes=post)
    post["norm_coefficient"] = 0.5
    several: dict[str, Any] = {"attributes": post, "shapes": [(2,), (3, 1)]}
    yield _case("adam_both_coefficients", "Adam", text, **several)
    zero = [[float32([1, -2, 3]), *(np.zeros(3, np.float32) for _ in range(3))]]
    text = 'A small constant "epsilon" to avoid dividing-by-zero.'
    yield _case("adam_zero_gradient", "Adam", text, groups=zero)


def _of_momentum() -> Iterator[Case]:
    for t in (0, 1, 5):
        yield _case(f"momentum_beta_{t}", "Momentum", _BETA, t=t)
    for t in (0, 3):
        attributes: dict[str, Any] = {"mode": "nesterov", "norm_coefficient": 0.5}
        name = f"momentum_nesterov_{t}"
        yield _case(name, "Momentum", _NESTEROV, attributes=attributes, t=t)
    shapes = [(2,), (2, 3)]
    options: dict[str, Any] = {"attributes": {"mode": "nesterov"}, "shapes": shapes}
    texts = (_NESTEROV, _SEVERAL["Momentum"])
    yield _case("momentum_nesterov_two_tensors", "Momentum", *texts, **options)
    options |= {"dtype": np.float64, "rate_dtype": np.float64}
    yield _case("momentum_nesterov_float64", "Momentum", _NESTEROV, **options)


def _in_graphs() -> Iterator[Case]:
    """Yields cases in which optimizers stand among other nodes."""
    x, g, v = float32([1, 2]), float32([0.5, -1]), float32([0, 0.25])
    r = float32(0.5)
    attributes = {"alpha": 0.5, "beta": 1.0, "mode": "standard", "norm_coefficient": 0.0}
    text = '<alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0>'
    twice = parse(
        "twice (float R, float[2] X, float[2] G, float[2] V) => (float[2] X_2, float[2] V_2)"
        "<int64 zero = {0}, int64 one = {1}> {"
        f"  X_1, V_1 = Momentum {text} (R, zero, X, G, V)"
        f"  X_2, V_2 = Momentum {text} (R, one, X_1, G, V_1)"
        "}"
    )
    first = expected("Momentum", r, 0, [x, g, v], **attributes)
    second = expected("Momentum", r, 1, [first[0], g, first[1]], **attributes)
    inputs = {"R": r, "X": x, "G": g, "V": v}
    cites = [Citation("Momentum", _WHOLE["Momentum"])]
    run = Run(inputs, {"X_2": second[0], "V_2": second[1]})
    yield Case("test_momentum_twice", twice, cites, [run])

    branches = parse(
        "branches (bool c, float R, float[2] X, float[2] G, float[2] V) => (float[2] Y)"
        "<int64 zero = {0}> { Y = If (c) <"
        "  then_branch = update () => (float[2] a) {"
        f"   a, b = Momentum {text} (R, zero, X, G, V) }},"
        "  else_branch = none () => (float[2] d) { d = Identity (X) }>"
        "}"
    )
    runs = [Run({"c": np.asarray(True), **inputs}, {"Y": first[0]})]
    runs.append(Run({"c": np.asarray(False), **inputs}, {"Y": x}))
    yield Case("test_momentum_in_branch", branches, cites, runs)

    function = parse(
        "model (float R, int64 T, float[2] X, float[2] G, float[2] V, float[2] H)"
        " => (float[2] Y) { Y = local.update <rate = 0.25> (R, T, X, G, V, H) }"
        '<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>'
        "update <rate> (R, T, X, G, V, H) => (Y) {"
        "  Y, V_new, H_new = Adam <alpha: float = @rate> (R, T, X, G, V, H)"
        "}"
    )
    h = float32([1, 0.5])
    wanted = expected("Adam", r, 2, [x, g, v, h], alpha=0.25)
    inputs = {"R": r, "T": np.asarray(2, np.int64), "X": x, "G": g, "V": v, "H": h}
    cites = [Citation("Adam", _WHOLE["Adam"])]
    run = Run(inputs, {"Y": wanted[0]})
    yield Case("test_adam_in_function", function, cites, [run], rtol=1e-4)


def cases() -> Iterator[Case]:
    """Yields the cases of the optimizers."""
    for op_type in FORMULAS:
        yield from _of_each(op_type)
    yield from _of_adagrad()
    yield from _of_adam()
    yield from _of_momentum()
    yield from _in_graphs()
