"""Specialization of graphs that compute sizes at run time, as older exporters write them.

Between Shape and Reshape, shape inference loses the symbolic dimensions of the inputs. If a size is
unknown, rules emit nodes that read it at run time, and must keep the tensors that they read.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortops.graph.passes.draft import Pass
from ortops.graph.shapes import is_unknown


class _ComputedSizes(Pass):
    """Requests graphs for known sizes if these provide more than the inputs' symbolic dimensions.

    There is nothing else to do, because constants are folded before differentiation.
    """

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether shapes are read at run time, and some sizes are unknown.

        With more than one symbolic dimension, such as batch size and sequence length, there would
        be too many different shapes for separate graphs.
        """
        if not any(node.op_type == "Shape" and not node.domain for node in model.graph):
            return False
        dims = [dim for value in model.graph.inputs for dim in value.shape or ()]
        symbols = {d.value for d in dims if isinstance(d, ir.SymbolicDim) and not is_unknown(d)}
        return len(symbols) == 1 and any(
            value.name and (value.shape is None or any(map(is_unknown, value.shape)))
            for node in model.graph
            for value in node.outputs
        )


COMPUTED_SIZES = _ComputedSizes("computed_sizes")
