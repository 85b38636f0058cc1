"""Files that others ship, trained with one call: what is trained, what is said, what comes out.

Losses and accuracies are computed again from what stock onnxruntime gives, with numpy, scikit-learn
or PyTorch.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from running import run

import ortops
from ortops import ModelError, TrainingSession, build_training_model, losses
from ortops.engine.check import check
from ortops.optimizers import SGD, Adam, AdamW
from ortops.surgery import name_output

Array = np.ndarray[Any, Any]

FOLDER = Path(__file__).parents[1] / ".models"
CLASSIFIER = FOLDER / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
DETECTOR = FOLDER / "PP-OCRv6_det_small.onnx"
RECOGNIZER = FOLDER / "PP-OCRv6_rec_small.onnx"
SILERO = {
    "silero_vad.onnx": (30, True, True),
    "silero_vad_16k_op15.onnx": (15, True, False),
    "silero_vad_half.onnx": (15, False, False),
    "silero_vad_op18_ifless.onnx": (30, True, False),
    "silero_vad_openvino_16k.onnx": (15, False, True),
}
"""How many floats of more than one number there are, whether there is a rate, and Constants."""


def softplus(z: Array) -> Array:
    return np.logaddexp(0, z.astype(np.float64))


def arrays_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Returns the initializers and constants of a model, those in branches too, by name."""
    found: dict[str, Array] = {}
    pending = [model.graph]
    while pending:
        graph = pending.pop()
        found |= {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        for node in graph.node:
            for attribute in node.attribute:
                pending += [attribute.g] if attribute.HasField("g") else []
                if node.op_type == "Constant" and attribute.HasField("t"):
                    found[node.output[0]] = numpy_helper.to_array(attribute.t)
    return found


def changed(before: onnx.ModelProto, after: onnx.ModelProto) -> set[str]:
    """Returns the names of the arrays that differ between two versions of a model."""
    old, new = arrays_of(before), arrays_of(after)
    assert old.keys() == new.keys()
    return {name for name in old if not np.array_equal(old[name], new[name])}


# ------------------------------------------------------------------------------------ rapidocr


def bars(count: int, seed: int) -> dict[str, Array]:
    """Images of upright and of lying bars, in noise."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    x = rng.standard_normal((count, 3, 48, 96)).astype(np.float32) * 0.3
    x[labels == 1, :, :, ::8] += 1.5
    x[labels == 0, :, ::8, :] += 1.5
    return {"x": x, "labels": labels}


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.fetched(CLASSIFIER)
@pytest.mark.parametrize("mode", ["auto", "frozen"])
def test_an_orientation_classifier_learns_another_task(
    mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = onnx.load(CLASSIFIER)
    trainable = build_training_model(
        model, loss="SoftmaxCrossEntropy", optimizer=Adam(1e-3), batch_normalization=mode
    )
    said = (
        "loss SoftmaxCrossEntropy reads '_v_570', the logits before Softmax node 'Softmax@0', not "
        "'save_infer_model/scale_0.tmp_1'"
    )
    assert said in caplog.messages
    session = TrainingSession(trainable)
    session.fit(bars(64, 0), epochs=2, batch_size=16, progress=False)
    test = bars(32, 1)
    found = session.evaluate(test, metrics="accuracy")
    session.save(tmp_path / "trained.onnx")
    original = session.inference_model(original=model)
    for trained in (tmp_path / "trained.onnx", session.inference_model(), original):
        (p,) = run(trained, {"x": test["x"]})
        right = p.argmax(axis=1) == test["labels"]
        likelihood = np.log(np.maximum(p, 1e-30))[np.arange(32), test["labels"]]
        assert found["accuracy"] == right.mean() == 1
        assert found["loss"] == pytest.approx(-likelihood.mean(), rel=1e-3, abs=1e-6)
    moved = changed(model, original)
    statistics = {name for name in moved if name.endswith(("_mean", "_variance"))}
    assert len(statistics) == (70 if mode == "auto" else 0)
    assert {"conv1_weights", "fc_0.w_0", "fc_0.b_0"} <= moved


@pytest.mark.slow
@pytest.mark.fetched(CLASSIFIER)
def test_a_head_alone_leaves_statistics_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    model = onnx.load(CLASSIFIER)
    session = TrainingSession(
        build_training_model(
            model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.1), trainable=["fc_0.*"]
        )
    )
    assert any(m.startswith("35 of 35 BatchNormalization layers run") for m in caplog.messages)
    session.step(bars(4, 0))
    trained = session.inference_model(original=model)
    assert changed(model, trained) == {"fc_0.w_0", "fc_0.b_0"}


@pytest.mark.slow
@pytest.mark.fetched(DETECTOR)
def test_a_detector_learns_maps_and_keeps_its_sizes(tmp_path: Path) -> None:
    model = onnx.load(DETECTOR)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 64, 96)).astype(np.float32) * 0.2
    targets = np.zeros((2, 1, 64, 96), np.float32)
    for row in range(2):
        place = (row, slice(None), slice(16, 40), slice(24 * row, 24 * row + 40))
        x[place] += 2
        targets[place] = 1
    session = TrainingSession(
        build_training_model(
            model, loss="BinaryCrossEntropyWithLogits", optimizer=AdamW(3e-4, weight_decay=1.0)
        )
    )

    def measured(of: onnx.ModelProto) -> tuple[float, float]:
        z = run(name_output(of, "p2o.pd_op.add.97.0"), {"x": x})[-1].astype(np.float64)
        return float((softplus(z) - z * targets).mean()), float(((z > 0) == (targets > 0)).mean())

    first, _ = measured(model)
    batch = {"x": x, "targets": targets}
    assert session.evaluate(batch)["loss"] == pytest.approx(first, rel=1e-4)
    session.fit(batch, epochs=12, batch_size=1, progress=False)
    found = session.evaluate(batch, metrics="accuracy")
    trained = session.inference_model(original=model)
    loss, right = measured(trained)
    assert found["loss"] == pytest.approx(loss, rel=1e-3)
    assert found["accuracy"] == pytest.approx(right, abs=1e-3)
    assert loss < first / 10
    moved = changed(model, trained)
    settings = {name for name in arrays_of(model) if name.startswith("helper.constant")}
    assert len(settings) == 51
    assert not moved & settings
    assert len(moved) == 162
    session.save(tmp_path / "trained.onnx")
    assert run(tmp_path / "trained.onnx", {"x": x[:, :, :32]})[0].shape == (2, 1, 32, 96)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.fetched(RECOGNIZER)
def test_a_recognizer_learns_by_ctc(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    model = onnx.load(RECOGNIZER)
    x = np.random.default_rng(0).standard_normal((2, 3, 48, 96)).astype(np.float32)
    labels = np.array([[5, 9, 9], [7, 1, 2]])
    session = TrainingSession(
        build_training_model(
            model,
            loss=losses.CTC(batch_first=True),
            optimizer=SGD(1e-5),
            batch_normalization="frozen",
        )
    )
    said = (
        "loss CTC reads 'p2o.pd_op.add.79.0', the logits before Softmax node 'Softmax.2', not "
        "'fetch_name_0'"
    )
    assert said in caplog.messages
    z = torch.from_numpy(run(name_output(model, "p2o.pd_op.add.79.0"), {"x": x})[-1])
    log_p = torch.log_softmax(z, -1).transpose(0, 1)
    steps, lengths = torch.full((2,), len(log_p)), torch.tensor([3, 3])
    batch = {"x": x, "labels": labels}
    batch |= {"input_lengths": steps.numpy(), "target_lengths": lengths.numpy()}
    expected = torch.nn.functional.ctc_loss(log_p, torch.from_numpy(labels), steps, lengths)
    found = session.run_steps([batch] * 5)
    assert found[0] == pytest.approx(float(expected), rel=1e-4)
    assert found[-1] < found[0]


# -------------------------------------------------------------------------------------- silero


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.fetched(FOLDER / name)) for name in SILERO]
)
def test_a_voice_detector_hears_noise_as_voice(name: str) -> None:
    count, has_rate, constants = SILERO[name]
    model = onnx.load(FOLDER / name)
    report = check(model)
    assert report.fitting[0] == "BinaryCrossEntropy"  # the mean of Sigmoids has no logits
    assert not report.problems
    bases = [name for name in report.reasons if name.endswith("forward_basis_buffer")]
    assert len(bases) == count // 15
    assert all("the basis of a Fourier transform" in report.reasons[name] for name in bases)
    assert len(report.parameters) == count - len(bases)
    said = any("Constant nodes became initializers" in sentence for sentence in report.said)
    assert said == constants
    feeds: dict[str, Array] = {
        "input": np.random.default_rng(0).standard_normal((1, 576)).astype(np.float32),
        "state": np.full((2, 1, 128), 0.1, np.float32),
    }
    if has_rate:
        feeds["sr"] = np.array(16000)
    session = TrainingSession(
        build_training_model(model, loss="BinaryCrossEntropy", optimizer=Adam(1e-3))
    )
    batch = {**feeds, "targets": np.ones((1, 1), np.float32)}
    found = session.run_steps([batch] * 4)
    assert found[0] == pytest.approx(-np.log(run(model, feeds)[0].item()), rel=1e-3)
    trained = session.inference_model(original=model)
    p = run(trained, feeds)[0].item()
    after = session.evaluate([batch], metrics="accuracy")
    assert after["loss"] == pytest.approx(-np.log(p), rel=1e-3)
    assert after["accuracy"] == float(p > 0.5)
    assert after["loss"] < found[0]
    moved = changed(model, trained)
    assert len(moved) == 14  # of the branch for this rate
    assert not any("forward_basis" in name for name in moved)


@pytest.mark.slow
@pytest.mark.fetched(FOLDER / "silero_vad_16k_sequence.onnx")
def test_a_voice_detector_of_sequences() -> None:
    model = onnx.load(FOLDER / "silero_vad_16k_sequence.onnx")
    rng = np.random.default_rng(0)
    state = np.zeros((1, 1, 128), np.float32)
    feeds = {"input": rng.standard_normal((5, 576)).astype(np.float32), "h": state, "c": state}
    targets = np.array([1, 0, 1, 1, 0], np.float32)
    session = TrainingSession(
        build_training_model(model, loss="BinaryCrossEntropyWithLogits", optimizer=Adam(1e-3))
    )
    found = session.run_steps([{**feeds, "targets": targets}] * 3)
    p = run(model, feeds)[0].astype(np.float64)
    expected = -np.log(np.where(targets == 1, p, 1 - p)).mean()
    assert found[0] == pytest.approx(expected, rel=1e-3)
    assert found[-1] < found[0]
    assert len(changed(model, session.inference_model(original=model))) == 13


# -------------------------------------------------------------------------------- scikit-learn


def blobs(classes: int) -> tuple[Array, Array]:
    """Points of classes that overlap, with columns of different sizes."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((240, 4))
    score = x @ rng.standard_normal((4, classes)) + 0.7 * rng.standard_normal((240, classes))
    return (x * [1, 2, 0.5, 1] + [0.5, 0, -1, 0]).astype(np.float32), score.argmax(axis=1)


def negative_log_likelihood(p: Array, labels: Array) -> float:
    return float(-np.log(p[np.arange(len(p)), labels].astype(np.float64)).mean())


def estimator(name: str) -> Any:
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    network = MLPClassifier((8,), alpha=0, max_iter=150, random_state=0)
    exact = LogisticRegression(C=1e6)
    return {
        "logistic": exact,
        "one for each": OneVsRestClassifier(exact),
        "pipeline": make_pipeline(StandardScaler(), exact),
        "descent": SGDClassifier(loss="log_loss", random_state=0),
        "network": network,
        "pipeline of a network": make_pipeline(StandardScaler(), network),
    }[name]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.sklearn
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("name", ["GaussianNB", "MultinomialNB", "BernoulliNB", "calibrated"])
def test_probabilities_of_scikit_learn_are_not_squashed_twice(name: str, classes: int) -> None:
    import skl2onnx
    from sklearn import naive_bayes
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.linear_model import LogisticRegression

    x, labels = blobs(classes)
    x = abs(x)
    made = (
        CalibratedClassifierCV(LogisticRegression(), cv=2)
        if name == "calibrated"
        else getattr(naive_bayes, name)()
    )
    fitted = made.fit(x, labels)
    session = TrainingSession(
        build_training_model(
            skl2onnx.to_onnx(fitted, x[:1]), loss="SoftmaxCrossEntropy", optimizer="SGD"
        )
    )
    found = session.evaluate({"X": x, "labels": labels})["loss"]
    expected = negative_log_likelihood(fitted.predict_proba(x), labels)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.sklearn
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize(
    "name",
    ["logistic", "one for each", "pipeline", "descent", "network", "pipeline of a network"],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_classifiers_of_scikit_learn(name: str, classes: int) -> None:
    import skl2onnx

    x, labels = blobs(classes)
    fitted = estimator(name).fit(x, labels)
    model = skl2onnx.to_onnx(fitted, x[:1])
    assert any(node.op_type == "ZipMap" for node in model.graph.node)
    data = {"X": x, "labels": labels}
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=Adam(0.05))
    )

    # The weights as they were fitted: the loss is that of scikit-learn's own probabilities.
    found = session.evaluate(data, metrics="accuracy")
    p = fitted.predict_proba(x)
    assert found["accuracy"] == fitted.score(x, labels)
    assert found["loss"] == pytest.approx(negative_log_likelihood(p, labels), rel=1e-4)

    # From others, training leads to a loss and an accuracy that are as good.
    rng = np.random.default_rng(1)
    report = check(model, loss="SoftmaxCrossEntropy")
    for parameter in report.parameters:
        array = session.state[parameter]
        by = 0.5 if "network" in name else 0.0
        session.state[parameter] = (by * rng.standard_normal(array.shape)).astype(array.dtype)
    assert session.evaluate(data)["loss"] > 1.1 * found["loss"]
    session.fit(data, epochs=100, batch_size=80, progress=False)
    after = session.evaluate(data, metrics="accuracy")
    allowed = 1.05 if "network" in name or name == "descent" else 1.02
    assert after["loss"] < allowed * found["loss"]
    assert after["accuracy"] >= found["accuracy"] - 0.03

    trained = session.inference_model(original=model)
    assert [n.op_type for n in trained.graph.node] == [n.op_type for n in model.graph.node]
    predicted, maps = run(trained, {"X": x})
    assert after["accuracy"] == (predicted == labels).mean()
    p = np.array([[row[label] for label in range(classes)] for row in maps])
    assert after["loss"] == pytest.approx(negative_log_likelihood(p, labels), rel=1e-4)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.sklearn
