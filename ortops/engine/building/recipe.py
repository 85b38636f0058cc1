"""How a training algorithm was built, as JSON in the file, so that it can be built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import numpy as np

from ortops import losses, optimizers
from ortops.errors import OrtopsError

_MOST = 2**14  # numbers of an array in a recipe

MISSING_ARGUMENTS = "missing"
"""The key of the names of arguments, besides loss and optimizer, that a recipe cannot hold."""


def recipe_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `ortops.build_training_model` as far as JSON can hold them.

    Args:
        arguments: The arguments by name. A loss or an optimizer with functions, models or schedules
            in it is left out. If this applies to any other argument, it is listed as missing.
    """
    found = {name: _described(name, value) for name, value in arguments.items()}
    described = {name: value for name, value in found.items() if value is not None}
    lacking = [n for n, v in arguments.items() if v is not None and found[n] is None]
    lacking = [name for name in lacking if name not in ("loss", "optimizer")]
    return {**described, MISSING_ARGUMENTS: lacking} if lacking else described


def arguments_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `ortops.build_training_model` for the result of `recipe_of`.

    Raises:
        OrtopsError: If a loss or an optimizer in it is unknown or has other arguments.
    """
    found = {name: value for name, value in recipe.items() if name != MISSING_ARGUMENTS}
    try:
        if "loss" in found:
            found["loss"] = _made_loss(found["loss"])
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
        return _loss_record(losses.resolve(value))
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


def _loss_record(loss: Any) -> dict[str, Any] | None:
    """Returns a loss by its name, or a sum of losses."""
    if type(loss) is not losses.Combined:
        return _record(loss, losses.LOSSES)
    summands = [[weight, _loss_record(each)] for weight, each in loss.summands]
    return None if any(each is None for _, each in summands) else {"sum": summands}


def _made_loss(record: Mapping[str, Any]) -> losses.Loss:
    if "sum" not in record:
        return _made(record, losses.LOSSES)  # type: ignore[no-any-return]  # as the table says
    return losses.Combined(summands=tuple((w, _made_loss(each)) for w, each in record["sum"]))


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
        if isinstance(own, np.ndarray | np.generic) and own.size <= _MOST:
            own = own.tolist()
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
