"""Compiles the intermediate code of updates with LLVM, as llvmlite wraps it, in this process.

That takes about a tenth of a second for each formula, so machine code is not kept in files.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import mmap
import operator
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ortops._common.numbers import Array
from ortops._common.optional import missing_package, optional_module
from ortops.engine.execution.translation import Translation
from ortops.errors import OrtopsError

Function: TypeAlias = Callable[[int, int], None]
"""A compiled formula: see `Translation.name` for its arguments. It runs without the GIL.

It is a C function, so Python runs no signal handlers within a call."""

_OPAQUE_POINTERS = (0, 45)  # the first version of llvmlite that reads the intermediate code


def has_compiler() -> bool:
    """Whether llvmlite is installed, which is not imported."""
    return importlib.util.find_spec("llvmlite") is not None


@functools.cache
def compiled(translation: Translation) -> Function:
    """Compiles a formula, once in a process.

    Raises:
        OrtopsError: If llvmlite cannot be imported or is too old, memory must not be executed, or
            LLVM fails.
    """
    binding = _compiler()
    try:
        return _compiled(binding, translation)
    except RuntimeError as error:
        raise OrtopsError(
            f"kernels='compiled': LLVM cannot compile an update ({str(error).strip()}); use "
            "kernels='onnx'"
        ) from error


def _compiled(binding: Any, translation: Translation) -> Function:
    host = {
        "cpu": binding.get_host_cpu_name(),
        "features": binding.get_host_cpu_features().flatten(),
        "opt": 3,
    }
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(**host)
    module = binding.parse_assembly(translation.text)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.loop_unrolling = True
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    # The engine owns its module and its machine.
    engine = binding.create_mcjit_compiler(module, target.create_target_machine(**host))
    engine.finalize_object()
    address = engine.get_function_address(translation.name)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(address)
    # The function keeps the engine alive; its attributes are not declared.
    function.engine = engine  # type: ignore[attr-defined]
    return function


@functools.cache
def _compiler() -> Any:
    """Returns llvmlite's module, initialized.

    Raises:
        OrtopsError: If it cannot be imported or is too old, or memory must not be executed.
    """
    who, instead = "kernels='compiled'", "use kernels='onnx'"
    llvmlite = optional_module(who, "llvmlite", "fast", instead=instead)
    binding = optional_module(who, "llvmlite.binding", "fast", instead=instead)
    version = tuple(int(part) for part in llvmlite.__version__.split(".")[:2])
    if version < _OPAQUE_POINTERS:
        found = f"llvmlite 0.45 or later, got {llvmlite.__version__}"
        raise missing_package(who, found, "fast", instead)
    if not _may_execute():
        raise OrtopsError(
            "kernels='compiled': the system does not let this process execute memory that it has "
            "written; use kernels='onnx'"
        )
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def _may_execute() -> bool:
    """Whether memory that was written may be made executable, as LLVM does without looking.

    Services that run with ``MemoryDenyWriteExecute``, for example, must not do that. Their process
    would be killed when it runs the code.
    """
    if os.name == "nt":
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[:] = bytes(mmap.PAGESIZE)
        start = ctypes.c_char.from_buffer(page)
        executable = mmap.PROT_READ | mmap.PROT_EXEC
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed: int = libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), executable)
        del start
        return failed == 0


class Call:
    """A call of compiled code on arrays.

    Args:
        function: The code.
        arrays: Contiguous arrays, as `Translation.name` says; None for those that each call gives.
        size: The number of elements.

    Attributes:
        native: The call as a C function without arguments, if all arrays are given.
    """

    def __init__(self, function: Function, arrays: Sequence[Array | None], size: int) -> None:
        self._function, self._size = function, size
        self._arrays = arrays  # which must stay alive
        found = [0 if array is None else array.ctypes.data for array in arrays]
        self._table = np.array(found, np.uintp)
        self._start: int = self._table.ctypes.data
        self._given = [index for index, array in enumerate(arrays) if array is None]
        self.native = functools.partial(function, self._start, size)

    def __call__(self, given: Sequence[Array] = ()) -> None:
        """Runs the code; see the class for the arrays that are given."""
        for index, array in zip(self._given, given, strict=True):
            self._table[index] = array.ctypes.data
        self._function(self._start, self._size)


def run_in_a_row(calls: Sequence[Call], finish: Callable[[], object]) -> None:
    """Makes calls without further arguments, and calls a C function.

    Python runs signal handlers between its own instructions only. Here, C functions are called by C
    functions, so no handler runs before all of them have ended.
    """
    functions: list[Callable[[], object]] = [*(call.native for call in calls), finish]
    deque(map(operator.call, functions), maxlen=0)
