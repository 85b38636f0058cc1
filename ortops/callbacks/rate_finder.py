"""The learning-rate range test: a short training with increasing learning rates."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import number, whole_number
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.data import Data
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, OrtopsError
from ortops.graph.files.pictures import check_picture, new_panels, write_picture

_DIVERGED = 3.0  # times the lowest loss, or its decrease so far, above the lowest loss
_FORGETTING = 0.8  # decay of the moving average that detects divergence
_CLEARLY = 3.0  # standard errors of a slope
_WINDOW = 0.12  # the fraction of all rates, to each side, in the fit of a slope


@dataclass(frozen=True)
class LearningRateCurve:
    """The result of `find_learning_rate`.

    Attributes:
        rates: The tried learning rates, increasing.
        losses: The loss of the step with each rate. Each step continues from the previous one.
        smoothed: The losses without the noise of single batches.
        suggestion: The rate at which the smoothed loss decreases fastest over the logarithm of the
            rate; None if it never decreases significantly.

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
        """Plots the curve (requires matplotlib: ``pip install ortops[plot]``).

        Args:
            path: The file: ``.png``, ``.svg`` or ``.pdf``.

        Raises:
            ArgumentError: If its extension is not supported.
            OrtopsError: If its folder does not exist, or matplotlib is not installed.
        """
        check_picture("find_learning_rate", path)
        figure, (axes,) = new_panels("find_learning_rate", 1)
        axes.plot(self.rates, self.losses, ".", color="0.7", label="each batch")
        axes.plot(self.rates, self.smoothed, color="C0", label="smoothed")
        if self.suggestion is not None:
            label = f"steepest descent: {self.suggestion:.2g}"
            axes.axvline(self.suggestion, color="C1", linestyle="--", label=label)
        axes.set_xscale("log")
        low, high = float(self.smoothed.min()), float(self.smoothed[0])
        room = 0.4 * (high - low) if high > low else 0.1 * abs(high) + 1e-12
        finite = self.losses[np.isfinite(self.losses)]
        axes.set_ylim(
            max(low - room, float(finite.min()) - 0.1 * room),
            min(high + 1.5 * room, float(finite.max()) + 0.1 * room),
        )  # losses after divergence would hide the descent
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
    """Tries increasing learning rates and suggests one.

    Trains one step with each rate, evenly spaced on a logarithmic scale, until the loss diverges:
    the range test of Smith, "Cyclical Learning Rates for Training Neural Networks"
    (https://arxiv.org/abs/1506.01186). It runs in a copy of the session, which needs the same
    amount of memory again; the session itself does not change.

    Args:
        session: The session, in the state to start from. Its learning rate has no effect.
        data: The training data, as for `TrainingSession.fit`; repeated as often as needed.
        lowest: The first rate.
        highest: The last rate.
        steps: The number of rates; at least 10.
        batch_size: Rows per batch, if arrays are given.
        seed: Determines the order of the rows.
        path: A file for a plot of the curve (``.png``, ``.svg``, ``.pdf``; requires matplotlib).
        providers: Execution providers of the copy; by default, those of the session.

    Returns:
        The curve and the suggestion: ``session.learning_rate = curve.suggestion``.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: If the training has no learning rate, or one with a schedule, or the loss of
            the first steps is not finite.
        FeedError: If the data do not match the model.

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
        number(f"find_learning_rate: {what}", rate, above=0)
    if not lowest < highest:
        raise ArgumentError(
            f"find_learning_rate: lowest must be less than highest, got {lowest:g} and {highest:g}"
        )
    whole_number("find_learning_rate: steps", steps, 10)
    if path is not None:
        check_picture("find_learning_rate", path)
    if session.metadata.scheduled_learning_rate:
        raise OrtopsError(
            "find_learning_rate: the model's schedule determines the learning rate, so no other "
            "rate can be tried; build the model with a number as learning_rate for the search, "
            "then with the schedule"
        )
    sweep = _Sweep(np.geomspace(lowest, highest, steps))
    copy = TrainingSession(session.model(), providers=providers or session.providers)
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
            f"find_learning_rate: the loss is {losses[-1]} even at the lowest learning rate, "
            f"{lowest:g}; check the data and the model, or use a smaller lowest"
        )
    rates = sweep.rates[: len(losses)]
    smoothed, place = _steepest(np.log10(rates), losses, max(2, round(_WINDOW * steps)))
    suggestion = None if place is None else float(rates[place])
    curve = LearningRateCurve(rates, losses, smoothed, suggestion)
    if path is not None:
        curve.draw(path)
    return curve


class _Sweep(Callback):
    """Sets the learning rate of each step, and records the losses until they diverge."""

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
        """Whether the moving average of the loss is far above its minimum."""
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

    Both are computed from the least-squares line around each point. A descent of less than three
    standard errors of the slope is not significant.

    Args:
        x: The x coordinates, evenly spaced.
        y: The y coordinates.
        width: The number of points to each side in the fit of a line.
    """
    lines = [
        np.polyfit(x[around] - x[place], y[around], 1)
        for place in range(len(x))
        for around in [slice(max(0, place - width), place + width + 1)]
    ]
    slopes, smoothed = np.transpose(lines)
    whole = slice(width, len(x) - width)  # lines at the edges are fitted to few points
    if not smoothed[whole].size:
        return smoothed, None
    place = width + int(slopes[whole][: int(smoothed[whole].argmin()) + 1].argmin())
    noise = (y - smoothed)[: place + 1].std()
    spread = (x[1] - x[0]) * math.sqrt(width * (width + 1) * (2 * width + 1) / 3)
    return smoothed, place if slopes[place] < -_CLEARLY * noise / spread else None
