"""The JavaScript driver: digits trained in Node, in WebAssembly and in a page, from one folder."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from chromium import MODULES, SWIFTSHADER, WEB, page_of, run_page
from running import CPU
from training_models import affine, assert_same_arrays

from models import digits
from models.lenet import lenet
from ortops import TrainingSession, build_training_model, export_step
from ortops.cli import main
from ortops.graph.safetensors import read_safetensors, write_safetensors
from ortops.optimizers import Adam8bit

Array: TypeAlias = npt.NDArray[Any]

EPOCHS, ROWS = 3, 64

# Adam divides by the root of H: where a gradient is as small as its rounding error, the direction
# of an update is rounding too. So weights differ by a share of the learning rate, 0.001, times the
# 69 steps; at most this was seen to be 7e-5.
WEIGHTS = 2e-4


class Trained(NamedTuple):
    """What Python made of the digits, and the folder from which others are to do so."""

    folder: Path
    losses: list[float]
    session: TrainingSession
    evaluation: dict[str, float]


def make_folder(model: onnx.ModelProto, folder: Path, target: Any = None) -> Path:
    export_step(model, folder, web=True, target=target)
    for name, samples in digits.load()._asdict().items():
        write_safetensors(folder / f"{name}.safetensors", samples._asdict())
    return folder


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return build_training_model(lenet(), loss="SoftmaxCrossEntropy", optimizer="Adam")


@pytest.fixture(scope="module")
def trained(model: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = make_folder(model, tmp_path_factory.mktemp("folder"))
    session = TrainingSession(model)
    train, test = (samples._asdict() for samples in digits.load())
    losses = []
    for _ in range(EPOCHS):
        for first in range(0, len(train["labels"]), ROWS):
            batch = {name: array[first : first + ROWS] for name, array in train.items()}
            losses.append(float(session.step(batch)["loss"]))
    return Trained(folder, losses, session, session.evaluate(test, metrics="accuracy"))


def node(script: str, *arguments: str | Path) -> str:
    """Runs a script of tests/web, and returns what it printed."""
    found = subprocess.run(
        ["node", MODULES / script, *arguments], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def assert_trained_alike(content: bytes, trained: Trained) -> TrainingSession:
    """Asserts that a file holds what Python trained, within rounding."""
    session = TrainingSession(content)
    assert session.steps_done == len(trained.losses)
    for name, array in trained.session.state.items():
        np.testing.assert_allclose(session.state[name], array, rtol=0, atol=WEIGHTS, err_msg=name)
    return session


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.javascript
@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_node_trains_as_python_does(package: str, trained: Trained, tmp_path: Path) -> None:
    printed = node("train.mjs", WEB, package, trained.folder, trained.folder, tmp_path)
    report = json.loads(printed.splitlines()[-1])
    np.testing.assert_allclose(report["losses"], trained.losses, rtol=1e-4, atol=1e-5)
    assert report["accuracy"] == pytest.approx(trained.evaluation["accuracy"], abs=1 / 360)
    assert report["accuracy"] > 0.85
    assert report["loss"] == pytest.approx(trained.evaluation["loss"], rel=1e-3)

    saved = (tmp_path / "model.onnx").read_bytes()
    session = assert_trained_alike(saved, trained)
    state = read_safetensors(tmp_path / "state.safetensors")
    assert_same_arrays({name: session.state[name] for name in state}, state)
    assert set(state) == set(session.state)

    test = digits.load().test
    stock = onnxruntime.InferenceSession(saved, providers=CPU)
    (logits,) = stock.run(None, {"images": test.images})
    assert np.mean(logits.argmax(1) == test.labels) == pytest.approx(report["accuracy"])


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.javascript
@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_node_keeps_moments_of_8_bits(package: str, tmp_path: Path) -> None:
    """The losses are those of Python until codes that differ by rounding have added up."""
    optimizer = Adam8bit(min_8bit_size=1024)
    model = build_training_model(lenet(), loss="SoftmaxCrossEntropy", optimizer=optimizer)
    folder = make_folder(model, tmp_path / "folder")
    session, train = TrainingSession(model), digits.load().train._asdict()
    losses = []
    for first in range(0, len(train["labels"]), ROWS):
        batch = {name: array[first : first + ROWS] for name, array in train.items()}
        losses.append(float(session.step(batch)["loss"]))
    report = json.loads(node("train.mjs", WEB, package, folder, folder, tmp_path).splitlines()[-1])
    np.testing.assert_allclose(report["losses"][: len(losses)], losses, rtol=2e-3)
    assert report["accuracy"] > 0.85
    trained = TrainingSession(tmp_path / "model.onnx")
    assert trained.steps_done == EPOCHS * len(losses)
    state = read_safetensors(tmp_path / "state.safetensors")
    assert_same_arrays({name: trained.state[name] for name in state}, state)
    codes = [array for array in state.values() if array.dtype == np.uint8]
    assert codes
    assert all(len(np.unique(array)) > 50 for array in codes)


@pytest.mark.slow
@pytest.mark.javascript
def test_the_driver_refuses_what_is_wrong(trained: Trained) -> None:
    """The cases, and what their messages say, are in the script."""
    printed = node("refusals.mjs", WEB, trained.folder)
    assert printed == "71 cases\n"


@pytest.mark.slow
@pytest.mark.javascript
def test_the_driver_names_what_is_wrong_in_files(tmp_path: Path) -> None:
    """With its own errors, whatever stands there; the cases are in the script."""
    net = lenet(channels=(2, 2), hidden=4)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer="SGD")
    export_step(model, tmp_path / "step", web=True)
    assert node("hostile.mjs", WEB, tmp_path / "step", tmp_path) == "1557 cases at 100 places\n"


@pytest.mark.javascript
def test_pixels_become_tensors(trained: Trained) -> None:
    """Of the layouts and types that the second page takes; the cases are in the script."""
    assert node("images.mjs", trained.folder) == "images\n"


@pytest.mark.slow
@pytest.mark.javascript
def test_nothing_is_left_on_a_device(trained: Trained) -> None:
    """On a device that counts what is there; the cases are in the script."""
    printed = node("device.mjs", WEB, trained.folder)
    floats = [array for array in trained.session.state.values() if array.dtype == np.float32]
    assert printed == f"{len(floats) - 1} variables\n"  # the learning rate is read at once


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_trains_as_python_does(trained: Trained) -> None:
    report, posted = run_page(page_of(trained.folder), "test.html?ordered")
    assert report["steps"] == len(trained.losses)
    assert report["isolated"]
    assert report["accuracy"] == pytest.approx(trained.evaluation["accuracy"], abs=0.004)
    title, *start = report["start"]
    assert title == "Train a model: images (1\u00a0×\u00a08\u00a0×\u00a08) → logits"
    assert start == [True, "Done, Now, Waits for step 2", "Train"]
    assert report["next"] == ["Done, Done, Done", "Download model (.onnx)"]
    table = np.array(report["table"])
    assert report["verdict"] == (
        f"{100 * report['accuracy']:.1f} % are right: {np.trace(table)} of 360 test rows."
    )
    test = digits.load().test.labels
    np.testing.assert_array_equal(table.sum(axis=1), np.bincount(test))  # rows are true classes
    assert np.trace(table) / table.sum() == pytest.approx(report["accuracy"], abs=1e-3)
    assert report["guess"] == "That is 0."  # a ring was drawn
    assert report["refused"] == [
        "learning rate must be a finite number >= 0, but the field is empty",
        "learning rate must be a finite number >= 0, got -1",
    ]
    assert report["refusedEpochs"] == [
        f"epochs must be an integer >= 1, {given}; true"
        for given in ("got 0", "but the field is empty", "got 1.5")
    ]
    steps = len(trained.losses)
    assert report["names"] == [
        "Loss per step: no steps yet",
        f"Loss per step: {steps} steps, ",
    ]
    assert report["keyboard"].startswith("That is ")
    assert report["pen"].startswith("Drawing area, pen up at 50 % from the left, ")
    assert report["marker"] == "block"  # the pen is visible
    assert report["diverged"] in {
        f"step: the loss is {loss}: check the learning rate (1e+30). Reset returns to the start."
        for loss in ("NaN", "Infinity")
    }
    assert report["reset"] == ["0", "0.001", "Loss per step: no steps yet"]
    assert_trained_alike(posted["model.onnx"], trained)  # what the button puts into a file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a GPU that is a program can train: 8 steps of a small net."""
    net = lenet(channels=(4, 8), hidden=16)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer="Adam")
    folder = page_of(make_folder(model, tmp_path_factory.mktemp("small"), target="webgpu"))
    for script in ("webgpu.mjs", "loop.mjs"):
        shutil.copy(MODULES / script, folder)
    (folder / "webgpu.html").write_text(
        "<!doctype html><body><script type=module src=webgpu.mjs></script>"
    )
    session = TrainingSession(model)
    train, test = (
        {name: array[:128] for name, array in samples._asdict().items()}
        for samples in digits.load()
    )
    losses = [
        float(session.step({name: array[at : at + 32] for name, array in train.items()})["loss"])
        for at in (0, 32, 64, 96) * 2
    ]
    return Trained(folder, losses, session, session.evaluate(test, metrics="accuracy"))


