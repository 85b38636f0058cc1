"""Replaces the classification head of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.arguments import whole_number
from ortops.errors import ModelError, UnsupportedError, did_you_mean
from ortops.graph.edit import all_nodes, ancestor_nodes, describe, read_inputs
from ortops.graph.files import loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import MICROSOFT
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.graph.operators import ELEMENTWISE, MOVES, PRODUCTS, having
from ortops.graph.tensor import Tape
from ortops.surgery.reading import (
    Array,
    constant,
    dimensions,
    drop_unread,
    inferred,
    integers,
    logger,
    read,
    refuse_training,
)

_LAYERS = ("Conv", "FusedConv", "FusedGemm", "FusedMatMul", "Gemm", "MatMul")

_QUANTIZED = PRODUCTS & having("quantized")

_OTHER_LAYERS = (PRODUCTS | having("recurrent")) - _QUANTIZED - {*_LAYERS}

_SAME_SHAPE = {*ELEMENTWISE, "Dropout", "Hardmax", "LogSoftmax", "Softmax"}

_POOLS = having("pools")

_OF_NUMBERS = MOVES | having("keeps")
"""Operators that class indices, such as ArgMax's, may pass through without a lookup."""

_PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099, 10103)


@loading.blame_model
def replace_head(
    model: ModelLike, *, classes: int, output: str | None = None, seed: int = 0
) -> onnx.ModelProto:
    """Returns a model whose classifier has a new number of classes.

    The classifier is the last Gemm, MatMul, Conv, FusedGemm, FusedMatMul or FusedConv before an
    output whose weight is an initializer or a Constant node. Its weight is initialized uniformly in
    ±1/√fan_in, as in PyTorch's Linear, and its bias, if there is one, to zeros. The shapes of later
    values and outputs, and the constants of Reshape, Expand and Resize, are adapted. All other
    weights are unchanged.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        classes: The new number of classes.
        output: The output with the class scores; by default the first floating-point one.
        seed: The seed of the new weight.

    Returns:
        A new model of the same opset. External data stay external, relative to the folder of the
        given file.

    Raises:
        ArgumentError: If ``classes`` is not a positive integer.
        ModelError: If there is no such output or no classifier, or the model has training_info.
        UnsupportedError: If the weight has another reader or is quantized, or a later operator
            depends on the number of classes in a way that cannot be adapted.

    Example:
        >>> from ortops.docs import examples
        >>> model = replace_head(examples.mlp((4, 16, 2)), classes=5)
        >>> [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim]
        [0, 5]
    """
    classes = whole_number("replace_head: classes", classes, 1)
    work, proto, folder = read(model)
    refuse_training(proto, "replace the head before build_training_model")
    known = inferred(proto, folder)
    chosen = _classified(work.graph, known, output)
    change = _find_head(work, known, chosen, classes)
    for node in work.graph:
        if node is not change.head:
            change.follow(node)
    if chosen not in change.axes:
        raise UnsupportedError(
            f"{describe(change.head)}: it is the last layer before output '{chosen.name}', but "
            "this output does not have its classes; choose another output (output=)"
        )
    change.apply(np.random.default_rng(seed))
    result: onnx.ModelProto = ir.to_proto(work)
    return result


def _classified(graph: ir.Graph, known: Mapping[str, ir.Value], name: str | None) -> ir.Value:
    """Returns the output with the class scores."""
    names = [value.name or "" for value in graph.outputs]
    if name is not None:
        if name not in names:
            raise ModelError(f"the model has no output '{name}'; {did_you_mean(name, names)}")
        return graph.outputs[names.index(name)]
    for value in graph.outputs:
        kind = known.get(value.name or "", value).dtype
        if kind is None or kind.is_floating_point():
            return value
    raise ModelError(f"model: it has no floating-point output, only {names}; choose one (output=)")


def _computed(value: ir.Value) -> ir.Node | None:
    """Returns the node that computes a value, before it is only cast or copied."""
    node = value.producer()
    while node is not None and not node.domain and node.op_type in ("Cast", "Identity"):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node


