"""Packages whose files are imported when a name of them is first used.

There are some 80 losses, optimizers and metrics, and a program uses a few. To define the others
would take a tenth of the time in which a session of a small model starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Family(Generic[_T]):
    """The files of a package, and the classes in them.

    Args:
        package: The name of the package.
        files: The names that each file lists in its ``__all__``, separated by spaces.
        prepare: Called with each class before it is first used.

    Attributes:
        names: All these names.
    """

    def __init__(
        self,
        package: str,
        files: Mapping[str, str],
        prepare: Callable[[type[_T]], object] = lambda _: None,
    ) -> None:
        self._package, self._prepare = package, prepare
        self._files = {file: names.split() for file, names in files.items()}
        self._file_of = {name: file for file, names in self._files.items() for name in names}
        self.names = list(self._file_of)
        self._found: dict[str, Any] = {}

    def load(self, name: str) -> Any:
        """Returns what has a name, or the module of a file.

        Raises:
            AttributeError: If there is nothing of that name.
        """
        if name in self._found:
            return self._found[name]
        if name not in self._file_of and name not in self._files:
            raise AttributeError(f"module '{self._package}' has no attribute '{name}'")
        found: Any = import_module(f"{self._package}.{self._file_of.get(name, name)}")
        if name in self._file_of:
            found = getattr(found, name)
        if isinstance(found, type):
            self._prepare(found)
        return self._found.setdefault(name, found)

    def classes(self) -> Mapping[str, type[_T]]:
        """Returns the classes, whose names begin with a capital letter, in their order."""
        names = sorted((name for name in self.names if name[0].isupper()), key=str.lower)
        return _Classes(self, names)


class _Classes(Mapping[str, type[_T]]):
    """The classes of a family by name."""

    def __init__(self, family: Family[_T], names: list[str]) -> None:
        self._family, self._names = family, dict.fromkeys(names)

    def __getitem__(self, name: str) -> type[_T]:
        if name not in self._names:
            raise KeyError(name)
        found: type[_T] = self._family.load(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Later(Mapping[str, _T]):
    """A mapping that is made when it is first read.

    Args:
        make: Makes it.
    """

    def __init__(self, make: Callable[[], Mapping[str, _T]]) -> None:
        self._make = make

    @cached_property
    def _made(self) -> Mapping[str, _T]:
        return self._make()

    def __getitem__(self, name: str) -> _T:
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)
