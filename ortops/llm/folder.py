"""Reads the folder of a served language model: onnxruntime-genai's, Optimum's or another."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from ortops.errors import ArgumentError, ModelError
from ortops.graph.files.json_text import read_json

__all__ = ["Folder", "copy_others", "open_folder"]

GENAI_CONFIG = "genai_config.json"
_NAMES = (
    *("model.onnx", "onnx/model.onnx", "decoder_model.onnx", "decoder_model_merged.onnx"),
    *("model_q4.onnx", "onnx/model_q4.onnx", "model_quantized.onnx", "onnx/model_quantized.onnx"),
)
_ADAPTERS = ".onnx_adapter"


@dataclass(frozen=True)
class Folder:
    """The folder of a language model.

    Attributes:
        path: The folder.
        model: The file of the model.
        genai: The settings in genai_config.json under ``model``; empty if there is no such file.
        config: The settings in config.json, then those of generation_config.json.
        tokenizer_config: The settings in tokenizer_config.json.
    """

    path: Path
    model: Path
    genai: Mapping[str, Any]
    config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]

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
    name = _text(genai, "decoder", "filename")
    model = _model_file(folder, name) if given.is_dir() else given
    return Folder(folder, model, genai, config, _settings(folder / "tokenizer_config.json"))


def copy_others(folder: Folder, target: Path) -> None:
    """Copies what is in a folder besides the model and its adapters to another folder.

    Directories are not copied.
    """
    proto = onnx.load(folder.model, load_external_data=False)
    data = {
        e.value for t in proto.graph.initializer for e in t.external_data if e.key == "location"
    }
    for file in sorted(folder.path.iterdir()):
        is_model = file.suffix in (".onnx", _ADAPTERS) or file.name in data
        if file.is_file() and not is_model and file.parent.resolve() != target.resolve():
            shutil.copyfile(file, target / file.name)


def _model_file(folder: Path, name: str) -> Path:
    if name:
        if not (folder / name).is_file():
            raise ModelError(f"folder '{folder}': {GENAI_CONFIG} names '{name}', which is missing")
        return folder / name
    known = (folder / each for each in _NAMES)
    found = next((file for file in known if file.is_file()), None)
    files = sorted(folder.glob("*.onnx"))
    if found is None and len(files) != 1:
        raise ModelError(
            f"folder '{folder}': cannot choose the model among {len(files)} .onnx files; give the "
            "path of the file"
        )
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
