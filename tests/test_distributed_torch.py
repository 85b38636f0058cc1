"""`ortops.distributed` over torch.distributed: two real processes, launched by torchrun.

The file is also the program that each process runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from training_models import Arrays, affine, affine_batch, classifier, labelled, normalizing

import ortops
from ortops import TrainingSession
from ortops.callbacks import Callback, Checkpoint, EarlyStopping
from ortops.distributed import join
from ortops.losses import SoftmaxCrossEntropy

ROOT = Path(__file__).parents[1]
SGD = ortops.optimizers.SGD(0.1, momentum=0.9)


def build(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    settings: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": SGD, **options}
    return ortops.build_training_model(model, **settings)


def in_16_bits(kind: int) -> onnx.ModelProto:
    from test_precision import half

    return build(half(affine(), kind), loss="MeanSquaredError", optimizer="SGD")


def batch_of_16_bits(kind: int) -> Arrays:
    from test_precision import HALVES

    return {name: array.astype(HALVES[kind]) for name, array in affine_batch(29).items()}


def two_entries() -> onnx.ModelProto:
    first = build(classifier(), trainable=["w2"])
    loss = SoftmaxCrossEntropy(label_smoothing=0.2)
    return ortops.add_training(first, loss=loss, optimizer="SGD", trainable=["w1"], name="other")


DATA = labelled((6,), rows=29)
"""The last batch of 8 rows has 5: parts of 2 and 3 rows."""
IMAGES = labelled((1, 4, 4), rows=13)
WEIGHTS = np.arange(29) % 4 / 2

FitOptions = dict[str, Any]
Case = tuple[Callable[[], onnx.ModelProto], Arrays, FitOptions, dict[str, Any]]

CASES: dict[str, Case] = {
    "accumulated and clipped": (
        lambda: build(classifier(), clip_norm=0.1),
        *(DATA, {"accumulate": 2}, {}),
    ),
    "float64": (
        lambda: build(affine(dtype=np.float64), loss="MeanSquaredError"),
        *(affine_batch(29, dtype=np.float64), {}, {}),
    ),
    "float16": (
        lambda: in_16_bits(TensorProto.FLOAT16),
        *(batch_of_16_bits(TensorProto.FLOAT16), {}, {}),
    ),
    "bfloat16": (
        lambda: in_16_bits(TensorProto.BFLOAT16),
        *(batch_of_16_bits(TensorProto.BFLOAT16), {}, {}),
    ),
    "weights of rows": (
        lambda: build(classifier(), loss=SoftmaxCrossEntropy(sample_weight="weight")),
        *(DATA, {"sample_weight": WEIGHTS, "shuffle": False}, {}),
    ),
    "adapters": (
        lambda: build(ortops.lora.add(classifier(), rank=2, alpha=2), trainable=None),
        *(DATA, {}, {}),
    ),
    "kernels in Python": (lambda: build(classifier()), DATA, {}, {"kernels": "python"}),
    "statistics": (lambda: build(normalizing(), seed=3), IMAGES, {"batch_size": 6}, {}),
    "several entries": (two_entries, DATA, {"entries": {"main": 1, "other": 2}}, {}),
}
DRAWS = ("statistics",)
"""Cases that differ from one process: they draw, and normalize each part by itself."""


def trained(name: str, joined: Callable[[TrainingSession], TrainingSession]) -> TrainingSession:
    """Trains a case."""
    make, data, options, settings = CASES[name]
    session = joined(TrainingSession(make(), **settings))
    options = {"batch_size": 8, "epochs": 2, "progress": False, **options}
    session.fit(data, **options)
    return session


class Die(Callback):
    """Kills a process at a step, once."""

    def on_step(self, record: Any, session: Any) -> None:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and session.rank == 1 and record.step == 5:
            os.kill(os.getpid(), 9)


def main(folder: Path, how: str) -> None:
    """What each process does: all that ends well in one start of torchrun, which takes longer."""
    if how == "dies":
        _broken(folder, how, [Die()])
        return
    import torch.distributed as group

    _cases(folder)
    _broken(folder, "unbroken", [])
    group.barrier()
    group.destroy_process_group()
    _late(folder, int(os.environ["RANK"]))


def _keep(folder: Path, name: str, session: TrainingSession) -> None:
    np.savez(folder / f"{name}.{os.environ['RANK']}.npz", **_plain(dict(session.state)))


def _cases(folder: Path) -> None:
    """Trains all cases, and until a loss grows."""
    rank = int(os.environ["RANK"])
    for name in CASES:
        _keep(folder, name, trained(name, lambda session: join(session, "torch")))
    held = labelled((6,), rows=8, seed=1)
    model = build(classifier(), optimizer=ortops.optimizers.SGD(3.0))
    session = join(TrainingSession(model), ortops.distributed.TorchCommunicator())
    stopping = EarlyStopping(2, restore_best=folder / "best.onnx")
    history = session.fit(
        DATA, epochs=30, batch_size=4, validation=held, callbacks=[stopping], progress=False
    )
    found = session.evaluate(held, metrics=["accuracy"])
    session.save(folder / f"saved.{rank}.onnx")
    losses = np.array([epoch["validation_loss"] for epoch in history])
    np.savez(folder / f"stopped.{rank}.npz", losses=losses, **found)


def _broken(folder: Path, how: str, callbacks: list[Callback]) -> None:
    """Trains a model with dropout, from its last file where there is one."""
    file = folder / f"{how}.onnx"
    session = join(TrainingSession(file if file.exists() else folder / "dropping.onnx"), "torch")
    options: dict[str, Any] = {"epochs": 3, "batch_size": 8, "progress": False}
    session.fit(DATA, resume=True, callbacks=[Checkpoint(file, every=3), *callbacks], **options)
    _keep(folder, how, session)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (folder / f"{how}.{os.environ['RANK']}.txt").write_text(restarts)


def _late(folder: Path, rank: int) -> None:
    """Rank 1 makes fewer steps, and stays."""
    import datetime

    import torch.distributed as group

    group.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    session = join(TrainingSession(folder / "model.onnx"), "torch")
    alone = group.new_group([0])
    said = []
    for step in range(3 if rank == 0 else 1):
        try:
            session.step(DATA)
        except ortops.OrtopsError as error:
            said.append(f"{step}: {error}")
    said.append(f"has made {session.steps_done}")
    if rank == 1:
        try:
            ortops.distributed.TorchCommunicator(alone)
        except ortops.OrtopsError as error:
            said.append(str(error))
    else:
        said.append(f"size {ortops.distributed.TorchCommunicator(alone).size}")
    (folder / f"late.{rank}.txt").write_text("\n".join(said))
    while not (folder / "late.0.txt").exists():
        time.sleep(0.05)


def _plain(arrays: Arrays) -> Arrays:
    """Returns arrays that NumPy can write: those of bfloat16 as float32."""
    return {n: a.astype(np.float32) if a.dtype.kind == "V" else a for n, a in arrays.items()}


def launch(folder: Path, how: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
    command += ["--nproc-per-node", "2", __file__, str(folder), how]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def read(folder: Path, name: str) -> list[Arrays]:
    return [dict(np.load(folder / f"{name}.{rank}.npz")) for rank in (0, 1)]


def same(first: Arrays, second: Arrays) -> bool:
    return first.keys() == second.keys() and all(
        first[name].tobytes() == second[name].tobytes() for name in first
    )


def write_models(folder: Path) -> None:
    onnx.save(build(classifier()), folder / "model.onnx")
    dropping = build(classifier(dropout=0.5), optimizer="Adam", seed=2)
    onnx.save(dropping, folder / "dropping.onnx")


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two processes that ended well."""
    folder = tmp_path_factory.mktemp("ended")
    write_models(folder)
    result = launch(folder, "ends")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.slow
