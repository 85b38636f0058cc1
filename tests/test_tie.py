"""Copies of weights become one: the same outputs, and training as PyTorch's tied weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from violations import all_violations

import ortops
from ortops import ArgumentError, ModelError, op
from ortops.cli import main
from ortops.surgery import tie, untie

TABLE = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
IDS = np.array([[1, 2, 3], [4, 5, 6]])
LOSS = ortops.losses.SoftmaxCrossEntropy(axis=-1)


def copied(dtype: Any = np.float32) -> onnx.ModelProto:
    """A model whose embedding, gate and transposed head are copies of one weight."""
    table = TABLE.astype(dtype)
    with ortops.Tape(name="copied") as tape:
        ids = tape.input("ids", np.int64, ["batch", "time"])
        x = op.Gather(tape.initializer("embedding", table), ids)
        x = x + op.Gather(tape.initializer("gate", table), ids)
        x = x @ tape.initializer("middle", np.eye(4, dtype=dtype) + table[:4])
        tape.output(x @ tape.initializer("head", np.ascontiguousarray(table.T)), "logits")
    return tape.model()


NAMES = ["embedding", "gate", "head"]


def outputs(model: onnx.ModelProto, feeds: dict[str, Any]) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds)[0]


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def trained(model: Any, steps: int = 3, **settings: Any) -> ortops.TrainingSession:
    settings = {"loss": LOSS, "optimizer": ortops.optimizers.SGD(0.1), **settings}
    session = ortops.TrainingSession(ortops.build_training_model(model, **settings))
    for _ in range(steps):
        session.step({"ids": IDS, "labels": IDS})
    return session


def test_the_tied_model_trains_as_the_formula_says() -> None:
    """In float64: the gradient of the shared weight is the sum of those of its places."""
    before = copied(np.float64)
    model = tie(before, NAMES)
    assert {*arrays(model)} == {"embedding", "middle"}
    np.testing.assert_array_equal(outputs(model, {"ids": IDS}), outputs(before, {"ids": IDS}))
    session = trained(model, 0)
    found = session.gradients({"ids": IDS, "labels": IDS})["embedding"]
    table, middle = TABLE.astype(np.float64), arrays(before)["middle"]
    x = 2 * table[IDS] @ middle
    logits = x @ table.T
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    cotangent = (p - np.eye(7)[IDS]) / IDS.size
    expected = np.einsum("btv,bth->vh", cotangent, x)
    np.add.at(expected, IDS, 2 * cotangent @ table @ middle.T)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_building_and_check_say_what_was_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    ortops.build_training_model(copied(), loss=LOSS, optimizer="SGD")
    (said,) = [each for each in caplog.messages if "ortops.surgery.tie" in each]
    expected = "'gate' is a copy of 'embedding', 'head' is a transposed copy of 'embedding', as if "
    expected += "a tied weight was exported several times; they are trained independently, "
    assert said.startswith(expected)
    assert f"unless ortops.surgery.tie(model, {NAMES}) makes them one" in said
    caplog.clear()
    ortops.build_training_model(tie(copied(), NAMES), loss=LOSS, optimizer="SGD")
    assert not [each for each in caplog.messages if "ortops.surgery.tie(" in each]
    onnx.save(copied(), tmp_path / "model.onnx")
    assert (
        main(["check", str(tmp_path / "model.onnx"), "--loss", "SoftmaxCrossEntropy(axis=-1)"]) == 0
    )
    assert "ortops.surgery.tie(model, ['embedding'" in re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.slow
def test_all_copies_in_the_original_are_written(tmp_path: Path) -> None:
    original = copied()
    path = tmp_path / "trainable.onnx"
    with all_violations() as check:
        for names in (NAMES, ["head", "gate", "embedding"], ["gate", "head"]):
            with check(names):
                session = trained(tie(original, names))
                session.save(path)  # and resumed
                session = ortops.TrainingSession(path)
                session.step({"ids": IDS, "labels": IDS})
                after = session.inference_model(original=original)
                found = arrays(after)
                assert {*found} == {*arrays(original)}
                turned = {n: a.T if n == "head" else a for n, a in found.items()}
                for name in names:
                    np.testing.assert_array_equal(turned[name], turned[names[0]])
                    assert not np.array_equal(found[name], arrays(original)[name])
                own = outputs(session.inference_model(), {"ids": IDS})
                np.testing.assert_allclose(outputs(after, {"ids": IDS}), own, rtol=1e-6)
    twice = tie(tie(original, ["head", "gate"]), ["embedding", "head"])  # of other orders
    found = arrays(trained(twice).inference_model(original=original))
    np.testing.assert_array_equal(found["gate"], found["embedding"])
    np.testing.assert_array_equal(found["head"], found["embedding"].T)


def test_tied_weights_beside_untie_and_adapters() -> None:
    tied = tie(copied(), NAMES)
    again = untie(tied, ["embedding"])  # each reader has its own
    assert {*arrays(again)} == {"embedding", "embedding.1", "embedding.2", "middle"}
    np.testing.assert_array_equal(outputs(again, {"ids": IDS}), outputs(copied(), {"ids": IDS}))
    with pytest.raises(ModelError, match=r"it has no weight 'embedding\.1'"):
        trained(again).inference_model(original=copied())
    adapted = ortops.lora.add(tied, rank=2, targets=["middle"])
    session = trained(adapted)
    merged = ortops.lora.merge(session.inference_model())
    expected = outputs(session.inference_model(), {"ids": IDS})
    np.testing.assert_allclose(outputs(merged, {"ids": IDS}), expected, rtol=1e-4, atol=1e-5)


def test_float16_and_bytes() -> None:
    model = tie(copied(np.float16).SerializeToString(), NAMES)
    np.testing.assert_array_equal(
        outputs(model, {"ids": IDS}), outputs(copied(np.float16), {"ids": IDS})
    )
    session = trained(model)
    found = arrays(session.inference_model(original=copied(np.float16)))
    np.testing.assert_array_equal(found["head"], found["embedding"].T)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["embedding"], ArgumentError, "names must be at least two names of copies, got ['emb"),
        (3, ArgumentError, "names must be a list of names of initializers, got 3"),
        (["gate", "haed"], ModelError, "no floating-point initializer 'haed'; did you mean 'head'"),
        (["gate", "middle"], ModelError, "'middle' float32[4, 4] is neither a copy of 'gate' flo"),
    ],
)
def test_what_is_refused(names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tie(copied(), names)
    trainable = ortops.build_training_model(copied(), loss=LOSS, optimizer="SGD")
    with pytest.raises(ModelError, match="it has training_info"):
        tie(trainable, NAMES)


@pytest.mark.slow
@pytest.mark.nightly(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.torch
@pytest.mark.optional("transformers", "export")
@pytest.mark.parametrize("dynamo", [False, True])
def test_exported_weights_train_as_in_pytorch(
    dynamo: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    bert = transformers.BertForMaskedLM(config).eval()

    for parameter in bert.parameters():  # exporters merge those of equal values
        parameter.data += 0.1 * torch.randn_like(parameter)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = bert

        def forward(self, ids: Any) -> Any:
            return self.model(input_ids=ids).logits

    ids = torch.randint(0, 30, (2, 5))
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        *(Logits().eval(), (ids,), file),
        input_names=["ids"],
        output_names=["logits"],
        dynamo=dynamo,
        do_constant_folding=not dynamo,
    )
    ortops.build_training_model(file, loss=LOSS, optimizer="SGD")
    said = [each for each in caplog.messages if "ortops.surgery.tie(" in each]
    assert len(said) == 1
    names = re.findall(r"'([^']+)'", said[0].split("tie(model, ")[1])
    settings = {"loss": LOSS, "optimizer": ortops.optimizers.SGD(0.5), "trainable": names[:1]}
    session = ortops.TrainingSession(ortops.build_training_model(tie(file, names), **settings))
    optimizer = torch.optim.SGD([bert.get_input_embeddings().weight], 0.5)
    for _ in range(5):
        optimizer.zero_grad()
        logits = bert(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 30), ids.reshape(-1))
        loss.backward()
        optimizer.step()
        found = session.step({"ids": ids.numpy(), "labels": ids.numpy()})["loss"]
        np.testing.assert_allclose(found, loss.item(), rtol=1e-4)
    after = session.inference_model(original=file)
    with torch.no_grad():
        expected = bert(input_ids=ids).logits.numpy()
    found = onnxruntime.InferenceSession(after.SerializeToString()).run(None, {"ids": ids.numpy()})
    np.testing.assert_allclose(found[0], expected, atol=1e-3)
