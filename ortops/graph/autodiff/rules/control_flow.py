"""Rules of operators with subgraphs: If, Loop, Scan and SequenceMap.

The backward pass evaluates a branch or body again, because its values are not visible outside, and
differentiates it with respect to its inputs and to the values that it captures. Loop and Scan
output the initial state of each iteration. The backward pass runs through the iterations in reverse
order and adds up the cotangents of captured values. A Loop cannot stack sequences: if the backward
pass reads one, it repeats all previous iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.backward import Site, add_cotangents, backward
from ortops.graph.autodiff.rules.table import structural
from ortops.graph.edit import copy_node, describe, is_float, read_inputs, remove_unread
from ortops.graph.shapes import map_sequences
from ortops.graph.tensor import Tape, Tensor, op, zeros_like

Cotangent = Tensor | None
Cotangents = dict[ir.Value, Tensor]


@structural("If")
def if_(at: Site) -> Cotangents:
    tape, node, g = at.tape, at.node, at.g
    captured = _captured(at)
    branches = []
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name].as_graph()
        with tape.subgraph(f"{branch.name}_gradient") as inner:
            seeds = [
                (value, None if part is None else _seed_of_branch(inner, part, value))
                for value, part in zip(_repeat(inner, branch), g, strict=True)
            ]
            _differentiate(at, inner, seeds, captured)
        branches.append(ir.AttrGraph(name, inner.graph))
    return _emit(tape, "If", [node.inputs[0]], branches, captured)


def _seed_of_branch(tape: Tape, part: Tensor, output: ir.Value) -> Tensor:
    """Returns a copy of a cotangent for one branch, because the branches' shapes may differ.

    A branch that is never chosen may be one that cannot run for the rank of the other one's result,
    so onnxruntime must not find that rank in it.
    """
    if output.shape is None and part.shape is not None:
        return op.Reshape(tape.tensor(part.value), op.Shape(tape.tensor(output)), allowzero=1)
    seed = op.Identity(tape.tensor(part.value))
    if seed.shape is None or any(not isinstance(dim, int) for dim in seed.shape):
        seed = seed.with_shape_of(tape.tensor(output))
    return seed


@structural(
    "Loop",
    limits="states must keep their shape and must not be optionals; quadratic time if the backward "
    "pass reads a sequence that is a state",
)
def loop(at: Site) -> Cotangents:
    tape, node, g = at.tape, at.node, at.g
    body = node.attributes["body"].as_graph()
    _refuse_optionals(at, body)
    starts = [value for value in node.inputs[2:] if value is not None]
    states = [index for index, value in enumerate(starts) if is_float(value)]
    captured = _captured(at)
    carries = list(zip(body.inputs[2:], starts, strict=True))
    kept = [
        inside for inside, start in carries if not (_is_sequence(inside) or _is_sequence(start))
    ]
    original = copy_node(node, {})
    numbers, *befores = _keep(tape, node, body, [body.inputs[0], *kept])
    before_of = dict(zip(kept, befores, strict=True))
    count = op.Squeeze(op.Shape(tape.tensor(numbers), start=0, end=1), [0])
    with tape.subgraph(f"{body.name}_gradient") as inner:
        step = inner.input(f"{inner.scope}iteration", np.int64, [])
        condition = inner.input(f"{inner.scope}condition", np.bool_, [])
        carried = [_input_like(inner, body.inputs[2 + i], starts[i]) for i in states]
        sums = [_input_like(inner, value) for value in captured]
        number = inner.tensor(count.value) - 1 - step

        def at_number(sequence: ir.Value, like: ir.Value) -> Tensor:
            return _typed(op.Gather(inner.tensor(sequence), number, axis=0), like)

        replayed = _states_at(inner, original, number, len(starts))
        inputs = [
            _of_declared_rank(number, body.inputs[0]),
            _of_declared_rank(inner.constant(np.array(True)), body.inputs[1]),
        ]
        inputs += [
            at_number(before_of[inside], inside) if inside in before_of else inner.tensor(again)
            for inside, again in zip(body.inputs[2:], replayed, strict=True)
        ]
        outputs = _repeat(inner, body, inputs)[1:]
        seeds: list[tuple[ir.Value, Cotangent]] = [
            (outputs[i], carry) for i, carry in zip(states, carried, strict=True)
        ]
        for output, part in list(zip(outputs, g, strict=False))[len(starts) :]:
            if part is not None:
                seeds.append((output, at_number(part.value, output)))
        inner.graph.outputs.append(op.Identity(condition).value)
        wanted = [inputs[2 + i].value for i in states]
        _differentiate(at, inner, seeds, [*wanted, *captured], [*[None] * len(states), *sums])
    likes = [*(starts[i] for i in states), *captured]
    initial = _initial(tape, node, g, states, captured)
    attributes = [ir.AttrGraph("body", inner.graph)]
    return _emit(tape, "Loop", [count.value, None, *_values(initial)], attributes, likes)


def _of_declared_rank(number: Tensor, declared: ir.Value) -> Tensor:
    """Returns a number as onnxruntime gives it to a body: with one axis if that declares one."""
    return op.Reshape(number, [1]) if declared.shape is not None and len(declared.shape) else number


def _refuse_optionals(at: Site, body: ir.Graph) -> None:
    """Rejects a loop whose body has optionals as inputs or outputs."""
    for value in (*body.inputs, *body.outputs):
        if isinstance(value.type, ir.OptionalType):
            raise UnsupportedError(
                f"{describe(at.node)}: no gradient for the optional '{value.name}' in its body "
                f"(asked for by {at.asked_by}); use tensors or sequences as loop-carried values"
            )


@structural("Scan", limits="at least one iteration")
def scan(at: Site) -> Cotangents:
    tape, node, g = at.tape, at.node, at.g
    body = node.attributes["body"].as_graph()
    values = [value for value in node.inputs if value is not None]
    split = len(values) - node.attributes["num_scan_inputs"].as_int()
    starts, scanned = values[:split], values[split:]
    states = [index for index, value in enumerate(starts) if is_float(value)]
    wanted = [index for index, value in enumerate(scanned) if value in at.active]
    captured = _captured(at)
    made = len(body.outputs) - split
    input_order = _order(node, "input", len(scanned))
    output_order = _order(node, "output", made)
    befores = _keep(tape, node, body, body.inputs[:split])
    slopes = [index for index in range(made) if g[split + index] is not None]
    with tape.subgraph(f"{body.name}_gradient") as inner:
        carried = [_input_like(inner, body.inputs[i], starts[i]) for i in states]
        sums = [_input_like(inner, value) for value in captured]
        slices = [_input_like(inner, value) for value in body.inputs[split:]]
        before = [_input_like(inner, v, s) for v, s in zip(body.inputs, starts, strict=False)]
        parts = [_input_like(inner, body.outputs[split + i]) for i in slopes]
        outputs = _repeat(inner, body, [*before, *slices])
        seeds = [
            *((outputs[i], carry) for i, carry in zip(states, carried, strict=True)),
            *((outputs[split + i], part) for i, part in zip(slopes, parts, strict=True)),
        ]
        xs = [*(before[i].value for i in states), *captured, *(slices[i].value for i in wanted)]
        totals = [*[None] * len(states), *sums, *[None] * len(wanted)]
        _differentiate(at, inner, seeds, xs, totals)
    initial = _initial(tape, node, g, states, captured)
    slope_values = [part.value for part in g[split:] if part is not None]
    sequences = [*scanned, *befores, *slope_values]
    order = [*input_order, *[(0, 0)] * len(befores), *(output_order[i] for i in slopes)]
    put_out = [input_order[i] for i in wanted]
    attributes = [
        ir.AttrGraph("body", inner.graph),
        ir.AttrInt64("num_scan_inputs", len(sequences)),
        ir.AttrInt64s("scan_input_axes", [axis for axis, _ in order]),
        ir.AttrInt64s("scan_input_directions", [1 - direction for _, direction in order]),
        ir.AttrInt64s("scan_output_axes", [axis for axis, _ in put_out]),
        ir.AttrInt64s("scan_output_directions", [1 - direction for _, direction in put_out]),
    ]
    likes = [*(starts[i] for i in states), *captured, *(scanned[i] for i in wanted)]
    return _emit(tape, "Scan", [*_values(initial), *sequences], attributes, likes)


@structural("SequenceMap", limits="no gradient to sequences that the body captures")
def sequence_map(at: Site) -> Cotangents:
    tape, node, g = at.tape, at.node, at.g
    body = node.attributes["body"].as_graph()
    values = [value for value in node.inputs if value is not None]
    wanted = [index for index, value in enumerate(values) if value in at.active]
    captured = _captured(at)
    for value in captured:
        if _is_sequence(value):
            raise UnsupportedError(
                f"{describe(node)}: no gradient for the outer sequence '{value.name}' that its "
                f"body reads (asked for by {at.asked_by}); make it an input of the node"
            )
    slopes = [index for index, part in enumerate(g) if part is not None]
    with tape.subgraph(f"{body.name}_gradient") as inner:
        inputs = [_input_like(inner, value) for value in body.inputs]
        parts = [_input_like(inner, body.outputs[index]) for index in slopes]
        outputs = _repeat(inner, body, inputs)
        seeds = [(outputs[i], part) for i, part in zip(slopes, parts, strict=True)]
        xs = [*(inputs[index].value for index in wanted), *captured]
        _differentiate(at, inner, seeds, xs)
    likes = [*(values[index] for index in wanted), *captured]
    made = op.SequenceMap(
        *(tape.tensor(value) for value in values),
        *(g[index] for index in slopes),
        body=inner.graph,
        outputs=len(likes),
    )
    totals = []
    for like, sequence in zip(likes, made if isinstance(made, tuple) else (made,), strict=True):
        if like.dtype is not None:
            sequence.value.type = ir.SequenceType(ir.TensorType(like.dtype))
        part = sequence
        if not isinstance(like.type, ir.SequenceType):  # each call reads the whole tensor
            part = op.ReduceSum(op.ConcatFromSequence(part, axis=0, new_axis=1), [0], keepdims=0)
            part = part.with_shape_of(tape.tensor(like))
        totals.append((like, part))
    return _summed(totals)


def _captured(at: Site) -> list[ir.Value]:
    """Returns the active values that the subgraphs of a node capture, without duplicates."""
    own = [value for value in at.node.inputs if value is not None]
    inner = read_inputs(at.node)[len(own) :]
    return [value for value in dict.fromkeys(inner) if value in at.active]


def _values(tensors: Sequence[Tensor]) -> list[ir.Value]:
    return [tensor.value for tensor in tensors]


def _typed(x: Tensor, like: ir.Value) -> Tensor:
    """Sets the type and shape of a tensor, if they are unknown."""
    if x.value.type is None:
        x.value.type = like.type
    return x.with_shape_of(x.tape.tensor(like))


def _input_like(tape: Tape, *candidates: ir.Value) -> Tensor:
    """Adds an input to a subgraph, with the first known type and shape of some values."""
    name = tape.names.unique(f"{tape.scope}{candidates[0].name}")
    kind = next((value.type for value in candidates if value.type is not None), None)
    shape = next((value.shape for value in candidates if value.shape is not None), None)
    made = ir.Value(name=name, type=kind, shape=shape)
    tape.graph.inputs.append(made)
    return tape.tensor(made)


def _repeat(tape: Tape, graph: ir.Graph, inputs: Sequence[Tensor] = ()) -> list[ir.Value]:
    """Copies the nodes of a graph to a tape, with other inputs; returns the new outputs."""
    copies = dict(zip(graph.inputs, _values(inputs), strict=True))
    for value in graph.initializers.values():
        if value.const_value is not None and value not in copies:
            copies[value] = tape.constant(value.const_value.numpy()).value
    for node in graph:
        copy = copy_node(node, copies)
        tape.append(copy)
        copies.update(zip(node.outputs, copy.outputs, strict=True))
    return [copies.get(value, value) for value in graph.outputs]


def _summed(parts: Iterable[tuple[ir.Value, Tensor]]) -> Cotangents:
    """Adds up the cotangents of each value."""
    sums: Cotangents = {}
    for value, part in parts:
        sums[value] = add_cotangents(sums[value], part) if value in sums else part
    return sums


def _differentiate(
    at: Site,
    tape: Tape,
    cotangents: Sequence[tuple[ir.Value, Cotangent]],
    xs: Sequence[ir.Value],
    totals: Sequence[Cotangent] = (),
) -> None:
    """Emits the backward pass of a subgraph and makes its results outputs.

    Args:
        at: The node of the subgraph.
        tape: The tape of the subgraph.
        cotangents: Values of the subgraph with their cotangents.
        xs: The values whose cotangents are outputs; zeros if there is no cotangent.
        totals: A tensor or None for each x, which is added to its cotangent.
    """
    seeds = _summed(
        (value, tape.tensor(part.value)) for value, part in cotangents if part is not None
    )
    found = backward(tape, list(tape.graph), seeds, xs, at.rules, asked_by=at.asked_by)
    for index, (x, cotangent) in enumerate(zip(xs, found, strict=True)):
        total = totals[index] if totals else None
        if total is not None:
            cotangent = total if cotangent is None else add_cotangents(total, cotangent)
        result = _zeros(tape.tensor(x)) if cotangent is None else cotangent
        tape.graph.outputs.append(_typed(op.Identity(result), x).value)
    remove_unread(list(tape.graph))


def _initial(
    tape: Tape,
    node: ir.Node,
    g: Sequence[Cotangent],
    states: Sequence[int],
    captured: Sequence[ir.Value],
) -> list[Tensor]:
    """Returns the initial states of the backward loop: the final states' cotangents, and zeros."""
    finals = [
        _zeros(tape.tensor(node.outputs[i])) if (part := g[i]) is None else part for i in states
    ]
    return [*finals, *(_zeros(tape.tensor(value)) for value in captured)]


