"""From an inference model to what an algorithm is written on: weights are initializers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import onnx
import onnx_ir as ir

from ortops.building.parameters import Choice, ScopeNames, choose, scopes
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.adapters import adapter_of
from ortops.graph.convert import ModelLike
from ortops.graph.edit import all_nodes, ancestor_nodes, read_inputs
from ortops.graph.files import external
from ortops.graph.shapes import infer_shapes
from ortops.graph.tensor import Names
from ortops.graph.weights import Origin, lift, weights
from ortops.lowering import prepare
from ortops.trainable.training_mode import is_batch_normalization

__all__ = ["BatchNormalization", "Prepared", "prepare_for_training"]

BatchNormalization: TypeAlias = Literal["auto", "train", "frozen"]
"""Which BatchNormalization layers learn from batches."""


@dataclass(frozen=True)
class Prepared:
    """A model that an algorithm can be written on.

    Attributes:
        result: The light model to write to.
        data: Its data.
        graph: The graph to work on: functions inlined, opset 21 or later, types inferred.
        names: The names that are taken.
        visible: The names that an algorithm of ``result`` can refer to; fewer than those of the
            graph where functions have been inlined in that.
        choice: The initializers that are to be trained, as far as is known before the loss.
        lifted: Those of them that stood elsewhere, and where.
        frozen: The BatchNormalization nodes that run in inference mode.
        opset: The opset of the given model.
        places: The scopes of the nodes that read each initializer.
    """

    result: onnx.ModelProto
    data: external.Data
    graph: ir.Graph
    names: Names
    visible: set[str]
    choice: Choice
    lifted: dict[str, Origin]
    frozen: set[ir.Node]
    opset: int
    places: Mapping[str, ScopeNames]


def prepare_for_training(
    model: ModelLike,
    trainable: Sequence[str] | None,
    batch_normalization: BatchNormalization,
    data: external.Data | None = None,
) -> Prepared:
    """Brings a model into the form that an algorithm is written on.

    Args:
        model: An inference model; not changed.
        trainable: What to train (see `ortops.building.parameters.choose`); None for the adapter
            of a model that has one.
        batch_normalization: Which layers run in inference mode (see `build_training_model`).
        data: The data of a light model (see `ortops.graph.files.external`).

    Raises:
        ModelError: If the model is not legal, has no output or is trainable already, or if
            ``trainable`` or ``batch_normalization`` does not fit it.
    """
    if batch_normalization not in get_args(BatchNormalization):
        raise ModelError(
            f"batch_normalization is {batch_normalization!r}; 'auto', 'train' and 'frozen' are "
            "accepted"
        )
    if trainable is not None:
        if not isinstance(trainable, Iterable):
            raise ModelError(f"trainable is {trainable!r}; names and patterns are accepted")
        trainable = [trainable] if isinstance(trainable, str) else list(trainable)
    for name in trainable or ():
        if not isinstance(name, str):
            raise ModelError(f"trainable: {name!r} is no string; names and patterns are accepted")
    proto, found = convert.load_light(model)
    if proto.training_info:
        raise ModelError(
            "model: it has training_info already; TrainingSession runs it, and "
            "TrainingSession.inference_model() gives the model without it"
        )
    found = external.lend(found)
    data = found if data is None else data | found
    adapter = adapter_of(proto.metadata_props)
    is_default = trainable is None
    if adapter is not None and trainable is None:
        adapter.refuse_missing({tensor.name for tensor in proto.graph.initializer})
        trainable = adapter.parameters
    named = set(trainable or ())
    wanted = {name for name, w in weights(proto, data).items() if w.shape or name in named}
    everything, origins = lift(proto, data, wanted)
    work = convert.to_ir(everything, None, data)
    convert.inline(work)
    opset = work.graph.opset_imports[""]
    places = scopes(work.graph.initializers.values())
    work = convert.upgrade(work)
    graph = work.graph
    made = (value for node in all_nodes(graph) for value in node.outputs if value.name)
    if any(value.type is None for value in made):
        infer_shapes(work)  # what a weight is for may show by the types around it
    for value in list(graph.inputs):  # older files list initializers as inputs too
        if value.name in graph.initializers:
            graph.inputs.remove(value)
    if not graph.outputs:
        raise ModelError("model: it has no output; a loss is computed from one")
    if adapter is not None and is_default:
        unnamed = "belongs to the base of the adapter"
        choice = choose(graph.initializers, trainable, places, unnamed)
        choice.said.append(f"the adapter alone is trained ({adapter}); trainable= names others")
    else:
        choice = choose(graph.initializers, trainable, places)
    frozen, statistics = _frozen(graph, choice, batch_normalization)
    kept = choice.trained.keys() | statistics
    lifted = {name: origin for name, origin in origins.items() if name in kept}
    _put_back(graph, origins.keys() - lifted.keys())
    if opset < convert.MINIMUM_OPSET:
        result, moved = external.move_aside(work)
        data |= moved
        if adapter is not None:  # whose files set inputs
            own = (graph.initializers.get(name) for name in adapter.parameters)
            result.graph.input.extend(ir.serde.serialize_value(v) for v in own if v is not None)
        for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
            if proto.HasField(name):
                setattr(result, name, getattr(proto, name))
    else:
        result, _ = lift(proto, data, lifted)
        if not {entry.domain for entry in result.opset_import} & {"", "ai.onnx"}:
            result.opset_import.add(domain="", version=graph.opset_imports[""])
    graph = prepare(work).graph
    choice.floats = {n: graph.initializers[n] for n in choice.floats if n in graph.initializers}
    choice.trained = {name: graph.initializers[name] for name in choice.trained}
    names, visible = _names(graph, result)
    return Prepared(result, data, graph, names, visible, choice, lifted, frozen, opset, places)


def _frozen(
    graph: ir.Graph, choice: Choice, mode: BatchNormalization
) -> tuple[set[ir.Node], set[str]]:
    """Returns the layers that run in inference mode, and the names of the others' statistics."""
    trained = set(choice.trained.values())
    frozen, statistics = set[ir.Node](), set[str]()
    layers = [node for node in all_nodes(graph) if is_batch_normalization(node)]
    for node in layers:
        learns = any(not trained.isdisjoint(_sources(value)) for value in node.inputs[1:3])
        if mode == "frozen" or (mode == "auto" and not learns):
            frozen.add(node)
        else:
            statistics.update(v.name or "" for v in node.inputs[3:5] if v is not None)
    if mode != "frozen":
        for name in choice.trained.keys() & {v.name for n in layers for v in n.inputs[3:5] if v}:
            raise ModelError(
                f"trainable: '{name}' is a running statistic, which BatchNormalization updates; "
                "leave it out"
            )
    if frozen and mode == "auto":
        choice.said.append(
            f"{len(frozen)} of {len(layers)} BatchNormalization layers run in inference mode, as "
            "their scale and bias are not trained (batch_normalization='train' has them all learn "
            "from batches)"
        )
    return frozen, statistics


def _sources(value: ir.Value | None) -> set[ir.Value]:
    """Returns what a value is computed from, itself included."""
    if value is None:
        return set()
    nodes = ancestor_nodes(value, set())
    return {value, *(read for node in nodes for read in read_inputs(node))}


def _put_back(graph: ir.Graph, names: Collection[str]) -> None:
    """Makes initializers Constant nodes."""
    nodes = []
    for name in names:
        value = graph.initializers.pop(name)
        assert value.const_value is not None
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", value.const_value)])
        (constant,) = node.outputs
        constant.type, constant.shape = value.type, value.shape
        constant.const_value = value.const_value
        value.replace_all_uses_with(constant, replace_graph_outputs=True)
        value.name, constant.name, node.name = None, name, name
        nodes.append(node)
    if nodes:
        graph.insert_before(graph[0], nodes)


def _names(graph: ir.Graph, result: onnx.ModelProto) -> tuple[Names, set[str]]:
    """Returns the names taken, and those that an algorithm of a model can refer to."""
    names = Names(graph)
    own = result.graph
    visible = {name for node in own.node for name in node.output if name}
    visible.update(value.name for value in (*own.input, *own.initializer))
    for name in (*visible, *(node.name for node in own.node)):
        names.take(name)
    return names, visible
