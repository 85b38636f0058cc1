"""Shapes of tensors under construction, and shape inference for whole models."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import all_nodes, producer_of
from ortops.graph.files.external import move_aside
from ortops.graph.files.messages import MICROSOFT, external_to_inputs
from ortops.graph.files.serialization import is_map
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs, subgraphs
from ortops.graph.operators import MOVES
from ortops.graph.pooled_sizes import is_miscounted, without_ceil_mode
from ortops.graph.tensor import Tape, Tensor, op, shape_of

logger = logging.getLogger("ortops")


_SMALL_IMAGE = 1024  # elements: up to this size, a single sum is as exact, and faster (measured)

_ML = "ai.onnx.ml"
_NOT_INFERRED = {
    ("", "GroupNormalization"): None,
    ("", "MeanVarianceNormalization"): None,
    (_ML, "Imputer"): None,
    (_ML, "Normalizer"): ir.DataType.FLOAT,
    (_ML, "Scaler"): ir.DataType.FLOAT,
}
"""Operators without shape inference in onnx whose output has the shape of the first input.

The values are the output type, or None for the type of the first input.
"""

_TOKENIZER = (MICROSOFT, "Tokenizer")
"""An operator that adds an axis of unknown size, and that onnx does not infer."""

_OF_MAPS = ("CastMap", "DictVectorizer")
"""Operators of ai.onnx.ml for which onnx crashes if the type of the map is unknown."""


def size_of(x: Tensor, axes: Sequence[int]) -> int | Tensor:
    """Returns the number of elements along axes.

    Args:
        x: A tensor.
        axes: Axes, negative ones from the end.

    Returns:
        A Python int if the sizes are static, else a scalar Tensor of int64.
    """
    sizes = [x.shape[axis] if x.shape is not None else None for axis in axes]
    if all(isinstance(size, int) for size in sizes):
        return math.prod(cast(list[int], sizes))
    if x.shape is not None and len({axis % len(x.shape) for axis in axes}) == len(x.shape):
        return op.Size(x)
    return op.ReduceProd(op.Gather(op.Shape(x), list(axes)), keepdims=0)


def index_range(size: int | Tensor, like: Tensor) -> Tensor:
    """Returns the int64 vector 0, 1, 2, … below a size.

    Args:
        size: The size; the result is a constant if it is an int.
        like: A tensor on the tape.
    """
    if isinstance(size, int):
        return like.tape.constant(np.arange(size))
    return op.Range(like.tape.constant(np.array(0)), size, 1)


def zero_after(x: Tensor) -> Tensor:
    """Returns the int64 vector [0], computed from none of a tensor's elements, but not before it.

    What adds it to a shape waits for the tensor, and onnxruntime does not compute it in advance.
    """
    nothing = op.ReduceSum(op.Slice(op.Reshape(x, [-1]), [0], [0]), keepdims=1)
    return op.Cast(nothing, to=ir.DataType.INT64)


def _same_shape(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are known to have equal shapes."""
    return a.shape is not None and a.shape == b.shape and None not in a.shape


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns ``x`` in the shape of ``like``, which has the same number of elements."""
    if _same_shape(x, like):
        return x
    shape = like.shape
    if shape is not None and 0 not in shape:
        unknown = sum(not isinstance(dim, int) for dim in shape)
        if unknown == 1:  # the unknown size follows from the others
            sizes = [dim if isinstance(dim, int) else -1 for dim in shape]
            return op.Reshape(x, sizes).with_shape_of(like)
    return op.Reshape(x, shape_of(like), allowzero=1).with_shape_of(like)


def expand_like(x: Tensor, like: Tensor) -> Tensor:
    """Returns ``x`` broadcast to the shape of ``like``."""
    if _same_shape(x, like):
        return x
    return op.Expand(x, shape_of(like)).with_shape_of(like)


def map_sequences(function: Callable[..., Tensor], *sequences: Tensor) -> Tensor:
    """Returns the sequence of a function's results for the elements of sequences.

    Args:
        function: A function of one element of each sequence, of unknown shape.
        *sequences: Sequences of equal length.
    """
    tape = sequences[0].tape
    inner = tape.subgraph("each")
    graph = inner.graph
    for sequence in sequences:
        kind = None if sequence.value.dtype is None else ir.TensorType(sequence.value.dtype)
        graph.inputs.append(ir.Value(name=tape.names.unique("element"), type=kind))
    with inner:
        result = op.Identity(function(*(inner.tensor(value) for value in graph.inputs)))
    graph.outputs.append(result.value)
    mapped = op.SequenceMap(*sequences, body=graph)
    if result.value.dtype is not None:
        mapped.value.type = ir.SequenceType(ir.TensorType(result.value.dtype))
    return mapped


def unbroadcast(g: Tensor, like: Tensor) -> Tensor:
    """Sums a cotangent over the axes along which ``like`` was broadcast.

    The axes are determined while the graph is built if the dimensions are sizes or equal symbols,
    otherwise at run time from the shapes.

    Args:
        g: A cotangent of a shape that ``like`` broadcasts to.
        like: The tensor that defines the shape of the result.
    """
    if _same_shape(g, like):
        return g
    if g.shape is None or like.shape is None:
        return _unbroadcast_at_run_time(g, like)
    added = len(g.shape) - len(like.shape)
    axes = list(range(added))
    for axis, (have, want) in enumerate(zip(g.shape[added:], like.shape, strict=True), added):
        if want == 1:
            axes += [axis] if have != 1 else []
        elif not isinstance(want, int) and have != 1 and (have is None or have != want):
            return _unbroadcast_at_run_time(g, like)
    if axes:
        g = sum_along(g, axes, keepdims=int(len(axes) > added))
        if added and len(axes) > added:
            g = op.Squeeze(g, list(range(added)))
    return g.with_shape_of(like)


def sum_along(x: Tensor, axes: Sequence[int], *, keepdims: int = 0) -> Tensor:
    """Sums over axes, the last one first.

    Two sums of fewer terms have smaller rounding errors than one of many terms, and onnxruntime's
    kernels for them are faster, except for small images.

    Args:
        x: A tensor of known rank.
        axes: The axes, in ascending order.
        keepdims: Whether to keep them as axes of size 1.
    """
    *others, last = axes
    if others and not _are_small_images(x, axes):
        x, axes = op.ReduceSum(x, [last], keepdims=keepdims), others
    return op.ReduceSum(x, axes, keepdims=keepdims)


def _are_small_images(x: Tensor, axes: Sequence[int]) -> bool:
    if x.shape is None:
        return False
    sizes = [x.shape[axis] for axis in axes[1:]]
    known = [size for size in sizes if isinstance(size, int)]
    small = len(known) == len(sizes) and math.prod(known) <= _SMALL_IMAGE
    return small and axes[-1] == x.ndim - 1


def _unbroadcast_at_run_time(g: Tensor, like: Tensor) -> Tensor:
    shape = shape_of(like)
    added = op.Sub(op.Shape(op.Shape(g)), op.Shape(shape))
    ones = op.ConstantOfShape(added, value=np.ones(1, np.int64))
    axes = op.Squeeze(op.NonZero(op.Equal(op.Concat(ones, shape, axis=0), 1)), [0])
    summed = op.ReduceSum(g, axes, keepdims=1, noop_with_empty_axes=1)
    return op.Reshape(summed, shape, allowzero=1).with_shape_of(like)


def may_be_equal(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    """Whether two shapes are equal, or could be at run time."""
    if a is None or b is None:
        return True
    return len(a) == len(b) and all(
        p == q or not (isinstance(p, int) and isinstance(q, int)) for p, q in zip(a, b, strict=True)
    )


def is_unknown(dim: int | ir.SymbolicDim) -> bool:
    """Whether a dimension is unknown, or has a symbol that onnx generated."""
    return not isinstance(dim, int) and (dim.value is None or dim.value.startswith("unk__"))


def infer_shapes(model: ir.Model) -> bool:
    """Infers types and shapes, in place, as far as possible.

    Unlike onnx's shape inference, it passes types and shapes of outer values to subgraphs.

    Returns:
        Whether onnx inferred all of them, so that to infer them again would not change them.
    """
    hidden: dict[ir.Node, tuple[str, str]] = {}
    for node in all_nodes(model.graph):
        name = (node.domain, node.op_type)
        if name == ("", "STFT") and "onesided" not in node.attributes:
            node.attributes.add(ir.AttrInt64("onesided", 1))  # onnx infers with a wrong default
        disguise = _disguise(node)
        if disguise is not None:
            hidden[node] = name
            node.domain, node.op_type, dtype = disguise
            if dtype is not None:
                node.attributes.add(ir.AttrInt64("to", dtype))
        if name == _TOKENIZER:
            node.resize_outputs(2)
            node.outputs[1].name = Names(model.graph).unique("counts")
    try:
        _infer_with_pools(model)
    finally:
        for node, name in hidden.items():
            if name == _TOKENIZER:
                node.resize_outputs(1)
            node.domain, node.op_type = name
            node.attributes.pop("to", None)
    removed = _remove_element_symbols(model.graph)
    is_whole = not hidden and not removed and all(map(_is_inferred, model.graph))
    _infer_rest(model.graph, Tape(model.graph, names=Names()))
    # With ranks of elements, onnxruntime refuses branches that read a sequence and cannot run for
    # its rank; it accepts them in files without.
    for node in all_nodes(model.graph):
        for value in node.outputs:
            if isinstance(value.type, ir.SequenceType) and not value.is_graph_output():
                value.shape = None
    return is_whole


def _is_inferred(node: ir.Node) -> bool:
    """Whether a node without subgraphs has outputs that are sequences or of known shapes."""
    return not inner_graphs(node) and all(
        isinstance(value.type, ir.SequenceType)
        or (value.shape is not None and isinstance(value.type, ir.TensorType))
        for value in node.outputs
        if value.name
    )


def _disguise(node: ir.Node) -> tuple[str, str, ir.DataType | None] | None:
    """Returns the domain and operator that a node has during inference, and what it is cast to.

    Returns:
        None for a node that onnx infers as it is.
    """
    name = (node.domain, node.op_type)
    dtype = _NOT_INFERRED.get(name) or _encoded_type(node)
    if name in _NOT_INFERRED or dtype is not None:  # an operator that infers the same shape
        return "", "Identity" if dtype is None else "Cast", dtype
    if name == _TOKENIZER:
        return "", "StringSplit", None  # adds an axis, too, but has two outputs
    if name[0] == _ML and node.op_type in _OF_MAPS:
        return _ML, "Hidden", None
    # onnx aborts the process where the axis is empty.
    return ("", "Hidden", None) if name == ("", "Slice") and _may_go_backwards(node) else None


def _encoded_type(node: ir.Node) -> ir.DataType | None:
    """Returns the output type of a LabelEncoder; None for other nodes, or if it has no values.

    onnx crashes if the type of the input is unknown, and otherwise infers what Cast does.
    """
    if (node.domain, node.op_type) != (_ML, "LabelEncoder"):
        return None
    if "values_tensor" in node.attributes:
        return node.attributes["values_tensor"].as_tensor().dtype
    types = {"strings": "STRING", "int64s": "INT64", "floats": "FLOAT"}
    found = [types[kind] for kind in types if f"values_{kind}" in node.attributes]
    return ir.DataType[found[0]] if found else None


def _infer_with_pools(model: ir.Model) -> None:
    """Infers a whole model, with onnxruntime's output sizes for pooling with ceil_mode.

    If onnx infers a different size, the node is rewritten without ceil_mode.
    """
    version = model.opset_imports.get("", 0)
    borrowed: dict[ir.Node, list[ir.Attr]] = {}  # restored after inference
    declared = {value: value.shape for value in model.graph.outputs}
    try:
        while True:
            _infer_at_once(model)
            wrong = (node for node in all_nodes(model.graph) if is_miscounted(node, version))
            first = next(wrong, None)  # one by one, because the sizes of others depend on it
            if first is None:
                break
            pads, is_same = without_ceil_mode(first)
            if not is_same:
                borrowed[first] = list(first.attributes.values())
            first.attributes.add(ir.AttrInt64s("pads", pads))
            first.attributes.add(ir.AttrInt64("ceil_mode", 0))
            first.attributes.pop("auto_pad", None)
            for node in all_nodes(model.graph):
                for value in node.outputs:
                    value.shape = None
    finally:
        for node, attributes in borrowed.items():
            node.attributes.clear()
            for attribute in attributes:
                node.attributes.add(attribute)
    for value, shape in declared.items():
        if value.shape is None:
            value.shape = shape


def _infer_at_once(model: ir.Model) -> None:
    """Sets the types and shapes that onnx infers for a whole model."""
    with _unique_names(model.graph):
        light, _ = move_aside(model)
        external_to_inputs(light.graph)
        try:
            inferred = onnx.shape_inference.infer_shapes(light, data_prop=True)
        except Exception as error:  # nodes are then inferred one by one
            logger.warning("model: onnx's shape inference failed: %s", str(error).strip())
            return
        _read_types(model.graph, inferred.graph)


@contextlib.contextmanager
def _unique_names(graph: ir.Graph) -> Iterator[None]:
    """Renames values that have the name of a value in another subgraph, for the ``with`` block.

    onnx's inference keeps propagated sizes by name, so it would take those of one branch for those
    of another one.
    """
    names, renamed = Names(), list[tuple[ir.Value, str]]()
    for each in (graph, *subgraphs(graph)):
        for value in _values(each):
            if value.name and names.unique(value.name) != value.name:
                renamed.append((value, value.name))
    for value, name in renamed:
        value.name = names.unique(name)
    try:
        yield
    finally:
        for value, name in renamed:
            value.name = name


def _read_types(graph: ir.Graph, inferred: onnx.GraphProto) -> None:
    """Copies types and shapes from the protobuf form of a graph."""
    values = {value.name: value for value in _values(graph) if value.name}
    for info in (*inferred.input, *inferred.output, *inferred.value_info):
        value = values.get(info.name)  # absent outputs have an empty name
        if value is None or is_map(info.type):
            continue
        kind = ir.serde.deserialize_type_proto_for_type(info.type)
        shape = ir.serde.deserialize_type_proto_for_shape(info.type)
        value.type = value.type if kind is None else kind
        value.shape = value.shape if shape is None else shape
    for node, other in zip(graph, inferred.node, strict=True):
        for attribute in other.attribute:
            if attribute.HasField("g"):
                _read_types(node.attributes[attribute.name].as_graph(), attribute.g)


def _values(graph: ir.Graph) -> list[ir.Value]:
    """Returns the inputs of a graph and the outputs of its nodes."""
    return [*graph.inputs, *(value for node in graph for value in node.outputs)]


def _remove_element_symbols(graph: ir.Graph) -> bool:
    """Removes symbolic dimensions of sequence elements, because elements differ in size.

    Returns:
        Whether there were any.
    """
    tensors = {
        str(dim)
        for value in graph.inputs
        if value.shape is not None and not isinstance(value.type, ir.SequenceType)
        for dim in value.shape
    }
    values = _values(graph)
    elements = {
        str(dim)
        for value in values
        if isinstance(value.type, ir.SequenceType) and value.shape is not None
        for dim in value.shape
        if isinstance(dim, ir.SymbolicDim) and dim.value is not None
    } - tensors
    for value in values if elements else ():
        if value.shape is not None and any(str(dim) in elements for dim in value.shape):
            value.shape = ir.Shape([None if str(d) in elements else d for d in value.shape])
    return bool(elements)


def _may_go_backwards(node: ir.Node) -> bool:
    steps = node.inputs[4] if len(node.inputs) > 4 else None
    if moved := producer_of(steps, *MOVES):  # TorchScript unsqueezes a number
        steps = moved.inputs[0]
    if steps is None:
        return False
    known = None
    with contextlib.suppress(ModelError):  # of a Constant with a wrong attribute
        known = constant_tensor(steps)
    return known is None or known.size > 8 or bool((known.numpy() < 0).any())


def _infer_rest(graph: ir.Graph, tape: Tape) -> None:
    """Infers subgraphs and types that onnx does not infer.

    Args:
        graph: A graph, after onnx's own inference.
        tape: A tape of the model's graph, for the versions of operators.
    """
    for node in graph:
        inner = None if node.domain else _INSIDE.get(node.op_type)
        if inner is not None:
            inner(node, tape)
            continue
        for body in inner_graphs(node):
            _infer_rest(body, tape)
        if any(value.shape is None and value.name for value in node.outputs):
            with contextlib.suppress(ModelError):  # its inputs may be unknown
                tape.infer(node)


def _is_tensor(value: ir.Value) -> bool:
    return not isinstance(value.type, ir.SequenceType | ir.OptionalType)


def _infer_if(node: ir.Node, tape: Tape) -> None:
    """Infers an If; its outputs have the sizes on which both branches agree."""
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    for branch in branches:
        _infer_rest(branch, tape)
    for value, *results in zip(node.outputs, *(b.outputs for b in branches), strict=False):
        if not all(map(_is_tensor, results)):
            value.type, value.shape = results[0].type, results[0].shape
        elif value.shape is None:
            value.type = value.type or results[0].type
            value.shape = _common(results[0].shape, results[1].shape)


def _infer_loop(node: ir.Node, tape: Tape) -> None:
    """Infers a Loop, whose states have the sizes that are equal in all iterations."""
    body = node.attributes["body"].as_graph()
    starts, states = node.inputs[2:], body.inputs[2:]
    for value, start in zip(states, starts, strict=False):
        value.type = value.type or (None if start is None else start.type)
    carried = [
        (value, start.shape, output)
        for value, start, output in zip(states, starts, body.outputs[1:], strict=False)
        if start is not None and value.shape is None and _is_tensor(value)
    ]
    inside = (value for each in all_nodes(body) for value in each.outputs)
    unknown = [value for value in inside if value.shape is None]
    assumed = [shape for _, shape, _ in carried]
    while True:
        for (value, _, _), shape in zip(carried, assumed, strict=True):
            value.shape = shape
        _infer_rest(body, tape)
        kept = [
            _common(a, output.shape) for a, (_, _, output) in zip(assumed, carried, strict=True)
        ]
        if kept == assumed:
            break
        assumed = kept
        for value in unknown:  # depends on sizes that change between iterations
            value.shape = None
    for value, output, start in zip(node.outputs, body.outputs[1:], starts, strict=False):
        if not _is_tensor(output):
            value.type, value.shape = output.type, None
        elif value.shape is None and start is not None:
            value.type = value.type or output.type
            value.shape = _common(start.shape, output.shape)
    for value, output in list(zip(node.outputs, body.outputs[1:], strict=False))[len(starts) :]:
        value.type = value.type or output.type
        if value.shape is None and output.shape is not None:
            value.shape = ir.Shape([None, *output.shape])


def _infer_scan(node: ir.Node, tape: Tape) -> None:
    """Infers a Scan, whose states have constant shapes."""
    body = node.attributes["body"].as_graph()
    given = [value for value in node.inputs if value is not None]
    count = len(given) - node.attributes["num_scan_inputs"].as_int()
    axes = _scan_axes(node, "input", len(given) - count)
    lengths: set[object] = set()
    for number, (value, outside) in enumerate(zip(body.inputs, given, strict=False)):
        value.type = value.type or outside.type
        dims = None if outside.shape is None else list(outside.shape)
        if dims is not None and number >= count:
            lengths.add(dims.pop(axes[number - count]))
        if dims is not None and value.shape is None:
            value.shape = ir.Shape(dims)
    _infer_rest(body, tape)
    axes = _scan_axes(node, "output", len(body.outputs) - count)
    known = lengths.pop() if len(lengths) == 1 else None
    length = known if isinstance(known, int | ir.SymbolicDim) else None
    for number, (value, inside) in enumerate(zip(node.outputs, body.outputs, strict=False)):
        value.type = value.type or inside.type
        if value.shape is not None:
            continue
        if number < count:
            value.shape = inside.shape or given[number].shape
        elif inside.shape is not None:
            stacked: list[int | ir.SymbolicDim | None] = list(inside.shape)
            axis = axes[number - count]
            stacked.insert(axis if axis >= 0 else axis + len(stacked) + 1, length)
            value.shape = ir.Shape(stacked)


_INSIDE = {"If": _infer_if, "Loop": _infer_loop, "Scan": _infer_scan}
"""The inference functions of operators with subgraphs."""


def _scan_axes(node: ir.Node, kind: str, count: int) -> Sequence[int]:
    """Returns the scan axis of each scan input or output.

    Args:
        node: The node.
        kind: "input" or "output".
        count: The number of scan inputs or outputs.
    """
    name = f"scan_{kind}_axes"
    return node.attributes[name].as_ints() if name in node.attributes else [0] * count


def _common(a: ir.Shape | None, b: ir.Shape | None) -> ir.Shape | None:
    """Returns a shape with the equal sizes of two shapes; None if their ranks differ."""
    if a is None or b is None or len(a) != len(b):
        return None
    return ir.Shape([p if p == q else None for p, q in zip(a, b, strict=True)])
