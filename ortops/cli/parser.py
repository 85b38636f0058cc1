"""The argument parser of the command line. Imports nothing heavy, so that `--help` is fast."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable
from typing import Any

from ortops.engine.training.fit_options import OPTIONS, Option
from ortops.llm.options import OF_LOSS, SHARED_FIT, TUNING, TUNING_FIT, remedy_on_command_line

_LOSS = (
    "a loss, optionally with arguments: SoftmaxCrossEntropy, MeanSquaredError, "
    "'Huber(delta=0.5)', … (`ortops check` lists the losses that fit a model)"
)
_SAMPLE_WEIGHT = "a column with a weight >= 0 for each row, by which the loss averages rows"
_OPTIMIZER = "an optimizer, optionally with arguments, such as 'AdamW(weight_decay=0.1)'"
_DATA = (
    "an .npz, .csv, .parquet, .arrow or .feather file, a folder with one subfolder of images per "
    "class, or - for CSV on standard input"
)
_OUTPUT = "the file to write, or - for standard output"
_DROPOUT = "the ratio of a layer's input that training drops before A (default: 0)"
_EXIT = "Exit status: 0 success, 1 error, 2 usage error."
_EXIT_OF_CHECK = "Exit status: 0 no problems, 1 problems found, 2 unreadable model or usage error."

_EXAMPLES = {
    "": """
        ortops check model.onnx
        ortops train model.onnx --data train.npz --loss SoftmaxCrossEntropy --epochs 5
        ortops eval model-trained.onnx --data test.npz --metrics accuracy
        ortops export model-trained.onnx tuned.onnx --original model.onnx
        """,
    "build": """
        ortops build model.onnx trainable.onnx --loss SoftmaxCrossEntropy --optimizer Adam
        ortops build model.onnx trainable.onnx --loss 'Huber(delta=0.5)' \\
            --optimizer 'AdamW(weight_decay=0.1)' --trainable 'head.*' \\
            --learning-rate 'warmup_cosine(3e-4, steps=1000)' --clip-norm 1 --ema-decay 0.999
        """,
    "train": """
        ortops train model.onnx --data train.npz --loss SoftmaxCrossEntropy --epochs 5
        ortops train model.onnx --data train.csv --columns points=x,y labels=kind \\
            --validation 0.1 --metrics accuracy --early-stopping 3 --save tuned.onnx
        ortops train tuned.onnx --data more.npz --epochs 2
        ortops train model.onnx --data photos/ --scale 255 --save tuned.onnx --resume
        ortops train --config train.toml
        """,
    "eval": """
        ortops eval model-trained.onnx --data test.npz --metrics accuracy 'top_k(k=5)'
        ortops eval model.onnx --loss MeanSquaredError --data test.csv --json
        """,
    "predict": """
        ortops predict model.onnx --data test.npz --output predictions.npz
        ortops predict model.onnx --data test.csv --output - --outputs probabilities
        """,
    "export": """
        ortops export trained.onnx tuned.onnx --original model.onnx
        ortops export trained.onnx small.onnx --ema --quantize
        ortops export trained.onnx encoder.onnx --outputs embedding
        ortops export adapted.onnx merged.onnx --merge-lora
        """,
    "export-step": """
        ortops export-step trainable.onnx step/
        ortops export-step trainable.onnx page/ --web
        """,
    "lower": "ortops lower model.onnx lowered.onnx",
    "check": """
        ortops check model.onnx
        ortops check models/ --loss SoftmaxCrossEntropy --json
        ortops check phi-4-mini-int4 --measure 4x512
        """,
    "inspect": """
        ortops inspect trained.onnx
        ortops inspect trained.onnx --json
        """,
    "tune": """
        ortops tune phi-4-mini-int4 chats.jsonl --rank 8 --epochs 3 --save tuned
        ortops tune phi-4-mini-int4 chats.jsonl --optimizer Lion --accumulate 8 --clip-norm 1 \\
            --learning-rate 'warmup_cosine(1e-4, warmup=0.03)' --write-config tune.toml
        ortops tune tuned more.jsonl --learning-rate 1e-4 --save tuned-further
        ortops tune minilm reviews.csv --task classification --columns text=review label=stars
        """,
    "lora": """
        ortops lora add base.onnx adapted.onnx --rank 8 --targets '*query*' '*value*'
        ortops lora merge adapted.onnx merged.onnx
        ortops lora export adapted.onnx adapter.onnx_adapter
        """,
    "weights": """
        ortops weights match model.onnx model.safetensors
        ortops weights load model.onnx model.safetensors loaded.onnx
        ortops weights save trained.onnx tuned.safetensors --like model.safetensors
        """,
}

_Command = Callable[..., argparse.ArgumentParser]


class _Parser(argparse.ArgumentParser):
    """A parser that rejects empty arguments: most often a shell variable that is not set."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.register("type", None, _text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; rejects ``--option=--``, which argparse turns into an empty list."""
        found, left = super().parse_known_args(args, namespace)
        for name, value in vars(found).items():
            if value == [] and name != "given":
                self.error(f"argument --{name.replace('_', '-')}: expected one argument")
        return found, left

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments, and explains options of other libraries for `ortops tune`."""
        found, left = self.parse_known_args(args, namespace)
        if left and found.command == "tune" and (remedy := remedy_on_command_line(left[0])):
            self.error(f"{left[0]} is not an option; {remedy}")
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return found


def make_parser(version: str) -> argparse.ArgumentParser:
    """Returns the parser.

    The parsed options name the function to call as `run`: ``module.function`` of this package.

    Args:
        version: The version that ``--version`` prints.
    """
    parser = _Parser(
        prog="ortops",
        description="Train ONNX models with stock onnxruntime.",
        epilog=_epilog(""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ortops {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.type = str  # the parser of each command checks its own arguments

    def command(name: str, run: str, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=_epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    _add_check(command)
    _add_build(command)
    _add_train(command)
    _add_eval(command)
    _add_predict(command)
    _add_export(command)
    _add_export_step(command)
    lower = command("lower", "exporting.lower", "replace Gradient, Adam, … with standard operators")
    lower.add_argument("model", help="an .onnx file")
    lower.add_argument("output", help=_OUTPUT)
    _add_force(lower)
    inspect = command("inspect", "inspection.inspect", "describe a model or trainable file")
    inspect.add_argument("model", help="an .onnx file, or - for standard input")
    _flag(inspect, "--json", "print a JSON object")
    about = "say which nodes of a step fall back to the CPU on these, such as webgpu"
    _add_list(inspect, "--providers", "NAME", about)
    _add_lora(command)
    _add_tune(command)
    _add_weights(command)
    completion = command(
        "completion", "completion.print_completion", "print a shell completion script"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _text(text: str) -> str:
    """Returns a name, path or pattern."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    if "\0" in text:
        raise argparse.ArgumentTypeError(f"must not contain a null character, got {text!r:.80}")
    return text


