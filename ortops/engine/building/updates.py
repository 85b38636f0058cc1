"""Emits the part of an algorithm after the loss: gradients, loss scaling and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortops.engine.building.algorithm import Algorithm
from ortops.engine.building.clipping import times
from ortops.engine.building.groups import ratio
from ortops.engine.lowering import TRAINING_DOMAIN
from ortops.errors import ArgumentError, ModelError
from ortops.graph.edit import ancestor_nodes, is_float, read_inputs
from ortops.graph.files import external
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tape, Tensor, op
from ortops.optimizers import Optimizer
from ortops.schedules import Schedule

_16_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)  # whose parameters have float32 masters

_LARGEST_TABLE = 2**24  # a table of biases has fewer elements

_FIRST_SCALE, _LARGEST_SCALE, _GOOD_STEPS = 2.0**16, 2.0**24, 2000
SMALLEST_SCALE = 2.0**-16
"""The smallest loss scale. Gradients that overflow with it are infinite without scaling as well."""


def emit_gradients(tape: Tape, loss: Tensor, parameters: Sequence[ir.Value]) -> list[Tensor]:
    """Emits the Gradient node, whose zs are all other inputs and initializers of the loss."""
    read = {
        value
        for node in ancestor_nodes(loss.value, set())
        for value in read_inputs(node)
        if value.producer() is None
    }
    graph = tape.graph
    read -= set(parameters)
    leaves = [*graph.inputs, *graph.initializers.values()]
    zs = [v for v in dict.fromkeys(leaves) if v in read]
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


def as_float32(gradient: Tensor) -> Tensor:
    """Returns a gradient, cast to float32 if it has 16 bits."""
    return gradient.astype(np.float32) if gradient.value.dtype in _16_BITS else gradient


SCHEDULE_LENGTH = ("schedule_start", "schedule_steps")
"""The states with the first step of a schedule and the number of its steps, if fit sets them."""


@dataclass
class LossScaling:
    """Dynamic loss scaling, which keeps float16 gradients in range.

    Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.

    Attributes:
        scale: The factor of the loss, 0-d float32, a power of two.
        good_steps: The number of steps without an overflow since it last changed, 0-d int64.
        finite: Whether all gradients of the step are finite, 0-d bool; None before `check_finite`.
    """

    scale: Tensor
    good_steps: Tensor
    finite: Tensor | None = None

    @classmethod
    def of(cls, algorithm: Algorithm) -> LossScaling:
        """Adds the state variables."""
        scale = algorithm.variable("loss_scale", np.array(_FIRST_SCALE, np.float32))
        name = f"{scale.name.removeprefix(algorithm.prefix)}.good_steps"
        return cls(scale, algorithm.variable(name, np.array(0, np.int64)))

    def metadata(self) -> dict[str, object]:
        """Returns the names of the state variables, for the file."""
        return {"loss_scale": self.scale.name, "good_steps": self.good_steps.name}

    def check_finite(self, gradients: Sequence[Tensor]) -> None:
        """Emits whether all gradients are finite: x - x is 0 for finite x and NaN otherwise."""
        zeros = [
            op.ReduceSum(gradient - gradient, keepdims=0).astype(np.float32)
            for gradient in gradients
        ]
        # One sum of a stack, because a chain of sums would be as deep as there are gradients.
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


def infinite_entries(parameters: Sequence[ir.Value]) -> dict[str, int]:
    """Returns how many infinite entries parameters have, such as −∞ for padding in a table."""
    found: dict[str, int] = {}
    for value in parameters:
        tensor = value.const_value
        if tensor is not None and tensor.size <= _LARGEST_TABLE and is_float(value):
            count = int(np.isinf(external.content_of(tensor).numpy()).sum())
            found |= {value.name or "": count} if count else {}
    return found


def unless_skipped(scaling: LossScaling | None, new: Tensor, old: Tensor) -> Tensor:
    """Returns the next value of a variable: the old one if gradients overflow."""
    kept: Tensor = new if scaling is None else op.Where(scaling.finite, new, old)
    return kept


class Rates:
    """The learning rates of a step: the input R of each optimizer.

    Args:
        algorithm: The algorithm that computes them.
        peak: The state ``learning_rate``, 0-d float32.
        step: The number of finished steps, 0-d int64.
        base: The default optimizer, whose learning rate is the peak.

    Attributes:
        rate: The learning rate of the default optimizer, 0-d float32.
        scheduled: Whether it follows a schedule.
        length: The states with the first step of the schedule and the number of its steps, 0-d
            int64, if fit sets them.

    Raises:
        ModelError: If the schedule's factor is not a floating-point scalar.
    """

    def __init__(self, algorithm: Algorithm, peak: Tensor, step: Tensor, base: Optimizer) -> None:
        self._tape, self._peak, self._base = algorithm.tape, peak, base
        self._factor: Tensor | None = None
        self._others: dict[float, Tensor] = {}
        self.rate = peak
        self.scheduled = base.schedule is not None
        self.length: tuple[Tensor, ...] = ()
        if base.schedule is not None:
            self._tape.scope = "schedule/"
            if base.schedule.needs_steps:
                zero = np.array(0, np.int64)
                self.length = tuple(algorithm.variable(name, zero) for name in SCHEDULE_LENGTH)
            self._factor = _factor(base.schedule, step, self.length)
            for state in self.length:
                algorithm.update(state.name, state)
            rate = (peak.astype(np.float64) * self._factor).astype(np.float32)
            rate.value.name = self._tape.names.unique("scheduled_learning_rate")
            algorithm.outputs.append(rate)
            self.rate = rate
            self._tape.scope = ""

    def of(self, optimizer: Optimizer) -> Tensor:
        """Returns the learning rate of an optimizer, at a constant ratio to the default's."""
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


