"""Which tensors of a model are weights, and which of them are trained.

An initializer may be a weight, or a constant that an exporter put there. What reads it tells.
"""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops.errors import ModelError, did_you_mean
from ortops.graph.edit import ELEMENTWISE, describe, inner_graphs
from ortops.graph.files.external import ends
from ortops.graph.tensor import constant_tensor

__all__ = [
    "Choice",
    "Reader",
    "ScopeNames",
    "choose",
    "matches",
    "names_in",
    "quantized",
    "readers",
    "scopes",
    "scopes_of",
    "why_not",
]

_MICROSOFT = "com.microsoft"

SETTINGS: Mapping[tuple[str, str], Collection[int]] = {
    ("", "BatchNormalization"): (3, 4),
    ("", "Clip"): (1, 2),
    ("", "DequantizeLinear"): (1, 2),
    ("", "Dropout"): (1,),
    ("", "GRU"): (5,),
    ("", "GridSample"): (1,),
    ("", "LSTM"): (5, 6),
    ("", "Max"): range(100),
    ("", "MaxRoiPool"): (1,),
    ("", "Min"): range(100),
    ("", "Mod"): (0, 1),
    ("", "OneHot"): (2,),
    ("", "Pad"): (2,),
    ("", "Pow"): (1,),
    ("", "QLinearConv"): (1, 4, 6),
    ("", "QLinearMatMul"): (1, 4, 6),
    ("", "QuantizeLinear"): (1, 2),
    ("", "RNN"): (5,),
    ("", "Range"): (0, 1, 2),
    ("", "Resize"): (1, 2),
    ("", "RoiAlign"): (1,),
    ("", "RotaryEmbedding"): (1, 2),
    ("", "STFT"): (2,),
    ("", "Upsample"): (1,),
    (_MICROSOFT, "Attention"): (3, 4),
    (_MICROSOFT, "DequantizeLinear"): (1, 2),
    (_MICROSOFT, "DynamicQuantizeLSTM"): (5, 6, 8, 10),
    (_MICROSOFT, "DynamicQuantizeMatMul"): (2,),
    (_MICROSOFT, "GatherBlockQuantized"): (2, 3),
    (_MICROSOFT, "GroupQueryAttention"): (7, 8),
    (_MICROSOFT, "MatMulIntegerToFloat"): (2, 3),
    (_MICROSOFT, "MatMulNBits"): (2, 3),
    (_MICROSOFT, "QAttention"): (3, 4),
    (_MICROSOFT, "QGemm"): (1, 4, 7),
    (_MICROSOFT, "QLinearAdd"): (1, 4, 6),
    (_MICROSOFT, "QLinearAveragePool"): (1, 3),
    (_MICROSOFT, "QLinearConcat"): range(100),
    (_MICROSOFT, "QLinearConv"): (1, 4, 6),
    (_MICROSOFT, "QLinearGlobalAveragePool"): (1, 3),
    (_MICROSOFT, "QLinearLeakyRelu"): (1, 3),
    (_MICROSOFT, "QLinearMul"): (1, 4, 6),
    (_MICROSOFT, "QLinearReduceMean"): (1, 3),
    (_MICROSOFT, "QLinearSigmoid"): (1, 3),
    (_MICROSOFT, "QLinearSoftmax"): (1, 3),
    (_MICROSOFT, "QLinearWhere"): (2, 5, 7),
    (_MICROSOFT, "QuantizeLinear"): (1, 2),
    (_MICROSOFT, "RotaryEmbedding"): (2, 3),
}
"""Inputs that say how an operator works, where others hold what was learned, by operator."""

_PASSING: Mapping[str, Collection[int]] = {
    **dict.fromkeys(("Cast", "CastLike", "Expand", "Flatten", "Identity", "Pad"), (0,)),
    **dict.fromkeys(("DequantizeLinear", "QuantizeLinear", "Reshape", "Slice", "Split"), (0,)),
    **dict.fromkeys(("Squeeze", "Tile", "Transpose", "Unsqueeze"), (0,)),
    "Concat": range(10_000),
}
"""Operators whose readers read what they are given, moved or rounded."""

