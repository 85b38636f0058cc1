"""The weighted form of a loss: an algorithm whose loss reads a weight for each row."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ortops.engine.building.addition import place_of
from ortops.engine.building.builder import write_loss
from ortops.engine.building.preparation import Place, prepare_for_training
from ortops.engine.building.recipe import MISSING_ARGUMENTS, arguments_of
from ortops.engine.trainable.metadata import (
    ENTRIES,
    METADATA_KEY,
    entry_names,
    training_metadata,
)
from ortops.errors import ArgumentError, OrtopsError
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import read_metadata, write_metadata
from ortops.graph.files.messages import names_within, rename_within
from ortops.graph.names import Names
from ortops.graph.row_axes import row_axes_of_model
from ortops.losses import Combined, Inputs, Loss

_WEIGHTS = "sample_weight"
_NOTES = ("losses", "prediction", "predictions", "not_negative")
"""What the metadata say about a loss."""


def with_weights(
    light: LightModel, parameters: Mapping[int, Sequence[str]], *, by_label: bool = False
) -> LightModel:
    """Returns a trainable model whose losses have the input ``sample_weight``.

    A loss is built again, with weights, as the file describes it. All else stays as it is; the
    names of the loss and of its summands, too.

    Args:
        light: The model; not changed.
        parameters: The parameters that are trained by the training_info entries whose losses get
            weights, by the index of the entry.
        by_label: Whether the input has a weight for each label, so the shape of the targets,
            rather than one for each row.

    Raises:
        ArgumentError: If the file does not describe a loss, or it has no weighted form.
    """
    result = light.copy()
    weights = _names(light.proto).unique(_WEIGHTS)
    for entry, trained in parameters.items():
        declared = _declared(light.proto, entry, weights, by_label=by_label)
        added = _emitted(light, entry, trained, weights, declared)
        _replace_loss(result.proto, entry, *added)
    return result


def _notes(proto: onnx.ModelProto, entry: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the metadata of training, and the part of it that is about an entry."""
    metadata = read_metadata(proto.metadata_props, METADATA_KEY, "remove it") or {}
    name = entry_names(proto)[entry]
    return metadata, metadata.get(ENTRIES, {}).get(name, {}) if entry else metadata


def _replace_loss(
    proto: onnx.ModelProto, entry: int, added: onnx.GraphProto, found: Mapping[str, Any]
) -> None:
    """Replaces the loss of an entry by that of another algorithm, whose names have roles."""
    metadata, notes = _notes(proto, entry)
    own = proto.training_info[entry].algorithm
    new = _graft(own, added, notes, found, _names(proto))
    for key in _NOTES:
        notes.pop(key, None)
    notes |= {key: _renamed(found[key], new) for key in _NOTES if key in found}
    write_metadata(proto, METADATA_KEY, json.dumps(metadata))


def _declared(proto: onnx.ModelProto, entry: int, weights: str, *, by_label: bool) -> Inputs:
    """Declares weights: with the shape of the targets, or up to the axis of their rows.

    Targets with a single axis, or rows on the first one, need no declaration.
    """
    own, metadata = proto.training_info[entry].algorithm, training_metadata(proto, entry)
    notes = [metadata.prediction, *metadata.predictions]
    targets = {note.target for note in notes if note.target}
    shapes = {
        value.name: [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in value.type.tensor_type.shape.dim
        ]
        for value in (*own.input, *proto.graph.input)
        if value.name in targets
    }
    if len(shapes) != 1 or any(note.shifted for note in notes):
        return {}
    ((name, dims),) = shapes.items()
    if not by_label:
        axis = row_axes_of_model(proto).axes.get(name, 0)
        dims = [*[1] * axis, dims[axis]] if axis else []
    if len(dims) < 2:
        return {}
    loss = next(v.type.tensor_type.elem_type for v in own.output if v.name == metadata.loss)
    is_double = loss == onnx.TensorProto.DOUBLE
    return {weights: (np.float64 if is_double else np.float32, dims)}


def _emitted(
    light: LightModel, entry: int, parameters: Sequence[str], weights: str, declared: Inputs
) -> tuple[onnx.GraphProto, dict[str, Any]]:
    """Returns an algorithm that computes the weighted loss, and the roles of its names."""
    remedy = (
        "build it with build_training_model(model, loss=SoftmaxCrossEntropy(sample_weight="
        "'sample_weight'), …), or multiply by an input in your own loss function"
    )
    recipe = _notes(light.proto, entry)[1].get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    missing = {"inputs", "batch_normalization", "seed"} & {*recipe.get(MISSING_ARGUMENTS, ())}
    if "loss" not in recipe or missing:
        raise ArgumentError(
            "the file does not describe its loss, which is not one of ortops with numbers and "
            f"names as arguments, so its weighted form is not known; {remedy}"
        )
    bare = LightModel(onnx.ModelProto(), light.data)
    bare.proto.CopyFrom(light.proto)
    del bare.proto.training_info[entry:]
    try:
        given = arguments_of({name: value for name, value in recipe.items() if name != "optimizer"})
        place = place_of(bare.proto, entry_names(light.proto)[entry]) if entry else Place()
        del bare.proto.training_info[:]
        kind = given.get("batch_normalization", "auto")
        prepared = prepare_for_training(bare, list(parameters), kind, place)
        loss = _weighed(given["loss"], weights)
        inputs = {**(given.get("inputs") or {}), **declared}
        return write_loss(prepared, loss, inputs, given.get("seed", 0))
    except OrtopsError as error:
        raise ArgumentError(f"{error}; or {remedy}") from error


