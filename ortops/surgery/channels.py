"""Which channels of a model can only be removed together.

Each element of an axis of a constant is a label. An operator passes the labels of its inputs on to
its output, or joins them: those of a weight's input channels with those of the tensor it is
multiplied with, those of both operands of a residual Add, and so on. Labels that are joined are one
unit: the channels behind them are removed together or not at all. A unit is fixed if one of its
labels belongs to an axis that must keep its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.graph.edit import read_inputs
from ortops.surgery.reading import constant

Labels: TypeAlias = npt.NDArray[np.int64]
Axes: TypeAlias = list[Labels | None]
"""For each axis the labels of its elements; None for an axis that must keep its size."""


class Units:
    """Labels, and which of them belong together (union-find).

    Example:
        >>> units = Units()
        >>> a, b = units.new(2), units.new(2)
        >>> units.join(a, b)
        >>> units.fix(b[:1], "an output")
        >>> units.roots(a).tolist() == units.roots(b).tolist(), [units.is_fixed(x) for x in a]
        (True, [True, False])
    """

    def __init__(self) -> None:
        self._parents: list[int] = []
        self._reasons: dict[int, str] = {}

    def new(self, count: int) -> Labels:
        """Returns labels of units of their own."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def root(self, label: int) -> int:
        """Returns the label that stands for the unit of a label."""
        parents = self._parents
        while parents[label] != label:
            parents[label] = label = parents[parents[label]]
        return label

    def roots(self, labels: Labels) -> Labels:
        """Returns the label that stands for the unit of each label."""
        return np.array([self.root(each) for each in labels.tolist()], np.int64)

    def join(self, a: Labels, b: Labels) -> None:
        """Makes one unit of the units of each pair of labels."""
        for one, other in zip(a.tolist(), b.tolist(), strict=True):
            p, q = self.root(one), self.root(other)
            if p != q:
                self._parents[q] = p
                reason = self._reasons.pop(q, None)
                if reason is not None:
                    self._reasons.setdefault(p, reason)

    def fix(self, labels: Labels, reason: str) -> None:
        """Keeps units, for a reason."""
        for label in labels.tolist():
            self._reasons.setdefault(self.root(label), reason)

    def is_fixed(self, label: int) -> bool:
        """Whether the unit of a label must stay."""
        return self.root(label) in self._reasons

    def reason(self, label: int) -> str:
        """Returns why the unit of a label must stay; empty if it need not."""
        return self._reasons.get(self.root(label), "")


