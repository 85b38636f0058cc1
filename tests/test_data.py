"""Forms of data: each gives the batches that numpy cuts from the same arrays."""

from __future__ import annotations

import functools
import gc
import itertools
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from training_models import Arrays, affine, affine_batch, assert_same_arrays
from waiting import PATIENCE, is_inside, until

from ortops import ArgumentError, FeedError, Tape, TrainingSession, build_training_model, op
from ortops.engine.training.data import open_data, rows
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.prefetch import Prefetcher
from ortops.optimizers import SGD

ROWS, SIZE = 10, 4


def session_of(model: Any = None, loss: Any = "MeanSquaredError") -> TrainingSession:
    model = affine() if model is None else model
    return TrainingSession(build_training_model(model, loss=loss, optimizer=SGD(0.1)))


@functools.cache
def affine_inputs() -> Inputs:
    """Of x, of shape (batch, 3), and targets, of shape (batch, 2)."""
    return session_of().inputs


@functools.cache
def one_input() -> Inputs:
    """Of x, of shape (batch, 3), alone."""
    return session_of(loss=lambda y: op.ReduceMean(y * y, keepdims=0)).inputs


@functools.cache
def three_inputs() -> Inputs:
    """Of a and b, of shape (batch, 1), and targets, of the same."""
    with Tape() as tape:
        a = tape.input("a", np.float32, ["batch", 1])
        b = tape.input("b", np.float32, ["batch", 1])
        w = tape.initializer("w", np.ones((1, 1), np.float32))
        tape.output(a @ w + b, "y")
    return session_of(tape.model()).inputs


@functools.cache
def scaled_inputs() -> Inputs:
    """Of x, of shape (batch, 3), a scalar, a mixing matrix of shape (3, 3), and targets."""
    with Tape() as tape:
        scale = tape.input("scale", np.float32, [])
        mixing = tape.input("mixing", np.float32, [3, 3])
        x = tape.input("x", np.float32, ["batch", 3])
        w = tape.initializer("w", np.ones((3, 2), np.float32))
        tape.output(x @ mixing @ w * scale, "y")
    return session_of(tape.model()).inputs


def cut(data: Arrays, places: Any = None, size: int = SIZE) -> list[Arrays]:
    """Cuts batches, by numpy alone."""
    count = len(next(iter(data.values())))
    places = np.arange(count) if places is None else places
    return [
        {name: array[places[start : start + size]] for name, array in data.items()}
        for start in range(0, count, size)
    ]


def assert_batches(found: Any, expected: list[Arrays]) -> None:
    found = list(found)
    assert len(found) == len(expected)
    for batch, wanted in zip(found, expected, strict=True):
        assert_same_arrays({name: batch[name] for name in wanted}, wanted)
        assert batch.keys() == wanted.keys()


def check_rows(data: Any, arrays: Arrays, inputs: Inputs) -> None:
    """Asserts that data give the batches of arrays: in order, shuffled, and from any batch on."""
    source = open_data(data, inputs, batch_size=SIZE)
    expected = cut(arrays)
    assert (source.rows, source.batches) == (len(next(iter(arrays.values()))), len(expected))
    shuffled = cut(arrays, np.random.default_rng(7).permutation(source.rows))
    for start in range(len(expected) + 1):
        assert_batches(source.epoch(1, start=start), expected[start:])
        order = np.random.default_rng(7)
        assert_batches(source.epoch(2, order=order, start=start), shuffled[start:])
    ahead = open_data(data, inputs, batch_size=SIZE, prefetch=2)
    assert_batches(ahead.epoch(order=np.random.default_rng(7)), shuffled)


def check_batches(make: Callable[[], Any], *, once: bool = False) -> None:
    """Asserts that data, given as the batches of `affine_batch`, come as they are."""
    expected = cut(affine_batch(ROWS))
    for prefetch, start in itertools.product((0, 2), range(len(expected) + 1)):
        source = open_data(make(), affine_inputs(), epochs=1 if once else 2, prefetch=prefetch)
        assert source.rows is None
        order = np.random.default_rng(7)
        assert_batches(source.epoch(1, order=order, start=start), expected[start:])
        if not once:
            assert_batches(source.epoch(2), expected)


# -------------------------------------------------------------------------------------- arrays


class Stored:
    """An array in a file, as h5py has them: it reads rows in ascending order only."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.read = values, 0
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, places: Any) -> np.ndarray:
        assert isinstance(places, slice) or np.all(np.diff(places) > 0)
        found = self.values[places]
        self.read += len(found)
        return found

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise AssertionError("all of it was read")


def on_disk(values: np.ndarray, folder: Path) -> np.ndarray:
    np.save(folder / f"{id(values)}.npy", values)
    return np.load(folder / f"{id(values)}.npy", mmap_mode="r")


FORMS: dict[str, Callable[[Arrays, Path], Any]] = {
    "by name": lambda a, _: a,
    "a tuple": lambda a, _: (a["x"], a["targets"]),
    "a tuple of lists": lambda a, _: (a["x"].tolist(), a["targets"].tolist()),
    "by name, in lists": lambda a, _: {name: array.tolist() for name, array in a.items()},
    "float64 that survives": lambda a, _: {n: array.astype(np.float64) for n, array in a.items()},
    "in a file": lambda a, _: {"x": Stored(a["x"]), "targets": a["targets"]},
    "all in files, by position": lambda a, _: (Stored(a["x"]), Stored(a["targets"])),
    "memory maps": lambda a, folder: {name: on_disk(array, folder) for name, array in a.items()},
    "records": lambda a, _: np.array(
        list(zip(a["x"], a["targets"], strict=True)), [("x", "f4", 3), ("targets", "f4", 2)]
    ),
    "samples in tuples": lambda a, _: Samples(a, tuple),
    "samples in lists": lambda a, _: Samples(a, list),
    "samples by name": lambda a, _: Samples(a, None),
    "a function": lambda a, _: lambda: a,
}


class Samples:
    """As PyTorch's datasets are."""

    def __init__(self, arrays: Arrays, kind: Any) -> None:
        self.arrays, self.kind = arrays, kind

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, place: int) -> Any:
        assert type(place) is int
        if not 0 <= place < len(self):
            raise IndexError(place)
        sample = {name: array[place] for name, array in self.arrays.items()}
        return sample if self.kind is None else self.kind(sample.values())


