"""Fine-tunes a language model with an adapter, from a folder and into a folder."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import onnx

from ortops._common.arguments import boolean, choice, whole_number
from ortops._common.notes import notes_as_details
from ortops._common.other_names import explains_arguments
from ortops.engine.building.builder import build_light
from ortops.engine.building.parameters import quantized
from ortops.engine.training.callback import Callback, Record
from ortops.engine.training.fit_options import checked_options, has_options
from ortops.engine.training.history import History
from ortops.engine.training.schedule_length import steps_left
from ortops.engine.training.session import TrainingSession
from ortops.errors import ArgumentError, ModelError, UnsupportedError
from ortops.graph.adapters import adapter_of
from ortops.graph.convert import load_light, to_ir
from ortops.graph.files.external import LightModel, move_aside
from ortops.graph.files.json_metadata import read_metadata, write_metadata
from ortops.graph.files.opening import read_regular
from ortops.graph.passes.rematerialization import Checkpoint
from ortops.llm.batches import Batches, Epochs, check_stream
from ortops.llm.encoder_rows import Texts
from ortops.llm.encoders import Encoder, encoder_of, first_of, head_of, loss_of, with_head
from ortops.llm.examples import IGNORED, Units
from ortops.llm.folder import Folder, open_folder
from ortops.llm.generation import Sampling
from ortops.llm.graphs import (
    may_see_later_tokens,
    refuse_experts,
    refuse_others,
    without_pruning,
)
from ortops.llm.options import FIRST_OPTIONS, TUNING, TuningOptions, remedies
from ortops.llm.row_files import SETTINGS, Rows, is_stream, prepared
from ortops.llm.row_kinds import Comparisons, RowKind, SequencePairs, Sequences
from ortops.llm.saving import ADAPTER, TRAINING, FolderWriter, refuse_unfinished
from ortops.llm.serving import Server
from ortops.llm.several_files import SeveralFiles, several_files
from ortops.llm.tokenization import Message, Tokenizer
from ortops.lora.addition import adapted, read_base
from ortops.lora.files import with_adapter
from ortops.lora.full_weights import saved_modules
from ortops.lora.merging import refuse_unmergeable
from ortops.lora.peft import with_peft
from ortops.lora.peft_layers import model_type_beside
from ortops.losses import DPO, Loss, NextToken, SoftmaxCrossEntropy
from ortops.losses.preference import REWARD_MARGIN
from ortops.metrics.metric import Array, Mean
from ortops.optimizers import Optimizer, resolve
from ortops.schedules import LearningRate

logger = logging.getLogger("ortops")

_LOSS = "ortops.llm"
"""The metadata key of the loss."""

RATE: float = TUNING["learning_rate"].default

_OF_ADAPTER = (
    *("rank", "alpha", "seed"),
    *("targets", "rslora", "rank_pattern", "alpha_pattern", "dropout", "dora"),
    *("modules_to_save", "bias"),
)
"""The arguments of `ortops.lora.addition.adapted`."""

_MEASURED, _LONG = 3, 60  # steps, seconds


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
        rank: The rank of the adapter; None to train all weights of the model instead, which must
            not be quantized. `save` then writes no adapter, but the trained model.
        alpha: The numerator of the scaling, alpha / rank.
        targets: The layers to adapt, as for `ortops.lora.add`; by default all linear layers but
            lm_head, which computes the logits.
        learning_rate: The learning rate, or a schedule of `ortops.schedules`; left out beside an
            optimizer that is given as an object.
        recompute: Which activations to keep, as for `ortops.TrainingSession`. By default, steps on
            the CPU compute results of activation functions, products of elements and normalizations
            again (``"elementwise"``), which takes hardly more time; in float32, losses have equal
            bits. ``"sqrt"`` saves much memory for a third more time. None keeps all activations.
        adapter: An adapter to begin with: a folder of PEFT, which determines rank, alpha, targets,
            dropout and the patterns, or an ``.onnx_adapter`` file of this model with the same rank
            and targets. It may have been trained on the model in another precision.
        loss: `ortops.losses.NextToken` by default, or `ortops.losses.DPO` for pairs of a better and
            a worse answer. The reference of DPO is the model without the adapter, so there is no
            second model. For retrieval, ``"InfoNCE"`` (the default) or ``"Triplet"``.
        dropout: The ratio of elements of a layer's input that training drops before A.
        rslora: Whether to use the scaling alpha / √rank (rsLoRA).
        dora: Whether to train the magnitudes of outputs, too (DoRA), as for `ortops.lora.add`.
        modules_to_save: Modules whose own weights are trained, too, such as ``["lm_head"]``, as for
            `ortops.lora.add`; not with DPO.
        bias: Which biases are trained: ``"none"``, ``"all"`` or ``"lora_only"``, likewise.
        rank_pattern: Ranks of particular layers, as for `ortops.lora.add`.
        alpha_pattern: Alphas of particular layers, likewise.
        seed: The seed of the adapter's random initial values.
        providers: Where to train, as for `ortops.TrainingSession`; by default, on the CPU, where
            `generate` always runs.
        optimizer: The name of an optimizer of `ortops.optimizers`, or an object, which has its own
            learning rate and weight decay. By default PyTorch's Adam, or its AdamW if
            ``weight_decay`` is given. By name, optimizers have this learning rate, but Prodigy
            and Adadelta their own, 1.
        weight_decay: The weight decay of the optimizer.
        clip_norm: The largest norm of all gradients together, as for
            `ortops.build_training_model`.
        task: What a text encoder (BERT, MiniLM; a folder of Optimum or sentence-transformers) is
            trained for: ``"classification"`` of texts, or of pairs of texts; ``"pairs"`` for the
            similarity of two texts, or for their class if the model has logits; ``"retrieval"`` for
            texts and their answers. Beside the adapter, the layer of the logits is trained. `save`
            then writes the model with the adapter merged.
        labels: The names of the classes. By default, those of the model; one without logits gets a
            linear layer behind its pooled hidden states, and needs them.

    Attributes:
        session: The `ortops.TrainingSession`.
        tokenizer: The folder's tokenizer.

    Raises:
        ArgumentError: If an argument is wrong.
        ModelError: If the folder has no model, the model has no layer to adapt, or it is not a
            language model, such as a masked one.
        UnsupportedError: If an operator behind an adapted layer has no gradient, such as MoE.

    Example:
        >>> rows = [{"input_ids": [65, 66, 67, 68, 256]}]  # or text, or the path of JSON lines
        >>> tuning = FineTuning("model", 4, 4, learning_rate=0.03)  # doctest: +SKIP
        >>> history = tuning.fit(rows, epochs=30, progress=False)  # doctest: +SKIP
        >>> history[-1]["loss"] < 0.6 < history[0]["loss"]  # doctest: +SKIP
        True
        >>> tuning.save("tuned")  # doctest: +SKIP
        >>> FineTuning.load("tuned").generate([65, 66], max_new_tokens=2)  # doctest: +SKIP
        [67, 68]
    """

    session: TrainingSession
    _initial: Mapping[str, Any]

    @explains_arguments(**remedies(in_fit=False))
    @has_options(TuningOptions)
    def __init__(
        self,
        folder_or_file: str | os.PathLike[str],
        rank: int | None = 8,
        alpha: float = 16,
        targets: str | Sequence[str] | None = None,
        learning_rate: LearningRate = RATE,
        recompute: Checkpoint | None = "auto",
        adapter: str | os.PathLike[str] | None = None,
        **options: Unpack[TuningOptions],
    ) -> None:
        first = rank, alpha, targets, learning_rate, recompute, adapter
        named = dict(zip(FIRST_OPTIONS, first, strict=True))
        given = checked_options({**named, **options}, TUNING)
        folder = open_folder(folder_or_file)
        refuse_unfinished(folder.path)
        files = several_files(folder)
        encoder = _encoder(folder, given)
        with notes_as_details():
            model = _adapted(folder, files, given, encoder)
            refuse_experts(model.proto)
            trainable = _trainable(model, folder, given, files, encoder)
        providers = given["providers"]
        self._start(folder, trainable, files=files, recompute=recompute, providers=providers)
        if files is None and encoder is None and may_see_later_tokens(trainable.proto):
            self._batches.refuse_sight(self.session)
        hidden = encoder and first_of(folder, load_light(folder.model), encoder)
        if hidden:
            self._batches.refuse_blindness(self.session, hidden)
        if adapter is not None:  # without an active adapter, the saved model is the base
            base = load_light(folder.model if files is None else files.base)
            self._writer.initial = _without_update(trainable, base, self._writer.initial)

    def _start(
        self,
        folder: Folder,
        model: LightModel,
        initial: Mapping[str, Any] | None = None,
        *,
        files: SeveralFiles | None = None,
        recompute: Checkpoint | None,
        providers: Sequence[Any] | None,
    ) -> None:
        folder = self._folder = _scored(folder, model)
        self._tokenizer: Tokenizer | None = None
        # Without its outputs: the logits and the cache take much memory.
        self.session = TrainingSession(model, providers=providers, recompute=recompute, outputs=[])
        names, known = _adapter_names(model), initial or _adapter_values(model)
        self._encoder = encoder = _trained_encoder(model)
        self._writer = FolderWriter(
            *(self.session, folder, files, [] if encoder is not None else names, known),
            is_loaded=initial is not None,
            labels=() if encoder is None else encoder.labels,
        )
        words = words_of(model, folder)
        self._server = Server(self.session, folder, files, names, words)
        settings = (folder, lambda: self.tokenizer, words)
        if encoder is not None:
            kind: RowKind = Texts(encoder, *settings)
        elif files is not None and files.has_encoder:
            kind = SequencePairs(files, *settings)
        else:
            kind = (Comparisons if _loss_settings(model).get("loss") == "DPO" else Sequences)(
                *settings
            )
        self._batches = Batches(kind, self.session.inputs)

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer, with ``tokens(text)`` and ``text(tokens)``.

        Raises:
            ModelError: If the folder has no tokenizer.json.
            OrtopsError: If the package tokenizers is not installed.

        Example:
            >>> from ortops.llm import FineTuning
            >>> tuning = FineTuning("model", rank=2)  # doctest: +SKIP
            >>> tuning.tokenizer.tokens("hello")  # doctest: +SKIP
            [104, 101, 108, 108, 111]
        """
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self._folder)
        return self._tokenizer

    @explains_arguments(**remedies(in_fit=True))
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
        packing: bool = False,
        padding: str = "right",
        seed: int = 0,
        validation: Rows | float | None = None,
        save: str | os.PathLike[str] | None = None,
        save_steps: int | None = None,
        columns: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> History:
        """Trains the adapter.

        Args:
            data: The path of a file of JSON lines, JSON (a list), CSV or Parquet, or of a folder
                of these, or an iterable of rows, such as a data set of Hugging Face. A row is a
                dict with

                - ``messages``: a chat, a list of dicts with ``role`` and ``content``, a text or a
                  list of texts; those with ``weight`` 0 are not trained;
                - ``conversations``: a chat in the form of ShareGPT, a list of dicts with ``from``
                  (``human``, ``gpt`` or ``system``) and ``value``;
                - ``prompt`` and ``completion``: two texts, or two lists of messages;
                - ``instruction``, optionally ``input``, and ``output`` (Alpaca), or ``question``
                  and ``answer``: a chat if the folder has a chat template, else two texts;
                - ``text``: a text;
                - ``input_ids``: tokens, and optionally ``labels``, as in transformers: as many,
                  not shifted, each of them a token that is trained in the place of that in
                  ``input_ids`` (usually the same), or -100 for one that the loss ignores.

                Beside a chat, a row may have ``tools``, ``documents``, and
                ``chat_template_kwargs``, such as ``{"enable_thinking": False}``. What the chat
                template changes in a longer chat, such as earlier reasoning, becomes a row of its
                own: the chat up to that reply.

                Rows of files are read when they are needed. An iterator without a length needs
                ``max_steps`` and ``shuffle=False``.

                For a model with an encoder, a row has ``prompt`` (for the encoder) and
                ``completion`` (for the decoder), or ``input_ids`` and ``labels``, or
                ``input_features``, an array [bins, frames], and ``text`` or ``labels``. Labels
                begin with the token after the decoder's start token. ``decoder_prefix``, as text or
                tokens, comes before them and is not trained, such as Whisper's tokens of language
                and task: ``"<|en|><|transcribe|><|notimestamps|>"``.

                For a text encoder, a row has ``text`` and ``label``, and optionally ``text_pair``;
                or ``sentence1``, ``sentence2`` and ``score`` (from -1 to 1); or ``anchor``,
                ``positive`` and optionally ``negative``.

                A list of tokens is a row, too. The token that ends a text is added to texts and
                completions; chats get what their template writes. Rows for DPO have ``prompt``,
                ``chosen`` and ``rejected``: texts, chats, or tokens. Without ``prompt``, it is what
                both answers, texts or chats, begin with.
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
            packing: Whether to join rows to as few rows of at most ``max_length`` tokens as
                possible, which saves padding. They are trained as if they were separate.
                ``batch_size`` is the number of joined rows.
            padding: The side of padding, ``"right"`` or ``"left"``.
            seed: Determines the order of the rows.
            validation: Rows to evaluate after each epoch, or a fraction such as 0.1: so many of the
                rows of ``data``, which are then not trained. The seed determines which.
            save: A folder to save after each epoch, and when training ends or is interrupted (see
                `save`). After `load`, ``fit(…, resume=True)`` continues an interrupted training, as
                if it had never stopped.
            save_steps: The number of steps between saves, in place of an epoch.
            columns: The columns of the data by the names above, if they have others:
                ``{"prompt": "question", "completion": "answer"}``. Then no others are read, but
                those for the chat template.
            **settings: Further arguments of `ortops.TrainingSession.fit`, such as ``accumulate``,
                ``max_steps`` and ``callbacks``.

        Returns:
            The history of `ortops.TrainingSession.fit`. The loss is the mean over the trained
            tokens.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: If a row has another form, or there is no token to train.
            ModelError: If text needs a tokenizer or chat template that the folder does not have.
            UnsupportedError: If ``packing``, and the model does not keep the examples of a row
                apart: most do not, such as those of onnxruntime-genai and Optimum.

        Example:
            >>> rows = [[65, 66, 67], [68, 69]]
            >>> from ortops.llm import FineTuning
            >>> tuning = FineTuning("model", rank=2)  # doctest: +SKIP
            >>> history = tuning.fit(rows, epochs=2, progress=False)  # doctest: +SKIP
            >>> history.history["steps"]  # doctest: +SKIP
            [1, 2]
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        seed, epochs = whole_number("seed", seed, 0), whole_number("epochs", epochs, 1)
        self._batches.check(padding, group_by_length=group_by_length)
        reading = max_length, train_on, columns
        held_out: Units | None = None
        count: int | None = None
        if is_stream(data):
            given: Any = self._batches.stream(data, batch_size, padding, *reading)
            refused = {"shuffle": shuffle, "group_by_length": group_by_length, "packing": packing}
            check_stream(refused, settings.get("max_steps"), validation)
        else:
            units = self._batches.read(data, *reading)
            if isinstance(validation, int | float):
                units, held_out = self._batches.split(units, validation, seed)
            if boolean("packing", packing):
                units = self._batches.pack(units, max_length, self.session)
            order = seed if shuffle else None
            given = self._batches.epochs(
                units, batch_size, padding, seed=order, group_by_length=group_by_length
            )
            count = len(given)
        if validation is not None and not isinstance(validation, int | float):
            held_out = self._batches.read(validation, *reading)
        if held_out is not None:
            settings["validation"] = self._batches.epochs(held_out, batch_size)
            if self._encoder is not None and self._encoder.labels:
                settings = {"metrics": ["accuracy"], **settings}
        call = {"epochs": epochs, "batches": count, "accumulate": settings.get("accumulate", 1)}
        steps = steps_left(call)
        known = [each for each in (steps, settings.get("max_steps")) if each is not None]
        callbacks = [*settings.pop("callbacks", ()), Estimate(min(known))]
        callbacks += self._writer.checkpoints(save, save_steps)
        return self.session.fit(given, epochs=epochs, seed=seed, callbacks=callbacks, **settings)

    def evaluate(
        self,
        data: Rows,
        batch_size: int = 4,
        max_length: int = 512,
        train_on: str = "assistant",
        *,
        exact_match: bool = False,
        columns: Mapping[str, str] | None = None,
    ) -> dict[str, float]:
        """Computes the loss and other metrics of rows.

        Args:
            data: The rows; see `fit`, as for all other arguments.
            batch_size: The number of rows per batch.
            max_length: The largest number of tokens of a row.
            train_on: Which tokens count.
            exact_match: Whether to generate the last reply or completion of each row, too.
            columns: See `fit`.

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
            >>> from ortops.llm import FineTuning
            >>> tuning = FineTuning("model", rank=2)  # doctest: +SKIP
            >>> sorted(tuning.evaluate([[65, 66, 67]]))  # doctest: +SKIP
            ['accuracy', 'loss', 'perplexity']
        """
        batch_size = whole_number("batch_size", batch_size, 1)
        examples = self._batches.read(data, max_length, train_on, columns)
        if exact_match:
            self._batches.kind.refuse("exact_match")
        batches = self._batches.epochs(examples, batch_size)
        if isinstance(self._batches.kind, Comparisons):
            return _rewards(self.session, batches)
        if self._encoder is not None:
            own = ["accuracy"] if self._encoder.labels else []
            return self.session.evaluate(batches, metrics=own)
        found = self.session.evaluate(batches, metrics=["accuracy"])
        with np.errstate(over="ignore"):
            found["perplexity"] = float(np.exp(found["loss"]))
        if exact_match:
            found["exact_match"] = float(
                np.mean([self._server.repeats(row) for (row,) in examples])
            )
        return found

    def show(
        self,
        data: Rows,
        batch_size: int = 4,
        max_length: int = 512,
        train_on: str = "assistant",
        *,
        columns: Mapping[str, str] | None = None,
    ) -> str:
        """Returns the first batch as text, with marks around the tokens that are trained.

        Args:
            data: See `fit`, as for all other arguments.
            batch_size: The number of rows.
            max_length: The largest number of tokens of a row.
            train_on: Which tokens to train.
            columns: See `fit`.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: See `fit`.

        Example:
            >>> rows = [{"prompt": "2 + 2 = ", "completion": "4"}]
            >>> from ortops.llm import FineTuning
            >>> tuning = FineTuning("model", rank=2)  # doctest: +SKIP
            >>> print(tuning.show(rows))  # doctest: +SKIP
            row 1: 10 tokens, 2 trained
            2 + 2 = «4<|end|>»
        """
        count = whole_number("batch_size", batch_size, 1)
        given = itertools.islice(data, count) if is_stream(data) else data
        units = self._batches.read(given, max_length, train_on, columns)
        return self._batches.kind.show(units[:count])

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        decoder_prefix: str | Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] | str | None = None,
        documents: Sequence[Mapping[str, Any]] | str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
            decoder_prefix: For a model with an encoder, the tokens behind the decoder's start
                token, as text or tokens: ``"<|en|><|transcribe|><|notimestamps|>"`` for Whisper.
            tools: Beside a chat, the tools that its template writes, as in a row of `fit`.
            documents: Beside a chat, the documents, likewise.
            chat_template_kwargs: Beside a chat, further names that its template reads, likewise.

        Returns:
            The continuation: tokens if tokens are given, else a text.

        Raises:
            ArgumentError: If the prompt is empty, or longer than the model's context length.
            ModelError: If the folder has no tokenizer or chat template.
            UnsupportedError: If the form of the model's cache is not supported.

        Example:
            >>> from ortops.llm import FineTuning
            >>> tuning = FineTuning("model", rank=2)  # doctest: +SKIP
            >>> len(tuning.generate([65, 66], max_new_tokens=3)) <= 3  # doctest: +SKIP
            True
        """
        if self._encoder is not None:
            raise UnsupportedError("generate: a text encoder generates no text; run its model")
        count = whole_number("max_new_tokens", max_new_tokens, 1)
        sampling = Sampling(temperature, top_k, top_p, seed)
        more = prepared(dict(zip(SETTINGS, (tools, documents, chat_template_kwargs), strict=True)))
        tokens, source, is_text = self._server.read_prompt(
            prompt, decoder_prefix, lambda: self.tokenizer, more
        )
        end = {*self._folder.end, *(self.tokenizer.end if is_text else ())}
        found = self._server.continued(tokens, count, end, sampling, source)
        return self.tokenizer.text(found) if is_text else found

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
            >>> FineTuning("model", rank=2).save("tuned")  # doctest: +SKIP
            >>> sorted(os.listdir("tuned"))[:3]  # doctest: +SKIP
            ['adapter.onnx_adapter', 'chat_template.jinja', 'genai_config.json']
        """
        target = Path(folder)
        self._writer.check(target)
        if boolean("merged", merged):
            self._writer.save_merged(target)
        else:
            self._writer.save_model_file(target)
            self._writer.save_progress(target)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        recompute: Checkpoint | None = "auto",
        *,
        providers: Sequence[Any] | None = None,
    ) -> FineTuning:
        """Reads a folder that `save` wrote, to continue the training.

        The adapter, the optimizer's state, the learning rate and the position of `fit` are those
        that were saved, so training continues as if it had never stopped.

        Args:
            folder: The folder.
            recompute: See `FineTuning`.
            providers: See `FineTuning`; a folder may be tuned further on other providers.

        Raises:
            ArgumentError: If there is no such folder, or a provider cannot be used.
            ModelError: If its model has no adapter, or its files do not belong together.

        Example:
            >>> from ortops.llm import FineTuning
            >>> tuning = FineTuning("model", rank=2)  # doctest: +SKIP
            >>> tuning.save("tuned")  # doctest: +SKIP
            >>> FineTuning.load("tuned").session.steps_done  # doctest: +SKIP
            0
        """
        opened = open_folder(folder)
        refuse_unfinished(opened.path)
        files = several_files(opened, opened.path / TRAINING)
        with notes_as_details():
            trainable, initial = _saved(opened, files)
        result = cls.__new__(cls)
        result._start(
            opened, trainable, initial, files=files, recompute=recompute, providers=providers
        )
        return result


