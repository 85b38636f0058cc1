"""``session.summary()``: the modules, counted as PyTorch counts its parameters."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_exclusions import blocks
from torch_exports import exported
from training_models import affine

import ortops
from models.llama import llama
from ortops import Tape, TrainingSession, build_training_model, lora


def summary(model: onnx.ModelProto, **settings: object) -> tuple[dict[str, list[str]], str, str]:
    """The rows of a table by module, the line of the totals, and the rest."""
    given = {"loss": "MeanSquaredError", "optimizer": "SGD"} | settings
    return split(TrainingSession(build_training_model(model, **given)).summary())


def split(text: str) -> tuple[dict[str, list[str]], str, str]:
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    end = next(i for i, line in enumerate(lines) if re.match(r"[\d,]+ parameters: ", line))
    assert lines[0].split() == ["module", "output", "parameters", "trained"]
    rows = {name: rest for name, *rest in (re.split(" {2,}", line) for line in lines[1:end])}
    assert len(rows) == end - 1
    return rows, lines[end], "\n".join(lines[end + 1 :])


def test_modules_and_why_they_are_not_trained() -> None:
    rows, total, others = summary(blocks(), trainable=["!*.bias"])
    assert rows == {
        "tied": ["[N,3]", "9", "yes, shared by 2 nodes"],
        "one": ["[N,3]", "3", "no: trainable= leaves it out"],
        "two": ["[N,3]", "12", "9 of them; no: trainable= leaves it out"],
        "three": ["[N,3]", "3", "no: trainable= leaves it out"],
    }
    assert total == "27 parameters: 18 trained, 9 not trained"
    assert "eye holds the identity" in others
    rows, total, _ = summary(lora.add(blocks(), rank=1, targets=["two"]))
    assert rows["two"] == ["[N,3]", "12", "no: the adapter's base"]
    assert rows["two.lora_A"] == ["[N,1]", "3", "yes"]
    assert total == "33 parameters: 6 trained, 27 not trained"


def test_several_algorithms_say_which_of_them_trains() -> None:
    built = build_training_model(
        affine(), loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
    )
    both = ortops.add_training(built, loss="L1", optimizer="SGD", name="other")
    rows, total, others = split(TrainingSession(both).summary())
    assert rows == {
        "w": ["[batch,2]", "6", "yes, by main"],
        "b": ["[batch,2]", "2", "yes, by other"],
    }
    assert (total, others) == ("8 parameters: 8 trained, 0 not trained", "")


def test_names_of_files_stay_in_their_cells() -> None:
    long = "a." * 60 + "layer"
    with Tape() as tape:
        x = tape.input("x", np.float32, ["a_very_long_symbol_of_a_dimension", 2])
        h = x @ tape.initializer(f"{long}.weight", np.ones((2, 2), np.float32))
        tape.output(h * tape.initializer("\x1b[31m\n.w", np.ones(2, np.float32)), "y")
    text = TrainingSession(
        build_training_model(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    ).summary()
    rows, total, _ = split(text)
    assert total == "6 parameters: 6 trained, 0 not trained"
    assert [name[-6:] for name in rows] == [".layer", "\\x1b[31m\\n"[-6:]]
    assert {name[0] for name in rows} == {"…", "\\"}


@pytest.mark.slow
def test_quantized_weights_count_their_elements() -> None:
    float_total = split(_language_model(32))
    four_bits = split(_language_model(4))
    counts = [re.match(r"[\d,]+", total) for _, total, _ in (float_total, four_bits)]
    assert counts[0] is not None
    assert counts[1] is not None
    assert counts[0][0] == counts[1][0]
    assert any(row[2] == "no: quantized" for row in four_bits[0].values())


def _language_model(bits: int) -> str:
    model = lora.add(llama(bits=bits), rank=2, targets=["q_proj"])
    loss = ortops.losses.NextToken()
    return TrainingSession(build_training_model(model, loss=loss, optimizer="SGD")).summary()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_totals_are_those_of_torch(dynamo: bool) -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
            self.rest = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4))
            self.rnn = nn.GRU(4, 4, batch_first=True)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.rest(self.body(self.rnn(self.embed(ids))[0][:, -1])))

    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():  # as after training: no two are equal
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = exported(net, {"ids": torch.zeros(3, 5, dtype=torch.int64)}, dynamo=dynamo)
    excluded = ["!body.0.*", "!rest.1.*"]
    rows, total, others = summary(model, loss="SoftmaxCrossEntropy", trainable=excluded)
    frozen = sum(p.numel() for p in (*net.body[0].parameters(), *net.rest[1].parameters()))
    every = sum(p.numel() for p in net.parameters())
    assert total == f"{every} parameters: {every - frozen} trained, {frozen} not trained"
    assert rows["body.0"] == ["[batch,6]", "30", "no: trainable= leaves it out"]
    assert rows["rest.1"] == ["[batch,4]", "28", "no: trainable= leaves it out"]
    assert rows["body.1"] == ["[batch,6]", "12", "yes"]
    tied = rows.get("embed") or rows["head"]
    assert tied == ["[batch,5,4]", "28", "yes, shared by 2 nodes"]
    assert "running_mean" in others


def test_a_numbered_weight_is_in_the_scope_of_its_node() -> None:
    nodes = [helper.make_node("MatMul", ["x", "onnx::MatMul_3"], ["y"], name="/encoder/q/MatMul")]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2]) for name in ("x", "y")
    ]
    weight = numpy_helper.from_array(np.ones((2, 2), np.float32), "onnx::MatMul_3")
    graph = helper.make_graph(nodes, "scoped", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert summary(model)[0] == {"encoder.q": ["[N,2]", "4", "yes"]}
