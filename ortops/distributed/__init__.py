"""Data-parallel training: several processes compute one step, each with its part of the batch.

One line turns a script for one process into one for several: ``session =
ortops.distributed.join(session)``. Start it with MPI::

    mpiexec -n 2 python -m mpi4py train.py

``-m mpi4py`` terminates all processes if one of them fails; without it, `join` logs a warning,
because the others may wait forever. With ``join(session, "torch")``, start it with torchrun, which
also starts all processes again if one of them fails::

    torchrun --nproc-per-node 2 --max-restarts 3 train.py

Each process (a rank, in MPI's terms) runs the same script, holds all variables, and computes the
gradients of its rows. The gradients are summed, and each rank applies the same update.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import choice, number
from ortops.distributed.exchanges import Exchanges
from ortops.distributed.mpi import MPI
from ortops.distributed.torch_group import TorchCommunicator
from ortops.engine.training.data import rows
from ortops.engine.training.feeds import Checked
from ortops.engine.training.gradients import Accumulation, Gradients
from ortops.engine.training.loaded_model import LoadedModel
from ortops.engine.training.model_file import bytes_digest
from ortops.engine.training.session import TrainingSession
from ortops.engine.training.steps import Steps
from ortops.engine.training.trainer import Shared, StepStrategy
from ortops.errors import ArgumentError, FeedError, ModelError, OrtopsError, UnsupportedError
from ortops.graph.row_axes import along

__all__ = ["Communicator", "JoinedSession", "TorchCommunicator", "join"]

Array: TypeAlias = npt.NDArray[Any]

logger = logging.getLogger("ortops")

_ENDS = ("stopped", "SIGINT", "SIGTERM", "SIGHUP")


class Communicator(Protocol):
    """The interface for communication between ranks.

    All ranks call the same methods in the same order. A rank waits for the others; if one of them
    has exited, the call raises an error of any kind, which `join` makes an OrtopsError, or
    terminates the process.

    Example:
        >>> class Nobody:
        ...     rank, size = 0, 1
        ...     def sum(self, array): ...
        ...     def broadcast(self, array): ...
        >>> from ortops.docs import examples
        >>> join(examples.session(), Nobody()).size
        1
    """

    @property
    def rank(self) -> int:
        """The index of this process, from 0."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def sum(self, array: Array) -> object:
        """Replaces an array by its sum over all ranks, bit-identical in each of them.

        Args:
            array: A contiguous 1-d array of float32 or float64; changed in place.
        """

    def broadcast(self, array: Array) -> object:
        """Replaces an array by that of rank 0.

        Args:
            array: A contiguous 1-d array of uint8; changed in place.
        """


def join(
    session: TrainingSession,
    communicator: Communicator | Literal["torch"] | None = None,
    *,
    timeout: float | None = None,
) -> JoinedSession:
    """Joins the sessions of several processes for data-parallel training.

    All ranks call it with a session of the same model and continue with the returned object: the
    same session with the same memory. The variables are set to those of rank 0. Code that sets
    variables afterwards must set the same values in all ranks.

    Args:
        session: The session.
        communicator: Communicates between ranks; by default MPI with all its processes, which
            requires mpi4py and an MPI library (``pip install ortops[distributed]`` has both).
            ``"torch"`` is `TorchCommunicator` with all processes that torchrun has started.
        timeout: The maximum time, in seconds, that a rank waits for the others in MPI before it
            raises an OrtopsError; None for no limit, but a warning after a minute. It must exceed
            the longest time between two steps of a rank, including what only rank 0 does, such as
            saving. Other communicators have their own limits.

    Raises:
        ArgumentError: If an argument is invalid, or the communicator computes other numbers than
            sums over the ranks and values of rank 0.
        ModelError: If ranks have different models, or are at different points of `fit`.
        OrtopsError: If mpi4py or torch is required and not installed, or an exchange fails.
        UnsupportedError: If there are several ranks and the algorithm has no gradients (see
            `ortops.TrainingSession.gradients`).

    Example:
        >>> from ortops.docs import examples
        >>> session = join(examples.session(), examples.Alone())
        >>> session.step(examples.BATCH)["loss"]
        array(1., dtype=float32)
    """
    if not isinstance(session, TrainingSession):
        raise ArgumentError(f"join: session must be a TrainingSession, got {session!r:.80}")
    if isinstance(session, JoinedSession):
        raise ArgumentError("join: the session is already joined; join each session once")
    if timeout is not None:
        timeout = number("join: timeout", timeout, above=0)
        if communicator is not None:
            raise ArgumentError(
                "join: timeout applies to MPI only; set the timeout of the given communicator"
            )
    if communicator is None:
        communicator = MPI(timeout)
    elif isinstance(communicator, str):
        choice("join: communicator", communicator, ["torch"])
        communicator = TorchCommunicator()
    return JoinedSession(session, communicator)