def _saved(folder: Folder, files: SeveralFiles | None) -> tuple[LightModel, dict[str, Any]]:
    """Returns the trainable model of a folder that `FineTuning.save` wrote.

    Returns:
        The model, and the initial values of its adapter.
    """
    model, state = load_light(folder.model), folder.path / TRAINING
    is_adapted = adapter_of(model.proto.metadata_props) is not None
    if files is not None or (state.is_file() and not is_adapted):
        trainable = _saved_training(state)
        return trainable, _adapter_values(trainable)
    if not is_adapted:
        raise ModelError(
            f"folder '{folder.path}': its model has no adapter; begin with "
            "ortops.llm.FineTuning(folder)"
        )
    initial = _adapter_values(model)
    if state.is_file():
        return _filled(state, model), initial
    # The training begins again, from the adapter.
    model = with_adapter(without_pruning(model), folder.path / ADAPTER)
    return _trainable(model, folder, checked_options({}, TUNING)), initial


def _encoder(folder: Folder, given: Mapping[str, Any]) -> Encoder | None:
    """Returns what is trained of a text encoder; None for a language model."""
    if given["task"] is None:
        if given["labels"] is not None:
            raise ArgumentError(f"labels need task='classification', got {given['labels']!r:.80}")
        return None
    choice("task", given["task"], TUNING["task"].bounds["options"])
    if given["adapter"] is not None:
        raise ArgumentError(
            f"adapter must be left out for a task, got {os.fspath(given['adapter'])!r:.80}"
        )
    return encoder_of(folder, load_light(folder.model), given)


