"""Weights in and out of a model by the names of a checkpoint.

Models are written by hand; what they compute with other weights comes from numpy.
"""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from running import run
from violations import all_violations

import ortops
from models import mlp
from ortops import ArgumentError, ModelError, OrtopsError, TrainingSession, UnsupportedError
from ortops.cli import main
from ortops.graph.limits import LIMITS
from ortops.graph.safetensors import map_safetensors, read_safetensors, write_safetensors
from ortops.weights import Names, Part, Place, load, match, save

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(0)
HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft": 1]>\n'


def numbers(*shape: int) -> Array:
    return np.asarray(RANDOM.standard_normal(shape), np.float32)


def model_of(text: str, **arrays: Array) -> onnx.ModelProto:
    """Returns a model with initializers."""
    model = onnx.parser.parse_model(HEAD + text)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    return model


def linear(weight: Array, bias: Array) -> onnx.ModelProto:
    """A Linear of torch as its exporters write it: with a transposed weight and without names."""
    text = """f (float[n, 3] x) => (float[n, 2] y) {
        h = MatMul (x, val_1)
        y = Add (h, val_2)
    }"""
    return model_of(text, val_1=np.ascontiguousarray(weight.T), val_2=bias)


def arrays_of(model: onnx.ModelProto) -> dict[str, Array]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def layouts(names: Names) -> dict[str, list[Place]]:
    return {name: list(places) for name, places in names.items()}


# --------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize("prefix", ["", "model.", "model.base."])
@pytest.mark.parametrize("other", ["", "module."])
def test_by_name_up_to_a_prefix(prefix: str, other: str) -> None:
    text = "f (float[n, 3] x) => (float[n, 2] y) { y = Gemm <transB = 1> (x, %s, %s) }"
    names = [f"{prefix}fc.weight", f"{prefix}fc.bias"]
    model = model_of(text.replace("%s", "w", 1).replace("%s", "b", 1))
    model.graph.node[0].input[1:] = names
    tensors = dict(zip(names, (numbers(2, 3), numbers(2)), strict=True))
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in tensors.items())
    checkpoint = {f"{other}fc.bias": numbers(2), f"{other}fc.weight": numbers(2, 3)}
    found = match(model, checkpoint)
    assert layouts(found) == {
        f"{other}fc.bias": [Place(names[1], "name")],
        f"{other}fc.weight": [Place(names[0], "name")],
    }
    assert not found.unmatched_checkpoint
    assert not found.unmatched_model


def test_an_ambiguous_prefix_says_nothing() -> None:
    model = mlp.mlp((4, 4, 4))  # fc1 and fc2
    found = match(model, {"weight": numbers(4, 4), "bias": numbers(4)})
    assert layouts(found) == {}
    assert len(found.unmatched_checkpoint) == 2
    assert len(found.unmatched_model) == 4


def test_another_shape_is_said_on_both_sides() -> None:
    model = mlp.mlp((4, 16, 2))
    found = match(model, {"fc1.bias": numbers(16), "fc2.bias": numbers(5)})
    assert list(found) == ["fc1.bias"]
    assert found.unmatched_checkpoint == {"fc2.bias": "its shape is [5], that of 'fc2.bias' is [2]"}
    assert found.unmatched_model["fc2.bias"] == "its shape is [2], that of 'fc2.bias' is [5]"


def scoped(square: int) -> onnx.ModelProto:
    text = f"""f (float[n, {square}] x) => (float[n, {square}] y) {{
        ["/net/fc/MatMul"] h = MatMul (x, val_1)
        ["/net/fc/Add"] y = Add (val_2, h)
    }}"""
    return model_of(text, val_1=numbers(square, square), val_2=numbers(square))


def test_by_scope_although_all_values_differ() -> None:
    found = match(scoped(3), {"fc.weight": numbers(3, 3), "fc.bias": numbers(3)})
    assert layouts(found) == {
        "fc.weight": [Place("val_1", "scope", (1, 0))],
        "fc.bias": [Place("val_2", "scope")],
    }


def test_values_decide_how_a_square_weight_lies() -> None:
    model = scoped(3)
    checkpoint = {"fc.weight": arrays_of(model)["val_1"], "fc.bias": numbers(3)}
    assert match(model, checkpoint)["fc.weight"] == (Place("val_1", "scope"),)


def test_scopes_in_metadata_of_nodes() -> None:
    model = scoped(3)
    for node, name in zip(model.graph.node, ("node_1", "node_2"), strict=True):
        node.name = name
        key = "pkg.torch.onnx.name_scopes"
        node.metadata_props.add(key=key, value="['', 'net', 'net.fc', 'linear']")
    found = match(model, {"fc.weight": numbers(3, 3), "fc.bias": numbers(3)})
    assert [place.by for places in found.values() for place in places] == ["scope", "scope"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_by_value_transposed_and_in_another_dtype(dtype: Any) -> None:
    weight, bias = numbers(2, 3), numbers(2)
    model = linear(weight, bias)
    checkpoint = {"a": bias.astype(dtype), "b": weight.astype(dtype), "c": numbers(2, 3)}
    found = match(model, checkpoint)
    assert layouts(found) == {
        "a": [Place("val_2", "value")],
        "b": [Place("val_1", "value", (1, 0))],
    }
    assert found.unmatched_checkpoint == {"c": ""}


def test_kernels_of_tensorflow() -> None:
    text = "f (float[n, 3, 8, 8] x) => (float[n, 5, 6, 6] y) { y = Conv (x, w) }"
    kernel = numbers(3, 3, 3, 5)  # height, width, input, output
    model = model_of(text, w=np.ascontiguousarray(kernel.transpose(3, 2, 0, 1)))
    assert match(model, {"kernel": kernel})["kernel"] == (Place("w", "value", (3, 2, 0, 1)),)


def test_constants_without_information_are_not_matched_by_value() -> None:
    model = linear(numbers(2, 3), np.zeros(2, np.float32))
    found = match(model, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)})
    assert layouts(found) == {}


