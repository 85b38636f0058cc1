"""Executing a part of a graph again on traced arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpFunction, RefAttrName
from onnx.reference.ops import load_op

from ortops.reference.operators import CONSTANT, MOVING, OPERATORS, concat
from ortops.reference.traced import Traced, Value, gradients, leaf, lift, reshape, take, value_of

Environment: TypeAlias = Mapping[str, Value | None]
Attributes: TypeAlias = Mapping[str, Any]
Node: TypeAlias = Any
"""An `onnx.reference.op_run.OpRun`, which has the attributes of its operator."""


def _bodies(node: Node) -> Iterator[ReferenceEvaluator]:
    """Yields the graphs among the attributes of a node."""
    for attribute in node.onnx_node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield getattr(node, attribute.name)


def _reads(node: Node) -> set[str]:
    """Returns the names that a node and its sub-graphs read, and what a Gradient refers to."""
    names = {name for name in node.input if name}
    if node.op_type == "Gradient":
        names.add(node.y)
    for body in _bodies(node):
        own = set(body.input_names) | set(body.rt_inits_)
        own |= {name for inner in body.rt_nodes_ for name in inner.output}
        read = set(body.output_names).union(*map(_reads, body.rt_nodes_))
        names |= read - own
    return names


def _path(nodes: Sequence[Node], starts: set[str], end: str) -> list[Node]:
    """Returns the nodes between tensors and one that is computed from them, in order."""
    needed, before = {end} - starts, []
    for node in reversed(nodes):
        if needed.intersection(node.output):
            before.append(node)
            needed |= _reads(node) - starts
    reached, found = set(starts), []
    for node in reversed(before):
        if reached & _reads(node):
            found.append(node)
            reached |= set(node.output)
    return found


def check_independence(nodes: Sequence[Node], names: Sequence[str]) -> None:
    """Refuses tensors of which one determines another: "H is not an independent variable".

    Args:
        nodes: The nodes of the scope.
        names: What xs and zs name.
    """
    for name in names:
        if _path(nodes, set(names) - {name}, name):
            raise ValueError(
                f"xs and zs must be independent, but '{name}' is computed from others of them"
            )


def _attributes(node: Node, attributes: Attributes) -> dict[str, Any]:
    """Returns the attributes of a node, also those that are the attribute of its function."""
    found = {}
    for name in node.attributes_names_:
        value = getattr(node, name)
        found[name] = attributes.get(value.name) if isinstance(value, RefAttrName) else value
    return found


def _constants(node: Node, inputs: Sequence[Value | None], attributes: Attributes) -> list[Any]:
    """Returns the outputs of a node on arrays, as the reference evaluator computes them."""
    arrays = [None if value is None else value_of(value) for value in inputs]
    linked = {"linked_attributes": dict(attributes)} if node.has_linked_attribute else {}
    return list(node.run(*arrays, **linked))


def _moved(node: Node, inputs: Sequence[Value | None], attributes: Attributes) -> list[Value]:
    """Returns the outputs of a node that moves elements, by moving their positions."""
    x, *others = inputs
    traced = lift(x)  # type: ignore[arg-type]
    positions = np.arange(traced.value.size).reshape(traced.shape)
    return [take(traced, index) for index in _constants(node, [positions, *others], attributes)]


def _of_schema(
    node: onnx.NodeProto, types: Sequence[onnx.TypeProto], run_params: dict[str, Any]
) -> OpFunction:
    """Returns a node of ONNX's preview domain as the function by which its schema defines it."""
    schema: Any = onnx.defs.get_schema(node.op_type, domain=node.domain)
    text = schema.get_context_dependent_function_with_opset_version(
        schema.context_dependent_function_opset_versions[0],
        node.SerializeToString(),
        [kind.SerializeToString() for kind in types],
    )
    body = onnx.FunctionProto.FromString(text)
    del body.attribute[:]  # whose graphs are in the body
    if not any(entry.domain == "" for entry in body.opset_import):
        body.opset_import.append(onnx.helper.make_opsetid("", run_params["opsets"][""]))
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.attribute[:]
    return OpFunction(bare, run_params, impl=ReferenceEvaluator(body), attributes={})


