"""Separates the nodes that read strings from a training step.

onnxruntime cannot bind strings to memory, so such nodes, as vectorizers of text have them, run in a
session of their own before the step. The numbers that they compute are inputs of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from ortops._common.numbers import Array
from ortops.engine.execution.onnxruntime_sessions import run_session
from ortops.engine.execution.providers import CPU
from ortops.engine.execution.step import Step
from ortops.engine.inference import InferenceSession, open_lowered
from ortops.errors import UnsupportedError
from ortops.graph.autodiff.gradient_node import Bound, is_bound
from ortops.graph.edit import ancestor_nodes, describe, prune, read_inputs
from ortops.graph.files.serialization import to_proto


@dataclass(frozen=True)
class _Front:
    """The nodes of a step that read strings, on the CPU.

    Attributes:
        session: Computes numbers from strings.
        replaced: The inputs of strings.
        numbers: The outputs.
    """

    session: InferenceSession
    replaced: frozenset[str]
    numbers: tuple[str, ...]

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the numbers for a batch.

        Raises:
            KernelError: If a kernel failed.
        """
        return run_session(self.session, feeds, self.numbers)


def separate_strings(step: Step) -> tuple[Step, _Front | None]:
    """Removes the nodes that read strings from a step, in place.

    Args:
        step: The step. Tensors that nodes before the numbers compute are no longer outputs.

    Returns:
        The step, and what computes the numbers that it reads; None if it reads no strings.

    Raises:
        UnsupportedError: If the nodes cannot run before the step.
    """
    graph = step.model.graph
    texts = [v for v in graph.inputs if v.dtype == ir.DataType.STRING and v.name in step.feeds]
    if not texts:
        return step, None
    numbers = _numbers(graph, texts)
    front = _front(step, numbers)
    inside = ancestor_nodes(numbers, set())
    hidden = {value.name for node in inside for value in node.outputs}
    _forget_strings(graph, texts)
    for old in [value for value in graph.outputs if value.name in hidden]:
        graph.outputs.remove(old)
    for old in numbers:
        new = ir.Value(name=old.name, type=old.type, shape=old.shape)
        old.replace_all_uses_with(new)
        graph.inputs.append(new)
    for text in texts:
        graph.inputs.remove(text)
    prune(graph)
    feeds = [v.name or "" for v in graph.inputs if v.name not in step.variables]
    shown = [name for name in step.outputs if name not in hidden]
    return replace(step, feeds=feeds, outputs=shown), front


def _numbers(graph: ir.Graph, texts: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the tensors that nodes compute from strings and that are not strings themselves."""
    strings, numbers = set(texts), list[ir.Value]()
    for node in graph:
        if is_bound(node) or strings.isdisjoint(read_inputs(node)):
            continue
        for value in node.outputs:
            if value.dtype is None and value.uses():
                raise UnsupportedError(
                    f"model: {describe(node)} reads strings, and the type of its output "
                    f"'{value.name}' is unknown; add a value_info for it"
                )
            if value.dtype == ir.DataType.STRING:
                strings.add(value)
            elif value.uses() or value.is_graph_output():
                numbers.append(value)
    return numbers


def _front(step: Step, numbers: Sequence[ir.Value]) -> _Front:
    """Returns what computes numbers from strings.

    Raises:
        UnsupportedError: If it reads what training changes, or onnxruntime lacks a kernel.
    """
    model = step.model.clone()
    graph, names = model.graph, tuple(value.name or "" for value in numbers)
    made = {value.name: value for node in graph for value in node.outputs}
    graph.outputs[:] = [made[name] for name in names]
    prune(graph)
    for value in graph.inputs:
        if value.name in step.variables:
            reader = next(iter(value.uses())).node
            raise UnsupportedError(
                f"model: {describe(reader)} computes from strings, and from '{value.name}', which "
                "training changes; leave it out of trainable="
            )
    texts = frozenset(v.name or "" for v in graph.inputs if v.dtype == ir.DataType.STRING)
    return _Front(open_lowered(to_proto(model), None, [(CPU, {})]), texts, names)


def _forget_strings(graph: ir.Graph, texts: Sequence[ir.Value]) -> None:
    """Removes strings from what Gradient nodes name: a loss has no gradient with respect to them.

    Raises:
        UnsupportedError: If a gradient is evaluated at other strings than those of the batch.
    """
    for node in [each for each in graph if is_bound(each)]:
        if not Bound.of(node).forget(texts):
            raise UnsupportedError(
                f"model: {describe(node)} evaluates a gradient at other strings than those of the "
                "batch; name the strings themselves in zs and as inputs"
            )
