"""ortops.reference: an oracle that shares no code with the rules of gradients."""

from __future__ import annotations

import ast
import importlib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import domain_models
import dot_test
import numpy as np
import onnx
import pytest
from running import run

import ortops
from ortops.reference import OPS, Evaluator, TrainingEvaluator

DOMAIN = "ai.onnx.preview.training"
HEADER = f'<ir_version: 10, opset_import: ["": 21, "{DOMAIN}": 1]>'


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f"{HEADER}\n{text}".replace("= Gradient", f"= {DOMAIN}.Gradient")
    )


# ----------------------------------------------------------------- the tables of the rules' tests

NEW = pytest.mark.needs("onnx>=1.23")
"""ReferenceEvaluator and the functions of operators have changed."""

TABLES = ("attention", "elementwise", "indexing", "linalg", "loss", "normalization")
MORE_TABLES = ("reduce", "shape")
DIFFERENT = {
    "masked-row": "in ONNX's function, the Softmax of a masked row is NaN",
    "nonpad": "the same",
    "no_elements": "ReferenceEvaluator does not take it",
    "scalar-keep": "ReferenceEvaluator does not take it",
    "short": "ReferenceEvaluator does not take it",
    "Flatten-0x3": "ReferenceEvaluator does not take it",
    "GatherElements": "ReferenceEvaluator takes no smaller indices",
    "MeanVarianceNormalization": "its function computes in float32",
    "LayerNormalization": "the same",
    "Pad-": "ReferenceEvaluator takes no negative pads",
    "Attention-rank-3-grouped": "its scale is float32 in the function",
}
"""Parts of the names of cases in which the two differ, and why."""


def table(name: str) -> list[dot_test.Case]:
    found = importlib.import_module(f"test_rules_{name}").CASES
    return [
        case
        for case in found
        if isinstance(case, dot_test.Case) and not any(part in str(case) for part in DIFFERENT)
    ]


def compare(case: dot_test.Case) -> int:
    """Compares ortops' gradients with the reference's; returns up to which order."""
    rng = np.random.default_rng((dot_test.SEED, len(case.op)))
    wide = replace(case, reference=True) if case.float32 else case
    model, feeds = dot_test._forward(wide, False, rng)
    names = [f"x{index}" for index in case.differentiated]
    for order in range(1, min(2, case.orders) + 1):
        gradient = dot_test.with_gradient(model, names, f"f{order}", f"d{order}_")
        known = {value.name for value in gradient.graph.input}
        given = {name: array for name, array in feeds.items() if name in known}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                wanted = Evaluator(gradient).run(None, given)
        except NotImplementedError:
            return order - 1
        lowered = ortops.lower(gradient)
        found = dot_test._run_reference(lowered, feeds) if case.float32 else run(lowered, feeds)
        for name, one, two in zip(names, found, wanted, strict=True):
            assert one.dtype == two.dtype, f"{case}: {name}"
            scale = max(1.0, float(np.abs(two).max(initial=0)))
            message = f"{case}, order {order}: {name}"
            np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-8 * scale, err_msg=message)
        if order < case.orders:
            model, feeds = dot_test._next_order(gradient, feeds, names, order, rng)
    return min(2, case.orders)


@pytest.mark.quick(1)
@NEW
@pytest.mark.parametrize("name", TABLES)
def test_rules_agree_with_the_reference(name: str) -> None:
    """One case of each operator, static or not; the slow test has all."""
    chosen = {case.op: case for case in table(name)}
    orders = {op: compare(case) for op, case in chosen.items()}
    assert any(orders.values())
    required = {"elementwise": {"Add", "Pow", "Erf", "Tanh", "Where"}, "linalg": {"Gemm", "MatMul"}}
    assert all(orders[op] >= 1 for op in required.get(name, ()))


@pytest.mark.nightly(1)
@NEW
@pytest.mark.slow
@pytest.mark.parametrize("name", [*TABLES, *MORE_TABLES])
def test_all_rules_agree_with_the_reference(name: str) -> None:
    for case in table(name):
        compare(case)


