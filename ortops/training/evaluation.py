"""Loss, metrics and predictions of a data set, in inference mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.errors import OrtopsError, did_you_mean
from ortops.execution.memory import ort_value
from ortops.execution.onnxruntime_sessions import errors_as_ours
from ortops.metrics import StreamingMetric
from ortops.metrics.metric import as_number
from ortops.trainable.metadata import LossPart, PredictionNote, TrainingMetadata
from ortops.training.data import rows
from ortops.training.feeds import Inputs

__all__ = [
    "Evaluation",
    "MetricBinding",
    "bind_metric",
    "measure",
    "number_of",
    "numbers_of",
    "predict",
]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Evaluation:
    """A session that computes tensors in inference mode.

    Attributes:
        session: The session.
        inputs: What a batch has to fit.
        parts: The summands of the loss that it computes.
        tensors: The output that each tensor that was asked for is.
        kinds: The kind and the class axis of those that are known to be probabilities.
        constants: What the session is fed in every run.
    """

    session: onnxruntime.InferenceSession
    inputs: Inputs
    parts: Sequence[LossPart]
    tensors: Mapping[str, str]
    kinds: Mapping[str, tuple[str, int | None]]
    constants: Mapping[str, Array]

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""
        inputs = {value.name: ort_value(arrays[value.name]) for value in self.session.get_inputs()}
        names = [value.name for value in self.session.get_outputs()]
        with errors_as_ours():
            found = self.session.run_with_ort_values(names, inputs)
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}


@dataclass(frozen=True)
class MetricBinding:
    """What a metric compares.

    Attributes:
        metric: The metric as it was given.
        note: The tensor, what is known of it, and the target.
        known: Whether that is of this very tensor; else it may be known better from the graph.
    """

    metric: StreamingMetric
    note: PredictionNote
    known: bool

    def begin(self, kinds: Mapping[str, tuple[str, int | None]]) -> StreamingMetric:
        """Returns a copy of the metric that has seen nothing.

        Args:
            kinds: See `Evaluation`.
        """
        note, tensor = self.note, self.note.tensor
        if not self.known and tensor in kinds:
            kind, axis = kinds[tensor]
            note = replace(note, kind=kind, axis=axis if note.axis is None else note.axis)
        return self.metric.begun(note.kind, note.axis, note.ignored)


def bind_metric(
    metric: StreamingMetric,
    metadata: TrainingMetadata,
    output: str,
    inputs: Collection[str],
    own: Collection[str],
) -> MetricBinding:
    """Finds out what a metric compares.

    Args:
        metric: The metric.
        metadata: What the builder wrote.
        output: The tensor to look at where it wrote nothing.
        inputs: The inputs of a step.
        own: Those of the model.

    Raises:
        OrtopsError: If there is no such input, or none that outputs are compared with.
    """
    first = metadata.prediction
    notes = [first, *metadata.predictions]
    if metric.output is not None:
        notes = [each for each in notes if metric.output in (each.tensor, each.output)]
    fitting = [each for each in notes if metric.target in (None, each.target)]
    note = next(iter([*fitting, *notes]), PredictionNote())
    tensor = metric.output or note.tensor or output
    known, target = tensor == note.tensor, metric.target or note.target
    if target != note.target:
        note = replace(note, ignored=None)
    added = [name for name in inputs if name not in own]
    if not target:
        targets = {each.target for each in (first, *metadata.predictions)} - {""}
        candidates = list(targets) if first.tensor else added
        if len(candidates) == 1:
            (target,) = candidates
        elif candidates:
            raise metric.wrong(
                f"no loss compares '{tensor}' with anything; say what it is compared with by "
                f"target=, such as '{sorted(candidates)[0]}'"
            )
    if not target:
        raise metric.wrong(
            f"the loss has {len(added)} inputs of its own ({', '.join(added)}), and outputs are "
            "compared with none that is known; metrics need one, which target= names"
        )
    if target not in inputs:
        raise metric.wrong(f"there is no input '{target}'; {did_you_mean(target, inputs)}")
    return MetricBinding(metric, replace(note, tensor=tensor, target=target), known)


@dataclass
class Total:
    """A part of a loss over batches.

    Attributes:
        part: The part.
        total: The sum so far.
        count: What it is to be divided by.
        batches: How many batches there were.
    """

    part: LossPart
    total: float = 0.0
    count: float = 0.0
    batches: int = 0

    def add(self, outputs: Mapping[str, Array], rows: int) -> None:
        """Adds a batch."""
        count = number_of(outputs[self.part.count]) if self.part.count else rows
        if self.part.is_sum:
            count = 1.0
        self.batches += 1
        if count:  # or the mean is that of nothing
            self.total += number_of(outputs[self.part.name]) * count
            self.count += count

    @property
    def average(self) -> float:
        """The loss of all batches as if they were one."""
        if self.part.is_sum:
            return self.total
        return self.total / self.count if self.count else math.nan


Run: TypeAlias = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Runs an evaluation, given a checked batch."""


