"""Convolution networks in onnxruntime's blocked layout, in the private graph of a TrainingSession.

onnxruntime's fastest convolution kernels want channels in blocks, and it uses them only where the
weights are constants. In training they are not. So, before gradients are taken, `insert` replaces
convolutions, and what lies between them, by operators on blocked tensors, whose rules are in
`blocked_rules`; after that, `expand` replaces what is left of them by the kernels' own nodes.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx_ir.passes import common as passes

from ortops import gradient
from ortops.autodiff import attribute_value
from ortops.gradient import BOUND_DOMAIN, is_of_higher_order
from ortops.rules import convolution
from ortops.tensor import Tape, Tensor, op, remove_unread
from ortops.training import blocked_nodes as nodes
from ortops.training import blocked_rules as rules
from ortops.training.blocked_nodes import KERNEL_DOMAIN, affine, sizes
from ortops.training.blocked_rules import DOMAIN
from ortops.training.rectified import reach_unbounded

__all__ = ["block_convolutions", "block_size", "gains_from_sizes", "is_mostly_blocked"]

_ELEMENTWISE = frozenset(
    {"Add", "Elu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mul", "Sigmoid", "Softplus", "Sub"}
    | {"Tanh"}
)
"""Operators that mean the same whatever order the numbers of their inputs are in."""

_RANDOM = ("Bernoulli", "Dropout")
"""Operators that give other numbers each time, and that onnx-ir's pass takes for deterministic."""


@functools.cache
def block_size() -> int | None:
    """Returns how many channels onnxruntime's kernels have in a block here; None without them.

    onnxruntime itself tells: a convolution with constant weights gets filters of whole blocks.
    """
    with Tape(name="probe") as tape:
        x = tape.input("x", np.float32, [1, 4, 4, 4])
        w = tape.initializer("w", np.ones((4, 4, 1, 1), np.float32))
        tape.output(op.Conv(x, w), "y")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # it warns that the optimized model fits this machine only
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "probe.onnx"
            options.optimized_model_filepath = str(path)
            providers = ["CPUExecutionProvider"]
            onnxruntime.InferenceSession(tape.model().SerializeToString(), options, providers)
            graph = onnx.load(path).graph
    except OSError:  # there is nowhere to write to
        return None
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        if (node.domain, node.op_type) == (KERNEL_DOMAIN, "Conv"):
            return int(shapes[node.input[1]][0])
    return None


def gains_from_sizes(model: ir.Model) -> bool:
    """Whether `block_convolutions` may make a prepared model faster once sizes are known."""
    return any(
        node.op_type == "Conv"
        and not node.domain
        and node.outputs[0].dtype == ir.DataType.FLOAT
        and node.outputs[0].shape is not None
        and len(node.outputs[0].shape) == 4
        for node in model.graph
    ) and not (block_size() is None or is_of_higher_order(model.graph))


@contextlib.contextmanager
def block_convolutions(model: ir.Model) -> Iterator[None]:
    """While it lasts, a prepared model is lowered with convolutions in the blocked layout.

    The result is for onnxruntime's CPU provider on this machine only. Convolutions whose shapes are
    not known as numbers stay as they are, and so does everything where there are no such kernels or
    a gradient of higher order is asked for.
    """
    size = block_size() if gains_from_sizes(model) else None
    if size is None:
        yield
        return
    insert(model.graph, size)
    yield
    expand(model.graph)
    if not any(node.op_type in _RANDOM for node in model.graph):
        passes.CommonSubexpressionEliminationPass()(model)  # of forward and backward pass


def is_mostly_blocked(graph: ir.Graph) -> bool:
    """Whether most products in a graph are convolutions in the blocked layout.

    Such a graph has what onnxruntime should run, so that its optimizer would find little to do.
    """
    kinds = ("Conv", "ConvTranspose", "FusedMatMul", "Gemm", "MatMul")
    products = [node.domain for node in graph if node.op_type in kinds]
    return 2 * products.count(KERNEL_DOMAIN) > len(products)


# ------------------------------------------------------------------------------------- insertion


def insert(graph: ir.Graph, size: int) -> None:
    """Replaces convolutions, and what lies between them, by operators on blocked tensors.

    Args:
        graph: A prepared graph; changed in place.
        size: The number of channels in a block.
    """
    _Insertion(graph, size).run()