@pytest.mark.parametrize(("group", "dilations"), [(1, [1, 2]), (2, [1, 1])])
def test_convolutions_agree_with_the_reference(group: int, dilations: list[int]) -> None:
    """The reference in float64, onnxruntime in float32: it has no other Conv."""
    attributes = f"group = {group}, pads = [1, 0, 2, 1], strides = [2, 1], dilations = {dilations}"
    kernel = f"6, {4 // group}, 3, 2"
    text = (
        f"g (double[2, 4, 5, 6] x, double[{kernel}] w, double[6] b, double[n, m, h, l] s)"
        f" => (double[2, 4, 5, 6] dx, double[{kernel}] dw, double[6] db) {{"
        f"c = Conv <{attributes}> (x, w, b)"
        " p = Mul (c, s) q = Mul (p, c) y = ReduceSum <keepdims = 0> (q)"
        ' dx, dw, db = Gradient <xs = ["x", "w", "b"], zs = ["s"], y = "y"> (x, w, b, s) }'
    )
    rng = np.random.default_rng(2)
    shapes = {"x": (2, 4, 5, 6), "w": (6, 4 // group, 3, 2), "b": (6,)}
    shapes["s"] = (2, 6, 3, 7 - dilations[1])
    feeds = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    wanted = Evaluator(parse(text)).run(None, feeds)
    narrow = {name: array.astype(np.float32) for name, array in feeds.items()}
    found = run(ortops.lower(parse(text.replace("double", "float"))), narrow)
    for one, two in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------ the operators


def test_operators_that_are_not_known_are_named() -> None:
    model = parse(
        "g (float[3] x) => (float[3] g) { y = CumSum (x, a)"
        ' a = Constant <value = int64 {0}> () g = Gradient <xs = ["x"], y = "y"> (x) }'
    )
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([nodes[1], nodes[0], nodes[2]])
    with pytest.raises(NotImplementedError, match="CumSum node 'y': the reference has no deriv"):
        Evaluator(model).run(None, {"x": np.ones(3, np.float32)})


def test_a_gradient_needs_a_graph() -> None:
    node = onnx.helper.make_node("Gradient", ["x"], ["g"], domain=DOMAIN, xs=["x"], y="x")
    params = {"log": print, "opsets": {DOMAIN: 1}, "new_ops": None, "verbose": 0}
    [gradient] = [op for op in OPS if op.__name__ == "Gradient"]
    made: Any = gradient(node, params)
    with pytest.raises(RuntimeError, match="in a ReferenceEvaluator only"):
        made.run(np.float32([1]), context={"x": np.float32([1])})


@pytest.mark.parametrize(
    ("attributes", "inputs", "message"),
    [
        ({"xs": [], "y": "y"}, ["x"], "xs is empty"),
        ({"xs": ["x", "x"], "y": "y"}, ["x", "x"], "xs and zs name a tensor twice"),
        ({"xs": ["x"], "y": "no"}, ["x"], "there is no tensor 'no' before the node"),
        ({"xs": ["x"], "zs": ["h"], "y": "y"}, ["x", "h"], "'h' is computed from others of them"),
        ({"xs": ["x"], "y": "y"}, ["x", "h"], "Gradient has 2 inputs, but xs and zs 1 names"),
        ({"xs": ["x"], "y": "y"}, ["s"], "the input for 'x' has another type or rank"),
    ],
)
def test_gradients_that_are_refused(
    attributes: dict[str, Any], inputs: list[str], message: str
) -> None:
    nodes = [
        onnx.helper.make_node("Exp", ["x"], ["h"]),
        onnx.helper.make_node("Mul", ["x", "h"], ["y"]),
        onnx.helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        domain_models.node("Gradient", inputs, ["g"], **{k: v for k, v in attributes.items() if v}),
    ]
    values = [domain_models.value("x", [2])]
    if not attributes["xs"]:  # which make_node leaves out
        empty = onnx.AttributeProto(name="xs", type=onnx.AttributeProto.STRINGS)
        nodes[-1].attribute.append(empty)
    model = domain_models.model(nodes, values, ["g"])
    with pytest.raises(ValueError, match=message):
        Evaluator(model).run(None, {"x": np.float32([1, 2])})


def test_training_without_entries_does_nothing() -> None:
    model = parse("i (float[1] x) => (float[1] y) <float[1] w = {2.0}> { y = Mul (x, w) }")
    evaluator = TrainingEvaluator(model.SerializeToString())
    assert evaluator.step({"x": np.float32([3])}) == {}
    evaluator.initialize()
    assert evaluator.state == {}
    assert evaluator.infer({"x": np.float32([3])}) == {"y": np.float32([6])}


def test_a_step_that_fails_changes_nothing(tmp_path: Path) -> None:
    model = parse("i (float[n] x) => (float[n] y) <float[1] w = {2.0}> { y = Mul (x, w) }")
    info = model.training_info.add()
    graph = "t (float[n] z) => (float[n] w_new) { w_new = Add (w, z) }"
    info.algorithm.CopyFrom(onnx.parser.parse_graph(graph))
    info.update_binding.add(key="w", value="w_new")
    onnx.save(model, tmp_path / "model.onnx")
    evaluator = TrainingEvaluator(tmp_path / "model.onnx")
    feeds = {"x": np.float32([1]), "z": np.float32([1, 2])}
    with pytest.raises(ValueError, match=r"'w' is float32 \(1,\) and gets float32 \(2,\)"):
        evaluator.step(feeds)
    assert evaluator.state == {"w": np.float32([2])}
    evaluator.step({**feeds, "z": np.float32([1])})
    assert evaluator.state == {"w": np.float32([3])}


def test_the_reference_shares_no_code_with_the_package() -> None:
    folder = Path(ortops.__file__).parent / "reference"
    imported = {
        node.module
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ortops")
    }
    assert imported
    assert all(name.startswith("ortops.reference") for name in imported)
