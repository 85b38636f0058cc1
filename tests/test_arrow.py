"""Parquet and Arrow files and datasets of pyarrow as data, read in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_collate import masked, mean_loss, rows, samples
from training_models import affine

import ortops
from ortops import ArgumentError, FeedError, OrtopsError, TrainingSession, losses
from ortops.engine.training import arrow as arrow_module
from ortops.engine.training.arrow import open_arrow

pytestmark = pytest.mark.optional("pyarrow", "tables")

RNG = np.random.default_rng
ROWS = 103
FORMS = ["parquet", "arrow", "feather", "stream.arrow", "dataset", "folder"]


def arrays() -> dict[str, Any]:
    rng = RNG(0)
    return {
        "x": rng.normal(size=(ROWS, 3)).astype(np.float32),
        "targets": rng.normal(size=(ROWS, 2)).astype(np.float32),
        "other": rng.integers(0, 9, ROWS),
    }


def table(columns: dict[str, Any]) -> Any:
    import pyarrow

    return pyarrow.table({name: pyarrow.array(list(c)) for name, c in columns.items()})


def written(columns: dict[str, Any], form: str, folder: Path, block: int = 10) -> Any:
    """Writes columns in blocks of so many rows."""
    import pyarrow
    from pyarrow import dataset, feather, parquet

    made, path = table(columns), folder / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(made, path, row_group_size=block)
    elif form == "feather":
        feather.write_feather(made, path, chunksize=block)  # compressed
    elif form == "arrow":
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, made.schema) as to:
            to.write_table(made, max_chunksize=block)
    elif form == "stream.arrow":
        with (
            pyarrow.OSFile(str(path), "wb") as sink,
            pyarrow.ipc.new_stream(sink, made.schema) as to,
        ):
            to.write_table(made, max_chunksize=block)
    elif form == "dataset":
        for number in range(0, len(made), 40):
            parquet.write_table(made[number : number + 40], folder / f"{number:03}.parquet")
        return dataset.dataset(str(folder))
    elif form == "folder":
        for number in range(0, len(made), 40):
            feather.write_feather(made[number : number + 40], folder / f"{number:03}.feather")
        return dataset.dataset(str(folder), format="feather")
    return path


def session(loss: Any = "MeanSquaredError") -> TrainingSession:
    return TrainingSession(ortops.build_training_model(affine(), loss=loss, optimizer="Adam"))


@pytest.fixture(params=[False, True], ids=["at once", "in parts"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(arrow_module, "_MEMORY", 800)  # fewer bytes than all forms take


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_training_equals_that_of_arrays(form: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "seed": 3, "progress": False}
    columns = arrays()
    one, other = session(), session()
    in_memory = {name: columns[name] for name in ("x", "targets")}
    data = written(columns, form, tmp_path)
    history = one.fit(data, validation=data, **given)
    expected = other.fit(in_memory, validation=in_memory, **given)
    for name, array in other.state.items():
        assert one.state[name].tobytes() == array.tobytes()
    assert history.history["validation_loss"] == expected.history["validation_loss"]
    found = one.predict(data, outputs="y", batch_size=7)
    np.testing.assert_array_equal(found, other.predict({"x": columns["x"]}, outputs="y"))
    as_text = one.evaluate(str(data) if isinstance(data, Path) else data, batch_size=9)["loss"]
    assert as_text == pytest.approx(other.evaluate(in_memory)["loss"], rel=1e-6)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("form", FORMS)
def test_each_row_is_read_once_per_epoch(form: str, tmp_path: Path) -> None:
    columns = {"x": np.arange(ROWS)[:, None] * np.ones((1, 3), np.float32)}
    data = open_arrow(written(columns, form, tmp_path))
    inputs = session().inputs.only(["x"])
    orders = []
    for seed in (0, 0, 1):
        batches = data.arrange(RNG(seed), 8)
        assert [len(batch) for batch in batches] == [8] * 12 + [7]
        read: list[Any] = [data.read(batch, inputs, 1) for batch in batches]
        found = np.concatenate([inputs.check(batch)["x"][:, 0] for batch in read])
        np.testing.assert_array_equal(found, np.concatenate(batches))
        assert sorted(found) == list(range(ROWS))
        orders.append(found.tolist())
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_few_blocks_are_read_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow_module, "_MEMORY", 800)
    data = open_arrow(written(arrays(), "parquet", tmp_path))
    read: list[int] = []
    whole = arrow_module._Blocks._read

    def watched(self: Any, place: int, names: Any) -> Any:
        read.append(place)
        assert len(self._kept) <= 3
        return whole(self, place, names)

    monkeypatch.setattr(arrow_module._Blocks, "_read", watched)
    inputs = session().inputs
    for batch in data.arrange(RNG(0), 5):
        data.read(batch, inputs, 1)
    assert set(read) == set(range(11))
    assert len(read) <= 2 * 11


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("form", ["parquet", "feather", "dataset"])
@pytest.mark.parametrize("stop", [3, 11])
def test_a_training_that_was_stopped_goes_on_with_equal_bits(
    form: str, stop: int, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    data = written(arrays(), form, tmp_path / "data")
    given: dict[str, Any] = {
        "epochs": 2,
        "batch_size": 12,
        "validation_split": 0.2,
        "prefetch": 2,
        "progress": False,
        "seed": 4,
    }
    whole, part = session(), session()
    history = whole.fit(data, **given)
    part.fit(data, max_steps=stop, **given)
    part.save(tmp_path / "part.onnx")
    part = TrainingSession(tmp_path / "part.onnx")
    resumed = part.fit(data, resume=True, **given)
    for name, array in whole.state.items():
        assert part.state[name].tobytes() == array.tobytes()
    for name in ("loss", "validation_loss"):
        assert resumed.history[name] == history.history[name]


def test_validation_split_takes_the_last_rows(tmp_path: Path) -> None:
    columns = arrays()
    data = written(columns, "parquet", tmp_path)
    one = session()
    found = one.fit(data, validation_split=0.3, epochs=1, progress=False)[-1]["validation_loss"]
    kept = int(ROWS * 0.7)
    rest = {name: columns[name][kept:] for name in ("x", "targets")}
    assert found == pytest.approx(one.evaluate(rest)["loss"], rel=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["parquet", "feather"])
def test_weights_in_a_column(form: str, tmp_path: Path) -> None:
    columns = {**arrays(), "importance": RNG(5).integers(0, 3, ROWS).astype(np.float32)}
    data = written(columns, form, tmp_path)
    one = session(losses.MeanSquaredError(sample_weight="weight"))
    expected = one.evaluate(
        {name: columns[name] for name in ("x", "targets")},
        sample_weight=columns["importance"],
    )["loss"]
    for weights in ("importance", columns["importance"]):
        found = one.evaluate(data, sample_weight=weights, batch_size=16)["loss"]
        assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ArgumentError, match="has no column 'wait'"):
        one.evaluate(data, sample_weight="wait")


def test_balanced_classes(tmp_path: Path) -> None:
    rng = RNG(6)
    columns = {"tokens": rng.integers(0, 9, (40, 2)), "attention_mask": np.ones((40, 2), np.int64)}
    columns["labels"] = np.minimum(rng.integers(0, 9, 40), 2)
    data = written(columns, "parquet", tmp_path)
    one, other = (masked(losses.SoftmaxCrossEntropy(sample_weight="weight")) for _ in range(2))
    one.fit(data, class_weight="balanced", progress=False)
    other.fit(columns, class_weight="balanced", progress=False)
    assert one.state["table"].tobytes() == other.state["table"].tobytes()


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_lists_of_different_lengths_are_padded(form: str, tmp_path: Path) -> None:
    columns = rows(RNG(7).integers(1, 9, 37).tolist())
    data = written(columns, form, tmp_path, block=8)
    one = masked()
    found = one.evaluate(data, collate="pad", batch_size=5)["loss"]
    assert found == pytest.approx(mean_loss(one, columns), rel=1e-5)
    one.fit(data, collate="pad", group_by_length=True, epochs=2, batch_size=4, progress=False)
    seen = []

    def join(several: list[Any]) -> Any:
        seen.extend(several)
        return ortops.data.Pad().join(several, one.inputs)

    one.evaluate(data, collate=join, batch_size=5)
    for sample, expected in zip(seen, samples(columns), strict=True):
        np.testing.assert_array_equal(sample["tokens"], expected["tokens"])
        assert sample["labels"] == expected["labels"]


def test_categories_and_numbers_of_rows(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    made = table({"x": np.ones((4, 3), np.float32), "targets": np.ones((4, 2), np.float32)})
    made = made.append_column("kind", pyarrow.array(list("abab")).dictionary_encode())
    parquet.write_table(made, tmp_path / "rows.parquet")
    found = open_arrow(tmp_path / "rows.parquet")
    assert [one["kind"] for one in found.samples(np.array([3, 0]))] == ["b", "a"]
    assert len(found) == 4


def test_columns_have_sizes_and_rows_plain_values(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    lists = [[{"n": row}] * (row % 3) for row in range(10)]
    columns = {"a": np.arange(10.0), "a.b": ["text"] * 10, "c": lists}
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet", row_group_size=4)
    found = open_arrow(tmp_path / "rows.parquet")
    sizes = [block.sizes for block in found._blocks.blocks]
    assert [each["a"] for each in sizes] == [32, 32, 16]
    assert all(each["a.b"] >= 8 * rows for each, rows in zip(sizes, (4, 4, 2), strict=True))
    assert sum(each["c"] for each in sizes) > 0
    assert set().union(*sizes) == set(columns)
    part = found.part(1, 9)
    assert part.records(2, 6) == pyarrow.table(columns).slice(3, 4).to_pylist()
    assert part.column("a").to_pylist() == list(range(1, 9))


def missing(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: [None, *list(c)[1:]] for name, c in columns.items()}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b"no table"), "data '.*rows.parquet': .*"),
        (lambda p: written({"x": arrays()["x"]}, "parquet", p.parent), "has no column 'targets'"),
        (lambda p: written(missing(arrays()), "parquet", p.parent), "missing"),
        (lambda p: None, "there is no such file"),
        (
            lambda p: written(
                {n: c[:0].tolist() for n, c in arrays().items()}, "parquet", p.parent
            ),
            "there are no batches; give at least one row",
        ),
    ],
)
def test_files_that_cannot_be_read(write: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write(path)
    with pytest.raises(FeedError, match=message):
        session().fit(path, progress=False)


def test_other_files_and_filtered_datasets(tmp_path: Path) -> None:
    from pyarrow import dataset

    for given in ("rows.csv", "rows"):
        with pytest.raises(FeedError, match=r"of files, only \.parquet, \.arrow and"):
            session().fit(given, progress=False)
    data = written(arrays(), "dataset", tmp_path)
    with pytest.raises(OrtopsError, match="filter"):
        session().fit(data.filter(dataset.field("other") > 3), progress=False)
