"""Generates with the model that is being tuned, in stock onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from ortops._common.numbers import Array
from ortops.engine.inference import lend
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, UnsupportedError
from ortops.graph.convert import to_ir
from ortops.graph.files.external import move_out, serialize
from ortops.llm.decoding import continued
from ortops.llm.examples import Example, errors_of, tokens_of
from ortops.llm.folder import Folder, refuse_norms, sliding_windows
from ortops.llm.generation import Sampling, generate
from ortops.llm.sequence_pairs import prefix_of, source_feeds, source_of, start_token
from ortops.llm.several_files import SeveralFiles
from ortops.llm.tokenization import Tokenizer


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
        *,
        has_encoder: bool,
    ) -> tuple[list[int], Array | None, bool]:
        """Reads a prompt; see `ortops.llm.FineTuning.generate`.

        Returns:
            The tokens to continue, the encoder's input, and whether the continuation is a text.
        """
        with errors_of("prompt", prompt, "be a text, a chat, or tokens", ArgumentError):
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
                return tokenizer().tokens(prompt), None, True
            if len(prompt) and isinstance(prompt[0], Mapping):
                text = tokenizer().chat(prompt, begin_reply=True)
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
        if self._files is not None:
            written = self._files.written(self.session.inference_model())
            return continued(
                {part: light.attach() for part, light in written.items()},
                *(None if source is None else source_feeds([source], 0), tokens),
                logits=self._folder.logits,
                count=count,
                end=end,
                sampling=sampling,
            )
        if self._served is None:
            self._served = self._serve()
        fixed = {name: self.session.state[name] for name in self._names}
        for value in self._served.get_inputs():
            if value.name.startswith("past"):
                fixed[value.name] = self._empty_cache(value.name, self._windows.get(value.name, 0))
        return generate(
            self._served,
            self._folder,
            tokens,
            count=count,
            fixed=fixed,
            end=end,
            sampling=sampling,
        )

    def repeats(self, example: Example) -> bool:
        """Whether the last reply of a row is what the model generates."""
        tokens, trained = example.tokens.tolist(), example.trained
        end = int(np.flatnonzero(trained)[-1]) + 1
        start = max(1, *(np.flatnonzero(~trained[:end]) + 1), 0)  # a prompt has at least one token
        found = self.continued(tokens[:start], end - start, set(), Sampling())
        return bool(found == example.labels[start:end].tolist())

    def _serve(self) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # one warning for each tensor of the adapter
        with self.session._locked_file() as held:
            light = held.light_inference_model()
            refuse_norms(light.proto)
            model = to_ir(light)
            message, self._lent = move_out(model, 0)
            lend(options, self._lent)
            return onnxruntime.InferenceSession(
                serialize(message), options, providers=["CPUExecutionProvider"]
            )

    def _empty_cache(self, name: str, capacity: int) -> npt.NDArray[Any]:
        known = self.session.inputs.get(name)
        if known is None or known.past is None:
            raise UnsupportedError(
                f"input '{name}': generate needs caches past_key_values.* of shape [batch, heads, "
                "time, size]; generate with the tool that serves the folder"
            )
        heads, size = known.past
        return np.zeros((1, heads, capacity, size), known.dtype)
