"""Small models, for the examples in docstrings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

import ortops
from ortops import Tape, Tensor, op

__all__ = ["BATCH", "Alone", "lenet", "loss_at", "mlp", "session"]

BATCH = {"x": np.ones((1, 1), np.float32), "targets": np.ones((1, 1), np.float32)}
"""One row for `session`, for which w = 1 has loss 0."""


def session(**options: Any) -> ortops.TrainingSession:
    """Returns a session of y = w · x with w = 0: a step with `BATCH` halves the distance of w to 1.

    Args:
        **options: Arguments of `ortops.build_training_model`.

    Example:
        >>> session().run_steps([BATCH] * 3).tolist()
        [1.0, 0.25, 0.0625]
    """
    with Tape(name="line") as tape:
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
    with Tape(name="echo") as tape:
        parameter = tape.initializer("parameter", np.zeros(1, np.float32))  # a weight to train
        for name in named:
            array = given[f"{name}_given"]
            tape.output(tape.input(f"{name}_given", np.float32, array.shape) + parameter, name)
    still = ortops.optimizers.SGD(0.0)
    model = ortops.build_training_model(
        tape.model(), loss=loss, optimizer=still, trainable=["parameter"]
    )
    trained = ortops.TrainingSession(model)
    for name, value in feeds.items():
        array = np.asarray(value)
        given[name] = array.astype(np.int64 if array.dtype.kind == "i" else np.float32)
    return round(float(trained.step(given)["loss"]), 4)


def mlp(sizes: Sequence[int] = (64, 128, 10)) -> onnx.ModelProto:
    """Builds linear layers ``fc1``, ``fc2``, … with a Relu between them.

    Args:
        sizes: The number of pixels, the widths of the hidden layers, and the number of classes.

    Returns:
        A model from ``images`` to ``logits``.

    Example:
        >>> [node.op_type for node in mlp((4, 16, 2)).graph.node]
        ['Gemm', 'Relu', 'Gemm']
    """
    with Tape(name="mlp") as tape:
        x = tape.input("images", np.float32, ["batch", sizes[0]])
        tape.output(_linear(x, sizes), "logits")
    return tape.model()


def lenet() -> onnx.ModelProto:
    """Builds two convolutions of images of 8 × 8 pixels, and two linear layers.

    Returns:
        A model from ``images`` to ``logits``.

    Example:
        >>> [node.op_type for node in lenet().graph.node][:3]
        ['Conv', 'Relu', 'MaxPool']
    """
    with Tape(name="lenet") as tape:
        x = tape.input("images", np.float32, ["batch", 1, 8, 8])
        for number, (inputs, channels) in enumerate([(1, 32), (32, 64)], 1):
            weight = _drawn(tape, f"conv{number}.weight", (channels, inputs, 3, 3))
            bias = tape.initializer(f"conv{number}.bias", np.zeros(channels, np.float32))
            y = op.Relu(op.Conv(x, weight, bias, kernel_shape=[3, 3], pads=[1] * 4))
            x = op.MaxPool(y, kernel_shape=[2, 2], strides=[2, 2])
        tape.output(_linear(op.Flatten(x), (256, 128, 10)), "logits")
    return tape.model()


def _linear(x: Tensor, sizes: Sequence[int]) -> Tensor:
    for number, (inputs, outputs) in enumerate(pairwise(sizes), 1):
        weight = _drawn(x.tape, f"fc{number}.weight", (outputs, inputs))
        bias = x.tape.initializer(f"fc{number}.bias", np.zeros(outputs, np.float32))
        x = op.Gemm(op.Relu(x) if number > 1 else x, weight, bias, transB=1)
    return x


def _drawn(tape: Tape, name: str, shape: Sequence[int]) -> Tensor:
    rng = np.random.default_rng(len(name) + shape[0])
    deviation = np.sqrt(2 / np.prod(shape[1:]))
    return tape.initializer(name, rng.normal(0, deviation, shape).astype(np.float32))
