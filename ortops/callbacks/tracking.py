"""Callbacks for tools that keep records of many training runs: W&B, MLflow and Optuna."""

from __future__ import annotations

import contextlib
import numbers
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

from ortops._common.arguments import choice, whole_number
from ortops._common.optional import optional_module
from ortops.callbacks.monitor import Monitor, _Recording, begins_anew, grouped
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError, OrtopsError

Backend: TypeAlias = Literal["wandb", "mlflow"]

_PLAIN = str | bool | numbers.Real | None
_FORBIDDEN = re.compile(r"[^\w\-. /]", re.ASCII)
"""What MLflow does not allow in names."""


class _Wandb:
    """A run of Weights & Biases; its identifier is the tool's name of it."""

    def __init__(self, settings: dict[str, Any], identifier: str) -> None:
        module = optional_module("Tracker", "wandb", "wandb")
        if identifier:
            settings = {**settings, "id": identifier, "resume": "allow"}
        self._run: Any = module.init(**settings)
        self.identifier = str(self._run.id)

    def parameters(self, values: Mapping[str, object]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)  # a resumed run has others

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str) -> None:
        """Ends the run as "FINISHED", "KILLED" or "FAILED"."""
        self._run.finish(exit_code=int(outcome != "FINISHED"))


class _MLflow:
    """A run of MLflow, with the methods of `_Wandb`."""

    def __init__(self, settings: dict[str, Any], identifier: str) -> None:
        module = optional_module("Tracker", "mlflow", "mlflow", "mlflow-skinny")
        self._entities: Any = optional_module(
            "Tracker", "mlflow.entities", "mlflow", "mlflow-skinny"
        )
        settings = dict(settings)
        self._client: Any = module.MlflowClient(tracking_uri=settings.pop("tracking_uri", None))
        name = settings.pop("experiment", "Default")
        if identifier:
            self._client.update_run(identifier, status="RUNNING")
            self.identifier = identifier
            return
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self.identifier = str(self._client.create_run(experiment, **settings).info.run_id)

    def parameters(self, values: Mapping[str, object]) -> None:
        known = self._client.get_run(self.identifier).data.params
        for name, value in ((_FORBIDDEN.sub("_", name), value) for name, value in values.items()):
            if name not in known:
                self._client.log_param(self.identifier, name, value)
            elif known[name] != str(value):  # MLflow changes no parameters
                self._client.set_tag(self.identifier, name, value)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        found = [
            self._entities.Metric(_FORBIDDEN.sub("_", name), float(value), now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self.identifier, metrics=found)

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self.identifier, status=outcome)


_BACKENDS: Mapping[str, type[_Wandb] | type[_MLflow]] = {"wandb": _Wandb, "mlflow": _MLflow}


_REMEDIES = {
    "wandb": "check Tracker's arguments, log in with 'wandb login', or set mode='offline'",
    "mlflow": "check Tracker's arguments, and tracking_uri, such as 'sqlite:///runs.db'",
}


