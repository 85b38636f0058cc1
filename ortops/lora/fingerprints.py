"""Fingerprints, which identify the base of an adapter.

A fingerprint is a digest of what a model computes: its nodes, their attributes and inputs, and its
weights. It is written ``2:<digest>``, where 2 is the version of what is digested.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops.engine.trainable.training_mode import write_inference_mode
from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.adapters import Adapter
from ortops.graph.files.external import LightModel
from ortops.graph.weights import lift
from ortops.lora.removal import remove_adapter

Array: TypeAlias = npt.NDArray[Any]

FINGERPRINT_VERSION = 2
"""The version of new fingerprints."""


def fingerprint(
    model: LightModel, adapter: Adapter | None = None, free: Collection[str] = ()
) -> str:
    """Returns the fingerprint of a model without its adapter.

    It covers the names of inputs and outputs and all that contributes to the outputs: operators,
    attributes, connections, values, and the names of matrices, from which adapters get their names.
    It is computed in the form that models have in training: functions inlined, older models
    converted to opset 21, and in inference mode. It is therefore the same before and after training
    of the adapter. Initializers and Constant nodes are equivalent.

    Args:
        model: The model.
        adapter: Its adapter.
        free: The weights that are trained themselves, whose values do not count; by default those
            of the adapter.

    Raises:
        ModelError: If external data cannot be read, or nodes of the adapter are missing.
    """
    names = {tensor.name for tensor in model.proto.graph.initializer}
    digest = _Digest(names, adapter.weights if adapter else free).of_model(
        _trained_form(model, adapter)
    )
    return f"{FINGERPRINT_VERSION}:{digest.hex()}"


def _trained_form(given: LightModel, adapter: Adapter | None) -> ir.Model:
    """Returns a model as `ortops.engine.building.preparation` makes it, without its adapter."""

    def read() -> ir.Model:
        model = convert.to_ir(lifted)
        if adapter is not None:
            remove_adapter(model, adapter)
        convert.inline(model)
        return model

    lifted, _ = lift(LightModel(given.proto, dict(given.data)))
    model = read()
    try:
        model = convert.upgrade(model, quietly=True)
    except MemoryError:
        raise
    except Exception:  # a model that cannot be converted cannot be trained: use it unconverted
        model = read()
    write_inference_mode(model)
    model.graph.sort()
    return model


class _Digest:
    """Digests of the values of a model: each covers the node that computes it and its inputs.

    Args:
        names: The initializers whose names are part of the digest.
        free: Those whose values are not.
    """

    def __init__(self, names: Collection[str], free: Collection[str]) -> None:
        self._names, self._free = names, free
        self._found: dict[ir.Value, bytes] = {}

    def of_model(self, model: ir.Model) -> bytes:
        graph = model.graph
        inputs = [value for value in graph.inputs if value.name not in graph.initializers]
        for value in inputs:
            self._found[value] = _hash("input", value.name)
        outputs = self._of_graph(model, graph, 0)
        return _hash(
            "model",
            len(inputs),
            *(value.name for value in inputs),
            *itertools.chain(*((v.name, o) for v, o in zip(graph.outputs, outputs, strict=True))),
        )

    def _of_graph(self, model: ir.Model, graph: ir.Graph, depth: int) -> list[bytes]:
        """Returns the digests of a graph's outputs."""
        for name, value in graph.initializers.items():
            if depth == 0 and name in self._free:
                self._found[value] = _hash("trained", name)
            elif value.const_value is not None:
                is_named = depth == 0 and name in self._names and len(value.const_value.shape) > 1
                content = _of_tensor(value.const_value)
                self._found[value] = _hash("weight", name, content) if is_named else content
        for node in graph:
            self._of_node(model, node, depth)
        return [self._of_value(value) for value in graph.outputs]

    def _of_value(self, value: ir.Value | None) -> bytes:
        if value is None:
            return b""
        return self._found.get(value) or _hash("unknown", value.name)

    def _of_node(self, model: ir.Model, node: ir.Node, depth: int) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        if node.op_type == "Constant" and not domain:
            tensor = ir.convenience.get_const_tensor(node.outputs[0])
            if tensor is not None:
                self._found[node.outputs[0]] = _of_tensor(tensor)
                return
        if node.op_type in ("Identity", "Dropout") and not domain:
            self._found[node.outputs[0]] = self._of_value(node.inputs[0])
            return
        read = [self._of_value(value) for value in node.inputs]
        while read and not read[-1]:
            read.pop()
        version = model.graph.opset_imports.get(node.domain, 1)
        attributes = [
            part
            for name, attribute in sorted(node.attributes.items())
            for part in (name, self._of_attribute(model, attribute, depth))
            if not _is_default(attribute, node.op_type, domain, version)
        ]
        parts = len(node.outputs) if node.op_type == "Split" else ""
        kind = (domain, node.op_type, node.overload, parts)
        digest = _hash("node", *kind, len(attributes), *attributes, *read)
        for index, value in enumerate(node.outputs):
            self._found[value] = _hash("output", digest, index)

    def _of_attribute(self, model: ir.Model, attribute: ir.Attr, depth: int) -> bytes:
        match attribute.type:
            case ir.AttributeType.GRAPH:
                return self._of_inner(model, [attribute.as_graph()], depth)
            case ir.AttributeType.GRAPHS:
                return self._of_inner(model, attribute.as_graphs(), depth)
            case ir.AttributeType.TENSOR:
                return _of_tensor(attribute.as_tensor())
            case ir.AttributeType.TENSORS:
                return _hash("tensors", *map(_of_tensor, attribute.as_tensors()))
        return _hash("attribute", _message(attribute).SerializeToString(deterministic=True))

    def _of_inner(self, model: ir.Model, graphs: Sequence[ir.Graph], depth: int) -> bytes:
        digests = []
        for graph in graphs:
            for index, value in enumerate(graph.inputs):
                self._found[value] = _hash("formal", depth, index)
            digests.append(_hash("graph", *self._of_graph(model, graph, depth + 1)))
        return _hash("graphs", *digests)


