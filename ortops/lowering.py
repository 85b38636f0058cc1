"""Lowering: a model with nodes of the training domain → a model of standard operators.

A Gradient node becomes its backward graph, an optimizer node the nodes that its update rule emits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx
import onnx_ir as ir

from ortops import custom_ops
from ortops.autodiff.expansion import expand
from ortops.autodiff.gradient_node import (
    GRADIENT_DOMAINS,
    Bound,
    bind,
    bound_nodes,
    infer_outputs,
    is_bound,
    is_gradient,
    lower_gradient,
    mark_variables,
)
from ortops.autodiff.registry import Rules
from ortops.autodiff.rules import RULES
from ortops.errors import ModelError, OrtopsError, did_you_mean
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.edit import all_nodes, ancestor_nodes, describe, remove_unread, replace_value
from ortops.graph.serialization import BOUND_DOMAIN, to_proto
from ortops.graph.shapes import infer_shapes, may_be_equal
from ortops.graph.tensor import Names, Tape, Tensor, op, shape_of
from ortops.optimizers import OPERATORS
from ortops.passes import Draft, Pass, Runtime, passes_for
from ortops.passes.order import put_last_results_first

__all__ = [
    "TRAINING_DOMAIN",
    "Target",
    "has_domain",
    "infer_types",
    "lower",
    "lower_ir",
    "lower_optimizers",
    "lower_prepared",
    "lowered_for",
    "normalize",
    "prepare",
    "takes_python_kernel",
    "to_proto",
]

TRAINING_DOMAIN = custom_ops.DOMAIN

Target: TypeAlias = Literal["onnxruntime", "webgpu"]
"""What is to run a graph; None in its place is anything that has the standard's operators."""

_RUNTIMES: Mapping[str | None, Runtime] = {
    None: "any",
    "onnxruntime": "onnxruntime",
    "webgpu": "webgpu",
}

Keep = Callable[[ir.Node], bool]
"""Tells whether a one-tensor optimizer node with all its attributes stays as it is."""


@convert.blame_model
def lower(model: ModelLike, *, target: Target | None = None) -> onnx.ModelProto:
    """Returns a model in which no node of the training domain is left.

    Gradient nodes become the backward graph, which shares the values of the forward pass; Adagrad,
    Adam and Momentum nodes become the nodes of their update rules. What only led to a gradient and
    is no longer read is removed. Names of inputs and outputs,
    initializers, metadata and training_info are kept. A model without such nodes comes back
    unchanged, so lowering twice is lowering once.

    Args:
        model: A ModelProto, its bytes, or the path of its file; not changed.
        target: What is to run the result. By default that has standard operators only;
            ``"onnxruntime"`` also takes operators of ``com.microsoft`` that every build of
            onnxruntime has on its CPU provider. Numbers differ by rounding only.

    Returns:
        A new model. External data stay external, relative to the folder of the given file.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
        OrtopsError: If there is no such target.
        UnsupportedError: If an operator that a gradient passes through has no rule.

    Example:
        >>> import numpy as np
        >>> from ortops import Tape
        >>> with Tape(name="square") as tape:
        ...     x = tape.input("x", np.float32, [])
        ...     y = tape.output(x * x, "y")
        >>> model = tape.model()
        >>> domain = "ai.onnx.preview.training"
        >>> gradient = onnx.helper.make_node(
        ...     "Gradient", ["x"], ["slope"], domain=domain, xs=["x"], y="y")
        >>> model.graph.node.extend([gradient])
        >>> model.graph.output.extend([onnx.helper.make_tensor_value_info("slope", 1, [])])
        >>> model.opset_import.extend([onnx.helper.make_opsetid(domain, 1)])
        >>> [node.op_type for node in lower(model).graph.node]
        ['Constant', 'Mul', 'Mul', 'Add', 'Mul']
    """
    _runtime(target)
    proto, folder = convert.load(model)
    if not has_domain(proto):
        result = onnx.ModelProto()
        result.CopyFrom(proto)
        return result
    result = to_proto(lower_ir(convert.to_ir(proto, folder), target=target))
    for info in proto.training_info:  # one by one: `extend` takes none of 2 GB
        result.training_info.add().CopyFrom(info)
    return result


