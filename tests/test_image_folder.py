"""Folders of images as data sets of `fit`, and changes of images in training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ArgumentError, FeedError, losses, optimizers
from ortops.data import Color, Crop, CutMix, Erase, Flip, MixUp, Rotate, image_folder
from ortops.data import images as images_module
from ortops.data.augmentation import changes_of

pytestmark = pytest.mark.optional("PIL", "images")

RNG = np.random.default_rng


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 12 dark, 5 light and 3 red images of 8 × 6 pixels."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    rng = RNG(0)
    for name, count, low in (("dark", 12, 0), ("light", 5, 150), ("red", 3, 80)):
        Path("photos", name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(low, low + 100, (8, 6, 3), np.uint8)
            Image.fromarray(pixels).save(f"photos/{name}/{number:02}.png")
    return tmp_path


def pixels(path: Path) -> Any:
    from PIL import Image

    return np.asarray(Image.open(path).convert("RGB"))


def session(loss: Any = None, seed: int = 0) -> ortops.TrainingSession:
    """A linear classifier of 3 × 8 × 6 pixels with a Softmax."""
    rng = RNG(seed)
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        classifier (float[batch, 3, 8, 6] images) => (float[batch, 3] scores)
        {
            flat = Flatten (images)
            logits = MatMul (flat, w)
            scores = Softmax (logits)
        }""")
    weights = rng.normal(0, 0.05, (144, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    built = ortops.build_training_model(
        model, loss=loss or losses.SoftmaxCrossEntropy(), optimizer=optimizers.Adam(0.01)
    )
    return ortops.TrainingSession(built)


def weights_of(trained: ortops.TrainingSession) -> Any:
    return np.array(trained.state["w"])


def batches(data: Any, trained: ortops.TrainingSession, epoch: int, **more: Any) -> list[Any]:
    from ortops.engine.training.data import open_data

    source = open_data(data, trained.inputs, batch_size=4)
    return [dict(batch) for batch in source.epoch(epoch, **more)]


def test_pixels_order_and_labels() -> None:
    data = image_folder("photos", mean=[0.5, 0.4, 0.3], std=[0.2, 0.3, 0.4])
    assert data.class_names == ["dark", "light", "red"]
    assert data.labels.tolist() == [0] * 12 + [1] * 5 + [2] * 3
    assert len(data) == 20
    assert data.files[12] == Path("photos/light/00.png")
    trained = session()
    found = batches(data, trained, 0)
    exact = np.stack([pixels(file) for file in data.files]) / 255
    expected = ((exact - [0.5, 0.4, 0.3]) / [0.2, 0.3, 0.4]).transpose(0, 3, 1, 2)
    name = next(iter(trained.inputs))
    images = np.concatenate([batch[name] for batch in found])
    np.testing.assert_allclose(images, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "convert"),
    [
        ({"layout": "NHWC"}, lambda rgb: rgb),
        ({"layout": "NHWC", "channels": "BGR"}, lambda rgb: rgb[..., ::-1]),
        ({"channels": "BGR"}, lambda rgb: rgb[..., ::-1].transpose(2, 0, 1)),
    ],
)
def test_layouts_and_channels(options: dict[str, Any], convert: Any) -> None:
    data = image_folder("photos", dtype=np.uint8, **options)
    for row in (0, 13):
        np.testing.assert_array_equal(
            data.images(np.array([row]))[0], convert(pixels(data.files[row]))
        )
    grey = image_folder("photos", channels="L", size=4)
    assert grey.images(np.array([0])).shape == (1, 1, 4, 4)


def test_large_folders_are_read_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    held = image_folder("photos", dtype=np.uint8)
    whole = held.images(np.arange(20))
    for lazy in (image_folder("photos", dtype=np.uint8, check=False),):
        np.testing.assert_array_equal(lazy.images(np.arange(20)), whole)
    monkeypatch.setattr(images_module, "_HELD_BYTES", 100)
    lazy = image_folder("photos", dtype=np.uint8)
    np.testing.assert_array_equal(lazy.images(np.array([7, 2, 7])), whole[[7, 2, 7]])
    for given in (held, lazy):
        assert given.images([]).shape == (0, *whole.shape[1:])
        np.testing.assert_array_equal(given.images([-1, 0]), whole[[-1, 0]])
        for wrong in (
            [20],
            [-21],
            [0.5],
            [True],
            ["0"],
            20,
            [[0, 1]],
            [[0], [1, 2]],
            [2**70],
            None,
        ):
            with pytest.raises(FeedError, match="images: rows must be a list of integers from 0 t"):
                given.images(wrong)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("augment", [[], ["flip", "crop", "rotate", "color", "erase"]])
@pytest.mark.parametrize("sampling", ["plain", "balanced"])
def test_fit_resumes_with_equal_bits(held: bool, augment: list[str], sampling: str) -> None:
    options: dict[str, Any] = {"augment": augment, "sampling": sampling, "check": held}

    class Stop(ortops.callbacks.Callback):
        def on_step(self, record: Any, trained: Any) -> None:
            if record.step == 8:
                record.stop("enough")

    whole = session()
    whole.fit(image_folder("photos", **options), epochs=3, batch_size=4, progress=False)
    begun = session()
    data = image_folder("photos", **options)
    begun.fit(data, epochs=3, batch_size=4, progress=False, callbacks=[Stop()])
    begun.save("begun.onnx")
    again = ortops.TrainingSession("begun.onnx")
    assert again.steps_done == 8
    data = image_folder("photos", **options)
    again.fit(data, epochs=3, batch_size=4, progress=False, resume=True, prefetch=2)
    np.testing.assert_array_equal(weights_of(again), weights_of(whole))


def test_augmentation_depends_on_seed_epoch_and_row(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = session()
    name = next(iter(trained.inputs))

    def read(epoch: int, seed: int = 0, **more: Any) -> Any:
        data = image_folder("photos", augment=["flip", "rotate", "color"], seed=seed)
        return np.concatenate([batch[name] for batch in batches(data, trained, epoch, **more)])

    first = read(1)
    order = RNG(3).permutation(20)
    np.testing.assert_array_equal(read(1, order=RNG(3)), first[order])
    monkeypatch.setattr(images_module, "_MOST_THREADS", 1)
    np.testing.assert_array_equal(read(1), first)
    assert not np.array_equal(read(2), first)
    assert not np.array_equal(read(1, seed=1), first)
    plain = batches(image_folder("photos"), trained, 0)
    np.testing.assert_array_equal(read(0), np.concatenate([batch[name] for batch in plain]))


def test_validation_is_drawn_at_random_and_not_augmented() -> None:
    data = image_folder("photos", augment="flip", validation_split=0.23, seed=4)
    assert data.validation is not None
    assert (len(data), len(data.validation)) == (15, 5)
    assert not set(data.files) & set(data.validation.files)
    trained = session()
    history = trained.fit(data, validation=data.validation, epochs=2, progress=False)
    measured = trained.evaluate(data.validation)["loss"]
    assert history[-1]["validation_loss"] == pytest.approx(measured)
    assert trained.predict(data.validation)["scores"].shape == (5, 3)


def test_validation_split_of_fit_warns_of_missing_classes(caplog: Any) -> None:
    session().fit(image_folder("photos"), validation_split=0.2, progress=False)
    assert "have no image of class 'red'" in caplog.text


def test_class_weights_and_balanced_sampling() -> None:
    data = image_folder("photos", sampling="balanced")
    np.testing.assert_allclose(data.class_weights(), [20 / 36, 20 / 15, 20 / 9])
    drawn = np.concatenate([np.concatenate(data.arrange(RNG(i), 4)) for i in range(200)])
    shares = np.bincount(data.labels[drawn % 20]) / len(drawn)
    np.testing.assert_allclose(shares, 1 / 3, atol=0.03)
    np.testing.assert_array_equal(np.concatenate(data.arrange(None, 4)), np.arange(20))
    epoch = np.concatenate(data.arrange(RNG(0), 4))
    assert len(set(epoch)) == len(epoch)  # a row that is drawn again is changed in another way


def test_weights_of_rows_and_classes() -> None:
    data = image_folder("photos", sampling="balanced")
    trained = session(losses.SoftmaxCrossEntropy(sample_weight="weights"))
    weights = np.arange(20, dtype=np.float32)
    from ortops.engine.training.data import open_data

    source = open_data(data, trained.inputs, batch_size=4, more={"weights": weights})
    rows = np.concatenate(data.arrange(RNG(0), 4)) % 20
    found = [batch["weights"] for batch in source.epoch(1, order=RNG(0))]
    np.testing.assert_array_equal(np.concatenate(found), rows)
    assert source.part is not None
    assert np.concatenate([b["weights"] for b in source.part(15, 20).epoch()]).tolist() == [
        *range(15, 20)
    ]
    more = {"class_weight": data.class_weights(), "sample_weight": weights}
    trained.fit(data, **more, progress=False)
    with pytest.raises(FeedError, match="must have 20 rows"):
        trained.fit(data, sample_weight=weights[1:], progress=False)


# --------------------------------------------------------------------------------- changes


def image(height: int = 9, width: int = 7, channels: int = 3) -> Any:
    return RNG(1).random((height, width, channels))


def test_flip_and_crop() -> None:
    np.testing.assert_array_equal(Flip(1)(image(), RNG(0)), image()[:, ::-1])
    np.testing.assert_array_equal(Flip(0)(image(), RNG(0)), image())
    padded = np.pad(image(), ((2, 2), (1, 1), (0, 0)), mode="reflect")
    windows = [padded[y : y + 9, x : x + 7] for y in range(5) for x in range(3)]
    seen = set()
    for seed in range(200):
        found = Crop()(image(), RNG(seed))
        seen.add(next(i for i, each in enumerate(windows) if np.array_equal(each, found)))
    assert seen == set(range(15))


def test_rotate_against_scipy() -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    angle = np.radians(RNG(5).uniform(-40, 40))
    y, x = np.mgrid[0:9, 0:7]
    y, x = y - 4.0, x - 3.0
    places = [
        np.cos(angle) * y - np.sin(angle) * x + 4,
        np.sin(angle) * y + np.cos(angle) * x + 3,
    ]
    expected = np.stack(
        [
            ndimage.map_coordinates(image()[..., c], places, order=1, mode="nearest")
            for c in range(3)
        ],
        axis=-1,
    )
    np.testing.assert_allclose(Rotate(40)(image(), RNG(5)), expected, atol=1e-12)
    np.testing.assert_allclose(Rotate(1e-9)(image(), RNG(5)), image(), atol=1e-7)


def test_color_against_pillow() -> None:
    from PIL import Image, ImageEnhance

    picture = Image.fromarray((image(40, 30) * 255).round().astype(np.uint8))
    brightness, contrast, saturation = RNG(2).uniform(0.5, 1.5, 3)
    expected: Any = ImageEnhance.Brightness(picture).enhance(brightness)
    expected = ImageEnhance.Contrast(expected).enhance(contrast)
    expected = ImageEnhance.Color(expected).enhance(saturation)
    found = Color(0.5)(np.asarray(picture) / 255, RNG(2)) * 255
    np.testing.assert_allclose(found, np.asarray(expected), atol=4)  # Pillow truncates thrice
    grey = Color()(image(channels=1), RNG(0))
    assert grey.shape == (9, 7, 1)


def test_erase() -> None:
    areas = []
    for seed in range(100):
        found = Erase(1)(image(40, 30), RNG(seed))
        changed = (found != image(40, 30)).any(-1)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        box = changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert box.all()
        assert 0 <= found.min() <= found.max() <= 1
        areas.append(changed.mean())
    assert 0.01 < min(areas) < 0.05
    assert 0.25 < max(areas) < 0.36


def test_mixup_and_cutmix() -> None:
    one, other = image(), 1 - image()
    mixed, share = MixUp(1.0)(one, other, RNG(3))
    assert share == RNG(3).beta(1, 1)
    np.testing.assert_allclose(mixed, share * one + (1 - share) * other)
    for seed in range(50):
        cut, share = CutMix()(one, other, RNG(seed))
        of_other = (cut == other).all(-1)
        np.testing.assert_array_equal(cut[~of_other], one[~of_other])
        assert share == pytest.approx(1 - of_other.mean())


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_mixed_labels(name: str) -> None:
    data = image_folder("photos", augment=name, seed=1)
    with pytest.raises(ArgumentError, match=r"takes one class number per row; train with a loss"):
        session().fit(data, progress=False)
    trained = session(losses.KullbackLeibler(reduction="batchmean"))
    images, targets = list(trained.inputs)
    plain, mixed = (batches(data, trained, epoch) for epoch in (0, 1))
    for before, after in zip(plain, mixed, strict=True):
        assert set(np.unique(before[targets])) <= {0.0, 1.0}
        np.testing.assert_allclose(after[targets].sum(1), 1, rtol=1e-6)
        if name == "mixup":
            rng = [RNG((1, 1, row, 1)) for row in range(20)]
            first = rng[0]
            first.integers(1)
            share = first.beta(0.2, 0.2)
            if before is plain[0]:
                expected = share * before[images][0] + (1 - share) * before[images][-1]
                np.testing.assert_allclose(after[images][0], expected, atol=1e-6)
    trained.fit(data, epochs=1, progress=False)


def test_changes_by_name() -> None:
    assert changes_of("colour") == [Color()]
    with pytest.raises(ArgumentError, match="there is no 'flop'; did you mean 'flip'"):
        changes_of(["flop"])
    with pytest.raises(ArgumentError, match=r"instances such as Rotate\(30\)"):
        changes_of([Flip])
    data = image_folder("photos", augment=lambda image, rng: image[:2])
    with pytest.raises(ArgumentError, match=r"must return an image of shape \[8, 6, 3\]"):
        session().fit(data, progress=False)
    negative = image_folder("photos", augment=lambda image, rng: 1 - image, dtype=np.uint8)
    trained = session()
    name = next(iter(trained.inputs))
    found = batches(negative, trained, 1)[0][name]
    np.testing.assert_array_equal(found, 255 - negative.images(np.arange(4)))


# -------------------------------------------------------------------------------- hostile folders


def save(name: str, picture: Any, **more: Any) -> None:
    picture.save(Path("photos", name), **more)


def test_kinds_of_images() -> None:
    from PIL import Image

    turned = Image.fromarray(np.rot90(pixels(Path("photos/dark/00.png"))).copy())
    exif = turned.getexif()
    exif[0x0112] = 6
    save("dark/00.png", turned, exif=exif)
    save("dark/01.png", Image.new("RGBA", (6, 8), (10, 20, 30, 128)))
    save("dark/02.png", Image.new("P", (6, 8)))
    save("dark/03.png", Image.new("L", (6, 8), 7))
    save("dark/04.png", Image.new("CMYK", (6, 8)).convert("1"))
    found = image_folder("photos", dtype=np.uint8, layout="NHWC").images(np.arange(5))
    assert found.shape == (5, 8, 6, 3)
    np.testing.assert_array_equal(found[1, 0, 0], [10, 20, 30])
    np.testing.assert_array_equal(found[3], np.full((8, 6, 3), 7))


def deep() -> None:
    from PIL import Image

    save("dark/03.png", Image.fromarray(np.zeros((8, 6), np.uint16)))


def corrupt() -> None:
    Path("photos/dark/03.png").write_bytes(Path("photos/dark/02.png").read_bytes()[:60])


def bomb() -> None:
    from PIL import Image

    save("dark/03.png", Image.new("1", (10_000, 9_000)))


def other_size() -> None:
    from PIL import Image

    save("dark/03.png", Image.new("RGB", (3, 3)))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (deep, "more than 8 bits"),
        (corrupt, "dark/03.png': .*repair or remove it"),
        (bomb, "exceed"),
        (other_size, "the images differ in size, and size= is not given"),
        (lambda: Path("photos/empty").mkdir(), "subfolder 'empty' contains no images"),
        (lambda: Path("photos/dark/03.png").rename("photos/a.png"), "not in the subfolder"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.filterwarnings("ignore::Warning")
def test_folders_that_are_refused(harm: Any, told: str, check: bool) -> None:
    harm()
    with pytest.raises(FeedError, match=told):
        image_folder("photos", check=check).images(np.arange(20))


@pytest.mark.skipif(os.name == "nt", reason="links are POSIX's")
def test_links() -> None:
    Path("photos/red/link.png").symlink_to("00.png")
    assert len(image_folder("photos")) == 21
    Path("outside.png").write_bytes(Path("photos/red/00.png").read_bytes())
    Path("photos/red/out.png").symlink_to("../../outside.png")
    with pytest.raises(FeedError, match="a symbolic link to a file outside"):
        image_folder("photos")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layout": "CHW"}, "layout must be"),
        ({"channels": "RGBA"}, "channels must be"),
        ({"mean": [1, 2]}, "mean must have 1 or 3 numbers, as images have 3 channels"),
        ({"std": [0.0]}, "std must have finite numbers other than 0, got 0"),
        ({"scale": 0}, "scale must be"),
        ({"size": (1, 2, 3)}, "size must be a height and a width"),
        ({"size": 0}, "size must be an integer >= 1"),
        ({"dtype": np.uint8, "mean": [1]}, "unscaled pixels"),
        ({"validation_split": 0.99}, "must leave images"),
        ({"sampling": "fair"}, "sampling must be"),
        ({"class_names": ["dark", "dark"]}, "differ from each other"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        image_folder("photos", **options)


def test_class_names_and_missing_folders() -> None:
    data = image_folder("photos", class_names=["red", "blue", "light", "dark"])
    assert data.labels.tolist() == [3] * 12 + [2] * 5 + [0] * 3
    with pytest.raises(FeedError, match="class 1 has no rows"):
        data.class_weights()
    with pytest.raises(FeedError, match="the subfolder 'dark' is not in class_names"):
        image_folder("photos", class_names=["red", "light"])
    with pytest.raises(FeedError, match="is not a folder"):
        image_folder("nowhere")
