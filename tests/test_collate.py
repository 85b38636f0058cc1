"""Samples of different lengths: `collate=`, padding, and batches of similar length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ArgumentError, FeedError, OrtopsError, TrainingSession, losses, metrics
from ortops.data import Pad
from ortops.engine.training.row_data import grouped

RNG = np.random.default_rng
LENGTHS = [3, 5, 2, 5, 1, 4, 6]


def built(text: str, loss: Any, **weights: tuple[int, ...]) -> TrainingSession:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)
    rng = RNG(0)
    for name, shape in weights.items():
        array = rng.normal(0, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return TrainingSession(ortops.build_training_model(model, loss=loss, optimizer="Adam"))


MASKED = """g (int64[batch, time] tokens, int64[batch, time] attention_mask) => (float[batch, 3] y)
<int64[1] last = {2}, int64[1] times = {1}>
{ e = Gather(table, tokens) m = Cast<to=1>(attention_mask) column = Unsqueeze(m, last)
  kept = Mul(e, column) total = ReduceSum<keepdims=0>(kept, times)
  count = ReduceSum<keepdims=1>(m, times) mean = Div(total, count) y = MatMul(mean, w) }"""
"""The mean of the embeddings that the mask keeps, and a linear layer."""

TAGGER = """g (int64[batch, time] tokens) => (float[batch, time, 3] y)
{ e = Gather(table, tokens) y = MatMul(e, w) }"""


def masked(loss: Any = "SoftmaxCrossEntropy") -> TrainingSession:
    return built(MASKED, loss, table=(9, 4), w=(4, 3))


def rows(lengths: Any = LENGTHS) -> dict[str, Any]:
    rng = RNG(1)
    return {
        "tokens": [rng.integers(0, 9, length) for length in lengths],
        "labels": rng.integers(0, 3, len(lengths)),
    }


def samples(data: dict[str, Any]) -> list[dict[str, Any]]:
    size = len(next(iter(data.values())))
    return [{name: column[row] for name, column in data.items()} for row in range(size)]


def mean_loss(session: TrainingSession, data: dict[str, Any]) -> float:
    """The loss of MASKED in numpy, sample by sample."""
    table, w = (session.state[name].astype(np.float64) for name in ("table", "w"))
    found = []
    for tokens, label in zip(data["tokens"], data["labels"], strict=True):
        y = table[tokens].mean(0) @ w
        found.append(np.log(np.exp(y).sum()) - y[label])
    return float(np.mean(found))


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["lists", "tuple", "samples", "tuples", "dataset", "function"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_padding_changes_nothing_where_a_mask_excludes_it(
    form: str, side: str, batch_size: int
) -> None:
    data, session = rows(), masked()
    pad = Pad(side=side)
    given: Any = data
    if form == "tuple":
        given = (data["tokens"], [np.ones_like(t) for t in data["tokens"]], data["labels"])
    elif form in ("samples", "function"):
        given = samples(data)
    elif form == "tuples":
        given = [(t, np.ones_like(t), n) for t, n in zip(*data.values(), strict=True)]
    elif form == "dataset":

        class Dataset:
            def __len__(self) -> int:
                return len(LENGTHS)

            def __getitem__(self, row: int) -> Any:
                return samples(data)[row]

        given = Dataset()
    found = session.evaluate(
        (lambda: given) if form == "function" else given, collate=pad, batch_size=batch_size
    )
    assert found["loss"] == pytest.approx(mean_loss(session, data), rel=1e-5)


def test_the_mask_that_is_filled_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ortops"):
        masked().fit(rows(), collate="pad", batch_size=2, epochs=2, progress=False)
    said = [one for one in caplog.messages if "attention_mask" in one]
    assert len(said) == 1
    assert "'attention_mask' gets 1 for values and 0 for padding of 'tokens'" in said[0]


def test_a_mask_of_the_samples_is_kept() -> None:
    data, session = rows(), masked()
    first = [np.eye(1, len(tokens), dtype=np.int64)[0] for tokens in data["tokens"]]
    found = session.evaluate({**data, "attention_mask": first}, collate="pad")["loss"]
    only = {**data, "tokens": [tokens[:1] for tokens in data["tokens"]]}
    assert found == pytest.approx(mean_loss(session, only), rel=1e-5)


def test_training_with_padding_equals_that_of_batches_padded_by_hand() -> None:
    data = rows()
    longest = max(LENGTHS)
    by_hand = {
        "tokens": np.stack([np.pad(t, (0, longest - len(t))) for t in data["tokens"]]),
        "attention_mask": np.stack([np.arange(longest) < n for n in LENGTHS]).astype(np.int64),
        "labels": data["labels"],
    }
    one, other = masked(), masked()
    one.fit(data, collate="pad", epochs=3, batch_size=32, progress=False)
    other.fit(by_hand, epochs=3, batch_size=32, progress=False)
    assert one.state["table"].tobytes() == other.state["table"].tobytes()


def test_predictions_are_in_the_order_of_the_rows() -> None:
    data, session = rows(), masked()
    found = session.predict({"tokens": data["tokens"]}, outputs="y", collate="pad", batch_size=3)
    table, w = session.state["table"], session.state["w"]
    expected = np.stack([table[tokens].mean(0) @ w for tokens in data["tokens"]])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    labelled = session.predict(samples(data), outputs="y", collate="pad", batch_size=3)
    np.testing.assert_array_equal(labelled, found)


@pytest.mark.slow
def test_labels_are_padded_with_what_the_loss_ignores() -> None:
    loss = losses.SoftmaxCrossEntropy(ignore_index=-1, axis=2)
    session = built(TAGGER, loss, table=(9, 4), w=(4, 3))
    rng = RNG(2)
    data = {
        "tokens": [rng.integers(0, 9, length) for length in LENGTHS],
        "labels": [rng.integers(0, 3, length) for length in LENGTHS],
    }
    found = session.evaluate(data, collate="pad", batch_size=4, metrics=["accuracy"])
    table, w = session.state["table"].astype(np.float64), session.state["w"].astype(np.float64)
    y, labels = table[np.concatenate(data["tokens"])] @ w, np.concatenate(data["labels"])
    expected = (np.log(np.exp(y).sum(1)) - y[np.arange(len(labels)), labels]).mean()
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["accuracy"] == pytest.approx((y.argmax(1) == labels).mean())


def test_labels_without_ignore_index_are_not_padded() -> None:
    session = built(TAGGER, losses.SoftmaxCrossEntropy(axis=2), table=(9, 4), w=(4, 3))
    ragged = [np.zeros(length, np.int64) for length in (2, 3)]
    data = {"tokens": ragged, "labels": ragged}
    with pytest.raises(FeedError, match=r"'labels' differ in length, .* has no ignore_index"):
        session.evaluate(data, collate="pad")
    session.evaluate(data, collate=Pad(values={"labels": 1}))


def test_weights_of_positions_exclude_padding() -> None:
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + TAGGER)
    for name, shape in {"table": (9, 4), "w": (4, 3)}.items():
        array = RNG(0).normal(0, 0.5, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    built = ortops.build_training_model(
        model,
        loss=losses.SoftmaxCrossEntropy(sample_weight="weight", axis=2),
        optimizer="SGD",
        inputs={"weight": (np.float32, ["batch", "time"])},
    )
    session, rng = TrainingSession(built), RNG(2)
    data = {name: [rng.integers(0, 3, n) for n in LENGTHS] for name in ("tokens", "labels")}
    pad = Pad(masks={"labels": "weight"})
    whole = session.evaluate(data, collate=pad)["loss"]
    y = session.state["table"][np.concatenate(data["tokens"])] @ session.state["w"]
    labels = np.concatenate(data["labels"])
    expected = (np.log(np.exp(y).sum(1)) - y[np.arange(len(labels)), labels]).mean()
    assert whole == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_lengths_of_ctc() -> None:
    text = "g (float[batch, time, 4] audio) => (float[batch, time, 5] y) { y = MatMul(audio, w) }"
    session = built(text, losses.CTC(batch_first=True), w=(4, 5))
    rng = RNG(3)
    data = {
        "audio": [rng.normal(size=(n + 6, 4)).astype(np.float32) for n in LENGTHS],
        "labels": [rng.integers(1, 5, -(-n // 2)) for n in LENGTHS],
    }
    pad = Pad(lengths={"audio": "input_lengths", "labels": "target_lengths"})
    found = session.evaluate(data, collate=pad, batch_size=3)["loss"]
    alone = [
        session.evaluate(
            {
                "audio": audio[None],
                "labels": labels[None],
                "input_lengths": [len(audio)],
                "target_lengths": [len(labels)],
            }
        )["loss"]
        for audio, labels in zip(*data.values(), strict=True)
    ]
    assert found == pytest.approx(np.mean(alone), rel=1e-5)
    given = {**data, "input_lengths": [len(audio) for audio in data["audio"]]}
    assert session.evaluate(given, collate="pad", batch_size=3)["loss"] == pytest.approx(found)


def test_images_of_different_sizes() -> None:
    text = """g (float[batch, 1, height, width] x, float[batch, height, width] mask)
    => (float[batch, 2] y) <int64[2] axes = {1, 2}, int64[1] one = {1}>
    { flat = Squeeze(x, one) m = Mul(flat, mask) s = ReduceSum<keepdims=0>(m, axes)
      c = Unsqueeze(s, one) y = Mul(c, w) }"""
    session = built(text, "MeanSquaredError", w=(2,))
    shapes = [(1, 2, 3), (1, 4, 1), (1, 3, 3)]
    images = [RNG(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(shapes)]
    data = {"x": images, "targets": np.zeros((3, 2), np.float32)}
    batch = Pad(values=7.0).join(samples(data), session.inputs)
    assert batch["x"].shape == (3, 1, 4, 3)
    for row, (_, height, width) in enumerate(shapes):
        np.testing.assert_array_equal(batch["x"][row, :, :height, :width], images[row])
        assert (batch["x"][row, :, height:] == 7).all()
        expected = np.zeros((4, 3))
        expected[:height, :width] = 1
        np.testing.assert_array_equal(batch["mask"][row], expected)


@pytest.mark.parametrize(("pad", "length"), [(Pad(multiple_of=4), 8), (Pad(length=11), 11)])
def test_lengths_are_rounded_up(pad: Pad, length: int) -> None:
    batch = pad.join(samples(rows()), masked().inputs)
    assert batch["tokens"].shape == batch["attention_mask"].shape == (len(LENGTHS), length)
    assert batch["attention_mask"].sum(1).tolist() == LENGTHS


def test_rows_on_another_axis() -> None:
    text = "g (float[time, batch, 2] x) => (float[time, batch, 2] y) { y = Mul(x, w) }"
    session = built(text, "MeanSquaredError", w=(2,))
    data = {"x": [np.full((n, 2), n, np.float32) for n in (2, 3)]}
    found = session.predict(data, outputs="y", collate="pad")
    w = session.state["w"]
    np.testing.assert_allclose(found[:, 0], np.stack([2 * w, 2 * w, 0 * w]), rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], np.stack([3 * w] * 3), rtol=1e-6)


# ---------------------------------------------------------------------------- a user's function


def join(several: list[Any]) -> dict[str, Any]:
    longest = max(len(sample["text"]) for sample in several)
    tokens = [[int(c) for c in sample["text"].ljust(longest, "0")] for sample in several]
    return {
        "tokens": np.array(tokens),
        "attention_mask": np.array([[int(c != "0") for c in map(str, row)] for row in tokens]),
        "labels": np.array([sample["label"] for sample in several]),
    }


def test_a_function_makes_batches_of_any_samples() -> None:
    texts = ["123", "45", "6", "7812"]
    given = [{"text": text, "label": n % 3} for n, text in enumerate(texts)]
    session = masked()
    plain = {
        "tokens": [np.array([int(c) for c in text]) for text in texts],
        "labels": [n % 3 for n in range(4)],
    }
    found = session.evaluate(given, collate=join, batch_size=3, metrics=["accuracy"])
    assert found["loss"] == pytest.approx(mean_loss(session, plain), rel=1e-5)
    history = session.fit(
        *(given,), collate=join, validation=given, metrics=["accuracy"], epochs=2, progress=False
    )
    assert {"loss", "validation_loss", "validation_accuracy"} <= history[-1].keys()
    found = session.predict(given, collate=join, outputs="y", batch_size=3)
    assert found.shape == (4, 3)


def test_a_function_may_return_the_same_memory() -> None:
    memory = np.empty((2, 3), np.float32)

    def refill(several: list[Any]) -> Any:
        memory[: len(several)] = several
        return memory[: len(several)]

    session = built(
        "g (float[batch, 3] x) => (float[batch, 2] y) { y = MatMul(x, w) }",
        losses.MeanSquaredError(),
        w=(3, 2),
    )
    data = list(RNG(0).normal(size=(7, 3)).astype(np.float32))
    found = session.predict(data, collate=refill, outputs="y", batch_size=2)
    np.testing.assert_allclose(found, np.stack(data) @ session.state["w"], rtol=1e-5, atol=1e-6)


def test_weights_of_rows_go_with_samples() -> None:
    session = masked(losses.SoftmaxCrossEntropy(sample_weight="weight"))
    data, weights = rows(), np.array([0, 2, 0, 0, 1, 0, 0], np.float32)
    found = session.evaluate(data, collate="pad", sample_weight=weights, batch_size=3)["loss"]
    each = [
        mean_loss(session, {"tokens": [data["tokens"][n]], "labels": [data["labels"][n]]})
        for n in (1, 4)
    ]
    assert found == pytest.approx((2 * each[0] + each[1]) / 3, rel=1e-5)
    of_samples = session.evaluate(samples(data), collate="pad", sample_weight=weights, batch_size=3)
    assert of_samples["loss"] == pytest.approx(found, rel=1e-6)
    session.fit(data, collate="pad", class_weight="balanced", progress=False)


@pytest.mark.slow
def test_validation_split_and_batch_size() -> None:
    session = masked()
    history = session.fit(rows(), collate="pad", validation_split=0.3, progress=False)
    expected = mean_loss(session, {name: column[4:] for name, column in rows().items()})
    assert history[-1]["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert ortops.find_batch_size(session, rows(), collate="pad") == len(LENGTHS)


# ---------------------------------------------------------------------------- similar lengths


def lengths_of_batches(session: TrainingSession, data: Any, **more: Any) -> list[list[int]]:
    """The lengths of the rows of each batch that a training reads."""
    seen: list[list[int]] = []

    def watch(several: list[Any]) -> Any:
        seen.append([len(sample["tokens"]) for sample in several])
        return Pad().join(several, session.inputs)

    session.fit(data, collate=watch, progress=False, **more)
    return seen


def test_batches_have_samples_of_similar_length() -> None:
    lengths = RNG(4).integers(1, 60, 203).tolist()
    data = rows(lengths)
    given: dict[str, Any] = {"batch_size": 10, "epochs": 2, "seed": 5}
    by_length = lengths_of_batches(masked(), data, group_by_length=lengths, **given)
    plain = lengths_of_batches(masked(), data, **given)
    assert [len(batch) for batch in by_length] == ([10] * 20 + [3]) * 2
    padded = [
        sum(max(batch) * len(batch) - sum(batch) for batch in one) for one in (by_length, plain)
    ]
    assert padded[0] < padded[1] / 5
    firsts = [max(batch) for batch in by_length[:20]]
    assert firsts != sorted(firsts, reverse=True)
    for epoch in (by_length[:21], by_length[21:]):
        assert sorted(n for batch in epoch for n in batch) == sorted(lengths)
    assert by_length[:21] != by_length[21:]


def test_grouping_keeps_all_rows() -> None:
    lengths = RNG(0).integers(0, 9, 37)
    for size in (1, 4, 37, 64):
        order = RNG(size).permutation(37)
        assert sorted(grouped(order, lengths, size)) == list(range(37))


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("stop", [1, 2, 4, 7])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_that_was_stopped_goes_on_with_equal_bits(
    stop: int, accumulate: int, tmp_path: Path
) -> None:
    data = rows(RNG(6).integers(1, 9, 17).tolist())
    given: dict[str, Any] = {
        "collate": "pad",
        "group_by_length": True,
        "batch_size": 4,
        "epochs": 2,
        "seed": 1,
        "accumulate": accumulate,
        "prefetch": 2,
        "progress": False,
    }
    whole, part = masked(), masked()
    history = whole.fit(data, **given)
    part.fit(data, max_steps=stop, **given)
    part.save(tmp_path / "part.onnx")
    part = TrainingSession(tmp_path / "part.onnx")
    resumed = part.fit(data, resume=True, **given)
    assert part.state["table"].tobytes() == whole.state["table"].tobytes()
    assert [one["loss"] for one in resumed] == [one["loss"] for one in history]
    with pytest.raises(OrtopsError, match="group_by_length must be True"):
        part.fit(data, resume=True, **{**given, "group_by_length": False, "epochs": 3})


def test_lengths_of_a_function_of_samples_are_given() -> None:
    given = [{"text": "1" * n, "label": 0} for n in LENGTHS]
    with pytest.raises(ArgumentError, match="the length of a sample is not known"):
        masked().fit(given, collate=join, group_by_length=True, progress=False)
    masked().fit(given, collate=join, group_by_length=LENGTHS, progress=False)


# ---------------------------------------------------------------------------- what is refused

ARRAYS = {"tokens": np.zeros((2, 3), np.int64), "labels": np.zeros(2, np.int64)}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        (rows(), {"collate": "stack"}, "collate must be 'pad', an ortops.data.Pad or a function"),
        (rows(), {"collate": 3}, "collate must be 'pad'"),
        (iter([]), {"collate": "pad"}, "needs samples that are read by number"),
        ([], {"collate": "pad"}, "there are no samples"),
        (rows(), {"collate": lambda given: None}, "collate must return a dict or tuple"),
        ({**rows(), "labels": [0]}, {"collate": "pad"}, "must have the same number of rows"),
        (ARRAYS, {"group_by_length": True}, "group_by_length needs samples that are padded"),
        (
            rows(),
            {"collate": "pad", "group_by_length": [1, 2]},
            "must be True, or the lengths of 7 samples",
        ),
        (
            rows(),
            {"collate": "pad", "group_by_length": True, "shuffle": False},
            "needs shuffle=True, got False",
        ),
        (rows(), {"collate": Pad(masks={"token": "attention_mask"})}, "there is no input 'token'"),
        (rows(), {"collate": Pad(length=4)}, "has length 6, more than length=4"),
        (
            {**rows(), "tokens": [np.zeros((n, 1), np.int64) for n in LENGTHS]},
            {"collate": "pad"},
            r"'tokens' must have shape \[batch, time\]",
        ),
    ],
)
def test_wrong_arguments(data: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(OrtopsError, match=message):
        masked().fit(data, progress=False, **given)


def test_static_sizes_are_not_padded() -> None:
    text = "g (float[batch, 3] x) => (float[batch, 2] y) { y = MatMul(x, w) }"
    session = built(text, "MeanSquaredError", w=(3, 2))
    data = {"x": [np.zeros(2, np.float32), np.zeros(3, np.float32)]}
    with pytest.raises(FeedError, match="which differ in an axis of static size"):
        session.predict(data, outputs="y", collate="pad")


def test_ragged_rows_without_collate_name_it() -> None:
    with pytest.raises(FeedError, match="collate='pad'"):
        masked().fit({**rows(), "attention_mask": rows()["tokens"]}, progress=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"side": "up"}, "Pad: side must be"),
        ({"multiple_of": 0}, "Pad: multiple_of must be an integer >= 1, got 0"),
        ({"length": -1}, "Pad: length must be an integer >= 1, got -1"),
        ({"lengths": ["audio"]}, "Pad: lengths must be a dict"),
        ({"values": {"x": "0"}}, "Pad: values must be a finite number"),
    ],
)
def test_wrong_arguments_of_pad(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Pad(**given)


def test_metrics_read_padded_batches() -> None:
    found = masked().evaluate(rows(), collate="pad", batch_size=2, metrics=[metrics.Accuracy()])
    assert 0 <= found["accuracy"] <= 1
