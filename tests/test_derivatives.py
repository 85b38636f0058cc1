"""Derivatives of models, and of Tensors, next to closed forms, differences, PyTorch and JAX."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from running import plain_session, run_by_name

import ortops
from ortops import Tape, Tensor, derivatives, op
from ortops.cli import main

DOMAIN = "ai.onnx.preview.training"
Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]

rng = np.random.default_rng(7)
W = rng.standard_normal((3, 4))
X = rng.standard_normal((2, 3))


def outputs(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Array]:
    """Runs a model as it is, where it has the domain's nodes in ortops' session."""
    session = ortops.InferenceSession(model)
    return dict(zip([v.name for v in session.get_outputs()], session.run(None, feeds), strict=True))


def both(
    function: Callable[..., onnx.ModelProto], model: Any, feeds: Mapping[str, Any], **arguments: Any
) -> dict[str, Array]:
    """Returns what a model with derivatives puts out, and checks that lowering changes nothing."""
    made = function(model, **arguments)
    onnx.checker.check_model(made, full_check=True)
    assert any(node.domain == DOMAIN for node in all_nodes(made.graph))
    found = outputs(made, feeds)
    standard = function(model, **arguments, lowered=True)
    onnx.checker.check_model(standard, full_check=True)
    assert {node.domain for node in all_nodes(standard.graph)} == {""}
    names = [value.name for value in standard.graph.output]
    assert names == list(found)
    for name, value in zip(names, plain_session(standard).run(names, feeds), strict=True):
        np.testing.assert_allclose(value, found[name], rtol=1e-5, atol=1e-6)
        assert value.dtype == found[name].dtype
    return found


def all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    nodes = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            nodes += all_nodes(attribute.g) if attribute.HasField("g") else []
    return nodes


def shape_of(value: onnx.ValueInfoProto) -> list[Any]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def layer(dtype: Any = np.float64, batch: Any = "batch") -> onnx.ModelProto:
    """y = tanh(x @ w)."""
    with Tape(name="layer") as tape:
        x = tape.input("x", dtype, [batch, 3])
        tape.output(op.Tanh(x @ tape.initializer("w", W.astype(dtype))), "y")
    return tape.model()


def jacobian_of_layer(x: Array) -> Array:
    """∂y[b, i] / ∂x[c, j] = [b = c] (1 − y[b, i]²) w[j, i]."""
    y = np.tanh(x @ W)
    return np.einsum("bi,ji,bc->bicj", 1 - y**2, W, np.eye(len(x)))


def hessian_of_layer(x: Array) -> Array:
    """∂² Σ y / ∂x[b, j] ∂x[c, k] = [b = c] Σ_i −2 y (1 − y²) w[j, i] w[k, i]."""
    y = np.tanh(x @ W)
    return np.einsum("bi,ji,ki,bc->bjck", -2 * y * (1 - y**2), W, W, np.eye(len(x)))


def differences(function: Callable[[Array], Array], x: Array, step: float = 1e-6) -> Array:
    """Returns the Jacobian of a function by central differences: y's shape, then x's."""
    columns = []
    for index in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[index] = step
        columns.append((function(x + moved) - function(x - moved)) / (2 * step))
    return np.moveaxis(np.stack(columns), 0, -1).reshape(columns[0].shape + x.shape)


# ------------------------------------------------------------------------------ grad on Tensors


def test_a_force_is_the_gradient_of_an_energy() -> None:
    with Tape(name="force") as tape:
        positions = tape.input("positions", np.float32, ["atoms", 3])
        energy = (positions**3).sum()
        force = -ortops.grad(energy, positions)
        assert force.shape == ("atoms", 3)
        assert force.dtype == np.float32
        tape.output(force, "force")
    model = tape.model()
    assert [(e.domain, e.version) for e in model.opset_import] == [("", 21), (DOMAIN, 1)]
    (node,) = [node for node in model.graph.node if node.op_type == "Gradient"]
    assert list(node.input) == ["positions"]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert attributes == {"xs": [b"positions"], "y": energy.name.encode()}
    x = X.astype(np.float32)
    np.testing.assert_allclose(outputs(model, {"positions": x})["force"], -3 * x**2, rtol=1e-6)
    lowered = run_by_name(ortops.lower(model), {"positions": x})["force"]
    np.testing.assert_allclose(lowered, -3 * x**2, rtol=1e-6)


def test_orders_are_calls() -> None:
    with Tape(name="orders") as tape:
        x = tape.input("x", np.float64, ["n"])
        y = x**4
        for order in range(1, 5):
            y = tape.output(ortops.grad(y, x), f"order{order}")
    found = outputs(tape.model(), {"x": X[0]})
    x = X[0]
    for name, expected in (
        ("order1", 4 * x**3),
        ("order2", 12 * x**2),
        ("order3", 24 * x),
        ("order4", np.full(3, 24.0)),
    ):
        np.testing.assert_allclose(found[name], expected, rtol=1e-12)


def test_of_inputs_initializers_and_what_is_between() -> None:
    with Tape(name="between") as tape:
        x = tape.input("x", np.float64, [2, 3])
        w = tape.initializer("w", W)
        h = x @ w
        y = op.Tanh(h)
        by_x, by_w = ortops.grad(y, [x, w])
        tape.output(by_x, "by_x")
        tape.output(by_w, "by_w")
        tape.output(ortops.grad(y, h), "by_h")
    found = outputs(tape.model(), {"x": X})
    slope = 1 - np.tanh(X @ W) ** 2
    np.testing.assert_allclose(found["by_h"], slope, rtol=1e-12)
    np.testing.assert_allclose(found["by_x"], slope @ W.T, rtol=1e-12)
    np.testing.assert_allclose(found["by_w"], X.T @ slope, rtol=1e-12)


@pytest.mark.parametrize("given", ["array", "list", "tensor"])
def test_a_seed_weighs_the_elements(given: str) -> None:
    weights = rng.standard_normal((2, 4))
    with Tape(name="seed") as tape:
        x = tape.input("x", np.float64, ["batch", 3])
        y = op.Tanh(x @ tape.initializer("w", W))
        seed = {
            "array": weights,
            "list": weights.tolist(),
            "tensor": tape.initializer("seed", weights),
        }[given]
        tape.output(ortops.grad(y, x, seed=seed), "slope")
    expected = (weights * (1 - np.tanh(X @ W) ** 2)) @ W.T
    np.testing.assert_allclose(outputs(tape.model(), {"x": X})["slope"], expected, rtol=1e-12)


def test_the_gradient_by_a_seed_is_a_product_with_the_jacobian() -> None:
    with Tape(name="seed") as tape:
        x = tape.input("x", np.float64, ["batch", 3])
        seed = tape.input("seed", np.float64, ["batch", 4])
        y = op.Tanh(x @ tape.initializer("w", W))
        tape.output(ortops.grad(ortops.grad(y, x, seed=seed), seed), "twice")
    feeds = {"x": X, "seed": np.zeros((2, 4))}
    expected = jacobian_of_layer(X).sum(axis=(2, 3))
    np.testing.assert_allclose(outputs(tape.model(), feeds)["twice"], expected, rtol=1e-12)


def test_a_seed_of_another_size_fails_in_the_run() -> None:
    with Tape(name="seed") as tape:
        x = tape.input("x", np.float64, ["batch", 3])
        seed = tape.input("seed", np.float64, ["batch", 3])
        tape.output(ortops.grad(x**2, x, seed=seed), "slope")
    lowered = plain_session(ortops.lower(tape.model()))
    with pytest.raises(Exception, match="cannot be reshaped"):
        lowered.run(None, {"x": X, "seed": np.ones((1, 3))})


def test_what_y_does_not_depend_on_gives_zeros() -> None:
    with Tape(name="zeros") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        z = tape.input("z", np.float32, ["other"])
        by_x, by_z = ortops.grad(op.Exp(x), [x, z])
        tape.output(by_x, "by_x")
        tape.output(by_z, "by_z")
    found = outputs(tape.model(), {"x": np.zeros((1, 3), np.float32), "z": np.ones(5, np.float32)})
    assert found["by_x"].tolist() == [[1, 1, 1]]
    assert found["by_z"].tolist() == [0, 0, 0, 0, 0]


def test_sums_of_sums_take_no_time() -> None:
    """There are 2**60 ways through these sums from x to y."""
    with Tape(name="sums") as tape:
        x = tape.input("x", np.float64, [3])
        y = x * x
        for _ in range(60):
            y = y + y
        tape.output(ortops.grad(y, x), "slope")
    lowered = run_by_name(ortops.lower(tape.model()), {"x": X[0]})
    np.testing.assert_allclose(lowered["slope"], 2.0**61 * X[0], rtol=1e-12)


def test_names_may_change_after_the_gradient() -> None:
    with Tape(name="renamed") as tape:
        x = tape.input("x", np.float64, [3])
        h = x**2
        y = op.Exp(h)
        slope = ortops.grad(y, h)
        tape.output(slope, "slope")
        tape.output(y, "y")
        tape.output(h, "h")
    first = tape.model()
    with tape:
        tape.output(ortops.grad(slope, h), "curvature")
    for model in (first, tape.model()):
        found = outputs(model, {"x": X[0]})
        for name in found:
            expected = X[0] ** 2 if name == "h" else np.exp(X[0] ** 2)
            np.testing.assert_allclose(found[name], expected, rtol=1e-12)


def test_grad_refuses() -> None:
    with Tape(name="other"):
        pass
    with Tape(name="wrong") as tape, Tape(name="other") as other:
        x = tape.input("x", np.float32, [3])
        h = x**2
        y = h.sum()
        k = tape.input("k", np.int64, [3])
        strange = other.input("strange", np.float32, [3])
        count = len(tape.nodes)
        cases: list[tuple[Callable[[], object], type[ortops.OrtopsError], str]] = [
            (
                lambda: ortops.grad(y, strange),
                ortops.ModelError,
                (
                    "grad: x Tensor('strange', float32, [3]) is on a different tape than y "
                    "Tensor('ReduceSum_output', float32, []); all tensors must belong to "
                    "one graph"
                ),
            ),
            (
                lambda: ortops.grad(y, x, seed=strange),
                ortops.ModelError,
                (
                    "grad: seed Tensor('strange', float32, [3]) is on a different tape than "
                    "y Tensor('ReduceSum_output', float32, []); all tensors must belong to "
                    "one graph"
                ),
            ),
            (
                lambda: ortops.grad(y, k),
                ortops.ModelError,
                "grad: x must be a floating-point tensor, got Tensor('k', int64, [3])",
            ),
            (
                lambda: ortops.grad(k, x),
                ortops.ModelError,
                "grad: y must be a floating-point tensor, got Tensor('k', int64, [3])",
            ),
            (
                lambda: ortops.grad(y, [x, x]),
                ortops.ArgumentError,
                "grad: x Tensor('x', float32, [3]) is listed 2 times; list it once",
            ),
            (
                lambda: ortops.grad(y, []),
                ortops.ArgumentError,
                "grad: xs is empty; pass at least one Tensor",
            ),
            (
                lambda: ortops.grad(1.0, x),  # type: ignore[call-overload]
                ortops.ArgumentError,
                "grad: y must be a Tensor, got 1.0",
            ),
            (
                lambda: ortops.grad(y, ["x"]),  # type: ignore[list-item]
                ortops.ArgumentError,
                "grad: x must be a Tensor, got 'x'",
            ),
            (
                lambda: ortops.grad(y, 3),  # type: ignore[call-overload]
                ortops.ArgumentError,
                "grad: xs must be a Tensor or a sequence of Tensors, got 3",
            ),
            (
                lambda: ortops.grad(h, x, seed="a"),
                ortops.ModelError,
                ("grad: seed must be numbers like y Tensor('Pow_output', float32, [3]), got 'a'"),
            ),
            (
                lambda: ortops.grad(h, x, seed=[[1], [2, 3]]),
                ortops.ModelError,
                (
                    "grad: seed must be numbers like y Tensor('Pow_output', float32, [3]), "
                    "got [[1], [2, 3]]"
                ),
            ),
            (
                lambda: ortops.grad(h, x, seed=np.ones(2, np.float32)),
                ortops.ModelError,
                (
                    "grad: seed must have the shape and dtype of y Tensor('Pow_output', "
                    "float32, [3]), got Tensor('Constant_1_output', float32, [2])"
                ),
            ),
            (
                lambda: ortops.grad(h, x, seed=np.ones(3)),
                ortops.ModelError,
                (
                    "grad: seed must have the shape and dtype of y Tensor('Pow_output', "
                    "float32, [3]), got Tensor('Constant_2_output', float64, [3])"
                ),
            ),
            (
                lambda: ortops.grad(y, [h, x]),
                ortops.ModelError,
                (
                    "Gradient node 'Gradient': 'Pow_output' is computed from 'x', and both "
                    "are listed in xs and zs; these tensors must not depend on each other"
                ),
            ),
        ]
        for call, error, message in cases:
            with pytest.raises(error) as raised:
                call()
            assert str(raised.value) == message
        assert {node.op_type for node in list(tape.graph)[count:]} <= {"Constant"}
        tape.output(ortops.grad(y, x), "slope")  # what was refused has left nothing
    assert outputs(tape.model(), {"x": X[0].astype(np.float32), "k": np.zeros(3, np.int64)})


def test_a_rule_may_ask_for_a_gradient() -> None:
    @ortops.vjp("Cubed", domain="own")
    def cubed(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
        return g * ortops.grad(x * x * x, x)

    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        cubed (double[3] x) => (double[3] z) { y = own.Cubed (x)  z = Mul (x, x) }""")
    model.graph.value_info.append(helper.make_tensor_value_info("y", 11, [3]))
    twice = derivatives.gradient(derivatives.gradient(model, y="y"), y="d_y_d_x", lowered=True)
    assert {node.domain for node in twice.graph.node} == {""}  # nobody reads y, which is dropped
    found = run_by_name(twice, {"x": X[0]})
    np.testing.assert_allclose(found["d_y_d_x"], 3 * X[0] ** 2, rtol=1e-12)
    np.testing.assert_allclose(found["d_d_y_d_x_d_x"], 6 * X[0], rtol=1e-12)


