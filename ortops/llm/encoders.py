"""Text encoders (BERT, MiniLM) and their tasks: heads, losses, and the settings that are saved.

A folder of Optimum has a model with the logits of classes, or with the hidden states of tokens. One
of sentence-transformers says how hidden states become an embedding, in modules.json and
1_Pooling/config.json.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ortops.errors import ArgumentError, ModelError, UnsupportedError
from ortops.graph.convert import load_light, to_ir
from ortops.graph.files.external import LightModel, move_aside
from ortops.graph.files.json_text import read_json, read_settings
from ortops.graph.files.opening import file_in_folder, read_regular
from ortops.graph.names import Names
from ortops.graph.tensor import Tape, Tensor, op
from ortops.llm.folder import Folder, graph_of, open_folder
from ortops.llm.graphs import EMBEDDING, HIDDEN, refusal
from ortops.llm.options import TASKS
from ortops.losses import InfoNCE, Loss, SoftmaxCrossEntropy, Triplet
from ortops.losses.similarity import unit
from ortops.surgery import replace_head

_HEAD = "classifier"
_POOLING = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max"}
_OF_TOKENS = "sentence_bert_config.json"
OF_EMBEDDINGS = ("modules.json", _OF_TOKENS, "config_sentence_transformers.json")
"""Files of sentence-transformers, which say how hidden states become embeddings."""

_ONE_CLASS = "single_label_classification"
"""The type of problem in config.json that classification trains."""

_MODULES = ("Transformer", "Pooling", "Dropout", "Normalize")
"""Modules of sentence-transformers that make an embedding of hidden states."""

_LARGEST = 2**20
"""The largest size of modules.json in bytes."""

_SCORES = "scores"

PLACES = ("first", "second", "third")
"""The inputs with the places of compared texts in a batch of texts."""


@dataclass(frozen=True)
class Encoder:
    """What is trained of a text encoder.

    Attributes:
        task: The task.
        labels: The names of the classes; none unless texts are classified.
        compares: How many of `PLACES` the loss reads; 0 if texts are classified.
        output: The model's output that the loss reads.
    """

    task: str
    labels: tuple[str, ...]
    compares: int
    output: str

    @property
    def has_scores(self) -> bool:
        """Whether the loss compares similarities with given ones."""
        return self.compares == 2 and self.task == "pairs"


def encoder_of(folder: Folder, model: LightModel, given: Mapping[str, Any]) -> Encoder:
    """Returns what is trained of the encoder in a folder.

    Args:
        folder: The folder.
        model: Its model.
        given: The arguments of `ortops.llm.FineTuning`.

    Raises:
        ArgumentError: If the labels or the loss do not fit the task.
        ModelError: If the model is not a text encoder.
    """
    graph = model.proto.graph
    inputs = {value.name for value in graph.input}
    missing = [name for name in ("input_ids", "attention_mask") if name not in inputs]
    if missing or any(name.startswith("past") for name in inputs):
        why = f"it has no input '{missing[0]}'" if missing else "it has caches, as decoders have"
        raise ModelError(f"'{folder.model}' is not a text encoder: {why}; leave out the task")
    if not any("attention_mask" in node.input for node in graph.node):
        raise ModelError(
            f"'{folder.model}' does not read its attention_mask, so padding would count as text; "
            "export it with an example that has padding"
        )
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in graph.output}
    if EMBEDDING not in ranks and [name for name in ranks if ranks[name] == 3] == ["logits"]:
        raise refusal(folder, "not an encoder of whole texts: its logits are those of tokens")
    task, names = given["task"], given["labels"]
    logits = [value for value in graph.output if value.name == "logits"]
    if task == "classification" or (task == "pairs" and ranks.get("logits") == 2):
        if not names and ranks.get("logits") != 2:
            raise ArgumentError(
                f"labels must be the names of the classes, as '{folder.model.name}' has no logits, "
                "got none"
            )
        if ranks.get("logits") != 2:
            _hidden(folder, ranks)
        labels = _labels(folder, graph, names)
        last = [dim for v in logits for dim in v.type.tensor_type.shape.dim[-1:]]
        kept = any(dim.dim_value == len(labels) for dim in last)  # else it gets a new layer
        kind = folder.config.get("problem_type") if kept else None
        if kind not in (None, _ONE_CLASS):
            raise ModelError(
                f"folder '{folder.path}': config.json has problem_type {kind!r}, but task='{task}' "
                f"trains one class of several; set it to '{_ONE_CLASS}', or train the file with "
                "ortops.build_training_model and another loss, such as "
                "BinaryCrossEntropyWithLogits"
            )
        return Encoder(task, labels, 0, "logits")
    if names:
        raise ArgumentError(f"labels must be left out for task='{task}', got {names!r:.80}")
    output = EMBEDDING if EMBEDDING in ranks else _hidden(folder, ranks)
    return Encoder(task, (), 3 if _is_triplet(given["loss"]) else 2, output)


def _hidden(folder: Folder, ranks: Mapping[str, int]) -> str:
    """Returns the output with the hidden states of tokens."""
    found = [name for name, rank in ranks.items() if rank == 3 and name != "logits"]
    known = [name for name in found if name in HIDDEN]
    if len(known or found) != 1 or not (known or found)[0].isidentifier():
        raise ModelError(
            f"'{folder.model}' has no embeddings: an output 'sentence_embedding' [batch, size] or "
            f"'last_hidden_state' [batch, tokens, size] is needed, got {', '.join(ranks)}"
        )
    return str((known or found)[0])


def _labels(folder: Folder, graph: Any, given: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of the classes: those that are given, or those of the folder."""
    dims = [v.type.tensor_type.shape.dim for v in graph.output if v.name == "logits"]
    count = dims[0][-1].dim_value if dims else 0
    known = folder.config.get("id2label")
    own: tuple[str, ...] = ()
    if dims and isinstance(known, Mapping) and len(known) in (count, count or len(known)):
        own = tuple(str(known.get(str(number), number)) for number in range(len(known)))
    if given is not None:
        names = tuple(str(name) for name in given)
        if isinstance(given, str) or len(names) < 2 or len({*names}) < len(names):
            raise ArgumentError(
                f"labels must be the names of at least 2 classes, each once, got {given!r:.80}"
            )
        if names != own and sorted(names) == sorted(own):
            raise ArgumentError(
                f"labels must be in the order of the model's classes, {', '.join(own)}, got "
                f"{given!r:.80}; or leave them out"
            )
        return names
    if len(own) > 1:
        return own
    if count == 1 or own:
        raise ArgumentError(
            f"labels must be the names of at least 2 classes, as '{folder.model.name}' computes "
            "one number for each text, got none; with labels it gets a new last layer"
        )
    if count < 2:
        raise ArgumentError("labels must be the names of the classes, as it has none, got none")
    return tuple(f"LABEL_{number}" for number in range(count))


