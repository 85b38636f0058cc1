"""Light models: a ModelProto without the data of its big tensors, and a dict with the data.

protobuf cannot serialize messages of 2 GB or more, and copies a field on each access. ortops
therefore works on light models, whose big tensors contain only the key of their detached data.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import google.protobuf.message
import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.errors import ModelError
from ortops.graph.files.atomic import (
    remedy,
)
from ortops.graph.files.folders import forget
from ortops.graph.files.held_file import HeldFile, InFile, hold, read_message
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
from ortops.graph.files.wire_format import ByteSpan, unknown_fields
from ortops.graph.nesting import subgraphs

MESSAGE_LIMIT = 2**31 - 2**24
"""The maximum size in bytes of tensor data in a message: 2 GB, minus room for other fields."""

Data: TypeAlias = dict[str, ir.TensorProtocol]
"""Detached data, by the location of the tensor in the light model."""

_ASIDE = 2**22
"""Data of at least this many bytes are put into a temporary file, if they are rarely read."""

logger = logging.getLogger("ortops")

_MEMORY = "ortops.memory"  # the location of data passed to `add_external_initializers`
_numbers = itertools.count()


class LightModel(NamedTuple):
    """A model that is in memory without the data of its big tensors, and these data.

    Attributes:
        proto: The model, whose big tensors contain only the location of their data.
        data: The data.
    """

    proto: onnx.ModelProto
    data: Data

    def array_of(self, tensor: onnx.TensorProto) -> Array:
        """Returns the value of a tensor of the model."""
        if is_light(tensor):
            return self.data[location_of(tensor)].numpy()
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise ModelError(
                f"initializer '{tensor.name}': its data are in the file '{location_of(tensor)}', "
                "whose folder is unknown for a model in memory; pass the path of the model"
            )
        return onnx.numpy_helper.to_array(tensor)

    def stored(self, tensor: onnx.TensorProto) -> InFile | None:
        """Returns the data of a tensor if they are in a file as they are in memory, else None."""
        content = in_file(self.data.get(location_of(tensor)))
        return content if content is not None and content.is_plain else None

    def set_array(self, tensor: onnx.TensorProto, array: Array) -> None:
        """Sets the value of a tensor of the model; detached data are not copied."""
        if is_light(tensor):
            kind = ir.DataType(tensor.data_type)
            self.data[location_of(tensor)] = ir.Tensor(array, dtype=kind, name=tensor.name)
        else:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    def arrays(self, names: Iterable[str]) -> dict[str, Array]:
        """Returns the values of initializers of the model and its algorithms; the first counts."""
        tensors = reversed([*initializers(self.proto, initialization=False)])
        found = {tensor.name: tensor for tensor in tensors}
        return {name: self.array_of(found[name]) for name in names}

    def copy(self) -> LightModel:
        """Returns a copy with the same data, to which others can be added."""
        proto, found = detach(self.proto)
        return LightModel(proto, self.data | found)

    def attach(self) -> onnx.ModelProto:
        """Stores the data in the model, in place, and returns it."""
        for tensor in initializers(self.proto):
            if is_light(tensor):
                held = self.data[location_of(tensor)]
                content = _bytes(held)
                if isinstance(held, _Kept):
                    held.release()
                tensor.ClearField("external_data")
                tensor.ClearField("data_location")
                tensor.raw_data = content
        return self.proto

    def attached(self) -> onnx.ModelProto:
        """Returns a copy of the model that contains the data."""
        result = onnx.ModelProto()
        result.CopyFrom(self.proto)
        return LightModel(result, self.data).attach()


class Reference(ir.LazyTensor):
    """A reference to data, with a name of its own, that can be replaced or cleared.

    Cyclic garbage, such as an unused model, stays in memory until Python's collector runs. Clearing
    the reference frees the data before.

    Args:
        content: The data.
        name: The name.

    Attributes:
        content: The data; None after `let_go`.
    """

    def __init__(self, content: ir.TensorProtocol, name: str | None = None) -> None:
        self.content: ir.TensorProtocol | None = content
        shape = ir.Shape(content.shape.numpy())
        super().__init__(self._content, content.dtype, shape, name=name)

    def _content(self) -> ir.TensorProtocol:
        assert self.content is not None
        return self.content


class _Kept(ir.LazyTensor):
    """Data of a file that stay in memory from their first access until they are released."""

    def __init__(self, content: InFile) -> None:
        self._content, self._kept = content, list[ir.TensorProtocol]()
        super().__init__(self._read, content.dtype, ir.Shape(content.shape.numpy()))

    def _read(self) -> ir.TensorProtocol:
        kept = self._kept or [ir.Tensor(self._content.numpy(), dtype=self.dtype)]
        self._kept = kept
        return kept[0]

    def release(self) -> None:
        """Frees the memory; the next access reads the file again."""
        self._kept = []


def keep(model: LightModel) -> LightModel:
    """Returns a model whose data are read from their file once, for `LightModel.attach`."""
    data = model.data.items()
    kept = {name: _Kept(each) if isinstance(each, InFile) else each for name, each in data}
    return LightModel(model.proto, kept)


def lend(model: LightModel) -> LightModel:
    """Returns a model with references to its data, which `let_go` clears."""
    data: Data = {location: Reference(tensor) for location, tensor in model.data.items()}
    return LightModel(model.proto, data)


def let_go(model: LightModel) -> None:
    """Clears the references that `lend` returned; the data must no longer be read."""
    for tensor in model.data.values():
        if isinstance(tensor, Reference):
            tensor.content = None


def content_of(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Returns the data behind references, which `let_go` may clear."""
    while isinstance(tensor, Reference) and tensor.content is not None:
        tensor = tensor.content
    return tensor