_PRODUCTS = frozenset(
    {"Conv", "ConvInteger", "ConvTranspose", "Einsum", "FusedConv", "FusedGemm", "FusedMatMul"}
    | {"Gemm", "MatMul", "MatMulInteger", "MatMulNBits", "QLinearConv", "QLinearMatMul"}
)

_QUANTIZED: Mapping[str, Collection[int]] = {
    "ConvInteger": (1,),
    "DequantizeLinear": (0,),
    "DynamicQuantizeMatMul": (1,),
    "GatherBlockQuantized": (0,),
    "MatMulInteger": (1,),
    "MatMulIntegerToFloat": (1,),
    "MatMulNBits": (1,),
    "QGemm": (3,),
    "QLinearConv": (3,),
    "QLinearMatMul": (3,),
}
"""Inputs that hold quantized weights, by operator."""

_NAMES_OF_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")


@dataclass(frozen=True)
class Reader:
    """A node that reads a weight, directly or what only moves its elements.

    Attributes:
        node: The node.
        index: Which of its inputs.
    """

    node: ir.Node
    index: int

    def __str__(self) -> str:
        return f"{describe(self.node)}, input {_formal_name(self.node, self.index)}"


@dataclass(frozen=True)
class ScopeNames:
    """The scopes of the nodes that read a weight.

    Attributes:
        readers: Those of each node that uses its values.
        movers: Those of the nodes that only move its elements.
    """

    readers: tuple[frozenset[str], ...] = ()
    movers: frozenset[str] = frozenset()

    def elsewhere(self, pattern: str) -> list[str]:
        """Returns where nodes read the weight that a pattern does not mean."""
        rest = (scopes for scopes in self.readers if scopes and not _is_in(pattern, scopes))
        return [max(scopes, key=len) for scopes in rest]

    def fit(self, pattern: str) -> bool:
        """Whether a pattern means one of the scopes."""
        return any(_is_in(pattern, scopes) for scopes in (*self.readers, self.movers))


@dataclass
class Choice:
    """What is trained.

    Attributes:
        floats: The floating-point initializers by name.
        trained: Those to train.
        reasons: Why the others are not trained, by name.
        patterns: What each name or pattern means, if any were given.
        said: What was chosen for the user, a sentence each.
    """

    floats: dict[str, ir.Value]
    trained: dict[str, ir.Value]
    reasons: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, list[str]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def choose(
    weights: Mapping[str, ir.Value],
    trainable: Sequence[str] | None,
    places: Mapping[str, ScopeNames],
    unnamed: str = "is not named in trainable",
) -> Choice:
    """Chooses what is trained, before it is known what the loss depends on.

    Args:
        weights: The initializers by name.
        trainable: Names, or patterns of names or of the scopes of what reads them; None for all
            that a person would call a weight. An exact name always trains.
        places: The scopes of the nodes that read each initializer (see `scopes`).
        unnamed: Why what is not named is not trained.

    Raises:
        ModelError: If a name or pattern means nothing, or something that cannot be trained.
    """
    floats = {
        name: value
        for name, value in weights.items()
        if value.dtype is not None and value.dtype.is_floating_point()
    }
    reasons = {name: reason for name, value in floats.items() if (reason := why_not(value))}
    default = {name: value for name, value in floats.items() if name not in reasons}
    if trainable is None:
        return Choice(floats, default, reasons, said=_untied(default))
    if not trainable:
        raise ModelError("trainable: nothing is named; name at least one initializer")
    choice = Choice(floats, {})
    nowhere = ScopeNames()
    for pattern in trainable:
        if pattern in floats:
            choice.trained[pattern] = floats[pattern]
            choice.patterns[pattern] = [pattern]
            continue
        if pattern in weights:
            raise ModelError(
                f"trainable: initializer '{pattern}' is of type {weights[pattern].dtype}; only "
                "floating-point ones can be trained" + _quantized_hint(weights[pattern])
            )
        names = [name for name in default if matches(pattern, name, places.get(name, nowhere))]
        if not names:
            refused = [n for n in reasons if matches(pattern, n, places.get(n, nowhere))]
            if refused:
                raise ModelError(
                    f"trainable: '{pattern}' means no weight, but '{refused[0]}', which "
                    f"{reasons[refused[0]]}; an exact name trains whatever it is"
                )
            raise ModelError(
                f"trainable: the model has no trainable initializer '{pattern}'; "
                + did_you_mean(pattern, floats)
            )
        choice.patterns[pattern] = names
        choice.trained.update((name, default[name]) for name in names)
    for pattern, names in choice.patterns.items():
        if pattern in names:
            continue
        shared = {
            name: elsewhere
            for name in names
            if not fnmatch.fnmatchcase(name, pattern)
            and (elsewhere := places.get(name, nowhere).elsewhere(pattern))
        }
        for name, elsewhere in shared.items():
            choice.said.append(
                f"trainable: '{pattern}' takes '{name}', which nodes elsewhere read too "
                f"({len(elsewhere)}, such as '{elsewhere[0]}')"
            )
        own = [name for name in names if name not in shared]
        left = _left_out(own, default, choice.trained)
        if left:
            shown = ", ".join(f"'{name}'" for name in left[:5])
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            choice.said.append(
                f"trainable: '{pattern}' takes {len(names)} weights, and not others of the same "
                f"layers: {shown}{more}"
            )
    choice.said += _untied(choice.trained)
    choice.reasons = {name: reasons.get(name, unnamed) for name in floats}
    for name in choice.trained:
        choice.reasons.pop(name)
    return choice


