"""Folders with one subfolder of images per class."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import boolean, choice, number, whole_number
from ortops._common.optional import optional_module
from ortops.data.augmentation import Augmentation, changes_of
from ortops.data.images import (
    EXTENSIONS,
    Decoder,
    image_files,
    lazy_images,
    make_decoder,
    read_images,
)
from ortops.data.rows import ImageRows, balanced_weights, drawn_by_class
from ortops.engine.training.feeds import Feeds, Inputs
from ortops.engine.training.row_data import Division, RowData
from ortops.engine.training.validation_split import hold_out
from ortops.errors import ArgumentError, FeedError, did_you_mean

logger = logging.getLogger("ortops")


class ImageFolder(RowData):
    """The images of a folder; `image_folder` makes it.

    Attributes:
        files: The files, in the order of the rows: sorted by class, then by name.
        class_names: The names of the classes, in the order of their numbers.
        labels: The class number of each row.
        validation: The rows held out for validation, which are never augmented; None if there are
            none.

    Example:
        >>> data = image_folder("photos", size=224, validation_split=0.2)  # doctest: +SKIP
        >>> data.class_names, len(data), len(data.validation)  # doctest: +SKIP
        (['cat', 'dog'], 800, 200)
    """

    def __init__(
        self,
        rows: ImageRows,
        files: Sequence[Path],
        class_names: Sequence[str],
        labels: npt.NDArray[np.int64],
    ) -> None:
        self._rows = rows
        self.files, self.class_names, self.labels = list(files), list(class_names), labels
        self.validation: ImageFolder | None = None

    def __len__(self) -> int:
        return len(self.files)

    def class_weights(self) -> npt.NDArray[np.float64]:
        """Returns a weight for each class, with which all classes weigh equally in the loss.

        Raises:
            FeedError: If a class has no images.
        """
        return balanced_weights(self.labels, len(self.class_names))

    def images(self, rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        """Returns the images of some rows, without augmentation.

        Args:
            rows: Their numbers.

        Raises:
            FeedError: If there are no such rows, or a file cannot be read.
        """
        try:
            numbers = np.asarray(rows)
        except (ValueError, OverflowError):  # lists of several lengths
            numbers = np.empty(())
        fits = numbers.ndim == 1 and (not numbers.size or numbers.dtype.kind in "iu")
        if not fits or not np.isin(numbers, range(-len(self), len(self))).all():
            raise FeedError(
                f"images: rows must be a list of integers from 0 to {len(self) - 1}, got "
                f"{rows!r:.80}"
            )
        found: npt.NDArray[Any] = self._rows.images[numbers.astype(np.int64)]
        return found

    def take(self, rows: npt.NDArray[np.int64]) -> ImageFolder:
        """Returns some rows, without reading them.

        Args:
            rows: Their numbers.
        """
        files = [self.files[row] for row in rows]
        return ImageFolder(self._rows.take(rows), files, self.class_names, self.labels[rows])

    def part(self, begin: int, end: int) -> ImageFolder:
        """Returns the rows from a first one up to another; warns if it lacks a class."""
        result = self.take(np.arange(begin, end))
        missing = sorted(set(self.labels) - set(result.labels))
        if missing:
            logger.warning(
                "data: rows %d to %d of the folder have no image of class '%s', as rows are sorted "
                "by class; use image_folder(…, validation_split=…), which draws rows at random",
                *(begin, end - 1, self.class_names[missing[0]]),
            )
        return result

    def read(self, rows: npt.NDArray[np.int64], inputs: Inputs, epoch: int) -> Feeds:
        """Returns a batch; see `ortops.engine.training.data.RowData`."""
        places = rows % len(self)
        images, target = self._rows.images[places], inputs.place(1)
        labels: npt.NDArray[Any] = self.labels[places]
        kind = _type_of_probabilities(inputs)
        if kind is not None:
            labels = np.eye(len(self.class_names), dtype=np.float64)[labels]
        if epoch and self._rows.augmentation is not None:
            images, shares = self._rows.augmented(images, rows, epoch)
            if kind is not None and self._rows.mixing:
                labels = shares * labels + (1 - shares) * np.roll(labels, 1, 0)
        labels = labels if kind is None else labels.astype(kind)
        return {inputs.place(0): images} | ({target: labels} if target else {})

    def check(self, inputs: Inputs) -> None:
        """Raises an error if labels have to be mixed, but the loss takes class numbers."""
        target = inputs.place(1)
        if self._rows.mixing and target in inputs and _type_of_probabilities(inputs) is None:
            name = type(self._rows.mixing[0]).__name__.lower()
            raise ArgumentError(
                f"augment: '{name}' mixes labels, but input '{target}' takes one class number per "
                "row; train with a loss of probabilities, such as "
                "losses.SoftmaxCrossEntropy(probabilities=True) or "
                "losses.BinaryCrossEntropyWithLogits(), or leave it out"
            )

    def arrange(
        self, order: np.random.Generator | None, batch_size: int
    ) -> Sequence[npt.NDArray[np.int64]]:
        """Returns the numbers of the rows of each batch of an epoch; see `drawn_by_class`."""
        if not self._rows.balanced or order is None:
            return super().arrange(order, batch_size)
        return Division(drawn_by_class(self.labels, len(self.class_names), order), batch_size)


def _type_of_probabilities(inputs: Inputs) -> np.dtype[Any] | None:
    """Returns the type of labels that are probabilities of classes; None for class numbers."""
    target = inputs.get(inputs.place(1))
    if target is None or target.dtype is None or target.dims is None:
        return None
    return target.dtype if target.dtype.kind == "f" and len(target.dims) == 2 else None


def image_folder(
    path: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    scale: float = 255.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    layout: str = "NCHW",
    channels: str = "RGB",
    dtype: npt.DTypeLike = np.float32,
    class_names: Sequence[str] | None = None,
    augment: Any = (),
    sampling: str = "plain",
    validation_split: float = 0.0,
    seed: int = 0,
    check: bool = True,
) -> ImageFolder:
    """Returns the images of a folder, with one subfolder per class, as a data set.

    Images are decoded in threads, by Pillow (``pip install ortops[images]``), turned into their
    EXIF orientation, and resized. Up to 0.5 GB of them are held in memory; more are read batch by
    batch. `fit` resumes exactly in the middle of an epoch.

    If the target of the loss has floats of shape [rows, classes], labels are one-hot, else class
    numbers.

    Args:
        path: The folder. Hidden files and files that are no images are ignored.
        size: The height and width, or one number for both, to resize images to. Needed unless all
            images have the same size.
        scale: The divisor of pixels.
        mean: The number then subtracted from each channel.
        std: The number that each channel is then divided by.
        layout: ``"NCHW"`` or ``"NHWC"``.
        channels: ``"RGB"``, ``"BGR"``, or ``"L"`` for grey.
        dtype: The element type. Integers are unscaled pixels.
        class_names: The classes in the order of their numbers; by default, the sorted names of the
            subfolders.
        augment: Changes of images in training, in order: ``"flip"``, ``"crop"``, ``"rotate"``,
            ``"color"``, ``"erase"``, ``"mixup"``, ``"cutmix"``, or functions of an image of shape
            [height, width, channels] with pixels from 0 to 1 and a generator of random numbers.
            They are a function of the seed, the epoch and the row.
        sampling: ``"balanced"`` draws the rows of an epoch with replacement, all classes equally
            likely; it needs ``fit(shuffle=True)``. ``"plain"`` takes each row once.
        validation_split: The fraction of rows, drawn at random, that the attribute ``validation``
            of the result has instead.
        seed: The seed of augmentation and of the split.
        check: Whether to read all images now, so that one that cannot be read is an error before
            training. Without, no image is held in memory.

    Raises:
        ArgumentError: If an argument is wrong.
        FeedError: If there are no images, a class has none, or an image cannot be read.
        OrtopsError: If Pillow is not installed.

    Example:
        >>> data = image_folder("photos", size=224, augment=["flip", "crop"])  # doctest: +SKIP
        >>> session.fit(data, epochs=5)  # doctest: +SKIP
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FeedError(f"data '{folder}' is not a folder; give a folder of images")
    share = number("validation_split", validation_split, minimum=0, below=1)
    seed = whole_number("seed", seed, 0)
    choice("sampling", sampling, ("plain", "balanced"))
    decode = _decoder(size, scale, mean, std, layout, channels, np.dtype(dtype))
    optional_module(f"data '{folder}'", "PIL.Image", "images", package="Pillow")
    files, others = image_files(folder)
    labels, names = classes_of(folder, files, class_names)
    if others:
        logger.info("data: %d files in '%s' are ignored", len(others), folder)
    if boolean("check", check):
        images, said = read_images(folder, files, decode)
        for sentence in said:
            logger.info("data: %s", sentence)
    else:
        images = lazy_images(folder, files, decode)
    changes, (black, white) = changes_of(augment), decode.range_of_pixels()
    changed = Augmentation(changes, seed, decode.axis, black, white) if changes else None
    rows = ImageRows(images, changed, balanced=sampling == "balanced")
    training = ImageFolder(rows, files, names, labels)
    if not share:
        return training
    rest, aside = hold_out(len(files), share, seed, name="validation_split", unit="images")
    result = training.take(np.sort(rest))
    result.validation = ImageFolder(ImageRows(images), files, names, labels).take(np.sort(aside))
    return result


