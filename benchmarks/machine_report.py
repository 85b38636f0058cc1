"""Measures a machine within minutes: whether training is correct on its providers, and how fast.

::

    python -m benchmarks.machine_report --out FOLDER --minutes 4
    python -m benchmarks.machine_report --out FOLDER --only correctness,cores --all

Needs what is installed and no network. Each measurement runs in a process of its own, and its
result is written as soon as it is there, to ``machine.json`` and, as tables, to ``machine.md`` in
the folder; what the processes print goes to ``machine.log``. The folder may hold earlier results:
what has been measured on this machine with the same versions is not measured again. So the command
can run once for each set of packages. What is left out has a reason in the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.machine import Card
from benchmarks.start import PROJECT

__all__ = ["PARTS", "Measurement", "Report", "main", "plan"]

PARTS = ("correctness", "language", "speed", "cores")
"""The parts, the most informative first."""

SHARES = {"correctness": 2, "language": 3, "speed": 3, "cores": 2}
"""How the parts share the time; what one does not need is left to those after it."""

SPEED = (
    "MLP 784-128-10, batch 32",
    "LeNet 28×28, batch 64",
    "BERT 6 layers d 384, 16×64, TorchScript's file",
    "MobileNetV2 224, batch 8, TorchScript's file",
    "GPT-2 6 layers d 512, 4×128, dynamo's file",
)
CORES = tuple(name for name in SPEED if not name.startswith("MobileNet"))
THREADS = (1, 2, 4, 8, 16)
LARGER = 16
"""By what the batch is multiplied with ``--all``."""

CPU, WEBGPU = "CPUExecutionProvider", "WebGpuExecutionProvider"

END = 3.0
"""Seconds before the end in which nothing is measured."""

LOG_MEGABYTES = 8

Start: TypeAlias = Callable[[str, Mapping[str, Any], float, Path], dict[str, Any]]
"""Runs a function of `benchmarks.measurements` for at most so many seconds; see `start`."""


@dataclass(frozen=True)
class Measurement:
    """Something to measure.

    Attributes:
        part: One of `PARTS`.
        row: What its row in the table begins with.
        function: The function in `benchmarks.measurements`.
        arguments: Its arguments.
        packages: The packages whose versions matter.
        least: The seconds without which it is not begun.
        extra: Whether it is measured with ``--all`` only.
    """

    part: str
    row: tuple[str, ...]
    function: str
    arguments: Mapping[str, Any]
    packages: tuple[str, ...]
    least: float
    extra: bool = False


@dataclass
class Report:
    """What has been measured, on any number of machines and with any versions.

    Attributes:
        machines: By machine: its CPU, cores, card and driver, and the ``runs`` on it.
        measured: The results, each with its machine, part, row and versions.
        left_out: What the latest run left out, and why.
    """

    machines: dict[str, Any] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Report:
        """Reads the results of a folder, if it has any."""
        file = folder / "machine.json"
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else cls()

    def write(self, folder: Path) -> None:
        """Writes the results and the tables; a killed process leaves the old ones or the new."""
        contents = {
            "machine.json": json.dumps(vars(self), indent=1, ensure_ascii=False) + "\n",
            "machine.md": self.markdown(),
        }
        for name, text in contents.items():
            new = folder / f"{name}.new"
            new.write_text(text, encoding="utf-8")
            new.replace(folder / name)

    def add(self, other: Report) -> None:
        """Adds another report, whose results replace results of the same rows and versions."""
        for name, machine in other.machines.items():
            runs = self.machines.get(name, {"runs": []})["runs"]
            new = [run for run in machine["runs"] if run not in runs]
            self.machines[name] = {**machine, "runs": [*runs, *new]}
        for each in other.measured:
            key = {name: each[name] for name in ("machine", "part", "row", "versions")}
            if found := self.find(key):
                self.measured.remove(found)
            self.measured.append(each)

    def find(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns what was measured with a machine, part, row and versions."""
        return next(
            (each for each in self.measured if all(each[k] == v for k, v in key.items())), None
        )

    # ------------------------------------------------------------------------------------- tables

    def markdown(self, level: int = 1) -> str:
        """Returns the tables of all machines.

        Args:
            level: The level of the headings.
        """
        lines: list[str] = []
        mark = "#" * level
        for name, machine in self.machines.items():
            lines += [f"{mark} {name}", "", *_description(machine)]
            for part, (heading, cells) in _TABLES.items():
                rows = [
                    each
                    for each in self.measured
                    if (each["machine"], each["part"]) == (name, part)
                ]
                if rows:
                    lines += ["", f"{mark}# {part}", "", _NOTES[part], ""]
                    lines += [_row(*heading), _row(*["---"] * len(heading))]
                    lines += [
                        _row(*each["row"], *line, _shown(each["versions"]))
                        for each in rows
                        for line in _lines(each["result"], cells, len(heading))
                    ]
            lines.append("")
        if self.left_out:
            lines += [f"{mark} Left out by the latest run", ""]
            lines += [f"- {what}: {why}" for what, why in self.left_out.items()]
        return "\n".join(lines).rstrip() + "\n"


