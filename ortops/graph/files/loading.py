"""Reads models and diagnoses invalid ones, without onnx-ir."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

import google.protobuf.message
import onnx
import onnx.inliner

from ortops.errors import ModelError, OrtopsError
from ortops.graph.files.atomic import remedy
from ortops.graph.files.folders import remembered
from ortops.graph.files.messages import MICROSOFT, external_to_inputs, without_big_data
from ortops.graph.files.opening import read_regular
from ortops.graph.files.validation import validate
from ortops.graph.files.wire_format import MOST_BYTES

P = ParamSpec("P")
T = TypeVar("T")

ModelLike: TypeAlias = onnx.ModelProto | bytes | str | os.PathLike[str]
"""A model, its serialized bytes, or the path of its file."""

_KINDS = (onnx.ModelProto, bytes, str, os.PathLike)

_PART = 2**24  # the number of bytes to read from a pipe at a time
_PATIENCE = 5.0  # seconds, for another process to open a pipe


def load(
    model: ModelLike, is_built: Callable[[onnx.ModelProto], bool] | None = None
) -> tuple[onnx.ModelProto, Path | None]:
    """Reads a model.

    Args:
        model: A model, its bytes or its path. External data are not loaded.
        is_built: Whether a ModelProto is one that ortops has just written, see `validate`.

    Returns:
        The model, which is the argument itself if it is a ModelProto, and the folder of its file,
        if there is one, or if the model was made from a file in this process.

    Raises:
        ModelError: If it is not an ONNX model, or exceeds `ortops.graph.limits`.
    """
    if isinstance(model, onnx.ModelProto):
        folder = remembered(model)
        validate(model, folder, is_built=is_built is not None and is_built(model))
        return model, folder
    path = None
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        what, data = f"file '{path}'", readable(path, _whole)
    elif isinstance(model, bytes | bytearray | memoryview):
        what, data = f"{len(model)} bytes", bytes(model)
    else:
        raise ModelError(
            f"model must be a ModelProto, bytes, or a path, got a {type(model).__name__}"
        )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except UnicodeDecodeError as error:  # raised by protobuf's pure Python version
        raise ModelError(f"{what}: a name is not UTF-8 ({error}); write the file again") from error
    except google.protobuf.message.DecodeError as error:
        raise ModelError(f"{what}: not an ONNX model ({error}); pass a .onnx file") from error
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError(f"{what}: not an ONNX model (it has no graph); pass a .onnx file")
    folder = remembered(proto) if path is None else folder_of(path, proto)
    validate(proto, folder)
    return proto, folder


def folder_of(path: Path, proto: onnx.ModelProto) -> Path:
    """Returns the folder of a model's external data.

    If the model's file is a link, this is the folder of the file that it leads to; but that of the
    link if only this one has the data, as in the cache of Hugging Face.
    """
    folder = path.resolve().parent
    entries = (entry for tensor in proto.graph.initializer for entry in tensor.external_data)
    for entry in entries if path.is_symlink() else ():
        if entry.key == "location" and not os.path.lexists(folder / entry.value):
            return path.parent if os.path.lexists(path.parent / entry.value) else folder
    return folder


def readable(path: Path, read: Callable[[Path], T], advice: str = "pass the path of a model") -> T:
    """Reads a file.

    Args:
        path: The file.
        read: Reads it.
        advice: What messages suggest.

    Raises:
        ModelError: If it cannot be read.
    """
    try:
        return read(path)
    except OSError as error:
        raise ModelError(f"file '{path}': {error.strerror}; {remedy(error, advice)}") from error


def _whole(path: Path) -> bytes:
    """Returns the bytes of a file or pipe.

    Raises:
        ModelError: If it is a device, or larger than any model.
        OSError: If it cannot be read.
    """
    found = path.stat()
    if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
        raise ModelError(f"file '{path}' is a device; pass a regular file or a pipe")
    content = b""
    if found.st_size <= MOST_BYTES:
        is_regular = stat.S_ISREG(found.st_mode)
        content = read_regular(path) if is_regular else _piped(path)
    if max(found.st_size, len(content)) > MOST_BYTES:
        raise ModelError(
            f"file '{path}' exceeds 2 GB, the limit of an ONNX file; store its tensors as external "
            "data, as ortops.save_model does"
        )
    return content


def _piped(path: Path) -> bytes:
    """Returns the bytes of a pipe, which may be endless: at most a part more than a model has.

    Raises:
        ModelError: If nothing opens it for writing.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # which opens it without a writer
    content, last = bytearray(), time.monotonic() + _PATIENCE
    with open(path, "rb", buffering=0, opener=lambda name, _: os.open(name, flags)) as stream:
        while (part := stream.read(_PART)) == b"" and time.monotonic() < last:
            time.sleep(0.01)
        if part == b"":
            raise ModelError(f"file '{path}' is a pipe into which nothing is written; pass a file")
        os.set_blocking(stream.fileno(), True)  # it has a writer
        while part is None or (part and len(content) <= MOST_BYTES):
            content += part or b""
            part = stream.read(_PART)
    return bytes(content)


