"""Tensor and op: Python arithmetic that emits ONNX nodes on a tape.

A `Tape` inserts nodes at a position of a graph. ``op.<Operator>(...)`` and the arithmetic of
`Tensor` emit standard ONNX nodes on it, and infer their types and shapes immediately. Gradient
rules, losses, optimizers and whole models are written with them.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import EllipsisType, TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    Protocol,
    Self,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops._common.numbers import Array, cast_numbers, is_numeric
from ortops.errors import ArgumentError, ModelError, OrtopsError
from ortops.graph.files.external import without_data
from ortops.graph.files.serialization import GRADIENT_DOMAIN, is_map, name_tensors
from ortops.graph.pooled_sizes import pooled_sizes

Dim: TypeAlias = int | str | None
"""A dimension: its size, its symbol, or None if it is unknown."""

Axes: TypeAlias = int | Sequence[int] | None
_T = TypeVar("_T")

DEFAULT_OPSET = 21
IR_VERSION = 10
VARIABLE = "ortops.variable"
"""The key in ``value.meta`` of initializers that are variables, so that they are not folded."""

_SMALL = 4096  # constants with at most this many elements are used in shape inference

_MOST_INFERRED = 10_000
_HASHABLE = frozenset(
    {
        ir.AttributeType.FLOAT,
        ir.AttributeType.FLOATS,
        ir.AttributeType.INT,
        ir.AttributeType.INTS,
        ir.AttributeType.STRING,
        ir.AttributeType.STRINGS,
        ir.AttributeType.TENSOR,
    }
)
"""Types of attributes that can be part of a key of the inference cache."""

_NO_VALUE = "has no value while the graph is built"
_NO_CONTENT = "the model in a session, because a Tensor has no value while the graph is built"

_INSTEAD = {
    "all": ".min() of booleans",
    "any": ".max() of booleans",
    "dot": "@",
    "item": _NO_CONTENT,
    "numpy": _NO_CONTENT,
    "permute": "op.Transpose(x, perm=[...])",
    "to": ".astype(dtype)",
    "tolist": _NO_CONTENT,
    "transpose": ".T, .mT, or op.Transpose(x, perm=[...])",
    "view": ".reshape(shape)",
}
"""Replacements for methods that arrays of other libraries have."""

_Inferred: TypeAlias = tuple[tuple[ir.TypeProtocol | None, tuple[Dim, ...] | None], ...]
_inferred: dict[tuple[object, ...], _Inferred] = {}  # a cache, because layers of a model repeat

_current: contextvars.ContextVar[Tape | None] = contextvars.ContextVar("tape", default=None)


def numpy_dtype(value: ir.Value) -> np.dtype[Any] | None:
    """Returns the element type of an ONNX value as a numpy dtype, or None if it is unknown."""
    return None if value.dtype is None else np.dtype(value.dtype.numpy())


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """Returns the content of a constant, or None for values that are known at run time only.

    An initializer that is also an input has a default value and is not a constant; neither is a
    value marked as a `VARIABLE`.

    Raises:
        ModelError: If it is the output of a Constant node with a wrong attribute.
    """
    if value.is_graph_input() or VARIABLE in value.meta:
        return None
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant":
        content = node.attributes.get("value")
        legal = len(node.attributes) == len(node.outputs) == 1 and node.domain == ""
        if legal and content is not None and content.type == ir.AttributeType.TENSOR:
            if content.is_ref():
                return None
            # onnx-ir checks the class of the tensor against a protocol, which takes much longer.
            return cast(ir.TensorProtocol, content.value)
    try:
        return ir.convenience.get_const_tensor(value)
    except (TypeError, ValueError) as error:
        name = value.name if node is None else node.name or value.name
        raise ModelError(f"Constant node '{name}': {error}; correct its attribute") from error


def constant_number(value: ir.Value) -> float | None:
    """Returns the number in a constant of one element, or None."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.size != 1 or tensor.dtype == ir.DataType.STRING:
        return None
    return float(tensor.numpy().item())


class Names:
    """Generates unique names for values and nodes.

    Args:
        graph: A graph whose names, including those in its subgraphs, are already used.
    """

    def __init__(self, graph: ir.Graph | None = None) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}
        if graph is not None:
            for inner in (graph, *graph.subgraphs()):
                self._taken.update(inner.initializers)
                self._taken.update(value.name for value in inner.inputs if value.name)
                for node in inner:
                    self._taken.update(value.name for value in node.outputs if value.name)
                    self._taken.add(node.name or "")

    def take(self, name: str) -> None:
        """Marks a name as used."""
        self._taken.add(name)

    def is_free(self, name: str) -> bool:
        """Whether a name is unused."""
        return name not in self._taken

    def unique(self, name: str) -> str:
        """Returns ``name``, with a numeric suffix if it is already used, and marks it as used."""
        candidate = name
        while candidate in self._taken:
            number = self._next.get(name, 1)
            self._next[name] = number + 1
            candidate = f"{name}_{number}"
        self._taken.add(candidate)
        return candidate


