"""Updates that are nodes of a graph: how they are added to it, and when they may run.

Small updates are part of the gradient graph, which saves a run. Two kinds of updates overwrite the
current values:

- Updates in the backward pass overwrite a variable as soon as nobody reads its old value any more.
  onnxruntime runs nodes one after the other, in an order that it chooses, so the order has to
  follow from the graph: each node that reads the old value must be an ancestor of the node that
  writes the new one. A cotangent that is computed from a weight, for example, is no ancestor of the
  weight's update. It becomes one if a scalar of the update, such as the learning rate, is added to
  a zero that is computed from the size of the cotangent, which costs next to nothing.
- Updates on a device run after the gradients. A node may not write to memory that it reads (WebGPU
  forbids it), so each next value is computed in memory of its own, which is free again after the
  copy.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from ortops.engine.execution.packed import Packed
from ortops.engine.execution.split_step import differentiated
from ortops.engine.execution.step import Step
from ortops.engine.execution.update_groups import is_scalar, split
from ortops.errors import UnsupportedError
from ortops.graph.edit import ancestor_nodes, read_inputs
from ortops.graph.names import Names
from ortops.graph.operators import ELEMENTWISE
from ortops.graph.passes.scaled_sums import expand
from ortops.graph.tensor import Tape, op

SlicesByName: TypeAlias = dict[str, tuple[Packed, int]]
"""Inputs or outputs of a graph that hold a packed role: the packed update and the role's index."""

SMALL = 2**16
"""The number of elements from which a variable on a device is updated by itself."""

REMOVES_COPIES = "EliminateIdentity"
"""onnxruntime's optimizer that would remove the copies of `copy_last`."""

_SIZED = (  # of what onnxruntime's kernel of Size takes
    *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT64, ir.DataType.INT32),
    ir.DataType.BOOL,
)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def concatenate_updates(
    graph: ir.Graph, updates: Mapping[str, str], feeds: Collection[str], shown: Collection[str]
) -> None:
    """Lets one formula update all small variables with equal formulas, in place.

    A device starts each node by itself, so that many small ones take longer than a few larger ones
    and the copies of what they read and write. The inputs and outputs of the graph stay.

    Args:
        graph: A step with one-tensor optimizer nodes and Gradient nodes that are not lowered.
        updates: The output that is the next value, by variable.
        feeds: The inputs that a batch provides.
        shown: Outputs that a caller can request.
    """
    inputs, names = list(graph.inputs), [value.name for value in graph.outputs]
    groups, _ = split(graph, updates, feeds, shown, alone=SMALL)
    graph.inputs[:] = inputs
    found = {value.name: value for value in (*inputs, *graph.outputs)}
    tape = Tape(graph, names=Names(graph))
    for group in groups:
        sizes = [math.prod(shape) for shape in group.shapes]
        read = []
        for role in group.roles:
            flat = [op.Reshape(tape.tensor(found[name]), [-1]) for name in role.names]
            read.append(flat[0].value if len(flat) == 1 else op.Concat(*flat, axis=0).value)
        next_values = group.emit(tape, [*read, *(found[name] for name in group.scalars)])
        for index, value in zip(group.next_values, next_values, strict=True):
            whole = tape.tensor(value)
            parts = [whole] if len(sizes) == 1 else op.Split(whole, sizes)
            members = zip(group.roles[index].names, parts, group.shapes, strict=True)
            for name, part, shape in members:
                result = op.Reshape(part, list(shape)).value
                result.name = updates[name]
                found[result.name] = result
    graph.outputs[:] = [found[name] for name in names]


def join_updates(
    graph: ir.Graph, all_packed: Sequence[Packed], in_backward: bool
) -> tuple[SlicesByName, SlicesByName]:
    """Inserts the packed updates that are joined into the gradient graph.

    Args:
        graph: The gradient graph.
        all_packed: All packed updates.
        in_backward: Whether nodes are added for the scalars of an update, which may wait for others
            (see `order_updates`).

    Returns:
        The inputs and the outputs of the graph that hold packed roles, in the same order.
    """
    new_inputs: SlicesByName = {}
    new_outputs: SlicesByName = {}
    joined = [packed for packed in all_packed if packed.joined]
    if not joined:
        return new_inputs, new_outputs
    outputs = {value.name: value for value in graph.outputs}
    values = {**{value.name: value for value in graph.inputs}, **outputs}
    tape = Tape(graph, names=Names(graph))
    apart = [packed.group for packed in all_packed if not packed.joined]
    read_apart = {n for group in apart for role in group.roles for n in role.names}
    read_apart |= {name for group in apart for name in group.scalars}
    for packed in joined:
        group = packed.group
        rows = None if packed.rows == 1 else packed.rows
        inputs = packed.inputs(f"{tape.names.unique('packed')}_", rows)
        for index, role in enumerate(group.roles):
            if role.updated:
                graph.inputs.append(inputs[index])
                new_inputs[inputs[index].name or ""] = (packed, index)
            else:
                inputs[index] = packed.pack(tape, [values[name] for name in role.names])
        scalars = [outputs[name] for name in group.scalars]
        own = [op.Identity(tape.tensor(v)).value if in_backward else v for v in scalars]
        results = packed.emit(tape, [*inputs[: len(group.roles)], *own])
        taken = {*scalars, *(values[n] for r in group.roles if not r.updated for n in r.names)}
        kept = [v for v in graph.outputs if v not in taken or v.name in read_apart]
        graph.outputs[:] = [*kept, *results]
        for index, result in zip(group.next_values, results, strict=True):
            new_outputs[result.name or ""] = (packed, index)
    if in_backward:
        expand(graph)
    return new_inputs, new_outputs


