"""Splits a training step into gradients and elementwise updates.

An update such as Adam's is elementwise: each element of a parameter and its state is updated
independently. Therefore all parameters with the same update formula can be contiguous in memory,
one long tensor for each role (parameter, gradient, running mean …), and one run of the formula
updates them all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import onnx_ir as ir

from ortops.engine.lowering import TRAINING_DOMAIN, Keep, lower_optimizers
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import (
    Steps,
    ancestor_nodes,
    copy_node,
    remove_unread,
    remove_unread_inputs,
    unrolled,
)
from ortops.graph.operators import ELEMENTWISE
from ortops.graph.passes.scaled_sums import overwrites
from ortops.graph.tensor import Tape, op
from ortops.optimizers import OPERATORS

Shape: TypeAlias = tuple[int, ...]

_OF_SCALARS = ELEMENTWISE | {"ReduceSum"}
_SHORT = 64


@dataclass(frozen=True)
class Role:
    """A role of tensors in a formula: parameter, gradient, running mean and so on.

    Attributes:
        names: The tensor with this role for each member of a group: a variable, a feed, or an
            output of the gradient graph.
        dtype: The type of all these tensors.
        updated: Whether it is a variable whose next value the formula computes.
        fed: Whether it is a feed.
    """

    names: tuple[str, ...]
    dtype: ir.DataType
    updated: bool
    fed: bool


@dataclass(frozen=True)
class Group:
    """Variables that one elementwise formula updates.

    Attributes:
        formula: A graph. Its inputs are a tensor for each role, then the scalars. Its outputs are
            the next values of the updated roles, in the same order.
        roles: The roles of the tensors that the formula reads and updates.
        shapes: The shape of each member, the same in all roles.
        scalars: 0-d outputs of the gradient graph that the formula reads.
    """

    formula: ir.Graph
    roles: tuple[Role, ...]
    shapes: tuple[Shape, ...]
    scalars: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of elements of all members, in one role."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def updated(self) -> list[ir.Value]:
        """The formula's inputs for the updated roles."""
        return [self.formula.inputs[index] for index in self.next_values]

    @property
    def next_values(self) -> dict[int, ir.Value]:
        """The formula's outputs for the updated roles, by role index."""
        updated = [index for index, role in enumerate(self.roles) if role.updated]
        return dict(zip(updated, self.formula.outputs, strict=True))

    def emit(self, tape: Tape, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        """Emits the formula's nodes.

        Args:
            tape: The tape to emit to.
            inputs: A tensor for each role, all of one shape, and a 0-d tensor for each scalar.

        Returns:
            The formula's outputs.
        """
        copies = dict(zip(self.formula.inputs, inputs, strict=True))
        for node in self.formula:
            copy = copy_node(node, copies)
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                if old.shape is None or len(old.shape):
                    new.shape = inputs[0].shape
                copies[old] = new
            tape.append(copy)
            copy.name = node.name
        return [copies[value] for value in self.formula.outputs]


def split(
    graph: ir.Graph,
    updates: Mapping[str, str],
    feeds: Container[str],
    shown: Container[str],
    *,
    keep: Keep | None = None,
    alone: float = math.inf,
) -> tuple[list[Group], dict[str, str]]:
    """Moves the elementwise updates out of the graph of a step.

    Args:
        graph: The step, changed in place: nodes of groups, and nodes that only they read, are
            removed; tensors other than variables that a formula reads become outputs. Variables
            must be inputs, optimizer nodes must update one tensor each, and Gradient nodes must not
            be lowered yet.
        updates: The output that is the next value, by variable.
        feeds: The inputs that a batch provides.
        shown: Outputs to keep.
        keep: Which optimizer nodes to keep in formulas (see `ortops.engine.lowering.lower_ir`); the
            others are lowered, once for all members of a group.
        alone: The number of elements from which a variable has a group of its own.

    Returns:
        The groups, and the updates that remain in the graph.
    """
    variables = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    readers = Counter(updates.values())
    targets = {
        outputs[output]: variables[name]
        for name, output in updates.items()
        if name in variables and readers[output] == 1 and output not in shown
        if _same_type(outputs[output], variables[name])
    }
    components = _components(_cone(graph, targets), targets)
    by_signature: dict[object, list[_Component]] = {}
    for component in components:
        if not component.reads_itself():
            continue
        large = math.prod(_static(component.leaves()[0]) or ()) >= alone
        key = (component.signature(), id(component) if large else 0)
        by_signature.setdefault(key, []).append(component)
    packed = [members for members in by_signature.values() if _saves_work(members)]
    components = [component for members in packed for component in members]
    tape = Tape(graph)
    fed = {value for value in graph.inputs if value.name in feeds}
    out = _Outputs(tape)
    groups = [_group(members, fed, out, keep) for members in packed]
    taken = {target for component in components for target in component.targets}
    kept = [value for value in graph.outputs if value not in taken]
    graph.outputs[:] = [*kept, *out.values.values()]
    graph.remove([node for component in components for node in component.nodes], safe=True)
    remove_unread(list(graph))
    removed = {targets[target].name for target in taken}
    remove_unread_inputs(graph, removed)
    return groups, {name: output for name, output in updates.items() if name not in removed}


def is_safe_in_place(value: ir.Value, next_value: ir.Value) -> bool:
    """Whether a formula's next value may overwrite the current value in memory.

    It may if every node that reads the current value is the node that writes the next value, or an
    ancestor of it. All nodes of a formula are elementwise, so the writer itself may read, unless it
    `overwrites` the value first.

    Args:
        value: An input of a formula.
        next_value: The output that is its next value.
    """
    writer = next_value.producer()
    if writer is None:  # an input is an output as well
        return next_value is value
    before = ancestor_nodes(next_value, set())
    return not overwrites(writer, value) and all(reader in before for reader, _ in value.uses())


@dataclass
class _Component:
    """Nodes of the cone that share tensors.

    Attributes:
        nodes: The nodes in topological order.
        targets: The variables by next value.
    """

    nodes: list[ir.Node] = field(default_factory=list)
    targets: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def leaves(self) -> list[ir.Value]:
        """Returns the tensors that the nodes read, in this order, then the other variables."""
        found: dict[ir.Value, None] = {}
        inside = {value for node in self.nodes for value in node.outputs}
        for value in _tensors_read(self.nodes):
            if value not in inside:
                found[value] = None
        return list(dict.fromkeys((*found, *self.targets.values())))

    def reads_itself(self) -> bool:
        """Whether the nodes read a variable that they update, as in a running mean.

        Otherwise, packing would only keep what is written there: moments of 8 bits, for example,
        are computed from larger tensors.
        """
        return not set(self.targets.values()).isdisjoint(_tensors_read(self.nodes))

    def scalars(self) -> list[ir.Value]:
        """Returns the 0-d tensors that the nodes read, in this order."""
        read = (value for node in self.nodes for value in node.inputs if value is not None)
        return [value for value in read if is_scalar(value)]

    def signature(self) -> tuple[object, ...]:
        """Returns a key that is equal for two components if and only if they have one formula."""
        numbers: dict[ir.Value, object] = {}
        for index, leaf in enumerate(self.leaves()):
            numbers[leaf] = (index, leaf.dtype, leaf in self.targets.values())
        lines: list[object] = []
        scalars = _Scalars()
        for position, node in enumerate(self.nodes):
            read = [
                None if v is None else scalars.number(v) if is_scalar(v) else numbers[v]
                for v in node.inputs
            ]
            lines.append((*_kind(node), *read))
            for index, value in enumerate(node.outputs):
                variable = self.targets.get(value)
                role = None if variable is None else numbers[variable]
                numbers[value] = (position, index, role)
                lines.append((value.dtype, numbers[value]))
        return tuple(lines), tuple(scalars.known)


class _Outputs:
    """Names of values that become outputs of a graph."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.values: dict[ir.Value, ir.Value] = {}

    def name(self, value: ir.Value) -> str:
        if value not in self.values:
            output = value
            if value.producer() is None or value.is_graph_output():
                output = op.Identity(self.tape.tensor(value)).value
            self.values[value] = output
        return self.values[value].name or ""


def _cone(graph: ir.Graph, targets: Mapping[ir.Value, ir.Value]) -> list[ir.Node]:
    """Returns the nodes that only next values depend on, in topological order."""
    cone: dict[ir.Node, None] = {}
    for node in reversed(graph):
        if _is_elementwise(node) and all(
            (value in targets or not value.is_graph_output())
            and (value in targets or value.uses() or not value.name)
            and all(reader in cone for reader, _ in value.uses())
            for value in node.outputs
        ):
            cone[node] = None
    return list(reversed(cone))


def _is_elementwise(node: ir.Node) -> bool:
    """Whether a node is elementwise, and all its tensors have the same static shape."""
    known = node.op_type in ELEMENTWISE if not node.domain else node.domain == TRAINING_DOMAIN
    shape = _static(node.outputs[0])
    return (
        known
        and shape is not None
        and len(shape) > 0
        and 0 not in shape
        and all(_static(value) == shape for value in node.outputs)
        and all(value is None or _static(value) in ((), shape) for value in node.inputs)
    )


def _components(cone: Iterable[ir.Node], targets: Mapping[ir.Value, ir.Value]) -> list[_Component]:
    """Returns the connected components of a cone: they share no tensors."""
    parents: dict[object, object] = {}

    def root(item: object) -> object:
        while (parent := parents.setdefault(item, item)) is not item:
            item = parent
        return item

    nodes = list(cone)
    for node in nodes:
        variables = [targets[value] for value in node.outputs if value in targets]
        for value in (*_tensors_read([node]), *node.outputs, *variables):
            parents[root(value)] = root(node)
    found: dict[object, _Component] = {}
    for node in nodes:
        component = found.setdefault(root(node), _Component())
        component.nodes.append(node)
        component.targets |= {v: targets[v] for v in node.outputs if v in targets}
    return list(found.values())


def _group(
    members: Sequence[_Component], given: Container[ir.Value], out: _Outputs, keep: Keep | None
) -> Group:
    """Returns the group of components with one signature."""
    first, *_ = members
    leaves = [member.leaves() for member in members]
    roles = []
    for role in zip(*leaves, strict=True):
        updated = role[0] in first.targets.values()
        fed = all(value in given for value in role)
        names = tuple((v.name or "") if updated or fed else out.name(v) for v in role)
        assert role[0].dtype is not None
        roles.append(Role(names, role[0].dtype, updated, fed))
    scalars = [v for v in dict.fromkeys(first.scalars()) if constant_tensor(v) is None]
    inputs = [
        ir.Value(name=f"role_{i}", type=v.type, shape=ir.Shape(["elements"]))
        for i, v in enumerate(leaves[0])
    ]
    inputs += [
        ir.Value(name=f"scalar_{i}", type=v.type, shape=ir.Shape([])) for i, v in enumerate(scalars)
    ]
    formula = ir.Graph(inputs, [], nodes=[], opset_imports=_imports(first.nodes[0]), name="update")
    tape = Tape(formula)
    copies = dict(zip((*leaves[0], *scalars), inputs, strict=True))
    for value in first.scalars():
        if (constant := constant_tensor(value)) is not None and value not in copies:
            copies[value] = tape.constant(constant.numpy()).value
    for node in first.nodes:
        copy = copy_node(node, copies)
        copies |= dict(zip(node.outputs, copy.outputs, strict=True))
        for value in copy.outputs:
            value.shape = inputs[0].shape
        tape.append(copy)
        copy.name = node.name if len(members) == 1 else f"{node.name} and {len(members) - 1} more"
    targets = {variable: copies[target] for target, variable in first.targets.items()}
    formula.outputs.extend(targets[leaf] for leaf in leaves[0] if leaf in targets)
    remove_unread(lower_optimizers(formula, tape.names, keep))
    # A Reshape, for example, shares memory with its input, so that an update in place is wrong.
    others = {node.op_type for node in formula} - ELEMENTWISE - {"Constant", *OPERATORS}
    assert not others, f"the formula of {first.nodes[0].name} is not elementwise: {others}"
    read = _move_scalars(formula, dict(zip(inputs[len(roles) :], scalars, strict=True)), out.tape)
    shapes = tuple(_static(member.leaves()[0]) or () for member in members)
    return Group(formula, tuple(roles), shapes, tuple(out.name(value) for value in read))


def _move_scalars(
    formula: ir.Graph, scalars: Mapping[ir.Value, ir.Value], tape: Tape
) -> list[ir.Value]:
    """Moves the computations on scalars from a formula to the step, where they run once.

    Args:
        formula: The formula; changed in place.
        scalars: The tensors of the step by scalar input of the formula.
        tape: The step.

    Returns:
        The scalars of the step that the formula reads afterwards, in the order of its inputs.
    """
    moved: dict[ir.Value, ir.Value] = dict(scalars)
    for node in list(formula):
        operands = [value for value in node.inputs if value is not None]
        if not any(value in moved for value in operands) or not all(map(is_scalar, operands)):
            continue
        for value in operands:
            if value not in moved and (constant := constant_tensor(value)) is not None:
                moved[value] = tape.constant(constant.numpy()).value
        copy = copy_node(node, moved)
        tape.append(copy)
        moved |= zip(node.outputs, copy.outputs, strict=True)
    own = [value for value in formula.inputs if value not in scalars]
    found: dict[ir.Value, ir.Value] = {}
    for node in formula:
        if all(value in moved for value in node.outputs):
            continue
        for index, read in enumerate(node.inputs):
            if read is not None and read in moved and constant_tensor(read) is None:
                name = f"scalar_{len(found)}"
                new = ir.Value(name=name, type=read.type, shape=ir.Shape([]))
                node.replace_input_with(index, found.setdefault(read, new))
    remove_unread(list(formula))
    formula.inputs[:] = [*own, *found.values()]
    return [moved[value] for value in found]


def _imports(node: ir.Node) -> dict[str, int]:
    assert node.graph is not None
    return dict(node.graph.opset_imports)


def _tensors_read(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    read = (value for node in nodes for value in node.inputs if value is not None)
    return [value for value in read if not is_scalar(value)]


def _kind(node: ir.Node) -> tuple[object, ...]:
    """Returns operator and attributes."""
    attributes = sorted((name, repr(a.value)) for name, a in node.attributes.items())
    return node.domain, node.op_type, *attributes


class _Scalars:
    """Numbers scalars, with one number for all that are equal in every run.

    Computations between scalars may include short tensors that are computed from them and summed.

    Attributes:
        known: What computes each number from others, in order.
    """

    def __init__(self) -> None:
        self.known: dict[object, int] = {}
        self._numbers: dict[ir.Value, int] = {}

    def number(self, value: ir.Value) -> int:
        """Returns the number of a scalar."""
        return unrolled(self._number(value))

    def _number(self, value: ir.Value) -> Steps[int]:
        if value not in self._numbers:
            key = yield self._key(value)
            self._numbers[value] = self.known.setdefault(key, len(self.known))
        return self._numbers[value]

    def _key(self, value: ir.Value) -> Steps[object]:
        constant = constant_tensor(value)
        if constant is not None:
            return value.dtype, *constant.shape, constant.numpy().tobytes()
        node = value.producer()
        if node is None or not node.inputs:
            return value
        is_standard = node.domain == ""
        if is_standard and node.op_type not in _OF_SCALARS:
            return value
        count = _SHORT if is_standard else 1
        if not all(read is None or _has_at_most(count, read) for read in node.inputs):
            return value
        key = [*_kind(node), value.index()]
        for read in node.inputs:
            number = None if read is None else (yield self._number(read))
            key.append(number)
        return tuple(key)


def _saves_work(members: Sequence[_Component]) -> bool:
    """Whether packing components with one signature saves anything.

    A component that reads a scalar of its own, such as the norm of its parameter, has no equals, so
    each parameter would have its own formula.
    """
    first = members[0]
    from_tensors = [value for value in first.scalars() if _depends_on_tensors(value)]
    return len(members) > 1 or not any(_is_own(value, first.nodes) for value in from_tensors)


def _is_own(scalar: ir.Value, nodes: Container[ir.Node]) -> bool:
    """Whether only these nodes read a scalar, and the scalars that it is computed from."""
    left, seen = [scalar], {scalar}
    while left:
        value = left.pop()
        found: list[ir.Value] = []
        for reader, _ in value.uses():
            if reader not in nodes:
                if not all(map(is_scalar, reader.outputs)):
                    return False
                found += reader.outputs
        node = value.producer()
        read = [] if node is None else [v for v in node.inputs if v is not None]
        found += [v for v in read if is_scalar(v) and _depends_on_tensors(v)]
        left += [v for v in dict.fromkeys(found) if v not in seen]
        seen.update(found)
    return True


def _depends_on_tensors(scalar: ir.Value) -> bool:
    """Whether a scalar is computed from variables or inputs that are not scalars."""
    left, seen = [scalar], {scalar}
    while left:
        value = left.pop()
        node = value.producer()
        if constant_tensor(value) is not None:
            continue
        if node is None and not is_scalar(value):
            return True
        read = {v for v in (node.inputs if node is not None else ()) if v is not None} - seen
        seen |= read
        left.extend(read)
    return False


def _has_at_most(count: int, value: ir.Value) -> bool:
    """Whether a value is known to have at most a number of elements."""
    shape = _static(value)
    return shape is not None and math.prod(shape) <= count


def _same_type(a: ir.Value, b: ir.Value) -> bool:
    return a.dtype == b.dtype and _static(a) is not None and _static(a) == _static(b)


def is_scalar(value: ir.Value) -> bool:
    """Whether a value is known to be 0-d."""
    return value.shape is not None and not len(value.shape)


def _static(value: ir.Value) -> Shape | None:
    """Returns the shape of a value if it is static, else None."""
    if value.shape is None:
        return None
    dims = value.shape.dims  # a hot path: all comparisons of updates are made with it
    return None if ir.SymbolicDim in map(type, dims) else cast(Shape, dims)