def returned(data: Data) -> Data:
    """Returns the data behind references, which `let_go` may clear."""
    return {location: content_of(tensor) for location, tensor in data.items()}


class Computed(ir.LazyTensor):
    """Data that a function computes each time they are read.

    Args:
        array: The function.
        dtype: The type of its result.
        shape: The shape of its result.
        source: The data that the function reads, if it reads any.

    Attributes:
        source: As given.
    """

    def __init__(
        self,
        array: Callable[[], Array],
        dtype: ir.DataType,
        shape: Iterable[int],
        source: ir.TensorProtocol | None = None,
    ) -> None:
        super().__init__(lambda: ir.Tensor(array(), dtype=dtype), dtype, ir.Shape(shape))
        self.source = source


def detach(proto: onnx.ModelProto, folder: Path | None = None) -> LightModel:
    """Returns a light copy of a model.

    Args:
        proto: The model; it is not modified. Data that are already detached stay detached.
        folder: The folder of its file. If given, external data are detached too.

    Returns:
        The light model, and the data, which are not copied.

    Raises:
        ModelError: If external data cannot be read.
    """
    result, data = onnx.ModelProto(), Data()
    copy_model(proto, result, lambda source, target: copy_tensor(source, target, data, folder))
    if folder is not None:
        forget(result)
        nodes = (result.graph.node, *(function.node for function in result.functions))
        for tensor in itertools.chain.from_iterable(map(_inner_tensors, nodes)):
            _load(tensor, folder)
    return LightModel(result, data)


