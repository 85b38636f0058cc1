"""Reads and writes adapters in PEFT's format: adapter_model.safetensors and adapter_config.json.

Source: the checkpoint format in PEFT's documentation, and PEFT 0.21's LoraConfig.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError, OrtopsError, UnsupportedError
from ortops.graph import convert
from ortops.graph.adapters import FIELDS, Adapter, scaling
from ortops.graph.files import loading
from ortops.graph.files.atomic import TEMPORARY, siblings, write_together
from ortops.graph.files.json_fields import Expected, array_of, check_fields, or_null
from ortops.graph.files.json_text import read_settings
from ortops.graph.files.loading import ModelLike, readable
from ortops.graph.files.opening import file_in_folder
from ortops.graph.files.serialization import to_proto
from ortops.graph.layer_names import ends_with, standard
from ortops.graph.safetensors import dump_safetensors, read_safetensors
from ortops.lora.addition import Base, Layer, attach, read_base
from ortops.lora.full_weights import BIASES, Parameter, full_weights, is_in, parameters_of
from ortops.lora.model import (
    Adapted,
    Array,
    check_base,
    read_adapted,
    refuse_not_finite,
)
from ortops.lora.patterns import Patterns
from ortops.lora.peft_layers import (
    PeftLayer,
    Places,
    model_type_beside,
    peft_layers,
    refuse_folded,
)
from ortops.lora.removal import remove_adapter
from ortops.lora.targets import Target, parts, targets

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAGNITUDE = "lora_magnitude_vector"

_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "loftq_config"),
    *("layers_to_transform", "lora_dropout", "megatron_config", "megatron_core", "peft_type"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules"),
    *("task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"),
    *("init_lora_weights", "corda_config", "lora_ga_config", "use_dora", "modules_to_save"),
}
"""Settings that are read here, or that do not affect what a trained adapter computes."""

_FIELDS = {
    "r": FIELDS["rank"],
    "lora_alpha": FIELDS["alpha"],
    "use_rslora": or_null(FIELDS["rslora"]),
    "use_dora": or_null(FIELDS["dora"]),
    "lora_dropout": or_null(FIELDS["dropout"]),
    "bias": Expected(f"one of {', '.join(BIASES)}", lambda value: value in BIASES),
    "modules_to_save": or_null(array_of("names", lambda value: isinstance(value, str))),
    **{name: or_null(FIELDS[name]) for name in ("rank_pattern", "alpha_pattern")},
}
"""What settings must be, if they are there."""

_SAME_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Initializations of A and B that do not change the weights of the base."""

_CONV1D = re.compile(r"\bh\.[0-9]+\.(?:attn\.c_attn|(?:attn|mlp)\.c_proj|mlp\.c_fc)$")
"""Layers of GPT-2 that transformers computes with Conv1D, whose weight is [in, out]."""

_BFLOAT16 = ir.DataType.BFLOAT16.numpy()


