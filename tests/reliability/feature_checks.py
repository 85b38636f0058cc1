"""What has to hold of a training with any combination of features.

`check` trains as a draw says, interruptions included, and once more in a plain way: a loop of
`step`, `run_steps`, `gradients` and `apply`, or `fit` on lists of batches, with batches that numpy
cuts. State and history of both have to be equal. Then come checks of the rest, one of which a draw
names in `also`.
"""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import itertools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import feature_models as models
import numpy as np
import onnx
import onnxruntime
from attacks import run_python
from feature_models import Array, Arrays
from features import EXPORTED, FIT, OF_FIT, WITHOUT_LABELS, Draw, Space
from onnx import numpy_helper
from running import plain_session, run_session

import ortops
from ortops import TrainingSession, callbacks
from ortops.callbacks import Callback
from ortops.engine.execution.settings import Settings
from ortops.engine.training.callback import Record
from ortops.engine.training.gradients import Accumulation
from ortops.engine.training.history import History

RECOMPUTE = (
    "recompute" if "recompute" in inspect.signature(TrainingSession).parameters else "checkpoint"
)

KEPT = 2
"""How many files the callback Checkpoint keeps."""

EVERY = 2
"""After how many steps it saves, and after how many batches JSONLines writes a line."""


SMALLEST_CHANGE = 1e-4
"""How much better an epoch has to be: more than rounding, in which runs may differ."""


class StoppedError(Exception):
    """What ends a training from the outside."""


# --------------------------------------------------------------------------------- comparisons


def same_bits(found: Mapping[str, Array], expected: Mapping[str, Array], what: str) -> None:
    """Asserts that two sets of arrays are equal bit for bit."""
    assert found.keys() == expected.keys(), f"{what}: {[*found]} != {[*expected]}"
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, f"{what}: the type of '{name}'"
        assert found[name].shape == array.shape, f"{what}: the shape of '{name}'"
        if found[name].tobytes() != array.tobytes():
            raise AssertionError(f"{what}: '{name}' is {found[name]!r}, expected {array!r}")


CODES = 2
"""How far apart codes of 8 bits may be, if what they stand for differs by rounding."""


def near(found: Any, expected: Any, draw: Draw, what: str, least: float = 0.0) -> None:
    """Asserts that numbers are equal but for rounding, or differ by ``least`` at most."""
    tolerance = {"double": 1e-9, "half": 1e-2, "half overflowing": 1e-2}.get(draw.model, 2e-4)
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=1e-3)
    most = max(tolerance * scale, least)
    np.testing.assert_allclose(
        found, expected, rtol=tolerance, atol=most, err_msg=f"{what}: values"
    )


# ------------------------------------------------------------------------------------ callbacks


