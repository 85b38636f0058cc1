"""A Function as a torch.nn.Module.

`_Apply` is one torch.autograd.Function for every order: its backward pass is again an `_Apply`, of
a Function that computes vector-Jacobian products, and its forward mode one of Jacobian-vector
products. A first-order backward pass continues from the residuals of the forward pass instead.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import ml_dtypes
import numpy as np
import torch

from ortops._common.numbers import Array
from ortops.derivatives.function import Function
from ortops.derivatives.programs import as_array, input_of
from ortops.engine.training.input_values import Input
from ortops.errors import ArgumentError, FeedError, UnsupportedError
from ortops.graph.edit import describe

Tensor: TypeAlias = Any
"""A torch.Tensor."""

Flags: TypeAlias = tuple[bool, ...]

Finish: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]
"""Computes products from the inputs and seeds of a call, and the residuals of an earlier one."""


class OnnxModule(torch.nn.Module):  # type: ignore[misc]
    """A Function as a torch.nn.Module; see `Function.torch`.

    Args:
        function: The Function.
        trainable: Whether its weights are parameters of the module.

    Attributes:
        function: The Function.
    """

    def __init__(self, function: Function, trainable: bool) -> None:
        super().__init__()
        _make_opaque()
        self.function = function
        self._check_outputs()
        weights = dict(function.parameters) if trainable else {}
        self._node = _Node.of(function.reading(list(weights)) if weights else function)
        places = {name: self._add(name, array) for name, array in weights.items()}
        inputs = self._node.function._source.inputs
        self._places = [
            (each, _torch_dtype(each.dtype), places.get(name)) for name, each in inputs.items()
        ]

    def forward(self, *args: Any, **named: Any) -> Any:
        """Returns the outputs: one tensor, or a tuple.

        Args:
            *args: Tensors for the inputs, or array-likes of any kind.
            **named: Tensors for the inputs, by name.

        Raises:
            ArgumentError: If an input is missing, unknown or given twice.
            FeedError: If a tensor has another dtype, device or shape than its input.
            KernelError: If onnxruntime cannot compute the outputs.
            UnsupportedError: If an operator has no gradient.
        """
        opaque = _OPAQUE.get("forward") or _make_opaque()
        return opaque(self, *args, **named)

    def _forward(self, *args: Any, **named: Any) -> Any:
        given = self._given(args, named)
        tensors = [
            _fitting(each, dtype, next(given)) if place is None else place.read(each.name, dtype)
            for each, dtype, place in self._places
        ]
        node = self._node
        wrt: tuple[int, ...] = ()
        if torch.is_grad_enabled() and any(node.float_outputs):
            wrt = _where([each.requires_grad for each in tensors], node.float_inputs)
        outputs = _Apply.apply(_Call(node, wrt), *tensors)[: len(node.float_outputs)]
        return outputs[0] if len(outputs) == 1 else outputs

    def _given(self, args: Sequence[Any], named: dict[str, Any]) -> Iterator[Any]:
        """Yields the values of the inputs in order."""
        function = self.function
        if named or len(args) != len(function.inputs):
            for name in named.keys() & function._source.optional.keys():
                raise ArgumentError(
                    f"input '{name}' has a default value in the model, which a torch module uses; "
                    "remove the default from the model to pass a tensor"
                )
            args = function._arguments.in_order(args, named)
        return iter(args)

    def _check_outputs(self) -> None:
        for name, value in self.function._source.outputs.items():
            given = input_of(value)
            if given.unbound is not None or _torch_dtype(given.dtype) is None:
                raise UnsupportedError(
                    f"torch: output '{name}' of type {value.type} cannot be a torch.Tensor; select "
                    "other outputs with Function(model, outputs=...)"
                )

    def _add(self, name: str, value: Array) -> _Place:
        """Adds a parameter by its ONNX name: each dot leads into an inner module."""
        module: torch.nn.Module = self
        *path, leaf = name.split(".")
        # Written directly, because torch refuses names of its own attributes, as in `type.weight`.
        for part in path:
            module = module._modules.setdefault(part, torch.nn.Module())
        module._parameters[leaf] = torch.nn.Parameter(_tensor(value.copy()))
        return _Place(module, leaf)

    def extra_repr(self) -> str:
        """Returns the Function, as text."""
        return repr(self.function)


class _Place:
    """The place of a parameter: a module, and the name in it."""

    def __init__(self, module: torch.nn.Module, leaf: str) -> None:
        self._module, self._leaf = module, leaf

    def read(self, name: str, dtype: Any) -> Tensor:
        """Returns the present parameter, of which torch.func may have put in another one."""
        found = self._module._parameters.get(self._leaf)
        if found is None:  # a parametrization computes it
            found = getattr(self._module, self._leaf)
        return _checked(f"weight '{name}'", dtype, found)


class _Node:
    """A Function, made on first use, and its derivatives.

    Args:
        make: Returns the Function.
        float_inputs: Whether each input is floating-point.
        float_outputs: Whether each output is floating-point.
    """

    def __init__(
        self, make: Callable[[], Function], float_inputs: Flags, float_outputs: Flags
    ) -> None:
        self._make = make
        self.float_inputs, self.float_outputs = float_inputs, float_outputs
        self._derived: dict[tuple[str, tuple[int | None, ...]], _Node] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, function: Function) -> _Node:
        source = function._source
        inputs = tuple(name in source.float_inputs for name in source.inputs)
        outputs = tuple(name in source.float_outputs for name in source.outputs)
        return cls(lambda: function, inputs, outputs)

    @functools.cached_property
    def function(self) -> Function:
        """The Function."""
        with self._lock:
            return self._make()

    def derivative(self, kind: Literal["vjp", "jvp"], wrt: tuple[int, ...]) -> _Node:
        """Returns the node of a derivative with respect to inputs at some positions."""
        ys = [True] * sum(self.float_outputs)
        xs = [True] * len(wrt)
        seeds, outputs = (ys, xs) if kind == "vjp" else (xs, ys)

        def make() -> Function:
            why = "and a second derivative or a forward-mode derivative would draw others"
            self.function._source.refuse_random("torch", why)
            return self.function.derivative(kind, wrt)

        with self._lock:
            made = _Node(make, (*self.float_inputs, *seeds), tuple(outputs))
            return self._derived.setdefault((kind, wrt), made)

    def mapped(self, in_axes: tuple[int | None, ...]) -> _Node:
        """Returns the node of a Function that maps over a new axis of inputs."""
        with self._lock:
            made = _Node(lambda: self.function.vmap(in_axes), self.float_inputs, self.float_outputs)
            return self._derived.setdefault(("vmap", in_axes), made)

    def __reduce__(self) -> Any:
        return _Node.of, (self.function,)

    def __deepcopy__(self, memo: object) -> _Node:
        return self


class _Call:
    """One computation of a node.

    Args:
        node: The node.
        wrt: The positions of the inputs for whose products residuals are kept.
        finish: Computes the outputs from residuals, which are passed behind the inputs, in place
            of the Function of the node.
        held: The number of inputs, the first ones, that the residuals were computed from.

    Attributes:
        back: Set by `run`: computes the products for ``wrt``, of inputs, seeds and residuals.
        reused: Set by `run`: the positions of outputs that are residuals, too.
    """

    def __init__(
        self, node: _Node, wrt: tuple[int, ...], finish: Finish | None = None, held: int = 0
    ) -> None:
        self.node, self.wrt, self.finish, self.held = node, wrt, finish, held
        self.back: Finish | None = None
        self.reused: list[int] = []

    def product(self, wrt: tuple[int, ...]) -> _Call:
        """Returns the call for vector-Jacobian products, from residuals if there are any."""
        node, back, wider = self.node.derivative("vjp", wrt), self.back, self.wrt
        if back is None or not set(wrt) <= set(wider):
            return _Call(node, ())

        def finish(arrays: Sequence[Array]) -> Sequence[Array]:
            found = dict(zip(wider, back(arrays), strict=True))
            return [found[n] for n in wrt]

        return _Call(node, (), finish, len(self.node.float_inputs))

    def run(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Returns the outputs, and then the residuals that are not outputs."""
        if self.finish is not None:
            return self.finish(arrays)
        function = self.node.function
        feeds = function._feeds(arrays, {})
        if not self.wrt:
            return function._run("outputs", (), feeds)
        inputs, outputs = function.inputs, function.outputs
        program = function._program("vjp", tuple(inputs[n] for n in self.wrt))
        forward, backward = program.parts(feeds)
        found = forward.compute(feeds)
        kept = [name for name in backward.inputs if name in found]
        self.reused = [n for n, name in enumerate(outputs) if name in kept]
        residuals = [name for name in kept if name not in outputs]
        names = [*inputs, *program.seeds, *(outputs[n] for n in self.reused), *residuals]

        def back(given: Sequence[Array]) -> Sequence[Array]:
            feeds = {name: _contiguous(a) for name, a in zip(names, given, strict=True)}
            return [as_array(value) for value in backward.compute(feeds).values()]

        self.back = back
        return [as_array(found[name]) for name in (*outputs, *residuals)]