@pytest.mark.parametrize("form", [name for name in FORMS if name != "a function"])
def test_forms_of_rows(form: str, tmp_path: Path) -> None:
    arrays = affine_batch(ROWS)
    check_rows(FORMS[form](arrays, tmp_path), arrays, affine_inputs())


@settings(max_examples=60, deadline=None)
@given(
    count=strategies.integers(1, 40),
    size=strategies.integers(1, 50),
    seed=strategies.none() | strategies.integers(0, 2**32),
    skipped=strategies.floats(0, 1),
    prefetch=strategies.integers(0, 4),
    form=strategies.sampled_from(["by name", "in a file", "samples in tuples", "a function"]),
)
def test_any_size_from_any_place(
    count: int, size: int, seed: int | None, skipped: float, prefetch: int, form: str
) -> None:
    arrays = affine_batch(count)
    source = open_data(
        FORMS[form](arrays, Path()), affine_inputs(), batch_size=size, prefetch=prefetch
    )
    order = None if seed is None else np.random.default_rng(seed)
    places = None if seed is None else np.random.default_rng(seed).permutation(count)
    expected = cut(arrays, places, size)
    start = round(skipped * len(expected))
    assert_batches(source.epoch(order=order, start=start), expected[start:])
    assert threads() == 0


def test_one_array_is_the_only_input() -> None:
    x = affine_batch(ROWS)["x"]
    for data in (x, (x,), {"x": x}, x.tolist(), Samples({"x": x}, tuple)):
        if isinstance(data, list):
            continue  # a list is one of batches
        check_rows(data, {"x": x}, one_input())
    assert_batches(open_data([x[:4], x[4:]], one_input()).epoch(), [{"x": x[:4]}, {"x": x[4:]}])
    with pytest.raises(FeedError) as raised:
        open_data(x, affine_inputs())
    assert str(raised.value) == (
        "feeds: 1 array without names for 2 inputs; give a dict, or a tuple "
        "with an array for each of 'x', 'targets' in this order"
    )


def test_positions_are_the_models_inputs_and_then_the_losses() -> None:
    a, b, targets = np.random.default_rng(0).normal(size=(3, ROWS, 1)).astype(np.float32)
    arrays = {"a": a, "b": b, "targets": targets}
    check_rows((a, b, targets), arrays, three_inputs())
    check_rows(((a, b), targets), arrays, three_inputs())
    for data in ((a, b), (a, b, targets, a), ((a, b), targets, a)):
        with pytest.raises(FeedError, match=r"without names for 3 inputs; .* 'a', 'b', "):
            open_data(data, three_inputs())


def test_some_inputs_only() -> None:
    arrays = affine_batch(ROWS)
    inputs = affine_inputs().only(["x"])
    for data in (arrays, {"x": arrays["x"]}, (arrays["x"],), (arrays["x"], arrays["targets"])):
        check_rows(data, {"x": arrays["x"]}, inputs)
    check_rows(arrays["x"], {"x": arrays["x"]}, inputs)
    with pytest.raises(FeedError, match="there is no input 'y'"):
        open_data({"x": arrays["x"], "y": arrays["x"]}, inputs)


def test_only_the_rows_of_a_batch_are_read_from_a_file() -> None:
    x = Stored(affine_batch(1000)["x"])
    source = open_data({"x": x}, one_input(), batch_size=SIZE)
    assert x.read == 0
    next(source.epoch(order=np.random.default_rng(0)))
    assert x.read == SIZE


def test_sparse_matrices() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    x = np.where(np.random.default_rng(0).random((ROWS, 3)) < 0.5, 0, 1.5).astype(np.float32)
    check_rows({"x": sparse.csr_matrix(x)}, {"x": x}, one_input())
    check_rows((sparse.csr_array(x),), {"x": x}, one_input())
    assert_batches(open_data([{"x": sparse.csr_array(x)}], one_input()).epoch(), [{"x": x}])
    data = affine_batch(ROWS) | {"x": x}
    fed = {"x": sparse.csr_array(x), "targets": data["targets"]}
    assert session_of().evaluate(fed) == session_of().evaluate(data)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.array(0.5), 1])
