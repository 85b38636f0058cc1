"""Optimizers: every update rule once, as a function on arrays, and the constructors users name.

An update rule is a function ``rule(r, t, x, g, *state, *, attributes) -> (x_new, *state_new)`` in
the notation of the specification (`ai.onnx.preview.training`): ``r`` is the learning rate (0-d,
float32 or float64), ``t`` the update count (0-d int64), ``x`` the parameter, ``g`` its gradient,
and every state tensor has the dtype of ``x`` and the shape that `Optimizer.state_shapes` tells,
mostly that of ``x``. Keyword-only parameters are attributes. Given numpy arrays a rule computes;
given `ortops.Tensor` it emits ONNX nodes. There is no second implementation.

Precision: scalar coefficients are computed in float64, then tensor arithmetic and results are in
the dtype of ``x``, also when ``r`` has another one. A term whose coefficient is exactly 0 is left
out.

Attributes are float32 in an ONNX file: 0.9 there means 0.8999999761581421. A rule uses the Python
float that it is given; `Optimizer.attributes` holds the float32 values, so that a file, a kernel
and a graph of nodes compute with the same numbers.

Names: ``norm_coefficient`` is L2 regularization, which is added to the gradient; ``weight_decay``
is apart from the gradient, as in AdamW.

To add an optimizer, write its rule and an `Optimizer` subclass in a file of this folder, and name
them here; nothing else needs to know it. For one of your own, hand a rule to ``optimizer=``
instead (see `Custom`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ortops.errors import ModelError, did_you_mean
from ortops.optimizers.factored import Adafactor, adafactor, adafactor_unfactored
from ortops.optimizers.gradient_descent import SGD, Momentum, momentum, sgd
from ortops.optimizers.layerwise import LAMB, lamb
from ortops.optimizers.moments import (
    Adam,
    AdamW,
    AMSGrad,
    adam,
    adam_after_correction,
    adamw,
    adamw_after_correction,
    amsgrad,
)
from ortops.optimizers.optimizer import OPERATORS, Custom, Operator, Optimizer, UpdateRule
from ortops.optimizers.orthogonal import Muon, muon
from ortops.optimizers.sign import Lion, lion
from ortops.optimizers.squares import Adadelta, Adagrad, RMSprop, adadelta, adagrad, rmsprop
from ortops.optimizers.variants import Adamax, NAdam, RAdam, adamax, nadam, radam

__all__ = [
    "LAMB",
    "OPERATORS",
    "OPTIMIZERS",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Custom",
    "Lion",
    "Momentum",
    "Muon",
    "NAdam",
    "Operator",
    "Optimizer",
    "RAdam",
    "RMSprop",
    "UpdateRule",
    "adadelta",
    "adafactor",
    "adafactor_unfactored",
    "adagrad",
    "adam",
    "adam_after_correction",
    "adamax",
    "adamw",
    "adamw_after_correction",
    "amsgrad",
    "lamb",
    "lion",
    "momentum",
    "muon",
    "nadam",
    "radam",
    "resolve",
    "rmsprop",
    "sgd",
]

OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    constructor.__name__: constructor
    for constructor in (
        *(SGD, Momentum, Adagrad, RMSprop, Adadelta, Adam, AdamW, AMSGrad, NAdam, RAdam, Adamax),
        *(Lion, LAMB, Adafactor, Muon),
    )
}
"""The constructors above, by the names that stand for their defaults."""


def resolve(optimizer: str | Optimizer | type[Optimizer] | UpdateRule) -> Optimizer:
    """Turns what a user may give as ``optimizer=`` into an `Optimizer`.

    Args:
        optimizer: An optimizer, its class or the name of its class (both stand for the defaults),
            or an update rule of the user's own (see `Custom`).

    Raises:
        ModelError: There is no optimizer of that name, or the value is none of these.

    Example:
        >>> resolve("Adagrad")
        Adagrad(learning_rate=0.01, epsilon=1e-06, decay_factor=0.0, norm_coefficient=0.0)
        >>> resolve("Adan")
        Traceback (most recent call last):
        ...
        ortops.errors.ModelError: optimizer 'Adan' is not known; did you mean 'Adam'?
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            hint = did_you_mean(optimizer, OPTIMIZERS)
            raise ModelError(f"optimizer {optimizer!r} is not known; {hint}")
        return OPTIMIZERS[optimizer]()  # type: ignore[call-arg]  # every subclass has a default
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer()  # type: ignore[call-arg]
    if callable(optimizer):
        return Custom(optimizer)
    raise ModelError(
        f"optimizer is {optimizer!r}; one of ortops.optimizers, its name, or an update function"
        " (r, t, x, g, *state) is accepted"
    )
