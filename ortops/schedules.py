"""Learning-rate schedules: the learning rate as a function of the number of completed steps.

A schedule is part of the training graph, so every program that runs the file follows it, and
resumed training continues in the middle of it. The learning rate of a step is the state
``learning_rate`` (the peak) times the factor of the schedule after ``n`` completed steps. Setting
``session.peak_learning_rate`` therefore rescales the rest of the schedule;
``session.learning_rate`` is the learning rate of the next step.

The same formula computes on numpy arrays and emits nodes for `ortops.Tensor`. A custom schedule is
``Schedule(peak, factor)`` with a function of ``n``; a function that an optimizer gets as learning
rate is ``Schedule(1.0, function)``, the learning rate itself.

With ``warmup=w`` the factor rises from 0 as ``n / w`` during the first ``w`` steps; a fraction
below 1 means ``⌈w · steps⌉``, like ``warmup_ratio`` of Hugging Face's transformers. The schedule
starts after the warm-up, with ``n - w`` in place of ``n``. In schedules with ``steps``, this is the
total number of steps, including the warm-up; after these steps the factor stays at its last value.
A warm-up that is longer is never finished.

Without ``steps``, `ortops.TrainingSession.fit` sets it to the number of steps of the training, in
the state ``schedule_steps``, and ``schedule_start`` to the number of steps before it. A call of fit
with ``resume=True`` continues the schedule; another one starts it again.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ortops._common.arguments import function, number, whole_number
from ortops.errors import ArgumentError

__all__ = [
    "Schedule",
    "check_steps",
    "constant",
    "cosine",
    "exponential",
    "one_cycle",
    "polynomial",
    "sequence",
    "step",
    "warmup_cosine",
    "warmup_linear",
]


@dataclass(frozen=True)
class Schedule:
    """A learning rate that changes from step to step.

    Attributes:
        peak: The learning rate that the factor multiplies, which sessions show and set; finite and
            non-negative.
        factor: A function from the number of completed steps, 0-d float64, to the factor. It is
            called with numpy arrays and with Tensors, so it may use only what both support.
        description: A textual description; by default, the name of the function.
        needs_steps: Whether the total number of steps is not known yet. Then the factor has this
            number as its second argument, 0-d float64.

    Raises:
        ArgumentError: If the peak is out of range, or the factor is not a function.

    Example:
        >>> def inverse_root(n):
        ...     return (n + 1.0) ** -0.5
        >>> schedule = Schedule(0.1, inverse_root)
        >>> schedule(3), schedule.description
        (0.05, 'inverse_root')
    """

    peak: float
    factor: Callable[..., Any]
    description: str = ""
    needs_steps: bool = False

    def __post_init__(self) -> None:
        """Converts the peak to float and checks the arguments."""
        function("Schedule: factor", self.factor, "a function of the number of completed steps")
        if not self.description:
            name = getattr(self.factor, "__name__", type(self.factor).__name__)
            object.__setattr__(self, "description", str(name))
        shown = f"schedule {self.description}: peak"
        object.__setattr__(self, "peak", number(shown, self.peak, minimum=0, maximum=_LARGEST))

    def __call__(self, finished_steps: npt.ArrayLike) -> Any:
        """Returns the learning rate after a number of completed steps (0 for the first step).

        Args:
            finished_steps: The number of completed steps, or an array of them, for example to plot
                the schedule.

        Raises:
            ArgumentError: If the schedule has no number of steps.

        Example:
            >>> cosine(0.1, steps=10)(5)
            0.05
        """
        if self.needs_steps:
            raise ArgumentError(
                f"schedule {self.description}: the number of steps is not known before fit; give "
                "steps=, or a warm-up in steps, to compute learning rates"
            )
        n = np.asarray(finished_steps, np.float64)
        rates = self.peak * np.asarray(self.factor(n), np.float64)
        return rates if n.ndim else float(rates)


LearningRate: TypeAlias = float | Schedule | Callable[[Any], Any]
"""A learning rate, a schedule, or a function of the number of completed steps."""


def schedule_of(rate: LearningRate) -> float | Schedule:
    """Returns the schedule that a function of the number of completed steps means.

    Raises:
        ArgumentError: If it is a function of `ortops.schedules`, which makes schedules.

    Example:
        >>> schedule_of(lambda n: 0.1 * 0.5**n)(1)
        0.05
    """
    if isinstance(rate, Schedule) or not callable(rate):
        return rate
    name = getattr(rate, "__name__", "")
    if getattr(rate, "__module__", "") == __name__ and name in __all__:
        raise ArgumentError(f"learning_rate must be a schedule, such as schedules.{name}(0.1, …)")
    return Schedule(1.0, rate)


def sequence(first: LearningRate, second: LearningRate, *, at: int) -> Schedule:
    """The first schedule for ``at`` steps, then the second, which counts its steps from 0.

    The peak is that of the first. Without ``steps``, the first takes ``at`` steps, and the second
    the remaining ones of `fit`.

    Args:
        first: A schedule, a number, or a function of the number of completed steps.
        second: The same, for the later steps.
        at: The number of steps of the first.

    Raises:
        ArgumentError: If an argument is out of range, or the peak of the first is 0.

    Source:
        ``SequentialLR`` of PyTorch.

    Example:
        >>> both = sequence(constant(0.5, warmup=2), lambda n: 0.25 * 0.5**n, at=3)
        >>> both(range(6)).tolist()
        [0.0, 0.25, 0.5, 0.25, 0.125, 0.0625]
    """
    at = _count("sequence", "at", at, 1)
    schedules = (schedule_of(each) for each in (first, second))
    one, two = (e if isinstance(e, Schedule) else constant(e) for e in schedules)
    if not one.peak:
        raise ArgumentError("schedule sequence: the peak of the first schedule must be above 0")
    text = f"sequence({one.description}, {two.description}, at={at})"
    return Schedule(one.peak, _Sequence(one, two, at), text, two.needs_steps)


def constant(peak: float, *, warmup: float = 0) -> Schedule:
    """Constant learning rate: ``f = 1``.

    Args:
        peak: The learning rate.
        warmup: The number of warm-up steps, or a fraction, in which the rate rises from 0.

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        The warm-up follows Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in
        1 Hour", 2017, section 2.2, but starts from 0.

    Example:
        >>> constant(0.5, warmup=2)([0, 1, 2, 3]).tolist()
        [0.0, 0.25, 0.5, 0.5]
    """
    return _schedule("constant", peak, _Formula(_constant), warmup)


def step(peak: float, *, every: int, factor: float = 0.1, warmup: float = 0) -> Schedule:
    """Step decay: ``f = factor ^ ⌊n / every⌋``, like PyTorch's ``StepLR``.

    Args:
        peak: The initial learning rate.
        every: The number of steps between decays.
        factor: The decay factor, in (0, 1].
        warmup: The number of warm-up steps, or a fraction, in which the rate rises from 0.

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        He et al., "Deep Residual Learning for Image Recognition", 2016, section 3.4.

    Example:
        >>> step(1.0, every=2, factor=0.5)([0, 1, 2, 3, 4]).tolist()
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    every = _count("step", "every", every, 1)
    factor = _decay_factor("step", factor)
    formula = _Formula(_step, (every, factor))
    return _schedule("step", peak, formula, warmup, every=every, factor=factor)


