"""The estimators of scikit-learn: its own checks, pipelines, searches, pickles.

Tests import scikit-learn, and with it `ortops.sklearn`, themselves: it takes a second, which
whoever runs none of them need not wait for.
"""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortops
from models import mlp
from ortops import callbacks, losses, optimizers, schedules

# pandas is not asked for, and scikit-learn says so of checks with tables.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")


@pytest.fixture
def iris():
    """150 rows of 4 numbers, and their classes: 0, 1 and 2."""
    from sklearn.datasets import load_iris

    return load_iris(return_X_y=True)


def small_mlp(features: int, outputs: int) -> onnx.ModelProto:
    return mlp.mlp((features, 16, outputs))


def double_mlp(features: int, outputs: int) -> onnx.ModelProto:
    """A network of float64, whose outputs for a row do not depend on how many rows there are."""
    rng = np.random.default_rng(0)
    with ortops.Tape(name="double") as tape:
        x = tape.input("x", np.float64, ["batch", features])
        first = tape.initializer("w1", rng.standard_normal((features, 16)) / np.sqrt(features))
        hidden = ortops.op.Relu(x @ first + tape.initializer("b1", np.zeros(16)))
        second = tape.initializer("w2", rng.standard_normal((16, outputs)) / 4)
        tape.output(hidden @ second + tape.initializer("b2", np.zeros(outputs)), "y")
    return tape.model()


def binary(features: int, classes: int) -> onnx.ModelProto:
    return mlp.mlp((features, 8, 1))


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "epochs"), [("OnnxClassifier", 40), ("OnnxRegressor", 100)])
def test_scikit_learn_s_own_checks(name, epochs):
    from sklearn.utils.estimator_checks import check_estimator

    estimator = getattr(ortops.sklearn, name)(double_mlp, learning_rate=0.05, epochs=epochs)
    check_estimator(estimator, on_skip=None)


