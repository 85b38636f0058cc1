"""Weights of models that skl2onnx writes, set where they stood.

Tests import scikit-learn and skl2onnx themselves: they take a second, which whoever runs none of
them need not wait for.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper
from test_weights import ROUNDING, check

from ortops.graph.files.external import LightModel
from ortops.graph.weights import lift, weights


@pytest.mark.quick(3)
@pytest.mark.parametrize("zipmap", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["LogisticRegression", "OneVsRestClassifier", "LinearSVC"])
def test_linear_classifiers(name: str, classes: int, zipmap: bool) -> None:
    import skl2onnx
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.svm import LinearSVC

    estimators = (LogisticRegression(), OneVsRestClassifier(LogisticRegression()), LinearSVC())
    (estimator,) = (each for each in estimators if type(each).__name__ == name)
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
@pytest.mark.parametrize("name", ["SGDClassifier", "Perceptron"])
def test_classifiers_with_initializers(name: str, zipmap: bool) -> None:
    """skl2onnx writes these as matrix products."""
    import skl2onnx
    from sklearn import linear_model

    x = np.random.default_rng(3).standard_normal((60, 4)).astype(np.float32)
    fitted = getattr(linear_model, name)(random_state=0).fit(x, np.arange(60) % 3)
    options = {id(fitted): {"zipmap": zipmap}}
    model = skl2onnx.to_onnx(fitted, x[:1], options=options, target_opset=21)
    found = [
        weight.array()
        for weight in weights(LightModel(model, {})).values()
        if weight.shape == (4, 3)
    ]
    np.testing.assert_allclose(found, [fitted.coef_.T], rtol=1e-6)
    assert lift(LightModel(model, {}))[0].proto is model


@pytest.mark.parametrize("name", ["LinearRegression", "Ridge"])
@pytest.mark.parametrize("targets", [1, 2])
def test_linear_regressions(name: str, targets: int) -> None:
    import skl2onnx
    from sklearn import linear_model

    rng = np.random.default_rng(3)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    y = x @ rng.standard_normal((4, targets)) + 0.5
    fitted = getattr(linear_model, name)().fit(x, y)
    model = skl2onnx.to_onnx(fitted, x[:1], target_opset=21)
    everything = check(model, {"X": x}, tolerance=ROUNDING)
    (found,) = [t for t in everything.graph.initializer if t.name.endswith(".coefficients")]
    np.testing.assert_allclose(
        numpy_helper.to_array(found), np.reshape(fitted.coef_, (targets, 4)), rtol=1e-6
    )
