"""``ortops export``, ``export-step`` and ``lower``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import onnx

from ortops import lora
from ortops.cli.data import CLASSES_KEY, note, read_classes
from ortops.cli.streams import describe_stream, print_bytes, read_model, write_model
from ortops.errors import OrtopsError
from ortops.graph.external import attached, detach, serialize
from ortops.graph.external import write_model as write_in_place
from ortops.graph.files import destination
from ortops.lowering import lower as lower_model
from ortops.training.export import export_step as write_step
from ortops.training.session import TrainingSession

__all__ = ["export", "export_step", "lower"]


def export(options: argparse.Namespace) -> int:
    """Writes the model that was trained."""
    model = read_model(options.model)
    if not model.training_info:
        raise OrtopsError(f"'{options.model}' has no training in it, so there is nothing to export")
    result = TrainingSession(model).inference_model(
        None if options.original is None else read_model(options.original), ema=options.ema
    )
    if options.merge_lora:
        result = lora.merge(result)
    if options.quantize:
        result = _quantized(result)
    classes = read_classes(model)
    if classes:  # the original did not know them
        note(result, CLASSES_KEY, classes)
    write_model(result, options.output)
    print(f"wrote {describe_stream(options.output)}", file=sys.stderr)
    return 0


def export_step(options: argparse.Namespace) -> int:
    """Writes a training step for other languages."""
    model = read_model(options.model)
    write_step(model, options.folder, web=options.web, entry=options.entry, target=options.target)
    print(f"wrote {options.folder}", file=sys.stderr)
    return 0


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model whose weights are rounded to 8 bits by onnxruntime's tool."""
    from onnxruntime.quantization import quantize_dynamic

    del model.graph.value_info[:]  # the tool transposes weights and believes what is said of them
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quantized.onnx")
        quantize_dynamic(model, path)
        return read_model(str(path))


def lower(options: argparse.Namespace) -> int:
    """Replaces the domain's nodes by standard operators."""
    target = None if options.output == "-" else destination(options.output)
    model = lower_model(sys.stdin.buffer.read() if options.model == "-" else options.model)
    folder = Path(options.model).resolve().parent
    moved = target is None or target.parent != folder  # external data are found from there
    light, data = detach(model, folder if moved else None)
    if options.output == "-":
        print_bytes(serialize(attached(light, data)))
    else:
        write_in_place(options.output, light, data)
    return 0
