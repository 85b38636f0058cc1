"""Adapters: what they add, what they are called, what they train, and where they go."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from lora_models import (
    CASES,
    IMAGES,
    ROWS,
    WIDE,
    Case,
    branches,
    built,
    four_bits,
    normal,
    outputs,
    random_adapter,
    values,
    with_values,
)
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from running import plain_session
from violations import all_violations

import ortops
from models import mlp
from ortops import ArgumentError, ModelError, Tape, TrainingSession, UnsupportedError, lora, op
from ortops.engine.check import check

F = np.float32
# What onnxruntime's tool for four bits is called since 1.22.
NEEDS_TOOL = pytest.mark.needs("onnxruntime>=1.22")
EVERY = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[NEEDS_TOOL] if " bits" in name else [])
        for name, case in CASES.items()
    ],
)
# What float16 loses in products of six numbers near one; the others sum in another order only.
ROUNDING = {"float16": 2e-2, "float32": 2e-5, "float64": 1e-12}


def two_layers(opset: int = 21) -> onnx.ModelProto:
    model = mlp.mlp((6, 16, 4))
    model.opset_import[0].version = opset  # Gemm and Relu are the same in all
    return model


def trained(model: onnx.ModelProto, steps: int = 5, **settings: Any) -> TrainingSession:
    settings = {"loss": "MeanSquaredError", "optimizer": "Adam"} | settings
    session = TrainingSession(ortops.build_training_model(model, **settings))
    session.learning_rate = 0.05
    for _ in range(steps):
        session.step({"images": ROWS, "targets": normal(5, 4, seed=9)})
    return session


def adapted(case: Case) -> onnx.ModelProto:
    return lora.add(case.model(), rank=3, targets=case.targets)


# ------------------------------------------------------------------------------ what is computed


@EVERY
def test_nothing_changes_at_first(case: Case) -> None:
    base, model = case.model(), adapted(case)
    for one, other in zip(outputs(base, case.feeds), outputs(model, case.feeds), strict=True):
        np.testing.assert_array_equal(one, other)


@EVERY
def test_the_product_is_added(case: Case) -> None:
    model = adapted(case)
    parameters = random_adapter(model)
    assert [array.shape for array in parameters.values()] == list(case.sizes)
    (y,) = outputs(case.model(), case.feeds)
    x = case.feeds["x"]
    x = x if x.dtype == np.int64 else x.astype(np.float64)
    expected = y + case.added(x, *(array.astype(np.float64) for array in parameters.values()))
    (found,) = outputs(with_values(model, parameters), case.feeds)
    assert found.dtype == y.dtype
    atol = ROUNDING[y.dtype.name] * abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    assert abs(found - y).max() > 0.1


@EVERY
def test_the_base_stays_as_it_is(case: Case) -> None:
    base = case.model()
    before = base.SerializeToString()
    model = lora.add(base, rank=3, targets=case.targets)
    assert base.SerializeToString() == before
    kept = values(base)
    assert {name: a.tolist() for name, a in values(model).items() if name in kept} == {
        name: array.tolist() for name, array in kept.items()
    }
    assert case.op_type in {node.op_type for node in model.graph.node}
    assert model.opset_import == base.opset_import
    assert [output.name for output in model.graph.output] == ["y"]
    onnx.checker.check_model(model, full_check=case.op_type != "MatMulNBits")


@EVERY
def test_merging_gives_what_the_adapter_gives(case: Case) -> None:
    model = adapted(case)
    model = with_values(model, random_adapter(model))
    before = model.SerializeToString()
    # Not optimized, as onnxruntime rounds the other factor of dequantized weights too.
    (expected,) = plain_session(model, optimize=False).run(None, dict(case.feeds))
    if case.is_quantized:
        with pytest.raises(
            UnsupportedError, match=r"is quantized, and merging would round it again; "
        ):
            lora.merge(model)
    merged = lora.merge(model, dequantize=case.is_quantized)
    assert model.SerializeToString() == before
    (found,) = outputs(merged, case.feeds)
    atol = ROUNDING[expected.dtype.name] * abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    base = case.model()
    assert [value.name for value in merged.graph.input] == ["x"]
    assert not [entry.key for entry in merged.metadata_props if "lora" in entry.key]
    assert not [name for name in values(merged) if ".lora_" in name]
    if not case.is_quantized:
        assert [n.op_type for n in merged.graph.node] == [n.op_type for n in base.graph.node]
        assert values(merged).keys() == values(base).keys()


def test_nothing_is_left_of_a_weight_that_was_dequantized() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
    g (float[n, 4] x) => (float[n, 3] y) <float scale = {0.5}, int8[4, 3] quantized = {
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> {
    zero = Constant <value = int8 {0}> ()
    weight = DequantizeLinear (quantized, scale, zero) y = MatMul (x, weight) }""")
    merged = lora.merge(lora.add(model, rank=2, alpha=2), dequantize=True).graph
    assert [node.op_type for node in merged.node] == ["MatMul"]
    assert [list(each.dims) for each in merged.initializer] == [[4, 3]]


def test_an_adapter_in_a_branch() -> None:
    base = branches()
    model = lora.add(base, rank=2)
    model = with_values(model, random_adapter(model))
    new = values(model)
    merged = lora.merge(model)
    for first, name in ((True, "a"), (False, "b")):
        feeds = {"x": ROWS, "first": np.array(first)}
        weight = new[f"{name}.weight"] + new[f"{name}.lora_A.weight"] @ new[f"{name}.lora_B.weight"]
        for each in (model, merged):
            np.testing.assert_allclose(outputs(each, feeds)[0], ROWS @ weight, atol=1e-5)


def test_an_adapter_in_branches_that_share_a_name(tmp_path: Path) -> None:
    """A name of one branch may stand in the other for something else."""
    base = branches()
    for attribute in base.graph.node[0].attribute:
        attribute.g.node[0].output[0] = attribute.g.output[0].name = "same"
    model = lora.add(base, rank=2)
    new = random_adapter(model)
    model = with_values(model, new)
    lora.save_adapter(model, tmp_path / "a.onnx_adapter")
    loaded = lora.load_adapter(lora.add(base, rank=2), tmp_path / "a.onnx_adapter")
    for first, name in ((True, "a"), (False, "b")):
        feeds = {"x": ROWS, "first": np.array(first)}
        delta = new[f"{name}.lora_A.weight"] @ new[f"{name}.lora_B.weight"]
        expected = ROWS @ (values(base)[f"{name}.weight"] + delta)
        for each in (loaded, lora.merge(model)):
            np.testing.assert_allclose(outputs(each, feeds)[0], expected, atol=1e-5)


def test_a_tied_weight_has_an_adapter_for_each_layer() -> None:
    model = tied()
    found = lora.add(model, rank=2, targets=["embedding", "head"])
    new = random_adapter(found)
    assert sorted(new) == [
        "embedding.lora_A.weight",
        "embedding.lora_B.weight",
        "head.lora_A.weight",
        "head.lora_B.weight",
    ]
    found = with_values(found, new)
    feeds = {"x": np.array([[0, 2], [3, 1]])}
    table = values(model)["table"].astype(np.float64)
    h = (table + new["embedding.lora_A.weight"] @ new["embedding.lora_B.weight"])[feeds["x"]]
    y = h @ (table.T + new["head.lora_A.weight"] @ new["head.lora_B.weight"])
    np.testing.assert_allclose(outputs(found, feeds)[0], y, atol=1e-5)
    merged = lora.merge(found)
    np.testing.assert_allclose(outputs(merged, feeds)[0], y, atol=1e-5)
    assert sorted(values(merged)) == ["embedding.weight", "table"]


