"""Splits a composed model into the models that it was composed of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx

from ortops.engine.composition.record import Record, read_records
from ortops.engine.trainable.write_back import write_back
from ortops.errors import ArgumentError, ModelError
from ortops.graph import convert
from ortops.graph.adapters import adapter_of
from ortops.graph.files import external, loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import names_read, names_within, node_graphs, rename_within
from ortops.graph.names import Names


@loading.blame_model
def split(
    model: ModelLike, originals: Mapping[str, ModelLike] | None = None
) -> dict[str, onnx.ModelProto]:
    """Returns the models that `ortops.compose` composed, with the weights of the composed model.

    Args:
        model: The composed model, for example ``session.inference_model()``; not changed.
        originals: The models that were composed, by name; not changed. If given, the weights are
            written to copies of them, which keep their opset and everything else. Otherwise the
            models are cut out of the composed one, with their own names of inputs, outputs and
            weights, but in its opset.

    Returns:
        The models by name. Shared weights are in each model that had them.

    Raises:
        ArgumentError: If ``originals`` has other names than the composed models.
        ModelError: If the model was not composed, has training_info, or changed so that its weights
            do not fit the originals; or if it has an adapter.

    Example:
        >>> import ortops
        >>> from ortops.docs import examples
        >>> models = {"first": examples.mlp((4, 16, 2)), "second": examples.mlp((2, 3))}
        >>> model = ortops.compose(models, {"second.images": "first.logits"})
        >>> second = split(model)["second"]
        >>> [value.name for value in (*second.graph.input, *second.graph.output)]
        ['images', 'logits']
    """
    light = convert.load_light(model)
    proto = light.proto
    records = read_records(proto.metadata_props)
    if proto.training_info:
        raise ModelError(
            "model: it has training_info; give the trained model, "
            "TrainingSession(model).inference_model()"
        )
    if adapter_of(proto.metadata_props) is not None:
        raise ModelError(
            "model: it has an adapter; merge it with ortops.lora.merge, and split the result"
        )
    if originals is None:
        return {name: _cut_out(light, record, name) for name, record in records.items()}
    if not isinstance(originals, Mapping) or originals.keys() != records.keys():
        raise ArgumentError(
            f"originals must be a dict of the models {sorted(records)}, got {originals!r:.80}"
        )
    return _written_back(light, records, originals)


def _written_back(
    light: LightModel, records: Mapping[str, Record], originals: Mapping[str, ModelLike]
) -> dict[str, onnx.ModelProto]:
    known = {new for record in records.values() for new in record.weights.values()}
    own = {tensor.name for tensor in light.proto.graph.initializer}
    read = set(names_read(light.proto.graph.node)) & own
    floats = (t for t in light.proto.graph.initializer if t.name in read)
    added = [t.name for t in floats if t.data_type in (1, 10, 11, 16) and t.dims]
    fresh = [name for name in added if name not in known]
    missing = sorted(name for name in known if name not in own)
    if fresh or missing:
        raise ModelError(
            f"model: weight '{(fresh + missing)[0]}' was {'added' if fresh else 'removed'} since "
            "the models were composed, so the originals cannot hold the result; call "
            "ortops.split without originals"
        )
    result = {}
    for name, record in records.items():
        original = convert.load_light(originals[name])
        arrays = light.arrays(set(record.weights.values()))
        try:
            write_back(original, {old: arrays[new] for old, new in record.weights.items()})
        except ModelError as error:
            raise ModelError(f"model '{name}': {error}") from error
        result[name] = original.attach()
    return result


def _cut_out(light: LightModel, record: Record, name: str) -> onnx.ModelProto:
    """Returns the part of a composed model from the inputs of a record to its outputs."""
    source = light.proto
    result = onnx.ModelProto(ir_version=source.ir_version, producer_name=source.producer_name)
    result.opset_import.extend(source.opset_import)
    graph = result.graph
    graph.name = name
    graph.node.extend(_needed(source.graph, record))
    read = {*names_read(graph.node), *record.outputs.values()} - {*record.inputs.values()}
    for tensor in source.graph.initializer:
        if tensor.name in read:
            external.copy_tensor(tensor, graph.initializer.add(), light.data)
    given = {tensor.name for tensor in graph.initializer}
    graph.input.extend(value for value in source.graph.input if value.name in given)
    own = _own_names(graph, record, name)
    rename_within(graph, lambda value: own.get(value, value))
    for position, old in enumerate(record.inputs):
        graph.input.insert(position, record.value_info(old))
    graph.output.extend(record.value_info(old) for old in record.outputs)
    result.functions.extend(_called(source.functions, graph.node))
    for key, text in record.metadata.items():
        result.metadata_props.add(key=key, value=text)
    return LightModel(result, light.data).attach()


def _needed(graph: onnx.GraphProto, record: Record) -> list[onnx.NodeProto]:
    """Returns the nodes that compute the outputs of a record from its inputs."""
    inputs, wanted = set(record.inputs.values()), set(record.outputs.values())
    found = []
    for node in reversed(graph.node):
        if not (wanted - inputs).isdisjoint(node.output):
            found.append(node)
            wanted.update(names_read([node]))
    return found[::-1]


def _own_names(graph: onnx.GraphProto, record: Record, part: str) -> dict[str, str]:
    """Returns the name that each value and node of a part had before it was composed."""
    found = {}
    for names in (record.weights, record.outputs, record.inputs):
        found.update({new: old for old, new in names.items()})
    taken = Names()
    for name in found.values():
        taken.take(name)
    for name in names_within(graph):
        if name not in found:
            found[name] = taken.unique(name.removeprefix(f"{part}."))
    return found


def _called(
    functions: Iterable[onnx.FunctionProto], nodes: Iterable[onnx.NodeProto]
) -> list[onnx.FunctionProto]:
    """Returns the functions that nodes call, directly or indirectly."""
    known = {(each.domain, each.name, each.overload): each for each in functions}
    needed: dict[tuple[str, str, str], None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        key = node.domain, node.op_type, node.overload
        for inner in node_graphs(node):
            waiting += inner.node
        if key in known and key not in needed:
            needed[key] = None
            waiting += known[key].node
    return [function for key, function in known.items() if key in needed]
