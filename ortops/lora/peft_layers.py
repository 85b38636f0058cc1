"""Maps the layers of a model to those of PEFT, where exporters name and fuse them differently.

onnxruntime-genai fuses q_proj, k_proj and v_proj, which are separate in most models of
transformers, and separates gate_proj and up_proj, which Phi-3 fuses. An adapter of one form is
written exactly in the other: parts of a fused layer share A and have rows of B; separate layers
have blocks of a larger A and B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ortops.errors import ModelError, UnsupportedError, did_you_mean
from ortops.graph.adapters import scaling
from ortops.graph.files.json_text import read_settings
from ortops.graph.layer_names import (
    FUSED,
    common_name,
    ends_with,
    own_name,
    plain,
    standard,
    whole_of,
)
from ortops.lora.model import Array
from ortops.lora.targets import Target, bias_of, parts

_FUSING = ("phi3", "phi4")
"""The model types of transformers with qkv_proj and gate_up_proj."""


@dataclass(frozen=True)
class PeftLayer:
    """A layer of an adapter as PEFT stores it.

    Attributes:
        kind: See `ortops.graph.adapters.Module`.
        rank: The rank.
        alpha: The numerator of the scaling.
        a: A, [rank, in, …].
        b: B without the scaling, [out, rank, …].
        columns: For a part of a fused layer, see `ortops.graph.adapters.Module`.
        magnitude: The magnitudes of DoRA, [out]; None without.
    """

    kind: str
    rank: int
    alpha: float
    a: Array
    b: Array
    columns: Sequence[int] = ()
    magnitude: Array | None = None

    def rows(self, first: int, last: int) -> PeftLayer:
        """Returns the layer of some outputs."""
        magnitude = None if self.magnitude is None else self.magnitude[first:last]
        return replace(self, b=self.b[first:last], magnitude=magnitude)


class Places:
    """The layers of a model, to be found by their names in PEFT.

    Args:
        everything: The layers, without parts of fused ones.
    """

    def __init__(self, everything: Sequence[Target]) -> None:
        self._pieces = [part for target in everything for part in parts(target)]
        self._whole = list(everything)

    def order(self, target: Target) -> int:
        """Returns the position of a layer in the model."""
        return [*self._whole, *self._pieces].index(target)

    def of(self, peft: str, b: Array) -> list[tuple[list[Target], Array]]:
        """Returns the nodes that a layer of PEFT is computed by.

        Args:
            peft: The name.
            b: Its B.

        Returns:
            The nodes of each layer of the model, and the rows of B that belong to it.
        """
        found = self._named(peft) or self._named(common_name(peft))
        if found:
            return [(_single(found, peft), b)]
        scope, dot, last = peft.rpartition(".")
        separate = [self._named(scope + dot + part) for part in FUSED.get(last, ())]
        if separate and all(separate):
            layers = [_single(part, peft) for part in separate]
            ends = np.cumsum([layer[0].sizes[1] for layer in layers])
            if b.ndim == 2 and ends[-1] == len(b):
                return list(zip(layers, np.split(b, ends[:-1]), strict=True))
        known = dict.fromkeys(standard(t.module) for t in (*self._whole, *self._pieces))
        raise ModelError(
            f"layer '{peft}': the model has no such layer; {did_you_mean(peft, known)}"
        )

    def _named(self, peft: str) -> list[Target]:
        for layers in (self._whole, self._pieces):
            for fitting in (
                [t for t in layers if peft in (t.module, standard(t.module))],
                [t for t in layers if ends_with(t.module, peft)],
                [t for t in layers if ends_with(standard(t.module), peft)],
            ):
                if fitting:
                    return fitting
        return []


def _single(fitting: list[Target], peft: str) -> list[Target]:
    """Rejects nodes of several layers, and nodes that cannot have an adapter."""
    if len({t.key for t in fitting}) > 1:
        names = ", ".join(f"'{t.module}' ({t.weight.name})" for t in fitting)
        raise ModelError(
            f"layer '{peft}' matches several layers of the model: {names}; export the module that "
            "PEFT wraps, so that the names are the same"
        )
    if fitting[0].refused:
        raise UnsupportedError(
            f"{fitting[0].refused}, but PEFT's layer '{peft}' has one; train without this layer"
        )
    refuse_folded(fitting[0])
    return fitting


def refuse_folded(target: Target) -> None:
    """Rejects a convolution that contains a BatchNormalization, as PEFT's layer does not.

    Exporters and optimizers that fold one give the weight and the bias new names, unlike PyTorch's
    dynamo exporter, which gives the node the name of the BatchNormalization.
    """
    bias = bias_of(target.node)
    names = [value.name or "" for value in (target.weight, bias) if value is not None]
    if target.node.op_type != "Conv" or len(names) < 2:
        return
    if not any(n.startswith(target.module) or n.endswith((".weight", ".bias")) for n in names):
        raise UnsupportedError(
            f"layer '{target.module}': a BatchNormalization was folded into its weight "
            f"'{names[0]}' and bias '{names[1]}', but PEFT's layer comes before it; export with "
            "training=torch.onnx.TrainingMode.TRAINING and do_constant_folding=False"
        )


def peft_layers(
    layers: Mapping[str, PeftLayer],
    known: Mapping[str, str],
    columns: Mapping[str, Mapping[str, Sequence[int]]],
    *,
    prefix: str,
    model_type: str | None,
    rslora: bool,
) -> dict[str, PeftLayer]:
    """Returns the layers of an adapter by their names in PEFT, fused as in PEFT.

    Args:
        layers: The layers by their names in the model.
        known: The names in PEFT of layers that were read from there.
        columns: The columns of the parts of fused layers, by the names of both.
        prefix: A prefix to remove from names.
        model_type: The type of the model in transformers, if it is known.
        rslora: See `ortops.graph.adapters.Adapter`.
    """
    of_genai = any(standard(name) != plain(name) for name in layers)
    fusing = is_fusing(model_type)
    is_separating = of_genai if model_type is None else not fusing
    result: dict[str, PeftLayer] = {}
    joined: dict[str, dict[str, PeftLayer]] = {}
    for name, layer in layers.items():
        own = known.get(name, "")
        found = own or own_name(standard(name), model_type).removeprefix(prefix)
        whole = whole_of(standard(name))
        if whole and ((fusing and not own) or (own and ends_with(whole, own))):
            part = standard(name).rpartition(".")[2]
            joined.setdefault(own or whole.removeprefix(prefix), {})[part] = layer
            continue
        if not own and is_separating and columns.get(name):
            each = {
                standard(part).removeprefix(prefix): layer.rows(first, last)
                for part, (first, last, _) in columns[name].items()
            }
        else:
            each = {found: layer}
        for found, layer in each.items():
            if found in result:
                raise ModelError(
                    "model: two of its layers have the same name in PEFT; merge the "
                    "adapter with ortops.lora.merge, or add it again"
                )
            result[found] = layer
    return result | {name: _joined(name, each, rslora) for name, each in joined.items()}


def is_fusing(model_type: str | None) -> bool:
    """Whether a model of a type has qkv_proj and gate_up_proj in transformers."""
    return model_type is not None and model_type.startswith(_FUSING)


def _joined(name: str, layers: Mapping[str, PeftLayer], rslora: bool) -> PeftLayer:
    """Returns an adapter of a fused layer that computes what those of its parts compute."""
    order = [part for part in FUSED[name.rpartition(".")[2]] if part in layers]
    given = [layers[part] for part in order]
    spans = _spans(name, order, given)
    first = given[0]
    found = [each.magnitude for each in given if each.magnitude is not None]
    magnitude = np.concatenate(found) if found else None
    if magnitude is not None and len(magnitude) != spans[0][2]:
        raise ModelError(f"model: PEFT's '{name}' needs DoRA for all its parts; add the others")
    alike = all(each.alpha == first.alpha and np.array_equal(each.a, first.a) for each in given)
    rank = first.rank if alike else sum(each.rank for each in given)
    scale = scaling(first.rank, first.alpha, rslora=rslora)
    b = np.zeros((spans[0][2], rank), first.b.dtype)
    column = 0
    for (start, stop, _), each in zip(spans, given, strict=True):
        factor = scaling(each.rank, each.alpha, rslora=rslora) / scale
        b[start:stop, column : column + each.rank] = each.b * b.dtype.type(factor)
        column += 0 if alike else each.rank
    alpha = first.alpha if alike else scale / scaling(rank, 1.0, rslora=rslora)
    a = first.a if alike else np.concatenate([each.a for each in given])
    return PeftLayer("linear", rank, alpha, a, b, magnitude=magnitude)


def _spans(
    name: str, order: Sequence[str], given: Sequence[PeftLayer]
) -> list[tuple[int, int, int]]:
    """Returns the first and the last row of each part in the fused B, and the number of all."""
    if all(each.columns for each in given):
        return [(c[0], c[1], c[2]) for c in (each.columns for each in given)]
    parts = FUSED[name.rpartition(".")[2]]
    sizes = {part: len(each.b) for part, each in zip(order, given, strict=True)}
    if len(order) < len(parts):
        if len(parts) > 2:
            raise ModelError(
                f"model: PEFT's layer '{name}' needs an adapter of {', '.join(parts)} each, got "
                f"{', '.join(order)}; add the others"
            )
        sizes = dict.fromkeys(parts, next(iter(sizes.values())))
    ends = dict(zip(parts, np.cumsum([sizes[part] for part in parts]).tolist(), strict=True))
    total = max(ends.values())
    return [(ends[part] - sizes[part], ends[part], total) for part in order]


def model_type_beside(file: Path) -> str | None:
    """Returns the type of a model, from config.json or genai_config.json in its folder."""
    for folder in (file.parent, file.parent.parent):
        for name in ("config.json", "genai_config.json"):
            try:
                found = read_settings(folder / name)
                kind = found["model"]["type"] if "genai" in name else found["model_type"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if isinstance(kind, str):
                return kind
    return None