def _adapted(
    folder: Folder,
    files: SeveralFiles | None,
    given: Mapping[str, Any],
    encoder: Encoder | None,
) -> LightModel:
    """Returns the model of a folder with an adapter; see `FineTuning`."""
    model = load_light(folder.model if files is None else files.base)  # without its data
    if encoder is not None:
        model = with_head(folder, model, encoder)
    elif files is None:
        model = without_pruning(model)
        refuse_others(model.proto, folder)
    if adapter_of(model.proto.metadata_props) is not None:
        raise ModelError(
            f"folder '{folder.path}': its model already has an adapter; continue with "
            "ortops.llm.FineTuning.load, or merge it with ortops.lora.merge"
        )
    adapter = given["adapter"]
    fixed = {} if encoder is None else quantized(to_ir(model).graph.initializers.values())
    if given["rank"] is None:
        if fixed:  # does a rank help?
            _adapted(folder, files, {**given, "rank": 1}, encoder)
        _refuse_adapter(model, given)
        return model
    if adapter is not None and Path(adapter).is_dir():
        return move_aside(with_peft(read_base(model), adapter))
    chosen = {"targets": "all-linear"} if given["targets"] is None else {}
    settings = {name: given[name] for name in _OF_ADAPTER} | chosen
    if encoder is not None and encoder.labels:
        head = head_of(model)
        settings["modules_to_save"] = [*saved_modules(given["modules_to_save"]), head]
    kind = model_type_beside(folder.model if files is None else folder.path / "model.onnx")
    try:
        model = move_aside(adapted(read_base(model), **settings, model_type=kind))
        if fixed:
            refuse_unmergeable(model)  # now, not when it is saved
    except UnsupportedError as error:
        for name, why in fixed.items():
            raise UnsupportedError(
                f"'{folder.model}': '{name}' {why}, but what a text encoder learns is merged into "
                "its weights: give the folder in floating point, and quantize the one that is saved"
            ) from error
        raise
    return model if adapter is None else with_adapter(model, adapter)


