"""Inputs fixed to constants, and the branches that remain."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper as nh
import onnxruntime
import pytest

import ortops
from ortops.graph.convert import to_ir
from ortops.graph.shapes import infer_shapes
from ortops.losses import MeanSquaredError
from ortops.surgery import fix_inputs

# As Optimum merges decoders, but each branch has a copy of its weights.
MERGED = """
<ir_version: 9, opset_import: ["" : 18]>
merged (float[n, time, 2] x, float[n, past, 2] past_keys, bool[1] use_cache_branch)
    => (float[n, time, 2] y, float[n, all, 2] present) {
    y, present = If (use_cache_branch) <
        then_branch = with_past () => (float[n, time, 2] y, float[n, all, 2] present)
        <float[2, 2] w = {1, 2, 3, 4}, float[2] bias = {0, 0}, float[2] last = {5, 6}> {
            k = MatMul (x, w)
            present = Concat <axis = 1> (past_keys, k)
            z = Add (k, bias)
            y = Mul (z, last)
        },
        else_branch = without () => (float[n, time, 2] y, float[n, all, 2] present)
        <float[2, 2] w = {1, 2, 3, 4}, float[2] bias = {0, 0}, float[2] other = {7, 8}> {
            present = MatMul (x, w)
            z = Add (present, bias)
            y = Mul (z, other)
        }
    >
}"""
X = np.float32([[[1, 2], [3, 4]]])
PAST = np.zeros((1, 0, 2), np.float32)


def run(model: onnx.ModelProto, **feeds: Any) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)


def merged() -> onnx.ModelProto:
    return onnx.parser.parse_model(MERGED)


@pytest.mark.parametrize("value", [True, False])
def test_a_branch_remains(value: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = merged()
    before = model.SerializeToString()
    with caplog.at_level(logging.WARNING, "ortops"):
        fixed = fix_inputs(model, {"use_cache_branch": value})
    onnx.checker.check_model(fixed, full_check=True)
    assert model.SerializeToString() == before
    assert {node.op_type for node in fixed.graph.node} >= {"MatMul", "Add", "Mul"}
    assert not {"If", "Identity"} & {node.op_type for node in fixed.graph.node}
    names = ["x", "past_keys"] if value else ["x"]
    assert [each.name for each in fixed.graph.input] == names
    assert list(fixed.graph.output) == list(model.graph.output)
    assert fixed.opset_import[0].version == 18
    gone = "'use_cache_branch'" if value else "'past_keys', 'use_cache_branch'"
    expected = f"fixed {{'use_cache_branch': {value}}}; the model no longer has the inputs {gone}"
    assert [record.getMessage() for record in caplog.records] == [expected]
    feeds = {"x": X, "past_keys": PAST}
    expected_values = run(model, **feeds, use_cache_branch=np.array([value]))
    found = run(fixed, **{name: feeds[name] for name in names})
    for one, other in zip(found, expected_values, strict=True):
        np.testing.assert_array_equal(one, other)


def test_trained_weights_go_to_both_branches() -> None:
    fixed = fix_inputs(merged(), {"use_cache_branch": [False]})
    model = ortops.build_training_model(fixed, loss=MeanSquaredError("y"), optimizer="SGD")
    session = ortops.TrainingSession(model)
    x, w, b, scale = (
        X[0].astype(float),
        np.array([[1.0, 2], [3, 4]]),
        np.zeros(2),
        np.array([7.0, 8]),
    )
    session.step({"x": X, "targets": np.zeros_like(X)})
    rate = session.learning_rate
    z = x @ w + b
    slope = 2 * (z * scale) / z.size  # of the mean of (z * scale)²
    w, b, scale = (
        w - rate * x.T @ (slope * scale),
        b - rate * (slope * scale).sum(0),
        scale - rate * (slope * z).sum(0),
    )
    found = session.inference_model(original=merged())
    branches = {a.name: a.g for a in found.graph.node[0].attribute}
    for branch, last in (("then_branch", [5, 6]), ("else_branch", scale)):
        values = [nh.to_array(tensor) for tensor in branches[branch].initializer]
        for value, expected in zip(values, [w, b, last], strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_nested_and_computed_conditions_and_outer_values() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    f (float[n] x, bool a, int64 mode, bool b) => (float[n] y, float[n] z, float[n] v) {
        no = Not (a)
        y, z = If (no) <
            then_branch = t () => (float[n] p, float[n] q) { p = Neg (x)  q = Identity (p) },
            else_branch = e () => (float[n] r, float[n] x) {
                two = Constant <value = int64 {2}> ()
                is_two = Equal (mode, two)
                r = If (is_two) <
                    then_branch = i () => (float[n] s) { p = Abs (x)  s = Neg (p) },
                    else_branch = j () => (float[n] s) { s = Exp (x) }
                >
            }
        >
        v = If (b) <
            then_branch = k () => (float[n] s) { p = Neg (x)  s = Neg (p) },
            else_branch = l () => (float[n] s) { s = Exp (x) }
        >
    }"""
    model = onnx.parser.parse_model(text)
    fixed = fix_inputs(model, {"a": True, "mode": 2})
    onnx.checker.check_model(fixed, full_check=True)
    assert [value.name for value in fixed.graph.input] == ["x", "b"]
    x = np.float32([1, -2])
    for one, other in zip(run(fixed, x=x, b=np.array(True)), [-np.abs(x), x, x], strict=True):
        np.testing.assert_array_equal(one, other)
    both = fix_inputs(fixed, {"b": True})
    assert [node.op_type for node in both.graph.node].count("If") == 0
    np.testing.assert_array_equal(run(both, x=x)[2], x)