QKV = """f (float[n, 4] x) => (float[n, 12] y) {
    h = MatMul (x, val_1)
    y = Add (h, val_2)
}"""


def fused() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model with the weights of query, key and value in one, as onnxruntime's optimizer does."""
    checkpoint = {f"{n}.weight": numbers(4, 4) for n in ("query", "key", "value")}
    checkpoint |= {f"{n}.bias": numbers(4) for n in ("query", "key", "value")}
    weights = [a.T for n, a in checkpoint.items() if "weight" in n]
    biases = [a for n, a in checkpoint.items() if "bias" in n]
    model = model_of(QKV, val_1=np.concatenate(weights, axis=1), val_2=np.concatenate(biases))
    return model, checkpoint


def test_fused_weights(tmp_path: Path) -> None:
    model, checkpoint = fused()
    found = match(model, checkpoint)
    assert found["key.weight"] == (Place("val_1", "value", (1, 0), Part(1, 4, 8)),)
    assert found["value.bias"] == (Place("val_2", "value", (), Part(0, 8, 12)),)
    assert not found.unmatched_checkpoint | found.unmatched_model
    doubled = {name: 2 * array for name, array in checkpoint.items()}
    changed = load(model, doubled, found)
    for name, array in arrays_of(model).items():
        np.testing.assert_array_equal(arrays_of(changed)[name], 2 * array)
    save(changed, tmp_path / "x.safetensors", like=checkpoint)
    for name, array in read_safetensors(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(array, doubled[name])


def test_a_fused_checkpoint_of_a_split_model(tmp_path: Path) -> None:
    text = """f (float[n, 4] x) => (float[n, 4] y) {
        q = MatMul (x, wq)
        k = MatMul (x, wk)
        v = MatMul (x, wv)
        qk = Mul (q, k)
        y = Mul (qk, v)
    }"""
    whole = numbers(12, 4)
    parts = {
        f"w{n}": np.ascontiguousarray(p.T) for n, p in zip("qkv", np.split(whole, 3), strict=True)
    }
    model = model_of(text, **parts)
    found = match(model, {"qkv": whole})
    assert found["qkv"] == tuple(
        Place(f"w{n}", "value", (1, 0), of=Part(0, 4 * i, 4 * i + 4)) for i, n in enumerate("qkv")
    )
    changed = load(model, {"qkv": whole + 1}, found)
    np.testing.assert_array_equal(arrays_of(changed)["wk"], parts["wk"] + 1)
    save(changed, tmp_path / "x.safetensors", like={"qkv": whole})
    np.testing.assert_array_equal(read_safetensors(tmp_path / "x.safetensors")["qkv"], whole + 1)
    short = Names({"qkv": found["qkv"][:2]})
    with pytest.raises(ModelError, match="its places do not cover it"):
        save(changed, tmp_path / "x.safetensors", like={"qkv": whole}, names=short)


def tied() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model in which equal tensors of the checkpoint were merged."""
    text = """f (float[n, 3] x) => (float[n, 3] y) {
        ["/a/Add"] h = Add (x, a.bias)
        ["/b/Add"] y = Add (h, a.bias)
    }"""
    bias = numbers(3)
    model = model_of(text.replace("a.bias", "bias"), bias=bias)
    for node in model.graph.node:
        node.input[1] = "a.bias"
    model.graph.initializer[0].name = "a.bias"
    return model, {"a.bias": bias, "b.bias": bias.copy()}


def test_merged_tensors(tmp_path: Path) -> None:
    model, checkpoint = tied()
    found = match(model, checkpoint)
    assert layouts(found) == {
        "a.bias": [Place("a.bias", "name")],
        "b.bias": [Place("a.bias", "scope")],
    }
    save(model, tmp_path / "x.safetensors", like=checkpoint)
    assert list(read_safetensors(tmp_path / "x.safetensors")) == ["a.bias", "b.bias"]
    message = "'a.bias' and 'b.bias' share weight 'a.bias' of the model, but differ"
    with pytest.raises(ModelError, match=message):
        load(model, {"a.bias": numbers(3), "b.bias": numbers(3)}, found)


def test_copies_must_stay_equal(tmp_path: Path) -> None:
    text = """f (float[n, 3] x) => (float[n, 3] y) {
        h = MatMul (x, one)
        y = MatMul (h, two)
    }"""
    weight = numbers(3, 3)
    model = model_of(text, one=weight, two=np.ascontiguousarray(weight.T))
    found = match(model, {"w": weight})
    assert found["w"] == (Place("one", "value"), Place("two", "value", (1, 0)))
    loaded = load(model, {"w": weight + 1}, found)
    np.testing.assert_array_equal(arrays_of(loaded)["two"], weight.T + 1)
    save(loaded, tmp_path / "x.safetensors", like={"w": weight})
    only = load(model, {"w": weight + 1}, {"w": "two"})
    with pytest.raises(
        ModelError, match="'one' and 'two' of the model are copies of it, but differ"
    ):
        save(only, tmp_path / "x.safetensors", like={"w": weight}, names=found)


@pytest.mark.parametrize("named", [True, False])
def test_folded_batch_normalization_is_refused(named: bool) -> None:
    weight, scale, variance = numbers(5, 3, 3, 3), numbers(5), np.abs(numbers(5))
    weights = "conv.weight" if named else "val_1"
    model = model_of("f (float[n, 3, 8, 8] x) => (float[n, 5, 6, 6] y) { y = Conv (x, w, b) }")
    model.graph.node[0].input[1] = weights
    arrays = {weights: weight * (scale / np.sqrt(variance + 1e-5))[:, None, None, None]}
    arrays["b"] = numbers(5)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in arrays.items())
    checkpoint = {"conv.weight": weight, "bn.weight": scale, "bn.bias": numbers(5)}
    checkpoint |= {"bn.running_mean": numbers(5), "bn.running_var": variance}
    with pytest.raises(
        UnsupportedError, match=f"Conv node 'y', input W: .* 'bn' into weight '{weights}'"
    ):
        match(model, checkpoint)


def test_a_batch_normalization_elsewhere_is_not_folded() -> None:
    """The checkpoint has a part that was not exported."""
    checkpoint = {n: a + 1 for n, a in arrays_of(mlp.mlp((4, 16, 2))).items()}
    checkpoint |= {"head.bn.running_mean": numbers(16), "head.bn.running_var": numbers(16)}
    assert len(match(mlp.mlp((4, 16, 2)), checkpoint)) == 4


@pytest.mark.parametrize("is_turned", [True, False])
def test_a_square_weight_lies_as_its_neighbours(is_turned: bool) -> None:
    """A model of [in, out] weights that has the names of torch, which has [out, in]."""
    text = """f (float[n, 3] x) => (float[n, 2] y) {
        h = MatMul (x, a_weight)
        g = MatMul (h, b_weight)
        y = MatMul (g, c_weight)
    }"""
    sizes = {"a_weight": (3, 5), "b_weight": (5, 5), "c_weight": (5, 2)}
    model = model_of(text, **{name: numbers(*shape) for name, shape in sizes.items()})
    arrays = {name: numbers(*shape) for name, shape in sizes.items()}
    x = numbers(4, 3)
    expected = x @ arrays["a_weight"] @ arrays["b_weight"] @ arrays["c_weight"]
    source = {name: array.T if is_turned else array for name, array in arrays.items()}
    np.testing.assert_allclose(run(load(model, source), {"x": x})[0], expected, rtol=1e-4)
    kept = arrays_of(model)["b_weight"]  # values tell
    found = match(model, {name: kept if name == "b_weight" else a for name, a in source.items()})
    assert found["b_weight"] == (Place("b_weight", "name"),)


def test_nothing_tells_how_square_weights_lie(caplog: pytest.LogCaptureFixture) -> None:
    text = "f (float[n, 3] x) => (float[n, 3] y) { h = MatMul (x, a) y = MatMul (h, b) }"
    model, x = model_of(text, a=numbers(3, 3), b=numbers(3, 3)), numbers(4, 3)
    match(model, arrays_of(model))
    assert not caplog.text
    source = {"a": numbers(3, 3), "b": numbers(3, 3)}
    loaded = load(model, source)
    np.testing.assert_allclose(run(loaded, {"x": x})[0], x @ source["a"] @ source["b"], rtol=1e-4)
    message = "square weights transposed, as those of PyTorch's Linear; they stay as they are: "
    assert f"{message}'a', 'b'; give names=" in caplog.text
    names = {name: Place(name, order=(1, 0)) for name in source}
    loaded = load(model, source, names)
    expected = x @ source["a"].T @ source["b"].T
    np.testing.assert_allclose(run(loaded, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


GEMMA = """f (float[n, 6] x) => (float[n, 6] y) {
    h = Mul (x, norm)
    y = Gemm <transB = 1> (h, fc_weight)
}"""


SCOPES = ("/norm/Mul", "/fc/Gemm")


def computed(norm: str, *, kind: type = np.float32) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model whose exporter computed 1 + weight, as in Gemma, and its checkpoint."""
    checkpoint = {"norm.weight": numbers(6).astype(kind) / 4, "fc.weight": numbers(6, 6)}
    model = onnx.parser.parse_model(HEAD + GEMMA)
    for node, name, weight in zip(model.graph.node, SCOPES, (norm, "fc.weight"), strict=True):
        node.name, node.input[1] = name, weight
    held = {norm: np.float32(1 + checkpoint["norm.weight"]), "fc.weight": checkpoint["fc.weight"]}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in held.items())
    return model, checkpoint


