"""Batches, and parts of them, in which no label counts: they count as nothing anywhere."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from training_models import Arrays, assert_same_arrays, classifier, labelled

import ortops
from ortops import Tape, Tensor, TrainingSession, build_training_model, losses, op
from ortops.callbacks import Callback
from ortops.engine.training.gradients import Accumulation
from ortops.engine.training.position import POSITION_KEY
from tests.loss_models import Array, loss_and_gradients, value_and_count

RNG = np.random.default_rng(0)
Y = RNG.normal(size=(6, 4))
MAPS = RNG.normal(size=(3, 4, 2, 5))
LAST = RNG.normal(size=(2, 3, 4))
IGNORED = -100

# ------------------------------------------------------------------------------------ the losses

SOFTMAX, LIKELIHOOD = losses.SoftmaxCrossEntropy, losses.NegativeLogLikelihood
NO_WEIGHTS = (0.0, 0.0, 1.0, 1.0)

EMPTY: dict[str, tuple[Any, Array, Array]] = {
    "ignored": (SOFTMAX(ignore_index=IGNORED), Y, np.full(6, IGNORED)),
    "a class is ignored": (SOFTMAX(ignore_index=3), Y, np.full(6, 3)),
    "classes last": (SOFTMAX(ignore_index=-1, axis=-1), LAST, np.full((2, 3), -1)),
    "smoothed": (SOFTMAX(ignore_index=IGNORED, label_smoothing=0.1), Y, np.full(6, IGNORED)),
    "weights of 0": (SOFTMAX(weights=NO_WEIGHTS), Y, np.array([0, 1, 0, 1, 1, 0])),
    "weights of 0, smoothed": (
        *(SOFTMAX(weights=NO_WEIGHTS, label_smoothing=0.1), Y),
        np.array([0, 1, 0, 1, 1, 0]),
    ),
    "weights of 0 or ignored": (
        *(SOFTMAX(weights=NO_WEIGHTS, ignore_index=IGNORED), Y),
        np.array([0, IGNORED, 0, 1, 1, IGNORED]),
    ),
    "likelihood": (LIKELIHOOD(ignore_index=IGNORED), Y, np.full(6, IGNORED)),
    "likelihood, weights of 0": (LIKELIHOOD(weights=NO_WEIGHTS), Y, np.array([0, 1, 0, 1, 1, 0])),
    "focal": (losses.Focal(multiclass=True, ignore_index=7), Y, np.full(6, 7)),
    "dice": (losses.Dice(multiclass=True, ignore_index=7), MAPS, np.full((3, 2, 5), 7)),
    "dice, not smoothed": (
        *(losses.Dice(multiclass=True, ignore_index=7, smooth=0.0), MAPS),
        np.full((3, 2, 5), 7),
    ),
    "dice of samples": (
        *(losses.Dice(multiclass=True, ignore_index=7, per_sample=True, smooth=0.0), MAPS),
        np.full((3, 2, 5), 7),
    ),
}
"""A loss, outputs, and labels none of which counts."""


OF_NOTHING = [
    (name, reduction)
    for name, reduction in itertools.product(EMPTY, ("mean", "sum"))
    if (name, reduction) != ("weights of 0, smoothed", "sum")  # smoothing counts all classes
]


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "reduction"), OF_NOTHING)
def test_a_loss_of_nothing_is_0_with_gradient_0(name: str, reduction: str, dtype: Any) -> None:
    loss, y, labels = EMPTY[name]
    loss = type(loss)(**{**vars(loss), "reduction": reduction})
    outputs = {"y": y.astype(dtype)}
    for symbolic in (False, True):
        value, gradients = loss_and_gradients(loss, outputs, {"labels": labels}, symbolic=symbolic)
        assert value == 0
        np.testing.assert_array_equal(gradients["y"], 0)


@pytest.mark.parametrize("name", EMPTY)
def test_the_count_of_nothing_is_0(name: str) -> None:
    loss, y, labels = EMPTY[name]
    value, count = value_and_count(loss, y.astype(np.float32), labels)
    assert (value, count) == (0, 0)


def test_rows_without_labels_count_as_nothing_in_dice_of_samples() -> None:
    """The mean is over the other rows, so that parts of a batch add up to the batch."""
    loss = losses.Dice(multiclass=True, ignore_index=7, per_sample=True)
    labels = RNG.integers(0, 4, (3, 2, 5))
    labels[1] = 7
    labels[2, 1] = 7
    maps = MAPS.astype(np.float32)
    value, count = value_and_count(loss, maps, labels)
    expected, number = value_and_count(loss, maps[[0, 2]], labels[[0, 2]])
    assert (count, number) == (2, 2)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    parts = [value_and_count(loss, maps[n : n + 1], labels[n : n + 1]) for n in range(3)]
    assert [float(count) for _, count in parts] == [1, 0, 1]
    np.testing.assert_allclose(value, sum(v * c for v, c in parts) / 2, rtol=1e-6)


@pytest.mark.slow
def test_targets_of_no_labels_in_ctc() -> None:
    """Of blanks alone: minus the logarithms of their probabilities."""
    y = RNG.normal(size=(5, 2, 3))
    log_p = y - np.log(np.exp(y).sum(-1, keepdims=True))
    feeds = {"labels": np.zeros((2, 0), np.int64), "input_lengths": np.array([5, 3])}
    value, gradients = loss_and_gradients(
        losses.CTC(), {"y": log_p}, {**feeds, "target_lengths": np.zeros(2, np.int64)}
    )
    expected = -(log_p[:5, 0, 0].sum() + log_p[:3, 1, 0].sum()) / 2
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert np.isfinite(gradients["y"]).all()


def test_a_single_row_of_a_loss_that_compares_rows() -> None:
    row = {"a": Y[:1], "b": Y[1:2]}
    value, gradients = loss_and_gradients(losses.InfoNCE(query="a", key="b"), row, {})
    assert value == 0
    for gradient in gradients.values():
        np.testing.assert_allclose(gradient, 0, atol=1e-12)


# ---------------------------------------------------------------------------------- the sessions


def masked(logits: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """As people write it: a sum and a count."""
    picked = op.GatherElements(op.LogSoftmax(logits, axis=1), op.Unsqueeze(labels, [1]), axis=1)
    each = -op.Squeeze(picked, [1]) * mask
    return op.ReduceSum(each, keepdims=0), op.ReduceSum(mask, keepdims=0)


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    """As people write it for language models, with a loss of ortops: here each row is a token."""
    each = losses.SoftmaxCrossEntropy(ignore_index=IGNORED)
    return each(logits[:-1], labels[1:])


ALL, NONE = np.ones(8, bool), np.zeros(8, bool)
SOME = np.arange(8) % 3 == 0


def with_labels(data: Arrays, counted: Array) -> Arrays:
    return data | {"labels": np.where(counted, data["labels"], IGNORED)}


def with_mask(data: Arrays, counted: Array) -> Arrays:
    return data | {"mask": counted.astype(np.float32)}


def with_weights(data: Arrays, counted: Array) -> Arrays:
    return data | {"labels": np.where(counted, data["labels"] % 2, 2)}


Kind = tuple[Any, dict[str, Any], Callable[[Arrays, Array], Arrays]]

KINDS: dict[str, Kind] = {
    "ignored": (SOFTMAX(ignore_index=IGNORED), {}, with_labels),
    "half of it": (0.5 * SOFTMAX(ignore_index=IGNORED), {}, with_labels),
    "smoothed": (SOFTMAX(ignore_index=IGNORED, label_smoothing=0.1), {}, with_labels),
    "focal": (losses.Focal(multiclass=True, ignore_index=IGNORED), {}, with_labels),
    "weights": (SOFTMAX(weights=(1.0, 3.0, 0.0)), {}, with_weights),
    "a mask": (masked, {"inputs": {"mask": (np.float32, ["batch"])}}, with_mask),
}
"""Losses in which labels may not count, and what makes some of them not count."""


def session_of(kind: str, optimizer: Any = "Adam", **options: Any) -> TrainingSession:
    loss, more, _ = KINDS[kind]
    model = build_training_model(classifier(), loss=loss, optimizer=optimizer, **more, **options)
    return TrainingSession(model)


def batch(kind: str, counted: Array, seed: int = 0) -> Arrays:
    return KINDS[kind][2](labelled((6,), rows=8, seed=seed), counted[:8])


def joined(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def assert_finite(session: TrainingSession) -> None:
    for name, array in session.state.items():
        assert np.isfinite(array).all(), name


SGD = ortops.optimizers.SGD(0.1)
STILL = ortops.optimizers.SGD(0.0)
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.nightly(2)
@pytest.mark.slow
@every_kind
def test_a_step_of_nothing_changes_no_weight(kind: str) -> None:
    """By gradients of 0; the optimizer still counts it."""
    empty = batch(kind, NONE)
    steps = {
        "step": lambda session: session.step(empty)["loss"],
        "run_steps": lambda session: session.run_steps([empty] * 3)[-1],
        "apply": lambda session: session.apply(session.gradients(empty)),
        "reduce": lambda session: session.step(empty, reduce=lambda gradients: None)["loss"],
        "fit": lambda session: session.fit([empty] * 3, progress=False),
        "accumulate": lambda session: session.fit([empty] * 3, accumulate=2, progress=False),
    }
    for way, make in steps.items():
        session = session_of(kind, SGD)
        before = session.parameters
        found = make(session)
        assert way not in ("step", "run_steps", "reduce") or found == 0
        assert_same_arrays(dict(session.parameters), dict(before))
        assert session.steps_done == {"run_steps": 3, "fit": 3, "accumulate": 2}.get(way, 1)
    gradients = session_of(kind).gradients(empty)
    assert (gradients.loss, gradients.count) == (0, 0)
    assert all(not array.any() for array in gradients.values())


@pytest.mark.nightly(3)
@pytest.mark.slow
@every_kind
def test_an_optimizer_goes_on_as_with_gradients_of_0(kind: str) -> None:
    """Momentum moves weights on, weight decay shrinks them, as in a step of PyTorch's."""
    adam = ortops.optimizers.AdamW(0.01, weight_decay=0.1)
    session, other = session_of(kind, adam), session_of(kind, adam)
    for each in (session, other):
        each.step(batch(kind, ALL))
    before = session.parameters
    session.step(batch(kind, NONE))
    other.apply({name: np.zeros_like(array) for name, array in before.items()})
    assert_same_arrays(dict(session.state), dict(other.state))
    assert_finite(session)
    assert any((session.parameters[name] != array).any() for name, array in before.items())


