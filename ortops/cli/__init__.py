"""The command ``ortops``. `parser` defines its arguments; the other modules implement them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence

from ortops import __version__
from ortops._common.notes import notes_as_details
from ortops.cli.parser import make_parser
from ortops.cli.standard_streams import (
    ReaderGoneError,
    describe_error,
    flush_streams,
    open_closed_descriptors,
    say,
    shown_log,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The arguments after ``ortops``; by default those of the command line.

    Returns:
        The exit status: 0 success, 1 error, 130 after Ctrl-C. ``check`` returns 1 if it finds
        problems, and 2 if it cannot read a model.

    Raises:
        SystemExit: With status 2 for a usage error, and 0 after printing help.
    """
    if arguments is None:
        open_closed_descriptors()
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = argparse.Namespace(given=given, debug=False)
    try:
        status = _run(options)
        flush_streams()
        return status
    except ReaderGoneError:
        return 1
    except KeyboardInterrupt:
        if options.debug:
            raise
        return 130
    except Exception as error:
        if options.debug:
            raise
        say(f"ortops: {describe_error(error)}")
        return 1
    finally:
        with contextlib.suppress(OSError, ReaderGoneError):
            flush_streams()


def _run(options: argparse.Namespace) -> int:
    try:
        make_parser(__version__).parse_args(options.given, options)
    except SystemExit:
        flush_streams()
        raise
    module, name = options.run.split(".")
    run: Callable[..., int] = getattr(importlib.import_module(f"ortops.cli.{module}"), name)
    notes = notes_as_details if getattr(options, "quiet", False) else contextlib.nullcontext
    with shown_log(), notes():
        return run(options)
