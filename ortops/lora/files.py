"""Saves and loads adapters in onnxruntime's format, for `RunOptions.add_active_adapter`."""

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
from ortops.graph import convert
from ortops.graph.files import external, loading
from ortops.graph.files.atomic import write_atomically
from ortops.graph.files.external import LightModel
from ortops.graph.files.folders import remember
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.opening import read_regular
from ortops.lora.adapter_file import read_adapter_file
from ortops.lora.evaluation import all_norms
from ortops.lora.fingerprints import family
from ortops.lora.model import Adapted, Array, check_base, read_adapted, refuse_not_finite

_ADAPTER_VERSION = 1
_GIVEN_BY_OTHERS = 2**16  # other tools number their model versions; a digest is never this small

logger = logging.getLogger("ortops")


@loading.blame_model
def save_adapter(model: ModelLike, path: str | os.PathLike[str]) -> None:
    """Writes the adapter of a model to an ``.onnx_adapter`` file of onnxruntime.

    Stock onnxruntime applies it per run, so one session can serve many adapters::

        adapter = onnxruntime.LoraAdapter()
        adapter.Load("french.onnx_adapter")
        options = onnxruntime.RunOptions()
        options.add_active_adapter(adapter)
        session.run(None, feeds, options)

    The model version in the file is a digest of the base's nodes, inputs, outputs and weights, and
    the adapter version one of the weights that stay when the base is quantized.

    Args:
        model: A model with an adapter, trained or not: a ModelProto, its bytes, or its path.
        path: The file. It is replaced atomically.

    Raises:
        ModelError: If the model has no adapter, its base has changed since the adapter was added,
            or the adapter's values are not finite.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> from ortops import lora
        >>> model = lora.add(examples.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.save_adapter(model, f"{folder}/small.onnx_adapter")
        ...     file = onnxruntime.AdapterFormat.read_adapter(f"{folder}/small.onnx_adapter")
        >>> sorted(file.get_parameters())
        ['fc1.lora_A.weight', 'fc1.lora_B.weight']
    """
    write_atomically(path, written_adapter(convert.load_light(model)))


def written_adapter(model: LightModel) -> bytes:
    """Returns the adapter of a light model as a file; see `save_adapter`."""
    adapted = read_adapted(model)
    fingerprint = check_base(adapted)
    refuse_not_finite(adapted.parameters, "model")
    form = onnxruntime.AdapterFormat()
    kin = family(adapted.model)
    form.set_adapter_version(_version(kin) if kin else _ADAPTER_VERSION)
    form.set_model_version(_version(fingerprint))
    arrays = {name: np.ascontiguousarray(a) for name, a in _served(adapted).items()}
    form.set_parameters(  # which share the arrays' memory
        {name: onnxruntime.OrtValue.ortvalue_from_numpy(a) for name, a in arrays.items()}
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "adapter")
        form.export_adapter(str(file))
        return read_regular(file)


def _served(adapted: Adapted) -> dict[str, Array]:
    """Returns what a file of the adapter holds: A, B, whole weights, and the scales of DoRA."""
    known, modules = adapted.parameters, adapted.adapter.modules.values()
    result = {name: known[name] for name in adapted.adapter.matrices}
    result |= {name: known[name] for name in adapted.adapter.weights}
    given = {m.scale: known[m.scale] for m in modules if m.dora and m.scale in known}
    if not given:
        found = all_norms(adapted, known)
        given = {m.scale: known[m.magnitude] / found[m.scale] for m in modules if m.dora}
    return result | given


@loading.blame_model
def load_adapter(model: ModelLike, path: str | os.PathLike[str]) -> onnx.ModelProto:
    """Returns a model whose adapter has the values of an ``.onnx_adapter`` file of onnxruntime.

    Args:
        model: A model with an adapter of the same layers and ranks: a ModelProto, its bytes, or its
            path; not changed.
        path: A file written by `save_adapter`, or by another tool with the same names and shapes.
            Files of other tools do not identify their base; a warning is logged. An adapter of the
            float model fits its quantized file and vice versa, if their layers have the same
            modules and shapes and their normalizations the same weights.

    Returns:
        A new model. External data stay external, relative to the folder of the given file.

    Raises:
        ModelError: If the file is not an adapter, belongs to another base, has other names or
            shapes, or has values that are not finite; or if the model has no adapter, or its base
            has changed since the adapter was added.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> from ortops import lora
        >>> model = lora.add(examples.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.save_adapter(model, f"{folder}/small.onnx_adapter")
        ...     lora.load_adapter(model, f"{folder}/small.onnx_adapter") == model
        True
    """
    values = _checked(read_adapted(model), path)
    proto, folder = loading.load(model)
    result = _filled(external.detach(proto), values).attach()
    remember(result, folder)
    return result


def with_adapter(model: LightModel, path: str | os.PathLike[str]) -> LightModel:
    """Returns a light model whose adapter has the values of a file; see `load_adapter`."""
    return _filled(model.copy(), _checked(read_adapted(model), path))


def _filled(model: LightModel, values: Mapping[str, Array]) -> LightModel:
    """Sets initializers, in place, and returns the model."""
    for tensor in model.proto.graph.initializer:
        if tensor.name in values:
            tensor.CopyFrom(onnx.numpy_helper.from_array(values[tensor.name], tensor.name))
    return model


def _checked(adapted: Adapted, path: str | os.PathLike[str]) -> Mapping[str, Array]:
    """Reads the values of a model's adapter from a file, which must fit; see `load_adapter`."""
    fingerprint = check_base(adapted)
    given, version, kin = read_adapter_file(Path(path))
    where = f"file '{os.fspath(path)}'"
    if version < _GIVEN_BY_OTHERS:
        logger.warning(
            "%s does not identify its base (its model version is %d); its names and shapes match",
            where,
            version,
        )
    elif version != _version(fingerprint):
        _check_other(adapted, version, kin, where)
    known = _served(adapted)
    for name in given.keys() - known.keys():
        raise ModelError(
            f"{where}: the model's adapter has no '{name:.200}'; {did_you_mean(name, known)}"
        )
    for name, array in known.items():
        if name not in given:
            raise ModelError(
                f"{where}: '{name}' of the model's adapter is missing; add the adapter to the same "
                "targets"
            )
        found = given[name]
        if (found.dtype, found.shape) != (array.dtype, array.shape):
            raise ModelError(
                f"{where}: '{name}' must be {array.dtype}{list(array.shape)} as in the model, got "
                f"{found.dtype}{list(found.shape)}; add the adapter with the same rank"
            )
    refuse_not_finite(given, where)
    norms = all_norms(adapted, given)
    modules = [module for module in adapted.adapter.modules.values() if module.dora]
    return {**given, **{m.magnitude: given[m.scale] * norms[m.scale] for m in modules}}


def _check_other(adapted: Adapted, version: int, kin: int, where: str) -> None:
    """Rejects an adapter of another base, except one of the same model in another precision."""
    found = family(adapted.model)
    if found and kin == _version(found):
        logger.warning(
            "%s was trained on another file of this model, such as one of another precision; its "
            "layers and shapes match, and the normalizations have the same weights",
            where,
        )
    else:
        raise ModelError(
            f"{where}: the adapter belongs to another base, with other nodes, inputs, outputs "
            "or weights; give the model that it was trained with"
        )


def _version(fingerprint: str) -> int:
    """Returns the base's digest as a positive int32 above the versions of other tools."""
    return _GIVEN_BY_OTHERS + int(fingerprint.rpartition(":")[2], 16) % (2**31 - _GIVEN_BY_OTHERS)
