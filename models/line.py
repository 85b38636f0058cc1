"""y = w · x with w = 0: the smallest trainable model, which `ortops.examples` has."""

from ortops.examples import BATCH, Alone, session

__all__ = ["BATCH", "Alone", "session"]
