"""The map from the names of a checkpoint to the weights of a model, and how it is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx

from ortops._common.numbers import Array
from ortops.engine.summary import text_of
from ortops.engine.trainable.write_back import NAMES_KEY
from ortops.errors import ArgumentError, ModelError
from ortops.graph import convert
from ortops.graph.files.json_metadata import read_metadata, where, write_metadata
from ortops.graph.files.loading import ModelLike

_REMEDY = "match the model with its checkpoint again (ortops.weights.match)"


@dataclass(frozen=True)
class Part:
    """A slice of a tensor along one axis.

    Attributes:
        axis: The axis.
        start: The first index.
        stop: The index after the last one.

    Example:
        >>> import numpy as np
        >>> Part(axis=1, start=2, stop=4).of(np.arange(8).reshape(2, 4)).tolist()
        [[2, 3], [6, 7]]
    """

    axis: int
    start: int
    stop: int

    def of(self, array: Array) -> Array:
        """Returns the slice of an array, as a view."""
        found: Array = array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]
        return found

    def __str__(self) -> str:
        return f"[{':, ' * self.axis}{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Place:
    """A weight of a model that holds the values of a checkpoint's tensor, or some of them.

    Attributes:
        weight: The weight's name in the model.
        by: How it was found: ``"name"``, ``"scope"``, ``"value"`` or ``"given"``.
        order: The order of the tensor's axes in the weight, as for numpy.transpose; empty if it is
            the same.
        part: The slice of the weight that holds the values; None for the whole weight.
        of: The slice of the checkpoint's tensor whose values it holds; None for the whole tensor.

    Example:
        >>> import numpy as np
        >>> place = Place("fc_w", order=(1, 0))
        >>> place.laid_out(np.zeros((2, 3))).shape
        (3, 2)
    """

    weight: str
    by: str = "given"
    order: tuple[int, ...] = ()
    part: Part | None = None
    of: Part | None = None

    def laid_out(self, array: Array) -> Array:
        """Returns the values of a checkpoint's tensor with the weight's order of axes."""
        array = array if self.of is None else self.of.of(array)
        return array.transpose(self.order) if self.order else array

    def in_weight(self, array: Array) -> Array:
        """Returns the part of the weight's array that holds the values, as a view."""
        return array if self.part is None else self.part.of(array)

    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON object without the default values."""
        found: dict[str, Any] = {"weight": self.weight, "by": self.by}
        found |= {"order": list(self.order)} if self.order else {}
        for name, part in (("part", self.part), ("of", self.of)):
            found |= {name: [part.axis, part.start, part.stop]} if part else {}
        return found

    @classmethod
    def from_json(cls, found: Any) -> Place:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: If it is something else.
        """
        if not isinstance(found, dict) or not isinstance(found.get("weight"), str):
            raise ValueError(f"expected an object with 'weight', got {found!r:.80}")
        lists = [found.get(name) or [] for name in ("order", "part", "of")]
        for numbers in lists:
            if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError(f"expected a list of integers >= 0, got {numbers!r:.80}")
        order, *parts = lists
        if sorted(order) != list(range(len(order))) or any(len(p) not in (0, 3) for p in parts):
            raise ValueError(f"expected the layout of a weight, got {found!r:.80}")
        part, of = (Part(*numbers) if numbers else None for numbers in parts)
        return cls(found["weight"], str(found.get("by", "given")), tuple(order), part, of)

    def __str__(self) -> str:
        part = "" if self.part is None else str(self.part)
        return self.weight + part

    @property
    def layout(self) -> str:
        """The layout in words, such as ``transposed``; empty if it is the same."""
        words = []
        if self.of is not None:
            words.append(f"from {self.of}")
        if self.order:
            words.append("transposed" if self.order == (1, 0) else f"axes {self.order}")
        return ", ".join(words)


NamesLike: TypeAlias = "Names | Mapping[str, str | Place | tuple[Place, ...]]"
"""A map, or a dict from a checkpoint's names to those of a model."""