@pytest.mark.parametrize("name", ["linear", "two targets", "pipeline", "network"])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_regressions_of_scikit_learn(name: str) -> None:
    import skl2onnx
    from sklearn.linear_model import LinearRegression
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, _ = blobs(3)
    rng = np.random.default_rng(3)
    targets = x @ rng.standard_normal((4, 2 if name == "two targets" else 1)) + 0.5
    targets = (targets + 0.3 * rng.standard_normal(targets.shape)).astype(np.float32)
    fitted = {
        "linear": LinearRegression(),
        "two targets": LinearRegression(),
        "pipeline": make_pipeline(StandardScaler(), LinearRegression()),
        "network": MLPRegressor(hidden_layer_sizes=(8,), alpha=0, max_iter=300, random_state=0),
    }[name].fit(x, targets if targets.shape[1] > 1 else targets[:, 0])
    model = skl2onnx.to_onnx(fitted, x[:1])
    data = {"X": x, "targets": targets}
    session = TrainingSession(
        build_training_model(model, loss="MeanSquaredError", optimizer=Adam(0.05))
    )
    best = float(((fitted.predict(x).reshape(targets.shape) - targets) ** 2).mean())
    assert session.evaluate(data)["loss"] == pytest.approx(best, rel=1e-3)
    for parameter in check(model).parameters:
        array = session.state[parameter]
        session.state[parameter] = 0.3 * rng.standard_normal(array.shape)
    assert session.evaluate(data)["loss"] > 2 * best
    session.fit(data, epochs=150, batch_size=80, progress=False)
    after = session.evaluate(data, metrics="mean_absolute_error")
    assert after["loss"] < 1.1 * best
    (y,) = run(session.inference_model(original=model), {"X": x})
    assert after["loss"] == pytest.approx(((y - targets) ** 2).mean(), rel=1e-4)
    assert after["mean_absolute_error"] == pytest.approx(abs(y - targets).mean(), rel=1e-4)


