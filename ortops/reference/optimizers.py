"""Adagrad, Adam and Momentum: the pseudo-code of the specification in NumPy.

Coefficients are computed in float64, and tensors in the type of X.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

from ortops.reference.traced import Array

_DOMAIN = "ai.onnx.preview.training"


def _check_node(node: onnx.NodeProto) -> None:
    """Refuses attributes that the schema does not have."""
    schema = onnx.defs.get_schema(node.op_type, 1, _DOMAIN)
    for attribute in node.attribute:
        declared = schema.attributes.get(attribute.name)
        if declared is None:
            raise ValueError(f"{node.op_type}: it has no attribute {attribute.name!r}")
        name = onnx.AttributeProto.AttributeType.Name(attribute.type)
        if not attribute.ref_attr_name and not str(declared.type).endswith(f".{name}"):
            raise ValueError(f"{node.op_type}: the type of {attribute.name!r} is wrong")


def _is_scalar(value: Array, types: Sequence[Any]) -> bool:
    return value.ndim == 0 and value.dtype in types


class _Optimizer(OpRun):
    """What the three operators have in common: R, T, and several tensors with their state."""

    op_domain = _DOMAIN
    formula: ClassVar[Callable[..., Sequence[Array]]]
    results: ClassVar[int]

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        _check_node(onnx_node)
        super().__init__(onnx_node, run_params)
        if len(onnx_node.output) > (len(onnx_node.input) - 2) // (self.results + 1) * self.results:
            raise ValueError(f"{onnx_node.op_type}: it has more outputs than results")

    def _run(self, r: Array, t: Array, *tensors: Array, **attributes: Any) -> tuple[Array, ...]:
        operator, per_tensor = type(self).__name__, self.results + 1
        if not _is_scalar(r, (np.float32, np.float64)) or not _is_scalar(t, (np.int64,)):
            raise ValueError(f"{operator}: R must be a floating-point scalar, T an int64 scalar")
        if not tensors or len(tensors) % per_tensor:
            raise ValueError(
                f"{operator} takes {per_tensor} inputs for each tensor, after R and T, "
                f"got {len(tensors)}"
            )
        if {a.dtype for a in tensors} not in ({np.dtype(np.float32)}, {np.dtype(np.float64)}):
            raise ValueError(f"{operator}: tensors must all be float32 or all float64")
        count = len(tensors) // per_tensor
        found = []
        for i in range(count):
            group = tensors[i::count]
            if len({a.shape for a in group}) > 1:
                raise ValueError(
                    f"{operator}: a tensor, its gradient and state must be equal-shaped"
                )
            numbers = {k: v if isinstance(v, str) else float(v) for k, v in attributes.items()}
            found.append(type(self).formula(float(r), int(t), *group, **numbers))
        # all new tensors, then all of each kind of state
        return tuple(np.asarray(group[k]) for k in range(self.results) for group in found)


def adagrad(
    R: float,
    T: int,
    X: Array,
    G: Array,
    H: Array,
    *,
    decay_factor: float,
    epsilon: float,
    norm_coefficient: float,
) -> Sequence[Array]:
    """Returns ``X_new`` and ``H_new``."""
    r = R / (1 + T * decay_factor)
    G_regularized = norm_coefficient * X + G
    H_new = H + G_regularized * G_regularized
    H_adaptive = np.sqrt(H_new) + epsilon
    X_new = X - r * G_regularized / H_adaptive
    return X_new, H_new


def adam(
    R: float,
    T: int,
    X: Array,
    G: Array,
    V: Array,
    H: Array,
    *,
    alpha: float,
    beta: float,
    epsilon: float,
    norm_coefficient: float,
    norm_coefficient_post: float,
) -> Sequence[Array]:
    """Returns ``X_final``, ``V_new`` and ``H_new``."""
    G_regularized = norm_coefficient * X + G
    V_new = alpha * V + (1 - alpha) * G_regularized
    H_new = beta * H + (1 - beta) * G_regularized * G_regularized
    H_sqrt = np.sqrt(H_new) + epsilon
    R_adjusted = R * (1 - beta**T) ** 0.5 / (1 - alpha**T) if T > 0 else R
    X_new = X - R_adjusted * V_new / H_sqrt
    X_final = (1 - norm_coefficient_post) * X_new
    return X_final, V_new, H_new


def momentum(
    R: float,
    T: int,
    X: Array,
    G: Array,
    V: Array,
    *,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> Sequence[Array]:
    """Returns ``X_new`` and ``V_new``."""
    G_regularized = norm_coefficient * X + G
    beta_adjusted = beta if T > 0 else 1
    V_new = alpha * V + beta_adjusted * G_regularized
    if mode == "standard":
        return X - R * V_new, V_new
    return X - R * (G_regularized + alpha * V_new), V_new


class Adagrad(_Optimizer):
    """Adagrad of the specification."""

    formula = staticmethod(adagrad)
    results = 2


class Adam(_Optimizer):
    """Adam of the specification."""

    formula = staticmethod(adam)
    results = 3


class Momentum(_Optimizer):
    """Momentum of the specification."""

    formula = staticmethod(momentum)
    results = 2
    mode: Any

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        super().__init__(onnx_node, run_params)
        if isinstance(self.mode, str) and self.mode not in ("nesterov", "standard"):
            raise ValueError(f"Momentum: mode must be nesterov or standard, got {self.mode!r}")