def test_inputs_that_were_never_read_stay() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21]>
    f (float[n] x, float[n] unread, float[2] scale) => (float[n] y) { y = Mul (x, scale) }"""
    fixed = fix_inputs(onnx.parser.parse_model(text), {"scale": 2})
    assert [value.name for value in fixed.graph.input] == ["x", "unread"]
    np.testing.assert_array_equal(run(fixed, x=np.float32([1, 3]), unread=X[0, 0])[0], [2, 6])


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (None, ortops.ArgumentError, "values must be a dict of constants by input, got None"),
        ({"use_cache": True}, ortops.ModelError,
         "there is no input 'use_cache'; did you mean 'use_cache_branch'"),
        ({"use_cache_branch": 0.5}, ortops.ArgumentError, r"'use_cache_branch' must be bool\[1\]"),
        ({"use_cache_branch": "no"}, ortops.ArgumentError, "got 'no'"),
        ({"use_cache_branch": [True, False]}, ortops.ArgumentError,
         r"must have shape \['1'\], got \[2\]"),
    ],
)  # fmt: skip
def test_errors(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fix_inputs(merged(), values)


def test_a_model_with_training_is_refused() -> None:
    model = ortops.build_training_model(merged(), loss=MeanSquaredError("y"), optimizer="SGD")
    with pytest.raises(ortops.ModelError, match="training_info"):
        fix_inputs(model, {"use_cache_branch": True})


def test_sizes_in_branches_whose_values_have_equal_names() -> None:
    """onnx's inference takes the sizes of one branch for those of another one, by name."""
    branch = """{{
        first = Constant <value = int64[2] {{{}}}> ()
        last = Constant <value = int64[1] {{{}}}> ()
        sizes = Concat <axis = 0> (first, last)
        z = Reshape (x, sizes)
        flat = Flatten <axis = 1> (z)
        s = MatMul (flat, {})
    }}"""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    f (float[n, 6] x, bool c) => (float[n, 1] y)
    <float[6, 1] w = {{1, 2, 3, 4, 5, 6}}, float[6, 1] v = {{1, 2, 3, 4, 5, 6}}> {{
        y = If (c) <
            then_branch = t () => (float[n, 1] s) {branch.format("-1, 2", "3", "w")},
            else_branch = e () => (float[n, 1] s) {branch.format("-1, 3", "2", "v")}
        >
    }}"""
    work = to_ir(onnx.parser.parse_model(text))
    infer_shapes(work)
    node = work.graph[0]
    for name, expected in (("then_branch", [2, 3]), ("else_branch", [3, 2])):
        values = {v.name: v for each in node.attributes[name].as_graph() for v in each.outputs}
        assert list(values["z"].shape)[1:] == expected
        assert list(values["flat"].shape)[1:] == [6]
