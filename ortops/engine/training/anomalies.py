"""Finds the node of a training step that makes the first value that is not finite."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime

from ortops.engine.lowering import lower
from ortops.engine.trainable.step_graph import GRADIENTS_KEY, STEP_GRAPH_KEY, Part, step_graph
from ortops.engine.training.trainer import Array, Batch, Trainer
from ortops.errors import DivergedError, OrtopsError

_SHOWN = 3
"""How many inputs of a node a message describes."""


class Anomalies:
    """Compares the variables before and after each step, and explains values that are not finite.

    Args:
        trainer: The session.
        entry: The index of the training_info entry that makes the steps.
    """

    def __init__(self, trainer: Trainer, entry: int) -> None:
        self._trainer, self._entry = trainer, entry
        self._before: dict[str, Array] = {}

    def begin(self) -> None:
        """Keeps the variables before a step."""
        self._before = dict(self._trainer.state)

    def check(
        self,
        loss: float,
        batches: Sequence[Batch],
        joined: Mapping[str, Array] | None = None,
        *,
        made: bool = True,
    ) -> None:
        """Raises an error that names the node if something is not finite.

        Args:
            loss: The loss of the step, or of the last batch.
            batches: The batches of the step.
            joined: The gradients that were applied, if there are several batches.
            made: Whether the step was made.

        Raises:
            DivergedError: If the loss or a variable is not finite.
        """
        wrong = self._wrong(loss)
        if wrong:
            step = self._trainer.steps_done + (not made)
            raise DivergedError(f"{wrong} at step {step}: {self.explain(batches, joined)}")

    def _wrong(self, loss: float) -> str:
        """Returns what is not finite after a step; "" if all is well."""
        if not np.isfinite(loss):
            return f"loss is {loss}"
        for name, array in self._trainer.state.items():
            if not _is_finite(array) and _is_finite(self._before.get(name)):
                return f"variable '{name}' is {_first(array)[0]}"
        return ""

    def explain(self, batches: Sequence[Batch], joined: Mapping[str, Array] | None = None) -> str:
        """Returns which node made the first value that is not finite in the step since `begin`.

        The step is repeated with standard operators, without onnxruntime's optimizations.

        Args:
            batches: The batches of the step.
            joined: The gradients that were applied, if there are several batches.
        """
        try:
            found = self._found(batches, joined)
        except (OrtopsError, RuntimeError, ValueError) as error:
            return f"the node that made it is not known, as the step cannot be repeated: {error}"
        return found or (
            "the node that made it is not known, as the step is finite when it is repeated with "
            "standard operators"
        )

    def _found(self, batches: Sequence[Batch], joined: Mapping[str, Array] | None) -> str:
        loss = self._trainer.loss_names()[0]
        model = self._trainer.model()
        part = _PartOfStep.of(model, self._entry, "gradients")
        gradients: Mapping[str, str] = json.loads(part.note(GRADIENTS_KEY))
        for number, batch in enumerate(batches, 1):
            part.run({**self._before, **batch})
            ends = [loss] if not _is_finite(part.values[loss]) else [*gradients.values()]
            origin = part.origin(ends)
            which = f" of part {number} of {len(batches)}" if len(batches) > 1 else ""
            if origin is not None:
                forward = origin.node.output[0] in part.before(loss)
                where = "forward" if forward else "backward"
                return f"{part.describe(origin)} in the {where} pass{which}"
            if not all(_is_finite(part.values[end]) for end in ends):
                wrong = [name for name, array in batch.items() if not _is_finite(array)]
                if wrong:
                    return f"{_described(wrong[0], batch[wrong[0]])}, in the data{which}"
        apply = _PartOfStep.of(model, self._entry, "apply")
        given: dict[str, str] = json.loads(apply.note(GRADIENTS_KEY))
        feeds = {**self._before, **batches[-1], **part.values}
        feeds |= {given[name]: array for name, array in (joined or {}).items() if name in given}
        apply.run(feeds)
        updates: Mapping[str, str] = json.loads(apply.note(STEP_GRAPH_KEY))
        origin = apply.origin(updates.values())
        return f"{apply.describe(origin)} in the update" if origin is not None else ""


class _Origin(NamedTuple):
    """A node that made a value that is not finite."""

    node: onnx.NodeProto
    output: str


class _PartOfStep:
    """A part of a step in which all tensors can be read.

    Attributes:
        values: The tensors of the last run.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._nodes = list(model.graph.node)
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._place = {node.output[0]: n for n, node in enumerate(self._nodes) if node.output}
        own = {value.name for value in model.graph.output}  # which lowering computes as copies
        self._names = {
            node.input[0]: node.output[0]
            for node in self._nodes
            if node.op_type == "Identity" and node.output[0] in own
        }
        self._constants = {
            each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer
        }
        self.values: dict[str, Array] = {}

    @classmethod
    def of(cls, model: onnx.ModelProto, entry: int, part: Part) -> _PartOfStep:
        """Returns a part of the step of a trainable model, in standard operators."""
        return cls(lower(step_graph(model, entry=entry, part=part)))

    def note(self, key: str) -> str:
        """Returns an entry of the metadata."""
        return next((n.value for n in self._model.metadata_props if n.key == key), "{}")

    def run(self, feeds: Mapping[str, Array]) -> None:
        """Computes all tensors; feeds that are not inputs are ignored."""
        shown = onnx.ModelProto()
        shown.CopyFrom(self._model)
        there = {value.name for value in shown.graph.output}
        shown.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in self._producer if name not in there
        )
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            shown.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        given = {v.name: feeds[v.name] for v in session.get_inputs() if v.name in feeds}
        given |= {
            v.name: feeds[v.name] for v in session.get_overridable_initializers() if v.name in feeds
        }
        names = [value.name for value in session.get_outputs()]
        self.values = {**self._constants, **given}
        self.values |= dict(zip(names, session.run(names, given), strict=True))

    def before(self, name: str) -> set[str]:
        """Returns the tensors that a tensor depends on, and itself."""
        found: set[str] = set()
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                node = self._producer.get(name)
                waiting += (each for each in _inputs(node) if each) if node else ()
        return found

    def origin(self, names: Iterable[str]) -> _Origin | None:
        """Returns the first node that made one of some tensors not finite; None if all are finite.

        A NaN comes from the node that made it of other numbers; if these are infinite, from the
        node that made them infinite, unless they were given as such.
        """
        names = list(names)
        for test in (np.isnan, np.isinf):
            found = self._first(names, test)
            if found is not None:
                overflow = self._first(_inputs(found.node), np.isinf)
                return overflow if test is np.isnan and overflow is not None else found
        return None

    def _first(self, names: Iterable[str], test: Callable[[Array], Any]) -> _Origin | None:
        """Returns the first node without inputs that pass a test, behind outputs that do."""
        seen: set[str] = set()
        leaves: list[_Origin] = []
        waiting = [name for name in names if self._has(name, test)]
        while waiting:
            name = waiting.pop()
            node = self._producer.get(name)
            if name in seen or node is None:
                continue
            seen.add(name)
            causes = [each for each in _inputs(node) if self._has(each, test)]
            waiting += causes
            if not causes:
                leaves.append(_Origin(node, name))
        return min(leaves, key=lambda each: self._place[each.node.output[0]], default=None)

    def _has(self, name: str, test: Callable[[Array], Any]) -> bool:
        array = self.values.get(name)
        return (
            isinstance(array, np.ndarray) and array.dtype.kind in "fc" and bool(test(array).any())
        )

    def describe(self, origin: _Origin) -> str:
        """Returns the node, what it made and of what."""
        node, output = origin
        name = f" '{node.name}'" if node.name else ""
        made = _described(self._names.get(output, output), self.values[output])
        inputs = []
        for each in dict.fromkeys(_inputs(node)):
            given = self.values.get(each)
            if isinstance(given, np.ndarray) and given.dtype.kind in "fc" and given.size:
                shown = self._names.get(each, each)
                inputs.append(f"'{shown}' is from {given.min():.6g} to {given.max():.6g}")
        read = f" ({'; '.join(inputs[:_SHOWN])})" if inputs else ""
        return f"{made}; it was made by {node.op_type} node{name}{read}"


def _inputs(node: onnx.NodeProto) -> list[str]:
    """Returns the tensors that a node reads, also in its inner graphs."""
    found = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {name for inner in graph.node for name in inner.output}
            read = (name for inner in graph.node for name in _inputs(inner))
            found += (name for name in read if name not in own)
    return found


def _is_finite(array: Array | None) -> bool:
    return array is None or array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _described(name: str, array: Array) -> str:
    """Returns which values of a tensor are not finite."""
    value, place, count = _first(array)
    return f"'{name}' is {value} at {place}, and {count} of its {array.size} values are not finite"


def _first(array: Array) -> tuple[Any, list[int], int]:
    """Returns the first value that is not finite, its place, and how many there are."""
    places = np.argwhere(~np.isfinite(array))
    place = places[0].tolist()
    return array[tuple(place)], place, len(places)
