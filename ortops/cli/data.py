"""Data sets in files: arrays, tables with named columns, folders of images by class."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.errors import FeedError, OrtopsError, did_you_mean

__all__ = ["DataFile", "Wanted", "read_data", "wanted_inputs"]

Array: TypeAlias = npt.NDArray[Any]

_IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Wanted:
    """An input that data are for.

    Attributes:
        name: Its name.
        dtype: Its element type.
        dims: Its sizes; None where one is not known, or all of them are not.
        is_target: Whether the loss compares outputs with it.
    """

    name: str
    dtype: np.dtype[Any]
    dims: tuple[int | None, ...] | None
    is_target: bool = False


@dataclass
class DataFile:
    """A data set.

    Attributes:
        arrays: An array for each input, all of one length.
        classes: For inputs whose values were names, these names in the order of the numbers that
            stand for them.
        said: What was chosen for the user, a sentence each.
    """

    arrays: dict[str, Array]
    classes: dict[str, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def wanted_inputs(model: onnx.ModelProto, *, only_model: bool = False) -> list[Wanted]:
    """Returns the inputs that a data set fills: the model's, and those of its loss.

    Args:
        model: A model, trainable or not.
        only_model: Whether those of the loss are left out.
    """
    given = {tensor.name for tensor in model.graph.initializer}
    found = [_wanted(value) for value in model.graph.input if value.name not in given]
    if model.training_info and not only_model:
        algorithm = model.training_info[0].algorithm
        found += [_wanted(value, is_target=True) for value in algorithm.input]
    return found


def _wanted(value: onnx.ValueInfoProto, *, is_target: bool = False) -> Wanted:
    tensor = value.type.tensor_type
    dims = (
        tuple(dim.dim_value or None for dim in tensor.shape.dim)
        if tensor.HasField("shape")
        else None
    )
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type or 1))
    return Wanted(value.name, dtype, dims, is_target)


def read_data(
    path: str,
    inputs: Sequence[Wanted],
    *,
    columns: Sequence[str] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    scale: float | None = None,
    mean: Sequence[float] | None = None,
    deviation: Sequence[float] | None = None,
) -> DataFile:
    """Reads a data set.

    Args:
        path: An ``.npz``, ``.csv`` or ``.parquet`` file, a folder of images, or ``-``.
        inputs: The inputs that are to be filled.
        columns: ``input=column,column`` for inputs that are made of columns of other names.
        classes: Names that numbers stand for in the model's file, by input.
        scale: What the numbers of images are divided by.
        mean: What is subtracted from each channel then.
        deviation: What each channel is divided by then.

    Raises:
        FeedError: If the data do not fit the inputs.
        OrtopsError: If a file of this kind cannot be read.
    """
    classes = classes or {}
    suffix = Path(path).suffix.lower()
    if path != "-" and Path(path).is_dir():
        if columns:
            raise OrtopsError("--columns: a folder of images has no columns; leave it out")
        pictures = _Pictures(scale or 1.0, mean, deviation)
        return _read_folder(Path(path), inputs, classes, pictures)
    if scale is not None or mean or deviation:
        raise OrtopsError(f"--scale, --mean, --deviation: '{path}' is no folder of images")
    if path == "-":
        table = _csv_columns(sys.stdin, "standard input")
        return _from_table(table, inputs, columns, classes, "standard input")
    if suffix == ".npz":
        return _read_npz(path, inputs, columns)
    if suffix == ".csv":
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            return _from_table(_csv_columns(stream, path), inputs, columns, classes, path)
    if suffix == ".parquet":
        return _from_table(_parquet_columns(path), inputs, columns, classes, path)
    raise OrtopsError(
        f"data '{path}': a file of this kind is not read; an .npz, .csv or .parquet file, a folder "
        "of images or - is accepted"
    )


# ---------------------------------------------------------------------------------- arrays


def _read_npz(path: str, inputs: Sequence[Wanted], columns: Sequence[str] | None) -> DataFile:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise FeedError(f"data '{path}': {error}; give what numpy.savez has written") from error
    chosen = _chosen(columns, inputs)
    found = {}
    for name in (wanted.name for wanted in inputs):
        stored_name = ",".join(chosen.get(name, [name]))
        if stored_name not in arrays:
            raise FeedError(
                f"data '{path}': it has no array '{stored_name}', which is for input '{name}'; "
                + did_you_mean(stored_name, arrays)
            )
        found[name] = arrays[stored_name]
    return DataFile(found)


def _chosen(columns: Sequence[str] | None, inputs: Sequence[Wanted]) -> dict[str, list[str]]:
    """Returns the columns that were chosen for inputs."""
    known = [wanted.name for wanted in inputs]
    found: dict[str, list[str]] = {}
    for text in columns or ():
        name, equals, listed = text.partition("=")
        if not equals or not listed:
            raise OrtopsError(f"--columns: {text!r} was given; INPUT=COLUMN,COLUMN is accepted")
        if name not in known:
            raise OrtopsError(f"--columns: there is no input '{name}'; {did_you_mean(name, known)}")
        found[name] = listed.split(",")
    return found


# ---------------------------------------------------------------------------------- tables


def _csv_columns(stream: io.TextIOBase | Any, path: str) -> dict[str, list[str]]:
    rows = csv.reader(stream)
    header = next(rows, None)
    if not header:
        raise FeedError(f"data '{path}': it is empty; a line of column names comes first")
    if len(set(header)) != len(header):
        raise FeedError(f"data '{path}': its column names {header} are not all different")
    table: list[list[str]] = []
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        if len(row) != len(header):
            raise FeedError(
                f"data '{path}': line {number} has {len(row)} columns, and the first line names "
                f"{len(header)}"
            )
        table.append(row)
    return {name: [row[i] for row in table] for i, name in enumerate(header)}


def _parquet_columns(path: str) -> dict[str, Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise OrtopsError(
            f"data '{path}': pyarrow is not installed, which reads .parquet files; install "
            "ortops[tables]"
        ) from error
    table = parquet.read_table(path)
    return {name: table[name].to_pylist() for name in table.column_names}


def _from_table(
    table: Mapping[str, Sequence[Any]],
    inputs: Sequence[Wanted],
    columns: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]],
    path: str,
) -> DataFile:
    """Makes arrays of columns: those that were chosen, those of an input's name, and the others."""
    found = DataFile({})
    chosen = _chosen(columns, inputs)
    for wanted in inputs:
        if wanted.name not in chosen and wanted.name in table:
            chosen[wanted.name] = [wanted.name]
    taken = {name for names in chosen.values() for name in names}
    rest = [name for name in table if name not in taken]
    open_inputs = [wanted for wanted in inputs if wanted.name not in chosen]
    if len(open_inputs) == 1 and rest and not open_inputs[0].is_target:
        name = open_inputs[0].name
        chosen[name] = rest
        found.said.append(f"input '{name}' is made of the columns {', '.join(rest)}")
    for wanted in inputs:
        if wanted.name not in chosen:
            raise FeedError(
                f"data '{path}': no column is called '{wanted.name}', as an input is; say "
                f"--columns {wanted.name}=COLUMN,… (its columns are {', '.join(table)})"
            )
        for name in chosen[wanted.name]:
            if name not in table:
                raise OrtopsError(
                    f"data '{path}': there is no column '{name}'; {did_you_mean(name, table)}"
                )
        found.arrays[wanted.name] = _made_of(
            [(name, table[name]) for name in chosen[wanted.name]], wanted, classes, path, found
        )
    return found


