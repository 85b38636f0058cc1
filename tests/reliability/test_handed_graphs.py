"""Any model that is built in this process makes the step that reading it makes.

A session takes the graph that the builder leaves behind (`ortops.engine.trainable.handed_graph`)
instead of reading the model. Both have to be equal in everything that computing depends on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from feature_models import build, inference_model, with_second_entry
from features import FIT

import ortops
from ortops.engine.execution.step import Step
from ortops.engine.trainable import handed_graph
from ortops.engine.trainable.step_graph import flatten
from ortops.graph import convert
from ortops.graph.files.serialization import to_proto

DRAWS = 60


def written(step: Step) -> onnx.ModelProto:
    """Returns the graph of a step, with one name for all sizes that inference does not know."""
    proto = to_proto(step.model)
    graph = proto.graph
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param.startswith("unk__"):
                dim.dim_param = "unknown"
    return proto


def readers(graph: ir.Graph) -> Iterator[tuple[object, ...]]:
    """Yields each tensor with its readers, in the order in which gradients are added up."""
    made = (value for node in graph for value in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *made):
        yield value.name, *((use.node.name, use.idx) for use in value.uses())


def assert_read_alike(model: onnx.ModelProto, entry: int = 0) -> bool:
    """Compares a step of what was handed over with that of a model which is read.

    Returns:
        Whether something was handed over.
    """
    light = convert.load_light(model)
    left = len(handed_graph._handed)
    handed = flatten(light, entry, counts=True)
    taken = len(handed_graph._handed) < left
    read = flatten(light, entry, counts=True)
    assert written(handed) == written(read)
    assert [*readers(handed.model.graph)] == [*readers(read.model.graph)]
    for field in dataclasses.fields(Step):
        if field.name != "model":
            assert getattr(handed, field.name) == getattr(read, field.name), field.name
    return taken


@pytest.mark.slow
def test_any_model() -> None:
    taken = []
    for draw in FIT.draws(0, DRAWS):
        model = build(draw, inference_model(draw))
        before = model.SerializeToString()
        if draw.entries:
            model = with_second_entry(model)
        taken.append(assert_read_alike(model, int(draw.entries)))
        if not draw.entries:
            assert model.SerializeToString() == before
    assert sum(taken) > 0.7 * DRAWS  # not those with a subgraph, or other values than were built


def network() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(2), nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU()),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [True, False])
def test_any_exporter(dynamo: bool) -> None:
    import torch
    from torch_exports import exported

    model = exported(network(), {"x": torch.zeros(2, 1, 4, 4)}, dynamo=dynamo)
    for mode in ("auto", "frozen"):
        built = ortops.build_training_model(
            model, loss="SoftmaxCrossEntropy", optimizer="AdamW", batch_normalization=mode
        )
        assert assert_read_alike(built)


def test_values_are_those_of_the_model_in_a_session() -> None:
    """Of big weights, whose values types do not depend on, and of small ones."""
    for size in (2, 64):
        with ortops.Tape(name="linear") as tape:
            x = tape.input("x", np.float32, ["n", size])
            w = tape.initializer("w", np.zeros((size, size), np.float32))
            tape.output(x @ w, "y")
        built = ortops.build_training_model(tape.model(), loss="L1", optimizer="SGD")
        (weight,) = built.graph.initializer
        weight.raw_data = np.ones((size, size), np.float32).tobytes()
        assert handed_graph.is_known(built) == (size == 64)
        batch = {name: np.ones((3, size), np.float32) for name in ("x", "targets")}
        loss = ortops.TrainingSession(built).step(batch)["loss"]
        np.testing.assert_allclose(loss, size - 1)


def test_nothing_but_structure_is_kept() -> None:
    """What was handed over holds no values of weights, and is used once."""
    with ortops.Tape(name="linear") as tape:
        x = tape.input("x", np.float32, ["n", 64])
        w = tape.initializer("w", np.zeros((64, 64), np.float32))
        mask = tape.constant(np.arange(64 * 64, dtype=np.int32).reshape(64, 64) % 2)
        tape.output(x @ (w * mask.astype(np.float32)), "y")
    built = ortops.build_training_model(tape.model(), loss="L1", optimizer="Adam")
    ((graph, *_),) = handed_graph._handed.values()
    made = [value for node in graph for value in node.outputs]
    assert not any(value.const_value for value in (*graph.initializers.values(), *made))
    tensors = (a.value for node in graph for a in node.attributes.values())
    assert all(tensor.nbytes < 1024 for tensor in tensors if isinstance(tensor, ir.TensorProtocol))
    assert assert_read_alike(built)
    assert not handed_graph._handed


def test_data_of_a_wrong_size_are_refused() -> None:
    with ortops.Tape(name="linear") as tape:
        x = tape.input("x", np.float32, ["n", 64])
        w = tape.initializer("w", np.zeros((64, 64), np.float32))
        tape.output(x @ w, "y")
    built = ortops.build_training_model(tape.model(), loss="L1", optimizer="SGD")
    built.graph.initializer[0].raw_data = b"1234"
    with pytest.raises(ortops.ModelError, match=r"'w': dimensions .* require 16384 bytes .* got 4"):
        ortops.TrainingSession(built)
