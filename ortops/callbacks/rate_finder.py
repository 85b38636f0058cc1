"""Which learning rate to begin with: a short training with rates that grow."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops.callbacks.drawing import check_picture, new_panels, write_picture
from ortops.callbacks.monitor import check_count, check_number
from ortops.errors import OrtopsError
from ortops.training.callback import Callback, Record
from ortops.training.data import Data
from ortops.training.session import TrainingSession

__all__ = ["LearningRateCurve", "find_learning_rate"]

_DIVERGED = 3.0  # so many times the loss, or its fall so far, above the lowest
_FORGETTING = 0.8  # of the average that tells divergence
_CLEARLY = 3.0  # standard errors of a slope
_WINDOW = 0.12  # the share of all rates that a slope is taken from, to each side


@dataclass(frozen=True)
class LearningRateCurve:
    """What `find_learning_rate` found.

    Attributes:
        rates: The learning rates that were tried, growing.
        losses: The loss of the step with that rate, as the steps before it have left the model.
        smoothed: The same without the noise of single batches.
        suggestion: The rate at which the smoothed loss falls fastest over the logarithm of the
            rate; None where it never clearly falls.

    Example:
        >>> from ortops.callbacks import LearningRateCurve
        >>> rates, losses = np.array([0.001, 0.01, 0.1]), np.array([1.0, 0.5, 0.25])
        >>> LearningRateCurve(rates, losses, smoothed=losses, suggestion=0.01).suggestion
        0.01
    """

    rates: npt.NDArray[np.float64]
    losses: npt.NDArray[np.float64]
    smoothed: npt.NDArray[np.float64]
    suggestion: float | None

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the curve (needs matplotlib: ``pip install ortops[plot]``).

        Args:
            path: The picture: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            OrtopsError: If the ending is another, there is no such folder, or matplotlib is not
                installed.
        """
        check_picture("find_learning_rate", path)
        figure, (axes,) = new_panels("find_learning_rate", 1)
        axes.plot(self.rates, self.losses, ".", color="0.7", label="each batch")
        axes.plot(self.rates, self.smoothed, color="C0", label="smoothed")
        if self.suggestion is not None:
            label = f"falls fastest: {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=label)
        axes.set_xscale("log")
        low, high = float(self.smoothed.min()), float(self.smoothed[0])
        room = 0.4 * (high - low) if high > low else 0.1 * abs(high) + 1e-12
        finite = self.losses[np.isfinite(self.losses)]
        axes.set_ylim(
            max(low - room, float(finite.min()) - 0.1 * room),
            min(high + 1.5 * room, float(finite.max()) + 0.1 * room),
        )  # what comes after divergence would hide the fall
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.legend(frameon=False)
        write_picture(figure, path)


