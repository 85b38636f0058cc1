"""``ortops check``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ortops import losses
from ortops.cli.calls import make, read_call
from ortops.cli.standard_streams import describe_error, print_text, say
from ortops.cli.streams import print_json, source
from ortops.engine.check import check as check_model
from ortops.engine.check import quiet
from ortops.errors import OrtopsError
from ortops.llm.checking import check_folder, is_language_model


def check(options: argparse.Namespace) -> int:
    """Reports what training would do with each model, and what prevents it."""
    found: list[dict[str, Any]] = []
    worst = 0
    files = [file for given in options.models for file in _files(given)]
    for file in files:
        try:
            if file != "-" and Path(file).is_dir() and is_language_model(file):
                tuned = check_folder(file, options.measure)
                worst = max(worst, 1 if tuned.problems else 0)
                found.append(tuned.as_dict())
                if not options.json:
                    print_text(f"{file}:\n{tuned}" if len(files) > 1 else str(tuned))
                continue
            if file != "-" and Path(file).is_dir():
                raise OrtopsError(f"folder '{file}' contains no .onnx file; give a model")
            if options.measure:
                raise OrtopsError(
                    f"--measure needs the folder of a language model, got '{file}'; omit it"
                )
            with quiet():  # the report contains these messages
                report = check_model(
                    source(file),
                    loss=_loss(options.loss),
                    trainable=options.trainable,
                    batch_normalization=options.batch_normalization,
                    verbose=options.verbose,
                )
        except Exception as error:  # also of a bug: the other models are reported all the same
            if options.debug and not isinstance(error, OrtopsError | OSError):
                raise
            worst = 2
            found.append({"file": file, "error": describe_error(error)})
            if not options.json:
                say(f"ortops: {describe_error(error)}")
            continue
        worst = max(worst, 1 if report.problems else 0)
        found.append({"file": file, **report.as_dict()})
        if not options.json:
            text = report.text(options.all)
            print_text(f"{file}:\n{text}" if len(files) > 1 else text)
    if options.json:
        print_json(found)
    return worst


def _files(given: str) -> list[str]:
    """Returns the models in a folder, or the argument itself.

    The folder of a language model is reported as a whole.
    """
    try:
        if given == "-" or not Path(given).is_dir() or is_language_model(given):
            return [given]
    except OSError:  # reported when the file is read
        return [given]
    found = (path for path in Path(given).rglob("*.onnx") if not path.is_dir())
    return sorted(map(str, found)) or [given]


def _loss(text: str | None) -> losses.Loss | None:
    if text is None:
        return None
    made: losses.Loss = make(read_call(text, "--loss"), losses.LOSSES, "--loss", losses.OTHER_NAMES)
    return made