@pytest.mark.quick(1)
@every_kind
def test_fit_goes_on_over_batches_of_nothing(kind: str) -> None:
    """The others have the losses, and the average, that they would have alone."""
    full, empty = batch(kind, ALL), batch(kind, NONE)
    some = batch(kind, SOME, seed=1)
    session, other = session_of(kind, STILL), session_of(kind, STILL)
    seen: list[float] = []

    class See(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            seen.append(record.values["loss"])

    found = session.fit([empty, full, empty, some], callbacks=[See()], progress=False)
    expected = other.fit([full, some], progress=False)
    np.testing.assert_allclose(found[0]["loss"], expected[0]["loss"], rtol=1e-12)
    assert [seen[0], seen[2]] == [0, 0]
    assert seen[1] == float(other.step(full)["loss"])
    assert found[0]["steps"] == 4


@pytest.mark.nightly
@pytest.mark.quick(1)
@every_kind
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_averages_are_those_of_the_whole(kind: str, accumulate: int) -> None:
    """Of an epoch, and of an evaluation, however many labels count in which part."""
    parts = [
        batch(kind, counted, seed)
        for seed, counted in enumerate([NONE, ALL, SOME, NONE, ~SOME, ALL])
    ]
    whole = joined(parts)
    session = session_of(kind, STILL)
    loss = float(session.step(whole)["loss"])
    found = session.fit(parts, accumulate=accumulate, shuffle=False, progress=False)
    np.testing.assert_allclose(found[0]["loss"], loss, rtol=1e-6)
    for data, options in ((parts, {}), (whole, {}), (whole, {"batch_size": 5})):
        found = session.evaluate(data, **options)
        np.testing.assert_allclose(found["loss"], loss, rtol=1e-6)


def test_an_average_of_nothing_is_undefined() -> None:
    """It is no 0, which would be the best loss there is."""
    session, empty = session_of("ignored"), batch("ignored", NONE)
    found = session.evaluate([empty], metrics=["accuracy", "perplexity"])
    assert all(map(math.isnan, found.values()))
    assert found.keys() == {"loss", "accuracy", "perplexity"}
    history = session.fit([empty], validation=[empty], metrics=["accuracy"], progress=False)
    assert math.isnan(history[0]["loss"])
    assert math.isnan(history[0]["validation_loss"])
    full = batch("ignored", ALL)
    found = session.evaluate([empty, full], metrics=["accuracy", "perplexity"])
    assert found == session.evaluate([full], metrics=["accuracy", "perplexity"])


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", [NONE, SOME])
def test_parts_without_labels_add_up_to_the_batch(part: Array) -> None:
    for kind in KINDS:
        session = session_of(kind)
        parts = [batch(kind, part), batch(kind, ALL, seed=1), batch(kind, NONE, seed=2)]
        whole = joined(parts)
        total = Accumulation(session.gradients(parts[0]))
        for more in parts[1:]:
            total.add(session.gradients(more))
        found, expected = total.result(), session.gradients(whole)
        np.testing.assert_allclose([found.loss, found.count], [expected.loss, expected.count], 1e-6)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7)


