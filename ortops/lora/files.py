"""Adapters in onnxruntime's files, which `onnxruntime.RunOptions.add_active_adapter` takes."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from ortops.errors import ModelError, did_you_mean
from ortops.graph import convert, external
from ortops.graph.convert import ModelLike
from ortops.graph.files import write_atomically
from ortops.lora.model import Array, check_base, read_adapted

__all__ = ["load_adapter", "save_adapter"]

_ADAPTER_VERSION = 1
_GIVEN_BY_OTHERS = 2**16  # other writers count versions of a model; a digest is never so small

logger = logging.getLogger("ortops")


@convert.blame_model
def save_adapter(model: ModelLike, path: str | os.PathLike[str]) -> None:
    """Writes the adapter of a model as a file of onnxruntime, ``.onnx_adapter``.

    Stock onnxruntime runs the model with it, one of many in turn on one session::

        adapter = onnxruntime.LoraAdapter()
        adapter.Load("french.onnx_adapter")
        options = onnxruntime.RunOptions()
        options.add_active_adapter(adapter)
        session.run(None, feeds, options)

    The file's model version is a digest of the base: of its inputs, outputs and weights.

    Args:
        model: A model with an adapter, trained or not: a ModelProto, its bytes, or its path.
        path: The file. At any time there is the old one or the new one, whole.

    Raises:
        ModelError: If the model has no adapter, or its other weights have changed since it got it.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from models import mlp
        >>> from ortops import lora
        >>> model = lora.add(mlp.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.save_adapter(model, f"{folder}/small.onnx_adapter")
        ...     file = onnxruntime.AdapterFormat.read_adapter(f"{folder}/small.onnx_adapter")
        >>> sorted(file.get_parameters())
        ['fc1.lora_A.weight', 'fc1.lora_B.weight']
    """
    adapted = read_adapted(model)
    check_base(adapted)
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(_ADAPTER_VERSION)
    form.set_model_version(_version(adapted.adapter.fingerprint))
    arrays = {name: np.ascontiguousarray(a) for name, a in adapted.parameters.items()}
    form.set_parameters(  # which share the arrays' memory
        {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in arrays.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "adapter")
        form.export_adapter(str(file))
        write_atomically(path, file.read_bytes())


@convert.blame_model
def load_adapter(model: ModelLike, path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Returns a model whose adapter has the numbers of a file of onnxruntime.

    Args:
        model: A model with an adapter of the same layers and ranks: a ModelProto, its bytes, or its
            path; not changed.
        path: A file that `save_adapter` wrote, or another that has the same names and shapes; of
            one that other tools wrote it is not known for which base, and a message says so.

    Returns:
        A new model. External data stay external, relative to the folder of the given file.

    Raises:
        ModelError: If the file is no adapter, or one of another base, or names or shapes differ;
            or if the model has no adapter, or its other weights have changed since it got it.

    Example:
        >>> import tempfile
        >>> from models import mlp
        >>> from ortops import lora
        >>> model = lora.add(mlp.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.save_adapter(model, f"{folder}/small.onnx_adapter")
        ...     lora.load_adapter(model, f"{folder}/small.onnx_adapter") == model
        True
    """
    adapted = read_adapted(model)
    check_base(adapted)
    given, version = _read(path)
    where = f"file '{os.fspath(path)}'"
    if version < _GIVEN_BY_OTHERS:
        logger.warning(
            "%s does not say which base it is for (its model version is %d); names and shapes fit",
            where,
            version,
        )
    elif version != _version(adapted.adapter.fingerprint):
        raise ModelError(
            f"{where}: it is an adapter of another base, whose inputs, outputs or weights differ; "
            "give the model that it was trained with"
        )
    known = adapted.parameters
    for name in given.keys() - known.keys():
        raise ModelError(
            f"{where}: the model's adapter has no '{name}'; {did_you_mean(name, known)}"
        )
    for name, array in known.items():
        if name not in given:
            raise ModelError(
                f"{where}: it has no '{name}', which the model's adapter has; add the adapter to "
                "the same targets"
            )
        found = given[name]
        if (found.dtype, found.shape) != (array.dtype, array.shape):
            raise ModelError(
                f"{where}: its '{name}' is {found.dtype}{list(found.shape)}, and the model's "
                f"{array.dtype}{list(array.shape)}; add the adapter with the same rank"
            )
    proto, _ = convert.load(model)
    light, data = external.detach(proto)
    for tensor in light.graph.initializer:
        if tensor.name in given:
            tensor.CopyFrom(onnx.numpy_helper.from_array(given[tensor.name], tensor.name))
    return external.attach(light, data)


def _version(fingerprint: str) -> int:
    """Returns the base's digest as a version: a positive int32 that no count reaches."""
    return _GIVEN_BY_OTHERS + int(fingerprint, 16) % (2**31 - _GIVEN_BY_OTHERS)


def _read(path: str | os.PathLike[str]) -> tuple[Mapping[str, Array], int]:
    """Returns the tensors of an adapter file, and its model version."""
    file = Path(path)
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise ModelError(f"file '{file}': {error.strerror}; give the path of an adapter") from error
    try:
        form = onnxruntime.AdapterFormat.read_adapter(str(file))
        arrays = {name: value.numpy().copy() for name, value in form.get_parameters().items()}
    except Exception as error:  # onnxruntime has no common class for what it finds wrong
        raise ModelError(
            f"file '{file}': not an adapter of onnxruntime ({error}); give one that "
            "ortops.lora.save_adapter wrote"
        ) from error
    return arrays, form.get_model_version()