def _refuse_adapter(model: LightModel, given: Mapping[str, Any]) -> None:
    """Rejects what only an adapter has, and weights that cannot be trained themselves."""
    for name in ("adapter", *_OF_ADAPTER[3:]):
        if given[name] not in (None, TUNING[name].default):
            raise ArgumentError(
                f"{name} must be left out if rank=None trains all weights, got {given[name]!r:.80}"
            )
    if given["loss"] == "DPO" or isinstance(given["loss"], DPO):
        raise ArgumentError(
            "loss must be NextToken if rank=None, as the reference of DPO is the model without "
            "its adapter, got DPO"
        )
    for name, why in quantized(to_ir(model).graph.initializers.values()).items():
        raise UnsupportedError(
            f"rank=None trains all weights, but '{name}' {why}: give a rank, for an adapter beside "
            "quantized weights, or a folder in floating point"
        )


def _rewards(session: TrainingSession, pairs: Epochs) -> dict[str, float]:
    """Returns the loss of DPO, the reward margin and the reward accuracy of batches of pairs."""
    algorithm = session._loaded.proto.training_info[0].algorithm
    made = [name for node in algorithm.node for name in node.output]
    margin = next(name for name in made if name.startswith(REWARD_MARGIN))
    compared = {"output": margin, "target": session.metadata.prediction.target}
    margins = _Margin(name="reward_margin", **compared)
    preferred = _Preferred(name="reward_accuracy", **compared)
    return session.evaluate(pairs, metrics=[margins, preferred])


