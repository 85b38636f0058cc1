"""Limits on the resources that an untrusted file can make a program use.

Each limit is an attribute of `LIMITS`. Set it before you read models:
``ortops.graph.limits.LIMITS.inlined_nodes = 10**6``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

__all__ = ["LIMITS", "Limits"]


def _machine_memory() -> int:
    """Returns the size of the machine's memory in bytes; 64 GB if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**36


@dataclass
class Limits:
    """Limits on the resources that a file can use. Raise them for files that you trust.

    Attributes:
        nested_graphs: The nesting depth of subgraphs (branches and loop bodies). protobuf itself
            supports about 32.
        nested_calls: The nesting depth of calls of model-local functions.
        inlined_nodes: The number of nodes that inlining of functions may add to a model.
        metadata_bytes: The size in bytes of JSON: in ``metadata_props["ortops.training"]`` and
            ``["ortops.lora"]``, of files of settings and the chat template in a model's folder, of
            PEFT's ``adapter_config.json``, and of the header of a safetensors file.
        nested_metadata: The nesting depth of arrays and objects in that JSON.
        pattern_steps: The number of steps for matching the layers of a model with the patterns of
            an ``adapter_config.json``; a few million take one second.
        initialization_seconds: The time limit in seconds for the initialization graph of a
            training_info entry. A graph that could take long runs in a child process, which is
            terminated after that time. With ``math.inf``, all graphs run in this process.
        initialization_bytes: The size in bytes of a tensor in an initialization graph, unless one
            of the variables that the graph sets is larger; and of a tensor in a checkpoint of
            PyTorch that is expanded, unless the file has as much.
        initialization_memory: The total memory in bytes of an initialization graph, or eight times
            the size of its variables if that is more. Child processes are limited on Linux only.
        text_seconds: The time limit in seconds for reading a tokenizer, encoding a text, or
            rendering a chat, in addition to 1 s for each megabyte. They run in a child process,
            which is terminated after that time. With ``math.inf``, they run in this process.
        text_memory: The memory in bytes for that, in addition to a multiple of the size of the text
            or file. Child processes are limited on Linux only.
        data_bytes: The memory in bytes for the arrays or tables of a data set that the command line
            reads; by default, the memory of the machine. Larger images are read batch by batch.
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
    text_seconds: float = 5.0
    text_memory: int = 2**29
    data_bytes: int = field(default_factory=_machine_memory)


LIMITS = Limits()
"""The limits of this process."""
