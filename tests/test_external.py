"""Models that do not fit into one protobuf message.

The limit is lowered, so that small models take the ways that big ones take; one slow test has more
than 2 GB in fact.
"""

import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from running import plain_session, run

import ortops
from ortops import Tape, cli, op
from ortops.engine.training.feeds import Feeds
from ortops.graph.files import external, messages, saving
from ortops.optimizers import SGD, Adam

SIZE = 64  # a matrix of 16 KB


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "MESSAGE_LIMIT", 20_000)  # one matrix, and not two


def layers(size: int = SIZE, count: int = 2) -> onnx.ModelProto:
    """x → layers of Tanh(x W) → a small head."""
    rng = np.random.default_rng(0)
    with Tape(name="layers") as tape:
        x = tape.input("x", np.float32, ["batch", size])
        for number in range(count):
            array = rng.standard_normal((size, size), np.float32) / np.float32(size**0.5)
            x = op.Tanh(x @ tape.initializer(f"body{number}", array))
        head = rng.standard_normal((size, 4), np.float32) / np.float32(size**0.5)
        tape.output(x @ tape.initializer("head", head), "y")
    return tape.model()


def in_files(model: onnx.ModelProto, path: Path) -> Path:
    """Writes a model with external data, as other tools do, and returns its path."""
    onnx.save(
        model, path, save_as_external_data=True, location=f"{path.name}_weights", size_threshold=0
    )
    return path


def batch(size: int = SIZE, seed: int = 1) -> Feeds:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((8, size), np.float32),
        "targets": rng.standard_normal((8, 4), np.float32),
    }


def trainable(model: object, names: object = None, optimizer: object = None) -> onnx.ModelProto:
    return ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer=optimizer or Adam(1e-2), trainable=names
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def data_of(path: Path) -> str:
    """Returns the name of the one data file that a model file reads."""
    tensors = onnx.load(path, load_external_data=False).graph.initializer
    (name,) = {e.value for t in tensors for e in t.external_data if e.key == "location"}
    return name


def assert_equal_states(one: ortops.TrainingSession, other: ortops.TrainingSession) -> None:
    assert set(one.state) == set(other.state)
    for name, array in one.state.items():
        np.testing.assert_array_equal(array, other.state[name], err_msg=name)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("names", [["head"], None], ids=["head", "all"])
