"""TrainingSession: steps, state, files, and what bad input gets."""

from __future__ import annotations

import copy
import dataclasses
import fractions
import functools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import optimizer_oracle
import pytest
from internals import loaded_of, memory_of
from onnx import TensorProto, helper, numpy_helper
from running import plain_session, run, run_by_name
from test_precision import half
from training_models import (
    TRAINING_DOMAIN,
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    foreign,
    initializers,
    labelled,
    normalizing,
    softmax_cross_entropy,
)
from violations import all_violations

import ortops
from models import line
from models.mlp import mlp
from ortops import (
    ArgumentError,
    FeedError,
    KernelError,
    ModelError,
    OrtopsError,
    Tape,
    Tensor,
    TrainingSession,
    build_training_model,
    op,
)
from ortops.cli import main
from ortops.graph.files import external
from ortops.optimizers import OPERATORS, SGD, Adagrad, Adam, AdamW, Momentum, Operator

OPTIMIZERS = {
    "Adagrad": Adagrad(epsilon=1e-3),
    "Adam": Adam(epsilon=1e-3),
    "Momentum": Momentum(mode="nesterov"),
    "SGD": SGD(norm_coefficient=0.01),
    "AdamW": AdamW(epsilon=1e-3),
    "Adam, after correction": Adam(epsilon=1e-3, epsilon_after_correction=True),
    "AdamW, after correction": AdamW(epsilon=1e-3, epsilon_after_correction=True),
}


def affine_session(optimizer: Any = "SGD", **settings: Any) -> TrainingSession:
    model = build_training_model(affine(), loss="MeanSquaredError", optimizer=optimizer)
    return TrainingSession(model, **settings)


def normalizing_session(optimizer: Any = "Adam", **settings: Any) -> TrainingSession:
    model = build_training_model(normalizing(), loss="SoftmaxCrossEntropy", optimizer=optimizer)
    return TrainingSession(model, **settings)


def images(seed: int) -> Arrays:
    return labelled((1, 4, 4), seed=seed)


def copy_of(session: TrainingSession) -> Arrays:
    return dict(session.state)


# --------------------------------------------------------------------------------------- steps