def lower_ir(
    model: ir.Model, *, keep: Keep | None = None, target: Target | None = None
) -> ir.Model:
    """Lowers a model.

    Args:
        model: The model; not to be used afterwards.
        keep: Asked for each optimizer node, split into one-tensor nodes with every attribute
            written out, whether it stays; none does by default.
        target: See `lower`.

    Returns:
        The lowered model.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
        UnsupportedError: If an operator that a gradient passes through has no rule.
    """
    return lowered_for(prepare(model), target, keep=keep)


def lowered_for(model: ir.Model, target: Target | None, *, keep: Keep | None = None) -> ir.Model:
    """Lowers a model that `prepare` returned, in place, for what is to run it.

    Args:
        model: The model.
        target: See `lower`.
        keep: See `lower_ir`.

    Returns:
        The model.

    Raises:
        OrtopsError: If there is no such target.
    """
    model = lower_prepared(model, keep=keep, passes=passes_for(_runtime(target)))
    put_last_results_first(model.graph)
    return model


def _runtime(target: Target | None) -> Runtime:
    """Returns what runs a graph that is made for a target."""
    if not isinstance(target, str | None) or target not in _RUNTIMES:
        known = ", ".join(map(repr, _RUNTIMES))
        raise OrtopsError(f"target is {target!r}; one of {known} is accepted")
    return _RUNTIMES[target]


def lower_prepared(
    model: ir.Model,
    *,
    keep: Keep | None = None,
    rules: Rules = RULES,
    passes: Sequence[Pass] = (),
    sizes: Mapping[str, int] | None = None,
    feeds: Sequence[str] = (),
    shown: Sequence[str] = (),
) -> ir.Model:
    """Lowers a model that `prepare` returned, in place.

    Args:
        model: The model.
        keep: See `lower_ir`.
        rules: How cotangents pass through nodes.
        passes: What makes the result fast; see `ortops.passes`.
        sizes: See `ortops.passes.Draft`.
        feeds: See `ortops.passes.Draft`.
        shown: See `ortops.passes.Draft`.

    Returns:
        The model.
    """
    graph = model.graph
    draft = Draft(model, Names(graph), rules, sizes, feeds, shown)
    for each in passes:
        each.prepare(draft)
    gradients = bound_nodes(graph)
    # What only led to a y is dead once the Gradient node is gone.
    removable = ancestor_nodes((Bound.of(node).y for node in gradients), set())
    pending = gradients[::-1]
    while pending:
        emitted = lower_gradient(pending.pop(), draft.names, draft.rules)
        removable.update(emitted)
        pending += [
            node for node in reversed(emitted) if is_bound(node)
        ]  # of rules that ask for one
    removable.update(lower_optimizers(graph, draft.names, keep))
    remove_unread([node for node in all_nodes(graph) if node in removable])
    _fix_imports(graph)
    for each in reversed(passes):
        each.finish(draft)
    return model


def prepare(model: ir.Model, rules: Rules = RULES) -> ir.Model:
    """Brings a model with nodes of the training domain into the form that lowering works on.

    Gradient nodes are bound, functions inlined, the opset is 21 or later, nodes are in topological
    order, types and shapes are inferred, and what gradients pass through has a rule or is taken
    apart.

    Args:
        model: The model; not to be used afterwards.
        rules: The rules.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
    """
    model = normalize(model)
    mark_variables(model.graph)
    infer_types(model)
    if expand(model, rules):
        infer_types(model)
    for node in _optimizer_nodes(model.graph):
        _check_tensors(node)
    return model


