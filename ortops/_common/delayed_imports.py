"""Delays the import of SymPy until onnx-ir uses it, and signals while onnxruntime is imported.

onnx-ir imports SymPy for arithmetic with symbolic dimensions, which ortops does not use. The import
takes 0.3 s, a third of the time in which a session of a small model starts, and 32 MB.

`importlib.util.LazyLoader` would leave an unfinished module in `sys.modules`. Threads that are the
first to use it can then wait for each other, and before Python 3.11.9 and 3.12.3 they can fail. So
only the references that onnx-ir holds are delayed here: every import of SymPy is Python's own.

A KeyboardInterrupt inside the initialization of onnxruntime's extension would become an
ImportError, and Python could not initialize the extension again. So handlers of signals run after
the import.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

_PACKAGE = "onnx_ir"
_RUNTIME = "onnxruntime"
_USER = "onnx_ir._core"
"""The module of onnx-ir that imports SymPy, and uses it in functions only."""

_PARSER = "_symbolic_shapes"
"""The other one: it uses SymPy while it is imported, and `_core` uses it in functions only."""


class _Delayed(ModuleType):
    """Stands for a module, and imports it when an attribute is read. It is not in `sys.modules`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def _import(name: str, *args: Any, **kwargs: Any) -> ModuleType:
    """Does what an import statement does, but delays SymPy."""
    return _Delayed(name) if name == "sympy" else builtins.__import__(name, *args, **kwargs)


class _Loader(SourceFileLoader):
    """Loads a module whose import statements delay SymPy and its parser."""

    def exec_module(self, module: ModuleType) -> None:
        # `from onnx_ir import _symbolic_shapes` imports only what is not yet an attribute
        setattr(sys.modules[_PACKAGE], _PARSER, _Delayed(f"{_PACKAGE}.{_PARSER}"))
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


class _SignalsLater(SourceFileLoader):
    """Loads a module whose import no signal handler interrupts."""

    def exec_module(self, module: ModuleType) -> None:
        with _signals_later():
            super().exec_module(module)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Calls the handlers of signals that arrive within the block after it."""
    if threading.current_thread() is not threading.main_thread():  # which runs no handlers
        yield
        return
    arrived: dict[int, FrameType | None] = {}
    before = {int(n): h for n in signal.valid_signals() if callable(h := signal.getsignal(n))}
    for number in before:
        signal.signal(number, arrived.__setitem__)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for given, frame in arrived.items():
            before[given](given, frame)


class _Finder:
    """Finds a module that is loaded in another way."""

    def __init__(self, name: str, loader: type[SourceFileLoader]) -> None:
        self.name, self.loader = name, loader

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of that module; None for all other modules."""
        if name != self.name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = self.loader(spec.loader.name, spec.loader.path)
        return spec


def delay_sympy() -> None:
    """Delays the import of SymPy by onnx-ir, unless onnx-ir is imported already."""
    if _PACKAGE not in sys.modules:
        # it stays there: another thread may be walking through this list
        sys.meta_path.insert(0, _Finder(_USER, _Loader))


def delay_signals() -> None:
    """Delays the handlers of signals while onnxruntime is imported, unless it is already."""
    if _RUNTIME not in sys.modules:
        sys.meta_path.insert(0, _Finder(_RUNTIME, _SignalsLater))
