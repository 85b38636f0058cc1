"""Each file that ortops reads, in hostile forms: errors name it, and nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from hostile_files import ALL
from test_fuzz import files, write_torch  # noqa: F401  a fixture
from training_models import affine

RUN = Path(__file__).with_name("hostile_files.py")


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes and no signal.alarm"),
    pytest.mark.optional("pyarrow", "tables"),
]

CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind != "checkpoint_torch"])
def test_hostile_files_are_refused_by_name(kind: str, files: Path, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "files"
    if kind == "chats":
        shutil.copytree(files / "llm", folder / "llm")
        (folder / kind).mkdir()
        (folder / kind / "data.jsonl").write_text(json.dumps(CHAT) + "\n" + json.dumps([1, 2]))
    elif kind == "config":
        (folder / kind).mkdir(parents=True)
        (folder / kind / "train.toml").write_text('model = "absent.onnx"\ndata = "absent.npz"\n')
    else:
        shutil.copytree(files / kind, folder / kind)
    check(folder, kind)


@pytest.mark.torch
def test_hostile_files_of_torch_are_refused_by_name(files: Path, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "files"
    shutil.copytree(files / "checkpoint_torch", folder / "checkpoint_torch")
    write_torch(folder / "checkpoint_torch")
    check(folder, "checkpoint_torch")


def check(folder: Path, kind: str) -> None:
    """Asserts that all hostile forms of the files of a kind are refused, or harmless."""
    onnx.save(affine(), folder / "npz.onnx")
    secret = folder.parent / "secret.json"
    secret.write_text('{"secret": 1}')
    done = subprocess.run(
        [sys.executable, str(RUN), str(folder), str(secret), kind],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    wrong = [line for line in lines if line[0] == "wrong"]
    assert not wrong, "\n".join(map(str, wrong))
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    assert sum(line[0] == "begun" for line in lines) >= 3
    assert secret.read_text() == '{"secret": 1}'