def _weighed(loss: Loss, weights: str) -> Loss:
    """Returns a loss that reads weights of rows."""
    if isinstance(loss, Combined):
        return Combined(summands=tuple((w, _weighed(each, weights)) for w, each in loss.summands))
    return replace(loss, sample_weight=weights)


def _graft(
    own: onnx.GraphProto,
    added: onnx.GraphProto,
    notes: Mapping[str, Any],
    found: Mapping[str, Any],
    names: Names,
) -> dict[str, str]:
    """Puts a loss into an algorithm, in place of the algorithm's own, and shares equal nodes.

    Args:
        own: The algorithm; changed.
        added: An algorithm that computes the loss.
        notes: The roles of names in the algorithm.
        found: The roles of names in the other one.
        names: The names that are used; changed.

    Returns:
        The new names of tensors of the loss.
    """
    roles = {found[key]: notes[key] for key in ("learning_rate", "step", "seed") if key in found}
    new = {name: role for name, role in roles.items() if name != role}
    nodes, tensors = _not_shared(own, added, roles, new)
    before = [notes["loss"], *(part["name"] for part in notes["losses"])]
    after = [found["loss"], *(part["name"] for part in found["losses"])]
    new |= zip(after, before, strict=True)
    changed = [name for node in nodes for name in node.output if name]
    changed += [tensor.name for tensor in tensors]
    new |= {name: names.unique(f"{name}_weighted") for name in changed if name not in new}
    old = {name: names.unique(f"{name}_unweighted") for name in before}
    end = 1 + max(i for i, node in enumerate(own.node) if not {*before}.isdisjoint(node.output))
    earlier = onnx.GraphProto(node=own.node[:end])
    rename_within(earlier, lambda name: old.get(name, name))
    types = [value for value in added.value_info if value.name in changed]
    grafted = onnx.GraphProto(node=nodes, initializer=tensors, value_info=types)
    rename_within(grafted, lambda name: new.get(name, name))
    for node in grafted.node:
        node.name = names.unique(node.name)
    later = list(onnx.GraphProto(node=own.node[end:]).node)
    del own.node[:]
    own.node.extend([*earlier.node, *grafted.node, *later])
    own.initializer.extend(grafted.initializer)
    own.value_info.extend(grafted.value_info)
    known = {value.name for value in own.input}
    own.input.extend(value for value in added.input if value.name not in known)
    return new


def _not_shared(
    own: onnx.GraphProto, added: onnx.GraphProto, roles: Collection[str], new: dict[str, str]
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Returns the nodes and constants of an algorithm that another one does not have.

    Args:
        own: The other algorithm.
        added: The algorithm.
        roles: Its variables, which the other one has.
        new: The names that its tensors have there, if they have others; tensors of shared nodes
            are added.
    """
    constants = {tensor.name: tensor.SerializeToString() for tensor in own.initializer}
    known = {name: node for node in own.node for name in node.output[:1]}
    tensors = [
        tensor
        for tensor in added.initializer
        if tensor.name not in roles and constants.get(tensor.name) != tensor.SerializeToString()
    ]
    changed = {*new, *(tensor.name for tensor in tensors)}
    nodes: list[onnx.NodeProto] = []
    for node in added.node:
        names = set(names_within(onnx.GraphProto(node=[node])))
        other = known.get(node.output[0]) if node.output else None
        if other is None or _content(other) != _content(node) or names & changed:
            nodes.append(node)
            changed |= {*node.output} - {""}
        else:  # later outputs of one of them may be updates of running statistics
            new |= {n: o for n, o in zip(node.output, other.output, strict=False) if n != o}
            changed |= new.keys()
    return nodes, tensors


def _content(node: onnx.NodeProto) -> tuple[object, ...]:
    """Returns what a node computes, but for the names of its outputs after the first."""
    return node.domain, node.op_type, [*node.input], node.output[:1], [*node.attribute]


def _renamed(value: Any, new: Mapping[str, str]) -> Any:
    """Returns JSON with new names of tensors: those of the keys ``name``, ``count``, ``tensor``."""
    if isinstance(value, list):
        return [_renamed(each, new) for each in value]
    if not isinstance(value, dict):
        return value
    keys = ("name", "count", "tensor")
    return {k: new.get(v, v) if k in keys else v for k, v in value.items()}


def _names(proto: onnx.ModelProto) -> Names:
    """Returns the names in a model and its algorithms, of tensors and of nodes."""
    names = Names()
    for graph in (proto.graph, *(info.algorithm for info in proto.training_info)):
        for name in (*names_within(graph), *(node.name for node in graph.node)):
            names.take(name)
    return names
