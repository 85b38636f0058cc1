"""How operators pass channels on: the rules with which `Channels` follows a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.graph.edit import describe, has_one_reader, producer_of
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.nesting import inner_graphs
from ortops.graph.operators import ELEMENTWISE, having
from ortops.surgery.channels import Axes, Channels, Labels
from ortops.surgery.reading import constant, integers
from ortops.surgery.reshaping import Sizes, blocks, merged, pieces

_Rule: TypeAlias = Callable[[Channels, ir.Node], None]

_RULES: dict[tuple[str, str], _Rule] = {}


def follow(channels: Channels) -> None:
    """Labels all values of a graph; what the outputs of the model show is fixed."""
    for node in channels.graph:
        rule = None if inner_graphs(node) else _RULES.get((node.domain, node.op_type))
        reason = f"{describe(node)}: channels are not followed through this operator"
        channels.follow(node, rule, reason)
    for value in channels.graph.outputs:
        channels.fix([value], f"they are channels of output '{value.name}'")


def _rule(*operators: str, domain: str = "") -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        _RULES.update(((domain, operator), rule) for operator in operators)
        return rule

    return add


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _optional(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _axis(node: ir.Node, default: int, rank: int) -> int:
    axis = node.attributes.get_int("axis", default)
    return axis + rank if axis < 0 else axis


# ----------------------------------------------------------------------------------- elementwise


def _broadcast(channels: Channels, node: ir.Node, shapes: Sequence[tuple[Axes, Sizes]]) -> Axes:
    """Joins axes that broadcast against each other, and returns those of the result."""
    rank = max((len(axes) for axes, _ in shapes), default=0)
    result: Axes = []
    for place in range(-rank, 0):
        reason = f"{describe(node)}: one of its operands has no weights along axis {place + rank}"
        found: Labels | None = None
        free = True
        met = [(a[place], s[place]) for a, s in shapes if len(a) >= -place]
        for labels, size in met:
            if labels is None:
                free = free and size == 1
            elif found is None:
                found = labels
            else:
                channels.join(found, labels, reason)
        if found is not None and not free:
            channels.units.fix(found, reason)
        result.append(found if free else None)
    return result


def _shapes(channels: Channels, node: ir.Node) -> list[tuple[Axes, Sizes]] | None:
    found: list[tuple[Axes, Sizes]] = []
    for value in node.inputs:
        if value is not None:
            sizes = channels.sizes(value)
            axes = channels.of(value)
            if sizes is None or len(sizes) != len(axes):
                return None
            found.append((axes, sizes))
    return found


@_rule(*sorted(ELEMENTWISE))
@_rule(*sorted(having("elementwise", MICROSOFT)), domain=MICROSOFT)
def _elementwise(channels: Channels, node: ir.Node) -> None:
    shapes = _shapes(channels, node)
    if shapes is None:
        channels.refuse(node, f"{describe(node)}: the rank of an operand is unknown")
        return
    channels.put(node.outputs[0], _broadcast(channels, node, shapes))


@_rule("Dropout")
def _dropout(channels: Channels, node: ir.Node) -> None:
    for value in node.outputs:
        channels.put(value, channels.of(node.inputs[0]))


# --------------------------------------------------------------------------------------- products


def _bias(channels: Channels, node: ir.Node, labels: Labels | None) -> Labels | None:
    bias = _optional(node, 2)
    if bias is None:
        return labels
    return channels.join(
        labels, channels.of(bias)[0], f"{describe(node)}: its bias is not a weight"
    )


@_rule("Conv")
def _conv(channels: Channels, node: ir.Node) -> None:
    x, w = _given(node, 0), _given(node, 1)
    axes, weight, sizes = channels.of(x), channels.of(w), channels.sizes(w)
    group = node.attributes.get_int("group", 1)
    reason = f"{describe(node)}: its input or weight is not the output of a layer"
    channels.fix_axes([*axes[2:], *weight[2:], axes[0]], reason)
    labels = channels.produce(w, 0) if group == 1 else weight[0]
    if group == 1:
        channels.contract(x, 1, w, 1, reason)
    elif sizes is not None and sizes[1] == 1 and labels is not None and axes[1] is not None:
        channels.units.join(np.repeat(axes[1], len(labels) // group), labels)
        channels.groups.append((node, axes[1]))
    elif labels is not None and axes[1] is not None and weight[1] is not None:
        channels.contracted.update(weight[1].tolist())
        channels.produced.update(labels.tolist())
        channels.units.join(np.tile(weight[1], group), axes[1])
        _join_groups(channels, labels, group)
    else:
        channels.fix_axes([labels, weight[1], axes[1]], reason)
        labels = None
    labels = _bias(channels, node, labels)
    channels.put(node.outputs[0], [None, labels, *([None] * (len(axes) - 2))])


def _join_groups(channels: Channels, labels: Labels, group: int) -> None:
    """Joins the first channels of all groups, the second ones, and so on."""
    rows = labels.reshape(group, -1)
    for row in rows[1:]:
        channels.units.join(rows[0], row)


@_rule("ConvTranspose")
def _conv_transpose(channels: Channels, node: ir.Node) -> None:
    x, w = _given(node, 0), _given(node, 1)
    axes, weight, sizes = channels.of(x), channels.of(w), channels.sizes(w)
    group = node.attributes.get_int("group", 1)
    reason = f"{describe(node)}: its input or weight is not the output of a layer"
    channels.fix_axes([*axes[2:], *weight[2:], axes[0]], reason)
    if group == 1:
        channels.contract(x, 1, w, 0, reason)
        labels = channels.produce(w, 1)
    elif sizes is not None and sizes[0] == group:
        labels = channels.join(axes[1], weight[0], reason)
        channels.fix_axes([weight[1]], f"{describe(node)}: it has several outputs for each input")
        if labels is not None:
            channels.groups.append((node, labels))
            labels = np.repeat(labels, sizes[1]) if isinstance(sizes[1], int) else None
    elif weight[0] is not None and weight[1] is not None and axes[1] is not None:
        channels.contract(x, 1, w, 0, reason)
        _join_groups(channels, weight[0], group)
        channels.produced.update(weight[1].tolist())
        labels = np.tile(weight[1], group)
    else:
        channels.fix_axes([weight[0], weight[1], axes[1]], reason)
        labels = None
    labels = _bias(channels, node, labels)
    channels.put(node.outputs[0], [None, labels, *([None] * (len(axes) - 2))])


@_rule("Gemm")
def _gemm(channels: Channels, node: ir.Node) -> None:
    a, b = _given(node, 0), _given(node, 1)
    row = node.attributes.get_int("transA", 0)
    column = node.attributes.get_int("transB", 0)
    reason = f"{describe(node)}: an operand is not the output of a layer"
    channels.contract(a, 1 - row, b, column, reason)
    result: list[tuple[Axes, Sizes]] = []
    sizes = channels.sizes(a), channels.sizes(b)
    if sizes[0] is None or sizes[1] is None:
        channels.refuse(node, reason)
        return
    axes = [channels.produce(a, row), channels.produce(b, 1 - column)]
    result.append((axes, [sizes[0][row], sizes[1][1 - column]]))
    c = _optional(node, 2)
    if c is not None:
        result.append((channels.of(c), channels.sizes(c) or []))
    channels.put(node.outputs[0], _broadcast(channels, node, result))


@_rule("MatMul")
def _matmul(channels: Channels, node: ir.Node) -> None:
    a, b = _given(node, 0), _given(node, 1)
    rows, columns = channels.of(a), channels.of(b)
    sizes = channels.sizes(a), channels.sizes(b)
    if len(rows) < 2 or len(columns) < 2 or sizes[0] is None or sizes[1] is None:
        channels.refuse(node, f"{describe(node)}: an operand is a vector, or of unknown rank")
        return
    channels.contract(a, -1, b, -2, f"{describe(node)}: an operand is not the output of a layer")
    outer = [(rows[:-2], sizes[0][:-2]), (columns[:-2], sizes[1][:-2])]
    batch = _broadcast(channels, node, outer)
    axes = [*batch, channels.produce(a, len(rows) - 2), channels.produce(b, len(columns) - 1)]
    channels.put(node.outputs[0], axes)


# --------------------------------------------------------------------- normalization and reduction


@_rule("BatchNormalization", "InstanceNormalization")
def _of_channels(channels: Channels, node: ir.Node) -> None:
    axes = list(channels.of(node.inputs[0]))
    if node.op_type == "InstanceNormalization":
        reason = f"{describe(node)}: it normalizes along these axes"
        channels.fix_axes([axes[0], *axes[2:]], reason)
    reason = f"{describe(node)}: its input or scale is not the output of a layer"
    for vector in node.inputs[1:]:
        axes[1] = channels.join(axes[1], channels.of(vector)[0], reason)
    scale = _given(node, 1)
    if scale in channels.leaves:
        channels.scales.add(scale)
    channels.put(node.outputs[0], axes)
    for value in node.outputs[1:]:
        channels.put(value, [axes[1]])


def _fix_some(channels: Channels, node: ir.Node, places: Sequence[int]) -> None:
    """Keeps some axes of the input, and passes the others on."""
    axes = list(channels.of(node.inputs[0]))
    for place in places:
        channels.fix_axes([axes[place]], f"{describe(node)}: it mixes these channels")
        axes[place] = None
    channels.fix(node.inputs[1:], f"{describe(node)}: it mixes these channels")
    channels.put(node.outputs[0], axes)


@_rule("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def _layer_normalization(channels: Channels, node: ir.Node) -> None:
    rank = len(channels.of(node.inputs[0]))
    _fix_some(channels, node, range(_axis(node, -1, rank), rank))


@_rule("GroupNormalization", "LRN")
def _across_channels(channels: Channels, node: ir.Node) -> None:
    _fix_some(channels, node, range(1, len(channels.of(node.inputs[0]))))


@_rule("Hardmax", "LogSoftmax", "LpNormalization", "Softmax")
def _softmax(channels: Channels, node: ir.Node) -> None:
    rank = len(channels.of(node.inputs[0]))
    if channels.opset < 13 and node.op_type != "LpNormalization":
        _fix_some(channels, node, range(_axis(node, 1, rank), rank))
    else:
        _fix_some(channels, node, [_axis(node, -1, rank)])


@_rule(*sorted(having("pools")))
def _pool(channels: Channels, node: ir.Node) -> None:
    axes = channels.of(node.inputs[0])
    channels.fix_axes(axes[2:], f"{describe(node)}: it pools along these axes")
    for value in node.outputs[:1]:
        channels.put(value, [*axes[:2], *([None] * (len(axes) - 2))])
    if len(node.outputs) > 1:  # flat indices, which depend on the number of channels
        channels.fix_axes(axes, f"{describe(node)}: it returns indices")


@_rule("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean")
@_rule("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare")
def _reduce(channels: Channels, node: ir.Node) -> None:
    axes = list(channels.of(node.inputs[0]))
    given = integers(node, "axes", 1)
    source = producer_of(_optional(node, 1), "Cast", "Identity", "Reshape")
    if given is None and source is not None:  # as PyTorch's dynamo exporter writes constant axes
        given = integers(source, "", 0)
    if given is None and _optional(node, 1) is not None:
        channels.refuse(node, f"{describe(node)}: its axes are computed")
        return
    if not given and node.attributes.get_int("noop_with_empty_axes", 0) == 1:
        channels.put(node.outputs[0], axes)
        return
    places = [each % len(axes) for each in given or range(len(axes))]
    reason = f"{describe(node)}: it reduces these channels"
    channels.fix_axes([axes[place] for place in places], reason)
    keep = node.attributes.get_int("keepdims", 1)
    left = [None if p in places else each for p, each in enumerate(axes) if keep or p not in places]
    channels.put(node.outputs[0], left)


# -------------------------------------------------------------------------------------- movements


@_rule("Transpose")
def _transpose(channels: Channels, node: ir.Node) -> None:
    axes = channels.of(node.inputs[0])
    default = list(range(len(axes)))[::-1]
    found = node.attributes.get_ints("perm", default)
    channels.put(node.outputs[0], [axes[place] for place in found])


@_rule("Concat")
def _concat(channels: Channels, node: ir.Node) -> None:
    shapes = _shapes(channels, node)
    if not shapes:
        channels.refuse(node, f"{describe(node)}: the rank of an operand is unknown")
        return
    axis = _axis(node, 0, len(shapes[0][0]))
    result: Axes = []
    for place in range(len(shapes[0][0])):
        along = [axes[place] for axes, _ in shapes]
        reason = f"{describe(node)}: one of its operands has no weights along axis {place}"
        if place != axis:
            first = along[0]
            for labels in along[1:]:
                first = channels.join(first, labels, reason)
            result.append(first)
        elif all(labels is None for labels in along):
            result.append(None)
        else:
            result.append(_joined(channels, along, [sizes[place] for _, sizes in shapes], reason))
    channels.put(node.outputs[0], result)


def _joined(channels: Channels, along: Axes, sizes: Sizes, reason: str) -> Labels | None:
    """Returns the labels of parts one after the other; parts without labels are fixed."""
    parts = []
    for labels, size in zip(along, sizes, strict=True):
        if labels is None and not isinstance(size, int):
            channels.fix_axes(along, reason)
            return None
        if labels is None:
            assert isinstance(size, int)
            labels = channels.units.new(size)
            channels.units.fix(labels, reason)
        parts.append(labels)
    return np.concatenate(parts)


@_rule("Split")
def _split(channels: Channels, node: ir.Node) -> None:
    axes = channels.of(node.inputs[0])
    axis = _axis(node, 0, len(axes))
    labels, count = axes[axis], len(node.outputs)
    sizes = integers(node, "split", 1)
    if labels is not None and sizes is None:
        size = -(-len(labels) // count)
        sizes = [min(size, len(labels) - size * place) for place in range(count)]
        if _optional(node, 1) is not None or sizes[-1] < 1:
            channels.refuse(node, f"{describe(node)}: its sizes are computed")
            return
    parts: Axes = [None] * count
    if labels is not None and sizes is not None:
        cut = np.split(labels, np.cumsum(sizes)[:-1])
        channels.numbers.append((node, "split", 1, list(cut)))
        parts = list(cut)
    for value, part in zip(node.outputs, parts, strict=True):
        channels.put(value, [*axes[:axis], part, *axes[axis + 1 :]])


@_rule("Slice")
def _slice(channels: Channels, node: ir.Node) -> None:
    axes = list(channels.of(node.inputs[0]))
    starts, ends = integers(node, "starts", 1), integers(node, "ends", 2)
    places = integers(node, "axes", 3)
    steps = integers(node, "steps", 4)
    unread = [i for i, each in ((3, places), (4, steps)) if each is None and _optional(node, i)]
    if starts is None or ends is None or unread:
        channels.refuse(node, f"{describe(node)}: its bounds are computed")
        return
    places = [each % len(axes) for each in places or range(len(starts))]
    for number, place in enumerate(places):
        labels = axes[place]
        if labels is None:
            continue
        low, high, _ = slice(starts[number], ends[number]).indices(len(labels))
        if len(places) > 1 or (steps and steps[number] != 1) or high <= low:
            channels.fix_axes([labels], f"{describe(node)}: it takes some of the channels")
            axes[place] = None
            continue
        channels.numbers.append((node, "starts", 1, [labels[:low]]))
        channels.numbers.append((node, "ends", 2, [labels[:high]]))
        axes[place] = labels[low:high]
    channels.put(node.outputs[0], axes)


@_rule("Gather")
def _gather(channels: Channels, node: ir.Node) -> None:
    data, indices = _given(node, 0), channels.of(node.inputs[1])
    axes = list(channels.of(data))
    axis = _axis(node, 0, len(axes))
    channels.fix_axes([axes[axis], *indices], f"{describe(node)}: it reads channels by index")
    rest = axes[axis + 1 :]
    if axis == 0 and len(axes) == 2:
        rest = [channels.produce(data, 1)]
    channels.put(node.outputs[0], [*axes[:axis], *([None] * len(indices)), *rest])


@_rule("Pad")
def _pad(channels: Channels, node: ir.Node) -> None:
    axes = list(channels.of(node.inputs[0]))
    pads, places = integers(node, "pads", 1), integers(node, "axes", 3)
    if pads is None or (places is None and _optional(node, 3) is not None):
        channels.refuse(node, f"{describe(node)}: its pads are computed")
        return
    places = [each % len(axes) for each in places or range(len(axes))]
    for number, place in enumerate(places):
        if pads[number] or pads[number + len(places)]:
            channels.fix_axes([axes[place]], f"{describe(node)}: it pads these channels")
            axes[place] = None
    channels.put(node.outputs[0], axes)


@_rule("Resize", "Upsample")
def _resize(channels: Channels, node: ir.Node) -> None:
    axes = list(channels.of(node.inputs[0]))
    old, new = channels.sizes(_given(node, 0)), channels.sizes(node.outputs[0])
    sizes = _optional(node, 3)
    scales = constant(_optional(node, 1 if node.op_type == "Upsample" else 2))
    if "axes" in node.attributes:
        places = [each % len(axes) for each in node.attributes["axes"].as_ints()]
        same = [place not in places for place in range(len(axes))]
    elif scales is not None and scales.size == len(axes):
        same = [float(each) == 1 for each in scales]
    elif constant(sizes) is not None and old is not None and new is not None:
        same = [isinstance(a, int) and a == b for a, b in zip(old, new, strict=True)]
        channels.shapes.append((node, 3, node.outputs[0], None))
    else:
        same = [False] * len(axes)
    for place, labels in enumerate(axes):
        if not same[place]:
            channels.fix_axes([labels], f"{describe(node)}: it resizes these channels")
            axes[place] = None
    channels.put(node.outputs[0], axes)


@_rule("Shape")
def _shape(channels: Channels, node: ir.Node) -> None:
    """Sizes are numbers that a model may compute with, so the axes whose size is read stay."""
    axes = channels.of(node.inputs[0])
    start = node.attributes.get_int("start", 0)
    places = list(range(len(axes)))[slice(start, node.attributes.get_int("end", 2**62))]
    for place in _read(channels, node.outputs[0], places):
        channels.fix_axes([axes[place]], f"{describe(node)}: the model computes with their number")


def _read(channels: Channels, value: ir.Value, places: list[int]) -> set[int]:
    """Returns which of some axes a model reads from the vector of their sizes."""
    read: set[int] = set(places if value.is_graph_output() else ())
    pending = list(value.uses())
    while pending:
        user, index = pending.pop()
        chosen: list[int] | None = None
        if index == 0 and _passes_on(user):
            pending += user.outputs[0].uses()
            read.update(places if user.outputs[0].is_graph_output() else ())
            continue
        if user.op_type == "Expand" and index == 1 and _is_one(channels, user.inputs[0]):
            continue  # its output has as many channels
        if user.op_type == "Gather" and index == 0 and not user.domain:
            chosen = integers(user, "", 1)
        elif user.op_type == "Slice" and index == 0 and not user.domain:
            low, high = integers(user, "starts", 1), integers(user, "ends", 2)
            if low and high and integers(user, "steps", 4) in (None, [1]):
                chosen = list(range(len(places)))[slice(low[0], high[0])]
        read.update(places if chosen is None else [places[each] for each in chosen])
    return read


@_rule("CastLike")
def _cast_like(channels: Channels, node: ir.Node) -> None:
    channels.put(node.outputs[0], channels.of(node.inputs[0]))


@_rule("Expand")
def _expand(channels: Channels, node: ir.Node) -> None:
    """Follows one number that is repeated for each channel, such as an exporter's bias of zeros."""
    sizes = channels.sizes(_given(node, 0))
    source, places = _sized_like(node.inputs[1])
    axes = channels.of(source)[places]
    if source is None or not _is_one(channels, node.inputs[0]) or len(sizes or ()) > len(axes):
        channels.fix_axes(axes, f"{describe(node)}: it repeats channels")
        channels.refuse(node, f"{describe(node)}: it repeats channels")
        return
    channels.put(node.outputs[0], axes)
    if source in channels.computed and _given(node, 0) in channels.computed:
        channels.computed.add(node.outputs[0])


