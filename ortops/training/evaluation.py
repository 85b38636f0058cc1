"""Loss and metrics of a data set, in inference mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops import metrics as metric_functions
from ortops.errors import FeedError, OrtopsError
from ortops.execution.onnxruntime_sessions import errors_as_ours, ort_value
from ortops.metrics import Metric
from ortops.training.data import Feeds, rows
from ortops.training.feeds import Inputs
from ortops.training.step_graph import LossPart, PredictionNote

__all__ = ["Evaluation", "measure", "number_of", "numbers_of"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Evaluation:
    """A session that computes, in inference mode, the loss and what it looks at."""

    session: onnxruntime.InferenceSession
    parts: Sequence[LossPart]
    prediction: PredictionNote
    constants: dict[str, Array]

    def run(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name."""
        inputs = {value.name: ort_value(arrays[value.name]) for value in self.session.get_inputs()}
        names = [value.name for value in self.session.get_outputs()]
        with errors_as_ours():
            found = self.session.run_with_ort_values(names, inputs)
        return {name: value.numpy() for name, value in zip(names, found, strict=True)}


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


def measure(
    data: Iterable[Feeds],
    evaluation: Evaluation,
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    inputs: Inputs,
    metrics: Mapping[str, Metric],
    target: str,
) -> dict[str, float]:
    """Computes the loss and metrics of a data set.

    Args:
        data: Its batches.
        evaluation: What computes them.
        run: Runs it, given a checked batch.
        inputs: The inputs of the model and of the loss.
        metrics: What to compute besides the loss.
        target: The input that they compare outputs with; not read where there are no metrics.
    """
    totals = [Total(part) for part in evaluation.parts]
    outputs: list[Array] = []
    targets: list[Array] = []
    for feeds in data:
        checked = inputs.check(feeds)
        found = run(checked)
        for total in totals:
            total.add(found, rows(checked))
        if metrics:
            outputs.append(found[evaluation.prediction.tensor])
            # A copy: a loader may fill the same memory again.
            targets.append(checked[target].copy())
    if not totals[0].batches:
        raise FeedError("data: there is no batch in it; give arrays or a list of batches")
    result = {"loss": sum(total.part.weight * total.average for total in totals)}
    if len(totals) > 1:
        result |= {total.part.name: total.average for total in totals}
    looked_at = evaluation.prediction
    for name, metric in metrics.items():
        result[name] = metric_functions.measure(
            metric,
            np.concatenate(outputs),
            np.concatenate(targets),
            axis=looked_at.axis,
            kind=looked_at.kind,
            ignored=looked_at.ignored,
        )
    return result


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