class Noting(Callback):
    """Keeps all that it is told, in its state."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, record: Record, session: Any) -> None:
        assert record.step == session.steps_done
        loss = record.values["loss"]
        self.seen.append([record.epoch, record.batch, record.step, record.samples, loss])

    def on_epoch(self, record: Record, session: Any) -> None:
        self.seen.append([record.epoch, record.step, record.values["loss"]])

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def restore(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Interrupting(Callback):
    """Interrupts the training after some steps; the last of the callbacks to be told.

    Args:
        end: How; see `Draw`.
        stops: After how many steps.
        path: Where it saves the session, if it is killed.
    """

    def __init__(self, end: str, stops: list[int], path: Path) -> None:
        self.end, self.stops, self.path = end, stops, path
        self.steps = 0
        self._due = False

    def on_step(self, record: Record, session: Any) -> None:
        self.steps += 1
        self._due = self.steps in self.stops
        if self._due and self.end == "stop":
            record.stop("the test says so")
        elif self._due and self.end in ("SIGINT", "SIGTERM"):
            signal.raise_signal(getattr(signal, self.end))

    def on_save(self, record: Record, session: Any) -> None:
        if not self._due:
            return
        self._due = False
        if self.end == "killed":
            session.save(self.path)
        if self.end == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if self.end in ("error", "killed"):
            raise StoppedError


@dataclass
class Run:
    """A training with all features of a draw.

    Attributes:
        draw: The draw.
        folder: Where its files are.
        session: The session in which it ended.
        history: Its history.
        callbacks: The callbacks of the last call of fit, by name.
    """

    draw: Draw
    folder: Path
    session: TrainingSession
    history: History
    callbacks: dict[str, Callback]


@dataclass
class Given:
    """What a training was given.

    Attributes:
        inference: The model.
        trainable: The trainable model.
        data: The data set.
        held_out: The validation data.
        folder: A folder for files.
    """

    inference: onnx.ModelProto
    trainable: onnx.ModelProto
    data: Arrays
    held_out: Arrays
    folder: Path


def callbacks_of(draw: Draw, folder: Path) -> dict[str, Callback]:
    """Returns the callbacks of a draw, by name."""

    def early(restore_best: Any) -> Callback:
        change = SMALLEST_CHANGE
        return callbacks.EarlyStopping(1, "loss", minimum_change=change, restore_best=restore_best)

    path = folder / "{epoch}-{step}.onnx"
    makers: dict[str, Any] = {
        "user": Noting,
        "Checkpoint": lambda: callbacks.Checkpoint(path, keep=KEPT),
        "Checkpoint every": lambda: callbacks.Checkpoint(path, every=EVERY, keep=KEPT),
        "EarlyStopping": lambda: early(False),
        "restore_best": lambda: early(folder / "early.onnx"),
        "restore_best in memory": lambda: early(True),
        "BestModel": lambda: callbacks.BestModel(
            folder / "best.onnx", "loss", minimum_change=SMALLEST_CHANGE
        ),
        "CSVLog": lambda: callbacks.CSVLog(folder / "log.csv"),
        "JSONLines": lambda: callbacks.JSONLines(folder / "log.jsonl", every=EVERY),
    }
    chosen = [draw.callbacks] if draw.callbacks else []
    if draw.callbacks == "all":
        chosen = ["user", "Checkpoint every", "restore_best", "BestModel", "CSVLog", "JSONLines"]
    return {name: makers[name]() for name in chosen}


# --------------------------------------------------------------------------- the training itself


def open_session(
    draw: Draw, model: Any, kernels: Any = None, *, in_backward: bool = True
) -> TrainingSession:
    """Opens a session as a draw says.

    Args:
        draw: The draw.
        model: A trainable model.
        kernels: What computes updates, if not what the draw says.
        in_backward: Whether updates may be in the backward pass.
    """
    settings: dict[str, Any] = {}
    if draw.recompute is not None:
        chosen = draw.recompute
        settings[RECOMPUTE] = [*chosen] if isinstance(chosen, tuple) else chosen
    if draw.kernels == "auto":  # compiled in the middle of training
        settings["settings"] = Settings(compiled_after=(2, 0.0), compiled_share=-1.0)
    if draw.in_backward:  # also of models and weights that are too small for it to pay
        settings |= {
            "optimizer_in_backward": in_backward,
            "settings": Settings(joined=-1, early=1),
        }
    return TrainingSession(model, kernels=kernels or draw.kernels, **settings)  # type: ignore[arg-type]


def given_as(kind: str, model: onnx.ModelProto, path: Path) -> Any:
    """Returns a model as a caller may have it; files are written to a path."""
    if kind == "model":
        return model
    if kind == "bytes":
        return model.SerializeToString()
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    options: dict[str, Any] = {"save_as_external_data": True, "location": f"{path.name}.data"}
    onnx.save(copy, path, **({**options, "size_threshold": 0} if kind == "external" else {}))
    return path


@contextlib.contextmanager
def unchanged(*given: Any) -> Iterator[None]:
    """Asserts that models that a caller has stay as they are."""

    def content() -> list[bytes]:
        found = []
        for each in given:
            if isinstance(each, Path):
                found += [file.read_bytes() for file in sorted(each.parent.glob(f"{each.name}*"))]
            elif isinstance(each, onnx.ModelProto):
                found.append(each.SerializeToString(deterministic=True))
            else:
                found.append(each)
        return found

    before = content()
    yield
    assert content() == before, "the caller's model: it has changed"


def metrics_of(draw: Draw) -> list[Any]:
    if not draw.metrics:
        return []
    return ["mean_absolute_error" if draw.loss in WITHOUT_LABELS else "accuracy", largest]


def largest(outputs: Array, targets: Array) -> np.floating[Any]:
    """A metric of one's own: the largest output, as numpy has it."""
    assert len(outputs) == len(targets)
    return outputs.max()


def arguments_of(draw: Draw, held_out: Arrays, folder: Path) -> dict[str, Any]:
    """Returns the arguments of fit, but for data and callbacks."""
    validation = held_out if draw.validation == "dict" else None
    if draw.validation == "same":
        validation = models.in_form(draw, held_out, folder)
    return {
        **{name: getattr(draw, name) for name in OF_FIT},
        "seed": draw.seed,
        "validation": validation,
        "metrics": metrics_of(draw),
        "schedule": models.rate_of_epoch if draw.rate == "by epoch" else None,
        "entry": entry_of(draw),
    }


