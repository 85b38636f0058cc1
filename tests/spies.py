"""Passes in tests: some of them alone, and a spy that sees what all of them made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir

from ortops.engine.execution.settings import Settings
from ortops.engine.lowering import lower_prepared, prepare
from ortops.graph import convert
from ortops.graph.autodiff.registry import Rules
from ortops.graph.autodiff.rules import RULES
from ortops.graph.files.serialization import to_proto
from ortops.graph.names import Names
from ortops.graph.passes.draft import Draft, Pass


class Spy(Pass):
    """Records the graphs that are made.

    It stands in front of all other passes, so it is prepared first and sees the finished graph.

    Attributes:
        shapes: For each graph that was made, the shapes of its inputs by name, with None for what
            is not known.
        operators: For each of them the operators of its nodes, as it was finished.
    """

    def __init__(self) -> None:
        super().__init__("spy")
        self.shapes: list[dict[str, list[int | None]]] = []
        self.operators: list[list[str]] = []

    def watching(self, settings: Settings) -> Settings:
        """Returns settings with the spy in front of their passes."""
        return replace(settings, passes=(self, *settings.passes))

    def prepare(self, draft: Draft) -> None:
        self.shapes.append(
            {
                value.name or "": [dim if isinstance(dim, int) else None for dim in value.shape]
                for value in draft.graph.inputs
                if value.shape is not None
            }
        )

    def finish(self, draft: Draft) -> None:
        self.operators.append([node.op_type for node in draft.graph])

    def rows(self, name: str) -> list[int | None]:
        """Returns the length of an input that each graph was made for; None for any."""
        return [shapes[name][0] for shapes in self.shapes]


def lowered(model: onnx.ModelProto, *passes: Pass, rules: Rules = RULES) -> onnx.ModelProto:
    """Returns a model lowered with some passes, as if a batch had told all sizes."""
    return to_proto(lowered_ir(prepare(convert.to_ir(model)), *passes, rules=rules))


def lowered_ir(model: ir.Model, *passes: Pass, rules: Rules = RULES) -> ir.Model:
    """Lowers a prepared model with some passes, as if a batch had told all sizes."""
    return lower_prepared(model, passes=passes, rules=rules, sizes={})


def finish(model: ir.Model, *passes: Pass, **options: Any) -> ir.Model:
    """Lets passes, in the order of `passes.PASSES`, finish a model without gradients."""
    draft = draft_of(model, **options)
    for each in reversed(passes):
        each.finish(draft)
    return model


def draft_of(model: ir.Model, sizes: Mapping[str, int] | None = None) -> Draft:
    """Returns a model as passes get it."""
    return Draft(model, Names(model.graph), RULES, sizes, feeds=(), shown=())
