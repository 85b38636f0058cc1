"""Tracker and OptunaPruning: with small fakes of the packages, and with the packages themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from training_models import affine, affine_batch
from violations import all_violations

from ortops import (
    ArgumentError,
    ModelError,
    OrtopsError,
    TrainingSession,
    build_training_model,
)
from ortops.callbacks import Callback, Checkpoint, OptunaPruning, Tracker

QUIET: dict[str, Any] = {"progress": False, "batch_size": 5}


class Breaking(Callback):
    """Ends a training after a step, with an error."""

    def on_step(self, record: Any, session: Any) -> None:
        if record.step == 3:
            raise RuntimeError("broken")


class Stopping(Callback):
    def on_step(self, record: Any, session: Any) -> None:
        if record.step == 6:
            record.stop("enough")


def session() -> TrainingSession:
    return TrainingSession(
        build_training_model(affine(), optimizer="SGD", loss="MeanSquaredError", clip_norm=1.0)
    )


class FakeRun:
    def __init__(self, **settings: Any) -> None:
        self.settings, self.id = settings, settings.get("id", "first")
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.config, self.exit_code = FakeConfig(), None

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeConfig(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(values)


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Replaces wandb, and returns the runs that are begun."""
    runs: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        runs.append(FakeRun(**settings))
        return runs[-1]

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_hyper_parameters_and_metrics_reach_a_run(wandb_runs: list[FakeRun]) -> None:
    trained = session()
    tracker = Tracker("wandb", project="lines", parameters={"width": 3}, every=2)
    history = trained.fit(
        affine_batch(20), epochs=2, validation=affine_batch(10), callbacks=[tracker], **QUIET
    )
    (run,) = wandb_runs
    assert run.settings == {"project": "lines"}
    wanted = {"width": 3, "epochs": 2, "batch_size": 5, "rows": 20}
    assert {name: run.config.get(name) for name in wanted} == wanted
    assert run.config["clipping"] == trained.metadata.clipping != ""
    assert run.config["learning_rate"] == pytest.approx(trained.learning_rate)
    steps = [step for step, values in run.logged if "step/loss" in values]
    assert steps == [2, 4, 6, 8]
    epochs = [(step, values) for step, values in run.logged if "epoch/loss" in values]
    assert [step for step, _ in epochs] == [4, 8]
    for (_, values), entry in zip(epochs, history, strict=True):
        assert values["epoch/validation_loss"] == entry["validation_loss"]
        assert values["epoch/loss"] == entry["loss"]
    assert run.exit_code == 0


def test_a_resumed_training_continues_its_run(wandb_runs: list[FakeRun], tmp_path: Path) -> None:
    first, tracker = session(), Tracker("wandb")
    first.fit(affine_batch(20), epochs=3, callbacks=[Stopping(), tracker], **QUIET)
    wandb_runs[0].id = "changed since"
    first.save(tmp_path / "line.onnx")
    second = TrainingSession(tmp_path / "line.onnx")
    others = [Callback(), Tracker("wandb", mode="offline")]
    second.fit(affine_batch(20), epochs=4, callbacks=others, resume=True, **QUIET)
    assert wandb_runs[1].settings == {"mode": "offline", "id": "first", "resume": "allow"}
    assert (wandb_runs[0].config["epochs"], wandb_runs[1].config["epochs"]) == (3, 4)
    assert [step for step, _ in wandb_runs[1].logged] == [8, 12, 16]


@pytest.mark.slow
def test_a_run_fails_with_its_training(wandb_runs: list[FakeRun]) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        session().fit(affine_batch(20), epochs=3, callbacks=[Tracker("wandb"), Breaking()], **QUIET)
    assert [run.exit_code for run in wandb_runs] == [1]


FAILURES = {  # of the tool: what it was doing, and the steps in the checkpoint
    "init": ("begin a run: UsageError: no API key; .*wandb login", None),
    "update": ("record the parameters: UsageError", None),
    "log": ("record the metrics of step 4: UsageError", 4),
    "finish": ("end the run: UsageError", 8),
}