def copy_last(graph: ir.Graph, updates: Mapping[str, str]) -> set[str]:
    """Adds copies of next values to a graph, so that they may overwrite the current ones.

    A next value may do so if all nodes that read the current one are among those that compute it.
    Scalars are left as they are.

    Args:
        graph: The graph that computes the next values; changed in place.
        updates: The output that is the next value, by variable.

    Returns:
        The variables whose next values may overwrite the current ones in memory.
    """
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    counts = collections.Counter(updates.values())
    names = Names(graph)
    result: set[str] = set()
    for variable, output in updates.items():
        value, present = outputs[output], inputs.get(variable)
        if counts[output] > 1 or value.producer() is None or is_scalar(value):
            continue
        before = ancestor_nodes(value, set())
        readers = [] if present is None else [reader for reader, _ in present.uses()]
        if not before.issuperset(readers):
            continue
        value.name = names.unique(f"{output}.computed")
        copy = ir.Node("", "Identity", [value], num_outputs=1, name=f"{variable}.overwritten")
        copied = copy.outputs[0]
        copied.name, copied.type, copied.shape = output, value.type, value.shape
        graph.append(copy)
        graph.outputs[list(graph.outputs).index(value)] = copied
        result.add(variable)
    return result


def check_updates(step: Step) -> None:
    """Raises an error if an update reads gradients of other parameters.

    Raises:
        UnsupportedError: If there is one.
    """
    graph = step.model.graph
    owners = {
        gradient: name
        for name, gradients in differentiated(graph, step.variables, step.updates).items()
        for gradient in gradients
    }
    outputs = {value.name: value for value in graph.outputs}
    for name, output in step.updates.items():
        nodes = ancestor_nodes(outputs[output], set(owners))
        values = (outputs[output], *(value for node in nodes for value in read_inputs(node)))
        read = {owners[value] for value in values if value in owners}
        if len(read) > 1:
            raise UnsupportedError(
                f"optimizer_in_backward: the update of '{name}' reads the gradients of "
                f"{len(read)} parameters, as with clip_norm, with the loss scaling of float16 and "
                "with optimizers such as Prodigy; build the model without these, or leave out "
                "optimizer_in_backward"
            )


def order_updates(
    graph: ir.Graph,
    shared: Mapping[str, Sequence[str]],
    *,
    fixed: Collection[str],
    checked: Collection[str],
) -> set[str]:
    """Makes the nodes that write variables wait for all nodes that read them.

    Args:
        graph: The graph; nodes are added to it.
        shared: The inputs that have the same memory as an output, by output.
        fixed: The inputs that are the same in each run if no variable changes: no feeds.
        checked: The outputs whose writers may read their own variable.

    Returns:
        The outputs that may have the memory of their inputs.
    """
    order = _Order(graph, fixed)
    outputs = {value.name: value for value in graph.outputs}
    inputs = {value.name: value for value in graph.inputs}
    readers = {
        name: order.readers([inputs[each] for each in names if each in inputs])
        for name, names in shared.items()
    }
    late: dict[str, list[ir.Node]] = {}
    for name, nodes in readers.items():
        writer = outputs[name].producer()
        if writer is None:
            continue
        reads_itself = any(v.name in shared[name] for v in read_inputs(writer))
        if reads_itself and name not in checked and not _is_elementwise(writer):
            continue
        pending = [n for n in nodes if n is not writer and not order.is_before(n, writer)]
        if not any(order.is_before(writer, n) for n in pending):
            late[name] = pending
    order.block(node for nodes in late.values() for node in nodes)
    safe = {name for name, nodes in late.items() if order.wait(outputs[name], nodes)}
    graph.sort()
    return safe


