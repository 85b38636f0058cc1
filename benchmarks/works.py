"""What is measured: single optimizer steps and whole training steps, with their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from models.lenet import lenet
from models.mlp import mlp
from models.resnet import resnet
from models.transformer import transformer

if TYPE_CHECKING:
    import onnx

__all__ = ["WORKS", "OptimizerStep", "TrainingStep", "Work"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class OptimizerStep:
    """One update of one tensor; the gradient is there already.

    Attributes:
        parameters: The number of elements.
    """

    parameters: int

    # The timed optimizer is the checked one: the updates themselves are compared.
    checked_optimizer = None
    # A few roundings of float32 in each of the updates.
    tolerance = 1e-5

    def arrays(self) -> tuple[Array, tuple[Array, Array]]:
        """Returns the parameter and two gradients to take in turns, float32 (parameters,).

        No gradient is near zero. There the specification's Adam and PyTorch's differ, because ε is
        added before bias correction in one and after it in the other.
        """
        rng = np.random.default_rng(0)
        x = rng.standard_normal(self.parameters, np.float32)
        size = rng.random(self.parameters, np.float32) + np.float32(0.5)
        g = np.where(rng.random(self.parameters) < 0.5, size, -size)
        # Under one that stays the same, the coefficients of Adam would not show.
        return x, (g, np.float32(0.5) * g[::-1])


@dataclass(frozen=True)
class TrainingStep:
    """One whole step of a classifier: forward, loss, backward, update.

    Batches arrive as numpy arrays, and the loss is read in each step.

    Attributes:
        build: Returns the inference model, with its initial weights.
        sample: The shape of the model's input, without the batch.
        batch: The number of samples.
        heads: The number of attention heads, which the torch twin cannot read off the weights.
    """

    build: Callable[[], onnx.ModelProto]
    sample: tuple[int, ...]
    batch: int
    heads: int = 4

    # Adam hides a gradient of the wrong size, and enlarges what is rounding only. Momentum does
    # neither, and it is the same in the specification and in PyTorch.
    checked_optimizer = "Momentum"
    # float32, sums in different orders, and steps that carry the differences on.
    tolerance = 1e-4

    def batches(self) -> Iterator[tuple[Array, Array]]:
        """Yields 16 batches again and again: float32 (batch, *sample) and int64 labels (batch,)."""
        rng = np.random.default_rng(0)
        made = [
            (
                rng.standard_normal((self.batch, *self.sample), np.float32),
                rng.integers(0, 10, self.batch),
            )
            for _ in range(16)
        ]
        while True:
            yield from made


Work: TypeAlias = OptimizerStep | TrainingStep

WORKS: Mapping[str, Work] = {
    "optimizer step, 1e4 parameters": OptimizerStep(10**4),
    "optimizer step, 1e6 parameters": OptimizerStep(10**6),
    "optimizer step, 1e7 parameters": OptimizerStep(10**7),
    "MLP 784-128-10, batch 32": TrainingStep(partial(mlp, (784, 128, 10)), (784,), 32),
    "MLP 784-1024-1024-10, batch 128": TrainingStep(
        partial(mlp, (784, 1024, 1024, 10)), (784,), 128
    ),
    "LeNet 28×28, batch 64": TrainingStep(partial(lenet, (1, 28, 28)), (1, 28, 28), 64),
    "ResNet-20 32×32, batch 32": TrainingStep(
        partial(resnet, (3, 3, 3), image=(3, 32, 32)), (3, 32, 32), 32
    ),
    "2 transformer blocks, d 256, sequence 128, batch 8": TrainingStep(
        partial(transformer, 64, length=128, width=256, heads=4, hidden=1024, depth=2),
        (128, 64),
        8,
        heads=4,
    ),
}
"""Everything that is measured, by the name that the table shows."""