def train(draw: Draw, model: Any, data: Arrays, held_out: Arrays, folder: Path) -> Run:
    """Trains as a draw says, with its interruptions."""
    work = folder / "work"
    work.mkdir()
    stops = [] if not draw.end else [draw.stop, draw.stop + 1][: 1 + draw.twice]
    interrupting = Interrupting(draw.end, stops, folder / "saved.onnx")
    session = open_session(draw, model)
    if draw.properties:
        session.properties["rate"] = 0.93
    chosen = callbacks_of(draw, work)
    data, weights = models.without_weights(draw, data)
    for attempt in itertools.count():
        epochs = draw.epochs - (draw.longer and attempt == 0)
        before = interrupting.steps
        history: History | None = None
        caught: BaseException | None = None
        try:
            history = session.fit(
                models.in_form(draw, data, folder, moved=draw.moved and attempt > 0),
                callbacks=[*chosen.values(), interrupting],
                resume=attempt > 0,
                collate=models.collate_of(draw),
                **{**arguments_of(draw, held_out, folder), **weights, "epochs": epochs},
            )
        except (StoppedError, KeyboardInterrupt, SystemExit) as error:
            caught = error
        came = interrupting.steps > before and interrupting.steps in stops
        expected = {
            "error": StoppedError,
            "killed": StoppedError,
            "KeyboardInterrupt": KeyboardInterrupt,
            "SIGINT": KeyboardInterrupt,
            "SIGTERM": SystemExit,
        }.get(draw.end if came else "")
        assert type(caught) is (expected or type(None)), f"interruption: {caught!r} came"
        if came and draw.goes_on != "session":
            session = resumed(draw, session, folder / "saved.onnx")
            chosen = callbacks_of(draw, work)
        elif not came and epochs == draw.epochs:
            break
    assert history is not None
    return Run(draw, work, session, history, chosen)


def resumed(draw: Draw, session: TrainingSession, path: Path) -> TrainingSession:
    """Returns a new session, with which an interrupted training goes on."""
    if draw.end != "killed" and draw.goes_on == "file":
        session.save(path)
    given = {
        "file": lambda: path,
        "model": session.model,
        "bytes": lambda: session.model().SerializeToString(),
    }[draw.goes_on]()
    found = open_session(draw, given)
    same_bits(dict(found.state), dict(session.state), "state of a saved session")
    assert dict(found.properties) == dict(session.properties), "properties of a saved session"
    assert found.history == session.history, "history of a saved session: it differs"
    return found


# --------------------------------------------------------------------------------- the reference


@dataclass
class Expected:
    """What a plain training gave.

    Attributes:
        session: The session.
        entries: What the history has to hold, as far as it is known without fit.
        seen: What a callback is told of, as `Noting` notes it.
        states: The state at the end of each epoch.
        best: The epoch with the lowest loss.
    """

    session: TrainingSession
    entries: list[dict[str, float]] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    states: list[Arrays] = field(default_factory=list)
    best: int = 0


def stops_early(draw: Draw) -> bool:
    return "restore_best" in draw.callbacks or draw.callbacks in ("EarlyStopping", "all")


def train_plainly(draw: Draw, session: TrainingSession, data: Arrays, held_out: Arrays) -> Expected:
    """Trains as a draw says, without most of its features."""
    found = Expected(session)
    if draw.reference == "fit":
        _fit_plainly(draw, data, held_out, found)
        return found
    for epoch in range(1, draw.epochs + 1):
        if draw.rate == "by epoch":
            session.learning_rate = models.rate_of_epoch((epoch - 1) / draw.epochs)
        batches = models.batches_of(draw, data, epoch, session.steps_done)
        averages, samples = Averages(draw), 0
        for done, window, steps, losses in _steps(draw, session, batches):
            samples += sum(len(next(iter(batch.values()))) for batch in window)
            averages.add(losses, window)
            found.seen.append([epoch, done, steps, samples, losses["loss"]])
        entry = {**averages.result(), "steps": session.steps_done}
        if draw.validation:
            measured = session.evaluate(
                held_out, batch_size=draw.batch_size, metrics=metrics_of(draw)
            )
            entry |= {f"validation_{name}": value for name, value in measured.items()}
        if _end_epoch(draw, found, entry):
            break
    _go_back(draw, found)
    return found


def _steps(
    draw: Draw, session: TrainingSession, batches: list[Arrays]
) -> Iterator[tuple[int, list[Arrays], int, dict[str, float]]]:
    """Makes the steps of an epoch.

    Yields:
        How many batches are done, the batches of the step, how many steps are done, and the losses.
        With `run_steps` all are made before the first is told of, as if none overflowed.
    """
    if draw.reference == "run_steps":
        before = session.steps_done
        losses = session.run_steps(batches, entry=entry_of(draw))
        for number, (batch, loss) in enumerate(zip(batches, losses, strict=True), 1):
            yield number, [batch], before + number, {"loss": float(loss)}
        return
    for start in range(0, len(batches), draw.accumulate):
        window = batches[start : start + draw.accumulate]
        if draw.reference == "gradients":
            outputs = _apply_gradients(draw, session, window)
        elif draw.reference == "reduce":
            outputs = session.step(window[0], reduce=lambda gradients: None, entry=entry_of(draw))
        else:
            outputs = session.step(window[0], entry=entry_of(draw))
        losses = {n: float(value) for n, value in outputs.items() if n.startswith("loss")}
        yield start + len(window), window, session.steps_done, losses


