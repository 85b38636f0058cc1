"""The results as JSON and Markdown tables, compared with targets."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from benchmarks import machine, own
from benchmarks.measure import CHECKED_STEPS, Effort, Result
from benchmarks.peers import LOWERED, PEERS, PYTHON, RUN_STEPS, STEP_GRAPH, TORCH, C
from benchmarks.start import Start
from benchmarks.task import THREADS
from benchmarks.works import DEPTHS, WORKS, TrainingStep, Update

__all__ = ["Goal", "Report", "reference"]

PACKAGES = ("numpy", "onnx", "onnxruntime", "onnxruntime-extensions", "torch", "jax")
START_TARGET = 0.3
KERNEL_TARGET, GROWTH_TARGET = 3.0, 1.1
CREATION_TARGET, IMPORT_TARGET = 5.0, 0.3  # seconds


@dataclass(frozen=True)
class Goal:
    """A performance target.

    Attributes:
        work: The workload, or another subject.
        what: The measured quantity of ortops.
        against: The peer or quantity that it is divided by; empty for seconds.
        values: The measured values, one or one per round.
        target: The upper limit for their median.
    """

    work: str
    what: str
    against: str
    values: Sequence[float]
    target: float

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return statistics.median(self.values) <= self.target


@dataclass
class Report:
    """All measurements and their settings.

    Attributes:
        optimizer: The optimizer of the timed steps.
        effort: The duration of measurements.
        missing: Skipped peers and workloads, with reasons.
        times: Results by workload and peer.
        starts: Starts by workload and peer.
        depths: Seconds per step in each round, by workload of `DEPTH_WORKS`.
        creation: Seconds to create the session of a deep transformer.
        imports: Seconds to import `TrainingSession`.
        fits: The ratio of the time of `fit` to a loop of steps in each round, by workload.
        products: The speed of matrix products in GFLOP/s, by product and library.
    """

    optimizer: str
    effort: Effort
    missing: dict[str, str] = field(default_factory=dict)
    times: dict[str, Mapping[str, Result]] = field(default_factory=dict)
    starts: dict[str, Mapping[str, Sequence[Start]]] = field(default_factory=dict)
    depths: Mapping[str, Sequence[float]] = field(default_factory=dict)
    creation: Sequence[float] = ()
    imports: Sequence[float] = ()
    fits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    products: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def disagreements(self) -> list[str]:
        """Describes results that differ from the reference by more than the tolerance."""
        found = []
        for work, by_peer in self.times.items():
            base = _base(by_peer)
            for peer, result in by_peer.items():
                for gap, limit, steps in (
                    (result.difference(by_peer[base]), WORKS[work].tolerance, "checked"),
                    (result.timed_difference(by_peer[base]), WORKS[work].timed_tolerance, "timed"),
                ):
                    if gap > limit:
                        found.append(
                            f"{work}: {peer} differs from {base} by {gap:.1e} in the {steps} "
                            f"steps; the tolerance is {limit:.0e}"
                        )
        return found

    def goals(self) -> Iterator[Goal]:
        """Yields all targets that were measured."""
        for work, by_peer in self.times.items():
            it, against = WORKS[work], reference(work, by_peer)
            for peer, target in ((LOWERED, it.target), (RUN_STEPS, it.run_steps)):
                if target is not None and against and peer in by_peer:
                    ratios = by_peer[peer].ratios(by_peer[against])
                    yield Goal(work, f"time of a step, {_way(peer)}", against, ratios, target)
        for work, starts in self.starts.items():
            if {LOWERED, TORCH} <= set(starts):
                pairs = list(zip(starts[LOWERED], starts[TORCH], strict=True))
                ratios = [a.seconds / b.seconds for a, b in pairs]
                yield Goal(work, "start to the end of the first step", TORCH, ratios, START_TARGET)
                ratios = [a.megabytes / b.megabytes for a, b in pairs]
                yield Goal(work, "peak memory", TORCH, ratios, WORKS[work].memory_target)
        for work, by_peer in self.times.items():
            if isinstance(WORKS[work], Update) and {LOWERED, PYTHON} <= set(by_peer):
                ratios = by_peer[PYTHON].ratios(by_peer[LOWERED])
                yield Goal(work, f"time, {_way(PYTHON)}", _way(LOWERED), ratios, KERNEL_TARGET)
        for work, by_peer in self.times.items():
            if work in own.STEP_GRAPH_TARGETS and {LOWERED, STEP_GRAPH} <= set(by_peer):
                ratios, target = (
                    by_peer[STEP_GRAPH].ratios(by_peer[LOWERED]),
                    own.STEP_GRAPH_TARGETS,
                )
                yield Goal(work, f"time, {_way(STEP_GRAPH)}", _way(LOWERED), ratios, target[work])
        if self.depths:
            middle, deepest = own.compared()
            what = f"time of a layer in {deepest}"
            yield Goal("depth", what, middle, own.growth(self.depths), GROWTH_TARGET)
        if self.creation:
            what = f"s to create the session, {own.CREATION_DEPTH} layers"
            yield Goal("transformer", what, "", self.creation, CREATION_TARGET)
        for work, ratios in self.fits.items():
            yield Goal(work, "time of `fit`", "a loop of `step`", ratios, own.FIT_TARGETS[work])
        if self.imports:
            yield Goal("import", "s to import TrainingSession", "", self.imports, IMPORT_TARGET)

    def write(self, folder: Path) -> None:
        """Writes ``results.md`` and ``results.json``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.md").write_text(self.markdown(), encoding="utf-8")
        data = {"versions": machine.versions(PACKAGES), "machine": machine.cpu()}
        data |= {"date": str(date.today())}
        data |= asdict(self) | {
            "times": {work: _figures(each) for work, each in self.times.items()}
        }
        data["goals"] = [asdict(goal) | {"met": goal.met} for goal in self.goals()]
        text = json.dumps(data, indent=1, ensure_ascii=False)
        (folder / "results.json").write_text(text, encoding="utf-8")

    # ----------------------------------------------------------------------------------- tables

    def markdown(self) -> str:
        """Returns the tables, preceded by the settings of the measurements."""
        parts = [self._heading(), self._goals(), self._times(), self._starts(), self._depths()]
        return "\n\n".join(filter(None, map("\n".join, parts))) + "\n"

    def _heading(self) -> Iterator[str]:
        effort, works = self.effort, WORKS.values()
        training = next(work for work in works if isinstance(work, TrainingStep))
        update = next(work for work in works if isinstance(work, Update))
        versions = ", ".join(f"{k} {v}" for k, v in machine.versions(PACKAGES).items())
        yield f"- {date.today()}; {versions}"
        yield f"- {machine.cpu()}; {THREADS} threads; optimizer: {self.optimizer}"
        yield (
            f"- a time is the median time per step in {effort.rounds} interleaved rounds of "
            f"{effort.turn:g} s, after warm-up; brackets: the lowest and the highest round"
        )
        yield "- a ratio is the median of the ratios of all rounds"
        yield (
            f"- differences are relative, of the first {CHECKED_STEPS} steps: losses with "
            f"{training.checked_optimizer} (tolerance {training.tolerance:.0e}) and with the timed "
            f"optimizer (tolerance {training.timed_tolerance:.0e}), or updated parameters "
            f"(tolerance {update.tolerance:.0e})"
        )
        for product, speeds in self.products.items():
            shown = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
            yield f"- product {product} of 1024 × 1024, GFLOP/s: {shown}"
        for peer, reason in self.missing.items():
            yield f"- skipped: {peer}: {reason}"

    def _goals(self) -> Iterator[str]:
        goals = list(self.goals())
        if not goals:
            return
        yield "| workload | quantity | ratio to | measured | target | |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for goal in goals:
            over = statistics.median(goal.values) / goal.target - 1
            judged = "met" if goal.met else f"missed by {over:.0%}"
            yield (
                f"| {goal.work} | {goal.what} | {goal.against or '–'} | {_spread(goal.values)} | "
                f"{goal.target:g} | {judged} |"
            )

    def _times(self) -> Iterator[str]:
        if not self.times:
            return
        yield "| workload | peer | ms per step | ratio | to | difference | in timed steps |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
        for work, by_peer in self.times.items():
            against, base = reference(work, by_peer) or LOWERED, by_peer[_base(by_peer)]
            for peer, result in by_peer.items():
                gaps = (result.difference(base), result.timed_difference(base))
                shown = ["–", "–"] if result is base else [f"{gap:.0e}" for gap in gaps]
                ratios = _spread(result.ratios(by_peer[against]))
                yield (
                    f"| {work} | {peer} | {_spread([1e3 * each for each in result.seconds])} | "
                    f"{'1' if peer == against else ratios} | {against} | {' | '.join(shown)} |"
                )

    def _starts(self) -> Iterator[str]:
        if not self.starts:
            return
        yield "| workload | peer | s from start to the end of the first step | peak memory, MB |"
        yield "| --- | --- | --- | --- |"
        for work, by_peer in self.starts.items():
            for peer, starts in by_peer.items():
                yield (
                    f"| {work} | {peer} | {_spread([each.seconds for each in starts])} | "
                    f"{_spread([each.megabytes for each in starts])} |"
                )

    def _depths(self) -> Iterator[str]:
        if not self.depths:
            return
        yield "| workload | ms per step | µs per layer |"
        yield "| --- | --- | --- |"
        for (name, seconds), depth in zip(self.depths.items(), DEPTHS, strict=True):
            layer = [1e6 * each / depth for each in seconds]
            yield f"| {name} | {_spread([1e3 * each for each in seconds])} | {_spread(layer)} |"