@pytest.mark.parametrize("position", [False, True])
def test_what_has_no_axis_of_samples_is_the_same_in_every_batch(scale: Any, position: bool) -> None:
    data = affine_batch(ROWS) | {"scale": scale, "mixing": np.eye(3)}
    fed = (scale, data["mixing"], data["x"], data["targets"]) if position else data
    for order in (None, np.random.default_rng(7)):
        places = None if order is None else np.random.default_rng(7).permutation(ROWS)
        source = open_data(fed, scaled_inputs(), batch_size=SIZE)
        constants = {"scale": np.array(scale, np.float32), "mixing": np.eye(3, dtype=np.float32)}
        expected = [constants | batch for batch in cut(affine_batch(ROWS), places)]
        found = list(source.epoch(order=order))
        assert_batches(found, expected)
        assert [rows(batch) for batch in found] == [4, 4, 2]  # and not 3, as `mixing` has


def test_rows_or_the_same_in_every_batch() -> None:
    data = affine_batch(3) | {"scale": 1, "mixing": np.eye(3)}
    with pytest.raises(FeedError) as raised:
        open_data(data, scaled_inputs())
    assert str(raised.value) == (
        "data: 'mixing' is ambiguous: its 3 rows may be those of the samples, or the same in every "
        "batch, as the model needs as many; give a list of batches"
    )
    assert rows(next(open_data([data], scaled_inputs()).epoch())) == 3
    with pytest.raises(FeedError, match=r"the same length, got 'x' 10, 'targets' 10, 'mix"):
        open_data(affine_batch(ROWS) | {"scale": 1, "mixing": np.ones((4, 3))}, scaled_inputs())


def test_an_axis_is_not_made_of_nothing() -> None:
    for x in (3.0, np.float32(3)):
        with pytest.raises(
            FeedError,
            match="data: 'x' must be an array with a row for each sample, got a single float",
        ):
            open_data({"x": x}, one_input())


def test_nothing_is_lost_silently() -> None:
    x = np.full((ROWS, 3), 0.5)
    x[7, 1] = 0.1
    for data in ({"x": x}, {"x": Stored(x)}, Samples({"x": x}, tuple), [{"x": x}]):
        with pytest.raises(FeedError, match=r"with the value 0\.1, which float32 cannot represent"):
            list(open_data(data, one_input(), batch_size=SIZE).epoch())


# ------------------------------------------------------------------------------------- samples


def test_a_sequence_of_batches_is_told_by_its_axes() -> None:
    check_batches(lambda: Numbered(cut(affine_batch(ROWS))))
    check_batches(lambda: Called(cut(affine_batch(ROWS))))