def tied() -> onnx.ModelProto:
    """An embedding whose table is the weight of the head too."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "x"], ["h"], name="/embedding/Gather"),
        node("Transpose", ["table"], ["columns"], perm=[1, 0], name="/head/Transpose"),
        node("MatMul", ["h", "columns"], ["y"], name="/head/MatMul"),
    ]
    graph = helper.make_graph(
        nodes,
        "tied",
        [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["batch", 2])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 2, 5])],
        [numpy_helper.from_array(normal(5, 4), "table")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


def test_nodes_of_one_layer_share_an_adapter() -> None:
    model = built(ROWS, lambda x, weight: op.Tanh(x @ weight) @ weight, weight=normal(6, 6))
    for node in model.graph.node:
        node.name = ""
    found = lora.add(model, rank=2)
    new = random_adapter(found)
    assert sorted(new) == ["fc.lora_A.weight", "fc.lora_B.weight"]
    weight = values(model)["fc.weight"] + new["fc.lora_A.weight"] @ new["fc.lora_B.weight"]
    expected = np.tanh(ROWS @ weight) @ weight
    found = with_values(found, new)
    for each in (found, lora.merge(found)):
        np.testing.assert_allclose(outputs(each, {"x": ROWS})[0], expected, atol=1e-5)


def test_layers_of_one_name_are_told_apart() -> None:
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "v"], ["h"], name="/fc/MatMul"),
        node("MatMul", ["h", "w"], ["y"], name="/fc/MatMul_1"),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "named_alike",
        [info("x", onnx.TensorProto.FLOAT, ["batch", 6])],
        [info("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(normal(6, 4), "v"), numpy_helper.from_array(normal(4, 3), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sizes = {
        n: a.shape for n, a in values(lora.add(model, rank=2)).items() if n.endswith("A.weight")
    }
    assert sizes == {"fc.lora_A.weight": (6, 2), "fc_1.lora_A.weight": (4, 2)}


def test_a_weight_in_a_constant_node() -> None:
    base = built(ROWS, lambda x: x @ op.Constant(value=normal(6, 4)) + 1.0)
    model = lora.add(base, rank=2)
    model = with_values(model, random_adapter(model))
    merged = lora.merge(model)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in base.graph.node]
    (expected,) = outputs(model, {"x": ROWS})
    np.testing.assert_allclose(outputs(merged, {"x": ROWS})[0], expected, atol=1e-5)


# ------------------------------------------------------------------- the scaling while it trains


def oracle_losses(
    model: onnx.ModelProto,
    scale: float,
    optimizer: str,
    steps: int,
    clip_norm: float | None = None,
) -> list[float]:
    """The losses of a layer y = x (W + scale · A B) in float64, A and B updated as PEFT does."""
    known = {name: array.astype(np.float64) for name, array in values(model).items()}
    w, a, b = (known[f"fc.{name}"] for name in ("weight", "lora_A.weight", "lora_B.weight"))
    b = b / scale
    x, y = ROWS.astype(np.float64), normal(5, 4, seed=9).astype(np.float64)
    moments = [(np.zeros(p.shape), np.zeros(p.shape)) for p in (a, b)]
    found = []
    for t in range(1, steps + 1):
        error = x @ w + scale * (x @ a @ b) - y
        found.append(float((error**2).mean()))
        g = 2 * error / error.size
        gradients = [scale * x.T @ g @ b.T, scale * (x @ a).T @ g]
        if clip_norm is not None:
            norm = np.sqrt(sum((each**2).sum() for each in gradients))
            gradients = [each * min(1, clip_norm / (norm + 1e-6)) for each in gradients]
        new = []
        for index, (p, gradient) in enumerate(zip((a, b), gradients, strict=True)):
            if optimizer == "SGD":
                new.append(p - 0.05 * gradient)
                continue
            v, h = moments[index]
            v, h = 0.9 * v + 0.1 * gradient, 0.999 * h + 0.001 * gradient**2
            moments[index] = v, h
            kept = p * (1 - 0.05 * 0.1) if optimizer == "AdamW" else p
            root = np.sqrt(h / (1 - 0.999**t)) + 1e-8
            new.append(kept - 0.05 * v / (1 - 0.9**t) / root)
        a, b = new
    return found


RATE: dict[str, Any] = {"learning_rate": 0.05}
OPTIMIZERS = {
    "SGD": ortops.optimizers.SGD(**RATE),
    "Adam": ortops.optimizers.Adam(**RATE, epsilon_after_correction=True),
    "AdamW": ortops.optimizers.AdamW(**RATE, weight_decay=0.1, epsilon_after_correction=True),
}


def one_layer(**settings: Any) -> onnx.ModelProto:
    base = built(ROWS, lambda x, weight: x @ weight, weight=normal(6, 4))
    return lora.add(base, rank=4, **settings)


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({"alpha": 1}, 0.25),
        ({"alpha": 4}, 1),
        ({"alpha": 3}, 0.75),
        ({"alpha": 16}, 4),
        ({"alpha": 3, "rslora": True}, 1.5),
        ({"alpha_pattern": {"fc": 9}}, 2.25),
    ],
    ids=str,
)
def test_the_scaling_counts_while_it_trains(
    settings: dict[str, Any], scale: float, optimizer: str
) -> None:
    """Training goes as if B had no scaling and the layer multiplied by it, as in PEFT."""
    model = one_layer(**settings)
    found = losses_of(model, OPTIMIZERS[optimizer])
    expected = oracle_losses(model, scale, optimizer, len(found))
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert expected[-1] < 0.99 * expected[0]


def losses_of(
    model: onnx.ModelProto, optimizer: Any, feeds: Any = None, **settings: Any
) -> list[float]:
    loss = "MeanSquaredError"
    built_model = ortops.build_training_model(model, loss=loss, optimizer=optimizer, **settings)
    session = TrainingSession(built_model)
    feeds = feeds or {"x": ROWS, "targets": normal(5, 4, seed=9)}
    return [float(session.step(feeds)["loss"]) for _ in range(12)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_clipped_as_without_the_scaling_in_b(optimizer: str) -> None:
    model = one_layer(alpha=16)
    found = losses_of(model, OPTIMIZERS[optimizer], clip_norm=0.5)
    expected = oracle_losses(model, 4, optimizer, len(found), clip_norm=0.5)
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    without = oracle_losses(model, 4, optimizer, len(found))
    assert not np.allclose(found, without, rtol=1e-2)


@pytest.mark.slow
def test_the_scaling_counts_in_embeddings_and_convolutions() -> None:
    for name in ("Gather", "Conv"):
        case = CASES[name]
        curves = {}
        for alpha in (3, 12):
            model = lora.add(case.model(), rank=3, alpha=alpha, targets=case.targets)
            feeds = dict(case.feeds)
            feeds["targets"] = np.zeros_like(outputs(model, feeds)[0])
            curves[alpha] = losses_of(model, OPTIMIZERS["Adam"], feeds)
        assert curves[12][-1] < curves[3][-1] - 1e-3


@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", ["Muon", "LAMB", "Lion", "Adafactor", "Adagrad", "Momentum"])
def test_every_optimizer_knows_the_scaling(optimizer: str) -> None:
    """A step moves B by the scaling times what the rule moves B / scaling by."""
    base = built(ROWS, lambda x, weight: x @ weight, weight=np.zeros((6, 4), F))
    one, four = lora.add(base, rank=4, alpha=4), lora.add(base, rank=4, alpha=16)
    rate = getattr(ortops.optimizers, optimizer)(learning_rate=1e-3)
    moved = []
    for model, scale in ((one, 1), (four, 4)):
        targets = normal(5, 4, seed=9) / F(scale)  # the same gradients, bit by bit
        built_model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer=rate)
        session = TrainingSession(built_model)
        session.step({"x": ROWS, "targets": targets})
        moved.append(session.parameters["fc.lora_B.weight"])
    assert moved[0].any()
    np.testing.assert_allclose(moved[1], 4 * moved[0], rtol=1e-4)


def test_a_scaling_that_float32_cannot_hold() -> None:
    model = one_layer(alpha=1e-44)
    with pytest.raises(
        ModelError, match=r"the scaling 2.5e-45 of 'fc.lora_B.weight' is out of the range of float"
    ):
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")


# ------------------------------------------------------------------------------- how it begins


def test_first_values() -> None:
    model = built(
        IMAGES,
        lambda x, weight: op.Conv(x, weight),
        weight=normal(4, 3, 3, 3),
    )
    found = values(lora.add(model, rank=64))
    a, b = found["fc.lora_A.weight"], found["fc.lora_B.weight"]
    bound = 1 / np.sqrt(3 * 3 * 3)  # kaiming_uniform_ with a = √5
    assert not b.any()
    assert 0.99 * bound < abs(a).max() <= bound
    assert abs(a.mean()) < bound / 20
    np.testing.assert_allclose(a.std(), bound / np.sqrt(3), rtol=0.05)


def test_first_values_of_an_embedding_have_the_scaling() -> None:
    model = CASES["Gather"].model()
    found = values(lora.add(model, rank=400, alpha=100, targets=["fc"]))
    assert not found["fc.lora_A.weight"].any()
    np.testing.assert_allclose(found["fc.lora_B.weight"].std(), 100 / 400, rtol=0.05)
    found = values(lora.add(model, rank=400, alpha=100, targets=["fc"], rslora=True))
    np.testing.assert_allclose(found["fc.lora_B.weight"].std(), 100 / 20, rtol=0.05)


def test_a_seed_gives_the_same_numbers() -> None:
    one, same, other = (lora.add(two_layers(), seed=seed) for seed in (3, 3, 4))
    assert one.SerializeToString() == same.SerializeToString()
    assert (values(one)["fc1.lora_A.weight"] != values(other)["fc1.lora_A.weight"]).any()


def test_a_rank_above_all_sizes_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    model = two_layers()
    shapes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    largest = max(min(shape) for shape in shapes.values() if len(shape) == 2)
    with caplog.at_level(logging.INFO, "ortops"):
        for rank in (largest, largest + 1):
            assert not [text for text in caplog.messages if "no layer is larger" in text]
            lora.add(model, rank=rank)
    (said,) = [text for text in caplog.messages if "no layer is larger" in text]
    assert f"rank={largest + 1}: no layer is larger than {largest}," in said


def test_ranks_and_alphas_of_layers() -> None:
    model = lora.add(two_layers(), rank_pattern={"fc2": 2}, alpha_pattern={"^fc[1]": 5}, alpha=3)
    sizes = {name: array.shape for name, array in values(model).items() if ".lora_" in name}
    assert sizes == {
        "fc1.lora_A.weight": (6, 8),
        "fc1.lora_B.weight": (8, 16),
        "fc2.lora_A.weight": (16, 2),
        "fc2.lora_B.weight": (2, 4),
    }
    (text,) = (entry.value for entry in model.metadata_props if entry.key == "ortops.lora")
    told = json.loads(text)
    assert (told["rank"], told["alpha"], told["rslora"]) == (8, 3, False)
    layers = {name: (layer["rank"], layer["alpha"]) for name, layer in told["modules"].items()}
    assert layers == {"fc1": (8, 5.0), "fc2": (2, 3.0)}


def test_a_and_b_are_inputs_with_defaults() -> None:
    session = plain_session(lora.add(two_layers(), rank=2))
    assert [value.name for value in session.get_inputs()] == ["images"]
    assert [value.name for value in session.get_overridable_initializers()] == [
        "fc1.lora_A.weight",
        "fc1.lora_B.weight",
        "fc2.lora_A.weight",
        "fc2.lora_B.weight",
    ]


# --------------------------------------------------------------------------------- what is meant


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (None, {"fc1", "fc2"}),
        (["fc1"], {"fc1"}),
        ("fc1.weight", {"fc1"}),
        (["*2.weight"], {"fc2"}),
        (["fc?"], {"fc1", "fc2"}),
        (["fc2", "fc1.*"], {"fc1", "fc2"}),
    ],
)
def test_targets(targets: Any, layers: set[str]) -> None:
    found = lora.add(two_layers(), targets=targets)
    assert {name.split(".lora_")[0] for name in values(found) if ".lora_" in name} == layers


@pytest.mark.quick(3)
@pytest.mark.parametrize("head", ["lm_head", "embed_out"])
@pytest.mark.parametrize("end", ["plain", "bias", "soft cap", "softmax", "Constant nodes", "last"])
def test_all_linear_is_what_peft_means(head: str, end: str) -> None:
    """Every linear layer except the output layer, and neither convolutions nor embeddings."""
    model = language_model(head, end)
    before = model.SerializeToString(deterministic=True)
    inner = {"layer.0", "layer.1"}
    targets: list[tuple[Any, set[str]]] = [
        ("all-linear", inner),
        (["all-linear"], inner),
        (["all-linear", head], {*inner, head}),
        (None, {*inner, head, "patches"}),
    ]
    with all_violations() as check:
        for given, layers in targets:
            with check(given):
                found = lora.add(model, rank=2, targets=given)
                modules = {name.split(".lora_")[0] for name in values(found) if ".lora_" in name}
                assert modules == layers
                assert model.SerializeToString(deterministic=True) == before


def language_model(head: str, end: str) -> onnx.ModelProto:
    """Patches and tokens, two linear layers with a residual connection, and an output layer."""
    with Tape(name="language_model") as tape:
        images = tape.input("images", F, ["batch", 3, 5])
        ids = tape.input("ids", np.int64, ["batch", 5])
        patches = tape.initializer("patches.weight", normal(4, 3, 1))
        x = op.Transpose(op.Conv(images, patches), perm=[0, 2, 1])
        x = x + op.Gather(tape.initializer("embedding.weight", normal(7, 4)), ids)
        key = x @ tape.initializer("layer.0.weight", normal(4, 4))
        x = x + op.Tanh(key @ tape.initializer("layer.1.weight", normal(4, 4)))
        y = x @ tape.initializer(f"{head}.weight", normal(4, 7))
        if end == "last":
            y = op.Reshape(y[:, -1:], [-1, 7])
        if end == "bias":
            y = y + tape.initializer(f"{head}.bias", normal(7))
        if end == "soft cap":
            y = op.Tanh(y / 30.0) * 30.0
        if end == "Constant nodes":
            y = op.Cast(y, to=1) * op.Constant(value=np.array(0.5, F))
        if end == "softmax":
            y = op.Softmax(y, axis=-1)
        tape.output(y, "logits")
        tape.output(op.Transpose(op.Reshape(key, [0, 5, 2, 2]), perm=[0, 2, 1, 3]), "present.key")
    return tape.model()


def test_all_linear_of_an_encoder_has_its_last_layer() -> None:
    """The last linear layer is not the output layer if a residual connection follows it."""

    def emit(x: Any, weight: Any, scale: Any) -> Any:
        return op.LayerNormalization(x + x @ weight, scale)

    model = built(ROWS, emit, weight=normal(6, 6), scale=normal(6))
    found = lora.add(model, rank=2, targets="all-linear")
    assert [name for name in values(found) if name.endswith("A.weight")] == ["fc.lora_A.weight"]


def test_all_linear_of_a_model_with_an_output_layer_only() -> None:
    model = built(ROWS, lambda x, weight: x @ weight, weight=normal(6, 4))
    with pytest.raises(ModelError, match=r"targets: 'all-linear' matches no layer: it is every "):
        lora.add(model, targets="all-linear")


def test_layers_that_are_left_out_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def emit(x: Any, weight: Any, grouped: Any) -> Any:
        return op.Conv(op.Conv(x, grouped, group=3), weight)

    model = built(IMAGES, emit, weight=normal(4, 3, 1, 1), grouped=normal(3, 1, 3, 3))
    for targets in (None, ["fc*"]):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "ortops"):
            found = lora.add(model, rank=np.int64(2), alpha=F(4), targets=targets)
        assert (
            "1 layers get no adapter, such as Conv node 'Conv': an adapter needs group=1, got 3"
            in caplog.text
        )
        assert [n for n in values(found) if ".lora_" in n] == [
            "fc.lora_A.weight",
            "fc.lora_B.weight",
        ]


def test_embeddings_and_constants_of_exporters_are_not_meant_by_default() -> None:
    found = lora.add(tied())
    assert {name for name in values(found) if name.endswith("A.weight")} == {"head.lora_A.weight"}


def refused_case(emit: Any, x: np.ndarray = ROWS, **weights: np.ndarray) -> onnx.ModelProto:
    return built(x, emit, **weights)


REFUSED: dict[str, tuple[Any, str]] = {
    "groups": (
        lambda: refused_case(
            lambda x, weight: op.Conv(x, weight, group=3), IMAGES, weight=normal(6, 1, 3, 3)
        ),
        r"Conv node '.*': an adapter needs group=1, got 3",
    ),
    "a left factor": (
        lambda: refused_case(lambda x, weight: weight @ x, weight=normal(4, 5)),
        r"MatMul node '.*': an adapter needs a right factor, but weight 'fc.weight' is the left",
    ),
    "many matrices": (
        lambda: refused_case(
            lambda x, weight: op.Unsqueeze(x, [1]) @ weight, weight=normal(5, 6, 4)
        ),
        r"MatMul node '.*': an adapter needs a matrix, but weight 'fc.weight' is \[5, 6, 4\]",
    ),
    "integers": (
        lambda: refused_case(
            lambda x, weight: op.Cast(op.MatMulInteger(op.Cast(x, to=3), weight), to=1),
            weight=np.ones((6, 4), np.int8),
        ),
        r"MatMulInteger node '.*': a MatMulInteger gets an adapter if its first input comes from",
    ),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED)
def test_layers_that_take_no_adapter(model: Any, message: str) -> None:
    with pytest.raises(
        UnsupportedError, match=message + r".*; no other node of the model can have"
    ):
        lora.add(model())
    with pytest.raises(UnsupportedError, match=message + r".*; remove 'fc\*' from targets"):
        lora.add(model(), targets=["fc*"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, r"rank must be an integer >= 1, got 0"),
        ({"rank": 2.0}, r"rank must be an integer >= 1, got 2.0"),
        ({"rank_pattern": {"fc1": -1}}, r"rank_pattern 'fc1' must be an integer >= 1, got -1"),
        ({"alpha": 0}, r"alpha must be a finite number > 0, got 0"),
        ({"alpha": float("nan")}, r"alpha must be a finite number > 0, got nan"),
        ({"alpha_pattern": {"x": "1"}}, r"alpha_pattern 'x' must be a finite number > 0, got '1'"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern: invalid pattern '\(': a gr"),
        (
            {"rank_pattern": {"fc3": 2}},
            r"rank_pattern: 'fc3' matches no layer that gets an adapter; did",
        ),
        (
            {"alpha_pattern": {"f": 2}},
            r"alpha_pattern: 'f' matches no layer that gets an adapter; ",
        ),
        ({"rank_pattern": [4]}, r"rank_pattern must map patterns of layers to numbers, got \[4\]"),
        ({"seed": -1}, r"seed must be an integer >= 0, got -1"),
        ({"seed": "a"}, r"seed must be an integer >= 0, got 'a'"),
        ({"targets": 3}, r"targets must be names or patterns, got 3"),
        ({"targets": []}, r"targets must name at least one weight or layer, got an empty list"),
        ({"targets": [1]}, r"targets must be names or patterns, got 1"),
        (
            {"targets": ["fc3"]},
            r"targets: 'fc3' matches no weight of a .*; did you mean 'fc[12]'\?",
        ),
        ({"targets": ["fc1.bias"]}, r"targets: 'fc1.bias' matches no weight of a MatMul, Gemm"),
    ],
)
def test_settings_that_are_not_legal(settings: dict[str, Any], message: str) -> None:
    kind = ArgumentError if " must " in message else ModelError
    with pytest.raises(kind, match=message):
        lora.add(two_layers(), **settings)


def test_models_that_are_refused(tmp_path: Path) -> None:
    found = lora.add(two_layers())
    with pytest.raises(ModelError, match=r"model: it already has an adapter; merge it with "):
        lora.add(found)
    built = ortops.build_training_model(found, loss="MeanSquaredError", optimizer="SGD")
    with pytest.raises(ModelError, match=r"model: it has training_info, .*inference_model\(\)"):
        lora.merge(built)
    built = ortops.build_training_model(two_layers(), loss="MeanSquaredError", optimizer="SGD")
    with pytest.raises(ModelError, match=r"model: it has training_info, .*inference_model\(\)"):
        lora.add(built)
    with pytest.raises(
        ModelError, match=r"model: an adapter needs a MatMul, Gemm, Conv or MatMulNBits nod"
    ):
        lora.add(built_without_weight())
    for use in (lora.merge, lambda m: lora.save_adapter(m, tmp_path / "a")):
        with pytest.raises(
            ModelError, match=r"model: it has no adapter; add one with ortops.lora.add or "
        ):
            use(two_layers())


def built_without_weight() -> onnx.ModelProto:
    return built(ROWS, lambda x: op.Relu(x))


def test_an_adapter_that_was_taken_apart() -> None:
    found = lora.add(two_layers())
    broken = onnx.ModelProto()
    broken.CopyFrom(found)
    del broken.graph.input[1]
    with pytest.raises(
        ModelError,
        match=r"'fc1.lora_A.weight' of its adapter must be both an input and an initializer",
    ):
        lora.merge(broken)
    broken.CopyFrom(found)
    (entry,) = (entry for entry in broken.metadata_props if entry.key == "ortops.lora")
    for text in ("[]", "{", '{"modules": {"x": {}}}', '{"modules": {}, "other": 1}'):
        entry.value = text
        with pytest.raises(ModelError, match=r"metadata_props 'ortops.lora'.*; remove the entry"):
            lora.merge(broken)
    broken.CopyFrom(found)
    add = next(node for node in broken.graph.node if node.op_type == "Add")
    add.op_type = "Sub"
    with pytest.raises(ModelError, match=r"layer 'fc1' was changed: no node adds the adapter to '"):
        lora.merge(broken)


@pytest.mark.parametrize(
    ("name", "large", "dtype"), [("MatMul in float16", 6e4, "float16"), ("MatMul", 3e38, "float32")]
)
def test_a_merged_weight_that_overflows_is_refused(name: str, large: float, dtype: str) -> None:
    """Not written as infinity: the sum is within float32 where the weight's type is float16."""
    model = adapted(CASES[name])
    fill = {key: np.full_like(array, 1) for key, array in random_adapter(model).items()}
    (b,) = (key for key in fill if ".lora_B" in key)
    fill[b] = fill[b] * fill[b].dtype.type(large)
    with pytest.raises(ModelError) as raised:
        lora.merge(with_values(model, fill))
    assert str(raised.value) == (
        f"model: merging the adapter of layer 'fc' overflows {dtype}, the type of its weight "
        "'fc.weight'; keep the adapter, or give a model of a wider type"
    )


