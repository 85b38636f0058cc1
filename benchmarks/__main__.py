"""Compares ortops with other frameworks and with itself, and checks that results agree.

Prints Markdown tables; with --output, also writes them, the data (JSON) and a plot (PNG) to a
folder. Fails if results differ by more than the tolerance of a workload.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.measure import Effort

PARTS = ("steps", "starts", "own")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks.

    Args:
        arguments: The command-line arguments; by default the process's own.

    Returns:
        The exit status: 1 if results of peers disagree.
    """
    # Imported here, because a peer's process imports this file before it limits its threads.
    from benchmarks import measure, peers, profiling, works
    from benchmarks.task import OPTIMIZERS

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a short run that checks that everything works"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help="only workloads in whose names a word starts with TEXT",
    )
    parser.add_argument(
        "--peer",
        metavar="TEXT",
        action="append",
        default=[],
        help="only peers with TEXT in their name",
    )
    parser.add_argument(
        "--part",
        choices=PARTS,
        action="append",
        help="only steps, starts, or comparisons of ortops with itself and products of matrices",
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds of measurements, and the maximum number of starts"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="Adam")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write the results to this folder"
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile the steps of ortops instead, and compare them with the ideal time",
    )
    parser.add_argument(
        "--without",
        metavar="PASSES",
        help="passes to leave out with --profile, for example recurrent,blocked",
    )
    options = parser.parse_args(arguments)
    names = works.find(options.only)
    if not names:
        parser.error(f"--only {options.only} matches none of: {'; '.join(works.WORKS)}")
    chosen = [name for name in peers.PEERS if works.fits(name, options.peer)]
    if not chosen:
        parser.error(f"--peer {options.peer} matches none of: {'; '.join(peers.PEERS)}")
    effort = measure.QUICK if options.quick else measure.Effort()
    if options.rounds is not None:
        if options.rounds < 1:
            parser.error(f"--rounds must be an integer >= 1, got {options.rounds}")
        starts = min(options.rounds, effort.starts)
        effort = dataclasses.replace(effort, rounds=options.rounds, starts=starts)
    without = options.without.split(",") if options.without else []
    if without and not options.profile:
        parser.error("--without requires --profile")
    if options.profile:
        steps = 2 if options.quick else 20
        profiled = next((peer for peer in chosen if peer in profiling.PROFILED), peers.LOWERED)
        if reason := peers.PEERS[profiled].missing():
            parser.error(f"{profiled!r} cannot be profiled: {reason}")
        text = profiling.markdown(names, options.optimizer, steps, without, profiled)
        print(text)
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / "profile.md").write_text(text, encoding="utf-8")
        return 0
    return _measure(names, chosen, options.part or PARTS, options.optimizer, effort, options.output)


def _measure(
    names: Sequence[str],
    chosen: Sequence[str],
    parts: Sequence[str],
    optimizer: str,
    effort: Effort,
    output: Path | None,
) -> int:
    from benchmarks import machine, own, plot, works
    from benchmarks.measure import Contestant, measure, worker
    from benchmarks.peers import PEERS
    from benchmarks.report import Report
    from benchmarks.start import measure as measure_starts
    from benchmarks.task import Task

    report = Report(optimizer, effort)
    for peer in chosen:
        if reason := PEERS[peer].missing():
            report.missing[peer] = reason
    able = [peer for peer in chosen if peer not in report.missing]

    def save() -> None:
        if output is not None:
            report.write(output)

    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        work = works.WORKS[name]
        if isinstance(work, works.Export) and (reason := work.missing()):
            report.missing[name] = reason
            continue
        checked = work.checked_optimizer
        with tempfile.TemporaryDirectory() as folder, worker() as submit:
            submit(works.write, work, folder, {optimizer, checked or optimizer}).result()
            task = Task.read(folder)
            taking_part = [
                peer for peer in able if PEERS[peer].does(task.network, optimizer, task.exported)
            ]
            if "steps" in parts:
                contestants = {
                    peer: Contestant(folder, peer, optimizer, checked) for peer in taking_part
                }
                report.times[name] = measure(contestants, effort)
                save()
            starting = [peer for peer in taking_part if PEERS[peer].start]
            if "starts" in parts and starting and work.target is not None:
                report.starts[name] = submit(
                    measure_starts, folder, starting, optimizer, effort.starts, effort.memory_steps
                ).result()
                save()
    if "own" in parts:
        print("ortops compared with itself ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            report.depths = own.depth_seconds(Path(folder), optimizer, effort)
        report.creation = own.creation_seconds(effort.starts)
        report.imports = own.import_seconds(effort.starts)
        report.fits = own.fit_ratios(optimizer, effort)
        with worker() as submit:
            report.products = submit(machine.product_speeds, rounds=effort.rounds).result()
        save()
    print(report.markdown())
    if output is not None:
        report.write(output)
        plot.write(output / "results.json", output / "results.png")
    wrong = report.disagreements()
    for message in wrong:
        print(message, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
