"""Packed updates: all variables with the same update formula, contiguous in memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.execution.memory import Memory, put
from ortops.engine.execution.update_groups import Group, is_safe_in_place
from ortops.graph.constants import IR_VERSION
from ortops.graph.passes.scaled_sums import MULTIPLE, arranged, expand
from ortops.graph.tensor import Tape, op

_ALIGNMENT = 16  # elements


@dataclass(frozen=True)
class Variable:
    """The memory of a variable.

    Attributes:
        buffers: The memory of its value before steps of even number, and before steps of odd
            number. Both are the same if updates are in place, or if it is never updated.
    """

    buffers: tuple[Memory, Memory]


class Packed:
    """A group of variables, contiguous in memory.

    Args:
        group: The group.
        chunk: The maximum number of elements that are updated at a time.
        threads: The number of threads, each of which gets the same number of chunks.
        in_place: Whether updates may be in place if the formula allows it.
        joined: Whether the formula is part of the gradient graph, so that gradients need no memory
            of their own. Then no thread has chunks of its own.
        passed: Whether outputs of the gradient graph are passed to each update like feeds, so that
            they need no memory of their own.

    Attributes:
        group: The group.
        joined: Whether the formula is part of the gradient graph.
        given: Indices of the roles that are passed to each update.
        passed: The outputs of the gradient graph among them.
        rows: The number of chunks.
        chunk: The shape of a chunk.
        sizes: The number of elements reserved for each member.
        shape: The shape of an array: (rows, *chunk), or chunk if there is only one.
        arrays: The two arrays of each role, by role index, which are used alternately.
        variables: The variables of the group, which are views of the arrays.
    """

    def __init__(
        self,
        group: Group,
        chunk: int,
        threads: int,
        *,
        in_place: bool,
        joined: bool,
        passed: bool = False,
    ) -> None:
        self.group = group
        self.joined = joined
        self.given = [
            index
            for index, role in enumerate(group.roles)
            if role.fed or (passed and not role.updated and role.dtype.numpy().kind != "V")
        ]
        self.passed = [
            n for i in self.given if not group.roles[i].fed for n in group.roles[i].names
        ]
        self.sizes = [_round_up(math.prod(shape), _ALIGNMENT) for shape in group.shapes]
        total = sum(self.sizes)
        rows = -(-total // chunk)
        if joined:
            self.rows = _even_rows(total, rows)
        else:
            self.rows = _round_up(rows, threads) if rows > 1 else 1
        length = _round_up(-(-total // self.rows), MULTIPLE)
        if self.rows == 1 or joined:
            self.sizes[-1] += self.rows * length - total
        self.chunk = arranged(length)
        self.shape = self.chunk if self.rows == 1 else (self.rows, *self.chunk)
        self.arrays: dict[int, tuple[Array, Array]] = {}
        self.variables: dict[str, Variable] = {}
        for index, role in enumerate(self.group.roles):
            if index in self.given or (joined and not role.updated):
                continue
            value = self.group.formula.inputs[index]
            new = self.group.next_values.get(index)
            first = second = self._array(role.dtype)
            if new is not None and not (in_place and is_safe_in_place(value, new)):
                second = self._array(role.dtype)
            self.arrays[index] = first, second
            if role.updated:
                pairs = zip(self.views(index, 0), self.views(index, 1), strict=True)
                self.variables |= zip(role.names, map(Variable, pairs), strict=True)

    def _array(self, dtype: ir.DataType) -> Array:
        """Returns an array with zeros between members; the rest is not touched yet."""
        array = np.empty(self.shape, dtype.numpy())  # `np.zeros` does not use huge pages
        flat, offset, zero = array.reshape(-1), 0, np.zeros(1, array.dtype)
        for shape, size in zip(self.group.shapes, self.sizes, strict=True):
            put(flat[offset + math.prod(shape) : offset + size], zero)
            offset += size
        put(flat[offset:], zero)
        return array

    @property
    def in_place(self) -> bool:
        """Whether an update overwrites the current values."""
        return bool(self.overwritten)

    @property
    def overwritten(self) -> list[int]:
        """The roles whose next values overwrite the current values, by index."""
        return [i for i, (a, b) in self.arrays.items() if self.group.roles[i].updated and a is b]

    def apart(self, turn: int | None) -> Packed:
        """Returns the same update, in the same memory, separate from the gradient graph.

        Args:
            turn: The index of the buffers with the current values, which it overwrites; None if it
                uses both buffers.
        """
        result = copy.copy(self)
        result.joined, result.arrays = False, dict(self.arrays)
        if turn is not None:
            result.arrays = {i: (each[turn],) * 2 for i, each in self.arrays.items()}
            result.variables = {
                name: Variable((each.buffers[turn],) * 2) for name, each in self.variables.items()
            }
        for index, role in enumerate(self.group.roles):
            if index not in self.given and index not in self.arrays:
                gradients = self._array(role.dtype)
                result.arrays[index] = gradients, gradients
        return result

    def sample(self, overwritten: Collection[int]) -> Packed:
        """Returns the same update of one chunk of ones, with memory of its own, to be timed.

        Args:
            overwritten: The indices of the roles whose next values overwrite the current values.
        """
        result = copy.copy(self)
        result.rows, result.shape = 1, self.chunk
        result.given, result.passed, result.joined = [], [], False
        result.arrays, result.variables = {}, {}
        for index, role in enumerate(self.group.roles):
            first = second = np.ones(self.chunk, role.dtype.numpy())
            if role.updated and index not in overwritten:
                second = first.copy()
            result.arrays[index] = first, second
        return result

    def views(self, index: int, turn: int) -> list[Array]:
        """Returns the tensors of a role as views of its array."""
        array = self.arrays[index][turn].reshape(-1)
        result, offset = [], 0
        for shape, size in zip(self.group.shapes, self.sizes, strict=True):
            result.append(array[offset : offset + math.prod(shape)].reshape(shape))
            offset += size
        return result

    def spans(self, row: int) -> list[tuple[int, slice, slice]]:
        """Returns the contents of a chunk: member, slice of its elements, slice of the chunk."""
        length = math.prod(self.chunk)
        result, offset = [], -row * length
        for member, (shape, size) in enumerate(zip(self.group.shapes, self.sizes, strict=True)):
            begin, end = max(offset, 0), min(offset + math.prod(shape), length)
            if begin < end:
                result.append((member, slice(begin - offset, end - offset), slice(begin, end)))
            offset += size
        return result

    def pack(self, tape: Tape, values: Sequence[ir.Value]) -> ir.Value:
        """Emits the nodes that concatenate the tensors of a role."""
        parts: list[object] = []
        for value, shape, size in zip(values, self.group.shapes, self.sizes, strict=True):
            parts.append(op.Reshape(tape.tensor(value), [-1]))
            if padding := size - math.prod(shape):
                assert value.dtype is not None
                parts.append(tape.constant(np.zeros(padding, value.dtype.numpy())))
        packed: ir.Value = op.Reshape(op.Concat(*parts, axis=0), list(self.shape)).value
        return packed

    def inputs(self, prefix: str, rows: int | str | None = None) -> list[ir.Value]:
        """Returns inputs for a graph with the formula: one for each role, then the scalars.

        Args:
            prefix: The prefix of their names, followed by the index.
            rows: The number of chunks, or a symbol for it; None for a single chunk.
        """
        shape = ir.Shape(self.chunk if rows is None else [rows, *self.chunk])
        return [
            ir.Value(
                name=f"{prefix}{index}",
                type=value.type,
                shape=shape if index < len(self.group.roles) else ir.Shape([]),
            )
            for index, value in enumerate(self.group.formula.inputs)
        ]

    def emit(self, tape: Tape, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        """Emits the update; several chunks are processed by a Scan, which accepts any number.

        Args:
            tape: The tape to emit to.
            inputs: See `inputs`.

        Returns:
            The next value of each role that is updated.
        """
        if inputs[0].shape is not None and len(inputs[0].shape) == len(self.chunk):
            return self.group.emit(tape, inputs)
        count = len(self.group.roles)
        inner = tape.subgraph("chunk")
        body = inner.graph
        chunks = self.inputs(f"{tape.names.unique('chunk')}_")[:count]
        body.inputs.extend(chunks)
        body.outputs.extend(self.group.emit(inner, [*chunks, *inputs[count:]]))
        expand(body)
        tape.graph.opset_imports.update(body.opset_imports)
        attributes = [ir.AttrInt64("num_scan_inputs", count), ir.AttrGraph("body", body)]
        scan = ir.Node("", "Scan", inputs[:count], attributes, num_outputs=len(body.outputs))
        for output, chunk in zip(scan.outputs, body.outputs, strict=True):
            output.type, output.shape = chunk.type, inputs[0].shape
        tape.append(scan)
        return list(scan.outputs)

    def model(self, rows: int) -> ir.Model:
        """Returns the update as a model.

        Inputs are ``input_<index>`` for each role and then each scalar, outputs ``next_<index>``
        for each role that is updated.

        Args:
            rows: The number of chunks that a run updates.
        """
        imports = dict(self.group.formula.opset_imports)
        inputs = self.inputs("input_", None if rows == 1 else "rows")
        graph = ir.Graph(inputs, [], nodes=[], opset_imports=imports, name="update")
        outputs = self.emit(Tape(graph), inputs)
        for index, output in zip(self.group.next_values, outputs, strict=True):
            output.name = f"next_{index}"
            graph.outputs.append(output)
        expand(graph)
        return ir.Model(graph, ir_version=IR_VERSION)


def _even_rows(total: int, least: int) -> int:
    """Returns a number of chunks, at least the given one, that needs little or no padding."""
    parts = total // MULTIPLE
    even = (rows for rows in range(least, 2 * least) if not total % MULTIPLE and not parts % rows)
    return next(even, least)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
