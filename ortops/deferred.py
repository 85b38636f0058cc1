"""Imports that wait until they are needed."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["import_without"]


def import_without(name: str, costly: str) -> None:
    """Imports a module, but not the costly one that it imports and may never use.

    The module gets a stand-in, which imports the costly one when something of it is first used.
    What the module takes from the stand-in while it is imported may be called later, no more; one
    that needs more is imported as it is.

    Args:
        name: The module. Nothing happens if it has been imported.
        costly: What it imports. It is imported as it is if something else has done so before.
    """
    if name in sys.modules or costly in sys.modules:
        return
    stand_in = _StandIn(costly)
    sys.modules[costly] = stand_in
    before = set(sys.modules)
    try:
        importlib.import_module(name)
    except Exception:  # of any kind: it did more with the stand-in than that can do
        for imported in set(sys.modules) - before:
            if imported.startswith(name):
                del sys.modules[imported]
    finally:
        stand_in.leave()


class _StandIn(types.ModuleType):
    """Stands in for a module that has not been imported."""

    def leave(self) -> None:
        """Makes room for the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # asked for by the import system
            raise AttributeError(attribute)
        if sys.modules.get(self.__name__) is not self:
            return getattr(importlib.import_module(self.__name__), attribute)
        return _later(self.__name__, attribute)


def _later(module: str, attribute: str) -> Callable[..., Any]:
    """Returns a function that imports a module when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(*args, **kwargs)

    return call
