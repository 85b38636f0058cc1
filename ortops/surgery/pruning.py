"""Removes channels from a model: structured pruning."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from ortops._common.arguments import choice, number, text, whole_number
from ortops.errors import ArgumentError, ModelError, UnsupportedError, did_you_mean
from ortops.graph.adapters import adapter_of
from ortops.graph.edit import all_nodes, describe
from ortops.graph.files import loading
from ortops.graph.files.loading import ModelLike
from ortops.graph.names import Names
from ortops.surgery.channel_rules import follow
from ortops.surgery.channels import Channels, Labels
from ortops.surgery.reading import Array, inferred, integers, logger, read, refuse_training
from ortops.surgery.reshaping import pieces

_QUANTIZED = re.compile(
    r"Q(Attention|Gemm|Linear|MoE)|QuantizeLinear|Integer|NBits|Bnb4|BlockQuantized|"
    r"(Dequantize|DynamicQuantize)[A-Z]"
)
"""Operators of quantized models."""


@dataclass(frozen=True)
class ChannelGroup:
    """Layers whose output channels can only be removed together.

    Attributes:
        weights: The names of their weights.
        channels: The number of their output channels; channels that an operator ties together,
            such as those of different groups of a convolution, count as one.
        prunable: How many of them `prune` may remove, if at least one is left.
        reason: Why the others stay; empty if there are none.

    Example:
        >>> ChannelGroup(("conv1.weight",), channels=32, prunable=32, reason="").channels
        32
    """

    weights: tuple[str, ...]
    channels: int
    prunable: int
    reason: str


@loading.blame_model
def channel_groups(model: ModelLike, *, keep: str | Sequence[str] = ()) -> list[ChannelGroup]:
    """Returns the groups of channels of a model, and whether `prune` may remove some of them.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        keep: See `prune`.

    Raises:
        ArgumentError: If a name in ``keep`` is not in the model.
        ModelError: See `prune`.
        UnsupportedError: See `prune`.

    Example:
        >>> from ortops.docs import examples
        >>> groups = channel_groups(examples.lenet())
        >>> [(*group.weights, group.prunable) for group in groups][:2]
        [('conv1.weight', 32), ('conv2.weight', 64)]
        >>> groups[-1].weights, groups[-1].prunable, groups[-1].reason
        (('fc2.weight',), 0, "they are channels of output 'logits'")
    """
    return [group.report() for group in _Pruning(*read(model), _names("keep", keep)).groups]


@loading.blame_model
def prune(
    model: ModelLike,
    ratio: float | Mapping[str, float],
    *,
    within: str = "group",
    scores: str = "magnitude",
    gradients: Mapping[str, npt.ArrayLike] | Iterable[Mapping[str, npt.ArrayLike]] | None = None,
    keep: str | Sequence[str] = (),
    multiple: int = 1,
) -> onnx.ModelProto:
    """Returns a smaller model, without the channels that matter least.

    Channels are removed from the weights that compute them, from the weights that read them and
    from everything between: normalization, biases, depthwise convolutions, shapes. Channels that a
    residual connection adds, for example, are removed together. The result computes what the model
    computes if the removed channels are zeros wherever they are multiplied with a weight. Train it
    afterwards.

    Channels that meet an operator for which this cannot be shown stay. `channel_groups` lists them
    with the reason, and what stays is logged.

    Args:
        model: A ModelProto, its bytes, or its path; not changed.
        ratio: The share of channels to remove, between 0 and 1; or a dict from names of weights, or
            patterns of names, to shares. Groups of other weights then stay.
        within: ``"group"`` removes this share of each group of channels; ``"model"`` removes it of
            all channels together, so that more channels of some layers are removed than of others.
        scores: What decides which channels are removed. ``"magnitude"``: those with the smallest
            weights; the sums of squares of a channel's weights, divided by their mean over the
            channels of the weight, are averaged over the group's weights (Li et al. 2017, in the
            form for groups). ``"taylor"``: those whose removal changes the loss least to first
            order, |Σ gradient · weight| over the weights that read the channel (Molchanov et al.
            2019), squared and added over batches.
        gradients: For ``"taylor"``, the gradients of the loss by name of the weight, as
            `ortops.TrainingSession.gradients` returns them; or several of them, one for each batch.
        keep: Names, or patterns of names, of weights whose output channels stay, or of tensors
            whose channels stay.
        multiple: The number of channels that stay in a group is rounded up to a multiple of this.
            onnxruntime's CPU convolutions are fastest with multiples of 8 or 16.

    Returns:
        A new model of the same opset. Each group has at least one channel. External data that do
        not change stay external, relative to the folder of the given file.

    Raises:
        ArgumentError: If an argument is wrong, or no channel would be removed.
        ModelError: If the model has training_info or a LoRA adapter.
        UnsupportedError: If the model is quantized or has functions, or no channel can be removed.

    Example:
        >>> from ortops.docs import examples
        >>> pruned = prune(examples.lenet(), 0.5)
        >>> [list(weight.dims) for weight in pruned.graph.initializer if len(weight.dims) > 1]
        [[16, 1, 3, 3], [32, 16, 3, 3], [64, 128], [10, 64]]
    """
    ratios = ratio if isinstance(ratio, Mapping) else {"*": ratio}
    if not ratios:
        raise ArgumentError("ratio must be a number or name at least one weight, got {}")
    shares = {
        text("ratio: names", name): number("ratio", share, above=0, below=1)
        for name, share in ratios.items()
    }
    choice("within", within, ("group", "model"))
    if within == "model" and isinstance(ratio, Mapping):
        raise ArgumentError("ratio must be a number if within='model', got a dict")
    choice("scores", scores, ("magnitude", "taylor"))
    if (scores == "taylor") != (gradients is not None):
        raise ArgumentError(
            "gradients must be given for scores='taylor' and for nothing else; compute them with "
            "TrainingSession.gradients(batch)"
        )
    multiple = whole_number("multiple", multiple, 1)
    pruning = _Pruning(*read(model), _names("keep", keep))
    pruning.score(gradients)
    pruning.choose(shares, within, multiple)
    return pruning.result()


def _names(argument: str, given: str | Sequence[str]) -> list[str]:
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, Sequence):
        raise ArgumentError(f"{argument} must be a list of names, got {given!r:.80}")
    return [text(argument, name, "names of weights or tensors") for name in listed]


@dataclass
class _Group:
    """Layers whose output channels belong together.

    Attributes:
        weights: The names of their weights.
        units: Their units, without duplicates.
        free: Those that may be removed.
        reason: Why the others stay.
    """

    weights: list[str]
    units: list[int]
    free: list[int] = field(default_factory=list)
    reason: str = ""

    def report(self) -> ChannelGroup:
        return ChannelGroup(tuple(self.weights), len(self.units), len(self.free), self.reason)


class _Pruning:
    """Decides which channels are removed, and removes them.

    Args:
        work: The model, changed in place.
        proto: The model as it was given.
        folder: The folder of its external data.
        keep: Names and patterns of what stays.
    """

    def __init__(
        self, work: ir.Model, proto: onnx.ModelProto, folder: Path | None, keep: Sequence[str]
    ) -> None:
        _refuse(work, proto)
        self._work, self._graph = work, work.graph
        known = inferred(proto, folder)
        self._copies = _copy_vectors(work.graph)
        self._channels = Channels(work.graph, known, work.graph.opset_imports.get("", 1))
        follow(self._channels)
        self._keep(keep)
        self.groups = self._grouped()
        self._removed: set[int] = set()
        self._scores: dict[int, float] = {}

    def _keep(self, patterns: Sequence[str]) -> None:
        channels = self._channels
        leaves = {leaf.name or "": leaf for leaf in channels.leaves}
        tensors = {value.name or "": value for value in channels.axes}
        for pattern in patterns:
            found = fnmatch.filter(tensors, pattern) or [
                name for name in tensors if name == pattern
            ]
            if not found:
                raise ArgumentError(
                    f"keep: the model has no weight or tensor '{pattern}'; "
                    + did_you_mean(pattern, tensors)
                )
            for name in found:
                axes = channels.axes[tensors[name]] or []
                if name in leaves and len(axes) > 1:
                    axes = [each for each in axes if each is not None and self._is_produced(each)]
                channels.fix_axes(axes, f"'{pattern}' is in keep")

    def _is_produced(self, labels: Labels) -> bool:
        return int(labels[0]) in self._channels.produced

    # -------------------------------------------------------------------------------------- choice

    def _grouped(self) -> list[_Group]:
        units = self._channels.units
        found: dict[int, _Group] = {}  # by unit
        for leaf in self._channels.leaves:
            for labels in self._channels.of(leaf):
                if labels is None or not self._is_produced(labels):
                    continue
                roots = dict.fromkeys(units.roots(labels).tolist())
                joined = {id(found[each]): found[each] for each in roots if each in found}
                group = next(iter(joined.values()), _Group([], []))
                for other in list(joined.values())[1:]:
                    group.weights += other.weights
                    group.units += other.units
                group.weights.append(leaf.name or "")
                group.units = list(dict.fromkeys([*group.units, *roots]))
                found.update(dict.fromkeys(group.units, group))
        groups = list({id(group): group for group in found.values()}.values())
        for group in groups:
            group.weights = list(dict.fromkeys(group.weights))
            group.free = [unit for unit in group.units if not units.is_fixed(unit)]
            group.reason = next((units.reason(u) for u in group.units if units.is_fixed(u)), "")
        return groups

    def score(
        self, gradients: Mapping[str, npt.ArrayLike] | Iterable[Mapping[str, npt.ArrayLike]] | None
    ) -> None:
        """Gives each unit that may be removed a score: by magnitude, or with gradients."""
        free = {unit for group in self.groups for unit in group.free}
        if not free:
            told = "; ".join(_told(group) for group in self.groups[:3])
            raise UnsupportedError(
                f"model: no channel can be removed ({told or 'it has no layers with weights'}); "
                "channel_groups(model) lists the reasons"
            )
        if gradients is None:
            self._scores = _magnitudes(self._channels, free)
            return
        batches = [gradients] if isinstance(gradients, Mapping) else gradients
        if not isinstance(batches, Iterable):
            raise ArgumentError(
                "gradients must be a dict from names of weights to arrays, or a list of them, got "
                f"{type(gradients).__name__}"
            )
        readers = _readers(self._channels, free)
        self._scores = dict.fromkeys(free, 0.0)
        given = False
        for batch in batches:
            given = True
            for unit, change in _changes(self._channels, readers, batch).items():
                self._scores[unit] += change**2
        if not given:
            raise ArgumentError("gradients must be those of at least one batch, got none")

    def choose(self, shares: Mapping[str, float], within: str, multiple: int) -> None:
        """Chooses the units to remove.

        Args:
            shares: The shares to remove, by pattern of names of weights.
            within: See `prune`.
            multiple: See `prune`.
        """
        if within == "model":
            every = [unit for group in self.groups for unit in group.free]
            chosen = set(self._worst(every, int(next(iter(shares.values())) * len(every) + 1e-9)))
            counts = [sum(unit in chosen for unit in group.free) for group in self.groups]
        else:
            counts = [int(self._share(g, shares) * len(g.free) + 1e-9) for g in self.groups]
        names = [name for group in self.groups for name in group.weights]
        for pattern in shares:
            if pattern not in names and not fnmatch.filter(names, pattern):
                raise ArgumentError(
                    f"ratio: no layer has a weight '{pattern}'; {did_you_mean(pattern, names)}"
                )
        for group, count in zip(self.groups, counts, strict=True):
            left = max(len(group.units) - count, 1)
            left = min(-(-left // multiple) * multiple, len(group.units))
            self._removed.update(self._worst(group.free, len(group.units) - left))
        self._leave_one()
        if not self._removed:
            raise ArgumentError(
                f"ratio removes no channel, got {next(iter(shares.values())):g} with "
                f"multiple={multiple} for groups of up to "
                f"{max(len(group.free) for group in self.groups)} channels; give a larger ratio"
            )

    def _share(self, group: _Group, shares: Mapping[str, float]) -> float:
        for pattern, share in shares.items():
            if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in group.weights):
                return share
        return 0.0

    def _worst(self, units: Sequence[int], count: int) -> list[int]:
        return sorted(units, key=lambda unit: self._scores[unit])[: max(count, 0)]

    def _leave_one(self) -> None:
        """Leaves the best channel where all would be removed, as in a part of a Split."""
        channels = self._channels
        seen: set[int] = set()
        for labels in itertools.chain(*(axes or [] for axes in channels.axes.values())):
            if labels is None or id(labels) in seen:
                continue
            seen.add(id(labels))
            roots = set(channels.units.roots(labels).tolist())
            if roots <= self._removed:
                self._removed.remove(max(roots, key=lambda unit: self._scores[unit]))

    # ------------------------------------------------------------------------------------- removal

    def result(self) -> onnx.ModelProto:
        """Returns the model without the chosen channels."""
        for leaf in self._channels.leaves:
            self._cut(leaf)
        self._write_numbers()
        for value, axes in self._channels.axes.items():
            if value.shape is None or not axes or value.const_value is not None:
                continue
            dims = list(value.shape)
            for place, labels in enumerate(axes):
                if labels is not None and isinstance(dims[place], int):
                    dims[place] = self._left(labels)
            value.shape = ir.Shape(dims)
        _merge_copies(self._work, self._copies)
        self._tell()
        result: onnx.ModelProto = ir.to_proto(self._work)
        return result

    def _left(self, labels: Labels) -> int:
        return int(self._channels.kept(labels, self._removed).sum())

    def _cut(self, leaf: ir.Value) -> None:
        masks = [
            None if labels is None else self._channels.kept(labels, self._removed)
            for labels in self._channels.of(leaf)
        ]
        if all(mask is None or mask.all() for mask in masks):
            return
        assert leaf.const_value is not None
        array = leaf.const_value.numpy()
        for axis, mask in enumerate(masks):
            if mask is not None:
                array = np.compress(mask, array, axis=axis)
        _set(leaf, np.ascontiguousarray(array), leaf.const_value.dtype)

    def _write_numbers(self) -> None:
        channels = self._channels
        for node, counted in channels.groups:
            node.attributes["group"] = ir.AttrInt64("group", self._left(counted))
        for node, name, index, parts in channels.numbers:
            given = channels.of(node.inputs[0])
            if any(each is not None and self._left(each) < len(each) for each in given):
                self._write(node, name, index, [self._left(part) for part in parts])
        for node, index, value, source in channels.shapes:
            for place, labels in enumerate(channels.of(value)):
                if labels is not None and self._left(labels) < len(labels):
                    self._write_size(node, index, value, place, source)

    def _write_size(
        self, node: ir.Node, index: int, value: ir.Value, place: int, source: ir.Value | None
    ) -> None:
        """Writes the size of an axis of a value to the constant shape that a node reads."""
        labels = self._channels.of(value)[place]
        assert labels is not None
        size = self._left(labels)
        found = pieces(node, index, len(self._channels.of(value)))
        assert found is not None
        old, holder, position, offset = found[place]
        axes = self._channels.of(source)
        copied = axes[place] if old == 0 and place < len(axes) else None
        if old == -1 or (copied is not None and self._left(copied) == size):
            return
        numbers = integers(holder, "", position)
        assert numbers is not None
        numbers[offset] = size
        self._write(holder, "", position, numbers)

    def _write(self, node: ir.Node, name: str, index: int, numbers: Sequence[int]) -> None:
        """Writes integers to an attribute, or to an input of a node."""
        old = integers(node, name, index)
        if old == list(numbers):
            return
        if name in node.attributes or (old is None and self._channels.opset < 13):
            node.attributes[name] = ir.AttrInt64s(name, list(numbers))
            return
        node.attributes.pop("num_outputs", None)
        like = node.inputs[index] if index < len(node.inputs) else None
        dtype = like.const_value.dtype if like is not None and like.const_value else None
        array = np.array(numbers, np.int64 if dtype is None else dtype.numpy())
        unique = Names(self._graph).unique(f"{describe(node).split()[-1][1:-1]}/{name or 'shape'}")
        constant = ir.Value(name=unique, const_value=ir.Tensor(array, name=unique))
        constant.type, constant.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(array.shape)
        if dtype is not None:
            constant.type = ir.TensorType(dtype)
        self._graph.register_initializer(constant)
        self._work.ir_version = max(self._work.ir_version, 4)
        if index >= len(node.inputs):
            node.resize_inputs(index + 1)
        node.replace_input_with(index, constant)
        if like is not None and not like.uses() and like.is_initializer():
            self._graph.initializers.pop(like.name or "", None)

    def _tell(self) -> None:
        changed = []
        for group in self.groups:
            gone = sum(unit in self._removed for unit in group.units)
            if gone:
                size = len(group.units)
                changed.append(f"{_called(group)} {size} → {size - gone}")
        stay = [_told(group) for group in self.groups if not group.free]
        logger.warning(
            "removed %d of %d channels: %s%s",
            len(self._removed),
            sum(len(group.units) for group in self.groups),
            _few(changed),
            f"; these stay: {_few(stay)}" if stay else "",
        )


def _refuse(work: ir.Model, proto: onnx.ModelProto) -> None:
    """Rejects models that cannot be pruned as a whole."""
    refuse_training(proto, "prune session.inference_model() and build again")
    if adapter_of(proto.metadata_props) is not None:
        raise ModelError(
            "model: it has a LoRA adapter; merge it with ortops.lora.merge(model), or prune the "
            "base model"
        )
    for function in work.functions.values():
        raise UnsupportedError(
            f"model: it has the function '{function.name}'; inline functions with "
            "onnx.inliner.inline_local_functions(model)"
        )
    for node in all_nodes(work.graph):
        if _QUANTIZED.search(node.op_type):
            raise UnsupportedError(
                f"{describe(node)}: quantized models cannot be pruned; prune the model in floating "
                "point, train it, and quantize it then"
            )


def _called(group: _Group) -> str:
    more = len(group.weights) - 1
    return f"'{group.weights[0]}'" + (f" and {more} more" if more else "")


def _told(group: _Group) -> str:
    return f"{_called(group)}: {group.reason}"


def _few(parts: Sequence[str], most: int = 6) -> str:
    more = f"; and {len(parts) - most} more" if len(parts) > most else ""
    return "; ".join(parts[:most]) + more


def _set(leaf: ir.Value, array: Array, dtype: ir.DataType) -> None:
    tensor = ir.Tensor(array, dtype=dtype, name=leaf.name)
    node = leaf.producer()
    if node is not None:
        node.attributes.clear()
        node.attributes.add(ir.AttrTensor("value", tensor))
    leaf.const_value = tensor
    leaf.type = leaf.type or ir.TensorType(dtype)
    leaf.shape = ir.Shape(array.shape)


# ---------------------------------------------------------------------------------- shared vectors


def _copy_vectors(graph: ir.Graph) -> dict[ir.Value, list[ir.Value]]:
    """Gives each node that reads a shared vector its own copy; returns the copies.

    PyTorch's dynamo exporter stores equal vectors once, but layers do not belong together because
    their biases are equal.
    """
    taken = Names(graph)
    copies: dict[ir.Value, list[ir.Value]] = {}
    for value in list(graph.initializers.values()):
        array, uses = value.const_value, list(value.uses())
        if array is None or len(array.shape) != 1 or array.size < 2 or len(uses) < 2:
            continue
        if not array.dtype.is_floating_point() or value.is_graph_output():
            continue
        for use in [each for each in uses if each.node.graph is graph][1:]:
            name = taken.unique(f"{value.name}.{len(copies.get(value, ())) + 1}")
            copy = ir.Value(name=name, type=value.type, const_value=array)
            copy.shape = ir.Shape(array.numpy().shape)
            graph.register_initializer(copy)
            use.node.replace_input_with(use.idx, copy)
            copies.setdefault(value, []).append(copy)
    return copies


def _merge_copies(work: ir.Model, copies: Mapping[ir.Value, list[ir.Value]]) -> None:
    """Removes copies that are still equal to another one."""
    for value, others in copies.items():
        kept = [value]
        for copy in others:
            same = next((each for each in kept if _equal(each, copy)), None)
            if same is None:
                kept.append(copy)
                work.ir_version = max(work.ir_version, 4)
                continue
            copy.replace_all_uses_with(same)
            work.graph.initializers.pop(copy.name or "")


def _equal(a: ir.Value, b: ir.Value) -> bool:
    assert a.const_value is not None
    assert b.const_value is not None
    if a.const_value is b.const_value:
        return True
    return a.const_value.numpy().tobytes() == b.const_value.numpy().tobytes()


# ------------------------------------------------------------------------------------------ scores


def _by_channel(values: Array, axis: int) -> npt.NDArray[np.float64]:
    """Returns the sums over all other axes."""
    others = tuple(each for each in range(values.ndim) if each != axis)
    found: npt.NDArray[np.float64] = values.sum(axis=others, dtype=np.float64)
    return found


def _magnitudes(channels: Channels, free: set[int]) -> dict[int, float]:
    """Returns the mean square of each unit's weights, relative to those of the other channels."""
    sums = dict.fromkeys(free, 0.0)
    counts = dict.fromkeys(free, 0)
    for leaf in channels.leaves:
        axes = channels.of(leaf)
        if len(axes) < 2 and leaf not in channels.scales:
            continue
        units = [None if a is None else channels.units.roots(a).tolist() for a in axes]
        if not any(unit in free for each in units for unit in each or ()):
            continue
        assert leaf.const_value is not None
        squares = leaf.const_value.numpy().astype(np.float64) ** 2
        for axis, roots in enumerate(units):
            if roots is None or free.isdisjoint(roots):
                continue
            sizes = _by_channel(squares, axis)
            mean = float(sizes.mean()) or 1.0
            for unit, size in zip(roots, sizes.tolist(), strict=True):
                if unit in sums:
                    sums[unit] += size / mean
                    counts[unit] += 1
    return {unit: sums[unit] / max(counts[unit], 1) for unit in free}


