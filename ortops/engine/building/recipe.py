"""How a training algorithm was built, as JSON in the file, so that it can be built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import numpy as np

from ortops import losses, optimizers
from ortops.errors import OrtopsError


def recipe_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `ortops.build_training_model` as far as JSON can hold them.

    Args:
        arguments: The arguments by name. A loss or an optimizer with functions, arrays, models or
            schedules in it is left out. If this applies to any other argument, the result is empty.
    """
    found = {name: _described(name, value) for name, value in arguments.items()}
    for name, value in arguments.items():
        if value is not None and found[name] is None and name not in ("loss", "optimizer"):
            return {}
    return {name: value for name, value in found.items() if value is not None}


def arguments_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `ortops.build_training_model` for the result of `recipe_of`.

    Raises:
        OrtopsError: If a loss or an optimizer in it is unknown or has other arguments.
    """
    found = dict(recipe)
    try:
        if "loss" in found:
            found["loss"] = _made(found["loss"], losses.LOSSES)
        if "optimizer" in found:
            found["optimizer"] = _made(found["optimizer"], optimizers.OPTIMIZERS)
        if "inputs" in found:
            pairs = found["inputs"].items()
            found["inputs"] = {name: (np.dtype(dtype), dims) for name, (dtype, dims) in pairs}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OrtopsError(
            f"with_trainable: the file does not say correctly how it was built ({error}); give "
            "loss= and optimizer="
        ) from error
    return found


def _described(name: str, value: Any) -> Any:
    """Returns an argument as JSON; None if that is impossible, or it is None."""
    if name == "loss":
        return _record(losses.resolve(value), losses.LOSSES)
    if name == "optimizer":
        return _record(optimizers.resolve(value), optimizers.OPTIMIZERS)
    if name == "inputs" and value:
        return {
            key: [np.dtype(dtype).name, [_dimension(dim) for dim in dims]]
            for key, (dtype, dims) in value.items()
        }
    if name == "groups" and value:
        value = {pattern: dict(own) for pattern, own in value.items()}
        plain = all(_is_plain(each) for own in value.values() for each in own.values())
        return value if plain else None
    return value if _is_plain(value) else None


def _dimension(value: Any) -> str | int | None:
    """Returns a dimension, which may be a number of numpy, as JSON."""
    return value if value is None or isinstance(value, str) else int(value)


def _record(value: Any, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a dataclass by its name, with the fields that differ from their defaults."""
    name = type(value).__name__
    if not is_dataclass(value) or known.get(name) is not type(value):
        return None
    given: dict[str, Any] = {}
    for each in fields(value):
        own = getattr(value, each.name)
        if each.default is not MISSING and type(own) is type(each.default) and own == each.default:
            continue
        if not _is_plain(own) or not each.init:
            return None
        given[each.name] = own
    return {"name": name, **({"arguments": given} if given else {})}


def _made(record: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    return known[record["name"]](**record.get("arguments", {}))


def _is_plain(value: object) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]  # it is a sequence
    return value is None or type(value) in (bool, int, float, str)