def test_merging_where_the_weight_has_no_effect() -> None:
    model = built(ROWS, lambda x, weight: op.Gemm(x, weight, None, alpha=0.0), weight=normal(6, 4))
    with pytest.raises(
        UnsupportedError, match=r"Gemm node '.*': its weight has no effect, as its alpha is 0"
    ):
        lora.merge(lora.add(model))


# ------------------------------------------------------------------------------------- training


def test_the_adapter_alone_is_trained(caplog: pytest.LogCaptureFixture) -> None:
    found = lora.add(two_layers(), rank=2)
    with caplog.at_level(logging.WARNING, "ortops"):
        session = trained(found)
    assert "only the adapter is trained (rank 2, alpha 16, on 2 layers); trainable=" in caplog.text
    before, after = values(found), values(session.inference_model())
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {name for name in before if ".lora_" in name}
    np.testing.assert_allclose(
        outputs(session.inference_model(), {"images": ROWS})[0],
        outputs(lora.merge(session.inference_model()), {"images": ROWS})[0],
        atol=1e-5,
    )


def test_what_is_named_goes_before() -> None:
    session = trained(lora.add(two_layers(), rank=2), trainable=["fc1.bias", "fc2.lora_*"])
    names = {"fc1.bias", "fc2.lora_A.weight", "fc2.lora_B.weight"}
    assert {name for name in session.state if name.endswith(".V")} == {f"{n}.V" for n in names}


