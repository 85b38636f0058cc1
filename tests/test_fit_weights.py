"""Weights of rows and classes in fit, evaluate and metrics, next to scikit-learn and PyTorch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest

from models.mlp import mlp
from ortops import ArgumentError, FeedError, TrainingSession, build_training_model, metrics
from ortops.losses import BinaryCrossEntropyWithLogits, Focal, MeanSquaredError, SoftmaxCrossEntropy
from ortops.optimizers import SGD, Adam

ROWS = 22


def rows(count: int = ROWS, seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {
        "images": draw.standard_normal((count, 4), np.float32),
        "labels": draw.integers(0, 3, count),
    }


def weights(count: int = ROWS, seed: int = 1) -> Any:
    return np.random.default_rng(seed).choice([0.0, 0.5, 1.0, 3.0], count)


def session(loss: Any = None, optimizer: Any = None, **options: Any) -> TrainingSession:
    loss = SoftmaxCrossEntropy(sample_weight="w") if loss is None else loss
    model = build_training_model(
        mlp((4, 8, 3)), loss=loss, optimizer=optimizer or SGD(0.1), **options
    )
    return TrainingSession(model)


def same(one: TrainingSession, other: TrainingSession, rtol: float = 1e-6) -> None:
    assert one.state.keys() == other.state.keys()
    for name, array in one.state.items():
        np.testing.assert_allclose(array, other.state[name], rtol=rtol, atol=1e-7)


def in_every_form(data: dict[str, Any]) -> dict[str, Any]:
    class Samples:
        def __len__(self) -> int:
            return len(data["labels"])

        def __getitem__(self, place: int) -> dict[str, Any]:
            return {name: array[place] for name, array in data.items()}

    return {"dict": data, "tuple": tuple(data.values()), "samples": Samples()}


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["dict", "tuple", "samples"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_beside_the_data(form: str, accumulate: int) -> None:
    """They are those of the rows, in whatever order these come; batches of 5, and a last of 2."""
    call: dict[str, Any] = {"epochs": 2, "batch_size": 5, "accumulate": accumulate, "seed": 3}
    data, w = rows(), weights()
    one, other = session(), session()
    found = one.fit(in_every_form(data)[form], sample_weight=w, progress=False, **call)
    wanted = other.fit({**data, "w": w}, progress=False, **call)
    assert [each["loss"] for each in found] == [each["loss"] for each in wanted]
    same(one, other)


@pytest.mark.torch
def test_a_step_next_to_torch() -> None:
    import torch

    data, w = rows(), weights()
    made = session()
    x, y = torch.tensor(data["images"]), torch.tensor(data["labels"])
    names = [name for name in made.state if made.state[name].ndim in (1, 2)]
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in layers.parameters():
            (name,) = [
                n
                for n in names
                if sorted(made.state[n].shape) == sorted(parameter.shape)
                and (parameter.ndim == 2 or len(made.state[n]) == len(parameter))
            ]
            array = made.state[name]
            parameter.copy_(torch.tensor(array if array.shape == parameter.shape else array.T))
    factors = torch.tensor(w * np.array([1.0, 4.0, 0.5])[data["labels"]])
    losses = torch.nn.functional.cross_entropy(layers(x).double(), y, reduction="none")
    wanted = (losses * factors).sum() / factors.sum()
    history = made.fit(
        data, sample_weight=w, class_weight={1: 4.0, 2: 0.5}, batch_size=ROWS, progress=False
    )
    assert history[-1]["loss"] == pytest.approx(wanted.item(), rel=1e-5)


def test_parts_add_up() -> None:
    """The loss of an epoch, and that of evaluate, do not depend on the size of batches."""
    data, w = rows(), weights()
    made = session(optimizer=SGD(0.0))
    whole = made.evaluate(data, sample_weight=w, batch_size=ROWS, metrics=["accuracy", "f1"])
    for size in (1, 5, 7):
        found = made.evaluate(data, sample_weight=w, batch_size=size, metrics=["accuracy", "f1"])
        assert found == pytest.approx(whole, rel=1e-5)
        epoch = made.fit(data, sample_weight=w, batch_size=size, progress=False)[-1]
        assert epoch["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    repeated = {name: np.repeat(array, (2 * w).astype(int), 0) for name, array in data.items()}
    assert made.evaluate(repeated, metrics=["accuracy", "f1"]) == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
def test_classes() -> None:
    data = rows()
    table = np.array([2.0, 1.0, 0.25])
    one, other, third = session(), session(), session()
    call: dict[str, Any] = {"epochs": 2, "batch_size": 5, "progress": False}
    one.fit(data, class_weight={0: 2.0, 2: 0.25}, **call)
    other.fit(data, sample_weight=table[data["labels"]], **call)
    third.fit(data, class_weight=table.tolist(), **call)
    same(one, other)
    same(one, third)
    batches = [{name: array[at : at + 5] for name, array in data.items()} for at in (0, 5, 10)]
    one, other = session(), session()
    one.fit(batches, class_weight={0: 2.0, 2: 0.25}, epochs=2, progress=False)
    weighed = [{**each, "w": table[each["labels"]]} for each in batches]
    other.fit(weighed, epochs=2, progress=False)
    same(one, other)


@pytest.mark.sklearn
def test_balanced_classes() -> None:
    from sklearn.utils.class_weight import compute_sample_weight

    data = rows()
    data["labels"][:12] = 0
    w = compute_sample_weight("balanced", data["labels"])
    one, other = session(), session()
    one.fit(data, class_weight="balanced", batch_size=5, progress=False)
    other.fit(data, sample_weight=w, batch_size=5, progress=False)
    same(one, other)
    found = one.evaluate(data, class_weight="balanced", metrics=["accuracy"])
    assert found == pytest.approx(one.evaluate(data, sample_weight=w, metrics=["accuracy"]))
    with pytest.raises(FeedError, match="'balanced' needs the classes 'labels' of all rows"):
        one.fit([data], class_weight="balanced", progress=False)


def test_classes_of_yes_and_no() -> None:
    model = mlp((4, 8, 1))
    data = rows()
    targets = (data["labels"] > 0).astype(np.float32)[:, None]
    made = build_training_model(
        model, loss=BinaryCrossEntropyWithLogits(sample_weight="w"), optimizer=SGD(0.1)
    )
    one, other = TrainingSession(made), TrainingSession(made)
    call: dict[str, Any] = {"batch_size": 5, "progress": False}
    one.fit({"images": data["images"], "targets": targets}, class_weight={1: 3.0}, **call)
    w = np.where(targets[:, 0] == 1, 3.0, 1.0)
    other.fit({"images": data["images"], "targets": targets}, sample_weight=w, **call)
    same(one, other)


def test_classes_of_a_loss_that_looks_at_the_end_of_the_model() -> None:
    """Focal of a model that ends in a Softmax compares with labels; of two weights, both count."""
    network = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 21]>
        g (float[n, 3] x) => (float[n, 3] p) <float[3] b = {0.0, 0.0, 0.0}> {
            z = Add(x, b)  p = Softmax(z) }"""
    )
    made = TrainingSession(build_training_model(network, loss=Focal(gamma=0.0), optimizer="SGD"))
    x, labels = np.log([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]), np.array([0, 2])
    data = {"x": x.astype(np.float32), "labels": labels}
    found = made.evaluate(data, class_weight={0: 3.0, 2: 0.5})["loss"]
    np.testing.assert_allclose(found, (3 * np.log(2) + 0.5 * np.log(8)) / 3.5, rtol=1e-6)