def normalize(model: ir.Model) -> ir.Model:
    """Brings a model into the form that `Tape` and `infer_types` can go on with.

    Gradient nodes are bound, functions inlined, the opset is 21 or later, and nodes are in
    topological order.

    Args:
        model: The model; not to be used afterwards.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
    """
    _check_nodes(model)
    _drop_domain_functions(model)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        bind(graph)
    convert.inline(model)
    _fix_imports(model.graph)
    model = convert.upgrade(model)
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(f"model: {error} A tensor must not be computed from itself") from error
    for graph in model.graph.subgraphs():
        graph.opset_imports.update(model.graph.opset_imports)
    return model


def lower_optimizers(graph: ir.Graph, names: Names, keep: Keep | None = None) -> list[ir.Node]:
    """Replaces optimizer nodes by one-tensor nodes that stay, or by the nodes of their rules.

    Args:
        graph: A prepared graph; changed in place.
        names: The names taken in the model.
        keep: See `lower_ir`.

    Returns:
        The standard nodes that were emitted.
    """
    emitted: list[ir.Node] = []
    replaced: list[ir.Node] = []
    for node in _optimizer_nodes(graph):
        new = _lower_optimizer(node, names, keep)
        if new is not None:
            emitted += new
            replaced.append(node)
    remove_unread(replaced)  # at once: each removal looks at all outputs of the graph
    return emitted


def _optimizer_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [
        node
        for node in all_nodes(graph)
        if node.domain == TRAINING_DOMAIN and node.op_type in OPERATORS
    ]


def has_domain(proto: onnx.ModelProto) -> bool:
    """Whether a model has nodes, or functions, of the training domain."""

    def in_graph(nodes: object) -> bool:
        return any(
            node.domain in GRADIENT_DOMAINS
            or any(
                in_graph(graph.node)
                for attribute in node.attribute
                for graph in (*attribute.graphs, attribute.g)
            )
            for node in nodes  # type: ignore[attr-defined]
        )

    return in_graph(proto.graph.node) or any(
        function.domain in GRADIENT_DOMAINS or in_graph(function.node)
        for function in proto.functions
    )


def infer_types(model: ir.Model) -> None:
    """Infers types and shapes; a gradient has those of its x, which onnx does not know."""
    gradients = bound_nodes(model.graph)
    changed = True
    while changed:  # once more for each order of differentiation
        infer_shapes(model)
        changed = False
        for node in gradients:
            changed |= infer_outputs(node)


def _check_nodes(model: ir.Model) -> None:
    """Refuses nodes of the training domain that are not legal, as far as can be told early."""
    known = [*OPERATORS, "Gradient"]
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    for graph in graphs:
        names = Names(graph)
        for node in all_nodes(graph):
            in_domain = node.domain == TRAINING_DOMAIN or is_gradient(node)
            if node.domain in GRADIENT_DOMAINS and not (in_domain and node.op_type in known):
                raise ModelError(
                    f"{describe(node)}: domain '{node.domain}' has no operator {node.op_type}; "
                    + did_you_mean(node.op_type, known)
                )
            if in_domain and node.op_type in OPERATORS:
                _check_attributes(node)
                _check_arity(node)
                groups = _OptimizerNode.of(node).groups
                given = len(node.outputs)
                while given and not node.outputs[given - 1].name:
                    given -= 1  # an absent output at the end is one that is not listed
                node.resize_outputs(len(groups) * (len(groups[0]) - 1))
                for output in node.outputs[given:]:  # onnx's own inference fails without them
                    output.name = names.unique(f"{node.op_type}_unread")


def _drop_domain_functions(model: ir.Model) -> None:
    """Drops bodies that stand in for the domain's operators, whose meaning is known here."""
    for identifier in list(model.functions):
        if identifier[0] in GRADIENT_DOMAINS:
            del model.functions[identifier]
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in all_nodes(graph):
            if node.domain in GRADIENT_DOMAINS:
                node.overload = ""