def find_learning_rate(
    session: TrainingSession,
    data: Data,
    *,
    lowest: float = 1e-7,
    highest: float = 1.0,
    steps: int = 100,
    batch_size: int = 32,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    providers: Sequence[Any] | None = None,
) -> LearningRateCurve:
    """Tries learning rates, each a little higher than the one before, and suggests one.

    Each step has a rate of its own, evenly spaced on a logarithmic scale, until the loss diverges:
    the range test of Smith, "Cyclical Learning Rates for Training Neural Networks"
    (https://arxiv.org/abs/1506.01186). It runs in a copy of the session, which takes as much memory
    again; the session itself is only read.

    Args:
        session: The session, in the state to begin from. Its learning rate is not looked at.
        data: What to train on, as for `TrainingSession.fit`; gone through as often as needed.
        lowest: The first rate.
        highest: The last one.
        steps: How many are tried.
        batch_size: Rows in a batch, where arrays are given.
        seed: Determines the order of the rows.
        path: Where to draw the curve (``.png``, ``.svg``, ``.pdf``; needs matplotlib).
        providers: Execution providers of the copy.

    Returns:
        The curve and the suggestion: ``session.learning_rate = curve.suggestion``.

    Raises:
        OrtopsError: If an argument is not as told here, or the training has no learning rate, or
            one that follows a schedule; or if the loss of the first steps is no finite number.
        FeedError: If the data do not fit the model.

    Example:
        >>> import ortops
        >>> tape = ortops.Tape(name="line")
        >>> with tape:
        ...     x = tape.input("x", np.float32, ["batch", 1])
        ...     y = tape.output(x @ tape.initializer("w", np.zeros((1, 1), np.float32)), "y")
        >>> session = ortops.TrainingSession(ortops.build_training_model(
        ...     tape.model(), loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.1)))
        >>> data = {"x": np.ones((8, 1), np.float32), "targets": np.ones((8, 1), np.float32)}
        >>> curve = find_learning_rate(session, data, lowest=1e-4, highest=10)
        >>> 0.01 < curve.suggestion < 1
        True
        >>> session.steps_done, session.learning_rate  # nothing has happened to it
        (0, 0.10000000149011612)
    """
    for what, rate in (("lowest", lowest), ("highest", highest)):
        check_number("find_learning_rate", what, rate)
    if not lowest < highest:
        raise OrtopsError(
            f"find_learning_rate: lowest is {lowest:g} and highest {highest:g}; lowest < highest "
            "is accepted"
        )
    if check_count("find_learning_rate", "steps", steps) < 10:
        raise OrtopsError(f"find_learning_rate: steps is {steps}; at least 10 make a curve")
    if path is not None:
        check_picture("find_learning_rate", path)
    if session.metadata.scheduled_learning_rate:
        raise OrtopsError(
            "find_learning_rate: the learning rate follows a schedule of the model, so that each "
            "step would have another than is tried; build the model with a number as learning_rate "
            "to search, and then with the schedule"
        )
    sweep = _Sweep(np.geomspace(lowest, highest, steps))
    copy = TrainingSession(session.model(), providers=providers)
    copy.fit(
        data,
        epochs=steps,
        batch_size=batch_size,
        seed=seed,
        progress=False,
        stop_on_nan=False,
        callbacks=[sweep],
    )
    losses = np.array(sweep.losses)
    if len(losses) < 3:
        raise OrtopsError(
            f"find_learning_rate: the loss is {losses[-1]} at a learning rate of {lowest:g} "
            "already; look at the data and the model, or give a smaller lowest"
        )
    rates = sweep.rates[: len(losses)]
    smoothed, place = _steepest(np.log10(rates), losses, max(2, round(_WINDOW * steps)))
    suggestion = None if place is None else float(rates[place])
    curve = LearningRateCurve(rates, losses, smoothed, suggestion)
    if path is not None:
        curve.draw(path)
    return curve


class _Sweep(Callback):
    """Gives each step its learning rate, and remembers the losses until they diverge."""

    def __init__(self, rates: npt.NDArray[np.float64]) -> None:
        self.rates = rates
        self.losses: list[float] = []
        self._average = 0.0
        self._first = self._lowest = math.inf

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        session.learning_rate = float(self.rates[0])

    def on_step(self, record: Record, session: TrainingSession) -> None:
        loss = record.values["loss"]
        if not math.isfinite(loss) or self._diverges(loss):
            record.stop("the loss diverges")
            return
        self.losses.append(loss)
        if len(self.losses) == len(self.rates):
            record.stop("all learning rates have been tried")
        else:
            session.learning_rate = float(self.rates[len(self.losses)])

    def _diverges(self, loss: float) -> bool:
        """Whether a loss, averaged with those before, is far above the lowest average."""
        count = len(self.losses) + 1
        self._average = _FORGETTING * self._average + (1 - _FORGETTING) * loss
        average = self._average / (1 - _FORGETTING**count)
        if count == 1:
            self._first = average
        self._lowest = min(self._lowest, average)
        scale = max(abs(self._lowest), self._first - self._lowest)
        return average > self._lowest + _DIVERGED * scale and scale > 0


def _steepest(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], width: int
) -> tuple[npt.NDArray[np.float64], int | None]:
    """Returns a smoothed curve, and the point of its steepest descent before its minimum, if any.

    Both come from the least-squares line around each point. A descent that is less than three
    standard errors of the slope is none.

    Args:
        x: Where the points are, evenly spaced.
        y: Their heights.
        width: How many points to each side belong to a line.
    """
    lines = [
        np.polyfit(x[around] - x[place], y[around], 1)
        for place in range(len(x))
        for around in [slice(max(0, place - width), place + width + 1)]
    ]
    slopes, smoothed = np.transpose(lines)
    whole = slice(width, len(x) - width)  # lines at the edges have few points
    if not smoothed[whole].size:
        return smoothed, None
    place = width + int(slopes[whole][: int(smoothed[whole].argmin()) + 1].argmin())
    noise = (y - smoothed)[: place + 1].std()
    spread = (x[1] - x[0]) * math.sqrt(width * (width + 1) * (2 * width + 1) / 3)
    return smoothed, place if slopes[place] < -_CLEARLY * noise / spread else None
