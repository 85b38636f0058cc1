"""The variables of an execution, and which of their buffers hold the current values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ortops._common.numbers import Array
from ortops._common.uninterrupted import AtomicChanges
from ortops.engine.execution.memory import Memory, fetch, put_all
from ortops.engine.execution.packed import Variable
from ortops.errors import OrtopsError

_HALFWAY = (
    "session: an update failed ({}) and left the variables between two steps; continue from a "
    "saved file, or call reset()"
)

_HALF_SET = (
    "session: setting variables failed ({}), so that only some of them have their new values; "
    "continue from a saved file, or call reset()"
)


class Variables(dict[str, Variable]):
    """The variables by name. Each part of a step reads and writes its buffers in turn.

    Args:
        updated: The variables that each part updates.

    Attributes:
        position: The index of the current buffers of each part, and the number of steps: one store
            changes all.
        failed: Why the variables are between two steps; "" if they are not.
        in_place: Whether an update that fails leaves some variables with next values, others
            without.
    """

    def __init__(self, updated: Sequence[Collection[str]]) -> None:
        super().__init__()
        self.updated_by = {name: number for number, own in enumerate(updated) for name in own}
        self.position: tuple[tuple[int, ...], int] = ((0,) * len(updated), 0)
        self.failed = ""
        self.in_place = False
        self._changes = AtomicChanges()

    def replace(self, other: Variables) -> None:
        """Takes over the memory of others, of which no step has been made."""
        self.clear()
        self.update(other)
        turns, made = self.position
        self.position, self.failed = ((0,) * len(turns), made), ""
        self.in_place = other.in_place

    def settle(self) -> None:
        """Waits for the end of a change that a signal handler has left running."""
        self._changes.settle()

    @property
    def steps_made(self) -> int:
        """The number of steps since the session was created, or since `assign` set it."""
        self.settle()
        return self.position[1]

    def check(self) -> None:
        """Waits for the end of a step; raises an OrtopsError if an update failed halfway."""
        self.settle()
        if self.failed:
            raise OrtopsError(self.failed)

    def turn_of(self, name: str) -> int:
        """Returns the index of the buffer with the current value of a variable."""
        return self.position[0][self.updated_by[name]] if name in self.updated_by else 0

    def memories(self) -> dict[str, Memory]:
        """Returns the memory of the current values of all variables.

        Raises:
            OrtopsError: If an update failed halfway.
        """
        self.check()
        return {name: each.buffers[self.turn_of(name)] for name, each in self.items()}

    def present(self, name: str) -> Array:
        """Returns the current value of a variable: its memory, or a copy of device memory.

        Raises:
            OrtopsError: If an update failed halfway.
        """
        self.check()
        return fetch(self[name].buffers[self.turn_of(name)])

    def assign(self, values: Mapping[str, Array], *, steps_made: int | None = None) -> None:
        """Sets variables to values whose dtypes and shapes have been checked.

        Args:
            values: The values by name.
            steps_made: The new value of `steps_made`; unchanged by default.
        """

        def change() -> None:
            turns, made = self.position
            targets = {name: self[name].buffers[self.turn_of(name)] for name in values}
            try:
                put_all(targets, values)
            except BaseException as error:
                self.failed = _HALF_SET.format(error)
                raise
            self.position = (turns, made if steps_made is None else steps_made)
            if values.keys() >= self.keys():
                self.failed = ""

        self._changes.change(change)

    def change(self, function: Callable[[], None]) -> None:
        """Makes a change that no signal handler interrupts, such as an update."""

        def change() -> None:
            try:
                function()
            except BaseException as error:
                if self.in_place:
                    self.failed = _HALFWAY.format(error)
                raise

        self._changes.change(change)
