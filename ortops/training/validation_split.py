"""Setting aside the last part of a data set for validation."""

from __future__ import annotations

import math
from dataclasses import replace

from ortops.errors import ArgumentError, FeedError
from ortops.training.data import Source

__all__ = ["split_source"]


def split_source(source: Source, fraction: float) -> tuple[Source, Source]:
    """Divides a data set: the first part is for training, the last one for validation.

    Of n rows, the first ``floor(n · (1 - fraction))`` are for training, before any shuffling; of
    given batches, as many of these.

    Args:
        source: The data set.
        fraction: The fraction for validation, between 0 and 1.

    Raises:
        ArgumentError: If one of the parts would be empty.
        FeedError: If rows or batches cannot be read by number.

    Source:
        ``validation_split`` of ``keras.Model.fit``.

    Example:
        >>> from ortops import examples
        >>> from ortops.training.data import open_data
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
    kept = math.floor(size * (1.0 - fraction))
    if not 0 < kept < size:
        raise ArgumentError(
            f"validation_split must leave {unit} for training and for validation, got "
            f"{fraction:g} of {size} {unit}: {kept} would be for training"
        )
    return source.part(0, kept), replace(source.part(kept, size), prefetch=0)
