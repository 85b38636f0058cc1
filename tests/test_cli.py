"""The command line: what it writes and prints, and how it ends."""

from __future__ import annotations

import csv
import importlib.util
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from training_models import affine, assert_same_arrays

import ortops
from models import mlp
from ortops.cli import main, standard_streams
from ortops.cli.calls import read_call
from ortops.cli.parser import make_parser
from ortops.cli.streams import print_json
from ortops.cli.training import _resuming
from ortops.graph.limits import LIMITS

CLASSIFIER = """
<ir_version: 10, opset_import: ["" : 18]>
classifier (float[batch, 2] points) => (float[batch, 3] probabilities)
<float[2, 3] w = {1, 0, 0.5, 0, 1, 0.5}> {
    logits = MatMul (points, w)
    probabilities = Softmax (logits)
}"""

COMMANDS = (
    *("check", "build", "train", "eval", "predict", "export", "lower", "inspect", "lora"),
    *("tune", "weights", "completion"),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a classifier and points, which is the current one."""
    monkeypatch.chdir(tmp_path)
    onnx.save(onnx.parser.parse_model(CLASSIFIER), "model.onnx")
    points = np.random.default_rng(0).standard_normal((120, 2)).astype(np.float32)
    labels = np.argmax([points[:, 0], points[:, 1], -points.sum(axis=1)], axis=0)
    np.savez("train.npz", points=points, labels=labels)
    names = np.array(["east", "north", "rest"])[labels]
    with Path("train.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["x", "y", "labels"])
        writer.writerows(
            [*map(str, point), name] for point, name in zip(points, names, strict=True)
        )
    return tmp_path


def run(*arguments: str) -> int:
    return main(list(arguments))


def train(*more: str, data: str = "train.npz") -> int:
    return run(
        *("train", "model.onnx", "--data", data, "--loss", "SoftmaxCrossEntropy"),
        *("--optimizer", "Adam", "--learning-rate", "0.05", "--quiet", *more),
    )


def accuracy(path: str) -> float:
    stored = np.load("train.npz")
    session = onnxruntime.InferenceSession(path)
    probabilities = session.run(None, {"points": stored["points"]})[0]
    return float((probabilities.argmax(axis=1) == stored["labels"]).mean())


# ----------------------------------------------------------------------------- the way through


@pytest.mark.slow
def test_train_eval_predict_export(folder, capsys):
    before = accuracy("model.onnx")
    assert train("--epochs", "20", "--save", "trained.onnx") == 0
    assert accuracy("trained.onnx") > 0.95 > before
    assert (
        run("eval", "trained.onnx", "--data", "train.npz", "--metrics", "accuracy", "--json") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == pytest.approx(accuracy("trained.onnx"))
    assert run("predict", "trained.onnx", "--data", "train.npz", "--output", "found.npz") == 0
    stored = np.load("found.npz")["probabilities"]
    points = np.load("train.npz")["points"]
    expected = onnxruntime.InferenceSession("trained.onnx").run(None, {"points": points})[0]
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    assert run("export", "trained.onnx", "tuned.onnx", "--original", "model.onnx") == 0
    tuned = onnx.load("tuned.onnx")
    assert tuned.opset_import[0].version == 18
    assert not tuned.training_info
    assert accuracy("tuned.onnx") == accuracy("trained.onnx")


@pytest.mark.parametrize("batch", [1, 4])
def test_predict_takes_rows_of_a_fixed_batch_in_its_batches(folder, batch):
    model = onnx.load("model.onnx")
    for described in (*model.graph.input, *model.graph.output):
        described.type.tensor_type.shape.dim[0].dim_value = batch
    onnx.save(model, "fixed.onnx")
    points = np.load("train.npz")["points"][:8]
    np.savez("eight.npz", points=points)
    assert run("predict", "fixed.onnx", "--data", "eight.npz", "--output", "found.npz") == 1
    batches = ["--batch-size", str(batch)]
    assert (
        run("predict", "fixed.onnx", "--data", "eight.npz", "--output", "found.npz", *batches) == 0
    )
    expected = onnxruntime.InferenceSession("model.onnx").run(None, {"points": points})[0]
    np.testing.assert_allclose(np.load("found.npz")["probabilities"], expected, rtol=1e-6)


def test_predict_says_that_default_values_of_inputs_are_used(folder, capsys):
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        scaled (float[batch, 2] points, float[1] scale) => (float[batch, 2] y)
        <float[1] scale = {2}, float[2, 2] w = {1, 0, 0, 1}>
        { h = MatMul (points, w)  y = Mul (h, scale) }""")
    onnx.save(model, "scaled.onnx")
    np.savez("scaled.npz", points=np.ones((3, 2), np.float32), scale=np.full(1, 5, np.float32))
    assert run("predict", "scaled.onnx", "--data", "scaled.npz", "--output", "found.npz") == 0
    assert (np.load("found.npz")["y"] == 2).all()
    assert "input 'scale' has a default value, which is used" in capsys.readouterr().err
    assert run("predict", "model.onnx", "--data", "train.npz", "--output", "found.npz") == 0
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_weights_of_rows_and_classes(folder, capsys):
    stored = dict(np.load("train.npz"))
    table = np.array([3.0, 1.0, 0.5], np.float32)
    np.savez("weighed.npz", **stored, importance=table[stored["labels"]])
    common = ("--loss", "SoftmaxCrossEntropy", "--quiet")
    weighed = ("train", "model.onnx", "--data", "weighed.npz", "--sample-weight", "importance")
    assert run(*weighed, *common, "--save", "rows.onnx") == 0
    by_class = ("--class-weight", '{"0": 3, "2": 0.5}')
    plain = ("train", "model.onnx", "--data", "train.npz")
    assert run(*plain, *by_class, *common, "--save", "classes.onnx") == 0
    one, other = (ortops.TrainingSession(f"{name}.onnx").state for name in ("rows", "classes"))
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
    capsys.readouterr()
    assert run("eval", "rows.onnx", "--data", "weighed.npz", "--json") == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert run("eval", "classes.onnx", "--data", "train.npz", *by_class, "--json") == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(loss)
    assert run("build", "model.onnx", "plain.onnx", *common[:2]) == 0
    later = ("--data", "weighed.npz", "--sample-weight", "importance", "--quiet")
    more = ("--validation", "0.2", "--epochs", "1")
    assert run("train", "plain.onnx", *later, *more, "--save", "later.onnx") == 0
    assert run(*weighed, *common, *more, "--save", "built.onnx") == 0
    one, other = (ortops.TrainingSession(f"{name}.onnx") for name in ("later", "built"))
    for name, array in one.state.items():
        np.testing.assert_array_equal(array, other.state[name])
    assert one.history[0]["validation_loss"] == other.history[0]["validation_loss"]
    assert sorted(one.inputs) == ["labels", "points"]
    capsys.readouterr()
    found = []
    for name, given in (("later", later[:4]), ("built", later[:2])):
        assert run("eval", f"{name}.onnx", *given, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert run(*plain, "--class-weight", "balanced", *common, "--save", "balanced.onnx") == 0
    assert run(*plain, "--class-weight", "[1, two]", *common, "--save", "wrong.onnx") == 1
    assert "--class-weight must be balanced, or a weight" in capsys.readouterr().err
    assert run("eval", "rows.onnx", "--data", "weighed.npz", "--sample-weight", "a") == 1
    assert (
        "--sample-weight: 'rows.onnx' is trainable and already determines this"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_training_goes_on_with_a_trainable_file(folder):
    assert run("build", "model.onnx", "trainable.onnx", "--loss", "SoftmaxCrossEntropy") == 0
    once = ["train", "trainable.onnx", "--data", "train.npz", "--quiet", "--save", "once.onnx"]
    assert run(*once, "--epochs", "2") == 0
    assert run("train", "once.onnx", "--data", "train.npz", "--quiet", "--save", "twice.onnx") == 0
    steps = ortops.TrainingSession("once.onnx").steps_done
    assert steps == 2 * 4
    assert ortops.TrainingSession("twice.onnx").steps_done == steps + 4


def test_a_trainable_file_says_its_loss_itself(folder, capsys):
    run("build", "model.onnx", "trainable.onnx", "--loss", "SoftmaxCrossEntropy")
    data = ["--data", "train.npz"]
    assert run("train", "trainable.onnx", *data, "--loss", "SoftmaxCrossEntropy") == 1
    assert (
        "--loss: 'trainable.onnx' is trainable and already determines this; omit --loss"
        in capsys.readouterr().err
    )
    assert run("build", "trainable.onnx", "again.onnx", "--loss", "SoftmaxCrossEntropy") == 1
    assert "'trainable.onnx' is already trainable" in capsys.readouterr().err
    assert run("eval", "trainable.onnx", *data, "--loss", "SoftmaxCrossEntropy") == 1
    assert "is trainable and already determines this; omit --loss" in capsys.readouterr().err


def test_eval_of_a_model_without_training(folder, capsys):
    loss = "SoftmaxCrossEntropy(label_smoothing=0.1)"
    assert run("eval", "model.onnx", "--data", "train.npz", "--loss", loss, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    stored = np.load("train.npz")
    logits = stored["points"].astype(np.float64) @ np.array([[1, 0, 0.5], [0, 1, 0.5]])
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    right = logs[np.arange(len(logs)), stored["labels"]]
    assert found["loss"] == pytest.approx(-(0.9 * right + 0.1 * logs.mean(axis=1)).mean(), rel=1e-5)
    assert run("eval", "model.onnx", "--data", "train.npz") == 1
    assert "'model.onnx' has no loss; give one, such as --loss" in capsys.readouterr().err


# -------------------------------------------------------------------------------- forms of data


@pytest.mark.slow
def test_classes_are_weighted_by_name(folder, capsys):
    found = []
    for weights in ('{"east": 3, "rest": 0.5}', '{"0": 3, "2": 0.5}'):
        options = ("--class-weight", weights, "--epochs", "2", "--save", "trained.onnx", "--force")
        assert train(*options, data="train.csv") == 0
        capsys.readouterr()
        options = ("--data", "train.csv", "--class-weight", weights, "--json")
        assert run("eval", "trained.onnx", *options) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert run("eval", "trained.onnx", "--data", "train.csv", "--class-weight", '{"west": 1}') == 1
    told = capsys.readouterr().err
    assert """got '{"west": 1}'; the classes are 0 east, 1 north, 2 rest""" in told


@pytest.mark.slow
def test_a_table_with_class_names(folder, capsys):
    assert train("--epochs", "20", "--save", "trained.onnx", data="train.csv") == 0
    told = capsys.readouterr().err
    assert "the names in column 'labels' are classes: 0 east, 1 north, 2 rest" in told
    assert "input 'points' is formed from the columns x, y" in told
    assert accuracy("trained.onnx") > 0.95
    rows = Path("train.csv").read_text().splitlines()
    east = [row for row in rows[1:] if row.endswith("east")]
    Path("east.csv").write_text("\n".join([rows[0], *east]) + "\n")
    arguments = ["--data", "east.csv", "--metrics", "accuracy", "--json"]
    assert run("eval", "trained.onnx", *arguments) == 0  # 0 is east there, too
    assert json.loads(capsys.readouterr().out)["accuracy"] > 0.9
    Path("west.csv").write_text("x,y,labels\n1,2,west\n")
    assert run("eval", "trained.onnx", "--data", "west.csv") == 1
    assert "the class 'west', which is unknown to the model" in capsys.readouterr().err


@pytest.mark.slow
def test_columns_are_those_of_the_training(folder, capsys):
    """Whatever their order is in another table, and which columns it has besides."""
    text = Path("train.csv").read_text().replace("x,y,labels", "a,b,kind")
    Path("named.csv").write_text(text)
    rows = [row.split(",") for row in text.splitlines()]
    swapped = "\n".join(f"id,{row[1]},{row[2]},{row[0]}" for row in rows) + "\n"
    Path("swapped.csv").write_text(swapped.replace("id,b", "more,b", 1).replace("\nid,", "\n7,"))
    options = ("--columns", "labels=kind", "--validation", "swapped.csv", "--log", "log.csv")
    assert train("--epochs", "20", "--save", "trained.onnx", *options, data="named.csv") == 0
    assert run("export", "trained.onnx", "served.onnx") == 0
    losses = []
    for name in ("named.csv", "swapped.csv"):
        capsys.readouterr()
        assert run("eval", "trained.onnx", "--data", name, "--json") == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
        assert run("predict", "served.onnx", "--data", name, "--output", f"{name}.npz") == 0
    assert losses[0] == pytest.approx(losses[1])
    last = Path("log.csv").read_text().splitlines()[-1].split(",")
    assert float(last[2]) == pytest.approx(losses[0], rel=1e-4)
    found = [np.load(f"{name}.csv.npz")["probabilities"] for name in ("named", "swapped")]
    np.testing.assert_array_equal(*found)
    Path("fewer.csv").write_text("a,c,kind\n1,2,rest\n")
    assert run("eval", "trained.onnx", "--data", "fewer.csv") == 1
    told = capsys.readouterr().err
    assert "no column 'b', of which input 'points' was formed in training, with a, b; give" in told
    Path("others.csv").write_text("u,v,kind\n1,2,rest\n")
    assert run("eval", "trained.onnx", "--data", "others.csv") == 0
    assert "input 'points' is formed from the columns u, v" in capsys.readouterr().err


@pytest.mark.slow
def test_columns_are_named(folder, capsys):
    text = Path("train.csv").read_text().replace("x,y,labels", "a,b,kind")
    Path("named.csv").write_text(text)
    columns = ["--columns", "points=a,b", "labels=kind"]
    assert train("--epochs", "20", "--save", "trained.onnx", *columns, data="named.csv") == 0
    assert accuracy("trained.onnx") > 0.95
    assert train(data="named.csv") == 1
    assert (
        "has no column for input 'labels'; give --columns labels=COLUMN" in capsys.readouterr().err
    )
    assert train("--columns", "points=a,c", "labels=kind", data="named.csv") == 1
    assert "there is no column 'c'" in capsys.readouterr().err
    assert train("--columns", "dots=a,b", data="named.csv") == 1
    assert "there is no input 'dots'; did you mean 'points'?" in capsys.readouterr().err


@pytest.mark.optional("pyarrow", "tables")
def test_a_parquet_table(folder):
    import pyarrow
    from pyarrow import parquet

    stored = np.load("train.npz")
    columns = {"x": stored["points"][:, 0], "y": stored["points"][:, 1], "labels": stored["labels"]}
    parquet.write_table(pyarrow.table(columns), "train.parquet")
    assert train("--epochs", "20", "--save", "trained.onnx", data="train.parquet") == 0
    assert accuracy("trained.onnx") > 0.95


@pytest.mark.slow
def test_standard_streams(folder):
    content = Path("train.csv").read_bytes()
    command = [sys.executable, "-m", "ortops"]
    done = subprocess.run(
        [
            *command,
            *["predict", "model.onnx", "--data", "-", "--columns", "points=x,y", "--output", "-"],
        ],
        input=content,
        capture_output=True,
        check=True,
    )
    rows = done.stdout.decode().splitlines()
    assert rows[0] == "probabilities_0,probabilities_1,probabilities_2"
    assert len(rows) == 121
    model = Path("model.onnx").read_bytes()
    built = subprocess.run(
        [*command, "build", "-", "-", "--loss", "SoftmaxCrossEntropy"],
        input=model,
        capture_output=True,
        check=True,
    )
    assert onnx.load_model_from_string(built.stdout).training_info


@pytest.fixture
def pictures(folder):
    """A folder of dark and light images by class, and a model of 8 × 8 pixels."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        Path("photos", name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(level - 30, level + 30, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(Path("photos", name, f"{number}.png"))
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        tint (float[batch, 3, 8, 8] images) => (float[batch, 2] logits)
        <int64[2] shape = {-1, 192}> {
            flat = Reshape (images, shape)
            logits = MatMul (flat, w)
        }""")
    w = (rng.standard_normal((192, 2)) / 100).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    onnx.save(model, "tint.onnx")


@pytest.mark.slow
@pytest.mark.optional("PIL", "images")
def test_a_folder_of_images_by_class(pictures, capsys):
    arguments = ["train", "tint.onnx", "--data", "photos", "--scale", "255", "--mean", "0.5"]
    arguments += ["--loss", "SoftmaxCrossEntropy", "--epochs", "30", "--quiet"]
    assert run(*arguments, "--validation", "0.3", "--save", "tinted.onnx") == 0
    told = capsys.readouterr().err
    assert "the folders of 'photos' are classes: 0 dark, 1 light" in told
    assert "held out 8 of 24 rows for validation" in told
    evaluation = ["eval", "tinted.onnx", "--data", "photos", "--scale", "255", "--mean", "0.5"]
    assert run(*evaluation, "--metrics", "accuracy", "--json") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == 1.0


@pytest.mark.slow
@pytest.mark.optional("PIL", "images")
def test_pixels_are_prepared_as_in_training(pictures, capsys):
    numbers = ["--scale", "100", "--mean", "0.5", "--std", "2"]
    arguments = ["train", "tint.onnx", "--data", "photos", "--loss", "SoftmaxCrossEntropy"]
    assert run(*arguments, *numbers, "--save", "tinted.onnx") == 0
    assert run("export", "tinted.onnx", "served.onnx") == 0
    found: list[Any] = []
    for number, given in enumerate((numbers, ["--std", "2.0"], [])):
        capsys.readouterr()
        assert run("eval", "tinted.onnx", "--data", "photos", *given, "--json") == 0
        found.append(json.loads(capsys.readouterr().out))
        options = ("--data", "photos", "--output", f"{number}.npz")
        assert run("predict", "served.onnx", *options, *given) == 0
    told = capsys.readouterr().err
    assert "pixels of 'photos' are prepared as in training: scale 100.0, mean 0.5, std 2.0" in told
    assert found[0] == found[1] == found[2]
    logits = [np.load(f"{number}.npz")["logits"] for number in range(3)]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])
    assert run("predict", "tint.onnx", "--data", "photos", "--output", "plain.npz", *numbers) == 0
    model = onnx.load("tinted.onnx")
    (entry,) = (each for each in model.metadata_props if each.key == "ortops.pixels")
    entry.value = '{"mean": ["x"]}'
    onnx.save(model, "hostile.onnx")
    assert run("eval", "hostile.onnx", "--data", "photos") == 1
    assert "'ortops.pixels' must have numbers, got ['x']" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.optional("PIL", "images")
