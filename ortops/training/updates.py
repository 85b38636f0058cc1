"""The part of an algorithm behind the loss: gradients, their scale, and the updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph.edit import ancestor_nodes, read_inputs
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tape, Tensor, op
from ortops.lowering import TRAINING_DOMAIN
from ortops.optimizers import Optimizer
from ortops.training.algorithm import Algorithm

__all__ = [
    "HALVES",
    "SMALLEST_SCALE",
    "LossScaling",
    "emit_gradients",
    "emit_update",
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
        total: Tensor | None = None
        for gradient in gradients:
            zero = op.ReduceSum(gradient - gradient, keepdims=0).astype(np.float32)
            total = zero if total is None else total + zero
        assert total is not None
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


def emit_update(
    algorithm: Algorithm,
    optimizer: Optimizer,
    rate: Tensor,
    t: Tensor,
    parameter: Tensor,
    gradient: Tensor,
    scaling: LossScaling | None,
    masters: dict[str, str],
) -> None:
    """Emits the update of one parameter: the domain's node, or the nodes of the rule.

    Args:
        algorithm: Where it goes.
        optimizer: The optimizer.
        rate: R.
        t: T.
        parameter: The parameter.
        gradient: Its gradient, in float32 where the parameter has 16 bits.
        scaling: What the gradient is scaled by.
        masters: Parameters of 16 bits → their float32 values; extended.
    """
    tape = algorithm.tape
    x = parameter
    if parameter.value.dtype in HALVES:
        x = algorithm.master(parameter)
        masters[parameter.name] = x.name
    shape = x.value.const_value
    assert shape is not None
    optimizer = optimizer.of(shape.shape.numpy())
    states = [
        algorithm.variable(f"{parameter.name}.{name}", np.zeros(own, x.dtype))
        for name, own in optimizer.state_shapes(shape.shape.numpy()).items()
    ]
    tape.scope = f"update/{parameter.name}/"
    if scaling is not None:
        gradient = gradient * (1.0 / scaling.scale).astype(x.dtype)
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
        new = tuple(tape.tensor(output).with_shape_of(x) for output in node.outputs)
        for tensor in new:
            tensor.value.type = x.value.type
    kept = [unless_skipped(scaling, n, v) for n, v in zip(new, (x, *states), strict=True)]
    narrow = parameter.value.dtype
    rounded = None if x is parameter or narrow is None else op.Cast(kept[0], to=narrow.value)
    tape.scope = ""
    for variable, tensor in zip((x, *states), kept, strict=True):
        algorithm.update(variable.name, tensor)
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
