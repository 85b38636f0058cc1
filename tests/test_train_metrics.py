"""`fit(train_metrics=True)`: metrics of the outputs of training steps, without a second pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import test_ctc_training as ctc
from test_distributed import fit_joined
from test_next_token import bigrams
from test_precision import half
from training_models import (
    Arrays,
    affine,
    affine_batch,
    assert_same_arrays,
    classifier,
    foreign,
    labelled,
    normalizing,
)

import ortops
from ortops import ArgumentError, OrtopsError, Tape, TrainingSession, build_training_model
from ortops.callbacks import Callback, CSVLog, EarlyStopping, JSONLines
from ortops.engine.training.position import POSITION_KEY
from ortops.losses import L1, NextToken, SoftmaxCrossEntropy
from ortops.metrics import AUC, Accuracy, StreamingMetric
from ortops.optimizers import SGD, Adam

ROWS, BATCH, BATCHES = 20, 6, 4
DATA = labelled((6,), rows=ROWS)


def arguments(**more: Any) -> dict[str, Any]:
    settings = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "progress": False}
    return {**settings, "metrics": ["accuracy"], "train_metrics": True, **more}


def build(model: onnx.ModelProto, loss: Any = "SoftmaxCrossEntropy", rate: float = 0.3) -> Any:
    return build_training_model(model, loss=loss, optimizer=SGD(rate))


def cut(data: Arrays, size: int = BATCH) -> list[Arrays]:
    return [{n: a[i : i + size] for n, a in data.items()} for i in range(0, ROWS, size)]


def shares(outputs: list[np.ndarray], batches: list[Arrays]) -> float:
    """The accuracy by hand."""
    hits = [o.argmax(1) == b["labels"] for o, b in zip(outputs, batches, strict=True)]
    return float(np.concatenate(hits).mean())


# --------------------------------------------------------------------------------- the numbers


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_outputs_before_each_step(accumulate: int, prefetch: int) -> None:
    data, plain = cut(DATA), TrainingSession(build(classifier()))
    wanted = []
    for _ in range(2):
        found = []
        for first in range(0, BATCHES, accumulate):
            parts = data[first : first + accumulate]
            found += [plain.predict({"x": part["x"]}, outputs="logits") for part in parts]
            plain.step({n: np.concatenate([p[n] for p in parts]) for n in parts[0]})
        wanted.append(shares(found, data))
    assert wanted[0] != wanted[1]
    session = TrainingSession(build(classifier()))
    history = session.fit(
        DATA, validation=DATA, **arguments(accumulate=accumulate, prefetch=prefetch)
    )
    assert history.history["accuracy"] == pytest.approx(wanted)
    measured = session.evaluate(DATA, batch_size=BATCH, metrics=["accuracy"])["accuracy"]
    assert history[-1]["validation_accuracy"] == measured


def test_dropout_is_active() -> None:
    data, plain = cut(DATA), TrainingSession(build(classifier(dropout=0.5)))
    outputs = [plain.step(batch)["logits_training"] for batch in data]
    session = TrainingSession(build(classifier(dropout=0.5)))
    history = session.fit(DATA, **arguments(epochs=1))
    assert history[0]["accuracy"] == pytest.approx(shares(outputs, data))
    assert_same_arrays(dict(session.state), dict(plain.state))


@pytest.mark.slow
def test_statistics_of_the_batch() -> None:
    rows = labelled((1, 4, 4), rows=ROWS)
    data, plain = cut(rows), TrainingSession(build(normalizing()))
    outputs = [plain.step(batch)["logits_training"] for batch in data]
    history = TrainingSession(build(normalizing())).fit(rows, **arguments(epochs=1))
    assert history[0]["accuracy"] == pytest.approx(shares(outputs, data))


def squashed() -> onnx.ModelProto:
    """A classifier whose output is not what the loss reads."""
    model = classifier()
    model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"]))
    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["batch", 3])
    )
    return model


def two_heads() -> onnx.ModelProto:
    with Tape(name="heads") as tape:
        x = tape.input("x", np.float32, ["batch", 6])
        rng = np.random.default_rng(0)
        w, v = (rng.normal(size=(6, n)).astype(np.float32) for n in (3, 2))
        tape.output(x @ tape.initializer("w", w), "classes")
        tape.output(x @ tape.initializer("v", v), "boxes")
    return tape.model()


def adapted() -> onnx.ModelProto:
    return ortops.lora.add(classifier(), rank=2)


MASKED = {**DATA, "labels": np.where(np.arange(ROWS) % 3, DATA["labels"], -1)}
BOXES = {**DATA, "targets": np.random.default_rng(3).normal(size=(ROWS, 2)).astype(np.float32)}
IDS = np.random.default_rng(5).integers(0, 5, (ROWS, 7))

CASES: dict[str, tuple[Callable[[], onnx.ModelProto], Any, Any, list[Any]]] = {
    "softmax at the end": (squashed, "SoftmaxCrossEntropy", DATA, ["accuracy", "f1", "auc"]),
    "probabilities": (squashed, "NegativeLogLikelihood", DATA, ["accuracy", "perplexity"]),
    "all kinds": (
        classifier,
        "SoftmaxCrossEntropy",
        DATA,
        ["accuracy", "f1", "recall", "iou", "perplexity", AUC(bins=50), ortops.metrics.TopK(2)],
    ),
    "ignored labels": (classifier, SoftmaxCrossEntropy(ignore_index=-1), MASKED, ["accuracy"]),
    "regression": (affine, "MeanSquaredError", affine_batch(ROWS), ["r2", "mae", "rmse"]),
    "adapter": (adapted, "SoftmaxCrossEntropy", DATA, ["accuracy"]),
    "several losses": (
        two_heads,
        0.5 * SoftmaxCrossEntropy("classes") + L1("boxes"),
        BOXES,
        ["accuracy", ortops.metrics.MeanAbsoluteError(output="boxes")],
    ),
    "another tensor": (
        two_heads,
        0.5 * SoftmaxCrossEntropy("classes") + L1("boxes"),
        BOXES,
        [ortops.metrics.MeanSquaredError(output="boxes", target="targets", name="spread")],
    ),
    "text": (
        bigrams,
        NextToken(),
        {"ids": IDS, "labels": IDS},
        ["accuracy", "perplexity"],
    ),
    "half": (lambda: half(classifier()), "SoftmaxCrossEntropy", DATA, ["accuracy"]),
    "bfloat16": (
        lambda: half(classifier(), onnx.TensorProto.BFLOAT16),
        "SoftmaxCrossEntropy",
        DATA,
        ["accuracy"],
    ),
}


def fitted(data: Arrays, model: onnx.ModelProto) -> Arrays:
    """The data with the names and types of the inputs."""
    given = dict(data)
    for value in model.graph.input:
        kind = value.type.tensor_type.elem_type
        if value.name not in given and "ids" in given:
            given[value.name] = given.pop("ids")
        elif value.name == "x" and kind != onnx.TensorProto.FLOAT:
            given["x"] = given["x"].astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    return given


@pytest.mark.nightly(7)
@pytest.mark.quick(1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2}, {"recompute": "sqrt"}], ids=str)
def test_without_an_update_they_are_those_of_evaluate(case: str, settings: Any) -> None:
    make, loss, data, metrics = CASES[case]
    model = make()
    data, recompute = fitted(data, model), settings.get("recompute")
    session = TrainingSession(build(model, loss, rate=0.0), recompute=recompute)
    measured = session.evaluate(data, batch_size=BATCH, metrics=metrics)
    more = {name: value for name, value in settings.items() if name != "recompute"}
    history = session.fit(data, **arguments(epochs=1, metrics=metrics, **more))
    names = [name for name in measured if not name.startswith("loss")]
    assert len(names) == len(metrics)
    for name in names:
        assert history[0][name] == pytest.approx(measured[name], rel=1e-5), name


@pytest.mark.slow
def test_edit_distances_of_ctc() -> None:
    session = ctc.session(ctc.parsed(ctc.LOG_SOFTMAX))
    given = ctc.batch()
    scores = session.predict({"x": given["x"]}, outputs="y")
    history = session.fit([given], **arguments(epochs=1, metrics=["edit_distance"]))
    assert history[0]["edit_distance"] == pytest.approx(ctc.rate(scores, given, 0))


def test_a_model_that_ortops_did_not_build() -> None:
    algorithm = [
        onnx.helper.make_node("Sub", ["y", "t"], ["d"]),
        onnx.helper.make_node("ReduceMean", ["d"], ["cost"], keepdims=0),
        onnx.helper.make_node("Identity", ["w"], ["w_next"]),
    ]
    outputs = [
        onnx.helper.make_tensor_value_info("cost", onnx.TensorProto.FLOAT, []),
        onnx.helper.make_tensor_value_info("w_next", onnx.TensorProto.FLOAT, [2, 1]),
    ]
    inputs = [onnx.helper.make_tensor_value_info("t", onnx.TensorProto.FLOAT, ["N", 1])]
    model = foreign(algorithm, inputs=inputs, outputs=outputs, updates={"w": "w_next"})
    data = {
        "x": np.arange(8, dtype=np.float32).reshape(4, 2),
        "t": np.ones((4, 1), np.float32),
    }
    session = TrainingSession(model)
    history = session.fit(
        data, metrics=["mae"], train_metrics=True, progress=False, stop_on_nan=False
    )
    assert history[0]["mae"] == pytest.approx(1.5)  # y is -0.5 in each row


@pytest.mark.quick(1)
@pytest.mark.parametrize("kernels", ["onnx", "python"])
def test_kernels_of_updates(kernels: Any) -> None:
    model = build_training_model(squashed(), loss="SoftmaxCrossEntropy", optimizer=Adam(0.05))
    plain = TrainingSession(model).fit(DATA, **arguments())
    found = TrainingSession(model, kernels=kernels).fit(DATA, **arguments())
    assert found.history["accuracy"] == pytest.approx(plain.history["accuracy"])
    assert found.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-5)


# ------------------------------------------------------------------------ nothing else changes


@pytest.mark.slow
def test_steps_are_the_same(tmp_path: Path) -> None:
    model = build_training_model(squashed(), loss="SoftmaxCrossEntropy", optimizer=Adam(0.05))
    plain, session = TrainingSession(model), TrainingSession(model)
    expected = plain.fit(DATA, **arguments(train_metrics=False, metrics=()))
    history = session.fit(DATA, **arguments())
    assert_same_arrays(dict(session.state), dict(plain.state))
    assert history.history["loss"] == expected.history["loss"]
    batch = cut(DATA)[0]
    assert list(session.step(batch)) == list(plain.step(batch)) == ["loss"]
    assert session.run_steps([batch] * 3).tolist() == plain.run_steps([batch] * 3).tolist()
    again = session.fit(DATA, **arguments(train_metrics=False, metrics=()))
    assert again == plain.fit(DATA, **arguments(train_metrics=False, metrics=()))
    assert_same_arrays(dict(session.state), dict(plain.state))


def test_logs_and_monitors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = EarlyStopping(1, "accuracy", minimum_change=2.0)
    callbacks = [CSVLog(tmp_path / "log.csv"), JSONLines(tmp_path / "log.jsonl"), stopping]
    session = TrainingSession(build(classifier()))
    history = session.fit(
        DATA, validation=DATA, **arguments(epochs=5, callbacks=callbacks, progress=True)
    )
    assert len(history) == 2
    assert stopping.best == history[0]["accuracy"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines] == history.history["accuracy"]
    assert "loss,accuracy,validation_loss,validation_accuracy" in (tmp_path / "log.csv").read_text()
    assert f"accuracy {history[0]['accuracy']:.4f}" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- resuming


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: Any, session: Any) -> None:
        if record.step == self.step:
            record.stop("the test says so")


class Largest(StreamingMetric):
    """A metric of a user, with a number of its own."""

    def reset(self) -> None:
        self.largest = 0.0

    def update(self, outputs: Any, targets: Any) -> None:
        self.largest = max(self.largest, float(outputs.max()))

    def result(self) -> float:
        return self.largest


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5])
def test_the_rows_before_a_resume_count(stop: int, accumulate: int, tmp_path: Path) -> None:
    metrics = ["accuracy", "f1", "perplexity", ortops.metrics.IoU(average="macro"), Largest()]
    settings = arguments(accumulate=accumulate, metrics=metrics, epochs=3)
    model = build(classifier(dropout=0.25))
    whole = TrainingSession(model).fit(DATA, **settings)
    begun = TrainingSession(model)
    begun.fit(DATA, callbacks=[StopAt(stop)], **settings)
    begun.save(tmp_path / "saved.onnx")
    for session in (begun, TrainingSession(tmp_path / "saved.onnx")):
        assert session.fit(DATA, resume=True, **settings) == whole


def test_a_part_of_an_epoch_goes_on(tmp_path: Path) -> None:
    whole = TrainingSession(build(classifier())).fit(DATA, **arguments())
    session = TrainingSession(build(classifier()))
    part = session.fit(DATA, max_steps=2, **arguments())
    half_way = TrainingSession(build(classifier())).fit(
        {n: a[: 2 * BATCH] for n, a in DATA.items()}, **arguments(epochs=1)
    )
    assert part[0]["accuracy"] == half_way[0]["accuracy"]
    session.save(tmp_path / "saved.onnx")
    other = TrainingSession(tmp_path / "saved.onnx")
    assert other.fit(DATA, resume=True, **arguments()) == whole


@pytest.mark.quick(1)
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_accumulators_that_updates_make(stop: int, tmp_path: Path) -> None:
    """R² knows its columns from the first batch; a data class may declare what it accumulates."""

    class Made(StreamingMetric):
        def reset(self) -> None:
            self.__dict__.pop("sum", None)

        def update(self, outputs: Any, targets: Any) -> None:
            self.sum = getattr(self, "sum", 0.0) + float(outputs.sum())

        def result(self) -> float:
            return self.sum

    @dataclass
    class Declared(StreamingMetric):
        sum: float = field(default=0.0, init=False)

        def reset(self) -> None:
            self.sum = 0.0

        def update(self, outputs: Any, targets: Any) -> None:
            self.sum += float(outputs.sum())

        def result(self) -> float:
            return self.sum

    draw = np.random.default_rng(0)
    data = {"x": draw.standard_normal((ROWS, 4), np.float32)}
    data["targets"] = draw.standard_normal((ROWS, 2), np.float32)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[n,4] x) => (float[n,2] y) <float[4,2] w = {1,0,0,1,1,1,0,0}> { y = MatMul(x, w) }""")
    names = ["r2", "mean_absolute_error", "root_mean_squared_error"]
    settings = arguments(metrics=[*names, Made(), Declared()], epochs=2)
    built = build(model, "MeanSquaredError", 0.1)
    whole = TrainingSession(built).fit(data, **settings)
    begun = TrainingSession(built)
    begun.fit(data, callbacks=[StopAt(stop)], **settings)
    begun.save(tmp_path / "saved.onnx")
    for session in (begun, TrainingSession(tmp_path / "saved.onnx")):
        assert session.fit(data, resume=True, **settings) == whole


