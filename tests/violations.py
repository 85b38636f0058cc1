"""One check over a table as one test, which says everything that it found."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def all_violations() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Fails at its end with all that failed within the blocks for the rows of a table.

    Yields:
        What opens such a block. Its argument says which row it is::

            with all_violations() as check:
                for name, row in TABLE.items():
                    with check(name):
                        assert ...
    """
    found: list[str] = []

    @contextmanager
    def check(row: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # what pytest.raises raises, too
            frame = traceback.extract_tb(error.__traceback__)[1]  # the first one is this function's
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            found.append(f"{row}, line {frame.lineno}: {kind}{error}")

    yield check
    assert not found, "\n".join([f"{len(found)} violations", *found])