@pytest.mark.sklearn
def test_a_support_vector_machine_has_scores() -> None:
    import skl2onnx
    from sklearn.svm import LinearSVC

    x, labels = blobs(3)
    model = skl2onnx.to_onnx(LinearSVC().fit(x, labels), x[:1])
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=Adam(0.05))
    )
    data = {"X": x, "labels": labels}
    z = run(model, {"X": x})[1].astype(np.float64)
    expected = (np.log(np.exp(z).sum(axis=1)) - z[np.arange(len(z)), labels]).mean()
    assert session.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-5)
    session.fit(data, epochs=20, progress=False)
    predicted = run(session.inference_model(original=model), {"X": x})[0]
    found = session.evaluate(data, metrics="accuracy")["accuracy"]
    assert found == (predicted == labels).mean() > 0.8
    two = skl2onnx.to_onnx(LinearSVC().fit(x, labels > 1), x[:1])
    with pytest.raises(ModelError, match="has only one class, whose probability is always 1"):
        build_training_model(two, loss="SoftmaxCrossEntropy", optimizer="SGD")


# --------------------------------------------------------------------------------------- torch


def exported(module: Any, arguments: tuple[Any, ...], *, dynamo: bool) -> onnx.ModelProto:
    """Returns what one of torch's exporters writes of a module, with a free batch."""
    import torch

    module.eval()
    names = [f"input{number}" for number in range(len(arguments))]
    settings: dict[str, Any] = {"input_names": names, "dynamo": dynamo}
    if dynamo:
        batch = torch.export.Dim("batch")
        settings["dynamic_shapes"] = tuple({0: batch} for _ in names)
    else:
        settings["dynamic_axes"] = {name: {0: "batch"} for name in names}
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        made = torch.onnx.export(module, arguments, file, **settings)
    return made.model_proto if dynamo else onnx.load_from_string(file.getvalue())


