"""Adds what was measured to benchmarks/measured.json, and writes the tables.

Reads results/results.json, of ./scripts/benchmark, and machine.json in each folder that is named,
of benchmarks.machine_report. benchmarks/measured.json keeps the latest ratios of each workload by
CPU, since CPUs differ in what is fast, and what was measured on machines by their cards. The tables
are in README.md and ortops/docs/speed.md.

Usage: python scripts/speed_table.py [FOLDER ...]
"""

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.machine_report import Report
from benchmarks.peers import COMPILED, LOWERED, TORCH, C

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "results"
PAGE = ROOT / "ortops" / "docs" / "speed.md"
MEASURED = ROOT / "benchmarks" / "measured.json"
PROVIDERS_PAGE = ROOT / "ortops" / "docs" / "providers.md"
NOT_RUN = {
    "webgpu": "tested on a device in software; not run on a GPU",
    "cuda": "implemented, not run",
}
"""What the documentation says of a provider that has not been run on a GPU."""
PROVIDERS = {"webgpu": "WebGpu", "cuda": "CUDA"}
"""What these providers are called in the tables of `benchmarks.machine_report`."""
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
    of_cpu = found.setdefault("processors", {}).setdefault(results["machine"], {"works": {}})
    of_cpu["versions"] = {name: results["versions"].get(name, "–") for name in SHOWN}
    if results.get("products"):
        of_cpu["products"] = results["products"]
    for work, by_peer in results["times"].items():
        line = _line(work, by_peer, results)
        if line:
            of_cpu["works"][work] = {"date": results["date"], **line}
    return found


def add_machine(measured: Measured, folder: Path) -> Measured:
    """Returns what was measured, with a machine's results.

    Args:
        measured: The content of ``measured.json``.
        folder: The folder with the results of `benchmarks.machine_report`.
    """
    held = Report(**json.loads(json.dumps(measured.get("machines", {}))))
    held.add(Report.read(folder))
    return {**measured, "machines": {"machines": held.machines, "measured": held.measured}}


def words(measured: Measured, provider: str) -> str:
    """Returns what the documentation says of a provider: on which cards it has been run.

    Args:
        measured: The content of ``measured.json``.
        provider: A key of `PROVIDERS`.
    """
    found: dict[str, list[bool]] = {}
    held = measured.get("machines", {"machines": {}, "measured": []})
    for each in held["measured"]:
        on_card = bool(held["machines"][each["machine"]]["card"])  # not a device in software
        if (each["part"], on_card, *each["row"][2:]) == ("correctness", True, PROVIDERS[provider]):
            found.setdefault(each["machine"], []).append(each["result"].get("agrees", False))
    if not found:
        return NOT_RUN[provider]
    return "; ".join(
        f"run on {card}: {sum(agree)} of {len(agree)} models agree with the CPU"
        for card, agree in found.items()
    )


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
    for name, of_cpu in measured["processors"].items():
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
    for number, (name, of_cpu) in enumerate(measured["processors"].items()):
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


def machines(measured: Measured) -> Iterator[str]:
    """Yields the lines for the page on speed: what was measured on machines by their cards."""
    if not measured.get("machines", {}).get("measured"):
        yield "None has been measured yet."
        return
    yield Report(**measured["machines"]).markdown(level=3).strip()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def parts(measured: Measured) -> Iterator[tuple[Path, str, str]]:
    """Yields the parts of the documentation that are written: their files, names and contents."""
    yield README, "speed", "\n" + "\n".join(short(measured)) + "\n"
    yield PAGE, "speed", "\n" + "\n".join(long(measured)) + "\n"
    yield PAGE, "machines", "\n" + "\n".join(machines(measured)) + "\n"
    for path in (README, PROVIDERS_PAGE):
        for provider in PROVIDERS:
            yield path, provider, words(measured, provider)


def marks(name: str) -> tuple[str, str]:
    """Returns what stands before and after a part."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def main(folders: Sequence[str] = ()) -> int:
    """Adds the results, and writes the tables."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    file = RESULTS / "results.json"
    if file.exists():
        measured = merge(measured, json.loads(file.read_text(encoding="utf-8")))
    for folder in folders:
        measured = add_machine(measured, Path(folder))
    text = json.dumps(measured, indent=1, ensure_ascii=False)
    MEASURED.write_text(text + "\n", encoding="utf-8")
    for path, name, text in parts(measured):
        begin, end = marks(name)
        before, rest = path.read_text(encoding="utf-8").split(begin)
        _, after = rest.split(end)
        path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
