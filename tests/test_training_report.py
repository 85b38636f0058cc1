"""`TrainingSession.report` tells what a session does, and builds nothing for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from internals import graph_of, memory_of
from training_models import affine, affine_batch, classifier, labelled, normalizing

import ortops
from models import line
from ortops import OrtopsError, TrainingSession
from ortops.engine.execution.memory import Device
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.template import Template
from ortops.graph.passes.draft import Pass

CPU = "CPUExecutionProvider"
GENERAL = Settings(shapes=0)
"""One graph for batches of any shape."""


def trainable(**options: Any) -> onnx.ModelProto:
    settings = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam", **options}
    return ortops.build_training_model(classifier(hidden=64), **settings)


def batch(rows: int = 8) -> dict[str, Any]:
    return labelled((6,), rows=rows)


def sizes(found: dict[str, Any]) -> dict[str, Any]:
    return {name: array.shape for name, array in found.items()}


def test_a_small_model() -> None:
    session = TrainingSession(trainable(), settings=GENERAL)
    report = session.report()
    assert (report.kernels, report.device) == ("onnx", "cpu")
    (update,) = report.packed
    assert set(update.variables) == {
        tuple(f"{name}{moment}" for name in ("w1", "b1", "w2")) for moment in ("", ".V", ".H")
    }
    assert update.shapes == tuple(session.state[name].shape for name in ("w1", "b1", "w2"))
    assert (update.chunks, update.in_graph, update.compiled, update.fed) == (1, True, False, ())
    assert report.in_place == ()
    names = {name for role in update.variables for name in role}
    assert set(report.in_turn) == names | {"step"}  # and not the learning rate
    assert report.on_device == report.compiled == report.variants == ()
    assert report.repeatable
    assert not report.optimizer_in_backward
    session.step(batch())
    report = session.report()
    assert report.placement == session.placement
    assert set(session.placement.values()) == {CPU}


def test_operators_are_those_of_the_graph() -> None:
    session = TrainingSession(trainable(), settings=GENERAL)
    session.step(batch())
    counts: dict[str, int] = {}
    for node in graph_of(session):
        assert not any(attribute.type.name == "GRAPH" for attribute in node.attributes.values())
        if node.op_type != "Constant":
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    assert session.report().operators == counts


def test_what_is_in_turn_moves_and_what_is_in_place_stays() -> None:
    for settings in (Settings(), Settings(joined=-1)):
        session = TrainingSession(trainable(), settings=settings)
        report = session.report()
        before = {name: memory_of(session, name) for name in session.state}
        session.step(batch())
        for name, memory in before.items():
            stays = np.shares_memory(memory, memory_of(session, name))
            assert stays == (name not in report.in_turn), name
        assert not set(report.in_place) & set(report.in_turn)
        assert {*report.in_place, *report.in_turn} == before.keys() - {"learning_rate"}


def test_chunks() -> None:
    settings = Settings(joined=-1, chunk=256, threads=3)
    (update,) = TrainingSession(trainable(), settings=settings).report().packed
    elements = sum(int(np.prod(shape)) for shape in update.shapes)
    assert update.chunks % 3 == 0
    assert update.chunks >= elements / 256
    assert not update.in_graph


def test_python_kernels() -> None:
    report = TrainingSession(trainable(), kernels="python").report()
    assert report.kernels == "python"
    assert [each.operators for each in report.packed] == [{"Adam": 1}]


@pytest.mark.optional("llvmlite", "fast")
def test_it_changes_when_updates_are_compiled() -> None:
    settings = Settings(compiled_after=(1, 0.0), compiled_share=-1.0)
    session = TrainingSession(trainable(), settings=settings)
    session.step(batch())
    before = session.report()
    session.step(batch())
    after = session.report()
    assert (before.kernels, after.kernels) == ("onnx", "compiled")
    assert (before.compiled, set(after.compiled)) == ((), set(after.in_place))
    assert [each.compiled for each in before.packed + after.packed] == [False, True]
    assert [each.in_graph for each in before.packed + after.packed] == [True, False]
    assert (before.repeatable, after.repeatable) == (True, False)
    assert before.operators is not None
    assert after.operators is not None
    assert sum(after.operators.values()) < sum(before.operators.values())


class Gaining(Pass):
    """A pass for which graphs for known sizes are better, on any machine."""

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        return True


def test_shapes_with_graphs_of_their_own() -> None:
    found = []
    for shapes in (0, 2):
        settings = Settings(passes=[Gaining("gaining")], shapes=shapes)
        session = TrainingSession(trainable(), settings=settings)
        assert session.report().operators == {}
        batches = [batch(rows) for rows in (6, 3, 5)]
        for each in batches:
            session.step(each)
        report = session.report()
        assert report.operators
        found.append(list(report.variants))
        session.free_memory()
        freed = session.report()
        assert (freed.variants, freed.operators, freed.placement) == ((), {}, {})
        assert replace(freed, variants=(), operators={}, placement={}) == freed
    assert found == [[], [sizes(each) for each in batches[:2]]]


@pytest.mark.parametrize("joined", [0, 2**18])
def test_variables_on_a_device(joined: int) -> None:
    settings = Settings(joined=joined, device=Device("cpu"))
    session = TrainingSession(trainable(), settings=settings)
    session.step(batch())
    report = session.report()
    assert report.packed == ()
    assert set(report.on_device) == session.state.keys()
    tensors = {name for name, array in session.state.items() if array.ndim}
    assert tensors <= set(report.in_turn if joined else report.in_place)
    assert report.placement == session.placement
    session.free_memory()
    assert session.report().placement == {}


def test_entries() -> None:
    model = ortops.add_training(
        trainable(trainable=["w1", "b1"]),
        loss="SoftmaxCrossEntropy",
        optimizer="SGD",
        trainable=["w2"],
        name="other",
    )
    session = TrainingSession(model)
    both = session.report()
    parts = [session.report(entry=number) for number in (0, 1)]
    assert both.packed == parts[0].packed + parts[1].packed
    assert [part.packed[0].variables[0] for part in parts] == [("w1", "b1"), ("w2",)]
    assert parts[1] == session.report(entry="other")
    assert set(both.in_turn) == {name for part in parts for name in part.in_turn}
    assert not set(parts[0].in_turn) & set(parts[1].in_turn)
    assert "w2" in parts[1].in_turn
    assert (both.repeatable, parts[1].repeatable) == (False, True)
    with pytest.raises(OrtopsError, match="entry"):
        session.report(entry="nothing")


@pytest.mark.quick(3)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("make", ["small", "large", "convolutional", "device"])
def test_it_builds_nothing(make: str, stepped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "large": Settings(joined=-1),
        "device": Settings(joined=0, device=Device("cpu")),
    }.get(make, Settings())
    is_net = make == "convolutional"
    model = ortops.build_training_model(
        normalizing() if is_net else affine(),
        loss="SoftmaxCrossEntropy" if is_net else "MeanSquaredError",
        optimizer="Adam",
    )
    session = TrainingSession(model, settings=settings)
    if stepped:
        session.step(labelled((1, 4, 4)) if is_net else affine_batch())
    else:
        session.free_memory()

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a report builds something")

    monkeypatch.setattr(Template, "lowered", forbidden)
    monkeypatch.setattr(Template, "cut", forbidden)
    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", forbidden)
    report = session.report()
    assert bool(report.operators) == bool(report.placement) == stepped
    assert report == session.report()


def test_it_is_plain_data() -> None:
    session = line.session(optimizer="Adam")
    report = session.report()
    data = json.loads(json.dumps(dataclasses.asdict(report)))
    assert data.keys() == {field.name for field in dataclasses.fields(report)}
    assert data["packed"][0]["variables"] == [["w"], ["w.V"], ["w.H"]]
    assert data["operators"] == report.operators
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.kernels = "python"  # type: ignore[misc]


def test_its_text() -> None:
    session = TrainingSession(trainable(), settings=replace(GENERAL, joined=-1))
    session.step(batch())
    lines = str(session.report()).splitlines()
    names = "w1, b1, w2, w1.V, b1.V, w2.V and 3 more"
    assert lines[0] == "kernels: onnx"
    assert lines[1].startswith(f"updated together: {names} (")
    assert lines[2:4] == [f"in place: {names}", "two copies: step"]
    assert " nodes: " in lines[4]
    assert lines[5:] == [f"{CPU} runs {lines[4].split()[0]}"]
    report = replace(
        line.session().report(),
        optimizer_in_backward=True,
        compiled=("w",),
        in_place=("w",),
        in_turn=(),
        on_device=("step",),
        device="webgpu",
        variants=({"x": (8, 1), "targets": (8, 1)},),
        operators=None,
        placement=None,
    )
    assert str(report).splitlines() == [
        "kernels: onnx, in the backward pass",
        "updated together: w (1 element, in the graph)",
        "compiled: w",
        "in place: w",
        "on webgpu: step",
        "a graph of its own: x [8, 1], targets [8, 1]",
    ]
    chunks = replace(report.packed[0], shapes=((1000,), (234,)), chunks=4, compiled=True)
    assert str(chunks) == "updated together: w (1,234 elements, 4 chunks, in the graph, compiled)"
