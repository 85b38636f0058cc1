"""``python -m ortops.conformance``: runs the suite on backends, or writes it into a folder."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ortops.conformance.case import Case
from ortops.conformance.files import read, write
from ortops.conformance.report import junit, table
from ortops.conformance.running import Result, run
from ortops.conformance.suite import cases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ortops.conformance",
        description="Runs the conformance suite of ONNX's training domain on ONNX backends. The "
        "exit code is 0 if no case failed, and 1 otherwise; unsupported cases do not fail.",
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="an onnx.backend.base.Backend; several make several columns",
    )
    parser.add_argument("--junit", metavar="FILE", help="write the results as JUnit's XML")
    parser.add_argument(
        "--write", metavar="FOLDER", help="write the cases, as files of ONNX's tests"
    )
    parser.add_argument("--data", metavar="FOLDER", help="run the cases of a folder, as written")
    parser.add_argument(
        "--only", metavar="PATTERN", help="run the cases of such names, as 'test_adam_*'"
    )
    parser.add_argument(
        "--without-proposals",
        action="store_true",
        help="leave out what the specification does not say, or contradicts",
    )
    parser.add_argument("--quiet", action="store_true", help="do not list failures")
    return parser


def _backend(name: str) -> Any:
    """Returns the class of ``module:Class``."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"--backend must be MODULE:CLASS, got {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--backend {name}: {error}") from error
    if not hasattr(found, "prepare"):
        raise ValueError(f"--backend {name}: it has no method prepare, as ONNX backends have")
    return found


def _failures(name: str, results: Sequence[Result]) -> str:
    return "".join(
        f"{name}: {result.case.name}{' (proposal)' if result.case.proposal else ''}: "
        f"{result.message}\n"
        for result in results
        if result.status == "failed"
    )


def _chosen(known: Sequence[Case], pattern: str | None, proposals: bool) -> list[Case]:
    return [
        case
        for case in known
        if (pattern is None or fnmatch.fnmatchcase(case.name, pattern))
        and (proposals or not case.proposal)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The arguments; those of the process by default.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.backend and not options.write:
        parser.error("--backend or --write is required")
    known = read(options.data) if options.data else cases()
    chosen = _chosen(known, options.only, not options.without_proposals)
    if not known:
        parser.error(f"--data must be a folder with cases, got {options.data!r}, which has none")
    if not chosen:
        parser.error(
            "--only must match the name of a case, such as 'test_adam_*', got "
            f"{options.only!r}, which matches none of {len(known)}"
        )
    try:
        backends = {name: _backend(name) for name in options.backend}
    except ValueError as error:
        parser.error(str(error))
    if options.write:
        try:
            write(chosen, options.write)
        except ValueError as error:
            parser.error(f"--write: {error}")
    results = {name: list(run(b, chosen, known)) for name, b in backends.items()}
    if not results:
        return 0
    if not options.quiet:
        sys.stdout.writelines(_failures(name, found) for name, found in results.items())
    sys.stdout.write(table(results))
    if options.junit:
        junit(results, options.junit)
    return int(any(r.status == "failed" for found in results.values() for r in found))


if __name__ == "__main__":
    sys.exit(main())
