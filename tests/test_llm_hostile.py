"""Folders of language models that others wrote: names of files, links, and settings."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_opening import OUTSIDE
from violations import all_violations

from models import llama
from ortops import ModelError
from ortops.cli import main
from ortops.llm import FineTuning
from ortops.llm.folder import copy_others, genai_config, open_folder
from ortops.llm.sequence_pairs import start_token
from ortops.llm.tokenization import Tokenizer
from ortops.lora.peft_layers import model_type_beside

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
    names = [name for name in OUTSIDE if name != "\ud800" and not isinstance(name, bytes)]
    cases = [("decoder", "filename", name) for name in names]
    parts = ("encoder", "embedding", "vision", "speech", "decoder")
    keys = ("filename", "adapter_filename", "config_filename")
    cases += [(part, key, "../x") for part in parts for key in keys]
    with all_violations() as check:
        for part, key, name in cases:
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
        named(folder, "decoder", "tokenizer.json")
        with (
            check("tokenizer"),
            pytest.raises(ModelError, match=r"'tokenizer.json', no .onnx file"),
        ):
            open_folder(folder)
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


# ------------------------------------------------------------------------------------ settings

ONE_IN = 1 if os.environ.get("ORTOPS_SOAK") else 16
"""How many values of a field are one that is tried; other fields get the others."""

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e400, -1e400, math.nan),
    *("", "x", "\0", "\ud800", "\x1b[31m", "x" * 10**5, [], [1], [None], [[1]], ["x"], [1e400]),
    *({}, {"x": 1}, {"content": 1}, {"content": None}, [{"name": "default"}], [{"template": "x"}]),
    *([{"name": "default", "template": 1}], [{"name": ["default"], "template": "x"}], [2**70]),
]
FIELDS = {
    "genai_config.json": (
        *("model", "model.context_length", "model.eos_token_id"),
        *("model.type", "model.decoder", "model.decoder.filename", "model.decoder.inputs"),
        *("model.decoder.inputs.input_ids", "model.decoder.outputs", "model.encoder.filename"),
        *("model.decoder.outputs.logits", "model.vision", "model.decoder.pipeline", "search"),
    ),
    "config.json": (
        *("max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "vocab_size"),
        *("decoder_start_token_id", "max_target_positions", "num_attention_heads", "head_dim"),
        *("num_hidden_layers", "hidden_size", "num_key_value_heads", "model_type"),
    ),
    "generation_config.json": ("eos_token_id", "pad_token_id", "decoder_start_token_id"),
    "tokenizer_config.json": (
        *("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"),
    ),
}
CONTENTS = {
    "latin-1": b'{"model_type": "\xe9"}',
    "utf-16": '{"model": {}}'.encode("utf-16"),
    "utf-32": '{"model": {}}'.encode("utf-32"),
    "gzip": gzip.compress(b"{}"),
    "twice": b'{"model": {}, "model": {}}',
    "twice inside": b'{"model": {"vocab_size": 1, "vocab_size": 2}}',
    "infinite": b"[1e400]",
    "deep": b'{"model": ' * 200 + b"1" + b"}" * 200,
    "very deep": b"[" * 10**6,
    "digits": b'{"vocab_size": ' + b"9" * 10**5 + b"}",
    "empty": b"",
    "nul": b"\0",
    "null": b"null",
    "number": b"5",
    "text": b'"x"',
    "cut": b'{"a":',
}


def changed(settings: Any, path: str, value: object) -> Any:
    """Returns settings with another value at a path; objects on the way are made."""
    name, _, rest = path.partition(".")
    inner = settings.get(name) if isinstance(settings, dict) else None
    whole = settings if isinstance(settings, dict) else {}
    return whole | {name: changed(inner, rest, value) if rest else value}


def used(folder: Path) -> None:
    """Uses all settings of a folder."""
    opened = open_folder(folder)
    assert opened.context_length is None or opened.context_length > 0
    assert all(type(token) is int for token in opened.end)
    assert {type(opened.logits), type(opened.input_name("input_ids"))} == {str}
    genai_config(opened)
    model_type_beside(opened.model)
    for token in (start_token, lambda folder: Tokenizer(folder).end):
        with contextlib.suppress(ModelError):
            token(opened)
    with contextlib.suppress(ModelError):
        Tokenizer(opened).chat([{"role": "user", "content": "x"}])


def told(folder: Path) -> str:
    """Returns why a folder is refused; empty if it is not."""
    try:
        used(folder)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
@pytest.mark.parametrize("name", FIELDS)
def test_hostile_settings_are_refused_or_right(name: str, folder: Path) -> None:
    """Of each field that is read, and of whole files: the error names the file and the field."""
    if name != "genai_config.json":
        (folder / "genai_config.json").unlink()
    file = folder / name
    plain = json.loads(file.read_text()) if file.exists() else {}
    refused = 0
    with all_violations() as check:
        for number, path in enumerate(FIELDS[name]):
            for value in VALUES[number % ONE_IN :: ONE_IN]:
                file.write_text(json.dumps(changed(plain, path, value)))
                with check(f"{path} = {value!r:.60}"):
                    message = told(folder)
                    names = [f"'{part}' must be" for part in path.split(".")]
                    names += ["is missing", "surrogates not allowed", "Exceeds the limit"]
                    assert not message or (name in message and any(n in message for n in names))
                    refused += bool(message)
        for kind, content in CONTENTS.items():
            file.write_bytes(content)
            with check(kind), pytest.raises(ModelError, match=re.escape(str(file))):
                open_folder(folder)
        for text in ("\ufeff{}", "{}", " \n{}"):
            file.write_text(text)
            with check(text):
                used(folder)
    assert refused > len(FIELDS[name]) * 10 / ONE_IN


@pytest.mark.slow
@pytest.mark.optional("jinja2", "llm")
@pytest.mark.optional("tokenizers", "llm")
def test_templates_that_are_no_text(folder: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    with all_violations() as check:
        for name in ("latin-1", "utf-16", "gzip"):
            (folder / "chat_template.jinja").write_bytes(CONTENTS[name])
            with (
                check(name),
                pytest.raises(ModelError, match=r"template.jinja': not UTF-8: "),
            ):
                Tokenizer(open_folder(folder)).chat(chat)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ortops.graph.limits.LIMITS.metadata_bytes", 10**4)
            (folder / "chat_template.jinja").write_bytes(b"x" * 10**5)
            with check("long"), pytest.raises(ModelError, match=r"jinja' must have at most 10,000"):
                Tokenizer(open_folder(folder)).chat(chat)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("genai_config.json", '{"model": null}', "'model' must be an object, got None; correct it"),
        (
            "tokenizer_config.json",
            '{"chat_template": [1]}',
            "'chat_template' must be a string, or",
        ),
        (
            "config.json",
            '{"eos_token_id": [1e400]}',
            "'eos_token_id' must be an integer of 64",
        ),
        ("config.json", '{"a": 1, "a": 2}', "invalid JSON: it has 'a' twice; correct it"),
    ],
)
def test_what_is_wrong_with_settings(file: str, content: str, message: str, folder: Path) -> None:
    (folder / file).write_text(content)
    with pytest.raises(ModelError, match=rf"^file '{folder / file}': {message}"):
        open_folder(folder)
