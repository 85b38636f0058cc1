"""``ortops build``, ``train`` and ``eval``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ortops import callbacks, losses, metrics, optimizers, schedules
from ortops.cli import configuration
from ortops.cli.calls import make, read_call
from ortops.cli.data import CLASSES_KEY, Classes, note_data, read_given, read_notes
from ortops.cli.outputs import check_outputs, check_writable
from ortops.cli.parser import make_parser
from ortops.cli.standard_streams import print_text, say
from ortops.cli.streams import describe_stream, print_json, read_light_model, write_model
from ortops.data.rows import Column, select
from ortops.data.tables import numbered
from ortops.data.wanted import DataFile, Wanted, row_axes_of, rows_of, wanted_inputs
from ortops.engine.building.builder import build_light
from ortops.engine.trainable.metadata import TrainingMetadata, training_metadata
from ortops.engine.training.fit_options import OPTIONS
from ortops.engine.training.sample_weights import ClassWeight
from ortops.engine.training.session import TrainingSession
from ortops.engine.training.validation_split import hold_out
from ortops.errors import OrtopsError
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import write_metadata
from ortops.graph.files.json_text import read_json

Columns: TypeAlias = dict[str, Column]

OPTIONS_KEY = "ortops.train"
"""The metadata key under which a file records, as JSON, the options its training started with."""

_ALGORITHM = (
    *("loss", "sample_weight", "optimizer", "learning_rate", "trainable"),
    *("batch_normalization", "clip_norm", "clip_value", "ema_decay"),
)

_CLASS_WEIGHT = "class_weight"
"""The input of a loss that has weights of classes only."""

_SAMPLE_WEIGHT = "sample_weight"
"""The input of a loss that was built without weights of rows, once it takes some."""

_REPLACED = ("--best", "--plot", "--write-config")


def build(options: argparse.Namespace) -> int:
    """Writes a trainable file."""
    check_outputs({"model": options.model}, {"output": options.output}, force=options.force)
    check_writable({"output": options.output})
    model = read_light_model(options.model)
    write_model(_build(model, options), options.output)
    say(f"wrote {describe_stream(options.output)}")
    return 0


def train(options: argparse.Namespace) -> int:
    """Trains a model."""
    if options.config:
        configuration.read_options(options, make_parser(""))
    save = _save_path(options)
    _check_files(options, save)
    resumes = options.resume and Path(save).exists()
    if options.resume and not resumes:
        say(f"there is no '{save}' to resume from; starting a new training")
    model = read_light_model(save if resumes else options.model)
    trainable = bool(model.proto.training_info)
    _check_algorithm(model, options, save, resumes=resumes)
    if options.write_config:
        configuration.write_options(options, options.write_config)
    model, training, validation = _prepare(model, options)
    if not resumes:
        write_metadata(model.proto, OPTIONS_KEY, json.dumps(_given(options)))
    session = TrainingSession(model, providers=options.providers)
    if trainable and not resumes and options.learning_rate is not None:
        session.peak_learning_rate = _number(options)
    before = session.steps_done
    classes = read_notes(model.proto, CLASSES_KEY)
    _fit(session, training, validation, options, save, classes, resumes=resumes)
    if resumes and session.steps_done == before:
        say(
            f"the training in '{save}' is already finished; to train further, give a larger "
            f"--epochs or --max-steps, or run ortops train {_quoted(save)} … without --resume"
        )
        return 0
    session.save(save)
    say(f"wrote {save}")
    return 0


def _save_path(options: argparse.Namespace) -> str:
    """Returns the path of the trainable file to write."""
    for name in ("model", "data"):
        if not getattr(options, name):
            raise OrtopsError(
                f"{'--' * (name == 'data')}{name} is missing; see ortops train --help"
            )
    if "-" in (options.model, options.save) and (options.save or "-") == "-":
        raise OrtopsError("--save must be a file, as checkpoints are saved to it during training")
    return options.save or f"{Path(options.model).stem.removesuffix('-trained')}-trained.onnx"


def _check_algorithm(
    model: LightModel, options: argparse.Namespace, save: str, *, resumes: bool
) -> None:
    """Rejects options that do not fit the model, or the training that it continues."""
    if model.proto.training_info:
        if resumes:
            _check_same(model, options, save)
        else:
            _refuse_algorithm(model, options)
        return
    if resumes:
        raise OrtopsError(
            f"--resume: '{save}' is not a trainable file; omit --resume to start a new training, "
            "or give another --save"
        )
    _require_loss(model, options)
    # A trainable file may be continued in place; an inference model must not be lost.
    check_outputs({"model": options.model}, {"--save": save}, force=options.force)


def _prepare(
    model: LightModel, options: argparse.Namespace
) -> tuple[LightModel, Columns, Columns | None]:
    """Returns the trainable model, the training data and the validation data."""
    if not model.proto.training_info:
        model = _build(model, options)
    inputs = _wanted_inputs(model, options)
    data = read_given(options, options.data, inputs, model.proto)
    size = rows_of(data, row_axes_of(inputs))
    note_data(model.proto, data)
    training, validation = _parts(model, data, options, inputs, size)
    return model, training, validation


def _fit(
    session: TrainingSession,
    training: Columns,
    validation: Columns | None,
    options: argparse.Namespace,
    save: str,
    classes: Classes,
    *,
    resumes: bool,
) -> None:
    if options.validate_every and not validation:
        raise OrtopsError("--validate-every: there are no data to validate; give --validation")
    if options.train_metrics and not options.metrics:
        raise OrtopsError("--train-metrics: there are no metrics; give --metrics")
    checkpoint = callbacks.Checkpoint(_literal(save), every=options.checkpoint_steps)
    found = {name: getattr(options, name, None) for name in OPTIONS}
    given = {name: value for name, value in found.items() if value is not None}
    given |= {
        "validation": validation,
        "class_weight": _class_weight(options, classes),
        "metrics": [metric(text) for text in options.metrics or ()],
        "progress": not options.quiet,
        "callbacks": [*_callbacks(options, bool(validation)), checkpoint],
        "resume": resumes,
        "sample_weight": _added_weights(session.metadata, options),
    }
    try:
        session.fit(training, **given)
    except (KeyboardInterrupt, SystemExit):
        if checkpoint.latest is not None:
            say(f"interrupted after step {session.steps_done}; saved in {save}. Resume with:")
            say(f"  {_resuming(options.given)}")
        raise


def _check_files(options: argparse.Namespace, save: str) -> None:
    """Rejects outputs that are also inputs.

    Whether `save` may replace the model depends on the model (see `_check_algorithm`).
    """
    data = {"--data": options.data, "--validation": _validation_file(options)}
    others = {
        "--best": options.best,
        "--log": options.log,
        "--plot": options.plot,
        "--tensorboard": options.tensorboard,
        "--write-config": options.write_config,
    }
    for name, path in others.items():
        if path == "-":
            raise OrtopsError(f"{name} must be the path of a file, got '-'")
    read = {"model": options.model, **data, "--config": options.config}
    check_outputs(read, others, force=options.force)
    check_outputs({**data, "--config": options.config}, {"--save": save}, force=options.force)
    check_outputs({}, {"--save": save, **others})
    check_writable({"--save": save, **{name: others[name] for name in _REPLACED}})


def _validation_file(options: argparse.Namespace) -> str | None:
    """Returns the path of the validation data; None if they are a fraction of the training data."""
    given: str | None = options.validation
    try:
        float(given or "")
    except ValueError:
        return given
    return None


def evaluate(options: argparse.Namespace) -> int:
    """Prints the loss and metrics on a data set."""
    check_outputs({"model": options.model, "--data": options.data}, {})
    model = read_light_model(options.model)
    if not options.data:
        raise OrtopsError("--data is missing; see ortops eval --help")
    if not model.proto.training_info:
        if not options.loss:
            raise OrtopsError(
                f"'{options.model}' has no loss; give one, such as --loss SoftmaxCrossEntropy"
            )
        model = build_light(model, loss=_loss(options), optimizer="SGD")
    else:
        _refuse_algorithm(model, options)
    data = read_given(options, options.data, _wanted_inputs(model, options), model.proto)
    classes = read_notes(model.proto, CLASSES_KEY) | data.classes
    found = TrainingSession(model, providers=options.providers).evaluate(
        data.arrays,
        batch_size=options.batch_size or 256,
        metrics=[metric(text) for text in options.metrics or ()],
        ema=options.ema,
        class_weight=_class_weight(options, classes),
        sample_weight=_added_weights(training_metadata(model.proto), options),
    )
    if options.json:
        print_json(found)
    else:
        width = max(map(len, found))
        for name, value in found.items():
            print_text(f"{name:<{width}}  {value:.6g}")
    return 0


def _build(model: LightModel, options: argparse.Namespace) -> LightModel:
    """Returns a trainable model built with the given options."""
    if model.proto.training_info:
        raise OrtopsError(
            f"'{options.model}' is already trainable; continue with ortops train, or write its "
            "inference model with ortops export"
        )
    _require_loss(model, options)
    optimizer = read_call(options.optimizer or "Adam", "--optimizer")
    more: dict[str, Any] = {}
    if options.learning_rate is not None:
        more["learning_rate"] = rate_of(options.learning_rate)
    settings = {
        name: value
        for name in ("trainable", "batch_normalization", "clip_norm", "clip_value", "ema_decay")
        if (value := getattr(options, name)) is not None
    }
    return build_light(
        model,
        loss=_loss(options),
        optimizer=make(
            *(optimizer, optimizers.OPTIMIZERS, "--optimizer", optimizers.OTHER_NAMES), **more
        ),
        seed=options.seed or 0,
        **settings,
    )


def _require_loss(model: LightModel, options: argparse.Namespace) -> None:
    if not options.loss:
        raise OrtopsError(
            f"'{options.model}' is not a trainable file and needs a loss, such as "
            f"--loss SoftmaxCrossEntropy; `ortops check {options.model}` lists losses that fit"
        )


def _added_weights(metadata: TrainingMetadata, options: argparse.Namespace) -> str | None:
    """Returns the input for the weights of rows if a file gets them that was built without."""
    return _SAMPLE_WEIGHT if options.sample_weight and not metadata.sample_weights else None


def _refuse_algorithm(model: LightModel, options: argparse.Namespace) -> None:
    """Rejects options that a trainable file already determines."""
    chosen = ("learning_rate", _added_weights(training_metadata(model.proto), options))
    given = [name for name in _given(options) if name not in chosen]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise OrtopsError(
            f"{option}: '{options.model}' is trainable and already determines this; omit {option}, "
            "or start from the inference model"
        )


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that define the training algorithm."""
    found = {name: getattr(options, name, None) for name in _ALGORITHM}  # `eval` has some
    return {name: value for name, value in found.items() if value is not None}


