"""A training step as a flat graph: what execution is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["Step"]


@dataclass(frozen=True)
class Step:
    """A training step as a flat graph.

    Attributes:
        model: The graph, prepared for lowering, Gradient nodes bound.
        updates: Mutable variable (an input) → its next value (an output).
        learning_rates: Inputs that hold a learning rate.
        variables: All inputs that are variables: mutable ones and learning rates.
        feeds: Inputs that a batch fills.
        outputs: Outputs for people: the loss, and the model's own that the loss depends on.
        loss: The name of the loss; empty where the algorithm has no output.
        parameters: What Gradient nodes differentiate with respect to, and updates change.
        scale: The variable that the loss is multiplied with; empty where there is none.
        seed: The variable that tells what Dropout drops; empty where nothing does.
        counts: Further outputs: what the summands of the loss were divided by. Gradients of a step
            come with them.
        varying: Those of them that depend on what is fed, and not on its shapes only, as where
            labels are ignored. A step computes them, too, for those who ask for them.
    """

    model: ir.Model
    updates: Mapping[str, str]
    learning_rates: Sequence[str]
    variables: Sequence[str]
    feeds: Sequence[str]
    outputs: Sequence[str]
    loss: str
    parameters: Sequence[str] = ()
    scale: str = ""
    seed: str = ""
    counts: Sequence[str] = ()
    varying: Sequence[str] = ()
