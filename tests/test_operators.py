"""The table of facts about operators: that it is right, complete, and the only one."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime.capi.onnxruntime_pybind11_state as onnxruntime_state
import pytest
from onnx.reference import ReferenceEvaluator

from ortops.errors import ModelError
from ortops.graph.autodiff.registry import Rule, ZeroRule
from ortops.graph.autodiff.rules import BUILT_IN
from ortops.graph.inference import infer
from ortops.graph.operators import ELEMENTWISE, OPERATORS, having

PACKAGE = Path(__file__).parents[1] / "ortops"
KNOWN = {(each.domain, each.name) for each in onnx.defs.get_all_schemas_with_history()} | {
    (each.domain, each.name) for each in onnxruntime_state.get_all_operator_schema()
}
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "BitCast": {"to": onnx.TensorProto.INT32},
    "BitShift": {"direction": "LEFT"},
    "Cast": {"to": onnx.TensorProto.DOUBLE},
}
TYPES = {np.float32: onnx.TensorProto.FLOAT, np.uint32: onnx.TensorProto.UINT32}
TYPES[np.bool_] = onnx.TensorProto.BOOL


@pytest.mark.needs("onnx>=1.23")
def test_rows_are_operators() -> None:
    assert OPERATORS.keys() <= KNOWN


def arguments(schema: Any, kind: type, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """Returns one input of each shape; the condition of Where is boolean."""
    rng, found = np.random.default_rng(0), []
    for index, shape in enumerate(shapes):
        numbers = rng.uniform(0.2, 4, shape) * rng.choice([-1, 1], shape)
        wanted = np.bool_ if (schema.name, index) == ("Where", 0) else kind
        found.append((abs(numbers) if wanted is np.uint32 else numbers).astype(wanted))
        if schema.name.startswith("Is"):
            found[-1].flat[:2] = math.nan, math.inf
    return found


def output_of(schema: Any, xs: list[Any]) -> Any:
    """Returns what onnx's reference computes; None if it is an error."""
    names = [f"x{index}" for index in range(len(xs))]
    node = onnx.helper.make_node(schema.name, names, ["y"], **ATTRIBUTES.get(schema.name, {}))
    given = [
        onnx.helper.make_tensor_value_info(name, TYPES[x.dtype.type], x.shape)
        for name, x in zip(names, xs, strict=True)
    ]
    graph = onnx.helper.make_graph([node], "g", given, [onnx.ValueInfoProto(name="y")])
    imports = [onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())]
    try:
        with np.errstate(all="ignore"):
            model = onnx.helper.make_model(graph, opset_imports=imports)
            return np.asarray(
                ReferenceEvaluator(model).run(None, dict(zip(names, xs, strict=True)))[0]
            )
    except Exception:
        return None


def count_of(schema: Any) -> int:
    """Returns a number of inputs that the operator accepts; 2 if that is variadic."""
    variadic = schema.inputs and schema.inputs[-1].option == (
        onnx.defs.OpSchema.FormalParameterOption.Variadic
    )
    return 2 if variadic else int(schema.min_input)


def computed_element_by_element(schema: Any) -> bool:
    """Whether the output moves with the elements of the inputs, if they are moved all alike."""
    if (
        len(schema.outputs) != 1
        or not schema.inputs[:1]
        or not any(each.startswith("tensor(") for each in schema.inputs[0].types)
    ):
        return False
    shape = (2, 1, 3, 2)
    order = np.random.default_rng(1).permutation(12)
    for kind in TYPES:
        xs = arguments(schema, kind, (shape,) * count_of(schema))
        moved = [x.ravel()[order].reshape(shape) for x in xs]
        y, of_moved = output_of(schema, xs), output_of(schema, moved)
        if y is not None and y.shape == shape and xs and y.dtype != object:
            expected = y.ravel()[order].reshape(shape)
            is_equal = np.array_equal(expected, of_moved, equal_nan=y.dtype.kind == "f")
            if is_equal and (y != y.flat[0]).any():
                return True
    return False