def test_a_function_with_a_loss_of_ortops() -> None:
    model = build_training_model(classifier(), loss=next_token, optimizer=SGD)
    session = TrainingSession(model)
    before = session.parameters
    empty, full = batch("ignored", NONE), batch("ignored", ALL)
    session.fit([empty], progress=False)
    assert session.step(empty)["loss"] == 0
    assert_same_arrays(dict(session.parameters), dict(before))
    session.step(full)
    assert_finite(session)


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ignored", "weights", "smoothed", "likelihood"])
def test_cross_entropy_of_0_rows(kind: str, lowered: bool, reduction: str) -> None:
    """As of other losses; here the only row of the batch has no next one."""
    loss = {
        "plain": SOFTMAX(reduction=reduction),
        "ignored": SOFTMAX(ignore_index=IGNORED, reduction=reduction),
        "weights": SOFTMAX(weights=(1.0, 2.0, 3.0), reduction=reduction),
        "smoothed": SOFTMAX(ignore_index=IGNORED, label_smoothing=0.1, reduction=reduction),
        "likelihood": LIKELIHOOD(ignore_index=IGNORED, reduction=reduction),
    }[kind]

    def of_next(logits: Tensor, labels: Tensor) -> Tensor:
        return loss(logits[:-1], labels[1:])

    session = TrainingSession(build_training_model(classifier(), loss=of_next, optimizer=SGD))
    before, row = session.parameters, labelled((6,), rows=1, seed=0)
    if lowered:
        graph = ortops.lower(ortops.step_graph(session.model()))
        plain = onnxruntime.InferenceSession(graph.SerializeToString())
        assert plain.run(["loss"], row) == [0]
        return
    assert session.step(row)["loss"] == 0
    assert_same_arrays(dict(session.parameters), dict(before))


