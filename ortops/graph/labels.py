"""The labels that losses accept, recorded in the metadata of the inputs for labels."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.files.json_text import read_json

__all__ = ["Labels", "add_labels", "read_labels"]

_KEY = "ortops.labels"


@dataclass(frozen=True)
class Labels:
    """Class indices that a loss accepts.

    Attributes:
        classes: The number of classes; None if it is unknown.
        ignored: The label of ignored elements; None if there is none.
    """

    classes: int | None
    ignored: int | None


def add_labels(value: ir.Value, labels: Labels) -> None:
    """Records the labels that a loss accepts, in addition to those of other losses."""
    known = [asdict(each) for each in read_labels(value)]
    value.metadata_props[_KEY] = json.dumps([*known, asdict(labels)])


def read_labels(value: ir.Value) -> list[Labels]:
    """Returns the labels that the losses of an input accept.

    Raises:
        ModelError: If the metadata are invalid.
    """
    text = value.metadata_props.get(_KEY, "[]")
    try:
        found = [Labels(each["classes"], each["ignored"]) for each in read_json(text)]
        fits = all(
            number is None or (type(number) is int and abs(number) < 2**63)
            for labels in found
            for number in (labels.classes, labels.ignored)
        )
    except (TypeError, ValueError, KeyError):
        fits = False
    if not fits:
        raise ModelError(
            f"input '{value.name}': metadata '{_KEY}' must be as ortops.build_training_model "
            f"writes it, got {text!r:.80}"
        )
    return found
