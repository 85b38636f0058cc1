"""Fused layers: which columns of the output of qkv_proj or gate_up_proj belong to which part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from ortops.graph.layer_names import FUSED

_MOST_NODES = 4  # between a fused layer and its reader: a bias, a cast, a scale


def part_columns(module: str, y: ir.Value, width: int) -> dict[str, tuple[int, int, int]]:
    """Returns the columns of each part of a fused layer.

    Args:
        module: The name of the layer.
        y: Its output.
        width: The number of columns of its output.

    Returns:
        For the name of each part: its first and its last column (exclusive), and the number of all
        columns. Empty if the layer is not fused, or the sizes of its parts are unknown.
    """
    scope, dot, last = module.rpartition(".")
    names = FUSED.get(last, ())
    if not names:
        return {}
    sizes = _sizes(y, width, len(names))
    if sizes is None or len(sizes) != len(names) or sum(sizes) != width or min(sizes) < 1:
        return {}
    ends = itertools.accumulate(sizes)
    return {
        scope + dot + name: (end - size, end, width)
        for name, size, end in zip(names, sizes, ends, strict=True)
    }


def _sizes(y: ir.Value, width: int, count: int) -> Sequence[int] | None:
    """Returns the sizes of the parts, as the nodes that read a fused layer split it."""
    for _ in range(_MOST_NODES):
        readers = [use.node for use in y.uses() if use.node.op_type != "Shape"]
        for node in readers:
            if node.op_type == "Split":
                return _split_sizes(node, width)
            if node.op_type == "GroupQueryAttention" and node.inputs[1] is None:
                heads = node.attributes.get_int("num_heads", 0)
                pairs = node.attributes.get_int("kv_num_heads", 0)
                size, rest = divmod(width, max(1, heads + 2 * pairs))
                return None if rest else (heads * size, pairs * size, pairs * size)
        if count == 2 and len(readers) != 1:
            return (width // 2, width - width // 2) if _is_halved(readers) else None
        if len(readers) != 1 or readers[0].op_type not in ("Add", "Cast", "Identity", "Mul"):
            return None
        y = readers[0].outputs[0]
    return None


def _split_sizes(node: ir.Node, width: int) -> Sequence[int] | None:
    count = len(node.outputs)
    given = node.inputs[1] if len(node.inputs) > 1 else None
    if given is not None:
        tensor = ir.convenience.get_const_tensor(given)
        return None if tensor is None else [int(size) for size in tensor.numpy()]
    if "split" in node.attributes:
        return list(node.attributes["split"].as_ints())
    return [width // count] * count


def _is_halved(readers: Sequence[ir.Node]) -> bool:
    return len(readers) == 2 and all(node.op_type == "Slice" for node in readers)