def broadcast(schema: Any) -> bool:
    """Whether inputs of shapes (3, 1), (1, 2), (3, 2) … give an output of shape (3, 2)."""
    shapes = ((3, 1), (1, 2), (3, 2))[: count_of(schema)]
    found = [output_of(schema, arguments(schema, kind, shapes)) for kind in TYPES]
    return any(y is not None and y.shape == (3, 2) for y in found)


@pytest.mark.slow
def test_sizes_that_are_broadcast_are_those_that_onnx_infers() -> None:
    """For all elementwise operators and two types, with inputs of known sizes."""
    wrong, version = [], onnx.defs.onnx_opset_version()
    known = [name for name in sorted(ELEMENTWISE) if ("", name) in KNOWN]
    sizes = [(), (3,), (2, 1), (0, 3)]
    for schema, kind in itertools.product(map(onnx.defs.get_schema, known), TYPES.values()):
        for shapes in itertools.product(sizes, repeat=count_of(schema)):
            node = onnx.helper.make_node(schema.name, [f"x{i}" for i in range(len(shapes))], ["y"])
            node.attribute.extend(
                onnx.helper.make_attribute(*each)
                for each in ATTRIBUTES.get(schema.name, {}).items()
            )
            types = [onnx.helper.make_tensor_type_proto(kind, each) for each in shapes]
            given = dict(zip(node.input, types, strict=True))
            try:
                expected = onnx.shape_inference.infer_node_outputs(
                    schema, node, given, opset_imports=[onnx.helper.make_opsetid("", version)]
                ).get("y")
            except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError):
                expected = None
            inputs = [
                ir.Value(name=name, type=ir.TensorType(ir.DataType(kind)), shape=ir.Shape(each))
                for name, each in zip(node.input, shapes, strict=True)
            ]
            found = ir.Node("", schema.name, inputs, map(ir.from_proto, node.attribute))
            found.outputs[0].name = "y"
            try:
                infer(found, {"": version})
                info = ir.to_proto(found.outputs[0]).type
            except ModelError:
                info = None
            if info != expected:
                wrong.append(f"{schema.name} {shapes}: {info}, but onnx says {expected}")
    assert not wrong, wrong


@pytest.mark.slow
def test_what_is_elementwise_is_what_onnx_computes_so() -> None:
    """So that neither a new operator of ONNX, nor one with a new rule, is forgotten."""
    schemas = [each for each in onnx.defs.get_all_schemas() if each.domain == ""]
    found = {each.name for each in schemas if computed_element_by_element(each)}
    # Without more inputs, these draw nothing, split nothing, and replace all elements.
    found -= {"Dropout", "OptionalGetElement", "Split", "TensorScatter"}
    assert found == ELEMENTWISE & {each.name for each in schemas}
    wide = {each.name for each in schemas if each.name in found and count_of(each) > 1}
    joined = {each.name for each in schemas if each.name in wide and broadcast(each)}
    # The specification broadcasts only the slope of PRelu, and all inputs of Mean.
    assert joined - {"PRelu"} | {"Mean"} == having("broadcasts")


def test_every_rule_has_its_row() -> None:
    rules = {key: rule for key, rule in BUILT_IN.rules.items() if key[0] == ""}
    missing = sorted(name for _, name in rules.keys() - OPERATORS.keys())
    assert not missing, "\n".join(f"{n}: no row in ortops/graph/operators.py" for n in missing)
    summed = {
        name
        for (_, name), rule in rules.items()
        if isinstance(rule, Rule) and rule.elementwise and name not in ("Clip", "PRelu")
    }
    zero = {name for (_, name), rule in rules.items() if isinstance(rule, ZeroRule)}
    assert summed == having("broadcasts") - zero
    assert zero == having("zero")