def _apply_gradients(
    draw: Draw, session: TrainingSession, window: list[Arrays]
) -> dict[str, Array]:
    entry = entry_of(draw)
    if draw.accumulate == 1:
        last = session.gradients(window[0], entry=entry)
        session.apply(last, entry=entry)
        return last.outputs
    only = session._only(entry)  # as `fit` does, also where gradients do not add up
    gradients, check = only._steps.strategy().gradients, only.inputs.check
    last = gradients(check(window[0]), outputs=None, after=None)
    total = Accumulation(last, exact=last.additive)
    for batch in window[1:]:
        last = gradients(check(batch), outputs=None, after=last)
        total.add(last)
    result = total.result()
    session.apply(result, entry=entry)
    return result.outputs


class Averages:
    """The losses of an epoch, each weighted by what counts of a batch.

    Args:
        draw: The draw.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._shares = models.SUMMANDS if draw.loss == "sum of classes" else {"loss": 1.0}
        self._totals = [0.0] * len(self._shares)
        self._weights = [0.0] * len(self._shares)

    def add(self, losses: Mapping[str, float], window: list[Arrays]) -> None:
        """Adds the losses of a step."""
        each = [models.weights_of(self._draw, batch) for batch in window]
        for number, (name, weights) in enumerate(
            zip(self._shares, zip(*each, strict=True), strict=True)
        ):
            self._totals[number] += losses[name] * sum(weights)
            self._weights[number] += sum(weights)

    def result(self) -> dict[str, float]:
        """Returns the averages, and their sum as ``loss``."""
        pairs = zip(self._totals, self._weights, strict=True)
        found = dict(zip(self._shares, (total / weight for total, weight in pairs), strict=True))
        return found | {"loss": sum(self._shares[name] * value for name, value in found.items())}


def _fit_plainly(draw: Draw, data: Arrays, held_out: Arrays, found: Expected) -> None:
    """Trains with fit on lists of batches."""
    session = found.session

    class Watching(Noting):
        def on_epoch(self, record: Record, session: Any) -> None:
            entry = {name: value for name, value in record.values.items() if name != "seconds"}
            if _end_epoch(draw, found, entry):
                record.stop("it has not improved")

    watching = Watching()
    found.seen = watching.seen
    plain = replace(draw, validation=draw.validation and "dict", prefetch=0, progress=False)
    plain = replace(plain, drop_last=False)  # these batches lack it
    session.fit(
        lambda epoch: models.batches_of(draw, data, epoch, session.steps_done),
        callbacks=[watching],
        **arguments_of(plain, held_out, Path()),
    )
    _go_back(draw, found)


def _end_epoch(draw: Draw, found: Expected, entry: dict[str, float]) -> bool:
    """Notes an epoch, and returns whether the training ends, as it was no better."""
    found.entries.append(entry)
    found.seen.append([len(found.entries), entry["steps"], entry["loss"]])
    found.states.append({name: array.copy() for name, array in found.session.state.items()})
    losses = [each["loss"] for each in found.entries]
    if not found.best or losses[found.best - 1] - losses[-1] >= SMALLEST_CHANGE:
        found.best = len(losses)
    return stops_early(draw) and found.best < len(losses)


def _go_back(draw: Draw, found: Expected) -> None:
    """Goes back to the best epoch, where that is asked for."""
    if "restore_best" in draw.callbacks or draw.callbacks == "all":
        found.session.state = found.states[found.best - 1]


# ------------------------------------------------------------------------------------ the checks


def check(draw: Draw) -> None:
    """Trains as a draw says, and checks all that has to hold.

    Raises:
        AssertionError: If something does not hold; the message begins with what.
    """
    with tempfile.TemporaryDirectory() as name:
        _check(draw, Path(name))


def _check(draw: Draw, folder: Path) -> None:
    for name in ("given", "predicted"):
        (folder / name).mkdir()
    inference = models.inference_model(draw)
    source = given_as(draw.source, inference, folder / "given" / "inference.onnx")
    with unchanged(inference, source):
        trainable = models.build(draw, source)
    opened = models.with_second_entry(trainable) if draw.entries else trainable
    weighted = opened
    if draw.unweighted:
        trainable = models.build(draw, source, unweighted=True)
        opened = models.with_second_entry(trainable) if draw.entries else trainable
    given = given_as(draw.file, opened, folder / "given" / "trainable.onnx")
    data, held_out = models.arrays_of(draw), models.arrays_of(draw, 15 if draw.fixed else 7)
    copies = {name: array.copy() for name, array in data.items()}
    with unchanged(trainable, opened, given):
        run = train(draw, given, data, held_out, folder)
        same = draw.kernels in ("auto", "compiled")
        plain = open_session(draw, weighted, "onnx" if same else None, in_backward=False)
        expected = train_plainly(draw, plain, data, held_out)
        check_history(draw, run.history, expected)
        check_measured(draw, run.history, expected)
        same_bits(dict(run.session.state), dict(expected.session.state), "state")
        check_other_entry(draw, run.session, opened)
        check_files(run, expected)
        ALSO[draw.also](run, Given(inference, trainable, data, held_out, folder))
    same_bits(data, copies, "the caller's data")


def entry_of(draw: Draw) -> str | None:
    """Returns the entry that makes the steps."""
    return "main" if draw.entries else None


def check_other_entry(draw: Draw, session: TrainingSession, opened: onnx.ModelProto) -> None:
    """Asserts that what a second entry trains has not changed."""
    if draw.entries:
        other = opened.training_info[1].update_binding
        begun = dict(open_session(draw, opened).state)
        names = {binding.key for binding in other}
        assert "other.step" in names, f"entries: {names}"
        now = session.state
        same_bits({n: now[n] for n in names}, {n: begun[n] for n in names}, "the other entry")


def check_history(draw: Draw, history: Sequence[Mapping[str, float]], expected: Expected) -> None:
    """Asserts that a history is that of the reference."""
    assert len(history) == len(expected.entries), "history: its length"
    for number, (entry, wanted) in enumerate(zip(history, expected.entries, strict=True), 1):
        for name, value in wanted.items():
            if (
                name.startswith("largest") and name not in entry and draw.end
            ):  # of rows before a resume
                continue
            exact = name in ("steps", "learning_rate") or draw.reference == "fit"
            same = entry[name] == value if exact else math.isclose(entry[name], value, rel_tol=1e-6)
            if name.startswith("validation"):  # the parts may come in another order
                near(entry[name], value, draw, f"history of epoch {number}: {name}")
            elif not same:
                raise AssertionError(
                    f"history: {name} of epoch {number} is {entry[name]}, expected {value}"
                )


def check_measured(draw: Draw, history: History, expected: Expected) -> None:
    """Asserts that there is each validation within an epoch once, and each metric of training."""
    steps = dict.fromkeys(each[2] for each in expected.seen if len(each) > 3)
    due = [step for step in steps if draw.validate_every and step % draw.validate_every == 0]
    if draw.model != "half overflowing":  # whose steps may be skipped before the first one
        found = [entry["steps"] for entry in history.validations]
        assert found == due, f"validations: after the steps {found}, expected {due}"
    ends = {entry["steps"]: entry for entry in history}
    for entry in history.validations:
        end = ends.get(entry["steps"], entry)
        for name in entry.keys() - {"epoch", "steps"}:
            assert entry[name] == end[name], f"validations: {name} after step {entry['steps']}"
    for number, entry in enumerate(history, 1) if draw.train_metrics else ():
        name = next(each for each in metrics_of(draw) if isinstance(each, str))
        assert name in entry, f"history: epoch {number} has no {name}"


def check_files(run: Run, expected: Expected) -> None:
    """Asserts that there are the files that callbacks write, and no others, with what they hold."""
    draw, folder = run.draw, run.folder
    files: dict[str, Arrays | None] = {}
    last = dict(run.session.state)
    best = expected.states[expected.best - 1]
    if noting := run.callbacks.get("user"):
        check_seen(draw, noting.seen, expected)  # type: ignore[attr-defined]
    if "BestModel" in run.callbacks:
        files["best.onnx"] = best
    if "restore_best" in run.callbacks:
        files["early.onnx"] = best
    if draw.callbacks in ("Checkpoint", "Checkpoint every", "all"):
        files |= dict.fromkeys(checkpoints(run, expected))
        files[[*files][-1]] = last
    if "CSVLog" in run.callbacks:
        files["log.csv"] = None
        with (folder / "log.csv").open(newline="") as stream:
            rows = [{n: float(v) for n, v in row.items()} for row in csv.DictReader(stream)]
        wanted = [{"epoch": n, **entry} for n, entry in enumerate(run.history, 1)]
        assert rows == wanted, f"CSVLog: {rows} != {wanted}"
    if "JSONLines" in run.callbacks:
        files["log.jsonl"] = None
        check_lines((folder / "log.jsonl").read_text(), draw, expected)
    there = sorted(file.name for file in folder.iterdir())
    assert there == sorted(files), f"files: {there} != {sorted(files)}"
    for name, state in files.items():
        if state is not None:
            noted = {each.key: each.value for each in onnx.load(folder / name).metadata_props}
            wanted = '{"rate": 0.93}' if draw.properties else None
            assert noted.get("ortops.properties") == wanted, f"properties of {name}"
            arrays = state_of(folder / name)
            same_bits({n: arrays[n] for n in state}, state, f"file {Path(name).suffix}")


def check_seen(draw: Draw, seen: list[Any], expected: Expected) -> None:
    """Asserts that a callback was told of each step and epoch."""
    wanted = expected.seen
    assert len(seen) == len(wanted), f"callback: {len(seen)} calls, expected {len(wanted)}"
    for found, right in zip(seen, wanted, strict=True):
        same = found[:-1] == right[:-1] and math.isclose(found[-1], right[-1], rel_tol=1e-6)
        assert same, f"callback: it was told {found}, expected {right}"


def check_lines(text: str, draw: Draw, expected: Expected) -> None:
    """Asserts that a file of JSONLines has its lines."""
    lines = [json.loads(line) for line in text.splitlines()]
    lines = [line for line in lines if line["event"] != "validation"]
    found = [
        [line["epoch"], *([line["batch"]] if line["event"] == "step" else []), line["loss"]]
        for line in lines
    ]
    wanted, last = [], 0
    for each in expected.seen:
        is_step = len(each) > 3
        if is_step and each[1] - last < EVERY:
            continue
        wanted.append([each[0], *([each[1]] if is_step else []), each[-1]])
        last = each[1] if is_step else 0
    assert len(found) == len(wanted), f"JSONLines: {found} != {wanted}"
    for line, right in zip(found, wanted, strict=True):
        same = line[:-1] == right[:-1] and math.isclose(line[-1], right[-1], rel_tol=1e-6)
        assert same, f"JSONLines: {line} != {right}"


def checkpoints(run: Run, expected: Expected) -> list[str]:
    """Returns the files that Checkpoint leaves, in the order in which they were written."""
    draw = run.draw
    saved: list[tuple[int, int]] = []
    count = 0
    last = 0
    for each in expected.seen:
        is_step = len(each) > 3
        epoch, steps = each[0], each[2] if is_step else each[1]
        if draw.callbacks == "Checkpoint":
            if not is_step:
                saved.append((epoch, steps))
        elif is_step and steps - last >= EVERY:
            saved.append((epoch, steps))
            last = steps
        if is_step:
            count += 1
            stopped = draw.end and count in [draw.stop, draw.stop + 1][: 1 + draw.twice]
            if stopped and draw.end in ("stop", "SIGINT", "SIGTERM"):
                saved.append((epoch, steps))
                last = steps
        elif draw.longer and epoch == draw.epochs - 1 and not (draw.end and count >= draw.stop):
            saved.append((epoch, steps))  # the end of the first training
            last = steps
    saved.append((len(expected.entries), run.session.steps_done))
    saved = [each for n, each in enumerate(saved) if each not in saved[n + 1 :]]
    return [f"{epoch}-{steps}.onnx" for epoch, steps in saved[-KEPT:]]


def state_of(path: Path) -> Arrays:
    """Returns the arrays in a trainable file, read by onnx alone."""
    model = onnx.load(path)
    onnx.checker.check_model(model)
    graphs = [model.graph, *(info.algorithm for info in model.training_info)]
    return {t.name: numpy_helper.to_array(t) for graph in graphs for t in graph.initializer}


def check_evaluate(run: Run, given: Given) -> None:
    """A data set evaluated in parts equals the whole, in any form."""
    draw, session = run.draw, run.session
    parts = session.evaluate(
        models.in_form(draw, given.data, given.folder),
        batch_size=draw.batch_size,
        metrics=metrics_of(draw),
        ema=draw.ema,
        collate=models.collate_of(draw),
    )
    if draw.fixed:
        batches = models.cut(given.data, draw.batch_size)
        whole = session.evaluate(batches, metrics=metrics_of(draw), ema=draw.ema)
    else:
        whole = session.evaluate(
            given.data, batch_size=models.ROWS, metrics=metrics_of(draw), ema=draw.ema
        )
    assert parts.keys() == whole.keys(), f"evaluate: {parts.keys()} != {whole.keys()}"
    for name, value in whole.items():
        near(parts[name], value, draw, f"evaluate: {name}")


def check_predict(run: Run, given: Given) -> None:
    """Predictions do not depend on the form of the data, nor on how they are cut."""
    draw, session = run.draw, run.session
    arrays = {name: given.data[name] for name in models.MODELS[draw.model].inputs}
    ordered = models.batches_of(replace(draw, shuffle=False, drop_last=False), arrays, 1, 0)
    expected = np.concatenate([session.predict([batch], outputs="y") for batch in ordered])
    data = models.in_form(draw, arrays, given.folder / "predicted")
    collate = models.collate_of(draw)
    found = session.predict(data, batch_size=draw.batch_size, outputs="y", collate=collate)
    same_bits({"y": found}, {"y": expected}, "predict")


def check_serve(run: Run, given: Given) -> None:
    """What stock onnxruntime computes is what `predict` gives."""
    draw, session = run.draw, run.session
    names = [*models.MODELS[draw.model].inputs]
    arrays = models.cut({name: given.data[name] for name in names}, draw.batch_size)[0]
    served: dict[str, Any] = {"inference_model": session.inference_model()}
    session.save(given.folder / "served.onnx")
    if draw.model not in EXPORTED:  # of which the inference graph is in training mode
        served["the trainable file"] = given.folder / "served.onnx"
        served["the original"] = session.inference_model(original=given.inference)
    expected = session.predict(arrays, batch_size=draw.batch_size, outputs="y")
    for what, model in served.items():
        path = str(model) if isinstance(model, Path) else model
        (found,) = run_session(plain_session(path), arrays, ["y"])
        assert found.dtype == expected.dtype, f"serve: the type of {what}"
        near(found, expected, draw, f"serve: {what}")
    if draw.ema:
        averaged = session.predict(arrays, batch_size=draw.batch_size, outputs="y", ema=True)
        (found,) = run_session(plain_session(session.inference_model(ema=True)), arrays, ["y"])
        near(found, averaged, draw, "serve: averages")


def check_big_batch(run: Run, given: Given) -> None:
    """One step of several batches is that of one batch of all their rows, but for rounding."""
    draw = run.draw
    rows = models.ROWS
    before = open_session(draw, given.trainable)
    start = {name: array.astype(np.float64) for name, array in before.state.items()}
    gradients = before.gradients(given.data)
    whole = fit_once(before, given.data, batch_size=rows, seed=draw.seed)
    session = open_session(draw, given.trainable)
    count = max(draw.accumulate, 2)
    size = -(-rows // count)
    form = draw.data if draw.has_rows else "dict"
    data = models.ROWS_AS[form](given.data, given.folder)
    more = {"batch_size": size, "accumulate": count, "collate": models.collate_of(draw)}
    parts = fit_once(session, data, seed=draw.seed, **more)
    near(parts["loss"], whole["loss"], draw, "one big batch: loss")
    for name, array in before.state.items():
        owner = next((n for n in gradients if name == n or name.startswith(f"{n}.")), None)
        sure = np.ones(array.shape, bool)
        if owner is not None and gradients[owner].shape == array.shape:
            # Of a gradient that is rounding alone, an optimizer may make a full step.
            sizes = np.abs(gradients[owner])
            sure = sizes > 1e-3 * sizes.max(initial=0)
        moved, wanted = session.state[name] - start[name], array - start[name]
        least = CODES * (array.dtype == np.uint8)
        near(moved[sure], wanted[sure], draw, f"one big batch: {name}", least)


def fit_once(session: TrainingSession, data: Any, **settings: Any) -> dict[str, float]:
    return session.fit(data, shuffle=False, progress=False, **settings)[0]


def check_step_graph(run: Run, given: Given) -> None:
    """The step graph computes in stock onnxruntime what a step computes, in all of its forms."""
    draw, session = run.draw, run.session
    model = session.model()
    batch = models.cut(given.data, draw.batch_size)[0]
    flat = ortops.step_graph(model)
    forms = {"lowered": ortops.lower(flat)} if draw.also == "lower" else {"on functions": flat}
    opened = {what: plain_session(each) for what, each in forms.items()}
    if draw.also == "step graph":
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        ortops.register_custom_ops(options)
        opened["on custom operators"] = onnxruntime.InferenceSession(
            flat.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    updates = json.loads(next(p.value for p in flat.metadata_props if p.key == "ortops.step_graph"))
    expected = float(session.step(batch)["loss"])
    for what, each in opened.items():
        names = [value.name for value in each.get_outputs()]
        found = dict(zip(names, run_session(each, batch), strict=True))
        near(found["loss"], expected, draw, f"step graph {what}: loss")
        for name, output in updates.items():
            assert found[output].shape == session.state[name].shape, f"step graph {what}: {name}"


def check_reset(run: Run, given: Given) -> None:
    """After `reset` the training is what it was."""
    draw, session = run.draw, run.session
    session.reset()
    assert session.history == [], "reset: there is a history"
    draw = replace(draw, reference="fit")
    again = train_plainly(draw, session, given.data, given.held_out)
    check_history(draw, run.history, again)


def check_reopened(run: Run, given: Given) -> None:
    """A saved session opens as it was."""
    draw, session = run.draw, run.session
    session.save(given.folder / "reopened.onnx")
    found = open_session(draw, given.folder / "reopened.onnx")
    same_bits(dict(found.state), dict(session.state), "reopened: state")
    assert found.history == session.history, "reopened: history"
    assert found.steps_done == session.steps_done, "reopened: steps_done"
    same_bits(
        {n: a for n, a in state_of(given.folder / "reopened.onnx").items() if n in session.state},
        dict(session.state),
        "reopened: file",
    )


def check_resumed_again(run: Run, given: Given) -> None:
    """Where all was done, resuming it does nothing."""
    draw, session = run.draw, run.session
    if len(run.history) < draw.epochs:
        return
    before = dict(session.state)
    data = models.in_form(draw, given.data, given.folder)
    arguments = arguments_of(draw, given.held_out, given.folder)
    history = session.fit(data, resume=True, collate=models.collate_of(draw), **arguments)
    assert history == run.history, "resumed again: history"
    same_bits(dict(session.state), before, "resumed again: state")


def check_kernels(run: Run, given: Given) -> None:
    """Kernels and recomputation change nothing but for rounding."""
    draw = run.draw
    batch = models.cut(given.data, draw.batch_size)[0]
    plain, session = TrainingSession(given.trainable), open_session(draw, given.trainable)
    wanted, found = plain.gradients(batch), session.gradients(batch)
    near(found.loss, wanted.loss, draw, "plain kernels: loss")
    for name, gradient in wanted.items():
        near(found[name], gradient, draw, f"plain kernels: gradient of {name}")
    start = {name: array.astype(np.float64) for name, array in plain.state.items()}
    plain.apply(wanted)
    session.apply(wanted)
    for name, array in plain.state.items():
        moved = session.state[name] - start[name]
        least = CODES * (array.dtype == np.uint8)
        near(moved, array - start[name], draw, f"plain kernels: {name}", least)


ALSO: dict[str, Any] = {
    "": lambda run, given: None,
    "evaluate": check_evaluate,
    "predict": check_predict,
    "serve": check_serve,
    "one big batch": check_big_batch,
    "step graph": check_step_graph,
    "lower": check_step_graph,
    "reset": check_reset,
    "reopen": check_reopened,
    "resume again": check_resumed_again,
    "plain kernels": check_kernels,
}
"""What is checked besides, by name."""


# ---------------------------------------------------------------------------------- many draws


def problem_of(draw: Any, checked: Callable[[Any], None] = check) -> str:
    """Returns what goes wrong with a draw, or "" if nothing does.

    Args:
        draw: The draw.
        checked: Checks it.
    """
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("error")
            checked(draw)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
        return f"{type(error).__name__}: {error} (at {' '.join(places[-5:])})"
    return ""


def kind_of(problem: str) -> str:
    """Returns what problems of one kind have in common: the error, and how its message begins."""
    return problem.split("\n")[0].split(" is ")[0][:60]


@dataclass
class Failure:
    """A draw that fails.

    Attributes:
        draw: Python that makes the simplest one that was found.
        problem: What goes wrong.
    """

    draw: str
    problem: str

    def __str__(self) -> str:
        return f"check({self.draw})\n    {self.problem[:1500]}"


def failure_of(
    draw: Any, space: Space = FIT, checked: Callable[[Any], None] = check
) -> Failure | None:
    """Returns the simplest draw near one that fails like it; None if it does not fail.

    Args:
        draw: The draw.
        space: Its space.
        checked: Checks it.
    """
    problem = problem_of(draw, checked)
    if not problem:
        return None
    kind = kind_of(problem)
    simplest = space.shrink(draw, lambda other: kind_of(problem_of(other, checked)) == kind)
    return Failure(repr(simplest), problem_of(simplest, checked))


def failures_of(chosen: Sequence[Draw], timeout: float) -> list[Failure]:
    """Returns the draws that fail, made in as many processes as this one has cores.

    A draw with which a process dies or does not end in time fails, too.

    Args:
        chosen: The draws.
        timeout: How long it may take, in seconds.
    """
    count = max((os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 1)
    with ThreadPoolExecutor(count) as pool:
        parts = [[*map(repr, chosen[start::count])] for start in range(count)]
        found = pool.map(lambda part: _failures_of(part, timeout), parts)
        return [failure for each in found for failure in each]


def _failures_of(texts: list[str], timeout: float) -> list[Failure]:
    failures: list[Failure] = []
    while texts:
        done = run_python([str(Path(__file__)), json.dumps(texts)], timeout=timeout)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        failures += [Failure(**line) for line in lines if isinstance(line, dict)]
        if done.returncode == 0:
            break
        begun = [line for line in lines if isinstance(line, int)]
        end = f"the process ended with {done.returncode}: {done.stderr[-2000:]}"
        if not begun:
            raise AssertionError(end)
        failures.append(Failure(texts[begun[-1]], end))
        texts = texts[begun[-1] + 1 :]
    return failures


def main(texts: list[str]) -> None:
    """Checks draws; prints the place of each before it, and what is known of one that fails.

    Args:
        texts: Python that makes the draws.
    """
    logging.getLogger("ortops").setLevel(logging.CRITICAL)
    for place, text in enumerate(texts):
        _say(place)
        failure = failure_of(eval(text, {"Draw": Draw}))
        if failure is not None:
            _say(vars(failure))


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
