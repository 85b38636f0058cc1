"""``ortops tune``."""

from __future__ import annotations

import argparse
from pathlib import Path

from ortops.cli.standard_streams import say
from ortops.cli.training import rate_of
from ortops.errors import OrtopsError
from ortops.llm import FineTuning
from ortops.llm.tuning import ADAPTER

__all__ = ["tune"]


def tune(options: argparse.Namespace) -> int:
    """Fine-tunes the language model of a folder."""
    save = options.save or f"{Path(options.folder).resolve().name}-tuned"
    continues = Path(options.folder, ADAPTER).is_file()
    _check_save(options, save)
    epochs, batch_size = options.epochs or 1, options.batch_size or 4
    rate = None
    if options.learning_rate is not None:
        with Path(options.data).open(encoding="utf-8") as lines:
            batches = -(-sum(1 for line in lines if line.strip()) // batch_size)
        rate = rate_of(options.learning_rate, epochs * batches)
    if continues:
        for name in ("rank", "alpha", "targets"):
            if getattr(options, name) is not None:
                raise OrtopsError(
                    f"--{name}: '{options.folder}' already has an adapter; omit --{name}, or start "
                    "from the original folder"
                )
        tuning = FineTuning.load(options.folder)
        if rate is not None:
            if not isinstance(rate, int | float):
                raise OrtopsError(
                    f"--learning-rate must be a number, got '{options.learning_rate}', as the "
                    f"training of '{options.folder}' continues"
                )
            tuning.session.learning_rate = rate
    else:
        tuning = FineTuning(
            options.folder,
            8 if options.rank is None else options.rank,
            16 if options.alpha is None else options.alpha,
            options.targets,
            2e-4 if rate is None else rate,
        )
    tuning.fit(
        options.data,
        epochs=epochs,
        batch_size=batch_size,
        max_length=options.max_length or 512,
        train_on=options.train_on,
        seed=options.seed or 0,
        validation=options.validation,
        progress=not options.quiet,
    )
    tuning.save(save)
    say(f"wrote {save}")
    return 0


def _check_save(options: argparse.Namespace, save: str) -> None:
    """Rejects a folder that must not be overwritten, before any work is done."""
    target = Path(save)
    if target.exists() and not target.is_dir():
        raise OrtopsError(f"--save must be a folder, got the file '{save}'")
    others = target.is_dir() and any(target.iterdir()) and not (target / ADAPTER).is_file()
    if others:
        raise OrtopsError(
            f"--save: '{save}' has files that ortops did not write; give a new folder"
        )
