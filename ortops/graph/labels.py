"""What a loss accepts as labels, noted at the input that takes them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.files.json_text import read_json

__all__ = ["Labels", "note_labels", "noted_labels"]

_KEY = "ortops.labels"


@dataclass(frozen=True)
class Labels:
    """Integers that name classes.

    Attributes:
        classes: How many classes there are; None if no shape tells.
        ignored: The label that does not count; None if all do.
    """

    classes: int | None
    ignored: int | None


def note_labels(value: ir.Value, labels: Labels) -> None:
    """Notes what a loss accepts, beside what other losses of the same input do."""
    notes = [asdict(each) for each in noted_labels(value)]
    value.metadata_props[_KEY] = json.dumps([*notes, asdict(labels)])


def noted_labels(value: ir.Value) -> list[Labels]:
    """Returns what losses noted at an input.

    Raises:
        ModelError: If something else stands there.
    """
    text = value.metadata_props.get(_KEY, "[]")
    try:
        found = [Labels(note["classes"], note["ignored"]) for note in read_json(text)]
        fits = all(
            number is None or (type(number) is int and abs(number) < 2**63)
            for labels in found
            for number in (labels.classes, labels.ignored)
        )
    except (TypeError, ValueError, KeyError):
        fits = False
    if not fits:
        raise ModelError(
            f"input '{value.name}': its metadata '{_KEY}' is {text!r:.80}; what "
            "ortops.build_training_model writes is accepted"
        )
    return found
