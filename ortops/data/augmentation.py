"""Random changes of images during training.

Each change is a function of an image of shape [height, width, channels], whose pixels lie between 0
(black) and 1 (white), and of a generator of random numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import number
from ortops.errors import ArgumentError, did_you_mean

Array: TypeAlias = npt.NDArray[Any]

Change: TypeAlias = Callable[[Array, np.random.Generator], Array]
"""Returns a changed image of the same shape."""

_GREY = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in grey, of ITU-R BT.601."""


@dataclass(frozen=True)
class Flip:
    """Mirrors left and right.

    Args:
        probability: How often.

    Source:
        torchvision.transforms.RandomHorizontalFlip.

    Example:
        >>> Flip(1)(np.arange(3.0).reshape(1, 3, 1), np.random.default_rng(0)).ravel()
        array([2., 1., 0.])
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        number("probability", self.probability, minimum=0, maximum=1)

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        """Returns the image or its mirror image."""
        return image[:, ::-1] if rng.random() < self.probability else image


@dataclass(frozen=True)
class Crop:
    """Shifts an image by whole pixels; the margin that this uncovers shows the mirrored image.

    Args:
        margin: The largest shift, as a fraction of the height and of the width.

    Source:
        torchvision.transforms.RandomCrop with a padding and padding_mode="reflect".

    Example:
        >>> Crop(0.5)(np.arange(4.0).reshape(1, 4, 1), np.random.default_rng(0)).ravel()
        array([2., 3., 2., 1.])
    """

    margin: float = 0.125

    def __post_init__(self) -> None:
        number("margin", self.margin, above=0, below=1)

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        """Returns the shifted image."""
        height, width = image.shape[:2]
        up, left = (min(math.ceil(self.margin * size), size - 1) for size in (height, width))
        padded = np.pad(image, ((up, up), (left, left), (0, 0)), mode="reflect")
        y, x = int(rng.integers(2 * up + 1)), int(rng.integers(2 * left + 1))
        return padded[y : y + height, x : x + width]


@dataclass(frozen=True)
class Rotate:
    """Turns an image about its center, with bilinear interpolation; edges are extended.

    Args:
        degrees: The largest angle.

    Source:
        torchvision.transforms.RandomRotation.

    Example:
        >>> Rotate(30)(np.ones((4, 4, 3)), np.random.default_rng(0)).shape
        (4, 4, 3)
    """

    degrees: float = 15.0

    def __post_init__(self) -> None:
        number("degrees", self.degrees, above=0, maximum=180)

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        """Returns the turned image."""
        angle = math.radians(rng.uniform(-self.degrees, self.degrees))
        height, width = image.shape[:2]
        y, x = np.arange(height) - (height - 1) / 2, np.arange(width) - (width - 1) / 2
        cosine, sine = math.cos(angle), math.sin(angle)
        rows = np.clip(cosine * y[:, None] - sine * x + (height - 1) / 2, 0, height - 1)
        columns = np.clip(sine * y[:, None] + cosine * x + (width - 1) / 2, 0, width - 1)
        top, left = rows.astype(np.intp), columns.astype(np.intp)
        below, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
        down = (rows - top)[..., None].astype(image.dtype)
        aside = (columns - left)[..., None].astype(image.dtype)
        upper = image[top, left] * (1 - aside) + image[top, right] * aside
        lower = image[below, left] * (1 - aside) + image[below, right] * aside
        changed: Array = upper * (1 - down) + lower * down
        return changed


@dataclass(frozen=True)
class Color:
    """Changes brightness, contrast and saturation, in this order.

    Each is multiplied by a factor between 1 - strength and 1 + strength. Grey images have no
    saturation.

    Args:
        strength: The largest change.

    Source:
        torchvision.transforms.ColorJitter without hue, on tensors.

    Example:
        >>> Color()(np.full((1, 1, 1), 0.5), np.random.default_rng(0)).round(3)
        array([[[0.527]]])
    """

    strength: float = 0.2

    def __post_init__(self) -> None:
        number("strength", self.strength, above=0, maximum=1)

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        """Returns the changed image."""
        brightness, contrast, saturation = rng.uniform(1 - self.strength, 1 + self.strength, 3)
        image = np.clip(image * image.dtype.type(brightness), 0, 1)
        image = _blend(image, _grey(image).mean(), contrast)
        return _blend(image, _grey(image), saturation) if image.shape[-1] == 3 else image


def _grey(image: Array) -> Array:
    if image.shape[-1] != 3:
        return image
    grey: Array = (image @ np.array(_GREY, image.dtype))[..., None]
    return grey


def _blend(image: Array, other: Array, factor: float) -> Array:
    share = image.dtype.type(factor)
    mixed: Array = np.clip(image * share + other * (1 - share), 0, 1)
    return mixed


@dataclass(frozen=True)
class Erase:
    """Replaces a rectangle by noise (random erasing).

    Args:
        probability: How often.
        smallest: The smallest area, as a fraction of the image.
        largest: The largest area.

    Source:
        Zhong, Zheng, Kang, Li and Yang, 2017 (arXiv:1708.04896): uniform noise between black and
        white, and aspect ratios between 0.3 and 1/0.3.

    Example:
        >>> found = Erase(1)(np.zeros((9, 9, 1)), np.random.default_rng(0))
        >>> int((found > 0).sum())
        10
    """

    probability: float = 0.5
    smallest: float = 0.02
    largest: float = 0.33

    def __post_init__(self) -> None:
        number("probability", self.probability, minimum=0, maximum=1)
        number("smallest", self.smallest, above=0, maximum=1)
        number("largest", self.largest, minimum=self.smallest, maximum=1)

    def __call__(self, image: Array, rng: np.random.Generator) -> Array:
        """Returns the image, with a rectangle replaced or not."""
        if rng.random() >= self.probability:
            return image
        height, width, channels = image.shape
        for _ in range(10):
            area = rng.uniform(self.smallest, self.largest) * height * width
            aspect = math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
            tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < tall <= height and 0 < wide <= width:
                y, x = int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1))
                image = image.copy()
                image[y : y + tall, x : x + wide] = rng.random((tall, wide, channels))
                break
        return image


@dataclass(frozen=True)
class Mixing(ABC):
    """Base class of changes that mix each image with another one of its batch, and their labels.

    Labels must be probabilities of classes. In a batch of one row, nothing changes.

    Args:
        alpha: Shares are drawn from the distribution Beta(alpha, alpha).
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        number("alpha", self.alpha, above=0)

    @abstractmethod
    def __call__(self, image: Array, other: Array, rng: np.random.Generator) -> tuple[Array, float]:
        """Returns the mixed image, and the share of the first one in it."""