@pytest.mark.parametrize("kind", [np.float32, np.float16])
@pytest.mark.parametrize("norm", ["onnx::Mul_18", "norm.weight"])
def test_a_weight_that_the_exporter_computed_is_refused(norm: str, kind: type) -> None:
    model, checkpoint = computed(norm, kind=kind)
    with pytest.raises(UnsupportedError, match=f"weight '{norm}': .* computed it from 'norm.weig"):
        match(model, checkpoint)
    with pytest.raises(UnsupportedError, match="Gemma's 1 \\+ weight"):
        load(model, checkpoint)


def test_another_checkpoint_of_a_weight_that_was_renamed(caplog: pytest.LogCaptureFixture) -> None:
    """It may have been computed: only the checkpoint that was exported tells."""
    model, checkpoint = computed("onnx::Mul_18")
    other = {name: numbers(*array.shape) for name, array in checkpoint.items()}
    load(model, other)
    assert "renamed the weights of 'norm.weight', perhaps because it computed" in caplog.text
    caplog.clear()
    model.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(checkpoint["norm.weight"], "onnx::Mul_18")
    )
    load(match(model, checkpoint).attach(model), other)
    load(model, checkpoint | {"fc.weight": other["fc.weight"]})
    named, _ = computed("norm.weight")
    load(named, {name: 2 * array for name, array in checkpoint.items()})
    assert "renamed" not in caplog.text


