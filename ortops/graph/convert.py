"""Converts models to the form that differentiation and lowering require.

That form is an onnx-ir model at opset 21 or later without functions, with types and shapes
inferred. onnx-ir and the version converter drop ``training_info``, so callers must copy it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.edit import all_nodes, describe, replace_value, tape_before
from ortops.graph.files.external import (
    LightModel,
    Reference,
    detach,
    find,
    move_aside,
    read_light,
    read_on_demand,
)
from ortops.graph.files.folders import FOLDER_KEY, note
from ortops.graph.files.loading import (
    ModelLike,
    folder_of,
    load,
    read_again,
    readable,
)
from ortops.graph.files.messages import MICROSOFT, external_to_inputs
from ortops.graph.files.serialization import from_proto
from ortops.graph.files.validation import validate
from ortops.graph.limits import LIMITS
from ortops.graph.names import Names
from ortops.graph.nesting import subgraphs
from ortops.graph.shapes import infer_shapes
from ortops.graph.tensor import Tape, op

MINIMUM_OPSET = 21
"""The oldest version of the default operator set that rules emit nodes for."""

_UNKNOWN_DOMAIN = "ortops.unknown"

_STABLE_SEMANTICS = 17
"""From this opset on, operators with an unchanged signature have unchanged semantics."""

_UNBATCHED_SCAN = 9  # the first opset without a batch axis in Scan

logger = logging.getLogger("ortops")


@read_again
def load_light(
    model: ModelLike | LightModel, is_built: Callable[[onnx.ModelProto], bool] | None = None
) -> LightModel:
    """Reads a light model; the data of its big initializers stay in the file.

    Args:
        model: A model, its bytes or its path; or a light model, which is copied.
        is_built: See `load`.

    Returns:
        The light model, with its external data.

    Raises:
        ModelError: See `load`.
    """
    if isinstance(model, LightModel):
        return model.copy()
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        read = readable(path, read_light)
        if read is not None and read.proto.ir_version and read.proto.HasField("graph"):
            folder = folder_of(path, read.proto)
            validate(read.proto, folder)
            light = detach(read.proto, folder)
            return LightModel(light.proto, read.data | light.data)
    return detach(*load(model, is_built))


def to_ir(
    model: onnx.ModelProto | LightModel, folder: Path | None = None, *, given_away: bool = False
) -> ir.Model:
    """Converts a model to onnx-ir, without its training_info.

    Args:
        model: The model; it is not modified. The data of its big tensors are not copied.
        folder: The folder of its external data, which are not loaded.
        given_away: Whether it is a light model that is not used afterwards, so that it need not be
            copied.

    Raises:
        ModelError: If the model is invalid.
        UnsupportedError: If it has sparse initializers, which onnx-ir drops.
    """
    proto, data = model if isinstance(model, LightModel) else (model, {})
    for sparse in proto.graph.sparse_initializer:
        raise UnsupportedError(
            f"initializer '{sparse.values.name}': sparse initializers are not supported; store it "
            "as a dense TensorProto"
        )
    # A copy, because onnx-ir refers to the tensors and renames them.
    own, detached = LightModel(proto, {}) if given_away else detach(proto)
    try:
        result = from_proto(own)
    except Exception as error:  # onnx-ir's exceptions have no common base class
        cause = error.__cause__ or error
        raise ModelError(f"model: {cause}; check it with onnx.checker.check_model") from error
    detached = detached | data
    for value in result.graph.initializers.values():
        content = find(value.const_value, detached)
        if content is not None:
            value.const_value = Reference(content, value.name)
    if folder is not None:
        ir.external_data.set_base_dir(result.graph, folder)  # for tensors in attributes
    read_on_demand(result, folder)
    if folder is not None and any(tensor.external_data for tensor in proto.graph.initializer):
        result.metadata_props[FOLDER_KEY] = note(folder)
    for node in all_nodes(result.graph):
        if node.domain == MICROSOFT:  # onnxruntime does not require the import
            result.graph.opset_imports.setdefault(node.domain, 1)
    for graph in (result.graph, *subgraphs(result.graph)):
        forget_unknown((*graph.inputs, *(v for node in graph for v in node.outputs)))
    if "" not in result.graph.opset_imports:
        result.graph.opset_imports[""] = MINIMUM_OPSET
    return result


def forget_unknown(values: Iterable[ir.Value]) -> None:
    """Removes the markers of exporters for unknown dimensions from the shapes of values."""
    for value in values:
        if value.shape is not None and any(_is_unknown(dim) for dim in value.shape):
            dims = [None if _is_unknown(dim) else dim for dim in value.shape]
            value.shape = ir.Shape(dims)


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    """Whether a dimension is one of the markers that exporters use for unknown dimensions."""
    return dim < 0 if isinstance(dim, int) else dim.value in ("", "?", "-1", "None")


def inline(model: ir.Model) -> None:
    """Inlines model-local functions, in place.

    Raises:
        ModelError: If a function is recursive or does not match a call, or there are too many
            calls.
    """
    if not model.functions:
        return
    _check_calls(model)
    try:
        _Inlining()(model)
    except Exception as error:  # onnx-ir's exceptions have no common base class
        cause = error.__cause__ or error
        raise ModelError(f"function: {cause}; correct its call or its body") from error


class _Inlining(passes.InlinePass):
    """onnx-ir's pass, whose search for unique names takes quadratic time in the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: Counter[str] = Counter()
        self._bases: dict[ir.Node | ir.Value, str] = {}

    def _instantiate_call(self, node: ir.Node, call_site_id: str) -> Any:
        for inner in self._functions[node.op_identifier()].all_nodes():
            named: list[ir.Node | ir.Value] = [inner, *inner.outputs]
            for each in named:
                if isinstance(each, ir.Value) and each.name == "":  # absent
                    continue
                kind = "node" if isinstance(each, ir.Node) else "val"
                base = self._bases.setdefault(each, each.name or kind)
                self._copies[base] += 1
                number = self._copies[base]
                each.name = base if number == 1 else f"{base}_{number}"
        return super()._instantiate_call(node, call_site_id)


