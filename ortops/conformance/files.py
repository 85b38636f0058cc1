"""The cases as files in the format of ONNX's own backend tests.

A case is a folder: ``model.onnx``, and a folder ``test_data_set_<i>`` with ``input_<j>.pb`` and
``output_<j>.pb`` for each data set, in the order of the graph's inputs and outputs. ``data.json``
has ``rtol`` and ``atol``, which ONNX's loader reads, and what the suite knows beside that. Calls of
models with ``training_info`` are in ``training_data_set_0/<k>_<method>``: files ``input_<j>.pb``,
``output_<j>.pb`` and ``state_<j>.pb``, whose tensors have names, which ``data.json`` repeats.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import onnx
from onnx import numpy_helper

from ortops.conformance.case import Array, Call, Case, Citation, Method, Run

__all__ = ["read", "write"]

_KINDS = ("input", "output", "state")
_FIELDS = ("proposal", "refused", "control", "rtol", "atol")


def _write(file: Path, content: bytes) -> None:
    """Writes a file through a temporary one, which replaces what is there, a link too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _write_tensors(folder: Path, kind: str, values: Mapping[str, Array]) -> None:
    for number, (name, value) in enumerate(values.items()):
        tensor = numpy_helper.from_array(value, name)
        _write(folder / f"{kind}_{number}.pb", tensor.SerializeToString())


def _read_tensors(folder: Path, kind: str) -> dict[str, Array]:
    found = {}
    for number in range(len(list(folder.glob(f"{kind}_*.pb")))):
        tensor = onnx.TensorProto()
        tensor.ParseFromString(_content(folder / f"{kind}_{number}.pb"))
        found[tensor.name] = numpy_helper.to_array(tensor)
    return found


def _content(file: Path) -> bytes:
    """Returns the content of a file."""
    if file.exists() and not file.is_file():  # a pipe may have no end
        raise ValueError(f"file '{file}' is not a regular file")
    return file.read_bytes()


def _ordered(
    values: Mapping[str, Array], declared: Iterable[onnx.ValueInfoProto]
) -> dict[str, Array]:
    """Returns arrays in the order of the graph, which is what their files are numbered by."""
    return {value.name: values[value.name] for value in declared if value.name in values}


def write(cases: Iterable[Case], folder: str | os.PathLike[str]) -> None:
    """Writes cases into a folder, each into one of its own.

    Args:
        cases: The cases.
        folder: The folder, which is made if it does not exist.

    Raises:
        ValueError: If a case comes from files that cannot be read.

    Example:
        >>> import tempfile
        >>> from ortops.conformance import cases
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(cases()[:1], folder)
        ...     [case] = read(folder)
        >>> case.name
        'test_adagrad_first_update'
    """
    for case in cases:
        if case.broken:
            raise ValueError(f"{case.name} cannot be written: {case.broken}")
        home = Path(folder) / case.name
        _write(home / "model.onnx", case.model.SerializeToString(deterministic=True))
        for number, run in enumerate(case.runs):
            place = home / f"test_data_set_{number}"
            _write_tensors(place, "input", _ordered(run.inputs, case.model.graph.input))
            _write_tensors(place, "output", _ordered(run.outputs, case.model.graph.output))
        for number, call in enumerate(case.calls):
            place = home / "training_data_set_0" / f"{number:02}_{call.method}"
            for kind, values in _tensors(call).items():
                _write_tensors(place, kind, values)
        facts: dict[str, Any] = {name: getattr(case, name) for name in _FIELDS}
        facts["cites"] = [asdict(cite) for cite in case.cites]
        facts["runs"] = len(case.runs)
        facts["calls"] = [
            {"method": call.method, "entry": call.entry}
            | {kind: list(values) for kind, values in _tensors(call).items()}
            for call in case.calls
        ]
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        _write(home / "data.json", f"{text}\n".encode())


def _tensors(call: Call) -> dict[str, Mapping[str, Array]]:
    """Returns the tensors of a call by the beginnings of their files."""
    return dict(zip(_KINDS, (call.inputs, call.outputs, call.state), strict=True))


def _read_case(home: Path) -> Case:
    links = [path for path in (home, *home.rglob("*")) if path.is_symlink()]
    if links:
        raise ValueError(f"'{links[0]}' is a link")
    facts = json.loads(_content(home / "data.json"))
    sets = sorted(home.glob("test_data_set_*"), key=lambda path: int(path.name.split("_")[-1]))
    runs = [Run(_read_tensors(p, "input"), _read_tensors(p, "output")) for p in sets]
    if len(runs) != facts.get("runs", len(runs)):
        raise ValueError(f"{len(runs)} data sets, but data.json says {facts['runs']}")
    calls = []
    for number, call in enumerate(facts["calls"]):
        if call["method"] not in get_args(Method):  # which is a part of a path
            raise ValueError(f"call {number} must be of {get_args(Method)}, got {call['method']!r}")
        place = home / "training_data_set_0" / f"{number:02}_{call['method']}"
        found = {kind: _read_tensors(place, kind) for kind in _KINDS}
        for kind, tensors in found.items():
            if list(tensors) != call.get(kind, list(tensors)):
                raise ValueError(
                    f"{place.name} has the {kind} tensors {list(tensors)}, but data.json says "
                    f"{call[kind]}"
                )
        inputs, outputs, state = found.values()
        calls.append(Call(call["method"], inputs, outputs, state, call["entry"]))
    return Case(
        home.name,
        onnx.load_from_string(_content(home / "model.onnx")),
        [Citation(**cite) for cite in facts["cites"]],
        runs,
        calls,
        **{name: facts[name] for name in _FIELDS},
    )


def read(folder: str | os.PathLike[str]) -> list[Case]:
    """Returns the cases in a folder that `write` has written, by name.

    One whose files cannot be read says why: `Case.broken`.
    """
    cases = []
    for path in sorted(Path(folder).glob("test_*")):
        try:
            cases.append(_read_case(path))
        except Exception as error:  # files of others: whatever json, onnx and numpy raise
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
            cases.append(Case(path.name, onnx.ModelProto(), [], broken=message))
    return cases
