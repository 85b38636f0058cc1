"""The weights of a training session that are not trained, as a mapping that checks values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops._common.uninterrupted import finished_at_exit
from ortops.engine.training.input_values import fitted_array
from ortops.engine.training.loaded_model import LoadedModel
from ortops.engine.training.state import check_dict
from ortops.errors import OrtopsError, UnknownVariableError, did_you_mean
from ortops.graph.files.messages import initializers

Array: TypeAlias = npt.NDArray[Any]

_FLOATS = (
    *(onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
    *(onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16),
)


class Constants(MutableMapping[str, Array]):
    """The weights that no step changes, by name. Reading returns copies, setting checks the values.

    The first assignment of a weight builds the step again, with the weight as an input; later ones
    only write its memory. Until then, it is a constant of the graph, which is faster.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def __getitem__(self, name: str) -> Array:
        loaded, tensors = self._loaded, self._tensors()
        self._check_known(name, tensors)
        with finished_at_exit, loaded.lock:
            if name in loaded.usage.constants:
                return loaded.execution.present(name).copy()
            return np.array(loaded.light.array_of(tensors[name]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies and pickles plain dicts of arrays, which keep their values."""
        return dict, (dict(self),)

    def __setitem__(self, name: str, array: npt.ArrayLike) -> None:
        self.assign({name: array})

    def assign(self, arrays: Mapping[str, npt.ArrayLike]) -> None:
        """Sets several weights at once; nothing is set if a value does not fit.

        Raises:
            OrtopsError: If there is no such weight, or it has another type or shape.
        """
        check_dict("constants", arrays)
        checked: dict[str, Array] = {}
        for name, array in arrays.items():
            present = self[name]
            what = f"constants '{name}'"
            checked[name] = fitted_array(what, array, present.dtype, present.shape).copy()
        self._loaded.set_constants(checked)

    def update(self, other: Any = (), /, **more: npt.ArrayLike) -> None:
        """Sets several weights at once, like `assign`."""
        self.assign({**dict(other), **more})

    def __delitem__(self, name: str) -> None:
        raise OrtopsError(f"constants '{name}': a weight cannot be removed; set it")

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors())

    def __len__(self) -> int:
        return len(self._tensors())

    def __contains__(self, name: object) -> bool:
        return name in self._tensors()

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(t.dims)}" for name, t in self._tensors().items())
        return f"Constants({shapes})"

    def _tensors(self) -> dict[str, onnx.TensorProto]:
        """Returns the initializers of floating-point numbers that are not among the variables."""
        loaded = self._loaded
        known = loaded.execution.variables.keys() - set(loaded.usage.constants)
        return {
            tensor.name: tensor
            for tensor in initializers(loaded.proto, initialization=False)
            if tensor.data_type in _FLOATS and tensor.name not in known
        }

    @staticmethod
    def _check_known(name: str, tensors: Mapping[str, onnx.TensorProto]) -> None:
        if name not in tensors:
            raise UnknownVariableError(
                f"constants: there is no weight '{name}' that is not trained; "
                + did_you_mean(name, tensors)
            )