def test_a_classifier_in_a_pipeline_learns_names(iris):
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y = iris
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    made = ortops.sklearn.OnnxClassifier(small_mlp, learning_rate=0.02, epochs=30)
    pipeline = make_pipeline(StandardScaler(), made).fit(X, names)
    assert pipeline.score(X, names) > 0.95
    probabilities = pipeline.predict_proba(X)
    assert probabilities.shape == (150, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    assert set(pipeline.predict(X)) <= set(names)


def test_probabilities_are_those_of_the_model(iris):
    X, y = iris
    classifier = ortops.sklearn.OnnxClassifier(small_mlp, learning_rate=0.02, epochs=5).fit(X, y)
    session = onnxruntime.InferenceSession(classifier.inference_model().SerializeToString())
    logits = session.run(None, {session.get_inputs()[0].name: X.astype(np.float32)})[0]
    exponents = np.exp(logits.astype(np.float64))
    expected = exponents / exponents.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(classifier.predict_proba(X), expected, rtol=1e-5)


@pytest.mark.slow
def test_one_output_tells_two_classes(iris):
    X, y = iris
    X, y = X[:100], np.array(["no", "yes"])[y[:100]]
    loss = ortops.losses.BinaryCrossEntropyWithLogits()
    classifier = ortops.sklearn.OnnxClassifier(
        binary, loss=loss, learning_rate=0.05, epochs=20
    ).fit(X, y)
    assert classifier.score(X, y) == 1.0
    assert classifier.predict_proba(X).shape == (100, 2)
    X, y = iris
    with pytest.raises(ortops.ModelError, match="which can only encode two classes, got 3"):
        ortops.sklearn.OnnxClassifier(binary, loss=loss).fit(X, y)


def test_a_file_is_trained_further(iris, tmp_path):
    X, y = iris
    path = tmp_path / "model.onnx"
    onnx.save(small_mlp(4, 3), path)
    classifier = ortops.sklearn.OnnxClassifier(str(path), learning_rate=0.02, epochs=30).fit(X, y)
    assert classifier.score(X, y) > 0.9
    assert [node.op_type for node in classifier.inference_model().graph.node] == [
        node.op_type for node in onnx.load(path).graph.node
    ]


def test_images_are_reshaped():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        tint (float[batch, 1, 2, 2] images) => (float[batch, 2] logits)
        <int64[2] shape = {-1, 4}, float[4, 2] w = {1, 0, 0, 1, 1, 0, 0, 1}> {
            flat = Reshape (images, shape)
            logits = MatMul (flat, w)
        }""")
    rng = np.random.default_rng(0)
    flat = rng.random((20, 4))
    y = (flat[:, 0] > flat[:, 1]).astype(int)
    a = ortops.sklearn.OnnxClassifier(model, epochs=3).fit(flat, y).predict_proba(flat)
    b = ortops.sklearn.OnnxClassifier(model, epochs=3).fit(flat.reshape(-1, 1, 2, 2), y)
    np.testing.assert_array_equal(a, b.predict_proba(flat.reshape(-1, 1, 2, 2)))
    with pytest.raises(
        ortops.FeedError,
        match=r"X: a row must have shape .*, that of the model's input 'images', got 3 numbers",
    ):
        ortops.sklearn.OnnxClassifier(model).fit(flat[:, :3], y)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((4, 3, 2), True),
        ((24,), True),
        ((1, 24), True),
        ((1, 4, 3, 2), True),
        ((2, 4, 3), False),  # channels first: as many numbers, in another order
        ((3, 4, 2), False),
        ((12, 2), False),
    ],
)
def test_rows_of_another_layout_are_refused(shape, fits):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        sides (float[batch, 4, 3, 2] images) => (float[batch, 2] logits)
        <int64[2] axes = {1, 2}> {
            scaled = Mul (images, w)
            logits = ReduceSum <keepdims = 0> (scaled, axes)
        }""")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3, 2), np.float32), "w"))
    X = np.random.default_rng(0).random((20, *shape))
    y = np.arange(20) % 2
    classifier = ortops.sklearn.OnnxClassifier(model, epochs=1, trainable=["w"])
    if fits:
        assert classifier.fit(X, y).predict(X).shape == (20,)
        return
    wanted = rf"a row must have shape \[4, 3, 2\], .* got shape {re.escape(str([*shape]))}"
    with pytest.raises(ortops.FeedError, match=wanted):
        classifier.fit(X, y)
    classifier.fit(X.reshape(20, 4, 3, 2), y)
    with pytest.raises(ortops.FeedError, match=r"got shape \[4, 2, 3\]; transpose or reshape X"):
        classifier.predict(X.reshape(20, 4, 2, 3))


