"""The bridge to PyTensor: a Function as an Op, whose derivatives are Ops of the same class."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Literal

import numba
import numpy as np
from pytensor import tensor
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import get_numba_type, numba_funcify, numba_njit

from ortops._common.numbers import Array
from ortops.derivatives.function import Function
from ortops.derivatives.programs import input_of
from ortops.engine.training.input_values import Input
from ortops.errors import ArgumentError, FeedError, UnsupportedError


def pytensor_op(function: Function) -> Op:
    """Returns an Op; see `Function.pytensor`."""
    function._source.refuse_random("pytensor", "but an Op must be pure")
    for given in function._source.inputs.values():
        _check_type(f"input '{given.name}'", given)
    for value in function._source.outputs.values():
        _check_type(f"output '{value.name}'", input_of(value))
    return FunctionOp(function)


def _check_type(what: str, given: Input) -> None:
    if given.unbound is not None or given.dtype is None or given.dtype.kind not in "biuf":
        kind = given.unbound or given.dtype or "unknown"
        raise UnsupportedError(f"pytensor: the type of {what} is {kind}, which PyTensor lacks")
    if given.dims is None:
        raise UnsupportedError(f"pytensor: the rank of {what} is unknown; PyTensor needs it")


class FunctionOp(Op):  # type: ignore[misc]
    """An Op that computes a Function; its inputs and outputs are those of the Function.

    Args:
        function: The Function, with types and ranks of all inputs and outputs.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self._products: dict[tuple[str, tuple[int, ...]], FunctionOp] = {}
        inputs, outputs = function._source.inputs, function._source.outputs
        self._inputs = list(inputs.values())
        self._outputs = [input_of(value) for value in outputs.values()]
        floats = function._source.float_inputs, function._source.float_outputs
        self._float_inputs = [place for place, name in enumerate(inputs) if name in floats[0]]
        self._float_outputs = [place for place, name in enumerate(outputs) if name in floats[1]]

    def __str__(self) -> str:
        return f"ONNX{{{', '.join(self.function.outputs)}}}"

    def __reduce__(self) -> Any:
        return FunctionOp, (self.function,)

    def _product(self, kind: Literal["jvp", "vjp"], wrt: tuple[int, ...]) -> FunctionOp:
        """Returns the Op of a derivative, which is one object so that PyTensor merges its nodes."""
        if (kind, wrt) not in self._products:
            self._products[kind, wrt] = FunctionOp(self.function.derivative(kind, wrt))
        return self._products[kind, wrt]

    def make_node(self, *inputs: Any) -> Apply:
        """Applies the Op to variables, arrays or numbers; checks their types and ranks."""
        given = self.function._arguments.in_order(inputs, {})
        variables = [_variable(*pair) for pair in zip(self._inputs, given, strict=True)]
        shapes = {each.name: x.type.shape for each, x in zip(self._inputs, variables, strict=True)}
        stated = zip(self._outputs, self.function._source.output_shapes(shapes), strict=True)
        outputs = [tensor.TensorType(str(y.dtype), shape)(name=y.name) for y, shape in stated]
        return Apply(self, variables, outputs)

    def perform(self, node: Apply, inputs: Sequence[Array], output_storage: Any) -> None:
        """Computes the outputs."""
        found = self.function(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        for storage, variable, array in zip(output_storage, node.outputs, found, strict=True):
            known = variable.type.shape
            if len(known) != array.ndim or any(
                size is not None and size != actual
                for size, actual in zip(known, array.shape, strict=True)
            ):
                raise FeedError(
                    f"pytensor: output '{variable.name}' has shape {list(array.shape)}, but the "
                    f"model states {list(known)}; correct the shape of the output in the model"
                )
            storage[0] = np.asarray(array)

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        """Returns which outputs have a derivative by which inputs: floats by floats."""
        return [
            [x in self._float_inputs and y in self._float_outputs for y in range(len(node.outputs))]
            for x in range(len(node.inputs))
        ]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        """Returns the vector-Jacobian products of the inputs."""
        vectors = [
            tensor.zeros_like(outputs[place])
            if _is_disconnected(cotangents[place])
            else cotangents[place].astype(outputs[place].dtype)
            for place in self._float_outputs
        ]
        found: list[Variable] = [DisconnectedType()() for _ in inputs]
        if self._float_inputs and not all(_is_disconnected(each) for each in cotangents):
            product = self._product("vjp", tuple(self._float_inputs))
            results = product(*inputs, *vectors, return_list=True)
            for place, result in zip(self._float_inputs, results, strict=True):
                found[place] = result
        return found

    L_op = pullback  # before PyTensor 3

    def pushforward(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], tangents: Sequence[Variable]
    ) -> list[Variable]:
        """Returns the Jacobian-vector products of the outputs."""
        found: list[Variable] = [DisconnectedType()() for _ in outputs]
        wrt = [place for place in self._float_inputs if not _is_disconnected(tangents[place])]
        if wrt and self._float_outputs:
            vectors = [tangents[place].astype(inputs[place].dtype) for place in wrt]
            results = self._product("jvp", tuple(wrt))(*inputs, *vectors, return_list=True)
            for place, result in zip(self._float_outputs, results, strict=True):
                found[place] = result
        return found

    def R_op(  # noqa: N802 (the name in PyTensor)
        self, inputs: Sequence[Variable], eval_points: Sequence[Variable | None]
    ) -> list[Variable | None]:
        """Returns `pushforward` with None for what is disconnected, as before PyTensor 3."""
        tangents = [DisconnectedType()() if each is None else each for each in eval_points]
        found = self.pushforward(inputs, self.make_node(*inputs).outputs, tangents)
        return [None if _is_disconnected(each) else each for each in found]


