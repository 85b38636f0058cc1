"""Language models in several files or branches: encoders with decoders, and merged decoders.

They are trained as one model, and the trained weights are written to all files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ortops._common.numbers import Array
from ortops.engine.composition.composing import compose
from ortops.engine.composition.record import read_records
from ortops.errors import ModelError, UnsupportedError
from ortops.graph import convert
from ortops.graph.adapters import adapter_of
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import read_metadata
from ortops.graph.weights import weights
from ortops.llm.folder import Folder, graph_of
from ortops.lora.merging import merge
from ortops.surgery.branches import fix_inputs

CACHE_BRANCH = "use_cache_branch"
"""Optimum's name of the input that chooses the branch of a merged decoder."""

NAMES = "ortops.llm.names"
"""The metadata key of `SeveralFiles.names` in the state of a training."""

_QUANTIZED = ("DequantizeLinear", "MatMulInteger", "MatMulNBits")


def several_files(folder: Folder, state: Path | None = None) -> SeveralFiles | None:
    """Returns the files of a model with an encoder or a merged decoder; None for other models.

    Args:
        folder: The folder.
        state: The state of the training that wrote it, which knows the names of the weights: a
            killed process leaves files whose values are not those of one step.
    """
    if folder.parts:
        return SeveralFiles(folder, folder.parts, state)
    graph = graph_of(folder.model)
    if any(value.name == CACHE_BRANCH for value in graph.input):
        return SeveralFiles(folder, {"merged": folder.model}, state)
    return None


class SeveralFiles:
    """The files of a model, as one model to train.

    Args:
        folder: The folder.
        parts: The files by part, as in `Folder.parts`.
        state: See `several_files`.

    Attributes:
        parts: The files by part.
        base: The model to train: the encoder, and the decoder without a cache. Its only output is
            the logits.
        inputs: The names that inputs of the encoder, then those of the decoder, have in it.
        names: Of each part, the names of its weights, and their names in the model to train.

    Raises:
        ModelError: If the files do not belong together.
        UnsupportedError: If weights are quantized, because an adapter cannot be merged into them.
    """

    def __init__(
        self, folder: Folder, parts: Mapping[str, Path], state: Path | None = None
    ) -> None:
        self.parts = dict(parts)
        decoder: Any = parts.get("decoder")
        if decoder is None:
            decoder = fix_inputs(parts["merged"], {CACHE_BRANCH: False})
        own = {n: w.array() for n, w in weights(convert.load_light(decoder)).items() if w.shape}
        self.inputs: dict[str, dict[str, str]] = {"encoder": {}, "decoder": {}}
        self.names: dict[str, dict[str, str]] = {}
        if "encoder" in parts:
            self.base = _joined(parts["encoder"], decoder)
            records = read_records(self.base.metadata_props)
            self.inputs = {part: records[part].inputs for part in self.inputs}
            self.names["encoder"] = records["encoder"].weights
            trained = records["decoder"].weights
        else:
            self.base = convert.load_light(decoder).attach()
            self.inputs["decoder"] = {v.name: v.name for v in self.base.graph.input}
            trained = {name: name for name in own}
        recorded = {} if state is None else _recorded(state)
        for part in self.parts.keys() - {"encoder"}:
            light = convert.load_light(parts[part])
            known = recorded.get(part)
            if isinstance(known, dict) and known.keys() <= weights(light).keys():
                self.names[part] = {name: str(origin) for name, origin in known.items()}
            else:
                copies = _copies(own, light, parts[part])
                self.names[part] = {name: trained[origin] for name, origin in copies.items()}
        if folder.logits not in {value.name for value in self.base.graph.output}:
            raise ModelError(f"file '{folder.model}': it has no output '{folder.logits}'")
        for value in [v for v in self.base.graph.output if v.name != folder.logits]:
            self.base.graph.output.remove(value)
        for node in self.base.graph.node:
            if node.op_type in _QUANTIZED:
                raise UnsupportedError(
                    f"{node.op_type} node '{node.name or node.output[0]}': the adapter of a model "
                    "in several files is merged into its weights, which must not be quantized; "
                    "train the float16 or float32 files, and quantize the result"
                )

    @property
    def has_encoder(self) -> bool:
        """Whether there is an encoder."""
        return "encoder" in self.parts

    def written(self, trained: onnx.ModelProto) -> dict[str, LightModel]:
        """Returns the model of each file, with the adapter merged into the weights.

        Args:
            trained: The trained model.

        Raises:
            UnsupportedError: If an adapted layer shares its weight with another one.
        """
        has_adapter = adapter_of(trained.metadata_props) is not None
        merged = convert.load_light(merge(trained) if has_adapter else trained)
        base = convert.load_light(self.base)
        after = merged.arrays({tensor.name for tensor in merged.proto.graph.initializer})
        first = base.arrays({tensor.name for tensor in base.proto.graph.initializer})
        for name in after.keys() - first.keys():
            if after[name].ndim > 1:
                raise UnsupportedError(
                    f"'{name}': the layer shares its weight with another one, so its adapter "
                    "cannot be merged; leave it out of targets="
                )
        result = {}
        for part, file in self.parts.items():
            light = convert.load_light(file)
            known = weights(light)
            for name, origin in self.names[part].items():
                if origin in after and not np.array_equal(known[name].array(), after[origin]):
                    known[name].set(after[origin])
            result[part] = light
        return result


