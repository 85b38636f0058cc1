"""JSON objects that stand in the metadata of a trainable file."""

from __future__ import annotations

import json
from typing import Any

import onnx

from ortops.errors import ModelError
from ortops.graph.limits import LIMITS

__all__ = ["METADATA_KEY", "read_note", "remove_note", "where"]

METADATA_KEY = "ortops.training"
"""Where a trainable model says, as JSON, which of its names play which part."""


def where(key: str) -> str:
    """Returns what messages call the entry of a key."""
    return f"metadata_props '{key}'"


def read_note(proto: onnx.ModelProto, key: str, remedy: str) -> dict[str, Any] | None:
    """Returns the object under a key; None if there is no such entry.

    Args:
        proto: The model.
        key: The key.
        remedy: What a message says that is accepted, or how to mend it.

    Raises:
        ModelError: If it is too long, or no JSON object.
    """
    text = next((entry.value for entry in proto.metadata_props if entry.key == key), None)
    if text is None:
        return None
    if len(text) > LIMITS.metadata_bytes:
        raise ModelError(
            f"{where(key)}: it has {len(text):,} characters; {LIMITS.metadata_bytes:,} are "
            "accepted (ortops.graph.limits.LIMITS.metadata_bytes)"
        )
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where(key)}: {error}; {remedy}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{where(key)}: it is a {type(found).__name__}; {remedy}")
    return found


def remove_note(proto: onnx.ModelProto, key: str) -> None:
    """Removes the entry of a key, if there is one."""
    kept = [entry for entry in proto.metadata_props if entry.key != key]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
