"""The models to compose: read, and brought to a common version of operators."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from ortops._common.numbers import Array
from ortops.errors import ArgumentError, ModelError, UnsupportedError
from ortops.graph import convert
from ortops.graph.adapters import adapter_of
from ortops.graph.files import external
from ortops.graph.files.external import LightModel
from ortops.graph.files.messages import graphs_within
from ortops.graph.weights import lift

_INITIALIZERS_MAY_BE_INPUTS_OR_NOT = 4  # the first IR version with initializers beside inputs

logger = logging.getLogger("ortops")


@dataclass
class Part:
    """A model to compose. All of its weights are initializers of its main graph.

    Attributes:
        name: Its name in the composition.
        light: The model, to be changed.
        inputs: Its inputs without default values, as they were given.
        outputs: Its outputs, as they were given.
        weights: The names of its floating-point initializers.
        sources: The parts that are connected to its inputs.
    """

    name: str
    light: LightModel
    inputs: dict[str, onnx.ValueInfoProto] = field(init=False)
    outputs: dict[str, onnx.ValueInfoProto] = field(init=False)
    weights: list[str] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        graph = self.graph
        given = {tensor.name for tensor in graph.initializer}
        self.inputs = {v.name: _copy(v) for v in graph.input if v.name not in given}
        self.outputs = {v.name: _copy(v) for v in graph.output}

    @property
    def graph(self) -> onnx.GraphProto:
        """Its main graph."""
        return self.light.proto.graph

    def opsets(self) -> dict[str, int]:
        """Returns the versions of its operators, by domain."""
        imports = self.light.proto.opset_import
        return {"" if e.domain == "ai.onnx" else e.domain: e.version for e in imports}

    def array(self, name: str) -> Array:
        """Returns the value of an initializer."""
        return self.light.arrays([name])[name]


def read_parts(models: Mapping[str, Any]) -> dict[str, Part]:
    """Reads the models, in a common version of operators.

    Raises:
        ArgumentError: If ``models`` is not a dict of models with names.
        ModelError: If a model is not valid, or has an adapter or training_info.
        UnsupportedError: If the versions of operators cannot be made equal.
    """
    if not isinstance(models, Mapping) or not models:
        raise ArgumentError(f"models must be a dict of models by name, got {models!r:.80}")
    parts = {}
    for name, model in models.items():
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"models: names must be non-empty strings, got {name!r:.80}")
        try:
            parts[name] = Part(name, _read(model))
        except (ModelError, UnsupportedError) as error:
            raise type(error)(f"model '{name}': {error}") from error
    _align_operators(parts)
    for part in parts.values():
        part.weights = [t.name for t in part.graph.initializer if t.data_type in _FLOATS]
    return parts


_FLOATS = (
    *(onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
    *(onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16),
)


def _copy(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    result = onnx.ValueInfoProto()
    result.CopyFrom(value)
    return result


def _read(model: Any) -> LightModel:
    light = convert.load_light(model)
    proto = light.proto
    if proto.training_info:
        raise ModelError(
            "it has training_info; give the model without it "
            "(TrainingSession(model).inference_model()), and add training to the composed model"
        )
    if adapter_of(proto.metadata_props) is not None:
        raise ModelError(
            "it has an adapter; merge it with ortops.lora.merge, or add one to the composed model"
        )
    if proto.graph.sparse_initializer:
        name = proto.graph.sparse_initializer[0].values.name
        raise UnsupportedError(
            f"initializer '{name}': sparse initializers are not supported; store it as a dense "
            "TensorProto"
        )
    light, _ = lift(light)
    light = light.copy()
    if light.proto.ir_version < _INITIALIZERS_MAY_BE_INPUTS_OR_NOT:
        given = {tensor.name for tensor in light.proto.graph.initializer}
        for value in [v for v in light.proto.graph.input if v.name in given]:
            light.proto.graph.input.remove(value)  # all initializers had to be inputs
        light.proto.ir_version = _INITIALIZERS_MAY_BE_INPUTS_OR_NOT
    return light


def _align_operators(parts: Mapping[str, Part]) -> None:
    """Converts all models to the newest version of the standard operators, if versions differ."""
    newest: dict[str, int] = {}
    for part in parts.values():
        for domain, version in part.opsets().items():
            newest[domain] = max(version, newest.get(domain, 0))
    for part in parts.values():
        for domain, version in part.opsets().items():
            if domain and version != newest[domain]:
                _refuse_changed(part, domain, version, newest[domain])
    versions = {part.opsets().get("", newest.get("", 0)) for part in parts.values()}
    if len(versions) > 1:
        target = max(newest[""], convert.MINIMUM_OPSET)
        for part in parts.values():
            if part.opsets().get("", target) < target:
                part.light = _converted(part, target)


def _converted(part: Part, opset: int) -> LightModel:
    old = part.opsets()[""]
    try:
        work = convert.to_ir(part.light)
        convert.inline(work)
        work = convert.upgrade(work, quietly=True, opset=opset)
    except (ModelError, UnsupportedError) as error:
        raise type(error)(f"model '{part.name}': {error}") from error
    logger.warning("model '%s' was converted from opset %d to %d", part.name, old, opset)
    result, data = external.move_aside(work)
    return LightModel(result, part.light.data | data)


def _refuse_changed(part: Part, domain: str, version: int, newest: int) -> None:
    """Rejects operators of a domain other than the standard one that differ between versions."""
    for body in (*graphs_within(part.graph), *part.light.proto.functions):
        for node in body.node:
            if node.domain != domain:
                continue
            try:
                schemas = [
                    onnx.defs.get_schema(node.op_type, each, domain) for each in (version, newest)
                ]
                same = schemas[0].since_version == schemas[1].since_version
            except onnx.defs.SchemaError:
                same = False
            if not same:
                raise UnsupportedError(
                    f"model '{part.name}': {node.op_type} node "
                    f"'{node.name or next(iter(node.output), '')}': the models use versions "
                    f"{version} and {newest} of the domain '{domain}', in which this operator may "
                    "differ; export the models with the same version"
                )
