"""Data files of the command line: broken ones, hostile ones, and those of careless people."""

from __future__ import annotations

import csv
import io
import os
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from ortops import FeedError, OrtopsError
from ortops.cli import main
from ortops.data import images as images_module
from ortops.data.files import read_data
from ortops.data.images import Images
from ortops.data.rows import select
from ortops.data.wanted import Wanted
from ortops.graph.files import opening
from ortops.graph.files.archive import read_arrays
from ortops.graph.files.opening import open_regular
from ortops.graph.limits import LIMITS

posix = pytest.mark.skipif(os.name == "nt", reason="pipes and links are POSIX's")
images = pytest.mark.optional("PIL", "images")
tables = pytest.mark.optional("pyarrow", "tables")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wanted(name: str, kind: Any = np.float32, *rest: int, label: bool = False) -> Wanted:
    return Wanted(name, np.dtype(kind), (None, *rest), label)


X = wanted("x", np.float32, 2)
LABELS = wanted("labels", np.int64, label=True)


def refused(path: str, *inputs: Wanted, **options: Any) -> str:
    """Returns what is said of a data file that is refused."""
    with pytest.raises(OrtopsError) as error:
        read_data(path, list(inputs) or [X], **options)
    assert path in str(error.value)
    return str(error.value)


def read_or_refused(path: str, read: Callable[[], Any]) -> Any:
    """Returns what is read of a file that was harmed, None if it is refused with its name."""
    try:
        return read()
    except FeedError as error:
        if path not in str(error):
            raise
        return None


# ------------------------------------------------------------------------------------------ npz


def member(array: Any, **header: Any) -> bytes:
    """Returns what numpy writes of an array, with other entries in its header."""
    stream = io.BytesIO()
    if not header:
        np.lib.format.write_array(stream, array)
        return stream.getvalue()
    entries = np.lib.format.header_data_from_array_1_0(array) | header
    np.lib.format.write_array_header_1_0(stream, entries)
    return stream.getvalue() + array.tobytes()