def read_again(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of a model so that it reads the next one if a save replaces its file.

    Saves keep the external data of one older generation. If there are two between the reading of a
    model and that of its data, these are missing, and the file has another model.

    Args:
        function: A function or method whose first argument is a model, and which may be called
            again.

    Returns:
        The decorated function.
    """

    @functools.wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            before = _generations(args, kwargs)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                replaced = before != _generations(args, kwargs)
                if not replaced or not _MISSING.search(f"{error} {error.__cause__}"):
                    raise

    return decorated


_MISSING = re.compile("no such file|cannot find the file|does not exist", re.IGNORECASE)


def _generations(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Identifies the files of the models that `blame_model` finds among arguments."""
    given = (*args[:2], kwargs.get("model"), kwargs.get("path_or_bytes"))
    found = []
    for path in given:
        if isinstance(path, str | os.PathLike):
            with contextlib.suppress(OSError, ValueError):
                status = Path(path).stat()
                found.append((status.st_ino, status.st_mtime_ns))
    return found


def blame_model(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function so that it raises ModelError if it fails because of an invalid model.

    A model that violates the standard can cause any exception. After an unexpected exception, the
    model is checked with onnx's checker. If the model is valid, the exception is raised unchanged,
    because it is a bug in ortops.

    Args:
        function: A function or method whose first argument is a model.

    Returns:
        The decorated function.
    """
    signature = inspect.signature(function)
    attempt = read_again(function)

    @functools.wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return attempt(*args, **kwargs)
        except (OrtopsError, OSError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, TypeError) and not _fits(signature, args, kwargs):
                raise
            given: list[Any] = [*args[:2], kwargs.get("model"), kwargs.get("path_or_bytes")]
            # A light model is a tuple of its message and its data.
            given = [each[0] if isinstance(each, tuple) and each else each for each in given]
            models = [each for each in given if isinstance(each, _KINDS)]
            if any(isinstance(each, str | os.PathLike) and not is_file(each) for each in models):
                cause = str(error.__cause__ or error).strip().partition("\n")[0]
                raise ModelError(
                    f"model: {cause!s:.200}; it was read from a pipe and cannot be read again; "
                    "write it to a file and check it with onnx.checker.check_model"
                ) from error
            fault = next((_fault(load(model)[0]) for model in models), None)
            if fault is None:
                raise
            raise ModelError(f"model: {fault}; check it with onnx.checker.check_model") from error

    return decorated


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function can be called with these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a regular file, which can be read more than once."""
    return Path(path).is_file()


def _fault(proto: onnx.ModelProto) -> str | None:
    """Returns the error of onnx's checker for a model or one of its algorithms, or None."""
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
        _move_to_onnxruntime(candidate)
        for value in [each for each in graph.output if not _has_rank(each)]:
            graph.output.remove(value)  # a rank is required by the checker only
        try:
            onnx.checker.check_model(candidate, full_check=True)
            if candidate.functions:  # what a call gives is checked where it arrives
                inlined = onnx.inliner.inline_local_functions(candidate)
                onnx.checker.check_model(inlined, full_check=True)
        except Exception as error:  # any exception of the checker means an invalid model
            return " ".join(str(error).split())
    return None


ONLY_ONNXRUNTIMES = frozenset(
    {"Affine", "Crop", "DynamicSlice", "GivenTensorFill", "ImageScaler", "ParametricSoftplus"}
    | {"Scale", "ScaledTanh", "SimplifiedLayerNormalization"}
)
"""Operators that onnxruntime has in the standard domain, and the standard has not."""


def _move_to_onnxruntime(model: onnx.ModelProto) -> None:
    """Moves operators that only onnxruntime has in the standard domain to com.microsoft, in place.

    onnx's checker would take them for a fault. It skips domains that it does not know.
    """
    for node in model.graph.node:
        if not node.domain and node.op_type in ONLY_ONNXRUNTIMES:
            node.domain = MICROSOFT
    if MICROSOFT not in {entry.domain for entry in model.opset_import}:
        model.opset_import.add(domain=MICROSOFT, version=1)


def _has_rank(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return bool(kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.HasField("shape"))