@dataclass(frozen=True)
class MixUp(Mixing):
    """Averages two images, with random weights.

    Args:
        alpha: See `Mixing`.

    Source:
        Zhang, Cisse, Dauphin and Lopez-Paz, 2017 (arXiv:1710.09412).

    Example:
        >>> one, other = np.ones((1, 1, 1)), np.zeros((1, 1, 1))
        >>> mixed, share = MixUp()(one, other, np.random.default_rng(0))
        >>> bool(mixed[0, 0, 0] == share)
        True
    """

    alpha: float = 0.2

    def __call__(self, image: Array, other: Array, rng: np.random.Generator) -> tuple[Array, float]:
        """Returns the mixed image, and the share of the first one in it."""
        share = float(rng.beta(self.alpha, self.alpha))
        weight = image.dtype.type(share)
        return image * weight + other * (1 - weight), share


@dataclass(frozen=True)
class CutMix(Mixing):
    """Replaces a rectangle by that of another image.

    Args:
        alpha: See `Mixing`.

    Source:
        Yun et al., 2019 (arXiv:1905.04899); shares are those of the areas.

    Example:
        >>> one, other = np.ones((8, 8, 1)), np.zeros((8, 8, 1))
        >>> mixed, share = CutMix()(one, other, np.random.default_rng(0))
        >>> bool(mixed.mean() == share)
        True
    """

    def __call__(self, image: Array, other: Array, rng: np.random.Generator) -> tuple[Array, float]:
        """Returns the mixed image, and the share of the first one in it."""
        height, width = image.shape[:2]
        side = math.sqrt(1 - float(rng.beta(self.alpha, self.alpha))) / 2
        y, x = int(rng.integers(height)), int(rng.integers(width))
        top, bottom = max(int(y - side * height), 0), min(int(y + side * height), height)
        left, right = max(int(x - side * width), 0), min(int(x + side * width), width)
        image = image.copy()
        image[top:bottom, left:right] = other[top:bottom, left:right]
        return image, 1 - (bottom - top) * (right - left) / (height * width)