@loading.blame_model
def to_peft(
    model: ModelLike,
    folder: str | os.PathLike[str],
    *,
    prefix: str = "",
    model_type: str | None = None,
) -> None:
    """Writes the adapter of a model in PEFT's format, for ``PeftModel.from_pretrained``.

    Layers get the names that transformers uses: onnxruntime-genai's ``layers.0.attn.o_proj`` is
    written as ``layers.0.self_attn.o_proj``. Where onnxruntime-genai fuses layers that are separate
    in transformers, or separates layers that are fused there (Phi-3), the adapter is written for
    the layers of transformers, and computes the same.

    Args:
        model: A model with an adapter: a ModelProto, its bytes, or its path.
        folder: The folder; created if it does not exist.
        prefix: A prefix to remove from the layers' names, such as ``"model."`` if the module that
            PEFT wraps was the attribute ``model`` of the exported module. Layers read by
            `from_peft` keep their names from PEFT.
        model_type: The model's type in transformers, such as ``"llama"`` or ``"phi3"``, which tells
            which layers are fused. By default it is read from config.json or genai_config.json
            beside the model's file. Without these, ``qkv_proj`` of onnxruntime-genai is written as
            q_proj, k_proj and v_proj.

    Raises:
        ModelError: If the model has no adapter, its base has changed since the adapter was added,
            the adapter's values are not finite, a layer's name does not start with the prefix, or
            two layers that differ have one name.
        UnsupportedError: If the exporter folded a BatchNormalization into a layer of the adapter.
        OSError: If a file cannot be written.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> from ortops import lora
        >>> model = lora.add(examples.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.to_peft(model, folder)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    adapted = read_adapted(model)
    check_base(adapted)
    refuse_not_finite(adapted.parameters, "model")
    if model_type is None and isinstance(model, (str, os.PathLike)):
        model_type = model_type_beside(Path(model).absolute())
    adapter = adapted.adapter
    places = _places(adapted)
    layers: dict[str, PeftLayer] = {}
    whole = () if _is_read(adapter) else adapter.weights.values()
    for name in (*whole, *(n for n, module in adapter.modules.items() if not module.peft)):
        if not standard(name).startswith(prefix):
            raise ModelError(
                f"prefix: layer '{name}' does not start with '{prefix}'; give a prefix that all "
                "layers share"
            )
    for name, module in adapter.modules.items():
        if not module.peft and name not in places:
            raise ModelError(
                f"model: layer '{name}' got a number, as the model has two layers of one name that "
                "differ, so its name in PEFT is unknown; add an adapter that leaves it out"
            )
        a, b = (adapted.parameters[n].swapaxes(0, 1) for n in (module.a, module.b))
        b = _unscaled(module.peft or name, b, adapter.scaling(module))
        m = adapted.parameters[module.magnitude].reshape(-1) if module.dora else None
        layers[name] = PeftLayer(module.kind, module.rank, module.alpha, a, b, module.columns, m)
    written = peft_layers(
        layers,
        {name: module.peft for name, module in adapter.modules.items()},
        {name: places.get(name, {}) for name in adapter.modules},
        prefix=prefix,
        model_type=model_type,
        rslora=adapter.rslora,
    )
    tensors: dict[str, Array] = {}
    for name, layer in written.items():
        key_a, key_b = _keys(name, layer.kind)
        tensors |= {key_a: np.ascontiguousarray(layer.a), key_b: np.ascontiguousarray(layer.b)}
        if layer.magnitude is not None:
            shape = (1, -1, *layer.b.shape[2:]) if layer.b.ndim > 2 else (-1,)
            tensors[f"{_PREFIX}{name}.{_MAGNITUDE}"] = layer.magnitude.reshape(shape)
    weights = _written_weights(adapted, written, prefix)
    tensors |= {f"{_PREFIX}{name}": array for name, array in weights.items()}
    content = dump_safetensors(tensors, {"format": "pt"})
    config = json.dumps(_written_config(adapter, written, weights), indent=2)
    write_together(Path(folder), {_WEIGHTS: content, _CONFIG: f"{config}\n".encode()})


def _places(adapted: Adapted) -> dict[str, dict[str, Sequence[int]]]:
    """Returns the layers of a model and parts of fused ones, with the columns of their parts."""
    work = convert.to_ir(adapted.model)
    remove_adapter(work, adapted.adapter)
    found: dict[str, dict[str, Sequence[int]]] = {}
    for target in targets(work):
        pieces = parts(target)
        if target.module in adapted.adapter.modules:
            refuse_folded(target)
        found.update({part.module: {} for part in pieces})
        found[target.module] = {part.module: part.columns for part in pieces}
    return found


def _is_read(adapter: Adapter) -> bool:
    """Whether the names of an adapter are those of a folder of PEFT."""
    return any(module.peft for module in adapter.modules.values())


def _written_weights(
    adapted: Adapted, layers: Mapping[str, PeftLayer], prefix: str
) -> dict[str, Array]:
    """Returns the weights that are trained themselves, by their names in PEFT."""
    adapter, result = adapted.adapter, dict[str, Array]()
    work = convert.to_ir(adapted.model)
    remove_adapter(work, adapter)
    known = {each.value.name: each for each in parameters_of(work) if adapter.weights}
    for name, peft in adapter.weights.items():
        if name in known and (target := known[name].target) is not None:
            refuse_folded(target)
        layer, _, attribute = peft.rpartition(".")
        layer = layer if _is_read(adapter) else layer.removeprefix(prefix)
        is_turned = name in known and _is_turned(known[name])
        array = adapted.parameters[name].T if is_turned else adapted.parameters[name]
        key = f"{layer}{'.base_layer' * (layer in layers)}.{attribute}"
        result[key] = np.ascontiguousarray(array)
    return result


def _is_turned(parameter: Parameter) -> bool:
    """Whether PEFT has a weight transposed; GPT-2's have the order of ONNX."""
    return parameter.is_turned != bool(
        parameter.target and parameter.attribute == "weight" and _CONV1D.search(parameter.module)
    )


