"""Writes the results of ./scripts/benchmark to README.md and ortops/docs/speed.md.

Reads results/results.json of a complete benchmark, and plots .images/speed.png.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import plot
from benchmarks.peers import LOWERED, RUN_STEPS, TORCH, C

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "results"
PAGE = ROOT / "ortops" / "docs" / "speed.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
STEP = "time of a step, standard operators"
START, MEMORY = "start to the end of the first step", "peak memory"
RATIOS = (STEP, "time of a step, run_steps", START, MEMORY)
"""The quantities that are compared with peers; other goals compare ortops with itself."""
STEP_PEERS = (LOWERED, RUN_STEPS, TORCH, "torch.compile", "JAX", C)
START_PEERS = (LOWERED, TORCH, "JAX")
COMPARED = ("time", "start", "memory")
IN_README = ("MLP 784-128-10", "LeNet", "2 transformer", "LSTM", "BERT", "MobileNetV2")
SHOWN = ("onnxruntime", "torch", "jax")

Goals = Mapping[tuple[str, str], Any]


def short(results: dict[str, Any]) -> Iterator[str]:
    """Yields the lines for the README: a few workloads."""
    found, goals = plot.medians(results), _goals(results)
    yield (
        f"CPU, {results['machine']}, {results['date']}. **Below 1, ortops is faster or smaller "
        "than the peer.** The peer of a step"
    )
    yield f"is the fastest one, that of start and memory is {TORCH}."
    yield "[How it was measured, and more](ortops/docs/speed.md)."
    yield ""
    yield _row("training step of", "ortops", "fastest peer", *(f"{x} / peer" for x in COMPARED))
    yield _row(*["---"] * (3 + len(COMPARED)))
    for work in plot.charted(found["step"]):
        if work.startswith(IN_README):
            steps, peer = found["step"][work], goals[work, STEP]["against"]
            ratios = (_ratio(goals.get((work, what))) for what in (STEP, START, MEMORY))
            yield _row(work, _time(steps[LOWERED]), f"{_time(steps[peer])} ({peer})", *ratios)
    yield ""
    yield "![time of a step, start and memory of ortops, PyTorch and JAX](.images/speed.png)"


def long(results: dict[str, Any]) -> Iterator[str]:
    """Yields the lines for the page on speed."""
    found, goals = plot.medians(results), _goals(results)
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in SHOWN)
    yield f"Measured on {results['date']}: CPU, {results['machine']}; {versions}."
    yield ""
    yield (
        "Time of a training step, or of an update alone. **Below 1 is faster than the peer**; "
        "the project's goal is in brackets."
    )
    yield ""
    yield _row("work", *map(_name, STEP_PEERS), "ratio", "to")
    yield _row(*["---"] * (len(STEP_PEERS) + 3))
    for work, by_peer in found["step"].items():
        against, ratio = _compared(results, goals, work)
        yield _row(work, *(_cell(by_peer, peer, _time) for peer in STEP_PEERS), ratio, against)
    for title, what, quantity, label in (
        ("Time from the start of the process to the end of the first step", START, "start", _time),
        ("Peak memory of the process", MEMORY, "memory", _memory),
    ):
        yield ""
        yield f"{title}. **Below 1 is better than {TORCH}.**"
        yield ""
        yield _row("work", *map(_name, START_PEERS), "ratio")
        yield _row(*["---"] * (len(START_PEERS) + 2))
        for work, by_peer in found[quantity].items():
            cells = (_cell(by_peer, peer, label) for peer in START_PEERS)
            yield _row(work, *cells, _goal(goals.get((work, what))))
    yield ""
    yield "| ortops compared with itself | measured (goal) |"
    yield "| --- | --- |"
    for (work, what), goal in goals.items():
        if what not in RATIOS:
            against = f", relative to {goal['against']}" if goal["against"] else ""
            yield _row(f"{work}: {what}{against}", _goal(goal))


def _goals(results: dict[str, Any]) -> Goals:
    return {(goal["work"], goal["what"]): goal for goal in results["goals"]}


def _compared(results: dict[str, Any], goals: Goals, work: str) -> tuple[str, str]:
    """Returns the peer that a step is compared with, and the ratio, also without a target."""
    if goal := goals.get((work, STEP)):
        return goal["against"], _goal(goal)
    times = {peer: found["seconds"] for peer, found in results["times"][work].items()}
    if C not in times or LOWERED not in times:
        return "", ""
    pairs = zip(times[LOWERED], times[C], strict=True)
    return C, f"{statistics.median(own / other for own, other in pairs):.2f}"


def _name(peer: str) -> str:
    return "ortops" if peer == LOWERED else peer


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(by_peer: Mapping[str, float], peer: str, label: Callable[[float], str]) -> str:
    return label(by_peer[peer]) if peer in by_peer else ""


def _ratio(goal: Any) -> str:
    return "" if goal is None else f"{statistics.median(goal['values']):.2f}"


def _goal(goal: Any) -> str:
    return "" if goal is None else f"{_ratio(goal)} ({goal['target']:g})"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _memory(megabytes: float) -> str:
    return f"{megabytes:.0f} MB"


def main() -> int:
    """Writes the tables and the chart."""
    results = json.loads((RESULTS / "results.json").read_text(encoding="utf-8"))
    for path, lines in ((README, short(results)), (PAGE, long(results))):
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        table = "\n".join(lines)
        path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    plot.write(RESULTS / "results.json", ROOT / ".images" / "speed.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
