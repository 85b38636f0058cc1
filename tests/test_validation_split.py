"""`fit(validation_split=)` sets aside the last part of the data, as Keras does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_models import Arrays, affine, affine_batch, assert_same_arrays, classifier, labelled

from ortops import ArgumentError, FeedError, OrtopsError, TrainingSession, build_training_model
from ortops.callbacks import Callback
from ortops.engine.training.data import open_data
from ortops.engine.training.validation_split import split_source
from ortops.optimizers import SGD, Adam

ROWS = 13


def trainable() -> Any:
    return build_training_model(affine(), loss="MeanSquaredError", optimizer=Adam(0.1))


class Samples:
    """A data set like those of PyTorch."""

    def __init__(self, data: Arrays) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, row: int) -> Arrays:
        return {name: array[row] for name, array in self.data.items()}


class Refilled:
    """Batches by number, all in the same memory."""

    def __init__(self, data: Arrays) -> None:
        self.data = data
        self.memory = {name: np.empty_like(array[:1]) for name, array in data.items()}

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, place: int) -> Arrays:
        for name, array in self.data.items():
            self.memory[name][:] = array[place]
        return self.memory


def cut(data: Arrays, size: int) -> list[Arrays]:
    return [{n: a[i : i + size] for n, a in data.items()} for i in range(0, ROWS, size)]


FORMS: dict[str, Any] = {
    "dict": lambda data: data,
    "tuple": lambda data: tuple(data.values()),
    "samples": Samples,
}


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3, 0.5, 0.9])
def test_the_last_rows_in_the_given_order(fraction: float, form: str, prefetch: int) -> None:
    """Keras: `split_at = int(math.floor(batch_dim * (1.0 - validation_split)))`."""
    data = affine_batch(ROWS)
    border = math.floor(ROWS * (1.0 - fraction))
    expected, found = TrainingSession(trainable()), TrainingSession(trainable())
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 4, "progress": False, "seed": 2}
    first = {name: array[:border] for name, array in data.items()}
    last = {name: array[border:] for name, array in data.items()}
    wanted = expected.fit(first, validation=last, metrics=["mean_absolute_error"], **settings)
    history = found.fit(
        FORMS[form](data),
        validation_split=fraction,
        metrics=["mean_absolute_error"],
        prefetch=prefetch,
        **settings,
    )
    assert history == wanted
    assert "validation_mean_absolute_error" in history[0]
    assert_same_arrays(dict(found.state), dict(expected.state))


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", [list, Samples])
def test_the_last_of_given_batches(form: Any) -> None:
    batches = cut(affine_batch(ROWS), 3)  # five
    data = batches if form is list else BatchSequence(batches)
    expected, found = TrainingSession(trainable()), TrainingSession(trainable())
    wanted = expected.fit(batches[:3], validation=batches[3:], epochs=2, progress=False)
    assert found.fit(data, validation_split=0.3, epochs=2, progress=False) == wanted
    assert_same_arrays(dict(found.state), dict(expected.state))


class BatchSequence:
    """Batches by number."""

    def __init__(self, batches: list[Arrays]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> Arrays:
        if not 0 <= place < len(self.batches):
            raise IndexError(place)
        return self.batches[place]


def test_batches_that_reuse_memory_while_a_thread_reads_ahead() -> None:
    data = affine_batch(ROWS)
    expected, found = TrainingSession(trainable()), TrainingSession(trainable())
    batches = cut(data, 1)
    wanted = expected.fit(batches[:9], validation=batches[9:], epochs=2, progress=False)
    history = found.fit(Refilled(data), validation_split=0.3, epochs=2, progress=False, prefetch=3)
    assert history == wanted


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: Any, session: Any) -> None:
        if record.step == self.step:
            record.stop("the test says so")


@pytest.mark.quick(1)
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_training_sets_aside_the_same_rows(stop: int, tmp_path: Path) -> None:
    data = affine_batch(ROWS)
    settings: dict[str, Any] = {"epochs": 3, "batch_size": 4, "progress": False}
    whole = TrainingSession(trainable())
    wanted = whole.fit(data, validation_split=0.25, **settings)
    begun = TrainingSession(trainable())
    begun.fit(data, validation_split=0.25, callbacks=[StopAt(stop)], **settings)
    begun.save(tmp_path / "saved.onnx")
    session = TrainingSession(tmp_path / "saved.onnx")
    for other in (0.0, 0.3):
        with pytest.raises(OrtopsError, match=f"validation_split must be 0.25, .*, got {other}"):
            session.fit(data, validation_split=other, resume=True, **settings)
    assert session.fit(data, validation_split=0.25, resume=True, **settings) == wanted
    assert_same_arrays(dict(session.state), dict(whole.state))


def test_labels_of_a_classifier() -> None:
    data = labelled((6,), rows=20)
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    session = TrainingSession(model)
    history = session.fit(data, validation_split=0.2, metrics=["accuracy"], progress=False)
    last = {name: array[16:] for name, array in data.items()}
    logits = session.predict({"x": last["x"]}, outputs="logits")
    share = float(np.mean(logits.argmax(1) == last["labels"]))
    assert history[0]["validation_accuracy"] == pytest.approx(share)


@pytest.mark.quick(3)
@pytest.mark.parametrize("fraction", [1, 1.5, -0.1, math.nan, "0.2", True])
def test_what_is_no_fraction(fraction: Any) -> None:
    with pytest.raises(ArgumentError, match="validation_split must be a finite number >= 0 and"):
        TrainingSession(trainable()).fit(affine_batch(), validation_split=fraction)


def test_zero_sets_nothing_aside() -> None:
    history = TrainingSession(trainable()).fit(affine_batch(), validation_split=0.0, progress=False)
    assert "validation_loss" not in history[0]


def test_no_part_is_empty() -> None:
    with pytest.raises(ArgumentError, match=r"got 0.8 of 4 rows: 0 would be for training"):
        TrainingSession(trainable()).fit(affine_batch(4), validation_split=0.8)


def test_one_of_both() -> None:
    with pytest.raises(ArgumentError, match="validation= is given, too"):
        TrainingSession(trainable()).fit(
            affine_batch(), validation=affine_batch(), validation_split=0.5
        )


def test_data_that_are_read_from_the_beginning_to_the_end() -> None:
    batches = cut(affine_batch(ROWS), 3)

    class Loader:
        def __iter__(self) -> Iterator[Arrays]:
            return iter(batches)

        def __len__(self) -> int:
            return len(batches)

    for data in (iter(batches), Loader(), lambda: affine_batch()):
        with pytest.raises(FeedError, match="read from the beginning to the end"):
            TrainingSession(trainable()).fit(data, validation_split=0.5)


def test_a_fixed_batch_needs_whole_batches_in_both_parts() -> None:
    model = build_training_model(affine(batch=4), loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(model)
    data = affine_batch(12)
    with pytest.raises(FeedError, match="has 7 rows in batches of 4"):
        session.fit(data, batch_size=4, validation_split=0.4)
    history = session.fit(data, batch_size=4, validation_split=1 / 3, progress=False)
    assert history[0]["steps"] == 2


def test_a_thread_reads_ahead_what_is_for_training() -> None:
    data = affine_batch(ROWS)
    session = TrainingSession(trainable())
    for form in (data, cut(data, 2), Samples(data)):
        source = open_data(form, session.inputs, batch_size=2, prefetch=3)
        assert [part.prefetch for part in split_source(source, 0.3)] == [3, 0]
