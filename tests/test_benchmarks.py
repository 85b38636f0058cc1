"""The benchmarks run and compare their peers; how long anything takes is not tested."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortops
from benchmarks import measure, peers, profiling, table, works
from benchmarks.__main__ import main
from benchmarks.measure import Effort, Result
from benchmarks.peers import LOWERED, PEERS, TORCH, Peer, Step
from benchmarks.works import WORKS, OptimizerStep, TrainingStep

SMALL_UPDATE = "optimizer step, 1e4 parameters"
SMALL_MODEL = "MLP 784-128-10, batch 32"


def rows_of(markdown: str) -> list[list[str]]:
    """The cells of the first table, without its heading."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("work", [SMALL_UPDATE, SMALL_MODEL])
def test_a_quick_run_has_a_row_for_each_peer_and_they_agree(
    work: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.md"
    assert main(["--quick", "--only", work.upper(), "--output", str(file)]) == 0
    written = file.read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == written.strip()
    rows = rows_of(written)
    expected = [peer for peer, it in PEERS.items() if it.does(WORKS[work])]
    assert [row[:2] for row in rows] == [[work, peer] for peer in expected]
    assert {LOWERED, "Python custom ops"} <= set(expected)
    assert [row[3:] for row in rows if row[1] == expected[0]] == [["1", "–"]]
    for row in rows[1:]:
        assert float(row[3]) > 0
        assert float(row[4]) <= WORKS[work].tolerance


def test_a_profile_names_operators_and_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--profile", "--only", SMALL_MODEL]) == 0
    shown = capsys.readouterr().out
    assert f"## {SMALL_MODEL}: " in shown
    assert "| Gemm |" in shown
    assert "| Gradient/fc1/" in shown
    assert "[32,784]" in shown


def test_nodes_of_a_profile_have_the_median_time_after_warm_up() -> None:
    def event(name: str, microseconds: float, category: str = "Node") -> dict[str, Any]:
        shapes = [{"float": [2, 3]}, {"int64": []}]
        arguments = {"op_name": name[:3], "input_type_shape": shapes}
        return {"cat": category, "name": name, "dur": microseconds, "args": arguments}

    steps = [99000, 99000, 99000, 1000, 5000, 3000]
    events = [event("Mul_1_kernel_time", each) for each in steps]
    events += [event("Add_1_kernel_time", 2 * each) for each in steps]
    events += [event("Mul_1_fence_before", 7), event("model_run", 9, "Session")]
    assert profiling._nodes(events) == [
        profiling.Node("Add_1", "Add", "[2,3] []", 6.0),
        profiling.Node("Mul_1", "Mul", "[2,3] []", 3.0),
    ]


def results(**changes: Any) -> dict[str, dict[str, Result]]:
    """Two peers, the second at a tenth of the first's time in one round and a half in two."""
    slow = Result([0.004, 0.010, 0.200], [2.0, 1.0])
    fast = Result([0.002, 0.001, 0.100], changes.get("values", [2.0, 1.0]))
    return {SMALL_MODEL: {changes.get("first", LOWERED): slow, "Python custom ops": fast}}


def test_ratios_are_taken_within_a_round() -> None:
    assert rows_of(table.markdown(results(), "Adam", Effort())) == [
        [SMALL_MODEL, LOWERED, "10.0 (4.00–200)", "1", "–"],
        [SMALL_MODEL, "Python custom ops", "2.00 (1.00–100)", "0.50", "0e+00"],
    ]


@pytest.mark.parametrize("first", [LOWERED, TORCH])
def test_the_baseline_is_torch_where_it_took_part(first: str) -> None:
    (by_peer,) = results(first=first).values()
    assert table.baseline(by_peer) == first


@pytest.mark.parametrize("values", [[2.0, 1.01], [2.0, math.nan]])
def test_disagreement_is_an_exit_code_and_a_message(
    values: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (by_peer,) = results(values=values).values()
    monkeypatch.setattr(measure, "measure", lambda *_: by_peer)
    assert main(["--only", SMALL_MODEL]) == 1
    share = "inf" if math.isnan(values[1]) else "5.0e-03"
    assert (
        f"{SMALL_MODEL}: Python custom ops differs from standard operators by {share}; "
        "at most 1e-04 is right"
    ) in capsys.readouterr().err


def wrong_update(work: OptimizerStep, optimizer: str) -> Step:
    ours = ortops.optimizers.Adam(alpha=0.91)
    x, gradients = work.arrays()
    values = [x, np.zeros_like(x), np.zeros_like(x)]
    counter = itertools.count(1)

    def step() -> Any:
        x, *state = values
        rate, count = np.float32(peers.UPDATE_RATE), np.int64(next(counter))
        values[:] = ours.update(rate, count, x, gradients[1 - count % 2], *state)
        return values[0]

    return step


def wrong_training(work: TrainingStep, optimizer: str) -> Step:
    model, batches = work.build(), work.batches()
    wrong = ortops.optimizers.Momentum(learning_rate=0.0102)
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=wrong)
    )

    def step() -> Any:
        images, labels = next(batches)
        return session.step({"images": images, "labels": labels})["loss"]

    return step


@pytest.mark.parametrize("work", [SMALL_UPDATE, SMALL_MODEL])
def test_what_is_compared_tells_a_slightly_wrong_step(
    work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", {**PEERS, "wrong": Peer(wrong_update, wrong_training)})
    right, wrong = (
        Result([], measure.first_values(work, peer, "Adam")) for peer in (LOWERED, "wrong")
    )
    assert wrong.difference(right) > WORKS[work].tolerance


@pytest.mark.parametrize("optimizer", peers.OPTIMIZERS)
def test_every_optimizer_can_be_compared(optimizer: str) -> None:
    able = [peer for peer, it in PEERS.items() if it.does(WORKS[SMALL_UPDATE])]
    found = {peer: Result([], measure.first_values(SMALL_UPDATE, peer, optimizer)) for peer in able}
    assert table.disagreements({SMALL_UPDATE: found}) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "perceptron"], "--only 'perceptron' fits none of: optimizer step, 1e4"),
        (["--rounds", "0"], "--rounds is 0; at least 1 is accepted"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_batches_are_the_same_for_every_peer() -> None:
    work = works.WORKS[SMALL_MODEL]
    assert isinstance(work, TrainingStep)
    for (x, label), (other, other_label) in itertools.islice(
        zip(work.batches(), work.batches(), strict=True), 20
    ):
        np.testing.assert_array_equal(x, other)
        np.testing.assert_array_equal(label, other_label)
