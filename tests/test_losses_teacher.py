"""A teacher's model inside the loss of its student."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from running import run

import ortops
from ortops import ModelError, Tape, TrainingSession, build_training_model, losses, op
from ortops.optimizers import SGD

F = np.float32
RNG = np.random.default_rng(4)
X = RNG.normal(size=(6, 4)).astype(F)
V = RNG.normal(size=(4, 3)).astype(F)
T = RNG.normal(size=(4, 3)).astype(F)
BIG = RNG.normal(size=(4, 300)).astype(F)


def student(opset: int = 21) -> onnx.ModelProto:
    with Tape(opset=opset) as tape:
        x = tape.input("x", F, ["batch", 4])
        tape.output(x @ tape.initializer("w", V), "y")
    return tape.model()


def teacher(*, end: Any = None, opset: int = 21, name: str = "x", classes: int = 3) -> Any:
    """A model whose names are those of the student, with a weight of more than a kilobyte."""
    with Tape(opset=opset) as tape:
        x = tape.input(name, F, ["rows", 4])
        w = tape.initializer("w", T[:, :classes])
        h = op.ReduceMean(x @ tape.initializer("big", BIG), [1], keepdims=1)
        z = op.Identity(x @ w + h)
        z.value.name = "z"
        tape.output(z if end is None else end(z), "y")
    return tape.model()


def teacher_logits() -> Any:
    return X.astype(float) @ T + (X.astype(float) @ BIG).mean(axis=1, keepdims=True)


def log_softmax(z: Any) -> Any:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def divergence(z: Any, q: Any, t: float) -> float:
    log_p, log_q = log_softmax(z / t), log_softmax(q / t)
    return float(t * t * (np.exp(log_q) * (log_q - log_p)).sum(axis=1).mean())


ENDS = {
    "logits": None,
    "Softmax": lambda z: op.Softmax(z, axis=1),
    "LogSoftmax": lambda z: op.LogSoftmax(z, axis=-1),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("end", ENDS)
def test_it_equals_the_teachers_logits_as_an_input(end: str, tmp_path: Any) -> None:
    given = teacher(end=ENDS[end])
    before = given.SerializeToString(deterministic=True)
    trained = build_training_model(
        student(), loss=losses.Distillation(model=given, temperature=3.0), optimizer=SGD(0.1)
    )
    assert given.SerializeToString(deterministic=True) == before
    session = TrainingSession(trained)
    assert set(session.state) == {"w", "step", "learning_rate"}
    other = TrainingSession(
        build_training_model(
            student(), loss=losses.Distillation(temperature=3.0), optimizer=SGD(0.1)
        )
    )
    logits = teacher_logits().astype(F)
    for _ in range(3):
        expected = divergence(X @ session.state["w"].astype(float), teacher_logits(), 3.0)
        found = float(session.step({"x": X})["loss"])
        assert found == pytest.approx(expected, rel=1e-5)
        assert found == pytest.approx(float(other.step({"x": X, "teacher": logits})["loss"]))
    np.testing.assert_allclose(session.state["w"], other.state["w"], rtol=1e-5)
    assert session.evaluate({"x": X})["loss"] < expected
    session.save(tmp_path / "trained.onnx")
    again = TrainingSession(tmp_path / "trained.onnx")
    assert float(again.step({"x": X})["loss"]) == float(session.step({"x": X})["loss"])
    (y,) = run(tmp_path / "trained.onnx", {"x": X})
    assert y.shape == (6, 3)
    step = ortops.lower(ortops.step_graph(trained))
    found = run(step, {"x": X}, ["loss"])[0]
    assert float(found) == pytest.approx(divergence(X @ V, teacher_logits(), 3.0), rel=1e-5)


def test_a_tensor_of_the_teacher_by_name() -> None:
    loss = losses.Distillation(model=teacher(end=op.Tanh), teacher="z", alpha=0.25)
    session = TrainingSession(build_training_model(student(), loss=loss, optimizer="SGD"))
    labels = np.array([0, 1, 2, 0, 1, 2])
    one = divergence(X @ V, teacher_logits(), 2.0)
    two = -log_softmax((X @ V).astype(float))[np.arange(6), labels].mean()
    found = session.step({"x": X, "labels": labels})["loss"]
    assert float(found) == pytest.approx(0.75 * one + 0.25 * two, rel=1e-5)


def test_a_teacher_of_an_older_opset_and_with_branches() -> None:
    branch = """
        <ir_version: 8, opset_import: ["" : 13]>
        g (float[n, 4] x, bool flag) => (float[n, 3] y) {
            w = Constant <value = float[4, 3] {%s}> ()
            y = If (flag) <
                then_branch = a () => (float[n, 3] p) { h = MatMul (x, w) p = Identity (h) },
                else_branch = b () => (float[n, 3] q) { h = MatMul (x, w) q = Neg (h) }>
        }"""
    given = onnx.parser.parse_model(branch % ", ".join(map(str, T.ravel())))
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        flag = tape.input("flag", np.bool_, [])
        h = x @ tape.initializer("w", V)
        h.value.name = "h"
        tape.output(op.Where(flag, h, 1.0 * h), "y")
    session = TrainingSession(
        build_training_model(
            tape.model(), loss=losses.Distillation(model=given), optimizer=SGD(0.0)
        )
    )
    for flag_, sign in ((True, 1), (False, -1)):
        found = session.step({"x": X, "flag": np.array(flag_)})["loss"]
        assert float(found) == pytest.approx(divergence(X @ V, sign * X @ T, 2.0), rel=1e-5)


REFUSED = {
    "input": (
        {"name": "pixels"},
        {},
        "teacher: its input 'pixels' does not exist in the student; rename it",
    ),
    "classes": ({"classes": 2}, {}, r"the teacher's logits 'teacher/y' have shape \['rows', 2\]"),
    "tensor": (
        {},
        {"teacher": "zz"},
        "Distillation: the teacher has no tensor 'zz'; known names",
    ),
    "opset": (
        {"opset": 22},
        {},
        "its operators of the standard domain have version 22, the student's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_teachers_that_do_not_fit(case: str) -> None:
    built, settings, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        build_training_model(
            student(),
            loss=losses.Distillation(model=teacher(**built), **settings),
            optimizer="SGD",
        )


def test_a_teacher_with_gradient_nodes_is_refused() -> None:
    given = teacher()
    given.graph.node.append(
        helper.make_node(
            "Gradient", ["x"], ["dx"], domain="ai.onnx.preview.training", xs=["x"], y="y"
        )
    )
    given.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    with pytest.raises(ModelError, match="teacher: Gradient node 'dx' has the training domain"):
        build_training_model(student(), loss=losses.Distillation(model=given), optimizer="SGD")


def test_losses_that_couple_rows_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with Tape() as tape:
        x = tape.input("x", F, ["batch", 4])
        tape.output(x @ tape.initializer("a", V), "query")
        tape.output(x @ tape.initializer("b", T), "key")
    with caplog.at_level(logging.WARNING, "ortops"):
        build_training_model(
            tape.model(), loss=losses.InfoNCE(query="query", key="key"), optimizer="SGD"
        )
    (said,) = caplog.messages
    assert said.startswith("loss InfoNCE couples the rows of a batch: the loss of a batch is not")
