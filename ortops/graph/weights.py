"""Finds weights in all places of a model, and makes them initializers of the main graph.

Training updates initializers of the main graph. Exporters also store weights in Constant nodes, in
branches and loop bodies, in model-local functions, and in attributes of `ai.onnx.ml` nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx

from ortops._common.numbers import Array
from ortops.errors import ModelError
from ortops.graph.convert import MINIMUM_OPSET
from ortops.graph.files import external
from ortops.graph.files.external import LightModel
from ortops.graph.files.messages import attribute_graphs, describe_node, node_graphs
from ortops.graph.linear_models import LinearModel
from ortops.graph.names import Names

_FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)

_ML = "ai.onnx.ml"
_IR_VERSION = 4  # the first version in which initializers need not be inputs


@dataclass(frozen=True)
class Origin:
    """The location of a weight in a model.

    Attributes:
        field: ``"initializer"``, or the name of the attribute.
        node: The description of the node with the attribute; empty for an initializer.
        place: The subgraph or function, outermost last; empty for the main graph.
    """

    field: str
    node: str = ""
    place: str = ""

    @property
    def is_attribute(self) -> bool:
        """Whether it is an attribute of an ``ai.onnx.ml`` node, which `lift` replaces."""
        return self.field in ("coefficients", "intercepts")

    def __str__(self) -> str:
        return self.field + (f" of {self.node}" if self.node else "") + self.place


@dataclass(frozen=True)
class Weight:
    """A floating-point tensor of a light model, in its original location.

    Attributes:
        name: Its name as an initializer of the main graph.
        origin: Its location.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    origin: Origin
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _holder: onnx.TensorProto | onnx.AttributeProto = field(repr=False)
    _model: LightModel = field(repr=False)

    def array(self) -> Array:
        """Returns its value.

        Raises:
            ModelError: If it is external data of a model whose folder is unknown.
        """
        if isinstance(self._holder, onnx.TensorProto):
            return self._model.array_of(self._holder)
        numbers = self._holder.floats if self.shape else [self._holder.f]
        return np.array(numbers, np.float32).reshape(self.shape)

    def set(self, array: Array) -> None:
        """Sets its value, in its original location.

        Args:
            array: An array of its dtype and shape. If the tensor is detached (see
                `ortops.graph.files.external`), the array is kept without a copy.

        Raises:
            ModelError: If the dtype or the shape differs.
        """
        if (array.dtype, array.shape) != (self.dtype, self.shape):
            raise ModelError(
                f"weight '{self.name}' ({self.origin}) must be {self.dtype}{list(self.shape)}, "
                f"got {array.dtype}{list(array.shape)}"
            )
        if isinstance(self._holder, onnx.TensorProto):
            self._model.set_array(self._holder, array)
        elif self.shape:
            self._holder.floats[:] = array.ravel().tolist()
        else:
            self._holder.f = array.item()

    def copy_to(self, graph: onnx.GraphProto) -> None:
        """Adds an initializer with its name and value to a graph; detached data are not copied."""
        source = self._holder
        if isinstance(source, onnx.AttributeProto):
            source = onnx.numpy_helper.from_array(self.array())
        tensor = graph.initializer.add()
        external.copy_tensor(source, tensor, self._model.data)
        tensor.name = self.name


def weights(model: LightModel) -> dict[str, Weight]:
    """Returns the floating-point tensors of a model, by the names that `lift` gives them.

    These are the initializers of the main graph and the weights that `lift` moves there.

    Args:
        model: The model. Setting a weight changes it.

    Raises:
        ModelError: If a LinearClassifier or LinearRegressor node is invalid.
        UnsupportedError: If onnxruntime leaves an output of a LinearClassifier undefined.

    Example:
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]> f (float[n, 2] x) => (float[n, 1] y) {
        ...         w = Constant <value = float[2, 1] {1, 2}> ()
        ...         y = MatMul (x, w)
        ...     }''')
        >>> light = external.detach(model)
        >>> weight = weights(light)["w"]
        >>> weight.shape, str(weight.origin)
        ((2, 1), "value of Constant node 'w'")
        >>> weight.set(np.float32([[3], [4]]))
        >>> weights(light)["w"].array().tolist()
        [[3.0], [4.0]]
    """
    found = {
        tensor.name: _of_tensor(tensor.name, Origin("initializer"), tensor, model)
        for tensor in model.proto.graph.initializer
        if tensor.data_type in _FLOATS
    }
    return found | {w.name: w for site in _Search(model).sites for w in site.weights}