def _is_one(channels: Channels, value: ir.Value | None) -> bool:
    """Whether a value has one element."""
    sizes = None if value is None else channels.sizes(value)
    return sizes is not None and all(size == 1 for size in sizes)


def _sized_like(value: ir.Value | None) -> tuple[ir.Value | None, slice]:
    """Returns the value, and its axes, of which a vector has the sizes."""
    node = None if value is None else value.producer()
    while node is not None and _passes_on(node):
        value = node.inputs[0]
        node = None if value is None else value.producer()
    if node is None or node.domain or node.op_type != "Shape":
        return None, slice(0)
    start = node.attributes.get_int("start", 0)
    return node.inputs[0], slice(start, node.attributes.get_int("end", 2**62))


def _passes_on(node: ir.Node) -> bool:
    """Whether the output of a node equals its first input, a vector."""
    if node.domain:
        return False
    is_one = node.op_type == "Expand" and integers(node, "", 1) == [1]
    return is_one or node.op_type in ("Cast", "Identity")


@_rule("Size", "ConstantOfShape", "Range")
def _sizes_only(channels: Channels, node: ir.Node) -> None:
    channels.refuse(node, f"{describe(node)}: the model computes with their number")


@_rule("Unsqueeze")
def _unsqueeze(channels: Channels, node: ir.Node) -> None:
    axes, places = channels.of(node.inputs[0]), integers(node, "axes", 1)
    if places is None:
        channels.refuse(node, f"{describe(node)}: its axes are computed")
        return
    rank = len(axes) + len(places)
    left, new = iter(axes), {each % rank for each in places}
    channels.put(node.outputs[0], [None if p in new else next(left) for p in range(rank)])


