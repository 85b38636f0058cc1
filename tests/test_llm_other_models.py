"""Models that are no language models are refused at once, with the call that trains them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ModelError, Tape, op
from ortops.cli import main
from ortops.llm import FineTuning
from ortops.llm.checking import check_folder

ROWS = [[1, 2, 3, 4, 5]]


def write(folder: Path, *, classes: int = 20, later: bool = False, inputs: str = "") -> Path:
    """Writes a model of 20 tokens, whose mean is over all tokens or over the earlier ones."""
    draw = np.random.default_rng(0).standard_normal
    with Tape(name="model") as tape:
        ids = tape.input("input_ids", np.int64, ["batch", "time"])
        for name in inputs.split():
            tape.input(name, np.int64, ["batch", "time"])
        x = op.Gather(tape.initializer("embedding", draw((20, 8), np.float32)), ids)
        x = x + (op.ReduceMean(x, [1]) if later else op.CumSum(x, np.int64(1)))
        x = op.Tanh(x @ tape.initializer("hidden.weight", draw((8, 8), np.float32)))
        tape.output(x @ tape.initializer("head.weight", draw((8, classes), np.float32)), "logits")
    folder.mkdir(exist_ok=True)
    (folder / "genai_config.json").write_text(json.dumps({"model": {}}))
    onnx.save(tape.model(), folder / "model.onnx")
    return folder


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"later": True}, "a token sees later ones, as in a masked model"),
        ({"classes": 9}, "it has 9 classes, and 20 tokens"),
        ({"inputs": "token_type_ids"}, "it is an encoder, with an input 'token_type_ids'"),
    ],
    ids=lambda value: "",
)
def test_they_are_refused_with_the_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: Any, why: str
) -> None:
    write(tmp_path, **settings)
    message = f"is not a language model: {why}; train it with ortops.build_training_model(file, l"
    for given in ({}, {"rank": None}, {"targets": ["hidden"], "rank": 2}):
        with pytest.raises(ModelError, match=re.escape(message)):
            FineTuning(tmp_path, **given)
    (problem,) = check_folder(tmp_path).problems
    assert message in problem
    assert main(["check", str(tmp_path)]) == 1
    assert "problems: 1" in capsys.readouterr().out
    loss = ortops.losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100)  # as the message says
    assert (
        "SoftmaxCrossEntropy(axis=-1, ignore_index=-100), optimizer='AdamW')" in message + problem
    )
    model = tmp_path / "model.onnx"
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss=loss, optimizer="AdamW")
    )
    feeds = {name: np.array(ROWS) for name in session.inputs}
    assert np.isfinite(session.step(feeds)["loss"])


@pytest.mark.slow
def test_a_language_model_is_not(tmp_path: Path) -> None:
    write(tmp_path, inputs="attention_mask position_ids")
    assert not check_folder(tmp_path).problems
    assert FineTuning(tmp_path, 2, targets=["hidden"]).fit(ROWS, progress=False)


def with_scores(folder: Path, **settings: Any) -> Path:
    """Writes a model whose logits are called scores."""
    model = onnx.load(write(folder, **settings) / "model.onnx")
    for node in model.graph.node:
        node.output[:] = ["scores" if name == "logits" else name for name in node.output]
    model.graph.output[0].name = "scores"
    onnx.save(model, folder / "model.onnx")
    return folder


def test_a_loss_names_the_logits(tmp_path: Path) -> None:
    base, scores = write(tmp_path / "base"), with_scores(tmp_path / "scores")
    named = ortops.losses.NextToken(output="scores")
    for rank in (2, None):
        found = []
        for folder, loss in ((base, None), (scores, named)):
            tuning = FineTuning(folder, rank, loss=loss, learning_rate=0.1)
            history = tuning.fit(ROWS, epochs=3, progress=False)
            tuning.save(tmp_path / f"{folder.name}-{rank}")
            again = FineTuning.load(tmp_path / f"{folder.name}-{rank}")
            found.append((history[-1]["loss"], tuning.evaluate(ROWS), again.evaluate(ROWS)))
            found[-1] += (tuning.generate([1], 4), again.generate([1], 4))
        assert found[0] == found[1]
    pair = {"prompt": [1, 2], "chosen": [3], "rejected": [4]}
    preferring = FineTuning(scores, 2, loss=ortops.losses.DPO(output="scores"))
    preferring.fit([pair], progress=False)
    assert len(preferring.generate([1], 4)) == 4
    masked = with_scores(tmp_path / "masked", later=True)
    with pytest.raises(ModelError, match="a token sees later ones"):
        FineTuning(masked, 2, loss=named)


def test_a_model_with_logits_of_another_name_is_told_its_outputs(tmp_path: Path) -> None:
    with_scores(tmp_path)
    with pytest.raises(ModelError, match=r"the model has no tensor 'logits'.*outputs are 'scores'"):
        FineTuning(tmp_path, 2, targets=["hidden"])


def test_speech_is_refused(tmp_path: Path) -> None:
    with Tape(name="speech") as tape:
        x = tape.input("input_values", np.float32, ["batch", "time"])
        x = op.Unsqueeze(x, [2]) @ tape.initializer("head.weight", np.ones((1, 9), np.float32))
        tape.output(x, "logits")
    onnx.save(tape.model(), tmp_path / "model.onnx")
    why = "it has no input 'input_ids', but input_values; train it with"
    with pytest.raises(ModelError, match=rf"{why} .*losses.CTC\(batch_first=True\)"):
        FineTuning(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly(2)
@pytest.mark.torch
@pytest.mark.optional("transformers", "export")
@pytest.mark.parametrize("kind", ["DistilBertForMaskedLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize("dynamo", [False, True])
def test_exported_models(tmp_path: Path, kind: str, dynamo: bool) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    if kind == "GPT2LMHeadModel":
        config: Any = transformers.GPT2Config(
            vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False
        )
    else:
        config = transformers.DistilBertConfig(
            vocab_size=50, max_position_embeddings=32, dim=16, n_layers=2, n_heads=2, hidden_dim=32
        )
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config).eval()

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).logits

    ids = torch.randint(0, 50, (2, 7))
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "time"} for name in names}
    shapes: dict[str, Any] = {"dynamic_axes": axes}
    if dynamo:
        size = {0: torch.export.Dim("batch"), 1: torch.export.Dim("time")}
        shapes = {"dynamic_shapes": dict.fromkeys(names, size)}
    torch.onnx.export(
        *(Logits().eval(), (ids, torch.ones_like(ids)), tmp_path / "model.onnx"),
        input_names=names,
        output_names=["logits"],
        dynamo=dynamo,
        **shapes,
    )
    if kind == "GPT2LMHeadModel":
        assert FineTuning(tmp_path, 2).fit(ROWS, progress=False)
    else:
        with pytest.raises(ModelError, match="a token sees later ones, as in a masked model"):
            FineTuning(tmp_path, 2)