def _chain(value: ir.Value | None) -> list[ir.Value]:
    """Returns a value and the values it is a view of, up to a constant; empty if there is none."""
    found = []
    while value is not None:
        found.append(value)
        node = value.producer()
        if constant(value) is not None:
            return found
        if node is None or node.domain or node.op_type not in ("Cast", "Identity", "Transpose"):
            return []
        value = node.inputs[0]
    return []


def _is_dequantized(value: ir.Value | None) -> bool:
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Cast", "Identity", "Reshape", "Transpose"):
        source = node.inputs[0]
        node = None if source is None else source.producer()
    return node is not None and node.op_type == "DequantizeLinear" and bool(_chain(node.inputs[0]))


def _inside(work: ir.Model, node: ir.Node) -> Iterator[ir.Node]:
    """Yields the nodes of the function that a node calls, and of its subgraphs."""
    function = work.functions.get(node.op_identifier())
    yield from function.all_nodes() if function is not None else ()
    for graph in inner_graphs(node):
        yield from all_nodes(graph)


def _find_head(
    work: ir.Model, known: Mapping[str, ir.Value], chosen: ir.Value, classes: int
) -> _Change:
    """Finds the last layer with a constant weight before an output."""
    ancestors = ancestor_nodes(chosen, set())
    for node in reversed(list(work.graph)):
        if node not in ancestors:
            continue
        if node.op_type in _QUANTIZED or (
            node.op_type in _LAYERS and any(_is_dequantized(value) for value in node.inputs[:2])
        ):
            raise UnsupportedError(
                f"{describe(node)}: its weight is quantized; replace the head of the float model "
                "and quantize after training"
            )
        if node.domain.startswith("ai.onnx.ml"):
            raise UnsupportedError(
                f"{describe(node)}: ortops.surgery cannot change the class tables of an operator "
                "of ai.onnx.ml; give a model that ends in Gemm, MatMul or Conv"
            )
        if node.op_type in _OTHER_LAYERS and any(_chain(value) for value in node.inputs[1:]):
            raise UnsupportedError(
                f"{describe(node)}: the head before output '{chosen.name}' must be one of "
                f"{', '.join(_LAYERS)}, got {node.op_type}; choose another output (output=)"
            )
        if any(each.op_type in _LAYERS for each in _inside(work, node)):
            raise UnsupportedError(
                f"{describe(node)}: the last layer before output '{chosen.name}' may be inside "
                "this node; inline functions with onnx.inliner.inline_local_functions, and "
                "subgraphs by hand"
            )
        if node.op_type in _LAYERS:
            sides = [index for index in (0, 1) if _chain(node.inputs[index])]
            if len(sides) == 1:
                return _Change(work, known, node, sides[0], classes)
    raise ModelError(
        f"output '{chosen.name}': there is no {', '.join(_LAYERS)} with a constant weight before "
        "it; choose the output of a classifier (output=)"
    )