def _figures(by_peer: Mapping[str, Result]) -> dict[str, dict[str, object]]:
    """Returns times and differences by peer, without the computed values."""
    base = by_peer[_base(by_peer)]
    return {
        peer: {
            "seconds": list(result.seconds),
            "difference": result.difference(base),
            "timed_difference": result.timed_difference(base),
        }
        for peer, result in by_peer.items()
    }


def reference(work: str, by_peer: Mapping[str, Result]) -> str:
    """Returns the peer to compare with: the fastest one that is not ortops.

    Updates are compared with the loop in C, if measured. Empty if there is no other peer.
    """
    others = [peer for peer in by_peer if not PEERS[peer].ours]
    if isinstance(WORKS[work], Update) and C in others:
        return C
    return min(others, key=lambda peer: statistics.median(by_peer[peer].seconds), default="")


def _base(by_peer: Mapping[str, Result]) -> str:
    """Returns the peer with the reference values: PyTorch, if measured."""
    return TORCH if TORCH in by_peer else next(iter(by_peer))


def _way(peer: str) -> str:
    """Returns the short name of a way to run ortops."""
    return peer.removeprefix("ortops, ")


def _spread(values: Sequence[float]) -> str:
    """Returns the median, followed by minimum and maximum in brackets if there are several."""
    median = _three_digits(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({_three_digits(min(values))}–{_three_digits(max(values))})"


def _three_digits(value: float) -> str:
    """Formats a positive number with three significant digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".removesuffix(".")
