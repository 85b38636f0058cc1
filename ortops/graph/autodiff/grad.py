"""Gradients of Tensors: emits a Gradient node while a graph is being built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from ortops.errors import ArgumentError, ModelError
from ortops.graph.autodiff.gradient_node import Bound, check
from ortops.graph.edit import describe, is_float, remove_node
from ortops.graph.shapes import may_be_equal
from ortops.graph.tensor import Tensor, op, shape_of


@overload
def grad(y: Tensor, xs: Tensor, *, seed: Tensor | npt.ArrayLike | None = None) -> Tensor: ...
@overload
def grad(
    y: Tensor, xs: Sequence[Tensor], *, seed: Tensor | npt.ArrayLike | None = None
) -> tuple[Tensor, ...]: ...
def grad(
    y: Tensor, xs: Tensor | Sequence[Tensor], *, seed: Tensor | npt.ArrayLike | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Returns the gradient of a tensor with respect to other tensors of its graph.

    It emits a Gradient node of the domain ai.onnx.preview.training, which is lowered to standard
    operators by `ortops.lower`, by `ortops.InferenceSession` and in training. The results are
    Tensors, which can be differentiated again.

    Args:
        y: The tensor to differentiate: a floating-point tensor of any shape, whose elements are
            summed.
        xs: The tensors to differentiate with respect to: floating-point inputs, initializers or
            intermediate tensors, which must not depend on each other. They are treated as
            independent variables, and all other tensors that do not depend on them as constants.
        seed: Weights of the elements of y, of the shape and dtype of y. The result is then the
            gradient of sum(seed · y), a vector-Jacobian product. By default, all weights are 1.

    Returns:
        The gradient with respect to x, of its shape and dtype: a Tensor if ``xs`` is a Tensor, and
        a tuple of them otherwise. It is zero if y does not depend on x.

    Raises:
        ArgumentError: If y or xs are not Tensors, or an x is given twice.
        ModelError: If they are not floating-point tensors of one graph, an x depends on another,
            or the shape or dtype of the seed differs from that of y.

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
        raise ArgumentError(f"grad: xs must be a Tensor or a sequence of Tensors, got {xs!r}")
    several = not isinstance(xs, Tensor)
    tensors = list(xs) if not isinstance(xs, Tensor) else [xs]
    for role, tensor in [("y", y), *(("x", x) for x in tensors)]:
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"grad: {role} must be a Tensor, got {tensor!r}")
        if tensor.tape.graph is not y.tape.graph:
            raise ModelError(
                f"grad: {role} {tensor!r} is on a different tape than y {y!r}; all tensors must "
                "belong to one graph"
            )
        if not is_float(tensor.value):
            raise ModelError(f"grad: {role} must be a floating-point tensor, got {tensor!r}")
    values = [x.value for x in tensors]
    if not values:
        raise ArgumentError("grad: xs is empty; pass at least one Tensor")
    for x in tensors:
        if values.count(x.value) > 1:
            raise ArgumentError(
                f"grad: x {x!r} is listed {values.count(x.value)} times; list it once"
            )
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
    """Returns y times a seed of the same shape and dtype."""
    if not isinstance(seed, Tensor):
        try:
            array = seed if isinstance(seed, np.ndarray | np.generic) else np.asarray(seed, y.dtype)
        except (TypeError, ValueError) as error:
            raise ModelError(f"grad: seed must be numbers like y {y!r}, got {seed!r}") from error
        seed = y.tape.constant(array)
    if seed.tape.graph is not y.tape.graph:
        raise ModelError(
            f"grad: seed {seed!r} is on a different tape than y {y!r}; all tensors must belong to "
            "one graph"
        )
    same_type = None in (seed.value.dtype, y.value.dtype) or seed.value.dtype == y.value.dtype
    if not same_type or not may_be_equal(seed.value.shape, y.value.shape):
        raise ModelError(f"grad: seed must have the shape and dtype of y {y!r}, got {seed!r}")
    return y * of_shape(seed, y)


def of_shape(x: Tensor, like: Tensor) -> Tensor:
    """Reshapes x like another tensor, so that a mismatch fails instead of broadcasting."""
    shape = like.shape
    if shape is not None and x.shape == shape and all(isinstance(dim, int) for dim in shape):
        return x
    return op.Reshape(x, shape_of(like), allowzero=1).with_shape_of(like)
