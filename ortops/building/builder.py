"""Writing training_info: from an inference model to a trainable model in one standard file."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops import losses, optimizers
from ortops.building.algorithm import Algorithm, write_algorithm
from ortops.building.clipping import Clipping
from ortops.building.groups import Groups, described, optimizers_of
from ortops.building.parameters import quantized
from ortops.building.preparation import BatchNormalization, Prepared, prepare_for_training
from ortops.building.reachability import passed_through, reached
from ortops.building.updates import (
    LossScaling,
    Rates,
    Updates,
    emit_gradients,
    unless_skipped,
    wide,
)
from ortops.errors import ModelError
from ortops.garbage_collection import collection_put_off
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.edit import ancestor_nodes
from ortops.graph.files import external
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses import LossLike
from ortops.lowering import has_domain
from ortops.numbers import integer, real
from ortops.optimizers import Optimizer, UpdateRule
from ortops.trainable.metadata import METADATA_KEY
from ortops.trainable.training_mode import copy_in_training_mode, reveal

__all__ = ["Plan", "build_training_model", "plan_training"]

logger = logging.getLogger("ortops")


@convert.blame_model
@collection_put_off()
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

    The inference graph is left as it is, so that the file runs as before wherever it ran. The
    algorithm holds the loss, a Gradient node, an optimizer node for each parameter and the count of
    steps; a training-mode copy of BatchNormalization and Dropout, where there are such, and of what
    depends on them. Its state (``<parameter>.V`` …, ``step``, ``learning_rate``) is part of the
    file, which therefore is the checkpoint too.

    A parameter of float16 or bfloat16 keeps its type. What is updated is its float32 value, the
    state ``<parameter>.master``, with optimizer state in float32; the parameter is that, rounded.
    Losses and targets of such models are float32.

    Where gradients pass through float16, the loss that is differentiated is multiplied by the state
    ``loss_scale`` and gradients are divided by it, so that small ones are not rounded to 0. If one
    is infinite or NaN all the same, the step changes no parameter, optimizer state or running
    statistic and is not counted in ``step``, and the scale is halved (2⁻¹⁶ at least). After 2000
    steps without that (``loss_scale.good_steps``) it is doubled (2²⁴ at most).

    A learning rate may be a schedule (`ortops.schedules`): the rate of a step is then the state
    ``learning_rate``, the peak, times the schedule's factor of the finished steps, and is put out
    as ``scheduled_learning_rate``. A step that float16 skips does not count.

    Gradients through bfloat16 are computed in float32 by `ortops.step_graph` and `TrainingSession`,
    since onnxruntime's CPU provider has no kernels for it; the file itself does not run there.

    Args:
        model: An inference model: a ModelProto, its bytes or its path. One below opset 21 is
            converted as a whole, and a message says so.
        loss: A loss of `ortops.losses`, its name, or a function that gets Tensors and returns a
            scalar one (see `ortops.losses.compute` for what it gets).
        optimizer: An optimizer of `ortops.optimizers`, its name, or an update rule.
        trainable: What to train: names of initializers, patterns of names such as ``"head.*"``, or
            (patterns of) the scopes of the nodes that read them, such as ``"encoder.layer.5.*"``.
            By default every weight that the loss depends on: what a person would call one, by the
            operators that read it, so not running statistics, sizes, limits and other constants of
            an exporter (`ortops check` tells why not). An exact name always trains. Weights in
            Constant nodes, in branches, bodies and functions, count; they become initializers of
            the graph, and a message says so. Of a model that has an adapter (`ortops.lora`), the
            adapter alone is trained by default.
        inputs: Inputs that the loss reads beside the model's: a dtype and dimensions for each
            name, such as ``{"mask": (np.float32, ["batch", "time"])}``.
        batch_normalization: Which BatchNormalization layers normalize by the batch and update their
            running statistics: ``"auto"`` those whose scale or bias is trained, ``"train"`` all,
            ``"frozen"`` none. The others run in inference mode.
        clip_norm: The largest norm of all gradients together, > 0: they are multiplied by
            ``min(1, clip_norm / (norm + 1e-6))``, as PyTorch's ``clip_grad_norm_`` does.
        clip_value: The largest magnitude of an element of a gradient, > 0. Where both are given,
            elements are clipped before the norm is taken. Of float16, gradients are clipped as
            they are without a scale of the loss.
        ema_decay: In [0, 1): each step moves the state ``<parameter>.ema``, which starts at the
            parameter's value, to ``ema_decay · ema + (1 - ema_decay) · parameter``; in float32
            where the parameter has 16 bits. A step that float16 skips does not move it.
        groups: Settings of the optimizer for some parameters, by names and patterns as in
            ``trainable``: ``{"*.bias": {"weight_decay": 0.0}, "head.*": {"learning_rate": 1e-2}}``.
            Where several mean a parameter, it gets the settings of each, and of those that several
            give, the last. A learning rate is kept as a ratio to the optimizer's, so that a
            schedule, and setting ``session.learning_rate``, moves both. Settings are those of the
            constructor; of an update rule of one's own, its attributes and ``learning_rate``.
        seed: Determines which elements Dropout drops: the first value of the state ``seed``, which
            a model with Dropout has.

    Returns:
        A new model; the argument is not changed.

    Raises:
        ModelError: If the model is not legal, or loss, optimizer, trainable or groups do not fit
            it, or a number is outside its range.

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
    prepared = prepare_for_training(model, trainable, batch_normalization)
    plan = plan_training(
        prepared,
        loss=loss,
        optimizer=optimizer,
        inputs=inputs,
        clip_norm=clip_norm,
        clip_value=clip_value,
        ema_decay=ema_decay,
        groups=groups,
        seed=seed,
    )
    for sentence in plan.said:
        logger.warning("%s", sentence)
    result = plan.write()
    external.let_go(prepared.data)
    return result


@dataclass(frozen=True)
class Plan:
    """What a training does, which `build_training_model` writes and `ortops.check` tells.

    Attributes:
        prepared: The model.
        loss: The loss as it was emitted.
        optimizer: The optimizer.
        parameters: The initializers that are trained.
        reasons: Why other floating-point initializers are not, by name.
        said: What was chosen for the user, a sentence each.
        clipping: How gradients are clipped.
        ema_decay: How much of an average of parameters stays in a step; None for no averages.
        grouped: The optimizers of parameters that have one of their own, by name.
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
    _algorithm: Algorithm
    _metadata: Mapping[str, object]
    _rate: Tensor
    _step: Tensor
    _statistics: Mapping[str, Tensor]
    _scaled: bool

    @property
    def notes(self) -> dict[str, Any]:
        """What the file says, for people, of schedule, clipping, averages and groups, if any."""
        schedule = self.optimizer.schedule
        found: dict[str, Any] = {
            "schedule": "" if schedule is None else schedule.description,
            "clipping": str(self.clipping),
            "averaging": "" if self.ema_decay is None else f"ema_decay={self.ema_decay!r}",
            "groups": {n: described(own, self.optimizer) for n, own in self.grouped.items()},
        }
        return {name: value for name, value in found.items() if value}

    def write(self) -> onnx.ModelProto:
        """Returns the trainable model."""
        algorithm, value = self._algorithm, self.loss.value
        tape = algorithm.tape
        scaling: LossScaling | None = None
        with tape:
            rates = Rates(algorithm, self._rate, self._step, self.optimizer)
            if self._scaled:
                scaling = LossScaling.of(algorithm)
                scaled = value * scaling.scale.astype(value.dtype)
                value = _named(scaled, "scaled_loss", tape.graph)
            gradients = emit_gradients(tape, value, self.parameters)
            count = self._step + 1
            # Once: onnxruntime may leave out a rounding to float16 before a cast, here or there.
            gradients = [wide(gradient) for gradient in gradients]
            if scaling is not None:
                scaling.judge(gradients)
            step_new = algorithm.update(self._step.name, unless_skipped(scaling, count, self._step))
            tape.scope = "clipping/"
            scale = None if scaling is None else 1.0 / scaling.scale
            gradients, scale = self.clipping.emit(gradients, scale)
            tape.scope = ""
            updates = Updates(
                algorithm,
                rates,
                self._step,
                step_new if scaling is None else count,
                scaling,
                scale,
                self.ema_decay,
            )
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                optimizer = self.grouped.get(parameter.name or "", self.optimizer)
                updates.emit(optimizer, tape.tensor(parameter), gradient)
            for name, statistic in self._statistics.items():
                present = tape.tensor(tape.graph.initializers[name])
                algorithm.update(name, unless_skipped(scaling, statistic, present))
            if scaling is not None:
                scaling.update(algorithm)
        algorithm.outputs.sort(key=lambda tensor: tensor is algorithm.updates[self._step.name])
        result = self.prepared.result
        counts = [part.count for part in self.loss.parts if part.count is not None]
        write_algorithm(result, algorithm, [*counts, value])
        entry = next((e for e in result.metadata_props if e.key == METADATA_KEY), None)
        entry = entry or result.metadata_props.add(key=METADATA_KEY)
        noted = dict(self._metadata)
        if updates.masters:
            noted["masters"] = updates.masters
        if updates.averages:
            noted["averages"] = updates.averages
        if rates.scheduled:
            noted["scheduled_learning_rate"] = rates.rate.name
        noted |= self.notes
        if scaling is not None:
            noted["loss_scale"] = scaling.scale.name
            noted["good_steps"] = scaling.good_steps.name
        entry.value = json.dumps(noted)
        return external.attach(result, self.prepared.data)


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
    """Emits the loss of a model, and finds what is trained.

    Args:
        prepared: The model; not to be used for another plan.
        loss: See `build_training_model`.
        optimizer: See there.
        inputs: See there.
        clip_norm: See there.
        clip_value: See there.
        ema_decay: See there.
        groups: See there.
        seed: See there.

    Raises:
        ModelError: If loss, optimizer, trainable or groups do not fit the model, or a number is
            outside its range.
    """
    clipping = Clipping(clip_norm, clip_value)
    _check_decay(ema_decay)
    whole_seed = integer(seed)
    if whole_seed is None or not -(2**63) <= whole_seed < 2**63:
        raise ModelError(f"seed is {seed!r:.80}; an integer of 64 bits is accepted")
    chosen_loss, chosen_optimizer = losses.resolve(loss), optimizers.resolve(optimizer)
    graph, names, visible = prepared.graph, prepared.names, prepared.visible
    nodes = list(graph)
    tape = Tape(graph, names=names)
    algorithm = Algorithm(tape)
    values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    values |= {v.name: v for node in nodes for v in node.outputs}
    with tape:
        rate = algorithm.variable("learning_rate", np.array(chosen_optimizer.peak, np.float32))
        step = algorithm.variable("step", np.array(0, np.int64))

        @functools.cache
        def first_seed() -> Tensor:
            return algorithm.variable("seed", np.array(whole_seed, np.int64))

        training = copy_in_training_mode(
            tape, nodes, visible, step, first_seed, prepared.frozen.__contains__
        )
        copies = training.copies
        revealed = dict(copies)

        def find(name: str) -> Tensor | None:
            found = values.get(name)
            return None if found is None else tape.tensor(reveal(tape, found, visible, revealed))

        def own(value: ir.Value) -> ir.Value:
            return next((source for source, copy in revealed.items() if copy is value), value)

        tape.scope = "loss/"
        computed = losses.compute(
            chosen_loss, tape, find, [name for name in values if name], graph.outputs, inputs, own
        )
        tape.scope = ""
        computed = _with_names(computed, graph)
        value = computed.value
        algorithm.inputs, algorithm.constants = computed.inputs, computed.constants
        algorithm.outputs.append(value)
        if len(computed.parts) > 1:
            algorithm.outputs += [part.value for part in computed.parts]
        needed = ancestor_nodes(value.value, set())
        shown = {
            v.name or "": tape.tensor(copies[v])
            for v in graph.outputs
            if v in copies and copies[v].producer() in needed
        }
        taken = {tensor.value for tensor in algorithm.outputs}
        algorithm.outputs += [s for s in shown.values() if s.value not in taken]
        statistics = {n: s for n, s in training.statistics.items() if s.value.producer() in needed}
    choice = prepared.choice
    parameters = reached(choice, value)
    grouped = optimizers_of(chosen_optimizer, groups, parameters, prepared.places)
    passed = {v.dtype for v in passed_through(parameters, value)}
    metadata = {
        "loss": value.name,
        "learning_rate": rate.name,
        "step": step.name,
        "training_copies": {copy.name: name for name, copy in shown.items()},
        "losses": [
            {
                "name": part.value.name,
                "label": part.label,
                "weight": part.weight,
                "count": "" if part.count is None else part.count.name,
                "is_sum": part.is_sum,
                "couples_rows": part.batch_coupled,
            }
            for part in computed.parts
        ],
        **_described_predictions(computed.predictions),
        "dropouts": training.dropouts,
        **({"seed": first_seed().name} if training.dropouts else {}),
    }
    said = [*choice.said, *computed.said, *_said_of_lifted(prepared), *_said_of_quantized(prepared)]
    if ir.DataType.BFLOAT16 in passed:
        said.append(
            "gradients pass through bfloat16, for which onnxruntime has no CPU kernels: training "
            "steps and evaluation compute in float32, and the file itself, which stays bfloat16, "
            "does not run on the CPU"
        )
    if has_domain(prepared.result):
        said.append(
            "the model has Gradient nodes of its own, so that stock onnxruntime runs the trainable "
            "file only after ortops.lower"
        )
    return Plan(
        prepared,
        computed,
        chosen_optimizer,
        parameters,
        choice.reasons,
        said,
        clipping,
        None if ema_decay is None else float(ema_decay),
        grouped,
        algorithm,
        metadata,
        rate,
        step,
        statistics,
        ir.DataType.FLOAT16 in passed,
    )