@pytest.mark.parametrize("scale", [1, 8])
def test_gradients_of_an_adapter(scale: int) -> None:
    """Of one step of SGD, against derivatives that are written out, in float64.

    B / scale moves by scale times the gradient of B, so B moves by its square.
    """
    model = built(ROWS, lambda x, weight: x @ weight, weight=normal(6, 4))
    model = lora.add(model, rank=2, alpha=2 * scale)
    new = random_adapter(model)
    model = with_values(model, new)
    targets = normal(5, 4, seed=5)
    built_model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(built_model)
    session.learning_rate = 1.0
    given = session.gradients({"x": ROWS, "targets": targets})
    session.step({"x": ROWS, "targets": targets})
    x, a, b = (v.astype(np.float64) for v in (ROWS, *new.values()))
    g = 2 * (x @ values(model)["fc.weight"] + x @ a @ b - targets) / targets.size
    for name, gradient in (("A", x.T @ g @ b.T), ("B", (x @ a).T @ g)):
        factor = scale**2 if name == "B" else 1
        name = f"fc.lora_{name}.weight"
        np.testing.assert_allclose(given[name], gradient, atol=1e-5)
        moved = (new[name] - session.state[name]) / factor
        np.testing.assert_allclose(moved, gradient, atol=1e-5)


