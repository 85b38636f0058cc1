"""Matrix products in the forms that onnxruntime's CPU kernels are fast at.

For the private graph of a TrainingSession, whose gradients are lowered: com.microsoft's FusedMatMul
multiplies transposed matrices and scales the result, so nodes that only transpose or scale are not
needed beside it; and a row of ones times a matrix is the sum of its rows, in a third of the time
that ReduceSum takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortops.gradient import replace_value
from ortops.tensor import Names, Tape, Tensor, constant_tensor, op, remove_unread

__all__ = [
    "absorb_scales",
    "absorb_transposes",
    "fused_matmul",
    "improve_products",
    "sum_rows_by_products",
]

FUSED_DOMAIN = "com.microsoft"

_MOVES = frozenset({"Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators that leave the numbers of their first input as they are."""


def improve_products(graph: ir.Graph, names: Names) -> None:
    """Applies all of this module to a lowered graph, in place; `names` are those taken in it."""
    absorb_transposes(graph, names)
    absorb_scales(graph, names)
    sum_rows_by_products(graph, names)


# ------------------------------------------------------------------------------------- transposes


def absorb_transposes(graph: ir.Graph, names: Names) -> None:
    """Lets products transpose the matrices that they read, and those that they give.

    What is left of a Transpose moves whole rows, which is faster than moving single numbers.

    Args:
        graph: A lowered graph; changed in place.
        names: The names taken in it.
    """
    made: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}
    for node in list(graph):
        if not _is_product(node) and not _is_gemm(node):
            continue
        tape = Tape(graph, before=node, names=names)
        tape.scope = f"{node.name}/"
        written = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
        operands, flags = [], []
        for index, value in enumerate(node.inputs[:2]):
            assert value is not None
            # Of a stack with one matrix for all of it, onnxruntime does not transpose the stack.
            taken = (value, 0) if _is_shared(node) and not index else _source(tape, value, made)
            operands.append(taken[0])
            flags.append((written[index] or 0) ^ taken[1])
        y = node.outputs[0]
        user = _transpose_behind(node)
        if user is not None:  # (A B)ᵀ = Bᵀ Aᵀ
            operands, flags = operands[::-1], [1 - flag for flag in reversed(flags)]
        elif flags == written or (node.op_type == "MatMul" and not any(flags)):
            for index, operand in enumerate(operands):
                node.replace_input_with(index, operand)
            continue
        product = _with_flags(tape, node, operands, flags)
        put_out: set[ir.Value] = set()
        if user is None:
            replace_value(tape, y, product.with_shape_of(tape.tensor(y)), put_out)
        else:
            product = product.with_shape_of(_swapped(tape.tensor(y)))
            tape.before = user
            rest = _swap(_perm(user) or ())
            rows = op.Transpose(product, perm=rest) if rest != tuple(range(len(rest))) else product
            replace_value(tape, user.outputs[0], rows, put_out)
    remove_unread(list(graph))


def _is_product(node: ir.Node) -> bool:
    """Whether a node multiplies stacks of float32 matrices, or a stack by one matrix."""
    if node.op_type != "MatMul" or node.domain or node.outputs[0].dtype != ir.DataType.FLOAT:
        return False
    a, b = (0 if v is None or v.shape is None else len(v.shape) for v in node.inputs)
    return a >= b >= 2 and (a == b or b == 2)


def _is_shared(node: ir.Node) -> bool:
    """Whether a product is one of a stack of matrices by one matrix."""
    a, b = (len(v.shape) for v in node.inputs[:2] if v is not None and v.shape is not None)
    return a != b


def _is_gemm(node: ir.Node) -> bool:
    shapes = [v is not None and v.shape is not None for v in node.inputs[:2]]
    return node.op_type == "Gemm" and not node.domain and all(shapes)


def _transpose_behind(node: ir.Node) -> ir.Node | None:
    """Returns the only reader of a product if it does nothing but what the product can do too."""
    y = node.outputs[0]
    users = [user for user, _ in y.uses()]
    if len(users) != 1 or y.is_graph_output() or users[0].graph is not node.graph:
        return None
    perm = _perm(users[0])
    if perm is None or perm[-1] != len(perm) - 2 or _is_shared(node):
        return None
    return users[0] if node.op_type == "MatMul" or len(node.inputs) == 2 else None


def _with_flags(
    tape: Tape, node: ir.Node, operands: Sequence[ir.Value], flags: Sequence[int]
) -> Tensor:
    """Emits a product like a node, of other operands and with other flags."""
    if node.op_type == "MatMul":
        return fused_matmul(tape, operands, flags)
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    others = (tape.tensor(v) for v in (*operands, *node.inputs[2:]) if v is not None)
    product: Tensor = op.Gemm(*others, alpha=alpha, beta=beta, transA=flags[0], transB=flags[1])
    return product


