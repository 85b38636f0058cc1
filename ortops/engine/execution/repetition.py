"""Several training steps as one graph: a Scan whose body is the graph of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortops.engine.execution.packed import Packed
from ortops.graph.constants import IR_VERSION
from ortops.graph.names import Names
from ortops.graph.tensor import Tape, op

LOSSES = "losses"
"""The output with the loss of each step."""


def stacked(name: str) -> str:
    """Returns the name of the input for the feeds of all steps, stacked along axis 0."""
    return f"{name}/steps"


def state_output(name: str) -> str:
    """Returns the name of the output for the last value of a state."""
    return f"{name}/last"


def repeat(
    step: ir.Graph,
    states: Mapping[str, str],
    packed: Mapping[str, tuple[Packed, int]],
    feeds: Sequence[str],
    loss: str,
) -> ir.Model:
    """Returns a model that makes one step for each batch.

    The inputs are the states, the `stacked` feeds, and all other inputs of the step. The outputs
    are `LOSSES` and the `state_output` of each state.

    Args:
        step: The graph of a step; not changed.
        states: The output that is the next value, by input.
        packed: The states that hold a packed role. Inputs of the step that are members of a role
            are replaced by slices of the packed state.
        feeds: The inputs that a batch provides.
        loss: The output that is the loss.
    """
    body = step.clone()
    inputs = {value.name or "": value for value in body.inputs}
    outputs = {value.name or "": value for value in body.outputs}
    body.inputs[:] = [inputs.pop(name) for name in (*states, *feeds)]
    body.outputs[:] = [outputs[name] for name in (*states.values(), loss)]
    for name, (group, index) in packed.items():
        _unpack(body, body.inputs[list(states).index(name)], group, index, inputs)
    outer_states = [_like(value) for value in body.inputs[: len(states)]]
    outer_feeds = [_stacked_like(value) for value in body.inputs[len(states) :]]
    given = [_like(value) for value in inputs.values()]
    for value, outer in zip(inputs.values(), given, strict=True):
        value.replace_all_uses_with(outer)
    body.name = "step"
    for value in (*body.inputs, *body.outputs):  # inner names differ from outer ones
        value.name = f"{value.name}/step"
    graph = ir.Graph(
        [*outer_states, *outer_feeds, *given],
        [],
        nodes=[],
        opset_imports=dict(step.opset_imports),
        name="steps",
    )
    scan = ir.Node(
        "",
        "Scan",
        [*outer_states, *outer_feeds],
        [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(feeds))],
        num_outputs=len(body.outputs),
    )
    names = [*map(state_output, states), LOSSES]
    for output, inner, name in zip(scan.outputs, body.outputs, names, strict=True):
        output.name, output.type = name, inner.type
        output.shape = _stacked_shape(inner) if name == LOSSES else inner.shape
    graph.append(scan)
    graph.outputs.extend(scan.outputs)
    return ir.Model(graph, ir_version=IR_VERSION)


def _unpack(
    body: ir.Graph, source: ir.Value, packed: Packed, index: int, inputs: dict[str, ir.Value]
) -> None:
    """Replaces inputs that are members of a packed role by slices of it."""
    role = packed.group.roles[index]
    if not any(name in inputs for name in role.names):
        return
    tape = Tape(body, before=next(iter(body)), names=Names(body))
    line = op.Reshape(tape.tensor(source), [-1])
    parts = op.Split(line, packed.sizes, axis=0)
    for name, shape, part in zip(role.names, packed.group.shapes, parts, strict=True):
        value = inputs.pop(name, None)
        if value is not None:
            size = math.prod(shape)
            whole = part if part.shape == (size,) else part[:size]
            value.replace_all_uses_with(op.Reshape(whole, np.array(shape, np.int64)).value)


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape)


def _stacked_like(value: ir.Value) -> ir.Value:
    name = stacked(value.name or "")
    return ir.Value(name=name, type=value.type, shape=_stacked_shape(value))


def _stacked_shape(value: ir.Value) -> ir.Shape | None:
    return None if value.shape is None else ir.Shape(["steps", *value.shape])
