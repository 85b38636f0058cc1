"""Turns text and chats into tokens, with the tokenizer and the chat template of a folder."""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from ortops.errors import ModelError, OrtopsError
from ortops.graph.files.opening import read_regular
from ortops.graph.limits import LIMITS
from ortops.llm.folder import Folder

__all__ = ["Message", "Tokenizer"]

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat, with ``role`` and ``content``."""


_BEGIN, _END = "\ue000\ue001", "\ue001\ue000"
"""Marks around what a template generates: characters for private use, which texts do not have."""

_REASONING = "</think>"
"""The end of reasoning, which some templates remove from earlier replies."""


class Tokenizer:
    """The tokenizer and the chat template of a folder.

    Args:
        folder: The folder, with tokenizer.json, and the template in chat_template.jinja or
            tokenizer_config.json.

    Raises:
        ModelError: If there is no tokenizer.json, or it is not valid.
        OrtopsError: If the package tokenizers is not installed.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._template: Any = None
        file = folder.path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"folder '{folder.path}': tokenizer.json is missing; add it, or give token ids"
            )
        try:
            most = 16 * LIMITS.metadata_bytes  # the largest has 33 MB
            content = read_regular(file, most=most, remedy="give a tokenizer")
            self._tokenizer = _optional("tokenizers").Tokenizer.from_buffer(content)
        except OrtopsError:
            raise
        except Exception as error:  # tokenizers raises nothing more particular
            raise ModelError(f"file '{file}': not a tokenizer: {error}; correct it") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def tokens(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text.

        Args:
            text: The text.
            special: Whether to add the tokens that the tokenizer adds around a text.
        """
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return found

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a text, and the characters that each of them covers."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return found.ids, found.offsets

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of tokens.

        Args:
            tokens: The tokens.
            special: Whether to include special tokens.
        """
        found: str = self._tokenizer.decode(list(tokens), skip_special_tokens=not special)
        return found

    @property
    def end(self) -> list[int]:
        """The token that ends a text, in a list that is empty if there is none."""
        name = self._token("eos_token")
        found = self._tokenizer.token_to_id(name) if name else None
        return [found] if found is not None else list(self._folder.end[:1])

    def replies(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of a chat, and the characters of each reply of the assistant.

        If the template marks replies with ``{% generation %}``, these marks count. Otherwise, the
        chat is rendered up to each reply. A template that changes earlier messages, such as those
        that remove earlier reasoning, leaves out what cannot be found.

        Raises:
            ModelError: See `chat`.
        """
        marked = self._rendered(messages)
        text = marked.replace(_BEGIN, "").replace(_END, "")
        if _BEGIN in marked:
            parts = marked.replace(_END, _BEGIN).split(_BEGIN)  # outside, inside, outside, …
            ends = list(accumulate(map(len, parts)))
            return text, list(zip(ends[:-1:2], ends[1::2], strict=False))
        found = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.chat(messages[:number], begin_reply=True)
                after = self.chat(messages[: number + 1])
                if not text.startswith(before):
                    continue
                if text.startswith(after):
                    found.append((len(before), len(after)))
                elif end := self._end_of(str(message["content"]), text, len(before)):
                    found.append((len(before), end))
        return text, found

    def _end_of(self, content: str, text: str, start: int) -> int:
        """Returns where a reply ends whose reasoning was removed; 0 if it is not found."""
        visible = content.rpartition(_REASONING)[2].strip()
        if not visible or not text[start:].lstrip().startswith(visible):
            return 0
        end = text.index(visible, start) + len(visible)
        last = self._token("eos_token")
        return end + len(last) if last and text.startswith(last, end) else end

    def chat(self, messages: Sequence[Message], *, begin_reply: bool = False) -> str:
        """Returns the text of a chat.

        Args:
            messages: The messages.
            begin_reply: Whether to add what precedes a reply of the assistant.

        Raises:
            ModelError: If the folder has no template, or the template rejects the messages.
            OrtopsError: If the package jinja2 is not installed.
        """
        found = self._rendered(messages, begin_reply=begin_reply)
        return found.replace(_BEGIN, "").replace(_END, "")

    def _rendered(self, messages: Sequence[Message], *, begin_reply: bool = False) -> str:
        """Returns the text of a chat, with marks around what the template generates."""
        if self._template is None:
            self._template = self._read_template()
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        try:
            found: str = self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=begin_reply,
                **{name: self._token(name) for name in names},
            )
        except Exception as error:  # a template can raise anything
            raise ModelError(
                f"chat template: {error}; correct the messages or the template"
            ) from error
        return found

    def _token(self, name: str) -> str:
        found = self._folder.tokenizer_config.get(name)
        found = found.get("content") if isinstance(found, Mapping) else found
        return found if isinstance(found, str) else ""

    def _read_template(self) -> Any:
        file = self._folder.path / "chat_template.jinja"
        found = self._folder.tokenizer_config.get("chat_template")
        if file.is_file():
            try:
                found = read_regular(file, most=LIMITS.metadata_bytes).decode()
            except UnicodeDecodeError as error:
                raise ModelError(f"file '{file}': {error}; save it as UTF-8") from error
        elif isinstance(found, list):  # several, by name
            found = {each["name"]: each["template"] for each in found}.get("default")
        if not isinstance(found, str):
            raise ModelError(
                f"folder '{self._folder.path}': it has no chat template; add chat_template.jinja, "
                "or give rows with prompt and completion instead of messages"
            )
        sandbox = _optional("jinja2.sandbox").ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _generation()],
        )
        sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        sandbox.globals["raise_exception"] = _refuse
        sandbox.filters["tojson"] = _dump
        try:
            return sandbox.from_string(found)
        except Exception as error:  # of any of jinja2's kinds
            raise ModelError(f"chat template: {error}; correct it") from error


def _generation() -> Any:
    """Returns the extension of jinja2 for ``{% generation %}``, as in Hugging Face's templates."""
    extension, nodes = _optional("jinja2.ext"), _optional("jinja2.nodes")

    class Generation(extension.Extension):  # type: ignore[misc, name-defined]
        """Puts marks around the text of the block."""

        tags: ClassVar = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
            return [each.set_lineno(line) for each in (begin, *body, end)]

    return Generation


def _refuse(message: str) -> None:
    raise ValueError(message)


def _dump(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise OrtopsError(
            f"ortops.llm: the package {package} is not installed; pip install ortops[llm]"
        ) from error