@pytest.mark.optional("pandas", "tables")
def test_a_column_of_the_data() -> None:
    import pandas

    data, w = rows(), weights()
    one, other = session(), session()
    one.fit({**data, "importance": w}, sample_weight="importance", progress=False)
    other.fit(data, sample_weight=w, progress=False)
    same(one, other)
    table = pandas.DataFrame({"labels": data["labels"], "importance": w})
    table["images"] = list(data["images"])
    third = session()
    third.fit(table, sample_weight="importance", progress=False)
    same(third, other)
    with pytest.raises(ArgumentError, match="no column 'importanc'; did you mean 'importance'"):
        one.fit({**data, "importance": w}, sample_weight="importanc", progress=False)


def test_validation() -> None:
    """Weights of validation data are their own; classes have weights in training only."""
    data, w = rows(), weights()
    later = rows(8, seed=5)
    made = session(optimizer=SGD(0.0))
    call: dict[str, Any] = {"progress": False, "metrics": ["accuracy"], "batch_size": 4}
    found = made.fit(data, sample_weight=w, class_weight={1: 9.0}, validation=later, **call)[-1]
    plain = made.evaluate(later, metrics=["accuracy"])
    assert found["validation_loss"] == pytest.approx(plain["loss"])
    assert found["validation_accuracy"] == pytest.approx(plain["accuracy"])
    own = {**later, "w": weights(8, seed=6)}
    found = made.fit(data, sample_weight=w, validation=own, **call)[-1]
    assert found["validation_loss"] == pytest.approx(made.evaluate(own)["loss"])
    found = made.fit(data, sample_weight=w, class_weight={1: 9.0}, validation_split=0.3, **call)[-1]
    last = {name: array[15:] for name, array in data.items()}
    wanted = made.evaluate(last, sample_weight=w[15:], metrics=["accuracy"])
    assert found["validation_loss"] == pytest.approx(wanted["loss"])
    assert found["validation_accuracy"] == pytest.approx(wanted["accuracy"])


