"""Composes several models into one, whose weights are trained together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx

from ortops.engine.composition.parts import Part, logger, read_parts
from ortops.engine.composition.record import METADATA_KEY, Record, records_text
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import write_metadata
from ortops.graph.files.loading import ModelLike
from ortops.graph.files.messages import graphs_within, names_within, rename_within
from ortops.graph.names import Names

Key: TypeAlias = tuple[str, str]
"""The name of a part, and of a value of it."""

_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")
_UNKNOWN = ("", "?", "-1", "None")


def compose(
    models: Mapping[str, ModelLike], connect: Mapping[str, str] | None = None
) -> onnx.ModelProto:
    """Returns one model that computes several ones, for `ortops.build_training_model`.

    Each output of a model can be connected to inputs of others, so that gradients flow from one
    model into another. `ortops.split` returns the trained models.

    Names that several models use get the name of their model in front, as in
    ``decoder.input_ids``; all others stay. Inputs of one name are separate unless they are
    connected. Weights of different models with equal values, such as an embedding that encoder and
    decoder share, become one weight, and a warning says so; weights whose elements are all equal,
    such as zeros and ones, stay separate.

    Args:
        models: The models by name: ModelProtos, their bytes, or their paths; not changed. Weights
            in Constant nodes, branches, loop bodies and functions become initializers of the
            composed model.
        connect: What inputs read: ``{"decoder.encoder_hidden_states": "encoder.hidden"}``
            connects an output of the model ``encoder`` to an input of ``decoder``. The second name
            can also be an input of another model, which the first one then reads too.

    Returns:
        A new model. Its inputs are those that are not connected, and its outputs are the outputs of
        all models. If the models have different opsets, all have the newest one, at least 21, and
        a warning is logged.

    Raises:
        ArgumentError: If ``models`` or ``connect`` has another form, or a name is unknown.
        ModelError: If a model is not valid, has training_info or an adapter, types or shapes of
            connected tensors differ, or the connections form a cycle.
        UnsupportedError: If two models use different versions of an operator of another domain.

    Example:
        >>> from ortops.docs import examples
        >>> models = {"first": examples.mlp((4, 16, 2)), "second": examples.mlp((2, 3))}
        >>> model = compose(models, {"second.images": "first.logits"})
        >>> [value.name for value in model.graph.input]
        ['images']
        >>> [value.name for value in model.graph.output]
        ['first.logits', 'second.logits']
    """
    parts = read_parts(models)
    connections = _connections(parts, {} if connect is None else connect)
    ordered = _ordered(parts)
    ties = _ties(ordered)
    naming = _Naming(ordered, {**_first(connections), **ties})
    result = _Result(naming, connections)
    dimensions = _Dimensions(connections)
    for part in ordered:
        result.add(part, dimensions.renamed(part))
    composed = result.finished()
    if ties:
        names = sorted({naming.of(*key) for key in ties})
        logger.warning(
            "compose: weights with equal values became one weight that the models share: %s",
            ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else ""),
        )
    return composed


# ---------------------------------------------------------------------------------- connections


def _connections(parts: Mapping[str, Part], connect: Any) -> dict[Key, Key]:
    """Returns the output or input that each connected input reads."""
    if not isinstance(connect, Mapping):
        raise ArgumentError(
            "connect must be a dict such as {'decoder.hidden': 'encoder.output'}, got "
            f"{connect!r:.80}"
        )
    links: dict[Key, Key] = {}
    for target, source in connect.items():
        into, name = _resolved(parts, target, lambda part: list(part.inputs), "an input")
        other, origin = _resolved(
            parts, source, lambda part: [*part.outputs, *part.inputs], "an output or input"
        )
        if into == other:
            raise ModelError(
                f"connect: '{target}' and '{source}' belong to the same model; connect different "
                "models"
            )
        links[into, name] = other, origin
        parts[into].sources.add(other)
    for start in links:
        _follow(start, links)
    return links


def _first(connections: Mapping[Key, Key]) -> dict[Key, Key]:
    """Returns the connections of the first input of each part that reads a tensor.

    A further input of the same part is computed by an Identity node, so that both can be told apart
    when the composition is split.
    """
    found: dict[Key, Key] = {}
    seen = set()
    for (part, name), source in connections.items():
        end = part, _follow(source, connections)
        if end not in seen:
            seen.add(end)
            found[part, name] = source
    return found


def _resolved(
    parts: Mapping[str, Part], text: Any, values: Callable[[Part], list[str]], what: str
) -> Key:
    """Splits ``<model>.<name>``; both can have dots."""
    if not isinstance(text, str):
        raise ArgumentError(f"connect: names must be strings, got {text!r:.80}")
    owners = [name for name in parts if text.startswith(f"{name}.")]
    if not owners:
        raise ArgumentError(
            f"connect: '{text}' must be '<model>.<name>'; the models are "
            + ", ".join(f"'{name}'" for name in parts)
        )
    for owner in owners:
        if text[len(owner) + 1 :] in values(parts[owner]):
            return owner, text[len(owner) + 1 :]
    owner = max(owners, key=len)
    name = text[len(owner) + 1 :]
    raise ArgumentError(
        f"connect: model '{owner}' has no {what.split(' ', 1)[1]} '{name}'; "
        f"{did_you_mean(name, values(parts[owner]))}"
    )


def _follow(key: Key, links: Mapping[Key, Key]) -> Key:
    """Returns what a value is in the end, over all links."""
    seen = [key]
    while key in links:
        key = links[key]
        if key in seen:
            names = " -> ".join(".".join(each) for each in (*seen[seen.index(key) :], key))
            raise ModelError(f"connect: the connections form a cycle: {names}; remove one of them")
        seen.append(key)
    return key


def _ordered(parts: Mapping[str, Part]) -> list[Part]:
    """Returns the parts, each after those that it reads from."""
    found: list[Part] = []
    waiting = list(parts.values())
    while waiting:
        done = {part.name for part in found}
        ready = next((part for part in waiting if part.sources <= done), None)
        if ready is None:
            names = ", ".join(f"'{part.name}'" for part in waiting)
            raise ModelError(
                f"connect: the models {names} form a cycle; connect outputs of earlier models to "
                "inputs of later ones only"
            )
        waiting.remove(ready)
        found.append(ready)
    return found


def _ties(parts: list[Part]) -> dict[Key, Key]:
    """Returns the weight of an earlier part that each weight of equal value is to be.

    Different weights of a part stay different.
    """
    alike: dict[object, list[tuple[Part, str]]] = {}
    ties: dict[Key, Key] = {}
    for part in parts:
        kinds = {t.name: (t.data_type, tuple(t.dims)) for t in part.graph.initializer}
        listed = {value.name for value in part.graph.input}
        names = [n for n in part.weights if n not in listed and np.prod(kinds[n][1]) >= 2]
        used = set[Key]()
        for by_name in (True, False):
            for name in names:
                same = [] if (part.name, name) in ties else alike.get(kinds[name], [])
                same = [each for each in same if (each[1] == name) is by_name]
                array = part.array(name) if same else None
                for other, origin in same:
                    key = other.name, origin
                    if key not in used and _equal(array, other.array(origin)):
                        ties[part.name, name] = key
                        used.add(key)
                        break
        for name in names:
            if (part.name, name) not in ties:
                alike.setdefault(kinds[name], []).append((part, name))
    return ties


def _equal(one: Any, other: Any) -> bool:
    """Whether two arrays have equal elements, which are not all the same."""
    return one.tobytes() == other.tobytes() and bool((one != one.flat[0]).any())


# ---------------------------------------------------------------------------------------- names


class _Naming:
    """The names of all values and nodes in the composition.

    Args:
        parts: The parts.
        links: The values that others stand for.
    """

    def __init__(self, parts: list[Part], links: Mapping[Key, Key]) -> None:
        self.links = links
        self._names = Names()
        self._table: dict[Key, str] = {}
        self._nodes: dict[Key, str] = {}
        defined = {part.name: list(names_within(part.graph)) for part in parts}
        owners: dict[str, set[Key]] = {}
        for name, values in defined.items():
            for value in values:
                if (name, value) not in links:
                    owners.setdefault(value, set()).add((name, value))
        for value, keys in owners.items():
            if len(keys) == 1:
                self._table[next(iter(keys))] = value
                self._names.take(value)
        for name, values in defined.items():
            for value in values:
                if (name, value) not in links and (name, value) not in self._table:
                    self._table[name, value] = self._names.unique(f"{name}.{value}")
        taken = Names()
        for part in parts:
            for graph in graphs_within(part.graph):
                for node in graph.node:
                    if node.name and (part.name, node.name) not in self._nodes:
                        free = taken.is_free(node.name)
                        name = node.name if free else f"{part.name}.{node.name}"
                        taken.take(name)
                        self._nodes[part.name, node.name] = name

    def of(self, part: str, value: str) -> str:
        """Returns the name of a value; an absent input or output has none."""
        return self._table[_follow((part, value), self.links)] if value else ""

    def of_node(self, part: str, node: str) -> str:
        """Returns the name of a node."""
        return self._nodes[part, node] if node else ""

    def unique(self, name: str) -> str:
        """Returns a new name."""
        return self._names.unique(name)


@dataclass
class _Dimensions:
    """The names of dimensions: equal ones of different models need not have equal sizes.

    Attributes:
        links: What connected inputs read.
        known: The dimensions of the inputs and outputs of earlier parts.
        taken: The identifiers in use.
    """

    links: Mapping[Key, Key]
    known: dict[Key, list[int | str] | None] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def renamed(self, part: Part) -> Callable[[onnx.ValueInfoProto], None]:
        """Returns a function that renames the dimensions of values of a part, in place."""
        same: dict[str, int | str] = {}
        for name, value in part.inputs.items():
            source = self.links.get((part.name, name))
            if source is not None:
                self._match(part, value, source, same)
        before = set(self.taken)

        def renamed(dim: str) -> int | str:
            if dim in same:
                return same[dim]
            return _IDENTIFIER.sub(lambda m: f"{part.name}_{m[0]}" if m[0] in before else m[0], dim)

        def rename(value: onnx.ValueInfoProto) -> None:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param not in _UNKNOWN:
                    new = renamed(dim.dim_param)
                    self.taken.update(_IDENTIFIER.findall(str(new)))
                    if isinstance(new, int):
                        dim.dim_value = new
                    else:
                        dim.dim_param = new

        for name, value in (*part.inputs.items(), *part.outputs.items()):
            copy = onnx.ValueInfoProto()
            copy.CopyFrom(value)
            rename(copy)
            self.known[part.name, name] = _dims(copy)
        return rename

    def _match(
        self, part: Part, value: onnx.ValueInfoProto, source: Key, same: dict[str, int | str]
    ) -> None:
        """Checks the shapes of connected tensors, and notes which dimensions are equal."""
        own, given = _dims(value), self.known[source]
        if own is None or given is None:
            return
        texts = f"{part.name}.{value.name}", ".".join(source)
        if len(own) != len(given):
            raise ModelError(
                f"connect: '{texts[0]}' has shape {own}, but '{texts[1]}' has shape {given}; "
                "connect tensors of the same rank"
            )
        for mine, other in zip(own, given, strict=True):
            mine = same.get(mine, mine) if isinstance(mine, str) else mine
            if isinstance(mine, int) and isinstance(other, int) and mine != other:
                raise ModelError(
                    f"connect: '{texts[0]}' has shape {own}, but '{texts[1]}' has shape {given}; "
                    "connect tensors of the same shape"
                )
            if isinstance(mine, str) and mine not in _UNKNOWN and other not in _UNKNOWN:
                same.setdefault(mine, other)


def _dims(value: onnx.ValueInfoProto) -> list[int | str] | None:
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param for d in kind.shape.dim]


# --------------------------------------------------------------------------------------- result


class _Result:
    """The composed model, to which parts are added."""

    def __init__(self, naming: _Naming, connections: Mapping[Key, Key]) -> None:
        self._naming, self._connections = naming, connections
        self._proto = onnx.ModelProto(ir_version=0, producer_name="ortops")
        self._proto.graph.name = "composition"
        self._light = LightModel(self._proto, {})
        self._records: dict[str, Record] = {}
        self._types: dict[Key, onnx.TypeProto] = {}
        self._functions: dict[tuple[str, str, str], bytes] = {}

    def add(self, part: Part, rename: Callable[[onnx.ValueInfoProto], None]) -> None:
        """Adds a part; those that it reads from were added before."""
        proto, graph = part.light.proto, part.graph
        self._check_types(part)
        record = Record(
            inputs={name: self._naming.of(part.name, name) for name in part.inputs},
            weights={name: self._naming.of(part.name, name) for name in part.weights},
            types={
                **{name: v.type.SerializeToString().hex() for name, v in part.inputs.items()},
                **{name: v.type.SerializeToString().hex() for name, v in part.outputs.items()},
            },
            metadata={entry.key: entry.value for entry in proto.metadata_props},
        )
        self._records[part.name] = record
        self._add_functions(part)
        outputs = [value.name for value in graph.output]
        own = self._proto.graph
        kept = [t for t in graph.initializer if not self._is_linked(part, t.name)]
        inputs = [v for v in graph.input if (part.name, v.name) not in self._connections]
        copied = [name for name in part.inputs if self._is_copied(part, name)]
        rename_within(graph, lambda name: self._naming.of(part.name, name))
        for each in graphs_within(graph):
            for value in (*each.input, *each.output, *each.value_info):
                rename(value)
            for node in each.node:
                node.name = self._naming.of_node(part.name, node.name)
        own.input.extend(inputs)
        own.initializer.extend(kept)
        for name in copied:
            source = self._naming.of(*self._connections[part.name, name])
            copy = self._naming.of(part.name, name)
            own.node.add(op_type="Identity", input=[source], output=[copy], name=copy)
        own.node.extend(graph.node)
        made = {value.name for value in own.output}
        linked = {value.name for value in (*own.input, *own.initializer)} | made
        for name, value in zip(outputs, graph.output, strict=True):
            if value.name in linked and (value.name in made or self._is_linked(part, name)):
                again = self._naming.unique(f"{part.name}.{name}")
                own.node.add(op_type="Identity", input=[value.name], output=[again], name=again)
                value.name = again
            own.output.add().CopyFrom(value)
            record.outputs[name] = value.name
        listed = {value.name for value in (*own.input, *own.output)}
        own.value_info.extend(value for value in graph.value_info if value.name not in listed)
        own.quantization_annotation.extend(graph.quantization_annotation)
        self._light.data.update(part.light.data)
        self._proto.ir_version = max(self._proto.ir_version, proto.ir_version)
        for domain, version in part.opsets().items():
            entry = next((e for e in self._proto.opset_import if e.domain == domain), None)
            entry = entry or self._proto.opset_import.add(domain=domain, version=version)
            entry.version = max(entry.version, version)

    def finished(self) -> onnx.ModelProto:
        """Returns the model, with its data and metadata."""
        write_metadata(self._proto, METADATA_KEY, records_text(self._records))
        return self._light.attach()

    def _is_linked(self, part: Part, name: str) -> bool:
        return (part.name, name) in self._naming.links

    def _is_copied(self, part: Part, name: str) -> bool:
        return (part.name, name) in self._connections and not self._is_linked(part, name)

    def _check_types(self, part: Part) -> None:
        for name, value in (*part.inputs.items(), *part.outputs.items()):
            self._types[part.name, name] = value.type
        for name, value in part.inputs.items():
            source = self._connections.get((part.name, name))
            if source is None:
                continue
            kinds = [_type_text(value.type), _type_text(self._types[source])]
            if kinds[0] != kinds[1]:
                raise ModelError(
                    f"connect: '{part.name}.{name}' has type {kinds[0]}, but '{'.'.join(source)}' "
                    f"has type {kinds[1]}; connect tensors of the same type"
                )

    def _add_functions(self, part: Part) -> None:
        """Adds the functions of a part, under new names if others have theirs."""
        functions = part.light.proto.functions
        contents = {(f.domain, f.name, f.overload): f.SerializeToString() for f in functions}
        equal = all(self._functions.get(key, text) == text for key, text in contents.items())
        renamed: dict[tuple[str, str, str], str] = {}
        for domain, name, overload in [] if equal else contents:
            if (domain, name, overload) in self._functions:
                renamed[domain, name, overload] = f"{part.name}.{name}"
        for body in (*graphs_within(part.graph), *functions):
            for node in body.node:
                node.op_type = renamed.get((node.domain, node.op_type, node.overload), node.op_type)
        for function in functions:
            key = function.domain, function.name, function.overload
            if equal and key in self._functions:
                continue
            function.name = renamed.get(key, function.name)
            self._functions[function.domain, function.name, function.overload] = contents[key]
            self._proto.functions.add().CopyFrom(function)


def _type_text(kind: onnx.TypeProto) -> str:
    """Returns a type without its shape."""
    if kind.HasField("tensor_type"):
        return str(onnx.TensorProto.DataType.Name(kind.tensor_type.elem_type)).lower()
    return str(kind.WhichOneof("value"))
