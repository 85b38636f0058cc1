"""Data sets in files: arrays, tables with named columns, folders of images by class."""

from __future__ import annotations

import csv
import io
import json
import sys
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.errors import FeedError, OrtopsError, did_you_mean
from ortops.training import tables

__all__ = [
    "CLASSES_KEY",
    "Classes",
    "DataFile",
    "Wanted",
    "note",
    "read_classes",
    "read_data",
    "rows_of",
    "sampled",
    "wanted_inputs",
]

Array: TypeAlias = npt.NDArray[Any]

Classes: TypeAlias = dict[str, list[str]]

CLASSES_KEY = "ortops.classes"
"""Where a file says, as JSON, which names the numbers of labels stand for, by input."""

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
        files: Of a folder of images the names in it, in the order of the rows.
    """

    arrays: dict[str, Array]
    classes: dict[str, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


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
    ignored: Collection[str] = (),
) -> DataFile:
    """Reads a data set.

    Floats get the precision of the input that they are for.

    Args:
        path: An ``.npz``, ``.csv`` or ``.parquet`` file, a folder of images, or ``-``.
        inputs: The inputs that are to be filled.
        columns: ``input=column,column`` for inputs that are made of columns of other names.
        classes: Names that numbers stand for in the model's file, by input.
        scale: What the numbers of images are divided by.
        mean: What is subtracted from each channel then.
        deviation: What each channel is divided by then.
        ignored: Columns that are no part of an input unless they are named.

    Raises:
        FeedError: If the data do not fit the inputs.
        OrtopsError: If a file of this kind cannot be read.
    """
    found = _read(path, inputs, columns, classes or {}, (scale, mean, deviation), ignored)
    for wanted in inputs:
        found.arrays[wanted.name] = _rounded(found.arrays[wanted.name], wanted, path)
    return found


def _rounded(array: Array, wanted: Wanted, path: str) -> Array:
    """Returns floats in the precision of an input."""
    if array.dtype.kind != "f" or array.dtype == wanted.dtype or wanted.dtype.kind in "iub":
        return array
    with np.errstate(over="ignore"):
        result = array.astype(wanted.dtype)
    lost = np.isfinite(array) & ~np.isfinite(result)
    if lost.any():
        raise FeedError(
            f"data '{path}': input '{wanted.name}' is given {array[lost].flat[0]}, which "
            f"{wanted.dtype} does not hold"
        )
    return result


def _read(
    path: str,
    inputs: Sequence[Wanted],
    columns: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]],
    pixels: tuple[float | None, Sequence[float] | None, Sequence[float] | None],
    ignored: Collection[str],
) -> DataFile:
    suffix = Path(path).suffix.lower()
    if path != "-" and Path(path).is_dir():
        if columns:
            raise OrtopsError("--columns: a folder of images has no columns; leave it out")
        scale, mean, deviation = pixels
        pictures = _Pictures(scale or 1.0, mean, deviation)
        return _read_folder(Path(path), inputs, classes, pictures)
    if any(pixels):
        raise OrtopsError(f"--scale, --mean, --deviation: '{path}' is no folder of images")
    if path == "-":
        stream = io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", newline="")
        table = _csv_columns(stream, "standard input")
        return _from_table(table, inputs, columns, classes, "standard input", ignored)
    if suffix == ".npz":
        return _read_npz(path, inputs, columns)
    if suffix == ".csv":
        with Path(path).open(newline="", encoding="utf-8-sig") as stream:
            table = _csv_columns(stream, path)
        return _from_table(table, inputs, columns, classes, path, ignored)
    if suffix == ".parquet":
        return _from_table(_parquet_columns(path), inputs, columns, classes, path, ignored)
    raise OrtopsError(
        f"data '{path}': a file of this kind is not read; an .npz, .csv or .parquet file, a folder "
        "of images or - is accepted"
    )


def sampled(inputs: Sequence[Wanted]) -> list[str]:
    """Returns the inputs that have a row for each sample; the others are the same for all."""
    free = [one.name for one in inputs if one.dims is None or one.dims[:1] == (None,)]
    return free or [one.name for one in inputs if one.dims]


def rows_of(data: DataFile, inputs: Sequence[Wanted]) -> int:
    """Returns how many rows a data set has.

    Raises:
        FeedError: If its arrays differ in that.
    """
    shapes: dict[str, tuple[int, ...]] = {name: data.arrays[name].shape for name in sampled(inputs)}
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    found = next(iter(lengths.values()), None)
    if found is None or set(lengths.values()) != {found}:
        shown = ", ".join(f"'{name}' {length or 'none'}" for name, length in lengths.items())
        raise FeedError(f"data: the arrays have no common number of rows ({shown}); give one")
    return found


def read_classes(model: onnx.ModelProto) -> Classes:
    """Returns the names that a model notes for the numbers of labels, by input."""
    text = next((entry.value for entry in model.metadata_props if entry.key == CLASSES_KEY), "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    fits = isinstance(found, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in found.values()
    )
    if not fits:
        raise OrtopsError(
            f"metadata_props '{CLASSES_KEY}': it is {text!r:.80}; an object of arrays of names is "
            "accepted"
        )
    return dict(found or {})


def note(model: onnx.ModelProto, key: str, value: object) -> None:
    """Writes something into the metadata of a model, as JSON."""
    entry = next((entry for entry in model.metadata_props if entry.key == key), None)
    entry = entry or model.metadata_props.add(key=key)
    entry.value = json.dumps(value)


# ---------------------------------------------------------------------------------- arrays


def _read_npz(path: str, inputs: Sequence[Wanted], columns: Sequence[str] | None) -> DataFile:
    try:
        with Path(path).open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("it is no archive of arrays")
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
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
        if name in found:
            raise OrtopsError(
                f"--columns: input '{name}' is named twice; say {name}=COLUMN,COLUMN once"
            )
        found[name] = listed.split(",")
    return found


# ---------------------------------------------------------------------------------- tables


def _csv_columns(stream: io.TextIOBase, path: str) -> dict[str, list[str]]:
    try:
        return _csv_table(stream, path)
    except UnicodeDecodeError as error:
        raise FeedError(f"data '{path}': {error}; save it in UTF-8") from error
    except csv.Error as error:
        raise FeedError(f"data '{path}': {error}; give comma-separated values") from error


def _csv_table(stream: io.TextIOBase, path: str) -> dict[str, list[str]]:
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
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise OrtopsError(
            f"data '{path}': pyarrow is not installed, which reads .parquet files; install "
            "ortops[tables]"
        ) from error
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise FeedError(f"data '{path}': {error}; give a Parquet file") from error
    found = {}
    for name in table.column_names:
        column = table[name]
        if pyarrow.types.is_dictionary(column.type):  # categories of pandas
            column = column.cast(column.type.value_type)
        found[name] = column
    return found


def _from_table(
    table: Mapping[str, Sequence[Any]],
    inputs: Sequence[Wanted],
    columns: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]],
    path: str,
    ignored: Collection[str],
) -> DataFile:
    """Makes arrays of columns: those that were chosen, those of an input's name, and the others."""
    found = DataFile({})
    chosen = _chosen(columns, inputs)
    for wanted in inputs:
        if wanted.name not in chosen and wanted.name in table:
            chosen[wanted.name] = [wanted.name]
    taken = {name for names in chosen.values() for name in names}
    rest = [name for name in table if name not in taken and name not in ignored]
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
    if len(arrays) > 1 and any(array.ndim > 1 for array in arrays):
        raise FeedError(
            f"data '{path}': a row of column '{columns[0][0]}' or of another that make input "
            f"'{wanted.name}' has several numbers; make the input of one such column"
        )
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
    if not isinstance(values, list):  # of arrow
        try:
            array = tables.dense(values)
        except ValueError as error:
            raise FeedError(
                f"data '{path}': column '{name}': {error}; fill or drop them"
            ) from error
        if array.dtype.kind in "biuf":
            return _whole(array) if wanted.dtype.kind in "iub" else array
        values = array.tolist()
    whole = wanted.dtype.kind in "iub"
    numbers = [_number(value, whole=whole) for value in values]
    if None not in numbers:
        try:
            return np.array(numbers, wanted.dtype if whole else np.float64)
        except OverflowError as error:
            raise FeedError(
                f"data '{path}': column '{name}' has a number that {wanted.dtype} does not hold, "
                f"which input '{wanted.name}' takes"
            ) from error
    names = classes.get(wanted.name)
    row, value = next((i, v) for i, v in enumerate(values) if numbers[i] is None)
    are_names = whole and all(isinstance(one, str) and one for one in values)
    if not are_names or (names is None and _number(value, whole=False) is not None):
        raise FeedError(
            f"data '{path}': row {row + 1} of column '{name}' is {value!r}; input '{wanted.name}' "
            f"takes {'integers, or names of classes' if whole else 'numbers'}"
        )
    if names is None:
        names = sorted(set(values))
        found.said.append(f"the names in column '{name}' are classes: {_numbered(names)}")
    found.classes[wanted.name] = list(names)
    return _places(values, names, wanted, f"data '{path}': column '{name}'")


