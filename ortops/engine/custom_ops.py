"""Adagrad, Adam and Momentum as Python custom ops of stock onnxruntime.

`register_custom_ops` registers the optimizer operators of ai.onnx.preview.training for a session
through onnxruntime-extensions. The kernels run the update rules of `ortops.optimizers`.

Limitations of the platform, and how they are handled:

* A Python op has a fixed number and fixed types of inputs. There is a kernel for one-tensor nodes
  with all attributes, for each of the four combinations of float and double for R and X.
  `ortops.InferenceSession` converts any valid model to this form first.
* Registering another op in a domain breaks running sessions, so the whole domain is registered
  when the first session needs it.
* Float attributes are passed to a kernel as text with six significant digits. A node for which
  `survives_as_text` is False must not run on these kernels.
* An exception that escapes from a Python op terminates the process. Kernels therefore catch every
  exception, set their outputs to NaN, and record the error for the run that it belongs to
  (`errors_of_run`, `take_errors`). A plain `onnxruntime.InferenceSession` shows only the NaN.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ortops._common.numbers import Array
from ortops._common.uninterrupted import finished_at_exit, run_uninterrupted, wait_for_threads
from ortops.errors import KernelError
from ortops.optimizers import OPERATORS

DOMAIN = "ai.onnx.preview.training"

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""The element types that R and the tensors of a node may have, independently of each other."""


_PROTOBUF = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"

logger = logging.getLogger("ortops")

Nodes: TypeAlias = Mapping[str, Sequence[str]]
"""The names of a model's nodes by operator."""

# The number of elements that a rule processes at a time, so that its temporaries stay in the cache.
_BLOCK = 2**17

_registration = threading.Lock()
_registered: weakref.WeakSet[Any] = weakref.WeakSet()


@finished_at_exit
def register_custom_ops(sess_options: Any) -> None:
    """Registers Python kernels for Adagrad, Adam and Momentum nodes on session options.

    Each node must have a single tensor to optimize and all attributes, as in the step graphs that
    ortops writes. `ortops.InferenceSession` accepts any valid node.

    A plain `onnxruntime.InferenceSession` cannot raise the errors of a kernel. If a kernel fails,
    for example because shapes differ, the outputs are NaN, and `take_errors` returns the reason.
    Nor can it be interrupted by Ctrl-C: a KeyboardInterrupt raised in a kernel terminates the
    process. `ortops.InferenceSession` raises both; with a plain session, use `errors_of_run`.

    The first call imports onnxruntime_extensions, of which not every system has a wheel. It is safe
    to call this several times with the same options, or from several threads.

    Args:
        sess_options: An `onnxruntime.SessionOptions`.

    Raises:
        KernelError: If onnxruntime_extensions cannot be imported, or other code has registered
            Python kernels for the domain.

    Example:
        >>> import onnxruntime
        >>> options = onnxruntime.SessionOptions()
        >>> register_custom_ops(options)
    """
    with _registration:
        if sess_options not in _registered:
            # All kernels in one library, because none can be added to it later.
            sess_options.register_custom_ops_library(run_uninterrupted(_library))
            _registered.add(sess_options)


def are_available() -> bool:
    """Whether onnxruntime_extensions can be imported, without which there are no Python kernels.

    If it cannot, the log says so once.

    Example:
        >>> are_available()
        True
    """
    try:
        run_uninterrupted(_extensions)
    except KernelError as error:
        _log_once(
            f"{error.__cause__}; Adagrad, Adam and Momentum nodes run as standard operators, with "
            "equal results up to rounding"
        )
        return False
    return True


def survives_as_text(value: float) -> bool:
    """Whether six significant digits preserve a float attribute, so that a kernel can receive it.

    Args:
        value: The attribute, which is rounded to float32.

    Returns:
        Whether text with six significant digits converts to the same float32.

    Example:
        >>> survives_as_text(0.999), survives_as_text(0.9999999)
        (True, False)
    """
    with np.errstate(over="ignore"):
        exact = np.float32(value)
        return bool(np.float32(float(f"{exact:.6g}")) == exact)