_CHANGES: dict[str, type[Any]] = {
    "flip": Flip,
    "crop": Crop,
    "rotate": Rotate,
    "color": Color,
    "colour": Color,
    "erase": Erase,
    "mixup": MixUp,
    "cutmix": CutMix,
}


def changes_of(names: str | Change | Mixing | Sequence[str | Change | Mixing]) -> list[Any]:
    """Returns changes by name.

    Args:
        names: One or several names, functions, or instances of the classes of this module.

    Raises:
        ArgumentError: If it is something else, or a name is unknown.

    Example:
        >>> changes_of(["flip", Rotate(30)])
        [Flip(probability=0.5), Rotate(degrees=30)]
    """
    found: list[Any] = []
    for name in [names] if isinstance(names, str) or callable(names) else names:
        if isinstance(name, str):
            if name not in _CHANGES:
                raise ArgumentError(
                    f"augment: there is no {name!r:.80}; {did_you_mean(name, _CHANGES)}"
                )
            found.append(_CHANGES[name]())
        elif callable(name) and not isinstance(name, type):
            found.append(name)
        else:
            raise ArgumentError(
                f"augment must have names ({', '.join(_CHANGES)}), functions, or instances such as "
                f"Rotate(30), got {name!r:.80}"
            )
    return found


class Augmentation:
    """Changes of the images of a batch, each of which depends on a seed, the epoch and its row.

    Args:
        changes: The changes, in order. Those that mix images come last; if there are several, one
            is drawn for each image.
        seed: The seed.
        axis: The axis of the channels of an image; None if it has none.
        black: What black is, for each channel or all of them.
        white: What white is.
    """

    def __init__(
        self, changes: Sequence[Any], seed: int, axis: int | None, black: Array, white: Array
    ) -> None:
        self._changes = [each for each in changes if not isinstance(each, Mixing)]
        self.mixing = [each for each in changes if isinstance(each, Mixing)]
        self._seed, self._axis = seed, axis
        self._black, self._range = black, white - black

    def __call__(
        self, image: Array, other: Array | None, epoch: int, row: int, other_row: int
    ) -> tuple[Array, float]:
        """Returns a changed image, and its share in the mixture with another image.

        Args:
            image: The image.
            other: The image to mix it with, unchanged; None for none.
            epoch: The epoch.
            row: The number of the row of the image.
            other_row: The number of the row of the other image.
        """
        changed = self._changed(image, epoch, row)
        share = 1.0
        if self.mixing and other is not None:
            rng = np.random.default_rng((self._seed, epoch, row, 1))
            chosen = self.mixing[int(rng.integers(len(self.mixing)))]
            changed, share = chosen(changed, self._changed(other, epoch, other_row), rng)
        return self._back(changed, image.dtype), share

    def _changed(self, image: Array, epoch: int, row: int) -> Array:
        rng = np.random.default_rng((self._seed, epoch, row))
        pixels = image.astype(np.float64 if image.dtype == np.float64 else np.float32)
        pixels = pixels[..., None] if self._axis is None else np.moveaxis(pixels, self._axis, -1)
        pixels = ((pixels - self._black) / self._range).astype(pixels.dtype)
        for change in self._changes:
            shape = pixels.shape
            pixels = np.asarray(change(pixels, rng), pixels.dtype)
            if pixels.shape != shape:
                raise ArgumentError(
                    f"augment: {change!r:.80} must return an image of shape {list(shape)}, got "
                    f"{list(pixels.shape)}"
                )
        return pixels

    def _back(self, pixels: Array, dtype: np.dtype[Any]) -> Array:
        image = pixels * self._range + self._black
        if dtype.kind in "iu":
            image = np.clip(np.rint(image), 0, 255)
        image = image[..., 0] if self._axis is None else np.moveaxis(image, -1, self._axis)
        result: Array = image.astype(dtype)
        return result
