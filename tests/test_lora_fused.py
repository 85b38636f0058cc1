"""Adapters of parts of fused layers, beside 16 bits, and of products of 8-bit integers.

The oracle is numpy: A, B and the scaling in float64, added to columns of what the base computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from lora_models import built, normal, outputs, random_adapter, values, with_values
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from running import plain_session

import ortops
from models import llama
from ortops import ArgumentError, ModelError, Tape, TrainingSession, UnsupportedError, lora, op

X = normal(5, 6)


def fused(scope: str = "layers.0.attn", sizes: tuple[int, ...] = (4, 2, 2)) -> onnx.ModelProto:
    """A layer qkv_proj or gate_up_proj whose output a Split takes apart."""
    last = "qkv_proj" if len(sizes) == 3 else "gate_up_proj"
    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        weight = tape.initializer(f"{scope}.{last}.MatMul.weight", normal(6, sum(sizes), seed=1))
        bias = tape.initializer(f"{scope}.{last}.bias", normal(sum(sizes), seed=2))
        parts = op.Split(x @ weight + bias, np.array(sizes, np.int64), axis=-1)
        for part, name in zip(parts, "qkv", strict=False):
            tape.output(op.Identity(part), name)
    return tape.model()


def layers(model: onnx.ModelProto) -> set[str]:
    return {n.removesuffix(".lora_A.weight") for n in values(model) if n.endswith("lora_A.weight")}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (None, ["qkv_proj"]),
        (["qkv_proj"], ["qkv_proj"]),
        (["*_proj"], ["qkv_proj"]),
        (["self_attn.qkv_proj"], ["qkv_proj"]),
        (["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        (["*v_proj"], ["v_proj"]),  # and not qkv_proj, whose name ends like that as well
        (["*[qk]_proj"], ["q_proj", "k_proj"]),
        (["layers.0.self_attn.k_proj"], ["k_proj"]),
        (["q_proj", "k_proj", "v_proj"], ["q_proj", "k_proj", "v_proj"]),
    ],
)
def test_targets_name_a_fused_layer_or_its_parts(targets: Any, expected: list[str]) -> None:
    found = lora.add(fused(), targets=targets)
    assert layers(found) == {f"layers.0.attn.{name}" for name in expected}


def test_a_fused_layer_is_linear() -> None:
    """In a model in which what computes the first output is a layer of its own."""
    found = lora.add(llama.llama(), targets="all-linear")
    assert "model.layers.0.attn.qkv_proj" in layers(found)


def test_a_fused_layer_and_its_part() -> None:
    with pytest.raises(
        ArgumentError, match=r"targets: 'layers.0.attn.q_proj' is a part of 'layers.0.attn.qkv_proj"
    ):
        lora.add(fused(), targets=["qkv_proj", "q_proj"])


COLUMNS = {"q_proj": (0, 4), "k_proj": (4, 6), "v_proj": (6, 8)}


@pytest.mark.parametrize("names", [["q_proj", "v_proj"], ["k_proj"], list(COLUMNS)])
def test_a_part_adds_to_its_columns(names: list[str], tmp_path: Path) -> None:
    base = fused()
    model = lora.add(base, 3, 6, names, rank_pattern={"v_proj": 1} if "v_proj" in names else None)
    expected = np.concatenate(outputs(base, {"x": X}), axis=1).astype(np.float64)
    np.testing.assert_array_equal(np.concatenate(outputs(model, {"x": X}), axis=1), expected)
    new = random_adapter(model)
    for name in names:
        a, b = (new[f"layers.0.attn.{name}.lora_{which}.weight"] for which in "AB")
        assert a.shape[1] == (1 if name == "v_proj" else 3)
        first, last = COLUMNS[name]
        assert b.shape[1] == last - first
        expected[:, first:last] += X.astype(np.float64) @ a @ b
    tuned = with_values(model, new)
    found = np.concatenate(outputs(tuned, {"x": X}), axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    merged = lora.merge(tuned)
    np.testing.assert_allclose(
        np.concatenate(outputs(merged, {"x": X}), axis=1), expected, atol=1e-4
    )
    assert [node.op_type for node in merged.graph.node] == [n.op_type for n in base.graph.node]

    lora.save_adapter(tuned, tmp_path / "a.onnx_adapter")
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(tmp_path / "a.onnx_adapter"))
    options.add_active_adapter(adapter)
    served = plain_session(model).run(None, {"x": X}, options)
    np.testing.assert_array_equal(np.concatenate(served, axis=1), found)


def test_parts_of_gate_up() -> None:
    model = lora.add(fused("layers.0.mlp", (3, 5)), 2, targets=["up_proj"])
    assert values(model)["layers.0.mlp.up_proj.lora_B.weight"].shape == (2, 5)


def test_parts_of_unknown_sizes_have_no_names() -> None:
    model = built(X, lambda x, weight: x @ weight, weight=normal(6, 8))
    text = onnx.printer.to_text(model).replace("fc.weight", "attn.qkv_proj.weight")
    with pytest.raises(ModelError, match=r"'q_proj' matches no weight"):
        lora.add(onnx.parser.parse_model(text), targets=["q_proj"])


@pytest.mark.parametrize("columns", [[0, 4], [4, 0, 8], [0, 9, 8], [0, 4, 8.0], [0, 2, 8]])
def test_columns_that_are_not_legal(columns: list[Any]) -> None:
    model = lora.add(fused(), targets=["q_proj"])
    (entry,) = (each for each in model.metadata_props if each.key == "ortops.lora")
    entry.value = entry.value.replace("[0, 4, 8]", str(columns))
    with pytest.raises(ModelError, match=r"'columns' must|must be an array|was changed: "):
        lora.merge(model)


def test_a_part_takes_steps_of_its_own() -> None:
    """Other parts keep the values of the base, also while it trains."""
    model = lora.add(fused(), 2, targets=["q_proj"])
    built_model = ortops.build_training_model(
        model, loss=ortops.losses.MeanSquaredError("q"), optimizer="Adam"
    )
    session = TrainingSession(built_model)
    losses = [session.step({"x": X, "targets": normal(5, 4, seed=3)})["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    before, after = (outputs(m, {"x": X}) for m in (fused(), session.inference_model()))
    np.testing.assert_array_equal(after[1], before[1])
    np.testing.assert_array_equal(after[2], before[2])
    assert abs(after[0] - before[0]).max() > 1e-3


def test_an_adapter_beside_float16_is_float32() -> None:
    x = X.astype(np.float16)
    base = built(x, lambda x, weight: x @ weight, weight=normal(6, 4, seed=1).astype(np.float16))
    model = lora.add(base, 2, targets=["fc"])
    new = random_adapter(model)
    a, b = (new[f"fc.lora_{which}.weight"] for which in "AB")
    assert a.dtype == b.dtype == np.float32
    (y,), (found,) = outputs(base, {"x": x}), outputs(with_values(model, new), {"x": x})
    assert found.dtype == np.float16
    expected = y.astype(np.float64) + x.astype(np.float64) @ a @ b
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    merged = lora.merge(with_values(model, new))
    np.testing.assert_allclose(outputs(merged, {"x": x})[0], expected, rtol=5e-3, atol=5e-3)
    built_model = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    session = TrainingSession(built_model)
    given = {"x": x, "targets": normal(5, 4, seed=3)}
    given["targets"] = given["targets"].astype(session.inputs["targets"].dtype)
    losses = [float(session.step(given)["loss"]) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_an_adapter_beside_bfloat16_is_float32() -> None:
    """onnxruntime's CPU provider has no product of bfloat16, so only the nodes are compared."""
    model = built(X, lambda x, weight: x @ weight, weight=normal(6, 4))
    (tensor,) = model.graph.initializer
    bits = normal(6, 4).view(np.uint32) >> 16
    raw = bits.astype(np.uint16).tobytes()
    tensor.CopyFrom(helper.make_tensor("fc.weight", TensorProto.BFLOAT16, [6, 4], raw, raw=True))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    del model.graph.value_info[:]
    adapted = lora.add(model, 2)
    assert {a.dtype for n, a in values(adapted).items() if "lora" in n} == {np.dtype(np.float32)}
    onnx.checker.check_model(adapted, full_check=True)
    casts = [n.attribute[0].i for n in adapted.graph.node if n.op_type == "Cast"]
    assert casts == [TensorProto.FLOAT, TensorProto.BFLOAT16]


