"""Writing many values at once: by two threads, each value once, and errors come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from ortops.engine.execution.memory import put_all


class Read(Mapping[str, np.ndarray]):
    """Values that note who reads them."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self.values_ = values
        self.read: list[str] = []
        self.threads: set[int] = set()
        self.both = threading.Barrier(2)

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.append(name)
        self.threads.add(threading.get_ident())
        if len(self.read) <= 2 and not self.both.broken:
            self.both.wait(10)  # the first two are read by two threads
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def many(size: int, count: int = 9) -> dict[str, np.ndarray]:
    return {f"w{number}": np.full(size, number, np.float32) for number in range(count)}


def test_two_threads_write_each_value_once() -> None:
    values = Read(many(2**18))
    targets = {name: np.zeros_like(array) for name, array in values.values_.items()}
    put_all(targets, values)
    for name, array in values.values_.items():
        np.testing.assert_array_equal(targets[name], array)
    assert sorted(values.read) == sorted(targets)
    assert len(values.threads) == 2


@pytest.mark.parametrize("reason", ["little", "no new threads"])
def test_one_thread_writes_all(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    if reason == "no new threads":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    values = Read(many(2**18 if reason == "no new threads" else 10))
    values.both.abort()
    targets = {name: np.zeros_like(array) for name, array in values.values_.items()}
    put_all(targets, values)
    for name, array in values.values_.items():
        np.testing.assert_array_equal(targets[name], array)
    assert values.threads == {threading.get_ident()}


@pytest.mark.parametrize("size", [10, 2**18])
def test_what_goes_wrong_comes_out(size: int) -> None:
    values = many(size)
    targets = {name: np.zeros_like(array) for name, array in values.items()}
    del values["w4"]
    before = threading.active_count()
    with pytest.raises(KeyError, match="w4"):
        put_all(targets, values)
    assert threading.active_count() == before
