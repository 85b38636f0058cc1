"""Writing training_info: from an inference model to a trainable model in one standard file."""

from __future__ import annotations

import fnmatch
import json
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops import losses, optimizers
from ortops.autodiff.gradient_node import is_bound, unbind
from ortops.autodiff.rules import RULES
from ortops.errors import ModelError, did_you_mean
from ortops.graph import convert, external
from ortops.graph.convert import ModelLike
from ortops.graph.edit import ancestor_nodes, read_inputs
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Names, Tape, Tensor, op
from ortops.losses import LossLike
from ortops.lowering import TRAINING_DOMAIN, prepare
from ortops.optimizers import Optimizer, UpdateRule
from ortops.training.modes import copy_in_training_mode

__all__ = ["METADATA_KEY", "build_training_model"]

METADATA_KEY = "ortops.training"
"""Where a trainable model says, as JSON, which of its names play which part."""

_TRAINING_INFO_IR_VERSION = 7

_FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)

logger = logging.getLogger("ortops")


@dataclass
class _Algorithm:
    """What becomes a TrainingInfoProto.

    Attributes:
        tape: The tape at the end of the inference graph that the algorithm's nodes are on.
        inputs: The algorithm's own inputs.
        outputs: Its outputs.
        variables: Its own initializers.
        updates: Name of an initializer → its next value.
        initial: Name of an initializer → the value that it starts from.
    """

    tape: Tape
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    variables: list[Tensor] = field(default_factory=list)
    updates: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def variable(self, name: str, array: np.ndarray[Any, Any]) -> Tensor:
        """Adds an initializer of the algorithm that initialization sets to its first value."""
        tensor = self.tape.initializer(name, array)
        self.variables.append(tensor)
        self.initial[tensor.name] = array
        return tensor

    def update(self, name: str, new: Tensor) -> Tensor:
        """Makes a tensor the next value of an initializer."""
        taken = {tensor.value for tensor in self.outputs}
        fresh = new.value.producer() in self.tape.nodes and new.value.const_value is None
        if not fresh or new.value in taken:
            new = op.Identity(new)
        new.value.name = self.tape.names.unique(f"{name}_new")
        self.updates[name] = new
        self.outputs.append(new)
        return new


