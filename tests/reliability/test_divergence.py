"""A loss that is NaN or infinite stops `fit`, which says where and what to look at."""

from __future__ import annotations

import math

import numpy as np
import pytest
from training_models import affine, affine_batch, assert_same_arrays, classifier, labelled

from ortops import OrtopsError, TrainingSession, build_training_model
from ortops.errors import DivergedError
from ortops.optimizers import SGD


def diverging(rate: float) -> TrainingSession:
    return TrainingSession(
        build_training_model(affine(), loss="MeanSquaredError", optimizer=SGD(rate))
    )


@pytest.mark.parametrize("progress", [False, True])
def test_a_loss_that_is_not_finite_stops(progress: bool) -> None:
    session, by_hand = diverging(1e15), diverging(1e15)
    data = affine_batch(8)
    cut = [{name: array[i : i + 2] for name, array in data.items()} for i in range(0, 8, 2)]
    made = 0
    while True:
        loss = float(by_hand.step(cut[made % 4])["loss"])
        made += 1
        if not math.isfinite(loss):
            break
    assert made > 1
    with pytest.raises(DivergedError) as raised:
        session.fit(data, epochs=9, batch_size=2, shuffle=False, progress=progress)
    assert str(raised.value) == (
        f"loss is {loss} at step {made} (batch {(made - 1) % 4 + 1} of epoch "
        f"{(made - 1) // 4 + 1}): the batch is finite, so check the learning rate (1e+15), and "
        "logarithms, divisions, roots and powers in the model and the loss; fit(…, "
        "detect_anomaly=True) names the node. The session is in the state after this step; "
        "earlier weights are available only if they were saved. Pass "
        "stop_on_nan=False to continue anyway"
    )
    assert isinstance(raised.value, OrtopsError)
    assert session.steps_done == made
    assert_same_arrays(dict(session.state), dict(by_hand.state))


def test_steps_are_counted_in_the_whole_training_and_in_the_epoch() -> None:
    session = diverging(0.1)
    session.fit(affine_batch(8), batch_size=2, progress=False)
    data = affine_batch(8)
    data["x"][5, 1] = np.nan
    data["x"][4, 2] = np.inf
    with pytest.raises(DivergedError) as raised:
        session.fit(data, batch_size=2, shuffle=False, progress=False)
    assert str(raised.value).startswith(
        "loss is nan at step 7 (batch 3 of epoch 1): in the batch, 'x' has 2 of 6 values that "
        "are not finite, first inf at [0, 2]; clean the data. The session is in the state after"
    )
    assert session.steps_done == 7


def test_without_stopping_it_goes_on() -> None:
    session = diverging(1e15)
    history = session.fit(
        affine_batch(8), epochs=9, batch_size=2, progress=False, stop_on_nan=False
    )
    assert len(history) == 9
    assert not math.isfinite(history[-1]["loss"])
    assert session.steps_done == 36


def test_integers_are_finite() -> None:
    session = TrainingSession(
        build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    batch = labelled((6,))
    batch["x"][0, 0] = np.nan
    with pytest.raises(DivergedError, match="in the batch, 'x' has 1 of 48 values that are not"):
        session.fit(batch, progress=False)