def _description(machine: Mapping[str, Any]) -> Iterator[str]:
    yield f"- {machine['cpu']}; {machine['cores']} cores can be used"
    if machine["card"]:
        memory = f", {machine['card_megabytes']:,.0f} MB" if machine["card_megabytes"] else ""
        driver = f", driver {machine['driver']}" if machine["driver"] else ""
        yield f"- {machine['card']}{memory}{driver}"
    for run in machine["runs"]:
        yield f"- {run['date']}: {_shown(run['versions'])}"
        yield f"  - providers that work: {', '.join(run['providers']) or 'none'}"
        for provider, why in run["unusable"].items():
            yield f"  - {provider} does not: {why}"


def _lines(
    result: Mapping[str, Any], cells: Callable[[Mapping[str, Any]], Iterable[list[str]]], width: int
) -> Iterable[list[str]]:
    """Returns the cells of a result, or why there is none."""
    if "failed" in result:
        return [[f"failed: {result['failed']}", *[""] * (width - 4)]]
    return cells(result)


def _correctness(result: Mapping[str, Any]) -> Iterator[list[str]]:
    fallen = sum(result["on_cpu"].values())
    listed = ", ".join(f"{name} ({count})" for name, count in list(result["on_cpu"].items())[:6])
    yield [
        "agrees" if result["agrees"] else "**differs**",
        f"{result['losses']:.1e}, {result['parameters']:.1e} (bound {result['bound']:.0e})",
        "equal bits" if result["resumed_bits"] else f"{'' if result['resumed'] else 'not '}equal",
        result.get("placement") or f"{fallen} of {result['nodes']}: {listed}",
    ]


def _language(result: Mapping[str, Any]) -> Iterator[list[str]]:
    on_card = result.get("card_peak")
    yield [
        f"{result['tokens']:.3g}",
        f"{result['seconds']:.3g}",
        "" if on_card is None else f"{on_card:,.0f}",
        f"{result['megabytes']:,.0f}",
    ]


def _speed(result: Mapping[str, Any]) -> Iterator[list[str]]:
    for peer, milliseconds in result["milliseconds"].items():
        ratio = result.get("ratio", {}).get(peer)
        why = "; ".join(result.get("missing", {}).values())
        yield [
            f"{peer}, {result['threads']} threads" if "threads" in result else peer,
            f"{milliseconds:.3g}",
            why if ratio is None else f"{ratio:.2f}",
        ]


def _cores(result: Mapping[str, Any]) -> Iterator[list[str]]:
    if "products" not in result:
        yield from _speed(result)
        return
    for product, speeds in result["products"].items():
        shown = ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        yield [f"{product} of 1024 × 1024", f"{shown} GFLOP/s", ""]
    yield ["sums of large vectors", f"{result['memory']:.1f} GB/s", ""]


_TABLES: Mapping[
    str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Iterable[list[str]]]]
] = {
    "correctness": (
        (
            *("model", "type", "provider", "20 steps", "differences of losses, parameters"),
            *("resumed", "nodes on the CPU", "versions"),
        ),
        _correctness,
    ),
    "language": (
        (
            *("parameters", "length", "peer", "tokens/s", "s per step", "peak on the card, MB"),
            *("peak of the process, MB", "versions"),
        ),
        _language,
    ),
    "speed": (
        *(("step", "provider", "batch", "peer", "ms", "ortops ÷ peer", "versions"),),
        _speed,
    ),
    "cores": (
        *(("step", "threads", "peer", "ms, or speed", "ortops ÷ peer", "versions"),),
        _cores,
    ),
}
"""By part: the headings of its columns, and the cells between the row's and the versions'."""


