"""Cuts a training step in two right behind its gradients.

The one half computes gradients and whatever else comes of a batch; the other one makes the update
of given gradients. What depends on gradients, as a limit on their norm does, is in the second half;
what depends on the batch and not on gradients, as running statistics do, is carried over to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortops.autodiff.gradient_node import Bound, is_bound
from ortops.errors import UnsupportedError
from ortops.graph.edit import (
    dependent_values,
    describe,
    prune,
    read_inputs,
    replace_value,
)
from ortops.graph.tensor import Names, Tape, Tensor, op

__all__ = ["Cut", "cut", "differentiated", "settled"]

_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class Cut:
    """A step in two halves.

    Attributes:
        gradients: From variables and feeds to outputs for people, gradients and what is carried.
        apply: From variables, gradients and what is carried to the updates.
        given: Parameter → the name of its gradient in both halves. It is not scaled, and float32
            where the parameter has 16 bits.
        carried: What people call it → its name in both halves.
        fed: Feeds that the second half takes, too.
    """

    gradients: ir.Model
    apply: ir.Model
    given: Mapping[str, str]
    carried: Mapping[str, str]
    fed: Sequence[str]


def differentiated(
    graph: ir.Graph, variables: Container[str], updates: Container[str]
) -> dict[str, list[ir.Value]]:
    """Returns the parameters of a step, and their gradients: what no further gradient is taken of.

    There is one of each parameter, but in algorithms that somebody wrote by hand.

    Args:
        graph: The step, its Gradient nodes bound.
        variables: Its inputs that are variables.
        updates: Those that have a next value.
    """
    nodes = [node for node in graph if is_bound(node)]
    last = {}
    for node in nodes:
        reached = dependent_values(graph, node.outputs)
        if not any(other is not node and Bound.of(other).y in reached for other in nodes):
            last[node] = Bound.of(node)
    found: dict[str, list[ir.Value]] = {}
    for node, bound in last.items():
        for fed, gradient in zip(bound.fed, node.outputs, strict=False):
            value, producer = fed, fed.producer()
            if producer is not None and producer.op_type == "Cast" and producer.inputs[0]:
                value = producer.inputs[0]  # a bfloat16 one, which is read in float32
            name = value.name or ""
            if gradient.name and name in variables and name in updates:
                found.setdefault(name, []).append(gradient)
    return found


def settled(graph: ir.Graph, updates: Mapping[str, str]) -> dict[str, str]:
    """Returns which tensors are next values of variables, by name, but for what decides on them.

    A running statistic is kept as it was where a step is skipped: ``Where(finite, next, present)``.
    """
    outputs = {value.name: value for value in graph.outputs}
    found = {}
    for variable, name in updates.items():
        node = outputs[name].producer()
        found[name] = variable
        if node is not None and node.op_type == "Where":
            _, new, old = node.inputs
            if new is not None and old is not None and old.name == variable:
                found[new.name or ""] = variable
    return found


def cut(
    model: ir.Model,
    *,
    variables: Collection[str],
    updates: Container[str],
    feeds: Container[str],
    shown: Sequence[str],
    ends: Iterable[str],
    fed: Iterable[str],
    scale: str,
    labels: Mapping[str, str],
) -> Cut:
    """Cuts a step.

    Args:
        model: The step, its Gradient nodes bound; not changed.
        variables: Its inputs that are variables.
        updates: Those that have a next value.
        feeds: Its inputs that a batch fills.
        shown: Outputs of the first half.
        ends: Outputs of the second half.
        fed: Feeds that stay inputs of the second half, whether it reads them or not.
        scale: The variable that the loss is multiplied with; empty where there is none.
        labels: What people call some of the tensors that may be carried; others go by their names.

    Raises:
        UnsupportedError: If the step has no gradients, or several of one parameter.
    """
    first, second = model.clone(), model.clone()
    graph = second.graph
    found: dict[str, ir.Value] = {}
    for parameter, values in differentiated(graph, variables, updates).items():
        found[parameter], *others = values
        if others:
            node = others[0].producer()
            assert node is not None
            raise UnsupportedError(
                f"{describe(node)}: '{parameter}' has another gradient in the same step; gradients "
                "are taken apart of steps with one for each parameter"
            )
    if not found:
        raise UnsupportedError(
            "gradients: the training algorithm has no Gradient node of a variable that it updates; "
            "use `step`"
        )
    nodes = list(graph)
    from_gradients = dependent_values(nodes, found.values())
    from_feeds = dependent_values(nodes, [v for v in graph.inputs if v.name in feeds])
    outputs = {value.name: value for value in graph.outputs}
    ends = list(dict.fromkeys(ends))
    pending = [outputs[name] for name in ends]
    crossing: dict[str, ir.Value] = {}
    inputs = {value.name: value for value in graph.inputs}
    also_fed = {name: inputs.get(name) for name in fed}  # or no input, where only updates read it
    seen: set[ir.Value] = set(found.values())
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in from_feeds and value not in from_gradients:
            if value.producer() is None:
                also_fed[value.name or ""] = value
            else:
                crossing[value.name or ""] = value
        elif (node := value.producer()) is not None:
            pending += read_inputs(node)
    names = Names(graph)
    given = {parameter: names.unique(f"{parameter}.gradient") for parameter in found}
    calls = {name: labels.get(name, name) for name in crossing}
    carried = {calls[name]: names.unique(f"{calls[name]}.carried") for name in crossing}

    _put_out(first, found, given, {n: carried[c] for n, c in calls.items()}, shown, scale)
    graph.outputs.clear()
    graph.outputs.extend(outputs[name] for name in ends)
    tape = _tape_before(graph, names)
    unscaled = _scales(graph, scale)
    for parameter, value in found.items():
        gradient = _input(graph, given[parameter], _wide(value), value.shape)
        _take_place(tape, value, unscaled(tape, tape.tensor(gradient), inverse=False))
    for name, value in crossing.items():
        stand_in = _input(graph, carried[calls[name]], value.dtype, value.shape)
        replace_value(tape, value, tape.tensor(stand_in))
    prune(graph)
    graph.inputs.extend(v for v in also_fed.values() if v is not None and v not in graph.inputs)
    return Cut(first, second, given, carried, list(also_fed))


def _put_out(
    model: ir.Model,
    found: Mapping[str, ir.Value],
    given: Mapping[str, str],
    carried: Mapping[str, str],
    shown: Sequence[str],
    scale: str,
) -> None:
    """Makes the first half of a copy of the step."""
    graph = model.graph
    values = {value.name: value for value in graph.inputs}
    values |= {value.name: value for node in graph for value in node.outputs}
    outputs = [values[name] for name in shown]
    tape = Tape(graph, names=Names(graph))
    unscaled = _scales(graph, scale)
    for parameter, other in found.items():
        gradient = tape.tensor(values[other.name])
        wide = _wide(gradient.value)
        if gradient.value.dtype != wide:
            gradient = op.Cast(gradient, to=wide.value)
        outputs.append(_named(unscaled(tape, gradient, inverse=True), given[parameter]))
        outputs[-1].type, outputs[-1].shape = ir.TensorType(wide), other.shape
    for name, called in carried.items():
        value = values[name]
        outputs.append(_named(tape.tensor(value), called))
        outputs[-1].type, outputs[-1].shape = value.type, value.shape
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    prune(graph)


def _named(tensor: Tensor, name: str) -> ir.Value:
    value: ir.Value = op.Identity(tensor).value
    value.name = name
    return value


def _tape_before(graph: ir.Graph, names: Names) -> Tape:
    first = next(iter(graph), None)
    return Tape(graph, names=names) if first is None else Tape(graph, before=first, names=names)


def _wide(gradient: ir.Value) -> ir.DataType:
    assert gradient.dtype is not None
    return ir.DataType.FLOAT if gradient.dtype in _HALVES else gradient.dtype


def _scales(graph: ir.Graph, scale: str) -> Callable[..., Tensor]:
    """Returns what multiplies gradients with the scale of the loss, or with its inverse."""
    by_name = {value.name: value for value in graph.inputs}
    variable = by_name.get(scale)

    def scaled(tape: Tape, gradient: Tensor, *, inverse: bool) -> Tensor:
        if variable is None:
            return gradient
        factor = tape.tensor(variable)
        result: Tensor = gradient * (1.0 / factor if inverse else factor).astype(gradient.dtype)
        return result

    return scaled


def _input(
    graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: ir.Shape | None
) -> ir.Value:
    kind = None if dtype is None else ir.TensorType(dtype)
    graph.inputs.append(ir.Value(name=name, type=kind, shape=shape))
    return graph.inputs[-1]


def _take_place(tape: Tape, value: ir.Value, wide: Tensor) -> None:
    """Lets a tensor stand where a gradient stood.

    Nodes that read one of 16 bits in float32 read the tensor, which may be more precise, itself:
    onnxruntime leaves out a rounding between a product and such a cast.
    """
    if value.dtype != wide.value.dtype:
        for node in {use.node for use in value.uses() if use.node.op_type == "Cast"}:
            if node.outputs[0].dtype == wide.value.dtype:
                replace_value(tape, node.outputs[0], wide)
        assert value.dtype is not None
        wide = op.Cast(wide, to=value.dtype.value)
    replace_value(tape, value, wide)
