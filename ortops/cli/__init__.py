"""The command ``ortops``: `parser` says what it takes, each other file what some of it does."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from ortops import __version__
from ortops.cli.parser import make_parser
from ortops.deferred import import_without
from ortops.errors import OrtopsError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: What stands behind ``ortops``; the command line's by default.

    Returns:
        0; 1 if something was refused or failed; 130 after Ctrl-C. Of ``check``, 1 if something
        stands in the way of a training, and 2 if a file cannot be read.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser(__version__).parse_args(given, argparse.Namespace(given=given))
    module, name = options.run.split(".")
    try:
        import_without("onnx_ir", "sympy")
        run: Callable[..., int] = getattr(importlib.import_module(f"ortops.cli.{module}"), name)
        status = run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        if options.debug:
            raise
        return 130
    except BrokenPipeError:  # whoever read, as `head` does, has enough
        importlib.import_module("ortops.cli.streams").leave_standard_output()
        return 1
    except Exception as error:
        if options.debug:
            raise
        print(f"ortops: {_told(error)}", file=sys.stderr)
        return 1


def _told(error: Exception) -> str:
    """Returns what a user is told of an error."""
    if isinstance(error, OrtopsError | OSError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"the memory does not suffice: {error or 'nothing is left'}; give less data at once"
    kind = type(error).__name__
    return f"{kind}: {error}; ortops should have said more: report it with what --debug shows"
