"""Models of any size: the data of big tensors are kept beside a ModelProto.

protobuf writes no message of 2 GB and more, and copies a field whenever it is read. So a model is
worked on as a light ModelProto, whose big tensors only say which data are theirs.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import google.protobuf.message
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.files.atomic import (
    remedy,
)
from ortops.graph.files.held_file import InFile, hold, read_message
from ortops.graph.files.messages import (
    BIG,
    ITEM_SIZES,
    LOCATION,
    attribute_graphs,
    copy_model,
    data_size,
    external_file,
    external_to_inputs,
    initializers,
    is_light,
    location_of,
    size_of,
)
from ortops.graph.files.serialization import to_proto

__all__ = [
    "ITEM_SIZES",
    "MESSAGE_LIMIT",
    "Data",
    "Lent",
    "array_of",
    "attach",
    "attached",
    "copy_tensor",
    "copy_to_memory",
    "data_size",
    "detach",
    "ends",
    "external_file",
    "external_to_inputs",
    "find",
    "is_light",
    "lend",
    "let_go",
    "move_aside",
    "move_out",
    "move_to_inputs",
    "read_light",
    "read_on_demand",
    "refer_to",
    "serialize",
    "set_array",
    "set_later",
    "without_data",
]

MESSAGE_LIMIT = 2**31 - 2**24
"""How many bytes of tensor data go into one message; protobuf's 2 GB, less room for the rest."""

Data: TypeAlias = dict[str, ir.TensorProtocol]
"""The data of tensors, by the location that stands in the tensors of a light model."""

_MEMORY = "ortops.memory"  # the location of what `add_external_initializers` gives
_numbers = itertools.count()


class Lent(ir.LazyTensor):
    """Data that are somebody else's, until others take their place.

    Models that are garbage wait for Python's collector, and refer to data. To these, they do not
    keep them alive.

    Args:
        content: The data.

    Attributes:
        content: The data; to be replaced.
    """

    def __init__(self, content: ir.TensorProtocol) -> None:
        self.content: ir.TensorProtocol | None = content
        super().__init__(self._content, content.dtype, ir.Shape(content.shape.numpy()))

    def _content(self) -> ir.TensorProtocol:
        assert self.content is not None
        return self.content


def lend(data: Data) -> Data:
    """Returns data that `let_go` empties."""
    return {location: Lent(tensor) for location, tensor in data.items()}


def let_go(data: Data) -> None:
    """Empties what `lend` returned: nobody reads it any more."""
    for tensor in data.values():
        if isinstance(tensor, Lent):
            tensor.content = None


def detach(proto: onnx.ModelProto, folder: Path | None = None) -> tuple[onnx.ModelProto, Data]:
    """Copies a model without the data of its big tensors.

    Args:
        proto: The model; not changed. Tensors that are light already stay so.
        folder: The folder of its file. Where one is given, external data are taken too.

    Returns:
        The light model, and the data: those of the given model, which are not copied.

    Raises:
        ModelError: If external data cannot be read.
    """
    result, data = onnx.ModelProto(), Data()
    copy_model(proto, result, lambda source, target: copy_tensor(source, target, data, folder))
    if folder is not None:
        nodes = (result.graph.node, *(function.node for function in result.functions))
        for tensor in itertools.chain.from_iterable(map(_inner_tensors, nodes)):
            _load(tensor, folder)
    return result, data


def copy_tensor(
    source: onnx.TensorProto, target: onnx.TensorProto, data: Data, folder: Path | None = None
) -> None:
    """Copies a tensor; data that are big are kept beside the model, which does not copy them.

    Args:
        source: The tensor.
        target: An empty tensor.
        data: The data of the target's model, to which big ones are added.
        folder: Where external data are that are taken too.

    Raises:
        ModelError: If external data cannot be read.
    """
    external = source.data_location == onnx.TensorProto.EXTERNAL
    big = source.data_type != onnx.TensorProto.STRING and size_of(source) > BIG
    if is_light(source) or (folder is None if external else not big):
        target.CopyFrom(source)
        return
    content = _external(source, folder) if external else ir.serde.deserialize_tensor(source)
    target.name, target.data_type = source.name, source.data_type
    target.dims.extend(source.dims)
    target.metadata_props.extend(source.metadata_props)
    if source.HasField("doc_string"):
        target.doc_string = source.doc_string
    _refer(target, data, content)


