"""``session.properties``: what they take, and every way on which a file keeps them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import affine, affine_batch
from violations import all_violations

import ortops
from ortops import ArgumentError, ModelError, TrainingSession, callbacks
from ortops.cli import main
from ortops.docs import examples
from ortops.graph.limits import LIMITS

GIVEN: dict[str, Any] = {"best": 0.93, "epoch": 12, "who": "Zoë \u2603", "ortops.training": "{"}


def noted(model: onnx.ModelProto) -> dict[str, Any]:
    """The properties in a model, read without ortops."""
    (text,) = (entry.value for entry in model.metadata_props if entry.key == "ortops.properties")
    found: dict[str, Any] = json.loads(text)
    return found


def session_with(given: dict[str, Any] = GIVEN) -> TrainingSession:
    session = examples.session()
    session.properties.update(given)
    return session


def test_every_file_keeps_them(tmp_path: Path) -> None:
    session = session_with()
    session.step(examples.BATCH)
    session.save(tmp_path / "a.onnx")
    original = onnx.load(tmp_path / "a.onnx")
    del original.training_info[:]
    original.metadata_props.add(key="mine", value="stays")
    fitted = session_with()
    paths = [tmp_path / "best.onnx", tmp_path / "checkpoint.onnx"]
    made = [callbacks.BestModel(paths[0], monitor="loss"), callbacks.Checkpoint(paths[1])]
    fitted.fit(examples.BATCH, progress=False, callbacks=made)
    whole = session.model()
    with all_violations() as check:
        for how, model in {
            "model": whole,
            "save": onnx.load(tmp_path / "a.onnx"),
            "with_trainable": session.with_trainable(["w"]).model(),
            "inference_model": session.inference_model(),
            "original": session.inference_model(original),
            "BestModel": onnx.load(paths[0]),
            "Checkpoint": onnx.load(paths[1]),
            "another session": TrainingSession(whole).model(),
            "step_graph": ortops.step_graph(whole),
            "built again": ortops.build_training_model(
                session.inference_model(), loss="MeanSquaredError", optimizer="SGD"
            ),
        }.items():
            with check(how):
                assert noted(model) == GIVEN
    plain = onnxruntime.InferenceSession(session.inference_model().SerializeToString())
    shown = plain.get_modelmeta().custom_metadata_map["ortops.properties"]
    assert json.loads(shown) == GIVEN
    kept = {entry.key for entry in session.inference_model(original).metadata_props}
    assert "mine" in kept


def test_they_are_a_mapping_of_python() -> None:
    session = session_with()
    found = session.properties
    assert dict(found) == GIVEN
    found["best"] = np.float32(0.5)
    found["epoch"] = np.array(3)
    found["large"] = np.int64(-(2**63))
    assert [type(found[name]) for name in ("best", "epoch", "large")] == [float, int, int]
    del found["who"], found["ortops.training"]
    assert noted(session.model()) == {"best": 0.5, "epoch": 3, "large": -(2**63)}
    with pytest.raises(KeyError):
        found["who"]
    found.clear()
    assert noted(session.inference_model()) == {}
    other = TrainingSession(session_with().model())
    other.properties.clear()
    assert noted(other.inference_model(session_with().inference_model())) == {}


def test_what_is_no_property(monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_with()
    with all_violations() as check:
        for value in (
            *(True, None, float("nan"), float("-inf"), 2**63, -(2**63) - 1, 10**400, 1j, b"text"),
            *([1], {"a": 1}, np.zeros(2), np.array(np.nan), np.bool_(True), np.datetime64("now")),
        ):
            with (
                check(repr(value)[:20]),
                pytest.raises(ArgumentError, match="properties 'a' must be an integer of 64 bits"),
            ):
                session.properties["a"] = value
        for name in (3, "", None):
            with check(name), pytest.raises(ArgumentError, match="a name must be a text, got"):
                session.properties[name] = 1  # type: ignore[index]
        for name, text in (("a", "\ud800"), ("\ud800", "a")):
            with check(repr(text)), pytest.raises(ArgumentError, match="is no text in UTF-8"):
                session.properties[name] = text
        monkeypatch.setattr(LIMITS, "metadata_bytes", 200)
        with check("long"), pytest.raises(ArgumentError, match="must have at most 200 char"):
            session.properties["a"] = "x" * 200
    assert dict(session.properties) == GIVEN


@pytest.mark.slow
def test_properties_of_a_damaged_file() -> None:
    with all_violations() as check:
        for text, message in (
            ("{", "metadata_props 'ortops.properties': "),
            ("[]", "'ortops.properties' must be an object, got a list"),
            ('{"a": null}', "'ortops.properties': properties 'a' must be .* got None"),
            ('{"a": NaN}', "properties 'a' must be .* got nan"),
            ('{"a": 1e999}', "properties 'a' must be .* got inf"),
        ):
            model = examples.session().model()
            model.metadata_props.add(key="ortops.properties", value=text)
            session = TrainingSession(model)  # what does not read them runs
            with check(text), pytest.raises(ModelError, match=message):
                session.properties["b"] = 1


def test_what_they_change_and_leave(tmp_path: Path) -> None:
    model = examples.session().model()
    before = model.SerializeToString(deterministic=True)
    session = TrainingSession(model)
    session.save(tmp_path / "a.onnx")
    session.properties["best"] = 1
    assert session.saved_in == ""
    assert model.SerializeToString(deterministic=True) == before
    assert session._file.digest() == TrainingSession(model)._file.digest()
    session.reset()
    with session.unchanged():
        session.properties["best"] = 2
    assert dict(session.properties) == {"best": 1}
    threads = [
        threading.Thread(target=session.properties.__setitem__, args=(str(i), i)) for i in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(session.properties) == 9


def test_sessions_of_several_algorithms_and_of_adapters() -> None:
    built = ortops.build_training_model(
        affine(), loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
    )
    both = ortops.add_training(built, loss="L1", optimizer="SGD", name="other")
    session = TrainingSession(both)
    session.step(affine_batch(), entry="other")
    session.properties["best"] = 1
    assert noted(session.model()) == {"best": 1}
    adapted = ortops.lora.add(session.inference_model(), rank=1)
    tuned = TrainingSession(ortops.build_training_model(adapted, loss="L1", optimizer="SGD"))
    assert noted(ortops.lora.merge(tuned.inference_model())) == {"best": 1}


def test_inspect_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = session_with({"best": 0.93, "note": "\x1b[31mred\nloss: 0"})
    session.save("a.onnx")
    onnx.save(session.inference_model(), "b.onnx")
    for file in ("a.onnx", "b.onnx"):
        assert main(["inspect", file]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert "property best: 0.93" in shown
        assert "property note: \\x1b[31mred\\nloss: 0" in shown
        assert main(["inspect", file, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["properties"]["best"] == 0.93
