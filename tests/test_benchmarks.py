"""The benchmarks run and compare their peers; how long anything takes is not tested."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

import ortops
from benchmarks import (
    ideal,
    machine,
    measure,
    memory,
    own,
    plot,
    profiling,
    report,
    start,
    works,
)
from benchmarks.__main__ import main
from benchmarks.measure import Effort, Result
from benchmarks.peers import LOWERED, PEERS, PYTHON, RUN_STEPS, TORCH, C, Peer
from benchmarks.report import Goal, Report
from benchmarks.start import Start
from benchmarks.task import BATCHES, OPTIMIZERS, Task
from benchmarks.works import DEPTH_WORKS, DEPTHS, WORKS, Export, TrainingStep, Update
from scripts import speed_table

UPDATE = "update of 1e6 parameters"
MODEL = "MLP 784-128-10, batch 32"
WIDE = "MLP 784-1024-1024-10, batch 128"
SMALL = {
    "update": Update(30, tensors=3),
    "training": dataclasses.replace(WORKS[MODEL], batch=8),
}


TRAINED = {
    "resnet20": "dynamo",
    "unet": "TorchScript",
    "efficientnet": "TorchScript",
    "speech": "dynamo",
}
REAL = [
    name
    for name, work in WORKS.items()
    if isinstance(work, Export)
    and ("training mode" not in name or TRAINED.get(work.name.split()[0]) == work.exporter)
]
"""Files of exporters. Of networks in training mode, only some are tested: a test of one takes up to
a minute, and `./scripts/benchmark` checks all of them."""


def able(work: works.Work, optimizer: str) -> list[str]:
    """The peers that do a work here."""
    network = work.network()
    exported = isinstance(work, Export)
    return [
        peer
        for peer, it in PEERS.items()
        if it.does(network, optimizer, exported) and not it.missing()
    ]


Worker = Callable[[str], measure.Submit]


@pytest.fixture(scope="module")
def workers() -> Iterator[Worker]:
    """Processes that run the peers: one for each package, which then imports it only once."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda package: stack.enter_context(measure.worker()))


def values_of(
    work: works.Work, folder: Path, some: list[str], optimizer: str, workers: Worker
) -> dict[str, list[float]]:
    """What the first steps of peers give."""
    works.write(work, str(folder), [optimizer])
    limit = None if isinstance(work, Update) else 1
    found = {}
    for peer in some:
        submit = workers("ortops" if PEERS[peer].ours else PEERS[peer].package)
        found[peer] = submit(measure.first_values, str(folder), peer, optimizer, limit).result()
    return found


def rows_of(markdown: str, column: str) -> list[list[str]]:
    """The cells of the table that has a column, without its heading."""
    tables = [part.splitlines() for part in markdown.split("\n\n") if part.startswith("|")]
    (table,) = (rows for rows in tables if f"| {column} |" in rows[0])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]


# ------------------------------------------------------------------------------------ whole runs


@pytest.mark.nightly(0)
@pytest.mark.slow
@pytest.mark.torch  # the plot compares with PyTorch
def test_a_quick_run_writes_tables_figures_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--quick", "--only", MODEL.upper(), "--only", UPDATE, "--output", str(tmp_path)]
    # Others only take longer: that they compute the same is tested below.
    some = [peer for peer in PEERS if peer in (LOWERED, PYTHON, TORCH, "numpy")]
    assert main(arguments + [word for peer in some for word in ("--peer", peer)]) == 0
    written = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == written.strip()
    rows = rows_of(written, "peer | ms per step")
    expected = [
        (name, peer)
        for name in (MODEL, UPDATE)
        for peer in able(WORKS[name], "Adam")
        if peer in some
    ]
    assert [(row[0], row[1]) for row in rows] == expected
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")

    data = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert list(data["times"]) == [MODEL, UPDATE]
    assert data["versions"]["onnxruntime"]
    assert len(data["depths"]) == len(DEPTHS)
    (started,) = data["starts"][MODEL][LOWERED]
    assert 0 < started["seconds"] < 60
    assert 10 < started["megabytes"] < 2000
    assert {goal["what"] for goal in data["goals"]} >= {
        "s to create the session, 12 layers",
        "s to import TrainingSession",
        "time, Python custom ops",
    }


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [
        name
        for name, work in WORKS.items()
        if isinstance(work, TrainingStep) and name != WIDE  # whose layers are those of `MODEL`
    ],
)
def test_losses_of_the_peers_agree(work: str, tmp_path: Path, workers: Worker) -> None:
    it = WORKS[work]
    some = [peer for peer in able(it, "Momentum") if peer != "torch.compile"]
    assert {LOWERED, PYTHON} <= set(some)
    found = values_of(it, tmp_path, some, "Momentum", workers)
    results = {peer: Result([], values, values) for peer, values in found.items()}
    assert all(len(values) == measure.CHECKED_STEPS for values in found.values())
    assert Report("Momentum", Effort(), times={work: results}).disagreements() == []


