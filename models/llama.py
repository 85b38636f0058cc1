"""A tiny Llama with random weights in a folder of onnxruntime-genai: model, tokenizer, template.

The nodes and names are as onnxruntime-genai's builder 0.18 writes them
(``python -m onnxruntime_genai.models.builder``), in float32 or with weights of 4 bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

__all__ = [
    *("CONTEXT", "HEADS", "HIDDEN", "LAYERS", "PAIRS", "SIZE", "WIDE", "WORDS"),
    *("llama", "write", "write_tokenizer"),
]

Array = npt.NDArray[Any]

LAYERS, HIDDEN, HEADS, PAIRS, WIDE, CONTEXT = 2, 32, 2, 1, 64, 128
SIZE = HIDDEN // HEADS
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
WORDS = 256 + len(SPECIAL)

_BLOCK = 32
_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write(folder: str | Path, *, bits: int = 32, seed: int = 0, layers: int = LAYERS) -> Path:
    """Writes a folder that onnxruntime-genai opens.

    Args:
        folder: The folder, which is created.
        bits: The bits of a weight: 32, or 4 in blocks of 32 (MatMulNBits).
        seed: The seed of the weights.
        layers: The number of layers.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        llama(bits=bits, seed=seed, layers=layers),
        path / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=256,
    )
    _write_json(path / "genai_config.json", _genai_config(layers))
    write_tokenizer(path)
    return path


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of bytes and a chat template into a folder."""
    _write_json(folder / "tokenizer.json", _tokenizer())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    _write_json(folder / "tokenizer_config.json", settings | {"pad_token": SPECIAL[0]})
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def llama(*, bits: int = 32, seed: int = 0, layers: int = LAYERS) -> onnx.ModelProto:
    """Returns the model; see `write`."""
    generator = np.random.default_rng(seed)
    nodes: list[onnx.NodeProto] = []
    stored: dict[str, Array] = {}

    def node(kind: str, inputs: list[str], name: str, outputs: int = 1, **more: Any) -> str:
        found = [f"{name}/output_{number}" for number in range(outputs)]
        domain = "com.microsoft" if kind in _MICROSOFT else ""
        nodes.append(helper.make_node(kind, inputs, found, name, domain=domain, **more))
        return found[0]

    def linear(x: str, scope: str, into: int, out: int) -> str:
        weight = f"{scope}.MatMul.weight"
        values = generator.normal(0, into**-0.5, (into, out)).astype(np.float32)
        name = "/" + scope.replace(".", "/").replace("layers/", "layers.") + "/MatMul"
        if bits == 32:
            stored[weight] = values
            return node("MatMul", [x, weight], name)
        quantized, scales = _quantized(values)
        stored[f"{weight}_Q4"], stored[f"{weight}_scales"] = quantized, scales
        inputs = [x, f"{weight}_Q4", f"{weight}_scales"]
        settings = {"K": into, "N": out, "bits": 4, "block_size": _BLOCK, "accuracy_level": 0}
        return node("MatMulNBits", inputs, f"{name}_Q4", **settings)

    def norm(x: list[str], scope: str) -> tuple[str, str]:
        stored[f"{scope}.weight"] = generator.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        name = "/" + scope.replace(".", "/").replace("layers/", "layers.")
        if len(x) == 1:
            inputs = [*x, f"{scope}.weight"]
            return x[0], node("SimplifiedLayerNormalization", inputs, name, axis=-1, epsilon=1e-6)
        inputs = [*x, f"{scope}.weight"]
        found = node("SkipSimplifiedLayerNormalization", inputs, name, outputs=4, epsilon=1e-6)
        nodes[-1].output[1] = nodes[-1].output[2] = ""
        return nodes[-1].output[3], found

    stored["one"], stored["second"] = np.array([1]), np.array(1)
    count = node("ReduceSum", ["attention_mask", "one"], "/mask/ReduceSum", keepdims=1)
    last = node("Sub", [count, "one"], "/mask/Sub")
    lengths = node("Cast", [last], "/mask/Cast", to=TensorProto.INT32)
    sizes = node("Shape", ["attention_mask"], "/mask/Shape")
    total = node("Gather", [sizes, "second"], "/mask/Gather", axis=0)
    total = node("Cast", [total], "/mask/Cast_1", to=TensorProto.INT32)
    angles = np.outer(np.arange(CONTEXT), 10000.0 ** (-np.arange(0, SIZE, 2) / SIZE))
    stored["cos_cache"] = np.cos(angles).astype(np.float32)
    stored["sin_cache"] = np.sin(angles).astype(np.float32)
    embedding = generator.normal(0, 1, (WORDS, HIDDEN)).astype(np.float32)
    stored["model.embed_tokens.weight"] = embedding
    x = node("Gather", ["model.embed_tokens.weight", "input_ids"], "/model/embed_tokens/Gather")
    x, y = norm([x], "model.layers.0.input_layernorm")
    for layer in range(layers):
        scope = f"model.layers.{layer}"
        qkv = linear(y, f"{scope}.attn.qkv_proj", HIDDEN, (HEADS + 2 * PAIRS) * SIZE)
        past = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        inputs = [qkv, "", "", *past, lengths, total, "cos_cache", "sin_cache"]
        settings = {"num_heads": HEADS, "kv_num_heads": PAIRS, "do_rotary": 1}
        name = f"/model/layers.{layer}/attn/GroupQueryAttention"
        y = node("GroupQueryAttention", inputs, name, 3, **settings, scale=SIZE**-0.5)
        nodes[-1].output[1:] = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        y = linear(y, f"{scope}.attn.o_proj", HIDDEN, HIDDEN)
        x, y = norm([x, y], f"{scope}.post_attention_layernorm")
        gate = linear(y, f"{scope}.mlp.gate_proj", HIDDEN, WIDE)
        up = linear(y, f"{scope}.mlp.up_proj", HIDDEN, WIDE)
        sigmoid = node("Sigmoid", [gate], f"/model/layers.{layer}/mlp/act_fn/Sigmoid")
        gate = node("Mul", [gate, sigmoid], f"/model/layers.{layer}/mlp/act_fn/Mul")
        y = node("Mul", [gate, up], f"/model/layers.{layer}/mlp/Mul")
        y = linear(y, f"{scope}.mlp.down_proj", WIDE, HIDDEN)
        is_last = layer + 1 == layers
        after = "final_norm_layernorm" if is_last else "input_layernorm"
        x, y = norm([x, y], f"model.layers.{layer + 1}.{after}")
    linear(y, "lm_head", HIDDEN, WORDS)
    nodes[-1].output[0] = "logits"
    return _model(nodes, stored, layers)


_MICROSOFT = ("GroupQueryAttention", "MatMulNBits", "SkipSimplifiedLayerNormalization")


def _model(nodes: list[onnx.NodeProto], stored: dict[str, Array], layers: int) -> onnx.ModelProto:
    cache = ("batch_size", PAIRS, "{}_sequence_length", "kv_cache_dim")
    floats, integers = TensorProto.FLOAT, TensorProto.INT64

    def caches(kind: str, which: str) -> list[onnx.ValueInfoProto]:
        shape = [each.format(which) if isinstance(each, str) else each for each in cache]
        names = [f"{kind}.{n}.{what}" for n in range(layers) for what in ("key", "value")]
        return [helper.make_tensor_value_info(name, floats, shape) for name in names]

    sized = {"input_ids": "sequence_length", "attention_mask": "total_sequence_length"}
    inputs = [
        helper.make_tensor_value_info(name, integers, ["batch_size", size])
        for name, size in sized.items()
    ]
    shape = ["batch_size", "sequence_length", WORDS]
    graph = helper.make_graph(
        nodes,
        "main_graph",
        [*inputs, *caches("past_key_values", "past")],
        [helper.make_tensor_value_info("logits", floats, shape), *caches("present", "total")],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    imports = [helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _quantized(values: Array) -> tuple[Array, Array]:
    """Returns a matrix [in, out] in 4 bits, [out, blocks, bytes], and the scales [out, blocks]."""
    blocks = values.T.reshape(values.shape[1], -1, _BLOCK)
    scales = np.abs(blocks).max(-1) / 7
    whole = (np.round(blocks / scales[..., None]) + 8).astype(np.uint8)
    return whole[..., ::2] | whole[..., 1::2] << 4, scales


def _genai_config(layers: int) -> dict[str, Any]:
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": SIZE,
        "hidden_size": HIDDEN,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": PAIRS,
    }
    special = {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    model = {"context_length": CONTEXT, "decoder": decoder, "type": "llama", "vocab_size": WORDS}
    search = {"do_sample": False, "max_length": CONTEXT, "past_present_share_buffer": True}
    return {"model": model | special, "search": search}


def _tokenizer() -> dict[str, Any]:
    """Returns a tokenizer of bytes, as GPT-2's without merges."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": text, "special": True} | flags
        for number, text in enumerate(SPECIAL, 256)
    ]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "post_processor": None,  # transformers.js wants the key
        "pre_tokenizer": by_bytes | {"use_regex": True},
        "decoder": by_bytes,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
