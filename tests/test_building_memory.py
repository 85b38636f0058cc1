"""Building from a file to a file: the same bytes as in memory, with a few tensors in memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from memory_peaks import counts_peaks, deep, peak

import ortops
from ortops.engine.building.builder import build_light
from ortops.graph.files import external
from ortops.graph.files.messages import initializers, is_light, location_of
from ortops.graph.files.saving import write_model
from ortops.graph.files.streaming import serialized_parts

SETUP = """
import sys

import ortops

small, model, path, *command = sys.argv[1:]

def build(model):
    if command:
        from ortops.cli import main

        options = ["--loss", "MeanSquaredError", "--optimizer", "Adam"]
        assert main(["build", model, path, *options]) == 0
    else:
        ortops.build_training_file(model, path, loss="MeanSquaredError", optimizer="Adam")

build(small)  # imports
"""


@pytest.mark.slow
@counts_peaks
@pytest.mark.parametrize("command", [[], ["command"]], ids=["Python", "command line"])
def test_the_peak_is_a_few_tensors(tmp_path: Path, command: list[str]) -> None:
    """Of 16 weights of 4 MiB and their 32 moments, which are untouched zeros, two exist at a time.

    The rest is the graph. All of them together have 192 MiB.
    """
    small, model, path = (str(tmp_path / name) for name in ("small.onnx", "model.onnx", "out.onnx"))
    ortops.save_model(deep(64, 2), small)
    ortops.save_model(deep(1024, 16), model)
    assert peak(SETUP, "build(model)", small, model, path, *command) < 8 * 4096
    assert Path(path).stat().st_size > 48 * 2**22


CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("Adam", np.float32, {"optimizer": "Adam"}),
    ("averages", np.float32, {"optimizer": "SGD", "ema_decay": 0.9}),
    ("float16", np.float16, {"optimizer": "Adam", "ema_decay": 0.9}),
    ("copies", np.float32, {"optimizer": "ScheduleFreeAdamW"}),
    ("bytes", np.float32, {"optimizer": "Adam8bit"}),
]
"""Names, dtypes of the weights, and settings: zeros, averages, masters and copies."""


@pytest.mark.quick(2)
@pytest.mark.parametrize(("dtype", "settings"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_the_file_has_the_bytes_of_the_model_in_memory(
    tmp_path: Path, dtype: Any, settings: dict[str, Any]
) -> None:
    source, path = tmp_path / "model.onnx", tmp_path / "trainable.onnx"
    ortops.save_model(deep(32, 3, dtype), source)
    model = ortops.build_training_model(source, loss="MeanSquaredError", **settings)
    assert ortops.build_training_file(source, path, loss="MeanSquaredError", **settings) is None
    whole = path.read_bytes()
    assert whole == model.SerializeToString()
    ortops.save_model(model, path)
    assert path.read_bytes() == whole


def test_first_values_are_zeros_and_rounded_copies(tmp_path: Path) -> None:
    """Of a float16 model with Adam: moments are 0, masters and averages are the weights."""
    given = deep(32, 2, np.float16)
    path = tmp_path / "trainable.onnx"
    ortops.build_training_file(
        given, path, loss="MeanSquaredError", optimizer="Adam", ema_decay=0.5
    )
    (info,) = onnx.load(path).training_info
    found = {t.name: onnx.numpy_helper.to_array(t) for t in info.algorithm.initializer}
    for tensor in given.graph.initializer:
        weight = onnx.numpy_helper.to_array(tensor)
        for suffix in ("master", "ema"):
            copy = found[f"{tensor.name}.{suffix}"]
            assert copy.dtype == np.float32
            np.testing.assert_array_equal(copy, weight)
        for suffix in ("V", "H"):
            moment = found[f"{tensor.name}.{suffix}"]
            assert (moment.dtype, moment.shape) == (np.dtype(np.float32), (32, 32))
            assert not moment.any()


def test_a_light_model_contains_no_state(tmp_path: Path) -> None:
    """Everything larger than 1 KiB is read from the file, or computed each time."""
    source = tmp_path / "model.onnx"
    ortops.save_model(deep(32, 3), source)
    light = build_light(source, loss="MeanSquaredError", optimizer="Adam", ema_decay=0.5)
    assert light.proto.ByteSize() < 32 * 32 * 4 * 3
    states = light.proto.training_info[0].algorithm.initializer
    big = [tensor for tensor in states if is_light(tensor)]
    assert len(big) == 3 * 3
    for tensor in big:
        content = light.data[location_of(tensor)]
        assert content.numpy() is not content.numpy()


def test_a_file_is_built_in_the_place_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ortops.save_model(deep(32, 2), path)
    expected = ortops.build_training_model(path, loss="MeanSquaredError", optimizer="Adam")
    ortops.build_training_file(path, path, loss="MeanSquaredError", optimizer="Adam")
    assert path.read_bytes() == expected.SerializeToString()


def test_weights_in_a_file_of_their_own(tmp_path: Path) -> None:
    """External data become part of the file, wherever it is."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    given = deep(32, 2)
    onnx.save(given, folder / "model.onnx", save_as_external_data=True, location="weights")
    path = tmp_path / "trainable.onnx"
    settings: dict[str, Any] = {"loss": "MeanSquaredError", "optimizer": "Adam"}
    ortops.build_training_file(folder / "model.onnx", path, **settings)
    model = ortops.build_training_model(folder / "model.onnx", **settings)
    assert path.read_bytes() == model.SerializeToString()
    values = [onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer]
    np.testing.assert_array_equal(values[1], 2 * np.eye(32) + np.arange(32, dtype=np.float32) / 32)


