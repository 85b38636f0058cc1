"""The gradients of a batch, which a step computes before it changes anything."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops.engine.execution.memory import Memory, fetch
from ortops.engine.execution.split_step import Differentiated, Layout
from ortops.engine.trainable.metadata import LossPart
from ortops.engine.training.input_values import fitted_array
from ortops.errors import ArgumentError, OrtopsError, did_you_mean

Array: TypeAlias = npt.NDArray[Any]


def numbers_of(losses: Memory, steps: int) -> Array:
    """Returns the losses of some steps, one number for each."""
    check_numbers(losses, steps)
    return fetch(losses).reshape(steps)


def check_numbers(losses: Memory, steps: int) -> None:
    """Raises an OrtopsError unless there is one number for each step."""
    if losses.size != steps:
        raise OrtopsError(
            f"loss: it must be a single number, got {losses.size // steps} numbers; reduce it with "
            "ReduceMean, or run the algorithm with `step`"
        )


def number_of(loss: Memory) -> float:
    """Returns a loss as a Python number."""
    return float(numbers_of(loss, 1)[0])


@dataclass(frozen=True)
class Summand:
    """A summand of the loss of a batch.

    Attributes:
        name: Its name among the outputs.
        value: Its value, before it is multiplied by its weight.
        weight: Its factor in the loss.
        count: The divisor of its sum; the rows of the batch if the loss has no count, 1 for a sum.
            If it is 0, because all labels are ignored, so is the value.
        is_sum: Whether it is a sum and not a mean.
        batch_coupled: Whether its value for a row depends on other rows of the batch.
        counter: The output with the count, if there is one.
    """

    name: str
    value: float
    weight: float
    count: float
    is_sum: bool
    batch_coupled: bool
    counter: str = ""


class Origin(NamedTuple):
    """Where gradients were computed.

    Attributes:
        entry: The name of the training_info entry.
        session: The process and the variables.
        weights: The numbers of the steps and assignments that had changed the weights.
        parts: A number for each batch of which they are the gradients.
    """

    entry: str
    session: tuple[int, int]
    weights: tuple[int, int]
    parts: frozenset[int]


class Gradients(Mapping[str, Array]):
    """The gradients of a batch by parameter, as `ortops.TrainingSession.gradients` returns them.

    They are the gradients of `loss`: not scaled, not clipped, and float32 for 16-bit parameters.
    ``first + second`` are those of both batches together, with the loss of both (see
    `Accumulation`); the outputs are those of the second one.

    Attributes:
        flat: 1-d arrays, one for each type, of which all gradients are views. They can be changed
            in place, as an all-reduce does. Zeros lie between the gradients.
        count: The divisor of the loss: the rows of the batch if the loss has no count, 1 for a sum.
            Like `loss`, it can be changed for bookkeeping.
        summands: The summands of the loss; a single one if it is not a sum of losses.
        outputs: The outputs that `ortops.TrainingSession.step` returns, by name.
        statistics: What else the step will set: the next values of running statistics, by variable,
            and other values of the batch that the update reads.
        part: The number of earlier parts of the same batch (see
            `ortops.TrainingSession.gradients`).
        overflowed: Whether they overflow in float16 at the present loss scale, and were computed
            with a lower one. `apply` skips the update and lowers the scale, as `step` does; a dict
            of them is applied.
    """

    def __init__(
        self,
        found: Differentiated,
        loss: str,
        summands: Sequence[Summand],
        *,
        couples: str = "",
        part: int = 0,
        origin: Origin | None = None,
    ) -> None:
        self._origin = origin
        self._arrays = found.gradients
        self._loss = loss
        self._couples = couples
        self.flat = found.flat
        self.outputs = found.outputs
        self.statistics = found.carried
        self.summands = list(summands)
        self.count = next((s.count for s in self.summands if not s.is_sum), 1.0)
        self.part = part
        self.overflowed = False

    def __getitem__(self, name: str) -> Array:
        if name not in self._arrays:
            raise KeyError(f"'{name}' has no gradient; {did_you_mean(name, self._arrays)}")
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {list(array.shape)}" for name, array in self.items())
        return f"Gradients(loss={self.loss:g}, count={self.count:g}, {shapes})"

    def __add__(self, other: object) -> Gradients:
        if not isinstance(other, Gradients):
            return NotImplemented
        total = Accumulation(self._copied())
        total.add(other._copied())
        result = total.result()
        result.part = max(other.part, self.part + 1)
        return result

    def __radd__(self, other: object) -> Gradients:  # what `sum` begins with
        return self if isinstance(other, int) and not other else NotImplemented

    def _copied(self) -> Gradients:
        """Returns a copy whose arrays can be changed."""
        result = copy.copy(self)
        result.flat = [flat.copy() for flat in self.flat]
        result._arrays = {}
        for name, array in self._arrays.items():
            place = next(i for i, flat in enumerate(self.flat) if flat.dtype == array.dtype)
            begin = (array.ctypes.data - self.flat[place].ctypes.data) // array.itemsize
            copied = result.flat[place][begin : begin + array.size]
            result._arrays[name] = copied.reshape(array.shape)
        result.outputs, result.statistics = dict(self.outputs), dict(self.statistics)
        return result

    def _join(self, other: Gradients) -> None:
        """Notes that the gradients of further batches are added.

        Raises:
            ArgumentError: If those are of another entry or other weights, or contain a batch of
                these.
        """
        own, others = self._origin, other._origin
        names = [each.name for each in self.summands], [each.name for each in other.summands]
        shapes = ({n: array.shape for n, array in each.items()} for each in (self, other))
        if own is None or others is None:
            return
        if own.entry != others.entry:
            raise ArgumentError(
                f"gradients: those of the entry '{others.entry}' cannot be added to those of the "
                f"entry '{own.entry}'; apply each with entry="
            )
        if operator.ne(*shapes) or operator.ne(*names):
            raise ArgumentError(
                "gradients: they are of other weights or another loss, so they cannot be added; "
                "give two of the same training"
            )
        if own.session == others.session and own.weights != others.weights:
            raise ArgumentError(
                "gradients: the weights have changed between the two, by a step or because they "
                "were set, so they cannot be added; compute all parts before `apply`"
            )
        if own.parts & others.parts and own.parts != others.parts:
            raise ArgumentError(
                "gradients: one of the two contains the other's batch already, as after= adds "
                "what it is given; apply the sum that `gradients` returned"
            )
        self._origin = own._replace(parts=own.parts | others.parts)

    @property
    def loss(self) -> float:
        """The loss; NaN if the algorithm does not output one."""
        return number_of(self.outputs[self._loss]) if self._loss else math.nan

    @loss.setter
    def loss(self, value: float) -> None:
        if self._loss:
            self.outputs[self._loss] = np.full_like(self.outputs[self._loss], value)

    @property
    def additive(self) -> bool:
        """Whether the gradients of a batch are the means of its parts, weighted by `count`."""
        return not self.not_additive

    @property
    def not_additive(self) -> str:
        """Why gradients of parts do not add up to those of the batch; empty if they do.

        Dropout does not count, although its masks depend on the position of a row.
        """
        if self._couples:
            return self._couples
        for summand in self.summands:
            if summand.batch_coupled:
                return f"in loss '{summand.name}', the loss of a row depends on other rows"
        if len({summand.is_sum for summand in self.summands if summand.weight}) > 1:
            return "some summands of the loss are means and others are sums"
        return ""

    @property
    def is_estimate(self) -> bool:
        """Whether the mean over parts, weighted by `count`, only estimates that of the batch.

        For a sum of means and sums of losses, no weights are near, so it is not even an estimate.
        """
        kinds = {summand.is_sum for summand in self.summands if summand.weight}
        return not self.additive and len(kinds) <= 1


class Accumulation:
    """The sum of the gradients of several parts of a batch.

    They are Σ gradient · count / Σ count, divided once; gradients of sums are added.

    Args:
        first: The gradients of the first part. They are changed, so they cannot be applied
            separately.
        exact: Whether gradients that do not add up are an error. Otherwise each part is weighted
            with its count, as an estimate.
        shared: Whether several processes have parts, so that only `reduce`, in all of them, can
            check whether the parts add up.

    Raises:
        OrtopsError: If they do not add up (see `Gradients.not_additive`).

    Example:
        >>> from ortops.docs import examples
        >>> session = examples.session()
        >>> ones = np.ones((3, 1), np.float32)
        >>> first = session.gradients({"x": ones[:2], "targets": ones[:2]})
        >>> total = Accumulation(first)
        >>> total.add(session.gradients({"x": ones[2:], "targets": 4 * ones[2:]}))
        >>> result = total.result()
        >>> result.loss, result.count, float(result["w"][0, 0])
        (6.0, 3.0, -4.0)
    """

    def __init__(self, first: Gradients, *, exact: bool = True, shared: bool = False) -> None:
        if exact and first.not_additive:
            raise OrtopsError(
                f"gradients: {first.not_additive}, so the gradients of parts of a batch do not add "
                "up to those of the batch; give the whole batch at once"
            )
        self._total = first
        self._exact = exact
        self._shared = shared
        self._parts = [[s.count for s in first.summands]]
        self._counts = self._parts[0]
        self._sums = [_times(s.value, s.count) for s in first.summands]
        self._weigh(first)

    @staticmethod
    @np.errstate(over="ignore", invalid="ignore")  # steps with infinite gradients are skipped
    def _weigh(gradients: Gradients) -> None:
        for flat in gradients.flat:
            if gradients.count:
                flat *= flat.dtype.type(gradients.count)
            else:  # a mean of nothing, which is 0 / 0
                flat.fill(0)

    def add(self, gradients: Gradients) -> None:
        """Adds the gradients of another part, which are changed.

        Raises:
            ArgumentError: If they are of another entry or other weights.
            OrtopsError: If the summands of a sum of losses have different ratios of counts in this
                part, so that a common weight does not exist.
        """
        total = self._total
        whole = self._whole
        total._join(gradients)
        for summand, count in zip(gradients.summands, self._counts, strict=True):
            before = self._counts[whole]
            fits = self._shared or math.isclose(summand.count * before, count * gradients.count)
            if self._exact and summand.weight and not fits:
                raise OrtopsError(
                    f"gradients: the divisors of the losses '{summand.name}' and "
                    f"'{total.summands[whole].name}' are {summand.count:g} and {gradients.count:g} "
                    f"in this part, but {count:g} and {before:g} before, so the gradients of parts "
                    "do not add up; give the whole batch at once"
                )
        self._weigh(gradients)
        with np.errstate(over="ignore", invalid="ignore"):
            for flat, more in zip(total.flat, gradients.flat, strict=True):
                flat += more
        part = [s.count for s in gradients.summands]
        self._parts.append(part)
        self._counts = [sum(pair) for pair in zip(self._counts, part, strict=True)]
        self._sums = [
            value + _times(s.value, s.count)
            for value, s in zip(self._sums, gradients.summands, strict=True)
        ]
        total.outputs, total.statistics = gradients.outputs, gradients.statistics
        total.part = gradients.part
        total.overflowed |= gradients.overflowed
        total.loss = math.nan

    def reduce(self, sum_over: Callable[[Array], object], more: Array) -> Array:
        """Sums up the gradients of all processes.

        Args:
            sum_over: Replaces a 1-d array, in place, by its sum over the processes.
            more: Further float64 numbers to sum up, as a 1-d array.

        Returns:
            Their sums.

        Raises:
            OrtopsError: As `add`, in all processes.
        """
        total = self._total
        for flat in total.flat:
            sum_over(flat)
        numbers = np.array([*self._counts, *self._sums, *more], np.float64)
        sum_over(numbers)
        size = len(self._counts)
        self._counts = numbers[:size].tolist()
        self._sums = numbers[size : 2 * size].tolist()
        if self._exact and sum(not s.is_sum and s.weight != 0 for s in total.summands) > 1:
            self._check_shares(sum_over)
        total.loss = math.nan
        return numbers[2 * size :]

    @property
    def gradients(self) -> Gradients:
        """The gradients of the first part, to which the others are added."""
        return self._total

    @property
    def statistics(self) -> dict[str, Array]:
        """The running statistics after the last part."""
        return self._total.statistics

    @property
    def _whole(self) -> int:
        """The index of the summand whose count weights the gradients."""
        return next((i for i, s in enumerate(self._total.summands) if not s.is_sum), 0)

    def _check_shares(self, sum_over: Callable[[Array], object]) -> None:
        """Raises an error in all processes if means have different shares of counts."""
        wrong = ""
        whole, summands = self._whole, self._total.summands
        name, all_own = summands[whole].name, self._counts[whole]
        for part in self._parts:
            for summand, count, all_count in zip(summands, part, self._counts, strict=True):
                fits = math.isclose(count * all_own, all_count * part[whole])
                if summand.weight and not summand.is_sum and not fits:
                    wrong = (
                        f"the divisor of loss '{summand.name}' is {count:g} of {all_count:g} in "
                        f"this process, but that of '{name}' is {part[whole]:g} of {all_own:g}"
                    )
        found = np.array([bool(wrong)], np.float64)
        sum_over(found)
        if found[0]:
            wrong = wrong or f"another process has other shares of divisors than those of '{name}'"
            raise OrtopsError(
                f"gradients: {wrong}, so the gradients of parts of a batch do not add up; give the "
                "parts equal shares of what the losses count, or the whole batch to one process"
            )

    def result(self) -> Gradients:
        """Returns the gradients of the batch, with its loss; nothing can be added afterwards.

        Other outputs, and running statistics, are those of the last part.
        """
        total = self._total
        count = 0.0
        summands = []
        for summand, own, value in zip(total.summands, self._counts, self._sums, strict=True):
            if not summand.is_sum:
                value, count = (value / own if own else 0.0), count or own
            summands.append(replace(summand, value=value, count=1.0 if summand.is_sum else own))
        means = [s for s in total.summands if not s.is_sum]
        if means and count:  # gradients of a mean of nothing are zeros, as in one batch
            for flat in total.flat:
                flat /= flat.dtype.type(count)
        total.count = count if means else 1.0
        total.summands = summands
        for summand in summands:
            numbers = {summand.name: summand.value, summand.counter: summand.count}
            for name in numbers.keys() & total.outputs.keys():
                total.outputs[name] = np.full_like(total.outputs[name], numbers[name])
        if len(summands) != 1 or total._loss != summands[0].name:
            total.loss = sum(s.weight * s.value for s in summands)
        return total


def _times(value: float, count: float) -> float:
    """Returns the sum that belongs to a mean; 0 for the mean of nothing."""
    return value * count if count else 0.0


def collect(
    found: Differentiated,
    loss: str,
    parts: Sequence[LossPart],
    rows: int,
    *,
    shown: Container[str],
    couples: str,
    part: int,
    origin: Origin,
) -> Gradients:
    """Returns gradients with the information of the outputs about the loss.

    Args:
        found: The gradients and all outputs; counts are removed from these.
        loss: The output with the loss; empty if there is none.
        parts: The summands of the loss.
        rows: The number of rows of the batch.
        shown: The outputs to keep in addition to the loss.
        couples: Why rows depend on each other; empty if they do not.
        part: See `Gradients`.
        origin: Where they were computed.
    """
    outputs = found.outputs
    kept = {name: array for name, array in outputs.items() if name == loss or name in shown}
    summands = []
    for each in parts:
        count = number_of(outputs[each.count]) if each.count in outputs else float(rows)
        value = number_of(outputs[each.name])
        count = 1.0 if each.is_sum else count
        summands.append(
            Summand(
                each.name,
                value,
                each.weight,
                count,
                each.is_sum,
                each.couples_rows,
                each.count,
            )
        )
    kept_found = replace(found, outputs=kept)
    return Gradients(kept_found, loss, summands, couples=couples, part=part, origin=origin)


def check_gradients(given: Mapping[str, npt.ArrayLike], layout: Layout) -> dict[str, Array]:
    """Returns gradients in the form in which they are applied.

    Raises:
        OrtopsError: If there is not one for each parameter, with its shape and a type that fits.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "gradients must be a result of `gradients` or a dict with an array for each parameter, "
            f"got {type(given).__name__}"
        )
    for name in given:
        if name not in layout.names:
            raise OrtopsError(
                f"gradients: there is no parameter '{name}'; " + did_you_mean(name, layout.names)
            )
    missing = [name for name in layout.names if name not in given]
    if missing:
        raise OrtopsError(
            f"gradients: the gradient of '{missing[0]}' is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            + "; give one for each parameter, with zeros to leave it unchanged"
        )
    return {
        name: fitted_array(f"gradients: '{name}'", given[name], *layout.like(name))
        for name in layout.names
    }
