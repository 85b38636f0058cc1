"""Metrics of the outputs of training steps, which need no second pass over the data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.engine.trainable.metadata import PredictionNote
from ortops.engine.training.feeds import Checked
from ortops.errors import ModelError
from ortops.graph.row_axes import rows_first
from ortops.metrics import StreamingMetric
from ortops.metrics.metric import as_number, reads_numbers

Array: TypeAlias = npt.NDArray[Any]
State: TypeAlias = Mapping[str, Any]

logger = logging.getLogger("ortops")

_LARGEST = 65536
"""The greatest number of elements of an array that a position holds."""


class Measured(NamedTuple):
    """A metric of training.

    Attributes:
        metric: The metric, begun.
        note: What it compares.
        output: The output of a step that it reads.
    """

    metric: StreamingMetric
    note: PredictionNote
    output: str


def add_batch(
    metric: StreamingMetric, note: PredictionNote, outputs: Array, batch: Checked
) -> None:
    """Adds a batch to a metric, with the rows on the first axis.

    Args:
        metric: The metric.
        note: What it compares.
        outputs: The tensor that it reads.
        batch: The batch.
    """
    more = {key: batch[other] for key, other in metric.inputs.items() if other in batch}
    axis_of = batch.by.axis_of
    if note.sample_weight in batch and metric.takes_weights:
        weights = batch[note.sample_weight]
        more["sample_weight"] = rows_first(weights, axis_of(note.sample_weight))
    targets = batch[note.target]
    if not reads_numbers(metric):
        is_class = "labels" in (metric.fits or ())
        targets = note.targets_of(targets, outputs, is_class=is_class)
    if axis := axis_of(note.target):
        outputs, targets = _rows_first(outputs, targets, axis, metric.axis)
    metric.update(outputs, targets, **more)


def _rows_first(
    outputs: Array, targets: Array, axis: int, classes: int | None
) -> tuple[Array, Array]:
    """Returns outputs and targets with the rows on the first axis, and classes where they were.

    Args:
        outputs: The outputs.
        targets: The targets, in the shape of the outputs or without the axis of the classes.
        axis: The axis of the rows in the targets.
        classes: The axis of the classes in the outputs; None for 1.
    """
    if outputs.ndim == targets.ndim:
        return rows_first(outputs, axis), rows_first(targets, axis)
    place = (1 if classes is None else classes) % outputs.ndim
    if not place or (*outputs.shape[:place], *outputs.shape[place + 1 :]) != targets.shape:
        return outputs, targets  # which the metric refuses
    own = axis + (place <= axis)
    return np.moveaxis(outputs, (own, place), (0, place)), rows_first(targets, axis)


class TrainingMetrics:
    """Metrics of the outputs of training steps, over an epoch.

    Args:
        measured: The metrics by name.
    """

    def __init__(self, measured: Mapping[str, Measured]) -> None:
        self._measured = measured
        self._unknown: set[str] = set()

    @property
    def outputs(self) -> list[str]:
        """The outputs of a step that the metrics read."""
        return list(dict.fromkeys(each.output for each in self._measured.values()))

    def begin(self) -> None:
        """Starts an epoch."""
        self._unknown = set()
        for each in self._measured.values():
            each.metric.reset()

    def resume(self, states: Mapping[str, State]) -> None:
        """Continues within an epoch.

        Metrics whose state is not known are left out in this epoch.

        Args:
            states: What `states` returned at this place.

        Raises:
            ModelError: If a state is not of this metric.
        """
        self.begin()
        self._unknown = set(self._measured) - set(states)
        for name in sorted(self._unknown):
            logger.warning(
                "fit: train_metrics: '%s' is left out in the epoch that is resumed, because its "
                "state after the finished batches was not saved",
                name,
            )
        for name, state in states.items():
            if name in self._measured:
                _restore(self._measured[name].metric, name, state)

    def add(self, found: Mapping[str, Array], batch: Checked) -> None:
        """Adds a batch.

        Args:
            found: The outputs of the step.
            batch: The batch.
        """
        for name, (metric, note, output) in self._measured.items():
            if name in self._unknown:
                continue
            add_batch(metric, note, found[output], batch)

    def states(self) -> dict[str, State]:
        """Returns the states after these batches, as far as they are small enough to be saved."""
        found = {n: _state(m.metric) for n, m in self._measured.items() if n not in self._unknown}
        return {name: state for name, state in found.items() if state is not None}

    def results(self, names: Sequence[str] | None = None) -> dict[str, float]:
        """Returns the values so far.

        Args:
            names: The metrics; all by default.
        """
        return {
            name: as_number(each.metric, each.metric.result())
            for name, each in self._measured.items()
            if name not in self._unknown and (names is None or name in names)
        }


def _state(metric: StreamingMetric) -> dict[str, Any] | None:
    """Returns copies of what a metric accumulates; None if it is not numbers and small arrays.

    Arguments are not accumulated, nor are fields that a metric is not compared by.
    """
    given = {each.name for each in dataclasses.fields(metric) if each.init or not each.compare}
    found: dict[str, Any] = {}
    for name, value in vars(metric).items():
        if name in given:
            continue
        if isinstance(value, np.ndarray | np.generic):
            if value.size > _LARGEST or value.dtype.kind not in "biuf":
                return None
            value = np.array(value)
        elif not isinstance(value, bool | int | float | str | None):
            return None
        found[name] = value
    return found


def _restore(metric: StreamingMetric, name: str, state: State) -> None:
    """Sets what a metric accumulates, of which `update` may have made a part."""
    present = _state(metric)
    fits = present is not None and (
        present.keys() <= state.keys() or state.keys() <= present.keys()
    )
    if not fits:
        raise ModelError(
            f"fit: the state of the metric '{name}' in the training to resume has {sorted(state)}, "
            f"this metric has {sorted(present or {})}; give the metrics with which it began"
        )
    for key, value in state.items():
        setattr(metric, key, value.copy() if isinstance(value, np.ndarray) else value)


def states_as_json(states: Mapping[str, State]) -> dict[str, dict[str, Any]]:
    """Returns states with arrays as JSON values.

    Example:
        >>> states_as_json({"f1": {"_hits": np.array([3, 4]), "_form": "classes"}})
        {'f1': {'_hits': {'dtype': 'int64', 'shape': [2], 'values': [3, 4]}, '_form': 'classes'}}
    """
    return {
        name: {key: _as_json(value) for key, value in state.items()}
        for name, state in states.items()
    }


def _as_json(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    shape, numbers = list(value.shape), value.reshape(-1).tolist()
    return {"dtype": str(value.dtype), "shape": shape, "values": numbers}


def read_states(found: object) -> dict[str, dict[str, Any]] | None:
    """Returns the states that `states_as_json` wrote; None if they are in another form."""
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        return None
    states: dict[str, dict[str, Any]] = {name: {} for name in found}
    for name, state in found.items():
        for key, value in state.items():
            if isinstance(value, dict):
                try:
                    value = np.array(value["values"], value["dtype"]).reshape(value["shape"])
                except (KeyError, TypeError, ValueError, OverflowError):
                    return None
                if value.dtype.kind not in "biuf":
                    return None
            elif not isinstance(value, bool | int | float | str | None):
                return None
            states[name][key] = value
    return states
