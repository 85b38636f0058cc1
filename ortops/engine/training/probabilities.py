"""Warns of losses that read probabilities as logits, by the values of a batch."""

from __future__ import annotations

import logging

import numpy as np

from ortops.engine.training.trainer import Batch, Trainer
from ortops.errors import OrtopsError

logger = logging.getLogger("ortops")


def warn_of_probabilities(session: Trainer, batch: Batch) -> None:
    """Logs a warning if a loss reads logits that all lie between 0 and 1.

    Only losses whose logits may come from a function with bounded values are looked at, because
    their model runs once more.

    Args:
        session: The session.
        batch: The first batch of the training data.
    """
    metadata = session.metadata
    for note in metadata.predictions or (metadata.prediction,):
        if not note.bounded:
            continue
        try:
            values = session.predict(batch, outputs=note.output)
        except OrtopsError as error:  # training does not depend on it
            logger.debug("fit: cannot look at '%s': %s", note.output, error)
            continue
        if values.size > 1 and np.all((values >= 0) & (values <= 1)):
            logger.warning(
                "fit: the loss reads '%s' as logits, but its values in the first batch lie between "
                "%.3g and %.3g, as probabilities do; use a loss of probabilities "
                "(BinaryCrossEntropy, NegativeLogLikelihood), or name the logits with output=",
                *(note.output, values.min(), values.max()),
            )
