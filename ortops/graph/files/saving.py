"""Writing models of any size to files, with big data in a file of their own where needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.files import external
from ortops.graph.files.atomic import (
    TEMPORARY,
    destination,
    is_free,
    move,
    naming,
    new_file,
    remove_free,
    remove_litter,
    siblings,
    unique_sibling,
    write_atomically,
)
from ortops.graph.files.external import LightModel, detach, serialize
from ortops.graph.files.folders import forget, remembered
from ortops.graph.files.messages import data_size, initializers, is_light, location_of
from ortops.graph.files.opening import open_regular
from ortops.graph.files.streaming import serialized_parts, write_data, write_parts

_DATA = ".data"  # the suffix of data files
_BLOCK = 2**20  # the number of bytes of a model file to search at a time
_ALIGNMENT = 4096  # in bytes, so that tensors can be mapped into memory


def save_model(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Writes a model of any size, including its training algorithm and state.

    Args:
        model: The model; it is not modified. External data are copied if it was made from a file
            in another folder.
        path: The file, in standard ONNX format. If it would exceed 2 GB, the data of its tensors
            are written to a new file ``<file name>.<unique>.data`` in the same folder, as external
            data. The data of the replaced model stay, because another process may be reading them;
            the next save removes them, unless another model in the folder refers to them. At any
            time, the complete old or new model exists, even if several processes write.

    Raises:
        OSError: If it cannot be written; the old file is unchanged.
        ModelError: If the model exceeds 2 GB and ``path`` is not a regular file, or if it exceeds
            2 GB without the data of its initializers.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(examples.mlp((4, 16, 2)), f"{folder}/model.onnx")
        ...     onnx.load(f"{folder}/model.onnx") == examples.mlp((4, 16, 2))
        True
    """
    folder, target = remembered(model), destination(path)
    if folder is not None and target is not None and target.parent == folder.resolve():
        light = detach(model)  # the data are in the right folder already
        forget(light.proto)
    else:
        light = detach(model, folder)
    write_model(path, light)


def write_model(
    path: str | os.PathLike[str],
    model: LightModel,
    *,
    limit: int | None = None,
    follow: bool = True,
) -> None:
    """Writes a light model, one tensor's data after the other; see `save_model`.

    Args:
        path: The file.
        model: The model.
        limit: Data of more bytes are written to a file of their own; by default, those that do not
            fit into one file.
        follow: See `write_atomically`.
    """
    target = destination(path, follow=follow)
    size = data_size(model.proto)
    limit = external.MESSAGE_LIMIT if limit is None else limit
    if size > external.MESSAGE_LIMIT and target is None:
        raise ModelError(
            f"file '{os.fspath(path)}': a model with {size:,} bytes of tensors needs a second file "
            "for external data; pass the path of a regular file"
        )
    unused: list[Path] = []
    if target is not None:
        remove_litter(target)  # first, because unfinished models also refer to data files
        unused = _unused(target)
        for file in unused:
            if _is_newer(file, target):  # left by a killed process
                _remove(file)
    if target is None:  # what has been written to a stream cannot be taken back
        write_atomically(path, serialize(model.attached()))
    elif size <= limit:
        parts = serialized_parts(model)
        write_atomically(path, lambda stream: write_parts(stream, parts), follow=follow)
    else:
        _write_in_two(path, target, model)
    for file in unused:  # not those of the replaced model, which another process may be reading
        _remove(file)


def remove_model(path: str | os.PathLike[str]) -> None:
    """Removes a model file, if it exists, and its data files that no other model uses."""
    target = destination(path)
    if target is None:
        return
    remove_litter(target)
    data_files = siblings(target, _DATA)
    with naming(path):
        target.unlink(missing_ok=True)
    for file in data_files:
        _remove(file)


def _write_in_two(path: str | os.PathLike[str], target: Path, given: LightModel) -> None:
    """Writes the data to a new file, and then the model that refers to it."""
    file, temporary = unique_sibling(target, _DATA), unique_sibling(target, TEMPORARY)
    model = onnx.ModelProto()
    model.CopyFrom(given.proto)
    light = [tensor for tensor in initializers(model) if is_light(tensor)]
    contents = [given.data[location_of(tensor)] for tensor in light]
    offset = 0
    for tensor, content in zip(light, contents, strict=True):
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        del tensor.external_data[:]
        for key, value in (("location", file.name), ("offset", offset), ("length", content.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        offset += content.nbytes
    message = serialize(model)
    try:
        with naming(path), new_file(temporary, lambda s: _write_data(s, contents), target) as held:
            move(held, temporary, file)
            write_atomically(target, message, follow=False)
    except BaseException:
        temporary.unlink(missing_ok=True)
        if not _refers_to(target, file.name):  # the model may already have been written
            file.unlink(missing_ok=True)
        raise


def _write_data(stream: BinaryIO, contents: Iterable[ir.TensorProtocol]) -> None:
    for content in contents:
        stream.write(bytes(-stream.tell() % _ALIGNMENT))
        write_data(stream, content)


def _unused(target: Path) -> list[Path]:
    """Returns the data files of a model that it does not refer to and no process is writing."""
    found = siblings(target, _DATA)
    return [file for file in found if is_free(file) and not _refers_to(target, file.name)]


def _is_newer(file: Path, target: Path) -> bool:
    """Whether a data file is newer than its model, so that no model has ever referred to it."""
    try:
        return not target.exists() or file.stat().st_mtime_ns > target.stat().st_mtime_ns
    except OSError:
        return False


def _remove(file: Path) -> None:
    remove_free(file, functools.partial(_is_in_use, file))


def _is_in_use(file: Path) -> bool:
    """Whether a model in the folder of a data file refers to it."""
    try:
        return any(_refers_to(other, file.name) for other in file.parent.iterdir())
    except OSError:
        return True


def _refers_to(model: Path, name: str) -> bool:
    """Whether a file may be a model that refers to a data file, whose name is unique."""
    searched, tail = name.encode(), b""
    try:
        if not model.is_file():
            return False
        with open_regular(model, error=ModelError) as stream:
            block = stream.read(_BLOCK)
            if not block.startswith(b"\x08"):  # the first field of a ModelProto: ir_version
                return False
            while block:
                if searched in tail + block:
                    return True
                tail, block = block[-len(searched) :], stream.read(_BLOCK)
    except FileNotFoundError:
        return False
    except OSError:  # unknown
        return True
    return False
