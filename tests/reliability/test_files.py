"""Files under attack: several processes, kills and interrupts, full disks, what is no file.

The reader is onnx's own. `ORTOPS_SOAK`, a factor, lets processes meet more often.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from attacks import SOAK
from kills import contents, killed_at, snapshots
from onnx import helper, numpy_helper

import ortops
from ortops import cli
from ortops.graph import convert
from ortops.graph.files import atomic, external, loading, saving
from ortops.graph.files.external import detach
from ortops.graph.files.loading import blame_model, load

fcntl = pytest.importorskip("fcntl", reason="no locks, modes and pipes of Unix here")
resource = pytest.importorskip("resource", reason="no limits of Unix here")

ROOT = Path(__file__).parents[2]
LIMIT = 20_000  # bytes; a marked model has 33,312
OURS = re.compile(r"model\.onnx\.[0-9a-f]{16}\.data")


def marked(value: float) -> onnx.ModelProto:
    """A model of three tensors, in which every number is the same."""
    arrays = {name: np.full((64, 65), value, np.float32) for name in ("a", "b")}
    arrays["c"] = np.full((8,), value, np.float32)
    nodes = [helper.make_node("Sum", ["a", "b"], ["y"])]
    given = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    shown = [helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph(nodes, "marked", [], shown, given)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def mark_of(path: Path) -> float:
    """Returns the number of a marked model, after it has seen that all are the same.

    Two saves may remove data between the reading of a model and of its data: then there is a new
    model to be read.
    """
    while True:
        content = path.read_bytes()
        model = onnx.load_from_string(content)
        try:
            onnx.load_external_data_for_model(model, str(path.parent))
        except Exception:
            if path.read_bytes() == content:
                raise
            continue
        (value,) = {x for t in model.graph.initializer for x in set(numpy_helper.to_array(t).flat)}
        return float(value)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(params=["one file", "with data"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes go into one message: marked models fit, or do not."""
    value = 10**9 if request.param == "one file" else LIMIT
    monkeypatch.setattr(external, "MESSAGE_LIMIT", value)
    return value


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "MESSAGE_LIMIT", LIMIT)