def copy_tensor(
    source: onnx.TensorProto, target: onnx.TensorProto, data: Data, folder: Path | None = None
) -> None:
    """Copies a tensor, and detaches its data if they are big, without a copy.

    Args:
        source: The tensor.
        target: An empty tensor.
        data: The detached data of the target's model, to which those of the tensor are added.
        folder: The folder of external data, if they are to be detached too.

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
    target.MergeFromString(unknown_fields(source))
    refer(target, data, content)


def read_light(path: Path) -> LightModel | None:
    """Reads a light model, whose data stay in the file, which stays open.

    Args:
        path: The file.

    Returns:
        The model and its data, or None if protobuf must read the whole file (see
        `ortops.graph.files.held_file.read_message`).

    Raises:
        OSError: If it cannot be read.
    """
    data = Data()

    def detach_tensor(tensor: onnx.TensorProto, content: InFile) -> bool:
        external = tensor.data_location != onnx.TensorProto.DEFAULT or tensor.external_data
        if external or min(tensor.dims, default=0) < 0 or size_of(tensor) != content.length:
            return False
        refer(tensor, data, content)
        return True

    proto = read_message(path, BIG, detach_tensor)
    return None if proto is None else LightModel(proto, data)


def refer(tensor: onnx.TensorProto, data: Data, content: ir.TensorProtocol) -> None:
    """Makes a tensor without data refer to detached data, which are added to those of its model."""
    location = f"{LOCATION}{next(_numbers)}"
    data[location] = content
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def _inner_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    """Yields the tensors in attributes of nodes and of the nodes in their subgraphs."""
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
    """Returns the external data of a tensor, which stay in their file or are memory-mapped.

    Raises:
        ModelError: If they cannot be read.
    """
    path = external_file(tensor, folder)
    try:
        file = hold(path, stays_open=False)
        if file is not None:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            begin = int(entries.get("offset", "0"))
            return InFile(file, ByteSpan(begin, begin + size_of(tensor)), tensor)
        mapped = ir.serde.deserialize_tensor(tensor, folder or "")
        mapped.numpy()
    except (OSError, ValueError) as error:
        keep = "keep all files of the model together"
        advice = remedy(error, keep) if isinstance(error, OSError) else keep
        raise ModelError(
            f"initializer '{tensor.name}': cannot read its external data: {error}; {advice}"
        ) from error
    return mapped


class _External(ir.ExternalTensor):
    """An external tensor whose data are read on each access.

    onnx-ir's own class keeps the file mapped and open for each tensor after the first access.

    Args:
        tensor: The tensor.
        folder: The folder of its file; by default, the working directory.
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

    def numpy(self) -> Array:
        return self.content.numpy()

    def tobytes(self) -> bytes:
        return self.content.tobytes()

    def tofile(self, file: Any) -> None:
        file.write(self.tobytes())

    def __array__(self, dtype: Any = None) -> Array:
        return np.asarray(self.numpy(), dtype)


def read_on_demand(model: ir.Model, folder: Path | None) -> None:
    """Makes the external initializers of a model read their data on each access, in place.

    Args:
        model: The model. Detached data do not count as external.
        folder: The folder of its file, if there is one.
    """
    for graph in (model.graph, *subgraphs(model.graph)):
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and not _is_light(tensor):
                value.const_value = _External(tensor, folder)


def _is_light(tensor: ir.ExternalTensor) -> bool:
    return os.fspath(tensor.location).startswith(LOCATION)


def find(tensor: ir.TensorProtocol | None, data: Data) -> ir.TensorProtocol | None:
    """Returns the detached data of a tensor, or None if its data are not detached."""
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    return data.get(os.fspath(tensor.location))


def in_file(tensor: ir.TensorProtocol | None) -> InFile | None:
    """Returns the data behind references if they are in a held file as they are, else None."""
    while isinstance(tensor, Reference | _External):
        tensor = tensor.content
    return tensor if isinstance(tensor, InFile) else None


def ends(tensor: ir.TensorProtocol, length: int) -> tuple[bytes, bytes]:
    """Returns the first and the last bytes of data; for a held file, without checking for changes.

    Args:
        tensor: The data.
        length: The number of bytes to return from each end.
    """
    content = in_file(tensor)
    if content is not None:
        return content.ends(length)
    whole = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return whole[:length].tobytes(), whole[-length:].tobytes()


