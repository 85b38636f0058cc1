"""Emits a loss at the end of a model, and records which tensors it reads."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops._common.arguments import parameters_of
from ortops._common.numbers import integer
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph.constants import Dim
from ortops.graph.edit import (
    Steps,
    attribute_values,
    copy_node,
    describe,
    inner_graphs,
    is_float,
    mapped_tensor,
    unrolled,
)
from ortops.graph.files.loading import ModelLike
from ortops.graph.squashing import Squashed, may_be_bounded, partly_squashed, squashed
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses.loss import Function, Loss, Part, Reads, Shape, mean_of, softplus
from ortops.losses.teacher import put_teacher

Inputs: TypeAlias = Mapping[str, tuple[npt.DTypeLike, Sequence[Dim]]]
"""Declared inputs: dtype and dimensions by name."""

Kind: TypeAlias = Literal["logits", "probabilities", "log_probabilities", "values"]

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class Prediction:
    """The tensor that a loss compares with its target. Metrics compare the same one by default.

    Attributes:
        tensor: The tensor.
        kind: How its numbers are interpreted.
        axis: The class axis, if any.
        target: The input that it is compared with, if any.
        ignored: The label to ignore, if any.
        output: The name of the tensor that the user chose; it may be a Softmax of ``tensor``.
        shifted: Whether a position is compared with the label at the next one.
        shared: The arguments of the loss that metrics share, by name.
        bounded: Whether the loss reads logits that a function with bounded values, such as an
            unknown form of Sigmoid, may have computed.
        sample_weight: The input with the weights of rows, if any.
        form: ``"numbers"`` if the loss compares numbers, whatever their kind is,
            ``"probabilities"`` if targets are those of classes, ``"other"`` if targets that are no
            labels have another rank; else "".
    """

    tensor: Tensor
    kind: Kind
    axis: int | None = None
    target: str | None = None
    ignored: int | None = None
    output: str = ""
    shifted: bool = False
    shared: Mapping[str, Any] = field(default_factory=dict)
    bounded: bool = False
    sample_weight: str | None = None
    form: str = ""


@dataclass(frozen=True)
class Computed:
    """An emitted loss.

    Attributes:
        value: The scalar to minimize.
        parts: Its summands.
        inputs: The inputs that it added.
        predictions: The first prediction of each summand.
        said: The automatic choices, one sentence each.
        constants: The initializers that it added.
    """

    value: Tensor
    parts: list[Part]
    inputs: list[Tensor]
    predictions: list[Prediction]
    said: list[str]
    constants: list[Tensor]

    @property
    def not_negative(self) -> bool:
        """Whether the value cannot be negative."""
        return all(part.not_negative and part.weight >= 0 for part in self.parts)


def default_output(outputs: Sequence[ir.Value]) -> ir.Value | None:
    """Returns the first floating-point output, or the input of the ZipMap that computes it."""
    for value in outputs:
        value = mapped_tensor(value) or value
        tensor = value.type is None or isinstance(value.type, ir.TensorType)
        if tensor and is_float(value):
            return value
    return None


@dataclass
class _Scene:
    """The model's tensors and the inputs that losses add; implements `Sources`.

    Attributes:
        tape: Receives the nodes.
        find: Returns the training step's tensor for a name of the model, or None.
        names: The names of all tensors.
        outputs: The model's outputs.
        declared: The inputs that the user declared.
        own: Returns the model's tensor for one of the training step.
        base: See `compute`.
        added: The inputs that losses added, by name, each with the name of the model's tensor that
            it is compared with.
    """

    tape: Tape
    find: Callable[[str], Tensor | None]
    names: Sequence[str]
    outputs: Sequence[ir.Value]
    declared: Inputs
    own: Callable[[ir.Value], ir.Value]
    base: Callable[[ir.Value], ir.Value] | None
    added: dict[str, tuple[Tensor, str]] = field(default_factory=dict)
    owners: dict[str, Loss] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)
    predictions: dict[int, tuple[Loss | None, Prediction]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def tensor(self, name: str | None, who: str) -> Tensor:
        """Returns a tensor by name, or the default output."""
        if name is not None:
            found = self.find(name)
            if found is None:
                hint = did_you_mean(name, self.names)
                raise ModelError(f"loss {who}: the model has no tensor '{name}'; {hint}")
            return found
        value = default_output(self.outputs)
        found = None if value is None else self.find(value.name or "")
        if found is None:
            listed = ", ".join(f"'{v.name}' ({v.type or 'unknown'})" for v in self.outputs)
            raise ModelError(
                f"loss {who}: the model has no floating-point output, only {listed}; name another "
                "tensor with output="
            )
        return found

    def prediction(
        self, loss: Loss, name: str | None, reads: Reads = "values", axis: int | None = None
    ) -> tuple[Tensor, int | None]:
        """See `ortops.losses.loss.Sources`."""
        given = self.tensor(name, loss.name)
        if not is_float(given.value):
            raise ModelError(
                f"loss {loss.name}: tensor '{given.name}' must be floating-point, got type "
                f"{given.value.dtype}; name the tensor that it is computed from"
            )
        _check_rank(loss, given, self._name(given.value))
        found = squashed(given.value)
        axis = found.axis if axis is None and found is not None else axis
        if axis is not None and axis < 0 and given.shape is not None:
            axis += len(given.shape)
        if axis is None and loss.default_target == "labels" and len(given.shape or ()) > 2:
            self.say(
                f"loss {loss.name} uses axis 1 of {self._shown(given.value)}, of shape "
                f"{list(given.shape or ())}, as the class axis; use axis=-1 for the last one"
            )
        tensor = self._read(loss, given, found, reads)
        if id(loss) not in self.predictions:
            self._remember(loss, given, tensor, found, reads, axis)
        return _wide(tensor), axis

    def _read(self, loss: Loss, given: Tensor, found: Squashed | None, reads: Reads) -> Tensor:
        """Returns what a loss reads of a tensor, in the form in which it reads it."""
        if reads == "values" or found is None:
            part = partly_squashed(given.value) if reads == "logits" else None
            if part is not None:
                at = self._shown(*part.all_logits)
                raise ModelError(
                    f"loss {loss.name} reads logits, but a part of {self._shown(given.value)} "
                    f"comes from {self._node(part)}; name the logits with output={at}"
                )
            if reads in ("probabilities", "log_probabilities"):
                what = reads.replace("_", "-")
                self.say(
                    f"loss {loss.name} reads {self._shown(given.value)} as {what}, although no "
                    "known form of Softmax or Sigmoid computes it"
                )
            return given
        if reads == "logits":
            return self._logits(loss, given, found)
        if reads == "log_probabilities":
            is_logarithm = found.kind == "log_softmax"
            return given if is_logarithm else self._logarithms(loss, given, found)
        if found.kind != "log_softmax":
            return given
        self.say(
            f"loss {loss.name} reads the exponential of the log-probabilities "
            f"{self._shown(given.value)}"
        )
        return op.Exp(given)

    def _remember(
        self,
        loss: Loss,
        given: Tensor,
        tensor: Tensor,
        found: Squashed | None,
        reads: Reads,
        axis: int | None,
    ) -> None:
        """Records the first prediction that a loss reads, for metrics."""
        kinds: dict[Any, Kind] = {None: "values", "log_softmax": "log_probabilities"}
        kind = kinds.get(found and found.kind, "probabilities") if reads == "values" else reads
        ignored = getattr(loss, "ignore_index", None)
        is_given_probabilities = getattr(loss, "probabilities", False) is True
        self.predictions[id(loss)] = (  # the loss is stored, so its id stays unique
            loss,
            Prediction(
                tensor,
                kind,
                None if axis is None else int(axis),  # JSON cannot store numpy's integers
                ignored=None if ignored is None else int(ignored),
                output=self._name(given.value),
                shifted=getattr(loss, "shifts_labels", False),
                shared={name: getattr(loss, name) for name in loss.shared},
                bounded=reads == "logits" and found is None and may_be_bounded(given.value),
                form="probabilities"
                if is_given_probabilities
                else "numbers" * (reads == "values" != kind),
                sample_weight=loss.sample_weight,
            ),
        )

    def logits_of(self, loss: Loss, scores: Tensor, name: str | None) -> Tensor:
        """See `ortops.losses.loss.Sources`."""
        found = squashed(scores.value)
        name = self._shown(self.tensor(name, loss.name).value)
        part = found or partly_squashed(scores.value)
        if part is None:
            self.say(
                f"loss {loss.name} reads the class scores of {name} as logits, as no known form of "
                "Sigmoid computes them"
            )
            return _wide(scores)
        if found is None or found.kind != "sigmoid" or not found.all_logits:
            raise ModelError(
                f"loss {loss.name} reads logits of independent classes, but the class scores of "
                f"{name} come from {self._node(part)}; name the logits with scores="
            )
        self.say(
            f"loss {loss.name} reads {self._shown(*found.all_logits)}, the logits before "
            f"{self._node(found)}, as the class scores of {name}"
        )
        return _wide(self._before(found))

    def teacher(self, loss: Loss, model: ModelLike, name: str | None) -> Tensor:
        """See `ortops.losses.loss.Sources`."""
        put = put_teacher(self.tape, model, self.find)
        self.constants += put.constants
        value = default_output(put.outputs) if name is None else put.values.get(name)
        if value is None:
            raise ModelError(
                f"loss {loss.name}: the teacher has no "
                + ("floating-point output" if name is None else f"tensor '{name}'")
                + f"; {did_you_mean(name or '', put.values)}"
            )
        found = squashed(value)
        if found is not None and not found.all_logits:
            raise ModelError(
                f"loss {loss.name}: the teacher's '{name or value.name}' holds probabilities, and "
                "no tensor before it holds their logits; name the logits with teacher="
            )
        return self._logits_of(value)

    def without_adapter(self, loss: Loss, name: str | None) -> Tensor:
        """See `ortops.losses.loss.Sources`."""
        if self.base is None:
            raise ModelError(f"loss {loss.name}: it needs a training step; use another loss here")
        try:
            return self._logits_of(self.base(self.own(self.tensor(name, loss.name).value)))
        except ModelError as error:
            raise ModelError(f"loss {loss.name}: {error}") from error

    def _logits_of(self, value: ir.Value) -> Tensor:
        """Returns a value, or the logits in front of a Softmax or Sigmoid that computes it."""
        found = squashed(value)
        if found is None or not found.all_logits:
            return _wide(self.tape.tensor(value))
        if found.kind == "complement" or found.opposite:
            return self._log_p(found)
        return _wide(self._before(found))

    def _logits(self, loss: Loss, given: Tensor, found: Squashed) -> Tensor:
        """Returns the tensor before a Softmax, or logarithms of probabilities if there is none."""
        of_classes = loss.default_target == "labels"
        has_pair = found.kind == "complement" or (found.opposite and of_classes)
        if found.all_logits and not has_pair:
            if found.kind != "sigmoid" and found.axis is None and not of_classes:
                raise ModelError(
                    f"loss {loss.name}: tensor {self._shown(given.value)} holds the result of "
                    f"{self._node(found)}, whose classes are mutually exclusive, on an unknown "
                    "axis; use a loss with labels (SoftmaxCrossEntropy, or multiclass=True) and "
                    "axis=, or name other logits with output="
                )
            self.say(
                f"loss {loss.name} reads {self._shown(*found.all_logits)}, the logits before "
                f"{self._node(found)}, not {self._shown(given.value)}"
            )
            return self._before(found)
        if not of_classes:
            at = self._shown(*found.all_logits)
            raise ModelError(
                f"loss {loss.name}: tensor {self._shown(given.value)} holds probabilities, from "
                f"{self._node(found)}, and no tensor before it holds their logits; use a loss of "
                f"probabilities (BinaryCrossEntropy), or name the logits with output={at}"
            )
        return self._logarithms(loss, given, found)

    def _logarithms(self, loss: Loss, given: Tensor, found: Squashed) -> Tensor:
        """Returns log p, computed from logits without overflow if possible, else from p."""
        exact = found.squashed_axis is not None or found.kind in ("sigmoid", "complement")
        if found.all_logits and exact:
            self.say(
                f"loss {loss.name} reads the logarithms of the probabilities "
                f"{self._shown(given.value)}, computed from {self._shown(*found.all_logits)}, the "
                f"logits before {self._node(found)}"
            )
            return self._log_p(found)
        smallest = np.finfo(given.dtype).tiny
        self.say(
            f"loss {loss.name} reads the logarithms of the probabilities "
            f"{self._shown(given.value)}, clamped at log {smallest:.3g}"
        )
        return op.Log(op.Max(given, np.array(smallest, given.dtype)))

    def _before(self, found: Squashed) -> Tensor:
        """Returns the logits of probabilities, in the layout of the probabilities."""
        return unrolled(self._joined(found, lambda each, logits: logits))

    def _log_p(self, found: Squashed) -> Tensor:
        """Returns the logarithms of probabilities, in the layout of the probabilities."""
        return unrolled(self._joined(found, _log_p_of))

    def _joined(
        self, found: Squashed, function: Callable[[Squashed, Tensor], Tensor]
    ) -> Steps[Tensor]:
        """Returns what a function makes of logits, in the layout of the probabilities."""
        if found.logits is not None:
            return self._moved(function(found, self._known(found.logits)), found)
        parts: list[Tensor] = []
        for each in found.joined:
            part: Tensor = yield self._joined(each, function)
            parts.append(part)
        return self._moved(op.Concat(*parts, axis=found.joined_axis), found)

    def _name(self, value: ir.Value) -> str:
        return self.own(value).name or ""

    def _shown(self, *values: ir.Value) -> str:
        """Returns the quoted names of tensors in the user's model."""
        return ", ".join(f"'{self._name(value)}'" for value in values)

    def _node(self, found: Squashed) -> str:
        """Describes the Softmax or Sigmoid node in the user's model."""
        return describe(self.own(found.node.outputs[0]).producer() or found.node)

    def _known(self, value: ir.Value) -> Tensor:
        found = self.find(self._name(value))
        return self.tape.tensor(value) if found is None else found

    def _moved(self, tensor: Tensor, found: Squashed) -> Tensor:
        """Applies the nodes (Reshape, Transpose, …) that follow the Softmax or Sigmoid."""
        value = tensor.value
        for node, source, result in found.path:
            copy = copy_node(node, {source: value})
            for output in copy.outputs:
                output.type = output.shape = None
            self.tape.append(copy)
            self.tape.infer(copy)
            value = copy.outputs[list(node.outputs).index(result)]
        return self.tape.tensor(value) if found.path else tensor

    def input(self, loss: Loss, name: str, dtype: Any, shape: Shape, like: Tensor) -> Tensor:
        """See `ortops.losses.loss.Sources`."""
        _, looked_at = self.predictions.get(id(loss), (loss, None))
        compared = self._name(like.value) if looked_at is None else looked_at.output
        if name in self.added:
            tensor, other = self.added[name]
            if other != compared and loss.target != name and name not in self.declared:
                raise ModelError(
                    f"loss {loss.name}: '{name}' is already the target of another loss "
                    f"({self.owners[name].name}); give each its own with target="
                )
            if tensor.dtype != np.dtype(dtype):
                raise ModelError(
                    f"loss {loss.name}: input '{name}' must have type {np.dtype(dtype)}, but "
                    f"another loss reads it as {tensor.dtype}; give each its own with target="
                )
        else:
            tensor = self.declare(name, dtype, shape, loss)
            if shape is not None and tensor.ndim != len(shape):
                raise ModelError(
                    f"inputs: '{name}' must have {len(shape)} dimensions, {list(shape)}, because "
                    f"loss {loss.name} compares it with '{like.name}', got {tensor.ndim}"
                )
            self.added[name] = (tensor, compared)
            self.owners[name] = loss
        if looked_at is not None and looked_at.target is None:
            form, of = looked_at.form, looked_at.tensor.shape
            known = shape is not None and of is not None and is_float(tensor.value)
            if known and tensor.ndim != len(of or ()):
                form = "other"
            looked_at = replace(looked_at, target=tensor.name, form=form)
            self.predictions[id(loss)] = (loss, looked_at)
        return tensor

    def sample_weights(self, loss: Loss, name: str, dtype: Any, rows: Dim) -> Tensor:
        """See `ortops.losses.loss.Sources`."""
        if name not in self.added:
            tensor = self.declare(name, dtype, (rows,), loss)
            if tensor.name != name:
                raise ModelError(
                    f"loss {loss.name}: the model or the training already has a tensor '{name}'; "
                    "give sample_weight another name"
                )
            if not is_float(tensor.value):
                raise ModelError(
                    f"inputs: '{name}' must be floating-point, because it is the sample_weight of "
                    f"loss {loss.name}, got type {tensor.dtype}"
                )
            self.added[name], self.owners[name] = (tensor, ""), loss
        elif self.added[name][1]:
            raise ModelError(
                f"loss {loss.name}: '{name}' is already the target of a loss "
                f"({self.owners[name].name}); give sample_weight another name"
            )
        return self.added[name][0]

    def declare(self, name: str, dtype: Any, shape: Shape, loss: Loss | None = None) -> Tensor:
        """Adds an input, with the type and shape that the user declared, if any."""
        is_named = loss is not None and loss.target == name
        who = "inputs" if loss is None or name in self.declared else f"loss {loss.name}"
        if name in self.declared:
            dtype, declared = self.declared[name]
            shape = tuple(int(d) if isinstance(d, np.integer) else d for d in declared)
        tensor = self.tape.input(name, np.dtype(dtype), shape or ())
        if tensor.name != name and (name in self.declared or is_named):
            raise ModelError(
                f"{who}: the model or the training already has a tensor '{name}'; give the new "
                "input another name"
            )
        if shape is None:
            tensor.value.shape = None
        return tensor

    def say(self, sentence: str) -> None:
        """Records an automatic choice, once, for the log."""
        if sentence not in self.said:
            self.said.append(sentence)