class Tape:
    """Inserts new nodes into a graph.

    In its ``with`` block, operators also work if none of their inputs is a Tensor.

    Args:
        graph: The graph; a new one by default.
        before: The node before which to insert; by default, nodes are appended.
        names: The names already used; by default, those in the graph.
        name: The name of a new graph.
        opset: The version of the default operator set of a new graph.

    Example:
        >>> with Tape(name="half") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 3])
        ...     y = tape.output(x * 0.5, "y")
        >>> [node.op_type for node in tape.model().graph.node]
        ['Constant', 'Mul']
    """

    def __init__(
        self,
        graph: ir.Graph | None = None,
        *,
        before: ir.Node | None = None,
        names: Names | None = None,
        name: str = "graph",
        opset: int = DEFAULT_OPSET,
    ) -> None:
        self._is_new = graph is None
        if graph is None:
            graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)
        self.graph = graph
        self.before = before
        self.names = Names(graph) if names is None else names
        self.scope = ""
        self.nodes: list[ir.Node] = []
        self._emitted: set[ir.Node | None] = set()
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._declared: set[str] = set()
        self.put_out: set[ir.Value] = set()
        self._made: dict[Hashable, object] = {}
        self._outer: list[contextvars.Token[Tape | None]] = []

    def __enter__(self) -> Self:
        self._outer.append(_current.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _current.reset(self._outer.pop())

    @property
    def opset(self) -> int:
        """The version of the default operator set."""
        return self.graph.opset_imports[""]

    def tensor(self, value: ir.Value) -> Tensor:
        """Returns the Tensor for a value of the graph."""
        return Tensor(self, value)

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[Dim] | None) -> Tensor:
        """Adds a graph input.

        Args:
            name: The input's name.
            dtype: Its element type.
            shape: Its dimensions: sizes, symbols, or None; None for an unknown rank.

        Raises:
            ModelError: If this tape has made an input or initializer of that name.
        """
        value = _typed_value(self._declare(name), dtype, shape)
        self.graph.inputs.append(value)
        return Tensor(self, value)

    def initializer(self, name: str, array: npt.ArrayLike) -> Tensor:
        """Adds an initializer: a parameter of the model.

        Args:
            name: The initializer's name.
            array: Its value.

        Raises:
            ModelError: If this tape has made an input or initializer of that name.
        """
        array = _storable(array)
        value = _typed_value(self._declare(name), array.dtype, array.shape)
        value.const_value = _stored(array, value.name)
        self.graph.register_initializer(value)
        return Tensor(self, value)

    def constant(self, array: npt.ArrayLike) -> Tensor:
        """Returns a constant; equal constants of a tape share one node."""
        array = _storable(array)
        key = (str(array.dtype), array.shape, _identity(array))
        if key not in self._constants:
            tensor = _stored(array)
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)])
            self.append(node)
            value = node.outputs[0]
            value.type = ir.TensorType(tensor.dtype)
            value.shape = ir.Shape(array.shape)
            value.const_value = tensor
            self._constants[key] = value
        return Tensor(self, self._constants[key])

    def _declare(self, name: str) -> str:
        """Returns a free name for what a caller names, who must not have used it before."""
        if self._is_new:  # rules name inputs of bodies alike
            if name in self._declared:
                raise ModelError(
                    f"graph '{self.graph.name}': it already has an input or initializer "
                    f"'{name}'; choose another name"
                )
            self._declared.add(name)
        return self.names.unique(name)

    def subgraph(self, name: str) -> Tape:
        """Returns a tape for a new graph that can read the values of this one."""
        imports = dict(self.graph.opset_imports)
        graph = ir.Graph([], [], nodes=[], opset_imports=imports, name=name)
        inner = Tape(graph, names=self.names)
        inner.scope = self.scope
        return inner

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Returns the result of a function, which is called once per key and tape."""
        if key not in self._made:
            self._made[key] = make()
        return cast(_T, self._made[key])

    def output(self, tensor: Tensor, name: str | None = None) -> Tensor:
        """Makes a tensor an output of the graph.

        Args:
            tensor: The tensor.
            name: The output's name; the tensor's own by default.
        """
        value = tensor.value
        if name is not None and value.name != name:
            fresh = (
                self.emitted(value) and value.const_value is None and not value.is_graph_output()
            )
            if not fresh:
                value = op.Identity(tensor).value
            value.name = self.names.unique(name)
        self.graph.outputs.append(value)
        return Tensor(self, value)

    def model(self, **properties: str) -> onnx.ModelProto:
        """Returns the graph as a checked model.

        Args:
            **properties: Entries for the model's ``metadata_props``.

        Raises:
            ModelError: If the graph is not a valid ONNX model.
        """
        model = ir.Model(self.graph, ir_version=IR_VERSION, producer_name="ortops")
        model.metadata_props.update(properties)
        proto = ir.to_proto(model)
        imported = {entry.domain for entry in proto.opset_import}
        if name_tensors(proto.graph.node) and GRADIENT_DOMAIN not in imported:
            proto.opset_import.add(domain=GRADIENT_DOMAIN, version=1)
        try:
            onnx.checker.check_model(without_data(proto), full_check=True)
        except onnx.checker.ValidationError as error:
            raise ModelError(f"graph '{self.graph.name}': {error}; see the ONNX schema") from error
        return proto

    def append(self, node: ir.Node) -> None:
        """Inserts a node, and names it and its outputs, with the scope as prefix."""
        node.name = self.names.unique(f"{self.scope}{node.op_type}")
        for index, value in enumerate(node.outputs):
            if value.name is None:
                suffix = f"_output_{index}" if len(node.outputs) > 1 else "_output"
                value.name = self.names.unique(f"{node.name}{suffix}")
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        self.nodes.append(node)
        self._emitted.add(node)

    def emitted(self, value: ir.Value) -> bool:
        """Whether a value is computed by a node that this tape has inserted."""
        return value.producer() in self._emitted

    def emit(
        self,
        op_type: str,
        inputs: Sequence[object],
        attributes: dict[str, Any],
        *,
        outputs: int | None = None,
        domain: str = "",
    ) -> tuple[Tensor, ...]:
        """Appends one node.

        Args:
            op_type: The operator.
            inputs: Tensors, arrays, Python scalars or lists, or None for an absent input.
            attributes: The attributes as Python values; None for an absent one.
            outputs: The number of outputs; by default, those that the schema requires.
            domain: The operator's domain.

        Raises:
            ModelError: If the operator does not exist, or the inputs are invalid.
        """
        if not domain and _is_of_ml(op_type):
            domain = _ML
        schema = _schema(op_type, self._version(domain), domain)
        values = self._operands(schema, inputs)
        while values and values[-1] is None:
            values.pop()
        given = {name: value for name, value in attributes.items() if value is not None}
        node = ir.Node(
            domain,
            op_type,
            values,
            [_attribute(schema, name, value) for name, value in given.items()],
            num_outputs=schema.min_output if outputs is None else outputs,
        )
        self.append(node)
        self.infer(node)
        return tuple(Tensor(self, value) for value in node.outputs)

    def _version(self, domain: str) -> int:
        """Returns the version of a domain; if it is not imported yet, the newest one of onnx."""
        if domain == _ML:
            return self.graph.opset_imports.setdefault(domain, _newest_ml())
        return self.graph.opset_imports.get(domain, 1)

    def _operands(
        self, schema: onnx.defs.OpSchema, inputs: Sequence[object]
    ) -> list[ir.Value | None]:
        """Converts arrays and Python numbers to constants of the type that the schema requires."""
        formal = list(schema.inputs)
        if len(inputs) > len(formal) and not (
            formal and formal[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
        ):
            raise ModelError(
                f"{schema.name}: the operator has at most {len(formal)} inputs, got {len(inputs)}"
            )
        types = [formal[min(i, len(formal) - 1)].type_str for i in range(len(inputs))]
        dtypes = [_known_dtype(given) for given in inputs]
        known: dict[str, np.dtype[Any]] = {}
        for kind, dtype in zip(types, dtypes, strict=True):
            if dtype is not None:
                known.setdefault(kind, dtype)
        first = next(filter(None, dtypes), None)
        values: list[ir.Value | None] = []
        for kind, given in zip(types, inputs, strict=True):
            if given is None:
                values.append(None)
            elif isinstance(given, Tensor):
                values.append(given.value)
            elif isinstance(given, np.ndarray | np.generic):
                values.append(self.constant(given).value)
            elif isinstance(given, Sequence) and any(isinstance(g, Tensor) for g in given):
                values.append(self._vector(given).value)
            else:
                dtype = known.get(kind)
                if dtype is None and first is not None and _allows(schema, kind, first):
                    dtype = first if ir.DataType.from_numpy(first).is_floating_point() else None
                values.append(self.constant(_array(given, dtype, schema.name)).value)
        return values

    def _vector(self, parts: Sequence[object]) -> Tensor:
        """Concatenates integers and integer scalar tensors to a vector of int64."""
        pieces = [
            op.Reshape(part, [-1]) if isinstance(part, Tensor) else np.array([part], np.int64)
            for part in parts
        ]
        return self.emit("Concat", pieces, {"axis": 0})[0]

    def infer(self, node: ir.Node) -> None:
        """Infers the types and shapes of a node's outputs.

        Args:
            node: A node of the tape's graph.

        Raises:
            ModelError: If its inputs are invalid.
        """
        op_type = node.op_type
        if op_type in ("LessOrEqual", "GreaterOrEqual"):
            op_type = "Less"  # same types and shapes; onnx < 1.20 cannot infer them
        schema = _schema(op_type, self._version(node.domain), node.domain)
        if not schema.has_type_and_shape_inference_function:
            _infer_types(node, schema)
            return
        if any(value is not None and value.name and value.type is None for value in node.inputs):
            _infer_types(node, schema)
            return
        first = node.inputs[0].shape if op_type == "Slice" and node.inputs[0] else None
        if first is not None and any(isinstance(dim, int) and dim < 1 for dim in first):
            _infer_types(node, schema)  # onnx aborts the process where steps are negative
            return
        key = _inference_key(node, self.graph.opset_imports)
        found = None if key is None else _inferred.get(key)
        if found is None:
            found = self._infer_anew(node, schema)
            if key is not None:
                if len(_inferred) >= _MOST_INFERRED:
                    _inferred.clear()
                _inferred[key] = found
        for value, (kind, dims) in zip(node.outputs, found, strict=True):
            if value.type is None:
                value.type = kind
            if value.shape is None and dims is not None:
                value.shape = ir.Shape(dims)

    def _infer_anew(self, node: ir.Node, schema: onnx.defs.OpSchema) -> _Inferred:
        """Returns the type and dimensions of each output of a node whose inputs have types."""
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, onnx.TensorProto] = {}
        for value in node.inputs:
            if value is None or not value.name:
                continue
            types[value.name] = _type_proto(value)
            tensor = constant_tensor(value)
            if tensor is not None and tensor.size <= _SMALL:
                data[value.name] = ir.serde.serialize_tensor(tensor)
        proto = ir.serde.serialize_node(node)
        proto.op_type = schema.name
        try:
            inferred = onnx.shape_inference.infer_node_outputs(
                schema,
                proto,
                types,
                data,
                opset_imports=[
                    onnx.helper.make_opsetid(d, v) for d, v in self.graph.opset_imports.items()
                ],
                ir_version=IR_VERSION,
            )
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            reason = str(error).strip().rsplit("] ", 1)[-1]
            shapes = ", ".join(str(Tensor(self, v)) if v else "absent" for v in node.inputs)
            raise ModelError(
                f"{node.op_type} node '{node.name}': {reason}; got {shapes}"
            ) from error
        # Absent outputs share a name.
        typed = [inferred.get(value.name) if value.name else None for value in node.outputs]
        sizes = pooled_sizes(node)
        return tuple(_type_and_dims(each, sizes) for each in typed)


def _type_and_dims(
    typed: onnx.TypeProto | None, sizes: Sequence[int | None] | None
) -> tuple[ir.TypeProtocol | None, tuple[Dim, ...] | None]:
    """Returns an inferred type and its dimensions, with the known spatial sizes of a pooling."""
    if typed is None or is_map(typed):
        return None, None
    kind = ir.serde.deserialize_type_proto_for_type(typed)
    shape = ir.serde.deserialize_type_proto_for_shape(typed)
    dims = None if shape is None else _dims(shape)
    if isinstance(kind, ir.SequenceType) and dims is not None:
        # A symbol would mean that all elements of the sequence have equal sizes.
        dims = tuple(dim if isinstance(dim, int) else None for dim in dims)
    if sizes is not None and dims:
        dims = (*dims[:2], *(a or b for a, b in zip(sizes, dims[2:], strict=True)))
    return kind, dims


def _operator(
    function: Callable[[Any, Any], Tensor],
) -> tuple[Callable[[Tensor, object], Tensor], Callable[[Tensor, object], Tensor]]:
    """Returns the methods of a binary operator: for a Tensor on the left, and on the right."""

    def forward(self: Tensor, other: object) -> Tensor:
        return function(self, other) if _is_operand(other) else cast(Tensor, NotImplemented)

    def reflected(self: Tensor, other: object) -> Tensor:
        return function(other, self) if _is_operand(other) else cast(Tensor, NotImplemented)

    return forward, reflected


class Tensor:
    """A value of an ONNX graph under construction.

    Arithmetic emits nodes on its tape, with numpy's semantics and the operators of the Python array
    API. Comparisons are elementwise; use ``is`` for identity. Python numbers are converted to the
    Tensor's dtype, which must be able to represent them. Tensors and arrays of different dtypes
    cannot be mixed: cast with `astype`.

    Args:
        tape: The tape for new nodes.
        value: The value in the graph.

    Example:
        >>> with Tape() as tape:
        ...     x = tape.input("x", np.float32, ["batch", 3])
        ...     positive = (x > 0) & (x != 1)
        ...     y = x.sum(axis=1) / positive.sum(axis=1).astype(np.float32)
        >>> y
        Tensor('Div_output', float32, [batch])
    """

    __slots__ = ("tape", "value")
    __array_ufunc__ = None  # makes numpy_array * tensor call Tensor.__rmul__

    def __init__(self, tape: Tape, value: ir.Value) -> None:
        self.tape = tape
        self.value = value

    @property
    def name(self) -> str:
        """The value's name in the graph."""
        return self.value.name or ""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type.

        Raises:
            ModelError: If it is unknown.
        """
        dtype = numpy_dtype(self.value)
        if dtype is None:
            raise ModelError(f"value '{self.name}': its type is unknown; add a value_info for it")
        return dtype

    @property
    def shape(self) -> tuple[Dim, ...] | None:
        """The dimensions: sizes, symbols or None; None in place of a tuple for an unknown rank."""
        return None if self.value.shape is None else _dims(self.value.shape)

    @property
    def ndim(self) -> int:
        """The rank.

        Raises:
            ModelError: If it is unknown.
        """
        if self.value.shape is None:
            also = " (an input: declare its shape)" if self.value.is_graph_input() else ""
            raise ModelError(
                f"value '{self.name}': its rank is unknown; add a value_info for it{also}"
            )
        return len(self.value.shape)

    @property
    def size(self) -> int:
        """The number of elements.

        Raises:
            ModelError: If the shape is not static.
        """
        shape = self.shape
        if shape is None or not all(isinstance(dim, int) for dim in shape):
            raise ModelError(
                f"{self!r}: its size is unknown while the graph is built; use op.Size(x)"
            )
        return math.prod(cast(tuple[int, ...], shape))

    @property
    def T(self) -> Tensor:  # noqa: N802 - its name in the array API
        """The transpose of a matrix.

        Raises:
            ModelError: If the rank is not 2, or unknown.
        """
        if self.ndim != 2:
            raise ModelError(
                f"{self!r}: .T requires rank 2, got rank {self.ndim}; use .mT or op.Transpose"
            )
        return op.Transpose(self, perm=[1, 0])

    @property
    def mT(self) -> Tensor:  # noqa: N802 - its name in the array API
        """The transpose of the last two axes.

        Raises:
            ModelError: If the rank is less than 2, or unknown.
        """
        if self.ndim < 2:
            raise ModelError(f"{self!r}: .mT requires rank >= 2, got rank {self.ndim}")
        axes = list(range(self.ndim))
        return op.Transpose(self, perm=[*axes[:-2], axes[-1], axes[-2]])

    @property
    def constant(self) -> Array | None:
        """The value of a constant as an array, or None if it is known at run time only."""
        tensor = constant_tensor(self.value)
        return None if tensor is None else tensor.numpy()

    def astype(self, dtype: npt.DTypeLike) -> Tensor:
        """Casts the tensor to a dtype."""
        wanted = ir.DataType.from_numpy(np.dtype(dtype))
        return self if self.value.dtype == wanted else op.Cast(self, to=wanted)

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Sums over axes, all by default.

        Args:
            axis: An axis or several, negative ones from the end.
            keepdims: Whether to keep them, with size 1.

        Returns:
            The sums, of the Tensor's dtype; int64 for booleans and integers, uint64 for unsigned
            integers.
        """
        return _total("ReduceSum", self, axis, keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Multiplies over axes; see `sum`."""
        return _total("ReduceProd", self, axis, keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Averages over axes; see `sum`.

        Raises:
            ModelError: If the dtype is not floating-point.
        """
        dtype = numpy_dtype(self.value)
        if dtype is not None and dtype.kind in "biu":
            raise ModelError(
                f"{self!r}: mean requires a floating-point dtype; cast with .astype(np.float32)"
            )
        return _reduce("ReduceMean", self, axis, keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Returns the maximum over axes; for booleans, whether any is true. See `sum`."""
        return _extreme("ReduceMax", self, axis, keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        """Returns the minimum over axes; for booleans, whether all are true. See `sum`."""
        return _extreme("ReduceMin", self, axis, keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Returns the index (int64) of the first maximum along an axis, or of all elements."""
        return _position("ArgMax", self, axis, keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """Returns the index (int64) of the first minimum along an axis, or of all elements."""
        return _position("ArgMin", self, axis, keepdims)

    def clip(self, min: object = None, max: object = None) -> Tensor:  # noqa: A002 - as in numpy
        """Limits the elements to a range.

        Args:
            min: The minimum: a number, array or Tensor; None for no limit.
            max: The maximum: a number, array or Tensor; None for no limit.
        """
        if all(x is None or _is_scalar(x) for x in (min, max)):
            return self if min is max is None else op.Clip(self, min, max)
        result = self if min is None else op.Max(self, min)
        return result if max is None else op.Min(result, max)

    def reshape(self, *shape: object) -> Tensor:
        """Returns the elements in a different shape.

        Args:
            *shape: The sizes: integers or scalar Tensors of int64, of which one may be -1 to be
                inferred; or a sequence of them, or a vector of int64. Unlike in ``op.Reshape``, 0
                is a size.

        Raises:
            ModelError: If the shape contains -1 and 0, so that -1 cannot be inferred.
        """
        whole = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if isinstance(whole, Tensor) and numpy_dtype(whole.value) != np.int64:
            raise ModelError(
                f"{self!r}: the shape must be int64, got {whole!r}; cast it with .astype(np.int64)"
            )
        if isinstance(whole, Tensor) and whole.shape == ():
            whole = (whole,)
        if isinstance(whole, Tensor):
            return op.Reshape(self, whole, allowzero=1)
        if isinstance(whole, SupportsIndex):
            whole = (whole,)
        sizes = [
            size if isinstance(size, Tensor) else operator.index(cast(SupportsIndex, size))
            for size in cast(Sequence[object], whole)
        ]
        known = [size for size in sizes if isinstance(size, int)]
        if 0 in known and -1 in known:
            raise ModelError(f"{self!r}: cannot infer -1 in the shape {sizes}, which contains 0")
        zeros = 0 in known or len(known) < len(sizes)
        return op.Reshape(self, sizes, allowzero=1 if zeros else None)

    def flatten(self) -> Tensor:
        """Returns the elements as a 1-d tensor."""
        return op.Reshape(self, [-1])

    def squeeze(self, axis: Axes = None) -> Tensor:
        """Removes axes of size 1, all of them by default.

        Raises:
            ModelError: If no axis is given and the shape is not static.
        """
        if axis is None and (
            self.shape is None or not all(isinstance(dim, int) for dim in self.shape)
        ):
            raise ModelError(f"{self!r}: its shape is not static; name the axes to remove in axis=")
        return op.Squeeze(self, _axes(axis))

    def with_shape(self, shape: Sequence[Dim]) -> Tensor:
        """Records a shape that inference cannot find, and returns the tensor.

        Args:
            shape: The dimensions: sizes, symbols, or None. They are not verified.

        Example:
            >>> with Tape() as tape:
            ...     x = tape.input("x", np.float32, ["batch", 6])
            ...     y = op.Reshape(x, op.Concat(op.Shape(x, end=1), [2, 3], axis=0))
            >>> y.shape
            (None, None, None)
            >>> y.with_shape(["batch", 2, 3]).shape
            ('batch', 2, 3)
        """
        self.value.shape = ir.Shape(shape)
        return self

    def with_shape_of(self, like: Tensor) -> Tensor:
        """Records that this tensor has the shape of another, and returns it."""
        if like.value.shape is not None:
            self.value.shape = ir.Shape(list(like.value.shape))
        return self

    def __array_namespace__(self, api_version: str | None = None) -> type[ArrayNamespace]:
        """Returns the array API functions, as the array API standard requires."""
        return ArrayNamespace

    def __repr__(self) -> str:
        dims = "?" if self.shape is None else ", ".join(str(dim) for dim in self.shape)
        return f"Tensor({self.name!r}, {numpy_dtype(self.value)}, [{dims}])"

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has no truth value while the graph is built; use op.Where, & | ~ instead "
            "of and, or, not, and `is` for identity"
        )

    def __float__(self) -> float:
        raise TypeError(f"{self!r} {_NO_VALUE}; use .astype(np.float32)")

    def __int__(self) -> int:
        raise TypeError(f"{self!r} {_NO_VALUE}; use .astype(np.int64)")

    def __index__(self) -> int:
        raise TypeError(f"{self!r} {_NO_VALUE}; use it in op.<Operator>, or to index a Tensor")

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise TypeError(f"{self!r} {_NO_VALUE}; use its methods, or op.<Operator>")

    def __len__(self) -> int:
        raise TypeError(f"{self!r} has no len(); use .shape[0], or op.Shape(x)[0] where it varies")

    def __iter__(self) -> Any:
        raise TypeError(f"{self!r} is not iterable; index it, or use op.Split")

    def __contains__(self, item: object) -> bool:
        raise TypeError(f"`in {self!r}` {_NO_VALUE}; use (x == item).max()")

    def __getitem__(self, key: object) -> Tensor:
        return _index(self, key if isinstance(key, tuple) else (key,))

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError(f"{self!r} cannot be changed; use op.Where or op.ScatterND")

    if not TYPE_CHECKING:  # otherwise mypy would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            instead = _INSTEAD.get(name, "op.<Operator>")
            raise AttributeError(f"Tensor has no attribute '{name}'; use {instead}")

    __hash__ = object.__hash__  # == is elementwise

    def __pos__(self) -> Tensor:
        return self

    def __neg__(self) -> Tensor:
        return op.Neg(self)

    def __abs__(self) -> Tensor:
        return op.Abs(self)

    def __invert__(self) -> Tensor:
        return op.Not(self) if _is_boolean("~", self) else op.BitwiseNot(self)

    # Lambdas, because the functions are defined further down.
    __add__, __radd__ = _operator(lambda a, b: op.Add(a, b))
    __sub__, __rsub__ = _operator(lambda a, b: op.Sub(a, b))
    __mul__, __rmul__ = _operator(lambda a, b: op.Mul(a, b))
    __truediv__, __rtruediv__ = _operator(lambda a, b: _divide(a, b))
    __floordiv__, __rfloordiv__ = _operator(lambda a, b: _floor_divide(a, b))
    __mod__, __rmod__ = _operator(lambda a, b: _remainder(a, b))
    __pow__, __rpow__ = _operator(lambda a, b: _power(a, b))
    __matmul__, __rmatmul__ = _operator(lambda a, b: _product(a, b))
    __and__, __rand__ = _operator(lambda a, b: _bitwise("&", "And", a, b))
    __or__, __ror__ = _operator(lambda a, b: _bitwise("|", "Or", a, b))
    __xor__, __rxor__ = _operator(lambda a, b: _bitwise("^", "Xor", a, b))
    __lshift__, __rlshift__ = _operator(lambda a, b: _shift("<<", "LEFT", a, b))
    __rshift__, __rrshift__ = _operator(lambda a, b: _shift(">>", "RIGHT", a, b))
    __lt__ = _operator(lambda a, b: op.Less(a, b))[0]
    __le__ = _operator(lambda a, b: op.LessOrEqual(a, b))[0]
    __gt__ = _operator(lambda a, b: op.Greater(a, b))[0]
    __ge__ = _operator(lambda a, b: op.GreaterOrEqual(a, b))[0]

    def __divmod__(self, other: object) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return op.Equal(self, _comparable(self, other))

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return op.Not(op.Equal(self, _comparable(self, other)))


class _Emit(Protocol):
    """Emits a node that has one output by default."""

    @overload
    def __call__(
        self,
        *inputs: object,
        outputs: Literal[1] | None = ...,
        domain: str = ...,
        **attributes: Any,
    ) -> Tensor: ...
    @overload
    def __call__(
        self, *inputs: object, outputs: int, domain: str = ..., **attributes: Any
    ) -> tuple[Tensor, ...]: ...


class _Several(Protocol):
    """Emits a node with several outputs."""

    def __call__(
        self, *inputs: object, outputs: int | None = ..., domain: str = ..., **attributes: Any
    ) -> tuple[Tensor, ...]: ...


class _Operators:
    """``op.<Operator>(*inputs, **attributes)`` emits one ONNX node.

    Inputs are Tensors, numpy arrays, Python scalars and lists (converted to constants of the type
    that the operator requires), or None for an absent input. Attributes are keyword arguments;
    ``outputs`` sets the number of outputs, and ``domain`` the operator set. The result is a Tensor,
    or a tuple of Tensors for several outputs.

    Example:
        >>> with Tape() as tape:
        ...     x = tape.input("x", np.float32, ["N", 4])
        ...     values, indices = op.TopK(x, [2])
        >>> values.shape, indices.dtype
        (('N', 2), dtype('int64'))
    """

    DynamicQuantizeLinear: _Several
    Split: _Several
    TopK: _Several

    def __getattr__(self, op_type: str) -> _Emit:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def emit(
            *inputs: object, outputs: int | None = None, domain: str = "", **attributes: Any
        ) -> Tensor | tuple[Tensor, ...]:
            if outputs is None and op_type == "Split":
                outputs = _split_count(inputs, attributes)
            made = _tape_of(op_type, inputs).emit(
                op_type, inputs, attributes, outputs=outputs, domain=domain
            )
            return made[0] if len(made) == 1 and op_type != "Split" else made

        emit.__name__ = op_type
        self.__dict__[op_type] = emit
        return cast(_Emit, emit)


op: _Operators = _Operators()


class ArrayNamespace:
    """The subset of the Python array API that update rules and losses need, for Tensors."""

    pi = math.pi
    inf = math.inf
    nan = math.nan
    bool = np.dtype(np.bool_)
    float16 = np.dtype(np.float16)
    float32 = np.dtype(np.float32)
    float64 = np.dtype(np.float64)
    int32 = np.dtype(np.int32)
    int64 = np.dtype(np.int64)

    @staticmethod
    def where(condition: Tensor, a: object, b: object) -> Tensor:
        """Selects elements of ``a`` where the condition is true, else of ``b``."""
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a = np.asarray(a)  # two Python floats result in float64, as in numpy
        return op.Where(condition, a, b)

    @staticmethod
    def concat(arrays: Sequence[Tensor], /, *, axis: int | None = 0) -> Tensor:
        """Concatenates tensors along an axis; flattens them first if it is None."""
        if axis is None:
            arrays, axis = [x.flatten() for x in arrays], 0
        return op.Concat(*arrays, axis=axis)

    @staticmethod
    def stack(arrays: Sequence[Tensor], /, *, axis: int = 0) -> Tensor:
        """Stacks tensors along a new axis."""
        return op.Concat(*(op.Unsqueeze(x, [axis]) for x in arrays), axis=axis)

    @staticmethod
    def expand_dims(x: Tensor, /, *, axis: int = 0) -> Tensor:
        """Adds an axis of size 1."""
        return op.Unsqueeze(x, [axis])

    @staticmethod
    def permute_dims(x: Tensor, /, axes: Sequence[int]) -> Tensor:
        """Permutes the axes."""
        return op.Transpose(x, perm=axes)

    @staticmethod
    def reshape(x: Tensor, /, shape: Sequence[int] | Tensor) -> Tensor:
        """Returns the elements in a different shape; see `Tensor.reshape`."""
        return x.reshape(shape)

    @staticmethod
    def take(x: object, indices: Tensor, /, *, axis: int) -> Tensor:
        """Returns the elements of a Tensor or an array at the given indices along an axis."""
        return op.Gather(x, indices, axis=axis)

    @staticmethod
    def square(x: Tensor, /) -> Tensor:
        """Returns the squares."""
        return op.Mul(x, x)

    @staticmethod
    def zeros_like(x: Tensor) -> Tensor:
        """Returns zeros."""
        return zeros_like(x)

    @staticmethod
    def ones_like(x: Tensor) -> Tensor:
        """Returns ones."""
        return ones_like(x)

    astype = staticmethod(Tensor.astype)
    sum = staticmethod(Tensor.sum)
    prod = staticmethod(Tensor.prod)
    mean = staticmethod(Tensor.mean)
    max = staticmethod(Tensor.max)
    min = staticmethod(Tensor.min)
    argmax = staticmethod(Tensor.argmax)
    argmin = staticmethod(Tensor.argmin)
    clip = staticmethod(Tensor.clip)
    squeeze = staticmethod(Tensor.squeeze)

    abs = staticmethod(op.Abs)
    ceil = staticmethod(op.Ceil)
    cos = staticmethod(op.Cos)
    exp = staticmethod(op.Exp)
    floor = staticmethod(op.Floor)
    isnan = staticmethod(op.IsNaN)
    isinf = staticmethod(op.IsInf)
    log = staticmethod(op.Log)
    logical_and = staticmethod(op.And)
    logical_not = staticmethod(op.Not)
    logical_or = staticmethod(op.Or)
    matmul = staticmethod(lambda a, b: _product(a, b))
    maximum = staticmethod(op.Max)
    minimum = staticmethod(op.Min)
    round = staticmethod(op.Round)
    sign = staticmethod(op.Sign)
    sin = staticmethod(op.Sin)
    sqrt = staticmethod(op.Sqrt)
    tanh = staticmethod(op.Tanh)

    add = staticmethod(operator.add)
    divide = staticmethod(operator.truediv)
    equal = staticmethod(operator.eq)
    floor_divide = staticmethod(operator.floordiv)
    greater = staticmethod(operator.gt)
    greater_equal = staticmethod(operator.ge)
    less = staticmethod(operator.lt)
    less_equal = staticmethod(operator.le)
    multiply = staticmethod(operator.mul)
    not_equal = staticmethod(operator.ne)
    pow = staticmethod(operator.pow)
    remainder = staticmethod(operator.mod)
    subtract = staticmethod(operator.sub)


def shape_of(x: Tensor) -> Tensor:
    """Returns the shape as a vector of int64: a constant if it is static, else a Shape node."""
    shape = x.shape
    if shape is not None and all(isinstance(dim, int) for dim in shape):
        return x.tape.constant(np.array(shape, np.int64))
    return op.Shape(x)


def zeros_like(x: Tensor) -> Tensor:
    """Returns zeros of the shape and dtype of ``x``."""
    return _filled_like(x, 0)


def ones_like(x: Tensor) -> Tensor:
    """Returns ones of the shape and dtype of ``x``."""
    return _filled_like(x, 1)


def _filled_like(x: Tensor, number: int) -> Tensor:
    if numpy_dtype(x.value) is None:  # the output of an operator that onnx does not know
        filled = op.ConstantOfShape(shape_of(x), value=np.array([number], np.float32))
        return op.CastLike(filled, x).with_shape_of(x)
    if x.shape == ():
        return x.tape.constant(np.array(number, x.dtype))
    value = np.array([number], x.dtype)
    return op.ConstantOfShape(shape_of(x), value=value).with_shape_of(x)


def _tape_of(op_type: str, inputs: Sequence[object]) -> Tape:
    for given in inputs:
        if isinstance(given, Tensor):
            return given.tape
        if isinstance(given, list | tuple):
            for part in given:
                if isinstance(part, Tensor):
                    return part.tape
    tape = _current.get()
    if tape is None:
        raise OrtopsError(
            f"op.{op_type} has no input that is a Tensor; call it in a `with Tape():` block"
        )
    return tape


_ML = "ai.onnx.ml"


@functools.cache
def _newest_ml() -> int:
    return max(each.since_version for each in onnx.defs.get_all_schemas() if each.domain == _ML)


@functools.cache
def _is_of_ml(op_type: str) -> bool:
    return not onnx.defs.has(op_type) and bool(onnx.defs.has(op_type, _ML))


def _schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema:
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError as error:
        place = f"domain '{domain}'" if domain else "the standard"
        raise ModelError(f"{op_type}: no such operator in {place} at opset {opset}") from error


_FIXED_TYPES = {"tensor(float)": ir.DataType.FLOAT, "tensor(int64)": ir.DataType.INT64}
"""Output types that schemas specify directly, without a type constraint."""


def _infer_types(node: ir.Node, schema: onnx.defs.OpSchema) -> None:
    """Sets the output types that follow from the schema alone."""
    known = {
        formal.type_str: value.type
        for formal, value in zip(schema.inputs, node.inputs, strict=False)
        if value is not None and value.type is not None
    }
    for formal, value in zip(schema.outputs, node.outputs, strict=False):
        if formal.type_str in _FIXED_TYPES:
            value.type = ir.TensorType(_FIXED_TYPES[formal.type_str])
        elif value.type is None:
            value.type = known.get(formal.type_str)


def _allows(schema: onnx.defs.OpSchema, type_str: str, dtype: np.dtype[Any]) -> bool:
    """Whether a formal type allows an element type."""
    name = onnx.helper.tensor_dtype_to_string(ir.DataType.from_numpy(dtype).value)
    wanted = f"tensor({name.removeprefix('TensorProto.').lower()})"
    for constraint in schema.type_constraints:
        if constraint.type_param_str == type_str:
            return wanted in constraint.allowed_type_strs
    return wanted == type_str


def _known_dtype(given: object) -> np.dtype[Any] | None:
    """Returns the element type of a Tensor or array, and None for Python numbers."""
    if isinstance(given, Tensor):
        return numpy_dtype(given.value)
    return given.dtype if isinstance(given, np.ndarray | np.generic) else None


def _array(given: object, dtype: np.dtype[Any] | None, where: str) -> Array:
    """Converts Python numbers to a dtype, which must be able to represent them up to rounding."""
    array = np.asarray(given)
    if array.size == 0 and dtype is None:
        return array.astype(np.int64)
    if dtype is None and array.dtype == np.float64:
        return array.astype(np.float32)  # ONNX's default for numbers without a type
    if dtype is None:
        return array
    if not is_numeric(array.dtype):
        return array.astype(dtype)
    converted, lost = cast_numbers(array, dtype)
    if lost is not None:
        raise ModelError(
            f"{where}: {dtype}, the dtype of the other operand, cannot represent {given!r}; cast "
            "the tensor with .astype, or pass a number of its dtype"
        )
    return converted


def _storable(given: npt.ArrayLike) -> np.ndarray[Any, Any]:
    """Returns an array that a tensor can hold; text as bytes, as in ONNX."""
    array = np.asarray(given)
    if array.dtype.kind not in "OSTU":
        return array
    texts = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
    if not all(isinstance(each, bytes) for each in texts):
        raise ModelError(f"a constant must be an array of numbers or of strings, got {given!r}")
    encoded = np.empty(len(texts), object)
    encoded[:] = texts
    return encoded.reshape(array.shape)


def _identity(array: np.ndarray[Any, Any]) -> bytes:
    """Returns the bytes of a small array, and a digest of those of a large one."""
    if array.dtype == object:  # text
        return repr(array.tolist()).encode()
    if array.nbytes <= _DIGEST_SIZE:
        return array.tobytes()
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.blake2b(flat.data, digest_size=_DIGEST_SIZE).digest()


_DIGEST_SIZE = 64  # bytes


def _stored(array: np.ndarray[Any, Any], name: str | None = None) -> ir.TensorProtocol:
    """Converts an array to a tensor of onnx-ir."""
    if array.dtype == object:
        return ir.StringTensor(array, shape=ir.Shape(array.shape), name=name)
    if array.dtype.kind in "biuf" and array.dtype.isbuiltin:
        return ir.Tensor(array, name=name)
    return ir.tensor(array, name=name)  # supports all dtypes, but is slower


def _attribute(schema: onnx.defs.OpSchema, name: str, value: Any) -> ir.Attr:
    """Converts a Python value to the attribute type of the schema."""
    if name not in schema.attributes:
        known = ", ".join(sorted(schema.attributes)) or "none"
        raise ModelError(f"{schema.name}: unknown attribute '{name}'; the operator has {known}")
    kind = ir.AttributeType(cast(int, schema.attributes[name].type))
    match kind:
        case ir.AttributeType.FLOAT:
            value = float(value)
        case ir.AttributeType.INT:
            value = int(value)
        case ir.AttributeType.INTS:
            value = tuple(int(item) for item in value)
        case ir.AttributeType.FLOATS:
            value = tuple(float(item) for item in value)
        case ir.AttributeType.TENSOR:
            value = _stored(np.asarray(value))
        case _:
            pass
    return ir.Attr(name, kind, value)


def _typed_value(name: str, dtype: npt.DTypeLike, shape: Sequence[Dim] | None) -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    return ir.Value(name=name, type=kind, shape=None if shape is None else ir.Shape(shape))


def _dims(shape: ir.Shape) -> tuple[Dim, ...]:
    return tuple(dim if isinstance(dim, int) else dim.value for dim in shape)


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    assert value.type is not None
    ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _inference_key(node: ir.Node, imports: Mapping[str, int]) -> tuple[object, ...] | None:
    """Returns a key for the inference cache; None if the node has large constants or subgraphs.

    Keys are small, so that the cache is: they have digests in place of constants.
    """
    key: list[object] = [node.domain, node.op_type, *imports.items()]
    key += [bool(value.name) for value in node.outputs]
    for name, attribute in node.attributes.items():
        if attribute.type not in _HASHABLE:
            return None
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            value = _content(cast(ir.TensorProtocol, value))
            if value is None:
                return None
        if isinstance(value, Sequence) and len(value) > _DIGEST_SIZE:
            return None
        key += [name, tuple(value) if isinstance(value, Sequence) else value]
    for read in node.inputs:
        if read is None or not read.name:
            key.append(None)
            continue
        tensor = constant_tensor(read)
        key += [read.type, None if read.shape is None else _dims(read.shape)]
        key.append(None if tensor is None else _content(tensor))
    return tuple(key)


def _content(tensor: ir.TensorProtocol) -> tuple[object, ...] | None:
    """Returns a hashable key for the content of a small tensor, and None for a big one."""
    if tensor.size > _SMALL:
        return None
    return tensor.dtype, *tensor.shape, _identity(tensor.numpy())


def _axes(axis: Axes) -> list[int] | None:
    if axis is None:
        return None
    return [operator.index(axis)] if isinstance(axis, SupportsIndex) else list(axis)


def _reduce(op_type: str, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    axes = _axes(axis)
    empty = 1 if axes == [] else None  # no axes; by default, ONNX would reduce all
    reduce = getattr(op, op_type)
    return cast(Tensor, reduce(x, axes, keepdims=int(keepdims), noop_with_empty_axes=empty))


def _total(op_type: str, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    dtype = numpy_dtype(x.value)
    if dtype is None or dtype.kind not in "biu":
        return _reduce(op_type, x, axis, keepdims)
    total = _reduce(op_type, x.astype(np.int64), axis, keepdims)
    return total.astype(np.uint64) if dtype.kind == "u" else total


def _extreme(op_type: str, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
    dtype = numpy_dtype(x.value)
    if dtype == np.bool_:
        return _reduce(op_type, x.astype(np.int32), axis, keepdims).astype(np.bool_)
    return _reduce(op_type, x, axis, keepdims)


def _position(op_type: str, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    if numpy_dtype(x.value) == np.bool_:
        x = x.astype(np.int32)
    find = getattr(op, op_type)
    if axis is not None:
        return cast(Tensor, find(x, axis=axis, keepdims=int(keepdims)))
    found = cast(Tensor, find(x.flatten(), axis=0, keepdims=0))
    return op.Reshape(found, [1] * x.ndim) if keepdims else found


def _is_operand(given: object) -> bool:
    return isinstance(given, Tensor | np.ndarray | np.generic | int | float | list | tuple)


def _is_scalar(given: object) -> bool:
    return given.shape == () if isinstance(given, Tensor) else np.ndim(cast(Any, given)) == 0


def _comparable(x: Tensor, other: object) -> object:
    if not _is_operand(other):
        raise TypeError(
            f"cannot compare {x!r} with {other!r}; == and != are elementwise, for numbers, arrays "
            "and Tensors; use `is` for identity"
        )
    return other


def _alike(where: str, a: object, b: object) -> tuple[Tensor, Tensor]:
    """Converts both operands to Tensors; Python numbers get the dtype of the other operand."""
    tape = next(x.tape for x in (a, b) if isinstance(x, Tensor))
    own = [_known_dtype(x) for x in (a, b)]
    dtype = own[0] or own[1]

    def tensor(x: object, known: np.dtype[Any] | None) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return tape.constant(cast(Array, x) if known is not None else _array(x, dtype, where))

    first, second = tensor(a, own[0]), tensor(b, own[1])
    # `is`, because numpy's float64 equals None.
    if own[0] is not None and own[1] is not None and own[0] != own[1]:
        raise ModelError(
            f"{where}: {first!r} and {second!r} have different types; cast one with .astype"
        )
    return first, second


def _kind(x: Tensor) -> str:
    """Returns numpy's code for the kind of a dtype; "f" if the dtype is unknown."""
    dtype = numpy_dtype(x.value)
    return "f" if dtype is None else dtype.kind


def _divide(a: object, b: object) -> Tensor:
    kinds = {_kind(x) for x in (a, b) if isinstance(x, Tensor)}
    if kinds & set("biu"):
        raise ModelError(
            f"/: cannot divide {a!r} by {b!r}, because an integer dtype cannot represent the "
            "quotient; use //, op.Div, which rounds towards zero, or .astype(np.float32)"
        )
    return op.Div(a, b)


def _floor_divide(a: object, b: object) -> Tensor:
    x, y = _alike("//", a, b)
    if _kind(x) == "u":
        return op.Div(x, y)
    if _kind(x) == "i":  # Div rounds towards zero
        quotient = op.Div(x, y)
        below = (quotient * y != x) & ((x < 0) != (y < 0))
        return quotient - below.astype(x.dtype)
    rest = op.Mod(x, y, fmod=1)
    exact = (x - rest) / y - _has_other_sign(rest, y).astype(x.dtype)
    whole = op.Floor(exact)  # as in numpy: the quotient is an integer up to rounding
    whole = whole + (exact - whole > 0.5).astype(x.dtype)
    return op.Where(y == 0, op.Floor(x / y), whole)


def _remainder(a: object, b: object) -> Tensor:
    x, y = _alike("%", a, b)
    if _kind(x) in "iu":
        return op.Mod(x, y)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y), rest + y, rest)


def _has_other_sign(rest: Tensor, divisor: Tensor) -> Tensor:
    """Whether a remainder is nonzero and differs in sign from the divisor."""
    return (rest != 0) & ((rest < 0) != (divisor < 0))


def _power(a: object, b: object) -> Tensor:
    if isinstance(a, Tensor) and _kind(a) not in "biu":
        return op.Pow(a, b)  # the exponent may have another type
    base, exponent = _alike("**", a, b)
    if _kind(base) == "i" and exponent.constant is not None and (exponent.constant < 0).any():
        raise ModelError(
            f"**: the exponent of integers must be >= 0, got {base!r} ** {b!r}; cast the base with "
            ".astype(np.float32)"
        )
    return op.Pow(base, exponent)


def _is_boolean(symbol: str, x: Tensor) -> bool:
    """Whether a Tensor is boolean rather than integer.

    Raises:
        ModelError: If it is neither.
    """
    if x.dtype.kind not in "biu":
        raise ModelError(f"{symbol} requires booleans or integers, got {x!r}; compare or cast it")
    return x.dtype.kind == "b"


def _product(a: object, b: object) -> Tensor:
    """Emits a product; one of a computed matrix and a vector in the form of `graph.faults`."""
    is_computed = isinstance(a, Tensor) and a.constant is None and a.value.producer() is not None
    if isinstance(a, Tensor) and is_computed and _known_rank(a) > 1 and _known_rank(b) == 1:
        return op.MatMul(b, a.mT)
    return op.MatMul(a, b)


def _known_rank(x: Any) -> int:
    return np.ndim(x) if not isinstance(x, Tensor) else 0 if x.shape is None else x.ndim


def _bitwise(symbol: str, op_type: str, a: object, b: object) -> Tensor:
    x, y = _alike(symbol, a, b)
    combine = getattr(op, op_type if _is_boolean(symbol, x) else f"Bitwise{op_type}")
    return cast(Tensor, combine(x, y))


def _shift(symbol: str, direction: str, a: object, b: object) -> Tensor:
    x, count = _alike(symbol, a, b)
    if _kind(x) != "u":
        raise ModelError(
            f"{symbol} requires unsigned integers, got {x!r}; cast it with .astype(np.uint64), or "
            "use * and // with a power of two"
        )
    width = 8 * x.dtype.itemsize
    shifted = op.BitShift(x, count, direction=direction)
    if count.constant is not None and (count.constant < width).all():
        return shifted
    masks = np.array([0, np.iinfo(x.dtype).max], x.dtype)  # C leaves larger shifts undefined
    return op.BitwiseAnd(shifted, op.Gather(masks, (count < width).astype(np.int64)))


def _split_count(inputs: Sequence[object], attributes: dict[str, Any]) -> int:
    if "num_outputs" in attributes:
        return int(attributes["num_outputs"])
    sizes = inputs[1]
    if isinstance(sizes, Tensor):
        return cast(int, (sizes.shape or (None,))[0])
    return len(cast(Sequence[int], sizes))


def _index(x: Tensor, key: tuple[object, ...]) -> Tensor:
    """Indexes with integers, slices, None, ``...``, and at most one Tensor or array."""
    used = sum(part is not None and part is not Ellipsis for part in key)
    slices: list[tuple[object, object, int, int]] = []  # start, end, axis and step
    dropped: list[int] = []
    added: list[int] = []
    chosen: list[tuple[int, Tensor]] = []
    vectors = 0
    axis = position = 0
    for number, part in enumerate(key, 1):
        if part is None:
            added.append(position)
            position += 1
            continue
        if isinstance(part, EllipsisType):
            if number < len(key):
                skipped = x.ndim - used
                axis, position = axis + skipped, position + skipped
            continue
        if isinstance(part, slice):
            if not (part.start is None and part.stop is None and part.step in (None, 1)):
                slices.append(_bounds(part, axis))
            position += 1
        elif isinstance(part, int | np.integer) and not isinstance(part, bool):
            _check_range(x, np.asarray(part), axis)
            slices.append((int(part), int(part) + 1 if part != -1 else _END, axis, 1))
            dropped.append(axis)
        else:
            indices = _indices(x, part)
            if indices.constant is not None:
                _check_range(x, indices.constant, axis)
            if indices.ndim == 0:
                dropped.append(axis)
                indices = op.Reshape(indices, [1])
            else:
                vectors += 1
                position += indices.ndim
            chosen.append((axis, indices))
        axis += 1
    if vectors > 1 or (vectors and dropped):
        raise TypeError(
            f"{x!r}: index {key!r}: an array cannot be combined with other arrays or integers; use "
            "op.GatherND"
        )
    if slices:
        x = op.Slice(x, *map(list, zip(*slices, strict=True)))
    for place, indices in chosen:
        x = op.Gather(x, indices, axis=place)
    if dropped:
        x = op.Squeeze(x, dropped)
    return op.Unsqueeze(x, added) if added else x


def _check_range(x: Tensor, indices: Array, axis: int) -> None:
    """Raises an ArgumentError if an index is out of range for an axis."""
    if x.shape is None:
        return
    if axis >= len(x.shape):
        raise ArgumentError(f"{x!r}: there are more indices than its {len(x.shape)} dimensions")
    size = x.shape[axis]
    if not isinstance(size, int):
        return
    wrong = indices[(indices < -size) | (indices >= size)]
    if len(wrong):
        raise ArgumentError(
            f"{x!r}: index {wrong[0]} is out of range for a dimension of {size} (axis {axis})"
        )


_END = int(np.iinfo(np.int64).max)


def _bounds(part: slice, axis: int) -> tuple[object, object, int, int]:
    """Returns the arguments of Slice for a slice of an axis: start, end, axis and step."""
    step = 1 if part.step is None else part.step
    first, last = (0, _END) if step > 0 else (_END, -_END)
    start = first if part.start is None else part.start
    return start, last if part.stop is None else part.stop, axis, step


def _indices(x: Tensor, part: object) -> Tensor:
    """Converts an index of integers to a Tensor of int64."""
    if isinstance(part, list | np.ndarray | np.generic | bool):
        part = np.asarray(part)
        part = x.tape.constant(part.astype(np.int64) if part.size == 0 else part)
    if not isinstance(part, Tensor):
        raise TypeError(
            f"{x!r}: index must be integers, slices, None, or an array or Tensor of integers, got "
            f"{part!r}; or use op.Gather"
        )
    if part.dtype == np.bool_:
        raise TypeError(
            f"{x!r}: index {part!r} is boolean, so the size of the result is unknown while the "
            "graph is built; use op.Where, or op.Compress"
        )
    if part.dtype.kind not in "iu":
        raise TypeError(
            f"{x!r}: index must have an integer dtype, got {part!r}; cast it with .astype(np.int64)"
        )
    return part.astype(np.int64)
