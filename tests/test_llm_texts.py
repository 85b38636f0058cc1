"""Tokenizers, chat templates and rows that deceive, end the process, or never end."""

from __future__ import annotations

import base64
import gc
import importlib.metadata
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from chats import read_examples
from violations import all_violations

import ortops
from models import llama
from ortops.cli import main
from ortops.graph.limits import LIMITS
from ortops.llm import FineTuning, rendering
from ortops.llm.batches import joined
from ortops.llm.examples import chat
from ortops.llm.folder import open_folder
from ortops.llm.row_kinds import Comparisons, SequencePairs
from ortops.llm.tokenization import Tokenizer

pytestmark = [pytest.mark.optional("tokenizers", "llm"), pytest.mark.optional("jinja2", "llm")]

MARKS = "\ue000\ue001EVIL\ue001\ue000"
HEADER = "{{ '<|' + m.role + '|>' }}"
PLAIN = "{% for m in messages %}" + HEADER + "{{ m.content + eos_token }}{% endfor %}"
PLAIN += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"


def marked(block: str) -> str:
    """Returns a template that marks replies; the block has the reply as ``m.content``."""
    return (
        "{% for m in messages %}" + HEADER + "{% if m.role == 'assistant' %}" + block + "{% else %}"
        "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama.write(tmp_path_factory.mktemp("base"), layers=1)


@pytest.fixture(scope="module")
def plain(base: Path) -> FineTuning:
    """What tests share that change nothing of it."""
    return FineTuning(base, rank=1)


def files(folder: Path, **others: str) -> Path:
    """Writes a tokenizer and template, and no model; other files by their names without ending."""
    folder.mkdir()
    llama.write_tokenizer(folder)
    (folder / "model.onnx").write_bytes(b"")
    for name, text in others.items():
        ending = ".jinja" if name == "chat_template" else ".json"
        (folder / f"{name}{ending}").write_text(text, encoding="utf-8")
    return folder


def conversation(*texts: str) -> list[dict[str, str]]:
    """Returns a chat of a user and an assistant."""
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


# What a template does with a reply, as a block and as a function of Python.
BLOCKS = {
    "whole": ("{% generation %}{{ m.content }}{% endgeneration %}", str),
    "upper": ("{% generation %}{{ m.content | upper }}{% endgeneration %}", str.upper),
    "cut": ("{% generation %}{{ m.content[:4] }}{% endgeneration %}", lambda text: text[:4]),
    "json": ("{% generation %}{{ m.content | tojson }}{% endgeneration %}", json.dumps),
    "set": (
        "{% set c %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ c | upper }}",
        str.upper,
    ),
    "trim": (
        "{% set c %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}{{ c | trim }}",
        str.strip,
    ),
    "macro": (
        "{% macro f(t) %}{% generation %}{{t}}{% endgeneration %}{% endmacro %}{{ f(m.content) }}",
        str,
    ),
}


@pytest.mark.slow
def test_no_text_decides_what_is_trained(tmp_path: Path) -> None:
    texts = ["plain", MARKS, "\ue000" * 24, "{% generation %}x{% endgeneration %}", "«x»", "</s>"]
    with all_violations() as check:
        for name, (block, change) in BLOCKS.items():
            folder = files(tmp_path / name, chat_template=marked(block))
            tokenizer = Tokenizer(open_folder(folder))
            for text in texts:
                with check((name, text)):
                    messages = conversation(text, "yes " + text, text, text)
                    ((found, places),) = tokenizer.replies(messages).parts
                    expected = [change(each["content"]) for each in messages[1::2]]
                    if name == "json":
                        expected = [
                            json.dumps(e["content"], ensure_ascii=False) for e in messages[1::2]
                        ]
                    assert [found[slice(*place[:2])] for place in places] == expected
                    whole = "".join(
                        f"<|user|>{one['content']}<|end|><|assistant|>{two}"
                        for one, two in zip(messages[::2], expected, strict=True)
                    )
                    assert found == whole
        tokenizer = Tokenizer(open_folder(files(tmp_path / "plain", chat_template=PLAIN)))
        for text in texts:
            with check(("plain", text)):
                ((example,), missing, _) = chat(conversation(text, text), tokenizer, "assistant")
                assert not missing
                tokens, trained = example.tokens.tolist(), example.trained.tolist()
                whole = f"<|user|>{text}<|end|><|assistant|>{text}<|end|>"
                assert tokens == tokenizer.tokens(whole, special=False)
                count = len(tokenizer.tokens(f"{text}<|end|>", special=False))
                assert trained == [False] * (len(tokens) - count) + [True] * count


@pytest.mark.slow
@pytest.mark.optional("transformers", "export")
def test_masks_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    with all_violations() as check:
        for name in ("whole", "upper", "cut", "json"):
            folder = files(tmp_path / name, chat_template=marked(BLOCKS[name][0]))
            tokenizer = Tokenizer(open_folder(folder))
            theirs = PreTrainedTokenizerFast.from_pretrained(folder)
            for text in ("plain", MARKS, "«x»", "é 🙂"):
                with check((name, text)):
                    messages = conversation(text, text, "why?", "no " + text)
                    expected = theirs.apply_chat_template(
                        messages,
                        return_assistant_tokens_mask=True,
                        return_dict=True,
                        tokenize=True,
                    )
                    (example,), *_ = chat(messages, tokenizer, "assistant")
                    assert example.tokens.tolist() == expected["input_ids"]
                    assert example.trained.astype(int).tolist() == expected["assistant_masks"]


# ------------------------------------------------------------------------------------------ tokens


@pytest.mark.slow
def test_labels_are_trained_as_in_transformers(plain: FineTuning) -> None:
    row = {"input_ids": [65, 66, 67, 68], "labels": [-100, 70, -100, 72]}
    forms: list[Any] = [
        row,
        {name: np.array(value, np.int32) for name, value in row.items()},
        {name: tuple(map(np.int64, value)) for name, value in row.items()},
    ]
    for form in forms:
        ((example,),) = plain._batches.read([form], 9, "assistant")
        assert example.tokens.tolist() == row["input_ids"]
        assert example.labels.tolist() == row["labels"]
        (batch,) = plain._batches.of([(example,)], 1)
        assert batch["labels"].tolist() == [row["labels"]]
    logits = served_logits(plain, row["input_ids"])
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -(scores[0, 70] + scores[2, 72]) / 2
    np.testing.assert_allclose(plain.evaluate([row])["loss"], expected, rtol=1e-5)
    packed_row = joined([example, example])
    assert packed_row.labels.tolist() == row["labels"] * 2
    rows = (iter(row["input_ids"]) for _ in range(1))  # of a generator, the tokens of another
    assert plain._batches.read(rows, 9, "assistant")[0][0].tokens.tolist() == row["input_ids"]
    assert plain.show([row]) == "row 1: 4 tokens, 2 trained\nA«F»C«H»"
    pairs = [{"prompt": [65], "chosen": [66], "rejected": [67.0]}]
    with pytest.raises(ortops.FeedError, match=r"row 1 must have .*an integer, got 67.0"):
        Comparisons(plain._folder, lambda: plain.tokenizer, None).read(pairs, 9, "assistant")


def served_logits(tuning: FineTuning, tokens: list[int]) -> np.ndarray:
    """Returns the logits [time, words] that stock onnxruntime computes."""
    session = onnxruntime.InferenceSession(
        tuning._folder.path / "model.onnx", providers=["CPUExecutionProvider"]
    )
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), int)}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feeds[value.name] = np.zeros((1, llama.PAIRS, 0, llama.HIDDEN // llama.HEADS), "f4")
    return session.run(["logits"], feeds)[0][0]


def test_tokens_are_integers_of_the_vocabulary(plain: FineTuning) -> None:
    wrong: list[Any] = [
        *([65, 65.9], [65, 65.0], [65, True], [65, "66"], [65, None], [65, [66]], [65, -1]),
        *([65, llama.WORDS], [65, -100], [65, 2**70], [65, float("nan")]),
        *("123", b"123", {1: 2, 3: 4}, {65, 66}, 65, np.array([65.0, 66]), np.array([True, False])),
        *(np.array([[65, 66]]), np.array(65), np.array(["65", "66"]), np.array([65, None])),
    ]
    forms = {
        "list": lambda each: each,
        "input_ids": lambda each: {"input_ids": each},
        "labels": lambda each: {"input_ids": [65, 66], "labels": each},
    }
    with all_violations() as check:
        for name, form in forms.items():
            for each in wrong:
                if name == "labels" and isinstance(each, list) and each[1] == -100:
                    continue
                if name == "list" and isinstance(each, str | int | dict):
                    continue  # no list of tokens
                with check((name, each)), pytest.raises(ortops.FeedError, match=r"data: row 2 "):
                    plain.evaluate([[65, 66], form(each)])
        for labels in ([65], [65, 66, 67], [-99, 66]):
            row = {"input_ids": [65, 66], "labels": labels}
            with check(labels), pytest.raises(ortops.FeedError, match=r"data: row 1 "):
                plain.fit([row], progress=False)
    assert not plain.session.steps_done


def test_tokens_of_all_kinds_of_rows(plain: FineTuning, tmp_path: Path) -> None:
    folder = open_folder(files(tmp_path / "base", config='{"decoder_start_token_id": 1}'))
    sources = [
        {"input_ids": [1.5], "labels": [3]},
        {"input_ids": [1], "labels": [True]},
        {"input_ids": [1], "labels": [9]},
        {"input_ids": [1], "labels": [-1]},
        {"input_ids": [1], "labels": [3], "decoder_prefix": [2.0]},
        {"input_features": [["1", "2"]], "labels": [3]},
    ]
    pairs = [
        {"prompt": [1], "chosen": "2", "rejected": [3]},
        {"prompt": [1], "chosen": [2], "rejected": [9]},
        {"prompt": [True], "chosen": [2], "rejected": [3]},
        {"prompt": {1: 2}, "chosen": [2], "rejected": [3]},
    ]
    settings = (lambda: plain.tokenizer, 9)
    source = SequencePairs(SimpleNamespace(inputs={}), folder, *settings)  # type: ignore[arg-type]
    comparison = Comparisons(plain._folder, *settings)
    with all_violations() as check:
        for row in sources:
            with check(row), pytest.raises(ortops.FeedError, match=r"data: row 1 "):
                source.read([row], 9, "assistant")
        for row in pairs:
            with check(row), pytest.raises(ortops.FeedError, match=r"data: row 1 "):
                comparison.read([row], 9, "assistant")
        for prompt in ([65.5], [True], [llama.WORDS], [["a"]], [{"content": "x"}], {"role": "x"}):
            with check(prompt), pytest.raises(ortops.ArgumentError, match="prompt"):
                plain.generate(prompt)


# ------------------------------------------------------------------------------ tokenizer.json


def tokenizer_with(normalizer: object) -> str:
    """Returns a tokenizer.json of bytes with a normalizer."""
    return json.dumps(llama._tokenizer() | {"normalizer": normalizer})


def charsmap(content: bytes) -> object:
    """Returns the normalizer of SentencePiece, with the table of characters in it."""
    text = base64.b64encode(content).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def replaced(text: str, by: str) -> object:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


GROWING = {"type": "Sequence", "normalizers": [replaced("a", "a" * 1000)] * 6}
TOKENIZERS = {
    "asks for 8.6 GB": (charsmap(struct.pack("<I", 2**32 - 4) + bytes(16)), "ended with status"),
    "panics": (charsmap(struct.pack("<I", 8) + b"\xff" * 8), "not a tokenizer: index out of"),
    "grows": (GROWING, "ended with status"),
    "is wrong": (charsmap(b"\xff"), "not a tokenizer: Precompiled"),
}


@pytest.mark.slow
def test_no_tokenizer_ends_the_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with all_violations() as check:
        for name, (normalizer, message) in TOKENIZERS.items():
            folder = files(tmp_path / name, tokenizer=tokenizer_with(normalizer))
            with check(name), pytest.raises(ortops.ModelError, match=message) as error:
                Tokenizer(open_folder(folder))
            with check(f"the name of the file: {name}"):
                assert f"file '{folder / 'tokenizer.json'}'" in str(error.value)
    assert capfd.readouterr() == ("", "")  # not "panicked"


@pytest.mark.slow
def test_encoding_that_fails_is_blamed_on_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = {"type": "Sequence", "normalizers": [replaced("ß", "ß" * 1000)] * 6}
    folder = open_folder(files(tmp_path / "base", tokenizer=tokenizer_with(growing)))
    monkeypatch.setattr(LIMITS, "text_memory", 2**27)
    tokenizer = Tokenizer(folder)
    assert tokenizer.tokens("abc") == [97, 98, 99]
    with pytest.raises(ortops.ModelError, match=r"tokenizer.json': .*status -6.*134,\d+,\d+ bytes"):
        tokenizer.tokens("ß")
    assert tokenizer.tokens("abc") == [97, 98, 99]  # in another process
    rows = [{"text": "abc"}, {"text": "\ud800"}]
    with pytest.raises(ortops.FeedError, match="row 2: a text that is no Unicode"):
        read_examples(rows, lambda: tokenizer, train_on="all", max_length=9)
    for text in (None, 5, b"a", ["a"]):
        with pytest.raises(ortops.FeedError, match="row 1 must have"):
            read_examples([{"text": text}], lambda: tokenizer, train_on="all", max_length=9)


def test_a_panic_at_a_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tokenizer_with(TOKENIZERS["panics"][0])
    folder = open_folder(files(tmp_path / "base", tokenizer=broken))
    monkeypatch.setattr(LIMITS, "text_seconds", math.inf)  # in this process
    monkeypatch.setattr(rendering, "_PROBE", "")  # as if only other texts made it panic
    tokenizer = Tokenizer(folder)
    with pytest.raises(ortops.ModelError, match=r"tokenizer.json': its tokenizer: index out of"):
        tokenizer.tokens("a")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX's")
def test_a_fork_has_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    code = f"""if True:  # in a process without the threads of other tests
        import os
        from ortops.llm.folder import open_folder
        from ortops.llm.tokenization import Tokenizer

        tokenizer = Tokenizer(open_folder({str(files(tmp_path / "base"))!r}))
        child = os.fork()
        if not child:
            os._exit(tokenizer.tokens("b") != [98])
        assert tokenizer.tokens("a") == [97]
        assert os.waitpid(child, 0)[1] == 0
        assert tokenizer.tokens("a") == [97]
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_that_are_trusted_need_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_folder(files(tmp_path / "base"))
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(ortops.UnsupportedError, match=r"LIMITS.text_seconds to math.inf"):
        Tokenizer(folder)
    monkeypatch.setattr(LIMITS, "text_seconds", math.inf)
    tokenizer = Tokenizer(folder)
    ((text, places),) = tokenizer.replies(conversation("a", "b")).parts
    assert [text[slice(*place[:2])] for place in places] == ["b<|end|>"]
    assert tokenizer.text(tokenizer.tokens("abc")) == "abc"


# ------------------------------------------------------------------------------ templates

TEMPLATES = {
    "is large": ("{{ 'x'.center(3000000000) }}", "needs more than"),
    "is large as a constant": ("{{ 'x' | center(3000000000) }}", "needs more than"),
    "makes a large text": ("{{ 'x' | center(9000000) }}", "it makes a text of 9,000,000"),
    "has no end": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        r"did not end within 1 s; .*LIMITS.text_seconds",
    ),
    "has an error of syntax": ("{% for %}", "its chat template: Expected an expression"),
    "has a wrong name": ("{{ mesages[0] }}", "'mesages' is undefined"),
    "reaches for Python": ("{{ ''.__class__.__mro__ }}", "is unsafe"),
    "divides by 0": ("{{ 1 / 0 }}", "division by zero"),
    "calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "is deep": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
}


@pytest.mark.slow
def test_templates_have_limits_and_the_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "text_seconds", 1.0)
    rows = [{"messages": conversation("a", "b")}]
    with all_violations() as check:
        for name, (template, message) in TEMPLATES.items():
            folder = files(tmp_path / name, chat_template=template)
            tokenizer = Tokenizer(open_folder(folder))
            with check(name), pytest.raises(ortops.ModelError, match=message) as error:
                read_examples(rows, lambda each=tokenizer: each, train_on="all", max_length=9)
            with check(f"the name of the file: {name}"):
                assert f"file '{folder / 'chat_template.jinja'}'" in str(error.value)
    settings = json.dumps({"chat_template": "{% for %}"})
    folder = files(tmp_path / "settings", tokenizer_config=settings)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ortops.ModelError, match=r"tokenizer_config.json': its chat template"):
        Tokenizer(open_folder(folder)).chat(conversation("a"))


@pytest.mark.slow
def test_data_are_blamed_for_what_only_they_do(plain: FineTuning, tmp_path: Path) -> None:
    refusing = "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    refusing += (
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(open_folder(files(tmp_path / "base", chat_template=refusing)))
    right = {"messages": conversation("a", "b")}
    wrong: list[tuple[object, str]] = [
        (conversation("a", "b")[1:], "the chat template refuses it: roles must alternate"),
        ([{"role": "user"}], "the chat template fails|no attribute 'content'"),
        ([{"content": "a"}], "a message must have role and content"),
        (["a"], "a message must have role and content"),
        ([{"role": 5, "content": "a"}], "a message must have role and content"),
        (5, "must have messages"),
        (conversation("\ud800", "b"), "no Unicode"),
    ]
    concatenating = open_folder(files(tmp_path / "other", chat_template=PLAIN))
    other = Tokenizer(concatenating)
    with all_violations() as check:
        for messages, message in wrong:
            each = other if "fails" in message else tokenizer
            rows = [right, {"messages": messages}]
            with (
                check(messages),
                pytest.raises(ortops.FeedError, match=f"data: row 2.*({message})"),
            ):
                read_examples(rows, lambda each=each: each, train_on="assistant", max_length=9)
    with pytest.raises(ortops.ArgumentError, match=r"prompt: a part of a content must be a text"):
        plain.generate([{"role": "user", "content": ["a"]}])


@pytest.mark.slow
def test_threads_get_their_own_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(open_folder(files(tmp_path / "base")))
    texts = [chr(number) * 50 for number in range(65, 91)] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(tokenizer.tokens, texts))
    assert found == [[ord(text[0])] * 50 for text in texts]


@pytest.mark.slow
def test_one_process_for_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    start = subprocess.Popen.__init__

    def counted(self: Any, *arguments: Any, **named: Any) -> None:
        started.append(arguments)
        start(self, *arguments, **named)

    monkeypatch.setattr(subprocess.Popen, "__init__", counted)
    tokenizer = Tokenizer(open_folder(files(tmp_path / "base")))
    rows = [{"messages": conversation("a", "b")}, {"text": "a"}] * 20
    assert len(read_examples(rows, lambda: tokenizer, train_on="all", max_length=9)) == 40
    assert len(started) == 1
    process = tokenizer._child._process
    rows = tokenizer = None
    gc.collect()
    assert process.returncode is not None


def test_jinja_must_have_no_known_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "text_seconds", math.inf)
    tokenizer = Tokenizer(open_folder(files(tmp_path / "base")))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "3.1.5")
    with pytest.raises(ortops.OrtopsError, match=r"needs jinja2 3\.1\.6 or later, got 3\.1\.5"):
        tokenizer.chat(conversation("a"))


# ------------------------------------------------------------------------------ what is shown


@pytest.mark.slow
def test_what_is_shown_cannot_be_forged(
    base: Path, plain: FineTuning, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\x1b[31m«x»\x07\u202e\ue000"
    rows = [{"messages": conversation(text, "yes " + text)}]
    shown = plain.show(rows).splitlines()[1]
    assert shown.count("«") == shown.count("»") == 1
    assert shown.index("«") == shown.index("yes") - 1
    assert shown.endswith("<|end|>»")
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(rows[0])}\n")
    assert main(["tune", str(base), str(file), "--show"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[1].count("\\x1b[31m\\xabx\\xbb\\x07\\u202e\\ue000") == 2
    assert not set("\x1b\x07\u202e\ue000") & set(captured.out + captured.err)


@pytest.mark.slow
def test_the_log_says_each_thing_once(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = "(m.content | upper if m.role == 'assistant' and not loop.last else m.content)"
    changing = PLAIN.replace("m.content", changed)
    folder = Path(shutil.copytree(base, tmp_path / "base"))
    (folder / "chat_template.jinja").write_text(changing)
    file = tmp_path / "rows.jsonl"
    row = {"messages": conversation("a", "ab", "c", "d\x1b")}
    file.write_text(f"{json.dumps(row)}\n" * 7)
    tuning = FineTuning(folder, rank=1)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    for _ in range(2):
        tuning.evaluate(file)
    expected = "7 replies that the chat template changes in longer chats are rows of their own"
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [expected]

    command = ["tune", str(folder), str(file), "--show", "--rank", "1"]
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().err == f"{expected}\n"
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "added an adapter of rank 1" in err
    assert err.endswith(f"{expected}\n")
