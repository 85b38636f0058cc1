"""What several callbacks need: a number that is watched, paths, optional packages, memories."""

from __future__ import annotations

import importlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ortops.errors import ModelError, OrtopsError
from ortops.numbers import integer
from ortops.training.callback import Record

__all__ = [
    "Mode",
    "Monitor",
    "begins_anew",
    "check_count",
    "check_number",
    "check_path",
    "optional_module",
    "path_of",
    "remembered",
]

Mode: TypeAlias = Literal["auto", "max", "min"]

_UP = {"accuracy", "auc", "f1", "iou", "precision", "r2", "recall", "score", "top"}
_DOWN = {"error", "loss"}


class Monitor:
    """Finds the best epoch by a number of its record.

    Args:
        who: The callback, for messages.
        name: The number: ``loss``, ``validation_loss``, ``validation_<metric>``.
        mode: Whether more is better (``"max"``) or less (``"min"``); ``"auto"`` tells it from the
            name.
        minimum_change: A smaller change than this is no improvement.

    Attributes:
        best: The best number so far, or None.
        epoch: The epoch of it; 0 if there is none.
    """

    def __init__(self, who: str, name: str, mode: Mode, minimum_change: float) -> None:
        if not isinstance(name, str) or not name:
            raise OrtopsError(
                f"{who}: monitor is {name!r}; the name of a number of an epoch is accepted, such "
                "as 'loss', 'validation_loss', 'validation_accuracy'"
            )
        if mode not in ("auto", "max", "min"):
            raise OrtopsError(f"{who}: mode is {mode!r}; 'auto', 'max' or 'min' is accepted")
        check_number(who, "minimum_change", minimum_change, zero=True)
        self.who = who
        self.name = name
        self.is_more_better = mode == "max" or (mode == "auto" and _is_more_better(name))
        self.minimum_change = float(minimum_change)
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        self.best: float | None = None
        self.epoch = 0

    def improves(self, epoch: int, values: Mapping[str, float]) -> bool:
        """Takes an epoch in, and says whether it is the best so far.

        NaN and infinite numbers never are.

        Args:
            epoch: Its number, from 1.
            values: Its numbers.

        Raises:
            OrtopsError: If it has no such number.
        """
        if self.name not in values:
            known = ", ".join(f"'{name}'" for name in values)
            raise OrtopsError(
                f"{self.who}: monitor is '{self.name}', which epoch {epoch} does not have; it has "
                f"{known} (validation= and metrics= of fit give more)"
            )
        value = float(values[self.name])
        if not math.isfinite(value):
            return False
        if self.best is not None:
            gain = value - self.best if self.is_more_better else self.best - value
            if not (gain > 0 and gain >= self.minimum_change):
                return False
        self.best, self.epoch = value, epoch
        return True


def _is_more_better(name: str) -> bool:
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return bool(words & _UP) and not words & _DOWN


def begins_anew(record: Record) -> bool:
    """Whether a fit that begins is at its first batch, so that there is nothing to go on from."""
    return not record.history and not record.batch


def remembered(
    who: str, state: Mapping[str, Any], name: str, *, whole: bool = False
) -> float | int:
    """Returns a number of a state that a file holds.

    Raises:
        ModelError: If it is none.
    """
    value = state.get(name)
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (whole and value < 0):
        wanted = "an integer of at least 0" if whole else "a number"
        raise ModelError(
            f"{who}: the file that fit goes on from has {value!r} for its '{name}'; {wanted} is "
            "accepted"
        )
    return value


def check_count(who: str, what: str, value: object) -> int:
    """Returns an integer of at least 1.

    Raises:
        OrtopsError: If it is none.
    """
    number = integer(value)
    if number is None or number < 1:
        raise OrtopsError(f"{who}: {what} is {value!r:.80}; an integer of at least 1 is accepted")
    return number


def check_number(who: str, what: str, value: object, *, zero: bool = False) -> None:
    """Refuses what is no finite number above 0, or of at least 0."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        wanted = ">= 0" if zero else "> 0"
        raise OrtopsError(f"{who}: {what} is {value!r}; a finite number {wanted} is accepted")


def path_of(who: str, path: object) -> Path:
    """Returns a path that was given.

    Raises:
        OrtopsError: If it is none, or empty.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise OrtopsError(f"{who}: path is {path!r}; the path of a file is accepted")
    return Path(os.fsdecode(path))


def check_path(who: str, path: str | os.PathLike[str]) -> None:
    """Refuses a path that no file can be written to, before the training.

    Raises:
        OrtopsError: If its folder does not exist, or it is a folder itself.
    """
    file = Path(path)
    if not file.parent.is_dir():
        raise OrtopsError(
            f"{who}: '{file}' cannot be written, there is no folder '{file.parent}'; create it"
        )
    if file.is_dir():
        raise OrtopsError(f"{who}: '{file}' is a folder; give the path of a file")


def optional_module(who: str, module: str, group: str) -> Any:
    """Imports a module of an optional package.

    Raises:
        OrtopsError: If it is not installed; the message names what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise OrtopsError(
            f"{who}: the package {package} is not installed; pip install ortops[{group}]"
        ) from error
