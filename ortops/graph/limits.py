"""What a file may ask for: limits that hold before its model is worked on.

Every limit is an attribute of `LIMITS`, which a program sets once, before it reads models:
``ortops.graph.limits.LIMITS.inlined_nodes = 10**6``.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LIMITS", "Limits"]


@dataclass
class Limits:
    """Limits on what a file may make a program do. Raise them for files that you trust.

    Attributes:
        nested_graphs: How many graphs may lie in each other, as branches and bodies. protobuf reads
            no file of more than about 32.
        nested_calls: How many calls of model-local functions may lie in each other.
        inlined_nodes: How many nodes a model may have once the calls of its functions are
            replaced by their bodies.
        metadata_bytes: How many bytes the JSON in ``metadata_props["ortops.training"]`` may take.
        initialization_seconds: How many seconds the initialization graph of a training_info entry
            may run.
        initialization_bytes: How many bytes a tensor of an initialization graph may take, where
            none of the variables that it sets takes more.
    """

    nested_graphs: int = 30
    nested_calls: int = 100
    inlined_nodes: int = 100_000
    metadata_bytes: int = 2**24
    initialization_seconds: float = 60.0
    initialization_bytes: int = 2**30


LIMITS = Limits()
"""The limits that hold in this process."""
