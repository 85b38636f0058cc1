"""The tape: what inserts nodes into a graph, in terms of values and of what stands for them.

`ortops.graph.tensor` adds the arithmetic of Tensors, which is made of these nodes.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.errors import ModelError, OrtopsError
from ortops.graph.constants import (
    DEFAULT_OPSET,
    IR_VERSION,
    Dim,
    constant_tensor,
    dims_of,
    identity_of,
    numbers_of,
    numpy_dtype,
    storable,
    stored,
    typed_value,
)
from ortops.graph.files.external import without_data
from ortops.graph.files.serialization import GRADIENT_DOMAIN, name_tensors
from ortops.graph.inference import (
    ML,
    allows,
    attribute_of,
    described,
    infer,
    is_of_ml,
    schema_of,
)
from ortops.graph.names import Names

_T = TypeVar("_T")
_AnyTensor = TypeVar("_AnyTensor", bound="BaseTensor")

_current: contextvars.ContextVar[BaseTape[Any] | None] = contextvars.ContextVar(
    "tape", default=None
)


class BaseTensor:
    """A value of a graph and the tape for new nodes; see `ortops.graph.tensor.Tensor`."""

    __slots__ = ("tape", "value")

    def __init__(self, tape: BaseTape[Any], value: ir.Value) -> None:
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
        return None if self.value.shape is None else dims_of(self.value.shape)

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
    def constant(self) -> Array | None:
        """The value of a constant as an array, or None if it is known at run time only."""
        tensor = constant_tensor(self.value)
        return None if tensor is None else tensor.numpy()

    def with_shape(self, shape: Sequence[Dim]) -> Self:
        """Records a shape that inference cannot find, and returns the tensor.

        Args:
            shape: The dimensions: sizes, symbols, or None. They are not verified.

        Example:
            >>> from ortops import Tape, op
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

    def with_shape_of(self, like: BaseTensor) -> Self:
        """Records that this tensor has the shape of another, and returns it."""
        if like.value.shape is not None:
            self.value.shape = ir.Shape(list(like.value.shape))
        return self

    def __repr__(self) -> str:
        return described(self.value)


def known_dtype(given: object) -> np.dtype[Any] | None:
    """Returns the element type of a Tensor or array, and None for Python numbers."""
    if isinstance(given, BaseTensor):
        return numpy_dtype(given.value)
    return given.dtype if isinstance(given, np.ndarray | np.generic) else None