def _check_calls(model: ir.Model) -> None:
    """Rejects recursive functions, and models that exceed the limit after inlining."""
    sizes: dict[ir.OperatorIdentifier, int] = {}

    def size(nodes: Iterable[ir.Node], callers: tuple[ir.OperatorIdentifier, ...]) -> int:
        total = 0
        for node in nodes:
            called = node.op_identifier()
            function = model.functions.get(called)
            if function is None:
                total += 1
                continue
            if called in callers or len(callers) == LIMITS.nested_calls:
                raise ModelError(
                    f"{describe(node)}: the function is recursive, or calls are nested more than "
                    f"{LIMITS.nested_calls} deep (ortops.graph.limits.LIMITS.nested_calls)"
                )
            if called not in sizes:
                sizes[called] = size(function.all_nodes(), (*callers, called))
            total += sizes[called] + 1
        return total

    total = size(all_nodes(model.graph), ())
    if total > LIMITS.inlined_nodes + sum(1 for _ in all_nodes(model.graph)):
        raise ModelError(
            f"model: it would have {total:,} nodes after inlining its functions; at most "
            f"{LIMITS.inlined_nodes:,} may be added (ortops.graph.limits.LIMITS.inlined_nodes)"
        )


def upgrade(model: ir.Model, *, quietly: bool = False, opset: int = MINIMUM_OPSET) -> ir.Model:
    """Converts a model of an older opset to opset 21 or later, and logs a warning.

    If the signatures of all operators are unchanged, only the version number is changed, because
    onnx's version converter is slow and drops the metadata of nodes.

    Args:
        model: A model without functions; do not use it afterwards.
        quietly: Whether to omit the warning.
        opset: The opset to convert to, at least 21.

    Returns:
        The model itself, or a new one.

    Raises:
        ModelError: If the version converter fails.
    """
    old = model.graph.opset_imports[""]
    for target in (MINIMUM_OPSET, opset):
        if model.graph.opset_imports[""] < target:
            model = _upgraded(model, target)
    if model.graph.opset_imports[""] != old and not quietly:
        logger.warning("the model was converted from opset %d to %d", old, opset)
    return model


def _upgraded(model: ir.Model, target: int) -> ir.Model:
    """Converts a model of an older opset."""
    opset = model.graph.opset_imports[""]
    for node in model.graph:
        if opset < _UNBATCHED_SCAN and node.op_type == "Scan" and not node.domain:
            raise ModelError(
                f"Scan node '{node.name or node.outputs[0].name}': Scan of opset {opset} has a "
                "batch axis, which is not supported; export the model at opset 9 or later"
            )
    model.ir_version = max(model.ir_version, 4)  # before 4, initializers had to be inputs
    nodes = (node for node in all_nodes(model.graph) if node.domain == "")
    if opset >= _STABLE_SEMANTICS and all(
        _same_signature(node.op_type, opset, target) for node in nodes
    ):
        model.graph.opset_imports[""] = target
    else:
        has = functools.cache(onnx.defs.has)
        _move(model, "", _UNKNOWN_DOMAIN, lambda name: not has(name, opset))
        model = _convert(model, target)
        _move(model, _UNKNOWN_DOMAIN, "", lambda name: True)
        _keep_old_semantics(model, opset)
    return model


@functools.cache
def _same_signature(op_type: str, opset: int, target: int) -> bool:
    """Whether an operator has the same signature in two opsets, except for allowed types."""
    try:
        schemas = [onnx.defs.get_schema(op_type, each) for each in (opset, target)]
    except onnx.defs.SchemaError:
        return False
    old, new = schemas
    return old.since_version == new.since_version or _signature(old) == _signature(new)


def _signature(schema: onnx.defs.OpSchema) -> object:
    """Returns the signature of an operator, without the allowed types of tensors."""
    return (
        [(each.name, each.option, each.type_str) for each in (*schema.inputs, *schema.outputs)],
        [
            (name, each.type, each.required, each.default_value.SerializeToString())
            for name, each in sorted(schema.attributes.items())
        ],
    )


