"""Setting aside a part of a data set for validation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ortops.engine.training.data import Source
from ortops.errors import ArgumentError, FeedError


def hold_out(
    size: int,
    fraction: float,
    seed: int | None = None,
    *,
    name: str,
    unit: str = "rows",
    sizes: npt.NDArray[np.int64] | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Divides rows: ``floor(n · (1 - fraction))`` of n are for training, the others for validation.

    Args:
        size: The number of rows.
        fraction: The fraction for validation.
        seed: Determines the rows for validation, which are drawn at random. None for the last ones,
            as ``validation_split`` of ``keras.Model.fit`` takes them.
        name: The name of the argument.
        unit: What the data set consists of.
        sizes: The number of rows of each group of rows that are held out together, or not at all;
            the last group that is held out may make them more. They need a seed.

    Returns:
        The rows for training and those for validation, in the order in which they are drawn.

    Raises:
        ArgumentError: If one of the parts would be empty.

    Example:
        >>> [rows.tolist() for rows in hold_out(5, 0.3, name="validation_split")]
        [[0, 1, 2], [3, 4]]
    """
    kept = math.floor(size * (1.0 - fraction))
    groups = np.arange(size) if sizes is None else np.arange(len(sizes))
    order = groups if seed is None else np.random.default_rng(seed).permutation(len(groups))
    first = size - kept  # of the groups that are kept, in this order
    if sizes is not None:
        first = int(np.searchsorted(np.cumsum(sizes[order]), size - kept)) + 1
    if not 0 < kept < size or first >= len(groups):
        raise ArgumentError(
            f"{name} must leave {unit} for training and for validation, got "
            f"{fraction:g} of {size} {unit}: {kept} would be for training"
        )
    if seed is None:
        return np.arange(kept), np.arange(kept, size)
    if sizes is None:
        return order[first:], order[:first]
    ends = np.cumsum(sizes)
    rows = [np.arange(ends[each] - sizes[each], ends[each]) for each in order]
    return np.concatenate(rows[first:]), np.concatenate(rows[:first])


def split_source(source: Source, fraction: float) -> tuple[Source, Source]:
    """Divides a data set: the first rows are for training, before any shuffling, the last ones not.

    Args:
        source: The data set; of given batches, batches count in place of rows.
        fraction: The fraction for validation, between 0 and 1.

    Raises:
        ArgumentError: If one of the parts would be empty.
        FeedError: If rows or batches cannot be read by number.

    Source:
        ``validation_split`` of ``keras.Model.fit``.

    Example:
        >>> from ortops.docs import examples
        >>> from ortops.engine.training.data import open_data
        >>> rows = {name: array.repeat(10, 0) for name, array in examples.BATCH.items()}
        >>> source = open_data(rows, examples.session().inputs, batch_size=4)
        >>> [part.rows for part in split_source(source, 0.25)]
        [7, 3]
    """
    if source.part is None:
        raise FeedError(
            "validation_split: these data are read from the beginning to the end, so their last "
            "part is not known in advance and may differ between epochs; give arrays, a table, "
            "samples by number or a list of batches, or pass the validation data as validation="
        )
    size, unit = source.rows, "rows"
    if size is None:
        size, unit = source.batches, "batches"
    assert size is not None
    kept = len(hold_out(size, fraction, name="validation_split", unit=unit)[0])
    return replace(source.part(0, kept), prefetch=source.prefetch), source.part(kept, size)
