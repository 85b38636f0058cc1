"""The command ``ortops``: `parser` says what it takes, each other file what some of it does."""

from __future__ import annotations

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
    options = make_parser(__version__).parse_args(arguments)
    module, name = options.run.split(".")
    try:
        import_without("onnx_ir", "sympy")
        run: Callable[..., int] = getattr(importlib.import_module(f"ortops.cli.{module}"), name)
        return run(options)
    except KeyboardInterrupt:
        if options.debug:
            raise
        return 130
    except (OrtopsError, OSError) as error:
        if options.debug:
            raise
        print(f"ortops: {error}", file=sys.stderr)
        return 1