# ----------------------------------------------------------------------------- a model in, one out

TOLERANCES = {np.float16: 2e-2, np.float32: 1e-5, np.float64: 1e-12}


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("batch", ["batch", 2])
def test_a_layer(dtype: Any, batch: Any) -> None:
    model = layer(dtype, batch)
    before = model.SerializeToString()
    x, close = X.astype(dtype), {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    by_y, by_x = rng.standard_normal((2, 4)), rng.standard_normal((2, 3))
    jacobian, hessian = jacobian_of_layer(X), hessian_of_layer(X)
    found = both(derivatives.gradient, model, {"x": x})
    np.testing.assert_allclose(found["y"], np.tanh(X @ W), **close)
    np.testing.assert_allclose(found["d_y_d_x"], jacobian.sum(axis=(0, 1)), **close)
    found = both(derivatives.vjp, model, {"x": x, "seed_y": by_y.astype(dtype)})
    np.testing.assert_allclose(found["vjp_x"], np.einsum("bi,bicj", by_y, jacobian), **close)
    found = both(derivatives.jvp, model, {"x": x, "seed_x": by_x.astype(dtype)})
    np.testing.assert_allclose(found["jvp_y"], np.einsum("bicj,cj", jacobian, by_x), **close)
    found = both(derivatives.hvp, model, {"x": x, "seed_x": by_x.astype(dtype)})
    np.testing.assert_allclose(found["hvp_x"], np.einsum("bjck,ck", hessian, by_x), **close)
    found = both(derivatives.jacobian, model, {"x": x})
    np.testing.assert_allclose(found["d_y_d_x"], jacobian, **close)
    assert {value.dtype for value in found.values()} == {np.dtype(dtype)}
    assert model.SerializeToString() == before


def test_inputs_and_outputs_are_the_models_own_and_then_the_new_ones() -> None:
    model = layer(np.float32)
    for function, inputs, puts_out in (
        (derivatives.gradient, {}, {"d_y_d_x": ["batch", 3]}),
        (derivatives.vjp, {"seed_y": ["batch", 4]}, {"vjp_x": ["batch", 3]}),
        (derivatives.jvp, {"seed_x": ["batch", 3]}, {"jvp_y": ["batch", 4]}),
        (derivatives.hvp, {"seed_x": ["batch", 3]}, {"hvp_x": ["batch", 3]}),
        (derivatives.jacobian, {}, {"d_y_d_x": ["batch", 4, "batch", 3]}),
    ):
        for lowered in (False, True):
            graph = function(model, lowered=lowered).graph
            own = {"x": ["batch", 3]}
            assert {v.name: shape_of(v) for v in graph.input} == own | inputs
            assert {v.name: shape_of(v) for v in graph.output} == {"y": ["batch", 4]} | puts_out
            assert {v.type.tensor_type.elem_type for v in graph.output} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, True])
