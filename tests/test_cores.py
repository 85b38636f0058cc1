"""How many threads sessions have where a process may not use the whole machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import ortops
from ortops._common import cores
from ortops._common.cores import usable_memory
from ortops.engine.execution import onnxruntime_sessions
from ortops.engine.execution.settings import Settings
from tests.training_models import classifier, labelled

OWN = 0
"""onnxruntime's own number of threads."""


def machine(root: Path, *, cgroup: str = "", **files: str) -> Path:
    """Writes what Linux says of 16 CPUs, of which two each are one core."""
    for cpu in range(16):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1 = {"cpu__pod__cpu.cfs_quota_us": "250000\n", "cpu__pod__cpu.cfs_period_us": "100000\n"}
CASES: dict[str, tuple[dict[str, Any], list[int], dict[str, str], tuple[int, int]]] = {
    "the whole machine": ({}, [*range(16)], {}, (16, OWN)),
    "half of its cores": ({}, [0, 8, 1, 9, 2, 10, 3, 11], {}, (8, 4)),
    "one CPU of each core": ({}, [*range(8)], {}, (8, 8)),
    "a container of 3 CPUs": (
        {"cgroup": "0::/\n", "cpu_max": "300000 100000\n"},
        [*range(16)],
        {},
        (3, 3),
    ),
    "a part of a CPU": (
        {"cgroup": "0::/a/b\n", "a__cpu_max": "50000 100000\n", "a__b__cpu_max": "max 100000\n"},
        [*range(16)],
        {},
        (1, 1),
    ),
    "a limit above the cores": (
        {"cgroup": "0::/\n", "cpu_max": "1200000 100000\n"},
        [*range(16)],
        {},
        (12, OWN),
    ),
    "no limit": ({"cgroup": "0::/\n", "cpu_max": "max 100000\n"}, [*range(16)], {}, (16, OWN)),
    "control groups of version 1": (
        {"cgroup": "4:memory:/other\n3:cpu,cpuacct:/pod\n", **V1},
        [*range(16)],
        {},
        (3, 3),
    ),
    "what is no control group": ({"cgroup": "nonsense\n"}, [*range(16)], {}, (16, OWN)),
    "two ranks of MPICH": ({}, [*range(16)], {"MPI_LOCALNRANKS": "2"}, (8, 4)),
    "four of Open MPI": ({}, [*range(16)], {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (4, 2)),
    "ranks with cores of their own": ({}, [0, 8], {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (2, 1)),
    "more ranks than cores": ({}, [*range(16)], {"LOCAL_WORLD_SIZE": "64"}, (1, 1)),
    "one rank": ({}, [*range(16)], {"MPI_LOCALNRANKS": "1"}, (16, OWN)),
    "another program's variable": ({}, [*range(16)], {"LOCAL_WORLD_SIZE": "two"}, (16, OWN)),
}


@pytest.mark.parametrize("case", CASES)
def test_cores_that_a_process_may_use(case: str, tmp_path: Path) -> None:
    files, cpus, environment, expected = CASES[case]
    root = machine(tmp_path, **files)
    assert cores.cores_of(cpus, 16, environment, root) == expected


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert cores.cores_of(range(4), 4, {}, tmp_path) == (4, OWN)
    assert cores.cores_of([0, 1], 4, {}, tmp_path) == (2, 2)


def test_sessions_have_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps and of evaluation; options of the user stay as they are."""
    seen: list[int] = []
    begin = onnxruntime.InferenceSession.__init__

    def spy(session: Any, model: Any, sess_options: Any = None, *more: Any, **named: Any) -> None:
        options = sess_options or onnxruntime.SessionOptions()
        seen.append(options.intra_op_num_threads)
        begin(session, model, sess_options, *more, **named)

    from ortops.engine.training import evaluation

    for module in (onnxruntime_sessions, evaluation):
        monkeypatch.setattr(module, "session_threads", lambda: 3)
    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", spy)
    built = ortops.build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    for given, threads in ((None, 3), (options, 2)):
        session = ortops.TrainingSession(built, sess_options=given)
        session.step(labelled((6,)))
        session.evaluate(labelled((6,)))
        assert len(seen) >= 2
        assert set(seen) == {threads}
        seen.clear()
    assert Settings().threads == cores.usable_cores()


def test_memory_of_control_groups(tmp_path: Path) -> None:
    """What the system has, and the limits of groups of both versions and of those around them."""
    assert usable_memory(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert usable_memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n0::/outer/inner\n")
    for place, text in {
        "outer/memory.max": "7000000",
        "outer/inner/memory.max": "max",
        "memory/job/memory.limit_in_bytes": "9223372036854771712",
    }.items():
        file = tmp_path / "sys/fs/cgroup" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert usable_memory(tmp_path) == 7000000
    (tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes").write_text("6000000")
    assert usable_memory(tmp_path) == 6000000
