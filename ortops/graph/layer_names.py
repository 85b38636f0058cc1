"""Names of layers: those that exporters of language models write, and those of transformers.

onnxruntime-genai calls a layer ``model.layers.0.attn.o_proj.MatMul`` that transformers, and
therefore PEFT, call ``model.layers.0.self_attn.o_proj``. It also fuses layers that are separate in
most models, and separates those that Phi-3 fuses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""The parts of fused layers, in the order of their outputs, by the last part of their names."""

_OWN = {
    "phi": {"self_attn.o_proj": "self_attn.dense"},
    "lfm2": {
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    },
}
"""The names in transformers of layers that onnxruntime-genai calls as in Llama, by model type."""

_OPERATOR = re.compile(r"\.(?:MatMul|MatMulNBits|Gemm|Gather|GatherBlockQuantized)(?:_Q[0-9]+)?$")
_GENAI = re.compile(r"\b(layers\.[0-9]+)\.attn(?=\.(?:q|k|v|o|qkv)_proj$)")
_FINAL = re.compile(r"\blayers\.[0-9]+\.final_norm_layernorm$")
_WHOLES = {part: whole for whole, parts in FUSED.items() for part in parts}


def plain(name: str) -> str:
    """Returns a layer's name without the operator that onnxruntime-genai appends.

    >>> plain("model.layers.0.attn.qkv_proj.MatMul_Q4")
    'model.layers.0.attn.qkv_proj'
    """
    return _OPERATOR.sub("", name)


def standard(name: str) -> str:
    """Returns the name that transformers gives to a layer of a language model.

    >>> standard("model.layers.0.attn.q_proj.MatMul_Q4")
    'model.layers.0.self_attn.q_proj'
    >>> standard("model.layers.2.final_norm_layernorm")
    'model.norm'
    """
    return _FINAL.sub("norm", _GENAI.sub(r"\1.self_attn", plain(name)))


def own_name(name: str, model_type: str | None) -> str:
    """Returns the name that transformers gives to a layer of a type of model.

    >>> own_name(standard("model.layers.0.attn.o_proj.MatMul"), "phi")
    'model.layers.0.self_attn.dense'
    """
    return _renamed(name, _OWN.get(model_type or "", {}).items())


def common_name(name: str) -> str:
    """Returns the name in Llama of a layer that transformers calls otherwise in another model.

    >>> common_name("model.layers.0.feed_forward.w1")
    'model.layers.0.mlp.gate_proj'
    """
    return _renamed(name, [(new, old) for each in _OWN.values() for old, new in each.items()])


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    found = (name.removesuffix(old) + new for old, new in pairs if name.endswith(f".{old}"))
    return next(found, name)


def whole_of(name: str) -> str:
    """Returns the name of the fused layer that a layer is a part of; empty if there is none.

    >>> whole_of("model.layers.0.mlp.up_proj")
    'model.layers.0.mlp.gate_up_proj'
    """
    scope, dot, last = name.rpartition(".")
    return scope + dot + _WHOLES[last] if last in _WHOLES else ""


def ends_with(name: str, other: str) -> bool:
    """Whether two names are the same except for a prefix of one of them."""
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def fits(layer: str, peft: str) -> bool:
    """Whether a layer of a model may be a layer of PEFT, or the like-named part of one."""
    name = standard(layer)
    whole = whole_of(name)
    if ends_with(name, common_name(peft)):
        return True
    return any(ends_with(each, peft) for each in (layer, name, whole) if each)