def _count(text: str) -> int:
    return _whole_number(text, least=1)


def _rows_and_tokens(text: str) -> tuple[int, int]:
    rows, _, tokens = text.rpartition("x")
    return _count(rows or "1"), _whole_number(tokens, least=2)


def _rank(text: str) -> int:
    return _whole_number(text, least=1, bits=31)


def _whole_number(text: str, least: int = 0, bits: int = 63) -> int:
    if not text.isdecimal() or (len(text) < 20 and int(text) < least):
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, got {text!r:.80}")
    if len(text.lstrip("0")) > 19 or int(text) >= 2**bits:
        raise argparse.ArgumentTypeError(f"must be an integer < 2**{bits}, got {text!r:.80}")
    return int(text)


def _entry(text: str) -> int | str:
    """Returns the index or the name of a training_info entry."""
    return _whole_number(text) if text.isdecimal() else text


def _divisor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a finite number other than 0, got {text!r:.80}")
    return number


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number > 0, got {text!r:.80}")
    return number


_READ: dict[str, Any] = {
    "whole_number": _count,
    "number": _positive,
    "float": float,
    "rank": lambda text: text if text == "none" else _rank(text),
    "seed": _whole_number,
    "number or name": _entry,
}
"""What reads the value of an option that is declared."""


def _epilog(command: str) -> str:
    examples = textwrap.indent(textwrap.dedent(_EXAMPLES.get(command, "")).strip(), "  ")
    return f"examples:\n{examples}\n\n{_EXIT}" if examples else _EXIT


