"""The Gradient operator."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortops.reference.replay import check_independence, differentiate
from ortops.reference.traced import Array


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _scope() -> tuple[list[OpRun], Mapping[str, Any]]:
    """Returns the nodes that a running node can refer to, and its function's attributes.

    An OpRun does not know the graph that it is in. The evaluators that run the graph are on the
    call stack: that of a branch or a loop's body, those of the graphs around it, and at the end
    that of a model or a function, which has names of its own.
    """
    nodes: list[OpRun] = []
    for frame in _frames(inspect.currentframe()):
        evaluator = frame.f_locals.get("self")
        if frame.f_code.co_name == "run" and isinstance(evaluator, ReferenceEvaluator):
            nodes = [*evaluator.rt_nodes_, *nodes]
            if not isinstance(evaluator.proto_, onnx.GraphProto):
                return nodes, frame.f_locals.get("attributes") or {}
    raise RuntimeError("Gradient runs in a ReferenceEvaluator only, because it needs the graph")


def _check(node: onnx.NodeProto, xs: list[str], zs: list[str]) -> None:
    schema = onnx.defs.get_schema("Gradient", 1, "ai.onnx.preview.training")
    for attribute in node.attribute:
        if attribute.name not in schema.attributes:
            raise ValueError(f"Gradient: it has no attribute {attribute.name!r}")
    if not xs:
        raise ValueError("Gradient: xs is empty")
    if len({*xs, *zs}) < len(xs) + len(zs):
        raise ValueError(f"Gradient: xs and zs name a tensor twice: {[*xs, *zs]}")
    if len(node.input) != len(xs) + len(zs):
        raise ValueError(
            f"Gradient has {len(node.input)} inputs, but xs and zs {len(xs) + len(zs)} names"
        )
    if len(node.output) > len(xs):
        raise ValueError(f"Gradient has {len(node.output)} outputs, but xs {len(xs)} names")


class Gradient(OpRun):
    """Gradient of the specification, computed in reverse mode."""

    op_domain = "ai.onnx.preview.training"
    xs: Any
    zs: Any

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        super().__init__(onnx_node, run_params)
        _check(onnx_node, self.xs, self.zs or [])

    def need_context(self) -> bool:
        """Whether the node sees all tensors: it does."""
        return True

    def _run(
        self,
        *inputs: Array,
        context: Mapping[str, Any],
        xs: list[str],
        y: str,
        zs: list[str] | None = None,
    ) -> tuple[Array, ...]:
        nodes, attributes = _scope()
        names = [*xs, *(zs or [])]
        for name in (*names, y):
            if name not in context:
                raise ValueError(f"Gradient: there is no tensor '{name}' before the node")
        for name, value in zip(names, inputs, strict=True):
            own = context[name]
            if value.dtype != own.dtype or value.ndim != own.ndim:
                raise ValueError(f"Gradient: the input for '{name}' has another type or rank")
        for x, value in zip(xs, inputs, strict=False):
            if not np.issubdtype(value.dtype, np.floating):
                raise ValueError(f"Gradient: '{x}' of xs is {value.dtype}, not floating-point")
        check_independence(nodes, names)
        return tuple(differentiate(self, nodes, inputs, context, attributes))