@pytest.mark.torch
@pytest.mark.optional("transformers", "export")
@pytest.mark.optional("onnxscript", "export")
@pytest.mark.slow
@pytest.mark.nightly(0)
@pytest.mark.parametrize("work", REAL)
def test_losses_of_real_models_agree(work: str, tmp_path: Path, workers: Worker) -> None:
    it = WORKS[work]
    some = [peer for peer in able(it, "Momentum") if peer != "torch.compile"]
    assert {LOWERED, TORCH} <= set(some)
    assert PYTHON not in some
    found = values_of(it, tmp_path, some, "Momentum", workers)
    results = {peer: Result([], values, values) for peer, values in found.items()}
    assert Report("Momentum", Effort(), times={work: results}).disagreements() == []
    first, *_, last = found[TORCH]
    assert first - last > 100 * it.tolerance  # so the gradients count in what is compared


def test_a_real_model_is_left_out_where_nothing_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(name for name in WORKS if isinstance(WORKS[name], Export))
    monkeypatch.setattr(works.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setattr(Peer, "missing", lambda peer: "")
    assert main(["--quick", "--only", name, "--part", "steps"]) == 0
    expected = f"- skipped: {name}: not installed: torch, transformers, onnxscript"
    assert expected in capsys.readouterr().out


def test_a_call_of_run_steps_counts_as_the_steps_that_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_steps(session: ortops.TrainingSession, batches: Iterable[Any]) -> list[Any]:
        return [session.step(feeds)["loss"] for feeds in batches]

    if not hasattr(ortops.TrainingSession, "run_steps"):
        monkeypatch.setattr(ortops.TrainingSession, "run_steps", run_steps, raising=False)
    assert PEERS[RUN_STEPS].missing() == ""
    works.write(SMALL["training"], str(tmp_path), ["Adam"])
    one, several = (
        measure.first_values(str(tmp_path), peer, "Adam") for peer in (LOWERED, RUN_STEPS)
    )
    assert measure._step.count == BATCHES
    np.testing.assert_allclose(several, one, rtol=1e-5)


@pytest.mark.torch
@pytest.mark.slow
def test_compiled_losses_agree(tmp_path: Path, workers: Worker) -> None:
    if reason := PEERS["torch.compile"].missing():
        pytest.skip(reason)
    found = values_of(SMALL["training"], tmp_path, [LOWERED, "torch.compile"], "Momentum", workers)
    np.testing.assert_allclose(found["torch.compile"], found[LOWERED], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_of_the_peers_agree(optimizer: str, tmp_path: Path, workers: Worker) -> None:
    some = able(SMALL["update"], optimizer)
    assert {LOWERED, PYTHON, "numpy"} <= set(some)
    found = values_of(SMALL["update"], tmp_path, some, optimizer, workers)
    for values in found.values():
        assert len(values) == 30 * measure.CHECKED_STEPS
        np.testing.assert_allclose(values, found["numpy"], rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------- what is compared tells


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("work", "optimizer"), [("update", "Adam"), ("update", "Momentum"), ("training", "Momentum")]
)
@pytest.mark.parametrize("setting", ["learning_rate", "alpha"])
def test_what_is_compared_tells_a_slightly_wrong_step(
    work: str, optimizer: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = SMALL[work]
    limit = None if isinstance(it, Update) else 1
    found = []
    for factor in (1, 0.98):
        settings = {**OPTIMIZERS[optimizer], setting: factor * OPTIMIZERS[optimizer][setting]}
        monkeypatch.setitem(works.OPTIMIZERS, optimizer, settings)
        works.write(it, str(tmp_path), [optimizer])
        values = measure.first_values(str(tmp_path), LOWERED, optimizer, limit)
        found.append(Result([], values, values))
    right, wrong = found
    assert wrong.difference(right) > 3 * it.tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "timed"), [([2.0, 1.01], [2.0, 1.0]), ([2.0, math.nan], [2.0, 1.0])]
)
def test_disagreement_is_an_exit_code_and_a_message(
    values: list[float],
    timed: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = {LOWERED: Result([1.0], [2.0, 1.0], [2.0, 1.0]), PYTHON: Result([1.0], values, timed)}
    monkeypatch.setattr(measure, "measure", lambda *_: results)
    assert main(["--quick", "--only", MODEL, "--part", "steps", "--peer", "ortops"]) == 1
    share = "inf" if math.isnan(values[1]) else "5.0e-03"
    assert (
        f"{MODEL}: {PYTHON} differs from {LOWERED} by {share} in the checked steps; "
        "the tolerance is 1e-04"
    ) in capsys.readouterr().err


def test_timed_steps_are_compared_too() -> None:
    results = {LOWERED: Result([1.0], [1.0], [1.0]), PYTHON: Result([1.0], [1.0], [1.05])}
    (message,) = Report("Adam", Effort(), times={MODEL: results}).disagreements()
    assert message.endswith("by 5.0e-02 in the timed steps; the tolerance is 3e-02")


# ----------------------------------------------------------------------------------------- tables


def some_results() -> dict[str, Result]:
    """Ortops between two peers, the slower of which is right by definition."""
    return {
        LOWERED: Result([0.004, 0.010, 0.200], [2.0], [2.0]),
        RUN_STEPS: Result([0.001, 0.002, 0.400], [2.0], [2.0]),
        TORCH: Result([0.006, 0.020, 0.300], [2.0], [2.0]),
        "JAX": Result([0.008, 0.010, 0.100], [2.0], [2.0]),
    }


def test_ratios_are_taken_within_a_round_to_the_best_peer() -> None:
    rows = rows_of(
        Report("Adam", Effort(), times={MODEL: some_results()}).markdown(), "peer | ms per step"
    )
    assert [row[1:5] for row in rows] == [
        [LOWERED, "10.0 (4.00–200)", "1.00 (0.500–2.00)", "JAX"],
        [RUN_STEPS, "2.00 (1.00–400)", "0.200 (0.125–4.00)", "JAX"],
        [TORCH, "20.0 (6.00–300)", "2.00 (0.750–3.00)", "JAX"],
        ["JAX", "10.0 (8.00–100)", "1", "JAX"],
    ]


def test_goals_say_what_is_met_and_by_how_much_it_is_missed() -> None:
    starts = {LOWERED: [Start(1.0, 90.0)], TORCH: [Start(4.0, 100.0)]}
    made = Report("Adam", Effort(), times={MODEL: some_results()}, starts={MODEL: starts})
    rows = rows_of(made.markdown(), "target")
    assert [row[1:] for row in rows] == [
        ["time of a step, standard operators", "JAX", "1.00 (0.500–2.00)", "0.6", "missed by 67%"],
        ["time of a step, run_steps", "JAX", "0.200 (0.125–4.00)", "0.35", "met"],
        ["start to the end of the first step", "torch eager", "0.250", "0.3", "met"],
        ["peak memory", "torch eager", "0.900", "0.6", "missed by 50%"],
    ]


def test_updates_are_compared_with_the_loop_in_c() -> None:
    results = {peer: Result([seconds], [], []) for peer, seconds in ((TORCH, 1.0), (C, 2.0))}
    assert report.reference("update of 1e7 parameters", results) == C
    assert report.reference(MODEL, results) == TORCH
    assert report.reference(MODEL, {LOWERED: Result([1.0], [], [])}) == ""


def test_a_missing_peer_is_named_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        Peer("nowhere", package="no_such_package").missing() == "no_such_package is not installed"
    )
    assert Peer("nowhere", compilers=("no-cc", "no-gcc")).missing() == "no-cc or no-gcc not found"
    assert Peer("nowhere", method="no_way").missing() == "TrainingSession has no no_way"
    heading = Report("Adam", Effort(), missing={"X": "x is not installed"}).markdown()
    assert "- skipped: X: x is not installed" in heading


def test_growth_compares_a_layer_of_the_deepest_net_with_one_in_the_middle() -> None:
    middle, deepest = own.compared()
    assert (middle, deepest) == ("MLP of 16 layers", "MLP of 64 layers")
    seconds = {name: [1.0, 2.0] for name in DEPTH_WORKS} | {deepest: [4.0, 12.0]}
    assert own.growth(seconds) == [1.0, 1.5]


def test_every_target_of_a_step_is_a_goal() -> None:
    results = {peer: Result([1.0], [1.0], [1.0]) for peer in (LOWERED, RUN_STEPS, TORCH, C)}
    made = Report("Adam", Effort(), times=dict.fromkeys(WORKS, results))
    aimed_at = {
        (goal.work, goal.target) for goal in made.goals() if goal.what.startswith("time of")
    }
    expected = {
        (name, target)
        for name, work in WORKS.items()
        for target in (work.target, work.run_steps)
        if target is not None
    }
    assert aimed_at == expected
    assert Goal("", "", "", [2.0, 3.0, 1.0], 2.0).met


def results_of(folder: Path, works: Iterable[str], factors: dict[str, float]) -> Path:
    """Writes the results of a run in which peers take some factors of 10 ms, 2 s and 400 MB."""
    starts = {peer: factor for peer, factor in factors.items() if peer != "torch.compile"}
    made = Report(
        "Adam",
        Effort(),
        times={w: {p: Result([0.01 * f], [2.0], [2.0]) for p, f in factors.items()} for w in works},
        starts={w: {p: [Start(2 * f, 400 * f)] for p, f in starts.items()} for w in works},
    )
    made.write(folder)
    return folder / "results.json"


PEERS_OF_PLOT = {LOWERED: 0.5, TORCH: 1.0, "torch.compile": 0.8, "JAX": 6.0}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """Draws results, and returns matplotlib's figure."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)

    def draw(results: Path) -> Any:
        file = results.parent / "a.png"
        plot.write(results, file)
        assert file.read_bytes().startswith(b"\x89PNG")
        (figure,) = figures
        return figure

    return draw


@pytest.mark.slow
def test_a_plot_shows_what_was_measured(tmp_path: Path, drawn: Callable[[Path], Any]) -> None:
    figure = drawn(results_of(tmp_path, [MODEL, UPDATE], PEERS_OF_PLOT))
    shown = [each.get_text() for each in figure.findobj(lambda part: hasattr(part, "get_text"))]
    assert {"5 ms", "10 ms", "8 ms", "60 ms"} <= set(shown)
    assert {"1.0 s", "2.0 s", "12.0 s", "200 MB", "400 MB", "2400 MB"} <= set(shown)
    assert {"ortops", "torch eager", "torch.compile", "JAX"} <= set(shown)
    assert "MLP 784-128-10\nbatch 32" in shown
    assert not any("update" in text for text in shown)


@pytest.mark.slow
def test_a_bar_that_is_cut_has_a_mark(tmp_path: Path, drawn: Callable[[Path], Any]) -> None:
    for axis in drawn(results_of(tmp_path, [MODEL], PEERS_OF_PLOT)).axes:
        widths = sorted(bar.get_width() for bar in axis.patches)
        assert widths[-2:] == pytest.approx([1.0, plot.LIMIT])  # JAX takes 6 times as long
        assert len([line for line in axis.lines if line.get_linestyle() == "-"]) == 1


def test_the_chart_has_each_network_once() -> None:
    shown = plot.charted(WORKS)
    assert [name for name in shown if name.startswith("BERT")] == [
        "BERT 6 layers d 384, 16×64, dynamo's file",
        "BERT 6 layers d 384, 16×64, training mode, dynamo's file",
    ]
    assert not any(isinstance(WORKS[name], Update) for name in shown)
    assert plot.charted(["BERT 6 layers d 384, 16×64, TorchScript's file"]) != []


def test_without_pytorch_there_is_no_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    plot.write(results_of(tmp_path, [MODEL], {LOWERED: 1.0, "JAX": 2.0}), tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()
    assert "no training step was measured with torch eager" in capsys.readouterr().err


def test_tables_of_the_documentation_have_the_median_and_the_worst_workload(
    tmp_path: Path,
) -> None:
    file = results_of(tmp_path, [MODEL, WIDE], PEERS_OF_PLOT)
    results = json.loads(file.read_text(encoding="utf-8"))
    results["machine"], results["versions"] = "a CPU", {"onnxruntime": "1.0", "torch": "2.0"}
    slow = results["times"][WIDE][LOWERED]
    slow["seconds"] = [4 * each for each in slow["seconds"]]
    measured = speed_table.merge({}, results)
    (row,) = rows_of("\n".join(speed_table.short(measured)), "workloads")
    assert row == ["a CPU", "2", f"1.56, 2.50 ({WIDE})", "", "0.50, 0.50", "0.50, 0.50"]
    first, second = rows_of("\n".join(speed_table.long(measured)), "fastest peer")
    date = results["date"]
    assert first == [MODEL, date, "5", "torch.compile", "0.62", "", "0.50", "0.50"]
    assert second[2:6] == ["20", "torch.compile", "2.50", ""]


def test_a_later_benchmark_replaces_only_what_it_measured(tmp_path: Path) -> None:
    results = json.loads(results_of(tmp_path, [MODEL, WIDE], PEERS_OF_PLOT).read_text())
    results["machine"], results["versions"] = "a CPU", {}
    before = speed_table.merge({}, results)
    results["times"], results["date"] = {MODEL: results["times"][MODEL]}, "later"
    after = speed_table.merge(before, results)
    works = {
        name: each["processors"]["a CPU"]["works"]
        for name, each in (("before", before), ("after", after))
    }
    dates = {work: line["date"] for work, line in works["after"].items()}
    assert dates == {MODEL: "later", WIDE: works["before"][WIDE]["date"]}
    other = speed_table.merge(after, results | {"machine": "another CPU"})["processors"]
    assert list(other) == ["a CPU", "another CPU"]
    assert list(other["another CPU"]["works"]) == [MODEL]


def test_an_update_is_compared_with_the_loop_in_c(tmp_path: Path) -> None:
    results = json.loads(results_of(tmp_path, [UPDATE], {LOWERED: 4.0, C: 1.0}).read_text())
    results["machine"], results["versions"] = "a CPU", {}
    (row,) = rows_of("\n".join(speed_table.long(speed_table.merge({}, results))), "fastest peer")
    assert row[2:5] == ["40", C, "4.00"]


def test_the_tables_of_the_documentation_are_those_of_the_measurements() -> None:
    measured = json.loads(speed_table.MEASURED.read_text(encoding="utf-8"))
    for path, name, expected in speed_table.parts(measured):
        begin, end = speed_table.marks(name)
        found = path.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
        assert found == expected, f"run python scripts/speed_table.py: {path.name}, {name}"


def test_products_have_a_speed() -> None:
    found = machine.product_speeds(64, rounds=1)
    assert list(found) == ["A·B", "A·Bᵀ", "Aᵀ·B"]
    assert all(speed > 0 for speeds in found.values() for speed in speeds.values())
    assert machine.cpu().count(",") >= 2


# ------------------------------------------------------------------------------------------ parts


@pytest.mark.slow
def test_a_start_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    works.write(SMALL["update"], str(tmp_path), ["Adam"])
    found = start.measure(str(tmp_path), ["numpy"], "Adam", starts=2, steps=1)
    assert [len(each) for each in found.values()] == [2]
    assert all(0 < each.seconds < 60 and 5 < each.megabytes < 2000 for each in found["numpy"])


def test_a_task_reads_back_as_it_was_written(tmp_path: Path) -> None:
    it = SMALL["training"]
    works.write(it, str(tmp_path), ["Momentum"])
    task = Task.read(str(tmp_path))
    assert (task.network, task.trainable("Momentum").exists()) == ("mlp", True)
    for found, expected in (
        (task.weights(), it.weights()),
        *zip(task.batches(), it.batches(), strict=True),
    ):
        assert list(found) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    assert len(dataclasses.replace(task, limit=2).batches()) == 2


def event(name: str, start: float, length: float, category: str = "Node") -> dict[str, Any]:
    shapes = [{"float": [2, 3]}, {"int64": []}]
    sizes = {"activation_size": "24", "parameter_size": "8", "output_size": "16"}
    arguments = {"op_name": name[:4], "input_type_shape": shapes, **sizes}
    return {"cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def test_nodes_of_a_profile_have_the_median_time_after_warm_up() -> None:
    events = []
    for step, length in enumerate([99000, 99000, 99000, 1000, 5000, 3000]):
        begin = 1e6 * step
        events += [
            event("model_run", begin, 9e5, "Session"),
            event("Scan_1_kernel_time", begin + 1, 10 * length),
            event("Tanh_1_kernel_time", begin + 2, length),  # twice, in the Scan
            event("Tanh_1_kernel_time", begin + 2 + length, length),
            event("Gemm_1_kernel_time", begin + 1 + 10 * length, length),
            event("Gemm_1_fence_before", begin, 7),
        ]
    assert sorted(profiling._nodes(events, 6), key=lambda node: node.name) == [
        ideal.Node("Gemm_1", "Gemm", "[2,3] []", 3.0, 1, 48),
        ideal.Node("Scan_1", "Scan", "[2,3] []", 24.0, 1, 48),
        ideal.Node("Tanh_1", "Tanh", "[2,3] []", 6.0, 2, 96),
    ]


def test_results_at_the_peak_are_those_that_are_read_later() -> None:
    kinds = {"Exp": [10, 100], "Reshape": [1000], "Cast": [1000], "Sin": [1000], "Mul": [1000]}
    read = {"Exp": ["x"], "Reshape": ["Exp"], "Cast": ["Reshape"], "Sin": ["x"]}
    read["Mul"] = ["Sin", "Cast"]
    nodes = [make_node(kind, read[kind], [kind], name=kind) for kind in kinds]
    value = make_tensor_value_info("Mul", 1, [1000])
    model = make_model(make_graph(nodes, "graph", [], [value]))
    events = [event("model_run", 0, 9, "Session"), event("model_run", 10, 9, "Session")]
    for step in (0, 10):
        for number, (kind, shape) in enumerate(kinds.items()):
            one = event(f"{kind}_kernel_time", step + number, 1)
            one["args"]["output_type_shape"] = [{"bool" if kind == "Cast" else "float": shape}]
            events.append(one)
    # Exp until its Reshape, a view, has been cast; the output itself is not counted.
    found = memory.live_megabytes(events, model)
    assert found == pytest.approx({"Exp": 4e-3, "Cast": 1e-3})
    (*_, text) = memory.lines({"imports": 84.4, "first step": 120}, {"Conv": 6.2, "Mul": 0.4}, 9)
    assert text == (
        "Peak: 120 MB, of which imports 84, parameters and moments 9, results of nodes 7 (Conv 6), "
        "and graphs, sessions, gradients and gaps between results 20."
    )


@pytest.mark.slow
def test_the_peak_of_each_stage_is_measured(tmp_path: Path) -> None:
    works.write(SMALL["training"], str(tmp_path), ["Momentum"])
    found = memory.measure(str(tmp_path), LOWERED, "Momentum", 1)
    assert tuple(found) == memory.STAGES
    assert all(5 < megabytes < 2000 for megabytes in found.values())


def test_a_session_that_did_not_run_in_each_step_is_no_part_of_a_profile() -> None:
    events = [event("model_run", 0, 9, "Session"), event("Gemm_1_kernel_time", 1, 5)]
    assert profiling._nodes(events, 6) == []


@pytest.mark.parametrize(
    ("operator", "moved"), [("Add", 40), ("Reshape", 0), ("Slice", 32), ("Expand", 32)]
)
def test_bytes_that_a_node_moves(operator: str, moved: int) -> None:
    assert ideal.traffic(operator, 24, 16) == moved
    assert ideal.traffic("Expand", 4, 16) == 20  # the smaller tensor is read


def test_a_depthwise_convolution_of_one_element_is_no_product() -> None:
    for shapes, expected in {"[4,8,8] [8,4,3]": True, "[4,8,8] [8,1,1]": False}.items():
        assert ideal.is_product(ideal.Node("c", "Conv", shapes, 1.0)) is expected
    assert ideal.is_product(ideal.Node("m", "FusedMatMul", "[2,3] [3,4]", 1.0))
    assert not ideal.is_product(ideal.Node("t", "Tanh", "[2,3]", 1.0))


@pytest.mark.slow
def test_the_ideal_time_has_the_time_of_products_alone_and_of_memory() -> None:
    x = np.zeros((256, 2048), np.float32)
    inputs = [make_tensor_value_info(name, 1, x.shape) for name in "ab"]
    output = make_tensor_value_info("c", 1, None)
    graph = make_graph([make_node("MatMul", ["a", "w"], ["c"], name="m")], "g", inputs, [output])
    graph.initializer.append(numpy_helper.from_array(np.zeros((2048, 64), np.float32), "w"))
    model = make_model(graph, opset_imports=[make_opsetid("", 21)], ir_version=10)
    moved = 64 << 20
    found = ideal.ideal(
        [
            ideal.Node("m", "MatMul", "[256,2048] [2048,64]", 3.0, runs=2),
            ideal.Node("t", "Tanh", "[9]", 5.0, traffic=moved),
            ideal.Node("update/s", "Sub", "[9]", 7.0, traffic=2 * moved),
        ],
        [model],
        lambda: time.sleep(0.02),
    )
    assert found.step >= 20
    assert (found.products.nodes, found.products.measured) == (1, 3.0)
    assert found.products.ideal > 2 * 1e3 * (2 * 256 * 2048 * 64) / 1e13  # no CPU has 10 TFLOP/s
    assert found.others == ideal.Part(1, 5.0, 1e3 * moved / found.bandwidth)
    assert found.update == ideal.Part(1, 7.0, 2e3 * moved / found.bandwidth)
    assert found.sum == found.products.ideal + found.others.ideal + found.update.ideal


@pytest.mark.slow
def test_a_profile_names_operators_and_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--profile", "--only", MODEL]) == 0
    shown = capsys.readouterr().out
    assert f"## {MODEL}: " in shown
    assert "Gemm | " in shown
    assert "| part | nodes | ms | ideal ms (memory: " in shown
    assert "| matrix products and convolutions | 7 | " in shown
    assert "[32,784]" in shown


@pytest.mark.slow
@pytest.mark.optional("llvmlite", "fast")
def test_a_profile_of_compiled_updates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--profile", "--only", MODEL, "--peer", "ortops, compiled"]) == 0
    assert "| update | 0 | " in capsys.readouterr().out


@pytest.mark.nightly(0)
@pytest.mark.slow
def test_a_profile_without_passes(capsys: pytest.CaptureFixture[str]) -> None:
    counts = []
    for without in ("recurrent", "cross_entropy,recurrent"):  # there is no LSTM in it
        assert main(["--quick", "--profile", "--only", MODEL, "--without", without]) == 0
        counts.append(re.findall(r"in (\d+) nodes", capsys.readouterr().out))
    assert counts[0] != counts[1]
    with pytest.raises(ortops.ArgumentError, match="unknown pass 'rectify'"):
        main(["--quick", "--profile", "--only", MODEL, "--without", "rectify"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "perceptron"], "--only ['perceptron'] matches none of: MLP 784-128-10"),
        (["--peer", "abacus"], "--peer ['abacus'] matches none of: ortops, standard operators"),
        (["--without", "recurrent"], "--without requires --profile"),
        (["--rounds", "0"], "--rounds must be an integer >= 1, got 0"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("work", SMALL.values(), ids=SMALL)
def test_batches_are_the_same_each_time(work: works.Work) -> None:
    for feeds, others in zip(work.batches(), work.batches(), strict=True):
        assert list(feeds) == list(others)
        for name, array in feeds.items():
            np.testing.assert_array_equal(array, others[name])


@pytest.mark.parametrize(
    ("text", "fits"),
    [("LeNet", True), ("lenet 28", True), ("net", False), ("28", True), ("", True)],
)
def test_a_work_is_chosen_by_the_start_of_a_word(text: str, fits: bool) -> None:
    assert works.fits("LeNet 28×28", [text]) == fits
    assert works.fits("MobileNetV2 280", [text]) == (text in ("28", ""))
