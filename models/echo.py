"""Models that return their inputs, to evaluate a loss for given outputs."""

from ortops.docs.examples import loss_at

__all__ = ["loss_at"]