class Numbered:
    """As Keras's sequences are."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


class Called(Numbered):
    """Can be called, too, but is no function that returns data."""

    def __call__(self) -> None:
        raise NotImplementedError


def test_samples_of_numbers() -> None:
    with Tape() as tape:
        a = tape.input("a", np.int64, ["batch"])
        tape.output(op.Gather(tape.initializer("w", np.ones(10, np.float32)), a), "y")
    inputs = session_of(tape.model()).inputs
    a, y = np.arange(10), np.arange(10, 20).astype(np.float32) / 4
    samples = Numbered([(int(one), float(other)) for one, other in zip(a, y, strict=True)])
    check_rows(samples, {"a": a, "targets": y}, inputs)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "data: there are no batches; give at least one row"),
        ([(np.ones(3), np.ones(2)), {"x": np.ones(3)}], "sample 1 has 'x' and sample 0 has 'x', "),
        (
            [(np.ones(3), np.ones(2)), (np.ones(4), np.ones(2))],
            "feeds: 'x' cannot be converted to an array: setting",
        ),
        ([(np.ones(4), np.ones(2))], r"'x' must have shape [batch, 3], got [1, 4]"),
        ([{"x": np.ones(3), "y": np.ones(2)}], "feeds: there is no input 'y'"),
        ([{"x": np.ones(3)}], "feeds: input 'targets' is missing"),
        ([np.ones(3)], "feeds: 1 array without names for 2 inputs"),
        (["text"], "order of the inputs, got str"),
    ],
)
def test_samples_that_do_not_fit(items: list[Any], message: str) -> None:
    with pytest.raises(FeedError) as raised:
        list(open_data(Numbered(items), affine_inputs()).epoch())
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------- batches


def in_pairs(kind: Any) -> list[Any]:
    return [kind([batch["x"], batch["targets"]]) for batch in cut(affine_batch(ROWS))]


class Loader:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def generated() -> Iterator[Arrays]:
    yield from cut(affine_batch(ROWS))


def refilled() -> Iterator[Arrays]:
    """Yields batches in the same memory, as a loader does that reads a file."""
    memory = {name: np.empty_like(array) for name, array in affine_batch(SIZE).items()}
    for batch in cut(affine_batch(ROWS)):
        for name, values in batch.items():
            memory[name][: len(values)] = values
        yield {name: array[: len(batch["x"])] for name, array in memory.items()}


@pytest.mark.parametrize(
    "make",
    [
        lambda: cut(affine_batch(ROWS)),
        lambda: tuple(cut(affine_batch(ROWS))),
        lambda: in_pairs(tuple),
        lambda: in_pairs(list),
        lambda: tuple(in_pairs(tuple)),
        lambda: Loader(cut(affine_batch(ROWS))),
        lambda: Loader(in_pairs(list)),
        lambda: generated,
        lambda: lambda epoch: generated(),
        lambda: functools.partial(lambda batches: iter(batches), cut(affine_batch(ROWS))),
        lambda: lambda: Loader(in_pairs(tuple)),
    ],
)
def test_forms_of_batches(make: Callable[[], Any]) -> None:
    check_batches(make)


def test_iterators_serve_once() -> None:
    check_batches(generated, once=True)
    check_batches(lambda: iter(in_pairs(tuple)), once=True)


class Watched(Prefetcher[Any]):
    """Counts what its thread reads."""

    def __init__(self, items: Iterator[Any], ahead: int) -> None:
        self.read, self.given, self.ahead, self.over = 0, 0, ahead, False
        super().__init__(self._counted(items), ahead)

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.read += 1
            yield item
        self.over = True

    def __next__(self) -> Any:
        item = super().__next__()
        self.given += 1
        return item


def until_ahead(batches: Iterator[Any]) -> None:
    """Waits until the thread that reads ahead, if there is one, is as far ahead as it may be."""
    if isinstance(batches, Watched):
        until(lambda: batches.over or batches.read == batches.given + batches.ahead)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortops.engine.training.data.Prefetcher", Watched)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_a_loader_may_fill_the_same_memory_again(prefetch: int) -> None:
    expected = cut(affine_batch(ROWS))
    for data in (refilled(), refilled, Loader(refilled())):  # type: ignore[arg-type]
        number = 0
        batches = open_data(data, affine_inputs(), prefetch=prefetch).epoch()
        assert isinstance(batches, Watched) == bool(prefetch)
        for batch in batches:
            until_ahead(batches)
            assert_same_arrays(batch, expected[number])
            number += 1
        assert number == 3


class OneBuffer:
    """Gives items by number, all in the same memory, as Keras sequences and datasets may do."""

    def __init__(self, items: Sequence[Arrays], kind: Any = dict) -> None:
        self.items, self.kind = items, kind
        self.memory = {name: np.empty_like(array) for name, array in items[0].items()}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        filled = {}
        for name, values in self.items[place].items():
            filled[name] = self.memory[name][: len(values)]
            filled[name][:] = values
        return filled if self.kind is dict else self.kind(filled.values())


class OneBufferList(OneBuffer, list[Any]):
    """A list whose items are read when they are asked for."""

    def __bool__(self) -> bool:
        return True


class OneBufferArray(Stored):
    """An array in a file that is read into the same memory each time."""

    memory = np.empty((ROWS, 3), np.float32)

    def __getitem__(self, places: Any) -> np.ndarray:
        found = self.memory[: len(self.values[places]), : self.values.shape[1]]
        found[:] = super().__getitem__(places)
        return found


class OneBufferMapping(Mapping[str, Any]):
    """A batch whose arrays are read into the same memory when they are asked for."""

    memory = np.empty((ROWS, 3), np.float32)

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.arrays[name]
        self.memory[:] = -1
        found = self.memory.reshape(-1)[: values.size].reshape(values.shape)
        found[:] = values
        return found


def rows_of(arrays: Arrays) -> list[Arrays]:
    count = len(next(iter(arrays.values())))
    return [{name: array[row] for name, array in arrays.items()} for row in range(count)]


REFILLED: dict[str, Callable[[Arrays], Any]] = {
    "a sequence of batches": lambda a: OneBuffer(cut(a)),
    "a sequence of tuples": lambda a: OneBuffer(cut(a), tuple),
    "a list": lambda a: OneBufferList(cut(a)),
    "a list of mappings": lambda a: [OneBufferMapping(batch) for batch in cut(a)],
    "a loader": lambda a: Loader(refilled()),  # type: ignore[arg-type]
    "a generator": lambda a: refilled(),
    "a function": lambda a: refilled,
    "samples": lambda a: OneBuffer(rows_of(a)),
    "samples in tuples": lambda a: OneBuffer(rows_of(a), tuple),
    "samples in mappings": lambda a: Numbered([OneBufferMapping(row) for row in rows_of(a)]),
    "arrays in files": lambda a: {name: OneBufferArray(array) for name, array in a.items()},
}
"""Forms of data in which reading a batch, or a part of one, overwrites what was read before."""


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("form", REFILLED)
def test_what_is_read_next_overwrites_no_batch(form: str, prefetch: int) -> None:
    data = affine_batch(ROWS)
    expected = cut(data)
    source = open_data(REFILLED[form](data), affine_inputs(), batch_size=SIZE, prefetch=prefetch)
    batches = source.epoch()
    found = []
    for batch in batches:
        until_ahead(batches)
        assert_same_arrays(batch, expected[len(found)])
        found.append(batch)
    assert len(found) == len(expected)
    if prefetch:  # they may also be kept
        assert_batches(found, expected)


@pytest.mark.parametrize("form", ["samples", "samples in tuples", "arrays in files"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_shuffled_rows_that_are_read_into_the_same_memory(form: str, prefetch: int) -> None:
    data = affine_batch(ROWS)
    source = open_data(REFILLED[form](data), affine_inputs(), batch_size=SIZE, prefetch=prefetch)
    places = np.random.default_rng(7).permutation(ROWS)
    assert_batches(source.epoch(order=np.random.default_rng(7)), cut(data, places))


@pytest.mark.nightly(5)
@pytest.mark.quick(1)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("form", REFILLED)
def test_sessions_see_what_was_read(form: str, accumulate: int, prefetch: int) -> None:
    """In each place where several batches may be held at once."""
    data = affine_batch(ROWS)
    make = functools.partial(REFILLED[form], data)
    options: dict[str, Any] = {"batch_size": SIZE, "shuffle": False, "progress": False}
    options["accumulate"] = accumulate
    expected, session = session_of(), session_of()
    history = expected.fit(cut(data), **options)
    assert session.fit(make(), prefetch=prefetch, **options) == history
    assert_same_arrays(dict(session.state), dict(expected.state))
    metrics: list[Any] = ["mean_absolute_error", lambda outputs, targets: outputs[0, 0]]
    found = session.evaluate(make(), batch_size=SIZE, metrics=metrics)
    assert found == expected.evaluate(cut(data), metrics=metrics)
    predicted = session.predict(make(), batch_size=SIZE, outputs=["x", "y"])
    assert_same_arrays(predicted, expected.predict(cut(data), outputs=["x", "y"]))
    np.testing.assert_array_equal(predicted["x"], data["x"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["a sequence of batches", "a list", "a list of mappings"])
def test_several_steps_see_what_was_read(form: str) -> None:
    data = affine_batch(ROWS)
    expected, session = session_of(), session_of()
    batches = REFILLED[form](data)
    found = session.run_steps(batches[place] for place in range(len(batches)))
    np.testing.assert_array_equal(found, expected.run_steps(cut(data)))


def test_two_generators_that_fill_the_same_memory() -> None:
    """One for training and one for validation: each gives its first batch before the first step."""
    data, held_out = affine_batch(SIZE), affine_batch(SIZE, seed=1)
    memory = OneBuffer([data, held_out])

    def generate(place: int) -> Iterator[Arrays]:
        yield memory[place]

    expected, session = session_of(), session_of()
    wanted = expected.fit([data], validation=[held_out], progress=False)
    assert session.fit(generate(0), validation=generate(1), progress=False) == wanted


def test_a_generator_is_refused_before_the_first_step() -> None:
    session = session_of()
    before = dict(session.state)
    with pytest.raises(FeedError) as raised:
        session.fit(generated(), epochs=3, progress=False)
    assert str(raised.value) == (
        "data: generator can be iterated over once, but there are 3 epochs; give arrays, a list, "
        "or a function that returns a new one for each epoch"
    )
    used_up = generated()
    list(used_up)
    for use in (session.fit, session.evaluate):
        with pytest.raises(FeedError, match="data: there are no batches; an iterator can be"):
            use(used_up)
    with pytest.raises(FeedError, match="generator can be iterated over once, but there are 2"):
        session.fit(affine_batch(), epochs=2, validation=generated(), progress=False)
    assert_same_arrays(dict(session.state), before)
    assert len(session.fit(generated, epochs=3, progress=False)) == 3
    assert len(session.fit(generated(), validation=generated(), progress=False)) == 1


def test_a_function_is_told_the_epoch_if_it_asks() -> None:
    asked: list[int] = []

    def numbered(epoch: int) -> list[Arrays]:
        asked.append(epoch)
        return cut(affine_batch(ROWS))

    source = open_data(numbered, affine_inputs(), epochs=2)
    assert asked == []
    for epoch in (1, 2):
        list(source.epoch(epoch))
    assert asked == [1, 2]
    list(open_data(lambda size=4: cut(affine_batch(ROWS), size=size), affine_inputs()).epoch(9))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: 3, "data must be arrays by name or an iterable of batches, got int"),
        (lambda: lambda: 3, "the function returned another function; return an iterable of batch"),
        (list, "data: there are no batches"),
        (lambda: iter([]), "data: there are no batches"),
        (Loader([]), "data: there are no batches"),
        ([], "data: there are no batches"),
        ((), "data: there are no batches"),
        ({}, "data: there are no arrays; give one for each input"),
        (affine_batch(0), "data: there are no batches"),
        ("train.npz", "data must be arrays by name or an iterable of batches, got str"),
        (None, "data must be arrays by name or an iterable of batches, got NoneType"),
        (3, "data must be arrays by name or an iterable of batches, got int"),
        ([affine_batch()["x"]] * 2, "1 array without names for 2 inputs"),
        ([3], "order of the inputs, got int"),
        ([()], "order of the inputs, got tuple"),
        (Loader([{"x": [[1.0]] * 2, "targets": 1}]), "'x' must have shape [batch, 3], got [2, 1]"),
    ],
)
def test_data_that_are_none(data: Any, message: str) -> None:
    with pytest.raises(FeedError) as raised:
        list(open_data(data, affine_inputs()).epoch())
    assert message in str(raised.value)


@pytest.mark.parametrize("what", ["batch_size", "prefetch"])
@pytest.mark.parametrize("number", [-1, 2.5, "3", True, np.array([2]), np.array([2, 3])])
def test_numbers_that_are_no_counts(what: Any, number: Any) -> None:
    with pytest.raises(ArgumentError) as raised:
        open_data(affine_batch(), affine_inputs(), **{what: number})
    least = {"batch_size": 1, "prefetch": 0}[what]
    assert str(raised.value) == f"{what} must be an integer >= {least}, got {number!r}"


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
def test_counts_of_numpy_do_not_overflow(kind: Any) -> None:
    data = affine_batch(300)
    source = open_data(data, affine_inputs(), batch_size=kind(100), prefetch=kind(2))
    assert source.batches == 3
    found = [batch["x"] for batch in source.epoch()]
    assert_same_arrays(
        dict(enumerate(found)), {n: data["x"][100 * n : 100 * n + 100] for n in range(3)}
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: affine_batch(ROWS),
        lambda: cut(affine_batch(ROWS)),
        lambda: Loader(cut(affine_batch(ROWS))),
        lambda: generated,
        lambda: Samples(affine_batch(ROWS), tuple),
    ],
)
def test_a_place_that_is_not_there(make: Callable[[], Any]) -> None:
    source = open_data(make(), affine_inputs(), batch_size=SIZE)
    expected = "data: there are 3 batches, but 4 of the epoch are finished; give the data with"
    with pytest.raises(FeedError, match=expected):
        list(source.epoch(start=4))


def test_a_source_is_one_already() -> None:
    source = open_data(affine_batch(), affine_inputs())
    assert open_data(source, affine_inputs()) is source


def test_a_batch_is_checked_once() -> None:
    inputs, others = affine_inputs(), session_of().inputs
    batch = inputs.check(affine_batch())
    assert inputs.check(batch) is batch
    assert others.check(batch) is not batch
    assert isinstance(batch, dict)


def test_steps_take_tuples() -> None:
    batches = cut(affine_batch(ROWS))
    expected, session, several = session_of(), session_of(), session_of()
    losses = [float(expected.step(batch)["loss"]) for batch in batches]
    for pair, loss in zip(in_pairs(tuple), losses, strict=True):
        assert float(session.step(pair)["loss"]) == loss
    np.testing.assert_allclose(several.run_steps(in_pairs(list)), losses, rtol=1e-6)


# ------------------------------------------------------------------------------------ prefetch


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ortops prefetch"]


def threads() -> int:
    return len(prefetching())


def test_prefetch_is_so_far_ahead_and_no_further() -> None:
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            made.append(number)
            yield number

    fetched = Prefetcher(numbers(), 3)
    until(lambda: len(made) == 3)
    until(lambda: is_inside(prefetching()[0], threading.__file__))  # where it waits
    assert len(made) == 3
    assert next(fetched) == 0
    until(lambda: len(made) == 4)
    assert list(fetched) == list(range(1, 100))
    assert list(fetched) == []
    assert threads() == 0


@pytest.mark.parametrize("error", [ValueError("bad file"), KeyboardInterrupt(), StopIteration()])
def test_errors_come_in_their_turn_with_their_traceback(error: BaseException) -> None:
    def where_it_happens() -> Iterator[int]:
        yield 1
        yield 2
        raise error

    class Items:
        """No generator, so that StopIteration is the end."""

        def __init__(self) -> None:
            self.items = where_it_happens()

        def __iter__(self) -> Items:
            return self

        def __next__(self) -> int:
            return next(self.items)

    fetched = Prefetcher(Items(), 5)
    assert [next(fetched), next(fetched)] == [1, 2]
    with pytest.raises((type(error), RuntimeError)) as raised:
        next(fetched)
    if not isinstance(error, StopIteration):
        assert raised.value is error
    trace = "".join(traceback.format_exception(raised.value))
    assert "where_it_happens" in trace
    assert list(fetched) == []
    assert threads() == 0


@pytest.mark.slow
def test_the_thread_ends_with_the_one_who_asks() -> None:
    closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    fetched = Prefetcher(endless(), 2)
    next(fetched)
    fetched.close()
    assert closed.is_set()
    assert threads() == 0
    fetched.close()
    closed.clear()
    fetched = Prefetcher(endless(), 2)
    next(fetched)
    assert threads() == 1
    del fetched
    gc.collect()
    assert closed.wait(20)
    until(lambda: threads() == 0)


def test_an_error_while_closing_comes_out() -> None:
    def items() -> Iterator[int]:
        yield 1

    class Closing:
        def __init__(self) -> None:
            self.items = items()

        def __iter__(self) -> Closing:
            return self

        def __next__(self) -> int:
            return next(self.items)

        def close(self) -> None:
            raise OSError("the file was gone")

    fetched = Prefetcher(Closing(), 1)
    assert next(fetched) == 1
    with pytest.raises(OSError, match="the file was gone"):
        next(fetched)
    assert threads() == 0


def test_a_signal_gets_through_while_a_batch_is_awaited() -> None:
    asked, release, ended = threading.Event(), threading.Event(), threading.Event()
    main = threading.main_thread()

    def slow() -> Iterator[int]:
        asked.wait(PATIENCE)
        until(lambda: is_inside(main, sys.modules[Prefetcher.__module__].__file__))
        signal.pthread_kill(main.ident or 0, signal.SIGALRM)
        release.wait(PATIENCE)
        ended.set()
        yield 1

    class StoppedError(Exception):
        pass

    def stop(*_: Any) -> None:
        raise StoppedError

    before = signal.signal(signal.SIGALRM, stop)
    fetched = Prefetcher(slow(), 2)

    def ask() -> None:
        asked.set()
        next(fetched)

    try:
        with pytest.raises(StoppedError):
            ask()
        assert not ended.is_set()  # it does not come when the loader is done
    finally:
        signal.signal(signal.SIGALRM, before)
        release.set()
    fetched.close()
    assert threads() == 0


def test_a_loader_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortops.engine.training.prefetch._PATIENCE", 0.01)
    release = threading.Event()

    def hanging() -> Iterator[int]:
        yield 1
        release.wait(60)

    fetched = Prefetcher(hanging(), 2)
    assert next(fetched) == 1
    fetched.close()
    assert threads() == 1
    release.set()
    until(lambda: threads() == 0)


def test_a_batch_that_does_not_fit_ends_the_thread() -> None:
    wrong = {"x": np.ones((2, 4), np.float32), "targets": np.ones((2, 1), np.float32)}
    batches = [*cut(affine_batch(ROWS)), wrong]
    found: list[Arrays] = []
    with pytest.raises(FeedError, match=r"'x' must have shape \[batch, 3\], got \[2, 4\]"):
        found.extend(open_data(Loader(batches), affine_inputs(), prefetch=3).epoch())
    assert len(found) == 3
    assert threads() == 0


# -------------------------------------------------------------------------- other libraries


def table() -> tuple[dict[str, Any], Arrays]:
    """Columns of a table, with one that is no input, and the arrays that they stand for."""
    rng = np.random.default_rng(3)
    a, b, targets = rng.normal(size=(3, ROWS)).astype(np.float32)
    columns = {"id": [str(n) for n in range(ROWS)], "a": a, "b": b, "targets": targets}
    return columns, {name: np.asarray(columns[name])[:, None] for name in ("a", "b", "targets")}


class Frame:
    """As much of a frame as is used: named columns, no rows by number."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.held = columns
        self.columns = list(columns)
        self.dtypes = [np.asarray(column).dtype for column in columns.values()]

    def __getitem__(self, name: str) -> Any:
        return np.asarray(self.held[name])