_Readers = list[tuple[ir.Value, int, list[int]]]


def _readers(channels: Channels, free: set[int]) -> _Readers:
    """Returns the weights that are multiplied with free units, with the axis and its units.

    Units that no weight reads, such as those of queries and keys, are given with the weights that
    compute them.
    """
    found: _Readers = []
    met: set[int] = set()
    for marked in (channels.contracted, channels.produced):
        for leaf in channels.leaves:
            for axis, labels in enumerate(channels.of(leaf)):
                if labels is None or int(labels[0]) not in marked:
                    continue
                roots = [
                    u if u in free - met else -1 for u in channels.units.roots(labels).tolist()
                ]
                if any(unit >= 0 for unit in roots):
                    found.append((leaf, axis, roots))
        met.update(unit for _, _, roots in found for unit in roots)
    return found


def _changes(
    channels: Channels, readers: _Readers, gradients: Mapping[str, Any]
) -> dict[int, float]:
    """Returns Σ gradient · weight of each unit: minus the change of the loss without it."""
    if not isinstance(gradients, Mapping):
        raise ArgumentError(
            "gradients must be a dict from names of weights to arrays, or a list of them, got a "
            f"list of {type(gradients).__name__}"
        )
    changes: dict[int, float] = {}
    for leaf, axis, roots in readers:
        name = leaf.name or ""
        if name not in gradients:
            raise ArgumentError(
                f"gradients: that of '{name}' is missing; train this weight (trainable=), or use "
                "scores='magnitude'"
            )
        assert leaf.const_value is not None
        weight, gradient = leaf.const_value.numpy(), np.asarray(gradients[name])
        if gradient.shape != weight.shape or not np.isfinite(gradient.astype(np.float64)).all():
            raise ArgumentError(
                f"gradients: that of '{name}' must be finite numbers of shape "
                f"{list(weight.shape)}, got shape {list(gradient.shape)}"
                + (", not all finite" if gradient.shape == weight.shape else "")
            )
        products = weight.astype(np.float64) * gradient.astype(np.float64)
        for unit, change in zip(roots, _by_channel(products, axis).tolist(), strict=True):
            if unit >= 0:
                changes[unit] = changes.get(unit, 0.0) + change
    return changes
