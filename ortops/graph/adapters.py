"""The metadata with which a model describes the adapter that `ortops.lora` added to it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ortops.errors import ModelError
from ortops.graph.files.json_fields import (
    BOOLEAN,
    TEXT,
    Expected,
    array_of,
    check_fields,
    object_of,
)
from ortops.graph.files.json_metadata import Entry, read_metadata, where
from ortops.graph.layer_names import fits

METADATA_KEY = "ortops.lora"
"""The metadata key of an adapter's description."""

_REMEDY = "remove the entry to use the model without an adapter"


@dataclass(frozen=True)
class Module:
    """A layer that has an adapter.

    Attributes:
        kind: ``"linear"``, ``"convolution"`` or ``"embedding"``.
        a: The name of A, [in, rank] and the kernel of a convolution. Layers that are one layer in
            PEFT share it.
        b: The name of B, [rank, out] and 1 for each axis of a kernel; it includes the scaling.
        rank: The rank.
        alpha: The numerator of the scaling.
        tensors: For each node of the layer, the names of its output without and with the adapter.
        peft: The layer's name in PEFT; empty if unknown.
        columns: The first and the last column (exclusive) of the node's output that the layer is,
            and the number of all columns; empty if the layer is all of it.
        dora: Whether the magnitudes of the weight's columns are trained, too (DoRA).
    """

    kind: str
    a: str
    b: str
    rank: int
    alpha: float
    tensors: list[list[str]]
    peft: str = ""
    columns: list[int] = field(default_factory=list)
    dora: bool = False

    @property
    def scale(self) -> str:
        """The name of the factor of each output in DoRA, which files of adapters hold."""
        return f"{self._scope}.lora_scale"

    @property
    def magnitude(self) -> str:
        """The name of the magnitude of each output in DoRA, which is trained."""
        return f"{self._scope}.lora_magnitude_vector.weight"

    @property
    def square(self) -> str:
        """The name of the squared norms of the weight of the base, by output."""
        return f"{self._scope}.lora_base_square"

    @property
    def _scope(self) -> str:
        return self.b.removesuffix(".lora_B.weight")


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter: layers y = W x become y = W x + scaling · B A x.

    Attributes:
        rank: The rank of layers that ``rank_pattern`` does not match.
        alpha: The alpha of layers that ``alpha_pattern`` does not match.
        rslora: Whether the scaling is alpha / √rank instead of alpha / rank.
        fingerprint: Identifies the base (see `ortops.lora.fingerprints`).
        modules: The layers, by name.
        rank_pattern: Ranks of layers, by regular expressions of their names, as in PEFT.
        alpha_pattern: Alphas of layers, likewise.
        dropout: The ratio of elements of A's inputs that training drops.
        weights: The names in transformers of weights that are trained themselves, by their names
            in the model: those of ``modules_to_save``, and biases.
        bias: Which biases are trained: ``"none"``, ``"all"`` or ``"lora_only"``.
    """

    rank: int
    alpha: float
    rslora: bool
    fingerprint: str
    modules: Mapping[str, Module]
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    weights: Mapping[str, str] = field(default_factory=dict)
    bias: str = ""

    @property
    def matrices(self) -> list[str]:
        """The names of all A and B, in the order of the layers."""
        names = (name for module in self.modules.values() for name in (module.a, module.b))
        return list(dict.fromkeys(names))

    @property
    def parameters(self) -> list[str]:
        """The names of what is trained: A and B, the magnitudes of DoRA, and whole weights."""
        magnitudes = [module.magnitude for module in self.modules.values() if module.dora]
        return [*self.matrices, *magnitudes, *self.weights]

    def scaling(self, module: Module) -> float:
        """Returns the scaling that B includes."""
        return scaling(module.rank, module.alpha, rslora=self.rslora)

    @property
    def scalings(self) -> dict[str, float]:
        """The scalings that the matrices B include, by name."""
        return {module.b: self.scaling(module) for module in self.modules.values()}

    def refuse_missing(self, known: Container[str]) -> None:
        """Rejects an adapter with missing A or B, or weights that are trained themselves.

        Args:
            known: The names of the model's tensors that may be one.

        Raises:
            ModelError: If one is missing.
        """
        for name in (*self.matrices, *self.weights):
            if name not in known:
                raise ModelError(
                    f"model: '{name}' of its adapter must be both an input and an initializer; "
                    "restore what ortops.lora.add created"
                )

    def dumps(self) -> str:
        """Returns the JSON, without what has no effect."""
        found = _with_effect(asdict(self))
        return json.dumps(
            found | {"modules": {n: _with_effect(m) for n, m in found["modules"].items()}}
        )

    def __str__(self) -> str:
        ranks = sorted({module.rank for module in self.modules.values()})
        alphas = sorted({module.alpha for module in self.modules.values()})
        rank, alpha = (", ".join(f"{each:g}" for each in numbers) for numbers in (ranks, alphas))
        dropout = f", dropout {self.dropout:g}" if self.dropout else ""
        dropout += ", DoRA" * any(module.dora for module in self.modules.values())
        dropout += f", {len(self.weights)} whole weights" * bool(self.weights)
        return f"rank {rank}, alpha {alpha}{dropout}, on {len(self.modules)} layers"


def _with_effect(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _OPTIONAL or value}


def scaling(rank: int, alpha: float, *, rslora: bool) -> float:
    """Returns the factor of the product B A.

    Source: alpha / rank in LoRA, arXiv:2106.09685; alpha / √rank in rsLoRA, arXiv:2312.03732.
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def is_rank(value: object) -> bool:
    """Whether a value read from JSON is a valid rank."""
    return type(value) is int and 1 <= value < 2**31


