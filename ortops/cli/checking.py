"""``ortops check``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ortops import losses
from ortops.check import check as check_model
from ortops.check import quiet
from ortops.cli.calls import make, read_call
from ortops.cli.streams import print_json
from ortops.errors import OrtopsError

__all__ = ["check"]


def check(options: argparse.Namespace) -> int:
    """Tells what a training would do with models, and what stands in the way."""
    found: list[dict[str, Any]] = []
    worst = 0
    files = [file for given in options.models for file in _files(given)]
    for file in files:
        try:
            if file != "-" and Path(file).is_dir():
                raise OrtopsError(f"folder '{file}': there is no .onnx file in it; give a model")
            with quiet():  # the report says it all
                report = check_model(
                    sys.stdin.buffer.read() if file == "-" else file,
                    loss=_loss(options.loss),
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
        print_json(found)
    return worst


def _files(given: str) -> list[str]:
    """Returns the files that an argument means; a folder without any stands for itself."""
    if given == "-" or not Path(given).is_dir():
        return [given]
    found = (path for path in Path(given).rglob("*.onnx") if not path.is_dir())
    return sorted(map(str, found)) or [given]


def _loss(text: str | None) -> losses.Loss | None:
    return None if text is None else make(read_call(text, "--loss"), losses.LOSSES, "--loss")