class JoinedSession(TrainingSession):
    """A `TrainingSession` that computes each step together with other processes.

    `join` returns it. All ranks call `step`, `run_steps`, `gradients` and `fit` in the same way and
    get the same variables, losses and history, bit for bit.

    - `step`, `run_steps` and `gradients` receive this rank's part of the batch. The loss is that of
      the whole batch, other outputs are those of the part.
    - `fit` receives the same data in the same order in all ranks. Each rank uses its part of each
      batch: ``batch_size`` is that of all ranks together.
    - Gradients are Σ gradient · count / Σ count over the ranks, where ``count`` is the divisor of
      the loss, so parts may have different sizes.
    - BatchNormalization uses the statistics of each part; running statistics are averaged, weighted
      by rows. A loss that compares rows compares those of one part. Both are logged as a warning.
    - Dropout uses different random numbers in each rank.
    - Only rank 0 writes in `save`, shows progress, and calls callbacks that write or save. All
      other callbacks, `evaluate` and `predict` run in each rank, on all data.
    - SIGINT, SIGTERM or SIGHUP in one rank ends `fit` in all ranks after the same step. No rank
      leaves `fit` before rank 0 has written.
    - All ranks must make the same calls. A rank that waits in MPI for an exited rank, or longer
      than ``timeout``, raises an OrtopsError; its session is then at a complete step. That includes
      ranks that end with ``os._exit``, unless another language calls it.
    - All ranks raise an error if they have set different values since the last step (in `state`,
      `parameters` or `learning_rate`), or have different arguments of `fit` that determine the rows
      of a step, or different numbers of rows in a batch. Different values in the first batch of a
      `fit` are logged as a warning.

    Args:
        session: The session, which becomes a joined one.
        communicator: Communicates between ranks.

    Example:
        >>> from ortops.docs import examples
        >>> session = JoinedSession(examples.session(), examples.Alone())
        >>> session.fit(examples.BATCH, progress=False)[0]["loss"], session.rank, session.size
        (1.0, 0, 1)
    """

    def __init__(self, session: TrainingSession, communicator: Communicator) -> None:
        exchanges = Exchanges(communicator)
        rank, size = exchanges.rank, exchanges.size
        joined = None
        if size > 1:  # all checks come first, so that the session stays as it is if one fails
            for part in session._by_entry().values():
                part._execution.split_step()  # raises an error if the algorithm has no gradients
            exchanges.check()
            joined = JoinedSteps(session._loaded, exchanges)
            joined.check_same(session._file.digest())
            joined.take_state()
        self.__dict__ = session.__dict__  # the same memory and the same lock
        session.__class__ = JoinedSession  # other references to it are joined, too
        self._communicator, self._rank, self._size = exchanges, rank, size
        if joined is not None:
            self._steps = self._joined = joined
            self._file.writes = not rank
            self._of_entries = {}

    def _only(self, entry: int | str | None) -> TrainingSession:
        made = super()._only(entry)
        if self._size > 1 and not isinstance(made._steps, JoinedSteps):
            made._steps = JoinedSteps(made._loaded, self._joined._communicator, self._joined)
        return made

    @property
    def rank(self) -> int:
        """The index of this process among those that train together, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of processes that train together."""
        return self._size

    def reset(self) -> None:
        """Resets the training to its start, that of rank 0.

        Example:
            >>> from ortops.docs import examples
            >>> session = join(examples.session(), examples.Alone())
            >>> _ = session.step(examples.BATCH)
            >>> session.reset()
            >>> session.steps_done
            0
        """
        super().reset()
        if self._size > 1:
            self._joined.take_state()


