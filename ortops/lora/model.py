"""Reads a model with an adapter, and checks the adapter and its base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.adapters import Adapter, adapter_of
from ortops.graph.files.external import LightModel
from ortops.graph.files.loading import ModelLike
from ortops.lora.fingerprints import FINGERPRINT_VERSION, fingerprint

Array: TypeAlias = npt.NDArray[Any]

WITHOUT_TRAINING = "give TrainingSession.inference_model()"
"""The remedy for a model that has training_info."""

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)


@dataclass(frozen=True)
class Adapted:
    """A light model with an adapter.

    Attributes:
        model: The light model.
        adapter: The description of its adapter.
        parameters: All A and B by name, and for DoRA the magnitudes and, if they are inputs, the
            scales.
    """

    model: LightModel
    adapter: Adapter
    parameters: Mapping[str, Array]


def read_adapted(model: ModelLike | LightModel) -> Adapted:
    """Reads a model with an adapter, without changing it.

    Raises:
        ModelError: If it has no adapter, or the adapter does not match its description.
    """
    light = convert.load_light(model)
    proto = light.proto
    adapter = adapter_of(proto.metadata_props)
    if adapter is None:
        raise ModelError(
            "model: it has no adapter; add one with ortops.lora.add or ortops.lora.from_peft"
        )
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    adapter.refuse_missing(tensors.keys() & {value.name for value in proto.graph.input})
    scales = [m.scale for m in adapter.modules.values() if m.dora and m.scale in tensors]
    names = [*adapter.parameters, *scales]
    for name in names:
        if name not in tensors:
            raise ModelError(
                f"model: its adapter has no '{name}'; restore what ortops.lora.add created"
            )
        if tensors[name].data_type not in _FLOATS:
            raise ModelError(
                f"model: '{name}' of its adapter must be of type FLOAT, FLOAT16 or DOUBLE, got "
                f"data_type {tensors[name].data_type}; restore what ortops.lora.add created"
            )
    parameters = {name: light.array_of(tensors[name]) for name in names}
    for name, module in adapter.modules.items():
        a, b = parameters[module.a], parameters[module.b]
        axes = a.ndim == b.ndim and (a.ndim > 2 if module.kind == "convolution" else a.ndim == 2)
        if not axes or not a.shape[1] == module.rank == b.shape[0]:
            raise ModelError(
                f"model: the shapes of A {list(a.shape)} and B {list(b.shape)} of layer '{name}' "
                f"do not fit a {module.kind} adapter of rank {module.rank}; restore what "
                "ortops.lora.add created"
            )
        for each in (module.magnitude, module.scale) if module.dora else ():
            if each in parameters and parameters[each].shape != b.shape[1:]:
                raise ModelError(
                    f"model: '{each}' must have the shape {list(b.shape[1:])}, as B of layer "
                    f"'{name}', got {list(parameters[each].shape)}; restore what ortops.lora.add "
                    "created"
                )
    return Adapted(light, adapter, parameters)


def refuse_not_finite(arrays: Mapping[str, Array], where: str) -> None:
    """Rejects NaN and infinite values in A and B, which would spread to all outputs.

    Args:
        arrays: A and B by name.
        where: The file or model that they are in, as named in messages.
    """
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise ModelError(
                f"{where}: '{name}' has NaN or infinite values; give an adapter whose training did "
                "not diverge"
            )


def check_base(adapted: Adapted) -> str:
    """Checks that the base has not changed since its adapter was added.

    Returns:
        The fingerprint of the base.

    Raises:
        ModelError: If the base computes something else now.
    """
    stored = adapted.adapter.fingerprint
    version = int(stored.partition(":")[0])
    if version != FINGERPRINT_VERSION:
        raise ModelError(
            f"model: the fingerprint '{stored}' of its base has version {version}, but this ortops "
            f"knows version {FINGERPRINT_VERSION}; update ortops"
        )
    found = fingerprint(adapted.model, adapted.adapter)
    if found != stored:
        raise ModelError(
            "model: its nodes, inputs, outputs or base weights have changed since the adapter was "
            "added, so a file of the adapter alone would be incomplete; save the whole model, "
            "merge it with ortops.lora.merge, or train only the adapter (trainable=None)"
        )
    return found
