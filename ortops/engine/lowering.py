"""Lowering: converts models with nodes of the training domain to standard operators.

A Gradient node becomes its backward graph. An optimizer node becomes the nodes of its update rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import onnx
import onnx_ir as ir

from ortops._common.arguments import choice
from ortops.engine import custom_ops
from ortops.errors import ModelError, did_you_mean
from ortops.graph import convert
from ortops.graph.autodiff.expansion import expand, is_preview
from ortops.graph.autodiff.gradient_node import (
    GRADIENT_DOMAINS,
    Bound,
    bind,
    bound_nodes,
    infer_outputs,
    is_bound,
    is_gradient,
    lower_gradient,
    mark_variables,
    of_one_pass,
)
from ortops.graph.autodiff.registry import Rules
from ortops.graph.autodiff.rules import RULES
from ortops.graph.edit import (
    all_nodes,
    ancestor_nodes,
    describe,
    remove_unread,
    replace_value,
    sort,
    tape_before,
)
from ortops.graph.faults import avoid
from ortops.graph.files import loading
from ortops.graph.files.folders import remember
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import has_domain
from ortops.graph.files.serialization import BOUND_DOMAIN, to_proto
from ortops.graph.names import Names
from ortops.graph.nesting import subgraphs
from ortops.graph.passes import passes_for
from ortops.graph.passes.draft import Draft, Pass, Runtime
from ortops.graph.passes.order import put_last_results_first
from ortops.graph.shapes import infer_shapes, is_unknown, may_be_equal
from ortops.graph.tensor import Tensor, op, shape_of
from ortops.optimizers import OPERATORS

TRAINING_DOMAIN = custom_ops.DOMAIN

Target: TypeAlias = Literal["onnxruntime", "cuda", "webgpu"]
"""The runtime for which a graph is made; None means any that implements the ONNX standard."""

_RUNTIMES: Mapping[str | None, Runtime] = {
    None: "any",
    "onnxruntime": "onnxruntime",
    "cuda": "cuda",
    "webgpu": "webgpu",
}

Keep = Callable[[ir.Node], bool]
"""Whether a one-tensor optimizer node with all its attributes is kept."""


@loading.blame_model
def lower(model: ModelLike, *, target: Target | None = None) -> onnx.ModelProto:
    """Returns an equivalent model without nodes of the training domain.

    Gradient nodes become the backward graph, which shares the values of the forward pass. Adagrad,
    Adam and Momentum nodes become the nodes of their update rules. Nodes whose results are no
    longer used are removed. Names of inputs and outputs, initializers, metadata and training_info
    are kept. A model without nodes of the domain is returned unchanged, so lowering is idempotent.

    Args:
        model: A ModelProto, its bytes, or the path of its file; it is not modified.
        target: The runtime for which to lower. By default the result has only standard operators.
            With ``"onnxruntime"`` it may also contain operators of ``com.microsoft`` that the CPU
            provider of every onnxruntime build supports. With ``"cuda"`` or ``"webgpu"`` it has
            only standard operators, in forms for which that provider has kernels. The results
            differ only by rounding.

    Returns:
        A new model. External data stay external, relative to the folder of the given file.

    Raises:
        ArgumentError: If the target is unknown.
        ModelError: If the model, or a node of the domain in it, is invalid.
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
    proto, folder = loading.load(model)
    if not has_domain(proto):
        result = onnx.ModelProto()
        result.CopyFrom(proto)
        remember(result, folder)
        return result
    result = to_proto(lower_ir(convert.to_ir(proto, folder), target=target))
    for info in proto.training_info:  # one by one: `extend` fails for messages of 2 GB
        result.training_info.add().CopyFrom(info)
    return result


def lower_ir(
    model: ir.Model, *, keep: Keep | None = None, target: Target | None = None
) -> ir.Model:
    """Lowers a model.

    Args:
        model: The model; do not use it afterwards.
        keep: A predicate that decides which optimizer nodes are kept, after they have been split
            into one-tensor nodes with all attributes; by default, none.
        target: See `lower`.

    Returns:
        The lowered model.

    Raises:
        ModelError: If the model, or a node of the domain in it, is invalid.
        UnsupportedError: If an operator that a gradient passes through has no rule.
    """
    return lowered_for(prepare(model), target, keep=keep)


def lowered_for(model: ir.Model, target: Target | None, *, keep: Keep | None = None) -> ir.Model:
    """Lowers a model that `prepare` returned, in place, for a target.

    Args:
        model: The model.
        target: See `lower`.
        keep: See `lower_ir`.

    Returns:
        The model.

    Raises:
        ArgumentError: If the target is unknown.
    """
    model = lower_prepared(model, keep=keep, passes=passes_for(_runtime(target)))
    put_last_results_first(model.graph)
    return model