@convert.blame_model
def build_training_model(
    model: ModelLike,
    *,
    loss: LossLike,
    optimizer: str | Optimizer | type[Optimizer] | UpdateRule,
    trainable: Sequence[str] | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """Adds a training algorithm to a model, as ``training_info`` of the ONNX standard.

    The inference graph is left as it is, so that the file runs as before wherever it ran. The
    algorithm holds the loss, a Gradient node, an optimizer node for each parameter and the count of
    steps; a training-mode copy of BatchNormalization and Dropout, where there are such, and of what
    depends on them. Its state (``<parameter>.V`` …, ``step``, ``learning_rate``) is part of the
    file, which therefore is the checkpoint too.

    Args:
        model: An inference model: a ModelProto, its bytes or its path. One below opset 21 is
            converted as a whole, and a message says so.
        loss: A loss of `ortops.losses`, its name, or a function that gets Tensors and returns a
            scalar one (see `ortops.losses.compute` for what it gets).
        optimizer: An optimizer of `ortops.optimizers`, its name, or an update rule.
        trainable: The names of the initializers to train, or patterns such as ``"head.*"``. By
            default all floating-point ones that the loss depends on, but for running statistics
            and for scalars (0-d), which exporters write for constants. Where an exporter put the
            weights into Constant nodes, these become initializers, and a message says so.
        seed: Determines which elements Dropout drops.

    Returns:
        A new model; the argument is not changed.

    Raises:
        ModelError: If the model is not legal, or loss, optimizer or trainable do not fit it.

    Example:
        >>> import numpy as np
        >>> from ortops import Tape, op
        >>> with Tape(name="linear") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 2])
        ...     w = tape.initializer("w", np.zeros((2, 1), np.float32))
        ...     y = tape.output(x @ w, "y")
        >>> trainable = build_training_model(tape.model(), loss="MeanSquaredError", optimizer="SGD")
        >>> [node.op_type for node in trainable.graph.node]
        ['MatMul']
        >>> [output.name for output in trainable.training_info[0].algorithm.output]
        ['loss', 'w_new', 'step_new']
    """
    if trainable is not None:
        trainable = [trainable] if isinstance(trainable, str) else list(trainable)
    for name in trainable or ():
        if not isinstance(name, str):
            raise ModelError(f"trainable: {name!r} is no string; names and patterns are accepted")
    chosen_loss, chosen_optimizer = losses.resolve(loss), optimizers.resolve(optimizer)
    proto, folder = convert.load(model)
    if proto.training_info:
        raise ModelError(
            "model: it has training_info already; TrainingSession runs it, and "
            "TrainingSession.inference_model() gives the model without it"
        )
    proto, data = external.detach(proto, folder)
    proto = _with_weights_as_initializers(proto, trainable)
    result, work = _prepare(proto, data)
    graph = work.graph
    if not graph.outputs:
        raise ModelError("model: it has no output; a loss is computed from one")
    nodes, weights = list(graph), dict(graph.initializers)
    names, visible = _names(graph, result)
    tape = Tape(graph, names=names)
    algorithm = _Algorithm(tape)
    with tape:
        rate = algorithm.variable(
            "learning_rate", np.array(chosen_optimizer.learning_rate, np.float32)
        )
        step = algorithm.variable("step", np.array(0, np.int64))
        copies, statistics = copy_in_training_mode(tape, nodes, visible, step, seed)
        outputs = {v.name or "": tape.tensor(copies.get(v, v)) for v in graph.outputs}
        inputs = {
            v.name or "": tape.tensor(v) for v in graph.inputs if v.name not in graph.initializers
        }
        tape.scope = "loss/"
        value, algorithm.inputs = losses.compute(chosen_loss, tape, outputs, inputs)
        tape.scope = ""
        value = _named(value, "loss", graph)
        algorithm.outputs.append(value)
        needed = ancestor_nodes(value.value, set())
        shown = {
            v.name or "": tape.tensor(copies[v])
            for v in graph.outputs
            if v in copies and copies[v].producer() in needed
        }
        algorithm.outputs += shown.values()
        statistics = {n: s for n, s in statistics.items() if s.value.producer() in needed}
        parameters = _parameters(weights, value, trainable, chosen_optimizer, statistics)
        gradients = _gradient(tape, value, parameters)
        step_new = algorithm.update(step.name, step + 1)
        t = step_new if chosen_optimizer.first_step == 1 else step
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _update(algorithm, chosen_optimizer, rate, t, tape.tensor(parameter), gradient)
        for name, statistic in statistics.items():
            algorithm.update(name, statistic)
    algorithm.outputs.sort(key=lambda tensor: tensor is algorithm.updates[step.name])
    _write(result, algorithm)
    parts = {
        "loss": value.name,
        "learning_rate": rate.name,
        "step": step.name,
        "training_copies": {copy.name: name for name, copy in shown.items()},
    }
    entry = next((e for e in result.metadata_props if e.key == METADATA_KEY), None)
    entry = entry or result.metadata_props.add(key=METADATA_KEY)
    entry.value = json.dumps(parts)
    return external.attach(result, data)


def _with_weights_as_initializers(
    proto: onnx.ModelProto, trainable: Sequence[str] | None
) -> onnx.ModelProto:
    """Returns the model with its weights in initializers, where an exporter put them in nodes.

    That is so where no floating-point initializer is more than a scalar, or where ``trainable``
    means the output of a Constant node.
    """
    constants = {node.output[0]: node for node in proto.graph.node if _is_weight(node)}
    if trainable is None:
        wanted = not any(
            t.data_type in _FLOATS and len(t.dims) > 0 for t in proto.graph.initializer
        )
    else:
        wanted = any(fnmatch.filter(constants, name) for name in trainable)
    if not constants or not wanted:
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    kept = [node for node in result.graph.node if not _is_weight(node)]
    del result.graph.node[:]
    result.graph.node.extend(kept)
    for name, node in constants.items():
        tensor = result.graph.initializer.add()
        tensor.CopyFrom(node.attribute[0].t)
        tensor.name = name
    result.ir_version = max(result.ir_version, 4)  # before 4, initializers had to be inputs
    logger.warning("the weights of %d Constant nodes became initializers", len(constants))
    return result


def _is_weight(node: onnx.NodeProto) -> bool:
    """Whether a node is a floating-point Constant that is more than a scalar."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx"):
        return False
    (value,) = node.attribute
    return value.name == "value" and value.t.data_type in _FLOATS and len(value.t.dims) > 0


def _prepare(proto: onnx.ModelProto, data: external.Data) -> tuple[onnx.ModelProto, ir.Model]:
    """Returns the model to write to, and one to work on: inlined, at a new opset, with types.

    Args:
        proto: A light model; the one to write to, unless its opset is too old.
        data: Its data.
    """
    work = convert.to_ir(proto, None, data)
    convert.inline(work)
    result = proto
    if work.graph.opset_imports[""] < convert.MINIMUM_OPSET:
        work = convert.upgrade(work)
        result = ir.to_proto(work)
        for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
            if proto.HasField(name):
                setattr(result, name, getattr(proto, name))
    elif not {entry.domain for entry in result.opset_import} & {"", "ai.onnx"}:
        result.opset_import.add(domain="", version=work.graph.opset_imports[""])
    for value in list(work.graph.inputs):  # older files list initializers as inputs too
        if value.name in work.graph.initializers:
            work.graph.inputs.remove(value)
    return result, prepare(work)


def _names(graph: ir.Graph, result: onnx.ModelProto) -> tuple[Names, set[str]]:
    """Returns the names taken, and those that an algorithm of a model can refer to.

    The latter are fewer than those of the graph where functions have been inlined in that.
    """
    names = Names(graph)
    own = result.graph
    visible = {name for node in own.node for name in node.output if name}
    visible.update(value.name for value in (*own.input, *own.initializer))
    for name in (*visible, *(node.name for node in own.node)):
        names.take(name)
    return names, visible


def _named(tensor: Tensor, name: str, graph: ir.Graph) -> Tensor:
    """Gives a tensor that was just emitted a name."""
    tape = tensor.tape
    if tensor.value.producer() not in tape.nodes or tensor.value.is_graph_output():
        tensor = op.Identity(tensor)
    tensor.value.name = tape.names.unique(name)
    return tensor


def _parameters(
    weights: Mapping[str, ir.Value],
    loss: Tensor,
    trainable: Sequence[str] | None,
    optimizer: Optimizer,
    statistics: Container[str],
) -> list[ir.Value]:
    """Returns the initializers to train."""
    reached = RULES.ancestors(loss.value)
    floats = {
        name: value
        for name, value in weights.items()
        if value.dtype is not None and value.dtype.is_floating_point()
    }
    default = {
        name: value
        for name, value in floats.items()
        if value in reached and not _is_statistic(value) and name not in statistics
    }
    if trainable is None:
        scalars = [n for n, v in default.items() if v.shape is not None and len(v.shape) == 0]
        if scalars:
            logger.info("scalar initializers are not trained: %s", ", ".join(scalars))
        chosen = [value for name, value in default.items() if name not in scalars]
        if not chosen:
            raise ModelError(
                "trainable: the loss depends on no floating-point initializer"
                + (f" but scalars ({', '.join(scalars)})" if scalars else "")
                + "; name what to train in trainable="
            )
    else:
        chosen = _matching(weights, floats, default, trainable)
        for value in chosen:
            if value.name in statistics:
                raise ModelError(
                    f"trainable: '{value.name}' is a running statistic, which BatchNormalization "
                    "updates; leave it out"
                )
            if value not in reached:
                raise ModelError(
                    f"trainable: the loss does not depend on '{value.name}'; leave it out"
                )
    for value in chosen:
        if optimizer.operator and value.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
            raise ModelError(
                f"trainable: '{value.name}' is of type {value.dtype}; {optimizer.operator} takes "
                "FLOAT and DOUBLE"
            )
    return chosen


def _matching(
    weights: Mapping[str, ir.Value],
    floats: Mapping[str, ir.Value],
    default: Mapping[str, ir.Value],
    wanted: Sequence[str],
) -> list[ir.Value]:
    """Returns the initializers of a name, or, for a pattern, those among the default ones."""
    if not wanted:
        raise ModelError("trainable: nothing is named; name at least one initializer")
    chosen: dict[str, ir.Value] = {}
    for pattern in wanted:
        if pattern in floats:
            names = [pattern]
        elif pattern in weights:
            raise ModelError(
                f"trainable: initializer '{pattern}' is of type "
                f"{weights[pattern].dtype}; only floating-point ones can be trained"
            )
        else:
            names = fnmatch.filter(default, pattern)
        if not names:
            raise ModelError(
                f"trainable: the model has no trainable initializer '{pattern}'; "
                + did_you_mean(pattern, floats)
            )
        chosen.update((name, floats[name]) for name in names)
    return list(chosen.values())


def _is_statistic(value: ir.Value) -> bool:
    """Whether an initializer holds a running mean or variance of BatchNormalization."""
    return any(
        use.node.op_type == "BatchNormalization" and use.idx in (3, 4) for use in value.uses()
    )


def _gradient(tape: Tape, loss: Tensor, parameters: Sequence[ir.Value]) -> list[Tensor]:
    """Emits the Gradient node; its zs are all else that the loss is a function of."""
    read = {
        value
        for node in ancestor_nodes(loss.value, set())
        for value in read_inputs(node)
        if value.producer() is None
    }
    graph = tape.graph
    leaves = [*graph.inputs, *graph.initializers.values()]
    zs = [v for v in dict.fromkeys(leaves) if v in read and v not in set(parameters)]
    node = ir.Node(
        TRAINING_DOMAIN,
        "Gradient",
        [*parameters, *zs],
        ir.convenience.convert_attributes(
            {"xs": [v.name or "" for v in parameters], "y": loss.name}
            | ({"zs": [v.name or "" for v in zs]} if zs else {})
        ),
        num_outputs=len(parameters),
    )
    for parameter, output in zip(parameters, node.outputs, strict=True):
        output.name = tape.names.unique(f"{parameter.name}_gradient")
        output.type, output.shape = parameter.type, parameter.shape
    tape.append(node)
    return [tape.tensor(output) for output in node.outputs]


def _update(
    algorithm: _Algorithm,
    optimizer: Optimizer,
    rate: Tensor,
    t: Tensor,
    parameter: Tensor,
    gradient: Tensor,
) -> None:
    """Emits the update of one parameter: the domain's node, or the nodes of the rule."""
    tape = algorithm.tape
    shape = parameter.value.const_value
    assert shape is not None
    zeros = np.zeros(tuple(shape.shape.numpy()), parameter.dtype)
    states = [algorithm.variable(f"{parameter.name}.{s}", zeros) for s in optimizer.states]
    tape.scope = f"update/{parameter.name}/"
    if optimizer.operator is None:
        new = _own_update(optimizer, (rate, t, parameter, gradient, *states))
    else:
        node = ir.Node(
            TRAINING_DOMAIN,
            optimizer.operator,
            [v.value for v in (rate, t, optimizer.before_operator(rate, parameter), gradient)]
            + [state.value for state in states],
            ir.convenience.convert_attributes(optimizer.operator_attributes),
            num_outputs=1 + len(states),
        )
        tape.append(node)
        new = tuple(tape.tensor(output).with_shape_of(parameter) for output in node.outputs)
        for tensor in new:
            tensor.value.type = parameter.value.type
    tape.scope = ""
    for variable, tensor in zip((parameter, *states), new, strict=True):
        algorithm.update(variable.name, tensor)


def _own_update(optimizer: Optimizer, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Emits the nodes of an update rule, and checks what it returns."""
    returned = optimizer.rule(*inputs, **optimizer.attributes)
    new = returned if isinstance(returned, tuple | list) else (returned,)
    parameter = inputs[2]
    where = f"optimizer {optimizer.name}, parameter '{parameter.name}'"
    if len(new) != 1 + len(optimizer.states):
        raise ModelError(
            f"{where}: the rule returned {len(new)} values; it must return x_new"
            + "".join(f", {state.lower()}_new" for state in optimizer.states)
        )
    for name, tensor in zip(("x", *optimizer.states), new, strict=True):
        what = f"{where}: {name.lower()}_new"
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{what} is {tensor!r}; it must be a Tensor")
        fits = may_be_equal(tensor.value.shape, parameter.value.shape)
        if tensor.value.dtype != parameter.value.dtype or not fits:
            raise ModelError(
                f"{what} is {tensor.dtype}{list(tensor.shape or ())}; it must be like the "
                f"parameter, {parameter.dtype}{list(parameter.shape or ())}"
            )
    return tuple(new)


def _write(result: onnx.ModelProto, algorithm: _Algorithm) -> None:
    """Writes the algorithm and its initialization into a model."""
    info = result.training_info.add()
    serialize = ir.serde
    target = info.algorithm
    target.name = "training_algorithm"
    target.input.extend(serialize.serialize_value(tensor.value) for tensor in algorithm.inputs)
    target.output.extend(serialize.serialize_value(tensor.value) for tensor in algorithm.outputs)
    outputs = {tensor.value for tensor in algorithm.outputs}
    needed = ancestor_nodes(outputs, set())
    for tensor in algorithm.variables:
        assert tensor.value.const_value is not None
        serialize.serialize_tensor_into(target.initializer.add(), tensor.value.const_value)
    for node in (node for node in algorithm.tape.nodes if node in needed):
        if is_bound(node):
            unbind(node)
        target.node.append(serialize.serialize_node(node))
        target.value_info.extend(
            serialize.serialize_value(value)
            for value in node.outputs
            if value.name and value.type is not None and value not in outputs
        )
    for name, tensor in algorithm.updates.items():
        info.update_binding.add(key=name, value=tensor.name)

    info.initialization.name = "training_initialization"
    with Tape(name="training_initialization") as tape:
        for name, array in algorithm.initial.items():
            if array.ndim == 0:
                start = op.Identity(np.asarray(array))
            else:
                start = op.ConstantOfShape(list(array.shape), value=np.zeros(1, array.dtype))
            tape.output(start, f"{name}_initial")
            info.initialization_binding.add(key=name, value=f"{name}_initial")
    info.initialization.CopyFrom(serialize.serialize_graph(tape.graph))
    result.ir_version = max(result.ir_version, _TRAINING_INFO_IR_VERSION)
    if not any(entry.domain == TRAINING_DOMAIN for entry in result.opset_import):
        result.opset_import.add(domain=TRAINING_DOMAIN, version=1)
