"""A teacher model inside a loss; its weights are constants of the training algorithm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortops.errors import ModelError
from ortops.graph import convert
from ortops.graph.autodiff.gradient_node import GRADIENT_DOMAINS
from ortops.graph.edit import all_nodes, copy_node, describe, rename_within
from ortops.graph.files.external import Reference
from ortops.graph.files.loading import ModelLike
from ortops.graph.nesting import inner_graphs
from ortops.graph.shapes import infer_shapes, may_be_equal
from ortops.graph.tensor import Tape, Tensor


@dataclass(frozen=True)
class Teacher:
    """A model that was added to a tape.

    Attributes:
        values: Its tensors, by their names in its file.
        outputs: Its outputs.
        constants: Its weights, now initializers of the tape's graph.
    """

    values: dict[str, ir.Value]
    outputs: Sequence[ir.Value]
    constants: list[Tensor]


def put_teacher(tape: Tape, model: ModelLike, find: Callable[[str], Tensor | None]) -> Teacher:
    """Adds a model, in inference mode, to a tape.

    Args:
        tape: Receives the nodes.
        model: The model; not changed.
        find: Returns a tensor of the student by name. Inputs of the teacher are connected by name.

    Raises:
        ModelError: If the model is invalid, or incompatible with the student.
    """
    work = convert.to_ir(convert.load_light(model))
    convert.inline(work)
    work = convert.upgrade(work)
    infer_shapes(work)
    graph = work.graph
    _check_operators(graph, tape)
    copies: dict[ir.Value, ir.Value] = {}
    constants: list[Tensor] = []
    for name, value in graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        weight = ir.Value(
            name=tape.names.unique(f"teacher/{name}"),
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape.numpy()),
        )
        weight.const_value = Reference(tensor, weight.name)
        tape.graph.register_initializer(weight)
        constants.append(tape.tensor(weight))
        copies[value] = weight
    for value in graph.inputs:
        if value not in copies:
            copies[value] = _input(value, find)
    for node in list(graph):
        for inner in inner_graphs(node):
            rename_within(inner, tape.names, "teacher/")
        copy = copy_node(node, copies)
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            if old.name:
                new.name = tape.names.unique(f"teacher/{old.name}")
            copies[old] = new
        tape.append(copy)
    values = {old.name or "": new for old, new in copies.items()}
    return Teacher(values, [copies[value] for value in graph.outputs], constants)


def _check_operators(graph: ir.Graph, tape: Tape) -> None:
    """Raises an error for other operator versions than the student's, and training operators."""
    for node in all_nodes(graph):
        if node.domain in GRADIENT_DOMAINS:
            raise ModelError(
                f"teacher: {describe(node)} has the training domain '{node.domain}'; lower the "
                "teacher with ortops.lower"
            )
    for domain, version in graph.opset_imports.items():
        own = tape.graph.opset_imports.setdefault(domain, version)
        if own != version:
            where = f"of domain '{domain}'" if domain else "of the standard domain"
            raise ModelError(
                f"teacher: its operators {where} have version {version}, the student's {own}; "
                "export both with the same opset"
            )


def _input(value: ir.Value, find: Callable[[str], Tensor | None]) -> ir.Value:
    """Returns the student's tensor for an input of the teacher."""
    found = find(value.name or "")
    if found is None:
        raise ModelError(
            f"teacher: its input '{value.name}' does not exist in the student; rename it, or feed "
            "the teacher's logits as an input"
        )
    if found.value.dtype != value.dtype or not may_be_equal(found.value.shape, value.shape):
        raise ModelError(
            f"teacher: its input '{value.name}' is {value.dtype}{value.shape}, the student's "
            f"{found.value.dtype}{found.value.shape}; both must be the same"
        )
    return found.value
