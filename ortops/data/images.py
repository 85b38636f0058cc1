"""Images in files, decoded by Pillow when their rows are taken."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.numbers import cast_numbers, real
from ortops._common.optional import optional_module
from ortops.engine.training.foreign_arrays import RowIndex
from ortops.errors import ArgumentError, FeedError
from ortops.graph.files.opening import leads_out, open_regular
from ortops.graph.limits import LIMITS

Array: TypeAlias = npt.NDArray[Any]

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
"""The extensions of image files."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""The image formats that are read, whatever the extension of the file."""

_HELD_BYTES = 2**29
"""The size in bytes up to which the images of a folder are held in memory."""

_OF_SYSTEMS = ("Thumbs.db", "desktop.ini")
"""Files that operating systems put into folders."""

_MOST_THREADS = 8

_AT_ONCE = 64
"""The number of images that are checked at once."""

_warnings_lock = threading.Lock()


def in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Returns the results of a function for items, which threads compute; in order.

    Args:
        function: The function. The error of the first item that has one is raised.
        items: The items.
    """
    count = min(_MOST_THREADS, os.cpu_count() or 1, len(items))
    if count < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items))


class Images:
    """The images of a data set, which are read when rows are taken.

    It is a lazy array (see `ortops.engine.training.foreign_arrays.is_lazy`): a training reads it
    batch by batch.

    Args:
        files: The files, in the order of the rows.
        read: Returns the image in a file as an array. Several threads call it.
        shape: The shape of each image.
        dtype: The element type.

    Attributes:
        shape: The number of images, and the shape of each.
        dtype: The element type.
    """

    def __init__(
        self,
        files: Iterable[Path],
        read: Callable[[Path], Array],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._files = np.array(list(files), object)
        self._read = read
        self.shape = (len(self._files), *shape)
        self.dtype = dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: RowIndex | tuple[Any, ...]) -> Array:
        files = self._files[rows]
        result = np.empty((len(files), *self.shape[1:]), self.dtype)

        def fill(number: int) -> None:
            result[number] = self._read(files[number])

        in_threads(fill, range(len(files)))
        return result

    def select(self, rows: RowIndex) -> Images:
        """Returns some of the images, without reading them."""
        return Images(self._files[rows], self._read, self.shape[1:], self.dtype)


@dataclass(frozen=True)
class Decoder:
    """Converts image files to arrays.

    The image is turned into its EXIF orientation, converted to the mode of its channels
    (transparency is ignored), resized bilinearly, divided by the scale, and normalized.

    Attributes:
        channels: ``"RGB"``, ``"BGR"`` or ``"L"`` (grey).
        size: The height and width; None to keep the size of the files.
        axis: The axis of the channels in the array of an image: 0 or -1; None if it has none.
        dtype: The element type. Integers are unscaled pixels.
        scale: The divisor of pixels.
        mean: The value then subtracted from each channel.
        deviation: The value that each channel is then divided by.
        where: What has this element type, as messages call it.
        sizeless: Why images are not resized to one size, in messages.
    """

    channels: str
    size: tuple[int, int] | None
    axis: int | None
    dtype: np.dtype[Any]
    scale: float = 1.0
    mean: Sequence[float] | None = None
    deviation: Sequence[float] | None = None
    where: str = "the element type"
    sizeless: str = "size is not given"

    def __call__(self, path: Path) -> Array:
        """Returns an image as an array.

        Raises:
            FeedError: If it is not an image that can be read, or has a value out of range.
            OSError: If the file cannot be opened.
        """
        from PIL import Image

        image = _opened(path, "L" if self.channels == "L" else "RGB")
        if self.size is not None and image.size != self.size[::-1]:
            image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
        exact = np.asarray(image)
        if self.channels == "BGR":
            exact = exact[..., ::-1]
        if self.dtype.kind not in "iu":
            exact = exact.astype(np.float64) / self.scale
            exact = (exact - np.array(self.mean or 0.0)) / np.array(self.deviation or 1.0)
        numbers, lost = cast_numbers(exact, self.dtype)
        if lost is not None:
            raise FeedError(
                f"data '{path}' has the value {lost}, out of range for {self.dtype}, {self.where}"
            )
        if numbers.ndim == 2 and self.axis is not None:
            numbers = numbers[..., None]
        if self.axis == 0:
            numbers = np.moveaxis(numbers, -1, 0)
        return numbers

    def range_of_pixels(self) -> tuple[Array, Array]:
        """Returns what black and white are in the array, for each channel or all of them."""
        if self.dtype.kind in "iu":
            return np.zeros(1), np.full(1, 255.0)
        mean, deviation = np.array(self.mean or [0.0]), np.array(self.deviation or [1.0])
        black, white = (0.0 - mean) / deviation, (255.0 / self.scale - mean) / deviation
        return black, white


def make_decoder(
    dtype: np.dtype[Any],
    channels: str,
    *,
    scale: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **more: Any,
) -> Decoder:
    """Returns a decoder, after checks of what is done to pixels.

    Args:
        dtype: See `Decoder`.
        channels: See `Decoder`.
        scale: See `Decoder`; None for 1.
        mean: See `Decoder`.
        std: The value that each channel is divided by.
        **more: The other attributes of the decoder.

    Raises:
        ArgumentError: If a value does not fit the others.
    """
    count = 1 if channels == "L" else 3
    for name, given in (("mean", mean), ("std", std)):
        if given is None:
            continue
        if not isinstance(given, Sequence | np.ndarray) or len(given) not in (1, count):
            counts = " or ".join(map(str, sorted({1, count})))
            raise ArgumentError(
                f"{name} must have {counts} numbers, as images have {count} channels, got "
                f"{given!r:.80}"
            )
        for each in given:
            if not math.isfinite(each) or (name == "std" and each == 0):
                but = " other than 0" if name == "std" else ""
                raise ArgumentError(f"{name} must have finite numbers{but}, got {each}")
    if scale is not None and (not math.isfinite(real(scale)) or scale == 0):
        raise ArgumentError(f"scale must be a finite number other than 0, got {scale!r:.80}")
    if dtype.kind in "iu" and any(given is not None for given in (scale, mean, std)):
        raise ArgumentError(f"scale, mean, std: {dtype} has unscaled pixels; leave them out")
    return Decoder(
        channels=channels,
        dtype=dtype,
        scale=1.0 if scale is None else float(scale),
        mean=None if mean is None else [float(each) for each in mean],
        deviation=None if std is None else [float(each) for each in std],
        **more,
    )


def _opened(path: Path, mode: str) -> Any:
    """Returns an image in its EXIF orientation; adds the file name to errors of Pillow."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    _reading.path = path
    # A link within the folder leads to a file there (see `image_files`).
    with open_regular(os.path.realpath(path), link=False) as stream:
        try:
            # Pillow detects the format by content, and some formats run other programs.
            with Image.open(stream, formats=_FORMATS) as opened:
                limit = Image.MAX_IMAGE_PIXELS
                if limit is not None and opened.width * opened.height > limit:
                    raise ValueError(
                        f"its size of {opened.width} × {opened.height} exceeds the limit of "
                        f"{limit} pixels (PIL.Image.MAX_IMAGE_PIXELS)"
                    )
                if opened.mode.startswith(("I", "F")):  # Pillow clips these at 255
                    raise ValueError(f"its pixels have more than 8 bits (mode {opened.mode})")
                opened.load()
                return ImageOps.exif_transpose(opened).convert(mode)
        except MemoryError:
            raise
        except Exception as error:  # a corrupt file may raise anything
            why = str(error).strip().split("\n")[0][:200] or type(error).__name__
            if isinstance(error, UnidentifiedImageError):
                why = f"it is not an image of a known format ({', '.join(_FORMATS)})"
            raise FeedError(f"data '{path}': {why}; repair or remove it") from error


