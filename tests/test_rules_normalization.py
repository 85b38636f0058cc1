"""Rules of normalizations against differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from checked import by_case, quick
from dot_test import DOMAIN, Case, away_from, check, normal, uniform
from onnx import TensorProto, helper
from running import run

import ortops
from ortops.graph.tensor import op


def batch_inputs(*shape: int) -> list[np.ndarray]:
    return [
        normal(*shape),
        *(normal(shape[1], seed=seed) for seed in (1, 2, 3)),
        uniform(0.5, 2, shape[1], seed=4),
    ]


BATCH_SHAPES = [(4, 3), (2, 3, 4), (2, 3, 2, 3), (2, 2, 2, 1, 3)]
INFERENCE = {"epsilon": 0.01, "momentum": 0.7}
TRAINING = {"training_mode": 1, **INFERENCE}
LRN = {"alpha": 0.5, "beta": 0.6, "bias": 2.0}

CASES = [
    *(Case("BatchNormalization", batch_inputs(*s), INFERENCE, orders=2) for s in BATCH_SHAPES),
    *(
        Case("BatchNormalization", batch_inputs(*s), TRAINING, outputs=3, orders=2, name="training")
        for s in BATCH_SHAPES
    ),
    Case("LayerNormalization", [normal(3, 5), normal(5, seed=1), normal(5, seed=2)], orders=2),
    Case(
        "LayerNormalization",
        [normal(2, 3, 4), normal(3, 4, seed=1)],
        {"axis": 1, "epsilon": 0.1},
        orders=2,
    ),
    Case(
        "LayerNormalization",
        [normal(2, 3, 4), normal(4, seed=1), normal(3, 1, seed=2)],
        {"axis": -2},
        name="broadcast",
        orders=2,
    ),
    Case(
        "LayerNormalization",
        [normal(2, 3), normal(3, seed=1)],
        {"axis": 0},
        name="all",
        orders=2,
    ),
    Case(
        "LayerNormalization",
        [normal(3, 5), normal(5, seed=1), normal(5, seed=2)],
        orders=2,
        float32=True,  # reads the Mean and InvStdDev that the forward pass saved
        name="float32",
    ),
    Case(
        "RMSNormalization", [normal(3, 5), normal(5, seed=1)], {"epsilon": 0.1}, opset=23, orders=2
    ),
    Case(
        "RMSNormalization",
        [normal(2, 3, 4), normal(3, 1, seed=1)],
        {"axis": 1},
        opset=23,
        orders=2,
    ),
    *(
        Case(
            "InstanceNormalization",
            [normal(*shape), normal(3, seed=1), normal(3, seed=2)],
            {"epsilon": 0.1},
            orders=2,
            float32=True,
        )
        for shape in [(2, 3, 4), (2, 3, 2, 3), (1, 3, 2, 2, 2)]
    ),
    *(
        Case(
            "GroupNormalization",
            [normal(2, 4, *dims), normal(4, seed=1), normal(4, seed=2)],
            {"num_groups": groups, "epsilon": 0.1, "stash_type": 11},
            orders=2,
            name=f"{groups}",
        )
        for groups in (1, 2, 4)
        for dims in [(3,), (2, 3)]
    ),
    *(
        Case("LpNormalization", [away_from([0], 3, 4)], {"p": p, "axis": axis}, orders=2)
        for p in (1, 2)
        for axis in (-1, 0)
    ),
    Case("LpNormalization", [normal(3, 4)]),
    # onnxruntime has no float64 kernel, and onnx's reference fails on float64.
    Case(
        "MeanVarianceNormalization",
        [normal(2, 3, 2, 3, dtype=np.float32)],
        orders=2,
        epsilon=1e-2,
        rtol=2e-3,
    ),
    Case(
        "MeanVarianceNormalization",
        [normal(2, 3, 2, 3, dtype=np.float32)],
        {"axes": [2, 3]},
        orders=2,
        epsilon=1e-2,
        rtol=2e-3,
        name="axes",
    ),
    # onnx's reference takes the batch size for the number of channels, so they are equal here.
    *(
        Case("LRN", [normal(n, n, 2, 1)], {"size": size, **LRN}, float32=True, name=f"{size}")
        for n, size in [(4, 1), (4, 3), (2, 5)]
    ),
    Case(
        "LRN",
        [normal(2, 5, 2, 3, dtype=np.float32)],
        {"size": 3, **LRN},
        orders=2,
        epsilon=1e-2,
        rtol=2e-3,
    ),
]
CASES = quick(
    CASES,
    """
    BatchNormalization-training-2x2x2x1x3_2_2_2_2
    BatchNormalization-2x2x2x1x3_2_2_2_2
    LayerNormalization-float32-3x5_5_5
    LayerNormalization-2x3x4_3x4
    LayerNormalization-broadcast-2x3x4_4_3x1
    LayerNormalization-all-2x3_3
    RMSNormalization-2x3x4_3x1
    RMSNormalization-3x5_5
    InstanceNormalization-1x3x2x2x2_3_3
    GroupNormalization-1-2x4x2x3_4_4
    LpNormalization-3x4
    MeanVarianceNormalization-axes-2x3x2x3
    LRN-2x5x2x3
    """,
)


@pytest.mark.nightly
@pytest.mark.quick(4)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def gradients(
    op: str,
    inputs: Sequence[np.ndarray],
    attributes: Mapping[str, Any],
    weights: Sequence[np.ndarray],
    *,
    opset: int = 21,
) -> list[np.ndarray]:
    """Returns the gradients of Σ wᵢ · outputᵢ, summed in float64, with respect to all inputs."""
    names = [f"x{index}" for index in range(len(inputs))]
    outputs = [f"y{index}" for index in range(len(weights))]
    nodes = [helper.make_node(op, names, outputs, **attributes)]
    for output in outputs:
        nodes += [
            helper.make_node("Cast", [output], [f"wide_{output}"], to=TensorProto.DOUBLE),
            helper.make_node("Mul", [f"wide_{output}", f"w_{output}"], [f"product_{output}"]),
            helper.make_node("ReduceSum", [f"product_{output}"], [f"sum_{output}"], keepdims=0),
        ]
    results = [f"d{name}" for name in names]
    nodes += [
        helper.make_node("Sum", [f"sum_{output}" for output in outputs], ["f"]),
        helper.make_node("Gradient", names, results, domain=DOMAIN, xs=names, y="f"),
    ]
    feeds = dict(zip(names, inputs, strict=True))
    feeds |= {f"w_{output}": w for output, w in zip(outputs, weights, strict=True)}
    graph = helper.make_graph(
        nodes,
        "case",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in feeds.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in results],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    return run(model, feeds)


def narrowed(inputs: Sequence[np.ndarray], dtype: type) -> list[np.ndarray]:
    return [array.astype(dtype) for array in inputs]


FLOAT16 = [case for case in CASES if case.orders == 2 and case.name != "float32"]


@pytest.mark.quick(16)
@pytest.mark.parametrize("case", FLOAT16, ids=str)
def test_float16_agrees_with_float32(case: Case) -> None:
    weights = [normal(*case.inputs[0].shape, seed=7)]
    weights += [normal(*case.inputs[3].shape, seed=8) for _ in range(case.outputs - 1)]
    arguments = (case.attributes, weights)
    half = narrowed(case.inputs, np.float16)
    expected = gradients(case.op, narrowed(half, np.float32), *arguments, opset=case.opset)
    for found, exact in zip(
        gradients(case.op, half, *arguments, opset=case.opset), expected, strict=True
    ):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found, exact, atol=5e-3 * np.abs(exact).max(), rtol=0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("axis", [-1, 1])
def test_layer_normalization_passes_cotangents_of_its_statistics(dtype: type, axis: int) -> None:
    x, scale = normal(2, 3, 4), normal(4, seed=1)
    axes = tuple(range(axis % 3, 3))
    rows = (2, 3, 1) if axis == -1 else (2, 1, 1)
    weights = [normal(2, 3, 4, seed=2), normal(*rows, seed=3), normal(*rows, seed=4)]

    def f(x: np.ndarray, scale: np.ndarray) -> float:
        mean = x.mean(axes, keepdims=True)
        inverse_std = 1 / np.sqrt(x.var(axes, keepdims=True) + 0.1)
        values = ((x - mean) * inverse_std * scale, mean, inverse_std)
        return sum(float((w * value).sum()) for w, value in zip(weights, values, strict=True))

    found = gradients(
        "LayerNormalization",
        narrowed([x, scale], dtype),
        {"axis": axis, "epsilon": 0.1},
        weights,
    )
    for index, array in enumerate((x, scale)):
        expected = np.zeros_like(array)
        for position in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[position] = 1e-5
            arguments = [(x + step, scale), (x - step, scale)]
            if index == 1:
                arguments = [(x, scale + step), (x, scale - step)]
            expected[position] = (f(*arguments[0]) - f(*arguments[1])) / 2e-5
        tolerance = {np.float16: 1e-2, np.float32: 1e-5, np.float64: 1e-6}[dtype]
        np.testing.assert_allclose(found[index], expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("reads", [(0,), (1,), (2,)], ids=["Y", "running_mean", "running_var"])
def test_batch_normalization_with_one_output_read(reads: tuple[int, ...]) -> None:
    """What is not read has no cotangent; the rule must do without it."""
    inputs = batch_inputs(4, 3, 2)
    every = [normal(4, 3, 2, seed=7), normal(3, seed=8), normal(3, seed=9)]
    zeroed = [w if index in reads else 0 * w for index, w in enumerate(every)]
    expected = gradients("BatchNormalization", inputs, TRAINING, zeroed)
    found = _gradients_of_one_output(inputs, reads[0], every[reads[0]])
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)


def _gradients_of_one_output(
    inputs: Sequence[np.ndarray], index: int, weight: np.ndarray
) -> list[np.ndarray]:
    with ortops.Tape() as tape:
        tensors = [tape.input(f"x{i}", a.dtype, a.shape) for i, a in enumerate(inputs)]
        outputs = op.BatchNormalization(*tensors, **TRAINING, outputs=3)
        tape.output(op.ReduceSum(outputs[index] * weight, keepdims=0), "f")
    model = tape.model()
    names = [f"x{i}" for i in range(len(inputs))]
    model.opset_import.add(domain=DOMAIN, version=1)
    results = [f"d{name}" for name in names]
    model.graph.node.append(
        helper.make_node("Gradient", names, results, domain=DOMAIN, xs=names, y="f")
    )
    del model.graph.output[:]
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in results)
    return run(ortops.lower(model), dict(zip(names, inputs, strict=True)))


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization_of_zeros(p: int) -> None:
    x = np.array([[0.0, 0.0], [3.0, 4.0]])
    (dx,) = gradients("LpNormalization", [x], {"p": p}, [np.array([[1.0, 2.0], [1.0, 0.0]])])
    # p = 1: y = x/7, dy₀/dx = (7 − 3, −3)/49; p = 2: y = x/5, dy₀/dx = (25 − 9, −12)/125
    expected = {1: [4 / 49, -3 / 49], 2: [16 / 125, -12 / 125]}[p]
    np.testing.assert_allclose(dx, [[0, 0], expected], rtol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("dims", [(), (2, 3)])
def test_batch_normalization_agrees_with_torch(dims: tuple[int, ...]) -> None:
    import torch

    inputs = batch_inputs(4, 3, *dims)
    weight = normal(4, 3, *dims, seed=7)
    found = gradients(
        "BatchNormalization", inputs, {"training_mode": 1}, [weight, *2 * [np.zeros(3)]]
    )
    x, scale, bias = (torch.tensor(array, requires_grad=True) for array in inputs[:3])
    y = torch.nn.functional.batch_norm(x, None, None, scale, bias, training=True, eps=1e-5)
    (y * torch.tensor(weight)).sum().backward()
    for mine, theirs in zip(found, (x, scale, bias), strict=False):
        # ONNX's epsilon is a float32
        np.testing.assert_allclose(mine, theirs.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layer_normalization_agrees_with_torch(dtype: type) -> None:
    import torch

    inputs = narrowed([normal(2, 3, 4), normal(3, 4, seed=1), normal(3, 4, seed=2)], dtype)
    weight = normal(2, 3, 4, seed=7)
    found = gradients("LayerNormalization", inputs, {"axis": 1}, [weight])
    x, scale, bias = (torch.tensor(array, requires_grad=True) for array in inputs)
    y = torch.nn.functional.layer_norm(x, (3, 4), scale, bias, eps=1e-5)
    (y * torch.tensor(weight.astype(dtype))).sum().backward()
    rtol = 1e-5 if dtype == np.float32 else 1e-9
    for mine, theirs in zip(found, (x, scale, bias), strict=True):
        np.testing.assert_allclose(mine, theirs.grad.numpy(), rtol=rtol, atol=rtol)