def test_frames() -> None:
    columns, arrays = table()
    check_rows(Frame(columns), arrays, three_inputs())
    frames = [Frame({name: column[at] for name, column in arrays.items()}) for at in ([0, 1], [2])]
    assert_batches(
        open_data(frames, three_inputs()).epoch(),
        [{name: column[at] for name, column in arrays.items()} for at in ([0, 1], [2])],
    )
    with pytest.raises(FeedError, match="feeds: input 'targets' is missing; the inputs are 'a',"):
        open_data(Frame({"a": columns["a"], "b": columns["b"]}), three_inputs())


class StoredTable:
    """As much of Hugging Face's datasets as is used: rows are read when they are asked for."""

    format = MappingProxyType({"type": "numpy"})

    def __init__(self, columns: dict[str, Any]) -> None:
        self.held, self.column_names, self.read = columns, list(columns), 0

    def with_format(self, kind: str) -> StoredTable:
        raise AssertionError("it has one")

    def select_columns(self, names: list[str]) -> StoredTable:
        return StoredTable({name: self.held[name] for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.held.values())))

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all of it was read")

    def __getitem__(self, places: slice | list[int]) -> dict[str, Any]:
        assert isinstance(places, slice | list)
        return {name: np.asarray(column)[places] for name, column in self.held.items()}


