"""Fusion of an RMS normalization that was exported as several nodes.

onnxruntime's SimplifiedLayerNormalization computes it in one pass over memory, with the rounding
errors of the nodes, and returns the factor of each row, which the backward pass needs.
"""

from __future__ import annotations

import onnx_ir as ir

from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.normalization import rms_vjp
from ortops.graph.edit import emit
from ortops.graph.matching import Found, Number, Variable, form, is_last_axis
from ortops.graph.passes.rewrite import Fusion, Result, formula
from ortops.graph.tensor import Tape, Tensor

FUSED = "SimplifiedLayerNormalization"
"""onnxruntime's operator, in the standard domain."""

TABLE = Table()
"""The rule of the fused operator."""

_X, _SCALE, _AXES = Variable("the input"), Variable("the scale"), Variable("the axes")
_EPSILON, _SIZE = Number(when=lambda number: number >= 0), Number()
_SUM = form.ReduceSumSquare(_X, _AXES, keepdims=1)
_MEAN = form.ReduceMean(_X * _X | _X**2.0, _AXES, keepdims=1) | _SUM / _SIZE
_SQUARE = _MEAN + _EPSILON
_ROOT = form.Sqrt(_SQUARE) | _SQUARE**0.5
_INVERSE = form.Reciprocal(_ROOT) | 1.0 / _ROOT | _SQUARE**-0.5


@formula((_X / _ROOT | _X * _INVERSE) * _SCALE)
def _fused(found: Found, tape: Tape) -> Result:
    x, scale = found[_X], found[_SCALE]
    if x.dtype != ir.DataType.FLOAT or not x.shape or scale.shape is None:
        return f"'{x.name}' is {x.dtype}{x.shape or ''}, not float32 of known rank"
    columns = x.shape[-1]
    if not is_last_axis(found[_AXES], x):
        return "the mean is not over the last axis"
    if not isinstance(columns, int) or list(scale.shape) != [columns]:
        return f"the scale '{scale.name}' has the shape {scale.shape}, not [{columns}]"
    if _SIZE in found and found.number(_SIZE) != columns:
        return f"the sum of squares is divided by {found.number(_SIZE):.9g}, not by {columns}"
    y, _ = emit(
        tape,
        "",
        FUSED,
        [tape.tensor(x), tape.tensor(scale)],
        [x.shape, [*x.shape[:-1], 1]],
        axis=-1,
        epsilon=found.number(_EPSILON),
        stash_type=1,
    )
    return y


@TABLE.vjp(FUSED, needs=(1,))
def _rule(
    g: tuple[Tensor | None, ...],
    y: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Cotangents:
    g_y, g_inverse = (*g, None)[:2]
    inverse = y[1]
    d_x = d_scale = None
    if g_y is not None:
        d_x, d_scale = rms_vjp(g_y, x, inverse, scale, [x.ndim - 1])
    if g_inverse is not None:  # of a gradient of higher order
        assert x.shape is not None
        assert isinstance(x.shape[-1], int)
        part = x * (g_inverse * inverse * (inverse * inverse) * (-1 / x.shape[-1]))
        d_x = part if d_x is None else d_x + part
    return d_x, d_scale


RMS_NORMALIZATION = Fusion("rms_normalization", _fused, fused=("", FUSED), table=TABLE)
