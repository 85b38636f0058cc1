"""Adapters in PEFT's folders: adapter_model.safetensors and adapter_config.json.

Source: the checkpoint format in PEFT's documentation, and PEFT 0.21's LoraConfig.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError, UnsupportedError, did_you_mean
from ortops.graph import convert
from ortops.graph.adapters import Adapter, Module, scaling, value_for
from ortops.graph.convert import ModelLike
from ortops.graph.files import write_atomically
from ortops.lora.addition import Layer, attach, read_base
from ortops.lora.model import Array, check_base, read_adapted
from ortops.lora.targets import Target, targets

__all__ = ["from_peft", "to_peft"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "loftq_config"),
    *("layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_type"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
    *("task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
    *("init_lora_weights", "corda_config", "lora_ga_config"),
}
"""Settings that say which layers have an adapter, how it was trained, or what is read here."""

_SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to start A and B that leave the base's weights as they are."""

_TYPES: Mapping[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@convert.blame_model
def to_peft(model: ModelLike, folder: str | os.PathLike[str], *, prefix: str = "") -> None:
    """Writes the adapter of a model as PEFT does, so that ``PeftModel.from_pretrained`` loads it.

    Needs the package safetensors (``pip install ortops[lora]``).

    Args:
        model: A model with an adapter: a ModelProto, its bytes, or its path.
        folder: The folder, made where it is missing.
        prefix: What the layers' names begin with that PyTorch's do not have, as ``"model."`` if
            the exported module had what PEFT wraps as its attribute ``model``. Layers that
            `from_peft` read have PEFT's names anyway.

    Raises:
        ModelError: If the model has no adapter, its other weights have changed since it got it, or
            a layer's name does not begin with the prefix.
        OSError: If a file cannot be written.

    Example:
        >>> import tempfile
        >>> from models import mlp
        >>> from ortops import lora
        >>> model = lora.add(mlp.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.to_peft(model, folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    adapted = read_adapted(model)
    check_base(adapted)
    adapter = adapted.adapter
    tensors: dict[str, Array] = {}
    modules: dict[str, Module] = {}
    for name, module in adapter.modules.items():
        if not module.peft and not name.startswith(prefix):
            raise ModelError(
                f"prefix: it is '{prefix}', and layer '{name}' has another; give what all layers "
                "begin with"
            )
        layer = module.peft or name.removeprefix(prefix)
        modules[layer] = module
        a, b = (adapted.parameters[n].swapaxes(0, 1) for n in (module.a, module.b))
        b = (b / b.dtype.type(adapter.scaling(module))).astype(b.dtype)
        key_a, key_b = _keys(layer, module.kind)
        tensors |= {key_a: np.ascontiguousarray(a), key_b: np.ascontiguousarray(b)}
    if len(modules) < len(adapter.modules):
        raise ModelError(
            "model: two of its layers have one name in PEFT; merge the model, or add the adapter "
            "anew"
        )
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": _short(adapter.alpha),
        "lora_dropout": 0.0,
        "use_rslora": adapter.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "target_modules": sorted(modules),
        "rank_pattern": {
            f"^{re.escape(name)}": module.rank
            for name, module in modules.items()
            if module.rank != adapter.rank
        },
        "alpha_pattern": {
            f"^{re.escape(name)}": _short(module.alpha)
            for name, module in modules.items()
            if module.alpha != adapter.alpha
        },
    }
    content = _safetensors().numpy.save(tensors, {"format": "pt"})
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / _WEIGHTS, content)
    write_atomically(target / _CONFIG, (json.dumps(config, indent=2) + "\n").encode())


@convert.blame_model
def from_peft(model: ModelLike, folder: str | os.PathLike[str]) -> onnx.ModelProto:
    """Returns a model with the adapter of a folder that PEFT wrote.

    A layer is found by its name, or by what its name ends with: ``encoder.layer.0.query`` of PEFT
    is ``model.encoder.layer.0.query`` of the model. Needs the package safetensors
    (``pip install ortops[lora]``).

    Args:
        model: The base, without an adapter: a ModelProto, its bytes, or its path; not changed.
        folder: A folder with ``adapter_model.safetensors`` and ``adapter_config.json``.

    Returns:
        A new model, as of `ortops.lora.add`, with A and B in the type that the layers compute in.

    Raises:
        ModelError: If there is no such folder, the model has no layer of a name, several fit, or a
            shape is another.
        UnsupportedError: If the adapter is none of plain LoRA: DoRA, trained biases, saved modules,
            starts that change the base, or a layer that takes no adapter.

    Example:
        >>> import tempfile
        >>> from models import mlp
        >>> from ortops import lora
        >>> model = lora.add(mlp.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.to_peft(model, folder)
        ...     read = lora.from_peft(mlp.mlp((4, 16, 2)), folder)
        >>> [tensor.name for tensor in read.graph.initializer if "lora" in tensor.name]
        ['fc1.lora_A.weight', 'fc1.lora_B.weight']
    """
    path = Path(folder)
    config = _config(path / _CONFIG)
    patterns = (_mapping(config, "rank_pattern"), _mapping(config, "alpha_pattern"))
    rank, alpha = int(config.get("r", 8)), float(config.get("lora_alpha", 8))
    rslora = bool(config.get("use_rslora", False))
    base = read_base(model)
    everything = targets(base.work)
    pairs = _pairs(_tensors(path / _WEIGHTS), everything)
    layers: list[Layer] = []
    for peft, (a, b) in pairs.items():
        found = _find(everything, peft)
        for other in layers:
            if other.targets[0] is found[0]:
                raise ModelError(
                    f"layer '{peft}': the model's '{found[0].module}' is '{other.peft}' too; "
                    "export the module that PEFT wraps, so that the names are the same"
                )
        r = int(a.shape[0])
        if r != int(value_for(patterns[0], peft, rank)):
            raise ModelError(
                f"layer '{peft}': its rank is {r}, and {_CONFIG} says "
                f"{value_for(patterns[0], peft, rank):g}; they must agree"
            )
        own = float(value_for(patterns[1], peft, alpha))
        target = found[0]
        (into, out), kernel = target.sizes, target.kernel
        expected = ((r, into, *kernel), (out, r, *(1 for _ in kernel)))
        if (a.shape, b.shape) != expected:
            raise ModelError(
                f"layer '{peft}': A {list(a.shape)} and B {list(b.shape)} do not fit, as "
                f"'{target.weight.name}' takes {into} numbers and gives {out}: "
                f"{list(expected[0])} and {list(expected[1])} are accepted"
            )
        dtype = target.dtype.numpy()
        scale = scaling(r, own, rslora=rslora)
        scaled = b.astype(np.promote_types(b.dtype, np.float32)) * scale
        layer = Layer(
            found[0].module,
            r,
            own,
            np.ascontiguousarray(a.swapaxes(0, 1).astype(dtype)),
            np.ascontiguousarray(scaled.swapaxes(0, 1).astype(dtype)),
            found,
            peft,
        )
        layers.append(layer)
    layers.sort(key=lambda layer: everything.index(layer.targets[0]))  # files have no order
    return attach(base, layers, Adapter(rank, alpha, rslora, "", {}, *patterns))


def _keys(layer: str, kind: str) -> tuple[str, str]:
    parts = (
        ("lora_embedding_A", "lora_embedding_B")
        if kind == "embedding"
        else ("lora_A.weight", "lora_B.weight")
    )
    a, b = (f"{_PREFIX}{layer}.{part}" for part in parts)
    return a, b


def _short(number: float) -> float:
    """Returns a whole number as such, which is how PEFT writes an alpha."""
    return int(number) if float(number).is_integer() else number


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ModelError(
            "safetensors: the package is not installed, and PEFT's weights are files of it; "
            "pip install ortops[lora]"
        ) from error
    return safetensors


def _config(file: Path) -> dict[str, Any]:
    """Reads the settings, and refuses what is more than low-rank matrices."""
    try:
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(
            f"file '{file}': {error.strerror}; give a folder that PEFT wrote"
        ) from error
    except ValueError as error:
        raise ModelError(
            f"file '{file}': not JSON ({error}); give a folder that PEFT wrote"
        ) from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise UnsupportedError(f"file '{file}': its peft_type is {kind!r}; 'LORA' is accepted")
    if config.get("use_dora"):
        raise UnsupportedError(
            f"file '{file}': use_dora is true, and DoRA's magnitudes are no product of two "
            "matrices; train with use_dora=False"
        )
    if config.get("bias", "none") != "none":
        raise UnsupportedError(
            f"file '{file}': its bias is {config['bias']!r}, so that biases of the base were "
            "trained too; 'none' is accepted"
        )
    if config.get("modules_to_save"):
        raise UnsupportedError(
            f"file '{file}': its modules_to_save are {config['modules_to_save']}, whole layers "
            "beside the adapter; merge them in PyTorch and export that"
        )
    if config.get("init_lora_weights") not in _SAME_BASE:
        raise UnsupportedError(
            f"file '{file}': its init_lora_weights is {config['init_lora_weights']!r}, which "
            "changes the weights of the base; convert the adapter in PEFT, by the argument "
            "path_initial_model_for_weight_conversion of save_pretrained"
        )
    for name, value in config.items():
        if value and name not in _WITHOUT_EFFECT:
            raise UnsupportedError(
                f"file '{file}': its {name} is {value!r}, which is more than plain LoRA; train "
                "without it"
            )
    numbers = [(name, config[name]) for name in ("r", "lora_alpha") if name in config]
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise ModelError(
                f"file '{file}': its {name} is {patterns!r}; numbers by patterns are accepted"
            )
        numbers += [(f"{name} '{pattern}'", number) for pattern, number in patterns.items()]
    for name, number in numbers:
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number == 0:
            raise ModelError(
                f"file '{file}': its {name} is {number!r}; a number other than 0 is accepted"
            )
    return config


def _mapping(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(config.get(name) or {})


def _tensors(file: Path) -> dict[str, Array]:
    package = _safetensors()
    try:
        entries = package.deserialize(file.read_bytes())
    except OSError as error:
        raise ModelError(
            f"file '{file}': {error.strerror}; save the adapter in PEFT with "
            "safe_serialization=True"
        ) from error
    except package.SafetensorError as error:
        raise ModelError(
            f"file '{file}': not a safetensors file ({error}); write it anew"
        ) from error
    return {name: _array(file, name, entry) for name, entry in entries}


def _array(file: Path, name: str, entry: Mapping[str, Any]) -> Array:
    kind = entry["dtype"]
    if kind == "BF16":  # the upper half of a float32, which numpy does not have
        half = np.frombuffer(entry["data"], "<u2").astype(np.uint32)
        return (half << 16).view(np.float32).reshape(entry["shape"])
    if kind not in _TYPES:
        raise UnsupportedError(
            f"file '{file}': '{name}' is of type {kind}; F16, BF16, F32 and F64 are accepted"
        )
    return np.frombuffer(entry["data"], _TYPES[kind]).reshape(entry["shape"])


def _pairs(
    tensors: Mapping[str, Array], everything: Sequence[Target]
) -> dict[str, tuple[Array, Array]]:
    """Returns A and B by layer."""
    found: dict[str, dict[str, Array]] = {}
    for key, array in tensors.items():
        match = re.fullmatch(
            r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", key
        )
        if match is None and _is_of_base(key, array, everything):
            continue
        if match is None:
            raise UnsupportedError(
                f"file '{_WEIGHTS}': '{key}' is a weight of the base, other than the model's, or "
                "none of LoRA; A and B alone are accepted (save_embedding_layers=False)"
            )
        found.setdefault(match[1], {})[match[2]] = array
    for layer, parts in found.items():
        if len(parts) < 2:
            raise ModelError(
                f"file '{_WEIGHTS}': layer '{layer}' has no {'B' if 'A' in parts else 'A'}; write "
                "the adapter anew"
            )
    if not found:
        raise ModelError(f"file '{_WEIGHTS}': it has no tensors; write the adapter anew")
    return {layer: (parts["A"], parts["B"]) for layer, parts in found.items()}


def _is_of_base(key: str, array: Array, everything: Sequence[Target]) -> bool:
    """Whether a tensor is the model's own; PEFT writes embeddings of the base too."""
    match = re.fullmatch(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight", key)
    if match is None:
        return False
    for target in everything:
        tensor = ir.convenience.get_const_tensor(target.weight)
        if tensor is not None and _ends_with(target.module, match[1]):
            found = tensor.numpy()
            if np.array_equal(found, array) or np.array_equal(found.T, array):
                return True
    return False


def _ends_with(module: str, other: str) -> bool:
    """Whether two names of layers are one, but for what stands before it."""
    return module == other or module.endswith(f".{other}") or other.endswith(f".{module}")


def _find(everything: Sequence[Target], peft: str) -> list[Target]:
    """Returns the nodes of a layer of PEFT's."""
    exact = [t for t in everything if t.module == peft]
    fitting = exact or [t for t in everything if _ends_with(t.module, peft)]
    if not fitting:
        raise ModelError(
            f"layer '{peft}': the model has no product or embedding of it; "
            f"{did_you_mean(peft, dict.fromkeys(t.module for t in everything))}"
        )
    several = {(t.module, t.weight) for t in fitting}
    if len(several) > 1:
        names = ", ".join(f"'{t.module}' ({t.weight.name})" for t in fitting)
        raise ModelError(
            f"layer '{peft}': several of the model may be it: {names}; export the module that PEFT "
            "wraps, so that the names are the same"
        )
    if fitting[0].refused:
        raise UnsupportedError(f"{fitting[0].refused}; PEFT's layer '{peft}' needs it")
    return fitting
