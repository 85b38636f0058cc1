"""Joining samples of different lengths to a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, number, whole_number
from ortops.engine.training.feeds import Inputs
from ortops.errors import ArgumentError, FeedError, did_you_mean
from ortops.graph.row_axes import rows_to

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")

_MASKS = ("attention_mask", "mask", "input_mask")
"""Names of inputs with 1 for real values and 0 for padding."""

_LENGTHS = ("lengths", "length", "seq_lengths", "sequence_lengths", "x_lengths")


@dataclass(frozen=True)
class Pad:
    """Joins samples to a batch, and pads arrays to the longest of the batch.

    Only axes whose size is dynamic in the model are padded. An input for lengths or a mask that
    the samples do not have is filled, if its name tells of which input it is: ``<input>_lengths``,
    ``<input>_mask``; or, if one input of the model differs in length, ``lengths``,
    ``attention_mask``, ``mask`` and the like. CTC's lengths of targets are filled, too.

    Args:
        values: What arrays are padded with, one number or a number for each input. By default it is
            the ``ignore_index`` of the loss for labels, and 0 for inputs of the model. Other inputs
            of the loss have no default, as padding would be trained.
        lengths: The inputs that get the lengths of other inputs: ``{"audio": "frames"}``.
        masks: The inputs that get 1 where another input has values, and 0 for padding.
        side: Whether to pad at the end (``"right"``) or at the beginning (``"left"``).
        multiple_of: Lengths are rounded up to a multiple of this number. Fewer different lengths
            make steps faster, as onnxruntime plans its memory for each shape.
        length: The length to pad to in every batch, instead of that of the longest sample.

    Example:
        >>> import ortops
        >>> pad = ortops.data.Pad(values={"labels": -100}, lengths={"audio": "frames"})
        >>> session.fit(samples, collate=pad)  # doctest: +SKIP
    """

    values: float | Mapping[str, float] | None = None
    lengths: Mapping[str, str] | None = None
    masks: Mapping[str, str] | None = None
    side: str = "right"
    multiple_of: int = 1
    length: int | None = None

    def __post_init__(self) -> None:
        choice("Pad: side", self.side, ("left", "right"))
        whole_number("Pad: multiple_of", self.multiple_of, 1)
        if self.length is not None:
            whole_number("Pad: length", self.length, 1)
        for name in ("lengths", "masks"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise ArgumentError(
                    f'Pad: {name} must be a dict such as {{"audio": "frames"}}, got {given!r:.80}'
                )
        values = self.values.values() if isinstance(self.values, Mapping) else [self.values]
        for value in values:
            if value is not None:
                number("Pad: values", value)

    def check(self, inputs: Inputs) -> None:
        """Raises an error if an argument names an input that does not exist.

        Args:
            inputs: The inputs.
        """
        named = list(self.values) if isinstance(self.values, Mapping) else []
        for given in (self.lengths or {}, self.masks or {}):
            named += [*given, *given.values()]
        known = [*inputs, *inputs.unread]
        for name in named:
            if name not in known:
                raise ArgumentError(f"Pad: there is no input '{name}'; {did_you_mean(name, known)}")

    def join(self, samples: Sequence[Any], inputs: Inputs) -> dict[str, Array]:
        """Returns a batch.

        Args:
            samples: The samples, each with an array for each input, by name or in a tuple.
            inputs: The inputs that the batch has to fit.

        Raises:
            FeedError: If samples differ in more than their lengths, or it is not known what to pad
                with.
        """
        columns = inputs.in_columns(samples, range(len(samples)), "of a batch ")
        columns = {name: values for name, values in columns.items() if name in inputs}
        lengths = self._named(self.lengths, columns, inputs, "lengths")
        masks = self._named(self.masks, columns, inputs, "mask")
        batch: dict[str, Array] = {}
        for name, values in columns.items():
            axes = ragged_axes(name, inputs)
            _check(name, values, axes, inputs)
            own = axes if axes is not None else list(range(values[0].ndim))
            if name in lengths:
                batch[lengths[name]] = np.array([value.shape[own[0]] for value in values])
            if name in masks:
                real = [np.ones([value.shape[axis] for axis in own], np.int8) for value in values]
                shape = self._shape(name, real, range(len(own)))
                mask = self._padded(real, shape, 0)
                batch[masks[name]] = _typed(mask, masks[name], inputs)
            shape = self._shape(name, values, own)
            filler: float = 0
            if any(each.shape != shape for each in values):
                filler = self._value(name, inputs, covered=name in lengths or name in masks)
            batch[name] = self._padded(values, shape, filler)
        return {name: rows_to(array, inputs.axis_of(name)) for name, array in batch.items()}

    def _shape(self, name: str, values: Sequence[Array], axes: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape to which the samples of a batch are padded."""
        shape = list(values[0].shape)
        for axis in axes:
            longest = max(each.shape[axis] for each in values)
            if self.length is not None and longest > self.length:
                raise FeedError(
                    f"data: a row of '{name}' has length {longest}, more than length={self.length} "
                    "of Pad; cut the rows, or give a larger length"
                )
            longest = longest if self.length is None else self.length
            shape[axis] = -(-longest // self.multiple_of) * self.multiple_of
        return tuple(shape)

    def _padded(self, values: Sequence[Array], shape: tuple[int, ...], value: float) -> Array:
        """Returns arrays as one."""
        result = np.full((len(values), *shape), value, np.result_type(*values))
        for row, each in zip(result, values, strict=True) if shape else ():
            sizes = zip(each.shape, shape, strict=True)
            ends = [(own, own) if self.side == "right" else (own, whole) for own, whole in sizes]
            row[tuple(slice(end - own, end) for own, end in ends)] = each
        return result if shape else np.stack(values)

    def _value(self, name: str, inputs: Inputs, *, covered: bool) -> float:
        """Returns what an input is padded with."""
        given = self.values.get(name) if isinstance(self.values, Mapping) else self.values
        if given is not None:
            return given
        ignored = set(inputs.ignored_of(name))
        if len(ignored) == 1:
            return ignored.pop()
        if name in inputs.of_loss and not covered:
            kind = "the loss has no ignore_index" if not ignored else "its losses ignore others"
            raise FeedError(
                f"data: the rows of '{name}' differ in length, and {kind}, so padding would be "
                "trained; give the loss an ignore_index, or "
                f'collate=ortops.data.Pad(values={{"{name}": …}}) with what the loss ignores'
            )
        return 0

    def _named(
        self, given: Mapping[str, str] | None, columns: Mapping[str, Any], inputs: Inputs, what: str
    ) -> dict[str, str]:
        """Returns which inputs get the lengths or masks of which others."""
        if given is not None:
            return {name: other for name, other in given.items() if name in columns}
        absent = [name for name in inputs if name not in columns]
        own = [
            name
            for name, values in columns.items()
            if name not in inputs.of_loss and np.ndim(values[0]) and ragged_axes(name, inputs)
        ]
        found: dict[str, str] = {}
        for name in own:
            names = [f"{name}_{what}", f"{name}_{what.removesuffix('s')}"]
            if len(own) == 1:
                names += _LENGTHS if what == "lengths" else _MASKS
            found |= dict.fromkeys([name], next((n for n in absent if n in names), ""))
        if what == "lengths":
            found |= {n: other for n, other in inputs.lengths.items() if n in columns}
        found = {name: other for name, other in found.items() if other in absent}
        for name, other in found.items():
            said = "the lengths" if what == "lengths" else "1 for values and 0 for padding"
            inputs.note(f"'{other}' gets {said} of '{name}'; collate=ortops.data.Pad(…) changes it")
        return found


def ragged_axes(name: str, inputs: Inputs) -> list[int] | None:
    """Returns the axes of a sample of an input whose size is dynamic; None if all may be.

    Args:
        name: The name of the input.
        inputs: The inputs.
    """
    dims = inputs[name].dims if name in inputs else None
    if dims is None:
        return None
    axis = inputs.axis_of(name)
    of_sample = [*dims[:axis], *dims[axis + 1 :]]
    return [place for place, dim in enumerate(of_sample) if not isinstance(dim, int)]


def _differ(values: Sequence[Array], axes: Sequence[int]) -> bool:
    return any(len({value.shape[axis] for value in values}) > 1 for axis in axes)


def _check(name: str, values: Sequence[Array], axes: list[int] | None, inputs: Inputs) -> None:
    """Raises an error if samples differ in other axes than those that may be padded."""
    ranks = {value.ndim for value in values}
    if len(ranks) > 1 or (axes and max(axes) >= values[0].ndim):
        raise FeedError(
            f"data: the samples of '{name}' must have the axes of {inputs[name].shown} without "
            f"that of the rows, got shapes {list(values[0].shape)} to {list(values[-1].shape)}"
        )
    others = [axis for axis in range(values[0].ndim) if axes is not None and axis not in axes]
    if _differ(values, others):
        sizes = sorted({value.shape for value in values})
        raise FeedError(
            f"data: the samples of '{name}' have shapes {list(sizes[0])} and {list(sizes[-1])}, "
            f"which differ in an axis of static size in {inputs[name].shown}; cut or pad them "
            "yourself"
        )


def _typed(mask: Array, name: str, inputs: Inputs) -> Array:
    """Returns a mask in the type of its input."""
    dtype = inputs[name].dtype if name in inputs else None
    return mask if dtype is None else mask.astype(dtype)
