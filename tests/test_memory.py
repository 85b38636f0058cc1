"""Writing many values at once: by two threads, each value once, and errors come out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ortops.engine.execution.memory import put, put_all


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


class Written(np.ndarray):
    """An array that notes that it is written to."""

    count = 0

    def __setitem__(self, *arguments: Any) -> None:
        self.count += 1
        super().__setitem__(*arguments)


@pytest.mark.parametrize(
    ("value", "before", "writes"),
    [
        pytest.param(0.0, 0.0, 0, id="zeros over zeros"),
        pytest.param(-0.0, 0.0, 1, id="negative zeros"),
        pytest.param(0.0, 1.0, 1, id="zeros over others"),
        pytest.param(1.0, 0.0, 1, id="others"),
    ],
)
def test_zeros_are_not_written_over_zeros(value: float, before: float, writes: int) -> None:
    memory = np.full((2, 2**14), before, np.float32).view(Written)
    put(memory, np.full((2, 2**14), value, np.float32))
    assert memory.count == writes
    np.testing.assert_array_equal(np.signbit(memory), np.signbit(np.float32(value)))
    np.testing.assert_array_equal(memory, value)


def test_what_is_not_contiguous_is_written() -> None:
    apart = np.zeros((2**14, 2), np.float32).T.view(Written)
    put(apart, np.zeros((2, 2**14), np.float32))
    assert apart.count == 1
