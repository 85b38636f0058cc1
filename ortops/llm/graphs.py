"""What training must know of the graph of a language model: experts, and what is pruned.

Pruned files compute the logits of the last token only, as serving needs no others.
onnxruntime-genai's builder writes them with ``prune_lm_head``: a Gather of the last position, and
an Unsqueeze, in front of lm_head. Training needs the logits of all positions.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import onnx

from ortops.errors import ModelError, UnsupportedError
from ortops.graph.adapters import adapter_of
from ortops.graph.files.external import LightModel
from ortops.llm.folder import Folder

_KINDS = ("MoE", "QMoE")
_NOT = "not a language model: "

HIDDEN, EMBEDDING = ("last_hidden_state", "token_embeddings"), "sentence_embedding"
"""The outputs of text encoders: hidden states of tokens, and the embedding of a text."""
_LAYER = re.compile(r"layers?[./](\d+)")


class _Pruning(NamedTuple):
    """The nodes that leave one position.

    Attributes:
        gather: Takes the last position.
        unsqueeze: Makes an axis of it.
    """

    gather: onnx.NodeProto
    unsqueeze: onnx.NodeProto

    @property
    def source(self) -> str:
        """The hidden state of all positions."""
        return str(self.gather.input[0])


def is_pruned(model: LightModel) -> bool:
    """Whether a model computes the logits of the last token only."""
    return _pruning(model.proto.graph) is not None


def without_pruning(model: LightModel) -> LightModel:
    """Returns a model that computes the logits of all tokens; the model itself if it does."""
    if not is_pruned(model):
        return model
    result = model.copy()
    graph = result.proto.graph
    found = _pruning(graph)
    assert found is not None
    _connect(graph, found.unsqueeze.output[0], found.source)
    for node in found:
        graph.node.remove(node)
    _set_length(graph, None)
    return result


def prune(model: LightModel, original: LightModel) -> LightModel:
    """Returns a model with the nodes in front of lm_head that its original has."""
    found = _pruning(original.proto.graph)
    if found is None or is_pruned(model):
        return model
    result = model.copy()
    graph = result.proto.graph
    _connect(graph, found.source, found.unsqueeze.output[0])
    place = next(
        (number for number, node in enumerate(graph.node) if found.source in node.output), -1
    )
    for offset, node in enumerate(found, 1):
        graph.node.insert(place + offset, node)
    known = {tensor.name for tensor in graph.initializer}
    needed = {name for node in found for name in node.input}
    for tensor in original.proto.graph.initializer:
        if tensor.name in needed - known:
            graph.initializer.append(tensor)
    _set_length(graph, 1)
    return result


def _pruning(graph: onnx.GraphProto) -> _Pruning | None:
    """Returns the nodes that leave one position, if they are the only way to the logits."""
    makers = {name: node for node in graph.node for name in node.output}
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.INT64 and not tensor.external_data
    }
    for unsqueeze in graph.node:
        gather = makers.get(unsqueeze.input[0]) if unsqueeze.op_type == "Unsqueeze" else None
        if gather is None or gather.op_type != "Gather":
            continue
        axes = [each.i for each in gather.attribute if each.name == "axis"]
        last = constants.get(gather.input[1])
        if last is None or last.size != 1 or int(last.flat[0]) != -1:
            continue
        readers = [node for node in graph.node if gather.input[0] in node.input]
        if axes == [1] and readers == [gather] and "prune" in gather.name:
            return _Pruning(gather, unsqueeze)
    return None


def _connect(graph: onnx.GraphProto, old: str, new: str) -> None:
    """Lets all readers of a value read another one."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new


def _set_length(graph: onnx.GraphProto, length: int | None) -> None:
    """Sets the length of the logits; None for that of the input."""
    ids = next((each for each in graph.input if each.name == "input_ids"), None)
    for value in graph.output:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 3 and not value.name.startswith("present"):
            if length is not None:
                dims[1].dim_value = length
            elif ids is not None:
                dims[1].CopyFrom(ids.type.tensor_type.shape.dim[1])
    del graph.value_info[:]


def refusal(folder: Folder, why: str, loss: str = "SoftmaxCrossEntropy") -> ModelError:
    """Returns the refusal of a model that `FineTuning` does not train, with the call that does."""
    form = "batch_first=True" if loss == "CTC" else "axis=-1, ignore_index=-100"
    return ModelError(
        f"'{folder.model}' is {why}; train it with "
        f"ortops.build_training_model(file, loss=ortops.losses.{loss}({form}), optimizer='AdamW')"
    )


def refuse_others(model: onnx.ModelProto, folder: Folder) -> None:
    """Rejects models of speech or images, encoders with segments, and classifiers of tokens.

    Raises:
        ModelError: If it is one.
    """
    graph, ids = model.graph, folder.input_name("input_ids")
    sizes = {tensor.name: tensor.dims for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in sizes]
    if ids not in inputs:
        loss = "CTC" if "input_values" in inputs else "SoftmaxCrossEntropy"
        raise refusal(folder, f"{_NOT}it has no input '{ids}', but {', '.join(inputs)}", loss)
    logits = next((each for each in graph.output if each.name == folder.logits), None)
    dims = [] if logits is None else logits.type.tensor_type.shape.dim
    is_encoder = "token_type_ids" in inputs
    what = "it is an encoder, with an input 'token_type_ids'"
    outputs = {each.name for each in graph.output}
    cached = any(name.startswith("past") for name in inputs)
    if len(dims) == 2 or (logits is None and not cached and outputs & {*HIDDEN, EMBEDDING}):
        what = what if is_encoder else "it has no logits of each token"
        raise ModelError(
            f"'{folder.model}' is {_NOT}{what}; tune it as a text encoder with "
            "task='classification' or another"
        )
    if is_encoder:
        raise refusal(folder, _NOT + what)
    tables = [
        node.input[0] for node in graph.node if node.op_type == "Gather" and ids in node.input
    ]
    known = max((sizes[name][0] for name in tables if sizes.get(name)), default=0)
    if dims and 0 < dims[-1].dim_value < known / 2:
        what = f"it has {dims[-1].dim_value} classes, and {known} tokens"
        raise refusal(folder, _NOT + what)


def may_see_later_tokens(model: onnx.ModelProto) -> bool:
    """Whether it takes a computation to know that no token sees later ones, as without a cache."""
    graph = model.graph
    cached = any(value.name.startswith("past") for value in graph.input)
    return not cached and all(node.op_type != "GroupQueryAttention" for node in graph.node)


def refuse_experts(model: onnx.ModelProto) -> None:
    """Rejects a model with an adapter in front of experts, through which its gradient would pass.

    Raises:
        UnsupportedError: If a node of MoE or QMoE depends on the adapter.
    """
    adapter = adapter_of(model.metadata_props)
    reached = set() if adapter is None else {*adapter.matrices, *adapter.weights}
    found = []
    for node in model.graph.node:  # in topological order
        if reached & set(node.input):
            reached.update(filter(None, node.output))
            found += [node] if node.op_type in _KINDS else []
    if not found:
        return
    first = found[0]
    layer = _LAYER.search(first.name)
    where = f" in layer {layer[1]}" if layer else ""
    raise UnsupportedError(
        f"{first.op_type} node '{first.name or first.output[0]}'{where} ({len(found)} such nodes): "
        "experts have no gradient, which every adapter in front of them needs, those of attention "
        "projections included; adapt only layers behind the last of these nodes, such as "
        "targets=['lm_head'], or tune a form of the model whose experts are standard operators"
    )
