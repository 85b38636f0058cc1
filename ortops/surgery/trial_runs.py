"""Runs of a model on random rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.uninterrupted import finished_at_exit
from ortops.errors import (
    UnsupportedError,
    is_raised_by,
)
from ortops.surgery.reading import (
    Array,
    constant,
    open_model,
)

ROWS, MORE_ROWS = 3, 2
"""The number of rows run through each node, and of further rows run through the whole model."""

_UNKNOWN_SIZES = (32, 16, 64, 8, 128, 224, 640, 2)
"""The sizes to try for axes of unknown size, until the model runs."""

_LARGEST_HIDDEN = 129
"""Batch sizes to try are smaller, where nodes take another one than the shapes of inputs say."""

Run: TypeAlias = Callable[[Mapping[str, Array]], list[Array]]


@finished_at_exit
def opened(proto: onnx.ModelProto, folder: Path | None = None) -> Run:
    """Returns a function that runs a model in stock onnxruntime.

    Raises:
        CannotRunError: If onnxruntime cannot load it.
    """
    with _Refusals():
        session = open_model(proto, folder)
    names = {value.name for value in session.get_inputs()}

    @finished_at_exit
    def run(feeds: Mapping[str, Array]) -> list[Array]:
        with _Refusals():
            found: list[Array] = session.run(
                None, {name: array for name, array in feeds.items() if name in names}
            )
        return found

    return run


class CannotRunError(UnsupportedError):
    """onnxruntime cannot run a model, or rejects its inputs."""


class _Refusals:
    """Converts errors of onnxruntime to a `CannotRunError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and is_raised_by(error, "onnxruntime"):
            text = " ".join(str(error).split())
            raise CannotRunError(
                f"model: onnxruntime cannot run it ({text[:300]}), so a dynamic batch cannot be "
                "verified; give a model that runs"
            ) from error


def drawn(
    graph: ir.Graph, axes: Mapping[ir.Value, int], batch: int, run: Run
) -> tuple[list[dict[str, Array]], dict[str, Array]]:
    """Returns random rows, each repeated to a batch, and random inputs without a batch.

    Raises:
        CannotRunError: If the model cannot run on any of them.
    """
    refusal: CannotRunError | None = None
    for size, numbers in itertools.product(_UNKNOWN_SIZES, ((0, 2), (1, 2))):
        generator = np.random.default_rng(0)
        symbols = {
            dim: size for v in graph.inputs for dim in v.shape or () if not isinstance(dim, int)
        }
        alone: list[dict[str, Array]] = [{} for _ in range(ROWS + MORE_ROWS + (batch == ROWS))]
        fixed: dict[str, Array] = {}
        for value in graph.inputs:
            if value.name in graph.initializers:
                continue
            assert value.shape is not None
            shape = [dim if isinstance(dim, int) else symbols[dim] for dim in value.shape]
            if value not in axes:
                fixed[value.name or ""] = _random(value, shape, generator, numbers)
                continue
            shape[axes[value]] = 1
            for feeds in alone:
                row = _random(value, shape, generator, numbers)
                feeds[value.name or ""] = np.repeat(row, batch, axis=axes[value])
        try:
            for feeds in alone:
                run({**feeds, **fixed})
            return alone, fixed
        except CannotRunError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def drawn_for_hidden_batch(
    graph: ir.Graph, axes: Mapping[ir.Value, int], run: Run
) -> tuple[int, list[dict[str, Array]], dict[str, Array]]:
    """Returns the batch size that nodes were exported for, and what is drawn for it.

    The inputs name their batch axis, and yet the model does not run with one row.

    Raises:
        CannotRunError: If the model cannot run on such a batch either.
    """
    named = all(not isinstance((value.shape or [])[place], int) for value, place in axes.items())
    shapes = (constant(node.inputs[1]) for node in graph if node.op_type in ("Expand", "Reshape"))
    firsts = [int(shape[0]) for shape in shapes if shape is not None and shape.size and named]
    sizes = {size for size in range(2, _LARGEST_HIDDEN) for n in firsts if n > 0 and n % size == 0}
    for size in sorted(sizes, reverse=True):
        with contextlib.suppress(CannotRunError):
            return size, *drawn(graph, axes, size, run)
    return 1, *drawn(graph, axes, 1, run)


def _random(
    value: ir.Value, shape: Sequence[int], generator: np.random.Generator, numbers: tuple[int, int]
) -> Array:
    """Returns values for an input: normal floats, or small integers, which are mostly valid."""
    if value.dtype is None or value.dtype.numpy().kind not in "biuf":
        raise UnsupportedError(
            f"input '{value.name}' must be numeric or boolean, got {value.dtype}, for which a "
            "dynamic batch cannot be verified with random values"
        )
    dtype = value.dtype.numpy()
    if dtype.kind == "f":
        return generator.standard_normal(shape).astype(dtype)
    drawn: Array = generator.integers(*((0, 256) if dtype == np.uint8 else numbers), size=shape)
    return drawn.astype(dtype)


def cause_of(error: CannotRunError) -> str:
    """Returns what onnxruntime says, shortened."""
    return " ".join(str(error.__cause__).split())[:200]
