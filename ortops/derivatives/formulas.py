"""The formulas of derivatives: each adds outputs to a model, and returns their names."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops.derivatives.builder import Builder, Formula, for_each
from ortops.graph.autodiff.grad import grad, of_shape
from ortops.graph.edit import ancestor_nodes, read_inputs
from ortops.graph.tensor import Tape, Tensor, op, shape_of, zeros_like


def pulled_back(builder: Builder) -> Formula:
    """Returns the formula of vector-Jacobian products: ∂ (Σ over y of sum(seed · y)) / ∂x."""

    def formula(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
        return grad(dot(tape, builder.ys, seeds, builder.ys), [on(tape, x) for x in builder.xs])

    return formula


def pushed_forward(builder: Builder) -> Formula:
    """Returns the formula of Jacobian-vector products: Σ over x of ∂y/∂x · seed.

    A vector-Jacobian product is linear in its vector. Its derivative with respect to that vector is
    the transpose, the Jacobian-vector product.
    """
    vectors = [op.Identity(zeros_like(each)).with_shape_of(each) for each in builder.ys]
    products = grad(dot(builder.tape, builder.ys, vectors, builder.ys), builder.xs)

    def formula(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
        return grad(dot(tape, products, seeds, builder.xs), [on(tape, v) for v in vectors])

    return formula


def add_gradient(builder: Builder) -> list[str]:
    """Adds ∂ sum(y) / ∂x for each y and each x."""
    with builder.tape:
        return [
            builder.put_out(slope, f"d_{y.name}_d_{x.name}")
            for y in builder.ys
            for x, slope in zip(builder.xs, grad(y, builder.xs), strict=True)
        ]


def add_cotangents(builder: Builder) -> list[str]:
    """Adds ∂ sum(y) / ∂x for each y and each x; the xs may depend on one another.

    A Gradient node takes tensors that do not depend on each other, so it adds one for each length
    of the chain before them. Lowering computes all nodes of a y in one backward pass.
    """
    values = [x.value for x in builder.xs]
    read = {x: {v for node in ancestor_nodes(x, set()) for v in read_inputs(node)} for x in values}
    levels: dict[ir.Value, int] = {}
    for x in sorted(values, key=lambda x: len(read[x])):  # what it depends on reads less
        levels[x] = 1 + max((levels[v] for v in levels if v in read[x]), default=-1)
    groups = [[x for x in builder.xs if levels[x.value] == n] for n in sorted({*levels.values()})]
    names = []
    with builder.tape:
        for y in builder.ys:
            pairs = [pair for xs in groups for pair in zip(xs, grad(y, xs), strict=True)]
            found = {x.value: slope for x, slope in pairs}
            names += [builder.put_out(found[x.value], f"d_{y.name}_d_{x.name}") for x in builder.xs]
    return names


def add_vjp(builder: Builder) -> list[str]:
    """Adds ∂ (Σ over y of sum(seed · y)) / ∂x for each x."""
    with builder.tape:
        products = builder.for_seeds(builder.ys, pulled_back(builder))
        return _put_out(builder, "vjp", builder.xs, products)


def add_jvp(builder: Builder) -> list[str]:
    """Adds Σ over x of ∂y/∂x · seed for each y."""
    with builder.tape:
        products = builder.for_seeds(builder.xs, pushed_forward(builder))
        return _put_out(builder, "jvp", builder.ys, products)


def add_hvp(builder: Builder) -> list[str]:
    """Adds Σ over x' of ∂² sum(y) / ∂x∂x' · seed' for each x."""
    with builder.tape:
        slopes = grad(_total([each.sum() for each in builder.ys]), builder.xs)

        def product(tape: Tape, *seeds: Tensor) -> Sequence[Tensor]:
            return grad(dot(tape, slopes, seeds, builder.xs), [on(tape, x) for x in builder.xs])

        products = builder.for_seeds(builder.xs, product)
        return _put_out(builder, "hvp", builder.xs, products)


def _put_out(
    builder: Builder, kind: str, likes: Sequence[Tensor], products: Sequence[Tensor]
) -> list[str]:
    """Makes products outputs that are named after the tensors whose shapes they have."""
    return [
        builder.put_out(product, f"{kind}_{like.name}")
        for like, product in zip(likes, products, strict=True)
    ]


def add_jacobian(builder: Builder) -> list[str]:
    """Adds ∂y / ∂x for each y and each x."""
    with builder.tape:
        return [
            builder.put_out(result, f"d_{y.name}_d_{x.name}")
            for y in builder.ys
            for x, result in zip(builder.xs, _jacobians(builder.tape, y, builder.xs), strict=True)
        ]


def add_hessian(builder: Builder) -> list[str]:
    """Adds ∂² sum(y) / ∂x∂x' for the only y, each x and each x', in this order."""
    (y,) = builder.ys
    with builder.tape:
        return [
            builder.put_out(result, f"d2_{y.name}_d_{x.name}_d_{other.name}")
            for x, slope in zip(builder.xs, grad(y, builder.xs), strict=True)
            for other, result in zip(
                builder.xs, _jacobians(builder.tape, slope, builder.xs), strict=True
            )
        ]


def _jacobians(tape: Tape, y: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the Jacobians of y with respect to each x: the gradients of all elements of y."""
    if y.shape == ():
        return grad(y, xs)
    elements = op.Reshape(y, [-1])
    is_full = y.shape is not None and all(isinstance(dim, int) and dim for dim in y.shape)
    if not is_full:  # another row, because a Scan needs at least one
        elements = op.Concat(elements, np.zeros(1, y.dtype), axis=0)

    def row(inner: Tape, number: Tensor) -> Sequence[Tensor]:
        element = op.Gather(on(inner, elements), number, axis=0)
        slopes = grad(element, [on(inner, x) for x in xs])
        # A Scan needs the rank of its outputs.
        return [op.Reshape(s, [-1]) if s.shape is None else s for s in slopes]

    results = []
    rows = for_each(tape, [op.Range(0, op.Squeeze(op.Shape(elements)), 1)], row)
    for x, stacked in zip(xs, rows, strict=True):
        if not is_full:
            stacked = op.Slice(stacked, [0], [-1], [0])
        shape = op.Concat(shape_of(y), shape_of(x), axis=0)
        result = op.Reshape(stacked, shape, allowzero=1)
        if y.shape is not None and x.shape is not None:
            result = result.with_shape([*y.shape, *x.shape])
        results.append(result)
    return results


def on(tape: Tape, tensor: Tensor) -> Tensor:
    """Returns a tensor for use on a tape, which may belong to a subgraph."""
    return tape.tensor(tensor.value)


def dot(
    tape: Tape, tensors: Sequence[Tensor], weights: Sequence[Tensor], likes: Sequence[Tensor]
) -> Tensor:
    """Returns the scalar Σ tensors · weights; both have the shapes of ``likes``."""
    terms = [
        (on(tape, tensor) * of_shape(weight, on(tape, like))).sum()
        for tensor, weight, like in zip(tensors, weights, likes, strict=True)
    ]
    return _total(terms)


def _total(numbers: Sequence[Tensor]) -> Tensor:
    """Returns the sum of scalars, which may have different types."""
    first = numbers[0]
    return functools.reduce(operator.add, [number.astype(first.dtype) for number in numbers])
