"""A callback that plots the loss and the metrics."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ortops._common.optional import optional_module
from ortops.callbacks.monitor import path_of
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.session import TrainingSession
from ortops.graph.files.pictures import check_picture, new_panels, write_picture

_UNDRAWN = ("seconds", "steps")
_PAUSE = 4.0  # times the duration of drawing
_LOGARITHMIC = 20  # ratio of largest to smallest loss above which the axis is logarithmic
_WITH_MARKERS = 40  # up to this number of epochs


class LossPlot(Callback):
    """Plots the training and validation loss over the epochs, and each metric below.

    The plot is updated after each epoch, or less often if epochs are short, so that plotting takes
    at most a fifth of the time, and when fit ends. The file is complete at any time. The axis of a
    loss that falls by a large factor is logarithmic. The learning rate is plotted if it changes.
    Requires matplotlib (``pip install ortops[plot]``); other figures of the program are not
    affected.

    Args:
        path: The file: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ArgumentError: If the path is not valid; in fit, if its extension is not supported.
        OrtopsError: In fit, if the file's folder does not exist, or matplotlib is not installed.

    Example:
        >>> plot = LossPlot("loss.png")  # session.fit(data, validation=held, callbacks=[plot])
    """

    writes = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path_of("LossPlot", path)
        self._drawn = 0  # epochs
        self._next = 0.0  # when to draw again

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Checks that the plot can be written."""
        check_picture("LossPlot", self.path)
        self._drawn, self._next = 0, 0.0

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Updates the plot, if it is due."""
        begin = time.monotonic()
        if begin >= self._next:
            self._draw(record)
            end = time.monotonic()
            self._next = end + _PAUSE * (end - begin)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Plots all epochs."""
        if len(record.history) > self._drawn:
            self._draw(record)

    def _draw(self, record: Record) -> None:
        columns = record.history.history
        losses = {name: values for name, values in columns.items() if _is_loss(name)}
        others = {
            name: values
            for name, values in columns.items()
            if name not in losses and name not in _UNDRAWN and not _is_dull(name, values)
        }
        figure, panels = new_panels("LossPlot", 1 + len(others))
        _draw_losses(panels[0], losses)
        for axes, (name, values) in zip(panels[1:], others.items(), strict=True):
            color = "C1" if name.startswith("validation_") else "0.4"
            _line(axes, values, color=color)
            axes.set_ylabel(name.replace("_", " "))
        locator = optional_module("LossPlot", "matplotlib.ticker", "plot").MaxNLocator
        for axes in panels:
            axes.set_xlim(0.5, max(len(record.history), 2) + 0.5)
            axes.xaxis.set_major_locator(locator(integer=True, steps=[1, 2, 5, 10]))
        panels[-1].set_xlabel("epoch")
        figure.align_ylabels()
        write_picture(figure, self.path)
        self._drawn = len(record.history)


def _draw_losses(axes: Any, losses: Mapping[str, Sequence[float]]) -> None:
    parts = dict.fromkeys(name.removeprefix("validation_") for name in losses)
    styles = dict(zip(parts, itertools.cycle(("-", "--", ":", "-.")), strict=False))
    for name, values in losses.items():
        bare = name.removeprefix("validation_")
        kind, color = ("training", "C0") if bare == name else ("validation", "C1")
        part = bare.removeprefix("loss").removeprefix("_")
        label = f"{kind}: {part}" if part else kind
        width = 1.0 if part else 1.5
        _line(axes, values, color=color, label=label, linestyle=styles[bare], linewidth=width)
    finite = [abs(v) for values in losses.values() for v in values if math.isfinite(v)]
    positive = all(v > 0 for values in losses.values() for v in values if math.isfinite(v))
    if finite and positive and max(finite) > _LOGARITHMIC * min(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)


def _line(axes: Any, values: Sequence[float], **style: Any) -> None:
    marker = "o" if len(values) <= _WITH_MARKERS else None
    axes.plot(range(1, len(values) + 1), values, marker=marker, markersize=3, **style)


def _is_loss(name: str) -> bool:
    bare = name.removeprefix("validation_")
    return bare == "loss" or bare.startswith("loss_")


def _is_dull(name: str, values: Sequence[float]) -> bool:
    """Whether a metric is not worth a panel: a constant learning rate."""
    return name == "learning_rate" and len(set(values)) == 1
