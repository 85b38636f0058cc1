"""``ortops predict``."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.cli.data import read_data, wanted_inputs
from ortops.cli.streams import read_model
from ortops.errors import OrtopsError, did_you_mean
from ortops.graph.files import write_atomically
from ortops.inference import InferenceSession

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
    data = read_data(
        options.data,
        inputs,
        columns=options.columns,
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
    types = {one.name: one.dtype for one in inputs}
    size = len(next(iter(data.arrays.values()), ()))
    batch = options.batch_size or 256
    pieces: dict[str, list[Array]] = {name: [] for name in wanted}
    for start in range(0, size, batch):
        feeds = {
            name: np.ascontiguousarray(array[start : start + batch], types.get(name))
            for name, array in data.arrays.items()
        }
        rows = len(next(iter(feeds.values())))
        for name, found in zip(wanted, session.run(wanted, feeds), strict=True):
            if not isinstance(found, np.ndarray) or not found.ndim or len(found) != rows:
                raise OrtopsError(
                    f"--outputs: '{name}' has no row for each row of the data; name others"
                )
            pieces[name].append(found)
    arrays = {name: np.concatenate(found) for name, found in pieces.items() if found}
    if suffix == ".npz":
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]  # any name is a keyword there
        write_atomically(options.output, stream.getvalue())
        return 0
    text = _table(arrays)
    if options.output == "-":
        sys.stdout.write(text)
    else:
        write_atomically(options.output, text.encode())
    return 0


def _table(arrays: dict[str, Array]) -> str:
    """Returns arrays as CSV: a column for each number of a row."""
    header: list[str] = []
    columns: list[Array] = []
    for name, array in arrays.items():
        flat = array.reshape(len(array), -1)
        header += [name] if array.ndim == 1 else [f"{name}_{i}" for i in range(flat.shape[1])]
        columns += list(flat.T)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(zip(*columns, strict=True))
    return stream.getvalue()
