"""Optimizers: update rules as functions on arrays, and the classes that users configure.

An update rule is a function ``rule(r, t, x, g, *state, *, attributes) -> (x_new, *state_new)`` in
the notation of the specification (`ai.onnx.preview.training`): ``r`` is the learning rate (0-d,
float32 or float64), ``t`` the update count (0-d int64), ``x`` the parameter, ``g`` its gradient,
and every state tensor has the dtype and the shape given by `Optimizer.state_dtypes` and
`Optimizer.state_shapes`, usually those of ``x``. Keyword-only parameters are attributes. The same
function computes on numpy arrays and emits ONNX nodes for `ortops.Tensor` arguments.

Precision: scalar coefficients are computed in float64. Tensor arithmetic and results have the
dtype of ``x``, even if ``r`` has another one. Terms whose coefficient is exactly 0 are omitted.

Attributes are float32 in an ONNX file, where 0.9 is 0.8999999761581421. A rule uses the Python
floats that it is called with; `Optimizer.attributes` holds the float32 values, so that the file,
the Python kernel and the lowered graph compute with the same numbers.

Names: ``norm_coefficient`` is L2 regularization, which is added to the gradient; ``weight_decay``
is decoupled from the gradient, as in AdamW.

To add an optimizer, write its rule and an `Optimizer` subclass in a file of this folder, and
list them in the file's ``__all__``. To use a custom optimizer, pass an update rule as
``optimizer=`` (see `Custom`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ortops._common.other_names import (
    declared,
    explain_arguments_of,
    find_name,
    foreign,
    other_names,
)
from ortops.errors import ArgumentError
from ortops.optimizers import (
    distance,
    factored,
    gradient_descent,
    layerwise,
    moments,
    orthogonal,
    quantized,
    schedule_free,
    sign,
    squares,
    variants,
)
from ortops.optimizers.distance import *  # noqa: F403
from ortops.optimizers.factored import *  # noqa: F403
from ortops.optimizers.gradient_descent import *  # noqa: F403
from ortops.optimizers.layerwise import *  # noqa: F403
from ortops.optimizers.moments import *  # noqa: F403
from ortops.optimizers.optimizer import OPERATORS, Custom, Operator, Optimizer, UpdateRule
from ortops.optimizers.orthogonal import *  # noqa: F403
from ortops.optimizers.quantized import *  # noqa: F403
from ortops.optimizers.schedule_free import *  # noqa: F403
from ortops.optimizers.sign import *  # noqa: F403
from ortops.optimizers.squares import *  # noqa: F403
from ortops.optimizers.variants import *  # noqa: F403

__all__: list[str] = []
__all__ += distance.__all__
__all__ += factored.__all__
__all__ += gradient_descent.__all__
__all__ += layerwise.__all__
__all__ += moments.__all__
__all__ += orthogonal.__all__
__all__ += quantized.__all__
__all__ += schedule_free.__all__
__all__ += sign.__all__
__all__ += squares.__all__
__all__ += variants.__all__

OPTIMIZERS: Mapping[str, type[Optimizer]] = declared(Optimizer, __all__, globals())
"""The optimizer classes by name; a name selects an optimizer with its defaults."""

explain_arguments_of(OPTIMIZERS.values())

__all__ += ["OPERATORS", "OPTIMIZERS", "OTHER_NAMES", "Custom", "Operator", "Optimizer"]
__all__ += ["UpdateRule", "resolve"]

OTHER_NAMES: Mapping[str, str] = {
    **other_names(OPTIMIZERS),
    "nesterov": "use Momentum(mode='nesterov')",
    "adamwschedulefree": "use 'ScheduleFreeAdamW'",
    **dict.fromkeys(("adamwtorch", "pagedadamw"), "use 'AdamW'"),
    **dict.fromkeys(("adamw8bit", "pagedadamw8bit"), "use 'Adam8bit', with weight_decay=0.01"),
}
"""What other libraries call optimizers, as in `ortops.losses.OTHER_NAMES`."""


def resolve(optimizer: str | Optimizer | type[Optimizer] | UpdateRule) -> Optimizer:
    """Converts an ``optimizer=`` argument to an `Optimizer`.

    Args:
        optimizer: An optimizer; a class or the name of one, in upper or lower case, for its
            defaults; or a custom update rule (see `Custom`).

    Raises:
        ArgumentError: If there is no optimizer of that name, or the value has another type.

    Example:
        >>> resolve("Adagrad")
        Adagrad(learning_rate=0.01, epsilon=1e-06, decay_factor=0.0, norm_coefficient=0.0)
        >>> resolve("Adan")
        Traceback (most recent call last):
        ...
        ortops.errors.ArgumentError: unknown optimizer 'Adan'; did you mean 'Adam'?
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        found, hint = find_name(optimizer, OPTIMIZERS, OTHER_NAMES)
        if found is None:
            raise ArgumentError(f"unknown optimizer {optimizer!r}; {hint}")
        return OPTIMIZERS[found]()  # type: ignore[call-arg]  # every subclass has a default
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer()  # type: ignore[call-arg]
    if name := foreign(optimizer):
        found, hint = find_name(name, OPTIMIZERS, OTHER_NAMES)
        hint = f"use ortops.optimizers.{found}(learning_rate)" if found else hint
        raise ArgumentError(
            f"optimizer must be one of ortops.optimizers, got {name} of another library; {hint}"
        )
    if callable(optimizer):
        return Custom(optimizer)
    raise ArgumentError(
        "optimizer must be one of ortops.optimizers, the name of one, or an update function"
        f" (r, t, x, g, *state), got {optimizer!r}"
    )
