"""export_step: a folder that a driver in any language trains from. Here is one in plain Python."""

from __future__ import annotations

import copy
import functools
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from running import CPU
from test_step_graph import MODELS
from training_models import Arrays, assert_same_arrays, names
from violations import all_violations

from ortops import (
    ArgumentError,
    ModelError,
    OrtopsError,
    Tape,
    TrainingSession,
    UnsupportedError,
    build_training_model,
    export_step,
    lower,
    op,
    step_graph,
)
from ortops.cli import main
from ortops.engine.training import export
from ortops.graph.edit import merge_equal_nodes
from ortops.graph.files.serialization import from_proto, to_proto
from ortops.graph.files.wire_format import byte_spans
from ortops.graph.safetensors import map_safetensors, read_safetensors, write_safetensors
from ortops.optimizers import Adam
from ortops.schedules import cosine


def assert_same_by_name(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert_same_arrays({name: found[name] for name in expected}, expected)
    assert len(found) == len(expected)


class Driver:
    """A driver that knows a folder and nothing of ortops: json, numpy and onnxruntime."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = json.loads((folder / "step.json").read_text())
        for name, file in self.about["files"].items():
            content = (folder / name).read_bytes()
            assert (len(content), zlib.crc32(content)) == (file["bytes"], file["crc32"])
        self.state = self._read_state()
        self._step = onnxruntime.InferenceSession(folder / "step.onnx", providers=CPU)
        self._evaluate = onnxruntime.InferenceSession(folder / "evaluate.onnx", providers=CPU)

    def _read_state(self) -> Arrays:
        content = (self.folder / "state.safetensors").read_bytes()
        size = int.from_bytes(content[:8], "little")
        found = {}
        for name, entry in json.loads(content[8 : 8 + size]).items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            kind = {"F": "f", "I": "i", "U": "u"}[entry["dtype"][0]]
            dtype = np.dtype(f"<{kind}{int(entry['dtype'][1:]) // 8}")
            found[name] = np.frombuffer(content[begin:end], dtype).reshape(entry["shape"])
        return found

    def step(self, feeds: Arrays) -> Arrays:
        wanted = [each.name for each in self._step.get_outputs()]
        found = dict(
            zip(wanted, self._step.run(wanted, {**feeds, **self._read(self._step)}), strict=True)
        )
        for name, variable in self.about["variables"].items():
            if variable["next"] is not None:
                self.state[name] = found[variable["next"]]
        return {name: found[name] for name in self.about["step"]["outputs"]}

    def _read(self, session: onnxruntime.InferenceSession) -> Arrays:
        wanted = {each.name for each in session.get_inputs()}
        return {name: array for name, array in self.state.items() if name in wanted}

    def evaluate(self, feeds: Arrays) -> Arrays:
        evaluate = self.about["evaluate"]
        wanted = [each.name for each in self._evaluate.get_outputs()]
        fed = {feed["name"]: feeds[feed["name"]] for feed in evaluate["feeds"]}
        run = self._evaluate.run(wanted, {**fed, **self._read(self._evaluate)})
        found = dict(zip(wanted, run, strict=True))
        loss = sum(part["weight"] * found[part["name"]] for part in evaluate["losses"])
        shown = {name: found[output] for name, output in evaluate["outputs"].items()}
        return {"loss": np.asarray(loss), **shown}

    def save(self) -> bytes:
        content = bytearray((self.folder / "model.onnx").read_bytes())
        for name, variable in self.about["variables"].items():
            for offset, length in variable["places"]:
                content[offset : offset + length] = self.state[name].tobytes()
        return bytes(content)


def trainable(model: str = "normalizing", **settings: Any) -> onnx.ModelProto:
    """Returns a model to train; without settings, a copy of one that is built once."""
    if not settings:
        return copy.deepcopy(_with_adam(model))
    make, loss, _ = MODELS[model]
    return build_training_model(make(), loss=loss, **{"optimizer": "Adam", **settings})


@functools.cache
def _with_adam(model: str) -> onnx.ModelProto:
    return trainable(model, optimizer="Adam")


def batches(model: str = "normalizing", steps: int = 4) -> list[Arrays]:
    return [MODELS[model][2](seed=seed) for seed in range(steps)]


# ----------------------------------------------------------------------------------- the folder


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "Adam"},
        {"optimizer": "SGD", "ema_decay": 0.9},
        {"optimizer": Adam(learning_rate=cosine(0.01, steps=10)), "clip_norm": 0.5},
    ],
    ids=["adam", "averages", "schedule"],
)
def test_a_driver_trains_as_the_training_session_does(
    model: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    session = TrainingSession(trainable(model, **settings))
    first, *rest = batches(model)
    session.step(first)  # so that the state is not that of the start
    export_step(session.model(), tmp_path)
    driver = Driver(tmp_path)
    assert_same_by_name(driver.state, session.state)
    for batch in rest:
        found, wanted = driver.step(batch), session.step(batch)
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6)
    for name, array in session.state.items():
        np.testing.assert_allclose(driver.state[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
    found = driver.evaluate(first)
    assert found["loss"] == pytest.approx(session.evaluate([first])["loss"], rel=2e-5)
    for name, array in session.predict([first]).items():
        np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_what_a_driver_saved_goes_on_bit_for_bit(tmp_path: Path) -> None:
    export_step(trainable(), tmp_path)
    driver = Driver(tmp_path)
    for batch in batches():
        driver.step(batch)
    saved = driver.save()
    session = TrainingSession(saved)
    assert_same_by_name(session.state, driver.state)
    assert session.steps_done == 4
    stock = onnxruntime.InferenceSession(saved, providers=CPU)
    feeds = {each.name: batches()[0][each.name] for each in stock.get_inputs()}
    (wanted,) = TrainingSession(saved).predict([batches()[0]]).values()
    np.testing.assert_allclose(stock.run(None, feeds)[0], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_places_hold_every_copy_of_a_variable(tmp_path: Path) -> None:
    export_step(trainable(), tmp_path)
    content = (tmp_path / "model.onnx").read_bytes()
    about = json.loads((tmp_path / "step.json").read_text())
    state = TrainingSession(content).state
    for name, variable in about["variables"].items():
        assert variable["places"]
        for offset, length in variable["places"]:
            assert content[offset : offset + length] == state[name].tobytes()
    proto = onnx.load_from_string(content)
    tensors = [*proto.graph.initializer]
    tensors += [t for info in proto.training_info for t in info.algorithm.initializer]
    count = sum(len(variable["places"]) for variable in about["variables"].values())
    assert count == len([tensor for tensor in tensors if tensor.name in about["variables"]])


@pytest.mark.slow
def test_nothing_can_be_left_out(tmp_path: Path) -> None:
    export_step(trainable(), tmp_path)
    model = onnx.load(tmp_path / "step.onnx")
    assert not model.graph.initializer
    assert {node.domain for node in model.graph.node} == {""}
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=CPU)
    with pytest.raises(ValueError, match=r"Required inputs .* are missing"):
        session.run(None, batches()[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_said_once_and_is_the_same(model: str, tmp_path: Path) -> None:
    given = trainable(model)
    export_step(given, tmp_path)
    step = onnx.load(tmp_path / "step.onnx")
    whole = lower(step_graph(given, defaults=False))
    assert not step.graph.value_info
    assert names(step.graph.input) == names(whole.graph.input)
    assert names(step.graph.output) == names(whole.graph.output)
    kept = set(names(step.graph.output))
    said = [
        (n.op_type, *n.input, *(a.SerializeToString(deterministic=True) for a in n.attribute))
        for n in step.graph.node
        if not kept & set(n.output)
    ]
    assert len(said) == len(set(said)) < len(whole.graph.node)
    onnx.checker.check_model(step, full_check=True)
    feeds = {**batches(model)[0], **TrainingSession(given).state}
    found, wanted = (
        onnxruntime.InferenceSession(each.SerializeToString(), providers=CPU).run(None, feeds)
        for each in (step, whole)
    )
    for array, expected in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_equal_nodes_are_one_but_not_where_they_draw_numbers() -> None:
    with Tape(name="equal") as tape:
        x = tape.input("x", np.float32, ["batch"])
        same = [op.Exp(x) * 2.0, op.Exp(x) * 2.0]
        drawn = [op.RandomUniformLike(x), op.RandomUniformLike(x)]
        others = [op.Clip(x, np.float32(0)), op.Clip(x, None, np.float32(0))]
        tape.output(op.Concat(*same, *drawn, *others, axis=0), "y")
        tape.output(op.Exp(x), "z")
    model = from_proto(tape.model())
    merge_equal_nodes(model.graph)
    kinds = [node.op_type for node in model.graph if node.op_type != "Constant"]
    assert sorted(kinds) == sorted(
        ["Exp", "Exp", "Mul", "RandomUniformLike", "RandomUniformLike", "Clip", "Clip", "Concat"]
    )
    feeds = {"x": np.array([-1, 2], np.float32)}
    session = onnxruntime.InferenceSession(to_proto(model).SerializeToString(), providers=CPU)
    y, z = session.run(None, feeds)
    np.testing.assert_allclose(z, np.exp(feeds["x"]), rtol=1e-6)
    np.testing.assert_allclose(y[:4], 2 * np.exp(np.tile(feeds["x"], 2)), rtol=1e-6)
    np.testing.assert_array_equal(y[8:], [0, 2, -1, 0])


@pytest.mark.slow
def test_step_json_says_what_is_what(tmp_path: Path) -> None:
    export_step(trainable(ema_decay=0.9), tmp_path)
    about = json.loads((tmp_path / "step.json").read_text())
    assert (about["format"], about["version"], about["target"]) == ("ortops.step", 1, None)
    assert about["step"]["loss"] == "loss"
    images, labels = about["step"]["feeds"]
    assert images["type"] == "float32"
    accepted = [{"classes": 3, "ignored": None}]
    shape = images["shape"][:1]
    assert labels == {"name": "labels", "type": "int64", "shape": shape, "labels": accepted}
    assert "labels" not in images
    assert about["evaluate"]["feeds"][1] == labels
    assert about["evaluate"]["predict"] == [images["name"]]
    assert isinstance(images["shape"][0], str)
    assert about["learning_rates"] == ["learning_rate"]
    assert about["counter"] == "step"
    roles: dict[str, list[str]] = {}
    for name, variable in about["variables"].items():
        roles.setdefault(variable["role"], []).append(name)
        if variable["role"] == "average":
            assert about["variables"][variable["of"]]["role"] == "parameter"
    session = TrainingSession(trainable(ema_decay=0.9))
    assert set(roles["parameter"]) == set(session.parameters)
    assert len(roles["average"]) == len(roles["parameter"])
    assert len(roles["optimizer"]) == 2 * len(roles["parameter"])
    assert len(roles["statistic"]) == 2
    assert roles["step"] == ["step"]
    assert roles["seed"] == ["seed"]
    assert about["variables"]["learning_rate"]["next"] is None


@pytest.mark.slow
def test_a_half_has_its_master(tmp_path: Path) -> None:
    model = MODELS["classifier"][0]()
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    del model.graph.value_info[:]
    trained = build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="Adam")
    export_step(trained, tmp_path)
    about = json.loads((tmp_path / "step.json").read_text())
    masters = {n: v["of"] for n, v in about["variables"].items() if v["role"] == "master"}
    assert set(masters.values()) == set(TrainingSession(trained).parameters)
    assert all(about["variables"][name]["type"] == "float16" for name in masters.values())


@pytest.mark.slow
def test_how_far_a_fit_is_stays_out_of_it(tmp_path: Path) -> None:
    session = TrainingSession(trainable("classifier"))
    session.fit(batches("classifier"), epochs=1, progress=False)
    assert any(note.key == "ortops.fit" for note in session.model().metadata_props)
    export_step(session.model(), tmp_path)
    kept = onnx.load(tmp_path / "model.onnx").metadata_props
    assert "ortops.fit" not in [note.key for note in kept]
    assert "ortops.training" in [note.key for note in kept]


@pytest.mark.slow
def test_the_model_is_not_changed_and_files_are_those_of_its_path(tmp_path: Path) -> None:
    model = trainable()
    before = model.SerializeToString(deterministic=True)
    export_step(model, tmp_path / "given")
    assert model.SerializeToString(deterministic=True) == before
    onnx.save(trainable(), tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0)
    assert main(["export-step", str(tmp_path / "model.onnx"), str(tmp_path / "called")]) == 0
    for name in ("step.onnx", "evaluate.onnx", "state.safetensors"):
        assert (tmp_path / "called" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()
    assert_same_arrays(
        TrainingSession(tmp_path / "called" / "model.onnx").state, TrainingSession(model).state
    )


def kept(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.onnx", "step.json", "index.html", "worker.mjs"])
def test_files_of_others_are_not_replaced(tmp_path: Path, name: str, capsys: Any) -> None:
    onnx.save(trainable(), tmp_path / "trained.onnx")
    (tmp_path / name).write_bytes(b"{}")
    before = kept(tmp_path)
    with pytest.raises(OrtopsError, match=f"{name}' was not written by an export"):
        export_step(trainable(), tmp_path, web=True)
    command = ["export-step", str(tmp_path / "trained.onnx"), str(tmp_path), "--web"]
    assert main(command) == 1
    assert "--force on the command line" in capsys.readouterr().err
    assert kept(tmp_path) == before
    assert main([*command, "--force"]) == 0
    assert kept(tmp_path)[name] != b"{}"
    Driver(tmp_path)


def policy(page: Path) -> dict[str, str]:
    """Returns the directives of a page's Content-Security-Policy."""
    (found,) = re.findall(
        r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', page.read_text()
    )
    return dict(part.strip().split(" ", 1) for part in found.split(";"))


def test_pages_run_only_what_was_exported(tmp_path: Path) -> None:
    """Beside what they get from the place of onnxruntime-web that the export names."""
    cdn = "https://cdn.jsdelivr.net"
    model = trainable("affine", optimizer="SGD")
    for number, (place, trusted) in enumerate(
        {
            "..": "",
            f"{cdn}/npm/onnxruntime-web@1.30.0/dist/": f" {cdn}",
        }.items()
    ):
        folder = tmp_path / str(number)
        export_step(model, folder, web=True, runtime=place)
        for name in ("index.html", "classifier.html"):
            found = policy(folder / name)
            assert found["default-src"] == "'none'", name
            assert found["script-src"] == f"'self'{trusted} 'wasm-unsafe-eval'"
            assert found["worker-src"] == found["connect-src"] == f"'self'{trusted}"
            text = (folder / name).read_text()
            assert (
                re.findall(r"<script(?![^>]* src=)| on\w+=|<style| style=|javascript:", text) == []
            )
        (written,) = re.findall(r'PLACE = "(.*)";', (folder / "runtime.mjs").read_text())
        assert written == (place if place.endswith("/") else f"{place}/")


NO_PLACES: list[Any] = [
    *("", "//evil.example/ort/", "data:text/javascript,1", "javascript:1", "file:///ort/"),
    *("https://a/?x=", "https://a/#x", "https://user:secret@a/", "https://a b/", "https:///x"),
    *('./ort/"; evil(); "', "./ort/'", "https://a; script-src *", "./a\\b/", "./ort//", "\n./"),
    *("blob:http://a/", "https:evil", "./ört/", "https://a:b/", None, 1, b"./ort/", Path("ort")),
]


def test_places_of_the_runtime_are_checked(tmp_path: Path) -> None:
    with all_violations() as check:
        for place in NO_PLACES:
            with check(repr(place)), pytest.raises(ArgumentError, match="runtime must be the add"):
                export_step(b"no model", tmp_path / "page", web=True, runtime=place)
    assert not (tmp_path / "page").exists()


@pytest.mark.slow
def test_the_model_is_not_replaced_by_what_is_exported(tmp_path: Path) -> None:
    onnx.save(trainable(), tmp_path / "model.onnx")
    before = kept(tmp_path)
    with pytest.raises(OrtopsError, match=r"model.onnx' was not written by an export"):
        export_step(trainable(optimizer="SGD"), tmp_path)
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "model.onnx").symlink_to(tmp_path / "model.onnx")
    with pytest.raises(OrtopsError, match=r"model.onnx' was not written by an export"):
        export_step(trainable(optimizer="SGD"), tmp_path / "step")
    assert (tmp_path / "model.onnx").read_bytes() == before["model.onnx"]


