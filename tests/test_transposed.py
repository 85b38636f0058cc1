"""Dense layers computed transposed: the same numbers, without any Transpose node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from running import run

from models.mlp import mlp
from ortops import Tensor, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.sizes import bind_sizes
from ortops.engine.lowering import prepare
from ortops.graph import convert
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.products import ROW_SUMS, SCALES, TRANSPOSES
from ortops.graph.passes.transposed import TRANSPOSED
from ortops.optimizers import SGD
from tests.gradient_models import Build, with_gradients
from tests.spies import Spy, finish, lowered_ir

SAMPLES, FEATURES, INPUTS, CLASSES = 32, 80, 24, 5
SHAPES = {
    "x": (SAMPLES, INPUTS),
    "w": (INPUTS, FEATURES),
    "v": (FEATURES, CLASSES),
    "b": (FEATURES,),
}


def improved(model: onnx.ModelProto) -> ir.Model:
    return lowered_ir(prepare(convert.to_ir(model)), ROW_SUMS, SCALES, TRANSPOSES)


def transposed(build: Build, shapes: dict[str, tuple[int, ...]] | None = None) -> int:
    """Checks that the graph computes the same; returns how many activations are transposed."""
    given = shapes or SHAPES
    model, feeds = with_gradients(build, given)
    plain, ours = improved(model), improved(model)
    finish(ours, TRANSPOSED)
    after = to_proto(ours)
    names = [value.name for value in plain.graph.outputs]
    assert [value.name for value in ours.graph.outputs] == names
    results = zip(
        names, run(to_proto(plain), feeds), run(after, feeds, optimize=False), strict=True
    )
    for name, wanted, found in results:
        assert wanted.shape == found.shape, name
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max(), err_msg=name
        )
    graphs = [model.graph for model in (plain, ours)]
    kinds = [[node.op_type for node in graph].count("Transpose") for graph in graphs]
    assert kinds[0] == kinds[1]
    columns = (FEATURES, SAMPLES)
    return sum(tuple(value.shape or ()) == columns for node in graphs[1] for value in node.outputs)


def layer(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return op.Gemm(x, w, b)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda x, w, v, b: op.Relu(layer(x, w, b)) @ v, id="Gemm"),
        pytest.param(lambda x, w, v, b: op.Relu(x @ w + b) @ v, id="MatMul"),
        pytest.param(lambda x, w, v, b: op.Gelu(layer(x, w, b)) @ v, id="Gelu"),
        pytest.param(lambda x, w, v, b: op.Tanh(x @ w) @ v + op.ReduceSum(b), id="Tanh"),
        pytest.param(
            lambda x, w, v, b: op.Clip(layer(x, w, b), None, np.float32(1)) @ v, id="Clip"
        ),
        pytest.param(
            lambda x, w, v, b: op.Gemm(op.Sigmoid(layer(x, w, b)), op.Transpose(v), transB=1),
            id="weights of the next layer transposed",
        ),
        pytest.param(
            lambda x, w, v, b: op.Gemm(x, op.Transpose(w), b, transB=1, alpha=0.5, beta=2.0) @ v,
            id="weights transposed, scaled",
        ),
        pytest.param(
            lambda x, w, v, b: op.Gemm(op.Transpose(x), w, b, transA=1) * b @ v, id="x transposed"
        ),
        pytest.param(
            lambda x, w, v, b: op.Tanh(h := layer(x, w, b)) * h @ v,
            id="read twice",
        ),
        pytest.param(
            lambda x, w, v, b: (h := op.Relu(x @ w)) @ op.Transpose(h) @ h @ v, id="both factors"
        ),
    ],
)
def test_layers(build: Callable[..., Any]) -> None:
    assert transposed(build) >= 2


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda x, w, v, b: op.Softmax(layer(x, w, b)) @ v, id="Softmax"),
        pytest.param(lambda x, w, v, b: op.Relu(layer(x, w, b)), id="put out"),
        pytest.param(
            lambda x, w, v, b: op.Add(x @ w, op.Unsqueeze(b, [0])) @ v, id="a row of two axes"
        ),
        pytest.param(
            lambda x, w, v, b: op.Gemm(x, w, op.Unsqueeze(b, [0])) @ v, id="such a row in Gemm"
        ),
        pytest.param(lambda x, w, v, b: op.Reshape(x @ w, [2, -1, FEATURES]) @ v, id="cut"),
    ],
)
def test_layers_that_stay(build: Callable[..., Any]) -> None:
    assert not transposed(build)


@pytest.mark.parametrize(
    ("samples", "features"), [(31, 62), (32, 63), (64, 100)], ids=["few", "narrow", "square"]
)
def test_sizes_that_stay(samples: int, features: int) -> None:
    shapes = {"x": (samples, 3), "w": (3, features), "v": (features, 2), "b": (features,)}
    model, _ = with_gradients(lambda x, w, v, b: op.Relu(layer(x, w, b)) @ v, shapes)
    ours = improved(model)
    before = [node.op_type for node in ours.graph]
    finish(ours, TRANSPOSED)
    assert [node.op_type for node in ours.graph] == before


def test_a_cotangent_alone() -> None:
    """Where a layer is added to something of its shape, the cotangent can be transposed still."""
    ones = np.ones((SAMPLES, FEATURES), np.float32)
    assert transposed(lambda x, w, v, b: (x @ w + ones) @ v) == 1


def test_another_layer_beside() -> None:
    """One that cannot be transposed keeps none of the others from it."""

    def build(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Any:
        hidden = op.Relu(layer(x, w, b))
        return hidden @ v + op.Softmax(layer(x, w * 2, b)) @ v

    assert transposed(build) >= 2


def test_an_activation_that_a_branch_reads_stays() -> None:
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 21]>
        branches (float[{SAMPLES},3] x, float[3,{FEATURES}] w, float[{FEATURES},2] v, bool c)
            => (float[{SAMPLES},2] y, float z)
        {{
            product = MatMul(x, w)
            hidden = Relu(product)
            y = MatMul(hidden, v)
            z = If (c) <
                then_branch = g1 () => (float a) {{ a = ReduceMax <keepdims=0> (hidden) }},
                else_branch = g2 () => (float e) {{ e = ReduceMin <keepdims=0> (hidden) }}
            >
        }}
        """
    )
    ours = improved(model)
    before = to_proto(ours)
    finish(ours, TRANSPOSED)
    assert to_proto(ours) == before


