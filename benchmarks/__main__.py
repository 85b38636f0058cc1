"""Measures optimizer steps and whole training steps, and checks that the peers agree.

Prints a Markdown table. Fails where results differ by more than the tolerance of the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmarks.

    Args:
        arguments: Those of the command line, by default the process's own.

    Returns:
        The exit code: 1 where peers disagree.
    """
    # Not at the top: a peer's process imports this file before it limits its threads.
    from benchmarks import measure, peers, profiling, table, works

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run: do they all work?")
    parser.add_argument("--only", metavar="TEXT", default="", help="works with TEXT in their name")
    parser.add_argument("--rounds", type=int, help="turns of each peer")
    parser.add_argument("--optimizer", choices=peers.OPTIMIZERS, default="Adam")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, too")
    parser.add_argument(
        "--profile", action="store_true", help="show where the lowered training steps spend time"
    )
    options = parser.parse_args(arguments)
    names = [name for name in works.WORKS if options.only.casefold() in name.casefold()]
    if not names:
        parser.error(f"--only {options.only!r} fits none of: {'; '.join(works.WORKS)}")
    effort = measure.QUICK if options.quick else measure.Effort()
    if options.rounds is not None:
        if options.rounds < 1:
            parser.error(f"--rounds is {options.rounds}; at least 1 is accepted")
        effort = dataclasses.replace(effort, rounds=options.rounds)

    wrong: list[str] = []
    if options.profile:
        text = profiling.markdown(names, options.optimizer, steps=2 if options.quick else 20)
    else:
        results = {}
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            able = [peer for peer, it in peers.PEERS.items() if it.does(works.WORKS[name])]
            results[name] = measure.measure(name, able, options.optimizer, effort)
        text = table.markdown(results, options.optimizer, effort)
        wrong = table.disagreements(results)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    for message in wrong:
        print(message, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
