"""Each option of the command line is an argument in Python: of the same default and result."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from training_models import classifier, labelled
from violations import all_violations

from ortops import TrainingSession, build_training_model, losses, metrics, optimizers, schedules
from ortops.cli import main
from ortops.cli.parser import make_parser
from ortops.data import image_folder
from ortops.optimizers import Adam, AdamW


class Pair(NamedTuple):
    """An option, and what it is in Python.

    Attributes:
        words: What is written on the command line.
        function: Where the command calls the function.
        argument: Its argument.
        value: What it then is.
        reach: Further words with which the command calls the function; None if without the option
            it never does.
        default: What the argument is without the option, where that cannot be Python's default.
        public: The function of which it has the default, if that is another one.
    """

    words: str
    function: str
    argument: str
    value: Any
    reach: str | None = ""
    default: Any = inspect.Parameter.empty
    public: str = ""


BUILD, TRAIN = "ortops.cli.training:build_light", "ortops.cli.training:TrainingSession"
CALLBACKS, FIT = "ortops.cli.training:callbacks", f"{TRAIN}.fit"
STOPPING, BEST = f"{CALLBACKS}.EarlyStopping", f"{CALLBACKS}.BestModel"
TUNE, EVALUATE = "ortops.cli.tuning:FineTuning", f"{TRAIN}.evaluate"
ADD, MODEL = "ortops.cli.adapters:lora_models.add", "ortops:build_training_model"
COMMANDS = {
    "build": "build model.onnx out.onnx --loss SoftmaxCrossEntropy",
    "train": "train model.onnx --data data.npz --loss SoftmaxCrossEntropy --save out.onnx",
    "eval": "eval trainable.onnx --data data.npz",
    "export": "export trainable.onnx out.onnx",
    "export-step": "export-step trainable.onnx out",
    "check": "check model.onnx",
    "check folder": "check language",
    "lora add": "lora add model.onnx out.onnx",
    "lora merge": "lora merge model.onnx out.onnx",
    "tune": "tune language rows.jsonl --save out",
    "weights save": "weights save model.onnx out.safetensors",
}
"""What each pair is added to; it is not carried out further than to the call."""

ALGORITHM = [
    Pair("--trainable fc*", BUILD, "trainable", ["fc*"], public=MODEL),
    Pair("--batch-normalization frozen", BUILD, "batch_normalization", "frozen", public=MODEL),
    Pair("--clip-norm 2", BUILD, "clip_norm", 2.0, public=MODEL),
    Pair("--clip-value 2", BUILD, "clip_value", 2.0, public=MODEL),
    Pair("--ema-decay 0.9", BUILD, "ema_decay", 0.9, public=MODEL),
    Pair("--seed 3", BUILD, "seed", 3, public=MODEL),
]
PAIRS: dict[str, list[Pair]] = {
    "build": ALGORITHM,
    "train": [
        *ALGORITHM,
        Pair("--epochs 3", FIT, "epochs", 3),
        Pair("--batch-size 3", FIT, "batch_size", 3),
        Pair("--seed 3", FIT, "seed", 3),
        Pair("--accumulate 3", FIT, "accumulate", 3),
        Pair("--class-weight balanced", FIT, "class_weight", "balanced"),
        Pair("--train-metrics", FIT, "train_metrics", True, "--metrics acc"),
        Pair("--validate-every 3", FIT, "validate_every", 3, "--validation 0.5"),
        Pair("--max-steps 3", FIT, "max_steps", 3),
        Pair("--max-minutes 3", FIT, "max_minutes", 3.0),
        Pair("--drop-last", FIT, "drop_last", True),
        Pair("--quiet", FIT, "progress", False),
        Pair("--checkpoint-steps 3", f"{CALLBACKS}.Checkpoint", "every", 3),
        Pair("--early-stopping 3", STOPPING, "patience", 3, None),
        Pair("--mode max", STOPPING, "mode", "max", "--early-stopping 3"),
        Pair("--monitor a", STOPPING, "monitor", "a", "--early-stopping 3", "loss"),
        Pair("--monitor a", STOPPING, "monitor", "a", "--early-stopping 3 --validation 0.5"),
        Pair("--monitor a", BEST, "monitor", "a", "--best a.onnx --validation 0.5"),
        Pair("--mode max", BEST, "mode", "max", "--best a.onnx"),
        Pair("--best a.onnx", BEST, "path", "a.onnx", None),
        Pair("--log a.csv", f"{CALLBACKS}.CSVLog", "path", "a.csv", None),
        Pair("--log a.jsonl", f"{CALLBACKS}.JSONLines", "path", "a.jsonl", None),
        Pair("--plot a.png", f"{CALLBACKS}.LossPlot", "path", "a.png", None),
        Pair("--tensorboard a", f"{CALLBACKS}.TensorBoard", "folder", "a", None),
        Pair("--providers CPUExecutionProvider", TRAIN, "providers", ["CPUExecutionProvider"]),
    ],
    "eval": [
        Pair("--batch-size 3", EVALUATE, "batch_size", 3),
        Pair("--ema", EVALUATE, "ema", True),
        Pair("--class-weight balanced", EVALUATE, "class_weight", "balanced"),
        Pair("--providers CPUExecutionProvider", TRAIN, "providers", ["CPUExecutionProvider"]),
    ],
    "export": [Pair("--ema", "ortops.cli.exporting:TrainingSession.inference_model", "ema", True)],
    "export-step": [
        Pair("--web", "ortops.cli.exporting:write_step", "web", True),
        Pair("--runtime lib", "ortops.cli.exporting:write_step", "runtime", "lib"),
        Pair("--entry b", "ortops.cli.exporting:write_step", "entry", "b"),
        Pair("--target webgpu", "ortops.cli.exporting:write_step", "target", "webgpu"),
        Pair("--force", "ortops.cli.exporting:write_step", "overwrite", True),
    ],
    "check": [
        Pair("--trainable a", "ortops.cli.checking:check_model", "trainable", ["a"]),
        Pair(
            "--batch-normalization train",
            "ortops.cli.checking:check_model",
            *("batch_normalization", "train"),
        ),
    ],
    "check folder": [
        Pair("--measure 2x8", "ortops.cli.checking:check_folder", "measured", (2, 8)),
    ],
    "lora add": [
        Pair("--rank 3", ADD, "rank", 3),
        Pair("--alpha 3", ADD, "alpha", 3.0),
        Pair("--dropout 0.5", ADD, "dropout", 0.5),
        Pair("--dora", ADD, "dora", True),
        Pair("--modules-to-save a b", ADD, "modules_to_save", ["a", "b"]),
        Pair("--bias all", ADD, "bias", "all"),
        Pair("--targets a b", ADD, "targets", ["a", "b"]),
        Pair("--targets a --targets b", ADD, "targets", ["a", "b"]),
    ],
    "lora merge": [
        Pair("--dequantize", "ortops.cli.adapters:lora_models.merge", "dequantize", True),
    ],
    "tune": [
        Pair("--rank 3", TUNE, "rank", 3),
        Pair("--alpha 3", TUNE, "alpha", 3.0),
        Pair("--dropout 0.5", TUNE, "dropout", 0.5),
        Pair("--targets a --targets b", TUNE, "targets", ["a", "b"]),
        Pair("--learning-rate 3", TUNE, "learning_rate", 3.0),
        Pair("--loss DPO", TUNE, "loss", "DPO"),
        Pair("--loss DPO --beta 0.5", TUNE, "loss", losses.DPO(beta=0.5)),
        Pair("--label-smoothing 0.5", TUNE, "loss", losses.NextToken(label_smoothing=0.5)),
        Pair("--rslora", TUNE, "rslora", True),
        Pair("--dora", TUNE, "dora", True),
        Pair("--modules-to-save a b", TUNE, "modules_to_save", ["a", "b"]),
        Pair("--bias all", TUNE, "bias", "all"),
        Pair("--recompute sqrt", TUNE, "recompute", "sqrt"),
        Pair("--recompute elementwise", TUNE, "recompute", "elementwise"),
        Pair("--recompute 3", TUNE, "recompute", 3),
        Pair("--recompute none", TUNE, "recompute", None),
        Pair("--rank none", TUNE, "rank", None),
        Pair("--adapter peft", TUNE, "adapter", "peft"),
        Pair("--task pairs", TUNE, "task", "pairs"),
        Pair("--labels a b", TUNE, "labels", ["a", "b"]),
        Pair("--optimizer Lion", TUNE, "optimizer", "Lion"),
        Pair(
            "--optimizer Lion(beta1=0.8)",
            *(TUNE, "optimizer", optimizers.Lion(2e-4, beta1=0.8)),
        ),
        Pair("--weight-decay 0.5", TUNE, "weight_decay", 0.5),
        Pair("--clip-norm 3", TUNE, "clip_norm", 3.0),
        Pair("--providers a", TUNE, "providers", ["a"]),
        Pair("--epochs 3", f"{TUNE}.fit", "epochs", 3),
        Pair("--batch-size 3", f"{TUNE}.fit", "batch_size", 3),
        Pair("--max-length 3", f"{TUNE}.fit", "max_length", 3),
        Pair("--train-on all", f"{TUNE}.fit", "train_on", "all"),
        Pair("--group-by-length", f"{TUNE}.fit", "group_by_length", True),
        Pair("--packing", f"{TUNE}.fit", "packing", True),
        Pair("--padding left", f"{TUNE}.fit", "padding", "left"),
        Pair("--accumulate 3", f"{TUNE}.fit", "accumulate", 3, None, public=FIT),
        Pair("--max-steps 3", f"{TUNE}.fit", "max_steps", 3, None, public=FIT),
        Pair("--seed 3", f"{TUNE}.fit", "seed", 3),
        Pair("--validation 0.5", f"{TUNE}.fit", "validation", 0.5),
        Pair("--validation b.jsonl", f"{TUNE}.fit", "validation", "b.jsonl"),
        Pair("--checkpoint-steps 3", f"{TUNE}.fit", "save_steps", 3),
        Pair("--merge", f"{TUNE}.save", "merged", True, None),
        Pair("--batch-size 3", f"{TUNE}.show", "batch_size", 3, "--show"),
        Pair("--max-length 3", f"{TUNE}.show", "max_length", 3, "--show"),
        Pair("--train-on all", f"{TUNE}.show", "train_on", "all", "--show"),
    ],
    "weights save": [
        Pair("--like b", "ortops.cli.checkpoints:model_weights.save", "like", "b"),
    ],
}
ELSEWHERE = {
    # what is compared below by what it results in
    *("--loss", "--optimizer", "--learning-rate", "--sample-weight", "--metrics", "--outputs"),
    *("--batch-size", "--scale", "--mean", "--std", "--original", "--validation"),
    # of the command line alone: files, forms of output, and what a shell is told
    *("--data", "--columns", "--save", "--output", "--config", "--write-config", "--json", "--all"),
    *("--force", "--debug", "--help", "--resume", "--quiet", "--no-quiet", "--no-train-metrics"),
    *(
        "--no-drop-last",
        "--no-merge",
        "--no-rslora",
        "--no-dora",
        "--no-group-by-length",
        "--no-packing",
    ),
    "--verbose",
    # functions of their own
    *("--merge-lora", "--quantize", "--adapter", "--requantize", "--providers"),
}


class Reached(BaseException):
    """Ends a command at a call."""


def options_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the commands of a parser, and their options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, each in action.choices.items():
                yield from options_of(each, f"{name} {command}".strip())
        else:
            yield from ((name, option) for option in action.option_strings if len(option) > 2)


def test_each_option_is_compared() -> None:
    compared = {
        (command.removesuffix(" folder"), word)
        for command, pairs in PAIRS.items()
        for pair in pairs
        for word in (pair.words + " " + (pair.reach or "")).split()
    }
    known = [each for each in options_of(make_parser("")) if each[0] and each[1] not in ELSEWHERE]
    assert [each for each in known if each not in compared] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the commands read, which is the current one."""
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(), "model.onnx")
    onnx.save(
        build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam"),
        "trainable.onnx",
    )
    np.savez("data.npz", **labelled((6,), rows=20))
    Path("language").mkdir()
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def called(pair: Pair, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the arguments of the function of a pair, and ends the command there."""
    module, _, path = pair.function.partition(":")
    *outer, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    real = getattr(owner, name)
    signature, found = inspect.signature(real), dict[str, Any]()

    def spy(*arguments: Any, **settings: Any) -> Any:
        bound = signature.bind(*arguments, **settings)
        bound.apply_defaults()
        found.update(bound.arguments)
        found.update(found.pop("settings", None) or {})  # of build_light
        raise Reached

    with monkeypatch.context() as patch:
        if module == "ortops.cli.tuning":  # without a model, which is not what is compared
            tuning = importlib.import_module(module).FineTuning
            patch.setattr(tuning, "__init__", lambda *arguments, **settings: None)
            patch.setattr(tuning, "fit", lambda *arguments, **settings: None)
            patch.setattr(tuning, "session", argparse.Namespace(steps_done=0), raising=False)
        patch.setattr("ortops.cli.checking.is_language_model", lambda path: path == "language")
        patch.setattr(owner, name, spy)
        with pytest.raises(Reached):
            main(words)
    return found


def default_of(pair: Pair) -> Any:
    """Returns Python's default of an argument."""
    if pair.default is not inspect.Parameter.empty:
        return pair.default
    module, _, path = (pair.public or pair.function).partition(":")
    function: Any = importlib.import_module(module)
    for each in path.split("."):
        function = getattr(function, each)
    return inspect.signature(function).parameters[pair.argument].default


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.slow] * (each == "train")) for each in PAIRS]
)
def test_options_are_arguments(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain: dict[tuple[str, ...], dict[str, Any]] = {}  # the calls without the options
    with all_violations() as check:
        for pair in PAIRS[command]:
            words = [*COMMANDS[command].split(), *(pair.reach or "").split()]
            with check(pair.words):
                found = called(pair, [*words, *pair.words.split()], monkeypatch)
                assert found[pair.argument] == pair.value
                for other in PAIRS[command]:  # which the option leaves alone
                    if other[1::3] == pair[1::3] and other.argument != pair.argument:
                        default = default_of(other)
                        assert found.get(other.argument, default) == default, other.words
            if pair.reach is not None:
                with check(f"without {pair.words}"):
                    key = (pair.function, *words)
                    if key not in plain:
                        plain[key] = called(pair, words, monkeypatch)
                    found = plain[key]
                    assert found.get(pair.argument, default_of(pair)) == default_of(pair)


RESULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # options of `train`; arguments of build_training_model; arguments of fit
    "none": ("", {}, {}),
    "--optimizer": (
        "--optimizer AdamW(weight_decay=0.1)",
        {"optimizer": AdamW(weight_decay=0.1)},
        {},
    ),
    "--learning-rate": ("--learning-rate 0.02", {"optimizer": Adam(0.02)}, {}),
    "a schedule": (
        "--learning-rate cosine(0.1) --epochs 3",
        {"optimizer": Adam(schedules.cosine(0.1))},
        {"epochs": 3},
    ),
    "a schedule of joined batches": (
        "--learning-rate warmup_cosine(0.1,warmup=2) --epochs 2 --accumulate 2 --batch-size 3",
        {"optimizer": Adam(schedules.warmup_cosine(0.1, warmup=2))},
        {"epochs": 2, "accumulate": 2, "batch_size": 3},
    ),
    "a schedule that max_steps cuts": (
        "--learning-rate warmup_linear(0.1,warmup=1) --epochs 4 --max-steps 5 --batch-size 4",
        {"optimizer": Adam(schedules.warmup_linear(0.1, warmup=1))},
        {"epochs": 4, "max_steps": 5, "batch_size": 4},
    ),
    "--loss": (
        "--loss SoftmaxCrossEntropy(label_smoothing=0.1)",
        {"loss": losses.SoftmaxCrossEntropy(label_smoothing=0.1)},
        {},
    ),
    "--sample-weight": (
        "--sample-weight weight",
        {"loss": losses.SoftmaxCrossEntropy(sample_weight="weight")},
        {},
    ),
    "--class-weight": (
        "--class-weight [1,2,3]",
        {"loss": losses.SoftmaxCrossEntropy(sample_weight="weight")},
        {"class_weight": [1, 2, 3]},
    ),
    "--seed": ("--seed 3", {"seed": 3}, {"seed": 3}),
    "--trainable": ("--trainable w2 --trainable b*", {"trainable": ["w2", "b*"]}, {}),
}
METRICS = {  # as written on the command line, and in Python
    "accuracy": "accuracy",
    "acc": "acc",
    "top_k(k=2)": metrics.TopK(2),
    "precision": "precision",
    "f1(average='macro')": metrics.F1(average="macro"),
}


