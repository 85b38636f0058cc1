"""What is left of a trainable file when other tools have rewritten it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnx_ir
import onnxruntime
import pytest
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

from ortops import TrainingSession, build_training_model, step_graph
from ortops.errors import ModelError
from tests.training_models import classifier, labelled

GONE = (
    r"^model: it has the metadata_props 'ortops\.training' of a trainable model, but its "
    r"training_info is gone, as after onnxsim, .*; use the file from before that, or make it "
    r"trainable again with ortops\.build_training_model$"
)
BATCH = labelled((6,))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    session = TrainingSession(model)
    session.step(BATCH)  # some tools leave out what adds zeros, such as biases before they train
    session.save(tmp_path / "trainable.onnx")
    return tmp_path / "trainable.onnx"


def losses(model: onnx.ModelProto | Path) -> list[float]:
    session = TrainingSession(model)
    return [float(session.step(BATCH)["loss"]) for _ in range(3)]


def saved(path: Path, write: Callable[[str], object]) -> onnx.ModelProto:
    """Returns what a tool writes to a file."""
    target = path.with_name("changed.onnx")
    write(str(target))
    return onnx.load(target)


def optimized(path: Path, level: str) -> onnx.ModelProto:
    def write(target: str) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = target
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    return saved(path, write)


def fixed(path: Path) -> onnx.ModelProto:
    model = onnx.load(path)
    make_dim_param_fixed(model.graph, "batch", 8)
    return model


def simplified(path: Path) -> onnx.ModelProto:
    import onnxsim

    model, agrees = onnxsim.simplify(onnx.load(path))
    assert agrees
    return model


def slimmed(path: Path) -> onnx.ModelProto:
    import onnxslim

    return onnxslim.slim(onnx.load(path))


def optimized_by_onnxscript(path: Path) -> onnx.ModelProto:
    from onnxscript import optimizer

    return optimizer.optimize(onnx.load(path))


def quantized(path: Path) -> onnx.ModelProto:
    logging.disable(logging.WARNING)
    try:
        return saved(path, lambda target: quantize_dynamic(path, target))
    finally:
        logging.disable(logging.NOTSET)


KEEPS: dict[str, Callable[[Path], Any]] = {
    "onnx.load and onnx.save": lambda path: saved(path, lambda to: onnx.save(onnx.load(path), to)),
    "onnx.save, data in a file": lambda path: saved(
        path, lambda to: onnx.save(onnx.load(path), to, save_as_external_data=True)
    ),
    "onnx.shape_inference": lambda path: onnx.shape_inference.infer_shapes(onnx.load(path)),
    "onnx.inliner": lambda path: onnx.inliner.inline_local_functions(onnx.load(path)),
    "onnxruntime, disabled": lambda path: optimized(path, "ORT_DISABLE_ALL"),
    "onnxruntime, basic": lambda path: optimized(path, "ORT_ENABLE_BASIC"),
    "quant_pre_process": lambda path: saved(
        path, lambda to: quant_pre_process(path, to, skip_symbolic_shape=True)
    ),
    "make_dim_param_fixed": fixed,
}
DROPS: dict[str, Callable[[Path], onnx.ModelProto]] = {
    "onnx.version_converter": lambda p: onnx.version_converter.convert_version(onnx.load(p), 23),
    "onnx.printer and onnx.parser": lambda path: onnx.parser.parse_model(
        onnx.printer.to_text(onnx.load(path))
    ),
    "onnx-ir": lambda path: saved(path, lambda to: onnx_ir.save(onnx_ir.load(path), to)),
}
OTHERS = {
    "onnxsim": simplified,
    "onnxslim": slimmed,
    "onnxscript": optimized_by_onnxscript,
}


def test_checker_and_runtime_take_it(path: Path) -> None:
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert "ortops.training" in session.get_modelmeta().custom_metadata_map
    assert [value.name for value in session.get_inputs()] == ["x"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("tool", KEEPS.values(), ids=KEEPS.keys())
def test_tools_that_keep_training_info(tool: Callable[[Path], Any], path: Path) -> None:
    expected = losses(path)
    changed = tool(path)
    assert changed.training_info == onnx.load(path).training_info
    assert losses(changed) == pytest.approx(expected, rel=1e-6)
    assert expected[2] < expected[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "tool",
    [
        *(pytest.param(tool, id=name) for name, tool in DROPS.items()),
        *(
            pytest.param(tool, id=name, marks=pytest.mark.optional(name, "export"))
            for name, tool in OTHERS.items()
        ),
    ],
)
def test_tools_that_drop_training_info(tool: Callable[[Path], onnx.ModelProto], path: Path) -> None:
    """Whoever goes on with what they wrote is told what it was."""
    changed = tool(path)
    assert not changed.training_info
    for use in (TrainingSession, step_graph):
        with pytest.raises(ModelError, match=GONE):
            use(changed)
    again = build_training_model(changed, loss="SoftmaxCrossEntropy", optimizer="Adam")
    assert losses(again)[0] == pytest.approx(losses(path)[0], rel=1e-6)


def test_a_quantizer_keeps_training_info_that_names_weights_that_are_gone(path: Path) -> None:
    changed = quantized(path)
    assert changed.training_info
    with pytest.raises(ModelError, match=r"reads 'w1', which is not defined"):
        TrainingSession(changed)


def test_without_metadata_it_is_as_somebody_elses(path: Path) -> None:
    model = onnx.load(path)
    del model.metadata_props[:]
    assert losses(model) == losses(path)
    del model.training_info[:]
    with pytest.raises(ModelError, match=r"^model: it has no training_info; make it trainable"):
        TrainingSession(model)


def test_an_inference_model_does_not_say_that_training_info_is_gone(path: Path) -> None:
    model = TrainingSession(path).inference_model()
    with pytest.raises(ModelError, match=r"^model: it has no training_info; make it trainable"):
        TrainingSession(model)
