"""What of a model can be trained, and what stands in the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from ortops.autodiff.expansion import expand
from ortops.autodiff.gradient_node import Bound, lower_gradient
from ortops.autodiff.registry import StructuralRule, ZeroRule
from ortops.autodiff.rules import RULES
from ortops.errors import OrtopsError
from ortops.graph import convert
from ortops.graph.convert import ModelLike
from ortops.graph.edit import describe, inner_graphs, is_float
from ortops.graph.shapes import infer_shapes
from ortops.graph.tensor import Names
from ortops.lowering import lower_prepared, prepare

__all__ = ["Report", "check"]


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        opset: The model's opset.
        converted_to: The opset that it is converted to before it is differentiated, or None.
        parameters: Floating-point initializers from which a gradient path leads to an output, with
            their types and shapes as text.
        constants: Floating-point initializers from which none does.
        inputs: Floating-point inputs from which one does.
        other_inputs: Inputs from which none does.
        parameter_count: How many numbers the parameters hold.
        problems: What stands in the way: operators without a rule, node by node.
    """

    opset: int
    converted_to: int | None = None
    parameters: dict[str, str] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    other_inputs: list[str] = field(default_factory=list)
    parameter_count: int = 0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"opset {self.opset}"]
        if self.converted_to is not None:
            lines[0] += f", converted to {self.converted_to} before it is differentiated"
        lines.append(
            f"{len(self.parameters)} parameters with a gradient, "
            f"{self.parameter_count:,} numbers in all"
        )
        lines += [f"  {name}  {kind}" for name, kind in self.parameters.items()]
        for title, names in (
            ("inputs with a gradient", self.inputs),
            ("inputs without one", self.other_inputs),
            ("floating-point initializers without one", self.constants),
        ):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        if self.problems:
            lines.append(f"{len(self.problems)} problems:")
            lines += [f"  {problem}" for problem in self.problems]
        else:
            lines.append("nothing stands in the way of training")
        return "\n".join(lines)


@convert.blame_model
def check(model: ModelLike) -> Report:
    """Tells what of a model can be trained.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.

    Returns:
        A report; ``str(report)`` is what ``ortops check`` prints.

    Raises:
        ModelError: If it is not a legal model, or it cannot be converted to an opset that rules
            are written for.

    Example:
        >>> import numpy as np
        >>> from ortops import Tape
        >>> with Tape(name="linear") as tape:
        ...     x = tape.input("x", np.float32, ["batch", 2])
        ...     y = tape.output(x @ tape.initializer("w", np.ones((2, 3), np.float32)), "y")
        >>> print(check(tape.model()))
        opset 21
        1 parameters with a gradient, 6 numbers in all
          w  FLOAT[2,3]
        inputs with a gradient: x
        nothing stands in the way of training
    """
    proto, folder = convert.load(model)
    work = convert.to_ir(proto, folder)
    opset = work.graph.opset_imports[""]
    work = prepare(work)
    refused = _take_apart(work)
    graph = work.graph
    given = {value.name for value in proto.graph.initializer}
    inputs = [value for value in graph.inputs if value.name not in given]
    initializers = [value for name, value in graph.initializers.items() if name in given]
    floats = [value for value in (*inputs, *initializers) if is_float(value)]
    reached: set[ir.Value] = set()
    for output in graph.outputs:
        if is_float(output):
            reached |= RULES.ancestors(output)
    active = RULES.active_values(graph, floats)
    parameters = [value for value in initializers if value in floats and value in reached]
    problems = refused or [
        _problem(node)
        for node in graph
        if not reached.isdisjoint(node.outputs) and not active.isdisjoint(node.outputs)
        for node in _with_inner(node)
        if not _is_differentiable(node)
    ]
    if not problems and parameters:
        problems = _failures(work, parameters)
    return Report(
        opset=opset,
        converted_to=None if opset >= convert.MINIMUM_OPSET else convert.MINIMUM_OPSET,
        parameters={value.name or "": f"{value.dtype}{value.shape}" for value in parameters},
        constants=[v.name or "" for v in initializers if v in floats and v not in reached],
        inputs=[v.name or "" for v in inputs if v in floats and v in reached],
        other_inputs=[v.name or "" for v in inputs if v not in floats or v not in reached],
        parameter_count=sum(math.prod(_shape(value)) for value in parameters),
        problems=problems,
    )


def _take_apart(work: ir.Model) -> list[str]:
    """Lowers, in place, the training domain, and takes apart what has a definition and no rule.

    Returns:
        What cannot be.
    """
    try:
        lower_prepared(work)
        if expand(work, RULES, everywhere=True):
            infer_shapes(work)
    except OrtopsError as error:
        return [str(error)]
    return []


def _shape(value: ir.Value) -> tuple[int, ...]:
    return () if value.const_value is None else tuple(value.const_value.shape.numpy())


def _with_inner(node: ir.Node) -> Iterator[ir.Node]:
    """Yields a node and the nodes of the graphs inside it."""
    yield node
    for graph in inner_graphs(node):
        for inner in graph:
            yield from _with_inner(inner)


def _is_differentiable(node: ir.Node) -> bool:
    """Whether a node has a rule that takes all its attributes, or passes no gradient by nature."""
    rule = RULES.find(node)
    if isinstance(rule, ZeroRule | StructuralRule):
        return True
    if not any(is_float(value) for value in node.inputs if value is not None):
        return not node.inputs or rule is not None
    return rule is not None and set(node.attributes) <= rule.attributes


def _problem(node: ir.Node) -> str:
    rule = RULES.find(node)
    if rule is None:
        where = f" of domain '{node.domain}'" if node.domain else ""
        return f"{describe(node)}: there is no gradient rule for {node.op_type}{where}"
    assert not isinstance(rule, ZeroRule | StructuralRule)
    unknown = sorted(set(node.attributes) - rule.attributes)
    return (
        f"{describe(node)}: the gradient rule does not take attribute '{unknown[0]}' into account"
    )


def _failures(work: ir.Model, parameters: list[ir.Value]) -> list[str]:
    """Differentiates the first output and returns what goes wrong."""
    graph = work.graph
    names = Names(graph)
    y = next(value for value in graph.outputs if is_float(value))
    node = Bound.make(
        parameters, parameters, [], y, num_outputs=len(parameters), name=names.unique("Gradient")
    ).node
    for value, output in zip(parameters, node.outputs, strict=True):
        output.name = names.unique(f"{value.name}_gradient")
    graph.append(node)
    graph.outputs.extend(node.outputs)
    try:
        lower_gradient(node, names, RULES)
    except OrtopsError as error:
        return [str(error)]
    return []
