"""Bringing a model into the form that differentiation and lowering work on.

That form is an onnx-ir model at opset 21 or later, functions inlined, with types and shapes
inferred. Neither onnx-ir nor the version converter carries ``training_info``: callers do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import google.protobuf.message
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.edit import all_nodes, replace_value
from ortops.graph.external import Data, detach, find, refer_to
from ortops.graph.shapes import infer_shapes
from ortops.graph.tensor import Names, Tape, op

__all__ = ["MINIMUM_OPSET", "ModelLike", "inline", "load", "to_ir", "upgrade"]

ModelLike: TypeAlias = onnx.ModelProto | bytes | str | os.PathLike[str]
"""A model, its serialized bytes, or the path of its file."""

MINIMUM_OPSET = 21
"""The oldest version of the default operator set that rules emit nodes for."""

_ONNXRUNTIME = "com.microsoft"
_UNKNOWN_DOMAIN = "ortops.unknown"

_BIG = 1024  # initializers of more bytes are kept out of what goes through onnx's C++ passes

_RESIZE_COORDINATES = 11  # the opset in which Resize got attributes for what it had done always

_UNBATCHED_SCAN = 9  # the opset in which Scan lost its batch axis

logger = logging.getLogger("ortops")


def load(model: ModelLike) -> tuple[onnx.ModelProto, Path | None]:
    """Reads a model.

    Args:
        model: A model, its bytes or its path. External data stay where they are.

    Returns:
        The model, which is the argument itself if it was a ModelProto, and the folder of its file
        where there is one.

    Raises:
        ModelError: If it is not an ONNX model.
    """
    if isinstance(model, onnx.ModelProto):
        return model, None
    folder = None
    if isinstance(model, str | os.PathLike):
        path = Path(model)
        try:
            what, data = f"file '{path}'", path.read_bytes()
        except OSError as error:
            raise ModelError(
                f"file '{path}': {error.strerror}; give the path of a model"
            ) from error
        folder = path.resolve().parent
    elif isinstance(model, bytes | bytearray | memoryview):
        what, data = f"{len(model)} bytes", bytes(model)
    else:
        raise ModelError(
            f"model: {type(model).__name__} was given; give a ModelProto, bytes, or a path"
        )
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except google.protobuf.message.DecodeError as error:
        raise ModelError(f"{what}: not an ONNX model ({error}); give a .onnx file") from error
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError(f"{what}: not an ONNX model (it has no graph); give a .onnx file")
    return proto, folder


def to_ir(
    proto: onnx.ModelProto,
    folder: Path | None = None,
    data: Data | None = None,
    *,
    given_away: bool = False,
) -> ir.Model:
    """Returns a model as onnx-ir, without its training_info.

    Args:
        proto: The model; not changed. The data of its big tensors are not copied.
        folder: Where its external data are, which stay there.
        data: The data of a light model (see `ortops.graph.external`).
        given_away: Whether the model is a light one that nobody uses afterwards, so that it need
            not be copied.

    Raises:
        ModelError: If the model contradicts itself.
        UnsupportedError: If it has sparse initializers, which onnx-ir drops.
    """
    for sparse in proto.graph.sparse_initializer:
        raise UnsupportedError(
            f"initializer '{sparse.values.name}': it is sparse; dense ones are accepted, so write "
            "it as a TensorProto"
        )
    # A copy: onnx-ir keeps hold of the tensors, and renames them.
    own, beside = (proto, {}) if given_away else detach(proto)
    beside = beside | (data or {})
    try:
        model = ir.from_proto(own)
    except Exception as error:  # onnx-ir has no common class for what it finds wrong
        cause = error.__cause__ or error
        raise ModelError(f"model: {cause}; check it with onnx.checker.check_model") from error
    for value in model.graph.initializers.values():
        content = find(value.const_value, beside)
        if content is not None:
            value.const_value = refer_to(content, value.name)
    if folder is not None:
        ir.external_data.set_base_dir(model.graph, folder)
    for node in all_nodes(model.graph):
        if node.domain == _ONNXRUNTIME:  # which runs models that do not import its operators
            model.graph.opset_imports.setdefault(node.domain, 1)
    for graph in model.graphs():
        for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
            if value.shape is not None and any(_is_unknown(dim) for dim in value.shape):
                dims = [None if _is_unknown(dim) else dim for dim in value.shape]
                value.shape = ir.Shape(dims)
    if "" not in model.graph.opset_imports:
        model.graph.opset_imports[""] = MINIMUM_OPSET
    return model


def _is_unknown(dim: int | ir.SymbolicDim) -> bool:
    """Whether a dimension is one of the ways in which exporters write that they do not know it."""
    return dim < 0 if isinstance(dim, int) else dim.value in ("", "?", "-1", "None")


def inline(model: ir.Model) -> None:
    """Replaces calls of model-local functions by their bodies, in place."""
    if model.functions:
        passes.InlinePass()(model)


def upgrade(model: ir.Model) -> ir.Model:
    """Converts a model to opset 21 where it is older, and logs that it did.

    Args:
        model: A model without functions; not to be used afterwards if another is returned.

    Returns:
        The model itself where it is new enough, else a new one.

    Raises:
        ModelError: If the version converter cannot convert it.
    """
    opset = model.graph.opset_imports[""]
    if opset >= MINIMUM_OPSET:
        return model
    for node in model.graph:
        if opset < _UNBATCHED_SCAN and node.op_type == "Scan" and not node.domain:
            raise ModelError(
                f"Scan node '{node.name or node.outputs[0].name}': in opset {opset} it has a batch "
                "axis, which the version converter drops; export the model at opset 9 or later"
            )
    _move_unknown(model, "", _UNKNOWN_DOMAIN)
    result = _convert(model)
    _move_unknown(result, _UNKNOWN_DOMAIN, "")
    if opset < _RESIZE_COORDINATES:
        _keep_old_resize(result)
    _keep_old_forms(result, opset)
    logger.warning("the model was converted from opset %d to %d", opset, MINIMUM_OPSET)
    return result


def _move_unknown(model: ir.Model, domain: str, other: str) -> None:
    """Moves nodes that onnx does not know to another domain.

    onnxruntime has operators of its own in the standard domain, which stop the version converter.
    """
    for node in all_nodes(model.graph):
        if node.domain == domain and not onnx.defs.has(node.op_type):
            node.domain = other
            model.graph.opset_imports.setdefault(other, 1)
    if domain:
        model.graph.opset_imports.pop(domain, None)


def _convert(model: ir.Model) -> ir.Model:
    """Runs onnx's version converter, past which big initializers are carried by hand."""
    graph = model.graph
    listed = {value.name for value in graph.inputs}
    big = {
        name: value.const_value
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _BIG
    }
    for name, tensor in big.items():
        value = graph.initializers.pop(name)
        value.const_value = None
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
        if name not in listed:
            graph.inputs.append(value)
    model.ir_version = max(model.ir_version, 4)  # before 4, initializers had to be inputs
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), MINIMUM_OPSET)
    except Exception as error:  # the converter raises RuntimeError and classes of its own
        raise ModelError(
            f"model: its opset {graph.opset_imports['']} cannot be converted to {MINIMUM_OPSET}: "
            f"{error}; convert it to {MINIMUM_OPSET} or later with the tool that wrote it"
        ) from error
    result = ir.from_proto(proto)
    for value in list(result.graph.inputs):
        if value.name in big:
            value.const_value = big[value.name]
            if value.name not in listed:
                result.graph.inputs.remove(value)
            result.graph.register_initializer(value)
    result.metadata_props.update(model.metadata_props)
    return result