def _made_of(
    columns: Sequence[tuple[str, Sequence[Any]]],
    wanted: Wanted,
    classes: Mapping[str, Sequence[str]],
    path: str,
    found: DataFile,
) -> Array:
    """Returns the array of an input that some columns make."""
    arrays = [_numbers(name, values, wanted, classes, path, found) for name, values in columns]
    rank = None if wanted.dims is None else len(wanted.dims)
    if len(arrays) == 1 and (arrays[0].ndim > 1 or rank != 2):
        joined = arrays[0]
    else:
        joined = np.stack(arrays, axis=1)
    rest = () if wanted.dims is None else wanted.dims[1:]
    if rank is not None and joined.ndim != rank and all(isinstance(dim, int) for dim in rest):
        size = int(np.prod([dim for dim in rest if dim is not None]))
        if joined.ndim == 2 and joined.shape[1] == size:
            joined = joined.reshape(-1, *(dim for dim in rest if dim is not None))
    return joined


def _numbers(
    name: str,
    values: Sequence[Any],
    wanted: Wanted,
    classes: Mapping[str, Sequence[str]],
    path: str,
    found: DataFile,
) -> Array:
    """Returns a column as numbers: those of class names where they are for labels."""
    whole = wanted.dtype.kind in "iub"
    try:
        if values and isinstance(values[0], str):
            kind: Callable[[str], Any] = int if whole else float
            return np.array([kind(value) for value in values], wanted.dtype)
        if any(value is None for value in values):
            raise FeedError(f"data '{path}': column '{name}' has empty values; fill or drop them")
        array = np.array(values)
        if array.dtype.kind in "biuf":
            return array
    except ValueError:
        pass
    row, value = next((i, v) for i, v in enumerate(values) if not _is_number(v, whole=whole))
    if not whole or not isinstance(value, str) or value == "":
        raise FeedError(
            f"data '{path}': row {row + 1} of column '{name}' is {value!r}; input '{wanted.name}' "
            f"takes {'integers' if whole else 'numbers'}"
        )
    names = list(classes.get(wanted.name, sorted(set(map(str, values)))))
    if wanted.name not in classes:
        found.said.append(
            f"the names in column '{name}' are classes: "
            + ", ".join(f"{number} {one}" for number, one in enumerate(names))
        )
    found.classes[wanted.name] = names
    number_of = {one: number for number, one in enumerate(names)}
    for one in map(str, values):
        if one not in number_of:
            raise FeedError(
                f"data '{path}': column '{name}' has the class '{one}', which the training did not "
                f"have; {did_you_mean(one, names)}"
            )
    return np.array([number_of[str(one)] for one in values], wanted.dtype)