def first_of(folder: Folder, model: LightModel, encoder: Encoder) -> str | None:
    """Returns the output with hidden states if the first token's represents the text, else None."""
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in model.proto.graph.output}
    if ranks.get("logits") == 2 if encoder.labels else encoder.output == EMBEDDING:
        return None
    pooling = _pooling(folder, "cls") if encoder.labels else _pooling_of_embeddings(folder)
    return _hidden(folder, ranks) if pooling == "cls" else None


def tasks_of(folder: Folder, model: LightModel) -> list[str]:
    """Returns the tasks for which the model of a folder can be trained."""
    found = []
    for task in TASKS:
        for labels in (None, ("0", "1")):
            with contextlib.suppress(ArgumentError, ModelError):
                encoder_of(folder, model, {"task": task, "labels": labels, "loss": None})
                found += [task]
    return list(dict.fromkeys(found))


def has_classes(path: str | os.PathLike[str]) -> bool:
    """Whether the model of a folder has logits of classes."""
    return any(value.name == "logits" for value in graph_of(open_folder(path).model).output)


def _is_triplet(loss: object) -> bool:
    return loss == "Triplet" or isinstance(loss, Triplet)


def with_head(folder: Folder, model: LightModel, encoder: Encoder) -> LightModel:
    """Returns a model with the logits of the classes; the model itself if it has them.

    A model with logits of another number of classes gets a new last layer. One with hidden states
    gets a linear layer behind its pooled states, as transformers initializes it.
    """
    if not encoder.labels:
        return model
    outputs = {value.name: value.type.tensor_type.shape.dim for value in model.proto.graph.output}
    if "logits" in outputs:
        if outputs["logits"][1].dim_value == len(encoder.labels):
            return model
        return load_light(replace_head(folder.model, classes=len(encoder.labels), output="logits"))
    work = to_ir(model)
    name = _hidden(folder, {each: len(dims) for each, dims in outputs.items()})
    with Tape(work.graph, names=Names(work.graph)) as tape:
        values = {
            value.name: tape.tensor(value) for value in (*work.graph.outputs, *work.graph.inputs)
        }
        hidden = values[name]
        size = (hidden.shape or (None,))[-1]
        if not isinstance(size, int):
            raise ModelError(
                f"'{folder.model}': the size of '{name}' is not known; export it again"
            )
        pooled = _pooled(hidden, values["attention_mask"], _pooling(folder, "cls"))
        shape = len(encoder.labels), size
        weight = np.random.default_rng(0).normal(0, 0.02, shape).astype(hidden.dtype)
        both = {"weight": weight, "bias": np.zeros(shape[0], hidden.dtype)}
        head = [tape.initializer(f"{_HEAD}.{part}", array) for part, array in both.items()]
        logits = tape.output(op.Gemm(pooled, *head, transB=1), "logits")
    work.graph.outputs[:] = [logits.value]
    return move_aside(work)