def exponential(peak: float, *, factor: float, every: int = 1, warmup: float = 0) -> Schedule:
    """Exponential decay: ``f = factor ^ (n / every)``, like PyTorch's ``ExponentialLR``.

    Args:
        peak: The initial learning rate.
        factor: The decay factor per ``every`` steps, in (0, 1].
        every: The number of steps in which the learning rate is multiplied by ``factor``; 1 in
            PyTorch.
        warmup: The number of warm-up steps, or a fraction, in which the rate rises from 0.

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        Bottou, "Stochastic Gradient Descent Tricks", 2012, on decreasing gains; the form is
        ``torch.optim.lr_scheduler.ExponentialLR``.

    Example:
        >>> exponential(1.0, factor=0.25, every=2)([0, 1, 2, 4]).tolist()
        [1.0, 0.5, 0.25, 0.0625]
    """
    every = _count("exponential", "every", every, 1)
    factor = _decay_factor("exponential", factor)
    formula = _Formula(_exponential, (every, factor))
    return _schedule("exponential", peak, formula, warmup, factor=factor, every=every)


def polynomial(
    peak: float,
    *,
    steps: int | None = None,
    power: float = 1.0,
    end: float = 0.0,
    warmup: float = 0,
) -> Schedule:
    """Polynomial decay: ``f = end + (1 - end) · (1 - n / steps) ^ power``.

    With ``end=0`` it equals PyTorch's ``PolynomialLR``.

    Args:
        peak: The initial learning rate.
        steps: The total number of training steps; None for those of `fit`.
        power: The exponent, positive; 1 gives linear decay.
        end: The factor after the last step, in [0, 1].
        warmup: The number of warm-up steps, or a fraction, in which the rate rises from 0.

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        Chen et al., "DeepLab", 2017, section 4.1 (the "poly" policy).

    Example:
        >>> polynomial(1.0, steps=4, power=2)([0, 2, 4, 9]).tolist()
        [1.0, 0.25, 0.0, 0.0]
    """
    return _falling("polynomial", peak, steps, power, end, warmup)


