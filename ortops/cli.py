"""The command ``ortops``."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortops import __version__
from ortops.errors import OrtopsError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: What stands behind ``ortops``; the command line's by default.

    Returns:
        0; of ``check``, 1 if something stands in the way of a training, and 2 if a file cannot be
        read; of ``lower``, 1 if it failed.
    """
    parser = argparse.ArgumentParser(prog="ortops", description="Training for stock onnxruntime.")
    parser.add_argument("--version", action="version", version=f"ortops {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser(
        "check",
        help="tell what a training would do, and what stands in the way",
        epilog="ends with 1 if something stands in the way, with 2 if no model can be read, else 0",
    )
    checking.add_argument(
        "models", nargs="+", help="an .onnx file, a folder of them, or - for standard input"
    )
    checking.add_argument("--loss", help="the loss, such as SoftmaxCrossEntropy")
    checking.add_argument(
        "--trainable", action="append", metavar="PATTERN", help="what to train; may be repeated"
    )
    checking.add_argument(
        "--batch-normalization", choices=("auto", "train", "frozen"), default="auto"
    )
    checking.add_argument(
        "--json", action="store_true", help="print an array with an object for each file"
    )
    lowering = commands.add_parser("lower", help="replace Gradient, Adam, … by standard operators")
    lowering.add_argument("model", help="an .onnx file")
    lowering.add_argument("output", help="the file to write; - is standard output")
    options = parser.parse_args(arguments)
    try:
        return _check(options) if options.command == "check" else _lower(options)
    except (OrtopsError, OSError) as error:
        print(f"ortops: {error}", file=sys.stderr)
        return 1


def _check(options: argparse.Namespace) -> int:
    from ortops.check import check, quiet

    found: list[dict[str, Any]] = []
    worst = 0
    files = [file for given in options.models for file in _files(given)]
    for file in files:
        try:
            if file != "-" and Path(file).is_dir():
                raise OrtopsError(f"folder '{file}': there is no .onnx file in it; give a model")
            with quiet():  # the report says it all
                report = check(
                    sys.stdin.buffer.read() if file == "-" else file,
                    loss=options.loss,
                    trainable=options.trainable,
                    batch_normalization=options.batch_normalization,
                )
        except (OrtopsError, OSError) as error:
            worst = 2
            found.append({"file": file, "error": str(error)})
            if not options.json:
                print(f"ortops: {error}", file=sys.stderr)
            continue
        worst = max(worst, 1 if report.problems else 0)
        found.append({"file": file, **report.as_dict()})
        if not options.json:
            print(*([f"{file}:"] if len(files) > 1 else []), report, sep="\n")
    if options.json:
        print(json.dumps(found, indent=2))
    return worst


def _files(given: str) -> list[str]:
    """Returns the files that an argument means; a folder without any stands for itself."""
    if given == "-" or not Path(given).is_dir():
        return [given]
    found = (path for path in Path(given).rglob("*.onnx") if not path.is_dir())
    return sorted(map(str, found)) or [given]


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