def write_zip(path: str, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> None:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def x_of_archive() -> Any:
    with open_regular("data.npz") as stream:
        return read_arrays(stream, "data 'data.npz'", ["x"])["x"]


ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


@pytest.mark.parametrize(
    "array",
    [
        ROWS,
        ROWS.astype(">f4"),
        np.asfortranarray(ROWS),
        np.asfortranarray(ROWS.astype(">f8")),
        ROWS.astype(np.int64),
        ROWS[::2],
        np.zeros((0, 2), np.float32),
        np.float32(3),
        ROWS > 2,
        ROWS.astype(np.complex64),
    ],
    ids=lambda array: f"{array.dtype.str}{list(array.shape)}",
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_numbers_are_read(array: Any, save: Callable[..., None]) -> None:
    save("data.npz", x=array, other=np.array(["not", "read"]))
    found = x_of_archive()
    assert found.dtype == array.dtype.newbyteorder("=")
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, array)


def test_truth_values_have_one_byte_each_way() -> None:
    write_zip("data.npz", {"x.npy": member(np.array([0, 1, 2, 255], np.uint8), descr="|b1")})
    found = x_of_archive()
    assert found.view(np.uint8).tolist() == [0, 1, 1, 1]


class Trap:
    """What leaves a trace where it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("trace"),)


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.array([Trap()], object), "must be numeric, got Python objects, which are not unpic"),
        (np.array(["a", "b"]), "must be numeric, got type <U1"),
        (np.array([b"a", b"b"]), "must be numeric, got type |S1"),
        (np.array(["2020-01-01"], "M8[D]"), "must be numeric, got type datetime64[D]"),
        (np.array([3], "m8[s]"), "must be numeric, got type timedelta64[s]"),
        (np.zeros(2, [("a", "f4"), ("b", "i8")]), "must be numeric, got type [('a', '<f4'), ('"),
        (np.zeros(2, [("ä€", "f4")]), "has the unsupported format version"),
        (np.zeros(2, ml_dtypes.bfloat16), "must be numeric, got type |V2"),
    ],
)
def test_arrays_of_anything_else_are_refused(array: Any, told: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of names that are not Latin
        np.savez("data.npz", x=array)
    assert f"data 'data.npz': array 'x' {told}" in refused("data.npz")
    assert not Path("trace").exists()


GOOD = member(ROWS)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is corrupt"),
        (b"nothing at all", "is corrupt (the magic string is not correct"),
        (GOOD[:20], "is corrupt"),
        (GOOD[:-3], "is corrupt (its shape [3, 2] needs 24 bytes, and it has 21)"),
        (GOOD + b"more", "is corrupt (its shape [3, 2] needs 24 bytes, and it has 28)"),
        (
            b"\x93NUMPY\x09\x00" + GOOD[8:],
            "has the unsupported format version (9, 0); write it again",
        ),
        (member(ROWS, shape=(-3, -2)), "is corrupt (its shape is [-3, -2])"),
        (
            member(ROWS, shape=(10**12, 10**9)),
            "is corrupt (its shape [1000000000000, 1000000000] n",
        ),
        (member(ROWS, shape=(2.5, 2)), "is corrupt (shape is not valid: (2.5, 2))"),
        (member(ROWS, descr="nonsense"), "is corrupt (descr is not a valid dtype descriptor"),
        (GOOD.replace(b"{", b"["), "is corrupt"),
        (GOOD[:10] + b"(" * (len(GOOD) - 34) + GOOD[-24:], "is corrupt"),
    ],
)
def test_broken_arrays_are_named(content: bytes, told: str) -> None:
    write_zip("data.npz", {"x.npy": content})
    assert f"data 'data.npz': array 'x' {told}" in refused("data.npz")


def flipped(place: Callable[[bytes], int], value: int | None = None) -> None:
    """Writes data.npz with a byte of it changed."""
    content = bytearray(Path("data.npz").read_bytes())
    at = place(bytes(content))
    content[at] = content[at] ^ 0xFF if value is None else value
    Path("data.npz").write_bytes(content)


def test_harm_to_the_archive_is_said() -> None:
    np.savez_compressed("data.npz", x=np.random.default_rng(0).random((100, 2)))
    whole = Path("data.npz").read_bytes()
    flipped(lambda content: len(content) // 2)
    assert "data 'data.npz': array 'x' is corrupt" in refused("data.npz")
    for length in (0, 10, len(whole) // 2, len(whole) - 5):
        Path("data.npz").write_bytes(whole[:length])
        assert "is not an .npz file" in refused("data.npz")
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        write_zip("data.npz", {"x.npy": GOOD}, method)
        assert f"uses the unsupported zip compression method {method}" in refused("data.npz")
    write_zip("data.npz", {"x.npy": GOOD})
    for mark, offset in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):  # both say that it is encrypted
        flipped(lambda content, m=mark, o=offset: content.index(m) + o, 1)
    assert "array 'x' is encrypted; write it without a password" in refused("data.npz")


def test_random_harm_to_an_archive_is_never_more_than_refused() -> None:
    np.savez_compressed("good.npz", x=ROWS, y=ROWS)
    whole = Path("good.npz").read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(400):
        content = bytearray(whole)
        for at in rng.integers(0, len(whole), rng.integers(1, 4)):
            content[at] = rng.integers(256)
        Path("data.npz").write_bytes(content)
        found = read_or_refused("data.npz", x_of_archive)
        if found is not None:  # what was harmed is not looked at
            assert found.size == ROWS.size


def test_an_array_that_is_there_twice_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's, of the name
        with zipfile.ZipFile("data.npz", "w") as archive:
            archive.writestr("x.npy", GOOD)
            archive.writestr("x.npy", member(ROWS + 1))
    assert "data 'data.npz' has two arrays named 'x'; write it again" in refused("data.npz")
    write_zip("data.npz", {"x.npy": GOOD, "x": member(ROWS + 1)})
    assert "has two arrays named 'x'" in refused("data.npz")


def test_only_the_arrays_that_are_wanted_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    original = np.lib.format.read_array
    monkeypatch.setattr(
        np.lib.format, "read_array", lambda *a, **o: read.append(1) or original(*a, **o)
    )
    zeros = np.zeros(10**6)
    np.savez_compressed("data.npz", x=ROWS, unused=zeros, labels=np.arange(3))
    monkeypatch.setattr(LIMITS, "data_bytes", 10_000)
    found = read_data("data.npz", [X, LABELS])
    assert len(read) == 2
    np.testing.assert_array_equal(found.arrays["x"], ROWS)
    told = refused("data.npz", wanted("unused"))
    assert "data 'data.npz' would take 0.008 GB of memory, more than the limit of 1e-05 GB" in told
    assert len(read) == 2


def test_sizes_that_are_lies_are_refused_before_memory_is_taken() -> None:
    """The directory of an archive and the header of an array say 32 GB, of which there are none."""
    size = 2**32 - 2
    header = member(np.zeros(0, np.uint8), shape=(size - 128,))
    write_zip("data.npz", {"x.npy": header}, zipfile.ZIP_STORED)
    content = bytearray(Path("data.npz").read_bytes())
    for mark, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        struct.pack_into("<I", content, content.index(mark) + offset, size)
    Path("data.npz").write_bytes(content)
    assert "array 'x' is corrupt (128 bytes cannot hold 4294967294)" in refused("data.npz")


# ------------------------------------------------------------------------------------------ csv


def write(content: str | bytes, path: str = "data.csv") -> str:
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a,b\n1,2\n".encode("utf-16"), "save it as UTF-8"),
        (
            "a,b\n1,2\n".encode("utf-16-le"),
            "has a NUL character, so the file is probably not UTF-8",
        ),
        (b"a,b\n1,\x002\n", "line 2 has a NUL character"),
        (b"a,b\n\xff,2\n", "save it as UTF-8"),
        (b"\x1f\x8b\x08\x00rest", "save it as UTF-8"),
        ("a,b\n1,2\n\n\n3\n", "line 5 has 1 columns, but the first line names 2"),
        ('a,b\n"1\n",2\n3\n', "line 4 has 1 columns, but the first line names 2"),
        ("a,b\n1,2,3\n", "line 2 has 3 columns, but the first line names 2"),
        ('a,b\n1,"2\n3,4\n', "unexpected end of data; give comma-separated values"),
        ("a,a\n1,2\n", "has two columns 'a'; rename one of them"),
        ("a," + "b" * 200 + "," + "b" * 200 + "\n", "has two columns 'bbbb"),
        ("a;b\n1;2\n", "names a single column, 'a;b'; if ';' separates columns"),
        ("a\tb\n1\t2\n", "if '\\t' separates columns, save it with commas"),
        ("\n\n", "is empty; its first line must name the columns"),
        ("a,b\n1," + "2" * 200_000 + "\n", "field larger than field limit"),
        ("a,b\n1,1_000\n", "row 1 of column 'b' must be a number for input 'x', got '1_000'"),
        ("a,b\n1,1e999\n", "row 1 of column 'b' must be a number for input 'x', got '1e999'"),
        ("a,b\n1,\n", "row 1 of column 'b' must be a number for input 'x', got ''"),
    ],
)
def test_tables_that_are_refused(content: str | bytes, told: str) -> None:
    message = refused(write(content))
    assert told in message
    assert len(message) < 400


def test_class_names_are_not_numbers_by_chance() -> None:
    found = read_data(write("a,b,labels\n1,2,1_2\n3,4,1_3\n"), [X, LABELS])
    assert found.classes == {"labels": ["1_2", "1_3"]}
    assert found.arrays["labels"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kind", "number"),
    [("uint8", "300"), ("uint8", "-1"), ("bool", "2"), ("int64", str(2**63)), ("int8", "128")],
)
def test_labels_that_do_not_fit(kind: str, number: str) -> None:
    label = wanted("labels", kind, label=True)
    told = refused(write(f"a,b,labels\n1,2,{number}\n"), X, label)
    assert (
        f"column 'labels' has a number out of range for {kind}, the type of input 'labels'" in told
    )


def test_classes_that_are_too_many_for_the_labels() -> None:
    lines = "".join(f"1,2,name {n}\n" for n in range(257))
    told = refused(write(f"a,b,labels\n{lines}"), X, wanted("labels", np.uint8, label=True))
    assert "has a number out of range for uint8" in told
    told = refused(
        write("a,b,labels\n1,2,a\n1,2,b\n1,2,c\n"), X, wanted("labels", bool, label=True)
    )
    assert "has a number out of range for bool" in told


def test_large_integers_keep_their_digits() -> None:
    label = wanted("labels", np.uint64, label=True)
    found = read_data(write(f"a,b,labels\n1,2,{2**64 - 1}\n1,2,{2**53 + 1}\n"), [X, label])
    assert found.arrays["labels"].tolist() == [2**64 - 1, 2**53 + 1]


def test_an_index_of_pandas_is_no_input() -> None:
    wide = wanted("x", np.float32)
    found = read_data(write(",a,b,labels\n0,1,2,0\n1,3,4,1\n"), [X, LABELS])
    np.testing.assert_array_equal(found.arrays["x"], [[1, 2], [3, 4]])
    assert found.said == [
        "input 'x' is formed from the columns a, b",
        "an unnamed column is ignored, as it looks like a row index",
    ]
    found = read_data(write(",x\n7,1\n"), [wide])
    assert found.arrays["x"].tolist() == [1]


def test_columns_that_an_input_does_not_take_are_refused() -> None:
    told = refused(write("a,weight,b,labels\n1,2,3,0\n"), X, LABELS)
    assert "input 'x' takes 2 columns, but 3 remain for it, a, weight, b; give --columns x=" in told


def test_usual_columns_are_taken_in_their_order() -> None:
    data = write("b,id,a,labels\n1,2,3,0\n")
    found = read_data(data, [X, LABELS], usual={"x": ["a", "b"], "labels": ["kind"]})
    np.testing.assert_array_equal(found.arrays["x"], [[3, 1]])
    assert found.columns == {"x": ["a", "b"]}
    found = read_data(data, [X, LABELS], columns={"x": ["id", "b"]}, usual={"x": ["a", "b"]})
    np.testing.assert_array_equal(found.arrays["x"], [[2, 1]])


def test_many_columns_are_not_all_shown() -> None:
    names = [f"pixel{number}" for number in range(784)]
    found = read_data(
        write(",".join(names) + "\n" + ",".join("0" * 784)), [wanted("x", np.float32, 784)]
    )
    (sentence,) = found.said
    assert sentence.startswith("input 'x' is formed from the columns pixel0, pixel1, ")
    assert sentence.endswith(", pixel19 and 764 more")


@posix
@pytest.mark.parametrize("path", ["data.csv", "data.npz", "data.parquet"])
def test_pipes_and_devices_are_no_data_files(path: str) -> None:
    os.mkfifo(path)
    assert f"data '{path}' is not a regular file; copy its content to a regular file" in refused(
        path
    )
    Path(path).unlink()
    Path(path).symlink_to("/dev/zero")
    assert f"data '{path}' is not a regular file" in refused(path)


def test_what_is_not_there_is_the_systems_error() -> None:
    for path in ("none.csv", "none.npz"):
        with pytest.raises(FileNotFoundError) as error:
            read_data(path, [X])
        assert error.value.filename == path
    with pytest.raises(IsADirectoryError):
        open_regular(".")


# -------------------------------------------------------------------------------------- parquet


@pytest.mark.optional("pyarrow", "tables")
@pytest.mark.parametrize("compression", ["uncompressed", "lz4"])
def test_arrow_files(compression: str) -> None:
    import pyarrow
    from pyarrow import feather

    made = pyarrow.table({"a": [1.5, 2.0, 3.0], "b": [4.0, 5.0, 6.0], "labels": list("aba")})
    feather.write_feather(made, "data.feather", compression=compression, chunksize=2)
    Path("data.arrow").write_bytes(Path("data.feather").read_bytes())
    for path in ("data.feather", "data.arrow"):
        found = read_data(path, [X, LABELS])
        assert found.arrays["x"].tolist() == [[1.5, 4], [2, 5], [3, 6]]
        assert found.arrays["labels"].tolist() == [0, 1, 0]
        assert found.classes == {"labels": ["a", "b"]}
    whole = Path("data.arrow").read_bytes()
    for content in (b"", b"ARROW1", whole[: len(whole) // 2]):
        Path("data.arrow").write_bytes(content)
        assert refused("data.arrow").startswith("data 'data.arrow': ")
    if os.name == "posix":
        os.mkfifo("pipe.arrow")
        assert "data 'pipe.arrow' is not a regular file" in refused("pipe.arrow")


def write_parquet(**columns: Any) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), "data.parquet")


@tables
def test_broken_parquet_files_are_named() -> None:
    write_parquet(a=np.arange(1000.0), b=np.arange(1000.0))
    whole = Path("data.parquet").read_bytes()
    for content in (b"", b"PAR1", whole[:-10], whole[: len(whole) // 2], b"x" * 100):
        Path("data.parquet").write_bytes(content)
        assert "; write it again, as Parquet" in refused("data.parquet")


@tables
def test_a_parquet_file_that_repeats_a_number_very_often(monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(a=np.zeros(10**6), b=np.zeros(10**6))
    assert Path("data.parquet").stat().st_size < 20_000
    monkeypatch.setattr(LIMITS, "data_bytes", 10**6)
    told = refused("data.parquet")
    assert "data 'data.parquet': column 'a' would take 0.008 GB of memory" in told


@tables
def test_lists_of_parquet_that_repeat_a_number_very_often(monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(x=[np.zeros(10**5)] * 10)
    monkeypatch.setattr(LIMITS, "data_bytes", 10**6)
    assert "column 'x' would take 0.008 GB of memory" in refused("data.parquet", X)
    monkeypatch.setattr(LIMITS, "data_bytes", 8 * 10**6)
    assert read_data("data.parquet", [X]).arrays["x"].shape == (10, 10**5)


@tables
def test_columns_of_parquet_that_are_refused() -> None:
    import datetime
    import decimal

    import pyarrow
    from pyarrow import parquet

    dates = [datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)]
    write_parquet(a=[1.0, 2.0], b=dates)
    assert "column 'b' must be numeric, got type datetime64[us]" in refused("data.parquet")
    write_parquet(a=[1.0, 2.0], b=[1.0, 2.0], labels=[decimal.Decimal("3.7"), decimal.Decimal(1)])
    told = refused("data.parquet", X, LABELS)
    assert (
        "row 1 of column 'labels' must be an integer or a class name for input 'labels', "
        "got Decimal('3.7')" in told
    )
    write_parquet(a=[1.0, 2.0], b=[1.0, None])
    assert "column 'b': 1 of its values are missing (null); fill or drop them" in refused(
        "data.parquet"
    )
    write_parquet(a=[1.0, 2.0], b=[{"c": 1}, {"c": 2}])
    assert "row 1 of column 'b' must be a number for input 'x', got {'c': 1}" in refused(
        "data.parquet"
    )
    table = pyarrow.Table.from_arrays([pyarrow.array([1.0])] * 2, names=["a", "a"])
    parquet.write_table(table, "data.parquet")
    assert "has two columns 'a'; rename one of them" in refused("data.parquet")


@tables
def test_parquet_columns_of_other_names_are_not_read_and_the_index_is_none() -> None:
    write_parquet(a=[1.0, 2.0], b=[3, 4], labels=[0, 1], __index_level_0__=[7, 8])
    found = read_data("data.parquet", [X, LABELS])
    np.testing.assert_array_equal(found.arrays["x"], [[1, 3], [2, 4]])
    assert found.arrays["x"].dtype == np.float32
    # A name of folders like this would be taken for one more column.
    Path("year=2020").mkdir()
    Path("data.parquet").rename("year=2020/data.parquet")
    found = read_data("year=2020/data.parquet", [X, LABELS])
    assert found.said[0] == "input 'x' is formed from the columns a, b"


# --------------------------------------------------------------------------------------- images

PIXELS = wanted("x", np.float32, 3, 4, 4)


def picture(path: str, kind: str | None = None, size: tuple[int, int] = (4, 4), **more: Any) -> Any:
    from PIL import Image

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, (10, 20, 30))
    image.save(path, kind, **more)
    return image


@images
@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"])
def test_what_is_promised_is_read_whatever_its_name_says(kind: str) -> None:
    picture("photos/a.png", kind)
    found = read_data("photos", [PIXELS]).arrays["x"]
    assert found.shape == (1, 3, 4, 4)
    np.testing.assert_allclose(found[0, :, 0, 0], [10, 20, 30], atol=3)


@images
@pytest.mark.parametrize("kind", ["EPS", "PPM", "TGA", "ICO", "PCX", "PDF"])
def test_other_formats_are_not_opened(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these, Encapsulated PostScript would be run by Ghostscript."""
    from PIL import EpsImagePlugin

    def run(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("Ghostscript is run")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    picture("photos/a.png", kind)
    told = refused("photos", PIXELS)
    assert "a.png': it is not an image of a known format (BMP, GIF, JPEG, PNG, TIFF, WEBP)" in told


@images
@posix
@pytest.mark.parametrize("kind", ["fifo", "device", "socket"])
def test_what_is_no_file_is_refused(kind: str) -> None:
    import socket

    picture("photos/a.png")
    file = Path("photos/b.png")
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "socket":
            listening.bind(str(file))
        else:
            file.symlink_to("/dev/zero")
        told = refused("photos", PIXELS)
    if kind == "device":
        assert "data 'photos/b.png' is a symbolic link to a file outside 'photos'" in told
    else:
        assert "photos/b.png' is not a regular file" in told


@images
@posix
def test_links_lead_to_files_of_the_folder_only() -> None:
    picture("elsewhere/secret.png")
    picture("photos/a/1.png")
    Path("photos/a/2.png").symlink_to("1.png")
    Path("photos/b").mkdir()
    Path("photos/b/3.png").symlink_to("../a/2.png")
    assert len(read_data("photos", [PIXELS]).arrays["x"]) == 3
    Path("linked").symlink_to("photos")  # which the user names
    assert len(read_data("linked", [PIXELS]).arrays["x"]) == 3
    for target in ("../../elsewhere/secret.png", str(Path("elsewhere/secret.png").resolve())):
        Path("photos/b/4.png").symlink_to(target)
        told = refused("photos", PIXELS)
        assert (
            "data 'photos/b/4.png' is a symbolic link to a file outside 'photos'; replace it"
            in told
        )
        Path("photos/b/4.png").unlink()
    Path("photos/b/4.png").symlink_to("4.png")
    assert "4.png" in refused("photos", PIXELS)
    Path("photos/b/4.png").unlink()
    Path("photos/c").symlink_to("../elsewhere")
    told = refused("photos", PIXELS)
    assert (
        "data 'photos/c' is a symbolic link to a folder, which is not followed; replace it" in told
    )


def png(width: int, height: int) -> bytes:
    """Returns the beginning of a PNG of some size."""
    import zlib

    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 1000) + b"IDAT" + bytes(1000)


@images
@pytest.mark.parametrize("size", [(10_000, 10_000), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_absurd_sizes_are_refused(size: tuple[int, int]) -> None:
    picture("photos/a.png")
    Path("photos/b.png").write_bytes(png(*size))
    told = refused("photos", PIXELS)
    assert "data 'photos/b.png': " in told
    assert (
        "exceeds the limit of 89478485 pixels" in told or "exceeds limit of 178956970 pix" in told
    )


@pytest.mark.quick(2)
@images
@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP"])
def test_broken_images_are_named(kind: str) -> None:
    picture("photos/b.png", kind, (40, 40))
    whole = Path("photos/b.png").read_bytes()
    for length in (0, 3, 12, len(whole) // 2):
        Path("photos/b.png").write_bytes(whole[:length])
        assert "data 'photos/b.png': " in refused("photos", PIXELS)
    rng = np.random.default_rng(0)
    for _ in range(60):
        content = bytearray(whole)
        for at in rng.integers(0, min(len(whole), 200), 3):
            content[at] = rng.integers(256)
        Path("photos/b.png").write_bytes(content)
        found = read_or_refused("photos/b.png", lambda: read_data("photos", [PIXELS]))
        if found is not None:
            assert found.arrays["x"].shape == (1, 3, 4, 4)


@images
@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\x00\x00nonsense",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\xff\xff",
        b"Exif\x00\x00II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x03\x00\xff\xff\xff\xff\xff\xff\xff",
        b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x05\x00\x00\x00\x01",
        b"Exif\x00\x00II*\x00\xff\xff\xff\xff",
        b"Exif\x00\x00II*\x00",
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_data_are_said_with_the_name_of_the_file(kind: str, exif: bytes) -> None:
    picture("photos/a.png")
    picture("photos/b.png", kind, exif=exif)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = read_or_refused("data 'photos/b.png': ", lambda: read_data("photos", [PIXELS]))
        if found is not None:
            assert len(found.arrays["x"]) == 2
            assert all("data 'photos/b.png': " in sentence for sentence in found.said)
    assert not told


@images
@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (
            "int8",
            {},
            "data 'photos/a.png' has the value 200, out of range for int8, the type of input 'x'",
        ),
        (
            "bool",
            {},
            "data 'photos/a.png' has the value 200.0, out of range for bool, the type of input",
        ),
        (
            "float16",
            {"pixels": {"std": [1e-6]}},
            "has the value 200000000.0, out of range for float16, the type",
        ),
    ],
)
def test_pixels_that_do_not_fit(kind: str, options: dict[str, Any], told: str) -> None:
    from PIL import Image

    Path("photos").mkdir()
    Image.new("RGB", (4, 4), (200, 200, 200)).save("photos/a.png")
    assert told in refused("photos", wanted("x", kind, 3, 4, 4), **options)


@images
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale": 0.0}, "scale must be a finite number other than 0, got 0.0"),
        ({"scale": float("nan")}, "scale must be a finite number other than 0, got nan"),
        ({"std": [1.0, 0.0, 1.0]}, "std must have finite numbers other than 0, got 0.0"),
        ({"mean": [float("inf")]}, "mean must have finite numbers, got inf"),
    ],
)
def test_settings_that_make_no_numbers(options: dict[str, Any], told: str) -> None:
    picture("photos/a.png")
    with pytest.raises(OrtopsError) as error:
        read_data("photos", [PIXELS], pixels=options)
    assert told in str(error.value)