def _perm(node: ir.Node) -> tuple[int, ...] | None:
    """Returns the permutation of a Transpose; None for other nodes."""
    if node.op_type != "Transpose" or node.domain or node.inputs[0] is None:
        return None
    shape = node.inputs[0].shape
    reverse = None if shape is None else list(reversed(range(len(shape))))
    perm = node.attributes.get_ints("perm", reverse)
    return None if perm is None else tuple(perm)


def _swap(perm: Sequence[int]) -> tuple[int, ...]:
    """Returns a permutation with the last two axes of its input exchanged."""
    last = len(perm) - 1
    return tuple({last: last - 1, last - 1: last}.get(axis, axis) for axis in perm)


def _source(
    tape: Tape, value: ir.Value, made: dict[tuple[ir.Value, tuple[int, ...]], ir.Value]
) -> tuple[ir.Value, int]:
    """Returns what a product can read instead of a value, and whether it is to transpose it."""
    source, perm = value, tuple(range(len(value.shape or ())))
    while (producer := source.producer()) is not None and (inner := _perm(producer)) is not None:
        assert producer.inputs[0] is not None
        source, perm = producer.inputs[0], tuple(inner[axis] for axis in perm)
    last = len(perm) - 1
    if source is value or (perm[-1] != last and perm[-2] != last):
        return value, 0
    flag = int(perm[-2] == last)
    rest = (*perm[:-2], perm[-1], perm[-2]) if flag else perm
    if rest == tuple(range(len(rest))):
        return source, flag
    if (source, rest) not in made:
        made[source, rest] = op.Transpose(tape.tensor(source), perm=rest).value
    return made[source, rest], flag


def _swapped(x: Tensor) -> Tensor:
    """Returns a Tensor that has nothing but the shape of the transposed matrices of another."""
    shape = x.shape
    assert shape is not None
    return x.tape.tensor(ir.Value(shape=ir.Shape([*shape[:-2], shape[-1], shape[-2]])))


def fused_matmul(
    tape: Tape, operands: Sequence[ir.Value], flags: Sequence[int], alpha: float = 1.0
) -> Tensor:
    """Emits FusedMatMul, which multiplies the result by alpha.

    Args:
        tape: Where to; float32.
        operands: The factors.
        flags: For each of them whether to transpose it.
        alpha: The factor.
    """
    attributes = [ir.AttrInt64("transA", flags[0]), ir.AttrInt64("transB", flags[1])]
    attributes.append(ir.AttrFloat32("alpha", alpha))
    node = ir.Node(FUSED_DOMAIN, "FusedMatMul", operands, attributes, num_outputs=1)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    tape.append(node)
    tape.graph.opset_imports.setdefault(FUSED_DOMAIN, 1)
    return tape.tensor(node.outputs[0])


# ----------------------------------------------------------------------------------------- scales


def absorb_scales(graph: ir.Graph, names: Names) -> None:
    """Lets products do what multiplications by one constant number do before or behind them.

    Args:
        graph: A lowered graph; changed in place.
        names: The names taken in it.
    """
    for node in list(graph):
        found = _scale(node)
        if found is None:
            continue
        index, factor = found
        products = _products_behind(node.outputs[0]) or _products_before(node.inputs[index])
        if not products:
            continue
        for product, count in Counter(products).items():
            _scale_product(graph, names, product, factor**count)
        x = node.inputs[index]  # the product that gives it may be a new one
        assert x is not None
        node.outputs[0].replace_all_uses_with(x)
        graph.remove(node, safe=True)


def _scale(node: ir.Node) -> tuple[int, float] | None:
    """Returns which input a node multiplies by one constant number, and the number."""
    if node.op_type != "Mul" or node.domain or node.outputs[0].is_graph_output():
        return None
    for index in (0, 1):
        x, other = node.inputs[index], node.inputs[1 - index]
        if x is None or other is None or x.shape is None or other.shape is None:
            continue
        constant = constant_tensor(other)
        if constant is not None and constant.size == 1 and len(other.shape) <= len(x.shape):
            return index, float(constant.numpy().item())
    return None


def _scales(node: ir.Node) -> bool:
    """Whether a node is a product that can scale."""
    return _is_product(node) or (node.op_type == "FusedMatMul" and node.domain == FUSED_DOMAIN)


def _products_behind(value: ir.Value) -> list[ir.Node]:
    """Returns the products that read a value, in whatever shape; none where others read it too."""
    found: list[ir.Node] = []
    pending = [value]
    while pending:
        current = pending.pop()
        if current.is_graph_output():
            return []
        for user, index in current.uses():
            if _scales(user):
                found.append(user)
            elif user.op_type in _MOVES and not user.domain and index == 0:
                pending.append(user.outputs[0])
            elif user.op_type != "Shape":
                return []
    return found


def _products_before(value: ir.Value | None) -> list[ir.Node]:
    """Returns the product that gives a value, in whatever shape; none if others read it too."""
    while value is not None and len(value.uses()) == 1 and not value.is_graph_output():
        node = value.producer()
        if node is not None and _scales(node):
            return [node]
        if node is None or node.domain or node.op_type not in _MOVES:
            return []
        value = node.inputs[0]
    return []


