"""Compares the shapes of outputs with those that the model declares.

onnxruntime only logs a warning if they differ, but the shape of targets follows from the declared
one: targets of another shape than the output would be broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from ortops._common.numbers import Array
from ortops.engine.trainable.metadata import TrainingMetadata
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.input_values import Input
from ortops.errors import ModelError

_MOST = 2**24
"""The largest number of elements of an output that is computed only to be compared."""


class DeclaredShapes:
    """The declared shapes of the outputs that a loss reads.

    Args:
        proto: The model.
        metadata: What the builder wrote about it.
        inputs: The inputs of a step.

    Attributes:
        pending: Whether no batch has been compared yet.
    """

    def __init__(self, proto: onnx.ModelProto, metadata: TrainingMetadata, inputs: Inputs) -> None:
        read = {note.tensor for note in (metadata.prediction, *metadata.predictions)}
        self._inputs = inputs
        self._copies = metadata.training_copies
        self._shapes = {
            value.name: tuple(
                dim.dim_value or dim.dim_param or None for dim in value.type.tensor_type.shape.dim
            )
            for value in proto.graph.output
            if value.name in read and value.type.tensor_type.HasField("shape")
        }

        self.pending = bool(self._shapes)

    def to_compute(self, names: list[str], feeds: Mapping[str, Array]) -> list[str]:
        """Returns which outputs of a step to compute for a comparison.

        Args:
            names: The outputs of the step.
            feeds: A checked batch.
        """
        sizes = self._sizes(feeds)
        found = []
        for name in names:
            dims = self._shapes.get(self._copies.get(name, name))
            known = [sizes.get(dim, 1) if isinstance(dim, str) else dim or 1 for dim in dims or ()]
            if dims is not None and math.prod(known) <= _MOST:
                found.append(name)
        return found

    @property
    def tensors(self) -> tuple[str, ...]:
        """The outputs."""
        return tuple(self._shapes)

    def check(self, found: Mapping[str, Array], feeds: Mapping[str, Array]) -> None:
        """Raises an error if an output does not have the shape that the model declares.

        Args:
            found: Outputs by name; others than those that a loss reads are ignored.
            feeds: The batch that they were computed from, checked.

        Raises:
            ModelError: If a shape differs.
        """
        sizes = self._sizes(feeds)
        for name, array in found.items():
            source = self._copies.get(name, name)
            if source not in self._shapes:
                continue
            dims = self._shapes[source]
            known = [sizes.get(dim) if isinstance(dim, str) else dim for dim in dims]
            differs = len(known) != array.ndim or any(
                size not in (None, own) for size, own in zip(known, array.shape, strict=True)
            )
            if differs:
                raise ModelError(
                    f"model: output '{source}' is declared with shape "
                    f"{Input(source, None, dims).shown}, but for this batch it has shape "
                    f"{list(array.shape)}; targets of the declared shape would be broadcast, so "
                    "declare the shape that the model computes"
                )
        self.pending = False

    def _sizes(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Returns the sizes of symbols in a batch."""
        return {
            dim: size
            for name, array in feeds.items()
            if name in self._inputs
            for dim, size in zip(self._inputs[name].dims or (), array.shape, strict=False)
            if isinstance(dim, str)
        }
