"""Finds the adapter in a file that was exported from a model of PEFT before it was merged."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.adapters import Adapter
from ortops.graph.constants import constant_number
from ortops.graph.edit import attribute_values, describe, remove_node, take_place
from ortops.graph.files import loading
from ortops.graph.files.external import move_aside
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.serialization import to_proto
from ortops.lora.addition import Layer, attach, read_base
from ortops.lora.evaluation import weight_of
from ortops.lora.merging import drop
from ortops.lora.model import Array
from ortops.lora.targets import Target, steps_to_weight, targets

_PASSED = ("Cast", "Dropout", "Identity")
_NAME = re.compile(r"^(?:.*\bbase_model\.model\.)?(.*?)(?:\.base_layer)?$")


class _Pair(NamedTuple):
    """An adapter's nodes: base + scale · up(down(x)), computed by an Add."""

    add: ir.Node
    base: Target
    down: Target
    up: Target
    scale: float
    plain: ir.Value

    @property
    def name(self) -> str:
        return _NAME.sub(r"\1", self.base.module)


@loading.blame_model
def recognize(model: ModelLike, layers: str | Sequence[str] | None = None) -> onnx.ModelProto:
    """Returns a model whose exported, unmerged adapter is one as `add` adds it.

    A layer has an adapter if two products with weights in a row, the first with fewer outputs than
    the layer has inputs and outputs, are added to what it computes from the same input, with
    nothing but a number between: a bias, another function, or a reader of what is between them
    make it something else. `merge`, `to_peft` and `save_adapter` then work as after `add`.

    Args:
        model: An inference model: a ModelProto, its bytes, or its path; not changed.
        layers: Names or patterns of the layers that have an adapter; by default, all that are
            found. Needed where two products are not narrower than the layer.

    Returns:
        A new model, whose outputs are the same. The names of layers are those before PEFT wrapped
        them. The alpha of each layer is that by which its product was multiplied, times the rank.

    Raises:
        ModelError: If there is no adapter, or it is in doubt whether there is one.

    Example:
        >>> from ortops.docs import examples
        >>> recognize(examples.mlp((4, 16, 2)))
        Traceback (most recent call last):
            ...
        ortops.errors.ModelError: model: no layer has the form of an adapter, W x + s B A x; ...
    """
    proto, folder = loading.load(model)
    work = convert.to_ir(proto, folder)
    wanted = [layers] if isinstance(layers, str) else ["*"] if layers is None else layers
    forms = [form for pattern in wanted for form in (pattern, f"*.{pattern}")]
    found = [p for p in _pairs(work) if any(fnmatch.fnmatchcase(p.name, f) for f in forms)]
    owners = Counter(weight for weight, _ in {(p.down.weight, p.base.key) for p in found})
    for pair in found if layers is None else ():
        is_wide = pair.base.kind == "linear" and pair.down.sizes[1] >= min(pair.base.sizes)
        if is_wide or owners[pair.down.weight] > 1:
            raise ModelError(
                f"{describe(pair.down.node)}: '{pair.down.weight.name}' may be no A of an adapter "
                f"of '{pair.name}', as it is too wide or shared; name the layers with one (layers=)"
            )
    if not found:
        raise ModelError(
            "model: no layer has the form of an adapter, W x + s B A x; add one with "
            "ortops.lora.add" + " or name other layers" * (layers is not None)
        )
    values = [(pair, _values(work, pair)) for pair in found]
    for pair in found:
        delta = [value for value in pair.add.inputs if value is not pair.plain]
        take_place(pair.add.outputs[0], pair.plain)
        remove_node(pair.add)
        for value in delta:
            drop(value)
    base = read_base(move_aside(work))
    known = {each.y.name: each for each in targets(base.work)}
    made: dict[object, Layer] = {}
    for pair, (a, b) in values:
        target, rank = known[pair.base.y.name], a.shape[1]
        key = (target.key, a.tobytes(), b.tobytes())  # calls of one layer
        layer = Layer(pair.name, rank, pair.scale * rank, a, b, [], pair.name)
        made.setdefault(key, layer).targets.append(target)
    described = Adapter(rank, layer.alpha, False, "", {})
    return to_proto(attach(base, list(made.values()), described))


def _pairs(work: ir.Model) -> list[_Pair]:
    """Returns all that has the form of an adapter."""
    by_y = {target.y: target for target in targets(work) if not target.refused}
    result = []
    for node in work.graph:
        given = [v for v in node.inputs if v is not None] if node.op_type == "Add" else []
        for plain, delta in (given, given[::-1]) if len(given) == 2 else ():
            base, (up, scale) = _base(plain, by_y), _scaled(delta, by_y)
            down = None if up is None or up.x is None else by_y.get(_passed(up.x))
            if base and up and down and _fits(base, down, up):
                result.append(_Pair(node, base, down, up, scale, plain))
    return result


def _fits(base: Target, down: Target, up: Target) -> bool:
    """Whether two products are an adapter of a layer."""
    if base.x is None or down.x is None or _passed(base.x) is not _passed(down.x):
        return False
    kind = "linear" if base.kind == "embedding" else base.kind
    return (
        (down.kind, up.kind, down.kernel) == (base.kind, kind, base.kernel)
        and (down.sizes[0], up.sizes) == (base.sizes[0], (down.sizes[1], base.sizes[1]))
        and all(len(t.node.inputs) == 2 and len(t.y.uses()) == 1 for t in (down, up))
        and set(up.kernel) <= {1}
        and (not base.kernel or attribute_values(base.node) == attribute_values(down.node))
    )


def _passed(value: ir.Value) -> ir.Value:
    """Returns what a value is rounded from, or is otherwise the same as."""
    node = value.producer()
    while node is not None and node.op_type in _PASSED and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def _base(value: ir.Value, by_y: Mapping[ir.Value, Target]) -> Target | None:
    """Returns the layer whose output, with or without a bias, a value is."""
    node = _passed(value).producer()
    if node is not None and node.op_type == "Add":
        given = [v for v in node.inputs if v is not None and not steps_to_weight(v)]
        value = given[0] if len(given) == 1 else value
    return by_y.get(_passed(value))


def _scaled(value: ir.Value, by_y: Mapping[ir.Value, Target]) -> tuple[Target | None, float]:
    """Returns the layer that computes a value, and the number that it is multiplied by."""
    value = _passed(value)
    node = value.producer()
    if node is None or node.op_type != "Mul":
        return by_y.get(value), 1.0
    numbers = [None if v is None else constant_number(_passed(v)) for v in node.inputs]
    for read, scale in zip(node.inputs, reversed(numbers), strict=True):
        if read is not None and scale and len(value.uses()) == 1:
            return by_y.get(_passed(read)), scale
    return None, 1.0


def _values(work: ir.Model, pair: _Pair) -> tuple[Array, Array]:
    """Returns A and B as a model has them, B with the scaling."""
    result = []
    for target in (pair.down, pair.up):
        array = weight_of(work, target.node)
        is_turned = target.node.attributes.get_int("transB", 0) == 1 or target.kernel
        result.append(array.swapaxes(0, 1) if is_turned else array)
    dtype = pair.base.adapter_dtype.numpy()
    a, b = result[0].astype(dtype), (result[1].astype(np.float64) * pair.scale).astype(dtype)
    return np.ascontiguousarray(a), np.ascontiguousarray(b)