def head_of(model: LightModel) -> str:
    """Returns the module of the layer that computes the logits.

    Raises:
        ModelError: If it is not known.
    """
    makers = {name: node for node in model.proto.graph.node for name in node.output}
    weights = {tensor.name for tensor in model.proto.graph.initializer}
    node = makers.get("logits")
    while node is not None:
        found = [name for name in node.input if name in weights and "." in name]
        named = [name for name in found if "::" not in name]
        if named:
            return str(named[0]).rpartition(".")[0]
        if node.op_type not in ("Add", "Cast", "Identity", "Transpose"):
            break
        node = next((makers[name] for name in node.input if name in makers), None)
    raise ModelError(
        "the layer of the logits has no name; give it as modules_to_save=, or train all weights "
        "with rank=None"
    )


def _settings(folder: Folder, *names: str) -> Any:
    """Returns the settings in a file of the folder; None if it does not exist."""
    file = folder.path.joinpath(*names)
    if not file.exists():
        return None
    return read_settings(file_in_folder(folder.path, "/".join(names), what="settings"))


def _pooling(folder: Folder, default: str) -> str:
    """Returns how hidden states become an embedding: the first, their mean or their maximum."""
    modules = (m for m in _modules(folder) if _kind(m) == "Pooling")
    place = next((str(module.get("path")) for module in modules), "1_Pooling")
    found = _settings(folder, place, "config.json")
    if found is None:
        return default
    marked = [name for name, value in found.items() if name.startswith("pooling_mode_") and value]
    names = [name.removeprefix("pooling_mode_") for name in marked]
    kinds = [_POOLING.get(name, name) for name in names]
    kinds = kinds or [str(found.get("pooling_mode", default))]
    if len(kinds) != 1 or kinds[0] not in _POOLING.values():
        raise UnsupportedError(
            f"folder '{folder.path}': {place}/config.json must choose one of "
            f"{', '.join(_POOLING.values())}, got {', '.join(kinds)}"
        )
    return str(kinds[0])


def _pooling_of_embeddings(folder: Folder) -> str:
    """Returns how hidden states become an embedding, if nothing else makes one of them."""
    for each in _modules(folder):
        if _kind(each) not in _MODULES:
            raise UnsupportedError(
                f"folder '{folder.path}': the module {_kind(each)} of modules.json is not in "
                f"'{folder.model.name}'; export the folder with an output '{EMBEDDING}', as "
                "Optimum does with library_name='sentence_transformers'"
            )
    return _pooling(folder, "mean")


