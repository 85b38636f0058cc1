"""The part of an algorithm behind the loss: gradients, their scale, and the updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortops.building.algorithm import Algorithm
from ortops.building.clipping import times
from ortops.building.groups import ratio
from ortops.errors import ModelError
from ortops.graph.edit import ancestor_nodes, read_inputs
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tape, Tensor, op
from ortops.lowering import TRAINING_DOMAIN
from ortops.optimizers import Optimizer
from ortops.schedules import Schedule

__all__ = [
    "HALVES",
    "SMALLEST_SCALE",
    "LossScaling",
    "Rates",
    "Updates",
    "emit_gradients",
    "unless_skipped",
    "wide",
]

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types of 16 bits, whose parameters have float32 masters."""

_FIRST_SCALE, _LARGEST_SCALE, _GOOD_STEPS = 2.0**16, 2.0**24, 2000
SMALLEST_SCALE = 2.0**-16
"""The smallest scale of the loss: gradients that overflow there are infinite without it, too."""


def emit_gradients(tape: Tape, loss: Tensor, parameters: Sequence[ir.Value]) -> list[Tensor]:
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


def wide(gradient: Tensor) -> Tensor:
    """Returns a gradient in float32 where it has 16 bits."""
    return gradient.astype(np.float32) if gradient.value.dtype in HALVES else gradient


@dataclass
class LossScaling:
    """What keeps gradients of float16 in its range.

    The scheme is that of Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    Attributes:
        scale: What the loss is multiplied by, 0-d float32, a power of two.
        good_steps: The steps since it changed, 0-d int64.
        finite: Whether all gradients are finite, 0-d bool; of this step, once they are there.
    """

    scale: Tensor
    good_steps: Tensor
    finite: Tensor | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> LossScaling:
        """Adds the state."""
        scale = algorithm.variable("loss_scale", np.array(_FIRST_SCALE, np.float32))
        return cls(scale, algorithm.variable(f"{scale.name}.good_steps", np.array(0, np.int64)))

    def judge(self, gradients: Sequence[Tensor]) -> None:
        """Emits whether all gradients are finite: then each of them less itself is 0."""
        zeros = [
            op.ReduceSum(gradient - gradient, keepdims=0).astype(np.float32)
            for gradient in gradients
        ]
        # A stack: what reads a chain of sums would have to go through all of it.
        total = op.ReduceSum(zeros[0].__array_namespace__().stack(zeros), keepdims=0)
        self.finite = total == 0.0

    def update(self, algorithm: Algorithm) -> None:
        """Emits the next scale."""
        good = self.good_steps + 1
        enough = good >= _GOOD_STEPS
        more = op.Where(enough, op.Min(self.scale * 2.0, np.float32(_LARGEST_SCALE)), self.scale)
        less = op.Max(self.scale * 0.5, np.float32(SMALLEST_SCALE))
        again = op.Where(enough, np.int64(0), good)
        algorithm.update(self.scale.name, op.Where(self.finite, more, less))
        algorithm.update(self.good_steps.name, op.Where(self.finite, again, np.int64(0)))


def unless_skipped(scaling: LossScaling | None, new: Tensor, old: Tensor) -> Tensor:
    """Returns the next value of a variable, which stays as it is where gradients overflow."""
    kept: Tensor = new if scaling is None else op.Where(scaling.finite, new, old)
    return kept


class Rates:
    """The learning rates of a step: R of each optimizer.

    Args:
        algorithm: Where they are computed.
        peak: The state ``learning_rate``, 0-d float32.
        step: The number of finished steps, 0-d int64.
        base: The optimizer that the peak is that of.

    Attributes:
        rate: The base's, 0-d float32.
        scheduled: Whether a schedule makes it.

    Raises:
        ModelError: If the schedule's factor is no floating-point scalar.
    """

    def __init__(self, algorithm: Algorithm, peak: Tensor, step: Tensor, base: Optimizer) -> None:
        self._tape, self._peak, self._base = algorithm.tape, peak, base
        self._factor: Tensor | None = None
        self._others: dict[float, Tensor] = {}
        self.rate = peak
        self.scheduled = base.schedule is not None
        if base.schedule is not None:
            self._tape.scope = "schedule/"
            self._factor = _factor(base.schedule, step)
            rate = (peak.astype(np.float64) * self._factor).astype(np.float32)
            rate.value.name = self._tape.names.unique("scheduled_learning_rate")
            algorithm.outputs.append(rate)
            self.rate = rate
            self._tape.scope = ""

    def of(self, optimizer: Optimizer) -> Tensor:
        """Returns that of an optimizer, which stays in the ratio to the base's that it has."""
        share = ratio(optimizer, self._base)
        if share == 1.0:
            return self.rate
        if share not in self._others:
            self._tape.scope = "groups/"
            rate = self._peak.astype(np.float64) * share
            if self._factor is not None:
                rate = rate * self._factor
            self._others[share] = rate.astype(np.float32)
            self._tape.scope = ""
        return self._others[share]


