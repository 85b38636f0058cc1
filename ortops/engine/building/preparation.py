"""Prepares an inference model for a training algorithm: makes its weights initializers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import onnx
import onnx_ir as ir

from ortops._common.arguments import choice
from ortops.engine.building.parameters import Choice, choose, read_scopes
from ortops.engine.building.scopes import ScopeNames
from ortops.engine.lowering import prepare
from ortops.engine.trainable.metadata import MAIN
from ortops.engine.trainable.training_mode import is_batch_normalization
from ortops.errors import ArgumentError, ModelError
from ortops.graph import convert
from ortops.graph.adapters import Adapter, adapter_of
from ortops.graph.autodiff.rules import RULES
from ortops.graph.edit import all_nodes, ancestor_nodes, describe, read_inputs
from ortops.graph.faults import write_vector_first
from ortops.graph.files import external
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import describe_node, inputs_by_default
from ortops.graph.magnitudes import with_computed_scales
from ortops.graph.names import Names
from ortops.graph.shapes import infer_shapes
from ortops.graph.weights import Origin, lift, weights

BatchNormalization: TypeAlias = Literal["auto", "train", "frozen"]
"""Which BatchNormalization layers use batch statistics."""


@dataclass(frozen=True)
class Prepared:
    """A model that a training algorithm can be added to.

    Attributes:
        result: The light model to write to.
        graph: The graph to work on: functions inlined, opset 21 or later, types inferred.
        names: The names that are in use.
        visible: The names that the algorithm of ``result`` can refer to. The graph has more names
            if functions of ``result`` were inlined in it.
        choice: The initializers to train, as far as they are known before the loss.
        lifted: Those of them that were not initializers of the main graph, and their origins.
        frozen: The BatchNormalization nodes that run in inference mode.
        opset: The opset of the given model.
        scopes: The scopes of the nodes that read each initializer.
        adapter: The model's adapter, if it has one.
        place: Which training_info entry the algorithm becomes, and what the others do.
    """

    result: LightModel
    graph: ir.Graph
    names: Names
    visible: set[str]
    choice: Choice
    lifted: dict[str, Origin]
    frozen: set[ir.Node]
    opset: int
    scopes: Mapping[str, ScopeNames]
    adapter: Adapter | None
    place: Place


@dataclass(frozen=True)
class Place:
    """The place of a training_info entry in a model.

    Attributes:
        name: Its name.
        updated: The entry that updates an initializer, by initializer name.
        taken: The names of initializers in other entries.
        inputs: The inputs of other entries by name, each with the name of the entry.
    """

    name: str = MAIN
    updated: Mapping[str, str] = field(default_factory=dict)
    taken: Collection[str] = ()
    inputs: Mapping[str, tuple[onnx.ValueInfoProto, str]] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """The prefix of the names of its own variables."""
        return "" if self.name == MAIN else f"{self.name}."

    def leave_out(self, chosen: Choice) -> None:
        """Removes what other entries update from a choice.

        Raises:
            ModelError: If some of it was named.
        """
        for pattern, names in chosen.patterns.items():
            for name in (name for name in names if name in self.updated):
                more = "" if pattern == name else f", which '{pattern}' matches,"
                raise ModelError(
                    f"trainable: '{name}'{more} is updated by the entry '{self.updated[name]}' "
                    "already, and the ONNX standard lets one entry update an initializer; leave it "
                    "out, or add up the losses in one entry"
                )
        left_out = [name for name in chosen.trained if name in self.updated]
        for name in left_out:
            chosen.leave_out(name, f"is trained by the entry '{self.updated[name]}'")
        if left_out:
            others = "', '".join(dict.fromkeys(self.updated[name] for name in left_out))
            chosen.said.append(
                f"the entry '{self.name}' does not train {len(left_out)} weights, such as "
                f"'{left_out[0]}', because '{others}' does"
            )


def prepare_for_training(
    model: ModelLike | LightModel,
    trainable: Sequence[str] | None,
    batch_normalization: BatchNormalization,
    place: Place | None = None,
    *,
    keep: bool = False,
) -> Prepared:
    """Brings a model into the form that a training algorithm can be added to.

    Args:
        model: An inference model; not changed.
        trainable: The parameters to train (see `ortops.engine.building.parameters.choose`). None
            trains the adapter if the model has one.
        batch_normalization: Which layers use batch statistics (see `build_training_model`).
        place: Which training_info entry the algorithm becomes; the only one by default.
        keep: Whether data of a file stay in memory once they are read.

    Raises:
        ArgumentError: If ``trainable`` or ``batch_normalization`` is not valid for any model.
        ModelError: If the model is not valid, has no output or has training_info, or ``trainable``
            or ``batch_normalization`` does not fit it.
    """
    choice("batch_normalization", batch_normalization, get_args(BatchNormalization))
    trainable = _checked(trainable)
    light = _inference_model(model, keep=keep)
    proto = light.proto
    if trainable is None and (why := refused_without_weights(light)):
        raise ModelError(f"trainable: the loss depends on no weight, only on {why}")
    adapter = adapter_of(proto.metadata_props)
    light = with_computed_scales(light, adapter)
    proto = light.proto
    only_adapter = adapter is not None and trainable is None
    if adapter is not None and trainable is None:
        adapter.refuse_missing({tensor.name for tensor in proto.graph.initializer})
        trainable = adapter.parameters
    everything, origins = lift(light, scalars=trainable or ())
    work = convert.to_ir(everything)
    convert.inline(work)
    opset = work.graph.opset_imports[""]
    scopes = read_scopes(work.graph.initializers.values())
    work, inferred = _upgraded(work)
    graph = work.graph
    if only_adapter:
        chosen = choose(graph.initializers, trainable, scopes, "belongs to the adapter's base")
        chosen.said.append(f"only the adapter is trained ({adapter}); trainable= selects others")
    else:
        chosen = choose(graph.initializers, trainable, scopes, constants=origins)
        chosen.said += _defaults_used(proto.graph, chosen)
    place = place or Place()
    place.leave_out(chosen)
    frozen, statistics = _frozen(graph, chosen, batch_normalization)
    kept = chosen.trained.keys() | statistics
    lifted = {name: origin for name, origin in origins.items() if name in kept}
    _put_back(graph, origins.keys() - lifted.keys())
    if opset < convert.MINIMUM_OPSET:
        moved = _converted(work, proto, adapter)
        result = LightModel(moved.proto, light.data | moved.data)
    else:
        result, _ = lift(light, lifted)
        if not {entry.domain for entry in result.proto.opset_import} & {"", "ai.onnx"}:
            result.proto.opset_import.add(domain="", version=graph.opset_imports[""])
    graph = prepare(work, inferred=inferred).graph
    known = {v.name or "": v for node in graph for v in node.outputs} | dict(graph.initializers)
    chosen.floats = {name: known[name] for name in chosen.floats if name in known}
    chosen.trained = {name: graph.initializers[name] for name in chosen.trained}
    names, visible = _names(graph, result.proto)
    visible.update(write_vector_first(result.proto, graph))
    for name in place.taken:
        names.take(name)
    return Prepared(
        *(result, graph, names, visible, chosen, lifted, frozen, opset, scopes, adapter, place)
    )


def _defaults_used(graph: onnx.GraphProto, chosen: Choice) -> list[str]:
    """Returns messages about inputs that the trainable model does not have."""
    return [
        f"input '{name}' has a default value, which training always uses; to feed it, remove its "
        "initializer"
        for name in inputs_by_default(graph)
        if name not in chosen.trained
    ]


def _inference_model(model: ModelLike | LightModel, *, keep: bool) -> LightModel:
    """Returns a model without training_info; the caller's model stays as it is."""
    light = convert.load_light(model)
    light = external.lend(external.keep(light) if keep else light)
    if light.proto.training_info:
        raise ModelError(
            "model: it has training_info already; run it with TrainingSession, or get the model "
            "without it with TrainingSession.inference_model()"
        )
    return light