@pytest.mark.torch
def test_processes_of_torchrun_train_as_one(ended: Path) -> None:
    """Both have the same bits, and one process with the whole batches has them within rounding."""
    wrong = []
    for name in CASES:
        first, second = read(ended, name)
        if not same(first, second):
            wrong.append(f"{name}: the ranks differ")
        if name in DRAWS:
            continue
        alone = _plain(dict(trained(name, lambda session: session).state))
        tolerance = 2e-3 if "float16" in name else 3e-6
        for key, array in alone.items():
            if not np.allclose(first[key], array, rtol=tolerance, atol=tolerance):
                wrong.append(f"{name}: {key} is {first[key]}, not {array}")
    assert not wrong, "\n".join(wrong)
    assert {"best.onnx", "saved.0.onnx"} == {
        file.name for pattern in ("best*", "saved*") for file in ended.glob(pattern)
    }
    stopped = read(ended, "stopped")
    assert same(*stopped)
    assert len(stopped[0]["losses"]) < 30
    best = stopped[0]["losses"].min()
    np.testing.assert_allclose(stopped[0]["loss"], best, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.torch
def test_a_killed_rank_is_restarted_from_the_checkpoint(ended: Path, tmp_path: Path) -> None:
    """torchrun starts both again, and they have the bits of a training that was not broken."""
    write_models(tmp_path)
    result = launch(tmp_path, "dies", "--max-restarts", "1")
    assert result.returncode == 0, result.stderr
    found = {}
    for how, folder in {"unbroken": ended, "dies": tmp_path}.items():
        found[how] = read(folder, how)
        restarts = [(folder / f"{how}.{rank}.txt").read_text() for rank in (0, 1)]
        assert restarts == ["1" if how == "dies" else "0"] * 2
    assert same(*found["unbroken"])
    assert all(same(a, b) for a, b in zip(found["unbroken"], found["dies"], strict=True))
    assert found["dies"][0]["step"] == 12


@pytest.mark.slow
@pytest.mark.torch
def test_a_late_rank_is_an_error_after_the_timeout_of_the_group(ended: Path) -> None:
    first, second = ((ended / f"late.{n}.txt").read_text().splitlines() for n in (0, 1))
    start = "1: join: sum of TorchCommunicator failed in rank 0 (RuntimeError: "
    assert first[0].startswith(start)
    assert first[1].startswith("2: join: an earlier exchange was interrupted, so the ranks are out")
    assert first[2:] == ["has made 1", "size 1"]
    assert second[0] == "has made 1"
    assert second[1].startswith("join: process 1 does not belong to the process group; call join ")


if __name__ == "__main__":
    sys.modules["transformers"] = None  # type: ignore[assignment]  # as tests/without_torch
    main(Path(sys.argv[1]), sys.argv[2])