def _flag(group: argparse._ActionsContainer, name: str, about: str) -> None:
    """Adds an option without a value."""
    group.add_argument(name, action="store_true", help=about)


def _option(
    group: argparse._ActionsContainer, name: str, metavar: str, about: str, kind: Any = None
) -> None:
    """Adds an option with a value."""
    group.add_argument(name, metavar=metavar, help=about, type=kind)


def _actions(parser: argparse.ArgumentParser) -> _Command:
    """Returns what adds the commands of a command, which all write files."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    actions.type = str

    def add(name: str, about: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=about)
        hidden = argparse.SUPPRESS
        made.add_argument("--debug", action="store_true", default=hidden, help=hidden)
        return made

    return add


def _add_check(command: _Command) -> None:
    about = "check whether models can be trained, and report how"
    parser = command("check", "checking.check", about)
    add = parser.add_argument
    parser.epilog = str(parser.epilog).replace(_EXIT, _EXIT_OF_CHECK)
    add("models", nargs="+", help="an .onnx file, a folder of them or of a language model, or -")
    add("--loss", help=_LOSS)
    about = "names or patterns of the weights to train, or '!PATTERN' to exclude; may be repeated"
    add("--trainable", action="append", metavar="PATTERN", help=about)
    add("--batch-normalization", choices=("auto", "train", "frozen"), default="auto")
    _flag(parser, "--all", "list everything instead of a summary of long lists")
    about = "also list nodes that are near to those that a pass makes faster, and the difference"
    _flag(parser, "--verbose", about)
    about = (
        "for the folder of a language model: train a few steps with this many tokens per row and "
        "rows per batch (default: 1x64), and report memory and tokens per second; for a tuned one: "
        "generate behind so many tokens with the merged model and with the adapter, and say which "
        "to serve"
    )
    kind = _rows_and_tokens
    add("--measure", metavar="[ROWSx]TOKENS", nargs="?", const=(1, 64), help=about, type=kind)
    _flag(parser, "--json", "print a JSON array with one object per file")


def _add_algorithm(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `build` and `train` share."""
    group = parser.add_argument_group("training algorithm")
    add = group.add_argument
    add("--loss", help=_LOSS)
    add("--sample-weight", metavar="COLUMN", help=_SAMPLE_WEIGHT)
    add("--optimizer", help=f"{_OPTIMIZER} (default: Adam)")
    add(
        "--learning-rate",
        metavar="RATE",
        help="a number, or a schedule such as 'warmup_cosine(3e-4, steps=1000, warmup=100)'; with "
        "`train`, steps defaults to the number of updates",
    )
    about = "names, patterns or scopes of weights to train; '!PATTERN' excludes; may be repeated"
    add("--trainable", action="append", metavar="PATTERN", help=about)
    about = "how to run BatchNormalization: with the statistics of each batch, or frozen"
    choices = ("auto", "train", "frozen")
    add("--batch-normalization", choices=choices, help=f"{about} (default: auto)")
    add("--clip-norm", type=float, metavar="N", help="clip the global norm of the gradients to N")
    add("--clip-value", type=float, metavar="N", help="clip each gradient element to [-N, N]")
    about = "keep an exponential moving average of the weights with this decay, such as 0.999"
    add("--ema-decay", type=float, metavar="D", help=about)
    about = "seed of Dropout and shuffling (default: 0)"
    add("--seed", type=_whole_number, metavar="N", help=about)


