"""Training steps of convolution nets, whose graphs are made for the shapes of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from models.mlp import mlp
from models.resnet import resnet
from ortops import TrainingSession, build_training_model
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.sizes import bind_sizes
from ortops.graph.passes.blocked.kernels import block_size
from ortops.optimizers import SGD, Momentum
from tests.spies import Spy

Batch = dict[str, np.ndarray[Any, Any]]

pytestmark = pytest.mark.skipif(
    block_size() is None, reason="onnxruntime has no kernels for blocks of channels here"
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
def spy() -> Spy:
    """What is put in front of the passes of a session."""
    return Spy()


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD(0.1), Momentum(0.1)], ids=["SGD", "Momentum"])
def test_batches_of_changing_size(spy: Spy, optimizer: Any) -> None:
    sizes = [16, 16, 5, 16, 7, 1, 5]
    ours = TrainingSession(trainable(optimizer), settings=spy.watching(Settings()))
    losses = [float(ours.step(batch(n, seed))["loss"]) for seed, n in enumerate(sizes)]
    assert spy.rows("images") == [16, 5, None]

    other = Spy()
    settings = other.watching(Settings().without("blocked"))
    standard = TrainingSession(trainable(optimizer), settings=settings)
    wanted = [float(standard.step(batch(n, seed))["loss"]) for seed, n in enumerate(sizes)]
    assert other.rows("images") == [None]
    np.testing.assert_allclose(losses, wanted, rtol=1e-3)
    for name, value in standard.state.items():
        np.testing.assert_allclose(ours.state[name], value, rtol=0, atol=2e-3, err_msg=name)


@pytest.mark.slow
def test_state_set_between_shapes_counts_for_all() -> None:
    session = TrainingSession(trainable(SGD(0.0)))
    first = float(session.step(batch(4))["loss"])
    session.step(batch(3))
    session.state["fc.weight"] = session.state["fc.weight"] * 0
    session.state["fc.bias"] = session.state["fc.bias"] * 0
    assert float(session.step(batch(4))["loss"]) == pytest.approx(np.log(10), rel=1e-5) != first
    assert float(session.step(batch(3))["loss"]) == pytest.approx(np.log(10), rel=1e-5)


@pytest.mark.slow
def test_several_steps_in_one_call() -> None:
    batches = [batch(4, seed) for seed in range(4)]
    one, several = TrainingSession(trainable()), TrainingSession(trainable())
    losses = [float(one.step(each)["loss"]) for each in batches]
    np.testing.assert_allclose(several.run_steps(batches), losses, rtol=1e-4)


@pytest.mark.slow
def test_no_optimization_is_needed() -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = TrainingSession(trainable(), sess_options=options)
    ours = TrainingSession(trainable())
    for seed in range(2):
        pair = [float(session.step(batch(4, seed))["loss"]) for session in (plain, ours)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4)


@pytest.mark.slow
def test_python_kernels(spy: Spy) -> None:
    settings = spy.watching(Settings())
    ours = TrainingSession(trainable(Momentum(0.1)), kernels="python", settings=settings)
    onnx = TrainingSession(trainable(Momentum(0.1)), settings=settings)
    for seed in range(3):
        pair = [float(session.step(batch(4, seed))["loss"]) for session in (ours, onnx)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-4)
    assert spy.rows("images") == [4, 4]


def test_other_models_are_lowered_once(spy: Spy) -> None:
    session = TrainingSession(
        build_training_model(mlp((4, 3, 2)), loss="SoftmaxCrossEntropy", optimizer=SGD(0.1)),
        settings=spy.watching(Settings()),
    )
    assert spy.rows("images") == [None]
    for rows in (2, 3):
        images, labels = np.ones((rows, 4), np.float32), np.zeros(rows, np.int64)
        session.step({"images": images, "labels": labels})
    assert spy.rows("images") == [None]


@pytest.mark.slow
def test_providers_may_have_options(spy: Spy) -> None:
    given = ("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})
    settings = spy.watching(Settings())
    ours = TrainingSession(trainable(), providers=[given], settings=settings)
    plain = TrainingSession(trainable(), settings=settings)
    np.testing.assert_allclose(ours.step(batch(4))["loss"], plain.step(batch(4))["loss"], rtol=1e-5)
    assert spy.rows("images") == [4, 4]  # options of the CPU's provider do not change graphs


@pytest.mark.slow
def test_the_graph_for_any_shapes_is_made_when_it_is_needed(spy: Spy) -> None:
    ours = TrainingSession(trainable(), settings=spy.watching(Settings()))
    for rows in (4, 4, 2):
        ours.step(batch(rows))
    assert spy.rows("images") == [4, 2]
    ours.step(batch(3))
    ours.step(batch(5))
    assert spy.rows("images") == [4, 2, None]


def test_sizes_are_known_beside_values_without_shape() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        pairs (float[n, 4] x) => (y) <int64[2] rest = {2, 2}, int64[1] zero = {0}> {
            sizes = Shape (x)
            rows = Gather (sizes, zero)
            shape = Concat <axis = 0> (rows, rest)
            cubes = Reshape (x, shape)
            parts = SplitToSequence <axis = 1, keepdims = 0> (cubes)
            first = Constant <value_int = 0> ()
            y = SequenceAt (parts, first)
        }""")
    )
    bind_sizes(model, {"n": 3})
    (cubes,) = (node.outputs[0] for node in model.graph if node.op_type == "Reshape")
    assert cubes.shape == ir.Shape([3, 2, 2])
