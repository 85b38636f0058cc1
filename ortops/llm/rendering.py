"""Runs a tokenizer and a chat template, which can be hostile: in a child process with limits.

It imports nothing of the package: `ortops.engine.trainable.limited` runs it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

_REASONING = "</think>"
"""The end of reasoning, which some templates remove from earlier replies."""

_PROBE = "Hello, wörld! 123\n\t\ud7ff 你好 🙂 <s> ▁a"
"""Text that shows early what encoding would do."""

_PLAIN_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
"""A chat that each template can render, or refuses."""

_JINJA = (3, 1, 6)
"""The first version of jinja2 whose sandbox has no known hole."""


class _BlamedError(Exception):
    """What is wrong, with what is to blame: data, tokenizer, template or package."""

    def __init__(self, blamed: str, message: object) -> None:
        super().__init__(f"{message!s:.500}")
        self.blamed = blamed


class Texts:
    """A tokenizer and a chat template; `ortops.llm.tokenization` says what each method does."""

    is_marked = False
    _source: str | None = None
    _template: Any = None
    _marks: tuple[str, str] | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._edges: dict[str, tuple[str, str]] = {}

    def answer(self, body: bytes) -> tuple[str, Any]:
        """Calls a method, and returns what is to blame (empty if nothing), and what it returned."""
        self._size = len(body)
        self._now = datetime.datetime.now()
        try:
            name, *arguments = json.loads(body)
            return "", getattr(self, name)(*arguments)
        except _BlamedError as error:
            return error.blamed, str(error)
        except ImportError as error:
            return "package", str(error.name)

    def open(self, file: str, names: Mapping[str, str]) -> int | None:
        """Reads a tokenizer, and returns the token that ends a text."""
        self._names = names
        package = importlib.import_module("tokenizers")
        with _blaming("tokenizer"):
            self._tokenizer = package.Tokenizer.from_file(file)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            with contextlib.suppress(Exception):  # of unknown words; a panic is no Exception
                self._tokenizer.encode(_PROBE)
            found: int | None = self._tokenizer.token_to_id(names["eos_token"])
        return found

    def tokens(
        self, text: str, special: bool, places: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a text, and whether each is within places of the text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _BlamedError("data", f"a text that is no Unicode: {error}") from error
        with _blaming("tokenizer"):
            found = self._tokenizer.encode(text, add_special_tokens=special)
        spans = found.offsets if places else []
        inside = [False] * len(spans)
        for start, stop in places:
            inside = [
                known or start <= i < j <= stop for known, (i, j) in zip(inside, spans, strict=True)
            ]
        return found.ids, inside

    def text(self, tokens: list[int], special: bool) -> str:
        """Returns the text of tokens."""
        with _blaming("tokenizer"):
            return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))

    def chat(self, source: str, messages: Sequence[Any], begin_reply: bool) -> str:
        """Returns the text of a chat."""
        self._compile(source)
        return self._rendered(messages, begin_reply=begin_reply)

    def replies(self, source: str, messages: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a chat, and the characters of each reply."""
        self._compile(source)
        text = self._rendered(messages)
        found = self._found_by_marks(messages, text) if self.is_marked else None
        return text, self._found_by_parts(messages, text) if found is None else found

    def _found_by_marks(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]] | None:
        """Returns the characters of what the template says that it generates.

        The chat is rendered again with marks that neither data nor template can know. Where the
        template changes them, or something else because of them, they say nothing.

        Returns:
            The first and last characters; None if the marks say nothing.
        """
        draw = random.SystemRandom()
        begin, end = ("".join(map(chr, draw.choices(range(0xE000, 0xF900), k=12))) for _ in "be")
        self._marks, self._edges = (begin, end), {}
        try:
            marked = self._rendered(messages)
        except _BlamedError:
            return None
        finally:
            self._marks = None
        pattern = re.compile(f"({begin}|{end})(.)", re.DOTALL)
        if pattern.sub("", marked) != text:
            return None
        found, starts, removed = [], dict[str, int](), 0
        for match in pattern.finditer(marked):
            at, number = match.start() - removed, match[2]
            removed += len(match[0])
            lead, tail = self._edges[number]
            if match[1] == begin:
                starts[number] = at - len(lead) if text.endswith(lead, 0, at) else at
            elif number in starts:
                stop = at + len(tail) if text.startswith(tail, at) else at
                found.append((starts.pop(number), stop))
        return None if starts else found

    def mark(self, text: str) -> str:
        """Returns what a template generates, with marks if this is asked for.

        They are inside of the spaces around it, so that a template can strip them.
        """
        if self._marks is None:
            return text
        begin, end = self._marks
        number, core = chr(0xF0000 + len(self._edges)), text.strip()  # no letter, digit or space
        lead, _, tail = text.partition(core) if core else (text, "", "")
        self._edges[number] = lead, tail
        return f"{lead}{begin}{number}{core}{end}{number}{tail}"

    def _found_by_parts(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]]:
        """Returns the characters of replies, by rendering the chat up to each of them."""
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            found.append((0, 0))  # unless it is found
            try:
                before = self._rendered(messages[:number], begin_reply=True)
                after = self._rendered(messages[: number + 1])
            except _BlamedError:  # of a part of a chat that is right as a whole
                continue
            if text.startswith(before):
                end = len(after)
                if not text.startswith(after):
                    end = self._end_of(str(message.get("content")), text, len(before))
                found[-1] = len(before), max(end, len(before))
        return found

    def _end_of(self, content: str, text: str, start: int) -> int:
        """Returns where a reply ends whose reasoning was removed; 0 if it is not found."""
        visible = content.rpartition(_REASONING)[2].strip()
        if not visible or not text[start:].lstrip().startswith(visible):
            return 0
        end = text.index(visible, start) + len(visible)
        last = self._names["eos_token"]
        return end + len(last) if last and text.startswith(last, end) else end

    def _rendered(self, messages: Sequence[Any], *, begin_reply: bool = False) -> str:
        given = {"messages": messages, "add_generation_prompt": begin_reply}
        try:
            with _blaming("template"):
                text: str = self._template.render(**given, **self._names)
        except _BlamedError as error:
            if error.blamed == "data" or messages is _PLAIN_CHAT:
                raise
            with contextlib.suppress(_BlamedError):
                self._rendered(_PLAIN_CHAT)
                error = _BlamedError("data", f"the chat template fails: {error}")
            raise error from None
        if len(text) > 2**20 + 16 * self._size:
            raise _BlamedError("template", f"it makes a text of {len(text):,} characters")
        return text

    def _compile(self, source: str) -> None:
        if source == self._source:
            return
        kinds = ["jinja2.ext.loopcontrols", _generation(self)]
        form = {"trim_blocks": True, "lstrip_blocks": True, "extensions": kinds}
        sandbox = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment(**form)
        version = importlib.metadata.version("jinja2")
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < _JINJA:
            raise _BlamedError("package", f"jinja2 3.1.6 or later, got {version}")
        sandbox.globals["strftime_now"] = lambda form: self._now.strftime(form)
        sandbox.globals["raise_exception"] = _refuse
        sandbox.filters["tojson"] = _dump
        self.is_marked = False
        with _blaming("template"):
            self._template = sandbox.from_string(source)
        self._source = source


def answer(request: object, body: bytes) -> tuple[Any, list[bytes]]:
    """Answers a request of the parent."""
    return _TEXTS.answer(body), []


@contextlib.contextmanager
def _blaming(what: str) -> Iterator[None]:
    try:
        yield
    except (_BlamedError, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise _BlamedError(what, error) from error


def _generation(texts: Texts) -> Any:
    """Returns the extension of jinja2 for ``{% generation %}``, as in Hugging Face's templates."""
    extension, nodes = map(importlib.import_module, ("jinja2.ext", "jinja2.nodes"))

    class Generation(extension.Extension):  # type: ignore[misc, name-defined]
        """Marks the text of the block."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> Any:
            texts.is_marked = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return texts.mark(caller())

    return Generation


def _refuse(message: str) -> None:
    raise _BlamedError("data", f"the chat template refuses it: {message}")


def _dump(value: Any, ensure_ascii: bool = False, indent: Any = None, **named: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **named)


_TEXTS = Texts()
"""What this process answers with."""