def _message(attribute: ir.Attr) -> onnx.AttributeProto:
    message: onnx.AttributeProto = ir.to_proto(attribute)
    message.ClearField("doc_string")
    return message


def _is_default(attribute: ir.Attr, op_type: str, domain: str, version: int) -> bool:
    """Whether an attribute has its default value."""
    default = _defaults(op_type, domain, version).get(attribute.name)
    return default is not None and default == _message(attribute)


@functools.lru_cache
def _defaults(op_type: str, domain: str, version: int) -> dict[str, onnx.AttributeProto]:
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return {}
    return {name: attribute.default_value for name, attribute in schema.attributes.items()}


def _of_tensor(tensor: ir.TensorProtocol) -> bytes:
    if isinstance(tensor, ir.ExternalTensor):
        raise ModelError(
            f"initializer '{tensor.name}': its data are in the external file '{tensor.location}', "
            "which a model in memory cannot locate; give the path of the model"
        )
    if tensor.dtype == ir.DataType.STRING:
        return _hash("strings", *tensor.shape, *tensor.numpy().reshape(-1).tolist())
    digest = _started("tensor", tensor.dtype.name, *tensor.shape)
    digest.update(_bytes(tensor.numpy()))
    return bytes(digest.digest())


def _bytes(array: Array) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _started(*parts: object) -> Any:
    """Returns a digest of parts, each preceded by its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else str(part).encode(errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest


def _hash(*parts: object) -> bytes:
    return bytes(_started(*parts).digest())


def family(model: LightModel) -> str:
    """Returns a digest of what stays when a model is quantized: the weights of normalizations.

    They are rounded to float16, so that float32 and float16 files of a model agree.

    Args:
        model: The model.

    Returns:
        The digest; empty if no normalization has a weight of different numbers, which would tell
        models apart.
    """
    graph = model.proto.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    read = {
        name
        for node in graph.node
        if node.op_type.endswith(("Normalization", "RMSNorm"))
        for name in node.input
        if name in initializers and len(initializers[name].dims) == 1
    }
    arrays = [model.array_of(initializers[name]) for name in sorted(read)]
    floats = [array for array in arrays if array.dtype.kind == "f" and array.size > 1]
    if all((array == array[0]).all() for array in floats):
        return ""
    with np.errstate(over="ignore"):
        digests = sorted(_hash("norm", array.astype(np.float16).tobytes()) for array in floats)
    return _hash("family", *digests).hex()
