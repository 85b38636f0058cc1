"""Translates the formula of an update to LLVM's intermediate code: one loop over the elements.

Each node becomes instructions with the same rounding as onnxruntime's kernel. They have no flags
that allow a compiler to contract or reorder them, so it produces the same bits. Only operators
whose results are defined exactly by IEEE 754 are supported, which excludes exponentials, for
example.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.execution.update_groups import Group, is_scalar
from ortops.errors import UnsupportedError
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import describe
from ortops.graph.passes.scaled_sums import DOMAIN as SCALED_SUMS
from ortops.graph.passes.scaled_sums import adds_to_zero

_FLOATS = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
_16_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MEMORY = {
    **_FLOATS,
    ir.DataType.BOOL: "i8",
    **dict.fromkeys(_16_BITS, "i16"),  # no CPU computes with them as onnxruntime does
}
_SIZES = {"float": 4, "double": 8, "i8": 1, "i16": 2}


@dataclass(frozen=True)
class Translation:
    """A formula as intermediate code.

    Attributes:
        name: The name of the function, which has two arguments: the address of a table of
            addresses, and the number of elements. The table has the addresses of flat arrays: for
            each role an array, followed by the array for its next values unless these overwrite it;
            then an array of one element for each scalar, and the arrays of constants.
        text: A module with the function. It is equal for formulas that differ in constants only.
        overwritten: The indices of the roles whose next values overwrite the current values.
        constants: The arrays of constants.
    """

    name: str
    text: str
    overwritten: tuple[int, ...]
    constants: tuple[Array, ...] = field(compare=False)


def translate(group: Group, *, overwritten: Collection[int]) -> Translation:
    """Translates a formula to intermediate code.

    Args:
        group: The group of the formula.
        overwritten: The indices of the roles whose next values overwrite the current values.

    Raises:
        UnsupportedError: If the result of a node is not the same on all machines, or has a type
            that is not supported; the message names the node.
    """
    writer = _Writer()
    targets: dict[int, str] = {}
    for index, (value, role) in enumerate(zip(group.formula.inputs, group.roles, strict=False)):
        targets[index] = writer.add_role(value)
        if role.updated and index not in overwritten:
            targets[index] = writer.add_array(value)
    for value in group.formula.inputs[len(group.roles) :]:
        writer.add_scalar(value)
    for node in group.formula:
        writer.add_node(node)
    for index, value in group.next_values.items():
        writer.store(value, targets[index])
    return writer.finish(tuple(sorted(overwritten)))


@dataclass
class _Writer:
    """Writes the code, node by node.

    Attributes:
        names: The names of values in the code.
        arrays: The names of the arrays that the function reads and writes.
        before: Lines before the loop.
        lines: Lines in the loop.
        constants: The constants so far, by type.
    """

    names: dict[ir.Value, str] = field(default_factory=dict)
    arrays: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    constants: dict[str, list[Array]] = field(default_factory=dict)
    _count: int = 0

    def new(self) -> str:
        """Returns the name for a new number."""
        self._count += 1
        return f"%x{self._count}"

    def line(self, instruction: str) -> str:
        """Adds an instruction to the loop; returns the name of its result."""
        name = self.new()
        self.lines.append(f"{name} = {instruction}")
        return name

    def add_array(self, value: ir.Value) -> str:
        """Adds an array with the type of a value; returns its name."""
        if value.dtype not in _MEMORY:
            raise UnsupportedError(f"it reads a tensor of type {value.dtype}")
        self.arrays.append(f"%array{len(self.arrays)}")
        return self.arrays[-1]

    def add_role(self, value: ir.Value) -> str:
        """Adds an array whose elements the loop reads; returns its name."""
        array = self.add_array(value)
        self._load(value, array, "%i", self.lines)
        return array

    def add_scalar(self, value: ir.Value) -> None:
        """Adds an array of one element, which is read before the loop."""
        self._load(value, self.add_array(value), "0", self.before)

    def _load(self, value: ir.Value, array: str, index: str, lines: list[str]) -> None:
        assert value.dtype is not None
        kind, place, loaded = _MEMORY[value.dtype], self.new(), self.new()
        lines += [
            f"{place} = getelementptr inbounds {kind}, ptr {array}, i64 {index}",
            f"{loaded} = load {kind}, ptr {place}, align {_SIZES[kind]}",
        ]
        if kind == "i8":
            truth = self.new()
            lines.append(f"{truth} = icmp ne i8 {loaded}, 0")
            loaded = truth
        self.names[value] = loaded

    def store(self, value: ir.Value, array: str) -> None:
        """Adds the lines that write a value to an array."""
        assert value.dtype is not None
        kind, name = _MEMORY[value.dtype], self.names[value]
        if kind == "i8":
            name = self.line(f"zext i1 {name} to i8")
        place = self.line(f"getelementptr inbounds {kind}, ptr {array}, i64 %i")
        self.lines.append(f"store {kind} {name}, ptr {place}, align {_SIZES[kind]}")

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
        self.names[output] = form(self, node, [self.names[value] for value in operands])

    def _add_constant(self, value: ir.Value, number: Array) -> None:
        if value.dtype == ir.DataType.BOOL and number.shape == ():
            self.names[value] = str(bool(number)).lower()
            return
        if value.dtype not in _FLOATS or number.shape != ():
            raise UnsupportedError(f"a constant of type {value.dtype}, shape {number.shape}")
        kind = _FLOATS[value.dtype]
        numbers = self.constants.setdefault(kind, [])
        self._load(value, f"%constants_{kind}", str(len(numbers)), self.before)
        numbers.append(number)

    def finish(self, overwritten: tuple[int, ...]) -> Translation:
        """Returns the translation; see it for the argument."""
        arrays = [*self.arrays, *(f"%constants_{kind}" for kind in self.constants)]
        # The optimizer puts the loop into the function, and knows that the arrays do not overlap.
        parameters = ", ".join(f"ptr noalias {array}" for array in arrays)
        addresses = []
        for index, array in enumerate(arrays):
            addresses += [
                f"%entry{index} = getelementptr inbounds ptr, ptr %table, i64 {index}",
                f"{array} = load ptr, ptr %entry{index}, align 8",
            ]
        text = _MODULE.format(
            parameters=parameters,
            before="".join(f"\n  {line}" for line in self.before),
            lines="".join(f"\n  {line}" for line in self.lines),
            addresses="".join(f"\n  {line}" for line in addresses),
            given=", ".join(f"ptr {array}" for array in arrays),
        )
        name = "update_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        constants = tuple(np.array(numbers) for numbers in self.constants.values())
        return Translation(name, text.replace("@update", f"@{name}"), overwritten, constants)


_MODULE = """\
declare float @llvm.sqrt.f32(float)
declare double @llvm.sqrt.f64(double)
declare float @llvm.fabs.f32(float)
declare double @llvm.fabs.f64(double)

