"""Weights wherever they stand: in Constant nodes, inner graphs, functions and attributes.

What is trained is an initializer of the main graph. Exporters put weights into Constant nodes too,
into branches and bodies, into model-local functions, and into attributes of `ai.onnx.ml` nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx

from ortops.errors import ModelError, UnsupportedError
from ortops.graph import external
from ortops.graph.convert import MINIMUM_OPSET
from ortops.graph.tensor import Names

__all__ = ["Origin", "Weight", "lift", "weights"]

Array: TypeAlias = npt.NDArray[Any]

_FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)

_ML = "ai.onnx.ml"
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_IR_VERSION = 4  # before it, initializers had to be inputs
_AXES_OF_SUMS_ARE_INPUTS = 13  # the opset in which ReduceSum takes its axes so
_AXES_ARE_INPUTS = 18  # the opset in which ReduceMax does


@dataclass(frozen=True)
class Origin:
    """Where a weight stands in a model.

    Attributes:
        field: ``"initializer"``, or the attribute that holds it.
        node: The node with that attribute, as messages name it; empty for an initializer.
        place: The graph or function, outermost last; empty for the main graph.
    """

    field: str
    node: str = ""
    place: str = ""

    @property
    def is_attribute(self) -> bool:
        """Whether a node of ``ai.onnx.ml`` has it, for which standard nodes come in."""
        return self.field in ("coefficients", "intercepts")

    def __str__(self) -> str:
        return self.field + (f" of {self.node}" if self.node else "") + self.place


@dataclass(frozen=True)
class Weight:
    """A floating-point tensor of a light model, where it stands.

    Attributes:
        name: Its name as an initializer of the main graph.
        origin: Where it stands.
        shape: Its shape.
        dtype: Its type.
    """

    name: str
    origin: Origin
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _holder: onnx.TensorProto | onnx.AttributeProto = field(repr=False)
    _data: external.Data = field(repr=False)

    def array(self) -> Array:
        """Returns its value.

        Raises:
            ModelError: If it is in a file whose folder is not known.
        """
        if isinstance(self._holder, onnx.TensorProto):
            return external.array_of(self._holder, self._data)
        numbers = self._holder.floats if self.shape else [self._holder.f]
        return np.array(numbers, np.float32).reshape(self.shape)

    def set(self, array: Array) -> None:
        """Sets its value where it stands.

        Args:
            array: An array of its type and shape; a big one is kept beside the model, uncopied,
                where the old one was (see `ortops.graph.external`).

        Raises:
            ModelError: If the type or the shape is another.
        """
        if (array.dtype, array.shape) != (self.dtype, self.shape):
            raise ModelError(
                f"weight '{self.name}' ({self.origin}): {array.dtype}{list(array.shape)} was "
                f"given; {self.dtype}{list(self.shape)} is accepted"
            )
        if isinstance(self._holder, onnx.TensorProto):
            external.set_array(self._holder, self._data, array)
        elif self.shape:
            self._holder.floats[:] = array.ravel().tolist()
        else:
            self._holder.f = array.item()

    def copy_to(self, graph: onnx.GraphProto) -> None:
        """Adds an initializer with its name and value to a graph; big data are not copied."""
        source = self._holder
        if isinstance(source, onnx.AttributeProto):
            source = onnx.numpy_helper.from_array(self.array())
        tensor = graph.initializer.add()
        external.copy_tensor(source, tensor, self._data)
        tensor.name = self.name


def weights(proto: onnx.ModelProto, data: external.Data) -> dict[str, Weight]:
    """Returns the floating-point tensors of a model, by the names that `lift` gives them.

    These are the initializers of the main graph, and what `lift` makes such ones.

    Args:
        proto: A light model. Setting a weight changes it.
        data: Its data. Setting a weight changes them.

    Raises:
        ModelError: If a LinearClassifier or LinearRegressor node is not legal.
        UnsupportedError: If a LinearClassifier is one that onnxruntime computes no numbers for.

    Example:
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]> f (float[n, 2] x) => (float[n, 1] y) {
        ...         w = Constant <value = float[2, 1] {1, 2}> ()
        ...         y = MatMul (x, w)
        ...     }''')
        >>> weight = weights(model, {})["w"]
        >>> weight.shape, str(weight.origin)
        ((2, 1), "value of Constant node 'w'")
        >>> weight.set(np.float32([[3], [4]]))
        >>> weights(model, {})["w"].array().tolist()
        [[3.0], [4.0]]
    """
    found = {
        tensor.name: _of_tensor(tensor.name, Origin("initializer"), tensor, data)
        for tensor in proto.graph.initializer
        if tensor.data_type in _FLOATS
    }
    return found | {w.name: w for site in _Walk(proto, data).sites for w in site.weights}


def lift(
    proto: onnx.ModelProto, data: external.Data, names: Container[str] | None = None
) -> tuple[onnx.ModelProto, dict[str, Origin]]:
    """Returns a model in which weights that stand elsewhere are initializers of the main graph.

    These are floating-point Constants of the main graph, of inner graphs and of functions that are
    called; initializers of inner graphs; and the coefficients and intercepts of LinearRegressor and
    LinearClassifier nodes of ``ai.onnx.ml``, which become standard nodes that compute what
    onnxruntime computes. A function gets an input for each of its weights, however often it is
    called.

    A weight is named like the output of its Constant node or like the initializer, with a number
    behind where the model has that name in several places or as an output, and
    ``<function>.<output>`` in functions. Coefficients, of shape [outputs, features], and intercepts
    are ``<node>.coefficients`` and ``<node>.intercepts``. The names do not depend on ``names``.

    Args:
        proto: A light model (see `ortops.graph.external`); not changed.
        data: Its data, to which those of big weights are added.
        names: Which weights to lift; the coefficients and intercepts of a node go together. By
            default all but scalars.

    Returns:
        The model, which is the argument if nothing is lifted, and for each lifted name where the
        weight stood.

    Raises:
        ModelError: If a LinearClassifier or LinearRegressor node is not legal.
        UnsupportedError: If a LinearClassifier is one that onnxruntime computes no numbers for.

    Example:
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]> f (float[n, 2] x) => (float[n, 1] y) {
        ...         w = Constant <value = float[2, 1] {1, 2}> ()
        ...         y = MatMul (x, w)
        ...     }''')
        >>> lifted, origins = lift(model, {})
        >>> [node.op_type for node in lifted.graph.node], lifted.graph.initializer[0].name
        (['MatMul'], 'w')
        >>> {name: str(origin) for name, origin in origins.items()}
        {'w': "value of Constant node 'w'"}
    """
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    walk = _Walk(result, data)
    chosen = [site for site in walk.sites if site.is_chosen(names)]
    if not chosen:
        return proto, {}
    lifted = [weight for site in chosen for weight in site.weights]
    for weight in lifted:
        weight.copy_to(result.graph)
    walk.pass_to_functions(chosen)
    for scope in walk.scopes:
        scope.remove([site for site in chosen if site.scope is scope], walk)
    result.ir_version = max(result.ir_version, _IR_VERSION)
    return result, {weight.name: weight.origin for weight in lifted}


_FunctionKey: TypeAlias = tuple[str, str, str]


@dataclass(eq=False)
class _Scope:
    """A graph or the body of a function, with names of its own."""

    body: onnx.GraphProto | onnx.FunctionProto
    place: str
    function: onnx.FunctionProto | None

    def outputs(self) -> set[str]:
        if isinstance(self.body, onnx.FunctionProto):
            return set(self.body.output)
        return {value.name for value in self.body.output}

    def types(self) -> dict[str, onnx.TypeProto.Tensor]:
        """Returns what the scope says of the types of its values."""
        known = list(self.body.value_info)
        if isinstance(self.body, onnx.GraphProto):
            known += self.body.input
        return {value.name: value.type.tensor_type for value in known}

    def remove(self, sites: list[_Site], walk: _Walk) -> None:
        """Takes away what held weights; the names of the initializers take its place."""
        outputs, replaced, types = self.outputs(), dict[str, str](), self.types()
        for site in reversed(sites):  # from the last one on, so that positions stay
            name, weight = site.old, site.weights[0].name
            new: list[onnx.NodeProto] = []
            if site.linear is not None:
                walk.import_standard(self.function)
                new = site.linear.nodes(site.weights, types.get(site.linear.node.input[0]), walk)
            elif name in outputs:
                new = [onnx.helper.make_node("Identity", [weight], [name])]
            else:
                replaced[name] = weight
            position = 0
            if site.node is not None:
                position = site.position
                del self.body.node[position]
            elif isinstance(self.body, onnx.GraphProto):
                del self.body.initializer[site.position]
            for index, node in enumerate(new, position):
                self.body.node.insert(index, node)
        for index in reversed(range(len(self.body.value_info))):
            if self.body.value_info[index].name in replaced:
                del self.body.value_info[index]
        _rename(self.body.node, {old: new for old, new in replaced.items() if old != new})


@dataclass(eq=False)
class _Site:
    """A node or an initializer that holds weights.

    Attributes:
        scope: Where it stands.
        position: Its place in the list of nodes, or of initializers.
        node: The node; None for an initializer.
        old: The name by which the scope reads the weight.
        weights: The weights.
        linear: What a node of ``ai.onnx.ml`` computes.
    """

    scope: _Scope
    position: int
    node: onnx.NodeProto | None
    old: str
    weights: list[Weight]
    linear: _Linear | None = None

    def is_chosen(self, names: Container[str] | None) -> bool:
        if names is None:
            return any(weight.shape for weight in self.weights)
        return any(weight.name in names for weight in self.weights)


class _Walk:
    """What a model holds besides the initializers of its main graph.

    Attributes:
        scopes: The graphs, and the bodies of the functions that are called, outer ones first.
        sites: What holds weights, in the order of the scopes.
        names: The names of the model, those of the weights included.
        opset: The version of the standard operators.
    """

    def __init__(self, proto: onnx.ModelProto, data: external.Data) -> None:
        self._proto, self._data = proto, data
        imports = [entry for entry in proto.opset_import if _domain(entry.domain) == ""]
        self.opset = imports[0].version if imports else MINIMUM_OPSET
        self.names = Names()
        self._functions = {_key(f.domain, f): f for f in proto.functions}
        self.scopes = list(_scopes(proto.graph, "", None))
        self._definitions = Counter[str]()  # how many graphs have a value of a name
        for scope in self.scopes:
            self._definitions.update(_defined(scope.body))
        for key in self._called():
            function = self._functions[key]
            self.scopes += _scopes(function, f" in function '{function.name}'", function)
        for scope in self.scopes:
            for name in (*_defined(scope.body), *(node.name for node in scope.body.node)):
                self.names.take(name)
        self.sites = [site for scope in self.scopes for site in self._sites(scope)]

    def _called(self) -> list[_FunctionKey]:
        """Returns the functions that are called, in the order of the model."""
        found: set[_FunctionKey] = set()
        pending = [node for scope in self.scopes for node in scope.body.node]
        while pending:
            key = _call(pending.pop())
            if key in self._functions and key not in found:
                found.add(key)
                inner = _scopes(self._functions[key], "", None)
                pending += [node for scope in inner for node in scope.body.node]
        return [key for key in self._functions if key in found]

    def _sites(self, scope: _Scope) -> Iterator[_Site]:
        outputs = scope.outputs()
        if isinstance(scope.body, onnx.GraphProto) and scope.body is not self._proto.graph:
            listed = {value.name for value in scope.body.input}
            for position, tensor in enumerate(scope.body.initializer):
                if tensor.data_type in _FLOATS and tensor.name not in listed:
                    name = self._name(tensor.name, scope, outputs)
                    origin = Origin("initializer", "", scope.place)
                    weight = _of_tensor(name, origin, tensor, self._data)
                    yield _Site(scope, position, None, tensor.name, [weight])
        for position, node in enumerate(scope.body.node):
            if any(attribute.ref_attr_name for attribute in node.attribute):
                continue
            if node.op_type == "Constant" and _domain(node.domain) == "":
                constant = self._constant(node, scope, outputs)
                if constant is not None:
                    yield _Site(scope, position, node, node.output[0], [constant])
            elif node.domain == _ML and node.op_type in ("LinearClassifier", "LinearRegressor"):
                linear = _Linear(node)
                yield _Site(scope, position, node, "", self._parts(linear, scope), linear)

    def _name(self, name: str, scope: _Scope, outputs: set[str]) -> str:
        """Returns the name of a weight, which the rest of the model must not have."""
        if scope.function is not None:
            return self.names.unique(f"{scope.function.name}.{name}")
        if self._definitions[name] == 1 and name not in outputs:
            return name
        return self.names.unique(name)

    def _constant(self, node: onnx.NodeProto, scope: _Scope, outputs: set[str]) -> Weight | None:
        for attribute in node.attribute:
            origin = Origin(attribute.name, _describe(node), scope.place)
            if attribute.name == "value" and attribute.t.data_type in _FLOATS:
                name = self._name(node.output[0], scope, outputs)
                return _of_tensor(name, origin, attribute.t, self._data)
            if attribute.name in ("value_floats", "value_float"):
                name = self._name(node.output[0], scope, outputs)
                shape = () if attribute.name == "value_float" else (len(attribute.floats),)
                return Weight(name, origin, shape, np.dtype(np.float32), attribute, self._data)
        return None

    def _parts(self, linear: _Linear, scope: _Scope) -> list[Weight]:
        """Returns the coefficients of a node, and the intercepts if it has them."""
        prefix = linear.node.name or linear.node.output[0]
        if scope.function is not None:
            prefix = f"{scope.function.name}.{prefix}"
        return [
            Weight(
                self.names.unique(f"{prefix}.{attribute.name}"),
                Origin(attribute.name, _describe(linear.node), scope.place),
                shape,
                np.dtype(np.float32),
                attribute,
                self._data,
            )
            for attribute, shape in linear.parts
        ]

    def pass_to_functions(self, sites: Iterable[_Site]) -> None:
        """Gives functions inputs for weights, and lets their calls pass these along."""
        needed: dict[_FunctionKey, list[str]] = {key: [] for key in self._functions}
        for site in sites:
            if site.scope.function is not None:
                key = _key(site.scope.function.domain, site.scope.function)
                needed[key] += [weight.name for weight in site.weights]
        calls = [
            (node, called, scope.function)
            for scope in self.scopes
            for node in scope.body.node
            if (called := _call(node)) in self._functions
        ]
        growing = True
        while growing:  # until what a function needs has reached all that call it
            growing = False
            for _, called, caller in calls:
                if caller is not None:
                    own = needed[_key(caller.domain, caller)]
                    missing = [name for name in needed[called] if name not in own]
                    own += missing
                    growing = growing or bool(missing)
        for node, called, _ in calls:
            if needed[called]:
                absent = len(self._functions[called].input) - len(node.input)
                if absent < 0:
                    raise ModelError(
                        f"{_describe(node)}: it has {len(node.input)} inputs; the function takes "
                        f"{len(self._functions[called].input)}"
                    )
                node.input.extend([*[""] * absent, *needed[called]])
        for key, function in self._functions.items():
            function.input.extend(needed[key])

    def import_standard(self, function: onnx.FunctionProto | None) -> None:
        """Makes the standard operators known to the model, and to a function of it."""
        for imports in (self._proto.opset_import, function.opset_import if function else None):
            if imports is not None and not any(_domain(entry.domain) == "" for entry in imports):
                imports.add(domain="", version=self.opset)


def _of_tensor(name: str, origin: Origin, tensor: onnx.TensorProto, data: external.Data) -> Weight:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return Weight(name, origin, tuple(tensor.dims), dtype, tensor, data)


def _describe(node: onnx.NodeProto) -> str:
    return f"{node.op_type} node '{node.name or next(filter(None, node.output), '')}'"


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _key(domain: str, function: onnx.FunctionProto) -> _FunctionKey:
    return _domain(domain), function.name, function.overload


def _call(node: onnx.NodeProto) -> _FunctionKey:
    return _domain(node.domain), node.op_type, node.overload


def _scopes(
    body: onnx.GraphProto | onnx.FunctionProto, place: str, function: onnx.FunctionProto | None
) -> Iterator[_Scope]:
    """Yields a graph or function, and the graphs inside it."""
    yield _Scope(body, place, function)
    for node in body.node:
        for attribute in node.attribute:
            inside = f" in {attribute.name} of {_describe(node)}{place}"
            for graph in _graphs(attribute):
                yield from _scopes(graph, inside, function)


def _graphs(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    return [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]


def _defined(body: onnx.GraphProto | onnx.FunctionProto) -> set[str]:
    """Returns the names that stand for values of a graph or function, not those in inner graphs."""
    found = {name for node in body.node for name in node.output}
    if isinstance(body, onnx.FunctionProto):
        found.update(body.input)
    else:
        found.update(value.name for value in (*body.input, *body.initializer))
        found.update(tensor.values.name for tensor in body.sparse_initializer)
    return found - {""}


def _rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Lets nodes, and the graphs inside them, read other values."""
    if not names:
        return
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
        for graph in (graph for attribute in node.attribute for graph in _graphs(attribute)):
            own = _defined(graph)
            inner = {old: new for old, new in names.items() if old not in own}
            _rename(graph.node, inner)
            for value in graph.output:
                value.name = inner.get(value.name, value.name)


