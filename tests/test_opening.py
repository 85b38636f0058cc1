"""Opening files that others wrote, and the names of files that are written in others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from violations import all_violations

from ortops import FeedError, ModelError, OrtopsError
from ortops.cli import main
from ortops.engine.training.arrow import open_arrow
from ortops.graph.files.opening import file_in_folder, open_regular
from ortops.graph.limits import LIMITS
from ortops.graph.safetensors import read_safetensors
from ortops.llm.folder import open_folder
from ortops.llm.row_files import rows_of
from ortops.llm.tokenization import Tokenizer
from ortops.lora.adapter_file import read_adapter_file
from ortops.weights.checkpoints import read_checkpoint

posix = pytest.mark.skipif(os.name == "nt", reason="pipes and links are POSIX's")

# What no file of a folder may be called in another file of the folder, on any system.
OUTSIDE = (
    *("../x", "a/../../x", "..", "a/..", "/x", "//server/share/x", "", ".", "./", "x\0y", "\ud800"),
    *("..\\x", "a\\..\\x", "\\x", "\\\\server\\share\\x", "C:x", "C:\\x", "c:/x", "\\\\?\\C:\\x"),
    *(".. /x", "...", "x" * 300),
    *(None, 5, True, 1.5, ["x"], {"x": 1}, b"x"),
)


def test_names_are_plain_relative_paths(tmp_path: Path) -> None:
    inside = {"x": "x", "a/x": "a/x", "./x": "x", "a..b": "a..b", "onnx::W": "onnx::W", "é": "é"}
    with all_violations() as check:
        for name in OUTSIDE:
            with check(ascii(name)), pytest.raises(ModelError, match=r"^f: 'g' must be") as caught:
                file_in_folder(tmp_path, name, what="f: 'g'")
            assert str(caught.value).isprintable()
        for name, path in inside.items():
            with check(name):
                assert file_in_folder(tmp_path, name, what="f") == tmp_path / path


@posix
def test_links_may_lead_to_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "a").mkdir(parents=True)
    (folder / "a/x").touch()
    (tmp_path / "x").touch()
    (folder / "inside").symlink_to("a/x")
    (folder / "here").symlink_to(folder / "a")
    (folder / "out").symlink_to("../x")
    (folder / "up").symlink_to(tmp_path)
    (folder / "cycle").symlink_to("cycle")
    (tmp_path / "other").symlink_to(folder)
    for name in ("inside", "here/x", "a/x", "missing", "cycle"):
        assert file_in_folder(folder, name, what="f") == folder / name
        assert file_in_folder(tmp_path / "other", name, what="f") == tmp_path / "other" / name
    for name in ("out", "up/x", "up/missing"):
        with pytest.raises(ModelError, match=r"^f: '.*' is a link that leads out of"):
            file_in_folder(folder, name, what="f")


@posix
def test_links_of_the_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "1"
    (snapshot / "onnx").mkdir(parents=True)
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (blobs / "b").touch()
    (tmp_path / "secret").touch()
    (snapshot / "config.json").symlink_to("../../blobs/b")
    (snapshot / "onnx" / "model.onnx").symlink_to("../../../blobs/b")
    (snapshot / "bad").symlink_to("../../../secret")
    for name in ("config.json", "onnx/model.onnx"):
        assert file_in_folder(snapshot, name, what="f") == snapshot / name
    with pytest.raises(ModelError, match="leads out"):
        file_in_folder(snapshot, "bad", what="f")


@posix
@pytest.mark.parametrize("kind", [FeedError, ModelError])
def test_only_regular_files_are_opened(tmp_path: Path, kind: type[Exception]) -> None:
    pipe, link, zero = tmp_path / "pipe", tmp_path / "link", tmp_path / "zero"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    zero.symlink_to("/dev/zero")
    for path in (pipe, link, zero, Path("/dev/null")):
        with pytest.raises(kind, match=rf"^file '{path}' is not a regular file; give another$"):
            open_regular(path, error=kind, what="file", remedy="give another")
    with pytest.raises(kind, match=r"^file 'a.x00b': embedded null byte; give another$"):
        open_regular("a\0b", error=kind, what="file", remedy="give another")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        open_regular(tmp_path)


def endless(file: Path, kind: str) -> Path:
    """Puts a pipe, or a link to a device, in the place of a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    return file


