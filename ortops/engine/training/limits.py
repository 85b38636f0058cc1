"""Limits of a call of `fit`: when it validates within an epoch, and when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

DEV_STEPS = 3
"""The number of steps, and of batches of validation, with ``fast_dev_run=True``."""


@dataclass(frozen=True)
class Limits:
    """When `fit` validates within an epoch, and when it ends.

    Attributes:
        validate_every: The number of steps between validations; None for those of epochs only.
        max_steps: The greatest number of steps of a training; None for no limit.
        max_minutes: The greatest duration of a call, in minutes; None for no limit.
        began: When the call began, by `time.perf_counter`.
    """

    validate_every: int | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    began: float = field(default_factory=lambda: time.perf_counter())

    def is_validation_due(self, steps: int) -> bool:
        """Whether a validation is due after a number of steps.

        Example:
            >>> limits = Limits(validate_every=3)
            >>> [steps for steps in range(1, 8) if limits.is_validation_due(steps)]
            [3, 6]
        """
        return self.validate_every is not None and steps % self.validate_every == 0

    def reaches_steps(self, steps: int) -> bool:
        """Whether a training ends after a number of its steps."""
        return self.max_steps is not None and steps >= self.max_steps

    def ending(self, steps: int) -> str:
        """Returns why training ends after a number of steps of it; "" if it continues.

        Example:
            >>> Limits(max_steps=3).ending(2), Limits(max_steps=3).ending(3)
            ('', 'max_steps=3 is reached')
        """
        if self.reaches_steps(steps):
            return f"max_steps={self.max_steps} is reached"
        minutes = (time.perf_counter() - self.began) / 60
        if self.max_minutes is not None and minutes >= self.max_minutes:
            return f"max_minutes={self.max_minutes:g} is reached"
        return ""
