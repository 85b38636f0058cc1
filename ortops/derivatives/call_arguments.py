"""Checks the arguments of a Function's methods."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ortops._common.numbers import Array
from ortops.derivatives.programs import Source, input_of
from ortops.engine.training.input_values import Input
from ortops.errors import ArgumentError, did_you_mean

_CHECKED = 1024
"""The number of combinations of types and shapes that are remembered as checked."""

Wrt: TypeAlias = str | int | Sequence[str | int] | None
"""Inputs or weights by name, or inputs by position; None for all floating-point inputs."""


class CallArguments:
    """Checks arguments against the inputs, outputs and weights of a model.

    Args:
        source: The model.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    def feeds(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Array]:
        """Returns checked arrays for all inputs."""
        inputs = self.source.inputs
        if len(args) != len(inputs) or named:
            args = self.in_order(args, named)
        source, sizes = self.source, dict[str, tuple[int, str]]()
        kinds = _kinds(args)
        if kinds in source.checked and not named:
            feeds = dict(zip(inputs, args, strict=True))
        else:
            given = zip(inputs.items(), args, strict=True)
            feeds = {name: each.fit(value, sizes) for (name, each), value in given}
            as_given = all(map(operator.is_, feeds.values(), args))
            if as_given and None not in kinds and len(source.checked) < _CHECKED:
                source.checked.add(kinds)
            for name in named.keys() & source.optional.keys():
                feeds[name] = source.optional[name].fit(named[name], sizes)
        return feeds

    def in_order(self, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Returns arguments in the order of the inputs."""
        inputs, optional = tuple(self.source.inputs), self.source.optional
        if len(args) > len(inputs):
            plural = "s" * (len(inputs) != 1)
            raise ArgumentError(
                f"the Function has {len(inputs)} input{plural} ({', '.join(inputs)}), got "
                f"{len(args)} arrays; pass one array for each"
            )
        found = dict(zip(inputs, args, strict=False))
        for name, value in named.items():
            if name not in self.source.inputs and name not in optional:
                known = [*inputs, *optional]
                raise ArgumentError(f"no input is named '{name}'; {did_you_mean(name, known)}")
            if name in found:
                raise ArgumentError(f"input '{name}' is given twice, by position and by name")
            if name not in optional:
                found[name] = value
        missing = [shown(self.source.inputs[name]) for name in inputs if name not in found]
        if missing:
            raise ArgumentError(f"pass an array for each input; missing: {', '.join(missing)}")
        return [found[name] for name in inputs]

    def wrt(self, wrt: Wrt) -> tuple[str, ...]:
        """Returns the names of inputs and weights to differentiate with respect to."""
        floats = self.source.float_inputs
        if not self.source.float_outputs:
            raise ArgumentError(
                f"{self!r:.200} has no floating-point output to differentiate; select other "
                "tensors with Function(model, outputs=...)"
            )
        if wrt is None:
            if not floats:
                raise ArgumentError(
                    f"wrt: none of the inputs ({', '.join(self.source.inputs)}) is floating-point; "
                    "pass names of weights"
                )
            return floats
        given = [wrt] if isinstance(wrt, str | int | np.integer) else wrt
        if not isinstance(given, Sequence) or not given:
            hint = "; pass the array for the input 'wrt' by position" * (
                "wrt" in tuple(self.source.inputs)
            )
            raise ArgumentError(f"wrt must be names or positions of inputs, got {wrt!r:.80}{hint}")
        names = [self._differentiable(each, floats) for each in given]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"wrt: '{name}' is listed twice; list it once")
        return tuple(names)

    def _differentiable(self, entry: object, floats: Sequence[str]) -> str:
        """Returns the name of a floating-point input or weight, given its name or position."""
        inputs = tuple(self.source.inputs)
        name = entry
        if isinstance(entry, int | np.integer) and not isinstance(entry, bool):
            if not -len(inputs) <= entry < len(inputs):
                raise ArgumentError(
                    f"wrt: {entry} is not the position of an input; the Function has {len(inputs)}"
                )
            name = inputs[int(entry)]
        if not isinstance(name, str):
            raise ArgumentError(f"wrt must be names or positions of inputs, got {entry!r:.80}")
        if name in floats or name in self.source.weights:
            return name
        if name in inputs:
            kind = _kind(self.source.inputs[name])
            raise ArgumentError(
                f"wrt: input '{name}' must be floating-point to be differentiated, got {kind}"
            )
        known = [*floats, *self.source.weights]
        raise ArgumentError(
            f"wrt: the model has no input or weight '{name}'; {did_you_mean(name, known)}"
        )

    def weight(self, name: object) -> Input:
        """Returns what a weight accepts."""
        weights = self.source.weights
        if not isinstance(name, str) or name not in weights:
            hint = did_you_mean(str(name), list(weights))
            raise ArgumentError(f"the model has no floating-point weight '{name}'; {hint}")
        return input_of(weights[name])

    def like(
        self, what: str, given: Any, likes: Mapping[str, Array], allowed: Sequence[str]
    ) -> list[Array]:
        """Returns vectors shaped like arrays, for those that are floating-point.

        Args:
            what: Their name in messages.
            given: A tuple with one vector for each array, or None for one that is not
                floating-point; one vector without a tuple if there is one array.
            likes: The arrays by name.
            allowed: Those that are floating-point.
        """
        one = len(likes) == 1 and not isinstance(given, tuple | list)
        vectors = (given,) if one else as_tuple(what, given)
        if len(vectors) != len(likes):
            raise ArgumentError(
                f"{what} must have one array for each of {', '.join(likes)}, got {len(vectors)}"
            )
        found = []
        for (name, like), vector in zip(likes.items(), vectors, strict=True):
            label = f"{what}: '{name}'"
            if name not in allowed:
                if vector is not None:
                    kind = getattr(like, "dtype", "not a tensor")
                    raise ArgumentError(f"{label} is {kind} and has no derivative; pass None")
                continue
            if vector is None:
                raise ArgumentError(f"{label} needs an array of shape {list(like.shape)}, got None")
            array = Input(name, like.dtype, None).fit(vector, {})
            if array.shape != like.shape:
                raise ArgumentError(
                    f"{label} must have shape {list(like.shape)}, got {list(array.shape)}"
                )
            found.append(array)
        return found

    def check_scalar(self, method: str) -> None:
        """Checks that there is one output, which may have one element."""
        outputs = self.source.outputs
        if len(outputs) != 1:
            raise ArgumentError(
                f"{method} needs one scalar output, got {', '.join(outputs)}; select one with "
                "Function(model, outputs=...)"
            )
        (value,) = outputs.values()
        if not self.source.float_outputs:
            raise ArgumentError(f"{method} needs a floating-point output, got {value.type}")
        if value.shape is not None and value.shape.is_static():
            self.check_one_element(method, value.shape.numpy())

    def check_one_element(self, method: str, shape: tuple[int, ...]) -> None:
        """Checks the shape of a scalar."""
        if math.prod(shape) != 1:
            (name,) = self.source.outputs
            raise ArgumentError(
                f"{method} needs a scalar output, but '{name}' has shape {list(shape)}; use "
                "jacobian or vjp"
            )


def as_tuple(what: str, given: Any) -> tuple[Any, ...]:
    """Returns an argument that must be a tuple or a list, as a tuple."""
    if not isinstance(given, tuple | list):
        raise ArgumentError(f"{what} must be a tuple of arrays, got {type(given).__name__}")
    return tuple(given)


def _kinds(args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns all that the check of arrays depends on; None for what is not a plain array."""
    plain = [type(array) is np.ndarray for array in args]
    return tuple(
        [
            (array.dtype, array.shape) if known and _is_contiguous(array) else None
            for array, known in zip(args, plain, strict=True)
        ]
    )


def _is_contiguous(array: Array) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.kind != "O"


def shown(given: Input) -> str:
    """Returns an input as text, such as ``x: float32[batch, 4]``."""
    dims = (
        "..." if given.dims is None else ", ".join("?" if d is None else str(d) for d in given.dims)
    )
    return f"{given.name}: {_kind(given)}" + f"[{dims}]" * (given.unbound is None)


def _kind(given: Input) -> str:
    """Returns the type of an input as text."""
    if given.dtype is None:
        return given.unbound or "unknown"
    return given.unbound or ("string" if given.dtype.kind == "O" else str(given.dtype))
