"""Determines which initializers of a model are weights, and which of them are trained.

An initializer may be a weight, or a constant from an exporter. The nodes that read it decide.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from ortops.engine.building.fixed_values import is_fixed_kernel, is_geometric, mask_kind, table_kind
from ortops.engine.building.readers import (
    PASSING,
    Reader,
    ends_of,
    formal_name,
    readers,
)
from ortops.engine.building.scopes import ScopeNames, matched, nearest, scopes_of, split
from ortops.errors import ModelError, did_you_mean
from ortops.graph.constants import constant_tensor
from ortops.graph.edit import describe
from ortops.graph.files.external import ends
from ortops.graph.operators import ELEMENTWISE, OPERATORS, PRODUCTS, WEIGHTS, having

SETTINGS: Mapping[tuple[str, str], Collection[int]] = {
    key: row.settings for key, row in OPERATORS.items() if row.settings
}
"""Inputs that configure an operator, as opposed to learned weights, by operator."""

_NORMALIZATIONS = having("normalizes")

_ONE_NUMBER = ELEMENTWISE - {"PRelu"}
"""Operators of which an input of one number is not taken for a weight."""

_LEAST_IDENTITY = 9  # elements; smaller ones in products are often examples of weights

_KERNELS = frozenset((name, 1) for name in ("Conv", "ConvTranspose", "FusedConv"))

_SINGULAR = {
    (name, row.singular) for (_, name), row in OPERATORS.items() if row.singular is not None
}
"""Operators, with an input, whose derivative is infinite or undefined at 0."""

_QUANTIZED: Mapping[str, int] = {
    "DequantizeLinear": 0,
    **{name: index for name, index in WEIGHTS.items() if name in having("quantized")},
}
"""Inputs that hold quantized weights, by operator."""


@dataclass
class Choice:
    """The choice of initializers to train.

    Attributes:
        floats: The floating-point initializers by name.
        trained: The initializers to train by name.
        reasons: Why the others are not trained, by name.
        patterns: The names that each given name or pattern matches.
        said: Messages about automatic choices.
        unexpected: Those of the others that may be weights, so that they are said.
        constants: Those that the model has as Constant nodes.
    """

    floats: dict[str, ir.Value]
    trained: dict[str, ir.Value]
    reasons: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    unexpected: set[str] = field(default_factory=set)
    constants: Container[str] = ()

    def leave_out(self, name: str, reason: str) -> None:
        """Does not train an initializer that was chosen."""
        del self.trained[name]
        self.reasons[name] = reason

    def left_out(self, read: Container[ir.Value]) -> str:
        """Returns a message about what is not trained although a user might expect it, or "".

        Args:
            read: What the loss is computed from.
        """
        found = [n for n in self.reasons if n in self.unexpected and self.floats.get(n) in read]
        if not found:
            return ""
        shared = any(", shared by " in self.reasons[name] for name in found)
        own = ", or ortops.surgery.untie gives each its own" if shared else ""
        which = ("they are", "them") if len(found) > 1 else ("it is", "it")
        listed = listed_with_reasons({name: self.reasons[name] for name in found})
        return f"{listed}; {which[0]} not trained unless trainable= names {which[1]}{own}"


def choose(
    weights: Mapping[str, ir.Value],
    trainable: Sequence[str] | None,
    scopes: Mapping[str, ScopeNames],
    unnamed: str = "is not named in trainable",
    constants: Container[str] = (),
) -> Choice:
    """Chooses the initializers to train, before it is known which of them the loss depends on.

    Args:
        weights: The initializers by name.
        trainable: Names, or patterns of names or of the scopes of the nodes that read them; those
            that begin with ``!`` exclude. The default is all weights (see `why_not`). An
            initializer given by its exact name is always trained, unless it is excluded.
        scopes: The scopes of the nodes that read each initializer (see `read_scopes`).
        unnamed: The reason why initializers that are not named are not trained.
        constants: Those that the model has as Constant nodes.

    Raises:
        ModelError: If a name or pattern matches nothing, or something that cannot be trained.
    """
    floats = {name: value for name, value in weights.items() if _is_float(value)}
    # If all names are exact, as those of an adapter are, the values of gigabytes need not be read.
    included, excluded = split(trainable or (), floats)
    reads = trainable is None or not all(pattern in floats for pattern in included)
    reasons, unexpected = dict[str, str](), set[str]()
    for name, value in floats.items():
        if reason := why_not(value, reads=reads):
            reasons[name] = reason
            if _may_be_weight(reason, value, name in constants):
                unexpected.add(name)
    for name in [n for n, why in reasons.items() if why == UNREAD and n not in constants]:
        del reasons[name]  # the loss may read it
    default = {name: value for name, value in floats.items() if name not in reasons}
    if trainable is None:
        said = _untied(default) + _merged(default)
        return Choice(floats, default, reasons, {}, said, unexpected, constants)
    choice = Choice(floats, {}, constants=constants)
    out = _excluded(excluded, weights, scopes)
    for pattern in included:
        found = [pattern] if pattern in floats else matched(pattern, default, scopes)
        if not found:
            raise ModelError(f"trainable: {_why_no_match(pattern, weights, reasons, scopes)}")
        names = [name for name in found if name not in out]
        if not names:
            raise ModelError(
                f"trainable: nothing of '{pattern}' is left to train, because "
                f"{listed_with_reasons({name: out[name] for name in found})}; leave one of them out"
            )
        choice.patterns[pattern] = names
        choice.trained.update((name, floats[name]) for name in names)
        choice.unexpected.update(matched(pattern, unexpected - out.keys(), scopes))
        if pattern not in found:
            choice.said += _elsewhere(f"'{pattern}' includes", pattern, names, scopes)
    for pattern in excluded:
        lost = [name for name in matched(pattern, default, scopes) if name in out]
        if pattern not in weights:
            choice.said += _elsewhere(f"'!{pattern}' excludes", pattern, lost, scopes)
    for pattern, names in choice.patterns.items():
        if pattern not in names:
            whole = {**choice.trained, **out}
            choice.said += _partial_matches(pattern, names, default, whole, scopes)
    choice.said += _untied(choice.trained) + _merged(choice.trained)
    why = {**reasons, **out}
    choice.reasons = {n: why.get(n, unnamed) for n in floats if n not in choice.trained}
    return choice


def _excluded(
    patterns: Iterable[str], weights: Mapping[str, ir.Value], scopes: Mapping[str, ScopeNames]
) -> dict[str, str]:
    """Returns the initializers that some patterns match, with the reason not to train them."""
    out: dict[str, str] = {}
    for pattern in patterns:
        found = matched(pattern, weights, scopes)
        if not found:
            hint = nearest(pattern, list(weights), scopes) or did_you_mean(pattern, weights)
            raise ModelError(f"trainable: '!{pattern}' excludes no initializer; {hint}")
        for name in found:
            out.setdefault(name, f"is excluded by '!{pattern}'")
    return out


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _why_no_match(
    pattern: str,
    weights: Mapping[str, ir.Value],
    reasons: Mapping[str, str],
    scopes: Mapping[str, ScopeNames],
) -> str:
    """Returns why a name or pattern matches no weight, and the remedy."""
    if pattern in weights:
        dtype, remedy = weights[pattern].dtype, ""
        if quantized([weights[pattern]]):
            remedy = "; it is quantized, so train the float model and quantize it again"
        return (
            f"initializer '{pattern}' is of type {dtype}; only floating-point ones can be trained"
            + remedy
        )
    if refused := matched(pattern, reasons, scopes):
        listed = listed_with_reasons({name: reasons[name] for name in refused}, "which ")
        return (
            f"'{pattern}' matches no weight, only {listed}; to train "
            f"{'it' if len(refused) == 1 else 'one'} anyway, give its exact name"
        )
    floats = [name for name, value in weights.items() if _is_float(value)]
    hint = nearest(pattern, floats, scopes) or did_you_mean(pattern, floats)
    return f"the model has no trainable initializer '{pattern}'; {hint}"


def _elsewhere(
    what: str, pattern: str, names: Iterable[str], scopes: Mapping[str, ScopeNames]
) -> list[str]:
    """Returns messages about weights that nodes outside the scopes of a pattern read, too."""
    return [
        (
            f"trainable: {what} '{name}', which is also read by nodes elsewhere "
            f"({len(others)}, such as '{others[0]}')"
        )
        for name in names
        if (others := _others(pattern, name, scopes))
    ]


def _others(pattern: str, name: str, scopes: Mapping[str, ScopeNames]) -> list[str]:
    """Returns the scopes outside a pattern that read a weight whose name it does not match."""
    by_name = fnmatch.fnmatchcase(name, pattern)
    return [] if by_name else scopes.get(name, ScopeNames()).elsewhere(pattern)


def _partial_matches(
    pattern: str,
    names: Sequence[str],
    default: Mapping[str, ir.Value],
    trained: Collection[str],
    scopes: Mapping[str, ScopeNames],
) -> list[str]:
    """Returns a message about layers that a pattern matches in part, if there are any."""
    own = [name for name in names if not _others(pattern, name, scopes)]
    left = _left_out(own, default, trained)
    if not left:
        return []
    shown = ", ".join(f"'{name}'" for name in left[:5])
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    message = f"trainable: '{pattern}' includes {len(names)} weights, but not other weights of the "
    return [f"{message}same layers: {shown}{more}"]


def quantized(values: Iterable[ir.Value]) -> dict[str, str]:
    """Returns the names of quantized weights, with their types and readers as text."""
    found: dict[str, str] = {}
    for value in values:
        if value.dtype is None or value.dtype.is_floating_point():
            continue
        for use in value.uses():
            if use.idx == _QUANTIZED.get(use.node.op_type):
                found[value.name or ""] = f"is {value.dtype}, read by {describe(use.node)}"
    return found


def read_scopes(values: Iterable[ir.Value]) -> dict[str, ScopeNames]:
    """Returns the scopes of the nodes that read each value, from node names and metadata.

    Exporters name nodes after the module that they come from: ``/encoder/layer.5/query/MatMul``,
    or, in the metadata of torch's newer exporter, ``['', 'encoder.layer.5.query', …]``.

    Args:
        values: Initializers of an unchanged graph.
    """
    return {
        value.name or "": ScopeNames(
            tuple(scopes_of(reader.node) for reader in readers(value)),
            frozenset[str]().union(*(scopes_of(use.node) for use in value.uses())),
        )
        for value in values
    }


def why_not(value: ir.Value, *, reads: bool = True) -> str:
    """Returns why an initializer is not a weight, judging by its readers; empty if it is one.

    Some initializers in the places of weights are not: numbers and constant vectors that several
    nodes share, which exporters make of constants in the source, the ones and zeros that they write
    for normalizations without parameters, tables, masks and kernels (see
    `ortops.engine.building.fixed_values`).

    Args:
        value: The initializer.
        reads: Whether to look at its values, which tells tables from weights.
    """
    passed = list(ends_of(value))
    found = [end for end in passed if isinstance(end, Reader)]
    reasons = [_why_not_for(reader, value) for reader in found]
    for reader, reason in zip(found, reasons, strict=True):
        if reason.startswith(_STATISTIC) and reader.node.inputs[reader.index] is value:
            return reason  # even if dynamo, which stores equal ones once, made it a scale, too
    if not passed:
        return UNREAD
    if not found and _size(value) == 1:
        return "is one number, in an output"
    if found and "" not in reasons:
        return reasons[0]
    own = [reader for reader, reason in zip(found, reasons, strict=True) if not reason]
    shared = (_why_shared(own, found, value) or _why_written(own, value)) if own else ""
    return shared or (_why_fixed(own, value) if reads else "")


def _may_be_weight(reason: str, value: ir.Value, is_constant: bool) -> bool:
    """Whether a user might expect an initializer to be trained, in spite of the reason."""
    if reason.startswith(_IN_PLACE_OF_WEIGHTS):
        return True
    if is_constant or _GENERATED.search(value.name or ""):
        tensor = value.const_value
        is_state = reason.startswith("is the initial_")  # exporters write zeros
        return is_state and tensor is not None and bool(tensor.numpy().any())
    return reason.startswith(_SETTINGS_LIKE_WEIGHTS)


def listed_with_reasons(reasons: Mapping[str, str], joined: str = "") -> str:
    """Returns the first of some initializers and why they are not trained, as text."""
    found = [f"'{name}'{',' if joined else ''} {joined}{why}" for name, why in reasons.items()]
    shown = found if len(found) <= 8 else found[:3]
    more = f"; and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    return "; ".join(shown) + more


def _merged(trained: Mapping[str, ir.Value]) -> list[str]:
    """Returns a message about equal parameters of several layers that an exporter stored once."""
    found: list[tuple[str, list[Reader]]] = []
    for name, value in trained.items():
        if name.endswith((".lora_A.weight", ".lora_B.weight")):  # adapters begin with zeros
            continue
        tensor, by = value.const_value, list(readers(value))
        if tensor is not None and tensor.size > 1 and len(by) > 1:
            first, last = ends(tensor, tensor.dtype.numpy().itemsize)
            array = tensor.numpy() if first == last else None
            if array is not None and np.all(array == array.flat[0]):
                found.append((name, by))
    if not found:
        return []
    name, by = found[0]
    more = f" ({len(found)} weights are like it)" if len(found) > 1 else ""
    return [
        (
            f"'{name}' holds one number and is read by {len(by)} nodes, such as "
            f"{describe(by[0].node)}, as if equal parameters were stored once at export; they are "
            f"trained as one{more}, unless ortops.surgery.untie gives each node its own"
        )
    ]


UNREAD = "is read by no node"
_STATISTIC = "is a running statistic"

_IN_PLACE_OF_WEIGHTS = ("is all ", "holds ", "normalizes ")
"""How the reasons begin that a user might not expect of an initializer of any name."""

_GENERATED = re.compile(
    r"^\d+$|^_?val_\d+$|^onnx::|Constant|Const([_:/\d]|$)|const_|^ortshared|_tensor_constant"
    r"|running_(mean|var)$|^(zeros|ones|full|scalar_tensor_default|lift_fresh_copy)(_\d+)?$"
)
"""Names that exporters give to constants that are not parameters of a module."""

_SETTINGS_LIKE_WEIGHTS = ("is one number", "is the initial_", "is the Y of Pow ")
"""How the reasons begin that a user might not expect of an initializer with a name of its own."""


def _why_shared(own: Sequence[Reader], found: Sequence[Reader], value: ir.Value) -> str:
    """Returns why a value is a constant of the source that several nodes share, or empty.

    Args:
        own: The readers that may have it as a weight.
        found: All readers.
        value: The value.
    """
    size, first = _size(value), describe(own[0].node)
    if len(found) > 1 and size == 1 and all(r.node.op_type in _ONE_NUMBER for r in own):
        return f"is one number that {len(found)} nodes read, such as {first}"
    return ""


def _why_written(own: Sequence[Reader], value: ir.Value) -> str:
    """Returns whether an exporter wrote ones or zeros for normalizations without parameters.

    Names tell: parameters are called after their module, ``encoder.norm.weight`` and
    ``encoder.norm.bias``. Several normalizations share what has no such name.
    """
    tensor, name = value.const_value, value.name or ""
    if tensor is None or not all(r.node.op_type in _NORMALIZATIONS and r.index < 3 for r in own):
        return ""
    values, is_generated = tensor.numpy(), _GENERATED.search(name) is not None
    if not values.size or values.flat[0] not in (0, 1) or (values != values.flat[0]).any():
        return ""
    number, first = "ones" if values.flat[0] else "zeros", describe(own[0].node)
    if len(own) > 1 and (is_generated or "." not in name):
        return f"is all {number}, shared by {len(own)} normalizations, such as {first}"
    beside = [read.name or "" for read in own[0].node.inputs[1:3] if read is not None]
    is_odd = number == "zeros" and "." not in name and any("." in other for other in beside)
    if len(own) == 1 and (is_generated or is_odd):
        return f"is all {number}, as if an exporter had written it, in {first}"
    return ""


def _why_fixed(own: Sequence[Reader], value: ir.Value) -> str:
    """Returns what a constant initializer holds, recognized by its values, or ""."""
    tensor = value.const_value
    if tensor is None or any(reader.node.op_type in _NORMALIZATIONS for reader in own):
        return ""
    values, where = tensor.numpy(), f", in {describe(own[0].node)}" if own else ""
    if own and all(_is_kernel(values, reader) for reader in own):
        return f"holds the kernel of a filter{where}"
    kind = table_kind(values)
    if not any((r.node.op_type, r.index) == ("Gather", 0) for r in own):
        mask = mask_kind(values)
        in_layer = any(reader.node.op_type in PRODUCTS for reader in own)
        is_small = mask == "a mask of 0 and 1" or values.size < _LEAST_IDENTITY
        kind = kind if in_layer and is_small else mask or kind
    is_vector = sum(size != 1 for size in values.shape) < 2
    if is_vector and any(_adds_bias(reader.node, reader.index) for reader in own):
        kind = ""
    return f"holds {kind}{where}" if kind else ""


def _is_kernel(values: npt.NDArray[Any], reader: Reader) -> bool:
    """Whether values that a convolution reads are the kernel of a filter."""
    node = reader.node
    if (node.op_type, reader.index) not in _KERNELS:
        return False
    shapes = [None if read is None else read.shape for read in node.inputs[:2]]
    known = [len(shape) for shape in shapes if shape is not None]
    own = shapes[1]
    if own is not None and own.is_static() and math.prod(own.numpy()) == values.size:
        values = values.reshape(own.numpy())
    return is_fixed_kernel(values, (known or [values.ndim])[0] - 2)


def _adds_bias(node: ir.Node, index: int) -> bool:
    """Whether a node adds an input to a product."""
    if node.op_type == "Add" and not node.domain:
        return _is_bias(node, index)
    if node.op_type in having("recurrent"):
        return index == 3
    return node.op_type == "PRelu" or (node.op_type in PRODUCTS and index == 2)


def _why_not_for(reader: Reader, value: ir.Value) -> str:
    """Returns why a value is not a weight of one of its readers; empty if it is one."""
    node, index = reader.node, reader.index
    key = (node.domain, node.op_type)
    if key == ("", "BatchNormalization") and index in (3, 4):
        return f"{_STATISTIC} of {describe(node)}"
    if index in SETTINGS.get(key, ()):
        name = formal_name(node, index)
        return f"is {'input' if name.isdigit() else 'the'} {name} of {describe(node)}"
    if _size(value) == 1 and not node.domain and node.op_type in _ONE_NUMBER:
        if node.op_type == "Add" and _is_bias(node, index):
            under = _function_of(node.outputs[0])
            return f"is one number, added under {describe(under)}" if under is not None else ""
        return f"is one number, in {describe(node)}"
    if _is_frequency(node, index, value):
        return f"holds the frequencies of a rotary embedding, in {describe(node)}"
    if _is_rotation(value, node) or _is_table_of_angles(value, node):
        return f"holds the angles of a rotary embedding, in {describe(node)}"
    if _normalizes_input(node, index):
        return f"normalizes the model's input, in {describe(node)}"
    return ""


def _size(value: ir.Value) -> int | None:
    tensor = value.const_value
    return None if tensor is None else int(tensor.size)


def _is_bias(node: ir.Node, index: int) -> bool:
    """Whether an Add adds the input to a matrix product or a convolution."""
    other = _source(node.inputs[1 - index], PASSING)
    producer = None if other is None else other.producer()
    return producer is not None and producer.op_type in PRODUCTS


def _function_of(value: ir.Value) -> ir.Node | None:
    """Returns a node that a small number keeps away from 0, such as Log, of those that read it."""
    for reader in readers(value):
        node = reader.node
        if not node.domain and (node.op_type, reader.index) in _SINGULAR:
            return node
    return None


def _source(value: ir.Value | None, passing: Collection[str]) -> ir.Value | None:
    """Returns the value that a value is computed from by certain operators only."""
    while value is not None:
        node = value.producer()
        if node is None or node.domain or node.op_type not in passing:
            return value
        value = node.inputs[0]
    return None


def _is_frequency(node: ir.Node, index: int, value: ir.Value) -> bool:
    """Whether a node multiplies positions by the input, and only Sin and Cos read the product."""
    if node.domain or node.op_type not in ("MatMul", "Mul", "Einsum") or len(node.inputs) != 2:
        return False
    users = {reader.node.op_type for reader in readers(node.outputs[0])}
    if not users or not users <= {"Sin", "Cos"}:
        return False
    tensor = value.const_value
    if tensor is not None and is_geometric(tensor.numpy()):
        return True
    return _counts(node.inputs[1 - index])


def _counts(value: ir.Value | None) -> bool:
    """Whether a value is computed from integers, and from nothing else but single numbers."""
    pending, seen, counts = [value], {value}, False
    while pending:
        value = pending.pop()
        if value is None:
            continue
        node, tensor = value.producer(), constant_tensor(value) or value.const_value
        if value.dtype is not None and value.dtype.is_integer():
            counts = True
        elif tensor is not None:
            steps = np.diff(tensor.numpy().astype(np.float64).ravel())
            if len(steps) and np.ptp(steps) > 1e-4 * abs(steps[0]):
                return False
            counts = counts or len(steps) > 0
        elif node is None:
            return False
        else:
            counts = counts or node.op_type == "Range"
            new = [read for read in node.inputs if read not in seen]
            seen.update(new)
            pending += new
    return counts


def _is_table_of_angles(value: ir.Value, node: ir.Node) -> bool:
    """Whether a node computes sines or cosines of frequencies times consecutive positions."""
    if node.domain or node.op_type not in ("Sin", "Cos") or value.const_value is None:
        return False
    angles = np.squeeze(value.const_value.numpy()).astype(np.float64)
    if angles.ndim < 2 or angles.shape[-2] < 3 or np.ptp(angles) == 0:
        return False
    return bool(np.abs(np.diff(angles, 2, axis=-2)).max() <= 1e-5 * np.abs(angles).max())


def _is_rotation(value: ir.Value, node: ir.Node) -> bool:
    """Whether a node is one product of a · cos φ + b · sin φ, with tables of cosines and sines."""
    table = value.const_value
    if node.domain or node.op_type != "Mul" or table is None or table.size < 2:
        return False
    for use in node.outputs[0].uses():
        other = use.node.inputs[1 - use.idx] if use.node.op_type in ("Add", "Sub") else None
        product = None if other is None else other.producer()
        if product is None or product.op_type != "Mul" or product is node:
            continue
        for factor in product.inputs:
            source = _source(factor, PASSING)
            given = None if source is None else source.const_value
            if given is not None and given.size == table.size:
                cosines, sines = (np.ravel(t.numpy()).astype(np.float64) for t in (table, given))
                squares = cosines**2 + sines**2
                if np.ptp(cosines) > 0 and np.allclose(squares, squares.mean(), rtol=1e-3):
                    return True
    return False


def _normalizes_input(node: ir.Node, index: int) -> bool:
    """Whether a node is a part of (x - mean) / deviation for an input x of the model."""
    if node.domain or node.op_type not in ("Sub", "Div") or index != 1:
        return False
    passing = {*PASSING} - {"Concat"}
    source = _source(node.inputs[0], passing)
    if node.op_type == "Div":
        producer = None if source is None else source.producer()
        if producer is not None and producer.op_type == "Sub" and _is_constant(producer.inputs[1]):
            source = _source(producer.inputs[0], passing)
    else:
        after = list(readers(node.outputs[0]))
        divides = after and all(
            reader.node.op_type in ("Div", "Mul")
            and len(reader.node.inputs) == 2
            and _is_constant(reader.node.inputs[1 - reader.index])
            for reader in after
        )
        if not divides:
            return False
    return source is not None and source.is_graph_input() and not source.is_initializer()


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and (value.is_initializer() or constant_tensor(value) is not None)


def _untied(trained: Mapping[str, ir.Value]) -> list[str]:
    """Returns messages about equal matrices, which were probably one tied weight before export."""
    alike: dict[object, list[tuple[str, ir.TensorProtocol]]] = {}
    copies: dict[str, dict[str, str]] = {}
    for name, value in trained.items():
        tensor = value.const_value
        shape = () if tensor is None else tuple(tensor.shape.numpy())
        if tensor is None or len(shape) != 2 or min(shape) < 2:
            continue
        first, last = ends(tensor, tensor.dtype.numpy().itemsize)
        if first == last:  # as in zeros and ones
            continue
        key = (*sorted(shape), tensor.dtype, first, last)
        for other, given in alike.setdefault(key, []):
            one, array = given.numpy(), tensor.numpy()
            if _same(one, array) or _same(one, array.T):
                how = "copy" if _same(one, array) else "transposed copy"
                copies.setdefault(other, {})[name] = f"'{name}' is a {how} of '{other}'"
                break
        else:
            alike[key].append((name, tensor))
    return [
        f"{', '.join(found.values())}, as if a tied weight was exported several times; "
        f"they are trained independently, unless ortops.surgery.tie(model, {[other, *found]}) "
        "makes them one"
        for other, found in copies.items()
    ]


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other))


def _left_out(
    names: Sequence[str], default: Mapping[str, ir.Value], trained: Collection[str]
) -> list[str]:
    """Returns the untrained weights of layers that have a weight in ``names``."""
    by_value = {value: name for name, value in default.items()}
    found: dict[str, None] = {}
    for name in names:
        for reader in readers(default[name]):
            for value in _layer(reader.node):
                if by_value.get(value, name) not in trained:
                    found[by_value[value]] = None
    return list(found)


def _layer(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the initializers of a node, together with those of a product and its bias addition."""
    values = list(node.inputs)
    if node.op_type == "Add" and not node.domain:
        for value in node.inputs:
            product = None if value is None else value.producer()
            if product is not None and product.op_type in PRODUCTS:
                values += product.inputs
    elif node.op_type in PRODUCTS:
        for use in node.outputs[0].uses():
            values += use.node.inputs if use.node.op_type == "Add" else []
    for value in values:
        source = _source(value, PASSING)
        if source is not None and source.is_initializer():
            yield source
