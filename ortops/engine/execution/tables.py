"""Frozen tables that stay in their file, such as embeddings: a step reads only rows of them.

A batch looks up few rows of a table, which can be larger than all other weights together. They are
read from the file before the step and are an input of it. The file is not mapped into memory:
access to a mapped file that another process has truncated ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.step import Step
from ortops.errors import FeedError
from ortops.graph.autodiff.gradient_node import Bound, is_bound
from ortops.graph.edit import remove_unread_inputs, take_place
from ortops.graph.files.external import LightModel, in_file
from ortops.graph.files.held_file import InFile
from ortops.graph.files.messages import DOMAINS, is_light, location_of, names_read
from ortops.graph.names import Names


@dataclass(frozen=True)
class Lookup:
    """Reads the rows of tables that a batch needs.

    Attributes:
        rows: For each input of the step, the table and the input of the batch with the indices.
    """

    rows: Mapping[str, tuple[InFile, str]]
    replaced = frozenset[str]()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the rows for a batch.

        Raises:
            FeedError: If a table lacks a row.
            ModelError: If its file has been modified.
        """
        return {name: _look_up(*found, feeds) for name, found in self.rows.items()}


def _look_up(table: InFile, name: str, feeds: Mapping[str, Array]) -> Array:
    indices, count = feeds[name], table.shape.numpy()[0]
    numbers, places = np.unique(indices, return_inverse=True)
    wrong = numbers[(numbers < -count) | (numbers >= count)]
    if len(wrong):
        raise FeedError(
            f"input '{name}': it looks up row {wrong[0]} of '{table.name}', which has {count} rows"
        )
    found = table.rows((numbers % count).tolist())
    return found[places.reshape(indices.shape)]


def tables_in_file(model: LightModel, least: float) -> dict[str, InFile]:
    """Returns the frozen tables of which batches only look up rows, and that are in a file.

    Args:
        model: The model.
        least: The smallest number of bytes of a table to return.
    """
    if sys.byteorder != "little":
        return {}
    proto, found = model.proto, dict[str, InFile]()
    graphs = [proto.graph, *(info.algorithm for info in proto.training_info)]
    for tensor in proto.graph.initializer:
        content = in_file(model.data[location_of(tensor)]) if is_light(tensor) else None
        if content is not None and content.length >= least and _has_rows(content):
            found[tensor.name] = content
    if not found:
        return found
    fed = {value.name for graph in graphs for value in graph.input}
    fed -= {tensor.name for graph in graphs for tensor in graph.initializer}
    others = {value.name for graph in graphs for value in (*graph.input, *graph.output)}
    for info in proto.training_info:
        for binding in (*info.update_binding, *info.initialization_binding):
            others |= {binding.key, binding.value}
    for node in (node for graph in graphs for node in graph.node):
        others.update(_read_whole(node, fed))
    return {name: content for name, content in found.items() if name not in others}


def left_in_file(model: LightModel) -> dict[str, int]:
    """Returns the sizes in bytes of the tables that sessions on a model leave in its file, by name.

    Those that training is to begin with are among them; sessions hold what they train in memory.
    """
    tables = tables_in_file(model, Settings().looked_up)
    return {name: table.length for name, table in tables.items()}


def said(left: Mapping[str, int]) -> list[str]:
    """Returns a sentence about each table that stays in a file."""
    return [
        f"'{name}' ({size / 1e6:,.0f} MB) stays in its file, of which steps on the CPU read rows; "
        "replace the file instead of overwriting it"
        for name, size in left.items()
    ]


def _has_rows(table: InFile) -> bool:
    """Whether a table has rows of numbers that numpy and onnxruntime share."""
    kind = table.dtype
    return bool(table.shape) and kind.bitwidth >= 8 and kind.numpy().type.__module__ == "numpy"


def _read_whole(node: onnx.NodeProto, fed: set[str]) -> Iterable[str]:
    """Yields what a node reads, except a table that it looks up rows of, or zs that it names."""
    attributes = {each.name: each for each in node.attribute}
    if (node.domain, node.op_type) == ("", "Gather") and fed.issuperset(node.input[1:]):
        whole = "axis" in attributes and attributes["axis"].i != 0
        yield from node.input if whole else node.input[1:]
    elif node.op_type == "Gradient" and node.domain in DOMAINS:
        xs, zs = ([*attributes[n].strings] if n in attributes else [] for n in ("xs", "zs"))
        named = zip(node.input[len(xs) :], zs, strict=False)
        yield from node.input[: len(xs)]
        yield from (name for name, replaced in named if name.encode() != replaced)
    else:
        yield from names_read([node])


def separate_tables(step: Step, tables: Mapping[str, InFile]) -> tuple[Step, Lookup | None]:
    """Makes rows of tables inputs of a step, in place of the tables.

    Args:
        step: The step, changed in place.
        tables: The tables by name. Those that the step does not look up, because they were made
            inputs or are read otherwise, are left as they are.

    Returns:
        The step, and what reads the rows; None if it looks up none.
    """
    graph, rows = step.model.graph, dict[str, tuple[InFile, str]]()
    names = Names(graph) if tables else Names()
    for name, content in tables.items():
        table = graph.initializers.get(name)
        if table is None or table.is_graph_input() or table.is_graph_output():
            continue  # an input with a default is a variable
        readers = dict.fromkeys(use.node for use in table.uses())
        naming = [Bound.of(node) for node in readers if is_bound(node)]
        nodes = [node for node in readers if not is_bound(node)]
        if not _all_look_up(nodes, step) or not all(bound.forget([table]) for bound in naming):
            continue
        for node in nodes:
            old, indices = node.outputs[0], node.inputs[1]
            assert indices is not None
            read = ir.Value(name=names.unique(f"{name}.rows"), type=old.type, shape=old.shape)
            graph.inputs.append(read)
            rows[read.name or ""] = content, indices.name or ""
            copied = ir.Node("", "Identity", [read])  # so that the tensor keeps its name
            copied.outputs[0].type, copied.outputs[0].shape = old.type, old.shape
            node.prepend(copied)
            take_place(old, copied.outputs[0])
            graph.remove(node, safe=True)
        del graph.initializers[name]
    if not rows:
        return step, None
    remove_unread_inputs(graph, step.feeds)
    feeds = [v.name or "" for v in graph.inputs if v.name not in step.variables]
    return replace(step, feeds=feeds), Lookup(rows)


def _all_look_up(nodes: Iterable[ir.Node], step: Step) -> bool:
    """Whether all nodes are in the main graph and look up rows for an input of the batch."""
    return all(
        node.graph is step.model.graph
        and (node.domain, node.op_type) == ("", "Gather")
        and node.attributes.get_int("axis", 0) == 0
        and node.inputs[1] is not None
        and node.inputs[1].is_graph_input()
        and node.inputs[1].name in step.feeds
        for node in nodes
    )
