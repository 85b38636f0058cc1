"""What is computed of a batch before a training step: tensors that the step reads as inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ortops._common.numbers import Array
from ortops.engine.execution.step import Step
from ortops.engine.execution.strings import separate_strings
from ortops.engine.execution.tables import separate_tables
from ortops.graph.files.held_file import InFile


class Front(Protocol):
    """Computes inputs of a step from a batch."""

    @property
    def replaced(self) -> frozenset[str]:
        """The inputs of the batch that the step does not have."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the inputs that it computes."""


class Fronts:
    """Computes what training steps read instead of strings, or of tables in files.

    Args:
        fronts: The fronts of each step.
    """

    def __init__(self, fronts: Sequence[Sequence[Front]]) -> None:
        self._all = fronts
        self._fronts = [front for each in fronts for front in each]

    def __bool__(self) -> bool:
        return bool(self._fronts)

    def only(self, index: int) -> Fronts:
        """Returns the fronts of one of the steps."""
        return Fronts([self._all[index]])

    def run(self, feeds: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns a checked batch as the steps read it.

        Args:
            feeds: The batch.

        Raises:
            FeedError: If a table lacks a row.
            KernelError: If a kernel failed.
            ModelError: If the file of a table has been modified.
        """
        if not self._fronts:
            return feeds
        replaced = frozenset[str]().union(*(front.replaced for front in self._fronts))
        found = {name: array for name, array in feeds.items() if name not in replaced}
        for front in self._fronts:
            found |= front.run(feeds)
        return found


def separate(steps: Sequence[Step], tables: Mapping[str, InFile]) -> tuple[list[Step], Fronts]:
    """Removes what runs before steps from them, in place.

    Args:
        steps: The steps.
        tables: The tables that may stay in their files.

    Raises:
        UnsupportedError: If nodes that read strings cannot run before the step.
    """
    rest, fronts = list[Step](), list[list[Front]]()
    for step in steps:
        step, strings = separate_strings(step)
        step, lookup = separate_tables(step, tables)
        rest.append(step)
        fronts.append([front for front in (strings, lookup) if front is not None])
    return rest, Fronts(fronts)
