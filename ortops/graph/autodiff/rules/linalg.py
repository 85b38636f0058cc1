"""Rules of matrix products."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.constants import Dim
from ortops.graph.edit import describe
from ortops.graph.shapes import index_range, reshape_like, size_of, unbroadcast
from ortops.graph.tensor import Tensor, op, shape_of


def _rows(x: Tensor) -> Tensor:
    """Flattens all axes but the last."""
    return x if x.ndim == 2 else op.Flatten(x, axis=-1)


@vjp("MatMul")
def matmul(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Cotangents:
    if b.ndim == 1:  # each element of y is the inner product of a row of a and b
        if a.ndim == 1:
            return g * b, g * a
        return op.Unsqueeze(g, [-1]) * b, op.MatMul(op.Reshape(g, [-1]), _rows(a))
    if b.ndim == 2:
        if a.ndim == 1:
            return b @ g, op.Unsqueeze(a, [1]) * op.Unsqueeze(g, [0])
        rows = _rows(g)
        da = op.Gemm(rows, b, transB=1)
        return reshape_like(da, a), op.Gemm(_rows(a), rows, transA=1)
    if a.ndim == 1:
        da = op.MatMul(b, op.Unsqueeze(g, [-1]))
        db = op.Unsqueeze(a, [1]) * op.Unsqueeze(g, [-2])
        return unbroadcast(op.Squeeze(da, [-1]), a), db
    return unbroadcast(op.MatMul(g, b.mT), a), unbroadcast(op.MatMul(a.mT, g), b)


@vjp("Gemm")
def gemm(
    g: Tensor,
    y: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Cotangents:
    if transA:
        da = op.Gemm(b, g, alpha=alpha, transA=transB, transB=1)
    else:
        da = op.Gemm(g, b, alpha=alpha, transB=1 - transB)
    if transB:
        db = op.Gemm(g, a, alpha=alpha, transA=1, transB=transA)
    else:
        db = op.Gemm(a, g, alpha=alpha, transA=1 - transA)
    if c is None:
        return da, db
    dc = unbroadcast(g, c)
    return da, db, dc if beta == 1 else dc * beta


@vjp("Einsum", limits="ranks must be known; no broadcasting within a letter")
def einsum(g: Tensor, y: Tensor, *xs: Tensor, equation: str) -> Cotangents:
    written, whole = _explicit(equation)
    terms, result = _letters(written, whole, [x.ndim for x in xs])
    sizes = _sizes(terms, xs)
    _refuse_broadcast(y, equation, sizes)
    may_broadcast = any(
        len(found) > 1 and not all(isinstance(size, int) for size in found)
        for letter, found in sizes.items()
        if letter not in equation
    )
    cotangents = []
    for index, (x, term) in enumerate(zip(xs, terms, strict=True)):
        others = [*xs[:index], *xs[index + 1 :]]
        # Keep an ellipsis if possible: its axes may be broadcast, and onnxruntime requires it in
        # the result too.
        outer, inner = (whole, written) if "..." in written[index] else (result, terms)
        read = [outer, *inner[:index], *inner[index + 1 :]]
        found = set("".join(read))
        tokens = dict.fromkeys(re.findall(r"\.{3}|\w", inner[index]))
        wanted = "".join(token for token in tokens if token == "..." or token in found)
        dx = g
        if others or wanted != outer:
            dx = op.Einsum(g, *others, equation=f"{','.join(read)}->{wanted}")
            if "..." in wanted and may_broadcast:  # onnx infers the symbols of one operand
                dx = dx.with_shape([None] * dx.ndim)
        covered = [letter for letter in term if letter not in written[index]]
        cotangents.append(_spread(dx, wanted.replace("...", "".join(covered)), x, term))
    return tuple(cotangents)


def _explicit(equation: str) -> tuple[list[str], str]:
    """Returns the subscripts of the operands and of the result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = left.replace("...", "").replace(",", "")
        once = sorted(letter for letter in set(letters) if letters.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    return left.split(","), right


def _letters(terms: Sequence[str], result: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Replaces ellipses with letters."""
    free = [letter for letter in string.ascii_letters if letter not in "".join(terms)]
    covered = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(terms, ranks, strict=True)
    ]
    longest = max(covered)
    ellipsis = "".join(free[:longest])
    filled = [
        term.replace("...", ellipsis[longest - count :])
        for term, count in zip(terms, covered, strict=True)
    ]
    return filled, result.replace("...", ellipsis)


def _sizes(terms: Sequence[str], xs: Sequence[Tensor]) -> dict[str, set[Dim]]:
    """Returns the sizes of each letter's axes."""
    sizes: dict[str, set[Dim]] = {}
    for term, x in zip(terms, xs, strict=True):
        for letter, size in zip(term, x.shape or (), strict=True):
            sizes.setdefault(letter, set()).add(size)
    return sizes


def _refuse_broadcast(y: Tensor, equation: str, sizes: Mapping[str, set[Dim]]) -> None:
    """Rejects letters with the size 1 and another one, for which onnx infers a wrong shape."""
    for letter, found in sizes.items():
        known = sorted(size for size in found if isinstance(size, int))
        if letter in equation and len(known) > 1:
            node = y.value.producer()
            raise UnsupportedError(
                f"{describe(node) if node else 'Einsum'}: in '{equation}', '{letter}' has sizes "
                f"{known}; squeeze axes of size 1 and omit their letter, or use an ellipsis, which "
                "supports broadcasting"
            )


def _spread(dx: Tensor, have: str, x: Tensor, term: str) -> Tensor:
    """Restores the axes of x that its term alone has, which were summed, and its diagonals."""
    first = {letter: term.index(letter) for letter in term}
    added = [
        axis for axis, letter in enumerate(term) if letter not in have or axis != first[letter]
    ]
    if added:
        dx = op.Unsqueeze(dx, added)
    for axis, letter in enumerate(term):
        if axis != first[letter]:
            ahead, behind = (
                op.Unsqueeze(index_range(size_of(x, [axis]), x), _others(x, a))
                for a in (first[letter], axis)
            )
            dx = op.Where(op.Equal(ahead, behind), dx, 0)
    if not set(term) <= set(have):
        dx = op.Expand(dx, shape_of(x))
    return unbroadcast(dx, x)


def _others(x: Tensor, axis: int) -> list[int]:
    return [other for other in range(x.ndim) if other != axis]