def _add_build(command: _Command) -> None:
    parser = command("build", "training.build", "write a trainable file")
    add = parser.add_argument
    add("model", help="an .onnx file, or - for standard input")
    add("output", help="the trainable file to write, or - for standard output")
    _add_force(parser)
    _add_algorithm(parser)


def _add_force(parser: argparse._ActionsContainer) -> None:
    about = "allow the output to overwrite an input file"
    parser.add_argument("--force", action="store_true", help=about)


def _add_list(
    group: argparse._ActionsContainer,
    name: str,
    metavar: str,
    about: str,
    **settings: Any,
) -> None:
    """Adds an option with one or more values, which may be repeated."""
    settings |= {"metavar": metavar, "help": about}
    group.add_argument(name, action="extend", nargs="+", **settings)


def _add_providers(group: argparse._ActionsContainer) -> None:
    about = "where to train, such as cuda or webgpu (default: the CPU)"
    _add_list(group, "--providers", "NAME", about)


def _add_data(parser: argparse.ArgumentParser, *, batch: int = 256) -> None:
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--data", metavar="DATA", help=_DATA)
    _add_list(
        group,
        "--columns",
        "INPUT=COLUMNS",
        "the table columns that form an input, as in points=x,y labels=kind; by default the "
        "column of the same name; a single remaining input gets all remaining columns",
    )
    about = "divide image pixels by this (default: 255, or 1 if the input has integers)"
    add("--scale", type=_divisor, metavar="N", help=about)
    mean = "subtract this from each channel, after --scale"
    _add_list(group, "--mean", "M", mean, type=float)
    about = "divide each channel by this, after --mean"
    _add_list(group, "--std", "D", about, type=_divisor)
    add("--batch-size", type=_count, metavar="N", help=f"rows per batch (default: {batch})")


def _add_train(command: _Command) -> None:
    parser = command("train", "training.train", "train a model on a data set")
    about = "an .onnx file: a model, or a trainable file to continue training"
    parser.add_argument("model", nargs="?", help=about)
    about = "the trainable file to write (default: <model>-trained.onnx)"
    parser.add_argument("--save", metavar="FILE", help=about)
    _add_algorithm(parser)
    _add_data(parser, batch=32)
    group = parser.add_argument_group("training loop")
    for name in OPTIONS:
        _add_fit_option(group, name)
    add = group.add_argument
    about = "stop after N epochs without improvement"
    add("--early-stopping", type=_count, metavar="N", help=about)
    about = (
        "the value that --early-stopping and --best watch (default: validation_loss, or loss "
        "without validation data)"
    )
    add("--monitor", metavar="NAME", help=about)
    about = "whether higher or lower is better (default: auto, the direction of the metric)"
    add("--mode", choices=("auto", "max", "min"), help=about)
    add("--best", metavar="FILE", help="write the best model here")
    about = "save every N steps (default: after each epoch)"
    add("--checkpoint-steps", type=_count, metavar="N", help=about)
    add("--resume", action="store_true", help="resume an interrupted training")
    _add_providers(group)
    _add_reports(group)


def _add_fit_option(group: argparse._ActionsContainer, argument: str) -> None:
    """Adds the option for an argument of `fit`, if there is one."""
    _add_declared(group, argument, OPTIONS[argument])


def _add_declared(group: argparse._ActionsContainer, argument: str, option: Option) -> None:
    """Adds the option for an argument that is declared, if there is one."""
    name = f"--{argument.replace('_', '-')}"
    if option.metavar == "":
        group.add_argument(name, action=argparse.BooleanOptionalAction, help=option.help)
    elif option.metavar and option.several:
        _add_list(group, name, option.metavar, option.help)
    elif option.metavar and option.reads == "choice":
        group.add_argument(name, choices=option.bounds["options"], help=option.help)
    elif option.metavar:
        kind: Any = _READ.get(option.reads or option.check)
        group.add_argument(name, type=kind, metavar=option.metavar, help=option.help)