def compute(
    loss: Loss | Function,
    tape: Tape,
    find: Callable[[str], Tensor | None],
    names: Sequence[str],
    outputs: Sequence[ir.Value],
    declared: Inputs | None = None,
    own: Callable[[ir.Value], ir.Value] = lambda value: value,
    base: Callable[[ir.Value], ir.Value] | None = None,
) -> Computed:
    """Emits a loss.

    A loss function gets a Tensor for each parameter, found by name: a tensor of the model, or an
    input in ``declared``. ``labels`` and ``targets`` are new inputs: integers, in the shape of the
    first parameter's tensor without axis 1, and numbers of its type and shape. If the first
    parameter has any other name, it gets the default output. Further parameters with a default
    keep it. The function returns a scalar, or a pair of a sum and a count. The loss is then their
    quotient, or 0 if the count is 0, and the losses of parts of a batch add up exactly.

    float16 and bfloat16 tensors are read as float32, and so are targets.

    Args:
        loss: The result of `resolve`.
        tape: Receives the nodes and the new inputs.
        find: Returns the training step's tensor for a name of the model, or None.
        names: The names of the model's tensors, for messages.
        outputs: The model's outputs.
        declared: The inputs that the user declared.
        own: Returns the model's tensor for one of the training step.
        base: Returns what the model computes for one of its tensors without its adapter, for
            losses that compare with it.

    Returns:
        The emitted loss.

    Raises:
        ArgumentError: If ``declared`` or the function's parameters are invalid.
        ModelError: If the loss is not a scalar, or is incompatible with the model.
    """
    scene = _Scene(tape, find, names, outputs, _checked(declared or {}, find), own, base)
    parts = loss.parts(scene) if isinstance(loss, Loss) else [_call(loss, scene)]
    parts = [_checked_part(part) for part in parts]
    unread = [name for name in scene.declared if name not in scene.added]
    if unread:
        raise ModelError(
            f"inputs: the loss does not read '{unread[0]}'; leave it out, or give a parameter or "
            "target of the loss this name"
        )
    value = parts[0].value
    if len(parts) > 1 or parts[0].weight != 1:
        value = parts[0].weight * parts[0].value
        for part in parts[1:]:
            value = value + part.weight * part.value
    for part in parts:
        if part.batch_coupled:
            scene.say(
                f"loss {part.label} couples the rows of a batch: the loss of a batch is not the "
                "average of the losses of its parts"
            )
    inputs = [tensor for tensor, _ in scene.added.values()]
    predictions = [looked_at for _, looked_at in scene.predictions.values()]
    return Computed(value, parts, inputs, predictions, scene.said, scene.constants)


