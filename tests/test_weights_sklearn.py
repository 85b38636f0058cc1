"""Weights of models that skl2onnx writes, set where they stood."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import skl2onnx
from onnx import numpy_helper
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    SGDClassifier,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC
from test_weights import ROUNDING, check

from ortops.graph.files.external import LightModel
from ortops.graph.weights import lift, weights


@pytest.mark.parametrize("zipmap", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), OneVsRestClassifier(LogisticRegression()), LinearSVC()],
    ids=lambda estimator: type(estimator).__name__,
)
def test_linear_classifiers(estimator: Any, classes: int, zipmap: bool) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((90, 4)).astype(np.float32)
    y = np.arange(90) % classes
    x[:, :2] += y[:, None] * [1.0, -1.0]
    fitted = estimator.fit(x, np.array(["red", "green", "blue"])[y])
    options = {"zipmap": zipmap} if hasattr(fitted, "predict_proba") else {}
    model = skl2onnx.to_onnx(fitted, x[:1], options={id(fitted): options}, target_opset=21)
    assert any(node.op_type == "LinearClassifier" for node in model.graph.node)
    check(model, {"X": x}, tolerance=ROUNDING, each=False)


@pytest.mark.parametrize("zipmap", [False, True])
@pytest.mark.parametrize("classifier", [SGDClassifier, Perceptron])
def test_classifiers_with_initializers(classifier: Any, zipmap: bool) -> None:
    """skl2onnx writes these as matrix products."""
    x = np.random.default_rng(3).standard_normal((60, 4)).astype(np.float32)
    fitted = classifier(random_state=0).fit(x, np.arange(60) % 3)
    options = {id(fitted): {"zipmap": zipmap}}
    model = skl2onnx.to_onnx(fitted, x[:1], options=options, target_opset=21)
    found = [
        weight.array()
        for weight in weights(LightModel(model, {})).values()
        if weight.shape == (4, 3)
    ]
    np.testing.assert_allclose(found, [fitted.coef_.T], rtol=1e-6)
    assert lift(LightModel(model, {}))[0].proto is model


@pytest.mark.parametrize("regression", [LinearRegression, Ridge])
@pytest.mark.parametrize("targets", [1, 2])
def test_linear_regressions(regression: Any, targets: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    y = x @ rng.standard_normal((4, targets)) + 0.5
    fitted = regression().fit(x, y)
    model = skl2onnx.to_onnx(fitted, x[:1], target_opset=21)
    everything = check(model, {"X": x}, tolerance=ROUNDING)
    (found,) = [t for t in everything.graph.initializer if t.name.endswith(".coefficients")]
    np.testing.assert_allclose(
        numpy_helper.to_array(found), np.reshape(fitted.coef_, (targets, 4)), rtol=1e-6
    )
