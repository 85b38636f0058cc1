"""``ortops build``, ``train`` and ``eval``."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortops import callbacks, losses, metrics, optimizers, schedules
from ortops.check import quiet
from ortops.cli import configuration
from ortops.cli.calls import make, read_call
from ortops.cli.data import DataFile, read_data, wanted_inputs
from ortops.cli.streams import describe_stream, read_model, write_model
from ortops.errors import OrtopsError
from ortops.training.builder import build_training_model
from ortops.training.session import TrainingSession

__all__ = ["build", "evaluate", "train"]

CLASSES_KEY = "ortops.classes"
"""Where a trainable file says, as JSON, which names the numbers of labels stand for, by input."""

_BATCH_SIZE, _ANY_STEPS = 32, 2**31


def build(options: argparse.Namespace) -> int:
    """Writes a trainable file."""
    model = read_model(options.model)
    write_model(_build(model, options), options.output)
    _say(f"wrote {describe_stream(options.output)}")
    return 0


def train(options: argparse.Namespace) -> int:
    """Trains a model."""
    if options.config:
        configuration.read_options(options, {})
    for name in ("model", "data"):
        if not getattr(options, name):
            raise OrtopsError(
                f"{'--' * (name == 'data')}{name} is missing; see ortops train --help"
            )
    save = options.save or f"{Path(options.model).stem.removesuffix('-trained')}-trained.onnx"
    if options.write_config:
        configuration.write_options(options, options.write_config)
    resumes = options.resume and Path(save).exists()
    model = read_model(save if resumes else options.model)
    trainable = bool(model.training_info)
    if not trainable:
        _require_loss(model, options)
    epochs = options.epochs or 1
    batch_size = options.batch_size or _BATCH_SIZE
    if not trainable:
        with quiet():  # it is built again, when the data have told how many steps there are
            inputs = wanted_inputs(_build(model, options, steps=_ANY_STEPS))
    else:
        _refuse_algorithm(options)
        inputs = wanted_inputs(model)
    data = _read(options, options.data, inputs, _classes(model))
    training, validation = _parts(data, options, inputs)
    size = len(next(iter(training.values())))
    if not trainable:
        model = _build(model, options, steps=epochs * math.ceil(size / batch_size))
    _note_classes(model, data)
    session = TrainingSession(model)
    kept = [metric(text) for text in options.metrics or ()]
    called = _callbacks(options, save, bool(validation))
    try:
        session.fit(
            training,
            epochs=epochs,
            batch_size=batch_size,
            seed=options.seed or 0,
            accumulate=options.accumulate or 1,
            validation=validation,
            metrics=kept,
            progress=not options.quiet,
            callbacks=called,
            resume=options.resume,
        )
    except (KeyboardInterrupt, SystemExit):
        _say(f"interrupted after step {session.steps_done}; saved in {save}. Go on with:")
        _say(f"  {_resuming(sys.argv)}")
        raise
    session.save(save)
    _say(f"wrote {save}")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Prints loss and metrics of a data set."""
    model = read_model(options.model)
    if not options.data:
        raise OrtopsError("--data is missing; see ortops eval --help")
    if not model.training_info:
        if not options.loss:
            raise OrtopsError(
                f"'{options.model}' has no loss; give --loss, such as --loss SoftmaxCrossEntropy"
            )
        model = build_training_model(model, loss=_loss(options.loss), optimizer="SGD")
    elif options.loss:
        raise OrtopsError(f"--loss: '{options.model}' has a loss of its own; leave it out")
    data = _read(options, options.data, wanted_inputs(model), _classes(model))
    found = TrainingSession(model).evaluate(
        data.arrays,
        batch_size=options.batch_size or 256,
        metrics=[metric(text) for text in options.metrics or ()],
        ema=options.ema,
    )
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print(f"{name:<{width}}  {value:.6g}")
    return 0


def _build(
    model: onnx.ModelProto, options: argparse.Namespace, *, steps: int | None = None
) -> onnx.ModelProto:
    """Returns the trainable model that options ask for.

    Args:
        model: The model.
        options: The options.
        steps: How many a schedule takes that does not say it.
    """
    if model.training_info:
        raise OrtopsError(
            f"'{options.model}' is trainable already; ortops train goes on with it, and ortops "
            "export takes the training out of it"
        )
    _require_loss(model, options)
    optimizer = read_call(options.optimizer or "Adam", "--optimizer")
    more: dict[str, Any] = {}
    if options.learning_rate is not None:
        more["learning_rate"] = _rate(options.learning_rate, steps)
    settings = {
        name: value
        for name in ("trainable", "batch_normalization", "clip_norm", "clip_value", "ema_decay")
        if (value := getattr(options, name)) is not None
    }
    return build_training_model(
        model,
        loss=_loss(options.loss),
        optimizer=make(optimizer, optimizers.OPTIMIZERS, "--optimizer", **more),
        seed=options.seed or 0,
        **settings,
    )


def _require_loss(model: onnx.ModelProto, options: argparse.Namespace) -> None:
    if not options.loss:
        raise OrtopsError(
            f"'{options.model}' has no training in it, so a loss is needed: --loss, such as "
            f"--loss SoftmaxCrossEntropy; `ortops check {options.model}` tells which fit"
        )