def test_classes_of_folders_are_those_of_image_folder(pictures, capsys):
    """An empty subfolder moved the numbers of the classes behind it."""
    train = ["train", "tint.onnx", "--data", "photos", "--quiet", "--optimizer", "SGD"]
    soft = "SoftmaxCrossEntropy(probabilities=True)"
    states = []
    for number, loss in enumerate(("SoftmaxCrossEntropy", soft)):
        assert run(*train, "--loss", loss, "--save", f"{number}.onnx", "--scale", "255") == 0
        states.append(dict(ortops.TrainingSession(f"{number}.onnx").state))
    np.testing.assert_allclose(states[0]["w"], states[1]["w"], rtol=1e-5, atol=1e-7)
    Path("photos", "empty").mkdir()
    capsys.readouterr()
    with pytest.raises(ortops.FeedError) as caught:
        ortops.data.image_folder("photos")
    assert run(*train, "--loss", "SoftmaxCrossEntropy", "--save", "2.onnx") == 1
    assert str(caught.value) in capsys.readouterr().err
    evaluation = ["eval", "0.onnx", "--data", "photos", "--scale", "255", "--json"]
    assert run(*evaluation) == 0  # the classes are known
    Path("photos", "other").mkdir()
    Path("photos", "dark", "0.png").rename(Path("photos", "other", "0.png"))
    assert run(*evaluation) == 1
    assert "subfolder 'other' is not in the classes of the model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.optional("PIL", "images")
