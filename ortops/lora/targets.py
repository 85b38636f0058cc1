"""Chooses the nodes that get an adapter: those that multiply by a weight matrix."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ortops._common.notes import say_note
from ortops.engine.building.parameters import why_not
from ortops.engine.building.scopes import ScopeNames, matches, names_in, scopes_of, split
from ortops.errors import ArgumentError, ModelError, UnsupportedError, did_you_mean
from ortops.graph.edit import all_nodes, describe
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.layer_names import plain, standard
from ortops.graph.operators import MATRIX_PRODUCTS, WEIGHTS
from ortops.lora.fused import part_columns

_ALL_LINEAR = "all-linear"

_SUPPORTED = ("Conv", "Gather", "Gemm", "MatMul")
_WITH_QUANTIZED = ("GatherBlockQuantized", "MatMulInteger", "MatMulNBits")
_INDICES = {**WEIGHTS, "Gather": 0}
"""The index of the weight among the inputs, by operator."""

_BIASES = {"Gemm": 2, "Conv": 2, "MatMulNBits": 5}
"""The index of the bias among the inputs, by operator."""

_SHAPED = ("Reshape", "Squeeze", "Unsqueeze", "Slice", "Gather", "Expand")
_AFTER_OUTPUT_LAYER = (
    *(*_SHAPED, "Add", "Cast", "Div", "DequantizeLinear", "Flatten", "Identity", "LogSoftmax"),
    *("Mul", "QuantizeLinear", "Sigmoid", "Softmax", "Sub", "Tanh", "Transpose"),
)
_MOVING = ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear", "Transpose")
_16_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, *_16_BITS)
_EMBEDDINGS = ("Gather", "GatherBlockQuantized")
_KINDS = {"Conv": "convolution", **dict.fromkeys(_EMBEDDINGS, "embedding")}


def bias_of(node: ir.Node) -> ir.Value | None:
    """Returns the bias that a node of a layer adds itself; None if there is none."""
    index = _BIASES.get(node.op_type, len(node.inputs))
    return next(iter(node.inputs[index : index + 1]), None)


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
        columns: For a part of a fused layer: its first and last column (exclusive) among the
            output's, and the number of all; empty otherwise.
        ends: The input and the output of a layer of several nodes.
        first: The layer's first call, if it is called several times.
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
    columns: tuple[int, ...] = ()
    ends: tuple[ir.Value, ir.Value] | None = None
    first: Target | None = None

    @property
    def key(self) -> object:
        """What all calls of a layer, and no other layers, have in common."""
        return self.module, (self.first or self).weight, self.kind, self.sizes

    def is_meant(self, pattern: str) -> bool:
        """Whether a pattern matches the node's weight, layer or scopes."""
        if self.has_name(pattern):
            return True
        name = self.weight.name or ""
        return not self.columns and matches(pattern, name, ScopeNames((scopes_of(self.node),)))

    def has_name(self, pattern: str) -> bool:
        """Whether a pattern matches the layer's name in the model or in transformers."""
        names = (self.module, standard(self.module))
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)

    @property
    def x(self) -> ir.Value | None:
        """The layer's input."""
        return self.ends[0] if self.ends else self.node.inputs[self.kind == "embedding"]

    @property
    def y(self) -> ir.Value:
        """The layer's output."""
        return self.ends[1] if self.ends else self.node.outputs[0]

    @property
    def adapter_dtype(self) -> ir.DataType:
        """The type of A and B: float32 beside 16 bits, as in PEFT."""
        return ir.DataType.FLOAT if self.dtype in _16_BITS else self.dtype


def targets(work: ir.Model) -> list[Target]:
    """Returns the nodes that multiply by a weight, including those that cannot have an adapter."""
    found = [t for t in map(_target, all_nodes(work.graph)) if t is not None]
    names = {target.module for target in found}
    groups: dict[object, list[list[Target]]] = {}
    for target in found:
        plain_name = re.sub(r"_[0-9]+$", "", target.module)
        near = [*groups.get(target.weight, ()), *groups.get(plain_name, ())]
        calls = next((each for each in near if _is_call(target, each[0], names)), None)
        if calls is None:
            calls = list[Target]()
            groups.setdefault(target.weight, []).append(calls)
            groups.setdefault(plain_name, []).append(calls)
        calls.append(target)
    known = {}
    for calls in (each for key, many in groups.items() if isinstance(key, str) for each in many):
        name = max((call.module for call in calls), key=lambda name: (name.count("."), -len(name)))
        known.update({call.node: (name, calls[0]) for call in calls if len(calls) > 1})
    return [
        replace(t, module=known[t.node][0], first=known[t.node][1]) if t.node in known else t
        for t in found
    ]