@pytest.mark.parametrize("loss", ["BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"])
def test_a_regressor_predicts_outputs_not_their_logits(loss):
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        shares (float[batch, 2] x) => (float[batch, 1] share) <float[2, 1] w = {1, 2}> {
            logits = MatMul (x, w)
            share = Sigmoid (logits)
        }""")
    X = np.random.default_rng(0).standard_normal((200, 2)).astype(np.float32)
    y = 1 / (1 + np.exp(-X @ np.array([2.0, -1.0])))
    early = {"early_stopping": True, "validation_fraction": 0.2}
    regressor = ortops.sklearn.OnnxRegressor(
        model, loss=loss, learning_rate=0.1, epochs=60, **early
    ).fit(X, y)
    file = regressor.inference_model().SerializeToString()
    (expected,) = onnxruntime.InferenceSession(file).run(None, {"x": X})
    np.testing.assert_allclose(regressor.predict(X), expected[:, 0], atol=1e-6)
    assert regressor.score(X, y) > 0.99
    assert max(each["validation_r2"] for each in regressor.history_) > 0.99


def test_partial_fit_goes_on(iris):
    X, y = iris
    once = ortops.sklearn.OnnxClassifier(small_mlp, epochs=3, learning_rate=0.02).fit(X, y)
    parts = ortops.sklearn.OnnxClassifier(small_mlp, learning_rate=0.02)
    for _ in range(3):
        parts.partial_fit(X, y, classes=[0, 1, 2])
    np.testing.assert_array_equal(once.predict_proba(X), parts.predict_proba(X))
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        ortops.sklearn.OnnxClassifier(small_mlp).partial_fit(X, y)
    with pytest.raises(ValueError, match=r"y has the unknown label 7; the classes are \[0, 1, 2\]"):
        parts.partial_fit(X, y + 7)


@pytest.mark.slow
def test_warm_start_goes_on_and_fit_begins_anew(iris):
    X, y = iris
    warm = ortops.sklearn.OnnxClassifier(small_mlp, epochs=1, warm_start=True).fit(X, y).fit(X, y)
    assert warm.session_.steps_done == 2 * 5
    cold = ortops.sklearn.OnnxClassifier(small_mlp, epochs=1).fit(X, y).fit(X, y)
    assert cold.session_.steps_done == 5


@pytest.mark.slow
@pytest.mark.parametrize("rate", [None, 0.3])
def test_warm_start_takes_a_changed_learning_rate(iris, rate):
    """As MLPClassifier does; with SGD, one fit is two with other rates, step by step."""
    X, y = iris

    def fitted(*rates, copies=False):
        made = ortops.sklearn.OnnxClassifier(
            small_mlp, optimizer=optimizers.SGD(0.05), learning_rate=rate, epochs=1, warm_start=True
        )
        for each in rates:
            made.set_params(learning_rate=each).fit(X, y)
            made = pickle.loads(pickle.dumps(made)) if copies else made
        return made

    session = fitted(rate).session_
    first = dict(session.state)
    stopped = fitted(rate, 0.0)
    for name in session.parameters:
        np.testing.assert_array_equal(stopped.session_.state[name], first[name])
    session.peak_learning_rate = 0.2
    data = dict(zip(session.inputs, (X.astype(np.float32), y), strict=True))
    session.fit(data, epochs=1, batch_size=32, shuffle=True, seed=0, progress=False)
    changed = fitted(rate, 0.2), fitted(rate, 0.2, copies=True)
    for each in changed:
        for name in session.parameters:
            np.testing.assert_array_equal(each.session_.state[name], session.state[name])
    changed[0].set_params(learning_rate=None).partial_fit(X, y)
    assert changed[0].session_.peak_learning_rate == pytest.approx(0.05)
    changed[0].set_params(optimizer=optimizers.SGD(0.1))
    with pytest.raises(ortops.ArgumentError, match="optimizer was changed to SGD"):
        changed[0].fit(X, y)


def test_probabilities_of_large_logits_do_not_overflow():
    """For one score and for two, against scipy."""
    from scipy.special import expit, softmax

    X, y = np.array([[-1.0], [1.0], [-0.01], [0.01]], np.float32), np.array([0, 1, 0, 1])
    for classes, loss in ((1, "BinaryCrossEntropyWithLogits"), (2, "SoftmaxCrossEntropy")):
        weights = ",".join(["2000", "-2000"][:classes])
        model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,1] x) => (float[n,{classes}] y) <float[1,{classes}] w = {{{weights}}}>
        {{ y = MatMul(x, w) }}""")
        made = ortops.sklearn.OnnxClassifier(
            model, loss=loss, optimizer=optimizers.SGD(0.05), learning_rate=0.0, epochs=1
        ).fit(X, y)
        logits = X.astype(np.float64) @ np.array(weights.split(","), np.float64)[None]
        both = np.concatenate([expit(-logits), expit(logits)], 1)
        wanted = both if classes == 1 else softmax(logits, 1)
        with np.errstate(all="raise", under="ignore"):
            np.testing.assert_allclose(made.predict_proba(X), wanted, rtol=1e-4)


def test_pickles_hold_the_file(iris):
    X, y = iris
    classifier = ortops.sklearn.OnnxClassifier(small_mlp, epochs=5).fit(X, y)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(X), classifier.predict_proba(X))
    classifier.partial_fit(X, y)
    again.partial_fit(X, y)  # the optimizer's state has come along
    np.testing.assert_array_equal(again.predict_proba(X), classifier.predict_proba(X))


def test_a_clone_is_not_fitted(iris):
    from sklearn.base import clone

    X, y = iris
    classifier = ortops.sklearn.OnnxClassifier(small_mlp(4, 3), epochs=2).fit(X, y)
    copy = clone(classifier)
    assert not hasattr(copy, "session_")
    assert copy.get_params()["epochs"] == 2