class _Margin(Mean):
    """The mean of the margins of pairs, which the loss computes."""

    higher_is_better = True

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        self.add(outputs)


class _Preferred(_Margin):
    """How many of them are positive."""

    def update(self, outputs: Array, targets: Array, sample_weight: Array | None = None) -> None:
        self.add(outputs > 0)


def _trainable(
    model: LightModel,
    folder: Folder,
    given: Mapping[str, Any],
    files: SeveralFiles | None = None,
    encoder: Encoder | None = None,
) -> LightModel:
    loss = given["loss"]
    settings = {"optimizer": optimizer_of(given), "clip_norm": given["clip_norm"]}
    if encoder is not None:
        of_task, inputs = loss_of(folder, encoder, loss)
        result = build_light(model, loss=of_task, inputs=inputs, **settings)
        write_metadata(result.proto, _LOSS, json.dumps(asdict(encoder)))
        return result
    if isinstance(loss, str):
        loss = {"NextToken": NextToken(), "DPO": DPO()}.get(loss, loss)
    if loss is not None and type(loss) not in (NextToken, DPO):
        raise ArgumentError(
            "loss must be NextToken or DPO of ortops.losses (InfoNCE and Triplet need "
            f"task='retrieval'), got {loss!r:.80}"
        )
    if files is not None and files.has_encoder:  # whose labels belong to the decoder's inputs
        if isinstance(loss, DPO):
            raise ArgumentError("loss must be NextToken for a model with an encoder, got DPO")
        chosen: Loss = SoftmaxCrossEntropy(folder.logits, axis=-1, ignore_index=IGNORED)
        return build_light(model, loss=chosen, **settings)
    loss = loss or NextToken()
    if loss.ignore_index != IGNORED or loss.target not in (None, "labels"):
        raise ArgumentError(
            f"loss must have ignore_index={IGNORED} and no target, as fit makes the labels, got "
            f"{loss!r:.200}"
        )
    named = replace(loss, output=loss.output or folder.logits)
    result = build_light(model, loss=named, **settings)
    described = {"loss": loss.name} | ({"output": loss.output} if loss.output else {})
    write_metadata(result.proto, _LOSS, json.dumps(described))
    return result


