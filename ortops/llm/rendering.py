"""Runs a tokenizer and a chat template, which can be hostile: in a child process with limits.

It imports nothing of the package: `ortops.engine.trainable.limited` runs it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.metadata
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that messages have for reasoning; a template reads one of them."""

_PROBE = "Hello, wörld! 123\n\t\ud7ff 你好 🙂 <s> ▁a"
"""Text that shows early what encoding would do."""

_PLAIN_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
"""A chat that each template can render, or refuses."""

_JINJA = (3, 1, 6)
"""The first version of jinja2 whose sandbox has no known hole."""


Place: TypeAlias = tuple[int, int, int]
"""Where characters begin and end, and up to where tokens behind them may reach."""


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
    _takes_parts: bool | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._edges: dict[str, tuple[str, str]] = {}
        self._more: dict[str, Any] = {}

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
        self, text: str, special: bool, end: bool, places: Sequence[Place]
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a text, and whether each is within places of the text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _BlamedError("data", f"a text that is no Unicode: {error}") from error
        with _blaming("tokenizer"):
            found = self._tokenizer.encode(text, add_special_tokens=special)
        tokens, added = list[int](found.ids), found.special_tokens_mask[::-1]
        if not end and any(added):  # of an empty text, half of them are in front
            tokens = tokens[: -added.index(0) or None] if 0 in added else tokens[::2][:1]
        inside, before = [False] * len(tokens), 0
        for number, (i, j) in enumerate(found.offsets if places else ()):
            # Spaces have an empty span where offsets are trimmed: they reach to the token before.
            i, before = min(i, before) if i == j else i, j
            inside[number] = any(
                (i < stop and j > start) or start <= i < j <= last for start, stop, last in places
            )
        return tokens, inside

    def encoded(self, texts: list[str], longest: int) -> tuple[list[int], list[int], bool]:
        """Returns the tokens of one or two texts, the text of each, and whether they were cut."""
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise _BlamedError("data", f"a text that is no Unicode: {error}") from error
        with _blaming("tokenizer"):
            self._tokenizer.enable_truncation(longest, strategy="longest_first")
            try:
                found = self._tokenizer.encode(*texts)
            finally:
                self._tokenizer.no_truncation()
        return list(found.ids), list(found.type_ids), bool(found.overflowing)

    def text(self, tokens: list[int], special: bool) -> str:
        """Returns the text of tokens."""
        with _blaming("tokenizer"):
            return str(self._tokenizer.decode(tokens, skip_special_tokens=not special))

    def chat(
        self, source: str, messages: Sequence[Any], more: Mapping[str, Any], begin_reply: bool
    ) -> str:
        """Returns the text of a chat."""
        self._compile(source)
        self._more = {name: _pruned(value) for name, value in more.items()}
        return self._rendered(self._messages(messages), begin_reply=begin_reply)

    def replies(self, source: str, messages: Sequence[Any], more: Mapping[str, Any]) -> Any:
        """Returns the texts of a chat with the places of its replies, and what is not found."""
        text = self.chat(source, messages, more, False)
        chat = self._messages(messages)
        wanted = [_weight(each) for each in messages if each["role"] == "assistant"]
        found = [
            self._find(chat, number, text)
            for number, each in enumerate(chat)
            if each["role"] == "assistant"
        ]
        trained = [each for each, weight in zip(found, wanted, strict=True) if weight]
        own = [each.own for each in trained if each.own is not None]
        spans = [_loose(text, *each.place) for each in trained if each.place is not None]
        missing = sum(each.place is None and each.own is None for each in trained)
        marked = self._found_by_marks(chat, text) if self.is_marked else None
        if marked is not None:
            missing = max(0, len(trained) - sum(start < stop for start, stop in marked))
            if len(marked) == len(found):  # one for each reply
                pairs = zip(marked, wanted, strict=True)
                marked = [span for span, weight in pairs if weight]
            elif len(trained) < len(found):
                marked = [e for e in marked if any(e[0] < j and e[1] > i for i, _, j in spans)]
            spans = [(start, stop, stop) for start, stop in marked]
        parts = [(text, spans), *((each, [_loose(each, *place)]) for each, place in own)]
        return parts, missing, next((each.opened for each in trained if each.opened), "")

    def _found_by_marks(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]] | None:
        """Returns the characters of what the template says that it generates.

        The chat is rendered again with marks that neither data nor template can know. Where the
        template changes them, or something else because of them, they say nothing.

        Returns:
            The first and last characters; None if the marks say nothing.
        """
        begin, end = _letters(), _letters()
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

    def _messages(self, given: Sequence[Any]) -> list[dict[str, Any]]:
        """Returns messages as templates see them."""
        messages = [_message(each) for each in given]
        split = [each for each in messages if isinstance(each.get("content"), list)]
        if split and self._takes_parts is None:
            letters = _letters()
            part = [{"type": "text", "text": letters}]
            self._takes_parts = False
            with contextlib.suppress(_BlamedError):
                text = self._rendered([{**each, "content": part} for each in _PLAIN_CHAT])
                parts = text.split(letters)
                self._takes_parts = len(parts) == 3 and not any(
                    e.startswith(("'", '"')) for e in parts
                )
        for each in () if self._takes_parts else split:
            each["content"] = "".join(part["text"] for part in each["content"])
        return messages

    def _find(self, chat: Sequence[Any], number: int, text: str) -> _Reply:
        """Finds a reply in the text of a chat, and in the chat up to it."""
        last = self._names["eos_token"]
        try:
            before = self._rendered(chat[:number], begin_reply=True)
            after = self._rendered(chat[: number + 1])
        except _BlamedError:  # of a part of a chat that is right as a whole
            return _Reply(None)
        closed = before
        with contextlib.suppress(_BlamedError):
            closed = self._rendered(chat[:number])
        if before.startswith(closed) or not closed.endswith(last):
            last = ""  # else it ends each chat that goes no further
        end = len(after.removesuffix(last))
        if after.startswith(before) and text.startswith(after[:end]):
            return _Reply((len(before), end))
        for loose, (probe, letters) in itertools.product((False, True), [*_probes(chat[number])]):
            with contextlib.suppress(_BlamedError, ValueError):
                chats = [*chat[:number], probe], [*chat[:number], probe, *chat[number + 1 :]]
                alone = _around(self._rendered(chats[0]).removesuffix(last), letters)
                whole = _around(self._rendered(chats[1]), letters)
                turn = _around(self._rendered(chats[0], begin_reply=True), letters)[1]
                turn = turn.removesuffix(before[len(closed) :] if not last else "")
                parts = before, after[:end], closed
                return self._compared(text, parts, alone, whole, turn, loose=loose)
        own = (after, (len(before), end)) if after.startswith(before) else None
        return _Reply(None, own)

    def _compared(
        self,
        text: str,
        parts: tuple[str, str, str],
        alone: tuple[str, str],
        whole: tuple[str, str],
        turn: str,
        *,
        loose: bool,
    ) -> _Reply:
        """Finds a reply by what surrounds its content.

        Args:
            text: The chat.
            parts: The chat up to the reply: with its beginning, with all of it, and without it.
            alone: What is before and behind the content in the chat up to the reply.
            whole: What is before and behind it in the chat.
            turn: What is behind it if another turn follows.
            loose: Whether the chat up to the reply may begin otherwise than its prompt.

        Raises:
            ValueError: If the surroundings are not those of the text.
        """
        before, after, closed = parts
        start, eos = _shared(before, alone[0]), self._names["eos_token"]
        content, lead = _between(text, *whole), alone[0][start:]
        first, is_apart = len(whole[0]), False
        if start < _shared(before, closed):
            if not loose:
                raise ValueError("the chat up to the reply does not begin as its prompt")
            prompt = before.removeprefix(closed.removesuffix(eos))
            first = whole[0].rfind(prompt) + len(prompt) if prompt in whole[0] else first
        elif whole[0].endswith(lead):
            first -= len(lead)
        elif text.startswith(before[:start]) and whole[0][start:] in lead:
            first = start
        else:  # something of another message is between, such as the result of a tool
            is_apart = True
        ends = [each for each in (alone[1], turn) if whole[1].startswith(each)]
        end = max(ends, key=len, default=eos if whole[1].startswith(eos) else "")
        place = first, len(text) - len(whole[1]) + len(end)
        opened, reply = before[start:], after[start:].removesuffix(alone[1])
        if loose:
            return _Reply(place if reply.endswith(content.strip()) else None)
        if text.startswith(after) and after.startswith(before[:start]):
            return _Reply((start, len(after)), None, opened)
        with contextlib.suppress(ValueError):
            if ends and not is_apart and _between(after, *alone).strip() == content.strip():
                return _Reply(place, None, opened)
        own = (after, (start, len(after))) if after.startswith(before[:start]) else None
        return _Reply(place if reply.endswith(content.strip()) else None, own, opened)

    def _rendered(self, messages: Sequence[Any], *, begin_reply: bool = False) -> str:
        given = {"messages": messages, "add_generation_prompt": begin_reply}
        names = {"tools": None, "documents": None, **self._names, **self._more}
        try:
            with _blaming("template"):
                text: str = self._template.render(names | given)
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
        form: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": kinds}
        form["finalize"] = _printed
        sandbox = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment(**form)
        version = importlib.metadata.version("jinja2")
        if tuple(map(int, re.findall(r"\d+", version)[:3])) < _JINJA:
            raise _BlamedError("package", f"jinja2 3.1.6 or later, got {version}")
        sandbox.globals["strftime_now"] = lambda form: self._now.strftime(form)
        sandbox.globals["raise_exception"] = _refuse
        sandbox.filters["tojson"] = _dump
        sandbox.filters["printed"] = _printed
        for name in ("trim", "string"):
            sandbox.filters[name] = _of_printed(sandbox.filters[name])
        self.is_marked = False
        nodes = importlib.import_module("jinja2.nodes")
        with _blaming("template"):
            tree = sandbox.parse(source)
            for node in tree.find_all(nodes.Concat):  # a ~ b, which prints them
                node.nodes = [nodes.Filter(e, "printed", [], [], None, None) for e in node.nodes]
            self._template = sandbox.from_string(tree.set_environment(sandbox))
        self._source, self._takes_parts = source, None


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