def _is_disconnected(variable: Variable) -> bool:
    return isinstance(variable.type, DisconnectedType)


def _variable(given: Input, value: Any) -> Variable:
    """Returns a value as a variable of the type of an input."""
    if not isinstance(value, Variable):
        return tensor.as_tensor_variable(given.fit(value, {}))
    variable = tensor.as_tensor_variable(value)
    wanted, has = given.dtype, np.dtype(variable.dtype)
    assert wanted is not None
    assert given.dims is not None
    if not np.can_cast(has, wanted, "safe"):
        raise ArgumentError(
            f"input '{given.name}' must be {wanted}, got {has}; convert it with .astype('{wanted}')"
        )
    shape = variable.type.shape
    if len(shape) != len(given.dims) or any(
        isinstance(dim, int) and size not in (dim, None)
        for dim, size in zip(given.dims, shape, strict=True)
    ):
        wanted_shape, has_shape = (
            ", ".join("?" if size is None else str(size) for size in sizes)
            for sizes in (given.dims, shape)
        )
        raise FeedError(
            f"feeds: '{given.name}' must have shape [{wanted_shape}], got [{has_shape}]"
        )
    return variable if has == wanted else variable.astype(wanted.name)


class _Performed:
    """Computes a node. Numba would pickle a function, and so copy the model into its code."""

    def __init__(self, node: Apply) -> None:
        self.node = node

    def __call__(self, inputs: Sequence[Array]) -> Any:
        storage: list[list[Any]] = [[None] for _ in self.node.outputs]
        self.node.op.perform(self.node, inputs, storage)
        found = tuple(array for (array,) in storage)
        return found[0] if len(found) == 1 else found

    def __reduce__(self) -> Any:
        raise pickle.PicklingError("a node is not pickled")


def _in_numba(op: FunctionOp, node: Apply, **settings: Any) -> Any:
    """Lets Numba call Python, as PyTensor does for other Ops, with a warning."""
    types = [get_numba_type(variable.type) for variable in node.outputs]
    result = types[0] if len(types) == 1 else numba.types.Tuple(types)
    performed = _Performed(node)

    @numba_njit
    def perform(*inputs):  # type: ignore[no-untyped-def]
        with numba.objmode(found=result):
            found = performed(inputs)
        return found  # noqa: RET504 (Numba needs the assignment)

    return perform


numba_funcify.register(FunctionOp, _in_numba)