def test_images_read_batch_by_batch_train_the_same_model(pictures, monkeypatch, capsys):
    arguments = ["train", "tint.onnx", "--data", "photos", "--loss", "SoftmaxCrossEntropy"]
    arguments += ["--validation", "0.25", "--batch-size", "5", "--quiet", "--seed", "3"]
    assert run(*arguments, "--epochs", "4", "--save", "held.onnx") == 0
    assert run("predict", "tint.onnx", "--data", "photos", "--output", "held.npz") == 0
    monkeypatch.setattr(LIMITS, "data_bytes", 1000)
    assert run(*arguments, "--epochs", "2", "--save", "read.onnx") == 0
    assert "then read batch by batch" in capsys.readouterr().err
    assert run(*arguments, "--epochs", "4", "--save", "read.onnx", "--resume") == 0
    held, read = (dict(ortops.TrainingSession(f"{name}.onnx").state) for name in ("held", "read"))
    assert held.keys() == read.keys()
    assert all(np.array_equal(held[name], read[name]) for name in held)
    assert run("predict", "tint.onnx", "--data", "photos", "--output", "read.npz") == 0
    assert np.array_equal(np.load("held.npz")["logits"], np.load("read.npz")["logits"])


@pytest.mark.optional("PIL", "images")
def test_what_is_no_image_or_in_no_class_is_said(pictures, capsys):
    Path("photos", "dark", "broken.png").write_bytes(b"nothing")
    arguments = ["train", "tint.onnx", "--data", "photos", "--loss", "SoftmaxCrossEntropy"]
    assert run(*arguments) == 1
    assert "broken.png'" in capsys.readouterr().err
    Path("photos", "dark", "broken.png").rename(Path("photos", "broken.png"))
    assert run(*arguments) == 1
    assert "'broken.png' is not in the subfolder of a class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "is empty; its first line must name the columns"),
        ("x,x,labels\n1,2,0\n", "has two columns 'x'; rename one of them"),
        ("x,y,labels\n1,2\n", "line 2 has 2 columns, but the first line names 3"),
        (
            "x,y,labels\n1,two,0\n",
            "row 1 of column 'y' must be a number for input 'points', got 'two'",
        ),
        (
            "x,y,labels\n1,2,0.5\n",
            (
                "row 1 of column 'labels' must be an integer or a class name for input 'labels', "
                "got '0.5'"
            ),
        ),
        ("x,y,labels\n1,2,9999999999999999999\n", "has a number out of range for int64"),
        (
            "x,y,labels\n1,1e39,0\n",
            "input 'points' has the value 1e+39, which is out of range for float32",
        ),
        ("x,y,labels\n1,é,0\n".encode("latin-1"), "save it as UTF-8"),
        ("x,y,labels\n", "there are no batches"),
    ],
)
def test_tables_that_do_not_fit(folder, capsys, content, told):
    Path("bad.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert train(data="bad.csv") == 1
    assert told in capsys.readouterr().err


def test_files_that_are_not_read(folder, capsys):
    assert train(data="train.txt") == 1
    assert "data 'train.txt': unsupported file format; give an .npz" in capsys.readouterr().err
    assert train(data="none.npz") == 1
    assert "none.npz" in capsys.readouterr().err
    Path("bad.npz").write_bytes(b"nothing")
    assert train(data="bad.npz") == 1
    assert "write it with numpy.savez" in capsys.readouterr().err
    assert train("--scale", "255") == 1
    assert "is not a folder of images" in capsys.readouterr().err


@pytest.mark.slow
def test_labels_that_are_written_as_floats_are_numbers(folder):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    stored = np.load("train.npz")
    columns = {"x": stored["points"][:, 0].astype(float), "y": stored["points"][:, 1]}
    labels = stored["labels"].astype(float)
    parquet.write_table(pyarrow.table(columns | {"labels": labels}), "train.parquet")
    rows = zip(columns["x"], columns["y"], labels, strict=True)
    lines = ["x,y,labels", *(f"{x},{y},{label}" for x, y, label in rows)]
    Path("floats.csv").write_text("\n".join(lines))
    for data in ("train.npz", "train.parquet", "floats.csv"):
        assert train("--save", f"{data}.onnx", data=data) == 0
    states = [ortops.TrainingSession(f"{data}.onnx").state for data in ("train.npz", "floats.csv")]
    np.testing.assert_array_equal(states[0]["w"], states[1]["w"])
    parquet_state = ortops.TrainingSession("train.parquet.onnx").state
    np.testing.assert_array_equal(states[0]["w"], parquet_state["w"])
    assert not any(e.key == "ortops.classes" for e in onnx.load("floats.csv.onnx").metadata_props)


def test_names_of_classes_go_with_the_model(folder):
    assert train("--save", "trained.onnx", data="train.csv") == 0
    assert run("export", "trained.onnx", "tuned.onnx", "--original", "model.onnx") == 0
    header = "probabilities_east,probabilities_north,probabilities_rest"
    for model in ("trained.onnx", "tuned.onnx"):  # the labels are no part of an input
        assert run("predict", model, "--data", "train.csv", "--output", "found.csv") == 0
        assert Path("found.csv").read_text().splitlines()[0] == header


def test_predictions_of_images_say_their_files(pictures):
    assert run("predict", "tint.onnx", "--data", "photos", "--output", "found.csv") == 0
    rows = list(csv.DictReader(Path("found.csv").read_text().splitlines()))
    assert rows[0]["file"] == "dark/0.png"
    assert len(rows) == 24
    assert run("predict", "tint.onnx", "--data", "photos", "--output", "found.npz") == 0
    assert np.load("found.npz")["file"].tolist() == [row["file"] for row in rows]


def test_images_stand_upright_and_have_8_bits(pictures, capsys):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.random.default_rng(1).integers(0, 255, (8, 8, 3), np.uint8)
    for name, turned, orientation in (("a", pixels, 1), ("b", np.rot90(pixels), 6)):
        Path("turned", name).mkdir(parents=True)
        exif = image.Exif()
        exif[0x0112] = orientation  # 6: to be turned clockwise
        image.fromarray(np.ascontiguousarray(turned)).save(f"turned/{name}/1.png", exif=exif)
    assert run("predict", "tint.onnx", "--data", "turned", "--output", "found.npz") == 0
    first, second = np.load("found.npz")["logits"]
    np.testing.assert_array_equal(first, second)
    image.fromarray(np.full((8, 8), 40_000, np.uint16)).save("turned/a/2.png")
    assert run("predict", "tint.onnx", "--data", "turned", "--output", "found.npz") == 1
    assert "its pixels have more than 8 bits (mode I;16)" in capsys.readouterr().err
    wrong = ["--data", "photos", "--mean", "1", "2", "--output", "found.npz"]
    assert run("predict", "tint.onnx", *wrong) == 1
    assert "mean must have 1 or 3 numbers" in capsys.readouterr().err


def test_arrays_of_different_lengths_are_refused(folder, capsys):
    stored = np.load("train.npz")
    np.savez("bad.npz", points=stored["points"], labels=stored["labels"][:-1])
    assert train("--validation", "0.5", data="bad.npz") == 1
    told = "the arrays must have the same number of rows, got 'points' 120, 'labels' 119"
    assert told in capsys.readouterr().err
    columns = ["--columns", "points=x,y", "points=x"]
    assert train(*columns, data="train.csv") == 1
    assert "--columns: input 'points' is given twice" in capsys.readouterr().err


# ------------------------------------------------------------------------------- the training


def test_the_learning_rate_of_a_trainable_file(folder, capsys):
    assert train("--save", "once.onnx") == 0
    more = ["train", "once.onnx", "--data", "train.npz", "--quiet", "--save", "twice.onnx"]
    assert run(*more, "--learning-rate", "0.5") == 0
    assert ortops.TrainingSession("twice.onnx").learning_rate == 0.5
    assert run(*more, "--learning-rate", "constant(0.5)") == 1
    assert "for a schedule, start from the inference model" in capsys.readouterr().err
    assert run(*more, "--loss", "Huber", "--resume", "--save", "new.onnx") == 1
    assert "--loss: 'once.onnx' is trainable" in capsys.readouterr().err


def test_a_training_is_resumed_with_the_options_that_it_was_begun_with(folder, capsys):
    assert train("--save", "trained.onnx") == 0
    assert train("--save", "trained.onnx", "--resume") == 0
    capsys.readouterr()
    assert train("--save", "trained.onnx", "--resume", "--loss", "MultiMargin") == 1
    told = "--loss is 'MultiMargin', but the training in 'trained.onnx' started with 'Softmax"
    assert told in capsys.readouterr().err
    assert train("--save", "trained.onnx", "--resume", "--clip-norm", "1") == 1
    assert "--clip-norm is 1.0, but the training" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--epochs", "--batch-size", "--accumulate", "--rank"])
def test_counts_are_at_least_one(folder, capsys, option):
    command = ["lora", "add", "model.onnx", "a.onnx"] if option == "--rank" else ["train"]
    with pytest.raises(SystemExit) as ended:
        run(*command, option, "0")
    assert ended.value.code == 2
    assert f"argument {option}: must be an integer >= 1, got '0'" in capsys.readouterr().err


def test_a_training_is_saved_in_a_file(folder, capsys):
    assert run("train", "-", "--data", "train.npz", "--loss", "SoftmaxCrossEntropy") == 1
    assert "--save must be a file" in capsys.readouterr().err
    assert train("--save", "{step}.onnx") == 0
    assert Path("{step}.onnx").exists()
    assert not Path("4.onnx").exists()


def test_what_a_training_writes_beside_the_model(folder):
    more = ["--validation", "0.2", "--metrics", "accuracy", "--log", "log.csv", "--epochs", "3"]
    assert train(*more, "--best", "best.onnx", "--save", "trained.onnx") == 0
    rows = list(csv.DictReader(Path("log.csv").read_text().splitlines()))
    assert len(rows) == 3
    assert {"loss", "validation_loss", "validation_accuracy"} <= set(rows[0])
    assert onnx.load("best.onnx").training_info


@pytest.mark.slow
def test_limits_of_a_training(folder):
    more = ["--validation", "0.2", "--validate-every", "2", "--epochs", "3", "--log", "log.jsonl"]
    schedule = ["--learning-rate", "cosine(0.1)"]
    limits = ["--max-steps", "5", "--max-minutes", "30"]
    assert train(*more, *schedule, *limits, "--save", "trained.onnx") == 0
    session = ortops.TrainingSession("trained.onnx")
    assert session.steps_done == 5
    assert [entry["steps"] for entry in session.history] == [3, 5]
    assert session.state["schedule_steps"] == 5
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "validation"] == [2, 4]
    assert train(*more, *schedule, "--resume", "--max-steps", "6", "--save", "trained.onnx") == 0
    assert ortops.TrainingSession("trained.onnx").steps_done == 6


