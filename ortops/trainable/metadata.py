"""What a trainable file says of itself in its metadata: which of its names play which part."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from ortops.errors import ModelError, OrtopsError
from ortops.graph.files.json_metadata import read_note, where
from ortops.numbers import real

__all__ = ["METADATA_KEY", "LossPart", "PredictionNote", "TrainingMetadata", "training_metadata"]

METADATA_KEY = "ortops.training"
"""The key in a model's ``metadata_props`` of a JSON object with the names that training uses."""

Array: TypeAlias = npt.NDArray[Any]

_WHERE = where(METADATA_KEY)


@dataclass(frozen=True)
class LossPart:
    """A summand of the loss; see `ortops.losses.loss.Part`.

    Attributes:
        name: The tensor that is its value.
        label: What people call it.
        weight: What it is multiplied with.
        count: The tensor that its sum was divided by; rows stand for it where there is none.
        is_sum: Whether it is a sum.
        couples_rows: Whether rows of a batch take part in each other's loss.
    """

    name: str = ""
    label: str = ""
    weight: float = 1.0
    count: str = ""
    is_sum: bool = False
    couples_rows: bool = False


@dataclass(frozen=True)
class PredictionNote:
    """What the loss looks at; see `ortops.losses.Prediction`.

    Attributes:
        tensor: The tensor.
        kind: What its numbers are.
        axis: The axis of the classes, or None.
        target: The input that it is compared with.
        ignored: The label that does not count, or None.
        output: The tensor that the user named for it, which may be a Softmax behind it.
    """

    tensor: str = ""
    kind: str = "logits"
    axis: int | None = None
    target: str = ""
    ignored: int | None = None
    output: str = ""