def _zeros(x: Tensor) -> Tensor:
    """Returns zeros with the shape of a tensor, or a sequence of zeros."""
    return map_sequences(zeros_like, x) if _is_sequence(x.value) else zeros_like(x)


def _is_sequence(value: ir.Value) -> bool:
    return isinstance(value.type, ir.SequenceType)


def _emit(
    tape: Tape,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Sequence[ir.Attr],
    likes: Sequence[ir.Value],
) -> Cotangents:
    """Appends a node whose outputs are cotangents, and adds those of the same value."""
    node = ir.Node("", op_type, inputs, attributes, num_outputs=len(likes))
    tape.append(node)
    return _summed(
        (like, _typed(tape.tensor(output), like))
        for output, like in zip(node.outputs, likes, strict=True)
    )


def _order(node: ir.Node, kind: str, count: int) -> list[tuple[int, int]]:
    """Returns the axis and direction of each scanned input or output."""
    axes, directions = (
        node.attributes[name].as_ints() if name in node.attributes else [0] * count
        for name in (f"scan_{kind}_axes", f"scan_{kind}_directions")
    )
    return list(zip(axes, directions, strict=True))


def _states_at(tape: Tape, loop: ir.Node, number: Tensor, count: int) -> list[ir.Value]:
    """Repeats a loop up to an iteration; returns the initial states of that iteration.

    Args:
        tape: The tape of the backward pass of an iteration.
        loop: A copy of the Loop node, which is appended to the tape.
        number: The number of the iteration.
        count: The number of states.
    """
    loop.replace_input_with(0, number.value)
    loop.resize_outputs(count)
    body = loop.attributes["body"].as_graph()
    del body.outputs[1 + count :]  # the stacked outputs are not needed
    remove_unread(list(body))
    tape.append(loop)
    for value, inside in zip(loop.outputs, body.outputs[1:], strict=True):
        value.type = value.type or inside.type
    return list(loop.outputs)


def _keep(tape: Tape, node: ir.Node, body: ir.Graph, states: Sequence[ir.Value]) -> list[ir.Value]:
    """Adds outputs to a Loop or Scan: its states at the beginning of each iteration."""
    body.opset_imports.update(
        tape.graph.opset_imports
    )  # a subgraph has none, but a tape needs them
    inner = Tape(body, names=tape.names)
    for state in states:
        body.outputs.append(_typed(op.Identity(inner.tensor(state)), state).value)
    first = len(node.outputs)
    node.resize_outputs(first + len(states))
    for value, state in zip(node.outputs[first:], states, strict=True):
        value.name = tape.names.unique(f"{node.name or node.op_type}_{state.name}")
        value.type = state.type
        value.shape = None if state.shape is None else ir.Shape([None, *state.shape])
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            given = node.attributes[name].as_ints()
            node.attributes[name] = ir.AttrInt64s(name, [*given, *[0] * len(states)])
    return list(node.outputs[first:])
