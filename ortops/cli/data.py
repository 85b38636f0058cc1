"""Reads data sets from files: arrays, tables with named columns, and folders of images by class."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops._common.numbers import cast_numbers
from ortops._common.optional import optional_module
from ortops.cli.standard_streams import say, standard_input
from ortops.data.folders import classes_of
from ortops.data.images import EXTENSIONS, Decoder, Images, image_files, read_images
from ortops.engine.training import foreign_arrays
from ortops.engine.training.arrow import ARROW, open_arrow
from ortops.engine.training.foreign_arrays import RowIndex
from ortops.errors import FeedError, OrtopsError, did_you_mean
from ortops.graph.files.archive import check_size, read_arrays
from ortops.graph.files.json_text import read_json
from ortops.graph.files.opening import open_regular
from ortops.graph.row_axes import along, row_axes_of_model, rows_to

Array: TypeAlias = npt.NDArray[Any]

Classes: TypeAlias = dict[str, list[str]]

CLASSES_KEY = "ortops.classes"
"""The metadata key under which a model stores the class names of its labels as JSON, by input."""

_SHOWN = 20  # the most names in a message

_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0")
"""The names that pandas gives to an index written as a column."""

_PARQUET_SIZES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
"""The bytes per value of a Parquet type, where they are not 8."""


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


Column: TypeAlias = Array | Images
"""The rows of a data set for one input."""


def select(column: Column, rows: RowIndex, axis: int = 0) -> Column:
    """Returns some rows of a column, which are along an axis; images are not read yet."""
    return column.select(rows) if isinstance(column, Images) else column[along(axis, rows)]


@dataclass
class DataFile:
    """A data set.

    Attributes:
        arrays: The rows for each input, all with the same number of them.
        classes: For inputs given as class names, these names in the order of their numbers.
        said: The automatic choices that were made, one sentence each.
        files: For a folder of images, the file names in the order of the rows.
    """

    arrays: dict[str, Column]
    classes: dict[str, list[str]] = field(default_factory=dict)
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

    Floats are converted to the precision of their input.

    Args:
        path: An ``.npz``, ``.csv``, ``.parquet``, ``.arrow`` or ``.feather`` file, a folder of
            images, or ``-``.
        inputs: The inputs to fill.
        columns: ``input=column,column`` for inputs formed from columns of other names.
        classes: The class names stored in the model, by input.
        scale: The divisor of image pixels.
        mean: The value then subtracted from each channel.
        deviation: The value that each channel is then divided by.
        ignored: Columns that do not become part of an input unless they are named.

    Raises:
        FeedError: If the data do not fit the inputs.
        OrtopsError: If the file format is not supported.
    """
    found = _read(path, inputs, columns, classes or {}, (scale, mean, deviation), ignored)
    for wanted in inputs:
        found.arrays[wanted.name] = _rounded(found.arrays[wanted.name], wanted, path)
    return found


def read_given(
    options: argparse.Namespace,
    path: str,
    inputs: Sequence[Wanted],
    classes: Classes,
    *,
    ignored: Collection[str] = (),
) -> DataFile:
    """Reads a data set with the options of the command line, and prints the automatic choices."""
    scale = options.scale
    if scale is None and path != "-" and Path(path).is_dir():
        floats = any(each.dtype.kind == "f" for each in inputs if not each.is_target)
        scale = 255.0 if floats else None  # as in `image_folder`
        if floats:
            say(f"pixels of '{path}' are divided by 255; --scale 1 leaves them as they are")
    settings = {"columns": options.columns, "scale": scale, "mean": options.mean}
    data = read_data(
        path, inputs, classes=classes, ignored=ignored, deviation=options.std, **settings
    )
    for sentence in data.said:
        say(sentence)
    return data


