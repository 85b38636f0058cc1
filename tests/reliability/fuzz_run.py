"""Reads files that are changed at random, and writes what became of it; a process of its own.

``python fuzz_run.py folder seed cases seconds kind…`` changes the files in ``folder/<kind>``: as
many cases of each kind as asked for, or as there is time for. It writes a line of JSON for each
case that begins, and for each that raises what a reader may not raise. The same seed makes the same
cases.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import random
import re
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ortops
from ortops import lora, weights
from ortops.data.files import read_data
from ortops.data.wanted import Wanted
from ortops.graph.limits import LIMITS

MEMORY = 8 * 2**30
SECONDS = 120
"""That a case may take before it counts as a hang; on an idle machine, none takes more than two."""

MOST = {"parquet": 1000}
"""Cases of a kind at most: pyarrow 26.0.1 ends the process at one in some thousand files."""

NUMBERS = [0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63, 2**64, -(2**63), 10**30]
TEXTS = ["", "\0", "../../etc/passwd", "/dev/zero", "NaN", "é", "\ud800", "a" * 10_000, "]" * 200]
VALUES = [None, True, [], {}, 1.5, float("nan"), 1e308, *NUMBERS, *TEXTS]


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Returns bytes of which some are changed, gone, or there twice."""
    new = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(new) + 1)
        end = min(len(new), at + rng.choice((1, 2, 4, 8, 64)))
        match rng.randrange(6):
            case 0:
                new[at:end] = rng.randbytes(end - at)
            case 1:
                del new[at:end]
            case 2:
                new[at:at] = new[at:end]
            case 3:
                new[at:end] = rng.choice((b"\x00", b"\xff", b"\x7f")) * (end - at)
            case 4:
                del new[at:]
            case _:
                size = rng.choice(["<I", "<Q", ">I", ">H"])
                raw = struct.pack(size, rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(size)))
                new[at : at + len(raw)] = raw
    return bytes(new)


def changed_text(data: bytes, rng: random.Random) -> bytes:
    """Returns text in which a number, or a word, is another one."""
    places = list(re.finditer(rb"-?\d+|[A-Za-z_.]+|[][(){},:]", data))
    if not places:
        return changed_bytes(data, rng)
    place = rng.choice(places)
    new = str(rng.choice((*NUMBERS, *TEXTS, "True", "None", "{", "]", "|O", ">f8")))
    return data[: place.start()] + new.encode("utf-8", "surrogatepass") + data[place.end() :]


def values_of(root: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the places of all values in JSON: an object or a list, and a key or index."""
    pending = [root]
    while pending:
        each = pending.pop()
        if isinstance(each, dict | list):
            for key in each.keys() if isinstance(each, dict) else range(len(each)):
                yield each, key
                pending.append(each[key])


def changed_json(data: bytes, rng: random.Random) -> bytes:
    """Returns JSON in which a value is another one, is gone, or has another key."""
    root = json.loads(data)
    holders = list(values_of(root))
    if not holders:
        return changed_text(data, rng)
    holder, key = rng.choice(holders)
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(TEXTS)] = holder.pop(key)
        case 2:
            other, there = rng.choice(holders)
            with contextlib.suppress(KeyError, IndexError):
                holder[key] = json.loads(json.dumps(other[there]))
        case _:
            holder[key] = rng.choice(VALUES)
    return json.dumps(root).encode()


def changed_zip(data: bytes, rng: random.Random) -> bytes:
    """Returns an archive with correct checksums and an entry that is changed, or renamed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(list(entries))
    content = entries.pop(name)
    header = content[:128]
    if rng.random() < 0.2:
        name = rng.choice([*TEXTS, "/x.npy", "../x.npy", "x"]) + rng.choice(("", ".npy"))
    else:
        content = rng.choice((changed_text, changed_bytes))(header, rng) + content[128:]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", rng.choice((0, 8))) as archive:
        for each, kept in {**entries, name: content}.items():
            with contextlib.suppress(UnicodeEncodeError, IndexError):  # names
                archive.writestr(each, kept)
    return written.getvalue()


def changed_torch(data: bytes, rng: random.Random) -> bytes:
    """Returns a file of torch.save with correct checksums and a pickle that is changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([name for name in entries if name.endswith("data.pkl")] * 4 + list(entries))
    entries[name] = rng.choice((changed_text, changed_bytes))(entries[name], rng)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        for each, kept in entries.items():
            archive.writestr(each, kept)
    return written.getvalue()


def changed_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Returns safetensors of which the header is changed, and has its length."""
    size = struct.unpack("<Q", data[:8])[0]
    header = rng.choice((changed_json, changed_text))(data[8 : 8 + size], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".csv": changed_text,
    ".jinja": changed_text,
    ".json": changed_json,
    ".npz": changed_zip,
    ".pt": changed_torch,
    ".safetensors": changed_safetensors,
}


def read_table(folder: Path) -> None:
    (path,) = folder.iterdir()
    wanted = [
        Wanted("x", np.dtype(np.float32), (None, 2)),
        Wanted("labels", np.dtype(np.int64), (None,), is_target=True),
    ]
    read_data(str(path), wanted)


def read_images(folder: Path) -> None:
    data = ortops.data.image_folder(folder, size=(8, 8))
    assert data.images(np.arange(len(data))).shape == (len(data), 3, 8, 8)


def read_llm(folder: Path) -> None:
    ortops.llm.FineTuning(folder, rank=2).show([{"prompt": "a", "completion": "b"}])


READERS: dict[str, Callable[[Path], object]] = {
    "adapter": lambda f: lora.load_adapter(f / "model.onnx", f / "trained.onnx_adapter"),
    "checkpoint": lambda f: weights.load(f / "model.onnx", f / "weights.safetensors"),
    "checkpoint_npz": lambda f: weights.load(f / "model.onnx", f / "weights.npz"),
    "checkpoint_torch": lambda f: [
        weights.load(f / "model.onnx", path) for path in sorted(f.glob("*.pt*"))
    ],
    "csv": read_table,
    "images": read_images,
    "llm": read_llm,
    "npz": read_table,
    "parquet": read_table,
    "peft": lambda f: lora.from_peft(f / "model.onnx", f / "peft"),
}
"""What reads the files of a kind; a model is not changed, as test_hostile.py does that."""


def tell(*line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def try_one(source: Path, kind: str, rng: random.Random) -> str | None:
    """Reads a changed copy; returns what was raised, unless that is allowed."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(shutil.copytree(source / kind, Path(work, kind)))
        files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".onnx")
        path = rng.choice(files)
        known = CHANGES.get(path.suffix, changed_bytes)
        path.write_bytes(rng.choice((known, known, changed_bytes))(path.read_bytes(), rng))
        try:
            READERS[kind](folder)
        except (ortops.OrtopsError, OSError):
            return None
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            last = [f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in frames[-5:]]
            return f"{path.name}: {type(error).__name__}: {str(error)[:200]} at {' '.join(last)}"
    return None


def main(folder: Path, seed: str, cases: int, seconds: float, kinds: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    LIMITS.data_bytes = 2**30
    for kind in kinds:
        end = time.monotonic() + seconds / len(kinds)
        for number in range(min(cases, MOST.get(kind, cases))):
            if time.monotonic() > end:
                break
            tell("begun", kind, number)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            wrong = try_one(folder, kind, random.Random(f"{seed} {kind} {number}"))
            faulthandler.cancel_dump_traceback_later()
            if wrong is not None:
                tell("wrong", kind, number, wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
