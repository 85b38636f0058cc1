"""Reads the rows of a data set for a model, and makes batches of them.

Several examples are packed into one row for models that keep them apart. Whether a model does is
found by computing: the logits of an example must not depend on the examples before it, bit for bit,
and must be those of the example alone.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, whole_number
from ortops.engine.training.feeds import Inputs
from ortops.engine.training.row_data import Division, grouped
from ortops.engine.training.session import TrainingSession
from ortops.engine.training.validation_split import hold_out
from ortops.errors import ArgumentError, ModelError, UnsupportedError
from ortops.llm.examples import IGNORED, TRAIN_ON, Example, Units, batch_of, example_of
from ortops.llm.folder import graph_of
from ortops.llm.graphs import refusal
from ortops.llm.row_files import Columns, Rows, of_path
from ortops.llm.row_kinds import RowKind

Logits: TypeAlias = Callable[[Example], npt.NDArray[np.floating]]

_REMEDY = "use group_by_length=True, which makes batches of rows of similar length"

logger = logging.getLogger("ortops")


class Epochs:
    """The batches of each epoch, as data of `ortops.TrainingSession.fit`.

    Their length is known, so that a training is not resumed with another number of rows.

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
        kind: What a row is.
        inputs: The inputs of a step.
    """

    def __init__(self, kind: RowKind, inputs: Inputs) -> None:
        self.kind, self._folder, self._inputs = kind, kind.folder, inputs

    def read(self, data: Rows, *settings: Any) -> Units:
        """Reads rows; see `ortops.llm.FineTuning.fit`.

        Args:
            data: The data set.
            *settings: ``max_length``, ``train_on`` and ``columns``.

        Raises:
            ArgumentError: If an argument is wrong.
            FeedError: If a row has another form, or there is no token to train.
        """
        checked = self._checked(*settings)
        with of_path(data):
            return self.kind.read(data, *checked)

    def stream(
        self, data: Iterable[Any], batch_size: int, padding: str, *settings: Any
    ) -> Callable[[], Iterator[dict[str, npt.NDArray[Any]]]]:
        """Returns what begins the batches of a data set of any length; see `read` and `of`."""
        checked = self._checked(*settings)

        def epoch() -> Iterator[dict[str, npt.NDArray[Any]]]:
            units = self.kind.stream(data, *checked)
            while rows := list(itertools.islice(units, batch_size)):
                yield self._feeds(self.kind.batch(rows, padding))

        return epoch

    def _checked(
        self, max_length: int, train_on: str, columns: Columns = None
    ) -> tuple[int, str, Columns]:
        longest = whole_number("max_length", max_length, 2)
        longest = min(longest, self._folder.context_length or longest)
        return longest, choice("train_on", train_on, TRAIN_ON), columns

    def split(self, units: Units, share: float, seed: int) -> tuple[Units, Units]:
        """Returns the rows to train, and a random share of the rows, which are held out.

        What is made of one row of the data stays together.

        Raises:
            ArgumentError: If the share leaves no rows for one of them.
        """
        if not 0 < share < 1:
            raise ArgumentError(
                f"validation must be rows, a file, or a fraction between 0 and 1, got {share!r}"
            )
        _, sizes = np.unique(units.rows, return_counts=True)
        rest, aside = hold_out(len(units), share, seed, name="validation", sizes=sizes)
        logger.info("held out %d of %d rows for validation", len(aside), len(units))
        return units.take(np.sort(rest)), units.take(np.sort(aside))

    def check(self, padding: str, *, group_by_length: bool) -> None:
        """Rejects arguments that do not fit the model.

        Raises:
            ArgumentError: If they do not.
        """
        self.kind.check(padding, group_by_length=group_by_length)
        if padding == "left" and (left := self._pads_right()):
            raise ArgumentError(
                f"padding must be 'right', as {left} counts the tokens of a row from the left, "
                "got 'left'"
            )

    def epochs(
        self,
        units: Units,
        batch_size: int,
        padding: str = "right",
        *,
        seed: int | None = None,
        group_by_length: bool = False,
    ) -> Epochs:
        """Returns the batches of each epoch.

        Args:
            units: The rows.
            batch_size: The number of rows per batch.
            padding: The side of padding.
            seed: Determines the order of the rows; None for the given order.
            group_by_length: Whether batches have rows of similar length.
        """

        def epoch(number: int) -> Iterator[dict[str, npt.NDArray[Any]]]:
            places = np.arange(len(units))
            if seed is not None:
                places = np.random.default_rng((seed, number)).permutation(len(units))
            if group_by_length:
                places = grouped(places, units.lengths, batch_size)
            return self.of(units.take(places), batch_size, padding)

        return Epochs(epoch, len(Division(units, batch_size)))

    def of(
        self, units: Sequence[Any], batch_size: int, padding: str = "right"
    ) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """Yields batches of rows, with the inputs that a step reads."""
        for rows in Division(units, batch_size):
            yield self._feeds(self.kind.batch(rows, padding))

    def _feeds(self, batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays of a batch that a step reads, by the names of its inputs."""
        named = {self._folder.input_name(name): array for name, array in batch.items()}
        name = self._folder.input_name("attention_mask")
        mask = self._inputs.get(name)
        if mask is not None and mask.dtype is not None and len(mask.dims or ()) in (3, 4):
            named[name] = attention_mask(batch["segments"], len(mask.dims or ()), mask.dtype)
        return {name: array for name, array in named.items() if name in self._inputs}

    def pack(self, units: Units, max_length: int, session: TrainingSession) -> Units:
        """Joins rows to as few as possible.

        Args:
            units: The rows.
            max_length: The largest number of tokens of a row.
            session: Computes whether the model keeps them apart.

        Raises:
            ArgumentError: If rows cannot be packed.
            UnsupportedError: If the model does not keep the examples of a row apart.
        """
        self.kind.refuse("packing")
        folder, logits = self._folder, self._logits(session)
        words = self.kind.words or logits(units[0][0]).shape[-1]
        refuse_leaks(logits, words, self._pads_right())
        longest = min(max_length, folder.context_length or max_length)
        rows = packed(units.lengths, longest)
        logger.info("packed %d rows into %d", len(units), len(rows))
        sizes = np.array([units.lengths[row].sum() for row in rows])

        def read(row: int) -> tuple[Example]:
            return (joined([units[place][0] for place in rows[row]]),)

        return Units(read, np.arange(len(rows)), sizes)

    def _logits(self, session: TrainingSession) -> Logits:
        """Returns a function of a row."""

        def logits(row: Example) -> npt.NDArray[Any]:
            feeds = self._feeds(batch_of([row]))
            found: npt.NDArray[Any] = session.predict(feeds, outputs=self._folder.logits)[0]
            return found

        return logits

    def refuse_sight(self, session: TrainingSession) -> None:
        """Rejects a model whose tokens see later ones, such as a masked language model.

        Raises:
            ModelError: If the logits of a token depend on a later one.
        """
        if self._sees_later(session, self._folder.logits):
            why = "not a language model: a token sees later ones, as in a masked model"
            raise refusal(self._folder, why)

    def refuse_blindness(self, session: TrainingSession, hidden: str) -> None:
        """Rejects a model whose first token represents the text but does not attend to the others.

        Args:
            session: Computes that.
            hidden: The output with the hidden states of tokens.

        Raises:
            ModelError: If it does not.
        """
        if not self._sees_later(session, hidden):
            raise ModelError(
                f"'{self._folder.model}': the first token represents the text but sees no later "
                "ones, as in a decoder; pool the mean of all tokens: write "
                '{"pooling_mode_mean_tokens": true} into 1_Pooling/config.json of the folder'
            )

    def _sees_later(self, session: TrainingSession, output: str) -> bool:
        """Whether an output of earlier tokens depends on the last one."""
        words = self.kind.words or 2
        tokens = np.random.default_rng(0).integers(words, size=6).tolist()
        found = [
            session.predict(self._feeds(self.kind.probe(row)), outputs=output)[0].astype(np.float64)
            for row in (tokens, [*tokens[:-1], (tokens[-1] + 1) % words])
        ]
        change = np.abs(found[1] - found[0])
        kinds = {node.op_type for node in graph_of(self._folder.model).node}
        rounded = "DynamicQuantizeLinear" in kinds  # by the largest value of all tokens
        return bool(change[:-1].max() > (0.1 if rounded else 1e-4) * change[-1].max())

    def _pads_right(self) -> str:
        """Returns a node that needs padding on the right, as text; empty if there is none."""
        graph = graph_of(self._folder.model)
        kinds = {"GroupQueryAttention", "PagedAttention", "SparseAttention", "CausalConvWithState"}
        found = (node for node in graph.node if node.op_type in kinds)
        return next((f"{node.op_type} node '{node.name}'" for node in found), "")


