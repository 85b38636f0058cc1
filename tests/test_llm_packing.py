"""Several examples in one row, with attention kept apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from models import llama
from ortops import ArgumentError, Tape, UnsupportedError, op
from ortops.cli import main
from ortops.llm import FineTuning
from ortops.llm.batches import joined, packed
from ortops.llm.examples import batch_of, example_of

ROWS = [[7, 8, 9, 10, 11, 3], [9, 10, 11], [20, 21, 22, 23], [5, 6, 5, 6, 7]]
WIDTH, WORDS, LONGEST = 16, 32, 24


def write(folder: Path, *, mask: Any = None, positions: str = "input") -> Path:
    """Writes a model of one attention layer, with a mask [batch, 1, queries, keys] of a type."""
    draw = np.random.default_rng(0).standard_normal
    with Tape(name="packing") as tape:
        ids = tape.input("input_ids", np.int64, ["batch", "time"])

        def weight(name: str, *shape: int) -> Any:
            return tape.initializer(name, (draw(shape) * shape[0] ** -0.5).astype(np.float32))

        x = op.Gather(weight("embedding", WORDS, WIDTH) * 4, ids)
        if positions == "input":
            places: Any = tape.input("position_ids", np.int64, ["batch", "time"])
        else:
            places = op.CumSum(op.Add(op.Mul(ids, 0), 1), 1) - 1
        x = x + op.Gather(weight("positions", LONGEST, WIDTH) * 4, places)
        q, k, v = (x @ weight(f"{name}.weight", WIDTH, WIDTH) for name in "qkv")
        scores = q @ op.Transpose(k, perm=[0, 2, 1]) * WIDTH**-0.5
        steps = op.CumSum(op.Add(op.Mul(ids, 0), 1), 1)
        earlier = op.LessOrEqual(op.Unsqueeze(steps, [1]), op.Unsqueeze(steps, [2]))
        scores = op.Where(earlier, scores, np.float32(-1e9))
        if mask is not None:
            given = tape.input("attention_mask", mask, ["batch", 1, "time", "time"])
            seen = op.Squeeze(given, [1])
            if mask == np.float32:
                scores = scores + seen
            else:
                scores = op.Where(op.Cast(seen, to=9), scores, np.float32(-1e9))
        y = x + op.Softmax(scores, axis=-1) @ v @ weight("o.weight", WIDTH, WIDTH)
        tape.output(op.Tanh(y) @ weight("lm_head.weight", WIDTH, WORDS), "logits")
    folder.mkdir(exist_ok=True)
    onnx.save(tape.model(), folder / "model.onnx")
    return folder


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("mask", [np.bool_, np.int64, np.float32])
def test_losses_and_gradients_are_those_of_separate_rows(mask: Any, tmp_path: Path) -> None:
    tuning = FineTuning(write(tmp_path, mask=mask), rank=2)
    rng = np.random.default_rng(1)
    tuning.session.parameters = {
        name: rng.normal(0, 0.3, array.shape).astype(np.float32)
        for name, array in tuning.session.parameters.items()
    }
    units = tuning._batches.read(ROWS, 10, "all")
    rows = tuning._batches.pack(units, 10, tuning.session)
    assert [row.lengths for (row,) in rows] == [(6, 4), (5, 3)]
    (apart,), (together,) = (tuning._batches.of(each, 9) for each in (units, rows))
    assert together["input_ids"].shape == (2, 10)
    expected, found = (tuning.session.gradients(batch) for batch in (apart, together))
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6)
    history = tuning.fit(ROWS, max_length=10, packing=True, progress=False)
    assert tuning.session.steps_done == 1
    assert history[-1]["loss"] == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.slow
def test_models_that_do_not_keep_examples_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(UnsupportedError, match="use group_by_length=True") as caught:
            FineTuning(folder, rank=1).fit(ROWS, packing=True, progress=False)
        return str(caught.value)

    assert "no mask or position_ids" in refusal(write(tmp_path / "a"))
    counted = write(tmp_path / "b", mask=np.bool_, positions="own")
    assert "depend on its place in a row, as the model counts positions" in refusal(counted)
    served = llama.write(tmp_path / "c", layers=1)
    expected = "as GroupQueryAttention node '/model/layers.0/attn/GroupQueryAttention' separates"
    assert expected in refusal(served)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("[1, 2, 3]\n")
    start = ["tune", str(served), str(rows), "--packing", "--save", str(tmp_path / "d")]
    assert main(start) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_a_schedule_has_as_many_steps_as_packed_batches(tmp_path: Path) -> None:
    folder, rows, saved = write(tmp_path / "a", mask=np.bool_), tmp_path / "b.jsonl", tmp_path / "c"
    rows.write_text("".join(f"{row}\n" for row in ROWS))
    start = ["tune", str(folder), str(rows), "--packing", "--max-length", "10", "--batch-size", "1"]
    start += ["--learning-rate", "cosine(1e-3)", "--epochs", "3", "--save", str(saved)]
    assert main(start) == 0
    session = FineTuning.load(saved).session
    assert session.state["schedule_steps"] == session.steps_done == 3 * 2


@pytest.mark.slow
def test_preferences_are_not_packed(tmp_path: Path) -> None:
    tuning = FineTuning(llama.write(tmp_path, layers=1), rank=1, loss="DPO")
    rows = [{"prompt": [1], "chosen": [2, 3], "rejected": [4]}]
    with pytest.raises(ArgumentError, match="train_on must be left out for DPO, whose rows say"):
        tuning.fit(rows, train_on="all")
    with pytest.raises(ArgumentError, match="packing must be False for DPO, got True"):
        tuning.fit(rows, packing=True, progress=False)


def test_rows_are_filled() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, 200)
    rows = packed(sizes, 32)
    assert sorted(place for row in rows for place in row) == list(range(200))
    assert max(sizes[row].sum() for row in rows) <= 32
    assert len(rows) <= 1.1 * sizes.sum() / 32


def test_a_padded_batch_of_packed_rows() -> None:
    examples = [example_of([n, n + 1, n + 2], [True] * 3) for n in (10, 20)]
    assert packed([3, 3], 6) == [[0, 1]]
    row = joined(examples)
    batch = batch_of([row, example_of([1, 2, 3, 4, 5, 6, 7, 8], [True] * 8)])
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 2, 2]
    assert batch["segments"][0].tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    assert batch["labels"][0].tolist() == [-100, 11, 12, -100, 21, 22, -100, -100]