@images
def test_many_images_are_read_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(10):
        picture(f"photos/{number}.png")
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).save(f"photos/{number}.png")
    expected = read_data("photos", [PIXELS]).arrays["x"]
    assert isinstance(expected, np.ndarray)
    assert expected.nbytes == 1920
    monkeypatch.setattr(LIMITS, "data_bytes", 1920)
    assert isinstance(read_data("photos", [PIXELS]).arrays["x"], np.ndarray)
    monkeypatch.setattr(LIMITS, "data_bytes", 1900)
    found = read_data("photos", [PIXELS])
    lazy = found.arrays["x"]
    assert isinstance(lazy, Images)
    (sentence,) = found.said
    assert "would take 1.92e-06 GB of memory; they are checked now and then read batch" in sentence
    opened = []
    plain = opening.open_regular
    monkeypatch.setattr(
        images_module,
        "open_regular",
        lambda path, **rest: opened.append(path) or plain(path, **rest),
    )
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    rows = np.array([7, 2, 5])
    held_out = select(lazy, rows)
    assert not opened
    np.testing.assert_array_equal(held_out[1:], expected[[2, 5]])
    assert sorted(Path(path).name for path in opened) == ["2.png", "5.png"]
    np.testing.assert_array_equal(lazy[rows], expected[rows])
    Path("photos/5.png").unlink()
    with pytest.raises(OSError, match=r"5\.png"):
        lazy[:]