def _dump(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON; the arguments are those of transformers' filter, in this order."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _printed(value: Any) -> Any:
    """Returns what a template prints for a value: nothing for None."""
    return "" if value is None else value


def _of_printed(change: Callable[..., str]) -> Callable[..., str]:
    """Returns a filter of what is printed."""
    return lambda value, *given, **named: change(_printed(value), *given, **named)


def _pruned(value: Any) -> Any:
    """Returns a value without the fields that are None, which Parquet adds."""
    if isinstance(value, Mapping):
        return {name: _pruned(one) for name, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates see it."""
    result = {n: v for n, v in given.items() if n != "weight" and (v is not None or n == "content")}
    content = result.get("content")
    if isinstance(content, float) and content != content:
        raise _BlamedError("data", f"the content of a message must be a text, got {content}")
    if isinstance(content, list):
        result["content"] = [_part(each) for each in content]
    if isinstance(calls := result.get("tool_calls"), list):
        result["tool_calls"] = [_call(_pruned(each)) for each in calls]
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    return result if reasoning is None else dict.fromkeys(_REASONING, reasoning) | result


def _part(given: Any) -> dict[str, Any]:
    """Returns a part of a content, which must be a text."""
    part = _pruned(given) if isinstance(given, Mapping) else {}
    if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        raise _BlamedError("data", f"a part of a content must be a text, got {given!r:.80}")
    return {"type": "text"} | part


def _call(given: Any) -> Any:
    """Returns a tool call, whose arguments may be JSON in a text."""
    if isinstance(given, dict) and isinstance(given.get("function"), dict):
        return given | {"function": _call(given["function"])}
    text = given.get("arguments") if isinstance(given, dict) else None
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(text), dict):
                given = given | {"arguments": _Arguments(found, text)}
    return given


def _weight(message: Mapping[str, Any]) -> bool:
    """Whether a message is trained."""
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise _BlamedError("data", f"the weight of a message must be 0 or 1, got {weight!r:.80}")
    return weight != 0


def _probes(message: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields a message with something in it replaced, and by which letters."""
    letters = _letters()
    is_list = isinstance(message.get("content"), list)
    content = [{"type": "text", "text": letters}] if is_list else letters
    changed = {**message, "content": content}
    yield {name: value for name, value in changed.items() if name not in _REASONING}, letters
    if any(name in message for name in _REASONING):
        yield changed, letters
    calls = message.get("tool_calls")
    for first, *rest in [calls] if calls and isinstance(calls, list) else ():
        if isinstance(first, dict) and isinstance(function := first.get("function"), dict):
            first = first | {"function": function | {"name": letters}}
            yield {**message, "tool_calls": [first, *rest]}, letters


def _letters() -> str:
    """Returns letters that neither data nor template can know."""
    return "".join(map(chr, random.SystemRandom().choices(range(0xE000, 0xF900), k=12)))


def _shared(one: str, two: str) -> int:
    """Returns how many characters two texts begin with in common."""
    pairs = enumerate(zip(one, two, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(two)))


def _around(text: str, letters: str) -> tuple[str, str]:
    """Returns what is before and behind letters that a text has once."""
    before, after = text.split(letters)
    return before, after


def _between(text: str, before: str, after: str) -> str:
    """Returns what is between the beginning and the end of a text."""
    stop = len(text) - len(after)
    if stop < len(before) or not (text.startswith(before) and text.endswith(after)):
        raise ValueError("it has another beginning or end")
    return text[len(before) : stop]


def _loose(text: str, start: int, stop: int) -> Place:
    """Returns the place of a reply, behind which spaces and newlines are optional."""
    return start, start + len(text[start:stop].rstrip()), stop


class _Reply(NamedTuple):
    """Where a reply is.

    Attributes:
        place: Where it is in the whole chat, if it is found.
        own: The chat up to it, and where it is there, if the whole chat drops or rewrites it.
        opened: What precedes it in a prompt, but not in the chat.
    """

    place: tuple[int, int] | None
    own: tuple[str, tuple[int, int]] | None = None
    opened: str = ""


class _Arguments(dict[str, Any]):
    """The arguments of a tool call that were given as text, and are one where it is needed."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


_TEXTS = Texts()
"""What this process answers with."""