@pytest.mark.slow
def test_metrics_of_training(folder, capsys):
    more = ["--metrics", "accuracy", "--train-metrics", "--log", "log.csv"]
    assert train(*more, "--save", "trained.onnx") == 0
    (row,) = csv.DictReader(Path("log.csv").read_text().splitlines())
    assert 0 < float(row["accuracy"]) <= 1
    watch = [*more, "--early-stopping", "1", "--learning-rate", "0", "--epochs", "9"]
    assert train(*watch, "--monitor", "learning_rate", "--save", "other.onnx") == 1
    assert "set mode='max' or mode='min'" in capsys.readouterr().err
    watch += ["--monitor", "learning_rate", "--mode", "max", "--best", "best.onnx"]
    assert train(*watch, "--save", "other.onnx") == 0
    assert len(ortops.TrainingSession("other.onnx").history) == 2
    assert train("--train-metrics", "--save", "other.onnx") == 1
    assert "--train-metrics: there are no metrics" in capsys.readouterr().err


def test_wrong_limits_of_a_training(folder, capsys):
    assert train("--validate-every", "3", "--save", "trained.onnx") == 1
    assert "--validate-every: there are no data to validate" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train("--max-minutes", "0", "--save", "trained.onnx")
    assert "must be a finite number > 0" in capsys.readouterr().err


def test_early_stopping(folder):
    more = ["--validation", "0.2", "--early-stopping", "1", "--learning-rate", "0"]
    assert train(*more, "--epochs", "50", "--save", "trained.onnx") == 0
    assert ortops.TrainingSession("trained.onnx").steps_done < 50 * 3


def test_a_schedule_takes_the_steps_of_the_training(folder):
    more = ["--learning-rate", "warmup_cosine(0.1, warmup=2)", "--epochs", "3"]
    assert train(*more, "--save", "trained.onnx") == 0
    assert ortops.TrainingSession("trained.onnx").state["schedule_steps"] == 12


@pytest.mark.quick(1)
@pytest.mark.parametrize(("accumulate", "updates"), [(1, 8), (3, 3), (4, 2), (100, 1)])
def test_a_schedule_ends_with_the_training_where_batches_are_accumulated(
    folder, accumulate, updates
):
    epochs = 5
    more = ["--batch-size", "16", "--accumulate", str(accumulate), "--epochs", str(epochs)]
    more += ["--optimizer", "SGD", "--learning-rate", "cosine(0.1)"]
    assert train(*more, "--save", "trained.onnx") == 0
    session = ortops.TrainingSession("trained.onnx")
    assert session.steps_done == epochs * updates  # of 8 batches in each epoch
    progress = (epochs * updates - 1) / (epochs * updates)  # before the last step
    last = session.history[-1]["learning_rate"]
    assert last == pytest.approx(0.1 * (1 + np.cos(np.pi * progress)) / 2, rel=1e-4)


@pytest.mark.slow
def test_resume_trains_a_trained_file_where_there_is_nothing_to_resume(folder, capsys):
    assert train("--save", "once.onnx") == 0
    more = ["train", "once.onnx", "--data", "train.npz", "--quiet", "--save", "twice.onnx"]
    capsys.readouterr()
    assert run(*more, "--resume") == 0
    assert "there is no 'twice.onnx' to resume from" in capsys.readouterr().err
    assert ortops.TrainingSession("twice.onnx").steps_done == 2 * 4
    assert run(*more, "--resume") == 0  # now there is, and it is finished
    told = capsys.readouterr().err
    assert "the training in 'twice.onnx' is already finished" in told
    assert "wrote" not in told
    assert ortops.TrainingSession("twice.onnx").steps_done == 2 * 4


@pytest.mark.slow
def test_resume_prolongs_a_training_by_more_epochs(folder, capsys, caplog):
    for schedule in ([], ["--learning-rate", "cosine(0.01)"]):
        save = ["--save", "prolonged.onnx", "--log", "log.csv", *schedule]
        assert train("--epochs", "2", *save) == 0
        capsys.readouterr()
        assert train("--epochs", "3", "--resume", *save) == 0
        assert "wrote prolonged.onnx" in capsys.readouterr().err
        said = "ends after 8 steps; later steps keep its final learning" in caplog.text
        assert said == bool(schedule)
        session = ortops.TrainingSession("prolonged.onnx")
        assert session.steps_done == 3 * 4
        assert len(Path("log.csv").read_text().splitlines()) == 1 + 3
        if not schedule:
            assert train("--epochs", "3", "--save", "whole.onnx") == 0
            whole = ortops.TrainingSession("whole.onnx")
            assert session.history == whole.history
            assert_same_arrays(dict(session.state), dict(whole.state))
    before = Path("prolonged.onnx").read_bytes()
    assert train("--epochs", "2", "--resume", *save) == 1
    assert "epochs must be an integer >= 3, got 2: the training" in capsys.readouterr().err
    assert train("--epochs", "4", "--batch-size", "7", "--resume", *save) == 1
    assert Path("prolonged.onnx").read_bytes() == before