def _checked(declared: Inputs, find: Callable[[str], Tensor | None]) -> Inputs:
    """Checks the declared inputs."""
    if not isinstance(declared, Mapping):
        raise ArgumentError(
            "inputs must be a dict of names to a dtype and dimensions, got "
            f"{type(declared).__name__}"
        )
    for name, given in declared.items():
        try:
            dtype, dims = given
            fits = dtype is not None and not isinstance(dims, str) and all(map(_is_size, dims))
            ir.DataType.from_numpy(np.dtype(dtype))
        except (TypeError, ValueError):
            fits = False
        if not fits or not isinstance(name, str):
            raise ArgumentError(
                f"inputs: {name!r} must be declared with a dtype and dimensions, for example "
                f'(np.float32, ["batch", 3]), got {given!r}'
            )
        if find(name) is not None:
            raise ModelError(
                f"inputs: the model already has a tensor '{name}'; give the new input another name"
            )
    return declared


def _is_size(dim: object) -> bool:
    """Whether a dimension is valid: a number, a symbol, or None for any size."""
    size = integer(dim)
    return size >= 0 if size is not None else dim is None or (isinstance(dim, str) and dim != "")


def _call(loss: Function, scene: _Scene) -> Part:
    """Calls a loss function with a tensor for each parameter."""
    name = getattr(loss, "__name__", type(loss).__name__)
    parameters = _parameters(loss, name)
    looked_at = _looked_at(parameters, scene, name)
    positional: list[Any] = []
    named: dict[str, Tensor] = {}
    for number, (parameter, details) in enumerate(parameters.items()):
        found = scene.find(parameter)
        if found is not None:
            argument = _wide(found)
        elif parameter in scene.declared or parameter in ("labels", "targets"):
            dtype, shape = _wide(looked_at).dtype, looked_at.shape
            if parameter == "labels":
                dtype, shape = np.dtype(np.int64), _without_classes(shape)
            argument = scene.declare(parameter, dtype, shape)
            scene.added[parameter] = (argument, scene._name(looked_at.value))
        elif number == 0:
            argument = _wide(looked_at)
        elif details.default is not inspect.Parameter.empty:
            if details.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional.append(details.default)  # later parameters keep their positions
            continue
        else:
            raise _unknown(name, parameter, scene)
        if details.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(argument)
        else:
            named[parameter] = argument
    if not parameters:
        raise ArgumentError(f"loss {name} has no parameters; {_EXPLAINED}")
    targets = [each for each in ("labels", "targets") if each in scene.added]
    target = targets[0] if targets else None  # declared inputs may be masks or weights
    prediction = _prediction(looked_at, target, scene.own(looked_at.value).name or "")
    scene.predictions[0] = (None, prediction)
    returned = loss(*positional, **named)
    if len(parameters) == 1 and isinstance(returned, Tensor) and returned.shape not in (None, ()):
        raise ModelError(
            f"loss {name} must be a scalar, got shape {list(returned.shape or ())}; {_EXPLAINED}"
        )
    return _part_of(name, returned)


