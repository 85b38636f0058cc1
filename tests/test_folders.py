"""Models made from a file know the folder of its external data, wherever the process works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from models import mlp
from ortops import lora, surgery
from ortops.engine.check import check
from ortops.graph.files.folders import FOLDER_KEY

X = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
BATCH = {"images": X, "labels": np.array([0, 1, 2])}
LOSS: dict[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": ortops.optimizers.SGD(0.1)}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with external data, in a folder that is not the working directory."""
    (tmp_path / "given").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "given" / "model.onnx"
    onnx.save(mlp.mlp((40, 32, 5)), path, save_as_external_data=True, location="model.data")
    return path


CHANGES: dict[str, Callable[[Any], onnx.ModelProto]] = {
    "add": lambda model: lora.add(model, rank=2),
    "replace_head": lambda model: surgery.replace_head(model, classes=4),
    "free_batch": surgery.free_batch,
    "name_output": lambda model: surgery.name_output(model, "logits"),
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("relative", [False, True])
def test_changed_models_know_their_folder(
    file: Path, change: Callable[[Any], onnx.ModelProto], relative: bool, tmp_path: Path
) -> None:
    changed = change("../given/model.onnx" if relative else file)
    assert any(tensor.external_data for tensor in changed.graph.initializer)
    copied = onnx.ModelProto()
    copied.CopyFrom(changed)
    whole = change(onnx.load(file))
    expected = ortops.TrainingSession(ortops.build_training_model(whole, **LOSS)).step(BATCH)
    for model in (changed, copied, changed.SerializeToString()):
        session = ortops.TrainingSession(ortops.build_training_model(model, **LOSS))
        assert session.step(BATCH)["loss"] == expected["loss"]
        assert (
            session.model().metadata_props
            == ortops.TrainingSession(ortops.build_training_model(whole, **LOSS))
            .model()
            .metadata_props
        )
    assert check(changed, loss="SoftmaxCrossEntropy")
    reference = onnxruntime.InferenceSession(whole.SerializeToString()).run(None, {"images": X})
    found = ortops.InferenceSession(changed).run(None, {"images": X})
    np.testing.assert_array_equal(found[0], reference[0])
    for saved in (tmp_path / "new.onnx", file.parent / "again.onnx"):
        ortops.save_model(changed, saved)
        found = onnxruntime.InferenceSession(saved).run(None, {"images": X})
        np.testing.assert_array_equal(found[0], reference[0])
        assert FOLDER_KEY not in {e.key for e in onnx.load(saved).metadata_props}


def test_adapters_of_a_file_elsewhere(file: Path, tmp_path: Path) -> None:
    adapted = lora.add(file, rank=2)
    session = ortops.TrainingSession(ortops.build_training_model(adapted, **LOSS))
    session.step(BATCH)
    trained = session.inference_model()
    lora.save_adapter(trained, tmp_path / "a.onnx_adapter")
    loaded = lora.load_adapter(adapted, tmp_path / "a.onnx_adapter")
    merged = lora.merge(loaded)
    expected = onnxruntime.InferenceSession(trained.SerializeToString()).run(None, {"images": X})
    for model in (loaded, merged):
        found = ortops.InferenceSession(model).run(None, {"images": X})
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)


def test_a_file_cannot_name_a_folder(file: Path) -> None:
    """What another process wrote, or an attacker, has no meaning."""
    model = onnx.load(file, load_external_data=False)
    for text in (str(file.parent), "0", "/0", f"{'0' * 32}/0", "../given"):
        del model.metadata_props[:]
        model.metadata_props.add(key=FOLDER_KEY, value=text)
        with pytest.raises((ortops.OrtopsError, FileNotFoundError), match=r"model\.data"):
            ortops.build_training_model(model, **LOSS)
