"""Lowering: a model with nodes of the training domain → a model of standard operators.

A Gradient node becomes its backward graph, an optimizer node the nodes that its update rule emits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import onnx
import onnx_ir as ir

from ortops import convert, custom_ops, expansion, gradient
from ortops.autodiff import describe
from ortops.convert import ModelLike
from ortops.errors import ModelError, did_you_mean
from ortops.gradient import BOUND_DOMAIN, GRADIENT_DOMAINS
from ortops.optimizers import OPERATORS
from ortops.tensor import Names, Tape, Tensor, op, remove_unread, shape_of

__all__ = [
    "TRAINING_DOMAIN",
    "has_domain",
    "infer_types",
    "lower",
    "lower_ir",
    "lower_optimizers",
    "lower_prepared",
    "prepare",
    "remove_unread",
    "takes_python_kernel",
    "to_proto",
]

TRAINING_DOMAIN = custom_ops.DOMAIN

Keep = Callable[[ir.Node], bool]
"""Tells whether a one-tensor optimizer node with all its attributes stays as it is."""


def lower(model: ModelLike) -> onnx.ModelProto:
    """Returns a model in which no node of the training domain is left.

    Gradient nodes become the backward graph, which shares the values of the forward pass; Adagrad,
    Adam and Momentum nodes become the nodes of their update rules. Names of inputs and outputs,
    initializers, metadata and training_info are kept. A model without such nodes comes back
    unchanged, so lowering twice is lowering once.

    Args:
        model: A ModelProto, its bytes, or the path of its file; not changed.

    Returns:
        A new model. External data stay external, relative to the folder of the given file.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
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
        ['Mul', 'Constant', 'Mul', 'Mul', 'Add']
    """
    proto, folder = convert.load(model)
    if not has_domain(proto):
        result = onnx.ModelProto()
        result.CopyFrom(proto)
        return result
    result = to_proto(lower_ir(convert.to_ir(proto, folder)))
    for info in proto.training_info:  # one by one: `extend` takes none of 2 GB
        result.training_info.add().CopyFrom(info)
    return result


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Serializes a model."""
    result: onnx.ModelProto = ir.to_proto(model)
    return result


def lower_ir(model: ir.Model, *, keep: Keep | None = None) -> ir.Model:
    """Lowers a model.

    Args:
        model: The model; not to be used afterwards.
        keep: Asked for each optimizer node, split into one-tensor nodes with every attribute
            written out, whether it stays; none does by default.

    Returns:
        The lowered model.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
        UnsupportedError: If an operator that a gradient passes through has no rule.
    """
    return lower_prepared(prepare(model), keep=keep)


def lower_prepared(model: ir.Model, *, keep: Keep | None = None) -> ir.Model:
    """Lowers a model that `prepare` returned, in place; see `lower_ir`."""
    graph = model.graph
    names = Names(graph)
    emitted: list[ir.Node] = []
    for node in list(_all_nodes(graph)):
        if node.domain == BOUND_DOMAIN:
            emitted += gradient.lower_gradient(node, names)
    emitted += lower_optimizers(graph, names, keep)
    remove_unread(emitted)
    _fix_imports(graph)
    return model


def prepare(model: ir.Model) -> ir.Model:
    """Brings a model with nodes of the training domain into the form that lowering works on.

    Gradient nodes are bound, functions inlined, the opset is 21 or later, nodes are in topological
    order, types and shapes are inferred, and what gradients pass through has a rule or is taken
    apart.

    Args:
        model: The model; not to be used afterwards.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal.
    """
    _check_nodes(model)
    _drop_domain_functions(model)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        gradient.bind(graph)
    convert.inline(model)
    _fix_imports(model.graph)
    model = convert.upgrade(model)
    try:
        model.graph.sort()
    except ValueError as error:
        raise ModelError(f"model: {error} A tensor must not be computed from itself") from error
    for graph in model.graph.subgraphs():
        graph.opset_imports.update(model.graph.opset_imports)
    infer_types(model)
    if expansion.expand(model):
        infer_types(model)
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
    for node in list(_all_nodes(graph)):
        if node.domain == TRAINING_DOMAIN and node.op_type in OPERATORS:
            emitted += _lower_optimizer(node, names, keep)
    return emitted


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
    gradients = [node for node in _all_nodes(model.graph) if node.domain == BOUND_DOMAIN]
    changed = True
    while changed:  # once more for each order of differentiation
        convert.infer_shapes(model)
        changed = False
        for node in gradients:
            changed |= gradient.infer_outputs(node)


def _all_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    return ir.traversal.RecursiveGraphIterator(graph)


def _check_nodes(model: ir.Model) -> None:
    """Refuses nodes of the training domain that are not legal, as far as can be told early."""
    known = [*OPERATORS, "Gradient"]
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    for graph in graphs:
        names = Names(graph)
        for node in _all_nodes(graph):
            in_domain = node.domain == TRAINING_DOMAIN or gradient.is_gradient(node)
            if node.domain in GRADIENT_DOMAINS and not (in_domain and node.op_type in known):
                raise ModelError(
                    f"{describe(node)}: domain '{node.domain}' has no operator {node.op_type}; "
                    + did_you_mean(node.op_type, known)
                )
            if in_domain and node.op_type in OPERATORS:
                _optimizer_attributes(node)
                _, _, groups = _optimizer_inputs(node)
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
        for node in _all_nodes(graph):
            if node.domain in GRADIENT_DOMAINS:
                node.overload = ""


