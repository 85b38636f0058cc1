"""Weights in and out of a model, by the names that a checkpoint gives them.

An export renames, transposes and merges weights. `match` finds where the tensors of a checkpoint
are in a model, `load` puts the values of a checkpoint into a model, and `save` writes those of a
model in the names, layouts and dtypes of a checkpoint.
"""

from __future__ import annotations

from ortops.weights.checkpoints import Checkpoint
from ortops.weights.matching import match
from ortops.weights.names import Names, Part, Place
from ortops.weights.transfer import load, save

__all__ = ["Checkpoint", "Names", "Part", "Place", "load", "match", "save"]