def measure(
    data: Iterable[Mapping[str, Array]],
    evaluation: Evaluation,
    run: Run,
    bindings: Mapping[str, MetricBinding],
) -> dict[str, float]:
    """Computes the loss and metrics of a data set, batch by batch.

    Args:
        data: Its batches, checked.
        evaluation: What computes them.
        run: Runs it.
        bindings: What to compute besides the loss, by name.

    Raises:
        OrtopsError: If a metric has the name of a loss, or its result is not a number.
    """
    totals = [Total(part) for part in evaluation.parts]
    metrics = {name: each.begin(evaluation.kinds) for name, each in bindings.items()}
    for total in totals:
        if total.part.name in metrics:
            raise metrics[total.part.name].wrong(
                "a summand of the loss is named so; give it a name of its own with name="
            )
    for batch in data:
        found = run(batch)
        for total in totals:
            total.add(found, rows(batch))
        for name, metric in metrics.items():
            note = bindings[name].note
            more = {key: batch[other] for key, other in metric.inputs.items() if other in batch}
            metric.update(found[evaluation.tensors[note.tensor]], batch[note.target], **more)
    counted = [total for total in totals if total.part.is_sum or total.count]
    values = [total.part.weight * total.average for total in counted]
    result = {"loss": sum(values) if values else math.nan}
    if len(totals) > 1:
        result |= {total.part.name: total.average for total in totals}
    return result | {name: as_number(metric, metric.result()) for name, metric in metrics.items()}


def predict(
    data: Iterable[Mapping[str, Array]], evaluation: Evaluation, run: Run
) -> dict[str, Array]:
    """Returns tensors of all rows of a data set, by the names that they were asked for.

    Args:
        data: Its batches, checked.
        evaluation: What computes them.
        run: Runs it.

    Raises:
        OrtopsError: If a tensor does not have the rows of a batch on axis 0.
    """
    parts: dict[str, list[Array]] = {name: [] for name in evaluation.tensors}
    for batch in data:
        found, size = run(batch), rows(batch)
        for name, output in evaluation.tensors.items():
            array = found[output]
            if not array.ndim or len(array) != size:
                raise OrtopsError(
                    f"predict: '{name}' has shape {list(array.shape)} for a batch of {size} rows; "
                    "tensors with the rows on axis 0 are accepted, so leave it out of outputs=, "
                    "or run session.inference_model()"
                )
            if parts[name] and parts[name][0].shape[1:] != array.shape[1:]:
                raise OrtopsError(
                    f"predict: '{name}' has shape {list(parts[name][0].shape)} for one batch and "
                    f"{list(array.shape)} for another, which cannot be joined; give batches of one "
                    "shape, or predict each by itself"
                )
            is_fed = any(np.may_share_memory(array, fed) for fed in batch.values())
            parts[name].append(array.copy() if is_fed else array)  # it may be filled again
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def numbers_of(losses: Array, steps: int) -> Array:
    """Returns the losses of some steps, one number for each."""
    if losses.size != steps:
        raise OrtopsError(
            f"loss: it has {losses.size // steps} numbers; a single one is accepted, so reduce it "
            "with ReduceMean, or run the algorithm with `step`"
        )
    return losses.reshape(steps)


def number_of(loss: Array) -> float:
    """Returns a loss, which has to be one number."""
    return float(numbers_of(loss, 1)[0])
