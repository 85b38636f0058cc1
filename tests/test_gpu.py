"""Training on a GPU: steps equal to the CPU's, where one is (see `tests.gpu`).

What can be known without a GPU is in `tests/test_cuda.py`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.measurements import correctness
from benchmarks.placement import place
from benchmarks.works import WORKS
from models import llama
from ortops import Tape, TrainingSession, build_training_model, optimizers, schedules
from ortops.llm import FineTuning
from tests import gpu, test_cuda
from tests.training_models import assert_same_arrays, classifier, labelled

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

PROVIDER = gpu.PROVIDER
STEPS = 5
UNIT = 2.0**-24
"""The largest relative error of an operation in float32."""

# By network: how many products a sample passes one after the other, and of how many terms the
# longest sum is: the inputs of a neuron, or what the gradient of a weight is summed over.
NETWORKS = {
    "MLP 784-128-10, batch 32": (2, 784),
    "MLP 784-1024-1024-10, batch 128": (3, 1024),
    "LeNet 28×28, batch 64": (4, 64 * 28 * 28),
    "ResNet-20 32×32, batch 32": (22, 32 * 32 * 32),
    "2 transformer blocks, d 256, sequence 128, batch 8": (14, 8 * 128),
    "LSTM 64→128, sequence 50, batch 32": (51, 32 * 50),
}


def bound(products: int, terms: int, steps: int = 1) -> float:
    """Returns how much losses in float32 may differ, relative to the largest value in a step.

    A sum of n terms has a relative error of at most n units, and with independent roundings of at
    most λ√n, but with the probability 2n·exp(-λ²/2) (Higham and Mary, 2019, theorem 2.4): λ = 4 is
    taken. The errors of products that follow each other add up, forward and backward, and those of
    steps, too. Two orders of summation differ by twice as much.
    """
    return 2 * 4 * math.sqrt(terms) * UNIT * 2 * products * steps


@pytest.mark.nightly(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_equal_those_of_the_cpu(name: str) -> None:
    work: Any = WORKS[name]
    model, batches = work.trainable("Momentum"), work.batches()
    found, expected = (
        [
            float(session.step(batches[number % len(batches)], outputs=["loss"])["loss"])
            for number in range(STEPS)
        ]
        for session in (TrainingSession(model, providers=[PROVIDER]), TrainingSession(model))
    )
    products, terms = NETWORKS[name]
    for number, pair in enumerate(zip(found, expected, strict=True), 1):
        limit = bound(products, terms, number) * max(expected)
        assert abs(pair[0] - pair[1]) <= limit, (number, found, expected, limit)
    assert expected[-1] != expected[0]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("model", ["MLP", "LeNet", "transformer block", "LSTM"])
def test_twenty_steps_and_a_resumed_training(model: str, dtype: str) -> None:
    found = correctness(model, gpu.PROVIDER_NAMES[PROVIDER], dtype)
    assert found["agrees"], found


@pytest.mark.skipif(PROVIDER != "cuda", reason="WebGPU has no kernels for some integers")
@pytest.mark.parametrize("name", NETWORKS)
def test_no_node_that_touches_data_falls_back(name: str) -> None:
    work: Any = WORKS[name]
    found = place(lambda: work.trainable("Adam"), work.batches()[0])
    assert (found.fallen, found.error) == ({}, "")


def test_products_are_not_tf32() -> None:
    """The sum is exact in float32; TF32 has 10 bits of a number and rounds the last one away."""
    with Tape(name="product") as tape:
        x = tape.input("x", np.float32, ["batch", 256])
        weight = tape.initializer("w", np.ones((256, 8), np.float32))
        tape.output(x @ weight, "y")
    built = build_training_model(tape.model(), loss="MSELoss", optimizer="SGD")
    session = TrainingSession(built, providers=[PROVIDER])
    rows = np.full((16, 256), 1 + 2.0**-12, np.float32)
    found = session.step({"x": rows, "targets": np.zeros((16, 8), np.float32)})["y"]
    np.testing.assert_array_equal(found, np.full((16, 8), 256 + 2.0**-4, np.float32))


def test_an_adapter_on_a_model_in_int4(tmp_path: Path) -> None:
    folder = llama.write(tmp_path / "base", bits=4, layers=2)
    rows = [{"input_ids": [65 + number, 66, 67, 68, 69, 256]} for number in range(4)]
    histories = []
    for providers in (None, [PROVIDER]):
        tuning = FineTuning(folder, 4, 8, learning_rate=0.01, providers=providers)
        histories.append(tuning.fit(rows, epochs=3, progress=False))
    # Seven products in each of two layers, attention's two, and the logits.
    limit = bound(2 * 9 + 1, llama.HIDDEN * 4, steps=3)
    losses = [[entry["loss"] for entry in history] for history in histories]
    np.testing.assert_allclose(losses[1], losses[0], rtol=limit)
    assert losses[0][-1] < losses[0][0]


def session_of(model: onnx.ModelProto) -> TrainingSession:
    return TrainingSession(model, providers=[PROVIDER])


def test_losses_that_are_read_later_have_the_same_bits() -> None:
    rate = schedules.cosine(0.1, steps=40)
    model = build_training_model(
        classifier(dropout=0.2), loss="SoftmaxCrossEntropy", optimizer=optimizers.Adam(rate)
    )
    batches = [labelled((6,), seed=seed) for seed in range(10)]
    one, several = session_of(model), session_of(model)
    losses = [float(one.step(batch, outputs=["loss"])["loss"]) for batch in batches]
    np.testing.assert_allclose(several.run_steps(batches), losses, rtol=bound(2, 16, 10))
    rows = labelled((6,), rows=40)
    first, second = session_of(model), session_of(model)
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False}
    assert first.fit(rows, **settings) == second.fit(rows, **settings, stop_on_nan=False)
    assert_same_arrays(first.state, second.state)


def test_evaluation_and_prediction() -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    rows = labelled((6,), rows=40)
    there, here = session_of(model), TrainingSession(model)
    for session in (there, here):
        session.fit(rows, epochs=1, batch_size=8, progress=False)
    limit = bound(2, 40, 5)
    assert there.evaluate(rows)["loss"] == pytest.approx(here.evaluate(rows)["loss"], rel=limit)
    found, expected = there.predict(rows), here.predict(rows)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        largest = limit * float(np.abs(array).max())
        np.testing.assert_allclose(found[name], array, rtol=limit, atol=largest, err_msg=name)


@pytest.mark.parametrize("case", test_cuda.IMAGES)
def test_convolutions_and_statistics(case: str) -> None:
    model, batch = test_cuda.trainable(case), test_cuda.batch(case)
    there, here = session_of(model), TrainingSession(model)
    for number in range(1, 4):
        found, expected = (session.step(batch, outputs=["loss"]) for session in (there, here))
        limit = bound(3, 6 * 64, number)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=limit)
