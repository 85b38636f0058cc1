"""Models with ``training_info``, executed as IR.md and onnx.proto describe it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortops.reference.gradient import Gradient
from ortops.reference.optimizers import Adagrad, Adam, Momentum
from ortops.reference.traced import Array

OPS: list[type[OpRun]] = [Gradient, Adagrad, Adam, Momentum]
"""The operators of the domain, for ``ReferenceEvaluator(model, new_ops=OPS)``."""


class Evaluator(ReferenceEvaluator):
    """A ReferenceEvaluator that knows the domain, in functions of the model as well.

    A `ReferenceEvaluator` does not pass ``new_ops`` on to functions.

    Example:
        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model(
        ...     '<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>'
        ...     'square (float x) => (float g) { y = Mul (x, x)'
        ...     'g = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x) }')
        >>> Evaluator(model).run(None, {"x": np.float32(3)})
        [array(6., dtype=float32)]
    """

    def __init__(self, proto: Any, *, new_ops: Any = None, **kwargs: Any) -> None:
        super().__init__(proto, new_ops=[*(new_ops or []), *OPS], **kwargs)


def _names(values: Sequence[Any]) -> list[str]:
    return [value.name for value in values]


def _bindings(pairs: Sequence[onnx.StringStringEntryProto]) -> dict[str, str]:
    """Returns what is assigned to each variable; a variable must not occur twice."""
    found = {pair.key: pair.value for pair in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"training_info: a variable is bound twice: {_keys(pairs)}")
    return found


def _keys(pairs: Sequence[onnx.StringStringEntryProto]) -> list[str]:
    return [pair.key for pair in pairs]


def _model_of(graph: onnx.GraphProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a graph with the imports and functions of a model."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    del made.training_info[:]
    made.graph.CopyFrom(graph)
    return made


def _combined(inference: onnx.GraphProto, algorithm: onnx.GraphProto) -> onnx.GraphProto:
    """Returns the concatenation of the fields of two graphs.

    "the actual input/initializer/output/node/value_info/sparse_initializer list of the training
    graph is the concatenation of" those of both. "This combined graph must satisfy the normal ONNX
    conditions."
    """
    graph = onnx.GraphProto()
    graph.CopyFrom(inference)
    for field in ("input", "initializer", "output", "node", "value_info", "sparse_initializer"):
        getattr(graph, field).extend(getattr(algorithm, field))
    defined = [*_names(graph.input), *(name for node in graph.node for name in node.output if name)]
    for values in (defined, _names(graph.initializer)):
        if twice := {name for name in values if values.count(name) > 1}:
            raise ValueError(f"training_info: the algorithm defines {sorted(twice)} again")
    if hidden := set(_names(algorithm.initializer)) & set(defined[len(graph.input) :]):
        raise ValueError(f"training_info: the algorithm defines {sorted(hidden)} again")
    known = {*defined[: len(graph.input)], *_names(graph.initializer)}
    for node in graph.node:
        if missing := set(node.input) - known - {""}:
            raise ValueError(f"training_info: {sorted(missing)} are read and not defined")
        known |= set(node.output)
    return graph


class _Entry:
    """An entry of training_info: its graphs and bindings."""

    def __init__(self, model: onnx.ModelProto, info: onnx.TrainingInfoProto) -> None:
        self.updates = _bindings(info.update_binding)
        self.initial = _bindings(info.initialization_binding)
        self.initializers = {
            t.name: t for t in (*model.graph.initializer, *info.algorithm.initializer)
        }
        start, graph = info.initialization, _combined(model.graph, info.algorithm)
        if start.input:
            raise ValueError(f"training_info: initialization has inputs: {_names(start.input)}")
        for bindings, outputs in (
            (self.updates, _names(graph.output)),
            (self.initial, _names(start.output)),
        ):
            if unknown := bindings.keys() - self.initializers.keys():
                raise ValueError(f"training_info: no initializers: {sorted(unknown)}")
            if unknown := set(bindings.values()) - set(outputs):
                raise ValueError(f"training_info: no outputs: {sorted(unknown)}")
        self.inputs = _names(graph.input)
        self._step = Evaluator(_model_of(graph, model))
        self._start = Evaluator(_model_of(start, model)) if self.initial else None

    def start(self) -> dict[str, Array]:
        """Returns the values that the initialization assigns."""
        if self._start is None:
            return {}
        found = self._start.run(None, {})
        outputs = dict(zip(self._start.output_names, found, strict=True))
        return {name: outputs[value] for name, value in self.initial.items()}

    def step(self, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Returns the outputs, and the values that the algorithm assigns."""
        found = self._step.run(None, dict(feeds)) if self._step.output_names else []
        outputs = dict(zip(self._step.output_names, found, strict=True))
        return outputs, {name: outputs[value] for name, value in self.updates.items()}