def _read_weights(
    base: Base, found: dict[str, Array], config: Mapping[str, Any], layers: Sequence[Layer]
) -> dict[str, str]:
    """Gives a base the weights that were trained themselves; returns their names in PEFT."""
    everything = {each.value.name or "": each for each in parameters_of(base.work)}
    given = config.get("modules_to_save") or []  # of tasks, PEFT writes names that may not exist
    modules = [name for name in given if any(each.is_in([name]) for each in everything.values())]
    adapted, result = [target for layer in layers for target in layer.targets], dict[str, str]()
    for name in full_weights(base.work, modules, config.get("bias", "none"), adapted):
        parameter, tensor = everything[name], base.work.graph.initializers[name].const_value
        assert tensor is not None
        if parameter.target is not None:
            refuse_folded(parameter.target)
        keys = [key for key in found if ends_with(parameter.name, key)]
        array = found.pop(keys[0]) if len(keys) == 1 else np.zeros(0)
        array = array.T if _is_turned(parameter) else array
        if array.shape != tensor.shape.numpy():
            raise ModelError(
                f"file '{_WEIGHTS}': it must have '{parameter.name}' once, with {tensor.size} "
                f"numbers, as modules_to_save or bias of {_CONFIG} say, got {keys} of shape "
                f"{[*array.shape]}; give the model that the adapter was trained with"
            )
        array = np.ascontiguousarray(array.astype(tensor.dtype.numpy()))
        refuse_not_finite({keys[0]: array}, f"file '{_WEIGHTS}'")
        base.work.graph.initializers[name].const_value = ir.tensor(array, name=name)
        result[name] = keys[0]
    for key in found:
        why = f"the model has no '{key}'; export the module that PEFT wraps"
        raise UnsupportedError(f"file '{_WEIGHTS}': {why}")
    return result