_NOTES: Mapping[str, str] = {
    "correctness": (
        "20 steps, compared with the CPU in float32 without onnxruntime's optimizations. "
        "Differences are relative to the largest loss and the largest parameter. Equal bits: a "
        "session that was saved after 10 steps and opened again makes the same losses."
    ),
    "language": (
        "LoRA of rank 8 on all linear layers but lm_head, one row of text; the median step without "
        "the first. The peak on the card is by how much the memory that NVML says is in use rose, "
        "libraries included."
    ),
    "speed": (
        "Medians of interleaved rounds, with fused Adam in PyTorch, and the loss read in each "
        "step; float32 without TF32."
    ),
    "cores": (
        "On the CPU, as above. Two MPI ranks share the threads, and each takes half of the batch; "
        "1x16 is one process with all threads, and the ratio that of the ranks to it."
    ),
}
"""What the figures of a part are."""


def _shown(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


# ------------------------------------------------------------------------------------------- plan

_OURS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-ep-webgpu", "onnx-ir", "llvmlite")


def plan(machine: Mapping[str, Any]) -> list[Measurement]:
    """Returns what can be measured on a machine, the most informative of each part first.

    Args:
        machine: The result of `benchmarks.measurements.describe`.
    """
    providers = machine["providers"]
    cards = [name for name in providers if name != CPU]
    device = machine.get("torch", "cpu")
    found = [*_correctness_plan(providers), *_language_plan(cards or providers, device)]
    found += _speed_plan(cards or providers, device)
    found += _cores_plan(machine["cores"])
    return sorted(found, key=lambda each: each.extra)


def _correctness_plan(providers: Sequence[str]) -> Iterator[Measurement]:
    types = {"float32": False, "float16": False, "float64": True}
    for provider in providers:  # the CPU is the last one
        for dtype, extra in types.items():
            if dtype == "float64" and provider in (CPU, WEBGPU):
                continue  # without kernels for convolutions, and without float64
            for model in ("MLP", "LeNet", "transformer block", "LSTM"):
                yield Measurement(
                    "correctness",
                    (model, dtype, _short(provider)),
                    "correctness",
                    {"model": model, "provider": provider, "dtype": dtype},
                    _OURS,
                    5,
                    extra,
                )


def _language_plan(providers: Sequence[str], device: str) -> Iterator[Measurement]:
    on_card = providers[:1] != [CPU]
    # On a CPU, the small model first: the other one may not fit into the time.
    wanted = [("1.1·10⁹", 512, False), ("0.1·10⁹", 256, False), ("0.1·10⁹", 2048, False)]
    wanted += [("3·10⁹", 512, True), ("8·10⁹", 512, True)]
    if not on_card:
        wanted.sort(key=lambda each: each[1] * float(each[0].partition("·")[0]))
    for size, length, extra in wanted:
        least = 10 + (0.005 if on_card else 0.3) * length * float(size.partition("·")[0])
        common = {"size": size, "length": length}
        for provider in providers:
            dtype = "float32" if provider == CPU else "float16"
            yield Measurement(
                "language",
                (size, str(length), f"ortops, int4 and {dtype}, {_short(provider)}"),
                "language",
                {**common, "provider": provider, "dtype": dtype, "folder": f"{size}-{dtype}"},
                _OURS,
                least,
                extra,
            )
        peer = {"peer": "torch", "device": device, "dtype": "bfloat16", "folder": "none"}
        yield Measurement(
            "language",
            (size, str(length), f"torch and PEFT, bfloat16, {device}"),
            "language",
            {**common, **peer},
            ("torch", "transformers", "peft"),
            least,
            extra,
        )


def _speed_plan(providers: Sequence[str], device: str) -> Iterator[Measurement]:
    from benchmarks.works import WORKS, Update

    every = [name for name, work in WORKS.items() if not isinstance(work, Update)]
    wanted = [(name, 1, False, False) for name in SPEED]
    wanted += [(name, 1, False, True) for name in every if name not in SPEED]
    wanted += [(name, 1, True, True) for name in SPEED]
    wanted += [(name, LARGER, False, True) for name in SPEED]
    for name, times, compiled, extra in wanted:
        for provider in providers:
            batch = f"{times} times" if times > 1 else "1"
            arguments = {
                "work": name,
                "folder": f"{name}-{times}",
                "provider": provider,
                "device": "cpu" if provider == CPU else device,
                "times": times,
                "compiled": compiled,
            }
            yield Measurement(
                "speed",
                (name, _short(provider), f"{batch}, torch compiled" if compiled else batch),
                "speed",
                arguments,
                (*_OURS, "torch"),
                10,
                extra,
            )


def _cores_plan(cores: int) -> Iterator[Measurement]:
    *fewer, most = (count for count in THREADS if count <= cores)
    works = {name: {"work": name, "folder": f"{name}-1"} for name in CORES}

    def scaling(name: str, threads: int) -> Measurement:
        arguments = {**works[name], "provider": CPU, "threads": threads}
        return Measurement(
            *("cores", (name, str(threads)), "speed", arguments, (*_OURS, "torch"), 10)
        )

    def machine(threads: int) -> Measurement:
        return Measurement(
            *("cores", ("machine", str(threads)), "products", {"threads": threads}),
            *(("onnxruntime", "onnxruntime-gpu", "torch"), 5),
        )

    yield machine(most)
    for name, arguments in works.items():
        yield scaling(name, most)
        if most > 1:
            yield Measurement(
                "cores",
                (name, f"2 MPI ranks of {most // 2}"),
                "ranks",
                {**arguments, "threads": most},
                (*_OURS, "mpi4py", "mpich"),
                10,
            )
    yield from map(machine, fewer)
    yield from (scaling(name, threads) for name in works for threads in fewer)


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider")


# -------------------------------------------------------------------------------------------- run


def start(function: str, arguments: Mapping[str, Any], seconds: float, log: Path) -> dict[str, Any]:
    """Runs a function of `benchmarks.measurements` in a process of its own.

    Args:
        function: The function.
        arguments: Its arguments.
        seconds: After which it is ended, with its child processes.
        log: The file for what it prints.

    Returns:
        Its result, with ``card_peak``: by how many 10⁶ bytes the memory in use on the card rose
        meanwhile, if there is a card. Or why it ``failed``, and whether it was ``ended``.
    """
    card = Card()
    before = peak = card.used_megabytes()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output, log.open("ab") as errors:
        if log.stat().st_size > LOG_MEGABYTES * 1e6:
            errors.truncate(0)
        errors.write(f"\n== {function} {json.dumps(arguments, ensure_ascii=False)}\n".encode())
        errors.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.measurements", function, json.dumps(arguments)],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        deadline = time.monotonic() + seconds
        try:
            while process.poll() is None and time.monotonic() < deadline:
                peak = max(peak, card.used_megabytes())
                time.sleep(0.01 if card.name else 0.05)
            ended = process.poll() is None
        finally:
            _kill(process)
        output.seek(0)
        lines = output.read().splitlines()
    if ended:
        return {"failed": f"it did not end within {seconds:.0f} s", "ended": seconds}
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"failed": f"the process ended with {process.returncode}; see {log.name}"}
    return found | ({"card_peak": peak - before} if card.name else {})


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _name(machine: Mapping[str, Any]) -> str:
    """Returns the name of the card, or of the CPU if there is none."""
    return str(machine["card"] or machine["cpu"])


