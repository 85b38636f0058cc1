"""Inputs for the cache of earlier keys and values, which training leaves empty."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import ortops
from models import llama
from ortops import lora, losses, optimizers


@pytest.fixture(scope="module", params=[32, 4])
def session(request: pytest.FixtureRequest) -> ortops.TrainingSession:
    adapted = lora.add(llama.llama(bits=request.param), 2, targets=["*proj*"])
    loss = losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100)
    model = ortops.build_training_model(adapted, loss=loss, optimizer=optimizers.SGD(0.1))
    return ortops.TrainingSession(model)


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, llama.WORDS, (3, 7))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}


def empty(rows: int) -> dict[str, np.ndarray]:
    shape = (rows, llama.PAIRS, 0, llama.HIDDEN // llama.HEADS)
    names = [
        f"past_key_values.{n}.{kind}" for n in range(llama.LAYERS) for kind in ("key", "value")
    ]
    return {name: np.zeros(shape, np.float32) for name in names}


@pytest.mark.slow
def test_a_cache_that_is_not_fed_is_empty(
    session: ortops.TrainingSession, feeds: dict[str, np.ndarray]
) -> None:
    session.reset()
    expected = [session.step(feeds | empty(3))["loss"].item() for _ in range(3)]
    evaluated = session.evaluate(feeds | empty(3))
    session.reset()
    assert [session.step(feeds)["loss"].item() for _ in range(3)] == expected
    assert session.evaluate(feeds) == evaluated
    session.reset()
    assert session.run_steps([feeds] * 3).tolist() == expected
    session.reset()
    history = session.fit([feeds], epochs=3, progress=False)
    np.testing.assert_allclose(history.columns["loss"], expected, rtol=1e-6)
    session.reset()
    session.fit(feeds, batch_size=2, progress=False)  # the last batch has one row


@pytest.mark.slow
def test_predict_without_a_cache(
    session: ortops.TrainingSession, feeds: dict[str, np.ndarray]
) -> None:
    session.reset()
    found = session.predict(feeds, batch_size=2, outputs="logits")
    model = session.inference_model().SerializeToString()
    served = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    del feeds["labels"]
    np.testing.assert_allclose(found, served.run(["logits"], feeds | empty(3))[0], atol=1e-5)


def test_a_cache_may_be_fed(session: ortops.TrainingSession, feeds: dict[str, np.ndarray]) -> None:
    part = empty(3)
    del part["past_key_values.1.key"]
    session.step(feeds | part)
    part["past_key_values.0.key"] = np.zeros(
        (3, llama.PAIRS, 2, llama.HIDDEN // llama.HEADS), np.float32
    )
    with pytest.raises(
        ortops.FeedError, match=r"'past_sequence_length' is 2 in 'past_key_values.0.key' and 0 in"
    ):
        session.step(feeds | part)


def test_other_inputs_are_not_left_out(
    session: ortops.TrainingSession, feeds: dict[str, np.ndarray]
) -> None:
    del feeds["attention_mask"]
    with pytest.raises(ortops.FeedError, match="input 'attention_mask' is missing"):
        session.step(feeds)


@pytest.mark.slow
def test_a_cache_of_fixed_length_is_fed() -> None:
    model = llama.llama()
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            value.type.tensor_type.shape.dim[2].dim_value = 4
    built = ortops.build_training_model(
        model, loss=losses.SoftmaxCrossEntropy(axis=-1), optimizer=optimizers.SGD(0.1)
    )
    ids = np.zeros((1, 2), np.int64)
    with pytest.raises(ortops.FeedError, match=r"input 'past_key_values.0.key' is missing"):
        ortops.TrainingSession(built).step({"input_ids": ids, "attention_mask": ids, "labels": ids})