def set_later(tensor: onnx.TensorProto, data: Data, array: Callable[[], Array] | None) -> None:
    """Replaces lent data of a light model by the result of a function, which is called lazily.

    Args:
        tensor: The tensor. If its data are not detached, nothing happens.
        data: The data of its model.
        array: The function; None to copy the lent data.
    """
    content = data.get(location_of(tensor))
    if isinstance(content, Reference) and content.content is not None:
        if array is None:
            content.content = _in_memory(content.content)
        else:
            content.content = Computed(array, content.dtype, content.shape.numpy())


def copy_to_memory(
    data: Data, but: Iterable[onnx.TensorProto] = (), held: Iterable[onnx.TensorProto] = ()
) -> Data:
    """Returns data that do not change if a file or another model does.

    Args:
        data: The data of a light model.
        but: Tensors whose data are lent instead of copied (see `Reference`).
        held: Tensors whose data may stay in a held file, or be computed from data there, because
            they are rarely read. If they are in memory and large, they are moved to a temporary
            file.
    """
    lent, seldom = ({location_of(tensor) for tensor in tensors} for tensors in (but, held))
    rest: Data = {}
    result: Data = {}
    for location, tensor in data.items():
        source = tensor.source if isinstance(tensor, Computed) else tensor
        if location in lent:
            result[location] = Reference(tensor)
        elif location in seldom and isinstance(source, InFile):
            result[location] = tensor
        else:
            rest[location] = tensor
    aside = _put_aside({name: tensor for name, tensor in rest.items() if name in seldom})
    in_memory = {name: _in_memory(tensor) for name, tensor in rest.items() if name not in aside}
    return {**result, **aside, **in_memory}


def _put_aside(data: Data) -> Data:
    """Returns data that are read from a temporary file on each access.

    They are none if there are few data, or such a file cannot be written. It has no name, so that
    the system removes it with the process at the latest.
    """
    if sum(tensor.nbytes for tensor in data.values()) < _ASIDE or not hasattr(os, "pread"):
        return {}
    spans: dict[str, ByteSpan] = {}
    try:
        with tempfile.TemporaryFile() as stream:
            for location, tensor in data.items():
                begin = stream.tell()
                stream.write(_bytes(tensor))
                spans[location] = ByteSpan(begin, stream.tell())
            stream.flush()
            folder = Path(tempfile.gettempdir())
            file = HeldFile(folder, os.dup(stream.fileno()), stays_open=True)
    except OSError as error:
        logger.info("model: the parameters for `reset` stay in memory: %s", error)
        return {}
    logger.info("model: the parameters for `reset` are in a temporary file in '%s'", folder)
    bare = {
        location: onnx.TensorProto(
            name=tensor.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy()
        )
        for location, tensor in data.items()
    }
    return {name: InFile(file, span, bare[name], ours=True) for name, span in spans.items()}


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    content = in_file(tensor)
    if content is not None and content.is_plain:
        array = np.empty(content.shape.numpy(), content.dtype.numpy())
        content.fill(array)
        return ir.Tensor(array, dtype=content.dtype)
    return ir.Tensor(_copied(tensor.numpy()), dtype=tensor.dtype)


def _copied(array: Array) -> Array:
    if isinstance(_owner(array), bytes):  # immutable
        return array
    return np.array(array, order="C")


def _owner(array: Array) -> object:
    """Returns the object that owns the memory of an array."""
    owner: object = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return owner


def _bytes(tensor: ir.TensorProtocol) -> bytes:
    """Returns data in the format of ``raw_data``, without a copy if they are bytes already."""
    if tensor.dtype.bitwidth >= 8 and sys.byteorder == "little":
        array = tensor.numpy()
        owner = _owner(array)
        whole = isinstance(owner, bytes) and len(owner) == array.nbytes
        if isinstance(owner, bytes) and whole and array.flags.c_contiguous:
            return owner
    return tensor.tobytes()


