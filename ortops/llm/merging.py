"""Merges an adapter into a model for runtimes without adapters; weights stay quantized."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from ortops.graph.adapters import adapter_of
from ortops.lora.merging import merge

Array: TypeAlias = npt.NDArray[Any]

_BITS = (2, 4, 8)
_PARTS = np.linspace(0.7, 1, 13, dtype=np.float32)
"""Parts of the range of a block to try: with a smaller range, most weights are rounded less."""

logger = logging.getLogger("ortops")


def merged_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with its adapter merged; MatMulNBits weights are quantized again.

    They keep their bits and block size. The log says how much rounding them again changes, next to
    what the adapter changes. Weights that are quantized in other ways become floating point.

    Args:
        model: A model with an adapter; not changed.

    Raises:
        ModelError: See `ortops.lora.merge`.
        UnsupportedError: If the output of a layer is quantized.
    """
    named, old = onnx.ModelProto(), dict[str, onnx.NodeProto]()
    named.CopyFrom(model)
    pairs = zip(model.graph.node, named.graph.node, strict=True)
    for number, (base, copy) in enumerate(pairs):
        if _is_quantized(base):  # whose name may be empty, or not unique
            copy.name = f"ortops.merged.{number}"
            old[copy.name] = base
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    updates = _updates(model, stored)
    result = merge(named, dequantize=True)
    weights = {tensor.name: tensor for tensor in result.graph.initializer}
    ratios, written = list[float](), dict[str, list[str]]()
    for node in result.graph.node:
        base = old.get(node.name)
        if base is None:
            continue
        node.name = base.name
        if node.op_type != "MatMul":
            continue
        weight = weights[node.input[1]]
        if weight.name not in written:
            update = updates[base.output[0]]
            if update:
                tensors, rounding = _quantized(base, weight, stored)
                ratios.append(rounding / update)
            else:  # what does not change is not rounded again
                tensors = [stored[name] for name in base.input[1:4] if name]
            result.graph.initializer.extend(t for t in tensors if t.name not in weights)
            written[weight.name] = [tensor.name for tensor in tensors]
        node.op_type, node.domain = base.op_type, base.domain
        node.input[1:] = written[weight.name]
        node.attribute.extend(base.attribute)
    for place in reversed(range(len(result.graph.initializer))):
        if result.graph.initializer[place].name in written:
            del result.graph.initializer[place]
    if ratios:
        logger.warning(
            "the adapter is merged into %d quantized layers, whose weights were rounded again: the "
            "rounding is %.2g times what the adapter changes (median of the layers; largest %.2g)",
            len(ratios),
            np.median(ratios),
            max(ratios),
        )
    kept = sum(node.op_type == "MatMulNBits" for node in result.graph.node)
    if kept < sum(node.op_type == "MatMulNBits" for node in model.graph.node):
        logger.warning("merging the adapter made quantized weights floating-point numbers")
    return result


def _is_quantized(node: onnx.NodeProto) -> bool:
    return node.op_type == "MatMulNBits" and _integer(node, "bits") in _BITS


def _integer(node: onnx.NodeProto, name: str) -> int:
    return next((each.i for each in node.attribute if each.name == name), 4)


def _updates(model: onnx.ModelProto, stored: Mapping[str, onnx.TensorProto]) -> dict[str, float]:
    """Returns the norm of what the adapter adds to the weight of each node, by its output."""
    adapter = adapter_of(model.metadata_props)
    squares, begins = dict[str, float](), dict[str, str]()
    for module in adapter.modules.values() if adapter else ():
        if module.kind != "linear":
            continue
        a, b = (numpy_helper.to_array(stored[name]) for name in (module.a, module.b))
        square = float(np.square(a.astype(np.float32) @ b.astype(np.float32)).sum())
        for base, total in module.tensors:  # parts of a fused layer follow each other
            begins[total] = begins.get(base, base)
            squares[begins[total]] = squares.get(begins[total], 0.0) + square
    return {name: square**0.5 for name, square in squares.items()}


