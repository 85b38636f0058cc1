"""``ortops tune``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from ortops.cli.standard_streams import print_text, say
from ortops.cli.training import rate_of
from ortops.errors import OrtopsError
from ortops.graph.files.atomic import TEMPORARY, siblings
from ortops.llm import FineTuning
from ortops.llm.saving import ADAPTER, TRAINING, UNFINISHED, is_unfinished

_BATCH_SIZE = 4


def tune(options: argparse.Namespace) -> int:
    """Fine-tunes the language model of a folder."""
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
        rows, limit = options.batch_size or _BATCH_SIZE, options.max_length or 512
        columns = _columns(options.columns)
        print_text(tuning.show(options.data, rows, limit, options.train_on, columns=columns))
        return 0
    _fit(tuning, options, save, resumes=resumes)
    say(f"wrote {save}")
    return 0


def _opened(
    options: argparse.Namespace, folder: str, *, continues: bool, resumes: bool
) -> FineTuning:
    """Returns the training of a folder: a new one, or the one that was saved in it."""
    rate = None if options.learning_rate is None else rate_of(options.learning_rate)
    if not continues:
        return FineTuning(
            folder,
            8 if options.rank is None else options.rank,
            16 if options.alpha is None else options.alpha,
            options.targets,
            2e-4 if rate is None else rate,
            loss=options.loss,
            dropout=options.dropout or 0.0,
            providers=options.providers,
        )
    for name in () if resumes else ("rank", "alpha", "dropout", "targets", "loss"):
        if getattr(options, name) is not None:
            raise OrtopsError(
                f"--{name}: '{folder}' already has an adapter; omit --{name}, or start "
                "from the original folder"
            )
    tuning = FineTuning.load(folder, providers=options.providers)
    if rate is not None and not resumes:
        if not isinstance(rate, int | float):
            raise OrtopsError(
                f"--learning-rate must be a number, got '{options.learning_rate}', as the "
                f"training of '{folder}' continues"
            )
        tuning.session.peak_learning_rate = rate
    return tuning


def _validation(text: str | None) -> str | float | None:
    """Returns the fraction or the file of validation data."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _columns(given: Sequence[str] | None) -> dict[str, str]:
    """Returns the columns given for names of rows."""
    for each in given or ():
        if not all(each.partition("=")):
            raise OrtopsError(f"--columns must have the form NAME=COLUMN, got {each!r}")
    return dict(each.split("=", 1) for each in given or ())


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
    tuning.fit(
        options.data,
        epochs=options.epochs or 1,
        batch_size=options.batch_size or _BATCH_SIZE,
        max_length=options.max_length or 512,
        train_on=options.train_on,
        group_by_length=options.group_by_length,
        packing=options.packing,
        seed=options.seed or 0,
        validation=_validation(options.validation),
        progress=not options.quiet,
        save=None if options.merge else save,
        save_steps=options.checkpoint_steps,
        columns=_columns(options.columns),
        resume=resumes,
    )
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
