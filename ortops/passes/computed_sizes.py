"""Graphs that compute their sizes, as older exporters write them, made for those of a batch.

Between Shape and Reshape, inference loses the symbols of a model's inputs. Rules that do not know a
size write nodes that ask for it at run time, and must keep what they ask.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ortops.graph.shapes import is_unknown
from ortops.passes.draft import Pass

__all__ = ["COMPUTED_SIZES"]


class _ComputedSizes(Pass):
    """Says where known sizes tell more than the symbols of the inputs do.

    Nothing is left to do then: before gradients are taken, what sizes make constant is folded.
    """

    def gains(self, model: ir.Model, sizes: Mapping[str, int] | None) -> bool:
        """Whether tensors have sizes that no input has, and some are computed from shapes.

        Inputs that have more than one symbol, such as a length beside that of the batch, take more
        shapes than are worth graphs of their own.
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