def _quantized(
    base: onnx.NodeProto, weight: onnx.TensorProto, stored: Mapping[str, onnx.TensorProto]
) -> tuple[list[onnx.TensorProto], float]:
    """Quantizes a weight like that of a node; returns its tensors, and the norm of the rounding."""
    array = numpy_helper.to_array(weight)
    packed, scales, zeros, rounded = quantize(
        array.astype(np.float32),
        bits=_integer(base, "bits"),
        block_size=_integer(base, "block_size"),
        has_zeros=len(base.input) > 3 and bool(base.input[3]),
    )
    flat = len(stored[base.input[2]].dims) == 1  # both forms are valid
    arrays = {"quantized": packed, "scales": scales.astype(array.dtype)}
    if flat:
        arrays["scales"] = arrays["scales"].reshape(-1)
    if zeros is not None:
        arrays["zero_points"] = zeros.reshape(-1) if flat else zeros
    tensors = [
        numpy_helper.from_array(each, f"{weight.name}_{suffix}") for suffix, each in arrays.items()
    ]
    return tensors, float(np.linalg.norm(rounded - array))


def quantize(
    weight: Array, *, bits: int, block_size: int, has_zeros: bool
) -> tuple[Array, Array, Array | None, Array]:
    """Quantizes a matrix [in, out] in blocks of its columns, as MatMulNBits reads it.

    The scale of each block is the one of several with the smallest squared error.

    Args:
        weight: The matrix, float32.
        bits: The number of bits of a weight: 2, 4 or 8.
        block_size: The number of weights that share a scale.
        has_zeros: Whether blocks have zero points; otherwise zero is the middle of the range.

    Returns:
        The packed weights [out, blocks, bytes]; the scales [out, blocks], float32; the packed zero
        points [out, bytes], or None; and the rounded matrix [in, out].
    """
    blocks = _blocks(weight, block_size)
    best = np.full(blocks.shape[:2], np.inf, np.float32)
    scales, zeros = np.ones_like(best), np.zeros_like(best)
    for scale, zero in _candidates(blocks, bits, has_zeros):
        rounded = _rounded(blocks, scale, zero, bits)
        error = np.square((rounded - zero[..., None]) * scale[..., None] - blocks).sum(-1)
        better = error < best
        best[better] = error[better]
        scales[better], zeros[better] = scale[better], zero[better]
    whole = _rounded(blocks, scales, zeros, bits)
    restored = ((whole - zeros[..., None]) * scales[..., None]).reshape(len(blocks), -1)
    packed_zeros = _packed(zeros, bits) if has_zeros else None
    return _packed(whole, bits), scales, packed_zeros, restored[:, : len(weight)].T


def _blocks(weight: Array, block_size: int) -> Array:
    """Returns [out, blocks, block_size], with zeros at the end of the last block."""
    columns = weight.T
    padded = np.pad(columns, ((0, 0), (0, -columns.shape[1] % block_size)))
    return padded.reshape(len(columns), -1, block_size)


def _candidates(blocks: Array, bits: int, has_zeros: bool) -> Iterator[tuple[Array, Array]]:
    """Yields scales and zero points [out, blocks]."""
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    outer = np.where(-low > high, low, high)
    for part in _PARTS:
        if has_zeros:
            scale = _not_zero((high - low) * part / top)
            yield scale, np.clip(np.rint(-low * part / scale), 0, top)
        else:  # the range has one more step below its middle than above
            yield _not_zero(-outer * part / middle), np.full_like(outer, middle)
            yield _not_zero(outer * part / (middle - 1)), np.full_like(outer, middle)


def _not_zero(scale: Array) -> Array:
    return np.where(scale == 0, np.float32(1), scale)


def _rounded(blocks: Array, scales: Array, zeros: Array, bits: int) -> Array:
    found: Array = np.rint(blocks / scales[..., None]) + zeros[..., None]
    return found.clip(0, 2**bits - 1)


def _packed(numbers: Array, bits: int) -> Array:
    """Packs whole numbers along the last axis into bytes, the first into the lowest bits."""
    each = 8 // bits
    whole = numbers.astype(np.uint8)
    filled = np.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, -whole.shape[-1] % each)])
    groups = filled.reshape(*filled.shape[:-1], -1, each)
    shifts = (np.arange(each) * bits).astype(np.uint8)
    packed: Array = np.bitwise_or.reduce(groups << shifts, axis=-1)
    return packed
