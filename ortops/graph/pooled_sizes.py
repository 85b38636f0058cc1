"""The output sizes of pooling operators with ceil_mode.

onnxruntime, PyTorch and version 22 of the operators omit a last window that starts in the end
padding. For earlier versions, onnx's shape inference counts that window. onnxruntime plans its
memory with the inferred shape, and fails if the actual size differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_POOLS = ("AveragePool", "LpPool", "MaxPool")


def pooled_sizes(node: ir.Node) -> list[int | None] | None:
    """Returns the spatial output sizes of a pooling node with ceil_mode.

    Args:
        node: Any node.

    Returns:
        A size for each spatial axis, or None if the input size is unknown; None instead of a list
        for other nodes, and if the rank is unknown.
    """
    axes = _axes(node)
    return None if axes is None else [_count(*axis) for axis in axes]


def is_miscounted(node: ir.Node, version: int) -> bool:
    """Whether onnx's shape inference counts a window that onnxruntime omits.

    Args:
        node: Any node.
        version: The version of the operators.
    """
    axes = _axes(node) if version < 22 else None
    return axes is not None and any(_count(*axis) != _all(*axis) for axis in axes)


def without_ceil_mode(node: ir.Node) -> tuple[list[int], bool]:
    """Returns pads with which the pooling has the same number of windows without ceil_mode.

    Args:
        node: A node that `is_miscounted`.

    Returns:
        The pads, and whether onnxruntime supports them and computes the same values.
    """
    axes = _axes(node)
    assert axes is not None
    ends = []
    for axis in axes:
        length, extent, step, begin, end = axis
        count = _count(*axis)
        if length is not None and count is not None:
            end = max((count - 1) * step + extent - length - begin, 0)
        ends.append(end)
    before = [end for *_, end in axes]
    counted = node.attributes.get("count_include_pad")
    is_same = ends == before or counted is None or not counted.as_int()
    kernel = node.attributes["kernel_shape"].as_ints()
    fits = all(pad < size for pad, size in zip(ends, kernel, strict=True))
    known = all(length is not None for length, *_ in axes)
    return [*(begin for *_, begin, _ in axes), *ends], is_same and fits and known


def _axes(node: ir.Node) -> list[tuple[int | None, int, int, int, int]] | None:
    """Returns (size, window extent, stride, begin pad, end pad) of each spatial axis."""
    given = node.attributes
    ceil_mode, auto_pad = given.get("ceil_mode"), given.get("auto_pad")
    if node.domain or node.op_type not in _POOLS or ceil_mode is None or not ceil_mode.as_int():
        return None
    padding = "NOTSET" if auto_pad is None else auto_pad.as_string()
    x = node.inputs[0]
    if padding not in ("NOTSET", "VALID") or x is None or x.shape is None:
        return None
    kernel = list(given["kernel_shape"].as_ints())
    rank = len(kernel)
    if len(x.shape) != rank + 2:
        return None

    def ints(name: str, default: Sequence[int]) -> list[int]:
        return list(given[name].as_ints() if name in given else default)

    pads = [0] * 2 * rank if padding == "VALID" else ints("pads", [0] * 2 * rank)
    steps, spread = ints("strides", [1] * rank), ints("dilations", [1] * rank)
    if not len(pads) == 2 * rank == 2 * len(steps) == 2 * len(spread):
        return None
    lengths = [size if isinstance(size, int) else None for size in x.shape[2:]]
    extents = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, spread, strict=True)]
    return list(zip(lengths, extents, steps, pads[:rank], pads[rank:], strict=True))


def _all(length: int | None, extent: int, step: int, begin: int, end: int) -> int | None:
    """Returns the number of windows, including those that start in the end padding."""
    if length is None or step < 1:
        return None
    count = -(-(length + begin + end - extent) // step) + 1
    return count if count > 0 else None


def _count(length: int | None, extent: int, step: int, begin: int, end: int) -> int | None:
    """Returns the number of windows that onnxruntime computes."""
    count = _all(length, extent, step, begin, end)
    if count is None or length is None or (count - 1) * step < length + begin:
        return count
    return count - 1
