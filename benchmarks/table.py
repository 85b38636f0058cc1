"""The results as a Markdown table."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib import metadata

from benchmarks.measure import CHECKED_STEPS, THREADS, Effort, Result
from benchmarks.peers import LOWERED, TORCH
from benchmarks.works import WORKS, OptimizerStep, TrainingStep

__all__ = ["baseline", "disagreements", "markdown"]

Results = Mapping[str, Mapping[str, Result]]
"""Results by work and peer."""

PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime-extensions", "torch")


def baseline(results: Mapping[str, Result]) -> str:
    """Returns the peer that the others are compared with: PyTorch, where it is installed."""
    return TORCH if TORCH in results else LOWERED


def disagreements(results: Results) -> list[str]:
    """Says which results differ from the baseline's by more than the work's tolerance."""
    return [
        f"{work}: {peer} differs from {baseline(by_peer)} by {difference:.1e}; "
        f"at most {WORKS[work].tolerance:.0e} is right"
        for work, by_peer in results.items()
        for peer, result in by_peer.items()
        if (difference := result.difference(by_peer[baseline(by_peer)])) > WORKS[work].tolerance
    ]


def markdown(results: Results, optimizer: str, effort: Effort) -> str:
    """Returns the table, and above it what it was measured with."""
    return "\n".join([*_heading(optimizer, effort), "", *_rows(results)]) + "\n"


def _heading(optimizer: str, effort: Effort) -> Iterator[str]:
    versions = [f"Python {platform.python_version()}", *filter(None, map(_version, PACKAGES))]
    losses, updates = (
        next(f"{work.tolerance:.0e}" for work in WORKS.values() if isinstance(work, kind))
        for kind in (TrainingStep, OptimizerStep)
    )
    yield f"- {date.today()}; {', '.join(versions)}"
    yield f"- {os.cpu_count()} cores, {THREADS} threads; optimizer: {optimizer}"
    yield (
        f"- ms: the median of a step in {effort.rounds} interleaved rounds of {effort.turn:g} s, "
        "after warm-up; in brackets the lowest and highest median of a round"
    )
    yield "- ratio: the median of the ratios in a round"
    yield (
        f"- difference of what the first {CHECKED_STEPS} steps give, relative: losses, with "
        f"{TrainingStep.checked_optimizer} (at most {losses}), or updated parameters ({updates})"
    )


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _rows(results: Results) -> Iterator[str]:
    reference = {baseline(by_peer) for by_peer in results.values()}
    yield f"| work | peer | ms | ratio to {' or '.join(sorted(reference))} | difference |"
    yield "| --- | --- | --- | --- | --- |"
    for work, by_peer in results.items():
        base = by_peer[baseline(by_peer)]
        for peer, result in by_peer.items():
            ratio, difference = "1", "–"
            if result is not base:
                ratio = f"{statistics.median(result.ratios(base)):.2f}"
                difference = f"{result.difference(base):.0e}"
            yield f"| {work} | {peer} | {_time(result.seconds)} | {ratio} | {difference} |"


def _time(seconds: Sequence[float]) -> str:
    median, low, high = (
        _three_digits(1e3 * value)
        for value in (statistics.median(seconds), min(seconds), max(seconds))
    )
    return f"{median} ({low}–{high})"


def _three_digits(value: float) -> str:
    """Returns a positive number with three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