def _index(file: Path) -> Path:
    index = file.parent / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file.name}}))
    return index


def _model_beside(file: Path) -> Path:
    (file.parent / "model.onnx").write_bytes(b"")
    return file.parent


# What reads each of these files. Of a folder, the files beside it are given.
READERS: list[tuple[str, Callable[[Path], object]]] = [
    *((name, lambda file: read_checkpoint(file)) for name in ("a.safetensors", "a.npz")),
    ("model.safetensors.index.json", lambda file: read_checkpoint(file)),
    ("shard.safetensors", lambda file: read_checkpoint(_index(file))),
    ("rows.jsonl", lambda file: list(rows_of(file))),
    ("adapter.onnx_adapter", lambda file: read_adapter_file(file)),
    ("a.safetensors", lambda file: read_safetensors(file)),
    *(
        (name, lambda file: open_folder(_model_beside(file)))
        for name in (
            *("genai_config.json", "config.json", "generation_config.json"),
            "tokenizer_config.json",
        )
    ),
    ("model.onnx", lambda file: open_folder(file)),
    ("options.toml", lambda file: main(["train", "a.onnx", "--config", str(file), "--debug"])),
]


@posix
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_without_an_end_are_refused(kind: str, tmp_path: Path) -> None:
    with all_violations() as check:
        for number, (name, read) in enumerate(READERS):
            file = endless(tmp_path / str(number) / name, kind)
            message = f"{name}' is not a regular file; "
            if kind == "device" and ("config" in name or name.startswith("shard")):
                message = "is a link that leads out of"
            with check((name, number)), pytest.raises(OrtopsError, match=message):
                read(file)


@posix
@pytest.mark.optional("pyarrow", "tables")
def test_tables_without_an_end_are_refused(tmp_path: Path) -> None:
    readers = {
        "a.parquet": open_arrow,
        "b.arrow": open_arrow,
        "folder.parquet/c": lambda file: open_arrow(file.parent),
        "rows/d.parquet": lambda file: list(rows_of(file)),
    }
    with all_violations() as check:
        for name, read in readers.items():
            file = endless(tmp_path / name, "pipe")
            with check(name), pytest.raises(FeedError, match="is not a regular file; "):
                read(file)
    (tmp_path / "folder.parquet/c").unlink()
    (tmp_path / "folder.parquet/c").symlink_to("/etc/passwd")
    with pytest.raises(FeedError, match="leads out of the folder"):
        open_arrow(tmp_path / "folder.parquet")


@posix
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_checkpoints_of_torch_without_an_end_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a.pt' is not a regular file; pass the path of a check"):
        read_checkpoint(endless(tmp_path / "a.pt", kind))


def test_sizes_are_checked_before_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files that take no room on a disk."""
    monkeypatch.setattr(LIMITS, "metadata_bytes", 10**6)
    monkeypatch.setattr(LIMITS, "data_bytes", 10**6)
    readers: dict[str, Callable[[Path], object]] = {
        "rows.jsonl": lambda file: list(rows_of(file)),
        "a.safetensors": lambda file: read_safetensors(file),
        "model.safetensors.index.json": lambda file: read_checkpoint(file),
        "config.json": lambda file: open_folder(_model_beside(file)),
        "tokenizer.json": lambda file: Tokenizer(open_folder(_model_beside(file))),
    }
    with all_violations() as check:
        for name, read in readers.items():
            file = tmp_path / name
            file.write_bytes((2**40).to_bytes(8, "little"))
            os.truncate(file, 2**36 if name != "a.safetensors" else 100)
            with check(name), pytest.raises(OrtopsError, match=name):
                read(file)
            file.unlink()