def test_resume_refuses_a_file_without_a_training(folder, capsys):
    model = onnx.parser.parse_model(CLASSIFIER.replace("0.5", "0.25"))
    onnx.save(model, "other.onnx")
    content = Path("other.onnx").read_bytes()
    assert train("--save", "other.onnx", "--resume") == 1
    assert (
        "--resume: 'other.onnx' is not a trainable file; omit --resume" in capsys.readouterr().err
    )
    assert Path("other.onnx").read_bytes() == content


@pytest.mark.slow
def test_options_from_a_file(folder, capsys):
    assert train("--epochs", "2", "--save", "first.onnx", "--write-config", "train.toml") == 0
    written = tomllib.loads(Path("train.toml").read_text())
    assert written["epochs"] == 2
    assert written["model"] == "model.onnx"
    assert run("train", "--config", "train.toml", "--save", "second.onnx") == 0
    first, second = (ortops.TrainingSession(f"{n}.onnx").state for n in ("first", "second"))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    Path("train.toml").write_text("epoch = 3\n")
    assert run("train", "--config", "train.toml") == 1
    assert "there is no option 'epoch'; did you mean 'epochs'?" in capsys.readouterr().err
    Path("train.toml").write_text("epochs 3\n")
    assert run("train", "--config", "train.toml") == 1
    assert "give a TOML file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('epochs = "two"', "--epochs: must be an integer >= 1, got 'two'"),
        ("epochs = true", "--epochs: expected one argument"),
        ('quiet = "no"', "ignored explicit argument 'no'"),
        ("epochs = 2026-01-01", "'epochs' must be a number, a string, a boolean, or an array"),
        ("loss = {a = 1}", "'loss' must be a number, a string, a boolean, or an array"),
    ],
)
def test_values_of_a_file_are_checked(folder, capsys, line, told):
    Path("train.toml").write_text(line)
    assert run("train", "--config", "train.toml") == 1
    captured = capsys.readouterr().err
    assert "--config 'train.toml': " in captured
    assert told in captured


def test_all_that_is_written_to_a_file_is_read_from_it(folder, capsys):
    more = ["--epochs", "1", "--no-quiet", "--clip-norm", "inf", "--log", "läuft 🏃 \x7f.csv"]
    train(*more, "--save", "first.onnx", "--trainable", "w", "--write-config", "train.toml")
    written = tomllib.loads(Path("train.toml").read_text(encoding="utf-8"))
    assert written["log"] == "läuft 🏃 \x7f.csv"
    assert written["clip-norm"] == float("inf")
    assert written["trainable"] == ["w"]
    assert written["quiet"] is False
    Path("train.toml").write_text(
        'model = "model.onnx"\ndata = "train.npz"\nloss = "SoftmaxCrossEntropy"\n'
        "epochs = 2\nbatch-size = 60\nquiet = true\nlearning-rate = 0.5\n"
    )
    assert run("train", "--config", "train.toml", "--save", "a.onnx") == 0
    assert "epoch 1" not in capsys.readouterr().err
    win = ["--batch-size", "32", "--no-quiet", "--learning-rate", "0.25"]
    assert run("train", "--config", "train.toml", *win, "--save", "b.onnx") == 0
    assert "epoch 1/2" in capsys.readouterr().err
    session = ortops.TrainingSession("b.onnx")
    assert (session.steps_done, session.learning_rate) == (2 * 4, 0.25)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
def test_an_interrupted_training_says_how_to_go_on_and_does(folder):
    options = ["--data", "train.npz", "--loss", "SoftmaxCrossEntropy", "--batch-size", "1"]
    command = [sys.executable, "-m", "ortops", "train", "model.onnx", *options]
    command += ["--epochs", "50"]  # more than a second
    assert main([*command[3:], "--quiet", "--save", "whole.onnx"]) == 0
    part = [*command, "--save", "part.onnx", "--log", "part.csv"]
    with subprocess.Popen(part, stderr=subprocess.PIPE, text=True) as process:
        until_an_epoch(process)
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
    assert process.returncode == 130
    assert "saved in part.onnx. Resume with:" in told
    assert "  ortops train --resume model.onnx --data train.npz" in told
    assert ortops.TrainingSession("part.onnx").steps_done < 50 * 120
    assert main([*part[3:], "--quiet", "--resume"]) == 0
    first, second = (ortops.TrainingSession(f"{n}.onnx").state for n in ("whole", "part"))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    assert len(Path("part.csv").read_text().splitlines()) == 51


TRAIN = ["train", "model.onnx", "--data", "train.csv", "--loss", "SoftmaxCrossEntropy", "--quiet"]


def until_an_epoch(process: subprocess.Popen[Any]) -> None:
    """Waits until a training says that an epoch has ended."""
    for line in process.stderr:
        if line.startswith("epoch"):
            return
    pytest.fail("the training ended")


LONG = [*("--epochs", "100000"), *("--checkpoint-steps", "1000000"), "--no-quiet"]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="terminals are POSIX's")
def test_a_training_whose_terminal_is_closed_is_saved(folder):
    import pty

    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "ortops", *TRAIN, *LONG, "--save", "part.onnx"]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command], stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    shown = b""
    while b"epoch" not in shown:  # it is drawn after a step
        shown += os.read(terminal, 1000)
    os.close(terminal)  # SIGHUP comes, and nothing can be printed from now on
    assert process.wait(60) == 129
    assert ortops.TrainingSession("part.onnx").steps_done > 0


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
@pytest.mark.parametrize(("name", "status"), [("SIGHUP", 129), ("SIGTERM", 143)])
def test_a_signal_ends_a_training_with_what_to_do_next(folder, name, status):
    command = [sys.executable, "-m", "ortops", *TRAIN, *LONG, "--save", "part.onnx"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until_an_epoch(process)
        process.send_signal(getattr(signal, name))
        told = process.stderr.read()
    assert process.returncode == status
    steps = ortops.TrainingSession("part.onnx").steps_done
    assert f"interrupted after step {steps}; saved in part.onnx. Resume with:" in told
    assert "  ortops train --resume model.onnx --data train.csv" in told


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes are POSIX's")
@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full", "2>&1 | head -1"])
def test_a_training_goes_on_where_nobody_reads_its_messages(folder, closed):
    words = shlex.join([sys.executable, "-m", "ortops", *TRAIN, "--no-quiet", "--epochs", "30"])
    script = f"set -o pipefail; {words} --save trained.onnx {closed}"
    subprocess.run(["bash", "-c", script], check=True, stdout=subprocess.DEVNULL)
    assert ortops.TrainingSession("trained.onnx").steps_done == 30 * 4


# --------------------------------------------------------------------- outputs and inputs


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.fixture
def inputs(folder):
    """All kinds of files that commands read, in the current folder."""
    Path("held.csv").write_bytes(Path("train.csv").read_bytes())
    Path("config.toml").write_text("epochs = 1\n")
    assert train("--save", "trained.onnx") == 0
    assert run("lora", "add", "model.onnx", "adapted.onnx") == 0
    Path("again.onnx").symlink_to("model.onnx")
    os.link("train.csv", "hard.csv")
    Path("sub").mkdir()
    return folder


@pytest.mark.nightly(12)
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "command",
    [
        [*TRAIN, "--save", "model.onnx"],
        [*TRAIN, "--save", "sub/../model.onnx"],
        [*TRAIN, "--save", "again.onnx"],
        [*TRAIN, "--save", "train.csv"],
        [*TRAIN, "--best", "model.onnx"],
        [*TRAIN, "--log", "train.csv"],
        [*TRAIN, "--log", "./train.csv"],
        [*TRAIN, "--log", "hard.csv"],
        [*TRAIN, "--log", "held.csv", "--validation", "held.csv"],
        [*TRAIN, "--tensorboard", "model.onnx"],
        [*TRAIN, "--write-config", "train.csv"],
        [*TRAIN, "--config", "config.toml", "--write-config", "config.toml"],
        [*TRAIN, "--config", "config.toml", "--save", "config.toml"],
        ["train", "trained.onnx", "--data", "train.csv", "--quiet", "--best", "trained.onnx"],
        ["build", "model.onnx", "model.onnx", "--loss", "SoftmaxCrossEntropy"],
        ["predict", "model.onnx", "--data", "train.csv", "--output", "train.csv"],
        ["predict", "model.onnx", "--data", "train.npz", "--output", "train.npz"],
        ["export", "trained.onnx", "trained.onnx"],
        ["export", "trained.onnx", "model.onnx", "--original", "model.onnx"],
        ["export", "trained.onnx", "again.onnx", "--original", "model.onnx"],
        ["lower", "trained.onnx", "trained.onnx"],
        ["lora", "add", "model.onnx", "model.onnx"],
        ["lora", "merge", "adapted.onnx", "adapted.onnx"],
        ["lora", "export", "adapted.onnx", "adapted.onnx"],
    ],
    ids=" ".join,
)
def test_an_output_does_not_replace_an_input(inputs, capsys, command):
    before = contents()
    assert run(*command) == 1
    assert "would overwrite" in capsys.readouterr().err
    assert contents() == before