class Channels:
    """The labels of the tensors of a graph.

    Args:
        graph: The graph.
        known: Its values with inferred shapes, by name.
        opset: The version of its default operators.

    Attributes:
        units: All labels.
        axes: The labels of each value; None for a value of unknown rank.
        computed: The values that depend on constants only.
        leaves: The floating-point constants.
        produced: The labels of output channels of weights.
        contracted: The labels of weights that are multiplied with channels and summed up.
        scales: The constants that are factors of a channel.
        groups: Depthwise convolutions, with the labels that count their groups.
        shapes: Where a constant is the shape of a value: the node, the index of its input, the
            value with the shape, and the value that zeros in it copy sizes from.
        numbers: Nodes with sizes to write: name of the attribute, index of the input, and the
            labels that each number counts.
    """

    def __init__(self, graph: ir.Graph, known: dict[str, ir.Value], opset: int) -> None:
        self.graph, self.opset = graph, opset
        self._known = known
        self.units = Units()
        self.axes: dict[ir.Value, Axes | None] = {}
        self.computed: set[ir.Value] = set()
        self.leaves: list[ir.Value] = []
        self.produced: set[int] = set()
        self.contracted: set[int] = set()
        self.scales: set[ir.Value] = set()
        self.groups: list[tuple[ir.Node, Labels]] = []
        self.shapes: list[tuple[ir.Node, int, ir.Value, ir.Value | None]] = []
        self.numbers: list[tuple[ir.Node, str, int, list[Labels]]] = []
        for value in graph.initializers.values():
            self._add_leaf(value)
        for value in graph.inputs:
            self.axes.setdefault(value, self.unlabelled(value))

    def _add_leaf(self, value: ir.Value) -> None:
        array = value.const_value
        self.computed.add(value)
        if array is None or not array.dtype.is_floating_point():
            self.axes[value] = None if array is None else [None] * len(array.shape)
            return
        self.leaves.append(value)
        sizes = [size for size in array.shape if isinstance(size, int)]
        self.axes[value] = [self.units.new(size) if size > 1 else None for size in sizes]

    def sizes(self, value: ir.Value) -> list[int | str | None] | None:
        """Returns the shape of a value, with the names of symbolic axes; None if it is unknown."""
        known = self._known.get(value.name or "", value)
        shape = value.shape if known.shape is None else known.shape
        if shape is None:
            return None
        return [dim if isinstance(dim, int) else dim.value for dim in shape]

    def unlabelled(self, value: ir.Value) -> Axes | None:
        """Returns no labels for each axis of a value."""
        sizes = self.sizes(value)
        return None if sizes is None else [None] * len(sizes)

    def of(self, value: ir.Value | None) -> Axes:
        """Returns the labels of a value of known rank; none for an absent one."""
        found = None if value is None else self.axes[value]
        return [] if found is None else found

    def put(self, value: ir.Value, axes: Sequence[Labels | None]) -> None:
        """Sets the labels of an output of a node."""
        self.axes[value] = list(axes)

    def fix(self, values: Iterable[ir.Value | None], reason: str) -> None:
        """Keeps all channels of values."""
        for value in values:
            self.fix_axes([] if value is None else self.axes.get(value) or [], reason)

    def fix_axes(self, axes: Iterable[Labels | None], reason: str) -> None:
        """Keeps the channels of axes."""
        for labels in axes:
            if labels is not None:
                self.units.fix(labels, reason)

    def refuse(self, node: ir.Node, reason: str) -> None:
        """Keeps all channels that a node reads; its outputs get no labels."""
        self.fix(read_inputs(node), reason)
        for value in node.outputs:
            self.axes[value] = self.unlabelled(value)

    def join(self, a: Labels | None, b: Labels | None, reason: str) -> Labels | None:
        """Joins the labels of two axes of equal size, and returns them.

        Args:
            a: Labels, or None for an axis without.
            b: The same.
            reason: Why channels stay if the other axis has no labels.
        """
        if a is not None and b is not None and len(a) == len(b):
            self.units.join(a, b)
            return a
        self.fix_axes([a, b], reason)
        return None

    def contract(self, a: ir.Value, a_axis: int, b: ir.Value, b_axis: int, reason: str) -> None:
        """Joins two axes along which products are summed up."""
        for value, axis in ((a, a_axis), (b, b_axis)):
            labels = self.of(value)[axis]
            if labels is not None and value in self.computed:
                self.contracted.update(labels.tolist())
        self.join(self.of(a)[a_axis], self.of(b)[b_axis], reason)

    def produce(self, value: ir.Value, axis: int) -> Labels | None:
        """Returns the labels of the output channels of a factor."""
        labels = self.of(value)[axis]
        if labels is not None and value in self.computed:
            self.produced.update(labels.tolist())
        return labels

    def follow(self, node: ir.Node, rule: Any, reason: str) -> None:
        """Gives the outputs of a node labels, by the rule of its operator.

        Args:
            node: The node.
            rule: A function of the channels and the node; None if there is no rule.
            reason: Why its channels stay without a rule.
        """
        given = [value for value in node.inputs if value is not None]
        if node.op_type == "Constant" and not node.domain:
            value = node.outputs[0]
            if value.const_value is None:
                array = constant(value)
                value.const_value = None if array is None else ir.Tensor(array, name=value.name)
            self._add_leaf(value)
            if self.axes[value] is None:
                self.axes[value] = self.unlabelled(value)
            return
        if given and all(value in self.computed for value in given):
            self.computed.update(node.outputs)
        if rule is None or any(self.axes.get(value) is None for value in given):
            self.refuse(node, reason)
            return
        rule(self, node)
        for value in node.outputs:
            if value not in self.axes:
                self.axes[value] = self.unlabelled(value)

    def kept(self, labels: Labels, removed: set[int]) -> npt.NDArray[np.bool_]:
        """Returns which elements of an axis stay.

        Args:
            labels: The labels of the axis.
            removed: The units to remove.
        """
        return np.array([self.units.root(each) not in removed for each in labels.tolist()], bool)