@dataclass(frozen=True)
class _OptimizerNode:
    """What a legal optimizer node says.

    Attributes:
        r: The learning rate.
        t: The number of updates so far.
        groups: For each optimized tensor (X, G, *states).
        attributes: All attributes, defaults included.
    """

    r: ir.Value
    t: ir.Value
    groups: Sequence[tuple[ir.Value, ...]]
    attributes: Mapping[str, float | str]

    @classmethod
    def of(cls, node: ir.Node) -> _OptimizerNode:
        """Reads a node that `_check_attributes` and `_check_arity` have let pass."""
        operator = OPERATORS[node.op_type]
        r, t, *rest = (value for value in node.inputs if value is not None)
        count = len(rest) // (2 + len(operator.states))
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        groups = [tuple(rest[index::count]) for index in range(count)]
        return cls(r, t, groups, {**operator.defaults, **given})


def _lower_optimizer(node: ir.Node, names: Names, keep: Keep | None) -> list[ir.Node] | None:
    """Puts one-tensor nodes that stay, or those of its rule, in the place of an optimizer node.

    Returns:
        The standard nodes among them; None if the node itself stays.
    """
    operator = OPERATORS[node.op_type]
    update = _OptimizerNode.of(node)
    r, t, groups, attributes = update.r, update.t, update.groups, update.attributes
    if len(groups) == 1 and keep is not None:  # it is a one-tensor node already
        _write_out(node, update)
        if keep(node):
            for output in node.outputs:  # a Python op cannot leave one out
                output.name = output.name or names.unique(f"{node.op_type}_unread")
            return None
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    tape = Tape(graph, before=node, names=names)
    tape.scope = f"{node.name or node.op_type}/"
    outputs = list(node.outputs)
    scalars = [tape.tensor(r), tape.tensor(t)]
    for index, group in enumerate(groups):
        wanted = outputs[index :: len(groups)]
        if not any(output.name for output in wanted):
            continue
        inputs = [r, t, *group]
        single = ir.Node(TRAINING_DOMAIN, node.op_type, inputs, num_outputs=len(group) - 1)
        _write_out(single, _OptimizerNode(r, t, [group], attributes))
        if len(groups) > 1 and keep is not None and keep(single):
            tape.append(single)
            results = [tape.tensor(output) for output in single.outputs]
        else:
            for position in range(len(single.inputs)):
                single.replace_input_with(position, None)
            x, *others = (tape.tensor(value) for value in group)
            tensors = [x, *(_of_shape(tensor, x) for tensor in others)]
            results = list(operator.rule(*scalars, *tensors, **attributes))
        x = tape.tensor(group[0])
        for output, result in zip(wanted, results, strict=True):
            if output.name:
                replace_value(tape, output, result.with_shape_of(x))
    return [emitted for emitted in tape.nodes if emitted.domain != TRAINING_DOMAIN]


def _write_out(node: ir.Node, update: _OptimizerNode) -> None:
    """Writes into a one-tensor node what follows from its inputs and from defaults."""
    for attribute in ir.convenience.convert_attributes(update.attributes):
        node.attributes[attribute.name] = attribute
    (group,) = update.groups
    for output, like in zip(node.outputs, [group[0], *group[2:]], strict=True):
        output.type, output.shape = like.type, like.shape


def _of_shape(tensor: Tensor, x: Tensor) -> Tensor:
    """Returns a tensor in the shape of another, at which a run fails rather than broadcasts."""
    if tensor.shape is not None and tensor.shape == x.shape and None not in tensor.shape:
        return tensor
    return op.Reshape(tensor, shape_of(x), allowzero=1)


