"""The trainer in C, which reads what `export_step` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from models import digits
from models.lenet import lenet
from ortops import TrainingSession, build_training_model, export_step
from ortops.graph.safetensors import write_safetensors
from ortops.optimizers import Adam8bit
from tests.c.trainer import compile_trainer
from tests.training_models import assert_same_arrays

pytestmark = pytest.mark.c

ROOT = Path(__file__).parents[1]
BATCH, STEPS = 16, 12
ADAM8BIT = Adam8bit(min_8bit_size=256)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_trainer(
        tmp_path_factory.mktemp("c"), "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror"
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    net = lenet(channels=(4, 8), hidden=16, dropout_ratio=0.25)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer="Adam")
    export_step(model, folder)
    images, labels = (array[: 5 * BATCH + 3] for array in digits.load().train)
    write_safetensors(folder / "data.safetensors", {"images": images, "labels": labels})
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path, dirs_exist_ok=True))


def run(program: Path, folder: Path, *, batch: object = BATCH, steps: object = STEPS) -> list[str]:
    """Runs the trainer; returns the lines that it prints, or raises what it says of an error."""
    arguments = [folder, folder / "data.safetensors", str(batch), str(steps), folder / "out.onnx"]
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        assert done.returncode == 1
        assert not (folder / "out.onnx").exists()
        raise ValueError(done.stderr)
    return done.stdout.splitlines()


def batches() -> list[dict[str, np.ndarray]]:
    images, labels = digits.load().train
    parts = [slice(i % 5 * BATCH, (i % 5 + 1) * BATCH) for i in range(STEPS)]
    return [{"images": images[part], "labels": labels[part]} for part in parts]


@pytest.mark.slow
def test_it_trains_as_python_does_and_python_goes_on(program: Path, folder: Path) -> None:
    lines = run(program, folder)
    found = [
        float(re.fullmatch(rf"step {i + 1} loss (\S+)", line)[1]) for i, line in enumerate(lines)
    ]
    session = onnxruntime.InferenceSession(folder / "step.onnx", providers=["CPUExecutionProvider"])
    described = json.loads((folder / "step.json").read_text())
    state = dict(TrainingSession(folder / "model.onnx").state)
    assert {each["next"] for each in described["variables"].values()} > {None}
    expected = []
    for batch in batches():
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(None, batch | state), strict=True))
        expected.append(results[described["step"]["loss"]])
        state |= {n: results[v["next"]] for n, v in described["variables"].items() if v["next"]}
    np.testing.assert_array_equal(np.float32(found), expected)
    trained = TrainingSession(folder / "out.onnx")
    assert trained.steps_done == STEPS
    assert_same_arrays(trained.state, state)
    in_python = TrainingSession(folder / "model.onnx")
    of_session = [in_python.step(batch)["loss"] for batch in batches()]
    np.testing.assert_allclose(found, of_session, rtol=1e-5)
    onnx.checker.check_model(folder / "out.onnx", full_check=True)
    assert float(trained.step(batches()[0])["loss"]) < found[0]


@pytest.mark.slow
def test_it_keeps_moments_of_8_bits(program: Path, tmp_path: Path) -> None:
    """As onnxruntime computes the step in Python, bit for bit."""
    net = lenet(channels=(4, 8), hidden=16)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer=ADAM8BIT)
    export_step(model, tmp_path)
    images, labels = (array[: 5 * BATCH] for array in digits.load().train)
    write_safetensors(tmp_path / "data.safetensors", {"images": images, "labels": labels})
    run(program, tmp_path)
    session = onnxruntime.InferenceSession(
        tmp_path / "step.onnx", providers=["CPUExecutionProvider"]
    )
    variables = json.loads((tmp_path / "step.json").read_text())["variables"]
    state = dict(TrainingSession(tmp_path / "model.onnx").state)
    for batch in batches():
        names = [output.name for output in session.get_outputs()]
        results = dict(zip(names, session.run(None, batch | state), strict=True))
        state |= {n: results[v["next"]] for n, v in variables.items() if v["next"]}
    trained = TrainingSession(tmp_path / "out.onnx")
    assert_same_arrays(trained.state, state)
    codes = [a for a in trained.state.values() if a.dtype == np.uint8]
    assert len(codes) == 4
    assert all(len(np.unique(array)) > 50 for array in codes)


@pytest.mark.slow
def test_no_step_writes_the_same_file(program: Path, folder: Path) -> None:
    assert run(program, folder, steps=0) == []
    assert (folder / "out.onnx").read_bytes() == (folder / "model.onnx").read_bytes()


def described(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / "step.json").read_text())
        change(content)
        (folder / "step.json").write_text(json.dumps(content))

    return edit


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def data(**arrays: np.ndarray) -> Callable[[Path], object]:
    given = {"images": np.zeros((32, 1, 8, 8), np.float32), "labels": np.zeros(32, np.int64)}
    return lambda folder: write_safetensors(folder / "data.safetensors", given | arrays)


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut("step.json", 2000), "JSON ends unexpectedly"),
        (cut("step.json", -1), "JSON ends unexpectedly"),
        (cut("step.json", 0), "invalid JSON: "),
        (cut("model.onnx", 5000), "checksum differs from step.json: model.onnx"),
        (cut("step.onnx", 5000), "checksum differs from step.json: step.onnx"),
        (cut("data.safetensors", 4), "not a safetensors file: .*data.safetensors"),
        (cut("data.safetensors", 500), "the data end unexpectedly: "),
        (lambda folder: (folder / "step.json").unlink(), "cannot read .*step.json"),
        (
            described(lambda it: it.update(version=2)),
            "must have the format 'ortops.step', version 1",
        ),
        (described(lambda it: it.update(format="others")), "must have the format 'ortops.step'"),
        (described(lambda it: it.pop("step")), "missing key: step"),
        (described(lambda it: it["step"].update(loss=None)), "has no loss"),
        (
            described(lambda it: it["variables"]["conv1.weight"].update(type="int4")),
            "unsupported type: int4",
        ),
        (
            described(lambda it: it["variables"]["conv1.weight"].update(places=[])),
            "model.onnx does not store conv1.weight",
        ),
        (
            described(lambda it: it["variables"]["conv1.weight"].update(shape=[1])),
            "do not belong together: conv1.weight",
        ),
        (
            described(lambda it: it["variables"]["conv1.weight"].update(places=[[10**9, 144]])),
            "do not belong together: conv1.weight",
        ),
        (described(lambda it: it["variables"].update({'a"b': {}})), "not a string without escapes"),
        (
            described(lambda it: it["variables"].pop("conv1.bias")),
            "step.json and step.onnx do not",
        ),
        (data(labels=np.zeros(32, np.int32)), "onnxruntime: Unexpected input data type"),
        (
            data(images=np.zeros((32, 8, 8), np.float32)),
            "onnxruntime: Invalid rank for input: images",
        ),
        (
            data(images=np.zeros((32, 1, 8, 9), np.float32)),
            "onnxruntime: Got invalid dimensions for input: images",
        ),
        (data(images=np.zeros((8, 1, 8, 8), np.float32)), "fewer rows than a batch: images"),
        (data(labels=np.zeros(31, np.int64)), "feeds have different numbers of rows: labels"),
    ],
)
def test_what_does_not_fit_is_refused(
    program: Path, folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=rf"^train: .*{message}"):
        run(program, folder)


@pytest.mark.slow
def test_wrong_arguments_are_refused(program: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"not an integer >= 0: many"):
        run(program, folder, batch="many")
    with pytest.raises(ValueError, match=r"BATCH must be an integer >= 1, got 0"):
        run(program, folder, batch=0)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 1
    assert "usage: train FOLDER DATA.safetensors BATCH STEPS OUTPUT.onnx" in done.stderr
