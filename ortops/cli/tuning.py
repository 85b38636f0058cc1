"""``ortops tune``."""

from __future__ import annotations

import argparse
import inspect
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ortops import losses, optimizers
from ortops.cli import configuration
from ortops.cli.calls import make, read_call
from ortops.cli.parser import make_parser
from ortops.cli.standard_streams import print_text, say
from ortops.cli.training import rate_of
from ortops.engine.training.fit_options import OPTIONS, Option
from ortops.errors import OrtopsError
from ortops.graph.files.atomic import TEMPORARY, siblings
from ortops.llm import FineTuning
from ortops.llm.encoder_rows import labels_in
from ortops.llm.encoders import has_classes
from ortops.llm.options import OF_LOSS, SHARED_FIT, TUNING, TUNING_FIT
from ortops.llm.row_files import of_path
from ortops.llm.saving import ADAPTER, TRAINING, UNFINISHED, is_unfinished
from ortops.llm.tuning import optimizer_of

_NONE = ("rank", "recompute")
"""Options of which none is None."""

_OF_SHOW = {"batch_size", "max_length", "train_on", "columns"}


def tune(options: argparse.Namespace) -> int:
    """Fine-tunes the language model of a folder."""
    if options.config:
        configuration.read_options(options, make_parser(""))
    for name in ("folder", "data"):
        if not getattr(options, name):
            raise OrtopsError(f"{name} is missing; see ortops tune --help")
    if not options.quiet:
        logging.getLogger("ortops").setLevel(logging.INFO)
    save = options.save or f"{Path(options.folder).resolve().name}-tuned"
    folder, resumes = options.folder, options.resume and _is_tuned(save)
    if resumes:
        folder = save
    elif options.resume:
        said = (
            "in which a first save was finished" if is_unfinished(Path(save)) else "to resume from"
        )
        say(f"there is no '{save}' {said}; starting a new training")
    continues = _is_tuned(folder)
    _check_save(options, save)
    _check_merge(options, save)
    tuning = _opened(options, folder, continues=continues, resumes=resumes)
    if options.show:
        given = _given_fit(options)
        shown = {name: given[name] for name in _OF_SHOW & {*given}}
        print_text(tuning.show(options.data, **shown))
        return 0
    if options.write_config:
        configuration.write_options(options, options.write_config)
    _fit(tuning, options, save, resumes=resumes)
    say(f"wrote {save}")
    return 0


def _opened(
    options: argparse.Namespace, folder: str, *, continues: bool, resumes: bool
) -> FineTuning:
    """Returns the training of a folder: a new one, or the one that was saved in it."""
    rate = None if options.learning_rate is None else rate_of(options.learning_rate)
    if not continues:
        given = _given(options, TUNING) | _loss(options)
        given |= {} if rate is None else {"learning_rate": rate}
        given |= _labels(options)
        return FineTuning(folder, **_with_optimizer(given))
    again = {"learning_rate", *inspect.signature(FineTuning.load).parameters}
    for name in () if resumes else {**_given(options, TUNING), **_given(options, OF_LOSS)}:
        if name not in again:
            option = f"--{name.replace('_', '-')}"
            raise OrtopsError(
                f"{option}: '{folder}' continues a training with its own; omit {option}, or "
                "start from the original folder"
            )
    kept = _given(options, {name: TUNING[name] for name in ("recompute", "providers")})
    tuning = FineTuning.load(folder, **kept)
    if rate is not None and not resumes:
        if not isinstance(rate, int | float):
            raise OrtopsError(
                f"--learning-rate must be a number, got '{options.learning_rate}', as the "
                f"training of '{folder}' continues"
            )
        tuning.session.peak_learning_rate = rate
    return tuning


