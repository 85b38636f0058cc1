"""The inputs that a file of data fills, and what it fills them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.data.rows import Column
from ortops.errors import FeedError
from ortops.graph.row_axes import row_axes_of_model

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Wanted:
    """An input that a data set fills.

    Attributes:
        name: Its name.
        dtype: Its element type.
        dims: Its shape, with None for unknown sizes; None if the rank is unknown.
        is_target: Whether it is a target of the loss.
        axis: The axis of its rows; None if it is the same in every batch.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | None, ...] | None
    is_target: bool = False
    axis: int | None = 0


@dataclass
class DataFile:
    """A data set.

    Attributes:
        arrays: The rows for each input, all with the same number of them.
        classes: For inputs given as class names, these names in the order of their numbers.
        columns: For inputs formed from columns of a table with other names, these names.
        pixels: For a folder of images, the numbers by which pixels were prepared, as texts.
        said: The automatic choices that were made, one sentence each.
        files: For a folder of images, the file names in the order of the rows.
    """

    arrays: dict[str, Column]
    classes: dict[str, list[str]] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    pixels: dict[str, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def wanted_inputs(model: onnx.ModelProto, *, only_model: bool = False) -> list[Wanted]:
    """Returns the inputs that a data set fills: those of the model and those of its loss.

    Args:
        model: A model, trainable or not.
        only_model: Whether to omit the inputs of the loss.
    """
    given = {tensor.name for tensor in model.graph.initializer}
    axes = row_axes_of_model(model).axes
    found = [_wanted(value, axes) for value in model.graph.input if value.name not in given]
    if model.training_info and not only_model:
        targets = {v.name: v for info in model.training_info for v in info.algorithm.input}
        found += [_wanted(value, axes, is_target=True) for value in targets.values()]
    return found


def _wanted(
    value: onnx.ValueInfoProto, axes: Mapping[str, int], *, is_target: bool = False
) -> Wanted:
    tensor = value.type.tensor_type
    dims = (
        tuple(dim.dim_value or None for dim in tensor.shape.dim)
        if tensor.HasField("shape")
        else None
    )
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type or 1))
    return Wanted(value.name, dtype, dims, is_target, axes.get(value.name))


def row_axes_of(inputs: Sequence[Wanted]) -> dict[str, int]:
    """Returns which axis of which inputs has one row per sample; the others have no rows."""
    return {one.name: one.axis for one in inputs if one.axis is not None}


def rows_of(data: DataFile, axes: Mapping[str, int]) -> int:
    """Returns the number of rows of a data set.

    Args:
        data: The data set.
        axes: Which axes have them.

    Raises:
        FeedError: If its arrays have different numbers of rows.
    """
    shapes: dict[str, tuple[int, ...]] = {name: data.arrays[name].shape for name in axes}
    lengths = {n: shape[axes[n]] if len(shape) > axes[n] else None for n, shape in shapes.items()}
    found = next(iter(lengths.values()), None)
    if found is None or set(lengths.values()) != {found}:
        shown = ", ".join(
            f"'{name}' {length or 'none'}" + f" along axis {axes[name]}" * (axes[name] > 0)
            for name, length in lengths.items()
        )
        raise FeedError(f"data: the arrays must have the same number of rows, got {shown}")
    return found