@dataclass
class _Run:
    """A run of the command.

    Attributes:
        report: The results, of earlier runs, too.
        machine: The name of this machine.
        versions: Its versions.
        start: Runs one measurement.
        log: The file for what the processes print.
        scratch: The folder for models and workloads, which measurements share.
        tried: The seconds that measurements of this run had.
    """

    report: Report
    machine: str
    versions: Mapping[str, str]
    start: Start
    log: Path
    scratch: str
    tried: dict[tuple[str, ...], float] = field(default_factory=dict)

    def measure(self, wanted: Measurement, deadline: float) -> None:
        """Measures, unless the result is known already or too little time is left."""
        report, name = self.report, (wanted.part, *wanted.row)
        key = {
            "machine": self.machine,
            "part": wanted.part,
            "row": list(wanted.row),
            "versions": {
                package: self.versions[package]
                for package in wanted.packages
                if package in self.versions
            },
        }
        what = f"{wanted.part}: {', '.join(wanted.row)}"
        found = report.find(key)
        if found and "failed" not in found["result"]:
            return
        if found and name in self.tried and "ended" not in found["result"]:
            return  # it failed in this run, and not for lack of time
        rest = deadline - time.monotonic()
        if rest < max(wanted.least, 1.5 * self.tried.get(name, 0)):
            why = f"it takes about {wanted.least:.0f} s or more, and {max(rest, 0):.0f} s were left"
            report.left_out.setdefault(what, why)
            return
        arguments = dict(wanted.arguments)
        if "folder" in arguments:
            folder = re.sub(r"[^\w.-]+", "_", arguments["folder"])
            arguments["folder"] = str(Path(self.scratch, folder))
        if name not in self.tried:  # one that is slow for once leaves time to the others
            rest = min(rest, max(6 * wanted.least, rest / 2))
        print(f"{what} ...", file=sys.stderr, flush=True)
        self.tried[name] = rest
        result = self.start(wanted.function, arguments, rest, self.log)
        report.left_out.pop(what, None)
        if "failed" in result:
            report.left_out[what] = result["failed"]
        if found:
            report.measured.remove(found)
        report.measured.append({**key, "date": str(date.today()), "result": result})


