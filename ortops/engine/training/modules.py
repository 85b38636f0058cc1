"""The modules of a model as a table: what they return, their parameters, and which are trained."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from ortops.engine.building.parameters import quantized, why_not
from ortops.engine.building.readers import readers
from ortops.engine.building.scopes import scopes_of
from ortops.engine.summary import by_reason, cut, module_of, short_shape, table, text_of, visible
from ortops.graph import convert
from ortops.graph.adapters import adapter_of
from ortops.graph.edit import all_nodes, is_float
from ortops.graph.files.external import LightModel
from ortops.graph.shapes import infer_shapes
from ortops.graph.weights import lift


def summary_of(light: LightModel, trained: Mapping[str, str]) -> str:
    """Returns the modules that have parameters as a table; see `ortops.TrainingSession.summary`.

    Args:
        light: The model.
        trained: The entry that trains each parameter, by name.
    """
    work = convert.to_ir(lift(light)[0])
    convert.inline(work)
    infer_shapes(work)
    order = {node: place for place, node in enumerate(all_nodes(work.graph))}
    adapter = adapter_of(light.proto.metadata_props)
    is_base = adapter is not None and trained.keys() <= {*adapter.parameters}
    left_out = "no: the adapter's base" if is_base else "no: trainable= leaves it out"
    modules: dict[str, list[tuple[int, str, ir.Node | None]]] = {}
    others: dict[str, str] = {}
    for name, value in work.graph.initializers.items():
        nodes = sorted((each.node for each in readers(value)), key=order.__getitem__)
        packed = quantized([value])
        if name not in trained and not packed:
            if not is_float(value):
                continue
            if reason := why_not(value):
                others[name] = reason
                continue
        text = "no: quantized" if packed else left_out
        if name in trained:
            text = f"yes, by {trained[name]}" if len({*trained.values()}) > 1 else "yes"
        shared = f", shared by {len(nodes)} nodes" if len(nodes) > 1 else ""
        module = module_of(name) or next(map(_scope, nodes), "") or name
        row = _size(value, nodes), f"{text}{shared}", next(iter(nodes), None)
        modules.setdefault(module, []).append(row)
    rows, learned, total = [("module", "output", "parameters", "trained")], 0, 0
    for module, found in modules.items():
        last = max((node for *_, node in found if node), key=order.__getitem__, default=None)
        shape = None if last is None else last.outputs[0].shape
        count = sum(size for size, *_ in found)
        moving = sum(size for size, text, _ in found if text.startswith("yes"))
        learned, total = learned + moving, total + count
        said = [f"{moving:,} of them"] if 0 < moving < count else []
        said += (text for _, text, _ in found if not said or text != "yes")
        kind = "?" if shape is None else short_shape(str(shape))
        rows.append((module, kind, f"{count:,}", "; ".join(dict.fromkeys(said))))
    left = total - learned
    lines = [*table(rows), f"{total:,} parameters: {learned:,} trained, {left:,} not trained"]
    if others:
        lines += ["no parameters, and not trained:", *by_reason(others)]
    return text_of(cut(visible(line)) for line in lines)


def _size(value: ir.Value, nodes: list[ir.Node]) -> int:
    """Returns the number of elements of a weight, also of one that is packed into bytes."""
    for node in nodes:
        if node.op_type == "MatMulNBits" and value is node.inputs[1]:
            return math.prod(node.attributes[name].as_int() for name in "KN")
    return math.prod(() if value.shape is None else value.shape.numpy())


def _scope(node: ir.Node) -> str:
    """Returns the module that a node is in, as exporters write it; empty if they do not."""
    own = (node.name or "").strip("/").replace("/", ".")
    return max(scopes_of(node) - {own}, key=len, default="")