def cosine(
    peak: float, *, steps: int | None = None, end: float = 0.0, restarts: int = 0, warmup: float = 0
) -> Schedule:
    """Cosine annealing: ``f = end + (1 - end) · (1 + cos(π · n / steps)) / 2``.

    With ``restarts=k`` there are ``k + 1`` periods of ``steps / (k + 1)`` steps, each starting from
    the peak. One period equals PyTorch's ``CosineAnnealingLR``, several equal
    ``CosineAnnealingWarmRestarts``.

    Args:
        peak: The initial learning rate.
        steps: The total number of training steps; None for those of `fit`.
        end: The factor after the last step, in [0, 1].
        restarts: The number of warm restarts.
        warmup: The number of warm-up steps, or a fraction, in which the rate rises from 0, once.

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Example:
        >>> cosine(1.0, steps=4)([0, 2, 4, 9]).round(6).tolist()
        [1.0, 0.5, 0.0, 0.0]
        >>> cosine(1.0, steps=8, restarts=1)([0, 2, 4, 6, 8]).round(6).tolist()
        [1.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _waving("cosine", peak, steps, end, restarts, warmup)


def one_cycle(
    peak: float,
    *,
    steps: int | None = None,
    rise: float = 0.3,
    start: float = 0.04,
    end: float = 4e-6,
) -> Schedule:
    """The 1cycle policy: cosine annealing up to the peak, then down to almost 0.

    With ``u = rise · steps - 1`` and ``d = steps - 1``::

        f = start + (1 - start) · (1 - cos(π · n / u)) / 2            n ≤ u
        f = end + (1 - end) · (1 + cos(π · (n - u) / (d - u))) / 2    after that

    It equals PyTorch's ``OneCycleLR`` with ``start = 1 / div_factor`` and
    ``end = start / final_div_factor``, except that the momentum is not changed.

    Args:
        peak: The highest learning rate.
        steps: The total number of training steps; None for those of `fit`.
        rise: The fraction of the steps in which the learning rate rises, in (0, 1); more than one
            step.
        start: The factor of the first step, in [0, 1].
        end: The factor of the last step, in [0, 1].

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large
        Learning Rates", 2018.

    Example:
        >>> one_cycle(1.0, steps=11, rise=6 / 11, start=0.2, end=0.0)([0, 5, 10]).tolist()
        [0.2, 1.0, 0.0]
    """
    rise = _fraction("one_cycle", "rise", rise)
    start = _fraction("one_cycle", "start", start)
    end = _fraction("one_cycle", "end", end)
    if steps is not None:
        steps = _count("one_cycle", "steps", steps, 1)
        if not 0 < rise * steps - 1 < steps - 1:
            raise ArgumentError(
                f"schedule one_cycle: rise must cover more than 1 and fewer than {steps} steps, "
                f"got {rise!r} ({rise * steps:g} steps)"
            )
    formula = _Lengths(_one_cycle, _of_one_cycle, (rise, start, end))
    return _schedule("one_cycle", peak, formula, 0, steps=steps, rise=rise, start=start, end=end)


def warmup_cosine(
    peak: float, *, steps: int | None = None, warmup: float, end: float = 0.0
) -> Schedule:
    """Linear warm-up from 0 in ``warmup`` steps, then cosine annealing (see `cosine`).

    Args:
        peak: The highest learning rate.
        steps: The total number of training steps, including the warm-up; None for those of `fit`.
        warmup: The number of warm-up steps, or a fraction of all steps.
        end: The factor after the last step, in [0, 1].

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        ``get_cosine_schedule_with_warmup`` of Hugging Face's transformers, and
        ``warmup_cosine_decay_schedule`` of optax.

    Example:
        >>> warmup_cosine(1.0, steps=8, warmup=4)([0, 1, 4, 6, 8]).round(6).tolist()
        [0.0, 0.25, 1.0, 0.5, 0.0]
    """
    return _waving("warmup_cosine", peak, steps, end, 0, warmup)


def warmup_linear(
    peak: float, *, steps: int | None = None, warmup: float, end: float = 0.0
) -> Schedule:
    """Linear warm-up from 0 in ``warmup`` steps, then linear decay (see `polynomial`).

    Args:
        peak: The highest learning rate.
        steps: The total number of training steps, including the warm-up; None for those of `fit`.
        warmup: The number of warm-up steps, or a fraction of all steps.
        end: The factor after the last step, in [0, 1].

    Raises:
        ArgumentError: If an argument is out of range.

    Source:
        Devlin et al., "BERT", 2019, appendix A.2; ``get_linear_schedule_with_warmup`` of Hugging
        Face's transformers.

    Example:
        >>> warmup_linear(1.0, steps=6, warmup=2)([0, 1, 2, 4, 6]).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _falling("warmup_linear", peak, steps, 1.0, end, warmup)