def _check_same(model: LightModel, options: argparse.Namespace, save: str) -> None:
    """Rejects resuming with options that differ from those the training started with."""
    text = next((e.value for e in model.proto.metadata_props if e.key == OPTIONS_KEY), "")
    try:
        begun = read_json(text)
    except ValueError:  # the file was not written by `ortops train`
        return
    for name, value in _given(options).items():
        if isinstance(begun, dict) and begun.get(name) != value:
            raise OrtopsError(
                f"--{name.replace('_', '-')} is {value!r}, but the training in '{save}' started "
                + (f"with {begun[name]!r:.200}" if name in begun else "without it")
                + "; give the same value, or omit --resume to start a new training"
            )


def _number(options: argparse.Namespace) -> float:
    """Returns the learning rate for a trainable file."""
    try:
        return float(options.learning_rate)
    except ValueError as error:
        raise OrtopsError(
            f"--learning-rate must be a number, got '{options.learning_rate}', as "
            f"'{options.model}' is trainable; for a schedule, start from the inference model"
        ) from error


def _loss(options: argparse.Namespace) -> losses.Loss:
    """Returns the loss, with weights of rows if the data have them."""
    call = read_call(options.loss, "--loss")
    made: losses.Loss = make(call, losses.LOSSES, "--loss", losses.OTHER_NAMES)
    weight = options.sample_weight
    return made if weight is None or made.sample_weight else replace(made, sample_weight=weight)