def test_a_checkpoint_trained_further_is_not_computed() -> None:
    model, checkpoint = computed("norm.weight")
    (norm,) = (t for t in model.graph.initializer if t.name == "norm.weight")
    for noise in (1e-7, 1e-3, 1):
        trained = checkpoint["norm.weight"] + np.float32(noise) * numbers(6)
        norm.CopyFrom(numpy_helper.from_array(trained, "norm.weight"))
        assert match(model, checkpoint)["norm.weight"] == (Place("norm.weight", "name"),)


def test_weights_in_constants_and_functions() -> None:
    text = """f (float[n, 3] x) => (float[n, 2] y) {
        w = Constant <value = float[3, 2] {1, 2, 3, 4, 5, 6}> ()
        y = MatMul (x, w)
    }"""
    weight = np.float32([[1, 3, 5], [2, 4, 6]])
    model = onnx.parser.parse_model(HEAD + text)
    loaded = load(model, {"fc.weight": weight})
    assert match(model, {"fc.weight": weight})["fc.weight"] == (Place("w", "value", (1, 0)),)
    x = numbers(4, 3)
    loaded = load(loaded, {"fc.weight": weight * 2})
    np.testing.assert_allclose(run(loaded, {"x": x})[0], x @ weight.T * 2, rtol=1e-5)


def test_constants_of_the_exporter_are_not_listed() -> None:
    text = """f (float[n, 3] x) => (float[n, 3] y) {
        h = Clip (x, low)
        y = Add (h, bias)
    }"""
    model = model_of(text, low=np.float32(-1), bias=numbers(3))
    assert list(match(model, {"other": numbers(7)}).unmatched_model) == ["bias"]


# ---------------------------------------------------------------------------------- load and save


def test_load_changes_a_copy_and_converts(tmp_path: Path) -> None:
    weight, bias = numbers(2, 3), numbers(2)
    model = linear(weight, bias)
    before = model.SerializeToString()
    names = match(model, {"weight": weight, "bias": bias})
    new = {"weight": numbers(2, 3).astype(np.float64), "bias": numbers(2)}
    loaded = load(model, new, names)
    assert model.SerializeToString() == before
    x = numbers(4, 3)
    expected = x @ new["weight"].T + new["bias"]
    np.testing.assert_allclose(run(loaded, {"x": x})[0], expected, rtol=1e-5, atol=1e-6)
    again = load(loaded, {"weight": weight, "bias": bias})  # by the map in the metadata
    np.testing.assert_array_equal(arrays_of(again)["val_1"], weight.T)


def test_load_refuses() -> None:
    weight, bias = numbers(2, 3), numbers(2)
    model = linear(weight, bias)
    names = match(model, {"weight": weight, "bias": bias})
    shape = r"'weight' for weight 'val_1' of the model must have the shape \[3, 2\], got \[4, 2\]"
    with pytest.raises(ModelError, match=shape):
        load(model, {"weight": numbers(2, 4), "bias": bias}, names)
    with pytest.raises(ModelError, match="source: it has no 'bias', which the map has"):
        load(model, {"weight": weight}, names)
    with pytest.raises(ModelError, match="none of its weights matches"):
        load(model, {"weight": numbers(7)})
    with pytest.raises(ModelError, match="the model has no weight 'val_3'; did you mean 'val_"):
        load(model, {"weight": weight}, {"weight": "val_3"})
    with pytest.raises(ModelError, match="must be floating-point numbers, got int64"):
        load(model, {"weight": np.ones((3, 2), np.int64)}, {"weight": "val_1"})
    with pytest.raises(ArgumentError, match="names: 'weight' must be mapped to a weight's name"):
        load(model, {"weight": weight}, {"weight": 3})  # type: ignore[dict-item]
    with pytest.raises(ArgumentError, match=r"names must be the result of ortops\.weights\.match"):
        load(model, {"weight": weight}, "val_1")  # type: ignore[arg-type]
    built = ortops.build_training_model(mlp.mlp((4, 2)), loss="MeanSquaredError", optimizer="SGD")
    with pytest.raises(ModelError, match="it has training_info"):
        load(built, {"fc1.bias": numbers(2)})


