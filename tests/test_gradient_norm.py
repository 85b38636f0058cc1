"""The norm of all gradients in the records of fit, where clip_norm has it computed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from training_models import Arrays, classifier, initializers, labelled
from violations import all_violations

import ortops
from ortops import Tape, TrainingSession, build_training_model, losses, optimizers
from ortops.engine.execution.part import Part
from ortops.engine.execution.settings import Settings
from ortops.graph.files.json_metadata import read_metadata, write_metadata

KEY = "ortops.training"
ROWS = 24
WAYS: dict[str, dict[str, Any]] = {
    "joined": {},
    "apart": {"settings": Settings(joined=0)},
    "in chunks": {"settings": Settings(joined=0, chunk=64, passed=0)},
    "python": {"kernels": "python"},
}


class Seen(ortops.callbacks.Callback):
    """Keeps the records of steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_step(self, record: Any, session: Any) -> None:
        self.steps.append(dict(record.values))


def trainable(**options: Any) -> onnx.ModelProto:
    settings = {"loss": "SoftmaxCrossEntropy", "optimizer": optimizers.SGD(0.5), **options}
    return build_training_model(classifier(), **settings)


def data() -> Arrays:
    feeds = labelled((6,), rows=ROWS)
    return feeds | {"x": feeds["x"] * np.float32(3)}


def without_note(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model as builders without the note have written it."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    found = dict(read_metadata(result.metadata_props, KEY, "") or {})
    del found["gradient_norm"]
    write_metadata(result, KEY, json.dumps(found))
    return result


def fit(session: TrainingSession, feeds: Arrays | None = None, **options: Any) -> Any:
    seen = Seen()
    settings = {"batch_size": 4, "shuffle": False, "progress": False, **options}
    history = session.fit(data() if feeds is None else feeds, callbacks=[seen], **settings)
    return history, seen.steps


def torch_norms(given: dict[str, float], rows: int) -> list[float]:
    """Returns what torch.nn.utils.clip_grad_norm_ returns in the steps of an epoch."""
    import torch

    names = ("w1", "b1", "w2")
    arrays = initializers(classifier().graph)
    w1, b1, w2 = parameters = [torch.tensor(arrays[n], requires_grad=True) for n in names]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    feeds, norms = {n: torch.from_numpy(a) for n, a in data().items()}, []
    for begin in range(0, ROWS, rows):
        part = {name: each[begin : begin + rows] for name, each in feeds.items()}
        optimizer.zero_grad()
        logits = torch.tanh(part["x"] @ w1 + b1) @ w2
        torch.nn.functional.cross_entropy(logits, part["labels"]).backward()
        if "clip_value" in given:
            torch.nn.utils.clip_grad_value_(parameters, given["clip_value"])
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, given["clip_norm"])))
        optimizer.step()
    return norms


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("accumulate", [2, 1])
@pytest.mark.parametrize("given", [{"clip_norm": 0.25, "clip_value": 0.1}, {"clip_norm": 0.25}])
def test_the_norm_is_what_torchs_clipping_returns(given: Any, accumulate: int) -> None:
    expected = torch_norms(given, 4 * accumulate)
    assert min(expected) > 0.25, expected  # each is the one before clipping
    with all_violations() as check:
        for way, how in WAYS.items():
            history, steps = fit(TrainingSession(trainable(**given), **how), accumulate=accumulate)
            with check(way):
                found = [step["gradient_norm"] for step in steps]
                np.testing.assert_allclose(found, expected, rtol=1e-5)
                mean = history[0]["gradient_norm"]
                np.testing.assert_allclose(mean, np.mean(expected), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 1])
