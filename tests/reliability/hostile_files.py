"""Puts hostile content in the place of each file that ortops reads, and writes what becomes of it.

``python hostile_files.py FOLDER SECRET KIND…`` takes the valid files in ``FOLDER/<kind>``. For each
file and each of `attacks`, it reads a copy of the folder in which this file is hostile, from Python
and by the command line, and writes a line of JSON for each that begins and for each that goes
wrong: another error than one of ortops or of the operating system, an error that names no file of
the folder, more than `SECONDS` or `MEMORY`, or a file outside the folder that is opened or changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import io
import itertools
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from attacks import SOAK
from fuzz_run import READERS, tell, values_of

import ortops
from ortops import cli

SECONDS = 60
"""How long reading may take, on a machine that does other things as well."""

MEMORY = 2**30
"""How many bytes more than the process has it may ask for."""

ONE_IN = {"llm": 12, "chats": 5}
"""How many cases of kinds that take seconds are one that runs without ORTOPS_SOAK."""

IN_FOLDERS = ("images", "llm", "peft")
"""Kinds of which users name a folder; they name other files one by one, and may link them."""


def read_chats(folder: Path) -> None:
    ortops.llm.FineTuning(folder.parent / "llm", rank=2).show(folder / "data.jsonl")


ALL: dict[str, Callable[[Path], object]] = {
    **READERS,
    "chats": read_chats,
    "config": lambda _: None,
}
"""What reads the files of a kind in Python."""

COMMANDS: dict[str, list[str]] = {
    "adapter": [
        "lora",
        "merge",
        "{}/model.onnx",
        "{}.onnx",
        "--adapter",
        "{}/trained.onnx_adapter",
    ],
    "checkpoint": ["weights", "load", "{}/model.onnx", "{}/weights.safetensors", "{}.onnx"],
    "checkpoint_npz": ["weights", "load", "{}/model.onnx", "{}/weights.npz", "{}.onnx"],
    "checkpoint_torch": ["weights", "match", "{}/model.onnx", "{}/new.pt"],
    "chats": ["tune", "{}/../llm", "{}/data.jsonl", "--show", "--rank", "2"],
    "config": ["train", "--config", "{}/train.toml"],
    "images": ["predict", "{model}", "--data", "{}", "--output", "{}.npz"],
    "csv": ["predict", "{model}", "--data", "{}/data.csv", "--output", "{}.npz"],
    "npz": ["predict", "{model}", "--data", "{}/data.npz", "--output", "{}.npz"],
    "parquet": ["predict", "{model}", "--data", "{}/data.parquet", "--output", "{}.npz"],
    "llm": ["check", "{}"],
}
"""What reads the files of a kind on the command line; ``{}`` is their folder."""

Attack = Callable[[Path], object]
"""Makes a file hostile; it is a copy of a valid one."""


def written(content: bytes) -> Attack:
    """Returns an attack that replaces the content."""
    return lambda path: path.write_bytes(content)


def changed(change: Callable[[bytes], bytes]) -> Attack:
    """Returns an attack that computes the new content from the old one."""
    return lambda path: path.write_bytes(change(path.read_bytes()))


def replaced(make: Callable[[Path], object]) -> Attack:
    """Returns an attack that replaces the file by a pipe, a folder or a link."""

    def attack(path: Path) -> None:
        path.unlink()
        make(path)

    return attack


def in_utf16(content: bytes) -> bytes:
    return content.decode("latin-1").encode("utf-16")


def with_names_outside(secret: Path) -> Callable[[str], Attack]:
    """Returns a function that makes attacks: names of files in JSON lead out of the folder."""

    def attack_with(name: str) -> Attack:
        def attack(path: Path) -> None:
            root = json.loads(path.read_bytes())
            for holder, key in list(values_of(root)):
                value = holder[key]
                if isinstance(value, str) and len(value) < 200 and (path.parent / value).is_file():
                    holder[key] = name
            path.write_text(json.dumps(root))

        return attack

    return attack_with


def attacks(path: Path, secret: Path) -> Iterator[tuple[str, Attack]]:
    """Yields what is done to a file, with a name for it.

    Args:
        path: The valid file.
        secret: A file outside the folder, which nothing may open.
    """
    yield "empty", written(b"")
    yield "zeros", written(bytes(4096))
    yield "words", written(b"\x1b[31mwords\r\nand more\n" * 20)
    yield "its first half", changed(lambda old: old[: len(old) // 2])
    yield "without its end", changed(lambda old: old[:-1])
    yield "compressed", changed(gzip.compress)
    yield "in UTF-16", changed(in_utf16)
    yield "a pipe", replaced(os.mkfifo)
    yield "a folder", replaced(Path.mkdir)
    yield "a device", replaced(lambda file: file.symlink_to("/dev/zero"))
    yield "a link outside", replaced(lambda file: file.symlink_to(secret))
    if path.suffix == ".json":
        for text in ("null", "[]", "3", "[1e400]", '{"a": 1, "a": 2}', "[" * 100_000, "{}"):
            yield f"{text[:20]} in JSON", written(text.encode())
        leading_out = with_names_outside(secret)
        for name in (str(secret), os.path.relpath(secret, path.parent), f"./../{secret.name}"):
            yield f"names like {name[:5]}", leading_out(name)
        for value in (None, [], {}, True, -1, 1e308, "", "\0", "a" * 100_000):
            yield (
                f"all values {str(value)[:10]!r}",
                changed(
                    lambda old, value=value: json.dumps(
                        dict.fromkeys(json.loads(old), value)
                    ).encode()
                ),
            )
    if path.suffix == ".safetensors":
        for header in (
            {"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}},
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
            {"w": {"dtype": "F32", "shape": [0.5, 2], "data_offsets": [0, 4]}},
            {"w": {"dtype": "constructor", "shape": [1], "data_offsets": [0, 4]}},
            {"w": None},
            [],
        ):
            text = json.dumps(header).encode()
            yield f"header {text[:60]!r}", written(struct.pack("<Q", len(text)) + text + bytes(64))
        yield "a long header", written(struct.pack("<Q", 2**62) + b"{}")


OPENED_OR_CHANGED = 0x20 | 0x2 | 0x4 | 0x400 | 0x800  # of inotify: open, modify, …, moved


class Watch:
    """Records files that are opened or changed below a folder but not in the folder of a case.

    Python tells of its own calls. Of the secret file, Linux tells (inotify), also where libraries
    in C or child processes open it.
    """

    def __init__(self, root: Path, secret: Path) -> None:
        self.root, self.inside, self.found = str(root), "", list[str]()
        sys.addaudithook(self)
        self.secret, self.events = secret, -1
        if sys.platform == "linux":
            c = ctypes.CDLL(None, use_errno=True)
            self.events = c.inotify_init1(os.O_NONBLOCK)
            assert c.inotify_add_watch(self.events, os.fsencode(secret), OPENED_OR_CHANGED) >= 0
            secret.read_bytes()
            assert self.is_touched()  # that it sees something

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.inside and event in ("open", "os.remove", "os.rename", "os.truncate", "os.link"):
            for each in args[:2] if event != "open" else args[:1]:
                if isinstance(each, str | os.PathLike):
                    path = os.path.realpath(each)
                    if path.startswith(self.root) and not path.startswith(self.inside):
                        self.found.append(f"{event} {path}")

    @contextlib.contextmanager
    def of(self, inside: Path) -> Iterator[None]:
        self.inside, self.found = str(inside), []
        yield
        self.inside = ""
        if self.is_touched():
            self.found.append(f"touched {self.secret}")

    def is_touched(self) -> bool:
        """Whether anything has opened or changed the secret file since the last call."""
        with contextlib.suppress(BlockingIOError):
            return self.events >= 0 and bool(os.read(self.events, 2**16))
        return False


def contents(folder: Path) -> dict[str, bytes | None]:
    """Returns the contents of the files in a folder; None for folders, pipes and links."""
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }


class Hang(BaseException):
    """Reading takes too long."""


def ring(*_: object) -> None:
    raise Hang


def outcome(action: Callable[[], object], names: list[str]) -> str | None:
    """Does something; returns what is wrong with that."""
    signal.alarm(SECONDS)
    try:
        action()
    except (ortops.OrtopsError, OSError) as error:
        text = str(error)
        return None if any(name in text for name in names) else f"names no file: {text[:300]}"
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in frames[-5:]]
        return f"{type(error).__name__}: {str(error)[:200]} at {' '.join(last)}"
    finally:
        signal.alarm(0)
    return None


def command(arguments: list[str], names: list[str]) -> str | None:
    """Runs a command; returns what is wrong with what it says."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        wrong = outcome(lambda: run(arguments), names)
    text = printed.getvalue()
    if wrong is None and "this is a bug" in text:
        return text[-300:]
    if wrong is None and "\x1b" in text:
        return f"not printable: {text[-300:]!r}"
    return wrong


