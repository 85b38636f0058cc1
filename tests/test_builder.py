"""build_training_model: what it writes is what onnx.proto says, on top of an untouched model."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from running import plain_session, run_by_name
from training_models import (
    TRAINING_DOMAIN,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    concatenated,
    forces,
    initializers,
    labelled,
    names,
    normalizing,
    op_types,
)

import ortops
from ortops import (
    ArgumentError,
    ModelError,
    Tape,
    Tensor,
    TrainingSession,
    build_training_model,
    op,
)
from ortops.optimizers import SGD, Adagrad, Adam, AdamW, Custom, Momentum


def algorithm_of(model: onnx.ModelProto) -> onnx.GraphProto:
    return model.training_info[0].algorithm


def bindings(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.training_info[0].update_binding}


def build(model: Any = None, **settings: Any) -> onnx.ModelProto:
    defaults: dict[str, Any] = {"loss": "MeanSquaredError", "optimizer": "SGD"}
    return build_training_model(affine() if model is None else model, **(defaults | settings))


def sign_descent(r, t, x, g):
    return x - r.astype(x.dtype) * x.__array_namespace__().sign(g)


def cosine(y, targets):
    return op.ReduceMean(op.Cos(y - targets), keepdims=0)


LOSSES = {
    "MeanSquaredError": "MeanSquaredError",
    "L1": ortops.losses.L1,
    "BinaryCrossEntropyWithLogits": ortops.losses.BinaryCrossEntropyWithLogits(),
    "own": cosine,
}
OPTIMIZERS = {
    "Adagrad": "Adagrad",
    "Adam": Adam(norm_coefficient=0.01),
    "Momentum": Momentum(),
    "nesterov": Momentum(mode="nesterov"),
    "SGD": SGD,
    "AdamW": AdamW(),
    "own": sign_descent,
}


# ------------------------------------------------------------------------- what onnx.proto says


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_is_a_legal_model_alone_and_concatenated(loss: str, optimizer: str) -> None:
    trainable = build(loss=LOSSES[loss], optimizer=OPTIMIZERS[optimizer])
    onnx.checker.check_model(trainable, full_check=True)
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    assert_follows_onnx_proto(trainable)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_is_legal_with_training_copies(optimizer: str) -> None:
    trainable = build(normalizing(), loss="SoftmaxCrossEntropy", optimizer=OPTIMIZERS[optimizer])
    onnx.checker.check_model(trainable, full_check=True)
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    assert_follows_onnx_proto(trainable)


def assert_follows_onnx_proto(model: onnx.ModelProto) -> None:
    """The rules in the comments of TrainingInfoProto, one by one."""
    (info,) = model.training_info
    graph, algorithm = model.graph, info.algorithm
    own = names(algorithm.initializer)
    keys = [entry.key for entry in info.update_binding]
    assert len(set(keys)) == len(keys)  # 1. unique keys
    assert set(keys) <= {*names(graph.initializer), *own}  # 2. keys are initializers
    outputs = {*names(algorithm.output), *names(graph.output)}
    assert {entry.value for entry in info.update_binding} <= outputs  # 3. values are outputs
    assert not info.initialization.input
    starts = names(info.initialization.output)
    assert [entry.value for entry in info.initialization_binding] == starts
    assert {entry.key for entry in info.initialization_binding} == set(own)
    # The inference graph refers to nothing of the algorithm.
    inside = {name for node in algorithm.node for name in node.output} | {*own}
    inside |= set(names(algorithm.input))
    assert not inside & {name for node in graph.node for name in node.input}
    assert model.ir_version >= 7
    assert {entry.domain for entry in model.opset_import} == {"", TRAINING_DOMAIN}
    onnx.checker.check_graph(info.initialization, context(model))


def context(model: onnx.ModelProto) -> Any:
    found = onnx.checker.C.CheckerContext()
    found.ir_version = model.ir_version
    found.opset_imports = {entry.domain: entry.version for entry in model.opset_import}
    return found


def test_names_are_the_fixed_ones() -> None:
    trainable = build(optimizer="Adam")
    algorithm = algorithm_of(trainable)
    assert names(algorithm.input) == ["targets"]
    assert set(names(algorithm.initializer)) == {
        *("learning_rate", "step", "w.V", "w.H", "b.V", "b.H")
    }
    assert bindings(trainable) == {
        name: f"{name}_new" for name in ("step", "w", "b", "w.V", "w.H", "b.V", "b.H")
    }
    assert names(algorithm.output)[0] == "loss"
    values = initializers(algorithm)
    assert (values["learning_rate"].dtype, values["learning_rate"].shape) == (np.float32, ())
    assert values["learning_rate"] == np.float32(1e-3)
    assert (values["step"].dtype, values["step"].shape, values["step"]) == (np.int64, (), 0)


def test_labels_are_integers_of_the_logits_shape_without_classes() -> None:
    trainable = build(classifier(), loss="SoftmaxCrossEntropy")
    (labels,) = algorithm_of(trainable).input
    assert labels.name == "labels"
    assert labels.type.tensor_type.elem_type == TensorProto.INT64
    assert [dim.dim_param for dim in labels.type.tensor_type.shape.dim] == ["batch"]


def test_taken_names_get_a_suffix() -> None:
    with Tape() as tape:
        x = tape.input("targets", np.float32, ["N", 2])
        w = tape.initializer("w", np.ones(2, np.float32))
        v = tape.initializer("w.V", np.ones(2, np.float32))
        loss = tape.output(x * w * v, "loss")
        tape.output(loss + tape.initializer("step", np.ones(2, np.float32)), "w_new")
    model = tape.model()
    trainable = build(model, optimizer="Momentum")
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    assert names(algorithm_of(trainable).input) == ["targets_1"]
    assert set(bindings(trainable)) == {"w", "w.V", "step_1", "w.V_1", "w.V.V"}
    (entry,) = [e for e in trainable.metadata_props if e.key == "ortops.training"]
    assert json.loads(entry.value)["loss"] == "loss_1"
    session = TrainingSession(trainable)
    feeds = {"targets": np.ones((3, 2), np.float32), "targets_1": np.zeros((3, 2), np.float32)}
    assert session.step(feeds)["loss_1"] == pytest.approx(1.0)
    assert session.steps_done == 1


def test_initialization_computes_the_initial_values() -> None:
    trainable = build(optimizer=Adam(learning_rate=0.25))
    info = trainable.training_info[0]
    model = helper.make_model(info.initialization, opset_imports=trainable.opset_import)
    model.ir_version = 10
    values = run_by_name(model, {})
    initial = {entry.key: values[entry.value] for entry in info.initialization_binding}
    given = initializers(info.algorithm)
    assert set(initial) == set(given)
    for name, array in given.items():
        np.testing.assert_array_equal(initial[name], array)
        assert initial[name].dtype == array.dtype


# -------------------------------------------------------------------- the model that is given


@pytest.mark.parametrize("make", [affine, classifier, normalizing])
def test_the_inference_graph_is_untouched(make: Any) -> None:
    model = make()
    before = model.SerializeToString(deterministic=True)
    loss = "MeanSquaredError"
    trainable = build(model, loss=loss, optimizer="Adam")
    assert model.SerializeToString(deterministic=True) == before
    assert trainable.graph == model.graph
    assert list(trainable.functions) == list(model.functions)
    rest = onnx.ModelProto()
    rest.CopyFrom(trainable)
    del rest.training_info[:]
    del rest.opset_import[:], rest.metadata_props[:]
    rest.opset_import.extend(model.opset_import)
    rest.metadata_props.extend(model.metadata_props)
    assert rest == model  # nothing else of the model has changed either
    kept = {entry.key: entry.value for entry in trainable.metadata_props}
    assert {entry.key: entry.value for entry in model.metadata_props}.items() <= kept.items()


@pytest.mark.parametrize("make", [affine, classifier, normalizing])
def test_stock_onnxruntime_runs_it_as_inference(make: Any) -> None:
    model = make()
    trainable = build(model, optimizer="Adam")
    shape = [dim.dim_value or 5 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    expected = run_by_name(model, feeds)
    found = run_by_name(trainable, feeds)
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_takes_bytes_and_paths(tmp_path: Any) -> None:
    model = affine()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    wanted = build(model)
    for given in (model.SerializeToString(), path, str(path)):
        assert build(given) == wanted


def test_external_data_come_into_the_result(tmp_path: Any) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(affine(), path, save_as_external_data=True, size_threshold=0)
    trainable = build(path)
    assert all(not tensor.external_data for tensor in trainable.graph.initializer)
    batch = affine_batch()
    expected = TrainingSession(build(affine())).step(batch)["loss"]
    assert TrainingSession(trainable).step(batch)["loss"] == expected


# ------------------------------------------------------------------------------ older models


def old_convolution(opset: int, ir_version: int = 6) -> onnx.ModelProto:
    """Conv, BatchNormalization, Dropout and Squeeze as opsets below 13 write them."""
    rng = np.random.default_rng(4)
    arrays = {
        "w": rng.normal(size=(2, 1, 3, 3)).astype(np.float32),
        "scale": np.ones(2, np.float32),
        "bias": np.zeros(2, np.float32),
        "mean": np.zeros(2, np.float32),
        "var": np.ones(2, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Dropout", ["n"], ["d"], **({"ratio": 0.25} if opset < 12 else {})),
        helper.make_node("ReduceMean", ["d"], ["m"], axes=[2], keepdims=1),
        helper.make_node("GlobalAveragePool", ["m"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 4, 4])]
    if ir_version < 4:
        inputs += [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in arrays.items()
        ]
    graph = helper.make_graph(
        nodes,
        "old",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version,
        producer_name="exporter",
        doc_string="what it is",
    )
    helper.set_model_props(model, {"license": "none"})
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize(("opset", "ir_version"), [(7, 3), (11, 6), (11, 3), (12, 7)])
def test_older_models_are_converted_with_a_message(
    opset: int, ir_version: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = old_convolution(opset, ir_version)
    before = model.SerializeToString(deterministic=True)
    with caplog.at_level(logging.WARNING, "ortops"):
        trainable = build(model, optimizer=SGD(0.2))
    assert f"the model was converted from opset {opset} to 21" in caplog.text
    assert model.SerializeToString(deterministic=True) == before
    assert {e.domain: e.version for e in trainable.opset_import} == {"": 21, TRAINING_DOMAIN: 1}
    onnx.checker.check_model(trainable, full_check=True)
    assert (trainable.producer_name, trainable.doc_string) == ("exporter", "what it is")
    assert ("license", "none") in [(e.key, e.value) for e in trainable.metadata_props]
    feeds = {"x": np.random.default_rng(0).normal(size=(3, 1, 4, 4)).astype(np.float32)}
    np.testing.assert_allclose(
        run_by_name(trainable, feeds)["y"], run_by_name(model, feeds)["y"], rtol=1e-6, atol=1e-7
    )
    assert {"w", "scale", "bias", "mean", "var", "step"} == set(bindings(trainable))
    session = TrainingSession(trainable)
    batch = feeds | {"targets": np.ones((3, 2), np.float32)}
    losses = [float(session.step(batch)["loss"]) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])  # averaged, because Dropout is random


def test_initializers_listed_as_inputs_are_trained() -> None:
    model = affine()
    for name, shape in (("w", [3, 2]), ("b", [2])):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    trainable = build(model)
    assert trainable.graph == model.graph
    batch = affine_batch()
    assert_same_arrays(TrainingSession(trainable).step(batch), TrainingSession(build()).step(batch))


def test_without_an_import_of_the_default_domain_it_gets_one() -> None:
    model = affine()
    del model.opset_import[:]
    trainable = build(model)
    assert {e.domain: e.version for e in trainable.opset_import} == {"": 21, TRAINING_DOMAIN: 1}
    assert "loss" in TrainingSession(trainable).step(affine_batch())


def test_the_long_name_of_the_default_domain() -> None:
    model = affine()
    model.opset_import[0].domain = "ai.onnx"
    batch = affine_batch()
    assert_same_arrays(
        TrainingSession(build(model)).step(batch), TrainingSession(build()).step(batch)
    )


NEWER_OPSETS = {23: "1.23", 24: "1.24", 25: "1.24", 26: "1.25"}
"""The first onnxruntime that runs an opset."""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "opset",
    [
        21,
        22,
        *(
            pytest.param(opset, marks=pytest.mark.needs(f"onnxruntime>={version}"))
            for opset, version in NEWER_OPSETS.items()
        ),
    ],
)
def test_every_opset_that_onnxruntime_runs(opset: int) -> None:
    trainable = build(affine(opset=opset), optimizer="Adam")
    assert {e.domain: e.version for e in trainable.opset_import} == {"": opset, TRAINING_DOMAIN: 1}
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    batch = affine_batch()
    expected = TrainingSession(build(optimizer="Adam")).step(batch)["loss"]
    assert TrainingSession(trainable).step(batch)["loss"] == expected
    step = ortops.step_graph(trainable)
    assert run_by_name(step, batch)["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_inference_and_lowering_leave_the_training_alone() -> None:
    trainable = build(optimizer="Adam")
    assert ortops.lower(trainable) == trainable
    x = {"x": affine_batch()["x"]}
    (found,) = ortops.InferenceSession(trainable).run(None, x)
    np.testing.assert_array_equal(found, run_by_name(affine(), x)["y"])
    inside = build(forces(), loss=lambda slope: squared_slope(slope, slope * 0.0))
    lowered = ortops.lower(inside)
    assert lowered.training_info == inside.training_info
    session, expected = TrainingSession(lowered), TrainingSession(inside)
    np.testing.assert_allclose(session.step(x)["loss"], expected.step(x)["loss"], rtol=1e-6)


# --------------------------------------------------------------------------- local functions


def with_function(*, training: bool) -> onnx.ModelProto:
    """Two calls of a function: an affine map and tanh, and Dropout after the map if asked."""
    nodes = [
        helper.make_node("MatMul", ["X", "W"], ["product"]),
        helper.make_node("Tanh", ["product"], ["bent"]),
        helper.make_node("Dropout" if training else "Identity", ["bent"], ["dropped"]),
        helper.make_node("Mul", ["dropped", "product"], ["Y"]),
    ]
    function = helper.make_function(
        "somebody", "Layer", ["X", "W"], ["Y"], nodes, [helper.make_opsetid("", 21)]
    )
    rng = np.random.default_rng(5)
    arrays = {name: rng.normal(size=(3, 3)).astype(np.float32) for name in ("w1", "w2")}
    graph = helper.make_graph(
        [
            helper.make_node("Layer", ["x", "w1"], ["h"], domain="somebody", name="first"),
            helper.make_node("Layer", ["h", "w2"], ["y"], domain="somebody", name="second"),
        ],
        "calls",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("somebody", 1)]
    model = helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize("training", [False, True])
def test_functions_stay_and_are_trained_through(training: bool) -> None:
    model = with_function(training=training)
    trainable = build(model, optimizer="Momentum")
    assert trainable.graph == model.graph
    assert list(trainable.functions) == list(model.functions)
    onnx.checker.check_model(trainable, full_check=True)
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    defined = {name for node in trainable.graph.node for name in node.output}
    defined |= {*names(trainable.graph.initializer), *names(trainable.graph.input)}
    algorithm = algorithm_of(trainable)
    defined |= {*names(algorithm.initializer), *names(algorithm.input), ""}
    for node in algorithm.node:
        assert set(node.input) <= defined, node
        defined |= set(node.output)
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(6, 3)).astype(np.float32) for name in ("x", "targets")}
    session = TrainingSession(trainable)
    before = session.state["w1"]
    losses = [float(session.step(feeds)["loss"]) for _ in range(2)]
    assert np.all(session.state["w1"] != before)
    plain = run_by_name(model, feeds)["y"]
    if training:
        assert abs(losses[0] - np.mean((plain - feeds["targets"]) ** 2)) > 1e-3
    else:
        assert losses[0] == pytest.approx(np.mean((plain - feeds["targets"]) ** 2), rel=1e-5)


# ------------------------------------------------------------------------------- trainable


def test_trains_only_what_is_named() -> None:
    trainable = build(classifier(), loss="SoftmaxCrossEntropy", trainable=["w*", "b1"])
    assert set(bindings(trainable)) == {"step", "w1", "w2", "b1"}
    trainable = build(classifier(), loss="SoftmaxCrossEntropy", trainable=["w2"])
    assert set(bindings(trainable)) == {"step", "w2"}
    assert build(trainable="w") == build(trainable=["w"])
    (gradient,) = [n for n in algorithm_of(trainable).node if n.op_type == "Gradient"]
    attributes = {a.name: helper.get_attribute_value(a) for a in gradient.attribute}
    assert attributes["xs"] == [b"w2"]
    assert set(attributes["zs"]) == {b"x", b"labels", b"w1", b"b1"}
    assert attributes["y"] == b"loss"
    assert list(gradient.input) == [b.decode() for b in (*attributes["xs"], *attributes["zs"])]


def test_patterns_leave_statistics_and_unread_values_alone() -> None:
    model = normalizing()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "unread"))
    trainable = build(model, trainable=["*"])
    parameters = {"conv.w", "bn.scale", "bn.bias"}
    assert set(bindings(trainable)) == {"step", "bn.mean", "bn.var", *parameters}
    assert set(bindings(build(model))) == set(bindings(trainable))


def test_scalars_are_trained_when_named() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        w = tape.initializer("w", np.ones(2, np.float32))
        tape.output(x * w * tape.initializer("scale", np.array(2, np.float32)), "y")
    assert set(bindings(build(tape.model()))) == {"step", "w"}
    trainable = build(tape.model(), trainable=["scale"], optimizer="Adam")
    assert set(bindings(trainable)) == {"step", "scale", "scale.V", "scale.H"}
    session = TrainingSession(trainable)
    feeds = {"x": np.ones((2, 2), np.float32), "targets": np.zeros((2, 2), np.float32)}
    losses = [float(session.step(feeds)["loss"]) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert session.state["scale"].shape == ()


BAD_TRAINABLE = {
    "unrade": "no trainable initializer 'unrade'; did you mean 'unread' or 'rounded'?",
    "nothing.*": "no trainable initializer 'nothing.*'; known names: 'w', 'b', 'rounded', 'unread'",
    "learning_rate": "no trainable initializer 'learning_rate'; known names: 'w', 'b', 'rounded'",
    3: "trainable: names and patterns must be strings, got 3",
    "count": "initializer 'count' is of type INT64; only floating-point ones can be trained",
    "unread": "the loss does not depend on 'unread'; leave it out",
    "rounded": "the loss does not depend on 'rounded'; leave it out",
}


@pytest.mark.parametrize("name", BAD_TRAINABLE)
def test_what_cannot_be_trained(name: str) -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        w = tape.initializer("w", np.ones(2, np.float32))
        b = tape.initializer("b", np.ones(2, np.float32))
        count = tape.initializer("count", np.array([2, 2], np.int64))
        rounded = tape.initializer("rounded", np.array([1.5, 2], np.float32))
        tape.initializer("unread", np.ones(2, np.float32))
        tape.output(x * w + b + count.astype(np.float32) + op.Floor(rounded), "y")
    model = tape.model()
    before = model.SerializeToString(deterministic=True)
    with pytest.raises(ModelError if isinstance(name, str) else ArgumentError) as raised:
        build(model, trainable=[name])
    assert BAD_TRAINABLE[name] in str(raised.value)
    assert model.SerializeToString(deterministic=True) == before


def test_trainable_is_a_list() -> None:
    with pytest.raises(ArgumentError) as raised:
        build(trainable=3)
    assert str(raised.value) == "trainable must be a list of names and patterns, got 3"


def test_nothing_to_train() -> None:
    with pytest.raises(ArgumentError, match=r"^trainable must name at least one .*, got \[\]$"):
        build(trainable=[])
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        tape.output(x * tape.initializer("scale", np.array(2, np.float32)), "y")
    expected = (
        r"depends on no floating-point initializer, only on scalars \(scale\); name what to train"
    )
    with pytest.raises(ModelError, match=expected):
        build(tape.model())
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        tape.output(x + x, "y")
    expected = "depends on no floating-point initializer; name what to train in trainable="
    with pytest.raises(ModelError, match=expected):
        build(tape.model())


def test_a_statistic_is_not_trainable() -> None:
    expected = "'bn.mean' is a running statistic, which BatchNormalization updates; leave it out"
    with pytest.raises(ModelError, match=expected):
        build(normalizing(), trainable=["bn.mean"])


def test_types_that_cannot_be_trained() -> None:
    model = affine()
    del model.graph.value_info[:]
    (w,) = (tensor for tensor in model.graph.initializer if tensor.name == "w")
    eighths = numpy_helper.to_array(w).astype(ml_dtypes.float8_e4m3fn)
    w.CopyFrom(numpy_helper.from_array(eighths, "w"))
    model.graph.node.insert(0, helper.make_node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT))
    for node in model.graph.node:
        if node.op_type == "MatMul":
            node.input[1] = "wide"
    expected = "trainable: 'w' is of type FLOAT8E4M3FN; FLOAT16, BFLOAT16, FLOAT and DOUBLE can be"
    with pytest.raises(ModelError, match=expected):
        build(model, optimizer="SGD", trainable=["w"])


# ------------------------------------------------------------------------- losses and rules


@pytest.mark.parametrize(
    ("optimizer", "operator", "first"),
    [
        (Adagrad(decay_factor=0.5), "Adagrad", "step"),
        (Momentum(alpha=0.5, beta=0.25, mode="nesterov"), "Momentum", "step"),
        (Adam(epsilon=1e-4), "Adam", "step_new"),
        (AdamW(), "Adam", "step_new"),
    ],
)
def test_optimizers_of_the_domain_are_nodes_of_the_domain(
    optimizer: Any, operator: str, first: str
) -> None:
    trainable = build(optimizer=optimizer)
    nodes = [node for node in algorithm_of(trainable).node if node.op_type == operator]
    assert len(nodes) == 2
    schema = onnx.defs.get_schema(operator, 1, TRAINING_DOMAIN)
    for node, parameter in zip(nodes, ("w", "b"), strict=True):
        assert node.domain == TRAINING_DOMAIN
        assert parameter in node.name
        assert list(node.input)[:2] == ["learning_rate", first]
        assert node.output[0] == f"{parameter}_new"
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert set(attributes) == set(schema.attributes)
        for name in ("decay_factor", "alpha", "epsilon"):
            if hasattr(optimizer, name):
                assert attributes[name] == np.float32(getattr(optimizer, name))


def test_a_rule_of_ones_own_is_standard_nodes() -> None:
    def lion(r, t, x, g, m, *, alpha=0.9):
        xp = x.__array_namespace__()
        direction = xp.sign(alpha * m + (1 - alpha) * g)
        return x - r.astype(x.dtype) * direction, 0.5 * m + 0.5 * g

    trainable = build(optimizer=Custom(functools.partial(lion, alpha=0.5), learning_rate=0.25))
    assert {node.domain for node in algorithm_of(trainable).node if node.op_type != "Gradient"} == {
        ""
    }
    assert set(bindings(trainable)) == {"step", "w", "b", "w.M", "b.M"}
    batch = affine_batch()
    session = TrainingSession(trainable)
    w, x = session.state["w"].astype(np.float64), batch["x"].astype(np.float64)
    residual = x @ w + session.state["b"] - batch["targets"]
    gradient = 2 * x.T @ residual / residual.size
    session.step(batch)
    np.testing.assert_allclose(session.state["w"], w - 0.25 * np.sign(gradient), rtol=1e-6)
    np.testing.assert_allclose(session.state["w.M"], 0.5 * gradient, rtol=1e-5)


def test_a_rule_may_return_one_tensor_twice() -> None:
    def same(r, t, x, g, s):
        new = x - g
        return new, new

    trainable = build(optimizer=same)
    assert bindings(trainable)["w"] == "w_new"
    assert bindings(trainable)["w.S"] == "w.S_new"
    outputs = names(algorithm_of(trainable).output)
    assert len(set(outputs)) == len(outputs)
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    session = TrainingSession(trainable)
    session.step(affine_batch())
    np.testing.assert_array_equal(session.state["w"], session.state["w.S"])


def returning(result: Any, *, states: int = 0) -> Any:
    if states:
        return lambda r, t, x, g, s: result(x)
    return lambda r, t, x, g: result(x)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (returning(lambda x: (x, x)), "the rule returned 2 values; it must return x_new"),
        (returning(lambda x: x, states=1), "returned 1 values; it must return x_new, s_new"),
        (returning(lambda x: 1.5), "x_new is 1.5; it must be a Tensor"),
        (
            returning(lambda x: x.astype(np.float64)),
            "x_new is float64[3, 2]; it must be like the parameter, float32[3, 2]",
        ),
        (returning(lambda x: x[:1]), "x_new is float32[1, 2]; it must be like the parameter"),
    ],
)
def test_rules_that_return_something_else(rule: Any, message: str) -> None:
    with pytest.raises(ModelError) as raised:
        build(optimizer=rule)
    assert message in str(raised.value)
    assert str(raised.value).startswith("optimizer <lambda>, parameter 'w':")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"loss": "SoftmaxCrosEntropy"},
            ArgumentError,
            "unknown loss 'SoftmaxCrosEntropy'; did you mean 'SoftmaxCrossEntropy'?",
        ),
        (
            {"loss": 3},
            ArgumentError,
            "loss must be one of ortops.losses, its name, or a function of Tensors, got 3",
        ),
        ({"optimizer": "adan"}, ArgumentError, "unknown optimizer 'adan'; did you mean 'Adam'?"),
        (
            {"optimizer": 0.1},
            ArgumentError,
            (
                "optimizer must be one of ortops.optimizers, the name of one, or an update "
                "function (r, t, x, g, *state), got 0.1"
            ),
        ),
        (
            {"loss": lambda y, targets: y - targets},
            ModelError,
            (
                "loss <lambda> must be a scalar, got shape ['batch', 2]; reduce it, for example "
                "with op.ReduceMean(loss, keepdims=0)"
            ),
        ),
        (
            {"loss": lambda y: 0.5},
            ModelError,
            (
                "loss <lambda> must return a Tensor, got 0.5; a loss is a function of Tensors, the "
                "prediction and the targets, that returns a scalar Tensor, such as lambda "
                "prediction, targets: op.ReduceMean((prediction - targets) ** 2, keepdims=0)"
            ),
        ),
        (
            {"loss": lambda y: op.Size(y)},
            ModelError,
            "loss <lambda> must be floating-point, got type int64",
        ),
        (
            {"loss": lambda y, a, b: y},
            ModelError,
            (
                "loss <lambda>: no tensor for parameter 'a'; use one of the model's tensors ('x', "
                "'w', 'b', 'MatMul_output', 'y') or 'labels', 'targets', or declare an input, for "
                'example inputs={"a": (np.float32, ["batch"])}'
            ),
        ),
        (
            {"loss": lambda *ys: ys[0]},
            ArgumentError,
            (
                "loss <lambda>: replace the variable parameter '*ys' by one named parameter for "
                "each tensor"
            ),
        ),
        (
            {"loss": ortops.losses.L1(output="z")},
            ModelError,
            (
                "loss L1: the model has no tensor 'z'; known names: 'x', 'w', 'b', "
                "'MatMul_output', 'y' (its outputs are 'y')"
            ),
        ),
    ],
)
def test_bad_losses_and_optimizers(
    settings: dict[str, Any], error: type[ortops.OrtopsError], message: str
) -> None:
    model = affine()
    before = model.SerializeToString(deterministic=True)
    with pytest.raises(error) as raised:
        build(model, **settings)
    assert str(raised.value) == message
    assert model.SerializeToString(deterministic=True) == before


def test_what_is_not_a_model(tmp_path: Any) -> None:
    path = tmp_path / "picture.onnx"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    with pytest.raises(ModelError, match=r"picture\.onnx': not an ONNX model"):
        build(path)
    with pytest.raises(
        ModelError, match=r"missing\.onnx': No such file or directory; pass the path"
    ):
        build(tmp_path / "missing.onnx")
    with pytest.raises(ModelError, match="0 bytes: not an ONNX model"):
        build(b"")
    with pytest.raises(ModelError, match=r"model must be .*, or a path, got a ndarray"):
        build(np.zeros(3))
    model = affine()
    del model.graph.output[:]
    with pytest.raises(ModelError, match="model: it has no output; a loss is computed from one"):
        build(model)
    with pytest.raises(
        ModelError, match="it has training_info already; run it with TrainingSession"
    ):
        build(build())


# --------------------------------------------------- BatchNormalization, Dropout: training mode


def test_the_algorithm_has_training_copies_and_shares_the_rest() -> None:
    trainable = build(normalizing(), loss="SoftmaxCrossEntropy")
    types = op_types(algorithm_of(trainable))
    assert "Conv" not in types  # what training does not change is shared
    assert types.count("BatchNormalization") == 1
    assert "Dropout" not in types  # its masks come from the seed and the step
    (node,) = [n for n in trainable.graph.node if n.op_type == "BatchNormalization"]
    assert not any(a.name == "training_mode" and a.i for a in node.attribute)
    assert names(algorithm_of(trainable).output)[:2] == ["loss", "logits_training"]


def test_running_statistics_follow_the_batches() -> None:
    session = TrainingSession(build(normalizing(), loss="SoftmaxCrossEntropy"))
    model = normalizing()
    del model.graph.node[1:]
    del model.graph.output[:]
    model.graph.output.append(
        helper.make_tensor_value_info(model.graph.node[0].output[0], TensorProto.FLOAT, None)
    )
    mean, var = session.state["bn.mean"], session.state["bn.var"]
    batch = labelled((1, 4, 4), rows=5)
    activations = run_by_name(model, batch)[model.graph.node[0].output[0]]
    session.step(batch)
    wanted = 0.8 * mean + 0.2 * activations.mean(axis=(0, 2, 3))
    np.testing.assert_allclose(session.state["bn.mean"], wanted, rtol=1e-5)
    wanted = 0.8 * var + 0.2 * activations.var(axis=(0, 2, 3))
    np.testing.assert_allclose(session.state["bn.var"], wanted, rtol=1e-5)


def test_statistics_that_two_nodes_share_are_updated_by_both() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        one = tape.initializer("one", np.ones(2, np.float32))
        zero = tape.initializer("zero", np.zeros(2, np.float32))
        mean = tape.initializer("mean", np.zeros(2, np.float32))
        var = tape.initializer("var", np.ones(2, np.float32))
        first = op.BatchNormalization(x, one, zero, mean, var, momentum=0.5)
        second = op.BatchNormalization(3.0 * x, one, zero, mean, var, momentum=0.5)
        tape.output(first + second, "y")
    session = TrainingSession(build(tape.model(), trainable=["one", "zero"]))
    array = np.array([[1, 2], [3, 6]], np.float32)
    session.step({"x": array, "targets": array})
    expected = 0.5 * (0.5 * array.mean(0)) + 0.5 * 3 * array.mean(0)
    np.testing.assert_allclose(session.state["mean"], expected, rtol=1e-6)


def test_a_model_in_training_mode_updates_its_statistics_too() -> None:
    model = normalizing()
    (node,) = [n for n in model.graph.node if n.op_type == "BatchNormalization"]
    node.attribute.append(helper.make_attribute("training_mode", 1))
    node.output.extend(["mean_out", "var_out"])
    batch = labelled((1, 4, 4))
    expected = TrainingSession(build(normalizing(), loss="SoftmaxCrossEntropy"))
    session = TrainingSession(build(model, loss="SoftmaxCrossEntropy"))
    np.testing.assert_array_equal(session.step(batch)["loss"], expected.step(batch)["loss"])
    for name, array in expected.state.items():
        np.testing.assert_array_equal(session.state[name], array)
    (node,) = [n for n in session.inference_model().graph.node if n.op_type == "BatchNormalization"]
    assert [a.i for a in node.attribute if a.name == "training_mode"] == [0]
    assert len(node.output) == 1


def dropout_only(*, ratio: float = 0.25, shape: tuple[Any, ...] = ("N", 100)) -> onnx.ModelProto:
    with Tape() as tape:
        x = tape.input("x", np.float32, shape)
        w = tape.initializer("w", np.ones(shape[1:], np.float32))
        tape.output(op.Dropout(x * w, np.array(ratio, np.float32)), "y")
    return tape.model()


def masks(model: onnx.ModelProto, rows: int, steps: int, **settings: Any) -> np.ndarray:
    """What Dropout makes of ones in each of some steps, in which nothing is learnt."""
    session = TrainingSession(build(model, optimizer=SGD(0.0), **settings))
    ones = np.ones((rows, 100), np.float32)
    return np.stack(
        [session.step({"x": ones, "targets": ones})["y_training"] for _ in range(steps)]
    )


def test_dropout_is_right_on_average_and_independent() -> None:
    ratio, rows, steps = 0.25, 1000, 4
    found = masks(dropout_only(ratio=ratio), rows, steps)
    assert set(np.unique(found)) == {0, np.float32(1 / (1 - ratio))}
    kept = found > 0
    deviation = np.sqrt(ratio * (1 - ratio))

    def assert_average(sample: np.ndarray, expected: float, spread: float) -> None:
        # 5 standard deviations of the mean: the masks are the same in every run of this test.
        assert abs(sample.mean() - expected) < 5 * spread / np.sqrt(sample.size)

    for mask in kept:
        assert_average(mask, 1 - ratio, deviation)
    for column in (0, 57):
        assert_average(kept[:, :, column], 1 - ratio, deviation)
    for a, b in (
        (kept[0], kept[1]),  # from step to step
        (kept[:, :, 0], kept[:, :, 1]),  # from element to element
        (kept[:, 0], kept[:, 1]),  # from row to row
    ):
        covariance = (a - (1 - ratio)) * (b - (1 - ratio))
        assert_average(covariance, 0, deviation**2)


def test_dropout_depends_on_seed_and_step_only() -> None:
    model = dropout_only()
    first = masks(model, 10, 3, seed=1)
    np.testing.assert_array_equal(first, masks(model, 10, 3, seed=1))
    assert np.any(first != masks(model, 10, 3, seed=2))
    assert np.any(first[0] != first[1])
    longer = masks(model, 20, 3, seed=1)
    np.testing.assert_array_equal(first, longer[:, :10])  # rows keep their masks


def test_two_dropouts_draw_differently() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 100])
        h = x * tape.initializer("w", np.ones(100, np.float32))
        tape.output(op.Dropout(h), "first")
        tape.output(op.Dropout(h), "second")
    session = TrainingSession(
        build(tape.model(), loss=lambda first, second: op.ReduceSum(first * second, keepdims=0))
    )
    outputs = session.step({"x": np.ones((50, 100), np.float32)})
    both = (outputs["first_training"] > 0) & (outputs["second_training"] > 0)
    assert abs(both.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / both.size)


def test_the_mask_that_a_dropout_puts_out_is_the_mask_of_training() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 100])
        h = x * tape.initializer("w", np.ones(100, np.float32))
        y, mask = op.Dropout(h, outputs=2)
        tape.output(y * mask.astype(np.float32), "y")
    session = TrainingSession(build(tape.model()))
    ones = np.ones((4, 100), np.float32)
    y = session.step({"x": ones, "targets": ones})["y_training"]
    assert set(np.unique(y)) == {0, 2}


def test_dropout_that_drops_nothing_is_left_as_it_is() -> None:
    trainable = build(dropout_only(ratio=0.0))
    assert names(algorithm_of(trainable).output) == ["loss", "w_new", "step_new"]


def test_a_ratio_next_to_one_drops_everything() -> None:
    """2³² times the ratio is rounded to 2³², which is no uint32."""
    with Tape() as tape:
        h = tape.input("x", np.float32, ["N", 4]) * tape.initializer("w", np.ones(4, np.float32))
        tape.output(op.Dropout(h, np.array(1 - 2.0**-50)), "y")
    session = TrainingSession(build(tape.model()))
    ones = np.ones((4, 4), np.float32)
    y = session.step({"x": ones, "targets": ones})["y_training"]
    assert not y.any()


def test_bad_ratios() -> None:
    with pytest.raises(
        ModelError, match=r"Dropout node '.*': its ratio must be >= 0 and < 1, got 1.0"
    ):
        build(dropout_only(ratio=1.0))
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 4])
        ratio = tape.input("ratio", np.float32, [])
        tape.output(op.Dropout(x * tape.initializer("w", np.ones(4, np.float32)), ratio), "y")
    with pytest.raises(ModelError, match="its ratio 'ratio' must be a constant, but it is comp"):
        build(tape.model())


def test_dropout_in_a_branch_is_refused() -> None:
    branches = {}
    for name, op_type in (("then_branch", "Dropout"), ("else_branch", "Identity")):
        branches[name] = helper.make_graph(
            [helper.make_node(op_type, ["h"], [name], name=f"in {name}")],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4])],
        )
    graph = helper.make_graph(
        [
            helper.make_node("Mul", ["x", "w"], ["h"]),
            helper.make_node("If", ["flag"], ["y"], name="choice", **branches),
        ],
        "branches",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4]),
            helper.make_tensor_value_info("flag", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        [numpy_helper.from_array(np.ones(4, np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    expected = "Dropout node 'in then_branch': it is in a sub-graph of If node 'choice'"
    with pytest.raises(ortops.UnsupportedError, match=expected):
        build(model)


def test_the_result_loads_where_training_info_is_unknown() -> None:
    # IR version and opset of a model that stock onnxruntime ran stay what it runs.
    model = affine()
    trainable = build(model, optimizer="AdamW")
    assert trainable.ir_version == model.ir_version
    assert [v.name for v in plain_session(trainable).get_inputs()] == ["x"]


def test_a_loss_gets_tensors_by_name() -> None:
    seen: dict[str, Tensor] = {}

    def loss(x, logits, labels, *, smoothing=0.1):
        seen.update(x=x, logits=logits, labels=labels)
        assert smoothing == 0.1
        return op.SoftmaxCrossEntropyLoss(logits, labels) + smoothing * op.ReduceMean(
            x * x, keepdims=0
        )

    trainable = build(classifier(), loss=loss)
    assert {key: tensor.name for key, tensor in seen.items()} == {
        key: key for key in ("x", "logits", "labels")
    }
    batch = labelled((6,))
    found = TrainingSession(trainable).step(batch)
    logits = run_by_name(classifier(), batch)["logits"].astype(np.float64)
    exponentials = np.exp(logits)
    chosen = exponentials[np.arange(8), batch["labels"]] / exponentials.sum(axis=1)
    expected = -np.log(chosen).mean() + 0.1 * np.mean(batch["x"].astype(np.float64) ** 2)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------- a Gradient node in the inference graph itself


def squared_slope(slope: Tensor, targets: Tensor) -> Tensor:
    difference = slope - targets
    result: Tensor = op.ReduceMean(difference * difference, keepdims=0)
    return result


def test_a_model_that_has_a_gradient_inside_is_trained_through_it() -> None:
    model = forces()
    before = model.SerializeToString(deterministic=True)
    trainable = build(model, loss=lambda slope: squared_slope(slope, slope * 0.0), optimizer="SGD")
    assert model.SerializeToString(deterministic=True) == before
    assert trainable.graph == model.graph
    session = TrainingSession(trainable)
    w, v = (session.state[name].astype(np.float64) for name in ("w", "v"))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)

    def loss(w: np.ndarray, v: np.ndarray) -> float:
        return float(np.mean((((1 - np.tanh(x @ w) ** 2) * v[:, 0]) @ w.T) ** 2))

    found = session.step({"x": x})
    assert found["loss"] == pytest.approx(loss(w, v), rel=1e-5)
    rate = session.learning_rate
    for name, array in (("w", w), ("v", v)):
        moved = (array - session.state[name]) / rate
        for index in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[index] = 1e-6
            low, high = (
                loss(*(array + sign * step if n == name else a for n, a in (("w", w), ("v", v))))
                for sign in (-1, 1)
            )
            assert moved[index] == pytest.approx((high - low) / 2e-6, rel=1e-3, abs=2e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize("outputs", [None, ["slope"]])
def test_a_gradient_inside_is_predicted(outputs: list[str] | None, tmp_path: Path) -> None:
    trainable = build(
        forces(), loss=lambda slope: squared_slope(slope, slope * 0.0), optimizer="SGD"
    )
    session = TrainingSession(trainable)
    w, v = (session.state[name].astype(np.float64) for name in ("w", "v"))
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    wanted = ((1 - np.tanh(x @ w) ** 2) * v[:, 0]) @ w.T
    found = session.predict({"x": x}, outputs=outputs)
    np.testing.assert_allclose(found["slope"], wanted, rtol=1e-5, atol=1e-6)
    ortops.export_step(trainable, tmp_path)
    evaluate = json.loads((tmp_path / "step.json").read_text())["evaluate"]
    shown = [output.name for output in onnx.load(tmp_path / "evaluate.onnx").graph.output]
    assert evaluate["outputs"]["slope"] in shown


def test_a_gradient_inside_gets_a_training_copy_too() -> None:
    trainable = build(
        forces(dropout=0.5), loss=lambda slope: squared_slope(slope, slope * 0.0), optimizer="SGD"
    )
    onnx.checker.check_model(concatenated(trainable), full_check=True)
    nodes = [n for n in algorithm_of(trainable).node if n.op_type == "Gradient"]
    assert len(nodes) == 2  # the copy, and the one that training asks for
    attributes = {a.name: helper.get_attribute_value(a) for a in nodes[0].attribute}
    assert attributes == {"xs": [b"x"], "y": b"energy_training"}
    session = TrainingSession(trainable)
    x = np.ones((5, 3), np.float32)
    first, second = session.step({"x": x}), session.step({"x": x})
    assert np.any(first["slope_training"][0] != first["slope_training"][1])  # the rows' own masks
    assert np.any(first["slope_training"] != second["slope_training"])


def constant_weights() -> onnx.ModelProto:
    """Returns y = x @ w · scale, whose weight is in a Constant node."""
    nodes = [
        helper.make_node(
            "Constant", [], ["w"], value=numpy_helper.from_array(np.ones((2, 1), np.float32))
        ),
        helper.make_node(
            "Constant", [], ["scale"], value=numpy_helper.from_array(np.array(2, np.float32))
        ),
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Mul", ["product", "scale"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("listed", "trainable", "said"),
    [
        (["scale"], None, ["scale"]),
        (["scale"], ["w", "scale"], []),
        (["w"], ["scale"], ["w"]),
        (["w", "scale"], None, []),  # as exporters did before IR version 4
        ([], None, []),
    ],
)
def test_inputs_with_a_default_value_say_that_it_is_always_used(listed, trainable, said, caplog):
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        scaled (float[batch, 2] x) => (float[batch, 2] y)
        <float[2, 2] w = {1, 0, 0, 1}, float[1] scale = {2}>
        { h = MatMul (x, w)  y = Mul (h, scale) }""")
    sizes = {"w": [2, 2], "scale": [1]}
    proto.graph.input.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes[name]) for name in listed
    )
    with caplog.at_level(logging.WARNING, "ortops"):
        build_training_model(proto, loss="MeanSquaredError", optimizer="SGD", trainable=trainable)
    found = [line for line in caplog.messages if "has a default value" in line]
    assert [line.split("'")[1] for line in found] == said