def test_a_model_beyond_the_limit_of_a_file(tmp_path: Path) -> None:
    """The same data in a file of their own, with a smaller limit than 2 GB."""
    settings: dict[str, Any] = {"loss": "MeanSquaredError", "optimizer": "Adam", "ema_decay": 0.5}
    given = deep(32, 2, np.float16)
    ortops.save_model(given, tmp_path / "model.onnx")
    path = tmp_path / "trainable.onnx"
    write_model(path, build_light(tmp_path / "model.onnx", **settings), limit=2**14)
    (data,) = tmp_path.glob("trainable.onnx.*.data")
    assert path.stat().st_size < 2**14 < data.stat().st_size
    # onnx loads the external data of initializers of the main graph only.
    model = ortops.build_training_model(given, **settings)
    first, second = (ortops.TrainingSession(each).state for each in (path, model))
    assert first.keys() == second.keys()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def fails(y: Any) -> Any:
    raise ZeroDivisionError


def test_errors_are_blamed_on_invalid_models_only(tmp_path: Path) -> None:
    """The path to write, which does not exist, is not taken for a model."""
    path, settings = tmp_path / "none.onnx", {"loss": fails, "optimizer": "Adam"}
    with pytest.raises(ZeroDivisionError):
        ortops.build_training_file(deep(32, 1), path, **settings)
    invalid = deep(32, 1)
    invalid.graph.node[1].attribute.add(name="slope", type=onnx.AttributeProto.FLOAT, f=2)
    with pytest.raises(ortops.ModelError, match="slope"):
        ortops.build_training_file(invalid, path, **settings)
    with pytest.raises(ortops.ModelError, match="slope"):
        build_light(external.detach(invalid), **settings)
    assert not path.exists()


def message(light: external.LightModel) -> bytes:
    parts = serialized_parts(light)
    return b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts)


def test_a_message_in_parts_has_the_bytes_of_the_whole() -> None:
    """With fields that ONNX does not have, docs, small and big tensors, in all training graphs."""
    model = ortops.build_training_model(deep(32, 2), loss="MeanSquaredError", optimizer="Adam")
    tensor = model.graph.initializer[0]
    tensor.doc_string = "about the weight"
    tensor.metadata_props.add(key="key", value="value")
    tensor.MergeFromString(b"\xf8\x3f\x07")  # field 1023, an unknown number
    first = model.training_info[0].initialization.initializer.add()
    first.CopyFrom(onnx.numpy_helper.from_array(np.arange(999.0), "start"))
    nibbles = model.graph.initializer.add(name="nibbles", data_type=onnx.TensorProto.UINT4)
    nibbles.dims.append(4001)
    nibbles.raw_data = bytes(range(256)) * 7 + bytes(209)
    model.graph.initializer.add(name="empty", data_type=1, dims=[0], raw_data=b"")
    light = external.detach(model)
    assert sum(map(is_light, initializers(light.proto))) == 2 + 4 + 1 + 1
    assert message(light) == model.SerializeToString()


@pytest.mark.skipif(
    sys.platform == "win32", reason="on Windows files are read as a whole, not held"
)
def test_a_failed_read_leaves_the_old_file(tmp_path: Path) -> None:
    """Data that cannot be read are noticed in the middle of writing."""
    source, path = tmp_path / "model.onnx", tmp_path / "trainable.onnx"
    ortops.save_model(deep(32, 2), source)
    light = build_light(source, loss="MeanSquaredError", optimizer="Adam")
    path.write_bytes(b"old")
    content = bytearray(source.read_bytes())
    content[4000:4100] = bytes(100)
    source.write_bytes(content)
    with pytest.raises(ortops.ModelError, match="changed"):
        write_model(path, light)
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [source, path]
