"""Models whose layers take an adapter, and what the tests of `ortops.lora` do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantFormat
from running import plain_session

from ortops import Tape, op

F = np.float32
Arrays = Mapping[str, np.ndarray]


def values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Returns the initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def with_values(model: onnx.ModelProto, new: Arrays) -> onnx.ModelProto:
    """Returns a model with other values of some initializers."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in new:
            tensor.CopyFrom(numpy_helper.from_array(new[tensor.name], tensor.name))
    return result


def random_adapter(model: onnx.ModelProto, seed: int = 7) -> dict[str, np.ndarray]:
    """Returns random values for every A and B."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(array.shape).astype(array.dtype) / 2
        for name, array in values(model).items()
        if ".lora_" in name
    }


def outputs(model: onnx.ModelProto, feeds: Arrays) -> list[np.ndarray]:
    return plain_session(model).run(None, dict(feeds))


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


@dataclass(frozen=True)
class Case:
    """A model of one layer ``fc``, and what an adapter of it adds to the output.

    Attributes:
        model: Makes the model.
        feeds: Its feeds.
        added: What is added to the output, in float64, from the feeds, A and B.
        op_type: The operator of the layer.
        sizes: The shapes of A and B at rank 3.
        targets: What has to be named for it to have an adapter.
        is_quantized: Whether its weight is quantized.
    """

    model: Callable[[], onnx.ModelProto]
    feeds: Arrays
    added: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    op_type: str
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    targets: list[str] | None = None
    is_quantized: bool = False


def linear(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return x @ (a @ b)


def built(x: np.ndarray, emit: Callable[..., Any], **weights: np.ndarray) -> onnx.ModelProto:
    """Returns a model of an input x with a free batch, whose output is put out by Identity."""
    with Tape(name="one_layer") as tape:
        given = tape.input("x", x.dtype, ["batch", *x.shape[1:]])
        read = {n: tape.initializer(f"fc.{n}", array) for n, array in weights.items()}
        tape.output(op.Identity(emit(given, **read)), "y")
    return tape.model()


def four_bits(x: np.ndarray, bits: int = 4, bias: bool = False) -> onnx.ModelProto:
    """A MatMulNBits node, written by onnxruntime's own tool."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        built(x, lambda x, weight: x @ weight, weight=normal(32, 4, seed=1)),
        bits=bits,
        block_size=16,
        is_symmetric=False,
    )
    quantizer.process()
    model = quantizer.model.model
    node = next(node for node in model.graph.node if node.op_type == "MatMulNBits")
    if bias:
        node.input.extend([*["", ""][: 5 - len(node.input)], "fc.bias"])
        model.graph.initializer.append(numpy_helper.from_array(normal(4, seed=2), "fc.bias"))
    return model


