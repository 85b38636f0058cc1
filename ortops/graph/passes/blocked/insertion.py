"""Replacement of convolutions, and of the operators between them, with blocked operators."""

from __future__ import annotations

import itertools

import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import is_bound
from ortops.graph.autodiff.rules import convolution
from ortops.graph.choices import constant_integers
from ortops.graph.edit import (
    attribute_values,
    emit,
    emit_one,
    has_one_reader,
    producer_of,
    remove_unread,
    replace_value,
)
from ortops.graph.operators import ELEMENTWISE, having
from ortops.graph.passes.blocked import rules
from ortops.graph.passes.blocked.kernels import sizes
from ortops.graph.passes.blocked.rules import DOMAIN
from ortops.graph.passes.draft import Draft
from ortops.graph.passes.finite import clip_bounds
from ortops.graph.tensor import Tape, Tensor, op

_OTHERWISE = having("keeps") | {"Clip", "PRelu", "Relu", "Where"}

_ELEMENTWISE = (ELEMENTWISE & having("finite")) - _OTHERWISE
"""Operators whose result does not depend on the layout, and is finite in channels of padding."""


def insert(draft: Draft, size: int) -> None:
    """Replaces convolutions, and the operators between them, with operators on blocked tensors.

    Args:
        draft: A prepared model; it is modified in place.
        size: The number of channels in a block.
    """
    _Insertion(draft, size).run()