@pytest.mark.quick(2)
@EVERY
def test_every_kind_of_layer_learns(case: Case) -> None:
    model = adapted(case)
    optimizer = ortops.optimizers.SGD(learning_rate=0.02)
    built_model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer=optimizer)
    session = TrainingSession(built_model)
    (targets,) = outputs(with_values(model, random_adapter(model)), case.feeds)
    losses = [session.step({**case.feeds, "targets": targets})["loss"] for _ in range(150)]
    assert losses[-1] < 0.9 * losses[0]
    after, before = values(session.inference_model()), values(case.model())
    assert all((after[name] == before[name]).all() for name in before)


def test_a_trained_file_has_the_inputs(tmp_path: Path) -> None:
    """Also of an opset that is converted; and it goes on exactly where it stopped."""
    model = lora.add(two_layers(opset=13), rank=2)
    session = trained(model, steps=3)
    session.save(tmp_path / "trained.onnx")
    names = {value.name for value in plain_session(tmp_path / "trained.onnx").get_inputs()}
    assert names == {"images"}
    found = plain_session(tmp_path / "trained.onnx").get_overridable_initializers()
    assert {value.name for value in found} == {n for n in values(model) if ".lora_" in n}
    feeds = {"images": ROWS, "targets": normal(5, 4, seed=9)}
    again = TrainingSession(tmp_path / "trained.onnx")
    for _ in range(3):
        assert session.step(feeds)["loss"] == again.step(feeds)["loss"]
    for name, array in session.state.items():
        np.testing.assert_array_equal(again.state[name], array)
    back = session.inference_model(original=model)
    assert back.opset_import[0].version == 13
    np.testing.assert_allclose(
        outputs(back, {"images": ROWS})[0],
        outputs(session.inference_model(), {"images": ROWS})[0],
        atol=1e-5,
    )


