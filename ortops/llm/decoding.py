"""Generates text with models in several files: an encoder, and a decoder with and without cache."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from ortops.graph.files.saving import save_model
from ortops.llm.generation import Sampling
from ortops.llm.several_files import CACHE_BRANCH

Array: TypeAlias = npt.NDArray[Any]

_SIZES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


def continued(
    models: Mapping[str, onnx.ModelProto],
    source: Mapping[str, Array] | None,
    tokens: Sequence[int],
    *,
    logits: str,
    count: int,
    end: Collection[int],
    sampling: Sampling,
) -> list[int]:
    """Continues tokens in stock onnxruntime.

    Args:
        models: The models by part, as `SeveralFiles.written` returns them.
        source: What the encoder reads; None if there is no encoder.
        tokens: The tokens that the decoder begins with, at least one.
        logits: The name of the decoder's output.
        count: The largest number of tokens to generate.
        end: Tokens that end the text; not part of the result.
        sampling: How to choose each token.
    """
    decoder = _Decoder(models, source, logits)
    found: list[int] = []
    fresh = list(tokens)
    while len(found) < count:
        token = sampling.token(decoder.run(fresh)[0, -1], len(found))
        if token in end:
            break
        found.append(token)
        fresh = [token]
    return found


class _Decoder:
    """The sessions of a decoder, and its cache."""

    def __init__(
        self,
        models: Mapping[str, onnx.ModelProto],
        source: Mapping[str, Array] | None,
        logits: str,
    ) -> None:
        self._first = _open(models["merged"] if "merged" in models else models["decoder"])
        self._next = self._first if "merged" in models else None
        if self._next is None and "with_past" in models:
            self._next = _open(models["with_past"])
        self._logits = logits
        self._cache: dict[str, Array] = {}
        self._tokens: list[int] = []
        self._fixed: dict[str, Array] = {}
        if source is not None:
            encoder = _open(models["encoder"])
            known = {value.name for value in encoder.get_inputs()}
            states = encoder.run(None, {k: v for k, v in source.items() if k in known})[0]
            self._fixed["encoder_hidden_states"] = states
            if "attention_mask" in source:
                self._fixed["encoder_attention_mask"] = source["attention_mask"]

    def run(self, fresh: list[int]) -> Array:
        """Returns the logits of new tokens."""
        self._tokens += fresh
        begins = not self._cache
        session = self._first if begins or self._next is None else self._next
        given = self._tokens if begins or self._next is None else fresh
        total = len(self._tokens)
        ids = np.array([given], np.int64)
        feeds: dict[str, Array] = {
            **self._fixed,
            **self._cache,
            "input_ids": ids,
            "decoder_input_ids": ids,
            "attention_mask": np.ones((1, total), np.int64),
            "decoder_attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total - len(given), total, dtype=np.int64)[None],
            CACHE_BRANCH: np.array([not begins]),
        }
        inputs = {value.name: value for value in session.get_inputs()}
        for name, value in inputs.items():
            if name.startswith("past") and name not in feeds:
                feeds[name] = self._empty(value)
        outputs = [value.name for value in session.get_outputs()]
        wanted = {name: feeds[name] for name in inputs if name in feeds}
        results = dict(zip(outputs, session.run(None, wanted), strict=True))
        for name, array in results.items() if self._next is not None else ():
            past = name.replace("present", "past_key_values", 1)
            is_known = begins or ".encoder." not in name  # merged decoders return them empty
            if name.startswith("present") and is_known:
                self._cache[past] = array
        scores: Array = results[self._logits]
        return scores

    def _empty(self, value: Any) -> Array:
        """Returns a cache of zeros, which the branch without a cache does not read."""
        states = self._fixed.get("encoder_hidden_states")
        length = states.shape[1] if ".encoder." in value.name and states is not None else 0
        shape = [1, value.shape[1], length, value.shape[3]]
        return np.zeros(shape, _SIZES.get(value.type, np.float32))


def _open(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, f"{folder}/model.onnx")
        return onnxruntime.InferenceSession(
            f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"]
        )