def lift(
    model: LightModel,
    names: Container[str] | None = None,
    *,
    scalars: Container[str] = (),
) -> tuple[LightModel, dict[str, Origin]]:
    """Returns a model in which all weights are initializers of the main graph.

    Lifted are floating-point Constants of the main graph, of subgraphs and of called functions;
    initializers of subgraphs; and the coefficients and intercepts of LinearRegressor and
    LinearClassifier nodes of ``ai.onnx.ml``, which are replaced by standard nodes with the same
    results in onnxruntime. A function gets one input for each of its weights, also if it is called
    several times.

    A weight has the name of its Constant node's output or of its initializer. A numeric suffix is
    added if the model uses that name in several places or for an output. In functions, the name is
    ``<function>.<output>``. Coefficients, of shape [outputs, features], and intercepts are named
    ``<node>.coefficients`` and ``<node>.intercepts``. The names do not depend on ``names``.

    Args:
        model: The model; it is not modified, but the data of big weights are added to its data.
        names: The weights to lift; by default, all except scalars. The coefficients and intercepts
            of a node are lifted together.
        scalars: Scalars to lift as well, by default.

    Returns:
        The model, which is the argument if nothing was lifted, and the origin of each lifted
        weight by name.

    Raises:
        ModelError: If a LinearClassifier or LinearRegressor node is invalid.
        UnsupportedError: If onnxruntime leaves an output of a LinearClassifier undefined.

    Example:
        >>> model = onnx.parser.parse_model('''
        ...     <ir_version: 10, opset_import: ["" : 21]> f (float[n, 2] x) => (float[n, 1] y) {
        ...         w = Constant <value = float[2, 1] {1, 2}> ()
        ...         y = MatMul (x, w)
        ...     }''')
        >>> (lifted, _), origins = lift(external.detach(model))
        >>> [node.op_type for node in lifted.graph.node], lifted.graph.initializer[0].name
        (['MatMul'], 'w')
        >>> {name: str(origin) for name, origin in origins.items()}
        {'w': "value of Constant node 'w'"}
    """
    result = onnx.ModelProto()
    result.CopyFrom(model.proto)
    search = _Search(LightModel(result, model.data))
    chosen = [site for site in search.sites if site.is_chosen(names, scalars)]
    if not chosen:
        return model, {}
    lifted = [weight for site in chosen for weight in site.weights]
    for weight in lifted:
        weight.copy_to(result.graph)
    search.pass_to_functions(chosen)
    for scope in search.scopes:
        scope.remove([site for site in chosen if site.scope is scope], search)
    result.ir_version = max(result.ir_version, _IR_VERSION)
    origins = {weight.name: weight.origin for weight in lifted}
    return LightModel(result, model.data), origins


_FunctionKey: TypeAlias = tuple[str, str, str]


@dataclass(eq=False)
class _Scope:
    """A graph or the body of a function: a namespace for values."""

    body: onnx.GraphProto | onnx.FunctionProto
    place: str
    function: onnx.FunctionProto | None

    def outputs(self) -> set[str]:
        if isinstance(self.body, onnx.FunctionProto):
            return set(self.body.output)
        return {value.name for value in self.body.output}

    def types(self) -> dict[str, onnx.TypeProto.Tensor]:
        """Returns the declared types of values, by name."""
        known = list(self.body.value_info)
        if isinstance(self.body, onnx.GraphProto):
            known += self.body.input
        return {value.name: value.type.tensor_type for value in known}

    def remove(self, sites: list[_Site], search: _Search) -> None:
        """Removes lifted nodes and initializers, and renames their readers' inputs."""
        outputs, replaced, types = self.outputs(), dict[str, str](), self.types()
        for site in reversed(sites):  # the last one first, which keeps positions valid
            name, weight = site.old, site.weights[0].name
            new: list[onnx.NodeProto] = []
            if site.linear is not None:
                search.import_standard(self.function)
                names = [each.name for each in site.weights]
                kind = types.get(site.linear.node.input[0])
                new = site.linear.nodes(names, kind, search.names, search.opset)
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
    """A node or an initializer that contains weights.

    Attributes:
        scope: Its graph or function.
        position: Its position among the nodes or the initializers of the scope.
        node: The node; None for an initializer.
        old: The weight's name in the scope.
        weights: The weights.
        linear: The linear model, if it is a node of ``ai.onnx.ml``.
    """

    scope: _Scope
    position: int
    node: onnx.NodeProto | None
    old: str
    weights: list[Weight]
    linear: LinearModel | None = None

    def is_chosen(self, names: Container[str] | None, scalars: Container[str]) -> bool:
        if names is None:
            return any(weight.shape or weight.name in scalars for weight in self.weights)
        return any(weight.name in names for weight in self.weights)


