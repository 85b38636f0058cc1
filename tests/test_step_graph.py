"""step_graph: one training step as a flat model that any onnxruntime runs, driven by its JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from running import CPU, plain_session, run
from training_models import (
    TRAINING_DOMAIN,
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    forces,
    foreign,
    initializers,
    labelled,
    names,
    normalizing,
    op_types,
)

import ortops
from models.lenet import lenet
from models.mlp import mlp
from models.resnet import resnet
from models.transformer import transformer
from ortops import ModelError, OrtopsError, TrainingSession, build_training_model, op, step_graph
from ortops.optimizers import SGD, Adagrad, Adam, AdamW, Momentum
from tests.spies import lowered

MODELS: dict[str, tuple[Any, str, Any]] = {
    "affine": (affine, "MeanSquaredError", affine_batch),
    "classifier": (
        lambda: classifier(dropout=0.5),
        "SoftmaxCrossEntropy",
        lambda seed: labelled((6,), seed=seed),
    ),
    "normalizing": (
        normalizing,
        "SoftmaxCrossEntropy",
        lambda seed: labelled((1, 4, 4), seed=seed),
    ),
}
OPTIMIZERS = {
    "Adagrad": Adagrad(epsilon=1e-3),
    "Adam": Adam(),
    "Momentum": Momentum(mode="nesterov"),
    "SGD": "SGD",
    "AdamW": AdamW(),
    "9 digits": Adam(alpha=0.123456789),
}


def trainable(model: str, optimizer: str) -> onnx.ModelProto:
    make, loss, _ = MODELS[model]
    return build_training_model(make(), loss=loss, optimizer=OPTIMIZERS[optimizer])


def batches(model: str, steps: int = 4) -> list[Arrays]:
    make = MODELS[model][2]
    return [make(seed=seed) for seed in range(steps)]


def updates_of(step: onnx.ModelProto) -> dict[str, str]:
    (entry,) = [entry for entry in step.metadata_props if entry.key == "ortops.step_graph"]
    found = json.loads(entry.value)
    assert isinstance(found, dict)
    return found


def drive(
    step: onnx.ModelProto, session: onnxruntime.InferenceSession, feeds: list[Arrays]
) -> tuple[list[Arrays], Arrays]:
    """The loop that any language can write: the JSON says which output feeds which input next."""
    updates = updates_of(step)
    outputs = names(step.graph.output)
    state: Arrays = {}
    shown = []
    for batch in feeds:
        found = dict(zip(outputs, session.run(outputs, {**batch, **state}), strict=True))
        state = {variable: found[output] for variable, output in updates.items()}
        shown.append({k: v for k, v in found.items() if k not in updates.values()})
    return shown, state


def with_library(step: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    ortops.register_custom_ops(options)
    return onnxruntime.InferenceSession(step.SerializeToString(), options, providers=CPU)


# ------------------------------------------------------------------------------------- numbers


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_plain_sessions_train_as_the_training_session_does(model: str, optimizer: str) -> None:
    given = trainable(model, optimizer)
    step = step_graph(given)
    onnx.checker.check_model(step, full_check=True)
    feeds = batches(model)
    session = TrainingSession(given)
    expected = [session.step(batch) for batch in feeds]
    for plain in (plain_session(step), with_library(step)):
        shown, state = drive(step, plain, feeds)
        for found, wanted in zip(shown, expected, strict=True):
            assert set(found) == set(wanted)
            for name, array in wanted.items():
                np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6)
        constant = {"learning_rate", "seed"} & set(session.state)
        assert set(state) | constant == set(session.state)
        for name, array in state.items():
            np.testing.assert_allclose(
                array, session.state[name], rtol=2e-5, atol=2e-6, err_msg=name
            )


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", MODELS)
def test_the_present_values_are_the_defaults(model: str) -> None:
    session = TrainingSession(trainable(model, "Adam"))
    first, second = batches(model, 2)
    session.step(first)
    session.learning_rate = 0.5
    step = step_graph(session.model())
    inputs = set(names(step.graph.input))
    found = initializers(step.graph)
    for name, array in session.state.items():
        assert name in inputs
        np.testing.assert_array_equal(found[name], array)
    (shown,), _ = drive(step, plain_session(step), [second])
    np.testing.assert_allclose(shown["loss"], session.step(second)["loss"], rtol=1e-5)


def test_the_learning_rate_can_be_fed() -> None:
    step = step_graph(trainable("affine", "SGD"))
    batch = affine_batch() | {"learning_rate": np.array(0, np.float32)}
    _, state = drive(step, plain_session(step), [batch])
    np.testing.assert_array_equal(state["w"], initializers(step.graph)["w"])


def test_repeated_runs_leave_the_defaults_alone() -> None:
    # onnxruntime may write BatchNormalization's new statistics over the values it was fed.
    step = step_graph(trainable("normalizing", "SGD"))
    session = plain_session(step)
    (batch,) = batches("normalizing", 1)
    state = {name: array.copy() for name, array in initializers(step.graph).items()}
    fed = {name: state[name] for name in updates_of(step)}
    outputs = names(step.graph.output)
    first = session.run(outputs, batch)
    for again in (session.run(outputs, batch), session.run(outputs, {**batch, **fed})):
        assert_same_arrays(
            dict(zip(outputs, again, strict=True)), dict(zip(outputs, first, strict=True))
        )
    for name, array in initializers(step.graph).items():
        np.testing.assert_array_equal(state[name], array)


@pytest.mark.quick(1)
@pytest.mark.needs("onnxruntime>=1.27")  # older ones end the process: functions in functions
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_gradient_of_a_gradient(dropout: float) -> None:
    given = build_training_model(
        forces(dropout=dropout), loss=ortops.losses.L1(output="slope"), optimizer="Adam"
    )
    step = step_graph(given)
    onnx.checker.check_model(step, full_check=True)
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(4, 3)).astype(np.float32) for name in ("x", "targets")}
    session = TrainingSession(given)
    expected = [session.step(batch)["loss"] for _ in range(3)]
    for plain in (plain_session(step), with_library(step)):
        shown, _ = drive(step, plain, [batch] * 3)
        np.testing.assert_allclose([found["loss"] for found in shown], expected, rtol=1e-5)


LEVELS = onnxruntime.GraphOptimizationLevel


@pytest.mark.quick(1)
@pytest.mark.parametrize("level", [LEVELS.ORT_ENABLE_BASIC, LEVELS.ORT_ENABLE_ALL])
def test_any_optimization_gives_the_same_numbers(level: Any) -> None:
    step = step_graph(trainable("normalizing", "Adam"))
    feeds = batches("normalizing")
    _, expected = drive(step, plain_session(step, optimize=False), feeds)
    _, state = drive(step, plain_session(step, graph_optimization_level=level), feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


FOUR = {"mlp": mlp, "lenet": lenet, "resnet": resnet, "transformer": transformer}


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_the_four_models(name: str) -> None:
    settings = {"dropout_ratio": 0.2} if name in ("lenet", "transformer") else {}
    model = FOUR[name](**settings)
    given = build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=Adam(epsilon=1e-3))
    step = step_graph(given)
    onnx.checker.check_model(step, full_check=True)
    (data,) = [value.name for value in model.graph.input]
    shape = {"mlp": (64,), "transformer": (8, 8)}.get(name, (1, 8, 8))
    rng = np.random.default_rng(0)
    feeds = [
        {data: rng.normal(size=(4, *shape)).astype(np.float32), "labels": rng.integers(0, 10, 4)}
        for _ in range(3)
    ]
    session = TrainingSession(given)
    expected = [session.step(batch)["loss"] for batch in feeds]
    for plain in (plain_session(step), with_library(step)):
        shown, _ = drive(step, plain, feeds)
        np.testing.assert_allclose([found["loss"] for found in shown], expected, rtol=1e-4)


# ---------------------------------------------------------------------------------------- form


def test_shows_the_nodes_of_the_specification() -> None:
    step = step_graph(trainable("classifier", "Adam"))
    types = Counter(op_types(step.graph))
    assert types["Gradient"] == 1
    assert types["Adam"] == 3
    schema = onnx.defs.get_schema("Adam", 1, TRAINING_DOMAIN)
    for node in step.graph.node:
        if node.op_type == "Adam":
            assert len(node.input) == 6
            assert {a.name for a in node.attribute} == set(schema.attributes)
    functions = {(f.domain, f.name, f.overload) for f in step.functions}
    for node in step.graph.node:
        if node.domain == TRAINING_DOMAIN:
            assert (node.domain, node.op_type, node.overload) in functions
    for function in step.functions:
        assert {node.domain for node in function.node} == {""}
        (version,) = [e.version for e in function.opset_import if e.domain == ""]
        assert version == step.opset_import[0].version
    assert step.ir_version >= 10
    assert not step.training_info


def test_attributes_that_six_digits_cannot_carry_are_lowered() -> None:
    step = step_graph(trainable("classifier", "9 digits"))
    assert "Adam" not in op_types(step.graph)
    assert "Gradient" in op_types(step.graph)
    assert "Adam" in op_types(step_graph(trainable("classifier", "Adam")).graph)


def test_leaves_out_what_only_inference_wants() -> None:
    model = normalizing()
    extra = helper.make_node("Exp", ["logits"], ["exponentials"], name="only for inference")
    model.graph.node.append(extra)
    model.graph.output.append(
        helper.make_tensor_value_info("exponentials", TensorProto.FLOAT, ["batch", 3])
    )
    given = build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD", seed=1)
    step = step_graph(given)
    outputs = names(step.graph.output)
    assert "logits" not in outputs
    assert "exponentials" not in outputs
    # logits_training is computed on the way to the loss; exponentials_training is not.
    assert {"loss", "logits_training"} <= set(outputs)
    assert op_types(step.graph).count("Conv") == 1
    assert "only for inference" not in names(step.graph.node)
    assert "Exp" not in op_types(step.graph)


def test_inputs_of_no_effect_go() -> None:
    model = affine()
    model.graph.input.append(helper.make_tensor_value_info("unread", TensorProto.FLOAT, ["N"]))
    step = step_graph(build_training_model(model, loss="L1", optimizer="SGD"))
    assert set(names(step.graph.input)) == {
        *("x", "targets", "w", "b", "step", "learning_rate"),
    }


def test_the_argument_is_untouched_and_metadata_kept() -> None:
    given = trainable("normalizing", "Adam")
    helper.set_model_props(
        given, {"license": "none"} | {e.key: e.value for e in given.metadata_props}
    )
    before = given.SerializeToString(deterministic=True)
    step = step_graph(given)
    assert given.SerializeToString(deterministic=True) == before
    assert ("license", "none") in [(e.key, e.value) for e in step.metadata_props]


def test_takes_bytes_and_paths(tmp_path: Path) -> None:
    given = trainable("affine", "Adam")
    path = tmp_path / "trainable.onnx"
    onnx.save(given, path)
    wanted = step_graph(given)
    assert step_graph(path) == wanted
    assert step_graph(given.SerializeToString()) == wanted


def test_two_step_graphs_of_one_model_are_equal() -> None:
    given = trainable("normalizing", "Adam")
    assert step_graph(given) == step_graph(given)


def optimized_op_types(model: onnx.ModelProto, path: Path) -> Counter[str]:
    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    plain_session(model, optimized_model_filepath=str(path), graph_optimization_level=level)
    return Counter(node.op_type for node in onnx.load(path).graph.node)


SHARING = {
    "mlp": mlp,
    "classifier": lambda: classifier(dropout=0.5),
    "normalizing": normalizing,
    "lenet": lambda: lenet(dropout_ratio=0.5),
    "resnet": resnet,
    "transformer": lambda: transformer(dropout_ratio=0.1),
}


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.parametrize("make", SHARING.values(), ids=SHARING)
def test_onnxruntime_shares_the_forward_pass(make: Any, tmp_path: Path) -> None:
    given = build_training_model(make(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    step = step_graph(given)
    once = optimized_op_types(lowered(step), tmp_path / "lowered.onnx")
    shared = optimized_op_types(step, tmp_path / "step.onnx")
    heavy = ("MatMul", "Gemm", "Conv", "MaxPool", "BatchNormalization", "LayerNormalization")
    for op_type in (*heavy, "Tanh", "Erf", "Softmax", "LogSoftmax"):
        assert shared[op_type] == once[op_type], op_type
    assert once["MatMul"] + once["Gemm"] + once["Conv"] > 0


@pytest.mark.slow
def test_lowering_a_step_graph_gives_the_same_numbers() -> None:
    step = step_graph(trainable("normalizing", "Adam"))
    lowered = ortops.lower(step)
    assert not [n for n in lowered.graph.node if n.domain == TRAINING_DOMAIN]
    onnx.checker.check_model(lowered, full_check=True)
    feeds = batches("normalizing")
    expected, state = drive(step, plain_session(step), feeds)
    found, found_state = drive(step, plain_session(lowered), feeds)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    for name, array in state.items():
        np.testing.assert_allclose(found_state[name], array, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kernels", ["python", "onnx"])
def test_our_inference_session_runs_it(kernels: Any) -> None:
    step = step_graph(trainable("normalizing", "Adam"))
    feeds = batches("normalizing")
    expected, _ = drive(step, plain_session(step), feeds)
    found, _ = drive(step, ortops.InferenceSession(step, kernels=kernels), feeds)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)


# ------------------------------------------------------------------ files that others wrote


def scalar(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, [])


def weights(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 1])


LOSS = [
    helper.make_node("Sub", ["y", "target"], ["difference"]),
    helper.make_node("Mul", ["difference", "difference"], ["square"]),
    helper.make_node("ReduceMean", ["square"], ["cost"], keepdims=0),
]
TARGET = helper.make_tensor_value_info("target", TensorProto.FLOAT, ["N", 1])
BATCH = {
    "x": np.array([[1, 2], [3, -1], [0, 1]], np.float32),
    "target": np.array([[1], [0], [-1]], np.float32),
}
W = np.array([[0.5], [-0.5]], np.float32)


def gradient(*zs: str) -> onnx.NodeProto:
    """Without zs the gradient is taken at the values of this run."""
    attributes: dict[str, Any] = {"xs": ["w"], "y": "cost"} | ({"zs": list(zs)} if zs else {})
    return helper.make_node("Gradient", ["w", *zs], ["dw"], domain=TRAINING_DOMAIN, **attributes)


def expected_gradient(w: np.ndarray = W) -> np.ndarray:
    x, target = BATCH["x"].astype(np.float64), BATCH["target"]
    return 2 * x.T @ (x @ w - target) / 3


def descent(rate_from: str) -> onnx.ModelProto:
    """w_next = w − rate · dw, the example in the comments of onnx.proto."""
    nodes = [
        *LOSS,
        gradient(),
        helper.make_node("Mul", ["rate", "dw"], ["change"]),
        helper.make_node("Sub", ["w", "change"], ["w_next"]),
    ]
    parts: dict[str, Any] = {"inputs": [TARGET]}
    if rate_from == "constant":
        value = helper.make_tensor("value", TensorProto.FLOAT, [], [0.125])
        nodes.insert(0, helper.make_node("Constant", [], ["rate"], value=value))
    elif rate_from == "initializer":
        parts["variables"] = {"rate": np.array(0.125, np.float32)}
    else:
        parts["inputs"] = [TARGET, scalar("rate")]
    return foreign(
        nodes, outputs=[scalar("cost"), weights("w_next")], updates={"w": "w_next"}, **parts
    )


@pytest.mark.parametrize("rate_from", ["constant", "initializer", "input"])
def test_a_file_after_onnx_protos_comments(rate_from: str) -> None:
    model = descent(rate_from)
    feeds = BATCH | ({"rate": np.array(0.125, np.float32)} if rate_from == "input" else {})
    step = step_graph(model)
    onnx.checker.check_model(step, full_check=True)
    assert updates_of(step) == {"w": "w_next"}
    session = TrainingSession(model)
    shown = session.step(feeds)
    assert set(shown) == {"cost", "y"}
    wanted = W - 0.125 * expected_gradient()
    np.testing.assert_allclose(session.state["w"], wanted, rtol=1e-6)
    _, state = drive(step, plain_session(step), [feeds, feeds])
    session.step(feeds)
    np.testing.assert_allclose(state["w"], session.state["w"], rtol=1e-6)


def foreign_adam() -> onnx.ModelProto:
    """One Adam node for two tensors, its attributes left to their defaults."""
    bias = [helper.make_node("Add", ["y", "b"], ["shifted"])]
    loss = [helper.make_node("Sub", ["shifted", "target"], ["difference"]), *LOSS[1:]]
    node = helper.make_node(
        "Gradient", ["w", "b"], ["dw", "db"], domain=TRAINING_DOMAIN, xs=["w", "b"], y="cost"
    )
    adam = helper.make_node(
        "Adam",
        ["rate", "count", "w", "b", "dw", "db", "vw", "vb", "hw", "hb"],
        ["w2", "b2", "vw2", "vb2", "hw2", "hb2"],
        domain=TRAINING_DOMAIN,
    )
    one = helper.make_tensor("value", TensorProto.INT64, [], [1])
    counting = [
        helper.make_node("Constant", [], ["one"], value=one),
        helper.make_node("Add", ["count", "one"], ["count2"]),
    ]
    like_b = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1])
        for name in ("b2", "vb2", "hb2")
    }
    outputs = [scalar("cost"), scalar("count2", TensorProto.INT64)]
    outputs += [weights(name) for name in ("w2", "vw2", "hw2")] + list(like_b.values())
    variables = {
        "rate": np.array(0.1, np.float32),
        "count": np.array(1, np.int64),
        "b": np.zeros(1, np.float32),
    }
    variables |= {name: np.zeros((2, 1), np.float32) for name in ("vw", "hw")}
    variables |= {name: np.zeros(1, np.float32) for name in ("vb", "hb")}
    return foreign(
        [*bias, *loss, node, adam, *counting],
        inputs=[TARGET],
        outputs=outputs,
        variables=variables,
        updates={name: f"{name}2" for name in ("w", "b", "vw", "vb", "hw", "hb", "count")},
    )


def adam_by_hand(steps: int) -> np.ndarray:
    w, b = W.astype(np.float64), np.zeros(1)
    v = [np.zeros((2, 1)), np.zeros(1)]
    h = [np.zeros((2, 1)), np.zeros(1)]
    alpha, beta, epsilon = (float(np.float32(c)) for c in (0.9, 0.999, 1e-6))
    for t in range(1, steps + 1):
        residual = BATCH["x"] @ w + b - BATCH["target"]
        gradients = [2 * BATCH["x"].T @ residual / 3, 2 * residual.sum(0) / 3]
        rate = float(np.float32(0.1)) * np.sqrt(1 - beta**t) / (1 - alpha**t)
        for i, g in enumerate(gradients):
            v[i] = alpha * v[i] + (1 - alpha) * g
            h[i] = beta * h[i] + (1 - beta) * g * g
        w = w - rate * v[0] / (np.sqrt(h[0]) + epsilon)
        b = b - rate * v[1] / (np.sqrt(h[1]) + epsilon)
    return w


@pytest.mark.parametrize("kernels", ["python", "onnx"])
def test_a_multi_tensor_adam_node_with_default_attributes(kernels: Any) -> None:
    model = foreign_adam()
    session = TrainingSession(model, kernels=kernels)
    for _ in range(5):
        session.step(BATCH)
    np.testing.assert_allclose(session.state["w"], adam_by_hand(5), rtol=1e-4)
    assert session.learning_rate == np.float32(0.1)
    session.learning_rate = 0.0
    before = session.state["w"]
    session.step(BATCH)
    np.testing.assert_array_equal(session.state["w"], before)


def test_the_step_graph_of_a_multi_tensor_node_runs_with_and_without_the_library() -> None:
    step = step_graph(foreign_adam())
    onnx.checker.check_model(step, full_check=True)
    assert op_types(step.graph).count("Adam") == 2
    for session in (plain_session(step), with_library(step)):
        _, state = drive(step, session, [BATCH] * 5)
        np.testing.assert_allclose(state["w"], adam_by_hand(5), rtol=1e-4)
        assert state["count"] == 6


def test_an_update_bound_to_an_output_of_the_inference_graph() -> None:
    # A running average of the predictions, computed by the inference graph itself.
    model = foreign(
        [*LOSS],
        inputs=[TARGET],
        outputs=[scalar("cost")],
        graph_nodes=[helper.make_node("Mul", ["w", "w"], ["w_squared"])],
        graph_outputs=[weights("w_squared")],
        updates={"w": "w_squared"},
    )
    session = TrainingSession(model)
    session.step(BATCH)
    np.testing.assert_array_equal(session.state["w"], W * W)
    step = step_graph(model)
    _, state = drive(step, plain_session(step), [BATCH, BATCH])
    np.testing.assert_array_equal(state["w"], W**4)


def test_an_update_bound_to_the_loss() -> None:
    model = foreign(
        LOSS,
        inputs=[TARGET],
        outputs=[scalar("cost")],
        variables={"last_cost": np.array(0, np.float32)},
        updates={"last_cost": "cost"},
    )
    session = TrainingSession(model)
    cost = session.step(BATCH)["cost"]
    assert cost == pytest.approx(np.mean((BATCH["x"] @ W - BATCH["target"]) ** 2))
    assert session.state["last_cost"] == cost
    assert session.fit(BATCH, progress=False)[0]["loss"] == pytest.approx(float(cost))


def test_several_entries_each_have_a_step_graph() -> None:
    model = descent("constant")
    second = descent("constant").training_info[0]
    for node in second.algorithm.node:
        for names_ in (node.input, node.output):
            for index, name in enumerate(names_):
                if name not in ("w", "x", "y", "target"):
                    names_[index] = f"{name}_b"
        for attribute in node.attribute:
            if attribute.name == "y":
                attribute.s = b"cost_b"
    for value in second.algorithm.output:
        value.name += "_b"
    del second.update_binding[:]
    second.update_binding.add(key="last", value="cost_b")
    second.algorithm.initializer.append(helper.make_tensor("last", TensorProto.FLOAT, [], [0]))
    model.training_info.append(second)
    first_step, second_step = step_graph(model), step_graph(model, entry=1)
    assert updates_of(first_step) == {"w": "w_next"}
    assert updates_of(second_step) == {"last": "cost_b"}
    session = TrainingSession(model)
    shown = session.step(BATCH)
    w = W - 0.125 * expected_gradient()
    np.testing.assert_allclose(shown["cost"], np.mean((BATCH["x"] @ W - BATCH["target"]) ** 2))
    # The second entry runs after the first has updated w, as onnx.proto orders them.
    wanted = np.mean((BATCH["x"] @ w - BATCH["target"]) ** 2)
    np.testing.assert_allclose(shown["cost_b"], wanted, rtol=1e-5)
    np.testing.assert_allclose(session.state["last"], wanted, rtol=1e-5)
    only = TrainingSession(model, entry=1)
    assert only.step(BATCH)["cost_b"] == shown["cost"]
    np.testing.assert_array_equal(only.state["w"], W)
    with pytest.raises(ModelError, match="no training_info entry 2; it has 2"):
        step_graph(model, entry=2)


# ----------------------------------------------------------------------------------- bad files


def rebound(key: str, value: str) -> onnx.ModelProto:
    model = descent("initializer")
    binding = model.training_info[0].update_binding[0]
    binding.key, binding.value = key, value
    return model


@pytest.mark.parametrize("use", [step_graph, TrainingSession])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (affine(), "it has no training_info; make it trainable with ortops.build_training_model"),
        (
            rebound("ww", "w_next"),
            "training_info entry 0: update_binding sets 'ww', which is not an initializer; did",
        ),
        (
            rebound("rated", "w_next"),
            "sets 'rated', which is not an initializer; did you mean 'rate'?",
        ),
        (
            rebound("w", "w_nxt"),
            "sets 'w' to 'w_nxt', which is not an output; did you mean 'w_next'?",
        ),
        (rebound("w", "change"), "sets 'w' to 'change', which is not an output"),
    ],
)
def test_bindings_that_are_wrong(use: Any, model: onnx.ModelProto, message: str) -> None:
    before = model.SerializeToString(deterministic=True)
    with pytest.raises(ModelError) as raised:
        use(model)
    assert message in str(raised.value)
    assert model.SerializeToString(deterministic=True) == before


def test_a_variable_bound_twice() -> None:
    model = descent("initializer")
    model.training_info[0].update_binding.add(key="w", value="cost")
    with pytest.raises(ModelError, match="'w' is updated twice; each variable is bound once"):
        step_graph(model)


def test_an_update_of_another_shape_or_type() -> None:
    with pytest.raises(
        ModelError,
        match=r"sets 'w' of type FLOAT and shape \[2,1\] to 'cost' of type FLOAT and shape \[\];",
    ):
        step_graph(rebound("w", "cost"))


def test_a_bad_initialization_binding() -> None:
    model = descent("initializer")
    model.training_info[0].initialization_binding.add(key="w", value="start")
    expected = "initialization_binding sets 'w' to 'start', which is not an output; there are none"
    with pytest.raises(ModelError, match=expected):
        TrainingSession(model)


def test_a_name_that_graph_and_algorithm_both_define() -> None:
    model = descent("initializer")
    model.training_info[0].algorithm.node.append(helper.make_node("Neg", ["cost"], ["y"]))
    expected = "entry 0: 'y' is also a tensor of the inference graph; rename one of them"
    with pytest.raises(ModelError, match=expected):
        step_graph(model)


def test_an_algorithm_that_reads_what_does_not_exist() -> None:
    model = descent("initializer")
    model.training_info[0].algorithm.node[0].input[1] = "targte"
    with pytest.raises(ModelError, match=r"Sub node .*reads 'targte', which is not defined"):
        step_graph(model)


def test_an_output_that_nothing_defines() -> None:
    model = descent("initializer")
    model.training_info[0].algorithm.output.add(name="cots")
    expected = "entry 0: output 'cots' is not defined; did you mean 'cost'?"
    with pytest.raises(ModelError, match=re.escape(expected)):
        step_graph(model)


def test_metadata_that_are_no_json() -> None:
    model = descent("initializer")
    model.metadata_props.add(key="ortops.training", value="{loss")
    with pytest.raises(ModelError, match=r"metadata_props 'ortops.training': .*; give a JSON obj"):
        step_graph(model)


def test_an_unknown_operator_in_the_algorithm() -> None:
    model = descent("initializer")
    model.training_info[0].algorithm.node[0].op_type = "Subb"
    with pytest.raises(ModelError, match="Subb"):
        TrainingSession(model)


def test_nodes_of_the_domain_in_a_branch() -> None:
    scalar = helper.make_tensor_value_info
    taken = helper.make_graph(
        [
            helper.make_node(
                "Gradient", ["x"], ["slope"], domain=TRAINING_DOMAIN, xs=["x"], y="square"
            ),
            helper.make_node("Identity", ["slope"], ["then"]),
        ],
        "taken",
        [],
        [scalar("then", TensorProto.FLOAT, [])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["else"])],
        "other",
        [],
        [scalar("else", TensorProto.FLOAT, [])],
    )
    model = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Mul", ["x", "w"], ["product"]),
                helper.make_node("Mul", ["product", "product"], ["square"]),
                helper.make_node("If", ["c"], ["y"], then_branch=taken, else_branch=other),
            ],
            "graph",
            [scalar("x", TensorProto.FLOAT, []), scalar("c", TensorProto.BOOL, [])],
            [scalar("y", TensorProto.FLOAT, [])],
            [onnx.numpy_helper.from_array(np.array(3, np.float32), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(TRAINING_DOMAIN, 1)],
        ir_version=10,
    )
    trainable = build_training_model(
        model, loss=lambda y: op.Identity(y), optimizer=SGD(0.5), trainable=["w"]
    )
    feeds = {"x": np.array(2, np.float32), "c": np.array(True)}
    loss, new = run(step_graph(trainable), feeds, ["loss", "w_new"])
    assert (loss, new) == (2 * 2 * 3**2, 3 - 0.5 * 4 * 2 * 3)  # y = 2xw², dy/dw = 4xw


def test_a_constant_that_no_gradient_depends_on() -> None:
    def shifted(y, targets):
        return op.ReduceMean((y - targets) ** 2, keepdims=0) + 3.0

    trainable = build_training_model(affine(), loss=shifted, optimizer="SGD")
    plain = build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    (one, two) = (
        dict(zip(names, session.run(names, affine_batch()), strict=True))
        for names in [["loss", "w_new"]]
        for session in (plain_session(step_graph(trainable)), plain_session(step_graph(plain)))
    )
    assert one["loss"] == pytest.approx(two["loss"] + 3)
    np.testing.assert_allclose(one["w_new"], two["w_new"], rtol=1e-6)


@pytest.mark.parametrize("part", ["graph", "algorithm"])
def test_sparse_initializers_are_refused_by_name(part: str) -> None:
    model = build_training_model(affine(), loss="L1", optimizer="SGD")
    algorithm = model.training_info[0].algorithm
    graph = model.graph if part == "graph" else algorithm
    sparse = helper.make_sparse_tensor(
        numpy_helper.from_array(np.ones(1, np.float32), "extra"),
        numpy_helper.from_array(np.array([1]), "places"),
        [2],
    )
    graph.sparse_initializer.append(sparse)
    algorithm.node.append(helper.make_node("Neg", ["extra"], ["negative"]))
    algorithm.output.append(helper.make_tensor_value_info("negative", 1, [2]))
    with pytest.raises(
        ortops.UnsupportedError, match="initializer 'extra': sparse initializers are not supp"
    ):
        ortops.step_graph(model)


def test_a_tensor_that_is_updated_is_no_loss() -> None:
    model = foreign(
        [helper.make_node("Mul", ["w", "w"], ["w_next"])],
        outputs=[weights("w_next")],
        updates={"w": "w_next"},
    )
    session = TrainingSession(model)
    assert session.step({}) == {}
    np.testing.assert_array_equal(session.state["w"], W * W)
    with pytest.raises(OrtopsError, match="loss: the training algorithm has no output"):
        session.fit([{}], progress=False)