def _refuse_algorithm(options: argparse.Namespace) -> None:
    """Refuses what a file that is trainable says itself."""
    own = ("loss", "optimizer", "trainable", "batch_normalization", "clip_norm", "clip_value")
    given = [name for name in (*own, "ema_decay") if getattr(options, name) is not None]
    if given and not options.resume:
        raise OrtopsError(
            f"--{given[0].replace('_', '-')}: '{options.model}' is trainable, and says that "
            "itself; leave it out, or begin with the model that it was made of"
        )


def _loss(text: str) -> losses.Loss:
    made: losses.Loss = make(read_call(text, "--loss"), losses.LOSSES, "--loss")
    return made


def metric(text: str) -> metrics.Metric:
    """Returns the metric that a command line names: a name, or a name with arguments."""
    call = read_call(text, "--metrics")
    made: metrics.Metric = make(call, metrics.METRICS, "--metrics")
    return made


def _rate(text: str, steps: int | None) -> float | schedules.Schedule:
    """Returns a learning rate or a schedule, which by default takes the steps of the training."""
    try:
        return float(text)
    except ValueError:
        pass
    call = read_call(text, "--learning-rate")
    known = {name: getattr(schedules, name) for name in schedules.__all__ if name.islower()}
    more: dict[str, Any] = {}
    function = known.get(call.name)
    if steps and function and "steps" in inspect.signature(function).parameters:
        more["steps"] = steps
    made: schedules.Schedule = make(call, known, "--learning-rate", **more)
    return made


def _read(
    options: argparse.Namespace, path: str, inputs: Any, classes: Mapping[str, list[str]]
) -> DataFile:
    data = read_data(
        path,
        inputs,
        columns=options.columns,
        classes=classes,
        scale=options.scale,
        mean=options.mean,
        deviation=options.deviation,
    )
    for sentence in data.said:
        _say(sentence)
    return data


def _parts(
    data: DataFile, options: argparse.Namespace, inputs: Any
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]] | None]:
    """Returns the data to train on, and those to validate with."""
    if options.validation is None:
        return data.arrays, None
    try:
        share = float(options.validation)
    except ValueError:
        classes = data.classes
        return data.arrays, _read(options, str(options.validation), inputs, classes).arrays
    if not 0 < share < 1:
        raise OrtopsError(
            f"--validation is {share:g}; a share between 0 and 1, or data, is accepted"
        )
    size = len(next(iter(data.arrays.values())))
    order = np.random.default_rng(options.seed or 0).permutation(size)
    count = round(size * share)
    if not 0 < count < size:
        raise OrtopsError(
            f"--validation is {share:g}, which sets aside {count} of {size} rows; leave some of "
            "both"
        )
    aside, rest = order[:count], order[count:]
    _say(f"set aside {count} of {size} rows for validation")
    return (
        {name: array[rest] for name, array in data.arrays.items()},
        {name: array[aside] for name, array in data.arrays.items()},
    )


def _callbacks(options: argparse.Namespace, save: str, validated: bool) -> list[Any]:
    """Returns the callbacks that options ask for; one saves, so that nothing is lost."""
    monitor = options.monitor or ("validation_loss" if validated else "loss")
    found: list[Any] = []
    if options.early_stopping is not None:
        found.append(callbacks.EarlyStopping(patience=options.early_stopping, monitor=monitor))
    if options.best:
        found.append(callbacks.BestModel(options.best, monitor=monitor))
    if options.log:
        suffix = Path(options.log).suffix
        kinds = {".csv": callbacks.CSVLog, ".jsonl": callbacks.JSONLines}
        if suffix not in kinds:
            raise OrtopsError(f"--log is '{options.log}'; a .csv or .jsonl file is accepted")
        found.append(kinds[suffix](options.log))
    if options.plot:
        found.append(callbacks.LossPlot(options.plot))
    if options.tensorboard:
        found.append(callbacks.TensorBoard(options.tensorboard))
    found.append(callbacks.Checkpoint(save, every=options.checkpoint_steps))
    return found


def _classes(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Returns the names that a file notes for the numbers of labels."""
    text = next((entry.value for entry in model.metadata_props if entry.key == CLASSES_KEY), "{}")
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    fits = isinstance(found, dict) and all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in found.values()
    )
    if not fits:
        raise OrtopsError(
            f"metadata_props '{CLASSES_KEY}': it is {text!r:.80}; an object of arrays of names is "
            "accepted"
        )
    assert isinstance(found, dict)
    return found


def _note_classes(model: onnx.ModelProto, data: DataFile) -> None:
    """Writes down which names the numbers of labels stand for."""
    if not data.classes:
        return
    entry = next((entry for entry in model.metadata_props if entry.key == CLASSES_KEY), None)
    entry = entry or model.metadata_props.add(key=CLASSES_KEY)
    entry.value = json.dumps(data.classes)


def _resuming(arguments: list[str]) -> str:
    """Returns the command that goes on where this one was interrupted."""
    own = [Path(arguments[0]).name, *arguments[1:]]
    return shlex.join(own if "--resume" in own else [*own, "--resume"])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