def test_a_step_of_gradient_descent_by_hand() -> None:
    session = affine_session(SGD(0.25))
    batch = affine_batch()
    w, b = (session.state[name].astype(np.float64) for name in ("w", "b"))
    x = batch["x"].astype(np.float64)
    for count in (1, 2, 3):
        outputs = session.step(batch)
        y = x @ w + b
        residual = y - batch["targets"]
        assert outputs["loss"] == pytest.approx(np.mean(residual**2), rel=1e-5)
        np.testing.assert_allclose(outputs["y"], y, rtol=1e-5, atol=1e-6)
        w -= 0.25 * 2 * x.T @ residual / residual.size
        b -= 0.25 * 2 * residual.sum(0) / residual.size
        np.testing.assert_allclose(session.state["w"], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(session.state["b"], b, rtol=1e-5, atol=1e-6)
        assert session.steps_done == count
        assert session.state["step"] == count
        assert set(outputs) == {"loss", "y"}


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_both_kinds_of_kernels_agree(optimizer: str, dtype: type) -> None:
    model = build_training_model(
        affine(dtype=dtype), loss="MeanSquaredError", optimizer=OPTIMIZERS[optimizer]
    )
    sessions = [TrainingSession(model, kernels=kernels) for kernels in ("python", "onnx")]
    for seed in range(5):
        batch = affine_batch(seed=seed, dtype=dtype)
        for session in sessions:
            session.step(batch)
    python, standard = (copy_of(session) for session in sessions)
    tolerance = 2e-6 if dtype is np.float32 else 1e-13
    for name, array in standard.items():
        assert array.dtype == python[name].dtype
        np.testing.assert_allclose(
            python[name], array, rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.quick(3)
@pytest.mark.parametrize("kernels", ["python", "onnx"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_against_the_oracle(optimizer: str, kernels: Any) -> None:
    chosen = OPTIMIZERS[optimizer]
    model = build_training_model(
        affine(dtype=np.float64), loss="MeanSquaredError", optimizer=chosen
    )
    session = TrainingSession(model, kernels=kernels)
    settings = {
        field.name: getattr(chosen, field.name)
        for field in dataclasses.fields(chosen)
        if field.name != "learning_rate"
    }
    attributes = {
        key: float(np.float32(value)) if isinstance(value, float) else value
        for key, value in settings.items()
    }
    rate = np.float32(chosen.learning_rate)
    kind = type(chosen).__name__
    states = {"Adagrad": "H", "Adam": "VH", "AdamW": "VH", "Momentum": "V", "SGD": ""}[kind]
    tensors = {"w": session.state["w"], "b": session.state["b"]}
    tensors |= {f"{n}.{s}": np.zeros_like(a) for n, a in tensors.items() for s in states}
    for count in range(4):
        batch = affine_batch(seed=count, dtype=np.float64)
        residual = batch["x"] @ tensors["w"] + tensors["b"] - batch["targets"]
        gradients = {
            "w": 2 * batch["x"].T @ residual / residual.size,
            "b": 2 * residual.sum(0) / residual.size,
        }
        t = np.int64(count + 1 if kind in ("Adam", "AdamW") else count)
        for name, gradient in gradients.items():
            kept = [f"{name}.{state}" for state in states]
            given = [tensors[name], gradient, *(tensors[key] for key in kept)]
            results = optimizer_oracle.expected(kind, rate, t, given, attributes)
            for key, result in zip((name, *kept), results, strict=True):
                tensors[key] = result.value
        session.step(batch)
        for name, array in tensors.items():
            np.testing.assert_allclose(
                session.state[name], array, rtol=1e-11, atol=1e-13, err_msg=name
            )


def test_python_kernels_are_what_runs_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    rule = OPERATORS["Adam"].rule

    @functools.wraps(rule)
    def counted(r: Any, *rest: Any, **attributes: Any) -> Any:
        calls.append(type(r))
        return rule(r, *rest, **attributes)

    # Operators are a closed list: the table is the only place where one can be watched.
    monkeypatch.setitem(OPERATORS, "Adam", Operator(counted))
    affine_session("Adam", kernels="onnx").step(affine_batch())
    assert set(calls) == {Tensor}  # as the graph was written
    calls.clear()
    affine_session("Adam", kernels="python").step(affine_batch())
    assert calls == [np.ndarray]  # both parameters side by side


def test_a_failing_kernel_raises_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    session = affine_session("Adam", kernels="python")
    session.step(affine_batch())
    before = copy_of(session)

    @functools.wraps(OPERATORS["Adam"].rule)
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a defect")

    with monkeypatch.context() as patch:
        patch.setitem(OPERATORS, "Adam", Operator(fail))
        with pytest.raises(KernelError, match="a defect"):
            session.step(affine_batch())
    assert_same_arrays(copy_of(session), before)
    session.step(affine_batch())
    assert session.steps_done == 2


def test_the_arrays_given_are_not_changed() -> None:
    session = normalizing_session()
    batch = images(0)
    before = {name: array.copy() for name, array in batch.items()}
    outputs = session.step(batch)
    kept = {name: array.copy() for name, array in outputs.items()}
    session.step(images(1))
    assert_same_arrays(batch, before)
    assert_same_arrays(outputs, kept)


def test_any_batch_size_and_memory_layout() -> None:
    session = affine_session()
    for rows in (1, 7, 3):
        session.step(affine_batch(rows))
    batch = affine_batch(6)
    first, second = affine_session(), affine_session()
    first.step(batch)
    second.step({name: np.asfortranarray(array) for name, array in batch.items()})
    assert_same_arrays(copy_of(first), copy_of(second))
    strided = {name: np.repeat(array, 2, axis=0)[::2] for name, array in batch.items()}
    third = affine_session()
    third.step(strided)
    assert_same_arrays(copy_of(first), copy_of(third))


def test_smaller_integers_become_labels() -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    batch = labelled((6,))
    expected = TrainingSession(model).step(batch)["loss"]
    for dtype in (np.int32, np.uint8):
        given = batch | {"labels": batch["labels"].astype(dtype)}
        assert TrainingSession(model).step(given)["loss"] == expected


# --------------------------------------------------------------------- resuming, saving, files


def test_a_saved_file_is_the_trained_model_in_plain_onnxruntime(tmp_path: Path) -> None:
    path = tmp_path / "trained.onnx"
    session = normalizing_session()
    for seed in range(3):
        session.step(images(seed))
    session.save(path)
    onnx.checker.check_model(path, full_check=True)
    x = {"x": images(9)["x"]}
    (found,) = run(path, x)
    np.testing.assert_array_equal(found, run_by_name(session.inference_model(), x)["logits"])
    assert np.any(found != run_by_name(normalizing(), x)["logits"])
    by_hand = normalizing()
    for tensor in by_hand.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(session.state[tensor.name], tensor.name))
    np.testing.assert_array_equal(found, run_by_name(by_hand, x)["logits"])


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.onnx"
    session = affine_session()
    session.save(path)
    before = path.read_bytes()
    session.step(affine_batch())

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    for function in ("os.fsync", "pathlib.Path.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(function, fail)
            with pytest.raises(OSError, match="no space left"):
                session.save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]  # nothing half written lies about
    session.save(path)
    assert path.read_bytes() != before


def test_saving_keeps_the_permissions_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.onnx"
    affine_session().save(path)
    path.chmod(0o640)
    affine_session().save(path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_saving_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        affine_session().save(tmp_path / "missing" / "checkpoint.onnx")


def test_saving_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    target, link = tmp_path / "run-1.onnx", tmp_path / "latest.onnx"
    affine_session().save(target)
    link.symlink_to(target)
    session = affine_session()
    session.step(affine_batch())
    session.save(link)
    assert link.is_symlink()
    assert TrainingSession(target).steps_done == 1


def test_the_inference_model_is_clean() -> None:
    session = normalizing_session()
    session.step(images(0))
    model = session.inference_model()
    onnx.checker.check_model(model, full_check=True)
    assert not model.training_info
    assert [entry.domain for entry in model.opset_import] == [""]
    assert not any(entry.key.startswith("ortops") for entry in model.metadata_props)
    original = normalizing()
    assert [n.op_type for n in model.graph.node] == [n.op_type for n in original.graph.node]
    assert set(initializers(model.graph)) == set(initializers(original.graph))
    for name, array in initializers(model.graph).items():
        np.testing.assert_array_equal(array, session.state[name])


def old_model(opset: int) -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], name="convolution", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"]),
            helper.make_node("GlobalAveragePool", ["n"], ["p"]),
            *(
                [helper.make_node("Squeeze", ["p"], ["y"], axes=[2, 3])]
                if opset < 13
                else [helper.make_node("Squeeze", ["p", "axes"], ["y"])]
            ),
        ],
        "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])],
        [
            numpy_helper.from_array(
                np.random.default_rng(0).normal(size=(2, 1, 3, 3)).astype(np.float32), "w"
            ),
            *(numpy_helper.from_array(np.ones(2, np.float32), name) for name in "sv"),
            *(numpy_helper.from_array(np.zeros(2, np.float32), name) for name in "bm"),
            *([numpy_helper.from_array(np.array([2, 3]), "axes")] if opset >= 13 else []),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize("opset", [11, 13])
def test_trained_weights_go_back_into_the_original(opset: int, tmp_path: Path) -> None:
    original = old_model(opset)
    session = TrainingSession(
        build_training_model(original, loss="MeanSquaredError", optimizer="Adam")
    )
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 1, 4, 4)).astype(np.float32)
    for _ in range(3):
        session.step({"x": x, "targets": np.ones((5, 2), np.float32)})
    path = tmp_path / "original.onnx"
    onnx.save(original, path)
    before = original.SerializeToString(deterministic=True)
    for given in (original, original.SerializeToString(), path):
        found = session.inference_model(original=given)
        assert found.opset_import[0].version == opset
        assert found.graph.node == original.graph.node
        for name, array in initializers(found.graph).items():
            if name != "axes":
                np.testing.assert_array_equal(array, session.state[name])
        np.testing.assert_allclose(
            run_by_name(found, {"x": x})["y"],
            run_by_name(session.inference_model(), {"x": x})["y"],
            rtol=1e-5,
            atol=1e-6,
        )
    assert original.SerializeToString(deterministic=True) == before


@pytest.mark.quick(1)
@pytest.mark.parametrize("opset", [14, 20])
def test_an_original_in_training_mode_becomes_an_inference_model(
    opset: int, tmp_path: Path
) -> None:
    """As PyTorch writes it with TrainingMode.TRAINING; a row depended on its batch."""
    original = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": {opset}]>
    g (float[n,4] x) => (float[n,4] y) <float[4,4] w = {{1,0,0,2,0,1,0,0,3,0,1,0,0,0,4,1}},
    float[4] s = {{1,2,3,4}}, float[4] b = {{1,1,1,0}}, float[4] mean = {{0,0,1,1}},
    float[4] var = {{1,2,1,2}}, float ratio = {{0.5}}, bool training = {{1}}>
    {{ a = MatMul(x, w) c, rm, rv = BatchNormalization<training_mode=1>(a, s, b, mean, var)
       y, mask = Dropout(c, ratio, training) }}""")
    session = TrainingSession(
        build_training_model(original, loss="MeanSquaredError", optimizer="SGD")
    )
    x = np.random.default_rng(0).standard_normal((6, 4), np.float32)
    session.step({"x": x, "targets": np.zeros((6, 4), np.float32)})
    state = {name: session.state[name].astype(np.float64) for name in ("s", "b", "mean", "var")}
    y = (x @ session.state["w"].astype(np.float64) - state["mean"]) / np.sqrt(state["var"] + 1e-5)
    y = y * state["s"] + state["b"]
    onnx.save(original, tmp_path / "model.onnx")
    session.save(tmp_path / "trained.onnx")
    files = [str(tmp_path / name) for name in ("trained.onnx", "tuned.onnx", "model.onnx")]
    assert main(["export", *files[:2], "--original", files[2]]) == 0
    for found in (session.inference_model(original=original), onnx.load(files[1])):
        assert found.opset_import[0].version == opset
        onnx.checker.check_model(found, full_check=True)
        run = onnxruntime.InferenceSession(found.SerializeToString()).run
        for rows in (x, x[:1]):
            (got,) = run(None, {"x": rows})
            np.testing.assert_allclose(got, y[: len(rows)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(session.predict({"x": x})["y"], y, rtol=1e-5, atol=1e-5)  # type: ignore[index]


def test_an_original_that_does_not_fit() -> None:
    session = affine_session()
    with pytest.raises(ModelError, match="original: it has no weight 'w', which is a trained"):
        session.inference_model(original=normalizing())
    other = affine()
    other.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones((2, 2), np.float32), "w"))
    expected = (
        r"original: 'w' must be float32\[3, 2\] as in the training, got float32\[2, 2\]; give the"
    )
    with pytest.raises(ModelError, match=expected):
        session.inference_model(original=other)


def test_external_data_are_trained_and_saved_inside(tmp_path: Path) -> None:
    path, saved = tmp_path / "model.onnx", tmp_path / "saved.onnx"
    model = build_training_model(affine(), loss="L1", optimizer="SGD")
    onnx.save(model, path, save_as_external_data=True, size_threshold=0, location="weights.bin")
    session = TrainingSession(path)
    session.step(affine_batch())
    session.save(saved)
    (tmp_path / "weights.bin").unlink()
    assert_same_arrays(copy_of(TrainingSession(saved)), copy_of(session))


# --------------------------------------------------------------------------------------- state


def test_reset_starts_again() -> None:
    session = normalizing_session()
    start = copy_of(session)
    first = [session.step(images(seed)) for seed in range(3)]
    session.learning_rate = 0.5
    session.reset()
    assert_same_arrays(copy_of(session), start)
    for seed, outputs in enumerate(first):
        assert_same_arrays(session.step(images(seed)), outputs)


def test_reset_of_a_saved_model_resets_the_algorithm_not_the_weights(tmp_path: Path) -> None:
    session = affine_session("Adam")
    session.step(affine_batch())
    session.save(tmp_path / "checkpoint.onnx")
    resumed = TrainingSession(tmp_path / "checkpoint.onnx")
    resumed.reset()
    np.testing.assert_array_equal(resumed.state["w"], session.state["w"])
    assert resumed.steps_done == 0
    assert not resumed.state["w.V"].any()
    assert resumed.learning_rate == np.float32(1e-3)


def test_reset_runs_a_random_initialization() -> None:
    start = helper.make_node("RandomNormal", [], ["w_start"], shape=[2, 1], scale=0.5, seed=1.0)
    shape = helper.make_tensor_value_info("w_start", TensorProto.FLOAT, [2, 1])
    w_next = helper.make_tensor_value_info("w_next", TensorProto.FLOAT, [2, 1])
    model = foreign(
        [helper.make_node("Add", ["w", "w"], ["w_next"])],
        outputs=[w_next],
        updates={"w": "w_next"},
        initial=([start], [shape], {"w": "w_start"}),
    )
    session = TrainingSession(model)
    before = session.state["w"]
    session.reset()
    after = session.state["w"]
    assert np.all(after != before)
    session.step({})
    np.testing.assert_array_equal(session.state["w"], 2 * after)


def test_state_reads_copies_and_is_settable() -> None:
    session = affine_session("Momentum")
    assert set(session.state) == {"w", "b", "w.V", "b.V", "step", "learning_rate"}
    assert len(session.state) == 6
    session.state["w"][:] = 7
    assert np.all(session.state["w"] != 7)
    new = np.full((3, 2), 7, np.float64)
    session.state["w"] = new
    new[:] = 8
    assert np.all(session.state["w"] == 7)
    assert session.state["w"].dtype == np.float32
    session.state = {"b": np.zeros(2, np.float32), "step": 5}
    assert session.steps_done == 5
    assert not session.state["b"].any()
    assert np.all(session.state["w"] == 7)
    x = affine_batch()
    np.testing.assert_allclose(
        session.step(x)["y"], x["x"] @ np.full((3, 2), 7, np.float32), rtol=1e-6
    )
    session.state["w"] = np.ones((2, 3), np.float32).T  # any layout
    np.testing.assert_array_equal(session.state["w"], np.ones((3, 2)))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"W": np.zeros((3, 2))}, "state: there is no variable 'W'"),
        ({"w.W": np.zeros((3, 2))}, "there is no variable 'w.W'; did you mean 'w.V'?"),
        (
            {"b": np.zeros(2), "w": np.zeros((2, 3))},
            "state 'w' must be float32[3, 2], got float64[2, 3]",
        ),
        ({"step": 1.5}, "state 'step' must be int64[], got float64[]"),
        (
            {"step": 2**63},
            "state 'step' cannot be set to 9223372036854775808, which does not fit i",
        ),
        (
            {"w": np.full((3, 2), 1e39)},
            "'w' cannot be set to 1e+39, which does not fit float32",
        ),
        (
            {"w": np.zeros((3, 2), np.complex64)},
            "state 'w' must be float32[3, 2], got complex64[3, 2]",
        ),
        (3, "state must be a dict with an array for each name, got int"),
    ],
)
def test_bad_state_changes_nothing(state: Any, message: str) -> None:
    session = affine_session("Momentum")
    session.step(affine_batch())
    before = copy_of(session)
    with pytest.raises(OrtopsError) as raised:
        session.state = state
    assert message in str(raised.value)
    assert_same_arrays(copy_of(session), before)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array([70000, 0]), "state 'b' cannot be set to 70000, which does not fit float16"),
        (np.array([0, -7e4]), "state 'b' cannot be set to -70000.0, which does not fit float16"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "1 of its 2 values are masked"),
        (
            [[1.0], [2.0, 3.0]],
            "state 'b' cannot be converted to an array: setting an array element with a sequence",
        ),
    ],
)
def test_values_that_a_variable_of_16_bits_does_not_hold(value: Any, message: str) -> None:
    model = half(affine(), onnx.TensorProto.FLOAT16)
    session = TrainingSession(build_training_model(model, loss="MeanSquaredError", optimizer="SGD"))
    before = copy_of(session)
    with pytest.raises(OrtopsError) as raised:
        session.state["b"] = value
    assert message in str(raised.value)
    with pytest.raises(OrtopsError):  # float32 values, from which those of 16 bits follow
        session.parameters = {"b": value}
    assert_same_arrays(copy_of(session), before)


@pytest.mark.torch
def test_a_variable_may_be_set_to_a_tensor_of_pytorch() -> None:
    import torch

    session = affine_session()
    session.state["w"] = torch.full((3, 2), 7.0, requires_grad=True)
    np.testing.assert_array_equal(session.state["w"], np.full((3, 2), 7))


def test_state_cannot_be_removed() -> None:
    session = affine_session()
    with pytest.raises(OrtopsError, match="state 'w': a variable cannot be removed; set it"):
        del session.state["w"]
    with pytest.raises(OrtopsError, match="there is no variable 'v'"):
        session.state["v"]


def set_learning_rate(session: TrainingSession) -> None:
    session.learning_rate = 0.25


def set_a_variable(session: TrainingSession) -> None:
    session.state["w"] = session.state["w"] + 1


def set_all_variables(session: TrainingSession) -> None:
    session.state = dict(session.state)


def set_parameters(session: TrainingSession) -> None:
    session.parameters = dict(session.parameters)


def apply_gradients(session: TrainingSession) -> None:
    session.apply(session.gradients(line.BATCH))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "change",
    [
        set_learning_rate,
        set_a_variable,
        set_all_variables,
        set_parameters,
        apply_gradients,
        lambda session: session.step(line.BATCH),
        lambda session: session.reset(),
        lambda session: session.fit(line.BATCH, progress=False),
    ],
)
def test_a_file_does_not_hold_a_state_that_was_changed_since(change: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "line.onnx")
    session = line.session()
    assert session.saved_in == ""
    session.save(path)
    assert session.saved_in == path
    session.evaluate(line.BATCH)
    assert session.saved_in == path
    change(session)
    assert session.saved_in == ""
    session.save(path)
    assert session.saved_in == path


def test_what_is_refused_leaves_the_name_of_the_file(tmp_path: Path) -> None:
    session = line.session()
    session.save(tmp_path / "line.onnx")
    with pytest.raises(OrtopsError):
        session.learning_rate = -1
    with pytest.raises(OrtopsError):
        session.state["w"] = np.zeros(7)
    assert session.saved_in == str(tmp_path / "line.onnx")


def test_the_learning_rate_counts_at_once_and_is_saved() -> None:
    session = affine_session(SGD(0.5))
    assert session.learning_rate == 0.5
    session.learning_rate = 0
    before = session.state["w"]
    session.step(affine_batch())
    np.testing.assert_array_equal(session.state["w"], before)
    session.learning_rate = np.float64(0.25)
    assert TrainingSession(session.model()).learning_rate == 0.25


BAD_RATES: list[Any] = [
    *(-1, np.nan, np.inf, 1e39, 10**400, "fast", "0.1", b"0.1", None, [0.1, 0.2], ["0.1"]),
    *(True, np.True_, np.array(True), np.array("0.1"), 1j, np.ma.masked),
]


def test_bad_learning_rates() -> None:
    session = affine_session(SGD(0.5))
    ways: dict[str, Callable[[Any], None]] = {
        "learning_rate": lambda value: setattr(session, "learning_rate", value),
        "peak_learning_rate": lambda value: setattr(session, "peak_learning_rate", value),
        "learning_rates": lambda value: session.learning_rates.update(main=value),
    }
    with all_violations() as check:
        for value in BAD_RATES:
            for name, way in ways.items():
                expected = pytest.raises(ArgumentError, match="must be a finite number >= 0, got ")
                with check(f"{name} {value!r:.20}"), expected:
                    way(value)
    assert session.learning_rate == 0.5
    for good in (1, np.float32(0.25), np.array(0.25), np.array(1), fractions.Fraction(1, 4)):
        session.learning_rate = good
        assert session.learning_rate == float(good)


def test_copies_of_the_state_are_dicts_of_arrays() -> None:
    session = affine_session(SGD(0.5))
    for given in (session.state, session.constants, session.learning_rates):
        for way in (copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
            found = way(given)
            assert type(found) is dict
            assert found.keys() == given.keys()
    before = copy.deepcopy(session.state)
    session.step(affine_batch())
    assert not np.array_equal(before["w"], session.state["w"])
    session.state.update(before)
    assert_same_arrays(dict(session.state), before)


def test_without_a_learning_rate() -> None:
    w_next = helper.make_tensor_value_info("w_next", TensorProto.FLOAT, [2, 1])
    model = foreign(
        [helper.make_node("Add", ["w", "w"], ["w_next"])],
        outputs=[w_next],
        updates={"w": "w_next"},
    )
    session = TrainingSession(model)
    with pytest.raises(
        OrtopsError, match="learning_rate: the training algorithm has no learning rate in"
    ):
        session.learning_rate = 0.1
    with pytest.raises(
        OrtopsError, match="learning_rate: the training algorithm has no learning rate in"
    ):
        _ = session.learning_rate


# --------------------------------------------------------------------------------- evaluation


@pytest.mark.slow
@pytest.mark.parametrize("make", [normalizing, lambda: classifier(dropout=0.5)])
def test_evaluates_in_inference_mode(make: Any) -> None:
    shape = (1, 4, 4) if make is normalizing else (6,)
    model = build_training_model(make(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    session = TrainingSession(model)
    for seed in range(3):
        session.step(labelled(shape, seed=seed))
    before = copy_of(session)
    data = labelled(shape, rows=21, seed=9)
    logits = run_by_name(session.inference_model(), data)["logits"]
    found = session.evaluate(data, batch_size=8, metrics=["accuracy"])
    assert found["loss"] == pytest.approx(softmax_cross_entropy(logits, data["labels"]), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(logits.argmax(1) == data["labels"]))
    assert_same_arrays(copy_of(session), before)
    in_training = session.step(data)["loss"]
    assert abs(in_training - found["loss"]) > 1e-3  # training mode is another function


def test_evaluates_a_model_exported_in_training_mode() -> None:
    model = normalizing()
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("training_mode", 1))
            node.output.extend(["mean_out", "var_out"])
    settings: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": "SGD"}
    found = TrainingSession(build_training_model(model, **settings)).evaluate(images(0))
    expected = TrainingSession(build_training_model(normalizing(), **settings)).evaluate(images(0))
    assert found == expected


def test_evaluates_a_model_whose_first_output_is_an_input() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 2])
        tape.graph.outputs.append(x.value)
        tape.output(x * tape.initializer("w", np.ones(2, np.float32)), "y")
    loss = ortops.losses.MeanSquaredError(output="y")
    session = TrainingSession(build_training_model(tape.model(), loss=loss, optimizer="SGD"))
    ones = np.ones((3, 2), np.float32)
    found = session.evaluate({"x": ones, "targets": 3 * ones}, metrics=["mean_absolute_error"])
    assert found == {"loss": 4.0, "mean_absolute_error": 2.0}


def test_evaluates_with_present_weights() -> None:
    session = affine_session(SGD(0.25))
    batch = affine_batch(10)
    first = session.evaluate(batch)["loss"]
    assert first == pytest.approx(float(session.step(batch)["loss"]), rel=1e-6)
    assert session.evaluate(batch, batch_size=3)["loss"] < first


# ------------------------------------------------------------------------------------- threads


@pytest.mark.slow
def test_two_sessions_in_two_threads() -> None:
    batches = [images(seed) for seed in range(15)]
    expected = normalizing_session(kernels="python")
    for batch in batches:
        expected.step(batch)
    sessions = [normalizing_session(kernels=kernels) for kernels in ("python", "python")]
    errors: list[BaseException] = []

    def train(session: TrainingSession) -> None:
        try:
            for batch in batches:
                session.step(batch)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for session in sessions:
        for name, array in copy_of(expected).items():
            np.testing.assert_allclose(session.state[name], array, rtol=1e-5, atol=1e-6)


def test_threads_that_share_a_session_lose_no_step() -> None:
    session = affine_session(SGD(0.0))
    threads = [
        threading.Thread(target=lambda: [session.step(affine_batch()) for _ in range(20)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.steps_done == 60


# ----------------------------------------------------------------------------------- bad feeds


def with_feed(**changes: Any) -> Any:
    batch = {**labelled((6,)), **changes}
    return {name: array for name, array in batch.items() if array is not None}


@pytest.mark.nightly(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        (with_feed(labels=None), "feeds: input 'labels' is missing; the inputs are 'x', 'labels'"),
        (
            with_feed(labels=None, lables=np.zeros(8, np.int64)),
            "feeds: there is no input 'lables'; did you mean 'labels'?",
        ),
        (
            with_feed(x=np.zeros((8, 5), np.float32)),
            "feeds: 'x' must have shape [batch, 6], got [8, 5]",
        ),
        (
            with_feed(x=np.zeros(6, np.float32)),
            "feeds: 'x' must have shape [batch, 6], got [6]",
        ),
        (
            with_feed(x=np.full((8, 6), 0.1)),
            (
                "feeds: 'x' must be float32, got float64 with the value 0.1, which float32 cannot "
                "represent"
            ),
        ),
        (
            with_feed(labels=np.zeros(8, np.float32)),
            "feeds: 'labels' must be int64, got float32",
        ),
        (
            with_feed(labels=np.zeros(5, np.int64)),
            "feeds: 'batch' is 8 in 'x' and 5 in 'labels'; it must be the same in all inputs",
        ),
        (
            with_feed(labels=np.full(8, 3)),
            "feeds: labels in 'labels' must be from 0 to 2, got 3",
        ),
        (
            with_feed(labels=np.array([0, 1, 2, 0, -1, 0, 0, 0])),
            "feeds: labels in 'labels' must be from 0 to 2, got -1",
        ),
        (with_feed(x="abc"), "feeds: 'x' must be float32, got <U3"),
        ([1, 2], "feeds: 'x' must have shape [batch, 6], got []"),
        (
            [labelled((6,))["x"]],
            (
                "feeds: 1 array without names for 2 inputs; give a dict, or a tuple with an array "
                "for each of 'x', 'labels' in this order"
            ),
        ),
        *(
            (
                given,
                (
                    "feeds must be a dict with an array for each input, or a tuple of arrays in "
                    f"the order of the inputs, got {kind}"
                ),
            )
            for given, kind in (([], "list"), (3, "int"))
        ),
        (
            with_feed(x=[[1, 2], [3]]),
            "feeds: 'x' cannot be converted to an array: setting an array element",
        ),
    ],
)
def test_bad_feeds_change_nothing(feeds: Any, message: str) -> None:
    model = build_training_model(
        classifier(dropout=0.5), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )
    session, undisturbed = TrainingSession(model), TrainingSession(model)
    session.step(labelled((6,)))
    undisturbed.step(labelled((6,)))
    before = copy_of(session)
    for use in (session.step, session.evaluate):
        if use == session.evaluate and not isinstance(feeds, dict):
            continue
        with pytest.raises(FeedError) as raised:
            use([feeds] if use == session.evaluate else feeds)
        assert str(raised.value).startswith(message)
        assert_same_arrays(copy_of(session), before)
    # The session still runs, as if nothing had happened.
    batch = labelled((6,), seed=1)
    assert_same_arrays(session.step(batch), undisturbed.step(batch))


def test_a_label_that_does_not_count() -> None:
    loss = ortops.losses.SoftmaxCrossEntropy(ignore_index=-100)
    session = TrainingSession(build_training_model(classifier(), loss=loss, optimizer="SGD"))
    batch = labelled((6,))
    batch["labels"][2:] = -100
    logits = run_by_name(classifier(), batch)["logits"]
    expected = softmax_cross_entropy(logits[:2], batch["labels"][:2])
    assert session.step(batch)["loss"] == pytest.approx(expected, rel=1e-5)
    batch["labels"][0] = 7
    expected_message = "must be from 0 to 2, or -100, which is ignored, got 7"
    with pytest.raises(FeedError, match=expected_message):
        session.step(batch)


def test_what_only_onnxruntime_notices() -> None:
    # The model does not say how many classes there are, so only the run can tell.
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", "C"])
        tape.output(x * tape.initializer("w", np.ones((1, 1), np.float32)), "y")
    session = TrainingSession(
        build_training_model(
            tape.model(), loss="SoftmaxCrossEntropy", optimizer="SGD", trainable=["w"]
        )
    )
    batch = {"x": np.ones((2, 3), np.float32), "labels": np.array([0, 9])}
    before = copy_of(session)
    with pytest.raises(KernelError, match=r"onnxruntime: .*; check values and shapes of the feeds"):
        session.step(batch)
    with pytest.raises(FeedError, match="labels in 'labels' must be >= 0, got -1"):
        session.step(batch | {"labels": np.array([0, -1])})
    assert_same_arrays(copy_of(session), before)
    session.step(batch | {"labels": np.array([0, 2])})
    assert session.steps_done == 1


def test_inputs_that_no_step_reads_are_not_needed() -> None:
    model = affine()
    model.graph.input.append(helper.make_tensor_value_info("unread", TensorProto.FLOAT, ["N"]))
    session = TrainingSession(build_training_model(model, loss="MeanSquaredError", optimizer="SGD"))
    batch = affine_batch()
    session.step(batch)
    session.step(batch | {"unread": np.zeros(4, np.float32)})
    assert session.steps_done == 2


@pytest.mark.parametrize("entry", [1.0, 0.5, True])
def test_an_entry_that_is_no_integer(entry: Any) -> None:
    model = build_training_model(affine(), loss="L1", optimizer="SGD")
    with pytest.raises(ArgumentError, match=f"^entry must be an integer, got {entry!r}$"):
        TrainingSession(model, entry=entry)


def test_what_cannot_be_trained() -> None:
    with pytest.raises(ModelError, match="it has no training_info; make it trainable with"):
        TrainingSession(affine())
    with pytest.raises(ModelError, match="not an ONNX model"):
        TrainingSession(b"\x00\x01not a model")
    model = build_training_model(affine(), loss="L1", optimizer="SGD")
    with pytest.raises(ModelError, match="no training_info entry 1; it has 1"):
        TrainingSession(model, entry=1)
    assert TrainingSession(model, entry=np.int64(0)).steps_done == 0  # type: ignore[arg-type]  # on purpose
    expected = r"^kernels must be 'auto', 'onnx', 'python' or 'compiled', got 'fast'$"
    with pytest.raises(ArgumentError, match=expected):
        TrainingSession(model, kernels="fast")  # type: ignore[arg-type]


def test_a_batch_without_labels_is_refused() -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    session = TrainingSession(model)
    empty = {"x": np.zeros((0, 6), np.float32), "labels": np.zeros(0, np.int64)}
    message = r"^feeds: 'labels' must have at least one row, got shape \[0\]$"
    with pytest.raises(FeedError, match=message):
        session.step(empty)
    with pytest.raises(FeedError, match=message):
        session.evaluate([empty])
    assert session.steps_done == 0


def test_an_operator_without_a_rule_is_named() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float32, ["N", 3])
        tape.output(op.Neg(x * tape.initializer("w", np.ones(3, np.float32))), "y")
    inference = tape.model()
    inference.graph.node[-1].op_type = "Strange"
    inference.graph.node[-1].domain = "com.example"
    inference.opset_import.add(domain="com.example", version=1)
    model = build_training_model(inference, loss="MeanSquaredError", optimizer="SGD")
    expected = "Strange node 'Neg': there is no gradient rule for Strange of domain 'com.example'"
    with pytest.raises(ortops.UnsupportedError, match=expected):
        TrainingSession(model)


def test_a_type_that_onnxruntime_has_no_kernel_for() -> None:
    with Tape() as tape:
        x = tape.input("x", np.float64, ["N", 1, 4, 4])
        w = tape.initializer("w", np.ones((1, 1, 3, 3), np.float64))
        tape.scope = "body/"
        tape.output(op.Conv(x, w), "y")
    model = build_training_model(tape.model(), loss="MeanSquaredError", optimizer="SGD")
    with pytest.raises(ortops.UnsupportedError, match=r"onnxruntime: .*Conv.*'body/Conv'"):
        TrainingSession(model)


def test_the_session_lets_the_domain_be_used_elsewhere() -> None:
    # A plain session that was made before still runs after training sessions were.
    step = ortops.step_graph(build_training_model(affine(), loss="L1", optimizer="Adam"))
    options = onnxruntime.SessionOptions()
    ortops.register_custom_ops(options)
    plain = onnxruntime.InferenceSession(step.SerializeToString(), options)
    first = plain.run(["loss"], affine_batch())[0]
    affine_session("Adagrad", kernels="python").step(affine_batch())
    assert plain.run(["loss"], affine_batch())[0] == first
    assert any(node.domain == TRAINING_DOMAIN for node in step.graph.node)
    assert plain_session(step).run(["loss"], affine_batch())[0] == pytest.approx(float(first))


def test_state_is_a_mapping() -> None:
    state = TrainingSession(build_training_model(affine(), loss="L1", optimizer="SGD")).state
    assert "w" in state
    assert "nothing" not in state
    assert state.get("nothing") is None
    with pytest.raises(KeyError, match="there is no variable 'nothing'"):
        state["nothing"]


def test_given_state_that_reset_computes_is_not_held(tmp_path: Path) -> None:
    wide = {"images": np.ones((2, 64), np.float32), "labels": np.zeros(2, np.int64)}
    path = tmp_path / "model.onnx"
    first = TrainingSession(
        build_training_model(mlp((64, 64, 3)), loss="SoftmaxCrossEntropy", optimizer="Adam")
    )
    first.step(wide)
    first.save(path)
    session = TrainingSession(path)
    loaded = loaded_of(session)
    assert "fc1.weight" in loaded.given
    assert not {"fc1.weight.V", "fc1.weight.H"} & loaded.given.keys()
    # What stands in for it is the present state, so that nothing that is written has the old one.
    session.step(wide)
    moment = session.state["fc1.weight.V"]
    assert not np.array_equal(moment, first.state["fc1.weight.V"])
    tensors = {t.name: t for t in loaded.proto.training_info[0].algorithm.initializer}
    held = loaded.light.array_of(tensors["fc1.weight.V"])
    np.testing.assert_array_equal(held, moment)
    session.reset()
    assert not session.state["fc1.weight.V"].any()
    np.testing.assert_array_equal(session.state["fc1.weight"], first.state["fc1.weight"])


def test_initial_state_of_a_given_model_is_not_kept() -> None:
    model = build_training_model(mlp((64, 32, 4)), loss="SoftmaxCrossEntropy", optimizer="Adam")
    session = TrainingSession(model)
    held = loaded_of(session).light.data.values()
    lent = [tensor for tensor in held if isinstance(tensor, external.Reference)]
    assert len(lent) == 2  # the moments of the big weight
    arrays = [memory_of(session, name) for name in session.state]
    assert all(any(np.shares_memory(t.numpy(), a) for a in arrays) for t in lent)
