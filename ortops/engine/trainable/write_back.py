"""Writes trained values into models."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx

from ortops._common.numbers import Array
from ortops.errors import ModelError, did_you_mean
from ortops.graph.files.external import LightModel
from ortops.graph.files.json_metadata import read_metadata, where
from ortops.graph.files.messages import initializers, node_graphs
from ortops.graph.weights import weights
from ortops.surgery.branches import TWINS_KEY

NAMES_KEY = "ortops.weights"
"""The key in ``metadata_props`` for the names of a checkpoint (`ortops.weights`)."""


def write_back(original: LightModel, arrays: Mapping[str, Array]) -> None:
    """Writes trained arrays to the weights of the model that the training started from."""
    known = weights(original)
    others = {t.name: t for t in original.proto.graph.initializer if t.name not in known}
    for name, array in arrays.items():
        if name in known:
            dtype, shape = known[name].dtype, known[name].shape
        elif name in others:
            tensor = others[name]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            shape = tuple(tensor.dims)
        elif name.endswith((".lora_A.weight", ".lora_B.weight")):
            raise ModelError(
                f"original: it has no '{name}', a weight of an adapter; leave original= out, and "
                "give the result to ortops.lora.merge"
            )
        else:
            raise ModelError(
                f"original: it has no weight '{name}', which is a trained parameter; "
                + did_you_mean(name, [*known, *others])
            )
        if (dtype, shape) != (array.dtype, array.shape):
            raise ModelError(
                f"original: '{name}' must be {array.dtype}{list(array.shape)} as in the training, "
                f"got {dtype}{list(shape)}; give the model that the training started from"
            )
        if name in known:
            known[name].set(array)
        else:
            original.set_array(others[name], array)


def with_twins(trained: onnx.ModelProto, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Adds the copies that the original model had of trained weights (`ortops.surgery`).

    A copy is a name, or a list with the name of a transposed copy.

    Raises:
        ModelError: If the metadata are not valid.
    """
    remedy = "call ortops.surgery.fix_inputs or tie again"
    found = read_metadata(trained.metadata_props, TWINS_KEY, remedy) or {}
    result = dict(arrays)
    for name, copies in found.items():
        for copy in copies if isinstance(copies, list) else [None]:
            twin = copy[0] if isinstance(copy, list) and len(copy) == 1 else copy
            if not isinstance(twin, str):
                raise ModelError(f"{where(TWINS_KEY)}: '{name!s:.80}' must be a list; {remedy}")
            if name in arrays:
                result[twin] = (
                    arrays[name] if twin == copy else np.ascontiguousarray(arrays[name].T)
                )
    return result


def keep_names(trained: onnx.ModelProto, original: onnx.ModelProto) -> None:
    """Copies the names that a checkpoint has for the weights, unless the original has others."""
    if all(entry.key != NAMES_KEY for entry in original.metadata_props):
        kept = (entry for entry in trained.metadata_props if entry.key == NAMES_KEY)
        original.metadata_props.extend(kept)


def write_inference_mode_to(original: onnx.ModelProto) -> None:
    """Sets BatchNormalization and Dropout to inference mode, in place, and changes nothing else.

    Args:
        original: A model of any opset, such as PyTorch writes with ``TrainingMode.TRAINING``.
    """
    nodes = [*original.graph.node, *(node for each in original.functions for node in each.node)]
    while nodes:
        node = nodes.pop()
        nodes += (inner for graph in node_graphs(node) for inner in graph.node)
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Dropout":
            del node.input[2:]
        elif node.op_type == "BatchNormalization":
            del node.output[1:]
            kept = [each for each in node.attribute if each.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend(kept)


def write_values(model: LightModel, arrays: Mapping[str, Array]) -> None:
    """Writes arrays to the initializers of a model and its algorithms with the same names."""
    for tensor in initializers(model.proto, initialization=False):
        if tensor.name in arrays:
            model.set_array(tensor, arrays[tensor.name])