def test_metrics_of_training() -> None:
    data, w = rows(), weights()
    made = session(optimizer=SGD(0.0))
    found = made.fit(
        data, sample_weight=w, metrics=["accuracy"], train_metrics=True, progress=False
    )[-1]
    wanted = made.evaluate(data, sample_weight=w, metrics=["accuracy"])
    assert found["accuracy"] == pytest.approx(wanted["accuracy"])


def test_resume(tmp_path: Any) -> None:
    data, w = rows(), weights()
    call: dict[str, Any] = {"epochs": 3, "batch_size": 5, "progress": False}
    call |= {"sample_weight": w, "class_weight": {2: 3.0}}
    whole = session(optimizer=Adam(0.01))
    whole.fit(data, **call)
    part = session(optimizer=Adam(0.01))
    part.fit(data, max_steps=7, **call)
    part.save(tmp_path / "part.onnx")
    again = TrainingSession(tmp_path / "part.onnx")
    again.fit(data, resume=True, **call)
    for name, array in whole.state.items():
        np.testing.assert_array_equal(array, again.state[name])


def test_rows_without_weights_have_weight_1(caplog: pytest.LogCaptureFixture) -> None:
    data = rows()
    one, other = session(), session()
    with caplog.at_level(logging.WARNING, "ortops"):
        one.fit(data, epochs=2, progress=False)
    said = [each.message for each in caplog.records if "weight 1" in each.message]
    (message,) = said
    assert message.startswith(
        "data: there is no 'w', so each row has weight 1; give sample_weight="
    )
    other.fit(data, sample_weight=np.ones(ROWS), epochs=2, progress=False)
    same(one, other)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_weight": np.ones(21)}, "must have the same length, got 'images' 22"),
        ({"sample_weight": -np.ones(ROWS)}, "must be finite and >= 0, got -1 for row 0"),
        ({"sample_weight": np.full(ROWS, np.nan)}, "must be finite and >= 0, got nan for row 0"),
        ({"sample_weight": 3.0}, "must be an array of numbers with a weight for each row, got 3.0"),
        ({"class_weight": {3: 1.0}}, "class_weight: classes must be from 0 to 2, got 3"),
        ({"class_weight": [1, 2, 3, 4]}, "class_weight: classes must be from 0 to 2, got 3"),
        ({"class_weight": {1: -1.0}}, r"class_weight\[1\] must be .*>= 0, got -1.0"),
        ({"class_weight": {"a": 1.0}}, "class_weight: a class must be .*, got 'a'"),
        ({"class_weight": "even"}, "must be weights by class or 'balanced', got 'even'"),
        (
            {"class_weight": 2.0},
            "must be a dict of weights by class, a list or 'balanced', got 2.0",
        ),
    ],
)
def test_wrong_weights(arguments: Any, message: str) -> None:
    made = session()
    before = made.state
    for method in (made.fit, made.evaluate):
        more: dict[str, Any] = {"progress": False} if method == made.fit else {}
        with pytest.raises((ArgumentError, FeedError), match=message):
            method(rows(), **arguments, **more)
    for name, array in before.items():
        np.testing.assert_array_equal(array, made.state[name])


