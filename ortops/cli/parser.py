"""What the command line takes; nothing else is imported for `--help`."""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Callable

__all__ = ["make_parser"]

_LOSS = "a loss with its arguments, such as 'SoftmaxCrossEntropy(label_smoothing=0.1)'"
_OPTIMIZER = "an optimizer with its arguments, such as 'AdamW(weight_decay=0.1)'"
_DATA = (
    "an .npz, .csv or .parquet file, a folder with a folder of images for each class, or - for "
    "CSV on standard input"
)
_EXIT = "Ends with 0, with 1 where something was refused or failed, with 2 where the call is wrong."

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
        """,
    "inspect": """
        ortops inspect trained.onnx
        ortops inspect trained.onnx --json
        """,
    "lora": """
        ortops lora add base.onnx adapted.onnx --rank 8 --targets '*query*' '*value*'
        ortops lora merge adapted.onnx merged.onnx
        ortops lora export adapted.onnx adapter.onnx_adapter
        """,
}

_Command = Callable[..., argparse.ArgumentParser]


def make_parser(version: str) -> argparse.ArgumentParser:
    """Returns the parser.

    What a call stands for is `run` of what it returns: ``module.function`` of this package.

    Args:
        version: What ``--version`` prints.
    """
    parser = argparse.ArgumentParser(
        prog="ortops",
        description="Training for stock onnxruntime.",
        epilog=_epilog(""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ortops {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: str, summary: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=_epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(run=run)
        made.add_argument("--debug", action="store_true", help="show a traceback of errors")
        return made

    _add_check(command)
    _add_build(command)
    _add_train(command)
    _add_eval(command)
    _add_predict(command)
    _add_export(command)
    _add_export_step(command)
    lower = command("lower", "exporting.lower", "replace Gradient, Adam, … by standard operators")
    lower.add_argument("model", help="an .onnx file")
    lower.add_argument("output", help="the file to write; - is standard output")
    inspect = command("inspect", "inspection.inspect", "tell what is in a trainable file")
    inspect.add_argument("model", help="an .onnx file, or - for standard input")
    inspect.add_argument("--json", action="store_true", help="print an object")
    _add_lora(command)
    completion = command(
        "completion", "completion.print_completion", "print a shell's completion of this command"
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser


def _count(text: str) -> int:
    return _whole_number(text, least=1)


def _whole_number(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {least}")
    return int(text)


def _divisor(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number or not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no number to divide by")
    return number


def _epilog(command: str) -> str:
    examples = textwrap.indent(textwrap.dedent(_EXAMPLES.get(command, "")).strip(), "  ")
    return f"examples:\n{examples}\n\n{_EXIT}" if examples else _EXIT


def _add_check(command: _Command) -> None:
    parser = command(
        "check", "checking.check", "tell what a training would do, and what stands in the way"
    )
    parser.epilog = str(parser.epilog).replace(
        _EXIT, "Ends with 1 if something stands in the way, with 2 if no model can be read, else 0."
    )
    parser.add_argument(
        "models", nargs="+", help="an .onnx file, a folder of them, or - for standard input"
    )
    parser.add_argument("--loss", help=_LOSS)
    parser.add_argument(
        "--trainable", action="append", metavar="PATTERN", help="what to train; may be repeated"
    )
    parser.add_argument(
        "--batch-normalization", choices=("auto", "train", "frozen"), default="auto"
    )
    parser.add_argument(
        "--json", action="store_true", help="print an array with an object for each file"
    )


def _add_algorithm(parser: argparse.ArgumentParser) -> None:
    """Adds what `build` and `train` share."""
    group = parser.add_argument_group("the training")
    group.add_argument("--loss", help=_LOSS)
    group.add_argument("--optimizer", help=f"{_OPTIMIZER}; Adam by default")
    group.add_argument(
        "--learning-rate",
        metavar="RATE",
        help="a number, or a schedule such as 'warmup_cosine(3e-4, steps=1000, warmup=100)'",
    )
    group.add_argument(
        "--trainable",
        action="append",
        metavar="PATTERN",
        help="what to train: names of weights, patterns, scopes of nodes; may be repeated",
    )
    group.add_argument("--batch-normalization", choices=("auto", "train", "frozen"))
    group.add_argument(
        "--clip-norm", type=float, metavar="N", help="the largest norm of all gradients together"
    )
    group.add_argument(
        "--clip-value", type=float, metavar="N", help="the largest absolute value of a gradient"
    )
    group.add_argument(
        "--ema-decay", type=float, metavar="D", help="keep averages of the weights, such as 0.999"
    )
    group.add_argument(
        "--seed", type=_whole_number, metavar="N", help="of Dropout and the order; 0"
    )


def _add_build(command: _Command) -> None:
    parser = command("build", "training.build", "write a trainable file")
    parser.add_argument("model", help="an .onnx file, or - for standard input")
    parser.add_argument("output", help="the trainable file to write; - is standard output")
    _add_algorithm(parser)


def _add_data(parser: argparse.ArgumentParser, *, batch: int = 256) -> None:
    group = parser.add_argument_group("the data")
    group.add_argument("--data", metavar="DATA", help=_DATA)
    group.add_argument(
        "--columns",
        action="extend",
        nargs="+",
        metavar="INPUT=COLUMNS",
        help="which columns of a table an input is made of, as in points=x,y labels=kind; by "
        "default those of its name, and for a single other input all the others",
    )
    group.add_argument(
        "--scale", type=_divisor, metavar="N", help="divide the numbers of images by this; 1"
    )
    group.add_argument(
        "--mean",
        type=float,
        action="extend",
        nargs="+",
        metavar="M",
        help="subtract this from each channel then",
    )
    group.add_argument(
        "--deviation",
        type=_divisor,
        action="extend",
        nargs="+",
        metavar="D",
        help="divide each channel by this then",
    )
    group.add_argument("--batch-size", type=_count, metavar="N", help=f"rows in a batch; {batch}")


def _add_train(command: _Command) -> None:
    parser = command("train", "training.train", "train a model on a data set")
    parser.add_argument(
        "model",
        nargs="?",
        help="an .onnx file: a model, or a trainable file, whose training goes on",
    )
    parser.add_argument(
        "--save", metavar="FILE", help="the trainable file to write; <model>-trained.onnx"
    )
    _add_algorithm(parser)
    _add_data(parser, batch=32)
    group = parser.add_argument_group("the course of it")
    group.add_argument("--epochs", type=_count, metavar="N", help="passes over the data; 1")
    group.add_argument(
        "--accumulate", type=_count, metavar="K", help="make one update of K batches; 1"
    )
    group.add_argument(
        "--validation",
        metavar="DATA",
        help="data to evaluate after each epoch, or the share of the data to set aside, as 0.1",
    )
    group.add_argument(
        "--metrics", action="extend", nargs="+", metavar="METRIC", help="such as accuracy"
    )
    group.add_argument(
        "--early-stopping",
        type=_count,
        metavar="N",
        help="stop after N epochs without a better one",
    )
    group.add_argument(
        "--monitor", metavar="NAME", help="what is to get better; validation_loss, or else loss"
    )
    group.add_argument("--best", metavar="FILE", help="write the best model here")
    group.add_argument(
        "--checkpoint-steps", type=_count, metavar="N", help="save every N steps; else each epoch"
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with what an interrupted call has begun"
    )
    group.add_argument("--log", metavar="FILE", help="a .csv or .jsonl file to write numbers to")
    group.add_argument("--plot", metavar="FILE", help="a .png file to draw the loss into")
    group.add_argument("--tensorboard", metavar="FOLDER", help="write TensorBoard's events here")
    group.add_argument("--quiet", action=argparse.BooleanOptionalAction, help="show no progress")
    group.add_argument(
        "--config", metavar="FILE", help="a TOML file with these options; those given here win"
    )
    group.add_argument(
        "--write-config", metavar="FILE", help="write the options to a TOML file, and train"
    )


def _add_eval(command: _Command) -> None:
    parser = command("eval", "training.evaluate", "compute loss and metrics of a data set")
    parser.add_argument("model", help="a trainable file, or with --loss any .onnx file")
    parser.add_argument("--loss", help=f"for a file that has none: {_LOSS}")
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help="such as accuracy")
    parser.add_argument("--ema", action="store_true", help="evaluate the averaged weights")
    parser.add_argument("--json", action="store_true", help="print an object")
    _add_data(parser)


def _add_predict(command: _Command) -> None:
    parser = command("predict", "prediction.predict", "run a model on a data set")
    parser.add_argument("model", help="an .onnx file")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="an .npz or .csv file; - prints CSV"
    )
    parser.add_argument("--outputs", nargs="+", metavar="NAME", help="which outputs; all")
    _add_data(parser)


def _add_export(command: _Command) -> None:
    parser = command("export", "exporting.export", "write the model that was trained")
    parser.add_argument("model", help="a trainable file")
    parser.add_argument("output", help="the file to write; - is standard output")
    parser.add_argument(
        "--original", metavar="FILE", help="write the weights into a copy of this file"
    )
    parser.add_argument("--ema", action="store_true", help="export the averaged weights")
    parser.add_argument("--merge-lora", action="store_true", help="fold the adapter into weights")
    parser.add_argument(
        "--quantize",
        action="store_true",
        help="quantize weights to 8 bits with onnxruntime's dynamic quantization",
    )


def _add_export_step(command: _Command) -> None:
    parser = command(
        "export-step", "exporting.export_step", "write a training step for other languages"
    )
    parser.add_argument("model", help="a trainable file, or - for standard input")
    parser.add_argument("folder", help="where the files go; it is made if need be")
    parser.add_argument(
        "--web", action="store_true", help="write a driver in JavaScript and a page, too"
    )
    parser.add_argument(
        "--entry", type=int, default=0, metavar="N", help="which training_info entry; 0"
    )
    parser.add_argument(
        "--target", choices=("onnxruntime", "webgpu"), help="what is to run it; any by default"
    )


def _add_lora(command: _Command) -> None:
    parser = command("lora", "adapters.lora", "add, merge and export adapters")
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    add = actions.add_parser("add", help="put an adapter beside the weights of a model")
    add.add_argument("model", help="an .onnx file")
    add.add_argument("output", help="the file to write; - is standard output")
    add.add_argument("--rank", type=_count, default=8, metavar="N", help="8 by default")
    add.add_argument("--alpha", type=float, metavar="A", help="twice the rank by default")
    add.add_argument("--targets", nargs="+", metavar="PATTERN", help="which layers; all")
    merge = actions.add_parser("merge", help="fold an adapter into the weights")
    merge.add_argument("model", help="an .onnx file with an adapter, trainable or not")
    merge.add_argument("output", help="the file to write; - is standard output")
    merge.add_argument(
        "--dequantize", action="store_true", help="make quantized weights floats, to merge into"
    )
    export = actions.add_parser("export", help="write an adapter alone")
    export.add_argument("model", help="an .onnx file with an adapter, trainable or not")
    export.add_argument("output", help="an .onnx_adapter file, or else a folder as PEFT writes it")
    for action in (add, merge, export):
        action.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