def test_numbers_too_large_for_the_dtype() -> None:
    text = "f (float16[n, 3] x) => (float16[n, 3] y) { y = Add (x, b) }"
    model = model_of(text, b=np.ones(3, np.float16))
    with pytest.raises(
        ModelError, match="'b' for weight 'b' of the model are too large for float16"
    ):
        load(model, {"b": np.float32([1, 1e6, 2])})


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = mlp.mlp((4, 16, 2))
    with caplog.at_level(logging.WARNING, "ortops"):
        load(model, {"fc1.bias": numbers(16), "other": numbers(2, 9)})
    assert caplog.messages == ["source: not in the model and left out: 'other'"]
    caplog.clear()
    save(model, tmp_path / "x.safetensors", like={"fc1.bias": numbers(16), "step": np.int64(3)})
    assert caplog.messages[0].startswith(
        "weights of the model that the checkpoint has no place for are not saved: "
    )
    assert "'fc1.weight'" in caplog.messages[0]
    assert read_safetensors(tmp_path / "x.safetensors")["step"] == 3


def test_save_in_the_dtypes_of_the_checkpoint(tmp_path: Path) -> None:
    weight, bias = numbers(2, 3), numbers(2)
    like = {"weight": weight.astype(np.float16), "bias": bias.astype(np.float64)}
    names = match(linear(weight, bias), {"weight": weight, "bias": bias})
    save(linear(weight, bias), tmp_path / "x.safetensors", like=like, names=names)
    found = read_safetensors(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(found["weight"], like["weight"])
    assert found["bias"].dtype == np.float64


def test_save_by_the_names_of_the_model(tmp_path: Path) -> None:
    model = mlp.mlp((4, 16, 2))
    save(model, tmp_path / "x.safetensors")
    found = read_safetensors(tmp_path / "x.safetensors")
    assert found.keys() == arrays_of(model).keys()
    changed = load(model, {n: a + 1 for n, a in found.items()})
    back = load(changed, tmp_path / "x.safetensors")
    assert arrays_of(back).keys() == arrays_of(model).keys()
    for name, array in arrays_of(back).items():
        np.testing.assert_array_equal(array, arrays_of(model)[name])


def test_save_refuses(tmp_path: Path) -> None:
    model = mlp.mlp((4, 16, 2))
    with pytest.raises(ArgumentError, match=r"path must end in \.safetensors, got 'x\.pt'"):
        save(model, "x.pt")
    with pytest.raises(ArgumentError, match="give it as like="):
        save(model, tmp_path / "x.safetensors", names={"a": "fc1.bias"})
    with pytest.raises(ModelError, match="like: it has no 'a'; "):
        save(model, tmp_path / "x.safetensors", like={"b": numbers(16)}, names={"a": "fc1.bias"})
    with pytest.raises(ModelError, match=r"must have the shape \[3\], got \[16\]"):
        save(model, tmp_path / "x.safetensors", like={"a": numbers(3)}, names={"a": "fc1.bias"})
    part = {"a": Place("fc1.bias", part=Part(0, 8, 24))}
    with pytest.raises(ModelError, match=r"has the shape \[16\], which has no part \[8:24\]"):
        save(model, tmp_path / "x.safetensors", like={"a": numbers(16)}, names=part)
    for place, message in (
        (Place("fc1.bias", order=(1, 0)), r"'a' must have 2 axes, got the shape \[16\]"),
        (Place("fc1.bias", of=Part(0, 8, 24)), r"'a' has the shape \[16\], which has no part"),
        (Place("fc1.bias", of=Part(1, 0, 16)), r"'a' has the shape \[16\], which has no part"),
    ):
        with pytest.raises(ModelError, match=message):
            save(model, tmp_path / "x.safetensors", like={"a": numbers(16)}, names={"a": place})
        with pytest.raises(ModelError, match=message):
            load(model, {"a": numbers(16)}, {"a": place})
    assert not (tmp_path / "x.safetensors").exists()


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    model = model_of(
        "f (float[n, 3] x) => (float[n, 3] y) { y = Mul (x, scale) }", scale=np.float32(2)
    )
    checkpoint = {"scale": np.float32(3), "empty": np.zeros((0, 3), np.float32), "one": numbers(1)}
    checkpoint["matrix"] = numbers(1, 1)
    names = match(model, checkpoint)
    assert layouts(names) == {"scale": [Place("scale", "name")]}
    loaded = load(model, checkpoint)
    assert arrays_of(loaded)["scale"] == 3
    save(loaded, tmp_path / "x.safetensors", like=checkpoint)
    found = read_safetensors(tmp_path / "x.safetensors")
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in checkpoint.items()}


