"""Quantized weights that stay quantized: they are dequantized when a product reads them.

The definition of MatMulNBits dequantizes constant weights with standard operators in the backward
pass. onnxruntime would evaluate these when it opens the model, and keep all weights in float32.
This pass uses GatherBlockQuantized, which dequantizes a matrix in one node and as fast as memory
allows. What the node reads depends on the cotangent, so that onnxruntime neither evaluates it in
advance nor shares its result between products: the matrix is freed after its only reader.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import emit_one
from ortops.graph.faults import outputs_of
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.names import Names
from ortops.graph.passes.draft import SESSION, Draft, Pass
from ortops.graph.passes.products import fused_matmul
from ortops.graph.passes.rewrite import Result, pattern, rewrite_with_bodies
from ortops.graph.shapes import zero_after
from ortops.graph.tensor import Tape, Tensor, op

_BYTES = 2**26
"""The largest size of a dequantized matrix; the head of a large vocabulary takes gigabytes."""


class _QuantizedWeights(Pass):
    """Selects the rule for MatMulNBits nodes whose weights are constants."""

    def prepare(self, draft: Draft) -> None:
        """Adds the rule, unless there are gradients of higher order."""
        chosen = any(_is_chosen(node) and draft.is_free(node) for node in draft.graph)
        if chosen and draft.is_of_first_order and has_kernel():
            table = Table()  # also for copies of these nodes in the bodies that passes write
            table.vjp("MatMulNBits", domain=MICROSOFT, when=_is_chosen)(_matmul_nbits)
            draft.add_rules(table)


def dequantize_products(graph: ir.Graph, names: Names) -> None:
    """Dequantizes the weights of all MatMulNBits nodes for a product in float32, in place.

    Without the copy of the weights that onnxruntime makes in another order when it opens a model,
    its own kernel takes a third longer than this.

    Args:
        graph: A lowered graph.
        names: The names used in it.
    """
    if has_kernel():
        rewrite_with_bodies(graph, names, _in_float32)


@functools.cache
def has_kernel() -> bool:
    """Returns whether onnxruntime has the kernel here, for bytes with two numbers each."""
    with Tape(name="probe") as tape:
        x = tape.input("x", np.float32, [1, 16])
        b = tape.initializer("b", np.full((16, 1, 8), 0x92, np.uint8))
        scales = tape.initializer("scales", np.ones((16, 1), np.float32))
        tape.output(_dequantized(x, b, scales, None, 16, 16, 16, 4), "y")
    found = outputs_of(tape.model())
    wanted = np.tile(np.array([-6, 1], np.float32), (16, 8))
    return found is not None and np.array_equal(found[0], wanted)


def _is_chosen(node: ir.Node) -> bool:
    if (node.domain, node.op_type) != (MICROSOFT, "MatMulNBits"):
        return False
    attributes = node.attributes
    weights = [value for value in node.inputs[1:] if value is not None]
    scales = node.inputs[2]
    return (
        scales is not None
        and scales.dtype == ir.DataType.FLOAT
        and node.outputs[0].dtype == ir.DataType.FLOAT
        and attributes.get_int("bits", 4) in (4, 8)
        and not attributes["K"].as_int() % attributes["block_size"].as_int()
        and not attributes.get_int("weight_prepacked", 0)
        and (len(node.inputs) < 5 or node.inputs[4] is None)
        and all(constant_tensor(value) is not None for value in weights)
        and all(
            value is None or value.dtype == ir.DataType.UINT8
            for value in (node.inputs[1], *node.inputs[3:4])
        )
    )


def _matmul_nbits(
    g: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    g_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    K: int,
    N: int,
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Cotangents:
    total: Tensor | None = None
    for first, last in _parts(K, N):
        part = g if last - first == N else g[..., first:last]
        reader = part if total is None else total
        rows = first, last
        weights = _dequantized(reader, b, scales, zero_points, K, N, block_size, bits, rows)
        product = op.MatMul(part, weights)
        total = product if total is None else total + product
    return total, *[None] * 5


def _parts(k: int, n: int) -> list[tuple[int, int]]:
    """Returns ranges of rows of a matrix [n, k], each of at most `_BYTES` in float32."""
    count = -(-4 * k * n // _BYTES)
    return list(itertools.pairwise(n * part // count for part in range(count + 1)))


@pattern("MatMulNBits", domain=MICROSOFT)
def _in_float32(node: ir.Node, tape: Tape) -> Result:
    if not _is_chosen(node):
        return None
    inputs = [None if value is None else tape.tensor(value) for value in node.inputs]
    x, b, scales, zero_points, _, bias = (*inputs, None, None, None)[:6]
    assert x is not None
    assert b is not None
    assert scales is not None
    k, n, block = (node.attributes[name].as_int() for name in ("K", "N", "block_size"))
    bits = node.attributes.get_int("bits", 4)
    products: list[Tensor] = []
    for rows in _parts(k, n):
        # Each part waits for the one before, so that they are not in memory together.
        reader = products[-1] if products else x
        weights = _dequantized(reader, b, scales, zero_points, k, n, block, bits, rows)
        products.append(fused_matmul(tape, [x.value, weights.value], [0, 1]))
    y = products[0] if len(products) == 1 else op.Concat(*products, axis=-1)
    return y if bias is None else y + bias


def _dequantized(
    reader: Tensor,
    b: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    k: int,
    n: int,
    block_size: int,
    bits: int,
    rows: tuple[int, int] | None = None,
) -> Tensor:
    """Dequantizes weights [n, k], but not before a tensor is available.

    Args:
        reader: The tensor: the other factor of the product.
        b: The numbers, [n, blocks, bytes].
        scales: The scales, [n, blocks] or flat.
        zero_points: The zero points, [n, bytes] or flat.
        k: The number of columns.
        n: The number of rows.
        block_size: The number of columns per block.
        bits: The bits of a number.
        rows: The first row to dequantize and the one after the last; all by default.
    """
    first, last = rows or (0, n)
    numbers = op.Reshape(b, op.Add([n, k * bits // 8], zero_after(reader)))  # a view
    # onnxruntime rejects zero points unless it knows their shape and that of the scales.
    scales = _of_shape(scales, n, k // block_size)
    if zero_points is not None:
        zero_points = _of_shape(zero_points, n, -(-k // block_size * bits // 8))
    indices = reader.tape.constant(np.arange(first, last, dtype=np.int32))
    return emit_one(
        MICROSOFT,
        "GatherBlockQuantized",
        [numbers, indices, scales, zero_points],
        (last - first, k),
        bits=bits,
        block_size=block_size,
        gather_axis=0,
        quantize_axis=1,
    )


def _of_shape(x: Tensor, *shape: int) -> Tensor:
    return x if x.shape == shape else op.Reshape(x, shape)


QUANTIZED_WEIGHTS = _QuantizedWeights("quantized_weights", SESSION)