def _factor(schedule: Schedule, step: Tensor) -> Tensor:
    """Emits the factor of a step, 0-d float64."""
    factor = schedule.factor(step.astype(np.float64))
    if isinstance(factor, int | float | np.number) and not isinstance(factor, bool):
        factor = step.tape.constant(np.asarray(factor, np.float64))
    is_number = isinstance(factor, Tensor) and factor.dtype.kind == "f" and factor.shape == ()
    if not is_number:
        raise ModelError(
            f"schedule {schedule.description}: its factor is {factor!r}; a floating-point scalar "
            "is accepted"
        )
    result: Tensor = factor.astype(np.float64)
    return result


@dataclass
class Updates:
    """What the updates of all parameters share.

    Attributes:
        algorithm: Where they go.
        rates: R of each optimizer.
        step: The number of finished steps, 0-d int64.
        count: The same, this step included.
        scaling: What the loss is scaled by, if it is.
        scale: What each gradient is to be multiplied by, 0-d; None for 1.
        ema_decay: How much of an average of parameters stays in a step; None for no averages.
        masters: Parameters of 16 bits → their float32 values; extended.
        averages: Parameters → their averages; extended.
    """

    algorithm: Algorithm
    rates: Rates
    step: Tensor
    count: Tensor
    scaling: LossScaling | None
    scale: Tensor | None
    ema_decay: float | None
    masters: dict[str, str] = field(default_factory=dict)
    averages: dict[str, str] = field(default_factory=dict)

    def emit(self, optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> None:
        """Emits the update of one parameter: the domain's node, or the nodes of the rule.

        Args:
            optimizer: The parameter's optimizer.
            parameter: The parameter.
            gradient: Its gradient, in float32 where the parameter has 16 bits.
        """
        algorithm, tape = self.algorithm, self.algorithm.tape
        x = parameter
        if parameter.value.dtype in HALVES:
            x = algorithm.copy(parameter, "master", np.dtype(np.float32))
            self.masters[parameter.name] = x.name
        tensor = x.value.const_value
        assert tensor is not None
        shape = tensor.shape.numpy()
        optimizer = optimizer.of(shape)
        states = [
            algorithm.variable(f"{parameter.name}.{name}", np.zeros(own, x.dtype))
            for name, own in optimizer.state_shapes(shape).items()
        ]
        rate, t = self.rates.of(optimizer), self.count if optimizer.first_step else self.step
        tape.scope = f"update/{parameter.name}/"
        gradient = times(gradient, self.scale)
        if optimizer.operator is None:
            new = _own_update(optimizer, (rate, t, x, gradient, *states))
        else:
            node = ir.Node(
                TRAINING_DOMAIN,
                optimizer.operator,
                [v.value for v in (rate, t, optimizer.before_operator(rate, x), gradient)]
                + [state.value for state in states],
                ir.convenience.convert_attributes(optimizer.operator_attributes),
                num_outputs=1 + len(states),
            )
            tape.append(node)
            new = tuple(
                tape.tensor(output).with_shape_of(old)
                for output, old in zip(node.outputs, (x, *states), strict=True)
            )
            for made in new:
                made.value.type = x.value.type
        variables = [x, *states]
        kept = [unless_skipped(self.scaling, n, v) for n, v in zip(new, variables, strict=True)]
        if self.ema_decay is not None:
            average = algorithm.copy(parameter, "ema", x.dtype)
            self.averages[parameter.name] = average.name
            moved = average + (1.0 - self.ema_decay) * (kept[0] - average)
            variables.append(average)
            kept.append(unless_skipped(self.scaling, moved, average))
        narrow = parameter.value.dtype
        rounded = None if x is parameter or narrow is None else op.Cast(kept[0], to=narrow.value)
        tape.scope = ""
        for variable, made in zip(variables, kept, strict=True):
            algorithm.update(variable.name, made)
        if rounded is not None:
            algorithm.update(parameter.name, rounded)


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
    variables = (parameter, *inputs[4:])
    for name, tensor, old in zip(("x", *optimizer.states), new, variables, strict=True):
        what = f"{where}: {name.lower()}_new"
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{what} is {tensor!r}; it must be a Tensor")
        fits = may_be_equal(tensor.value.shape, old.value.shape)
        if tensor.value.dtype != old.value.dtype or not fits:
            like = "parameter" if old is parameter else "state"
            raise ModelError(
                f"{what} is {tensor.dtype}{list(tensor.shape or ())}; it must be like the "
                f"{like}, {old.dtype}{list(old.shape or ())}"
            )
    return tuple(new)
