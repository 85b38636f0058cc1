"""Finds the adapter in a file that was exported from a model of PEFT before it was merged."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.adapters import Adapter, Module
from ortops.graph.constants import constant_number
from ortops.graph.edit import (
    ancestor_nodes,
    attribute_values,
    dependent_values,
    describe,
    remove_node,
    take_place,
)
from ortops.graph.files import loading
from ortops.graph.files.external import move_aside
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.serialization import to_proto
from ortops.graph.matching import Behind, Form, Found, Number, Search, Variable, kept
from ortops.lora.addition import Layer, attach, read_base
from ortops.lora.evaluation import evaluated, norms_of, product, squares_of, weight_of
from ortops.lora.merging import drop
from ortops.lora.model import Array
from ortops.lora.targets import Target, bias_of, targets

_PASSED = ("Cast", "Dropout", "Identity")
_NAME = re.compile(r"^(?:.*\bbase_model\.model\.)?(.*?)(?:\.base_layer)?$")


class _Forms:
    """What PEFT computes: W x + b + s B A x, or with g, a magnitude over a norm, as in DoRA.

    W x + b + (g - 1) W x + s g B A x, or of embeddings, g W x + s g B A x; W x may be given as
    (W x + b) - b, and in training mode as the product of other values that Dropout left.

    Args:
        is_layer: Whether a value is the output of a product with a weight.
        is_constant: Whether it does not depend on the inputs.
    """

    def __init__(
        self, is_layer: Callable[[ir.Value], bool], is_constant: Callable[[ir.Value], bool]
    ) -> None:
        def near(operand: Form) -> Form:
            return Behind(operand, _before)

        layers = "a layer", "B A x", "a layer of what Dropout left"
        self.layer, self.up, self.free = (Variable(what, is_layer) for what in layers)
        constants = "a bias", "a bias", "a scale", "a scale - 1"
        self.bias, self.taken, self.g, self.less = (Variable(w, is_constant) for w in constants)
        self.scale, layer, up = Number(), near(self.layer), near(self.up)
        whole = layer | layer + self.bias
        self.plain, self.table = kept(near(whole)), kept(layer)
        free = near(self.table | self.free | kept(near(whole)) - self.taken)
        factor, scaled = near(self.scale), near(self.g * up)
        delta = scaled | near(scaled * factor)
        self.any = (
            self.plain + (up | near(up * factor))
            | self.plain + near(near(self.less * free) + delta)
            | near(self.g * self.table) + delta
        )


class _Pair(NamedTuple):
    """An adapter's nodes, computed by an Add."""

    add: ir.Node
    base: Target
    free: Target
    down: Target
    up: Target
    scale: float
    forms: _Forms
    found: Found

    @property
    def name(self) -> str:
        return _name(self.base)

    @property
    def plain(self) -> ir.Value:
        """What the layer computes without the adapter."""
        return self.found[self.forms.plain if self.forms.plain in self.found else self.forms.table]