class _Linear:
    """A LinearRegressor or LinearClassifier, as onnxruntime computes it.

    Attributes:
        node: The node.
        parts: The attributes that hold weights, coefficients first, and the shapes of these.
    """

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node = node
        self._attributes = {a.name: a for a in node.attribute}
        self._transform = onnx.helper.get_attribute_value(
            self._attributes.get("post_transform", onnx.helper.make_attribute("", "NONE"))
        ).decode()
        if self._transform not in _TRANSFORMS:
            raise ModelError(
                f"{_describe(node)}: its post_transform is '{self._transform}'; "
                f"{', '.join(_TRANSFORMS)} are accepted"
            )
        coefficients, intercepts = self._floats("coefficients"), self._floats("intercepts")
        self._labels: list[int] | list[str] = []
        if node.op_type == "LinearClassifier":
            self._scores = len(intercepts)
            self._labels = self._read_labels()
        else:
            targets = self._attributes.get("targets")
            self._scores = 1 if targets is None else targets.i
            if len(intercepts) != self._scores:  # then onnxruntime does not read them
                intercepts = []
        if self._scores < 1 or not coefficients or len(coefficients) % self._scores:
            given = "intercepts" if self._labels else "targets"
            raise ModelError(
                f"{_describe(node)}: it has {len(coefficients)} coefficients and {self._scores} "
                f"{given}; as many coefficients as features for each of them are accepted"
            )
        shape = (self._scores, len(coefficients) // self._scores)
        self.parts: list[tuple[onnx.AttributeProto, tuple[int, ...]]] = [
            (self._attributes["coefficients"], shape)
        ]
        if intercepts:
            self.parts.append((self._attributes["intercepts"], (self._scores,)))

    def _floats(self, name: str) -> list[float]:
        attribute = self._attributes.get(name)
        return [] if attribute is None else list(attribute.floats)

    def _read_labels(self) -> list[int] | list[str]:
        """Returns the class labels, of which there must be one for each score, or two for one."""
        numbers, texts = (
            list(onnx.helper.get_attribute_value(self._attributes[name]))
            if name in self._attributes
            else []
            for name in ("classlabels_ints", "classlabels_strings")
        )
        labels = numbers or [text.decode() for text in texts]
        enough = len(labels) == 2 if self._scores == 1 else len(labels) >= self._scores
        if not enough or (numbers and texts):
            raise ModelError(
                f"{_describe(self.node)}: it has {len(numbers)} classlabels_ints, {len(texts)} "
                f"classlabels_strings and {self._scores} intercepts; labels of one kind, one for "
                "each intercept or two for a single one, are accepted"
            )
        if self._scores == 1 and self._transform == "PROBIT":
            raise UnsupportedError(
                f"{_describe(self.node)}: its post_transform is 'PROBIT' with a single intercept, "
                "for which onnxruntime leaves the second score undefined; give each class an "
                "intercept"
            )
        return labels

    def nodes(
        self, weights: list[Weight], kind: onnx.TypeProto.Tensor | None, walk: _Walk
    ) -> list[onnx.NodeProto]:
        """Returns standard nodes with the same outputs.

        Args:
            weights: The coefficients [outputs, features], and the intercepts [outputs] if any.
            kind: The type of the input, as far as it is known.
            walk: The model.
        """
        emit = _Emitter(walk, weights[0].name)
        x = self.node.input[0]
        if kind is None or kind.elem_type != onnx.TensorProto.FLOAT:
            x = emit("Cast", x, to=onnx.TensorProto.FLOAT)
        is_matrix = kind is not None and kind.HasField("shape") and len(kind.shape.dim) == 2
        names = [weight.name for weight in weights]
        if is_matrix and len(names) == 2:
            y = emit("Gemm", x, *names, transB=1)
        else:
            y = emit("MatMul", x, emit("Transpose", names[0], perm=[1, 0]))
            y = emit("Add", y, names[1]) if len(names) == 2 else y
        if not is_matrix:  # a vector is a single row
            y = emit("Reshape", y, np.array([-1, self._scores]))
        if not self._labels:
            return emit.finished({self._transformed(emit, y): self.node.output[0]})
        label, scores = self.node.output
        return emit.finished({self._label(emit, y): label, self._transformed(emit, y): scores})

    def _label(self, emit: _Emitter, y: str) -> str:
        if self._scores == 1:
            is_second = emit("Greater", y, np.array(0, np.float32))
            index = emit("Cast", emit("Reshape", is_second, np.array([-1])), to=7)
        else:
            index = emit("ArgMax", y, axis=1, keepdims=0)
        kind = object if isinstance(self._labels[0], str) else np.int64
        return emit("Gather", np.array(self._labels, kind), index)

    def _transformed(self, emit: _Emitter, y: str) -> str:
        """Returns the scores as the node puts them out."""
        if self._labels and self._scores == 1:
            if self._transform == "LOGISTIC":
                return emit("Sigmoid", emit("Concat", emit("Neg", y), y, axis=1))
            return emit("Concat", emit("Sub", _ONE, y), y, axis=1)  # whatever the transform is
        if self._transform == "PROBIT":
            return _probit(emit, y)
        if self._scores == 1 or self._transform == "NONE":
            return y
        if self._transform == "SOFTMAX_ZERO":
            return _softmax_of_nonzero(emit, y)
        if self._transform == "SOFTMAX":
            return emit("Softmax", y, axis=1)
        return emit("Sigmoid", y)


_ONE = np.array(1, np.float32)


def _probit(emit: _Emitter, y: str) -> str:
    """Returns √2 · erf⁻¹(2y − 1), by Winitzki's approximation with a = 0.147 as in onnxruntime."""
    two, a, π = np.float32(2), np.float32(0.147), np.float32(3.14159)
    x = emit("Sub", emit("Mul", y, np.array(two)), _ONE)
    log = emit("Log", emit("Mul", emit("Sub", _ONE, x), emit("Add", _ONE, x)))
    v = emit("Add", np.array(two / (π * a)), emit("Mul", np.array(_ONE / two), log))
    root = emit("Sqrt", emit("Sub", emit("Mul", v, v), emit("Mul", np.array(_ONE / a), log)))
    size = emit("Sqrt", emit("Mul", np.array(two), emit("Sub", root, v)))
    is_negative = emit("Less", x, np.array(0, np.float32))
    return emit("Where", is_negative, emit("Neg", size), size)


def _softmax_of_nonzero(emit: _Emitter, y: str) -> str:
    """Returns the softmax of the scores but for those that are zero, which stay so."""
    is_nonzero = emit("Greater", emit("Abs", y), np.array(1e-7, np.float32))
    top = emit.reduced("ReduceMax", y, _AXES_ARE_INPUTS)
    powers = emit("Exp", emit("Sub", y, top))
    total = emit("Where", is_nonzero, powers, np.array(0, np.float32))
    total = emit.reduced("ReduceSum", total, _AXES_OF_SUMS_ARE_INPUTS)
    at_least = emit("Max", top, np.array(-1, np.float32))  # where one is zero, the top is not less
    near_zero = emit("Mul", y, emit("Exp", emit("Neg", at_least)))
    return emit("Div", emit("Where", is_nonzero, powers, near_zero), total)


class _Emitter:
    """Makes standard nodes, whose outputs get names of their own."""

    def __init__(self, walk: _Walk, prefix: str) -> None:
        self._walk, self._prefix = walk, prefix
        self._nodes: list[onnx.NodeProto] = []

    def __call__(self, op_type: str, *inputs: str | Array, **attributes: Any) -> str:
        """Makes a node that reads tensors, or constant arrays, and returns its output's name."""
        read = [self._constant(x) if isinstance(x, np.ndarray) else x for x in inputs]
        return self._add(op_type, read, attributes)

    def reduced(self, op_type: str, x: str, axes_are_inputs: int) -> str:
        """Makes a node that reduces each row to one element; its axes were attributes once."""
        if self._walk.opset < axes_are_inputs:
            return self(op_type, x, axes=[1], keepdims=1)
        return self(op_type, x, np.array([1]), keepdims=1)

    def _constant(self, array: Array) -> str:
        return self._add("Constant", [], {"value": onnx.numpy_helper.from_array(array)})

    def _add(self, op_type: str, inputs: list[str], attributes: dict[str, Any]) -> str:
        output = self._walk.names.unique(f"{self._prefix}/{op_type}")
        self._nodes.append(onnx.helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def finished(self, outputs: Mapping[str, str]) -> list[onnx.NodeProto]:
        """Returns the nodes, some of whose outputs get other names."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [outputs.get(name, name) for name in names]
        return self._nodes
