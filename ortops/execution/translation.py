"""Translates the formula of an update to a Python function: one loop over the elements.

Each node becomes one line with the same rounding as onnxruntime's kernel, so a compiler that
neither contracts nor reorders operations produces the same bits. Only operators whose results are
defined exactly by IEEE 754 are supported, which excludes exponentials, for example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.errors import UnsupportedError
from ortops.execution.split import Group, is_scalar
from ortops.graph.edit import describe
from ortops.graph.tensor import constant_tensor
from ortops.numbers import Array
from ortops.passes.scaled_sums import DOMAIN as SCALED_SUMS
from ortops.passes.scaled_sums import adds_to_zero

__all__ = ["Translation", "translate"]


_FLOATS = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
_16_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MEMORY = {
    **_FLOATS,
    ir.DataType.BOOL: "boolean",
    **dict.fromkeys(_16_BITS, "uint16"),  # numba computes with neither of them
}


@dataclass(frozen=True)
class Translation:
    """A formula as source code.

    Attributes:
        name: The name of the function. It is different for formulas that differ in more than
            constants, because numba identifies compiled functions by name.
        text: A module with the function. Its arguments are flat arrays: for each role an array,
            followed by the array for its next values unless the update is in place; then an array
            of one element for each scalar, and the arrays of constants. 16-bit numbers are passed
            as ``uint16``.
        signature: The types of the arguments in numba's notation.
        constants: The arrays of constants.
    """

    name: str
    text: str
    signature: str
    constants: tuple[Array, ...] = field(compare=False)


def translate(group: Group, *, in_place: bool) -> Translation:
    """Translates a formula to source code.

    Args:
        group: The group of the formula.
        in_place: Whether next values overwrite current values.

    Raises:
        UnsupportedError: If the result of a node is not the same on all machines, or has a type
            that is not supported; the message names the node.
    """
    writer = _Writer()
    for index, (value, role) in enumerate(zip(group.formula.inputs, group.roles, strict=False)):
        writer.add_argument(value, f"role_{index}", f"role_{index}[i]", readonly=not role.updated)
        if role.updated and not in_place:
            writer.add_argument(value, f"next_{index}")
    for index, value in enumerate(group.formula.inputs[len(group.roles) :]):
        writer.add_argument(value, f"scalar_{index}", f"scalar_{index}[0]")
    for node in group.formula:
        writer.add_node(node)
    writes = {
        f"{'role' if in_place else 'next'}_{index}": writer.names[value]
        for index, value in group.next_values.items()
    }
    return writer.finish(writes)


@dataclass
class _Writer:
    """Writes the source code, node by node.

    Attributes:
        names: The names of values in the source code.
        arguments: The types of the function's arguments by name.
        before: Lines before the loop.
        lines: Lines in the loop.
        constants: The constants so far, by dtype.
    """

    names: dict[ir.Value, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    constants: dict[str, list[Array]] = field(default_factory=dict)

    def add_argument(
        self, value: ir.Value, name: str, read: str = "", *, readonly: bool = False
    ) -> None:
        """Adds an argument for a value, and a line that reads it with the expression ``read``."""
        memory = None if value.dtype is None else _MEMORY.get(value.dtype)
        if memory is None:
            raise UnsupportedError(f"it reads a tensor of type {value.dtype}")
        suffix = ", readonly=True" if readonly else ""
        self.arguments[name] = f"Array({memory}, 1, 'C'{suffix})"
        if read:
            self.names[value] = f"x{len(self.names)}"
            lines = self.before if is_scalar(value) else self.lines
            lines.append(f"{self.names[value]} = {read}")

    def add_node(self, node: ir.Node) -> None:
        """Adds the lines of a node."""
        (output,) = node.outputs
        if (constant := constant_tensor(output)) is not None:
            self._add_constant(output, constant.numpy())
            return
        form = _FORMS.get((node.domain, node.op_type))
        if form is None:
            raise UnsupportedError(
                f"{describe(node)}: kernels of this operator have different results"
            )
        operands = [value for value in node.inputs if value is not None]
        if len(operands) != len(node.inputs):
            raise UnsupportedError(f"{describe(node)}: an input is missing")
        if node.op_type != "Cast":
            _check_types(node, operands)
        expression = form(node, [self.names[value] for value in operands])
        if isinstance(expression, str):
            expression = [expression]
        self.names[output] = f"x{len(self.names)}"
        *steps, last = expression
        self.lines += [*steps, f"{self.names[output]} = {last}"]

    def _add_constant(self, value: ir.Value, number: Array) -> None:
        dtype = "" if value.dtype is None else _FLOATS.get(value.dtype, "")
        if value.dtype == ir.DataType.BOOL and number.shape == ():
            self.names[value] = repr(bool(number))
            return
        if not dtype or number.shape != ():
            raise UnsupportedError(f"a constant of type {value.dtype}, shape {number.shape}")
        numbers = self.constants.setdefault(dtype, [])
        self.names[value] = f"c{dtype[-2:]}_{len(numbers)}"
        self.before.append(f"{self.names[value]} = constants_{dtype}[{len(numbers)}]")
        numbers.append(number)

    def finish(self, writes: Mapping[str, str]) -> Translation:
        """Returns the translation, whose loop ends with lines that write values to arrays."""
        for dtype in self.constants:
            self.arguments[f"constants_{dtype}"] = f"Array({dtype}, 1, 'C')"
        self.before += [f"zero_{dtype} = np.{dtype}(0)" for dtype in _FLOATS.values()]
        first = next(iter(self.arguments))
        loop = [*self.lines, *(f"{array}[i] = {value}" for array, value in writes.items())]
        body = "\n".join(
            (
                f"({', '.join(self.arguments)}):",
                *(f"    {line}" for line in self.before),
                f"    for i in range({first}.size):",
                *(f"        {line}" for line in loop),
                "",
            )
        )
        constants = tuple(np.array(numbers) for numbers in self.constants.values())
        signature = f"none({', '.join(self.arguments.values())})"
        name = "update_" + hashlib.sha256((signature + body).encode()).hexdigest()[:16]
        text = f"import numpy as np\n\n\ndef {name}{body}"
        return Translation(name, text, signature, constants)


def _check_types(node: ir.Node, operands: list[ir.Value]) -> None:
    for value in (*operands, *node.outputs):
        if value.dtype not in _FLOATS and value.dtype != ir.DataType.BOOL:
            raise UnsupportedError(f"{describe(node)}: it computes with numbers of {value.dtype}")


def _zero(node: ir.Node, index: int = 0) -> str:
    value = node.inputs[index]
    assert value is not None
    return f"zero_{_FLOATS[value.dtype]}" if value.dtype in _FLOATS else ""


# ------------------------------------------------------------------------------ forms of operators

_Form: TypeAlias = Callable[[ir.Node, list[str]], "str | list[str]"]
"""Returns the expression of a node for its operands, after the lines that must precede it."""


def _infix(sign: str) -> _Form:
    return lambda node, operands: f"{operands[0]} {sign} {operands[1]}"


def _call(function: str) -> _Form:
    return lambda node, operands: f"{function}({operands[0]})"


def _extreme(sign: str) -> _Form:
    """Max or Min: the first of two equal numbers, where a scalar counts as the second operand."""

    def form(node: ir.Node, operands: list[str]) -> str:
        if len(operands) == 1:
            return operands[0]
        if len(operands) > 2:
            raise UnsupportedError(f"{describe(node)}: it has {len(operands)} operands")
        a, b = operands
        first, second = node.inputs
        assert first is not None
        assert second is not None
        if is_scalar(first) and not is_scalar(second):
            a, b = b, a
        return f"{a} if {a} {sign} {b} or {a} != {a} else {b}"

    return form


def _clip(node: ir.Node, operands: list[str]) -> str:
    if len(operands) != 3:
        raise UnsupportedError(f"{describe(node)}: it has no lower or no upper bound")
    x, low, high = operands
    return f"{low} if {x} < {low} else {high} if {x} > {high} else {x}"


def _sign(node: ir.Node, operands: list[str]) -> str:
    (x,), zero = operands, _zero(node)
    one = zero.replace("zero_", "np.") + "(1)"
    return (
        f"{one} if {x} > {zero} else -{one} if {x} < {zero} else {zero} if {x} == {zero} else {x}"
    )


def _where(node: ir.Node, operands: list[str]) -> str:
    """Where. If the condition selects -0, onnxruntime's kernel returns 0."""
    condition, x, y = operands
    zero = _zero(node, 1)
    return f"{x} + {zero} if {condition} else {y}" if zero else f"{x} if {condition} else {y}"