@images
def test_an_unreadable_image_among_many_is_found_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        picture(f"photos/{number}.png")
    monkeypatch.setattr(LIMITS, "data_bytes", 1900)
    Path("photos/9.png").write_bytes(Path("photos/8.png").read_bytes()[:45])
    assert "9.png': " in refused("photos", PIXELS)


@images
def test_files_that_are_no_images_are_told() -> None:
    picture("photos/a.png")
    for name in ("b.heic", "notes.txt", "Thumbs.db", ".hidden"):
        Path("photos", name).touch()
    (sentence,) = read_data("photos", [PIXELS]).said
    start = (
        "2 files in 'photos', such as 'b.heic', are ignored, as they have no extension of an image"
    )
    assert sentence.startswith(start)


# ------------------------------------------------------------------------------------- CSV cells


def named_model() -> None:
    """Saves a model whose output and classes are called like formulas."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18]>
        formulas (float[batch, 3, 4, 4] images) => (float[batch, 2] scores, float[batch] mean)
        <int64[2] shape = {-1, 48}, int64[1] axis = {1}> {
            flat = Reshape (images, shape)
            sums = ReduceSum (flat, axis)
            negative = Neg (sums)
            scores = Concat <axis = 1> (sums, negative)
            mean = ReduceMean <keepdims = 0> (flat, axis)
        }""")
    model.graph.node[-1].output[0] = model.graph.output[1].name = "=mean"
    model.metadata_props.add(key="ortops.classes", value='{"labels": ["=1+1", "cat"]}')
    onnx.save(model, "model.onnx")


