"""Model files whose big data stay in the file; protobuf, which reads all of them, is the oracle."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from memory_peaks import deep
from onnx import TensorProto, helper, numpy_helper

import ortops
from models.mlp import mlp
from ortops.engine.check import check
from ortops.graph import convert
from ortops.graph.files import external, held_file, loading, wire_format

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


def located() -> TensorProto:
    """Returns a tensor with data, which a location beside them does not change."""
    tensor = named(np.arange(500), "located")
    tensor.external_data.add(key="location", value="elsewhere.bin")
    return tensor


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
    model = of_initializers(named(np.arange(500)), named(np.ones((), bool), "b"))
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
    "beside a location": lambda: of_initializers(located()),
    "texts": lambda: of_initializers(texts(), named(np.arange(500))),
    "inside a branch": inside_a_branch,
}


def whole(path: Path) -> onnx.ModelProto:
    """Returns what there is when the data are read after all."""
    return convert.load_light(path).attach()


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_that_of_protobuf(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    found = whole(tmp_path / "model.onnx")
    if name == "in typed fields":  # data that were kept beside are put into the one for bytes
        model.graph.initializer[0].CopyFrom(named(np.arange(1000, dtype=np.float32), "typed"))
    if name == "beside a location":  # which nothing reads
        del model.graph.initializer[0].external_data[:]
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
    expected = outcome(lambda: loading.load(path)[0])
    assert outcome(lambda: whole(path)) == expected
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_fields_may_come_in_any_way(form: str, tmp_path: Path) -> None:
    rest = of_initializers().SerializeToString()
    found = compare(rest + field(7, field(5, FORMS[form])), tmp_path / "model.onnx")
    assert isinstance(found, bytes) == (form in LEGAL)


UNKNOWN = {  # fields with the number 1000, which no message of ONNX has
    "a varint": b"\xc0\x3e\xac\x02",
    "eight bytes": b"\xc1\x3e12345678",
    "a length": b"\xc2\x3e\x03abc",
    "a group": b"\xc3\x3e\x08\x07\xc4\x3e",
    "four bytes": b"\xc5\x3e1234",
}


@pytest.mark.parametrize("place", ["model", "graph", "tensor", "algorithm", "initialization"])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_fields_are_kept(kind: str, place: str, tmp_path: Path) -> None:
    model = of_initializers(named(DATA, "a"))
    info = model.training_info.add()
    info.algorithm.initializer.append(named(DATA, "b"))
    info.initialization.name = "start"
    message = {
        "model": model,
        "graph": model.graph,
        "tensor": model.graph.initializer[0],
        "algorithm": info.algorithm,
        "initialization": info.initialization,
    }[place]
    message.MergeFromString(UNKNOWN[kind])
    found = compare(model.SerializeToString(), tmp_path / "model.onnx")
    assert UNKNOWN[kind] in found


def test_a_graph_in_several_parts_is_joined(tmp_path: Path) -> None:
    rest = of_initializers(named(DATA, "a")).SerializeToString()
    found = compare(rest + field(7, field(5, HEAD + RAW)), tmp_path / "model.onnx")
    assert isinstance(found, bytes)


@needs_held_files
@pytest.mark.parametrize(
    "content",
    [field(14, b"") * 10_000, bytes(100_000), field(7, field(5, field(4, b"") * 10_000))],
    ids=["fields of a model", "zeros", "fields of a tensor"],
)
def test_no_more_fields_than_a_model_has_are_walked(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """protobuf is a hundred times as fast, where nothing is won."""
    monkeypatch.setattr(held_file, "_MOST_FIELDS", 100)
    walked = 0
    original = wire_format.FieldReader._varint

    def count(self: wire_format.FieldReader, at: int) -> tuple[int, int]:
        nonlocal walked
        walked += 1
        return original(self, at)

    monkeypatch.setattr(wire_format.FieldReader, "_varint", count)
    compare(of_initializers(named(DATA)).SerializeToString() + content, tmp_path / "model.onnx")
    assert 0 < walked <= 210


@pytest.mark.slow
def test_damaged_files_are_read_as_protobuf_reads_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = trainable().SerializeToString()
    names = [index for index in range(len(content)) if content[index] in (0x0A, 0x2A, 0x4A, 0x3A)]
    read = 0
    for number in range(300):
        damaged = bytearray(content)
        if number % 3 == 0:
            del damaged[rng.integers(len(content)) :]
        else:
            at = rng.choice(names) if number % 3 == 1 else rng.integers(len(content))
            for place in range(int(at), min(int(at) + int(rng.integers(1, 4)), len(content))):
                damaged[place] = rng.integers(256)
        read += isinstance(compare(bytes(damaged), tmp_path / "model.onnx"), bytes)
    assert 25 < read < 275


@needs_held_files
def test_where_files_are_not_held_they_are_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pread")
    path = tmp_path / "model.onnx"
    path.write_bytes(trainable().SerializeToString())
    light, data = convert.load_light(path)
    assert not any(isinstance(content, held_file.InFile) for content in data.values())
    assert external.LightModel(light, data).attach() == trainable()
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


@pytest.mark.quick(1)
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


@pytest.mark.quick(2)
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


@pytest.mark.slow
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
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_a_change_before_the_first_read_is_seen(beside: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(trainable(), path, save_as_external_data=beside, location="model.data")
    file = tmp_path / "model.data" if beside else path
    light = convert.load_light(path)
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same length
    with pytest.raises(ortops.errors.ModelError, match="have changed since"):
        light.attach()


@needs_held_files
def test_a_new_time_counts_as_a_change(tmp_path: Path) -> None:
    """To know better, data would have to be read twice, or once with a checksum as slow."""
    session, file = opened(tmp_path, beside=True)
    os.utime(file, ns=(0, 0))
    with pytest.raises(ortops.errors.ModelError, match="have changed since"):
        session.reset()
    session.step(BATCH)


@needs_held_files
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
@pytest.mark.parametrize("optimizer", ["Adam", "LAMB"])
@pytest.mark.parametrize("names", [None, ["w0"]], ids=["trained", "frozen"])
def test_opening_reads_each_byte_once_in_small_pieces(
    names: list[str] | None,
    optimizer: str,
    beside: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which go into the memory of variables, packed or not, or of what is frozen."""
    model = ortops.build_training_model(
        deep(512, 3), loss="Huber", optimizer=optimizer, trainable=names
    )
    given = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=beside, location="model.data")
    sizes: list[int] = []
    read = os.pread

    def pread(*arguments: int) -> bytes:
        content = read(*arguments)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(os, "pread", pread)
    session = ortops.TrainingSession(path)
    assert max(sizes) <= held_file._PIECE < 512 * 512 * 4
    assert sum(sizes) < 1.1 * sum(file.stat().st_size for file in tmp_path.iterdir())
    packed = session.report().packed
    assert bool(packed) == (optimizer == "Adam")
    for name, array in session.parameters.items():
        np.testing.assert_array_equal(array, given[name])