def of_two_losses(*counted: Array) -> tuple[TrainingSession, list[Arrays]]:
    """A sum of a loss of labels, some of which do not count, and one of numbers; and batches."""
    boxes = losses.MeanSquaredError("logits", target="boxes")
    loss = 2.0 * SOFTMAX(ignore_index=IGNORED) + 3.0 * boxes
    rng = np.random.default_rng(3)
    parts = [
        batch("ignored", each, seed) | {"boxes": rng.normal(size=(8, 3)).astype(np.float32)}
        for seed, each in enumerate(counted)
    ]
    model = build_training_model(classifier(), loss=loss, optimizer=STILL)
    return TrainingSession(model), parts


def test_a_summand_of_nothing() -> None:
    """The others count as they do; the sum has no NaN."""
    session, parts = of_two_losses(NONE, SOME, ALL)
    found = session.step(parts[0])
    labels, values = session.loss_names()[1:]
    assert found[labels] == 0
    np.testing.assert_allclose(found["loss"], 3 * found[values], rtol=1e-6)
    whole = joined(parts)
    expected = session.step(whole, outputs=["loss", labels, values])
    entry = session.fit(parts, shuffle=False, progress=False)[0]
    evaluated = session.evaluate(parts)
    for name in ("loss", labels, values):
        np.testing.assert_allclose(entry[name], expected[name], rtol=1e-6)
        np.testing.assert_allclose(evaluated[name], expected[name], rtol=1e-6)
    evaluated = session.evaluate(parts[:1])
    assert math.isnan(evaluated[labels])
    np.testing.assert_allclose(evaluated["loss"], 3 * evaluated[values], rtol=1e-6)
    with pytest.raises(ortops.OrtopsError, match="give the whole batch at once"):
        session.fit(parts, accumulate=2, shuffle=False, progress=False)


def test_the_average_of_a_sum_weighs_each_summand_by_what_counts() -> None:
    """Also where as many labels count as if all batches were like the first: half of them."""
    session, parts = of_two_losses(np.arange(8) < 4, NONE, ALL)
    whole = joined(parts)
    expected = float(session.step(whole)["loss"])
    entry = session.fit(parts, progress=False)[0]
    np.testing.assert_allclose(entry["loss"], expected, rtol=1e-6)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lowered", [False, True])