def check_stream(refused: Mapping[str, bool], max_steps: int | None, validation: object) -> None:
    """Rejects arguments that need the number of rows, which an iterator does not tell.

    Raises:
        ArgumentError: If there is one.
    """
    what = "for an iterator without a length"
    for name, value in refused.items():
        if value:
            raise ArgumentError(f"{name} must be False {what}, got {value!r}; or give a list")
    if max_steps is None:
        raise ArgumentError(f"max_steps must be given {what}; or give a list")
    if isinstance(validation, int | float):
        raise ArgumentError(f"validation must be rows or a file {what}, got {validation!r}")


def packed(lengths: Sequence[int] | npt.NDArray[np.int64], length: int) -> list[list[int]]:
    """Divides examples into rows up to a number of tokens.

    The longest example comes first, and each goes into the row that it fills best.

    Args:
        lengths: The number of tokens of each example.
        length: The largest number of tokens of a row.

    Returns:
        The numbers of the examples of each row.
    """
    sizes = np.array(lengths)
    rows = list[list[int]]()
    room = list[tuple[int, int]]()  # of each row, sorted
    for place in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[place])
        found = bisect_left(room, (size, -1))
        left, row = room.pop(found) if found < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(place)
        insort(room, (left - size, row))
    return rows


def joined(examples: Sequence[Example]) -> Example:
    """Returns one row of examples. Nothing predicts the first token of each."""
    labels = [example.labels.copy() for example in examples]
    for each in labels:
        each[0] = IGNORED
    tokens = np.concatenate([example.tokens for example in examples])
    lengths = tuple(len(example.tokens) for example in examples)
    return Example(tokens, np.concatenate(labels), lengths)


