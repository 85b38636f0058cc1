"""``ortops predict``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.cli.data import read_classes, read_data, rows_of, sampled, wanted_inputs
from ortops.cli.streams import read_model
from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files import write_atomically
from ortops.inference import InferenceSession
from ortops.training.feeds import Input

__all__ = ["predict"]

Array: TypeAlias = npt.NDArray[Any]


def predict(options: argparse.Namespace) -> int:
    """Runs a model on a data set, batch by batch."""
    if not options.data:
        raise OrtopsError("--data is missing; see ortops predict --help")
    suffix = Path(options.output).suffix.lower()
    if options.output != "-" and suffix not in (".npz", ".csv"):
        raise OrtopsError(f"--output is '{options.output}'; an .npz or .csv file or - is accepted")
    model = read_model(options.model)
    inputs = wanted_inputs(model, only_model=True)
    classes = read_classes(model)
    labels = {one.name for one in wanted_inputs(model)} | set(classes)
    data = read_data(
        options.data,
        inputs,
        columns=options.columns,
        classes=classes,
        ignored=labels - {one.name for one in inputs},
        scale=options.scale,
        mean=options.mean,
        deviation=options.deviation,
    )
    for sentence in data.said:
        print(sentence, file=sys.stderr)
    session = InferenceSession(model)
    known = [value.name for value in session.get_outputs()]
    wanted = options.outputs or known
    for name in wanted:
        if name not in known:
            raise OrtopsError(f"--outputs: there is no '{name}'; {did_you_mean(name, known)}")
    cut = sampled(inputs)
    takes = {one.name: Input(one.name, one.dtype, one.dims) for one in inputs}
    size = rows_of(data, inputs)
    batch = options.batch_size or 256
    pieces: dict[str, list[Array]] = {name: [] for name in wanted}
    for start in range(0, size, batch):
        feeds = {
            name: takes[name].fit(array[start : start + batch] if name in cut else array, {})
            for name, array in data.arrays.items()
        }
        rows = min(batch, size - start)
        for name, found in zip(wanted, session.run(wanted, feeds), strict=True):
            if not isinstance(found, np.ndarray) or not found.ndim or len(found) != rows:
                raise OrtopsError(
                    f"--outputs: '{name}' has no row for each row of the data; name others"
                )
            pieces[name].append(found)
    arrays = {name: np.concatenate(found) for name, found in pieces.items() if found}
    if suffix == ".npz":
        files = {"file": np.array(data.files)} if data.files else {}
        write_atomically(options.output, _archive(files | arrays))
        return 0
    names = [names for name, names in classes.items() if name not in takes]
    text = _table(arrays, data.files, names[0] if len(names) == 1 else [])
    if options.output == "-":
        sys.stdout.write(text)
    else:
        write_atomically(options.output, text.encode())
    return 0


def _archive(arrays: dict[str, Array]) -> bytes:
    """Returns what `numpy.savez` would write, which takes no array called ``file``."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    return stream.getvalue()


def _table(arrays: dict[str, Array], files: Sequence[str], classes: Sequence[str]) -> str:
    """Returns arrays as CSV: a column for each number of a row, called by the class if it has one.

    Args:
        arrays: The arrays.
        files: The file of each row, if they are of files.
        classes: The names of classes, if they are known.
    """
    header: list[str] = ["file"] if files else []
    columns: list[Any] = [files] if files else []
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        count = flat.shape[1]
        each = classes if array.ndim == 2 and count == len(classes) else range(count)
        header += [name] if array.ndim == 1 else [f"{name}_{one}" for one in each]
        columns += list(flat.T)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*columns, strict=True))
    return stream.getvalue()