def _keep_old_resize(model: ir.Model) -> None:
    """Writes out how Resize and Upsample took coordinates before opset 11.

    The converter leaves the attributes out, and their defaults mean something else. Where a scale
    shrank, the nearest element was the one ahead, so a node that may do both becomes two.
    """
    for node in list(all_nodes(model.graph)):
        if node.domain or node.op_type != "Resize":
            continue
        node.attributes.add(ir.AttrString("coordinate_transformation_mode", "asymmetric"))
        if node.attributes.get_string("mode", "nearest") != "nearest":
            continue
        x, roi, scales = node.inputs[:3]
        assert scales is not None
        known = ir.convenience.get_const_tensor(scales)
        if known is not None and bool((known.numpy() >= 1).all()):
            node.attributes.add(ir.AttrString("nearest_mode", "floor"))
            continue
        node.attributes.add(ir.AttrString("nearest_mode", "ceil"))
        if known is not None and bool((known.numpy() <= 1).all()):
            continue
        one = ir.Node("", "Constant", [], [ir.AttrFloat32s("value_floats", [1.0])])
        larger = ir.Node("", "Max", [scales, one.outputs[0]])
        smaller = ir.Node("", "Min", [scales, one.outputs[0]])
        first = ir.Node(
            "",
            "Resize",
            [x, roi, larger.outputs[0]],
            [
                ir.AttrString("coordinate_transformation_mode", "asymmetric"),
                ir.AttrString("nearest_mode", "floor"),
            ],
        )
        for new, name in ((one, "one"), (larger, "up"), (smaller, "down"), (first, "enlarged")):
            new.name = new.outputs[0].name = f"{node.outputs[0].name}_{name}"
        assert node.graph is not None
        node.graph.insert_before(node, [one, larger, smaller, first])
        node.replace_input_with(0, first.outputs[0])
        node.replace_input_with(2, smaller.outputs[0])