def started(function: Callable[..., None], *arguments: object) -> "subprocess.Popen[str]":
    """Starts a process that calls a function of this file with numbers and strings."""
    folders = [str(ROOT), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {folders}; import {__name__}\n"
    given = [str(x) if isinstance(x, Path) else x for x in arguments]
    code += f"{__name__}.{function.__name__}(*{given})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


# ------------------------------------------------------------------------- several processes


def save_many(limit: int, path: str, first: int, count: int, read: str) -> None:
    """Saves models, the second half of them once a reader has seen one, as it says with a file."""
    external.MESSAGE_LIMIT = limit
    for number in range(first, first + count):
        while number == first + count // 2 and not Path(read).exists():
            time.sleep(0.01)
        ortops.save_model(marked(number), path)


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_two_savers_and_a_reader(limit: int, tmp_path: Path) -> None:
    path, count = tmp_path / "model.onnx", 40 * SOAK
    has_read = tmp_path.with_name(f"{tmp_path.name}-read")
    ortops.save_model(marked(0), path)
    seen = {mark_of(path)}

    def read() -> float:
        light = convert.load_light(path)
        (value,) = {x for t in light.proto.graph.initializer for x in set(light.array_of(t).flat)}
        return float(value)

    with (
        started(save_many, limit, path, 1, count, has_read) as one,
        started(save_many, limit, path, 10_001, count, has_read) as other,
    ):
        while one.poll() is None or other.poll() is None:
            seen |= {mark_of(path), read()}
            if len(seen) > 1:
                has_read.touch()
    assert (one.returncode, other.returncode) == (0, 0)
    assert seen <= {0, *range(1, 1 + count), *range(10_001, 10_001 + count)}
    assert len(seen) > 2  # the reader was there while they wrote
    assert mark_of(path) in {count, 10_000 + count}
    for value in (1, 2):
        ortops.save_model(marked(value), path)
    data = {name for name in names_in(tmp_path) if OURS.fullmatch(name)}
    assert names_in(tmp_path) == {path.name, *data}
    assert len(data) == (2 if limit == LIMIT else 0)


@pytest.mark.usefixtures("small_limit")
def test_a_model_that_was_read_has_its_data_after_a_save(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ortops.save_model(marked(1), path)
    model = onnx.load(path, load_external_data=False)
    ortops.save_model(marked(2), path)
    onnx.load_external_data_for_model(model, str(tmp_path))
    assert {numpy_helper.to_array(tensor).max() for tensor in model.graph.initializer} == {1}


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("reader", [convert.load_light, blame_model(lambda m: detach(*load(m)))])
def test_a_reader_between_two_saves_gets_the_next_model(
    reader: Callable[[Path], external.LightModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the model whose data the second save removes."""
    path, saves = tmp_path / "model.onnx", iter([1, 2])

    def save_twice(*_: object) -> None:  # when the model has been read
        for number in saves:
            ortops.save_model(marked(number), path)

    ortops.save_model(marked(0), path)
    for module in (convert, loading):
        monkeypatch.setattr(module, "validate", save_twice)
    light = reader(path)
    assert {light.array_of(tensor).max() for tensor in light.proto.graph.initializer} == {2}
    for file in tmp_path.glob("*.data"):
        file.unlink()
    with pytest.raises(ortops.ModelError, match=r"No such file .*; keep all files of the model"):
        reader(path)


@pytest.mark.usefixtures("small_limit")
def test_data_that_another_process_is_writing_stay(tmp_path: Path) -> None:
    path, data = tmp_path / "model.onnx", tmp_path / f"model.onnx.{secrets.token_hex(8)}.data"
    with data.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        for value in range(3):
            ortops.save_model(marked(value), path)
        assert data.exists()
    ortops.save_model(marked(3), path)
    assert not data.exists()


# ---------------------------------------------------------------------- interrupts and kills


def interrupted_at(number: int, function: Callable[[], object]) -> bool:
    """Calls a function with an interrupt before a line of what writes files.

    Returns:
        Whether there are so many lines.
    """
    lines, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in (external.__file__, saving.__file__, atomic.__file__):
            return None
        lines += event == "line"
        if event == "line" and lines == number:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


# One between the end of a block and that of its `with` leaves Python to close the file, loudly.
@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*unclosed file|Exception ignored in.*FileIO")
def test_an_interrupt_at_any_line_is_an_interrupt(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    monkeypatch.setattr(os, "fsync", lambda _: None)  # for speed; nothing here looks at the disk
    ortops.save_model(marked(0), path)
    old, number, replaced = 0.0, 1, 0
    while True:
        light = external.detach(marked(number))

        def save(light: Any = light) -> None:
            saving.write_model(path, light)

        if not interrupted_at(number, save):
            break
        mark = mark_of(path)
        assert mark in (old, number)
        replaced += mark != old
        data = {name for name in names_in(tmp_path) if OURS.fullmatch(name)}
        assert names_in(tmp_path) == {path.name, *data}, number
        assert len(data) <= 3  # the present ones, those before, and those that were to go
        ortops.save_model(marked(mark), path)
        old, number = mark, number + 1
    assert number > 30
    assert replaced  # some came after the file had been replaced
    ortops.save_model(marked(0), path)
    assert len(names_in(tmp_path)) == (3 if limit == LIMIT else 1)


def interrupt_many(limit: int, path: str, count: int) -> None:
    """Prints what came out of interrupted saves."""
    external.MESSAGE_LIMIT = limit
    random = np.random.default_rng(0)
    ortops.save_model(marked(0), path)
    start = time.monotonic()
    ortops.save_model(marked(0), path)
    duration = time.monotonic() - start
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # a Ctrl-C that comes by itself
    outcomes = []
    for number in range(count):
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 1.2 * duration))
        try:
            ortops.save_model(marked(number), path)
            while True:
                time.sleep(1)
        except BaseException as error:
            outcomes.append(type(error).__name__)
        mark_of(Path(path))
    sys.stdout.write(json.dumps(outcomes))


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_interrupts_at_any_time_are_interrupts(limit: int, tmp_path: Path) -> None:
    with started(interrupt_many, limit, tmp_path / "model.onnx", 60 * SOAK) as process:
        outcomes = json.loads(process.communicate()[0])
    assert outcomes == ["KeyboardInterrupt"] * (60 * SOAK)


def kill_at_each_call(limit: int, path: str) -> None:
    """Kills a saving process before its first call of the system, then at the second, and so on.

    It prints the number in the file after each, and the names that are there.
    """
    external.MESSAGE_LIMIT = limit
    ortops.save_model(marked(0), path)
    ortops.save_model(marked(0), path)
    outcomes: list[tuple[float, list[str]]] = []
    died = True
    while died:
        number = len(outcomes) + 1
        time.sleep(0.02)  # some system clocks stand still for as long
        model = marked(number)
        died = killed_at(number, lambda m=model: ortops.save_model(m, path), Path(path).parent)
        outcomes.append((mark_of(Path(path)), sorted(names_in(Path(path).parent))))
    sys.stdout.write(json.dumps(outcomes))


@pytest.mark.nightly(1)
@pytest.mark.slow
def test_what_killed_processes_leave_is_removed(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with started(kill_at_each_call, limit, path) as process:
        outcomes = json.loads(process.communicate()[0])
    assert len(outcomes) > 5
    old = 0
    for number, (mark, _) in enumerate(outcomes, 1):
        assert mark in (old, number)
        old = mark
    litter = [
        len(names) - 1 - 2 * (limit == LIMIT) for mark, names in outcomes if mark == outcomes[0][0]
    ]
    assert 1 <= max(litter) <= 2  # it is there, and does not add up
    assert len(outcomes[-1][1]) == (3 if limit == LIMIT else 1)  # after one that was not killed
    for value in (1, 2):
        ortops.save_model(marked(value), path)
    assert len(names_in(tmp_path)) == (3 if limit == LIMIT else 1)


def compare_with_kills(limit: int, given: str) -> None:
    """Prints what killed processes leave, and what the copies are that stand for it elsewhere."""
    external.MESSAGE_LIMIT = limit
    folder, copies, found = Path(given) / "here", Path(given) / "copies", []
    folder.mkdir()

    def save() -> None:
        ortops.save_model(marked(1), folder / "model.onnx")

    for operation, left in snapshots(save, folder, copies):
        shutil.rmtree(folder)
        folder.mkdir()
        died = killed_at(len(found) + 1, save, folder)
        found.append((operation, died, contents(folder) == contents(left)))
    sys.stdout.write(json.dumps(found))


@pytest.mark.slow
def test_copies_are_what_killed_processes_leave(limit: int, tmp_path: Path) -> None:
    with started(compare_with_kills, limit, tmp_path) as process:
        found = json.loads(process.communicate()[0])
    assert len(found) > 7
    assert [each for each in found if each[1:] != [each is not found[-1], True]] == []


def test_only_litter_of_this_path_that_nobody_holds_is_removed(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    tokens = [secrets.token_hex(8) for _ in range(2)]
    held, free = (tmp_path / f".model.onnx.{token}.tmp" for token in tokens)
    others = {".model.onnx.mine.tmp", f".model.onnx.x.{tokens[0]}.tmp", f".x.{tokens[0]}.tmp"}
    others |= {f"model.onnx.{tokens[0]}.tmp", f".model.onnx.{tokens[0]}.tmp.bak"}
    for name in others:
        (tmp_path / name).write_bytes(b"")
    free.write_bytes(b"")
    (tmp_path / f".model.onnx.{'0' * 16}.tmp").mkdir()
    os.mkfifo(tmp_path / f".model.onnx.{'1' * 16}.tmp")
    with held.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        ortops.save_model(marked(0), path)
        assert held.exists()
        assert not free.exists()
    ortops.save_model(marked(0), path)
    assert not held.exists()
    assert others < names_in(tmp_path)


def test_without_locks_litter_stays(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "fcntl", None)
    path, litter = tmp_path / "model.onnx", tmp_path / f".model.onnx.{'0' * 16}.tmp"
    litter.write_bytes(b"")
    for value in range(4):
        ortops.save_model(marked(value), path)
        assert mark_of(path) == value
    assert litter.exists()
    assert len(names_in(tmp_path)) == (4 if limit == LIMIT else 2)


# ------------------------------------------------------------------------- what is no file


@contextlib.contextmanager
def reading(stream: Callable[[], Any]) -> Iterator[list[bytes]]:
    """Reads a stream to its end in a thread; the content is there after the block."""
    content: list[bytes] = []

    def read() -> None:
        with stream() as opened:
            content.append(opened.read())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield content
    thread.join(60)


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with reading(lambda: path.open("rb")) as content:
        ortops.save_model(marked(1), path)
    assert stat.S_ISFIFO(path.lstat().st_mode)
    assert onnx.load_from_string(content[0]) == marked(1)
    assert names_in(tmp_path) == {"pipe"}


def test_a_device_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.open("wb").close()
    except OSError:  # who may not make a device may not destroy that of the system either
        if os.geteuid() == 0:
            pytest.skip("this root user may not make a device to try")
        path = Path(os.devnull)
    ortops.save_model(marked(1), path)
    assert stat.S_ISCHR(path.lstat().st_mode)


def test_what_is_at_a_path_of_a_folder_is_replaced(tmp_path: Path) -> None:
    """Whoever made the folder chose what is there; the user named the folder alone."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    outside.write_bytes(b"precious")
    outside.chmod(0o600)
    (folder / "link").symlink_to(outside)
    (folder / "broken").symlink_to(tmp_path / "missing")
    (folder / "chain").symlink_to(folder / "link")
    (folder / "device").symlink_to(os.devnull)
    (folder / "below").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(folder / "pipe")
    (folder / "kept").write_bytes(b"old")
    (folder / "kept").chmod(0o640)
    names = sorted(names_in(folder) - {"below"})
    for name in names:
        atomic.write_atomically(folder / name, b"new", follow=False)
    (folder / "link").unlink()
    (folder / "link").symlink_to(outside)
    atomic.copy_atomically(folder / "kept", folder / "link")
    below = atomic.folder_within(folder, Path("below", "deeper"))
    atomic.write_atomically(below / "outside", b"new", follow=False)
    assert outside.read_bytes() == b"precious"
    assert names_in(tmp_path) == {"folder", "outside"}
    usual = 0o666 & ~_umask()
    for name in names:
        found = (folder / name).lstat()
        assert stat.S_IMODE(found.st_mode) == (0o640 if name == "kept" else usual), name
        assert stat.S_ISREG(found.st_mode), name
        assert (folder / name).read_bytes() == b"new", name
    assert names_in(folder) == {*names, "below"}
    with pytest.raises(IsADirectoryError, match=r"'.*below'"):
        atomic.write_atomically(folder / "below", b"new", follow=False)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_socket_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # its path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(OSError, match="'socket'"):
            ortops.save_model(marked(1), "socket")
    assert stat.S_ISSOCK(Path("socket").lstat().st_mode)


def test_an_open_descriptor_is_written_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as stream:
        stream.write(b"head")
        ortops.save_model(marked(1), f"/dev/fd/{stream.fileno()}")
        stream.write(b"tail")
    content = path.read_bytes()
    assert (content[:4], content[-4:]) == (b"head", b"tail")
    assert onnx.load_from_string(content[4:-4]) == marked(1)
    with tempfile.TemporaryFile(dir=tmp_path) as stream:  # has no name
        ortops.save_model(marked(1), f"/dev/fd/{stream.fileno()}")
        stream.seek(0)
        assert onnx.load_from_string(stream.read()) == marked(1)
    one, other = socket.socketpair()
    with one, reading(lambda: other.makefile("rb")) as received:
        (tmp_path / "link").symlink_to(f"/dev/fd/{one.fileno()}")
        ortops.save_model(marked(1), tmp_path / "link")
        one.shutdown(socket.SHUT_WR)
    other.close()
    assert onnx.load_from_string(received[0]) == marked(1)
    assert names_in(tmp_path) == {"file", "link"}


@pytest.mark.usefixtures("small_limit")
def test_what_needs_a_file_beside_it_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        ortops.ModelError,
        match=r"^file '.*pipe': a model with 33,312 bytes of tensors .*; pass the path of a r",
    ):
        ortops.save_model(marked(1), tmp_path / "pipe")
    assert names_in(tmp_path) == {"pipe"}


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_lower_writes_to_standard_output(
    output: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(marked(1), path, save_as_external_data=True, location="w.bin", size_threshold=0)
    lowered = tmp_path / "other" / "lowered.onnx"
    lowered.parent.mkdir()
    assert cli.main(["lower", str(path), str(lowered)]) == 0
    assert cli.main(["lower", str(path), output]) == 0
    printed = capfdbinary.readouterr().out
    assert printed == lowered.read_bytes()
    lowered.write_bytes(printed)  # far from the data that the given model has beside it
    assert mark_of(lowered) == 1


@pytest.mark.slow
def test_lower_into_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(marked(1), path)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ortops", "lower", str(path), "-"]
    ended = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, "ortops: standard output: Broken pipe\n")


def test_lower_where_standard_output_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(marked(1), tmp_path / "model.onnx")
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["lower", str(tmp_path / "model.onnx"), "-"]) == 1
    assert capsys.readouterr().err == "ortops: standard output: it is closed\n"


# ------------------------------------------------------------------ disks, folders and names


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets writing fail behind so many bytes of a file, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_file(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ortops.save_model(marked(1), path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    needed = max(len(content) for content in before.values())
    for size in (0, 100, 5000, needed // 2, needed - 20, needed - 1):
        with largest_file(size), pytest.raises(OSError, match="File too large") as caught:
            ortops.save_model(marked(2), path)
        assert caught.value.filename == str(path)
        assert caught.value.errno == errno.EFBIG
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with largest_file(needed):
        ortops.save_model(marked(2), path)
    assert mark_of(path) == 2


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("missing", [1, 100, 250, 300, 4000])
def test_arrays_whose_end_does_not_fit(missing: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ortops.save_model(marked(1), path)
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    light = external.detach(marked(2))
    for tensor in light.proto.graph.initializer:  # as a session does
        light.set_array(tensor, np.full(tensor.dims, 2, np.float32))
    with largest_file(size - missing), pytest.raises(OSError, match="File too large"):
        saving.write_model(path, light)
    assert mark_of(path) == 1
    saving.write_model(path, light)
    assert mark_of(path) == 2


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Gives the rights of root away for a while, where it has them."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_that_cannot_be_written(limit: int) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder = Path(name)
        ortops.save_model(marked(1), folder / "model.onnx")
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        folder.chmod(0o555)
        for path in (folder / "model.onnx", folder / "new.onnx"):
            with as_nobody(), pytest.raises(PermissionError) as caught:
                ortops.save_model(marked(2), path)
            assert caught.value.filename == str(path)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
        folder.chmod(0o755)


@pytest.mark.parametrize(
    ("make", "path", "number", "said"),
    [
        (
            lambda: Path("a").symlink_to("b") or Path("b").symlink_to("a"),
            "a",
            errno.ELOOP,
            "a: ",
        ),
        (lambda: Path("a").symlink_to("a"), "a/model.onnx", errno.ELOOP, "no folder '.*/a'"),
        (lambda: Path("folder").mkdir(), "folder", errno.EISDIR, "'folder' is a folder"),
        (lambda: None, "missing/model.onnx", errno.ENOENT, "no folder '.*/missing'"),
        (
            lambda: Path("a").symlink_to("missing/model.onnx"),
            "a",
            errno.ENOENT,
            "no folder '.*/missing'",
        ),
        (lambda: Path("file").touch(), "file/model.onnx", errno.ENOTDIR, "no folder '.*/file'"),
        (lambda: None, "n" * 256, errno.ENAMETOOLONG, "n" * 256),
    ],
    ids=["loop", "loop above", "folder", "no folder", "dangling", "file above", "long name"],
)
def test_errors_name_the_path(
    make: Callable[[], object],
    path: str,
    number: int,
    said: str,
    limit: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make()
    before = names_in(tmp_path)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        ortops.save_model(marked(1), path)
    assert (caught.value.errno, caught.value.filename) == (number, path)
    assert names_in(tmp_path) == before
    onnx.save(marked(1), "source.onnx")
    assert cli.main(["lower", "source.onnx", path]) == 1
    assert re.fullmatch(f"ortops: .*{said}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("path", ["a\0b", b"model.onnx", 3, None], ids=repr)
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ortops.ModelError, match=r"^file .*; give the path of a file$"):
        ortops.save_model(marked(1), path)


def test_an_error_of_a_signal_handler_comes_out_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(_: int) -> None:
        raise TimeoutError("the user's own")  # which is an OSError

    monkeypatch.setattr(os, "fsync", handle)
    with pytest.raises(TimeoutError, match=r"^the user's own$"):
        ortops.save_model(marked(1), tmp_path / "model.onnx")
    assert not names_in(tmp_path)


@pytest.mark.quick(22)
@pytest.mark.parametrize("letter", ["n", "ü"])
@pytest.mark.parametrize("size", [94, 101, 230, 245, 246, 247, 250, 255])
def test_long_names(letter: str, size: int, limit: int, tmp_path: Path) -> None:
    width = len(letter.encode())
    path = tmp_path / (letter * (size // width) + "n" * (size % width))
    for value in range(4):
        ortops.save_model(marked(value), path)
        assert mark_of(path) == value
    assert len(names_in(tmp_path)) == (3 if limit == LIMIT else 1)
    litter = atomic.unique_sibling(path, ".tmp")
    litter.touch()
    ortops.save_model(marked(4), path)
    assert not litter.exists()


def test_a_name_that_is_no_text(limit: int, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"model\xff.onnx")
    try:
        path.touch()
    except OSError:
        pytest.skip("the file system takes no such names")
    for value in range(4):
        ortops.save_model(marked(value), path)
        assert mark_of(path) == value
    assert len(names_in(tmp_path)) == (3 if limit == LIMIT else 1)


def test_first_saves(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("link").symlink_to("folder/led.onnx")
    for path in ("model.onnx", "./folder/../other.onnx", "folder/deep.onnx", "link", "-"):
        ortops.save_model(marked(1), path)
        assert mark_of(Path(path).resolve()) == 1
        assert Path(path).is_symlink() == (path == "link")


# ------------------------------------------------------------------------- modes and owners


def modes_in(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000])
def test_a_new_file_has_the_usual_mode(
    mask: int, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, change = os.umask(mask), os.umask

    def forbidden(_: int) -> int:
        raise AssertionError("other threads see the mask while it is another")

    monkeypatch.setattr(os, "umask", forbidden)
    try:
        ortops.save_model(marked(1), tmp_path / "model.onnx")
    finally:
        change(old)
    assert modes_in(tmp_path) == {0o666 & ~mask}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o755, 0o2750, 0o4755, 0o6711])
def test_the_mode_is_kept(mode: int, limit: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.touch()
    path.chmod(mode)
    for value in range(4):
        ortops.save_model(marked(value), path)
        assert mark_of(path) == value
    assert modes_in(tmp_path) == {mode}
    assert len(names_in(tmp_path)) == (3 if limit == LIMIT else 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_is_kept(limit: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.touch()
    os.chown(path, 1234, 2345)
    path.chmod(0o6750)
    ortops.save_model(marked(1), path)
    assert {(file.stat().st_uid, file.stat().st_gid) for file in tmp_path.iterdir()} == {
        (1234, 2345)
    }
    assert modes_in(tmp_path) == {0o6750}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_an_owner_that_cannot_be_kept_lends_no_rights(limit: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.onnx"
        path.touch()
        os.chown(path, 1234, 2345)
        path.chmod(0o6755)
        folder.chmod(0o777)
        with as_nobody():
            ortops.save_model(marked(1), path)
        assert mark_of(path) == 1
        assert {file.stat().st_uid for file in folder.iterdir()} == {65534}
        assert modes_in(folder) == {0o755}


def test_a_file_that_is_being_written_is_as_private_as_the_old_one(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = tmp_path / "model.onnx", set()
    path.touch(0o600)

    def watch(_: int) -> None:
        modes.update(modes_in(tmp_path))

    monkeypatch.setattr(os, "fsync", watch)
    ortops.save_model(marked(1), path)
    assert modes == {0o600}
