"""Adagrad, Adam and Momentum as Python custom ops of stock onnxruntime.

`register_custom_ops` makes the optimizer operators of ai.onnx.preview.training known to a
session through onnxruntime-extensions. The kernels run the update rules of `ortops.optimizers`.

What the platform imposes, and what is done about it:

* A Python op has one arity and fixed types, so there is a kernel for one-tensor nodes with every
  attribute written out, in the four combinations of float and double for R and X.
  `ortops.InferenceSession` brings any legal model into this form first.
* Registering another op in a domain breaks the sessions that already run, so the whole domain is
  registered at once, when the first session needs it.
* Float attributes reach a kernel as text of six significant digits. A node for which
  `survives_as_text` does not hold must not be left to these kernels.
* An exception that leaves a Python op ends the process. None leaves a kernel here: the outputs
  become NaN and the error is remembered for the run that it belongs to (`errors_of_run`,
  `take_errors`). A plain `onnxruntime.InferenceSession` shows only the NaN.
"""

from __future__ import annotations

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
import numpy.typing as npt

from ortops.errors import KernelError
from ortops.optimizers import OPERATORS
from ortops.uninterrupted import run_uninterrupted

__all__ = [
    "DOMAIN",
    "DTYPES",
    "ErrorRecorder",
    "errors_of_run",
    "register_custom_ops",
    "survives_as_text",
    "take_errors",
]

DOMAIN = "ai.onnx.preview.training"

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
"""The element types that R and the tensors of a node may have, each on its own."""

Array: TypeAlias = npt.NDArray[Any]

_PROTOBUF = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"

Nodes: TypeAlias = Mapping[str, Sequence[str]]
"""The names of a model's nodes by operator."""

# Elements that a rule works on at a time: its inputs and temporaries stay in a core's cache.
_BLOCK = 2**17

_registration = threading.Lock()
_registered: weakref.WeakSet[Any] = weakref.WeakSet()


def register_custom_ops(sess_options: Any) -> None:
    """Makes sessions with these options run Adagrad, Adam and Momentum nodes.

    The nodes must have one tensor to optimize and every attribute written out; step graphs that
    ortops writes have. `ortops.InferenceSession` takes any legal node.

    A plain `onnxruntime.InferenceSession` cannot raise what goes wrong in a kernel: where one
    fails, for example because shapes differ, the outputs are NaN, and `take_errors` tells why.
    Nor can it be interrupted by Ctrl-C: an interrupt raised while Python runs inside it ends the
    process. `ortops.InferenceSession` raises both; around a plain session use `errors_of_run`.

    The first call imports onnxruntime_extensions. Calling twice with the same options, or from
    several threads, is harmless.

    Args:
        sess_options: An `onnxruntime.SessionOptions`.

    Example:
        >>> import onnxruntime
        >>> options = onnxruntime.SessionOptions()
        >>> register_custom_ops(options)
    """
    with _registration:
        if sess_options not in _registered:
            # Whole: a library with some of the kernels could not get the others later.
            sess_options.register_custom_ops_library(run_uninterrupted(_library))
            _registered.add(sess_options)


def survives_as_text(value: float) -> bool:
    """Tells whether a kernel gets a float attribute as it is in the file.

    Args:
        value: The attribute; its float32 value counts.

    Returns:
        Whether six significant digits give the same float32 again.

    Example:
        >>> survives_as_text(0.999), survives_as_text(0.9999999)
        (True, False)
    """
    with np.errstate(over="ignore"):
        exact = np.float32(value)
        return bool(np.float32(float(f"{exact:.6g}")) == exact)


def _library() -> str:
    """Registers the domain's kernels if that has not been done; returns the library's path."""
    with _environment_as_it_is():
        import onnxruntime_extensions as extensions

    _keep_freed_memory()
    # The mark is kept there, not here, so that it outlives a reload of this module.
    if not getattr(extensions, "_has_ortops_kernels", False):
        for other in extensions._ocos.Opdef._odlist.values():
            if other.op_type.startswith(f"{DOMAIN}::"):
                raise KernelError(
                    f"{other.op_type}: other code has registered a Python kernel for it, and a "
                    "process can have one; leave that registration out, or run optimizer nodes as "
                    'standard operators with kernels="onnx"'
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


@contextmanager
def _environment_as_it_is() -> Iterator[None]:
    """Undoes what the extension does to the environment: child processes got a slow protobuf."""
    before = os.environ.get(_PROTOBUF)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_PROTOBUF, None)
        else:
            os.environ[_PROTOBUF] = before


