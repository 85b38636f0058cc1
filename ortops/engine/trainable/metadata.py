"""The metadata of a trainable file: the roles of its names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import onnx

from ortops._common.arguments import whole_number
from ortops._common.numbers import Array, real
from ortops.errors import ModelError, OrtopsError, did_you_mean
from ortops.graph.files.json_fields import (
    BOOLEAN,
    TEXT,
    Expected,
    check_fields,
    object_of,
    or_null,
)
from ortops.graph.files.json_metadata import read_metadata, where

METADATA_KEY = "ortops.training"
"""The metadata key of a JSON object with the names that training uses."""

ENTRIES = "entries"
"""Where this object has those of later training_info entries, by the names of the entries."""

MAIN = "main"
"""The name of the first training_info entry."""


_WHERE = where(METADATA_KEY)


@dataclass(frozen=True)
class LossPart:
    """A summand of the loss; see `ortops.losses.loss.Part`.

    Attributes:
        name: The tensor with its value.
        label: The name to show.
        weight: Its factor in the loss.
        count: The tensor that its sum was divided by; empty if that is the number of rows.
        is_sum: Whether it is a sum.
        couples_rows: Whether the loss of a row depends on other rows of the batch.
    """

    name: str = ""
    label: str = ""
    weight: float = 1.0
    count: str = ""
    is_sum: bool = False
    couples_rows: bool = False


@dataclass(frozen=True)
class PredictionNote:
    """A tensor that the loss compares with targets; see `ortops.losses.Prediction`.

    Attributes:
        tensor: The tensor.
        kind: The meaning of its numbers, such as ``"logits"``.
        axis: The axis of the classes, or None.
        target: The input that it is compared with.
        ignored: The label that is ignored, or None.
        output: The tensor that the user named, which may be a Softmax of it.
        shifted: Whether a position is compared with the label at the next one.
        blank: The blank class of CTC, or None.
        batch_first: Whether CTC reads (N, T, C).
        input_lengths: The input with CTC's lengths along T, or "".
        target_lengths: The input with CTC's lengths along S, or "".
        bounded: Whether the loss reads logits that may come from a function with bounded values.
        sample_weight: The input with the weights of rows, or "".
        box_format: What the four numbers of boxes are, or "".
        form: See `ortops.losses.Prediction`.
    """

    tensor: str = ""
    kind: str = "logits"
    axis: int | None = None
    target: str = ""
    ignored: int | None = None
    output: str = ""
    shifted: bool = False
    blank: int | None = None
    batch_first: bool = False
    input_lengths: str = ""
    target_lengths: str = ""
    bounded: bool = False
    sample_weight: str = ""
    box_format: str = ""
    form: str = ""

    @property
    def shared(self) -> dict[str, object]:
        """The settings of the loss that metrics share, by the name of their argument."""
        if self.box_format:
            return {"box_format": self.box_format}
        if self.blank is None:
            return {}
        names = ("blank", "batch_first", "input_lengths", "target_lengths")
        return {name: getattr(self, name) for name in names if getattr(self, name) != ""}

    def compares(self, dtype: np.dtype[Any] | None) -> str:
        """Returns what is compared, as in `ortops.metrics.metric.StreamingMetric.fits`.

        Args:
            dtype: The type of the targets.
        """
        if self.box_format or self.blank is not None:
            return "boxes" if self.box_format else "sequences"
        if self.form == "probabilities" or (dtype is not None and dtype.kind in "iu"):
            return "labels"
        is_numbers = self.kind in ("values", "log_probabilities")
        return self.form or ("numbers" if is_numbers else "answers")

    def targets_of(self, labels: Array, outputs: Array, *, is_class: bool) -> Array:
        """Returns what the positions of the tensor are compared with, given an input.

        Args:
            labels: The input.
            outputs: The tensor.
            is_class: Whether classes are compared, so that probabilities of the classes of a
                Softmax are those of the most likely one.
        """
        of_softmax = self.axis is not None and self.kind.endswith("probabilities")
        if self.form == "probabilities" or (
            is_class and of_softmax and outputs.shape == labels.shape
        ):
            return np.asarray(labels.argmax(1 if self.axis is None else self.axis))
        if not self.shifted:
            return labels
        last = np.full_like(labels[:, :1], self.ignored)
        return np.concatenate([labels[:, 1:], last], axis=1)


@dataclass(frozen=True)
class TrainingMetadata:
    """The metadata that `ortops.build_training_model` writes: the roles of names.

    Attributes:
        loss: The output of the algorithm that is the loss.
        learning_rate: The initializer that is the learning rate.
        step: The initializer that counts steps.
        training_copies: The outputs of the inference graph by their training-mode copies, which
            are outputs of the algorithm.
        losses: The summands of the loss.
        prediction: The tensor that the loss compares with targets.
        predictions: The tensors of the summands, if there are several.
        dropouts: The tensors without Dropout by the tensors of the algorithm with Dropout.
        masters: The variables with float32 values of 16-bit parameters, by parameter.
        loss_scale: The variable that the loss is multiplied by; empty without loss scaling.
        good_steps: The variable that counts steps since the loss scale changed.
        seed: The variable that seeds Dropout.
        schedule: The schedule in the graph as text; empty if there is none.
        scheduled_learning_rate: The output of the algorithm that is the learning rate of a step, if
            there is a schedule; ``learning_rate`` is its peak.
        schedule_start: The variable with the number of steps before the schedule, if fit sets it.
        schedule_steps: The variable with the number of steps of the schedule, if fit sets it.
        clipping: The clipping of gradients as text; empty if there is none.
        gradient_norm: The tensor of the algorithm that is the norm of all gradients before it is
            limited; empty if it is not.
        averages: The variables with averages over steps, by parameter.
        averaging: The kind of averages as text; empty if there are none.
        groups: The optimizer settings of parameters in groups as text, by parameter.
        not_negative: Whether the loss cannot be negative.
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
    schedule_start: str = ""
    schedule_steps: str = ""
    clipping: str = ""
    gradient_norm: str = ""
    averages: Mapping[str, str] = field(default_factory=dict)
    averaging: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)
    not_negative: bool = False

    @property
    def sample_weights(self) -> list[str]:
        """The inputs with the weights of rows."""
        notes = [self.prediction, *self.predictions]
        return list(dict.fromkeys(note.sample_weight for note in notes if note.sample_weight))

    @property
    def target_lengths(self) -> dict[str, str]:
        """The inputs with the lengths of targets, by the input with these."""
        notes = [self.prediction, *self.predictions]
        return {note.target: note.target_lengths for note in notes if note.target_lengths}

    def refuse_second_schedule(self) -> None:
        """Raises an error if the model has a schedule already.

        Raises:
            OrtopsError: If there is a schedule in the graph.
        """
        if self.schedule:
            raise OrtopsError(
                f"schedule: the model has the schedule {self.schedule} already; set "
                "session.peak_learning_rate to rescale it, or build the model with a number as "
                "learning rate"
            )

    def averaged(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the values of variables, with parameters replaced by their averages.

        Args:
            arrays: The values of variables by name.

        Raises:
            ModelError: If there are no averages, or the metadata names one that does not exist.
        """
        if not self.averages:
            raise ModelError(
                "ema: the model has no averages of its parameters; build it with ema_decay="
            )
        result = dict(arrays)
        for name, average in self.averages.items():
            if not {name, average} <= arrays.keys() or arrays[name].shape != arrays[average].shape:
                raise ModelError(
                    f"{_WHERE}: 'averages' has '{average}' for '{name}', which must be variables "
                    "of the same shape"
                )
            with np.errstate(over="ignore"):
                result[name] = arrays[average].astype(arrays[name].dtype)
        return result


def _is_integer(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


_EXPECTED: Mapping[Any, Expected] = {
    "str": TEXT,
    "Mapping[str, str]": object_of("strings", TEXT.fits),
    "float": Expected("a finite number", lambda value: math.isfinite(real(value))),
    "bool": BOOLEAN,
    "int | None": or_null(Expected("an integer of 64 bits", _is_integer)),
}
"""What JSON values must be, by the type of a field."""


def entry_names(proto: onnx.ModelProto) -> list[str]:
    """Returns the names of the training_info entries: those of their graphs; the first is "main".

    Example:
        >>> from ortops.docs import examples
        >>> entry_names(examples.session().model())
        ['main']
    """
    return [MAIN, *(info.algorithm.name for info in list(proto.training_info)[1:])]


def entry_number(proto: onnx.ModelProto, entry: int | str) -> int:
    """Returns the index of a training_info entry, given the index or the name.

    Raises:
        ArgumentError: If the argument is neither.
        ModelError: If the model has no entry of this name, or several.
    """
    if not isinstance(entry, str):
        return whole_number("entry", entry)
    names = entry_names(proto)
    if not proto.training_info or names.count(entry) != 1:
        found = f"{names.count(entry)} training_info entries" if entry in names else "no entry"
        raise ModelError(
            f"entry: the model has {found} named {entry!r:.80}; {did_you_mean(entry, names)}"
        )
    return names.index(entry)


def training_metadata(proto: onnx.ModelProto, entry: int = 0) -> TrainingMetadata:
    """Returns the metadata of a trainable model; an empty one if ortops did not build the model.

    Args:
        proto: The model.
        entry: The index of the training_info entry.

    Raises:
        ModelError: If the metadata is not valid.
    """
    remedy = "give a JSON object, or remove it"
    found = read_metadata(proto.metadata_props, METADATA_KEY, remedy) or {}
    others = found.get(ENTRIES, {})
    if not isinstance(others, dict) or not all(isinstance(e, dict) for e in others.values()):
        raise ModelError(f"{_WHERE}: '{ENTRIES}' must be an object of objects, got {others!r:.80}")
    if 0 < entry < len(proto.training_info):
        found = others.get(proto.training_info[entry].algorithm.name, found)
    parts, predictions = (found.get(name, []) for name in ("losses", "predictions"))
    for name, array in (("losses", parts), ("predictions", predictions)):
        if not isinstance(array, list):
            raise ModelError(f"{_WHERE}: '{name}' must be an array, got {array!r:.80}")
    metadata = _read_record(TrainingMetadata, found)
    losses = [_read_record(LossPart, part) for part in parts]
    if len(losses) == 1 and losses[0].name == metadata.loss:  # its value includes its weight
        losses = [replace(losses[0], weight=1.0)]
    return replace(
        metadata,
        losses=losses,
        prediction=_read_record(PredictionNote, found.get("prediction", {})),
        predictions=[_read_record(PredictionNote, each) for each in predictions],
    )


_Note = TypeVar("_Note", TrainingMetadata, LossPart, PredictionNote)


def _read_record(kind: type[_Note], found: object) -> _Note:
    """Returns a dataclass with values from JSON; other fields have their defaults."""
    if not isinstance(found, dict):
        raise ModelError(f"{_WHERE}: a {kind.__name__} must be an object, got {found!r:.80}")
    expected = {each.name: _EXPECTED[each.type] for each in fields(kind) if each.type in _EXPECTED}
    check_fields(_WHERE, found, expected, optional=expected)
    return kind(**{name: found[name] for name in expected if name in found})