class _Change:
    """The new head, and the values that depend on the number of classes.

    Args:
        work: The model, changed by `apply`.
        known: The values with inferred types and shapes.
        head: The classifier.
        side: The index of the weight among its inputs.
        classes: The new number of classes.

    Attributes:
        axes: The class axis of each value that has one.
    """

    def __init__(
        self,
        work: ir.Model,
        known: Mapping[str, ir.Value],
        head: ir.Node,
        side: int,
        classes: int,
    ) -> None:
        self.head = head
        self.axes: dict[ir.Value, int] = {}
        self._work, self._known, self._classes = work, known, classes
        self._numbers: set[ir.Value] = set()
        self._sizes: set[ir.Value] = set()
        self._constants: list[tuple[ir.Node, int, Array]] = []
        weight = head.inputs[side]
        assert weight is not None
        self._columns, axis = self._orientation(weight, side)
        self.old = int(self._shape(weight)[self._columns])
        self._weight = weight
        self._biases: list[tuple[ir.Value, int]] = []
        self.axes[head.outputs[0]] = axis
        bias = head.inputs[2] if len(head.inputs) > 2 else None
        if bias is not None and head.op_type in ("Conv", "FusedConv"):
            self._add_bias(head, bias, 0)
        elif bias is not None:
            place = axis - 2 + len(self._shape(bias))
            if place >= 0 and self._shape(bias)[place] == self.old:
                self._add_bias(head, bias, place)
            elif place >= 0 and self._shape(bias)[place] != 1:
                raise self._refusal(head, f"its bias is {self._told(bias)}")
        if len(head.inputs) > 3 and head.inputs[3] is not None:
            raise self._refusal(head, f"it adds '{head.inputs[3].name}' to the classes")

    def _orientation(self, weight: ir.Value, side: int) -> tuple[int, int]:
        """Returns the class axis of the weight, and that of the head's output."""
        head, given, rank = self.head, self.head.inputs[1 - side], len(self._shape(weight))
        if head.op_type in ("Conv", "FusedConv"):
            group = head.attributes.get_int("group", 1)
            if side == 0 or group != 1:
                raise UnsupportedError(
                    f"{describe(head)}: a head must have group=1 and a constant weight, got "
                    f"group={group}; choose another output (output=)"
                )
            return 0, 1
        if any(head.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB")):
            raise UnsupportedError(
                f"{describe(head)}: a head must not transpose batch axes (transBatchA, "
                "transBatchB); choose another output (output=)"
            )
        if rank < 2:
            raise UnsupportedError(
                f"{describe(head)}: its weight must have shape [inputs, classes], got "
                f"{self._told(weight)}; choose another output (output=)"
            )
        transposed = head.attributes.get_int("transB" if side else "transA", 0)
        columns = rank - 1 if side != transposed else rank - 2
        if head.op_type in ("Gemm", "FusedGemm"):
            return columns, 1 if side else 0
        assert given is not None
        taken = len(self._shape(given))
        if taken == 1:  # the axis of a vector is summed over
            return columns, rank - 2
        return columns, max(taken, rank) - (1 if side else 2)

    # ------------------------------------------------------------------------------------- reading

    def _value(self, value: ir.Value) -> ir.Value:
        return self._known.get(value.name or "", value)

    def _shape(self, value: ir.Value) -> list[int]:
        """Returns the sizes of a value, with large primes in place of unknown ones."""
        shape = self._value(value).shape
        if shape is None:
            raise UnsupportedError(
                f"{describe(self.head)}: the rank of '{value.name}' is unknown; infer the model's "
                "shapes with onnx.shape_inference or onnxruntime's symbolic_shape_infer"
            )
        primes = iter(_PRIMES)  # enough for the highest possible rank
        symbols: dict[str, int] = {}
        return [
            dim if isinstance(dim, int) else symbols.setdefault(dim.value or str(p), p)
            for dim, p in zip(shape, primes, strict=False)
        ]

    def _told(self, value: ir.Value) -> str:
        return dimensions(self._value(value))

    def _refusal(self, node: ir.Node, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{describe(node)}: {what}, which depends on the {self.old} classes of "
            f"{describe(self.head)} in a way that cannot be adapted; end the model before this "
            "node (ortops.surgery.name_output), or choose another output (output=)"
        )

    # ----------------------------------------------------------------------------------- following

    def _add_bias(self, node: ir.Node, value: ir.Value, axis: int) -> None:
        if not _chain(value):
            raise self._refusal(node, f"its bias '{value.name}' is computed")
        self._biases.append((value, axis))

    def follow(self, node: ir.Node) -> None:
        """Finds the class axis of a node's outputs.

        Raises:
            UnsupportedError: If the node may not work with another number of classes.
        """
        read = set(read_inputs(node))
        carried = [value for value in node.inputs if value in self.axes]
        if read & self._sizes and not carried:
            self._size(node)
        if not read & self._numbers and not read & set(self.axes):
            return
        if read & self._numbers:
            if node.op_type not in _OF_NUMBERS or carried:
                raise self._refusal(node, "it looks up a class index")
            self._numbers.update(node.outputs)
            return
        standard = node.domain in ("", MICROSOFT)
        if not carried or not standard or inner_graphs(node) or node.inputs[0] is None:
            raise self._refusal(node, "it reads the classes")
        kind, y = node.op_type, node.outputs[0]
        axis = self.axes[carried[0]]
        rank = len(self._shape(carried[0]))
        if kind in _SAME_SHAPE:
            axis = self._elementwise(node, carried)
            self.axes.update((value, axis) for value in node.outputs)
            return
        if kind == "Shape":
            self._sizes.update(node.outputs)
            return
        if carried != [node.inputs[0]] and kind != "Concat":
            raise self._refusal(node, "it reads the classes as a second operand")
        if kind.startswith("Reduce") or kind in ("ArgMax", "ArgMin", "TopK"):
            self._reduce(node, axis, rank)
        elif kind == "Transpose":
            perm = node.attributes.get_ints("perm", list(reversed(range(rank))))
            self.axes[y] = list(perm).index(axis)
        elif kind in ("Squeeze", "Unsqueeze"):
            self.axes[y] = self._moved(node, axis, rank)
        elif kind in ("Flatten", "Reshape"):
            self.axes[y] = self._reshaped(node, axis)
        elif kind == "Expand":
            self.axes[y] = self._expanded(node, axis, rank)
        elif kind in _POOLS and axis <= 1 and len(node.outputs) == 1:
            self.axes[y] = axis
        elif kind == "Resize" or kind == "Upsample":
            self._resize(node, axis)
        elif kind in ("Concat", "Gather", "Slice", "Split"):
            self._select(node, axis, rank, carried)
        else:
            raise self._refusal(node, "it mixes the classes")

    def _size(self, node: ir.Node) -> None:
        """Follows sizes of the classes; refuses a tensor of as many columns that is expanded."""
        x = node.inputs[0]
        if node.op_type != "Expand" or x is None or x in self._sizes:
            values = (y for y in node.outputs if self._value(y).dtype == ir.DataType.INT64)
            self._sizes.update(values)
        elif self.old > 1 and self.old in self._shape(x):
            raise self._refusal(node, f"it expands {self._told(x)}")

    def _elementwise(self, node: ir.Node, carried: Sequence[ir.Value]) -> int:
        ranks = {value: len(self._shape(value)) for value in node.inputs if value is not None}
        behind = {ranks[value] - self.axes[value] for value in carried}
        if len(behind) > 1:
            raise self._refusal(node, "it combines different class axes")
        distance = behind.pop()
        for value, rank in ranks.items():
            size = self._shape(value)[rank - distance] if rank >= distance else 1
            if value in self.axes or (size == 1 and self.old != 1):
                continue
            is_bias = (
                node.op_type == "Add"
                and not self._biases
                and bool(_chain(value))
                and size == self.old
                and math.prod(self._shape(value)) == size
                and _computed(carried[0]) is self.head
            )
            if rank >= distance and is_bias:
                self._add_bias(node, value, rank - distance)
            elif size != 1:
                other = f"'{value.name}' {self._told(value)}"
                raise self._refusal(node, f"it combines the classes with {other}")
        return max(ranks.values()) - distance

    def _reduce(self, node: ir.Node, axis: int, rank: int) -> None:
        values, numbers = node.outputs[0], node.outputs[-1]
        if node.op_type == "TopK":
            place = node.attributes.get_int("axis", -1) % rank
            if place != axis:
                self.axes.update({values: axis, numbers: axis})
                return
            count = integers(node, "k", 1)
            if count is None or count[0] > self._classes:
                wanted = "a computed number" if count is None else str(count[0])
                raise self._refusal(node, f"it selects the top {wanted} of {self._classes} classes")
            self._numbers.add(numbers)
            return
        axes = _reduced_axes(node, rank)
        if axes is None:
            raise self._refusal(node, "its axes are computed")
        places = {each % rank for each in axes}
        if axis not in places:
            kept = node.attributes.get_int("keepdims", 1)
            self.axes[values] = axis - (0 if kept else sum(each < axis for each in places))
        elif node.op_type in ("ArgMax", "ArgMin"):
            self._numbers.add(values)

    def _moved(self, node: ir.Node, axis: int, rank: int) -> int:
        axes = integers(node, "axes", 1)
        if node.op_type == "Unsqueeze":
            if axes is None:
                raise self._refusal(node, "its axes are computed")
            new = {each % (rank + len(axes)) for each in axes}
            return [place for place in range(rank + len(axes)) if place not in new][axis]
        if axes is None:
            shape = self._shape(_data(node))
            axes = [place for place, size in enumerate(shape) if size == 1]
        places = {each % rank for each in axes}
        if axis in places:
            raise self._refusal(node, "it removes the class axis")
        return axis - sum(each < axis for each in places)

    def _reshaped(self, node: ir.Node, axis: int) -> int:
        sizes = self._shape(_data(node))
        if node.op_type == "Flatten":
            cut = node.attributes.get_int("axis", 1)
            cut += len(sizes) if cut < 0 else 0
            entries = [math.prod(sizes[:cut]), math.prod(sizes[cut:])]
            shape: list[int] | None = None
        else:
            shape = integers(node, "shape", 1)
            if shape is None:
                kept = self._shape(node.outputs[0])
                if len(kept) == len(sizes) and kept[axis] == self.old:
                    return axis
                raise self._refusal(node, "its shape is computed")
            copies = not node.attributes.get_int("allowzero", 0)
            entries = [
                sizes[place] if size == 0 and copies else size for place, size in enumerate(shape)
            ]
            if -1 in entries:
                others = math.prod(size for size in entries if size != -1)
                entries[entries.index(-1)] = math.prod(sizes) // max(others, 1)
        before = math.prod(sizes[:axis])
        places = [
            place
            for place, size in enumerate(entries)
            if size == self.old and math.prod(entries[:place]) == before
        ]
        if len(places) != 1:
            what = "it" if shape is None else f"its shape {shape}"
            raise self._refusal(node, f"{what} merges the class axis with others, or removes it")
        place = places[0]
        if shape is not None and shape[place] == self.old:
            shape[place] = self._classes
            self._constants.append((node, 1, np.array(shape, np.int64)))
        return place

    def _expanded(self, node: ir.Node, axis: int, rank: int) -> int:
        shape = integers(node, "shape", 1)
        if shape is None:
            raise self._refusal(node, "its shape is computed")
        place = axis + max(len(shape) - rank, 0)
        own = place - max(rank - len(shape), 0)
        if own >= 0 and shape[own] != 1:
            if shape[own] != self.old:
                raise self._refusal(node, f"it repeats the classes {shape[own]} times")
            shape[own] = self._classes
            self._constants.append((node, 1, np.array(shape, np.int64)))
        return place

    def _resize(self, node: ir.Node, axis: int) -> None:
        if "axes" in node.attributes:
            raise self._refusal(node, "it has the attribute axes")
        index = 1 if node.op_type == "Upsample" or len(node.inputs) == 2 else 2
        scales = constant(node.inputs[index]) if len(node.inputs) > index else None
        sizes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
        if sizes is not None and sizes[axis] == self.old:
            sizes = sizes.copy()
            sizes[axis] = self._classes
            self._constants.append((node, 3, sizes))
        elif scales is None or not scales.size or scales[axis] != 1:
            raise self._refusal(node, "it may resize the class axis")
        self.axes[node.outputs[0]] = axis

    def _select(self, node: ir.Node, axis: int, rank: int, carried: Sequence[ir.Value]) -> None:
        kind = node.op_type
        axes = _selected_axes(node)
        if axes is None:
            raise self._refusal(node, "it may select some of the classes")
        if axis in {each % rank for each in axes}:
            raise self._refusal(node, "it selects some of the classes, or appends others")
        if kind == "Concat" and (
            len(carried) != len(node.inputs) or {self.axes[value] for value in carried} != {axis}
        ):
            raise self._refusal(node, "it concatenates the classes with outputs of other layers")
        if kind == "Gather" and axes[0] % rank < axis:
            assert node.inputs[1] is not None
            axis += len(self._shape(node.inputs[1])) - 1
        self.axes.update((value, axis) for value in node.outputs)

    # ------------------------------------------------------------------------------------ changing

    def apply(self, generator: np.random.Generator) -> None:
        """Writes the new weight, bias, constants and shapes."""
        root, columns = self._root(self._weight, self._columns)
        old = constant(root)
        assert old is not None
        if old.dtype.type not in (np.float16, np.float32, np.float64):
            raise UnsupportedError(
                f"{describe(self.head)}: its weight '{root.name}' must be float16, float32 or "
                f"float64, got {old.dtype}"
            )
        shape = self._with_classes(old.shape, columns)
        taken = self._shape(self._weight)
        if self.head.op_type in ("Conv", "FusedConv"):
            fan_in = math.prod(taken[1:])
        else:
            fan_in = math.prod(taken[-2:]) // self.old
        bound = 1 / math.sqrt(max(fan_in, 1))
        changes = [f"weight '{root.name}' {list(old.shape)} → {shape} uniform in ±{bound:.3g}"]
        biases = [self._root(value, axis) for value, axis in self._biases]
        _set(root, generator.uniform(-bound, bound, shape).astype(old.dtype))
        for value, axis in biases:
            array = constant(value)
            assert array is not None
            shape = self._with_classes(array.shape, axis)
            changes.append(f"bias '{value.name}' {list(array.shape)} → {shape} zeros")
            _set(value, np.zeros(shape, array.dtype))
        names = Names(self._work.graph)
        for node, index, array in self._constants:
            tape = Tape(self._work.graph, before=node, names=names)
            replaced = node.inputs[index]
            node.replace_input_with(index, tape.constant(array).value)
            assert replaced is not None
            drop_unread(replaced)
            changes.append(f"{describe(node)} {array.tolist()}")
        changes += self._resize_values()
        logger.warning(
            "%s: changed from %d to %d classes: %s",
            *(describe(self.head), self.old, self._classes, "; ".join(changes)),
        )

    def _resize_values(self) -> list[str]:
        """Writes the new number of classes to the shapes of values; describes the outputs."""
        changes = []
        for value, axis in self.axes.items():
            before = dimensions(value)
            if value.shape is not None and isinstance(value.shape[axis], int):
                value.shape = ir.Shape(self._with_classes(value.shape, axis))
            if value.is_graph_output():
                changes.append(f"output '{value.name}' {before} → {dimensions(value)}")
        return changes

    def _with_classes(self, shape: Iterable[Any], axis: int) -> list[Any]:
        """Returns a shape with the new number of classes."""
        return [self._classes if place == axis else size for place, size in enumerate(shape)]

    def _root(self, value: ir.Value, axis: int) -> tuple[ir.Value, int]:
        """Returns the constant that stores a weight, and the axis of it that an axis maps to."""
        chain = _chain(value)
        for each in chain:
            readers = list(dict.fromkeys(node for node, _ in each.uses()))
            if each.is_graph_output():
                raise UnsupportedError(
                    f"{describe(self.head)}: its weight '{each.name}' is also an output of the "
                    "model, but only the head may use it; remove the output"
                )
            if len(each.uses()) > 1:
                other = next((node for node in readers if node is not self.head), self.head)
                raise UnsupportedError(
                    f"{describe(self.head)}: its weight '{each.name}' is also read by "
                    f"{describe(other)}, such as a tied embedding, but only the head may use it; "
                    "export the model with untied weights"
                )
            node = None if each is chain[-1] else each.producer()
            if node is not None and node.op_type == "Transpose":
                rank = len(self._shape(each))
                axis = node.attributes.get_ints("perm", list(reversed(range(rank))))[axis]
        for each in chain:  # values between the constant and the head are inferred again
            if not each.is_initializer():
                each.shape = None
        return chain[-1], axis


def _reduced_axes(node: ir.Node, rank: int) -> list[int] | None:
    """Returns the axes that a node reduces; None if they are computed."""
    if node.op_type in ("ArgMax", "ArgMin"):
        return [node.attributes.get_int("axis", 0)]
    if "axes" not in node.attributes and len(node.inputs) < 2:
        return [] if node.attributes.get_int("noop_with_empty_axes", 0) else list(range(rank))
    return integers(node, "axes", 1)


def _selected_axes(node: ir.Node) -> list[int] | None:
    """Returns the axes along which a node selects or appends; None if they are computed."""
    if node.op_type != "Slice":
        return [node.attributes.get_int("axis", 0)]
    axes = integers(node, "axes", 3)
    if axes is None and len(node.inputs) <= 3:
        starts = integers(node, "starts", 1)
        axes = None if starts is None else list(range(len(starts)))
    return axes


def _data(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


def _set(value: ir.Value, array: Array) -> None:
    tensor = ir.Tensor(array, name=value.name)
    node = value.producer()
    if node is not None:
        node.attributes.clear()
        node.attributes.add(ir.AttrTensor("value", tensor))
    value.const_value = tensor
    value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(array.shape)
