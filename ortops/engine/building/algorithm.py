"""A training algorithm on the tape of its inference graph, written as a TrainingInfoProto."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops.engine.lowering import TRAINING_DOMAIN
from ortops.graph.constants import stored
from ortops.graph.edit import all_nodes, ancestor_nodes
from ortops.graph.files import external
from ortops.graph.files.external import Computed, LightModel, Reference
from ortops.graph.files.messages import BIG, ITEM_SIZES
from ortops.graph.files.serialization import BOUND_DOMAIN, name_tensors
from ortops.graph.nesting import inner_graphs
from ortops.graph.tensor import Tape, Tensor, op

_TRAINING_INFO_IR_VERSION = 7


@dataclass
class Algorithm:
    """A training algorithm, which becomes a TrainingInfoProto.

    Attributes:
        tape: The tape with the algorithm's nodes, at the end of the inference graph.
        inputs: The algorithm's inputs.
        outputs: The algorithm's outputs.
        variables: The algorithm's initializers that are updated.
        constants: The algorithm's other initializers.
        updates: The next values of initializers, by initializer name.
        initial: The initial values of initializers, scalars or zeros, by initializer name.
        prefix: The prefix of the names of its own variables.
    """

    tape: Tape
    prefix: str = ""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    variables: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    updates: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    _taken: set[ir.Value] = field(default_factory=set, init=False)
    _seen: int = field(default=0, init=False)

    def variable(self, name: str, array: np.ndarray[Any, Any]) -> Tensor:
        """Adds a variable that the initialization graph sets to its first value."""
        tensor = self.tape.initializer(self.prefix + name, array)
        self.variables.append(tensor)
        self.initial[tensor.name] = array
        return tensor

    def copy(self, parameter: Tensor, suffix: str, dtype: np.dtype[Any]) -> Tensor:
        """Adds a variable whose first value is that of a parameter, converted to a dtype.

        The value is computed when it is read.
        """
        tensor = parameter.value.const_value
        assert tensor is not None
        source, shape = external.content_of(tensor), tensor.shape.numpy()
        name = f"{self.prefix}{parameter.name}.{suffix}"
        copied = self.tape.initializer(name, np.broadcast_to(np.zeros((), dtype), shape))
        kind = ir.DataType.from_numpy(dtype)
        value = Computed(lambda: source.numpy().astype(dtype), kind, shape, source)
        copied.value.const_value = Reference(value, copied.name)
        self.variables.append(copied)
        return copied

    def update(self, name: str, new: Tensor) -> Tensor:
        """Makes a tensor the next value of an initializer; returns it under its new name."""
        self._taken.update(tensor.value for tensor in self.outputs[self._seen :])
        fresh = self.tape.emitted(new.value) and new.value.const_value is None
        if not fresh or new.value in self._taken:
            new = op.Identity(new)
        new.value.name = self.tape.names.unique(f"{name}_new")
        self.updates[name] = new
        self._seen = len(self.outputs)
        self.outputs.append(new)
        return new


def write_algorithm(
    model: LightModel, algorithm: Algorithm, kept: Sequence[Tensor], name: str
) -> None:
    """Writes the algorithm and its initialization into a light model.

    Args:
        model: The model.
        algorithm: The algorithm.
        kept: Tensors to keep in addition to those that the algorithm's outputs depend on.
        name: The name of the training_info entry.
    """
    result = model.proto
    info = result.training_info.add()
    serialize = ir.serde
    target = info.algorithm
    target.name = name
    target.input.extend(serialize.serialize_value(tensor.value) for tensor in algorithm.inputs)
    target.output.extend(serialize.serialize_value(tensor.value) for tensor in algorithm.outputs)
    outputs = {tensor.value for tensor in algorithm.outputs}
    needed = ancestor_nodes((*outputs, *(tensor.value for tensor in kept)), set())
    for tensor in algorithm.variables:
        _write_variable(tensor, algorithm, target, model.data)
    for tensor in algorithm.constants:
        assert tensor.value.const_value is not None
        serialize.serialize_tensor_into(target.initializer.add(), tensor.value.const_value)
    domains = {TRAINING_DOMAIN}
    for node in (node for node in algorithm.tape.nodes if node in needed):
        domains.update(inner.domain for graph in inner_graphs(node) for inner in all_nodes(graph))
        domains.add(node.domain)
        target.node.append(serialize.serialize_node(node))
        target.value_info.extend(
            serialize.serialize_value(value)
            for value in node.outputs
            if value.name and value.type is not None and value not in outputs
        )
    name_tensors(target.node)
    for variable, tensor in algorithm.updates.items():
        info.update_binding.add(key=variable, value=tensor.name)

    info.initialization.name = f"{name}_initialization"
    with Tape(name=f"{name}_initialization") as tape:
        for variable, array in algorithm.initial.items():
            start = op.Identity(np.asarray(array)) if array.ndim == 0 else _filled(tape, array)
            tape.output(start, f"{variable}_initial")
            info.initialization_binding.add(key=variable, value=f"{variable}_initial")
    info.initialization.CopyFrom(serialize.serialize_graph(tape.graph))
    result.ir_version = max(result.ir_version, _TRAINING_INFO_IR_VERSION)
    imported = {entry.domain for entry in result.opset_import}
    for domain in sorted(domains - imported - {"", BOUND_DOMAIN}):
        version = algorithm.tape.graph.opset_imports.get(domain, 1)
        result.opset_import.add(domain=domain, version=version)


def _filled(tape: Tape, zeros: np.ndarray[Any, Any]) -> Tensor:
    """Appends a node with zeros; there may be hundreds, whose types need no inference."""
    value = ir.AttrTensor("value", stored(np.zeros(1, zeros.dtype)))
    sizes = tape.constant(np.array(zeros.shape, np.int64))
    node = ir.Node("", "ConstantOfShape", [sizes.value], [value])
    tape.append(node)
    (result,) = node.outputs
    result.type = ir.TensorType(value.as_tensor().dtype)
    result.shape = ir.Shape(zeros.shape)
    return tape.tensor(result)


def _write_variable(
    tensor: Tensor, algorithm: Algorithm, target: onnx.GraphProto, data: external.Data
) -> None:
    """Adds a variable to a graph; big values are detached, and computed when they are read."""
    value = tensor.value.const_value
    assert value is not None
    if value.nbytes <= BIG or value.dtype.value not in ITEM_SIZES:
        ir.serde.serialize_tensor_into(target.initializer.add(), value)
        return
    shape = value.shape.numpy()
    if tensor.name in algorithm.initial:  # zeros
        zeros = functools.partial(_zeros, shape, value.dtype.numpy())
        value = Computed(zeros, value.dtype, shape)
    written = target.initializer.add(name=tensor.name, data_type=value.dtype, dims=shape)
    external.refer(written, data, value)


def _zeros(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns zeros in bytes, which `LightModel.attach` does not copy."""
    return np.frombuffer(bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
