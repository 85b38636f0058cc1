"""Adds the results of ./scripts/benchmark to benchmarks/measured.json, and writes the tables.

Reads results/results.json. benchmarks/measured.json keeps the latest ratios of each workload by
CPU, since CPUs differ in what is fast. The tables are in README.md and ortops/docs/speed.md.
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers import COMPILED, LOWERED, TORCH, C

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "results"
PAGE = ROOT / "ortops" / "docs" / "speed.md"
MEASURED = ROOT / "benchmarks" / "measured.json"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
START, MEMORY = "start to the end of the first step", "peak memory"
UPDATES = "update of "
"""How names of workloads begin that are not training steps, but updates alone."""
SHOWN = ("onnxruntime", "torch", "jax")
RATIOS: Mapping[str, str] = {
    "step": "a step",
    "compiled": "with compiled updates",
    "start": "start to the end of the first step",
    "memory": "peak memory",
}
"""The ratios of a workload, and the headings of their columns."""

Measured = dict[str, Any]


def merge(measured: Measured, results: Mapping[str, Any]) -> Measured:
    """Returns what was measured by CPU, with the results of a benchmark.

    Args:
        measured: The content of ``measured.json``.
        results: The content of ``results.json``.
    """
    found = json.loads(json.dumps(measured))
    of_cpu = found.setdefault(results["machine"], {"works": {}})
    of_cpu["versions"] = {name: results["versions"].get(name, "–") for name in SHOWN}
    if results.get("products"):
        of_cpu["products"] = results["products"]
    for work, by_peer in results["times"].items():
        line = _line(work, by_peer, results)
        if line:
            of_cpu["works"][work] = {"date": results["date"], **line}
    return found


def _line(work: str, by_peer: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ratios of a workload; empty if no peer or not ortops did it."""
    peers = [name for name in by_peer if name == C or not name.startswith("ortops")]
    if C in peers:
        peers = [C]
    if not peers or LOWERED not in by_peer:
        return {}

    def middle(peer: str) -> float:
        return statistics.median(by_peer[peer]["seconds"])

    peer = min(peers, key=middle)
    line: dict[str, Any] = {"peer": peer, "milliseconds": round(1e3 * middle(LOWERED), 3)}
    for name, way in (("step", LOWERED), ("compiled", COMPILED)):
        if way in by_peer:
            pairs = zip(by_peer[way]["seconds"], by_peer[peer]["seconds"], strict=True)
            line[name] = round(statistics.median(own / other for own, other in pairs), 3)
    starts = results["starts"].get(work, {})
    if {LOWERED, TORCH} <= set(starts):
        pairs = list(zip(starts[LOWERED], starts[TORCH], strict=True))
        for name, key in (("start", "seconds"), ("memory", "megabytes")):
            line[name] = round(statistics.median(a[key] / b[key] for a, b in pairs), 3)
    return line


def short(measured: Measured) -> Iterator[str]:
    """Yields the lines for the README: the median and the worst workload of each CPU."""
    yield (
        "Time of a training step, compared with the fastest peer that was measured (PyTorch, eager "
        "and compiled; JAX);"
    )
    yield (
        "start and memory, with PyTorch eager. **Below 1, ortops is faster or smaller.** "
        "[All workloads](ortops/docs/speed.md)."
    )
    yield ""
    yield _row("CPU", "workloads", "step: median, worst", "with `ortops[fast]`", "start", "memory")
    yield _row(*["---"] * 6)
    for name, of_cpu in measured.items():
        steps = (work for work in of_cpu["works"] if not work.startswith(UPDATES))
        works = {work: of_cpu["works"][work] for work in steps}
        cells = [_spread(works, ratio) for ratio in RATIOS]
        worst = max(works, key=lambda work: works[work]["step"])
        yield _row(name, str(len(works)), f"{cells[0]} ({worst})", *cells[1:])


def _spread(works: Mapping[str, Mapping[str, Any]], ratio: str) -> str:
    values = [line[ratio] for line in works.values() if ratio in line]
    return f"{statistics.median(values):.2f}, {max(values):.2f}" if values else ""


def long(measured: Measured) -> Iterator[str]:
    """Yields the lines for the page on speed: all workloads of each CPU."""
    for number, (name, of_cpu) in enumerate(measured.items()):
        if number:
            yield ""
        versions = ", ".join(f"{key} {value}" for key, value in of_cpu["versions"].items())
        yield f"**{name}**; {versions}."
        for product, speeds in of_cpu.get("products", {}).items():
            shown = ", ".join(f"{library} {speed:.0f}" for library, speed in speeds.items())
            yield f"Product {product} of 1024 × 1024, in GFLOP/s: {shown}."
        yield ""
        yield _row("workload", "date", "ms", "fastest peer", *RATIOS.values())
        yield _row(*["---"] * (4 + len(RATIOS)))
        for work, line in of_cpu["works"].items():
            ratios = (f"{line[ratio]:.2f}" if ratio in line else "" for ratio in RATIOS)
            time = f"{line['milliseconds']:.3g}" if "milliseconds" in line else ""
            yield _row(work, line["date"], time, line["peer"], *ratios)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Adds the results, and writes the tables."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    file = RESULTS / "results.json"
    if file.exists():
        measured = merge(measured, json.loads(file.read_text(encoding="utf-8")))
        text = json.dumps(measured, indent=1, ensure_ascii=False)
        MEASURED.write_text(text + "\n", encoding="utf-8")
    for path, lines in ((README, short(measured)), (PAGE, long(measured))):
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
        table = "\n".join(lines)
        path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
