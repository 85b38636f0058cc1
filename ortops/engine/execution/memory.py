"""The memory of variables: numpy arrays, or memory of an execution provider's device."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime

from ortops._common.numbers import Array, overwrite
from ortops.engine.execution.values import Values
from ortops.errors import KernelError, UnsupportedError

_DEVICES = {
    "CANNExecutionProvider": "cann",
    "CUDAExecutionProvider": "cuda",
    "DmlExecutionProvider": "dml",
    "TensorrtExecutionProvider": "cuda",
    "WebGpuExecutionProvider": "webgpu",
}
"""Providers whose device memory Python can write, and onnxruntime's names of these devices."""

_SHARED = 2**20
"""The number of elements from which two threads write faster than one."""


@dataclass(frozen=True)
class Device:
    """A device with memory of its own.

    Attributes:
        kind: onnxruntime's name of the device type.
        number: The index of the device.
    """

    kind: str
    number: int = 0


class DeviceArray:
    """A tensor in the memory of a device.

    Args:
        value: The initial value; copied.
        device: The device.

    Attributes:
        dtype: The dtype.
        shape: The shape.
        value: The OrtValue.
        is_here: Whether the device is the CPU, as in tests.

    Raises:
        UnsupportedError: If the device has no memory, or Python cannot write the dtype to it.
    """

    def __init__(self, value: Array, device: Device) -> None:
        if value.dtype.kind == "V":  # bfloat16, which numpy lacks
            raise UnsupportedError(
                f"providers: variables of type {value.dtype} cannot be written to memory of a "
                f"'{device.kind}' device from Python; use providers=['CPUExecutionProvider']"
            )
        self.dtype, self.shape = value.dtype, value.shape
        copied = np.array(value, order="C")
        try:
            self.value = onnxruntime.OrtValue.ortvalue_from_numpy(
                copied, device.kind, device.number
            )
        except Exception as error:  # onnxruntime's classes have no common base class
            raise UnsupportedError(
                f"providers: device {device.number} of type '{device.kind}' has no memory for "
                f"variables: {str(error).strip().rstrip('.')}; use a build of onnxruntime and a "
                "machine that have the provider, or providers=['CPUExecutionProvider']"
            ) from error

        self.is_here = device.kind == "cpu"

    @classmethod
    def around(cls, output: Any, device: Device) -> DeviceArray:
        """Returns an array of a device whose memory onnxruntime has allocated for an output."""
        result = cls.__new__(cls)
        value = result.value = onnxruntime.OrtValue(output)
        result.shape = tuple(value.shape())
        result.dtype = onnx.helper.tensor_dtype_to_np_dtype(value.element_type())
        result.is_here = device.kind == "cpu"
        return result

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


Memory: TypeAlias = Array | DeviceArray
"""The memory of a tensor."""


def device_of(providers: Sequence[Any]) -> Device | None:
    """Returns the device of the first available provider; None for numpy's memory.

    Args:
        providers: Names of providers, or pairs of a name and options, as for onnxruntime.
    """
    available = set(onnxruntime.get_available_providers())
    for provider in providers:
        name, options = provider if isinstance(provider, tuple) else (provider, {})
        if name in available:
            kind = _DEVICES.get(name)
            return None if kind is None else Device(kind, int(options.get("device_id", 0)))
    return None


def hold(values: Mapping[str, Array], name: str, device: Device | None) -> Memory:
    """Returns memory for a value: a copy on a device, or memory of numpy that is not written yet.

    Args:
        values: The values by name.
        name: The name of the value.
        device: The device; None for numpy's memory.

    Raises:
        UnsupportedError: If the device has no memory for it.
    """
    if device is not None:
        return DeviceArray(values[name], device)
    stored = values.stored(name) if isinstance(values, Values) else None
    if stored is not None:
        return np.empty(stored.shape.numpy(), stored.dtype.numpy())
    value = values[name]
    return np.empty(value.shape, value.dtype)


def ort_value(memory: Memory) -> onnxruntime.OrtValue:
    """Returns an OrtValue that shares the memory."""
    if isinstance(memory, DeviceArray):
        return memory.value
    if memory.dtype.kind == "V" and memory.itemsize == 2:  # bfloat16
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            memory.view(np.uint16), onnx.TensorProto.BFLOAT16
        )
    return onnxruntime.OrtValue.ortvalue_from_numpy(memory)


def fetch(memory: Memory) -> Array:
    """Returns the array in numpy's memory itself, or a copy of device memory."""
    if not isinstance(memory, DeviceArray):
        return memory
    found: Array = memory.value.numpy()
    return found.copy()  # it is a view if the device is the CPU


def put(memory: Memory, value: Array) -> None:
    """Writes a value of the same type and shape into memory (see `overwrite`).

    Raises:
        KernelError: If writing to the device fails.
    """
    if not isinstance(memory, DeviceArray):
        overwrite(memory, value)
        return
    whole = np.ascontiguousarray(np.broadcast_to(value, memory.shape), memory.dtype)
    try:
        memory.value.update_inplace(whole.reshape(memory.shape))
    except Exception as error:  # as above
        raise KernelError(
            f"onnxruntime: a variable could not be written to its device: {str(error).strip()}"
        ) from error


def _put_value(memory: Memory, values: Mapping[str, Array], name: str) -> None:
    """Writes a value into memory; from a file straight into the memory of numpy."""
    stored = values.stored(name) if isinstance(values, Values) else None
    if stored is None or isinstance(memory, DeviceArray):
        put(memory, values[name])
    else:
        stored.fill(memory)


def put_all(targets: Mapping[str, Memory], values: Mapping[str, Array]) -> None:
    """Writes values into memory by name; two threads share the work if it is large.

    Most of the time is spent on the first access to memory pages.

    Raises:
        BaseException: The first exception raised by reading or writing a value.
    """
    pending = iter(list(targets))  # each thread takes the next one
    failures: list[BaseException] = []

    def work() -> None:
        for name in pending:
            if failures:
                break
            try:
                _put_value(targets[name], values, name)
            except BaseException as error:
                failures.append(error)

    helpers: list[threading.Thread] = []
    if sum(target.size for target in targets.values()) >= _SHARED:
        helper = threading.Thread(target=work, name="ortops", daemon=True)
        with contextlib.suppress(RuntimeError):  # no new threads, at the end of the interpreter
            helper.start()
            helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def give_back() -> None:
    """Returns memory that C's allocator holds to the system, after much memory was freed.

    It takes a few milliseconds, and does nothing if the allocator is not that of glibc.
    """
    if trim := _trim():
        trim(0)


@functools.cache
def _trim() -> Callable[[int], object] | None:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # macOS and musl, Windows
        return None
    return trim
