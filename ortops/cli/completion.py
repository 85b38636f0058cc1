"""``ortops completion``."""

from __future__ import annotations

import argparse

from ortops import __version__
from ortops.cli.parser import make_parser
from ortops.errors import OrtopsError

__all__ = ["print_completion"]


def print_completion(options: argparse.Namespace) -> int:
    """Prints a shell's completion of the command."""
    try:
        import shtab
    except ImportError as error:
        raise OrtopsError(
            "completion: shtab is not installed, which writes it; install ortops[completion]"
        ) from error
    print(shtab.complete(make_parser(__version__), shell=options.shell))
    return 0
