"""Converts training_info to one flat graph that makes a training step.

The standard defines a step as the concatenation of the inference graph and the algorithm. The flat
graph has an input for each mutable variable, and an output for its next value.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import onnx
import onnx_ir as ir

from ortops._common.arguments import choice, whole_number
from ortops.engine.execution.split_step import cut, differentiated, next_values
from ortops.engine.execution.step import Step
from ortops.engine.lowering import (
    TRAINING_DOMAIN,
    Target,
    infer_types,
    lower_optimizers,
    lower_prepared,
    lowered_for,
    normalize,
    prepare,
    takes_python_kernel,
)
from ortops.engine.trainable import handed_graph
from ortops.engine.trainable.bfloat16 import compute_in_float32
from ortops.engine.trainable.metadata import (
    METADATA_KEY,
    LossPart,
    TrainingMetadata,
    entry_number,
    training_metadata,
)
from ortops.engine.trainable.training_mode import write_inference_mode
from ortops.errors import ModelError, OrtopsError, did_you_mean
from ortops.graph import convert
from ortops.graph.autodiff.gradient_node import (
    Bound,
    bound_nodes,
    is_bound,
    lower_gradient,
    mark_variables,
    name_attributes,
)
from ortops.graph.autodiff.rules import RULES
from ortops.graph.edit import (
    all_nodes,
    ancestor_nodes,
    copy_node,
    is_float,
    mapped_tensor,
    nodes_between,
    prune,
    read_inputs,
    remove_defaults,
    remove_unread,
    values_of,
)
from ortops.graph.faults import use_exact_products
from ortops.graph.files import loading
from ortops.graph.files.external import LightModel, detach
from ortops.graph.files.loading import ONLY_ONNXRUNTIMES, ModelLike
from ortops.graph.files.messages import describe_node
from ortops.graph.files.serialization import BOUND_DOMAIN, name_tensors, to_proto
from ortops.graph.names import Names
from ortops.graph.passes.rounding import ROUNDING
from ortops.graph.shapes import may_be_equal
from ortops.graph.squashing import squashed
from ortops.graph.tensor import Tape, op
from ortops.optimizers import OPERATORS

STEP_GRAPH_KEY = "ortops.step_graph"
"""The metadata key of a JSON object {input: output}: which output feeds which input next."""

GRADIENTS_KEY = "ortops.gradients"
"""The metadata key of a JSON object {parameter: tensor}: the names of gradients in a part."""

Part: TypeAlias = Literal["gradients", "apply"]
"""A part of a step: the computation of gradients, or their application."""

_OVERLOAD_IR_VERSION = 10
_MERGED_SIZE = 8  # onnxruntime merges equal constants of at most this many elements


@loading.blame_model
def step_graph(
    model: ModelLike,
    *,
    entry: int | str = 0,
    defaults: bool = True,
    part: Part | None = None,
    target: Target | None = None,
) -> onnx.ModelProto:
    """Returns a training step as one flat graph, which can be driven from any language.

    Mutable variables and the learning rate are inputs whose current values are their defaults
    (initializers of the same names). The updated values are outputs. ``metadata_props`` has, under
    the key ``ortops.step_graph``, a JSON object that maps each of these inputs to the output that
    feeds it in the next step.

    Inputs, outputs and nodes that only inference needs are left out. Paths of external data remain
    relative to the folder of the given file.

    Gradient and optimizer nodes have functions of the same name as bodies. So the file runs with
    Python custom ops in a session with `ortops.register_custom_ops`, and with standard operators in
    a session without them. Optimizer nodes whose attributes a custom op would receive rounded are
    lowered. Graphs of bfloat16 models compute in float32; of their inputs and outputs, only
    variables are bfloat16.

    A step can be split into two parts, to do something with the gradients in between, such as
    summing them over workers. The second part reads some outputs of the first under the same names.
    ``metadata_props`` of both parts has, under the key ``ortops.gradients``, the name of each
    parameter's gradient. Gradients are those of the unscaled loss, and float32 if the parameter has
    16 bits.

    Args:
        model: A trainable model, written by `ortops.build_training_model` or another tool.
        entry: The training_info entry: its index or its name (see `ortops.add_training`).
        defaults: Whether variables have their values as defaults. onnxruntime's JavaScript packages
            cannot feed inputs with defaults, and onnxruntime-node ignores such feeds silently.
        part: ``"gradients"`` for the part that computes gradients, ``"apply"`` for the part that
            applies given gradients; None for both in one graph.
        target: The target of lowering (see `ortops.lower`); None leaves the graph unlowered.

    Returns:
        A new model without training_info, because its graph contains the algorithm.

    Raises:
        ArgumentError: If ``entry``, ``part`` or ``target`` is not valid.
        ModelError: If the model has no such entry, or the entry is not valid.
        UnsupportedError: If the step cannot be split, because it has no gradients, or several of
            one parameter.

    Example:
        >>> import ortops
        >>> from ortops.docs.examples import mlp
        >>> trainable = ortops.build_training_model(mlp((4, 2)), loss="L1", optimizer="SGD")
        >>> flat = step_graph(trainable)
        >>> json.loads(flat.metadata_props[0].value)
        {'step': 'step_new', 'fc1.weight': 'fc1.weight_new', 'fc1.bias': 'fc1.bias_new'}
    """
    choice("part", part, (None, "gradients", "apply"))
    proto, folder = loading.load(model)
    number = entry_number(proto, entry)
    _check_schedule(proto, number)
    step = flatten(detach(proto), number, folder)
    result, updates = step.model, dict(step.updates)
    notes = {}
    if part is not None:
        parts = cut(
            step,
            shown=step.outputs,
            ends=step.updates.values(),
            fed=(),
            labels=next_values(step.model.graph, step.updates),
        )
        result = parts.gradients if part == "gradients" else parts.apply
        updates = updates if part == "apply" else {}
        notes[GRADIENTS_KEY] = json.dumps(dict(parts.given))
    if not defaults:
        remove_defaults(result.graph, step.variables)
    if target is None:
        _write_functions(result)
    else:
        result = lowered_for(result, target)
    result.metadata_props.pop(METADATA_KEY, None)
    result.metadata_props[STEP_GRAPH_KEY] = json.dumps(updates)
    result.metadata_props.update(notes)
    flat = to_proto(result)
    name_tensors(flat.graph.node)
    return flat


def _check_schedule(proto: onnx.ModelProto, entry: int) -> None:
    """Raises an error if the schedule has no number of steps."""
    metadata = training_metadata(proto, entry)
    for info in list(proto.training_info)[entry : entry + 1]:
        for tensor in info.algorithm.initializer:
            if tensor.name == metadata.schedule_steps and not onnx.numpy_helper.to_array(tensor):
                raise ModelError(
                    f"step_graph: the schedule {metadata.schedule} has no number of steps; fit "
                    "sets it to those of the training, so save the session after that, or build "
                    "the model with steps= of the schedule"
                )


def _write_functions(model: ir.Model) -> None:
    """Adds the bodies of Gradient and optimizer nodes as functions, in place."""
    graph = model.graph
    names = Names(graph)
    inside = [node for node in bound_nodes(graph) if node.graph is not graph]
    before = ancestor_nodes((Bound.of(node).y for node in inside), set())
    for node in bound_nodes(graph):
        if node in inside or node in before:  # functions are only added for the main graph
            lower_gradient([node], names, RULES)
    _separate_outputs(graph, names)
    functions: list[ir.Function] = []
    for node in list(graph):
        if is_bound(node):
            functions.append(_gradient_function(Bound.of(node), f"gradient{len(functions)}"))
    remove_unread(lower_optimizers(graph, names, takes_python_kernel))
    functions += _optimizer_functions(graph)
    graph.opset_imports.pop(BOUND_DOMAIN, None)
    graph.opset_imports[TRAINING_DOMAIN] = 1
    for function in functions:
        model.functions[function.identifier()] = function
    model.ir_version = max(model.ir_version, _OVERLOAD_IR_VERSION)


def flatten(
    light: LightModel,
    entry: int = 0,
    folder: Path | None = None,
    *,
    counts: bool = False,
    outputs: Collection[str] | None = None,
    constants: Collection[str] = (),
) -> Step:
    """Concatenates the inference graph and the algorithm.

    Args:
        light: A light trainable model; not changed.
        entry: The index of the training_info entry.
        folder: The folder of its external data, which stay there.
        counts: Whether the counts that summands of the loss are divided by become outputs.
        outputs: The names of the outputs of the inference graph that are kept; by default, those
            that the loss depends on.
        constants: Initializers that no entry updates, and that become inputs like variables.

    Raises:
        ArgumentError: If ``entry`` is not an integer.
        ModelError: If there is no such entry, or a binding names something that does not exist.
    """
    proto = light.proto
    info = _entry(proto, entry)
    updates = check_bindings(proto, entry)
    bound = [
        binding.key
        for each in proto.training_info
        for binding in (*each.update_binding, *each.initialization_binding)
    ]
    taken = handed_graph.take(light, entry) if folder is None else None
    if taken is None:
        _check_algorithm(proto, entry)
        taken = convert.to_ir(_concatenate(light, entry), folder, given_away=True), False
    model = prepare(taken[0], inferred=taken[1])
    graph = model.graph
    by_name = {value.name: value for value in graph.outputs}
    wanted = [value.name for value in info.algorithm.output]
    nodes = ancestor_nodes([by_name[name] for name in wanted], set())
    needed = {value for node in nodes for value in node.outputs}
    own = [value.name for value in proto.graph.output if by_name[value.name] in needed]
    if outputs is not None:
        own = [name for name in own if name in outputs]
    _check_updates(graph, updates, entry)
    new = set(updates.values())
    loss = _loss(graph, training_metadata(proto, entry).loss, wanted, new)
    shown = [name for name in dict.fromkeys((*wanted, *own)) if name == loss or name not in new]
    metadata = training_metadata(proto, entry)
    divisors = _counts(graph, metadata) if counts else []
    kept = [by_name[name] for name in (*shown, *updates.values())]
    graph.outputs[:] = list(dict.fromkeys((*kept, *divisors)))
    prune(graph)
    rates = _learning_rates(graph, metadata)
    variables = [n for n in dict.fromkeys((*bound, *rates, *constants)) if n in graph.initializers]
    _make_inputs(graph, variables)
    compute_in_float32(graph, updates)
    use_exact_products(graph)
    # Without Gradient nodes, the parameters are the updated initializers of the inference graph.
    parameters = list(differentiated(graph, variables, updates))
    return Step(
        model,
        updates,
        rates,
        variables,
        [v.name or "" for v in graph.inputs if v.name not in graph.initializers],
        shown,
        loss,
        parameters=parameters or [t.name for t in proto.graph.initializer if t.name in updates],
        scale=metadata.loss_scale if metadata.loss_scale in variables else "",
        seed=metadata.seed if metadata.seed in variables else "",
        counts=[value.name or "" for value in divisors],
        varying=[value.name or "" for value in divisors if _reads_values(value)],
    )


def _entry(proto: onnx.ModelProto, entry: int) -> onnx.TrainingInfoProto:
    """Returns a training_info entry; raises an error if there is no such entry."""
    count = len(proto.training_info)
    if not count and any(note.key == METADATA_KEY for note in proto.metadata_props):
        raise ModelError(
            f"model: it has the metadata_props '{METADATA_KEY}' of a trainable model, but its "
            "training_info is gone, as after onnxsim, onnxslim, onnx-ir or onnx.version_converter; "
            "use the file from before that, or make it trainable again with "
            "ortops.build_training_model"
        )
    if not count:
        raise ModelError(
            "model: it has no training_info; make it trainable with ortops.build_training_model"
        )
    if not 0 <= whole_number("entry", entry) < count:
        raise ModelError(f"model: it has no training_info entry {entry}; it has {count}")
    info: onnx.TrainingInfoProto = proto.training_info[entry]
    return info


def _counts(graph: ir.Graph, metadata: TrainingMetadata) -> list[ir.Value]:
    """Returns the counts that summands of the loss are divided by, as far as they are noted."""
    names = {part.count for part in metadata.losses if part.count}
    return [value for node in graph for value in node.outputs if value.name in names]


def _reads_values(value: ir.Value) -> bool:
    """Whether a tensor depends on the values of feeds, not only on their shapes."""
    sized = {v for node in ancestor_nodes(value, set()) if _is_size(node) for v in node.outputs}
    return any(
        read.producer() is None and read.is_graph_input() and not read.is_initializer()
        for node in ancestor_nodes(value, sized)
        for read in read_inputs(node)
    )


def _is_size(node: ir.Node) -> bool:
    return not node.domain and node.op_type in ("Shape", "Size")


@dataclass(frozen=True)
class EvaluationModel:
    """A model in inference mode.

    Attributes:
        step: The model, as a step without updates.
        parts: The summands of the loss that are outputs.
        tensors: The name of the output for each requested tensor.
        kinds: The kind and the class axis of the requested tensors that are probabilities or their
            logarithms.
    """

    step: Step
    parts: Sequence[LossPart]
    tensors: Mapping[str, str]
    kinds: Mapping[str, tuple[str, int | None]]


@loading.blame_model
def evaluation_model(
    light: LightModel, entry: int, step: Step, tensors: Sequence[str], *, loss: bool
) -> EvaluationModel:
    """Returns a model that computes the loss and other tensors in inference mode.

    Variables are inputs.

    Args:
        light: A light trainable model; not changed.
        entry: The index of the training_info entry.
        step: The step that `flatten` returned for the entry; only its names are read.
        tensors: The tensors to compute. For the maps of a ZipMap, it is the tensor that they are
            made from.
        loss: Whether to compute the loss: its summands and their counts according to the metadata,
            or only the loss for models that ortops did not build.

    Raises:
        OrtopsError: If a tensor does not exist or is not an array.
    """
    metadata = training_metadata(light.proto, entry)
    model = prepare(convert.to_ir(_concatenate(light, entry), given_away=True))
    graph = model.graph
    values = _without_training_copies(graph, metadata)
    shown = dict(values)  # inference tensors by the names of their training-mode copies
    for name, source in (*metadata.dropouts.items(), *metadata.training_copies.items()):
        if name in values and source in values:
            shown[name] = shown[source]
    parts: list[LossPart] = []
    if loss:
        parts = [p for p in metadata.losses if p.name in values] or [LossPart(name=step.loss)]
        parts = [replace(part, count=part.count if part.count in values else "") for part in parts]
    named = [part.name for part in parts] + [part.count for part in parts if part.count]
    inference = light.proto.graph
    inner = (name for node in inference.node for name in node.output if name in shown)
    offered = dict.fromkeys([*(value.name for value in inference.output), *inner])
    found = {name: _array_named(name, shown, offered) for name in tensors}
    kinds = {name: _kind(value) for name, value in found.items()}
    graph.outputs[:] = list(dict.fromkeys((*(values[name] for name in named), *found.values())))
    prune(graph)  # removes readers of running statistics, which inference mode does not compute
    write_inference_mode(model)
    prune(graph)
    _make_inputs(graph, [name for name in step.variables if name in graph.initializers])
    compute_in_float32(graph, {})
    use_exact_products(graph)
    remove_defaults(graph, step.variables)
    feeds = [v.name or "" for v in graph.inputs if v.name not in step.variables]
    outputs = [value.name or "" for value in graph.outputs]
    names = {name: value.name or "" for name, value in found.items()}
    # Lowering replaces the outputs of Gradient nodes, so their names are read before it.
    # A step's loss has this precision too; onnxruntime's Sigmoid is 0 below -18.
    lowered = lower_prepared(model, passes=[ROUNDING] if loss else [])
    made = Step(lowered, {}, [], step.variables, feeds, outputs, "")
    return EvaluationModel(made, parts, names, {n: kind for n, kind in kinds.items() if kind})


def _without_training_copies(graph: ir.Graph, metadata: TrainingMetadata) -> dict[str, ir.Value]:
    """Replaces tensors of the training mode by those of the inference graph; returns all."""
    values = values_of(graph)
    for name, source in (*metadata.training_copies.items(), *metadata.dropouts.items()):
        if name in values and source in values:
            values[name].replace_all_uses_with(values[source], replace_graph_outputs=True)
    return values


def inference_with_loss(
    light: LightModel, entry: int = 0, folder: Path | None = None
) -> tuple[ir.Model, ir.Value]:
    """Returns the inference graph with the loss of an entry, in inference mode, and the loss.

    Unlike in `evaluation_model`, variables stay initializers, and the loss is one output, the last.

    Args:
        light: A light trainable model; not changed.
        entry: The index of the training_info entry.
        folder: The folder of its external data, which stay there.

    Raises:
        ModelError: If the entry has no loss, or is not valid.
    """
    proto = light.proto
    algorithm = _entry(proto, entry).algorithm
    updates = check_bindings(proto, entry)
    _check_algorithm(proto, entry)
    metadata = training_metadata(proto, entry)
    model = normalize(convert.to_ir(_concatenate(light, entry), folder, given_away=True))
    infer_types(model)
    graph = model.graph
    outputs = [value.name for value in algorithm.output]
    name = _loss(graph, metadata.loss, outputs, set(updates.values()))
    if not name:
        raise ModelError("loss: the training algorithm of the model has no loss; pass loss=")
    values = _without_training_copies(graph, metadata)
    given, own = list(graph.inputs), {value.name for value in proto.graph.input}
    graph.outputs[:] = [values[each] for each in (*(v.name for v in proto.graph.output), name)]
    prune(graph)
    write_inference_mode(model)
    prune(graph)
    graph.inputs[:] = [v for v in given if v.name in own or v.uses() or v.is_graph_output()]
    return model, values[name]


def _array_named(name: str, values: Mapping[str, ir.Value], offered: Iterable[str]) -> ir.Value:
    """Returns a tensor by name; for the maps of a ZipMap, the tensor that they are made from."""
    if name not in values:
        hint = did_you_mean(name, offered)
        raise OrtopsError(f"outputs: the model has no tensor '{name}'; {hint}")
    value = mapped_tensor(values[name]) or values[name]
    if isinstance(value.type, ir.SequenceType | ir.OptionalType):
        raise OrtopsError(
            f"outputs: '{name}' is a sequence or an optional; name tensors with outputs="
        )
    return value


def _kind(value: ir.Value) -> tuple[str, int | None] | None:
    """Returns the kind and the class axis of probabilities and their logarithms."""
    found = squashed(value)
    if found is None:
        return None
    return "log_probabilities" if found.kind == "log_softmax" else "probabilities", found.axis


def _make_inputs(graph: ir.Graph, variables: Sequence[str]) -> None:
    """Makes initializers inputs with default values."""
    listed = set(graph.inputs)
    values = dict.fromkeys(graph.initializers[name] for name in variables)
    graph.inputs.extend(value for value in values if value not in listed)


def check_bindings(proto: onnx.ModelProto, entry: int) -> dict[str, str]:
    """Returns the update bindings of a training_info entry.

    Raises:
        ModelError: If a binding names what does not exist, or binds a variable twice.
    """
    info = proto.training_info[entry]
    initializers = (*proto.graph.initializer, *info.algorithm.initializer)
    keys = dict.fromkeys(tensor.name for tensor in initializers)
    values = dict.fromkeys(v.name for v in (*info.algorithm.output, *proto.graph.output))
    seen: set[str] = set()
    for number, other in enumerate(proto.training_info):
        for binding in other.update_binding:
            if binding.key in seen:
                raise ModelError(
                    f"training_info entry {number}: '{binding.key}' is updated twice; each "
                    "variable is bound once in all entries"
                )
            seen.add(binding.key)
    starts = dict.fromkeys(value.name for value in info.initialization.output)
    for what, bindings, known in (
        ("update_binding", info.update_binding, values),
        ("initialization_binding", info.initialization_binding, starts),
    ):
        for binding in bindings:
            where = f"training_info entry {entry}: {what}"
            if binding.key not in keys:
                raise ModelError(
                    f"{where} sets '{binding.key}', which is not an initializer; "
                    + did_you_mean(binding.key, keys)
                )
            if binding.value not in known:
                raise ModelError(
                    f"{where} sets '{binding.key}' to '{binding.value}', which is not an output; "
                    + did_you_mean(binding.value, known)
                )
    return {binding.key: binding.value for binding in info.update_binding}


def _check_updates(graph: ir.Graph, updates: Mapping[str, str], entry: int) -> None:
    """Raises a ModelError if an update has another type or shape than its variable."""
    outputs = {value.name: value for value in graph.outputs}
    for name, output in updates.items():
        old, new = graph.initializers[name], outputs[output]
        same_type = None in (old.dtype, new.dtype) or old.dtype == new.dtype
        if not same_type or not may_be_equal(old.shape, new.shape):
            raise ModelError(
                f"training_info entry {entry}: update_binding sets '{name}' of type {old.dtype} "
                f"and shape {old.shape} to '{output}' of type {new.dtype} and shape {new.shape}; "
                "the type and shape of a variable cannot change"
            )


def _check_algorithm(proto: onnx.ModelProto, entry: int) -> None:
    """Checks operators, because onnx.checker does not look at training_info."""
    where = f"training_info entry {entry}"
    opset = max((e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")), default=0)
    has_operator = functools.cache(onnx.defs.has)
    for node in proto.training_info[entry].algorithm.node:
        if node.domain or not opset or node.op_type in ONLY_ONNXRUNTIMES:
            continue
        if not has_operator(node.op_type, opset):
            raise ModelError(
                f"{where}: {describe_node(node)}: opset {opset} has no such operator; correct its "
                "name, or import a newer opset"
            )


def _concatenate(model: LightModel, entry: int) -> LightModel:
    """Returns the model whose graph is the inference graph followed by an algorithm."""
    proto = model.proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    del result.training_info[:]
    algorithm = proto.training_info[entry].algorithm
    taken = {name for node in proto.graph.node for name in node.output if name}
    taken.update(tensor.name for tensor in (*proto.graph.initializer, *proto.graph.input))
    added = [tensor.name for tensor in (*algorithm.initializer, *algorithm.input)]
    added += [name for node in algorithm.node for name in node.output if name]
    for name in added:
        if name in taken:
            raise ModelError(
                f"training_info entry {entry}: '{name}' is also a tensor of the inference graph; "
                "rename one of them"
            )
    graph = result.graph
    for node in graph.node:
        node.ClearField("metadata_props")  # long source locations, which no step reads
    graph.node.extend(algorithm.node)
    graph.initializer.extend(algorithm.initializer)
    graph.sparse_initializer.extend(algorithm.sparse_initializer)
    own = {value.name for value in graph.output}
    variables = {tensor.name for tensor in graph.initializer}
    for value in [value for value in graph.input if value.name in variables]:
        graph.input.remove(value)  # older files list initializers as inputs, too
    graph.input.extend(algorithm.input)
    graph.output.extend(value for value in algorithm.output if value.name not in own)
    typed = {value.name for value in graph.value_info}
    graph.value_info.extend(value for value in algorithm.value_info if value.name not in typed)
    return LightModel(result, model.data)


def _learning_rates(graph: ir.Graph, metadata: TrainingMetadata) -> list[str]:
    """Returns the initializers that are learning rates: as noted, or R of an optimizer node."""
    found = [metadata.learning_rate]
    found += [
        node.inputs[0].name or ""
        for node in graph
        if node.domain == TRAINING_DOMAIN and node.op_type in OPERATORS and node.inputs[0]
    ]
    return [name for name in dict.fromkeys(found) if name in graph.initializers]


def _loss(graph: ir.Graph, noted: str, outputs: Sequence[str], updates: Container[str]) -> str:
    """Returns the name of the loss: as noted, or y of the first Gradient node, or a guess.

    The next value of a variable is never the loss.
    """
    if noted in outputs:
        return noted
    for node in graph:
        y = Bound.of(node).y.name if is_bound(node) else None
        if y in outputs:
            return y or ""
    values = {value.name: value for value in graph.outputs}
    numbers = [name for name in outputs if is_float(values[name]) and values[name].shape == ()]
    return next(iter([*(name for name in outputs if name not in updates), *numbers]), "")


def _separate_outputs(graph: ir.Graph, names: Names) -> None:
    """Inserts a node before each graph output whose producer has other readers.

    onnxruntime merges equal nodes of the graph and of a Gradient body, unless one of them produces
    a graph output. It removes an Identity that is the only reader of a value, but not a Sum.
    """
    tape = Tape(graph, names=names)
    for index, value in enumerate(graph.outputs):
        producer = value.producer()
        if producer is not None and producer.op_type == "Identity" and is_float(value):
            source = producer.inputs[0]
            if source is not None and source.producer() is not None and len(source.uses()) == 1:
                producer.op_type = "Sum"
        if producer is not None and any(other.uses() for other in producer.outputs):
            name = value.name or ""
            value.name = names.unique(f"{name}_value")
            emit = op.Identity if value.uses() or not is_float(value) else op.Sum
            copy = emit(tape.tensor(value)).with_shape_of(tape.tensor(value)).value
            copy.name = name
            graph.outputs[index] = copy


def _gradient_function(bound: Bound, overload: str) -> ir.Function:
    """Returns the body of a bound Gradient node; adds the values that y depends on to its zs."""
    node, graph = bound.node, bound.node.graph
    assert isinstance(graph, ir.Graph)
    path = nodes_between(graph, bound.named, bound.y)
    read = dict.fromkeys(value for other in path for value in other.inputs if value is not None)
    known = set(bound.named)
    added = [value for value in read if value.producer() is None and value not in known]
    zs, fed = [*bound.zs, *added], [*bound.fed, *added]
    body, copies = _copied_body(graph, path, [*bound.xs, *zs], overload)
    inputs, count = list(body.inputs), len(bound.xs)
    inner = Bound.make(
        inputs,
        inputs[:count],
        inputs[count:],
        copies.get(bound.y, bound.y),
        outputs=[_like(value) for value in node.outputs],
        name=node.name,
    ).node
    body.append(inner)
    body.outputs.extend(inner.outputs)
    mark_variables(body)
    names = Names(body)
    for other in list(body):
        if is_bound(other):  # the node itself, and the Gradient nodes that it differentiates
            lower_gradient([other], names, RULES)
    remove_unread(list(body))
    constants = _constants_to_inputs(body, copies)
    zs += constants
    values = [*fed, *constants, *bound.xs, *zs, bound.y]
    node.resize_inputs(len(values))
    for index, value in enumerate(values):
        node.replace_input_with(index, value)
    for attribute in name_attributes(bound.xs, zs, bound.y):
        node.attributes[attribute.name] = attribute
    body.opset_imports.pop(BOUND_DOMAIN, None)
    body.opset_imports.pop(TRAINING_DOMAIN, None)
    node.overload = overload
    return ir.Function(
        TRAINING_DOMAIN, "Gradient", overload, graph=body, attributes=_declared("xs", "zs", "y")
    )


def _copied_body(
    graph: ir.Graph, nodes: Sequence[ir.Node], inputs: Sequence[ir.Value], name: str
) -> tuple[ir.Graph, dict[ir.Value, ir.Value]]:
    """Returns a graph with copies of nodes, and the copy of each value."""
    copies = {value: _like(value) for value in inputs}
    imports = dict(graph.opset_imports)
    body = ir.Graph(list(copies.values()), [], nodes=[], opset_imports=imports, name=name)
    for node in nodes:
        copy = copy_node(node, copies)
        copy.name = node.name
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = old.name
            copies[old] = new
        body.append(copy)
    return body, copies


def _constants_to_inputs(body: ir.Graph, copies: Mapping[ir.Value, ir.Value]) -> list[ir.Value]:
    """Makes the constants of a body its inputs; returns the values outside that feed them."""
    found = []
    for outer, value in copies.items():
        constant = value.producer()
        if constant is None or constant.graph is not body:  # removed, because nothing read it
            continue
        if constant.op_type == "Constant" and not _is_merged(outer):
            value.replace_all_uses_with(formal := ir.Value(type=value.type, shape=value.shape))
            body.remove(constant, safe=True)
            formal.name = value.name
            body.inputs.append(formal)
            found.append(outer)
    return found


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape)


def _is_merged(constant: ir.Value) -> bool:
    """Whether onnxruntime merges constants of this value, so that their readers are merged too."""
    merged = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT64)
    tensor = ir.convenience.get_const_tensor(constant)
    return tensor is not None and tensor.size <= _MERGED_SIZE and tensor.dtype in merged


def _declared(*names: str) -> list[ir.Attr]:
    """Returns attribute declarations of a function, without types and defaults."""
    return [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in names]


def _optimizer_functions(graph: ir.Graph) -> list[ir.Function]:
    """Returns bodies for the optimizer nodes: one for each combination of attributes and types."""
    functions: dict[tuple[object, ...], ir.Function] = {}
    for node in all_nodes(graph):
        if node.domain != TRAINING_DOMAIN or node.op_type not in OPERATORS:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        types = tuple(value.type for value in node.inputs if value is not None)
        key = (node.op_type, *sorted(attributes.items()), *types)
        if key not in functions:
            overload = f"{node.op_type.lower()}{len(functions)}"
            functions[key] = _optimizer_function(node, overload, graph.opset_imports[""])
        node.overload = functions[key].overload
    return list(functions.values())


def _optimizer_function(node: ir.Node, overload: str, opset: int) -> ir.Function:
    operator = OPERATORS[node.op_type]
    formal = ("R", "T", "X", "G", *operator.states)
    inputs = [
        ir.Value(name=name, type=value.type)
        for name, value in zip(formal, node.inputs, strict=True)
        if value is not None
    ]
    body = ir.Graph(inputs, [], nodes=[], opset_imports={"": opset}, name=overload)
    tape = Tape(body)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    results = operator.rule(*(tape.tensor(value) for value in inputs), **attributes)
    for name, result in zip(("X", *operator.states), results, strict=True):
        tape.output(result, f"{name}_new")
    return ir.Function(
        TRAINING_DOMAIN,
        node.op_type,
        overload,
        graph=body,
        attributes=_declared(*operator.attribute_types),
    )
