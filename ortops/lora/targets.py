"""Chooses the nodes that get an adapter: those that multiply by a weight matrix."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortops.building.parameters import ScopeNames, matches, names_in, scopes_of, why_not
from ortops.errors import ArgumentError, ModelError, UnsupportedError, did_you_mean
from ortops.graph.edit import all_nodes, describe

__all__ = ["Target", "chosen", "steps_to_weight", "targets"]

_MICROSOFT = "com.microsoft"

logger = logging.getLogger("ortops")

_ALL_LINEAR = "all-linear"

_INDICES = {"Conv": 1, "Gather": 0, "Gemm": 1, "MatMul": 1, "MatMulNBits": 1}
"""The index of the weight among the inputs, by operator."""

_REFUSED = {
    **dict.fromkeys(("ConvTranspose", "DeformConv", "FusedConv", "FusedGemm", "FusedMatMul"), 1),
    **dict.fromkeys(("ConvInteger", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulBnb4"), 1),
    **dict.fromkeys(("MatMulIntegerToFloat", "GRU", "LSTM", "RNN", "Attention"), 1),
    **dict.fromkeys(("QGemm", "QLinearConv", "QLinearMatMul"), 3),
    "GatherBlockQuantized": 0,
}
_LINEAR = (
    *("DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulBnb4"),
    *("MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QGemm", "QLinearMatMul"),
)
_SHAPED = ("Reshape", "Squeeze", "Unsqueeze", "Slice", "Gather", "Expand")
_AFTER_OUTPUT_LAYER = (
    *(*_SHAPED, "Add", "Cast", "Div", "DequantizeLinear", "Flatten", "Identity", "LogSoftmax"),
    *("Mul", "QuantizeLinear", "Sigmoid", "Softmax", "Sub", "Tanh", "Transpose"),
)
_MOVING = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_KINDS = {"Conv": "convolution", "Gather": "embedding"}


@dataclass(frozen=True, eq=False)
class Target:
    """A node with a weight that an adapter may be added to.

    Attributes:
        node: The node.
        kind: See `ortops.graph.adapters.Module`.
        weight: The initializer, or the output of the Constant node, with the weight's values.
        index: The index of the weight among the node's inputs.
        sizes: The number of input and output features.
        kernel: The shape of a convolution's kernel.
        dtype: The type that the node computes in.
        module: The name of the layer that the exporter wrote.
        refused: The reason why the node cannot have an adapter; empty if it can.
        is_default: Whether it gets an adapter if no targets are given.
    """

    node: ir.Node
    kind: str
    weight: ir.Value
    index: int
    sizes: tuple[int, int]
    kernel: tuple[int, ...]
    dtype: ir.DataType
    module: str
    refused: str = ""
    is_default: bool = True

    def is_meant(self, pattern: str) -> bool:
        """Whether a pattern matches the node's weight, layer or scopes."""
        name = self.weight.name or ""
        return fnmatch.fnmatchcase(self.module, pattern) or matches(
            pattern, name, ScopeNames((scopes_of(self.node),))
        )


def targets(work: ir.Model) -> list[Target]:
    """Returns the nodes that multiply by a weight, including those that cannot have an adapter."""
    found = (_target(node) for node in all_nodes(work.graph))
    return [target for target in found if target is not None]


