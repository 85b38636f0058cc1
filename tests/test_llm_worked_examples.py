"""The page tools_and_preferences.md: its commands, with its files, print what it says."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import ortops
from models import llama
from ortops.cli import main

PAGE = Path(__file__).parents[1] / "ortops" / "docs" / "tools_and_preferences.md"
NUMBERS = re.compile(r"loss (\S+)  [\d,.]+ samples/s  [\d.]+ s")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def printed(words: list[str], monkeypatch: Any) -> str:
    """Returns what a command of the page prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        if words[0] == "ortops":
            assert main(words[1:]) == 0
        else:
            monkeypatch.setattr(sys, "argv", words[1:])
            exec(compile(Path(words[1]).read_text(), words[1], "exec"), {"__name__": "__main__"})
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    llama.write("tiny-llama")
    (code,), (template,), (prompt,) = blocks("py"), blocks("jinja"), blocks("python")
    Path("serve.py").write_text(code)
    Path("tiny-llama/chat_template.jinja").write_text(template)
    for name, rows in zip(("tools", "replies", "pairs"), blocks("json"), strict=True):
        Path(f"{name}.jsonl").write_text(rows)
    calls = [
        each
        for block in blocks("console")
        for each in re.findall(r"\$ (.*)\n((?:[^$].*\n)*)", block)
    ]
    assert len(calls) == 9
    for call, said in calls:
        found = printed(shlex.split(call), monkeypatch)
        left_out = [re.escape(NUMBERS.sub("loss N", part)) for part in said.split("…\n")]
        form = r"(?:.*\n)*?".join(left_out) + r"\s*"
        assert re.fullmatch(form, NUMBERS.sub("loss N", found)), f"{call}:\n{found}"
        losses = iter(float(each) for each in NUMBERS.findall(found))
        for each in NUMBERS.findall(said):  # rounding differs between processors
            assert any(abs(loss - float(each)) < 0.05 * float(each) for loss in losses), call
    exec(prompt, {"ortops": ortops})
