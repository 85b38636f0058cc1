"""What tests read of a session that is not public, and that `TrainingSession.report` does not tell.

It stands here and nowhere else, so that code can be moved without changes in many tests.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnxruntime

from ortops import TrainingSession
from ortops.engine.execution.execution import Execution
from ortops.engine.execution.packed import Packed
from ortops.engine.execution.variant import Binding, Variant
from ortops.engine.training.loaded_model import LoadedModel

__all__ = [
    "binding_of",
    "execution_of",
    "graph_of",
    "loaded_of",
    "memory_of",
    "packed_of",
    "session_of",
]


def loaded_of(session: TrainingSession) -> LoadedModel:
    """Returns the model in memory."""
    return session._loaded


def execution_of(session: TrainingSession) -> Execution:
    """Returns what holds the variables and makes the steps."""
    return session._execution


def memory_of(session: TrainingSession, name: str) -> Any:
    """Returns the present value of a variable in its own memory; `state` returns copies."""
    return execution_of(session).present(name)


def packed_of(session: TrainingSession) -> list[Packed]:
    """Returns the packed updates, with their formulas."""
    return [each for part in execution_of(session)._parts for each in part.template.packed]


def graph_of(session: TrainingSession) -> ir.Graph:
    """Returns the graph that steps run for batches of any shape."""
    return _variant_of(session).graph


def session_of(session: TrainingSession) -> onnxruntime.InferenceSession:
    """Returns the onnxruntime session that runs this graph."""
    found = _variant_of(session).session
    assert found is not None
    return found


def binding_of(session: TrainingSession) -> Binding:
    """Returns this graph, bound to the memory of the variables as for the first step."""
    return _variant_of(session).bindings[0]


def _variant_of(session: TrainingSession) -> Variant:
    variant = execution_of(session)._parts[0]._general
    assert variant is not None
    return variant