@pytest.mark.nightly(1)
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("query", ["", "?state"], ids=["fetched", "on the device"])
def test_webgpu_trains_as_python_does(query: str, small: Trained) -> None:
    """On SwiftShader, which computes as a GPU does and stands in for one."""
    report, posted = run_page(small.folder, f"webgpu.html{query}", *SWIFTSHADER)
    np.testing.assert_allclose(report["losses"], small.losses, rtol=1e-4, atol=1e-5)
    assert report["loss"] == pytest.approx(small.evaluation["loss"], rel=1e-3)
    assert report["accuracy"] == pytest.approx(small.evaluation["accuracy"], abs=0.01)
    assert_trained_alike(posted["model.onnx"], small)


class _Elsewhere(SimpleHTTPRequestHandler):
    """Another server, which lets every page read its files."""

    extensions_map = {".mjs": "text/javascript", ".wasm": "application/wasm"}  # noqa: RUF012

    def end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Cross-Origin-Resource-Policy", "cross-origin")
        super().end_headers()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        super().do_GET()

    def log_message(self, *values: object) -> None:
        pass


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadingHTTPServer]:
    """A server on another port with onnxruntime-web and code; ``asked`` has what was read."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "ort").symlink_to(WEB / "node_modules" / "onnxruntime-web" / "dist")
    (folder / "evil.mjs").write_text('new BroadcastChannel("attack").postMessage(import.meta.url)')
    handler = functools.partial(_Elsewhere, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.asked = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page that trains three classes of images, with arrays for index.html too."""
    net = lenet((3, 8, 8), channels=(4, 8), hidden=16, classes=3)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer="Adam")
    export_step(model, tmp_path, web=True)
    for name, rows in (("train", range(8)), ("test", [8, 9])):
        write_safetensors(tmp_path / f"{name}.safetensors", colors(rows))
    return page_of(tmp_path, "attacks.mjs")