def test_a_model_of_quantize_dynamic(tmp_path: Path) -> None:
    base = built(X, lambda x, weight: x @ weight, weight=normal(6, 4, seed=1))
    onnx.save(base, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QInt8)
    base = onnx.load(tmp_path / "int8.onnx")
    assert "MatMulInteger" in {node.op_type for node in base.graph.node}
    model = lora.add(base, 2)
    new = random_adapter(model)
    a, b = (array.astype(np.float64) for array in new.values())
    (y,), (found,) = outputs(base, {"x": X}), outputs(with_values(model, new), {"x": X})
    np.testing.assert_allclose(found, y + X @ a @ b, atol=1e-5)
    session = TrainingSession(
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="Adam")
    )
    targets = normal(5, 4, seed=3)
    losses = [float(session.step({"x": X, "targets": targets})["loss"]) for _ in range(30)]
    assert losses[-1] < losses[0]
    lora.save_adapter(session.inference_model(), tmp_path / "a.onnx_adapter")
    with pytest.raises(UnsupportedError, match=r"computed with quantized numbers"):
        lora.merge(with_values(model, new))


def test_g_idx_is_refused() -> None:
    model = llama.llama(bits=4)
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    node.input.extend(["", "g_idx"])
    model.graph.initializer.append(
        onnx.numpy_helper.from_array(np.zeros(llama.HIDDEN, np.int32), "g_idx")
    )
    with pytest.raises(UnsupportedError, match=r"qkv_proj.*its input g_idx, 'g_idx', is not supp"):
        lora.add(model, targets=["*layers.0*qkv_proj*"])


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [(32, 4), (4, 32)])
def test_an_adapter_fits_the_model_in_another_precision(
    one: int, other: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"targets": ["q_proj", "v_proj", "o_proj"]}
    trained = lora.add(llama.llama(bits=one), 4, 8, **settings)
    new = random_adapter(trained)
    lora.save_adapter(with_values(trained, new), tmp_path / "a.onnx_adapter")
    model = lora.add(llama.llama(bits=other), 4, 8, **settings)
    found = lora.load_adapter(model, tmp_path / "a.onnx_adapter")
    assert "was trained on another file of this model" in caplog.text
    for name, array in new.items():
        np.testing.assert_array_equal(values(found)[name], array)

    with pytest.raises(ModelError, match=r"the adapter belongs to another base"):
        lora.load_adapter(
            lora.add(llama.llama(bits=other, seed=1), 4, 8, **settings),
            tmp_path / "a.onnx_adapter",
        )
    with pytest.raises(ModelError, match=r"'model.layers.0.attn.q_proj.lora_A.weight' must be"):
        lora.load_adapter(
            lora.add(llama.llama(bits=other), 3, 8, **settings), tmp_path / "a.onnx_adapter"
        )