def test_what_weights_do_not_fit() -> None:
    both = SoftmaxCrossEntropy(sample_weight="w") + MeanSquaredError(sample_weight="v")
    with pytest.raises(
        ArgumentError, match=r"one input .*, but the losses have 'w', 'v'; give the"
    ):
        session(both).fit(rows(), sample_weight=weights(), progress=False)
    with pytest.raises(FeedError, match="the data are batches; put the weights of each batch into"):
        session().fit([rows()], sample_weight=weights(), progress=False)


# -------------------------------------------------------------------------------------- metrics


def updated(metric: Any, outputs: Any, targets: Any, w: Any, size: int = 7) -> float:
    for at in range(0, len(targets), size):
        part = slice(at, at + size)
        metric.update(outputs[part], targets[part], sample_weight=w[part])
    return float(metric.result())


def classes(count: int = 40, size: int = 4) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(4)
    scores = draw.standard_normal((count, size))
    return scores, draw.integers(0, size, count), weights(count)


@pytest.mark.sklearn
def test_metrics_of_classes_next_to_sklearn() -> None:
    from sklearn import metrics as sk

    scores, labels, w = classes()
    answers = scores.argmax(1)
    exp = np.exp(scores)
    p = exp / exp.sum(1, keepdims=True)
    of: dict[str, Any] = {"sample_weight": w}
    assert updated(metrics.Accuracy(), scores, labels, w) == pytest.approx(
        sk.accuracy_score(labels, answers, **of)
    )
    assert updated(metrics.TopK(2), scores, labels, w) == pytest.approx(
        sk.top_k_accuracy_score(labels, scores, k=2, **of)
    )
    assert updated(metrics.Perplexity(), scores, labels, w) == pytest.approx(
        np.exp(sk.log_loss(labels, p, **of))
    )
    for average in ("macro", "weighted", "micro"):
        for metric, function in (
            (metrics.Precision, sk.precision_score),
            (metrics.Recall, sk.recall_score),
            (metrics.F1, sk.f1_score),
            (metrics.IoU, sk.jaccard_score),
        ):
            found = updated(metric(average=average), scores, labels, w)
            assert found == pytest.approx(function(labels, answers, average=average, **of))
    for average in ("macro", "weighted"):
        wanted = sk.roc_auc_score(labels, p, multi_class="ovr", average=average, **of)
        assert updated(metrics.AUC(average=average), scores, labels, w) == pytest.approx(wanted)


@pytest.mark.sklearn
def test_metrics_of_questions_next_to_sklearn() -> None:
    from sklearn import metrics as sk

    draw = np.random.default_rng(5)
    scores = draw.standard_normal((40, 3))
    targets = draw.integers(0, 2, (40, 3)).astype(np.float32)
    w = weights(40)
    of: dict[str, Any] = {"sample_weight": w}
    for average in ("macro", "weighted", "micro"):
        wanted = sk.f1_score(targets, scores > 0, average=average, **of)
        found = updated(metrics.F1(average=average), scores, targets, w)
        assert found == pytest.approx(wanted)
    for average in ("macro", "weighted"):
        wanted = sk.roc_auc_score(targets, scores, average=average, **of)
        assert updated(metrics.AUC(average=average), scores, targets, w) == pytest.approx(wanted)
    one = 1 / (1 + np.exp(-scores[:, 0]))
    bins = metrics.AUC(bins=4096, kind="probabilities")
    wanted = sk.roc_auc_score(targets[:, 0], one, **of)
    assert updated(bins, one, targets[:, 0], w) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.sklearn