class _Apply(torch.autograd.Function):  # type: ignore[misc]
    """Calls a Function on tensors: the inputs of its node, and the residuals of an earlier call."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs, and then the residuals that are not outputs."""
        return tuple(map(_tensor, call.run([_array(each) for each in tensors])))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keeps what derivatives need."""
        call, *tensors = inputs
        node = call.node
        count = len(node.float_outputs)
        xs, outputs, residuals = tensors[: len(node.float_inputs)], output[:count], output[count:]
        fixed = [y for y, is_float in zip(outputs, node.float_outputs, strict=True) if not is_float]
        ctx.mark_non_differentiable(*fixed, *residuals)
        ctx.set_materialize_grads(False)  # which would allocate zeros for all residuals
        ctx.call, ctx.given, ctx.returned = call, len(tensors), len(output)
        ctx.likes = [(each.shape, each.dtype) for each in outputs]
        # Saved by torch, which frees them after the backward pass, and finds changes in place.
        ctx.save_for_backward(*xs, *(outputs[n] for n in call.reused), *residuals)
        ctx.save_for_forward(*xs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the products of cotangents with the Jacobian (reverse mode)."""
        node, count = ctx.call.node, len(ctx.call.node.float_inputs)
        xs, residuals = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        wrt = _where(ctx.needs_input_grad[1 : 1 + count], node.float_inputs)
        seeds = [
            torch.zeros(like[0], dtype=like[1]) if each is None else each
            for each, like, is_float in zip(cotangents, ctx.likes, node.float_outputs, strict=False)
            if is_float
        ]
        product = ctx.call.product(wrt)
        rest = [] if product.finish is None else [each.detach() for each in residuals]
        slopes = dict(zip(wrt, _Apply.apply(product, *xs, *seeds, *rest), strict=False))
        return None, *(slopes.get(n) for n in range(ctx.given))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the products of the Jacobian with tangents (forward mode)."""
        node, count = ctx.call.node, len(ctx.call.node.float_inputs)
        wrt = _where([each is not None for each in tangents[:count]], node.float_inputs)
        call = _Call(node.derivative("jvp", wrt), ())
        found = iter(_Apply.apply(call, *ctx.saved_tensors[:count], *(tangents[n] for n in wrt)))
        moved = [next(found) if is_float else None for is_float in node.float_outputs]
        return *moved, *[None] * (ctx.returned - len(moved))

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Tensor) -> Any:
        """Calls the Function with a new axis; one that draws random numbers, on each slice."""
        node, finish, dims = call.node, call.finish, in_dims[1:]
        inputs, count = len(node.float_inputs), len(node.float_outputs)
        if any(dim is not None for dim in (*dims[: call.held], *dims[inputs:])):
            finish = None
        random = node.function._source.random_node() if finish is None else None
        if finish is None and random is None:
            mapped = _Call(node.mapped(dims[:inputs]), call.wrt)
            return _Apply.apply(mapped, *tensors[:inputs])[:count], (0,) * count
        if random is not None and info.randomness != "different":
            raise UnsupportedError(
                f"torch: {describe(random)} draws random numbers; call "
                f"torch.func.vmap(..., randomness='different'), got {info.randomness!r}"
            )
        if not info.batch_size:
            raise UnsupportedError("torch: vmap over an axis of size 0 is not supported")
        rows = []
        for row in range(info.batch_size):
            part = [
                each if dim is None else each.select(dim, row)
                for each, dim in zip(tensors, dims, strict=False)
            ]
            again = _Call(node, call.wrt, finish, call.held)
            rows.append(_Apply.apply(again, *part)[:count])
        return tuple(map(torch.stack, zip(*rows, strict=True))), (0,) * count


# torch reads the signature in every call, which takes longer than a small model.
_computed: Any = _Apply.forward
_computed.__signature__ = inspect.signature(_computed)


def _where(*flags: Sequence[bool]) -> tuple[int, ...]:
    """Returns the positions at which all are true."""
    return tuple(n for n, each in enumerate(zip(*flags, strict=True)) if all(each))


def _fitting(given: Input, dtype: Any, value: Any) -> Tensor:
    """Returns the tensor for an input."""
    if isinstance(value, torch.Tensor):
        return _checked(f"input '{given.name}'", dtype, value)
    return _tensor(given.fit(value, {}).copy())


def _checked(what: str, dtype: Any, tensor: Tensor) -> Tensor:
    """Returns a tensor that onnxruntime can read."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise FeedError(
            f"torch: {what} must be a dense tensor on the CPU, got {_shown(tensor)}; onnxruntime "
            "computes on the CPU here, so use .cpu() and .to_dense()"
        )
    if dtype is not None and tensor.dtype is not dtype:
        raise FeedError(
            f"torch: {what} must be {dtype}, got {tensor.dtype}; the model has fixed types, so "
            f"convert it with .to({dtype})"
        )
    return tensor