def optimizer_of(given: Mapping[str, Any]) -> Optimizer:
    """Returns the optimizer of arguments of `FineTuning`."""
    wanted, decay = given.get("optimizer"), given.get("weight_decay")
    rate = given.get("learning_rate", RATE)
    if wanted is None:
        wanted = "Adam" if decay is None else "AdamW"
    made = resolve(wanted)
    own: dict[str, Any] = {"learning_rate": None if rate is RATE else rate, "weight_decay": decay}
    own = {name: value for name, value in own.items() if value is not None}
    if not isinstance(wanted, str):
        for name, value in own.items():
            raise ArgumentError(
                f"{name} must be left out, as the optimizer has its own, got {value!r:.80}; use "
                f"optimizer={made.name}({name}=…)"
            )
        return made
    known = {each.name for each in fields(made)}
    if "weight_decay" in own and "weight_decay" not in known:
        raise ArgumentError(f"weight_decay: optimizer {made.name} has none; use optimizer='AdamW'")
    if made.peak != 1:  # Prodigy and Adadelta find the size of a step by themselves
        own = {"learning_rate": rate, **own}
    return replace(made, **own, **dict.fromkeys(known & {"epsilon_after_correction"}, True))


def _loss_settings(model: LightModel) -> Mapping[str, Any]:
    remedy = "delete the file of the training"
    return read_metadata(model.proto.metadata_props, _LOSS, remedy) or {}


