"""Activation checkpointing: fewer activations are kept, and results stay the same."""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import ortops
from benchmarks import language
from models import llama
from models.lstm import lstm
from models.mlp import mlp
from models.resnet import resnet
from models.transformer import transformer
from ortops import ArgumentError, ModelError, Tape, TrainingSession, op
from ortops.engine.execution.memory import Device
from ortops.engine.execution.settings import Settings
from ortops.graph.passes.rematerialization import _Forward
from ortops.llm import FineTuning
from ortops.optimizers import SGD, Adam

Array = np.ndarray[Any, Any]


def trainable(model: onnx.ModelProto, optimizer: Any = None) -> onnx.ModelProto:
    return ortops.build_training_model(
        model, loss="SoftmaxCrossEntropy", optimizer=optimizer or SGD(0.1)
    )


def labels(rows: int) -> Array:
    return np.random.default_rng(0).integers(0, 10, rows)


def deep(depth: int = 9) -> onnx.ModelProto:
    return trainable(mlp((6, *[8] * (depth - 1), 10)))


def normal(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def images(*shape: int) -> dict[str, Array]:
    return {"images": normal(*shape), "labels": labels(shape[0])}


def tokens(*shape: int) -> dict[str, Array]:
    return {"tokens": normal(*shape), "labels": labels(shape[0])}


MODELS: dict[str, Callable[[], tuple[onnx.ModelProto, dict[str, Array]]]] = {
    "MLP": lambda: (deep(), images(5, 6)),
    "MLP, 300,000 parameters": lambda: (
        trainable(mlp((64, *[256] * 5, 10)), Adam()),
        images(5, 64),
    ),
    "transformer": lambda: (trainable(transformer(depth=4)), tokens(3, 8, 8)),
    "residual net": lambda: (
        trainable(resnet((2, 2), image=(3, 8, 8), width=16)),
        images(4, 3, 8, 8),
    ),
    "transformer with dropout": lambda: (
        trainable(transformer(depth=3, dropout_ratio=0.2)),
        tokens(3, 8, 8),
    ),
    "LSTM": lambda: (trainable(lstm(4, width=8)), tokens(3, 5, 4)),
}


@functools.cache
def made(name: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Returns one of `MODELS`, which is built when a test first asks for it, and its batch."""
    return MODELS[name]()


def same(model: onnx.ModelProto, batch: dict[str, Array], chosen: Any, **options: Any) -> None:
    """Checks that steps with and without recomputation give the same results."""
    plain = TrainingSession(model, **options)
    frugal = TrainingSession(model, recompute=chosen, **options)
    for _ in range(3):
        wanted, got = plain.step(batch), frugal.step(batch)
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-6)
    for name, value in plain.state.items():
        np.testing.assert_allclose(frugal.state[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [1, 3, 1000, "sqrt", "elementwise"])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_stay_the_same(name: str, chosen: Any) -> None:
    same(*made(name), chosen)


def gated() -> onnx.ModelProto:
    """A residual block with a gate and a normalization, as in a Llama."""
    rng = np.random.default_rng(1)
    with Tape(name="gated") as tape:
        x = tape.input("tokens", np.float32, ["batch", 4, 8])

        def weight(name: str, *shape: int) -> Any:
            return tape.initializer(name, rng.standard_normal(shape).astype(np.float32) / 4)

        x = x @ weight("in", 8, 8)
        mean = op.ReduceMean(x * x, [-1], keepdims=1)
        h = x / op.Sqrt(mean + 1e-5) * weight("scale", 8)
        gate = h @ weight("gate", 8, 16)
        x = x + (gate * op.Sigmoid(gate) * (h @ weight("up", 8, 16))) @ weight("down", 16, 8)
        tape.output(op.ReduceMean(x, [1], keepdims=0) @ weight("head", 8, 10), "logits")
    return tape.model()


def test_elementwise_functions_alone_are_computed_again(tmp_path: Path) -> None:
    """The gate's function, the gated product and the normalization are; products are not."""
    model, batch, path = trainable(gated()), tokens(3, 4, 8), tmp_path / "step.onnx"
    losses, operators, counts = [], [], []
    for chosen in (None, "elementwise"):
        session = TrainingSession(model, recompute=chosen)
        losses.append([float(session.step(batch)["loss"]) for _ in range(3)])
        counts.append(len(kept(model, chosen, batch, path)))
        operators.append(Counter(node.op_type for node in onnx.load(path).graph.node))
    assert losses[0] == losses[1]
    plain, again = operators
    products = ("MatMul", "Gemm", "FusedMatMul")
    assert [plain[name] for name in products] == [again[name] for name in products]
    names = ("QuickGelu", "SimplifiedLayerNormalization", "Mul")
    assert [again[name] - plain[name] for name in names] == [1, 1, 1]
    assert counts[0] - counts[1] == 3


def tuned(folder: Path, **settings: Any) -> tuple[list[float], Counter[str]]:
    """Returns the losses of three steps, and the operators of a step."""
    tuning = FineTuning(folder, **{"rank": 2, "learning_rate": 0.03, **settings})
    rows = np.random.default_rng(3).integers(3, 60, (6, 9)).tolist()
    if settings.get("loss") == "DPO":
        rows = [{"prompt": r[:3], "chosen": r[3:7], "rejected": r[5:]} for r in rows]
    history = tuning.fit(rows, epochs=2, batch_size=3, progress=False)
    operators = tuning.session.report().operators
    assert operators
    return history.history["loss"], Counter(operators)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "settings"),
    [(32, {}), (4, {}), (32, {"rank": None}), (32, {"dropout": 0.2}), (4, {"loss": "DPO"})],
    ids=str,
)
def test_tuning_computes_functions_again_for_equal_losses(
    bits: int, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = llama.write(tmp_path, bits=bits)
    caplog.set_level(logging.INFO, "ortops")
    losses, again = tuned(folder, **settings)
    (said,) = [each for each in caplog.messages if "computed again" in each]
    assert said.startswith("model: activation functions, products of elements and normalizations")
    assert said.endswith("recompute=None keeps them")
    caplog.clear()
    expected, kept = tuned(folder, **settings, recompute=None)
    assert "computed again" not in caplog.text
    assert losses == expected
    assert losses[-1] < losses[0]
    more = again - kept
    assert more["SimplifiedLayerNormalization"] + more["RMSNormalization"] > 1
    products = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "GroupQueryAttention")
    assert not any(more[name] for name in products)