class _Reading(threading.local):
    """The file that a thread reads."""

    path: Path | None = None


_reading = _Reading()


@contextlib.contextmanager
def _collected(said: list[str]) -> Iterator[None]:
    """Collects Pillow's warnings about images that it could read, with their names."""

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning) and _reading.path is not None:
            said.append(f"data '{_reading.path}': {message}")

    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def read_images(folder: Path, files: Sequence[Path], decode: Decoder) -> tuple[Any, list[str]]:
    """Reads the images of a folder, so that a file that cannot be read is an error now.

    Args:
        folder: What messages call the folder.
        files: The files, at least one.
        decode: Converts them.

    Returns:
        One array; `Images` if that would be large. And what was noticed, in sentences.

    Raises:
        FeedError: If an image cannot be read, or the images differ in shape.
        OrtopsError: If Pillow is not installed.
    """
    said: list[str] = []
    warned: list[str] = []
    with _collected(warned):
        images = lazy_images(folder, files, decode)
        size = int(np.prod(images.shape, dtype=np.float64)) * images.dtype.itemsize
        held = size <= min(_HELD_BYTES, LIMITS.data_bytes)
        if not held:
            said.append(
                f"the images of '{folder}' would take {size / 1e9:.3g} GB of memory; they are "
                "checked now and then read batch by batch"
            )
        result: Any = np.empty(images.shape, images.dtype) if held else images
        for start in range(0, len(files), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            read = images[part]
            if held:
                result[part] = read
    warned = sorted(set(warned), key=warned.index)
    if warned:
        more = len(warned) - 1
        said.append(warned[0] + (f"; Pillow warned about {more} more images" if more else ""))
    return result, said


def lazy_images(folder: Path, files: Sequence[Path], decode: Decoder) -> Images:
    """Returns the images of a folder, of which only the first is read now.

    Args:
        folder: See `read_images`.
        files: See `read_images`.
        decode: See `read_images`.
    """
    optional_module(f"data '{folder}'", "PIL.Image", "images", package="Pillow")
    first = decode(files[0])

    def read(file: Path) -> Array:
        array = decode(file)
        if array.shape != first.shape:
            raise FeedError(
                f"data '{folder}': the images differ in size, and {decode.sizeless}; resize them "
                "to one size"
            )
        return array

    return Images(files, read, first.shape, first.dtype)


def image_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns the images in a folder and its subfolders, and the other files; no hidden ones.

    Args:
        folder: The folder.

    Raises:
        FeedError: If a link leads to a folder or out of the folder.
        OSError: If a folder cannot be read.
    """
    found: list[Path] = []
    others: list[Path] = []
    left = [folder]
    while left:
        within = left.pop()
        for entry in within.iterdir():
            if entry.name.startswith("."):
                continue
            is_link = entry.is_symlink()
            if entry.is_dir():
                if is_link:
                    raise FeedError(
                        f"data '{entry}' is a symbolic link to a folder, which is not followed; "
                        "replace it with the folder itself"
                    )
                left.append(entry)
            elif entry.suffix.lower() in EXTENSIONS:
                if is_link and leads_out(folder, entry):
                    raise FeedError(
                        f"data '{entry}' is a symbolic link to a file outside '{folder}'; replace "
                        "it with the file itself"
                    )
                found.append(entry)
            elif entry.name not in _OF_SYSTEMS:
                others.append(entry)
    return sorted(found), sorted(others)
