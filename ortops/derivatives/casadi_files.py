"""Writes the files in which CasADi looks for the derivatives of an ONNX model.

Next to ``f.onnx``, CasADi's `GraphBuilder` finds

===================  =======================  ==============================================
file                 further inputs           further outputs
===================  =======================  ==============================================
``adj_f.onnx``       ``adj_<y>``              ``adj_<x>``: adj_y · ∂y/∂x
``fwd_f.onnx``       ``fwd_<x>``              ``fwd_<y>``: ∂y/∂x · fwd_x
``fwd_adj_f.onnx``   ``adj_<y>``,             ``adj_<x>``,
                     ``fwd_<x>``,             ``fwd_adj_<x>``: the derivative of adj_x for the
                     ``fwd_adj_<y>``          direction (fwd_x, fwd_adj_y)
===================  =======================  ==============================================

for all inputs x and outputs y, in addition to those of ``f.onnx``. For CasADi, a tensor of rank 2
is a matrix, and any other tensor is a column. Seeds and products have a block of these columns for
each direction. There are ``nadj``, ``nfwd`` or ``nfwd · nadj`` directions; in the last case, the
adjoint direction varies fastest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortops.derivatives.builder import Builder, for_each
from ortops.derivatives.formulas import dot, on, pulled_back, pushed_forward
from ortops.engine.lowering import infer_computed_types, lower_ir, normalize
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.autodiff.grad import grad
from ortops.graph.constants import Dim
from ortops.graph.edit import is_float
from ortops.graph.files import external
from ortops.graph.files.atomic import write_together
from ortops.graph.files.loading import ModelLike, blame_model
from ortops.graph.files.serialization import GRADIENT_DOMAIN, to_proto
from ortops.graph.tensor import Tape, Tensor, op, shape_of


@blame_model
def casadi(model: ModelLike, folder: str | os.PathLike[str]) -> Path:
    """Writes a model and its derivatives as the files that CasADi looks for.

    CasADi (3.8 or later) then evaluates the model with onnxruntime, and uses these files for
    Jacobians and Hessians. Set ``CASADI_ONNXRUNTIME_LIB`` to the path of onnxruntime's library
    (``onnxruntime/capi/libonnxruntime.so.*`` in the Python package) before importing casadi.

    Args:
        model: A ModelProto, its bytes or its path; it is not modified. All its inputs and outputs
            must be floating-point tensors of known rank. Weights are stored in the files.
        folder: The folder for ``f.onnx``, ``adj_f.onnx``, ``fwd_f.onnx`` and ``fwd_adj_f.onnx``;
            created if needed. Existing files of these names are replaced.

    Returns:
        The path of ``f.onnx``.

    Raises:
        ModelError: If the model is invalid, an input or output is not a floating-point tensor of
            known rank, or a file would be 2 GB or larger.
        UnsupportedError: If an operator has no gradient.
        OSError: If a file cannot be written.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = casadi(examples.mlp((4, 16, 2)), folder)
        ...     sorted(each.name for each in path.parent.iterdir())
        ['adj_f.onnx', 'f.onnx', 'fwd_adj_f.onnx', 'fwd_f.onnx']
    """
    work = normalize(convert.to_ir(convert.load_light(model)))
    infer_computed_types(work)
    graph = work.graph
    for value in [value for value in graph.inputs if value.name in graph.initializers]:
        graph.inputs.remove(value)
    for value in (*graph.inputs, *graph.outputs):
        if not isinstance(value.type, ir.TensorType) or not is_float(value) or value.shape is None:
            raise ModelError(
                f"CasADi needs floating-point tensors of known rank, but '{value.name}' is "
                f"{value.type} with shape {value.shape}; make it a constant, or remove it"
            )
    contents = {f"{prefix}f.onnx": _content(work, add) for prefix, add in _FILES.items()}
    target = Path(folder)
    write_together(target, contents)
    return target / "f.onnx"


def _content(work: ir.Model, add: Callable[[Builder], object]) -> bytes:
    """Returns a file: the model with the outputs that a function adds."""
    model = work.clone()
    graph = model.graph
    xs, ys = ([value.name or "" for value in each] for each in (graph.inputs, graph.outputs))
    builder = Builder(model, xs, ys)
    with builder.tape:
        add(builder)
    graph.opset_imports.setdefault(GRADIENT_DOMAIN, 1)
    return external.serialize(to_proto(lower_ir(model)))


def _add_nothing(builder: Builder) -> None:
    pass


def _add_adjoint(builder: Builder) -> list[Tensor]:
    """Adds adj_x, and returns adj_y with the directions in front."""
    seeds = [_seed(builder.tape, f"adj_{y.name}", y, "nadj") for y in builder.ys]
    _put_out(
        builder, "adj_", builder.xs, for_each(builder.tape, seeds, pulled_back(builder)), "nadj"
    )
    return seeds


def _add_forward(builder: Builder) -> None:
    """Adds fwd_y."""
    formula = pushed_forward(builder)
    seeds = [_seed(builder.tape, f"fwd_{x.name}", x, "nfwd") for x in builder.xs]
    _put_out(builder, "fwd_", builder.ys, for_each(builder.tape, seeds, formula), "nfwd")


def _add_second_order(builder: Builder) -> None:
    """Adds adj_x, and fwd_adj_x = ∂/∂x (fwd_x · ∂(adj_y · y)/∂x + fwd_adj_y · y)."""
    xs, ys = builder.xs, builder.ys
    adjoints = _add_adjoint(builder)
    forwards = [_seed(builder.tape, f"fwd_{x.name}", x, "nfwd") for x in xs]
    both = [_seed(builder.tape, f"fwd_adj_{y.name}", y, "nfwd_nadj") for y in ys]
    count = op.Squeeze(op.Shape(adjoints[0], start=0, end=1), [0])

    def product(tape: Tape, index: Tensor, *changes: Tensor) -> Sequence[Tensor]:
        adjoint = [op.Gather(on(tape, a), op.Mod(index, on(tape, count))) for a in adjoints]
        forward = [op.Gather(on(tape, v), op.Div(index, on(tape, count))) for v in forwards]
        slopes = grad(dot(tape, ys, adjoint, ys), [on(tape, x) for x in xs])
        total = dot(tape, slopes, forward, xs) + dot(tape, ys, changes, ys)
        return grad(total, [on(tape, x) for x in xs])

    numbers = op.Range(0, op.Squeeze(op.Shape(both[0], start=0, end=1), [0]), 1)
    products = for_each(builder.tape, [numbers, *both], product)
    _put_out(builder, "fwd_adj_", xs, products, "nfwd_nadj")


_FILES: dict[str, Callable[[Builder], object]] = {
    "fwd_adj_": _add_second_order,
    "fwd_": _add_forward,
    "adj_": _add_adjoint,
    "": _add_nothing,  # written last, so that f.onnx is never newer than its derivatives
}


def _seed(tape: Tape, name: str, like: Tensor, directions: str) -> Tensor:
    """Adds an input of seeds, and returns it as [directions, *like.shape]."""
    seed = tape.input(name, like.dtype, _dims(like, directions))
    rows, columns = _matrix(like)
    blocks = op.Reshape(seed, op.Concat(rows, [-1], columns, axis=0))
    found = op.Reshape(
        op.Transpose(blocks, perm=[1, 0, 2]), op.Concat([-1], shape_of(like), axis=0)
    )
    return found.with_shape([directions, *(like.shape or ())])


def _put_out(
    builder: Builder,
    prefix: str,
    likes: Sequence[Tensor],
    products: Sequence[Tensor],
    directions: str,
) -> None:
    """Adds outputs for products of shape [directions, *like.shape]."""
    for like, product in zip(likes, products, strict=True):
        rows, columns = _matrix(like)
        blocks = op.Reshape(product, op.Concat([-1], rows, columns, axis=0))
        found = op.Reshape(op.Transpose(blocks, perm=[1, 0, 2]), op.Concat(rows, [-1], axis=0))
        builder.put_out(found.with_shape(_dims(like, directions)), f"{prefix}{like.name}")


def _matrix(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers of rows and columns of the matrix that a tensor is for CasADi."""
    shape = shape_of(x)
    if len(x.shape or ()) == 2:
        return op.Gather(shape, [0]), op.Gather(shape, [1])
    return op.ReduceProd(shape, keepdims=1), x.tape.constant(np.array([1]))


def _dims(x: Tensor, directions: str) -> list[Dim]:
    """Returns the declared shape of the seeds or products for a tensor."""
    shape = x.shape or ()
    if len(shape) == 2:
        return [shape[0], f"{directions}_x{shape[1]}"]
    sizes = [dim for dim in shape if isinstance(dim, int)]
    if len(sizes) == len(shape):
        return [math.prod(sizes), directions]
    return [shape[0] if len(shape) == 1 else f"size_of_{x.name}", directions]