def test_several_seeds_are_as_many_runs(seeds: int | bool) -> None:
    model = layer()
    axis = "seeds" if seeds is True else 3
    for function, place, like in (
        (derivatives.vjp, "seed_y", (2, 4)),
        (derivatives.jvp, "seed_x", (2, 3)),
        (derivatives.hvp, "seed_x", (2, 3)),
    ):
        given = rng.standard_normal((3, *like))
        found = both(function, model, {"x": X, place: given}, seeds=seeds)
        name = list(found)[-1]
        for seed, result in zip(given, found[name], strict=True):
            expected = both(function, model, {"x": X, place: seed})
            np.testing.assert_allclose(result, expected[name], rtol=1e-12)
        graph = function(model, seeds=seeds).graph
        assert {shape_of(value)[0] for value in (graph.input[-1], graph.output[-1])} == {axis}
        if seeds is True:
            single = both(function, model, {"x": X, place: given[:1]}, seeds=True)
            np.testing.assert_allclose(single[name], found[name][:1], rtol=1e-12)


def test_seeds_share_one_forward_pass() -> None:
    for function in (derivatives.vjp, derivatives.jvp, derivatives.hvp):
        graph = function(layer(), seeds=5, lowered=True).graph
        (scan,) = [node for node in graph.node if node.op_type == "Scan"]
        inside = Counter(node.op_type for node in scan.attribute[0].g.node)
        assert inside["Tanh"] == 0
        products = inside["MatMul"] + inside["Gemm"]
        assert products == (2 if function is derivatives.hvp else 1)
        assert Counter(node.op_type for node in graph.node)["Tanh"] == 1