def _is_number(value: Any, *, whole: bool) -> bool:
    try:
        int(value) if whole else float(value)
    except (TypeError, ValueError):
        return False
    return True


# ---------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class _Pictures:
    """How images become numbers."""

    scale: float
    mean: Sequence[float] | None
    deviation: Sequence[float] | None

    def array(self, path: Path, wanted: Wanted) -> Array:
        """Returns an image as an input takes it: resized, channels where the model has them."""
        try:
            from PIL import Image
        except ImportError as error:
            raise OrtopsError(
                f"data '{path.parent.parent}': Pillow is not installed, which reads images; "
                "install ortops[images]"
            ) from error
        channels, height, width, first = _layout(wanted)
        try:
            with Image.open(path) as opened:
                image = opened.convert("L" if channels == 1 else "RGB")
        except OSError as error:
            raise FeedError(f"data '{path}': {error}; remove it or mend it") from error
        if height and width and image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(image)
        if wanted.dtype.kind in "iu":
            if self.scale != 1 or self.mean or self.deviation:
                raise OrtopsError(
                    f"--scale, --mean, --deviation: input '{wanted.name}' takes {wanted.dtype}, so "
                    "images are given as they are; leave these out"
                )
            numbers = pixels.astype(wanted.dtype)
        else:
            exact = pixels.astype(np.float64) / self.scale
            exact = (exact - np.array(self.mean or 0.0)) / np.array(self.deviation or 1.0)
            numbers = exact.astype(wanted.dtype)
        if numbers.ndim == 2 and wanted.dims is not None and len(wanted.dims) == 4:
            numbers = numbers[..., None]
        if first and numbers.ndim == 3:
            numbers = np.moveaxis(numbers, -1, 0)
        return numbers


def _layout(wanted: Wanted) -> tuple[int, int | None, int | None, bool]:
    """Returns channels, height and width of an input, and whether channels come first."""
    dims = wanted.dims
    if dims is not None and len(dims) == 4 and dims[1] in (1, 3):
        return dims[1], dims[2], dims[3], True
    if dims is not None and len(dims) == 4 and dims[3] in (1, 3):
        return dims[3], dims[1], dims[2], False
    if dims is not None and len(dims) == 3:
        return 1, dims[1], dims[2], False
    shown = "unknown" if dims is None else str([dim or "?" for dim in dims])
    raise FeedError(
        f"input '{wanted.name}': its shape is {shown}; images are read for [batch, 1 or 3, height, "
        "width], [batch, height, width, 1 or 3] and [batch, height, width]"
    )


def _read_folder(
    folder: Path,
    inputs: Sequence[Wanted],
    classes: Mapping[str, Sequence[str]],
    pictures: _Pictures,
) -> DataFile:
    """Reads a folder that has a folder of images for each class, or images alone."""
    images = [wanted for wanted in inputs if not wanted.is_target]
    labels = [wanted for wanted in inputs if wanted.is_target]
    if len(images) != 1 or len(labels) > 1:
        listed = ", ".join(wanted.name for wanted in inputs)
        raise FeedError(
            f"data '{folder}': a folder of images fills one input of the model and one of the "
            f"loss; there are {listed}"
        )
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _IMAGES)
    if not files:
        raise FeedError(f"data '{folder}': there is no image in it; {', '.join(_IMAGES)} are read")
    found = DataFile({})
    if labels:
        target = labels[0].name
        by_class = [path.relative_to(folder).parts[0] for path in files]
        if any(len(path.relative_to(folder).parts) < 2 for path in files):
            raise FeedError(
                f"data '{folder}': '{files[0].name}' lies in no folder of a class; put the images "
                "of each class into a folder called like it"
            )
        names = list(classes.get(target, sorted(set(by_class))))
        if target not in classes:
            shown = ", ".join(f"{number} {name}" for number, name in enumerate(names))
            found.said.append(f"the folders of '{folder}' are classes: {shown}")
        for one in by_class:
            if one not in names:
                raise FeedError(
                    f"data '{folder}': the training had no class '{one}'; "
                    + did_you_mean(one, names)
                )
        found.classes[target] = names
        found.arrays[target] = np.array([names.index(n) for n in by_class], labels[0].dtype)
    arrays = [pictures.array(path, images[0]) for path in files]
    if len({array.shape for array in arrays}) > 1:
        raise FeedError(
            f"data '{folder}': the images have different sizes, and input '{images[0].name}' has "
            "none of its own; make them of one size"
        )
    found.arrays[images[0].name] = np.stack(arrays)
    return found
