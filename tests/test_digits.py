"""The shipped handwritten digits and their split."""

import gzip
import hashlib
import re

import numpy as np
import pytest

from models import digits

# The figures that scikit-learn's and UCI's descriptions of the file give.
IMAGES_PER_DIGIT = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@pytest.fixture(scope="module")
def data() -> digits.Digits:
    return digits.load()


def rows(samples: digits.Samples) -> set[bytes]:
    return {
        image.tobytes() + label.tobytes()
        for image, label in zip(samples.images, samples.labels, strict=True)
    }


def test_file_has_the_documented_checksums():
    readme = (digits.PATH.parent / "README.md").read_text(encoding="utf-8")
    stated = re.findall(r"\b[0-9a-f]{64}\b", readme)
    packed = digits.PATH.read_bytes()
    assert stated == [
        hashlib.sha256(packed).hexdigest(),
        hashlib.sha256(gzip.decompress(packed)).hexdigest(),
    ]


def test_shapes_and_dtypes(data):
    for samples, count in ((data.train, 1437), (data.test, 360)):
        assert samples.images.shape == (count, 1, 8, 8)
        assert samples.images.dtype == np.float32
        assert samples.labels.shape == (count,)
        assert samples.labels.dtype == np.int64


def test_first_image_is_the_zero_at_the_head_of_the_file(data):
    # The first line of the file, read by eye: an upright 0 with a hole in the middle.
    expected = [
        [0, 0, 5, 13, 9, 1, 0, 0],
        [0, 0, 13, 15, 10, 15, 5, 0],
        [0, 3, 15, 2, 0, 11, 8, 0],
        [0, 4, 12, 0, 0, 8, 8, 0],
        [0, 5, 8, 0, 0, 9, 8, 0],
        [0, 4, 11, 0, 1, 12, 7, 0],
        [0, 2, 14, 5, 10, 12, 0, 0],
        [0, 0, 6, 13, 10, 0, 0, 0],
    ]
    assert data.test.labels[0] == 0
    np.testing.assert_array_equal(data.test.images[0, 0] * 16, expected)


def test_pixels_use_the_whole_range_from_0_to_1(data):
    for samples in data:
        assert samples.images.min() == 0
        assert samples.images.max() == 1


def test_every_digit_has_its_images(data):
    labels = np.concatenate([data.train.labels, data.test.labels])
    assert np.bincount(labels).tolist() == IMAGES_PER_DIGIT


def test_every_digit_has_a_fifth_of_its_images_in_the_test_part(data):
    counts = np.bincount(data.test.labels)
    assert np.all(np.abs(counts - np.array(IMAGES_PER_DIGIT) / 5) < 1)


def test_the_parts_do_not_overlap_and_lose_nothing(data):
    train, test = rows(data.train), rows(data.test)
    assert not train & test
    # No image is in the file twice, so the number of different ones is the number of all.
    assert len(train | test) == 1797


def test_loading_twice_gives_the_same_split(data):
    again = digits.load()
    for first, second in zip(data, again, strict=True):
        np.testing.assert_array_equal(first.images, second.images)
        np.testing.assert_array_equal(first.labels, second.labels)