@images
@posix
@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r"])
def test_text_is_no_formula_in_a_table_of_predictions(first: str) -> None:
    named_model()
    name = f"{first}cmd|' C'!A0.png"
    picture(f"photos/{name}")
    picture("photos/-1.5/cat.png")
    words = ["--data", "photos", "--scale", "1", "--output", "found.csv"]
    assert main(["predict", "model.onnx", *words]) == 0
    with Path("found.csv").open(newline="", encoding="utf-8") as stream:
        header, *rows = csv.reader(stream)
    assert header == ["file", "scores_=1+1", "scores_cat", "'=mean"]
    total = 16 * (10 + 20 + 30)
    expected = {f"'{name}", "'-1.5/cat.png"}
    assert {row[0] for row in rows} == expected
    for row in rows:
        assert [float(cell) for cell in row[1:]] == [total, -total, total / 48]
        assert row[2].startswith("-")  # a number is left alone


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(
        onnx.parser.parse_model("""
            <ir_version: 10, opset_import: ["" : 18]>
            affine (float[batch, 2] x) => (float[batch, 2] y) { y = Neg (x) }"""),
        "model.onnx",
    )
    np.savez("data.npz", x=np.array([Trap()], object))
    command = ["predict", "model.onnx", "--data", "data.npz", "--output", "found.csv"]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        "ortops: data 'data.npz': array 'x' must be numeric, got Python objects, which are not "
        "unpickled\n"
    )
    assert not Path("trace").exists()
    assert not Path("found.csv").exists()