def _labels(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the names of the classes in the data, if a classifier of texts has none yet."""
    if options.task != "classification" or options.labels or has_classes(options.folder):
        return {}
    with of_path(options.data):
        return {"labels": labels_in(options.data, _given_fit(options).get("columns"))}


def _given(options: argparse.Namespace, table: Mapping[str, Option]) -> dict[str, Any]:
    """Returns the given options for arguments of a table."""
    own = (name for name, option in table.items() if option.metavar is not None)
    given = {name: value for name in own if (value := getattr(options, name)) is not None}
    return given | {name: None for name in _NONE if given.get(name) == "none"}


def _loss(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the loss, if it has arguments."""
    defaults = {None: "NextToken", "retrieval": "InfoNCE"}
    name = options.loss or defaults.get(options.task, "SoftmaxCrossEntropy")
    own, kind = _given(options, OF_LOSS), getattr(losses, name)
    for each in own.keys() - {field.name for field in fields(kind)}:
        option, remedy = f"--{each.replace('_', '-')}", "give --loss DPO, or " * (each == "beta")
        raise OrtopsError(f"{option}: {name} has none; {remedy}omit {option}")
    return {"loss": kind(**own)} if own else {}


def _with_optimizer(given: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of `FineTuning`, with an optimizer that has arguments as an object."""
    call = read_call(given.get("optimizer", "Adam"), "--optimizer")
    if not call.arguments and not call.keywords:
        return given
    made = optimizer_of({**given, "optimizer": call.name})
    names = [each.name for each in fields(made)]
    in_call = {*call.keywords, *names[: len(call.arguments)]}
    for name in ("learning_rate", "weight_decay"):
        if name in in_call and name in given:
            option = f"--{name.replace('_', '-')}"
            raise OrtopsError(f"--optimizer: it has {name}; omit that, or omit {option}")
    more = {name: getattr(made, name) for name in names if name not in in_call}
    known, others = optimizers.OPTIMIZERS, optimizers.OTHER_NAMES
    made = make(call, known, "--optimizer", others, **more)
    rest = given.keys() - {"learning_rate", "weight_decay"}
    return {name: given[name] for name in rest} | {"optimizer": made}


def _validation(text: str | None) -> str | float | None:
    """Returns the fraction or the file of validation data."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _given_fit(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given options for arguments of `FineTuning.fit`."""
    found = _given(options, TUNING_FIT)
    for each in found.get("columns", ()):
        if not all(each.partition("=")):
            raise OrtopsError(f"--columns must have the form NAME=COLUMN, got {each!r}")
    columns = dict(each.split("=", 1) for each in found.pop("columns", ()))
    return found | ({"columns": columns} if columns else {})


def _is_tuned(folder: str) -> bool:
    """Whether this command wrote a folder, and was not interrupted in the first save."""
    return not is_unfinished(Path(folder)) and any(
        Path(folder, name).is_file() for name in (ADAPTER, TRAINING)
    )


def _fit(
    tuning: FineTuning,
    options: argparse.Namespace,
    save: str,
    *,
    resumes: bool,
) -> None:
    before = tuning.session.steps_done
    given: dict[str, Any] = {
        **_given_fit(options),
        **_given(options, {name: OPTIONS[name] for name in SHARED_FIT}),
        "validation": _validation(options.validation),
        "progress": not options.quiet,
        "save": None if options.merge else save,
        "save_steps": options.checkpoint_steps,
        "resume": resumes,
    }
    tuning.fit(options.data, **given)
    if options.merge:
        tuning.save(save, merged=True)
    if resumes and tuning.session.steps_done == before:
        say(
            f"the training in '{save}' is already finished; to train further, give a larger "
            f"--epochs, or run ortops tune {save} … without --resume"
        )


def _check_merge(options: argparse.Namespace, save: str) -> None:
    """Rejects options that need the adapter, which a merged folder does not have."""
    for name in ("resume", "checkpoint_steps"):
        if options.merge and getattr(options, name):
            raise OrtopsError(
                f"--merge: a merged folder cannot be resumed; omit --{name.replace('_', '-')}"
            )
    if options.merge and Path(save, ADAPTER).is_file():
        raise OrtopsError(f"--merge: '{save}' has an adapter; give a new folder as --save")


def _check_save(options: argparse.Namespace, save: str) -> None:
    """Rejects a folder that must not be overwritten, before any work is done."""
    target = Path(save)
    if target.exists() and not target.is_dir():
        raise OrtopsError(f"--save must be a folder, got the file '{save}'")
    ours = any((target / name).is_file() for name in (ADAPTER, TRAINING, UNFINISHED))
    litter = siblings(target / UNFINISHED, TEMPORARY)  # of a process killed at the beginning
    if not ours and target.is_dir() and {*target.iterdir()} - {*litter}:
        raise OrtopsError(
            f"--save: '{save}' has files that ortops did not write; give a new folder"
        )
