"""Reads checkpoints: dicts of arrays or torch tensors, safetensors, npz, and files of torch."""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.errors import ArgumentError, FeedError, ModelError, OrtopsError
from ortops.graph.files.archive import read_arrays
from ortops.graph.files.atomic import remedy
from ortops.graph.files.json_fields import TEXT, check_fields, object_of
from ortops.graph.files.json_text import read_settings
from ortops.graph.files.opening import file_in_folder, open_regular
from ortops.graph.safetensors import map_safetensors
from ortops.numbers import Array

__all__ = ["Checkpoint", "read_checkpoint"]

Checkpoint: TypeAlias = "Mapping[str, Any] | str | os.PathLike[str]"
"""A dict of arrays or torch tensors by name, or the path of a file."""

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".safetensors.index.json"
_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""The keys under which training scripts store the weights, next to other state."""

_REMEDY = "pass the path of a checkpoint"
_BFLOAT16 = ir.DataType.BFLOAT16.numpy()


def read_checkpoint(source: Checkpoint, what: str = "checkpoint") -> dict[str, Array]:
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
        return {name: _array(name, value, what) for name, value in source.items()}
    if not isinstance(source, str | os.PathLike):
        raise ArgumentError(
            f"{what} must be a dict of arrays or the path of a file, got {source!r:.80}"
        )
    path = Path(source)
    try:
        if path.name.endswith(_INDEX):
            return _sharded(path)
        if path.suffix == ".safetensors":
            return map_safetensors(path)
        if path.suffix == ".npz":
            with open_regular(path, error=ModelError, what="file", remedy=_REMEDY) as stream:
                return read_arrays(stream, f"file '{path}'")
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


def _sharded(path: Path) -> dict[str, Array]:
    """Reads the files of a checkpoint that transformers split."""
    index = read_settings(path)
    check_fields(f"file '{path}'", index, {"weight_map": object_of("names of files", TEXT.fits)})
    where = f"file '{path}': 'weight_map'"
    names = dict.fromkeys(index["weight_map"].values())
    files = [file_in_folder(path.parent, name, what=where) for name in names]
    found: dict[str, Array] = {}
    for file in files:
        found |= map_safetensors(file)
    return found


def _of_torch(path: Path) -> dict[str, Array]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise OrtopsError(
            f"file '{path}': reading it needs torch (pip install torch); or convert it to "
            ".safetensors"
        ) from error
    try:
        with open_regular(path, error=ModelError, what="file", remedy=_REMEDY) as stream:
            found = torch.load(stream, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ModelError(
            f"file '{path}': torch.load(weights_only=True) refuses it "
            f"({str(error).splitlines()[0]:.200}); save its state_dict() alone"
        ) from error
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not any(map(torch.is_tensor, found.values())):
        raise ModelError(f"file '{path}': it has no dict of tensors; save a state_dict()")
    return {n: _array(n, v, f"file '{path}'") for n, v in found.items() if torch.is_tensor(v)}


def _array(name: object, value: Any, what: str) -> Array:
    """Returns an array, or a tensor of torch as an array, without a copy if possible."""
    if not isinstance(name, str):
        raise ArgumentError(f"{what}: names must be strings, got {name!r:.80}")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # which numpy lacks
            bits = value.contiguous().view(importlib.import_module("torch").int16)
            found: Array = bits.numpy().view(_BFLOAT16)
            return found
        value = value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "fiub" and array.dtype != _BFLOAT16:
        raise ArgumentError(
            f"{what}: '{name}' must be an array of numbers, got an array of {array.dtype}"
        )
    return array