def test_force_replaces_an_input(inputs):
    assert run("lower", "trained.onnx", "trained.onnx", "--force") == 0
    predict = ["predict", "trained.onnx", "--data", "held.csv", "--output", "held.csv"]
    assert run(*predict, "--force") == 0
    assert Path("held.csv").read_text().startswith("probabilities_0,")
    assert run(*TRAIN, "--save", "model.onnx", "--force") == 0
    assert onnx.load("model.onnx").training_info


def test_a_trainable_file_may_be_saved_in_itself(inputs):
    steps = ortops.TrainingSession("trained.onnx").steps_done
    more = ["train", "trained.onnx", "--data", "train.csv", "--quiet"]
    assert run(*more, "--save", "trained.onnx") == 0
    assert run(*more, "--save", "./trained.onnx") == 0
    assert ortops.TrainingSession("trained.onnx").steps_done == 3 * steps


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "more",
    [
        ["--save", "x.onnx", "--best", "x.onnx"],
        ["--save", "x.onnx", "--best", "sub/../x.onnx"],
        ["--save", "x.csv", "--log", "x.csv", "--force"],
        ["--best", "model-trained.onnx"],  # the default of --save
        ["--log", "x.csv", "--write-config", "x.csv"],
    ],
    ids=" ".join,
)
def test_two_outputs_are_two_files(inputs, capsys, more):
    before = contents()
    assert run(*TRAIN, *more) == 1
    assert "give two different files" in capsys.readouterr().err
    assert contents() == before


def test_a_plot_is_no_image_of_the_data_set(pictures, capsys):
    before = contents()
    command = ["train", "tint.onnx", "--data", "photos", "--loss", "SoftmaxCrossEntropy"]
    for plot in ("photos/dark/0.png", "photos/loss.png"):
        assert run(*command, "--plot", plot) == 1
        assert f"--plot: '{plot}' would overwrite --data 'photos'" in capsys.readouterr().err
    assert contents() == before


def test_the_data_beside_a_model_are_not_replaced(folder, capsys):
    onnx.save(
        mlp.mlp((4, 16, 2)),
        "large.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    before = contents()
    assert run("lower", "large.onnx", "weights.bin") == 1
    assert "'weights.bin' would overwrite model 'large.onnx'" in capsys.readouterr().err
    assert contents() == before


def test_standard_input_is_read_for_one_thing(inputs, capsys):
    assert run("train", "-", "--data", "-", "--save", "x.onnx") == 1
    assert "model and --data are both '-'" in capsys.readouterr().err
    assert run("export", "-", "x.onnx", "--original", "-") == 1
    assert "model and --original are both '-'" in capsys.readouterr().err
    for command in (
        ["predict", "-", "--data", "-", "--output", "x.csv"],
        ["eval", "-", "--data", "-"],
    ):
        assert run(*command) == 1
        assert "model and --data are both '-'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        [*TRAIN, "--save", "none/x.onnx"],
        [*TRAIN, "--best", "none/x.onnx"],
        [*TRAIN, "--write-config", "none/x.toml"],
        ["build", "model.onnx", "none/x.onnx", "--loss", "SoftmaxCrossEntropy"],
        ["predict", "model.onnx", "--data", "train.npz", "--output", "none/x.csv"],
        ["lower", "model.onnx", "none/x.onnx"],
        ["lora", "add", "model.onnx", "none/x.onnx"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_said_before_the_work(
    folder, capsys, command, monkeypatch
):
    monkeypatch.setattr("ortops.graph.convert.load_light", pytest.fail)  # nothing has been read
    assert run(*command) == 1
    assert "/none'; create it first" in capsys.readouterr().err
    path = next(word for word in command if word.startswith("none/"))
    Path(path).mkdir(parents=True)
    assert run(*command) == 1
    assert f"'{path}' is a folder; give the path of a file" in capsys.readouterr().err


# ------------------------------------------------------------ arguments, streams and file names


@pytest.mark.parametrize(
    "command",
    [
        ["check", ""],
        ["inspect", ""],
        ["lower", "model.onnx", ""],
        ["build", "", "x.onnx", "--loss", "L1"],
        ["export", "model.onnx", "x.onnx", "--original", ""],
        ["export-step", "model.onnx", ""],
        ["predict", "model.onnx", "--data", "train.npz", "--output", ""],
        ["eval", "model.onnx", "--data", ""],
        ["lora", "add", "", "x.onnx"],
        *(
            [*TRAIN, option, ""]
            for option in (
                *("--save", "--data", "--validation", "--best", "--log", "--plot", "--config"),
                *("--tensorboard", "--write-config", "--optimizer", "--monitor", "--trainable"),
            )
        ),
    ],
    ids=" ".join,
)
def test_an_empty_argument_is_refused(folder, capsys, command):
    before = contents()
    with pytest.raises(SystemExit) as ended:
        run(*command)
    assert ended.value.code == 2
    assert "must not be empty" in capsys.readouterr().err
    assert contents() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--epochs", str(10**30)], "--epochs: must be an integer < 2**63, got '1000"),
        (["--epochs", "9" * 5000], "--epochs: must be an integer < 2**63, got '9999"),
        (["--batch-size", str(2**63)], "--batch-size: must be an integer < 2**63"),
        (["--epochs", "1.5"], "--epochs: must be an integer >= 1, got '1.5'"),
        (["--seed", "-1"], "--seed: must be an integer >= 0, got '-1'"),
        (["--seed", "inf"], "--seed: must be an integer >= 0, got 'inf'"),
        (["--scale", "0"], "--scale: must be a finite number other than 0, got '0'"),
        (["--save=--"], "--save: expected one argument"),
        (["--save", "a\0b"], "--save: must not contain a null character"),
    ],
)
def test_numbers_that_no_option_takes(folder, capsys, arguments, told):
    with pytest.raises(SystemExit) as ended:
        train(*arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--loss", f"Huber(delta={10**400})"], "--loss: an integer must fit in 64 bits"),
        (["--loss", f"SoftmaxCrossEntropy(weights=[{2**63}])"], "must fit in 64 bits"),
        (["--loss", "Huber(delta={[1]})"], "--loss must be a name"),
        (["--loss", f"Huber(delta={'9' * 5000})"], "--loss must be a name"),
        (["--loss", "Huber(delta=" + "[" * 5000], "--loss must be a name"),
        (["--optimizer", "Adam(alpha='\\ud800')"], "--optimizer must be a name"),
        (["--learning-rate", "cosine(1e400)"], "got inf"),
        (["--metrics", "edit_distance(input_lengths=[1])"], "must be the name of an input"),
    ],
    ids=lambda given: " ".join(given)[:40],
)
def test_values_that_no_call_takes(folder, capsys, arguments, told):
    assert train("--validation", "0.5", *arguments) == 1
    shown = capsys.readouterr().err
    assert told in shown
    assert "error in ortops" not in shown


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (f"epochs = {10**30}", "'epochs' must fit in 64 bits"),
        (f"epochs = 0x{'f' * 5000}", "'epochs' must fit in 64 bits"),
        (f"epochs = {'9' * 5000}", "a number in it has too many digits"),
        ("seed = -1", "--seed: must be an integer >= 0, got '-1'"),
        ("epochs = [1, 2]", "'epochs' must be a single value, not an array"),
        ("trainable = []", "'trainable' must not be an empty array"),
        ("model = 3", "'model' must be a string"),
        ("save = ''", "--save: must not be empty"),
        ("loss = " + "[" * 100_000, "its values are nested too deeply"),
        ("loss." + "a." * 5000 + "a = 1", "'loss' must be a number, a string"),
        (b"\xff", "give a TOML file"),
    ],
    ids=lambda given: str(given)[:30],
)
def test_hostile_configurations(folder, capsys, content, told):
    Path("c.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run("train", "--config", "c.toml") == 1
    shown = capsys.readouterr().err
    assert "--config 'c.toml': " in shown
    assert told in shown


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000])
@pytest.mark.parametrize(
    "key", ["ortops.train", "ortops.classes", "ortops.columns", "ortops.pixels", "ortops.lora"]
)
def test_hostile_metadata(folder, capsys, key, text):
    assert train("--save", "trained.onnx") == 0
    model = onnx.load("trained.onnx")
    onnx.helper.set_model_props(model, {e.key: e.value for e in model.metadata_props} | {key: text})
    onnx.save(model, "hostile.onnx")
    for command in (
        ["check", "hostile.onnx"],
        ["inspect", "hostile.onnx"],
        ["eval", "hostile.onnx", "--data", "train.npz"],
        ["export", "hostile.onnx", "x.onnx"],
        ["lora", "merge", "hostile.onnx", "x.onnx"],
        [*TRAIN, "--save", "hostile.onnx", "--resume"],
    ):
        run(*command)
        told = capsys.readouterr().err
        assert "RecursionError" not in told
        assert "error in ortops" not in told


