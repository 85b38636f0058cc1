"""Rules of operators that work element by element, with broadcasting."""

from __future__ import annotations

from typing import Any

from ortops.autodiff import vjp
from ortops.tensor import Tensor, op

Cotangents = Tensor | tuple[Tensor | None, ...]


@vjp("Add", elementwise=True)
def add(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return g, g


@vjp("Sub", elementwise=True)
def sub(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return g, -g


@vjp("Mul", elementwise=True)
def mul(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    return g * b, g * a


@vjp("Exp")
def exp(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return g * y


@vjp("Identity")
def identity(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return g


@vjp("Cast")
def cast(g: Tensor, y: Tensor, x: Tensor, *, to: int, saturate: int = 1, **_: Any) -> Cotangents:
    return g.astype(x.dtype)


@vjp("Sin")
def sin(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return g * op.Cos(x)


@vjp("Cos")
def cos(g: Tensor, y: Tensor, x: Tensor) -> Cotangents:
    return -g * op.Sin(x)