def chosen(work: ir.Model, patterns: str | Sequence[str] | None) -> list[Target]:
    """Returns the nodes that get an adapter.

    Args:
        work: The model.
        patterns: Names or patterns of weights, layers, or scopes of nodes; ``"all-linear"`` for
            every linear layer except the output layer; None for every MatMul, Gemm, Conv and
            MatMulNBits whose matrix is a weight.

    Raises:
        ArgumentError: If the patterns are not strings.
        ModelError: If a pattern matches nothing, or no node can have an adapter.
        UnsupportedError: If a pattern matches only nodes that cannot have an adapter.
    """
    everything = targets(work)
    if patterns is None:
        default = [t for t in everything if t.is_default and not t.refused]
        reasons = [t.refused for t in everything if t.refused]
        if default:
            _log_refused(reasons)
            return default
        if reasons:
            raise UnsupportedError(f"{reasons[0]}; no other node of the model can have an adapter")
        inside = "; inline the model's functions with onnx.inliner and try again" * bool(
            work.functions
        )
        raise ModelError(
            "model: an adapter needs a MatMul, Gemm, Conv or MatMulNBits node whose second operand "
            f"is a weight, and the model has none{inside}"
        )
    if not isinstance(patterns, Iterable):
        raise ArgumentError(f"targets must be names or patterns, got {patterns!r:.80}")
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ArgumentError("targets must name at least one weight or layer, got an empty list")
    result: dict[Target, None] = {}
    left: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"targets must be names or patterns, got {pattern!r:.80}")
        if pattern == _ALL_LINEAR:
            meant = _all_linear(work, everything)
        else:
            meant = [target for target in everything if target.is_meant(pattern)]
        if not meant and pattern == _ALL_LINEAR:
            raise ModelError(
                "targets: 'all-linear' matches no layer: it is every linear layer except the "
                "output layer; name the layers to adapt"
            )
        if not meant:
            known = [n for t in everything for n in (t.module, t.weight.name or "")]
            raise ModelError(
                f"targets: '{pattern}' matches no weight of a MatMul, Gemm, Conv, Gather or "
                f"MatMulNBits node; {did_you_mean(pattern, dict.fromkeys(known))}"
            )
        taken = [target for target in meant if not target.refused]
        if not taken:
            raise UnsupportedError(f"{meant[0].refused}; remove '{pattern}' from targets")
        result.update(dict.fromkeys(taken))
        left.update(dict.fromkeys(target.refused for target in meant if target.refused))
    _log_refused(list(left))
    return [target for target in everything if target in result]


def _all_linear(work: ir.Model, everything: Sequence[Target]) -> list[Target]:
    """Returns what PEFT means by ``"all-linear"``: all linear layers except the output layer."""
    left_out = _output_modules(work, everything)
    linear = [t for t in everything if t.node.op_type in _LINEAR and t.module not in left_out]
    return [target for target in linear if target.is_default or target.refused]


def _output_modules(work: ir.Model, everything: Sequence[Target]) -> set[str]:
    """Returns the layers named lm_head, and the one that computes the first float output.

    Between that layer and the output there may be a bias, a Softmax, a soft cap and other nodes
    that read nothing else that was computed from the inputs.
    """
    found = {t.module for t in everything if t.module.rpartition(".")[2] == "lm_head"}
    by_node = {target.node: target.module for target in everything}
    floats = (v for v in work.graph.outputs if v.dtype is None or v.dtype.is_floating_point())
    value: ir.Value | None = next(floats, None)
    while value is not None:
        node = value.producer()
        if node is None or node in by_node:
            return found if node is None else found | {by_node[node]}
        if node.op_type not in _AFTER_OUTPUT_LAYER or node.domain not in ("", _MICROSOFT):
            return found
        read = [v for v in node.inputs if v is not None]
        computed = [v for v in read if ir.convenience.get_const_tensor(v) is None]
        value = read[0] if node.op_type in _SHAPED or computed == read[:1] else None
        if value is None and len(computed) == 1:
            (value,) = computed
    return found


def _log_refused(reasons: Sequence[str]) -> None:
    if reasons:
        logger.warning("%d layers get no adapter, such as %s", len(reasons), reasons[0])


def steps_to_weight(value: ir.Value | None) -> tuple[ir.Value, list[ir.Node]] | None:
    """Returns the constant that stores a weight, and the nodes between it and a value, in order.

    Returns:
        None if the value is not a weight that is only transposed, cast or dequantized.
    """
    steps: list[ir.Node] = []
    while value is not None:
        node = value.producer()
        if node is None:
            held = value.is_initializer() and value.const_value is not None
            return (value, steps[::-1]) if held else None
        if node.op_type == "Constant" and not node.domain:
            return value, steps[::-1]
        if node.op_type not in _MOVING or node.domain not in ("", _MICROSOFT):
            return None
        steps.append(node)
        value = node.inputs[0]
    return None