def transformer(kind: str, **settings: Any) -> Any:
    """Returns a small model of random weights, of which no two are alike."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    small |= {"num_hidden_layers": 2, "num_labels": 3}
    model = getattr(transformers, kind)
    config = model.config_class(**(small | settings), attn_implementation="eager")
    made = model(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return made


def logits_of(model: Any) -> Any:
    import torch
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Any) -> Any:
            if x.is_floating_point():
                return self.net(x).logits
            return self.net(x, attention_mask=torch.ones_like(x)).logits

    return Logits()


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_scope_takes_whole_layers_of_a_text_classifier(dynamo: bool) -> None:
    import torch

    bert = transformer("BertForSequenceClassification", vocab_size=30, max_position_embeddings=8)
    module = logits_of(bert)
    ids = torch.randint(0, 30, (3, 7))
    model = exported(module, (ids,), dynamo=dynamo)
    labels = np.array([0, 2, 1])

    loss = torch.nn.functional.cross_entropy(module(ids), torch.from_numpy(labels))
    loss.backward()
    layer = {n: p for n, p in bert.named_parameters() if ".encoder.layer.1." in n}
    assert len(layer) == 16

    session = TrainingSession(
        build_training_model(
            model, loss="SoftmaxCrossEntropy", optimizer=SGD(1.0), trainable=["*encoder.layer.1.*"]
        )
    )
    found = session.step({"input0": ids.numpy(), "labels": labels})["loss"]
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
    trained = session.inference_model(original=model)
    before, after = arrays_of(model), arrays_of(trained)
    parameters = check(model, trainable=["*encoder.layer.1.*"]).parameters
    assert changed(model, trained) <= parameters.keys()
    expected = [p.grad.numpy() for p in layer.values()]
    for name in parameters:
        move = before[name] - after[name]
        places = [
            place
            for place, g in enumerate(expected)
            for h in (g, g.T)
            if h.shape == move.shape and abs(move - h).max() < 1e-3 * abs(h).max() + 1e-6
        ]
        assert places, name
        del expected[places[0]]
    assert not expected


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_language_model_skips_labels(dynamo: bool, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    gpt = transformer("GPT2LMHeadModel", vocab_size=30, n_positions=8, n_embd=16, use_cache=False)
    module = logits_of(gpt)
    ids = torch.randint(0, 30, (4, 7))
    model = exported(module, (ids,), dynamo=dynamo)
    session = TrainingSession(
        build_training_model(
            model,
            loss=losses.SoftmaxCrossEntropy(axis=-1, ignore_index=-100),
            optimizer=Adam(1e-2),
        )
    )
    assert any("is a transposed copy of" in message for message in caplog.messages)  # as exported
    labels = torch.where(torch.arange(7) > 4, -100, ids)
    data = {"input0": ids.numpy(), "labels": labels.numpy()}
    with torch.no_grad():
        z = module(ids)
        expected = torch.nn.functional.cross_entropy(z.reshape(-1, 30), labels.reshape(-1))
    found = session.evaluate(data, metrics="accuracy", batch_size=3)
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    right = (z.argmax(-1) == labels)[labels != -100].double().mean()
    assert found["accuracy"] == pytest.approx(float(right))
    session.fit(data, epochs=40, progress=False)
    after = session.evaluate(data, metrics="accuracy")
    z = run(session.inference_model(original=model), {"input0": ids.numpy()})[0]
    counted = labels.numpy() != -100
    assert after["accuracy"] == (z.argmax(-1) == ids.numpy())[counted].mean() > 0.9


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_an_image_classifier_trains_its_token_and_positions(dynamo: bool) -> None:
    import torch

    vit = transformer("ViTForImageClassification", image_size=16, patch_size=8)
    x = torch.randn(3, 3, 16, 16)
    model = exported(logits_of(vit), (x,), dynamo=dynamo)
    report = check(model)
    counted = sum(p.numel() for p in vit.parameters())
    assert report.parameter_count == counted
    for name in ("cls_token", "position_embeddings", "patch_embeddings.projection.weight"):
        assert any(parameter.endswith(name) for parameter in report.parameters)
    assert not report.problems


def convolutions(folded: bool) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    features = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3)]
    if folded:
        features[1:3] = [nn.BatchNorm2d(6), nn.ReLU()]
    net = nn.Sequential()
    net.features = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net.classifier = nn.Linear(6, 3)
    with torch.no_grad():
        for module in net.features:
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return net


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("mode", ["auto", "train", "frozen"])
@pytest.mark.parametrize("named", [None, "classifier.*"])
@pytest.mark.parametrize("dynamo", [False, True])
def test_batch_normalization_as_in_torch(mode: Any, named: str | None, dynamo: bool) -> None:
    import torch

    net = convolutions(folded=False)
    x, labels = torch.randn(5, 3, 8, 8), torch.tensor([0, 2, 1, 1, 0])
    model = exported(net, (x,), dynamo=dynamo)
    assert any(node.op_type == "BatchNormalization" for node in model.graph.node)
    session = TrainingSession(
        build_training_model(
            model,
            loss="SoftmaxCrossEntropy",
            optimizer=SGD(0.1),
            trainable=None if named is None else [named],
            batch_normalization=mode,
        )
    )
    learns = mode == "train" or (mode == "auto" and named is None)
    net.train(learns)
    for parameter in net.features.parameters():
        parameter.requires_grad = named is None
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    loss = torch.nn.functional.cross_entropy(net(x), labels)
    loss.backward()
    optimizer.step()
    found = session.step({"input0": x.numpy(), "labels": labels.numpy()})["loss"]
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-5)
    arrays = arrays_of(session.inference_model(original=model))
    assert all(f"features.2.{name}" in arrays for name in ("running_mean", "running_var"))
    for name, value in net.state_dict().items():
        if name == "features.2.running_var" and learns:  # ONNX takes the biased variance
            old, n = arrays_of(model)[name], 5 * 8 * 8
            value = 0.9 * old + (value.numpy() - 0.9 * old) * (n - 1) / n
        if name in arrays:
            np.testing.assert_allclose(arrays[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_folded_normalization_leaves_weights(dynamo: bool) -> None:
    import torch

    net = convolutions(folded=True)
    model = exported(net, (torch.randn(2, 3, 8, 8),), dynamo=dynamo)
    assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)
    report = check(model)
    shapes = sorted(kind for kind in report.parameters.values())
    expected = [
        "FLOAT[3,6]",
        "FLOAT[3]",
        "FLOAT[6,3,3,3]",
        "FLOAT[6,6,3,3]",
        "FLOAT[6]",
        "FLOAT[6]",
    ]
    assert shapes == sorted(expected)
    head = check(model, trainable=["classifier.*"])
    assert sorted(head.parameters) == ["classifier.bias", "classifier.weight"]


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_the_first_state_of_an_lstm_is_no_weight(dynamo: bool) -> None:
    import torch
    from torch import nn

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.recurrent = nn.LSTM(8, 6, batch_first=True)
            self.head = nn.Linear(6, 4)

        def forward(self, x: Any) -> Any:
            return torch.softmax(self.head(self.recurrent(self.embedding(x))[0][:, -1]), -1)

    torch.manual_seed(0)
    words = Words()
    model = exported(words, (torch.randint(0, 20, (3, 5)),), dynamo=dynamo)
    report = check(model)
    assert report.parameter_count == sum(p.numel() for p in words.parameters())
    assert report.loss == "SoftmaxCrossEntropy"
    head = check(model, trainable=["head.*"])
    assert sorted(head.parameters) == ["head.bias", "head.weight"]
    whole = check(model, trainable=["*recurrent*"])
    assert len(whole.parameters) == 3


# ------------------------------------------------------- half precision, and rounding to integers


@pytest.fixture(scope="module")
def stripes() -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A classifier of images as a person's own would be, and images of two kinds."""
    rng = np.random.default_rng(2)
    with ortops.Tape(name="stripes") as tape:
        x = tape.input("x", np.float32, ["batch", 1, 8, 8])
        kernel = rng.standard_normal((6, 1, 3, 3)).astype(np.float32) * 0.5
        bias = rng.standard_normal(6).astype(np.float32) * 0.1
        h = ortops.op.Conv(
            x, tape.initializer("conv.w", kernel), tape.initializer("conv.b", bias), pads=[1] * 4
        )
        h = ortops.op.ReduceMean(ortops.op.Relu(h), [2, 3], keepdims=0)
        h = h @ tape.initializer("head.w", rng.standard_normal((6, 2)).astype(np.float32))
        h = h + tape.initializer("head.b", np.array([0.1, -0.1], np.float32))
        tape.output(ortops.op.Softmax(h, axis=-1), "y")
    labels = np.arange(64) % 2
    images = rng.standard_normal((64, 1, 8, 8)).astype(np.float32) * 0.3
    images[labels == 1, :, :, ::2] += 1
    images[labels == 0, :, ::2] += 1
    return tape.model(), {"x": images, "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_half_precision(
    keeps: bool, stripes: tuple[onnx.ModelProto, dict[str, Array]], tmp_path: Path
) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model, data = stripes
    half = convert_float_to_float16(model, keep_io_types=keeps)
    kind = np.float32 if keeps else np.float16
    data = {"x": data["x"].astype(kind), "labels": data["labels"]}
    report = check(half)
    assert set(report.parameters) == {"conv.w", "conv.b", "head.w", "head.b"}
    assert report.loss == "SoftmaxCrossEntropy"
    session = TrainingSession(
        build_training_model(half, loss="SoftmaxCrossEntropy", optimizer=SGD(0.5))
    )
    (p,) = run(half, {"x": data["x"]})
    expected = negative_log_likelihood(p, data["labels"])
    assert session.evaluate(data)["loss"] == pytest.approx(expected, rel=3e-3)
    session.fit(data, epochs=25, batch_size=16, progress=False)
    session.save(tmp_path / "trained.onnx")
    found = session.evaluate(data, metrics="accuracy")
    (p,) = run(tmp_path / "trained.onnx", {"x": data["x"]})
    assert p.dtype == kind
    assert found["accuracy"] == (p.argmax(axis=1) == data["labels"]).mean() > 0.9
    assert found["loss"] == pytest.approx(negative_log_likelihood(p, data["labels"]), rel=1e-2)
    trained = arrays_of(session.inference_model(original=half))
    assert {trained[name].dtype.name for name in report.parameters} == {"float16"}
    assert (
        trained["conv.w"].tobytes() == session.state["conv.w.master"].astype(np.float16).tobytes()
    )
    adam = TrainingSession(
        build_training_model(half, loss="SoftmaxCrossEntropy", optimizer=Adam(0.05))
    )
    history = adam.fit(data, epochs=10, batch_size=16, progress=False)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


