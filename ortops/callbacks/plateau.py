"""A callback that reduces the learning rate when a metric stops improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ortops._common.arguments import choice, number, whole_number
from ortops.callbacks.monitor import Mode, Monitor, _Monitoring, begins_anew, remembered
from ortops.engine.training.callback import Record
from ortops.engine.training.session import TrainingSession
from ortops.errors import ModelError

logger = logging.getLogger("ortops")

_SMALLEST_CHANGE = 1e-8
"""The smallest change of a learning rate that is made, as in PyTorch."""


class _Threshold(Monitor):
    """Has the formulas of ``torch.optim.lr_scheduler.ReduceLROnPlateau``."""

    is_relative = True

    def is_better(self, value: float) -> bool:
        """Whether a value is better than the best one by more than the threshold."""
        if self.best is None:
            worst = -math.inf if self.is_more_better else math.inf
            return not math.isnan(value) and value != worst
        change = self.minimum_change * (self.best if self.is_relative else 1.0)
        if self.is_more_better:
            return value > self.best + change
        return value < self.best - change


class ReduceLROnPlateau(_Monitoring):
    """Reduces the learning rate when a metric has not improved for several epochs.

    The learning rate is multiplied by ``factor`` after more than ``patience`` consecutive epochs
    without improvement; then counting starts again. With a schedule in the model's graph, it is the
    peak that is multiplied, and with it the rest of the schedule. ``schedule=`` of fit sets the
    rate of each epoch and must not be combined with this callback.

    With ``validate_every=`` of fit, each validation counts like an epoch if the metric is one of
    validation. An epoch that ``max_steps`` or ``max_minutes`` cuts short does not count. Each fit
    starts counting from zero; a resumed fit continues counting.

    Args:
        patience: The number of consecutive epochs without improvement that are tolerated.
        factor: The factor of the learning rate, in (0, 1).
        monitor: The metric: ``"loss"``, ``"validation_loss"``, ``"validation_<metric>"``.
        mode: Whether higher (``"max"``) or lower (``"min"``) is better; see `EarlyStopping`.
        minimum: The smallest learning rate.
        threshold: By how much a value must be better than the best one to count as an improvement.
            NaN never does.
        threshold_mode: Whether the threshold is a fraction of the best value (``"relative"``) or a
            difference (``"absolute"``).
        cooldown: The number of epochs after a reduction in which epochs without improvement are not
            counted.

    Attributes:
        best: The best value so far, or None.

    Raises:
        ArgumentError: If an argument is invalid; in fit, if it is not known what is better.
        OrtopsError: In fit, if an epoch does not have the metric, or the training has no learning
            rate.

    Source:
        ``torch.optim.lr_scheduler.ReduceLROnPlateau``, whose formulas, defaults and counting it
        has.

    Example:
        >>> from ortops.docs import examples
        >>> session = examples.session()
        >>> plateau = ReduceLROnPlateau(patience=1, factor=0.5, monitor="loss", threshold=100.0,
        ...     threshold_mode="absolute")  # so that nothing is an improvement
        >>> history = session.fit(examples.BATCH, epochs=5, callbacks=[plateau], progress=False)
        >>> history.history["learning_rate"]
        [0.25, 0.25, 0.25, 0.125, 0.125]
    """

    def __init__(
        self,
        patience: int = 10,
        factor: float = 0.1,
        monitor: str = "validation_loss",
        *,
        mode: Mode = "auto",
        minimum: float = 0.0,
        threshold: float = 1e-4,
        threshold_mode: Literal["relative", "absolute"] = "relative",
        cooldown: int = 0,
    ) -> None:
        who = "ReduceLROnPlateau"
        self.patience = whole_number(f"{who}: patience", patience, 0)
        self.factor = number(f"{who}: factor", factor, above=0, below=1)
        self.minimum = number(f"{who}: minimum", minimum, minimum=0)
        number(f"{who}: threshold", threshold, minimum=0)
        self.cooldown = whole_number(f"{who}: cooldown", cooldown, 0)
        choice(f"{who}: threshold_mode", threshold_mode, ("relative", "absolute"))
        self._monitor = _Threshold(who, monitor, mode, threshold)
        self._monitor.is_relative = threshold_mode == "relative"
        self._cooling = 0

    def __repr__(self) -> str:
        return (
            f"ReduceLROnPlateau(patience={self.patience}, factor={self.factor}, "
            f"monitor='{self._monitor.name}', minimum={self.minimum})"
        )

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Starts counting, unless fit is resumed.

        Raises:
            OrtopsError: If the training has no learning rate.
        """
        _ = session.peak_learning_rate
        self._monitor.begin(record)
        if begins_anew(record):
            self._monitor.forget()
            self._cooling = 0

    def _judge(self, record: Record, session: TrainingSession) -> None:
        monitor = self._monitor
        monitor.improves(record.epoch, record.values, record.step)
        if self._cooling:
            self._cooling -= 1
            monitor.waited = 0
        if monitor.waited > self.patience:
            self._cooling, monitor.waited = self.cooldown, 0
            present = session.peak_learning_rate
            reduced = max(present * self.factor, self.minimum)
            if present - reduced > _SMALLEST_CHANGE:
                session.peak_learning_rate = reduced
                logger.info(
                    "ReduceLROnPlateau: the (peak) learning rate is %g from step %d on, as %s has "
                    "not improved; its best value is %g",
                    *(reduced, record.step + 1, self._monitor.name),
                    math.nan if self.best is None else self.best,
                )

    def state(self) -> dict[str, Any]:
        """Returns the best value and the counts, for the file."""
        return {"best": self.best, "waited": self._monitor.waited, "cooling": self._cooling}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the best value and the counts.

        Raises:
            ModelError: If they are not numbers.
        """
        who, best = "ReduceLROnPlateau", state.get("best")
        if best is not None and not isinstance(best, int | float):
            raise ModelError(
                f"{who}: 'best' in the state of the file to resume from must be a number or null, "
                f"got {best!r:.80}"
            )
        self._monitor.best = best
        self._monitor.waited = int(remembered(who, state, "waited", whole=True))
        self._cooling = int(remembered(who, state, "cooling", whole=True))
