"""Gradients of Tensors: a Gradient node for tensors under construction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ortops.autodiff.gradient_node import Bound, check
from ortops.errors import ModelError
from ortops.graph.edit import describe, is_float, remove_node
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tensor, op, shape_of

__all__ = ["grad", "of_shape"]


@overload
def grad(y: Tensor, xs: Tensor, *, seed: Tensor | npt.ArrayLike | None = None) -> Tensor: ...
@overload
def grad(
    y: Tensor, xs: Sequence[Tensor], *, seed: Tensor | npt.ArrayLike | None = None
) -> tuple[Tensor, ...]: ...
def grad(
    y: Tensor, xs: Tensor | Sequence[Tensor], *, seed: Tensor | npt.ArrayLike | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Returns the gradient of a tensor with respect to others of its graph.

    It emits a Gradient node of the domain ai.onnx.preview.training, which `ortops.lower`,
    `ortops.InferenceSession` and trainings turn into standard operators. What it returns are
    Tensors like others, so gradients of gradients are called for in the same way.

    Args:
        y: What is differentiated: a floating-point tensor of any shape, which counts as the sum of
            its elements.
        xs: What it is differentiated with respect to: inputs, initializers or tensors between, of
            floating-point numbers, none of which is computed from another. y is held to depend on
            nothing but these, and on what they do not reach.
        seed: Weights of the elements of y, of its shape and dtype, so that the result is that of
            sum(seed · y): a vector-Jacobian product. All are 1 by default.

    Returns:
        A Tensor of the shape and dtype of each x: one where ``xs`` is a Tensor, else a tuple. It
        is zero where y does not depend on x.

    Raises:
        ModelError: If these are not floating-point tensors of one graph, an x is given twice or is
            computed from another, or the seed is not like y.

    Source: the schema of ai.onnx.preview.training's Gradient.

    Example:
        >>> from ortops import Tape
        >>> with Tape(name="force") as tape:
        ...     positions = tape.input("positions", np.float32, ["atoms", 3])
        ...     energy = (positions**2).sum() / 2
        ...     force = tape.output(-grad(energy, positions), "force")
        >>> force
        Tensor('force', float32, [atoms, 3])
        >>> [node.op_type for node in tape.model().graph.node][-2:]
        ['Gradient', 'Neg']
    """
    if not isinstance(xs, Tensor | Iterable):
        raise ModelError(f"grad: xs is {xs!r}; a Tensor is accepted, or a sequence of them")
    several = not isinstance(xs, Tensor)
    tensors = list(xs) if not isinstance(xs, Tensor) else [xs]
    for role, tensor in [("y", y), *(("x", x) for x in tensors)]:
        if not isinstance(tensor, Tensor):
            raise ModelError(f"grad: {role} is {tensor!r}; a Tensor is accepted")
        if tensor.tape.graph is not y.tape.graph:
            raise ModelError(
                f"grad: {role} {tensor!r} is on another tape than y {y!r}; tensors of one graph "
                "are accepted"
            )
        if not is_float(tensor.value):
            raise ModelError(
                f"grad: {role} {tensor!r} has no derivative; floating-point tensors are accepted"
            )
    values = [x.value for x in tensors]
    if not values:
        raise ModelError("grad: xs is empty; give at least one Tensor")
    for x in tensors:
        if values.count(x.value) > 1:
            raise ModelError(f"grad: x {x!r} is given {values.count(x.value)} times; give it once")
    tape = y.tape
    if seed is not None:
        y = _weighted(y, seed)
    bound = Bound.make(values, values, [], y.value, num_outputs=len(values))
    for value, output in zip(values, bound.node.outputs, strict=True):
        output.type, output.shape = value.type, value.shape
    tape.append(bound.node)
    try:
        check(describe(bound.node), bound)
    except ModelError:
        remove_node(bound.node)
        raise
    slopes = tuple(tape.tensor(output) for output in bound.node.outputs)
    return slopes if several else slopes[0]


def _weighted(y: Tensor, seed: object) -> Tensor:
    """Returns y times a seed, which is like it."""
    if not isinstance(seed, Tensor):
        try:
            array = seed if isinstance(seed, np.ndarray | np.generic) else np.asarray(seed, y.dtype)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"grad: seed is {seed!r}; numbers like y {y!r} are accepted"
            ) from error
        seed = y.tape.constant(array)
    if seed.tape.graph is not y.tape.graph:
        raise ModelError(
            f"grad: seed {seed!r} is on another tape than y {y!r}; tensors of one graph are "
            "accepted"
        )
    same_type = None in (seed.value.dtype, y.value.dtype) or seed.value.dtype == y.value.dtype
    if not same_type or not may_be_equal(seed.value.shape, y.value.shape):
        raise ModelError(f"grad: seed {seed!r} is not like y {y!r}; it has its shape and dtype")
    return y * of_shape(seed, y)


def of_shape(x: Tensor, like: Tensor) -> Tensor:
    """Returns x in the shape of another tensor, at which a run fails rather than broadcasts."""
    shape = like.shape
    if shape is not None and x.shape == shape and all(isinstance(dim, int) for dim in shape):
        return x
    return op.Reshape(x, shape_of(like), allowzero=1).with_shape_of(like)
