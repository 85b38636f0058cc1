"""The rule of Dropout, which draws random numbers but passes a cotangent on."""

from __future__ import annotations

from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.tensor import Tensor, op

Optionals = tuple[Tensor | None, ...]


@vjp("Dropout", needs=(1,), limits="no gradient to ratio")
def dropout(
    g: Optionals,
    y: Optionals,
    x: Tensor,
    ratio: Tensor | None = None,
    training_mode: Tensor | None = None,
    *,
    seed: int | None = None,
) -> Cotangents:
    g_y, mask = g[0], y[1]
    if g_y is None or training_mode is None:
        return g_y, None, None
    given = None if ratio is None else ratio.constant
    factor: float | Tensor
    if ratio is None:
        factor = 2.0
    elif given is not None:
        factor = 1 / (1 - float(given)) if given < 1 else 0.0
    else:
        factor = op.Reciprocal(1 - ratio.astype(x.dtype))
    training = training_mode.constant
    if training is None:
        factor = op.Where(training_mode, factor, op.CastLike(1.0, x))
    elif not training:
        return g_y, None, None
    return op.Where(mask, g_y * factor, 0), None, None