def _decoder(
    size: int | tuple[int, int] | None,
    scale: float,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    layout: str,
    channels: str,
    dtype: np.dtype[Any],
) -> Decoder:
    """Returns what converts images, from checked arguments."""
    choice("layout", layout, ("NCHW", "NHWC"))
    choice("channels", channels, ("RGB", "BGR", "L"))
    if dtype.kind not in "iuf":
        raise ArgumentError(f"dtype must be a float or integer type, got {dtype}")
    sides = None
    if size is not None:
        given_sides = size if isinstance(size, Sequence) else (size, size)
        if len(given_sides) != 2:
            raise ArgumentError(f"size must be a height and a width, got {size!r:.80}")
        sides = (whole_number("size", given_sides[0], 1), whole_number("size", given_sides[1], 1))
    return make_decoder(
        dtype,
        channels,
        scale=None if dtype.kind in "iu" else scale,
        mean=mean,
        std=std,
        size=sides,
        axis=0 if layout == "NCHW" else -1,
        where="the argument dtype",
        sizeless="size= is not given",
    )


def classes_of(
    folder: Path,
    files: Sequence[Path],
    given: Sequence[str] | None,
    where: str = "class_names",
) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Returns the class number of each file, and the class names.

    Args:
        folder: The folder.
        files: The images in it.
        given: The names of the classes, if they are known.
        where: What messages call them.

    Raises:
        ArgumentError: If names that are given are equal.
        FeedError: If there are no images, one is not in a subfolder, a class is unknown, or a
            subfolder is empty and no names are given.
    """
    if not files:
        raise FeedError(f"data '{folder}' contains no images ({', '.join(EXTENSIONS)})")
    found = [file.relative_to(folder).parts[0] for file in files]
    for file in files:
        if file.parent == folder:
            raise FeedError(
                f"data '{folder}': '{file.name}' is not in the subfolder of a class; move the "
                "images of each class to a subfolder named after it"
            )
    subfolders = {
        entry.name
        for entry in folder.iterdir()
        if entry.is_dir() and not entry.name.startswith(".")
    }
    empty = sorted(subfolders - set(found))
    if empty and given is None:
        raise FeedError(
            f"data '{folder}': the subfolder '{empty[0]}' contains no images; remove it, or give "
            "class_names="
        )
    names = sorted(subfolders) if given is None else list(given)
    if len(set(names)) != len(names):
        raise ArgumentError(f"class_names must differ from each other, got {names!r:.80}")
    for name in found:
        if name not in names:
            raise FeedError(
                f"data '{folder}': the subfolder '{name}' is not in {where}; "
                + did_you_mean(name, names)
            )
    number_of = {name: place for place, name in enumerate(names)}
    return np.array([number_of[name] for name in found], np.int64), names