@pytest.mark.slow
@pytest.mark.browser
def test_addresses_of_pages_run_no_code(page: Path, elsewhere: ThreadingHTTPServer) -> None:
    """Nor do messages to the worker; the addresses are in the script."""
    shutil.copy(Path(elsewhere.RequestHandlerClass.keywords["directory"], "evil.mjs"), page)  # type: ignore[attr-defined]
    report, _ = run_page(page, f"test.html?other={elsewhere.server_port}")
    assert report["ran"] == []
    assert elsewhere.asked == []  # type: ignore[attr-defined]
    assert len(report["refused"]) == 48
    said = (
        "the address of this page cannot choose onnxruntime-web, ",
        "provider must be 'wasm' or ",
    )
    others = {page: text for page, text in report["refused"].items() if not text.startswith(said)}
    assert others == {}
    for page_and_address, text in report["opened"].items():
        first = page_and_address.startswith("index.html")
        expected = "24 training rows, 6 test rows, " if first else "Runs on the CPU (WebAssembly). "
        assert text.startswith(expected), page_and_address
    assert report["escapes"] == {"index.html": [], "classifier.html": []}
    assert report["messages"] == [
        *("opened", "opened"),  # what the message names is not read
        "provider must be 'wasm' or 'webgpu', got '../../evil.mjs?'",
        "provider must be 'wasm' or 'webgpu', got 'wasm'",
    ]