class Names(Mapping[str, tuple[Place, ...]]):
    """Maps each name of a checkpoint to its places in a model.

    Most tensors have one place. A tensor that the model splits or duplicates has several. Tensors
    with the same place are tied: they share a weight of the model.

    Attributes:
        unmatched_checkpoint: The tensors of the checkpoint without a place, with the reason.
        unmatched_model: The weights of the model that are not in the checkpoint, with the reason.

    Example:
        >>> names = Names({"fc.weight": (Place("fc_w", "value", order=(1, 0)),)})
        >>> names["fc.weight"][0].weight
        'fc_w'
        >>> Names.from_json(names.to_json()) == names
        True
        >>> names
        checkpoint  model  by     layout
        fc.weight   fc_w   value  transposed
        1 of 1 tensors of the checkpoint matched
    """

    def __init__(
        self,
        places: Mapping[str, tuple[Place, ...]],
        unmatched_checkpoint: Mapping[str, str] | None = None,
        unmatched_model: Mapping[str, str] | None = None,
    ) -> None:
        self._places = dict(places)
        self.unmatched_checkpoint = dict(unmatched_checkpoint or {})
        self.unmatched_model = dict(unmatched_model or {})

    @classmethod
    def of(cls, given: NamesLike) -> Names:
        """Returns a map that may be given as a dict of names.

        Raises:
            ArgumentError: If it is neither.
        """
        if isinstance(given, Names):
            return given
        if not isinstance(given, Mapping):
            raise ArgumentError(
                "names must be the result of ortops.weights.match or a dict from names of the "
                f"checkpoint to names of the model, got {given!r:.80}"
            )
        found: dict[str, tuple[Place, ...]] = {}
        for name, target in given.items():
            places = (Place(target),) if isinstance(target, str) else target
            places = (places,) if isinstance(places, Place) else places
            if not isinstance(places, tuple) or any(not isinstance(p, Place) for p in places):
                raise ArgumentError(
                    f"names: '{name}' must be mapped to a weight's name, got {target!r:.80}"
                )
            found[name] = places
        return cls(found)

    def __getitem__(self, name: str) -> tuple[Place, ...]:
        return self._places[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def to_json(self) -> dict[str, Any]:
        """Returns the map as a JSON object, without what was not matched."""
        return {name: [p.to_json() for p in places] for name, places in self.items()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Names:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: If it is something else.
        """
        places: dict[str, tuple[Place, ...]] = {}
        for name, entries in found.items():
            if not isinstance(entries, list) or not entries:
                raise ValueError(f"'{name:.80}' must be a list of places, got {entries!r:.80}")
            places[name] = tuple(Place.from_json(entry) for entry in entries)
        return cls(places)

    def attach(self, model: ModelLike) -> onnx.ModelProto:
        """Returns a model with the map in its metadata, where `save` and `load` find it.

        Args:
            model: A ModelProto, its bytes, or its path; not changed.

        Example:
            >>> from ortops.docs import examples
            >>> model = examples.mlp((4, 16, 2))
            >>> stored(Names({"w": (Place("fc1.weight"),)}).attach(model))
            checkpoint  model       by     layout
            w           fc1.weight  given
            1 of 1 tensors of the checkpoint matched
        """
        light = convert.load_light(model)
        self.write(light.proto)
        return light.attach()

    def write(self, proto: onnx.ModelProto) -> None:
        """Stores the map in the metadata of a model."""
        write_metadata(proto, NAMES_KEY, json.dumps(self.to_json(), separators=(",", ":")))

    def __repr__(self) -> str:
        rows = [("checkpoint", "model", "by", "layout")]
        for name, places in self.items():
            for index, place in enumerate(places):
                rows.append(("" if index else name, str(place), place.by, place.layout))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join((*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3])).rstrip()
            for row in rows
        ]
        total = len(self) + len(self.unmatched_checkpoint)
        lines.append(f"{len(self)} of {total} tensors of the checkpoint matched")
        for title, unmatched in (
            ("only in the checkpoint", self.unmatched_checkpoint),
            ("only in the model", self.unmatched_model),
        ):
            if unmatched:
                lines.append(f"{title}:")
                lines += [f"  {n}{f' ({why})' if why else ''}" for n, why in unmatched.items()]
        return text_of(lines)


def stored(proto: onnx.ModelProto) -> Names | None:
    """Returns the map in the metadata of a model; None if there is none.

    Raises:
        ModelError: If the entry is invalid.
    """
    found = read_metadata(proto.metadata_props, NAMES_KEY, _REMEDY)
    if found is None:
        return None
    try:
        return Names.from_json(found)
    except ValueError as error:
        raise ModelError(f"{where(NAMES_KEY)}: {error}; {_REMEDY}") from error
