"""Adaptation to onnxruntime's WebGPU provider: no float64, and no partially supported operators.

Its MaxPool does not return indices, and its BatchNormalization has no training mode. Web builds
with this provider have no kernel for a Cast to float64, so such a graph cannot be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Unpack

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.graph.autodiff.registry import Cotangents, Table
from ortops.graph.autodiff.rules.convolution import Placement, input_gradient, windows
from ortops.graph.autodiff.rules.normalization import per_channel
from ortops.graph.edit import describe, node_after
from ortops.graph.element_types import replace_type
from ortops.graph.nesting import inner_graphs
from ortops.graph.passes.draft import Draft, Pass, Runtime
from ortops.graph.passes.rewrite import Result, pattern, rewrite_with_bodies
from ortops.graph.shapes import reshape_like
from ortops.graph.tensor import Tape, Tensor, op

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


class _WebGPU(Pass):
    """Replaces unsupported types and operators with float32 and basic operators.

    Args:
        name: See `Pass`.
        serves: See `Pass`.
        exact: Whether what depends only on constants and integers such as the number of steps stays
            float64, because the CPU can run it: some formulas, such as RAdam's, need the precision.
    """

    def __init__(self, name: str, serves: Collection[Runtime], *, exact: bool = False) -> None:
        super().__init__(name, serves)
        self._exact = exact

    def prepare(self, draft: Draft) -> None:
        """Rejects float64 tensors of the model, and adds a rule for MaxPool."""
        for value in (*draft.graph.inputs, *draft.graph.outputs):
            if value.dtype == ir.DataType.DOUBLE:
                raise UnsupportedError(
                    f"tensor '{value.name}' is float64, which WebGPU does not support; use a "
                    "float32 model"
                )
        table = Table()
        table.vjp("MaxPool", when=draft.is_free)(_max_pool)
        draft.add_rules(table)

    def finish(self, draft: Draft) -> None:
        """Expands BatchNormalization, and replaces float64 computations with float32."""
        rewrite_with_bodies(draft.graph, draft.names, expand_batch_normalization)
        kept = _separate(draft) if self._exact else set()
        replace_type(draft.graph, ir.DataType.DOUBLE, ir.DataType.FLOAT, _narrow_tensor, kept)


def _max_pool(
    g: tuple[Tensor, Tensor | None],
    y: tuple[Tensor, Tensor | None],
    x: Tensor,
    *,
    kernel_shape: Sequence[int],
    ceil_mode: int = 0,
    storage_order: int = 0,
    **placement: Unpack[Placement],
) -> Cotangents:
    """Compares the elements of each window, collected by a Conv, with its maximum.

    In case of ties, the first element is the maximum, as in the standard rule. Infinite or NaN
    elements make the other elements of their windows NaN.
    """
    at = windows(x, kernel_shape, **placement)
    if ceil_mode or at.pads is None:
        node = y[0].value.producer()
        raise UnsupportedError(
            f"{describe(node) if node else 'MaxPool'}: WebGPU does not support indices of maxima, "
            "and the gradient without them requires explicit pads and ceil_mode=0; export the "
            "model with explicit pads"
        )
    size = math.prod(kernel_shape)
    taps = np.eye(size, dtype=x.dtype).reshape(size, 1, *kernel_shape)
    weights = x.tape.constant(taps)

    def elements(of: Tensor) -> Tensor:
        """Returns (N · C, elements of a window, …)."""
        return op.Conv(of, weights, strides=at.strides, dilations=at.dilations, pads=at.pads)

    def as_images(of: Tensor) -> Tensor:
        """Returns (N, C, …) as (N · C, 1, …)."""
        return op.Reshape(of, op.Concat([-1, 1], op.Shape(of, start=2), axis=0))

    images, dtype = as_images(x), x.dtype
    order = np.arange(size, 0, -1, dtype=dtype).reshape(1, size, *(1,) * at.rank)
    score = op.Equal(elements(images), as_images(y[0])).astype(dtype) * order
    if at.is_padded:  # the zeros with which Conv pads are not elements
        score = score * elements(op.Mul(images, 0) + 1)
    first = op.ReduceMax(score, [1], keepdims=1)
    hits = op.And(op.Equal(score, first), op.Greater(score, 0)).astype(dtype)
    spread = input_gradient(hits * as_images(g[0]), weights, images, at, 1)
    return reshape_like(spread, x)


@pattern("BatchNormalization")
def expand_batch_normalization(node: ir.Node, tape: Tape) -> Result:
    """Normalizes with the mean and variance of the batch, as specified for training mode."""
    if not node.attributes.get_int("training_mode", 0):
        return None
    x, scale, bias, mean, variance = (tape.tensor(v) for v in node.inputs if v is not None)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    momentum = node.attributes.get_float("momentum", 0.9)
    axes = [axis for axis in range(x.ndim) if axis != 1]
    batch_mean = op.ReduceMean(x, axes, keepdims=1)
    centred = x - batch_mean
    batch_variance = op.ReduceMean(centred * centred, axes, keepdims=1)

    factor = per_channel(scale, x) / op.Sqrt(batch_variance + epsilon)
    y = centred * factor + per_channel(bias, x)
    shares = [
        old * momentum + op.Reshape(new, [-1]) * (1 - momentum)
        for old, new in ((mean, batch_mean), (variance, batch_variance))
    ]
    return [y, *shares][: len(node.outputs)]


def _separate(draft: Draft) -> set[ir.Value]:
    """Returns the float64 values that depend only on constants and scalar integer variables.

    Other nodes read them through a Cast to float32.
    """
    graph = draft.graph
    known = {
        value
        for value in graph.inputs
        if value.dtype in INTEGERS and value.name not in draft.feeds and value.shape == ()
    }
    known.update(graph.initializers.values())
    nodes = set()
    for node in graph:  # in topological order
        inputs = [value for value in node.inputs if value is not None]
        is_known = known.issuperset(inputs) if inputs else node.op_type == "Constant"
        if is_known and not any(inner_graphs(node)):
            nodes.add(node)
            known.update(node.outputs)
    doubles = [value for value in known if value.dtype == ir.DataType.DOUBLE]
    computing = {node for node in nodes if node.inputs}
    kept = {
        value
        for value in doubles
        if value.producer() in computing or any(user in computing for user, _ in value.uses())
    }
    for value in sorted(kept, key=lambda each: each.name or ""):
        others = [(user, index) for user, index in value.uses() if user not in nodes]
        if others:
            producer = value.producer()
            follows = next(iter(graph), None) if producer is None else node_after(producer)
            tape = Tape(graph, before=follows, names=draft.names)
            narrow = op.Cast(tape.tensor(value), to=ir.DataType.FLOAT.value).value
            for user, index in others:
                user.replace_input_with(index, narrow)
    return kept


def _narrow_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    wide = tensor.numpy()
    with np.errstate(over="ignore"):
        array = wide.astype(np.float32)
    if not np.array_equal(np.isfinite(array), np.isfinite(wide)):
        raise UnsupportedError(
            f"constant '{tensor.name}' is out of range for float32, and WebGPU does not support "
            "float64; rescale the model"
        )
    return ir.Tensor(array, name=tensor.name)


WEBGPU = _WebGPU("webgpu", serves={"webgpu"})
WEBGPU_SESSION = _WebGPU("webgpu_session", serves={"webgpu_session"}, exact=True)