def readers(value: ir.Value) -> Iterator[Reader]:
    """Yields the nodes that read a value, or what only moves its elements, once each."""
    seen: set[tuple[ir.Node, int]] = set()
    pending = [value]
    while pending:
        for use in pending.pop().uses():
            node, index = use.node, use.idx
            if (node, index) in seen:
                continue
            seen.add((node, index))
            inner = _inner_input(node, index)
            if inner is not None:
                pending.append(inner)
            elif index in _PASSING.get(node.op_type, ()) and node.domain in ("", _MICROSOFT):
                pending += node.outputs
            else:
                yield Reader(node, index)


def quantized(values: Iterable[ir.Value]) -> dict[str, str]:
    """Returns the names of weights of integers, and what reads them."""
    found: dict[str, str] = {}
    for value in values:
        if value.dtype is None or value.dtype.is_floating_point():
            continue
        for use in value.uses():
            if use.idx in _QUANTIZED.get(use.node.op_type, ()):
                found[value.name or ""] = f"is {value.dtype}, read by {describe(use.node)}"
    return found


def scopes(values: Iterable[ir.Value]) -> dict[str, ScopeNames]:
    """Returns the scopes of the nodes that read each value: their names and their metadata.

    Exporters name a node after the module that it comes from: ``/encoder/layer.5/query/MatMul``,
    or, in the metadata of torch's newer exporter, ``['', 'encoder.layer.5.query', …]``.

    Args:
        values: Initializers of a graph as its exporter wrote it.
    """
    return {
        value.name or "": ScopeNames(
            tuple(scopes_of(reader.node) for reader in readers(value)),
            frozenset[str]().union(*(scopes_of(use.node) for use in value.uses())),
        )
        for value in values
    }


def scopes_of(node: ir.Node) -> frozenset[str]:
    """Returns the scopes of a node: its name, what is around it, and those of its metadata."""
    found = set()
    if node.name:
        parts = node.name.strip("/").replace("/", ".")
        found.add(parts)
        if "." in parts:
            found.add(parts.rsplit(".", 1)[0])
    for key in _NAMES_OF_SCOPES:
        text = node.metadata_props.get(key, "")
        names = names_in(text) if text.startswith("[") else text.split("/")
        found.update(name.split(":")[0].strip() for name in names)
    return frozenset(found - {""})


def names_in(text: str) -> list[str]:
    """Returns the strings in a list as Python writes it; none if that is not what the text is."""
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two of deep nesting
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def matches(pattern: str, name: str, places: ScopeNames) -> bool:
    """Whether a pattern means an initializer, by its name or by who reads it."""
    return fnmatch.fnmatchcase(name, pattern) or places.fit(pattern)


