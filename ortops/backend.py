"""ONNX backends (`onnx.backend.base.Backend`) of ortops: one for each way in which it runs a model.

``python -m ortops.conformance --backend ortops.backend:Session`` runs the conformance suite on one.
"""

from __future__ import annotations

import json
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx.backend.base import Backend, BackendRep

from ortops._common.numbers import Array
from ortops.engine.inference import InferenceSession
from ortops.engine.lowering import lower
from ortops.engine.trainable.step_graph import STEP_GRAPH_KEY, step_graph
from ortops.engine.training.session import TrainingSession

__all__ = ["Lowered", "Session", "StepGraph"]


def _plain(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Opens a session of onnxruntime without the library of custom ops."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


class _Rep(BackendRep):
    """A session that takes and returns lists."""

    def __init__(self, session: onnxruntime.InferenceSession, model: onnx.ModelProto) -> None:
        self._session = session
        self._inputs = [value.name for value in model.graph.input]
        self._outputs = [value.name for value in model.graph.output]

    def run(self, inputs: Sequence[Array], **kwargs: Any) -> tuple[Any, ...]:
        """Returns the outputs, in order."""
        known = {value.name for value in self._session.get_inputs()}
        pairs = zip(self._inputs, inputs, strict=True)
        feeds = {name: np.asarray(value) for name, value in pairs if name in known}
        return tuple(self._session.run(self._outputs, feeds))


class _Session:
    """A TrainingSession, as the suite calls training models."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._session = TrainingSession(model)

    def initialize(self) -> None:
        self._session.reset()

    def step(self, inputs: Mapping[str, Array], entry: int | None = None) -> dict[str, Array]:
        return self._session.step(dict(inputs), entry=entry)

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        session = _plain(self._session.inference_model())
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))

    @property
    def state(self) -> Mapping[str, Array]:
        return self._session.state


class Session(Backend):
    """`ortops.InferenceSession` and `ortops.TrainingSession`.

    Example:
        >>> import numpy as np, onnx
        >>> model = onnx.parser.parse_model(
        ...     '<ir_version: 10, opset_import: ["": 21, "ai.onnx.preview.training": 1]>'
        ...     'square (float x) => (float g) { y = Mul (x, x)'
        ...     'g = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x) }')
        >>> Session.run_model(model, [np.float32(3)])
        (array(6., dtype=float32),)
    """

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the model in an InferenceSession."""
        return _Rep(InferenceSession(model), model)

    @classmethod
    def prepare_training(cls, model: onnx.ModelProto, device: str = "CPU") -> _Session:
        """Returns the model in a TrainingSession, with initialize, step, infer and state."""
        return _Session(model)


class Lowered(Backend):
    """`ortops.lower`, in a session of onnxruntime."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the lowered model in a session of onnxruntime."""
        return _Rep(_plain(lower(model)), model)

    @classmethod
    def prepare_training(cls, model: onnx.ModelProto, device: str = "CPU") -> _Steps:
        """Returns the model's lowered step graphs, with initialize, step, infer and state."""
        return _Steps(model, lowered=True)


class StepGraph(Backend):
    """`ortops.step_graph`, in a session of onnxruntime without the library of custom ops.

    It takes models with ``training_info`` only.
    """

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model has training_info."""
        return bool(model.training_info)

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Returns the inference graph in a session of onnxruntime."""
        return _Rep(_plain(model), model)

    @classmethod
    def prepare_training(cls, model: onnx.ModelProto, device: str = "CPU") -> _Steps:
        """Returns the model's step graphs, with initialize, step, infer and state."""
        return _Steps(model, lowered=False)


class _Steps:
    """Step graphs that are run as another language would: what they return is fed again."""

    def __init__(self, model: onnx.ModelProto, *, lowered: bool) -> None:
        self._model = model
        self._steps = []
        self.state: dict[str, Array] = {}
        for entry in range(len(model.training_info)):
            graph = step_graph(model, entry=entry)
            if not graph.graph.node:  # nothing to do, and onnxruntime opens no empty graph
                continue
            [text] = [p.value for p in graph.metadata_props if p.key == STEP_GRAPH_KEY]
            session = _plain(lower(graph) if lowered else graph)
            self._steps.append((session, json.loads(text)))
        starts = [model.graph, *(info.algorithm for info in model.training_info)]
        arrays = {i.name: onnx.numpy_helper.to_array(i) for g in starts for i in g.initializer}
        for _, updates in self._steps:
            self.state |= {name: arrays[name] for name in updates}

    def initialize(self) -> None:
        raise unittest.SkipTest("a step graph has no initialization")

    def step(self, inputs: Mapping[str, Array], entry: int | None = None) -> dict[str, Array]:
        found: dict[str, Array] = {}
        numbers = range(len(self._steps)) if entry is None else [entry]
        for number in numbers:
            session, updates = self._steps[number]
            names = [value.name for value in session.get_outputs()]
            declared = (*session.get_inputs(), *session.get_overridable_initializers())
            given = {**inputs, **self.state}
            feeds = {v.name: np.asarray(given[v.name]) for v in declared if v.name in given}
            returned = dict(zip(names, session.run(names, feeds), strict=True))
            self.state |= {name: returned[new] for name, new in updates.items()}
            found |= {name: value for name, value in returned.items() if len(numbers) == 1}
        return found

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        for tensor in model.graph.initializer:
            if tensor.name in self.state:
                tensor.CopyFrom(onnx.numpy_helper.from_array(self.state[tensor.name], tensor.name))
        session = _plain(model)
        names = [value.name for value in session.get_outputs()]
        return dict(zip(names, session.run(names, dict(inputs)), strict=True))
