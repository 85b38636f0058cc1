"""Gives each node that reads a shared weight its own copy, or nodes with copies a shared weight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortops._common.arguments import text
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph.files import loading
from ortops.graph.files.json_metadata import read_metadata
from ortops.graph.files.loading import ModelLike
from ortops.graph.names import Names
from ortops.surgery.branches import TWINS_KEY
from ortops.surgery.reading import Array, logger, read, refuse_training


@loading.blame_model
def untie(model: ModelLike, names: str | Sequence[str] | None = None) -> onnx.ModelProto:
    """Returns a model in which each node that reads a shared weight has its own copy.

    PyTorch's dynamo exporter stores equal parameters once. In a model that was not trained before
    its export, biases of zeros and scales of ones are equal, so that layers share them and training
    changes them together. The untied model computes the same.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        names: The initializers to untie. By default, all floating-point vectors and matrices whose
            elements are all the same number; other weights that several nodes read are probably
            meant to be tied, as embeddings and output layers are.

    Returns:
        A new model. The first reader keeps the initializer; the others read ``<name>.1``,
        ``<name>.2`` and so on, in the order of the nodes.

    Raises:
        ArgumentError: If ``names`` are not names.
        ModelError: If there is no such initializer, if it is not floating-point, if only one node
            reads it, or if the model has a training algorithm.

    Example:
        >>> import numpy as np
        >>> from ortops import Tape
        >>> with Tape(name="tied") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 2])
        ...     bias = tape.initializer("bias", np.zeros(2, np.float32))
        ...     y = tape.output((x + bias) * 2 + bias, "y")
        >>> [tensor.name for tensor in untie(tape.model()).graph.initializer if tensor.dims]
        ['bias', 'bias.1']
    """
    work, proto, _ = read(model)
    refuse_training(proto, "untie the model that it was built from, and build again")
    graph = work.graph
    known = {name: value for name, value in graph.initializers.items() if _is_float(value)}
    if names is None:
        chosen = [name for name, value in known.items() if len(value.uses()) > 1 and _is_one(value)]
    else:
        chosen = _checked(names, known)
    taken = Names(graph)
    added = 0
    for name in chosen:
        value = known[name]
        assert value.const_value is not None
        array = value.const_value.numpy()
        places = {node: place for place, node in enumerate(graph)}
        uses = sorted(value.uses(), key=lambda use: (places.get(use.node, len(places)), use.idx))
        for number, use in enumerate(uses[1:], 1):
            own = taken.unique(f"{name}.{number}")
            copy = ir.Value(
                name=own,
                type=value.type,
                shape=value.shape,
                const_value=ir.Tensor(array.copy(), dtype=value.const_value.dtype, name=own),
            )
            graph.register_initializer(copy)
            use.node.replace_input_with(use.idx, copy)
            added += 1
    if added:
        work.ir_version = max(work.ir_version, 4)  # before, all initializers had to be inputs
    first = f", such as '{chosen[0]}'" if chosen else ""
    logger.warning("untied %d weights%s: %d copies were added", len(chosen), first, added)
    result: onnx.ModelProto = ir.to_proto(work)
    return result


@loading.blame_model
def tie(model: ModelLike, names: Sequence[str]) -> onnx.ModelProto:
    """Returns a model in which copies of a weight are one weight, which is trained as one.

    PyTorch's exporters may write a tied weight several times: the embedding and the output layer of
    BERT or GPT-2, where one is transposed, or four copies in DeBERTa. Building a training model
    says which. The tied model computes the same. ``session.inference_model(original=…)`` writes the
    trained weight to all of its copies in the original.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        names: The initializers that are copies of each other, at least two. The first one remains;
            the readers of a transposed copy read its Transpose.

    Returns:
        A new model.

    Raises:
        ArgumentError: If ``names`` are not names.
        ModelError: If there is no such initializer, if its elements are not those of the first one,
            if it is an output, or if the model has a training algorithm.

    Example:
        >>> import numpy as np
        >>> from ortops import Tape, op
        >>> table = np.arange(6, dtype=np.float32).reshape(3, 2)
        >>> with Tape(name="copies") as tape:
        ...     x = op.Gather(tape.initializer("embedding", table), tape.input("x", np.int64, [4]))
        ...     y = tape.output(x @ tape.initializer("head", table.T), "y")
        >>> tied = tie(tape.model(), ["embedding", "head"])
        >>> [tensor.name for tensor in tied.graph.initializer], tied.graph.node[0].op_type
        (['embedding'], 'Transpose')
    """
    work, proto, _ = read(model)
    refuse_training(proto, "tie the model that it was built from, and build again")
    graph = work.graph
    known = {name: value for name, value in graph.initializers.items() if _is_float(value)}
    first, *others = _listed(names, known)
    if not others:
        raise ArgumentError(f"names must be at least two names of copies, got {names!r:.80}")
    twins: dict[str, list[Any]] = read_metadata(proto.metadata_props, TWINS_KEY, "tie again") or {}
    kept, turned = known[first], None
    for name in others:
        value, array, own = known[name], *(_array(known[each]) for each in (first, name))
        is_equal = np.array_equal(array, own) and array.dtype == own.dtype
        if not is_equal and not (array.dtype == own.dtype and np.array_equal(array.T, own)):
            raise ModelError(
                f"names: '{name}' {own.dtype}{list(own.shape)} is neither a copy of '{first}' "
                f"{array.dtype}{list(array.shape)} nor a transposed one, so tying changes the model"
            )
        if value.is_graph_output():
            raise ModelError(f"names: '{name}' is an output of the model; name it first")
        if not is_equal:
            turned = turned or _transposed(graph, kept)
        source = kept if is_equal or turned is None else turned
        ir.convenience.replace_all_uses_with(value, source)
        del graph.initializers[name]
        if value in graph.inputs:
            graph.inputs.remove(value)
        twins.setdefault(first, []).append(name if is_equal else [name])
        inner = twins.pop(name, [])
        flipped = [each[0] if isinstance(each, list) else [each] for each in inner]
        twins[first] += inner if is_equal else flipped
    work.metadata_props[TWINS_KEY] = json.dumps(twins)
    logger.warning("tied %s to '%s'", ", ".join(f"'{name}'" for name in others), first)
    result: onnx.ModelProto = ir.to_proto(work)
    return result


def _array(value: ir.Value) -> Array:
    assert value.const_value is not None
    return value.const_value.numpy()


def _transposed(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Adds the Transpose of a weight in front of all nodes, and returns it."""
    node = ir.node("Transpose", [value])
    node.name = node.outputs[0].name = Names(graph).unique(f"{value.name}.transposed")
    node.outputs[0].type = value.type
    assert value.shape is not None
    node.outputs[0].shape = ir.Shape(reversed(value.shape.dims))
    graph.insert_before(graph[0], node)
    return node.outputs[0]


def _checked(names: str | Sequence[str], known: dict[str, ir.Value]) -> list[str]:
    """Returns the names, if each is that of a weight that several nodes read."""
    listed = _listed(names, known)
    for name in listed:
        if len(known[name].uses()) < 2:
            raise ModelError(f"names: fewer than two nodes read '{name}'; leave it out")
    return listed


def _listed(names: str | Sequence[str], known: dict[str, ir.Value]) -> list[str]:
    """Returns the names, each once, if each is that of a weight."""
    listed = [names] if isinstance(names, str) else names
    if not isinstance(listed, Sequence):
        raise ArgumentError(f"names must be a list of names of initializers, got {names!r:.80}")
    for name in listed:
        text("names", name, "names of initializers")
        if name not in known:
            raise ModelError(
                f"names: the model has no floating-point initializer '{name}'; "
                + did_you_mean(name, known)
            )
    return list(dict.fromkeys(listed))


def _is_float(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.dtype.is_floating_point()


def _is_one(value: ir.Value) -> bool:
    """Whether all elements, at least two, are the same number."""
    tensor = value.const_value
    if tensor is None or tensor.size < 2:
        return False
    array = tensor.numpy()
    return bool(np.all(array == array.flat[0]))
