"""Calls of the callbacks of a training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ortops._common.numbers import plain
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.position import Position
from ortops.errors import OrtopsError


class Calls:
    """Calls the callbacks of a training.

    Args:
        session: What they are called with.
        given: The callbacks, in the order in which they were given.
        leads: Whether this process calls those that write.

    Attributes:
        stopped: Why one of them has stopped the training; "" if none has.
        revalidates: Whether a validation may change the model, so that its results are not those
            of the epoch that ends with it; it may with callbacks that are not of ortops.
        see_steps: Whether a callback sees each step.
    """

    def __init__(self, session: Any, given: Sequence[Callback], *, leads: bool) -> None:
        self.stopped = ""
        self._session, self._given = session, list(given)
        called = [each for each in given if leads or not (each.saves or each.writes)]
        self._called = sorted(called, key=lambda each: each.saves and not _defines(each, "on_save"))
        self.revalidates = any(
            _defines(each, "on_validation") and not type(each).__module__.startswith("ortops.")
            for each in self._called
        )
        self._on_step = [each for each in self._called if _defines(each, "on_step")]
        self.see_steps = bool(self._on_step)

    def restore(self, position: Position) -> None:
        """Restores the states of the callbacks at a position.

        Raises:
            OrtopsError: If a callback is missing.
        """
        left = list(self._given)
        for saved in position.epoch_state.states():
            name, state = saved["class"], saved["state"]
            callback = next((each for each in left if type(each).__name__ == name), None)
            if callback is not None:
                left.remove(callback)
                callback.restore(dict(state))
            elif state:
                raise OrtopsError(
                    f"fit: the training to resume had the callback {name}, which is missing; give "
                    "one, or leave out resume=True to start a new training"
                )

    @property
    def states(self) -> Callable[[], list[dict[str, Any]]]:
        """A function that returns the classes and states of the callbacks.

        The session keeps it, so it must not refer to the session: nothing but the collector of
        cycles would then free a session that is dropped.
        """
        given = self._given
        return lambda: [{"class": type(each).__name__, "state": each.state()} for each in given]

    def notify(self, event: str, record: Record) -> None:
        """Calls callbacks, and lets those that save do so after all have seen the event.

        If one raises, the others see the event and save all the same, and then it is raised.

        Args:
            event: The method to call.
            record: What it is called with.
        """
        failed: Exception | None = None

        def call(method: str, callback: Callback) -> None:
            nonlocal failed
            try:
                getattr(callback, method)(record, self._session)
                _make_plain(record.values, callback)
            except Exception as error:
                if event == "on_begin":  # nothing has been trained
                    raise
                if failed is not None:
                    failed.add_note(f"then {type(callback).__name__}.{method} raised {error!r}")
                failed = failed or error

        callbacks = self._on_step if event == "on_step" else self._called
        for callback in callbacks:
            call(event, callback)
        for callback in callbacks:
            if _defines(callback, "on_save"):
                call("on_save", callback)
        self.stopped = self.stopped or record.stopped
        if failed is not None:
            raise failed

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes all callbacks at the end, whatever is raised, also by one of them."""
        with contextlib.ExitStack() as stack:
            for callback in reversed(self._called):
                stack.callback(callback.on_close)
            yield


def _defines(callback: Callback, method: str) -> bool:
    """Whether a callback overrides a method of `Callback`."""
    return getattr(type(callback), method) is not getattr(Callback, method)


def _make_plain(values: dict[str, float], callback: Callback) -> None:
    """Converts the numbers that a callback put into a record to Python's, for files."""
    for name, value in values.items():
        if type(value) is not float:
            found = plain(value)
            if found is None:
                del values[name]  # or no file could be written of the session from now on
                raise OrtopsError(
                    f"callback {type(callback).__name__}: record.values[{name!r}] must be a "
                    f"number, got {value!r:.80}"
                )
            values[name] = found