@pytest.mark.parametrize("trainable", [None, ["w"]])
def test_weights_in_constant_nodes_become_initializers(trainable, caplog):
    proto = constant_weights()
    before = proto.SerializeToString()
    with caplog.at_level(logging.WARNING, "ortops"):
        built = ortops.build_training_model(
            proto, loss="MeanSquaredError", optimizer="SGD", trainable=trainable
        )
    assert proto.SerializeToString() == before
    assert "the weights of 1 Constant nodes became initializers" in caplog.text
    assert [tensor.name for tensor in built.graph.initializer] == ["w"]
    assert [node.op_type for node in built.graph.node] == ["Constant", "MatMul", "Mul"]
    session = ortops.TrainingSession(built)
    session.step({"x": np.ones((1, 2), np.float32), "targets": np.ones((1, 1), np.float32)})
    assert not np.array_equal(session.state["w"], np.ones((2, 1), np.float32))
    original = session.inference_model(original=proto)
    written = numpy_helper.to_array(original.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(written, session.state["w"])
    assert [node.op_type for node in original.graph.node] == [n.op_type for n in proto.graph.node]


def test_wrong_arguments_are_not_blamed_on_the_model() -> None:
    with pytest.raises(TypeError, match=r"takes 1 positional argument \(model\), got 3"):
        ortops.build_training_model(onnx.ModelProto(), "MeanSquaredError", "Adam")  # type: ignore[call-arg]