_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class _Formula:
    """The factor of a schedule: a formula with its arguments, after a warm-up.

    It is a class because pickle does not support nested functions.

    Attributes:
        of: Computes the factor from the number of steps after the warm-up, an array namespace, and
            the arguments.
        arguments: The arguments.
        warmup: The number of warm-up steps, in which the factor rises from 0.
    """

    of: Callable[..., Any]
    arguments: tuple[float, ...] = ()
    warmup: float = 0

    def __call__(self, n: Any) -> Any:
        xp = n.__array_namespace__()
        if isinstance(self.warmup, int) and not self.warmup:
            return self.of(n, xp, *self.arguments)
        after = self.of(xp.maximum(n - self.warmup, 0.0), xp, *self.arguments)
        return xp.where(n < self.warmup, n / self.warmup, after)


@dataclass(frozen=True)
class _Sequence:
    """The factor of a schedule that follows another one; see `sequence`."""

    first: Schedule
    second: Schedule
    at: int

    def __call__(self, n: Any, steps: Any = None) -> Any:
        xp, first, second = n.__array_namespace__(), self.first, self.second
        length = (float(self.at),) if first.needs_steps else ()
        rest = (xp.maximum(steps - self.at, 1.0),) if second.needs_steps else ()
        later = second.factor(xp.maximum(n - self.at, 0.0), *rest) * (second.peak / first.peak)
        return xp.where(n < self.at, first.factor(n, *length), later)


@dataclass(frozen=True)
class _Lengths:
    """The factor of a schedule whose arguments depend on the total number of steps.

    Attributes:
        of: See `_Formula`.
        arguments: Computes the arguments from the number of steps after the warm-up, and `given`.
        given: The other arguments of the schedule.
        warmup: See `_Formula`.
    """

    of: Callable[..., Any]
    arguments: Callable[..., tuple[Any, ...]]
    given: tuple[float, ...]
    warmup: float = 0

    def __call__(self, n: Any, steps: Any) -> Any:
        return self.known(steps)(n)

    def known(self, steps: Any) -> _Formula:
        """Returns the factor for a total number of steps."""
        warmup = self.warmup
        if 0 < warmup < 1:
            warmup = _rounded_up(warmup * steps)
        rest = steps - warmup
        if self.warmup:  # it may be longer than the training
            known = isinstance(rest, int | float)
            rest = max(rest, 1) if known else rest.__array_namespace__().maximum(rest, 1.0)
        return _Formula(self.of, self.arguments(rest, *self.given), warmup)


def _rounded_up(value: Any) -> Any:
    """Returns the next integer; a Tensor for a Tensor."""
    return math.ceil(value) if isinstance(value, float) else value.__array_namespace__().ceil(value)


def _of_any_length(_: Any, *given: Any) -> tuple[Any, ...]:
    return given


def _of_polynomial(length: Any, power: float, end: float) -> tuple[Any, ...]:
    return length, power, end


def _of_cosine(length: Any, cycles: int, end: float) -> tuple[Any, ...]:
    return length, cycles, end


def _of_one_cycle(length: Any, rise: float, start: float, end: float) -> tuple[Any, ...]:
    return rise * length - 1, length - 1, start, end


def _as_float(length: Any) -> Any:
    """Returns a number as a float; a Tensor as it is."""
    return float(length) if isinstance(length, int | float) else length


def _constant(n: Any, xp: Any) -> Any:
    return xp.ones_like(n)


def _step(n: Any, xp: Any, every: int, factor: float) -> Any:
    return factor ** xp.floor(n / every)


def _exponential(n: Any, _: Any, every: int, factor: float) -> Any:
    return factor ** (n / every)


def _polynomial(n: Any, xp: Any, length: int, power: float, end: float) -> Any:
    left = 1.0 - xp.minimum(n, _as_float(length)) / length
    return end + (1.0 - end) * left**power


def _cosine(n: Any, xp: Any, length: int, cycles: int, end: float) -> Any:
    periods = n * float(cycles) / length
    share = xp.where(n < length, periods - xp.floor(periods), 1.0)
    return end + (1.0 - end) * (1.0 + _cos_pi(share, xp)) / 2.0


