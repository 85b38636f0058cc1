"""Activation checkpointing: trades compute for memory by recomputing activations.

Normally, a training step keeps all activations of the forward pass until the backward pass has read
them. With checkpointing it keeps only some tensors, and the backward pass recomputes the
activations between two of them when it reaches them. A step takes about a third longer. With n
layers and √n checkpoints, it holds the activations of about 2·√n layers instead of n (Chen, Xu,
Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from types import NoneType
from typing import Literal, TypeAlias

import onnx_ir as ir

from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph.edit import (
    ancestor_nodes,
    copy_node,
    dependent_values,
    is_float,
    nodes_between,
    read_inputs,
)
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.graph.operators import OPERATORS, is_random
from ortops.graph.passes.draft import Draft, Pass
from ortops.graph.shapes import zero_after
from ortops.graph.tensor import Tape, op, shape_of

Checkpoint: TypeAlias = Sequence[str] | int | Literal["sqrt", "elementwise", "auto"]
"""The names of the tensors to keep, the number of tensors to choose, or what to recompute."""

_WORDS = ("sqrt", "elementwise")

SAID = (
    "activation functions, products of elements and normalizations are computed again in the "
    "backward pass"
)
"""What ``"elementwise"`` does, as text."""

_NORMALIZATIONS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
"""Normalizations of which some statistics are results, so that the backward pass reads those."""

_KNOWN_DOMAINS = ("", MICROSOFT, "com.microsoft.nchwc", "ai.onnx.ml")

_CHEAP = (ir.DataType.BOOL, ir.DataType.STRING)  # a mask takes a quarter of the memory of its data

_SMALL = 4096  # the number of elements that are cheap to keep


def check(checkpoint: Checkpoint, known: Iterable[str]) -> None:
    """Checks a choice of checkpoints.

    Args:
        checkpoint: The argument.
        known: The tensors that can be kept; see `computed_names`.

    Raises:
        ArgumentError: If it is neither names of tensors, nor a positive integer, nor a known word.
        ModelError: If the model computes no such tensor.
    """
    if isinstance(checkpoint, int):
        valid = checkpoint > 0 and checkpoint is not True
    elif isinstance(checkpoint, str):
        valid = checkpoint in _WORDS
    else:
        names = names_in(checkpoint)
        valid = names != [] and names == list(checkpoint)
    if not valid:
        raise ArgumentError(
            "recompute must be a list of names of tensors to keep, the number of tensors to keep "
            f"(an integer >= 1), 'sqrt', 'elementwise', or 'auto', got {checkpoint!r}"
        )
    known = list(known)
    for name in names_in(checkpoint):
        if name not in known:
            raise ModelError(
                f"recompute: the forward pass computes no tensor '{name}' from the batch; "
                + did_you_mean(name, known)
            )


def chosen(checkpoint: Checkpoint | None, *, on_cpu: bool) -> Checkpoint | None:
    """Resolves ``"auto"``; returns any other choice unchanged.

    On the CPU, ``"elementwise"`` takes 0.98 to 1.07 of the time of a step and up to a quarter less
    memory (measured). Elsewhere nothing is recomputed: the order of recomputed nodes depends on the
    sizes of a tensor, which a device would have to send to the host.
    """
    if not isinstance(checkpoint, str) or checkpoint != "auto":
        return checkpoint
    return "elementwise" if on_cpu else None


def names_in(checkpoint: object) -> list[str]:
    """Returns the names of the tensors to keep; none if they are chosen automatically."""
    if isinstance(checkpoint, str) or not isinstance(checkpoint, Collection):
        return []
    return [name for name in checkpoint if isinstance(name, str)]


def computed_names(graph: ir.Graph, feeds: Collection[str], shown: Collection[str]) -> list[str]:
    """Returns the names of the tensors that the forward pass computes from the batch."""
    return [value.name or "" for value in _Forward(graph, feeds, shown).from_batch]


class Rematerialization(Pass):
    """Makes the backward pass read recomputed activations.

    Tensors that cannot be recomputed, or are cheap to keep, are kept: random numbers, masks, small
    tensors of known size, and the results of operators of unknown domains.

    Args:
        checkpoint: The tensors to keep. Unknown names are ignored.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__("rematerialization")
        self.checkpoint = checkpoint

    def prepare(self, draft: Draft) -> None:
        """Pins the tensors to keep, so that other passes do not change them."""
        draft.pin(names_in(self.checkpoint))

    def finish(self, draft: Draft) -> None:
        """Rewrites the graph."""
        draft.unpin()
        forward = _Forward(draft.graph, draft.feeds, draft.shown)
        if self.checkpoint == "elementwise":
            recomputed = forward.elementwise()
        elif isinstance(self.checkpoint, int | str):
            recomputed = forward.before(forward.choose(self.checkpoint))
        else:
            kept = {value for value in forward.from_batch if value.name in self.checkpoint}
            recomputed = forward.before(kept)
        _Recomputation(draft.graph, draft.names, forward, recomputed).run()