def _scored(folder: Folder, model: LightModel) -> Folder:
    """Returns a folder with the output that the loss reads, for what else reads it."""
    found, outputs = _loss_settings(model), {each.name for each in model.proto.graph.output}
    is_own = "task" not in found and found.get("output") in outputs
    return replace(folder, scored=found["output"]) if is_own else folder


def _trained_encoder(model: LightModel) -> Encoder | None:
    """Returns what a trainable model trains of a text encoder; None for a language model."""
    found = _loss_settings(model)
    if "task" not in found:
        return None
    return Encoder(**{**found, "labels": tuple(found["labels"])})


def _saved_training(file: Path) -> LightModel:
    """Returns the trainable model that `FineTuning.save` wrote for a model in several files."""
    if not file.is_file():
        raise ModelError(
            f"file '{file}' is missing, without which the training cannot be continued, as the "
            "adapter is merged into the files of the model; begin with ortops.llm.FineTuning"
        )
    return load_light(file)


def words_of(model: LightModel, folder: Folder) -> int | None:
    """Returns the size of the vocabulary; None if it is not known."""
    outputs = [v for v in model.proto.graph.output if v.name == folder.logits]
    dims = [int(d.dim_value) for v in outputs for d in v.type.tensor_type.shape.dim[-1:]]
    known = folder.genai.get("vocab_size", folder.config.get("vocab_size"))
    return max(dims, default=0) or (known if type(known) is int and known > 0 else None)