def is_alpha(value: object) -> bool:
    """Whether a value read from JSON is a valid alpha: a finite number other than 0."""
    return type(value) in (int, float) and 0 < abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def is_dropout(value: object) -> bool:
    """Whether a value read from JSON is a valid ratio of Dropout."""
    return type(value) in (int, float) and 0 <= value < 1  # type: ignore[operator]


def adapter_of(metadata: Iterable[Entry]) -> Adapter | None:
    """Returns the adapter described in the metadata of a model; None if there is none.

    Args:
        metadata: The ``metadata_props`` of a ModelProto.

    Raises:
        ModelError: If the description is invalid.
    """
    found = read_metadata(metadata, METADATA_KEY, _REMEDY)
    if found is None:
        return None
    _check(found, Adapter, "")
    modules = dict[str, Module]()
    for name, module in found["modules"].items():
        _check(module, Module, f"modules {name!r:.80}: ")
        made = Module(**module)
        _check_names(name, made, modules)
        modules[name] = made
    totals = set[str]()
    bases = set[str]()
    for name, module in modules.items():
        totals |= {total for _, total in module.tensors}  # of a later layer at the same node: legal
        for base, _ in module.tensors:  # branches may share the names of other tensors, not these
            if base in bases or base in totals:
                place = f"modules {name!r:.80}: 'tensors'"
                raise _refused(place, "start with unique names", base)
            bases.add(base)
    return Adapter(**(found | {"modules": modules}))


def _check(found: object, kind: type[Adapter | Module], place: str) -> None:
    """Rejects values that are not JSON objects with the fields of a class."""
    if not isinstance(found, dict):
        raise _refused(place.rstrip(": "), "be an object", found)
    known = {each.name for each in fields(kind)}
    for name in found.keys() - known:
        raise _refused(
            place + f"{name!r:.80}", f"not be present; known names are {', '.join(sorted(known))}"
        )
    expected = {each.name: FIELDS[each.name] for each in fields(kind)}
    start = f"{where(METADATA_KEY)}: {place}".rstrip(": ")
    check_fields(start, found, expected, optional=_OPTIONAL, remedy=_REMEDY)


def _check_names(name: str, module: Module, before: Mapping[str, Module]) -> None:
    """Rejects names other than those that `ortops.lora` gives to a layer."""
    place = f"modules {name!r:.80}: "
    alike = (module.kind, module.rank, module.alpha, module.peft)
    shared = {m.a for m in before.values() if (m.kind, m.rank, m.alpha, m.peft) == alike}
    for field_name, expected in (("a", f"{name}.lora_A.weight"), ("b", f"{name}.lora_B.weight")):
        found = getattr(module, field_name)
        if found != expected and not (field_name == "a" and found in shared):
            raise _refused(f"{place}'{field_name}'", f"be {expected!r:.80}", found)
    plain = re.sub(r"_[0-9]+$", "", name)  # the suffix distinguishes layers of the same name
    if module.peft and not any(fits(each, module.peft) for each in (name, plain)):
        raise _refused(f"{place}'peft'", "be a name that ends like the layer's name", module.peft)
    first, last, count = module.columns or (0, 1, 1)
    if not 0 <= first < last <= count or (module.columns and module.kind != "linear"):
        what = "be empty, or the first column of a linear layer, the last and the number of all"
        raise _refused(f"{place}'columns'", what, module.columns)


_NOTHING = object()


def _refused(what: str, must: str, value: object = _NOTHING) -> ModelError:
    got = "" if value is _NOTHING else f", got {value!r:.80}"
    subject = f"{what} must {must}{got}" if what else f"it must {must}{got}"
    return ModelError(f"{where(METADATA_KEY)}: {subject}; {_REMEDY}")


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_name, value))


def _is_columns(value: object) -> bool:
    return isinstance(value, list) and len(value) in (0, 3) and all(type(n) is int for n in value)


_KINDS = ("linear", "convolution", "embedding")
_NAME = Expected("the name of a tensor", _is_name)
_FINGERPRINT = re.compile(r"[0-9]{1,3}:[0-9a-f]{32}")

FIELDS: Mapping[str, Expected] = {
    "rank": Expected("an integer >= 1", is_rank),
    "alpha": Expected("a finite number other than 0", is_alpha),
    "rslora": BOOLEAN,
    "fingerprint": Expected(
        "a fingerprint: a version and 32 hexadecimal digits",
        lambda value: isinstance(value, str) and _FINGERPRINT.fullmatch(value) is not None,
    ),
    "modules": Expected(
        "an object of at least one layer", lambda value: isinstance(value, dict) and value != {}
    ),
    "rank_pattern": object_of("integers >= 1", is_rank),
    "alpha_pattern": object_of("finite numbers other than 0", is_alpha),
    "dropout": Expected("a number >= 0 and < 1", is_dropout),
    "weights": object_of("names", _is_name),
    "bias": Expected("'all' or 'lora_only', or empty", lambda v: v in ("", "all", "lora_only")),
    "kind": Expected(f"one of {', '.join(_KINDS)}", lambda value: value in _KINDS),
    "a": _NAME,
    "b": _NAME,
    "tensors": array_of("pairs of names", _is_pair, least=1),
    "peft": TEXT,
    "columns": Expected("an array of no or three integers", _is_columns),
    "dora": BOOLEAN,
}
"""What each field of `Adapter` and `Module` must be."""

_OPTIONAL = ("dropout", "dora", "weights", "bias")
"""Fields that `Adapter.dumps` leaves out where they have no effect."""