class _Search:
    """The weights of a model other than initializers of its main graph.

    Attributes:
        scopes: The graphs and the bodies of called functions, outer ones first.
        sites: The nodes and initializers that contain weights, in the order of the scopes.
        names: The names used in the model, including those of the weights.
        opset: The version of the standard operators.
    """

    def __init__(self, model: LightModel) -> None:
        self._model, proto = model, model.proto
        imports = [entry for entry in proto.opset_import if _domain(entry.domain) == ""]
        self.opset = imports[0].version if imports else MINIMUM_OPSET
        self.names = Names()
        self._functions = {_key(f.domain, f): f for f in proto.functions}
        self.scopes = list(_scopes(proto.graph, "", None))
        self._definitions = Counter[str]()  # how many graphs define each name
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
        """Returns the called functions, in the order of the model."""
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
        if isinstance(scope.body, onnx.GraphProto) and scope.body is not self._model.proto.graph:
            listed = {value.name for value in scope.body.input}
            for position, tensor in enumerate(scope.body.initializer):
                if tensor.data_type in _FLOATS and tensor.name not in listed:
                    name = self._name(tensor.name, scope, outputs)
                    origin = Origin("initializer", "", scope.place)
                    weight = _of_tensor(name, origin, tensor, self._model)
                    yield _Site(scope, position, None, tensor.name, [weight])
        for position, node in enumerate(scope.body.node):
            if any(attribute.ref_attr_name for attribute in node.attribute):
                continue
            if node.op_type == "Constant" and _domain(node.domain) == "":
                constant = self._constant(node, scope, outputs)
                if constant is not None:
                    yield _Site(scope, position, node, node.output[0], [constant])
            elif node.domain == _ML and node.op_type in ("LinearClassifier", "LinearRegressor"):
                linear = LinearModel(node)
                yield _Site(scope, position, node, "", self._parts(linear, scope), linear)

    def _name(self, name: str, scope: _Scope, outputs: set[str]) -> str:
        """Returns a name for a weight that is unique in the model."""
        if scope.function is not None:
            return self.names.unique(f"{scope.function.name}.{name}")
        if self._definitions[name] == 1 and name not in outputs:
            return name
        return self.names.unique(name)

    def _constant(self, node: onnx.NodeProto, scope: _Scope, outputs: set[str]) -> Weight | None:
        for attribute in node.attribute:
            origin = Origin(attribute.name, describe_node(node), scope.place)
            if attribute.name == "value" and attribute.t.data_type in _FLOATS:
                name = self._name(node.output[0], scope, outputs)
                return _of_tensor(name, origin, attribute.t, self._model)
            if attribute.name in ("value_floats", "value_float"):
                name = self._name(node.output[0], scope, outputs)
                shape = () if attribute.name == "value_float" else (len(attribute.floats),)
                return Weight(name, origin, shape, np.dtype(np.float32), attribute, self._model)
        return None

    def _parts(self, linear: LinearModel, scope: _Scope) -> list[Weight]:
        """Returns the coefficients of a node and, if present, the intercepts."""
        prefix = linear.node.name or linear.node.output[0]
        if scope.function is not None:
            prefix = f"{scope.function.name}.{prefix}"
        return [
            Weight(
                self.names.unique(f"{prefix}.{attribute.name}"),
                Origin(attribute.name, describe_node(linear.node), scope.place),
                shape,
                np.dtype(np.float32),
                attribute,
                self._model,
            )
            for attribute, shape in linear.parts
        ]

    def pass_to_functions(self, sites: Iterable[_Site]) -> None:
        """Adds inputs for weights to functions, and the arguments to their calls."""
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
        while growing:  # until all direct and indirect callers have the weights of a function
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
                        f"{describe_node(node)}: the function has "
                        f"{len(self._functions[called].input)} inputs, got {len(node.input)}; "
                        "correct the call"
                    )
                node.input.extend([*[""] * absent, *needed[called]])
        for key, function in self._functions.items():
            function.input.extend(needed[key])

    def import_standard(self, function: onnx.FunctionProto | None) -> None:
        """Adds the standard operators to the imports of the model and of a function."""
        for imports in (
            self._model.proto.opset_import,
            function.opset_import if function else None,
        ):
            if imports is not None and not any(_domain(entry.domain) == "" for entry in imports):
                imports.add(domain="", version=self.opset)


def _of_tensor(name: str, origin: Origin, tensor: onnx.TensorProto, model: LightModel) -> Weight:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return Weight(name, origin, tuple(tensor.dims), dtype, tensor, model)


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _key(domain: str, function: onnx.FunctionProto) -> _FunctionKey:
    return _domain(domain), function.name, function.overload


def _call(node: onnx.NodeProto) -> _FunctionKey:
    return _domain(node.domain), node.op_type, node.overload


def _scopes(
    body: onnx.GraphProto | onnx.FunctionProto, place: str, function: onnx.FunctionProto | None
) -> Iterator[_Scope]:
    """Yields a graph or function, and its subgraphs."""
    yield _Scope(body, place, function)
    for node in body.node:
        for attribute in node.attribute:
            inside = f" in {attribute.name} of {describe_node(node)}{place}"
            for graph in attribute_graphs(attribute):
                yield from _scopes(graph, inside, function)


def _defined(body: onnx.GraphProto | onnx.FunctionProto) -> set[str]:
    """Returns the names of values that a graph or function defines, without its subgraphs."""
    found = {name for node in body.node for name in node.output}
    if isinstance(body, onnx.FunctionProto):
        found.update(body.input)
    else:
        found.update(value.name for value in (*body.input, *body.initializer))
        found.update(tensor.values.name for tensor in body.sparse_initializer)
    return found - {""}


def _rename(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Renames the inputs of nodes, also in subgraphs."""
    if not names:
        return
    for node in nodes:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
        for graph in node_graphs(node):
            own = _defined(graph)
            inner = {old: new for old, new in names.items() if old not in own}
            _rename(graph.node, inner)
            for value in graph.output:
                value.name = inner.get(value.name, value.name)