def _written_config(
    adapter: Adapter, modules: Mapping[str, PeftLayer], weights: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the settings of an adapter, given its layers by their names in PEFT."""
    own = (name for name in weights if not (adapter.bias and name.endswith(".bias")))
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in own))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": None,
        "task_type": None,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": _short(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "bias": adapter.bias or "none",
        "fan_in_fan_out": bool(modules) and all(map(_CONV1D.search, modules)),
        "init_lora_weights": True,
        # PEFT matches an expression with full names, but the entries of a list with suffixes too.
        "target_modules": "|".join(re.escape(name) for name in sorted(modules)),
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
        **({"modules_to_save": saved} if saved else {}),
        **({"use_dora": True} if any(m.magnitude is not None for m in modules.values()) else {}),
    }


def refuse_others(folder: str | os.PathLike[str]) -> None:
    """Rejects a folder with an adapter that `to_peft` did not write: PEFT writes more settings.

    Raises:
        OrtopsError: If there is one.
    """
    present = [path for name in (_CONFIG, _WEIGHTS) if (path := Path(folder, name)).exists()]
    config = Path(folder, _CONFIG)
    for file in (config, *siblings(config, TEMPORARY)):  # left by a killed process
        with contextlib.suppress(OSError, ModelError):
            settings = read_settings(file)
            written = _written_config(Adapter(1, 1.0, False, "", {}), {}).keys()
            if settings.keys() - {"use_dora", "modules_to_save"} == written:
                return
    if present:
        raise OrtopsError(
            f"output: '{present[0]}' was not written by ortops; give another folder, or --force to "
            "replace it"
        )


@loading.blame_model
def from_peft(model: ModelLike, folder: str | os.PathLike[str]) -> onnx.ModelProto:
    """Returns a model with an adapter from a folder in PEFT's format.

    Layers are matched by name or by the end of their name: ``encoder.layer.0.query`` in PEFT
    matches ``model.encoder.layer.0.query`` in the model. Names of onnxruntime-genai, and
    layers that it fuses or separates, are matched with those of transformers.

    Args:
        model: The base, without an adapter: a ModelProto, its bytes, or its path; not changed.
        folder: A folder with ``adapter_model.safetensors`` and ``adapter_config.json``.

    Returns:
        A new model, as from `ortops.lora.add`, with A and B in the type that their layers compute
        in, or float32 beside 16 bits.

    Raises:
        ModelError: If a file is missing or invalid, a layer of the adapter matches no layer of the
            model or several, a shape differs, or a value is not finite.
        UnsupportedError: If the adapter is neither LoRA nor DoRA (such as initializations that
            change the base), or a layer cannot have an adapter or be trained itself.

    Example:
        >>> import tempfile
        >>> from ortops.docs import examples
        >>> from ortops import lora
        >>> model = lora.add(examples.mlp((4, 16, 2)), rank=2, targets=["fc1"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lora.to_peft(model, folder)
        ...     read = lora.from_peft(examples.mlp((4, 16, 2)), folder)
        >>> [tensor.name for tensor in read.graph.initializer if "lora" in tensor.name]
        ['fc1.lora_A.weight', 'fc1.lora_B.weight']
    """
    return to_proto(with_peft(read_base(model), folder))


def with_peft(base: Base, folder: str | os.PathLike[str]) -> ir.Model:
    """Returns a model that was read as a base, with an adapter of PEFT; see `from_peft`."""
    files = [file_in_folder(Path(folder), each, what="adapter") for each in (_CONFIG, _WEIGHTS)]
    config = _config(files[0])
    given = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    ranks, alphas = (Patterns(numbers, name) for name, numbers in given.items())
    rank, alpha = config.get("r", 8), float(config.get("lora_alpha", 8))
    rslora = config.get("use_rslora") or False
    dropout = float(config.get("lora_dropout") or 0)
    everything = targets(base.work)
    places = Places(everything)
    layers: list[Layer] = []
    dora = bool(config.get("use_dora"))
    tensors = _tensors(files[1])
    whole = _whole(tensors, config)
    for peft, (a, b, m) in _pairs(tensors, everything, dora=dora).items():
        r = a.shape[0] if a.ndim else 0
        expected_rank = ranks.value_for(peft, rank)
        if r != expected_rank:
            raise ModelError(
                f"layer '{peft}': its rank must be {expected_rank} as in {_CONFIG}, got {r}; "
                "write the adapter again"
            )
        own = float(alphas.value_for(peft, alpha))
        first, shared = 0, None
        for found, rows in places.of(peft, b):
            for other in layers:
                if other.targets[0] is found[0]:
                    raise ModelError(
                        f"layer '{peft}': the model's '{found[0].module}' also matches "
                        f"'{other.peft}'; export the module that PEFT wraps, so that the names are "
                        "the same"
                    )
            new_a, new_b = _fitted(peft, found[0], a, rows, scaling(r, own, rslora=rslora))
            own_m = None if m is None else m[first : first + len(rows)]
            first += len(rows)
            described = (found[0].module, r, own, new_a, new_b, found, peft, dora, own_m)
            layers.append(Layer(*described, shared))
            shared = shared or layers[-1]
    layers.sort(key=lambda layer: places.order(layer.targets[0]))  # files have no order
    adapter = Adapter(rank, alpha, rslora, "", {}, **given, dropout=dropout)  # type: ignore[arg-type]
    weights = _read_weights(base, whole, config, layers)
    bias = "" if config.get("bias", "none") == "none" else config["bias"]
    return attach(base, layers, replace(adapter, weights=weights, bias=bias))


def _whole(tensors: dict[str, Array], config: Mapping[str, Any]) -> dict[str, Array]:
    """Takes the weights that were trained themselves from the tensors of a file."""
    modules, biases = config.get("modules_to_save") or [], config.get("bias", "none") != "none"
    result: dict[str, Array] = {}
    for key in [key for key in tensors if ".lora_" not in key and key.startswith(_PREFIX)]:
        name = key.removeprefix(_PREFIX).replace(".base_layer.", ".")
        if biases and re.search(r"\.(original_module|modules_to_save)\.bias$", name):
            del tensors[key]  # PEFT writes the biases of saved modules thrice
        elif is_in(name.rpartition(".")[0], modules) or (biases and name.endswith(".bias")):
            result[name] = tensors.pop(key)
    return result


def _fitted(peft: str, target: Target, a: Array, b: Array, scale: float) -> tuple[Array, Array]:
    """Returns A and B as a model has them, from those of PEFT."""
    (into, out), kernel = target.sizes, target.kernel
    r = a.shape[0] if a.ndim else 0
    expected = ((r, into, *kernel), (out, r, *(1 for _ in kernel)))
    if (a.shape, b.shape) != expected:
        raise ModelError(
            f"layer '{peft}': A and B must have shapes {list(expected[0])} and "
            f"{list(expected[1])} to fit '{target.weight.name}', got {list(a.shape)} and "
            f"{list(b.shape)}; give the model that the adapter was trained with"
        )
    refuse_not_finite({"A": a, "B": b}, f"layer '{peft}'")
    dtype = target.adapter_dtype.numpy()
    with np.errstate(over="ignore"):
        scaled = b.astype(np.promote_types(b.dtype, np.float32)) * scale
        a, b = (np.ascontiguousarray(v.swapaxes(0, 1).astype(dtype)) for v in (a, scaled))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ModelError(
            f"layer '{peft}': A, or B times {scale:g}, overflows {dtype}, the type of the "
            "adapter; scale it down, or give a model of a wider type"
        )
    return a, b


def _unscaled(layer: str, b: Array, scale: float) -> Array:
    """Returns B without the scaling, which PEFT applies itself."""
    wide = b.astype(np.float64)
    with np.errstate(all="ignore"):
        result = (wide / scale).astype(b.dtype)
        error = abs(result.astype(np.float64) * scale - wide).max(initial=0)
    if not error <= 1e-2 * abs(wide).max(initial=0):
        raise ModelError(
            f"layer '{layer}': dividing B by its scaling {scale:g} loses precision in {b.dtype}; "
            "add the adapter with an alpha close to the rank"
        )
    return result


def _keys(layer: str, kind: str) -> tuple[str, str]:
    parts = (
        ("lora_embedding_A", "lora_embedding_B")
        if kind == "embedding"
        else ("lora_A.weight", "lora_B.weight")
    )
    a, b = (f"{_PREFIX}{layer}.{part}" for part in parts)
    return a, b


def _short(number: float) -> float:
    """Returns a whole number as an int, as PEFT writes an alpha."""
    return int(number) if float(number).is_integer() else number


def _config(file: Path) -> dict[str, Any]:
    """Reads the settings; rejects what is not plain LoRA."""
    remedy = "give a folder written by PEFT"
    config = readable(file, lambda path: read_settings(path, remedy), remedy)
    if config.get("peft_type") != "LORA":
        kind = config.get("peft_type")
        raise UnsupportedError(f"file '{file}': peft_type must be 'LORA', got {kind!r:.80}")
    _refuse_more_than_lora(file, config)
    check_fields(f"file '{file}'", config, _FIELDS, optional=_FIELDS, remedy=remedy)
    return config


def _refuse_more_than_lora(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("init_lora_weights") not in _SAME_BASE:
        raise UnsupportedError(
            f"file '{file}': init_lora_weights {config['init_lora_weights']!r:.80} changes the "
            "weights of the base; convert the adapter in PEFT with the argument "
            "path_initial_model_for_weight_conversion of save_pretrained"
        )
    for name, value in config.items():
        if value and name not in _WITHOUT_EFFECT:
            raise UnsupportedError(
                f"file '{file}': the setting {name:.80}={value!r:.80} is not supported, as it is "
                "not plain LoRA; train without it"
            )


def _tensors(file: Path) -> dict[str, Array]:
    """Reads the matrices; bfloat16 becomes float32, as numpy cannot compute with it."""
    found = readable(
        file, read_safetensors, "save the adapter in PEFT with safe_serialization=True"
    )
    for name, array in found.items():
        if array.dtype == _BFLOAT16:
            found[name] = array.astype(np.float32)
        elif array.dtype.kind != "f":
            raise UnsupportedError(
                f"file '{file}': '{name}' must be of type float16, bfloat16, float32 or float64, "
                f"got {array.dtype}"
            )
    return found


def _pairs(
    tensors: Mapping[str, Array], everything: Sequence[Target], *, dora: bool
) -> dict[str, tuple[Array, Array, Array | None]]:
    """Returns A, B and the magnitudes of DoRA by layer."""
    found: dict[str, dict[str, Array]] = {}
    parts_of_names = "[AB]|magnitude_vector" if dora else "[AB]"
    for key, array in tensors.items():
        match = re.fullmatch(
            rf"base_model\.model\.(.+)\.lora_(?:embedding_)?({parts_of_names})(?:\.weight)?", key
        )
        if match is None and _is_of_base(key, array, everything):
            continue
        if match is None:
            raise UnsupportedError(
                f"file '{_WEIGHTS}': '{key}' is not a LoRA matrix, or is a weight of the base that "
                "differs from the model's; save only A and B (save_embedding_layers=False)"
            )
        parts = found.setdefault(match[1], {})
        if match[2] in parts:
            raise ModelError(
                f"file '{_WEIGHTS}': layer '{match[1]}' has a second {match[2]}, '{key}'; write "
                "the adapter again"
            )
        parts[match[2]] = array
    for layer, parts in found.items():
        for part in ("A", "B", *(["magnitude_vector"] if dora else ())):
            if part not in parts:
                raise ModelError(
                    f"file '{_WEIGHTS}': layer '{layer}' has no {part}; write the adapter again"
                )
    if not found:
        raise ModelError(f"file '{_WEIGHTS}': it has no tensors; write the adapter again")
    return {
        layer: (parts["A"], parts["B"], parts["magnitude_vector"].reshape(-1) if dora else None)
        for layer, parts in found.items()
    }


def _is_of_base(key: str, array: Array, everything: Sequence[Target]) -> bool:
    """Whether a tensor is a weight of the model: PEFT also saves embeddings of the base."""
    match = re.fullmatch(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight", key)
    if match is None:
        return False
    for target in everything:
        tensor = ir.convenience.get_const_tensor(target.weight)
        if tensor is not None and ends_with(standard(target.module), match[1]):
            found = tensor.numpy()
            if np.array_equal(found, array) or np.array_equal(found.T, array):
                return True
    return False
