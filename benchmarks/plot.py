"""The results as a picture."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS, TORCH
from benchmarks.report import START_TARGET, Report, reference
from benchmarks.works import WORKS

__all__ = ["write"]


def write(report: Report, path: Path) -> None:
    """Writes a PNG: time, start and memory as ratios, with the targets as lines.

    Args:
        report: What was measured.
        path: The file. Without matplotlib nothing is written, and a message says so.
    """
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path.name}: matplotlib is not installed; no plot", file=sys.stderr)
        return
    from matplotlib import pyplot

    panels = _panels(report)
    if not panels:
        return
    rows = [work for work in WORKS if any(work in ratios for _, ratios, _ in panels)]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(2 + 4.5 * len(panels), 1 + len(rows)), squeeze=False, sharey=True
    )
    for axis, (title, ratios, targets) in zip(axes[0], panels, strict=True):
        _bars(axis, rows, ratios, targets)
        axis.set_title(title)
    axes[0][0].set_yticks(
        [row + 0.4 for row in range(len(rows))], [work.replace(", ", ",\n", 1) for work in rows]
    )
    axes[0][0].set_ylim(len(rows) - 0.1, -0.1)
    handles = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


Ratios = Mapping[str, Mapping[str, Sequence[float]]]
"""By work and peer, in each round."""


def _panels(report: Report) -> list[tuple[str, Ratios, Mapping[str, float]]]:
    """Returns title, ratios and targets of each picture."""
    panels: list[tuple[str, Ratios, Mapping[str, float]]] = []
    steps = {
        work: {peer: result.ratios(by_peer[against]) for peer, result in by_peer.items()}
        for work, by_peer in report.times.items()
        if (against := reference(work, by_peer))
    }
    if steps:
        targets = {work: WORKS[work].target for work in steps}
        shown = {work: target for work, target in targets.items() if target is not None}
        panels.append(("time of a step / best peer's (update: C)", steps, shown))

    def starts(of: Callable[[Any], float]) -> Ratios:
        return {
            work: {
                peer: [of(a) / of(b) for a, b in zip(each, by_peer[TORCH], strict=True)]
                for peer, each in by_peer.items()
            }
            for work, by_peer in report.starts.items()
            if TORCH in by_peer
        }

    for title, of, aims in (
        ("start to first step's end / torch eager's", _seconds, dict.fromkeys(WORKS, START_TARGET)),
        (
            "peak memory / torch eager's",
            _megabytes,
            {w: it.memory_target for w, it in WORKS.items()},
        ),
    ):
        if ratios := starts(of):
            panels.append((title, ratios, {work: aims[work] for work in ratios}))
    return panels


def _seconds(start: Any) -> float:
    return float(start.seconds)


def _megabytes(start: Any) -> float:
    return float(start.megabytes)


def _bars(axis: Any, rows: Sequence[str], ratios: Ratios, targets: Mapping[str, float]) -> None:
    colors = {peer: f"C{number}" for number, peer in enumerate(PEERS)}
    for row, by_peer in ((rows.index(work), by_peer) for work, by_peer in ratios.items()):
        height = 0.8 / len(by_peer)
        for i, (peer, values) in enumerate(by_peer.items()):
            middle = statistics.median(values)
            axis.barh(
                row + (i + 0.5) * height,
                middle,
                height,
                xerr=[[middle - min(values)], [max(values) - middle]],
                label=peer,
                color=colors[peer],
                error_kw={"elinewidth": 0.7},
            )
        if rows[row] in targets:
            axis.vlines(targets[rows[row]], row, row + 0.8, color="black", label="target")
    axis.axvline(1, color="grey", linewidth=0.5)
    longest = max(
        statistics.median(each) for by_peer in ratios.values() for each in by_peer.values()
    )
    # A peer that takes ten times as long says no more than one that takes four.
    axis.set_xlim(0, min(4, 1.2 * longest))