@dataclass(frozen=True)
class TrainingMetadata:
    """What the builder wrote about a trainable model: which of its names play which part.

    Attributes:
        loss: The output of the algorithm that is the loss.
        learning_rate: The initializer that is the learning rate.
        step: The initializer that counts steps.
        training_copies: Outputs of the algorithm → outputs of the inference graph that they are
            the training-mode copies of.
        losses: The summands of the loss.
        prediction: What the loss looks at.
        predictions: What each of several summands looks at.
        dropouts: Tensors of the algorithm → what they are without Dropout.
        masters: Parameters of 16 bits → the variables that are their float32 values.
        loss_scale: The variable that the loss is multiplied by, where gradients are scaled.
        good_steps: The variable that counts steps since that has changed.
        seed: The variable that, with the steps, determines what Dropout drops.
        schedule: The schedule in the graph, as text; empty for none.
        scheduled_learning_rate: The output of the algorithm that is the learning rate of a step,
            where there is a schedule; ``learning_rate`` is its peak.
        clipping: How gradients are clipped, as text; empty if they are not.
        averages: Parameters → the variables that are their averages over steps.
        averaging: How these are made, as text; empty if there are none.
        groups: Parameters → the settings of the optimizer that are their own, as text.
    """

    loss: str = ""
    learning_rate: str = ""
    step: str = ""
    training_copies: Mapping[str, str] = field(default_factory=dict)
    losses: Sequence[LossPart] = ()
    prediction: PredictionNote = PredictionNote()
    predictions: Sequence[PredictionNote] = ()
    dropouts: Mapping[str, str] = field(default_factory=dict)
    masters: Mapping[str, str] = field(default_factory=dict)
    loss_scale: str = ""
    good_steps: str = ""
    seed: str = ""
    schedule: str = ""
    scheduled_learning_rate: str = ""
    clipping: str = ""
    averages: Mapping[str, str] = field(default_factory=dict)
    averaging: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    def refuse_second_schedule(self) -> None:
        """Refuses a schedule beside the one that steps follow.

        Raises:
            OrtopsError: If there is one in the graph.
        """
        if self.schedule:
            raise OrtopsError(
                f"schedule: the model's steps follow one, {self.schedule}; set "
                "session.learning_rate to rescale that, or build the model with a number as "
                "learning rate"
            )

    def averaged(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the values of variables, with averages in the place of parameters.

        Args:
            arrays: The value of each variable, by name.

        Raises:
            ModelError: If the training keeps no averages, or what the file calls one is none.
        """
        if not self.averages:
            raise ModelError(
                "ema: the training keeps no averages of its parameters; build the model with "
                "ema_decay="
            )
        result = dict(arrays)
        for name, average in self.averages.items():
            if not {name, average} <= arrays.keys() or arrays[name].shape != arrays[average].shape:
                raise ModelError(
                    f"{_WHERE}: its 'averages' has '{average}' for "
                    f"'{name}'; variables of one shape are accepted"
                )
            with np.errstate(over="ignore"):
                result[name] = arrays[average].astype(arrays[name].dtype)
        return result


_TEXT, _NAMES = "the name of a tensor", "an object of names of tensors"
_STRING, _STRINGS = "a string", "an object of strings"
_NOTED: Mapping[type, Mapping[str, str]] = {
    TrainingMetadata: {
        **dict.fromkeys(
            ("loss", "learning_rate", "step", "loss_scale", "good_steps", "seed"), _TEXT
        ),
        "scheduled_learning_rate": _TEXT,
        **dict.fromkeys(("training_copies", "dropouts", "masters", "averages"), _NAMES),
        **dict.fromkeys(("schedule", "clipping", "averaging"), _STRING),
        "groups": _STRINGS,
    },
    LossPart: {
        **dict.fromkeys(("name", "label", "count"), _TEXT),
        "weight": "a finite number",
        **dict.fromkeys(("is_sum", "couples_rows"), "true or false"),
    },
    PredictionNote: {
        **dict.fromkeys(("tensor", "kind", "target", "output"), _TEXT),
        **dict.fromkeys(("axis", "ignored"), "an integer of 64 bits or null"),
    },
}
"""What is accepted in a file."""


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _is_integer_or_null(value: object) -> bool:
    return value is None or (type(value) is int and -(2**63) <= value < 2**63)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys((_TEXT, _STRING), _is_text),
    **dict.fromkeys((_NAMES, _STRINGS), _are_texts),
    "a finite number": lambda value: math.isfinite(real(value)),
    "true or false": lambda value: isinstance(value, bool),
    "an integer of 64 bits or null": _is_integer_or_null,
}


def training_metadata(proto: onnx.ModelProto) -> TrainingMetadata:
    """Returns what the builder wrote about a trainable model; nothing for anybody else's.

    Raises:
        ModelError: If it is not what the builder writes.
    """
    found = read_note(proto.metadata_props, METADATA_KEY, "give a JSON object, or remove it") or {}
    parts, predictions = (found.get(name, []) for name in ("losses", "predictions"))
    for name, array in (("losses", parts), ("predictions", predictions)):
        if not isinstance(array, list):
            raise ModelError(f"{_WHERE}: its '{name}' is {array!r:.80}; an array is accepted")
    metadata = _read_note(TrainingMetadata, found)
    losses = [_read_note(LossPart, part) for part in parts]
    if len(losses) == 1 and losses[0].name == metadata.loss:  # its weight is in its value
        losses = [replace(losses[0], weight=1.0)]
    return replace(
        metadata,
        losses=losses,
        prediction=_read_note(PredictionNote, found.get("prediction", {})),
        predictions=[_read_note(PredictionNote, each) for each in predictions],
    )


_Note = TypeVar("_Note", TrainingMetadata, LossPart, PredictionNote)


def _read_note(kind: type[_Note], found: object) -> _Note:
    """Returns a note from what stands in a file."""
    if not isinstance(found, dict):
        raise ModelError(f"{_WHERE}: it has {found!r:.80}; an object is accepted there")
    known = {name: found[name] for name in _NOTED[kind] if name in found}
    for name, value in known.items():
        accepted = _NOTED[kind][name]
        if not _FITS[accepted](value):
            raise ModelError(f"{_WHERE}: its '{name}' is {value!r:.80}; {accepted} is accepted")
    return kind(**known)
