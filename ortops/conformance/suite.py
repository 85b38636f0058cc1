"""All cases of the suite."""

from __future__ import annotations

from functools import cache

from ortops.conformance import (
    control_flow,
    gradients,
    network,
    operators,
    optimizers,
    refusals,
    training,
)
from ortops.conformance.case import Case

_PARTS = (optimizers, gradients, operators, control_flow, training, network, refusals)


@cache
def cases() -> tuple[Case, ...]:
    """Returns all cases, in the order of their groups.

    Example:
        >>> [case] = [c for c in cases() if c.name == "test_adam_bias_corrections_2"]
        >>> case.cites[0].text
        'R_adjusted = T > 0 ? R * Sqrt(1 - beta**T) / (1 - alpha**T) : R'
    """
    return tuple(case for part in _PARTS for case in part.cases())