def read_light(path: Path) -> tuple[onnx.ModelProto, Data] | None:
    """Reads a model file as a light model, whose data stay in the file, which is held open.

    Args:
        path: The file.

    Returns:
        The model and its data; None where protobuf has to read all of it (see
        `ortops.graph.files.held_file.read_message`).

    Raises:
        OSError: If it cannot be read.
    """
    data = Data()

    def detach_tensor(tensor: onnx.TensorProto, content: InFile) -> bool:
        beside = tensor.data_location != onnx.TensorProto.DEFAULT or tensor.external_data
        if beside or min(tensor.dims, default=0) < 0 or size_of(tensor) != content.length:
            return False
        _refer(tensor, data, content)
        return True

    proto = read_message(path, BIG, detach_tensor)
    return None if proto is None else (proto, data)


def _refer(tensor: onnx.TensorProto, data: Data, content: ir.TensorProtocol) -> None:
    """Makes a tensor without data one whose data are kept beside the model."""
    location = f"{LOCATION}{next(_numbers)}"
    data[location] = content
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def _inner_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Yields the tensors in the attributes of nodes, and in the graphs there."""
    for attribute in (attribute for node in nodes for attribute in node.attribute):
        yield from attribute.tensors
        if attribute.HasField("t"):
            yield attribute.t
        for graph in attribute_graphs(attribute):
            yield from graph.initializer
            yield from _inner_tensors(graph.node)


def _load(tensor: onnx.TensorProto, folder: Path) -> None:
    """Reads the external data of a tensor into it."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        content = _external(tensor, folder).tobytes()
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = content


def _external(tensor: onnx.TensorProto, folder: Path | None) -> ir.TensorProtocol:
    """Returns the external data of a tensor, which stay in their file, or are mapped into memory.

    Raises:
        ModelError: If they cannot be read.
    """
    path = external_file(tensor, folder)
    try:
        file = hold(path, stays_open=False)
        if file is not None:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            begin = int(entries.get("offset", "0"))
            return InFile(file, (begin, begin + size_of(tensor)), tensor)
        mapped = ir.serde.deserialize_tensor(tensor, folder or "")
        mapped.numpy()
    except (OSError, ValueError) as error:
        keep = "keep the files of a model together"
        told = remedy(error, keep) if isinstance(error, OSError) else keep
        raise ModelError(
            f"initializer '{tensor.name}': its external data cannot be read: {error}; {told}"
        ) from error
    return mapped


class _External(ir.ExternalTensor):
    """An external tensor whose data are read when they are asked for.

    onnx-ir maps the file into memory for each tensor that was once read, and keeps that and a
    descriptor of the file.

    Args:
        tensor: The tensor.
        folder: The folder of its file; the working directory where there is none.
    """

    __slots__ = ("_content", "_folder")

    def __init__(self, tensor: ir.ExternalTensor, folder: Path | None) -> None:
        super().__init__(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
            doc_string=tensor.doc_string,
            metadata_props=tensor.metadata_props,
            base_dir=folder or "",
        )
        self._folder = folder
        self._content: ir.TensorProtocol | None = None

    @property
    def content(self) -> ir.TensorProtocol:
        """The data, which stay in the file.

        Raises:
            ModelError: If they cannot be read.
        """
        if self._content is None:
            self._content = _external(ir.serde.serialize_tensor(self), self._folder)
        return self._content

    def numpy(self) -> npt.NDArray[Any]:
        return self.content.numpy()

    def tobytes(self) -> bytes:
        return self.content.tobytes()

    def tofile(self, file: Any) -> None:
        file.write(self.tobytes())

    def __array__(self, dtype: Any = None) -> npt.NDArray[Any]:
        return np.asarray(self.numpy(), dtype)


def read_on_demand(model: ir.Model, folder: Path | None) -> None:
    """Lets the external initializers of a model be read when they are asked for, in place.

    Args:
        model: The model. Data that are kept beside it are no external ones.
        folder: The folder of its file, where it has one.
    """
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and not _is_light(tensor):
                value.const_value = _External(tensor, folder)


def _is_light(tensor: ir.ExternalTensor) -> bool:
    return os.fspath(tensor.location).startswith(LOCATION)


def find(tensor: ir.TensorProtocol | None, data: Data) -> ir.TensorProtocol | None:
    """Returns the data of a tensor of a light model; None for those of other tensors."""
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    return data.get(os.fspath(tensor.location))