COMMAND = shlex.join([sys.executable, "-m", "ortops"])


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the shell is POSIX's")
@pytest.mark.parametrize(
    ("script", "status", "told"),
    [
        ("{} inspect model.onnx >&-", 1, "standard output: it is closed"),
        ("{} check model.onnx --json >&-", 1, "standard output: it is closed"),
        ("{} inspect model.onnx <&- >&- 2>&-", 1, ""),
        ("{} inspect model.onnx >/dev/full", 1, "standard output: No space left on device"),
        ("{} lower model.onnx - >/dev/full", 1, "standard output: No space left on device"),
        ("{} --help >/dev/full", 1, "standard output: No space left on device"),
        ("{} --help | true", 0, ""),
        ("{} inspect none.onnx 2>/dev/full", 1, ""),
        ("{} inspect - <&-", 1, "standard input: it is closed"),
        ("{} predict model.onnx --data - --output - <&-", 1, "standard input: it is closed"),
        ("{} lower model.onnx x.onnx <&- >&- 2>&-", 0, ""),
        ("PYTHONIOENCODING=ascii {} --help", 0, ""),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {} predict --help", 0, ""),
    ],
)
def test_closed_full_and_narrow_streams(folder, script, status, told):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", script.format(COMMAND)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == status
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if "x.onnx" in script:
        onnx.checker.check_model("x.onnx")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="descriptors are POSIX's")
def test_messages_do_not_go_where_data_go(folder):
    script = f"{COMMAND} predict model.onnx --data train.csv --columns points=x,y --output - 2>&-"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert len(done.stdout.decode().splitlines()) == 1 + 120  # a header, and no message


@pytest.fixture
def bytes_in_names(folder):
    """Files whose names are not UTF-8."""
    try:
        for name in ("model.onnx", "train.npz"):
            Path(os.fsdecode(b"\xe9" + name.encode())).write_bytes(Path(name).read_bytes())
    except OSError:
        pytest.skip("the file system takes only names that are UTF-8")
    return os.fsdecode(b"\xe9model.onnx"), os.fsdecode(b"\xe9train.npz")


def test_names_that_are_not_utf_8(bytes_in_names, capsys):
    model, data = bytes_in_names
    assert run("check", model, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["file"] == "\\udce9model.onnx"
    command = ["train", model, "--data", data, "--loss", "SoftmaxCrossEntropy", "--quiet"]
    assert run(*command, "--write-config", "x.toml") == 1
    told = capsys.readouterr().err
    assert "TOML must be UTF-8, and 'model' is '\\udce9model.onnx'; rename the file" in told
    assert run(*command, "--log", f"{model}.csv", "--best", f"{model}.best") == 0
    assert Path(f"{model.removesuffix('.onnx')}-trained.onnx").exists()
    assert "wrote \\udce9model-trained.onnx" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="the shell is POSIX's")
def test_how_to_go_on_is_what_a_shell_reads():
    given = ["train", os.fsdecode(b"\xe9 .onnx"), "it's", "a\nb\\'", "\x1b[31m", "ü 🏃"]
    command = f"ortops() {{ printf '%s\\0' \"$@\"; }}; {_resuming(given)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert list(map(os.fsdecode, done.stdout.split(b"\0")[:-1])) == [
        "train",
        "--resume",
        *given[1:],
    ]


def test_a_terminal_is_shown_no_control_characters(folder, capsys):
    text = CLASSIFIER.replace("points", "dots")
    model = onnx.parser.parse_model(text)
    model.graph.input[0].name = model.graph.node[0].input[0] = "\x1b]0;owned\x07"
    onnx.save(model, "hostile.onnx")
    assert run("inspect", "hostile.onnx") == 0
    assert run("check", "hostile.onnx") == 0
    captured = capsys.readouterr()
    assert "\\x1b]0;owned\\x07" in captured.out
    assert not set("\x1b\x07") & set(captured.out + captured.err)


