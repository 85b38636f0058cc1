"""Tuned models with the adapter merged into their weights, for runtimes without adapters."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from lora_models import random_adapter, with_values
from onnx import TensorProto, helper, numpy_helper

import ortops
from models import llama
from ortops import lora
from ortops.cli import main
from ortops.llm import FineTuning
from ortops.llm.merging import merged_model, quantize

ROWS = [[104, 105, 33, 97, 98, 99, 256], [104, 111, 33, 100, 256]]
PACKAGE = Path(__file__).parents[1] / ".web" / "node_modules" / "@huggingface" / "transformers"
PROMPT = [104, 105, 33]
LEARNED = [97, 98, 99]


def logits(file: Path, adapter: Path | None = None) -> np.ndarray:
    """Returns what stock onnxruntime computes."""
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3  # one warning for each tensor of the adapter
    session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    options, loaded = onnxruntime.RunOptions(), onnxruntime.LoraAdapter()
    if adapter:
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    ids = np.array(ROWS[:1])
    feeds: dict[str, Any] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    shape = (1, llama.PAIRS, 0, llama.HIDDEN // llama.HEADS)
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros(shape, np.float32)
    return session.run(["logits"], feeds, options)[0]


@pytest.fixture(scope="module", params=[pytest.param(32, marks=pytest.mark.slow), 4])
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    base = llama.write(folder / "base", bits=request.param)
    tuning = FineTuning(base, rank=8, alpha=8, learning_rate=0.01)
    tuning.fit(ROWS, epochs=30, progress=False)
    assert tuning.generate(PROMPT, max_new_tokens=8) == LEARNED
    tuning.save(folder / "adapter")
    return folder


@pytest.fixture(scope="module")
def loaded(tuned: Path) -> FineTuning:
    """What tests share that only save it."""
    return FineTuning.load(tuned / "adapter")


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_a_merged_folder(tuned: Path, loaded: FineTuning, caplog: pytest.LogCaptureFixture) -> None:
    tuning = loaded
    merged = tuned / "merged"
    tuning.save(merged, merged=True)
    names = {file.name for file in merged.iterdir()}
    assert names == {file.name for file in (tuned / "base").iterdir()} - {"model.onnx.data"}
    model, base = onnx.load(merged / "model.onnx"), onnx.load(tuned / "base" / "model.onnx")
    assert [n.op_type for n in model.graph.node] == [n.op_type for n in base.graph.node]
    assert [v.name for v in model.graph.input] == [v.name for v in base.graph.input]

    expected = logits(tuned / "adapter" / "model.onnx", tuned / "adapter" / "adapter.onnx_adapter")
    found = logits(merged / "model.onnx")
    change = np.abs(expected - logits(tuned / "base" / "model.onnx")).max()
    is_quantized = any(node.op_type == "MatMulNBits" for node in base.graph.node)
    assert np.abs(found - expected).max() < (change / 2 if is_quantized else 1e-4)
    if is_quantized:
        (message,) = (r.message for r in caplog.records if "rounded again" in r.message)
        pattern = r"10 quantized layers.*rounding is ([\d.]+) times .*largest ([\d.]+)\)"
        stated = re.search(pattern, message)
        assert stated is not None
        median, largest = map(float, stated.groups())
        ratios = rounding_of(onnx.load(tuned / "adapter" / "model.onnx"), tuning, model)
        np.testing.assert_allclose([median, largest], [np.median(ratios), max(ratios)], rtol=0.05)
    again = FineTuning(merged, rank=1)  # as any folder
    assert again.generate(PROMPT, max_new_tokens=8) == LEARNED


def rounding_of(
    adapted: onnx.ModelProto, tuning: FineTuning, merged: onnx.ModelProto
) -> list[float]:
    """Returns |Q(W + A B) − (W + A B)| / |A B| of each layer, by onnxruntime's own kernel."""
    values = tuning.session.state
    ratios = []
    nodes = {node.name: node for node in merged.graph.node}
    for node in adapted.graph.node:
        scope = node.output[0].removesuffix("/base")
        if node.op_type != "MatMulNBits" or not node.output[0].endswith("/base"):
            continue
        update = values[f"{scope}_A.weight"] @ values[f"{scope}_B.weight"]
        exact = matrix(node, adapted) + update
        rounding = matrix(nodes[node.name], merged) - exact
        ratios.append(float(np.linalg.norm(rounding) / np.linalg.norm(update)))
    return ratios


