"""Finds the weights of a model that hold the tensors of a checkpoint."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ortops._common.numbers import Array
from ortops.errors import UnsupportedError
from ortops.graph.files.loading import ModelLike
from ortops.weights.checkpoints import Checkpoint, Tensors, read_checkpoint
from ortops.weights.layouts import (
    is_computed,
    is_informative,
    orders,
    same,
    scaled_channels,
    squeezed,
)
from ortops.weights.names import Names, Part, Place
from ortops.weights.readers import Read, read_model

logger = logging.getLogger("ortops")

_UNFOLDED = (
    "export with training=torch.onnx.TrainingMode.TRAINING and do_constant_folding=False "
    "(dynamo=False), or with optimize=False (dynamo=True)"
)
_MEAN, _VARIANCE = ".running_mean", ".running_var"


def match(model: ModelLike, checkpoint: Checkpoint) -> Names:
    """Returns where the tensors of a checkpoint are in a model.

    They are matched by name, up to a prefix such as ``model.`` that all names share; then by the
    scopes of torch that exporters keep in nodes; then by value, which needs the checkpoint that the
    model was exported from. By value, tensors are also found if the model transposes them, stores
    them in another dtype, stores several of them as one (such as query, key and value), splits or
    duplicates them.

    Several tensors have the same place if the exporter merged equal tensors, or if they are tied.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        checkpoint: A dict of arrays or torch tensors by name, or the path of a ``.safetensors``,
            ``.safetensors.index.json``, ``.npz`` or torch file.

    Returns:
        The map. Its ``unmatched_checkpoint`` and ``unmatched_model`` list everything else. Store it
        in the model with `Names.attach`, or with `ortops.weights.load`, before training changes the
        values.

    Raises:
        UnsupportedError: If the exporter has folded BatchNormalization into a weight, or computed a
            weight from a tensor, such as 1 + weight in Gemma.
        ModelError: If the model or the checkpoint is invalid.

    Example:
        >>> import numpy as np
        >>> from ortops.docs import examples
        >>> model = examples.mlp((4, 16, 2))
        >>> checkpoint = {"net.fc1.bias": np.zeros(16, np.float32)}
        >>> match(model, checkpoint)["net.fc1.bias"][0].weight
        'fc1.bias'
    """
    _, weights = read_model(model)
    return find_names(weights, read_checkpoint(checkpoint))


def find_names(weights: Mapping[str, Read], arrays: Tensors) -> Names:
    """Returns the map for weights and a checkpoint that were read already."""
    search = _Search(weights, arrays)
    search.by_name()
    search.by_scope()
    search.by_value()
    search.gates()
    search.fused()
    search.split()
    search.copies()
    search.refuse_folded()
    search.refuse_computed()
    return search.result()


class _Search:
    """The weights and tensors that are matched, and those that are left.

    Attributes:
        places: The places found so far, by the checkpoint's name.
        used: The weights that are matched.
    """

    def __init__(self, weights: Mapping[str, Read], arrays: Tensors) -> None:
        self._weights, self._arrays = weights, arrays
        self.places: dict[str, list[Place]] = {}
        self.used: set[str] = set()
        self._why: dict[str, str] = {}
        self._why_model: dict[str, str] = {}
        self._own, self._theirs = _prefixes(weights, [*arrays, *arrays.unreadable])

    # ------------------------------------------------------------------------------------- results

    def _add(self, name: str, place: Place) -> None:
        self.places.setdefault(name, []).append(place)
        self.used.add(place.weight)

    def _left(self) -> dict[str, Array]:
        """Returns the floating-point tensors of the checkpoint without a place."""
        return {n: a for n, a in self._arrays.items() if n not in self.places and _is_float(a)}

    def _left_weights(self) -> dict[str, Read]:
        return {n: w for n, w in self._weights.items() if n not in self.used and w.is_weight}

    def result(self) -> Names:
        unmatched = {
            name: self._why.get(name, "" if _is_float(array) else f"is {array.dtype}")
            for name, array in self._arrays.items()
            if name not in self.places
        } | self._arrays.unreadable
        left = {name: self._why_model.get(name, "") for name in self._left_weights()}
        ordered = {name: tuple(self.places[name]) for name in self._arrays if name in self.places}
        return Names(ordered, unmatched, left)

    # ------------------------------------------------------------------------------------- by name

    def _named(self, key: str) -> str | None:
        """Returns the checkpoint's name for a name or a scope of the model."""
        if self._own and not key.startswith(f"{self._own}."):
            return None
        name = key[len(self._own) + 1 :] if self._own else key
        name = f"{self._theirs}.{name}" if self._theirs else name
        self._arrays.refuse(name)
        return name if name in self._arrays else None

    def by_name(self) -> None:
        for weight, read in self._weights.items():
            name = self._named(weight)
            if name is None or not _is_float(self._arrays[name]):
                continue
            found = orders(self._arrays[name].shape, read.shape)
            if found:
                self._add(name, Place(weight, "name", self._fitting(name, read, found)))
            else:
                shapes = (list(self._arrays[name].shape), list(read.shape))
                self._why[name] = f"its shape is {shapes[0]}, that of '{weight}' is {shapes[1]}"
                self._why_model[weight] = (
                    f"its shape is {shapes[1]}, that of '{name}' is {shapes[0]}"
                )
        self._turn_squares()

    def _turn_squares(self) -> None:
        """Transposes square weights of linear layers as the others are, unless values fit."""
        linear = {
            name: place
            for name, (place,) in self.places.items()
            if self._weights[place.weight].transposed
            and min(self._arrays[name].shape, default=0) > 1
        }
        sizes = {name: self._arrays[name].shape for name in linear}
        known = {place.order for name, place in linear.items() if len(set(sizes[name])) > 1}
        unlike = {
            name: place
            for name, place in linear.items()
            if known != {()} and not place.order and sizes[name] == (sizes[name][0],) * 2
            if not same(self._arrays[name], self._weights[place.weight].array())
        }
        if known == {(1, 0)}:
            self.places |= {n: [replace(place, order=(1, 0))] for n, place in unlike.items()}
        elif unlike:
            logger.warning(
                "nothing tells whether the model has square weights transposed, as those of "
                "PyTorch's Linear; they stay as they are: %s; give names= to transpose them, such "
                "as {'%s': Place('%s', order=(1, 0))}",
                _listed(unlike),
                *next((name, place.weight) for name, place in unlike.items()),
            )

    def _fitting(self, name: str, read: Read, found: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the order of axes that fits the values, or the first one if none does."""
        if len(found) > 1:
            array, own = self._arrays[name], read.array()
            for order in found:
                if same(array.transpose(order) if order else array, own):
                    return order
        return found[0]

    # ------------------------------------------------------------------------------------ by scope

    def by_scope(self) -> None:
        for weight, read in self._weights.items():
            own = {name for name, places in self.places.items() if places[0].weight == weight}
            for keys in read.keys:
                name = next((n for n in map(self._named, keys) if n is not None), None)
                if name is None or name in own or not _is_float(self._arrays[name]):
                    continue
                found = orders(self._arrays[name].shape, read.shape)
                if read.transposed and () in found and (1, 0) in found and weight not in self.used:
                    found.sort(key=lambda order: order != (1, 0))  # Linear's weight, folded
                if not found or (name in self.places and not self._is_copy(name, read, found)):
                    continue
                own.add(name)
                self._add(name, Place(weight, "scope", self._fitting(name, read, found)))

    def _is_copy(self, name: str, read: Read, found: list[tuple[int, ...]]) -> bool:
        """Whether a weight has the values of the one where a tensor was found before."""
        place = self.places[name][0]
        if place.part or place.of or not is_informative(read.array()):
            return False
        first = self._held(place)
        return any(same(first.transpose(o) if o else first, read.array()) for o in found)

    def _held(self, place: Place) -> Array:
        """Returns the values of a weight in the checkpoint's order of axes."""
        array = self._weights[place.weight].array()
        return array.transpose(inverse(place.order)) if place.order else array

    # ------------------------------------------------------------------------------------ by value

    def by_value(self) -> None:
        sizes = _by_size(self._left())
        for weight, read in self._left_weights().items():
            candidates = sizes.get(_size(read.shape), {})
            for name, order in _with_values_of(read, candidates):
                self._add(name, Place(weight, "value", order))
            sizes[_size(read.shape)] = {n: a for n, a in candidates.items() if n not in self.places}

    def copies(self) -> None:
        """Finds further places of tensors that the exporter stores several times."""
        sizes = _by_size({n: a for n, a in self._arrays.items() if n in self.places})
        for weight, read in self._left_weights().items():
            for name, order in _with_values_of(read, sizes.get(_size(read.shape), {})):
                self._add(name, Place(weight, "value", order))
                break

    def gates(self) -> None:
        """Finds the weights of recurrent layers with one direction, whose gates are reordered."""
        for weight, read in self._left_weights().items():
            if not read.gates or len(read.shape) < 2 or read.shape[0] != 1:
                continue
            own, count = read.array()[0], len(read.gates)
            halves = np.split(own, 2) if own.ndim == 1 else [own]  # the biases of W and R
            for half, whole in enumerate(halves):
                size = len(whole) // count
                blocks = np.split(whole, count)
                inverse = sorted(range(count), key=read.gates.__getitem__)
                torch = np.concatenate([blocks[gate] for gate in inverse])
                fitting = (n for n, a in self._left().items() if a.shape == torch.shape)
                name = next((n for n in fitting if same(self._arrays[n], torch)), None)
                if name is None or not is_informative(torch):
                    continue
                for index, gate in enumerate(read.gates):
                    start = (half * count + index) * size
                    part = Part(1, start, start + size)
                    of = Part(0, gate * size, gate * size + size)
                    self._add(name, Place(weight, "value", part=part, of=of))

    def fused(self) -> None:
        """Finds weights that are several tensors in a row."""
        for weight, read in self._left_weights().items():
            own = read.array()
            smaller = {n: a for n, a in self._left().items() if a.size < own.size}
            left = {n: a for n, a in smaller.items() if is_informative(a)}
            for axis in range(own.ndim):
                parts = list(_pieces(own, axis, left))
                if parts:
                    for name, order, part in parts:
                        self._add(name, Place(weight, "value", order, part=part))
                    break

    def split(self) -> None:
        """Finds tensors that are several weights in a row."""
        for name, array in self._left().items():
            left = {
                weight: own
                for weight, read in self._left_weights().items()
                if is_informative(own := read.array())
            }
            for axis in range(array.ndim):
                parts = list(_pieces(array, axis, left))
                if parts:
                    for weight, order, part in parts:
                        self._add(name, Place(weight, "value", inverse(order), of=part))
                    break

    # -------------------------------------------------------------------------------------- folded

    def refuse_folded(self) -> None:
        """Rejects weights that contain a BatchNormalization of the checkpoint."""
        norms = [name.removesuffix(_MEAN) for name in self._arrays if name.endswith(_MEAN)]
        norms = [n for n in norms if n + _MEAN not in self.places and n + _VARIANCE in self._arrays]
        for name, array in self._arrays.items() if norms else ():
            fitting = [
                n for n in norms if array.ndim > 1 and self._arrays[n + _MEAN].size == len(array)
            ]
            if not fitting:
                continue
            module = name.rpartition(".")[0]
            near = [norm for norm in fitting if _parent(norm) == _parent(module)]
            places = self.places.get(name, ())
            for weight in [place.weight for place in places] or self._left_weights():
                read = self._weights[weight]
                if squeezed(read.shape) != squeezed(array.shape):
                    continue
                own = read.array().reshape(array.shape)
                if not same(array, own) and ((places and near) or scaled_channels(array, own)):
                    self._refuse(read, (near or fitting)[0])

    def _refuse(self, read: Read, norm: str) -> None:
        raise UnsupportedError(
            f"{read.nodes[0] if read.nodes else 'model'}: the exporter folded the "
            f"BatchNormalization '{norm}' into weight '{read.weight.name}', so that neither can be "
            f"matched; {_UNFOLDED}"
        )

    def refuse_computed(self) -> None:
        """Rejects weights that the exporter computed from a tensor, such as Gemma's 1 + weight.

        That shows in the checkpoint that the model was exported from. With another one, a name of
        the exporter for a weight that it need not have transposed is a reason for a warning.
        """
        pairs = [
            (name, place, held)
            for name, places in self.places.items()
            for place in places
            if place.by in ("name", "scope")
            and squeezed((held := self._held(place)).shape) == squeezed(self._arrays[name].shape)
        ]
        is_source = any(place.by == "value" for each in self.places.values() for place in each)
        is_source = is_source or any(
            is_informative(held) and same(self._arrays[name], held) for name, _, held in pairs
        )
        doubtful: list[str] = []
        for name, place, held in pairs:
            array = self._arrays[name]
            if is_source and is_computed(array, held):
                raise UnsupportedError(
                    f"weight '{place.weight}': the exporter computed it from '{name}' (a factor or "
                    f"a summand, such as Gemma's 1 + weight), so it cannot be matched; {_UNFOLDED}"
                )
            is_renamed = place.by == "scope" and self._named(place.weight) is None
            if is_renamed and not place.order and array.dtype == held.dtype:
                doubtful += [] if array.shape != held.shape or same(array, held) else [name]
        if doubtful:
            logger.warning(
                "the exporter renamed the weights of %s, perhaps because it computed them (such as "
                "Gemma's 1 + weight), and then they are wrong now; to find out, match the "
                "checkpoint that the model was exported from first (ortops.weights.match)",
                _listed(doubtful),
            )


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or array.dtype.name == "bfloat16"


def _size(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(squeezed(tuple(shape))))


def _by_size(arrays: Mapping[str, Array]) -> dict[tuple[int, ...], dict[str, Array]]:
    found: dict[tuple[int, ...], dict[str, Array]] = {}
    for name, array in arrays.items():
        found.setdefault(_size(array.shape), {})[name] = array
    return found


def _with_values_of(
    read: Read, candidates: Mapping[str, Array]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the tensors with the values of a weight, and the order of their axes in it."""
    own = read.array() if candidates else None
    if own is None or not is_informative(own):
        return
    for name, array in candidates.items():
        order = _order(array, own)
        if order is not None:
            yield name, order


def _order(array: Array, own: Array) -> tuple[int, ...] | None:
    """Returns the order of axes in which a tensor equals a weight; None if there is none."""
    for order in orders(array.shape, own.shape):
        if same(array.transpose(order) if order else array, own):
            return order
    return None


def _listed(names: Iterable[str]) -> str:
    shown = [f"'{name}'" for name in names]
    return ", ".join(shown[:5]) + " …" * (len(shown) > 5)


def inverse(order: Sequence[int]) -> tuple[int, ...]:
    """Returns the order of axes that undoes another one."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _pieces(
    whole: Array, axis: int, arrays: Mapping[str, Array]
) -> Iterator[tuple[str, tuple[int, ...], Part]]:
    """Yields arrays that make up another one along an axis, with their orders and parts."""
    found: list[tuple[str, tuple[int, ...], Part]] = []
    start = 0
    while start < whole.shape[axis]:
        piece = _next_piece(whole, axis, start, arrays, [name for name, _, _ in found])
        if piece is None:
            return
        found.append(piece)
        start = piece[2].stop
    yield from found


def _next_piece(
    whole: Array, axis: int, start: int, arrays: Mapping[str, Array], taken: list[str]
) -> tuple[str, tuple[int, ...], Part] | None:
    for name, array in arrays.items():
        if name in taken or array.ndim != whole.ndim:
            continue
        for order in ((), tuple(reversed(range(array.ndim)))) if array.ndim == 2 else ((),):
            turned = array.transpose(order) if order else array
            part = Part(axis, start, start + turned.shape[axis])
            fits = turned.size < whole.size and turned.shape == part.of(whole).shape
            if fits and same(turned, part.of(whole)):
                return name, order, part
    return None


def _prefixes(weights: Mapping[str, Read], arrays: Sequence[str]) -> tuple[str, str]:
    """Returns the prefixes of all names in the model, and of all in the checkpoint."""
    keys = {key for w in weights.values() for keys in w.keys for key in keys} | weights.keys()
    common = _common_prefix(arrays)
    votes: dict[tuple[str, str], set[str]] = {}  # the tensors that two prefixes match

    def vote(own: str, theirs: str, end: str) -> None:
        prefix = _without_shared_end(own, theirs)
        votes.setdefault(prefix, set()).add(f"{theirs}.{end}" if theirs else end)

    for theirs in dict.fromkeys(("", common)):
        ends = {name[len(theirs) + 1 :] if theirs else name for name in arrays}
        for key in keys:
            for own, end in _longest_end(key, ends):
                vote(own, theirs, end)
    for name in arrays:
        for theirs, end in _longest_end(name, keys):
            vote("", theirs, end)
    ranked = sorted(votes, key=lambda pair: (-len(votes[pair]), *_complexity(pair)))
    if len(ranked) > 1:
        first, second = ((-len(votes[pair]), *_complexity(pair)) for pair in ranked[:2])
        if first == second:
            return "", ""  # ambiguous
    return ranked[0] if ranked else ("", "")


def _complexity(prefixes: tuple[str, str]) -> tuple[bool, bool]:
    return prefixes != ("", ""), all(prefixes)


def _without_shared_end(own: str, theirs: str) -> tuple[str, str]:
    """Returns two prefixes without the modules that both end in."""
    first, second = own.split("."), theirs.split(".")
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return ".".join(first), ".".join(second)


def _common_prefix(names: Iterable[str]) -> str:
    """Returns the modules that all names begin with."""
    modules = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))
    return ".".join(parts[0] for parts in shared)


def _longest_end(name: str, others: Container[str]) -> Iterator[tuple[str, str]]:
    """Yields the longest end of a name that is another name, after what precedes it."""
    parts = name.split(".")
    for count in range(len(parts)):
        end = ".".join(parts[count:])
        if end in others:
            yield ".".join(parts[:count]), end
            return
