"""What is said of models as protobuf messages, without onnx-ir, which takes long to import."""

from __future__ import annotations

import math
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx

from ortops.errors import ModelError

__all__ = [
    "BIG",
    "DOMAINS",
    "ITEM_SIZES",
    "LOCATION",
    "attribute_graphs",
    "copy_model",
    "data_size",
    "describe_node",
    "external_file",
    "external_to_inputs",
    "has_domain",
    "initializers",
    "is_light",
    "location_of",
    "node_graphs",
    "size_of",
    "without_big_data",
]

BIG = 1024
"""Tensors of more bytes are kept beside a light model (see `ortops.graph.files.external`)."""

LOCATION = f"ortops.detached/{secrets.token_hex(16)}/"
"""How the locations of these data begin; no file can name those of another."""

DOMAINS = ("ai.onnx.preview.training", "ai.onnx.preview")
"""The domain of the specification's training operators, and the name that an exporter gives it."""

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
"""How many bytes an element takes, by the number of its type; strings have no such size."""


def copy_model(
    source: onnx.ModelProto,
    target: onnx.ModelProto,
    copy_tensor: Callable[[onnx.TensorProto, onnx.TensorProto], None],
) -> None:
    """Copies a model field by field, so that big tensors are met before they are copied.

    Args:
        source: The model.
        target: An empty model.
        copy_tensor: Copies an initializer to an empty tensor.
    """
    _copy(source, target, copy_tensor)


def _copy(
    source: Any, target: Any, copy_tensor: Callable[[onnx.TensorProto, onnx.TensorProto], None]
) -> None:
    for field, value in source.ListFields():
        name = field.name
        if name in ("graph", "algorithm", "initialization"):
            part = getattr(target, name)
            part.SetInParent()
            _copy(value, part, copy_tensor)
        elif name == "training_info":
            for info in value:
                _copy(info, target.training_info.add(), copy_tensor)
        elif name == "initializer":
            for tensor in value:
                copy_tensor(tensor, target.initializer.add())
        elif field.is_repeated:
            getattr(target, name).extend(value)
        elif field.message_type is not None:
            getattr(target, name).CopyFrom(value)
        else:
            setattr(target, name, value)


def without_big_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy of a model whose big initializers have no data, for onnx's checker.

    Args:
        proto: The model; not changed.
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
    """Whether a model has nodes, or functions, of the training domain."""

    def in_graph(nodes: Iterable[onnx.NodeProto]) -> bool:
        return any(
            node.domain in DOMAINS or any(in_graph(graph.node) for graph in node_graphs(node))
            for node in nodes
        )

    return in_graph(proto.graph.node) or any(
        function.domain in DOMAINS or in_graph(function.node) for function in proto.functions
    )


def attribute_graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Returns the graphs that an attribute contains."""
    return [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]


def node_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Returns the subgraphs of a node: its branches, or the body of a loop."""
    return [graph for attribute in node.attribute for graph in attribute_graphs(attribute)]


def describe_node(node: onnx.NodeProto) -> str:
    """Returns ``<op> node '<name>'``; the first output replaces a missing name."""
    return f"{node.op_type} node '{node.name or next(filter(None, node.output), '')}'"


def external_file(tensor: onnx.TensorProto, folder: Path | None) -> Path:
    """Returns the file of a tensor's external data, which need not be there.

    What onnx refuses is refused: a file that is not below the model's folder, or whose way leads
    over a link, or which has several names, may be anybody's; a pipe or a device may never end.

    Args:
        tensor: A tensor with external data.
        folder: The folder of the model; the working directory where it has none.

    Raises:
        ModelError: If its location, offset or length is not legal, or contradicts the file.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"initializer '{tensor.name}': its external data '{location!s:.200}'"
    path = Path(location)
    absolute = path.is_absolute() or path.drive or location.startswith(("/", "\\"))
    if absolute or not path.parts or ".." in path.parts or "\0" in location:
        raise ModelError(
            f"{where} lie outside the model's folder; a path relative to it, without '..', is "
            "accepted"
        )
    if tensor.data_type not in ITEM_SIZES:
        raise ModelError(f"{where} are strings; those are kept in the model")
    offset = _count(entries.get("offset", "0"), "offset", where)
    size = size_of(tensor)
    length = _count(entries.get("length", str(size)), "length", where)
    if length != size:
        raise ModelError(
            f"{where} take {length} bytes, and its dimensions {list(tensor.dims)} claim {size}; "
            "they must agree"
        )
    file = folder or Path()
    try:
        for part in path.parts:
            file /= part
            found = file.lstat()
            if stat.S_ISLNK(found.st_mode):
                raise ModelError(
                    f"{where} are reached through the link '{file}'; put the file itself there"
                )
    except FileNotFoundError:
        return (folder or Path()) / path
    except OSError as error:
        raise ModelError(
            f"{where} cannot be read: {error.strerror}; keep the files of a model together"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ModelError(f"{where} are no regular file with one name; put a copy of the data there")
    if offset + length > found.st_size:
        raise ModelError(
            f"{where} end at byte {offset + length}, and the file has {found.st_size}; keep the "
            "files of a model together"
        )
    return file


def _count(text: str, what: str, where: str) -> int:
    """Returns a number of bytes that stands in a file as text."""
    if not text.isascii() or not text.isdigit() or len(text) > 19:  # 2⁶³ has 19 digits
        raise ModelError(f"{where}: its {what} is '{text!s:.40}'; a number of bytes is accepted")
    return int(text)


def size_of(tensor: onnx.TensorProto) -> int:
    """Returns how many bytes the data of a tensor take; to look at them would copy them."""
    if tensor.data_type not in ITEM_SIZES:  # strings, or a type that is refused later
        return 0
    size: float = math.prod(tensor.dims) * ITEM_SIZES[tensor.data_type]
    return math.ceil(size)


def location_of(tensor: onnx.TensorProto) -> str:
    """Returns where a tensor's external data are; empty where it has none."""
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def is_light(tensor: onnx.TensorProto) -> bool:
    """Whether the data of a tensor are kept beside the model."""
    return location_of(tensor).startswith(LOCATION)


def initializers(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yields the initializers of a model that may be kept beside it."""
    yield from proto.graph.initializer
    for info in proto.training_info:
        yield from info.algorithm.initializer
        yield from info.initialization.initializer


def data_size(proto: onnx.ModelProto) -> int:
    """Returns how many bytes the initializers in a model take, or would take if it were not light.

    External data do not count.
    """
    return sum(
        size_of(tensor)
        for tensor in initializers(proto)
        if tensor.data_location != onnx.TensorProto.EXTERNAL or is_light(tensor)
    )


def external_to_inputs(graph: onnx.GraphProto) -> None:
    """Makes initializers whose data stand elsewhere inputs, in place, for tools that read data."""
    listed = {value.name for value in graph.input}
    tensors = list(graph.initializer)
    del graph.initializer[:]  # at once: to remove one is to compare it with those before it
    for tensor in tensors:
        if not tensor.external_data:
            graph.initializer.append(tensor)
        elif tensor.name not in listed:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            graph.input.append(value)