def test_stored_tables() -> None:
    columns, arrays = table()
    check_rows(StoredTable(columns), arrays, three_inputs())
    with pytest.raises(FeedError, match="feeds: input 'b' is missing; the inputs are 'a', 'b', "):
        list(open_data(StoredTable({"a": columns["a"]}), three_inputs()).epoch())
    with pytest.raises(FeedError, match="data: there are no batches; give at least one row"):
        open_data(StoredTable({name: [] for name in columns}), three_inputs())


def test_values_that_are_missing_are_no_nan() -> None:
    class Column:
        def __init__(self, null_count: Any) -> None:
            self.null_count = null_count

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.full((2, 3), np.nan, np.float32)

    for count in (2, lambda: 2):  # arrow's, polars'
        for data in ({"x": Column(count)}, [{"x": Column(count)}]):
            with pytest.raises(FeedError) as raised:
                list(open_data(data, one_input()).epoch())
            expected = "2 of its values are missing (null); give a numpy array"
            assert str(raised.value) == f"feeds: 'x' cannot be converted to an array: {expected}"
    assert np.isnan(next(open_data({"x": Column(0)}, one_input()).epoch())["x"]).all()


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    columns, arrays = table()
    frame = pandas.DataFrame(columns, index=range(100, 100 + ROWS))
    check_rows(frame, arrays, three_inputs())
    check_rows({name: frame[[name]] for name in arrays}, arrays, three_inputs())
    check_rows(tuple(frame[[name]] for name in arrays), arrays, three_inputs())
    chunks = [frame[:4], frame[4:]]
    assert_batches(
        open_data(chunks, three_inputs()).epoch(),
        [{n: a[part] for n, a in arrays.items()} for part in (slice(4), slice(4, None))],
    )
    data = affine_batch(ROWS)
    nested = pandas.DataFrame({name: list(array) for name, array in data.items()})
    check_rows(nested, data, affine_inputs())
    wide = pandas.DataFrame(data["x"], columns=["p", "q", "r"])
    check_rows({"x": wide, "targets": data["targets"]}, data, affine_inputs())
    labels = pandas.Series([1, None, 3], dtype="Int64")
    for frame in (pandas.DataFrame(dict.fromkeys(arrays, labels)), dict.fromkeys(arrays, labels)):
        with pytest.raises(
            FeedError, match="'a' cannot be converted to an array: 1 of its values are missing"
        ):
            open_data(frame, three_inputs())
    whole = pandas.DataFrame(dict.fromkeys(arrays, pandas.Series([1, 2], dtype="Int64")))
    check_rows(whole, dict.fromkeys(arrays, np.array([[1], [2]], np.float32)), three_inputs())
    words = pandas.DataFrame({name: ["a", "b"] for name in arrays})
    with pytest.raises(FeedError, match="'a' must be float32, got object"):
        list(open_data(words, three_inputs()).epoch())


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_tables_of_columns(library: str) -> None:
    module = pytest.importorskip(library)
    columns, arrays = table()
    make = module.DataFrame if library == "polars" else module.table
    check_rows(make(columns), arrays, three_inputs())
    check_rows({n: make({"only": columns[n]}) for n in arrays}, arrays, three_inputs())
    data = affine_batch(ROWS)
    nested = make({name: array.tolist() for name, array in data.items()})
    check_rows(nested, data, affine_inputs())
    check_rows({name: nested[name] for name in data}, data, affine_inputs())
    check_rows((nested["x"], nested["targets"]), data, affine_inputs())
    missing = make({"x": [[1.0, 2.0, 3.0], None], "targets": [[1.0, 2.0]] * 2})
    with pytest.raises(
        FeedError, match="'x' cannot be converted to an array: 1 of its values are missing"
    ):
        open_data(missing, affine_inputs())
    ragged = make({"x": [[1.0, 2.0, 3.0], [1.0]], "targets": [[1.0, 2.0]] * 2})
    with pytest.raises(
        FeedError, match="'x' cannot be converted to an array: all input arrays must have the same"
    ):
        open_data(ragged, affine_inputs())
    within = make({"x": [[1.0, 2.0, 3.0], [1.0, None, 2.0]], "targets": [[1.0, 2.0]] * 2})
    with pytest.raises(
        FeedError, match="'x' cannot be converted to an array: 1 of its values are missing"
    ):
        open_data(within, affine_inputs())