def _library() -> str:
    """Registers the domain's kernels unless they already are; returns the library's path."""
    extensions = _extensions()
    # Atexit handlers run in reverse order, and this one must run before the extension's, which
    # removes the kernels.
    atexit.unregister(wait_for_threads)
    atexit.register(wait_for_threads)
    _keep_freed_memory()
    # The flag is an attribute of the extension, so that it survives a reload of this module.
    if not getattr(extensions, "_has_ortops_kernels", False):
        for other in extensions._ocos.Opdef._odlist.values():
            if other.op_type.startswith(f"{DOMAIN}::"):
                raise KernelError(
                    f"{other.op_type}: other code has already registered a Python kernel, and "
                    "there can be only one per process; remove that registration, or run optimizer "
                    'nodes as standard operators with kernels="onnx"'
                )
        extensions._has_ortops_kernels = True
        types = {
            np.dtype(np.float32): extensions.PyCustomOpDef.dt_float,
            np.dtype(np.float64): extensions.PyCustomOpDef.dt_double,
        }
        attribute_types = {
            float: extensions.PyCustomOpDef.dt_float,
            str: extensions.PyCustomOpDef.dt_string,
        }
        for name, operator in OPERATORS.items():
            attributes = {
                attribute: attribute_types[kind]
                for attribute, kind in operator.attribute_types.items()
            }
            for r_type in DTYPES:
                for x_type in DTYPES:
                    states = len(operator.states)
                    extensions.onnx_op(
                        op_type=f"{DOMAIN}::{name}",
                        inputs=[
                            types[r_type],
                            extensions.PyCustomOpDef.dt_int64,
                            *[types[x_type]] * (2 + states),
                        ],
                        outputs=[types[x_type]] * (1 + states),
                        attrs=attributes,
                    )(_kernel(name))
    return str(extensions.get_library_path())


def _extensions() -> Any:
    """Imports onnxruntime_extensions, which is not installed where it has no wheels.

    Raises:
        KernelError: If it cannot be imported.
    """
    try:
        with _unchanged_environment():
            import onnxruntime_extensions as extensions
    except (ImportError, OSError) as error:
        raise KernelError(
            f"Python kernels need onnxruntime-extensions, which cannot be imported ({error}); "
            "pip install onnxruntime-extensions, or run optimizer nodes as standard operators with "
            'kernels="onnx" or ortops.lower'
        ) from error
    return extensions


@functools.cache
def _log_once(message: str) -> None:
    logger.warning("%s", message)


@contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Undoes the extension's change to the environment, which slows protobuf in child processes."""
    before = os.environ.get(_PROTOBUF)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_PROTOBUF, None)
        else:
            os.environ[_PROTOBUF] = before


def _keep_freed_memory() -> None:
    """Makes the C library reuse the memory of a kernel's temporaries.

    By default, glibc returns large blocks to the system and gets them back page by page, zeroed,
    which takes longer than the kernels themselves. It keeps blocks up to the size of the largest
    one ever freed, if that is at most 32 MiB. This array is never accessed, so it costs nothing.
    """
    np.empty(2**25 - 2**16, np.uint8)


# ------------------------------------------------------------------------------------- kernels


class _Output:
    """The result of a kernel, which the extension reads without converting it to a list.

    The extension reads ``shape`` and ``flatten().tolist()``, which may return a buffer.
    """

    def __init__(self, array: Array) -> None:
        self.shape = array.shape
        self._array = array

    def flatten(self) -> _Output:
        return self

    def tolist(self) -> Array:
        return self._array


def _kernel(name: str) -> Callable[..., tuple[_Output, ...]]:
    """Returns the kernel of an operator, which never raises."""

    def kernel(r: Array, t: Array, *tensors: Array, **attributes: Any) -> tuple[_Output, ...]:
        try:
            outputs = _update(name, r, t, tensors, attributes)
        except BaseException as error:
            _remember(_Failure(name, _shapes(name, r, t, tensors), error))
            x, _, *states = tensors
            outputs = tuple(np.full_like(array, np.nan) for array in (x, *states))
        return tuple(_Output(array) for array in outputs)

    return kernel


def _update(
    name: str, r: Array, t: Array, tensors: tuple[Array, ...], attributes: dict[str, Any]
) -> tuple[Array, ...]:
    """Applies the rule of an operator in place; the extension passes copies of the tensors."""
    x, _, *states = tensors
    if r.shape or t.shape or any(array.shape != x.shape for array in tensors):
        raise KernelError(
            f"shape mismatch: {_shapes(name, r, t, tensors)};"
            " R and T must be scalars (0-d), and all other shapes equal"
        )
    rule = OPERATORS[name].rule
    exact = {
        key: float(np.float32(value)) if isinstance(value, float) else value
        for key, value in attributes.items()
    }
    flat = [array.reshape(-1) for array in tensors]
    targets = [flat[0], *flat[2:]]
    with np.errstate(all="ignore"):  # inf and NaN are regular values, as in any other kernel
        for start in range(0, x.size, _BLOCK):
            block = slice(start, start + _BLOCK)
            results = rule(r, t, *(array[block] for array in flat), **exact)
            for target, result in zip(targets, results, strict=True):
                target[block] = result
    return (x, *states)


def _shapes(name: str, r: Array, t: Array, tensors: tuple[Array, ...]) -> str:
    """Returns the inputs of a node with their shapes, as messages show them."""
    inputs = ("R", "T", "X", "G", *OPERATORS[name].states)
    return ", ".join(
        f"{letter} {array.shape}" for letter, array in zip(inputs, (r, t, *tensors), strict=True)
    )


# -------------------------------------------------------------------------------------- errors