class _Replay:
    """Nodes of one scope that are executed again.

    Attributes:
        nodes: The nodes of the scope, those of outer graphs first.
        attributes: The attributes of the function that the nodes are in.
    """

    def __init__(self, nodes: Sequence[Node], attributes: Attributes) -> None:
        self.nodes = nodes
        self.attributes = attributes

    def run(self, nodes: Iterable[Node], known: Environment) -> dict[str, Value | None]:
        """Returns all tensors after nodes were executed."""
        values: dict[str, Value | None] = {"": None, **known}
        for node in nodes:
            inputs = [values[name] for name in node.input]
            outputs = self._outputs(node, inputs, values)
            pairs = zip(node.output, outputs, strict=False)
            values |= {name: value for name, value in pairs if name}
        return values

    def _outputs(
        self, node: Node, inputs: Sequence[Value | None], values: Environment
    ) -> Sequence[Value | None]:
        kind = node.op_type
        if kind == "Gradient":
            return self.gradient(node, inputs, values)
        if isinstance(node, OpFunction):
            return self._function(node, inputs)
        if kind in ("If", "Loop", "Scan"):
            run = {"If": self._if, "Loop": self._loop, "Scan": self._scan}[kind]
            return run(node, inputs, values)
        if kind in CONSTANT or not any(isinstance(value, Traced) for value in inputs):
            return _constants(node, inputs, self.attributes)
        if kind == "Cast" and not np.issubdtype(
            onnx.helper.tensor_dtype_to_np_dtype(node.to), np.floating
        ):
            return _constants(node, inputs, self.attributes)
        if kind in MOVING:
            return _moved(node, inputs, self.attributes)
        if kind == "Concat":
            return [concat([value for value in inputs if value is not None], node.axis)]
        if kind in OPERATORS:
            traced = [None if value is None else lift(value) for value in inputs]
            return [OPERATORS[kind](*traced, **_attributes(node, self.attributes))]
        return self._function(self._expanded(node, inputs), inputs)

    def _expanded(self, node: Node, inputs: Sequence[Value | None]) -> OpFunction:
        """Returns a node as the function by which ONNX defines its operator."""
        opsets = node.run_params["opsets"]
        # The body depends on which attributes there are: none may be that of a function.
        own = onnx.NodeProto()
        own.CopyFrom(node.onnx_node)
        del own.attribute[:]
        for attribute in node.onnx_node.attribute:
            if not attribute.ref_attr_name:
                own.attribute.append(attribute)
            elif (value := self.attributes.get(attribute.ref_attr_name)) is not None:
                own.attribute.append(onnx.helper.make_attribute(attribute.name, value))
        types = [
            onnx.TypeProto()
            if value is None
            else onnx.helper.make_tensor_type_proto(
                onnx.helper.np_dtype_to_tensor_dtype(value_of(value).dtype), value_of(value).shape
            )
            for value in inputs
        ]
        if node.domain == "ai.onnx.preview":
            return _of_schema(own, types, node.run_params)
        try:
            made = load_op(
                node.domain,
                node.op_type,
                opsets[node.domain],
                node=own,
                input_types=types,
                expand=True,
                evaluator_cls=ReferenceEvaluator,
            )
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotImplementedError(
                f"{node.op_type} node '{node.onnx_node.name or node.output[0]}': the reference has "
                "no derivative of this operator"
            ) from error
        found: OpFunction = made(own, node.run_params)
        return found

    def _function(self, node: OpFunction, inputs: Sequence[Value | None]) -> list[Value | None]:
        body = node.impl_
        own = {
            name: self.attributes.get(value.name) if isinstance(value, RefAttrName) else value
            for name, value in node.attributes_.items()
        }
        known = dict(
            zip(body.input_names, [*inputs, *[None] * len(body.input_names)], strict=False)
        )
        values = _Replay(body.rt_nodes_, own).run(body.rt_nodes_, {**body.rt_inits_, **known})
        # an optional output that the node does not have is not computed
        return [values.get(name) for name in body.output_names]

    def _body(self, body: ReferenceEvaluator, values: Environment) -> list[Value | None]:
        """Returns the outputs of a sub-graph, which reads tensors of the graphs around it."""
        inner = _Replay([*self.nodes, *body.rt_nodes_], self.attributes)
        results = inner.run(body.rt_nodes_, {**values, **body.rt_inits_})
        return [results[name] for name in body.output_names]

    def _if(
        self, node: Node, inputs: Sequence[Value | None], values: Environment
    ) -> list[Value | None]:
        [condition] = inputs
        chosen = bool(value_of(condition).item())  # type: ignore[arg-type]
        return self._body(node.then_branch if chosen else node.else_branch, values)

    def _loop(
        self, node: Node, inputs: Sequence[Value | None], values: Environment
    ) -> list[Value | None]:
        limit, go, *carried = inputs
        body = node.body
        collected: list[list[Value]] = [[] for _ in body.output_names[1 + len(carried) :]]
        count = 0
        while (limit is None or count < value_of(limit).item()) and (
            go is None or value_of(go).item()
        ):
            fed = [np.asarray(count), np.asarray(True) if go is None else go, *carried]
            known = {**values, **dict(zip(body.input_names, fed, strict=True))}
            go, *results = self._body(body, known)
            carried = results[: len(carried)]
            for parts, value in zip(collected, results[len(carried) :], strict=True):
                parts.append(value)  # type: ignore[arg-type]
            count += 1
        return [*carried, *(_stack(parts) for parts in collected)]

    def _scan(
        self, node: Node, inputs: Sequence[Value | None], values: Environment
    ) -> list[Value | None]:
        body = node.body
        count = len(inputs) - node.num_scan_inputs
        states = list(inputs[:count])
        sequences = [lift(value) for value in inputs[count:]]  # type: ignore[arg-type]
        positions = [np.arange(s.value.size).reshape(s.shape) for s in sequences]
        collected: list[list[Value]] = [[] for _ in body.output_names[count:]]
        for step in range(sequences[0].shape[0]):
            slices = [take(s, p[step]) for s, p in zip(sequences, positions, strict=True)]
            known = {**values, **dict(zip(body.input_names, [*states, *slices], strict=True))}
            results = self._body(body, known)
            states = results[:count]
            for parts, value in zip(collected, results[count:], strict=True):
                parts.append(value)  # type: ignore[arg-type]
        return [*states, *(_stack(parts) for parts in collected)]

    def gradient(
        self, node: Node, inputs: Sequence[Value | None], values: Environment
    ) -> list[Value]:
        """Returns the outputs of a Gradient node.

        The sub-graph between the tensors named in ``xs`` and ``zs`` and the one named in ``y`` is
        executed at the inputs. All else keeps the values that it has.
        """
        zs = node.zs or []
        xs = [leaf(value) for value in inputs[: len(node.xs)] if value is not None]
        starts = dict(zip([*node.xs, *zs], [*xs, *inputs[len(xs) :]], strict=True))
        path = _path(self.nodes, set(starts), node.y)
        results = self.run(path, {**values, **starts})
        y = results[node.y]
        if not isinstance(y, Traced):  # no operator between them has a derivative
            return [Traced(np.zeros_like(x.value)) for x in xs]
        return list(gradients(y, xs))


def _stack(parts: Sequence[Value]) -> Traced:
    """Returns what the iterations put out, along a new first axis."""
    rows = [reshape(lift(part), (1, *value_of(part).shape)) for part in parts]
    return concat(rows, 0)


def differentiate(
    node: Node,
    nodes: Sequence[Node],
    inputs: Sequence[Any],
    values: Mapping[str, Any],
    attributes: Attributes,
) -> list[Any]:
    """Returns the outputs of a Gradient node, as arrays.

    Args:
        node: The node.
        nodes: The nodes that it can refer to, in order.
        inputs: Its inputs.
        values: All tensors that are known where it stands, by name.
        attributes: The attributes of the function that it is in.
    """
    replay = _Replay(nodes, attributes)
    return [value_of(value) for value in replay.gradient(node, inputs, values)]