@_rule("Squeeze")
def _squeeze(channels: Channels, node: ir.Node) -> None:
    axes, places = channels.of(node.inputs[0]), integers(node, "axes", 1)
    if places is None:  # which axes are removed depends on their sizes
        channels.refuse(node, f"{describe(node)}: it does not name its axes")
        return
    gone = {each % len(axes) for each in places}
    channels.put(node.outputs[0], [each for p, each in enumerate(axes) if p not in gone])


@_rule("Flatten")
def _flatten(channels: Channels, node: ir.Node) -> None:
    axes = channels.of(node.inputs[0])
    axis = _axis(node, 1, len(axes))
    sizes = channels.sizes(_given(node, 0)) or [None] * len(axes)
    reason = f"{describe(node)}: it flattens channels in a way that cannot be followed"
    parts = [(axes[:axis], sizes[:axis]), (axes[axis:], sizes[axis:])]
    channels.put(node.outputs[0], [merged(channels, a, s, [-1], reason)[0] for a, s in parts])


@_rule("Reshape")
def _reshape(channels: Channels, node: ir.Node) -> None:
    axes, given = channels.of(node.inputs[0]), _given(node, 0)
    old, new = channels.sizes(given), channels.sizes(node.outputs[0])
    reason = f"{describe(node)}: it moves channels in a way that cannot be followed"
    shape = pieces(node, 1, None if new is None else len(new))
    if new is None and shape is not None:
        new = [None] * len(shape)
    if old is None or new is None or shape is None or len(shape) != len(new):
        channels.refuse(node, reason)
        return
    target: list[int | str | None] = list(new)
    for place, (number, *_) in enumerate(shape):
        if number == 0 and not node.attributes.get_int("allowzero", 0) and place < len(old):
            target[place] = old[place] if target[place] is None else target[place]
        elif number is not None and number > 0:
            target[place] = number
    axes_out: Axes = [None] * len(target)
    for (a, b), (p, q) in blocks(old, target):
        if all(each is None for each in axes[a:b]):
            continue
        axes_out[p:q] = merged(channels, axes[a:b], old[a:b], target[p:q], reason)
    own = constant(node.inputs[1]) is not None or has_one_reader(_given(node, 1))
    for place, (number, *_) in enumerate(shape):
        if number is None or (number > 0 and not own):  # the size cannot be written
            channels.fix_axes([axes_out[place]], reason)
            axes_out[place] = None
    channels.shapes.append((node, 1, node.outputs[0], given))
    channels.put(node.outputs[0], axes_out)