def _runtime(target: Target | None) -> Runtime:
    """Returns the runtime of a target."""
    return _RUNTIMES[choice("target", target, _RUNTIMES)]


def lower_prepared(
    model: ir.Model,
    *,
    keep: Keep | None = None,
    rules: Rules = RULES,
    passes: Sequence[Pass] = (),
    sizes: Mapping[str, int] | None = None,
    feeds: Sequence[str] = (),
    shown: Sequence[str] = (),
    refusals: dict[str, list[str]] | None = None,
) -> ir.Model:
    """Lowers a model that `prepare` returned, in place.

    Args:
        model: The model.
        keep: See `lower_ir`.
        rules: The gradient rules.
        passes: The optimization passes; see `ortops.graph.passes`.
        sizes: See `ortops.graph.passes.Draft`.
        feeds: See `ortops.graph.passes.Draft`.
        shown: See `ortops.graph.passes.Draft`.
        refusals: Gets the reasons why passes kept near matches, by pass.

    Returns:
        The model.
    """
    graph = model.graph
    reasons = {} if refusals is None else refusals
    draft = Draft(model, Names(graph), rules, sizes, feeds, shown, reasons)
    for each in passes:
        each.prepare(draft)
    gradients = bound_nodes(graph)
    # Nodes that only compute a y are dead once the Gradient node is removed.
    removable = ancestor_nodes((Bound.of(node).y for node in gradients), set())
    pending = gradients[::-1]
    while pending:
        together = of_one_pass(pending.pop(), reversed(pending))
        pending = [node for node in pending if node not in together]
        emitted = lower_gradient(together, draft.names, draft.rules)
        removable.update(emitted)
        # Rules may emit Gradient nodes themselves.
        pending += [node for node in reversed(emitted) if is_bound(node)]
    removable.update(lower_optimizers(graph, draft.names, keep))
    remove_unread(removable)
    _fix_imports(graph)
    for each in reversed(passes):
        each.finish(draft)
    avoid(graph, draft.names)  # what that rules and passes emitted
    return model


def prepare(model: ir.Model, rules: Rules = RULES, *, inferred: bool = False) -> ir.Model:
    """Converts a model with nodes of the training domain to the form that lowering requires.

    Gradient nodes are bound, functions are inlined, the opset is 21 or later, nodes are in
    topological order, and types and shapes are inferred. Operators without a gradient rule are
    expanded where gradients pass through them.

    Args:
        model: The model; do not use it afterwards.
        rules: The rules.
        inferred: Whether types and shapes are those that inference would find.

    Raises:
        ModelError: If the model, or a node of the domain in it, is invalid.
    """
    model = normalize(model)
    mark_variables(model.graph)
    made = (value for node in model.graph for value in node.outputs if value.name)
    if not inferred or any(value.type is None for value in made):
        infer_types(model)
    if expand(model, rules):
        infer_types(model)
    for node in _optimizer_nodes(model.graph):
        _check_tensors(node)
    avoid(model.graph)
    return model


def normalize(model: ir.Model) -> ir.Model:
    """Converts a model to the form that `Tape` and `infer_types` require.

    Gradient nodes are bound, functions are inlined, the opset is 21 or later, and nodes are in
    topological order.

    Args:
        model: The model; do not use it afterwards.

    Raises:
        ModelError: If the model, or a node of the domain in it, is invalid.
    """
    _check_nodes(model)
    _drop_domain_functions(model)
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        bind(graph)
    convert.inline(model)
    _fix_imports(model.graph)
    model = convert.upgrade(model)
    try:
        sort(model.graph)
    except ValueError as error:
        raise ModelError(f"model: {error} A tensor must not be computed from itself") from error
    for graph in subgraphs(model.graph):
        graph.opset_imports.update(model.graph.opset_imports)
    return model


