"""What is trained of chats: masks against transformers, and what reaches the templates."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chats import (
    CHATS,
    FAMILIES,
    MARKS,
    TOKENIZERS,
    TOOLS,
    read_examples,
    said,
    template_of,
    tokenizer_of,
)
from violations import all_violations

import ortops
from models import llama
from ortops.cli import main
from ortops.graph.limits import LIMITS
from ortops.llm import FineTuning, row_kinds
from ortops.llm.folder import open_folder
from ortops.llm.row_kinds import Comparisons, Sequences
from ortops.llm.sequence_pairs import read_pair
from ortops.llm.tokenization import Tokenizer

pytestmark = [pytest.mark.optional("tokenizers", "llm"), pytest.mark.optional("jinja2", "llm")]

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BEGIN, END = "\ue0f0", "\ue0f1"


def folder_of(folder: Path, kind: str = "bytes", template: str = "") -> Path:
    """Writes a folder without a model that has one of the small tokenizers."""
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"")
    tokenizer_of(kind).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def opened(folder: Path, kind: str = "bytes", template: str = "") -> Tokenizer:
    return Tokenizer(open_folder(folder_of(folder, kind, template)))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs templates in this process, which is faster."""
    monkeypatch.setattr(LIMITS, "text_seconds", math.inf)


# ------------------------------------------------------------------------- against transformers


def plain_contents(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose contents transformers prints as it should: as text."""
    result = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        result.append({**message, "content": content or ""})
    return result


def spans_of(family: str, messages: list[dict[str, Any]], tools: Any) -> list[tuple[int, int]]:
    """Returns the characters between the places where a template has marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = template_of(family, BEGIN, END)
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **NAMES)
    found, removed = [], 0
    for place, letter in enumerate(text):
        if letter == BEGIN:
            found.append([place - removed])
        if letter == END:
            found[-1].append(place - removed)
        removed += letter in (BEGIN, END)
    return [(start, stop) for start, stop in found]


def excess_of(text: str, spans: Any, offsets: Any, found: Any, expected: Any) -> list[str]:
    """Returns what is trained, and neither expected nor allowed."""
    allowed = set()
    for start, stop in spans:
        allowed.update({start - 1} if text[start - 1] == " " else ())
        allowed.update({stop} if text[stop : stop + 1] == "\n" else ())
    return [
        text[i:j]
        for has, must, (i, j) in zip(found, expected, offsets, strict=True)
        if has and not must and not set(range(i, j)) <= allowed
    ]


@pytest.mark.slow
@pytest.mark.optional("transformers", "export")
def test_masks_are_those_of_transformers(tmp_path: Path, here: None) -> None:
    compare(tmp_path, TOKENIZERS, list(CHATS), list(FAMILIES))


@pytest.mark.slow
@pytest.mark.optional("transformers", "export")
def test_a_sample_of_the_masks(tmp_path: Path, here: None) -> None:
    families = ["Llama 2", "Mistral 3", "Phi 3", "DeepSeek R1", "Harmony"]
    compare(tmp_path, TOKENIZERS[:2], ["system", "code", "tool", "parts"], families)


def compare(folder: Path, kinds: Any, names: list[str], families: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = {
        kind: PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(kind), **NAMES)
        for kind in kinds
    }
    ours = {kind: opened(folder / kind, kind) for kind in kinds}
    with all_violations() as check:
        for family in families:
            for name in names:
                plain, tools = plain_contents(CHATS[name]), TOOLS if name == "tool" else None
                spans = spans_of(family, plain, tools)
                for marks in (MARKS, ("", "")):
                    first = ours[kinds[0]]
                    first._source = template_of(family, *marks)
                    with check((family, name, bool(marks[0]))):
                        (text, places), *others = first.replies(CHATS[name], {"tools": tools}).parts
                        assert not others
                    masks = {}
                    for kind in kinds:
                        with check((family, name, bool(marks[0]), kind)):
                            expected = theirs[kind].apply_chat_template(
                                plain,
                                chat_template=template_of(family, *MARKS),
                                tools=tools,
                                return_assistant_tokens_mask=True,
                                return_dict=True,
                                tokenize=True,
                            )
                            tokens, found = ours[kind].tokens_in(text, places)
                            assert tokens == expected["input_ids"]
                            masks[kind] = found
                            shown = theirs[kind].convert_ids_to_tokens(tokens)
                            mask = expected["assistant_masks"]
                            lost = [
                                one
                                for one, has, must in zip(shown, found, mask, strict=True)
                                if must and not has
                            ]
                            assert not lost
                            whole = "bytes" if kind.startswith("bytes, trim") else kind
                            offsets = tokenizer_of(whole).encode(text, add_special_tokens=False)
                            excess = excess_of(text, spans, offsets.offsets, found, mask)
                            assert not excess
                    with check((family, name, "trimmed offsets")):
                        assert masks[TOKENIZERS[0]] == masks[TOKENIZERS[1]]


# ------------------------------------------------------------------------- what reaches templates