def four_bits_dequantized(x: np.ndarray) -> onnx.ModelProto:
    """MatMul with a weight of int4, dequantized by block, written by onnxruntime's own tool."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    base = built(x, lambda x, weight: x @ weight, weight=normal(32, 4, seed=1))
    quantizer = MatMulNBitsQuantizer(
        base, block_size=16, is_symmetric=True, quant_format=QuantFormat.QDQ
    )
    quantizer.process()
    return quantizer.model.model


def rounded(x: np.ndarray) -> onnx.ModelProto:
    """MatMul with a float weight that is rounded to int8, as where one is trained for that."""
    scale = F(0.02)
    return built(
        x,
        lambda x, weight, scale: (
            x @ op.DequantizeLinear(op.QuantizeLinear(weight, scale, np.int8(0)), scale, np.int8(0))
        ),
        weight=normal(x.shape[-1], 4, seed=1),
        scale=np.array(scale),
    )


def dequantized(x: np.ndarray) -> onnx.ModelProto:
    """MatMul with a weight of int8, dequantized by column."""
    weight = np.random.default_rng(1).integers(-100, 100, (x.shape[-1], 4)).astype(np.int8)
    scales = np.abs(normal(4, seed=3)) / 50 + F(0.01)
    return built(
        x,
        lambda x, weight, scales: x @ op.DequantizeLinear(weight, scales, axis=1),
        weight=weight,
        scales=scales,
    )


def convolved(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """What is convolved with the product, with stride 2, dilation 2 × 1 and pads 1, 0, 2, 1."""
    kernel = np.einsum("irhw,ro->oihw", a, b[:, :, 0, 0])
    padded = np.pad(x, ((0, 0), (0, 0), (1, 2), (0, 1)))
    high, wide = ((padded.shape[2] - 5) // 2 + 1, (padded.shape[3] - 3) // 2 + 1)
    y = np.zeros((x.shape[0], kernel.shape[0], high, wide))
    for row in range(3):
        for column in range(3):
            rows, columns = row * 2, column
            part = padded[
                :, :, rows : rows + 2 * high - 1 : 2, columns : columns + 2 * wide - 1 : 2
            ]
            y += np.einsum("nihw,oi->nohw", part, kernel[:, :, row, column])
    return y


ROWS, WIDE = normal(5, 6), normal(5, 32)
IMAGES = normal(2, 3, 9, 8)
CASES = {
    "MatMul": Case(
        lambda: built(ROWS, lambda x, weight: x @ weight, weight=normal(6, 4, seed=1)),
        {"x": ROWS},
        linear,
        "MatMul",
        ((6, 3), (3, 4)),
    ),
    "MatMul of three axes": Case(
        lambda: built(normal(2, 5, 6), lambda x, weight: x @ weight, weight=normal(6, 4, seed=1)),
        {"x": normal(2, 5, 6)},
        linear,
        "MatMul",
        ((6, 3), (3, 4)),
    ),
    "MatMul of a transposed weight": Case(
        lambda: built(
            ROWS,
            lambda x, weight: x @ op.Transpose(op.Identity(weight), perm=[1, 0]),
            weight=normal(4, 6, seed=1),
        ),
        {"x": ROWS},
        linear,
        "MatMul",
        ((6, 3), (3, 4)),
    ),
    "MatMul in float16": Case(
        lambda: built(
            ROWS.astype(np.float16),
            lambda x, weight: x @ weight,
            weight=normal(6, 4, seed=1).astype(np.float16),
        ),
        {"x": ROWS.astype(np.float16)},
        linear,
        "MatMul",
        ((6, 3), (3, 4)),
    ),
    "MatMul in float64": Case(
        lambda: built(
            ROWS.astype(np.float64),
            lambda x, weight: x @ weight,
            weight=normal(6, 4, seed=1).astype(np.float64),
        ),
        {"x": ROWS.astype(np.float64)},
        linear,
        "MatMul",
        ((6, 3), (3, 4)),
    ),
    "Gemm with transB and bias": Case(
        lambda: built(
            ROWS,
            lambda x, weight, bias: op.Gemm(x, weight, bias, transB=1),
            weight=normal(4, 6, seed=1),
            bias=normal(4, seed=2),
        ),
        {"x": ROWS},
        linear,
        "Gemm",
        ((6, 3), (3, 4)),
    ),
    "Gemm with transA, alpha and beta": Case(
        lambda: built(
            ROWS,
            lambda x, weight, bias: op.Gemm(x, weight, bias, transA=1, alpha=0.25, beta=2.0),
            weight=normal(5, 4, seed=1),
            bias=normal(4, seed=2),
        ),
        {"x": ROWS},
        lambda x, a, b: linear(x.T, a, b),
        "Gemm",
        ((5, 3), (3, 4)),
    ),
    "Conv": Case(
        lambda: built(
            IMAGES,
            lambda x, weight, bias: op.Conv(
                x, weight, bias, strides=[2, 2], dilations=[2, 1], pads=[1, 0, 2, 1]
            ),
            weight=normal(4, 3, 3, 3, seed=1),
            bias=normal(4, seed=2),
        ),
        {"x": IMAGES},
        convolved,
        "Conv",
        ((3, 3, 3, 3), (3, 4, 1, 1)),
    ),
    "Conv 1×1": Case(
        lambda: built(IMAGES, lambda x, weight: op.Conv(x, weight), weight=normal(4, 3, 1, 1)),
        {"x": IMAGES},
        lambda x, a, b: np.einsum("nihw,ir,ro->nohw", x, a[:, :, 0, 0], b[:, :, 0, 0]),
        "Conv",
        ((3, 3, 1, 1), (3, 4, 1, 1)),
    ),
    "Gather": Case(
        lambda: built(
            np.zeros((2, 3), np.int64),
            lambda x, weight: op.Gather(weight, x),
            weight=normal(9, 4, seed=1),
        ),
        {"x": np.array([[0, 8, -1], [3, 3, -9]])},
        lambda x, a, b: (a @ b)[x],
        "Gather",
        ((9, 3), (3, 4)),
        ["fc"],
    ),
    "MatMulNBits of 4 bits": Case(
        lambda: four_bits(WIDE),
        {"x": WIDE},
        linear,
        "MatMulNBits",
        ((32, 3), (3, 4)),
        is_quantized=True,
    ),
    "MatMulNBits of 8 bits with bias": Case(
        lambda: four_bits(WIDE, bits=8, bias=True),
        {"x": WIDE},
        linear,
        "MatMulNBits",
        ((32, 3), (3, 4)),
        is_quantized=True,
    ),
    "DequantizeLinear of 4 bits": Case(
        lambda: four_bits_dequantized(WIDE),
        {"x": WIDE},
        linear,
        "MatMul",
        ((32, 3), (3, 4)),
        is_quantized=True,
    ),
    "QuantizeLinear and DequantizeLinear": Case(
        lambda: rounded(WIDE),
        {"x": WIDE},
        linear,
        "MatMul",
        ((32, 3), (3, 4)),
        is_quantized=True,
    ),
    "DequantizeLinear": Case(
        lambda: dequantized(WIDE),
        {"x": WIDE},
        linear,
        "MatMul",
        ((32, 3), (3, 4)),
        is_quantized=True,
    ),
}


def branches() -> onnx.ModelProto:
    """Two layers in the branches of an If, which read weights of the main graph."""
    node = helper.make_node

    def branch(name: str) -> onnx.GraphProto:
        product = node("MatMul", ["x", f"{name}.weight"], [f"{name}_y"], name=f"/{name}/MatMul")
        info = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None)
        return helper.make_graph([product], name, [], [info])

    chosen = node("If", ["first"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    graph = helper.make_graph(
        [chosen],
        "branches",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6]),
            helper.make_tensor_value_info("first", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(normal(6, 4, seed=i), f"{n}.weight") for i, n in enumerate("ab")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