def test_datasets_of_hugging_face() -> None:
    datasets = pytest.importorskip("datasets")
    columns, arrays = table()
    data_set = datasets.Dataset.from_dict(columns)
    check_rows(data_set, arrays, three_inputs())
    check_rows(data_set.with_format("numpy"), arrays, three_inputs())
    check_rows(
        data_set.select([3, 1, 4]), {n: a[[3, 1, 4]] for n, a in arrays.items()}, three_inputs()
    )
    data = affine_batch(ROWS)
    nested = datasets.Dataset.from_dict({name: array.tolist() for name, array in data.items()})
    check_rows(nested, data, affine_inputs())
    images = np.random.default_rng(0).integers(0, 255, (ROWS, 4, 5)).astype(np.float32)
    features = datasets.Features({"x": datasets.Array2D((4, 5), "float32")})
    squares = datasets.Dataset.from_dict({"x": list(images)}, features=features)
    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 4, 5])
        tape.output(x * tape.initializer("w", np.ones(5, np.float32)), "y")
    inputs = session_of(tape.model(), lambda y: op.ReduceMean(y, keepdims=0)).inputs
    check_rows(squares, {"x": images}, inputs)
    whole, without = nested[:2], nested.select_columns(["x"])
    assert_batches(open_data([whole], affine_inputs()).epoch(), [{n: data[n][:2] for n in data}])
    with pytest.raises(FeedError, match="feeds: input 'targets' is missing; the inputs are 'x', '"):
        list(open_data(without, affine_inputs()).epoch())
    stream = nested.to_iterable_dataset()
    assert_batches(open_data(stream, affine_inputs(), batch_size=SIZE).epoch(), cut(data))


