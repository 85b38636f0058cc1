"""Training of models that read strings, such as text classifiers that skl2onnx wrote.

The oracle vectorizes the texts with scikit-learn and trains the linear model in numpy float64. It
shares no code with ortops.
"""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from running import plain_session

import ortops
from ortops.cli import main
from ortops.errors import FeedError, UnsupportedError

TEXTS = np.array(
    [
        *("a good film", "a bad film", "very good", "very bad", "not good at all", "great acting"),
        *("dull and bad", "a great story", "very dull", "good acting, great film", "", "bad plot"),
    ]
)
LABELS = np.array([1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0])
BATCH = {"text": TEXTS[:, None], "labels": LABELS}

ENCODER = """<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]>
colours (string[batch] colour, float[batch] size) => (float[batch, 2] scores)
<float[3, 2] table = {1, 0, 0, 1, 1, 1}, float[1, 2] slope = {0.5, -0.5}>
{ number = ai.onnx.ml.LabelEncoder <keys_strings: strings = ["red", "green", "blue"],
      values_int64s: ints = [0, 1, 2], default_int64: int = 0> (colour)
  rows = Gather (table, number)
  axis = Constant <value = int64[1] {1}> ()
  column = Unsqueeze (size, axis)
  scaled = Mul (column, slope)
  scores = Add (rows, scaled) }"""
COLOURS = np.array(["blue", "red", "green", "blue", "pink"])
COLOUR_BATCH = {
    "colour": COLOURS,
    "size": np.linspace(-1, 1, 5).astype(np.float32),
    "labels": np.array([0, 1, 1, 0, 1]),
}


def pipeline(**settings: Any) -> tuple[Any, onnx.ModelProto]:
    """Returns a fitted text classifier, and its model. The locale "C" is on every machine."""
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    fitted = make_pipeline(TfidfVectorizer(**settings), LogisticRegression()).fit(TEXTS, LABELS)
    model = to_onnx(
        fitted,
        initial_types=[("text", StringTensorType([None, 1]))],
        options={id(fitted[-1]): {"zipmap": False}, TfidfVectorizer: {"locale": "C"}},
    )
    return fitted, model


def trainable(model: onnx.ModelProto) -> onnx.ModelProto:
    return ortops.build_training_model(
        model,
        loss="SoftmaxCrossEntropy",
        optimizer=ortops.optimizers.SGD(0.5),
        trainable=["LinearClassifier*"],
    )


def descended(fitted: Any, steps: int) -> tuple[np.ndarray, list[float]]:
    """Returns probabilities and losses of logistic regression in numpy, from vectorized texts.

    LinearClassifier has a row of weights for each of the two classes, each the negative of the
    other; their gradients are halves of that of a single row.
    """
    x = fitted[0].transform(TEXTS).toarray()
    weights, intercept, losses = fitted[1].coef_[0], fitted[1].intercept_[0], []
    for _ in range(steps):
        p = 1 / (1 + np.exp(-(x @ weights + intercept)))
        losses.append(float(-np.log(np.where(LABELS == 1, p, 1 - p)).mean()))
        slope = (p - LABELS) / len(x)
        weights = weights - 0.5 * 0.5 * slope @ x
        intercept = intercept - 0.5 * 0.5 * slope.sum()
    p = 1 / (1 + np.exp(-(x @ weights + intercept)))
    return np.stack([1 - p, p], 1), losses