@pytest.mark.slow
def test_tuning_in_float16_is_equal_up_to_rounding(tmp_path: Path) -> None:
    sizes = language.Sizes(2, 64, 4, 2, 96, 60, bits=4, dtype="float16")
    folder = language.write(tmp_path, sizes)
    losses, again = tuned(folder)
    expected, kept = tuned(folder, recompute=None)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert again.total() > kept.total()


@pytest.mark.slow
def test_what_is_chosen_automatically_on_a_device() -> None:
    """Nothing: there, copies of nodes would wait for sizes that come from the host."""
    model, batch = trainable(gated()), tokens(3, 4, 8)

    def operators(chosen: Any, device: Device | None = None) -> Counter[str]:
        session = TrainingSession(model, recompute=chosen, settings=Settings(device=device))
        session.step(batch)
        return Counter(session.report().operators)

    assert operators("auto") == operators("elementwise") != operators(None)
    device = Device("cpu")
    assert operators("auto", device) == operators(None, device) != operators("elementwise", device)


def test_names() -> None:
    model, batch = made("transformer")
    same(model, batch, ["encoder.layers.1/Add_1_output", "encoder.layers.3/Add_output"])


@pytest.mark.slow
def test_names_of_the_model_behind_what_training_changes(tmp_path: Path) -> None:
    """What is behind Dropout has another name in a training step than in the model."""
    model, batch = made("transformer with dropout")
    name = "encoder.layers.1/Add_1_output"
    assert name in {output for node in model.graph.node for output in node.output}
    same(model, batch, [name])
    assert kept(model, [name], batch, tmp_path / "step.onnx") == kept(
        model, [f"{name}_training"], batch, tmp_path / "step.onnx"
    )