def refused_without_weights(light: LightModel) -> str:
    """Returns the node without a gradient, and why, of a model that has no weights; else "".

    It is fast for forests, whose attributes take gigabytes once they are numbers of Python.
    """
    for node in light.proto.graph.node:
        reason = RULES.refusal(ir.Node(node.domain, node.op_type, [])) if node.domain else None
        if reason and not any(math.prod(each.shape) > 1 for each in weights(light).values()):
            return f"{describe_node(node)}: {reason}"
    return ""


def _checked(trainable: Sequence[str] | None) -> list[str] | None:
    """Returns the argument ``trainable`` as a list of names and patterns; None for the default."""
    if trainable is None:
        return None
    if not isinstance(trainable, Iterable):
        raise ArgumentError(f"trainable must be a list of names and patterns, got {trainable!r}")
    found = [trainable] if isinstance(trainable, str) else list(trainable)
    for name in found:
        if not isinstance(name, str):
            raise ArgumentError(f"trainable: names and patterns must be strings, got {name!r}")
    if not found:
        raise ArgumentError("trainable must name at least one initializer, got []")
    return found


def _upgraded(work: ir.Model) -> tuple[ir.Model, bool]:
    """Returns a model of opset 21 or later with types, and whether all of them were inferred."""
    work = convert.upgrade(work)
    graph = work.graph
    made = (value for node in all_nodes(graph) for value in node.outputs if value.name)
    # Types help to tell weights from other constants. Those of Gradient nodes are inferred later.
    inferred = any(value.type is None for value in made) and infer_shapes(work)
    # Older files list initializers as inputs, too, whose declared sizes may be unknown.
    for value in [value for value in graph.inputs if value.name in graph.initializers]:
        graph.inputs.remove(value)
        inferred = False
    if not graph.outputs:
        raise ModelError("model: it has no output; a loss is computed from one")
    return work, inferred