def _whole(array: Array) -> Array:
    """Returns floats as integers where all of them are, as where a table had missing values."""
    if array.dtype.kind != "f" or not (np.abs(array) < 2**53).all():
        return array
    integers = array.astype(np.int64)
    return integers if (integers == array).all() else array


def _number(value: Any, *, whole: bool) -> int | float | None:
    """Returns what a text says, or None if that is no number, or no integer where one is needed."""
    try:
        if not whole:
            return float(value)
        return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return int(number) if whole and number.is_integer() else None


def _numbered(names: Sequence[str]) -> str:
    return ", ".join(f"{number} {name}" for number, name in enumerate(names))


def _places(values: Sequence[str], names: Sequence[str], wanted: Wanted, where: str) -> Array:
    """Returns the numbers that stand for names of classes."""
    number_of = {name: number for number, name in enumerate(names)}
    for value in values:
        if value not in number_of:
            raise FeedError(
                f"{where} has the class '{value}', which the training did not have; "
                + did_you_mean(value, names)
            )
    return np.array([number_of[value] for value in values], wanted.dtype)


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
            from PIL import Image, ImageOps
        except ImportError as error:
            raise OrtopsError(
                f"data '{path.parent.parent}': Pillow is not installed, which reads images; "
                "install ortops[images]"
            ) from error
        channels, height, width, first = _layout(wanted)
        for option, given in (("mean", self.mean), ("deviation", self.deviation)):
            if len(given or ()) not in (0, 1, channels):
                raise OrtopsError(
                    f"--{option} has {len(given or ())} numbers; one, or one for each channel of "
                    f"input '{wanted.name}', which has {channels}, is accepted"
                )
        try:
            with Image.open(path) as opened:
                if opened.mode.startswith(("I", "F")):  # Pillow cuts these off at 255
                    raise ValueError(f"its pixels have more than 8 bits (mode {opened.mode})")
                upright = ImageOps.exif_transpose(opened)
                image = upright.convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
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
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in _IMAGES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise FeedError(f"data '{folder}': there is no image in it; {', '.join(_IMAGES)} are read")
    found = DataFile({}, files=[path.relative_to(folder).as_posix() for path in files])
    if labels:
        target = labels[0].name
        by_class = []
        for path in files:
            if path.parent == folder:
                raise FeedError(
                    f"data '{folder}': '{path.name}' lies in no folder of a class; put the images "
                    "of each class into a folder called like it"
                )
            by_class.append(path.relative_to(folder).parts[0])
        names = classes.get(target)
        if names is None:
            names = sorted(set(by_class))
            found.said.append(f"the folders of '{folder}' are classes: {_numbered(names)}")
        found.classes[target] = list(names)
        found.arrays[target] = _places(by_class, names, labels[0], f"data '{folder}': it")
    arrays = [pictures.array(path, images[0]) for path in files]
    if len({array.shape for array in arrays}) > 1:
        raise FeedError(
            f"data '{folder}': the images have different sizes, and input '{images[0].name}' has "
            "none of its own; make them of one size"
        )
    found.arrays[images[0].name] = np.stack(arrays)
    return found
