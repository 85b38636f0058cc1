"""The loop of `fit`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops import metrics as metric_functions
from ortops.errors import DivergedError, OrtopsError
from ortops.metrics import Metric
from ortops.training.data import Data, Feeds, open_data, rows
from ortops.training.evaluation import number_of
from ortops.training.feeds import Inputs
from ortops.training.progress import Progress
from ortops.training.state import State
from ortops.training.step_graph import TrainingMetadata
from ortops.training.updates import SMALLEST_SCALE

__all__ = ["History", "Trainer", "fit"]

Array: TypeAlias = npt.NDArray[Any]
History: TypeAlias = list[dict[str, float]]


class Trainer(Protocol):
    """What the loop needs of a session."""

    learning_rate: float

    @property
    def noted(self) -> TrainingMetadata:
        """What the builder wrote about the model."""

    @property
    def state(self) -> State:
        """The variables."""

    @property
    def steps_done(self) -> int:
        """The number of finished steps."""

    def loss_names(self) -> list[str]:
        """Returns the names of the loss and its parts."""

    def target(self, metrics: Mapping[str, Metric]) -> str:
        """Returns the input that metrics compare outputs with."""

    def step(self, feeds: Feeds, *, outputs: Sequence[str]) -> Mapping[str, Array]:
        """Makes a step."""

    def evaluate(
        self, data: Data, *, batch_size: int, metrics: Sequence[str | Metric]
    ) -> dict[str, float]:
        """Computes loss and metrics of a data set."""


def fit(
    trainer: Trainer,
    data: Data,
    inputs: Inputs,
    *,
    epochs: int,
    batch_size: int,
    shuffle: bool,
    seed: int,
    validation: Data | None,
    metrics: Sequence[str | Metric],
    schedule: Callable[[float], float] | None,
    progress: bool,
    stop_on_nan: bool,
) -> History:
    """Trains on a data set; see `ortops.TrainingSession.fit`."""
    for what, number in (("epochs", epochs), ("seed", seed)):
        if not isinstance(number, SupportsIndex) or number < 0:
            raise OrtopsError(f"{what} is {number!r}; an integer of at least 0 is accepted")
    chosen = metric_functions.resolve(metrics)
    names = trainer.loss_names()
    if chosen:
        if validation is None:
            raise OrtopsError(
                f"metrics: '{next(iter(chosen))}' is computed from validation data; give "
                "validation=, or use evaluate"
            )
        trainer.target(chosen)
    source = open_data(data, inputs, batch_size=batch_size, epochs=epochs)
    if validation is not None:
        validation = open_data(validation, inputs, batch_size=batch_size, epochs=epochs)
    history: History = []
    for epoch in range(1, epochs + 1):
        if schedule is not None:
            trainer.learning_rate = schedule((epoch - 1) / epochs)
        order = np.random.default_rng((seed, trainer.steps_done)) if shuffle else None
        bar = Progress(epoch, epochs, source.batches) if progress else None
        totals, seen, done = dict.fromkeys(names, 0.0), 0, 0
        try:
            for arrays in source.epoch(epoch, order=order):
                size = rows(arrays)
                losses = trainer.step(arrays, outputs=list(totals))
                for name in totals:
                    totals[name] += number_of(losses[name]) * size
                loss, seen, done = number_of(losses[names[0]]), seen + size, done + 1
                if stop_on_nan:
                    _check_progress(trainer, loss, arrays, f"batch {done} of epoch {epoch}")
                if bar:
                    bar.update(done, {"loss": totals[names[0]] / seen})
        except BaseException:
            if bar:
                bar.abandon()
            raise
        result = {"loss": totals.pop(names[0]) / seen}
        result |= {name: total / seen for name, total in totals.items()}
        if validation is not None:
            measured = trainer.evaluate(validation, batch_size=batch_size, metrics=metrics)
            result |= {f"validation_{name}": value for name, value in measured.items()}
        history.append(result)
        if bar:
            bar.finish(done, result)
    return history


def _check_progress(trainer: Trainer, loss: float, feeds: Mapping[str, Array], place: str) -> None:
    """Refuses to go on after a loss that is no number, or where no step can be made."""
    if not math.isfinite(loss):
        raise _diverged(trainer, loss, feeds, place)
    noted = trainer.noted
    if {noted.loss_scale, noted.good_steps} <= trainer.state.keys():
        scale = float(trainer.state[noted.loss_scale])
        good_steps = int(trainer.state[noted.good_steps])
        if scale <= SMALLEST_SCALE and not good_steps:
            raise DivergedError(
                f"gradients: they are infinite or NaN after step {trainer.steps_done} ({place}), "
                f"down to the smallest scale of the loss, {scale:g}, so that steps change "
                "nothing; look at logarithms, divisions, roots and powers in the model and the "
                f"loss, then set state['{noted.loss_scale}']. stop_on_nan=False goes on all "
                "the same"
            )


def _diverged(
    trainer: Trainer, loss: float, feeds: Mapping[str, Array], place: str
) -> DivergedError:
    """Returns the error of a loss that is no number, with what to look at."""
    wrong = []
    for name, array in feeds.items():
        if array.dtype.kind not in "fc":
            continue
        places = np.argwhere(~np.isfinite(array))
        if len(places):
            value = array[tuple(places[0])]
            wrong.append(
                f"'{name}' has {len(places)} of {array.size} values that are not finite, first "
                f"{value} at {places[0].tolist()}"
            )
    if wrong:
        look = f"in the batch {', '.join(wrong)}: clean the data"
    else:
        try:
            rate = f" ({trainer.learning_rate:g})"
        except OrtopsError:  # the algorithm has none
            rate = ""
        look = (
            f"the batch is finite, so look at the learning rate{rate}, and at logarithms, "
            "divisions, roots and powers in the model and the loss"
        )
    return DivergedError(
        f"loss: it is {loss} in step {trainer.steps_done} ({place}); {look}. The session is in "
        "the state after this step; the weights of before are there only if they were saved. "
        "stop_on_nan=False goes on all the same"
    )