def _converted(work: ir.Model, proto: onnx.ModelProto, adapter: Adapter | None) -> LightModel:
    """Returns a model of an older opset after its conversion."""
    result, data = external.move_aside(work)
    if adapter is not None:  # the initializers of adapters are inputs as well
        own = (work.graph.initializers.get(name) for name in adapter.parameters)
        result.graph.input.extend(ir.serde.serialize_value(v) for v in own if v is not None)
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        if proto.HasField(name):
            setattr(result, name, getattr(proto, name))
    return LightModel(result, data)


def _frozen(
    graph: ir.Graph, chosen: Choice, mode: BatchNormalization
) -> tuple[set[ir.Node], set[str]]:
    """Returns the layers in inference mode, and the names of the running statistics of others."""
    # A layer without parameters has what an exporter wrote, and learns as if it were trained.
    written = (n for n in chosen.unexpected if chosen.reasons.get(n, "").startswith("is all "))
    trained = {*chosen.trained.values(), *(chosen.floats[name] for name in written)}
    frozen, statistics = set[ir.Node](), set[str]()
    layers = [node for node in all_nodes(graph) if is_batch_normalization(node)]
    for node in layers:
        learns = any(not trained.isdisjoint(_sources(value)) for value in node.inputs[1:3])
        if mode == "frozen" or (mode == "auto" and not learns):
            frozen.add(node)
        elif both := {*node.inputs[1:3]} & {*node.inputs[3:5]}:
            names = sorted(str(value.name) for value in both if value is not None)
            raise ModelError(
                f"model: {describe(node)} has '{names[0]}' as a parameter and as a running "
                "statistic, which it updates; ortops.surgery.untie(model) gives it one for each"
            )
        else:
            statistics.update(v.name or "" for v in node.inputs[3:5] if v is not None)
    if mode != "frozen":
        for name in chosen.trained.keys() & {v.name for n in layers for v in n.inputs[3:5] if v}:
            raise ModelError(
                f"trainable: '{name}' is a running statistic, which BatchNormalization updates; "
                "leave it out"
            )
    if frozen and mode == "auto":
        chosen.said.append(
            f"{len(frozen)} of {len(layers)} BatchNormalization layers run in inference mode, "
            "because their scale and bias are not trained (with batch_normalization='train', all "
            "use batch statistics)"
        )
    return frozen, statistics


def _sources(value: ir.Value | None) -> set[ir.Value]:
    """Returns the values that a value is computed from, including itself."""
    if value is None:
        return set()
    nodes = ancestor_nodes(value, set())
    return {value, *(read for node in nodes for read in read_inputs(node))}


def _put_back(graph: ir.Graph, names: Collection[str]) -> None:
    """Converts initializers to Constant nodes."""
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
    """Returns the names in use, and those that a model's algorithm can refer to."""
    names = Names(graph)
    own = result.graph
    visible = {name for node in own.node for name in node.output if name}
    visible.update(value.name for value in (*own.input, *own.initializer))
    for name in (*visible, *(node.name for node in own.node)):
        names.take(name)
    return names, visible