def test_gradients_are_infinite_only_where_the_table_allows_it() -> None:
    """By hand: which functions have a slope that is infinite at the end of where they exist."""
    steep = {"Acos", "Acosh", "Asin", "Atanh", "Div", "Log", "Mod", "Pow", "Reciprocal", "Sqrt"}
    growing = {"Cosh", "Sinh", "Tan"}  # their slopes overflow long before they do, or have poles
    assert ELEMENTWISE - having("zero") - having("finite") == steep | growing
    singular = {name for (_, name), row in OPERATORS.items() if row.singular is not None}
    assert singular == {"Div", "Log", "Pow", "Reciprocal", "Sqrt"}


# ----------------------------------------------------------------------------- the only table

SUBJECTS = {
    "graph/files/loading.py: ONLY_ONNXRUNTIMES": "operators of the default domain that ONNX lacks",
    "graph/matching.py: _ARITHMETIC": "operators so frequent that a refusal does not name them",
    "graph/passes/chunked_logits.py: _BY_NUMBER": "what the pass computes in parts",
    "graph/passes/gelu.py: _PARTS": "the formula that the pass looks for",
    "graph/passes/rms_normalization.py: _PARTS": "the formula that the pass looks for",
    "graph/squashing.py: _AVERAGING": "what averages probabilities",
    "graph/squashing.py: _BOUNDED": "what squashes numbers",
    "graph/squashing.py: _WEIGHING": "where the search for logits ends",
    "graph/passes/recurrent.py: _USUAL": "the activations that onnxruntime assumes",
    "lora/targets.py: _AFTER_OUTPUT_LAYER": "what exporters write behind the output layer",
    "lora/targets.py: _MOVING": "what exporters write behind a weight",
    "lora/targets.py: _SHAPED": "what exporters write behind the output layer",
    "surgery/head.py: _LAYERS": "the layers that can be replaced",
    "surgery/postprocessing.py: _MOVING": "what exporters write behind predictions",
    "surgery/postprocessing.py: _SIMPLE": "what exporters write behind predictions",
    "weights/readers.py: _ROLES": "the names of parameters in PyTorch",
}
"""Collections of operators that are what a module works on, and no facts about operators."""


def collections_of_operators(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the constants of a module that hold names of operators, and how many.

    Tables of functions by operator are no facts: they are what a module does.
    """
    names, text = {name for _, name in KNOWN}, path.read_text(encoding="utf-8")
    is_likely = len(names.intersection(re.findall(r'"(\w+)"', text))) > 2
    for statement in ast.parse(text).body if is_likely else ():
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        nodes = list(ast.walk(statement.value))
        values = [
            v
            for n in nodes
            if isinstance(n, ast.Dict)
            for k, v in zip(n.keys, n.values, strict=True)
            if k
        ]
        if any(
            isinstance(each, ast.Name | ast.Attribute | ast.Lambda | ast.Call) for each in values
        ):
            continue
        found = {n.value for n in nodes if isinstance(n, ast.Constant) and n.value in names}
        target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
        yield ast.unparse(target), len(found)


@pytest.mark.slow
def test_there_is_no_other_table_of_facts() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        own = ("conformance/", "reference/", "graph/autodiff/rules/", "graph/operators.py")
        if not place.startswith(own):
            found += [
                f"{place}: {name}: make it a comprehension over ortops/graph/operators.py"
                for name, count in collections_of_operators(path)
                if count >= 5 and name != "__all__" and f"{place}: {name}" not in SUBJECTS
            ]
    assert not found, "\n".join(found)


def test_a_table_of_facts_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'A: set = frozenset({"Abs", "Neg"} | {"Exp"})\n'
        'B = {**dict.fromkeys(("Conv", "Gemm"), (0,)), "MatMul": 1}\n'
        'C = {"Abs": abs, "Neg": negate}\n'
        'D = ("one", "two")\n'
    )
    assert list(collections_of_operators(path)) == [("A", 3), ("B", 3), ("D", 0)]


@pytest.mark.parametrize("fact", ["elementwise", "finite"])
def test_swish_and_softplus_agree(fact: str) -> None:
    """A rule of Swish was forgotten in each of four tables that had Softplus."""
    assert {"Softplus", "Swish", "Mish"} <= having(fact)