class BaseTape(Generic[_AnyTensor]):
    """Inserts new nodes into a graph; see `ortops.graph.tensor.Tape`."""

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
        self._constants: dict[tuple[np.dtype[Any], tuple[int, ...], bytes], ir.Value] = {}
        self._declared: set[str] = set()
        self.put_out: set[ir.Value] = set()
        self._made: dict[Hashable, object] = {}
        self._outer: list[contextvars.Token[BaseTape[Any] | None]] = []

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

    def tensor(self, value: ir.Value) -> _AnyTensor:
        """Returns the Tensor for a value of the graph."""
        raise NotImplementedError

    def input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[Dim] | None) -> _AnyTensor:
        """Adds a graph input.

        Args:
            name: The input's name.
            dtype: Its element type.
            shape: Its dimensions: sizes, symbols, or None; None for an unknown rank.

        Raises:
            ModelError: If this tape has made an input or initializer of that name.
        """
        value = typed_value(self._declare(name), dtype, shape)
        self.graph.inputs.append(value)
        return self.tensor(value)

    def initializer(self, name: str, array: npt.ArrayLike) -> _AnyTensor:
        """Adds an initializer: a parameter of the model.

        Args:
            name: The initializer's name.
            array: Its value.

        Raises:
            ModelError: If this tape has made an input or initializer of that name.
        """
        array = storable(array)
        value = typed_value(self._declare(name), array.dtype, array.shape)
        value.const_value = stored(array, value.name)
        self.graph.register_initializer(value)
        return self.tensor(value)

    def constant(self, array: npt.ArrayLike) -> _AnyTensor:
        """Returns a constant; equal constants of a tape share one node."""
        array = storable(array)
        key = (array.dtype, array.shape, identity_of(array))
        if key not in self._constants:
            tensor = stored(array)
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)])
            self.append(node)
            value = node.outputs[0]
            value.type = ir.TensorType(tensor.dtype)
            value.shape = ir.Shape(array.shape)
            value.const_value = tensor
            self._constants[key] = value
        return self.tensor(self._constants[key])

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

    def subgraph(self, name: str) -> Self:
        """Returns a tape for a new graph that can read the values of this one."""
        imports = dict(self.graph.opset_imports)
        graph = ir.Graph([], [], nodes=[], opset_imports=imports, name=name)
        inner = type(self)(graph, names=self.names)
        inner.scope = self.scope
        return inner

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Returns the result of a function, which is called once per key and tape."""
        if key not in self._made:
            self._made[key] = make()
        return cast(_T, self._made[key])

    def output(self, tensor: BaseTensor, name: str | None = None) -> _AnyTensor:
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
                value = tensor.tape.emit("Identity", [tensor], {})[0].value
            value.name = self.names.unique(name)
        self.graph.outputs.append(value)
        return self.tensor(value)

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
    ) -> tuple[_AnyTensor, ...]:
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
        if not domain and is_of_ml(op_type):
            domain = ML
        schema = schema_of(op_type, domain, self.graph.opset_imports)
        values = self._operands(schema, inputs)
        while values and values[-1] is None:
            values.pop()
        given = {name: value for name, value in attributes.items() if value is not None}
        node = ir.Node(
            domain,
            op_type,
            values,
            [attribute_of(schema, name, value) for name, value in given.items()],
            num_outputs=schema.min_output if outputs is None else outputs,
        )
        self.append(node)
        self.infer(node)
        return tuple(self.tensor(value) for value in node.outputs)

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
        dtypes = [known_dtype(given) for given in inputs]
        known: dict[str, np.dtype[Any]] = {}
        for kind, dtype in zip(types, dtypes, strict=True):
            if dtype is not None:
                known.setdefault(kind, dtype)
        first = next(filter(None, dtypes), None)
        values: list[ir.Value | None] = []
        for kind, given in zip(types, inputs, strict=True):
            if given is None:
                values.append(None)
            elif isinstance(given, BaseTensor):
                values.append(given.value)
            elif isinstance(given, np.ndarray | np.generic):
                values.append(self.constant(given).value)
            elif isinstance(given, Sequence) and any(isinstance(g, BaseTensor) for g in given):
                values.append(self._vector(given).value)
            else:
                dtype = known.get(kind)
                if dtype is None and first is not None and allows(schema, kind, first):
                    dtype = first if ir.DataType.from_numpy(first).is_floating_point() else None
                values.append(self.constant(numbers_of(given, dtype, schema.name)).value)
        return values

    def _vector(self, parts: Sequence[object]) -> _AnyTensor:
        """Concatenates integers and integer scalar tensors to a vector of int64."""
        pieces = [
            part.tape.emit("Reshape", [part, [-1]], {})[0]
            if isinstance(part, BaseTensor)
            else np.array([part], np.int64)
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
        infer(node, self.graph.opset_imports)


class BaseOperators:
    """Emits nodes by their operators; see `ortops.graph.tensor.op`."""

    def __getattr__(self, op_type: str) -> Any:
        if op_type.startswith("_"):
            raise AttributeError(op_type)

        def emit(
            *inputs: object, outputs: int | None = None, domain: str = "", **attributes: Any
        ) -> Any:
            if outputs is None and op_type == "Split":
                outputs = _split_count(inputs, attributes)
            made = _tape_of(op_type, inputs).emit(
                op_type, inputs, attributes, outputs=outputs, domain=domain
            )
            return made[0] if len(made) == 1 and op_type != "Split" else made

        emit.__name__ = op_type
        self.__dict__[op_type] = emit
        return emit


def _tape_of(op_type: str, inputs: Sequence[object]) -> BaseTape[Any]:
    for given in inputs:
        if isinstance(given, BaseTensor):
            return given.tape
        if isinstance(given, list | tuple):
            for part in given:
                if isinstance(part, BaseTensor):
                    return part.tape
    tape = _current.get()
    if tape is None:
        raise OrtopsError(
            f"op.{op_type} has no input that is a Tensor; call it in a `with Tape():` block"
        )
    return tape


def _split_count(inputs: Sequence[object], attributes: dict[str, Any]) -> int:
    if "num_outputs" in attributes:
        return int(attributes["num_outputs"])
    sizes = inputs[1]
    if isinstance(sizes, BaseTensor):
        return cast(int, (sizes.shape or (None,))[0])
    return len(cast(Sequence[int], sizes))
