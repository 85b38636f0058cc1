"""Training steps of convolution nets, whose graphs are made for the shapes of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from models.resnet import resnet
from ortops import TrainingSession, build_training_model
from ortops.optimizers import SGD, Momentum
from ortops.training import blocked, execution

Batch = dict[str, np.ndarray[Any, Any]]

pytestmark = pytest.mark.skipif(
    blocked.block_size() is None, reason="onnxruntime has no kernels for blocks of channels here"
)


def trainable(optimizer: Any = None) -> Any:
    return build_training_model(
        resnet((1, 1), image=(3, 8, 8), width=16),
        loss="SoftmaxCrossEntropy",
        optimizer=optimizer or SGD(0.1),
    )


def batch(rows: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    images = rng.standard_normal((rows, 3, 8, 8), np.float32)
    return {"images": images, "labels": rng.integers(0, 10, rows)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The batches for which graphs were made."""
    found: list[list[int]] = []
    original = execution.block_convolutions

    def spy(model: Any) -> Any:
        found.append([value.shape[0] for value in model.graph.inputs if value.name == "images"])
        return original(model)

    monkeypatch.setattr(execution, "block_convolutions", spy)
    return found


@pytest.mark.parametrize("optimizer", [SGD(0.1), Momentum(0.1)], ids=["SGD", "Momentum"])
def test_batches_of_changing_size(
    made: list[list[int]], optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [16, 16, 5, 16, 7, 1, 5]
    ours = TrainingSession(trainable(optimizer))
    losses = [float(ours.step(batch(n, seed))["loss"]) for seed, n in enumerate(sizes)]
    assert made == [[16], [5]]

    monkeypatch.setattr(blocked, "gains_from_sizes", lambda model: False)
    standard = TrainingSession(trainable(optimizer))
    wanted = [float(standard.step(batch(n, seed))["loss"]) for seed, n in enumerate(sizes)]
    assert len(made) == 2
    np.testing.assert_allclose(losses, wanted, rtol=1e-3)
    for name, value in standard.state.items():
        np.testing.assert_allclose(ours.state[name], value, rtol=0, atol=2e-3, err_msg=name)


def test_state_set_between_shapes_counts_for_all() -> None:
    session = TrainingSession(trainable(SGD(0.0)))
    first = float(session.step(batch(4))["loss"])
    session.step(batch(3))
    session.state["fc.weight"] = session.state["fc.weight"] * 0
    session.state["fc.bias"] = session.state["fc.bias"] * 0
    assert float(session.step(batch(4))["loss"]) == pytest.approx(np.log(10), rel=1e-5) != first
    assert float(session.step(batch(3))["loss"]) == pytest.approx(np.log(10), rel=1e-5)


def test_several_steps_in_one_call() -> None:
    batches = [batch(4, seed) for seed in range(4)]
    one, several = TrainingSession(trainable()), TrainingSession(trainable())
    losses = [float(one.step(each)["loss"]) for each in batches]
    np.testing.assert_allclose(several.run_steps(batches), losses, rtol=1e-4)


def test_no_optimization_is_needed() -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = TrainingSession(trainable(), sess_options=options)
    ours = TrainingSession(trainable())
    for seed in range(2):
        pair = [float(session.step(batch(4, seed))["loss"]) for session in (plain, ours)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4)


def test_python_kernels(made: list[list[int]]) -> None:
    ours = TrainingSession(trainable(Momentum(0.1)), kernels="python")
    onnx = TrainingSession(trainable(Momentum(0.1)))
    for seed in range(3):
        pair = [float(session.step(batch(4, seed))["loss"]) for session in (ours, onnx)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4)
    assert made == [[4], [4]]


def test_other_models_are_lowered_once(made: list[list[int]]) -> None:
    from models.mlp import mlp

    session = TrainingSession(
        build_training_model(mlp((4, 3, 2)), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1))
    )
    session.step({"images": np.ones((2, 4), np.float32), "labels": np.zeros(2, np.int64)})
    assert not made


def test_providers_may_have_options(made: list[list[int]]) -> None:
    given = ("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
    ours = TrainingSession(trainable(), providers=[given])
    np.testing.assert_allclose(
        ours.step(batch(4))["loss"], TrainingSession(trainable()).step(batch(4))["loss"], rtol=1e-5
    )
    assert made == [[4]]


def test_the_graph_for_any_shapes_is_made_when_it_is_needed(
    made: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    general: list[Any] = []
    original = execution.lower_prepared

    def spy(model: Any, **options: Any) -> Any:
        if not isinstance(model.graph.inputs[0].shape[0], int):
            general.append(model)
        return original(model, **options)

    monkeypatch.setattr(execution, "lower_prepared", spy)
    ours = TrainingSession(trainable())
    for rows in (4, 4, 2):
        ours.step(batch(rows))
    assert not general
    ours.step(batch(3))
    ours.step(batch(5))
    assert len(general) == 1
    assert made == [[4], [2]]
