"""Every floating-point node case that ONNX ships, against differences in float64.

For each case, y = Σ weight · output with fixed random weights. Its gradient, run by onnxruntime in
the case's own types, is compared along random directions with central differences of onnx's
reference implementation in float64. Inputs are moved a little, because many examples sit on kinks.
"""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
from domain_models import node
from onnx import TensorProto, helper

import ortops
from ortops.autodiff import ZERO_GRADIENT

OPSET = 26
TOLERANCE = 2e-3  # of the size of the terms: float32 gradients against differences of step 1e-5
STEP = 1e-5

RANDOM = {"Bernoulli", "Dropout"}
"""Operators that draw numbers; their own tests hold the mask fixed."""

DOMAINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Acos": lambda x: 0.9 * x,
    "Acosh": lambda x: x + 0.1,
    "Asin": lambda x: 0.9 * x,
    "Atanh": lambda x: 0.9 * x,
    "LpNormalization": lambda x: np.abs(x) + 0.01,  # the reference leaves |·| out of the 1-norm
    "Pow": lambda x: np.abs(x) + 0.1,
}
"""Where moving an input a little would leave the operator's domain, or the reference's."""

ALSO = {"AffineGrid", "CastLike", "DFT", "STFT", "Trilu"}
"""Operators that ONNX does not call differentiable, and that are."""

KNOWN = {
    "test_basic_deform_conv_with_padding": "the reference computes coordinates in float32",
    "test_dynamicquantizelinear": "the reference computes the scale in float32",
    "test_dynamicquantizelinear_max_adjusted": "the reference computes the scale in float32",
    "test_dynamicquantizelinear_min_adjusted": "the reference computes the scale in float32",
    "test_scan_sum": "Scan of opset 8 is refused: onnx's version converter changes its meaning",
    "test_mvn": "the reference implementation does not take float64",
    "test_loop11": "the reference implementation does not take float64 in the body's constants",
}
"""Cases that the oracle cannot judge."""


@functools.cache
def cases() -> dict[str, list[Any]]:
    """Returns the cases with floating-point inputs and outputs, by operator."""
    from onnx.backend.test.case.node import collect_testcases  # takes seconds

    found: dict[str, dict[str, Any]] = defaultdict(dict)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # examples overflow on purpose
        collected = collect_testcases(None)
    for case in collected:
        nodes = case.model.graph.node
        if len(nodes) != 1 or nodes[0].domain or nodes[0].op_type in ZERO_GRADIENT | RANDOM:
            continue
        outputs = case.data_sets[0][1]
        if differentiated(case) and any(is_float(_array(array)) for array in outputs):
            found[nodes[0].op_type][case.name] = case
    return {op_type: list(named.values()) for op_type, named in sorted(found.items())}