@loading.blame_model
def recognize(model: ModelLike, layers: str | Sequence[str] | None = None) -> onnx.ModelProto:
    """Returns a model whose exported, unmerged adapter is one as `add` adds it.

    A layer has an adapter if two products with weights in a row, the first with fewer outputs than
    the layer has inputs and outputs, are added to what it computes from the same input, with
    nothing but a number between: a bias, another function, or a reader of what is between them
    make it something else. The form that PEFT computes with magnitudes (DoRA) is found, too, and
    they follow from its scales. `merge`, `to_peft` and `save_adapter` then work as after `add`.

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
    every = _pairs(work, strict=layers is None)
    found = [p for p in every if any(fnmatch.fnmatchcase(p.name, f) for f in forms)]
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
    values = [(pair, *_values(work, pair)) for pair in found]
    for pair in found:
        delta = [value for value in pair.add.inputs if value is not pair.plain]
        take_place(pair.add.outputs[0], pair.plain)
        remove_node(pair.add)
        for value in delta:
            drop(value)
    base = read_base(move_aside(work))
    known = {each.y.name: each for each in targets(base.work)}
    made: dict[object, Layer] = {}
    for pair, a, b, magnitude in values:
        target, rank = known[pair.base.y.name], a.shape[1]
        key = (target.key, a.tobytes(), b.tobytes())  # calls of one layer
        dora = magnitude is not None
        layer = Layer(
            *(pair.name, rank, pair.scale * rank, a, b, [], pair.name, dora), magnitude=magnitude
        )
        made.setdefault(key, layer).targets.append(target)
    described = Adapter(rank, layer.alpha, False, "", {})
    return to_proto(attach(base, list(made.values()), described))


def _pairs(work: ir.Model, *, strict: bool) -> list[_Pair]:
    """Returns all that has the form of an adapter.

    Args:
        work: The model.
        strict: Whether to reject a product beside a layer that only begins as DoRA does.
    """
    by_y = {target.y: target for target in targets(work) if not target.refused}
    given = {value for value in work.graph.inputs if not value.is_initializer()}
    moving = given | dependent_values(work.graph, given)
    forms = _Forms(by_y.__contains__, lambda value: value not in moving)
    result = []
    for node in work.graph:
        ways = Search(forms.any, node.outputs[0]) if node.op_type == "Add" else ()
        for found in ways:
            base, up = by_y[found[forms.layer]], by_y[found[forms.up]]
            free = by_y[found[forms.free]] if forms.free in found else base
            down = None if up.x is None else by_y.get(_passed(up.x))
            if down and _fits(base, free, down, up):
                scale = found.number(forms.scale) if forms.scale in found else 1.0
                result.append(_Pair(node, base, free, down, up, scale, forms, found))
                break
    taken = {pair.up for pair in result}
    for up in by_y.values() if strict else ():
        down = None if up.x is None else by_y.get(_passed(up.x))
        scaled = [v for use in up.y.uses() if use.node.op_type == "Mul" for v in use.node.inputs]
        vectors = [v for v in scaled if v and v not in moving and constant_number(v) is None]
        beside = [t for t in by_y.values() if down and vectors and _fits(t, t, down, up)]
        if beside and up not in taken:
            raise ModelError(
                f"{describe(up.node)}: '{_name(beside[0])}' may have an adapter with magnitudes "
                "(DoRA), whose form is unknown; name the layers with an adapter (layers=)"
            )
    return result


def _fits(base: Target, free: Target, down: Target, up: Target) -> bool:
    """Whether two products are an adapter of a layer, and magnitudes scale a product of it."""
    inputs = {None if each.x is None else _passed(each.x) for each in (base, free, down)}
    if None in inputs or len(inputs) > 1 or free.weight is not base.weight:
        return False
    kind = "linear" if base.kind == "embedding" else base.kind
    return (
        (down.kind, up.kind, down.kernel) == (base.kind, kind, base.kernel)
        and (down.sizes[0], up.sizes) == (base.sizes[0], (down.sizes[1], base.sizes[1]))
        and all(len(t.node.inputs) == 2 and len(t.y.uses()) == 1 for t in (down, up))
        and set(up.kernel) <= {1}
        and (not base.kernel or attribute_values(base.node) == attribute_values(down.node))
    )


def _name(layer: Target) -> str:
    """Returns the name of a layer before PEFT wrapped it."""
    return _NAME.sub(r"\1", layer.module)


def _before(value: ir.Value) -> ir.Value | None:
    """Returns the input of the Cast, Dropout or Identity that computes a value, if one does."""
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type in _PASSED else None


def _passed(value: ir.Value) -> ir.Value:
    """Returns the value before all such nodes."""
    while (before := _before(value)) is not None:
        value = before
    return value


def _values(work: ir.Model, pair: _Pair) -> tuple[Array, Array, Array | None]:
    """Returns A and B as a model has them, B with the scaling, and the magnitudes of DoRA.

    Raises:
        ModelError: If it has the form of DoRA with other numbers.
    """
    result = []
    for target in (pair.down, pair.up):
        array = weight_of(work, target.node)
        is_turned = target.node.attributes.get_int("transB", 0) == 1 or target.kernel
        result.append(array.swapaxes(0, 1) if is_turned else array)
    dtype = pair.base.adapter_dtype.numpy()
    a, b = result[0].astype(dtype), (result[1].astype(np.float64) * pair.scale).astype(dtype)
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if pair.forms.g not in pair.found:
        return a, b, None
    return a, b, _magnitude(work, pair, a, b)


def _magnitude(work: ir.Model, pair: _Pair, a: Array, b: Array) -> Array:
    """Returns the magnitudes m = g ‖W + s B A‖ of a layer, [out]."""
    forms, found, base = pair.forms, pair.found, pair.base
    g = _constant(work, found[forms.g])
    less = _constant(work, found[forms.less]) if forms.less in found else g - 1
    own = bias_of(pair.free.node)
    left = np.zeros(base.sizes[1]) + (0 if own is None else _constant(work, own))  # of the bias
    if forms.taken in found:
        left += _constant(work, found[forms.bias]) if forms.bias in found else 0
        left -= _constant(work, found[forms.taken])
    if g.size != base.sizes[1] or not np.allclose(less, g - 1, atol=1e-5) or np.any(left):
        raise ModelError(
            f"{describe(pair.add)}: '{pair.name}' has the form of an adapter with magnitudes "
            "(DoRA), but with other numbers; name the layers with an adapter (layers=)"
        )
    module = Module(base.kind, "", "", a.shape[1], 1, [])
    update = product(module, a, b)
    return g * norms_of(module, g, squares_of(work, base.node, base.kind, update))


def _constant(work: ir.Model, value: ir.Value) -> Array:
    """Returns a value that does not depend on inputs, computed by onnxruntime, as a vector."""
    before = ancestor_nodes(value, set())
    steps = [node for node in work.graph if node in before and node.op_type != "Constant"]
    (node, index), *_ = value.uses()
    return evaluated(work, node, index, steps).ravel()
