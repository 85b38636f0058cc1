"""Refuses adapters whose gradient would pass through experts (MoE and QMoE of onnxruntime)."""

from __future__ import annotations

import re

import onnx

from ortops.errors import UnsupportedError
from ortops.graph.adapters import adapter_of

_KINDS = ("MoE", "QMoE")
_LAYER = re.compile(r"layers?[./](\d+)")


def refuse_experts(model: onnx.ModelProto) -> None:
    """Rejects a model with an adapter in front of experts.

    Raises:
        UnsupportedError: If a node of MoE or QMoE depends on the adapter.
    """
    adapter = adapter_of(model.metadata_props)
    reached = {
        name
        for module in ({} if adapter is None else adapter.modules).values()
        for name in (module.a, module.b)
    }
    found = []
    for node in model.graph.node:  # in topological order
        if reached & set(node.input):
            reached.update(filter(None, node.output))
            found += [node] if node.op_type in _KINDS else []
    if not found:
        return
    first = found[0]
    layer = _LAYER.search(first.name)
    where = f" in layer {layer[1]}" if layer else ""
    raise UnsupportedError(
        f"{first.op_type} node '{first.name or first.output[0]}'{where} ({len(found)} such nodes): "
        "experts have no gradient, which every adapter in front of them needs, those of attention "
        "projections included; adapt only layers behind the last of these nodes, such as "
        "targets=['lm_head'], or tune a form of the model whose experts are standard operators"
    )
