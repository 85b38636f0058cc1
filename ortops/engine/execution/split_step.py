"""Cuts a training step into two graphs after its gradients, which run on the same memory.

The gradient part computes gradients and everything else that depends on the batch only, such as
running statistics. The update part applies given gradients. Computations on gradients, such as
clipping, belong to the update part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.execution.memory import Memory
from ortops.engine.execution.step import Step
from ortops.errors import UnsupportedError
from ortops.graph.autodiff.gradient_node import Bound, is_bound
from ortops.graph.edit import (
    dependent_values,
    describe,
    prune,
    read_inputs,
    replace_value,
    values_of,
)
from ortops.graph.names import Names
from ortops.graph.tensor import Tape, Tensor, op

_ALIGNMENT = 16  # elements


class Layout:
    """The memory layout of gradients: one array for each dtype, with zeros for alignment.

    Args:
        parameters: The parameters by name. Gradients of 16-bit parameters are float32.
    """

    def __init__(self, parameters: Mapping[str, Memory]) -> None:
        self._positions: dict[str, tuple[np.dtype[Any], int, tuple[int, ...]]] = {}
        self._sizes: dict[np.dtype[Any], int] = {}
        for name, memory in parameters.items():
            dtype = np.dtype(np.float32) if memory.dtype.itemsize == 2 else memory.dtype
            begin = self._sizes.get(dtype, 0)
            self._positions[name] = dtype, begin, memory.shape
            self._sizes[dtype] = begin + -(-memory.size // _ALIGNMENT) * _ALIGNMENT

    def zeros(self) -> tuple[list[Array], dict[str, Array]]:
        """Returns new arrays, one for each dtype, and the gradients as views of them by name."""
        flat = {dtype: np.zeros(size, dtype) for dtype, size in self._sizes.items()}
        return list(flat.values()), {
            name: flat[dtype][begin : begin + math.prod(shape)].reshape(shape)
            for name, (dtype, begin, shape) in self._positions.items()
        }

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters."""
        return self._positions

    def like(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Returns the dtype and the shape of a gradient."""
        dtype, _, shape = self._positions[name]
        return dtype, shape


@dataclass(frozen=True)
class Differentiated:
    """The results of the gradient part.

    Attributes:
        outputs: The outputs of the step.
        gradients: The gradients by parameter.
        flat: The arrays that the gradients are views of.
        carried: The other tensors that the update part reads.
    """

    outputs: dict[str, Array]
    gradients: dict[str, Array]
    flat: list[Array]
    carried: dict[str, Array]


@dataclass(frozen=True)
class Cut:
    """A step in two parts.

    Attributes:
        gradients: The gradient part: computes the outputs, the gradients and the carried tensors
            from variables and feeds.
        apply: The update part: computes the next values of variables from variables, gradients and
            carried tensors.
        given: The name of each parameter's gradient in both parts. Gradients are unscaled, and
            float32 if the parameter has 16 bits.
        carried: The other tensors that go from the first part to the second: public names, and the
            names in both parts.
        fed: Feeds that the update part reads as well.
    """

    gradients: ir.Model
    apply: ir.Model
    given: Mapping[str, str]
    carried: Mapping[str, str]
    fed: Sequence[str]


def differentiated(
    graph: ir.Graph, variables: Collection[str], updates: Collection[str]
) -> dict[str, list[ir.Value]]:
    """Returns the gradients of each parameter of a step that are not differentiated again.

    Each parameter has one, except in algorithms that were written by hand.

    Args:
        graph: The step, its Gradient nodes bound.
        variables: The inputs that are variables.
        updates: The variables that are updated.
    """
    updated = set(variables) & set(updates)
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
                value = producer.inputs[0]  # a bfloat16 parameter, which is read in float32
            name = value.name or ""
            if gradient.name and name in updated:
                found.setdefault(name, []).append(gradient)
    return found


def next_values(graph: ir.Graph, updates: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable of each tensor that is a next value, by tensor name.

    A skipped step keeps running statistics, as in ``Where(finite, next, present)``. Then the name
    of ``next`` is included as well.
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
    step: Step,
    *,
    shown: Sequence[str],
    ends: Iterable[str],
    fed: Iterable[str],
    labels: Mapping[str, str],
) -> Cut:
    """Cuts a step after its gradients.

    Args:
        step: The step, its Gradient nodes bound; not changed.
        shown: Outputs of the gradient part.
        ends: Outputs of the update part.
        fed: Feeds that remain inputs of the update part even if it does not read them.
        labels: Public names of tensors that the gradient part may pass to the update part. Other
            tensors keep their names.

    Raises:
        UnsupportedError: If the step has no gradients, or several of one parameter.
    """
    first, second = step.model.clone(), step.model.clone()
    graph = second.graph
    gradients = _only_gradients(graph, step)
    outputs = {value.name: value for value in graph.outputs}
    ends = list(dict.fromkeys(ends))
    inputs = {value.name: value for value in graph.inputs}
    also_fed = {name: inputs.get(name) for name in fed}  # None if only packed updates read it
    crossing: dict[str, ir.Value] = {}
    for value in _from_batch(graph, step, [outputs[name] for name in ends], gradients.values()):
        found = also_fed if value.producer() is None else crossing
        found[value.name or ""] = value
    names = Names(graph)
    given = {parameter: names.unique(f"{parameter}.gradient") for parameter in gradients}
    public = {name: labels.get(name, name) for name in crossing}
    carried = {public[name]: names.unique(f"{public[name]}.carried") for name in crossing}

    results = {gradients[parameter].name or "": name for parameter, name in given.items()}
    _keep_gradients(first, results, {n: carried[p] for n, p in public.items()}, shown, step.scale)
    graph.outputs[:] = [outputs[name] for name in ends]
    tape = Tape(graph, before=next(iter(graph), None), names=names)
    scale = inputs.get(step.scale)
    for parameter, value in gradients.items():
        gradient = tape.tensor(_input(graph, given[parameter], _float32_type(value), value.shape))
        if scale is not None:
            gradient = gradient * tape.tensor(scale).astype(gradient.dtype)
        _replace_gradient(tape, value, gradient)
    for name, value in crossing.items():
        replacement = _input(graph, carried[public[name]], value.dtype, value.shape)
        replace_value(tape, value, tape.tensor(replacement))
    prune(graph)
    graph.inputs.extend(v for v in also_fed.values() if v is not None and v not in graph.inputs)
    return Cut(first, second, given, carried, list(also_fed))


def _only_gradients(graph: ir.Graph, step: Step) -> dict[str, ir.Value]:
    """Returns the gradient of each parameter.

    Raises:
        UnsupportedError: If there is none, or a parameter has several.
    """
    found: dict[str, ir.Value] = {}
    for parameter, values in differentiated(graph, step.variables, step.updates).items():
        found[parameter], *others = values
        if others:
            node = others[0].producer()
            assert node is not None
            raise UnsupportedError(
                f"{describe(node)}: '{parameter}' has another gradient in the same step; gradients "
                "can be separated from updates only if each parameter has one"
            )
    if not found:
        raise UnsupportedError(
            "gradients: the training algorithm has no Gradient node for a variable that it "
            "updates; use `step`"
        )
    return found


def _from_batch(
    graph: ir.Graph, step: Step, ends: Iterable[ir.Value], gradients: Collection[ir.Value]
) -> Iterator[ir.Value]:
    """Yields the tensors that the ends read, and that depend on feeds but not on gradients."""
    nodes = list(graph)
    from_gradients = dependent_values(nodes, gradients)
    from_feeds = dependent_values(nodes, [v for v in graph.inputs if v.name in step.feeds])
    pending, seen = list(ends), set(gradients)
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in from_feeds and value not in from_gradients:
            yield value
        elif (node := value.producer()) is not None:
            pending += read_inputs(node)


def _keep_gradients(
    model: ir.Model,
    gradients: Mapping[str, str],
    carried: Mapping[str, str],
    shown: Sequence[str],
    scale: str,
) -> None:
    """Makes a copy of the step its gradient part.

    Args:
        model: The copy, changed in place.
        gradients: The names of gradients, and of the outputs for their unscaled values.
        carried: The names of tensors for the update part, and of the outputs for them.
        shown: Further outputs.
        scale: The variable that the loss is multiplied by; empty if there is none.
    """
    graph = model.graph
    values = values_of(graph)
    variable = values.get(scale)
    outputs = [values[name] for name in shown]
    tape = Tape(graph, names=Names(graph))
    for name, output in (*gradients.items(), *carried.items()):
        value = values[name]
        tensor, dtype = tape.tensor(value), value.dtype
        if name in gradients:
            dtype = _float32_type(value)
            tensor = tensor.astype(dtype.numpy())
            if variable is not None:
                tensor = tensor * (1.0 / tape.tensor(variable)).astype(tensor.dtype)
        outputs.append(op.Identity(tensor).value)
        outputs[-1].name, outputs[-1].shape = output, value.shape
        outputs[-1].type = value.type if dtype is None else ir.TensorType(dtype)
    graph.outputs[:] = outputs
    prune(graph)


def _float32_type(gradient: ir.Value) -> ir.DataType:
    """Returns the type that a gradient is computed in: float32 if it has 16 bits."""
    assert gradient.dtype is not None
    return ir.DataType.FLOAT if gradient.dtype.bitwidth == 16 else gradient.dtype


def _input(
    graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: ir.Shape | None
) -> ir.Value:
    kind = None if dtype is None else ir.TensorType(dtype)
    graph.inputs.append(ir.Value(name=name, type=kind, shape=shape))
    return graph.inputs[-1]


def _replace_gradient(tape: Tape, value: ir.Value, given: Tensor) -> None:
    """Replaces a gradient by a given tensor.

    Casts of a 16-bit gradient to float32 are replaced as well: they read the given float32 tensor
    without rounding, as onnxruntime does when it removes a cast after a product.
    """
    if value.dtype != given.value.dtype:
        for node in {use.node for use in value.uses() if use.node.op_type == "Cast"}:
            if node.outputs[0].dtype == given.value.dtype:
                replace_value(tape, node.outputs[0], given)
        assert value.dtype is not None
        given = op.Cast(given, to=value.dtype.value)
    replace_value(tape, value, given)