@pytest.mark.parametrize("bits", [32, 4])
def test_parts_of_one_layer_are_merged_together(bits: int) -> None:
    model = lora.add(llama.llama(bits=bits), 2, 6, ["q_proj", "v_proj"])
    model = with_values(model, random_adapter(model))
    merged = lora.merge(model, dequantize=True)
    feeds = {"input_ids": np.array([[3, 4, 5]]), "attention_mask": np.ones((1, 3), np.int64)}
    empty = np.zeros((1, llama.PAIRS, 0, llama.SIZE), np.float32)
    feeds |= {value.name: empty for value in model.graph.input if value.name.startswith("past")}
    found = [plain_session(each).run(["logits"], feeds)[0] for each in (model, merged)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)
    without = {name: np.zeros_like(array) for name, array in random_adapter(model).items()}
    base = plain_session(with_values(model, without)).run(["logits"], feeds)[0]
    assert abs(found[0] - base).max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_layers_that_are_one_in_peft_share_a(dora: bool, tmp_path: Path) -> None:
    """gate_proj and up_proj of Phi-3: one A, of which gradients add up, and a file for it."""
    with Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        for part, seed in (("gate", 1), ("up", 2)):
            name = f"model.layers.0.mlp.{part}_proj.MatMul.weight"
            tape.output(op.Identity(x @ tape.initializer(name, normal(6, 4, seed=seed))), part)
    base = tape.model()
    onnx.save(base, tmp_path / "model.onnx")
    assert layers(lora.add(tmp_path / "model.onnx")) == {
        f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")
    }
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    model = lora.add(tmp_path / "model.onnx", rank=2, dora=dora)
    assert layers(model) == {"model.layers.0.mlp.gate_proj"}
    new = {n: a for n, a in random_adapter(model).items() if n.endswith(("A.weight", "B.weight"))}
    model = with_values(model, new)
    mean = ortops.losses.MeanSquaredError
    loss = mean("gate", target="targets_gate") + mean("up", target="targets_up")
    session = TrainingSession(ortops.build_training_model(model, loss=loss, optimizer="Adam"))
    session.run_steps([{"x": X, "targets_gate": normal(5, 4), "targets_up": normal(5, 4)}] * 3)
    trained = session.inference_model()
    expected = outputs(trained, {"x": X})
    lora.save_adapter(trained, tmp_path / "a.onnx_adapter")
    lora.to_peft(trained, tmp_path / "peft", model_type="phi3")
    again = lora.from_peft(base, tmp_path / "peft")
    assert layers(again) == {"model.layers.0.mlp.gate_proj"}
    loaded = lora.load_adapter(model, tmp_path / "a.onnx_adapter")
    for each in (lora.merge(trained), again, loaded):
        for found, y in zip(outputs(each, {"x": X}), expected, strict=True):
            np.testing.assert_allclose(found, y, atol=1e-5)
    (entry,) = (each for each in model.metadata_props if each.key == "ortops.lora")
    own = '"a": "model.layers.0.mlp.gate_proj.lora_A.weight"'
    entry.value = entry.value.replace(own, own.replace("gate", "down"), 1)
    with pytest.raises(ModelError, match=r"'a' must be 'model.layers.0.mlp.gate_proj.lora_A"):
        lora.merge(model)