def test_a_jvp_is_forward_mode() -> None:
    """Its nodes are the model's and those of the linear map: no backward pass is left."""
    graph = derivatives.jvp(layer(), lowered=True).graph
    counts = Counter(node.op_type for node in graph.node)
    assert counts["MatMul"] + counts["Gemm"] == 2
    fixed = derivatives.jvp(layer(batch=2), lowered=True).graph
    assert {node.op_type for node in fixed.node} <= {
        "MatMul",
        "Gemm",
        "Tanh",
        "Mul",
        "Sub",
        "Constant",
    }


def test_a_hessian_is_the_jacobian_of_the_gradient() -> None:
    for lowered in (False, True):
        slope = derivatives.gradient(layer(), lowered=lowered)
        found = both(derivatives.jacobian, slope, {"x": X}, y="d_y_d_x")
        assert list(found) == ["y", "d_y_d_x", "d_d_y_d_x_d_x"]
        np.testing.assert_allclose(found["d_d_y_d_x_d_x"], hessian_of_layer(X), rtol=1e-12)
    back = derivatives.gradient(derivatives.jacobian(layer()), y="d_y_d_x")
    np.testing.assert_allclose(
        outputs(back, {"x": X})["d_d_y_d_x_d_x"],
        np.einsum("bicjdk->dk", third(X)),
        rtol=1e-6,
        atol=1e-8,
    )


def third(x: Array) -> Array:
    return differences(jacobian_of_layer, x)


def test_by_parameters_and_by_what_is_between() -> None:
    with Tape(name="two") as tape:
        x = tape.input("x", np.float64, ["batch", 3])
        w = tape.initializer("w", W)
        h = (x @ w).with_shape(["batch", 4])
        h.value.name = tape.names.unique("h")
        tape.output(op.Tanh(h), "y")
    found = both(derivatives.jacobian, tape.model(), {"x": X}, xs="w")
    slope = 1 - np.tanh(X @ W) ** 2
    expected = np.einsum("bi,bj,ik->bijk", slope, X, np.eye(4))
    np.testing.assert_allclose(found["d_y_d_w"], expected, rtol=1e-12)
    found = both(derivatives.jacobian, tape.model(), {"x": X}, xs=["h"], y="y")
    expected = np.einsum("bi,bc,ik->bick", slope, np.eye(2), np.eye(4))
    np.testing.assert_allclose(found["d_y_d_h"], expected, rtol=1e-12)
    found = both(derivatives.jacobian, tape.model(), {"x": X}, y="h")
    np.testing.assert_allclose(found["d_h_d_x"], np.einsum("ji,bc->bicj", W, np.eye(2)), rtol=1e-12)


def several() -> onnx.ModelProto:
    """Two floating-point inputs and one of integers, three outputs, one of them a number."""
    with Tape(name="several") as tape:
        a = tape.input("a", np.float64, ["n", 2])
        index = tape.input("index", np.int64, [])
        b = tape.input("b", np.float64, [2])
        tape.output(index + 1, "next")
        tape.output((a * b + op.Gather(a, index, axis=0)) ** 2, "p")
        tape.output((op.Sin(a).sum() * b[0]), "q")
    return tape.model()


def reference(a: Array, b: Array) -> dict[str, Array]:
    return {"p": (a * b + a[1]) ** 2, "q": np.sin(a).sum() * b[0]}


A, B = rng.standard_normal((3, 2)), rng.standard_normal(2)
FEEDS = {"a": A, "b": B, "index": np.array(1)}


def jacobians() -> dict[tuple[str, str], Array]:
    """The Jacobians of p and q by a and b, by differences."""
    found = {}
    for y in ("p", "q"):
        found[y, "a"] = differences(lambda a, y=y: reference(a, B)[y], A)
        found[y, "b"] = differences(lambda b, y=y: reference(A, b)[y], B)
    return found


@pytest.mark.slow
def test_several_inputs_and_outputs() -> None:
    close = {"rtol": 1e-7, "atol": 1e-7}
    expected = jacobians()
    found = both(derivatives.jacobian, several(), FEEDS, y=["p", "q"])
    assert list(found)[3:] == ["d_p_d_a", "d_p_d_b", "d_q_d_a", "d_q_d_b"]
    for (y, x), value in expected.items():
        np.testing.assert_allclose(found[f"d_{y}_d_{x}"], value, **close)
    found = both(derivatives.gradient, several(), FEEDS)  # of p, the first with floats
    for x in ("a", "b"):
        axes = tuple(range(2))
        np.testing.assert_allclose(found[f"d_p_d_{x}"], expected["p", x].sum(axis=axes), **close)

    of = {name: rng.standard_normal(np.shape(reference(A, B)[name])) for name in ("p", "q")}
    by = {"a": rng.standard_normal((3, 2)), "b": rng.standard_normal(2)}
    seeds = {f"seed_{name}": np.asarray(value) for name, value in of.items()}
    found = both(derivatives.vjp, several(), FEEDS | seeds, y=["p", "q"])
    for x in ("a", "b"):
        total = np.tensordot(of["p"], expected["p", x], 2) + of["q"] * expected["q", x]
        np.testing.assert_allclose(found[f"vjp_{x}"], total, **close)

    seeds = {f"seed_{name}": value for name, value in by.items()}
    found = both(derivatives.jvp, several(), FEEDS | seeds, y=["p", "q"])
    for y in ("p", "q"):
        total = np.tensordot(expected[y, "a"], by["a"], 2) + expected[y, "b"] @ by["b"]
        np.testing.assert_allclose(found[f"jvp_{y}"], total, **close)

    slopes = derivatives.gradient(several(), y="q")

    def slope(name: str, a: Array, b: Array) -> Array:
        return outputs(slopes, {"a": a, "b": b, "index": np.array(1)})[f"d_q_d_{name}"]

    found = both(derivatives.hvp, several(), FEEDS | seeds, y="q")
    for name in ("a", "b"):
        step = 1e-5
        ends = [slope(name, A + s * by["a"], B + s * by["b"]) for s in (step, -step)]
        np.testing.assert_allclose(
            found[f"hvp_{name}"], (ends[0] - ends[1]) / (2 * step), rtol=1e-7
        )


