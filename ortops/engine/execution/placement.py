"""Which provider runs which node of a step."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import onnxruntime

from ortops.engine.execution.providers import CPU
from ortops.graph.edit import all_nodes

RECORDS = "session.record_ep_graph_assignment_info"
"""The option of a session with which onnxruntime records where nodes run."""

_SHOWN = 6
"""How many operators a message names."""

logger = logging.getLogger("ortops")


@dataclass(frozen=True)
class PlacedNode:
    """A node and the provider that runs it.

    Attributes:
        name: The name of the node, or that of its first output if it has none.
        operator: Its operator.
        provider: The name of the provider.
    """

    name: str
    operator: str
    provider: str


def name_nodes(model: onnx.ModelProto) -> None:
    """Names the nodes of a model that have no name after their first outputs, in place."""
    for node in model.graph.node:
        node.name = node.name or next(filter(None, node.output), "")


def nodes_of(graph: ir.Graph) -> list[PlacedNode]:
    """Returns the nodes of a graph that the CPU runs, with those of its subgraphs."""
    return [
        PlacedNode(_name_of(node), node.op_type, CPU)
        for node in all_nodes(graph)
        if node.op_type != "Constant"
    ]


def _name_of(node: ir.Node) -> str:
    return node.name or next((value.name for value in node.outputs if value.name), "")


def placed_nodes(session: onnxruntime.InferenceSession) -> list[PlacedNode] | None:
    """Returns where the nodes of a session run that was opened with the option `RECORDS`.

    Returns:
        The nodes; None if onnxruntime is too old to tell.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    found = [
        (node, part.ep_name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]
    return [
        PlacedNode(node.name or f"{node.op_type}#{number}", node.op_type, provider)
        for number, (node, provider) in enumerate(found)  # the optimizer adds nodes without names
    ]


def log_fallback(asked: Sequence[str], nodes: Iterable[PlacedNode]) -> None:
    """Says how many nodes run on the CPU because other providers have no kernels for them.

    Args:
        asked: The names of the providers that the user listed.
        nodes: The nodes of a step.
    """
    nodes = list(nodes)
    fallen = [node for node in nodes if node.provider == CPU]
    if not fallen or asked[0] == CPU:
        return
    counts = collections.Counter(node.operator for node in fallen).most_common()
    shown = ", ".join(f"{operator} ({count})" for operator, count in counts[:_SHOWN])
    logger.log(
        logging.WARNING if len(fallen) == len(nodes) else logging.INFO,
        "providers: %d of %d nodes of a step run on the CPU, because they compute shapes or %s has "
        "no kernels for them: %s%s; session.placement names them",
        len(fallen),
        len(nodes),
        next((name for name in asked if name != CPU), CPU),
        shown,
        ", …" if len(counts) > _SHOWN else "",
    )