class TrainingEvaluator:
    """A training model: "a stateful object" with the three methods of IR.md.

    Args:
        model: A model with ``training_info``, or its path or bytes.

    Raises:
        ValueError: If a binding or a combined graph is not valid.

    Example:
        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model(
        ...     '<ir_version: 10, opset_import: ["": 21]>'
        ...     'line (float x) => (float y) <float w = {1.0}> { y = Mul (w, x) }')
        >>> info = model.training_info.add()
        >>> info.algorithm.CopyFrom(onnx.parser.parse_graph(
        ...     'double () => (float w_new) { w_new = Add (w, w) }'))
        >>> binding = info.update_binding.add(key="w", value="w_new")
        >>> evaluator = TrainingEvaluator(model)
        >>> outputs = evaluator.step({"x": np.float32(3)})
        >>> evaluator.infer({"x": np.float32(3)})
        {'y': array(6., dtype=float32)}
    """

    def __init__(self, model: onnx.ModelProto | bytes | str | os.PathLike[str]) -> None:
        if isinstance(model, bytes):
            model = onnx.load_from_string(model)
        elif not isinstance(model, onnx.ModelProto):
            if Path(model).exists() and not Path(model).is_file():  # a pipe may have no end
                raise ValueError(f"file '{os.fspath(model)}' is not a regular file")
            model = onnx.load(model)
        self._inference = Evaluator(_model_of(model.graph, model))
        self._entries = [_Entry(model, info) for info in model.training_info]
        keys = [name for entry in self._entries for name in entry.updates]
        if len(set(keys)) < len(keys):
            raise ValueError(f"training_info: two entries update one variable: {keys}")
        self._initial = {
            name: numpy_helper.to_array(entry.initializers[name])
            for entry in self._entries
            for name in (*entry.updates, *entry.initial)
        }
        self._state = dict(self._initial)

    @property
    def state(self) -> dict[str, Array]:
        """The current values of the state variables, by name."""
        return dict(self._state)

    def initialize(self) -> None:
        """Resets all variables to their initializers, then executes the initializations."""
        state = dict(self._initial)
        for entry in self._entries:
            self._assign(state, entry.start())
        self._state = state

    def step(self, inputs: Mapping[str, Array], entry: int | None = None) -> dict[str, Array]:
        """Executes the algorithm of each entry, in order, and assigns what it computes.

        Args:
            inputs: Inputs of the inference graph and the algorithms, by name.
            entry: The position of the only entry to execute.

        Returns:
            The outputs of the combined graphs, by name; of several of one name, the last.
        """
        state, outputs = dict(self._state), dict[str, Array]()
        for one in self._entries if entry is None else [self._entries[entry]]:
            own = {name: value for name, value in state.items() if name in one.initializers}
            fed = {name: inputs[name] for name in one.inputs if name in inputs}
            found, assigned = one.step({**fed, **own})
            outputs |= found
            self._assign(state, assigned)
        self._state = state
        return outputs

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Runs the inference graph with the current values; returns its outputs, by name."""
        own = {name: self._state[name] for name in self._inference.rt_inits_ if name in self._state}
        found = self._inference.run(None, {**inputs, **own})
        return dict(zip(self._inference.output_names, found, strict=True))

    @staticmethod
    def _assign(state: dict[str, Array], values: Mapping[str, Array]) -> None:
        for name, value in values.items():
            old = state[name]
            if value.shape != old.shape or value.dtype != old.dtype:
                raise ValueError(
                    f"training_info: '{name}' is {old.dtype} {old.shape} and gets "
                    f"{value.dtype} {value.shape}"
                )
            state[name] = value
