"""The command that measures a machine: what it measures, what it leaves out, and what it writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import language, machine, machine_report, measurements
from benchmarks.machine_report import PARTS, Report, main, plan, run, start
from ortops.engine.execution.memory import Device
from ortops.engine.execution.providers import why_unusable
from ortops.engine.execution.settings import Settings
from scripts import speed_table
from tests.waiting import until

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
AZURE = "AzureExecutionProvider"
ROOT = Path(__file__).parents[1]
SIXTEEN = {"cores": 16, "torch": "cuda", "providers": [CUDA, CPU]}
MACHINE = {
    **SIXTEEN,
    "versions": {"Python": "3.12.1", "onnxruntime-gpu": "1.31.1", "torch": "2.11", "peft": "0.21"},
    "unusable": {"TensorrtExecutionProvider": "its library is missing"},
    "cpu": "a CPU, 16 cores, x86_64",
    "card": "a card",
    "driver": "580.1",
    "card_megabytes": 81_559.0,
}
RESULTS: Mapping[str, dict[str, Any]] = {
    "describe": MACHINE,
    "correctness": {
        "losses": 1e-6,
        "parameters": 2e-6,
        "bound": 2e-4,
        "agrees": True,
        "nodes": 90,
        "resumed": True,
        "resumed_bits": False,
        "on_cpu": {"Shape": 3, "Cast": 1},
    },
    "language": {"tokens": 1234.5, "seconds": 0.415, "megabytes": 2500.0, "card_peak": 3210.0},
    "speed": {
        "milliseconds": {"ortops, standard operators": 2.0, "torch eager": 4.0},
        "ratio": {"torch eager": 0.5},
        "threads": 16,
        "missing": {},
        "difference": 1e-6,
    },
    "ranks": {"milliseconds": {"2x8": 3.0, "1x16": 4.0}, "ratio": {"1x16": 0.75}},
    "products": {"products": {"A·B": {"onnxruntime": 300.0}}, "memory": 21.5},
}


class Double:
    """Runs no process: returns results by function, and notes the calls."""

    def __init__(self, **results: Any) -> None:
        self.results = {**RESULTS, **results}
        self.calls: list[tuple[str, Mapping[str, Any]]] = []

    def __call__(
        self, function: str, arguments: Mapping[str, Any], seconds: float, log: Path
    ) -> dict[str, Any]:
        assert seconds > 0
        self.calls.append((function, arguments))
        return json.loads(json.dumps(self.results[function]))


def tables(text: str) -> Iterator[list[str]]:
    """Yields the cells of each row."""
    for line in text.splitlines():
        if line.startswith("| ") and "---" not in line:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_everything_is_measured_and_shown(tmp_path: Path) -> None:
    double = Double()
    report = run(tmp_path, 100_000, start=double)
    assert {function for function, _ in double.calls} == set(RESULTS)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["machine.json", "machine.md"]
    text = (tmp_path / "machine.md").read_text(encoding="utf-8")
    assert text == report.markdown()
    assert "# a card\n" in text
    assert "- a card, 81,559 MB, driver 580.1" in text
    assert "  - TensorrtExecutionProvider does not: its library is missing" in text
    found = list(tables(text))
    ours = "onnxruntime-gpu 1.31.1"
    bounded = "1.0e-06, 2.0e-06 (bound 2e-04)"
    fallen = "4 of 90: Shape (3), Cast (1)"
    assert ["LSTM", "float16", "CUDA", "agrees", bounded, "equal", fallen, ours] in found
    assert [
        *("1.1·10⁹", "512", "ortops, int4 and float16, CUDA", "1.23e+03", "0.415", "3,210"),
        *("2,500", ours),
    ] in found
    mlp, both = machine_report.SPEED[0], f"{ours}, torch 2.11"
    assert [mlp, "CUDA", "1", "torch eager, 16 threads", "4", "0.50", both] in found
    assert [mlp, "2 MPI ranks of 8", "2x8", "3", "", ours] in found
    assert ["machine", "16", "A·B of 1024 × 1024", "onnxruntime 300 GFLOP/s", "", both] in found
    assert report.left_out == {"further networks, batches and sizes": "they need --all"}


@pytest.mark.slow
def test_what_was_measured_with_these_versions_is_not_measured_again(tmp_path: Path) -> None:
    run(tmp_path, 100_000, start=Double())
    again = Double()
    run(tmp_path, 100_000, start=again)
    assert [function for function, _ in again.calls] == ["describe"]
    versions = {**MACHINE["versions"], "onnxruntime-gpu": "1.32.0"}
    newer = Double(describe={**MACHINE, "versions": versions})
    report = run(tmp_path, 100_000, start=newer)
    peers = [arguments.get("peer") for name, arguments in newer.calls if name == "language"]
    assert peers == [None] * 3  # PyTorch's version is the same
    assert [each["versions"] for each in report.machines["a card"]["runs"]] == [
        MACHINE["versions"],
        versions,
    ]
    rows = [row for row in tables(report.markdown()) if row[:3] == ["MLP", "float32", "CUDA"]]
    assert [row[-1] for row in rows] == ["onnxruntime-gpu 1.31.1", "onnxruntime-gpu 1.32.0"]


@pytest.mark.slow
def test_another_machine_has_tables_of_its_own(tmp_path: Path) -> None:
    run(tmp_path, 100_000, start=Double())
    other = {**MACHINE, "card": "", "torch": "cpu", "providers": [CPU]}
    report = run(tmp_path, 100_000, start=Double(describe=other))
    assert list(report.machines) == ["a card", "a CPU, 16 cores, x86_64"]


def test_a_failure_is_shown_and_tried_again_later(tmp_path: Path) -> None:
    failed = {"failed": "RuntimeError: CUDA | out of memory"}
    report = run(tmp_path, 100_000, ["speed"], start=Double(speed=failed))
    row = next(each for each in tables(report.markdown()) if each[0] == machine_report.SPEED[0])
    assert row[3] == "failed: RuntimeError: CUDA / out of memory"
    assert report.left_out[f"speed: {machine_report.SPEED[0]}, CUDA, 1"] == failed["failed"]
    assert report.left_out["cores"] == "--only does not name it"
    repaired = run(tmp_path, 100_000, ["speed"], start=Double())
    assert "failed" not in repaired.markdown()


def test_a_machine_that_cannot_be_described_is_said(tmp_path: Path) -> None:
    report = run(tmp_path, 100, start=Double(describe={"failed": "ImportError: no numpy"}))
    assert report.left_out == {"all parts": "ImportError: no numpy"}
    assert "all parts: ImportError: no numpy" in (tmp_path / "machine.md").read_text()


def test_without_time_everything_is_left_out_with_a_reason(tmp_path: Path) -> None:
    double = Double()
    report = run(tmp_path, machine_report.END + 1, start=double)
    assert [function for function, _ in double.calls] == ["describe"]
    count = len([each for each in plan(MACHINE) if not each.extra])
    reasons = [why for why in report.left_out.values() if why.endswith(" s were left")]
    assert len(reasons) == count
    assert not report.measured


def test_each_part_has_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements take all that they may; a clock of the test's own runs."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    double = Double()

    def slow(
        function: str, arguments: Mapping[str, Any], seconds: float, log: Path
    ) -> dict[str, Any]:
        found = double(function, arguments, seconds, log)
        now[0] += 0 if function == "describe" else seconds
        return found if function == "describe" else {"failed": "slow", "ended": seconds}

    report = run(tmp_path, 200, start=slow)
    assert now[0] <= 200
    assert {each["part"] for each in report.measured} == set(PARTS)


def test_a_measurement_without_end_leaves_time_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, double = [0.0], Double()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def hangs(
        function: str, arguments: Mapping[str, Any], seconds: float, log: Path
    ) -> dict[str, Any]:
        is_first = function == "products" and arguments["threads"] == 16
        now[0] += seconds if is_first else 1
        found = double(function, arguments, seconds, log)
        return {"failed": "slow", "ended": seconds} if is_first else found

    report = run(tmp_path, 200, ["cores"], start=hangs)
    failed = [each["row"] for each in report.measured if "failed" in each["result"]]
    assert failed == [["machine", "16"]]
    planned = [each for each in plan(MACHINE) if each.part == "cores" and not each.extra]
    assert len(report.measured) == len(planned)
    assert now[0] <= 200


def test_the_plan_of_a_machine() -> None:
    usual = [each for each in plan(SIXTEEN) if not each.extra]
    assert list(dict.fromkeys(each.part for each in usual)) == list(PARTS)
    assert {each.row for each in usual if each.part == "correctness"} == {
        (model, dtype, provider)
        for model in ("MLP", "LeNet", "transformer block", "LSTM")
        for dtype in ("float32", "float16")
        for provider in ("CUDA", "CPU")
    }
    lengths = [each.row[:2] for each in usual if each.part == "language"]
    assert list(dict.fromkeys(lengths)) == [
        ("1.1·10⁹", "512"),
        ("0.1·10⁹", "256"),
        ("0.1·10⁹", "2048"),
    ]
    names = [each.arguments["work"].split()[0] for each in usual if each.part == "speed"]
    assert names == ["MLP", "LeNet", "BERT", "MobileNetV2", "GPT-2"]
    cores = [each.row for each in usual if each.part == "cores"]
    first = [(name, how) for name in machine_report.CORES for how in ("16", "2 MPI ranks of 8")]
    assert cores[:9] == [("machine", "16"), *first]  # the most informative first
    assert {how for name, how in cores[9:] if name == "machine"} == {"1", "2", "4", "8"}
    assert len(cores) == 9 + 4 * 5
    extra = [each for each in plan(SIXTEEN) if each.extra]
    assert any(each.arguments.get("compiled") for each in extra)
    assert {each.arguments.get("times") for each in extra} >= {1, 16}
    assert {each.row[0] for each in extra if each.part == "language"} == {"3·10⁹", "8·10⁹"}
    assert any("EfficientNet" in each.row[0] for each in extra)
    small = [each.row[:2] for each in plan({"cores": 2, "providers": [CPU]})]
    assert small.index(("0.1·10⁹", "256")) < small.index(("1.1·10⁹", "512"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "gpu"], "--only gpu is none of: correctness, language, speed, cores"),
        (["--minutes", "0"], "--minutes must be greater than 0, got 0"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--out", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------- processes


def instead(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `start` run code in place of `benchmarks.measurements`."""
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    (folder / "benchmarks" / "measurements.py").write_text(code)
    monkeypatch.setattr(machine_report, "PROJECT", folder)