def _keep_old_forms(model: ir.Model, opset: int) -> None:
    """Rewrites nodes that the converter leaves as they are although they mean something else."""
    nodes = [
        node
        for node in all_nodes(model.graph)
        if node.domain == "" and opset < _OLD_FORMS.get(node.op_type, (0, None))[0]
    ]
    if any(node.op_type == "Pad" for node in nodes):
        infer_shapes(model)
    names = Names(model.graph)
    for node in nodes:
        assert isinstance(node.graph, ir.Graph)
        node.graph.opset_imports.update(model.graph.opset_imports)
        tape = Tape(node.graph, before=node, names=names)
        tape.scope = f"{node.name or node.op_type}/"
        _OLD_FORMS[node.op_type][1](tape, node)


def _keep_group_scale(tape: Tape, node: ir.Node) -> None:
    """Repeats scale and bias, which had one number for each group, for each channel."""
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
    """Takes one maximum over all axes from the given one on."""
    x = node.inputs[0]
    assert x is not None
    axis = node.attributes.get_int("axis", 1)
    flat = op.Hardmax(op.Flatten(tape.tensor(x), axis=axis), axis=-1)
    y = op.Reshape(flat, op.Shape(tape.tensor(x)), allowzero=1)
    y.value.type, y.value.shape = node.outputs[0].type, node.outputs[0].shape
    replace_value(tape, node.outputs[0], y)
    tape.graph.remove(node, safe=True)


def _type_pad_value(tape: Tape, node: ir.Node) -> None:
    """Gives the value to pad with, which was an attribute, the type of the padded tensor."""
    x = node.inputs[0]
    value = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if x is not None and x.dtype is not None and tensor is not None and tensor.dtype != x.dtype:
        node.replace_input_with(2, tape.constant(tensor.numpy().astype(x.dtype.numpy())).value)


_OLD_FORMS: dict[str, tuple[int, Callable[[Tape, ir.Node], None]]] = {
    "GroupNormalization": (21, _keep_group_scale),
    "Hardmax": (13, _keep_flat_hardmax),
    "Pad": (11, _type_pad_value),
}
"""What to do to operators of models older than an opset, beside what the converter does."""
