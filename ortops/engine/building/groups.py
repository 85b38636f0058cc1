"""Groups of parameters with optimizer settings of their own."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ortops._common.arguments import number
from ortops._common.numbers import real
from ortops.engine.building.scopes import ScopeNames, matched, split
from ortops.errors import ArgumentError, ModelError, did_you_mean
from ortops.optimizers import Custom, Optimizer

Groups: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Settings of the optimizer for some parameters, by names or patterns as in ``trainable``."""


def optimizers_of(
    optimizer: Optimizer,
    groups: Groups | None,
    parameters: Sequence[ir.Value],
    scopes: Mapping[str, ScopeNames],
) -> dict[str, Optimizer]:
    """Returns the optimizer of each parameter that is in a group, by name.

    If several patterns match a parameter, their settings are combined, and later ones take
    precedence. A key that begins with ``!`` means all other parameters.

    Args:
        optimizer: The optimizer of all other parameters.
        groups: The groups.
        parameters: The parameters that are trained.
        scopes: The scopes of the nodes that read each initializer.

    Raises:
        ArgumentError: If a setting is unknown or not valid.
        ModelError: If a pattern matches no parameter.
    """
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise ArgumentError(
            "groups must be a dict of settings for each name or pattern, such as "
            f"{{'*.bias': {{'weight_decay': 0.0}}}}, got {groups!r}"
        )
    names = [value.name or "" for value in parameters]
    settings: dict[str, dict[str, Any]] = {}
    for key, given in groups.items():
        _check(optimizer, key, given)
        (pattern,), excluded = split([key], names)
        out = {name for each in excluded for name in matched(each, names, scopes)}
        found = [name for name in matched(pattern, names, scopes) if name not in out]
        if not found or (excluded and not out):
            what = f"excludes {'every' if out else 'no'}" if excluded else "matches no"
            hint = did_you_mean(key[len(excluded) :], names)
            raise ModelError(f"groups: '{key}' {what} parameter that is trained; {hint}")
        for name in found:
            settings[name] = {**settings.get(name, {}), **given}
    return {name: _with(optimizer, own) for name, own in settings.items()}


def ratio(optimizer: Optimizer, base: Optimizer) -> float:
    """Returns the ratio of an optimizer's learning rate to another's, of their float32 values.

    Raises:
        ArgumentError: If the other learning rate is 0.
    """
    own, other = float(np.float32(optimizer.peak)), float(np.float32(base.peak))
    if own and not other:
        raise ArgumentError(
            f"optimizer {base.name}: its learning rate must be > 0, got {other}, because the "
            f"learning rate {optimizer.peak} of some parameters is stored as a ratio to it"
        )
    return 1.0 if own == other else own / other


def difference(optimizer: Optimizer, base: Optimizer) -> str:
    """Returns the settings in which an optimizer differs from another, as text."""
    settings, others = _settings(optimizer), _settings(base)
    differ = {key: value for key, value in settings.items() if value != others[key]}
    return ", ".join(f"{key}={value!r}" for key, value in differ.items())


def _settings(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the settings that a group can change, by name."""
    if isinstance(optimizer, Custom):
        return {"learning_rate": optimizer.peak, **optimizer.attributes}
    own = {each.name: getattr(optimizer, each.name) for each in fields(optimizer)}
    return own | {"learning_rate": optimizer.peak}


def _check(optimizer: Optimizer, pattern: object, given: object) -> None:
    """Raises an ArgumentError if an item of ``groups`` is not valid."""
    if not isinstance(pattern, str):
        raise ArgumentError(f"groups: names and patterns must be strings, got {pattern!r}")
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"groups: '{pattern}' must have a dict of optimizer settings, got {given!r}"
        )
    known = _settings(optimizer)
    for name in given:
        if name not in known:
            raise ArgumentError(
                f"groups: '{pattern}' sets {name!r}, which {optimizer.name} does not have; "
                + did_you_mean(str(name), known)
            )
    if "learning_rate" in given:
        try:
            number("learning_rate", given["learning_rate"], minimum=0)
        except ArgumentError as error:
            raise ArgumentError(
                f"groups: '{pattern}': {error}; the optimizer's schedule applies to it as well"
            ) from error
        if not np.float32(optimizer.peak):
            raise ArgumentError(
                f"groups: '{pattern}' has a learning rate, which is stored as a ratio to that of "
                f"{optimizer.name}, which must be > 0, got {optimizer.peak}"
            )


def _with(optimizer: Optimizer, settings: Mapping[str, Any]) -> Optimizer:
    """Returns an optimizer with other settings."""
    try:
        if not isinstance(optimizer, Custom):
            return replace(optimizer, **settings)
        own = {name: value for name, value in settings.items() if name != "learning_rate"}
        for name, value in own.items():
            if math.isfinite(real(optimizer.attributes[name])):
                number(f"optimizer {optimizer.name}: {name}", value)
        function = functools.partial(optimizer.function, **own) if own else optimizer.function
        rate = settings.get("learning_rate", optimizer.learning_rate)
        return replace(optimizer, function=function, learning_rate=rate)
    except ArgumentError as error:
        raise ArgumentError(f"groups: {error}") from error
