"""Functions of protobuf models that do not need onnx-ir, whose import is slow."""

from __future__ import annotations

import math
import secrets
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from ortops.errors import ModelError
from ortops.graph.files.opening import is_cached, plain_path
from ortops.graph.files.wire_format import unknown_fields

BIG = 1024
"""Data of more bytes are detached from light models (see `ortops.graph.files.external`)."""

LOCATION = f"ortops.detached/{secrets.token_hex(16)}/"
"""The prefix of the locations of detached data; no file can contain it, because it is random."""

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's operators."""

DOMAINS = ("ai.onnx.preview.training", "ai.onnx.preview")
"""The domain of ONNX's training operators, and the name that an exporter uses for it."""

_BITS = {
    2: (25, 26),
    4: (21, 22, 23),
    6: (27, 28),
    8: (2, 3, 9, 17, 18, 19, 20, 24),
    16: (4, 5, 10, 16),
    32: (1, 6, 12),
    64: (7, 11, 13, 14),
    128: (15,),
}
ITEM_SIZES = {number: bits / 8 for bits, numbers in _BITS.items() for number in numbers}
"""The size of an element in bytes, by data type; strings are not included."""


def copy_model(
    source: Any,
    target: Any,
    copy_tensor: Callable[[onnx.TensorProto, onnx.TensorProto], None],
    but: Container[str] = (),
) -> None:
    """Copies a model, with a function that decides how to copy initializers.

    Args:
        source: The model, or a graph or training_info of it.
        target: An empty message of the same type.
        copy_tensor: Copies an initializer to an empty tensor.
        but: The names of fields that are left out, of the model and of its graphs.
    """
    for field, value in source.ListFields():
        name = field.name
        if name in but:
            continue
        if name in ("graph", "algorithm", "initialization"):
            part = getattr(target, name)
            part.SetInParent()
            copy_model(value, part, copy_tensor, but)
        elif name == "training_info":
            for info in value:
                copy_model(info, target.training_info.add(), copy_tensor, but)
        elif name == "initializer":
            for tensor in value:
                copy_tensor(tensor, target.initializer.add())
        elif hasattr(value, "extend"):  # it is repeated; older versions of protobuf do not say so
            getattr(target, name).extend(value)
        elif field.message_type is not None:
            getattr(target, name).CopyFrom(value)
        else:
            setattr(target, name, value)
    target.MergeFromString(unknown_fields(source))


def without_big_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of a model without the data of big initializers, for onnx's checker.

    Args:
        proto: The model; it is not modified.
    """

    def copy_tensor(source: onnx.TensorProto, target: onnx.TensorProto) -> None:
        if source.external_data or size_of(source) <= BIG:
            target.CopyFrom(source)
            return
        target.name, target.data_type = source.name, source.data_type
        target.dims.extend(source.dims)
        target.data_location = onnx.TensorProto.EXTERNAL
        target.external_data.add(key="location", value=LOCATION)

    result = onnx.ModelProto()
    copy_model(proto, result, copy_tensor)
    return result


def has_domain(proto: onnx.ModelProto) -> bool:
    """Whether a model has nodes or functions of the training domain."""
    return any(function.domain in DOMAINS for function in proto.functions) or any(
        True for _ in _operators_of_domain(proto)
    )


def operators_of_domain(proto: onnx.ModelProto) -> list[str]:
    """Returns the operators of the training domain that a model has nodes of."""
    return sorted(set(_operators_of_domain(proto)))


def _operators_of_domain(proto: onnx.ModelProto) -> Iterator[str]:
    return (node.op_type for node in nodes_within(proto) if node.domain in DOMAINS)


def nodes_within(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of a model, of its functions and of the subgraphs of all these."""

    def with_inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
        for node in nodes:
            yield node
            for graph in node_graphs(node):
                yield from with_inner(graph.node)

    for body in (proto.graph, *proto.functions):
        yield from with_inner(body.node)


def attribute_graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Returns the graphs that an attribute contains."""
    return [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]


def node_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Returns the subgraphs of a node: its branches, or the body of a loop."""
    return [graph for attribute in node.attribute for graph in attribute_graphs(attribute)]


