"""The collector waits while graphs are made, and goes on as it did before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

import ortops
from models.mlp import mlp
from ortops import OrtopsError, TrainingSession, build_training_model
from ortops._common.garbage_collection import pause_collection


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_it_goes_on_as_before(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with pause_collection():
        assert not gc.isenabled()
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == enabled
    with pytest.raises(KeyError), pause_collection():
        raise KeyError
    assert gc.isenabled() == enabled


@pytest.mark.parametrize("enabled", [True, False])
def test_while_a_model_is_built_and_opened(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    found = []

    def loss(prediction: ortops.Tensor, targets: ortops.Tensor) -> ortops.Tensor:
        found.append(gc.isenabled())
        return ortops.op.ReduceMean(abs(prediction - targets), keepdims=0)

    session = TrainingSession(build_training_model(mlp((4, 3, 2)), loss=loss, optimizer="SGD"))
    assert gc.isenabled() == enabled
    session.step({"images": np.ones((2, 4), np.float32), "targets": np.ones((2, 2), np.float32)})
    assert found == [False]
    assert gc.isenabled() == enabled
    with pytest.raises(OrtopsError):
        build_training_model(b"no model", loss="L1", optimizer="SGD")
    assert gc.isenabled() == enabled


def test_what_stays_is_old_at_once() -> None:
    gc.unfreeze()
    try:
        with pause_collection(stays=True):
            made: list[list[int]] = [[number] for number in range(100)]
        assert any(each is made for each in gc.get_objects(generation=2))
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()  # as it was: see conftest.py


def test_what_was_frozen_stays_so() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with pause_collection(stays=True):
        made: list[list[int]] = [[number] for number in range(100)]
    assert gc.get_freeze_count() == frozen
    assert len(made) == 100
