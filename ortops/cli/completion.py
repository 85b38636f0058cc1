"""``ortops completion``."""

from __future__ import annotations

import argparse

from ortops import __version__
from ortops._common.optional import optional_module
from ortops.cli.parser import make_parser
from ortops.cli.standard_streams import print_text


def print_completion(options: argparse.Namespace) -> int:
    """Prints a shell completion script."""
    shtab = optional_module("completion", "shtab", "completion")
    print_text(shtab.complete(make_parser(__version__), shell=options.shell))
    return 0