def run(arguments: list[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.main(arguments)


def main(folder: Path, secret: Path, kinds: list[str]) -> None:
    counted = itertools.count()
    signal.signal(signal.SIGALRM, ring)
    for kind in kinds:  # what is imported for valid files counts for no case
        if kind != "chats":
            ALL[kind](folder / kind)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        watch = Watch(folder.parent, secret)
        for kind in kinds:
            source = folder / kind
            for path in sorted(p for p in source.rglob("*") if p.is_file()):
                if path.suffix == ".onnx":
                    continue
                for number, (name, attack) in enumerate(attacks(path, secret)):
                    if SOAK == 1 and next(counted) % ONE_IN.get(kind, 1):
                        continue
                    case = Path(work, f"{kind} {path.name} {number}")
                    copy = shutil.copytree(source, case / kind)
                    if kind == "chats":
                        shutil.copytree(folder / "llm", case / "llm")
                    file = copy / path.relative_to(source)
                    attack(file)
                    before = contents(copy)
                    names = [kind, *file.relative_to(copy).parts]
                    tell("begun", kind, path.name, name)
                    with watch.of(case):
                        wrong = outcome(partial(ALL[kind], copy), names)
                    found, said = list(watch.found), None
                    if kind in COMMANDS:
                        model = str(shutil.copy(folder / "npz.onnx", case))
                        given = [
                            each.replace("{}", str(copy)).replace("{model}", model)
                            for each in COMMANDS[kind]
                        ]
                        with watch.of(case):
                            said = command(given, names)
                        found += watch.found
                    allowed = kind not in IN_FOLDERS and name == "a link outside"
                    lost = contents(copy) != before
                    if wrong or said or lost or (found and not allowed):
                        tell("wrong", kind, path.name, name, wrong, said, lost, found[:3])
                    shutil.rmtree(case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