@pytest.mark.slow
@pytest.mark.browser
def test_the_export_can_name_another_place(page: Path, elsewhere: ThreadingHTTPServer) -> None:
    place = f"http://127.0.0.1:{elsewhere.server_port}/ort"
    (page / "ort").unlink()
    model = str(page / "model.onnx")
    assert main(["export-step", model, str(page), "--web", "--runtime", place]) == 0
    report, _ = run_page(page, f"test.html?other={elsewhere.server_port}")
    assert "/ort/ort.wasm.min.mjs" in elsewhere.asked  # type: ignore[attr-defined]
    assert report["opened"]["index.html"].startswith("24 training rows, 6 test rows, ")
    assert report["opened"]["classifier.html"].startswith("Runs on the CPU (WebAssembly). ")
    trusted = {f"{place[:-3]}evil.mjs"}  # which a script of the page itself named
    assert set(report["ran"]) <= trusted


COLORS, IMAGES = ("a red", "b green", "c blue"), 10


def colors(rows: Iterable[int]) -> dict[str, Array]:
    """Returns images of one color each, as tests/web/classifier.mjs makes them."""
    images, labels = [], []
    for label in range(len(COLORS)):
        for row in rows:
            color = np.full(3, 5 * row, np.float32)
            color[label] = 255 - 5 * row
            images.append(np.broadcast_to(color[:, None, None], (3, 8, 8)))
            labels.append(label)
    pixels = np.stack(images) / np.float32(255)
    return {"images": (pixels - np.float32(0.5)) / np.float32(0.25), "labels": np.array(labels)}


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(
    "target", [pytest.param(None, id="wasm"), pytest.param("webgpu", marks=pytest.mark.slow)]
)
def test_the_second_page_trains_a_classifier_on_images(target: Any, tmp_path: Path) -> None:
    """It sets every fifth image of a class aside, and trains in order, 8 images at a time."""
    net = lenet((3, 8, 8), channels=(4, 8), hidden=16, classes=3)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer="Adam")
    export_step(model, tmp_path, web=True, target=target)
    other = build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    export_step(other, tmp_path / "wrong")
    session = TrainingSession(model)
    session.learning_rate = 0.01
    train = colors([0, 1, 2, 3, 5, 6, 7, 8])
    losses = [
        float(session.step({name: array[at : at + 8] for name, array in train.items()})["loss"])
        for at in (0, 8, 16) * 2
    ]
    apart = colors([4, 9])
    apart["images"][4] = colors([11])["images"][0]  # red among the blue ones
    accuracy = session.evaluate(apart, metrics="accuracy")["accuracy"]
    trained = Trained(tmp_path, losses, session, {})
    (guess,) = session.predict({"images": colors([3])["images"][1:2]})["logits"].argmax(1)
    guesses = session.predict({"images": apart["images"]})["logits"].argmax(1)
    pairs = list(zip(apart["labels"], guesses, strict=True))

    folder = page_of(tmp_path, "classifier.mjs")
    options = SWIFTSHADER if target else ()
    report, posted = run_page(folder, "test.html?ordered", *options, seconds=480)
    name = "the graphics card (WebGPU)" if target else "the CPU (WebAssembly)"
    assert report["opened"] == f"Runs on {name}. Add images of each class."
    assert report["model"] == "The folder of this page: 3 classes, images of 8 × 8, color."
    assert report["summary"] == f"{name}, 8 × 8, channels first, 0 to 1"
    assert report["fallback"] is None
    assert report["next"] == {
        "start": ["Done, Now, Waits for step 2, Waits for step 2", "Choose a folder of classes"],
        "images": ["Done, Done, Now, Waits for step 3", "Train"],
        "running": ["Done, Done, Running, Waits for step 3", "Stop"],
        "trained": ["Done, Done, Done, Done", "Download model (.onnx)"],
        "changed": ["Done, Done, Now, Done", "Train more"],
    }
    assert report["rows"] == [2, 3]  # a third one when the second is filled
    disabled, enabled = [True, True], [False, False]
    assert report["downloads"] == [  # and whether a reload would lose the training
        *([*disabled, False], [*enabled, True], [*enabled, False], [*disabled, False])
    ]
    assert report["drawn"] == ["The loss of each step appears here."]
    assert report["width"] <= 390
    assert report["trainAt"] < 2 * 844
    assert report["refused"] == [
        "add images to at least 2 classes, got 0",
        "std must be numbers > 0, for all channels or each of 3, got 0",
        "mean must be finite numbers, for all channels or each of 3, but the field is empty",
        "mean must be finite numbers, for all channels or each of 3, got 1, 2",
        "epochs must be an integer >= 1, got 0",
        "batch size must be an integer >= 1, but the field is empty",
        "% set aside must be a number from 0 to 90, got 91",
    ]
    assert report["preprocessing"] == (
        f"Settings: {name}, 8 × 8, channels first, other mean and std."
    )
    broken = (
        "Skipped 2 files that this browser cannot read as images: notes.txt, 1.png. "
        "No class was made from 1 folder without images: aa broken."
    )
    assert report["added"] == [
        [
            *("Added 0 images.", "info"),
            "No class was made from 2 folders without images: empty, texts.",
        ],
        [
            *("Added 20 images.", "success"),
            broken,
        ],
        *(["Added 5 images.", "success", ""], ["Added 5 images.", "success", ""]),
    ]
    assert report["emptied"] == "0 images"
    assert report["classes"] == [f"{color}: {IMAGES} images" for color in COLORS]
    assert report["full"] == "the model has 3 classes, and none is free for the folder 'd'"
    assert report["trained"] == (
        f"Trained 6 steps; accuracy on images set aside {accuracy:.1%}. "
        f"24 images to train, 6 set aside, on {name}."
    ).replace("%", " %")
    right = sum(label == found for label, found in pairs)
    assert report["verdict"] == f"{accuracy:.1%} are right: {right} of 6 images set aside.".replace(
        "%", " %"
    )
    seen = sorted({int(each) for pair in pairs for each in pair})
    assert report["table"] == [
        ["", *(COLORS[each] for each in seen)],
        *([COLORS[label], *(str(pairs.count((label, found))) for found in seen)] for label in seen),
    ]
    wrong = [(label, found) for label, found in pairs if label != found]
    assert wrong
    assert report["mistakes"] == [f"{COLORS[a]} taken for {COLORS[b]}" for a, b in wrong]
    assert report["pictures"] == [[20, 10]] * len(wrong)
    assert report["title"] == f"Train an image classifier: {', '.join(COLORS)}"
    assert report["guess"] == f"That is {COLORS[guess]}, with ."
    assert report["classified"] == "Classified 1-3.png."
    assert report["kinds"] == ["busy", "success"]  # so the error before is gone
    assert report["shown"] == [20, 10]
    assert report["asked"] == "The trained model was not downloaded. Go on without it?"
    assert report["focus"] == "solid"
    assert report["wrongPicture"] == "'notes.txt' is no image that this browser can read"
    assert_trained_alike(posted["model.onnx"], trained)
    assert report["wrongFolder"].startswith("this page needs a model with one input of images, ")
    assert report["unchanged"] is True
    assert posted["unchanged.onnx"] == posted["model.onnx"]
    assert report["twice"] == [
        [
            *("Added 0 images.", "info"),
            "Skipped 10 files already added: 0-0.png, 0-1.png, 0-2.png, ….",
        ],
        ["Added 1 image.", "success", "Skipped 2 files already added: copy.png, copy.png."],
    ]
    assert report["classesAgain"] == [f"{IMAGES} images"] * 3
    refused = "learning rate must be a finite float32 number >= 0, got 1e+300"
    assert report["rates"] == [refused, refused, "6", "0"]
    state = dict(TrainingSession(posted["model.onnx"]).state)
    for file in ("state.safetensors", "kept.safetensors"):
        (tmp_path / file).write_bytes(posted[file])
        arrays = read_safetensors(tmp_path / file)
        assert_same_arrays({name: state[name] for name in arrays}, arrays)
        assert set(arrays) == set(state)

    assert report["provider"] == (
        "Runs on the CPU (WebAssembly)."
        if target
        else "Runs on the CPU (WebAssembly), because the graphics card cannot be used here: "
        "this browser has no WebGPU device."
    )
    assert report["kept"] == "6"
    assert report["diverged"] in {
        f"step: the loss is {loss}: check the learning rate (1e+30). Reset returns to the start."
        for loss in ("NaN", "Infinity")
    }
    assert report["reset"][0].startswith("Reset to the start. 24 images to train")
    assert report["reset"][1] == "0.001"
    assert report["incomplete"].startswith("the folder lacks step.json; choose a folder that ")
    assert report["chosen"] == f"Runs on {name}."
    assert report["untrained"] == ["0", "–"]
    assert report["model2"] == "The chosen folder: 3 classes, images of 8 × 8, color."
    assert report["again"].startswith("Trained 3 steps; accuracy on images set aside ")
    assert report["unnamed"] == []
    assert report["names"] == ["Add images of c blue", "Remove the images of c blue"]
