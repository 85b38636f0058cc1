"""Generates text with stock onnxruntime: one token at a time, with the cache of keys and values.

A model is one file with a cache, or without; a merged decoder, whose branches an input chooses; or
a decoder without a cache and one with it, and an encoder in front of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops._common.arguments import number, whole_number
from ortops._common.cores import session_threads
from ortops.engine.inference import lend
from ortops.errors import OrtopsError
from ortops.graph.convert import to_ir
from ortops.graph.files.external import LightModel, move_out, serialize
from ortops.llm.folder import Folder
from ortops.llm.several_files import CACHE_BRANCH

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


def open_model(model: LightModel) -> tuple[onnxruntime.InferenceSession, Any]:
    """Returns a session of a model on the CPU, and what must live as long as it does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # one warning for each tensor of an adapter
    options.intra_op_num_threads = session_threads()
    message, lent = move_out(to_ir(model), 0)
    lend(options, lent)
    return onnxruntime.InferenceSession(
        serialize(message), options, providers=["CPUExecutionProvider"]
    ), lent


def encode(session: onnxruntime.InferenceSession, source: Mapping[str, Array]) -> dict[str, Array]:
    """Returns what the decoder reads of the encoder.

    Args:
        session: The encoder.
        source: What it reads, as `ortops.llm.sequence_pairs.source_feeds` returns it.
    """
    known = {value.name for value in session.get_inputs()}
    states = session.run(None, {name: a for name, a in source.items() if name in known})[0]
    mask = source.get("attention_mask")
    found = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    return {name: array for name, array in found.items() if array is not None}


@dataclass
class Decoder:
    """The sessions that compute the next token, and their cache.

    Attributes:
        first: Computes the logits of all tokens.
        following: Computes those of one more token: the same session, one that only reads the
            cache, or None if there is no cache. Each input ``past_<…>`` is filled from the output
            ``present<…>`` of the same name.
        folder: The folder.
        fixed: Inputs that are the same in each run, such as those of an adapter or of an encoder.
        empty: Returns the cache of an input before the first token.
    """

    first: onnxruntime.InferenceSession
    following: onnxruntime.InferenceSession | None
    folder: Folder
    fixed: Mapping[str, Array]
    empty: Callable[[Any], Array]
    _cache: dict[str, Array] = field(default_factory=dict, init=False)
    _tokens: list[int] = field(default_factory=list, init=False)

    def continued(
        self, tokens: Sequence[int], count: int, end: Collection[int], sampling: Sampling
    ) -> list[int]:
        """Continues tokens.

        Args:
            tokens: The tokens to continue, at least one.
            count: The largest number of tokens to generate.
            end: Tokens that end the text; not part of the result.
            sampling: How to choose each token.
        """
        found: list[int] = []
        fresh = list(tokens)
        while len(found) < count:
            token = sampling.token(self._logits(fresh)[0, -1], len(found))
            if token in end:
                break
            found.append(token)
            fresh = [token]
        return found

    def _logits(self, fresh: list[int]) -> Array:
        """Returns the logits of new tokens."""
        self._tokens += fresh
        begins = not self._cache
        session = self.first if begins or self.following is None else self.following
        given = self._tokens if begins else fresh
        inputs = {value.name: value for value in session.get_inputs()}
        feeds = {**self.fixed, **self._cache, **self._positions(given, begins=begins)}
        for name in inputs.keys() - feeds.keys():
            if name.startswith("past"):
                feeds[name] = self.empty(inputs[name])
        outputs = {value.name for value in session.get_outputs()}
        presents = self._presents(outputs, begins=begins)
        defaults = {value.name for value in session.get_overridable_initializers()}  # the adapter's
        try:
            logits, *cached = session.run(
                [self.folder.logits, *presents.values()],
                {name: feeds[name] for name in feeds if name in inputs or name in defaults},
            )
        except Exception as error:  # onnxruntime's classes have no common base
            raise OrtopsError(
                f"generate: onnxruntime failed: {error!s:.300}; check that the prompt fits the "
                "model"
            ) from error
        self._cache.update(zip(presents, cached, strict=True))
        found: Array = logits
        return found

    def _positions(self, given: Sequence[int], *, begins: bool) -> dict[str, Array]:
        """Returns the inputs of some tokens, the last ones so far."""
        total = len(self._tokens)
        feeds = {
            "input_ids": np.array([given], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - len(given), total, dtype=np.int64)[None],
        }
        named = {self.folder.input_name(name): array for name, array in feeds.items()}
        behind = {f"decoder_{name}": feeds[name] for name in ("input_ids", "attention_mask")}
        return named | behind | {CACHE_BRANCH: np.array([not begins])}

    def _presents(self, outputs: Collection[str], *, begins: bool) -> dict[str, str]:
        """Returns the outputs that become the cache, by the inputs that read them."""
        pasts = () if self.following is None else self.following.get_inputs()
        found = {}
        for past in (value.name for value in pasts if value.name.startswith("past")):
            forms = (past.replace(each, "present", 1) for each in ("past_key_values", "past"))
            present = next((name for name in forms if name in outputs), None)
            # Behind the first token, merged decoders return what is the encoder's empty.
            if present is not None and (begins or ".encoder." not in past):
                found[past] = present
        return found
