"""A training step as a flat graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Step:
    """A training step as a flat graph.

    Attributes:
        model: The graph, prepared for lowering, Gradient nodes bound.
        updates: The output that is the next value, by mutable variable (an input).
        learning_rates: Inputs that hold a learning rate.
        variables: All inputs that are variables: mutable ones and learning rates.
        feeds: Inputs that a batch provides.
        outputs: The outputs to return: the loss, and the model's outputs that the loss depends on.
        loss: The name of the loss; empty if the algorithm has no output.
        parameters: The updated variables that Gradient nodes differentiate with respect to.
        scale: The variable that the loss is multiplied by; empty if there is none.
        seed: The variable that seeds Dropout; empty if there is none.
        counts: Further outputs: the counts that summands of the loss are divided by. Gradients are
            returned with them.
        varying: Those counts that depend on values of feeds, not only on their shapes, for example
            if some labels are ignored. They are computed in each step for callers that request
            them.
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
