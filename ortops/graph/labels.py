"""The labels that losses accept, recorded in the metadata of the inputs for labels."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.files.json_text import read_json

_KEY = "ortops.labels"


@dataclass(frozen=True)
class Labels:
    """Class indices that a loss accepts.

    Attributes:
        classes: The number of classes; None if it is unknown.
        ignored: The label of ignored elements; None if there is none.
        of_tokens: Whether they are compared with scores (N, d, C) at the same position, so that a
            language model needs labels that are shifted.
    """

    classes: int | None
    ignored: int | None
    of_tokens: bool = False


def add_labels(value: ir.Value, labels: Labels) -> None:
    """Records the labels that a loss accepts, in addition to those of other losses."""
    texts = [asdict(each) for each in (*read_labels(value), labels)]
    for text in texts:
        if not text["of_tokens"]:
            del text["of_tokens"]
    value.metadata_props[_KEY] = json.dumps(texts)


def read_labels(value: ir.Value) -> list[Labels]:
    """Returns the labels that the losses of an input accept.

    Raises:
        ModelError: If the metadata are invalid.
    """
    text = value.metadata_props.get(_KEY, "[]")
    try:
        found = [
            Labels(each["classes"], each["ignored"], each.get("of_tokens") is True)
            for each in read_json(text)
        ]
        fits = all(
            number is None or (type(number) is int and abs(number) < 2**63)
            for labels in found
            for number in (labels.classes, labels.ignored)
        )
    except (AttributeError, TypeError, ValueError, KeyError):
        fits = False
    if not fits:
        raise ModelError(
            f"input '{value.name}': metadata '{_KEY}' must be as ortops.build_training_model "
            f"writes it, got {text!r:.80}"
        )
    return found