@pytest.mark.slow
def test_errors_of_a_tool_are_named_after_checkpoints(
    wandb_runs: list[FakeRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class UsageError(Exception):
        pass

    def fail(*arguments: object, **settings: object) -> None:
        raise UsageError("no API key")

    with all_violations() as check:
        for name, (message, steps) in FAILURES.items():
            owner = {"init": sys.modules["wandb"], "update": FakeConfig}.get(name, FakeRun)
            path = tmp_path / f"{name}.onnx"
            with check(name), monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(OrtopsError, match=f"Tracker: wandb could not {message}"):
                    session().fit(
                        affine_batch(20),
                        epochs=2,
                        callbacks=[Tracker("wandb"), Checkpoint(path)],
                        **QUIET,
                    )
                saved = TrainingSession(path).steps_done if path.exists() else None
                assert saved == steps


def test_what_saves_is_called_whatever_others_raise(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Callback):
        def on_step(self, record: Any, session: Any) -> None:
            seen.append(f"step {record.step}")

        def on_save(self, record: Any, session: Any) -> None:
            if record.step == 3:
                raise OSError("the disk is full")

    path, straight = tmp_path / "line.onnx", session()
    callbacks = [Breaking(), Watching(), Checkpoint(path, every=3)]
    with pytest.raises(RuntimeError, match="broken") as failed:
        session().fit(affine_batch(20), epochs=2, callbacks=callbacks, **QUIET)
    assert seen == ["step 1", "step 2", "step 3"]
    assert failed.value.__notes__ == ["then Watching.on_save raised OSError('the disk is full')"]
    resumed = TrainingSession(path)
    assert resumed.steps_done == 3
    resumed.fit(affine_batch(20), epochs=2, resume=True, callbacks=[Checkpoint(path)], **QUIET)
    straight.fit(affine_batch(20), epochs=2, **QUIET)
    for name, value in straight.state.items():
        np.testing.assert_array_equal(resumed.state[name], value, strict=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tracker("wandb", parameters={"a": [1]}), r"booleans by name, got 'a': \[1\]"),
        (lambda: Tracker("wandb", parameters={3: 1}), "booleans by name, got 3: 1"),  # type: ignore[dict-item]
        (lambda: Tracker("comet"), "Tracker: backend must be"),  # type: ignore[arg-type]
        (lambda: Tracker("wandb", every=0), "Tracker: every must be an integer >= 1, got 0"),
        (lambda: Tracker("wandb", id="x"), "id= is set by Tracker"),
        (lambda: Tracker("mlflow", project="x"), "Tracker: a setting of mlflow must be"),
        (lambda: Tracker("wandb", parameters=[1]), r"parameters must be a dict, got \[1\]"),  # type: ignore[arg-type]
        (lambda: OptunaPruning(3), "trial must be a trial of Optuna, got 3"),
    ],
)
def test_arguments_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_a_state_that_is_not_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'run' .* must be a string, got 3"):
        Tracker("wandb").restore({"run": 3})


class FakeTrial:
    def __init__(self, last: int) -> None:
        self.last, self.reports = last, list[tuple[float, int]]()

    def report(self, value: float, step: int) -> None:
        self.reports.append((value, step))

    def should_prune(self) -> bool:
        return len(self.reports) == self.last


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("callback", "module", "package"),
    [
        (Tracker("wandb"), "wandb", r"wandb; pip install ortops\[wandb\]"),
        (Tracker("mlflow"), "mlflow", r"mlflow-skinny; pip install ortops\[mlflow\]"),
        (OptunaPruning(FakeTrial(1)), "optuna", r"optuna; pip install ortops\[optuna\]"),
    ],
)
def test_what_to_install(
    callback: Callback, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    trained = session()
    with pytest.raises(OrtopsError, match=f"needs {package}"):
        trained.fit(affine_batch(20), epochs=1, callbacks=[callback], **QUIET)
    assert trained.steps_done == 0


def test_a_trial_is_pruned_after_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    class PrunedError(Exception):
        pass

    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(TrialPruned=PrunedError))  # type: ignore[arg-type]
    trial, trained = FakeTrial(2), session()
    with pytest.raises(PrunedError, match="pruned after epoch 2, with loss"):
        trained.fit(affine_batch(20), epochs=5, callbacks=[OptunaPruning(trial, "loss")], **QUIET)
    assert trained.steps_done == 8
    assert trial.reports == [(entry["loss"], n) for n, entry in enumerate(trained.history, 1)]
    with pytest.raises(OrtopsError, match="OptunaPruning: epoch 1 has no metric 'validation_loss'"):
        session().fit(affine_batch(20), epochs=1, callbacks=[OptunaPruning(FakeTrial(9))], **QUIET)


