"""Standard streams, also where they are closed, full or cannot encode every character."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from ortops.engine.summary import visible
from ortops.errors import OrtopsError


class ReaderGoneError(Exception):
    """The reader of standard output, such as `head`, has closed it."""


def open_closed_descriptors() -> None:
    """Opens closed standard streams, and lets the others print any character.

    Without this, the next opened file takes the descriptor of a closed stream, and what a library
    writes to standard error ends up in a model.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(sentence: str, kept: str = "\t") -> None:
    """Prints a message on standard error; continues if that is impossible.

    Args:
        sentence: The message.
        kept: The control characters that are not escaped.
    """
    if sys.stderr is None:  # print would use standard output
        return
    try:
        print(visible(sentence, kept), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        _leave(sys.stderr)


class _Log(logging.Handler):
    """Prints messages on standard error, as `say` does."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), "\n\t" if record.exc_info else "\t")


@contextlib.contextmanager
def shown_log() -> Iterator[None]:
    """Shows what is logged: warnings of libraries, and what the level of ortops lets through."""
    logger, handler = logging.getLogger("ortops"), _Log()
    level, before = logger.level, logging.lastResort
    logger.addHandler(handler)
    logging.lastResort = _Log(logging.WARNING)  # where no handler is set, as for onnx-ir
    try:
        yield
    finally:
        logging.lastResort = before
        logger.removeHandler(handler)
        logger.setLevel(level)


def describe_error(error: Exception) -> str:
    """Returns the message that users see for an exception."""
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OrtopsError | OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    kind = type(error).__name__
    return f"{kind}: {error}; this is a bug in ortops: report it with the output of --debug"


def print_text(text: str) -> None:
    """Prints one or more lines on standard output.

    Raises:
        ReaderGoneError: If the reader has closed standard output.
        OSError: If standard output is closed or cannot be written.
    """
    try:
        with _writing() as stream:
            stream.write(visible(text, "\n\t") + "\n")
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def print_bytes(content: bytes) -> None:
    """Writes a file to standard output.

    Raises:
        OSError: If standard output is closed or cannot be written completely.
    """
    with _writing() as stream:
        buffer = getattr(stream, "buffer", None)
        if buffer is None:  # in a notebook, which takes only text
            stream.write(content.decode())
        else:
            stream.flush()
            buffer.write(content)
            buffer.flush()


def flush_streams() -> None:
    """Flushes standard output and standard error.

    Raises:
        ReaderGoneError: If the reader has closed standard output.
        OSError: If standard output cannot be written.
    """
    if sys.stderr is not None:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _leave(sys.stderr)
    if sys.stdout is not None:
        try:
            with _writing() as stream:
                stream.flush()
        except BrokenPipeError as error:
            raise ReaderGoneError from error


def standard_input() -> BinaryIO:
    """Returns standard input.

    Raises:
        OSError: If it is closed.
    """
    if sys.stdin is None:
        raise OSError(errno.EBADF, "it is closed", "standard input")
    return sys.stdin.buffer


@contextlib.contextmanager
def _writing() -> Iterator[TextIO]:
    if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed", "standard output")
    try:
        yield sys.stdout
    except OSError as error:
        _leave(sys.stdout)
        raise OSError(error.errno, error.strerror, "standard output") from error


def _leave(stream: TextIO) -> None:
    """Discards buffered output, which Python would try to write again at exit, and fail."""
    with contextlib.suppress(OSError, ValueError):
        number = stream.fileno()
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), number)
