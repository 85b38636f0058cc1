"""Reading models, and saying what is wrong with them, without onnx-ir."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar

import google.protobuf.message
import onnx

from ortops.errors import ModelError, OrtopsError
from ortops.graph.files.atomic import remedy
from ortops.graph.files.messages import external_to_inputs, without_big_data
from ortops.graph.files.validation import validate

__all__ = ["ModelLike", "blame_model", "is_file", "load", "readable"]

P = ParamSpec("P")
T = TypeVar("T")

ModelLike: TypeAlias = onnx.ModelProto | bytes | str | os.PathLike[str]
"""A model, its serialized bytes, or the path of its file."""

_KINDS = (onnx.ModelProto, bytes, str, os.PathLike)

_MESSAGE = 2**31 - 1  # bytes of a message that protobuf reads
_PART = 2**24  # bytes of a file that are read at once


def load(model: ModelLike) -> tuple[onnx.ModelProto, Path | None]:
    """Reads a model.

    Args:
        model: A model, its bytes or its path. External data stay where they are.

    Returns:
        The model, which is the argument itself if it was a ModelProto, and the folder of its file
        where there is one.

    Raises:
        ModelError: If it is not an ONNX model, or asks for more than `ortops.graph.limits` accept.
    """
    if isinstance(model, onnx.ModelProto):
        validate(model)
        return model, None
    folder = None
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        what, data = f"file '{path}'", readable(path, _whole)
        folder = path.resolve().parent
    elif isinstance(model, bytes | bytearray | memoryview):
        what, data = f"{len(model)} bytes", bytes(model)
    else:
        raise ModelError(
            f"model: {type(model).__name__} was given; give a ModelProto, bytes, or a path"
        )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except UnicodeDecodeError as error:  # by protobuf in plain Python, which looks at names here
        raise ModelError(f"{what}: a name in it is not UTF-8 ({error}); write it anew") from error
    except google.protobuf.message.DecodeError as error:
        raise ModelError(f"{what}: not an ONNX model ({error}); give a .onnx file") from error
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError(f"{what}: not an ONNX model (it has no graph); give a .onnx file")
    validate(proto, folder)
    return proto, folder


def readable(path: Path, read: Callable[[Path], T]) -> T:
    """Reads a file.

    Raises:
        ModelError: If it cannot be read.
    """
    try:
        return read(path)
    except OSError as error:
        told = remedy(error, "give the path of a model")
        raise ModelError(f"file '{path}': {error.strerror}; {told}") from error


def _whole(path: Path) -> bytes:
    """Returns the bytes of a file, or of a pipe until its end.

    Raises:
        ModelError: If they can be none of a model: it is a device, or there are too many.
        OSError: If it cannot be read.
    """
    found = path.stat()
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise ModelError(f"file '{path}': it is a device; give a regular file or a pipe")
    content = bytearray()
    if found.st_size <= _MESSAGE:
        with path.open("rb") as stream:
            if stat.S_ISREG(found.st_mode):
                return stream.read()
            while len(content) <= _MESSAGE and (part := stream.read(_PART)):  # it may have no end
                content += part
    if max(found.st_size, len(content)) > _MESSAGE:
        raise ModelError(
            f"file '{path}': it has 2 GB or more, which no ONNX model in one file has; big tensors "
            "are in files beside it, as ortops.save_model writes them"
        )
    return bytes(content)


def blame_model(function: Callable[P, T]) -> Callable[P, T]:
    """Makes what goes wrong in a function because its model is illegal an error that says so.

    A model that contradicts the standard may fail in any line. Where that has happened, onnx's
    checker tells whether it is so; what fails with a legal model comes out as it is, because it is
    a mistake in ortops.

    Args:
        function: A function of a model, or a method of one.

    Returns:
        The function, which also raises ModelError.
    """

    @functools.wraps(function)
    def blaming(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (OrtopsError, OSError, MemoryError):
            raise
        except Exception as error:
            given = (*args[:2], kwargs.get("model"), kwargs.get("path_or_bytes"))
            models = [each for each in given if isinstance(each, _KINDS)]
            if any(isinstance(each, str | os.PathLike) and not is_file(each) for each in models):
                cause = str(error.__cause__ or error).strip().partition("\n")[0]
                raise ModelError(
                    f"model: {cause!s:.200}; it came through a pipe and cannot be read again, so "
                    "write it to a file and check it with onnx.checker.check_model"
                ) from error
            fault = next((_fault(load(model)[0]) for model in models), None)
            if fault is None:
                raise
            raise ModelError(f"model: {fault}; check it with onnx.checker.check_model") from error

    return blaming


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path leads to a regular file, which can be read more than once."""
    return Path(path).is_file()


def _fault(proto: onnx.ModelProto) -> str | None:
    """Returns what onnx's checker finds wrong with a model, or with one of its algorithms."""
    light = without_big_data(proto)
    candidates = [light]
    for info in light.training_info:
        joined = onnx.ModelProto()
        joined.CopyFrom(light)
        for field in ("node", "initializer", "input", "output", "value_info"):
            getattr(joined.graph, field).extend(getattr(info.algorithm, field))
        candidates.append(joined)
        initial = onnx.ModelProto()
        initial.CopyFrom(light)
        initial.graph.CopyFrom(info.initialization)
        if initial.graph.node:
            candidates.append(initial)
    for candidate in candidates:
        graph = candidate.graph
        del candidate.training_info[:]
        external_to_inputs(graph)
        for value in [each for each in graph.output if not _has_rank(each)]:
            graph.output.remove(value)  # the checker wants a rank, and nobody else does
        try:
            onnx.checker.check_model(candidate, full_check=True)
        except Exception as error:  # whatever it is, the checker has refused the model
            return str(error).strip()
    return None


def _has_rank(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return bool(kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.HasField("shape"))
