"""What a model says, in its metadata, of the low-rank adapter that `ortops.lora` gave it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Protocol

from ortops.errors import ModelError

__all__ = ["METADATA_KEY", "Adapter", "Module", "adapter_of", "scaling", "value_for"]

METADATA_KEY = "ortops.lora"
"""Where a model describes its adapter."""


class _Entry(Protocol):
    key: str
    value: str


@dataclass(frozen=True)
class Module:
    """A layer that has an adapter.

    Attributes:
        kind: ``"linear"``, ``"convolution"`` or ``"embedding"``.
        a: The name of A, [in, rank] and the kernel of a convolution.
        b: The name of B, [rank, out] and a one for each axis of a kernel; it holds the scaling.
        rank: The rank.
        alpha: What scales the product, before it is divided by the rank.
        tensors: What the layer computes by itself, and with the adapter; a pair for each node that
            the layer is computed by.
        peft: What PEFT calls the layer; empty where that was never told.
    """

    kind: str
    a: str
    b: str
    rank: int
    alpha: float
    tensors: list[list[str]]
    peft: str = ""


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: layers y = W x become y = W x + scaling · B A x.

    Attributes:
        rank: The rank where ``rank_pattern`` gives no other.
        alpha: The same for ``alpha_pattern``.
        rslora: Whether the scaling is alpha / √rank, in place of alpha / rank.
        fingerprint: What tells the base from others (see `ortops.lora.save_adapter`).
        modules: The layers, by name.
        rank_pattern: Ranks of layers, by regular expressions of their names (see `value_for`).
        alpha_pattern: Alphas likewise.
    """

    rank: int
    alpha: float
    rslora: bool
    fingerprint: str
    modules: Mapping[str, Module]
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @property
    def parameters(self) -> list[str]:
        """The names of all A and B, in the order of the layers."""
        return [name for module in self.modules.values() for name in (module.a, module.b)]

    def scaling(self, module: Module) -> float:
        """Returns what B was multiplied by."""
        return scaling(module.rank, module.alpha, rslora=self.rslora)

    def dumps(self) -> str:
        """Returns the JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        ranks = sorted({module.rank for module in self.modules.values()})
        alphas = sorted({module.alpha for module in self.modules.values()})
        told = (", ".join(f"{number:g}" for number in numbers) for numbers in (ranks, alphas))
        rank, alpha = told
        return f"rank {rank}, alpha {alpha}, on {len(self.modules)} layers"


def scaling(rank: int, alpha: float, *, rslora: bool) -> float:
    """Returns what the product of B and A is multiplied by.

    Source: alpha / rank in LoRA, arXiv:2106.09685; alpha / √rank in rsLoRA, arXiv:2312.03732.
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def value_for(patterns: Mapping[str, float], module: str, default: float) -> float:
    """Returns the rank or alpha of a layer, as PEFT finds it.

    Args:
        patterns: Numbers by regular expressions, of which the first one goes that matches the name
            or what stands in it behind a dot.
        module: The name of the layer.
        default: What is returned where none matches.

    Raises:
        ModelError: If a pattern is no regular expression.
    """
    for pattern, number in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return number
        except re.error as error:
            raise ModelError(f"pattern '{pattern}': {error}; give a regular expression") from error
    return default


def adapter_of(metadata: Iterable[_Entry]) -> Adapter | None:
    """Returns the adapter that the metadata of a model describe, if there is one.

    Args:
        metadata: The ``metadata_props`` of a ModelProto.

    Raises:
        ModelError: If they do not describe one as `ortops.lora` does.
    """
    text = next((entry.value for entry in metadata if entry.key == METADATA_KEY), None)
    if text is None:
        return None
    try:
        given = json.loads(text)
        modules = {str(name): Module(**module) for name, module in given.pop("modules").items()}
        return Adapter(modules=modules, **given)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"model: its metadata_props '{METADATA_KEY}' are not what ortops.lora writes "
            f"({error}); remove them, and the model is one without an adapter"
        ) from error
