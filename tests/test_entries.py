"""Several training algorithms in one file: `ortops.add_training`, and how sessions run them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import assert_same_arrays, normalizing

import ortops
from models.gan import gan
from models.layers import batch_norm, dropout, linear
from ortops import (
    ArgumentError,
    FeedError,
    ModelError,
    OrtopsError,
    Tape,
    Tensor,
    TrainingSession,
    UnsupportedError,
    add_training,
    build_training_model,
    op,
)
from ortops.cli import main as cli
from ortops.losses import MeanSquaredError, SoftmaxCrossEntropy
from ortops.optimizers import SGD, Adam

Array = np.ndarray[Any, Any]


def points(rows: int = 6, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "noise": rng.standard_normal((rows, 2)).astype(np.float32),
        "real": rng.standard_normal((rows, 2)).astype(np.float32),
    }


def two_heads(dtype: Any = np.float32, optimizer: Any = None, **settings: Any) -> onnx.ModelProto:
    """A trunk with a classifier and a regression on it, each trained by an entry of its own."""
    rng = np.random.default_rng(1)
    with Tape(name="two_heads") as tape:
        x = tape.input("x", dtype, ["batch", 4])

        def dense(y: Tensor, name: str, shape: tuple[int, int]) -> Tensor:
            return y @ tape.initializer(f"{name}.weight", rng.standard_normal(shape).astype(dtype))

        trunk = op.Tanh(dense(x, "trunk", (4, 5)))
        tape.output(dense(trunk, "classes", (5, 3)), "logits")
        tape.output(dense(trunk, "number", (5, 1)), "y")
    model = build_training_model(
        tape.model(),
        loss=SoftmaxCrossEntropy("logits"),
        optimizer=Adam(0.01),
        trainable=["trunk.*", "classes.*"],
    )
    optimizer = optimizer or Adam(0.02)
    return add_training(
        model, name="second", loss=MeanSquaredError("y"), optimizer=optimizer, **settings
    )


def rows(count: int = 6, seed: int = 0, dtype: Any = np.float32) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((count, 4)).astype(dtype),
        "labels": rng.integers(3, size=count),
        "targets": rng.standard_normal((count, 1)).astype(np.float32),
    }


# ------------------------------------------------------------------------------------- the file


def test_the_file_is_as_the_standard_and_the_contract_say() -> None:
    model = gan(8)
    first, second = model.training_info
    assert [first.algorithm.name, second.algorithm.name] == ["main", "discriminator"]
    own = {tensor.name for tensor in second.algorithm.initializer}
    assert {"discriminator.learning_rate", "discriminator.step"} <= own
    assert "discriminator.discriminator.0.weight.V" in own
    assert all(name.startswith("discriminator.") for name in own)
    keys = [binding.key for info in model.training_info for binding in info.update_binding]
    assert len(keys) == len(set(keys))
    assert second.algorithm.output[0].name == "loss"
    onnx.checker.check_model(model, full_check=True)
    found = onnxruntime.InferenceSession(model.SerializeToString()).run(["fake"], points())
    assert found[0].shape == (6, 2)


def test_the_argument_is_not_changed() -> None:
    model = build_training_model(
        two_heads_model(), loss=MeanSquaredError("y"), optimizer="SGD", trainable=["number.*"]
    )
    before = model.SerializeToString(deterministic=True)
    added = add_training(model, name="b", loss=SoftmaxCrossEntropy("logits"), optimizer="SGD")
    assert model.SerializeToString(deterministic=True) == before
    assert added.training_info[0] == model.training_info[0]
    assert list(added.graph.node) == list(model.graph.node)


def two_heads_model() -> onnx.ModelProto:
    return TrainingSession(two_heads()).inference_model()


def test_inputs_of_equal_name_type_and_shape_are_shared() -> None:
    """Both heads are compared with one input."""
    with Tape(name="pair") as tape:
        x = tape.input("x", np.float32, ["batch", 2])
        for name in ("a", "b"):
            tape.output(x @ tape.initializer(f"w_{name}", np.ones((2, 1), np.float32)), name)
        tape.output(x @ tape.initializer("w_c", np.ones((2, 3), np.float32)), "c")
    model = build_training_model(tape.model(), loss=MeanSquaredError("a"), optimizer="SGD")
    model = add_training(model, name="second", loss=MeanSquaredError("b"), optimizer="SGD")
    session = TrainingSession(model)
    assert list(session.inputs) == ["x", "targets"]
    with pytest.raises(
        ModelError,
        match=r"loss: its input 'targets' is float32\[batch, 3\], but float32\[batch, 1\] in the "
        r"entry 'main'; name it differently with target= of the loss, or with inputs=",
    ):
        add_training(model, name="third", loss=MeanSquaredError("c"), optimizer="SGD")
    other = MeanSquaredError("c", target="colors")
    model = add_training(model, name="third", loss=other, optimizer="SGD")
    assert list(TrainingSession(model).inputs) == ["x", "targets", "colors"]


# ---------------------------------------------------------------------------------------- steps


@pytest.mark.slow
@pytest.mark.torch
def test_agrees_with_torch() -> None:
    import torch

    model = gan(16, rate=0.01)
    weights = {t.name: onnx.numpy_helper.to_array(t).copy() for t in model.graph.initializer}
    own = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}

    def mlp(x: torch.Tensor, scope: str) -> torch.Tensor:
        for number in range(3):
            x = torch.nn.functional.leaky_relu(x, 0.2) if number else x
            x = x @ own[f"{scope}.{number}.weight"].T + own[f"{scope}.{number}.bias"]
        return x

    def adam(scope: str) -> torch.optim.Adam:
        chosen = [value for name, value in own.items() if name.startswith(scope)]
        return torch.optim.Adam(chosen, lr=0.01, betas=(0.5, 0.999), eps=1e-8)

    softplus = torch.nn.functional.softplus
    optimizers = {scope: adam(scope) for scope in ("generator", "discriminator")}
    session = TrainingSession(model)
    for number in range(8):
        batch = points(seed=number)
        noise, real = torch.tensor(batch["noise"]), torch.tensor(batch["real"])
        optimizers["discriminator"].zero_grad()
        fake = mlp(noise, "generator").detach()
        loss = softplus(-mlp(real, "discriminator")).mean()
        loss = loss + softplus(mlp(fake, "discriminator")).mean()
        loss.backward()
        optimizers["discriminator"].step()
        found = session.step(batch, entry="discriminator")["loss"]
        np.testing.assert_allclose(found, loss.item(), rtol=1e-4)
        optimizers["generator"].zero_grad()
        loss = softplus(-mlp(mlp(noise, "generator"), "discriminator")).mean()
        loss.backward()
        optimizers["generator"].step()
        found = session.step({"noise": batch["noise"]}, entry="main")["loss"]
        np.testing.assert_allclose(found, loss.item(), rtol=1e-4)
    for name, value in own.items():
        np.testing.assert_allclose(
            session.state[name], value.detach().numpy(), rtol=2e-3, atol=2e-5, err_msg=name
        )


WIDTHS = {"one graph": 8, "updates apart": 400}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["onnx", "python"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_step_of_an_entry_is_that_of_a_session_with_this_entry(width: int, kernels: Any) -> None:
    """Other entries keep their variables, and what they changed is seen."""
    model = gan(width)
    session = TrainingSession(model, kernels=kernels)
    apart = {n: TrainingSession(model, entry=n, kernels=kernels) for n in ("main", "discriminator")}
    state = dict(session.state)
    for number, name in enumerate(["discriminator", "main", "main", "discriminator"] * 2):
        batch = points(seed=number)
        alone = apart[name]
        alone.state = {key: state[key] for key in alone.state}
        expected, found = alone.step(batch), session.step(batch, entry=name)
        assert found.keys() == expected.keys()
        assert_same_arrays(found, expected)
        state |= dict(alone.state)
        assert_same_arrays(dict(session.state), state)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_step_runs_all_in_order(width: int) -> None:
    session, other = TrainingSession(gan(width)), TrainingSession(gan(width))
    for number in range(3):
        batch = points(seed=number)
        found = session.step(batch)
        first, second = other.step(batch, entry="main"), other.step(batch, entry="discriminator")
        assert found["loss"] == first["loss"]
        assert found["discriminator.loss"] == second["loss"]
        assert session.step(points(seed=9), outputs=["discriminator.loss"]).keys() == {
            "discriminator.loss"
        }
        other.step(points(seed=9))
        assert_same_arrays(dict(session.state), dict(other.state))


@pytest.mark.slow
def test_an_entry_needs_only_its_inputs() -> None:
    session = TrainingSession(gan(8))
    noise = {"noise": points()["noise"]}
    assert session.step(noise, entry="main").keys() == {"loss", "fake", "fake_logits"}
    with pytest.raises(FeedError, match="'real'"):
        session.step(noise, entry="discriminator")
    with pytest.raises(FeedError, match="'real'"):
        session.step(noise)
    assert session.steps_done == 1


@pytest.mark.slow
def test_run_steps_gradients_and_apply_of_an_entry() -> None:
    one, several, split = (TrainingSession(gan(8)) for _ in range(3))
    batches = [points(seed=number) for number in range(5)]
    for name in ("discriminator", "main", "discriminator"):
        losses = [one.step(batch, entry=name)["loss"] for batch in batches]
        np.testing.assert_allclose(several.run_steps(batches, entry=name), losses, rtol=1e-5)
        for batch, loss in zip(batches, losses, strict=True):
            gradients = split.gradients(batch, entry=name)
            assert gradients.loss == pytest.approx(loss, rel=1e-6)
            assert all(key.startswith("generator") == (name == "main") for key in gradients)
            split.apply(gradients, entry=name)
    for name, array in one.state.items():
        np.testing.assert_allclose(several.state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(split.state[name], array, err_msg=name)
    with pytest.raises(UnsupportedError, match="a step runs 2 training_info entries one after the"):
        one.gradients(batches[0])


@pytest.mark.slow
def test_evaluate_of_an_entry() -> None:
    session = TrainingSession(gan(8))
    batch = points(seed=3)
    before = dict(session.state)
    found = session.evaluate(batch, entry="discriminator")
    assert found["loss"] == pytest.approx(float(session.step(batch, entry=1)["loss"]), rel=1e-5)
    session.state = before
    found = session.evaluate({"noise": batch["noise"]}, entry="main")
    assert found["loss"] == pytest.approx(float(session.step(batch, entry=0)["loss"]), rel=1e-5)
    assert session.evaluate(batch).keys() == {"loss"}


# ---------------------------------------------------------------------------------------- state


@pytest.mark.slow
def test_learning_rates() -> None:
    session = TrainingSession(two_heads())
    assert dict(session.learning_rates) == pytest.approx({"main": 0.01, "second": 0.02})
    session.learning_rates["second"] = 0.0
    assert session.state["second.learning_rate"] == 0
    assert session.learning_rate == pytest.approx(0.01)
    weight = session.state["number.weight"]
    session.step(rows(), entry="second")
    np.testing.assert_array_equal(session.state["number.weight"], weight)
    session.learning_rate = 0.5
    assert dict(session.learning_rates) == {"main": 0.5, "second": 0.0}
    again = TrainingSession(session.model())
    assert dict(again.learning_rates) == {"main": 0.5, "second": 0.0}
    with pytest.raises(ArgumentError, match="there is no entry 'third'; known names: 'main', 'sec"):
        session.learning_rates["third"] = 1.0
    with pytest.raises(ArgumentError, match="learning_rate must be a finite number >= 0, got -1"):
        session.learning_rates["second"] = -1


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_saved_session_goes_on_bit_for_bit(width: int, tmp_path: Path) -> None:
    session = TrainingSession(gan(width))
    for number, name in enumerate(["discriminator", "main", "discriminator"]):
        session.step(points(seed=number), entry=name)
    session.save(tmp_path / "gan.onnx")
    again = TrainingSession(tmp_path / "gan.onnx")
    for number, name in enumerate(["main", "discriminator", None]):
        batch = points(seed=10 + number)
        assert_same_arrays(session.step(batch, entry=name), again.step(batch, entry=name))
    assert_same_arrays(dict(session.state), dict(again.state))


@pytest.mark.slow
def test_an_entry_that_is_not_opened_keeps_its_state(tmp_path: Path) -> None:
    session = TrainingSession(gan(8))
    session.step(points())
    only = TrainingSession(session.model(), entry="main")
    only.step(points(seed=1))
    only.save(tmp_path / "gan.onnx")
    both = TrainingSession(tmp_path / "gan.onnx")
    kept = [name for name in session.state if name.startswith("discriminator.")]
    assert_same_arrays({n: both.state[n] for n in kept}, {n: session.state[n] for n in kept})
    assert only.step(points(), entry="main")["loss"] == both.step(points(), entry="main")["loss"]
    with pytest.raises(
        OrtopsError, match="entry: the session runs only 'main', not 'discriminator'; open the mod"
    ):
        only.step(points(), entry="discriminator")


@pytest.mark.slow
def test_reset_resets_all_entries() -> None:
    session = TrainingSession(gan(8))
    start = dict(session.state)
    session.step(points())
    session.step(points(), entry="discriminator")
    session.reset()
    assert_same_arrays(dict(session.state), start)


@pytest.mark.slow
def test_add_training_to_a_trained_model() -> None:
    """The state of the first entry is kept."""
    model = build_training_model(
        two_heads_model(), loss=MeanSquaredError("y"), optimizer="Adam", trainable=["number.*"]
    )
    session = TrainingSession(model)
    batch = {name: rows()[name] for name in ("x", "targets")}
    session.step(batch)
    added = add_training(
        session.model(), name="b", loss=SoftmaxCrossEntropy("logits"), optimizer="SGD"
    )
    both = TrainingSession(added)
    assert_same_arrays({n: both.state[n] for n in session.state}, dict(session.state))
    assert both.step(rows(), entry="main")["loss"] == session.step(batch)["loss"]


def test_big_weights_and_a_path(tmp_path: Path) -> None:
    build = build_training_model(
        two_heads_model(), loss=MeanSquaredError("y"), optimizer="Adam", trainable=["number.*"]
    )
    ortops.save_model(build, tmp_path / "a.onnx")
    settings: dict[str, Any] = {"loss": SoftmaxCrossEntropy("logits"), "optimizer": "Adam"}
    from_path = add_training(tmp_path / "a.onnx", name="b", **settings)
    assert from_path == add_training(build.SerializeToString(), name="b", **settings)


def test_all_kinds_of_state_are_prefixed() -> None:
    """Masters, averages, loss scale, groups and clipping of the second entry."""
    settings: dict[str, Any] = {"ema_decay": 0.5, "clip_norm": 1.0}
    model = two_heads(np.float16, **settings)
    session = TrainingSession(model)
    own = {name for name in session.state if name.startswith("second.")}
    assert own == {
        *("second.learning_rate", "second.step", "second.loss_scale"),
        *("second.loss_scale.good_steps", "second.number.weight.master"),
        *("second.number.weight.ema", "second.number.weight.V", "second.number.weight.H"),
    }
    batch = rows(dtype=np.float16)
    before = session.state["number.weight"]
    session.step(batch, entry="second")
    assert (session.state["number.weight"] != before).any()
    wide = session.state["second.number.weight.master"]
    np.testing.assert_array_equal(wide.astype(np.float16), session.state["number.weight"])
    session.state["number.weight"] = np.ones((5, 1), np.float16)
    np.testing.assert_array_equal(session.state["second.number.weight.master"], 1)
    with pytest.raises(ArgumentError, match=r"state 'second\.loss_scale' must be a finite number"):
        session.state["second.loss_scale"] = 0.0
    assert session.parameters.keys() == {"trunk.weight", "classes.weight", "number.weight"}
    averaged = session.inference_model(ema=True)
    found = {t.name: onnx.numpy_helper.to_array(t) for t in averaged.graph.initializer}
    average = session.state["second.number.weight.ema"].astype(np.float16)
    np.testing.assert_array_equal(found["number.weight"], average)


# --------------------------------------------------------- BatchNormalization, Dropout, other modes


def normalized(**second: Any) -> onnx.ModelProto:
    rng = np.random.default_rng(2)
    with Tape(name="normalized") as tape:
        x = tape.input("x", np.float32, ["batch", 4])
        trunk = batch_norm(linear(x, "trunk", 5, rng), "norm")
        tape.output(linear(op.Relu(trunk), "a", 1, rng), "y")
        tape.output(linear(dropout(trunk, "drop", 0.5), "b", 1, rng), "z")
    model = build_training_model(
        tape.model(),
        loss=MeanSquaredError("y"),
        optimizer=SGD(0.1),
        trainable=["trunk*", "norm*", "a*"],
    )
    return add_training(model, name="second", loss=MeanSquaredError("z"), optimizer="SGD", **second)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["auto", "train", "frozen"])
def test_running_statistics_are_updated_by_one_entry(mode: Any) -> None:
    """The second entry may normalize by batch statistics, but leaves the running ones alone."""
    session = TrainingSession(normalized(batch_normalization=mode))
    batch = {"x": rows()["x"] * 3 + 1, "targets": rows()["targets"]}
    statistics = ("norm.running_mean", "norm.running_var")
    before = {name: session.state[name] for name in statistics}
    for _ in range(2):
        session.step(batch, entry="second")
    assert_same_arrays({name: session.state[name] for name in statistics}, before)
    session.step(batch, entry="main")
    assert all((session.state[name] != before[name]).any() for name in statistics)
    after = {name: session.state[name] for name in statistics}
    session.run_steps([batch] * 3, entry="second")
    assert_same_arrays({name: session.state[name] for name in statistics}, after)


@pytest.mark.slow
def test_the_mode_of_an_entry_decides_what_it_normalizes_by() -> None:
    batch = {"x": rows()["x"] * 3 + 1, "targets": rows()["targets"]}
    losses = {
        mode: TrainingSession(normalized(batch_normalization=mode)).step(batch, entry="second")[
            "loss"
        ]
        for mode in ("auto", "train", "frozen")
    }
    assert losses["auto"] == losses["frozen"] != losses["train"]


def test_each_entry_has_a_seed_of_its_own() -> None:
    session = TrainingSession(normalized(seed=5))
    assert session.state["second.seed"] == 5
    assert "seed" not in session.state  # the loss of the first one does not depend on Dropout


# ------------------------------------------------------------------------------------------ fit

FIT: Mapping[str, Any] = {"batch_size": 2, "progress": False, "shuffle": False}


def test_fit_of_an_entry() -> None:
    session, other = TrainingSession(two_heads()), TrainingSession(two_heads())
    data = rows(6)
    history = session.fit(data, epochs=2, entry="second", **FIT)
    losses = [
        float(other.step({n: a[i : i + 2] for n, a in data.items()}, entry="second")["loss"])
        for _ in range(2)
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(history.history["loss"], np.reshape(losses, (2, 3)).mean(1), 1e-6)
    assert_same_arrays(dict(session.state), dict(other.state))
    assert session.steps_done == 0
    assert history[-1]["steps"] == 6
    assert history[-1]["learning_rate"] == pytest.approx(0.02)


def test_fit_with_turns() -> None:
    """Two steps of the second entry, then one of the first, from the start of each epoch."""
    session, other = TrainingSession(two_heads()), TrainingSession(two_heads())
    data = rows(10)
    history = session.fit(data, epochs=2, entries={"second": 2, "main": 1}, **FIT)
    losses: list[dict[str, list[float]]] = []
    for _ in range(2):
        losses.append({"second": [], "main": []})
        for index, name in enumerate(["second", "second", "main", "second", "second"]):
            batch = {n: a[2 * index : 2 * index + 2] for n, a in data.items()}
            losses[-1][name].append(float(other.step(batch, entry=name)["loss"]))
    assert_same_arrays(dict(session.state), dict(other.state))
    for entry, own in zip(history, losses, strict=True):
        means = {name: np.mean(values) for name, values in own.items()}
        assert entry["second.loss"] == pytest.approx(means["second"], rel=1e-6)
        assert entry["main.loss"] == pytest.approx(means["main"], rel=1e-6)
        assert entry["loss"] == pytest.approx(means["second"] + means["main"], rel=1e-6)
    assert history[-1]["steps"] == 10
    rates = {name: history[-1][f"{name}.learning_rate"] for name in ("main", "second")}
    assert rates == pytest.approx(dict(session.learning_rates))
    assert history[-1]["learning_rate"] == rates["second"]


@pytest.mark.slow
def test_learning_rates_with_turns(tmp_path: Path) -> None:
    """Those of the last step of each entry, by its name, also if a training is resumed."""
    falling = SGD(ortops.schedules.exponential(0.4, factor=0.5))
    model = two_heads(optimizer=falling)
    settings: dict[str, Any] = {**FIT, "entries": {"main": 1, "second": 2}}
    whole = TrainingSession(model).fit(rows(10), epochs=2, **settings)
    # 5 batches: main, second, second, main, second; the second entry makes 3 steps an epoch.
    assert whole.history["second.learning_rate"] == pytest.approx([0.4 * 0.5**2, 0.4 * 0.5**5])
    assert whole.history["main.learning_rate"] == pytest.approx([0.01, 0.01])
    assert whole.history["learning_rate"] == whole.history["main.learning_rate"]
    begun = TrainingSession(model)
    begun.fit(rows(10), epochs=2, max_steps=9, **settings)
    begun.save(tmp_path / "saved.onnx")
    again = TrainingSession(tmp_path / "saved.onnx").fit(
        rows(10), epochs=2, resume=True, **settings
    )
    for name in ("learning_rate", "main.learning_rate", "second.learning_rate"):
        assert again.history[name] == whole.history[name]


def test_validation_with_turns() -> None:
    session = TrainingSession(two_heads())
    data = rows(6)
    (entry,) = session.fit(
        data, validation=data, metrics=["accuracy"], entries={"main": 1, "second": 1}, **FIT
    )
    found = {name: session.evaluate(data, entry=name)["loss"] for name in ("main", "second")}
    assert entry["validation_main.loss"] == pytest.approx(found["main"])
    assert entry["validation_second.loss"] == pytest.approx(found["second"])
    assert entry["validation_loss"] == pytest.approx(sum(found.values()))
    assert 0 <= entry["validation_accuracy"] <= 1


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_turns_are_resumed_bit_for_bit(stop: int, tmp_path: Path) -> None:
    class Stop(ortops.callbacks.Callback):
        def on_step(self, record: Any, session: Any) -> None:
            if record.step == stop:
                session.save(tmp_path / "a.onnx")
                record.stop("enough")

    settings: dict[str, Any] = {**FIT, "shuffle": True, "entries": {"second": 2, "main": 1}}
    session, whole = TrainingSession(two_heads()), TrainingSession(two_heads())
    expected = whole.fit(rows(10), epochs=2, **settings)
    session.fit(rows(10), epochs=2, callbacks=[Stop()], **settings)
    again = TrainingSession(tmp_path / "a.onnx")
    with pytest.raises(
        OrtopsError, match="fit: entry or entries must be second: 2, main: 1, as in the training to"
    ):
        again.fit(rows(10), epochs=2, resume=True, **{**settings, "entries": {"main": 1}})
    with pytest.raises(OrtopsError, match="fit: entry or entries must be second: 2"):
        again.fit(rows(10), epochs=2, resume=True, **{**settings, "entries": None})
    found = again.fit(rows(10), epochs=2, resume=True, **settings)
    assert_same_arrays(dict(again.state), dict(whole.state))
    assert [e["loss"] for e in found] == [e["loss"] for e in expected]


def test_callbacks_see_the_entry_that_is_trained(tmp_path: Path) -> None:
    session = TrainingSession(two_heads())
    best = ortops.callbacks.BestModel(tmp_path / "best.onnx", monitor="loss")
    log = ortops.callbacks.JSONLines(tmp_path / "log.jsonl")
    session.fit(rows(), entries={"main": 1, "second": 1}, callbacks=[best, log], **FIT)
    assert (tmp_path / "best.onnx").exists()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("second.loss" in str(line) for line in lines)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"entries": {}}, "entries must be a dict with the number of steps of each entry in a"),
        ({"entries": ["main"]}, r"entries must be a dict .*, got \['main'\]"),
        ({"entries": {"mian": 1}}, "entries: there is no entry 'mian'; did you mean 'main'"),
        ({"entries": {"main": 0}}, "entries: main must be an integer >= 1 and <= 10000, got 0"),
        ({"entries": {"main": 1}, "entry": "main"}, "entry must be left out with entries=, got 'm"),
        ({"entries": {"main": 1}, "train_metrics": True}, "train_metrics must be False with ent"),
        ({"entries": {"main": 1}, "accumulate": 2}, "accumulate must be 1 with entries=, got 2"),
    ],
)
def test_wrong_turns(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrainingSession(two_heads()).fit(rows(), **arguments, **FIT)


# --------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize("name", ["", "a.b", "1", "a b", "é", "a/b", 3, None, "a\n"])
def test_names_with_odd_characters(name: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"^name must start with a letter and have only letters, digits, '_' an"
    ):
        add_training(two_heads(), name=name, loss=MeanSquaredError("y"), optimizer="SGD")


def adding(**settings: Any) -> Callable[[], onnx.ModelProto]:
    settings = {"name": "third", "loss": MeanSquaredError("y"), "optimizer": "SGD"} | settings
    return lambda: add_training(two_heads(), **settings)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (adding(name="second"), r"the model has an entry 'second' already \(entries: main, second"),
        (adding(name="main"), "the model has an entry 'main' already"),
        (adding(), "trainable: the loss depends on no floating-point initializer, only on 'trunk"),
        (
            adding(trainable=["number.weight"]),
            "trainable: 'number.weight' is updated by the entry 'second' already, and the ONNX st",
        ),
        (adding(trainable=["trunk.*"]), "'trunk.weight', which 'trunk.*' matches, is updated by"),
        (adding(loss=MeanSquaredError("w")), "loss MeanSquaredError: the model has no tensor 'w'"),
        (adding(trainable=["nothing"]), "'nothing'"),
    ],
)
def test_what_cannot_be_added(add: Callable[[], onnx.ModelProto], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        add()


def test_an_inference_model_gets_its_first_entry_elsewhere() -> None:
    with pytest.raises(
        ModelError,
        match=r"it has no training_info; make it trainable with ortops\.build_training_m",
    ):
        add_training(two_heads_model(), name="b", loss=MeanSquaredError("y"), optimizer="SGD")


def test_unknown_entries() -> None:
    session = TrainingSession(two_heads())
    for use in (
        lambda: session.step(rows(), entry="secnd"),
        lambda: session.fit(rows(), entry="secnd"),
        lambda: session.evaluate(rows(), entry="secnd"),
        lambda: session.gradients(rows(), entry="secnd"),
        lambda: session.run_steps([rows()], entry="secnd"),
        lambda: TrainingSession(two_heads(), entry="secnd"),
        lambda: ortops.step_graph(two_heads(), entry="secnd"),
    ):
        with pytest.raises(
            ModelError, match="entry: the model has no entry named 'secnd'; did you mean 'second'"
        ):
            use()
    with pytest.raises(ModelError, match="it has no training_info entry 2; it has 2"):
        session.step(rows(), entry=2)
    with pytest.raises(ArgumentError, match=r"entry must be an integer, got 0\.5"):
        session.step(rows(), entry=0.5)  # type: ignore[arg-type]  # on purpose
    model = two_heads()
    model.training_info[1].algorithm.name = "main"
    with pytest.raises(ModelError, match="the model has 2 training_info entries named 'main'"):
        TrainingSession(model).step(rows(), entry="main")


def test_a_session_with_one_entry_accepts_its_name() -> None:
    model = build_training_model(two_heads_model(), loss=MeanSquaredError("y"), optimizer="SGD")
    model.training_info[0].algorithm.name = "training_algorithm"  # as older versions wrote it
    session = TrainingSession(model)
    batch = {name: rows()[name] for name in ("x", "targets")}
    assert session.step(batch, entry="main").keys() >= {"loss"}
    assert session.learning_rates.keys() == {"main"}


# --------------------------------------------------------------------------------- step graphs


@pytest.mark.quick(1)
@pytest.mark.parametrize("target", [None, "onnxruntime"])
def test_step_graph_of_an_entry(target: Any) -> None:
    model, batch = two_heads(), rows()
    flat = ortops.step_graph(model, entry="second", target=target)
    flat = flat if target else ortops.lower(flat)
    plain = onnxruntime.InferenceSession(flat.SerializeToString())
    updates = json.loads(next(e.value for e in flat.metadata_props if e.key == "ortops.step_graph"))
    assert "number.weight" in updates
    assert "trunk.weight" not in updates
    names = [output.name for output in plain.get_outputs()]
    found = dict(zip(names, plain.run(None, {n: batch[n] for n in ("x", "targets")}), strict=True))
    session = TrainingSession(model)
    assert found["loss"] == pytest.approx(float(session.step(batch, entry="second")["loss"]))
    for variable, output in updates.items():
        np.testing.assert_allclose(found[output], session.state[variable], rtol=1e-5, atol=1e-7)


def test_export_of_an_entry(tmp_path: Path) -> None:
    ortops.export_step(two_heads(), tmp_path, entry="second")
    described = json.loads((tmp_path / "step.json").read_text())
    assert described["learning_rates"] == ["second.learning_rate"]
    assert described["counter"] == "second.step"
    assert [feed["name"] for feed in described["step"]["feeds"]] == ["x", "targets"]
    assert described["variables"]["number.weight"]["role"] == "parameter"


def test_metrics_of_training_of_an_entry() -> None:
    """Its graphs have an output more, and others go on as before."""
    session, other = TrainingSession(two_heads()), TrainingSession(two_heads())
    data = rows()
    (entry,) = session.fit(data, entry="main", metrics=["accuracy"], train_metrics=True, **FIT)
    assert 0 <= entry["accuracy"] <= 1
    session.fit(data, entries={"second": 1, "main": 1}, **FIT)
    other.fit(data, entry="main", **FIT)
    other.fit(data, entries={"second": 1, "main": 1}, **FIT)
    assert_same_arrays(dict(session.state), dict(other.state))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["main", "other"])
def test_each_entry_has_outputs_in_training_mode_of_its_own(entry: str) -> None:
    """Its metrics of training are those of a file without the other entry."""
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(12, 1, 4, 4)).astype(np.float32),
        "labels": rng.integers(0, 3, 12),
    }
    trained = {"main": ["conv.w"], "other": ["bn.scale", "bn.bias"]}
    settings: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam"}
    both = ortops.build_training_model(normalizing(), trainable=trained["main"], **settings)
    both = ortops.add_training(both, trainable=trained["other"], name="other", **settings)
    alone = ortops.build_training_model(normalizing(), trainable=trained[entry], **settings)
    given: dict[str, Any] = {
        "metrics": ["accuracy"],
        "train_metrics": True,
        "epochs": 2,
        "batch_size": 5,
        "progress": False,
    }
    found = TrainingSession(both).fit(data, entry=entry, **given)
    expected = TrainingSession(alone).fit(data, **given)
    assert found.history["accuracy"] == expected.history["accuracy"]
    assert found.history["loss"] == pytest.approx(expected.history["loss"], rel=1e-5)


def test_schedules_whose_length_fit_sets() -> None:
    """Only where one entry makes the steps."""
    rate = ortops.schedules.cosine(0.1)
    model = build_training_model(
        two_heads_model(), loss=MeanSquaredError("y"), optimizer="SGD", trainable=["number.*"]
    )
    loss = SoftmaxCrossEntropy("logits")
    model = add_training(model, name="b", loss=loss, optimizer=Adam(rate))
    session = TrainingSession(model)
    message = r"the schedule cosine\(.* has no number of steps"
    for use in (
        lambda: session.step(rows(), entry="b"),
        lambda: session.step(rows()),
        lambda: session.fit(rows(), **FIT),
        lambda: session.fit(rows(), entries={"main": 1, "b": 1}, **FIT),
        lambda: ortops.step_graph(model, entry="b"),
    ):
        with pytest.raises(OrtopsError, match=message):
            use()
    session.step(rows(), entry="main")
    ortops.step_graph(model)
    (entry,) = session.fit(rows(), entry="b", **FIT)
    assert entry["learning_rate"] < 0.1
    assert session.state["b.schedule_steps"] == 3
    session.fit(rows(), entries={"main": 1, "b": 1}, **FIT)


# --------------------------------------------------------------------------------- command line


@pytest.mark.slow
def test_the_command_line_shows_and_trains_all_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = str(tmp_path / "two.onnx"), str(tmp_path / "data.npz")
    onnx.save(two_heads(), path)
    np.savez(data, **rows())
    assert cli(["inspect", path]) == 0
    shown = capsys.readouterr().out
    assert "loss input labels: int64[batch]\nloss input targets: float[batch, 1]\n" in shown
    assert (
        "entry main: loss logits; learning rate 0.01; 0 steps done; trains 2 weights, "
        "such as trunk.weight\nentry second: loss y; learning rate 0.02; 0 steps "
        "done; trains 1 weights, such as number.weight\n" in shown
    )
    assert cli(["check", path]) == 0
    shown = capsys.readouterr().out
    assert "the report is about the training algorithm 'main'; the file also has 'second'" in shown
    assert "trainable parameters: 35 in 2 tensors" in shown
    saved = str(tmp_path / "trained.onnx")
    assert cli(["train", path, "--data", data, "--epochs", "2", "--save", saved]) == 0
    session = TrainingSession(saved)
    assert session.steps_done == session.state["second.step"] == 2
    folder = tmp_path / "step"
    assert cli(["export-step", path, str(folder), "--entry", "second"]) == 0
    described = json.loads((folder / "step.json").read_text())
    assert described["learning_rates"] == ["second.learning_rate"]


# ----------------------------------------------------------------------------- random sequences


def operation_of(rng: np.random.Generator, data: dict[str, Array]) -> Callable[..., Any]:
    """Draws something that changes or measures a session."""
    entry = [None, "main", "second"][rng.integers(3)]
    one = entry or "main"
    turns = {"second": int(rng.integers(1, 3)), "main": 1}
    seed = int(rng.integers(100))
    operations: list[Callable[[TrainingSession], Any]] = [
        lambda s: s.step(data, entry=entry)["loss"],
        lambda s: s.run_steps([data] * 2, entry=entry),
        lambda s: s.apply(s.gradients(data, entry=one), entry=one),
        lambda s: s.fit(data, entry=entry, **{**FIT, "shuffle": True, "seed": seed})[0]["loss"],
        lambda s: s.fit(data, entry=one, accumulate=2, **FIT)[0]["loss"],
        lambda s: s.fit(data, entries=turns, **FIT)[0]["loss"],
        lambda s: s.evaluate(data, entry=entry)["loss"],
        lambda s: s.learning_rates.update({one: seed / 1000}),
    ]
    return operations[rng.integers(len(operations))]


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("draw", range(8))
def test_random_operations_give_the_same_after_each_save(draw: int, tmp_path: Path) -> None:
    """One session lives on, and one is opened from its file after each operation."""
    rng = np.random.default_rng(draw)
    settings: dict[str, Any] = {
        "ema_decay": [None, 0.9][rng.integers(2)],
        "clip_norm": [None, 0.5][rng.integers(2)],
    }
    arguments: dict[str, Any] = {
        "kernels": str(rng.choice(["onnx", "python"])),
        "recompute": [None, "sqrt"][rng.integers(2)],
    }
    session = TrainingSession(two_heads(**settings), **arguments)
    other = TrainingSession(session.model(), **arguments)
    for number in range(6):
        operation = operation_of(rng, rows(6, seed=100 * draw + number))
        np.testing.assert_array_equal(operation(session), operation(other))
        assert_same_arrays(dict(session.state), dict(other.state))
        other.save(tmp_path / "other.onnx")
        other = TrainingSession(tmp_path / "other.onnx", **arguments)