def _scaled_sum(node: ir.Node, operands: list[str]) -> str:
    """Y + factor · x, as the available kernel computes it."""
    x, factor, y = operands
    sign = "-" if node.attributes["sign"].as_int() < 0 else ""
    product = f"{sign}{factor} * {x}"
    return f"{y} + (zero_float32 + {product})" if adds_to_zero() else f"{y} + {product}"


def _cast(node: ir.Node, operands: list[str]) -> str | list[str]:
    (x,) = operands
    (source,), (target,) = node.inputs, node.outputs
    assert source is not None
    old, new = source.dtype, target.dtype
    if old == new:
        return x
    if new in _FLOATS and (old in _FLOATS or old == ir.DataType.BOOL):
        return f"np.{_FLOATS[new]}({x})"
    single = ir.DataType.FLOAT
    if old == single and new == ir.DataType.FLOAT16:
        return [line.format(x=x) for line in _TO_FLOAT16]
    if old == single and new == ir.DataType.BFLOAT16:
        return [line.format(x=x) for line in _TO_BFLOAT16]
    if old == ir.DataType.FLOAT16 and new == single:
        return [line.format(x=x) for line in _FROM_FLOAT16]
    if old == ir.DataType.BFLOAT16 and new == single:
        return f"np.uint32(np.uint32({x}) << np.uint32(16)).view(np.float32)"
    raise UnsupportedError(f"{describe(node)}: it casts {old} to {new}")