def _move(model: ir.Model, domain: str, other: str, moves: Callable[[str], bool]) -> None:
    """Moves nodes with some operators to a different domain.

    onnxruntime defines additional operators in the standard domain, and some at older opsets than
    onnx, such as LayerNormalization, for which the version converter would fail.
    """
    for node in all_nodes(model.graph):
        if node.domain == domain and moves(node.op_type):
            node.domain = other
            model.graph.opset_imports.setdefault(other, 1)
    if domain:
        model.graph.opset_imports.pop(domain, None)


def _convert(model: ir.Model, target: int) -> ir.Model:
    """Runs onnx's version converter, without the data of big initializers."""
    graph = model.graph
    listed = {value.name for value in graph.inputs}
    tensors = {name: value.const_value for name, value in graph.initializers.items()}
    light, _ = move_aside(model)
    external_to_inputs(light.graph)
    try:
        proto = onnx.version_converter.convert_version(light, target)
    except Exception as error:  # the converter's exceptions have no common base class
        raise ModelError(
            f"model: cannot convert opset {graph.opset_imports['']} to {target}: {error}; "
            f"export the model again with opset {target} or later"
        ) from error
    result = from_proto(proto)
    result.graph.meta.update(graph.meta)
    for value in list(result.graph.inputs):
        if value.name in tensors and value.name not in result.graph.initializers:
            value.const_value = tensors[value.name]
            if value.name not in listed:
                result.graph.inputs.remove(value)
            result.graph.register_initializer(value)
    result.metadata_props.update(model.metadata_props)
    return result


def _keep_old_semantics(model: ir.Model, opset: int) -> None:
    """Rewrites nodes whose semantics changed although the converter does not change them."""
    nodes = [
        node
        for node in all_nodes(model.graph)
        if node.domain == "" and opset < _OLD_SEMANTICS.get(node.op_type, (0, None))[0]
    ]
    if any(node.op_type == "Pad" for node in nodes):
        infer_shapes(model)
    names = Names(model.graph)
    for node in nodes:
        tape = tape_before(node, names)
        tape.graph.opset_imports.update(model.graph.opset_imports)
        _OLD_SEMANTICS[node.op_type][1](tape, node)


def _keep_resize_coordinates(tape: Tape, node: ir.Node) -> None:
    """Sets the attributes for the coordinates of Resize and Upsample, whose defaults have changed.

    In nearest mode, coordinates were rounded up for scales below 1, otherwise down. If a node can
    do both, it becomes two nodes.
    """
    node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
    if node.attributes.get_string("mode", "nearest") != "nearest":
        return
    x, roi, scales = (None if value is None else tape.tensor(value) for value in node.inputs[:3])
    assert scales is not None
    known = scales.constant
    enlarges, shrinks = known is None or (known > 1).any(), known is None or (known < 1).any()
    node.attributes.add(ir.AttrString("nearest_mode", "ceil" if shrinks else "floor"))
    if enlarges and shrinks:
        larger = op.Max(scales, 1.0)
        first = op.Resize(
            *(x, roi, larger), coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )
        node.replace_input_with(0, first.value)
        node.replace_input_with(2, op.Min(scales, 1.0).value)


def _keep_group_scale(tape: Tape, node: ir.Node) -> None:
    """Repeats scale and bias of GroupNormalization for each channel; they were per group."""
    x, groups = node.inputs[0], node.attributes["num_groups"].as_int()
    assert x is not None
    channels = op.Div(op.Shape(tape.tensor(x), start=1, end=2), groups)
    shape = op.Concat([groups], channels, axis=0)
    for index in (1, 2):
        given = node.inputs[index]
        assert given is not None
        column = op.Reshape(tape.tensor(given), [groups, 1])
        node.replace_input_with(index, op.Reshape(op.Expand(column, shape), [-1]).value)


def _keep_flat_hardmax(tape: Tape, node: ir.Node) -> None:
    """Computes one maximum over all axes from the given one on."""
    x = node.inputs[0]
    assert x is not None
    axis = node.attributes.get_int("axis", 1)
    flat = op.Hardmax(op.Flatten(tape.tensor(x), axis=axis), axis=-1)
    y = op.Reshape(flat, op.Shape(tape.tensor(x)), allowzero=1)
    y.value.type, y.value.shape = node.outputs[0].type, node.outputs[0].shape
    replace_value(tape, node.outputs[0], y)
    tape.graph.remove(node, safe=True)


def _type_pad_value(tape: Tape, node: ir.Node) -> None:
    """Converts the padding value, which was a float attribute, to the type of the tensor."""
    x = node.inputs[0]
    value = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if x is not None and x.dtype is not None and tensor is not None and tensor.dtype != x.dtype:
        node.replace_input_with(2, tape.constant(tensor.numpy().astype(x.dtype.numpy())).value)


_OLD_SEMANTICS: dict[str, tuple[int, Callable[[Tape, ir.Node], None]]] = {
    "GroupNormalization": (21, _keep_group_scale),
    "Hardmax": (13, _keep_flat_hardmax),
    "Pad": (11, _type_pad_value),
    "Resize": (11, _keep_resize_coordinates),
}
"""For each operator, the first opset of its new semantics, and the function for older nodes."""
