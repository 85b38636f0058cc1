"""``ortops export``, ``export-step`` and ``lower``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx

from ortops import lora
from ortops.cli.data import keep_notes
from ortops.cli.outputs import check_outputs, check_writable
from ortops.cli.standard_streams import print_bytes, say
from ortops.cli.streams import describe_stream, read_model, source, write_model
from ortops.engine.inference import InferenceSession
from ortops.engine.lowering import lower as lower_model
from ortops.engine.training.export import export_step as write_step
from ortops.engine.training.session import TrainingSession
from ortops.errors import OrtopsError
from ortops.graph.files.atomic import destination
from ortops.graph.files.external import detach, serialize
from ortops.graph.files.saving import write_model as write_in_place


def export(options: argparse.Namespace) -> int:
    """Writes the trained model for inference."""
    read = {"model": options.model, "--original": options.original}
    check_outputs(read, {"output": options.output}, force=options.force)
    check_writable({"output": options.output})
    model = read_model(options.model)
    if not model.training_info:
        raise OrtopsError(
            f"'{options.model}' is not a trainable file; give one written by ortops build or train"
        )
    result = TrainingSession(model).inference_model(
        None if options.original is None else read_model(options.original),
        ema=options.ema,
        outputs=options.outputs,
    )
    if options.merge_lora:
        result = lora.merge(result)
    if options.quantize:
        result = _quantized(result)
    keep_notes(result, model)
    write_model(result, options.output)
    say(f"wrote {describe_stream(options.output)}")
    return 0


def export_step(options: argparse.Namespace) -> int:
    """Writes a training step for other languages."""
    model = read_model(options.model)
    write_step(
        model,
        options.folder,
        web=options.web,
        entry=options.entry,
        target=options.target,
        overwrite=options.force,
        runtime=options.runtime,
    )
    say(f"wrote {options.folder}")
    return 0


def _quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with weights quantized to 8 bits by onnxruntime.

    They are unsigned: products with signed ones overflow on CPUs without VNNI, where outputs of a
    small network were off by a third, and ConvInteger has no kernel for signed weights.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    before = {tensor.name for tensor in model.graph.initializer}
    del model.graph.value_info[:]  # the tool transposes weights but not their recorded shapes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quantized.onnx")
        quantize_dynamic(model, path, weight_type=QuantType.QUInt8)
        try:
            InferenceSession(path)
        except Exception as error:
            why = str(error).split("\n")[0]
            raise OrtopsError(
                f"--quantize: onnxruntime does not load its result ({why:.200}); it quantizes "
                "float32 models, so export this one without --quantize"
            ) from error
        result = read_model(str(path))
    if before.issuperset(tensor.name for tensor in result.graph.initializer):
        say(
            "--quantize: no weights were quantized, as onnxruntime quantizes float32 weights of "
            "MatMul, plain Gemm, Conv, Gather and LSTM"
        )
    return result


def lower(options: argparse.Namespace) -> int:
    """Replaces nodes of the training domain with standard operators."""
    check_outputs({"model": options.model}, {"output": options.output}, force=options.force)
    check_writable({"output": options.output})
    target = None if options.output == "-" else destination(options.output)
    model = lower_model(source(options.model))
    folder = Path(options.model).resolve().parent
    moved = target is None or target.parent != folder  # external data paths are relative to it
    light = detach(model, folder if moved else None)
    if options.output == "-":
        print_bytes(serialize(light.attach()))
    else:
        write_in_place(options.output, light)
    return 0
