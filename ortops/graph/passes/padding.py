"""Fusion of Pad nodes before convolutions, as some exporters write them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortops.graph.autodiff.gradient_node import is_bound
from ortops.graph.choices import constant_integers
from ortops.graph.constants import constant_number
from ortops.graph.edit import all_nodes, remove_unread
from ortops.graph.passes.draft import Draft, Pass


class _Padding(Pass):
    """Fuses zero padding into convolutions, and removes empty padding."""

    def prepare(self, draft: Draft) -> None:
        """Removes Pad nodes from the forward pass."""
        for node in list(all_nodes(draft.graph)):
            if node.op_type != "Pad" or node.domain or not draft.is_free(node):
                continue
            pads, x, (y,) = _zeros_around(node), node.inputs[0], node.outputs
            users = [user for user, _ in y.uses()]
            if pads is None or x is None or y.is_graph_output() or any(map(is_bound, users)):
                continue
            if not any(pads):
                y.replace_all_uses_with(x)
            elif all(draft.is_free(user) and _supports(user, y, pads) for user in users):
                for user in users:
                    _pad(user, pads)
                    user.replace_input_with(0, x)
            remove_unread([node])


def _zeros_around(node: ir.Node) -> Sequence[int] | None:
    """Returns the pads of all axes, if they are known, non-negative and filled with zeros."""
    _, amounts, value, axes = (*node.inputs, None, None)[:4]
    if node.attributes.get_string("mode", "constant") != "constant" or amounts is None:
        return None
    pads = constant_integers(amounts)
    if pads is None or axes is not None or (value is not None and constant_number(value) != 0):
        return None
    return pads if min(pads, default=0) >= 0 else None


def _supports(node: ir.Node, x: ir.Value, pads: Sequence[int]) -> bool:
    """Whether a node is a convolution of x that supports these pads of spatial axes."""
    rank = len(pads) // 2
    return (
        (node.domain, node.op_type) == ("", "Conv")
        and x not in node.inputs[1:]
        and not any((*pads[:2], *pads[rank : rank + 2]))
        and node.attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    )


def _pad(node: ir.Node, pads: Sequence[int]) -> None:
    rank = len(pads) // 2
    added = (*pads[2:rank], *pads[rank + 2 :])
    own = node.attributes.get_ints("pads", (0,) * len(added))
    if node.attributes.get_string("auto_pad", "NOTSET") == "VALID":
        own = (0,) * len(added)
    node.attributes.pop("auto_pad", None)
    total = tuple(a + b for a, b in zip(own, added, strict=True))
    node.attributes["pads"] = ir.AttrInt64s("pads", total)


PADDING = _Padding("padding")
