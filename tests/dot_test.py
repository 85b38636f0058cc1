"""The random-direction test of a gradient rule.

For a scalar function F and random directions v, a right gradient satisfies

    ⟨∇F(x), v⟩ = (F(x + εv) − F(x − εv)) / 2ε

F is the weighted sum of an operator's outputs. It is run by onnxruntime, or by onnx's reference
implementation where onnxruntime has no kernel for float64, so nothing of the rule is in the oracle.
For order 2, F is the weighted sum of the gradient, which order 1 has checked so; and so on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx.reference
from checked import nodes_within, without_gradient
from onnx import helper
from running import plain_session, run, run_session

import ortops

DOMAIN = "ai.onnx.preview.training"
SEED = 20


@dataclass(frozen=True)
class Case:
    """One operator with inputs and attributes.

    Attributes:
        op: The operator.
        inputs: Its inputs; None where one is absent. Floating-point ones are differentiated.
        attributes: Its attributes.
        constant: Indices of inputs that are initializers of the model and not differentiated.
        outputs: How many outputs the node has.
        orders: Up to which order derivatives are checked.
        domain: The operator's domain.
        opset: The model's opset.
        epsilon: The step; 1 is exact for a function that is linear along every direction tried.
        rtol: Tolerance relative to the size of the directional derivative's terms.
        only: The indices of the differentiated inputs; every floating-point one by default.
        reference: Whether F is run by onnx's reference implementation.
        float32: Whether onnxruntime has no float64 kernel for the operator, or for its gradient.
            Then onnx's reference implementation runs F and the gradient in float64, and
            onnxruntime's gradient in float32 is compared with that.
        name: What tells the case from others of the operator.
        quick: Whether the quick suite has it; see `checked.quick`.
    """

    op: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constant: Sequence[int] = ()
    outputs: int = 1
    orders: int = 1
    domain: str = ""
    opset: int = 21
    epsilon: float = 1e-5
    rtol: float = 1e-6
    only: Sequence[int] | None = None
    reference: bool = False
    float32: bool = False
    name: str = ""
    quick: bool = True

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, a.shape)) for a in self.inputs if a is not None)
        return "-".join(filter(None, (self.op, self.name, shapes)))

    @property
    def differentiated(self) -> list[int]:
        """The indices of the inputs whose gradient is checked."""
        if self.only is not None:
            return list(self.only)
        return [
            index
            for index, array in enumerate(self.inputs)
            if array is not None and array.dtype.kind == "f" and index not in self.constant
        ]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    """Returns standard normal numbers."""
    return np.random.default_rng((SEED, seed)).standard_normal(shape).astype(dtype)


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> np.ndarray:
    """Returns uniform numbers."""
    return np.random.default_rng((SEED, seed)).uniform(low, high, shape)


def distinct(*shape: int, seed: int = 0, gap: float = 0.1) -> np.ndarray:
    """Returns numbers in random order that keep a distance, for maxima and sorting."""
    count = int(np.prod(shape))
    order = np.random.default_rng((SEED, seed)).permutation(count)
    return ((order - count / 2 + 0.37) * gap).reshape(shape)


def away_from(points: Sequence[float], *shape: int, seed: int = 0, gap: float = 0.05) -> np.ndarray:
    """Returns normal numbers that keep a distance from the kinks of a function."""
    array = 2 * normal(*shape, seed=seed)
    for point in points:
        near = np.abs(array - point) < gap
        array = np.where(near, point + np.where(array < point, -2 * gap, 2 * gap), array)
    return array


def check(case: Case, *, symbolic: bool) -> None:
    """Checks the rule of a case.

    All orders are lowered, and run, as one model; the operator alone is the oracle of the first.

    Args:
        case: The case.
        symbolic: Whether the dimensions of all inputs are symbols, each its own.
    """
    rng = np.random.default_rng((SEED, len(case.op)))
    narrow = _narrow(case, symbolic, copy.deepcopy(rng)) if case.float32 else None
    if case.float32:
        case = replace(case, reference=True)
    model, feeds = _forward(case, symbolic, rng)
    names = [f"x{index}" for index in case.differentiated]
    assert names, f"{case}: nothing to differentiate"
    first = _evaluator(case, model, "f1")
    directions: list[dict[str, list[np.ndarray]]] = []
    for order in range(1, case.orders + 1):
        model = with_gradient(model, names, f"f{order}", f"d{order}_")
        if narrow is not None:
            narrow = with_gradient(narrow[0], names, f"f{order}", f"d{order}_"), narrow[1]
        directions.append(
            {
                name: [
                    rng.standard_normal(feeds[name].shape).astype(feeds[name].dtype)
                    for _ in range(2)
                ]
                for name in names
            }
        )
        if order < case.orders:
            if narrow is not None:
                narrow = _next_order(*narrow, names, order, copy.deepcopy(rng))
            model, feeds = _next_order(model, feeds, names, order, rng)
    found, lowered = _results(model, feeds, names, case, by_reference=case.float32)
    for order, along in enumerate(directions, 1):
        evaluate = first if order == 1 else _evaluator(case, lowered, f"f{order}")
        for name in names:
            assert found[f"d{order}_{name}"].shape == feeds[name].shape
            assert found[f"d{order}_{name}"].dtype == feeds[name].dtype
            _check_direction(
                case, order, name, found[f"d{order}_{name}"], feeds, evaluate, along[name]
            )
    if narrow is not None:
        for key, result in _results(*narrow, names, case, by_reference=False)[0].items():
            wide = found[key]
            assert result.dtype == np.float32
            np.testing.assert_allclose(
                result, wide, rtol=1e-4, atol=1e-5 * np.abs(wide).max(initial=1)
            )


def differences_of_levels(case: Case, *, symbolic: bool) -> list[str]:
    """Returns what onnxruntime computes differently once it has optimized the graph, in float32.

    Args:
        case: The case, with the derivatives of all its orders.
        symbolic: As for `check`.
    """
    rng = np.random.default_rng((SEED, len(case.op)))
    model, feeds = _narrow(case, symbolic, rng)
    names = [f"x{index}" for index in case.differentiated]
    for order in range(1, case.orders + 1):
        model = with_gradient(model, names, f"f{order}", f"d{order}_")
        if order < case.orders:
            model, feeds = _next_order(model, feeds, names, order, rng)
    shown = [f"d{order}_{name}" for order in range(1, case.orders + 1) for name in names]
    del model.graph.output[:]
    model.graph.output.extend(map(helper.make_empty_tensor_value_info, shown))
    model = ortops.lower(model)
    plain = run(model, feeds, optimize=False)
    return [
        f"{name}: {np.abs(one - other).max()} of {np.abs(one).max()}"
        for name, one, other in zip(shown, plain, run(model, feeds), strict=True)
        if not np.allclose(one, other, rtol=1e-3, atol=1e-4 * (1 + np.abs(one).max(initial=0)))
    ]


def _results(
    model: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    names: Sequence[str],
    case: Case,
    *,
    by_reference: bool,
) -> tuple[dict[str, np.ndarray], onnx.ModelProto]:
    """Returns the derivatives of all orders by name, and the model that gave them."""
    shown = [f"d{order}_{name}" for order in range(1, case.orders + 1) for name in names]
    sums = [f"f{order}" for order in range(2, case.orders + 1)]
    del model.graph.output[:]
    model.graph.output.extend(map(helper.make_empty_tensor_value_info, [*shown, *sums]))
    lowered = ortops.lower(model)
    assert not without_gradient(lowered), "of the next order"
    results = _run_reference(lowered, feeds) if by_reference else run(lowered, feeds)
    return dict(zip(shown, results, strict=False)), lowered


def _check_direction(
    case: Case,
    order: int,
    name: str,
    gradient: np.ndarray,
    feeds: dict[str, np.ndarray],
    evaluate: Callable[[dict[str, np.ndarray]], float],
    directions: Sequence[np.ndarray],
) -> None:
    assert np.all(np.isfinite(gradient)), f"order {order}, {name}: {gradient}"
    for v in directions:
        step = feeds[name].dtype.type(case.epsilon) * v
        ahead = evaluate({**feeds, name: np.asarray(feeds[name] + step)})
        behind = evaluate({**feeds, name: np.asarray(feeds[name] - step)})
        expected = (ahead - behind) / (2 * case.epsilon)
        terms = gradient.astype(np.float64) * v
        scale = np.abs(terms).sum() + abs(expected) + 1e-3
        assert abs(terms.sum() - expected) <= case.rtol * scale, (
            f"{case}, order {order}, {name}: ⟨∇F, v⟩ = {terms.sum()}, differences give {expected}"
        )


def _forward(
    case: Case, symbolic: bool, rng: np.random.Generator
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns a model of F = Σ wᵢ · outputᵢ and its feeds."""
    feeds: dict[str, np.ndarray] = {}
    initializers, inputs, names = [], [], []
    for index, array in enumerate(case.inputs):
        if array is None:
            names.append("")
            continue
        name = f"x{index}"
        names.append(name)
        if index in case.constant:
            initializers.append(onnx.numpy_helper.from_array(array, name))
        else:
            feeds[name] = array
            dims = [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, dims))
    outputs = [f"y{index}" for index in range(case.outputs)]
    node = helper.make_node(
        case.op, names, outputs, name="under_test", domain=case.domain, **case.attributes
    )
    nodes = [node]
    probe = _model(case, nodes, inputs, [helper.make_empty_tensor_value_info(n) for n in outputs])
    probe.graph.initializer.extend(initializers)
    values = _evaluate_outputs(case, probe, feeds)
    terms = []
    for name, value in zip(outputs, values, strict=True):
        if value.dtype.kind != "f":
            continue
        weights = rng.standard_normal(value.shape).astype(value.dtype)
        feeds[f"w_{name}"] = weights
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        dims = [f"w_{name}_{axis}" for axis in range(value.ndim)] if symbolic else value.shape
        inputs.append(helper.make_tensor_value_info(f"w_{name}", kind, dims))
        nodes.append(helper.make_node("Mul", [name, f"w_{name}"], [f"weighted_{name}"]))
        nodes.append(helper.make_node("ReduceSum", [f"weighted_{name}"], [f"s_{name}"], keepdims=0))
        terms.append(f"s_{name}")
    total = terms[0]
    for position, term in enumerate(terms[1:]):
        nodes.append(helper.make_node("Add", [total, term], [f"partial{position}"]))
        total = f"partial{position}"
    nodes.append(helper.make_node("Identity", [total], ["f1"]))
    model = _model(case, nodes, inputs, [helper.make_empty_tensor_value_info("f1")])
    model.graph.initializer.extend(initializers)
    return model, feeds