# Round half to even. Below the smallest normal number, 2^-14, adding 0.5 rounds; above it, the
# carry of an addition does.
_TO_FLOAT16 = (
    "b = np.float32({x}).view(np.uint32)",
    "m = np.uint32(b & np.uint32(0x7FFFFFFF))",
    "s = np.float32(np.uint32(m).view(np.float32) + np.float32(0.5)).view(np.uint32)",
    "n = np.uint32(m - np.uint32(0x37FFF001) + ((m >> np.uint32(13)) & np.uint32(1)))",
    "h = np.uint32(s - np.uint32(0x3F000000))",
    "h = h if m < np.uint32(0x38800000) else np.uint32(n >> np.uint32(13))",
    "h = np.uint32(0x7C00) if m >= np.uint32(0x47800000) else h",
    "h = np.uint32(0x7E00) if m > np.uint32(0x7F800000) else h",
    "np.uint16(h | ((b >> np.uint32(16)) & np.uint32(0x8000)))",
)
_TO_BFLOAT16 = (
    "b = np.float32({x}).view(np.uint32)",
    "h = np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1)))",
    "np.uint16(np.uint32(h >> np.uint32(16)) if {x} == {x} else np.uint32(0x7FC0))",
)
# Multiplying by 2^112 shifts the exponent, and makes subnormal numbers normal.
_FROM_FLOAT16 = (
    "b = np.uint32({x})",
    "m = np.uint32((b & np.uint32(0x7FFF)) << np.uint32(13))",
    "f = np.float32(np.uint32(m).view(np.float32) * np.float32(5.192296858534828e33))",
    "h = np.float32(f).view(np.uint32)",
    "h = np.uint32(h | np.uint32(0x7F800000)) if m >= np.uint32(0x0F800000) else h",
    "np.uint32(h | ((b & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)",
)

_FORMS: dict[tuple[str, str], _Form] = {
    ("", "Identity"): lambda node, operands: operands[0],
    ("", "Add"): _infix("+"),
    ("", "Sub"): _infix("-"),
    ("", "Mul"): _infix("*"),
    ("", "Div"): _infix("/"),
    ("", "Sqrt"): _call("np.sqrt"),
    ("", "Abs"): _call("abs"),
    ("", "Neg"): _call("-"),
    ("", "Max"): _extreme(">"),
    ("", "Min"): _extreme("<"),
    ("", "Clip"): _clip,
    ("", "Sign"): _sign,
    ("", "Where"): _where,
    ("", "Greater"): _infix(">"),
    ("", "GreaterOrEqual"): _infix(">="),
    ("", "Less"): _infix("<"),
    ("", "LessOrEqual"): _infix("<="),
    ("", "Equal"): _infix("=="),
    ("", "And"): _infix("and"),
    ("", "Or"): _infix("or"),
    ("", "Xor"): _infix("!="),
    ("", "Not"): _call("not "),
    ("", "Cast"): _cast,
    (SCALED_SUMS, "ScaledSum"): _scaled_sum,
}