def refuse_leaks(logits: Logits, words: int, node: str) -> None:
    """Refuses a model that does not keep the examples of a row apart.

    Args:
        logits: Computes the logits [tokens, words] of a row.
        words: The size of the vocabulary.
        node: An attention node that counts tokens only, as text; empty if there is none.

    Raises:
        UnsupportedError: If the model does not.
    """
    tokens = np.random.default_rng(0).integers(words, size=11)
    first, second = tokens[:5], tokens[5:]
    others = (first + 1) % words
    alone, after, after_others = (
        logits(joined([example_of(list(part), [True] * len(part)) for part in parts]))[-6:]
        for parts in ([second], [first, second], [others, second])
    )
    if not np.array_equal(after, after_others):
        reason = (
            f"{node} separates rows by their length only"
            if node
            else "no mask or position_ids among its inputs keeps them apart"
        )
        raise UnsupportedError(
            f"packing: the examples of a row would attend to each other, as {reason}; {_REMEDY}"
        )
    scale = float(np.abs(alone).max())
    if not np.abs(after - alone).max() <= 1e-3 * scale:  # NaN is refused, too
        raise UnsupportedError(
            "packing: the logits of an example would depend on its place in a row, as the model "
            f"counts positions by itself; {_REMEDY}"
        )


def attention_mask(
    segments: npt.NDArray[np.int64], rank: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Returns the mask of queries and keys: of earlier tokens in the same example.

    Args:
        segments: The number of the example of each token, [batch, time].
        rank: 3 for [batch, queries, keys], 4 for [batch, 1, queries, keys].
        dtype: bool or an integer for 1 where attention is allowed; a float for 0 there, and the
            least finite number elsewhere.
    """
    same = segments[:, :, None] == segments[:, None, :]
    allowed = same & np.tri(segments.shape[1], dtype=bool)
    if rank == 4:
        allowed = allowed[:, None]
    if dtype.kind == "f":
        least = np.array(np.finfo(dtype).min, dtype)
        found: npt.NDArray[Any] = np.where(allowed, np.zeros_like(least), least)
    else:
        found = allowed.astype(dtype)
    return found