def test_what_keeps_all_rows_is_left_out_of_the_resumed_epoch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mean(outputs: Any, targets: Any) -> float:
        return float(outputs.mean())

    settings = arguments(metrics=["accuracy", "auc", mean], epochs=3)
    whole = TrainingSession(build(classifier())).fit(DATA, **settings)
    session = TrainingSession(build(classifier()))
    session.fit(DATA, callbacks=[StopAt(BATCHES + 1)], **settings)
    history = session.fit(DATA, resume=True, **settings)
    assert history[0] == {**whole[0], "seconds": history[0]["seconds"]}
    assert history[1].keys() == whole[1].keys() - {"auc", "mean"}
    assert history[1]["accuracy"] == whole[1]["accuracy"]
    assert history[2] == {**whole[2], "seconds": history[2]["seconds"]}
    assert caplog.text.count("is left out in the epoch that is resumed") == 2


@pytest.mark.slow
def test_a_damaged_state() -> None:
    session = TrainingSession(build(classifier()))
    session.fit(DATA, callbacks=[StopAt(2)], **arguments(metrics=["accuracy", "f1"]))
    saved = session.model()
    note = next(each for each in saved.metadata_props if each.key == POSITION_KEY)
    text = note.value
    found = json.loads(text)
    assert found["metrics"]["accuracy"]["_count"] == 2 * BATCH
    for wrong in ([], {"f1": 3}, {"f1": {"_hits": {"dtype": "int64"}}}, {"f1": {"_hits": []}}):
        note.value = json.dumps({**found, "metrics": wrong})
        with pytest.raises(ortops.ModelError, match="'metrics'"):
            TrainingSession(saved)
    note.value = json.dumps({**found, "metrics": {"accuracy": {"_other": 3}}})
    with pytest.raises(ortops.ModelError, match="state of the metric 'accuracy'"):
        TrainingSession(saved).fit(DATA, resume=True, **arguments())


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": ()}, "train_metrics: there are no metrics; give metrics="),
        ({"train_metrics": "yes"}, "train_metrics must be True or False, got 'yes'"),
        ({"metrics": [Accuracy(name="loss")]}, "this is also the name of the loss"),
        ({"metrics": [Accuracy(name="steps")]}, "has a number 'steps' already"),
        (
            {"metrics": [Accuracy(output="probabilities")]},
            "a training step does not compute 'probabilities', as the loss does not depend on it",
        ),
    ],
)
def test_what_cannot_be_measured(given: Any, message: str) -> None:
    session = TrainingSession(build(squashed()))
    with pytest.raises(OrtopsError, match=message):
        session.fit(DATA, **arguments(**given))
    assert session.steps_done == 0


def test_ranks_have_only_their_rows() -> None:
    settings = arguments()
    del settings["progress"]
    with pytest.raises(ArgumentError, match="each rank of a joined session has only its rows"):
        fit_joined(build(classifier()), DATA, **settings)


def test_wrong_targets_change_nothing() -> None:
    """An error of a metric comes before the step."""

    class Refusing(StreamingMetric):
        def reset(self) -> None: ...

        def update(self, outputs: Any, targets: Any) -> None:
            raise self.wrong("it refuses")

        def result(self) -> float:
            return 0.0

    session = TrainingSession(build(classifier()))
    with pytest.raises(OrtopsError, match="it refuses"):
        session.fit(DATA, **arguments(metrics=[Refusing()]))
    assert session.steps_done == 0
