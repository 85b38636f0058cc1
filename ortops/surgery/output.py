"""Makes tensors outputs of a model, beside those that it has or in their place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass

from ortops.errors import ArgumentError, ModelError, UnsupportedError, did_you_mean
from ortops.graph import convert
from ortops.graph.adapters import METADATA_KEY, adapter_of
from ortops.graph.edit import all_nodes, describe, prune, values_of
from ortops.graph.files import external, loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.folders import remember
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.serialization import algorithm_names
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.surgery.reading import dimensions, inferred, logger, read


@loading.blame_model
def name_output(model: ModelLike, tensor: str, *, name: str | None = None) -> onnx.ModelProto:
    """Returns a model with one of its tensors as an additional output.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        tensor: The name of a tensor of the main graph. If it already is an output, the model is
            returned unchanged.
        name: The name of the output; by default that of the tensor.

    Returns:
        A new model of the same opset, with the tensor as its last output and with its type and
        shape as far as they are known. External data stay external, relative to the folder of the
        given file.

    Raises:
        ModelError: If there is no such tensor, or the new name is already used.
        UnsupportedError: If the tensor is inside a subgraph or a function.

    Example:
        >>> from ortops.docs import examples
        >>> model = examples.mlp((4, 16, 2))
        >>> hidden = model.graph.node[0].output[0]
        >>> [value.name for value in name_output(model, hidden, name="hidden").graph.output][1:]
        ['hidden']
    """
    work, proto, folder = read(model)
    graph = work.graph
    values = values_of(graph)
    if tensor not in values:
        raise _missing(work, tensor, values)
    value = values[tensor]
    if value.is_graph_output() and name in (None, tensor):
        unchanged = onnx.ModelProto()
        unchanged.CopyFrom(proto)
        remember(unchanged, folder)
        return unchanged
    taken = Names(graph)
    for each in algorithm_names(proto):
        taken.take(each)
    if name is not None and name != tensor and taken.unique(name) != name:
        raise ModelError(
            f"name '{name}' is already used by a tensor or node of the model; give another"
        )
    known = inferred(proto, folder).get(tensor, value)
    if name not in (None, tensor):
        node = ir.Node("", "Identity", [value], name=taken.unique(f"{name}/Identity"))
        node.outputs[0].name = name
        graph.append(node)
        value = node.outputs[0]
    value.type, value.shape = known.type, known.shape
    graph.outputs.append(value)
    logger.warning(
        "tensor '%s' is output '%s': %s %s", tensor, value.name, value.type, dimensions(value)
    )
    result: onnx.ModelProto = ir.to_proto(work)
    for info in proto.training_info:  # one by one, as `extend` fails for messages of 2 GB
        result.training_info.add().CopyFrom(info)
    return result


def keep_outputs(light: LightModel, outputs: str | Sequence[str]) -> LightModel:
    """Returns a model with some tensors as its only outputs, without what these do not need.

    Of an adapter, only the layers that are left are described.

    Args:
        light: The model; not changed, but its data are those of the result.
        outputs: The names of the tensors, outputs or not.

    Raises:
        ArgumentError: If it names nothing.
        ModelError: If there is no such tensor.
        UnsupportedError: If a tensor is inside a subgraph or a function, or its type is not known.
    """
    names = [outputs] if isinstance(outputs, str) else outputs
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentError(
            f"outputs must be the name of a tensor or a list of names, got {outputs!r:.80}"
        )
    work = convert.to_ir(light)
    graph, metadata = work.graph, work.metadata_props
    values = {each.name or "": each for each in graph.outputs} | values_of(graph)
    known = values if {*names} <= {v.name for v in graph.outputs} else inferred(light.proto, None)
    kept = [values[name] for name in dict.fromkeys(names) if name in values]
    for name in names:
        if name not in values:
            raise _missing(work, name, values)
        if known[name].type is None:
            raise UnsupportedError(f"outputs: the type of tensor '{name}' is not known")
        values[name].type, values[name].shape = known[name].type, known[name].shape
    graph.outputs[:] = kept
    prune(graph)
    work = RemoveUnusedFunctionsPass()(work).model  # type: ignore[no-untyped-call]
    if adapter := adapter_of(light.proto.metadata_props):
        modules = {n: m for n, m in adapter.modules.items() if m.a in graph.initializers}
        whole = {n: name for n, name in adapter.weights.items() if n in graph.initializers}
        metadata[METADATA_KEY] = replace(adapter, modules=modules, weights=whole).dumps()
        if not modules:
            del metadata[METADATA_KEY]
    moved = external.move_aside(work)
    return LightModel(moved.proto, light.data | moved.data)


def _missing(work: ir.Model, tensor: str, values: Iterable[str]) -> ModelError | UnsupportedError:
    for node in all_nodes(work.graph):
        for inner in inner_graphs(node):
            found = [*inner.inputs, *inner.initializers.values()]
            found += [value for each in inner for value in each.outputs]
            if any(value.name == tensor for value in found):
                return UnsupportedError(
                    f"{describe(node)}: tensor '{tensor}' is inside its subgraph '{inner.name}', "
                    "which may run many times or never; name an output of the node instead"
                )
    for function in work.functions.values():
        if any(v.name == tensor for node in function.all_nodes() for v in node.outputs):
            return UnsupportedError(
                f"tensor '{tensor}' is inside the function '{function.name}'; inline it with "
                "onnx.inliner.inline_local_functions"
            )
    return ModelError(f"the model has no tensor '{tensor}'; {did_you_mean(tensor, values)}")