def test_a_process_without_end_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, note = tmp_path / "log", tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(note)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    instead(code, tmp_path, monkeypatch)
    limit = 0.0
    while not note.exists() or not note.read_text():  # a busy machine takes longer to start it
        limit += 5
        assert start("describe", {}, limit, log)["ended"] == limit
    status = Path(f"/proc/{note.read_text()}/stat")

    def is_gone() -> bool:
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    until(is_gone)


def test_a_process_that_dies_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead("import os; os.abort()", tmp_path, monkeypatch)
    found = start("describe", {}, 60, tmp_path / "log")
    assert found == {"failed": "the process ended with -6; see log"}
    assert "== describe {}" in (tmp_path / "log").read_text()


class FakeCard:
    """A card whose memory in use rises by 1 and falls again."""

    name = "a card"
    used = iter((100.0, 300.0, *[150.0] * 100_000))

    def used_megabytes(self) -> float:
        return next(self.used)


def test_the_peak_on_the_card_is_that_above_what_was_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead("print('noise'); print('{\"x\": 1}')", tmp_path, monkeypatch)
    monkeypatch.setattr(machine_report, "Card", FakeCard)
    assert start("x", {}, 60, tmp_path / "log") == {"x": 1, "card_peak": 200.0}


def test_a_machine_without_a_card_has_none() -> None:
    card = machine.Card()
    if card.name:
        assert card.used_megabytes() <= card.megabytes
    else:
        assert (card.driver, card.used_megabytes()) == ("", 0.0)


