"""Matrix products in forms with fast kernels in onnxruntime's CPU provider.

FusedMatMul of com.microsoft multiplies transposed matrices and scales the result, so that separate
nodes for transposing and scaling are unnecessary. A sum of rows is a third as expensive if it is
computed as a product of ones with the matrix instead of ReduceSum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops.graph.choices import constant_integers
from ortops.graph.edit import emit_one, has_one_reader, permutation_of
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.matching import Found, Number, Variable
from ortops.graph.operators import MOVES
from ortops.graph.passes.draft import ANYWHERE, ONNXRUNTIME
from ortops.graph.passes.rewrite import PatternPass, Result, formula, pattern
from ortops.graph.tensor import Tape, Tensor, op

# ------------------------------------------------------------------------------------- transposes


@pattern("Gemm", "MatMul")
def _transposed_factors(node: ir.Node, tape: Tape) -> Result:
    """Fuses Transpose nodes before a product into it.

    A remaining Transpose moves whole rows, which is faster than moving single elements.
    """
    if not _is_product(node) and not _is_gemm(node):
        return None
    written, operands, flags = transpose_flags(node), [], []
    for index, value in enumerate(node.inputs[:2]):
        assert value is not None
        # If a stack is multiplied by one matrix, onnxruntime cannot transpose the stack.
        taken = (value, 0) if _is_shared(node) and not index else _source(tape, value)
        operands.append(taken[0])
        flags.append(written[index] ^ taken[1])
    if flags == written:
        for index, operand in enumerate(operands):
            node.replace_input_with(index, operand)
        return None
    return _with_flags(tape, node, operands, flags)


@pattern("Transpose")
def _transposed_product(node: ir.Node, tape: Tape) -> Result:
    """Fuses a Transpose after a product into it: (A B)ᵀ = Bᵀ Aᵀ."""
    perm, y = permutation_of(node), node.inputs[0]
    product = None if y is None else y.producer()
    if perm is None or perm[-1] != len(perm) - 2 or y is None or product is None:
        return None
    if not has_one_reader(y) or product.graph is not node.graph:
        return None
    without_bias = _is_gemm(product) and len(product.inputs) == 2
    fused = product.op_type == "FusedMatMul" and tape.emitted(y)
    if not (without_bias or ((fused or _is_product(product)) and not _is_shared(product))):
        return None
    operands = [value for value in reversed(product.inputs) if value is not None]
    flags = [1 - flag for flag in reversed(transpose_flags(product))]
    swapped = _with_flags(tape, product, operands, flags).with_shape_of(_swapped(tape.tensor(y)))
    rest = _swap(perm)
    return swapped if rest == tuple(range(len(rest))) else op.Transpose(swapped, perm=rest)


def transpose_flags(node: ir.Node) -> list[int]:
    """Returns whether each factor of a product is transposed."""
    return [node.attributes.get_int(name, 0) or 0 for name in ("transA", "transB")]


def _is_product(node: ir.Node) -> bool:
    """Whether a node multiplies stacks of float32 matrices, or one matrix and a stack."""
    if node.op_type != "MatMul" or node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    a, b = (0 if v is None or v.shape is None else len(v.shape) for v in node.inputs)
    return min(a, b) >= 2 and (a == b or 2 in (a, b))


def _is_shared(node: ir.Node) -> bool:
    """Whether a product multiplies a stack of matrices by one matrix."""
    a, b = (len(v.shape) for v in node.inputs[:2] if v is not None and v.shape is not None)
    return a != b


def _is_gemm(node: ir.Node) -> bool:
    shapes = [v is not None and v.shape is not None for v in node.inputs[:2]]
    return node.op_type == "Gemm" and not node.domain and all(shapes)


def _with_flags(
    tape: Tape, node: ir.Node, operands: Sequence[ir.Value], flags: Sequence[int]
) -> Tensor:
    """Emits a product like that of a node, with other operands and flags."""
    if node.op_type != "Gemm":
        return fused_matmul(tape, operands, flags)
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    others = (tape.tensor(v) for v in (*operands, *node.inputs[2:]) if v is not None)
    return op.Gemm(*others, alpha=alpha, beta=beta, transA=flags[0], transB=flags[1])


def _swap(perm: Sequence[int]) -> tuple[int, ...]:
    """Returns a permutation with the last two axes of its input exchanged."""
    last = len(perm) - 1
    return tuple({last: last - 1, last - 1: last}.get(axis, axis) for axis in perm)


def _source(tape: Tape, value: ir.Value) -> tuple[ir.Value, int]:
    """Returns a value that a product can read instead, and whether it must transpose that."""
    source, perm = value, tuple(range(len(value.shape or ())))
    while (producer := source.producer()) is not None:
        inner = permutation_of(producer)
        if inner is None or producer.graph is not tape.graph:  # a loop would transpose each time
            break
        assert producer.inputs[0] is not None
        source, perm = producer.inputs[0], tuple(inner[axis] for axis in perm)
    last = len(perm) - 1
    if source is value or (perm[-1] != last and perm[-2] != last):
        return value, 0
    flag = int(perm[-2] == last)
    rest = (*perm[:-2], perm[-1], perm[-2]) if flag else perm
    if rest == tuple(range(len(rest))):
        return source, flag
    x = tape.tensor(source)
    return tape.once((source, rest), lambda: op.Transpose(x, perm=rest)).value, flag


def _swapped(x: Tensor) -> Tensor:
    """Returns a Tensor without a producer, with the shape of the transposed matrices of another."""
    shape = x.shape
    assert shape is not None
    return x.tape.tensor(ir.Value(shape=ir.Shape([*shape[:-2], shape[-1], shape[-2]])))


def fused_matmul(
    tape: Tape, operands: Sequence[ir.Value], flags: Sequence[int], alpha: float = 1.0
) -> Tensor:
    """Emits FusedMatMul, which multiplies the result by alpha.

    Args:
        tape: The tape.
        operands: The float32 factors.
        flags: Whether to transpose each of them.
        alpha: The scale of the result.
    """
    factors = [tape.tensor(each) for each in operands]
    attributes = {"transA": flags[0], "transB": flags[1], "alpha": alpha}
    return emit_one(MICROSOFT, "FusedMatMul", factors, None, **attributes)


TRANSPOSES = PatternPass(
    "transposes", _transposed_factors, _transposed_product, serves=ONNXRUNTIME, bodies=True
)


# ----------------------------------------------------------------------------------- left factors

_COLUMNS = 512  # with fewer columns of the right factor, a Transpose node does not pay (measured)

_PERIOD = 1024
"""Elements after which addresses share a set of a cache: 4 KiB for a first-level cache."""


def _wide_product(node: ir.Node, tape: Tape) -> Result:
    """Transposes the left factor of Aᵀ · B by a node of its own if B has many columns.

    onnxruntime's kernel multiplies 128 columns of B at a time and transposes A anew for each of
    them. The kernel sums in the same order in both cases, so the result has the same bits. A
    Flatten that changes nothing stands between the two nodes, because onnxruntime fuses them.

    The kernel reads twelve rows of a left factor at a time, one element each. If a row has a
    multiple of 1,024 elements, as it has with so many samples, these share one set of a first-level
    cache with eight ways: the product takes 1.2 to 1.6 times as long (measured on AMD). So the
    number of samples must be known.
    """
    a, b = node.inputs[:2]
    flags = transpose_flags(node)
    if not flags[0] or a is None or b is None or a.dtype != ir.DataType.FLOAT:
        return None
    if a.shape is None or b.shape is None or len(a.shape) != 2 or len(b.shape) != 2:
        return None
    samples, rows, columns = *a.shape, b.shape[0 if flags[1] else 1]
    if not (isinstance(samples, int) and isinstance(rows, int) and isinstance(columns, int)):
        return None
    if samples % _PERIOD == 0:
        return None
    if columns < max(_COLUMNS, rows):  # a larger left factor is expensive to transpose (measured)
        return None
    x = tape.tensor(a)
    transposed = tape.once((a, "transposed"), lambda: op.Flatten(op.Transpose(x, perm=[1, 0])))
    node.replace_input_with(0, transposed.value)
    node.attributes["transA"] = ir.AttrInt64("transA", 0)
    return None


LEFT_FACTORS = PatternPass(
    "left_factors",
    pattern("Gemm")(_wide_product),
    pattern("FusedMatMul", domain=MICROSOFT)(_wide_product),
    serves=ONNXRUNTIME,
)


# ----------------------------------------------------------------------------------------- scales


_X, _NUMBER = Variable("the factor"), Number()
_SCALED = _X * _NUMBER


@formula(_SCALED)
def _scaled_product(found: Found, tape: Tape) -> Result:
    """Fuses multiplications by a constant number into the products before or after them."""
    x, y = found[_X], found[_SCALED]
    if y.is_graph_output() or x.shape is None or found[_NUMBER].shape is None:
        return None
    products = _products_after(y) or _products_before(x)
    for product, count in Counter(products).items():
        alpha = product.attributes.get_float("alpha", 1.0) or 0.0
        alpha *= found.number(_NUMBER) ** count
        product.domain, product.op_type = MICROSOFT, "FusedMatMul"
        product.attributes["alpha"] = ir.AttrFloat32("alpha", alpha)
        tape.graph.opset_imports.setdefault(MICROSOFT, 1)
    return tape.tensor(x) if products else None


def _scales(node: ir.Node) -> bool:
    """Whether a node is a product that can scale."""
    return _is_product(node) or (node.op_type == "FusedMatMul" and node.domain == MICROSOFT)


def _products_after(value: ir.Value) -> list[ir.Node]:
    """Returns the products that read a value, in any shape; none if other nodes read it too."""
    found: list[ir.Node] = []
    pending = [value]
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return []
        for user, index in current.uses():
            if _scales(user):
                found.append(user)
            elif user.op_type in MOVES and not user.domain and index == 0:
                pending.append(user.outputs[0])
            elif user.op_type != "Shape":
                return []
    return found


def _products_before(value: ir.Value | None) -> list[ir.Node]:
    """Returns the product that computes a value, in any shape; none if other nodes read it too."""
    while value is not None and has_one_reader(value):
        node = value.producer()
        if node is not None and _scales(node):
            return [node]
        if node is None or node.domain or node.op_type not in MOVES:
            return []
        value = node.inputs[0]
    return []


SCALES = PatternPass("scales", _scaled_product, serves=ONNXRUNTIME, bodies=True)


# ------------------------------------------------------------------------------------------- rows


@pattern("ReduceSum")
def _row_sum(node: ir.Node, tape: Tape) -> Result:
    """Replaces a sum over all axes but the last with a product with ones."""
    x = _summed_rows(node)
    if x is None:
        return None
    matrix = tape.tensor(x)
    if matrix.ndim > 2:
        assert x.shape is not None
        matrix = op.Reshape(matrix, [-1, x.shape[-1]])
    rows = _rows(x, tape)
    if rows is None:
        return op.MatMul(_ones_of(op.Shape(matrix, start=0, end=1)), matrix)
    return op.MatMul(tape.once(("ones", rows), lambda: _ones(tape, *rows)), matrix)


def _summed_rows(node: ir.Node) -> ir.Value | None:
    """Returns the value that a node sums over all axes but the last, without keepdims; or None."""
    if node.attributes.get_int("keepdims", 1) != 0:
        return None
    x, axes = (*node.inputs, None)[:2]
    if x is None or axes is None or x.dtype != ir.DataType.FLOAT or x.shape is None:
        return None
    rank = len(x.shape)
    summed = constant_integers(axes)
    if summed is None or rank < 2 or not isinstance(x.shape[-1], int) or not x.shape[-1]:
        return None
    return x if {axis % rank for axis in summed} == set(range(rank - 1)) else None


def _places(tape: Tape) -> dict[str, tuple[ir.Value, int]]:
    """Returns, for each symbol, an input and an axis with this size."""
    return {
        dim.value: (value, axis)
        for value in tape.graph.inputs
        for axis, dim in enumerate(value.shape or ())
        if not isinstance(dim, int) and dim.value is not None
    }


def _rows(value: ir.Value, tape: Tape) -> tuple[int, tuple[str, ...]] | None:
    """Returns the number of rows as a number and symbols to multiply; None if unknown."""
    places = tape.once("places", lambda: _places(tape))
    source: ir.Value | None = value
    while source is not None and source.shape is not None:
        dims = source.shape[:-1]
        symbols = [dim.value for dim in dims if not isinstance(dim, int)]
        known = [symbol for symbol in symbols if symbol is not None and symbol in places]
        if len(known) == len(symbols):
            number = math.prod(dim for dim in dims if isinstance(dim, int))
            return number, tuple(sorted(known))
        source = _source_of_rows(source)
    return None


def _source_of_rows(value: ir.Value) -> ir.Value | None:
    """Returns the value from which a node computes as many rows."""
    node = value.producer()
    source = None if node is None or node.domain else node.inputs[0]
    if node is None or source is None or source.shape is None or value.shape is None:
        return None
    if node.op_type in ("Flatten", "Reshape"):
        columns = value.shape[-1]
        same = isinstance(columns, int) and source.shape[-1] == columns
        return source if same and len(value.shape) == 2 else None
    if node.op_type != "Gemm" or node.attributes.get_int("transA", 0) != 0:
        return None
    return source


def _ones(tape: Tape, number: int, symbols: tuple[str, ...]) -> Tensor:
    """Returns a vector of ones with an element for each row."""
    if not symbols:
        return tape.constant(np.ones(number, np.float32))
    length: object = None if number == 1 else [number]
    for symbol in symbols:
        value, axis = _places(tape)[symbol]
        size = op.Shape(tape.tensor(value), start=axis, end=axis + 1)
        length = size if length is None else op.Mul(size, length)
    return _ones_of(length)


def _ones_of(length: object) -> Tensor:
    return op.ConstantOfShape(length, value=np.ones(1, np.float32))


ROW_SUMS = PatternPass("row_sums", _row_sum, serves=ANYWHERE, bodies=True)
