"""Folders of small text encoders, as Optimum and sentence-transformers write them."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any

WORDS = [
    *("good", "bad", "nice", "awful", "film", "book", "plot", "it", "was", "a", "the", "very"),
    *("not", "at", "all", "fine", "poor", "what", "why"),
]


def tokenizer() -> Any:
    """Returns a tokenizer with BERT's special tokens and pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def encoder(kind: str, **settings: Any) -> Any:
    """Returns a small model of transformers in evaluation mode, whose dropout is 0."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "max_position_embeddings": 16, "pad_token_id": 0}
    if kind.startswith("DistilBert"):
        sizes |= {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 24}
        sizes |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
        config: Any = transformers.DistilBertConfig(**sizes, **settings)
    else:
        sizes |= {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
        sizes |= {"intermediate_size": 24, "hidden_dropout_prob": 0.0}
        sizes |= {"attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(**sizes, **settings)
    config.return_dict = False
    made = getattr(transformers, kind)(config).eval()
    with torch.no_grad():  # equal parameters would be stored once
        for parameter in made.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return made


def write(
    model: Any, folder: Path, *, dynamo: bool = False, pooling: str = "", training: bool = False
) -> Path:
    """Writes the folder of a model.

    Args:
        model: The model of transformers.
        folder: The folder.
        dynamo: Which of PyTorch's exporters writes the file.
        pooling: If given, the folder is one of sentence-transformers, which pools so.
        training: Whether the model is exported in training mode.
    """
    import torch

    names = ["input_ids", "attention_mask"]
    if type(model).__name__.startswith("Bert"):
        names.append("token_type_ids")
    ids = torch.ones(2, 5, dtype=torch.int64)
    mask = ids.clone()
    mask[1, -1] = 0
    classifies = "Classification" in type(model).__name__
    output = "logits" if classifies else "last_hidden_state"
    file = folder / ("onnx/model.onnx" if pooling else "model.onnx")
    file.parent.mkdir(parents=True, exist_ok=True)
    axes: dict[str, Any] = {name: {0: "batch", 1: "time"} for name in names}
    settings: dict[str, Any] = {"input_names": names, "output_names": [output]}
    if dynamo:
        free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
        settings |= {
            "dynamo": True,
            "verbose": False,
            "dynamic_shapes": {"inputs": (free,) * len(names)},
        }
    else:
        axes[output] = {0: "batch"} if classifies else {0: "batch", 1: "time"}
        settings |= {"dynamo": False, "dynamic_axes": axes, "opset_version": 17}
        if training:
            mode = torch.onnx.TrainingMode.TRAINING
            settings |= {"training": mode, "do_constant_folding": False}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        given = (ids, mask, torch.zeros_like(ids))[: len(names)]  # no tensor twice: it would be one
        torch.onnx.export(_First(model, names).train(training), given, file, **settings)
    model.eval()
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    if pooling:
        kinds = ("Transformer", "Pooling", "Normalize")
        places = ("", "1_Pooling", "2_Normalize")
        modules = [
            {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (kind, path) in enumerate(zip(kinds, places, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        for place in places[1:]:
            (folder / place).mkdir()
        names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
        chosen = {f"pooling_mode_{name}": kind == pooling for kind, name in names.items()}
        (folder / "1_Pooling/config.json").write_text(json.dumps(chosen))
    return folder


def _First(model: Any, names: list[str]) -> Any:
    import torch

    class First(torch.nn.Module):
        """The first output of a model, whose parameters keep their names."""

        def __init__(self) -> None:
            super().__init__()
            for name, part in model.named_children():
                setattr(self, name, part)

        def forward(self, *inputs: Any) -> Any:
            return model(**dict(zip(names, inputs, strict=True)))[0]

    return First().eval()
