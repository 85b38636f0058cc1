"""``ortops predict``."""

from __future__ import annotations

import argparse
import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.cli.data import CLASSES_KEY, read_given, read_notes
from ortops.cli.outputs import check_outputs, check_writable
from ortops.cli.standard_streams import print_bytes, say
from ortops.cli.streams import read_model
from ortops.data.wanted import DataFile, Wanted, row_axes_of, rows_of, wanted_inputs
from ortops.engine.inference import InferenceSession
from ortops.engine.training.foreign_arrays import csv_text
from ortops.engine.training.input_values import Input
from ortops.errors import FeedError, OrtopsError, did_you_mean
from ortops.graph.files.atomic import write_atomically
from ortops.graph.files.messages import inputs_by_default
from ortops.graph.row_axes import Pieces, RowAxes, along, row_axes_of_model, rows_first

Array: TypeAlias = npt.NDArray[Any]


def predict(options: argparse.Namespace) -> int:
    """Runs a model on a data set, batch by batch."""
    if not options.data:
        raise OrtopsError("--data is missing; see ortops predict --help")
    suffix = Path(options.output).suffix.lower()
    if options.output != "-" and suffix not in (".npz", ".csv"):
        raise OrtopsError(f"--output must be an .npz or .csv file or -, got '{options.output}'")
    read = {"model": options.model, "--data": options.data}
    check_outputs(read, {"--output": options.output}, force=options.force)
    check_writable({"--output": options.output})
    model = read_model(options.model)
    inputs = wanted_inputs(model, only_model=True)
    classes = read_notes(model, CLASSES_KEY)
    every = wanted_inputs(model)
    labels = {one.name for one in every} | set(classes)
    ignored = labels - {one.name for one in inputs}
    data = read_given(options, options.data, inputs, model, ignored=ignored)
    for name in inputs_by_default(model.graph):
        say(
            f"input '{name}' has a default value, which is used; to feed it, remove its initializer"
        )
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 3  # it warns of each tensor of an adapter
    rows = row_axes_of_model(model)
    arrays, places = _outputs(InferenceSession(model, quiet), data, inputs, rows, options)
    if suffix == ".npz":
        files = {"file": np.array(data.files)} if data.files else {}
        write_atomically(options.output, _archive(files | arrays))
        return 0
    fed = {one.name for one in inputs}
    names = [names for name, names in classes.items() if name not in fed]
    arrays = {name: rows_first(array, places[name]) for name, array in arrays.items()}
    content = _table(arrays, data.files, names[0] if len(names) == 1 else [])
    if options.output == "-":
        print_bytes(content)
    else:
        write_atomically(options.output, content)
    return 0


def _outputs(
    session: InferenceSession,
    data: DataFile,
    inputs: Sequence[Wanted],
    rows: RowAxes,
    options: argparse.Namespace,
) -> tuple[dict[str, Array], dict[str, int]]:
    """Returns the requested outputs for all rows, computed batch by batch, and their row axes."""
    shapes = {value.name: value.shape or None for value in session.get_outputs()}
    wanted = list(dict.fromkeys(options.outputs or shapes))
    for name in wanted:
        if name not in shapes:
            raise OrtopsError(f"--outputs: there is no '{name}'; {did_you_mean(name, shapes)}")
    takes = {one.name: Input(one.name, one.dtype, one.dims) for one in inputs}
    axes = row_axes_of(inputs)
    size = rows_of(data, axes)
    if not size:
        raise FeedError(f"data '{options.data}' has no rows; give at least one")
    batch = options.batch_size or 256
    more = (rows.fixed == 1, "--outputs", "choose other outputs")
    pieces = [Pieces(name, rows.of_output(shapes[name]), *more) for name in wanted]
    for start in range(0, size, batch):
        part = slice(start, start + batch)
        taken = {n: data.arrays[n][along(axis, part)] for n, axis in axes.items()}
        feeds = {n: takes[n].fit(array, {}) for n, array in (data.arrays | taken).items()}
        for piece, found in zip(pieces, session.run(wanted, feeds), strict=True):
            piece.add(found, min(batch, size - start))
    return {p.name: p.joined() for p in pieces}, {p.name: p.axis or 0 for p in pieces}


def _archive(arrays: dict[str, Array]) -> bytes:
    """Returns arrays as an .npz file; `numpy.savez` cannot write an array named ``file``."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                plain = array.astype(np.str_) if array.dtype.kind == "O" else array  # strings
                np.lib.format.write_array(entry, plain, allow_pickle=False)
    return stream.getvalue()


def _table(arrays: dict[str, Array], files: Sequence[str], classes: Sequence[str]) -> bytes:
    """Returns arrays as CSV, with one column per element of a row.

    Columns are named after the classes where there is one per class. File names that are not UTF-8
    keep their bytes. Text that a spreadsheet would read as a formula is preceded by an apostrophe.

    Args:
        arrays: The arrays.
        files: The file of each row, if the data are files.
        classes: The names of the classes, if known.
    """
    header: list[str] = ["file"] if files else []
    columns: list[Any] = [files] if files else []
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        count = flat.shape[1]
        each = classes if array.ndim == 2 and count == len(classes) else range(count)
        header += [name] if array.ndim == 1 else [f"{name}_{one}" for one in each]
        columns += list(flat.T)
    return _encoded(csv_text([header, *zip(*columns, strict=True)]))


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # a model may name its classes with any characters
        return text.encode("utf-8", "backslashreplace")