@pytest.mark.slow
def test_trainings_are_the_same(folder: Path) -> None:
    data = dict(np.load("data.npz"))
    weighed = data | {"weight": np.linspace(0, 1, 20, dtype=np.float32)}
    np.savez("weighed.npz", **weighed)
    with all_violations() as check:
        for name, (words, build, fit) in RESULTS.items():
            given = weighed if name == "--sample-weight" else data
            file = "weighed.npz" if given is weighed else "data.npz"
            with check(name):
                Path("out.onnx").unlink(missing_ok=True)
                base = f"train model.onnx --data {file} --save out.onnx --quiet"
                loss = "" if name == "--loss" else " --loss SoftmaxCrossEntropy"
                assert main(f"{base}{loss} {words}".split()) == 0
                settings = {"loss": "SoftmaxCrossEntropy", "optimizer": "Adam"} | build
                session = TrainingSession(build_training_model("model.onnx", **settings))
                session.fit(given, progress=False, **fit)
                found = TrainingSession("out.onnx").state
                for each in {"w1", "b1", "w2"} & {*session.state}:  # the file has steps, too
                    np.testing.assert_array_equal(found[each], session.state[each], each)


def test_evaluations_are_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for each in METRICS for word in ("--metrics", each)]  # repeated
    assert main(["eval", "trainable.onnx", "--data", "data.npz", "--json", *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    data = dict(np.load("data.npz"))
    session = TrainingSession("trainable.onnx")
    assert printed == session.evaluate(data, metrics=list(METRICS.values()))
    base = ["predict", "trainable.onnx", "--data", "data.npz", "--output", "found.npz"]
    assert main([*base, "--batch-size", "7"]) == 0
    np.testing.assert_array_equal(
        np.load("found.npz")["logits"], session.predict(data, batch_size=7)["logits"]
    )


@pytest.mark.optional("PIL", "images")
@pytest.mark.parametrize("dtype", ["float", "uint8"])
def test_images_are_the_same(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        for number in range(2):
            pixels = rng.integers(0, 255, (6, 4, 3), np.uint8)
            Image.fromarray(pixels).save(Path("photos", name, f"{number}.png"))
    onnx.save(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        same ({dtype}[batch, 3, 6, 4] images) => ({dtype}[batch, 3, 6, 4] y) {{
            y = Identity (images)
        }}"""),
        "same.onnx",
    )
    onnx_dtype = {"float": np.float32, "uint8": np.uint8}
    words: dict[str, dict[str, Any]] = {"": {}}
    if dtype == "float":
        words |= {
            "--scale 2": {"scale": 2.0},
            "--mean 0.5 --std 0.25": {"mean": [0.5], "std": [0.25]},
            "--mean 0.1 0.2 --mean 0.3 --std 1 2 4": {
                "mean": [0.1, 0.2, 0.3],
                "std": [1, 2, 4],
            },
        }
    with all_violations() as check:
        for given, settings in words.items():
            with check(given):
                base = "predict same.onnx --data photos --output found.npz"
                assert main(f"{base} {given}".split()) == 0
                images = image_folder("photos", dtype=onnx_dtype[dtype], **settings)
                wanted = images.images(np.arange(4))
                np.testing.assert_array_equal(np.load("found.npz")["y"], wanted, strict=True)
