"""Losses with which training cannot continue, and what may have caused them."""

from __future__ import annotations

import math

import numpy as np

from ortops.engine.building.updates import SMALLEST_SCALE
from ortops.engine.trainable.metadata import TrainingMetadata
from ortops.engine.training.data import rows
from ortops.engine.training.trainer import Batch, Trainer
from ortops.errors import DivergedError, OrtopsError

_ROUNDING = 0.01
"""How far below 0 the mean of losses that are not negative may be, by rounding in 16 bits."""


def _is_mean(metadata: TrainingMetadata) -> bool:
    """Whether a loss has no summand that is a sum over rows."""
    return not any(part.is_sum for part in metadata.losses)


def check_loss(trainer: Trainer, loss: float, feeds: Batch, where: str) -> None:
    """Raises an error if the loss is not finite, or if no step can be made any more."""
    if not math.isfinite(loss):
        raise diverged(trainer, loss, feeds, where)
    metadata = trainer.metadata
    if metadata.not_negative and loss < -_ROUNDING * (1 if _is_mean(metadata) else rows(feeds)):
        raise DivergedError(
            f"loss is {loss:g} at step {trainer.steps_done} ({where}), but the loss "
            f"{', '.join(part.label for part in metadata.losses)} cannot be negative, so it reads "
            "values that are not what it expects, such as scores in place of log-probabilities, or "
            "targets outside of [0, 1]; check the model's output and the targets. Pass "
            "stop_on_nan=False to continue anyway"
        )
    if (
        not metadata.loss_scale
        or not {metadata.loss_scale, metadata.good_steps} <= trainer.state.keys()
    ):
        return
    scale = float(trainer.state[metadata.loss_scale])
    if scale <= SMALLEST_SCALE and not int(trainer.state[metadata.good_steps]):
        raise DivergedError(
            f"gradients are infinite or NaN after step {trainer.steps_done} ({where}) even at the "
            f"smallest loss scale, {scale:g}, so steps have no effect; check logarithms, "
            "divisions, roots and powers in the model and the loss, then set "
            f"state['{metadata.loss_scale}']. Pass stop_on_nan=False to continue anyway"
        )


def diverged(
    trainer: Trainer, loss: float, feeds: Batch | None, where: str, *, made: bool = True
) -> DivergedError:
    """Returns the error for a loss that is not finite, with its likely cause.

    Args:
        trainer: The session.
        loss: The loss.
        feeds: The batch; None if the cause is in another process.
        where: Which batch it is.
        made: Whether the step was made.
    """
    wrong = []
    for name, array in (feeds or {}).items():
        if array.dtype.kind not in "fc":
            continue
        places = np.argwhere(~np.isfinite(array))
        if len(places):
            value = array[tuple(places[0])]
            wrong.append(
                f"'{name}' has {len(places)} of {array.size} values that are not finite, first "
                f"{value} at {places[0].tolist()}"
            )
    if wrong:
        look = f"in the batch, {', '.join(wrong)}; clean the data"
    elif feeds is None:
        look = "the part of this process is finite; see the error of the other process"
    else:
        try:
            rate = f" ({trainer.learning_rate:g})"
        except OrtopsError:  # the algorithm has none
            rate = ""
        look = (
            f"the batch is finite, so check the learning rate{rate}, and logarithms, divisions, "
            "roots and powers in the model and the loss; fit(…, detect_anomaly=True) names the node"
        )
    if not made:
        return DivergedError(
            f"loss is {loss} at step {trainer.steps_done + 1} ({where}): {look}. The step has not "
            "been made. Pass stop_on_nan=False to continue anyway"
        )
    return DivergedError(
        f"loss is {loss} at step {trainer.steps_done} ({where}): {look}. The session is in the "
        "state after this step; earlier weights are available only if they were saved. Pass "
        "stop_on_nan=False to continue anyway"
    )
