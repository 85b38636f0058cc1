"""Weights that stand in Constant nodes, inner graphs, functions and attributes.

The oracle is stock onnxruntime on the model as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import DOMAIN, value
from domain_models import node as gradient_node
from onnx import TensorProto, helper, numpy_helper
from running import run

import ortops
from ortops.errors import ModelError, UnsupportedError
from ortops.graph.files import external, messages
from ortops.graph.files.external import LightModel
from ortops.graph.weights import Weight, lift, weights

FOLDER = Path(__file__).parents[1] / ".models"
HEAD = '<ir_version: 10, opset_import: ["" : 21, "own" : 1, "ai.onnx.ml" : 3]>\n'
X = np.array([[1.5, -2.0], [0.25, 3.0], [-1.0, 0.5]], np.float32)

Array = np.ndarray[Any, Any]


def elsewhere(model: onnx.ModelProto | LightModel) -> dict[str, Weight]:
    """Returns the weights that are no initializers of the main graph."""
    light = model if isinstance(model, LightModel) else LightModel(model, {})
    found = weights(light)
    own = {tensor.name for tensor in light.proto.graph.initializer}
    return {name: weight for name, weight in found.items() if name not in own}


def with_arrays(model: onnx.ModelProto, arrays: dict[str, Array]) -> onnx.ModelProto:
    """Returns a model whose initializers have other values."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return result


def check(
    model: onnx.ModelProto,
    *feeds: dict[str, Any],
    tolerance: float = 0.0,
    change: float = 1.0,
    checked: bool = True,
    each: bool = True,
) -> onnx.ModelProto:
    """Lifts all weights, and each alone, and sets them where they stood.

    Args:
        model: The model.
        *feeds: What to run it on; together they have to read every weight.
        tolerance: How far numbers may be off; strings and integers never are.
        change: About how much is added to the weights when they are set.
        checked: Whether onnx accepts the model itself.
        each: Whether to lift each weight alone.

    Returns:
        The model with all weights lifted.
    """
    before = model.SerializeToString(deterministic=True)
    light = external.detach(model)

    def lifted(names: Any) -> onnx.ModelProto:
        (result, data), origins = lift(light, names)
        assert set(names) <= set(origins)
        initializers = {tensor.name for tensor in result.graph.initializer}
        assert set(origins) <= initializers
        assert origins.keys() - names <= {n for n in origins if n.endswith(("cients", "cepts"))}
        result = LightModel(result, data).attached()
        if checked:
            onnx.checker.check_model(result, full_check=True)
        return result

    def same(first: onnx.ModelProto, second: onnx.ModelProto) -> None:
        for fed in feeds:
            for a, b in zip(run(first, fed), run(second, fed), strict=True):
                compare(a, b, tolerance)

    names = list(elsewhere(light))
    assert names
    everything = lifted(names)
    same(model, everything)
    assert not [name for name, weight in elsewhere(everything).items() if weight.shape]
    for name in names if each else ():
        same(model, lifted([name]))
    by_default, origins = lift(light)
    assert set(origins) == {n for n, w in elsewhere(light).items() if w.shape}
    same(model, by_default.attached())

    rng = np.random.default_rng(7)
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in everything.graph.initializer}
    for name in names:
        original = external.detach(model)
        weight = weights(original)[name]
        np.testing.assert_array_equal(weight.array(), known[name])
        assert weight.array().dtype == weight.dtype == known[name].dtype
        array = (known[name] + change * rng.uniform(0.5, 1.5, known[name].shape)).astype(
            weight.dtype
        )
        weight.set(array)
        np.testing.assert_array_equal(weight.array(), array)
        changed = original.attach()
        same(changed, with_arrays(everything, {name: array}))
        if each:
            assert any(is_other(run(model, fed), run(changed, fed)) for fed in feeds), name
    assert model.SerializeToString(deterministic=True) == before
    return everything


def compare(actual: Any, expected: Any, tolerance: float) -> None:
    if isinstance(actual, list):  # a ZipMap's maps
        for one, other in zip(actual, expected, strict=True):
            assert list(one) == list(other)
            compare(np.array(list(one.values())), np.array(list(other.values())), tolerance)
    elif actual.dtype.kind == "f":
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    else:
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