def shown(tokenizer: Tokenizer, row: Any, train_on: str = "assistant") -> list[str]:
    """Returns the examples of a row as text, with marks around what is trained."""
    found = []
    for example in read_examples([row], lambda: tokenizer, train_on, 4096):
        text, before = "", False
        for token, has in zip(example.tokens.tolist(), example.trained.tolist(), strict=True):
            text += ("«" if has else "»") * (has != before) + tokenizer.text([token], special=True)
            before = has
        found.append(text + "»" * before)
    return found


WHOLE = (
    "{{ tools | tojson }}|{{ documents | tojson }}|{{ mood }}{% for m in messages %}"
    "{{ '<s>' + m.role + ' ' }}{% if m.content is none %}none:{% endif %}{{ m.content }}"
    "{{ '~' ~ m.content ~ '~' }}{{ m.content | trim }}{{ (m.content | string)[:0] }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{{ c.function.arguments }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)
CALL = {"function": {"name": "f", "arguments": '{"x": null}', "strict": None}, "type": None}


def test_what_a_row_has_beside_its_messages(tmp_path: Path, here: None) -> None:
    tokenizer = opened(tmp_path / "base", template=WHOLE)
    row = {
        "messages": [
            {"role": "user", "content": "a", "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
        ],
        "tools": [{"name": "f", "strict": None, "properties": {"x": {"type": "null"}, "y": None}}],
        "documents": [{"title": "t", "url": None}],
        "chat_template_kwargs": {"mood": "calm", "self": 1, "begin_reply": True, "none": None},
    }
    expected = (
        '[{"name": "f", "properties": {"x": {"type": "null"}}}]|[{"title": "t"}]|calm'
        "<s>user a~a~a</s><s>assistant «none:~~"
        '{"name": "f", "arguments": {"x": null}}{"x": null}</s>»'
    )
    assert shown(tokenizer, row) == [expected]
    assert shown(tokenizer, row, "all") == [f"«{expected.replace('«', '')}"]
    texts = {name: json.dumps(row[name]) for name in ("tools", "documents")}
    assert shown(tokenizer, row | texts) == [expected]
    answers = {"chosen": row["messages"][1:], "rejected": said("b", "c")[1:]}
    pair = {**row, "prompt": row["messages"][:1], **answers}
    folder: Any = None
    ((chosen, _),) = Comparisons(folder, lambda: tokenizer, None).read([pair], 999, "assistant")
    (example,) = read_examples([row], lambda: tokenizer, "assistant", 999)
    assert chosen.labels.tolist() == example.labels.tolist()


TAKEN = (
    "{{ tools | tojson }}|{{ documents | tojson }}|{{ mood }}{% for m in messages %}"
    "{{ '<s>' + m.role + ' ' + m.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)


def test_a_prompt_has_what_a_row_has_beside_its_messages(
    tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is how the row begins that is trained."""
    base = llama.write(tmp_path / "base")
    (base / "chat_template.jinja").write_text(TAKEN)
    tuning = FineTuning(base, 1)
    found: list[list[int]] = []

    def continued(tokens: list[int], *settings: Any) -> list[int]:
        found.append(tokens)
        return []

    monkeypatch.setattr(tuning._server, "continued", continued)
    chat, kinds = said("a", "b"), ("tools", "documents", "chat_template_kwargs")
    columns = {name: [each[name] for each in chat[:1]] for name in ("role", "content")}
    given = (TOOLS, [{"title": "t", "url": None}], {"mood": "calm"})
    more = dict(zip(kinds, given, strict=True))
    for some in ({}, more, *({name: more[name]} for name in kinds)):
        (example,) = read_examples(
            [{"messages": chat, **some}], lambda: tuning.tokenizer, "assistant", 999
        )
        before = example.tokens[: int(example.trained.argmax())].tolist()
        none = dict.fromkeys(kinds)
        prompts: Any = (chat[:1], tuple(chat[:1]), np.array(chat[:1]), columns)
        for prompt in prompts:
            tuning.generate(prompt, **{**none, **some})
        tuning.generate(
            chat[:1], **{n: json.dumps(v) if n != kinds[2] else v for n, v in some.items()}
        )
        assert found == [before] * 5, some
        found.clear()
    with all_violations() as check:
        for prompt, some, message in (
            ("a", {"tools": TOOLS}, "tools need a chat, got 'a'"),
            ([65], {"documents": [], "tools": []}, "tools and documents need a chat, got .65"),
            (chat, {"tools": ["f"]}, "tools must be a list of dicts, got .'f'"),
            (chat, {"tools": TOOLS[0]}, "tools must be a list of dicts, got .'type': "),
            (chat, {"chat_template_kwargs": ["x"]}, "chat_template_kwargs must be names"),
            (chat, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs must be"),
        ):
            with check(some), pytest.raises(ortops.ArgumentError, match=message):
                tuning.generate(prompt, **some)
            if prompt is chat:
                with check(("row", some)), pytest.raises(ortops.FeedError, match=message):
                    tuning.fit([{"messages": chat, **some}], progress=False)


def test_contents_in_parts(tmp_path: Path, here: None) -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"text": "b"}]
    text = "{% for m in messages %}{{ '<s>' + m.content + '</s>' }}{% endfor %}"
    printed = text.replace("' + m.content + '", "' }}{{ m.content }}{{ '")
    only = "{% for m in messages %}<s>{% for p in m.content %}{{ p.text + '.' }}{% endfor %}"
    templates = {"text": text, "printed": printed, "only parts": only + "</s>{% endfor %}"}
    with all_violations() as check:
        for name, template in templates.items():
            tokenizer = opened(tmp_path / name, template=template)
            joined = "a.b." if name == "only parts" else "ab"
            expected = [f"<s>{joined}</s>«<s>{joined}</s>»"]
            with check(name):
                assert shown(tokenizer, {"messages": said(parts, parts)}) == expected
            for part in ({"type": "image", "url": "x"}, {"type": "text"}, "a", {"text": 3}):
                wrong = {"messages": said("a", [part])}
                message = "row 1: a part of a content must be a text, got "
                with check((name, part)), pytest.raises(ortops.FeedError, match=message):
                    shown(tokenizer, wrong)


def test_weights_of_messages(tmp_path: Path, here: None) -> None:
    messages = said("a", "b", "c", "d")
    with all_violations() as check:
        for marks in (("", ""), MARKS):
            template = template_of("ChatML", *marks)
            tokenizer = opened(tmp_path / str(bool(marks[0])), template=template)
            expected = shown(tokenizer, {"messages": messages})[0]
            for weights in ((1, 0), (0, 1), (1.0, None), (True, False)):
                weighed = [dict(each) for each in messages]
                weighed[1]["weight"], weighed[3]["weight"] = weights
                kept = expected
                for text, weight in zip("bd", weights, strict=True):
                    part = next(e for e in expected.split("«") if e.startswith(text)).split("»")[0]
                    kept = kept if weight in (1, None) else kept.replace(f"«{part}»", part)
                with check((marks, weights)):
                    assert shown(tokenizer, {"messages": weighed}) == [kept]
            with check((marks, "last")):
                found = shown(tokenizer, {"messages": messages}, "completion")
                assert [each.split("«")[1][0] for each in found] == ["d"]
            for weight in (2, 0.5, "0"):
                wrong = [*messages[:3], {**messages[3], "weight": weight}]
                message = "row 1: the weight of a message must be 0 or 1, got"
                with check((marks, weight)), pytest.raises(ortops.FeedError, match=message):
                    shown(tokenizer, {"messages": wrong})


def test_wrong_settings_of_templates(tmp_path: Path, here: None) -> None:
    tokenizer = opened(tmp_path / "base", template=WHOLE)
    wrong = ({"messages": []}, {"add_generation_prompt": True}, "x", ["x"])
    with all_violations() as check:
        for each in wrong:
            row = {"messages": said("a", "b"), "chat_template_kwargs": each}
            with check(each), pytest.raises(ortops.FeedError, match="chat_template_kwargs must be"):
                shown(tokenizer, row)


def test_tool_calls_of_other_forms(tmp_path: Path, here: None) -> None:
    template = "{% for m in messages %}{{ (m.tool_calls or 0) | tojson }}{{ messages | length }}"
    tokenizer = opened(tmp_path / "base", template=template + "{% endfor %}")
    with all_violations() as check:
        for calls in (3, "f", ["f"], [{"function": "f"}], {"f": 1}, [[]], [{"arguments": "[1]"}]):
            messages = said("a", "b", "c", "d")
            messages[1]["tool_calls"] = calls
            with check(calls):
                assert json.dumps(calls) in tokenizer.replies(messages).parts[0][0]


def test_the_template_for_tools(tmp_path: Path, here: None) -> None:
    folder = folder_of(tmp_path / "base")
    named = [
        {"name": "default", "template": "{% for m in messages %}<s>{{ m.content }}{% endfor %}"},
        {"name": "tool_use", "template": "{% for m in messages %}!{{ m.content }}{% endfor %}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({**NAMES, "chat_template": named}))
    tokenizer = Tokenizer(open_folder(folder))
    row = {"messages": said("a", "b")}
    assert shown(tokenizer, {**row, "tools": TOOLS}) == ["!a«!b»"]
    assert shown(tokenizer, row) == ["<s>a«<s>b»"]


def test_the_template_for_tools_in_a_file_of_its_own(tmp_path: Path, here: None) -> None:
    """transformers writes templates with names into a folder, which is saved, too."""
    base = llama.write(tmp_path / "base", layers=1)
    text = "{% for m in messages %}~{{ m.content }}{% endfor %}"
    plain, tools = (text.replace("~", letter) for letter in "#!")
    (base / "chat_template.jinja").write_text(plain)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/tool_use.jinja").write_text(tools)
    tuning = FineTuning(base, 1)
    tuning.save(tmp_path / "tuned")
    row = {"messages": said("a", "b")}
    for found in (tuning, FineTuning.load(tmp_path / "tuned")):
        assert shown(found.tokenizer, row) == ["#a«#b»"]
        assert shown(found.tokenizer, {**row, "tools": TOOLS}) == ["!a«!b»"]
        assert shown(found.tokenizer, row) == ["#a«#b»"]
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("x")
    (base / "additional_chat_templates/tool_use.jinja").unlink()
    (base / "additional_chat_templates").rmdir()
    (base / "additional_chat_templates").symlink_to(tmp_path / "outside")
    with pytest.raises(ortops.ModelError, match="is a link that leads out"):
        FineTuning(base, 1).save(tmp_path / "again")
    assert not list((tmp_path / "again").rglob("secret"))


def test_json_in_templates(tmp_path: Path, here: None) -> None:
    value = {"b": "<é>", "a": [1, None]}
    forms = {
        "tojson": json.dumps(value, ensure_ascii=False),
        "tojson(ensure_ascii=True)": json.dumps(value),
        "tojson(True, 2)": json.dumps(value, indent=2),
        "tojson(False, None, (',', ':'), True)": '{"a":[1,null],"b":"<é>"}',
        "tojson(sort_keys=True, separators=(',', ':'))": '{"a":[1,null],"b":"<é>"}',
    }
    tokenizer = opened(tmp_path / "base")
    with all_violations() as check:
        for form, expected in forms.items():
            tokenizer._source = f"{{{{ messages[0].content | {form} }}}}"
            with check(form):
                assert tokenizer.chat([{"role": "user", "content": value}]) == expected
        tokenizer._source = "{% for m in messages %}{% break %}{% endfor %}{{ strftime_now('%%') }}"
        with check("others"):
            assert tokenizer.chat(said("a")) == "%"


# ------------------------------------------------------------------------- reasoning

REASONING = said("a", "<think>\nso\n</think>\n\nb", "c", "<think>\nno\n</think>\n\nd")


def test_earlier_reasoning_is_a_row_of_its_own(
    tmp_path: Path, here: None, caplog: pytest.LogCaptureFixture
) -> None:
    fields = [
        {**m, "content": m["content"][-1], "reasoning_content": m["content"][8:10]}
        if m["role"] == "assistant"
        else m
        for m in REASONING
    ]
    first, last = "<think>\nso\n</think>\n\nb<|im_end|>", "<think>\nno\n</think>\n\nd<|im_end|>"
    begin = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for marks, end in ((("", ""), "\n»"), (MARKS, "»\n")):
        tokenizer = opened(tmp_path / str(len(marks[0])), template=template_of("Qwen 3", *marks))
        for messages in (REASONING, fields):
            caplog.clear()
            whole, own = shown(tokenizer, {"messages": messages})
            assert own == f"{begin}«{first}\n»"
            assert whole == (
                f"{begin}«b<|im_end|>{end}<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
                f"«{last}{end}"
            )
            assert [record.message for record in caplog.records] == [
                "1 replies that the chat template changes in longer chats are rows of their own"
            ]
        weighed = [{**REASONING[0]}, {**REASONING[1], "weight": 0}, *REASONING[2:]]
        assert len(shown(tokenizer, {"messages": weighed})) == 1
        assert len(shown(tokenizer, {"messages": REASONING}, "completion")) == 1
        assert len(shown(tokenizer, {"messages": said("a", "b", "c", "d")})) == 1  # nothing is lost


def test_a_prompt_that_opens_reasoning(
    tmp_path: Path, here: None, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = opened(tmp_path / "base", template=template_of("DeepSeek R1"))
    assert shown(tokenizer, {"messages": said("a", "<b>", "c", "<think>x</think>d")}) == [
        "<s><|User|>a<|Assistant|>«<b></s>»<|User|>c<|Assistant|>«d</s>»"
    ]
    assert [record.message for record in caplog.records] == [
        "1 rows have replies without '<think>\\n', with which generation begins"
    ]
    kept = "{% for m in messages %}{{ '<s>' + m.role + ':' + m.content + '</s>' }}{% endfor %}"
    kept += "{% if add_generation_prompt %}{{ '<s>assistant:<think>' }}{% endif %}"
    tokenizer = opened(tmp_path / "kept", template=kept)
    caplog.clear()
    found = shown(tokenizer, {"messages": said("a", "<think>so</think>b", "c", "<thin")})
    assert found == [
        "<s>user:a</s><s>assistant:<think>«so</think>b</s>»<s>user:c</s><s>assistant:«<thin</s>»"
    ]


def test_replies_around_results_of_tools(tmp_path: Path, here: None) -> None:
    """Gemma 4 writes a result into the turn, and Harmony drops what its prompt still has."""
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    chat = [*said("a"), called, {"role": "tool", "content": "21"}, *said("", "Yes.")[1:]]
    inside = (
        "{% for m in messages if m.role != 'tool' %}{{ '<s>' + m.role + ':' }}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}"
        "{% for r in messages if r.role == 'tool' %}{{ '<r>' + r.content + '</r>' }}{% endfor %}"
        "{% endfor %}{{ m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
    )
    tokenizer = opened(tmp_path / "inside", template=inside)
    begin = "<s>user:a</s><s>assistant:"
    assert shown(tokenizer, {"messages": chat}) == [
        f"{begin}<call>f</call><r>21</r>«I look.</s>»<s>assistant:«Yes.</s>»",
        f"{begin}«<call>f</call>I look.</s>»",
    ]
    dropped = (
        "{% for m in messages %}{{ '<s>' + m.role }}"
        "{% if m.tool_calls and messages[-1].role != 'assistant' or loop.last and m.tool_calls %}"
        "{{ '(' + m.content + ')' }}{% elif not m.tool_calls %}{{ ' ' + m.content }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ ' to ' + c.function.name }}{% endfor %}"
        "{{ ' of ' + messages[1].tool_calls[0].function.name if m.role == 'tool' }}"
        "{{ '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant' }}{% endif %}"
    )
    tokenizer = opened(tmp_path / "dropped", template=dropped)
    begin = "<s>user a</s><s>assistant"
    assert shown(tokenizer, {"messages": chat}) == [
        f"{begin} to f</s><s>tool 21 of f</s><s>assistant« Yes.</s>»",
        f"{begin}«(I look.) to f</s>»",
    ]


# ------------------------------------------------------------------------- end tokens


def test_an_end_that_the_tokenizer_appends(tmp_path: Path, here: None) -> None:
    from tokenizers import Tokenizer as Trained
    from tokenizers.processors import TemplateProcessing

    template = template_of("ChatML")
    folder = folder_of(tmp_path / "base", template=template)
    trained = Trained.from_file(str(folder / "tokenizer.json"))
    special = [("<s>", 0), ("</s>", 1)]
    trained.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=special)
    trained.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(open_folder(folder))
    assert tokenizer.text(tokenizer.tokens("a"), special=True) == "<s>a</s>"
    assert shown(tokenizer, {"text": "a"}) == ["«<s>a</s>»"]
    assert shown(tokenizer, {"text": "a</s>"}) == ["«<s>a</s></s>»"]  # the text's own
    assert shown(tokenizer, {"prompt": "a", "completion": "b"}) == ["<s>a«b</s>»"]
    assert shown(tokenizer, {"prompt": "", "completion": "b"}) == ["<s>«b</s>»"]
    plain = shown(tokenizer, {"messages": said("a", "b")})
    assert "</s>" not in plain[0]


# ------------------------------------------------------------------------- kinds of rows


def test_a_prompt_is_what_both_answers_begin_with(tmp_path: Path, here: None) -> None:
    """As in TRL, where rows have no prompt: texts like those of HH-RLHF, and chats."""
    tokenizer = opened(tmp_path / "base", template=template_of("ChatML"))
    folder: Any = SimpleNamespace(has_tokenizer=True)
    kind = Comparisons(folder, lambda: tokenizer, None)

    def read(row: dict[str, Any]) -> list[str]:
        ((chosen, rejected),) = kind.read([row], 99, "assistant")
        return [kind._marked(each) for each in (chosen, rejected)]

    start = "\n\nHuman: a\n\nAssistant:"
    texts = {"chosen": f"{start} b c", "rejected": f"{start} d"}
    apart = {"prompt": start, "chosen": " b c", "rejected": " d"}
    assert read(texts) == read(apart)
    assert read(texts) == [f"{start}«{reply}</s>»" for reply in (" b c", " d")]
    inside = read({"chosen": "a b", "rejected": "a bc"})  # one begins as the other
    assert inside == read({"prompt": "a b", "chosen": "", "rejected": "c"})
    first, early, late = said("a", "b"), said("c", "d"), said("c", "e")
    other = said("a", "x")
    assert read({"chosen": [*first, *early], "rejected": [*first, *late]}) == read(
        {"prompt": [*first, early[0]], "chosen": early[1:], "rejected": late[1:]}
    )
    marked = read({"chosen": [*first, *early], "rejected": [*other, *early]})
    assert [each.count("«") for each in marked] == [2, 2]
    behind = {"chosen": [first[1], *early], "rejected": [other[1], *early]}
    assert read({"prompt": first[:1], **behind}) == marked
    whole = shown(tokenizer, {"messages": [*first, *early]})
    assert marked[:1] == whole
    with pytest.raises(ortops.FeedError, match="texts without prompt must begin with the same"):
        read({"chosen": "a", "rejected": "b"})
    changing = tmp_path / "changing"
    tokenizer = opened(changing, template=CHANGING)
    with pytest.raises(ortops.FeedError, match="leave out what follows the first reply that diff"):
        read({"chosen": [*first, *early], "rejected": [*other, *early]})


CHANGING = (
    "{% for m in messages %}{{ m.role }} "
    "{{ m.content if loop.last or m.role == 'user' else 'gone' }}|{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def test_chats_that_other_libraries_write(
    tmp_path: Path, here: None, caplog: pytest.LogCaptureFixture
) -> None:
    """ShareGPT's weights and system, whole chats beside their prompt, and masks of tokens."""
    tokenizer = opened(tmp_path / "base", template=template_of("ChatML"))
    user, reply = said("a", "b")
    system = {"role": "system", "content": "s"}
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    (plain,) = shown(tokenizer, {"messages": [user, reply]})
    (led,) = shown(tokenizer, {"messages": [system, user, reply]})
    more = [*turns, *({**turn, "weight": 0} for turn in turns)]
    weighed = plain + plain.replace("«", "").replace("»", "")
    with all_violations() as check:
        for row, expected in (
            ({"conversations": more}, weighed),
            ({"conversations": [user, reply]}, plain),
            ({"messages": turns}, plain),
            ({"messages": json.dumps([user, reply])}, plain),
            ({"system": "", "conversations": turns}, plain),
            ({"system": "s", "conversations": turns}, led),
            ({"system": "s", "messages": [user, reply]}, led),
            ({"system": "other", "messages": [system, user, reply]}, led),
            ({"system": "s", "instruction": "a", "input": "", "output": "b"}, led),
            ({"prompt": [system, user], "completion": "b"}, led),
            ({"prompt": "a", "completion": [system, user, reply]}, led),
        ):
            with check(row):
                assert shown(tokenizer, row) == [expected]
        for row, message in (
            ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history is not read"),
            ({"system": 3, "messages": [user, reply]}, "system must be a text, got 3"),
            ({"messages": said("a", float("nan"))}, "content of a message must be a text, got nan"),
            ({"query": "a", "reply": "b"}, "no 'text'; if it has another name, give columns="),
            ({"messages": "[1"}, "data: row 1 must have messages"),
        ):
            with check(row), pytest.raises(ortops.FeedError, match=message):
                shown(tokenizer, row)
        folder: Any = None
        read = Comparisons(folder, lambda: tokenizer, None).read
        answers = {"chosen": said("", "b")[1:], "rejected": said("", "c")[1:]}
        (expected,) = read([{"prompt": [system, user], **answers}], 99, "assistant")
        whole = {name: [system, user, *turns] for name, turns in answers.items()}
        texts = {name: turns[0]["content"] for name, turns in answers.items()}
        for row in (
            whole,
            {"prompt": "a", **whole},
            {"prompt": [system, user], **whole},
            {"system": "s", "prompt": "a", **answers},
            {"prompt": [system, user], **texts},
            {"prompt": [system, user], **{name: turns[0] for name, turns in answers.items()}},
        ):
            with check(("preference", row)):
                (found,) = read([row], 99, "assistant")
                for one, other in zip(found, expected, strict=True):
                    assert one.tokens.tolist() == other.tokens.tolist()
                    assert one.labels.tolist() == other.labels.tolist()
    caplog.clear()
    rows: Any = [{"messages": said("a", "b")}, {"messages": [{"role": "gpt", "content": "b"}]}]
    assert len(read_examples(rows, lambda: tokenizer, "assistant", 99)) == 1
    assert caplog.records[-1].message == (
        "1 rows have no message of the role 'assistant', or only those of weight 0"
    )


def test_masks_of_tokens(tmp_path: Path) -> None:
    """Padding is left out, and masks of TRL say which tokens are trained."""
    ids = {"input_ids": [0, 5, 6, 7, 0]}
    for row, tokens, labels in (
        ({"attention_mask": [0, 1, 1, 1, 0]}, [5, 6, 7], [5, 6, 7]),
        ({"completion_mask": [0, 0, 1, 1, 1]}, ids["input_ids"], [-100, -100, 6, 7, 0]),
        ({"assistant_masks": [0, 0, 1, 0, 1]}, ids["input_ids"], [-100, -100, 6, -100, 0]),
        (
            {"attention_mask": [0, 1, 1, 1, 0], "completion_mask": [0, 0, 1, 1, 0]},
            [5, 6, 7],
            [-100, 6, 7],
        ),
    ):
        (example,) = read_examples([{**ids, **row}], lambda: None, "assistant", 99)
        assert (example.tokens.tolist(), example.labels.tolist()) == (tokens, labels)
    source, _ = read_pair(
        {**ids, "attention_mask": [1, 1, 1, 1, 0], "labels": [1]}, None, None, None
    )
    assert source.tolist() == [0, 5, 6, 7]
    for wrong in ([0, 1], [2] * 5):
        with pytest.raises(ortops.FeedError, match="row 1 must have"):
            read_examples([{**ids, "attention_mask": wrong}], lambda: None, "assistant", 99)


def test_rows_in_the_forms_of_recipes(tmp_path: Path, here: None) -> None:
    chats = opened(tmp_path / "chats", template=template_of("Zephyr"))
    texts = opened(tmp_path / "texts")
    alpaca = {"instruction": "a", "input": "b", "output": "c"}
    trl = {"prompt": said("z", "y", "a"), "completion": said("", "c")[1:]}
    forms = {
        "Alpaca": (alpaca, "a\n\nb"),
        "Alpaca with its text": (alpaca | {"text": "a b c"}, "a\n\nb"),
        "Alpaca without input": (alpaca | {"input": ""}, "a"),
        "Alpaca of two columns": ({"instruction": "a", "output": "c", "input": None}, "a"),
        "question and answer": ({"question": "a", "answer": "c"}, "a"),
        "messages": ({"messages": said("a", "c")}, "a"),
        "one message": ({"prompt": said("a"), "completion": trl["completion"]}, "a"),
        "a prompt as text": ({"prompt": "a", "completion": trl["completion"]}, "a"),
    }
    with all_violations() as check:
        for name, (row, prompt) in forms.items():
            with check(name):
                expected = f"<|user|>\n{prompt}</s>\n<|assistant|>\n«c</s>\n»"
                assert shown(chats, row) == [expected]
            if "messages" not in row and isinstance(row.get("completion", ""), str):
                with check((name, "without a template")):
                    assert shown(texts, row) == [f"{prompt}«c</s>»"]
        with check("only completions are trained"):
            (found,) = shown(chats, trl)
            assert found.count("«") == 1
            assert found.endswith("<|assistant|>\n«c</s>\n»")
            assert shown(chats, trl, "all")[0].startswith("«")


@pytest.mark.parametrize("held", [0, 999999])
def test_rows_of_files_are_those_in_memory(
    held: int, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_kinds, "_HELD", held)
    tokenizer = opened(tmp_path / "base", template=template_of("Qwen 3"))
    rows = [{"question": f"is {n}, \n or é?", "answer": "yes" * (n % 5 + 1)} for n in range(9)]
    lines = "".join(f"{json.dumps(row)}\n\n" for row in rows)
    table = "question,answer\n" + "".join('"{question}","{answer}"\n'.format(**row) for row in rows)
    texts = {"a.jsonl": lines, "a.txt": lines, "list.json": json.dumps(rows), "lines.json": lines}
    texts |= {"bom.json": f"\ufeff{texts['list.json']}", "bom.jsonl": f"\ufeff{lines}"}
    texts["list.jsonl"] = json.dumps(rows, indent=1)
    parts = {"f/2.jsonl": lines[: lines.index("\n\n") + 2], "f/d/3.csv": table, "f/x.md": "no"}
    for name, text in {**texts, "a.csv": table, **parts}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def read(data: Any) -> list[list[int]]:
        return [e.labels.tolist() for e in read_examples(data, lambda: tokenizer, "assistant", 99)]

    expected = read(rows)
    with all_violations() as check:
        for name in (*texts, "a.csv"):
            with check(name):
                assert read(tmp_path / name) == expected
        with check("folder"):
            assert read(tmp_path / "f") == [expected[0], *expected]
        with check("tokens in a .json file"):
            (tmp_path / "tokens.json").write_text("[1, 2, 3]\n[4, 5]\n")
            assert read(tmp_path / "tokens.json") == [[1, 2, 3], [4, 5]]
        (tmp_path / "empty").mkdir()
        with check("empty"), pytest.raises(ortops.FeedError, match="has no file of JSON"):
            read(tmp_path / "empty")


@pytest.mark.slow
@pytest.mark.optional("pyarrow", "tables")
def test_rows_of_parquet_are_those_in_memory(tmp_path: Path, here: None) -> None:
    import pyarrow
    import pyarrow.parquet

    tokenizer = opened(tmp_path / "base", template=template_of("ChatML"))
    tools = [{"name": "f", "parameters": {"x": {"type": "string"}}}]
    rows = [
        {"messages": CHATS["tool"], "tools": TOOLS},
        {"messages": said("a", "b"), "tools": tools},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found, expected = (
        [e.labels.tolist() for e in read_examples(data, lambda: tokenizer, "assistant", 9999)]
        for data in (tmp_path / "a.parquet", rows)
    )
    assert found == expected


def test_columns_that_mean_nothing_are_said(caplog: pytest.LogCaptureFixture) -> None:
    folder: Any = None
    kind = Sequences(folder, lambda: pytest.fail("a tokenizer"), 9)
    rows = [{"input_ids": [1, 2], "id": 7}, {"input_ids": [3, 4], "source": "web", "note": None}]
    kind.read(rows, 99, "assistant")
    assert "2 columns of rows are not read: id, source" in caplog.messages
    caplog.clear()
    kind.read(rows, 99, "assistant", {"input_ids": "input_ids"})
    assert not caplog.messages


def test_columns_by_other_names(tmp_path: Path, here: None) -> None:
    tokenizer = opened(tmp_path / "base", template=WHOLE)
    folder: Any = None
    kind = Sequences(folder, lambda: tokenizer, None)
    rows = [{"q": "a", "a": "b", "text": "no", "messages": "no"}]
    columns = {"prompt": "q", "completion": "a"}
    ((example,),) = kind.read(rows, 99, "assistant", columns)
    (expected,) = read_examples(
        [{"prompt": "a", "completion": "b"}], lambda: tokenizer, "assistant", 99
    )
    assert example.labels.tolist() == expected.labels.tolist()
    with pytest.raises(ortops.FeedError, match="a row has no column 'x'; known names: 'q', 'a'"):
        kind.read(rows, 99, "assistant", {"prompt": "x"})
    for wrong in ({"promt": "q"}, {"prompt": 3}):
        with pytest.raises(ortops.ArgumentError, match="columns must be the names of columns"):
            kind.read(rows, 99, "assistant", wrong)


# ------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = llama.write(tmp_path_factory.mktemp("base"), layers=1)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% set text = m.content %}"
        "{% if not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
        "{{ '<|' + m.role + '|>' + text + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return folder


MANY = [{"messages": said(f"{n}", "<think>a</think>b", "c", f"d{n}")} for n in range(6)]


@pytest.mark.slow
def test_rows_that_are_made_are_counted(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_kinds, "_HELD", 0)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in MANY))
    settings: Any = {"batch_size": 2, "validation": 0.25, "seed": 3, "progress": False}
    whole = FineTuning(base, rank=1)
    units = whole._batches.read(MANY, 99, "assistant")
    assert len(units) == 12
    rest, aside = whole._batches.split(units, 0.25, 3)
    assert (len(rest), len(aside)) == (8, 4)  # 3 rows would be a part of a chat
    assert not {*rest.rows} & {*aside.rows}
    assert {*rest.rows, *aside.rows} == {*range(6)}
    history = whole.fit(MANY, epochs=2, **settings)
    assert whole.session.steps_done == 2 * 4
    of_file = FineTuning(base, rank=1)
    assert of_file.fit(file, epochs=2, **settings) == history
    grouped = FineTuning(base, rank=1).fit(MANY, group_by_length=True, **settings)
    again = FineTuning(base, rank=1).fit(file, group_by_length=True, **settings)
    assert grouped == again
    part = FineTuning(base, rank=1)
    part.fit(file, epochs=2, max_steps=3, save=tmp_path / "part", **settings)
    resumed = FineTuning.load(tmp_path / "part")
    resumed.fit(file, epochs=2, resume=True, save=tmp_path / "part", **settings)
    for name, array in whole.session.state.items():
        np.testing.assert_array_equal(resumed.session.state[name], array)
        np.testing.assert_array_equal(of_file.session.state[name], array)


@pytest.mark.slow
def test_iterators_without_a_length(base: Path) -> None:
    expected = FineTuning(base, rank=1)
    expected.fit(MANY, batch_size=2, shuffle=False, max_steps=4, progress=False)
    read = []

    def rows() -> Any:
        for number in itertools.count():
            read.append(number)
            yield MANY[number % 6]

    settings: Any = {"batch_size": 2, "shuffle": False, "max_steps": 4, "progress": False}
    found = FineTuning(base, rank=1)
    found.fit(rows(), validation=iter(MANY), **settings)
    assert found.session.steps_done == 4
    assert len(read) <= 5
    for name, array in expected.session.state.items():
        np.testing.assert_array_equal(found.session.state[name], array)
    assert found.show(rows(), batch_size=1) == found.show(MANY, batch_size=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"shuffle": True}, "shuffle must be False for an iterator without a length, got True"),
        ({"max_steps": None}, "max_steps must be given for an iterator without a length"),
        ({"group_by_length": True}, "group_by_length must be False for an iterator"),
        ({"packing": True}, "packing must be False for an iterator"),
        ({"validation": 0.5}, "validation must be rows or a file for an iterator"),
    ]
    for settings_of, message in wrong:
        with pytest.raises(ortops.ArgumentError, match=message):
            found.fit(rows(), **(settings | settings_of))
    with pytest.raises(ortops.FeedError, match="data: row 2 must have"):
        found.fit(iter([MANY[0], {"x": 1}]), **settings)


@pytest.mark.slow
def test_columns_on_the_command_line(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("q,a,text\nhi,ho,no\n")
    command = ["tune", str(base), str(file), "--show", "--rank", "1", "--quiet"]
    assert main([*command, "--columns", "question=q", "answer=a"]) == 0
    expected = "row 1: 8 tokens, 3 trained\n<|user|>hi<|end|><|assistant|>«ho<|end|>»\n"
    assert capsys.readouterr().out == expected
    assert main([*command, "--columns", "question"]) == 1
    assert "--columns must have the form NAME=COLUMN, got 'question'" in capsys.readouterr().err
    assert main([*command, "--columns", "question=x"]) == 1
    assert "a row has no column 'x'" in capsys.readouterr().err
    saved = [str(base), str(file), "--quiet", "--save", str(tmp_path / "tuned"), "--rank", "1"]
    assert main(["tune", *saved, "--columns", "prompt=q", "completion=a"]) == 0