def _lower_optimizer(node: ir.Node, names: Names, keep: Keep | None) -> list[ir.Node]:
    """Replaces an optimizer node by one-tensor nodes that stay, or by those of its rule."""
    operator = OPERATORS[node.op_type]
    attributes = _optimizer_attributes(node)
    r, t, groups = _optimizer_inputs(node)
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    tape = Tape(graph, before=node, names=names)
    tape.scope = f"{node.name or node.op_type}/"
    outputs = list(node.outputs)
    put_out: set[ir.Value] = set()
    scalars = [tape.tensor(r), tape.tensor(t)]
    for index, group in enumerate(groups):
        wanted = outputs[index :: len(groups)]
        if not any(output.name for output in wanted):
            continue
        single = ir.Node(
            TRAINING_DOMAIN,
            node.op_type,
            [r, t, *group],
            ir.convenience.convert_attributes(attributes),
            num_outputs=len(group) - 1,
        )
        for output, like in zip(single.outputs, [group[0], *group[2:]], strict=True):
            output.type, output.shape = like.type, like.shape
        if keep is not None and keep(single):
            tape.append(single)
            if len(groups) == 1 and node.name:  # it is the node, as far as messages go
                single.name = node.name
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
                gradient.replace_value(tape, output, result.with_shape_of(x), put_out)
    graph.remove(node, safe=True)
    return [emitted for emitted in tape.nodes if emitted.domain != TRAINING_DOMAIN]


def _of_shape(tensor: Tensor, x: Tensor) -> Tensor:
    """Returns a tensor in the shape of another, at which a run fails rather than broadcasts."""
    if tensor.shape is not None and tensor.shape == x.shape and None not in tensor.shape:
        return tensor
    return cast(Tensor, op.Reshape(tensor, shape_of(x), allowzero=1))


def _optimizer_attributes(node: ir.Node) -> dict[str, float | str]:
    """Returns all attributes of an optimizer node, defaults included, or refuses them."""
    where = describe(node)
    operator = OPERATORS[node.op_type]
    kinds = {float: ir.AttributeType.FLOAT, str: ir.AttributeType.STRING}
    attributes: dict[str, float | str] = dict(operator.defaults)
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
        attributes[name] = attribute.value
    for name in operator.required:
        if name not in attributes:
            raise ModelError(f"{where}: attribute '{name}' is missing; it is required")
    if attributes.get("mode", "standard") not in ("standard", "nesterov"):
        raise ModelError(
            f"{where}: mode is '{attributes['mode']}'; 'standard' and 'nesterov' are accepted"
        )
    return attributes


def _optimizer_inputs(node: ir.Node) -> tuple[ir.Value, ir.Value, list[tuple[ir.Value, ...]]]:
    """Returns R, T and, for each optimized tensor, (X, G, *states), or refuses them."""
    where = describe(node)
    states = OPERATORS[node.op_type].states
    size = 2 + len(states)
    listed = ", ".join(("X", "G", *states))
    values = [value for value in node.inputs if value is not None]
    if len(values) != len(node.inputs):
        raise ModelError(
            f"{where}: input {node.inputs.index(None)} is absent (''); all are required"
        )
    if len(values) < 2 + size or (len(values) - 2) % size:
        raise ModelError(
            f"{where}: {len(values)} inputs; it takes R, T and then, for n tensors, n each of "
            f"{listed}: 2 + {size}n inputs"
        )
    r, t, *rest = values
    count = len(rest) // size
    if len(node.outputs) > count * (size - 1):
        raise ModelError(
            f"{where}: {len(node.outputs)} outputs for {count} optimized tensors; there are at "
            f"most {count * (size - 1)}: n each of X_new"
            + "".join(f", {state}_new" for state in states)
        )
    for name, value in (("R", r), ("T", t)):
        if value.shape is not None and len(value.shape) != 0:
            raise ModelError(f"{where}: {name} has shape {value.shape}; a scalar (0-d) is accepted")
    floats = (None, ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if t.dtype not in (None, ir.DataType.INT64):
        raise ModelError(f"{where}: T is of type {t.dtype}; INT64 is accepted")
    if r.dtype not in floats:
        raise ModelError(f"{where}: R is of type {r.dtype}; FLOAT and DOUBLE are accepted")
    groups = [tuple(rest[index::count]) for index in range(count)]
    for group in groups:
        for name, value in zip(("X", "G", *states), group, strict=True):
            if value.dtype not in floats:
                raise ModelError(
                    f"{where}: {name} '{value.name}' is of type {value.dtype}; FLOAT and DOUBLE "
                    "are accepted"
                )
            if not gradient.may_be_equal(group[0].shape, value.shape):
                raise ModelError(
                    f"{where}: {name} '{value.name}' has shape {value.shape} and X "
                    f"'{group[0].name}' has shape {group[0].shape}; the shapes of a group "
                    f"({listed}) must be equal"
                )
    types = {value.dtype for value in rest} - {None}
    if len(types) > 1:
        raise ModelError(
            f"{where}: tensors of {' and '.join(sorted(map(str, types)))} in one node; all are of "
            "one type"
        )
    return r, t, groups


def _fix_imports(graph: ir.Graph) -> None:
    """Leaves the operator set imports that the nodes use."""
    used = {node.domain for node in _all_nodes(graph)} | {""}
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
