"""Training steps with a model in memory: whole, in two parts, or several in one call."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import function
from ortops._common.uninterrupted import finished_at_exit
from ortops.engine.execution.memory import Memory, fetch
from ortops.engine.trainable.metadata import LossPart
from ortops.engine.training.data import rows
from ortops.engine.training.feeds import Feeds
from ortops.engine.training.gradients import (
    Gradients,
    Origin,
    check_gradients,
    check_numbers,
    collect,
    numbers_of,
)
from ortops.engine.training.loaded_model import LoadedModel, changes
from ortops.engine.training.position import MOST_UNREAD
from ortops.engine.training.trainer import Note, StepStrategy
from ortops.errors import ArgumentError, FeedError, OrtopsError, did_you_mean

Array: TypeAlias = npt.NDArray[Any]

_AT_ONCE = 64  # steps in a run
_BETWEEN_PARTS = 0x5851F42D
_LOWER = 8.0  # by what a loss scale is divided if gradients overflow, and the smallest one
_LEAST_SCALE = 2.0**-24


class Steps:
    """Makes training steps with a model in memory.

    Args:
        loaded: The model.
        rank: The index of this process among those that train together.
    """

    def __init__(self, loaded: LoadedModel, rank: int = 0) -> None:
        self._loaded = loaded
        self._rank = rank

    def step(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        reduce: Callable[[Gradients], object] | None = None,
    ) -> dict[str, Array]:
        """Runs one training step.

        Args:
            feeds: A batch: an array for each input of the model and of the loss, by name or in a
                tuple, in which the inputs of the model come first.
            outputs: The names of the outputs to return; all by default.
            reduce: A function that is called with the gradients before they are applied. It may
                change them in place, with their loss and running statistics, for example to average
                them over several workers. It may read the session, but not change it.
            entry: The training_info entry that makes the step, by index or name (see
                `ortops.add_training`). Only its inputs are needed, and only its variables change.
                By default all entries make a step, in order.

        Returns:
            The loss, and the outputs of the model that it was computed from, by name. An output
            that BatchNormalization or Dropout changes in training mode is called
            ``<name>_training``. In a step of several entries, an output of a later one that an
            earlier one has as well, such as ``loss``, is called ``<entry>.<name>``.

        Raises:
            FeedError: If the feeds do not fit; then nothing has changed.
            KernelError: If a kernel failed; then nothing has changed.
            OrtopsError: If there is no such output, or ``reduce`` left something that is not a
                gradient.
            UnsupportedError: If ``reduce`` is given and the step has no gradients (see
                `gradients`).
            Exception: Whatever ``reduce`` raises; then nothing has changed.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> {name: array.item() for name, array in session.step(examples.BATCH).items()}
            {'loss': 1.0, 'y': 0.0}
            >>> session.step(examples.BATCH, outputs=["loss"])
            {'loss': array(0.25, dtype=float32)}
        """
        self._check_outputs(outputs)
        if reduce is None:
            return self._step(self._loaded.inputs.check(feeds), outputs)
        function("reduce", reduce, "a function of gradients")
        return self._reduced_step(self._loaded.inputs.check(feeds), outputs, reduce)

    def _check_outputs(self, outputs: Sequence[str] | None) -> None:
        if isinstance(outputs, str) or not isinstance(outputs, Iterable | None):
            raise ArgumentError(f"outputs must be a list of names, got {outputs!r}")
        known = self._loaded.outputs
        for name in outputs or ():
            if name not in known:
                raise OrtopsError(
                    f"outputs: there is no output '{name}'; " + did_you_mean(name, known)
                )

    def gradients(
        self,
        feeds: Feeds,
        *,
        outputs: Sequence[str] | None = None,
        after: Gradients | None = None,
    ) -> Gradients:
        """Computes the gradients of a batch in training mode, and changes nothing.

        ``apply(gradients(feeds))`` gives the same bits as ``step(feeds)``. Gradients that overflow
        in float16 at the present loss scale are computed with a lower one (see
        `ortops.Gradients`).

        Args:
            feeds: A batch, as for `step`.
            outputs: The names of the outputs to compute in addition to the loss; all by default.
            after: The gradients of earlier parts, if the parts of a batch are to be applied
                together. The result is the sum, as ``after + gradients(feeds)`` is, but Dropout
                draws other numbers for each part.
            entry: The training_info entry, as for `step`; needed if there are several.

        Returns:
            The gradients by parameter, with the loss, its divisor, the outputs and the running
            statistics of this batch.

        Raises:
            FeedError: If the feeds do not fit.
            KernelError: If a kernel failed.
            ArgumentError: If ``after`` is of another entry or other weights.
            OrtopsError: If there is no such output, or the gradients of parts do not add up (see
                `ortops.Gradients`).
            UnsupportedError: If the training algorithm updates variables without a Gradient node,
                or a step runs several training_info entries and ``entry`` is missing.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> gradients = session.gradients(examples.BATCH)
            >>> gradients["w"], gradients.loss, session.steps_done
            (array([[-2.]], dtype=float32), 1.0, 0)
            >>> session.apply(gradients)
            >>> session.state["w"], session.steps_done
            (array([[0.5]], dtype=float32), 1)
            >>> first = session.gradients(examples.BATCH)
            >>> session.apply(session.gradients(examples.BATCH, after=first))  # a step with both
            >>> session.state["w"], session.steps_done
            (array([[0.75]], dtype=float32), 2)
        """
        self._check_outputs(outputs)
        if after is not None and not isinstance(after, Gradients):
            raise ArgumentError(f"after must be a result of `gradients`, got {after!r:.80}")
        checked = self._loaded.inputs.check(feeds)
        found = self._gradients(checked, outputs, after)
        if self._loaded.steps[0].scale:
            found = self._in_range(found, checked, outputs, after)
        return found if after is None else after + found

    def _in_range(
        self,
        found: Gradients,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
    ) -> Gradients:
        """Returns gradients that overflowed in float16 as a lower loss scale gives them.

        Raises:
            OrtopsError: If there is none.
        """
        scale = float(self._loaded.execution.present(self._loaded.steps[0].scale))
        while not all(np.isfinite(flat).all() for flat in found.flat):
            if not math.isfinite(found.loss):  # the loss says it
                return found
            scale /= _LOWER
            if scale < _LEAST_SCALE:
                wrong = next(n for n, array in found.items() if not np.isfinite(array).all())
                raise OrtopsError(
                    f"gradients: that of '{wrong}' is not finite at any loss scale, though the "
                    f"loss is {found.loss:g}; look for roots, logarithms and divisions at 0, or "
                    "convert the model to float32"
                )
            found = self._gradients(feeds, outputs, after, scale)
            found.overflowed = True
        return found

    @changes("gradients")
    def _gradients(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
        scale: float | None = None,
    ) -> Gradients:
        return self._differentiate(feeds, outputs, after, scale)

    @changes("apply")
    def apply(self, gradients: Mapping[str, npt.ArrayLike]) -> None:
        """Applies gradients: the part of a step that follows the backward pass.

        Parameters, optimizer state, ``step`` and the loss scale change as in `step`, and running
        statistics become those that the gradients contain.

        Args:
            gradients: A result of `gradients`, of this session or another one with the same model;
                or a dict with an array for each parameter (float32 for a 16-bit parameter), which
                leaves running statistics unchanged.
            entry: The training_info entry, as for `step`; needed if there are several.

        Raises:
            KernelError: If a kernel failed, as in `step`.
            OrtopsError: If the gradients do not fit the parameters; then nothing has changed.
            UnsupportedError: See `gradients`.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> gradients = session.gradients(examples.BATCH)
            >>> session.apply({"w": gradients["w"] * 2})  # SGD with rate 0.25: 0 - 0.25 · 2 · -2
            >>> session.state["w"].item()
            1.0
        """
        self._update(gradients)

    @changes("fit")
    def _apply(self, gradients: Gradients, outputs: Sequence[str], note: Note) -> None:
        self._update(gradients, outputs, note)

    @changes("step")
    def _reduced_step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        reduce: Callable[[Gradients], object],
        note: Note | None = None,
    ) -> dict[str, Array]:
        gradients = self._differentiate(feeds, outputs, None)
        reduce(gradients)
        chosen = self._loaded.outputs if outputs is None else outputs
        self._update(gradients, chosen, note)
        return {n: a for n, a in gradients.outputs.items() if n in chosen}

    @changes("step")
    def _step(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        note: Callable[[Mapping[str, Any]], object] | None = None,
        *,
        stay: bool = False,
    ) -> dict[str, Any]:
        execution, declared = self._loaded.ready(), self._loaded.declared
        self._loaded.check_schedule("step")
        numbers = self._loaded.fronts.run(feeds)
        if not declared.pending:
            return execution.step(numbers, outputs, note, stay=stay)
        wanted = list(self._loaded.outputs if outputs is None else outputs)
        more = [n for n in declared.to_compute(self._loaded.outputs, feeds) if n not in wanted]

        def compare(found: Mapping[str, Array]) -> None:
            declared.check(found, feeds)
            if note is not None:
                note({name: array for name, array in found.items() if name not in more})

        found = execution.step(numbers, [*wanted, *more], compare)
        return {name: array for name, array in found.items() if name not in more}

    @changes("run_steps")
    def _several_steps(self, feeds: Mapping[str, Array], count: int) -> Array:
        self._loaded.check_schedule("step")
        return self._loaded.ready().steps(feeds, count)

    def run_steps(self, batches: Iterable[Feeds]) -> Array:
        """Runs a training step with each of several batches.

        This reduces the overhead of small models: up to 64 steps with batches of the same shapes
        run in one call of onnxruntime. The results are those of `step`.

        Args:
            batches: The batches, each as for `step`.
            entry: The training_info entry, as for `step`.

        Returns:
            The loss of each step; with several entries, that of the first one.

        Raises:
            FeedError: If a batch does not fit. Steps with earlier batches may have been made;
                `steps_done` counts them.
            KernelError: If a kernel failed; the same holds.

        Example:
            >>> from ortops.docs import examples
            >>> session = examples.session()
            >>> session.run_steps([examples.BATCH] * 3)
            array([1.    , 0.25  , 0.0625], dtype=float32)
        """
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise FeedError(
                f"batches: {type(batches).__name__} was given; give an iterable of batches, each a "
                "dict or tuple of an array for each input"
            )
        loaded, loss = self._loaded, self._loaded.loss
        losses: list[Memory] = []  # those on a device are read later, so that it need not wait
        declared = loaded.declared
        with finished_at_exit, loaded.lock:
            at_once = _AT_ONCE if loaded.ready().repeatable and not loaded.fronts else 1
            checked: Iterator[dict[str, Array]] = map(loaded.inputs.check, batches)
            if at_once > 1:  # copies: what gives the batches may fill the same memory again
                checked = ({name: array.copy() for name, array in b.items()} for b in checked)
            for _, alike in itertools.groupby(checked, key=_shapes):
                while group := list(itertools.islice(alike, at_once)):
                    if declared.pending:  # the first batch
                        losses.append(numbers_of(self._step(group.pop(0), [loss])[loss], 1))
                    if len(group) > 1 and loaded.execution.repeatable:
                        stacks = {name: np.stack([b[name] for b in group]) for name in group[0]}
                        losses.append(
                            numbers_of(self._several_steps(stacks, len(group)), len(group))
                        )
                        continue
                    for batch in group:
                        losses.append(self._step(batch, [loss], stay=True)[loss])
                        check_numbers(losses[-1], 1)
                        if not len(losses) % MOST_UNREAD:
                            losses[-MOST_UNREAD:] = map(fetch, losses[-MOST_UNREAD:])
        found = [fetch(each).reshape(-1) for each in losses]
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    @changes("fit")
    def show(self, names: Sequence[str]) -> None:
        """Sets the tensors that the steps of `fit` can return in addition to outputs."""
        own = [n for n in names if n not in self._loaded.outputs]
        self._loaded.ready().show([*own, *self._loaded.noted])

    def strategy(self) -> StepStrategy:
        """Returns how `fit` makes steps."""
        entries, counts = self._loaded.entries, self._loaded.counts()
        entry = entries[0] if len(entries) == 1 else None
        later = (
            functools.partial(self._step, stay=True) if self._loaded.execution.on_device else None
        )
        return StepStrategy(
            *(self._step, self._gradients, self._apply, counts, self.show),
            norms=self._loaded.norms(),
            entry=entry,
            later=later,
        )

    def _differentiate(
        self,
        feeds: Mapping[str, Array],
        outputs: Sequence[str] | None,
        after: Gradients | None,
        scale: float | None = None,
    ) -> Gradients:
        """Computes the gradients of a checked batch; see `gradients`.

        Those that overflow in float16 are infinite, unless a lower loss scale is given.
        """
        loaded, state = self._loaded, self._loaded.state
        (step, *others), metadata = loaded.steps, loaded.metadata
        instead: dict[str, Array] = {}
        part = 0
        if scale is not None:
            instead[step.scale] = np.asarray(scale, loaded.execution.present(step.scale).dtype)
        if after is not None:
            part = after.part + 1
            known = after.statistics.keys() & loaded.execution.variables.keys()
            instead |= {name: state.check(name, after.statistics[name]) for name in known}
        if step.seed and (part or self._rank):  # parts are far from the seeds that ranks have
            seed = int(loaded.execution.present(step.seed)) + part * _BETWEEN_PARTS + self._rank
            instead[step.seed] = np.array(seed % 2**32, np.int64)
        parts = [p for p in metadata.losses if p.name in step.outputs] if not others else []
        parts = parts or [LossPart(name=step.loss)] * bool(step.loss)
        chosen = [*step.outputs] if outputs is None else list(outputs)
        read = [step.loss, *(name for p in parts for name in (p.name, p.count))]
        declared = loaded.declared
        more = declared.to_compute(loaded.outputs, feeds) if declared.pending else []
        wanted = dict.fromkeys((*chosen, *(name for name in read if name), *more))
        numbers = loaded.fronts.run(feeds)
        found = loaded.ready().gradients(numbers, list(wanted), instead)
        if declared.pending:
            declared.check(found.outputs, feeds)
        moved = next((name for name in step.updates if name in found.carried), "")
        couples = moved and (
            f"the batch updates the running statistic '{moved}', as in BatchNormalization, where "
            "the loss of a row depends on other rows"
        )
        usage = loaded.usage
        origin = Origin(
            loaded.names[loaded.entries[0]],
            (os.getpid(), id(usage)),
            (loaded.execution.steps_made, usage.weights),
            frozenset({int.from_bytes(os.urandom(8), "little")}),
        )
        return collect(
            *(found, step.loss, parts, rows(feeds)),
            shown=chosen,
            couples=couples,
            part=part,
            origin=origin,
        )

    def _update(
        self,
        gradients: Mapping[str, npt.ArrayLike],
        outputs: Sequence[str] = (),
        note: Note | None = None,
    ) -> None:
        """Applies gradients; see `apply`.

        Args:
            gradients: See `apply`.
            outputs: Tensors that ``note`` is called with, if the update computes them.
            note: Is called before anything changes, with the outputs of the gradients as well.
        """
        execution, state = self._loaded.ready(), self._loaded.state
        self._loaded.check_schedule("step")
        split = execution.split_step()
        arrays = check_gradients(gradients, split.layout)
        if isinstance(gradients, Gradients) and gradients.overflowed:  # the update is skipped
            arrays = {name: np.full_like(array, np.inf) for name, array in arrays.items()}
        carried: dict[str, Array] = {}
        given = gradients.statistics if isinstance(gradients, Gradients) else {}
        computed = gradients.outputs if isinstance(gradients, Gradients) else {}
        for name in split.carried:
            if name in execution.variables:
                if name in given:
                    carried[name] = state.check(name, given[name])
            elif name in given:
                carried[name] = np.require(given[name], requirements=["C", "A"])
            else:
                raise OrtopsError(
                    f"gradients: the update also reads '{name}' of the batch; pass what "
                    "`gradients` returned"
                )
        execution.apply(
            arrays, carried, outputs, note and (lambda found: note({**computed, **found}))
        )


def _shapes(feeds: Mapping[str, Array]) -> tuple[tuple[int, ...], ...]:
    return tuple(array.shape for array in feeds.values())