class _Forward:
    """The forward pass of a step.

    Args:
        graph: The step.
        feeds: The inputs that a batch fills.
        shown: The outputs that it computes.

    Attributes:
        nodes: Its nodes, in topological order.
        batch: The values that depend on the batch, and the inputs that it fills.
        from_batch: The results of nodes that depend on the batch, in the order of the nodes.
        values: The results of nodes that depend on both the batch and variables, in the order of
            the nodes. Values that depend on the batch alone, such as a mask that all layers read,
            are kept.
    """

    def __init__(self, graph: ir.Graph, feeds: Collection[str], shown: Collection[str]) -> None:
        self.nodes = nodes_between(graph, (), [v for v in graph.outputs if v.name in shown])
        self.feeds = [value for value in graph.inputs if value.name in feeds]
        self.batch = dependent_values(self.nodes, self.feeds)
        variables = [value for value in graph.inputs if value.name not in feeds]
        both = self.batch & dependent_values(self.nodes, variables)
        results = [value for node in self.nodes for value in node.outputs]
        self.from_batch = [value for value in results if value in self.batch]
        self.values = [value for value in results if value in both]
        self._captured = {value for node in graph for value in _captured(node)}

    def before(self, kept: Collection[ir.Value]) -> set[ir.Value]:
        """Returns the results to recompute if some are kept: those that these depend on."""
        return self._recomputable(ancestor_nodes(kept, set())) - {*kept}

    def elementwise(self) -> set[ir.Value]:
        """Returns results that follow by elementwise functions from what the backward pass reads.

        It reads them, too; otherwise they would be gone already.
        """
        members, feeds = set(self.nodes), {*self.feeds}
        read = {v for v in self.batch if any(reader not in members for reader, _ in v.uses())}
        chosen = [
            node
            for node in self.nodes
            if _is_elementwise(node)
            and node.outputs[0] in read
            and not node.outputs[0].is_graph_output()
            and self.batch.intersection(read_inputs(node)) <= read | feeds
        ]
        return self._recomputable(chosen).intersection(node.outputs[0] for node in chosen)

    def _recomputable(self, nodes: Iterable[ir.Node]) -> set[ir.Value]:
        """Returns the results of nodes that are computed again, unless these are to be kept."""
        results = {*self.values} - self._captured
        return {
            value
            for node in nodes
            if _is_deterministic(node)
            for value in node.outputs
            if value in results and _is_large(value)
        }

    def choose(self, wanted: int | str) -> set[ir.Value]:
        """Chooses tensors to keep, so that the memory between them is about equal.

        The candidates are tensors that all later results depend on. Among candidates close to an
        ideal position, smaller ones are preferred.

        Args:
            wanted: The number of tensors, or "sqrt" for the square root of that of candidates.
        """
        places = self._bottlenecks()
        if not places:
            return set()
        kept = {value for value in self.values if is_float(value)}
        sizes = [
            sum(_size(value) for value in node.outputs if value in kept) for node in self.nodes
        ]
        before = list(itertools.accumulate(sizes))
        count = math.isqrt(len(places)) if isinstance(wanted, str) else wanted
        ends = [before[-1] * number / (count + 1) for number in range(1, count + 1)]
        nearest = (min((abs(before[p] - end) + sizes[p], p) for p in places)[1] for end in ends)
        return {places[place] for place in nearest}

    def _bottlenecks(self) -> dict[int, ir.Value]:
        """Returns results that are the only ones to be read later, by their nodes' positions."""
        members = set(self.nodes)
        left = {
            value: sum(reader in members for reader, _ in value.uses())
            for value in self.values
            if is_float(value)
        }
        open_values: set[ir.Value] = set()
        places: dict[int, ir.Value] = {}
        for position, node in enumerate(self.nodes):
            for value in node.inputs:
                if value in left:
                    left[value] -= 1
                    if not left[value]:
                        open_values.discard(value)
            open_values |= {value for value in node.outputs if left.get(value)}
            if len(open_values) == 1:
                (value,) = open_values
                if value in node.outputs and value not in self._captured:
                    places[position] = value
        return places


