"""Tools that are no runtimes, as backends of the conformance suite.

``python -m ortops.conformance --backend tests.conformance_peers:OnnxAd`` runs it on one.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ad
import onnxruntime
import onnxsim
from onnx.backend.base import Backend
from onnx.reference import ReferenceEvaluator

import ortops.backend

DOMAIN = "ai.onnx.preview.training"

Array = np.ndarray[Any, Any]


class OnnxSim(Backend):
    """onnxsim, and ortops for what it writes: whether it keeps what nodes of the domain need."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
        return ortops.backend.Session.prepare(onnxsim.simplify(model)[0])

    @classmethod
    def prepare_training(cls, model: onnx.ModelProto, device: str = "CPU") -> Any:
        return ortops.backend.Session.prepare_training(onnxsim.simplify(model)[0])


class _Rep:
    def __init__(self, model: onnx.ModelProto, execute: Callable[[dict[str, Array]], Any]) -> None:
        self._names = [value.name for value in model.graph.input]
        self._execute = execute

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> list[Array]:
        return self._execute(dict(zip(self._names, inputs, strict=True)))


def _read(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Returns the names that nodes and their sub-graphs read."""
    graphs = [a.g for node in nodes for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    return {name for node in nodes for name in node.input if name}.union(
        *(_read(graph.node) | {value.name for value in graph.output} for graph in graphs)
    )


def _function(
    model: onnx.ModelProto, xs: list[str], zs: list[str], y: str
) -> tuple[onnx.ModelProto, list[str]]:
    """Returns the sub-graph from xs and zs to y as a model, and its further inputs."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    known = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        kind = (tensor.data_type, list(tensor.dims))
        known[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, *kind)
    needed, path = {y}, []
    for node in reversed(graph.node):
        if node.domain != DOMAIN and (needed - {*xs, *zs}).intersection(node.output):
            path.insert(0, node)
            needed |= _read([node])
    more = [v.name for v in graph.input if v.name in needed - {*xs, *zs}]
    constants = [t for t in graph.initializer if t.name in needed - {*xs, *zs}]
    inputs = [known[name] for name in (*xs, *zs, *more)]
    made = onnx.helper.make_graph(path, "function", inputs, [known[y]], constants)
    imports = [entry for entry in model.opset_import if entry.domain != DOMAIN]
    function = onnx.helper.make_model(
        made, opset_imports=imports, ir_version=model.ir_version, functions=model.functions
    )
    return function, more


class OnnxAd(Backend):
    """onnx-ad's reverse mode, for graphs with one Gradient node and no other node of the domain."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> _Rep:
        nodes = [node for node in model.graph.node if node.domain == DOMAIN]
        if [node.op_type for node in nodes] != ["Gradient"] or model.training_info:
            raise unittest.SkipTest("onnx-ad differentiates a model, not a node among others")
        (node,) = nodes
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        xs, zs = ([name.decode() for name in attributes.get(key, ())] for key in ("xs", "zs"))
        y = attributes["y"].decode()
        function, more = _function(model, xs, zs, y)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        # as onnx-ad tells to open its models: without onnxruntime's own fusions
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        reverse = onnx_ad.reverse(function, inputs=xs, outputs=[y], layout="onnx")
        session = onnxruntime.InferenceSession(reverse.SerializeToString(), options)
        forward = onnx.ModelProto()
        forward.CopyFrom(model)
        forward.graph.node.remove(node)
        evaluator = ReferenceEvaluator(forward)
        gradients = {output: f"adj_{x}" for x, output in zip(xs, node.output, strict=False)}

        def execute(feeds: dict[str, Array]) -> list[Array]:
            values = evaluator.run([], feeds, intermediate=True)
            given = dict(zip((*xs, *zs), (values[name] for name in node.input), strict=True))
            given |= {name: feeds[name] for name in more}
            given[f"adj_{y}"] = np.ones((*values[y].shape, 1), values[y].dtype)
            wanted = {value.name for value in session.get_inputs()}
            found = session.run(None, {k: v for k, v in given.items() if k in wanted})
            names = [value.name for value in session.get_outputs()]
            made = dict(zip(names, found, strict=True))
            return [
                made[gradients[value.name]][..., 0]
                if value.name in gradients
                else values[value.name]
                for value in model.graph.output
            ]

        return _Rep(model, execute)