def _scale_product(graph: ir.Graph, names: Names, node: ir.Node, factor: float) -> None:
    """Multiplies what a product gives by a number."""
    if node.op_type == "MatMul":
        tape = Tape(graph, before=node, names=names)
        tape.scope = f"{node.name}/"
        y = node.outputs[0]
        operands = [value for value in node.inputs if value is not None]
        product = fused_matmul(tape, operands, (0, 0), factor)
        replace_value(tape, y, product.with_shape_of(tape.tensor(y)), set())
        graph.remove(node, safe=True)
    else:
        alpha = node.attributes.get_float("alpha", 1.0)
        node.attributes["alpha"] = ir.AttrFloat32("alpha", alpha * factor)


# ------------------------------------------------------------------------------------------ rows


def sum_rows_by_products(graph: ir.Graph, names: Names) -> None:
    """Replaces sums over all axes but the last by products with ones.

    Args:
        graph: A lowered graph; changed in place.
        names: The names taken in it.
    """
    sizes = _Sizes(graph, names)
    for node in list(graph):
        x = _summed_rows(node)
        ones = None if x is None else sizes.ones(x)
        if x is None or ones is None:
            continue
        tape = Tape(graph, before=node, names=names)
        tape.scope = f"{node.name}/"
        matrix = tape.tensor(x)
        if matrix.ndim > 2:
            assert x.shape is not None
            matrix = op.Reshape(matrix, [-1, x.shape[-1]])
        y = tape.tensor(node.outputs[0])
        total = op.MatMul(tape.tensor(ones), matrix).with_shape_of(y)
        replace_value(tape, y.value, total, set())
    remove_unread(list(graph))


def _summed_rows(node: ir.Node) -> ir.Value | None:
    """Returns what a node sums over all axes but the last, which go."""
    if node.op_type != "ReduceSum" or node.domain or node.attributes.get_int("keepdims", 1) != 0:
        return None
    x, axes = (*node.inputs, None)[:2]
    if x is None or axes is None or x.dtype != ir.DataType.FLOAT or x.shape is None:
        return None
    rank = len(x.shape)
    constant = constant_tensor(axes)
    if constant is None or rank < 2 or not isinstance(x.shape[-1], int) or not x.shape[-1]:
        return None
    summed = {int(axis) % rank for axis in constant.numpy()}
    return x if summed == set(range(rank - 1)) else None


class _Sizes:
    """The numbers of rows of matrices, by the sizes and symbols in the shapes of the inputs.

    Args:
        graph: A lowered graph.
        names: The names taken in it.
    """

    def __init__(self, graph: ir.Graph, names: Names) -> None:
        self._start = Tape(graph, before=next(iter(graph), None), names=names)
        self._ones: dict[tuple[int, tuple[str, ...]], ir.Value] = {}
        self._places = {
            dim.value: (value, axis)
            for value in graph.inputs
            for axis, dim in enumerate(value.shape or ())
            if not isinstance(dim, int) and dim.value is not None
        }

    def rows(self, value: ir.Value) -> tuple[int, tuple[str, ...]] | None:
        """Returns a number and symbols whose product is the number of rows; None where unknown."""
        shape = value.shape
        if shape is None:
            return None
        number, symbols = 1, []
        for dim in shape[:-1]:
            if isinstance(dim, int):
                number *= dim
            elif dim.value is not None and dim.value in self._places:
                symbols.append(dim.value)
            else:
                return self._rows_of_source(value)
        return number, tuple(sorted(symbols))

    def _rows_of_source(self, value: ir.Value) -> tuple[int, tuple[str, ...]] | None:
        """Returns the same for what a value has its rows from."""
        node = value.producer()
        source = None if node is None or node.domain else node.inputs[0]
        if node is None or source is None or source.shape is None or value.shape is None:
            return None
        if node.op_type in ("Flatten", "Reshape"):
            columns = value.shape[-1]
            same = isinstance(columns, int) and source.shape[-1] == columns
            return self.rows(source) if same and len(value.shape) == 2 else None
        if node.op_type != "Gemm" or node.attributes.get_int("transA", 0) != 0:
            return None
        return self.rows(source)

    def ones(self, value: ir.Value) -> ir.Value | None:
        """Returns a vector of ones, one for each row; None where their number is unknown."""
        rows = self.rows(value)
        if rows is None:
            return None
        if rows not in self._ones:
            self._ones[rows] = self._make_ones(*rows)
        return self._ones[rows]

    def _make_ones(self, number: int, symbols: tuple[str, ...]) -> ir.Value:
        tape = self._start
        if not symbols:
            return tape.constant(np.ones(number, np.float32)).value
        length: object = None if number == 1 else [number]
        for symbol in symbols:
            value, axis = self._places[symbol]
            size = op.Shape(tape.tensor(value), start=axis, end=axis + 1)
            length = size if length is None else op.Mul(size, length)
        ones: ir.Value = op.ConstantOfShape(length, value=np.ones(1, np.float32)).value
        return ones
