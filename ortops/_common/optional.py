"""Packages that are installed only for some features."""

from __future__ import annotations

import importlib
from typing import Any

from ortops.errors import OrtopsError


def optional_module(who: str, module: str, group: str, package: str = "") -> Any:
    """Imports a module of an optional package.

    Raises:
        OrtopsError: If it is not installed; the message names what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = package or module.partition(".")[0]
        raise OrtopsError(
            f"{who}: the package {package} is not installed; pip install ortops[{group}]"
        ) from error
