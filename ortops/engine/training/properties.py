"""What a user notes in a trainable file: numbers and texts by name, as in its metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import onnx

from ortops._common.numbers import integer, real
from ortops._common.uninterrupted import finished_at_exit
from ortops.engine.training.loaded_model import LoadedModel
from ortops.errors import ArgumentError, ModelError
from ortops.graph.files.json_metadata import Entry, read_metadata, where, write_metadata
from ortops.graph.limits import LIMITS

Property: TypeAlias = int | float | str

PROPERTIES_KEY = "ortops.properties"
"""The key in a model's ``metadata_props`` for its properties, as a JSON object."""

_REMEDY = "remove it, or write it as an object of numbers and texts"


class Properties(MutableMapping[str, Property]):
    """The properties of a training session by name. Setting checks the values.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def _known(self) -> dict[str, Property]:
        noted = self._loaded.usage.properties
        return read_properties(self._loaded.proto.metadata_props) if noted is None else noted

    def _set(self, found: dict[str, Property]) -> None:
        if len(json.dumps(found)) > (most := LIMITS.metadata_bytes):
            raise ArgumentError(f"properties must have at most {most:,} characters as JSON")
        self._loaded.usage.assigned += 1  # `saved_in` names no file with other properties
        self._loaded.usage.properties = found

    def __getitem__(self, name: str) -> Property:
        return self._known()[name]

    def __setitem__(self, name: str, value: Property) -> None:
        with finished_at_exit, self._loaded.lock:
            self._set(self._known() | {name: _checked(name, value)})

    def __delitem__(self, name: str) -> None:
        with finished_at_exit, self._loaded.lock:
            del (left := dict(self._known()))[name]
            self._set(left)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __repr__(self) -> str:
        return f"Properties({self._known()})"


def read_properties(metadata: Iterable[Entry]) -> dict[str, Property]:
    """Returns the properties in a model's ``metadata_props``.

    Raises:
        ModelError: If they are not such that ortops writes them.
    """
    found = read_metadata(metadata, PROPERTIES_KEY, _REMEDY) or {}
    try:
        return {name: _checked(name, value) for name, value in found.items()}
    except ArgumentError as error:
        raise ModelError(f"{where(PROPERTIES_KEY)}: {error}; {_REMEDY}") from error


def write_properties(proto: onnx.ModelProto, loaded: LoadedModel) -> None:
    """Writes the properties of a session into a model, if it has or had any."""
    noted = [entry.value for entry in loaded.proto.metadata_props if entry.key == PROPERTIES_KEY]
    if loaded.usage.properties is not None:
        noted = [json.dumps(loaded.usage.properties)]
    for text in noted:
        write_metadata(proto, PROPERTIES_KEY, text)


def _checked(name: object, value: Any) -> Property:
    """Returns a property as a number or text of Python."""
    try:
        if not isinstance(name, str) or not name.encode():
            raise ArgumentError(f"properties: a name must be a text, got {name!r:.80}")
        if isinstance(value, str):
            return value.encode().decode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"properties: {error.object!r:.80} is no text in UTF-8") from error
    given = value.item() if isinstance(value, np.ndarray) and value.shape == () else value
    whole = integer(given)
    if whole is None and math.isfinite(number := real(given)):
        return number
    if whole is None or not -(2**63) <= whole < 2**63:
        raise ArgumentError(
            f"properties '{name}' must be an integer of 64 bits, a finite number or a text, got "
            f"{value!r:.80}"
        )
    return whole
