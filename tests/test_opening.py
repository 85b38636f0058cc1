"""Opening files that others wrote, and the names of files that are written in others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from violations import all_violations

from ortops import FeedError, ModelError
from ortops.graph.files.opening import file_in_folder, open_regular

posix = pytest.mark.skipif(os.name == "nt", reason="pipes and links are POSIX's")

# What no file of a folder may be called in another file of the folder, on any system.
OUTSIDE = (
    *("../x", "a/../../x", "..", "a/..", "/x", "//server/share/x", "", ".", "./", "x\0y", "\ud800"),
    *("..\\x", "a\\..\\x", "\\x", "\\\\server\\share\\x", "C:x", "C:\\x", "c:/x", "\\\\?\\C:\\x"),
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
        with pytest.raises(ModelError, match=r"^f: '.*' is a link that leads out of the folder"):
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
