"""Passes: what makes a training step fast, beyond what onnxruntime does by itself.

A pass works on a `Draft`: before gradients are taken (`Pass.prepare`), after that (`Pass.finish`),
or both. `PASSES` is the list of them. They are prepared in its order and finished in the reverse
one, so each encloses those that follow it. Each says what it makes graphs for (`Pass.serves`). The
numbers stay the same without any of them, but for rounding; one of them, `rounding`, is for that
and not for speed.

Three more files help where a list of passes does not: `rematerialization` is a pass that is made
for the tensors that a user wants to keep; `scaled_sums` works on the formula of an update, which is
no model; `order` comes when everything else is done.
"""

from __future__ import annotations

from ortops.passes.blocked import BLOCKED
from ortops.passes.computed_sizes import COMPUTED_SIZES
from ortops.passes.cross_entropy import CROSS_ENTROPY
from ortops.passes.draft import Draft, Pass, Runtime
from ortops.passes.gelu import GELU
from ortops.passes.max_pool import MAX_POOL
from ortops.passes.padding import PADDING
from ortops.passes.products import ROW_SUMS, SCALES, TRANSPOSES
from ortops.passes.rectified import RECTIFIED
from ortops.passes.recurrent import RECURRENT
from ortops.passes.rounding import ROUNDING
from ortops.passes.transposed import TRANSPOSED
from ortops.passes.webgpu import WEBGPU

__all__ = ["PASSES", "Draft", "Pass", "Runtime", "passes_for"]

PASSES: tuple[Pass, ...] = (
    COMPUTED_SIZES,
    PADDING,
    GELU,
    TRANSPOSED,  # finished last: it takes products in the forms that the next three leave
    ROW_SUMS,
    SCALES,  # they go into products with transposed factors too
    TRANSPOSES,
    CROSS_ENTROPY,
    MAX_POOL,
    RECTIFIED,  # before blocks are there, whose cotangents it would know nothing of
    BLOCKED,
    RECURRENT,
    ROUNDING,
    WEBGPU,
)
"""All passes; see `passes_for`."""


def passes_for(runtime: Runtime) -> list[Pass]:
    """Returns the passes for what runs a graph.

    Example:
        >>> [each.name for each in passes_for("any")]
        ['row_sums', 'cross_entropy', 'max_pool', 'rectified', 'recurrent']
    """
    return [each for each in PASSES if runtime in each.serves]