def quantized(model: onnx.ModelProto, data: dict[str, Array], kind: str, folder: Path) -> Any:
    """Returns what onnxruntime's tools make of a model."""
    from onnxruntime import quantization

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = iter([{"x": data["x"][:8]}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    before, after = folder / "before.onnx", folder / "after.onnx"
    onnx.save(model, before)
    if kind == "dynamic":
        quantization.quantize_dynamic(before, after, op_types_to_quantize=["MatMul"])
    else:
        formats = quantization.QuantFormat
        quantization.quantize_static(
            before,
            after,
            Reader(),
            quant_format=formats.QOperator if kind == "operators" else formats.QDQ,
            per_channel=kind == "by channel",
            extra_options={
                "QuantizeBias": kind != "float bias",
                "AddQDQPairToWeight": kind == "float weight",
            },
        )
    return onnx.load(after)


QUANTIZED: dict[str, tuple[set[str], int]] = {
    "float bias": ({"conv.b"}, 3),
    "float weight": ({"conv.w", "head.w", "head.b"}, 1),
    "dynamic": ({"conv.w", "conv.b", "head.b"}, 1),
    "integers": (set(), 4),
    "by channel": (set(), 4),
    "operators": (set(), 2),
}
"""What is left to train of a model, and how many weights are not."""


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_stay(
    kind: str,
    stripes: tuple[onnx.ModelProto, dict[str, Array]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, data = stripes
    rounded = quantized(model, data, kind, tmp_path)
    left, count = QUANTIZED[kind]
    report = check(rounded)
    assert len(report.quantized) == count
    assert set(report.parameters) == left
    if not left:
        with pytest.raises(ModelError, match="the model's weights are all quantized, such as"):
            build_training_model(rounded, loss="SoftmaxCrossEntropy", optimizer="Adam")
        return
    session = TrainingSession(
        build_training_model(rounded, loss="SoftmaxCrossEntropy", optimizer=Adam(0.02))
    )
    assert any(
        m.startswith(f"quantized weights are not trained ({count},") for m in caplog.messages
    )
    assert any("the logits before Softmax node" in message for message in caplog.messages)
    (p,) = run(rounded, {"x": data["x"]})
    expected = negative_log_likelihood(p, data["labels"])
    assert session.evaluate(data)["loss"] == pytest.approx(expected, rel=3e-2)
    session.fit(data, epochs=5, progress=False)
    trained = session.inference_model(original=rounded)
    assert changed(rounded, trained) == left
    (p,) = run(trained, {"x": data["x"]})
    assert negative_log_likelihood(p, data["labels"]) < expected


# ---------------------------------------------------------------- several outputs, and other inputs


def detector() -> onnx.ModelProto:
    """A model as torch's exporter of old wrote it: two heads on one body, one without a Softmax."""
    rng = np.random.default_rng(4)

    def matrix(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32) * 0.4

    with ortops.Tape(name="detector") as tape:
        x = tape.input("x", np.float32, ["batch", "places", 5])
        h = ortops.op.Relu(x @ tape.initializer("body.w", matrix(5, 8)))
        classes = h @ tape.initializer("classes.w", matrix(8, 3))
        classes.value.name = "scores"
        tape.output(ortops.op.Softmax(classes, axis=-1), "classes")
        tape.output(h @ tape.initializer("boxes.w", matrix(8, 4)), "boxes")
    return tape.model()


def test_a_weighted_sum_of_losses() -> None:
    model = detector()
    rng = np.random.default_rng(5)
    data = {
        "x": rng.standard_normal((10, 6, 5)).astype(np.float32),
        "labels": rng.integers(0, 3, (10, 6)),
        "boxes_wanted": rng.standard_normal((10, 6, 4)).astype(np.float32),
    }
    data["labels"][:, 4:] = -1
    session = TrainingSession(
        build_training_model(
            model,
            loss=0.7 * losses.SoftmaxCrossEntropy("classes", ignore_index=-1)
            + 0.3 * losses.L1("boxes", target="boxes_wanted"),
            optimizer=Adam(0.02),
        )
    )

    def measured(of: onnx.ModelProto) -> tuple[float, float, float]:
        p, boxes = run(of, {"x": data["x"]})
        counted = data["labels"] >= 0
        likelihood = np.take_along_axis(p, np.maximum(data["labels"], 0)[..., None], -1)[..., 0]
        right = p.argmax(axis=-1) == data["labels"]
        distance = abs(boxes - data["boxes_wanted"]).mean()
        return -np.log(likelihood[counted]).mean(), distance, right[counted].mean()

    for trained in (False, True):
        if trained:
            history = session.fit(data, epochs=20, progress=False)
            assert {"loss", "loss_classes", "loss_boxes"} <= history[0].keys()
        found = session.evaluate(data, metrics="accuracy", batch_size=4)
        entropy, distance, right = measured(session.inference_model(original=model))
        assert found["loss_classes"] == pytest.approx(entropy, rel=1e-5)
        assert found["loss_boxes"] == pytest.approx(distance, rel=1e-5)
        assert found["loss"] == pytest.approx(0.7 * entropy + 0.3 * distance, rel=1e-5)
        assert found["accuracy"] == pytest.approx(right)


def test_a_mask_for_a_loss_of_ones_own() -> None:
    model = detector()

    def masked(boxes: Any, targets: Any, mask: Any) -> Any:
        squared = ortops.op.ReduceSum((boxes - targets) ** 2, [-1], keepdims=0)
        return (squared * mask).sum(), mask.sum()

    session = TrainingSession(
        build_training_model(
            model,
            loss=masked,
            optimizer=SGD(0.1),
            inputs={"mask": (np.float32, ["batch", "places"])},
        )
    )
    rng = np.random.default_rng(5)
    data = {
        "x": rng.standard_normal((10, 6, 5)).astype(np.float32),
        "targets": rng.standard_normal((10, 6, 4)).astype(np.float32),
        "mask": (rng.random((10, 6)) < np.linspace(0.1, 1, 10)[:, None]).astype(np.float32),
    }
    boxes = run(model, {"x": data["x"]})[1]
    distance = ((boxes - data["targets"]) ** 2).sum(axis=-1)
    expected = (distance * data["mask"]).sum() / data["mask"].sum()
    for batch_size in (10, 3):
        found = session.evaluate(data, batch_size=batch_size, metrics="mean_absolute_error")
        assert found["loss"] == pytest.approx(expected, rel=1e-5)
        assert found["mean_absolute_error"] == pytest.approx(
            abs(boxes - data["targets"]).mean(), rel=1e-5
        )
    assert check(
        model, loss=masked, inputs={"mask": (np.float32, ["batch", "places"])}
    ).reasons == {"classes.w": "has no effect on the loss"}


def test_the_default_of_two_outputs_is_the_first() -> None:
    model = detector()
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 6, 5)).astype(np.float32)
    labels = rng.integers(0, 3, (4, 6))
    p = run(model, {"x": x})[0].reshape(-1, 3)
    expected = negative_log_likelihood(p, labels.reshape(-1))
    assert float(session.step({"x": x, "labels": labels})["loss"]) == pytest.approx(expected)


# ---------------------------------------------------------------------------- what check tells


@pytest.mark.slow
@pytest.mark.fetched(CLASSIFIER)
def test_copies_for_training_are_no_readers() -> None:
    report = check(CLASSIFIER, loss="SoftmaxCrossEntropy")
    assert {len(nodes) for nodes in report.readers.values()} == {1}
    assert "read by" not in str(report)


@pytest.mark.sklearn
def test_maps_are_told_by_what_they_hold() -> None:
    import skl2onnx

    x, labels = blobs(2)
    model = skl2onnx.to_onnx(estimator("descent").fit(x, labels), x[:1])
    report = check(model)
    what = report.outputs["output_probability"]
    assert what.startswith("maps from 'probabilities', FLOAT[")
    assert what.endswith("probabilities from Concat node 'Concat' of 'score'")
    assert report.loss == "SoftmaxCrossEntropy"
    one = skl2onnx.to_onnx(estimator("logistic").fit(x, labels), x[:1])
    assert check(one).loss == "SoftmaxCrossEntropy"


@pytest.mark.torch
def test_a_pattern_that_takes_a_merged_weight_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The older exporter writes equal tensors once."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU()) for _ in range(2)]
    for block in blocks:
        nn.init.constant_(block[1].weight, 0.9)
        nn.init.constant_(block[1].bias, 0.1)
    net = nn.Sequential(*blocks, nn.Linear(6, 2))
    model = exported(net, (torch.randn(3, 6),), dynamo=False)
    session = TrainingSession(
        build_training_model(
            model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.1), trainable=["1.*"]
        )
    )
    trained = set(check(model, trainable=["1.*"]).parameters)
    said = [
        m for m in caplog.messages if "which is also read by nodes elsewhere (1, such as '0." in m
    ]
    shared = {m.split("includes '")[1].split("'")[0] for m in said}
    assert len(shared) == 2  # the scale and the bias of both normalizations
    assert shared < trained
    assert len(trained) == 4
    assert not any("and not others of the same layers" in m for m in caplog.messages)
    batch = {"input0": np.ones((2, 6), np.float32), "labels": np.array([0, 1])}
    session.step(batch)
    assert changed(model, session.inference_model(original=model)) <= trained


def test_rows_that_are_opposite_stay_so(caplog: pytest.LogCaptureFixture) -> None:
    """Two scores of a Sigmoid, as skl2onnx writes two classes: their shares go on adding up."""
    rng = np.random.default_rng(8)
    w = rng.standard_normal((1, 4)).astype(np.float32)
    x, labels = rng.standard_normal((20, 4)).astype(np.float32), np.arange(20) % 2

    def model(second: float) -> onnx.ModelProto:
        with ortops.Tape() as tape:
            given = tape.input("x", np.float32, ["N", 4])
            matrix = tape.initializer("w", np.concatenate([-w, second * w]))
            bias = tape.initializer("b", np.array([0.25, -0.25], np.float32))
            tape.output(ortops.op.Sigmoid(ortops.op.Gemm(given, matrix, bias, transB=1)), "y")
        return tape.model()

    session = TrainingSession(
        build_training_model(model(1.0), loss="SoftmaxCrossEntropy", optimizer=AdamW(0.1))
    )
    z = (x @ w.T)[:, 0].astype(np.float64) - 0.25
    expected = softplus(np.where(labels == 1, -z, z)).mean()
    data = {"x": x, "labels": labels}
    assert float(session.step(data)["loss"]) == pytest.approx(expected, rel=1e-5)
    session.fit(data, epochs=5, progress=False)
    (p,) = run(session.inference_model(), {"x": x})
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-5)
    found = session.evaluate(data)["loss"]
    assert found == pytest.approx(negative_log_likelihood(p, labels), rel=1e-5)
    assert any(
        "reads the logarithms of the probabilities 'y', computed" in m for m in caplog.messages
    )

    # Sigmoids of scores that have nothing to do with each other are read by their logits.
    trainable = build_training_model(model(0.5), loss="SoftmaxCrossEntropy", optimizer="SGD")
    z = x.astype(np.float64) @ np.concatenate([-w, 0.5 * w]).T + [0.25, -0.25]
    expected = (np.log(np.exp(z).sum(axis=1)) - z[np.arange(20), labels]).mean()
    found = TrainingSession(trainable).step(data)["loss"]
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_shares_of_one_score_learn_from_any_weights() -> None:
    """1 − p is zero in float32 beyond a score of 17, and still has a gradient."""
    with ortops.Tape() as tape:
        z = tape.input("x", np.float32, ["N", 1]) @ tape.initializer("w", np.float32([[100]]))
        p = ortops.op.Sigmoid(z)
        tape.output(ortops.op.Reshape(ortops.op.Concat(1.0 - p, p, axis=1), [-1, 2]), "y")
    session = TrainingSession(
        build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer=SGD(1.0))
    )
    batch = {"x": np.ones((2, 1), np.float32), "labels": np.array([0, 0])}
    assert float(session.step(batch)["loss"]) == pytest.approx(100)
    np.testing.assert_allclose(session.state["w"], [[99]])


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_angles_of_a_rotary_embedding_are_no_weights(dynamo: bool) -> None:
    """For a fixed length, the newer exporter writes tables of cosines and sines."""
    import torch

    llama = transformer(
        "LlamaForCausalLM",
        vocab_size=30,
        max_position_embeddings=8,
        num_key_value_heads=1,
        use_cache=False,
    )
    model = exported(logits_of(llama), (torch.randint(0, 30, (2, 7)),), dynamo=dynamo)
    report = check(model, loss=losses.SoftmaxCrossEntropy(axis=-1))
    assert report.parameter_count == sum(p.numel() for p in llama.parameters())
    told = [
        reason for reason in report.reasons.values() if "of a rotary embedding, in Mul" in reason
    ]
    assert len(told) == (2 if dynamo else 1)
    assert not report.problems