def is_float(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype in (np.float32, np.float64)


def differentiated(case: Any) -> list[str]:
    """Returns the inputs of a case that its operator may be differentiated with respect to."""
    (only,) = case.model.graph.node
    (version,) = (o.version for o in case.model.opset_import if not o.domain)
    try:
        formal = list(onnx.defs.get_schema(only.op_type, min(version, OPSET)).inputs)
    except onnx.defs.SchemaError:
        return []
    never = onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
    names = [value.name for value in case.model.graph.input]
    arrays = dict(zip(names, map(_array, case.data_sets[0][0]), strict=False))
    return [
        name
        for index, name in enumerate(only.input)
        if is_float(arrays.get(name))
        and arrays[name].size
        and (
            only.op_type in ALSO
            or formal[min(index, len(formal) - 1)].differentiation_category != never
        )
    ]


def at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Returns a copy at an opset that is not newer than a given one."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.ir_version = min(result.ir_version, 10)
    for entry in result.opset_import:
        entry.version = min(entry.version, opset)
    return result


def runs(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any] | None:
    """Runs a model in stock onnxruntime; None if it cannot."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        needed = {value.name for value in session.get_inputs()}
        return session.run(None, {name: feeds[name] for name in needed})
    except Exception:  # onnxruntime's exceptions have no common class
        return None


def _array(fed: Any) -> Any:
    """Returns numpy's scalars, which some cases feed, as arrays."""
    return np.asarray(fed) if isinstance(fed, np.generic) else fed


def moved(case: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Returns the case's inputs, moved away from kinks."""
    names = [value.name for value in case.model.graph.input]
    feeds = dict(zip(names, map(_array, case.data_sets[0][0]), strict=False))
    op_type = case.model.graph.node[0].op_type
    for name in differentiated(case):
        array = feeds[name]
        if op_type in DOMAINS:
            feeds[name] = DOMAINS[op_type](array).astype(array.dtype)
        else:
            noise = 0.01 * rng.uniform(0.2, 1, array.shape) * rng.choice([-1, 1], array.shape)
            feeds[name] = (array + noise).astype(array.dtype)
    return feeds


def gradient_model(
    model: onnx.ModelProto, weights: dict[str, np.ndarray], xs: list[str]
) -> onnx.ModelProto:
    """Returns a model with the gradients of Σ weight · output as its outputs instead."""
    graph = model.graph
    for name, array in weights.items():
        graph.initializer.append(onnx.numpy_helper.from_array(array, f"weight_{name}"))
        graph.node.append(helper.make_node("Mul", [name, f"weight_{name}"], [f"product_{name}"]))
        graph.node.append(
            helper.make_node("Cast", [f"product_{name}"], [f"cast_{name}"], to=TensorProto.FLOAT)
        )
        graph.node.append(
            helper.make_node("ReduceSum", [f"cast_{name}"], [f"sum_{name}"], keepdims=0)
        )
    graph.node.append(helper.make_node("Sum", [f"sum_{name}" for name in weights], ["the_sum"]))
    graph.node.append(node("Gradient", xs, [f"d_{x}" for x in xs], xs=xs, y="the_sum"))
    model.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    del graph.output[:]
    graph.output.extend(helper.make_empty_tensor_value_info(f"d_{x}") for x in xs)
    return model


def reference(case: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns the outputs by name as a function in float64."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    evaluator = onnx.reference.ReferenceEvaluator(model)
    names = [value.name for value in model.graph.output]

    def function(feeds: dict[str, Any]) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reference implementation divides by zero
            return dict(zip(names, evaluator.run(None, feeds), strict=True))

    return function


def check(case: Any) -> str | None:
    """Checks a case; returns why it cannot be, if it cannot."""
    rng = np.random.default_rng(20)
    feeds = moved(case, rng)
    for opset in (OPSET, 21):  # onnxruntime lacks the newest version of some operators
        model = at_opset(case.model, opset)
        outputs = runs(model, feeds)
        if outputs is not None:
            break
    else:
        return "onnxruntime does not run it"
    xs = differentiated(case)
    weights = {
        value.name: rng.standard_normal(np.shape(array)).astype(array.dtype)
        for value, array in zip(case.model.graph.output, outputs, strict=True)
        if is_float(_array(array))
    }
    function = reference(case)
    exact = {
        name: array.astype(np.float64) if is_float(array) else array
        for name, array in feeds.items()
    }
    computed = function(exact)
    for value, array in zip(case.model.graph.output, outputs, strict=True):
        if value.name in weights and not np.allclose(
            computed[value.name], array, rtol=1e-3, atol=1e-4, equal_nan=True
        ):
            return "onnxruntime and the reference implementation disagree about its value"
    gradients = runs(ortops.lower(gradient_model(model, weights, xs)), feeds)
    assert gradients is not None, f"{case.name}: onnxruntime runs the operator, not its gradient"

    def weighted_sum(given: dict[str, Any]) -> float:
        found = function(given)
        return sum(
            float(np.sum(np.asarray(found[name], np.float64) * weight))
            for name, weight in weights.items()
        )

    for x, gradient in zip(xs, gradients, strict=True):
        direction = rng.standard_normal(gradient.shape)
        ahead, behind = (
            weighted_sum({**exact, x: exact[x] + sign * STEP * direction}) for sign in (1, -1)
        )
        expected = (ahead - behind) / (2 * STEP)
        terms = gradient.astype(np.float64) * direction
        scale = np.abs(terms).sum() + abs(expected) + 1e-2
        assert abs(terms.sum() - expected) <= TOLERANCE * scale, (
            f"{case.name}, {x}: {terms.sum()}, differences give {expected}"
        )
    return None


def operators() -> list[str]:
    """Returns the operators that have cases, without collecting these."""
    newest: dict[str, onnx.defs.OpSchema] = {}
    for schema in onnx.defs.get_all_schemas():
        if schema.domain == "" and schema.since_version <= OPSET and not schema.deprecated:
            newest[schema.name] = schema
    return sorted(set(newest) - ZERO_GRADIENT - RANDOM)


@pytest.mark.parametrize("op_type", operators())
def test_operator(op_type: str) -> None:
    chosen = cases().get(op_type, [])
    reasons = {}
    for case in chosen:
        if case.name in KNOWN:
            reasons[case.name] = KNOWN[case.name]
        elif reason := check(case):
            reasons[case.name] = reason
    if chosen and len(reasons) == len(chosen):
        pytest.skip(f"{op_type}: {'; '.join(sorted(set(reasons.values())))}")
    if not chosen:
        pytest.skip(f"{op_type}: ONNX has no floating-point case with one node")