def _is_in(pattern: str, scopes: Collection[str]) -> bool:
    """Whether a pattern means one of some scopes, or what is around it."""
    dotted = pattern.strip("/").replace("/", ".")
    return any(
        place == dotted or place.startswith(f"{dotted}.") or fnmatch.fnmatchcase(place, dotted)
        for place in scopes
    )


def why_not(value: ir.Value) -> str:
    """Returns why nobody would call an initializer a weight; nothing where somebody would."""
    reasons = []
    for reader in readers(value):
        reason = _why_reader_is_not(value, reader)
        if not reason:
            return ""
        reasons.append(reason)
    return reasons[0] if reasons else "is read by no node"


def _why_reader_is_not(value: ir.Value, reader: Reader) -> str:
    node, index = reader.node, reader.index
    key = (node.domain, node.op_type)
    if key == ("", "BatchNormalization") and index in (3, 4):
        return f"is a running statistic of {describe(node)}"
    if index in SETTINGS.get(key, ()):
        name = _formal_name(node, index)
        return f"is {'input' if name.isdigit() else 'the'} {name} of {describe(node)}"
    if _size(value) == 1 and not node.domain and node.op_type in ELEMENTWISE | {"Where"}:
        if node.op_type == "Add" and _is_bias(node, index):
            return ""
        return f"is one number, in {describe(node)}"
    if _is_frequency(node, index):
        return f"holds the frequencies of a rotary embedding, in {describe(node)}"
    if _is_rotation(value, node, index):
        return f"holds the angles of a rotary embedding, in {describe(node)}"
    if _is_fourier_basis(value, node, index):
        return f"holds the basis of a Fourier transform, in {describe(node)}"
    if _normalizes_input(node, index):
        return f"normalizes the model's input, in {describe(node)}"
    return ""


def _size(value: ir.Value) -> int | None:
    tensor = value.const_value
    return None if tensor is None else int(tensor.size)


def _is_bias(node: ir.Node, index: int) -> bool:
    """Whether an Add adds to a product or a convolution."""
    other = _behind(node.inputs[1 - index], _PASSING)
    producer = None if other is None else other.producer()
    return producer is not None and producer.op_type in _PRODUCTS


def _behind(value: ir.Value | None, passing: Collection[str]) -> ir.Value | None:
    """Returns the value that another one is computed from by certain operators alone."""
    while value is not None:
        node = value.producer()
        if node is None or node.domain or node.op_type not in passing:
            return value
        value = node.inputs[0]
    return None


def _is_frequency(node: ir.Node, index: int) -> bool:
    """Whether a node multiplies with positions, which are integers, and only for Sin and Cos."""
    if node.domain or node.op_type not in ("MatMul", "Mul", "Einsum") or len(node.inputs) != 2:
        return False
    cast = _behind(node.inputs[1 - index], _PASSING.keys() - {"Cast"})
    producer = None if cast is None else cast.producer()
    if producer is None or producer.op_type != "Cast":
        return False
    source = producer.inputs[0]
    if source is None or source.dtype is None or not source.dtype.is_integer():
        return False
    users = {reader.node.op_type for reader in readers(node.outputs[0])}
    return bool(users) and users <= {"Sin", "Cos"}


def _is_rotation(value: ir.Value, node: ir.Node, index: int) -> bool:
    """Whether a node is a product of a · cos φ + b · sin φ, with tables of both."""
    table = value.const_value
    if node.domain or node.op_type != "Mul" or table is None or table.size < 2:
        return False
    for use in node.outputs[0].uses():
        other = use.node.inputs[1 - use.idx] if use.node.op_type == "Add" else None
        product = None if other is None else other.producer()
        if product is None or product.op_type != "Mul" or product is node:
            continue
        for factor in product.inputs:
            source = _behind(factor, _PASSING)
            given = None if source is None else source.const_value
            if given is not None and given.size == table.size:
                cosines, sines = (np.ravel(t.numpy()).astype(np.float64) for t in (table, given))
                squares = cosines**2 + sines**2
                if np.ptp(cosines) > 0 and np.allclose(squares, squares.mean(), rtol=1e-3):
                    return True
    return False


