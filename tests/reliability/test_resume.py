"""A training that is interrupted, or killed, goes on from its file as if it had never stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from attacks import KINDS, SOAK, VICTIMS, read, read_model, run_code

import ortops
from models import mlp

KILLED = """
    import os, pathlib, random, signal, time
    import attacks

    kind = attacks.VICTIMS[{victim!r}]
    if kind.kernels == "python":
        import onnxruntime_extensions  # takes a second, which the children need not spend each
    path = pathlib.Path("saved.onnx")
    rng = random.Random(0)
    for number in range({tries}):
        begun, told = os.pipe()
        child = os.fork()  # before there is a session, so that the child has its own
        if not child:
            session = kind.open(path if path.exists() else None)
            done = kind.count(session)
            for done in range(done, attacks.LONGEST):
                session.save(path)
                os.write(told, bytes([done % 256]))
                session.step(kind.batch(done))
            os._exit(0)
        os.read(begun, 1)
        time.sleep(rng.uniform(0, {seconds}))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        seen = os.read(begun, 10**6)
        os.close(begun)
        whole = kind.whole_file(path)
        assert not seen or (whole - seen[-1]) % 256 in (0, 1), (whole, seen[-1])
        if whole > attacks.LONGEST - 100:
            path.unlink()
    print("killed", number + 1)
"""


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
@pytest.mark.parametrize("victim", KINDS)
def test_a_kill_leaves_the_last_file_or_the_next(victim: str) -> None:
    """At a random moment of saving and stepping; the next process goes on from that file."""
    tries = 3 * SOAK
    code = KILLED.format(victim=victim, tries=tries, seconds=0.05)
    assert run_code(code, timeout=60 + 10 * tries) == f"killed {tries}\n"


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("victim", KINDS)
def test_a_session_goes_on_from_the_file_of_any_step(victim: str, tmp_path: Path) -> None:
    kind = VICTIMS[victim]
    steps = 3 if kind.shape[0] > 100 else 6 * SOAK
    session = kind.open()
    for done in range(steps):
        session.save(tmp_path / "saved.onnx")
        resumed = kind.open(tmp_path / "saved.onnx")
        assert kind.count(resumed) == done
        resumed.step(kind.batch(done))
        assert kind.count(resumed) == done + 1
        resumed.run_steps(kind.batches(done + 1, 3))
        assert kind.count(resumed) == done + 4
        session.step(kind.batch(done))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["onnx", "python"])
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "Adagrad", "Momentum"])
def test_epochs_from_files_are_those_of_one_training(
    optimizer: str, kernels: str, tmp_path: Path
) -> None:
    """To the last bit: with a last batch that is smaller, in an order that is shuffled."""
    rng = np.random.default_rng(7)
    data = {
        "images": rng.standard_normal((23, 6), np.float32),
        "labels": rng.integers(0, 3, 23),
    }
    model = ortops.build_training_model(
        mlp.mlp((6, 5, 3)), loss="SoftmaxCrossEntropy", optimizer=optimizer
    )
    straight = ortops.TrainingSession(model, kernels=kernels)
    straight.fit(data, epochs=4, batch_size=5, seed=3, progress=False)
    path = tmp_path / "saved.onnx"
    onnx.save(model, path)
    for _ in range(4):
        part = ortops.TrainingSession(path, kernels=kernels)
        part.fit(data, epochs=1, batch_size=5, seed=3, progress=False)
        part.save(path)
    found, expected = read(path), read_model(straight.model())
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert array.tobytes() == found[name].tobytes(), name