def test_a_step_lowers_to_standard_nodes() -> None:
    built_model = ortops.build_training_model(
        lora.add(two_layers(), rank=2), loss="MeanSquaredError", optimizer="Adam"
    )
    lowered = ortops.lower(ortops.step_graph(built_model))
    assert {node.domain for node in lowered.graph.node} == {""}
    feeds = {"images": ROWS, "targets": normal(5, 4, seed=9)}
    session = TrainingSession(built_model)
    found = plain_session(lowered)
    names = [value.name for value in found.get_outputs()]
    step = dict(zip(names, found.run(None, feeds), strict=True))
    expected = session.step(feeds)["loss"]
    np.testing.assert_allclose(step["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        step["fc2.lora_B.weight_new"], session.state["fc2.lora_B.weight"], atol=1e-6
    )


def test_second_order() -> None:
    """The derivative of |∂ sum(y²) / ∂A|² with respect to B, by finite differences."""
    model = built(ROWS, lambda x, weight: op.Tanh(x @ weight), weight=normal(6, 4))
    model = lora.add(model, rank=2)
    new = random_adapter(model)
    model = with_values(model, new)
    domain = "ai.onnx.preview.training"
    a, b = new
    node = helper.make_node
    model.graph.node.extend(
        [
            node("Mul", ["y", "y"], ["squares"]),
            node("Gradient", [a], ["first"], domain=domain, xs=[a], y="squares"),
            node("Mul", ["first", "first"], ["norm"]),
            node("Gradient", [b], ["second"], domain=domain, xs=[b], y="norm"),
        ]
    )
    del model.graph.output[:]
    info = helper.make_tensor_value_info
    model.graph.output.extend(
        [info(n, 1, list(new[of].shape)) for n, of in (("norm", a), ("second", b))]
    )
    model.opset_import.append(helper.make_opsetid(domain, 1))
    session = plain_session(ortops.lower(model))
    direction, ε = normal(*new[b].shape, seed=3), F(1e-2)
    ends = [session.run(["norm"], {"x": ROWS, b: new[b] + s * ε * direction})[0] for s in (1, -1)]
    difference = (ends[0].astype(np.float64).sum() - ends[1].astype(np.float64).sum()) / (2 * ε)
    (second,) = session.run(["second"], {"x": ROWS})
    np.testing.assert_allclose((second * direction).sum(), difference, rtol=1e-2)
    assert abs(difference) > 1


def test_batch_normalization_is_frozen() -> None:
    with Tape(name="normalized") as tape:
        x = tape.input("x", F, ["batch", 3, 9, 8])
        h = op.Conv(x, tape.initializer("conv.weight", normal(4, 3, 3, 3)))
        statistics = {"scale": 1.5, "bias": 0.5, "mean": 0.2, "var": 2.0}
        read = [tape.initializer(f"bn.{n}", np.full(4, v, F)) for n, v in statistics.items()]
        tape.output(op.BatchNormalization(h, *read), "y")
    model = lora.add(tape.model(), rank=2)
    session = TrainingSession(
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    )
    (y,) = outputs(model, {"x": IMAGES})
    session.step({"x": IMAGES, "targets": y + 1})
    after = values(session.inference_model())
    for name, value in statistics.items():
        np.testing.assert_array_equal(after[f"bn.{name}"], np.full(4, value, F))


def test_check_shows_the_adapter() -> None:
    model = lora.add(two_layers(), rank=2, alpha=4)
    report = check(model)
    assert report.adapter == "rank 2, alpha 4, on 2 layers"
    assert "adapter (ortops.lora): rank 2, alpha 4, on 2 layers" in str(report)
    assert list(report.parameters) == [name for name in values(model) if ".lora_" in name]
    assert report.parameter_count == 2 * (6 + 16 + 16 + 4)
    assert report.reasons["fc1.weight"] == "belongs to the adapter's base"
    assert not report.problems
    assert not check(two_layers()).adapter
    built_model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    assert check(built_model).parameters == report.parameters


OCR = ".models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"


@pytest.mark.slow
@pytest.mark.fetched(OCR)
def test_a_classifier_of_texts(tmp_path: Path) -> None:
    """Of opset 11, with batch normalization and convolutions of groups, which get no adapter."""
    model = lora.add(OCR, rank=2)
    feeds = {model.graph.input[0].name: normal(2, 3, 48, 192)}
    (y,) = outputs(onnx.load(OCR), feeds)
    # onnxruntime folds the normalization into convolutions, unless something reads in between.
    np.testing.assert_allclose(outputs(model, feeds)[0], y, atol=1e-5)
    session = TrainingSession(ortops.build_training_model(model, loss="L1", optimizer="Adam"))
    session.learning_rate = 0.01
    losses = [session.step({**feeds, "targets": 1 - y})["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    session.save(tmp_path / "trained.onnx")
    lora.save_adapter(tmp_path / "trained.onnx", tmp_path / "a.onnx_adapter")
    (found,) = plain_session(model).run(None, feeds, with_adapter(tmp_path / "a.onnx_adapter"))
    (expected,) = outputs(session.inference_model(), feeds)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    merged = lora.merge(session.inference_model(original=model))
    np.testing.assert_allclose(outputs(merged, feeds)[0], expected, atol=1e-4)


# ----------------------------------------------------------------------------------------- files


def with_adapter(path: Path) -> onnxruntime.RunOptions:
    """Returns options of stock onnxruntime that make an adapter active."""
    adapter = onnxruntime.LoraAdapter()
    adapter.Load(str(path))
    options = onnxruntime.RunOptions()
    options.add_active_adapter(adapter)
    with_adapter.kept.append(adapter)  # which the options do not keep alive
    return options


with_adapter.kept = []  # type: ignore[attr-defined]


@pytest.mark.quick(4)
@EVERY
def test_two_adapters_in_turn_on_one_session(case: Case, tmp_path: Path) -> None:
    base = adapted(case)
    models = [with_values(base, random_adapter(base, seed)) for seed in (1, 2)]
    paths = [tmp_path / f"{index}.onnx_adapter" for index in range(2)]
    for model, path in zip(models, paths, strict=True):
        lora.save_adapter(model, path)
    session = plain_session(base)
    (plain,) = outputs(case.model(), case.feeds)
    for index in (0, 1, 0):
        (found,) = session.run(None, dict(case.feeds), with_adapter(paths[index]))
        (expected,) = outputs(models[index], case.feeds)
        np.testing.assert_array_equal(found, expected)
        assert abs(found - plain).max() > 0.1
        np.testing.assert_array_equal(session.run(None, dict(case.feeds))[0], plain)
        loaded = lora.load_adapter(base, paths[index])
        np.testing.assert_array_equal(outputs(loaded, case.feeds)[0], expected)


def test_an_adapter_of_a_training(tmp_path: Path) -> None:
    """It is for the base that it was added to, though that has another opset by then."""
    base = lora.add(two_layers(opset=13), rank=2)
    session = trained(base)
    session.save(tmp_path / "trained.onnx")
    lora.save_adapter(tmp_path / "trained.onnx", tmp_path / "a.onnx_adapter")
    expected = session.inference_model()
    options = with_adapter(tmp_path / "a.onnx_adapter")
    (found,) = plain_session(base).run(None, {"images": ROWS}, options)
    np.testing.assert_allclose(found, outputs(expected, {"images": ROWS})[0], atol=1e-6)
    loaded = lora.load_adapter(base, tmp_path / "a.onnx_adapter")
    np.testing.assert_array_equal(
        values(loaded)["fc1.lora_B.weight"], session.state["fc1.lora_B.weight"]
    )


@pytest.mark.slow
def test_adapter_files_that_do_not_fit(tmp_path: Path) -> None:
    base = lora.add(two_layers(), rank=2)
    path = tmp_path / "a.onnx_adapter"
    lora.save_adapter(base, path)
    other = with_values(two_layers(), {"fc1.bias": normal(16)})
    for model, message in (
        (
            lora.add(other, rank=2),
            r"a.onnx_adapter': the adapter belongs to another base, with other ",
        ),
        (
            lora.add(two_layers(), rank=3),
            r"'fc1.lora_A.weight' must be float32\[6, 3\] as in the model, got float32\[6, 2\]",
        ),
        (lora.add(two_layers(), rank=2, targets=["fc1"]), r"the model's adapter has no 'fc2.lora_"),
        (
            two_layers(),
            r"model: it has no adapter; add one with ortops.lora.add or ortops.lora.from_peft",
        ),
    ):
        with pytest.raises(ModelError, match=message):
            lora.load_adapter(model, path)
    lora.save_adapter(lora.add(two_layers(), rank=2, targets=["fc1"]), path)
    with pytest.raises(ModelError, match=r"'fc2.lora_A.weight' of the model's adapter is missing"):
        lora.load_adapter(base, path)
    path.write_bytes(b"no adapter")
    with pytest.raises(ModelError, match=r"a.onnx_adapter': not an adapter of onnxruntime \("):
        lora.load_adapter(base, path)
    with pytest.raises(ModelError, match=r"missing': No such file or directory; pass the path of"):
        lora.load_adapter(base, tmp_path / "missing")


def test_an_adapter_of_another_tool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = lora.add(two_layers(), rank=2)
    new = random_adapter(base)
    form = onnxruntime.AdapterFormat()
    form.set_adapter_version(1)
    form.set_model_version(1)
    form.set_parameters(
        {n: onnxruntime.OrtValue.ortvalue_from_numpy(array) for n, array in new.items()}
    )
    form.export_adapter(str(tmp_path / "other.onnx_adapter"))
    with caplog.at_level(logging.WARNING, "ortops"):
        loaded = lora.load_adapter(base, tmp_path / "other.onnx_adapter")
    assert "does not identify its base (its model version is 1); its names" in caplog.text
    for name, array in new.items():
        np.testing.assert_array_equal(values(loaded)[name], array)


def test_a_base_that_was_trained_too(tmp_path: Path) -> None:
    session = trained(lora.add(two_layers(), rank=2), trainable=["fc1.bias", "fc*.lora_*"])
    for write in (lora.save_adapter, lora.to_peft):
        with pytest.raises(
            ModelError,
            match=r"inputs, outputs or base weights have changed since the adapter was added",
        ):
            write(session.inference_model(), tmp_path / "a")
    with pytest.raises(ModelError, match=r"its nodes, inputs, outputs or base weights"):
        lora.save_adapter(ortops.derivatives.gradient(lora.add(two_layers())), tmp_path / "a")
    assert not list(tmp_path.iterdir())
    lora.merge(session.inference_model())


def test_external_data_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "base.onnx"
    onnx.save(two_layers(), path, save_as_external_data=True, size_threshold=0, location="data")
    model = lora.add(path, rank=2)
    external = {t.name for t in model.graph.initializer if t.external_data}
    assert external == set(values(two_layers()))
    onnx.save(model, tmp_path / "adapted.onnx")
    lora.save_adapter(tmp_path / "adapted.onnx", tmp_path / "a.onnx_adapter")
    inside = lora.add(two_layers(), rank=2)
    loaded = lora.load_adapter(inside, tmp_path / "a.onnx_adapter")  # the same base
    assert loaded.SerializeToString() == inside.SerializeToString()
    session = plain_session(tmp_path / "adapted.onnx")
    np.testing.assert_array_equal(
        session.run(None, {"images": ROWS})[0], outputs(two_layers(), {"images": ROWS})[0]
    )
    with pytest.raises(
        ModelError,
        match=r"its data are in the external file 'data', which a model in memory cannot locate",
    ):
        lora.add(onnx.load(path, load_external_data=False))


# ------------------------------------------------------------------------------------------ PEFT

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["fc1"]}
A, B = normal(2, 6, seed=1), normal(16, 2, seed=2)
KEY = "base_model.model.fc1.lora_{}.weight"
PAIR = {KEY.format("A"): A, KEY.format("B"): B}


def written(folder: Path, tensors: Any = PAIR, **config: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 3),
        ({"use_rslora": True}, 6 / np.sqrt(2)),
        ({"alpha_pattern": {"fc1": 1}}, 0.5),
        ({"r": 5, "rank_pattern": {"fc[0-9]": 2}, "fan_in_fan_out": True}, 3),
    ],
)
def test_a_folder_of_peft(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    model = lora.from_peft(two_layers(), written(tmp_path, **config))
    found = values(model)
    np.testing.assert_array_equal(found["fc1.lora_A.weight"], A.T)
    np.testing.assert_allclose(found["fc1.lora_B.weight"], scale * B.T, rtol=1e-6)
    h = ROWS @ found["fc1.weight"].T + found["fc1.bias"] + scale * (ROWS @ A.T @ B.T)
    expected = np.maximum(h, 0) @ found["fc2.weight"].T + found["fc2.bias"]
    np.testing.assert_allclose(outputs(model, {"images": ROWS})[0], expected, atol=1e-4)
    lora.to_peft(model, tmp_path / "new" / "folder")
    again = lora.from_peft(two_layers(), tmp_path / "new" / "folder")
    for name, array in values(again).items():
        np.testing.assert_allclose(array, found[name], rtol=1e-6)


def test_a_folder_in_bfloat16(tmp_path: Path) -> None:
    """Of which numpy has no type: the upper halves of float32 numbers."""
    folder = written(tmp_path)
    halves = {name: (array.view(np.uint32) >> 16).astype("<u2") for name, array in PAIR.items()}
    header, content = {}, b""
    for name, half in halves.items():
        ends = [len(content), len(content) + half.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(half.shape), "data_offsets": ends}
        content += half.tobytes()
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + content
    (folder / "adapter_model.safetensors").write_bytes(data)
    found = values(lora.from_peft(two_layers(), folder))
    np.testing.assert_allclose(found["fc1.lora_A.weight"], A.T, rtol=2**-7)
    np.testing.assert_allclose(found["fc1.lora_B.weight"], 3 * B.T, rtol=2**-7)


def renamed(tensors: Any, old: str, new: str) -> Any:
    return {name.replace(old, new): array for name, array in tensors.items()}


@pytest.mark.parametrize(
    ("tensors", "config", "error", "message"),
    [
        (PAIR, {"peft_type": "IA3"}, UnsupportedError, r"peft_type must be 'LORA', got 'IA3'"),
        (
            PAIR,
            {"use_dora": True},
            ModelError,
            r"layer 'fc1' has no magnitude_vector; write the adapter again",
        ),
        (
            PAIR,
            {"bias": "all"},
            ModelError,
            r"it must have 'fc1.bias' once, with 16 numbers, as modules_to_save or bias",
        ),
        (
            PAIR,
            {"bias": "boft_only"},
            ModelError,
            r"'bias' must be one of none, all, lora_only, go",
        ),
        (PAIR, {"modules_to_save": 3}, ModelError, r"'modules_to_save' must be an array of names"),
        (
            PAIR,
            {"modules_to_save": ["fc2"]},
            ModelError,
            r"it must have 'fc2.weight' once, .*json say, got \[\] of shape",
        ),
        (
            PAIR,
            {"use_qalora": True},
            UnsupportedError,
            r"the setting use_qalora=True is not supported",
        ),
        (PAIR, {"init_lora_weights": "olora"}, UnsupportedError, r"'olora' changes the we"),
        (PAIR, {"r": "2"}, ModelError, r"'r' must be an integer >= 1, got '2'; give"),
        (PAIR, {"lora_alpha": None}, ModelError, r"'lora_alpha' must be a finite number other tha"),
        (PAIR, {"lora_alpha": 0}, ModelError, r"'lora_alpha' must be a finite number .*, got 0; g"),
        (PAIR, {"rank_pattern": [2]}, ModelError, r"'rank_pattern' must be an object of integers"),
        (PAIR, {"alpha_pattern": {"fc1": "a"}}, ModelError, r"'alpha_pattern' must be an object o"),
        (
            PAIR,
            {"r": 3},
            ModelError,
            r"layer 'fc1': its rank must be 3 as in adapter_config.json, got 2",
        ),
        (
            renamed(PAIR, "fc1", "fc3"),
            {},
            ModelError,
            r"layer 'fc3': the model has no such layer; ",
        ),
        (renamed(PAIR, "fc1", "fc2"), {}, ModelError, r"got \[2, 6\] and \[16, 2\]"),
        (
            renamed(PAIR, "lora_B", "lora_E"),
            {},
            UnsupportedError,
            r"fc1.lora_E.weight' is not a LoRA matrix, or is a weight of the base that differs",
        ),
        ({KEY.format("A"): A}, {}, ModelError, r"layer 'fc1' has no B; write the adapter again"),
        ({}, {}, ModelError, r"it has no tensors; write the adapter again"),
        (
            PAIR | renamed(PAIR, "fc1", "net.fc1"),
            {},
            ModelError,
            r"the model's 'fc1' also matches '(net.)?fc1'; export the module that PEFT wraps",
        ),
        (
            {name: array.astype(np.int8) for name, array in PAIR.items()},
            {},
            UnsupportedError,
            r"must be of type float16, bfloat16, float32 or float64, got int8",
        ),
    ],
)
def test_folders_that_are_refused(
    tensors: Any, config: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        lora.from_peft(two_layers(), written(tmp_path, tensors, **config))


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"json': No such file or directory; give a folder written by P"
    ):
        lora.from_peft(two_layers(), tmp_path)
    (written(tmp_path) / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ModelError, match=r"safetensors': not a safetensors file \("):
        lora.from_peft(two_layers(), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"No such file or directory; save the adapter in PEFT wi"):
        lora.from_peft(two_layers(), tmp_path)
    (tmp_path / "adapter_config.json").write_text("no")
    with pytest.raises(ModelError, match=r"json': invalid JSON: "):
        lora.from_peft(two_layers(), tmp_path)


def test_a_layer_that_may_be_several(tmp_path: Path) -> None:
    with Tape(name="twice") as tape:
        x = tape.input("images", F, ["batch", 6])
        for name in ("a", "b"):
            weight = tape.initializer(f"{name}.fc1.weight", normal(6, 16))
            tape.output(x @ weight, name)
    with pytest.raises(
        ModelError, match=r"layer 'fc1' matches several layers of the model: 'a.fc1' \("
    ):
        lora.from_peft(tape.model(), written(tmp_path))


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package reads what ortops writes, but neither writing nor reading needs it."""
    model = lora.add(two_layers())
    model = with_values(model, random_adapter(model))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "safetensors", None)
        lora.to_peft(model, tmp_path)
        found = values(lora.from_peft(two_layers(), tmp_path))
    for name, array in values(model).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6)
    with safetensors.safe_open(tmp_path / "adapter_model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        a = file.get_tensor(KEY.format("A"))
    np.testing.assert_array_equal(a, found["fc1.lora_A.weight"].T)


# ------------------------------------------------------------------------------------- quantized


class Calibration(CalibrationDataReader):
    def __init__(self) -> None:
        self._batches = iter([{"images": normal(20, 6, seed=seed) * 2} for seed in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def test_a_model_that_onnxruntime_quantized(tmp_path: Path) -> None:
    """Its weights stay int8; the adapter's part is added behind what rounds the base's."""
    onnx.save(two_layers(), tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "int8.onnx",
        Calibration(),
        quant_format=QuantFormat.QDQ,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    base = onnx.load(tmp_path / "int8.onnx")
    model = lora.add(base, rank=2)
    feeds = {"images": ROWS}
    np.testing.assert_array_equal(outputs(model, feeds)[0], outputs(base, feeds)[0])
    session = trained(model, steps=20)
    after = session.inference_model()
    kept = values(base)
    assert all((array == kept[n]).all() for n, array in values(after).items() if n in kept)
    assert sum(t.data_type == onnx.TensorProto.INT8 for t in after.graph.initializer) >= 2
    targets = normal(5, 4, seed=9)
    errors = [((outputs(m, feeds)[0] - targets) ** 2).mean() for m in (base, after)]
    assert errors[1] < 0.9 * errors[0]
    lora.save_adapter(after, tmp_path / "a.onnx_adapter")
    options = with_adapter(tmp_path / "a.onnx_adapter")
    np.testing.assert_allclose(
        plain_session(model).run(None, feeds, options)[0], outputs(after, feeds)[0], atol=1e-5
    )
    with pytest.raises(
        UnsupportedError, match=r"DequantizeLinear node .* the output of layer 'fc1' is quantized"
    ):
        lora.merge(after, dequantize=True)


@NEEDS_TOOL
def test_four_bits_stay_four_bits() -> None:
    base = four_bits(WIDE)
    model = lora.add(base, rank=2)
    kinds = [node.op_type for node in model.graph.node]
    assert "MatMulNBits" in kinds
    sizes = {name: array.nbytes for name, array in values(model).items()}
    assert sum(size for name, size in sizes.items() if "lora" not in name) == sum(
        array.nbytes for array in values(base).values()
    )


# ------------------------------------------------------------------------------------ dropout


def wide_layer(opset: int = 21) -> onnx.ModelProto:
    """Two linear layers of the same 64 inputs, whose weights are zero."""
    with Tape(name="wide", opset=opset) as tape:
        x = tape.input("x", F, ["n", 64])
        weights = [tape.initializer(f"w{i}", np.zeros((64, 8), F)) for i in range(2)]
        tape.output(op.Concat(*(x @ w for w in weights), axis=1), "y")
    return tape.model()


def masks(session: TrainingSession, x: Any) -> list[Any]:
    """What training multiplies the inputs of A by, given A = 1 and ones as inputs.

    The loss is the sum of outputs with B = 0, so its gradient by row i of B is the input i of B.
    """
    before = {name: array.copy() for name, array in session.parameters.items()}
    session.step({"x": x, "targets": np.zeros((len(x), 16), F)})
    return [
        before[name][:, 0] - array[:, 0]
        for name, array in session.parameters.items()
        if "lora_B" in name
    ]


def with_dropout(ratio: float, opset: int = 21) -> TrainingSession:
    model = lora.add(wide_layer(opset), rank=64, alpha=64, dropout=ratio)
    identity = {
        name: np.eye(64, dtype=F) for name in values(model) if name.endswith("lora_A.weight")
    }
    model = with_values(model, identity)
    trainable = ortops.build_training_model(
        model,
        loss=lambda y, targets: op.ReduceSum(y - targets, keepdims=0),
        optimizer="SGD",
        trainable=["*lora_B*"],
    )
    session = TrainingSession(trainable)
    session.learning_rate = 1.0
    return session


@pytest.mark.quick(1)
@pytest.mark.parametrize("opset", [11, 21])
def test_dropout_drops_inputs_of_a_in_training_only(opset: int) -> None:
    session = with_dropout(0.25, opset)
    ones = np.ones((1, 64), F)
    drawn = [mask for _ in range(8) for mask in masks(session, ones)]
    assert {round(float(number), 5) for mask in drawn for number in mask} == {
        0.0,
        round(1 / 0.75, 5),
    }
    dropped = np.mean([mask == 0 for mask in drawn])
    assert abs(dropped - 0.25) < 5 * np.sqrt(0.25 * 0.75 / (len(drawn) * 64))
    assert len({mask.tobytes() for mask in drawn}) == len(drawn)  # of each layer, in each step
    model = session.inference_model()
    parameters = values(model)
    expected = np.concatenate(
        [
            ones @ parameters[f"w{i}.lora_A.weight"] @ parameters[f"w{i}.lora_B.weight"]
            for i in (0, 1)
        ],
        axis=1,
    )
    np.testing.assert_allclose(outputs(model, {"x": ones})[0], expected, rtol=1e-5)
    np.testing.assert_allclose(session.predict({"x": ones})["y"], expected, rtol=1e-5)


@pytest.mark.slow
def test_training_with_dropout_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, part = with_dropout(0.5), with_dropout(0.5)
    x = normal(3, 64, seed=1)
    for _ in range(2):
        masks(whole, x), masks(part, x)
    part.save(tmp_path / "part.onnx")
    resumed = TrainingSession(tmp_path / "part.onnx")
    for _ in range(2):
        masks(whole, x), masks(resumed, x)
    for name, array in whole.parameters.items():
        np.testing.assert_array_equal(array, resumed.parameters[name])


def test_dropout_is_written_merged_and_read_from_peft(tmp_path: Path) -> None:
    base = two_layers()
    model = lora.add(base, rank=2, dropout=0.25)
    model = with_values(model, random_adapter(model))
    merged = lora.merge(model)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in base.graph.node]
    np.testing.assert_allclose(
        outputs(merged, {"images": ROWS})[0], outputs(model, {"images": ROWS})[0], atol=1e-5
    )
    lora.to_peft(model, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0.25
    again = lora.from_peft(base, tmp_path)
    assert [n.op_type for n in again.graph.node].count("Dropout") == 2
    without = lora.add(base, rank=2)
    lora.save_adapter(model, tmp_path / "a.onnx_adapter")  # of a training with dropout
    filled = lora.load_adapter(without, tmp_path / "a.onnx_adapter")
    assert {n: a.tolist() for n, a in values(filled).items()} == {
        n: a.tolist() for n, a in values(model).items()
    }


def test_embeddings_have_no_dropout() -> None:
    case = CASES["Gather"]
    model = lora.add(case.model(), rank=3, targets=case.targets, dropout=0.5)
    assert "Dropout" not in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.5, float("nan"), "0.1", True])
def test_ratios_that_are_refused(ratio: Any) -> None:
    with pytest.raises(ArgumentError, match="dropout must be a"):
        lora.add(two_layers(), dropout=ratio)


def test_dropout_inside_a_branch_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="inside a branch or a loop, where adapters cannot"):
        lora.add(branches(), dropout=0.1)
