"""Delays the import of SymPy until it is used.

onnx-ir imports SymPy for arithmetic with symbolic dimensions, which ortops does not use. The import
takes 0.3 s, a third of the time in which a session of a small model starts, and 32 MB.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

__all__ = ["delay_sympy"]

_READER = "onnx_ir._symbolic_shapes"
"""The only module of onnx-ir that uses SymPy while it is imported."""


class _Finder:
    """Finds SymPy and its reader for onnx-ir, and lets them load when an attribute is read."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the specification of a delayed module; None for all other modules."""
        if name not in ("sympy", _READER) or "onnx_ir" not in sys.modules:
            return None
        if name == _READER:  # imported last
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


def delay_sympy() -> None:
    """Delays the import of SymPy by onnx-ir, unless one of them is imported already.

    Python before 3.11.9, and 3.12 before 3.12.3, may fail if two threads are the first to use a
    delayed module (https://github.com/python/cpython/issues/114763), so nothing is delayed there.
    """
    version = sys.version_info[:3]
    safe = version >= (3, 12, 3) or (3, 11, 9) <= version < (3, 12)
    if safe and not {"onnx_ir", "sympy"} & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())