def is_other(some: list[Any], others: list[Any]) -> bool:
    return any(str(a) != str(b) for a, b in zip(some, others, strict=True))


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


BRANCHES = """
g (float[n, 2] x, bool c) => (float[n, 2] y) {
    y = If (c) <
        then_branch = first () => (float[n, 2] a) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            a = MatMul (x, w)
        },
        else_branch = second () => (float[n, 2] b) {
            w = Constant <value = float[2, 2] {5, 6, 7, 8}> ()
            v = Constant <value = float[2] {0.5, -1}> ()
            product = MatMul (x, w)
            b = Add (product, v)
        }>
}"""

# Case → the model, what it is fed, and where its weights stand.
CASES: dict[str, tuple[str, list[dict[str, Any]], dict[str, str]]] = {
    "main": (
        """
        g (float[n, 2] x) => (float[n, 2] y, float[n, 2] z) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            s = Constant <value_float = 1.5> ()
            t = Constant <value = float {2.5}> ()
            b = Constant <value_floats = [1.0, -0.5]> ()
            k = Constant <value = int64[1] {2}> ()
            product = MatMul (x, w)
            scaled = Mul (product, s)
            moved = Add (scaled, t)
            y = Add (moved, b)
            z = Mul (x, b)
        }""",
        [{"x": X}],
        {
            "w": "value of Constant node 'w'",
            "s": "value_float of Constant node 's'",
            "t": "value of Constant node 't'",
            "b": "value_floats of Constant node 'b'",
        },
    ),
    "output": (
        """
        g (float[n, 2] x) => (float[2] w, float[n, 2] y) {
            w = Constant <value = float[2] {1, 2}> ()
            y = Mul (x, w)
        }""",
        [{"x": X}],
        {"w_1": "value of Constant node 'w'"},
    ),
    "branches": (
        BRANCHES,
        [{"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}],
        {
            "w_1": "value of Constant node 'w' in then_branch of If node 'y'",
            "w_2": "value of Constant node 'w' in else_branch of If node 'y'",
            "v": "value of Constant node 'v' in else_branch of If node 'y'",
        },
    ),
    "name of another value in a branch": (
        """
        g (float[n, 2] x, bool c) => (float[n, 2] y) {
            y = If (c) <
                then_branch = first () => (float[n, 2] a) {
                    w = Constant <value = float[2] {1, 2}> ()
                    a = Mul (x, w)
                },
                else_branch = second () => (float[n, 2] b) {
                    w = Neg (x)
                    b = Neg (w)
                }>
        }""",
        [{"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}],
        {"w_1": "value of Constant node 'w' in then_branch of If node 'y'"},
    ),
    "branch that returns a constant": (
        """
        g (float[n, 2] x, bool c) => (float[2] y) {
            y = If (c) <
                then_branch = first () => (float[2] a) {
                    a = Constant <value = float[2] {1, 2}> ()
                },
                else_branch = second () => (float[2] b) <float[2] b = {3, 4}> { }>
        }""",
        [{"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}],
        {
            "a_1": "value of Constant node 'a' in then_branch of If node 'y'",
            "b_1": "initializer in else_branch of If node 'y'",
        },
    ),
    "If in Loop": (
        """
        g (float[2] x, int64 m) => (float[2] y) {
            true = Constant <value = bool {1}> ()
            y = Loop (m, true, x) <body = step (int64 i, bool go, float[2] h) =>
                (bool go_on, float[2] h_new) <float[2] b = {0.5, 1}> {
                go_on = Identity (go)
                one = Constant <value = int64 {1}> ()
                late = Greater (i, one)
                scale = Constant <value = float[2] {2, 3}> ()
                h_new = If (late) <
                    then_branch = first () => (float[2] t) {
                        w = Constant <value = float[2] {0.5, 0.25}> ()
                        moved = Mul (h, w)
                        t = Mul (moved, scale)
                    },
                    else_branch = second () => (float[2] e) {
                        w = Constant <value = float[2] {7, 8}> ()
                        moved = Add (h, w)
                        e = Mul (moved, b)
                    }>
            }>
        }""",
        [{"x": X[0], "m": np.array(4)}],
        {
            "b": "initializer in body of Loop node 'y'",
            "scale": "value of Constant node 'scale' in body of Loop node 'y'",
            "w_1": "value of Constant node 'w' in then_branch of If node 'h_new' in body of Loop "
            "node 'y'",
            "w_2": "value of Constant node 'w' in else_branch of If node 'h_new' in body of Loop "
            "node 'y'",
        },
    ),
    "Scan": (
        """
        g (float[2] h0, float[t, 2] x) => (float[2] h, float[t, 2] y) {
            h, y = Scan (h0, x) <num_scan_inputs = 1, body = step (float[2] s, float[2] e) =>
                (float[2] s_new, float[2] r) {
                w = Constant <value = float[2, 2] {0.5, -0.25, 1, 2}> ()
                product = MatMul (s, w)
                s_new = Add (product, e)
                r = Identity (s_new)
            }>
        }""",
        [{"h0": X[0], "x": X}],
        {"w": "value of Constant node 'w' in body of Scan node 'h'"},
    ),
    "function called twice": (
        """
        g (float[n, 2] x) => (float[n, 2] y) {
            h = own.layer (x)
            y = own.layer (h)
        }
        <domain: "own", opset_import: ["" : 21]>
        layer (x) => (y) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            y = MatMul (x, w)
        }
        <domain: "own", opset_import: ["" : 21, "own" : 1]>
        never (x) => (y) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            h = own.layer (x)
            y = MatMul (h, w)
        }""",
        [{"x": X}],
        {"layer.w": "value of Constant node 'w' in function 'layer'"},
    ),
    "function calling a function": (
        """
        g (float[n, 2] x, bool c) => (float[n, 2] y) {
            "inner.w" = Neg (x)
            h = own.outer ("inner.w")
            y = If (c) <
                then_branch = first () => (float[n, 2] a) { a = own.inner (h) },
                else_branch = second () => (float[n, 2] b) { b = own.outer (h) }>
        }
        <domain: "own", opset_import: ["" : 21, "own" : 1]>
        outer (x) => (y) {
            w = Constant <value = float[2] {0.5, 3}> ()
            w_new = own.inner (x)
            y = Add (w_new, w)
        }
        <domain: "own", opset_import: ["" : 21]>
        inner (x) => (y) {
            always = Constant <value = bool {1}> ()
            w = Constant <value = float[2] {1, 2}> ()
            y = If (always) <
                then_branch = first () => (t) {
                    v = Constant <value = float[2] {3, 5}> ()
                    product = Mul (x, v)
                    t = Add (product, w)
                },
                else_branch = second () => (e) { e = Identity (x) }>
        }""",
        [{"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}],
        {
            "outer.w": "value of Constant node 'w' in function 'outer'",
            "inner.w_1": "value of Constant node 'w' in function 'inner'",
            "inner.v": "value of Constant node 'v' in then_branch of If node 'y' in function "
            "'inner'",
        },
    ),
    "function without an optional input": (
        """
        g (float[n, 2] x) => (float[n, 2] y, float[2] "function.a") {
            y = own.function (x)
            "function.a" = Constant <value = float[2] {1, 2}> ()
        }
        <domain: "own", opset_import: ["" : 21]>
        function (x, least, most) => (y) {
            a = Constant <value = float[2] {1, 2}> ()
            moved = Add (x, a)
            y = Clip (moved, least, most)
        }""",
        [{"x": X}],
        {
            "function.a_1": "value of Constant node 'function.a'",
            "function.a_2": "value of Constant node 'a' in function 'function'",
        },
    ),
    "functions of one name": (
        """
        g (float[n, 2] x) => (float[n, 2] y) {
            h = own.layer:first (x)
            y = own.layer:second (h)
        }
        <domain: "own", overload: "first", opset_import: ["" : 21]>
        layer (x) => (y) {
            w = Constant <value = float[2] {1, 2}> ()
            y = Mul (x, w)
        }
        <domain: "own", overload: "second", opset_import: ["" : 21]>
        layer (x) => (y) {
            w = Constant <value = float[2] {1, 2}> ()
            y = Add (x, w)
        }""",
        [{"x": X}],
        {
            "layer.w": "value of Constant node 'w' in function 'layer'",
            "layer.w_1": "value of Constant node 'w' in function 'layer'",
        },
    ),
    "function that returns a constant": (
        """
        g (float[2] x) => (float[2] y) {
            w = own.table ()
            y = Add (x, w)
        }
        <domain: "own", opset_import: ["" : 21]>
        table () => (w) {
            w = Constant <value = float[2] {1, 2}> ()
        }""",
        [{"x": X[0]}],
        {"table.w": "value of Constant node 'w' in function 'table'"},
    ),
    "attribute of a function": (
        """
        g (float[2] x) => (float[2] y) {
            y = own.shifted <by = float[2] {1, 2}> (x)
        }
        <domain: "own", opset_import: ["" : 21]>
        shifted <by> (x) => (y) {
            a = Constant <value: tensor = @by> ()
            b = Constant <value = float[2] {3, 4}> ()
            moved = Add (x, a)
            y = Mul (moved, b)
        }""",
        [{"x": X[0]}],
        {"shifted.b": "value of Constant node 'b' in function 'shifted'"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_forms(case: str) -> None:
    text, feeds, origins = CASES[case]
    model = parse(text)
    assert {name: str(w.origin) for name, w in elsewhere(model).items()} == origins
    check(model, *feeds)


def test_old_model() -> None:
    """Before version 4 initializers had to be inputs, which weights are not."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 3, opset_import: ["" : 8]>
        g (float[n, 2] x, float[2, 2] own) => (float[n, 2] y) <float[2, 2] own = {1, 2, 3, 4}> {
            w = Constant <value = float[2, 2] {5, 6, 7, 8}> ()
            product = MatMul (x, own)
            y = MatMul (product, w)
        }"""
    )
    assert check(model, {"x": X}).ir_version == 4


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double"])
def test_types(kind: str) -> None:
    model = parse(
        """
        g (float[2] x) => (float[2] y) {
            w = Constant <value = float[2] {0, 0}> ()
            as_float = Cast <to = 1> (w)
            y = Add (x, as_float)
        }"""
    )
    tensor = helper.make_tensor("", getattr(TensorProto, kind.upper()), [2], [1.5, 2])
    model.graph.node[0].attribute[0].t.CopyFrom(tensor)
    (weight,) = elsewhere(model).values()
    assert weight.dtype == helper.tensor_dtype_to_np_dtype(getattr(TensorProto, kind.upper()))
    check(model, {"x": X[0]})


def test_lists_of_graphs_keep_their_inputs() -> None:
    """An inner initializer that is an input of its graph is a default, not a weight."""
    model = parse(BRANCHES)
    branch = model.graph.node[0].attribute[0].g
    branch.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "given"))
    branch.input.append(value("given", [2]))
    assert "given" not in weights(LightModel(model, {}))


def test_shape_information_goes() -> None:
    model = parse(BRANCHES)
    for attribute in model.graph.node[0].attribute:
        attribute.g.value_info.append(value("w", [2, 2]))
    everything = check(model, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})
    assert not any(a.g.value_info for a in everything.graph.node[0].attribute)


def test_nothing_to_lift() -> None:
    model = parse("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Add (x, w) }")
    (lifted, _), origins = lift(LightModel(model, {}))
    assert lifted is model
    assert not origins
    branches = parse(BRANCHES)
    assert lift(LightModel(branches, {}), ["w"])[0].proto is branches
    assert list(weights(LightModel(model, {}))) == ["w"]
    assert str(weights(LightModel(model, {}))["w"].origin) == "initializer"


def test_set_refuses_what_does_not_fit() -> None:
    weight = weights(LightModel(parse(BRANCHES), {}))["v"]
    where = r"weight 'v' \(value of Constant node 'v' in else_branch of If node 'y'\)"
    with pytest.raises(ModelError, match=where + r" must be float32\[2\], got float64\[2\]"):
        weight.set(np.ones(2))
    with pytest.raises(ModelError, match=where + r" must be float32\[2\], got float32\[3\]"):
        weight.set(np.ones(3, np.float32))


def test_call_with_too_many_inputs() -> None:
    text, _, _ = CASES["function called twice"]
    model = parse(text.replace("own.layer (x)", "own.layer (x, x)"))
    with pytest.raises(ModelError, match="layer node 'h': the function has 1 inputs, got 2"):
        lift(LightModel(model, {}))


def big_model(array: Array) -> onnx.ModelProto:
    """Returns a model with a weight in a function that is kept beside the lifted model."""
    text, _, _ = CASES["function called twice"]
    model = parse(text)
    model.functions[0].node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(array))
    for described in (*model.graph.input, *model.graph.output):
        described.type.tensor_type.shape.dim[1].dim_value = len(array)
    return model


def test_big_data_are_beside() -> None:
    array = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    x = np.ones((3, 64), np.float32)
    model = big_model(array)
    light = external.detach(model)
    once, _ = lift(light)
    assert messages.is_light(once.proto.graph.initializer[0])
    assert len(light.data) == 1
    again = once.copy()
    assert messages.is_light(again.proto.graph.initializer[0])
    weight = weights(again)["layer.w"]
    np.testing.assert_array_equal(weight.array(), array)
    changed = array + 1
    weight.set(changed)
    assert np.shares_memory(weight.array(), changed)
    compare(*run(again.attach(), {"x": x}), *run(big_model(changed), {"x": x}), 0)
    check(model, {"x": x})


def test_external_data_of_functions(tmp_path: Path) -> None:
    array = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    model = big_model(array)
    tensor = model.functions[0].node[0].attribute[0].t
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.data")
    (tmp_path / "w.data").write_bytes(array.tobytes())
    lifted, _ = lift(external.detach(model, tmp_path))
    np.testing.assert_array_equal(weights(lifted)["layer.w"].array(), array)
    with pytest.raises(ModelError, match=r"its data are in the file 'w\.data'"):
        weights(LightModel(model, {}))["layer.w"].array()


# ------------------------------------------------------------------------ nodes of ai.onnx.ml


def linear(
    op_type: str,
    *,
    kind: int = TensorProto.FLOAT,
    shape: list[int | str] | None = None,
    opset: int = 21,
    name: str = "linear",
    **attributes: Any,
) -> onnx.ModelProto:
    """Makes a model of one node; onnx refuses empty lists, so None leaves an attribute out."""
    outputs = ["label", "scores"] if op_type == "LinearClassifier" else ["scores"]
    given = {key: a for key, a in attributes.items() if a is not None}
    node = helper.make_node(op_type, ["x"], outputs, name, domain="ai.onnx.ml", **given)
    strings = "classlabels_strings" in given
    labels = value("label", ["n"], TensorProto.STRING if strings else TensorProto.INT64)
    described = [labels] if len(outputs) == 2 else []
    described.append(value("scores", ["n", "outputs"]))
    graph = helper.make_graph([node], "g", [value("x", shape, kind)], described)
    imports = [helper.make_opsetid("", opset)] if opset else []
    imports.append(helper.make_opsetid("ai.onnx.ml", 1))
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def coefficients(outputs: int) -> dict[str, list[float]]:
    """Returns coefficients of three features, and intercepts of which one is zero."""
    rng = np.random.default_rng(outputs)
    intercepts = rng.standard_normal(outputs)
    intercepts[-1] = 0
    return {
        "coefficients": list(rng.standard_normal(3 * outputs)),
        "intercepts": list(intercepts),
    }


ROWS = np.vstack([np.random.default_rng(5).standard_normal((20, 3)), np.zeros((1, 3))])
TRANSFORMS = ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT"]
ROUNDING = 2e-6


def probabilities(given: dict[str, list[float]], centers: list[float]) -> dict[str, list[float]]:
    """Returns what gives the scores that PROBIT takes; near 0.5 float32 rounds its values badly."""
    return {
        "coefficients": [0.02 * x for x in given["coefficients"]],
        "intercepts": [
            0.02 * x + center for x, center in zip(given["intercepts"], centers, strict=True)
        ],
    }


@pytest.mark.nightly
@pytest.mark.quick(22)
@pytest.mark.parametrize("opset", [9, 13, 21])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("targets", [1, 2, 3])
def test_linear_regressor(targets: int, transform: str, opset: int) -> None:
    given = coefficients(targets)
    if transform == "PROBIT":
        given = probabilities(given, [0.9, 0.1, 0.8][:targets])
    model = linear(
        "LinearRegressor",
        shape=["n", 3],
        opset=opset,
        targets=targets,
        post_transform=transform,
        **given,
    )
    rows = ROWS.astype(np.float32)
    assert np.isfinite(run(model, {"x": rows[:-1]})[0]).all()
    change = 0.01 if transform == "PROBIT" else 1.0
    everything = check(model, {"x": rows}, tolerance=ROUNDING, change=change)
    shapes = {tensor.name: list(tensor.dims) for tensor in everything.graph.initializer}
    assert shapes == {"linear.coefficients": [targets, 3], "linear.intercepts": [targets]}


CLASSIFIERS: list[tuple[int, list[Any], str]] = [
    (outputs, labels, transform)
    for outputs, labels in [
        *((1, [4, 7]), (2, [7, 4]), (3, [7, 4, 5]), (2, [7, 4, 5])),
        *((1, ["no", "yes"]), (2, ["no", "yes"]), (3, ["a", "c", "b"])),
    ]
    for transform in TRANSFORMS
    if (outputs, transform) != (1, "PROBIT")  # see test_linear_refuses_probit_of_one_score
]


@pytest.mark.nightly
@pytest.mark.quick(17)
@pytest.mark.parametrize("opset", [9, 13, 21])
@pytest.mark.parametrize(("outputs", "labels", "transform"), CLASSIFIERS)
def test_linear_classifier(outputs: int, labels: list[Any], transform: str, opset: int) -> None:
    given = coefficients(outputs)
    if transform == "PROBIT":
        given = probabilities(given, [0.85] * outputs)
    field = "classlabels_strings" if isinstance(labels[0], str) else "classlabels_ints"
    model = linear(
        "LinearClassifier",
        shape=["n", 3],
        opset=opset,
        post_transform=transform,
        multi_class=int(len(labels) > 2),
        **given,
        **{field: labels},
    )
    rows = ROWS.astype(np.float32)
    label, _ = run(model, {"x": rows})
    assert len(set(label)) >= 2
    change = 0.01 if transform == "PROBIT" else 1.0
    check(model, {"x": rows}, tolerance=ROUNDING, change=change)


@pytest.mark.quick(15)
@pytest.mark.parametrize("shape", [None, [3], ["n", 3]])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
@pytest.mark.parametrize("outputs", [1, 3])
def test_linear_inputs(outputs: int, dtype: Any, shape: list[int | str] | None) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    labels = [2, 3] if outputs == 1 else [2, 3, 5]
    model = linear(
        "LinearClassifier",
        kind=kind,
        shape=shape,
        post_transform="LOGISTIC",
        **coefficients(outputs),
        classlabels_ints=labels,
    )
    rows = (2 * ROWS).astype(dtype)
    feeds = [{"x": rows}] if shape == ["n", 3] else [{"x": rows[0]}]
    if shape is None:
        feeds.append({"x": rows})
    check(model, *feeds, tolerance=ROUNDING, checked=shape is not None)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_linear_regressor_of_other_types(dtype: Any) -> None:
    """The standard has them, and onnxruntime has not."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    given = coefficients(2)
    model = linear("LinearRegressor", kind=kind, shape=["n", 3], targets=2, **given)
    rows = (2 * ROWS).astype(dtype)
    (scores,) = run(lift(LightModel(model, {}))[0].proto, {"x": rows})
    expected = rows @ np.reshape(given["coefficients"], (2, 3)).T + given["intercepts"]
    np.testing.assert_allclose(scores, expected, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("outputs", [1, 3])
def test_gradients_of_linear(outputs: int, transform: str) -> None:
    """Against differences of onnxruntime's runs on the node with other coefficients."""
    given = coefficients(outputs)
    if transform == "PROBIT":
        given = probabilities(given, [0.8] * outputs)

    def model(number: int = 0, change: float = 0.0) -> onnx.ModelProto:
        changed = list(given["coefficients"])
        changed[number] += change
        kind = {"targets": outputs, "post_transform": transform}
        return linear("LinearRegressor", shape=["n", 3], **given | kind | {"coefficients": changed})

    (lifted, _), _ = lift(LightModel(model(), {}))
    name = "linear.coefficients"
    weight = np.random.default_rng(2).standard_normal((20, outputs)).astype(np.float32)
    lifted.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    lifted.graph.node.append(helper.make_node("Mul", ["scores", "weight"], ["weighted"]))
    lifted.graph.node.append(gradient_node("Gradient", [name], ["d"], xs=[name], y="weighted"))
    lifted.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    lifted.graph.output.append(helper.make_empty_tensor_value_info("d"))
    rows = ROWS[:20].astype(np.float32)
    (found,) = run(ortops.lower(lifted), {"x": rows}, ["d"])
    step = 1e-3 if transform == "PROBIT" else 1e-2
    for number in range(3 * outputs):
        ahead, behind = (
            np.sum(weight * run(model(number, change), {"x": rows})[0], dtype=np.float64)
            for change in (step, -step)
        )
        np.testing.assert_allclose(
            found.ravel()[number], (ahead - behind) / (2 * step), rtol=2e-3, atol=2e-3
        )


def test_linear_regressor_without_intercepts() -> None:
    given = coefficients(2) | {"intercepts": None}
    model = linear("LinearRegressor", shape=["n", 3], targets=2, **given)
    assert list(elsewhere(model)) == ["linear.coefficients"]
    check(model, {"x": ROWS.astype(np.float32)}, tolerance=ROUNDING)
    wrong = linear("LinearRegressor", shape=None, targets=2, **given | {"intercepts": [5.0]})
    assert list(elsewhere(wrong)) == ["linear.coefficients"]  # onnxruntime does not read them
    check(wrong, {"x": ROWS.astype(np.float32)}, tolerance=ROUNDING, checked=False)


def test_linear_goes_by_its_output_and_imports_operators() -> None:
    model = linear("LinearRegressor", shape=["n", 3], opset=0, name="", **coefficients(1))
    everything = check(model, {"x": ROWS.astype(np.float32)}, tolerance=ROUNDING)
    assert list(elsewhere(model)) == ["scores.coefficients", "scores.intercepts"]
    assert {entry.domain for entry in everything.opset_import} == {"", "ai.onnx.ml"}


def test_linear_in_function_and_branch() -> None:
    model = parse(
        """
        g (float[n, 2] x, bool c) => (float[n, 1] y) {
            y = If (c) <
                then_branch = first () => (float[n, 1] a) { a = own.regression (x) },
                else_branch = second () => (float[n, 1] b) {
                    b = ai.onnx.ml.LinearRegressor <coefficients = [1.0, 2.0]> (x)
                }>
        }
        <domain: "own", opset_import: ["ai.onnx.ml" : 3]>
        regression (x) => (y) {
            y = ai.onnx.ml.LinearRegressor <coefficients = [3.0, 4.0], intercepts = [5.0]> (x)
        }"""
    )
    check(model, {"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)}, tolerance=ROUNDING)
    assert [
        f"{origin.node}{origin.place}" for origin in lift(LightModel(model, {}))[1].values()
    ] == [
        "LinearRegressor node 'b' in else_branch of If node 'y'",
        *["LinearRegressor node 'y' in function 'regression'"] * 2,
    ]


BINARY = {"coefficients": [1.0, 2.0], "intercepts": [0.5], "classlabels_ints": [0, 1]}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (
            {"post_transform": "TANH"},
            (
                "post_transform must be one of NONE, SOFTMAX, LOGISTIC, SOFTMAX_ZERO, "
                "PROBIT, got 'TANH'"
            ),
        ),
        (
            {"coefficients": None},
            "the number of coefficients must be a multiple of the number of intercepts, got 0 ",
        ),
        (
            {"coefficients": [1.0, 2.0, 3.0], "intercepts": [1.0, 2.0]},
            (
                "the number of coefficients must be a multiple of the number of intercepts, got 3 "
                "coefficients and 2 intercepts"
            ),
        ),
        (
            {"intercepts": None},
            (
                "the number of coefficients must be a multiple of the number of intercepts, got 2 "
                "coefficients and 0 intercepts"
            ),
        ),
        (
            {"classlabels_ints": [1]},
            (
                "expected labels of one kind, one for each intercept, or two if there is a single "
                "intercept; got 1 classlabels_ints, 0 classlabels_strings and 1 inte"
            ),
        ),
        (
            {"classlabels_strings": ["a", "b"]},
            (
                "expected labels of one kind, one for each intercept, or two if there is a single "
                "intercept; got 2 classlabels_ints, 2 classlabels_strings"
            ),
        ),
    ],
)
def test_linear_refuses_what_is_wrong(attributes: dict[str, Any], message: str) -> None:
    model = linear("LinearClassifier", shape=["n", 2], **BINARY | attributes)
    with pytest.raises(ModelError, match=f"^LinearClassifier node 'linear': {message}"):
        lift(LightModel(model, {}))
    with pytest.raises(ModelError, match=message):
        weights(LightModel(model, {}))


def test_linear_refuses_targets_that_do_not_fit() -> None:
    model = linear("LinearRegressor", coefficients=[1.0, 2.0, 3.0], targets=2)
    message = (
        "^LinearRegressor node 'linear': the number of coefficients must be a multiple of the "
        "number of targets, got 3 coefficients and 2 targets"
    )
    with pytest.raises(ModelError, match=message):
        lift(LightModel(model, {}))


def test_linear_refuses_probit_of_one_score() -> None:
    model = linear("LinearClassifier", shape=["n", 2], **BINARY, post_transform="PROBIT")
    message = "onnxruntime leaves the second score undefined if post_transform is 'PROBIT'"
    with pytest.raises(UnsupportedError, match=message):
        lift(LightModel(model, {}))


# ------------------------------------------------------------------------ models of others


SILERO = FOLDER / "silero_vad.onnx"


@pytest.mark.slow
@pytest.mark.fetched(SILERO)
def test_weights_in_branches_of_a_real_model() -> None:
    """Silero's two networks, for two sampling rates, lie in the branches of an If."""
    model = onnx.load(SILERO)
    rng = np.random.default_rng(1)
    state = rng.standard_normal((2, 1, 128)).astype(np.float32)
    feeds = [
        {
            "input": rng.standard_normal((1, size)).astype(np.float32),
            "state": state,
            "sr": np.array(rate),
        }
        for size, rate in ((576, 16000), (288, 8000))
    ]
    light = external.detach(model)
    names = list(elsewhere(light))
    for chosen in (None, names, names[::2]):
        found, origins = lift(light, chosen)
        lifted = found.attached()
        assert chosen is None or set(origins) == set(chosen)
        onnx.checker.check_model(lifted, full_check=True)
        for fed in feeds:
            for a, b in zip(run(model, fed), run(lifted, fed), strict=True):
                np.testing.assert_array_equal(a, b)
    assert len(names) > 20
    assert any(" in else_branch of If node " in str(origin) for origin in origins.values())
    arrays = {
        name: (1.01 * weight.array()).astype(weight.dtype)
        for name, weight in weights(light).items()
        if len(weight.shape) > 1
    }
    for name, array in arrays.items():
        weights(light)[name].set(array)
    unchanged, _ = lift(external.detach(model), names)
    everything = unchanged.attach()
    for fed in feeds:
        found, _ = run(light.attached(), fed)
        expected, _ = run(with_arrays(everything, arrays), fed)
        np.testing.assert_array_equal(found, expected)
        assert not np.array_equal(found, run(model, fed)[0])