def test_metrics_of_numbers_next_to_sklearn() -> None:
    from sklearn import metrics as sk

    draw = np.random.default_rng(6)
    targets = draw.standard_normal((40, 2))
    outputs = targets + 0.3 * draw.standard_normal((40, 2))
    w = weights(40)
    of: dict[str, Any] = {"sample_weight": w}
    for metric, function in (
        (metrics.MeanAbsoluteError(), sk.mean_absolute_error),
        (metrics.MeanSquaredError(), sk.mean_squared_error),
        (metrics.RootMeanSquaredError(), lambda t, y, **of: np.sqrt(np.mean((t - y) ** 2))),
        (metrics.R2(), sk.r2_score),
    ):
        if isinstance(metric, metrics.RootMeanSquaredError):
            wanted = np.sqrt(sk.mean_squared_error(targets, outputs, **of))
        else:
            wanted = function(targets, outputs, **of)
        assert updated(metric, outputs, targets, w) == pytest.approx(wanted)


@pytest.mark.sklearn
def test_functions_of_sklearn_get_the_weights() -> None:
    from sklearn import metrics as sk

    data, w = rows(), weights()
    made = session()
    scores = made.predict({"images": data["images"]}, outputs=next(iter(made.predict(data))))
    found = made.evaluate(
        data, sample_weight=w, metrics=[sk.balanced_accuracy_score, sk.log_loss], batch_size=5
    )
    wanted = sk.balanced_accuracy_score(data["labels"], scores.argmax(1), sample_weight=w)
    assert found["balanced_accuracy_score"] == pytest.approx(wanted)
    exp = np.exp(scores.astype(np.float64))
    p = exp / exp.sum(1, keepdims=True)
    wanted = sk.log_loss(data["labels"], p, sample_weight=w)
    assert found["log_loss"] == pytest.approx(wanted, rel=1e-5)


def test_metrics_without_weights_say_so(caplog: pytest.LogCaptureFixture) -> None:
    def largest(outputs: Any, targets: Any) -> float:
        return float(outputs.max())

    made = session()
    for _ in range(2):
        made.evaluate(rows(), sample_weight=weights(), metrics=[largest])
    said = [each.message for each in caplog.records if "largest" in each.message]
    assert said == [
        "data: metric 'largest' has no parameter sample_weight, so it does not weigh rows"
    ]


# ------------------------------------------------------------- what would be silently wrong


@pytest.mark.sklearn
def test_balanced_classes_count_the_rows_that_are_trained() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    data = rows()
    data["labels"][:12] = 0
    trained = data["labels"][:16]
    classes = np.unique(trained)
    table = compute_class_weight("balanced", classes=classes, y=trained)
    by_class = dict(zip(classes.tolist(), table.tolist(), strict=True))
    call: dict[str, Any] = {"batch_size": 5, "validation_split": 0.25, "progress": False}
    one, other = session(), session()
    one.fit(data, class_weight="balanced", **call)
    other.fit(data, class_weight=by_class, **call)
    same(one, other)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_weight": np.zeros(ROWS)}, "sample_weight must have a weight above 0, got only 0"),
        ({"sample_weight": np.full(ROWS, 1e300)}, r"has the weight 1e\+300, which float32 cannot"),
        ({"sample_weight": "labels"}, "'labels' is another input of the model or the loss"),
        ({"class_weight": {}}, "class_weight must have the weight of a class, got none"),
        ({"class_weight": [1, 2]}, "a weight for each of the 3 classes of 'labels', got 2"),
        ({"class_weight": [0, 0, 0]}, "class_weight must have a weight above 0, got only 0"),
    ],
)
def test_weights_that_mean_nothing(arguments: Any, message: str) -> None:
    made = session()
    with pytest.raises(ArgumentError, match=message):
        made.fit(rows(), progress=False, **arguments)
    with pytest.raises(ArgumentError, match=message):
        made.evaluate(rows(), **arguments)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["dict", "tuple", "samples"])