def serialize(proto: onnx.ModelProto) -> bytes:
    """Serializes a model.

    Raises:
        ModelError: If it is 2 GB or larger.
    """
    if data_size(proto) <= MESSAGE_LIMIT:
        try:
            message: bytes = proto.SerializeToString()
            return message
        except google.protobuf.message.EncodeError:
            pass
    raise too_large(proto)


def too_large(proto: onnx.ModelProto) -> ModelError:
    """Returns the error for a model of 2 GB or more."""
    return ModelError(
        f"model: cannot serialize {data_size(proto):,} bytes of tensors, the limit is 2 GB; write "
        "the model with ortops.save_model, which uses external data, and pass the path"
    )


def move_to_inputs(model: ir.Model, limit: int | None = None) -> dict[str, Array]:
    """Converts big initializers to inputs, in place, if all exceed a limit in total.

    onnxruntime copies initializers, but reads inputs in place.

    Args:
        model: The model.
        limit: The limit in bytes; by default, and at most, the maximum for one message.

    Returns:
        The values of the new inputs; empty if the limit is not exceeded.
    """
    graph = model.graph
    most = MESSAGE_LIMIT if limit is None else min(limit, MESSAGE_LIMIT)
    arrays = _big_arrays(graph, most)
    for name, array in arrays.items():
        value = graph.initializers.pop(name)
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value.shape, value.const_value = ir.Shape(array.shape), None
        if value not in graph.inputs:
            graph.inputs.append(value)
    return arrays


def move_out(model: ir.Model, limit: int | None = None) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Converts a model to protobuf, without its big initializers if all exceed a limit in total.

    Args:
        model: The model.
        limit: The limit in bytes; by default, the maximum for one message.

    Returns:
        The model, and the arrays to pass to onnxruntime's `add_external_initializers`, by name;
        empty if the limit is not exceeded.
    """
    arrays = _big_arrays(
        model.graph, MESSAGE_LIMIT if limit is None else limit, skipped=ir.ExternalTensor
    )
    places = {name: (_MEMORY, 0, array.nbytes) for name, array in arrays.items()}
    return _without(model, places), arrays


def _big_arrays(
    graph: ir.Graph, limit: int, skipped: type[Any] | tuple[()] = ()
) -> dict[str, Array]:
    """Returns the big initializers that onnxruntime can read in place, if all exceed a limit."""
    tensors = {
        name: tensor
        for name, value in graph.initializers.items()
        if (tensor := value.const_value) is not None and not isinstance(tensor, skipped)
    }
    if sum(tensor.nbytes for tensor in tensors.values()) <= limit:
        return {}
    found = ((name, _native(tensor)) for name, tensor in tensors.items())
    return {name: array for name, array in found if array is not None}


def move_aside(model: ir.Model) -> LightModel:
    """Converts a model to a light model, without copying big initializers.

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
    data = {places[name][0]: tensor for name, tensor in big.items()}
    return LightModel(_without(model, places), data)


def _without(
    model: ir.Model, places: Mapping[str, tuple[str, int | None, int | None]]
) -> onnx.ModelProto:
    """Converts a model to protobuf, with external data in place of initializers.

    Args:
        model: The model.
        places: The location, offset and length for each of these initializers, by name.
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


def _native(tensor: ir.TensorProtocol) -> Array | None:
    """Returns a big tensor as an array that onnxruntime can read in place, or None."""
    if tensor.nbytes <= BIG or tensor.dtype.numpy().type.__module__ != "numpy":
        return None  # onnxruntime does not support arrays of other dtypes
    return np.require(tensor.numpy(), requirements=["C", "A"])


def without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model for onnx's checker: with inputs in place of big initializers if needed.

    Args:
        proto: The model; it is not modified, and returned if it fits into one message.
    """
    if data_size(proto) <= MESSAGE_LIMIT:
        return proto
    result, _ = detach(proto)
    external_to_inputs(result.graph)
    return result
