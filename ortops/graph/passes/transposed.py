"""Dense layers computed transposed: features along the first axis, samples along the last.

This requires known batch sizes. onnxruntime packs the right factor of a product. In x · Wᵀ these
are the weights; in the equivalent W · xᵀ these are the samples, which are fewer in a small batch.
In addition, the left factor of a weight's gradient, dyᵀ · x, needs no transpose.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import onnx_ir as ir

from ortops.graph.edit import copy_node, rank_of, remove_unread, replace_value
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.operators import ELEMENTWISE, PRODUCTS, having
from ortops.graph.passes.draft import ONNXRUNTIME, Draft, Pass
from ortops.graph.passes.products import fused_matmul, transpose_flags
from ortops.graph.tensor import Tape, Tensor, op

_SAMPLES = 32  # with fewer, the kernels for few rows are faster (measured)
_RATIO = 2  # the minimum ratio of features to samples; below it, there is no gain (measured)
_PRODUCTS = PRODUCTS | having("recurrent") | {"Attention"}


class _Transposed(Pass):
    """Computes activations of dense layers, and their cotangents, transposed if that is faster.

    These are results of matrix products with many features per sample, and elementwise functions
    of them, which are read only by products.
    """

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether most products are those of dense layers of suitable sizes."""
        products = [node for node in model.graph if node.op_type in _PRODUCTS]
        shapes = [node.outputs[0].shape for node in products if _is_product(node)]
        wide = 0
        for samples, *features in (shape for shape in shapes if shape):
            if isinstance(samples, ir.SymbolicDim) and len(features) == 1:
                size = _SAMPLES if sizes is None else sizes.get(samples.value or "")
                wide += size is not None and _pays(size, features[0])
        return wide > 0 and 2 * wide >= len(products)

    def finish(self, draft: Draft) -> None:
        """Rewrites the graph."""
        graph = draft.graph
        chosen = _choose(graph)
        if not chosen:
            return
        twins: dict[ir.Value, ir.Value] = {}
        tape = Tape(graph, names=draft.names)
        for node in list(graph):
            if chosen.isdisjoint((*node.inputs, *node.outputs)):
                continue
            tape.before, tape.scope = node, f"{node.name}/"
            y = node.outputs[0]
            if _is_product(node):
                twin = _product(tape, node, twins, transposed=y in chosen)
            else:
                twin = _elementwise(tape, node, twins)
            if y in chosen:
                twins[y] = twin.value
            else:
                replace_value(tape, y, twin.with_shape_of(tape.tensor(y)))
        remove_unread(list(graph))


TRANSPOSED = _Transposed("transposed", ONNXRUNTIME)


def _choose(graph: ir.Graph) -> set[ir.Value]:
    """Returns the activations to transpose: all those that require no Transpose node."""
    chosen = {value for node in graph for value in node.outputs if _is_wide(value)}
    nodes = list(dict.fromkeys(node for value in chosen for node in _around(value)))
    found = -1
    while found != len(chosen):
        found = len(chosen)
        for node in nodes:
            if node.graph is not graph or not _supports_transposed(node, chosen):
                chosen -= {*node.inputs, *node.outputs}
        nodes.reverse()
    return chosen


def _around(value: ir.Value) -> Iterator[ir.Node]:
    """Yields the producer and the consumers of a value."""
    node = value.producer()
    assert node is not None
    yield node
    yield from (user for user, _ in value.uses())


def _is_wide(value: ir.Value) -> bool:
    """Whether a value has many features per sample, and is not an output of the graph."""
    if value.shape is None or len(value.shape) != 2 or value.is_graph_output():
        return False
    return _pays(*value.shape)


def _pays(samples: object, features: object) -> bool:
    """Whether sizes are known, and make transposing faster."""
    if not isinstance(samples, int) or not isinstance(features, int):
        return False
    return features >= _RATIO * samples >= _RATIO * _SAMPLES


def _supports_transposed(node: ir.Node, chosen: Container[ir.Value]) -> bool:
    """Whether a node can read and compute all chosen values transposed."""
    y = node.outputs[0]
    if _is_product(node):
        added = node.inputs[2:]
        return all(value not in chosen for value in added) and (
            y not in chosen or all(map(_is_small, added))
        )
    return (
        node.op_type in ELEMENTWISE
        and not node.domain
        and y in chosen
        and all(value in chosen or _is_small(value) for value in node.inputs)
    )


def _is_product(node: ir.Node) -> bool:
    """Whether a node multiplies a matrix of float32 by another one, or a row by a matrix."""
    left, right = (rank_of(value) for value in (*node.inputs, None, None)[:2])
    product = (node.domain, node.op_type)
    return (
        product in (("", "Gemm"), ("", "MatMul"), (MICROSOFT, "FusedMatMul"))
        and node.outputs[0].dtype == ir.DataType.FLOAT
        and (left == 2 or (left == 1 and product == ("", "MatMul")))
        and right == 2
    )


def _is_small(value: ir.Value | None) -> bool:
    """Whether a value is absent, a scalar, or a vector with an element per feature."""
    return value is None or rank_of(value) in (0, 1)


def _product(
    tape: Tape, node: ir.Node, twins: Mapping[ir.Value, ir.Value], *, transposed: bool
) -> Tensor:
    """Emits a product of the twins of its factors, which may be transposed itself."""
    a, b, *added = (None if value is None else tape.tensor(value) for value in node.inputs)
    assert a is not None
    assert b is not None
    if a.ndim == 1:
        return fused_matmul(tape, [a.value, twins[b.value]], [0, 1])
    factors = list(zip((a, b), transpose_flags(node), strict=True))
    if transposed:  # (A B)ᵀ = Bᵀ Aᵀ
        factors = [(factor, 1 - flag) for factor, flag in reversed(factors)]
        added = [None if c is None else _column(c) for c in added]
    (left, trans_a), (right, trans_b) = (
        (tape.tensor(twins[factor.value]), 1 - flag) if factor.value in twins else (factor, flag)
        for factor, flag in factors
    )
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    return op.Gemm(left, right, *added, alpha=alpha, beta=beta, transA=trans_a, transB=trans_b)


def _elementwise(tape: Tape, node: ir.Node, twins: Mapping[ir.Value, ir.Value]) -> Tensor:
    """Emits an elementwise node that reads twins."""
    copies = {
        value: twins[value] if value in twins else _column(tape.tensor(value)).value
        for value in node.inputs
        if value is not None
    }
    copy = copy_node(node, copies)
    tape.append(copy)
    (y,) = copy.outputs
    assert y.shape is not None
    y.shape = ir.Shape(y.shape[::-1])
    return tape.tensor(y)


def _column(x: Tensor) -> Tensor:
    """Returns a vector with an element per feature as a column."""
    return op.Unsqueeze(x, [1]) if x.ndim == 1 else x