def matrix(node: onnx.NodeProto, model: onnx.ModelProto) -> np.ndarray:
    """Returns the matrix that a MatMulNBits node multiplies with."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    size = next(each.i for each in node.attribute if each.name == "K")
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info(node.input[0], TensorProto.FLOAT, None)],
        [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)],
        [stored[name] for name in node.input[1:] if name],
    )
    made = helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, {node.input[0]: np.eye(size, dtype=np.float32)})[0]


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("bits", "block_size", "size"), [(4, 32, 96), (4, 16, 40), (8, 32, 64)])
def test_what_onnxruntime_reads(bits: int, block_size: int, size: int, has_zeros: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((size, 24)).astype(np.float32) + 0.5
    weight[:block_size, 0] = 0
    packed, scales, zeros, rounded = quantize(
        weight, bits=bits, block_size=block_size, has_zeros=has_zeros
    )
    arrays = {"B": packed, "scales": scales} | ({} if zeros is None else {"zeros": zeros})
    settings = {"K": size, "N": 24, "bits": bits, "block_size": block_size}
    node = helper.make_node(
        "MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", **settings
    )
    tensors = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph([node], "product", [], [], tensors)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    found = matrix(node, helper.make_model(graph, opset_imports=imports))
    np.testing.assert_allclose(found, rounded, atol=1e-5)
    # Half a step of a range that is spread over the numbers of that many bits.
    steps = (np.abs(weight).max() - (weight.min() if has_zeros else -np.abs(weight).max())) / (
        2**bits - 2
    )
    assert np.sqrt(np.square(found - weight).mean()) < steps / 2
    assert not found[:block_size, 0].any()


def test_what_was_exact_stays_exact() -> None:
    """Weights that quantize without an error keep their values."""
    whole = np.random.default_rng(0).integers(-8, 8, (32, 5)).astype(np.float32)
    whole[0] = -8
    for scale in (np.float32(0.25), np.float32(-0.5)):
        *_, rounded = quantize(whole * scale, bits=4, block_size=32, has_zeros=False)
        np.testing.assert_array_equal(rounded, whole * scale)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.javascript
@pytest.mark.skipif(not PACKAGE.exists(), reason="transformers.js: ./scripts/web_environment")
@pytest.mark.parametrize(("bits", "dtype", "file"), [(32, "fp32", "model"), (4, "q4", "model_q4")])
def test_transformers_js_generates(bits: int, dtype: str, file: str, tmp_path: Path) -> None:
    base = llama.write(tmp_path / "base", bits=bits)
    (base / "genai_config.json").unlink()
    (base / "onnx").mkdir()
    model = onnx.load(base / "model.onnx")
    for value in model.graph.input:  # transformers.js reads this size from the file
        if value.name.startswith("past"):
            size = llama.HIDDEN // llama.HEADS
            value.type.tensor_type.shape.dim[3].dim_value = size
    onnx.save(model, base / "onnx" / f"{file}.onnx")
    for name in ("model.onnx", "model.onnx.data"):
        (base / name).unlink()
    config = {
        "model_type": "llama",
        "num_attention_heads": llama.HEADS,
        "num_key_value_heads": llama.PAIRS,
        "num_hidden_layers": llama.LAYERS,
        "hidden_size": llama.HIDDEN,
        "head_dim": llama.HIDDEN // llama.HEADS,
        "eos_token_id": 256,
    }
    (base / "config.json").write_text(json.dumps(config))
    tuning = FineTuning(base, rank=8, alpha=8, learning_rate=0.01)
    tuning.fit(ROWS, epochs=30, progress=False)
    tuning.save(tmp_path / "merged", merged=True)
    assert (tmp_path / "merged" / "onnx" / f"{file}.onnx").is_file()
    script = Path(__file__).parent / "web" / "generate.mjs"
    package = PACKAGE / "dist" / "transformers.node.mjs"
    command = ["node", script, package, tmp_path / "merged", dtype, "104,105,33", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[*LEARNED, 256], "abc"]


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_the_command(
    tuned: Path, loaded: FineTuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, merged = tmp_path / "rows.jsonl", tmp_path / "merged"
    rows.write_text("".join(f"{json.dumps({'input_ids': row})}\n" for row in ROWS))
    command = ["tune", str(tuned / "adapter"), str(rows), "--merge", "--quiet"]
    assert main([*command, "--save", str(merged)]) == 0
    assert not (merged / "adapter.onnx_adapter").exists()
    assert FineTuning(merged, rank=1).generate(PROMPT, max_new_tokens=8) == LEARNED

    folder, file = tuned / "adapter", tmp_path / "merged.onnx"
    command = ["lora", "merge", str(folder / "model.onnx"), str(file), "--requantize"]
    assert main([*command, "--adapter", str(folder / "adapter.onnx_adapter")]) == 0
    loaded.save(tmp_path / "other", merged=True)
    np.testing.assert_array_equal(logits(file), logits(tmp_path / "other" / "model.onnx"))
    capsys.readouterr()


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_folders_that_are_refused(tuned: Path, loaded: FineTuning) -> None:
    tuning = loaded
    with pytest.raises(ortops.ArgumentError, match=r"must not have an adapter if merged=True, got"):
        tuning.save(tuned / "adapter", merged=True)
    with pytest.raises(ortops.ArgumentError, match=r"merged must be True or False, got 1"):
        tuning.save(tuned / "adapter", merged=1)  # type: ignore[arg-type]


def test_other_layers_keep_their_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = llama.llama(bits=4)
    adapted = lora.add(model, targets=["*o_proj*"])
    merged = merged_model(with_values(adapted, random_adapter(adapted)))
    stored = {tensor.name: tensor for tensor in merged.graph.initializer}
    for tensor in model.graph.initializer:
        if "o_proj" not in tensor.name:
            assert tensor == stored[tensor.name]
    assert "merged into 2 quantized layers" in caplog.text
    assert "floating-point" not in caplog.text


def test_an_adapter_that_changes_nothing_rounds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = llama.llama(bits=4)
    merged = merged_model(lora.add(model, targets=["*o_proj*"]))
    stored = {tensor.name: tensor for tensor in merged.graph.initializer}
    for tensor in model.graph.initializer:
        assert tensor == stored[tensor.name]
    assert "rounded" not in caplog.text


def test_nodes_without_names_keep_their_block_sizes() -> None:
    """The first product has blocks of 32, the second of 16; the third has no weight."""
    draw = np.random.default_rng(0).standard_normal
    nodes, tensors = [], []
    for number, block in enumerate((32, 16)):
        packed, scales, _, _ = quantize(
            draw((64, 64)).astype(np.float32), bits=4, block_size=block, has_zeros=False
        )
        names = [f"layer{number}.weight_Q4", f"layer{number}.weight_scales"]
        arrays = zip((packed, scales), names, strict=True)
        tensors += [numpy_helper.from_array(array, name) for array, name in arrays]
        settings = {"K": 64, "N": 64, "bits": 4, "block_size": block, "domain": "com.microsoft"}
        x, y = ("x", "h") if number == 0 else ("h", "p")
        nodes.append(helper.make_node("MatMulNBits", [x, *names], [y], **settings))
    nodes += [
        helper.make_node("Transpose", ["p"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["p", "t"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    ends = [info("x", TensorProto.FLOAT, ["n", 64])], [info("y", TensorProto.FLOAT, ["n", "m"])]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "unnamed", *ends, tensors)
    adapted = lora.add(helper.make_model(graph, opset_imports=opsets, ir_version=10), rank=4)
    merged = merged_model(with_values(adapted, random_adapter(adapted)))
    onnx.checker.check_model(merged)
    found = [node for node in merged.graph.node if node.op_type == "MatMulNBits"]
    sizes = [each.i for node in found for each in node.attribute if each.name == "block_size"]
    assert sizes == [32, 16]
    assert [node.op_type for node in merged.graph.node][-1] == "MatMul"
    assert not any(node.name for node in found)