def test_names_that_are_taken_get_a_number() -> None:
    with Tape(name="taken") as tape:
        x = tape.input("x", np.float64, [2])
        seed = tape.input("seed_y", np.float64, ["seeds"])
        tape.output(x**2, "y")
        tape.output(x * 3.0, "vjp_x")
        tape.output(x * seed.sum(), "d_y_d_x")
    made = derivatives.vjp(tape.model(), xs="x", seeds=True)
    assert [value.name for value in made.graph.input] == ["x", "seed_y", "seed_y_1"]
    assert [value.name for value in made.graph.output] == ["y", "vjp_x", "d_y_d_x", "vjp_x_1"]
    assert shape_of(made.graph.input[2]) == ["seeds_1", 2]
    made = derivatives.gradient(tape.model(), xs="x")
    assert made.graph.output[-1].name == "d_y_d_x_1"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["If", "Scan", "Loop"])
def test_models_with_graphs_inside(kind: str) -> None:
    text = {
        "If": """
            positive = Greater (total, zero)
            y = If (positive) <
                then_branch = yes () => (double[batch, 3] a) { a = Mul (x, x) },
                else_branch = no () => (double[batch, 3] b) { b = Sin (x) } >""",
        "Scan": """
            start = ReduceMean <keepdims = 0> (x, first)
            last, y = Scan <num_scan_inputs = 1, body = step (double[3] s, double[3] r)
                => (double[3] t, double[3] u) { p = Mul (s, r)  t = Sin (p)  u = Add (t, r) }>
                (start, x)""",
        "Loop": """
            y = Loop (three, yes, x) <body = step (int64 i, bool c, double[batch, 3] s)
                => (bool d, double[batch, 3] t) { d = Identity (c)  t = Sin (s) }>""",
    }[kind]
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 21]>
        inside (double[batch, 3] x) => (double[batch, 3] y) <double zero = {{0}},
            int64[1] first = {{0}}, int64 three = {{3}}, bool yes = {{1}}>
        {{ total = ReduceSum <keepdims = 0> (x) {text} }}""")
    onnx.checker.check_model(model, full_check=True)
    session = plain_session(model)

    def function(x: Array) -> Array:
        return session.run(["y"], {"x": x})[0]

    slopes = plain_session(derivatives.gradient(model, lowered=True))

    def slope(x: Array) -> Array:
        return slopes.run(["d_y_d_x"], {"x": x})[0]

    for x in (X, -X):
        close = {"rtol": 1e-6, "atol": 1e-8}
        jacobian = differences(function, x)
        found = both(derivatives.jacobian, model, {"x": x})
        np.testing.assert_allclose(found["d_y_d_x"], jacobian, **close)
        seeds = rng.standard_normal((2, 2, 3))
        found = both(derivatives.jvp, model, {"x": x, "seed_x": seeds}, seeds=2)
        np.testing.assert_allclose(
            found["jvp_y"], np.einsum("bicj,scj->sbi", jacobian, seeds), **close
        )
        found = both(derivatives.vjp, model, {"x": x, "seed_y": seeds}, seeds=True)
        np.testing.assert_allclose(
            found["vjp_x"], np.einsum("sbi,bicj->scj", seeds, jacobian), **close
        )
        hessian = differences(slope, x)
        found = both(derivatives.hvp, model, {"x": x, "seed_x": seeds[0]})
        np.testing.assert_allclose(found["hvp_x"], np.einsum("bicj,cj", hessian, seeds[0]), **close)


def test_no_rows_have_derivatives_and_no_seeds_fail_in_the_run() -> None:
    """onnxruntime's Scan takes no empty sequences; one run without an axis for seeds does."""
    made = derivatives.jacobian(layer(), lowered=True)
    assert run_by_name(made, {"x": np.zeros((0, 3))})["d_y_d_x"].shape == (0, 4, 0, 3)
    made = derivatives.vjp(layer(), seeds=True, lowered=True)
    with pytest.raises(Exception, match="Scan"):
        run_by_name(made, {"x": X, "seed_y": np.zeros((0, 2, 4))})
    made = derivatives.jvp(layer(), lowered=True)
    found = run_by_name(made, {"x": np.zeros((0, 3)), "seed_x": np.zeros((0, 3))})
    assert found["jvp_y"].shape == (0, 4)


def test_where_the_rank_of_y_is_not_known() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        unknown (double[n] x, int64[r] sizes) => (double[n] z)
        { y = Reshape (x, sizes)  z = Mul (x, x) }""")
    feeds = {"x": X.reshape(-1), "sizes": np.array([2, 3])}
    made = derivatives.jvp(model, y="y", lowered=True)
    found = plain_session(made).run(["jvp_y"], feeds | {"seed_x": feeds["x"]})[0]
    np.testing.assert_array_equal(found, X)
    made = derivatives.jacobian(model, y="y", lowered=True)
    found = plain_session(made).run(["d_y_d_x"], feeds)[0]
    np.testing.assert_array_equal(found, np.eye(6).reshape(2, 3, 6))


# ------------------------------------------------------------------------------ files and versions


def test_older_models_are_converted(caplog: pytest.LogCaptureFixture) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 7, opset_import: ["" : 12]>
        old (float[n, 3] x) => (float[n] y)
        { s = ReduceSum <axes = [1], keepdims = 0> (x)  y = Exp (s) }""")
    x = X.astype(np.float32)
    with caplog.at_level(logging.WARNING, "ortops"):
        found = both(derivatives.jacobian, model, {"x": x})
    assert "the model was converted from opset 12 to 21" in caplog.messages
    expected = np.einsum("b,bc,j->bcj", np.exp(x.sum(axis=1)), np.eye(2), np.ones(3))
    np.testing.assert_allclose(found["d_y_d_x"], expected, rtol=1e-5)