@needs_held_files
def test_a_change_while_a_file_is_read_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(trainable().SerializeToString())
    copy = held_file._LightCopy.copy

    def copy_slowly(self: object, *arguments: object) -> bytes:
        path.write_bytes(path.read_bytes())
        return copy(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(held_file._LightCopy, "copy", copy_slowly)
    with pytest.raises(ortops.errors.ModelError, match="was changed while it was read"):
        ortops.TrainingSession(path)


# ------------------------------------------------------------------- many files of external data

LAYERS = 30


def chain(size: int = 20) -> onnx.ModelProto:
    """Returns x W₀ W₁ …, a product with as many matrices as there are layers."""
    with ortops.Tape(name="chain") as tape:
        x = tape.input("x", np.float32, ["batch", size])
        for number in range(LAYERS):
            weight = np.eye(size, dtype=np.float32) * (4 if number % 2 else 0.5)
            x = x @ tape.initializer(f"w{number}", weight)
        tape.output(x, "y")
    return tape.model()


def trainable_chain() -> onnx.ModelProto:
    return ortops.build_training_model(chain(), loss="MeanSquaredError", optimizer="SGD")


def with_slope(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model that also puts out the gradient of the sum of y with respect to x."""
    domain = "ai.onnx.preview.training"
    model.graph.node.append(
        helper.make_node("Gradient", ["x"], ["slope"], domain=domain, xs=["x"], y="y")
    )
    shape = model.graph.input[0].type.tensor_type.shape
    dims = [dim.dim_value or dim.dim_param for dim in shape.dim]
    model.graph.output.append(helper.make_tensor_value_info("slope", TensorProto.FLOAT, dims))
    model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def in_a_file_each(model: onnx.ModelProto, folder: Path) -> Path:
    """Writes a model as torch's older exporter does where it has 2 GB; returns its path."""
    folder.mkdir()
    onnx.save(
        model,
        folder / "model.onnx",
        save_as_external_data=True,
        all_tensors_to_one_file=False,
        size_threshold=0,
    )
    return folder / "model.onnx"


def open_files(folder: Path) -> int:
    """Returns how many files of a folder this process has open."""
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += link.readlink().parent == folder
    return found


WORK: dict[str, Callable[[Path], object]] = {
    "train": lambda path: ortops.TrainingSession(path).step(CHAIN_BATCH),
    "build": lambda path: ortops.build_training_model(path, loss="Huber", optimizer="Adam"),
    "check": check,
    "add adapters": lambda path: ortops.lora.add(path, rank=2),
    "write weights back": lambda path: ortops.TrainingSession(trainable_chain()).inference_model(
        path
    ),
    "free the batch": ortops.surgery.free_batch,
}
"""What reads many files, given the path of a model."""

CHAIN_BATCH = {"x": np.ones((2, 20), np.float32), "targets": np.ones((2, 20), np.float32)}
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="open files are listed in /proc"
)


@pytest.mark.quick(1)
@needs_proc
@pytest.mark.parametrize("work", WORK)
def test_a_model_in_many_files_takes_few_descriptors(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_file, "_MOST_OPEN", 5)
    model = trainable_chain() if work == "train" else chain()
    path = in_a_file_each(model, tmp_path / "model")
    most = 0
    original = held_file.HeldFile.pieces

    def pieces(*arguments: Any) -> Iterator[bytes]:
        nonlocal most
        for piece in original(*arguments):
            most = max(most, open_files(path.parent))
            yield piece

    monkeypatch.setattr(held_file.HeldFile, "pieces", pieces)
    WORK[work](path)
    assert 1 <= most <= 6  # the model's own file and the others


@pytest.mark.nightly
@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("in_one", [False, True], ids=["a file each", "one file"])
@pytest.mark.parametrize("use", [ortops.lower, ortops.InferenceSession], ids=["lower", "run"])
def test_external_tensors_keep_no_file_open(
    use: Callable[[Path], object], in_one: bool, tmp_path: Path
) -> None:
    model = with_slope(chain(4))  # small tensors, which are looked at
    path = tmp_path / "model" / "model.onnx"
    if in_one:
        path.parent.mkdir()
        onnx.save(model, path, save_as_external_data=True, location="data", size_threshold=0)
    else:
        in_a_file_each(model, path.parent)
    found = use(path)
    gc.collect()
    assert open_files(path.parent) == 0
    if isinstance(found, ortops.InferenceSession):
        (slope,) = found.run(["slope"], {"x": np.ones((1, 4), np.float32)})
        np.testing.assert_array_equal(slope, np.full((1, 4), 2.0 ** (LAYERS // 2)))


@needs_held_files
def test_reset_reads_files_that_were_closed_or_says_that_they_were_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_file, "_MOST_OPEN", 5)
    path = in_a_file_each(trainable_chain(), tmp_path / "model")
    session = ortops.TrainingSession(path)
    before = {name: np.array(array) for name, array in session.state.items()}
    session.step(CHAIN_BATCH)
    session.reset()
    for name, array in session.state.items():
        np.testing.assert_array_equal(array, before[name])
    for number in range(LAYERS):
        new = tmp_path / "new"
        new.write_bytes(np.zeros((20, 20), np.float32).tobytes())
        new.replace(path.with_name(f"w{number}"))
    with pytest.raises(ortops.errors.ModelError, match="was replaced after it had been opened"):
        session.reset()
    for name, array in session.state.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.slow
@needs_held_files
def test_a_process_with_few_descriptors_reads_models_of_many_external_tensors(
    tmp_path: Path,
) -> None:
    path = in_a_file_each(trainable_chain(), tmp_path / "model")
    in_one = tmp_path / "gradient.onnx"
    onnx.save(
        with_slope(chain(4)), in_one, save_as_external_data=True, location="data", size_threshold=0
    )
    program = f"""
        import os, resource, sys
        import numpy as np, ortops
        batch = dict.fromkeys(["x", "targets"], np.ones((2, 20), np.float32))
        ortops.TrainingSession({os.fspath(path)!r}).step(batch)  # what else is opened is now
        number = os.open(os.devnull, os.O_RDONLY)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (number + 25, hard))
        session = ortops.TrainingSession({os.fspath(path)!r})
        session.step(batch)
        session.reset()
        ortops.lower({os.fspath(in_one)!r})
        for _ in range(25):
            os.open(os.devnull, os.O_RDONLY)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert "OSError" in done.stderr.splitlines()[-1], done.stderr  # in the last line of it


@needs_held_files
@pytest.mark.parametrize("beside", [False, True], ids=["inside", "beside"])
def test_too_many_open_files_are_called_so(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(trainable(), path, save_as_external_data=beside, location="model.data")
    refused = "model.data" if beside else "model.onnx"
    original = os.open

    def refuse(given: Path, *arguments: Any, **named: Any) -> int:
        if Path(given).name == refused:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), os.fspath(given))
        return original(given, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ortops.errors.ModelError, match="raise the limit on open files"):
        ortops.TrainingSession(path)


def test_external_data_that_are_missing_are_named_by_a_model_in_memory(tmp_path: Path) -> None:
    path = in_a_file_each(chain(), tmp_path / "model")
    model = onnx.load(path, load_external_data=False)
    with pytest.raises(ortops.errors.ModelError, match="'w0': cannot read its external data"):
        ortops.build_training_model(model, loss="Huber", optimizer="SGD")


@needs_held_files
def test_the_ends_of_data_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(2000, dtype=np.float32).reshape(40, 50)
    onnx.save(of_initializers(named(array)), tmp_path / "model.onnx")
    found = external.read_light(tmp_path / "model.onnx")
    assert found is not None
    ((location, tensor),) = found[1].items()
    lent = external.lend(external.LightModel(onnx.ModelProto(), {location: tensor})).data[location]
    read: list[int] = []
    original = held_file.HeldFile.read
    monkeypatch.setattr(
        held_file.HeldFile,
        "read",
        lambda self, begin, end: read.append(end - begin) or original(self, begin, end),
    )
    wanted = array[0, 0].tobytes(), array[-1, -1].tobytes()
    for each in (tensor, lent, external.Reference(lent, "other")):
        assert external.ends(each, 4) == wanted
    assert read == [4] * 6
    assert external.ends(tensor, 10**6) == (array.tobytes(),) * 2


def test_the_ends_of_data_in_memory() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3).T
    assert external.ends(ir.tensor(array), 2) == (b"\0\0", np.float16(5).tobytes())
