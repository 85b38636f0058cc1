"""Adds a training algorithm to an inference model, as ``training_info`` of the ONNX standard."""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Required, TypedDict, Unpack

import numpy as np
import onnx
import onnx_ir as ir

from ortops import losses, optimizers
from ortops._common.arguments import number, whole_number
from ortops._common.garbage_collection import pause_collection
from ortops._common.notes import say_note
from ortops._common.other_names import ARGUMENTS_OF_BUILD, explains_arguments, has_arguments_of
from ortops.engine.building.algorithm import Algorithm, write_algorithm
from ortops.engine.building.clipping import Clipping
from ortops.engine.building.groups import Groups, difference, optimizers_of
from ortops.engine.building.parameters import quantized
from ortops.engine.building.preparation import (
    BatchNormalization,
    Place,
    Prepared,
    prepare_for_training,
)
from ortops.engine.building.reachability import passed_through, reached
from ortops.engine.building.recipe import recipe_of
from ortops.engine.building.updates import (
    LossScaling,
    Rates,
    Updates,
    as_float32,
    emit_gradients,
    infinite_entries,
    unless_skipped,
)
from ortops.engine.building.without_adapter import without_adapter
from ortops.engine.lowering import lower_prepared
from ortops.engine.trainable.handed_graph import hand_over
from ortops.engine.trainable.metadata import (
    ENTRIES,
    MAIN,
    METADATA_KEY,
    LossPart,
    PredictionNote,
)
from ortops.engine.trainable.step_graph import flatten
from ortops.engine.trainable.training_mode import TrainingCopies, copy_in_training_mode, reveal
from ortops.errors import ArgumentError, ModelError, OrtopsError
from ortops.graph.edit import ancestor_nodes, values_of
from ortops.graph.files import external, loading
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import read_metadata, write_metadata
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import operators_of_domain
from ortops.graph.files.saving import write_model
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses import Loss, LossLike
from ortops.losses.loss import Function
from ortops.optimizers import Optimizer, UpdateRule

logger = logging.getLogger("ortops")


class BuildSettings(TypedDict, total=False):
    """The arguments of `build_training_model` besides the model."""

    loss: Required[LossLike]
    optimizer: Required[str | Optimizer | type[Optimizer] | UpdateRule]
    trainable: Sequence[str] | None
    inputs: losses.Inputs | None
    batch_normalization: BatchNormalization
    clip_norm: float | None
    clip_value: float | None
    ema_decay: float | None
    groups: Groups | None
    seed: int