@pytest.mark.nightly(0)
@pytest.mark.slow
def test_the_shortest_run(tmp_path: Path) -> None:
    """In a process, as a user runs it; a busy machine may leave everything out, but says so."""
    arguments = ["--out", str(tmp_path), "--minutes", "0.5", "--only", "correctness"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machine_report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = Report.read(tmp_path)
    shown = [f"correctness: {', '.join(each['row'])}" for each in report.measured]
    (name,) = report.machines
    described = plan({**report.machines[name], **report.machines[name]["runs"][0]})
    wanted = [each for each in described if each.part == "correctness" and not each.extra]
    assert {*shown, *report.left_out} >= {f"correctness: {', '.join(w.row)}" for w in wanted}
    assert done.stdout.strip() == (tmp_path / "machine.md").read_text(encoding="utf-8").strip()


# ------------------------------------------------------------------------------------ measurements


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["MLP", "LeNet", "transformer block", "LSTM"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_cpu_agrees_with_itself(model: str, dtype: str) -> None:
    found = measurements.correctness(model, CPU, dtype)
    assert found["agrees"]
    assert found["resumed_bits"]
    assert found["losses"] <= measurements.BOUNDS[dtype]
    assert found["nodes"] == sum(found["on_cpu"].values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("joined", [0, 2**18], ids=["in place", "one run"])
def test_a_device_with_memory_of_its_own_agrees(joined: int) -> None:
    """The CPU's memory, treated as that of a device."""
    settings = Settings(device=Device("cpu"), joined=joined)
    found = measurements.correctness("LSTM", AZURE, settings=settings)
    assert found["agrees"]


@pytest.mark.slow
def test_a_provider_that_computes_something_else_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the learning rate, in place of a wrong kernel."""
    losses = measurements._losses
    calls: list[int] = []

    def spoiled(session: Any, *given: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 2:  # the first is the CPU's
            session.learning_rate /= 2
        return losses(session, *given)

    monkeypatch.setattr(measurements, "_losses", spoiled)
    found = measurements.correctness("MLP", CPU)
    assert not found["agrees"]
    assert found["parameters"] > found["bound"]


def test_a_provider_that_falls_back_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime lists CUDA where it cannot be used, and makes a session on the CPU."""
    import onnxruntime

    listed = [CUDA, AZURE, CPU]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: listed)
    monkeypatch.setattr(onnxruntime, "get_all_providers", lambda: listed)

    class Session:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            pass

        def get_providers(self) -> list[str]:
            return [CPU]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    found = measurements.describe()
    assert found["providers"] == [CPU]
    assert found["unusable"][CUDA] == (
        f"'{CUDA}' does not work on this machine; onnxruntime has replaced it"
    )
    assert found["unusable"][AZURE] == "it calls a service and computes nothing itself"
    monkeypatch.setattr(Session, "get_providers", lambda self: [CPU, CUDA])
    assert "onnxruntime has replaced it" in why_unusable(CUDA)  # the second is not enough
    monkeypatch.setattr(Session, "get_providers", lambda self: [CUDA, CPU])
    assert measurements.describe()["providers"][0] == CUDA


def test_a_machine_is_described() -> None:
    found = measurements.describe()
    assert found["providers"][-1] == CPU
    assert found["cores"] >= 1
    assert {"Python", "numpy", "onnxruntime"} <= found["versions"].keys()


@pytest.mark.slow
@pytest.mark.nightly(1)
@pytest.mark.parametrize(
    "missing", ["torch", "transformers", "peft", "llvmlite", "mpi4py", "onnxruntime_extensions"]
)
def test_a_missing_package_leaves_out_only_what_needs_it(missing: str, tmp_path: Path) -> None:
    code = f"""
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: (
    None if name.partition(".")[0] == {missing!r} else find(name, path, target)
)
"""
    (tmp_path / "sitecustomize.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])

    def measure(name: str, **arguments: Any) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.measurements", name, json.dumps(arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))

    assert CPU in measure("describe")["providers"]
    assert measure("correctness", model="MLP", provider=CPU)["agrees"]
    work = {"work": machine_report.SPEED[0], "folder": str(tmp_path / "mlp"), "provider": CPU}
    found = measure("speed", **work, threads=1, quick=True)
    assert next(iter(found["milliseconds"])).startswith("ortops")
    if missing == "torch":
        assert found["missing"] == {"torch eager": "torch is not installed"}
        bert = {**work, "work": machine_report.SPEED[2], "folder": str(tmp_path / "bert")}
        assert measure("speed", **bert)["failed"] == "not installed: torch"


SMALL = {"layers": 1, "hidden": 64, "heads": 2, "pairs": 1, "wide": 64, "words": 96}


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_language_model_is_tuned(dtype: str, tmp_path: Path) -> None:
    given = {"sizes": SMALL, "steps": 3, "folder": str(tmp_path / "model")}
    found = measurements.language("0.1·10⁹", 16, dtype=dtype, **given)
    assert found["parameters"] == language.Sizes(**SMALL).parameters
    assert found["tokens"] == pytest.approx(16 / found["seconds"])
    assert found["megabytes"] > 0


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("peft", "export")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT reads it
def test_a_language_model_is_tuned_with_peft(tmp_path: Path) -> None:
    given = {"sizes": SMALL, "steps": 3, "folder": str(tmp_path), "dtype": "bfloat16"}
    assert measurements.language("0.1·10⁹", 16, peer="torch", **given)["tokens"] > 0


@pytest.mark.nightly(0)
@pytest.mark.slow
@pytest.mark.optional("mpi4py", "distributed")
def test_steps_of_two_ranks(tmp_path: Path) -> None:
    work = {"work": machine_report.SPEED[0], "folder": str(tmp_path / "mlp")}
    alone = measurements.speed(**work, provider=CPU, threads=1, quick=True)
    assert all(each > 0 for each in alone["milliseconds"].values())
    found = measurements.ranks(work["folder"], 2)
    assert list(found["milliseconds"]) == ["2x1", "1x2"]
    assert found["ratio"]["1x2"] > 0
    anew = measurements.ranks(str(tmp_path / "anew"), 2, work["work"])
    assert list(anew["milliseconds"]) == ["2x1", "1x2"]


def test_a_process_says_why_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    measurements.main("correctness", '{"model": "MLP", "provider": "NoExecutionProvider"}')
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "there is no provider 'NoExecutionProvider'" in json.loads(shown)["failed"]


# --------------------------------------------------------------------------------- documentation


@pytest.mark.slow
def test_the_documentation_says_on_which_cards_a_provider_was_run(tmp_path: Path) -> None:
    assert speed_table.words({}, "cuda") == "implemented, not run"
    run(tmp_path, 100_000, start=Double())
    measured = speed_table.add_machine({"processors": {}}, tmp_path)
    assert speed_table.words(measured, "cuda") == (
        "run on a card: 8 of 8 models agree with the CPU"
    )
    assert speed_table.words(measured, "webgpu") == speed_table.NOT_RUN["webgpu"]
    text = "\n".join(speed_table.machines(measured))
    assert text.startswith("### a card\n")
    assert "\n#### correctness\n" in text
    assert not re.search("^# ", text, re.MULTILINE)
    # The same figures again change nothing, and those of another version are added.
    assert speed_table.add_machine(measured, tmp_path) == measured
    run(tmp_path, 100_000, start=Double(describe={**MACHINE, "versions": {"torch": "3"}}))
    both = speed_table.add_machine(measured, tmp_path)
    assert len(both["machines"]["measured"]) == 2 * len(measured["machines"]["measured"])


def test_a_device_in_software_is_no_card() -> None:
    described = {**MACHINE, "card": "", "providers": ["WebGpuExecutionProvider", CPU]}
    row = {"machine": "a CPU", "part": "correctness", "row": ["MLP", "float32", "WebGpu"]}
    measured = {
        "machines": {
            "machines": {"a CPU": described},
            "measured": [{**row, "versions": {}, "result": RESULTS["correctness"]}],
        }
    }
    assert speed_table.words(measured, "webgpu") == speed_table.NOT_RUN["webgpu"]


def test_the_steps_on_a_borrowed_machine(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "measure_machine"
    shown = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert "Usage: scripts/measure_machine STEP FOLDER OUT" in shown.stderr
    environment = {**os.environ, "KEEP": str(tmp_path / "keep")}
    for number in (1, 2, 3):  # steps 2, 3 and 4 keep what they bring
        part = tmp_path / "brought" / f"cuda-{number}"
        part.mkdir(parents=True)
        (part / f"part-{number}").write_text(str(number))
        command = ["bash", script, str(number + 1), tmp_path / "brought", tmp_path / "out"]
        subprocess.run(command, env=environment, check=True)
        part.rename(tmp_path / f"gone-{number}")  # the next call brings another folder
    kept = sorted(each.read_text() for each in tmp_path.glob("keep/packages/cuda-*/part-*"))
    assert kept == ["1", "2", "3"]
