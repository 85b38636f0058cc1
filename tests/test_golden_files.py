"""Files that versions wrote: the code of today reads them, and continues from them.

tests/golden/README.md says what the files are. What a file holds (variables, history, position) is
compared bit for bit. So is what follows where no number needs rounding ("exact"): products and sums
of small integers and powers of two are the same in any order. Elsewhere another processor or
another onnxruntime may sum in another order, and what follows is compared within a few units in the
last place. Other rows in a batch, or other elements that Dropout drops, change losses by far more.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from chromium import MODULES, WEB
from running import CPU, plain_session, run_by_name
from safetensors import safe_open
from test_export_step import Driver

import ortops
from ortops import TrainingSession, callbacks, lora
from ortops.cli import main
from ortops.graph.safetensors import read_safetensors

Arrays = Mapping[str, np.ndarray]

GOLDEN = Path(__file__).parent / "golden"
ARCHIVES = sorted(GOLDEN.glob("*/*.zip"))
DRIVER = Path(ortops.__file__).parent / "web" / "ortops.mjs"


class Tolerance(NamedTuple):
    """How far numbers may be from those of the version that wrote a file."""

    relative: float
    absolute: float


NONE = Tolerance(0, 0)
ULPS = Tolerance(1e-5, 1e-6)
"""A few units in the last place of float32, over a few steps, for numbers of the order of 1."""

EIGHT_BITS = Tolerance(2e-2, 5e-2)
"""Some versions of onnxruntime make one node of a DequantizeLinear of 4 bits and the MatMul behind
it, which on some processors rounds the other factor to 8 bits."""


class Golden(NamedTuple):
    """Something that an earlier version wrote.

    Attributes:
        archive: The archive that it is in.
        name: What it is called there.
    """

    archive: Path
    name: str

    def __str__(self) -> str:
        return f"{self.archive.parent.name}-{self.archive.stem}-{self.name}"

    @property
    def tolerance(self) -> Tolerance:
        """How far numbers may be off where they are rounded."""
        return EIGHT_BITS if "int4_dequantize" in self.name else ULPS


class Expected(NamedTuple):
    """What the version that wrote a file made of it.

    Attributes:
        arrays: Arrays by name; those of bfloat16 as their bits.
        about: What else there is to know.
    """

    arrays: Arrays
    about: dict[str, Any]

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """Returns the arrays whose names begin with a prefix, without it."""
        names = (name for name in self.arrays if name.startswith(f"{prefix}/"))
        return {name.removeprefix(f"{prefix}/"): self.arrays[name] for name in names}

    def batches(self) -> list[dict[str, np.ndarray]]:
        """Returns the batches of the following steps, as the model takes them."""
        found = []
        while batch := self.part(f"feeds/{len(found)}"):
            bits = [n for n in batch if f"feeds/{len(found)}/{n}" in self.about["bfloat16"]]
            found.append(batch | {name: as_bfloat16(batch[name]) for name in bits})
        return found


def members(pattern: str, part: str = "*") -> list[Golden]:
    """Returns what is in the archives, by a pattern of paths with a group that is the name."""
    found = []
    for archive in ARCHIVES:
        if Path(archive.name).match(f"{part}.zip"):
            with zipfile.ZipFile(archive) as file:
                matches = (re.fullmatch(pattern, name) for name in file.namelist())
                found += [Golden(archive, match[1]) for match in matches if match]
    return found


TRAINABLE = members(r"(\w+)\.expected\.safetensors")
RESUMED = members(r"(\w+)/expected\.safetensors", "resume")
COMMANDS = members(r"(expected)\.safetensors", "command_line")
ADAPTERS = members(r"(\w+)/expected\.safetensors", "lora")
EXPORTED = members(r"(exported_\w+)/expected\.safetensors", "steps")
STEP_GRAPHS = members(r"(step_graph)/expected\.safetensors", "steps")


# Older versions of onnxruntime have no kernel of Cos for float64.
NEEDS_COSINE = pytest.mark.needs("onnxruntime>=1.29")
COSINES = ("cosine", "one_cycle", "warmup_cosine")


def each(found: list[Golden]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "golden",
        [
            pytest.param(golden, id=str(golden), marks=[NEEDS_COSINE] * (golden.name in COSINES))
            for golden in found
        ],
    )


Unpack = Callable[[Golden], Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """Unpacks an archive, and returns its folder."""

    def unpacked(golden: Golden) -> Path:
        with zipfile.ZipFile(golden.archive) as file:
            file.extractall(tmp_path)
        return tmp_path

    return unpacked


def read(path: Path) -> Expected:
    """Reads what is expected, with the library of the format."""
    with safe_open(path, "numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Expected(arrays, json.loads(file.metadata()["about"]))


def as_bfloat16(bits: np.ndarray) -> np.ndarray:
    return bits.view(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))


def is_bfloat16(array: np.ndarray) -> bool:
    return array.dtype.name == "bfloat16"


def assert_same_bits(found: Mapping[str, Any], expected: Arrays) -> None:
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        array = np.asarray(found[name])
        array = array.view(np.uint16) if is_bfloat16(array) else array
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
        assert array.tobytes() == wanted.tobytes(), f"{name}: {array} is not {wanted}"


def assert_as_expected(found: Mapping[str, Any], expected: Arrays, tolerance: Tolerance) -> None:
    """Asserts that arrays are those of the version that wrote the file."""
    if tolerance == NONE:
        assert_same_bits(found, expected)
        return
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        assert np.asarray(found[name]).dtype == wanted.dtype, name
        np.testing.assert_allclose(found[name], wanted, *tolerance, err_msg=name)


def assert_same_numbers(found: Any, expected: Any, tolerance: Tolerance) -> None:
    """The same for numbers by name."""
    assert found == pytest.approx(expected, rel=tolerance.relative, abs=tolerance.absolute)


# ----------------------------------------------------------------------------------- the archives


def test_there_are_files_of_every_kind() -> None:
    found = {golden.name for golden in TRAINABLE}
    assert found >= {name.lower() for name in ortops.optimizers.OPTIMIZERS}
    assert found >= {"own_rule", "one_cycle", "dropout_batch_normalization", "two_entries"}
    assert found >= {"two_losses", "lifted_weights", "external_data", "from_opset_11", "float16"}
    assert found >= {"adam_after_correction", "part_trained", "quantile", "smoothed_weighted"}
    for kind in (RESUMED, COMMANDS, ADAPTERS, EXPORTED, STEP_GRAPHS):
        assert kind


def test_no_archive_has_changed() -> None:
    lines = (GOLDEN / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    found = {
        path.relative_to(GOLDEN).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in ARCHIVES
    }
    assert found == {name: digest for digest, name in (line.split("  ") for line in lines)}


# -------------------------------------------------------------------------------- trainable files


@pytest.mark.nightly(7)
@pytest.mark.quick(1)
@each(TRAINABLE)
def test_a_trainable_file_goes_on(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden)
    expected = read(folder / f"{golden.name}.expected.safetensors")
    about = expected.about
    tolerance = NONE if about["exact"] else golden.tolerance
    batches = expected.batches()
    session = TrainingSession(folder / f"{golden.name}.onnx")
    state = expected.part("state")

    assert_same_bits(session.state, state)
    assert session.steps_done == about["steps_done"]
    assert session.peak_learning_rate == about["learning_rate"]
    assert list(session.inputs) == about["inputs"]
    assert list(session.parameters) == about["parameters"]

    assert_same_numbers(session.evaluate(batches[0]), about["evaluated"], tolerance)
    if about["averages"] is not None:
        averages = session.evaluate(batches[0], ema=True)
        assert_same_numbers(averages, about["averages"], tolerance)
    predicted = expected.part("predicted")
    found = session.predict(batches[0], outputs=list(predicted))
    assert_as_expected(found, predicted, tolerance)

    shown = [session.step(batch) for batch in batches]
    assert sorted(shown[0]) == about["outputs"]
    losses = np.array([step["loss"] for step in shown])
    assert_as_expected({"loss": losses}, {"loss": expected.arrays["loss"]}, tolerance)
    assert_as_expected(session.state, expected.part("after"), tolerance)
    assert session.steps_done == about["steps_done_after"]

    session.reset()
    assert_same_bits(session.state, state | expected.part("reset"))
    assert session.steps_done == about["steps_done_reset"]


def runs_anywhere(golden: Golden) -> bool:
    """Whether stock onnxruntime has kernels for what is in a trainable file."""
    return golden.name not in ("bfloat16", "gradient_in_graph")


@pytest.mark.quick(2)
@each([golden for golden in TRAINABLE if runs_anywhere(golden)])
def test_a_trainable_file_runs_in_stock_onnxruntime(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden)
    expected = read(folder / f"{golden.name}.expected.safetensors")
    path = folder / f"{golden.name}.onnx"
    predicted = expected.part("predicted")
    tolerance = NONE if expected.about["exact"] else golden.tolerance
    found = run_by_name(path, expected.batches()[0])
    assert_as_expected(found, predicted, tolerance)
    inference = TrainingSession(path).inference_model()
    assert not inference.training_info
    found = run_by_name(inference, expected.batches()[0])
    assert_as_expected(found, predicted, tolerance)


@each([golden for golden in TRAINABLE if golden.name == "from_opset_11"])
def test_an_original_gets_the_weights(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden)
    expected = read(folder / f"{golden.name}.expected.safetensors")
    session = TrainingSession(folder / f"{golden.name}.onnx")
    found = session.inference_model(folder / f"{golden.name}.original.onnx")
    assert found.opset_import[0].version == 11
    outputs = run_by_name(found, expected.batches()[0])
    assert_as_expected(outputs, expected.part("predicted"), golden.tolerance)
    (weight,) = found.graph.initializer
    assert_same_bits({"w": onnx.numpy_helper.to_array(weight)}, {"w": expected.arrays["state/w"]})


# --------------------------------------------------------------------------- trainings to resume


class Losses(callbacks.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, record: Any, session: Any) -> None:
        self.losses.append(record.values["loss"])


def without_times(history: list[Mapping[str, float]]) -> Iterator[dict[str, float]]:
    for entry in history:
        yield {name: value for name, value in entry.items() if name != "seconds"}


def assert_same_history(found: Any, about: dict[str, Any]) -> None:
    """Asserts that the epochs of the file are there as they were, and those after as expected."""
    wanted = about["history_after"]
    assert len(found) == len(wanted)
    before = len(about["history"])
    assert list(found)[:before] == wanted[:before] == about["history"]
    for entry, other in zip(without_times(found), without_times(wanted), strict=True):
        assert_same_numbers(entry, other, NONE if about["exact"] else ULPS)


def assert_same_log(path: Path, about: dict[str, Any]) -> None:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(about["log"])
    for row, wanted in zip(rows, about["log"], strict=True):
        row.pop("seconds")
        numbers = {name: float(value) for name, value in wanted.items()}
        found = {name: float(value) for name, value in row.items()}
        assert_same_numbers(found, numbers, ULPS)


@pytest.mark.quick(1)
@each(RESUMED)
def test_a_training_is_resumed(
    golden: Golden, unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpack(golden) / golden.name
    monkeypatch.chdir(folder)
    expected = read(folder / "expected.safetensors")
    about = expected.about
    session = TrainingSession("trained.onnx")
    assert_same_bits(session.state, expected.part("state"))
    assert list(session.history) == about["history"]
    assert session.steps_done == about["steps_done"]

    rows, size = expected.part("rows"), about["fit"]["batch_size"]
    count = len(rows["x"])
    batches = [{n: a[at : at + size] for n, a in rows.items()} for at in range(0, count, size)]
    first = about["schedule"]
    recorded = Losses()
    named = [getattr(callbacks, name)(**given) for name, given in about["callbacks"]]
    history = session.fit(
        batches if about["batches"] else rows,
        **about["fit"],
        validation=expected.part("validation") or None,
        schedule=None if first is None else lambda done: first * (1 - done),
        callbacks=[*named, recorded],
        progress=False,
        resume=True,
    )

    tolerance = NONE if about["exact"] else ULPS
    losses = {"loss": np.array(recorded.losses)}
    assert_as_expected(losses, {"loss": expected.arrays["loss"]}, tolerance)
    assert_as_expected(session.state, expected.part("after"), tolerance)
    assert session.steps_done == about["steps_done_after"]
    assert_same_history(history, about)
    if about["log"] is not None:
        assert_same_log(folder / "log.csv", about)
    if best := expected.part("best"):
        assert_as_expected(TrainingSession("best.onnx").state, best, tolerance)


@pytest.mark.slow
@each(COMMANDS)
def test_the_command_line_resumes(
    golden: Golden, unpack: Unpack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpack(golden)
    monkeypatch.chdir(folder)
    expected = read(folder / "expected.safetensors")
    about = expected.about
    session = TrainingSession("trained.onnx")
    assert_same_bits(session.state, expected.part("state"))
    assert list(session.history) == about["history"]
    assert session.steps_done == about["steps_done"]

    assert main([*about["command"], "--resume"]) == 0
    session = TrainingSession("trained.onnx")
    assert_as_expected(session.state, expected.part("after"), golden.tolerance)
    assert session.steps_done == about["steps_done_after"]
    assert_same_history(session.history, about)
    assert_same_log(folder / "log.csv", about)
    points = {"points": expected.arrays["points"]}
    found = run_by_name("trained.onnx", points)["probabilities"]
    np.testing.assert_allclose(found, expected.arrays["predicted"], *golden.tolerance)


# -------------------------------------------------------------------------------------- adapters


def adapter_values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    tensors = (tensor for tensor in model.graph.initializer if ".lora_" in tensor.name)
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}


@each(ADAPTERS)
def test_an_adapter_is_loaded(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden) / golden.name
    expected = read(folder / "expected.safetensors")
    arrays = expected.arrays
    model = lora.load_adapter(folder / "with_adapter.onnx", folder / "trained.onnx_adapter")
    assert_same_bits(adapter_values(model), expected.part("adapter"))
    found = run_by_name(model, {"x": arrays["x"]})
    assert_as_expected(found, {"y": arrays["adapted"]}, golden.tolerance)


@each(ADAPTERS)
def test_stock_onnxruntime_serves_an_adapter(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden) / golden.name
    arrays = read(folder / "expected.safetensors").arrays
    adapter, options = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(folder / "trained.onnx_adapter"))
    options.add_active_adapter(adapter)
    session = plain_session(folder / "with_adapter.onnx")
    feeds = {"x": arrays["x"]}
    np.testing.assert_allclose(session.run(None, feeds)[0], arrays["base"], *golden.tolerance)
    np.testing.assert_allclose(
        session.run(None, feeds, options)[0], arrays["adapted"], *golden.tolerance
    )


@each(ADAPTERS)
def test_a_folder_of_peft_is_read(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden) / golden.name
    expected = read(folder / "expected.safetensors")
    model = lora.from_peft(folder / "base.onnx", folder / "peft")
    wanted = expected.part("adapter")
    assert_same_bits(adapter_values(model), wanted)
    found = run_by_name(model, {"x": expected.arrays["x"]})
    assert_as_expected(found, {"y": expected.arrays["adapted"]}, golden.tolerance)


# -------------------------------------------------------------------------------- exported steps


@pytest.mark.slow
@each(EXPORTED)
def test_a_driver_trains_from_an_exported_folder(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden) / golden.name
    expected = read(folder / "expected.safetensors")
    assert json.loads((folder / "step.json").read_text())["format"] == "ortops.step"
    driver = Driver(folder)
    assert_same_bits(driver.state, expected.part("state"))
    batches = expected.batches()
    assert_same_numbers(
        driver.evaluate(batches[0])["loss"], expected.about["evaluated"]["loss"], golden.tolerance
    )
    losses = np.array([driver.step(batch)["loss"] for batch in batches])
    assert_as_expected({"loss": losses}, {"loss": expected.arrays["loss"]}, golden.tolerance)
    assert_as_expected(driver.state, expected.part("after"), golden.tolerance)

    session = TrainingSession(driver.save())
    assert_same_bits(session.state, driver.state)
    assert session.steps_done == expected.about["steps_done_after"]


@pytest.mark.quick(1)
@each(EXPORTED)
def test_an_exported_state_goes_on_in_python(golden: Golden, unpack: Unpack) -> None:
    folder = unpack(golden) / golden.name
    expected = read(folder / "expected.safetensors")
    state = read_safetensors(folder / "state.safetensors")
    assert_same_bits(state, expected.part("state"))
    session = TrainingSession(folder / "model.onnx")
    assert_same_bits(session.state, state)
    session.reset()
    session.state = state
    assert session.steps_done == expected.about["steps_done"]
    losses = np.array([session.step(batch)["loss"] for batch in expected.batches()])
    assert_as_expected({"loss": losses}, {"loss": expected.arrays["loss"]}, golden.tolerance)
    assert_as_expected(session.state, expected.part("after"), golden.tolerance)


@pytest.mark.slow
@pytest.mark.javascript
@each(EXPORTED)
def test_the_driver_in_javascript_trains_from_an_exported_folder(
    golden: Golden, unpack: Unpack
) -> None:
    folder = unpack(golden) / golden.name
    expected = read(folder / "expected.safetensors")
    shutil.copy(DRIVER, folder)
    batches = [{n: a.tolist() for n, a in batch.items()} for batch in expected.batches()]
    (folder / "batches.json").write_text(json.dumps(batches))
    ran = subprocess.run(
        ["node", MODULES / "golden.mjs", WEB, "onnxruntime-node", folder],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = json.loads(ran.stdout.splitlines()[-1])
    np.testing.assert_allclose(losses, expected.arrays["loss"], rtol=1e-4)
    session = TrainingSession((folder / "saved.onnx").read_bytes())
    assert session.steps_done == expected.about["steps_done_after"]


@each(STEP_GRAPHS)
@pytest.mark.parametrize("has_kernels", [False, True], ids=["standard", "custom ops"])
def test_a_step_graph_runs(golden: Golden, unpack: Unpack, has_kernels: bool) -> None:
    folder = unpack(golden) / golden.name
    expected = read(folder / "expected.safetensors")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if has_kernels:
        ortops.register_custom_ops(options)
    session = onnxruntime.InferenceSession(folder / "step.onnx", options, providers=CPU)
    notes = session.get_modelmeta().custom_metadata_map
    read_next = {new: old for old, new in json.loads(notes["ortops.step_graph"]).items()}
    names = [output.name for output in session.get_outputs()]
    state: dict[str, np.ndarray] = {}
    losses = []
    for batch in expected.batches():
        outputs = dict(zip(names, session.run(None, batch | state), strict=True))
        state = {old: outputs[new] for new, old in read_next.items()}
        losses.append(outputs["loss"])
    wanted = {"loss": expected.arrays["loss"]}
    assert_as_expected({"loss": np.array(losses)}, wanted, golden.tolerance)
    after = expected.part("after")
    assert set(state) == after.keys() - {"learning_rate"}
    assert_as_expected(state, {name: after[name] for name in state}, golden.tolerance)
