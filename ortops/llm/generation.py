"""Generates text with stock onnxruntime: one token at a time, with the cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops._common.arguments import number, whole_number
from ortops.errors import OrtopsError
from ortops.llm.folder import Folder

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Sampling:
    """How to choose a token.

    Attributes:
        temperature: See `ortops.llm.FineTuning.generate`, as for all others.
        top_k: See there.
        top_p: See there.
        seed: See there.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        number("temperature", self.temperature, minimum=0)
        number("top_p", self.top_p, above=0, maximum=1)
        whole_number("seed", self.seed, 0)
        if self.top_k is not None:
            whole_number("top_k", self.top_k, 1)

    def token(self, logits: Array, step: int) -> int:
        """Returns the token at a step.

        Args:
            logits: Its logits [vocabulary].
            step: The number of generated tokens; each step has random numbers of its own.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        scores = logits.astype(np.float64)
        order = np.argsort(-scores, kind="stable")[: self.top_k]
        shares = np.exp((scores[order] - scores[order[0]]) / self.temperature)
        shares /= shares.sum()
        count = int((shares.cumsum() < self.top_p).sum()) + 1
        shares = shares[:count] / shares[:count].sum()
        draw = np.random.default_rng((self.seed, step))
        return int(draw.choice(order[:count], p=shares))


def generate(
    session: onnxruntime.InferenceSession,
    folder: Folder,
    tokens: Sequence[int],
    *,
    count: int,
    fixed: Mapping[str, Array],
    end: Collection[int],
    sampling: Sampling,
) -> list[int]:
    """Continues tokens.

    Args:
        session: The model. Each input ``past_<…>`` is filled from the output ``present<…>`` of the
            same position among those outputs.
        folder: Its folder.
        tokens: The tokens to continue, at least one.
        count: The largest number of tokens to generate.
        fixed: Inputs that are the same in each run, such as those of an adapter, and empty caches.
        end: Tokens that end the text; not part of the result.
        sampling: How to choose each token.
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
        try:
            results = session.run([folder.logits, *pairs.values()], feeds | cache | constant)
        except Exception as error:  # onnxruntime's classes have no common base
            raise OrtopsError(
                f"generate: onnxruntime failed: {error!s:.300}; check that the prompt fits the "
                "model"
            ) from error
        token = sampling.token(results[0][0, -1], len(found))
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
