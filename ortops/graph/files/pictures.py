"""Plots with matplotlib, an optional package, without touching its global state."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ortops._common.optional import optional_module
from ortops.errors import ArgumentError
from ortops.graph.files.atomic import check_path, write_atomically

_FORMATS = (".pdf", ".png", ".svg")
_WIDTH, _HEIGHT = 7.0, 2.6  # inches of a panel


def check_picture(who: str, path: str | os.PathLike[str]) -> None:
    """Checks whether a plot can be written to a path, and whether matplotlib is installed.

    Raises:
        ArgumentError: If the file name extension is not supported.
        OrtopsError: If the folder does not exist, or matplotlib is not installed.
    """
    ending = Path(path).suffix.lower()
    if ending not in _FORMATS:
        raise ArgumentError(
            f"{who}: the file name must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}, got "
            f"'{os.fspath(path)}'"
        )
    check_path(who, path)
    optional_module(who, "matplotlib.figure", "plot")


def new_figure(who: str, size: tuple[float, float]) -> Any:
    """Returns an empty figure of a width and a height in inches."""
    module = optional_module(who, "matplotlib.figure", "plot")
    return module.Figure(figsize=size, layout="constrained")


def new_panels(who: str, count: int) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes, stacked vertically; the first one is taller."""
    heights = [1.35 * _HEIGHT] + [_HEIGHT] * (count - 1)
    figure = new_figure(who, (_WIDTH, sum(heights) + 0.4))
    panels = figure.subplots(count, 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes in panels[:, 0]:
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels[:, 0])


def write_picture(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure atomically: the file is complete at any time."""
    stream = io.BytesIO()
    figure.savefig(stream, format=Path(path).suffix.lower().removeprefix("."), dpi=120)
    write_atomically(path, stream.getvalue())
