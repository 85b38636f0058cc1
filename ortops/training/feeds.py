"""What a training step is fed: the inputs, and the check of a batch against them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import FeedError, did_you_mean
from ortops.execution.step import Step
from ortops.graph.tensor import numpy_dtype
from ortops.training.data import Feeds

__all__ = ["Input", "Inputs"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Input:
    """An input that a batch fills.

    Attributes:
        name: Its name.
        dtype: Its element type, or None if any is taken.
        dims: Its sizes; a symbol stands for a size that is the same wherever it occurs, None for
            any. None if the rank is not known.
    """

    name: str
    dtype: np.dtype[Any] | None
    dims: tuple[int | str | None, ...] | None

    def fit(self, given: npt.ArrayLike, sizes: dict[str, tuple[int, str]]) -> Array:
        """Returns what was fed as onnxruntime takes it: of the type, contiguous.

        Args:
            given: What was fed.
            sizes: The sizes that symbols have so far, and the inputs that told; extended.

        Raises:
            FeedError: If it does not fit.
        """
        try:
            array = np.asarray(given)
        except ValueError as error:  # rows of different lengths
            raise FeedError(f"feeds: '{self.name}' is no array: {error}; give an array") from error
        if self.dtype is not None and array.dtype != self.dtype:
            array = self._converted(array)
        if self.dims is not None:
            self._check_shape(array.shape, self.dims, sizes)
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array).reshape(array.shape)
        return array

    def _converted(self, array: Array) -> Array:
        wanted = self.dtype
        assert wanted is not None
        kinds = {"i": "iu", "u": "iu"}.get(wanted.kind, wanted.kind)
        if array.dtype.kind not in kinds or not np.can_cast(array.dtype, wanted):
            hint = f" (convert it with .astype(np.{wanted}))" if array.dtype.kind in "biuf" else ""
            raise FeedError(
                f"feeds: '{self.name}' is of type {array.dtype}; {wanted} is accepted{hint}"
            )
        return array.astype(wanted)

    def _check_shape(
        self,
        shape: tuple[int, ...],
        dims: Sequence[int | str | None],
        sizes: dict[str, tuple[int, str]],
    ) -> None:
        if len(dims) != len(shape) or any(
            isinstance(dim, int) and dim != size for dim, size in zip(dims, shape, strict=True)
        ):
            shown = ", ".join("?" if dim is None else str(dim) for dim in dims)
            raise FeedError(f"feeds: '{self.name}' has shape {list(shape)}; [{shown}] is accepted")
        for dim, size in zip(dims, shape, strict=True):
            if isinstance(dim, str):
                known, teller = sizes.setdefault(dim, (size, self.name))
                if known != size:
                    raise FeedError(
                        f"feeds: '{dim}' is {known} in '{teller}' and {size} in '{self.name}'; it "
                        "must be the same in all inputs"
                    )


@dataclass(frozen=True)
class _Labels:
    """An input of labels: how many classes there are, and the label that does not count."""

    name: str
    classes: int | None
    ignored: int | None

    def check(self, labels: Array) -> None:
        if not labels.size:
            raise FeedError(
                f"feeds: '{self.name}' has shape {list(labels.shape)}, so that there is nothing to "
                "compute a loss from; a batch has at least one row"
            )
        bits = 8 * labels.itemsize
        largest = labels.view(f"u{labels.itemsize}").max()  # that of negative ones, if any
        if largest < (self.classes or 2 ** (bits - 1)):
            return
        outside = labels < 0 if self.classes is None else (labels < 0) | (labels >= self.classes)
        wrong = labels[outside & (labels != self.ignored)]
        if wrong.size:
            accepted = "0 and above" if self.classes is None else f"0 to {self.classes - 1}"
            extra = "" if self.ignored is None else f", or {self.ignored}, which does not count"
            raise FeedError(
                f"feeds: '{self.name}' has the label {wrong.flat[0]}; {accepted} are "
                f"accepted{extra}"
            )


class Inputs(dict[str, Input]):
    """The inputs of a training step by name.

    Args:
        steps: The parts of the step.
        unread: Inputs that may be fed although no step reads them.
    """

    def __init__(self, steps: Iterable[Step], unread: Iterable[str]) -> None:
        super().__init__()
        self._unread = frozenset(unread)
        self._labels: list[_Labels] = []
        for step in steps:
            self._labels += _labels(step)
            for value in step.model.graph.inputs:
                name = value.name or ""
                if name in step.feeds:
                    shape = value.shape
                    dims = (
                        None
                        if shape is None
                        else tuple(dim if isinstance(dim, int) else dim.value for dim in shape)
                    )
                    self[name] = Input(name, numpy_dtype(value), dims)

    def check(self, feeds: Feeds) -> dict[str, Array]:
        """Returns the feeds as arrays that fit.

        Raises:
            FeedError: If they do not.
        """
        if not isinstance(feeds, Mapping):
            raise FeedError(
                f"feeds: {type(feeds).__name__} was given; give a dict of an array for each input"
            )
        for name in feeds:
            if name not in self and name not in self._unread:
                raise FeedError(f"feeds: there is no input '{name}'; " + did_you_mean(name, self))
        sizes: dict[str, tuple[int, str]] = {}
        try:
            arrays = {name: value.fit(feeds[name], sizes) for name, value in self.items()}
        except KeyError:
            missing = next(name for name in self if name not in feeds)
            raise FeedError(
                f"feeds: input '{missing}' is missing; the inputs are "
                + ", ".join(f"'{name}'" for name in self)
            ) from None
        for labels in self._labels:
            labels.check(arrays[labels.name])
        return arrays


def _labels(step: Step) -> list[_Labels]:
    """Returns the inputs that are the labels of a loss."""
    found: list[_Labels] = []
    for node in step.model.graph:
        if node.op_type not in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
            continue
        scores, labels = node.inputs[:2]
        if labels is not None and labels.name in step.feeds:
            shape = None if scores is None else scores.shape
            size = None if shape is None or len(shape) < 2 else shape[1]
            classes = size if isinstance(size, int) else None
            ignored = node.attributes.get("ignore_index")
            limit = None if ignored is None else ignored.as_int()
            found.append(_Labels(labels.name or "", classes, limit))
    return found