def _cos_pi(share: Any, xp: Any) -> Any:
    """Returns cos(π · share) as a sine: onnxruntime has no Cos of float64 before 1.29."""
    return xp.sin(math.pi * (0.5 - share))


def _one_cycle(n: Any, xp: Any, top: float, last: int, start: float, end: float) -> Any:
    up = start + (1.0 - start) * (1.0 - _cos_pi(n / top, xp)) / 2.0
    share = (xp.minimum(n, _as_float(last)) - top) / (last - top)
    down = end + (1.0 - end) * (1.0 + _cos_pi(share, xp)) / 2.0
    return xp.where(n <= top, up, down)


def _falling(
    name: str, peak: float, steps: int | None, power: float, end: float, warmup: float
) -> Schedule:
    """Returns a schedule with polynomial decay."""
    steps, warmup = _lengths(name, steps, warmup)
    power = number(f"schedule {name}: power", power, above=0)
    end = _fraction(name, "end", end)
    own = {"power": power} if name == "polynomial" else {}
    formula = _Lengths(_polynomial, _of_polynomial, (power, end))
    return _schedule(name, peak, formula, warmup, steps=steps, **own, end=end)


def _waving(
    name: str, peak: float, steps: int | None, end: float, restarts: int, warmup: float
) -> Schedule:
    """Returns a schedule with cosine annealing."""
    steps, warmup = _lengths(name, steps, warmup)
    restarts = _count(name, "restarts", restarts)
    end = _fraction(name, "end", end)
    own = {"restarts": restarts} if name == "cosine" else {}
    formula = _Lengths(_cosine, _of_cosine, (restarts + 1, end))
    return _schedule(name, peak, formula, warmup, steps=steps, **own, end=end)


def _schedule(
    name: str, peak: float, formula: _Formula | _Lengths, warmup: float, **arguments: Any
) -> Schedule:
    """Returns a schedule with a warm-up, whose description lists its arguments."""
    warmup = _warmup(name, warmup)
    if isinstance(formula, _Formula) and 0 < warmup < 1:
        formula = _Lengths(formula.of, _of_any_length, formula.arguments)
    given = arguments | ({"warmup": warmup} if warmup else {})
    text = ", ".join(f"{key}={value!r}" for key, value in given.items() if value is not None)
    factor = replace(formula, warmup=warmup)
    steps = arguments.get("steps")
    if isinstance(factor, _Lengths) and steps is not None:
        factor = factor.known(steps)
    return Schedule(peak, factor, f"{name}({text})", isinstance(factor, _Lengths))


def check_steps(description: str, steps: int) -> None:
    """Checks the number of steps of a schedule that was made without it.

    Args:
        description: The description of the schedule.
        steps: The total number of steps.

    Raises:
        ArgumentError: If the schedule cannot have so few steps.

    Example:
        >>> check_steps(warmup_linear(1.0, warmup=5).description, 6)
    """
    found = re.fullmatch(r"(\w+)\((.*)\)", description)
    make = _WITH_STEPS.get(found[1]) if found else None
    if found and make is not None:
        pairs = (part.split("=") for part in found[2].split(", ") if part)
        make(1.0, steps=steps, **{key: ast.literal_eval(value) for key, value in pairs})


_WITH_STEPS: Mapping[str, Callable[..., Schedule]] = {
    each.__name__: each for each in (polynomial, cosine, one_cycle, warmup_cosine, warmup_linear)
}


def _lengths(name: str, steps: int | None, warmup: float) -> tuple[int | None, float]:
    """Returns the total number of steps and the number of warm-up steps."""
    first = _warmup(name, warmup)
    return None if steps is None else _count(name, "steps", steps, 1), first


def _warmup(name: str, value: Any) -> float:
    """Returns a number of steps, or a fraction of them."""
    if isinstance(value, float | np.floating) and 0 < value < 1:
        return float(value)
    try:
        return _count(name, "warmup", value)
    except ArgumentError as error:
        raise ArgumentError(f"{error}; or give a fraction of the steps, > 0 and < 1") from error


def _count(name: str, argument: str, value: Any, minimum: int = 0) -> int:
    return whole_number(f"schedule {name}: {argument}", value, minimum, 2**63 - 1)  # int64 nodes


def _fraction(name: str, argument: str, value: Any) -> float:
    return number(f"schedule {name}: {argument}", value, minimum=0, maximum=1)


def _decay_factor(name: str, value: Any) -> float:
    return number(f"schedule {name}: factor", value, above=0, maximum=1)
