"""Values of variables by name, in memory or in a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ortops._common.numbers import Array
from ortops.graph.files.held_file import InFile


class Values(Mapping[str, Array]):
    """Values that are read on access, so that they are not all in memory at once.

    Args:
        read: A function for each name that returns the value.
        stored: Those that are in a file as they are in memory.

    Attributes:
        read: As given.
    """

    def __init__(
        self, read: Mapping[str, Callable[[], Array]], stored: Mapping[str, InFile] | None = None
    ) -> None:
        self.read, self._stored = read, stored or {}

    def __getitem__(self, name: str) -> Array:
        return self.read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.read)

    def __len__(self) -> int:
        return len(self.read)

    def __contains__(self, name: object) -> bool:
        return name in self.read

    def stored(self, name: str) -> InFile | None:
        """Returns the data of a value that is in a file as it is in memory; otherwise None."""
        return self._stored.get(name)

    def joined(self, read: Mapping[str, Callable[[], Array]]) -> Values:
        """Returns these values and others."""
        kept = {name: each for name, each in self._stored.items() if name not in read}
        return Values({**self.read, **read}, kept)

    def without(self, names: Collection[str]) -> Values:
        """Returns all values except some."""
        read = {name: read for name, read in self.read.items() if name not in names}
        return Values(read, {n: each for n, each in self._stored.items() if n in read})
