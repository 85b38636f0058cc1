"""Reads checkpoints: dicts of arrays or torch tensors, safetensors, npz, and files of torch."""

from __future__ import annotations

import importlib
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops._common.optional import optional_module
from ortops.errors import ArgumentError, FeedError, ModelError, OrtopsError
from ortops.graph.files.archive import read_arrays
from ortops.graph.files.atomic import remedy
from ortops.graph.files.json_fields import TEXT, check_fields, object_of
from ortops.graph.files.json_text import read_settings
from ortops.graph.files.opening import file_in_folder, open_regular
from ortops.graph.limits import LIMITS
from ortops.graph.safetensors import map_safetensors

Checkpoint: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str]"
"""A dict of arrays or torch tensors by name, or the path of a file."""

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".safetensors.index.json"
_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The keys under which training scripts store the weights, next to other state."""

_REMEDY = "pass the path of a checkpoint"
_BFLOAT16 = ir.DataType.BFLOAT16.numpy()


class Tensors(dict[str, Array]):
    """The tensors of a checkpoint by name.

    Attributes:
        unreadable: Why those that numpy cannot have are not there, by name.
    """

    def __init__(self, arrays: Mapping[str, Array] | None = None) -> None:
        super().__init__(arrays or {})
        self.unreadable: dict[str, str] = {}

    def refuse(self, name: str) -> None:
        """Raises a ModelError if a tensor that is wanted cannot be read."""
        if name in self.unreadable:
            raise ModelError(
                f"checkpoint: '{name}' cannot be read ({self.unreadable[name]:.200}); save it as a "
                "dense tensor of numbers"
            )


def read_checkpoint(source: Checkpoint, what: str = "checkpoint") -> Tensors:
    """Returns the tensors of a checkpoint by name.

    Args:
        source: A dict of arrays or of torch tensors, or the path of a file: ``.safetensors`` (which
            is mapped into memory), ``.safetensors.index.json``, ``.npz``, or one that torch.save
            wrote.
        what: What messages call it.

    Raises:
        ArgumentError: If it is something else.
        ModelError: If the file cannot be read.
        OrtopsError: If it is a file of torch, and torch is not installed.
    """
    if isinstance(source, Mapping):
        return _tensors(source, what)
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError(
            f"{what} must be a dict of arrays or the path of a file, got {source!r:.80}"
        )
    path = Path(source)
    try:
        if path.name.endswith(_INDEX):
            return _sharded(path)
        if path.suffix == ".safetensors":
            return _mapped([path])
        if path.suffix == ".npz":
            with open_regular(path, error=ModelError, what="file", remedy=_REMEDY) as stream:
                return Tensors(read_arrays(stream, f"file '{path}'"))
        if path.suffix in _TORCH:
            return _of_torch(path)
    except OSError as error:
        words = remedy(error, "pass the path of a checkpoint")
        raise ModelError(f"file '{path}': {error.strerror or error}; {words}") from error
    except FeedError as error:
        raise ModelError(str(error)) from error
    except (ValueError, EOFError, KeyError) as error:
        if isinstance(error, OrtopsError):
            raise
        raise ModelError(f"file '{path}': not a checkpoint ({error!s:.200})") from error
    raise ArgumentError(
        f"{what}: the name of the file must end in .safetensors, {_INDEX}, .npz or "
        f"{', '.join(_TORCH)}, got '{path}'"
    )


def _mapped(paths: Iterable[Path]) -> Tensors:
    """Reads files of safetensors."""
    found = Tensors()
    for path in paths:
        found |= map_safetensors(path, found.unreadable)
    return found


def _sharded(path: Path) -> Tensors:
    """Reads the files of a checkpoint that transformers split."""
    index = read_settings(path)
    check_fields(f"file '{path}'", index, {"weight_map": object_of("names of files", TEXT.fits)})
    where = f"file '{path}': 'weight_map'"
    names = dict.fromkeys(index["weight_map"].values())
    return _mapped([file_in_folder(path.parent, name, what=where) for name in names])


def _of_torch(path: Path) -> Tensors:
    instead = "convert the file to .safetensors"
    torch = optional_module(f"file '{path}'", "torch", "torch", instead=instead)
    try:
        with open_regular(path, error=ModelError, what="file", remedy=_REMEDY) as stream:
            _check_unpacked(path, stream)
            found = torch.load(stream, map_location="cpu", weights_only=True)
    except (OrtopsError, OSError, MemoryError):
        raise
    except Exception as error:  # its unpickler passes on whatever wrong data raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"file '{path}': torch.load(weights_only=True) refuses it ({reason:.200}); save its "
            "state_dict() alone"
        ) from error
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not any(map(torch.is_tensor, found.values())):
        raise ModelError(f"file '{path}': it has no dict of tensors; save a state_dict()")
    named = {n: v for n, v in found.items() if isinstance(n, str) and torch.is_tensor(v)}
    return _tensors(named, f"file '{path}'")


def _check_unpacked(path: Path, stream: BinaryIO) -> None:
    """Refuses an archive that unpacks to more than it is: torch.save does not compress."""
    if zipfile.is_zipfile(stream):
        size = sum(entry.file_size for entry in zipfile.ZipFile(stream).infolist())
        if size > os.fstat(stream.fileno()).st_size:
            raise ModelError(
                f"file '{path}': it unpacks to {size / 1e9:.3f} GB, more than it has; save it again"
            )
    stream.seek(0)


def _tensors(source: Mapping[Any, Any], what: str) -> Tensors:
    """Returns arrays, and tensors of torch as arrays, which share their memory on the CPU."""
    found = Tensors()
    for name, value in source.items():
        if not isinstance(name, str):
            raise ArgumentError(f"{what}: names must be strings, got {name!r:.80}")
        if hasattr(value, "detach"):
            try:
                found[name] = _of_tensor(value)
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                found.unreadable[name] = str(error).partition("\n")[0]
            continue
        array = found[name] = np.asarray(value)
        if not _is_number(array):
            raise ArgumentError(
                f"{what}: '{name}' must be an array of numbers, got an array of {array.dtype}"
            )
    return found


def _of_tensor(tensor: Any) -> Array:
    """Returns a tensor of torch as an array; raises what torch raises if there is none."""
    torch: Any = importlib.import_module("torch")
    tensor = tensor.detach().cpu()
    size, held = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    if size > max(held, LIMITS.initialization_bytes):  # expanded: computing with it takes as much
        raise ValueError(f"it takes {size / 1e9:.1f} GB, of which {held} bytes are there")
    if tensor.dtype == torch.bfloat16:  # which numpy lacks
        found: Array = tensor.view(torch.int16).numpy().view(_BFLOAT16)
    else:
        found = tensor.numpy()
    if not _is_number(found):
        raise TypeError(f"its numbers are {found.dtype}")
    return found


def _is_number(array: Array) -> bool:
    return array.dtype.kind in "fiub" or array.dtype == _BFLOAT16