@pytest.mark.parametrize(
    ("widths", "samples", "gains"),
    [
        ((24, 80, 72, 5), 32, True),
        ((24, 80, 72, 5), 36, True),
        ((24, 80, 72, 5), 31, False),
        ((24, 80, 72, 5), 41, False),
        ((24, 80, 20, 10, 5), 32, False),
        ((24, 10, 5), None, False),
        ((24, 80, 5), None, True),
    ],
)
def test_what_gains_from_sizes(widths: tuple[int, ...], samples: int | None, gains: bool) -> None:
    model = prepare(convert.to_ir(mlp(widths)))
    sizes = None if samples is None else {"batch": samples}
    assert TRANSPOSED.gains(model, sizes) == gains


def test_layers_of_a_fixed_batch_need_no_sizes() -> None:
    model = prepare(convert.to_ir(mlp((24, 80, 5))))
    assert TRANSPOSED.gains(model, None)
    bind_sizes(model, {"batch": 32})
    assert not TRANSPOSED.gains(model, None)


def test_steps_of_any_batch() -> None:
    """Batches of known size train like those of any size, in steps and in runs of several."""
    model = build_training_model(
        mlp((24, 80, 72, 5)), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1)
    )
    rng = np.random.default_rng(0)
    batches = [
        {
            "images": rng.standard_normal((size, 24), np.float32),
            "labels": rng.integers(0, 5, size),
        }
        for size in (32, 32, 7, 35, 32)
    ]
    spy = Spy()
    ours = TrainingSession(model, settings=spy.watching(Settings()))
    several = TrainingSession(model)
    losses = [float(ours.step(batch)["loss"]) for batch in batches]
    assert spy.rows("images") == [32, None, 35]  # 7 are too few
    np.testing.assert_allclose(several.run_steps(batches), losses, rtol=1e-5)
    plain = TrainingSession(model, settings=Settings().without("transposed"))
    wanted = [float(plain.step(batch)["loss"]) for batch in batches]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for name, value in plain.state.items():
        np.testing.assert_allclose(ours.state[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