def _is_call(target: Target, first: Target, names: Set[str]) -> bool:
    """Whether a node is another call of the layer that a node before it was exported from.

    PyTorch's newer exporter gives both one name, but may store the weight twice. The older one
    appends a number to a scope for each call, and starts it at the module that makes the call. It
    counts all modules of a name, such as those in a ModuleDict, together, and the first has none.
    """
    if (target.kind, target.sizes) != (first.kind, first.sizes) or target.refused or first.refused:
        return False
    if target.weight is not first.weight and not _is_stored_alike(target, first):
        return False
    if target.weight is not first.weight and target.node.op_type == first.node.op_type:
        return target.module == first.module
    without = [re.sub(r"_[0-9]+(?=\.|$)", "", each.module) for each in (target, first)]
    pairs = zip(*(reversed(name.split(".")) for name in without), strict=False)
    return all(new == old for new, old in pairs) and not names.isdisjoint(without)


def _is_stored_alike(target: Target, other: Target) -> bool:
    """Whether the weights of two nodes, and what they are dequantized with, are equal.

    Gemm reads a matrix transposed that MatMul reads as it is.
    """
    stored = [
        [ir.convenience.get_const_tensor(value) for value in _stored(each) if value is not None]
        for each in (target, other)
    ]
    if len(stored[0]) != len(stored[1]) or any(each is None for each in (*stored[0], *stored[1])):
        return False
    one, two = ([each.numpy() for each in found if each is not None] for found in stored)
    if target.node.op_type != other.node.op_type:
        return len(one) == 1 and np.array_equal(one[0].T, two[0])
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def _stored(target: Target) -> list[ir.Value | None]:
    """Returns the constants that the weight of a node is computed from."""
    found = steps_to_weight(target.node.inputs[target.index])
    assert found is not None
    others = target.node.inputs[2:5] if target.node.op_type in _WITH_QUANTIZED else ()
    return [found[0], *(value for step in found[1] for value in step.inputs[1:]), *others]


def parts(target: Target) -> list[Target]:
    """Returns the parts of a fused layer, such as q_proj, k_proj and v_proj; otherwise nothing."""
    found = part_columns(target.module, target.y, target.sizes[1]) if not target.refused else {}
    return [
        replace(
            target, module=name, sizes=(target.sizes[0], last - first), columns=(first, last, width)
        )
        for name, (first, last, width) in found.items()
    ]


def chosen(work: ir.Model, patterns: str | Sequence[str] | None) -> list[Target]:
    """Returns the nodes that get an adapter.

    Args:
        work: The model.
        patterns: Names or patterns of weights, layers, or scopes of nodes; ``"all-linear"`` for
            every linear layer except the output layer; None for every MatMul, Gemm, Conv and
            MatMulNBits whose matrix is a weight. Patterns that begin with ``!`` exclude.

    Raises:
        ArgumentError: If the patterns are not strings.
        ModelError: If a pattern matches nothing, or no node can have an adapter.
        UnsupportedError: If a pattern matches only nodes that cannot have an adapter.
    """
    everything = targets(work)
    if patterns is None:
        return _by_default(work, everything)
    if not isinstance(patterns, Iterable):
        raise ArgumentError(f"targets must be names or patterns, got {patterns!r:.80}")
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not patterns:
        raise ArgumentError("targets must name at least one weight or layer, got an empty list")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"targets must be names or patterns, got {pattern!r:.80}")
    pieces = {target: parts(target) for target in everything}
    layers = [each for target in everything for each in (target, *pieces[target])]
    known = dict.fromkeys(n for t in layers for n in (t.module, t.weight.name or ""))
    included, excluded = split(patterns, known)
    out: set[Target] = set()
    for pattern in excluded:
        for target in _found(work, everything, pieces, pattern, known, "!"):
            out.update((target, *pieces.get(target, ())))
    result: dict[Target, None] = {}
    left: dict[str, None] = {}
    for pattern in included:
        meant = _found(work, everything, pieces, pattern, known)
        kept = [each for target in meant for each in _without(out, target, pieces)]
        taken = [target for target in kept if not target.refused]
        if not kept:
            raise ModelError(
                f"targets: nothing of '{pattern}' is left to adapt, because of "
                f"{', '.join(f'!{each}' for each in excluded)}; leave one of them out"
            )
        if not taken:
            raise UnsupportedError(f"{kept[0].refused}; remove '{pattern}' from targets")
        result.update(dict.fromkeys(taken))
        left.update(dict.fromkeys(target.refused for target in kept if target.refused))
    _log_refused(list(left))
    # All calls of a layer, where a pattern has the scope of one of them.
    calls = {target.key for target in result} - {target.key for target in out}
    return [t for t in layers if (t.key in calls if t.first is not None else t in result)]