def _adapter_names(model: LightModel) -> list[str]:
    adapter = adapter_of(model.proto.metadata_props)
    return [] if adapter is None else adapter.parameters


def _adapter_values(model: LightModel) -> dict[str, npt.NDArray[Any]]:
    return model.arrays(_adapter_names(model))


def _without_update(
    model: LightModel, base: LightModel, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of an adapter that changes nothing: zeros, and the base's own."""
    adapter = adapter_of(model.proto.metadata_props)
    layers = [] if adapter is None else [m for m in adapter.modules.values() if m.dora]
    squares = model.arrays([module.square for module in layers])
    own = base.arrays([] if adapter is None else adapter.weights)
    norms = {module.magnitude: np.sqrt(squares[module.square]) for module in layers}
    return {name: np.zeros_like(array) for name, array in values.items()} | norms | own


def _filled(file: Path, model: LightModel) -> LightModel:
    """Returns a saved trainable model with the weights of the model's file."""
    result = onnx.ModelProto()
    try:
        result.ParseFromString(read_regular(file))
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


class Estimate(Callback):
    """Logs once, after the first steps, how long the training takes and how much memory.

    Args:
        steps: The number of steps of the whole training, finished ones included.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first = self._time = 0.0

    def on_begin(self, record: Record, session: TrainingSession) -> None:
        """Starts the clock."""
        self._first, self._time = session.steps_done + 1, 0.0

    def on_step(self, record: Record, session: TrainingSession) -> None:
        """Measures a few steps after the first one, which takes longer."""
        measured = session.steps_done - self._first
        if measured == 0:
            self._time = time.perf_counter()
        elif measured == _MEASURED:
            seconds = (time.perf_counter() - self._time) / measured
            left = self._steps - session.steps_done
            logger.log(
                logging.WARNING if left * seconds > _LONG else logging.INFO,
                "%d steps left, %.2g s each: about %.0f min%s",
                *(left, seconds, left * seconds / 60, _peak()),
            )


def _peak() -> str:
    """Returns the peak memory of the process so far as text; empty on Windows."""
    found = peak_memory()
    return "" if found is None else f", with {found / 1e6:.0f} MB of memory so far"


def peak_memory() -> int | None:
    """Returns the largest memory of the process so far in bytes; None on Windows."""
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