class _Reference(ir.LazyTensor):
    """A tensor with a name of its own that has the data of another.

    Args:
        content: The other.
        name: The name.
    """

    def __init__(self, content: ir.TensorProtocol, name: str | None) -> None:
        self.content = content
        shape = ir.Shape(content.shape.numpy())
        super().__init__(lambda: content, content.dtype, shape, name=name)


def refer_to(tensor: ir.TensorProtocol, name: str | None) -> ir.TensorProtocol:
    """Returns a tensor with a name of its own that has the data of another."""
    return _Reference(tensor, name)


def ends(tensor: ir.TensorProtocol, length: int) -> tuple[bytes, bytes]:
    """Returns the first bytes of data and the last ones, so many of each.

    Those of a file that is held are read from there; that it has changed is not seen.
    """
    content: ir.TensorProtocol | None = tensor
    while isinstance(content, _Reference | Lent | _External):
        content = content.content
    if isinstance(content, InFile):
        return content.ends(length)
    whole = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return whole[:length].tobytes(), whole[-length:].tobytes()


def array_of(tensor: onnx.TensorProto, data: Data) -> npt.NDArray[Any]:
    """Returns the value of a tensor of a light model."""
    if is_light(tensor):
        return data[location_of(tensor)].numpy()
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ModelError(
            f"initializer '{tensor.name}': its data are in the file '{location_of(tensor)}', whose "
            "folder a model in memory does not tell; give the path of the model"
        )
    return onnx.numpy_helper.to_array(tensor)


def set_array(tensor: onnx.TensorProto, data: Data, array: npt.NDArray[Any]) -> None:
    """Sets the value of a tensor of a light model; an array that is kept beside is not copied."""
    if is_light(tensor):
        kind = ir.DataType(tensor.data_type)
        data[location_of(tensor)] = ir.Tensor(array, dtype=kind, name=tensor.name)
    else:
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def set_later(
    tensor: onnx.TensorProto, data: Data, array: Callable[[], npt.NDArray[Any]] | None
) -> None:
    """Lets a tensor of a light model have what a function returns, in the place of lent data.

    Args:
        tensor: The tensor; one that is not light stays as it is.
        data: The data of its model.
        array: The function; None for a copy of the data.
    """
    content = data.get(location_of(tensor))
    if isinstance(content, Lent) and content.content is not None:
        kind, shape = content.dtype, content.shape
        if array is None:
            content.content = _in_memory(content.content)
        else:
            content.content = ir.LazyTensor(lambda: ir.Tensor(array(), dtype=kind), kind, shape)


