"""Turns text and chats into tokens, with the tokenizer and the chat template of a folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ortops._common.optional import missing_package
from ortops.engine.trainable.child_process import Child, ChildError
from ortops.errors import ModelError
from ortops.graph.files.opening import file_in_folder, open_regular, read_regular
from ortops.graph.limits import LIMITS
from ortops.llm import rendering
from ortops.llm.folder import Folder

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat, with ``role`` and ``content``."""

Names: TypeAlias = Mapping[str, Any] | None
"""Further names that a chat template reads, and their values."""

TEMPLATES = "additional_chat_templates"
"""The folder of chat templates with names, in the folder of a model."""

_FOR_TOOLS = f"{TEMPLATES}/tool_use.jinja"
_LIMITS = ("text_seconds", "text_memory")
_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class RefusedTextError(ValueError):
    """A text that is no Unicode, or a chat that the template refuses."""


class Tokenizer:
    """The tokenizer and the chat template of a folder.

    Both run in a child process, as a file can make them abort their process, or need any time and
    memory.

    Args:
        folder: The folder, with tokenizer.json, and the template in chat_template.jinja or
            tokenizer_config.json.

    Raises:
        ModelError: If there is no tokenizer.json, or it is not valid.
        OrtopsError: If the package tokenizers is not installed.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._child: Child | rendering.Texts | None = None
        self._source: str | None = None
        self._file = self._template = folder.path / "tokenizer.json"
        if not self._file.is_file():
            raise ModelError(
                f"folder '{folder.path}': tokenizer.json is missing; add it, or give token ids"
            )
        self._open()

    def tokens(self, text: str, *, special: bool = True, end: bool = True) -> list[int]:
        """Returns the tokens of a text.

        Args:
            text: The text.
            special: Whether to add the tokens that the tokenizer adds around a text.
            end: Whether to add those behind it, too.
        """
        return list(self._ask("tokens", _text(text), special, end, [])[0])

    def tokens_in(
        self, text: str, places: Sequence[rendering.Place]
    ) -> tuple[list[int], list[bool]]:
        """Returns the tokens of a text, and whether each is within places, at least in part."""
        tokens, are_in = self._ask("tokens", text, False, True, places)
        return tokens, are_in

    def encoded(self, texts: Sequence[str], longest: int) -> tuple[list[int], list[int], bool]:
        """Returns the tokens of a text, or of two that an encoder reads together.

        Args:
            texts: The texts.
            longest: The largest number of tokens; the longer text is cut first.

        Returns:
            The tokens, the number of the text of each, and whether a text was cut.
        """
        tokens, types, is_cut = self._ask("encoded", [_text(text) for text in texts], longest)
        return tokens, types, is_cut

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Returns the text of tokens.

        Args:
            tokens: The tokens.
            special: Whether to include special tokens.
        """
        return str(self._ask("text", list(tokens), special))

    @property
    def end(self) -> list[int]:
        """The token that ends a text, in a list that is empty if there is none."""
        return list(self._folder.end[:1]) if self._end is None else [self._end]

    @property
    def has_template(self) -> bool:
        """Whether the folder has a chat template."""
        return self._found_template({}) is not None

    def replies(self, messages: Sequence[Message], more: Names = None) -> Replies:
        """Returns the text of a chat, and where the replies of the assistant are.

        If the template marks replies with ``{% generation %}``, these marks count. Otherwise, the
        chat is rendered up to each reply, and with its content replaced.

        Args:
            messages: The messages; one with ``weight`` 0 is not trained.
            more: Further names that the template reads, such as ``tools``, and their values.

        Raises:
            ModelError: See `chat`.
        """
        more = more or {}
        found = self._ask("replies", self._read_template(more), _messages(messages), more)
        return Replies(*found)

    def chat(
        self, messages: Sequence[Message], more: Names = None, *, begin_reply: bool = False
    ) -> str:
        """Returns the text of a chat.

        Args:
            messages: The messages.
            more: See `replies`.
            begin_reply: Whether to add what precedes a reply of the assistant.

        Raises:
            ModelError: If the folder has no template, or it is wrong.
            RefusedTextError: If the template rejects the messages.
            OrtopsError: If the package jinja2 is not installed.
        """
        given = _messages(messages), more or {}, begin_reply
        return str(self._ask("chat", self._read_template(more or {}), *given))

    def _open(self) -> None:
        """Starts the process of the tokenizer, or reads it in this one if files are trusted."""
        most = 16 * LIMITS.metadata_bytes  # the largest known has 33 MB
        with open_regular(
            self._file, most=most, error=ModelError, what="file", remedy="give a tokenizer"
        ) as stream:
            size = os.fstat(stream.fileno()).st_size
        if math.isinf(LIMITS.text_seconds):
            self._child = rendering.Texts()
        else:
            what = f"folder '{self._folder.path}': its tokenizer"
            self._child = Child(Path(rendering.__file__), what, _LIMITS)
        names = {name: self._token(name) for name in _NAMES}
        self._end: int | None = self._sent("open", str(self._file), names, size=size, factor=32)

    def _ask(self, name: str, *arguments: Any) -> Any:
        if self._child is None or self._child.owner != os.getpid():  # ended, or a fork's parent's
            self._open()
        return self._sent(name, *arguments)

    def _sent(self, name: str, *arguments: Any, size: int = 0, factor: int = 512) -> Any:
        """Calls a method of `rendering.Texts`.

        Args:
            name: Its name.
            arguments: Its arguments.
            size: The size in bytes of a file that it reads.
            factor: The memory for each byte of file or arguments.
        """
        given = json.dumps([name, *arguments], ensure_ascii=False, default=_plain)
        body = given.encode("utf-8", "surrogatepass")
        is_chat = name in ("chat", "replies")
        rounds = 6 * len(arguments[1]) + 1 if is_chat else 1  # a reply is found in 6 at most
        size += len(body) - (len(arguments[0]) if is_chat else 0)
        file = self._template if is_chat else self._file
        part = "its chat template" if is_chat else "its tokenizer"
        try:
            if isinstance(self._child, rendering.Texts):
                blamed, found = self._child.answer(body)
            else:
                assert self._child is not None
                seconds = LIMITS.text_seconds + size * rounds / 1e6
                memory = LIMITS.text_memory + size * factor
                (blamed, found), _ = self._child.ask(None, body, seconds, memory)
        except BaseException as error:
            self._child = None
            if isinstance(error, ChildError):
                raise ModelError(f"file '{file}': {part} {error}") from error
            raise
        if blamed == "data":
            raise RefusedTextError(found)
        if blamed == "package":
            raise missing_package("ortops.llm", found, "llm")
        if blamed:
            part = "not a tokenizer" if name == "open" else part
            raise ModelError(f"file '{file}': {part}: {found}; correct it")
        return found

    def _token(self, name: str) -> str:
        found = self._folder.tokenizer_config.get(name)
        found = found.get("content") if isinstance(found, Mapping) else found
        return found if isinstance(found, str) else ""

    def _read_template(self, more: Mapping[str, Any]) -> str:
        """Returns the chat template."""
        if self._source is not None:
            return self._source
        found = self._found_template(more)
        if found is None:
            raise ModelError(
                f"folder '{self._folder.path}': it has no chat template; add chat_template.jinja, "
                "or give rows with prompt and completion instead of messages"
            )
        several = isinstance(self._folder.tokenizer_config.get("chat_template"), list)
        if not several and not (self._folder.path / TEMPLATES).is_dir():
            self._source = found
        return found

    def _found_template(self, more: Mapping[str, Any]) -> str | None:
        """Returns the chat template; with tools, the one for them, if there are several."""
        self._template = self._folder.path / "tokenizer_config.json"
        found = self._folder.tokenizer_config.get("chat_template")
        file = self._folder.path / "chat_template.jinja"
        if more.get("tools") is not None and (self._folder.path / _FOR_TOOLS).is_file():
            file = file_in_folder(self._folder.path, _FOR_TOOLS, what="chat template")
        if file.is_file():
            self._template = file
            try:
                return read_regular(file, most=LIMITS.metadata_bytes).decode()
            except UnicodeDecodeError as error:
                raise ModelError(f"file '{file}': not UTF-8: {error}; correct it") from error
        if isinstance(found, list):  # several, by name
            named = {e.get("name"): e.get("template") for e in found if isinstance(e, Mapping)}
            found = named.get("default")
            if more.get("tools") is not None:
                found = named.get("tool_use", found)
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Replies:
    """What is trained of a chat.

    Attributes:
        parts: The text of the chat with the places of replies; then, for each reply that the
            template drops or rewrites in it, the chat up to that reply with its place.
        missing: The number of replies that are not found.
        opened: What precedes replies in a prompt, but not in a chat, such as ``<think>``.
    """

    parts: list[tuple[str, list[rendering.Place]]]
    missing: int
    opened: str


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"a text must be a str, got {type(given).__name__}")
    return given


def _messages(given: Sequence[Any]) -> list[Message]:
    for each in given:
        if not isinstance(each, Mapping) or not isinstance(each.get("role"), str):
            raise TypeError(f"a message must have role and content, got {each!r:.80}")
    return [dict(each) for each in given]


def _plain(value: Any) -> Any:
    """Returns arrays as lists, and what JSON cannot express as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