def test_a_checkpoint_can_be_replaced_by_itself(tmp_path: Path) -> None:
    """It is mapped into memory while it is replaced."""
    model, path = mlp.mlp((4, 16, 2)), tmp_path / "x.safetensors"
    write_safetensors(path, {n: a + 1 for n, a in arrays_of(model).items()} | {"own": numbers(3)})
    save(model, path, like=path)
    found = read_safetensors(path)
    np.testing.assert_array_equal(found["fc1.weight"], arrays_of(model)["fc1.weight"])
    assert "own" in found


# -------------------------------------------------------------------------------------- checkpoints


def test_kinds_of_checkpoints(tmp_path: Path) -> None:
    model = mlp.mlp((4, 16, 2))
    arrays = arrays_of(model)
    np.savez(tmp_path / "x.npz", **arrays)
    write_safetensors(tmp_path / "x.safetensors", arrays)
    first, second = list(arrays)[:2], list(arrays)[2:]
    write_safetensors(tmp_path / "1-of-2.safetensors", {n: arrays[n] for n in first})
    write_safetensors(tmp_path / "2-of-2.safetensors", {n: arrays[n] for n in second})
    files = dict.fromkeys(first, "1-of-2.safetensors") | dict.fromkeys(second, "2-of-2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    expected = match(model, arrays)
    assert len(expected) == 4
    for path in (tmp_path / "x.npz", str(tmp_path / "x.safetensors"), index):
        assert match(model, path) == expected
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}), encoding="utf-8")
    with pytest.raises(ModelError, match="'weight_map' must be a file in the folder"):
        match(model, index)


def test_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    model = mlp.mlp((4, 2))
    with pytest.raises(ModelError, match="No such file or directory"):
        match(model, tmp_path / "none.safetensors")
    with pytest.raises(ArgumentError, match=r"must end in \.safetensors, .*got '.*x\.h5'"):
        match(model, tmp_path / "x.h5")
    with pytest.raises(ArgumentError, match="checkpoint must be a dict of arrays or the path"):
        match(model, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="'a' must be an array of numbers, got an array of <U1"):
        match(model, {"a": "b"})
    for name in ("x.npz", "x.safetensors", "model.safetensors.index.json"):
        for content in (b"", b"nothing", b"PK\x03\x04"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ModelError, match=name):
                match(model, tmp_path / name)
    np.savez(tmp_path / "x.npz", a=np.array([{}], dtype=object))
    with pytest.raises(ModelError, match="Python objects, which are not unpickled"):
        match(model, tmp_path / "x.npz")


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("a.npy", b"\x93NUMPY\x01\x00\x06\x00{'a': ("),  # Python's tokenizer does not end
        ("a", b"no array"),
        ("a.npy", b""),
    ],
)
def test_archives_of_something_else(member: str, content: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr(member, content)
    with pytest.raises(ModelError, match=r"file '.*x\.npz': array 'a' is corrupt"):
        match(mlp.mlp((4, 2)), tmp_path / "x.npz")


def test_an_archive_that_unpacks_to_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1_000_000, np.float32))
    monkeypatch.setattr(LIMITS, "data_bytes", 3_999_999)
    with pytest.raises(ModelError, match=r"would take 0\.004 GB of memory, more than the limit"):
        match(mlp.mlp((4, 2)), tmp_path / "x.npz")


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (tmp_path / "x.pt").write_bytes(b"")
    with pytest.raises(OrtopsError, match=r"x\.pt' needs torch; pip install ortops\[torch\], or"):
        match(mlp.mlp((4, 2)), tmp_path / "x.pt")


@pytest.mark.torch
def test_files_of_torch(tmp_path: Path) -> None:
    import torch

    model = mlp.mlp((4, 16, 2))
    state = {n: torch.from_numpy(a.copy()).bfloat16() for n, a in arrays_of(model).items()}
    state["step"] = torch.tensor(3)
    path = tmp_path / "x.pt"
    for content in (state, {"state_dict": state, "epoch": 3}):
        torch.save(content, path)
        loaded = load(model, path)
        for name, array in arrays_of(loaded).items():
            np.testing.assert_array_equal(array, state[name].float().numpy())
    save(model, tmp_path / "x.safetensors", like=state)
    found = map_safetensors(tmp_path / "x.safetensors")
    assert found["fc1.weight"].dtype.name == "bfloat16"
    torch.save({"epoch": 3}, path)
    with pytest.raises(ModelError, match="it has no dict of tensors"):
        match(model, path)
    torch.save(Path, path)
    with pytest.raises(ModelError, match=r"torch\.load\(weights_only=True\) refuses it"):
        match(model, path)
    path.write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"x\.pt"):
        match(model, path)


