"""Copies values between checkpoints and models."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx

from ortops._common.numbers import Array
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph import convert
from ortops.graph.files import external
from ortops.graph.files.loading import ModelLike
from ortops.graph.safetensors import write_safetensors
from ortops.graph.weights import Weight, weights
from ortops.weights.checkpoints import Checkpoint, Tensors, read_checkpoint
from ortops.weights.layouts import cast
from ortops.weights.matching import find_names, inverse
from ortops.weights.names import Names, NamesLike, Place, stored
from ortops.weights.readers import read_model, read_weights

logger = logging.getLogger("ortops")


def load(model: ModelLike, source: Checkpoint, names: NamesLike | None = None) -> onnx.ModelProto:
    """Returns a model with the values of a checkpoint.

    Numbers are converted to the model's dtypes.

    Args:
        model: A ModelProto, its bytes, or its path, without training_info; not changed.
        source: A dict of arrays or torch tensors by name, or the path of a ``.safetensors``,
            ``.safetensors.index.json``, ``.npz`` or torch file.
        names: The result of `ortops.weights.match`, or a dict from the checkpoint's names to the
            model's. By default, the map in the model's metadata; if there is none, the model is
            matched with ``source``.

    Returns:
        A new model, with the map in its metadata.

    Raises:
        ModelError: If a shape differs, the checkpoint lacks a tensor of the map, tensors that share
            a weight of the model differ, nothing was matched, or the model has training_info.

    Example:
        >>> import numpy as np
        >>> from ortops.docs import examples
        >>> model = examples.mlp((4, 16, 2))
        >>> loaded = load(model, {"fc1.bias": np.ones(16)})
        >>> tensors = {tensor.name: tensor for tensor in loaded.graph.initializer}
        >>> float(onnx.numpy_helper.to_array(tensors["fc1.bias"]).sum())
        16.0
    """
    light = convert.load_light(model)
    if light.proto.training_info:
        raise ModelError(
            "model: it has training_info, and its optimizer's state would no longer fit; load the "
            "weights before build_training_model"
        )
    arrays = read_checkpoint(source, "source")
    chosen = _names(light, arrays, names)
    missing = [name for name in chosen if name not in arrays]
    for name in missing:
        arrays.refuse(name)
    values = _Values(weights(light))
    for name, places in chosen.items():
        for place in places if name in arrays else ():
            values.put(name, place, arrays[name])
    lost = [n for n in missing if any(not values.has(place) for place in chosen[n])]
    if lost:
        raise ModelError(
            f"source: it has no '{lost[0]}'{_and_more(lost)}, which the map has; "
            f"{did_you_mean(lost[0], arrays)}"
        )
    _warn("source: not in the model and left out", _floats(arrays, chosen))
    values.write()
    chosen.write(light.proto)
    return light.attach()


def save(
    model: ModelLike,
    path: str | os.PathLike[str],
    like: Checkpoint | None = None,
    names: NamesLike | None = None,
) -> None:
    """Writes the weights of a model to a ``.safetensors`` file, which is replaced atomically.

    Args:
        model: A ModelProto, its bytes, or its path; also a trainable one.
        path: The file.
        like: A checkpoint (see `load`) whose names, layouts and dtypes to use, such as that of the
            network in torch. Its tensors that are not in the model are copied unchanged. By
            default, the names and layouts of the model.
        names: The result of `ortops.weights.match`, or a dict from the checkpoint's names to the
            model's. By default, the map in the model's metadata; if there is none, the model is
            matched with ``like``, which finds renamed weights only if their values have not
            changed.

    Raises:
        ArgumentError: If the file's name does not end in ``.safetensors``.
        ModelError: If a shape differs, copies of a tensor in the model differ, or nothing was
            matched.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> like = {"fc1.weight": np.zeros((16, 4), np.float16)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(examples.mlp((4, 16, 2)), f"{folder}/mlp.safetensors")
        ...     sorted(read_checkpoint(f"{folder}/mlp.safetensors"))
        ['fc1.bias', 'fc1.weight', 'fc2.bias', 'fc2.weight']
    """
    if Path(path).suffix != ".safetensors":
        raise ArgumentError(f"path must end in .safetensors, got '{os.fspath(path)}'")
    light = convert.load_light(model)
    if light.proto.training_info:
        model = TrainingSession(model).inference_model()
    light, reads = read_model(model)
    if like is None:
        if names is not None:
            raise ArgumentError("names: they are those of a checkpoint; give it as like=")
        found = {name: read.array() for name, read in reads.items() if read.is_weight}
        write_safetensors(path, found)
        return
    arrays = read_checkpoint(like, "like")
    for name in arrays.unreadable:  # all of them are to be in the file
        arrays.refuse(name)
    chosen = _names(light, arrays, names)
    known = weights(light)
    for name in chosen:
        if name not in arrays:
            raise ModelError(f"like: it has no '{name}'; {did_you_mean(name, arrays)}")
    result = dict(arrays)
    for name, places in chosen.items():
        result[name] = _gathered(name, places, known, arrays[name])
    _refuse_untied(arrays, result)
    placed = {place.weight for places in chosen.values() for place in places}
    _warn(
        "weights of the model that the checkpoint has no place for are not saved",
        [n for n, read in reads.items() if read.is_weight and n not in placed],
    )
    write_safetensors(path, result, {"format": "pt"})


def _names(light: external.LightModel, arrays: Tensors, names: NamesLike | None) -> Names:
    """Returns the map: the given one, that of the metadata, or the result of matching."""
    if names is not None:
        return Names.of(names)
    found = stored(light.proto)
    if found is None:
        found = find_names(read_weights(light), arrays)
    if not found:
        raise ModelError(
            "model: none of its weights matches a tensor of the checkpoint; give names="
        )
    return found


def _gathered(
    name: str, places: Iterable[Place], known: Mapping[str, Weight], like: Array
) -> Array:
    """Returns a tensor of a checkpoint with the values of its places."""
    wanted: Array = np.empty(like.shape, like.dtype)
    filled: list[tuple[Place, Array]] = []
    for place in places:
        _check_layout(name, place, like)
        target = place.laid_out(wanted)
        part = place.in_weight(_weight(place, known).array())
        what = f"'{name}': the values of weight '{place}'"
        values = cast(part, like.dtype, target.shape, what)
        for other, before in filled:
            if other.of == place.of and not np.array_equal(before, _back(values, place)):
                raise ModelError(
                    f"'{name}': weights '{other}' and '{place}' of the model are copies of it, but "
                    "differ now; freeze both of them, as the checkpoint can hold only one"
                )
        target[...] = values
        filled.append((place, _back(values, place)))
    if not any(place.of is None for place, _ in filled):
        _refuse_gaps(name, [place for place, _ in filled], like)
    return wanted


def _refuse_untied(arrays: Mapping[str, Array], result: Mapping[str, Array]) -> None:
    """Rejects tensors of a checkpoint that share their memory if their new values differ."""
    first: dict[object, str] = {}
    for name, array in arrays.items():
        memory = (array.ctypes.data, array.dtype, array.shape, array.strides)
        other = first.setdefault(memory, name)
        if array.size and not np.array_equal(result[other], result[name]):
            raise ModelError(
                f"'{other}' and '{name}' are tied in the checkpoint, but the model's weights for "
                "them differ now; freeze both of them"
            )


def _back(values: Array, place: Place) -> Array:
    """Returns values in the checkpoint's order of axes."""
    if not place.order:
        return values
    return values.transpose(inverse(place.order))


def _check_layout(name: str, place: Place, array: Array) -> None:
    """Rejects a tensor of a checkpoint that a place was not made for."""
    if len(place.order) not in (0, array.ndim):
        raise ModelError(
            f"'{name}' must have {len(place.order)} axes, got the shape {list(array.shape)}"
        )
    part = place.of
    if part is not None and (part.axis >= array.ndim or part.stop > array.shape[part.axis]):
        raise ModelError(f"'{name}' has the shape {list(array.shape)}, which has no part {part}")


def _refuse_gaps(name: str, places: Iterable[Place], like: Array) -> None:
    parts = [place.of for place in places if place.of is not None]
    covered = {index for part in parts for index in range(part.start, part.stop)}
    if len({part.axis for part in parts}) != 1 or len(covered) < like.shape[parts[0].axis]:
        raise ModelError(f"'{name}': its places do not cover it; match the checkpoint again")


def _weight(place: Place, known: Mapping[str, Weight]) -> Weight:
    if place.weight not in known:
        raise ModelError(
            f"names: the model has no weight '{place.weight}'; {did_you_mean(place.weight, known)}"
        )
    weight = known[place.weight]
    part = place.part
    if part is not None and (part.axis >= len(weight.shape) or part.stop > weight.shape[part.axis]):
        raise ModelError(
            f"names: weight '{place.weight}' has the shape {list(weight.shape)}, which has no part "
            f"{part}; match the checkpoint again"
        )
    return weight


class _Values:
    """New values of weights."""

    def __init__(self, known: Mapping[str, Weight]) -> None:
        self._known = known
        self._arrays: dict[str, Array] = {}
        self._from: dict[Place, str] = {}

    def has(self, place: Place) -> bool:
        """Whether a place was given values."""
        return any((p.weight, p.part) == (place.weight, place.part) for p in self._from)

    def put(self, name: str, place: Place, array: Array) -> None:
        """Puts a tensor of the checkpoint in its place."""
        weight = _weight(place, self._known)
        if weight.name not in self._arrays:
            self._arrays[weight.name] = np.array(weight.array(), order="C")
        target = place.in_weight(self._arrays[weight.name])
        _check_layout(name, place, array)
        what = f"'{name}' for weight '{place}' of the model"
        values = cast(place.laid_out(array), weight.dtype, target.shape, what)
        for other, first in self._from.items():
            is_shared = (other.weight, other.part) == (place.weight, place.part)
            if is_shared and not np.array_equal(target, values):
                raise ModelError(
                    f"'{first}' and '{name}' share weight '{place}' of the model, but differ; "
                    "export the network again with these values, so that each has its own"
                )
        target[...] = values
        self._from[place] = name

    def write(self) -> None:
        """Writes the values into the model."""
        for name, array in self._arrays.items():
            self._known[name].set(array)


def _floats(arrays: Mapping[str, Array], but: Iterable[str]) -> list[str]:
    left = arrays.keys() - set(but)
    return [name for name in arrays if name in left and arrays[name].dtype.kind not in "iub"]


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _warn(what: str, names: list[str]) -> None:
    if names:
        shown = ", ".join(f"'{name}'" for name in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        logger.warning("%s: %s%s", what, shown, more)