define internal void @loop({parameters}, i64 %size) {{
entry:{before}
  br label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]{lines}
  %next = add nuw nsw i64 %i, 1
  %last = icmp eq i64 %next, %size
  br i1 %last, label %end, label %loop
end:
  ret void
}}

define void @update(ptr %table, i64 %size) {{{addresses}
  call void @loop({given}, i64 %size)
  ret void
}}
"""


def _check_types(node: ir.Node, operands: list[ir.Value]) -> None:
    for value in (*operands, *node.outputs):
        if value.dtype not in _FLOATS and value.dtype != ir.DataType.BOOL:
            raise UnsupportedError(f"{describe(node)}: it computes with numbers of {value.dtype}")


def _kind(node: ir.Node, index: int = 0) -> str:
    """Returns the type of an operand of a node, which is a floating-point number or a truth."""
    value = node.inputs[index]
    assert value is not None
    assert value.dtype is not None
    return _FLOATS.get(value.dtype, "i1")


# ------------------------------------------------------------------------------ forms of operators

_Form: TypeAlias = Callable[[_Writer, ir.Node, list[str]], str]
"""Adds the lines of a node with the given operands; returns the name of its result."""


def _binary(instruction: str, of_truths: str = "") -> _Form:
    """An instruction with two operands, and the one for truths."""

    def form(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
        kind = _kind(node)
        chosen = of_truths if kind == "i1" else instruction
        if not chosen:
            raise UnsupportedError(f"{describe(node)}: it computes with numbers of {kind}")
        return writer.line(f"{chosen} {kind} {operands[0]}, {operands[1]}")

    return form


def _call(function: str) -> _Form:
    def form(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
        kind = _kind(node)
        suffix = {"float": "f32", "double": "f64"}[kind]
        return writer.line(f"call {kind} @llvm.{function}.{suffix}({kind} {operands[0]})")

    return form


def _negative(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    return writer.line(f"fneg {_kind(node)} {operands[0]}")


def _not(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    return writer.line(f"xor i1 {operands[0]}, true")


def _compare(writer: _Writer, kind: str, how: str, a: str, b: str) -> str:
    return writer.line(f"fcmp {how} {kind} {a}, {b}")


def _select(writer: _Writer, kind: str, condition: str, a: str, b: str) -> str:
    return writer.line(f"select i1 {condition}, {kind} {a}, {kind} {b}")


def _extreme(how: str) -> _Form:
    """Max or Min: the first of two equal numbers, where a scalar counts as the second operand."""

    def form(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
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
        kind = _kind(node)
        beyond, no_number = (_compare(writer, kind, h, a, o) for h, o in ((how, b), ("uno", a)))
        return _select(writer, kind, writer.line(f"or i1 {beyond}, {no_number}"), a, b)

    return form


def _clip(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    if len(operands) != 3:
        raise UnsupportedError(f"{describe(node)}: it has no lower or no upper bound")
    x, low, high = operands
    kind = _kind(node)
    above, below = (_compare(writer, kind, "ogt", x, high), _compare(writer, kind, "olt", x, low))
    return _select(writer, kind, below, low, _select(writer, kind, above, high, x))


def _sign(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    (x,), kind = operands, _kind(node)
    result = x  # which is no number
    for how, sign in (("oeq", "0.0"), ("olt", "-1.0"), ("ogt", "1.0")):
        result = _select(writer, kind, _compare(writer, kind, how, x, "0.0"), sign, result)
    return result


def _where(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    """Where. If the condition selects -0, onnxruntime's kernel returns 0."""
    condition, x, y = operands
    kind = _kind(node, 1)
    chosen = x if kind == "i1" else writer.line(f"fadd {kind} {x}, 0.0")
    return _select(writer, kind, condition, chosen, y)