def unreadable_tensors() -> dict[str, Any]:
    """Returns tensors of torch that numpy cannot have, or that ask for more than the file holds."""
    import torch

    eye = torch.eye(16, 4)
    return {
        "sparse": eye.to_sparse(),
        "csr": eye.to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
        "meta": torch.empty(16, 4, device="meta"),
        "float8": eye.to(torch.float8_e4m3fn),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "complex": eye.to(torch.complex64),
        "expanded": torch.ones(1).expand(5_000_000_000),
        "expanded bfloat16": torch.ones(1).bfloat16().expand(10_000_000_000),
        "expanded without end": torch.ones(1).expand(2**40, 2**20),
    }


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::UserWarning")  # such tensors are beta or deprecated
def test_tensors_of_torch_that_cannot_be_read(tmp_path: Path) -> None:
    """Nobody asks for them: they are listed. A wanted one is named, in files and in dicts."""
    import torch

    model = mlp.mlp((4, 16, 2))
    arrays = arrays_of(model)
    state = {name: torch.from_numpy(array + 1) for name, array in arrays.items()}
    state |= {5: torch.ones(3), None: torch.ones(2)}  # nobody can ask for these either
    path = tmp_path / "x.pt"
    everything = unreadable_tensors()
    torch.save(state | {f"other.{kind}": tensor for kind, tensor in everything.items()}, path)
    for name, array in arrays_of(load(model, path)).items():
        np.testing.assert_array_equal(array, arrays[name] + 1)
    listed = match(model, path).unmatched_checkpoint
    assert listed.keys() == {f"other.{kind}" for kind in everything}
    with all_violations() as check:
        for kind, tensor in everything.items():
            wanted = {name: state[name] for name in arrays} | {"fc1.weight": tensor}
            torch.save(wanted, path)
            for source in (path, wanted):
                for way in (match, load):
                    with (
                        check(kind),
                        pytest.raises(ModelError, match=r"fc1\.weight' cannot be read"),
                    ):
                        way(model, source)
            unneeded = {name: state[name] for name in arrays} | {"other": tensor}
            with check(kind), pytest.raises(ModelError, match="'other' cannot be read"):
                save(model, tmp_path / "x.safetensors", like=unneeded)
            with check(kind), pytest.raises(ModelError, match="'other' cannot be read"):
                load(model, unneeded, {"other": "fc1.weight"})
            with check(kind):
                assert listed[f"other.{kind}"]


def test_types_of_safetensors_that_numpy_lacks(tmp_path: Path) -> None:
    """As those of torch: an error only where the model needs such a tensor."""
    model = mlp.mlp((4, 16, 2))
    arrays = arrays_of(model)
    path = tmp_path / "x.safetensors"

    def write(name: str) -> None:
        write_safetensors(path, {**arrays, name: np.zeros(64, np.uint8).reshape(16, 4)})
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header[name]["dtype"] = "F8_E4M3"
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    write("other")
    assert match(model, path).unmatched_checkpoint == {"other": "its type is F8_E4M3"}
    for name, array in arrays_of(load(model, path)).items():
        np.testing.assert_array_equal(array, arrays[name])
    write("fc1.weight")
    with pytest.raises(ModelError, match=r"'fc1\.weight' cannot be read \(its type is F8_E4M3\)"):
        load(model, path)


@pytest.mark.torch
def test_expanded_tensors_are_read_without_copies(tmp_path: Path) -> None:
    import torch

    model = mlp.mlp((4, 16, 2))
    path = tmp_path / "x.pt"
    for dtype in (torch.float32, torch.bfloat16):
        row = torch.arange(16, dtype=torch.float32).to(dtype)
        state = {name: torch.tensor(array) for name, array in arrays_of(model).items()}
        like = arrays_of(model)["fc1.weight"]
        shape = (4, 16) if like.shape == (4, 16) else (16, 4)
        weight = row.expand(4, 16) if shape == (4, 16) else row[:, None].expand(16, 4)
        torch.save(state | {"fc1.weight": weight, "mask": torch.ones(1).expand(10**8)}, path)
        found = arrays_of(load(model, path))["fc1.weight"]
        np.testing.assert_array_equal(found, weight.float().numpy())


