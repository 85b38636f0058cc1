"""Generates text with stock onnxruntime: one token at a time, with the cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops.llm.folder import Folder

__all__ = ["generate"]

Array: TypeAlias = npt.NDArray[Any]


def generate(
    session: onnxruntime.InferenceSession,
    folder: Folder,
    tokens: Sequence[int],
    *,
    count: int,
    fixed: Mapping[str, Array],
    end: Collection[int],
) -> list[int]:
    """Continues tokens with the most likely ones.

    Args:
        session: The model. Each input ``past_<…>`` is filled from the output ``present<…>`` of the
            same position among those outputs.
        folder: Its folder.
        tokens: The tokens to continue, at least one.
        count: The largest number of tokens to generate.
        fixed: Inputs that are the same in each run, such as those of an adapter, and empty caches.
        end: Tokens that end the text; not part of the result.
    """
    known = {value.name for value in session.get_inputs()}
    pasts = [value.name for value in session.get_inputs() if value.name.startswith("past")]
    presents = {value.name for value in session.get_outputs()}
    pairs = {name: _present(name, presents) for name in pasts}
    cache = {name: fixed[name] for name in pasts}
    constant = {name: array for name, array in fixed.items() if name not in pasts}
    found: list[int] = []
    fresh, done = list(tokens), 0
    while len(found) < count:
        total = done + len(fresh)
        feeds = {
            folder.input_name("input_ids"): np.array([fresh], np.int64),
            folder.input_name("attention_mask"): np.ones((1, total), np.int64),
            folder.input_name("position_ids"): np.arange(done, total, dtype=np.int64)[None],
        }
        feeds = {name: array for name, array in feeds.items() if name in known}
        results = session.run([folder.logits, *pairs.values()], feeds | cache | constant)
        token = int(results[0][0, -1].argmax())
        if token in end:
            break
        found.append(token)
        if pairs:
            cache, done, fresh = dict(zip(pairs, results[1:], strict=True)), total, [token]
        else:
            fresh = [*fresh, token]
    return found


def _present(past: str, presents: Collection[str]) -> str:
    name = past.replace("past_key_values", "present", 1)
    return name if name in presents else past.replace("past", "present", 1)