def test_weights_that_are_given_twice(form: str) -> None:
    data = in_every_form({**rows(), "w": weights().astype(np.float32)})[form]
    with pytest.raises(FeedError, match="the data have 'w', too; give sample_weight='w'"):
        session().fit(data, sample_weight=weights(), progress=False)


def test_classes_of_losses_without_classes() -> None:
    data = {"images": rows()["images"], "targets": np.ones((ROWS, 1), np.float32)}
    loss = MeanSquaredError(sample_weight="w")
    made = TrainingSession(build_training_model(mlp((4, 8, 1)), loss=loss, optimizer=SGD(0.1)))
    with pytest.raises(ArgumentError, match="class_weight needs a loss that compares with classes"):
        made.evaluate(data, class_weight={1: 50.0})


def test_classes_of_two_losses() -> None:
    loss = SoftmaxCrossEntropy(sample_weight="w") + SoftmaxCrossEntropy(
        target="others", sample_weight="w"
    )
    data = rows()
    with pytest.raises(ArgumentError, match="losses with different targets, 'labels', 'others'"):
        session(loss).evaluate({**data, "others": data["labels"]}, class_weight={1: 50.0})


def test_answers_that_are_no_classes() -> None:
    loss = BinaryCrossEntropyWithLogits(sample_weight="w")
    made = TrainingSession(build_training_model(mlp((4, 8, 1)), loss=loss, optimizer=SGD(0.1)))
    data = {"images": rows()["images"], "targets": np.full((ROWS, 1), 0.5, np.float32)}
    with pytest.raises(FeedError, match=r"class_weight: 'targets' must be 0 or 1, got 0\.5"):
        made.evaluate(data, class_weight={1: 50.0})


DRAW = np.random.default_rng(7)
SCORES, LABELS = DRAW.standard_normal((40, 4)), DRAW.integers(0, 4, 40)
ANSWERS = DRAW.integers(0, 2, (40, 3)).astype(np.float64)

REPEATED: list[tuple[Any, Any, Any]] = [
    (metrics.Accuracy(ignored=2), SCORES, LABELS),
    (metrics.Accuracy(), SCORES[:, :3], ANSWERS),
    (metrics.TopK(2), SCORES, LABELS),
    (metrics.Precision(average="weighted"), SCORES, LABELS),
    (metrics.F1(ignored=1), SCORES, LABELS),
    (metrics.F1(average="micro"), SCORES[:, :3], ANSWERS),
    (metrics.Recall(positive=0, average="binary"), SCORES[:, 0], ANSWERS[:, 0]),
    (metrics.IoU(), SCORES.argmax(axis=1), LABELS),
    (metrics.AUC(average="weighted"), SCORES, LABELS),
    (metrics.AUC(), SCORES[:, :3], ANSWERS),
    (metrics.AUC(bins=7), SCORES, LABELS),
    (metrics.MeanSquaredError(ignored=0), SCORES[:, :3], ANSWERS),
    (metrics.R2(), SCORES[:, :3], ANSWERS + SCORES[:, :3]),
    (metrics.Perplexity(), SCORES, LABELS),
]


@pytest.mark.parametrize("number", range(len(REPEATED)))
def test_a_row_of_weight_n_counts_as_n_rows(number: int) -> None:
    metric, outputs, targets = REPEATED[number]
    times = np.random.default_rng(number).integers(0, 4, 40)
    weighted, repeated = metric.begun("logits"), metric.begun("logits")
    for part in (slice(0, 7), slice(7, 40)):
        weighted.update(outputs[part], targets[part], sample_weight=times[part] / 8)
        repeated.update(outputs[part].repeat(times[part], 0), targets[part].repeat(times[part], 0))
    assert weighted.result() == pytest.approx(repeated.result(), rel=1e-12)
