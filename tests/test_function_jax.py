"""Function.jax: a model as a function of JAX, under all of its transformations."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from models import lenet
from ortops import Function, Tape, op
from tests.test_function import (
    BRANCH,
    LOOKUP,
    MASKED,
    POWER,
    W1,
    X,
    jacobian,
    loss,
    network,
    numpy_network,
)

pytestmark = pytest.mark.optional("jax", "jax")

ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def jax() -> Any:
    return importlib.import_module("jax")


@pytest.fixture
def x64(jax: Any) -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def f() -> Function:
    return Function(network())


@pytest.fixture(scope="module")
def scalar() -> Function:
    return Function(network(scalar=True))


def check_grads(*args: Any, **settings: Any) -> None:
    importlib.import_module("jax.test_util").check_grads(*args, order=2, **settings)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_values_and_derivatives_of_second_order(jax: Any, f: Function, scalar: Function) -> None:
    g, h = f.jax(), scalar.jax()
    for call in (g, jax.jit(g)):
        assert np.array_equal(call(X), f(X))
    check_grads(g, (X,), modes=("fwd", "rev"))
    check_grads(jax.jit(h), (X,), modes=("fwd", "rev"))
    assert np.allclose(jax.jit(jax.grad(h))(X), jacobian(loss, X), rtol=1e-10)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("outer", ["jacfwd", "jacrev"])
@pytest.mark.parametrize("inner", ["jacfwd", "jacrev"])
def test_jacobians(jax: Any, f: Function, scalar: Function, outer: str, inner: str) -> None:
    outer, inner = getattr(jax, outer), getattr(jax, inner)
    assert np.allclose(outer(f.jax())(X), jacobian(numpy_network, X), rtol=1e-10)
    assert np.allclose(jax.jit(outer(inner(scalar.jax())))(X), scalar.hessian(X), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_parameters(jax: Any, scalar: Function) -> None:
    g = scalar.jax()
    other = RNG.normal(size=W1.shape)
    assert g(X, parameters={"w1": other}) == pytest.approx(loss(X, other), rel=1e-12)
    assert np.allclose(
        jax.grad(lambda p: g(X, parameters=p))({"w1": other})["w1"],
        jacobian(lambda w: loss(X, w), other),
        rtol=1e-10,
    )
    everything = dict(scalar.parameters)
    check_grads(lambda x, p: g(x, parameters=p), (X, everything), modes=("fwd", "rev"))
    changed = scalar.with_parameters({"w1": other}).jax()
    assert changed(X) == pytest.approx(loss(X, other), rel=1e-12)
    assert changed(X, parameters={"w1": W1}) == pytest.approx(loss(X), rel=1e-12)
    slope = jax.grad(changed)(X)
    assert np.allclose(slope, jacobian(lambda x: loss(x, other), X), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_vmap_in_any_order(jax: Any, scalar: Function) -> None:
    g, batch = scalar.jax(), RNG.normal(size=(4, 5, 3))
    expected = np.stack([scalar.value_and_grad(batch[:, row])[1] for row in range(5)])
    assert np.allclose(jax.vmap(jax.grad(g), in_axes=1)(batch), expected)
    assert np.allclose(jax.jit(jax.vmap(jax.grad(g), in_axes=1))(batch), expected)
    total = jax.grad(lambda b: jax.vmap(g, in_axes=1)(b).sum())(batch)
    assert np.allclose(total, np.moveaxis(expected, 0, 1))
    of_w1 = jax.grad(lambda p, x: g(x, parameters=p))
    rows = jax.vmap(of_w1, in_axes=(None, 1))({"w1": W1}, batch)["w1"]
    assert np.allclose(rows[2], scalar.value_and_grad(batch[:, 2], wrt="w1")[1])
    hessians = jax.jit(jax.vmap(jax.hessian(g), in_axes=1))(batch)
    assert np.allclose(hessians[3], scalar.hessian(batch[:, 3]))
    nested = jax.vmap(jax.vmap(g))(batch.reshape(2, 2, 5, 3))
    assert np.allclose(nested[1, 0], scalar(batch[2]))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_vmap_of_linear_parts_is_transposed(jax: Any, f: Function) -> None:
    g = f.jax()
    _, linear = jax.linearize(lambda x, w: g(x, parameters={"w1": w}), X, W1)
    tangents, cotangents = RNG.normal(size=(6, 4, 3)), RNG.normal(size=(6, 4, 2))
    rows = jax.vmap(linear, (0, None))
    of_x, of_w1 = f.jacobian(X), f.jacobian(X, wrt="w1")
    by_x = np.einsum("ijab,kab->kij", of_x, tangents)
    assert np.allclose(rows(tangents, W1), by_x + np.einsum("ijab,ab->ij", of_w1, W1))
    to_x, to_w1 = jax.linear_transpose(rows, tangents, W1)(cotangents)
    assert np.allclose(to_x, np.einsum("kij,ijab->kab", cotangents, of_x))
    assert np.allclose(to_w1, np.einsum("kij,ijab->ab", cotangents, of_w1))
    norm = lambda x: (jax.vmap(lambda t: jax.jvp(g, (x,), (t,))[1])(tangents) ** 2).sum()  # noqa: E731
    check_grads(jax.jit(norm), (X,), modes=("fwd", "rev"))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_vmap_over_weights_and_over_nothing(jax: Any, scalar: Function) -> None:
    g = scalar.jax()
    weights = RNG.normal(size=(5, *W1.shape))
    ensemble = jax.vmap(lambda w: g(X, parameters={"w1": w}))
    assert np.allclose(ensemble(weights), [loss(X, w) for w in weights])
    slopes = jax.jit(jax.grad(lambda w: ensemble(w).sum()))(weights)
    assert np.allclose(
        slopes[4], scalar.with_parameters({"w1": weights[4]}).vjp(X, wrt="w1")[1](1.0)[0]
    )
    nothing = np.zeros((0, 4, 3))
    assert jax.vmap(g)(nothing).shape == (0,)
    assert jax.vmap(jax.grad(g))(nothing).shape == nothing.shape


@pytest.mark.slow
def test_vmap_of_control_flow(jax: Any) -> None:
    x = np.float32([[1, 2, 3], [1, 2, 3]])
    branch = Function(onnx.parser.parse_model(BRANCH)).jax()
    assert jax.vmap(branch)(np.array([True, False]), x).tolist() == [[1, 4, 9], [-1, -2, -3]]
    power = Function(onnx.parser.parse_model(POWER)).jax()
    assert np.allclose(jax.vmap(power)(np.array([1, 3]), x), [[1, 2, 3], [1, 8, 27]])
    slope = jax.jit(jax.vmap(jax.grad(lambda n, x: power(n, x).sum(), argnums=1)))
    assert np.allclose(slope(np.array([3, 3]), x), 3 * x**2)
    assert np.allclose(slope(np.array([1, 3]), x), [[1, 1, 1], [3, 12, 27]])


def test_float32_and_a_batch_of_any_size(jax: Any) -> None:
    f = Function(network(np.float32, scalar=True))
    step = jax.jit(jax.value_and_grad(f.jax()))
    for rows in (4, 2, 1):
        x = X[:rows].astype(np.float32)
        value, slope = step(x)
        assert value.dtype == slope.dtype == np.float32
        assert np.allclose(slope, jacobian(loss, X[:rows]), rtol=1e-4, atol=1e-5)
    assert np.allclose(f.jax()([[1, 2, 3]]), f([[1, 2, 3]]))


@pytest.mark.slow
def test_jax_trains_a_model_between_layers_of_its_own(jax: Any) -> None:
    f = Function(lenet.lenet())
    g = f.jax()
    x = RNG.normal(size=(16, 1, 8, 8)).astype(np.float32)
    labels = np.arange(16) % 10

    def objective(parameters: Any) -> Any:
        scaled = jax.numpy.tanh(parameters["scale"] * x)
        logits = jax.nn.log_softmax(g(scaled, parameters=parameters["net"]) * 2.0)
        return -logits[np.arange(16), labels].mean()

    parameters = {"scale": np.float32(1), "net": dict(f.parameters)}
    step = jax.jit(jax.value_and_grad(objective))
    values = []
    for _ in range(30):
        value, slopes = step(parameters)
        parameters = jax.tree.map(lambda p, s: p - 0.05 * s, parameters, slopes)
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]
    kernel = next(iter(f.parameters))
    assert parameters["net"][kernel].shape == f.parameters[kernel].shape


@pytest.mark.slow
def test_integer_inputs_and_outputs(jax: Any) -> None:
    g = Function(onnx.parser.parse_model(LOOKUP)).jax()
    ids, x = np.array([2, 0]), np.float32([[1, 1], [2, 2]])
    y, following = jax.jit(g)(ids, x)
    assert following.dtype == np.int32  # as everywhere in JAX without jax_enable_x64
    assert following.tolist() == [3, 1]
    assert y.tolist() == [[5, 6], [2, 4]]
    (y, _), (tangent, nothing) = jax.jvp(
        g, (ids, x), (np.zeros(2, jax.dtypes.float0), np.ones_like(x))
    )
    assert tangent.tolist() == [[5, 6], [1, 2]]
    assert nothing.dtype == jax.dtypes.float0
    _, pullback = jax.vjp(g, ids, x)
    of_ids, of_x = pullback((np.ones_like(x), np.zeros(2, jax.dtypes.float0)))
    assert of_ids.dtype == jax.dtypes.float0
    assert of_x.tolist() == [[5, 6], [1, 2]]
    of_table = jax.grad(lambda p: g(ids, x, parameters=p)[0].sum())
    table = {"table": np.float32([[1, 2], [3, 4], [5, 6]])}
    assert of_table(table)["table"].tolist() == [[2, 2], [0, 0], [1, 1]]
    rows, _ = jax.vmap(g)(np.stack([ids, ids[::-1]]), np.stack([x, x]))
    assert rows.tolist() == [[[5, 6], [2, 4]], [[1, 2], [10, 12]]]
    with jax.enable_x64(True):
        assert g(ids, x)[1].dtype == np.int64


def test_integers_that_lose_bits_are_refused(jax: Any) -> None:
    g = Function(onnx.parser.parse_model(LOOKUP)).jax()
    with pytest.raises(ortops.ArgumentError, match="'ids' has values that int32 cannot represent"):
        g(np.array([2**40, 0]), np.ones((2, 2), np.float32))


@pytest.mark.slow
def test_control_flow(jax: Any) -> None:
    x = np.float32([1, 2, 3])
    branch = Function(onnx.parser.parse_model(BRANCH)).jax()
    slope = jax.jit(jax.grad(lambda square, x: branch(square, x).sum(), argnums=1))
    assert slope(True, x).tolist() == [2, 4, 6]
    assert slope(False, x).tolist() == [-1, -1, -1]
    power = Function(onnx.parser.parse_model(POWER)).jax()
    for times in (1, 3):
        cubes = jax.jacfwd(jax.jit(power), argnums=1)(times, x)
        assert np.allclose(cubes, np.diag(times * x ** (times - 1)))
    check_grads(lambda x: power(3, x), (x,), modes=("fwd", "rev"), rtol=0.02)


QUANTIZED = """<ir_version: 10, opset_import: ["": 21]> f (float[n, 2] x) => (float[n, 2] y)
<float scale = {0.5}, int8 zero = {0}, float[2, 2] w = {1, 2, 3, 4}> {
    q = QuantizeLinear (x, scale, zero)
    d = DequantizeLinear (q, scale, zero)
    y = MatMul (d, w)
}"""


@pytest.mark.slow
def test_quantized_models_have_the_derivatives_of_the_function(jax: Any) -> None:
    f = Function(onnx.parser.parse_model(QUANTIZED))
    x = np.float32([[0.6, 0.4], [1.1, -0.2]])
    assert np.array_equal(jax.jit(f.jax())(x), f(x))
    assert np.array_equal(jax.jacrev(f.jax())(x), f.jacobian(x))
    assert np.array_equal(jax.jacfwd(f.jax())(x), f.jacobian(x))


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(jax: Any, dtype: str) -> None:
    kind = np.dtype(jax.numpy.dtype(dtype))
    with Tape(name="half") as tape:
        x = tape.input("x", kind, ["n"])
        single = op.Cast(x, to=onnx.TensorProto.FLOAT)
        tape.output((single * single * single).sum(), "y")
    g = Function(tape.model()).jax()
    x = jax.numpy.asarray([1, 2, -0.5], kind)
    slope = jax.jit(jax.grad(g))(x)
    assert slope.dtype == kind
    assert slope.tolist() == [3, 12, 0.75]
    assert np.allclose(jax.hessian(g)(x).astype(np.float32), np.diag([6, 12, -3]))
    with pytest.raises(ortops.ArgumentError, match=f"'x' must be {dtype}, got float32"):
        g(np.ones(3, np.float32))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("onnxscript", "export")
@pytest.mark.parametrize("dynamo", [False, True], ids=["TorchScript", "dynamo"])
def test_files_of_both_exporters_of_torch(jax: Any, dynamo: bool) -> None:
    torch = importlib.import_module("torch")
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.GELU(),
        torch.nn.Flatten(),
        torch.nn.LayerNorm(144),
    ]
    net = torch.nn.Sequential(*layers, torch.nn.Linear(144, 3))
    file = io.BytesIO()
    settings: dict[str, Any] = {"dynamic_axes": {"x": {0: "n"}}}
    if dynamo:
        settings = {"dynamic_shapes": ({0: torch.export.Dim.DYNAMIC},), "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        example = (torch.randn(2, 1, 8, 8),)
        made = torch.onnx.export(net, example, file, input_names=["x"], dynamo=dynamo, **settings)
    f = Function(made.model_proto if made is not None else onnx.load_from_string(file.getvalue()))
    g, parameters = f.jax(), dict(f.parameters)
    assert set(parameters) == {name for name, _ in net.named_parameters()}
    slopes_of = jax.jit(
        jax.grad(lambda x, p: jax.numpy.tanh(g(x, parameters=p)).sum(), argnums=(0, 1))
    )
    for rows in (2, 5):
        x = torch.randn(rows, 1, 8, 8, requires_grad=True)
        net.zero_grad()
        net(x).tanh().sum().backward()
        of_x, of_parameters = slopes_of(x.detach().numpy(), parameters)
        assert np.allclose(of_x, x.grad, rtol=1e-3, atol=1e-5)
        for name, weight in net.named_parameters():
            assert np.allclose(of_parameters[name], weight.grad, rtol=1e-3, atol=1e-5)


SEVERAL_DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.test_function_jax import Function, network

f = Function(network(np.float32))
g, x = f.jax(), np.arange(12, dtype=np.float32).reshape(4, 3) / 12
mesh, rows = Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d")
assert mesh.size == 2
shards = jax.device_put(x, NamedSharding(mesh, rows))
mapped = jax.shard_map(g, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
for call in (g, jax.jit(g), jax.jit(mapped)):
    assert np.allclose(call(shards), f(x), atol=1e-6)
slope = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))(shards)
assert np.allclose(slope, jax.grad(lambda x: (g(x) ** 2).sum())(x), atol=1e-5)
"""


