"""Folders of language models that others wrote: names of files, links, and settings."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from test_opening import OUTSIDE
from violations import all_violations

from models import llama
from ortops import ModelError
from ortops.cli import main
from ortops.llm import FineTuning
from ortops.llm.folder import copy_others, open_folder

posix = pytest.mark.skipif(os.name == "nt", reason="links are POSIX's")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.write(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A folder in a project, beside files that are not the folder's."""
    (tmp_path / "project").mkdir()
    for place in (tmp_path, tmp_path / "project"):
        shutil.copyfile(base / "model.onnx", place / "production.onnx")
    return Path(shutil.copytree(base, tmp_path / "model"))


def named(folder: Path, part: str, name: object, key: str = "filename") -> None:
    """Makes genai_config.json name a file."""
    file = folder / "genai_config.json"
    settings = json.loads(file.read_text())
    settings["model"].setdefault(part, {})[key] = name
    file.write_text(json.dumps(settings))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["../production.onnx", "absolute"])
def test_the_model_is_in_the_folder(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = str(tmp_path / "production.onnx") if name == "absolute" else name
    named(folder, "decoder", name)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [104, 105, 33]}\n' * 2)
    before = content(tmp_path)
    command = ["tune", str(folder), str(tmp_path / "rows.jsonl"), "--epochs", "1", "--quiet"]
    assert main([*command, "--save", str(tmp_path / "project" / "tuned")]) == 1
    message = f"genai_config.json': 'filename' must be a file in the folder '{folder}', as a rel"
    assert message in capsys.readouterr().err
    assert content(tmp_path) == before


def test_every_name_of_genai_config_is_checked(folder: Path) -> None:
    file = folder / "genai_config.json"
    plain = file.read_text()
    cases = [("decoder", "filename", name) for name in OUTSIDE]
    parts = ("encoder", "embedding", "vision", "speech", "decoder")
    keys = ("filename", "adapter_filename", "config_filename")
    cases += [(part, key, "../x") for part in parts for key in keys]
    with all_violations() as check:
        for part, key, name in cases:
            if isinstance(name, bytes):
                continue
            named(folder, part, name, key)
            with check((part, key, name)), pytest.raises(ModelError) as caught:
                open_folder(folder)
            assert f"'{key}' must be a file in the folder" in str(caught.value)
            file.write_text(plain)
        pipeline = [{"embeddings": {"filename": "x.onnx"}}, {"head": {"filename": "/x"}}]
        named(folder, "decoder", pipeline, "pipeline")
        with check("pipeline"), pytest.raises(ModelError, match="got '/x'"):
            open_folder(folder)
        file.write_text(plain)
        (folder / "sub").mkdir()
        (folder / "model.onnx").rename(folder / "sub" / "model.onnx")
        named(folder, "decoder", "sub/model.onnx")
        with check("below"):
            assert open_folder(folder).model == folder / "sub" / "model.onnx"


@posix
def test_links_that_lead_out_are_refused(folder: Path, tmp_path: Path) -> None:
    """Whichever file they replace: each would be read, or copied into the saved folder."""
    (tmp_path / "secret").write_text("secret")
    names = ("notes.txt", "config.json", "tokenizer.json", "adapter.onnx_adapter", "model.onnx")
    with all_violations() as check:
        for name in (*names, "training.state", "genai_config.json", "gone"):
            link = folder / name
            kept = link.read_bytes() if link.exists() else None
            link.unlink(missing_ok=True)
            link.symlink_to(tmp_path / ("missing" if name == "gone" else "secret"))
            message = rf"'{name}' is a link that leads out of it; replace it by the file"
            for open_it in (open_folder, FineTuning.load):
                with check((name, open_it)), pytest.raises(ModelError, match=message):
                    open_it(folder)
            link.unlink()
            if kept is not None:
                link.write_bytes(kept)
        opened = open_folder(folder)
        (folder / "notes.txt").symlink_to(tmp_path / "secret")  # later
        (tmp_path / "copy").mkdir()
        with check("copied"), pytest.raises(ModelError, match=r"'notes.txt' leads out"):
            copy_others(opened, tmp_path / "copy")
        assert not (tmp_path / "copy" / "notes.txt").exists()


@posix
def test_folders_behind_links(folder: Path, tmp_path: Path) -> None:
    """The folder may be behind a link, and links in it may lead to somewhere in it."""
    (folder / "onnx").mkdir()
    (folder / "model.onnx").rename(folder / "onnx" / "model.onnx")
    (folder / "model.onnx").symlink_to("onnx/model.onnx")
    (folder / "readme").symlink_to(folder / "tokenizer.json")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "latest.onnx").symlink_to(folder / "onnx" / "model.onnx")
    (tmp_path / "runs").symlink_to("/")  # a folder, which is neither read nor copied
    for given in (folder, tmp_path / "link", folder / "model.onnx"):
        opened = open_folder(given)
        copied = tmp_path / "copy"
        copied.mkdir()
        copy_others(opened, copied)
        assert (copied / "readme").read_bytes() == (folder / "tokenizer.json").read_bytes()
        assert not any(path.is_symlink() for path in copied.iterdir())
        shutil.rmtree(copied)
    assert open_folder(tmp_path / "latest.onnx").model == tmp_path / "latest.onnx"  # named by users
    (folder / "onnx" / "model.onnx").rename(tmp_path / "model.onnx")
    (folder / "onnx").rmdir()
    (folder / "model.onnx").unlink()
    (folder / "onnx").symlink_to(tmp_path)
    with pytest.raises(ModelError, match="'onnx' is a link that leads out of it"):
        open_folder(folder)


@pytest.mark.slow
@posix
def test_folders_of_the_cache_are_read_and_copied_as_files(folder: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--x"
    snapshot, blobs = repository / "snapshots" / "1", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    tuning = FineTuning(snapshot, rank=1)
    tuning.save(tmp_path / "tuned")
    assert not [file for file in (tmp_path / "tuned").iterdir() if file.is_symlink()]
    config = tmp_path / "tuned" / "genai_config.json"
    assert config.read_bytes() == (folder / "genai_config.json").read_bytes()
    assert FineTuning.load(tmp_path / "tuned").session.steps_done == 0
