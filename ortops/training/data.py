"""Batches: from arrays to feeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.errors import FeedError

__all__ = ["Data", "Feeds", "batches", "count", "length", "rows"]

Feeds: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""One batch: an array for each input, or what can be one (see `ortops.training.feeds.Input`)."""

Data: TypeAlias = Mapping[str, npt.NDArray[Any]] | Iterable[Feeds]
"""A data set: an array for each input, all of one length; or an iterable of batches."""


def batches(
    data: Data, batch_size: int, *, order: np.random.Generator | None = None
) -> Iterator[Feeds]:
    """Yields the batches of a data set.

    Args:
        data: Arrays by name, which are cut along axis 0, or an iterable of batches, which are
            yielded as they are.
        batch_size: How many rows a batch has; the last one has what is left.
        order: Shuffles the rows.

    Raises:
        FeedError: If the arrays are not of one length, or there are none.

    Example:
        >>> [batch["x"].tolist() for batch in batches({"x": np.arange(5)}, 2)]
        [[0, 1], [2, 3], [4]]
    """
    if not isinstance(data, Mapping):
        if not isinstance(data, Iterable):
            raise FeedError(
                f"data: {type(data).__name__} was given; give arrays by name or an iterable of "
                "batches"
            )
        yield from data
        return
    size = length(data)
    _check_batch_size(batch_size)
    places = None if order is None else order.permutation(size)
    for start in range(0, size, batch_size):
        part = slice(start, start + batch_size)
        chosen = part if places is None else places[part]
        yield {name: array[chosen] for name, array in data.items()}


def count(data: Data, batch_size: int) -> int | None:
    """Returns how many batches there will be, or None where that is not known."""
    if isinstance(data, Mapping):
        _check_batch_size(batch_size)
        return -(-length(data) // batch_size)
    try:
        return len(data) if isinstance(data, Sized) else None
    except Exception:  # a loader has a length, but not for every data set
        return None


def rows(feeds: Feeds) -> int:
    """Returns how many samples a batch has: the size of the first axis that there is.

    Args:
        feeds: Arrays by name.

    Raises:
        FeedError: If there are none.
    """
    shapes = {name: array.shape for name, array in feeds.items() if array.ndim}
    if shapes and not any(shape[0] for shape in shapes.values()):
        name, shape = next(iter(shapes.items()))
        raise FeedError(
            f"feeds: '{name}' has shape {list(shape)}, so that there is nothing to compute a loss "
            "from; a batch has at least one row"
        )
    return next((shape[0] for shape in shapes.values() if shape[0]), 1)


def _check_batch_size(batch_size: int) -> None:
    if not hasattr(batch_size, "__index__") or batch_size < 1:
        raise FeedError(f"batch_size is {batch_size!r}; an integer of at least 1 is accepted")


def length(arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    """Returns the number of rows of arrays.

    Raises:
        FeedError: If the arrays are not of one length, or there are none.
    """
    lengths = {name: len(array) if np.ndim(array) else 0 for name, array in arrays.items()}
    if not lengths:
        raise FeedError("data: there are no arrays; give one for each input")
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"'{name}' {length}" for name, length in lengths.items())
        raise FeedError(f"data: the arrays have different lengths ({shown}); they must have one")
    return next(iter(lengths.values()))
