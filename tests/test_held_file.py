"""Model files whose big data stay in the file; protobuf, which reads all of them, is the oracle."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortops
from models.mlp import mlp
from ortops.graph import convert, external, held_file

needs_held_files = pytest.mark.skipif(
    sys.platform == "win32", reason="on Windows files are read as a whole, not held"
)

BATCH = {"images": np.ones((4, 64), np.float32), "labels": np.arange(4)}


def trainable() -> onnx.ModelProto:
    """Returns a trainable model with big and with small initializers."""
    return ortops.build_training_model(
        mlp((64, 32, 10)), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )


def of_initializers(*tensors: TensorProto) -> onnx.ModelProto:
    graph = helper.make_graph([], "data", [], [], list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def named(array: np.ndarray, name: str = "w") -> TensorProto:
    return numpy_helper.from_array(array, name)


def typed() -> TensorProto:
    return helper.make_tensor("typed", TensorProto.FLOAT, [1000], np.arange(1000.0))


def packed() -> TensorProto:
    return helper.make_tensor("packed", TensorProto.INT4, [4001], bytes(2001), raw=True)


def bfloat16() -> TensorProto:
    return helper.make_tensor(
        "half", TensorProto.BFLOAT16, [50, 20], bytes(range(250)) * 8, raw=True
    )


def texts() -> TensorProto:
    return helper.make_tensor("texts", TensorProto.STRING, [300], [b"some words"] * 300)


def inside_a_branch() -> onnx.ModelProto:
    constant = helper.make_node("Constant", [], ["c"], value=named(np.arange(2000.0)))
    branch = helper.make_graph(
        [helper.make_node("Add", ["c", "v"], ["y"])],
        "branch",
        [],
        [helper.make_empty_tensor_value_info("y")],
        [named(np.arange(2000.0), "v")],
    )
    model = of_initializers(named(np.arange(500)))
    model.graph.node.append(
        helper.make_node("If", ["b"], ["z"], then_branch=branch, else_branch=branch)
    )
    model.graph.node.append(constant)
    return model


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "trainable": trainable,
    "empty": of_initializers,
    "floats": lambda: of_initializers(
        *(named(np.arange(600, dtype=dtype), dtype) for dtype in ("float32", "float16", "float64"))
    ),
    "integers": lambda: of_initializers(named(np.arange(9999)), named(np.ones(2048, bool), "b")),
    "in typed fields": lambda: of_initializers(typed(), named(np.arange(500))),
    "of half a byte": lambda: of_initializers(packed()),
    "bfloat16": lambda: of_initializers(bfloat16()),
    "texts": lambda: of_initializers(texts(), named(np.arange(500))),
    "inside a branch": inside_a_branch,
}


def whole(path: Path) -> onnx.ModelProto:
    """Returns what there is when the data are read after all."""
    light, data = convert.load_light(path)
    return external.attach(light, data)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_that_of_protobuf(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    found = whole(tmp_path / "model.onnx")
    if name == "in typed fields":  # data that were kept beside are put into the one for bytes
        model.graph.initializer[0].CopyFrom(named(np.arange(1000, dtype=np.float32), "typed"))
    assert found == model


@needs_held_files
@pytest.mark.parametrize("name", ["trainable", "floats", "integers", "of half a byte", "bfloat16"])
def test_big_data_stay_in_the_file(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    _, data = convert.load_light(path)
    graphs = [model.graph, *(info.algorithm for info in model.training_info)]
    big = [t for graph in graphs for t in graph.initializer if len(t.raw_data) > 1024]
    assert len(data) == len(big) > 0
    assert all(isinstance(content, held_file.InFile) for content in data.values())


@needs_held_files
def test_data_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_file, "_MOST", 1000)
    path = tmp_path / "model.onnx"
    path.write_bytes(trainable().SerializeToString())
    assert whole(path) == trainable()


def field(number: int, content: bytes) -> bytes:
    """Returns a field as protobuf writes it."""
    size, length = len(content), bytearray()
    while size >= 128:
        length.append(size % 128 + 128)
        size //= 128
    return bytes([8 * number + 2, *length, size]) + content


DATA = np.arange(1000, dtype=np.float32)
HEAD = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1000]).SerializeToString()
RAW = field(9, DATA.tobytes())
FORMS = {
    "data first": RAW + HEAD,
    "data between": HEAD[:3] + RAW + HEAD[3:],
    "data twice": HEAD + field(9, bytes(4000)) + RAW,
    "small data before big": HEAD + field(9, b"1234") + RAW,
    "big data before small": HEAD + RAW + field(9, b"1234"),
    "an unknown field": HEAD + field(1000 // 125, b"doc") + RAW + bytes([0xF8, 0x7F, 3]),
    "too few data": HEAD + field(9, bytes(3996)),
    "too many data": HEAD + field(9, bytes(4004)),
    "a negative dimension": TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[-1000]
    ).SerializeToString()
    + RAW,
    "an unknown type": TensorProto(name="w", data_type=99, dims=[1000]).SerializeToString() + RAW,
    "data outside, too": HEAD
    + RAW
    + TensorProto(data_location=TensorProto.EXTERNAL).SerializeToString(),
    "a name that is no UTF-8": HEAD + field(8, b"\xff\xfe") + RAW,
    "cut short": HEAD + RAW[:-1],
    "a length beyond the end": HEAD + bytes([8 * 9 + 2, 255, 255, 255, 255, 15]) + DATA.tobytes(),
    "an endless number": HEAD + bytes([255] * 20) + RAW,
    "a group": HEAD + bytes([8 * 20 + 3 - 128 & 127 | 128, 1]) + RAW,
}
LEGAL = {
    "data first",
    "data between",
    "data twice",
    "small data before big",
    "an unknown field",
}


def outcome(read: Callable[[], onnx.ModelProto]) -> bytes | str:
    """Returns the bytes of a model, or what is said of it."""
    try:
        return read().SerializeToString(deterministic=True)
    except ortops.errors.ModelError as error:
        return str(error)


def compare(content: bytes, path: Path) -> bytes | str:
    """Compares how a file is read with how protobuf reads it."""
    path.write_bytes(content)
    expected = outcome(lambda: convert.load(path)[0])
    assert outcome(lambda: whole(path)) == expected
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_fields_may_come_in_any_way(form: str, tmp_path: Path) -> None:
    rest = of_initializers().SerializeToString()
    found = compare(rest + field(7, field(5, FORMS[form])), tmp_path / "model.onnx")
    assert isinstance(found, bytes) == (form in LEGAL)


def test_a_graph_in_several_parts_is_joined(tmp_path: Path) -> None:
    rest = of_initializers(named(DATA, "a")).SerializeToString()
    found = compare(rest + field(7, field(5, HEAD + RAW)), tmp_path / "model.onnx")
    assert isinstance(found, bytes)


@pytest.mark.slow
def test_damaged_files_are_read_as_protobuf_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = trainable().SerializeToString()
    names = [index for index in range(len(content)) if content[index] in (0x0A, 0x2A, 0x4A, 0x3A)]
    read = 0
    for number in range(600):
        damaged = bytearray(content)
        if number % 3 == 0:
            del damaged[rng.integers(len(content)) :]
        else:
            at = rng.choice(names) if number % 3 == 1 else rng.integers(len(content))
            for place in range(int(at), min(int(at) + int(rng.integers(1, 4)), len(content))):
                damaged[place] = rng.integers(256)
        read += isinstance(compare(bytes(damaged), tmp_path / "model.onnx"), bytes)
    assert 50 < read < 550


@needs_held_files
def test_where_files_are_not_held_they_are_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread")
    path = tmp_path / "model.onnx"
    path.write_bytes(trainable().SerializeToString())
    light, data = convert.load_light(path)
    assert not any(isinstance(content, held_file.InFile) for content in data.values())
    assert external.attach(light, data) == trainable()
    session = ortops.TrainingSession(path)
    first = session.step(BATCH)["loss"]
    path.write_bytes(b"something else")
    session.reset()
    assert session.step(BATCH)["loss"] == first


@needs_held_files
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = trainable().SerializeToString()
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    assert whole(path) == trainable()
    writer.join()


# ------------------------------------------------------------------------------------- sessions


def opened(tmp_path: Path, *, beside: bool = False) -> tuple[ortops.TrainingSession, Path]:
    """Returns a session on a file, and the file that has the parameters."""
    path = tmp_path / "model.onnx"
    if not beside:
        ortops.save_model(trainable(), path)
        return ortops.TrainingSession(path), path
    onnx.save(trainable(), path, save_as_external_data=True, location="model.data")
    return ortops.TrainingSession(path), tmp_path / "model.data"


@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_reset_reads_what_another_file_took_the_place_of(beside: bool, tmp_path: Path) -> None:
    session, file = opened(tmp_path, beside=beside)
    before = {name: np.array(array) for name, array in session.state.items()}
    losses = [session.step(BATCH)["loss"] for _ in range(3)]
    session.save(tmp_path / "model.onnx")
    if beside:
        file.unlink()
    session.reset()
    for name, array in session.state.items():
        np.testing.assert_array_equal(array, before[name])
    assert [session.step(BATCH)["loss"] for _ in range(3)] == losses


@needs_held_files
@pytest.mark.parametrize("damage", ["changed", "cut short"])
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_reset_refuses_a_file_that_was_changed_in_place(
    beside: bool, damage: str, tmp_path: Path
) -> None:
    session, file = opened(tmp_path, beside=beside)
    session.step(BATCH)
    before = {name: np.array(array) for name, array in session.state.items()}
    with file.open("r+b") as stream:
        if damage == "cut short":
            stream.truncate(100)
        else:
            content = bytearray(file.read_bytes())
            content[content.index(mlp_weight().tobytes()[:64])] ^= 1
            stream.write(content)
    message = rf"initializer 'fc1\.weight': its data in file '.*{file.name}' have changed since"
    with pytest.raises(ortops.errors.ModelError, match=message):
        session.reset()
    for name, array in session.state.items():
        np.testing.assert_array_equal(array, before[name])
    session.step(BATCH)


def mlp_weight() -> np.ndarray:
    (tensor,) = [t for t in mlp((64, 32, 10)).graph.initializer if t.name == "fc1.weight"]
    return numpy_helper.to_array(tensor)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are listed in /proc")
def test_a_file_is_held_once_and_let_go(tmp_path: Path) -> None:
    def held(path: Path) -> int:
        links = Path("/proc/self/fd").iterdir()
        return sum(link.exists() and link.samefile(path) for link in links)

    gc.collect()
    first, path = opened(tmp_path)
    second = ortops.TrainingSession(path)
    assert held(path) == 1
    del first, second
    gc.collect()
    assert held(path) == 0


@needs_held_files
def test_the_ends_of_data_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(2000, dtype=np.float32).reshape(40, 50)
    onnx.save(of_initializers(named(array)), tmp_path / "model.onnx")
    found = external.read_light(tmp_path / "model.onnx")
    assert found is not None
    ((location, tensor),) = found[1].items()
    lent = external.lend({location: tensor})[location]
    read: list[int] = []
    original = held_file.HeldFile.read
    monkeypatch.setattr(
        held_file.HeldFile,
        "read",
        lambda self, begin, end: read.append(end - begin) or original(self, begin, end),
    )
    wanted = array[0, 0].tobytes(), array[-1, -1].tobytes()
    for each in (tensor, lent, external.refer_to(lent, "other")):
        assert external.ends(each, 4) == wanted
    assert read == [4] * 6
    assert external.ends(tensor, 10**6) == (array.tobytes(),) * 2


def test_the_ends_of_data_in_memory() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3).T
    assert external.ends(ir.tensor(array), 2) == (b"\0\0", np.float16(5).tobytes())