class JoinedSteps(Steps):
    """Makes steps together with other processes: those of a `JoinedSession`.

    Args:
        loaded: The model.
        communicator: Communicates between ranks.
        whole: The steps of the session with all entries, if these are of one of them.
    """

    def __init__(
        self, loaded: LoadedModel, communicator: Exchanges, whole: JoinedSteps | None = None
    ) -> None:
        super().__init__(loaded, communicator.rank)
        self._communicator = communicator
        self._size = communicator.size
        self._warned = False
        self._compared = False  # whether ranks have compared a batch of this `fit`
        # The digests of the variables set since the last step, of any entry.
        self._assigned: dict[str, bytes] = {} if whole is None else whole._assigned
        loaded.usage.on_assign = functools.partial(_add_digests, self._assigned)

    def check_same(self, model: bytes) -> None:
        """Raises an error if the sessions differ in more than the values of variables.

        Args:
            model: The digest of the model.
        """
        position = self._loaded.resume_state.position
        begun = position and (
            position.epoch_state.call,
            position.epoch_state.epoch,
            position.epoch_state.first_step,
            position.batch,
        )
        for what, digest in (
            ("another model", model),
            ("another point of `fit`, or none,", _digest(begun)),
        ):
            first = np.frombuffer(digest, np.uint8).copy()
            self._communicator.broadcast(first)
            if first.tobytes() != digest:
                raise ModelError(
                    f"join: rank {self._rank} has {what} than rank 0; open the same file in all "
                    "ranks"
                )

    def take_state(self) -> None:
        """Sets all variables to those of rank 0."""
        arrays = dict(self._loaded.state)
        for array in arrays.values():
            self._communicator.broadcast(array.reshape(-1).view(np.uint8))
        if self._rank:
            self._loaded.assign(arrays)
        self._assigned.clear()

    def _all_same(self, found: object) -> bool:
        """Whether an object has the same repr in all ranks."""
        mark = _mark(_digest(found))
        self._communicator.sum(mark)
        return _is_of_all(mark, self._size)

    def _mark_of_assigned(self) -> Array:
        return _mark(_digest(sorted(self._assigned.items()))) if self._assigned else np.zeros(10)

    def _check_assigned(self, mark: Array) -> None:
        """Raises an error if ranks have set different values, by the sum of their marks."""
        if not _is_of_all(mark, self._size):
            names = ", ".join(f"'{name}'" for name in self._assigned) or "nothing"
            raise OrtopsError(
                f"join: since the last step, rank {self._rank} has set {names:.200} in state, "
                "parameters or learning_rate, and another rank has set other variables or values; "
                "set the same in all ranks"
            )
        self._assigned.clear()

    def _all_reduce(self, gradients: Gradients, count: int) -> None:
        """Replaces the gradients of a part by those of the batch.

        Args:
            gradients: The gradients of the part, changed in place.
            count: The number of rows in the part; with 0 the gradients are ignored.
        """
        if not count:
            self._clear(gradients, None)
        exact = not self._differs(gradients)
        self._add_up(Accumulation(gradients, exact=exact, shared=True), count)

    def _add_up(self, total: Accumulation, count: int) -> Gradients:
        """Returns the gradients of a batch.

        Args:
            total: The gradients of this rank's parts.
            count: The number of rows in them.
        """
        statistics = total.statistics
        for name in statistics:
            if name not in self._loaded.execution.variables:
                raise UnsupportedError(
                    f"join: the update reads '{name}' of the batch, but each rank has only its "
                    "part; train in one process, or let the update read only gradients"
                )
        carried = [array.astype(np.float64).ravel() * count for array in statistics.values()]
        if not count:
            carried = [np.zeros_like(array) for array in carried]  # not 0 · NaN
        mark = self._mark_of_assigned()
        sums = total.reduce(self._communicator.sum, np.concatenate([mark, [count], *carried]))
        self._check_assigned(sums[: mark.size])
        sums = sums[mark.size :]
        begin = 1
        for name, array in statistics.items():
            mean = sums[begin : begin + array.size].reshape(array.shape) / sums[0]
            mean = np.rint(mean) if array.dtype.kind in "iub" else mean
            statistics[name] = mean.astype(array.dtype)
            begin += array.size
        return total.result()

    def _clear(self, gradients: Gradients, after: Gradients | None) -> None:
        """Sets the weight of gradients to 0: those of a placeholder row for an empty part."""
        gradients.count = 0.0
        gradients.summands = [replace(s, value=0.0, count=0.0) for s in gradients.summands]
        before = self._loaded.state if after is None else after.statistics
        statistics = gradients.statistics
        statistics |= {name: before[name] for name in statistics if name in before}

    def _differs(self, gradients: Gradients) -> bool:
        """Whether the step differs from one with the whole batch; rank 0 logs this once."""
        if not gradients.is_estimate:
            return False
        if not self._warned and not self._rank:
            logger.warning(
                "join: %s, so a step of %d ranks differs from one of a single process",
                *(gradients.not_additive, self._size),
            )
        self._warned = True
        return True

    def _step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        note: Callable[[Mapping[str, Any]], object] | None = None,
        count: int | None = None,
        *,
        stay: bool = False,
    ) -> dict[str, Any]:
        """Makes a step; ``count`` is the number of rows that count, by default all of them.

        Gradients are added up in the CPU's memory, so that no output stays on a device.
        """

        def reduce(gradients: Gradients) -> None:
            self._all_reduce(gradients, rows(feeds) if count is None else count)

        return super()._reduced_step(feeds, outputs, reduce, note)

    def _reduced_step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        reduce: Callable[[Gradients], object],
        note: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> dict[str, Array]:
        def both(gradients: Gradients) -> None:
            self._all_reduce(gradients, rows(feeds))
            reduce(gradients)

        return super()._reduced_step(feeds, outputs, both, note)

    def _gradients(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
        scale: float | None = None,
    ) -> Gradients:
        found = super()._gradients(feeds, outputs, after, scale)
        self._all_reduce(found, rows(feeds))
        return found

    def _several_steps(self, feeds: Mapping[str, Array], count: int) -> Array:
        loss = self._loaded.loss
        batches = [{name: array[i] for name, array in feeds.items()} for i in range(count)]
        return np.stack([self._step(batch, [loss])[loss] for batch in batches])

    # ------------------------------------------------------------------------------------- fit

    def strategy(self) -> StepStrategy:
        """Returns how `fit` makes steps with this rank's part of each batch."""

        def step(
            batch: Mapping[str, Array],
            outputs: Sequence[str],
            note: Callable[[Mapping[str, Array]], object],
        ) -> object:
            part, size = self._part(batch)
            return self._step(part, outputs, note, size)

        count = 0  # rows of this rank since the last update

        def gradients(
            feeds: Mapping[str, Array], *, outputs: Sequence[str], after: Gradients | None
        ) -> Gradients:
            nonlocal count
            part, size = self._part(feeds)
            found = Steps._gradients(self, part, outputs, after)
            if not size:
                self._clear(found, after)
            count = size if after is None else count + size
            return found

        def add_up(total: Accumulation) -> Gradients:
            self._differs(total.gradients)
            return self._add_up(total, count)

        self._compared = False
        shared = Shared(self._agree, self._same, add_up)
        return StepStrategy(
            step,
            gradients,
            self._apply,
            self._loaded.counts(),
            show=self.show,
            norms=self._loaded.norms(),
            leads=not self._rank,
            shared=shared,
        )

    def _same(self, what: str, found: object) -> None:
        """Raises an error unless an object is the same in all ranks."""
        if not self._all_same((what, found)):
            raise OrtopsError(
                f"join: {what} must be the same in all ranks; rank {self._rank} has {found}, "
                "another rank has a different value"
            )

    def _compare(self, batch: Mapping[str, Array]) -> None:
        """Logs a warning if ranks have different values in the first batch."""
        self._compared = True
        digests = [(name, bytes_digest(batch[name])) for name in sorted(batch)]
        if not self._all_same(digests) and not self._rank:
            logger.warning(
                "join: ranks have different values in the first batch. Each rank uses its part of "
                "each batch, so pass the same data in the same order to `fit` in all ranks, or "
                "a part to `step` in each. Ignore this if only augmentation differs"
            )

    def _part(self, batch: Mapping[str, Array]) -> tuple[Mapping[str, Array], int]:
        """Returns this rank's rows of a batch, and their number.

        If there are none, the first row is used as a placeholder with weight 0.
        """
        assert isinstance(batch, Checked)
        if not self._compared:
            self._compare(batch)
        sampled = batch.sampled
        size = rows(batch)
        for name in sampled:
            own = batch[name].shape[batch.by.axis_of(name)]
            if own != size:
                raise FeedError(
                    f"join: cannot divide '{name}' by rows, because it has {own} rows "
                    f"in a batch of {size}; pass a part of the batch to `step` in each rank"
                )
        begin, end = (size * place // self._size for place in (self._rank, self._rank + 1))
        for name in sampled:
            fixed = batch.by.fixed_rows(name)
            if fixed is not None:
                raise FeedError(
                    f"join: cannot divide '{name}' among {self._size} ranks, because the model has "
                    f"a fixed batch size of {fixed}; pass a batch to `step` in each rank, or use a "
                    "model with a symbolic batch dimension"
                )
        part = slice(begin, end) if begin < end else slice(0, 1)
        taken = dict(batch)
        for name in sampled:
            own_part = batch[name][along(batch.by.axis_of(name), part)]
            taken[name] = np.ascontiguousarray(own_part)
        return Checked(taken, batch.by), end - begin

    def _agree(self, stopped: str, signal: str, found: object) -> tuple[str, str, bool]:
        """See `ortops.engine.training.trainer.Shared`."""
        ends = np.array([bool(stopped), *(signal == each for each in _ENDS[1:])], np.float64)
        marks = [_mark(_digest(found)), self._mark_of_assigned()]
        sums = np.concatenate([ends, *marks])
        self._communicator.sum(sums)
        ends, mark, assigned = np.split(sums, [len(_ENDS), len(_ENDS) + marks[0].size])
        self._check_assigned(assigned)
        others = next((n for n, e in zip(_ENDS[1:], ends[1:], strict=True) if e), "")
        stopped = stopped or ("another rank has stopped" if ends[0] else "")
        return stopped, signal or others, _is_of_all(mark, self._size)


def _add_digests(digests: dict[str, bytes], arrays: Mapping[str, Array]) -> None:
    digests.update((name, bytes_digest(array)) for name, array in arrays.items())


def _digest(found: object) -> bytes:
    return hashlib.sha256(repr(found).encode()).digest()


def _mark(digest: bytes) -> Array:
    """Returns numbers whose sums over the ranks show whether all have the same digest.

    They are 60 bits in words of 12, and the squares of the words. By the Cauchy–Schwarz inequality,
    the square of a sum equals the sum of squares times the number of ranks only if all words are
    equal. This is exact in float64 for up to 2¹⁴ ranks.
    """
    words = np.frombuffer(digest, np.uint16, 5) % 4096
    return np.concatenate([words, words.astype(np.float64) ** 2])


def _is_of_all(mark: Array, size: int) -> bool:
    """Whether all ranks have the same digest, by the sum of their `_mark`."""
    words, squares = mark[:5], mark[5:]
    return bool((words * words == size * squares).all())
