"""The command ``ortops``."""

from __future__ import annotations

import argparse
import errno
import os
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
    lowering.add_argument("output", help="the file to write; - is standard output")
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
    from ortops.graph.external import attached, detach, serialize, write_model
    from ortops.graph.files import destination
    from ortops.lowering import lower

    target = None if options.output == "-" else destination(options.output)
    model = lower(options.model)
    folder = Path(options.model).resolve().parent
    moved = target is None or target.parent != folder  # external data are found from there
    light, data = detach(model, folder if moved else None)
    if options.output == "-":
        _print_bytes(serialize(attached(light, data)))
    else:
        write_model(options.output, light, data)
    return 0


def _print_bytes(content: bytes) -> None:
    stream = getattr(sys.stdout, "buffer", None)
    if stream is None:  # Python has none where the shell closed it
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), "-")
    try:
        stream.write(content)
        stream.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:  # or Python tries again as it ends
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise
