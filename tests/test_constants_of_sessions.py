"""`TrainingSession.constants`: weights that are not trained, read and set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import assert_same_arrays

import ortops
from ortops import OrtopsError, Tape, TrainingSession, add_training, build_training_model, op
from ortops.losses import MeanSquaredError
from ortops.optimizers import SGD

Array = np.ndarray[Any, Any]

WIDTHS = {"one graph": 3, "updates apart": 300}


def frozen(width: int = 3, dtype: Any = np.float32) -> onnx.ModelProto:
    """x @ first, frozen, and @ second, which is trained."""
    rng = np.random.default_rng(0)
    with Tape(name="frozen") as tape:
        x = tape.input("x", dtype, ["batch", 4])
        first = tape.initializer("first", rng.standard_normal((4, width)).astype(dtype))
        second = tape.initializer("second", rng.standard_normal((width, 300)).astype(dtype))
        tape.output(op.Tanh(x @ first) @ second, "y")
        tape.output(x @ tape.initializer("unread", np.ones((4, 1), dtype)), "z")
    loss = MeanSquaredError("y")
    return build_training_model(tape.model(), loss=loss, optimizer=SGD(0.1), trainable=["second"])


def batch(rows: int = 5, dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    targets = rng.standard_normal((rows, 300)).astype(np.float32)
    return {"x": rng.standard_normal((rows, 4)).astype(dtype), "targets": targets}


def replaced(model: onnx.ModelProto, **arrays: Array) -> onnx.ModelProto:
    """Returns a model with other initializers, as a file that somebody has edited."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            tensor.CopyFrom(onnx.numpy_helper.from_array(arrays[tensor.name], tensor.name))
    return result


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("kernels", ["onnx", "python"])
def test_a_value_that_is_set_takes_effect_at_once(width: int, kernels: Any) -> None:
    model, feeds = frozen(width), batch()
    session = TrainingSession(model, kernels=kernels)
    assert set(session.constants) == {"first", "unread"}
    assert len(session.constants) == 2
    state = set(session.state)
    session.step(feeds)
    session.evaluate(feeds)
    for number in range(1, 3):
        value = session.constants["first"] * number
        session.constants["first"] = value
        np.testing.assert_array_equal(session.constants["first"], value)
        edited = replaced(session.model(), first=value)
        other = TrainingSession(edited, kernels=kernels)
        assert session.evaluate(feeds)["loss"] == pytest.approx(other.evaluate(feeds)["loss"], 1e-5)
        for name, array in other.predict({"x": feeds["x"]}).items():
            np.testing.assert_allclose(
                session.predict({"x": feeds["x"]}, outputs=name), array, rtol=1e-5, atol=1e-5
            )
        assert session.step(feeds)["loss"] == pytest.approx(float(other.step(feeds)["loss"]), 1e-5)
        for name, array in other.state.items():
            np.testing.assert_allclose(session.state[name], array, rtol=1e-4, atol=1e-6)
    assert set(session.state) == state
    assert session.steps_done == 3
    with pytest.raises(OrtopsError, match="there is no variable 'first'"):
        session.state["first"] = value


def test_gradients_and_several_steps() -> None:
    session, other = TrainingSession(frozen()), TrainingSession(frozen())
    session.gradients(batch())
    value = session.constants["first"] + 1
    session.constants["first"] = value
    other = TrainingSession(replaced(frozen(), first=value))
    np.testing.assert_allclose(
        session.gradients(batch())["second"], other.gradients(batch())["second"], rtol=1e-5
    )
    np.testing.assert_allclose(session.run_steps([batch()] * 3), other.run_steps([batch()] * 3))


def test_it_is_saved_and_served_and_reset(tmp_path: Path) -> None:
    session = TrainingSession(frozen())
    first = session.constants["first"]
    session.step(batch())
    session.constants.update({"first": first * 2, "unread": np.zeros((4, 1))})
    session.step(batch())
    session.save(tmp_path / "a.onnx")
    again = TrainingSession(tmp_path / "a.onnx")
    np.testing.assert_array_equal(again.constants["first"], first * 2)
    np.testing.assert_array_equal(again.constants["unread"], 0)
    assert again.steps_done == 2
    assert again.step(batch())["loss"] == pytest.approx(float(session.step(batch())["loss"]), 1e-6)
    served = session.inference_model()
    plain = onnxruntime.InferenceSession(served.SerializeToString())
    (found,) = plain.run(["y"], {"x": batch()["x"]})
    expected = np.tanh(batch()["x"] @ (first * 2)) @ session.state["second"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    session.reset()
    np.testing.assert_array_equal(session.constants["first"], first)
    fresh = TrainingSession(frozen())
    assert session.step(batch())["loss"] == pytest.approx(float(fresh.step(batch())["loss"]), 1e-6)


def test_a_target_network_of_one_of_two_entries() -> None:
    """The second entry reads what was set through the session of all."""
    with Tape(name="target") as tape:
        x = tape.input("x", np.float32, ["batch", 1])
        for name in ("online", "target", "other"):
            weight = tape.initializer(f"{name}.weight", np.ones((1, 1), np.float32))
            tape.output(x @ weight, name)

    def difference(online: ortops.Tensor, target: ortops.Tensor) -> ortops.Tensor:
        return ((online - target) ** 2).mean()

    def other_loss(other: ortops.Tensor, target: ortops.Tensor) -> ortops.Tensor:
        return ((other - target) ** 2).mean()

    model = build_training_model(
        tape.model(), loss=difference, optimizer=SGD(0.25), trainable=["online.*"]
    )
    model = add_training(
        model, name="second", loss=other_loss, optimizer=SGD(0.25), trainable=["other.*"]
    )
    session = TrainingSession(model)
    ones = {"x": np.ones((1, 1), np.float32)}
    assert session.step(ones, entry="second")["loss"] == 0
    session.constants["target.weight"] = [[3.0]]
    assert session.step(ones, entry="second")["loss"] == 4  # 1 -> 2
    assert session.step(ones, entry="main")["loss"] == 4
    session.constants["target.weight"] = session.parameters["other.weight"]
    assert session.constants["target.weight"] == 2
    assert session.step(ones, entry="second")["loss"] == 0
    assert session.step(ones, entry="main")["loss"] == 0
    assert session.evaluate(ones, entry="second")["loss"] == 0
    assert (session.steps_done, int(session.state["second.step"])) == (2, 3)


def test_within_fit() -> None:
    """A callback sets a mean teacher after each step."""

    class Follow(ortops.callbacks.Callback):
        def on_step(self, record: Any, session: Any) -> None:
            session.constants["first"] = session.constants["first"] * 0.5

    session = TrainingSession(frozen())
    first = session.constants["first"]
    session.fit(batch(6), batch_size=2, callbacks=[Follow()], progress=False)
    np.testing.assert_array_equal(session.constants["first"], first / 8)
    assert session.steps_done == 3


def test_a_teacher() -> None:
    """The weights of a Distillation's teacher are in the algorithm."""
    with Tape(name="classifier") as tape:
        x = tape.input("x", np.float32, ["batch", 2])
        tape.output(x @ tape.initializer("w", 2 * np.eye(2, dtype=np.float32)), "logits")
    loss = ortops.losses.Distillation(model=tape.model(), temperature=1.0)
    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))
    (name,) = session.constants
    feeds = {"x": np.ones((3, 2), np.float32) * [1, 2]}
    before = session.evaluate(feeds)["loss"]
    session.constants[name] = session.constants[name] * 3
    after = session.evaluate(feeds)["loss"]
    assert after > before + 0.1
    assert session.step(feeds)["loss"] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda c: c.__setitem__("frist", 0),
            "there is no weight 'frist' that is not trained",
        ),
        (lambda c: c["second"], "constants: there is no weight 'second' that is not trained"),
        (
            lambda c: c.__setitem__("first", np.zeros(3)),
            r"'first' must be float32\[4, 3\]",
        ),
        (lambda c: c.__setitem__("first", np.full((4, 3), 1e300)), "cannot be set to 1e\\+300"),
        (lambda c: c.__delitem__("first"), "constants 'first': a weight cannot be removed"),
        (lambda c: c.assign([1]), "constants must be a dict with an array for each name, got list"),
    ],
)
def test_wrong_values(use: Any, message: str) -> None:
    session = TrainingSession(frozen())
    before = dict(session.constants)
    with pytest.raises(OrtopsError, match=message):
        use(session.constants)
    assert_same_arrays(dict(session.constants), before)
    assert session.step(batch()).keys() == {"loss", "y"}


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_other_types(dtype: str) -> None:
    number = onnx.TensorProto.DataType.Value("DOUBLE" if dtype == "float64" else dtype.upper())
    kind = onnx.helper.tensor_dtype_to_np_dtype(number)
    model = frozen(3, kind)
    session = TrainingSession(model)
    feeds = batch(dtype=kind)
    feeds["targets"] = feeds["targets"].astype(np.float64 if dtype == "float64" else np.float32)
    before = float(session.evaluate(feeds)["loss"])
    session.constants["first"] = session.constants["first"] * 0
    assert float(session.evaluate(feeds)["loss"]) != before
    expected = float(np.mean(feeds["targets"].astype(np.float64) ** 2))
    assert float(session.step(feeds)["loss"]) == pytest.approx(expected, rel=1e-2)
