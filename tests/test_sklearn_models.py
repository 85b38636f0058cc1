"""Gradients of models that skl2onnx wrote, next to differences of what onnxruntime gives for them.

Small estimators are fitted and converted as users convert them. The gradient of Σ y² to the input,
y being scores or predictions, is taken by a Gradient node; the oracle is central differences of the
model before the node was added, in stock onnxruntime.

Tolerances: in float64, differences with a step of 1e-6 are exact to some 1e-9 of the values. Models
in float32 are evaluated to some 1e-7 of the values, so a step of 1e-2 gives slopes that are off by
1e-5 of them, and by 1e-4 of the third derivative. The bounds are 1e-6 and 2e-3 of the largest
slope; `test_the_bound_can_fail` shows that they see a gradient that is a hundredth too large.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import DOMAIN, node
from onnx import helper
from running import plain_session

import ortops

pytestmark = pytest.mark.sklearn

FEATURES = 4
NARROW, WIDE = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE
BOUNDS = {NARROW: (1e-2, 2e-3), WIDE: (1e-6, 1e-6)}
"""The step and the bound, by type."""


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs, numbers, two classes and three classes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, FEATURES))
    y = x @ np.array([0.5, -1, 0.25, 0.75]) + 0.1 * x[:, 0] ** 2
    return x, y, (y > 0).astype(int), np.digitize(y, [-1, 1])


def points(*, above: float | None = None) -> np.ndarray:
    """Returns inputs that the models have not seen."""
    x = np.random.default_rng(1).standard_normal((5, FEATURES))
    return x if above is None else np.abs(x) + above


def regressor(*steps: Any) -> Callable[[], Any]:
    """Fits a pipeline to numbers."""

    def fit() -> Any:
        from sklearn.pipeline import make_pipeline

        x, y, _, _ = data()
        made = [step() for step in steps]
        return (make_pipeline(*made) if len(made) > 1 else made[0]).fit(x, y)

    return fit


def classifier(classes: int, *steps: Any) -> Callable[[], Any]:
    """Fits a pipeline to classes."""

    def fit() -> Any:
        from sklearn.pipeline import make_pipeline

        x, _, two, three = data()
        made = [step() for step in steps]
        estimator = make_pipeline(*made) if len(made) > 1 else made[0]
        return estimator.fit(x, two if classes == 2 else three)

    return fit


def estimator(module: str, name: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        import importlib

        return getattr(importlib.import_module(f"sklearn.{module}"), name)(**settings)

    return make


logistic = estimator("linear_model", "LogisticRegression")
ridge = estimator("linear_model", "Ridge")
network: dict[str, Any] = {"hidden_layer_sizes": (5,), "max_iter": 20, "random_state": 0}
# Scores of moderate size: exp of the others overflows in float32 in the model itself.
sgd: dict[str, Any] = {"alpha": 0.1, "random_state": 0}

MODELS: dict[str, Callable[[], Any]] = {
    "LogisticRegression-2": classifier(2, logistic),
    "LogisticRegression-3": classifier(3, logistic),
    "LinearRegression": regressor(estimator("linear_model", "LinearRegression")),
    "Ridge": regressor(ridge),
    "SGDClassifier-hinge-3": classifier(3, estimator("linear_model", "SGDClassifier", **sgd)),
    "SGDClassifier-2": classifier(
        2, estimator("linear_model", "SGDClassifier", loss="log_loss", **sgd)
    ),
    "SGDClassifier-3": classifier(
        3, estimator("linear_model", "SGDClassifier", loss="log_loss", **sgd)
    ),
    "LinearSVC-2": classifier(2, estimator("svm", "LinearSVC")),
    "LinearSVC-3": classifier(3, estimator("svm", "LinearSVC")),
    "MLPClassifier-2": classifier(2, estimator("neural_network", "MLPClassifier", **network)),
    "MLPClassifier-3": classifier(
        3, estimator("neural_network", "MLPClassifier", activation="tanh", **network)
    ),
    "MLPRegressor": regressor(
        estimator("neural_network", "MLPRegressor", activation="logistic", **network)
    ),
    "GaussianNB": classifier(3, estimator("naive_bayes", "GaussianNB")),
    "GaussianProcessRegressor": regressor(
        estimator("gaussian_process", "GaussianProcessRegressor", alpha=0.3)
    ),
    "SVR": regressor(estimator("svm", "SVR")),
    "SVR-poly": regressor(estimator("svm", "SVR", kernel="poly")),
    "PCA": classifier(3, estimator("decomposition", "PCA", n_components=2), logistic),
    "StandardScaler": classifier(3, estimator("preprocessing", "StandardScaler"), logistic),
    "MinMaxScaler": regressor(estimator("preprocessing", "MinMaxScaler"), ridge),
    "SimpleImputer": regressor(estimator("impute", "SimpleImputer"), ridge),
    "Normalizer-l1": regressor(estimator("preprocessing", "Normalizer", norm="l1"), ridge),
    "Normalizer-l2": regressor(estimator("preprocessing", "Normalizer"), ridge),
    "Normalizer-max": regressor(estimator("preprocessing", "Normalizer", norm="max"), ridge),
    "PolynomialFeatures": regressor(estimator("preprocessing", "PolynomialFeatures"), ridge),
}

NOT_IN_FLOAT64 = {
    "LinearSVC-2": "skl2onnx has no form of it",
    "LinearSVC-3": "skl2onnx has no form of it",
    "Normalizer-max": "skl2onnx has no form of it",
    "PolynomialFeatures": "skl2onnx joins float32 and float64, which onnxruntime refuses",
    "SimpleImputer": "onnxruntime has no kernel of Imputer",
    "SVR": "onnxruntime has no kernel of SVMRegressor",
    "SVR-poly": "onnxruntime has no kernel of SVMRegressor",
}

# Negative numbers next to zero, by which the model would divide.
ABOVE = {"Normalizer-max": 0.5}


@functools.cache
def fitted(name: str) -> Any:
    with warnings.catch_warnings():
        from sklearn.exceptions import ConvergenceWarning

        warnings.simplefilter("ignore", ConvergenceWarning)  # a few iterations will do
        return MODELS[name]()


def converted(model: Any, kind: int, *, zipmap: bool, opset: int = 21) -> onnx.ModelProto:
    """Converts an estimator; the default of skl2onnx is ``zipmap`` where it has that option."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType

    has_option = hasattr(model, "predict_proba") or "SGD" in type(model).__name__
    inputs = {NARROW: FloatTensorType, WIDE: DoubleTensorType}[kind]([None, FEATURES])
    with warnings.catch_warnings():
        # Of scikit-learn, at what skl2onnx reads of an SVC.
        warnings.filterwarnings("ignore", "Attribute `prob._` was deprecated", FutureWarning)
        return convert_sklearn(
            model,
            initial_types=[("x", inputs)],
            options=None if zipmap or not has_option else {"zipmap": False},
            target_opset={"": opset, "ai.onnx.ml": min(opset // 5, 3)},
        )


def scores_of(proto: onnx.ModelProto) -> str:
    """Returns the name of the scores or predictions: what ZipMap reads, or the last output."""
    for each in proto.graph.node:
        if each.op_type == "ZipMap":
            return each.input[0]
    return proto.graph.output[-1].name


def with_gradient(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Adds the gradient of Σ y² to x."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    y = scores_of(proto)
    result.graph.node.append(helper.make_node("Mul", [y, y], ["squares"]))
    result.graph.node.append(node("Gradient", ["x"], ["dx"], name="ask", xs=["x"], y="squares"))
    for entry in result.opset_import:
        if not entry.domain:
            entry.version = max(entry.version, 7)  # that of Identity may be 1; Mul is another there
    kind = proto.graph.input[0].type.tensor_type.elem_type
    result.graph.output.append(helper.make_tensor_value_info("dx", kind, [None, FEATURES]))
    result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return result


def slopes(proto: onnx.ModelProto, x: np.ndarray, step: float) -> np.ndarray:
    """Returns the derivatives of Σ y² by central differences of the model itself."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    y = scores_of(proto)
    if y not in [value.name for value in shown.graph.output]:
        shown.graph.output.append(helper.make_empty_tensor_value_info(y))
    session = plain_session(shown)

    def total(at: np.ndarray) -> float:
        return float((session.run([y], {"x": at})[0].astype(np.float64) ** 2).sum())

    found = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[place] += step
        behind[place] -= step
        width = np.float64(ahead[place]) - np.float64(behind[place])
        found[place] = (total(ahead) - total(behind)) / width
    return found


def gradients(proto: onnx.ModelProto, x: np.ndarray, rounding: float = 0.0) -> Iterator[np.ndarray]:
    """Yields the gradient, from ortops' session and from the lowered model in a plain one.

    The outputs of the model stay the same, but for rounding if it is given.
    """
    asked = with_gradient(proto)
    before = asked.SerializeToString()
    lowered = ortops.lower(asked)
    assert asked.SerializeToString() == before
    shown = [value.name for value in asked.graph.output]
    kinds = {value.name: value.type for value in asked.graph.output}
    for value in lowered.graph.output:
        is_tensor = value.type.HasField("tensor_type")
        assert value.type.WhichOneof("value") == kinds[value.name].WhichOneof("value")
        assert is_tensor or value.type == kinds[value.name]
    original = dict(zip(shown[:-1], plain_session(proto).run(shown[:-1], {"x": x}), strict=True))
    for session in (ortops.InferenceSession(asked), plain_session(lowered)):
        results = dict(zip(shown, session.run(shown, {"x": x}), strict=True))
        yield results.pop("dx")
        for name, array in original.items():
            if isinstance(array, list):
                assert results[name] == array
            elif rounding:
                np.testing.assert_allclose(results[name], array, rtol=0, atol=rounding)
            else:
                np.testing.assert_array_equal(results[name], array)


def check(
    proto: onnx.ModelProto, x: np.ndarray, factor: float = 1.0, rounding: float = 0.0
) -> None:
    kind = proto.graph.input[0].type.tensor_type.elem_type
    x = x.astype(helper.tensor_dtype_to_np_dtype(kind))
    step, bound = BOUNDS[kind]
    expected = slopes(proto, x, step)
    assert np.abs(expected).max() > 1e-3
    for found in gradients(proto, x, rounding):
        assert found.dtype == x.dtype
        np.testing.assert_allclose(
            found * factor, expected, rtol=0, atol=bound * np.abs(expected).max()
        )


def inputs_of(name: str) -> np.ndarray:
    return points(above=ABOVE.get(name))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MODELS)
def test_float32(name: str) -> None:
    rounding = 0.0
    if name == "GaussianProcessRegressor":
        # The product with a vector is written with the vector first, and sums in another order.
        model = fitted(name)
        terms = model.kernel_(inputs_of(name), model.X_train_) * np.ravel(model.alpha_)
        rounding = np.finfo(np.float32).eps * np.abs(terms).sum(axis=1).max()
    check(converted(fitted(name), NARROW, zipmap=True), inputs_of(name), rounding=rounding)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_IN_FLOAT64])
def test_float64(name: str) -> None:
    check(converted(fitted(name), WIDE, zipmap=False), inputs_of(name))


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["LogisticRegression-2", "LogisticRegression-3", "GaussianNB"])
def test_without_zipmap(name: str) -> None:
    proto = converted(fitted(name), NARROW, zipmap=False)
    assert "ZipMap" not in [each.op_type for each in proto.graph.node]
    check(proto, inputs_of(name))


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("opset", [12, 15, 18, 21])
@pytest.mark.parametrize(
    "name", ["LogisticRegression-3", "MLPClassifier-3", "StandardScaler", "PolynomialFeatures"]
)
def test_opsets(name: str, opset: int) -> None:
    proto = converted(fitted(name), NARROW, zipmap=True, opset=opset)
    assert max(entry.version for entry in proto.opset_import) <= opset
    check(proto, inputs_of(name))


@pytest.mark.parametrize("opset", [12, 21])
def test_labels_that_are_strings(opset: int) -> None:
    x, _, _, three = data()
    model = estimator("linear_model", "LogisticRegression")().fit(
        x, np.array(["a", "b", "c"])[three]
    )
    check(converted(model, NARROW, zipmap=True, opset=opset), points())


@pytest.mark.parametrize("kind", [NARROW, WIDE])
def test_the_bound_can_fail(kind: int) -> None:
    proto = converted(fitted("LogisticRegression-3"), kind, zipmap=False)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(proto, points(), 1.01)


STEPS: dict[str, Callable[[], Any]] = {
    "KBinsDiscretizer": regressor(
        estimator(
            "preprocessing",
            "KBinsDiscretizer",
            n_bins=3,
            quantile_method="averaged_inverted_cdf",
            encode="onehot-dense",
        ),
        ridge,
    ),
    "KNeighborsClassifier": classifier(3, estimator("neighbors", "KNeighborsClassifier")),
    "KNeighborsRegressor": regressor(estimator("neighbors", "KNeighborsRegressor")),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", STEPS)
def test_steps_have_the_derivative_zero(name: str) -> None:
    """Bins, and neighbours of equal weight, change at once, or not at all."""
    proto = converted(STEPS[name](), NARROW, zipmap=False)
    x = points().astype(np.float32)
    np.testing.assert_array_equal(slopes(proto, x, 1e-4), 0)
    for found in gradients(proto, x):
        np.testing.assert_array_equal(found, np.zeros_like(x))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "RandomForestClassifier": (
        classifier(2, estimator("ensemble", "RandomForestClassifier", n_estimators=2, max_depth=2)),
        r"TreeEnsembleClassifier node '\w+': trees are piecewise constant",
    ),
    "RandomForestRegressor": (
        regressor(estimator("ensemble", "RandomForestRegressor", n_estimators=2, max_depth=2)),
        r"TreeEnsembleRegressor node '\w+': trees are piecewise constant",
    ),
    "SVC": (
        classifier(2, estimator("svm", "SVC")),
        r"SVMClassifier node '\w+': there is no gradient rule for an SVM's votes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    build, message = REFUSED[name]
    proto = converted(build(), NARROW, zipmap=True)
    plain_session(proto)
    for refuse in (ortops.lower, ortops.InferenceSession):
        with pytest.raises(ortops.UnsupportedError, match=message):
            refuse(with_gradient(proto))
    with pytest.raises(
        ortops.ModelError, match=f"the loss depends on no weight, only on {message}"
    ):
        ortops.build_training_model(proto, loss="MeanSquaredError", optimizer="SGD")


def test_a_classifier_of_one_vs_rest_is_trained_where_it_is_sure() -> None:
    """1 / (1 + exp(-score)) overflows inside, and the probabilities are normalized.

    The oracle is -log p of the label in float64 without any overflow, where p > the smallest number
    of float32: ortops takes no logarithm of less.
    """
    model = fitted("SGDClassifier-3")
    proto = converted(model, NARROW, zipmap=False)
    loss = ortops.losses.NegativeLogLikelihood(output="probabilities")
    trainable = ortops.build_training_model(proto, loss=loss, optimizer="SGD")
    session = ortops.TrainingSession(trainable)
    x, _, _, labels = data()
    x = (200 * x).astype(np.float32)
    weights, bias = (session.state[name].astype(np.float64) for name in ("coef", "intercept"))
    some = (x @ weights + bias).max(axis=1) > -80  # the model says 1/3 where all overflow
    x, labels = x[some], labels[some]
    labels = np.where(np.arange(len(x)) % 2, labels, (labels + 1) % 3)  # it is wrong, and sure
    score = x @ weights + bias
    assert (np.abs(score) > 89).mean() > 0.3  # where exp overflows
    small = np.exp(-abs(score))
    rest, p = small / (1 + small), np.where(score > 0, 1 / (1 + small), small / (1 + small))
    rest = np.where(score > 0, rest, 1 / (1 + small))  # 1 - p
    total = p.sum(axis=1, keepdims=True)
    chosen = np.take_along_axis(p, labels[:, None], 1) / total
    counts = chosen > float(np.finfo(np.float32).tiny)
    assert 0.2 < counts.mean() < 1
    slope = np.where(counts, p * rest / total - rest * np.eye(3)[labels], 0) / len(x)

    found = session.gradients({"x": x, "labels": labels})
    np.testing.assert_allclose(found["coef"], x.T @ slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["intercept"].ravel(), slope.sum(axis=0), rtol=1e-4, atol=1e-6)
    for _ in range(10):
        assert np.isfinite(session.step({"x": x, "labels": labels})["loss"])
    assert all(np.isfinite(array).all() for array in session.parameters.values())


def test_the_maps_themselves_are_no_tensor() -> None:
    proto = with_gradient(converted(fitted("LogisticRegression-3"), NARROW, zipmap=True))
    (ask,) = (each for each in proto.graph.node if each.op_type == "Gradient")
    ask.attribute[1].s = b"output_probability"
    assert ask.attribute[1].name == "y"
    message = (
        r"Gradient node 'ask': y 'output_probability' is a sequence of maps, created by ZipMap"
    )
    with pytest.raises(ortops.ModelError, match=message):
        ortops.lower(proto)
