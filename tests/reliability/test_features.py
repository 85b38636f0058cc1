"""Any combination of features of `fit`: equal bits in every form of data, and after every stop.

Which features there are, and which combinations mean nothing, says `features`; what has to hold,
`feature_checks`. ORTOPS_FEATURES_DRAWS says how many combinations are drawn, and
ORTOPS_FEATURES_SEED which ones. A failure shows the simplest combination that fails:

    PYTHONPATH=tests:tests/reliability python -c "from feature_checks import *; check(Draw(…))"
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from attacks import SOAK
from feature_checks import check, failure_of, failures_of
from features import AXES, EXPORTED, FIT, WITHOUT_AXIS, Draw

from ortops import OrtopsError, TrainingSession
from ortops.engine.training.fit_options import OPTIONS

DRAWS = int(os.environ.get("ORTOPS_FEATURES_DRAWS", "30" if SOAK == 1 else str(1000 * SOAK)))
"""How many combinations are drawn: 552 have every pair of values, 150 nine of ten, 30 over half."""

SEED = int(os.environ.get("ORTOPS_FEATURES_SEED", "0"))
"""Determines which ones."""

AT_ONCE = 10 if SOAK == 1 else 100
"""How many combinations a test has: few, so that processes of pytest can share them."""


@functools.cache
def drawn(seed: int) -> list[Draw]:
    return list(FIT.draws(seed, DRAWS))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("first", range(0, DRAWS, AT_ONCE))
def test_any_combination_of_features(seed: int, first: int) -> None:
    failures = failures_of(drawn(seed)[first : first + AT_ONCE], timeout=20 * AT_ONCE)
    shown = "\n".join(map(str, failures))
    assert not failures, f"ORTOPS_FEATURES_SEED={seed}, {len(failures)} failed:\n{shown}"


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("seed", [SEED])
@pytest.mark.parametrize("model", EXPORTED)
def test_any_combination_with_a_model_of_torch(model: str, seed: int) -> None:
    for draw in FIT.draws_of(seed, 2 * SOAK, model=model):
        failure = failure_of(draw)
        assert failure is None, f"ORTOPS_FEATURES_SEED={seed}\n{failure}"


@pytest.mark.slow
def test_every_pair_of_values_is_drawn() -> None:
    missing = FIT.legal_pairs()
    for draw in FIT.draws(SEED, 600):
        missing -= FIT.pairs_of(draw)
    assert not missing


def test_each_argument_of_fit_is_an_axis_or_has_a_reason() -> None:
    assert sorted(OPTIONS) == sorted([*(OPTIONS.keys() & AXES.keys()), *WITHOUT_AXIS])


REFUSED = [
    (Draw(data="iterator", epochs=2), "can be iterated over once"),
    (Draw(data="dict", fixed=True, batch_size=4), "the model's batch size is fixed at 4"),
    (Draw(data="single array"), "without names for 2 inputs"),
    (
        Draw(loss="sum of classes", accumulate=4, batch_size=1, reference="fit"),
        "so the gradients of parts",
    ),
    (Draw(entries=True), "which is trained by the entry 'main'"),
    (Draw(metrics=True), "is computed on validation data"),
    (Draw(metrics=True, validation="dict", loss="function"), "the loss has 0 inputs"),
    (
        Draw(callbacks="restore_best in memory", epochs=2, end="error", stop=3, goes_on="file"),
        "is only in the memory of the callback that fit started with",
    ),
    (Draw(optimizer="Prodigy", groups=True), "groups must have one learning rate"),
    (Draw(optimizer="ScheduleFreeAdamW", ema=True), "ema_decay must be left out"),
    (Draw(in_backward=True, clip="norm"), "reads the gradients of 3 parameters"),
    (Draw(in_backward=True, optimizer="Prodigy"), "reads the gradients of 3 parameters"),
    (Draw(in_backward=True, model="half"), "with the loss scaling of float16"),
    (
        Draw(in_backward=True, accumulate=2, batch_size=1, reference="fit"),
        "fit.accumulate=. and distributed training are not available",
    ),
    (Draw(in_backward=True, kernels="python"), "not available with kernels='python'"),
    (
        Draw(in_backward=True, entries=True, trainable="some"),
        "a step of 2 training_info entries; choose one",
    ),
    (Draw(in_backward=True, also="plain kernels"), "`gradients`, `apply`, .* are not available"),
]
"""Combinations that ortops refuses, with what it says."""


@pytest.mark.quick(10)
@pytest.mark.parametrize(("draw", "message"), REFUSED, ids=repr)
def test_what_cannot_be_combined_is_refused(draw: Draw, message: str) -> None:
    assert not FIT.is_legal(draw)
    with pytest.raises(OrtopsError, match=message):
        check(draw)


ONCE_WRONG = [
    Draw(
        model="half overflowing",
        epochs=2,
        accumulate=2,
        callbacks=callback,
        end="stop",
        stop=2,
        reference="gradients",
    )
    for callback in ("BestModel", "restore_best")  # they kept the state after a skipped step
]
ONCE_WRONG += [  # onnxruntime did not optimize a graph that had more sums of updates than products
    Draw(
        model="convolutional",
        optimizer="RMSprop",
        ema=True,
        trainable="some",
        in_backward=True,
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("draw", ONCE_WRONG, ids=repr)
def test_combinations_that_were_once_wrong(draw: Draw) -> None:
    check(draw)


@pytest.mark.slow
def test_a_failure_shows_the_simplest_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here fit shuffles in another order where a thread reads two batches ahead, or more."""
    fit = TrainingSession.fit

    def broken(self: TrainingSession, data: Any, **given: Any) -> Any:
        given["seed"] += given["prefetch"] >= 2
        return fit(self, data, **given)

    monkeypatch.setattr(TrainingSession, "fit", broken)
    failure = failure_of(
        Draw(
            model="classifier",
            loss="Huber",
            optimizer="Adam",
            data="tuple",
            batch_size=4,
            epochs=2,
            shuffle=True,
            prefetch=3,
            callbacks="CSVLog",
            end="error",
        )
    )
    assert failure is not None
    assert failure.draw == "Draw(data='dict', shuffle=True, prefetch=2)"
    assert failure.problem.startswith("AssertionError: history: loss of epoch 1 is ")
