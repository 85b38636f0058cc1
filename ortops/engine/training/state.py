"""The variables of a training session, as a mapping that checks values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.numbers import cast_numbers
from ortops._common.uninterrupted import finished_at_exit
from ortops.engine.execution.execution import Execution
from ortops.engine.trainable.metadata import METADATA_KEY, TrainingMetadata
from ortops.engine.training.input_values import fitted_array
from ortops.errors import (
    ArgumentError,
    ModelError,
    OrtopsError,
    UnknownVariableError,
    did_you_mean,
)

Array: TypeAlias = npt.NDArray[Any]


class State(MutableMapping[str, Array]):
    """The variables of a session by name. Reading returns copies, setting checks the values.

    A copy or pickle of it (`copy.deepcopy`) is a dict of arrays.

    Args:
        execution: Holds the variables.
        lock: Held while they are read.
        metadata: Names the 16-bit parameters with their float32 values.
        assign: Sets some of them.
        scales: Those that losses are multiplied by.
        hidden: What the execution holds, but is no variable.
    """

    def __init__(
        self,
        execution: Execution,
        lock: AbstractContextManager[object],
        metadata: TrainingMetadata,
        assign: Callable[[Mapping[str, Array]], None],
        scales: Collection[str] = (),
        hidden: Collection[str] = (),
    ) -> None:
        self._execution = execution
        self._lock = lock
        self._metadata = metadata
        self._assign = assign
        self._scales = scales
        self._hidden = hidden

    def __getitem__(self, name: str) -> Array:
        self._known(name)
        with finished_at_exit, self._lock:
            return self._execution.present(name).copy()

    def __setitem__(self, name: str, array: npt.ArrayLike) -> None:
        self.assign({name: array})

    def assign(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        """Sets several variables at once; nothing is set if a value does not fit."""
        check_dict("state", arrays)
        checked = {name: self.check(name, array) for name, array in arrays.items()}
        self._assign(self.with_masters(checked))

    def __delitem__(self, name: str) -> None:
        raise OrtopsError(f"state '{name}': a variable cannot be removed; set it")

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in dict(self._execution.variables) if name not in self._hidden])

    def __len__(self) -> int:
        return len(self._execution.variables) - len(self._hidden)

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles plain dicts of arrays, which keep their values."""
        return dict, (dict(self),)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.items()
        )
        return f"State({shapes})"

    def check(self, name: str, array: npt.ArrayLike) -> Array:
        """Returns an array that can be the value of a variable.

        Raises:
            OrtopsError: If there is no such variable, or it has another type or shape.
        """
        self._known(name)
        present, _ = self._execution.variables[name].buffers
        result = fitted_array(f"state '{name}'", array, present.dtype, present.shape).copy()
        if name in self._scales and not 0 < result < np.inf:
            raise ArgumentError(f"state '{name}' must be a finite number > 0, got {result}")
        return result

    def with_masters(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns values in which 16-bit parameters and their float32 values are the same.

        Raises:
            OrtopsError: If both are given and differ.
        """
        result = dict(arrays)
        for name, master in masters(self._metadata, self._execution.variables).items():
            narrow = self._execution.variables[name].buffers[0].dtype
            if name not in arrays and master in arrays:
                result[name], lost = cast_numbers(arrays[master], narrow)
                if lost is not None:
                    raise _misfit(name, lost, narrow)
            elif name in arrays and master not in arrays:
                result[master] = arrays[name].astype(np.float32)
            elif name in arrays and not is_rounded(arrays[name], arrays[master]):
                raise OrtopsError(
                    f"state: '{name}' differs from '{master}' rounded to {narrow}; give only one "
                    "of them, which also sets the other"
                )
        return result

    def _known(self, name: str) -> None:
        known = self._execution.variables
        if name not in known or name in self._hidden:
            raise UnknownVariableError(
                f"state: there is no variable '{name}'; " + did_you_mean(name, list(self))
            )


def check_dict(what: str, arrays: object) -> None:
    """Raises an ArgumentError unless arrays are given by name."""
    if not isinstance(arrays, Mapping):
        raise ArgumentError(
            f"{what} must be a dict with an array for each name, got {type(arrays).__name__}"
        )


def masters(metadata: TrainingMetadata, known: Container[str]) -> dict[str, str]:
    """Returns the 16-bit parameters, and the variables with their float32 values."""
    pairs = metadata.masters.items()
    return {name: master for name, master in pairs if name in known and master in known}


def rounded(master: Array, dtype: np.dtype[Any]) -> Array:
    """Returns float32 values in the 16-bit type of a parameter."""
    with np.errstate(over="ignore"):
        return master.astype(dtype)


def is_rounded(parameter: Array, master: Array) -> bool:
    """Whether a 16-bit parameter equals its float32 values, rounded."""
    expected = rounded(master, parameter.dtype)
    return np.array_equal(parameter.view(np.uint16), expected.view(np.uint16))


def _misfit(name: str, value: object, dtype: np.dtype[Any]) -> OrtopsError:
    return OrtopsError(f"state '{name}' cannot be set to {value}, which does not fit {dtype}")


def check_master(name: str, parameter: Array, master: str, array: Array) -> None:
    """Raises an error unless a variable in a file can hold the float32 values of a parameter."""
    narrow = parameter.dtype.name in ("float16", "bfloat16") and array.dtype == np.float32
    if not narrow or parameter.shape != array.shape:
        raise ModelError(
            f"metadata_props '{METADATA_KEY}': 'masters' must map a float16 or bfloat16 parameter "
            f"to a float32 variable of the same shape, got '{master}', "
            f"{array.dtype}{list(array.shape)}, for '{name}', "
            f"{parameter.dtype}{list(parameter.shape)}"
        )
