"""What a file may ask for: limits that hold before its model is worked on.

Every limit is an attribute of `LIMITS`, which a program sets once, before it reads models:
``ortops.graph.limits.LIMITS.inlined_nodes = 10**6``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["LIMITS", "Limits"]


def _machine_memory() -> int:
    """Returns how many bytes of memory the machine has; 64 GB where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**36


@dataclass
class Limits:
    """Limits on what a file may make a program do. Raise them for files that you trust.

    Attributes:
        nested_graphs: How many graphs may lie in each other, as branches and bodies. protobuf reads
            no file of more than about 32.
        nested_calls: How many calls of model-local functions may lie in each other.
        inlined_nodes: How many nodes a model may have once the calls of its functions are
            replaced by their bodies.
        metadata_bytes: How many bytes the JSON in ``metadata_props["ortops.training"]`` may take,
            and likewise other JSON: ``"ortops.lora"``, and PEFT's ``adapter_config.json``.
        nested_metadata: How many arrays and objects of such JSON may lie in each other.
        pattern_steps: How many steps it may take to match the layers of a model with the patterns
            of an ``adapter_config.json``; some millions take a second.
        initialization_seconds: How many seconds the initialization graph of a training_info entry
            may run. A graph that may take long runs in a child process, which can be ended;
            ``math.inf`` lets all of them run in this process.
        initialization_bytes: How many bytes a tensor of an initialization graph may take, where
            none of the variables that it sets takes more.
        initialization_memory: How many bytes of memory an initialization graph may take in all,
            where eight times what its variables take is not more. What a child process takes is
            limited on Linux.
        data_bytes: How many bytes of memory the arrays, tables or images of a data set may take
            that the command line reads; the memory of the machine by default.
    """

    nested_graphs: int = 30
    nested_calls: int = 100
    inlined_nodes: int = 100_000
    metadata_bytes: int = 2**24
    nested_metadata: int = 100
    pattern_steps: int = 2**24
    initialization_seconds: float = 60.0
    initialization_bytes: int = 2**30
    initialization_memory: int = 2**32
    data_bytes: int = field(default_factory=_machine_memory)


LIMITS = Limits()
"""The limits that hold in this process."""