def _narrow(
    case: Case, symbolic: bool, rng: np.random.Generator
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns the model of F in float32 and its feeds."""
    inputs = [
        array.astype(np.float32) if array is not None and array.dtype == np.float64 else array
        for array in case.inputs
    ]
    return _forward(replace(case, inputs=inputs), symbolic, rng)


def _model(
    case: Case,
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", case.opset), helper.make_opsetid(DOMAIN, 1)]
    if case.domain:
        imports.append(helper.make_opsetid(case.domain, 1))
    graph = helper.make_graph(nodes, "case", inputs, outputs)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def with_gradient(
    model: onnx.ModelProto, names: Sequence[str], y: str, prefix: str
) -> onnx.ModelProto:
    """Returns the model with the gradient of y with respect to the names as its outputs."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    made = [f"{prefix}{name}" for name in names]
    node = helper.make_node(
        "Gradient", names, made, name=f"gradient_of_{y}", domain=DOMAIN, xs=list(names), y=y
    )
    result.graph.node.append(node)
    del result.graph.output[:]
    result.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in made)
    return result


def _next_order(
    gradient: onnx.ModelProto,
    feeds: dict[str, np.ndarray],
    names: Sequence[str],
    order: int,
    rng: np.random.Generator,
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Returns a model of F = Σ uᵢ · ∂F_previous/∂xᵢ and its feeds."""
    model = onnx.ModelProto()
    model.CopyFrom(gradient)
    feeds = dict(feeds)
    total = ""
    for name in names:
        key, derivative = f"u{order}_{name}", f"d{order}_{name}"
        feeds[key] = rng.standard_normal(feeds[name].shape).astype(feeds[name].dtype)
        shown = next(value for value in model.graph.input if value.name == name)
        value = onnx.ValueInfoProto()
        value.CopyFrom(shown)
        value.name = key
        model.graph.input.append(value)
        model.graph.node.append(helper.make_node("Mul", [derivative, key], [f"{key}_product"]))
        model.graph.node.append(
            helper.make_node("ReduceSum", [f"{key}_product"], [f"{key}_sum"], keepdims=0)
        )
        if total:
            model.graph.node.append(
                helper.make_node("Add", [total, f"{key}_sum"], [f"{key}_total"])
            )
            total = f"{key}_total"
        else:
            total = f"{key}_sum"
    model.graph.node.append(helper.make_node("Identity", [total], [f"f{order + 1}"]))
    del model.graph.output[:]
    model.graph.output.append(helper.make_empty_tensor_value_info(f"f{order + 1}"))
    return model, feeds


def _run_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    known = {value.name for value in model.graph.input}
    wanted = {name: array for name, array in feeds.items() if name in known}
    return list(onnx.reference.ReferenceEvaluator(model).run(None, wanted))


def _evaluate_outputs(
    case: Case, model: onnx.ModelProto, feeds: dict[str, np.ndarray]
) -> list[np.ndarray]:
    if not case.reference:
        return run(model, feeds)
    return _run_reference(model, feeds)


def _evaluator(
    case: Case, model: onnx.ModelProto, output: str
) -> Callable[[dict[str, np.ndarray]], float]:
    """Returns the function that F is."""
    if case.reference:
        model = _only(model, output)
        reference = onnx.reference.ReferenceEvaluator(model)
        inputs = [value.name for value in model.graph.input]
        return lambda feeds: float(reference.run([output], {n: feeds[n] for n in inputs})[0])
    session = plain_session(_only(model, output))
    return lambda feeds: float(run_session(session, feeds, [output])[0])


def _only(model: onnx.ModelProto, output: str) -> onnx.ModelProto:
    """Returns a model with the nodes that one output needs."""
    wanted, kept = {output}, []
    for node in reversed(model.graph.node):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted.update(name for each in nodes_within([node]) for name in each.input)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(reversed(kept))
    del result.graph.output[:]
    result.graph.output.append(helper.make_empty_tensor_value_info(output))
    return result


def lowered(case: Case, *, symbolic: bool) -> onnx.ModelProto:
    """Returns the lowered model of the gradient of a case, for tests of what is emitted."""
    model, _ = _forward(case, symbolic, np.random.default_rng(SEED))
    names = [f"x{index}" for index in case.differentiated]
    return ortops.lower(with_gradient(model, names, "f1", "d1_"))