def _add_reports(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `train` for logs, progress and configuration files."""
    add = group.add_argument
    add("--log", metavar="FILE", help="a .csv or .jsonl file for losses and metrics")
    add("--plot", metavar="FILE", help="a .png file for a plot of the loss")
    add("--tensorboard", metavar="FOLDER", help="write TensorBoard events here")
    _add_force(group)
    _add_configuration(group)


def _add_configuration(group: argparse._ActionsContainer) -> None:
    """Adds the options for progress and configuration files."""
    add = group.add_argument
    add("--quiet", action=argparse.BooleanOptionalAction, help="show warnings only")
    about = "a TOML file with these options; options on the command line take precedence"
    add("--config", metavar="FILE", help=about)
    add("--write-config", metavar="FILE", help="write the options to a TOML file, then train")


def _add_eval(command: _Command) -> None:
    parser = command("eval", "training.evaluate", "compute loss and metrics on a data set")
    add = parser.add_argument
    add("model", help="a trainable file, or with --loss any .onnx file")
    add("--loss", help=f"only for a file without a loss: {_LOSS}")
    _option(parser, "--sample-weight", "COLUMN", _SAMPLE_WEIGHT)
    _add_fit_option(parser, "class_weight")
    _add_fit_option(parser, "metrics")
    _flag(parser, "--ema", "evaluate the averaged weights")
    _add_providers(parser)
    _flag(parser, "--json", "print a JSON object")
    _add_data(parser)


def _add_predict(command: _Command) -> None:
    parser = command("predict", "prediction.predict", "run a model on a data set")
    add = parser.add_argument
    add("model", help="an .onnx file")
    add("--output", required=True, metavar="FILE", help="an .npz or .csv file, or - to print CSV")
    _add_list(parser, "--outputs", "NAME", "the outputs to write (default: all)")
    _add_force(parser)
    _add_data(parser)


def _add_export(command: _Command) -> None:
    parser = command("export", "exporting.export", "write the trained model for inference")
    parser.add_argument("model", help="a trainable file")
    parser.add_argument("output", help=_OUTPUT)
    _option(parser, "--original", "FILE", "write the weights into a copy of this file")
    _flag(parser, "--ema", "export the averaged weights")
    about = "write only what these tensors need, which are outputs or not (default: the outputs)"
    _add_list(parser, "--outputs", "NAME", about)
    _flag(parser, "--merge-lora", "merge the adapter into the weights")
    about = "quantize weights to 8 bits with onnxruntime's dynamic quantization"
    _flag(parser, "--quantize", about)
    _add_force(parser)


def _add_export_step(command: _Command) -> None:
    about = "write a training step for other languages"
    parser = command("export-step", "exporting.export_step", about)
    add = parser.add_argument
    add("model", help="a trainable file, or - for standard input")
    add("folder", help="the output folder; created if it does not exist")
    _flag(parser, "--web", "also write a JavaScript driver and web pages")
    about = "the folder from which the pages load onnxruntime-web (default: ort, beside them)"
    add("--runtime", default="./ort/", metavar="URL", help=about)
    about = "the training_info entry, by name or index (default: main, the first)"
    add("--entry", type=_entry, default=0, metavar="NAME", help=about)
    about = "the runtime to optimize for (default: any runtime)"
    add("--target", choices=("onnxruntime", "cuda", "webgpu"), help=about)
    _flag(parser, "--force", "overwrite files that ortops did not write")


def _add_tune(command: _Command) -> None:
    parser = command("tune", "tuning.tune", "fine-tune a language model with LoRA")
    add = parser.add_argument
    about = (
        "a folder of onnxruntime-genai, Optimum or transformers.js, or one that this command "
        "wrote, to train its adapter further"
    )
    add("folder", nargs="?", help=about)
    about = (
        "a file of JSON lines, JSON, CSV or Parquet, or a folder of these, each row with messages "
        "or conversations, with prompt and completion, instruction and output, or question and "
        "answer, with text, or with input_ids; for DPO, with prompt, chosen and rejected"
    )
    add("data", nargs="?", help=about)
    about = "the folder to write, which is served like the original (default: <folder>-tuned)"
    _option(parser, "--save", "FOLDER", about)
    about = "merge the adapter into the weights, for runtimes without adapters (transformers.js)"
    parser.add_argument("--merge", action=argparse.BooleanOptionalAction, help=about)
    for table in (TUNING, OF_LOSS, TUNING_FIT):
        for argument, option in table.items():
            _add_declared(parser, argument, option)
    for argument in SHARED_FIT:
        _add_fit_option(parser, argument)
    about = "print the first batch, with « and » around what is trained, and stop"
    _flag(parser, "--show", about)
    about = "save every N steps (default: after each epoch)"
    _option(parser, "--checkpoint-steps", "N", about, _count)
    _flag(parser, "--resume", "resume an interrupted training")
    _add_configuration(parser)


def _add_lora(command: _Command) -> None:
    action = _actions(command("lora", "adapters.lora", "add, merge and export LoRA adapters"))
    add = action("add", "add an adapter to a model")
    add.add_argument("model", help="an .onnx file")
    add.add_argument("output", help=_OUTPUT)
    about = "the adapter's rank (default: 8)"
    add.add_argument("--rank", type=_rank, default=8, metavar="N", help=about)
    about = "the scaling's numerator (default: 16)"
    add.add_argument("--alpha", type=float, default=16.0, metavar="A", help=about)
    add.add_argument("--dropout", type=float, default=0.0, metavar="P", help=_DROPOUT)
    about = "layers, or all-linear: all but convolutions and the output layer; '!PATTERN' excludes"
    _add_list(add, "--targets", "PATTERN", f"{about} (default: all)")
    _flag(add, "--dora", "train magnitudes of the outputs, too (DoRA)")
    for name in ("modules_to_save", "bias"):
        _add_declared(add, name, TUNING[name])
    merge = action("merge", "merge an adapter into the weights")
    merge.add_argument("model", help="an .onnx file with an adapter, trainable or not")
    merge.add_argument("output", help=_OUTPUT)
    about = "merge this .onnx_adapter file instead of the model's own"
    _option(merge, "--adapter", "FILE", about)
    either = merge.add_mutually_exclusive_group()
    _flag(either, "--dequantize", "convert quantized weights to floats and merge")
    _flag(either, "--requantize", "merge, and quantize MatMulNBits weights again")
    export = action("export", "write only the adapter")
    export.add_argument("model", help="an .onnx file with an adapter, trainable or not")
    export.add_argument("output", help="an .onnx_adapter file, or a folder for PEFT's format")
    for each in (add, merge, export):
        _add_force(each)


def _add_weights(command: _Command) -> None:
    about = "exchange weights with a checkpoint"
    action = _actions(command("weights", "checkpoints.weights", about))
    checkpoint = "a .safetensors, .safetensors.index.json, .npz or torch file"
    match = action("match", "show where a checkpoint's tensors are in a model")
    match.add_argument("model", help="an .onnx file, or - for standard input")
    match.add_argument("checkpoint", help=checkpoint)
    match.add_argument("output", nargs="?", help="also write the model with the map to this file")
    _flag(match, "--json", "print a JSON object")
    load = action("load", "put the values of a checkpoint into a model")
    load.add_argument("model", help="an .onnx file, or - for standard input")
    load.add_argument("checkpoint", help=checkpoint)
    load.add_argument("output", help=_OUTPUT)
    save = action("save", "write the weights of a model")
    save.add_argument("model", help="an .onnx file, trainable or not, or - for standard input")
    save.add_argument("output", help="the .safetensors file to write")
    about = "use the names, layouts and dtypes of this checkpoint"
    _option(save, "--like", "CHECKPOINT", about)
    for each in (match, load, save):
        _add_force(each)