# ------------------------------------------------------------------------------ the real packages


@pytest.mark.slow
@pytest.mark.optional("wandb", "wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = Tracker("wandb", mode="offline", dir=str(tmp_path), project="lines", every=1)
    session().fit(affine_batch(20), epochs=2, callbacks=[tracker], **QUIET)
    (file,) = tmp_path.rglob("*.wandb")
    content = file.read_bytes()
    for text in (b"epoch/loss", b"step/loss", b"learning_rate", b"clipping"):
        assert text in content


@pytest.mark.slow
@pytest.mark.optional("mlflow", "mlflow")
@pytest.mark.filterwarnings("ignore:The ..noload.. loader")  # of sqlalchemy 2.1
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)  # in a new folder, without any other setting
    settings: dict[str, Any] = {"experiment": "lines"}
    first = session()
    first.fit(
        affine_batch(20),
        epochs=3,
        callbacks=[Stopping(), Tracker("mlflow", every=2, run_name="a line", **settings)],
        **QUIET,
    )
    history = first.fit(
        affine_batch(20),
        epochs=4,
        callbacks=[Callback(), Tracker("mlflow", every=2, **settings)],
        resume=True,
        **QUIET,
    )
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("lines").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "a line")
    assert (run.data.params["batch_size"], run.data.params["epochs"]) == ("5", "3")
    assert run.data.tags["epochs"] == "4"  # MLflow changes no parameters
    found = client.get_metric_history(run.info.run_id, "epoch/loss")
    assert [(each.step, each.value) for each in found if each.step in (4, 8, 12, 16)] == [
        (n * 4, pytest.approx(entry["loss"])) for n, entry in enumerate(history, 1)
    ]
    steps = client.get_metric_history(run.info.run_id, "step/loss")
    assert [each.step for each in steps] == [2, 4, 6, 8, 10, 12, 14, 16]
    client.delete_run(run.info.run_id)
    last = Tracker("mlflow", **settings)
    with pytest.raises(OrtopsError, match=f"mlflow could not continue the run '{run.info.run_id}'"):
        first.fit(affine_batch(20), epochs=5, callbacks=[Callback(), last], resume=True, **QUIET)
    for wrong in ({"experiment": ""}, {"tracking_uri": "ftp://x"}, {"tags": [1]}):
        with pytest.raises(OrtopsError, match=r"Tracker: mlflow could not begin a run: "):
            session().fit(affine_batch(20), callbacks=[Tracker("mlflow", **wrong)], **QUIET)


@pytest.mark.slow
@pytest.mark.optional("optuna", "optuna")
def test_a_study_prunes() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        rate = (0.1, 1e-6)[trial.number]
        trained = session()
        trained.learning_rate = rate
        callbacks = [OptunaPruning(trial, "loss")]
        trained.fit(affine_batch(20), epochs=4, callbacks=callbacks, **QUIET)
        return trained.evaluate(affine_batch(20))["loss"]

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
    study = optuna.create_study(pruner=pruner)
    study.optimize(objective, n_trials=2)
    states = [trial.state for trial in study.trials]
    assert states == [optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED]
    assert np.isfinite(study.best_value)
