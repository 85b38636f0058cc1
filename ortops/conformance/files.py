"""The cases as files in the format of ONNX's own backend tests.

A case is a folder: ``model.onnx``, and a folder ``test_data_set_<i>`` with ``input_<j>.pb`` and
``output_<j>.pb`` for each data set, in the order of the graph's inputs and outputs. ``data.json``
has ``rtol`` and ``atol``, which ONNX's loader reads, and what the suite knows beside that. Calls of
models with ``training_info`` are in ``training_data_set_0/<k>_<method>``: files ``input_<j>.pb``,
``output_<j>.pb`` and ``state_<j>.pb``, whose tensors have names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from ortops.conformance.case import Array, Call, Case, Citation, Run

__all__ = ["read", "write"]

_FIELDS = ("proposal", "refused", "control", "rtol", "atol")


def _write_tensors(folder: Path, kind: str, values: Mapping[str, Array]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, value) in enumerate(values.items()):
        tensor = numpy_helper.from_array(value, name)
        (folder / f"{kind}_{number}.pb").write_bytes(tensor.SerializeToString())


def _read_tensors(folder: Path, kind: str) -> dict[str, Array]:
    found = {}
    for number in range(len(list(folder.glob(f"{kind}_*.pb")))):
        tensor = onnx.TensorProto()
        tensor.ParseFromString((folder / f"{kind}_{number}.pb").read_bytes())
        found[tensor.name] = numpy_helper.to_array(tensor)
    return found


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
        home = Path(folder) / case.name
        home.mkdir(parents=True, exist_ok=True)
        (home / "model.onnx").write_bytes(case.model.SerializeToString(deterministic=True))
        for number, run in enumerate(case.runs):
            place = home / f"test_data_set_{number}"
            _write_tensors(place, "input", _ordered(run.inputs, case.model.graph.input))
            _write_tensors(place, "output", _ordered(run.outputs, case.model.graph.output))
        for number, call in enumerate(case.calls):
            place = home / "training_data_set_0" / f"{number:02}_{call.method}"
            for kind in ("input", "output", "state"):
                values = call.state if kind == "state" else getattr(call, f"{kind}s")
                _write_tensors(place, kind, values)
        facts: dict[str, Any] = {name: getattr(case, name) for name in _FIELDS}
        facts["cites"] = [asdict(cite) for cite in case.cites]
        facts["calls"] = [{"method": call.method, "entry": call.entry} for call in case.calls]
        text = json.dumps(facts, indent=1, ensure_ascii=False)
        (home / "data.json").write_text(f"{text}\n", encoding="utf-8")


def _read_case(home: Path) -> Case:
    facts = json.loads((home / "data.json").read_text(encoding="utf-8"))
    sets = sorted(home.glob("test_data_set_*"), key=lambda path: int(path.name.split("_")[-1]))
    runs = [Run(_read_tensors(p, "input"), _read_tensors(p, "output")) for p in sets]
    calls = []
    for number, call in enumerate(facts["calls"]):
        place = home / "training_data_set_0" / f"{number:02}_{call['method']}"
        inputs, outputs, state = (_read_tensors(place, k) for k in ("input", "output", "state"))
        calls.append(Call(call["method"], inputs, outputs, state, call["entry"]))
    return Case(
        home.name,
        onnx.load(home / "model.onnx"),
        [Citation(**cite) for cite in facts["cites"]],
        runs,
        calls,
        **{name: facts[name] for name in _FIELDS},
    )


def read(folder: str | os.PathLike[str]) -> list[Case]:
    """Returns the cases in a folder that `write` has written, by name."""
    return [_read_case(path) for path in sorted(Path(folder).glob("test_*"))]
