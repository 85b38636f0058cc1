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
from ortops.graph.autodiff.gradient_node import Bound, is_bound, name_attributes
from ortops.graph.edit import ancestor_nodes, describe, prune, read_inputs
from ortops.graph.files.serialization import to_proto


@dataclass(frozen=True)
class _Front:
    """The nodes of a step that read strings, on the CPU.

    Attributes:
        session: Computes numbers from strings.
        texts: The inputs of strings.
        numbers: The outputs.
    """

    session: InferenceSession
    texts: frozenset[str]
    numbers: tuple[str, ...]


class StringFront:
    """Computes the numbers that training steps read instead of strings.

    Args:
        fronts: The nodes of each step that read strings; None for a step without any.
    """

    def __init__(self, fronts: Sequence[_Front | None]) -> None:
        self._all = fronts
        self._fronts = [front for front in fronts if front is not None]

    def only(self, index: int) -> StringFront:
        """Returns what computes the numbers of one of the steps, with the same session."""
        return StringFront([self._all[index]])

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Returns a checked batch, with numbers instead of strings.

        Args:
            feeds: The batch.

        Raises:
            KernelError: If a kernel failed.
        """
        texts = frozenset[str]().union(*(front.texts for front in self._fronts))
        found = {name: array for name, array in feeds.items() if name not in texts}
        for front in self._fronts:
            found |= run_session(front.session, feeds, front.numbers)
        return found


def separate_strings(steps: Sequence[Step]) -> tuple[list[Step], StringFront | None]:
    """Removes the nodes that read strings from steps, in place.

    Args:
        steps: The steps. Tensors that nodes before the numbers compute are no longer outputs.

    Returns:
        The steps, and what computes the numbers that they read; None if they read no strings.

    Raises:
        UnsupportedError: If the nodes cannot run before the step.
    """
    found = [_separate(step) for step in steps]
    fronts = [front for _, front in found]
    return [step for step, _ in found], StringFront(fronts) if any(fronts) else None


def _separate(step: Step) -> tuple[Step, _Front | None]:
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
        bound = Bound.of(node)
        if set(texts).isdisjoint((*bound.fed, *bound.zs)):
            continue
        pairs = list(zip(bound.fed, bound.named, strict=True))
        if any(fed is not named for fed, named in pairs if {fed, named} & set(texts)):
            raise UnsupportedError(
                f"model: {describe(node)} evaluates a gradient at other strings than those of the "
                "batch; name the strings themselves in zs and as inputs"
            )
        kept = [(fed, named) for fed, named in pairs if named not in texts]
        fed, named = [one for one, _ in kept], [other for _, other in kept]
        values = [*fed, *named, bound.y]
        for index, value in enumerate(values):
            node.replace_input_with(index, value)
        node.resize_inputs(len(values))
        count = len(bound.xs)
        for attribute in name_attributes(bound.xs, named[count:], bound.y):
            node.attributes[attribute.name] = attribute
