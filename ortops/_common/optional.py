"""Packages that are installed only for some features."""

from __future__ import annotations

import importlib
from typing import Any

from ortops.errors import OrtopsError


def optional_module(who: str, module: str, group: str, package: str = "", instead: str = "") -> Any:
    """Imports a module of an optional package.

    Args:
        who: What needs it, which messages begin with.
        module: The module.
        group: The optional group of ortops that installs it.
        package: What messages call the package; by default, the module's first part.
        instead: How to do without it: the end of the message.

    Raises:
        OrtopsError: If it cannot be imported; the message names what to install.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        package = package or module.partition(".")[0]
        is_there = not isinstance(error, ModuleNotFoundError)
        what = f"{package}, which cannot be imported ({error})" if is_there else package
        raise missing_package(who, what, group, instead) from error


def missing_package(who: str, package: str, group: str, instead: str = "") -> OrtopsError:
    """Returns the error of a package that is missing, or too old.

    Example:
        >>> print(missing_package("LossPlot", "matplotlib", "plot"))
        LossPlot needs matplotlib; pip install ortops[plot]
    """
    remedy = f", or {instead}" if instead else ""
    return OrtopsError(f"{who} needs {package}; pip install ortops[{group}]{remedy}")
