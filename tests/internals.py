"""What tests read of a session that is not public, and that `TrainingSession.report` does not tell.

It stands here and nowhere else, so that code can be moved without changes in many tests.
"""

from __future__ import annotations

from typing import Any

from ortops import TrainingSession
from ortops.execution.execution import Execution
from ortops.execution.variant import Variant
from ortops.training.loaded_model import LoadedModel

__all__ = ["execution_of", "loaded_of", "memory_of", "variant_of"]


def loaded_of(session: TrainingSession) -> LoadedModel:
    """Returns the model in memory."""
    return session._loaded


def execution_of(session: TrainingSession) -> Execution:
    """Returns what holds the variables and makes the steps."""
    return session._execution


def memory_of(session: TrainingSession, name: str) -> Any:
    """Returns the present value of a variable in its own memory; `state` returns copies."""
    return execution_of(session).present(name)


def variant_of(session: TrainingSession) -> Variant:
    """Returns the graph for batches of any shape, with its onnxruntime session."""
    cached = execution_of(session)._caches[0]._general
    assert cached is not None
    (variant,) = cached.variants
    return variant
