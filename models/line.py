"""y = w · x with w = 0: the smallest trainable model, for examples."""

from __future__ import annotations

from typing import Any

import numpy as np

import ortops

__all__ = ["BATCH", "Alone", "session"]

BATCH = {"x": np.ones((1, 1), np.float32), "targets": np.ones((1, 1), np.float32)}
"""One row, for which w = 1 has loss 0."""


def session(**options: Any) -> ortops.TrainingSession:
    """Returns a session in which each step with `BATCH` halves the distance of w to 1.

    Args:
        **options: Arguments of `ortops.build_training_model`.

    Example:
        >>> line = session()
        >>> line.run_steps([BATCH] * 3).tolist()
        [1.0, 0.25, 0.0625]
    """
    with ortops.Tape(name="line") as tape:
        x = tape.input("x", np.float32, ["batch", 1])
        tape.output(x @ tape.initializer("w", np.zeros((1, 1), np.float32)), "y")
    settings = {"loss": "MeanSquaredError", "optimizer": ortops.optimizers.SGD(0.25), **options}
    return ortops.TrainingSession(ortops.build_training_model(tape.model(), **settings))


class Alone:
    """A communicator of one process, for `ortops.distributed.join`.

    Example:
        >>> ortops.distributed.join(session(), Alone()).size
        1
    """

    rank, size = 0, 1

    def sum(self, array: object) -> None:
        """Leaves an array as it is."""

    def broadcast(self, array: object) -> None:
        """Leaves an array as it is."""
