"""numpy: the update rules of ortops on numpy arrays."""

from __future__ import annotations

import itertools

import numpy as np

from benchmarks.peers import Step
from benchmarks.task import OPTIMIZERS, Task
from ortops import optimizers


def make(task: Task, optimizer: str) -> Step:
    """Returns the step function.

    Args:
        task: An update.
        optimizer: Its optimizer.
    """
    ours = getattr(optimizers, optimizer)(**OPTIMIZERS[optimizer])
    parameters = task.weights()
    state = {name: [np.zeros_like(x) for _ in ours.states] for name, x in parameters.items()}
    rate, counter = np.float32(ours.learning_rate), itertools.count(ours.first_step)
    batches = itertools.cycle(task.batches())

    def step() -> None:
        feeds, t = next(batches), np.int64(next(counter))
        for name, x in parameters.items():
            gradient = feeds[f"{name}_gradient"]
            parameters[name], *state[name] = ours.update(rate, t, x, gradient, *state[name])

    return Step(step, lambda: parameters)
