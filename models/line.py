"""y = w · x with w = 0: the smallest trainable model, which `ortops.docs.examples` has."""

from ortops.docs.examples import BATCH, Alone, session

__all__ = ["BATCH", "Alone", "session"]