@pytest.mark.slow
def test_several_devices() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    subprocess.run(
        [sys.executable, "-c", SEVERAL_DEVICES], check=True, env=environment, cwd=ROOT, timeout=300
    )


NONZERO = """<ir_version: 10, opset_import: ["": 21]> f (float[n] x) => (float[m] y) {
    places = NonZero (x)
    rows = Transpose (places)
    y = GatherND (x, rows)
}"""

FLATTENED = """<ir_version: 10, opset_import: ["": 21]> f (float[n, m] x) => (float[k] y) {
    minus = Constant <value = int64[1] {-1}> ()
    z = Reshape (x, minus)
    y = Mul (z, z)
}"""


def test_shapes_that_the_model_does_not_state(jax: Any) -> None:
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    g = Function(onnx.parser.parse_model(FLATTENED)).jax()
    assert jax.eval_shape(g, x).shape == (6,)
    assert jax.jit(jax.grad(lambda x: g(x).sum()))(x).tolist() == (2 * x).tolist()
    nonzero = Function(onnx.parser.parse_model(NONZERO)).jax()
    assert nonzero(np.float32([0, 2, 3])).tolist() == [2, 3]
    with pytest.raises(ortops.UnsupportedError, match=r"'y' depends on values .*: \[0\] for zeros"):
        jax.jit(nonzero)(np.float32([0, 2, 3]))
    positive = NONZERO.replace("NonZero (x)", "NonZero (p)").replace(
        "{\n", "{\n two = Constant <value = float {2}> ()\n p = Less (x, two)\n", 1
    )
    small = jax.jit(Function(onnx.parser.parse_model(positive)).jax())
    assert small(np.float32([0, 1])).tolist() == [0, 1]
    with pytest.raises(Exception, match=r"'y' has shape \[1\], but \[2\] was"):  # by jax
        small(np.float32([0, 3])).block_until_ready()