def test_names_in_files_forge_no_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In reports, in their text in Python, in errors, and in what libraries log."""
    forged = "w\nno problems: ready to train\x1b[31m"
    model = affine()
    for names in (model.graph.initializer[0], model.graph.node[0]):
        names.name = names.name and forged
    node = model.graph.node[0]
    node.input[1] = forged
    onnx.save(model, tmp_path / "model.onnx")
    for command in ("check", "inspect"):
        assert main([command, str(tmp_path / "model.onnx")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines.count("no problems: ready to train") <= 1
        assert not any(line.startswith("no problems: ready to train\\") for line in lines)
    report = str(ortops.engine.check.check(model))
    assert "  w\\nno problems: ready to train\\x1b[31m  FLOAT" in report
    node.input[1] = "nothing\nortops: forged"
    onnx.save(model, tmp_path / "model.onnx")
    assert main(["inspect", str(tmp_path / "model.onnx")]) == 1
    assert "nothing\\nortops: forged" in capsys.readouterr().err


def test_what_libraries_log_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    with standard_streams.shown_log():
        record = logging.LogRecord("onnx_ir", 30, "", 0, "name '%s'", ("\x1b[31m\nforged",), None)
        assert logging.lastResort is not None
        logging.lastResort.handle(record)
    logging.lastResort.handle(record)
    assert capsys.readouterr().err == "name '\\x1b[31m\\nforged'\nname '\x1b[31m\nforged'\n"


def test_a_bug_does_not_end_the_report_of_other_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        onnx.save(affine(), tmp_path / f"{name}.onnx")

    def fail_once(*given: object, **more: object) -> object:
        monkeypatch.undo()
        raise AssertionError("of ours")

    monkeypatch.setattr("ortops.cli.checking.check_model", fail_once)
    assert main(["check", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ortops: AssertionError: of ours; this is a bug in ortops")
    assert f"{tmp_path / 'b.onnx'}:\nopset 2" in captured.out


@pytest.mark.optional("PIL", "images")
def test_predictions_keep_the_bytes_of_file_names(pictures, bytes_in_names):
    name = os.fsdecode(b"photos/dark/\xe9.png")
    Path("photos/dark/0.png").rename(name)
    assert run("predict", "tint.onnx", "--data", "photos", "--output", "found.csv") == 0
    files = [row.split(b",")[0] for row in Path("found.csv").read_bytes().splitlines()[1:]]
    assert b"dark/\xe9.png" in files
    assert all(Path("photos", os.fsdecode(file)).exists() for file in files)


def test_an_output_that_is_named_twice_is_written_once(folder):
    twice = ["--outputs", "probabilities", "probabilities"]
    assert run("predict", "model.onnx", "--data", "train.npz", "--output", "x.npz", *twice) == 0
    assert np.load("x.npz")["probabilities"].shape == (120, 3)


def test_predictions_of_no_rows_are_refused(folder, capsys):
    Path("empty.csv").write_text("x,y\n")
    assert run("predict", "model.onnx", "--data", "empty.csv", "--output", "x.csv") == 1
    assert "data 'empty.csv' has no rows" in capsys.readouterr().err
    assert not Path("x.csv").exists()


def test_a_name_that_is_too_long_does_not_hide_other_models(folder, capsys):
    assert run("check", "a" * 300, "model.onnx") == 2
    captured = capsys.readouterr()
    assert "File name too long" in captured.err
    assert "no problems: ready to train" in captured.out


# ------------------------------------------------------------------------------------ the rest


def test_inspect(folder, capsys):
    assert train("--epochs", "2", "--save", "trained.onnx") == 0
    capsys.readouterr()
    assert run("inspect", "trained.onnx", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == {"w": [2, 3]}
    assert found["step"] == 8
    assert found["updates"] == {"Adam": 1}
    assert len(found["history"]) == 2
    assert run("inspect", "trained.onnx") == 0
    shown = capsys.readouterr().out
    assert "8 steps done" in shown
    assert "epoch 2: loss" in shown
    has_llvm = importlib.util.find_spec("llvmlite") is not None  # w and two states of Adam
    assert found["compilable"] == (3 if has_llvm else 0)
    assert ("updates of 3 variables can be compiled" in shown) == has_llvm
    assert run("inspect", "model.onnx") == 0
    assert "not trainable; ortops build" in capsys.readouterr().out


def test_inspect_tells_what_there_is_in_files_of_others(folder, capsys):
    model = ortops.build_training_model("model.onnx", loss="SoftmaxCrossEntropy", optimizer="SGD")
    del model.metadata_props[:]
    onnx.save(model, "others.onnx")
    assert run("inspect", "others.onnx") == 0
    shown = capsys.readouterr().out
    assert "6 trainable parameters:" in shown
    assert "learning rate" not in shown


@pytest.mark.slow
def test_adapters(folder, capsys):
    onnx.save(mlp.mlp((4, 16, 2)), "mlp.onnx")
    add = ["lora", "add", "mlp.onnx", "adapted.onnx", "--rank", "2", "--targets", "fc*"]
    assert run(*add) == 0
    rng = np.random.default_rng(0)
    images = rng.standard_normal((32, 4)).astype(np.float32)
    np.savez("data.npz", images=images, targets=np.ones((32, 2), np.float32))
    arguments = ["train", "adapted.onnx", "--data", "data.npz", "--loss", "MeanSquaredError"]
    assert run(*arguments, "--quiet", "--save", "trained.onnx") == 0
    assert run("lora", "merge", "trained.onnx", "merged.onnx") == 0
    feeds = {"images": images}
    trained = onnxruntime.InferenceSession("trained.onnx").run(None, feeds)[0]
    merged = onnxruntime.InferenceSession("merged.onnx").run(None, feeds)[0]
    before = onnxruntime.InferenceSession("mlp.onnx").run(None, feeds)[0]
    np.testing.assert_allclose(merged, trained, rtol=1e-4, atol=1e-5)
    assert np.abs(merged - before).max() > 1e-3
    assert run("lora", "export", "trained.onnx", "adapter.onnx_adapter") == 0
    assert Path("adapter.onnx_adapter").exists()
    assert run("export", "trained.onnx", "merged2.onnx", "--merge-lora") == 0
    again = onnxruntime.InferenceSession("merged2.onnx").run(None, feeds)[0]
    np.testing.assert_allclose(again, merged, rtol=1e-6)
    assert run("export", "trained.onnx", "small.onnx", "--merge-lora", "--quantize") == 0
    types = {tensor.data_type for tensor in onnx.load("small.onnx").graph.initializer}
    assert types & {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    small = onnxruntime.InferenceSession("small.onnx").run(None, feeds)[0]
    assert np.corrcoef(small.ravel(), merged.ravel())[0, 1] > 0.99


def test_an_adapter_of_another_tool_is_replaced_with_force_only(folder, capsys):
    """As by export-step: what ortops wrote is replaced, other files only with --force."""
    onnx.save(mlp.mlp((4, 16, 2)), "mlp.onnx")
    assert run("lora", "add", "mlp.onnx", "adapted.onnx", "--rank", "2") == 0
    for _ in range(2):
        assert run("lora", "export", "adapted.onnx", "peft") == 0
    config = Path("peft/adapter_config.json")
    weights = Path("peft/adapter_model.safetensors")
    settings = json.loads(config.read_text())
    for text in (json.dumps({**settings, "peft_version": "0.21"}), "[]", "{", None):
        config.write_text(text) if text is not None else config.unlink()
        weights.write_bytes(b"precious")
        capsys.readouterr()
        assert run("lora", "export", "adapted.onnx", "peft") == 1
        assert capsys.readouterr().err == (
            f"ortops: output: '{weights if text is None else config}' was not written by ortops; "
            "give another folder, or --force to replace it\n"
        )
        assert weights.read_bytes() == b"precious"
    assert run("lora", "export", "adapted.onnx", "peft", "--force") == 0
    assert json.loads(config.read_text()) == settings


def test_quantized_export(folder):
    assert train("--epochs", "20", "--save", "trained.onnx") == 0
    assert run("export", "trained.onnx", "small.onnx", "--quantize") == 0
    types = {tensor.data_type for tensor in onnx.load("small.onnx").graph.initializer}
    assert types & {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    assert accuracy("small.onnx") > 0.9


@pytest.mark.parametrize(
    ("kind", "node", "status", "said"),
    [
        ("float16", "MatMul (x, w)", 1, "--quantize: onnxruntime does not load its result"),
        ("double", "MatMul (x, w)", 0, "--quantize: no weights were quantized"),
        ("float", "Gemm <alpha = 0.5> (x, w)", 0, "--quantize: no weights were quantized"),
        ("float", "MatMul (x, w)", 0, ""),
    ],
)
def test_quantized_exports_of_other_models(folder, capfd, kind, node, status, said):
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        linear ({kind}[batch, 2] x) => ({kind}[batch, 2] y) {{ y = {node} }}""")
    element = model.graph.input[0].type.tensor_type.elem_type
    weights = np.eye(2, dtype=onnx.helper.tensor_dtype_to_np_dtype(element))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    built = ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    onnx.save(built, "linear.onnx")
    capfd.readouterr()
    assert run("export", "linear.onnx", "small.onnx", "--quantize") == status
    shown = capfd.readouterr().err
    assert said in shown
    assert ("--quantize" in shown) == bool(said)
    assert Path("small.onnx").exists() == (not status)


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        run(command, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "Exit status: 0" in shown
    if command != "completion":
        assert f"ortops {command}" in shown.split("examples:")[1]


def test_help_tells_all_commands(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from ortops.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'numpy', 'onnx', 'onnxruntime'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.optional("shtab", "completion")
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys):
    assert run("completion", shell) == 0
    assert "--early-stopping" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--loss", "SoftmaxCrosEntropy"],
            "--loss: there is no 'SoftmaxCrosEntropy'; did you mean",
        ),
        (["--loss", "SoftmaxCrossEntropy(smoothing=1)"], "unexpected keyword argument 'smoothing'"),
        (
            ["--loss", "__import__('os').abort()"],
            "such as 'Adam(alpha=0.95)', got \"__import__('os').abort()\"",
        ),
        (["--optimizer", "Adan"], "--optimizer: there is no 'Adan'"),
        (["--optimizer", "Adam(alpha=2)"], "alpha must be a finite number >= 0 and < 1, got 2.0"),
        (["--learning-rate", "fast"], "--learning-rate: there is no 'fast'"),
        (["--metrics", "acuracy"], "--metrics: there is no 'acuracy'; did you mean 'accuracy'?"),
        (
            ["--validation", "1.5"],
            "--validation must be a fraction between 0 and 1 or a data set, got 1.5",
        ),
        (["--log", "log.txt"], "--log must be a .csv or .jsonl file, got 'log.txt'"),
    ],
)
def test_wrong_options_are_said(folder, capsys, arguments, told):
    assert train(*arguments) == 1
    captured = capsys.readouterr().err
    assert told in captured
    assert "Traceback" not in captured


def test_a_traceback_only_where_it_is_asked_for(folder, capsys):
    assert run("train", "none.onnx", "--data", "train.npz") == 1
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(ortops.OrtopsError):
        train("--loss", "Nothing", "--debug")


def test_errors_of_others_are_said_in_a_line(folder, capsys, monkeypatch):
    def fails(*_, **__):
        raise KeyError("x")

    monkeypatch.setattr("ortops.cli.training.TrainingSession", fails)
    assert train() == 1
    assert "ortops: KeyError: 'x'; this is a bug in ortops" in capsys.readouterr().err
    with pytest.raises(KeyError):
        train("--debug")


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="pipes are POSIX's")
def test_whoever_reads_may_stop(folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ortops", "inspect", "model.onnx"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_is_missing_is_said(folder, capsys):
    assert run("train", "model.onnx") == 1
    assert "--data is missing" in capsys.readouterr().err
    assert run("train", "model.onnx", "--data", "train.npz") == 1
    assert "needs a loss, such as --loss" in capsys.readouterr().err


def test_calls():
    assert read_call("Adam", "--optimizer").keywords == {}
    call = read_call("step(0.1, every=3, names=['a'])", "--learning-rate")
    assert (call.name, call.arguments) == ("step", (0.1,))
    assert call.keywords == {"every": 3, "names": ["a"]}


def test_the_parser_names_what_there_is():
    import importlib

    parser = make_parser("0")
    actions = next(a for a in parser._actions if a.dest == "command")
    assert actions.choices is not None
    for name, made in actions.choices.items():
        module, function = made.get_default("run").split(".")
        assert hasattr(importlib.import_module(f"ortops.cli.{module}"), function), name


def test_json_has_no_numbers_that_are_not_finite(capsys):
    print_json({"loss": float("nan"), "history": [{"loss": float("inf")}, {"loss": 1.5}]})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"loss": None, "history": [{"loss": None}, {"loss": 1.5}]}
