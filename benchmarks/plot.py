"""The results as one chart: step time, start-up time and memory of ortops, PyTorch and JAX.

``python -m benchmarks.plot results/results.json speed.png`` plots the results of an earlier run.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import LOWERED, TORCH
from benchmarks.works import WORKS, Export, Update

__all__ = ["LIMIT", "SERIES", "Medians", "charted", "medians", "write"]

Medians = Mapping[str, Mapping[str, float]]
"""Medians of a quantity, by workload and peer."""

SERIES = {
    LOWERED: ("ortops", "#0072b2"),
    TORCH: ("torch eager", "#e69f00"),
    "torch.compile": ("torch.compile", "#cc79a7"),
    "JAX": ("JAX", "#009e73"),
}
"""The peers in the chart, with their names and colors, which color-blind people can distinguish."""

LIMIT = 2.0
"""The length at which bars are cut off, with a mark, relative to PyTorch's."""

_INK, _FAINT, _PAPER = "#1f2328", "#6e7781", "#ffffff"


class _Panel(NamedTuple):
    """One part of the chart.

    Attributes:
        title: Its title.
        values: The values.
        label: Formats a value with its unit.
    """

    title: str
    values: Medians
    label: Callable[[float], str]


def medians(results: Mapping[str, Any]) -> dict[str, Medians]:
    """Returns the medians of the values in ``results.json``.

    Args:
        results: The content of ``results.json``.

    Returns:
        Seconds of a ``"step"``, seconds of a ``"start"``, and megabytes of ``"memory"``.
    """
    times, starts = results["times"], results["starts"]
    return {
        "step": _each(times, lambda found: found["seconds"]),
        "start": _each(starts, lambda found: [each["seconds"] for each in found]),
        "memory": _each(starts, lambda found: [each["megabytes"] for each in found]),
    }


def _each(
    measured: Mapping[str, Mapping[str, Any]], values: Callable[[Any], Iterable[float]]
) -> Medians:
    return {
        work: {peer: statistics.median(values(found)) for peer, found in by_peer.items()}
        for work, by_peer in measured.items()
    }


def charted(measured: Iterable[str]) -> list[str]:
    """Returns the workloads in the chart: training steps, each network once.

    If several exporters wrote the file of a network, the last one is used.

    Args:
        measured: Names in `WORKS`.
    """
    of_network: dict[str, str] = {}
    names = set(measured)
    for name, work in WORKS.items():
        if name in names and not isinstance(work, Update):
            of_network[work.name if isinstance(work, Export) else name] = name
    return list(of_network.values())


def write(results: Path, path: Path) -> None:
    """Draws the chart.

    Bars are relative to eager PyTorch, so that workloads of very different size fit into one chart.
    The number at the end of a bar is the measured value.

    Args:
        results: ``results.json``, as `benchmarks.report.Report.write` writes it.
        path: The PNG file. Without matplotlib, a message is printed and nothing is written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name}: matplotlib is not installed; no plot", file=sys.stderr)
        return
    found = medians(json.loads(results.read_text(encoding="utf-8")))
    panels = [
        _Panel("training step", found["step"], _time),
        _Panel("process start to end of first step", found["start"], _time),
        _Panel("peak memory", found["memory"], _memory),
    ]
    works = charted(work for panel in panels for work, by in panel.values.items() if TORCH in by)
    panels = [panel for panel in panels if any(work in panel.values for work in works)]
    if not panels:
        print(f"{path.name}: no training step was measured with {TORCH}; no plot", file=sys.stderr)
        return
    from matplotlib import pyplot

    height = 1.5 + 0.72 * len(works)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(9, height), squeeze=False, sharey=True, facecolor=_PAPER
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        _draw(axis, works, panel)
    axes[0][0].set_yticks(range(len(works)), [_name(work) for work in works], fontsize=8.5)
    axes[0][0].set_ylim(len(works) - 0.45, -0.55)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for _, color in SERIES.values()]
    names = [name for name, _ in SERIES.values()]
    figure.legend(handles, names, loc="outside upper center", ncols=len(SERIES), frameon=False)
    note = (
        f"Relative to {TORCH}: shorter is better. A slash marks a bar that is cut. "
        "Start and memory of torch.compile: not measured."
    )
    figure.supxlabel(note, fontsize=8, color=_FAINT)
    figure.set_layout_engine("constrained", w_pad=0.08)
    figure.savefig(path, dpi=200, facecolor=_PAPER)
    pyplot.close(figure)


def _draw(axis: Any, works: list[str], panel: _Panel) -> None:
    """Draws the bars of one panel."""
    thick = 0.8 / len(SERIES)
    for row, work in enumerate(works):
        by_peer = panel.values.get(work, {})
        if TORCH not in by_peer:
            continue
        for place, (peer, (_, color)) in enumerate(SERIES.items()):
            if peer not in by_peer:
                continue
            middle = row + (place - (len(SERIES) - 1) / 2) * thick
            ratio = by_peer[peer] / by_peer[TORCH]
            length = min(ratio, LIMIT)
            axis.barh(middle, length, thick * 0.9, color=color)
            if ratio > LIMIT:
                slash = ([LIMIT * 0.93, LIMIT * 0.96], [middle + thick / 2, middle - thick / 2])
                axis.plot(*slash, color=_PAPER, linewidth=2.5, solid_capstyle="butt")
            text = panel.label(by_peer[peer])
            axis.text(length + 0.03, middle, text, va="center", fontsize=7.5, color=_INK)
    axis.axvline(1, color=_FAINT, linewidth=0.7, linestyle=":", zorder=0)
    axis.set_xlim(0, LIMIT * 1.22)
    axis.set_xticks([0, 0.5, 1, 1.5, 2], ["0", "0.5", "1", "1.5", "2"], fontsize=8, color=_FAINT)
    axis.set_title(panel.title, fontsize=9.5, color=_INK)
    axis.tick_params(length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.spines["left"].set_color(_FAINT)


def _name(work: str) -> str:
    """Breaks the name of a workload into two lines, without the exporter."""
    first, _, rest = work.partition(", ")
    parts = [part for part in rest.split(", ") if part and not part.endswith("'s file")]
    return f"{first}\n{', '.join(parts)}" if parts else first


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def _memory(megabytes: float) -> str:
    return f"{megabytes:.0f} MB"


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:3]))