def test_random_numbers_are_refused() -> None:
    f = Function(onnx.parser.parse_model(MASKED))
    with pytest.raises(ortops.UnsupportedError, match="Dropout node 'y' draws random numbers"):
        f.jax()
    inference = MASKED.replace("bool {1}", "bool {0}")
    x = np.ones(3, np.float32)
    assert np.array_equal(Function(onnx.parser.parse_model(inference)).jax()(x), x)


TEXT = """<ir_version: 10, opset_import: ["": 21]> f (string[n] words) => (string[n] y) {
    y = Identity (words)
}"""


def test_errors_name_the_input(jax: Any, f: Function) -> None:
    single = Function(network(np.float32)).jax()
    x = X.astype(np.float32)
    for call in (single, jax.jit(single)):
        with pytest.raises(ortops.FeedError, match=r"'x' must have shape \[n, 3\], got \[4, 2\]"):
            call(x[:, :2])
        with pytest.raises(ortops.ArgumentError, match="missing: x: float32"):
            call()
        with pytest.raises(ortops.ArgumentError, match=r"has 1 input \(x\), got 2 arrays"):
            call(x, x)
        with pytest.raises(ortops.ArgumentError, match="no floating-point weight 'w9'"):
            call(x, parameters={"w9": x})
        with pytest.raises(ortops.FeedError, match=r"'w1' must have shape \[3, 5\], got \[4, 3\]"):
            call(x, parameters={"w1": x})
    with pytest.raises(ortops.ArgumentError, match="'x' must be float32, got float64; convert"):
        single(X)
    with pytest.raises(ortops.ArgumentError, match="parameters must be a dict of arrays, got list"):
        single(x, parameters=[x])
    with pytest.raises(ortops.ArgumentError, match=r"'x' is float64.*'jax_enable_x64', True"):
        f.jax()(X)
    with pytest.raises(ortops.UnsupportedError, match=r"'words' .*, but"):
        Function(onnx.parser.parse_model(TEXT)).jax()


def test_float64_outputs_need_64_bits() -> None:
    with Tape(name="doubled") as tape:
        x = tape.input("x", np.float32, ["n"])
        tape.output(op.Cast(x, to=onnx.TensorProto.DOUBLE), "y")
    g = Function(tape.model()).jax()
    with pytest.raises(ortops.ArgumentError, match=r"'y' is float64.*'jax_enable_x64', True"):
        g(np.ones(3, np.float32))


@pytest.mark.usefixtures("x64")
def test_threads_may_share_it(jax: Any, scalar: Function) -> None:
    g = jax.jit(jax.grad(scalar.jax()))
    found: dict[float, Any] = {}

    def work(scale: float) -> None:
        with jax.enable_x64(True):
            found[scale] = g(scale * X)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for scale, slope in found.items():
        assert np.allclose(slope, jacobian(loss, scale * X), rtol=1e-10)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, f: Function) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ortops.OrtopsError, match=r"needs jax; pip install ortops\[jax"):
        f.jax()