def _has_class_weight(options: argparse.Namespace) -> bool:
    return getattr(options, "class_weight", None) is not None  # `build` does not have it


def _wanted_inputs(model: LightModel, options: argparse.Namespace) -> list[Wanted]:
    """Returns the inputs that the data fill: not those of weights that come from classes only."""
    wanted = wanted_inputs(model.proto)
    if _added_weights(training_metadata(model.proto), options):
        wanted.append(Wanted(_SAMPLE_WEIGHT, np.dtype(np.float32), (None,), is_target=True))
        column = f"{_SAMPLE_WEIGHT}={options.sample_weight}"
        options.columns = list(dict.fromkeys([*(options.columns or ()), column]))
    if not _has_class_weight(options):
        return wanted
    return [each for each in wanted if each.name != _CLASS_WEIGHT]


def _class_weight(options: argparse.Namespace, classes: Classes) -> ClassWeight | None:
    """Returns the weights of classes, which may be given by the names of the only labels."""
    text = options.class_weight
    if text in (None, "balanced"):
        return text  # type: ignore[no-any-return]
    names = next(iter(classes.values())) if len(classes) == 1 else []
    numbers = {name: number for number, name in enumerate(names)}
    try:
        given = read_json(text)
        if isinstance(given, list):
            return given
        return {
            numbers[label] if label in numbers else int(label): weight
            for label, weight in given.items()
        }
    except (AttributeError, ValueError) as error:
        raise OrtopsError(
            "--class-weight must be balanced, or a weight for each class in JSON, such as "
            f'\'{{"0": 1, "1": 5}}\', got {text!r}'
            + (f"; the classes are {numbered(names)}" if names else "")
        ) from error