class _Recomputation:
    """Copies nodes of the forward pass to where the backward pass reads their results.

    Args:
        graph: The step.
        names: The names used in it.
        forward: Its forward pass.
        recomputed: The results of the forward pass to compute again.
    """

    def __init__(
        self, graph: ir.Graph, names: Names, forward: _Forward, recomputed: set[ir.Value]
    ) -> None:
        self._graph = graph
        self._tape = Tape(graph, names=names)
        self._forward = {node: position for position, node in enumerate(forward.nodes)}
        self._results = set(forward.values)
        self._batch = forward.batch
        self._recomputed = recomputed
        self._copies: dict[ir.Value, ir.Value] = {}
        self._delayed: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        """Inserts copies before the first node outside the forward pass that reads a result."""
        late = dependent_values(self._graph, self._results) - self._results
        cotangent: ir.Value | None = None
        for node in list(self._graph):
            if node in self._forward:
                continue
            own = (v for v in node.inputs if v is not None and v in late and is_float(v))
            cotangent = next(own, cotangent)
            for index, value in enumerate(node.inputs):
                if value is not None and value in self._recomputed and cotangent is not None:
                    self._tape.before = node
                    node.replace_input_with(index, self._copy(value, cotangent))

    def _copy(self, value: ir.Value, cotangent: ir.Value) -> ir.Value:
        """Returns a copy of a value, which is computed after a cotangent."""
        missing: set[ir.Node] = set()
        pending = [value]
        while pending:
            wanted = pending.pop()
            node = wanted.producer()
            if node is None or wanted not in self._recomputed or wanted in self._copies:
                continue
            if node not in missing:
                missing.add(node)
                pending += read_inputs(node)
        for node in sorted(missing, key=self._forward.__getitem__):
            inputs = {v: self._copies[v] for v in read_inputs(node) if v in self._copies}
            if not inputs:  # without other inputs, onnxruntime would merge the two nodes
                read = next((v for v in node.inputs if v is not None and v in self._batch), None)
                inputs = {} if read is None else {read: self._delay(read, cotangent)}
            copy = copy_node(node, inputs)
            self._tape.scope = f"{node.name}/again/"
            self._tape.append(copy)
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                if old in self._recomputed:
                    self._copies[old] = new
        return self._copies[value]

    def _delay(self, value: ir.Value, cotangent: ir.Value) -> ir.Value:
        """Returns a value in the same memory that is available only after a cotangent."""
        if value not in self._delayed:
            self._tape.scope = "checkpoint/"
            x, g = self._tape.tensor(value), self._tape.tensor(cotangent)
            shape = op.Add(shape_of(x), zero_after(g))
            self._delayed[value] = op.Reshape(x, shape, allowzero=1).with_shape_of(x).value
        return self._delayed[value]


def _size(value: ir.Value) -> int:
    """Returns the product of the known sizes."""
    return math.prod(size for size in value.shape or () if isinstance(size, int))


def _is_large(value: ir.Value) -> bool:
    """Whether a value may need much memory, unlike small tensors and masks."""
    if value.dtype in _CHEAP or not isinstance(value.type, ir.TensorType | NoneType):
        return False
    return value.shape is None or not value.shape.is_static() or _size(value) > _SMALL


def _is_elementwise(node: ir.Node) -> bool:
    """Whether a node takes about the time of reading its inputs once."""
    row = OPERATORS.get((node.domain, node.op_type))
    return (row is not None and row.elementwise) or node.op_type in _NORMALIZATIONS


def _is_deterministic(node: ir.Node) -> bool:
    """Whether a node is known to be deterministic."""
    inner = [other for graph in inner_graphs(node) for other in graph.all_nodes()]
    return all(
        other.domain in _KNOWN_DOMAINS and not is_random(other.op_type) for other in (node, *inner)
    )


def _captured(node: ir.Node) -> set[ir.Value]:
    """Returns the values that the subgraphs of a node capture."""
    own = {value for value in node.inputs if value is not None}
    return set(read_inputs(node)) - own if inner_graphs(node) else set()