def test_files_without_the_note_train_alike_and_have_no_norm(accumulate: int) -> None:
    model = trainable(clip_norm=0.25)
    with all_violations() as check:
        for way, how in WAYS.items():
            session = TrainingSession(model, **how)
            old = TrainingSession(without_note(model), **how)
            history, steps = fit(session, accumulate=accumulate)
            before, steps_before = fit(old, accumulate=accumulate)
            for entry in (*history, *steps):
                entry.pop("gradient_norm")
            with check(way):
                assert (history, steps) == (before, steps_before)
                for name, array in old.state.items():
                    assert session.state[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("options", [{}, {"clip_value": 0.1}])
def test_what_computes_no_norm_shows_none(options: dict[str, Any]) -> None:
    session = TrainingSession(trainable(**options))
    history, steps = fit(session)
    assert "gradient_norm" not in {*history[0], *steps[0]}
    assert not session.metadata.gradient_norm


def test_the_norm_is_in_no_step_unless_it_is_asked_for() -> None:
    session = TrainingSession(trainable(clip_norm=0.25))
    fit(session)
    assert session.step(data()).keys() == {"loss", "logits"}


def test_fit_opens_no_graph_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = [TrainingSession(trainable(clip_norm=0.25)), TrainingSession(heads(clip_norm=0.1))]
    monkeypatch.setattr(Part, "forget", None)
    fit(sessions[0])
    ones = np.ones((4, 1), np.float32)
    for options in ({}, {"entry": "second"}, {"entries": {"main": 1, "second": 1}}):
        fit(sessions[1], {"x": ones, "for_a": ones, "for_b": ones}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 1])
