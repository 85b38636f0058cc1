"""The JSON objects in the metadata of a trainable model."""

from __future__ import annotations

from ortops.graph.notes import read_note, remove_note, where

__all__ = ["METADATA_KEY", "read_note", "remove_note", "where"]

METADATA_KEY = "ortops.training"
"""Where a trainable model says, as JSON, which of its names play which part."""
