"""The graph of a model that was just built, for a session of the same model in this process."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from ortops.graph import convert
from ortops.graph.autodiff.gradient_node import GRADIENT_DOMAINS, Bound, bind_anew, is_bound
from ortops.graph.constants import constant_tensor, dims_of
from ortops.graph.edit import disconnect
from ortops.graph.files.external import LightModel
from ortops.graph.files.messages import BIG, MICROSOFT, copy_model, is_light, size_of
from ortops.graph.files.serialization import is_map
from ortops.graph.nesting import inner_graphs

_OF_SIZES = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
_TENSOR = ir.AttributeType.TENSOR
_SMALL = 2**14  # elements: inference reads no larger constants


class _Handed(NamedTuple):
    """A graph without the data of its model.

    Attributes:
        graph: The inference graph with the algorithm, in the order of the model.
        emptied: The nodes that lack their tensors, by index among the nodes of the model.
        is_settled: Whether inference would find the types that the graph has.
    """

    graph: ir.Graph
    emptied: dict[int, ir.Node]
    is_settled: bool


_handed: dict[bytes, _Handed] = {}
"""What the last call of `hand_over` left, by a digest of all that it depends on."""


def hand_over(light: LightModel, graph: ir.Graph) -> None:
    """Keeps the graph of a model until `take`, or until the next model, if reading gives the same.

    Args:
        light: The model, as it was built, with one entry.
        graph: Its inference graph with the algorithm, from which it was written; do not use it
            afterwards.
    """
    _handed.clear()
    own, algorithm = light.proto.graph, light.proto.training_info[0].algorithm
    for node in [node for node in graph if is_bound(node)]:
        bind_anew(node)
    made = {value.name: node for node in graph for value in node.outputs if value.name}
    written = [*own.node, *algorithm.node]
    found = [made.get(next(filter(None, each.output), "")) for each in written]
    nodes = [node for node in found if node is not None]
    if light.proto.functions or len(nodes) < len(found) or not all(map(_is_same, nodes, written)):
        return
    values = [value for node in nodes for value in node.outputs if value.name]
    if _arrange(graph, nodes, values, light.proto):
        is_settled = all(map(_is_settled, values))
        for value in values if is_settled else ():
            value.shape = _with_symbols(value)
        for node in nodes[: len(own.node)]:
            node.metadata_props.clear()  # as in what a step is read from
        for value in (*values, *graph.initializers.values()):
            value.const_value = None
        _handed[_digest(light, 0)] = _Handed(graph, _emptied(nodes), is_settled)


def is_known(proto: onnx.ModelProto) -> bool:
    """Whether the graph and the only algorithm of a model were handed over, so they are valid."""
    if not _handed or len(proto.training_info) != 1:
        return False
    return _digest(LightModel(proto, {}), 0) in _handed


def take(light: LightModel, entry: int) -> tuple[ir.Model, bool] | None:
    """Returns the graph that was handed over, with the values in a model that has not changed.

    Args:
        light: The model.
        entry: The index of an entry.

    Returns:
        The inference graph with the algorithm of the entry, and whether all types and shapes are
        those that inference would find, instead of those that the model declares; None if that of
        another model was handed over.
    """
    found = _handed.pop(_digest(light, entry), None) if _handed else None
    if found is None:
        return None
    graph, algorithm = found.graph, light.proto.training_info[entry].algorithm
    written = [*light.proto.graph.node, *algorithm.node]
    for index, node in found.emptied.items():
        for attribute in written[index].attribute:
            copied = onnx.AttributeProto()  # onnx-ir refers to it
            copied.CopyFrom(attribute)
            node.attributes.add(ir.serde.deserialize_attribute(copied))
    model = convert.to_ir(_without_nodes(light, algorithm), given_away=True)
    read, model.graph = model.graph, graph
    for old, new in zip(graph.inputs, read.inputs, strict=True):
        old.type, old.shape = new.type, new.shape
    for name, value in graph.initializers.items():
        new = read.initializers[name]
        value.type, value.shape, value.const_value = new.type, new.shape, new.const_value
    graph.name, graph.doc_string = read.name, read.doc_string
    graph.metadata_props.clear()
    graph.metadata_props.update(read.metadata_props)
    graph.opset_imports.clear()
    graph.opset_imports.update(read.opset_imports)
    if any(node.domain == MICROSOFT for node in graph):
        graph.opset_imports.setdefault(MICROSOFT, 1)
    if not found.is_settled:
        _declare(graph, light.proto.graph, algorithm)
    return model, found.is_settled


def _declare(graph: ir.Graph, own: onnx.GraphProto, algorithm: onnx.GraphProto) -> None:
    """Sets the types and shapes in a graph to those that its model declares."""
    values = {value.name: value for node in graph for value in node.outputs if value.name}
    for value in values.values():
        value.type = value.shape = None
    for infos in (algorithm.value_info, own.value_info, algorithm.output, own.output):
        for info in infos:  # those of the inference graph count, as in reading
            if info.name in values and not is_map(info.type):
                ir.serde.deserialize_value_info_proto(info, values[info.name])
    convert.forget_unknown(values.values())


def _without_nodes(light: LightModel, algorithm: onnx.GraphProto) -> LightModel:
    """Returns a model with what a handed graph lacks: initializers and inputs."""
    result = onnx.ModelProto()
    but = ("training_info", "functions", "node", "value_info", "output", "input")
    copy_model(light.proto, result, lambda source, target: target.CopyFrom(source), but)
    graph = result.graph
    graph.initializer.extend(algorithm.initializer)
    graph.input.extend(_inputs(light.proto.graph, algorithm))
    variables = {tensor.name for tensor in graph.initializer}
    declared = (*light.proto.graph.value_info, *algorithm.value_info)
    graph.value_info.extend(value for value in declared if value.name in variables)
    return LightModel(result, light.data)


def _inputs(own: onnx.GraphProto, algorithm: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    variables = {tensor.name for part in (own, algorithm) for tensor in part.initializer}
    return [*(value for value in own.input if value.name not in variables), *algorithm.input]


def _is_same(node: ir.Node, written: onnx.NodeProto) -> bool:
    """Whether a node is what reading gives; its real attributes become those that were written."""
    inputs: Sequence[ir.Value | None] = node.inputs
    same_domain = node.domain == written.domain
    if is_bound(node):
        same_domain, inputs = written.domain in GRADIENT_DOMAINS, Bound.of(node).fed
    attributes = written.attribute
    return (
        same_domain
        and node.op_type == written.op_type
        and node.name == written.name
        and node.overload == written.overload
        and ["" if value is None else value.name for value in inputs] == written.input
        and [value.name for value in node.outputs] == written.output
        and len(node.attributes) == len(attributes)
        and all(map(functools.partial(_is_same_attribute, node), [*node.attributes], attributes))
    )


def _is_same_attribute(node: ir.Node, name: str, written: onnx.AttributeProto) -> bool:
    held, kinds = node.attributes[name], ir.AttributeType
    if name != written.name or held.type.value != written.type or held.is_ref():
        return False
    value = held.value
    match held.type:
        case kinds.INT:
            return bool(value == written.i)
        case kinds.INTS:
            return bool([*value] == written.ints)
        case kinds.STRING:
            return isinstance(value, str) and value.encode() == written.s
        case kinds.STRINGS:
            return bool([text.encode() for text in value] == written.strings)
        case kinds.FLOAT:
            node.attributes[name] = ir.AttrFloat32(name, written.f)
            return bool(np.float32(value) == written.f)
        case kinds.FLOATS:
            node.attributes[name] = ir.AttrFloat32s(name, written.floats)
            return [*np.asarray(value, np.float32)] == [*written.floats]
        case kinds.TENSOR:
            tensor = written.t
            return bool(value.dtype == tensor.data_type and value.shape.dims == (*tensor.dims,))
    return False


def _arrange(
    graph: ir.Graph,
    nodes: Sequence[ir.Node],
    values: Sequence[ir.Value],
    proto: onnx.ModelProto,
) -> bool:
    """Removes from a graph what its model lacks, and puts the rest in the order of reading.

    Args:
        graph: The graph.
        nodes: The nodes of the model.
        values: Their outputs.
        proto: The model.

    Returns:
        Whether the graph has all that the model has.
    """
    own, algorithm = proto.graph, proto.training_info[0].algorithm
    place = {node: (is_bound(node), index) for index, node in enumerate(nodes)}
    made = {value.name: value for value in values}
    given = {value.name: value for value in graph.inputs}
    held = dict(graph.initializers)
    variables = [tensor.name for part in (own, algorithm) for tensor in part.initializer]
    inputs = [value.name for value in _inputs(own, algorithm)]
    shown = dict.fromkeys(value.name for value in (*own.output, *algorithm.output))
    read = {value.producer() for node in nodes for value in node.inputs if value is not None}
    complete = made.keys() >= shown.keys() and given.keys() >= {*inputs} and read <= {None, *nodes}
    if not complete or not held.keys() >= {*variables} or len({*variables}) < len(variables):
        return False
    graph.outputs[:] = [made[name] for name in shown]
    graph.inputs[:] = [given[name] for name in inputs]
    if [*held] != variables:
        graph.initializers.clear()
        graph.initializers.update({name: held[name] for name in variables})
    dropped = [node for node in graph if node not in place]
    for node in dropped:
        disconnect(node)
    graph.remove(dropped)
    if [*graph] != nodes:
        graph.extend(nodes)
    for value in (*graph.inputs, *graph.initializers.values(), *values):
        uses = list(value.uses())
        ordered = sorted(uses, key=lambda use: (place[use.node], use.idx))
        if uses != ordered:
            for node, index in ordered:
                node.replace_input_with(index, None)
            for node, index in ordered:
                node.replace_input_with(index, value)
    return True


def _emptied(nodes: Sequence[ir.Node]) -> dict[int, ir.Node]:
    """Removes the attributes of nodes that have big tensors, or tensors in a message.

    Returns:
        The nodes, by index.
    """
    emptied = {}
    for index, node in enumerate(nodes):
        tensors = [each.value for each in node.attributes.values() if each.type == _TENSOR]
        if any(not isinstance(each, ir.Tensor) or each.nbytes > BIG for each in tensors):
            node.attributes.clear()
            emptied[index] = node
    return emptied


def _is_settled(value: ir.Value) -> bool:
    """Whether inference would find the same again, but for the symbols of unknown sizes."""
    node = value.producer()
    if node is None or value.type is None or inner_graphs(node):
        return False
    if _is_complete(value):
        return True
    outputs = (output for reader in value.consumers() for output in reader.outputs)
    stays = isinstance(value.type, ir.SequenceType) or _merges_axes(node)
    return stays and all(map(_is_complete, outputs))


def _merges_axes(node: ir.Node) -> bool:
    """Whether one axis gets what is left of a tensor of unknown size, which no symbol expresses."""
    x, sizes = (*node.inputs, None, None)[:2]
    if node.op_type != "Reshape" or x is None or x.shape is None or x.shape.is_static():
        return False
    source = None if sizes is None else sizes.producer()
    joins = source is not None and source.op_type == "Concat"
    parts = source.inputs if source is not None and joins else [sizes]  # as in losses of rows
    constants = [constant_tensor(part) for part in parts if part is not None]
    dims = dims_of(node.outputs[0].shape or ir.Shape([]))
    return dims.count(None) == 1 and any(-1 in t.numpy() for t in constants if t is not None)


def _is_complete(value: ir.Value) -> bool:
    """Whether all sizes of a tensor are numbers or symbols."""
    is_tensor = value.shape is not None and isinstance(value.type, ir.TensorType)
    return is_tensor and None not in dims_of(value.shape or ir.Shape([]))


def _with_symbols(value: ir.Value) -> ir.Shape | None:
    """Returns a shape with symbols for unknown sizes, named like those that onnx generates."""
    if value.shape is None or None not in dims_of(value.shape):
        return value.shape
    dims = enumerate(dims_of(value.shape))
    return ir.Shape([f"unk__{value.name}_{n}" if dim is None else dim for n, dim in dims])


def _digest(light: LightModel, entry: int) -> bytes:
    """Returns a digest of all that a graph with the algorithm of an entry follows from.

    Of big tensors it has names, types and shapes; the values of those that may hold sizes, too.
    """
    proto, found = light.proto, hashlib.sha256()
    graphs = [proto.graph, *(info.algorithm for info in proto.training_info[entry:][:1])]
    parts = [proto.opset_import, proto.functions, proto.graph.quantization_annotation]
    for graph in graphs:
        parts += [graph.input, graph.output, graph.value_info, graph.sparse_initializer, graph.node]
        for tensor in graph.initializer:
            if not _is_big(tensor):
                found.update(tensor.SerializeToString())
            else:
                found.update(repr((tensor.name, tensor.data_type, [*tensor.dims])).encode())
                if tensor.data_type in _OF_SIZES and math.prod(tensor.dims) <= _SMALL:
                    found.update(light.array_of(tensor).tobytes())
            found.update(b";")
    for part in parts:
        found.update(b";".join(message.SerializeToString() for message in part) + b";;")
    return found.digest()


def _is_big(tensor: onnx.TensorProto) -> bool:
    """Whether the data of a tensor are detached from a light model."""
    inside = tensor.data_location == onnx.TensorProto.DEFAULT
    return is_light(tensor) or (inside and size_of(tensor) > BIG)