def test_images_of_hugging_face() -> None:
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (ROWS, 1, 3)).astype(np.uint8)
    data_set = datasets.Dataset.from_dict(
        {"x": [image.fromarray(one) for one in pixels]},
        features=datasets.Features({"x": datasets.Image()}),
    )
    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 1, 3])
        tape.output(x * tape.initializer("w", np.ones(3, np.float32)), "y")
    inputs = session_of(tape.model(), lambda y: op.ReduceMean(y, keepdims=0)).inputs
    check_rows(data_set, {"x": pixels.astype(np.float32)}, inputs)


def test_arrays_in_files_of_zarr() -> None:
    zarr = pytest.importorskip("zarr")
    data = affine_batch(ROWS)
    check_rows({n: zarr.array(a, chunks=(3, 2)) for n, a in data.items()}, data, affine_inputs())


def test_arrays_in_files_of_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = affine_batch(ROWS)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        for name, array in data.items():
            file[name] = array
        check_rows(file, data, affine_inputs())
        check_rows((file["x"], file["targets"]), data, affine_inputs())


@pytest.mark.slow
@pytest.mark.torch
def test_loaders_and_datasets_of_torch() -> None:
    torch = pytest.importorskip("torch")
    data = affine_batch(ROWS)
    pairs = torch.utils.data.TensorDataset(*(torch.tensor(array) for array in data.values()))
    check_rows(pairs, data, affine_inputs())
    check_rows(tuple(torch.tensor(array) for array in data.values()), data, affine_inputs())
    part = torch.utils.data.Subset(pairs, [3, 1, 4, 5, 9])
    check_rows(part, {n: a[[3, 1, 4, 5, 9]] for n, a in data.items()}, affine_inputs())
    check_batches(lambda: torch.utils.data.DataLoader(pairs, batch_size=SIZE))
    # Spawned, because this process has threads.
    worker = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    loader = torch.utils.data.DataLoader(pairs, batch_size=SIZE, **worker)
    check_batches(lambda: loader)
    named = Samples(data, None)
    check_batches(lambda: torch.utils.data.DataLoader(named, batch_size=SIZE))
    assert (
        open_data(torch.utils.data.DataLoader(named, batch_size=SIZE), affine_inputs()).batches == 3
    )
