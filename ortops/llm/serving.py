"""Generates with the model that is being tuned, in stock onnxruntime."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops._common.numbers import Array
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, UnsupportedError
from ortops.graph.convert import load_light
from ortops.graph.files.external import detach
from ortops.llm.examples import (
    Example,
    errors_of,
    is_chat,
    template_settings,
    tokens_of,
    turns_of,
)
from ortops.llm.folder import Folder, refuse_norms, sliding_windows
from ortops.llm.generation import Decoder, Sampling, encode, open_model
from ortops.llm.graphs import prune
from ortops.llm.merging import merged_model
from ortops.llm.saving import ADAPTER
from ortops.llm.sequence_pairs import prefix_of, source_feeds, source_of, start_token
from ortops.llm.several_files import SeveralFiles
from ortops.llm.tokenization import Tokenizer
from ortops.lora.adapter_file import read_adapter_file

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}


class Server:
    """Continues tokens with the present adapter.

    Args:
        session: The session that trains the adapter.
        folder: The folder.
        files: The files of a model in several files.
        names: The names of the adapter's matrices.
        words: The size of the vocabulary, if it is known.
    """

    def __init__(
        self,
        session: TrainingSession,
        folder: Folder,
        files: SeveralFiles | None,
        names: Sequence[str],
        words: int | None,
    ) -> None:
        self._words = words
        self.session, self._folder, self._files, self._names = session, folder, files, names
        self._windows = {} if files is not None else sliding_windows(folder)
        self._served: onnxruntime.InferenceSession | None = None

    def read_prompt(
        self,
        prompt: Any,
        decoder_prefix: str | Sequence[int],
        tokenizer: Callable[[], Tokenizer],
        more: Mapping[str, Any],
    ) -> tuple[list[int], Array | None, bool]:
        """Reads a prompt; see `ortops.llm.FineTuning.generate`.

        Args:
            prompt: The prompt.
            decoder_prefix: What the decoder of a model with an encoder is given.
            tokenizer: Returns the tokenizer.
            more: What a row has for the chat template beside the messages.

        Returns:
            The tokens to continue, the encoder's input, and whether the continuation is a text.
        """
        with errors_of("prompt", prompt, "be a text, a chat, or tokens", ArgumentError):
            has_encoder = self._files is not None and self._files.has_encoder
            is_reply = not has_encoder and is_chat(prompt)
            if more and not is_reply:
                raise ArgumentError(f"{' and '.join(more)} need a chat, got {prompt!r:.80}")
            if has_encoder:
                source = source_of(prompt, tokenizer, self._words)
                first = prefix_of(decoder_prefix, tokenizer, self._folder, self._words)
                return [start_token(self._folder), *first], source, isinstance(prompt, str)
            if decoder_prefix:
                raise ArgumentError(
                    f"decoder_prefix needs a model with an encoder, got {decoder_prefix!r:.80}; "
                    "append it to the prompt"
                )
            if isinstance(prompt, str):
                return tokenizer().tokens(prompt, end=False), None, True
            if is_reply:
                text = tokenizer().chat(turns_of(prompt), template_settings(more), begin_reply=True)
                return tokenizer().tokens(text, special=False), None, True
            return tokens_of(prompt, self._words), None, False

    def continued(
        self,
        tokens: Sequence[int],
        count: int,
        end: Collection[int],
        sampling: Sampling,
        source: Array | None = None,
    ) -> list[int]:
        """Continues tokens with at most ``count`` others."""
        limit = self._folder.context_length or math.inf
        if not 0 < len(tokens) < limit:
            raise ArgumentError(
                f"prompt must have at least 1 and fewer than {limit} tokens, got {len(tokens)}"
            )
        count = int(min(count, limit - len(tokens)))
        return self._decoder(source).continued(tokens, count, end, sampling)

    def _decoder(self, source: Array | None) -> Decoder:
        """Returns what computes the next token with the present weights."""
        if self._files is not None:
            written = self._files.written(self.session.inference_model())
            opened = {part: open_model(light) for part, light in written.items()}
            self._lent = [lent for _, lent in opened.values()]
            parts = {part: session for part, (session, _) in opened.items()}
            first = parts["merged"] if "merged" in parts else parts["decoder"]
            following = first if "merged" in parts else parts.get("with_past")
            fed = {} if source is None else source_feeds([source], 0)
            fixed = {} if source is None else encode(parts["encoder"], fed)
            return Decoder(first, following, self._folder, fixed, functools.partial(_unread, fixed))
        if self._served is None or not self._names:  # then all weights are trained
            with self.session._locked_file() as held:
                light = held.light_inference_model()
                refuse_norms(light.proto)
                self._served, self._lent = open_model(light)
        fixed = {name: self.session.state[name] for name in self._names}
        return self._alone(self._served, fixed)

    def _alone(self, served: onnxruntime.InferenceSession, fixed: Mapping[str, Array]) -> Decoder:
        """Returns the decoder of a model in one file."""
        caches = any(value.name.startswith("past") for value in served.get_inputs())
        following = served if caches else None
        return Decoder(served, following, self._folder, fixed, self._empty_cache)

    def forms(self) -> dict[str, Decoder]:
        """Returns decoders of a saved folder in the two forms in which it can be served.

        Returns:
            ``merged``, the model that ``save(merged=True)`` writes, and ``adapter``, the model of
            the folder, whose inputs get the values of its adapter's file.
        """
        saved, file = load_light(self._folder.model), self._folder.path / ADAPTER
        refuse_norms(saved.proto)
        merged = prune(detach(merged_model(self.session.inference_model())), saved)
        values: Mapping[str, Array] = {}
        if file.is_file():
            values, _, _ = read_adapter_file(file)
        found, self._lent = {}, []
        for name, model, fixed in (("merged", merged, {}), ("adapter", saved, values)):
            served, lent = open_model(model)
            self._lent.append(lent)
            found[name] = self._alone(served, fixed)
        return found

    def repeats(self, example: Example) -> bool:
        """Whether the last reply of a row is what the model generates."""
        tokens, trained = example.tokens.tolist(), example.trained
        end = int(np.flatnonzero(trained)[-1]) + 1
        start = max(1, *(np.flatnonzero(~trained[:end]) + 1), 0)  # a prompt has at least one token
        found = self.continued(tokens[:start], end - start, set(), Sampling())
        return bool(found == example.labels[start:end].tolist())

    def _empty_cache(self, value: Any) -> npt.NDArray[Any]:
        name, capacity = value.name, self._windows.get(value.name, 0)
        known = self.session.inputs.get(name)
        if known is None or known.past is None:
            raise UnsupportedError(
                f"input '{name}': generate needs caches past_key_values.* of shape [batch, heads, "
                "time, size]; generate with the tool that serves the folder"
            )
        heads, size = known.past
        is_cache = len(known.dims or ()) == 4  # not the state of a convolution
        return np.zeros((1, heads, capacity, size) if is_cache else (1, heads, size), known.dtype)


def _unread(fixed: Mapping[str, Array], value: Any) -> Array:
    """Returns a cache of zeros, which the branch without a cache does not read."""
    states = fixed.get("encoder_hidden_states")
    length = states.shape[1] if ".encoder." in value.name and states is not None else 0
    kind = _TYPES.get(value.type, np.float32)
    return np.zeros([1, value.shape[1], length, value.shape[3]], kind)
