"""Fine-tunes a language model with an adapter, from a folder and into a folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from ortops.arguments import boolean, choice, whole_number
from ortops.building.builder import build_light
from ortops.errors import ArgumentError, FeedError, ModelError, UnsupportedError
from ortops.graph.adapters import adapter_of
from ortops.graph.convert import load_light, to_ir
from ortops.graph.files import external
from ortops.graph.files.atomic import write_atomically
from ortops.graph.files.external import LightModel, move_aside, move_out, serialize
from ortops.graph.files.json_metadata import read_metadata, write_metadata
from ortops.graph.files.messages import size_of
from ortops.graph.files.saving import save_model, write_model
from ortops.inference import lend
from ortops.llm.checkpoint import Estimate, FolderCheckpoint
from ortops.llm.decoding import continued
from ortops.llm.examples import (
    IGNORED,
    PADDING,
    TRAIN_ON,
    Example,
    Rows,
    batch_of,
    read_examples,
    rows_of,
)
from ortops.llm.folder import (
    GENAI_CONFIG,
    Folder,
    copy_others,
    genai_config,
    open_folder,
    refuse_norms,
    sliding_windows,
)
from ortops.llm.generation import Sampling, generate
from ortops.llm.merging import merged_model
from ortops.llm.preferences import Pair, is_preference, read_pairs
from ortops.llm.pruning import prune, without_pruning
from ortops.llm.sequence_pairs import (
    pair_feeds,
    read_sequence_pairs,
    source_feeds,
    source_of,
    start_token,
)
from ortops.llm.several_files import SeveralFiles, several_files
from ortops.llm.tokenization import Message, Tokenizer
from ortops.lora.addition import adapted, read_base
from ortops.lora.files import with_adapter, write_adapter
from ortops.lora.peft import with_peft
from ortops.losses import DPO, Loss, NextToken, SoftmaxCrossEntropy
from ortops.numbers import Array
from ortops.optimizers import Adam
from ortops.passes.rematerialization import Checkpoint
from ortops.schedules import Schedule
from ortops.training.history import History
from ortops.training.session import TrainingSession

__all__ = ["ADAPTER", "TRAINING", "FineTuning"]

_ONE_FILE = 2**26
"""Weights of more bytes are saved in a file of their own, next to the model."""

_LOSS = "ortops.llm"
"""The metadata key of the loss."""

Unit: TypeAlias = tuple[Example] | Pair
"""The sequences of a row."""

ADAPTER, TRAINING = "adapter.onnx_adapter", "training.state"
_SMALL = 1024  # bytes


_MEGABATCH = 50  # batches


def _length(unit: Unit) -> int:
    return max(len(example.tokens) for example in unit)


def _grouped(
    order: npt.NDArray[np.int64], lengths: Sequence[int], batch_size: int
) -> npt.NDArray[np.int64]:
    """Sorts rows by length within megabatches, and keeps the order of the batches random.

    Args:
        order: A permutation of the rows.
        lengths: The length of each row.
        batch_size: The number of rows per batch. Only the last batch may have fewer.
    """
    size, known = _MEGABATCH * batch_size, np.array(lengths)
    parts = [order[first : first + size] for first in range(0, len(order), size)]
    rows = np.concatenate([part[np.argsort(-known[part], kind="stable")] for part in parts])
    whole = len(rows) // batch_size * batch_size
    batches = rows[:whole].reshape(-1, batch_size)
    ranks = np.argsort(order[: len(batches)], kind="stable")  # as random as the order
    return np.concatenate([batches[ranks].ravel(), rows[whole:]])


class FineTuning:
    """Fine-tunes a language model with LoRA, in the folder form that serves it.

    The model may be quantized (MatMulNBits). Only the adapter is trained, with PyTorch's Adam.

    Models with an encoder (T5, BART, Whisper) are those of Optimum and transformers.js:
    encoder_model.onnx, and decoder_model.onnx with or without decoder_with_past_model.onnx, or
    decoder_model_merged.onnx. They are trained as one model. `save` writes the trained weights into
    all of these files, so they must not be quantized.

    Args:
        folder_or_file: A folder of onnxruntime-genai, Optimum or transformers.js, or the model's
            file in it. Of the folder, genai_config.json, config.json, tokenizer.json,
            tokenizer_config.json and the chat template are read, if they exist. Text needs the
            packages tokenizers and jinja2 (``pip install ortops[llm]``); token ids need neither.
        rank: The rank of the adapter.
        alpha: The numerator of the scaling, alpha / rank.
        targets: The layers to adapt, as for `ortops.lora.add`; by default all linear layers but
            lm_head, which computes the logits.
        learning_rate: The learning rate, or a schedule of `ortops.schedules`.
        recompute: Which activations to keep, as for `ortops.TrainingSession`; ``"sqrt"`` saves much
            memory for a third more time. By default, all activations are kept.
        adapter: An adapter to begin with: a folder of PEFT, which determines rank, alpha and
            targets, or an ``.onnx_adapter`` file of this model with the same rank and targets. It
            may have been trained on the model in another precision.
        loss: `ortops.losses.NextToken` by default, or `ortops.losses.DPO` for pairs of a better and
            a worse answer. The reference of DPO is the model without the adapter, so there is no
            second model.

    Attributes:
        session: The `ortops.TrainingSession`.
        tokenizer: The folder's tokenizer.

    Raises:
        ArgumentError: If an argument is wrong.
        ModelError: If the folder has no model, or the model has no layer to adapt.

    Example:
        >>> import tempfile
        >>> from models import llama
        >>> rows = [{"input_ids": [65, 66, 67, 68, 256]}]  # or text, or the path of JSON lines
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tuning = FineTuning(llama.write(f"{folder}/base"), 4, 4, learning_rate=0.03)
        ...     history = tuning.fit(rows, epochs=30, progress=False)
        ...     tuning.save(f"{folder}/tuned")
        ...     again = FineTuning.load(f"{folder}/tuned")
        >>> history[-1]["loss"] < 0.6 < history[0]["loss"]
        True
        >>> tuning.generate([65, 66], max_new_tokens=2), again.generate([65, 66], max_new_tokens=2)
        ([67, 68], [67, 68])
    """

    session: TrainingSession
    _initial: Mapping[str, Any]

    def __init__(
        self,
        folder_or_file: str | os.PathLike[str],
        rank: int = 8,
        alpha: float = 16,
        targets: str | Sequence[str] | None = None,
        learning_rate: float | Schedule = 2e-4,
        recompute: Checkpoint | None = None,
        adapter: str | os.PathLike[str] | None = None,
        *,
        loss: NextToken | str | None = None,
    ) -> None:
        folder = open_folder(folder_or_file)
        files = several_files(folder)
        model = load_light(folder.model if files is None else files.base)  # without its data
        if files is None:
            model = without_pruning(model)
        if adapter_of(model.proto.metadata_props) is not None:
            raise ModelError(
                f"folder '{folder.path}': its model already has an adapter; continue with "
                "ortops.llm.FineTuning.load, or merge it with ortops.lora.merge"
            )
        if adapter is not None and Path(adapter).is_dir():
            model = move_aside(with_peft(read_base(model), adapter))
        else:
            chosen = "all-linear" if targets is None else targets
            model = move_aside(adapted(read_base(model), rank, alpha, chosen))
            if adapter is not None:
                model = with_adapter(model, adapter)
        trainable = _trainable(model, folder, learning_rate, loss, files)
        self._start(folder, trainable, files=files, recompute=recompute)
        if adapter is not None:  # without an active adapter, the saved model is the base
            self._initial = {name: np.zeros_like(array) for name, array in self._initial.items()}

    def _start(
        self,
        folder: Folder,
        model: LightModel,
        initial: Mapping[str, Any] | None = None,
        *,
        files: SeveralFiles | None = None,
        recompute: Checkpoint | None,
    ) -> None:
        self._folder, self._files = folder, files
        self._windows = {} if files is not None else sliding_windows(folder)
        self._names = _adapter_names(model)
        self._initial = initial or _adapter_values(model)
        self._is_loaded = initial is not None
        self._served: onnxruntime.InferenceSession | None = None
        self._tokenizer: Tokenizer | None = None
        self.session = TrainingSession(model, recompute=recompute)
        self._compares = _loss_name(model) == "DPO"

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, with ``tokens(text)`` and ``text(tokens)``.

        Raises:
            ModelError: If the folder has no tokenizer.json.
            OrtopsError: If the package tokenizers is not installed.

        Example:
            >>> from models import llama
            >>> tokenizer = llama.fine_tuning().tokenizer
            >>> tokenizer.tokens("hello"), tokenizer.text([104, 105])
            ([104, 101, 108, 108, 111], 'hi')
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._folder)
        return self._tokenizer

    def fit(
        self,
        data: Rows,
        epochs: int = 1,
        batch_size: int = 4,
        max_length: int = 512,
        train_on: str = "assistant",
        *,
        shuffle: bool = True,
        group_by_length: bool = False,
        padding: str = "right",
        seed: int = 0,
        validation: Rows | None = None,
        save: str | os.PathLike[str] | None = None,
        save_steps: int | None = None,
        **settings: Any,
    ) -> History:
        """Trains the adapter.

        Args:
            data: The path of a file of JSON lines or Parquet, or an iterable of rows, such as a
                data set of Hugging Face. A row is a dict with

                - ``messages``: a chat, a list of dicts with ``role`` and ``content``;
                - ``prompt`` and ``completion``: two texts;
                - ``text``: a text;
                - ``input_ids``: tokens, and optionally ``labels``, which are the same tokens, or
                  -100 for those that the loss ignores.

                For a model with an encoder, a row has ``prompt`` (for the encoder) and
                ``completion`` (for the decoder), or ``input_ids`` and ``labels``, or
                ``input_features``, an array [bins, frames], and ``text`` or ``labels``. Labels
                begin with the token after the decoder's start token.

                A list of tokens is a row, too. The token that ends a text is added to texts and
                completions; chats get what their template writes. Rows for DPO have ``prompt``,
                ``chosen`` and ``rejected``: texts, chats, or tokens.
            epochs: The number of passes over the data.
            batch_size: The number of rows (for DPO, pairs) per batch. Shorter rows are padded.
            max_length: The largest number of tokens of a row; longer rows are truncated. The
                model's context length is a limit as well.
            train_on: Which tokens to train: ``"assistant"`` for all replies of the assistant in a
                chat, ``"completion"`` for the last reply, ``"all"`` for all tokens. In rows of
                prompt and completion, only ``"all"`` trains the prompt. Texts are trained as a
                whole. DPO trains the answers.
            shuffle: Whether to shuffle the rows before each epoch.
            group_by_length: Whether batches have rows of similar length, which saves time and
                memory. The order of the batches is still random, but rows of one batch are no
                longer independent of each other's length.
            padding: The side of padding, ``"right"`` or ``"left"``.
            seed: Determines the order of the rows.
            validation: Rows to evaluate after each epoch.
            save: A folder to save after each epoch, and when training ends or is interrupted (see
                `save`). After `load`, ``fit(…, resume=True)`` continues an interrupted training, as
                if it had never stopped.
            save_steps: The number of steps between saves, in place of an epoch.
            **settings: Further arguments of `ortops.TrainingSession.fit`, such as ``callbacks``.

        Returns:
            The history of `ortops.TrainingSession.fit`. The loss is the mean over the trained
            tokens.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: If a row has another form, or there is no token to train.
            ModelError: If text needs a tokenizer or chat template that the folder does not have.

        Example:
            >>> from models import llama
            >>> rows = [[65, 66, 67], [68, 69]]
            >>> history = llama.fine_tuning().fit(rows, epochs=2, progress=False)
            >>> history.columns["steps"]
            [1, 2]
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        seed = whole_number("seed", seed, 0)
        examples = self._examples(data, max_length, train_on)
        choice("padding", padding, PADDING)
        if self._has_encoder and (group_by_length or padding != "right"):
            raise ArgumentError(
                "group_by_length must be False and padding 'right' for a model with an encoder, "
                f"got {group_by_length} and {padding!r}"
            )
        if padding == "left" and (left := self._pads_right()):
            raise ArgumentError(
                f"padding must be 'right', as {left} counts the tokens of a row from the left, "
                "got 'left'"
            )
        if validation is not None:
            held_out = self._examples(validation, max_length, train_on)
            settings["validation"] = list(self._batches(held_out, batch_size))

        def epoch(number: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
            order = np.arange(len(examples))
            if shuffle:
                order = np.random.default_rng((seed, number)).permutation(len(examples))
            if group_by_length:
                order = _grouped(order, [_length(unit) for unit in examples], batch_size)
            units = [examples[int(place)] for place in order]
            return self._batches(units, batch_size, padding)

        steps = whole_number("epochs", epochs, 1) * -(-len(examples) // batch_size)
        callbacks = [*settings.pop("callbacks", ()), Estimate(steps)]
        if save is not None:
            self._check_target(Path(save))
            parts = self._save_model, self._save_progress
            callbacks.append(FolderCheckpoint(save, save_steps, *parts))
        elif save_steps is not None:
            raise ArgumentError(f"save_steps needs save, the folder; got save_steps={save_steps}")
        return self.session.fit(epoch, epochs=epochs, seed=seed, callbacks=callbacks, **settings)

    def evaluate(
        self,
        data: Rows,
        batch_size: int = 4,
        max_length: int = 512,
        train_on: str = "assistant",
        *,
        exact_match: bool = False,
    ) -> dict[str, float]:
        """Computes the loss and other metrics of rows.

        Args:
            data: The rows; see `fit`, as for all other arguments.
            batch_size: The number of rows per batch.
            max_length: The largest number of tokens of a row.
            train_on: Which tokens count.
            exact_match: Whether to generate the last reply or completion of each row, too.

        Returns:
            ``loss``, the mean over the tokens that count; ``perplexity``, its exponential;
            ``accuracy``, how many of these tokens are the most likely ones; and on request
            ``exact_match``, how many replies are generated exactly. For DPO, ``loss``, the mean
            over the pairs; ``reward_margin``, the mean of beta · (chosen − rejected); and
            ``reward_accuracy``, how many margins are positive.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: See `fit`.
            ModelError: See `fit`.

        Example:
            >>> from models import llama
            >>> sorted(llama.fine_tuning().evaluate([[65, 66, 67]]))
            ['accuracy', 'loss', 'perplexity']
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        examples = self._examples(data, max_length, train_on)
        if self._has_encoder and exact_match:
            raise ArgumentError("exact_match must be False for a model with an encoder, got True")
        if self._compares:
            if exact_match:
                raise ArgumentError("exact_match must be False for DPO, got True")
            return self._compared(examples)
        batches = list(self._batches(examples, batch_size))
        found = self.session.evaluate(batches, metrics=["accuracy"])
        with np.errstate(over="ignore"):
            found["perplexity"] = float(np.exp(found["loss"]))
        if exact_match:
            found["exact_match"] = float(np.mean([self._repeats(each) for each in examples]))
        return found

    def _compared(self, pairs: Sequence[Unit]) -> dict[str, float]:
        """Returns the loss, reward margin and reward accuracy of pairs."""
        each = [self.session.evaluate(batch)["loss"] for batch in self._batches(pairs, 1)]
        with np.errstate(over="ignore", divide="ignore"):  # loss = log(1 + exp(-margin))
            margins = -np.log(np.expm1(np.array(each, np.float64)))
        return {
            "loss": float(np.mean(each)),
            "reward_margin": float(np.mean(margins)),
            "reward_accuracy": float(np.mean(margins > 0)),
        }

    def _repeats(self, row: Unit) -> bool:
        """Whether the last reply of a row is what the model generates."""
        tokens, trained = row[0].tokens.tolist(), row[0].trained
        end = int(np.flatnonzero(trained)[-1]) + 1
        start = max(1, *(np.flatnonzero(~trained[:end]) + 1), 0)  # a prompt has at least one token
        found = self._continued(tokens[:start], end - start, set(), Sampling())
        return bool(found == tokens[start:end])

    def show(
        self,
        data: Rows,
        batch_size: int = 4,
        max_length: int = 512,
        train_on: str = "assistant",
    ) -> str:
        """Returns the first batch as text, with marks around the tokens that are trained.

        Args:
            data: See `fit`, as for all other arguments.
            batch_size: The number of rows.
            max_length: The largest number of tokens of a row.
            train_on: Which tokens to train.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: See `fit`.

        Example:
            >>> from models import llama
            >>> rows = [{"prompt": "2 + 2 = ", "completion": "4"}]
            >>> print(llama.fine_tuning().show(rows))
            row 1: 10 tokens, 2 trained
            2 + 2 = «4<|end|>»
        """
        count = whole_number("batch_size", batch_size, 1)
        if self._has_encoder:
            raise UnsupportedError("show: models with an encoder are not supported")
        units = self._examples(data, max_length, train_on)
        lines = []
        for number, unit in enumerate(units[:count], 1):
            for example in unit:
                trained = int(example.trained[1:].sum())
                lines.append(f"row {number}: {len(example.tokens)} tokens, {trained} trained")
                lines.append(self._marked(example))
        return "\n".join(lines)

    def _marked(self, example: Example) -> str:
        """Returns tokens as text, with « and » around those that are trained."""
        changes = np.flatnonzero(np.diff(example.trained)) + 1
        text = ""
        for part in np.split(np.arange(len(example.tokens)), changes):
            tokens = example.tokens[part].tolist()
            if self._folder.has_tokenizer:
                shown = self.tokenizer.text(tokens, special=True)
            else:
                shown = " ".join(map(str, tokens)) + " "
            text += f"«{shown}»" if example.trained[part[0]] else shown
        return text

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Any:
        """Continues a prompt.

        Stock onnxruntime computes one token at a time, with the cache of keys and values.

        Args:
            prompt: A text, a chat (a list of messages, to which the assistant replies), or tokens.
                For an encoder of features, an array [bins, frames].
            max_new_tokens: The largest number of tokens to generate. Generation ends before at a
                token that ends a text, or at the model's context length.
            temperature: 0 for the most likely tokens. Otherwise, tokens are drawn with the
                probabilities softmax(logits / temperature).
            top_k: Draws among this many most likely tokens only; by default among all.
            top_p: Draws among the most likely tokens that together have at least this probability.
            seed: Determines what is drawn.

        Returns:
            The continuation: tokens if tokens are given, else a text.

        Raises:
            ArgumentError: If the prompt is empty, or longer than the model's context length.
            ModelError: If the folder has no tokenizer or chat template.
            UnsupportedError: If the form of the model's cache is not supported.

        Example:
            >>> from models import llama
            >>> len(llama.fine_tuning().generate([65, 66], max_new_tokens=3)) <= 3
            True
        """
        count = whole_number("max_new_tokens", max_new_tokens, 1)
        is_text, source = isinstance(prompt, str), None
        if self._has_encoder:
            source = source_of(prompt, lambda: self.tokenizer)
            tokens = [start_token(self._folder)]
        elif isinstance(prompt, str):
            tokens = self.tokenizer.tokens(prompt)
        elif len(prompt) and isinstance(prompt[0], Mapping):
            is_text = True
            text = self.tokenizer.chat(prompt, begin_reply=True)  # type: ignore[arg-type]
            tokens = self.tokenizer.tokens(text, special=False)
        else:
            tokens = [whole_number("prompt: a token", token, 0) for token in prompt]
        sampling = Sampling(temperature, top_k, top_p, seed)
        end = {*self._folder.end, *(self.tokenizer.end if is_text else ())}
        found = self._continued(tokens, count, end, sampling, source)
        return self.tokenizer.text(found) if is_text else found

    def _continued(
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
            return continued(
                self._files.written(self.session.inference_model()),
                *(None if source is None else source_feeds([source], 0), tokens),
                logits=self._folder.logits,
                count=count,
                end=end,
                sampling=sampling,
            )
        if self._served is None:
            self._served = self._serve()
        fixed = {name: self.session.state[name] for name in self._names}
        self._refuse_unknown(tokens)
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

    def save(self, folder: str | os.PathLike[str], *, merged: bool = False) -> None:
        """Writes a folder that is served like the original one, with and without the adapter.

        The folder has the other files of the original one, such as tokenizer.json;
        genai_config.json, which is written from config.json if there is none; the model, which
        computes what the original model computes unless an adapter is active;
        ``adapter.onnx_adapter``, for `onnxruntime.RunOptions.add_active_adapter` and
        onnxruntime-genai's ``Adapters``; and ``training.state``, which only `load` reads.

        If the model has several files or a merged decoder, all of them are written with the adapter
        merged into their weights, and there is no ``adapter.onnx_adapter``.

        Args:
            folder: The folder. It is created if it does not exist.
            merged: Whether to merge the adapter into the weights, for runtimes without adapters,
                such as transformers.js. There is then neither ``adapter.onnx_adapter`` nor
                ``training.state``, and the model always computes what was learned. Weights of
                MatMulNBits are quantized again, with the same bits and block size; the log says
                how much this rounds away.

        Raises:
            ArgumentError: If it is the folder of the original model, or, with ``merged``, one that
                has an adapter.
            ModelError: If a merged weight overflows its type.
            OSError: If a file cannot be written.
            UnsupportedError: If ``merged``, and a layer is computed with quantized numbers.

        Example:
            >>> import os
            >>> import tempfile
            >>> from models import llama
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     llama.fine_tuning().save(folder)
            ...     sorted(os.listdir(folder))[:3]
            ['adapter.onnx_adapter', 'chat_template.jinja', 'genai_config.json']
        """
        target = Path(folder)
        self._check_target(target)
        if boolean("merged", merged):
            if self._files is not None:
                self._save_files(self._files, target)
            else:
                self._save_merged(target)
        else:
            self._save_model(target)
            self._save_progress(target)

    def _check_target(self, target: Path) -> None:
        if target.resolve() == self._folder.path.resolve() and not self._is_loaded:
            raise ArgumentError(
                f"folder must not be that of the original model, got '{target}'; give another one"
            )

    def _save_others(self, target: Path) -> Path:
        """Writes the other files of the folder; returns where the model belongs."""
        file = target / self._folder.model.relative_to(self._folder.path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if target.resolve() != self._folder.path.resolve():
            copy_others(self._folder, target, without=TRAINING)
            if settings := genai_config(self._folder):
                (target / GENAI_CONFIG).write_text(settings, encoding="utf-8")
        return file

    def _save_merged(self, target: Path) -> None:
        if (target / ADAPTER).exists():
            raise ArgumentError(
                f"folder must not have an adapter if merged=True, got '{target}'; give another one"
            )
        model = external.detach(merged_model(self.session.inference_model()))
        model = prune(model, load_light(self._folder.model))
        save_model(model.attach(), self._save_others(target))

    def _save_model(self, target: Path) -> None:
        """Writes what training does not change."""
        if self._files is not None:
            return
        file = self._save_others(target)
        with self.session._locked_file() as held:
            model = held.light_inference_model()
            for tensor in model.proto.graph.initializer:
                if tensor.name in self._initial:
                    array = self._initial[tensor.name]
                    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
            write_model(file, prune(model, load_light(self._folder.model)), limit=_ONE_FILE)

    def _save_progress(self, target: Path) -> None:
        """Writes the adapter, and the state of the training."""
        if self._files is not None:
            self._save_files(self._files, target)
            self.session.save(target / TRAINING)
            return
        with self.session._locked_file() as held:
            model = held.light_inference_model()
            write_adapter(model, target / ADAPTER)
            state = held.light_model()
            known = {tensor.name for tensor in model.proto.graph.initializer} - set(self._names)
            for tensor in state.proto.graph.initializer:
                if tensor.name in known and size_of(tensor) > _SMALL:
                    tensor.CopyFrom(onnx.TensorProto(name=tensor.name))  # it is in the model's file
            write_atomically(target / TRAINING, state.attach().SerializeToString())

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], recompute: Checkpoint | None = None
    ) -> FineTuning:
        """Reads a folder that `save` wrote, to continue the training.

        The adapter, the optimizer's state, the learning rate and the position of `fit` are those
        that were saved, so training continues as if it had never stopped.

        Args:
            folder: The folder.
            recompute: See `FineTuning`.

        Raises:
            ArgumentError: If there is no such folder.
            ModelError: If its model has no adapter, or its files do not belong together.

        Example:
            >>> import tempfile
            >>> from models import llama
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     llama.fine_tuning().save(folder)
            ...     again = FineTuning.load(folder)
            >>> again.session.steps_done == llama.fine_tuning().session.steps_done
            True
        """
        opened = open_folder(folder)
        files = several_files(opened)
        if files is not None:
            result, trainable = cls.__new__(cls), _saved_training(opened.path / TRAINING)
            initial = _adapter_values(trainable)
            result._start(opened, trainable, initial, files=files, recompute=recompute)
            return result
        model = load_light(opened.model)
        if adapter_of(model.proto.metadata_props) is None:
            raise ModelError(
                f"folder '{opened.path}': its model has no adapter; begin with "
                "ortops.llm.FineTuning(folder)"
            )
        initial = _adapter_values(model)
        state = opened.path / TRAINING
        if state.is_file():
            trainable = _filled(state, model)
        else:  # the training begins again, from the adapter
            model = with_adapter(without_pruning(model), opened.path / ADAPTER)
            trainable = _trainable(model, opened, 2e-4, None)
        result = cls.__new__(cls)
        result._start(opened, trainable, initial, recompute=recompute)
        return result

    def _save_files(self, files: SeveralFiles, target: Path) -> None:
        """Writes the files of a model with the adapter merged into them; see `save`."""
        for file in files.parts.values():
            (target / file.relative_to(self._folder.path)).parent.mkdir(parents=True, exist_ok=True)
        if target.resolve() != self._folder.path.resolve():
            copy_others(self._folder, target, without=TRAINING)
        for part, model in files.written(self.session.inference_model()).items():
            save_model(model, target / files.parts[part].relative_to(self._folder.path))

    @property
    def _has_encoder(self) -> bool:
        return self._files is not None and self._files.has_encoder

    def _examples(self, data: Rows, max_length: int, train_on: str) -> Sequence[Any]:
        longest = whole_number("max_length", max_length, 2)
        longest = min(longest, self._folder.context_length or longest)
        choice("train_on", train_on, TRAIN_ON)
        if self._has_encoder:
            return read_sequence_pairs(data, lambda: self.tokenizer, self._folder, longest)
        rows = list(rows_of(data))
        if any(is_preference(row) != self._compares for row in rows):
            raise FeedError(
                "data: rows with chosen and rejected need loss=ortops.losses.DPO()"
                if not self._compares
                else "data: for DPO, each row must have chosen and rejected"
            )
        if self._compares:
            return read_pairs(rows, lambda: self.tokenizer, max_length=longest)
        found = read_examples(rows, lambda: self.tokenizer, train_on=train_on, max_length=longest)
        return [(example,) for example in found]

    def _pads_right(self) -> str:
        """Returns a node that needs padding on the right, as text; empty if there is none."""
        graph = onnx.load(self._folder.model, load_external_data=False).graph
        kinds = ("GroupQueryAttention", "PagedAttention", "SparseAttention")
        found = (node for node in graph.node if node.op_type in kinds)
        return next((f"{node.op_type} node '{node.name}'" for node in found), "")

    def _batches(
        self, units: Sequence[Any], batch_size: int, padding: str = "right"
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        for first in range(0, len(units), batch_size):
            rows = units[first : first + batch_size]
            if self._files is not None and self._has_encoder:
                batch = pair_feeds(rows, self._folder, self._files.inputs)
            else:
                batch = batch_of([each for unit in rows for each in unit], padding)
            named = {self._folder.input_name(name): array for name, array in batch.items()}
            yield {name: array for name, array in named.items() if name in self.session.inputs}

    def _refuse_unknown(self, tokens: Sequence[int]) -> None:
        """Rejects tokens that the vocabulary does not have."""
        assert self._served is not None
        shapes = [v.shape for v in self._served.get_outputs() if v.name == self._folder.logits]
        size = shapes[0][-1] if shapes and shapes[0] else None
        if isinstance(size, int) and max(tokens) >= size:
            raise ArgumentError(f"prompt: tokens must be < {size}, got {max(tokens)}")

    def _serve(self) -> onnxruntime.InferenceSession:
        refuse_norms(self._folder)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # one warning for each tensor of the adapter
        with self.session._locked_file() as held:
            model = to_ir(held.light_inference_model())
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


def _trainable(
    model: LightModel,
    folder: Folder,
    learning_rate: float | Schedule,
    loss: NextToken | str | None,
    files: SeveralFiles | None = None,
) -> LightModel:
    kinds = {"NextToken": NextToken, "DPO": DPO}
    if isinstance(loss, str):
        loss = kinds[choice("loss", loss, tuple(kinds))]()
    elif loss is not None and type(loss) not in (NextToken, DPO):
        raise ArgumentError(f"loss must be NextToken or DPO of ortops.losses, got {loss!r:.80}")
    if files is not None and files.has_encoder:  # whose labels belong to the decoder's inputs
        if isinstance(loss, DPO):
            raise ArgumentError("loss must be NextToken for a model with an encoder, got DPO")
        chosen: Loss = SoftmaxCrossEntropy(folder.logits, axis=-1, ignore_index=IGNORED)
        return build_light(model, loss=chosen, optimizer=_optimizer(learning_rate))
    loss = loss or NextToken()
    if loss.ignore_index != IGNORED or loss.target not in (None, "labels"):
        raise ArgumentError(
            f"loss must have ignore_index={IGNORED} and no target, as fit makes the labels, got "
            f"{loss!r:.200}"
        )
    named = replace(loss, output=loss.output or folder.logits)
    result = build_light(model, loss=named, optimizer=_optimizer(learning_rate))
    write_metadata(result.proto, _LOSS, json.dumps({"loss": loss.name}))
    return result


def _optimizer(learning_rate: float | Schedule) -> Adam:
    """Returns PyTorch's Adam."""
    return Adam(learning_rate, beta=0.999, epsilon_after_correction=True)


def _loss_name(model: LightModel) -> str:
    remedy = "delete the file of the training"
    found = read_metadata(model.proto.metadata_props, _LOSS, remedy) or {}
    return str(found.get("loss", "NextToken"))


def _saved_training(file: Path) -> LightModel:
    """Returns the trainable model that `FineTuning.save` wrote for a model in several files."""
    if not file.is_file():
        raise ModelError(
            f"file '{file}' is missing, without which the training cannot be continued, as the "
            "adapter is merged into the files of the model; begin with ortops.llm.FineTuning"
        )
    return load_light(file)


def _adapter_names(model: LightModel) -> list[str]:
    adapter = adapter_of(model.proto.metadata_props)
    modules = {} if adapter is None else adapter.modules
    return [name for module in modules.values() for name in (module.a, module.b)]


def _adapter_values(model: LightModel) -> dict[str, npt.NDArray[Any]]:
    return model.arrays(_adapter_names(model))


def _filled(file: Path, model: LightModel) -> LightModel:
    """Returns a saved trainable model with the weights of the model's file."""
    result = onnx.ModelProto()
    try:
        result.ParseFromString(file.read_bytes())
    except Exception as error:  # protobuf's
        raise ModelError(
            f"file '{file}': {error}; delete it to begin the training again"
        ) from error
    known = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    for tensor in result.graph.initializer:
        if not tensor.data_type:
            if tensor.name not in known:
                raise ModelError(
                    f"file '{file}': '{tensor.name}' is missing in the model; delete the file to "
                    "begin the training again"
                )
            tensor.CopyFrom(known[tensor.name])
    return LightModel(result, dict(model.data))