def _by_default(work: ir.Model, everything: Sequence[Target]) -> list[Target]:
    """Returns the nodes that get an adapter if no targets are given."""
    default = [t for t in everything if t.is_default and not t.refused]
    reasons = [t.refused for t in everything if t.refused]
    if default:
        _log_refused(reasons)
        return default
    if reasons:
        raise UnsupportedError(f"{reasons[0]}; no other node of the model can have an adapter")
    inside = "; inline the model's functions with onnx.inliner and try again" * bool(work.functions)
    raise ModelError(
        "model: an adapter needs a MatMul, Gemm, Conv or MatMulNBits node whose second operand "
        f"is a weight, and the model has none{inside}"
    )


def _without(
    out: Set[Target], target: Target, pieces: Mapping[Target, Sequence[Target]]
) -> list[Target]:
    """Returns a layer, or the parts of a fused layer that are left, without what is excluded."""
    if target in out or out.isdisjoint(pieces.get(target, ())):
        return [target] if target not in out else []
    return [part for part in pieces[target] if part not in out]


def _found(
    work: ir.Model,
    everything: Sequence[Target],
    pieces: Mapping[Target, Sequence[Target]],
    pattern: str,
    known: Collection[str],
    sign: str = "",
) -> list[Target]:
    """Returns the layers that a pattern matches, at least one."""
    if pattern == _ALL_LINEAR:
        if meant := _all_linear(work, everything):
            return meant
        raise ModelError(
            f"targets: '{sign}all-linear' matches no layer: it is every linear layer except the "
            "output layer; name the layers to adapt"
        )
    if meant := _meant(everything, pieces, pattern):
        return meant
    raise ModelError(
        f"targets: '{sign}{pattern}' matches no weight of a MatMul, Gemm, Conv, Gather or "
        f"MatMulNBits node; {did_you_mean(pattern, known)}"
    )


def _meant(
    everything: Sequence[Target], pieces: Mapping[Target, Sequence[Target]], pattern: str
) -> list[Target]:
    """Returns the layers that a pattern matches.

    A pattern that matches some parts of a fused layer means these, and not the layer. If nothing
    has a name that a pattern matches, it is the end of a name, as in PEFT.
    """
    found = _matched(everything, pieces, pattern)
    return found or _matched(everything, pieces, f"*.{pattern}")


def _matched(
    everything: Sequence[Target], pieces: Mapping[Target, Sequence[Target]], pattern: str
) -> list[Target]:
    found: list[Target] = []
    for target in everything:
        some = [part for part in pieces[target] if part.has_name(pattern)]
        if some and len(some) < len(pieces[target]):
            found += some
        elif target.is_meant(pattern):
            found.append(target)
        else:
            found += some
    return found


def _all_linear(work: ir.Model, everything: Sequence[Target]) -> list[Target]:
    """Returns what PEFT means by ``"all-linear"``: all linear layers except the output layer."""
    left_out = _output_modules(work, everything)
    linear = [
        t for t in everything if t.node.op_type in MATRIX_PRODUCTS and t.module not in left_out
    ]
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
        if node.op_type not in _AFTER_OUTPUT_LAYER or node.domain not in ("", MICROSOFT):
            return found
        read = [v for v in node.inputs if v is not None]
        computed = [v for v in read if ir.convenience.get_const_tensor(v) is None]
        value = read[0] if node.op_type in _SHAPED or computed == read[:1] else None
        if value is None and len(computed) == 1:
            (value,) = computed
    return found


def _log_refused(reasons: Sequence[str]) -> None:
    if reasons:
        say_note("%d layers get no adapter, such as %s", len(reasons), reasons[0])


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
        if (  # a quantized embedding may have the shape of the output layer that it shares
            node.op_type == "Reshape" and not node.domain and node.inputs[0] is not None
        ):
            if not _is_quantized_table(value):
                return None
        elif node.op_type not in _MOVING or node.domain not in ("", MICROSOFT):
            return None
        steps.append(node)
        value = node.inputs[0]
    return None


def _is_quantized_table(value: ir.Value) -> bool:
    return all(use.node.op_type == "GatherBlockQuantized" for use in value.uses())


