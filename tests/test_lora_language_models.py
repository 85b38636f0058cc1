"""Adapters of language models: files of onnxruntime-genai, and the same models in PEFT.

The models of transformers get the weights of the file, fused as transformers has them. What PEFT
computes is the oracle. Both compute in float32, so logits of some 1 differ by some 1e-6.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import peft
import pytest
import safetensors.numpy
import torch
import transformers
from lora_models import outputs, values
from running import plain_session
from violations import all_violations

import ortops
from models import llama
from ortops import TrainingSession, lora

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

IDS = np.random.default_rng(0).integers(3, 200, (2, 9))
SIZES: dict[str, Any] = {"hidden_size": llama.HIDDEN, "intermediate_size": llama.WIDE}
SIZES |= {"num_hidden_layers": llama.LAYERS, "num_attention_heads": llama.HEADS}
SIZES |= {"num_key_value_heads": llama.PAIRS, "vocab_size": llama.WORDS, "rms_norm_eps": 1e-6}
SIZES |= {"max_position_embeddings": llama.CONTEXT, "tie_word_embeddings": False}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEAD = llama.HIDDEN // llama.HEADS


def feeds() -> dict[str, np.ndarray]:
    empty = np.zeros((2, llama.PAIRS, 0, HEAD), np.float32)
    past = [f"past_key_values.{n}.{kind}" for n in range(llama.LAYERS) for kind in ("key", "value")]
    given = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    return given | dict.fromkeys(past, empty)


def logits(model: onnx.ModelProto) -> np.ndarray:
    return outputs(model, feeds())[0]


def in_transformers(kind: str) -> Any:
    """Returns the model of `models.llama` in transformers, as Llama or, fused, as Phi-3."""
    found = values(llama.llama())
    state = {}
    for name, array in found.items():
        if name.endswith((".MatMul.weight", "norm.weight")):
            layer = name.replace(".MatMul.weight", ".weight").replace(".attn.", ".self_attn.")
            layer = layer.replace(f"layers.{llama.LAYERS}.final_norm_layernorm", "norm")
            state[layer] = array.T if ".MatMul." in name else array
    state["model.embed_tokens.weight"] = found["model.embed_tokens.weight"]
    norm = f"model.layers.{llama.LAYERS}.final_norm_layernorm.weight"
    state["model.norm.weight"] = found[norm]
    for n in range(llama.LAYERS):
        scope = f"model.layers.{n}"
        for kept in ("input_layernorm", "post_attention_layernorm"):
            state[f"{scope}.{kept}.weight"] = found[f"{scope}.{kept}.weight"]
        if kind == "phi3":
            pair = [state.pop(f"{scope}.mlp.{part}_proj.weight") for part in ("gate", "up")]
            state[f"{scope}.mlp.gate_up_proj.weight"] = np.concatenate(pair)
        else:
            fused = state.pop(f"{scope}.self_attn.qkv_proj.weight")
            ends = np.cumsum([llama.HIDDEN, llama.PAIRS * HEAD])
            for part, rows in zip("qkv", np.split(fused, ends), strict=True):
                state[f"{scope}.self_attn.{part}_proj.weight"] = rows
    if kind == "phi3":
        config = transformers.Phi3Config(**SIZES, original_max_position_embeddings=llama.CONTEXT)
        model: Any = transformers.Phi3ForCausalLM(config)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    tensors = {name: torch.from_numpy(a.copy()) for name, a in state.items()}
    model.load_state_dict(tensors, strict=True)
    return model.eval()


def in_peft(kind: str, **settings: Any) -> Any:
    wrapped = peft.get_peft_model(in_transformers(kind), peft.LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 8)
    return wrapped.eval()


def computed(module: Any) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(IDS)).logits.numpy()


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "q and v": ("llama", {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}}),
    "all-linear": ("llama", {"target_modules": "all-linear", "alpha_pattern": {"k_proj": 5}}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "fused": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"], "use_rslora": True}),
}


@pytest.mark.parametrize(("kind", "settings"), CONFIGS.values(), ids=CONFIGS)
def test_an_adapter_of_peft(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    wrapped = in_peft(kind, r=4, lora_alpha=6, **settings)
    wrapped.save_pretrained(tmp_path / "given", save_embedding_layers=False)
    base = llama.llama()
    model = lora.from_peft(base, tmp_path / "given")
    expected = computed(wrapped)
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    assert abs(logits(base) - expected).max() > 0.1
    np.testing.assert_allclose(logits(lora.merge(model)), expected, atol=1e-4)

    lora.save_adapter(model, tmp_path / "a.onnx_adapter")
    first = lora.load_adapter(model, tmp_path / "a.onnx_adapter")
    np.testing.assert_array_equal(logits(first), logits(model))

    lora.to_peft(model, tmp_path / "same")
    one, other = (
        safetensors.numpy.load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("given", "same")
    )
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [CONFIGS["q and v"], CONFIGS["fused"], ("phi3", CONFIGS["fused"][1] | {"use_dora": True})],
    ids=["parts here", "parts in PEFT", "parts in PEFT with DoRA"],
)
def test_parts_of_a_fused_layer_train_as_in_peft(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    wrapped = in_peft(kind, r=3, lora_alpha=6, **settings)
    wrapped.save_pretrained(tmp_path / "given")
    parameters = [each for each in wrapped.parameters() if each.requires_grad]
    adam, expected = torch.optim.Adam(parameters, lr=0.01), []
    for _ in range(4):
        adam.zero_grad()
        ids = torch.from_numpy(IDS)
        loss = wrapped(ids, labels=ids).loss
        loss.backward()
        adam.step()
        expected.append(loss.item())
    model = lora.from_peft(llama.llama(), tmp_path / "given")
    session = trainer(model, 0.01)
    losses = [step(session) for _ in range(4)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[3] < losses[0] - 0.05
    trained = session.inference_model()
    np.testing.assert_allclose(logits(trained), computed(wrapped), atol=1e-3)


def trainer(model: onnx.ModelProto, rate: float) -> TrainingSession:
    adam = ortops.optimizers.Adam(rate, epsilon_after_correction=True)
    built = ortops.build_training_model(
        model, loss=ortops.losses.NextToken("logits"), optimizer=adam
    )
    return TrainingSession(built)


def step(session: TrainingSession) -> float:
    given = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "labels": IDS}
    return float(session.step(given)["loss"])


@pytest.mark.nightly(2)
@pytest.mark.parametrize("kind", ["llama", "phi3"])
@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "v_proj", "down_proj"], ["gate_proj", "lm_head"]]
)
def test_an_adapter_that_began_here(kind: str, targets: Any, tmp_path: Path) -> None:
    model = lora.add(
        llama.llama(), 4, 8, targets, rank_pattern={"v_proj": 2} if "v_proj" in targets else None
    )
    session = trainer(model, 0.02)
    for _ in range(3):
        step(session)
    trained = session.inference_model()
    if kind == "phi3":
        lora.to_peft(trained, tmp_path, model_type="phi3")
    else:
        lora.to_peft(trained, tmp_path)
    found = peft.PeftModel.from_pretrained(in_transformers(kind), tmp_path).eval()
    np.testing.assert_allclose(computed(found), logits(trained), atol=1e-4)
    assert abs(logits(trained) - logits(llama.llama())).max() > 0.1
    again = lora.from_peft(llama.llama(), tmp_path)
    np.testing.assert_allclose(logits(again), logits(trained), atol=1e-4)


def test_gpt2_has_layers_whose_weights_are_transposed(tmp_path: Path) -> None:
    """PEFT warns if fan_in_fan_out is false for Conv1D."""
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config).eval()
    weights = {
        name: parameter.detach().numpy()
        for name, parameter in module.named_parameters()
        if "c_attn" in name
    }
    with ortops.Tape() as tape:
        x = tape.input("x", np.float32, ["batch", 16])
        read = {n.rpartition(".")[2]: tape.initializer(n, a) for n, a in weights.items()}
        tape.output(ortops.op.Gemm(x, read["weight"], read["bias"]), "y")
    base = tape.model()
    rows = np.random.default_rng(0).standard_normal((5, 16), np.float32)
    model = lora.add(base, 2, 4)
    array = {n: a + 0.1 for n, a in values(model).items() if "lora_B" in n}
    for tensor in model.graph.initializer:
        if tensor.name in array:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array[tensor.name], tensor.name))
    lora.to_peft(model, tmp_path)
    wrapped = peft.PeftModel.from_pretrained(module, tmp_path).eval()
    layer = wrapped.base_model.model.transformer.h[0].attn.c_attn
    assert layer.fan_in_fan_out
    with torch.no_grad():
        expected = layer(torch.from_numpy(rows)).numpy()
    (y,) = plain_session(model).run(None, {"x": rows})
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("phi", {"self_attn.o_proj": "self_attn.dense"}),
        (
            "lfm2",
            {
                "self_attn.o_proj": "self_attn.out_proj",
                "mlp.gate_proj": "feed_forward.w1",
                "mlp.up_proj": "feed_forward.w3",
                "mlp.down_proj": "feed_forward.w2",
            },
        ),
    ],
)
def test_layers_have_the_names_of_their_model_in_transformers(
    kind: str, names: dict[str, str], tmp_path: Path
) -> None:
    """Written for a type of model, and read into a model of onnxruntime-genai again."""
    targets = [name.rpartition(".")[2] for name in names]
    model = lora.add(llama.llama(layers=1), rank=2, targets=targets)
    draw = np.random.default_rng(0).standard_normal
    for tensor in model.graph.initializer:
        if ".lora_" in tensor.name:
            array = draw(tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    lora.to_peft(model, tmp_path, model_type=kind)
    written = {*safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")}
    expected = {f"layers.0.{name}.lora_{part}" for name in names.values() for part in "AB"}
    found = {"".join(re.findall(r"layers\.0\..*\.lora_[AB]", name)) for name in written}
    assert found == expected
    again = lora.from_peft(llama.llama(layers=1), tmp_path)
    with all_violations() as check:
        for name, array in values(model).items():
            with check(name):
                np.testing.assert_array_equal(values(again)[name], array)
    lora.to_peft(again, tmp_path / "again", model_type=None)  # the names that were read
    assert {
        *safetensors.numpy.load_file(tmp_path / "again" / "adapter_model.safetensors")
    } == written
