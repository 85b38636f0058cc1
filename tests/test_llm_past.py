"""Inputs for the cache of earlier keys and values, which training leaves empty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from models import llama
from ortops import ArgumentError, lora, losses, optimizers
from ortops.llm import FineTuning


@pytest.fixture(scope="module", params=[32, 4])
def session(request: pytest.FixtureRequest) -> ortops.TrainingSession:
    adapted = lora.add(llama.llama(bits=request.param), 2, targets=["*proj*"])
    loss = losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100)
    model = ortops.build_training_model(adapted, loss=loss, optimizer=optimizers.SGD(0.1))
    return ortops.TrainingSession(model)


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, llama.WORDS, (3, 7))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}


def empty(rows: int) -> dict[str, np.ndarray]:
    shape = (rows, llama.PAIRS, 0, llama.HIDDEN // llama.HEADS)
    names = [
        f"past_key_values.{n}.{kind}" for n in range(llama.LAYERS) for kind in ("key", "value")
    ]
    return {name: np.zeros(shape, np.float32) for name in names}


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_a_cache_that_is_not_fed_is_empty(
    session: ortops.TrainingSession, feeds: dict[str, np.ndarray]
) -> None:
    session.reset()
    expected = [session.step(feeds | empty(3))["loss"].item() for _ in range(3)]
    evaluated = session.evaluate(feeds | empty(3))
    session.reset()
    assert [session.step(feeds)["loss"].item() for _ in range(3)] == expected
    assert session.evaluate(feeds) == evaluated
    session.reset()
    assert session.run_steps([feeds] * 3).tolist() == expected
    session.reset()
    history = session.fit([feeds], epochs=3, progress=False)
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-6)
    session.reset()
    session.fit(feeds, batch_size=2, progress=False)  # the last batch has one row


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_predict_without_a_cache(
    session: ortops.TrainingSession, feeds: dict[str, np.ndarray]
) -> None:
    session.reset()
    found = session.predict(feeds, batch_size=2, outputs="logits")
    model = session.inference_model().SerializeToString()
    served = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    del feeds["labels"]
    np.testing.assert_allclose(found, served.run(["logits"], feeds | empty(3))[0], atol=1e-5)


def test_a_cache_may_be_fed(session: ortops.TrainingSession, feeds: dict[str, np.ndarray]) -> None:
    part = empty(3)
    del part["past_key_values.1.key"]
    session.step(feeds | part)
    part["past_key_values.0.key"] = np.zeros(
        (3, llama.PAIRS, 2, llama.HIDDEN // llama.HEADS), np.float32
    )
    with pytest.raises(
        ortops.FeedError, match=r"'past_sequence_length' is 2 in 'past_key_values.0.key' and 0 in"
    ):
        session.step(feeds | part)


def test_other_inputs_are_not_left_out(
    session: ortops.TrainingSession, feeds: dict[str, np.ndarray]
) -> None:
    del feeds["attention_mask"]
    with pytest.raises(ortops.FeedError, match="input 'attention_mask' is missing"):
        session.step(feeds)


@pytest.mark.slow
def test_a_cache_of_fixed_length_is_fed() -> None:
    model = llama.llama()
    for value in model.graph.input:
        if value.name.startswith("past_key_values"):
            value.type.tensor_type.shape.dim[2].dim_value = 4
    built = ortops.build_training_model(
        model, loss=losses.SoftmaxCrossEntropy(axis=-1), optimizer=optimizers.SGD(0.1)
    )
    ids = np.zeros((1, 2), np.int64)
    with pytest.raises(ortops.FeedError, match=r"input 'past_key_values.0.key' is missing"):
        ortops.TrainingSession(built).step({"input_ids": ids, "attention_mask": ids, "labels": ids})


# --------------------------------------------------------------------- states of convolutions


def short_convolution() -> onnx.ModelProto:
    """A layer as LFM2's in the form of onnxruntime-genai, whose state has the last two tokens."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {
        "embedding": (9, 6),
        "model.layers.0.conv.in_proj.weight": (6, 6),
        "model.layers.0.conv.conv.weight": (6, 1, 3),
        "bias": (6,),
        "lm_head.weight": (6, 9),
    }
    node, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    table, projection, kernel, bias, head = shapes
    convolved = ["t0", kernel, bias, "past_conv.0"], ["c", "present_conv.0"]
    nodes = [
        node("Gather", [table, "input_ids"], ["x"]),
        node("MatMul", ["x", projection], ["p"], name="/model/layers.0/conv/in_proj/MatMul"),
        node("Transpose", ["p"], ["t0"], perm=[0, 2, 1]),
        node("CausalConvWithState", *convolved, domain="com.microsoft", activation="none", ndim=1),
        node("Transpose", ["c"], ["t1"], perm=[0, 2, 1]),
        node("MatMul", ["t1", head], ["logits"], name="/lm_head/MatMul"),
    ]
    state = ["batch", 6, 2]
    graph = onnx.helper.make_graph(
        *(nodes, "lfm2"),
        [value("input_ids", 7, ["batch", "time"]), value("past_conv.0", 1, state)],
        [value("logits", 1, ["batch", "time", 9]), value("present_conv.0", 1, state)],
        [
            onnx.numpy_helper.from_array(draw(shape).astype(np.float32), name)
            for name, shape in shapes.items()
        ],
    )
    opsets = [onnx.helper.make_opsetid(*each) for each in (("", 21), ("com.microsoft", 1))]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.needs("onnxruntime>=1.30")
def test_a_convolution_with_an_empty_state_is_torchs(tmp_path: Path) -> None:
    import torch

    model = short_convolution()
    onnx.save(model, tmp_path / "model.onnx")
    rows = [[1, 2, 3, 4, 5], [5, 3, 1]]
    tuning = FineTuning(tmp_path, None, learning_rate=0.01)
    found = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    parameters = [torch.tensor(array, requires_grad=True) for array in found.values()]
    table, projection, kernel, bias, head = parameters
    optimizer = torch.optim.Adam(parameters, 0.01)
    expected = []
    for _ in range(5):
        losses_of_rows = []
        for row in rows:
            x = (table[torch.tensor(row)] @ projection).T[None]
            x = torch.nn.functional.pad(x, (2, 0))
            y = torch.nn.functional.conv1d(x, kernel, bias, groups=6)[0].T @ head
            target = torch.tensor(row[1:])
            losses_of_rows.append(
                torch.nn.functional.cross_entropy(y[:-1], target, reduction="sum")
            )
        loss = sum(losses_of_rows) / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    history = tuning.fit(rows, 5, batch_size=2, shuffle=False, progress=False)
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-4)
    with pytest.raises(ArgumentError, match="padding must be 'right', as CausalConvWithState"):
        tuning.fit(rows, padding="left", progress=False)
    for given in ({"rank": 2}, {"rank": None}):
        tuning = FineTuning(tmp_path, alpha=8, learning_rate=0.03, **given)
        tuning.fit(rows[:1], 100, progress=False)
        assert tuning.generate([1], max_new_tokens=4) == [2, 3, 4, 5]
        assert len(tuning.session.parameters) == (2 if given["rank"] else 5)