def _check_decay(ema_decay: Any) -> None:
    """Refuses what is no decay of an average."""
    if ema_decay is not None and not 0 <= real(ema_decay) < 1:
        raise ModelError(f"ema_decay is {ema_decay!r}; a number in [0, 1) is accepted")


def _said_of_lifted(prepared: Prepared) -> list[str]:
    """Returns what to say of weights that became initializers."""
    attributes = [origin for origin in prepared.lifted.values() if origin.is_attribute]
    linear = {f"{origin.node}{origin.place}" for origin in attributes}
    said = []
    count = len(prepared.lifted) - len(attributes)
    if count:
        said.append(f"the weights of {count} Constant nodes became initializers")
    if linear:
        said.append(f"standard nodes took the place of {', '.join(sorted(linear))}")
    return said


def _said_of_quantized(prepared: Prepared) -> list[str]:
    """Returns what to say of weights that stay as they are, as they are rounded to integers."""
    found = quantized(prepared.graph.initializers.values())
    if not found:
        return []
    name, what = next(iter(found.items()))
    told = f"quantized weights are not trained ({len(found)}, such as '{name}', which {what})"
    return [f"{told}; to train them, train the float model and quantize it anew"]


def _described_predictions(predictions: Sequence[losses.Prediction]) -> dict[str, object]:
    """Returns, for the file, what a loss looks at: the first with a target, and each of several."""
    first = next((each for each in predictions if each.target), next(iter(predictions), None))
    found: dict[str, object] = {"prediction": {} if first is None else _described(first)}
    if len(predictions) > 1:
        found["predictions"] = [_described(each) for each in predictions]
    return found


def _described(prediction: losses.Prediction) -> dict[str, object]:
    """Returns, for the file, what a loss, or a summand of one, looks at."""
    return {
        "tensor": prediction.tensor.name,
        "kind": prediction.kind,
        "axis": prediction.axis,
        "target": prediction.target or "",
        "ignored": prediction.ignored,
        "output": prediction.output,
    }


def _with_names(computed: losses.Computed, graph: ir.Graph) -> losses.Computed:
    """Gives the loss, and each of its parts where there are several, a name in the file."""
    value = _named(computed.value, "loss", graph)
    if len(computed.parts) == 1:
        (part,) = computed.parts
        return replace(computed, value=value, parts=[replace(part, value=value, weight=1.0)])
    parts = [
        replace(part, value=_named(part.value, f"loss_{part.label}", graph))
        for part in computed.parts
    ]
    return replace(computed, value=value, parts=parts)


def _named(tensor: Tensor, name: str, graph: ir.Graph) -> Tensor:
    """Gives a tensor that was just emitted a name."""
    tape = tensor.tape
    if tensor.value.producer() not in tape.nodes or tensor.value.is_graph_output():
        tensor = op.Identity(tensor)
    tensor.value.name = tape.names.unique(name)
    return tensor