def put_updates_behind_gradients(graph: ir.Graph, gradients: Sequence[ir.Node]) -> None:
    """Makes onnxruntime run each update once its gradient is there.

    It first runs the nodes that the last node of a graph depends on, then those of the last but
    one, and so on. So updates are put in the reverse of the order in which what they read is
    available.

    Args:
        graph: The graph; it is modified in place.
        gradients: The nodes that were there before the updates, in topological order.
    """
    position = {node: index for index, node in enumerate(gradients)}
    latest: dict[ir.Node, int] = {}
    for node in graph:
        producers = (value.producer() for value in read_inputs(node))
        before = [latest[each] for each in producers if each is not None]
        latest[node] = position.get(node, max(before, default=-1))
    read = {value for node in graph for value in read_inputs(node)}
    ends = [node for node in graph if not any(value in read for value in node.outputs)]
    graph.remove(ends)
    graph.extend(sorted(ends, key=lambda node: latest[node], reverse=True))


class _Order:
    """Which node of a graph runs before which, whatever order onnxruntime chooses.

    Args:
        graph: The graph.
        fixed: See `order_updates`.
    """

    def __init__(self, graph: ir.Graph, fixed: Collection[str]) -> None:
        self._tape = Tape(graph, names=Names(graph))
        self._before: dict[ir.Node, int] = {}  # a bit for each ancestor
        self._number: dict[ir.Node, int] = {}
        self._readers: dict[ir.Value, list[ir.Node]] = {}
        self._blocked = 0
        known = {value for value in graph.inputs if value.name in fixed}
        known.update(graph.initializers.values())
        self._derived: set[ir.Node] = set()
        for number, node in enumerate(graph):
            mask = 0
            read = read_inputs(node)
            for value in dict.fromkeys(read):
                self._readers.setdefault(value, []).append(node)
                producer = value.producer()
                if producer is not None:
                    mask |= self._before[producer] | 1 << self._number[producer]
            self._before[node], self._number[node] = mask, number
            if all(value in known for value in read):
                known.update(node.outputs)
                self._derived.add(node)

    def is_before(self, first: ir.Node, second: ir.Node) -> bool:
        """Whether a node is an ancestor of another."""
        return bool(self._before[second] >> self._number[first] & 1)

    def readers(self, variables: Sequence[ir.Value]) -> list[ir.Node]:
        """Returns the nodes that may read the memory of variables.

        A node that reads nothing else, such as Reshape or Transpose, may share their memory, or may
        be merged with the nodes that read its output, so these are included.
        """
        found: dict[ir.Node, None] = {}
        pending = list(variables)
        while pending:
            for node in self._readers.get(pending.pop(), ()):
                if node not in found:
                    found[node] = None
                    pending += node.outputs if node in self._derived else ()
        return list(found)

    def block(self, nodes: Iterator[ir.Node]) -> None:
        """Excludes nodes and their ancestors from those that `wait` makes wait."""
        for node in nodes:
            self._blocked |= self._before[node] | 1 << self._number[node]

    def wait(self, output: ir.Value, nodes: Sequence[ir.Node]) -> bool:
        """Makes the writer of an output wait for nodes; returns whether it does.

        It is a node without blocked descendants that waits, so that there can be no cycle.
        """
        if not nodes:
            return True
        signals = [
            next((v for v in node.outputs if v.name and v.dtype in _SIZED), None) for node in nodes
        ]
        place = self._place(output)
        if place is None or any(signal is None for signal in signals):
            return False
        node, index = place
        scalar = self._tape.tensor(node.inputs[index])  # type: ignore[arg-type]
        zero = op.Min(*(op.Size(self._tape.tensor(v)) for v in signals if v is not None), 0)
        node.replace_input_with(index, (scalar + zero.astype(scalar.dtype)).value)
        return True

    def _place(self, output: ir.Value) -> tuple[ir.Node, int] | None:
        """Returns a node that an output depends on, and the index of a scalar that it reads."""
        pending, seen = [output], {output}
        while pending:
            node = pending.pop(0).producer()
            if node is None or node not in self._number:
                continue
            if not self._blocked >> self._number[node] & 1:
                for index, value in enumerate(node.inputs):
                    if value is not None and value.dtype in _FLOATS and value.shape == ():
                        return node, index
            fresh = [value for value in dict.fromkeys(read_inputs(node)) if value not in seen]
            seen.update(fresh)
            pending += fresh
        return None


def _is_elementwise(node: ir.Node) -> bool:
    """Whether a node reads each element before it writes it."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    shapes = {None if value.shape is None else tuple(value.shape) for value in values} - {()}
    return node.op_type in ELEMENTWISE and len(shapes) == 1 and None not in shapes