class _Insertion:
    """The state of `insert`: which plain values have a blocked twin."""

    def __init__(self, graph: ir.Graph, size: int) -> None:
        self.graph = graph
        self.size = size
        self.tape = Tape(graph)
        self.twins: dict[ir.Value, Tensor] = {}
        self.entered: dict[ir.Value, Tensor] = {}

        self.unbounded = reach_unbounded(graph)

    def run(self) -> None:
        for node in list(self.graph):
            if not node.domain and _is_suitable(node):
                self.tape.before = node
                self.tape.scope = f"{node.name or node.op_type}/"
                self._replace(node)
        put_out: set[ir.Value] = set()
        for value, twin in self.twins.items():
            if value.uses() or value.is_graph_output():
                producer = twin.value.producer()
                assert producer is not None
                self.tape.before = _next(producer)
                plain = rules.leave(twin, self.size)
                gradient.replace_value(self.tape, value, plain, put_out)
        remove_unread(list(self.graph))

    def _replace(self, node: ir.Node) -> None:
        """Computes blocked twins of a node's outputs, if it can."""
        match node.op_type:
            case "Conv":
                self._conv(node)
            case "BatchNormalization":
                self._batch_normalization(node)
            case "Relu":
                self._relu(node)
            case "MaxPool":
                self._max_pool(node)
            case "GlobalAveragePool":
                self._global_average_pool(node)
            case "Concat":
                self._concat(node)
            case _ if node.op_type in _ELEMENTWISE:
                self._elementwise(node)

    def _emit(
        self,
        op_type: str,
        inputs: Sequence[Tensor | None],
        shapes: Sequence[Sequence[int]],
        **attributes: object,
    ) -> tuple[Tensor, ...]:
        return nodes.emit(self.tape, DOMAIN, op_type, inputs, shapes, **attributes)

    def _twin(self, value: ir.Value | None) -> Tensor | None:
        if value is None:
            return None
        return self.twins.get(value, self.entered.get(value))

    def _blocked(self, x: Tensor) -> Tensor:
        """Returns the blocked twin of a value, which may get one here."""
        twin = self._twin(x.value)
        if twin is None:
            twin = self.entered[x.value] = rules.enter(x, self.size)
        return twin

    def _conv(self, node: ir.Node) -> None:
        inputs = [None if value is None else self.tape.tensor(value) for value in node.inputs]
        x, w, b = (*inputs, None)[:3]
        assert x is not None
        assert w is not None
        attributes = {name: attribute_value(each) for name, each in node.attributes.items()}
        group = attributes.get("group", 1)
        channels = sizes(x)[1]
        m, part, *kernel = sizes(w)
        if group == 1:
            if m % self.size or (channels % self.size and channels > self.size):
                return
        elif not (part == 1 and m == channels == group and m % self.size == 0):
            return
        at = convolution.windows(
            x,
            kernel,
            strides=attributes.get("strides"),
            dilations=attributes.get("dilations"),
            pads=attributes.get("pads"),
            auto_pad=attributes.get("auto_pad", "NOTSET"),
        )
        assert not isinstance(at.begin, Tensor)
        assert not isinstance(at.end, Tensor)
        pads = [*at.begin, *at.end]
        if not rules.can_transpose(kernel, at.dilations, pads):
            return
        blocked = x
        if channels % self.size == 0:
            blocked = self._blocked(x)
        (self.twins[node.outputs[0]],) = self._emit(
            "Conv",
            [blocked, w, b],
            [sizes(self.tape.tensor(node.outputs[0]))],
            block=self.size,
            dilations=list(at.dilations),
            group=group,
            pads=pads,
            strides=list(at.strides),
        )

    def _batch_normalization(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        if x is None:
            return
        channels = sizes(x)[1]
        others = [self.tape.tensor(value) for value in node.inputs[1:] if value is not None]
        if not node.attributes.get_int("training_mode", 0):
            scale, bias, mean, var = others
            factor = scale / op.Sqrt(var + node.attributes.get_float("epsilon", 1e-5))
            inputs = [x, factor, bias - mean * factor]
            (self.twins[node.outputs[0]],) = self._emit("Affine", inputs, [sizes(x)])
            return
        y, *statistics = self._emit(
            "BatchNormalization",
            [x, *others],
            [sizes(x), *[(channels,)] * 2, sizes(x), (channels,)],
            block=self.size,
            momentum=node.attributes.get_float("momentum", 0.9),
            epsilon=node.attributes.get_float("epsilon", 1e-5),
        )
        self.twins[node.outputs[0]] = y
        put_out: set[ir.Value] = set()
        for old, new in zip(node.outputs[1:], statistics, strict=False):
            if old.name:
                gradient.replace_value(self.tape, old, new, put_out)

    def _relu(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        if x is not None:
            exact = int(node.outputs[0] in self.unbounded)
            (self.twins[node.outputs[0]],) = self._emit("Relu", [x], [sizes(x)], exact=exact)

    def _elementwise(self, node: ir.Node) -> None:
        xs = [self._twin(value) for value in node.inputs]
        if any(x is None or sizes(x) != sizes(self.tape.tensor(node.outputs[0])) for x in xs):
            return
        attributes = {name: attribute_value(each) for name, each in node.attributes.items()}
        self.twins[node.outputs[0]] = getattr(op, node.op_type)(*xs, **attributes)

    def _concat(self, node: ir.Node) -> None:
        xs = [self._twin(value) for value in node.inputs]
        if None not in xs and node.attributes["axis"].as_int() in (1, -3):
            self.twins[node.outputs[0]] = op.Concat(*xs, axis=1)

    def _global_average_pool(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        if x is not None:
            n, channels, *_ = sizes(x)
            shape = (n, channels, 1, 1)
            (pooled,) = self._emit("GlobalAveragePool", [x], [shape], block=self.size)
            gradient.replace_value(self.tape, node.outputs[0], pooled, set())

    def _max_pool(self, node: ir.Node) -> None:
        x = self._twin(node.inputs[0])
        attributes = {name: attribute_value(each) for name, each in node.attributes.items()}
        kernel = attributes["kernel_shape"]
        tiles = (
            tuple(attributes.get("strides", ())) == tuple(kernel)
            and not any(attributes.get("pads", ()))
            and set(attributes.get("dilations", (1,))) == {1}
            and not attributes.get("ceil_mode", 0)
            and attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        )
        if x is None or not tiles or len(node.outputs) > 1:
            return
        shape = sizes(self.tape.tensor(node.outputs[0]))
        # The largest of what Relu gives is what Relu gives of the largest, which are fewer.
        relu = x.value.producer()
        assert relu is not None
        before = relu.inputs[0]
        swap = relu.domain == DOMAIN and relu.op_type == "Relu" and before is not None
        swap = swap and len(node.inputs[0].uses()) == 1 and not node.inputs[0].is_graph_output()  # type: ignore[union-attr]
        if swap and before is not None:
            x = self.tape.tensor(before)
        exact = int(node.outputs[0] in self.unbounded)
        (y,) = self._emit(
            "MaxPool", [x], [shape], block=self.size, kernel_shape=list(kernel), exact=exact
        )
        if swap:
            (y,) = self._emit("Relu", [y], [shape], exact=exact)
        self.twins[node.outputs[0]] = y


def _next(node: ir.Node) -> ir.Node | None:
    """Returns the node behind one in its graph."""
    graph = node.graph
    assert graph is not None
    following = iter(graph)
    for other in following:
        if other is node:
            return next(following, None)
    return None


def _is_suitable(node: ir.Node) -> bool:
    """Whether a node computes on float32 of rank 4 and known size, and no gradient names it."""
    if any(value is not None and value.dtype != ir.DataType.FLOAT for value in node.inputs):
        return False
    for value in (*node.inputs[: 2 if node.op_type == "Conv" else 1], node.outputs[0]):
        if value is None or value.shape is None or len(value.shape) != 4:
            return False
        if not all(isinstance(size, int) and size > 0 for size in value.shape):
            return False
    return not any(
        user.domain == BOUND_DOMAIN for value in node.outputs for user, _ in value.uses()
    )


# ------------------------------------------------------------------------------------- expansion


def expand(graph: ir.Graph) -> None:
    """Replaces operators on blocked tensors by nodes that onnxruntime knows, in place."""
    tape = Tape(graph)
    put_out: set[ir.Value] = set()
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        tape.before = node
        tape.scope = f"{node.name}/"
        attributes = {name: attribute_value(each) for name, each in node.attributes.items()}
        tensors = [None if value is None else tape.tensor(value) for value in node.inputs]
        results = _EXPANSIONS[node.op_type](*tensors, **attributes)
        for old, new in zip(node.outputs, results, strict=True):
            gradient.replace_value(tape, old, new, put_out)
    remove_unread(list(graph))
    _fuse(graph)
    graph.opset_imports.pop(DOMAIN, None)
    graph.opset_imports[KERNEL_DOMAIN] = 1


def _expand_block(x: Tensor, *, block: int) -> tuple[Tensor, ...]:
    return (nodes.to_blocks(x, block) if math.prod(sizes(x)[2:]) > 1 else x,)


def _expand_unblock(x: Tensor, *, block: int) -> tuple[Tensor, ...]:
    return (nodes.to_plain(x, sizes(x)[1]) if math.prod(sizes(x)[2:]) > 1 else x,)


def _expand_conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    block: int,
    dilations: Sequence[int],
    group: int,
    pads: Sequence[int],
    strides: Sequence[int],
) -> tuple[Tensor, ...]:
    n, _, *lengths = sizes(x)
    m, _, *kernel = sizes(w)
    counts = [
        (length + begin + end - (size - 1) * dilation - 1) // step + 1
        for length, begin, end, size, dilation, step in zip(
            lengths, pads[:2], pads[2:], kernel, dilations, strides, strict=True
        )
    ]
    result = nodes.convolve(
        x,
        nodes.filter_of(w, block),
        (n, m, *counts),
        kernel=kernel,
        bias=b,
        strides=strides,
        dilations=dilations,
        pads=pads,
        group=group,
    )
    return (result,)


def _expand_batch_normalization(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    *,
    block: int,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, ...]:
    _, _, height, width = sizes(x)
    mean = op.ReduceMean(nodes.channel_means(x), [0, 2, 3], keepdims=0)
    centred = affine(x, None, -mean)
    squares = op.ReduceMean(nodes.products(centred, centred), [0, 2, 3], keepdims=0)
    var = squares * (1 / (height * width))
    inverse_std = op.Reciprocal(op.Sqrt(var + epsilon))
    y = affine(centred, scale * inverse_std, bias)
    new_mean = running_mean * momentum + mean * (1 - momentum)
    new_var = running_var * momentum + var * (1 - momentum)
    return y, new_mean, new_var, centred, inverse_std


def _expand_affine(x: Tensor, factor: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    return (affine(x, factor, shift),)


def _expand_relu(x: Tensor, *, exact: int) -> tuple[Tensor, ...]:
    return (op.Relu(x),)


def _expand_max_pool(
    x: Tensor, *, block: int, kernel_shape: Sequence[int], exact: int
) -> tuple[Tensor, ...]:
    n, channels, *lengths = sizes(x)
    counts = [length // step for length, step in zip(lengths, kernel_shape, strict=True)]
    attributes = {"kernel_shape": list(kernel_shape), "strides": list(kernel_shape)}
    return nodes.emit(x.tape, KERNEL_DOMAIN, "MaxPool", [x], [(n, channels, *counts)], **attributes)


def _expand_global_average_pool(x: Tensor, *, block: int) -> tuple[Tensor, ...]:
    return (nodes.channel_means(x),)


_EXPANSIONS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "Affine": _expand_affine,
    "BatchNormalization": _expand_batch_normalization,
    "Block": _expand_block,
    "Conv": _expand_conv,
    "GlobalAveragePool": _expand_global_average_pool,
    "MaxPool": _expand_max_pool,
    "Relu": _expand_relu,
    "Unblock": _expand_unblock,
}


def _fuse(graph: ir.Graph) -> None:
    """Lets convolutions add and apply Relu as they write their result."""
    for node in list(graph):
        if node.domain or node.op_type not in ("Add", "Relu"):
            continue
        convs = [value for value in node.inputs if value is not None and _can_fuse(value)]
        if node.op_type == "Relu" and convs:
            conv = convs[0].producer()
            assert conv is not None
            conv.attributes["activation"] = ir.AttrString("activation", "Relu")
            _stand_in(node.outputs[0], conv.outputs[0])
            graph.remove(node, safe=True)
        elif convs:
            value = convs[-1]
            conv = value.producer()
            assert conv is not None
            a, b = node.inputs
            other = b if value is a else a
            assert other is not None
            if len(conv.inputs) > 3 or other.shape != value.shape or other is value:
                continue
            inputs = [*conv.inputs, None][:3]
            attributes = list(conv.attributes.values())
            fused = ir.Node(KERNEL_DOMAIN, "Conv", [*inputs, other], attributes, name=conv.name)
            graph.insert_before(node, fused)
            fused.outputs[0].type, fused.outputs[0].shape = value.type, value.shape
            _stand_in(node.outputs[0], fused.outputs[0])
            graph.remove([node, conv], safe=True)


def _can_fuse(value: ir.Value) -> bool:
    """Whether a value is what a convolution gives, without anything fused, to one reader."""
    conv = value.producer()
    return (
        conv is not None
        and (conv.domain, conv.op_type) == (KERNEL_DOMAIN, "Conv")
        and "activation" not in conv.attributes
        and len(value.uses()) == 1
        and not value.is_graph_output()
    )


def _stand_in(old: ir.Value, new: ir.Value) -> None:
    """Lets a value stand, name and all, where another one stood."""
    name, old.name = old.name, None
    new.name = name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