def _scaled_sum(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    """Y + factor · x, as the available kernel computes it."""
    x, factor, y = operands
    kind = _kind(node)
    if node.attributes["sign"].as_int() < 0:
        factor = writer.line(f"fneg {kind} {factor}")
    product = writer.line(f"fmul {kind} {factor}, {x}")
    if adds_to_zero():
        product = writer.line(f"fadd {kind} 0.0, {product}")
    return writer.line(f"fadd {kind} {y}, {product}")


def _cast(writer: _Writer, node: ir.Node, operands: list[str]) -> str:
    (x,) = operands
    (source,), (target,) = node.inputs, node.outputs
    assert source is not None
    old, new = source.dtype, target.dtype
    if old == new:
        return x
    single, double = ir.DataType.FLOAT, ir.DataType.DOUBLE
    if old == ir.DataType.BOOL and new in _FLOATS:
        return writer.line(f"uitofp i1 {x} to {_FLOATS[new]}")
    if (old, new) == (single, double):
        return writer.line(f"fpext float {x} to double")
    if (old, new) == (double, single):
        return writer.line(f"fptrunc double {x} to float")
    if old is None or new is None or (old, new) not in _CASTS:
        raise UnsupportedError(f"{describe(node)}: it casts {old} to {new}")
    return _expand(writer, _CASTS[old, new], x)


def _expand(writer: _Writer, lines: Sequence[str], x: str) -> str:
    """Adds lines whose names begin with $, and $x is given; returns the name of the last result."""
    names = {"x": x}
    for each in lines:
        name, instruction = each.split(" = ")
        instruction = re.sub(r"\$(\w+)", lambda found: names[found[1]], instruction)
        names[name] = writer.line(instruction)
    return names[name]


# Round half to even. Below the smallest normal number, 2^-14, adding 0.5 rounds; above it, the
# carry of an addition does.
_TO_FLOAT16 = (
    "b = bitcast float $x to i32",
    "m = and i32 $b, 2147483647",
    "absolute = bitcast i32 $m to float",
    "sum = fadd float $absolute, 0.5",
    "s = bitcast float $sum to i32",
    "shifted = lshr i32 $m, 13",
    "odd = and i32 $shifted, 1",
    "rebased = sub i32 $m, 939520001",  # 0x37FFF001
    "n = add i32 $rebased, $odd",
    "normal = lshr i32 $n, 13",
    "subnormal = sub i32 $s, 1056964608",  # 0x3F000000
    "is_subnormal = icmp ult i32 $m, 947912704",  # 0x38800000
    "finite = select i1 $is_subnormal, i32 $subnormal, i32 $normal",
    "is_large = icmp uge i32 $m, 1199570944",  # 0x47800000
    "number = select i1 $is_large, i32 31744, i32 $finite",  # infinity
    "is_nan = icmp ugt i32 $m, 2139095040",  # 0x7F800000
    "half = select i1 $is_nan, i32 32256, i32 $number",
    "high = lshr i32 $b, 16",
    "sign = and i32 $high, 32768",
    "signed = or i32 $half, $sign",
    "result = trunc i32 $signed to i16",
)
_TO_BFLOAT16 = (
    "b = bitcast float $x to i32",
    "shifted = lshr i32 $b, 16",
    "odd = and i32 $shifted, 1",
    "raised = add i32 $b, 32767",
    "h = add i32 $raised, $odd",
    "number = lshr i32 $h, 16",
    "is_nan = fcmp uno float $x, $x",
    "chosen = select i1 $is_nan, i32 32704, i32 $number",  # 0x7FC0
    "result = trunc i32 $chosen to i16",
)
# Multiplying by 2^112 shifts the exponent, and makes subnormal numbers normal.
_FROM_FLOAT16 = (
    "b = zext i16 $x to i32",
    "low = and i32 $b, 32767",
    "m = shl i32 $low, 13",
    "small = bitcast i32 $m to float",
    "f = fmul float $small, 0x46F0000000000000",
    "h = bitcast float $f to i32",
    "infinite = or i32 $h, 2139095040",  # 0x7F800000
    "is_infinite = icmp uge i32 $m, 260046848",  # 0x0F800000
    "number = select i1 $is_infinite, i32 $infinite, i32 $h",
    "high = and i32 $b, 32768",
    "sign = shl i32 $high, 16",
    "signed = or i32 $number, $sign",
    "result = bitcast i32 $signed to float",
)
_FROM_BFLOAT16 = (
    "b = zext i16 $x to i32",
    "shifted = shl i32 $b, 16",
    "result = bitcast i32 $shifted to float",
)
_CASTS = {
    (ir.DataType.FLOAT, ir.DataType.FLOAT16): _TO_FLOAT16,
    (ir.DataType.FLOAT, ir.DataType.BFLOAT16): _TO_BFLOAT16,
    (ir.DataType.FLOAT16, ir.DataType.FLOAT): _FROM_FLOAT16,
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT): _FROM_BFLOAT16,
}