@pytest.mark.quick(1)
@pytest.mark.sklearn
@pytest.mark.parametrize("settings", [{}, {"ngram_range": (1, 2)}, {"norm": None}])
def test_a_text_classifier_trains_like_one_on_vectorized_texts(settings: dict[str, Any]) -> None:
    fitted, model = pipeline(**settings)
    session = ortops.TrainingSession(trainable(model))
    losses = [float(session.step(BATCH)["loss"]) for _ in range(4)]
    losses += session.run_steps([BATCH] * 4).tolist()
    for gradients in (session.gradients(BATCH) for _ in range(2)):
        losses.append(gradients.loss)
        session.apply(gradients)
    probabilities, expected = descended(fitted, 10)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(
        session.predict({"text": TEXTS[:, None]}, outputs="probabilities", batch_size=5),
        probabilities,
        rtol=1e-4,
    )
    tuned = plain_session(session.inference_model(original=model))
    np.testing.assert_allclose(
        tuned.run(["probabilities"], {"text": TEXTS[:, None]})[0], probabilities, rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.sklearn
def test_a_text_classifier_is_fitted_evaluated_and_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, model = pipeline()
    with caplog.at_level(logging.WARNING):
        session = ortops.TrainingSession(trainable(model))
    said = [text for text in caplog.messages if "strings ('text')" in text]
    assert len(said) == 1
    split: dict[str, Any] = {"batch_size": 4, "accumulate": 2, "progress": False}
    session.fit(BATCH, epochs=2, validation=BATCH, metrics=["accuracy"], **split)
    session.save(tmp_path / "text.onnx")
    reopened = ortops.TrainingSession(tmp_path / "text.onnx")
    assert reopened.evaluate(BATCH) == session.evaluate(BATCH)
    for each in (session, reopened):
        each.fit(BATCH, epochs=3, resume=True, **split)
    assert reopened.evaluate(BATCH) == session.evaluate(BATCH)
    plain_session(onnx.load(tmp_path / "text.onnx")).run(None, {"text": TEXTS[:, None]})


@pytest.mark.slow
@pytest.mark.sklearn
def test_the_command_line_trains_a_text_classifier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, model = pipeline()
    onnx.save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **BATCH)
    with (tmp_path / "data.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("text", "labels"), *zip(TEXTS, LABELS, strict=True)])
    found = []
    for data in ("data.npz", "data.csv"):
        train = ["train", "model.onnx", "--data", data, "--loss", "SoftmaxCrossEntropy"]
        train += ["--epochs", "2", "--batch-size", "4", "--save", f"{data}.onnx"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            assert main(train) == 0
            assert main(["eval", f"{data}.onnx", "--data", data]) == 0
            assert (
                main(["predict", f"{data}.onnx", "--data", data, "--output", f"{data}.out.csv"])
                == 0
            )
        found.append((capsys.readouterr().out, (tmp_path / f"{data}.out.csv").read_text()))
    assert found[0][1] == found[1][1]
    assert found[0][1].count("\n") == len(TEXTS) + 1


def colours() -> ortops.TrainingSession:
    model = onnx.parser.parse_model(ENCODER)
    return ortops.TrainingSession(
        ortops.build_training_model(
            model, loss="SoftmaxCrossEntropy", optimizer=ortops.optimizers.SGD(1.0)
        )
    )


def test_an_embedding_of_encoded_strings_trains_beside_numbers() -> None:
    session = colours()
    numbers, sizes = np.array([2, 0, 1, 2, 0]), COLOUR_BATCH["size"][:, None].astype(np.float64)
    table, slope = np.array([[1.0, 0], [0, 1], [1, 1]]), np.array([[0.5, -0.5]])
    for _ in range(3):
        scores = table[numbers] + sizes * slope
        p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        loss = session.step(COLOUR_BATCH)["loss"]
        np.testing.assert_allclose(loss, -np.log(p[range(5), COLOUR_BATCH["labels"]]).mean(), 1e-5)
        back = (p - np.eye(2)[COLOUR_BATCH["labels"]]) / 5
        np.subtract.at(table, numbers, back)
        slope = slope - (back * sizes).sum(0, keepdims=True)
    np.testing.assert_allclose(session.parameters["table"], table, rtol=1e-5)
    np.testing.assert_allclose(session.parameters["slope"], slope, rtol=1e-5)


def test_lists_and_numpys_strings_are_the_same() -> None:
    losses = set()
    for given in (COLOURS, COLOURS.tolist(), COLOURS.astype(object)):
        losses.add(float(colours().step({**COLOUR_BATCH, "colour": given})["loss"]))
    assert len(losses) == 1


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.arange(5), "'colour' must have strings, got 0 of type int"),
        (["blue", "red", "green", None, "blue"], "'colour' must have strings, got None"),
        (COLOURS.astype("S"), "'colour' must have strings, got b'blue' of type bytes"),
        (COLOURS[:, None], "'colour' must have shape"),
        (COLOURS[:4], "'batch' is 4"),
    ],
)
def test_what_are_no_strings_is_refused(given: Any, message: str) -> None:
    session = colours()
    with pytest.raises(FeedError, match=message):
        session.step({**COLOUR_BATCH, "colour": given})
    assert session.steps_done == 0


def test_an_exported_step_takes_the_strings(tmp_path: Path) -> None:
    session = colours()
    ortops.export_step(session.model(), tmp_path)
    exported = onnxruntime.InferenceSession(tmp_path / "step.onnx")
    state = {name: session.state[name] for name in session.state}
    feeds = {**COLOUR_BATCH, **state}
    taken = {value.name: feeds[value.name] for value in exported.get_inputs()}
    assert {value.name: value.type for value in exported.get_inputs()}["colour"] == "tensor(string)"
    (loss,) = exported.run(["loss"], taken)
    np.testing.assert_allclose(loss, session.step(COLOUR_BATCH)["loss"], rtol=1e-6)


def test_strings_of_an_unknown_type_are_refused() -> None:
    text = ENCODER.replace('"ai.onnx.ml": 3', '"ai.onnx.ml": 3, "own": 1')
    text = text.replace("{ number =", "{ other = own.Clean (colour)\n  number =")
    text = text.replace("(colour)\n  rows", "(other)\n  rows")
    with pytest.raises(UnsupportedError, match=r"Clean.*reads strings.*'other' is unknown"):
        ortops.TrainingSession(
            ortops.build_training_model(
                onnx.parser.parse_model(text), loss="SoftmaxCrossEntropy", optimizer="SGD"
            )
        )