def test_a_resumed_epoch_has_the_mean_over_all_its_steps(tmp_path: Path, accumulate: int) -> None:
    unbroken, _ = fit(TrainingSession(trainable(clip_norm=0.25)), accumulate=accumulate, epochs=2)
    session = TrainingSession(trainable(clip_norm=0.25))
    first, _ = fit(session, accumulate=accumulate, epochs=2, max_steps=4 // accumulate)
    assert first[-1]["gradient_norm"] != unbroken[0]["gradient_norm"]
    session.save(tmp_path / "saved.onnx")
    again = TrainingSession(tmp_path / "saved.onnx")
    history, _ = fit(again, accumulate=accumulate, epochs=2, resume=True)
    assert history == unbroken


@pytest.mark.slow
def test_a_sum_that_is_none_is_refused() -> None:
    session = TrainingSession(trainable(clip_norm=0.25))
    fit(session, max_steps=2)
    model = session.model()
    found = dict(read_metadata(model.metadata_props, "ortops.fit", "") or {})
    assert found["norms"]["gradient_norm"][1] == 2
    for value in ([1.0], [1.0, -1], [1.0, 2.5], "x"):
        write_metadata(model, "ortops.fit", json.dumps(found | {"norms": {"gradient_norm": value}}))
        with pytest.raises(ortops.ModelError, match="'norms' must be an object of"):
            TrainingSession(model)


def test_a_skipped_step_is_no_part_of_the_mean(tmp_path: Path) -> None:
    """The gradients of float16 are unscaled; those of one step overflow."""
    rng = np.random.default_rng(2)
    weights = rng.integers(-2, 3, (4, 2)).astype(np.float16)
    with Tape(name="half") as tape:
        x = tape.input("x", np.float16, ["batch", 4])
        tape.output(x @ tape.initializer("w", weights), "y")
    settings: dict[str, Any] = {"loss": "MeanSquaredError", "optimizer": optimizers.SGD(0.0)}
    session = TrainingSession(build_training_model(tape.model(), clip_norm=0.5, **settings))
    session.state["loss_scale"] = np.float32(64)
    x = rng.integers(-4, 5, (12, 4)).astype(np.float16)
    feeds = {"x": x, "targets": rng.integers(-4, 5, (12, 2)).astype(np.float32)}
    expected = []
    for begin in (0, 4):
        part, wanted = x[begin : begin + 4].astype(np.float64), feeds["targets"][begin : begin + 4]
        expected.append(np.linalg.norm(2 * part.T @ (part @ weights - wanted) / wanted.size))
    x[9] = np.inf
    log = ortops.callbacks.JSONLines(tmp_path / "log.jsonl", every=1)
    seen = Seen()
    history = session.fit(
        feeds, batch_size=4, shuffle=False, progress=False, stop_on_nan=False, callbacks=[seen, log]
    )
    found = [step["gradient_norm"] for step in seen.steps]
    np.testing.assert_allclose(found[:2], expected, rtol=2e-3)
    assert not math.isfinite(found[2])
    assert history[0]["gradient_norm"] == np.mean(found[:2])
    (alone,) = session.fit(
        {name: array[8:] for name, array in feeds.items()}, stop_on_nan=False, progress=False
    )
    assert "gradient_norm" not in alone
    assert "gradient_norm" in (tmp_path / "log.jsonl").read_text()


def heads(**options: Any) -> onnx.ModelProto:
    """Two entries on one trunk, whose gradients are one number each: 2·(w·x − target)·x."""
    with Tape(name="heads") as tape:
        x = tape.input("x", np.float32, ["batch", 1])
        for name in ("a", "b"):
            tape.output(x @ tape.initializer(f"w_{name}", np.ones((1, 1), np.float32)), name)
    rate = optimizers.SGD(0.0)
    loss = losses.MeanSquaredError("a", target="for_a")
    model = build_training_model(
        tape.model(), loss=loss, optimizer=rate, trainable=["w_a"], clip_norm=0.1
    )
    other = losses.MeanSquaredError("b", target="for_b")
    return ortops.add_training(
        model, name="second", loss=other, optimizer=rate, trainable=["w_b"], **options
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("clipped", [True, False])
def test_each_entry_has_its_norm(clipped: bool) -> None:
    ones = np.ones((4, 1), np.float32)
    feeds = {"x": ones, "for_a": ones * 2, "for_b": ones * 4}  # gradients -2 and -6
    model = heads(**({"clip_norm": 0.1} if clipped else {}))
    two = {"gradient_norm": 2.0, "second.gradient_norm": 6.0}
    turns = {f"main.{name}".replace("main.s", "s"): norm for name, norm in two.items()}
    cases: list[tuple[dict[str, Any], dict[str, float]]] = [
        ({}, two),
        ({"entry": "main"}, {"gradient_norm": 2.0}),
        ({"entry": "second"}, {"gradient_norm": 6.0}),
        ({"entries": {"main": 2, "second": 1}}, turns),
    ]
    for options, expected in cases:
        if not clipped:
            own = options.get("entry") != "second"
            expected = {n: norm for n, norm in expected.items() if norm == 2.0 and own}
        history, steps = fit(TrainingSession(model), feeds, batch_size=1, **options)
        assert {n: v for n, v in history[0].items() if n.endswith("_norm")} == expected, options
        found: dict[str, float] = {}
        for step in steps:
            found |= {n: v for n, v in step.items() if n.endswith("_norm")}
        assert found == expected, options
        if "entries" in options:
            assert "second.gradient_norm" not in steps[0]


@pytest.mark.slow
def test_losses_with_weights_keep_the_norm() -> None:
    """Weights of rows that are all 1 change nothing, though the file's loss has none."""
    plain, _ = fit(TrainingSession(trainable(clip_norm=0.25)))
    weights = np.ones(ROWS, np.float32)
    weighted, _ = fit(TrainingSession(trainable(clip_norm=0.25)), sample_weight=weights)
    np.testing.assert_allclose(weighted[0]["gradient_norm"], plain[0]["gradient_norm"], rtol=1e-6)


def test_a_metric_has_another_name() -> None:
    session = TrainingSession(trainable(clip_norm=0.25))
    metric = ortops.metrics.Accuracy(name="gradient_norm")
    with pytest.raises(ortops.ArgumentError, match="has a number 'gradient_norm' already"):
        fit(session, metrics=[metric], train_metrics=True)