def _kind(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _modules(folder: Folder) -> list[Mapping[str, Any]]:
    """Returns the modules of sentence-transformers, by modules.json; none without such a file.

    Raises:
        ModelError: If it is not a list of modules in JSON.
    """
    file = folder.path / "modules.json"
    if not file.exists():
        return []
    content = read_regular(file_in_folder(folder.path, file.name, what="settings"), most=_LARGEST)
    try:
        found = read_json(content)
    except ValueError as error:
        raise ModelError(f"file '{file}': invalid JSON: {error}; correct it") from error
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise ModelError(f"file '{file}' must have a list of modules; correct it")
    return found


def longest_of(folder: Folder) -> int:
    """Returns the largest number of tokens that those who serve a folder give to its model."""
    own = (_settings(folder, _OF_TOKENS) or {}).get("max_seq_length")
    found = [own, folder.tokenizer_config.get("model_max_length")]
    return min((n for n in found if type(n) is int and n > 0), default=2**31)


def is_lowered(folder: Folder) -> bool:
    """Whether those who embed texts with a folder give them in lower case to its tokenizer."""
    return bool((_settings(folder, _OF_TOKENS) or {}).get("do_lower_case"))


def folders_of_modules(folder: Folder) -> list[str]:
    """Returns the subfolders of a folder of sentence-transformers that its modules name."""
    names = [str(each.get("path", "")) for each in _modules(folder)]
    return [n for n in names if n and Path(n).name == n != ".." and (folder.path / n).is_dir()]


def _is_normalized(folder: Folder) -> bool:
    return any(_kind(each) == "Normalize" for each in _modules(folder))


def _pooled(hidden: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Returns the embedding [batch, size] of hidden states [batch, tokens, size]."""
    if kind == "cls":
        return hidden[:, 0]
    seen = op.Unsqueeze(mask, [2]).astype(hidden.dtype)
    if kind == "max":
        return op.ReduceMax(op.Where(seen > 0, hidden, -1e9), [1], keepdims=0)
    total = op.ReduceSum(seen, [1], keepdims=0)
    return op.ReduceSum(hidden * seen, [1], keepdims=0) / op.Max(total, 1e-9)


def loss_of(folder: Folder, encoder: Encoder, given: object) -> tuple[Any, dict[str, Any]]:
    """Returns the loss of a task, and the inputs that it declares.

    Args:
        folder: The folder.
        encoder: What is trained.
        given: The argument ``loss`` of `ortops.llm.FineTuning`.

    Raises:
        ArgumentError: If the loss does not fit the task.
    """
    allowed: dict[str, type[Loss]] = {"SoftmaxCrossEntropy": SoftmaxCrossEntropy}
    if encoder.compares:
        allowed = {"InfoNCE": InfoNCE, "Triplet": Triplet} if encoder.task == "retrieval" else {}
    kind = type(given).__name__ if isinstance(given, Loss) else given
    if kind is not None and kind not in allowed:
        fits = " or ".join(allowed) or "left out, as it compares cosines with scores"
        raise ArgumentError(f"loss must be {fits} for task='{encoder.task}', got {kind}")
    if not encoder.compares:
        own = given if isinstance(given, SoftmaxCrossEntropy) else SoftmaxCrossEntropy()
        return replace(own, output="logits"), {}
    names = PLACES[: encoder.compares]
    inputs: dict[str, Any] = {name: (np.int64, [f"{name} texts"]) for name in names}
    if encoder.has_scores:
        inputs[_SCORES] = np.float32, ["first texts"]
    if not isinstance(given, Loss):
        given = (
            Triplet(anchor="first", positive="second", negative="third", margin=5.0)
            if encoder.compares == 3
            else InfoNCE(query="first", key="second", temperature=0.05)
        )
    return _of_embeddings(folder, encoder, given, inputs), inputs


def _of_embeddings(folder: Folder, encoder: Encoder, loss: Loss, inputs: Mapping[str, Any]) -> Any:
    """Returns a function that computes the loss of compared texts."""
    is_pooled = encoder.output == EMBEDDING
    pooling = "" if is_pooled else _pooling_of_embeddings(folder)
    is_unit = _is_normalized(folder) and not is_pooled

    def computed(**tensors: Tensor) -> Any:
        found = tensors[encoder.output]
        if not is_pooled:
            found = _pooled(found, tensors["attention_mask"], pooling)
        if is_unit:
            found = unit(found)
        texts = [op.Gather(found, tensors[name], axis=0) for name in PLACES if name in inputs]
        rows = op.Shape(tensors["first"]).astype(found.dtype)
        count = op.Squeeze(rows, [0])
        if encoder.has_scores:
            a, b = map(unit, texts)
            error = op.ReduceSum(a * b, [1], keepdims=0) - tensors[_SCORES].astype(found.dtype)
            return op.ReduceSum(error * error, keepdims=0), count
        return loss.terms(*texts)[0] * count, count

    names = [encoder.output, *(() if is_pooled else ("attention_mask",)), *inputs]
    kind = inspect.Parameter.KEYWORD_ONLY
    computed.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    computed.__name__ = f"{encoder.task} of embeddings"
    return computed


def settings_with_labels(folder: Folder, labels: Sequence[str]) -> dict[str, bytes]:
    """Returns config.json with the names of the classes, by its name; nothing without classes."""
    if not labels:
        return {}
    file = folder.path / "config.json"
    found = dict(read_settings(file)) if file.exists() else {}
    found |= {"id2label": {str(n): name for n, name in enumerate(labels)}}
    found |= {"label2id": {name: n for n, name in enumerate(labels)}}
    if "num_labels" in found:
        found["num_labels"] = len(labels)
    if "problem_type" in found:
        found["problem_type"] = _ONE_CLASS
    kinds = found.get("architectures")
    if isinstance(kinds, list):
        ends = (each.removesuffix("Model") for each in kinds if isinstance(each, str))
        found["architectures"] = [
            each if "For" in each else f"{each}ForSequenceClassification" for each in ends
        ]
    return {"config.json": json.dumps(found, indent=2, ensure_ascii=False).encode()}