def _target(node: ir.Node) -> Target | None:
    kind = node.op_type
    if node.domain not in ("", _MICROSOFT) or kind not in (*_INDICES, *_REFUSED):
        return None
    index = _INDICES.get(kind, _REFUSED.get(kind, 1))
    found = steps_to_weight(node.inputs[index]) if index < len(node.inputs) else None
    if found is None and kind == "MatMul" and node.inputs[0] is not None:
        index, found = 0, steps_to_weight(node.inputs[0])
    if found is None:
        return None
    weight, steps = found
    shape, dtype = _effective(weight, steps)
    if shape is None or dtype is None:
        return None
    refused, sizes, kernel, is_default = "", (0, 0), tuple[int, ...](), kind != "Gather"
    if kind in _REFUSED:
        refused = "only MatMul, Gemm, Conv, Gather and MatMulNBits can have an adapter"
    elif kind == "MatMulNBits":
        sizes = (node.attributes["K"].as_int(), node.attributes["N"].as_int())
        scales = node.inputs[2]
        dtype = dtype if scales is None or scales.dtype is None else scales.dtype
    elif kind == "Conv":
        group = node.attributes.get_int("group", 1)
        if len(shape) < 3:
            return None
        sizes, kernel = (shape[1], shape[0]), shape[2:]
        if group != 1:
            refused = f"an adapter needs group=1, got {group}"
    elif len(shape) != 2:
        if kind == "Gather" or len(shape) < 2:
            return None
        refused = f"an adapter needs a matrix, but weight '{weight.name}' is {list(shape)}"
    elif kind == "MatMul" and index == 0:
        refused = f"an adapter needs a right factor, but weight '{weight.name}' is the left one"
    elif kind == "Gather" and node.attributes.get_int("axis", 0) != 0:
        return None
    else:
        transposed = kind == "Gemm" and node.attributes.get_int("transB", 0) == 1
        sizes = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    if not refused and dtype not in _FLOATS:
        if not dtype.is_floating_point():
            return None
        refused = f"an adapter needs FLOAT, FLOAT16 or DOUBLE, but the node computes in {dtype}"
    if weight.dtype is not None and weight.dtype.is_floating_point() and why_not(weight):
        is_default = False
    return Target(
        node,
        _KINDS.get(kind, "linear"),
        weight,
        index,
        sizes,
        kernel,
        dtype,
        _module(node, weight),
        f"{describe(node)}: {refused}" if refused else "",
        is_default,
    )


def _effective(
    weight: ir.Value, steps: Sequence[ir.Node]
) -> tuple[tuple[int, ...] | None, ir.DataType | None]:
    """Returns the shape and the type of a weight after the nodes that transform it."""
    tensor = ir.convenience.get_const_tensor(weight)
    if tensor is None:
        return None, None
    shape, dtype = tuple(int(size) for size in tensor.shape.numpy()), tensor.dtype
    for node in steps:
        if node.op_type == "Transpose":
            axes = node.attributes.get_ints("perm", range(len(shape))[::-1])
            shape = tuple(shape[axis] for axis in axes)
        elif node.op_type == "Cast":
            dtype = ir.DataType(node.attributes["to"].as_int())
        elif node.op_type == "DequantizeLinear":
            scale = node.inputs[1]
            known = None if scale is None else ir.convenience.get_const_tensor(scale)
            dtype = ir.DataType.FLOAT if known is None else known.dtype
            if "output_dtype" in node.attributes:
                dtype = ir.DataType(node.attributes["output_dtype"].as_int())
    return shape, dtype


def _module(node: ir.Node, weight: ir.Value) -> str:
    """Returns the name of the layer that a node was exported from.

    PyTorch's newer exporter stores it in the metadata, the older one in the names of nodes.
    Otherwise it is taken from the name of the weight.
    """
    names = names_in(node.metadata_props.get("pkg.torch.onnx.name_scopes", ""))
    if len(names) > 1 and names[-2]:
        return names[-2]
    around = (node.name or "").strip("/").rpartition("/")[0].replace("/", ".")
    name = weight.name or ""
    if name.endswith(".weight") and (len(weight.uses()) == 1 or not around):
        return name.removesuffix(".weight")
    return around or name.removesuffix(".weight") or node.name or node.op_type
