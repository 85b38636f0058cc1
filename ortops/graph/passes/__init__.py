"""Graph optimization passes for training steps, in addition to those of onnxruntime.

A pass works on a `Draft` before differentiation (`Pass.prepare`), after it (`Pass.finish`), or
both. `PASSES` lists all passes. `prepare` runs in this order and `finish` in reverse order, so each
pass encloses those that follow it. `Pass.serves` lists the runtimes that a pass is for. Passes
change results only by rounding; the purpose of `rounding` is accuracy, that of all others speed.

A pass replaces one node by a pattern, and several by a formula (see `rewrite` and
`ortops.graph.matching`), also in the bodies of Loop, If and Scan. Passes do not visit these if they
need to know the batch or what follows (`blocked`, `chunked_logits`, `rectified`, `recurrent`,
`transposed`), would compute more in each iteration (`left_factors`, `scaled_gradients`), or add
nodes that cost more there than they gain (`rounding`, except for branches of If).

Three more files are not in the list: `rematerialization` is a pass that is created for the tensors
that a user wants to keep; `scaled_sums` works on the formula of an update instead of a model;
`order` runs after everything else.
"""

from __future__ import annotations

from ortops.graph.passes.attention import ATTENTION
from ortops.graph.passes.attention_blocks import ATTENTION_BLOCKS
from ortops.graph.passes.blocked import BLOCKED
from ortops.graph.passes.broadcast_scalars import NUMBERS
from ortops.graph.passes.chunked_logits import CHUNKED_LOGITS
from ortops.graph.passes.computed_sizes import COMPUTED_SIZES
from ortops.graph.passes.cross_entropy import CROSS_ENTROPY
from ortops.graph.passes.cuda import CUDA
from ortops.graph.passes.draft import Pass, Runtime
from ortops.graph.passes.gated_sums import GATED_SUMS
from ortops.graph.passes.gelu import GELU
from ortops.graph.passes.max_pool import MAX_POOL
from ortops.graph.passes.normal_form import NORMAL_FORM
from ortops.graph.passes.padding import PADDING
from ortops.graph.passes.products import LEFT_FACTORS, ROW_SUMS, SCALES, TRANSPOSES
from ortops.graph.passes.quantized_weights import QUANTIZED_WEIGHTS
from ortops.graph.passes.rectified import RECTIFIED
from ortops.graph.passes.recurrent import RECURRENT
from ortops.graph.passes.rms_normalization import RMS_NORMALIZATION
from ortops.graph.passes.rotary import ROTARY
from ortops.graph.passes.rounding import ROUNDING
from ortops.graph.passes.scaled_gradients import SCALED_GRADIENTS
from ortops.graph.passes.scattered_sums import SCATTERED_SUMS
from ortops.graph.passes.swish import SWISH
from ortops.graph.passes.transposed import TRANSPOSED
from ortops.graph.passes.webgpu import WEBGPU, WEBGPU_SESSION

PASSES: tuple[Pass, ...] = (
    NORMAL_FORM,  # first, because the others look for its forms
    NUMBERS,  # finished last, because the others look for numbers of rank 0
    GATED_SUMS,  # finished after all passes that look for sums and products
    COMPUTED_SIZES,
    PADDING,
    GELU,
    RMS_NORMALIZATION,
    ROTARY,
    QUANTIZED_WEIGHTS,
    CHUNKED_LOGITS,  # after QUANTIZED_WEIGHTS, because it differentiates products by its rules
    LEFT_FACTORS,  # finished after all passes that move transposes into products
    TRANSPOSED,  # finished after the next four, because it rewrites the products that they emit
    SCALED_GRADIENTS,  # finished after the next two, because it reads the products that they emit
    ROW_SUMS,
    SCALES,  # finished after TRANSPOSES, because it also scales products with transposed factors
    TRANSPOSES,
    ATTENTION,  # finished before the passes above, which change products and transposes
    CROSS_ENTROPY,
    SCATTERED_SUMS,
    MAX_POOL,
    RECTIFIED,  # before BLOCKED, because it does not know the cotangents of blocked operators
    BLOCKED,
    SWISH,  # prepared after BLOCKED, which knows only its parts
    ATTENTION_BLOCKS,  # after RECTIFIED, which does not know its placeholders
    RECURRENT,
    ROUNDING,
    CUDA,
    WEBGPU,
    WEBGPU_SESSION,
)
"""All passes; see `passes_for`."""


def passes_for(runtime: Runtime) -> list[Pass]:
    """Returns the passes for a runtime.

    Example:
        >>> [each.name for each in passes_for("any")]
        ['row_sums', 'cross_entropy', 'max_pool', 'rectified', 'recurrent']
    """
    return [each for each in PASSES if runtime in each.serves]
