"""Reads the folder of a served language model: onnxruntime-genai's, Optimum's or another."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from ortops.errors import ArgumentError, ModelError, UnsupportedError
from ortops.graph.files.atomic import copy_atomically, is_temporary
from ortops.graph.files.json_text import read_json

__all__ = ["GENAI_CONFIG", "Folder", "copy_others", "genai_config", "open_folder", "refuse_norms"]

GENAI_CONFIG = "genai_config.json"
_NAMES = (
    *("model.onnx", "onnx/model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx"),
    *("model_q4.onnx", "onnx/model_q4.onnx", "model_quantized.onnx", "onnx/model_quantized.onnx"),
    *(f"onnx/model_{each}.onnx" for each in ("fp16", "q4f16", "int8", "uint8", "bnb4")),
    "onnx/decoder_model_merged.onnx",
)
_ADAPTERS = ".onnx_adapter"
_NORMS, _FIRST_NORM = ("q_norm_weight", "k_norm_weight"), 14
_PARTS = {
    "encoder": "encoder_model",
    "decoder": "decoder_model",
    "with_past": "decoder_with_past_model",
    "merged": "decoder_model_merged",
}

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class Folder:
    """The folder of a language model.

    Attributes:
        path: The folder.
        model: The file of the model.
        genai: The settings in genai_config.json under ``model``; empty if there is no such file.
        config: The settings in config.json, then those of generation_config.json.
        tokenizer_config: The settings in tokenizer_config.json.
        parts: The files of an encoder-decoder model: ``encoder``, ``decoder`` (without a cache),
            ``with_past`` and ``merged``, as far as they exist; empty for other models.
    """

    path: Path
    model: Path
    genai: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    parts: Mapping[str, Path] = field(default_factory=dict)

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer."""
        return (self.path / "tokenizer.json").is_file()

    @property
    def context_length(self) -> int | None:
        """The largest number of tokens of a sequence; None if the folder has no such setting."""
        found = self.genai.get("context_length", self.config.get("max_position_embeddings"))
        return found if isinstance(found, int) and found > 0 else None

    @property
    def end(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        found = self.genai.get("eos_token_id", self.config.get("eos_token_id"))
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    @property
    def logits(self) -> str:
        """The name of the output with the scores of the next token."""
        return _text(self.genai, "decoder", "outputs", "logits") or "logits"

    def input_name(self, name: str) -> str:
        """Returns the model's name of ``input_ids``, ``attention_mask`` or ``position_ids``."""
        return _text(self.genai, "decoder", "inputs", name) or name


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Reads the settings of a folder.

    Args:
        path: The folder, or the model's file in it.

    Raises:
        ArgumentError: If there is no such file or folder.
        ModelError: If the folder has no model, or a file of settings is not valid.
    """
    if not isinstance(path, str | os.PathLike) or not Path(path).exists():
        raise ArgumentError(
            f"folder_or_file must be the path of a folder or file, got {path!r:.200}"
        )
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    if folder.name == "onnx" and not (folder / "config.json").exists():  # transformers.js
        folder = folder.parent
    genai = _settings(folder / GENAI_CONFIG).get("model", {})
    config = _settings(folder / "config.json") | _settings(folder / "generation_config.json")
    tokenizer = _settings(folder / "tokenizer_config.json")
    parts = _parts(folder) if given.is_dir() and not genai else {}
    if parts:
        model = parts.get("decoder") or parts["merged"]
        return Folder(folder, model, genai, config, tokenizer, parts)
    name = _text(genai, "decoder", "filename")
    model = _model_file(folder, name) if given.is_dir() else given
    return Folder(folder, model, genai, config, tokenizer)


def _parts(folder: Path) -> dict[str, Path]:
    """Returns the files of an encoder-decoder model; empty if there is no encoder."""
    for place in (folder, folder / "onnx"):
        found = {
            part: place / f"{name}.onnx"
            for part, name in _PARTS.items()
            if (place / f"{name}.onnx").is_file()
        }
        if "encoder" in found and found.keys() & {"decoder", "merged"}:
            return found
        if "encoder" in found:
            raise ModelError(
                f"folder '{place}': it has encoder_model.onnx, but neither decoder_model.onnx nor "
                "decoder_model_merged.onnx; add one of them"
            )
    return {}


def copy_others(folder: Folder, target: Path, *, without: str = "") -> None:
    """Copies what is in a folder besides the model and its adapters to another folder.

    Directories are not copied.

    Args:
        folder: The folder.
        target: The other folder.
        without: The name of a file that is not copied either.
    """
    files = [folder.model, *folder.parts.values()]
    protos = [onnx.load(file, load_external_data=False) for file in files]
    tensors = [tensor for proto in protos for tensor in proto.graph.initializer]
    data = {e.value for t in tensors for e in t.external_data if e.key == "location"}
    for file in sorted(folder.path.iterdir()):
        is_model = file.suffix in (".onnx", _ADAPTERS) or file.name in {*data, without}
        if file.is_file() and not is_model and not is_temporary(file.name):
            copy_atomically(file, target / file.name)


def sliding_windows(folder: Folder) -> dict[str, int]:
    """Returns the length of each sliding cache of a folder's model, by the name of its input."""
    graph = onnx.load(folder.model, load_external_data=False).graph
    found: dict[str, int] = {}
    for node in graph.node:
        numbers = {each.name: each.i for each in node.attribute}
        if node.op_type == "GroupQueryAttention" and numbers.get("sliding_window_cache"):
            found |= dict.fromkeys(node.input[3:5], numbers["local_window_size"])
    return found


def refuse_norms(model: onnx.ModelProto) -> None:
    """Rejects attention that onnxruntime computes on GPUs only.

    Raises:
        UnsupportedError: If a GroupQueryAttention node normalizes queries or keys.
    """
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            given = dict(zip(_NORMS, node.input[_FIRST_NORM:], strict=False))
            for name, value in given.items():
                if value:
                    raise UnsupportedError(
                        f"generate: GroupQueryAttention node '{node.name}': onnxruntime's CPU "
                        f"provider does not support the input {name}; generate with the tool that "
                        "serves the folder"
                    )


def genai_config(folder: Folder) -> str:
    """Returns a genai_config.json for a folder of Optimum, by its config.json.

    Returns:
        An empty text if the folder has genai_config.json, config.json lacks a setting, or the
        model's caches have other names than ``past_key_values.0.key`` and ``present.0.key``.
    """
    config = folder.config
    sizes = {
        "num_attention_heads": config.get("num_attention_heads"),
        "num_hidden_layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "vocab_size": config.get("vocab_size"),
        "context_length": folder.context_length,
    }
    if (folder.path / GENAI_CONFIG).exists() or not (
        all(isinstance(size, int) and size > 0 for size in sizes.values()) and folder.end
    ):
        return ""
    heads = int(config["num_attention_heads"])
    graph = onnx.load(folder.model, load_external_data=False).graph
    if not {"past_key_values.0.key", "present.0.key"} <= {
        value.name for value in (*graph.input, *graph.output)
    }:
        return ""
    plain = ("input_ids", "attention_mask", "position_ids")
    names = {value.name: value.name for value in graph.input if value.name in plain}
    caches, kinds = ("past_key_values", "present"), ("key", "value")
    past, present = (
        {f"{cache.partition('_')[0]}_{kind}_names": f"{cache}.%d.{kind}" for kind in kinds}
        for cache in caches
    )
    decoder = {
        "session_options": {"provider_options": []},
        "filename": folder.model.relative_to(folder.path).as_posix(),
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "hidden_size": config["hidden_size"],
        "inputs": names | past,
        "outputs": {"logits": folder.logits} | present,
        "num_attention_heads": heads,
        "num_hidden_layers": config["num_hidden_layers"],
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
    }
    model = {
        "type": config.get("model_type", "llama"),
        "bos_token_id": config.get("bos_token_id", folder.end[0]),
        "eos_token_id": list(folder.end),
        "pad_token_id": config.get("pad_token_id") or folder.end[0],
        "vocab_size": config["vocab_size"],
        "context_length": folder.context_length,
        "decoder": decoder,
    }
    search = {"max_length": folder.context_length, "past_present_share_buffer": False}
    return json.dumps({"model": model, "search": search}, indent=4)


def _model_file(folder: Path, name: str) -> Path:
    if name:
        if not (folder / name).is_file():
            raise ModelError(f"folder '{folder}': {GENAI_CONFIG} names '{name}', which is missing")
        return folder / name
    known = (folder / each for each in _NAMES)
    found = next((file for file in known if file.is_file()), None)
    files = sorted([*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")])
    if found is None and len(files) != 1:
        raise ModelError(
            f"folder '{folder}': cannot choose the model among {len(files)} .onnx files; give the "
            "path of the file"
        )
    if len(files) > 1:
        logger.info("folder '%s': model '%s'; give another file's path to use it", folder, found)
    return found or files[0]


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = read_json(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"file '{file}': invalid JSON: {error}; correct it") from error
    if not isinstance(found, dict):
        raise ModelError(f"file '{file}': it must be a JSON object, got {type(found).__name__}")
    return found


def _text(settings: Any, *keys: str) -> str:
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings if isinstance(settings, str) else ""
