"""The command ``ortops``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ortops import __version__
from ortops.errors import OrtopsError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: What stands behind ``ortops``; the command line's by default.

    Returns:
        0, or 1 if something stands in the way.
    """
    parser = argparse.ArgumentParser(prog="ortops", description="Training for stock onnxruntime.")
    parser.add_argument("--version", action="version", version=f"ortops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="tell what of a model can be trained")
    checking.add_argument("model", help="an .onnx file")
    lowering = commands.add_parser("lower", help="replace Gradient, Adam, … by standard operators")
    lowering.add_argument("model", help="an .onnx file")
    lowering.add_argument("output", help="the file to write")
    options = parser.parse_args(arguments)
    try:
        return _check(options.model) if options.command == "check" else _lower(options)
    except (OrtopsError, OSError) as error:
        print(f"ortops: {error}", file=sys.stderr)
        return 1


def _check(model: str) -> int:
    from ortops.check import check

    report = check(model)
    print(report)
    return 1 if report.problems else 0


def _lower(options: argparse.Namespace) -> int:
    from ortops.graph.external import detach, write_model
    from ortops.lowering import lower

    model = lower(options.model)
    folder = Path(options.model).resolve().parent
    moved = Path(options.output).resolve().parent != folder  # external data are found from there
    write_model(options.output, *detach(model, folder if moved else None))
    return 0
