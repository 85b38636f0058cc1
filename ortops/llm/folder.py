"""Reads the folder of a served language model: onnxruntime-genai's, Optimum's or another."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from ortops.errors import ArgumentError, ModelError, UnsupportedError
from ortops.graph.files.atomic import copy_atomically, is_temporary
from ortops.graph.files.json_fields import (
    TEXT,
    Expected,
    check_fields,
    object_of,
    or_null,
)
from ortops.graph.files.json_text import read_settings
from ortops.graph.files.loading import load
from ortops.graph.files.opening import file_in_folder, leads_out, open_regular

GENAI_CONFIG = "genai_config.json"
_NAMES = (
    *("model.onnx", "onnx/model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx"),
    *("model_q4.onnx", "onnx/model_q4.onnx", "model_quantized.onnx", "onnx/model_quantized.onnx"),
    *(f"onnx/model_{each}.onnx" for each in ("fp16", "q4f16", "int8", "uint8", "bnb4")),
    "onnx/decoder_model_merged.onnx",
)
_ADAPTERS = ".onnx_adapter"
_BEHIND_PADDING = (
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "camembert", "mpnet"),
    *("longformer", "data2vec-text", "ibert", "esm"),
)
"""Types of models whose positions begin behind the token of padding."""
_NORMS, _FIRST_NORM = ("q_norm_weight", "k_norm_weight"), 14
_PARTS = {
    "encoder": "encoder_model",
    "decoder": "decoder_model",
    "with_past": "decoder_with_past_model",
    "merged": "decoder_model_merged",
}


def _are_integers(value: Any) -> bool:
    return all(type(n) is int and abs(n) < 2**63 for n in _listed(value))


def _is_template(value: Any) -> bool:
    named = [each for each in _listed(value) if isinstance(each, dict)]
    texts = [each.get(name) for each in named for name in ("name", "template")]
    return isinstance(value, str) or (named == value and all(isinstance(t, str) for t in texts))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_OBJECT = Expected("an object", lambda value: isinstance(value, dict))
_INTEGER = or_null(Expected("an integer of 64 bits", lambda n: type(n) is int and _are_integers(n)))
_INTEGERS = or_null(Expected("an integer of 64 bits, or an array of them", _are_integers))
_TOKEN = Expected(
    "a string, or an object with a string 'content'",
    lambda value: isinstance(value.get("content") if isinstance(value, dict) else value, str),
)
_TEMPLATE = Expected("a string, or an array of objects with 'name' and 'template'", _is_template)
_CONFIG = {
    **dict.fromkeys(("max_position_embeddings", "max_target_positions", "vocab_size"), _INTEGER),
    **dict.fromkeys(("decoder_start_token_id", "num_hidden_layers", "n_positions"), _INTEGER),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "head_dim"), _INTEGERS),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads"), _INTEGERS),
    "model_type": or_null(TEXT),
}
_GENAI = {"context_length": _INTEGER, "eos_token_id": _INTEGERS, "decoder": or_null(_OBJECT)}
_DECODER = dict.fromkeys(("inputs", "outputs"), or_null(object_of("names", TEXT.fits)))
_TOKENIZER = {
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), or_null(_TOKEN)),
    "chat_template": or_null(_TEMPLATE),
}
"""What the settings must be that are read from the files of a folder."""

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
        scored: The output with the scores of the next token, if a loss names it.
    """

    path: Path
    model: Path
    genai: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    parts: Mapping[str, Path] = field(default_factory=dict)
    scored: str = ""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer."""
        return (self.path / "tokenizer.json").is_file()

    @property
    def context_length(self) -> int | None:
        """The largest number of tokens of a sequence; None if the folder has no such setting."""
        others = {} if self.parts else self.config  # T5 has n_positions, but no such limit
        found = self.config.get("max_position_embeddings", others.get("n_positions"))
        if isinstance(found, int) and self.config.get("model_type") in _BEHIND_PADDING:
            found -= self.pad + 1
        found = self.genai.get("context_length", found)
        return found if isinstance(found, int) and found > 0 else None

    @property
    def pad(self) -> int:
        """The token of padding in config.json, or 0."""
        found = self.config.get("pad_token_id")
        return found if isinstance(found, int) else 0

    @property
    def end(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        found = self.genai.get("eos_token_id", self.config.get("eos_token_id"))
        return tuple(found) if isinstance(found, list) else () if found is None else (found,)

    @property
    def logits(self) -> str:
        """The name of the output with the scores of the next token."""
        return self.scored or _text(self.genai, "decoder", "outputs", "logits") or "logits"

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
    _refuse_links(folder, given)
    genai = _settings(folder / GENAI_CONFIG, {"model": _OBJECT}).get("model", {})
    _check_genai(folder, genai)
    files = ("config.json", "generation_config.json")
    config, generation = (_settings(folder / name, _CONFIG) for name in files)
    config |= generation
    tokenizer = _settings(folder / "tokenizer_config.json", _TOKENIZER)
    parts = _parts(folder) if given.is_dir() and not genai else {}
    if parts:
        model = parts.get("decoder") or parts["merged"]
        return Folder(folder, model, genai, config, tokenizer, parts)
    name = _text(genai, "decoder", "filename")
    model = _model_file(folder, name) if given.is_dir() else given
    open_regular(model, error=ModelError, what="file", remedy="give a folder or a model").close()
    return Folder(folder, model, genai, config, tokenizer)


def _refuse_links(folder: Path, given: Path) -> None:
    """Rejects links that lead out: a saved folder would have copies of what is there."""
    places = (place for place in (folder, folder / "onnx") if place.is_dir())
    for link in (file for place in places for file in place.iterdir() if file.is_symlink()):
        is_read = link.name == "onnx" or not link.is_dir()
        if is_read and link != given and leads_out(folder, link):
            raise ModelError(
                f"folder '{folder}': '{link.name}' is a link that leads out of it; replace it by "
                "the file"
            )


def _check_genai(folder: Path, genai: Mapping[str, Any]) -> None:
    """Rejects settings of onnxruntime-genai of other types, and files outside the folder."""
    where = f"file '{folder / GENAI_CONFIG}': "
    check_fields(f"{where}'model'", genai, _GENAI, optional=_GENAI)
    decoder = genai.get("decoder") or {}
    check_fields(f"{where}'decoder'", decoder, _DECODER, optional=_DECODER)
    names: list[tuple[str, Any]] = list(genai.items())
    for key, value in names:  # which grows
        if key.endswith("filename"):
            file_in_folder(folder, value, what=f"{where}'{key}'")
        elif isinstance(value, Mapping):
            names += value.items()
        elif isinstance(value, list):
            names += ((key, each) for each in value)


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


def copy_others(folder: Folder, target: Path, *, without: Collection[str] = ()) -> None:
    """Copies what is in a folder besides the model and its adapters to another folder.

    Directories are not copied.

    Args:
        folder: The folder.
        target: The other folder.
        without: The names of files that are not copied either.
    """
    files = [folder.model, *folder.parts.values()]
    tensors = [tensor for file in files for tensor in graph_of(file).initializer]
    data = {e.value for t in tensors for e in t.external_data if e.key == "location"}
    for file in sorted(folder.path.iterdir()):
        is_model = file.suffix in (".onnx", _ADAPTERS) or file.name in {*data, *without}
        is_copied = file.is_file() and not is_model and not is_temporary(file.name)
        if is_copied and file.parent.resolve() != target.resolve():
            if leads_out(folder.path, file):
                raise ModelError(f"folder '{folder.path}': '{file.name}' leads out of it")
            copy_atomically(file, target / file.name)


def graph_of(file: Path) -> onnx.GraphProto:
    """Returns the graph of a model, whose external data are not loaded."""
    return load(file)[0].graph


def sliding_windows(folder: Folder) -> dict[str, int]:
    """Returns the length of each sliding cache of a folder's model, by the name of its input."""
    found: dict[str, int] = {}
    for node in graph_of(folder.model).node:
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
    others = [config.get(name) for name in ("head_dim", "num_key_value_heads")]
    if (folder.path / GENAI_CONFIG).exists() or not (
        all(isinstance(size, int) and size > 0 for size in (*sizes.values(), *filter(None, others)))
        and folder.end
    ):
        return ""
    heads = int(config["num_attention_heads"])
    graph = graph_of(folder.model)
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
        if not (folder / name).is_file():  # in the folder, see `_check_genai`
            raise ModelError(f"folder '{folder}': {GENAI_CONFIG} names '{name}', which is missing")
        if Path(name).suffix != ".onnx":  # a saved folder has other files of such names
            raise ModelError(f"folder '{folder}': {GENAI_CONFIG} names '{name}', no .onnx file")
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


def _settings(file: Path, fields: Mapping[str, Expected]) -> dict[str, Any]:
    """Returns the settings in a file; none if it does not exist."""
    found = read_settings(file) if os.path.lexists(file) else {}
    check_fields(f"file '{file}'", found, fields, optional=fields, remedy="correct it")
    return found


def _text(settings: Any, *keys: str) -> str:
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings if isinstance(settings, str) else ""
