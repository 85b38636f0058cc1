"""ArcFace on a linear layer, and arguments of further losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ArgumentError, ModelError, TrainingSession, losses

RNG = np.random.default_rng(0)


def linear(body: str, weights: Any) -> onnx.ModelProto:
    """A model that computes embeddings e [batch, 4] of x, and y [batch, 3] with a weight w."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 4] x) => (float[batch, 3] y)
    <float[3] bias = {{1.0, -2.0, 3.0}}> {{ e = Tanh(x) {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    return model


@pytest.mark.torch
@pytest.mark.parametrize("transposed", [False, True])
def test_arc_face_of_a_linear_layer(transposed: bool) -> None:
    import torch

    weights = RNG.standard_normal((3, 4) if transposed else (4, 3)).astype(np.float32)
    body = "y = Gemm<transB=1>(e, w, bias)" if transposed else "m = MatMul(e, w) y = Add(m, bias)"
    loss = losses.ArcFace("e", centers="w", margin=0.4, scale=16.0)
    made = TrainingSession(
        ortops.build_training_model(
            linear(body, weights), loss=loss, optimizer=ortops.optimizers.SGD(1.0), trainable=["w"]
        )
    )
    x = RNG.standard_normal((6, 4)).astype(np.float32)
    labels = RNG.integers(0, 3, 6)
    value = float(made.step({"x": x, "labels": labels})["loss"])
    w = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
    e = torch.nn.functional.normalize(torch.tensor(x).double().tanh())
    centers = torch.nn.functional.normalize(w if transposed else w.T)
    cosine = e @ centers.T
    own = torch.nn.functional.one_hot(torch.tensor(labels), 3).bool()
    angle = torch.acos(cosine) + 0.4
    moved = torch.where(angle <= np.pi, torch.cos(angle), cosine - 0.4 * np.sin(0.4))
    logits = 16 * torch.where(own, moved, cosine)
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(weights - made.state["w"], w.grad.numpy(), atol=1e-5)


def test_arc_face_of_logits_is_nan() -> None:
    weights = 100 * np.eye(4, 3, dtype=np.float32)
    made = TrainingSession(
        ortops.build_training_model(
            linear("y = MatMul(e, w)", weights), loss=losses.ArcFace(), optimizer="SGD"
        )
    )
    data = {"x": np.ones((2, 4), np.float32), "labels": np.array([0, 1])}
    with pytest.raises(ortops.DivergedError):
        made.fit(data, progress=False)


def test_centers_that_do_not_fit() -> None:
    weights = np.ones((4, 3), np.float32)
    with pytest.raises(ModelError, match=r"centers 'bias' of shape \[3\] must have an axis of the"):
        ortops.build_training_model(
            linear("m = MatMul(e, w) y = Add(m, bias)", weights),
            loss=losses.ArcFace("e", centers="bias"),
            optimizer="SGD",
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.GaussianNLL(), "give the tensor with the variances as variance="),
        (lambda: losses.GaussianNLL(variance="a", log_variance="b"), "got 'a' and 'b'"),
        (lambda: losses.GaussianNLL(variance="a", eps=0), "eps must be .*> 0, got 0"),
        (lambda: losses.PoissonNLL(log_input=1), "log_input must be"),
        (lambda: losses.Quantile(quantiles=1.0), "quantiles must be .*got 1.0"),
        (lambda: losses.Quantile(quantiles=[]), r"a number between 0 and 1 or a list.*got \[\]"),
        (lambda: losses.Quantile(quantiles="0.5"), "got '0.5'"),
        (lambda: losses.ArcFace(margin=4), "margin must be .*got 4"),
        (lambda: losses.ArcFace(scale=0), "scale must be .*got 0"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_quantiles_need_an_axis_of_their_own() -> None:
    weights = np.ones((4, 3), np.float32)
    with pytest.raises(ModelError, match="'y' must have 2 predictions on its last axis"):
        ortops.build_training_model(
            linear("y = MatMul(e, w)", weights),
            loss=losses.Quantile(quantiles=[0.1, 0.9]),
            optimizer="SGD",
        )


def test_quantiles_are_learned() -> None:
    """A constant prediction converges to the quantiles of the targets."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 1] x) => (float[batch, 3] y) <float[1, 3] w = {0.0, 0.0, 0.0}>
    { y = MatMul(x, w) }""")
    made = TrainingSession(
        ortops.build_training_model(
            model,
            loss=losses.Quantile(quantiles=[0.1, 0.5, 0.9]),
            optimizer=ortops.optimizers.Adam(0.02),
        )
    )
    targets = RNG.normal(size=2000).astype(np.float32)
    data = {"x": np.ones((2000, 1), np.float32), "targets": targets}
    made.fit(data, batch_size=500, epochs=60, progress=False)
    np.testing.assert_allclose(made.state["w"][0], np.quantile(targets, [0.1, 0.5, 0.9]), atol=0.06)
