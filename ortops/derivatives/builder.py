"""Adds derivatives to a model: the tensors that are differentiated, seed inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from ortops._common.arguments import whole_number
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.graph.constants import Dim
from ortops.graph.edit import describe, is_float, values_of
from ortops.graph.names import Names
from ortops.graph.nesting import inner_graphs
from ortops.graph.tensor import Tape, Tensor, op
from ortops.losses.scene import default_output

Formula: TypeAlias = Callable[..., Sequence[Tensor]]
"""Emits derivatives on a tape, given the seeds."""

_SEEDS = "seeds"


class Builder:
    """Adds derivatives to a model.

    Args:
        model: A normalized model with inferred types; derivatives are added to it.
        xs: See `ortops.derivatives.gradient`.
        y: See `ortops.derivatives.gradient`.
        seeds: See `ortops.derivatives.vjp`.
        taken: Names that new tensors must not have, in addition to those in the graph.
        arguments: What messages call ``xs`` and ``y``.
        added: The inputs that a loss added, which are not among the xs by default.

    Attributes:
        model: The model.
        tape: The tape for new nodes.
        xs: The tensors to differentiate with respect to.
        ys: The tensors to differentiate.
    """

    def __init__(
        self,
        model: ir.Model,
        xs: str | Sequence[str] | None,
        y: str | Sequence[str] | None,
        seeds: int | bool | None = None,
        taken: Iterable[str] = (),
        arguments: tuple[str, str] = ("xs", "y"),
        added: Collection[str] = (),
    ) -> None:
        if seeds is False:
            seeds = None
        what = "seeds (a number, True or None)"
        self._seeds = seeds if seeds is None or seeds is True else whole_number(what, seeds, 1)
        self.model = model
        self._xs_name, self._y_name = arguments
        self._added = added
        names = Names(model.graph)
        for name in taken:
            names.take(name)
        self.tape = Tape(model.graph, names=names)
        self.ys = [self.tape.tensor(value) for value in self._ys(y)]
        self.xs = [self.tape.tensor(value) for value in self._xs(xs)]

    def put_out(self, tensor: Tensor, name: str) -> str:
        """Makes a tensor an output, and returns its name: ``name``, or with a suffix if in use."""
        return self.tape.output(tensor, name).value.name or ""

    def for_seeds(self, likes: Sequence[Tensor], formula: Formula) -> Sequence[Tensor]:
        """Adds a seed input for each tensor, and returns the derivatives for these seeds."""
        axis: list[Dim] = []
        if self._seeds is True:
            axis = [self._symbol()]
        elif self._seeds is not None:
            axis = [self._seeds]
        inputs = []
        for like in likes:
            shape = None if like.shape is None else [*axis, *like.shape]
            inputs.append(self.tape.input(f"seed_{like.name}", like.dtype, shape))
        return for_each(self.tape, inputs, formula) if axis else formula(self.tape, *inputs)

    def _symbol(self) -> str:
        """Returns a name for a symbolic dimension that the model does not use."""
        taken = Names()
        for value in (*self.tape.graph.inputs, *(each.value for each in (*self.xs, *self.ys))):
            for dim in value.shape or ():
                taken.take(str(dim))
        return taken.unique(_SEEDS)

    def _ys(self, names: str | Sequence[str] | None) -> Sequence[ir.Value]:
        if names is not None:
            return self._named(self._y_name, names)
        graph = self.tape.graph
        value = default_output(graph.outputs)
        if value is None:
            listed = ", ".join(f"'{v.name}' ({v.type or 'unknown'})" for v in graph.outputs)
            raise ModelError(
                f"{self._y_name}: the model has no floating-point output, only {listed}; pass the "
                f"name of another tensor as {self._y_name}="
            )
        return [self._checked(self._y_name, value)]

    def _xs(self, names: str | Sequence[str] | None) -> Sequence[ir.Value]:
        graph = self.tape.graph
        if names is not None:
            return self._named(self._xs_name, names)
        left_out = {*graph.initializers, *self._added}
        inputs = [value for value in graph.inputs if value.name not in left_out]
        found = [v for v in inputs if isinstance(v.type, ir.TensorType) and is_float(v)]
        if not found:
            listed = ", ".join(f"'{v.name}' ({v.type or 'unknown'})" for v in inputs) or "none"
            raise ModelError(
                f"{self._xs_name}: the model has no floating-point input, only {listed}; pass "
                f"names of other tensors as {self._xs_name}=, for example the output of an "
                "embedding"
            )
        return found

    def _named(self, role: str, names: str | Sequence[str]) -> Sequence[ir.Value]:
        """Returns tensors of the main graph by name."""
        known = values_of(self.tape.graph)
        if not isinstance(names, Iterable):
            raise ArgumentError(f"{role} must be one or more names of tensors, got {names!r}")
        named = [names] if isinstance(names, str) else list(names)
        if not named:
            raise ArgumentError(f"{role} is empty; name at least one tensor, or omit {role}")
        for name in named:
            if not isinstance(name, str):
                raise ArgumentError(f"{role} must be one or more names of tensors, got {name!r}")
            if name not in known and (holder := _holder(self.tape.graph, name)) is not None:
                raise ModelError(
                    f"{role}: tensor '{name}' is in the body of {describe(holder)}, and only "
                    "tensors of the main graph can be used; make it an output of that node"
                )
            if name not in known:
                raise ModelError(
                    f"{role}: the main graph has no tensor '{name}'; {did_you_mean(name, known)}"
                )
            if named.count(name) > 1:
                raise ArgumentError(f"{role}: '{name}' is listed twice; list it once")
        return [self._checked(role, known[name]) for name in named]

    def _checked(self, role: str, value: ir.Value) -> ir.Value:
        """Returns a tensor, if it is floating-point."""
        kind = value.type
        if kind is None:
            raise ModelError(
                f"{role}: the type of tensor '{value.name}' is unknown; add a value_info for it"
            )
        if not isinstance(kind, ir.TensorType) or not is_float(value):
            raise ModelError(
                f"{role}: tensor '{value.name}' must be a floating-point tensor, got type {kind}"
            )
        return value


def _holder(graph: ir.Graph, name: str) -> ir.Node | None:
    """Returns the node of a graph whose body has a tensor, in a body of it, too."""
    for node in graph:
        for inner in inner_graphs(node):
            if name in values_of(inner) or _holder(inner, name) is not None:
                return node
    return None


def for_each(
    tape: Tape, sequences: Sequence[Tensor], formula: Formula, start: Sequence[Tensor] = ()
) -> Sequence[Tensor]:
    """Emits a Scan that applies a formula to each slice of some tensors along the first axis.

    Args:
        tape: The tape for the node.
        sequences: The tensors, of equal length.
        formula: A function of the tape of the body and a slice of each tensor. Other tensors that
            it reads come from the outer graph and are computed once.
        start: If given, the results are added up, starting from these tensors.

    Returns:
        The results, each with a leading axis; or their sums.
    """
    body = tape.subgraph("each")
    sums = [body.input(f"{each.name}_sum", each.dtype, each.shape) for each in start]
    slices = [
        body.input(f"{each.name}_each", each.dtype, each.shape and each.shape[1:])
        for each in sequences
    ]
    with body:
        results = [op.Identity(result) for result in formula(body, *slices)]
        if start:
            pairs = zip(sums, results, strict=True)
            results = [(a + b).with_shape_of(a) for a, b in pairs]
    for result in results:
        body.graph.outputs.append(result.value)
    node = ir.Node(
        "",
        "Scan",
        [each.value for each in (*start, *sequences)],
        [ir.AttrGraph("body", body.graph), ir.AttrInt64("num_scan_inputs", len(sequences))],
        num_outputs=len(results),
    )
    tape.append(node)
    length = sequences[0].shape[0] if sequences[0].shape else None
    for output, result in zip(node.outputs, results, strict=True):
        output.type = result.value.type
        if result.shape is not None:
            output.shape = ir.Shape([*(() if start else (length,)), *result.shape])
    return [tape.tensor(output) for output in node.outputs]
