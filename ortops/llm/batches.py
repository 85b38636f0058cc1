"""Reads the rows of a data set for a model, and makes batches of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, whole_number
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.row_data import Division, grouped
from ortops.engine.training.session import TrainingSession
from ortops.engine.training.validation_split import hold_out
from ortops.errors import ArgumentError, FeedError, UnsupportedError
from ortops.llm.examples import (
    PADDING,
    TRAIN_ON,
    Example,
    Rows,
    batch_of,
    read_examples,
    rows_of,
)
from ortops.llm.folder import Folder, graph_of
from ortops.llm.packing import attention_mask, packed, refuse_leaks
from ortops.llm.preferences import Pair, is_preference, read_pairs
from ortops.llm.sequence_pairs import pair_feeds, read_sequence_pairs
from ortops.llm.several_files import SeveralFiles
from ortops.llm.tokenization import Tokenizer

Unit: TypeAlias = tuple[Example] | Pair
"""The sequences of a row."""

logger = logging.getLogger("ortops")


def _length(unit: Unit) -> int:
    return max(len(example.tokens) for example in unit)


class Epochs:
    """The batches of each epoch, as data of `ortops.TrainingSession.fit`.

    They have a length, so that a training is not resumed with another number of rows.

    Args:
        batches: Returns the batches of an epoch.
        count: Their number.
    """

    def __init__(self, batches: Callable[[int], Iterator[Any]], count: int) -> None:
        self._batches, self._count = batches, count

    def __call__(self, number: int) -> Iterator[Any]:
        """Returns the batches of an epoch."""
        return self._batches(number)

    def __len__(self) -> int:
        return self._count


class Batches:
    """Reads rows and makes batches, in the form that a model needs.

    Args:
        folder: The folder.
        files: The files of a model in several files.
        tokenizer: Returns the tokenizer.
        inputs: The inputs of a step.
        compares: Whether rows are pairs of a chosen and a rejected answer.
        words: The size of the vocabulary, if it is known.
    """

    def __init__(
        self,
        folder: Folder,
        files: SeveralFiles | None,
        tokenizer: Callable[[], Tokenizer],
        inputs: Inputs,
        *,
        compares: bool,
        words: int | None,
    ) -> None:
        self._words, self._said = words, set[str]()
        self._folder, self._files, self._tokenizer = folder, files, tokenizer
        self._inputs, self._compares = inputs, compares
        self._has_encoder = files is not None and files.has_encoder

    def read(self, data: Rows, max_length: int, train_on: str) -> Sequence[Any]:
        """Reads rows; see `ortops.llm.FineTuning.fit`.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: If a row has another form, or there is no token to train.
        """
        try:
            return self._read(data, max_length, train_on)
        except FeedError as error:
            where, _, why = str(error).partition(": ")
            if where != "data" or not isinstance(data, str | os.PathLike):
                raise
            raise FeedError(f"data '{os.fspath(data)}': {why}") from error

    def _read(self, data: Rows, max_length: int, train_on: str) -> Sequence[Any]:
        longest = whole_number("max_length", max_length, 2)
        longest = min(longest, self._folder.context_length or longest)
        choice("train_on", train_on, TRAIN_ON)
        if self._has_encoder:
            return read_sequence_pairs(
                data, self._tokenizer, self._folder, longest, self._words, self._said
            )
        rows = list(rows_of(data))
        if any(is_preference(row) != self._compares for row in rows):
            raise FeedError(
                "data: rows with chosen and rejected need loss=ortops.losses.DPO()"
                if not self._compares
                else "data: for DPO, each row must have chosen and rejected"
            )
        if self._compares:
            return read_pairs(rows, self._tokenizer, max_length=longest, words=self._words)
        settings = (train_on, longest, self._words, self._said)
        return [(each,) for each in read_examples(rows, self._tokenizer, *settings)]

    def split(
        self, units: Sequence[Any], share: float, seed: int
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the rows to train, and a random share of the rows, which are held out.

        Raises:
            ArgumentError: If the share leaves no rows for one of them.
        """
        if not 0 < share < 1:
            raise ArgumentError(
                f"validation must be rows, a file, or a fraction between 0 and 1, got {share!r}"
            )
        rest, aside = hold_out(len(units), share, seed, name="validation")
        logger.info("held out %d of %d rows for validation", len(aside), len(units))
        return [units[place] for place in sorted(rest)], [units[place] for place in sorted(aside)]

    def check(self, padding: str, *, group_by_length: bool) -> None:
        """Rejects arguments that do not fit the model.

        Raises:
            ArgumentError: If they do not.
        """
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

    def order(
        self,
        units: Sequence[Any],
        batch_size: int,
        *,
        generator: np.random.Generator | None,
        group_by_length: bool,
    ) -> list[Any]:
        """Returns rows in the order of an epoch.

        Args:
            units: The rows.
            batch_size: The number of rows per batch.
            generator: Shuffles them; None for the given order.
            group_by_length: Whether batches have rows of similar length.
        """
        places = np.arange(len(units))
        if generator is not None:
            places = generator.permutation(len(units))
        if group_by_length:
            places = grouped(places, [_length(unit) for unit in units], batch_size)
        return [units[int(place)] for place in places]

    def of(
        self, units: Sequence[Any], batch_size: int, padding: str = "right"
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yields batches of rows, with the inputs that a step reads."""
        for rows in Division(units, batch_size):
            if self._files is not None and self._has_encoder:
                batch = pair_feeds(rows, self._folder, self._files.inputs)
            else:
                batch = batch_of([each for unit in rows for each in unit], padding)
            yield self._feeds(batch)

    def _feeds(self, batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays of a batch that a step reads, by the names of its inputs."""
        named = {self._folder.input_name(name): array for name, array in batch.items()}
        name = self._folder.input_name("attention_mask")
        mask = self._inputs.get(name)
        if mask is not None and mask.dtype is not None and len(mask.dims or ()) in (3, 4):
            named[name] = attention_mask(batch["segments"], len(mask.dims or ()), mask.dtype)
        return {name: array for name, array in named.items() if name in self._inputs}

    def pack(
        self, units: Sequence[Any], max_length: int, session: TrainingSession
    ) -> Sequence[tuple[Example]]:
        """Joins rows to as few as possible.

        Args:
            units: The rows.
            max_length: The largest number of tokens of a row.
            session: Computes whether the model keeps them apart.

        Raises:
            ArgumentError: If rows cannot be packed.
            UnsupportedError: If the model does not keep the examples of a row apart.
        """
        if self._has_encoder or self._compares:
            what = "DPO" if self._compares else "a model with an encoder"
            raise ArgumentError(f"packing must be False for {what}, got True")
        folder = self._folder

        def logits(row: Example) -> npt.NDArray[Any]:
            feeds = self._feeds(batch_of([row]))
            found: npt.NDArray[Any] = session.predict(feeds, outputs=folder.logits)[0]
            return found

        words = self._words or logits(units[0][0]).shape[-1]
        refuse_leaks(logits, words, self._pads_right())
        longest = min(max_length, folder.context_length or max_length)
        found = packed([example for (example,) in units], longest)
        logger.info("packed %d rows into %d", len(units), len(found))
        return [(row,) for row in found]

    def text(self, units: Sequence[Any]) -> str:
        """Returns rows as text, with marks around the tokens that are trained."""
        if self._has_encoder:
            raise UnsupportedError("show: models with an encoder are not supported")
        lines = []
        for number, unit in enumerate(units, 1):
            for example in unit:
                trained = int(example.trained[1:].sum())
                lines.append(f"row {number}: {len(example.tokens)} tokens, {trained} trained")
                lines.append(self._marked(example))
        return "\n".join(lines)

    def _marked(self, example: Example) -> str:
        """Returns tokens as text, with « and » around what is trained, and nowhere else."""
        changes = np.flatnonzero(np.diff(example.trained)) + 1
        text = ""
        for part in np.split(np.arange(len(example.tokens)), changes):
            trained = bool(example.trained[part[0]])
            tokens = (example.labels if trained else example.tokens)[part].tolist()
            if self._folder.has_tokenizer:
                shown = self._tokenizer().text(tokens, special=True)
                shown = shown.replace("«", "\\xab").replace("»", "\\xbb")
            else:
                shown = " ".join(map(str, tokens)) + " "
            text += f"«{shown}»" if trained else shown
        return text

    def _pads_right(self) -> str:
        """Returns a node that needs padding on the right, as text; empty if there is none."""
        graph = graph_of(self._folder.model)
        kinds = ("GroupQueryAttention", "PagedAttention", "SparseAttention")
        found = (node for node in graph.node if node.op_type in kinds)
        return next((f"{node.op_type} node '{node.name}'" for node in found), "")
