"""The weights of a model, and the modules of torch that read them."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.building.parameters import why_not
from ortops.engine.building.readers import readers
from ortops.engine.building.scopes import scopes_of
from ortops.graph import convert
from ortops.graph.files import external, loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.shapes import infer_shapes
from ortops.graph.weights import Weight, lift, weights

_NORMALIZED = {1: "weight", 2: "bias"}

_ROLES = {
    "Add": {0: "bias", 1: "bias"},
    "BatchNormalization": {**_NORMALIZED, 3: "running_mean", 4: "running_var"},
    "Conv": _NORMALIZED,
    "ConvTranspose": _NORMALIZED,
    "Gather": {0: "weight"},
    "Gemm": _NORMALIZED,
    "GroupNormalization": _NORMALIZED,
    "InstanceNormalization": _NORMALIZED,
    "LayerNormalization": _NORMALIZED,
    "MatMul": {0: "weight", 1: "weight"},
    "Mul": {0: "weight", 1: "weight"},
    "PRelu": {1: "weight"},
    "RMSNormalization": {1: "weight"},
}
"""The names of parameters in torch's modules, by operator and index of the input."""

_GATES = {"GRU": (1, 0, 2), "LSTM": (0, 3, 1, 2), "RNN": (0,)}
"""The position in torch of each gate of ONNX: zrh and iofc instead of rzn and ifgo."""


@dataclass
class Read:
    """A weight of a model and who reads it.

    Attributes:
        weight: The weight.
        keys: The names that the modules that read it have for it, in torch: for each reader, the
            innermost scope first.
        nodes: The readers in words.
        is_weight: Whether it is a learned weight or a running statistic, not a constant.
        transposed: Whether its readers use it as x · W without a Transpose or transB, so that
            torch's Linear, whose weight is [outputs, inputs], was transposed by the exporter.
        gates: For W, R and B of a recurrent operator, the position in torch of each of its gates.
    """

    weight: Weight
    keys: list[list[str]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    is_weight: bool = True
    transposed: bool = False
    gates: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's shape."""
        return self.weight.shape

    def array(self) -> Array:
        """Returns the weight's value."""
        return self.weight.array()


@loading.blame_model
def read_model(model: ModelLike) -> tuple[external.LightModel, dict[str, Read]]:
    """Returns a light model and its floating-point tensors (see `read_weights`)."""
    light = convert.load_light(model)
    return light, read_weights(light)


def read_weights(model: external.LightModel) -> dict[str, Read]:
    """Returns the floating-point tensors of a light model by name (see `ortops.graph.weights`)."""
    known = weights(model)
    everything, _ = lift(model)
    work = convert.to_ir(everything)
    convert.inline(work)
    infer_shapes(work)  # types help to tell weights from other constants
    initializers = work.graph.initializers
    return {
        name: _read(weight, initializers[name])
        if name in initializers
        else Read(weight, is_weight=False)  # a scalar constant, which is not lifted
        for name, weight in known.items()
    }


def _read(weight: Weight, value: ir.Value) -> Read:
    reason = why_not(value)
    found = Read(weight, is_weight=not reason or reason.startswith("is a running statistic"))
    for reader in readers(value):
        found.nodes.append(str(reader))
        role = _ROLES.get(reader.node.op_type, {}).get(reader.index)
        if role is not None:
            scopes = sorted(scopes_of(reader.node), key=lambda s: (s.count("."), len(s)))
            found.keys.append([f"{scope}.{role}" for scope in reversed(scopes)])
    found.transposed = any(
        (use.node.op_type == "MatMul" and use.idx == 1)
        or (use.node.op_type == "Gemm" and not use.node.attributes.get_int("transB", 0))
        for use in value.uses()
    )
    for use in value.uses():
        if use.idx in (1, 2, 3):
            found.gates = _GATES.get(use.node.op_type, found.gates)
    return found