def copy_to_memory(
    data: Data, but: Iterable[onnx.TensorProto] = (), held: Iterable[onnx.TensorProto] = ()
) -> Data:
    """Returns data that neither a file nor another model can change.

    Args:
        data: The data of a light model.
        but: Its tensors whose data are to be lent.
        held: Those that may stay in a file that is held open: they are seldom read.
    """
    lent, seldom = ({location_of(tensor) for tensor in tensors} for tensors in (but, held))

    def kept(location: str, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if location in lent:
            return Lent(tensor)
        return tensor if location in seldom and isinstance(tensor, InFile) else _in_memory(tensor)

    return {location: kept(location, tensor) for location, tensor in data.items()}


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(_copied(tensor.numpy()), dtype=tensor.dtype)


def _copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(_owner(array), bytes):  # which a message hands out as copies, and nobody changes
        return array
    return np.array(array, order="C")


def _owner(array: npt.NDArray[Any]) -> object:
    """Returns what holds the memory of an array."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _bytes(tensor: ir.TensorProtocol) -> bytes:
    """Returns data as a message holds them, uncopied where they are bytes already."""
    if tensor.dtype.bitwidth >= 8 and sys.byteorder == "little":
        array = tensor.numpy()
        owner = _owner(array)
        whole = isinstance(owner, bytes) and len(owner) == array.nbytes
        if isinstance(owner, bytes) and whole and array.flags.c_contiguous:
            return owner
    return tensor.tobytes()


def attach(proto: onnx.ModelProto, data: Data) -> onnx.ModelProto:
    """Puts the data of a light model into it, in place, and returns it."""
    for tensor in initializers(proto):
        if is_light(tensor):
            content = _bytes(data[location_of(tensor)])
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = content
    return proto


def attached(proto: onnx.ModelProto, data: Data) -> onnx.ModelProto:
    """Returns a copy of a light model with its data in it."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    return attach(result, data)


def serialize(proto: onnx.ModelProto) -> bytes:
    """Returns the bytes of a model.

    Raises:
        ModelError: If it is of 2 GB or more.
    """
    size = data_size(proto)
    if size <= MESSAGE_LIMIT:
        try:
            message: bytes = proto.SerializeToString()
            return message
        except google.protobuf.message.EncodeError:
            pass
    raise ModelError(
        f"model: its tensors take {size:,} bytes, and no ONNX message holds 2 GB or more; write it "
        "with ortops.save_model, which puts the data into a file of their own, and give the path"
    )


def move_to_inputs(model: ir.Model) -> dict[str, npt.NDArray[Any]]:
    """Makes big initializers inputs, in place, where a model does not fit into one message.

    onnxruntime reads arrays that it is fed in place, and copies initializers.

    Returns:
        What to feed. It is empty where the model fits.
    """
    graph = model.graph
    tensors = {n: t for n, v in graph.initializers.items() if (t := v.const_value) is not None}
    if sum(tensor.nbytes for tensor in tensors.values()) <= MESSAGE_LIMIT:
        return {}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, tensor in tensors.items():
        array = _native(tensor)
        if array is not None:
            value = graph.initializers.pop(name)
            value.const_value = None
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
            if value not in graph.inputs:
                graph.inputs.append(value)
            arrays[name] = array
    return arrays


def move_out(
    model: ir.Model, limit: int | None = None
) -> tuple[onnx.ModelProto, dict[str, npt.NDArray[Any]]]:
    """Serializes a model, without big initializers where they have more bytes than a limit.

    Args:
        model: The model.
        limit: The limit; by default, what fits into one message.

    Returns:
        The model, and the arrays of external initializers that `add_external_initializers` takes.
        There are none where the limit is kept.
    """
    graph = model.graph
    tensors = {n: t for n, v in graph.initializers.items() if (t := v.const_value) is not None}
    inside = [t for t in tensors.values() if not isinstance(t, ir.ExternalTensor)]
    arrays: dict[str, npt.NDArray[Any]] = {}
    if sum(tensor.nbytes for tensor in inside) > (MESSAGE_LIMIT if limit is None else limit):
        for name, tensor in tensors.items():
            array = None if isinstance(tensor, ir.ExternalTensor) else _native(tensor)
            if array is not None:
                arrays[name] = array
    places = {name: (_MEMORY, 0, array.nbytes) for name, array in arrays.items()}
    return _without(model, places), arrays


def move_aside(model: ir.Model) -> tuple[onnx.ModelProto, Data]:
    """Serializes a model as a light one, whose big initializers are not copied.

    Args:
        model: The model.

    Returns:
        The light model, and its data.
    """
    big = {
        name: tensor
        for name, value in model.graph.initializers.items()
        if (tensor := value.const_value) is not None
        and tensor.dtype.value in ITEM_SIZES
        and tensor.nbytes > BIG
        and not isinstance(tensor, ir.ExternalTensor)
    }
    places = {name: (f"{LOCATION}{next(_numbers)}", None, None) for name in big}
    return _without(model, places), {places[name][0]: tensor for name, tensor in big.items()}


def _without(
    model: ir.Model, places: Mapping[str, tuple[str, int | None, int | None]]
) -> onnx.ModelProto:
    """Serializes a model whose initializers say where their data are, in the place of the data.

    Args:
        model: The model.
        places: Location, offset and length of those initializers, by name.
    """
    initializers = model.graph.initializers
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, place in places.items():
        tensor = initializers[name].const_value
        assert tensor is not None
        tensors[name] = tensor
        initializers[name].const_value = ir.ExternalTensor(
            *place, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
        )
    proto = to_proto(model)
    for name, tensor in tensors.items():
        initializers[name].const_value = tensor
    return proto


def _native(tensor: ir.TensorProtocol) -> npt.NDArray[Any] | None:
    """Returns a big tensor as an array that can be lent to onnxruntime, or None."""
    if tensor.nbytes <= BIG or tensor.dtype.numpy().type.__module__ != "numpy":
        return None  # onnxruntime takes no arrays of types that numpy itself has not
    return np.require(tensor.numpy(), requirements=["C", "A"])


def without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model to check: itself, or one with inputs for big initializers if it is too big.

    Args:
        proto: The model; not changed.
    """
    if data_size(proto) <= MESSAGE_LIMIT:
        return proto
    result, _ = detach(proto)
    external_to_inputs(result.graph)
    return result
