"""``ortops build``, ``train`` and ``eval``."""

from __future__ import annotations

import argparse
import inspect
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from ortops import callbacks, losses, metrics, optimizers, schedules
from ortops.check import quiet
from ortops.cli import configuration
from ortops.cli.calls import make, read_call
from ortops.cli.data import (
    CLASSES_KEY,
    Classes,
    DataFile,
    note,
    read_classes,
    read_data,
    rows_of,
    sampled,
    wanted_inputs,
)
from ortops.cli.parser import make_parser
from ortops.cli.streams import describe_stream, print_json, read_model, write_model
from ortops.errors import OrtopsError
from ortops.training.builder import build_training_model
from ortops.training.session import TrainingSession

__all__ = ["build", "evaluate", "train"]

OPTIONS_KEY = "ortops.train"
"""Where a file says, as JSON, with which options its training was begun."""

_ALGORITHM = (
    *("loss", "optimizer", "learning_rate", "trainable", "batch_normalization"),
    *("clip_norm", "clip_value", "ema_decay"),
)

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
        configuration.read_options(options, make_parser(""))
    for name in ("model", "data"):
        if not getattr(options, name):
            raise OrtopsError(
                f"{'--' * (name == 'data')}{name} is missing; see ortops train --help"
            )
    if "-" in (options.model, options.save) and (options.save or "-") == "-":
        raise OrtopsError("--save: a training is saved as it goes on; give a file to write")
    save = options.save or f"{Path(options.model).stem.removesuffix('-trained')}-trained.onnx"
    if options.write_config:
        configuration.write_options(options, options.write_config)
    resumes = options.resume and Path(save).exists()
    model = read_model(save if resumes else options.model)
    trainable = bool(model.training_info)
    if not trainable:
        _require_loss(model, options)
    elif resumes:
        _check_same(model, options, save)
    else:
        _refuse_algorithm(options)
    epochs = options.epochs or 1
    batch_size = options.batch_size or _BATCH_SIZE
    if not trainable:
        with quiet():  # it is built again, when the data have told how many steps there are
            inputs = wanted_inputs(_build(model, options, steps=_ANY_STEPS))
    else:
        inputs = wanted_inputs(model)
    data = _read(options, options.data, inputs, read_classes(model))
    size = rows_of(data, inputs)
    training, validation = _parts(data, options, inputs, size, read_classes(model))
    size = rows_of(DataFile(training), inputs)
    if not trainable:
        model = _build(model, options, steps=epochs * math.ceil(size / batch_size))
    _note_classes(model, data)
    if not resumes:
        note(model, OPTIONS_KEY, _given(options))
    session = TrainingSession(model)
    if trainable and not resumes and options.learning_rate is not None:
        session.learning_rate = _number(options)
    kept = [metric(text) for text in options.metrics or ()]
    checkpoint = callbacks.Checkpoint(_literal(save), every=options.checkpoint_steps)
    called = [*_callbacks(options, bool(validation)), checkpoint]
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
        if checkpoint.latest is not None:
            _say(f"interrupted after step {session.steps_done}; saved in {save}. Go on with:")
            _say(f"  {_resuming(options.given)}")
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
    data = _read(options, options.data, wanted_inputs(model), read_classes(model))
    found = TrainingSession(model).evaluate(
        data.arrays,
        batch_size=options.batch_size or 256,
        metrics=[metric(text) for text in options.metrics or ()],
        ema=options.ema,
    )
    if options.json:
        print_json(found)
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
    given = [name for name in _given(options) if name != "learning_rate"]
    if given:
        raise OrtopsError(
            f"--{given[0].replace('_', '-')}: '{options.model}' is trainable, and says that "
            "itself; leave it out, or begin with the model that it was made of"
        )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that say how a training computes."""
    found = {name: getattr(options, name) for name in _ALGORITHM}
    return {name: value for name, value in found.items() if value is not None}


def _check_same(model: onnx.ModelProto, options: argparse.Namespace, save: str) -> None:
    """Refuses to go on with options that the training was not begun with."""
    text = next((e.value for e in model.metadata_props if e.key == OPTIONS_KEY), "")
    try:
        begun = json.loads(text)
    except ValueError:  # it was begun by something else
        return
    for name, value in _given(options).items():
        if isinstance(begun, dict) and begun.get(name) != value:
            raise OrtopsError(
                f"--{name.replace('_', '-')} is {value!r}, and the training in '{save}' was begun "
                + (f"with {begun[name]!r}" if name in begun else "without it")
                + "; give the same, or leave out --resume to begin another one"
            )


def _number(options: argparse.Namespace) -> float:
    """Returns the learning rate for a file that is trainable."""
    try:
        return float(options.learning_rate)
    except ValueError as error:
        raise OrtopsError(
            f"--learning-rate is '{options.learning_rate}', and '{options.model}' is trainable; a "
            "number is accepted, for a schedule begin with the model that it was made of"
        ) from error


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


def _read(options: argparse.Namespace, path: str, inputs: Any, classes: Classes) -> DataFile:
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
    data: DataFile, options: argparse.Namespace, inputs: Any, size: int, classes: Classes
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[Any]] | None]:
    """Returns the data to train on, and those to validate with."""
    if options.validation is None:
        return data.arrays, None
    try:
        share = float(options.validation)
    except ValueError:
        return data.arrays, _read(
            options, options.validation, inputs, classes | data.classes
        ).arrays
    if not 0 < share < 1:
        raise OrtopsError(
            f"--validation is {share:g}; a share between 0 and 1, or data, is accepted"
        )
    order = np.random.default_rng(options.seed or 0).permutation(size)
    count = round(size * share)
    if not 0 < count < size:
        raise OrtopsError(
            f"--validation is {share:g}, which sets aside {count} of {size} rows; leave some of "
            "both"
        )
    aside, rest = order[:count], order[count:]
    _say(f"set aside {count} of {size} rows for validation")
    names = sampled(inputs)
    return (
        data.arrays | {name: data.arrays[name][rest] for name in names},
        data.arrays | {name: data.arrays[name][aside] for name in names},
    )


def _literal(path: str) -> str:
    """Returns a path in which `Checkpoint` fills nothing in."""
    return path.replace("{", "{{").replace("}", "}}")


def _callbacks(options: argparse.Namespace, validated: bool) -> list[Any]:
    """Returns the callbacks that options ask for."""
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
    return found


def _note_classes(model: onnx.ModelProto, data: DataFile) -> None:
    """Writes down which names the numbers of labels stand for."""
    if data.classes:
        note(model, CLASSES_KEY, read_classes(model) | data.classes)


def _resuming(given: list[str]) -> str:
    """Returns the command that goes on where this one was interrupted."""
    resume = [] if "--resume" in given else ["--resume"]
    return shlex.join(["ortops", given[0], *resume, *given[1:]])


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr)