def test_factors_of_two_branches_are_weights() -> None:
    """Their squares may sum to the same everywhere, as those of new scales do."""
    with ortops.Tape() as tape:
        x = tape.input("x", np.float32, ["N", 3])
        one = ortops.op.Tanh(x) * tape.initializer("one", np.ones(3, np.float32))
        two = ortops.op.Sin(x) * tape.initializer("two", np.ones(3, np.float32))
        tape.output(one + two, "y")
    assert set(check(tape.model()).parameters) == {"one", "two"}


@pytest.mark.sklearn
def test_a_classifier_of_scikit_learn_as_a_teacher() -> None:
    """Its probabilities are the softmax of what the loss reads of it."""
    import skl2onnx

    x, labels = blobs(2)
    with ortops.Tape() as tape:
        given = tape.input("X", np.float32, ["N", 4])
        tape.output(given @ tape.initializer("w", np.eye(4, 2, dtype=np.float32)), "y")
    model = tape.model()

    def taught(by: Any) -> TrainingSession:
        loss = losses.Distillation(model=skl2onnx.to_onnx(by, x[:1]), temperature=1.0)
        return TrainingSession(build_training_model(model, loss=loss, optimizer="SGD"))

    fitted = estimator("descent").fit(x, labels)
    p = fitted.predict_proba(x).astype(np.float64)
    z = x[:, :2].astype(np.float64)
    q = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    expected = (p * (np.log(p) - q)).sum(axis=1).mean()
    assert taught(fitted).evaluate({"X": x})["loss"] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(
        ModelError, match="probabilities' holds probabilities, and no tensor before"
    ):
        taught(estimator("logistic").fit(x, labels))