def test_step_graphs_in_stock_onnxruntime(kind: str, lowered: bool) -> None:
    session = session_of(kind, SGD)
    graph = ortops.step_graph(session.model(), target="onnxruntime" if lowered else None)
    plain = onnxruntime.InferenceSession(graph.SerializeToString())
    names = [value.name for value in plain.get_outputs()]
    found = dict(zip(names, plain.run(None, batch(kind, NONE)), strict=True))
    assert found["loss"] == 0
    for name, array in session.parameters.items():
        np.testing.assert_array_equal(found[f"{name}_new"], array)
    plain = onnxruntime.InferenceSession(ortops.lower(graph).SerializeToString())
    assert not any(np.isnan(array).any() for array in plain.run(None, batch(kind, NONE)))


class StopAt(Callback):
    """Ends the training after some batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_step(self, record: Any, session: Any) -> None:
        if record.batch == self.batch:
            record.stop("enough")


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupted_epoch_keeps_its_weights(accumulate: int) -> None:
    counted = [NONE, SOME, ALL, NONE, ~SOME, ALL]
    data = [batch("ignored", each, seed) for seed, each in enumerate(counted)]
    options: dict[str, Any] = {"epochs": 2, "accumulate": accumulate, "progress": False}
    whole = session_of("ignored")
    expected = whole.fit(data, **options)
    session = session_of("ignored")
    session.fit(data, callbacks=[StopAt(4)], **options)
    resumed = TrainingSession(session.model())
    assert resumed.fit(data, callbacks=[StopAt(0)], resume=True, **options) == expected
    assert_same_arrays(dict(resumed.state), dict(whole.state))


def test_a_position_of_an_older_version_is_taken() -> None:
    """It has no weights: all rows so far count alike, as they do here."""
    data = [batch("ignored", each, seed) for seed, each in enumerate([ALL, ALL, ~SOME])]
    expected = session_of("ignored").fit(data, progress=False)
    session = session_of("ignored")
    session.fit(data, callbacks=[StopAt(1)], progress=False)
    model = session.model()
    (entry,) = (each for each in model.metadata_props if each.key == POSITION_KEY)
    assert ', "weights": [8.0], "units": [1.0]' in entry.value
    entry.value = entry.value.replace(', "weights": [8.0], "units": [1.0]', "")
    resumed = TrainingSession(model)
    found = resumed.fit(data, callbacks=[StopAt(0)], resume=True, progress=False)
    assert found == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["totals", "weights", "units"])
def test_a_position_with_sums_of_other_losses_is_refused(name: str) -> None:
    data = [batch("ignored", ALL)] * 3
    session = session_of("ignored")
    session.fit(data, callbacks=[StopAt(1)], progress=False)
    model = session.model()
    (entry,) = (each for each in model.metadata_props if each.key == POSITION_KEY)
    entry.value = json.dumps(json.loads(entry.value) | {name: [1.0, 2.0]})
    resumed = TrainingSession(model)
    message = f"'{name}' must have one number for each loss, 1 in all, got 2"
    with pytest.raises(ortops.ModelError, match=message):
        resumed.fit(data, callbacks=[StopAt(0)], resume=True, progress=False)


def test_where_all_labels_count_averages_are_those_by_rows() -> None:
    """Bit by bit, also where a row has several labels."""
    with Tape(name="tokens") as tape:
        x = tape.input("x", np.float32, ["batch", 3, 6])
        w = tape.initializer("w", RNG.normal(size=(6, 4)).astype(np.float32))
        tape.output(x @ w, "logits")
    model = build_training_model(
        tape.model(), loss=SOFTMAX(ignore_index=IGNORED, axis=-1), optimizer=STILL
    )
    session = TrainingSession(model)
    sizes = [5, 7, 3, 1]
    parts = [
        {
            "x": RNG.normal(size=(size, 3, 6)).astype(np.float32),
            "labels": RNG.integers(0, 4, (size, 3)),
        }
        for size in sizes
    ]
    values = [float(session.step(part)["loss"]) for part in parts]
    total = 0.0
    for value, size in zip(values, sizes, strict=True):
        total += value * size
    assert session.fit(parts, progress=False)[0]["loss"] == total / sum(sizes)
