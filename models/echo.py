"""Models that return their inputs, to evaluate a loss for given outputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

import ortops

__all__ = ["loss_at"]


def loss_at(
    loss: ortops.losses.LossLike,
    outputs: npt.ArrayLike | Mapping[str, npt.ArrayLike],
    **feeds: npt.ArrayLike,
) -> float:
    """Returns the loss for given outputs of a model, rounded to four digits.

    Args:
        loss: The loss.
        outputs: The model's outputs by name, or its only output; float32.
        **feeds: Further inputs of the loss, such as ``targets``; float32 or int64.

    Example:
        >>> loss_at("MeanSquaredError", [1.0, 2.0], targets=[1.0, 4.0])
        2.0
    """
    named = outputs if isinstance(outputs, Mapping) else {"output": outputs}
    given = {f"{name}_given": np.asarray(array, np.float32) for name, array in named.items()}
    with ortops.Tape(name="echo") as tape:
        parameter = tape.initializer("parameter", np.zeros(1, np.float32))  # a weight to train
        for name in named:
            array = given[f"{name}_given"]
            tape.output(tape.input(f"{name}_given", np.float32, array.shape) + parameter, name)
    still = ortops.optimizers.SGD(0.0)
    model = ortops.build_training_model(
        tape.model(), loss=loss, optimizer=still, trainable=["parameter"]
    )
    session = ortops.TrainingSession(model)
    for name, value in feeds.items():
        array = np.asarray(value)
        given[name] = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
    return round(float(session.step(given)["loss"]), 4)
