"""Reads files of data: arrays, tables with named columns, and folders of images by class."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ortops._common.numbers import cast_numbers
from ortops.data.folders import classes_of
from ortops.data.images import EXTENSIONS, Decoder, Images, image_files, make_decoder, read_images
from ortops.data.rows import Column
from ortops.data.tables import Table, in_type, numbered, read_csv
from ortops.data.wanted import DataFile, Wanted
from ortops.engine.training.arrow import ARROW, open_arrow
from ortops.errors import FeedError, OrtopsError
from ortops.graph.files.archive import check_size, read_arrays
from ortops.graph.files.opening import open_regular


def read_data(
    path: str,
    inputs: Sequence[Wanted],
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    classes: Mapping[str, Sequence[str]] | None = None,
    usual: Mapping[str, Sequence[str]] | None = None,
    pixels: Mapping[str, Any] | None = None,
    ignored: Collection[str] = (),
    piped: BinaryIO | None = None,
) -> DataFile:
    """Reads a data set.

    Floats are converted to the precision of their input.

    Args:
        path: An ``.npz``, ``.csv``, ``.parquet``, ``.arrow`` or ``.feather`` file, or a folder of
            images.
        inputs: The inputs to fill.
        columns: The columns of inputs that are formed from those of other names.
        classes: The class names stored in the model, by input.
        usual: The columns of inputs for which the table has neither given columns nor one of their
            name.
        pixels: ``scale``, ``mean`` and ``std`` of images, as for `ortops.data.image_folder`, but by
            default not scaled.
        ignored: Columns that do not become part of an input unless they are named.
        piped: Comma-separated values to read instead of the file.

    Raises:
        FeedError: If the data do not fit the inputs.
        OrtopsError: If the file format is not supported.
    """
    suffix, columns, classes = Path(path).suffix.lower(), columns or {}, classes or {}

    def of_table(names: Sequence[str], column: Callable[[str], Any]) -> DataFile:
        return Table(names, column, path, columns, classes, ignored, usual or {}).data(inputs)

    if piped is None and Path(path).is_dir():
        found = _read_folder(Path(path), inputs, classes, pixels or {})
    elif piped is not None or suffix == ".csv":
        with io.TextIOWrapper(piped or open_regular(path), "utf-8-sig", newline="") as stream:
            if piped is None:
                check_size(f"data '{path}'", Path(path).stat().st_size)
            table = read_csv(stream, path)
        found = of_table(list(table), table.__getitem__)
    elif suffix == ".npz":
        found = _read_npz(path, inputs, columns)
    elif suffix in (".parquet", *ARROW):
        rows = open_arrow(path)
        found = of_table(rows.names, rows.column)
    else:
        raise OrtopsError(
            f"data '{path}': unsupported file format; give an .npz, .csv, .parquet, .arrow or "
            ".feather file, a folder of images, or -"
        )
    for wanted in inputs:
        found.arrays[wanted.name] = _rounded(found.arrays[wanted.name], wanted, path)
    return found


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


def _read_npz(
    path: str, inputs: Sequence[Wanted], columns: Mapping[str, Sequence[str]]
) -> DataFile:
    stored = {one.name: ",".join(columns.get(one.name, [one.name])) for one in inputs}
    texts = [stored[one.name] for one in inputs if one.dtype.kind == "O"]
    with open_regular(path) as stream:
        arrays = read_arrays(stream, f"data '{path}'", list(dict.fromkeys(stored.values())), texts)
    return DataFile({name: arrays[other] for name, other in stored.items()})


def _decoder(wanted: Wanted, pixels: Mapping[str, Any]) -> Decoder:
    """Returns what reads images for an input."""
    channels, height, width, first = _layout(wanted)
    has_axis = wanted.dims is not None and len(wanted.dims) == 4
    return make_decoder(
        channels="L" if channels == 1 else "RGB",
        size=(height, width) if height and width else None,
        axis=(0 if first else -1) if has_axis else None,
        dtype=wanted.dtype,
        where=f"the type of input '{wanted.name}'",
        sizeless=f"input '{wanted.name}' has no fixed size to resize them to",
        **pixels,
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
    pixels: Mapping[str, Any],
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
            found.said.append(f"the folders of '{folder}' are classes: {numbered(names)}")
        found.classes[target] = names
        found.arrays[target] = in_type(numbers.tolist(), labels[0], f"data '{folder}'")
        dims = labels[0].dims or ()
        if labels[0].dtype.kind == "f" and len(dims) == 2 and dims[1] != 1:  # as `image_folder`
            found.arrays[target] = np.eye(len(names), dtype=labels[0].dtype)[numbers]
    found.arrays[images[0].name], said = read_images(folder, files, _decoder(images[0], pixels))
    found.said += said
    return found