def _check_attributes(node: ir.Node) -> None:
    """Refuses an optimizer node whose attributes are not legal."""
    where = describe(node)
    operator = OPERATORS[node.op_type]
    kinds = {float: ir.AttributeType.FLOAT, str: ir.AttributeType.STRING}
    for name, attribute in node.attributes.items():
        if name not in operator.attribute_types:
            raise ModelError(
                f"{where}: unknown attribute '{name}'; "
                + did_you_mean(name, operator.attribute_types)
            )
        kind = kinds[operator.attribute_types[name]]
        if attribute.type != kind:
            raise ModelError(
                f"{where}: attribute '{name}' is of type {attribute.type.name}; it is of type "
                f"{kind.name}"
            )
    for name in operator.required:
        if name not in node.attributes:
            raise ModelError(f"{where}: attribute '{name}' is missing; it is required")
    mode = node.attributes.get_string("mode", "standard")
    if mode not in ("standard", "nesterov"):
        raise ModelError(f"{where}: mode is '{mode}'; 'standard' and 'nesterov' are accepted")


def _check_arity(node: ir.Node) -> None:
    """Refuses an optimizer node with a number of inputs or outputs that is not legal."""
    where = describe(node)
    states = OPERATORS[node.op_type].states
    size = 2 + len(states)
    given = len(node.inputs)
    if None in node.inputs:
        raise ModelError(
            f"{where}: input {node.inputs.index(None)} is absent (''); all are required"
        )
    if given < 2 + size or (given - 2) % size:
        raise ModelError(
            f"{where}: {given} inputs; it takes R, T and then, for n tensors, n each of "
            f"{', '.join(('X', 'G', *states))}: 2 + {size}n inputs"
        )
    count = (given - 2) // size
    if len(node.outputs) > count * (size - 1):
        raise ModelError(
            f"{where}: {len(node.outputs)} outputs for {count} optimized tensors; there are at "
            f"most {count * (size - 1)}: n each of X_new"
            + "".join(f", {state}_new" for state in states)
        )


def _check_tensors(node: ir.Node) -> None:
    """Refuses an optimizer node whose inputs are of types or shapes that are not legal."""
    where = describe(node)
    update = _OptimizerNode.of(node)
    names = ("X", "G", *OPERATORS[node.op_type].states)
    for name, value in (("R", update.r), ("T", update.t)):
        if value.shape is not None and len(value.shape) != 0:
            raise ModelError(f"{where}: {name} has shape {value.shape}; a scalar (0-d) is accepted")
    floats = (None, ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if update.t.dtype not in (None, ir.DataType.INT64):
        raise ModelError(f"{where}: T is of type {update.t.dtype}; INT64 is accepted")
    if update.r.dtype not in floats:
        raise ModelError(f"{where}: R is of type {update.r.dtype}; FLOAT and DOUBLE are accepted")
    for group in update.groups:
        for name, value in zip(names, group, strict=True):
            if value.dtype not in floats:
                raise ModelError(
                    f"{where}: {name} '{value.name}' is of type {value.dtype}; FLOAT and DOUBLE "
                    "are accepted"
                )
            if not may_be_equal(group[0].shape, value.shape):
                raise ModelError(
                    f"{where}: {name} '{value.name}' has shape {value.shape} and X "
                    f"'{group[0].name}' has shape {group[0].shape}; the shapes of a group "
                    f"({', '.join(names)}) must be equal"
                )
    types = {value.dtype for group in update.groups for value in group} - {None}
    if len(types) > 1:
        raise ModelError(
            f"{where}: tensors of {' and '.join(sorted(map(str, types)))} in one node; all are of "
            "one type"
        )


def _fix_imports(graph: ir.Graph) -> None:
    """Leaves the operator set imports that the nodes use."""
    used = {node.domain for node in all_nodes(graph)} | {""}
    for domain in (*GRADIENT_DOMAINS, BOUND_DOMAIN):
        if domain in used:
            graph.opset_imports.setdefault(domain, 1)
        else:
            graph.opset_imports.pop(domain, None)


def takes_python_kernel(node: ir.Node) -> bool:
    """Whether a one-tensor optimizer node can run on its Python custom op.

    A custom op has fixed types, and gets its attributes as text with 6 significant digits.
    """
    typed = all(value is not None and value.dtype is not None for value in node.inputs)
    return typed and all(
        custom_ops.survives_as_text(attribute.as_float())
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.FLOAT
    )