def _target(node: ir.Node) -> Target | None:
    kind = node.op_type
    if node.domain not in ("", MICROSOFT) or kind not in _INDICES:
        return None
    index = _INDICES[kind]
    found = steps_to_weight(node.inputs[index]) if index < len(node.inputs) else None
    if found is None and kind == "MatMul" and node.inputs[0] is not None:
        index, found = 0, steps_to_weight(node.inputs[0])
    if found is None:
        return None
    weight, steps = found
    shape, dtype = _effective(weight, steps)
    if shape is None or dtype is None:
        return None
    target = Target(
        node, _KINDS.get(kind, "linear"), weight, index, (0, 0), (), dtype, layer_of(node, weight)
    )
    if kind not in {*_SUPPORTED, *_WITH_QUANTIZED}:
        why = "only MatMul, Gemm, Conv, Gather and MatMulNBits can have an adapter"
        described: Target | None = _refuse(target, why)
    elif kind in _WITH_QUANTIZED:
        described = _with_quantized_sizes(target, shape)
    else:
        described = _with_sizes(target, shape)
    if described is None:
        return None
    if not described.refused and described.dtype not in _FLOATS:
        if not described.dtype.is_floating_point():
            return None
        why = f"an adapter needs FLOAT, DOUBLE, FLOAT16 or BFLOAT16, got {described.dtype}"
        described = _refuse(described, why)
    is_default = kind not in _EMBEDDINGS
    if weight.dtype is not None and weight.dtype.is_floating_point() and why_not(weight):
        is_default = False
    return replace(described, is_default=is_default)


def _refuse(target: Target, why: str) -> Target:
    return replace(target, refused=f"{describe(target.node)}: {why}")


def _with_sizes(target: Target, shape: tuple[int, ...]) -> Target | None:
    """Returns a layer with its sizes, or the reason why it gets no adapter; None if it is none."""
    node, kind, name = target.node, target.node.op_type, target.weight.name
    if kind == "Conv":
        group = node.attributes.get_int("group", 1)
        if len(shape) < 3:
            return None
        if group != 1:
            return _refuse(target, f"an adapter needs group=1, got {group}")
        return replace(target, sizes=(shape[1], shape[0]), kernel=shape[2:])
    if len(shape) != 2:
        if kind == "Gather" or len(shape) < 2:
            return None
        return _refuse(target, f"an adapter needs a matrix, but weight '{name}' is {list(shape)}")
    if kind == "MatMul" and target.index == 0:
        why = f"an adapter needs a right factor, but weight '{name}' is the left one"
        return _refuse(target, why)
    if kind == "Gather" and node.attributes.get_int("axis", 0) != 0:
        return None
    transposed = kind == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return replace(target, sizes=(shape[1], shape[0]) if transposed else (shape[0], shape[1]))


def _with_quantized_sizes(target: Target, shape: tuple[int, ...]) -> Target | None:
    """Returns a layer of a quantized operator like `_with_sizes`."""
    node, kind = target.node, target.node.op_type
    if kind == "MatMulNBits":
        if len(node.inputs) > 4 and node.inputs[4] is not None:
            return _refuse(target, f"its input g_idx, '{node.inputs[4].name}', is not supported")
        sizes = (node.attributes["K"].as_int(), node.attributes["N"].as_int())
        return replace(target, sizes=sizes, dtype=_scale_type(node, target.dtype))
    if kind == "GatherBlockQuantized":
        if node.attributes.get_int("gather_axis", 0) != 0:
            return None
        is_packed = target.dtype == ir.DataType.UINT8
        per_byte = 8 // node.attributes.get_int("bits", 4) if is_packed else 1
        sizes = (shape[0], math.prod(shape[1:]) * per_byte)
        return replace(target, sizes=sizes, dtype=_scale_type(node, target.dtype))
    found = dynamic_product(node)
    if found is None or len(shape) != 2:
        why = (
            "a MatMulInteger gets an adapter if its first input comes from "
            "DynamicQuantizeLinear, and Cast and Mul follow it"
        )
        return _refuse(target, why)
    return replace(target, sizes=(shape[0], shape[1]), dtype=found[2], ends=found[:2])


def _scale_type(node: ir.Node, default: ir.DataType) -> ir.DataType:
    """Returns the type of a node's scales, which it computes in."""
    scales = node.inputs[2]
    return default if scales is None or scales.dtype is None else scales.dtype


def dynamic_product(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.DataType] | None:
    """Returns the input, the output and the type of a product of weights and inputs of 8 bits.

    onnxruntime's quantize_dynamic writes DynamicQuantizeLinear, MatMulInteger, Cast and Mul.
    """
    source = node.inputs[0]
    quantized = None if source is None else source.producer()
    if quantized is None or quantized.op_type != "DynamicQuantizeLinear":
        return None
    y, dtype = node.outputs[0], ir.DataType.FLOAT
    for op_type in ("Cast", "Mul"):
        users = [use.node for use in y.uses()]
        if len(users) != 1 or users[0].op_type != op_type or y.is_graph_output():
            return None
        if op_type == "Cast":
            dtype = ir.DataType(users[0].attributes["to"].as_int())
        y = users[0].outputs[0]
    x = quantized.inputs[0]
    return None if x is None else (x, y, dtype)


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


def layer_of(node: ir.Node, weight: ir.Value) -> str:
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
        return plain(name.removesuffix(".weight"))
    return plain(around or name.removesuffix(".weight") or node.name or node.op_type)