@dataclass(frozen=True)
class _Failure:
    """An error in a kernel."""

    operator: str
    shapes: str
    error: BaseException

    def to_exception(self, nodes: Nodes) -> BaseException:
        """Returns the exception to raise: a KernelError, or KeyboardInterrupt and the like."""
        if not isinstance(self.error, Exception):
            return self.error
        names = [repr(name) for name in nodes.get(self.operator, ())]
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        if len(names) == 1:
            where = f"{self.operator} node {shown}"
        elif names:
            where = f"{self.operator} node (one of {shown})"
        else:
            where = f"{self.operator} node (name unknown)"
        if isinstance(self.error, KernelError):
            return KernelError(f"{where}: {self.error}")
        exception = KernelError(
            f"{where}: the update rule raised {type(self.error).__name__}: {self.error},"
            f" for {self.shapes}; the outputs of this run are invalid"
        )
        exception.__cause__ = self.error
        return exception


_errors = threading.Lock()  # guards the three below
_unclaimed: deque[_Failure] = deque(maxlen=16)
_by_thread: dict[int, ErrorRecorder] = {}
_anywhere: set[ErrorRecorder] = set()


def _remember(failure: _Failure) -> None:
    """Records a failure for the run that it belongs to, or, if that is unknown, for all runs."""
    error = failure.error
    if error.__traceback__ is not None:
        # The frames of the kernel and its callees would keep the tensors alive.
        error = error.with_traceback(error.__traceback__.tb_next)
        traceback.clear_frames(error.__traceback__)
    with _errors:
        recorder = _by_thread.get(threading.get_ident())
        if recorder is not None:
            recorder.failures.append(failure)
        elif recorders := _anywhere or set(_by_thread.values()):
            for recorder in recorders:
                recorder.failures.append(failure)
        else:
            _unclaimed.append(failure)


class ErrorRecorder:
    """Collects the errors of the kernels of one run.

    onnxruntime runs kernels on the thread that calls ``run``, except in parallel execution mode
    and in ``run_async``. In these cases the run that a kernel belongs to is unknown, and an error
    is reported to every recorder with ``anywhere=True``.

    Args:
        nodes: The names of the model's nodes by operator, for messages.
        anywhere: Whether kernels may run on threads other than the one that calls `start`.

    Example:
        >>> recorder = ErrorRecorder({"Adam": ["update"]})
        >>> recorder.start()
        >>> recorder.finish() is None
        True
    """

    def __init__(self, nodes: Nodes | None = None, *, anywhere: bool = False) -> None:
        self.nodes: Nodes = nodes or {}
        self.anywhere = anywhere
        self.failures: list[_Failure] = []
        self._thread = 0
        self._outer: ErrorRecorder | None = None

    def start(self) -> None:
        """Starts recording. A recorder can be used for one run only."""
        with _errors:
            if self.anywhere:
                _anywhere.add(self)
            else:
                self._thread = threading.get_ident()
                self._outer = _by_thread.get(self._thread)
                _by_thread[self._thread] = self

    def finish(self) -> BaseException | None:
        """Stops recording.

        Returns:
            The first error, for the caller to raise, or None. It is a KernelError, or a
            KeyboardInterrupt or SystemExit that was raised while a kernel ran.
        """
        with _errors:
            if self.anywhere:
                _anywhere.discard(self)
            elif self._outer is not None:
                _by_thread[self._thread] = self._outer
            else:
                _by_thread.pop(self._thread, None)
        if not self.failures:
            return None
        first, *others = self.failures
        exception = first.to_exception(self.nodes)
        if others:
            exception.add_note(f"{len(others)} more kernel calls failed in this run")
        return exception


@contextmanager
def errors_of_run(nodes: Nodes | None = None, *, anywhere: bool = False) -> Iterator[None]:
    """Raises errors of kernels that ran in a ``with`` block at the end of the block.

    An exception raised by a signal handler during a kernel, including Ctrl-C, terminates the
    process, because the extension runs its own Python code around the kernel.
    `ortops.InferenceSession` runs kernels in another thread, where signal handlers do not run.

    Args:
        nodes: The names of the model's nodes by operator, for messages.
        anywhere: Whether kernels may run on other threads, as in parallel execution mode.

    Raises:
        KernelError: If a kernel failed.

    Example:
        >>> with errors_of_run({"Adam": ["update"]}):
        ...     pass  # session.run(...)
    """
    recorder = ErrorRecorder(nodes, anywhere=anywhere)
    recorder.start()
    try:
        yield
    finally:
        exception = recorder.finish()
    if exception is not None:
        raise exception


def take_errors() -> list[BaseException]:
    """Returns and clears the errors of kernels in plain sessions since the last call.

    In a plain `onnxruntime.InferenceSession`, a failed kernel only sets its outputs to NaN. The
    last 16 errors are kept.

    Example:
        >>> take_errors()
        []
    """
    with _errors:
        failures = list(_unclaimed)
        _unclaimed.clear()
    return [failure.to_exception({}) for failure in failures]
