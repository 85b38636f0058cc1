"""Frozen embeddings stay in their file: results have the bits of those with all in memory."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortops
from models import llama
from ortops.engine.check import check
from ortops.engine.execution import tables
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.tables import tables_in_file
from ortops.engine.training import loaded_model
from ortops.errors import FeedError, ModelError
from ortops.graph.convert import load_light
from ortops.llm import FineTuning, checking

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pread"), reason="a file that is open cannot be replaced on Windows"
)

WORDS, WIDTH = 50, 16
IN_FILE, IN_MEMORY = Settings(looked_up=1000), Settings(looked_up=2**60)
EMBEDDING = "model.embed_tokens.weight"
ROWS = [[104, 105, 33, 97, 98, 99, 256], [104, 111, 33, 100, 256], [120, 121, 122]]

HEADER = """<ir_version: 10, opset_import: ["": 21]>
texts (int64[batch, time] ids, int32[batch, time] places) => (float[batch, 3] logits)
{ axis = Constant <value = int64[1] {1}> ()
"""
LOOKED_UP = "embedded = Gather (table, ids)"
REST = """
  other = Gather (positions, places)
  sum = Add (embedded, other)
  product = MatMul (sum, w)
  hidden = Tanh (product)
  mean = ReduceMean <keepdims = 0> (hidden, axis)
  logits = MatMul (mean, head)
}"""
ALSO_READ: dict[str, str] = {
    "along axis 1": "columns = Gather <axis = 1> (table, ids) embedded = Transpose (columns)",
    "at computed indices": "next = Abs (ids) embedded = Gather (table, next)",
    "by another node": f"{LOOKED_UP} size = ReduceMax <keepdims = 0> (table)",
    "in a body": "yes = Constant <value = bool {1}> () embedded = If (yes) <"
    "then_branch = a () => (a) { a = Gather (table, ids) }, "
    "else_branch = b () => (b) { b = Gather (table, ids) }>",
}
"""Other ways to read the table, which need all of it."""


def text_model(read: str = LOOKED_UP) -> onnx.ModelProto:
    """Returns a classifier of texts, whose embedding is read in a given way."""
    model = onnx.parser.parse_model(HEADER + read + REST)
    generator = np.random.default_rng(0)
    shapes = {"table": (WORDS, WIDTH), "positions": (20, WIDTH), "w": (WIDTH, 8), "head": (8, 3)}
    for name, shape in shapes.items():
        array = generator.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def trainable(folder: Path, **settings: Any) -> Path:
    """Writes a trainable model whose table is not trained; returns its path."""
    given = {"trainable": ["w", "head"], "optimizer": "Adam", **settings}
    built = ortops.build_training_model(text_model(), loss="SoftmaxCrossEntropy", **given)
    ortops.save_model(built, folder / "model.onnx")
    return folder / "model.onnx"


def batch(rows: int = 4, seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "ids": generator.integers(-WORDS, WORDS, (rows, 5)),
        "places": generator.integers(0, 20, (rows, 5), np.int32),
        "labels": generator.integers(0, 3, rows),
    }


def is_looked_up(session: ortops.TrainingSession) -> bool:
    return bool(session._loaded.fronts)


def results(path: Path, settings: Settings) -> dict[str, Any]:
    """Returns what all operations of a session compute."""
    session = ortops.TrainingSession(path, settings=settings)
    assert is_looked_up(session) == (settings is IN_FILE)
    found: dict[str, Any] = {"run_steps": session.run_steps([batch(seed=n) for n in range(3)])}
    gradients = session.gradients(batch(3))
    found["gradients"] = np.concatenate([gradients[name].reshape(-1) for name in ("w", "head")])
    session.apply(gradients)
    history = session.fit(batch(7), epochs=2, batch_size=2, validation=batch(3), progress=False)
    found |= {f"history {key}": values for key, values in history.history.items()}
    found.pop("history seconds", None)
    weights = np.arange(1, 5, dtype=np.float32)
    found["weighted"] = session.fit(batch(), sample_weight=weights, progress=False)[-1]["loss"]
    found |= {f"evaluate {key}": value for key, value in session.evaluate(batch()).items()}
    inputs = {name: array for name, array in batch().items() if name != "labels"}
    for name in ("embedded", "logits", "sum"):
        found[f"predict {name}"] = session.predict(inputs, outputs=name)
    session.save(path.with_name("saved.onnx"))
    again = ortops.TrainingSession(path.with_name("saved.onnx"), settings=settings)
    found["saved"] = again.run_steps([batch()])
    found["constant"] = session.constants["table"].copy()
    session.constants["table"] = -found["constant"]
    found["other constant"] = session.run_steps([batch()])
    found["evaluate other"] = session.evaluate(batch())["loss"]
    trained = again.with_trainable(["table", "head"])
    assert not is_looked_up(trained)
    found["trained"] = trained.run_steps([batch(), batch()])
    return {**found, **{f"state {name}": array for name, array in session.state.items()}}


@pytest.mark.slow
def test_results_have_the_bits_of_a_table_in_memory(tmp_path: Path) -> None:
    path = trainable(tmp_path)
    found, expected = results(path, IN_FILE), results(path, IN_MEMORY)
    assert found.keys() == expected.keys()
    wrong = [n for n in expected if not np.array_equal(found[n], expected[n], equal_nan=True)]
    assert not wrong
    table = numpy_helper.to_array(text_model().graph.initializer[0])
    embedded = table[batch()["ids"]]  # negative indices count from the end, as in numpy
    np.testing.assert_array_equal(found["predict embedded"], embedded)


def test_each_entry_looks_up_rows(tmp_path: Path) -> None:
    path = trainable(tmp_path, trainable=["w"])
    both = ortops.add_training(
        path, loss="SoftmaxCrossEntropy", optimizer="SGD", trainable=["head"], name="other"
    )
    ortops.save_model(both, path)
    losses = []
    for settings in (IN_FILE, IN_MEMORY):
        session = ortops.TrainingSession(path, settings=settings)
        assert is_looked_up(session) == (settings is IN_FILE)
        losses.append([session.step(batch())["loss"]])
        losses[-1] += [session.step(batch(), entry="other")["loss"], session.step(batch())["loss"]]
    assert losses[0] == losses[1]


def test_a_table_that_is_read_otherwise_is_in_memory(tmp_path: Path) -> None:
    wrong = []
    models = {name: text_model(read) for name, read in ALSO_READ.items()}
    models["as an output"] = text_model()
    models["as an output"].graph.output.append(
        onnx.helper.make_tensor_value_info("table", onnx.TensorProto.FLOAT, [WORDS, WIDTH])
    )
    for name, model in models.items():
        onnx.save(model, tmp_path / "model.onnx")
        if "table" in tables_in_file(load_light(tmp_path / "model.onnx"), 1000):
            wrong.append(name)
    assert not wrong
    onnx.save(text_model(), tmp_path / "model.onnx")
    assert [*tables_in_file(load_light(tmp_path / "model.onnx"), 1000)] == ["table", "positions"]
    assert [*tables_in_file(load_light(tmp_path / "model.onnx"), 2000)] == ["table"]
    assert not tables_in_file(load_light(text_model()), 1000)  # it is in memory already


def test_a_trained_table_is_in_memory(tmp_path: Path) -> None:
    path = trainable(tmp_path, trainable=["table", "positions"])
    assert not is_looked_up(ortops.TrainingSession(path, settings=IN_FILE))


def test_other_providers_have_the_table_in_memory(tmp_path: Path) -> None:
    session = ortops.TrainingSession(trainable(tmp_path), settings=IN_FILE)
    providers = ["AzureExecutionProvider", "CPUExecutionProvider"]
    if providers[0] in onnxruntime.get_available_providers():
        path = tmp_path / "model.onnx"
        other = ortops.TrainingSession(path, providers=providers, settings=IN_FILE)
        assert not is_looked_up(other)
    assert is_looked_up(session)


def test_a_changed_file_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = trainable(tmp_path)
    content = path.read_bytes()
    for changed in (content[:100], content[:-1] + b"?"):
        path.write_bytes(content)
        session = ortops.TrainingSession(path, settings=IN_FILE)
        before = session.step(batch())["loss"]
        state = {name: array.copy() for name, array in session.state.items()}
        path.write_bytes(changed)
        for call in (session.step, session.gradients, session.evaluate):
            with pytest.raises(ModelError, match=r"'table'.* have changed since .* replace files"):
                call(batch())
        assert all(np.array_equal(state[name], array) for name, array in session.state.items())
        assert np.isfinite(before)


def test_a_replaced_file_makes_no_difference(tmp_path: Path) -> None:
    path = trainable(tmp_path)
    session, other = (ortops.TrainingSession(path, settings=s) for s in (IN_FILE, IN_MEMORY))
    (tmp_path / "new.onnx").write_bytes(b"nothing")
    (tmp_path / "new.onnx").replace(path)
    assert session.step(batch())["loss"] == other.step(batch())["loss"]
    path.unlink()
    assert session.step(batch())["loss"] == other.step(batch())["loss"]


def test_a_missing_row_is_named(tmp_path: Path) -> None:
    session = ortops.TrainingSession(trainable(tmp_path), settings=IN_FILE)
    for wrong in (WORDS, -WORDS - 1):
        feeds = batch()
        feeds["ids"][1, 2] = wrong
        with pytest.raises(FeedError, match=f"'ids'.* row {wrong} of 'table', which has {WORDS}"):
            session.step(feeds)
    assert session.steps_done == 0


def test_what_stays_in_its_file_is_logged_once_and_as_check_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trainable(tmp_path)
    with caplog.at_level(logging.INFO, "ortops"):
        session = ortops.TrainingSession(path, settings=IN_FILE)
        session.fit(batch(), epochs=2, validation=batch(), progress=False)
    said = [text for text in caplog.messages if "stays in its file" in text]
    assert [each.split("'")[1] for each in said] == ["table", "positions"]
    small = functools.partial(Settings, looked_up=IN_FILE.looked_up)
    monkeypatch.setattr(tables, "Settings", small)
    assert {text.removeprefix("model: ") for text in said} <= {*check(path).said}


def test_check_says_what_a_session_leaves_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = functools.partial(Settings, looked_up=IN_FILE.looked_up)
    monkeypatch.setattr(tables, "Settings", small)
    given, path = tmp_path / "inference.onnx", trainable(tmp_path)
    ortops.save_model(text_model(), given)
    for model, trained, expected in (
        (path, None, ["table", "positions"]),
        (given, None, []),
        (given, ["w"], ["table", "positions"]),
        (text_model(), ["w"], []),
    ):
        said = check(model, trainable=trained).said
        found = [text.split("'")[1] for text in said if "stays in its file" in text]
        assert found == expected, (model, trained)


@pytest.mark.slow
def test_check_says_what_stays_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, walks = llama.write(tmp_path, bits=4), []
    find = tables.tables_in_file

    def walk(*arguments: Any) -> Any:
        walks.append(find(*arguments))
        return walks[-1]

    monkeypatch.setattr(tables, "tables_in_file", walk)
    reports = []
    for settings in (IN_FILE, IN_MEMORY):
        monkeypatch.setattr(
            tables, "Settings", functools.partial(Settings, looked_up=settings.looked_up)
        )
        reports.append(checking.check_folder(base))
    said = [[text for text in each.said if "stays in its file" in text] for each in reports]
    assert [text.split("'")[1] for text in said[0]] == [EMBEDDING]
    assert not said[1]
    assert [[*found] for found in walks if found] == [[EMBEDDING]]  # it is looked for once
    less = reports[1].estimated.fixed - reports[0].estimated.fixed
    assert less == pytest.approx(2.5 * 4 * llama.WORDS * llama.HIDDEN)  # small weights are copied


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "targets"), [(4, None), (32, ["embed_tokens", "o_proj"])])
def test_tuning_has_the_bits_of_an_embedding_in_memory(
    bits: int, targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = llama.write(tmp_path / "base", bits=bits)
    found: list[Any] = []
    for number, settings in enumerate((IN_FILE, IN_MEMORY)):
        options = {"looked_up": settings.looked_up, "copied": 30_000}
        monkeypatch.setattr(loaded_model, "Settings", functools.partial(Settings, **options))
        tuning = FineTuning(base, rank=2, learning_rate=0.01, targets=targets, recompute=1)
        assert (EMBEDDING in tuning.session._loaded.tables) == (number == 0)
        assert is_looked_up(tuning.session) == (number == 0)
        given: dict[str, Any] = {"batch_size": 2, "progress": False, "validation": ROWS[:1]}
        losses = [*tuning.fit(ROWS, epochs=2, **given).history["loss"]]
        saved = tmp_path / f"tuned{number}"
        tuning.save(saved)
        again = FineTuning.load(saved)
        assert is_looked_up(again.session) == (number == 0)
        losses += again.fit(ROWS, epochs=3, **given).history["loss"]
        tuning.save(tmp_path / f"merged{number}", merged=True)
        bits_of = onnx.load(tmp_path / f"merged{number}" / "model.onnx").SerializeToString()
        found.append(
            (losses, again.evaluate(ROWS), again.generate([104, 105], max_new_tokens=3), bits_of)
        )
    assert found[0] == found[1]