_EXPLAINED = (
    "a loss is a function of Tensors, the prediction and the targets, that returns a scalar "
    "Tensor, such as lambda prediction, targets: op.ReduceMean((prediction - targets) ** 2, "
    "keepdims=0)"
)


def _unknown(name: str, parameter: str, scene: _Scene) -> ModelError:
    shown = ", ".join(f"'{each}'" for each in list(scene.names)[:20])
    more = f" and {len(scene.names) - 20} more" if len(scene.names) > 20 else ""
    own = ", ".join(f"'{each}'" for each in ("labels", "targets", *scene.declared))
    return ModelError(
        f"loss {name}: no tensor for parameter '{parameter}'; use one of the model's tensors "
        f"({shown}{more}) or {own}, or declare an input, for example "
        f'inputs={{"{parameter}": (np.float32, ["batch"])}}'
    )


def _part_of(name: str, returned: object) -> Part:
    """Returns the loss that a function returned, a Tensor or a pair of a sum and a count."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        total, count = returned
        if not isinstance(total, Tensor) or not isinstance(count, Tensor):
            raise ModelError(
                f"loss {name} must return a Tensor or a pair of Tensors, the sum and the count, "
                f"got {returned!r}"
            )
        count = _scalar(count, name).astype(total.dtype)
        return Part(name, 1.0, mean_of(_scalar(total, name), count), count)
    if not isinstance(returned, Tensor):
        raise ModelError(f"loss {name} must return a Tensor, got {returned!r:.80}; {_EXPLAINED}")
    return Part(name, 1.0, _scalar(returned, name), None)


def _without_classes(shape: Shape) -> Shape:
    """Returns the shape of labels; sizes after the first are unknown, as the class axis is."""
    if shape is None or len(shape) < 2:
        return shape
    return (shape[0], *[None] * (len(shape) - 2))


def _looked_at(parameters: Mapping[str, inspect.Parameter], scene: _Scene, name: str) -> Tensor:
    """Returns the prediction of a loss function: the first parameter that the model computes.

    If the first parameter has any other name, the prediction is the default output.
    """
    for number, parameter in enumerate(parameters):
        found = scene.find(parameter)
        if found is not None and is_float(found.value) and found.value.producer() is not None:
            return found
        added = parameter in ("labels", "targets") or parameter in scene.declared
        if number == 0 and found is None and not added:
            break
    return scene.tensor(None, name)


def _prediction(tensor: Tensor, target: str | None, output: str) -> Prediction:
    found = squashed(tensor.value)
    kind: Kind = "logits"
    if found is not None:
        kind = "log_probabilities" if found.kind == "log_softmax" else "probabilities"
    axis = None if found is None else found.axis
    if axis is not None and axis < 0 and tensor.shape is not None:
        axis += len(tensor.shape)
    return Prediction(tensor, kind, axis, target, output=output)


def _log_p_of(found: Squashed, logits: Tensor) -> Tensor:
    """Returns the logarithms of the probabilities that a function made of logits."""
    logits = _wide(logits)
    if found.opposite:  # σ(z) is the softmax of −z / 2 and z / 2
        return op.LogSoftmax(0.5 * logits, axis=found.squashed_axis)
    if found.kind == "sigmoid":
        return -softplus(-logits)
    if found.kind == "complement":
        of_yes, of_no = -softplus(-logits), -softplus(logits)
        pair = [of_no if _is_subtraction(value) else of_yes for value in found.node.inputs]
        return op.Concat(*pair, axis=attribute_values(found.node)["axis"])
    return op.LogSoftmax(logits, axis=found.squashed_axis)


def _wide(tensor: Tensor) -> Tensor:
    """Casts 16-bit tensors to float32, because sums in 16 bits are inaccurate.

    A float16 gradient then overflows only when it enters the model, not inside the loss.
    """
    narrow = tensor.value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return tensor.astype(np.float32) if narrow else tensor


def _is_subtraction(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    return node is not None and node.op_type == "Sub"


def _check_rank(loss: Loss, given: Tensor, name: str) -> None:
    """Raises an error if a tensor cannot have the rank that the model declares."""
    declared, inferred = given.value.shape, _inferred_shape(given)
    if declared is not None and inferred is not None and len(inferred) != len(declared):
        raise ModelError(
            f"loss {loss.name}: '{name}' is declared with {_dimensions(declared)}, but its "
            f"node computes {_dimensions(inferred)}; declare these in the model"
        )
    shape = given.shape
    if getattr(loss, "shifts_labels", False) and shape and len(shape) == 3 and shape[1] == 1:
        raise ModelError(
            f"loss {loss.name}: output '{name}' has one position only, of {list(shape)}, which has "
            "no next token; if the file computes the logits of the last token only "
            "(prune_lm_head), tune its folder with ortops.llm.FineTuning or `ortops tune`, which "
            "compute those of all tokens"
        )


def _inferred_shape(given: Tensor) -> ir.Shape | None:
    """Returns the shape of a tensor by its node, whatever the model declares."""
    value, node = given.value, given.value.producer()
    if node is None or node.domain or inner_graphs(node):
        return None
    declared, value.shape = value.shape, None
    try:
        given.tape.infer(node)
        return value.shape
    except ModelError:
        return None
    finally:
        value.shape = declared


def _dimensions(shape: ir.Shape) -> str:
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape]
    listed = ", ".join("?" if dim is None else str(dim) for dim in dims)
    return f"the dimensions [{listed}]"


def _scalar(tensor: Tensor, name: str) -> Tensor:
    """Returns the value of a loss, which must be a scalar."""
    if tensor.shape is None:
        tensor = op.Reshape(tensor, np.zeros(0, np.int64))  # a run fails unless it is a scalar
    elif tensor.shape != ():
        raise ModelError(
            f"loss {name} must be a scalar, got shape {list(tensor.shape)}; reduce it, for example "
            "with op.ReduceMean(loss, keepdims=0)"
        )
    return tensor


def _checked_part(part: Part) -> Part:
    value = _scalar(part.value, part.label)
    if value.dtype.kind in "iub":
        raise ModelError(f"loss {part.label} must be floating-point, got type {value.dtype}")
    return replace(part, value=value)


def _parameters(loss: Function, name: str) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a loss function, each of which must be a single tensor."""
    parameters = parameters_of(f"loss {name}", loss)
    for parameter, details in parameters.items():
        if details.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"loss {name}: replace the variable parameter '*{parameter}' by one named "
                "parameter for each tensor"
            )
    return parameters