@explains_arguments(**ARGUMENTS_OF_BUILD)
def build_training_model(
    model: ModelLike,
    *,
    loss: LossLike,
    optimizer: str | Optimizer | type[Optimizer] | UpdateRule,
    trainable: Sequence[str] | None = None,
    inputs: losses.Inputs | None = None,
    batch_normalization: BatchNormalization = "auto",
    clip_norm: float | None = None,
    clip_value: float | None = None,
    ema_decay: float | None = None,
    groups: Groups | None = None,
    seed: int = 0,
) -> onnx.ModelProto:
    """Adds a training algorithm to a model, as ``training_info`` of the ONNX standard.

    The inference graph is not changed, so the file still runs in every runtime that ran it before.
    The algorithm consists of the loss, a Gradient node, an optimizer node for each parameter and a
    step counter. If the model has BatchNormalization or Dropout, the algorithm also has a copy of
    these nodes, and of all nodes that depend on them, in training mode. The training state
    (``<parameter>.V`` …, ``step``, ``learning_rate``) is part of the file, so the file is the
    checkpoint as well.

    If the model has an adapter (`ortops.lora`), B includes the scaling, but the optimizer updates
    B / scaling, as in PEFT. So do clipping and weight decay, and the state is that of B / scaling.

    Parameters of type float16 or bfloat16 keep their type. The optimizer updates a float32 copy,
    the state ``<parameter>.master``, with optimizer state in float32, and the parameter is this
    copy, rounded. The losses and targets of these models are float32.

    If gradients pass through float16, the loss is multiplied by the state ``loss_scale`` before
    differentiation, and the gradients are divided by it, so that small gradients are not rounded to
    0. If a gradient is infinite or NaN nevertheless, the step is skipped: it changes no parameter,
    optimizer state or running statistic, does not increment ``step``, and halves the scale (down to
    2⁻¹⁶). After 2000 consecutive steps without an overflow (``loss_scale.good_steps``), the scale
    is doubled (up to 2²⁴).

    The learning rate may be a schedule (`ortops.schedules`). Then the learning rate of a step is
    the state ``learning_rate``, the peak, times the schedule's factor for the number of finished
    steps, and is an output named ``scheduled_learning_rate``. Skipped steps do not count.

    `ortops.step_graph` and `TrainingSession` compute gradients through bfloat16 in float32, because
    onnxruntime's CPU provider has no bfloat16 kernels. The file itself does not run there.

    Args:
        model: An inference model: a ModelProto, its bytes or its path. A model below opset 21 is
            converted as a whole, and a warning is logged.
        loss: A loss of `ortops.losses`, its name, or a function that maps Tensors to a scalar
            Tensor (see `ortops.losses.compute` for its parameters).
        optimizer: An optimizer of `ortops.optimizers`, its name, or an update rule.
        trainable: The parameters to train: names of initializers, patterns of names such as
            ``"head.*"``, or (patterns of) the scopes of the nodes that read them, such as
            ``"encoder.layer.5.*"``. Patterns that begin with ``!`` exclude, in any order:
            ``["*", "!eye", "!*.bias"]``; if there are no others, they exclude from ``*``, which is
            all weights. The default is every weight that the loss depends on. Whether
            an initializer is a weight is decided by the operators that read it and by its values:
            running statistics, sizes, limits, masks, tables of sines and other constants are not
            (a warning is logged if one may be a weight, and `ortops check` lists the reasons). An
            initializer given by its exact name is trained unless it is excluded. Weights in
            Constant nodes, branches, loop bodies and functions count as well; they become
            initializers of the graph, and a warning is logged. If the model has an adapter
            (`ortops.lora`), the default is to train only the adapter.
        inputs: Additional inputs that the loss reads: a dtype and dimensions for each name, such as
            ``{"mask": (np.float32, ["batch", "time"])}``.
        batch_normalization: Which BatchNormalization layers normalize by batch statistics and
            update their running statistics: ``"auto"`` for those whose scale or bias is trained,
            ``"train"`` for all, ``"frozen"`` for none. The others run in inference mode.
        clip_norm: The maximum norm of all gradients together, > 0. Gradients are multiplied by
            ``min(1, clip_norm / (norm + 1e-6))``, as in PyTorch's ``clip_grad_norm_``.
            The records of `ortops.TrainingSession.fit` have the norm as ``gradient_norm``.
        clip_value: The maximum absolute value of each gradient element, > 0. If both are given,
            elements are clipped before the norm is computed. With loss scaling, the unscaled
            gradients are clipped.
        ema_decay: The decay of an exponential moving average of the parameters, in [0, 1). Each
            step sets the state ``<parameter>.ema``, which starts at the parameter's value, to
            ``ema_decay · ema + (1 - ema_decay) · parameter``. It is float32 if the parameter has 16
            bits. Skipped steps do not change it.
        groups: Optimizer settings for some of the parameters, by names and patterns as in
            ``trainable``: ``{"*.bias": {"weight_decay": 0.0}, "head.*": {"learning_rate": 1e-2}}``.
            A key such as ``"!*.bias"`` means all others. If several patterns match a parameter,
            their settings are combined, and later ones take
            precedence. A learning rate is stored as a ratio to the optimizer's, so a schedule or an
            assignment to ``session.learning_rate`` changes both. The settings are the arguments of
            the optimizer's constructor; for a custom update rule, its keyword arguments and
            ``learning_rate``.
        seed: The initial value of the state ``seed``, which determines the elements that Dropout
            drops. Only models with Dropout have it.

    Returns:
        A new model; the argument is not changed.

    Raises:
        ArgumentError: If an argument is not valid for any model.
        ModelError: If the model is not valid, or loss, optimizer, trainable or groups do not fit
            it.

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
    result = build_light(
        model,
        loss=loss,
        optimizer=optimizer,
        trainable=trainable,
        inputs=inputs,
        clip_norm=clip_norm,
        clip_value=clip_value,
        ema_decay=ema_decay,
        groups=groups,
        batch_normalization=batch_normalization,
        seed=seed,
        keep=True,
    )
    return result.attach()


@explains_arguments(**ARGUMENTS_OF_BUILD)
@has_arguments_of(build_training_model)
def build_training_file(
    model: ModelLike,
    path: str | os.PathLike[str],
    **settings: Unpack[BuildSettings],
) -> None:
    """Adds a training algorithm to a model, and writes the trainable file.

    The file has the same bytes as with ``save_model(build_training_model(model, …), path)``. If
    ``model`` is a path, its weights stay in that file until they are written, one after the other,
    as are the zeros of the optimizer's state. So this takes a few tensors of memory, whereas the
    model that `build_training_model` returns holds all of them.

    Args:
        model: See `build_training_model`, as for all other arguments.
        path: The trainable file, which may replace the model's file; see `ortops.save_model`.
        loss: A loss.
        optimizer: An optimizer.
        trainable: The parameters to train.
        inputs: Additional inputs that the loss reads.
        batch_normalization: Which BatchNormalization layers normalize by batch statistics.
        clip_norm: The maximum norm of all gradients together.
        clip_value: The maximum absolute value of each gradient element.
        ema_decay: The decay of an exponential moving average of the parameters.
        groups: Optimizer settings for some of the parameters.
        seed: The initial value of the state ``seed``, for Dropout.

    Raises:
        ArgumentError: If an argument is not valid for any model.
        ModelError: If the model is not valid, or loss, optimizer, trainable or groups do not fit
            it.
        OSError: If the file cannot be written; the old file is unchanged.

    Example:
        >>> import tempfile
        >>> import ortops
        >>> from ortops.docs import examples
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ortops.save_model(examples.mlp((4, 16, 2)), f"{folder}/model.onnx")
        ...     ortops.build_training_file(
        ...         f"{folder}/model.onnx",
        ...         f"{folder}/trainable.onnx",
        ...         loss="SoftmaxCrossEntropy",
        ...         optimizer="Adam",
        ...     )
        ...     ortops.TrainingSession(f"{folder}/trainable.onnx").steps_done
        0
    """
    write_model(path, build_light(model, **settings))


@loading.blame_model
@pause_collection()
def build_light(
    model: ModelLike | LightModel,
    *,
    trainable: Sequence[str] | None = None,
    batch_normalization: BatchNormalization = "auto",
    place: Place | None = None,
    keep: bool = False,
    **settings: Any,
) -> LightModel:
    """Returns a trainable model whose big data stay where they are; see `build_training_model`.

    Those that are zeros or copies of weights are computed when they are read.

    Args:
        model: The model; not changed.
        trainable: See `build_training_model`, as for all other arguments.
        batch_normalization: Which layers use batch statistics.
        place: Which training_info entry the algorithm becomes; the only one by default.
        keep: Whether data of a file stay in memory once they are read, until they are attached.
        **settings: The arguments of `plan_training`.
    """
    prepared = prepare_for_training(model, trainable, batch_normalization, place, keep=keep)
    plan = plan_training(prepared, **settings)
    for message in plan.said:
        say_note("%s", message)
    made = plan.write(recipe_of({**settings, "batch_normalization": batch_normalization}))
    if plan.unshaped:
        plan.differentiate(made)
    hand_over(made, prepared.graph)
    result = LightModel(made.proto, external.returned(made.data))
    external.let_go(made)
    return result


@dataclass(frozen=True)
class _Forward:
    """The loss on the tape, and what else a step computes before the gradients.

    Attributes:
        algorithm: The algorithm so far.
        learning_rate: The learning rate, 0-d float32.
        step: The number of finished steps, 0-d int64.
        seed: The seed of Dropout, 0-d int64; None without Dropout.
        loss: The loss.
        training: The nodes that were copied in training mode.
        copied_outputs: Outputs of the model that the loss depends on through their copies in
            training mode, by name, and these copies.
        statistics: The updated running statistics that the loss depends on, by initializer name.
    """

    algorithm: Algorithm
    learning_rate: Tensor
    step: Tensor
    seed: Tensor | None
    loss: losses.Computed
    training: TrainingCopies
    copied_outputs: Mapping[str, Tensor]
    statistics: Mapping[str, Tensor]

    def metadata(self) -> dict[str, object]:
        """Returns the roles of names, for the file."""
        return {
            "loss": self.loss.value.name,
            "learning_rate": self.learning_rate.name,
            "step": self.step.name,
            "training_copies": {copy.name: name for name, copy in self.copied_outputs.items()},
            "losses": [
                asdict(
                    LossPart(
                        *(part.value.name, part.label, part.weight),
                        "" if part.count is None else part.count.name,
                        *(part.is_sum, part.batch_coupled),
                    )
                )
                for part in self.loss.parts
            ],
            **_prediction_metadata(self.loss.predictions),
            "dropouts": self.training.dropouts,
            **({} if self.seed is None else {"seed": self.seed.name}),
            **({"not_negative": True} if self.loss.not_negative else {}),
        }


@dataclass(frozen=True)
class Plan:
    """A training algorithm before its gradients and updates are written.

    `build_training_model` writes it, and `ortops.engine.check` reports it.

    Attributes:
        prepared: The model.
        loss: The emitted loss.
        optimizer: The optimizer.
        parameters: The initializers that are trained.
        reasons: Why other floating-point initializers are not trained, by name.
        said: Messages about automatic choices.
        clipping: How gradients are clipped.
        ema_decay: The decay of the averages of parameters; None without averages.
        grouped: The optimizers of parameters that are in a group, by name.
        infinite: How many infinite entries parameters have, by name.
    """

    prepared: Prepared
    loss: losses.Computed
    optimizer: Optimizer
    parameters: Sequence[ir.Value]
    reasons: Mapping[str, str]
    said: Sequence[str]
    clipping: Clipping
    ema_decay: float | None
    grouped: Mapping[str, Optimizer]
    _forward: _Forward
    _scales_loss: bool
    infinite: Mapping[str, int]

    @property
    def notes(self) -> dict[str, Any]:
        """Descriptions of schedule, clipping, averages and groups for the file; none if unused."""
        schedule = self.optimizer.schedule
        averaging = self.optimizer.name if self.optimizer.average else ""
        if self.ema_decay is not None:
            averaging = f"ema_decay={self.ema_decay!r}"
        found: dict[str, Any] = {
            "schedule": "" if schedule is None else schedule.description,
            "clipping": str(self.clipping),
            "averaging": averaging,
            "groups": {n: difference(own, self.optimizer) for n, own in self.grouped.items()},
        }
        return {name: value for name, value in found.items() if value}

    @property
    def unshaped(self) -> list[str]:
        """The inputs without a shape, with which few models can be differentiated."""
        inputs = self.prepared.graph.inputs
        of_tensors = (v for v in inputs if v.type is None or isinstance(v.type, ir.TensorType))
        return [value.name or "" for value in of_tensors if value.shape is None]

    def differentiate(self, made: LightModel) -> None:
        """Differentiates what was written, and raises the error that a session would raise.

        Raises:
            OrtopsError: If that is not possible.
        """
        try:
            lower_prepared(flatten(made).model)
        except OrtopsError as error:
            if not self.unshaped:
                raise
            raise ModelError(
                f"model: input '{self.unshaped[0]}' has no shape, which its gradients need; "
                'declare one, such as ["batch", 4], where names stand for any size'
            ) from error

    def write(self, recipe: Mapping[str, Any] | None = None) -> LightModel:
        """Returns the trainable model, without the data of big tensors.

        Args:
            recipe: How it is built, for its metadata.
        """
        algorithm, step = self._forward.algorithm, self._forward.step
        with algorithm.tape:
            loss, updates = self._emit_updates()
        algorithm.outputs.sort(key=lambda tensor: tensor is algorithm.updates[step.name])
        result = self.prepared.result.proto
        counts = [part.count for part in self.loss.parts if part.count is not None]
        name = self.prepared.place.name
        write_algorithm(self.prepared.result, algorithm, [*counts, loss], name)
        metadata = self._forward.metadata() | updates.metadata() | self.notes
        if updates.scaling is not None:
            metadata |= updates.scaling.metadata()
        if recipe:
            metadata["recipe"] = dict(recipe)
        if name != MAIN:
            present = read_metadata(result.metadata_props, METADATA_KEY, "remove it") or {}
            metadata = {**present, ENTRIES: {**present.get(ENTRIES, {}), name: metadata}}
        write_metadata(result, METADATA_KEY, json.dumps(metadata))
        return self.prepared.result

    def _emit_updates(self) -> tuple[Tensor, Updates]:
        """Emits gradients and updates; returns the differentiated loss, and the updates."""
        algorithm, step, loss = self._forward.algorithm, self._forward.step, self.loss.value
        tape = algorithm.tape
        rates = Rates(algorithm, self._forward.learning_rate, step, self.optimizer)
        scaling: LossScaling | None = None
        if self._scales_loss:
            scaling = LossScaling.of(algorithm)
            scaled = loss * scaling.scale.astype(loss.dtype)
            loss = _named(scaled, "scaled_loss", tape.graph)
        gradients = emit_gradients(tape, loss, self.parameters)
        count = step + 1
        # Cast once, because onnxruntime may remove a rounding to float16 before some of the casts.
        gradients = [as_float32(gradient) for gradient in gradients]
        fixed: list[Tensor | None] = [None] * len(gradients)
        for place, parameter in enumerate(self.parameters):
            if parameter.name in self.infinite:
                fixed[place] = op.IsInf(as_float32(tape.tensor(parameter)))
                gradient = gradients[place]
                zero = np.zeros((), gradient.dtype)
                gradients[place] = op.Where(fixed[place], zero, gradient).with_shape_of(gradient)
        if scaling is not None:
            scaling.check_finite(gradients)
        step_new = algorithm.update(step.name, unless_skipped(scaling, count, step))
        tape.scope = "scaling/"
        scalings = [_scaling(self.prepared, parameter) for parameter in self.parameters]
        pairs = zip(gradients, scalings, strict=True)
        gradients = [gradient if s == 1 else gradient * s for gradient, s in pairs]
        tape.scope = "clipping/"
        factor = None if scaling is None else 1.0 / scaling.scale
        gradients, factor, norm = self.clipping.emit(gradients, factor)
        if norm is not None:
            norm = _named(norm, f"{algorithm.prefix}gradient_norm", tape.graph)
        tape.scope = ""
        count = step_new if scaling is None else count
        updates = Updates(algorithm, rates, step, count, scaling, factor, self.ema_decay, norm)
        each = zip(self.parameters, gradients, scalings, fixed, strict=True)
        for parameter, gradient, s, entries in each:
            optimizer = self.grouped.get(parameter.name or "", self.optimizer)
            updates.emit(optimizer, tape.tensor(parameter), gradient, s, entries)
        updates.finish()
        for name, statistic in self._forward.statistics.items():
            present = tape.tensor(tape.graph.initializers[name])
            algorithm.update(name, unless_skipped(scaling, statistic, present))
        if scaling is not None:
            scaling.update(algorithm)
        return loss, updates


def write_loss(
    prepared: Prepared, loss: Loss, inputs: losses.Inputs | None, seed: int
) -> tuple[onnx.GraphProto, dict[str, object]]:
    """Returns an algorithm that only computes a loss, and the roles of its names.

    Args:
        prepared: The model. It cannot be used for another algorithm.
        loss: The loss.
        inputs: See `build_training_model`.
        seed: See `build_training_model`.
    """
    forward = _emit_forward(prepared, loss, inputs, 0.0, seed)
    counts = [part.count for part in forward.loss.parts if part.count is not None]
    write_algorithm(prepared.result, forward.algorithm, counts, prepared.place.name)
    return prepared.result.proto.training_info[-1].algorithm, forward.metadata()


def plan_training(
    prepared: Prepared,
    *,
    loss: LossLike,
    optimizer: str | Optimizer | type[Optimizer] | UpdateRule,
    inputs: losses.Inputs | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    ema_decay: float | None = None,
    groups: Groups | None = None,
    seed: int = 0,
) -> Plan:
    """Emits the loss of a model, and determines which parameters are trained.

    Args:
        prepared: The model. It cannot be used for another plan.
        loss: See `build_training_model`.
        optimizer: See `build_training_model`.
        inputs: See `build_training_model`.
        clip_norm: See `build_training_model`.
        clip_value: See `build_training_model`.
        ema_decay: See `build_training_model`.
        groups: See `build_training_model`.
        seed: See `build_training_model`.

    Raises:
        ArgumentError: If an argument is not valid for any model.
        ModelError: If loss, optimizer, trainable or groups do not fit the model.
    """
    clipping = Clipping(clip_norm, clip_value)
    if ema_decay is not None:
        ema_decay = number("ema_decay", ema_decay, minimum=0, below=1)
    seed = whole_number("seed", seed, -(2**63), 2**63 - 1)
    loss, optimizer = losses.resolve(loss), optimizers.resolve(optimizer)
    if optimizer.average and ema_decay is not None:
        raise ArgumentError(
            f"ema_decay must be left out for the optimizer {optimizer.name}, which averages by "
            f"itself, got {ema_decay!r}"
        )
    forward = _emit_forward(prepared, loss, inputs, optimizer.peak, seed)
    parameters = reached(prepared.choice, forward.loss.value)
    grouped = optimizers_of(optimizer, groups, parameters, prepared.scopes)
    passed = {value.dtype for value in passed_through(parameters, forward.loss.value)}
    infinite = infinite_entries(parameters)
    said = _messages(prepared, forward.loss, ir.DataType.BFLOAT16 in passed)
    said += [
        f"'{name}' has infinite entries ({count}), which stay as they are"
        for name, count in infinite.items()
    ]
    return Plan(
        prepared,
        forward.loss,
        optimizer,
        parameters,
        prepared.choice.reasons,
        said,
        clipping,
        ema_decay,
        grouped,
        forward,
        ir.DataType.FLOAT16 in passed,
        infinite,
    )


def _emit_forward(
    prepared: Prepared,
    loss: Loss | Function,
    inputs: losses.Inputs | None,
    peak: float,
    seed: int,
) -> _Forward:
    """Emits the training-mode copies and the loss, with the state that they read."""
    graph, visible = prepared.graph, prepared.visible
    nodes = list(graph)
    tape = Tape(graph, names=prepared.names)
    algorithm = Algorithm(tape, prepared.place.prefix)
    values = values_of(graph)
    with tape:
        rate = algorithm.variable("learning_rate", np.array(peak, np.float32))
        step = algorithm.variable("step", np.array(0, np.int64))

        @functools.cache
        def seed_variable() -> Tensor:
            return algorithm.variable("seed", np.array(seed, np.int64))

        training = copy_in_training_mode(
            tape, nodes, visible, step, seed_variable, prepared.frozen.__contains__
        )
        copies = training.copies
        revealed = dict(copies)

        def find(name: str) -> Tensor | None:
            found = values.get(name)
            return None if found is None else tape.tensor(reveal(tape, found, visible, revealed))

        def original(value: ir.Value) -> ir.Value:
            return next((source for source, copy in revealed.items() if copy is value), value)

        tape.scope = "loss/"
        hidden: dict[ir.Value, ir.Value] = {}

        def base(value: ir.Value) -> ir.Value:
            return without_adapter(
                *(tape, nodes, value, prepared.adapter),
                lambda read: reveal(tape, read, visible, hidden),
            )

        computed = losses.compute(
            loss, tape, find, list(values), graph.outputs, inputs, original, base
        )
        tape.scope = ""
        computed = _with_names(computed, graph)
        algorithm.inputs, algorithm.constants = computed.inputs, computed.constants
        algorithm.outputs.append(computed.value)
        if len(computed.parts) > 1:
            algorithm.outputs += [part.value for part in computed.parts]
        needed = ancestor_nodes(computed.value.value, set())
        outputs = {
            v.name or "": tape.tensor(copies[v])
            for v in graph.outputs
            if v in copies and copies[v].producer() in needed
        }
        taken = {tensor.value for tensor in algorithm.outputs}
        algorithm.outputs += [each for each in outputs.values() if each.value not in taken]
    statistics = {n: s for n, s in training.statistics.items() if s.value.producer() in needed}
    statistics = {n: s for n, s in statistics.items() if n not in prepared.place.updated}
    own_seed = seed_variable() if training.dropouts else None
    return _Forward(algorithm, rate, step, own_seed, computed, training, outputs, statistics)


def _messages(prepared: Prepared, loss: losses.Computed, through_bfloat16: bool) -> list[str]:
    """Returns the messages about automatic choices, and about where the file runs."""
    said = [*prepared.choice.said, *loss.said]
    attributes = [origin for origin in prepared.lifted.values() if origin.is_attribute]
    linear = {f"{origin.node}{origin.place}" for origin in attributes}
    strings = [v for v in prepared.graph.inputs if v.dtype == ir.DataType.STRING and v.uses()]
    texts = ", ".join(f"'{value.name}'" for value in strings)
    if texts:
        said.append(
            f"the nodes that read strings ({texts}) run before "
            "each training step, in a session of their own"
        )
    if count := len(prepared.lifted) - len(attributes):
        said.append(f"the weights of {count} Constant nodes became initializers")
    if linear:
        said.append(f"standard nodes replaced {', '.join(sorted(linear))}")
    if found := quantized(prepared.graph.initializers.values()):
        name, reader = next(iter(found.items()))
        said.append(
            f"quantized weights are not trained ({len(found)}, such as '{name}', which {reader}); "
            "to train them, train the float model and quantize it again"
        )
    if through_bfloat16:
        said.append(
            "gradients pass through bfloat16, for which onnxruntime has no CPU kernels: training "
            "steps and evaluation compute in float32, and the file itself, which remains bfloat16, "
            "does not run on the CPU"
        )
    if own := operators_of_domain(prepared.result.proto):
        said.append(
            f"the model has {', '.join(own)} nodes of its own, so stock onnxruntime runs the "
            "trainable file only after ortops.lower"
        )
    return said


def _scaling(prepared: Prepared, parameter: ir.Value) -> float:
    """Returns the scaling that a parameter includes, if it is the B of an adapter."""
    scalings = {} if prepared.adapter is None else prepared.adapter.scalings
    found = scalings.get(parameter.name or "", 1.0)
    limits = np.finfo(np.float32)
    if not float(limits.tiny) <= abs(found) <= float(limits.max):
        raise ModelError(
            f"model: the scaling {found:g} of '{parameter.name}' is out of the range of float32; "
            "add the adapter with an alpha close to the rank"
        )
    return found


def _prediction_metadata(predictions: Sequence[losses.Prediction]) -> dict[str, object]:
    """Returns the tensors that the loss reads: the first one with a target, and all if several."""
    first = next((each for each in predictions if each.target), next(iter(predictions), None))
    found: dict[str, object] = {"prediction": {} if first is None else _described(first)}
    if len(predictions) > 1:
        found["predictions"] = [_described(each) for each in predictions]
    return found


def _described(prediction: losses.Prediction) -> dict[str, object]:
    found = PredictionNote(
        *(prediction.tensor.name, prediction.kind, prediction.axis),
        *(prediction.target or "", prediction.ignored, prediction.output),
        shifted=prediction.shifted,
        bounded=prediction.bounded,
        sample_weight=prediction.sample_weight or "",
        form=prediction.form,
        **prediction.shared,
    )
    always = [each.name for each in fields(PredictionNote)][:6]
    default = asdict(PredictionNote())
    return {n: v for n, v in asdict(found).items() if n in always or v != default[n]}


def _with_names(computed: losses.Computed, graph: ir.Graph) -> losses.Computed:
    """Names the loss, and its parts if there are several."""
    value = _named(computed.value, "loss", graph)
    if len(computed.parts) == 1:
        (part,) = computed.parts
        single = replace(part, value=value, weight=1.0, not_negative=computed.not_negative)
        return replace(computed, value=value, parts=[single])
    parts = [
        replace(part, value=_named(part.value, f"loss_{part.label}", graph))
        for part in computed.parts
    ]
    return replace(computed, value=value, parts=parts)


def _named(tensor: Tensor, name: str, graph: ir.Graph) -> Tensor:
    """Names a tensor that was just emitted."""
    tape = tensor.tape
    if tensor.value.producer() not in tape.nodes or tensor.value.is_graph_output():
        tensor = op.Identity(tensor)
    tensor.value.name = tape.names.unique(name)
    return tensor
