"""Passes: what makes a training step fast, beyond what onnxruntime does by itself.

A pass works on a `Draft`: before gradients are taken (`Pass.prepare`), after that (`Pass.finish`),
or both. `PASSES` is the list of them. They are prepared in its order and finished in the reverse
one, so each encloses those that follow it. The numbers stay the same without any of them, but for
rounding; one of them, `rounding`, is for that and not for speed.

Three more files help where a list of passes does not: `rematerialization` is a pass that is made
for the tensors that a user wants to keep; `scaled_sums` works on the formula of an update, which is
no model; `order` comes when everything else is done.
"""

from __future__ import annotations

from ortops.passes.blocked import BLOCKED
from ortops.passes.cross_entropy import CROSS_ENTROPY
from ortops.passes.draft import Draft, Pass
from ortops.passes.lstm import LSTM
from ortops.passes.products import ROW_SUMS, SCALES, TRANSPOSES
from ortops.passes.rectified import RECTIFIED
from ortops.passes.rounding import ROUNDING
from ortops.passes.transposed import TRANSPOSED

__all__ = ["PASSES", "Draft", "Pass"]

PASSES: tuple[Pass, ...] = (
    TRANSPOSED,  # finished last: it takes products in the forms that the next three leave
    ROW_SUMS,
    SCALES,  # they go into products with transposed factors too
    TRANSPOSES,
    CROSS_ENTROPY,
    RECTIFIED,  # before blocks are there, whose cotangents it would know nothing of
    BLOCKED,
    LSTM,
    ROUNDING,
)
"""All passes, for onnxruntime's CPU provider."""
