"""Direct preference optimization, against PyTorch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import pytest

import ortops
from ortops import ArgumentError, ModelError, Tape, TrainingSession, losses, op

F = np.float32
DRAW = np.random.default_rng(0)
IDS = DRAW.integers(0, 11, (6, 5))
LABELS = np.where(np.arange(5) < [[2], [2], [1], [1], [3], [3]], -100, IDS)
EMBEDDING, HIDDEN, HEAD = (
    DRAW.standard_normal(shape).astype(F) for shape in ((11, 8), (8, 8), (8, 11))
)


def network(ending: str = "") -> onnx.ModelProto:
    with Tape(name="network") as tape:
        ids = tape.input("input_ids", np.int64, ["batch", "time"])
        x = op.Gather(tape.initializer("embedding", EMBEDDING), ids)
        x = op.Tanh(x @ tape.initializer("hidden.weight", HIDDEN))
        y = x @ tape.initializer("lm_head.weight", HEAD)
        if ending == "softmax":
            y = op.Softmax(y, axis=-1)
        tape.output(y, "logits")
    return tape.model()


def built(model: onnx.ModelProto, loss: Any, **settings: Any) -> TrainingSession:
    defaults = {"optimizer": ortops.optimizers.SGD(0.05)}
    return TrainingSession(ortops.build_training_model(model, loss=loss, **(defaults | settings)))


def torch_losses(
    parameters: list[npt.NDArray[F]], scaling: float, beta: float, smoothing: float, steps: int
) -> tuple[list[float], list[npt.NDArray[F]]]:
    """Returns the losses of steps of SGD with rate 0.05, and the final A and B of each layer.

    B is stored without the scaling, as in PEFT.
    """
    import torch
    from torch.nn import functional

    tensors = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in parameters]
    a1, b1, a2, b2 = tensors
    ids, labels = torch.tensor(IDS), torch.tensor(LABELS)
    embedding, hidden, head = (
        torch.tensor(each, dtype=torch.float64) for each in (EMBEDDING, HIDDEN, HEAD)
    )

    def answers(factor: float) -> torch.Tensor:
        x = embedding[ids]
        x = torch.tanh(x @ hidden + factor * (x @ a1 @ b1))
        y = x @ head + factor * (x @ a2 @ b2)
        scores = -functional.cross_entropy(
            y[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100
        )
        return scores.sum(1)

    found = []
    for _ in range(steps):
        ratio = answers(scaling) - answers(0.0).detach()
        margin = beta * (ratio[0::2] - ratio[1::2])
        right, wrong = functional.logsigmoid(margin), functional.logsigmoid(-margin)
        loss = -((1 - smoothing) * right + smoothing * wrong).mean()
        found.append(loss.item())
        gradients = torch.autograd.grad(loss, tensors)
        with torch.no_grad():
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor -= 0.05 * gradient
    return found, [tensor.detach().numpy() for tensor in tensors]


@pytest.mark.quick(1)
@pytest.mark.optional("torch", "compare")
@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (2.0, 0.2)])
@pytest.mark.parametrize("ending", ["", "softmax"])
def test_losses_and_adapters_are_those_of_torch(beta: float, smoothing: float, ending: str) -> None:
    model = ortops.lora.add(network(ending), 2, 6, ["hidden", "lm_head"])
    names = [f"{layer}.lora_{m}.weight" for layer in ("hidden", "lm_head") for m in "AB"]
    starts = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    before = model.SerializeToString()
    session = built(model, losses.DPO(beta=beta, label_smoothing=smoothing))
    assert model.SerializeToString() == before
    feeds = {"input_ids": IDS, "labels": LABELS}
    found = [float(session.step(feeds)["loss"]) for _ in range(4)]
    expected, parameters = torch_losses([starts[n] for n in names], 3.0, beta, smoothing, 4)
    np.testing.assert_allclose(found[0], np.log(2), rtol=1e-6)  # B is 0
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for name, values in zip(names, parameters, strict=True):
        values = values * (3.0 if name.endswith("B.weight") else 1.0)  # B includes the scaling
        np.testing.assert_allclose(session.state[name], values, rtol=1e-4, atol=1e-6)


def test_an_adapter_that_was_trained_before_is_not_part_of_the_reference() -> None:
    model = ortops.lora.add(network(), 2, 6, ["hidden"])
    first = built(model, losses.NextToken())
    for _ in range(3):
        first.step({"input_ids": IDS, "labels": LABELS})
    session = built(first.inference_model(), losses.DPO(beta=1.0))
    feeds = {"input_ids": IDS, "labels": LABELS}
    assert abs(session.evaluate(feeds)["loss"] - np.log(2)) > 1e-3


def test_labels_are_checked_and_the_file_is_an_ordinary_one(tmp_path: Any) -> None:
    session = built(ortops.lora.add(network(), 2, 6, "all-linear"), losses.DPO())
    with pytest.raises(ortops.FeedError, match="labels"):
        session.step({"input_ids": IDS, "labels": LABELS + 11})
    session.save(tmp_path / "trained.onnx")
    again = TrainingSession(tmp_path / "trained.onnx")
    feeds = {"input_ids": IDS, "labels": LABELS}
    assert again.step(feeds)["loss"] == session.step(feeds)["loss"]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match=r"loss DPO: the reference is the model without its adap"):
        built(network(), losses.DPO())
    for settings, text in (
        ({"beta": 0}, "loss DPO: beta must be a finite number > 0, got 0"),
        (
            {"label_smoothing": 0.5},
            "loss DPO: label_smoothing must be a finite number >= 0 and < 0.5",
        ),
    ):
        with pytest.raises(ArgumentError, match=re.escape(text)):
            losses.DPO(**settings)
    session = built(ortops.lora.add(network(), 2, 6, "all-linear"), "DPO")
    with pytest.raises(ortops.OrtopsError):
        session.step({"input_ids": IDS[:3], "labels": LABELS[:3]})  # one answer has no pair


def test_adapters_in_branches_are_refused() -> None:
    text = """<ir_version: 10, opset_import: ["": 21]>
    m (bool deep, float[batch, time, 8] x) => (float[batch, time, 11] logits) {
      logits = If (deep) <then_branch = t () => (float[batch, time, 11] a) { a = MatMul (x, w) },
                          else_branch = e () => (float[batch, time, 11] b) { b = MatMul (x, w) }>
    }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(HEAD, "w"))
    adapted = ortops.lora.add(model, 2, 2, ["w"])
    with pytest.raises(ModelError, match="layer 'w' of the adapter is in a sub-graph"):
        built(adapted, losses.DPO())