@pytest.mark.slow
def test_an_export_replaces_an_earlier_one(tmp_path: Path) -> None:
    export_step(trainable(), tmp_path, web=True)
    export_step(trainable(optimizer="SGD"), tmp_path, web=True)
    assert "optimizer" not in {
        each["role"] for each in Driver(tmp_path).about["variables"].values()
    }
    export_step(tmp_path / "model.onnx", tmp_path, target="onnxruntime")
    (tmp_path / "step.json").unlink()  # as if that had been interrupted
    export_step(tmp_path / "model.onnx", tmp_path, target="onnxruntime")
    (tmp_path / "model.onnx").write_bytes(b"trained elsewhere")
    with pytest.raises(OrtopsError, match="or was changed since"):
        export_step(trainable(), tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == b"trained elsewhere"


@pytest.mark.slow
def test_nothing_is_written_where_a_type_has_no_name(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("ortops.graph.safetensors._NAMES", {})
    with pytest.raises(UnsupportedError, match="safetensors does not support"):
        export_step(trainable(), tmp_path)
    assert not kept(tmp_path)


def test_a_model_that_is_not_trainable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has no training_info; make it trainable"):
        export_step(MODELS["affine"][0](), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


# ------------------------------------------------------------------------- parts, and no defaults


@pytest.mark.quick(1)
@pytest.mark.parametrize("model", MODELS)
def test_two_halves_are_a_step(model: str) -> None:
    given = trainable(model)
    first, second = step_graph(given, part="gradients"), step_graph(given, part="apply")
    for half in (first, second):
        onnx.checker.check_model(half, full_check=True)
    keys = ("ortops.gradients", "ortops.step_graph")
    notes = [
        {note.key: json.loads(note.value) for note in half.metadata_props if note.key in keys}
        for half in (first, second)
    ]
    assert notes[0]["ortops.gradients"] == notes[1]["ortops.gradients"]
    assert notes[0]["ortops.step_graph"] == {}
    session = TrainingSession(given)
    one, other = (
        onnxruntime.InferenceSession(half.SerializeToString(), providers=CPU)
        for half in (first, second)
    )
    state: Arrays = {}

    def run(half: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
        known = {v.name for v in (*half.get_inputs(), *half.get_overridable_initializers())}
        outputs = [value.name for value in half.get_outputs()]
        fed = {name: array for name, array in feeds.items() if name in known}
        return dict(zip(outputs, half.run(outputs, fed), strict=True))

    for batch in batches(model):
        gradients = run(one, {**state, **batch})
        wanted = session.gradients(batch)
        for name, tensor in notes[0]["ortops.gradients"].items():
            np.testing.assert_allclose(gradients[tensor], wanted[name], rtol=2e-5, atol=2e-6)
        found = run(other, {**state, **batch, **gradients})
        state = {name: found[new] for name, new in notes[1]["ortops.step_graph"].items()}
        session.step(batch)
    for name, array in state.items():
        np.testing.assert_allclose(array, session.state[name], rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("part", [None, "gradients", "apply"])
def test_without_defaults_all_has_to_be_fed(part: Any) -> None:
    given = trainable()
    step = step_graph(given, defaults=False, part=part)
    onnx.checker.check_model(step, full_check=True)
    plain = onnxruntime.InferenceSession(step.SerializeToString(), providers=CPU)
    assert not plain.get_overridable_initializers()
    variables = set(TrainingSession(given).state)
    with_defaults = step_graph(given, part=part)
    assert set(names(step.graph.input)) == set(names(with_defaults.graph.input))
    assert not variables & set(names(step.graph.initializer))
    assert variables & set(names(with_defaults.graph.initializer))


def test_what_there_is_not_is_refused() -> None:
    given = trainable()
    with pytest.raises(ArgumentError, match="part must be None, 'gradients' or 'apply', got 'up"):
        step_graph(given, part="update")  # type: ignore[arg-type]
    with pytest.raises(
        ArgumentError, match="target must be None, 'onnxruntime', 'cuda' or 'webgpu', got 'tpu'"
    ):
        step_graph(given, target="tpu")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ safetensors


def test_safetensors_are_read_as_they_were_written(tmp_path: Path) -> None:
    arrays = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "scalar": np.array(7, np.int64),
        "nothing": np.zeros((0, 4), np.float16),
        "truth": np.array([True, False]),
    }
    write_safetensors(tmp_path / "x", arrays)
    assert_same_arrays(read_safetensors(tmp_path / "x"), arrays)


NO_ENTRIES: list[Any] = [
    *(None, [], "F32", 5, {}, {"dtype": "F32", "shape": [2]}, {"dtype": "F32", "shape": [2, 1]}),
    *({"shape": shape} for shape in (None, 2, "2", [0.5, 4], [2.0], [True, 2], [None], [-1, -2])),
    *({"shape": shape} for shape in ({"0": 2}, [[2]], [2**63, 0], [1] * 70 + [2], [1e400])),
    *({"data_offsets": place} for place in ([-8, 0], [0, -8], [0.0, 8], [0, 8.0], [False, 8])),
    *({"data_offsets": place} for place in (None, "08", [0], [8], [0, 8, 8], [8, 0], [0, 2**70])),
    *({"data_offsets": place} for place in ({"0": 8}, [0, "8"], [None, 8], [4, 12], [0, 4])),
    *({"dtype": kind} for kind in ("constructor", "__class__", "", None, 5, [], {}, "f32", "F8")),
]
HEADERS = {
    "twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "array": b"[]",
    "null": b"null",
    "empty": b"",
    "latin-1": b'{"\xe9": 1}',
    "cut": b'{"a"',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
}


def test_headers_of_safetensors_that_are_refused(tmp_path: Path) -> None:
    """None is taken for another, and the error names the file."""
    valid = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    headers: dict[str, bytes] = {"valid": json.dumps({"a": valid}).encode(), **HEADERS}
    for entry in NO_ENTRIES:
        changed = valid | entry if isinstance(entry, dict) and len(entry) == 1 else entry
        headers[repr(entry)] = json.dumps({"a": changed}).encode()
    file = tmp_path / "state.safetensors"
    with all_violations() as check:
        for name, header in headers.items():
            file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
            for read in (read_safetensors, map_safetensors):
                with check(name):
                    if name == "valid":
                        assert read(file)["a"].tolist() == [0, 0]
                        continue
                    with pytest.raises((ModelError, UnsupportedError), match=r"state.safetensors"):
                        read(file)
        for size in (2**63, 2**64 - 1, 10**6, 3):
            file.write_bytes(size.to_bytes(8, "little") + headers["valid"] + bytes(8))
            with check(size), pytest.raises(ModelError, match="not a safetensors file"):
                read_safetensors(file)


def test_a_description_that_others_wrote_frees_no_file(tmp_path: Path) -> None:
    """What names other files, or is no description, says nothing of what may be replaced."""
    described = {"format": export.FORMAT, "files": {"../step.onnx": {"bytes": 3, "crc32": 0}}}
    contents = {
        "outside": json.dumps(described).encode(),
        "null": b"null",
        "array": b"[]",
        "text": b'"ortops"',
        "empty": b"",
        "gzip": b"\x1f\x8b",
        "deep": b"[" * 10**5,
        "digits": b"9" * 5000,
        "utf-16": '{"a": 1}'.encode("utf-16"),
    }
    for key in ("files", "web", "format"):
        for value in (None, 5, "x", [1], {"step.onnx": None}, {"step.onnx": [1]}, 1e400):
            contents[f"{key} {value}"] = json.dumps(described | {key: value}).encode()
    (tmp_path / "step.onnx").write_bytes(b"old")
    message = r"step.onnx' was not written by an export to this folder"
    with all_violations() as check:
        for name, content in contents.items():
            (tmp_path / "step.json").write_bytes(content)
            with check(name), pytest.raises(OrtopsError, match=message):
                export._refuse_others(tmp_path, {"step.onnx": b"new"})


@pytest.mark.optional("safetensors", "test")
def test_safetensors_are_those_of_others(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    arrays = {"b": np.arange(6.0).reshape(2, 3), "a": np.array([3], np.int16)}
    write_safetensors(tmp_path / "ours", arrays)
    assert_same_by_name(load_file(tmp_path / "ours"), arrays)
    save_file(arrays, tmp_path / "theirs", metadata={"format": "np"})
    assert_same_by_name(read_safetensors(tmp_path / "theirs"), arrays)


def test_other_files_and_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="variable 'z': safetensors does not support complex64"
    ):
        write_safetensors(tmp_path / "x", {"z": np.zeros(1, np.complex64)})
    write_safetensors(tmp_path / "x", {"a": np.zeros(3, np.float32)})
    whole = (tmp_path / "x").read_bytes()
    gap = whole.replace(b"[0,12]", b"[4,16]") + bytes(4)
    negative = whole.replace(b"[3]", b"[-1,-3]").replace(b"8", b"<", 1)
    shapes = (whole.replace(b"[3]", b"[2]"), negative)
    for content in (b"", b"\x08", whole[:-1], whole + b"0", whole[:20], gap, *shapes):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ModelError, match="not a safetensors file"):
            read_safetensors(tmp_path / "x")
    (tmp_path / "x").write_bytes(whole.replace(b"F32", b"F6x"))
    with pytest.raises(UnsupportedError, match=r"'a' must be of type F64, F32, .*, got F6x$"):
        read_safetensors(tmp_path / "x")


def test_places_skip_what_is_no_raw_data() -> None:
    graph = onnx.GraphProto(name="g")
    graph.initializer.add(name="floats", data_type=1, dims=[2], float_data=[1.0, 2.0])
    graph.initializer.add(name="raw", data_type=1, dims=[1], raw_data=b"\1\2\3\4")
    message = onnx.ModelProto(ir_version=10, graph=graph).SerializeToString()
    (span,) = byte_spans(message)["raw"]
    assert message[slice(*span)] == b"\1\2\3\4"
    assert "floats" not in byte_spans(message)


@pytest.mark.slow
def test_a_later_version_replaces_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose files differ from those that the earlier version wrote."""
    (tmp_path / "installed" / "web").mkdir(parents=True)
    for name in export._WEB_FILES:
        (tmp_path / "installed" / "web" / name).write_bytes(b"earlier")
    with monkeypatch.context() as earlier:
        earlier.setattr(export.resources, "files", lambda package: tmp_path / "installed")
        export_step(trainable(), tmp_path / "page", web=True)
    export_step(trainable(), tmp_path / "page", web=True)
    assert (tmp_path / "page" / "ortops.mjs").read_bytes() != b"earlier"
    (tmp_path / "page" / "index.html").write_bytes(b"mine")
    with pytest.raises(OrtopsError, match=r"index.html' was not written by an export"):
        export_step(trainable(), tmp_path / "page", web=True)
