"""Delays the import of SymPy until onnx-ir uses it.

onnx-ir imports SymPy for arithmetic with symbolic dimensions, which ortops does not use. The import
takes 0.3 s, a third of the time in which a session of a small model starts, and 32 MB.

`importlib.util.LazyLoader` would leave an unfinished module in `sys.modules`. Threads that are the
first to use it can then wait for each other, and before Python 3.11.9 and 3.12.3 they can fail. So
only the references that onnx-ir holds are delayed here: every import of SymPy is Python's own.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

__all__ = ["delay_sympy"]

_PACKAGE = "onnx_ir"
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


class _Finder:
    """Finds the module of onnx-ir that is loaded in this way."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of that module; None for all other modules."""
        if name != _USER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def delay_sympy() -> None:
    """Delays the import of SymPy by onnx-ir, unless onnx-ir is imported already."""
    if _PACKAGE not in sys.modules:
        # it stays there: another thread may be walking through this list
        sys.meta_path.insert(0, _Finder())