@pytest.mark.parametrize("source", ["path", "model", "saved"])
def test_training_of_a_big_model_is_that_of_a_small_one(
    names: list[str] | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = in_files(layers(), tmp_path / "given.onnx")
    small = ortops.TrainingSession(trainable(layers(), names))
    monkeypatch.setattr(external, "MESSAGE_LIMIT", 20_000)
    model = trainable(given if source == "path" else layers(), names)
    if source == "saved":
        ortops.save_model(model, tmp_path / "trainable.onnx")
        name = data_of(tmp_path / "trainable.onnx")
        assert (tmp_path / name).stat().st_size >= 2 * SIZE * SIZE * 4
    big = ortops.TrainingSession(tmp_path / "trainable.onnx" if source == "saved" else model)
    data = batch()
    for _ in range(3):
        np.testing.assert_allclose(big.step(data)["loss"], small.step(data)["loss"], rtol=1e-6)
    np.testing.assert_allclose(big.evaluate(data)["loss"], small.evaluate(data)["loss"], rtol=1e-6)
    for name, array in small.state.items():
        np.testing.assert_allclose(big.state[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("names", [["head"], None], ids=["head", "all"])
def test_a_saved_big_model_resumes_exactly(names: list[str] | None, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.onnx"
    session = ortops.TrainingSession(trainable(layers(), names))
    session.step(batch())
    session.save(path)
    assert names_in(tmp_path) == {"checkpoint.onnx", data_of(path)}
    assert re.fullmatch(r"checkpoint\.onnx\.[0-9a-f]{16}\.data", data_of(path))
    resumed = ortops.TrainingSession(path)
    assert_equal_states(resumed, session)
    for seed in range(2):
        session.step(batch(seed=seed))
        resumed.step(batch(seed=seed))
    assert_equal_states(resumed, session)
    resumed.reset()
    assert resumed.steps_done == 0


@pytest.mark.usefixtures("small_limit")
def test_a_session_goes_on_when_the_files_that_it_came_from_are_gone(tmp_path: Path) -> None:
    path = in_files(layers(), tmp_path / "given.onnx")
    ortops.save_model(trainable(path, ["head"]), tmp_path / "trainable.onnx")
    session = ortops.TrainingSession(tmp_path / "trainable.onnx")
    other = ortops.TrainingSession(tmp_path / "trainable.onnx")
    for file in tmp_path.iterdir():
        file.write_bytes(bytes(file.stat().st_size))
        file.unlink()
    session.step(batch())
    assert session.evaluate(batch()) != other.evaluate(batch())
    session.save(path)
    assert_equal_states(ortops.TrainingSession(path), session)


@pytest.mark.slow
@pytest.mark.usefixtures("small_limit")
def test_a_file_is_replaced_and_keeps_the_data_of_one_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.onnx"
    session = ortops.TrainingSession(trainable(layers(), ["head"]))
    names: list[str] = []
    for _ in range(4):
        session.step(batch())
        session.save(path)
        names.append(data_of(path))
        assert names_in(tmp_path) == {"checkpoint.onnx", *names[-2:]}
        assert_equal_states(ortops.TrainingSession(path), session)
    assert len(set(names)) == 4


def test_a_file_that_fits_again_loses_its_data_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = layers(), tmp_path / "model.onnx"
    with monkeypatch.context() as context:
        context.setattr(external, "MESSAGE_LIMIT", 20_000)
        ortops.save_model(model, path)
    name = data_of(path)
    ortops.save_model(model, path)
    assert names_in(tmp_path) == {"model.onnx", name}
    ortops.save_model(model, path)
    assert names_in(tmp_path) == {"model.onnx"}
    assert onnx.load(path) == model


@pytest.mark.usefixtures("small_limit")
def test_data_files_of_others_are_kept(tmp_path: Path) -> None:
    path, copy = tmp_path / "model.onnx", tmp_path / "copy"
    onnx.save(layers(), path, save_as_external_data=True, location="model.onnx.data")
    longer = tmp_path / "model.onnx.onnx"
    ortops.save_model(layers(), longer)
    kept = {path.name, "model.onnx.data", longer.name, data_of(longer)}
    ortops.save_model(layers(), path)
    first = data_of(path)
    copy.write_bytes(path.read_bytes())
    for _ in range(3):
        ortops.save_model(layers(), path)
    assert {*kept, copy.name, first, data_of(path)} < names_in(tmp_path)
    plain_session(copy)
    ortops.save_model(layers(), copy)
    assert first in names_in(tmp_path)  # it was not made for the copy
    for _ in range(2):
        before = data_of(path)
        ortops.save_model(layers(), path)
    assert names_in(tmp_path) == {*kept, copy.name, data_of(copy), before, data_of(path)}
    for model in (path, longer, copy):
        plain_session(model)


@pytest.mark.usefixtures("small_limit")
def test_a_failed_save_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.onnx"
    session = ortops.TrainingSession(trainable(layers(), ["head"]))
    session.save(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    during: list[set[str]] = []

    def write(_: Path, __: bytes, *, follow: bool) -> None:
        during.append(names_in(tmp_path) - set(before))
        raise OSError("disk full")

    session.step(batch())
    monkeypatch.setattr(saving, "write_atomically", write)
    with pytest.raises(OSError, match="disk full"):
        session.save(path)
    ((name,),) = during  # the data come first
    assert name.endswith(".data")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    "kind", ["FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "FLOAT8E5M2", "BOOL", "COMPLEX64", "INT4"]
)
def test_data_of_any_type_come_back(kind: str, tmp_path: Path) -> None:
    number = onnx.TensorProto.DataType.Value(kind)
    bits = {"DOUBLE": 64, "FLOAT16": 16, "BFLOAT16": 16, "FLOAT8E5M2": 8, "BOOL": 8, "INT4": 4}
    size = 24_001 * bits.get(kind, 64 if kind == "COMPLEX64" else 32) // 8 + (kind == "INT4")
    content = bytes(size) if kind == "BOOL" else np.random.default_rng(0).bytes(size - 1) + b"\1"
    tensor = onnx.TensorProto(name="w", data_type=number, dims=[24_001], raw_data=content)
    other = onnx.TensorProto(name="v", data_type=1, dims=[6_000], raw_data=bytes(24_000))
    graph = onnx.helper.make_graph([], "graph", [], [], [tensor, other])
    ortops.save_model(onnx.helper.make_model(graph), tmp_path / "model.onnx")
    loaded = onnx.load(tmp_path / "model.onnx")
    assert data_of(tmp_path / "model.onnx")
    assert [each.raw_data for each in loaded.graph.initializer] == [content, bytes(24_000)]


@pytest.mark.usefixtures("small_limit")
def test_stock_onnxruntime_runs_the_files(tmp_path: Path) -> None:
    session = ortops.TrainingSession(trainable(layers(), ["head"]))
    session.step(batch())
    session.save(tmp_path / "checkpoint.onnx")
    ortops.save_model(session.inference_model(), tmp_path / "inference.onnx")
    feeds = {"x": batch()["x"]}
    outputs = [
        run(tmp_path / name, feeds, ["y"])[0] for name in ("checkpoint.onnx", "inference.onnx")
    ]
    np.testing.assert_array_equal(*outputs)
    assert not np.allclose(
        outputs[0],
        run(layers(), feeds, ["y"])[0],
    )
    for name in ("checkpoint.onnx", "inference.onnx"):
        onnx.checker.check_model(tmp_path / name, full_check=True)


@pytest.mark.usefixtures("small_limit")
def test_the_inference_model_is_the_original_with_new_weights(tmp_path: Path) -> None:
    given = in_files(layers(), tmp_path / "given.onnx")
    session = ortops.TrainingSession(trainable(given, ["head"]))
    session.step(batch())
    model = session.inference_model(original=given)
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_array_equal(weights.pop("head"), session.state["head"])
    for tensor in layers().graph.initializer:
        if tensor.name in weights:
            np.testing.assert_array_equal(weights[tensor.name], onnx.numpy_helper.to_array(tensor))
    assert not model.training_info


def test_arguments_are_not_changed() -> None:
    model = trainable(layers(), ["head"])
    before = model.SerializeToString(deterministic=True)
    session = ortops.TrainingSession(model)
    session.step(batch())
    session.inference_model(original=model)
    ortops.step_graph(model)
    assert model.SerializeToString(deterministic=True) == before


@pytest.mark.usefixtures("small_limit")
def test_step_graph_of_a_big_model(tmp_path: Path) -> None:
    model = trainable(layers(), ["head"], SGD(0.1))
    ortops.save_model(ortops.step_graph(model), tmp_path / "step.onnx")
    assert data_of(tmp_path / "step.onnx") in names_in(tmp_path)
    loss = ortops.TrainingSession(model).step(batch())["loss"]
    np.testing.assert_allclose(run(tmp_path / "step.onnx", batch(), ["loss"])[0], loss, rtol=1e-6)


def test_missing_external_data_are_named(tmp_path: Path) -> None:
    path = in_files(layers(), tmp_path / "given.onnx")
    (tmp_path / "given.onnx_weights").unlink()
    for use in (trainable, ortops.TrainingSession):
        with pytest.raises(
            ortops.ModelError,
            match=r"^initializer 'body0': cannot read its external data: .*given.onnx_weights",
        ):
            use(path)


def cached(folder: Path) -> Path:
    """Writes a model as Hugging Face's cache holds it: each file is a link to a blob."""
    blobs, revision = folder / "blobs", folder / "snapshots" / "0a1b" / "onnx"
    blobs.mkdir(parents=True)
    revision.mkdir(parents=True)
    in_files(layers(), folder / "model.onnx")
    for file in [each for each in folder.iterdir() if each.is_file()]:
        blob = blobs / f"{len(file.name):064x}"
        file.rename(blob)
        (revision / file.name).symlink_to(f"../../../blobs/{blob.name}")
    return revision / "model.onnx"


def test_a_model_in_the_cache_of_hugging_face_is_trained(tmp_path: Path) -> None:
    path = cached(tmp_path / "cache")
    session = ortops.TrainingSession(trainable(path, ["head"]))
    other = ortops.TrainingSession(trainable(layers(), ["head"]))
    assert session.step(batch())["loss"] == other.step(batch())["loss"]
    assert_equal_states(session, other)
    tuned = tmp_path / "tuned.onnx"
    ortops.save_model(session.inference_model(original=path), tuned)
    feeds = {"x": batch()["x"]}
    found = onnxruntime.InferenceSession(tuned).run(None, feeds)
    expected = run(other.inference_model(), feeds)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


@pytest.mark.parametrize("target", ["{folder}/secret", "blobs/../secret", "cycle"])
def test_links_that_leave_the_cache_of_hugging_face(target: str, tmp_path: Path) -> None:
    path = cached(tmp_path / "cache")
    (tmp_path / "secret").write_bytes(bytes(10**6))
    (tmp_path / "cache" / "secret").write_bytes(bytes(10**6))
    (data,) = (file for file in path.parent.iterdir() if file != path)
    data.unlink()
    up = "" if target.startswith("{") else "../../../"
    data.symlink_to(data.name if target == "cycle" else up + target.format(folder=tmp_path))
    with pytest.raises(ortops.ModelError, match="must not be behind a link, got the link"):
        trainable(path, ["head"])


@pytest.mark.usefixtures("small_limit")
def test_a_big_model_in_memory_is_run(tmp_path: Path) -> None:
    feeds = {"x": batch()["x"]}
    given = in_files(layers(), tmp_path / "given.onnx")
    (expected,) = run(given, feeds)
    session = ortops.InferenceSession(layers())
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("small_limit")
def test_a_big_model_with_gradients_is_run_and_lowered(tmp_path: Path) -> None:
    model = layers()
    node = onnx.helper.make_node(
        "Gradient", ["x"], ["dx"], domain="ai.onnx.preview.training", xs=["x"], y="y"
    )
    model.graph.node.append(node)
    model.graph.output.append(onnx.helper.make_tensor_value_info("dx", 1, ["batch", SIZE]))
    model.opset_import.add(domain="ai.onnx.preview.training", version=1)
    feeds = {"x": batch()["x"]}
    big = ortops.InferenceSession(model).run(["dx"], feeds)[0]
    path = tmp_path / "in" / "model.onnx"
    path.parent.mkdir()
    in_files(model, path)
    from_path = ortops.InferenceSession(path, onnxruntime.SessionOptions()).run(["dx"], feeds)[0]
    np.testing.assert_allclose(big, from_path, rtol=1e-6, atol=1e-7)
    assert cli.main(["lower", str(path), str(tmp_path / "lowered.onnx")]) == 0
    assert names_in(tmp_path) == {
        "in", "lowered.onnx", data_of(tmp_path / "lowered.onnx")
    }  # fmt: skip
    (lowered,) = run(tmp_path / "lowered.onnx", feeds, ["dx"])
    np.testing.assert_allclose(big, lowered, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("small_limit")
def test_a_big_model_in_memory_takes_no_options() -> None:
    with pytest.raises(
        ortops.ModelError, match=r"omit sess_options, or save the model with ortops\.save"
    ):
        ortops.InferenceSession(layers(), onnxruntime.SessionOptions())


@pytest.mark.usefixtures("small_limit")
def test_bytes_of_a_big_model_are_refused() -> None:
    with pytest.raises(
        ortops.ModelError,
        match=r"^model: cannot serialize 33,792 bytes .*; write the model with ort",
    ):
        external.serialize(layers())


def test_external_data_of_attributes_and_inner_graphs_come_along(tmp_path: Path) -> None:
    weights = np.arange(4, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(weights.tobytes())
    tensor = onnx.TensorProto(
        name="w", data_type=1, dims=[4], data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="w.bin")
    node = onnx.helper.make_node("Constant", [], ["c"], value=tensor)
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["w"], ["out"])], "then", [], [], [tensor]
    )
    branch = onnx.helper.make_node("If", ["condition"], ["d"], then_branch=body, else_branch=body)
    proto = onnx.helper.make_model(onnx.helper.make_graph([node, branch], "graph", [], []))
    light, _ = external.detach(proto, tmp_path)
    constant, conditional = light.graph.node
    found = [constant.attribute[0].t]
    found += [attribute.g.initializer[0] for attribute in conditional.attribute]
    for each in found:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(each), weights)


def test_a_big_graph_is_checked_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    assert external.without_data(model) is model
    monkeypatch.setattr(external, "MESSAGE_LIMIT", 20_000)
    assert layers() == model
    light = external.without_data(model)
    assert [tensor.name for tensor in light.graph.initializer] == ["head"]
    assert [value.name for value in light.graph.input] == ["x", "body0", "body1"]
    onnx.checker.check_model(light, full_check=True)


def memory_available() -> int:
    """Returns the bytes of memory that are to be had, 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")), 0)


@pytest.mark.nightly(0)
@pytest.mark.slow
def test_more_than_2_gb_in_fact(tmp_path: Path) -> None:
    if memory_available() < 12e9 or shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("it takes 12 GB of memory and 8 GB of disk, on Linux")
    size = 13_500  # three matrices of 729 MB
    model = layers(size, 3)
    *weights, head = (onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer)
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:  # pytest would keep the files
        folder = Path(name)
        ortops.save_model(model, folder / "given.onnx")
        del model
        built = trainable(folder / "given.onnx", ["head"], SGD(0.1))
        session = ortops.TrainingSession(built)
        del built
        data = batch(size)
        hidden = data["x"]
        for array in weights:
            hidden = np.tanh(hidden @ array)
        expected = np.mean((hidden @ head - data["targets"]) ** 2)
        np.testing.assert_allclose(session.step(data)["loss"], expected, rtol=1e-4)
        session.save(folder / "checkpoint.onnx")
        assert (folder / data_of(folder / "checkpoint.onnx")).stat().st_size > 2**31
        session.step(data)
        state = dict(session.state)
        del session, weights
        resumed = ortops.TrainingSession(folder / "checkpoint.onnx")
        resumed.step(data)
        for variable, array in state.items():
            np.testing.assert_array_equal(array, resumed.state[variable])
        ortops.save_model(resumed.inference_model(), folder / "inference.onnx")
        del resumed
        (outputs,) = run(folder / "inference.onnx", {"x": data["x"]})
        np.testing.assert_allclose(outputs, hidden @ state["head"], rtol=1e-3, atol=1e-4)


def test_elements_are_as_big_as_onnx_ir_says() -> None:
    unsized = {ir.DataType.UNDEFINED, ir.DataType.STRING}
    known = {kind.value: kind.itemsize for kind in ir.DataType if kind not in unsized}
    assert known.items() <= messages.ITEM_SIZES.items()  # an older onnx-ir knows fewer
