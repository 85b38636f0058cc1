"""``ortops lora``."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx

from ortops import lora as lora_models
from ortops.cli.outputs import check_outputs, check_writable
from ortops.cli.standard_streams import say
from ortops.cli.streams import describe_stream, read_model, write_model
from ortops.engine.training.session import TrainingSession
from ortops.llm.merging import merged_model
from ortops.lora.peft import refuse_others


def lora(options: argparse.Namespace) -> int:
    """Adds, merges or exports an adapter."""
    check_outputs({"model": options.model}, {"output": options.output}, force=options.force)
    if options.action != "export":  # export may write a folder
        check_writable({"output": options.output})
    model = read_model(options.model)
    if options.action == "add":
        names = ("rank", "alpha", "targets", "dropout", "dora", "modules_to_save", "bias")
        settings = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
        write_model(lora_models.add(model, **settings), options.output)
    elif options.action == "merge":
        write_model(_merged(_trained(model), options), options.output)
    elif Path(options.output).suffix == ".onnx_adapter":
        lora_models.save_adapter(_trained(model), options.output)
    else:
        if not options.force:
            refuse_others(options.output)
        lora_models.to_peft(_trained(model), options.output)
    say(f"wrote {describe_stream(options.output)}")
    return 0


def _merged(model: onnx.ModelProto, options: argparse.Namespace) -> onnx.ModelProto:
    if options.adapter is not None:
        model = lora_models.load_adapter(model, options.adapter)
    if options.requantize:
        return merged_model(model)
    return lora_models.merge(model, dequantize=options.dequantize)


def _trained(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns the inference model of one that may be trainable."""
    return TrainingSession(model).inference_model() if model.training_info else model
