"""Fixes inputs of a model to constants, so that one branch of each If that they decide remains."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph import convert
from ortops.graph.edit import all_nodes, ancestor_nodes, prune, read_inputs, remove_node, take_place
from ortops.graph.files import external, loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import write_metadata
from ortops.graph.files.loading import ModelLike
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.graph.weights import lift, weights
from ortops.surgery.reading import Array, logger, model_of, open_model, refuse_training

TWINS_KEY = "ortops.twins"
"""The key in ``metadata_props`` for the copies of weights in branches that were removed."""

_NUMBERED = re.compile(r"_\d+$")


@loading.blame_model
def fix_inputs(model: ModelLike, values: Mapping[str, object]) -> onnx.ModelProto:
    """Returns a model without some inputs, which have constant values instead.

    Of each If whose condition thereby is known, only the branch that runs remains. Inputs, nodes
    and weights that nothing reads any more are removed. So a decoder that Optimum merged from one
    with and one without a cache becomes the one without, which can be trained:
    ``fix_inputs("decoder_model_merged.onnx", {"use_cache_branch": False})``. With
    ``session.inference_model(original="decoder_model_merged.onnx")``, the trained weights are
    written to both branches, also if each has a copy of them.

    Args:
        model: A model: a ModelProto, its bytes, or its path; not changed.
        values: The constants by input, in a form that `numpy.asarray` accepts. A single number
            fills the shape of the input.

    Returns:
        A new model of the same opset, in which all weights are initializers.

    Raises:
        ArgumentError: If ``values`` is not a dict, or a value does not fit its input.
        ModelError: If there is no such input, or the model has training_info.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]>
        ...     f (float[n] x, bool negate) => (float[n] y) {
        ...         y = If (negate) <
        ...             then_branch = a () => (float[n] p) { p = Neg (x) },
        ...             else_branch = b () => (float[n] q) { q = Abs (x) }
        ...         >
        ...     }''')
        >>> [node.op_type for node in fix_inputs(model, {"negate": True}).graph.node]
        ['Neg']
    """
    if not isinstance(values, Mapping):
        raise ArgumentError(f"values must be a dict of constants by input, got {values!r:.80}")
    given = convert.load_light(model)
    refuse_training(given.proto, "give the model without it")
    light, _ = lift(given)
    work = convert.to_ir(light)
    graph = work.graph
    unread = {value.name for value in graph.inputs if not _is_read(value)}
    kept = [value.name for value in graph.inputs]
    for name, value in values.items():
        _fix(graph, name, value)
    while (node := _decided(work)) is not None:
        _inline(graph, *node)
    _prune(graph, unread)
    removed = [name for name in kept if name not in {value.name for value in graph.inputs}]
    logger.warning(
        "fixed %s; the model no longer has the inputs %s%s",
        *(dict(values), ", ".join(f"'{name}'" for name in removed[:4])),
        f" and {len(removed) - 4} others" if len(removed) > 4 else "",
    )
    moved = external.move_aside(work)
    result = LightModel(moved.proto, light.data | moved.data)
    _note_twins(light, result)
    return result.attach()


def _prune(graph: ir.Graph, inputs: set[str | None]) -> None:
    """Removes what no output depends on, except some inputs."""
    order = list(graph.inputs)
    prune(graph)
    left = set(graph.inputs)
    graph.inputs[:] = [value for value in order if value in left or value.name in inputs]


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _fix(graph: ir.Graph, name: str, given: object) -> None:
    """Replaces an input by an initializer."""
    inputs = {value.name: value for value in graph.inputs}
    if name not in inputs:
        known = [each for each in inputs if each]
        raise ModelError(f"values: there is no input '{name}'; {did_you_mean(str(name), known)}")
    value = inputs[name]
    kind = None if value.dtype is None else value.dtype.numpy()
    shape = [] if value.shape is None else list(value.shape)
    try:
        array: Array = np.asarray(given).astype(kind, casting="same_kind")
        sizes = [dim if isinstance(dim, int) else 1 for dim in shape]
        array = np.broadcast_to(array, sizes).copy() if not array.ndim else array
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"values: '{name}' must be {kind}{shape}, got {given!r:.80}") from error
    fits = len(shape) == array.ndim and all(
        not isinstance(dim, int) or dim == size
        for dim, size in zip(shape, array.shape, strict=False)
    )
    if value.shape is not None and not fits:
        raise ArgumentError(
            f"values: '{name}' must have shape {[str(dim) for dim in shape]}, got "
            f"{list(array.shape)}"
        )
    graph.inputs.remove(value)
    if name in graph.initializers:
        graph.initializers.pop(name)
    value.const_value = ir.tensor(array, name=name)
    graph.register_initializer(value)


def _decided(work: ir.Model) -> tuple[ir.Node, ir.Graph] | None:
    """Returns an If of the main graph whose condition is known, and the branch that runs."""
    for node in work.graph:
        if node.op_type == "If" and not node.domain:
            condition = _constant(work, node.inputs[0])
            if condition is not None:
                branch = "then_branch" if condition.any() else "else_branch"
                return node, node.attributes[branch].as_graph()
    return None


def _constant(work: ir.Model, value: ir.Value | None) -> Array | None:
    """Returns the value of a tensor that depends on no input; None for others."""
    if value is None:
        return None
    if value.const_value is not None:
        return value.const_value.numpy()
    nodes = ancestor_nodes(value, set())
    if not nodes or len(nodes) > _MOST or any(node.domain for node in nodes):
        return None
    made = {output for node in nodes for output in node.outputs}
    leaves = {read for node in nodes for read in read_inputs(node)} - made
    if any(leaf.const_value is None for leaf in leaves) or value.dtype not in (None, _BOOL):
        return None
    order = [node for node in work.graph if node in nodes]
    body = onnx.GraphProto(name="condition")
    body.node.extend(ir.to_proto(node) for node in order)
    for leaf in leaves:
        assert leaf.const_value is not None
        body.initializer.append(onnx.numpy_helper.from_array(leaf.const_value.numpy(), leaf.name))
    body.output.append(onnx.helper.make_tensor_value_info(value.name or "", 9, None))
    found: Array = open_model(model_of(work, body)).run(None, {})[0]
    return found


_MOST = 20
_BOOL = ir.DataType.BOOL


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Replaces an If by one of its branches."""
    results, body = list(branch.outputs), list(branch)
    inside = {value: None for each in body for value in each.outputs}
    branch.outputs.clear()
    branch.remove(body)
    for other in inner_graphs(node):
        other.outputs.clear()
        for each in all_nodes(other):
            for index in range(len(each.inputs)):
                each.replace_input_with(index, None)
    node.attributes.clear()
    names = Names(graph)  # without those of the branches
    for value in list(branch.initializers.values()):
        branch.initializers.pop(value.name or "")
        value.name = names.unique(value.name or "constant")
        graph.register_initializer(value)
    for value in inside:
        if value.name:
            value.name = names.unique(value.name)
    graph.insert_before(node, body)
    placed = set[ir.Value]()
    for old, new in zip(node.outputs, results, strict=True):
        if new not in inside or new in placed:  # it has another name already
            again = ir.Node("", "Identity", [new], name=names.unique(f"{old.name}/Identity"))
            graph.insert_before(node, [again])
            (made,) = again.outputs
            made.type, made.shape, new = new.type, new.shape, made
        placed.add(new)
        new.type, new.shape = new.type or old.type, new.shape or old.shape
        take_place(old, new)
    remove_node(node)


def _note_twins(before: LightModel, after: LightModel) -> None:
    """Notes which removed weights have the values of others, to which training changes both."""
    old, new = weights(before), weights(after)
    twins: dict[str, list[str]] = {}
    for name, weight in old.items():
        if name in new or not weight.shape:
            continue
        for other in new:
            same = other in old and (weight.shape, weight.dtype) == (
                old[other].shape,
                old[other].dtype,
            )
            if same and _equal(weight.array(), old[other].array(), _is_copy(name, other)):
                twins.setdefault(other, []).append(name)
                break
    if twins:
        write_metadata(after.proto, TWINS_KEY, json.dumps(twins))


def _is_copy(name: str, other: str) -> bool:
    """Whether two names differ by a number at the end only."""
    return _NUMBERED.sub("", name) == _NUMBERED.sub("", other)


def _equal(one: Array, other: Array, is_copy: bool) -> bool:
    """Whether arrays are equal; if their names differ, equal zeros or ones say nothing."""
    if one.tobytes() != other.tobytes():
        return False
    return is_copy or bool((one != one.flat[:1]).any())
