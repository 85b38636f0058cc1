"""Prepares models for training: head, batch size, outputs, branches, shared weights, channels.

Each function takes a model and returns a new one. It logs its changes to the logger ``ortops``.
"""

from ortops.surgery.batch import free_batch
from ortops.surgery.branches import fix_inputs
from ortops.surgery.head import replace_head
from ortops.surgery.output import name_output
from ortops.surgery.postprocessing import before_postprocessing
from ortops.surgery.pruning import ChannelGroup, channel_groups, prune
from ortops.surgery.tied import tie, untie

__all__ = [
    "ChannelGroup",
    "before_postprocessing",
    "channel_groups",
    "fix_inputs",
    "free_batch",
    "name_output",
    "prune",
    "replace_head",
    "tie",
    "untie",
]
