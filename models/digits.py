"""The UCI handwritten digits: 1,797 grey images of 8×8 pixels, shipped with the project.

``models/data/README.md`` states source, licence and checksum.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

PATH = Path(__file__).parent / "data" / "digits.csv.gz"


class Samples(NamedTuple):
    """Images with their labels, row by row.

    Attributes:
        images: float32 of shape (N, 1, 8, 8), from 0 (paper) to 1 (ink).
        labels: int64 of shape (N,), the digits 0 to 9.
    """

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


class Digits(NamedTuple):
    """The data set in two disjoint parts.

    Attributes:
        train: 1,437 samples to train on.
        test: 360 samples to measure with.
    """

    train: Samples
    test: Samples


def load() -> Digits:
    """Read the digits and split them.

    The split needs no random numbers, so it is the same everywhere: with the samples ordered by
    label, and within a label as in the file, every fifth one from the first on is for testing.
    Each digit thus has its share in the test part to within one sample. Both parts keep the
    file's order, in which the digits are mixed. The file does not say who wrote which image;
    the 13 writers are in both parts.

    Returns:
        The training and the test part.

    Example:
        >>> digits = load()
        >>> digits.train.images.shape, digits.test.images.shape
        ((1437, 1, 8, 8), (360, 1, 8, 8))
    """
    rows = np.loadtxt(PATH, delimiter=",", dtype=np.uint8)
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    images = pixels.reshape(-1, 1, 8, 8).astype(np.float32) / 16
    for_testing = np.zeros(len(labels), dtype=bool)
    for_testing[np.argsort(labels, kind="stable")[::5]] = True
    return Digits(
        train=Samples(images[~for_testing], labels[~for_testing]),
        test=Samples(images[for_testing], labels[for_testing]),
    )