def metric(text: str) -> metrics.Metric:
    """Returns the metric given on the command line: a name, or a name with arguments."""
    call = read_call(text, "--metrics")
    more = {} if call.name in metrics.METRICS else {"name": call.name}  # as it was given
    made: metrics.Metric = make(call, metrics.METRICS, "--metrics", metrics.OTHER_NAMES, **more)
    return made


def rate_of(text: str) -> float | schedules.Schedule:
    """Returns a learning rate or a schedule, for which `fit` sets the number of steps."""
    try:
        return float(text)
    except ValueError:
        pass
    call = read_call(text, "--learning-rate")
    known = {name: getattr(schedules, name) for name in schedules.__all__ if name.islower()}
    made: schedules.Schedule = make(call, known, "--learning-rate")
    return made


def _parts(
    model: LightModel, data: DataFile, options: argparse.Namespace, inputs: Any, size: int
) -> tuple[Columns, Columns | None]:
    """Returns the training data and the validation data."""
    if options.validation is None:
        return data.arrays, None
    try:
        share = float(options.validation)
    except ValueError:
        return data.arrays, read_given(options, options.validation, inputs, model.proto).arrays
    if not 0 < share < 1:
        raise OrtopsError(
            f"--validation must be a fraction between 0 and 1 or a data set, got {share:g}"
        )
    rest, aside = hold_out(size, share, options.seed or 0, name="--validation")
    say(f"held out {len(aside)} of {size} rows for validation")
    axes = row_axes_of(inputs)
    return (
        data.arrays | {name: select(data.arrays[name], rest, axes[name]) for name in axes},
        data.arrays | {name: select(data.arrays[name], aside, axes[name]) for name in axes},
    )


def _literal(path: str) -> str:
    """Returns a path with its braces escaped, which `Checkpoint` would fill in."""
    return path.replace("{", "{{").replace("}", "}}")


def _callbacks(options: argparse.Namespace, validated: bool) -> list[Any]:
    """Returns the callbacks for the given options."""
    monitor = options.monitor or ("validation_loss" if validated else "loss")
    mode: Any = options.mode or "auto"
    found: list[Any] = []
    if options.early_stopping is not None:
        found.append(callbacks.EarlyStopping(options.early_stopping, monitor, mode=mode))
    if options.best:
        found.append(callbacks.BestModel(options.best, monitor, mode=mode))
    if options.log:
        suffix = Path(options.log).suffix
        kinds = {".csv": callbacks.CSVLog, ".jsonl": callbacks.JSONLines}
        if suffix not in kinds:
            raise OrtopsError(f"--log must be a .csv or .jsonl file, got '{options.log}'")
        found.append(kinds[suffix](options.log))
    if options.plot:
        found.append(callbacks.LossPlot(options.plot))
    if options.tensorboard:
        found.append(callbacks.TensorBoard(options.tensorboard))
    return found


def _resuming(given: list[str]) -> str:
    """Returns the command that resumes this one."""
    resume = [] if "--resume" in given else ["--resume"]
    return " ".join(map(_quoted, ["ortops", given[0], *resume, *given[1:]]))


def _quoted(word: str) -> str:
    """Returns a word quoted for a shell, with unprintable bytes escaped."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(_escaped(character) for character in word) + "'"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "'\\":
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))