def _is_fourier_basis(value: ir.Value, node: ir.Node, index: int) -> bool:
    """Whether a convolution is a short-time Fourier transform: window · cos, ±window · sin."""
    tensor = value.const_value
    if node.domain or (node.op_type, index) != ("Conv", 1) or tensor is None:
        return False
    shape = tuple(tensor.shape.numpy())
    if len(shape) != 3 or shape[1] != 1 or shape[0] != 2 * (shape[2] // 2 + 1) or shape[2] < 8:
        return False
    cosines, sines = np.split(tensor.numpy()[:, 0].astype(np.float64), 2)
    angle = 2 * np.pi / shape[2] * np.outer(np.arange(len(cosines)), np.arange(shape[2]))
    window = cosines[0]
    error = 1e-3 * np.abs(window).max()
    return bool(
        error > 0
        and np.allclose(cosines, window * np.cos(angle), rtol=0, atol=error)
        and np.allclose(np.abs(sines), np.abs(window * np.sin(angle)), rtol=0, atol=error)
    )


def _normalizes_input(node: ir.Node, index: int) -> bool:
    """Whether a node is (x − mean) / deviation of an input of the model, or a part of it."""
    if node.domain or node.op_type not in ("Sub", "Div") or index != 1:
        return False
    passing = {*_PASSING} - {"Concat"}
    source = _behind(node.inputs[0], passing)
    if node.op_type == "Div":
        producer = None if source is None else source.producer()
        if producer is not None and producer.op_type == "Sub" and _is_constant(producer.inputs[1]):
            source = _behind(producer.inputs[0], passing)
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


def _inner_input(node: ir.Node, index: int) -> ir.Value | None:
    """Returns the input of a body that an input of a Loop or Scan becomes."""
    if node.domain or node.op_type not in ("Loop", "Scan"):
        return None
    (body,) = inner_graphs(node)
    return body.inputs[index] if index < len(body.inputs) else None


def _formal_name(node: ir.Node, index: int) -> str:
    """Returns what the schema calls an input."""
    try:
        schema = onnx.defs.get_schema(node.op_type, domain=node.domain)
    except onnx.defs.SchemaError:
        return str(index)
    formal = schema.inputs
    return str(formal[min(index, len(formal) - 1)].name) if formal else str(index)


def _quantized_hint(value: ir.Value) -> str:
    if not quantized([value]):
        return ""
    return "; it is quantized, so train the float model and quantize it anew"


def _untied(trained: Mapping[str, ir.Value]) -> list[str]:
    """Returns what to say of matrices that are copies of each other, as exporters untie them."""
    alike: dict[object, list[tuple[str, ir.TensorProtocol]]] = {}
    said = []
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
                said.append(
                    f"'{name}' is a {how} of '{other}', as of a weight that was tied; each is "
                    "trained by itself"
                )
                break
        else:
            alike[key].append((name, tensor))
    return said


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return one.shape == other.shape and bool(np.array_equal(one, other))


def _left_out(
    names: Sequence[str], default: Mapping[str, ir.Value], trained: Collection[str]
) -> list[str]:
    """Returns weights that nobody named, of layers of which a pattern takes a part."""
    by_value = {value: name for name, value in default.items()}
    found: dict[str, None] = {}
    for name in names:
        for reader in readers(default[name]):
            for value in _layer(reader.node):
                if by_value.get(value, name) not in trained:
                    found[by_value[value]] = None
    return list(found)


def _layer(node: ir.Node) -> Iterator[ir.Value]:
    """Yields the initializers of a node, and of the product whose bias it adds."""
    values = list(node.inputs)
    if node.op_type == "Add" and not node.domain:
        for value in node.inputs:
            product = None if value is None else value.producer()
            if product is not None and product.op_type in _PRODUCTS:
                values += product.inputs
    elif node.op_type in _PRODUCTS:
        for use in node.outputs[0].uses():
            values += use.node.inputs if use.node.op_type == "Add" else []
    for value in values:
        source = _behind(value, _PASSING)
        if source is not None and source.is_initializer():
            yield source
