"""JSON objects in the metadata of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import onnx

from ortops.errors import ModelError
from ortops.graph.files.json_text import read_json
from ortops.graph.limits import LIMITS


def where(key: str) -> str:
    """Returns the name of a metadata entry for messages."""
    return f"metadata_props '{key}'"


class Entry(Protocol):
    """An entry of ``metadata_props``.

    Attributes:
        key: The key.
        value: The text under it.
    """

    key: str
    value: str


def read_metadata(metadata: Iterable[Entry], key: str, remedy: str) -> dict[str, Any] | None:
    """Returns the object under a key; None if there is no such entry.

    Args:
        metadata: The ``metadata_props`` of a ModelProto.
        key: The key.
        remedy: The remedy that messages suggest.

    Raises:
        ModelError: If the entry is too long, or not a JSON object.
    """
    text = next((entry.value for entry in metadata if entry.key == key), None)
    if text is None:
        return None
    if len(text) > LIMITS.metadata_bytes:
        raise ModelError(
            f"{where(key)} must have at most {LIMITS.metadata_bytes:,} characters, got "
            f"{len(text):,}; raise ortops.graph.limits.LIMITS.metadata_bytes"
        )
    try:
        found = read_json(text)
    except ValueError as error:
        raise ModelError(f"{where(key)}: {error}; {remedy}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{where(key)} must be an object, got a {type(found).__name__}; {remedy}")
    return found


def remove_metadata(proto: onnx.ModelProto, key: str) -> None:
    """Removes the entry of a key, if there is one."""
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)


def write_metadata(proto: onnx.ModelProto, key: str, text: str) -> None:
    """Sets the text of a key, and adds the entry if there is none."""
    entry = next((each for each in proto.metadata_props if each.key == key), None)
    entry = entry or proto.metadata_props.add(key=key)
    entry.value = text
