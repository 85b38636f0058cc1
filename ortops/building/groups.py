"""Groups of parameters: which of them an optimizer updates with settings of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops.building.parameters import ScopeNames, matches
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.numbers import real
from ortops.optimizers import Custom, Optimizer

__all__ = ["Groups", "described", "optimizers_of", "ratio"]

Groups: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Names or patterns, as of what is trained, and settings of the optimizer for what they mean."""


def optimizers_of(
    optimizer: Optimizer,
    groups: Groups | None,
    parameters: Sequence[ir.Value],
    scopes: Mapping[str, ScopeNames],
) -> dict[str, Optimizer]:
    """Returns the optimizer of each parameter that a group means, by name.

    Where several patterns mean a parameter, it gets the settings of them all; of those that several
    give, the last.

    Args:
        optimizer: That of the others.
        groups: The groups.
        parameters: What is trained.
        scopes: The scopes of the nodes that read each initializer.

    Raises:
        ModelError: If a pattern means nothing that is trained, or a setting is unknown or does not
            fit.
    """
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise ModelError(
            f"groups is {groups!r}; a dict of settings for each name or pattern is accepted, such "
            "as {'*.bias': {'weight_decay': 0.0}}"
        )
    names = [value.name or "" for value in parameters]
    settings: dict[str, dict[str, Any]] = {}
    for pattern, given in groups.items():
        _check(optimizer, pattern, given)
        means = _means(pattern, names, scopes)
        if not means:
            raise ModelError(
                f"groups: '{pattern}' means nothing that is trained; "
                + did_you_mean(pattern, names)
            )
        for name in means:
            settings[name] = {**settings.get(name, {}), **given}
    return {name: _with(optimizer, own) for name, own in settings.items()}


def ratio(optimizer: Optimizer, base: Optimizer) -> float:
    """Returns what the learning rate of some parameters is to the others', in float32 values.

    Raises:
        ModelError: If the others' is 0.
    """
    own, other = float(np.float32(optimizer.peak)), float(np.float32(base.peak))
    if own and not other:
        raise ModelError(
            f"optimizer {base.name}: its learning rate is {other}, and that of some parameters "
            f"{optimizer.peak}; it is kept as a ratio, so give one > 0"
        )
    return 1.0 if own == other else own / other


def described(optimizer: Optimizer, base: Optimizer) -> str:
    """Returns the settings in which two optimizers differ, as text."""
    settings, others = _settings(optimizer), _settings(base)
    differ = {key: value for key, value in settings.items() if value != others[key]}
    return ", ".join(f"{key}={value!r}" for key, value in differ.items())


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Returns what a group may set, and what it is."""
    if isinstance(optimizer, Custom):
        return {"learning_rate": optimizer.peak, **optimizer.attributes}
    own = {each.name: getattr(optimizer, each.name) for each in fields(optimizer)}
    return own | {"learning_rate": optimizer.peak}


def _check(optimizer: Optimizer, pattern: object, given: object) -> None:
    """Refuses what is no group."""
    if not isinstance(pattern, str):
        raise ModelError(f"groups: {pattern!r} is no string; names and patterns are accepted")
    if not isinstance(given, Mapping):
        raise ModelError(
            f"groups: '{pattern}' has {given!r}; a dict of settings of the optimizer is accepted"
        )
    known = _settings(optimizer)
    for name in given:
        if name not in known:
            raise ModelError(
                f"groups: '{pattern}' sets {name!r}, which {optimizer.name} does not have; "
                + did_you_mean(str(name), known)
            )
    if "learning_rate" not in given:
        return
    try:
        replace(optimizer, learning_rate=float(given["learning_rate"]))
    except (TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            f"groups: '{pattern}' has the learning rate {given['learning_rate']!r}; a number >= 0 "
            "is accepted, which the optimizer's schedule multiplies too"
        ) from error
    if not np.float32(optimizer.peak):
        raise ModelError(
            f"groups: '{pattern}' has a learning rate, and that of {optimizer.name} is "
            f"{optimizer.peak}; it is kept as a ratio to that, so give the optimizer one > 0"
        )


def _means(pattern: str, names: Sequence[str], scopes: Mapping[str, ScopeNames]) -> list[str]:
    """Returns the parameters that a name or a pattern means."""
    if pattern in names:
        return [pattern]
    return [name for name in names if matches(pattern, name, scopes.get(name, ScopeNames()))]


def _with(optimizer: Optimizer, settings: Mapping[str, Any]) -> Optimizer:
    """Returns an optimizer with other settings."""
    try:
        if not isinstance(optimizer, Custom):
            return replace(optimizer, **settings)
        own = {name: value for name, value in settings.items() if name != "learning_rate"}
        for name, value in own.items():
            if math.isfinite(real(optimizer.attributes[name])) and not math.isfinite(real(value)):
                raise ModelError(
                    f"optimizer {optimizer.name}: {name} is {value!r}; a finite number is accepted"
                )
        function = functools.partial(optimizer.function, **own) if own else optimizer.function
        rate = settings.get("learning_rate", optimizer.learning_rate)
        return replace(optimizer, function=function, learning_rate=rate)
    except (ArgumentError, ModelError) as error:
        raise ModelError(f"groups: {error}") from error
