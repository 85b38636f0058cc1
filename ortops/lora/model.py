"""A model with its adapter: what is read of it, and what tells its base from others."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.errors import ModelError
from ortops.graph import convert, external
from ortops.graph.adapters import Adapter, adapter_of
from ortops.graph.convert import ModelLike
from ortops.graph.external import Data
from ortops.graph.weights import weights

__all__ = ["Adapted", "Array", "check_base", "fingerprint", "read_adapted", "refuse_training"]

Array: TypeAlias = npt.NDArray[Any]

_CHANGES_FORM = {"Resize", "Upsample"}
"""Operators whose settings a conversion to a newer opset makes initializers."""


@dataclass(frozen=True)
class Adapted:
    """A light model that has an adapter.

    Attributes:
        proto: The light model.
        data: Its data.
        adapter: What it says of its adapter.
        parameters: All A and B, by name.
    """

    proto: onnx.ModelProto
    data: Data
    adapter: Adapter
    parameters: Mapping[str, Array]


def read_adapted(model: ModelLike) -> Adapted:
    """Reads a model that has an adapter; the model is not changed.

    Raises:
        ModelError: If it has none, or not what it says of it.
    """
    light, data = convert.load_light(model)
    adapter = adapter_of(light.metadata_props)
    if adapter is None:
        raise ModelError(
            "model: it has no adapter; ortops.lora.add or ortops.lora.from_peft gives it one"
        )
    tensors = {tensor.name: tensor for tensor in light.graph.initializer}
    inputs = {value.name for value in light.graph.input}
    for name in adapter.parameters:
        if name not in tensors or name not in inputs:
            raise ModelError(
                f"model: '{name}' of its adapter is not an input and an initializer any more; "
                "keep both, as ortops.lora.add made them"
            )
    parameters = {name: external.array_of(tensors[name], data) for name in adapter.parameters}
    return Adapted(light, data, adapter, parameters)


def refuse_training(proto: onnx.ModelProto) -> None:
    """Refuses a model that has a training algorithm, which would no longer fit it."""
    if proto.training_info:
        raise ModelError(
            "model: it has training_info, which fits the model as it is; take "
            "TrainingSession.inference_model(), which has none"
        )


def check_base(adapted: Adapted) -> None:
    """Refuses an adapter whose base is another by now.

    Raises:
        ModelError: If inputs, outputs or weights of the base have changed since it got the adapter.
    """
    found = fingerprint(adapted.proto, adapted.data, adapted.adapter.parameters)
    if found != adapted.adapter.fingerprint:
        raise ModelError(
            "model: its inputs, outputs or other weights are not those that the adapter was added "
            "to, so the adapter alone does not tell what was learned; save the whole model, or "
            "train the adapter alone (trainable=None) and give it as it was"
        )


def fingerprint(proto: onnx.ModelProto, data: Data, left_out: Collection[str] = ()) -> str:
    """Returns what tells a model from others: a digest of its inputs, outputs and weights.

    Of each weight its name, type, shape, numbers and readers count, so it is the same before and
    after a conversion to a newer opset, and before and after a training of an adapter.

    Args:
        proto: A light model.
        data: Its data.
        left_out: The names of the adapter's weights.

    Raises:
        ModelError: If external data cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)

    def say(*texts: object) -> None:
        digest.update(("\0".join(map(str, texts)) + "\n").encode())

    graph = proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    say("inputs", *(value.name for value in graph.input if value.name not in initializers))
    say("outputs", *(value.name for value in graph.output))
    readers: dict[str, set[str]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    contents: dict[str, Callable[[], Array]]
    contents = {name: weight.array for name, weight in weights(proto, data).items() if weight.shape}
    for name, tensor in initializers.items():
        if name not in contents and tensor.dims and tensor.data_type != onnx.TensorProto.STRING:
            kind = tensor.data_type
            if kind not in (onnx.TensorProto.INT64, onnx.TensorProto.BOOL):  # sizes and axes
                contents[name] = functools.partial(external.array_of, tensor, data)
    for name in sorted(contents.keys() - set(left_out)):
        by = readers.get(name, set())
        if by and by <= _CHANGES_FORM:
            continue
        array = contents[name]()
        say(name, array.dtype, array.shape, *sorted(by))
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
