"""`TrainingSession.with_trainable`: other weights are trained from some step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from training_models import assert_same_arrays

import ortops
from ortops import OrtopsError, Tape, TrainingSession, UnsupportedError, build_training_model, op
from ortops.losses import MeanSquaredError
from ortops.optimizers import SGD, Adam, AdamW, Momentum

Array = np.ndarray[Any, Any]


def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    with Tape(name="network") as tape:
        x = tape.input("x", np.float32, ["batch", 4])
        for name, shape in {"trunk": (4, 5), "middle": (5, 5), "head": (5, 1)}.items():
            weight = rng.standard_normal(shape).astype(np.float32)
            x = op.Tanh(x) @ tape.initializer(f"{name}.weight", weight)
        tape.output(x, "y")
    return tape.model()


def batch() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((6, 4)).astype(np.float32),
        "targets": rng.standard_normal((6, 1)).astype(np.float32),
    }


def session_of(**settings: Any) -> TrainingSession:
    arguments = {"loss": MeanSquaredError("y"), "optimizer": Adam(0.01), "trainable": ["head.*"]}
    return TrainingSession(build_training_model(network(), **{**arguments, **settings}))


def test_unfreezing_keeps_the_state_of_what_was_trained() -> None:
    session = session_of(ema_decay=0.9, clip_norm=1.0)
    for _ in range(3):
        session.step(batch())
    session.learning_rate = 0.002
    before = dict(session.state)
    other = session.with_trainable(["middle.*", "head.*"])
    assert set(other.parameters) == {"middle.weight", "head.weight"}
    assert_same_arrays({name: other.state[name] for name in before}, before)
    assert set(other.state) - set(before) == {
        *("middle.weight", "middle.weight.V", "middle.weight.H", "middle.weight.ema")
    }
    np.testing.assert_array_equal(other.state["middle.weight.V"], 0)
    np.testing.assert_array_equal(other.state["middle.weight.ema"], other.state["middle.weight"])
    assert (other.steps_done, other.learning_rate) == (3, pytest.approx(0.002))
    assert_same_arrays(dict(session.state), before)
    other.step(batch())
    assert_same_arrays(dict(session.state), before)
    assert (other.state["middle.weight"] != session.constants["middle.weight"]).any()


def test_the_same_weights_go_on_bit_for_bit(tmp_path: Path) -> None:
    session = session_of(groups={"head.*": {"learning_rate": 0.1}}, clip_value=0.5)
    session.step(batch())
    session.save(tmp_path / "a.onnx")
    for begun in (session, TrainingSession(tmp_path / "a.onnx")):
        other, same = begun.with_trainable(["head.*"]), TrainingSession(tmp_path / "a.onnx")
        for _ in range(3):
            assert_same_arrays(other.step(batch()), same.step(batch()))
        assert_same_arrays(dict(other.state), dict(same.state))


@pytest.mark.torch
def test_agrees_with_torch() -> None:
    """A parameter group of Momentum is added after three steps."""
    import torch

    session = session_of(optimizer=Momentum(0.05, alpha=0.9, beta=1.0, mode="standard"))
    names = ("trunk.weight", "middle.weight", "head.weight")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in session.model().graph.initializer}
    own = {name: torch.tensor(arrays[name].copy(), requires_grad=True) for name in names}
    optimizer = torch.optim.SGD([own["head.weight"]], lr=0.05, momentum=0.9)
    feeds = batch()
    for number in range(6):
        if number == 3:
            optimizer.add_param_group({"params": [own["trunk.weight"]]})
            session = session.with_trainable(["trunk.*", "head.*"])
        x = torch.tensor(feeds["x"])
        for name in names:
            x = torch.tanh(x) @ own[name]
        loss = ((x - torch.tensor(feeds["targets"])) ** 2).mean()
        for value in own.values():
            value.grad = None
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(session.step(feeds)["loss"], loss.item(), rtol=1e-5)
    for name, array in session.parameters.items():
        np.testing.assert_allclose(array, own[name].detach().numpy(), rtol=1e-4, atol=1e-6)


def test_freezing() -> None:
    session = session_of(trainable=None)
    session.step(batch())
    other = session.with_trainable(["head.*"])
    assert set(other.parameters) == {"head.weight"}
    trunk = other.constants["trunk.weight"]
    np.testing.assert_array_equal(trunk, session.state["trunk.weight"])
    other.step(batch())
    np.testing.assert_array_equal(other.constants["trunk.weight"], trunk)
    assert set(other.with_trainable(None).parameters) == set(session.parameters)


def test_what_the_file_does_not_describe_is_given_again() -> None:
    def loss(y: ortops.Tensor, targets: ortops.Tensor) -> ortops.Tensor:
        return ((y - targets) ** 2).mean()

    session = session_of(loss=loss)
    with pytest.raises(
        OrtopsError, match="with_trainable: the file does not describe its loss, which is not one"
    ):
        session.with_trainable(["trunk.*"])
    session.step(batch())
    other = session.with_trainable(["trunk.*", "head.*"], loss=loss)
    assert other.step(batch())["loss"] == session.step(batch())["loss"]
    scheduled = session_of(optimizer=SGD(ortops.schedules.constant(0.1)))
    with pytest.raises(OrtopsError, match="the file does not describe its optimizer, which is not"):
        scheduled.with_trainable(["trunk.*"])
    other = scheduled.with_trainable(["trunk.*"], optimizer=SGD(0.5))
    assert other.learning_rate == pytest.approx(0.1)


@pytest.mark.slow
def test_what_cannot_be_built_again() -> None:
    model = session_of().model()
    for entry in model.metadata_props:
        if entry.key == "ortops.training":
            found = json.loads(entry.value)
            assert found.pop("recipe")["optimizer"]["name"] == "Adam"
            entry.value = json.dumps(found)
    with pytest.raises(OrtopsError, match="with_trainable: the file does not say how it was built"):
        TrainingSession(model).with_trainable(["trunk.*"], loss="L1", optimizer="SGD")
    for recipe in ({"loss": {"name": "Unknown"}}, {"loss": 3}, {"optimizer": {"name": "L1"}}):
        entry.value = json.dumps(found | {"recipe": recipe})
        with pytest.raises(OrtopsError, match="the file does not say correctly how it was built"):
            TrainingSession(model).with_trainable(["trunk.*"])
    two = ortops.add_training(
        session_of().model(), name="b", loss=MeanSquaredError("y"), optimizer=AdamW(0.1)
    )
    with pytest.raises(UnsupportedError, match="with_trainable: the model has 2 training algo"):
        TrainingSession(two).with_trainable(["trunk.*"])
    with pytest.raises(OrtopsError, match="trainable"):
        session_of().with_trainable(["nothing"])
