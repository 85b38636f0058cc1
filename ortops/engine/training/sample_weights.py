"""Weights of rows and of classes: the arguments of `fit` and `evaluate`, and the data with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ortops._common.arguments import number, whole_number
from ortops._common.numbers import Array
from ortops.engine.trainable.metadata import TrainingMetadata
from ortops.engine.training import foreign_arrays
from ortops.engine.training.arrow import ArrowRows, is_arrow, open_arrow
from ortops.engine.training.batch_labels import ClassWeights
from ortops.engine.training.data import Source, open_data, weights_twice
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.validation_split import hold_out
from ortops.errors import ArgumentError, FeedError, did_you_mean

SampleWeight: TypeAlias = Any
"""An array with a weight for each row, or the name of a column of the data; None for none."""

ClassWeight: TypeAlias = Mapping[int, float] | list[float] | tuple[float, ...] | str
"""A weight for each class, by number or as a list, or ``"balanced"``."""


@dataclass(frozen=True)
class Weighed:
    """Data with weights.

    Attributes:
        data: The data, of which arrays and tables in memory include the weights of rows.
        inputs: The inputs, which multiply the weights of a batch by those of its classes.
        more: Weights of rows that have to be added to each batch; see `open_data`.
    """

    data: Any
    inputs: Inputs
    more: Mapping[str, Array]

    def open(self, **reading: Any) -> Source:
        """Returns the data as batches.

        Args:
            **reading: Arguments of `open_data`.
        """
        return open_data(self.data, self.inputs, more=self.more, **reading)


def weigh(
    data: Any,
    inputs: Inputs,
    metadata: TrainingMetadata,
    sample_weight: SampleWeight = None,
    class_weight: ClassWeight | None = None,
    split: float = 0.0,
) -> Weighed:
    """Adds weights to a data set.

    Args:
        data: See `ortops.open_data`.
        inputs: The inputs that a batch has to fit.
        metadata: What the builder wrote about the loss.
        sample_weight: The weights of the rows.
        class_weight: The weights of the classes; ``"balanced"`` is rows / (classes · rows of the
            class), for the classes that occur, as in scikit-learn.
        split: The fraction of the rows, at the end, that ``"balanced"`` does not count, because
            they are set aside for validation.

    Raises:
        ArgumentError: If the loss has no weights, or the weights do not fit it.
        FeedError: If the data have no rows to which weights can be added.
    """
    if sample_weight is None and class_weight is None:
        return Weighed(data, inputs, {})
    if is_arrow(data):
        data = open_arrow(data)
    argument = "class_weight" if sample_weight is None else "sample_weight"
    name = _weight_input(metadata, argument)
    more: dict[str, Array] = {}
    is_named = isinstance(sample_weight, str)
    in_batches = is_named and sample_weight == name and not _column(data, name)[0]
    if sample_weight is not None and not in_batches:
        if is_named and sample_weight != name and sample_weight in inputs:
            raise ArgumentError(
                f"sample_weight: '{sample_weight}' is another input of the model or the loss; name "
                "a column that has weights"
            )
        weights = _cast(_weights(data, sample_weight), inputs[name].dtype)
        notes = [n for n in (metadata.prediction, *metadata.predictions) if n.sample_weight == name]
        later = any(inputs.axis_of(note.target) for note in notes)
        if weights.ndim == 1 and later and name not in inputs.sampled:
            raise ArgumentError(
                f"sample_weight: '{name}' of shape {inputs[name].shown} has no axis for the rows; "
                f'declare it with inputs={{"{name}": (np.float32, [...])}} of build_training_model '
                "and the dimensions of the targets up to that of the rows"
            )
        if _has_arrays(data):
            data = dict(inputs.named(data))
            if is_named:
                data.pop(sample_weight, None)
            elif name in data:
                raise weights_twice(name)
            many = class_weight is not None or inputs.axis_of(name)
            data[name] = inputs.along_rows(name, weights) if many else weights
        elif isinstance(data, ArrowRows) and not is_named and name in data.names:
            raise weights_twice(name)
        else:
            more[name] = weights
    if class_weight is not None:
        labels, is_question = _label_input(metadata, inputs, name)
        by_class = _by_class(class_weight, inputs, labels, data, split, is_question=is_question)
        inputs = inputs.weighed(ClassWeights(name, labels, by_class, is_question))
    return Weighed(data, inputs, more)


def _weight_input(metadata: TrainingMetadata, argument: str) -> str:
    """Returns the input of the loss with the weights of rows."""
    names = metadata.sample_weights
    if len(names) > 1:
        raise ArgumentError(
            f"{argument} needs one input with weights of rows, but the losses have "
            f"{', '.join(map(repr, names))}; give the weights with the data, under these names"
        )
    return names[0]


def _label_input(metadata: TrainingMetadata, inputs: Inputs, name: str) -> tuple[str, bool]:
    """Returns the input with the classes of the rows that an input weighs.

    Returns:
        Its name, and whether its classes are answers to yes/no questions, 0 and 1.

    Raises:
        ArgumentError: If there are several, or the loss does not compare with classes.
    """
    notes = [metadata.prediction, *metadata.predictions]
    notes = [note for note in notes if note.sample_weight == name]
    targets = list(dict.fromkeys(note.target for note in notes))
    if len(targets) > 1:
        raise ArgumentError(
            f"class_weight: '{name}' weighs the rows of losses with different targets, "
            f"{', '.join(map(repr, targets))}; use weights= of a loss"
        )
    note, has_labels = notes[0], inputs.has_labels(notes[0].target)
    if note.shifted:
        raise ArgumentError(
            f"class_weight: the loss shifts its labels '{note.target}' by one token; use the loss "
            "SoftmaxCrossEntropy with labels that are shifted already"
        )
    is_soft = note.form == "probabilities"
    if is_soft or (not has_labels and note.kind not in ("logits", "probabilities")):
        what = f"'{note.target}' has {'probabilities' if is_soft else 'other numbers'}"
        raise ArgumentError(
            "class_weight needs a loss that compares with classes, but "
            f"{what if note.target else 'it has no target'}; use sample_weight="
        )
    return note.target, not has_labels


def _cast(weights: Array, dtype: Any) -> Array:
    """Returns weights in the type of their input."""
    if not weights.any():
        raise ArgumentError("sample_weight must have a weight above 0, got only 0: no row counts")
    with np.errstate(over="ignore"):
        found = weights.astype(dtype or np.float32)
    if not np.isfinite(found).all():
        raise ArgumentError(
            f"sample_weight has the weight {weights.max():g}, which {found.dtype} cannot "
            "represent; give smaller weights"
        )
    return found


def _has_arrays(data: object) -> bool:
    """Whether data are arrays by name or in a tuple, or a table in memory."""
    if isinstance(data, tuple):
        return any(map(foreign_arrays.is_array, data))
    is_table = foreign_arrays.is_table(data) and not foreign_arrays.is_stored_table(data)
    return isinstance(data, Mapping) or is_table


def _column(data: Any, name: str) -> tuple[Sequence[str], Any]:
    """Returns the names of the columns of a data set, and one of these; None if it has none."""
    if isinstance(data, ArrowRows):
        return data.names, data.column(name)
    if isinstance(data, Mapping):
        return list(data), data.get(name)
    if foreign_arrays.is_stored_table(data):
        return data.column_names, data[name] if name in data.column_names else None
    if foreign_arrays.is_table(data):
        return list(data.columns), foreign_arrays.columns(data, [name]).get(name)
    return (), None


def _weights(data: Any, given: SampleWeight) -> Array:
    """Returns the weights of the rows as an array."""
    if isinstance(given, str):
        names, column = _column(data, given)
        if column is None:
            raise ArgumentError(
                f"sample_weight: the data have no column '{given}'; "
                + (did_you_mean(given, names) if names else "give an array")
            )
        given = column
    try:
        weights = np.asarray(
            foreign_arrays.dense(given) if foreign_arrays.is_array(given) else given
        )
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"sample_weight must be an array, got {given!r:.80}") from error
    if weights.dtype.kind not in "biuf" or not weights.ndim:
        raise ArgumentError(
            "sample_weight must be an array of numbers with a weight for each row, got "
            f"{given!r:.80}"
        )
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        place = int(np.flatnonzero(wrong.reshape(len(weights), -1).any(axis=1))[0])
        raise ArgumentError(
            f"sample_weight must be finite and >= 0, got {weights[wrong].flat[0]:g} for row {place}"
        )
    return weights


def _by_class(
    given: ClassWeight, inputs: Inputs, labels: str, data: Any, split: float, *, is_question: bool
) -> dict[int, float]:
    """Returns the weight of each class."""
    if isinstance(given, str):
        if given != "balanced":
            raise ArgumentError(
                f"class_weight must be weights by class or 'balanced', got {given!r}"
            )
        return _balanced(inputs, labels, data, split)
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, list | tuple | np.ndarray):
        found = dict(enumerate(given))
    else:
        raise ArgumentError(
            "class_weight must be a dict of weights by class, a list or 'balanced', got "
            f"{given!r:.80}"
        )
    if not found:
        raise ArgumentError("class_weight must have the weight of a class, got none")
    classes = 2 if is_question else inputs.classes_of(labels)
    for label in found:
        whole_number("class_weight: a class", label, 0)
        if classes is not None and label >= classes:
            raise ArgumentError(
                f"class_weight: classes must be from 0 to {classes - 1}, got {label}"
            )
    if not isinstance(given, Mapping) and classes is not None and len(found) != classes:
        raise ArgumentError(
            f"class_weight must have a weight for each of the {classes} classes of '{labels}', got "
            f"{len(found)}; give a dict for some of them"
        )
    weights = {int(c): number(f"class_weight[{c}]", w, minimum=0) for c, w in found.items()}
    if len(weights) == classes and not any(weights.values()):
        raise ArgumentError("class_weight must have a weight above 0, got only 0: no row counts")
    return weights


def _balanced(inputs: Inputs, labels: str, data: Any, split: float) -> dict[int, float]:
    """Returns rows / (classes · rows of the class) for each class."""
    _, column = _column(inputs.named(data) if _has_arrays(data) else data, labels)
    if column is None:
        raise FeedError(
            f"class_weight='balanced' needs the classes '{labels}' of all rows in advance; give "
            "arrays or a table, or a dict of weights by class"
        )
    array, axis = inputs[labels].array(column), inputs.axis_of(labels)
    if array.ndim > axis:
        size = array.shape[axis]
        trained = len(hold_out(size, split, name="validation_split")[0]) if split else size
        array = foreign_arrays.take(array, slice(0, trained), axis)
    classes, counts = np.unique(array, return_counts=True)
    kept = ~np.isin(classes, inputs.ignored_of(labels))
    classes, counts = classes[kept], counts[kept]
    total = counts.sum()
    return {
        int(label): float(total / (len(classes) * count))
        for label, count in zip(classes, counts, strict=True)
    }
