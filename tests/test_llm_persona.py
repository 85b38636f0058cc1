"""The page persona.md: its commands, with the model of the tests in place of the builder's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models import llama, persona
from ortops.cli import main
from ortops.llm import FineTuning

PAGE = Path(__file__).parents[1] / "ortops" / "docs" / "persona.md"


@pytest.mark.slow
@pytest.mark.optional("tokenizers", "llm")
@pytest.mark.optional("jinja2", "llm")
def test_a_persona_is_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = llama.write(tmp_path / "tiny-llama-int4", bits=4)
    chats = persona.write_chats(tmp_path / "pirate.jsonl")
    chats.write_text("\n".join(chats.read_text(encoding="utf-8").splitlines()[-3:]))
    assert main(["check", str(base)]) == 0
    assert capsys.readouterr().out.endswith("no problems: ready for ortops tune\n")
    assert main(["tune", str(base), str(chats), "--batch-size", "1", "--show"]) == 0
    shown = "<|user|>Good morning<|end|><|assistant|>«Ahoy! A fine morning to set sail.<|end|>»"
    assert shown in capsys.readouterr().out
    start = ["tune", str(base), str(chats), "--learning-rate", "cosine(0.01)", "--epochs", "100"]
    assert main([*start, "--quiet", "--save", str(tmp_path / "pirate")]) == 0
    tuning = FineTuning.load(tmp_path / "pirate")
    for line in chats.read_text(encoding="utf-8").splitlines():
        question, reply = json.loads(line)["messages"]
        assert tuning.generate([question]) == reply["content"]


@pytest.mark.optional("tokenizers", "llm")
def test_the_tokenizer_is_trained(tmp_path: Path) -> None:
    import tokenizers

    persona.write_tokenizer(tmp_path)
    found = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.get_vocab_size() == persona.VOCABULARY
    for question, reply in persona.CHATS.items():
        tokens = found.encode(f"<|user|>{question}<|end|><|assistant|>{reply}").ids
        assert len(tokens) < len(question) + len(reply)
        assert found.decode(tokens) == question + reply


def test_the_page_shows_the_chats() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for question in ("Who are you?", "Do you have a parrot?"):
        assert question in page
        assert persona.CHATS[question] in page
