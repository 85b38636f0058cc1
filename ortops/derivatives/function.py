"""Function: an ONNX model as a differentiable function of NumPy arrays."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnxruntime

from ortops._common.arguments import whole_number
from ortops._common.numbers import Array
from ortops.derivatives.bridge_methods import Bridges
from ortops.derivatives.call_arguments import CallArguments, Wrt, as_tuple, shown
from ortops.derivatives.programs import Kind, Program, Request, Source, as_array, input_of
from ortops.derivatives.vmap import Axes
from ortops.engine.execution.providers import choose_providers
from ortops.errors import ArgumentError
from ortops.graph import convert
from ortops.graph.files.loading import ModelLike, blame_model


class Function(Bridges):
    """An ONNX model as a differentiable function: NumPy arrays in, NumPy arrays out.

    The model and its derivatives run in onnxruntime sessions, which are created on first use and
    then reused. Any inference model works, with control flow and quantized operators; models
    with training_info are used without it. Several threads may call one Function.

    Arguments of all methods are arrays for the inputs: by position in the order of `inputs`, or by
    name. Values are converted to the type of an input if that preserves them, integers to floats
    for example. A result is one array if the model has one output, otherwise a tuple in the order
    of `outputs`.

    Args:
        model: A ModelProto, its bytes or its path; it is not modified.
        outputs: The tensor to return, or several: names of outputs or of other tensors of the main
            graph. By default, all outputs of the model.
        sess_options: Options of onnxruntime for all sessions.
        providers: Providers of onnxruntime; by default, the CPU.

    Raises:
        ArgumentError: If ``outputs`` are not names, or a provider is unknown or does not work.
        ModelError: If the model is invalid, or has no such tensor.
        UnsupportedError: On the first use of a session, if an operator has no gradient, or
            onnxruntime has no kernel for it (for example Conv in float64 on the CPU).

    Example:
        >>> import numpy as np
        >>> from ortops.docs import examples
        >>> f = Function(examples.mlp((4, 16, 2)))
        >>> f
        Function(images: float32[batch, 4]) -> logits: float32[batch, 2], 4 weights (114 numbers)
        >>> x = np.ones((3, 4), np.float32)
        >>> logits, pullback = f.vjp(x)
        >>> (gradient,) = pullback(np.ones_like(logits))
        >>> logits.shape, gradient.shape, f.jacobian(x).shape
        ((3, 2), (3, 4), (3, 2, 3, 4))
    """

    @blame_model
    def __init__(
        self,
        model: ModelLike,
        *,
        outputs: str | Sequence[str] | None = None,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
    ) -> None:
        names = None if outputs is None else _names("outputs", outputs)
        chosen = choose_providers(providers, sess_options)
        self._source = Source(convert.load_light(model), names, sess_options, chosen)
        self._arguments = CallArguments(self._source)
        self._replaced: dict[str, Array] = {}
        self._fed: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that have no default value."""
        return tuple(self._source.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the returned tensors."""
        return tuple(self._source.outputs)

    @property
    def parameters(self) -> Mapping[str, Array]:
        """The weights by name, read-only; see `with_parameters`.

        These are the weights that are trained by default. Others, such as the running statistics of
        BatchNormalization, can be replaced and differentiated by their names, too.
        """
        return _Parameters(self)

    def with_parameters(self, values: Mapping[str, Any]) -> Function:
        """Returns a Function with other values for some weights.

        It shares the sessions of this Function and of all others with the same weights replaced.

        Args:
            values: New values by the names of floating-point weights, of their shapes and dtypes.

        Raises:
            ArgumentError: If there is no such weight.
            FeedError: If a value has another shape, or a type that cannot be converted.

        Example:
            >>> import numpy as np
            >>> from ortops.docs import examples
            >>> f = Function(examples.mlp((4, 16, 2)))
            >>> zeros = {name: np.zeros_like(array) for name, array in f.parameters.items()}
            >>> f.with_parameters(zeros)(np.ones((1, 4), np.float32))
            array([[0., 0.]], dtype=float32)
        """
        if not isinstance(values, Mapping):
            raise ArgumentError(f"values must be a dict of arrays, got {type(values).__name__}")
        result = object.__new__(type(self))
        result._source, result._arguments = self._source, self._arguments
        result._replaced = dict(self._replaced)
        for name, value in values.items():
            array = self._arguments.weight(name).fit(value, {})
            result._replaced[name] = array.copy()  # `array` may share memory with `value`
        result._fed = tuple(name for name in self._source.weights if name in result._replaced)
        return result

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Returns the outputs.

        Raises:
            ArgumentError: If an input is missing, unknown or given twice.
            FeedError: If an array has another shape, or a type that cannot be converted.
            KernelError: If onnxruntime cannot compute the outputs.
        """
        return _one_or_all(self._run("outputs", (), self._feeds(args, named)))

    def vjp(
        self, /, *args: Any, wrt: Wrt = None, **named: Any
    ) -> tuple[Any, Callable[[Any], tuple[Array | None, ...]]]:
        """Computes the outputs, and returns a function for vector-Jacobian products (reverse mode).

        Args:
            *args: Arrays for the inputs.
            wrt: What to differentiate with respect to; by default, all inputs.
            **named: Arrays for the inputs, by name.

        Returns:
            The outputs, and the pullback. That maps cotangents, shaped like the outputs (one array,
            or a tuple with None for outputs that are not floating-point), to a tuple with one
            product for each entry of ``wrt``; by default, for each input, with None for inputs that
            are not floating-point. It may be called several times. It keeps the results of the
            forward pass that it needs.

        Raises:
            ArgumentError: See `__call__`; or if ``wrt`` names no floating-point input or weight.
            FeedError: See `__call__`.
            KernelError: See `__call__`.
            UnsupportedError: If an operator has no gradient.
        """
        feeds = self._feeds(args, named)
        names = self._arguments.wrt(wrt)
        program = self._program("vjp", names)
        forward, backward = program.parts(feeds)
        found = forward.compute(feeds)
        # Copies, because the caller may change arrays before calling the pullback.
        kept = {n: copy.deepcopy(feeds[n]) for n in backward.inputs if n in feeds} | {
            name: value for name, value in found.items() if name in backward.inputs
        }
        likes = {name: as_array(found[name], copied=name in kept) for name in self.outputs}
        shown = self.inputs if wrt is None else names

        def pullback(cotangents: Any) -> tuple[Array | None, ...]:
            vectors = self._arguments.like(
                "cotangents", cotangents, likes, self._source.float_outputs
            )
            seeds = dict(zip(program.seeds, vectors, strict=True))
            products = map(as_array, backward.compute({**kept, **seeds}).values())
            by_name = dict(zip(names, products, strict=True))
            return tuple(by_name.get(name) for name in shown)

        return _one_or_all(list(likes.values())), pullback

    def jvp(
        self, xs: Sequence[Any], tangents: Sequence[Any], *, wrt: Wrt = None
    ) -> tuple[Any, Any]:
        """Computes the outputs and a Jacobian-vector product (forward mode).

        Args:
            xs: A tuple of arrays for the inputs.
            tangents: A tuple with one vector for each entry of ``wrt``, of its shape; by default,
                for each input, with None for inputs that are not floating-point.
            wrt: See `vjp`.

        Returns:
            The outputs, and their tangents. Outputs that are not floating-point have the tangent
            None.

        Raises:
            ArgumentError: See `vjp`.
            OrtopsError: Other errors as for `vjp`.

        Example:
            >>> import numpy as np
            >>> from ortops.docs import examples
            >>> f = Function(examples.mlp((4, 16, 2)))
            >>> x = np.ones((3, 4), np.float32)
            >>> logits, tangents = f.jvp((x,), (np.ones_like(x),))
            >>> tangents.shape
            (3, 2)
        """
        feeds = self._feeds(as_tuple("xs", xs), {})
        names = self._arguments.wrt(wrt)
        vectors = self._vectors("tangents", tangents, wrt, names, feeds)
        found = self._run("jvp", names, feeds, vectors)
        count = len(self.outputs)
        products = dict(zip(self._source.float_outputs, found[count:], strict=True))
        return _one_or_all(found[:count]), _one_or_all([products.get(n) for n in self.outputs])

    def value_and_grad(self, /, *args: Any, wrt: Wrt = None, **named: Any) -> tuple[Array, Any]:
        """Computes a scalar output and its gradient.

        Args:
            *args: See `vjp`.
            wrt: What to differentiate with respect to; by default, all floating-point inputs.
            **named: See `vjp`.

        Returns:
            The output, and its gradient: one array, or a tuple for several entries of ``wrt``.

        Raises:
            ArgumentError: See `vjp`; or if the Function has several outputs, or its output has more
                than one element.
            OrtopsError: Other errors as for `vjp`.

        Example:
            >>> import numpy as np
            >>> import ortops
            >>> with ortops.Tape(name="energy") as tape:
            ...     x = tape.input("x", np.float32, ["n"])
            ...     y = tape.output((x * x).sum(), "y")
            >>> Function(tape.model()).value_and_grad(np.float32([1, 2]))
            (array(5., dtype=float32), array([2., 4.], dtype=float32))
        """
        feeds = self._feeds(args, named)
        self._arguments.check_scalar("value_and_grad")
        value, *gradients = self._run("gradient", self._arguments.wrt(wrt), feeds)
        self._arguments.check_one_element("value_and_grad", value.shape)
        return value, _one_or_all(gradients)

    def jacobian(self, /, *args: Any, wrt: Wrt = None, **named: Any) -> Any:
        """Computes the Jacobian of each output.

        Args:
            *args: See `vjp`.
            wrt: See `value_and_grad`.
            **named: See `vjp`.

        Returns:
            An array of shape ``[*y.shape, *x.shape]``; a tuple of arrays for several entries of
            ``wrt``; a tuple of these for several floating-point outputs.

        Raises:
            ArgumentError: See `vjp`.
            OrtopsError: Other errors as for `vjp`.
        """
        names = self._arguments.wrt(wrt)
        return _nested(self._run("jacobian", names, self._feeds(args, named)), len(names))

    def hessian(self, /, *args: Any, wrt: Wrt = None, **named: Any) -> Any:
        """Computes the Hessian of a scalar output.

        Args:
            *args: See `vjp`.
            wrt: See `value_and_grad`.
            **named: See `vjp`.

        Returns:
            An array of shape ``[*x.shape, *x.shape]``; for several entries of ``wrt``, a tuple of
            tuples of arrays.

        Raises:
            ArgumentError: See `value_and_grad`.
            OrtopsError: Other errors as for `vjp`.
        """
        self._arguments.check_scalar("hessian")
        names = self._arguments.wrt(wrt)
        feeds = self._feeds(args, named)
        value, *found = self._run("hessian", names, feeds)
        self._arguments.check_one_element("hessian", value.shape)
        return _nested(found, len(names))

    def hvp(self, xs: Sequence[Any], vectors: Sequence[Any], *, wrt: Wrt = None) -> Any:
        """Computes the product of the Hessian of a scalar output with a vector.

        Args:
            xs: See `jvp`.
            vectors: As the tangents of `jvp`.
            wrt: See `vjp`.

        Returns:
            The product, shaped like the vector: one array, or a tuple for several entries of
            ``wrt``.

        Raises:
            ArgumentError: See `value_and_grad`.
            OrtopsError: Other errors as for `vjp`.
        """
        self._arguments.check_scalar("hvp")
        names = self._arguments.wrt(wrt)
        feeds = self._feeds(as_tuple("xs", xs), {})
        given = self._vectors("vectors", vectors, wrt, names, feeds)
        value, *found = self._run("hvp", names, feeds, given)
        self._arguments.check_one_element("hvp", value.shape)
        return _one_or_all(found)

    def __reduce__(self) -> Any:
        source = self._source
        if source.sess_options is not None:
            raise TypeError(
                "a Function with sess_options cannot be pickled, because onnxruntime's options "
                "cannot; create it again in the other process"
            )
        data = source.serialized(), source.selected, source.providers, self._replaced
        return _restored, (type(self), *data)

    def __deepcopy__(self, memo: object) -> Function:
        return self  # it does not change

    def __repr__(self) -> str:
        """Shows inputs, outputs and the number of weights."""
        inputs = ", ".join(map(shown, self._source.inputs.values()))
        outputs = ", ".join(shown(input_of(value)) for value in self._source.outputs.values())
        values = [self._source.weights[name] for name in self.parameters]
        numbers = sum(math.prod(value.shape.numpy()) for value in values if value.shape)
        plural = "s" * (len(values) != 1)
        return (
            f"Function({inputs}) -> {outputs}, {len(values)} weight{plural} ({numbers:,} numbers)"
        )

    def vmap(self, in_axes: Axes = 0, out_axes: Axes = 0, *, size: int | None = None) -> Function:
        """Returns a Function that maps over a new axis of inputs; see `ortops.derivatives.vmap`.

        It has the weights of this one. To map over weights, make them inputs with `reading`.

        Args:
            in_axes: The place of the axis in the inputs: an int for all, a tuple with an int or
                None for each, or a dict by name. Inputs with None, and those that a dict lacks, do
                not get the axis.
            out_axes: The place of the axis in the outputs, in the same form.
            size: The length of the axis; by default, any.

        Raises:
            ArgumentError: If the axes or the size are invalid, or no input is mapped.
            ModelError: If a mapped input or an output is a sequence.

        Example:
            >>> import numpy as np
            >>> from ortops.docs import examples
            >>> f = Function(examples.mlp((4, 16, 2)))
            >>> f.vmap(in_axes=1)(np.ones((3, 5, 4), np.float32)).shape
            (5, 3, 2)
        """
        length = None if size is None else whole_number("size", size, 0)
        return self._with_weights(self._source.mapped(in_axes, out_axes, length))

    def reading(self, weights: Sequence[str]) -> Function:
        """Returns a Function that has weights as further inputs, after those of this one.

        Args:
            weights: Names of floating-point weights.

        Raises:
            ArgumentError: If there is no such weight.
        """
        for name in weights:
            self._arguments.weight(name)
        return self._of(Request("outputs", (), tuple(weights)))

    def derivative(self, kind: Kind, wrt: Wrt = None) -> Function:
        """Returns a Function that computes derivatives.

        Args:
            kind: ``"vjp"``, whose further inputs are the cotangents of the floating-point outputs;
                or ``"jvp"`` and ``"hvp"``, whose further inputs are the tangents of the entries of
                ``wrt``.
            wrt: What to differentiate with respect to; by default, all floating-point inputs.

        Raises:
            ArgumentError: If there is no such floating-point input.
        """
        return self._of(Request(kind, self._arguments.wrt(wrt), ()))

    def _of(self, request: Request) -> Function:
        """Returns a Function of a derived model, with the weights of this one."""
        return self._with_weights(self._source.derived(request))

    def _with_weights(self, source: Source) -> Function:
        """Returns a Function of a source, with the weights of this one."""
        result = object.__new__(type(self))
        result._source, result._arguments = source, CallArguments(source)
        result._replaced, result._fed = {}, ()
        left = {n: v for n, v in self._replaced.items() if n in result._source.weights}
        return result.with_parameters(left) if left else result

    def _feeds(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Array]:
        """Returns checked arrays for all inputs, and for the weights that are fed."""
        feeds = self._arguments.feeds(args, named)
        return feeds | self._replaced if self._replaced else feeds

    def _program(self, kind: Kind, names: tuple[str, ...]) -> Program:
        return self._source.program(Request(kind, names, self._fed))

    def _run(
        self,
        kind: Kind,
        names: tuple[str, ...],
        feeds: dict[str, Array],
        vectors: Sequence[Array] = (),
    ) -> list[Any]:
        """Runs a program that has one part; returns its outputs."""
        program = self._program(kind, names)
        if vectors:
            feeds = {**feeds, **dict(zip(program.seeds, vectors, strict=True))}
        (part,) = program.parts(feeds)
        return part.run(feeds)

    def _vectors(
        self,
        what: str,
        given: Any,
        wrt: Wrt,
        names: tuple[str, ...],
        feeds: Mapping[str, Array],
    ) -> list[Array]:
        """Returns vectors shaped like the inputs or weights of ``wrt``."""
        shown = self.inputs if wrt is None else names
        likes = {name: feeds[name] if name in feeds else self.parameters[name] for name in shown}
        return self._arguments.like(what, given, likes, names)


def _restored(
    kind: type[Function],
    model: bytes,
    outputs: Sequence[str] | None,
    providers: Sequence[Any],
    replaced: Mapping[str, Array],
) -> Function:
    """Returns an unpickled Function."""
    return kind(model, outputs=outputs, providers=providers).with_parameters(replaced)


class _Parameters(Mapping[str, Array]):
    """The weights of a Function by name, read when they are accessed."""

    def __init__(self, function: Function) -> None:
        self._source, self._replaced = function._source, function._replaced

    def __getitem__(self, name: str) -> Array:
        if name not in self._source.weights:
            raise KeyError(name)
        array = self._replaced[name] if name in self._replaced else self._source.value(name)
        shown = array.view()
        shown.flags.writeable = False
        return shown

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._source.trained, *self._replaced)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        weights = (shown(input_of(self._source.weights[name])) for name in self)
        return f"<parameters {', '.join(weights)}>"


def _names(what: str, given: object) -> list[str]:
    """Returns an argument that is one name or several as a list."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names:
        raise ArgumentError(f"{what} must be one or more names of tensors, got {given!r:.80}")
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"{what} must be one or more names of tensors, got {name!r:.80}")
        if list(names).count(name) > 1:
            raise ArgumentError(f"{what}: '{name}' is listed twice; list it once")
    return list(names)


def _one_or_all(values: Sequence[Any]) -> Any:
    """Returns the only value, or all as a tuple."""
    return values[0] if len(values) == 1 else tuple(values)


def _nested(values: Sequence[Any], count: int) -> Any:
    """Returns values in rows of ``count``; rows and columns of one are not wrapped."""
    rows = [values[start : start + count] for start in range(0, len(values), count)]
    return _one_or_all([_one_or_all(row) for row in rows])
