"""Small models with nodes of ai.onnx.preview.training, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

DOMAIN = "ai.onnx.preview.training"


def value(
    name: str, shape: Sequence[int | str | None] | None = (), kind: int = TensorProto.FLOAT
) -> onnx.ValueInfoProto:
    """Describes an input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Any:
    """Makes a node of the training domain."""
    attributes.setdefault("domain", DOMAIN)
    return helper.make_node(op_type, inputs, outputs, **attributes)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str],
    *,
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 21,
    functions: Sequence[onnx.FunctionProto] = (),
    imports: Sequence[tuple[str, int]] = (),
) -> onnx.ModelProto:
    """Makes a model whose outputs have no types."""
    graph = helper.make_graph(
        nodes,
        "graph",
        inputs,
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [onnx.numpy_helper.from_array(a, name) for name, a in (initializers or {}).items()],
    )
    opsets = [("", opset), (DOMAIN, 1), *imports]
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets],
        ir_version=10,
        functions=functions,
    )
