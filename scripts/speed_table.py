"""Writes what ./scripts/benchmark found into README.md and docs, and its plot into .images/.

It reads results/results.json and results/results.png, which the whole benchmark wrote.
"""

import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "results"
PAGE = ROOT / "ortops" / "docs" / "speed.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
STEP = "time of a step, standard operators"
COLUMNS = {
    STEP: "a step",
    "time of a step, run_steps": "by `run_steps`",
    "start to the end of the first step": "start to the end of the first step",
    "peak memory": "peak memory",
}
"""What is measured of a work, and how the table calls it."""
SHOWN = ("onnxruntime", "torch", "jax")


def short(results: dict[str, Any]) -> Iterator[str]:
    """Yields the lines for the README: steps, beside the fastest peer."""
    what = "Time of a training step, or of an update alone"
    yield f"{what}, to that of the fastest peer ({results['date']}):"
    yield ""
    yield "| work | the fastest peer | time |"
    yield "| --- | --- | --- |"
    for goal in results["goals"]:
        if goal["what"] == STEP:
            median = statistics.median(goal["values"])
            yield f"| {goal['work']} | {goal['against']} | {median:.2f} |"


def long(results: dict[str, Any]) -> Iterator[str]:
    """Yields the lines for the page on speed."""
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in SHOWN)
    yield f"{results['date']}, {results['machine']}; {versions}. Ratios, with the aim in brackets:"
    yield ""
    yield "| work | the fastest peer | " + " | ".join(COLUMNS.values()) + " |"
    yield "| --- | --- |" + " --- |" * len(COLUMNS)
    goals: dict[tuple[str, str], Any] = {(g["work"], g["what"]): g for g in results["goals"]}
    for work in dict.fromkeys(work for work, what in goals if what in COLUMNS):
        cells = [_cell(goals.get((work, what))) for what in COLUMNS]
        yield f"| {work} | {goals[work, next(iter(COLUMNS))]['against']} | {' | '.join(cells)} |"
    yield ""
    yield "| ortops by itself | measured |"
    yield "| --- | --- |"
    for (work, what), goal in goals.items():
        if what not in COLUMNS:
            against = f", to {goal['against']}" if goal["against"] else ""
            yield f"| {work}: {what}{against} | {_cell(goal)} |"


def _cell(goal: Any) -> str:
    if goal is None:
        return ""
    return f"{statistics.median(goal['values']):.2f} ({goal['target']:g})"


def main() -> int:
    """Writes the tables and the plot."""
    results = json.loads((RESULTS / "results.json").read_text(encoding="utf-8"))
    for path, lines in ((README, short(results)), (PAGE, long(results))):
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        table = "\n".join(lines)
        path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    shutil.copy(RESULTS / "results.png", ROOT / ".images" / "speed.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