@pytest.mark.slow  # it starts processes
def test_a_search_with_processes(iris):
    from sklearn.model_selection import GridSearchCV

    X, y = iris
    search = GridSearchCV(
        ortops.sklearn.OnnxClassifier(small_mlp, epochs=20),
        {"learning_rate": [1e-5, 0.02]},
        n_jobs=2,
        cv=2,
    ).fit(X, y)
    assert search.best_params_ == {"learning_rate": 0.02}
    assert search.best_score_ > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("targets", [1, 2])
def test_a_regressor(targets):
    from sklearn.datasets import make_regression
    from sklearn.model_selection import cross_val_score

    X, y = make_regression(200, 5, n_targets=targets, random_state=0)
    y = y / y.std(axis=0)
    regressor = ortops.sklearn.OnnxRegressor(small_mlp, learning_rate=0.01, epochs=60)
    assert cross_val_score(regressor, X, y, cv=2).mean() > 0.8
    assert regressor.fit(X, y).predict(X).shape == y.shape


def test_several_inputs_are_refused():
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        two (float[batch, 2] a, float[batch, 2] b) => (float[batch, 2] y)
        <float[2, 2] w = {1, 0, 0, 1}> {
            c = Add (a, b)
            y = MatMul (c, w)
        }""")
    with pytest.raises(
        ortops.ModelError,
        match="X and y require one input of the model and one of the loss, got a, b",
    ):
        ortops.sklearn.OnnxRegressor(model).fit(np.ones((4, 2)), np.ones((4, 2)))


@pytest.mark.slow
def test_classes_are_sorted_whatever_the_outputs_stand_for(iris):
    X, y = iris
    labels = np.array(["c", "a", "b"])  # the labels of outputs 0, 1 and 2
    given = ortops.sklearn.OnnxClassifier(
        small_mlp, learning_rate=0.02, epochs=20, classes=labels.tolist()
    )
    given.fit(X, labels[y])
    plain = ortops.sklearn.OnnxClassifier(small_mlp, learning_rate=0.02, epochs=20).fit(X, y)
    assert given.classes_.tolist() == ["a", "b", "c"]
    expected = plain.predict_proba(X)[:, [1, 2, 0]]
    np.testing.assert_array_equal(given.predict_proba(X), expected)
    np.testing.assert_array_equal(given.predict(X), labels[plain.predict(X)])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(given)).predict_proba(X), expected)


def test_classes_are_checked(iris):
    X, y = iris
    with pytest.raises(ValueError, match=r"classes must be distinct labels, got \[0, 1, 1\]"):
        ortops.sklearn.OnnxClassifier(small_mlp, classes=[0, 1, 1]).fit(X, y)
    begun = ortops.sklearn.OnnxClassifier(small_mlp).partial_fit(X, y, classes=[0, 1, 2])
    with pytest.raises(
        ValueError, match=r"must be the same as in the first call, \[0, 1, 2\], got"
    ):
        begun.partial_fit(X, y, classes=[0, 1, 2, 3])


def typed_model(kind: str, size: int = 1) -> onnx.ModelProto:
    """A linear model of inputs of some type."""
    with ortops.Tape(name="typed") as tape:
        x = tape.input("x", kind, ["batch", 2])
        w = tape.initializer("w", np.full((2, size), 0.5, np.float32))
        tape.output(x.astype(np.float32) @ w, "y")
    return tape.model()


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "value", "given"),
    [
        ("uint8", 300, "int64"),
        ("uint8", -1, "int64"),
        ("uint8", 2, "bool"),  # fits
        ("int8", 200, "uint8"),
        ("int32", 2**31, "int64"),
        ("int64", 2**63, "uint64"),
        ("int64", 2.0**63, "float32"),
        ("int64", 2.5, "float64"),
        ("bool", 2, "int64"),
        ("bool", 0.5, "float64"),
        ("float16", 70000, "int32"),
        ("float16", 70000.0, "float32"),
        ("float32", 1e300, "float64"),
        ("uint8", 300, "object"),
    ],
)
@pytest.mark.parametrize("name", ["OnnxClassifier", "OnnxRegressor"])
def test_values_that_do_not_fit_the_model_s_type_are_refused(name, kind, value, given):
    size = 2 if name == "OnnxClassifier" else 1
    X, y = np.array([[0, 1], [1, 0], [1, 1], [0, 0]]), np.array([0, 1, 1, 0])
    estimator = getattr(ortops.sklearn, name)
    fitted = estimator(typed_model(kind, size), epochs=1).fit(X, y)
    wrong = X.astype(given)
    if given == "bool":
        np.testing.assert_array_equal(fitted.predict(wrong), fitted.predict(X))
        return
    wrong[2, 1] = value
    shown = f"{np.array(value, 'float64' if given == 'object' else given)[()]}"
    told = (
        f"X has the value {shown}, which is out of range for {kind}, the type of input 'x'; scale "
        "or"
    )
    for use in (fitted.predict, lambda X: fitted.fit(X, y), lambda X: fitted.partial_fit(X, y)):
        with pytest.raises(ortops.FeedError) as refused:
            use(wrong)
        assert str(refused.value).startswith(told)


def test_numbers_are_rounded_to_the_model_s_precision():
    X = np.array([[0.1, 2**24 + 1], [1e-60, -3.7]])
    fitted = ortops.sklearn.OnnxRegressor(typed_model("float32"), epochs=1).fit(X, [0.0, 1.0])
    np.testing.assert_array_equal(fitted.predict(X), fitted.predict(X.astype(np.float32)))


@pytest.mark.parametrize(
    ("y", "told"),
    [
        (
            [0.0, 1e300],
            r"y has the value 1e\+300, which is out of range for float32, the type of input 't",
        ),
        (
            np.array(["2020-01-01", "2020-01-02"], "M8[D]"),
            "y must be numeric, got type datetime64",
        ),
    ],
)
def test_targets_that_do_not_fit_are_refused(y, told):
    X = np.zeros((2, 2))
    with pytest.raises(ortops.FeedError, match=told):
        ortops.sklearn.OnnxRegressor(typed_model("float32"), epochs=1).fit(X, y)


@pytest.mark.parametrize("X", [np.array([["1", "2"], ["3", "4"]]), np.zeros((2, 2), "M8[s]")])
def test_what_has_no_numbers_is_refused(X):
    with pytest.raises(ortops.FeedError, match="X must be numeric, got type"):
        ortops.sklearn.OnnxClassifier(typed_model("float32", 2), epochs=1).fit(X, [0, 1])


def log_model(features: int, outputs: int) -> onnx.ModelProto:
    return mlp.mlp((features, 4, outputs))


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "callback",
    [
        lambda: callbacks.EarlyStopping(monitor="loss", patience=3),
        lambda: callbacks.BestModel("best.onnx", monitor="loss"),
        lambda: callbacks.Checkpoint("checkpoint.onnx"),
        lambda: callbacks.CSVLog("log.csv"),
        lambda: callbacks.JSONLines("log.jsonl"),
    ],
    ids=["EarlyStopping", "BestModel", "Checkpoint", "CSVLog", "JSONLines"],
)
def test_pickles_and_clones_with_everything(iris, callback, tmp_path, monkeypatch):
    from sklearn.base import clone

    monkeypatch.chdir(tmp_path)
    X, y = iris
    estimator = ortops.sklearn.OnnxClassifier(
        log_model,
        loss=losses.SoftmaxCrossEntropy(label_smoothing=0.1),
        optimizer=optimizers.AdamW(schedules.warmup_cosine(0.02, steps=30, warmup=3)),
        callbacks=[callback()],
        epochs=2,
    )
    expected = estimator.fit(X, y).predict_proba(X)
    for duplicate in (lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy):
        found = duplicate(estimator)
        np.testing.assert_array_equal(found.predict_proba(X), expected)
        for other in (duplicate(clone(estimator)), clone(found)):
            assert not hasattr(other, "session_")
            np.testing.assert_array_equal(other.fit(X, y).predict_proba(X), expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64])
def test_counts_may_be_integers_of_numpy(kind):
    X, y = np.zeros((300, 2), np.float32), np.arange(300.0)
    found = ortops.sklearn.OnnxRegressor(
        typed_model("float32"), epochs=kind(2), batch_size=kind(100), random_state=kind(3)
    ).fit(X, y)
    plain = ortops.sklearn.OnnxRegressor(
        typed_model("float32"), epochs=2, batch_size=100, random_state=3
    ).fit(X, y)
    assert [entry["loss"] for entry in found.history_] == [e["loss"] for e in plain.history_]