def lower_optimizers(graph: ir.Graph, names: Names, keep: Keep | None = None) -> list[ir.Node]:
    """Replaces optimizer nodes by one-tensor nodes that are kept, or by the nodes of their rules.

    Args:
        graph: A prepared graph; it is modified in place.
        names: The names used in the model.
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
    remove_unread(replaced)  # in one call, because each scans all outputs of the graph
    return emitted


def _optimizer_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [
        node
        for node in all_nodes(graph)
        if node.domain == TRAINING_DOMAIN and node.op_type in OPERATORS
    ]


def infer_types(model: ir.Model) -> None:
    """Infers types and shapes, including those of gradients, which onnx cannot infer."""
    gradients = bound_nodes(model.graph)
    changed = True
    while changed:  # once more for each order of differentiation
        infer_shapes(model)
        new = [node for node in gradients if infer_outputs(node)]
        changed = any(output.uses() for node in new for output in node.outputs)


def infer_computed_types(model: ir.Model, *, in_file: bool = True) -> None:
    """Infers types and shapes as tensors are computed, whatever the model declares.

    Exporters declare wrong ranks, which seeds would get, too. Symbols and sizes that are not
    inferred are taken from a declared shape of the same rank.

    Args:
        model: The model.
        in_file: Whether the result is a file, whose outputs need a shape: then, the declared shape
            of an output counts if none is inferred. Those of other tensors always do.
    """
    nodes = (node for node in all_nodes(model.graph) if not node.domain)
    values = (value for node in nodes for value in node.outputs)
    declared = {value: value.shape for value in values if value.shape is not None}
    for value in declared:
        value.shape = None
    infer_types(model)
    for value, shape in declared.items():
        found, is_result = value.shape, value.is_graph_output()
        if found is None:
            value.shape = shape if in_file or not is_result else None
        elif may_be_equal(found, shape) and (in_file or not is_result):
            pairs = zip(found, shape or (), strict=True)
            value.shape = ir.Shape([d if is_unknown(f) else f for f, d in pairs])


def _check_nodes(model: ir.Model) -> None:
    """Rejects invalid nodes of the training domain, as far as possible without types."""
    known = [*OPERATORS, "Gradient"]
    graphs = (model.graph, *(function.graph for function in model.functions.values()))
    for graph in graphs:
        names = Names(graph)
        for node in all_nodes(graph):
            in_domain = node.domain == TRAINING_DOMAIN or is_gradient(node)
            if is_preview(node):
                continue
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
                    given -= 1  # trailing absent outputs may also be omitted
                node.resize_outputs(len(groups) * (len(groups[0]) - 1))
                for output in node.outputs[given:]:  # onnx's own inference fails without them
                    output.name = names.unique(f"{node.op_type}_unread")


def _drop_domain_functions(model: ir.Model) -> None:
    """Removes function bodies for the domain's operators, which ortops lowers itself."""
    for identifier in list(model.functions):
        if identifier[0] in GRADIENT_DOMAINS:
            del model.functions[identifier]
    for graph in (model.graph, *(function.graph for function in model.functions.values())):
        for node in all_nodes(graph):
            if node.domain in GRADIENT_DOMAINS:
                node.overload = ""


@dataclass(frozen=True)
class _OptimizerNode:
    """The inputs and attributes of a valid optimizer node.

    Attributes:
        r: The learning rate.
        t: The number of updates so far.
        groups: For each optimized tensor, (X, G, *states).
        attributes: All attributes, defaults included.
    """

    r: ir.Value
    t: ir.Value
    groups: Sequence[tuple[ir.Value, ...]]
    attributes: Mapping[str, float | str]

    @classmethod
    def of(cls, node: ir.Node) -> _OptimizerNode:
        """Reads a node that has passed `_check_attributes` and `_check_arity`."""
        operator = OPERATORS[node.op_type]
        r, t, *rest = (value for value in node.inputs if value is not None)
        count = len(rest) // (2 + len(operator.states))
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        groups = [tuple(rest[index::count]) for index in range(count)]
        return cls(r, t, groups, {**operator.defaults, **given})


def _lower_optimizer(node: ir.Node, names: Names, keep: Keep | None) -> list[ir.Node] | None:
    """Replaces an optimizer node by one-tensor nodes that are kept, or by the nodes of its rule.

    Returns:
        The new standard nodes, or None if the node itself is kept.
    """
    operator = OPERATORS[node.op_type]
    update = _OptimizerNode.of(node)
    r, t, groups, attributes = update.r, update.t, update.groups, update.attributes
    if len(groups) == 1 and keep is not None:  # already a one-tensor node
        _write_out(node, update)
        if keep(node):
            for output in node.outputs:  # Python ops cannot have absent outputs
                output.name = output.name or names.unique(f"{node.op_type}_unread")
            return None
    tape = tape_before(node, names)
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
    """Sets all attributes, and the types and shapes of the outputs, of a one-tensor node."""
    for attribute in ir.convenience.convert_attributes(update.attributes):
        node.attributes[attribute.name] = attribute
    (group,) = update.groups
    for output, like in zip(node.outputs, [group[0], *group[2:]], strict=True):
        output.type, output.shape = like.type, like.shape


