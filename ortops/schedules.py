"""Schedules: the learning rate of a step as a formula of the steps before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """A learning rate that changes from step to step.

    Attributes:
        peak: What the factor multiplies: the learning rate that a session shows and sets.
        factor: Gives the factor of a step from the number of finished steps, 0-d float64, a numpy
            array or a Tensor; it computes with what both share, so that it runs in the graph.
    """

    peak: float
    factor: Callable[[Any], Any]
