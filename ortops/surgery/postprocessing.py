"""Ends a detector before its non-maximum suppression, which has no gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
import onnx_ir as ir

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.edit import all_nodes, dependent_values, describe, is_float, prune
from ortops.graph.files import loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.nesting import inner_graphs
from ortops.surgery.reading import dimensions, inferred, logger, read, refuse_training

_SUPPRESSION = "NonMaxSuppression"

_SIMPLE = frozenset(
    {"Add", "ArgMax", "Cast", "Concat", "Div", "Gather", "GatherElements", "Identity", "Max", "Min"}
    | {"Mul", "Neg", "ReduceMax", "Reshape", "ScatterND", "Slice", "Split", "Squeeze", "Sub"}
    | {"TopK", "Transpose", "Unsqueeze"}
)
"""Operators that exporters write between the predictions of a detector and the suppression."""

_MOVING = ("Cast", "Identity", "Squeeze", "Transpose", "Unsqueeze")


@loading.blame_model
def before_postprocessing(model: ModelLike) -> onnx.ModelProto:
    """Returns a model whose outputs are the predictions before NonMaxSuppression.

    The new first output is the tensor of three dimensions from which the boxes and scores of all
    NonMaxSuppression nodes are taken, such as the output (N, 4 + C, points) of YOLOv8, before it
    was split, transposed and converted to corners. If there is none, the boxes and scores that the
    node reads are the first two outputs. Outputs that do not depend on the suppression stay. Nodes,
    inputs and weights that no output needs any more are removed.

    Train this model, for example with `ortops.losses.TaskAligned`. To write the weights back into
    the complete file, use ``session.inference_model(original=…)``.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.

    Returns:
        A new model of the same opset. External data stay external, relative to the folder of the
        given file.

    Raises:
        ModelError: If there is no NonMaxSuppression, or the model has training_info.
        UnsupportedError: If it is inside a subgraph or a function, or several nodes do not read
            parts of one tensor.

    Example:
        >>> import onnx
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]>
        ...     f (float[1, 6, 8] x, float[6, 1] w) => (int64[n, 3] selected)
        ...     <int64[2] sizes = {4, 2}, int64[1] most = {10}> {
        ...         found = Mul (x, w)
        ...         centers, scores = Split <axis = 1> (found, sizes)
        ...         boxes = Transpose <perm = [0, 2, 1]> (centers)
        ...         selected = NonMaxSuppression <center_point_box = 1> (boxes, scores, most)
        ...     }''')
        >>> [value.name for value in before_postprocessing(model).graph.output]
        ['found']
    """
    work, proto, folder = read(model)
    refuse_training(proto, "cut the model before build_training_model")
    graph = work.graph
    nodes = [node for node in graph if node.op_type == _SUPPRESSION]
    _refuse_inner(work, has_others=bool(nodes))
    known = inferred(proto, folder)
    ends = [value for node in nodes for value in node.inputs[:2] if value is not None]
    source = _source(graph, ends, known)
    if source is None and len(nodes) > 1:
        raise UnsupportedError(
            f"{describe(nodes[1])}: it and {describe(nodes[0])} do not read parts of one tensor; "
            "name the predictions with ortops.surgery.name_output"
        )
    found = ends if source is None else [source]
    later = dependent_values(list(graph), [v for node in nodes for v in node.outputs])
    dropped = [value.name for value in graph.outputs if value in later]
    others = [value for value in graph.outputs if value not in later and value not in found]
    graph.outputs[:] = [*found, *others]
    prune(graph)
    for value in found:
        shown = known.get(value.name or "", value)
        value.type, value.shape = shown.type, shown.shape
    logger.warning(
        "the model ends before %s: its outputs are %s%s",
        describe(nodes[0]),
        ", ".join(f"'{value.name}' {dimensions(value)}" for value in found),
        f" in place of {', '.join(map(repr, dropped))}" if dropped else "",
    )
    result: onnx.ModelProto = ir.to_proto(work)
    return result


def _refuse_inner(work: ir.Model, *, has_others: bool) -> None:
    """Raises an error if the suppression is not in the main graph."""
    inside = [
        node for node in work.graph for graph in inner_graphs(node) for node in all_nodes(graph)
    ]
    inside += [node for function in work.functions.values() for node in function.all_nodes()]
    for node in inside:
        if node.op_type == _SUPPRESSION:
            raise UnsupportedError(
                f"{describe(node)}: it is inside a subgraph or a function; name the predictions "
                "before it with ortops.surgery.name_output"
            )
    if not has_others:
        raise ModelError(
            f"the model has no {_SUPPRESSION}, so nothing is cut; name the tensor to train with "
            "ortops.surgery.name_output, if it is not an output"
        )


def _source(
    graph: ir.Graph, ends: Sequence[ir.Value], known: Mapping[str, ir.Value]
) -> ir.Value | None:
    """Returns the last tensor of rank 3 from which alone simple operators compute others.

    Args:
        graph: The graph.
        ends: The other tensors.
        known: The values with inferred types and shapes.
    """
    moving = [node for node in graph if node.op_type not in ("Shape", "Size")]
    live = dependent_values(moving, graph.inputs)  # the others are constants, or sizes
    order = {value: place for place, node in enumerate(graph) for value in node.outputs}
    waiting = {value for value in ends if value in live}
    while waiting:
        last = max(waiting, key=lambda value: order.get(value, -1))
        node = last.producer()
        if len(waiting) == 1 and last not in ends and _is_source(last, known):
            return _unmoved(last, known)
        if node is None or node.domain or node.op_type not in _SIMPLE:
            return None
        waiting -= set(node.outputs)
        waiting |= {value for value in node.inputs if value is not None and value in live}
    return None


def _is_source(value: ir.Value, known: Mapping[str, ir.Value]) -> bool:
    found = known.get(value.name or "", value)
    return found.shape is not None and len(found.shape) == 3 and is_float(found)


def _unmoved(value: ir.Value, known: Mapping[str, ir.Value]) -> ir.Value:
    """Returns the tensor of which another one is a transposed or converted form."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in _MOVING:
        source = node.inputs[0]
        if source is None or source.producer() is None or not _is_source(source, known):
            break
        value, node = source, source.producer()
    return value