def graphs_within(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields a graph, and its subgraphs."""
    yield graph
    for node in graph.node:
        for inner in node_graphs(node):
            yield from graphs_within(inner)


def names_read(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yields the names that nodes and their subgraphs read, some of them from the subgraphs."""
    for node in nodes:
        yield from filter(None, node.input)
        for graph in node_graphs(node):
            yield from names_read(graph.node)
            yield from (value.name for value in graph.output)


def names_within(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names of all values of a graph and its subgraphs, some of them repeatedly."""
    for each in graphs_within(graph):
        yield from (value.name for value in (*each.input, *each.initializer, *each.output))
        yield from (value.name for value in each.value_info)
        for annotation in each.quantization_annotation:
            yield annotation.tensor_name
            yield from (entry.value for entry in annotation.quant_parameter_tensor_names)
        yield from (name for node in each.node for name in (*node.input, *node.output) if name)


def rename_within(graph: onnx.GraphProto, renamed: Callable[[str], str]) -> None:
    """Renames all values of a graph and its subgraphs, in place.

    Args:
        graph: The graph.
        renamed: Returns the new name for each name that `names_within` yields.
    """
    for each in graphs_within(graph):
        for value in (*each.input, *each.output, *each.value_info, *each.initializer):
            value.name = renamed(value.name)
        for annotation in each.quantization_annotation:
            annotation.tensor_name = renamed(annotation.tensor_name)
            for entry in annotation.quant_parameter_tensor_names:
                entry.value = renamed(entry.value)
        for node in each.node:
            for names in (node.input, node.output):
                names[:] = [name and renamed(name) for name in names]


def describe_node(node: onnx.NodeProto) -> str:
    """Returns ``<op> node '<name>'``; the first output replaces a missing name."""
    return f"{node.op_type} node '{node.name or next(filter(None, node.output), '')}'"


def external_file(tensor: onnx.TensorProto, folder: Path | None) -> Path:
    """Returns the file of a tensor's external data; it need not exist.

    As in onnx, the file must be in the model's folder, without symbolic or hard links, so that a
    model cannot read files elsewhere. The links of Hugging Face's cache are followed, which lead to
    files of the same repository. It must be a regular file: a pipe or a device can be endless.

    Args:
        tensor: A tensor with external data.
        folder: The folder of the model; by default, the working directory.

    Raises:
        ModelError: If its location, offset or length is invalid, or does not match the file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"initializer '{tensor.name}': external data '{location!s:.200}'"
    path = plain_path(location, f"{where} must be in the model's folder")
    if tensor.data_type not in ITEM_SIZES:
        raise ModelError(f"{where} must not be strings; store strings in the model")
    offset = _count(entries.get("offset", "0"), "offset", where)
    size = size_of(tensor)
    length = _count(entries.get("length", str(size)), "length", where)
    if length != size:
        raise ModelError(
            f"{where}: dimensions {list(tensor.dims)} require {size} bytes, got length {length}"
        )
    file = folder or Path()
    try:
        for part in path.parts:
            file /= part
            found = file.lstat()
            if stat.S_ISLNK(found.st_mode) and is_cached(file):
                file = file.resolve(strict=True)
                found = file.lstat()
            elif stat.S_ISLNK(found.st_mode):
                raise ModelError(
                    f"{where} must not be behind a link, got the link '{file}'; replace it by the "
                    "file"
                )
    except FileNotFoundError:
        return (folder or Path()) / path
    except OSError as error:
        raise ModelError(
            f"{where} cannot be read: {error.strerror}; keep all files of the model together"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ModelError(f"{where} must be a regular file without hard links; replace it by a copy")
    if offset + length > found.st_size:
        raise ModelError(
            f"{where} end at byte {offset + length}, but the file has {found.st_size} bytes; keep "
            "all files of the model together"
        )
    return file


def _count(text: str, what: str, where: str) -> int:
    """Parses a number of bytes."""
    if not text.isascii() or not text.isdigit() or len(text) > 19:  # 2⁶³ has 19 digits
        raise ModelError(f"{where}: {what} must be a number of bytes, got '{text!s:.40}'")
    return int(text)


def size_of(tensor: onnx.TensorProto) -> int:
    """Returns the size of a tensor's data in bytes, from its dimensions: reading data copies it."""
    if tensor.data_type not in ITEM_SIZES:  # strings, or a type that is rejected later
        return 0
    size: float = math.prod(tensor.dims) * ITEM_SIZES[tensor.data_type]
    return math.ceil(size)


def location_of(tensor: onnx.TensorProto) -> str:
    """Returns the location of a tensor's external data; empty if it has none."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def is_light(tensor: onnx.TensorProto) -> bool:
    """Whether the data of a tensor are detached."""
    return location_of(tensor).startswith(LOCATION)


def initializers(
    proto: onnx.ModelProto, *, initialization: bool = True
) -> Iterator[onnx.TensorProto]:
    """Yields the initializers of a model and of its training graphs, whose data can be detached.

    Args:
        proto: The model.
        initialization: Whether to include those of initialization graphs.
    """
    yield from proto.graph.initializer
    for info in proto.training_info:
        yield from info.algorithm.initializer
        if initialization:
            yield from info.initialization.initializer


def inputs_by_default(graph: onnx.GraphProto) -> list[str]:
    """Returns the inputs that a caller may leave out, as initializers have their names.

    If all initializers are inputs, as exporters did before IR version 4, they are weights: none.
    """
    stored = {tensor.name for tensor in graph.initializer}
    found = [value.name for value in graph.input if value.name in stored]
    return found if len(found) < len(stored) else []


def data_size(proto: onnx.ModelProto) -> int:
    """Returns the size of a model's initializers in bytes, including detached data.

    External data do not count.
    """
    return sum(
        size_of(tensor)
        for tensor in initializers(proto)
        if tensor.data_location != onnx.TensorProto.EXTERNAL or is_light(tensor)
    )


def external_to_inputs(graph: onnx.GraphProto) -> None:
    """Converts initializers with external data to inputs, in place, for tools that read data."""
    listed = {value.name for value in graph.input}
    tensors = list(graph.initializer)
    del graph.initializer[:]  # at once: removing one compares it with all before it
    for tensor in tensors:
        if not tensor.external_data:
            graph.initializer.append(tensor)
        elif tensor.name not in listed:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(value)