def run(
    folder: Path,
    seconds: float,
    parts: Sequence[str] = PARTS,
    extra: bool = False,
    start: Start = start,
) -> Report:
    """Measures this machine, and writes results as they come.

    Each part gets a share of the time. What did not fit into it is tried again in what is left.

    Args:
        folder: The folder for the results; it may have earlier ones.
        seconds: When to end.
        parts: The parts to measure.
        extra: Whether to measure what is not measured by default.
        start: Runs one measurement.
    """
    end = time.monotonic() + seconds - END
    folder.mkdir(parents=True, exist_ok=True)
    report, log = Report.read(folder), folder / "machine.log"
    report.left_out.clear()
    machine = start("describe", {}, max(1.0, end - time.monotonic()), log)
    if "failed" in machine:
        report.left_out["all parts"] = machine["failed"]
        report.write(folder)
        return report
    name = _name(machine)
    this = {"date": str(date.today())}
    this |= {key: machine.pop(key) for key in ("versions", "providers", "unusable")}
    known = report.machines.setdefault(name, {"runs": []})
    if this not in known["runs"]:
        known["runs"].append(this)
    known |= machine
    report.write(folder)
    wanted = [each for each in plan(machine | this) if extra or not each.extra]
    with tempfile.TemporaryDirectory() as scratch:
        running = _Run(report, name, this["versions"], start, log, scratch)
        for again in (False, True):
            for number, part in enumerate(parts):
                share = SHARES[part] / sum(SHARES[each] for each in parts[number:])
                now = time.monotonic()
                deadline = end if again else now + (end - now) * share
                for each in wanted:
                    if each.part == part:
                        running.measure(each, deadline)
                        report.write(folder)
    for part in PARTS:
        if part not in parts:
            report.left_out[part] = "--only does not name it"
    if not extra:
        report.left_out["further networks, batches and sizes"] = "they need --all"
    report.write(folder)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 1 if steps on a provider differ from those on the CPU."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.machine_report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=4.0, help="when to end (default: 4)")
    parser.add_argument(
        "--only", metavar="PARTS", default=",".join(PARTS), help="as in speed,cores"
    )
    parser.add_argument("--all", action="store_true", help="further networks, batches and models")
    given = parser.parse_args(arguments)
    parts = given.only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only {unknown[0]} is none of: {', '.join(PARTS)}")
    if given.minutes <= 0:
        parser.error(f"--minutes must be greater than 0, got {given.minutes:g}")
    report = run(
        given.out, 60 * given.minutes, [part for part in PARTS if part in parts], given.all
    )
    print(report.markdown())
    checked = (each["result"] for each in report.measured if each["part"] == "correctness")
    return int(any(not result.get("agrees", True) for result in checked))


if __name__ == "__main__":
    sys.exit(main())