_FORMS: dict[tuple[str, str], _Form] = {
    ("", "Identity"): lambda writer, node, operands: operands[0],
    ("", "Add"): _binary("fadd"),
    ("", "Sub"): _binary("fsub"),
    ("", "Mul"): _binary("fmul"),
    ("", "Div"): _binary("fdiv"),
    ("", "Sqrt"): _call("sqrt"),
    ("", "Abs"): _call("fabs"),
    ("", "Neg"): _negative,
    ("", "Max"): _extreme("ogt"),
    ("", "Min"): _extreme("olt"),
    ("", "Clip"): _clip,
    ("", "Sign"): _sign,
    ("", "Where"): _where,
    ("", "Greater"): _binary("fcmp ogt"),
    ("", "GreaterOrEqual"): _binary("fcmp oge"),
    ("", "Less"): _binary("fcmp olt"),
    ("", "LessOrEqual"): _binary("fcmp ole"),
    ("", "Equal"): _binary("fcmp oeq", "icmp eq"),
    ("", "And"): _binary("", "and"),
    ("", "Or"): _binary("", "or"),
    ("", "Xor"): _binary("", "xor"),
    ("", "Not"): _not,
    ("", "Cast"): _cast,
    (SCALED_SUMS, "ScaledSum"): _scaled_sum,
}