def _factor(schedule: Schedule, step: Tensor, length: Sequence[Tensor]) -> Tensor:
    """Emits the schedule's factor for a step, 0-d float64."""
    given = [step - length[0], *length[1:]] if length else [step]
    try:
        factor = schedule.factor(*(each.astype(np.float64) for each in given))
    except TypeError as error:
        raise ModelError(
            f"schedule {schedule.description}: {error}; it is written into the graph once, as a "
            "formula of the number of steps n, with functions of n.__array_namespace__()"
        ) from error
    if isinstance(factor, int | float | np.number) and not isinstance(factor, bool):
        factor = step.tape.constant(np.asarray(factor, np.float64))
    is_number = isinstance(factor, Tensor) and factor.dtype.kind == "f" and factor.shape == ()
    if not is_number:
        raise ModelError(
            f"schedule {schedule.description}: its factor must be a floating-point scalar, got "
            f"{factor!r}"
        )
    result: Tensor = factor.astype(np.float64)
    return result


@dataclass
class Updates:
    """Emits the updates of parameters.

    Attributes:
        algorithm: The algorithm to extend.
        rates: The learning rates.
        step: The number of finished steps, 0-d int64.
        count: The number of finished steps including this one, 0-d int64.
        scaling: The loss scaling, if gradients pass through float16.
        scale: The factor of each gradient, 0-d; None for 1.
        ema_decay: The decay of the averages of parameters; None without averages.
        norm: The norm of all gradients, if it is limited.
        masters: The names of 16-bit parameters and of their float32 masters, extended by `emit`.
        averages: The names of parameters and of their averages, extended by `emit`.
    """

    algorithm: Algorithm
    rates: Rates
    step: Tensor
    count: Tensor
    scaling: LossScaling | None
    scale: Tensor | None
    ema_decay: float | None
    norm: Tensor | None = None
    masters: dict[str, str] = field(default_factory=dict)
    averages: dict[str, str] = field(default_factory=dict)
    _pending: list[_Pending] = field(default_factory=list)

    def metadata(self) -> dict[str, object]:
        """Returns the names of masters, averages, the learning rate and the norm, for the file."""
        rate = self.rates.rate.name if self.rates.scheduled else ""
        names = [state.name for state in self.rates.length]
        found = {
            "masters": self.masters,
            "averages": self.averages,
            "scheduled_learning_rate": rate,
            "gradient_norm": "" if self.norm is None else self.norm.name,
            **dict(zip(SCHEDULE_LENGTH, names, strict=False)),
        }
        return {name: value for name, value in found.items() if value}

    def emit(
        self,
        optimizer: Optimizer,
        parameter: Tensor,
        gradient: Tensor,
        scaling: float = 1.0,
        fixed: Tensor | None = None,
    ) -> None:
        """Emits the update of one parameter; those of shared optimizers follow in `finish`.

        Args:
            optimizer: The parameter's optimizer.
            parameter: The parameter.
            gradient: The gradient, in float32 if the parameter has 16 bits, with respect to the
                parameter divided by its scaling, which is what the optimizer updates.
            scaling: The scaling that the parameter includes, as the B of an adapter does.
            fixed: Which entries are infinite, and stay; None for none.
        """
        algorithm, tape = self.algorithm, self.algorithm.tape
        x = parameter
        if parameter.value.dtype in _16_BITS:
            x = algorithm.copy(parameter, "master", np.dtype(np.float32))
            self.masters[parameter.name] = x.name
        tensor = x.value.const_value
        assert tensor is not None
        shape = tensor.shape.numpy()
        optimizer = optimizer.of(shape)
        dtypes = optimizer.state_dtypes(x.dtype)
        states = [
            algorithm.copy(parameter, name, x.dtype)
            if name in optimizer.copies
            else algorithm.variable(f"{parameter.name}.{name}", np.zeros(own, dtypes[name]))
            for name, own in optimizer.state_shapes(shape).items()
        ]
        rate, t = self.rates.of(optimizer), self.count if optimizer.first_step else self.step
        tape.scope = f"update/{parameter.name}/"
        gradient = times(gradient, self.scale)
        given = rate, t, gradient
        pending = _Pending(optimizer, parameter, scaling, x, states, given, fixed)
        if optimizer.is_shared:
            self._pending.append(pending)
        else:
            self._finish(pending, None)
        tape.scope = ""

    def finish(self) -> None:
        """Emits the updates that read sums over all parameters.

        Raises:
            ArgumentError: If parameters have different learning rates.
        """
        if not self._pending:
            return
        if len({each.given[0].name for each in self._pending}) > 1:
            name = self._pending[0].optimizer.name
            raise ArgumentError(
                f"groups must have one learning rate for the optimizer {name}, which estimates a "
                "common factor of it, got several; leave learning_rate out of groups"
            )
        tape = self.algorithm.tape
        tape.scope = "update/shared/"
        rows = [each.optimizer.summands(*each.inputs()) for each in self._pending]
        totals = tuple(
            op.ReduceSum(column[0].__array_namespace__().stack(list(column)), keepdims=0)
            for column in zip(*rows, strict=True)
        )
        for each in self._pending:
            tape.scope = f"update/{each.parameter.name}/"
            self._finish(each, totals)
        tape.scope = ""

    def _finish(self, pending: _Pending, sums: tuple[Tensor, ...] | None) -> None:
        """Emits the update of a parameter."""
        algorithm, optimizer, scaling = self.algorithm, pending.optimizer, pending.scaling
        parameter, x, states = pending.parameter, pending.x, pending.states
        scaled = [name in optimizer.copies for name in optimizer.states]
        if optimizer.operator is None:
            new = _emit_rule(optimizer, pending.inputs(), sums)
        else:
            rate, t, own, gradient, *_ = pending.inputs()
            inputs = (rate, t, optimizer.before_operator(rate, own), gradient, *states)
            new = _emit_operator(optimizer, inputs, (x, *states))
        if scaling != 1:
            flags = zip(new, (True, *scaled), strict=True)
            new = tuple(each * scaling if is_scaled else each for each, is_scaled in flags)
        if pending.fixed is not None:
            like = zip(new, (x, *states), (True, *scaled), strict=True)
            new = tuple(pending.kept(n, old) if is_copy else n for n, old, is_copy in like)
        if optimizer.average:
            average = states[optimizer.states.index(optimizer.average)]
            self.averages[parameter.name] = average.name
        variables = [x, *states]
        kept = [unless_skipped(self.scaling, n, v) for n, v in zip(new, variables, strict=True)]
        if self.ema_decay is not None:
            average = algorithm.copy(parameter, "ema", x.dtype)
            self.averages[parameter.name] = average.name
            step = (1.0 - self.ema_decay) * (pending.finite(kept[0]) - pending.finite(average))
            new_average = pending.kept(pending.finite(average) + step, average)
            variables.append(average)
            kept.append(unless_skipped(self.scaling, new_average, average))
        if x is not parameter:
            variables.append(parameter)
            kept.append(kept[0].astype(parameter.dtype))
        algorithm.tape.scope = ""
        for variable, new_value in zip(variables, kept, strict=True):
            algorithm.update(variable.name, new_value)