def _keep_freed_memory() -> None:
    """Makes the C library keep the memory of a kernel's temporaries for the next ones.

    glibc returns big blocks to the system, to get them back page by page, as zeros, which takes
    longer than the kernels themselves. It keeps blocks up to the size of the largest that was ever
    freed, if that is at most 32 MiB. This one is never touched, so it costs nothing.
    """
    np.empty(2**25 - 2**16, np.uint8)


# ------------------------------------------------------------------------------------- kernels


class _Output:
    """An array on its way out of a kernel, without the list that the extension would make of it.

    The extension asks for ``shape`` and ``flatten().tolist()`` and then reads a buffer.
    """

    def __init__(self, array: Array) -> None:
        self.shape = array.shape
        self._array = array

    def flatten(self) -> _Output:
        return self

    def tolist(self) -> Array:
        return self._array


def _kernel(name: str) -> Callable[..., tuple[_Output, ...]]:
    """Returns the kernel of an operator, out of which no exception comes."""

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
    """Applies the rule of an operator, in place: the extension hands over private copies."""
    x, _, *states = tensors
    if r.shape or t.shape or any(array.shape != x.shape for array in tensors):
        raise KernelError(
            f"the shapes do not fit: {_shapes(name, r, t, tensors)};"
            " R and T must be scalars (0-d) and the others of one shape"
        )
    rule = OPERATORS[name].rule
    exact = {
        key: float(np.float32(value)) if isinstance(value, float) else value
        for key, value in attributes.items()
    }
    flat = [array.reshape(-1) for array in tensors]
    targets = [flat[0], *flat[2:]]
    with np.errstate(all="ignore"):  # inf and NaN are values here, as in any other kernel
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
    """What went wrong in a kernel."""

    operator: str
    shapes: str
    error: BaseException

    def to_exception(self, nodes: Nodes) -> BaseException:
        """Returns what a run raises: a KernelError, or a request to stop as it is."""
        if not isinstance(self.error, Exception):
            return self.error
        names = [repr(name) for name in nodes.get(self.operator, ())]
        shown = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
        if len(names) == 1:
            where = f"{self.operator} node {shown}"
        elif names:
            where = f"{self.operator} node (one of {shown})"
        else:
            where = f"{self.operator} node (its name is not known)"
        if isinstance(self.error, KernelError):
            return KernelError(f"{where}: {self.error}")
        exception = KernelError(
            f"{where}: the update rule raised {type(self.error).__name__}: {self.error},"
            f" with {self.shapes}; the outputs of this run are not valid"
        )
        exception.__cause__ = self.error
        return exception


_errors = threading.Lock()  # guards the three below
_unclaimed: deque[_Failure] = deque(maxlen=16)
_by_thread: dict[int, ErrorRecorder] = {}
_anywhere: set[ErrorRecorder] = set()


def _remember(failure: _Failure) -> None:
    """Gives a failure to the run that it belongs to, or, if that cannot be told, to all of them."""
    error = failure.error
    if error.__traceback__ is not None:
        # The kernel's frame and those below it would keep the tensors alive.
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
    """Collects what goes wrong in the kernels of one run.

    onnxruntime runs kernels on the thread that calls ``run``, except in parallel execution mode
    and in ``run_async``. There a kernel cannot know its run: an error then reaches every recorder
    that listens ``anywhere``, among them that of its run.

    Args:
        nodes: The names of the model's nodes by operator, for messages.
        anywhere: Whether kernels may run on other threads than the one that calls `start`.

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
        """Begins to listen. A recorder serves one run."""
        with _errors:
            if self.anywhere:
                _anywhere.add(self)
            else:
                self._thread = threading.get_ident()
                self._outer = _by_thread.get(self._thread)
                _by_thread[self._thread] = self

    def finish(self) -> BaseException | None:
        """Stops listening.

        Returns:
            The first error, for the caller to raise, or None. It is a KernelError, or what asked
            the program to stop while a kernel ran (KeyboardInterrupt, SystemExit).
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
    """Raises, after the block, what went wrong in the kernels that ran in it.

    What a signal handler raises in a kernel, Ctrl-C's too, ends the process: the extension runs
    Python code of its own around it. `ortops.InferenceSession` runs kernels in another thread,
    where no handler runs.

    Args:
        nodes: The names of the model's nodes by operator, for messages.
        anywhere: Whether kernels may run on other threads: in parallel execution mode.

    Raises:
        KernelError: A kernel failed.

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
    """Returns what went wrong in kernels of plain sessions since the last call, and forgets it.

    A plain `onnxruntime.InferenceSession` shows a failed kernel as outputs that are NaN. The last
    16 errors are kept.

    Example:
        >>> take_errors()
        []
    """
    with _errors:
        failures = list(_unclaimed)
        _unclaimed.clear()
    return [failure.to_exception({}) for failure in failures]