def test_bytes_paths_and_external_data(tmp_path: Path) -> None:
    model = layer()
    path = tmp_path / "layer.onnx"
    big = layer()
    onnx.save(big, path, save_as_external_data=True, location="layer.data", size_threshold=0)
    for given in (model.SerializeToString(), path, str(path)):
        for lowered in (False, True):
            made = derivatives.jacobian(given, lowered=lowered)
            out = tmp_path / "out.onnx"
            onnx.save(made, out)
            found = ortops.InferenceSession(str(out)).run(["d_y_d_x"], {"x": X})[0]
            np.testing.assert_allclose(found, jacobian_of_layer(X), rtol=1e-12)
    assert made.graph.initializer[0].external_data


def test_functions_are_inlined() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        calls (double[n, 3] x) => (double[n, 3] y) { y = own.cube (x) }
        <domain: "own", opset_import: ["" : 21]>
        cube (a) => (c) { b = Mul (a, a)  c = Mul (a, b) }""")
    found = both(derivatives.gradient, model, {"x": X})
    np.testing.assert_allclose(found["d_y_d_x"], 3 * X**2, rtol=1e-12)


def test_inputs_with_defaults_are_differentiated_where_they_are_named() -> None:
    with Tape(name="adapter") as tape:
        x = tape.input("x", np.float64, ["batch", 3])
        w = tape.initializer("w", W)
        tape.graph.inputs.append(w.value)
        tape.output(op.Tanh(x @ w), "y")
    made = derivatives.gradient(tape.model())
    assert [value.name for value in made.graph.output] == ["y", "d_y_d_x"]
    other = 2 * W
    found = both(derivatives.gradient, tape.model(), {"x": X, "w": other}, xs="w")
    expected = X.T @ (1 - np.tanh(X @ other) ** 2)
    np.testing.assert_allclose(found["d_y_d_w"], expected, rtol=1e-12)


def test_a_trainable_file_stays_one(tmp_path: Path) -> None:
    trainable = ortops.build_training_model(
        layer(np.float32), loss="MeanSquaredError", optimizer="SGD"
    )
    made = derivatives.jacobian(trainable)
    session = ortops.TrainingSession(made)
    feeds = {"x": X.astype(np.float32), "targets": np.zeros((2, 4), np.float32)}
    assert session.step(feeds)["loss"] == ortops.TrainingSession(trainable).step(feeds)["loss"]
    assert run_by_name(ortops.lower(made), feeds)["d_y_d_x"].shape == (2, 4, 2, 3)


def test_refusals() -> None:
    with Tape(name="integers") as tape:
        ids = tape.input("ids", np.int64, ["n"])
        table = tape.initializer("table", W)
        tape.output(op.Gather(table, ids), "found")
    integers = tape.model()
    with Tape(name="none") as tape:
        tape.output(tape.input("x", np.float32, [2]) > 0, "positive")
    none = tape.model()
    two = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        two (float[n] x) => (float[n] y) { h = Exp (x)  y = Exp (h) }""")
    trees = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>
        trees (float[n, 2] x) => (float[n, 1] y) { h = own.Unknown (x)  y = Exp (h) }""")
    trees.opset_import.add(domain="own", version=1)
    gradient, jvp = derivatives.gradient, derivatives.jvp
    cases: list[tuple[Callable[[], object], type[ortops.OrtopsError], str]] = [
        (
            lambda: gradient(integers),
            ortops.ModelError,
            (
                "xs: the model has no floating-point input, only 'ids' (INT64); pass names "
                "of other tensors as xs=, for example the output of an embedding"
            ),
        ),
        (
            lambda: gradient(integers, xs="ids"),
            ortops.ModelError,
            "xs: tensor 'ids' must be a floating-point tensor, got type INT64",
        ),
        (
            lambda: gradient(integers, xs="tabel"),
            ortops.ModelError,
            "xs: the main graph has no tensor 'tabel'; did you mean 'table'?",
        ),
        (
            lambda: gradient(integers, xs=[]),
            ortops.ArgumentError,
            "xs is empty; name at least one tensor, or omit xs",
        ),
        (
            lambda: gradient(none),
            ortops.ModelError,
            (
                "y: the model has no floating-point output, only 'positive' (BOOL); pass "
                "the name of another tensor as y="
            ),
        ),
        (
            lambda: gradient(none, y="positive"),
            ortops.ModelError,
            "y: tensor 'positive' must be a floating-point tensor, got type BOOL",
        ),
        (
            lambda: gradient(two, xs=["x", "x"]),
            ortops.ArgumentError,
            "xs: 'x' is listed twice; list it once",
        ),
        (
            lambda: gradient(two, xs=3),  # type: ignore[arg-type]
            ortops.ArgumentError,
            "xs must be one or more names of tensors, got 3",
        ),
        (
            lambda: gradient(two, y=[3]),  # type: ignore[list-item]
            ortops.ArgumentError,
            "y must be one or more names of tensors, got 3",
        ),
        (
            lambda: gradient(two, xs=["x", "h"]),
            ortops.ModelError,
            (
                "Gradient node 'Gradient': 'h' is computed from 'x', and both are listed in "
                "xs and zs; these tensors must not depend on each other"
            ),
        ),
        (
            lambda: gradient(trees, xs="h"),
            ortops.ModelError,
            "xs: the type of tensor 'h' is unknown; add a value_info for it",
        ),
        (
            lambda: jvp(two, seeds=0),
            ortops.ArgumentError,
            "seeds (a number, True or None) must be an integer >= 1, got 0",
        ),
        (
            lambda: jvp(two, seeds=1.5),  # type: ignore[arg-type]
            ortops.ArgumentError,
            "seeds (a number, True or None) must be an integer >= 1, got 1.5",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == message
    # protobuf's part of the message depends on its version
    with pytest.raises(ortops.ModelError, match=r"^7 bytes: not an ONNX model \("):
        gradient(b"nothing")
    assert jvp(two, seeds=np.int64(3)) == jvp(two, seeds=3)  # type: ignore[arg-type]  # on purpose
    assert gradient(trees)  # the node says so where it is lowered
    with pytest.raises(ortops.UnsupportedError, match="no gradient rule for Unknown"):
        gradient(trees, lowered=True)


# ------------------------------------------------------------------------------------ and trained


def energy_model() -> onnx.ModelProto:
    with Tape(name="energy") as tape:
        positions = tape.input("positions", np.float32, ["atoms", 3])
        w = tape.initializer("w", W.astype(np.float32))
        v = tape.initializer("v", np.linspace(-1, 1, 4, dtype=np.float32))
        tape.output((op.Tanh(positions @ w) * v).sum(), "energy")
    return tape.model()


def force_loss(energy: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    return ((-ortops.grad(energy, positions) - targets) ** 2).mean()


@pytest.mark.needs("onnxruntime>=1.27")  # older ones end the process: functions in functions
def test_a_loss_of_forces_trains(tmp_path: Path) -> None:
    """The loss and its slopes are those of the closed form of the forces."""
    declared = {"targets": (np.float32, ["atoms", 3])}
    trainable = ortops.build_training_model(
        energy_model(), loss=force_loss, optimizer="SGD", inputs=declared
    )
    targets = rng.standard_normal((2, 3)).astype(np.float32)
    feeds = {"positions": X.astype(np.float32), "targets": targets}

    def loss(w: Array, v: Array) -> Array:
        slope = (1 - np.tanh(X @ w) ** 2) * v
        return np.asarray(((-slope @ w.T - targets) ** 2).mean())

    session = ortops.TrainingSession(trainable)
    session.learning_rate = 0.5
    v = np.linspace(-1, 1, 4)
    np.testing.assert_allclose(session.step(feeds)["loss"], loss(W, v), rtol=1e-5)
    by_w, by_v = differences(lambda w: loss(w, v), W), differences(lambda v: loss(W, v), v)
    np.testing.assert_allclose(session.state["w"], W - 0.5 * by_w, atol=1e-5)
    np.testing.assert_allclose(session.state["v"], v - 0.5 * by_v, atol=1e-5)

    session.save(tmp_path / "saved.onnx")
    resumed = ortops.TrainingSession(tmp_path / "saved.onnx")
    assert resumed.step(feeds)["loss"] == session.step(feeds)["loss"]
    step = plain_session(ortops.lower(ortops.step_graph(trainable)))
    np.testing.assert_allclose(step.run(["loss"], feeds)[0], loss(W, v), rtol=1e-5)
    assert plain_session(ortops.step_graph(trainable)).run(["loss"], feeds)


def test_a_loss_of_forces_beside_layers_that_train_otherwise() -> None:
    """What Dropout and BatchNormalization do in training, the gradient in the loss sees too."""
    rows = rng.standard_normal((8, 3)).astype(np.float32)
    with Tape(name="normalized") as tape:
        x = tape.input("positions", np.float32, ["atoms", 3])
        w = tape.initializer("w", W.astype(np.float32))
        ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
        scale, bias = tape.initializer("scale", ones), tape.initializer("bias", zeros)
        mean, variance = tape.initializer("mean", zeros + 3), tape.initializer("variance", ones * 9)
        h = op.BatchNormalization(x @ w, scale, bias, mean, variance, epsilon=1e-5)
        tape.output(op.Tanh(h).sum(), "energy")
    trainable = ortops.build_training_model(
        tape.model(), loss=force_loss, optimizer="SGD", batch_normalization="train",
        inputs={"targets": (np.float32, ["atoms", 3])},
    )  # fmt: skip
    session = ortops.TrainingSession(trainable)
    found = session.step({"positions": rows, "targets": np.zeros((8, 3), np.float32)})["loss"]

    def energy(x: Array) -> Array:
        h = x @ W
        return np.tanh((h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5)).sum()

    forces = differences(energy, rows.astype(np.float64))
    np.testing.assert_allclose(found, (forces**2).mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("lowered", [False, True])
def test_weights_are_trained_through_entries_of_a_jacobian(tmp_path: Path, lowered: bool) -> None:
    model = derivatives.jacobian(layer(np.float32), lowered=lowered)

    def contraction(d_y_d_x: Tensor) -> Tensor:
        return (d_y_d_x**2).sum()

    trainable = ortops.build_training_model(model, loss=contraction, optimizer="SGD")
    session = ortops.TrainingSession(trainable)
    session.learning_rate = 0.01
    feeds = {"x": X.astype(np.float32)}

    def loss(w: Array) -> Array:
        slope = 1 - np.tanh(X @ w) ** 2
        return np.asarray((np.einsum("bi,ji->bij", slope, w) ** 2).sum())

    np.testing.assert_allclose(session.step(feeds)["loss"], loss(W), rtol=1e-5)
    np.testing.assert_allclose(session.state["w"], W - 0.01 * differences(loss, W), atol=1e-5)
    session.save(tmp_path / "saved.onnx")
    resumed = ortops.TrainingSession(tmp_path / "saved.onnx")
    for _ in range(2):
        assert resumed.step(feeds)["loss"] == session.step(feeds)["loss"]
    assert plain_session(ortops.step_graph(trainable)).run(["loss"], feeds)
    served = session.inference_model()
    assert outputs(served, feeds)["d_y_d_x"].shape == (2, 4, 2, 3)


def test_the_step_graph_of_products_with_a_hessian() -> None:
    """Its body reads what another Gradient node gives."""
    model = derivatives.hvp(layer(np.float32), seeds=2)
    trainable = ortops.build_training_model(
        model, loss=lambda hvp_x: (hvp_x**2).sum(), optimizer="SGD"
    )
    feeds = {"x": X.astype(np.float32), "seed_x": np.ones((2, 2, 3), np.float32)}
    expected = 2 * (hessian_of_layer(X).sum(axis=(2, 3)) ** 2).sum()
    found = plain_session(ortops.step_graph(trainable)).run(["loss"], feeds)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(
        ortops.TrainingSession(trainable).step(feeds)["loss"], expected, rtol=1e-5
    )


def test_check_shows_derivatives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "jacobian.onnx"
    onnx.save(derivatives.jacobian(layer(np.float32)), path)
    assert main(["check", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "d_y_d_x" in json.dumps(told)
    assert "the model has Gradient nodes of its own" in json.dumps(told)


# ------------------------------------------------------------------------------ PyTorch and JAX


def network() -> onnx.ModelProto:
    """Convolution with uneven pads and a stride, a pool, and a dense layer."""
    with Tape(name="network") as tape:
        x = tape.input("x", np.float32, ["batch", 2, 7, 6])
        k = tape.initializer("k", KERNEL.astype(np.float32))
        h = op.Conv(x, k, pads=[1, 0, 2, 1], strides=[2, 1])
        h = op.AveragePool(op.Softplus(h), kernel_shape=[2, 2])
        tape.output(op.Tanh(op.Flatten(h) @ tape.initializer("w", DENSE.astype(np.float32))), "y")
    return tape.model()


KERNEL = rng.standard_normal((3, 2, 3, 2)) / 3
DENSE = rng.standard_normal((45, 4)) / 6
IMAGES = rng.standard_normal((2, 2, 7, 6))


@pytest.mark.quick(1)
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["layer", "network"])
def test_next_to_torch(kind: str) -> None:
    import torch
    from torch.autograd import functional

    def dense(x: Any) -> Any:
        return torch.tanh(x @ torch.from_numpy(W))

    def convolution(x: Any) -> Any:
        padded = torch.nn.functional.pad(x, (0, 1, 1, 2))
        h = torch.nn.functional.conv2d(padded, torch.from_numpy(KERNEL), stride=(2, 1))
        h = torch.nn.functional.avg_pool2d(torch.nn.functional.softplus(h), 2, stride=1)
        return torch.tanh(h.flatten(1) @ torch.from_numpy(DENSE))

    function = dense if kind == "layer" else convolution
    model = layer(np.float32) if kind == "layer" else network()
    array = X if kind == "layer" else IMAGES
    x = torch.from_numpy(array)
    v, u = rng.standard_normal(array.shape), rng.standard_normal((2, 4))
    tv, tu = torch.from_numpy(v), torch.from_numpy(u)
    feeds = {"x": array.astype(np.float32)}
    by_x = feeds | {"seed_x": v.astype(np.float32)}
    by_y = feeds | {"seed_y": u.astype(np.float32)}
    compared = {
        "y": (derivatives.jacobian, feeds, function(x)),
        "d_y_d_x": (derivatives.jacobian, feeds, functional.jacobian(function, x)),
        "vjp_x": (derivatives.vjp, by_y, functional.vjp(function, x, tu)[1]),
        "jvp_y": (derivatives.jvp, by_x, functional.jvp(function, x, tv)[1]),
        "hvp_x": (derivatives.hvp, by_x, functional.hvp(lambda x: function(x).sum(), x, tv)[1]),
    }
    for name, (make, given, expected) in compared.items():
        found = both(make, model, given)[name]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.torch
def test_a_hessian_next_to_jax() -> None:
    jax = pytest.importorskip("jax")

    def function(x: Any) -> Any:
        return jax.numpy.tanh(x @ W.astype(np.float32)).sum()

    x = X.astype(np.float32)
    found = both(derivatives.jacobian, derivatives.gradient(layer(np.float32)), {"x": x},
                 y="d_y_d_x")  # fmt: skip
    expected = np.asarray(jax.hessian(function)(x))
    np.testing.assert_allclose(found["d_d_y_d_x_d_x"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly(1)
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_an_encoder_next_to_torch(exporter: str, caplog: pytest.LogCaptureFixture) -> None:
    """A BERT of random weights, by its embedded tokens, as both exporters of PyTorch write it."""
    import torch
    from test_exported_models import Export, exported, pretrained
    from torch.autograd import functional

    names = ("inputs_embeds", "attention_mask")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 12, "vocab_size": 9, "max_position_embeddings": 8}
    build = pretrained("BertModel", names, **sizes, attn_implementation="eager")
    torch.manual_seed(0)
    module = build().eval()
    x, mask = torch.randn(2, 5, 8), torch.ones(2, 5).long()
    mask[0, 3:] = 0
    axes = {0: "batch", 1: "length"}
    example = Export(build, dict, dynamic=dict.fromkeys(names, axes))
    with caplog.at_level(logging.CRITICAL):
        model = exported(example, module, {names[0]: x, names[1]: mask}, exporter)

    def function(x: Any) -> Any:
        return module(x, mask)

    v, u = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    feeds = {names[0]: x.numpy(), names[1]: mask.numpy()}
    by_x, by_y = feeds | {"seed_inputs_embeds": v.numpy()}, feeds | {"seed_y": u.numpy()}

    def total(x: Any) -> Any:
        return (function(x) * u).sum()

    weighted = derivatives.vjp(model)
    compared = [
        (derivatives.jacobian, model, feeds, functional.jacobian(function, x)),
        (derivatives.vjp, model, by_y, functional.vjp(function, x, u)[1]),
        (derivatives.jvp, model, by_x, functional.jvp(function, x, v)[1]),
    ]
    for make, given, fed, expected in compared:
        found = list(both(make, given, fed).values())[-1]
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-5)
    # The output is normalized, so that its plain sum has no curvature: a weighted one has.
    product = derivatives.jvp(weighted, xs="inputs_embeds", y="vjp_inputs_embeds")
    found = outputs(product, by_x | by_y)["jvp_vjp_inputs_embeds"]
    expected = functional.hvp(total, x, v)[1].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