@dataclass(frozen=True)
class _Pending:
    """An update before it is emitted.

    Attributes:
        optimizer: The parameter's optimizer.
        parameter: The parameter.
        scaling: The scaling that the parameter includes.
        x: The parameter or its master.
        states: The optimizer's states.
        given: The learning rate, the update count and the gradient.
        fixed: Which entries are infinite, and stay; None for none.
    """

    optimizer: Optimizer
    parameter: Tensor
    scaling: float
    x: Tensor
    states: Sequence[Tensor]
    given: tuple[Tensor, Tensor, Tensor]
    fixed: Tensor | None = None

    def finite(self, tensor: Tensor) -> Tensor:
        """Returns the parameter, or a copy of it, with zeros for infinite entries."""
        if self.fixed is None:
            return tensor
        found: Tensor = op.Where(self.fixed, np.zeros((), tensor.dtype), tensor)
        return found.with_shape_of(tensor)

    def kept(self, new: Tensor, old: Tensor) -> Tensor:
        """Returns the next value of one, whose infinite entries stay."""
        return new if self.fixed is None else op.Where(self.fixed, old, new).with_shape_of(old)

    def inputs(self) -> tuple[Tensor, ...]:
        """Returns the inputs of the rule."""
        rate, t, gradient = self.given
        states = (
            _divided(self.finite(state), self.scaling) if name in self.optimizer.copies else state
            for name, state in zip(self.optimizer.states, self.states, strict=True)
        )
        return (rate, t, _divided(self.finite(self.x), self.scaling), gradient, *states)


def _divided(x: Tensor, scaling: float) -> Tensor:
    return x if scaling == 1 else (x / scaling).with_shape_of(x)


def _emit_operator(
    optimizer: Optimizer, inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Emits an optimizer's node of the training domain; returns the new values of variables."""
    tape, x = inputs[0].tape, variables[0]
    node = ir.Node(
        TRAINING_DOMAIN,
        optimizer.operator or "",
        [each.value for each in inputs],
        ir.convenience.convert_attributes(optimizer.operator_attributes),
        num_outputs=len(variables),
    )
    tape.append(node)
    new = tuple(
        tape.tensor(output).with_shape_of(old)
        for output, old in zip(node.outputs, variables, strict=True)
    )
    for each in new:
        each.value.type = x.value.type
    return new


def _emit_rule(
    optimizer: Optimizer, inputs: Sequence[Tensor], sums: tuple[Tensor, ...] | None
) -> tuple[Tensor, ...]:
    """Emits the nodes of an update rule, and checks the values that it returns."""
    shared = {} if sums is None else {"sums": sums}
    returned = optimizer.rule(*inputs, **optimizer.attributes | shared)
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