def _rounded(array: Column, wanted: Wanted, path: str) -> Column:
    """Returns floats in the precision of an input."""
    if isinstance(array, Images) or array.dtype.kind != "f" or wanted.dtype.kind in "iubO":
        return array
    result, lost = cast_numbers(array, wanted.dtype)
    if lost is not None:
        raise FeedError(
            f"data '{path}': input '{wanted.name}' has the value {lost}, which is out of range for "
            f"{wanted.dtype}"
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
            raise OrtopsError("--columns: a folder of images has no columns; omit --columns")
        scale, mean, deviation = pixels
        pictures = _Pictures(1.0 if scale is None else scale, mean, deviation)
        return _read_folder(Path(path), inputs, classes, pictures)
    if any(option is not None for option in pixels):
        raise OrtopsError(
            f"--scale, --mean, --std: '{path}' is not a folder of images; omit these options"
        )
    if path == "-":
        piped = io.TextIOWrapper(standard_input(), "utf-8-sig", newline="")
        table = _csv_columns(piped, "standard input")
        return _Table(table, "standard input", columns, classes, ignored).data(inputs)
    if suffix == ".npz":
        return _read_npz(path, inputs, columns)
    if suffix == ".csv":
        with io.TextIOWrapper(open_regular(path), "utf-8-sig", newline="") as stream:
            check_size(f"data '{path}'", Path(path).stat().st_size)
            table = _csv_columns(stream, path)
        return _Table(table, path, columns, classes, ignored).data(inputs)
    if suffix == ".parquet":
        with open_regular(path) as file:
            parquet = _ParquetColumns(file, path)
            return _Table(parquet, path, columns, classes, ignored).data(inputs)
    if suffix in ARROW:
        return _Table(_ArrowColumns(path), path, columns, classes, ignored).data(inputs)
    raise OrtopsError(
        f"data '{path}': unsupported file format; give an .npz, .csv, .parquet, .arrow or .feather "
        "file, a folder of images, or -"
    )


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


def read_classes(model: onnx.ModelProto) -> Classes:
    """Returns the class names stored in a model, by input."""
    text = next((entry.value for entry in model.metadata_props if entry.key == CLASSES_KEY), "{}")
    try:
        found = read_json(text)
    except ValueError:
        found = None
    fits = isinstance(found, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in found.values()
    )
    if not fits:
        raise OrtopsError(
            f"metadata_props '{CLASSES_KEY}' must be a JSON object of arrays of names, got "
            f"{text!r:.80}"
        )
    return dict(found or {})


# ---------------------------------------------------------------------------------- arrays


def _read_npz(path: str, inputs: Sequence[Wanted], columns: Sequence[str] | None) -> DataFile:
    chosen = _chosen(columns, inputs)
    stored = {one.name: ",".join(chosen.get(one.name, [one.name])) for one in inputs}
    texts = [stored[one.name] for one in inputs if one.dtype.kind == "O"]
    with open_regular(path) as stream:
        arrays = read_arrays(stream, f"data '{path}'", list(dict.fromkeys(stored.values())), texts)
    return DataFile({name: arrays[other] for name, other in stored.items()})


def _chosen(columns: Sequence[str] | None, inputs: Sequence[Wanted]) -> dict[str, list[str]]:
    """Returns the columns given for each input."""
    known = [wanted.name for wanted in inputs]
    found: dict[str, list[str]] = {}
    for text in columns or ():
        name, equals, listed = text.partition("=")
        if not equals or not listed:
            raise OrtopsError(f"--columns must have the form INPUT=COLUMN,COLUMN, got {text!r}")
        if name not in known:
            raise OrtopsError(f"--columns: there is no input '{name}'; {did_you_mean(name, known)}")
        if name in found:
            raise OrtopsError(
                f"--columns: input '{name}' is given twice; give {name}=COLUMN,COLUMN once"
            )
        found[name] = listed.split(",")
    return found


# ---------------------------------------------------------------------------------- tables


def _csv_columns(stream: io.TextIOBase, path: str) -> dict[str, list[str]]:
    try:
        return _csv_table(stream, path)
    except UnicodeDecodeError as error:
        raise FeedError(f"data '{path}': {error}; save it as UTF-8") from error
    except csv.Error as error:
        raise FeedError(f"data '{path}': {error}; give comma-separated values") from error


def _csv_table(stream: io.TextIOBase, path: str) -> dict[str, list[str]]:
    rows = csv.reader(stream, strict=True)  # otherwise an unclosed quote swallows the rest
    header = next(rows, None)
    if not header:
        raise FeedError(f"data '{path}' is empty; its first line must name the columns")
    _check_names(header, path)
    others = [mark for mark in ";\t|" if mark in header[0]] if len(header) == 1 else []
    if others:
        raise FeedError(
            f"data '{path}': its first line names a single column, {header[0]!r:.80}; if "
            f"{others[0]!r} separates columns, save it with commas"
        )
    table: list[list[str]] = []
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise FeedError(
                f"data '{path}': line {rows.line_num} has {len(row)} columns, but the first line "
                f"names {len(header)}"
            )
        if any("\0" in cell for cell in row):
            raise FeedError(
                f"data '{path}': line {rows.line_num} has a NUL character, so the file is probably "
                "not UTF-8; save it as UTF-8"
            )
        table.append(row)
    return {name: [row[i] for row in table] for i, name in enumerate(header)}


def _check_names(names: Sequence[str], path: str) -> None:
    """Rejects duplicate column names."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FeedError(f"data '{path}' has two columns '{name!s:.80}'; rename one of them")
        if "\0" in name:
            raise FeedError(
                f"data '{path}': a column name has a NUL character, so the file is probably not "
                "UTF-8; save it as UTF-8"
            )
        seen.add(name)


class _ParquetColumns(Mapping[str, Any]):
    """The columns of a Parquet file, each read on access."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        pyarrow = optional_module(f"data '{path}'", "pyarrow", "tables")
        parquet = optional_module(f"data '{path}'", "pyarrow.parquet", "tables")
        self._types: Any = pyarrow.types
        self._broken = (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError)
        self._path = path
        with self._named():
            self._file = parquet.ParquetFile(file)
            self._names = list(self._file.schema_arrow.names)
        _check_names(self._names, path)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Adds the file name to errors of pyarrow."""
        try:
            yield
        except FeedError:
            raise
        except self._broken as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # an error of the operating system, not of a corrupt file
            why = str(error).strip().split("\n")[0][:200] or type(error).__name__
            raise FeedError(f"data '{self._path}': {why}; give a Parquet file") from error

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        with self._named():
            check_size(f"data '{self._path}': column '{name}'", self._size(name))
            column = self._file.read(columns=[name])[name]
            if self._types.is_dictionary(column.type):  # categories of pandas
                column = column.cast(column.type.value_type)
        return column

    def _size(self, name: str) -> int:
        """Returns the size of a column in bytes, as a few bytes may encode many values."""
        metadata, size = self._file.metadata, 0
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        for group in groups:
            for part in (group.column(number) for number in range(group.num_columns)):
                if part.path_in_schema == name or part.path_in_schema.startswith(f"{name}."):
                    size += part.num_values * _PARQUET_SIZES.get(part.physical_type, 8)
        return size

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _ArrowColumns(Mapping[str, Any]):
    """The columns of an Arrow or Feather file, each read on access."""

    def __init__(self, path: str) -> None:
        self._rows = open_arrow(path)
        _check_names(self._rows.names, path)
        check_size(f"data '{path}'", self._rows.size)

    def __getitem__(self, name: str) -> Any:
        if name not in self._rows.names:
            raise KeyError(name)
        return self._rows.column(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.names)

    def __len__(self) -> int:
        return len(self._rows.names)


@dataclass
class _Table:
    """Forms arrays from columns with names.

    An input gets the columns chosen for it, else the column of its name. A single remaining input
    gets all remaining columns.

    Attributes:
        columns: The columns, by name.
        path: What messages call the file.
        given: ``input=column,column`` for inputs formed from columns of other names.
        classes: The class names stored in the model, by input.
        ignored: Columns that do not become part of an input unless they are named.
    """

    columns: Mapping[str, Sequence[Any]]
    path: str
    given: Sequence[str] | None
    classes: Mapping[str, Sequence[str]]
    ignored: Collection[str]

    def data(self, inputs: Sequence[Wanted]) -> DataFile:
        """Returns the arrays of inputs."""
        found, chosen = DataFile({}), _chosen(self.given, inputs)
        axes = row_axes_of(inputs)
        for wanted in inputs:
            if wanted.name not in chosen and wanted.name in self.columns:
                chosen[wanted.name] = [wanted.name]
        taken = {name for names in chosen.values() for name in names}
        rest = [name for name in self.columns if name not in taken and name not in self.ignored]
        indices = [name for name in rest if not name or _INDEX.fullmatch(name)]
        rest = [name for name in rest if name not in indices]
        open_inputs = [wanted for wanted in inputs if wanted.name not in chosen]
        if len(open_inputs) == 1 and rest and not open_inputs[0].is_target:
            name = open_inputs[0].name
            chosen[name] = rest
            found.said.append(f"input '{name}' is formed from the columns {_listed(rest)}")
            if indices:
                found.said.append("an unnamed column is ignored, as it looks like a row index")
        for wanted in inputs:
            if wanted.name not in chosen:
                raise FeedError(
                    f"data '{self.path}' has no column for input '{wanted.name}'; give --columns "
                    f"{wanted.name}=COLUMN,… (the columns are {_listed(list(self.columns))})"
                )
            for name in chosen[wanted.name]:
                if name not in self.columns:
                    raise OrtopsError(
                        f"data '{self.path}': there is no column '{name}'; "
                        f"{did_you_mean(name, self.columns)}"
                    )
            rows = self._array(chosen[wanted.name], wanted, found)
            found.arrays[wanted.name] = rows_to(rows, axes.get(wanted.name, 0))
        return found

    def _array(self, names: Sequence[str], wanted: Wanted, found: DataFile) -> Array:
        """Returns the array of an input that is formed from columns."""
        read = self._texts if wanted.dtype.kind == "O" else self._numbers
        arrays = [read(name, wanted, found) for name in names]
        if len(arrays) > 1 and any(array.ndim > 1 for array in arrays):
            raise FeedError(
                f"data '{self.path}': columns with several numbers per row cannot be combined to "
                f"input '{wanted.name}' ('{names[0]}' and others); give it a single such column"
            )
        rank = None if wanted.dims is None else len(wanted.dims)
        if len(arrays) == 1 and (arrays[0].ndim > 1 or rank != 2):
            joined = arrays[0]
        else:
            joined = np.stack(arrays, axis=1)
        rest = () if wanted.dims is None else wanted.dims[1:]
        sizes = [dim for dim in rest if dim is not None]
        flat = joined.ndim == 2 and rank not in (None, 2) and len(sizes) == len(rest)
        if flat and joined.shape[1] == math.prod(sizes):
            joined = joined.reshape(-1, *sizes)
        return joined

    def _texts(self, name: str, wanted: Wanted, found: DataFile) -> Array:
        """Returns a column as strings."""
        values = self.columns[name]
        texts = np.empty(len(values), object)
        texts[:] = values if isinstance(values, list) else values.to_pylist()  # type: ignore[attr-defined]
        wrong = next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise FeedError(
                f"data '{self.path}': row {wrong + 1} of column '{name}' must be a string for "
                f"input '{wanted.name}', got {texts[wrong]!r:.80}"
            )
        return texts

    def _numbers(self, name: str, wanted: Wanted, found: DataFile) -> Array:
        """Returns a column as numbers; class names of labels become their numbers."""
        values, where = self.columns[name], f"data '{self.path}': column '{name}'"
        if not isinstance(values, list):  # a column of pyarrow
            try:
                array = foreign_arrays.dense(values)
            except (ValueError, TypeError, NotImplementedError) as error:
                raise FeedError(f"{where}: {error}; fill or drop them") from error
            if array.dtype.kind in "mMV":  # times would become integers of some unit
                raise FeedError(f"{where} must be numeric, got type {array.dtype}")
            if array.dtype.kind in "biuf":
                return _whole(array) if wanted.dtype.kind in "iub" else array
            values = array.tolist()
        whole = wanted.dtype.kind in "iub"
        numbers = [_number(value, whole=whole) for value in values]
        if None not in numbers:
            return _integers(numbers, wanted, where) if whole else np.array(numbers, np.float64)
        names = self.classes.get(wanted.name)
        row, value = next((i, v) for i, v in enumerate(values) if numbers[i] is None)
        are_names = whole and all(isinstance(one, str) and one for one in values)
        if not are_names or (names is None and _number(value, whole=False) is not None):
            raise FeedError(
                f"data '{self.path}': row {row + 1} of column '{name}' must be "
                f"{'an integer or a class name' if whole else 'a number'} for input "
                f"'{wanted.name}', got {value!r:.80}"
            )
        if names is None:
            names = sorted(set(values))
            found.said.append(f"the names in column '{name}' are classes: {_numbered(names)}")
        found.classes[wanted.name] = list(names)
        return _places(values, names, wanted, where)


def _whole(array: Array) -> Array:
    """Returns floats as integers if all are whole numbers.

    pandas stores integers as floats where values are missing.
    """
    if array.dtype.kind != "f" or not (np.abs(array) < 2**53).all():
        return array
    integers = array.astype(np.int64)
    return integers if (integers == array).all() else array


def _number(value: Any, *, whole: bool) -> int | float | None:
    """Returns a cell as a number; None if it is not one, or not an integer where one is needed."""
    is_text = isinstance(value, str)
    if is_text and "_" in value:  # Python reads 1_2 as 12
        return None
    try:
        if whole and is_text:
            return int(value)
    except ValueError:  # it may be 3.0
        pass
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if whole:
        integer = int(value if not is_text else number) if number.is_integer() else None
        return integer if is_text or integer == value else None
    if is_text and math.isinf(number) and "inf" not in value.lower():  # 1e999
        return None
    return number


def _integers(numbers: Sequence[Any], wanted: Wanted, where: str) -> Array:
    """Returns integers converted to the type of an input."""
    for kind in (np.int64, np.uint64):
        try:
            result, lost = cast_numbers(np.array(numbers, kind), wanted.dtype)
        except OverflowError:
            continue
        if lost is None:
            return result
        break
    raise FeedError(
        f"{where} has a number out of range for {wanted.dtype}, the type of input '{wanted.name}'"
    )


def _numbered(names: Sequence[str]) -> str:
    return _listed([f"{number} {name}" for number, name in enumerate(names)])


def _listed(names: Sequence[str]) -> str:
    """Returns names for a message; only the first ones if there are many."""
    shown = ", ".join(f"{name!s:.80}" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _places(values: Sequence[str], names: Sequence[str], wanted: Wanted, where: str) -> Array:
    """Returns the numbers of class names."""
    number_of = {name: number for number, name in enumerate(names)}
    for value in values:
        if value not in number_of:
            raise FeedError(
                f"{where} has the class '{value}', which is unknown to the model; "
                + did_you_mean(value, names)
            )
    return _integers([number_of[value] for value in values], wanted, where)


# ---------------------------------------------------------------------------------- images


@dataclass(frozen=True)
class _Pictures:
    """How images become arrays.

    Attributes:
        scale: The divisor of pixels.
        mean: The value then subtracted from each channel.
        deviation: The value that each channel is then divided by.
    """

    scale: float
    mean: Sequence[float] | None
    deviation: Sequence[float] | None

    def check(self, wanted: Wanted) -> None:
        """Rejects settings that do not fit an input."""
        channels = _layout(wanted)[0]
        for option, given in (("mean", self.mean), ("std", self.deviation)):
            if len(given or ()) not in (0, 1, channels):
                counts = " or ".join(map(str, sorted({1, channels})))
                raise OrtopsError(
                    f"--{option} must have {counts} numbers, as input '{wanted.name}' has "
                    f"{channels} channels, got {len(given or ())}"
                )
        numbers = [("scale", self.scale), *(("std", each) for each in self.deviation or ())]
        for option, number in numbers:
            if not math.isfinite(number) or number == 0:
                raise OrtopsError(f"--{option} must be a finite number other than 0, got {number}")
        if not all(math.isfinite(number) for number in self.mean or ()):
            raise OrtopsError(f"--mean must have finite numbers, got {list(self.mean or ())}")
        if wanted.dtype.kind in "iu" and (self.scale != 1 or self.mean or self.deviation):
            raise OrtopsError(
                f"--scale, --mean, --std: input '{wanted.name}' takes unscaled pixels "
                f"({wanted.dtype}); omit these options"
            )

    def decoder(self, wanted: Wanted) -> Decoder:
        """Returns what reads images for an input."""
        self.check(wanted)
        channels, height, width, first = _layout(wanted)
        has_axis = wanted.dims is not None and len(wanted.dims) == 4
        return Decoder(
            channels="L" if channels == 1 else "RGB",
            size=(height, width) if height and width else None,
            axis=(0 if first else -1) if has_axis else None,
            dtype=wanted.dtype,
            scale=self.scale,
            mean=self.mean,
            deviation=self.deviation,
            where=f"the type of input '{wanted.name}'",
            sizeless=f"input '{wanted.name}' has no fixed size to resize them to",
        )


def _layout(wanted: Wanted) -> tuple[int, int | None, int | None, bool]:
    """Returns the channels, height and width of an input, and whether channels come first."""
    dims = wanted.dims
    if dims is not None and len(dims) == 4 and dims[1] in (1, 3):
        return dims[1], dims[2], dims[3], True
    if dims is not None and len(dims) == 4 and dims[3] in (1, 3):
        return dims[3], dims[1], dims[2], False
    if dims is not None and len(dims) == 3:
        return 1, dims[1], dims[2], False
    shown = "unknown" if dims is None else str([dim or "?" for dim in dims])
    raise FeedError(
        f"input '{wanted.name}': images need an input of shape [batch, 1 or 3, height, width], "
        f"[batch, height, width, 1 or 3] or [batch, height, width], got {shown}"
    )


def _read_folder(
    folder: Path,
    inputs: Sequence[Wanted],
    classes: Mapping[str, Sequence[str]],
    pictures: _Pictures,
) -> DataFile:
    """Reads a folder with one subfolder of images per class, or, without labels, any images."""
    images = [wanted for wanted in inputs if not wanted.is_target]
    labels = [wanted for wanted in inputs if wanted.is_target]
    if len(images) != 1 or len(labels) > 1:
        listed = ", ".join(wanted.name for wanted in inputs)
        raise FeedError(
            f"data '{folder}': a folder of images fills one input of the model and one target of "
            f"the loss, but the inputs are {listed}; give an .npz file"
        )
    files, others = image_files(folder)
    if not files:
        raise FeedError(f"data '{folder}' contains no images ({', '.join(EXTENSIONS)})")
    found = DataFile({}, files=[path.relative_to(folder).as_posix() for path in files])
    if others:
        found.said.append(
            f"{len(others)} files in '{folder}', such as '{others[0].relative_to(folder)}', are "
            f"ignored, as they have no extension of an image ({', '.join(EXTENSIONS)})"
        )
    if labels:
        target = labels[0].name
        given = classes.get(target)
        numbers, names = classes_of(folder, files, given, "the classes of the model")
        if given is None:
            found.said.append(f"the folders of '{folder}' are classes: {_numbered(names)}")
        found.classes[target] = names
        found.arrays[target] = _integers(numbers.tolist(), labels[0], f"data '{folder}'")
        dims = labels[0].dims or ()
        if labels[0].dtype.kind == "f" and len(dims) == 2 and dims[1] != 1:  # as `image_folder`
            found.arrays[target] = np.eye(len(names), dtype=labels[0].dtype)[numbers]
    decoder = pictures.decoder(images[0])
    found.arrays[images[0].name], said = read_images(folder, files, decoder)
    found.said += said
    return found
