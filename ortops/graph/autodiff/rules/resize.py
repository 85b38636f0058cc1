"""The rule of Resize.

Resize is linear and separable: along each axis, it multiplies by a matrix of interpolation weights.
This matrix is computed by applying Resize to the identity matrix. Therefore it is correct for all
modes, coordinate transformations and sizes, known or unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents
from ortops.graph.autodiff.rules.table import vjp
from ortops.graph.edit import describe
from ortops.graph.shapes import size_of
from ortops.graph.tensor import Tensor, op, shape_of

_COPIES_BLOCKS = {
    ("asymmetric", "floor"),
    ("half_pixel", "round_prefer_ceil"),
    ("half_pixel", "round_prefer_floor"),
    ("half_pixel_symmetric", "round_prefer_ceil"),
    ("half_pixel_symmetric", "round_prefer_floor"),
    ("pytorch_half_pixel", "round_prefer_ceil"),
    ("pytorch_half_pixel", "round_prefer_floor"),
    ("tf_half_pixel_for_nn", "floor"),
}
"""The nearest modes in which scaling by an integer n repeats each element n times."""


@dataclass(frozen=True)
class _Resizing:
    """The arguments of a Resize.

    Attributes:
        x: The input; only its shape is used.
        y: The output; only its shape is used.
        axes: The axes that ``roi``, ``scales`` and ``sizes`` refer to.
        roi: The region of interest, if the coordinate transformation uses it.
        scales: The scales, or None if sizes are given.
        sizes: The sizes, or None if scales are given.
        attributes: The attributes that determine the interpolation weights.
        policy: The attribute keep_aspect_ratio_policy.
    """

    x: Tensor
    y: Tensor
    axes: tuple[int, ...]
    roi: Tensor | None
    scales: Tensor | None
    sizes: Tensor | None
    attributes: dict[str, Any]
    policy: str

    def scale(self, axis: int) -> float | None:
        """Returns the scale of an axis, or None if it is known only at run time."""
        if self.policy != "stretch" and self.scales is None:
            return None
        given = None if self.scales is None else self.scales.constant
        if given is not None:
            return float(given[self.axes.index(axis)])
        if self.scales is not None or self.x.shape is None or self.y.shape is None:
            return None
        before, after = self.x.shape[axis], self.y.shape[axis]
        if before is not None and before == after:
            return 1.0
        known = isinstance(before, int) and isinstance(after, int) and before > 0
        return cast(int, after) / cast(int, before) if known else None

    @property
    def outer(self) -> int:
        """The number of leading axes that onnxruntime never resizes."""
        # onnxruntime interpolates along the last two or three axes, or the middle two of four.
        return max(self.x.ndim - 3, 0) if self.attributes["mode"] != "nearest" else 0

    def resized(self) -> list[int]:
        """Returns the axes that may be resized; onnxruntime copies along an axis with scale 1."""
        return [axis for axis in self.axes if axis >= self.outer and self.scale(axis) != 1]

    def matrix(self, axis: int) -> Tensor:
        """Returns the weights (length of x, length of y) along an axis."""
        length = size_of(self.x, [axis])
        if isinstance(length, int):
            square = self.x.tape.constant(np.array([length, length]))
        else:
            square = op.Concat(*[op.Reshape(length, [-1])] * 2, axis=0)
        eye = op.EyeLike(op.ConstantOfShape(square, value=np.zeros(1, np.float32)))
        position, count = self.axes.index(axis), len(self.axes)
        roi = None if self.roi is None else op.Gather(self.roi, [position, count + position])
        if self.scales is None:
            by_length = self.attributes["coordinate_transformation_mode"] in (
                "align_corners",
                "tf_crop_and_resize",
            )
            if self.policy != "stretch" and count > 1 and not by_length:
                return self._matrix_in_policy(eye, axis)
            size = [size_of(self.y, [axis])]
            weights = op.Resize(eye, roi, None, size, axes=[1], **self.attributes)
        elif _may_keep_length(self.scale(axis), length):
            return self._matrix_of_kept_length(eye, axis, roi)
        else:
            scale = op.Gather(self.scales, [position])
            weights = op.Resize(eye, roi, scale, axes=[1], **self.attributes)
        return cast(Tensor, weights)

    def _matrix_of_kept_length(self, eye: Tensor, axis: int, roi: Tensor | None) -> Tensor:
        """Returns the weights along an axis that may keep its length although its scale is not 1.

        If no axis changes its length, onnxruntime copies the input. Therefore another axis is added
        to the identity matrix, which changes its length if any axis of x does.
        """
        changes = op.ReduceMax(abs(shape_of(self.y) - shape_of(self.x)), keepdims=1) > 0
        second = op.Where(changes, np.array(2, np.float32), np.array(1, np.float32))
        scales = op.Concat(op.Gather(self.scales, [self.axes.index(axis)]), second, axis=0)
        if roi is not None:
            ends = op.Gather(roi, [0, 1])
            zero, one = np.zeros(1, roi.dtype), np.ones(1, roi.dtype)
            roi = op.Concat(ends[:1], zero, ends[1:], one, axis=0)
        wide = op.Unsqueeze(eye, [0, 3])
        weights = op.Resize(wide, roi, scales, axes=[2, 3], **self.attributes)
        return op.Squeeze(op.Slice(weights, [0], [1], [3]), [0, 3])

    def _matrix_in_policy(self, eye: Tensor, axis: int) -> Tensor:
        """Returns the weights along an axis whose scale may be determined by another axis."""
        position, count = self.axes.index(axis), len(self.axes)
        lengths = [size_of(self.x, [a]) for a in self.axes]
        others = [a for a in range(2, 2 + count) if a != 2 + position]
        alone = op.Unsqueeze(eye, [1, *others])
        everywhere = op.Expand(alone, [lengths[position], 1, *lengths])
        weights = op.Resize(
            everywhere,
            None,
            None,
            self.sizes,
            axes=list(range(2, 2 + count)),
            keep_aspect_ratio_policy=self.policy,
            **self.attributes,
        )
        first = op.Slice(weights, [0] * len(others), [1] * len(others), others)
        return op.Squeeze(first, [1, *others])


def _check_policy(y: Tensor, call: _Resizing) -> None:
    """Rejects aspect-ratio policies that onnxruntime supports only in part."""
    cropped = call.attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    node = y.value.producer()
    name = describe(node) if node else "Resize"
    if min(call.axes) < call.outer:
        raise UnsupportedError(
            f"{name}: no gradient for keep_aspect_ratio_policy '{call.policy}' in mode "
            f"'{call.attributes['mode']}' for axes {list(call.axes)}, because onnxruntime resizes "
            f"no axis before {call.outer}; list the axes to resize in the attribute axes"
        )
    if cropped and "antialias" in call.attributes:
        raise UnsupportedError(
            f"{name}: no gradient for keep_aspect_ratio_policy '{call.policy}' with antialias and "
            "tf_crop_and_resize; use the policy 'stretch'"
        )


def _may_keep_length(scale: float | None, length: int | Tensor) -> bool:
    """Whether a scale other than 1 may keep a length of 2 or more unchanged, by rounding."""
    if scale is None:
        return True
    shortest = length if isinstance(length, int) else 2
    return scale > 1 and int(np.float32(scale) * np.float32(shortest)) == shortest > 1


def _block_sizes(call: _Resizing, nearest_mode: str) -> dict[int, int] | None:
    """Returns how many times each resized axis repeats its elements; None for other cases."""
    mode = call.attributes["coordinate_transformation_mode"]
    scales = {axis: call.scale(axis) for axis in call.resized()}
    if call.attributes["mode"] != "nearest" or None in scales.values():
        return None
    if any(scale != round(cast(float, scale)) for scale in scales.values()):
        return None
    if (mode, nearest_mode) not in _COPIES_BLOCKS:
        return None
    return {axis: round(cast(float, scale)) for axis, scale in scales.items()}


def _sum_blocks(g: Tensor, x: Tensor, blocks: dict[int, int]) -> Tensor:
    shape: list[int | Tensor] = []
    summed: list[int] = []
    for axis in range(x.ndim):
        size = size_of(x, [axis]) if summed or axis in blocks else None
        shape.append(0 if size is None else size)
        if axis in blocks:
            summed.append(len(shape))
            shape.append(blocks[axis])
    return op.ReduceSum(op.Reshape(g, shape), summed, keepdims=0)


def _product_along(g: Tensor, weights: Tensor, axis: int) -> Tensor:
    """Multiplies g along an axis by weights (new length, length)."""
    rank = g.ndim
    if axis == rank - 1:
        return op.MatMul(g, weights.T)
    if axis == rank - 2:
        return op.MatMul(weights, g)
    last = [size_of(g, [a]) for a in range(axis + 1, rank)]
    flat = op.Reshape(g, [*(0,) * (axis + 1), size_of(g, range(axis + 1, rank))])
    product = op.MatMul(weights, flat)
    return op.Reshape(product, [*(0,) * (axis + 1), *last])


@vjp("Resize", limits="aspect-ratio policies: not with outer axes or antialias")
def resize(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
    *,
    antialias: int = 0,
    axes: Sequence[int] | None = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,  # constant elements of y do not depend on x
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Cotangents:
    attributes: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": coordinate_transformation_mode,
    }
    if mode == "nearest":
        attributes["nearest_mode"] = nearest_mode
    elif antialias:
        attributes["antialias"] = 1
    if mode == "cubic":
        attributes["cubic_coeff_a"] = cubic_coeff_a
    if exclude_outside:
        attributes["exclude_outside"] = 1
    cropped = coordinate_transformation_mode == "tf_crop_and_resize"
    policy = keep_aspect_ratio_policy
    by_size = sizes is not None and (scales is None or scales.shape == (0,))
    call = _Resizing(
        x,
        y,
        tuple(range(x.ndim)) if axes is None else tuple(axis % x.ndim for axis in axes),
        roi if cropped else None,
        None if by_size else scales,
        sizes if by_size else None,
        attributes,
        policy,
    )
    if by_size and policy != "stretch":
        _check_policy(y, call)
    blocks = _block_sizes(call, nearest_mode)
    if blocks is not None:
        return (_sum_blocks(g, x, blocks) if blocks else g), None, None, None
    for axis in reversed(call.resized()):
        g = _product_along(g, call.matrix(axis).astype(g.dtype), axis)
    return g, None, None, None