class Tracker(_Recording):
    """Records a training with Weights & Biases or MLflow.

    Hyper-parameters are the arguments of `fit` that determine the rows, the learning rate, the
    schedule, clipping and averaging of the model, and ``parameters``. Those that a resumed fit
    changes, such as ``epochs``, are updated; MLflow, whose parameters are final, gets a tag of the
    same name. Metrics of epochs are called
    ``epoch/<name>``, those of steps, and of validations within epochs, ``step/<name>``, as in
    `TensorBoard`; the x axis is the number of finished steps. A resumed fit continues the run.

    The run ends with `fit`: as finished, or as failed after an exception. A fit that a signal ended
    is killed in MLflow, and failed in W&B, which has no such state.

    Args:
        backend: ``"wandb"`` (``pip install ortops[wandb]``) or ``"mlflow"`` (``pip install
            ortops[mlflow]``).
        parameters: Further hyper-parameters by name: strings, numbers and booleans.
        every: The number of batches between records of steps; by default only epochs and
            validations are recorded.
        **settings: For W&B the arguments of ``wandb.init``, such as ``project``, ``name``, ``dir``
            and ``mode="offline"``. For MLflow ``tracking_uri``, ``experiment`` (a name; created if
            it does not exist), ``run_name`` and ``tags``.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: In fit, if the package is not installed, or raises an error.

    Example:
        >>> tracker = Tracker("wandb", project="digits", mode="offline", parameters={"width": 64})
        >>> # session.fit(data, callbacks=[tracker])
    """

    def __init__(
        self,
        backend: Backend,
        *,
        parameters: Mapping[str, object] | None = None,
        every: int | None = None,
        **settings: Any,
    ) -> None:
        self.backend = choice("Tracker: backend", backend, get_args(Backend))
        self.every = None if every is None else whole_number("Tracker: every", every, 1)
        if not isinstance(parameters, Mapping | None):
            raise ArgumentError(f"Tracker: parameters must be a dict, got {parameters!r:.80}")
        self._parameters = dict(parameters or {})
        for name, value in self._parameters.items():
            if not isinstance(name, str) or not name or not isinstance(value, _PLAIN):
                raise ArgumentError(
                    "Tracker: parameters must be strings, numbers and booleans by name, got "
                    f"{name!r:.80}: {value!r:.80}"
                )
        for reserved in {"id", "resume", "config"} & settings.keys() if backend == "wandb" else ():
            raise ArgumentError(
                f"Tracker: {reserved}= is set by Tracker; give hyper-parameters with parameters="
            )
        known = ("tracking_uri", "experiment", "run_name", "tags")
        for name in settings if backend == "mlflow" else ():
            choice("Tracker: a setting of mlflow", name, known)
        self._settings, self._identifier = settings, ""
        self._run: _Wandb | _MLflow | None = None
        self._outcome = "FAILED"

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Begins a run with its hyper-parameters, or continues that of the resume position."""
        known = "" if begins_anew(record) else self._identifier
        self._outcome = "FAILED"
        with self._named(f"continue the run {known!r}" if known else "begin a run"):
            self._run = _BACKENDS[self.backend](self._settings, known)
        self._identifier = self._run.identifier
        with self._named("record the parameters"):
            self._run.parameters(_described(session) | self._parameters)

    def on_end(self, record: Record, session: TrainingSession) -> None:
        """Remembers how the training ended."""
        self._outcome = "KILLED" if record.interrupted else "FINISHED"

    def on_close(self) -> None:
        """Ends the run, also if the training has failed."""
        run, self._run = self._run, None
        if run is not None:
            with self._named("end the run"):
                run.finish(self._outcome)

    def _add(self, event: str, record: Record) -> None:
        assert self._run is not None
        with self._named(f"record the metrics of step {record.step}"):
            self._run.metrics(grouped(event, record), record.step)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Names what a tool was doing when it raised an error."""
        try:
            yield
        except OrtopsError:
            raise
        except Exception as error:  # of the tool, of the libraries below it, or of a server
            text = " ".join(str(error).split())
            raise OrtopsError(
                f"Tracker: {self.backend} could not {what}: {type(error).__name__}: {text:.500}; "
                f"{_REMEDIES[self.backend]}"
            ) from error

    def state(self) -> dict[str, Any]:
        """Returns the tool's name of the run, for the model file."""
        return {"run": self._identifier}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the tool's name of the run."""
        found = state.get("run")
        if not isinstance(found, str):
            raise ModelError(
                "Tracker: 'run' in the state of the file to resume from must be a string, got "
                f"{found!r:.80}"
            )
        self._identifier = found


def _described(session: TrainingSession) -> dict[str, object]:
    """Returns the hyper-parameters that a session knows."""
    metadata, position = session.metadata, session.resume_state.position
    found: dict[str, object] = {}
    if position is not None:
        found = dict(position.epoch_state.call)
    if metadata.learning_rate in session.state:
        found["learning_rate"] = session.peak_learning_rate
    for name in ("schedule", "clipping", "averaging"):
        found[name] = getattr(metadata, name)
    return {name: value for name, value in found.items() if value not in ("", None)}


class OptunaPruning(Callback):
    """Reports a metric of each epoch to a trial of Optuna, and ends trials that it prunes.

    Args:
        trial: The trial, ``optuna.trial.Trial``.
        monitor: The metric: ``loss``, ``validation_loss``, ``validation_<metric>``. The study's
            direction says whether higher or lower is better.

    Raises:
        ArgumentError: If an argument is invalid.
        OrtopsError: In fit, if Optuna is not installed (``pip install ortops[optuna]``), or an
            epoch does not have the metric.
        optuna.TrialPruned: In fit, after an epoch, if the trial is to be pruned.

    Example:
        >>> def objective(trial):  # optuna.create_study().optimize(objective, n_trials=20)
        ...     rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
        ...     session = make_session(rate)
        ...     session.fit(data, validation=other, callbacks=[OptunaPruning(trial)])
        ...     return session.evaluate(other)["loss"]
    """

    def __init__(self, trial: Any, monitor: str = "validation_loss") -> None:
        if not all(callable(getattr(trial, name, None)) for name in ("report", "should_prune")):
            raise ArgumentError(
                f"OptunaPruning: trial must be a trial of Optuna, got {trial!r:.80}"
            )
        self._trial = trial
        self._monitor = Monitor("OptunaPruning", monitor, "auto", 0.0)

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Makes sure, before the training, that Optuna is installed."""
        optional_module("OptunaPruning", "optuna", "optuna")

    def on_epoch(self, record: Record, session: TrainingSession) -> None:
        """Reports the metric, and raises ``optuna.TrialPruned`` if the trial is to be pruned."""
        value = self._monitor.value(record.epoch, record.values)
        self._trial.report(value, step=record.epoch)
        if self._trial.should_prune():
            optuna = optional_module("OptunaPruning", "optuna", "optuna")
            raise optuna.TrialPruned(
                f"pruned after epoch {record.epoch}, with {self._monitor.name} {value:g}"
            )
