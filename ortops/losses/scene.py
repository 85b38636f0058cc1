"""What a loss reads of a model, and the inputs that it adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.errors import ModelError, did_you_mean
from ortops.graph.constants import Dim
from ortops.graph.edit import (
    Steps,
    attribute_values,
    copy_node,
    describe,
    is_float,
    mapped_tensor,
    unrolled,
)
from ortops.graph.files.loading import ModelLike
from ortops.graph.nesting import inner_graphs
from ortops.graph.squashing import Squashed, may_be_bounded, partly_squashed, squashed
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses.loss import Loss, Part, Reads, Shape, softplus
from ortops.losses.teacher import put_teacher

Inputs: TypeAlias = Mapping[str, tuple[npt.DTypeLike, Sequence[Dim]]]
"""Declared inputs: dtype and dimensions by name."""

Kind: TypeAlias = Literal["logits", "probabilities", "log_probabilities", "values"]


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
class Scene:
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
                hint += f" (its outputs are {', '.join(repr(v.name) for v in self.outputs)})"
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
        _check_rank(loss, given, self.name_of(given.value))
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
        return wide(tensor), axis

    def class_axis(self, loss: Loss, name: str | None) -> int | None:
        """See `ortops.losses.loss.Sources`."""
        found = squashed(self.tensor(name, loss.name).value)
        return None if found is None else found.axis

    def _read(self, loss: Loss, given: Tensor, found: Squashed | None, reads: Reads) -> Tensor:
        """Returns what a loss reads of a tensor, in the form in which it reads it."""
        if found is not None:
            self._refuse_one_class(loss, given, found)
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

    def _refuse_one_class(self, loss: Loss, given: Tensor, found: Squashed) -> None:
        """Rejects a Softmax over one class; losses with labels check that themselves."""
        sizes, of_classes = given.shape, loss.default_target == "labels"
        if of_classes or found.axis is None or sizes is None or sizes[found.axis] != 1:
            return
        raise ModelError(
            f"loss {loss.name}: tensor {self._shown(given.value)}, of shape {list(sizes)}, holds "
            f"the result of {self._node(found)} over one class, whose probability is always 1; use "
            "a Sigmoid in its place"
        )

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
                output=self.name_of(given.value),
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
            return wide(scores)
        if found is None or found.kind != "sigmoid" or not found.all_logits:
            raise ModelError(
                f"loss {loss.name} reads logits of independent classes, but the class scores of "
                f"{name} come from {self._node(part)}; name the logits with scores="
            )
        self.say(
            f"loss {loss.name} reads {self._shown(*found.all_logits)}, the logits before "
            f"{self._node(found)}, as the class scores of {name}"
        )
        return wide(self._before(found))

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
            return wide(self.tape.tensor(value))
        if found.kind == "complement" or found.opposite:
            return self._log_p(found)
        return wide(self._before(found))

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

    def name_of(self, value: ir.Value) -> str:
        """Returns the name of a tensor in the user's model."""
        return self.own(value).name or ""

    def _shown(self, *values: ir.Value) -> str:
        """Returns the quoted names of tensors in the user's model."""
        return ", ".join(f"'{self.name_of(value)}'" for value in values)

    def _node(self, found: Squashed) -> str:
        """Describes the Softmax or Sigmoid node in the user's model."""
        return describe(self.own(found.node.outputs[0]).producer() or found.node)

    def _known(self, value: ir.Value) -> Tensor:
        found = self.find(self.name_of(value))
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
        compared = self.name_of(like.value) if looked_at is None else looked_at.output
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


def _log_p_of(found: Squashed, logits: Tensor) -> Tensor:
    """Returns the logarithms of the probabilities that a function made of logits."""
    logits = wide(logits)
    if found.opposite:  # σ(z) is the softmax of −z / 2 and z / 2
        return op.LogSoftmax(0.5 * logits, axis=found.squashed_axis)
    if found.kind == "sigmoid":
        return -softplus(-logits)
    if found.kind == "complement":
        of_yes, of_no = -softplus(-logits), -softplus(logits)
        pair = [of_no if _is_subtraction(value) else of_yes for value in found.node.inputs]
        return op.Concat(*pair, axis=attribute_values(found.node)["axis"])
    return op.LogSoftmax(logits, axis=found.squashed_axis)


def wide(tensor: Tensor) -> Tensor:
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