class _Insertion:
    """The state of `insert`.

    Attributes:
        twins: The blocked values that replace values of the graph.
        entered: Blocked copies of values that are not replaced.
    """

    def __init__(self, draft: Draft, size: int) -> None:
        self.draft = draft
        self.unbounded = draft.unbounded
        self.size = size
        self.tape = Tape(draft.graph, names=draft.names)
        self.twins: dict[ir.Value, Tensor] = {}
        self.entered: dict[ir.Value, Tensor] = {}

    def run(self) -> None:
        graph = self.draft.graph
        for node in list(graph):
            if not node.domain and self.draft.is_free(node) and _is_suitable(node):
                self.tape.before = node
                self.tape.scope = f"{node.name or node.op_type}/"
                self._replace(node)
        nodes = list(graph)
        following = dict(itertools.pairwise(nodes))
        for value, twin in self.twins.items():
            if value.uses() or value.is_graph_output():
                producer = twin.value.producer()
                assert producer is not None
                self.tape.before = following.get(producer)  # before all consumers
                plain = rules.leave(twin, self.size, sizes(self.tape.tensor(value))[1])
                replace_value(self.tape, value, plain)
        remove_unread(list(graph))

    def _replace(self, node: ir.Node) -> None:
        """Computes blocked twins of a node's outputs, if possible."""
        replacements = {
            "Conv": self._conv,
            "ConvTranspose": self._conv_transpose,
            "BatchNormalization": self._batch_normalization,
            "Relu": self._relu,
            "Clip": self._clip,
            "MaxPool": self._max_pool,
            "GlobalAveragePool": self._global_average_pool,
            "ReduceMean": self._global_average_pool,
            "Concat": self._concat,
            **dict.fromkeys(_ELEMENTWISE, self._elementwise),
        }
        if node.op_type in replacements:
            replacements[node.op_type](node)

    def _twin(self, value: ir.Value | None) -> Tensor | None:
        if value is None:
            return None
        return self.twins.get(value, self.entered.get(value))

    def _blocked(self, x: Tensor) -> Tensor:
        """Returns the blocked twin of a value, which is created if necessary."""
        twin = self._twin(x.value)
        if twin is None:
            twin = self.entered[x.value] = rules.enter(x, self.size)
        return twin

    def _whole(self, channels: int) -> int | None:
        """Rounds channels up to whole blocks; None if that would add too many channels."""
        count = -(-channels // self.size) * self.size
        return count if channels % 4 == 0 and 2 * count <= 3 * channels else None

    def _is_padded(self, x: Tensor, value: ir.Value) -> bool:
        """Whether the twin of a value has more channels."""
        return sizes(x)[1] != sizes(self.tape.tensor(value))[1]

    def _operands(self, node: ir.Node) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the input, the weights and the bias of a convolution."""
        inputs = [None if value is None else self.tape.tensor(value) for value in node.inputs]
        x, w, b = (*inputs, None)[:3]
        assert x is not None
        assert w is not None
        return x, w, b

    def _conv(self, node: ir.Node) -> None:
        x, w, b = self._operands(node)
        group = node.attributes.get_int("group", 1)
        n, channels, *_ = sizes(x)
        m, part, *kernel = sizes(w)
        outputs = self._whole(m)
        # The kernels read inputs with fewer channels than a block in the plain layout, but not if
        # they compute as many more channels of a depthwise convolution as fill the block.
        is_plain = channels < self.size and group == 1
        taken = channels if is_plain else self._whole(channels)
        if outputs is None or taken is None:
            return
        if group > 1 and not part == 1 < m == channels == group:  # grouped, but not depthwise
            return
        at = convolution.node_windows(node, x, kernel)
        if not rules.can_transpose(at):
            return
        blocked = x if is_plain else self._blocked(x)
        _, _, *counts = sizes(self.tape.tensor(node.outputs[0]))
        w = _with_zeros(w, outputs - m, 0 if group > 1 else taken - channels)
        self.twins[node.outputs[0]] = emit_one(
            DOMAIN,
            "Conv",
            [blocked, w, None if b is None else _with_zeros(b, outputs - m)],
            (n, outputs, *counts),
            block=self.size,
            dilations=list(at.dilations),
            group=1 if group == 1 else outputs,
            pads=at.pads,
            strides=list(at.strides),
        )

    def _conv_transpose(self, node: ir.Node) -> None:
        x, w, b = self._operands(node)
        channels, m, *kernel = sizes(w)
        y = self.tape.tensor(node.outputs[0])
        n, _, *lengths = sizes(y)
        taken, outputs = self._whole(channels), self._whole(m)
        attributes = attribute_values(node)
        by_size = attributes.get("output_shape") or attributes.get("auto_pad", "")[:4] == "SAME"
        if taken is None or outputs is None or by_size or attributes.get("group", 1) > 1:
            return
        at = convolution.node_windows(node, y, kernel)
        if rules.all_phases(kernel, lengths, sizes(x)[2:], at) is None:
            return
        self.twins[node.outputs[0]] = emit_one(
            DOMAIN,
            "ConvTranspose",
            [
                self._blocked(x),
                _with_zeros(w, taken - channels, outputs - m),
                None if b is None else _with_zeros(b, outputs - m),
            ],
            (n, outputs, *lengths),
            block=self.size,
            lengths=lengths,
            pads=at.pads,
            strides=list(at.strides),
        )

    def _batch_normalization(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        if x is None:
            return
        channels = sizes(x)[1]
        plain = sizes(self.tape.tensor(node.outputs[0]))[1]
        others = [self.tape.tensor(_original(v)) for v in node.inputs[1:] if v is not None]
        if not node.attributes.get_int("training_mode", 0):
            scale, bias, mean, var = others
            factor = scale / op.Sqrt(var + node.attributes.get_float("epsilon", 1e-5))
            both = (factor, bias - mean * factor)
            inputs = [x, *(_with_zeros(each, channels - plain) for each in both)]
            self.twins[node.outputs[0]] = emit_one(DOMAIN, "Affine", inputs, sizes(x))
            return
        y, *statistics = emit(
            self.tape,
            DOMAIN,
            "BatchNormalization",
            [x, *(_with_zeros(each, channels - plain) for each in others)],
            [sizes(x), *[(channels,)] * 2, sizes(x), (1, channels)],
            block=self.size,
            momentum=node.attributes.get_float("momentum", 0.9),
            epsilon=node.attributes.get_float("epsilon", 1e-5),
        )
        self.twins[node.outputs[0]] = y
        for old, new in zip(node.outputs[1:], statistics, strict=False):
            if old.name:
                if channels != plain:
                    new = op.Slice(new, [0], [plain], [0])
                replace_value(self.tape, old, new)

    def _relu(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        if x is not None:
            exact = int(node.outputs[0] in self.unbounded)
            self.twins[node.outputs[0]] = emit_one(DOMAIN, "Relu", [x], sizes(x), exact=exact)

    def _clip(self, node: ir.Node) -> None:
        x, bounds = self._twin(node.inputs[0]), clip_bounds(node)
        if x is not None and bounds is not None:
            low, high = bounds
            exact = int(node.outputs[0] in self.unbounded)
            self.twins[node.outputs[0]] = emit_one(
                DOMAIN, "Clip", [x], sizes(x), low=low, high=high, exact=exact
            )

    def _elementwise(self, node: ir.Node) -> None:
        xs = [self._twin(value) for value in node.inputs]
        n, channels, *spatial = sizes(self.tape.tensor(node.outputs[0]))
        wanted = (n, -(-channels // self.size) * self.size, *spatial)
        if node.op_type == "Mul" and self._gate(node, wanted):
            return
        if any(x is None or sizes(x) != wanted for x in xs):
            return
        attributes = attribute_values(node)
        self.twins[node.outputs[0]] = getattr(op, node.op_type)(*xs, **attributes)

    def _gate(self, node: ir.Node, wanted: tuple[int, ...]) -> bool:
        """Multiplies each channel of each image by a number; returns whether the node does so."""
        n, channels, *_ = sizes(self.tape.tensor(node.outputs[0]))
        for value, factor in (node.inputs, node.inputs[::-1]):
            assert factor is not None
            x, by = self._twin(value), self._twin(factor)
            by = self.tape.tensor(factor) if by is None else by
            if by.shape == (n, channels, 1, 1):
                by = _with_zeros(by, 0, wanted[1] - channels)
            if x is not None and sizes(x) == wanted != by.shape == (*wanted[:2], 1, 1):
                self.twins[node.outputs[0]] = emit_one(DOMAIN, "Gate", [x, by], wanted)
                return True
        return False

    def _concat(self, node: ir.Node) -> None:
        xs = [self._twin(value) for value in node.inputs]
        padded = any(
            value is None or x is None or self._is_padded(x, value)
            for x, value in zip(xs, node.inputs, strict=True)
        )
        if not padded and node.attributes["axis"].as_int() in (1, -3):
            self.twins[node.outputs[0]] = op.Concat(*xs, axis=1)

    def _global_average_pool(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        if node.op_type == "ReduceMean":
            axes = constant_integers(node.inputs[1]) if node.inputs[1:] else None
            if axes is None or sorted(axis % 4 for axis in axes) != [2, 3]:
                return
        if x is not None and not self._is_padded(x, node.outputs[0]):
            n, channels, *_ = sizes(x)
            pooled = emit_one(
                DOMAIN, "GlobalAveragePool", [x], (n, channels, 1, 1), block=self.size
            )
            replace_value(self.tape, node.outputs[0], pooled)

    def _max_pool(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        pooled, kernel = node.inputs[0], node.attributes["kernel_shape"].as_ints()
        assert pooled is not None
        at = convolution.node_windows(node, self.tape.tensor(pooled), kernel)
        has_whole = at.are_adjacent and not node.attributes.get_int("ceil_mode", 0)
        if x is None or not has_whole or len(node.outputs) > 1:
            return
        n, _, *counts = sizes(self.tape.tensor(node.outputs[0]))
        shape = (n, sizes(x)[1], *counts)
        # MaxPool and Relu commute; after MaxPool, Relu has fewer elements to process.
        relu = x.value.producer()
        assert relu is not None
        before = relu.inputs[0]
        swap = relu.domain == DOMAIN and relu.op_type == "Relu" and has_one_reader(pooled)
        if swap and before is not None:
            x = self.tape.tensor(before)
        exact = int(node.outputs[0] in self.unbounded)
        attributes = {"block": self.size, "kernel_shape": list(kernel), "exact": exact}
        y = emit_one(DOMAIN, "MaxPool", [x], shape, **attributes)
        if swap:
            y = emit_one(DOMAIN, "Relu", [y], shape, exact=exact)
        self.twins[node.outputs[0]] = y


def _with_zeros(x: Tensor, *counts: int) -> Tensor:
    """Appends the given numbers of zeros along each of the first axes."""
    if not any(counts):
        return x
    after = [*counts, *[0] * (len(sizes(x)) - len(counts))]
    return op.Pad(x, [0] * len(after) + after)


def _original(value: ir.Value) -> ir.Value:
    """Returns what a Sum copies for BatchNormalization, whose kernel overwrites its statistics."""
    copy = producer_of(value, "Sum")
    source = None if copy is None or len(copy.inputs) > 1 else copy.inputs[0]
    return value if source is None else source


def _is_suitable(node: ir.Node) -> bool:
    """Whether a node has float32 tensors of rank 4 and known size, which no Gradient refers to."""
    inputs = node.inputs[:1] if node.op_type == "ReduceMean" else node.inputs
    if any(value is not None and value.dtype != ir.DataType.FLOAT for value in inputs):
        return False
    for value in (*node.inputs[: 1 + node.op_type.startswith("Conv")], node.outputs[0]):
        if value is None or value.shape is None or len(value.shape) != 4:
            return False
        if not all(isinstance(size, int) and size > 0 for size in value.shape):
            return False
    return not any(is_bound(user) for value in node.outputs for user, _ in value.uses())