def _joined(encoder: Path, decoder: Any) -> onnx.ModelProto:
    """Returns the model of an encoder and a decoder."""
    models = {"encoder": convert.load_light(encoder), "decoder": convert.load_light(decoder)}
    graphs = {part: light.proto.graph for part, light in models.items()}
    for node in graphs["encoder"].node:  # the layers of a decoder are in this scope already
        if node.name.startswith("/") and "/encoder/" not in f"{node.name}/":
            node.name = f"/encoder{node.name}"
    inputs = {part: {value.name for value in graph.input} for part, graph in graphs.items()}
    states = "encoder_hidden_states"
    if states not in inputs["decoder"]:
        raise ModelError(f"the decoder of '{encoder}' has no input '{states}'")
    connect = {f"decoder.{states}": f"encoder.{graphs['encoder'].output[0].name}"}
    if {"encoder_attention_mask"} <= inputs["decoder"] and "attention_mask" in inputs["encoder"]:
        connect["decoder.encoder_attention_mask"] = "encoder.attention_mask"
    return compose({part: light.attach() for part, light in models.items()}, connect)


def _recorded(state: Path) -> dict[str, Any]:
    """Returns what `SeveralFiles.names` was when a training was saved; empty if it is unknown."""
    try:
        metadata = convert.load_light(state).proto.metadata_props
        return read_metadata(metadata, NAMES, "delete the file of the training") or {}
    except (OSError, ModelError):  # reading the training says what is wrong
        return {}


def _copies(known: Mapping[str, Array], light: LightModel, file: Path) -> dict[str, str]:
    """Returns the weight of the decoder that each weight of a file has the values of.

    Raises:
        ModelError: If a matrix of the file is not in the decoder.
    """
    by_value: dict[object, list[str]] = {}
    for name, array in known.items():
        by_value.setdefault(_digest(array), []).append(name)
    plain = {tensor.name for tensor in light.proto.graph.initializer}
    result = {}
    for name, weight in weights(light).items():
        array = weight.array()
        same = by_value.get(_digest(array), [])
        if same:
            result[name] = name if name in same else same[0]
        elif name in plain and array.ndim == 2 and min(array.shape) > 1:
            raise ModelError(
                f"file '{file}': the decoder without a cache has no weight with the values of "
                f"'{name}', so the files do not belong together; export them together"
            )
    return result


def _digest(array: Array) -> object:
    data = np.ascontiguousarray(array)
    return array.shape, array.dtype.str, hashlib.sha256(data.tobytes()).digest()