def test_names_in_a_part_that_is_not_trained() -> None:
    """Nothing before them is computed again; the layers behind them are, as ever."""
    model = ortops.build_training_model(
        mlp((6, *[5] * 8, 10)),
        loss="SoftmaxCrossEntropy",
        optimizer=SGD(0.1),
        trainable=["fc6.*", "fc7.*", "fc8.*", "fc9.*"],
    )
    same(model, images(5, 6), ["Relu_2_output", "Relu_6_output"])


@pytest.mark.slow
def test_kernels_in_python() -> None:
    model, batch = made("MLP, 300,000 parameters")
    same(model, batch, "sqrt", kernels="python")


def test_several_steps_in_one_call() -> None:
    model, batch = made("MLP")
    plain, frugal = TrainingSession(model), TrainingSession(model, recompute=2)
    np.testing.assert_allclose(frugal.run_steps([batch] * 4), plain.run_steps([batch] * 4))


def kept(model: onnx.ModelProto, chosen: Any, batch: dict[str, Array], path: Path) -> set[str]:
    """Returns what a step with checkpoints keeps of its forward pass for the backward pass.

    That is read from the graph that onnxruntime writes to a path when it runs the step: results in
    floating point, of the size of the batch, of the nodes that the loss is computed by, which
    other nodes read.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(path)
    TrainingSession(model, recompute=chosen, sess_options=options).step(batch)
    graph = onnx.load(path).graph
    wanted, made, read = {"loss"}, set(), set()
    for node in reversed(graph.node):
        if wanted & set(node.output):
            wanted.update(node.input)
            made.update(node.output)
        else:
            read.update(node.input)
    values = (*graph.value_info, *graph.output)
    described = {value.name: value.type.tensor_type for value in values}
    return {
        name
        for name in made & read
        if described[name].elem_type == onnx.TensorProto.FLOAT
        and any(dim.dim_param for dim in described[name].shape.dim)
    }


def chosen(widths: tuple[int, ...], count: int) -> list[str]:
    """Returns what is chosen in an MLP of layers of these widths."""
    found: list[str] = []
    choose = _Forward.choose

    def note(self: _Forward, wanted: int | str) -> set[ir.Value]:
        values = choose(self, wanted)
        found.extend(sorted(value.name or "" for value in values))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Forward, "choose", note)
        TrainingSession(trainable(mlp(widths)), recompute=count).step(images(5, widths[0]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("widths", "layers"),
    [
        ((6, *[8] * 8, 10), {4, 5}),
        ((6, 256, 256, *[8] * 6, 10), {1, 2}),
        ((6, *[8] * 6, 256, 256, 10), {7, 8}),
    ],
)
def test_as_much_memory_lies_on_both_sides(widths: tuple[int, ...], layers: set[int]) -> None:
    (name,) = chosen(widths, 1)
    assert layer_of(name) in layers


def test_small_ones_are_chosen() -> None:
    names = chosen((6, 64, 4, 64, 4, 64, 4, 64, 10), 2)
    assert len(names) == 2
    assert {layer_of(name) for name in names} < {2, 4, 6}


def layer_of(name: str) -> int:
    """Returns the number of the layer whose product, or Relu, a tensor is."""
    gemm = re.fullmatch(r"fc(\d+)/Gemm_output", name)
    relu = re.fullmatch(r"Relu(?:_(\d+))?_output", name)
    assert gemm or relu
    return int(gemm[1]) if gemm else int((relu and relu[1]) or 0) + 1


def test_only_checkpoints_and_what_follows_the_last_is_kept(tmp_path: Path) -> None:
    chosen = ["Relu_2_output", "Relu_5_output"]
    names = kept(deep(), chosen, images(5, 6), tmp_path / "step.onnx")
    layers = {name for name in names if "Relu" in name}
    assert layers == {f"Relu_{layer}_output" for layer in (2, 5, 6, 7)}
    assert not {f"fc{layer}/Gemm_output" for layer in range(1, 7)} & names


@pytest.mark.slow
def test_the_number_that_is_kept_falls_with_checkpoints(tmp_path: Path) -> None:
    everything, one, four = (
        len(kept(deep(32), chosen, images(5, 6), tmp_path / "step.onnx")) for chosen in (1000, 1, 4)
    )
    assert everything > 30
    assert one < 0.6 * everything
    assert four < 0.4 * everything


def test_onnxruntime_does_not_merge_what_is_repeated(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    TrainingSession(deep(), recompute=["Relu_2_output", "Relu_5_output"], sess_options=options)
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    repeated = [node for node in nodes if "/again/" in node.name]
    assert sum("Gemm" in node.op_type for node in repeated) == 4, repeated


def dropped(x: Any) -> Any:
    return op.Dropout(x, np.float32(0.5), np.array(True), outputs=1)


def with_noise(x: Any) -> Any:
    return x + op.RandomNormalLike(x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("randomly", [dropped, with_noise])
def test_random_numbers_are_not_drawn_again(randomly: Any) -> None:
    rng = np.random.default_rng(0)
    with Tape(name="masked") as tape:
        x = tape.input("x", np.float32, ["batch", 64])
        for layer in range(4):
            weight = rng.standard_normal((64, 64)).astype(np.float32) / 8
            x = op.Relu(randomly(x) @ tape.initializer(f"w{layer}", weight))
        tape.output(x, "y")
    model = ortops.build_training_model(
        tape.model(), loss=lambda y: op.ReduceSum(y, keepdims=0), optimizer=SGD(1.0)
    )
    session = TrainingSession(model, recompute=["y"])
    before = session.state["w3"]
    loss = session.step({"x": np.ones((1, 64), np.float32)})["loss"]
    # The loss is linear in the last weight, so that its gradient tells what it was multiplied by.
    gradient = before - session.state["w3"]
    np.testing.assert_allclose((gradient * before).sum(), loss, rtol=1e-4)


def test_an_unknown_name() -> None:
    message = r"recompute: the forward pass computes no tensor 'Relu_outpt' .*did you mean"
    with pytest.raises(ModelError, match=message):
        TrainingSession(deep(), recompute=["Relu_outpt"])


@pytest.mark.parametrize("parameter", ["fc1.weight", "loss_new", ""])
def test_a_name_of_no_result_of_the_forward_pass(parameter: str) -> None:
    with pytest.raises(ModelError, match=f"computes no tensor '{parameter}'"):
        TrainingSession(deep(), recompute=[parameter])


@pytest.mark.quick(3)
@pytest.mark.parametrize("given", [0, -1, True, "all", "Relu_output", [], ["y", 3], 1.5])
def test_what_is_no_choice(given: Any) -> None:
    with pytest.raises(ArgumentError, match=r"must be a list of names of tensors to keep.*got"):
        TrainingSession(deep(), recompute=given)


@pytest.mark.parametrize("chosen", [1, ["y"]])
def test_two_ways_side_by_side(chosen: Any) -> None:
    with Tape(name="two ways") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        left = tape.initializer("left", np.ones((3, 3), np.float32))
        right = tape.initializer("right", np.ones((3, 3), np.float32))
        tape.output(op.Tanh(x @ left), "y")
        tape.output(op.Tanh(x @ right), "z")

    def loss(y: Any, z: Any) -> Any:
        return op.ReduceSum(y, keepdims=0) + op.ReduceSum(z, keepdims=0)

    model = ortops.build_training_model(tape.model(), loss=loss, optimizer=SGD(0.1))
    same(model, {"x": np.ones((2, 3), np.float32)}, chosen)


def test_a_tensor_that_is_another_one_in_training(tmp_path: Path) -> None:
    with Tape(name="normalized") as tape:
        x = tape.input("x", np.float32, ["batch", 4])
        for name in ("a", "b"):
            x = x @ tape.initializer(f"{name}/weight", 2 * np.eye(4, dtype=np.float32))
            statistics = [np.ones(4), np.zeros(4), np.zeros(4), np.ones(4)]
            given = [
                tape.initializer(f"{name}/{index}", array.astype(np.float32))
                for index, array in enumerate(statistics)
            ]
            x = tape.output(op.BatchNormalization(x, *given, outputs=1), name)
    model = ortops.build_training_model(
        tape.model(), loss=lambda a, b: op.ReduceSum(b * b, keepdims=0), optimizer=SGD(0.1)
    )
    batch = {"x": normal(5, 4)}
    same(model, batch, ["a"])
    assert "a_training" in kept(model, ["a"], batch, tmp_path / "step.onnx")
