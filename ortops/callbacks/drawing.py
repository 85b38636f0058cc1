"""Pictures by matplotlib, an optional package; what a program draws with it is left alone."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from ortops.callbacks.monitor import check_path, optional_module
from ortops.errors import OrtopsError
from ortops.graph.files.atomic import write_atomically

__all__ = ["check_picture", "new_panels", "write_picture"]

_FORMATS = (".pdf", ".png", ".svg")
_WIDTH, _HEIGHT = 7.0, 2.6  # inches of a panel


def check_picture(who: str, path: str | os.PathLike[str]) -> None:
    """Refuses a path that no picture can be written to, and says if matplotlib is missing.

    Raises:
        OrtopsError: If its ending is unknown, its folder does not exist, or matplotlib is not
            installed.
    """
    ending = Path(path).suffix.lower()
    if ending not in _FORMATS:
        raise OrtopsError(
            f"{who}: '{os.fspath(path)}' ends with {ending!r}; {', '.join(_FORMATS)} are accepted"
        )
    check_path(who, path)
    optional_module(who, "matplotlib.figure", "plot")


def new_panels(who: str, count: int) -> tuple[Any, list[Any]]:
    """Returns a figure, and axes one below the other, of which the first is the highest."""
    module = optional_module(who, "matplotlib.figure", "plot")
    heights = [1.35 * _HEIGHT] + [_HEIGHT] * (count - 1)
    figure = module.Figure(figsize=(_WIDTH, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(count, 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes in panels[:, 0]:
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(panels[:, 0])


def write_picture(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure, so that at any time the old picture or the new is there, whole."""
    stream = io.BytesIO()
    figure.savefig(stream, format=Path(path).suffix.lower().removeprefix("."), dpi=120)
    write_atomically(path, stream.getvalue())