@pytest.mark.torch
def test_files_of_torch_that_unpack_to_more_than_they_are(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(ModelError, match=r"b\.pt': .*unpacks to 0\.004 GB"):
        match(mlp.mlp((4, 2)), tmp_path / "b.pt")


@pytest.mark.torch
def test_tensors_that_share_memory_must_stay_equal(tmp_path: Path) -> None:
    import torch

    weight = torch.from_numpy(numbers(3, 3))
    text = """f (float[n, 3] x) => (float[n, 3] y) {
        h = MatMul (x, one)
        y = MatMul (h, two)
    }"""
    model = model_of(text, one=weight.numpy(), two=weight.numpy() + 1)
    names = {"one": "one", "two": "two"}
    with pytest.raises(ModelError, match="'one' and 'two' are tied in the checkpoint"):
        save(model, tmp_path / "x.safetensors", {"one": weight, "two": weight}, names)


def test_external_data(tmp_path: Path) -> None:
    model = mlp.mlp((64, 128, 10))
    arrays = arrays_of(model)
    onnx.save(
        model, tmp_path / "x.onnx", save_as_external_data=True, location="x.data", size_threshold=16
    )
    names = match(tmp_path / "x.onnx", arrays)
    assert len(names) == 4
    loaded = load(tmp_path / "x.onnx", {n: 2 * a for n, a in arrays.items()}, names)
    np.testing.assert_array_equal(arrays_of(loaded)["fc1.weight"], 2 * arrays["fc1.weight"])
    save(tmp_path / "x.onnx", tmp_path / "x.safetensors", like=arrays)
    found = read_safetensors(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(found["fc1.weight"], arrays["fc1.weight"])


# ----------------------------------------------------------------------------------- the map itself


def stored(model: onnx.ModelProto) -> Any:
    entries = {entry.key: entry.value for entry in model.metadata_props}
    return json.loads(entries["ortops.weights"])


def test_the_map_is_kept(tmp_path: Path) -> None:
    weight, bias = numbers(2, 3), numbers(2)
    model = linear(weight, bias)
    checkpoint = {"fc.weight": weight, "fc.bias": bias}
    names = match(model, checkpoint)
    plain, model = model, names.attach(model)
    expected = names.to_json()
    assert stored(model) == expected
    assert Names.from_json(expected) == names
    built = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    assert stored(built) == expected
    session = TrainingSession(built)
    session.step({"x": numbers(4, 3), "targets": numbers(4, 2)})
    session.save(tmp_path / "x.onnx")
    for result in (
        onnx.load(tmp_path / "x.onnx"),
        session.inference_model(),
        session.inference_model(model),
        session.inference_model(plain),
        TrainingSession(tmp_path / "x.onnx").inference_model(),
        ortops.surgery.free_batch(model),
        ortops.surgery.name_output(model, "h"),
        ortops.lower(built),
        ortops.lora.add(model, rank=1),
        ortops.lora.merge(ortops.lora.add(model, rank=1)),
        load(model, checkpoint),
    ):
        assert stored(result) == expected
    save(tmp_path / "x.onnx", tmp_path / "x.safetensors", like=checkpoint)
    found = read_safetensors(tmp_path / "x.safetensors")
    trained = arrays_of(session.inference_model())
    np.testing.assert_array_equal(found["fc.weight"], trained["val_1"].T)
    assert not np.array_equal(found["fc.weight"], weight)


def test_the_map_is_kept_by_an_older_opset() -> None:
    text = (
        HEAD.replace("21", "11")
        + """f (float[n, 3] x) => (float[n, 1] y) {
        h = Add (x, b)
        y = ReduceSum <axes = [1]> (h)
    }"""
    )
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(numbers(3), "b"))
    model = Names({"bias": (Place("b"),)}).attach(model)
    built = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    assert stored(built) == stored(TrainingSession(built).inference_model()) == stored(model)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"a": []}',
        '{"a": [3]}',
        '{"a": [{"weight": 3}]}',
        '{"a": [{"weight": "b", "order": [1]}]}',
        '{"a": [{"weight": "b", "order": [true]}]}',
        '{"a": [{"weight": "b", "part": [0, 1]}]}',
        '{"a": [{"weight": "b", "of": 3}]}',
    ],
)
def test_a_damaged_map_is_refused(text: str) -> None:
    model = mlp.mlp((4, 2))
    model.metadata_props.add(key="ortops.weights", value=text)
    with pytest.raises(ModelError, match=r"metadata_props 'ortops\.weights'.*match the model with"):
        load(model, {"a": numbers(2)})


def test_the_table() -> None:
    model, checkpoint = fused()
    found = match(model, {**checkpoint, "other": numbers(3), "step": np.int64(1)})
    lines = repr(found).splitlines()
    assert lines[0].split() == ["checkpoint", "model", "by", "layout"]
    assert lines[2].split() == ["key.weight", "val_1[:,", "4:8]", "value", "transposed"]
    assert lines[-4:] == [
        "6 of 8 tensors of the checkpoint matched",
        "only in the checkpoint:",
        "  other",
        "  step (is int64)",
    ]


# ------------------------------------------------------------------------------------ command line


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weight, bias = numbers(2, 3), numbers(2)
    onnx.save(linear(weight, bias), "model.onnx")
    write_safetensors("fc.safetensors", {"weight": weight, "bias": bias})
    write_safetensors("new.safetensors", {"weight": weight + 1, "bias": bias})
    assert main(["weights", "match", "model.onnx", "fc.safetensors"]) == 0
    assert capsys.readouterr().out == f"{match('model.onnx', 'fc.safetensors')!r}\n"
    command = ["weights", "match", "model.onnx", "fc.safetensors", "mapped.onnx", "--json"]
    assert main(command) == 0
    output = capsys.readouterr()
    assert output.err == "wrote mapped.onnx\n"
    shown = json.loads(output.out)
    assert shown["names"] == stored(onnx.load("mapped.onnx"))
    assert shown["only_in_checkpoint"] == shown["only_in_model"] == {}
    assert main(["weights", "load", "mapped.onnx", "new.safetensors", "loaded.onnx"]) == 0
    assert (
        main(["weights", "save", "loaded.onnx", "x.safetensors", "--like", "fc.safetensors"]) == 0
    )
    np.testing.assert_array_equal(read_safetensors("x.safetensors")["weight"], weight + 1)
    assert main(["weights", "save", "loaded.onnx", "own.safetensors"]) == 0
    assert list(read_safetensors("own.safetensors")) == ["val_1", "val_2"]
    capsys.readouterr()
    assert main(["weights", "load", "model.onnx", "new.safetensors", "model.onnx"]) == 1
    assert "would overwrite model 'model.onnx'" in capsys.readouterr().err
    command = ["weights", "save", "loaded.onnx", "fc.safetensors", "--like", "fc.safetensors"]
    assert main(command) == 1
    assert main([*command, "--force"]) == 0
    np.testing.assert_array_equal(read_safetensors("fc.safetensors")["weight"], weight + 1)