def _shown(tensor: Tensor) -> str:
    return f"{tensor.layout} on {tensor.device}"


def _array(tensor: Tensor) -> Array:
    """Returns an array that shares the memory of a tensor."""
    if tensor.dtype is torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy(force=True)
        return bits.view(ml_dtypes.bfloat16)
    try:
        array: Array = tensor.numpy(force=True)
    except RuntimeError as error:  # a tensor without memory
        raise UnsupportedError(
            f"torch: the values of a tensor cannot be read: {error}; use the transformations of "
            "torch.func, for example torch.func.jacrev, in place of vectorize=True and "
            "is_grads_batched=True"
        ) from error
    return array


def _tensor(array: Array) -> Tensor:
    """Returns a tensor that shares the memory of an array."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _torch_dtype(dtype: np.dtype[Any] | None) -> Any:
    """Returns torch's name of a type; None if it has none."""
    try:
        return None if dtype is None else _tensor(np.empty(0, dtype)).dtype
    except TypeError:
        return None


def _contiguous(array: Array) -> Array:
    """Returns an array in the order that onnxruntime needs."""
    return array if array.flags.c_contiguous else array.copy(order="C")


_OPAQUE: dict[str, Callable[..., Any]] = {}
"""The forward pass, hidden from torch.compile once its compiler has been imported."""


def _make_opaque() -> Callable[..., Any]:
    """Returns the forward pass, which torch.compile calls without looking into it."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes seconds
    if dynamo is None:
        return OnnxModule._forward
    reason = "onnxruntime computes an ortops.Function, which torch.compile cannot look into"
    return _OPAQUE.setdefault("forward", dynamo.disable(OnnxModule._forward, reason=reason))