def _of_shape(tensor: Tensor, x: Tensor) -> Tensor:
    """Reshapes a tensor like another, so that a mismatch fails instead of broadcasting.

    Unlike in `ortops.graph.autodiff.grad`, equal symbols are enough, because the formula of a
    packed update must be elementwise (see `ortops.engine.execution.update_groups`).
    """
    if tensor.shape is not None and tensor.shape == x.shape and None not in tensor.shape:
        return tensor
    return op.Reshape(tensor, shape_of(x), allowzero=1)


def _check_attributes(node: ir.Node) -> None:
    """Rejects an optimizer node with invalid attributes."""
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
                f"{where}: attribute '{name}' must be of type {kind.name}, got "
                f"{attribute.type.name}"
            )
    for name in operator.required:
        if name not in node.attributes:
            raise ModelError(f"{where}: missing required attribute '{name}'")
    mode = node.attributes.get_string("mode", "standard")
    if mode not in ("standard", "nesterov"):
        raise ModelError(f"{where}: mode must be 'standard' or 'nesterov', got '{mode}'")


def _check_arity(node: ir.Node) -> None:
    """Rejects an optimizer node with an invalid number of inputs or outputs."""
    where = describe(node)
    states = OPERATORS[node.op_type].states
    size = 2 + len(states)
    given = len(node.inputs)
    if None in node.inputs:
        raise ModelError(
            f"{where}: input {node.inputs.index(None)} is missing (''); all inputs are required"
        )
    if given < 2 + size or (given - 2) % size:
        raise ModelError(
            f"{where}: expected 2 + {size}n inputs for n tensors (R, T, then n each of "
            f"{', '.join(('X', 'G', *states))}), got {given}"
        )
    count = (given - 2) // size
    if len(node.outputs) > count * (size - 1):
        raise ModelError(
            f"{where}: expected at most {count * (size - 1)} outputs for {count} optimized tensors "
            f"({count} each of {', '.join(f'{name}_new' for name in ('X', *states))}), got "
            f"{len(node.outputs)}"
        )


def _check_tensors(node: ir.Node) -> None:
    """Rejects an optimizer node whose inputs have invalid types or shapes."""
    where = describe(node)
    update = _OptimizerNode.of(node)
    names = ("X", "G", *OPERATORS[node.op_type].states)
    for name, value in (("R", update.r), ("T", update.t)):
        if value.shape is not None and len(value.shape) != 0:
            raise ModelError(f"{where}: {name} must be a scalar (0-d), got shape {value.shape}")
    floats = (None, ir.DataType.FLOAT, ir.DataType.DOUBLE)
    if update.t.dtype not in (None, ir.DataType.INT64):
        raise ModelError(f"{where}: T must be of type INT64, got {update.t.dtype}")
    if update.r.dtype not in floats:
        raise ModelError(f"{where}: R must be of type FLOAT or DOUBLE, got {update.r.dtype}")
    for group in update.groups:
        for name, value in zip(names, group, strict=True):
            if value.dtype not in floats:
                raise ModelError(
                    f"{where}: {name} '{value.name}' must be of type FLOAT or DOUBLE, got "
                    f"{value.dtype}"
                )
            if not may_be_equal(group[0].shape, value.shape):
                raise ModelError(
                    f"{where}: {name} '{value.name}' has shape {value.shape}, but X "
                    f"'{group[0].name}' has shape {group[0].shape}; {', '.join(names)} must have "
                    "equal shapes"
                )
    types = {value.dtype for group in update.groups for value in group} - {None}
    if len(types) > 1:
        raise ModelError(
            f"{where}: all tensors must have the same type, got "
            f"{' and '.join(sorted(map(str, types)))}"
        )


def _fix_imports(graph: ir.Graph) -> None:
    """Makes the opset imports of ortops' domains match the nodes."""
    used = {node.domain for node in all_nodes(graph)} | {""}
    for domain in (*GRADIENT_DOMAINS, BOUND_DOMAIN):
        if domain in used:
            graph.opset_imports.setdefault(domain, 1)
        else:
            graph.opset_imports.pop(domain, None)


def takes_python_kernel(node: ir.Node) -> bool:
    """Whether a one-tensor optimizer node can run as a Python custom op.

    Custom ops have fixed types and receive attributes as text with 6 significant digits.
    """
    typed = all(value is not None and value.dtype is not None for value in node.inputs)
    return typed and all(
        custom_ops.survives_as_text(attribute.as_float())
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.FLOAT
    )
