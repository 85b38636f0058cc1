"""Schedules: the learning rate of a step as a formula of the steps before it.

A schedule is part of the graph that makes a step. So it is followed wherever the file is driven
from, and a training that was saved and resumed goes on in the midst of it. The rate of a step is
the state ``learning_rate``, the peak, times the factor of the schedule at the number of finished
steps ``n``. To set ``session.learning_rate`` therefore rescales what is left of the schedule.

A formula is written once: numpy arrays compute, `ortops.Tensor` emits nodes. One of your own is
``Schedule(peak, factor)`` with a function of ``n``.

With ``warmup=w`` the factor rises from 0 as ``n / w`` before the first ``w`` steps are done, and
the schedule begins after that, with ``n - w`` in place of ``n``. Where a schedule has ``steps``,
these are all steps, the warm-up included, and it stays at its end afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from ortops.errors import ModelError
from ortops.numbers import real

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "exponential",
    "one_cycle",
    "polynomial",
    "step",
    "warmup_cosine",
    "warmup_linear",
]


@dataclass(frozen=True)
class Schedule:
    """A learning rate that changes from step to step.

    Attributes:
        peak: What the factor multiplies: the learning rate that a session shows and sets; finite,
            not negative.
        factor: Gives the factor of a step from the number of finished steps, 0-d float64, a numpy
            array or a Tensor; it computes with what both share, so that it runs in the graph.
        description: What it is, as text; the name of the function by default.

    Raises:
        ModelError: If the peak is outside its range, or the factor is no function.

    Example:
        >>> def inverse_root(n):
        ...     return (n + 1.0) ** -0.5
        >>> schedule = Schedule(0.1, inverse_root)
        >>> schedule(3), schedule.description
        (0.05, 'inverse_root')
    """

    peak: float
    factor: Callable[[Any], Any]
    description: str = ""

    def __post_init__(self) -> None:
        """Makes the peak a float and refuses what cannot be a schedule."""
        if not callable(self.factor):
            raise ModelError(
                f"schedule: factor is {self.factor!r}; a function of the number of finished steps "
                "is accepted"
            )
        if not self.description:
            name = getattr(self.factor, "__name__", type(self.factor).__name__)
            object.__setattr__(self, "description", str(name))
        peak = _number(self.description, "peak", self.peak, 0.0, _LARGEST, "a finite number >= 0")
        object.__setattr__(self, "peak", peak)

    def __call__(self, finished_steps: npt.ArrayLike) -> Any:
        """Returns the learning rate after a number of finished steps, 0 for that of the first step.

        Args:
            finished_steps: The number; for a plot an array of them, which gives an array.

        Example:
            >>> cosine(0.1, steps=10)(5)
            0.05
        """
        n = np.asarray(finished_steps, np.float64)
        rates = self.peak * np.asarray(self.factor(n), np.float64)
        return rates if n.ndim else float(rates)


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """Stays at the peak: ``f = 1``.

    Args:
        peak: The learning rate.
        warmup: Steps in which the rate rises from 0.

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        The warm-up is that of Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in
        1 Hour", 2017, section 2.2, from 0 on.

    Example:
        >>> constant(0.5, warmup=2)([0, 1, 2, 3]).tolist()
        [0.0, 0.25, 0.5, 0.5]
    """
    return _schedule("constant", peak, lambda n, xp: xp.ones_like(n), warmup)


def step(peak: float, *, every: int, factor: float = 0.1, warmup: int = 0) -> Schedule:
    """Falls in steps: ``f = factor ^ ⌊n / every⌋``, as PyTorch's ``StepLR``.

    Args:
        peak: The learning rate at the beginning.
        every: After how many steps it falls.
        factor: What it is multiplied by then, in (0, 1].
        warmup: Steps in which the rate rises from 0.

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        He et al., "Deep Residual Learning for Image Recognition", 2016, section 3.4.

    Example:
        >>> step(1.0, every=2, factor=0.5)([0, 1, 2, 3, 4]).tolist()
        [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    every = _steps("step", "every", every)
    factor = _share("step", "factor", factor, least=_TINY)
    return _schedule(
        "step",
        peak,
        lambda n, xp: factor ** xp.floor(n / every),
        warmup,
        every=every,
        factor=factor,
    )


def exponential(peak: float, *, factor: float, every: int = 1, warmup: int = 0) -> Schedule:
    """Falls steadily: ``f = factor ^ (n / every)``; PyTorch's ``ExponentialLR`` with ``every=1``.

    Args:
        peak: The learning rate at the beginning.
        factor: What it is multiplied by in ``every`` steps, in (0, 1].
        every: How many steps that takes.
        warmup: Steps in which the rate rises from 0.

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        Bottou, "Stochastic Gradient Descent Tricks", 2012, on decreasing gains; the form is
        ``torch.optim.lr_scheduler.ExponentialLR``.

    Example:
        >>> exponential(1.0, factor=0.25, every=2)([0, 1, 2, 4]).tolist()
        [1.0, 0.5, 0.25, 0.0625]
    """
    every = _steps("exponential", "every", every)
    factor = _share("exponential", "factor", factor, least=_TINY)
    return _schedule(
        "exponential", peak, lambda n, xp: factor ** (n / every), warmup, factor=factor, every=every
    )


def polynomial(
    peak: float, *, steps: int, power: float = 1.0, end: float = 0.0, warmup: int = 0
) -> Schedule:
    """Falls by a power of what is left: ``f = end + (1 - end) · (1 - n / steps) ^ power``.

    With ``end=0`` it is PyTorch's ``PolynomialLR``.

    Args:
        peak: The learning rate at the beginning.
        steps: The steps of the training.
        power: The power, > 0; 1 falls linearly.
        end: The factor after the last step, in [0, 1].
        warmup: Steps in which the rate rises from 0.

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        Chen et al., "DeepLab", 2017, section 4.1 (the "poly" policy).

    Example:
        >>> polynomial(1.0, steps=4, power=2)([0, 2, 4, 9]).tolist()
        [1.0, 0.25, 0.0, 0.0]
    """
    return _polynomial("polynomial", peak, steps, power, end, warmup)


def cosine(
    peak: float, *, steps: int, end: float = 0.0, restarts: int = 0, warmup: int = 0
) -> Schedule:
    """Falls by half a cosine: ``f = end + (1 - end) · (1 + cos(π · n / steps)) / 2``.

    With ``restarts=k`` it does so ``k + 1`` times, in periods of ``steps / (k + 1)``, each from the
    peak on. One period is PyTorch's ``CosineAnnealingLR``, several ``CosineAnnealingWarmRestarts``.

    Args:
        peak: The learning rate at the beginning.
        steps: The steps of the training.
        end: The factor after the last step, in [0, 1].
        restarts: How often it goes back to the peak.
        warmup: Steps in which the rate rises from 0, once.

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Example:
        >>> cosine(1.0, steps=4)([0, 2, 4, 9]).round(6).tolist()
        [1.0, 0.5, 0.0, 0.0]
        >>> cosine(1.0, steps=8, restarts=1)([0, 2, 4, 6, 8]).round(6).tolist()
        [1.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _cosine("cosine", peak, steps, end, restarts, warmup)


def one_cycle(
    peak: float, *, steps: int, rise: float = 0.3, start: float = 0.04, end: float = 4e-6
) -> Schedule:
    """Rises to the peak and falls to almost nothing, both by half a cosine.

    With ``u = rise · steps - 1`` and ``d = steps - 1``::

        f = start + (1 - start) · (1 - cos(π · n / u)) / 2            n ≤ u
        f = end + (1 - end) · (1 + cos(π · (n - u) / (d - u))) / 2    after that

    It is PyTorch's ``OneCycleLR``, with ``start = 1 / div_factor`` and
    ``end = start / final_div_factor``, but for the momentum, which stays as it is.

    Args:
        peak: The highest learning rate.
        steps: The steps of the training.
        rise: The share of them in which it rises, in (0, 1); more than one step.
        start: The factor of the first step, in [0, 1].
        end: The factor of the last step, in [0, 1].

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large
        Learning Rates", 2018.

    Example:
        >>> one_cycle(1.0, steps=11, rise=6 / 11, start=0.2, end=0.0)([0, 5, 10]).tolist()
        [0.2, 1.0, 0.0]
    """
    steps = _steps("one_cycle", "steps", steps)
    rise = _share("one_cycle", "rise", rise)
    start = _share("one_cycle", "start", start)
    end = _share("one_cycle", "end", end)
    top, last = rise * steps - 1, steps - 1
    if not 0 < top < last:
        raise ModelError(
            f"schedule one_cycle: rise is {rise!r}, {rise * steps:g} of {steps} steps; more than "
            "one step and fewer than all are accepted"
        )

    def factor(n: Any, xp: Any) -> Any:
        up = start + (1.0 - start) * (1.0 - xp.cos(math.pi * n / top)) / 2.0
        share = (xp.minimum(n, float(last)) - top) / (last - top)
        down = end + (1.0 - end) * (1.0 + xp.cos(math.pi * share)) / 2.0
        return xp.where(n <= top, up, down)

    return _schedule("one_cycle", peak, factor, 0, steps=steps, rise=rise, start=start, end=end)


def warmup_cosine(peak: float, *, steps: int, warmup: int, end: float = 0.0) -> Schedule:
    """Rises linearly from 0 in ``warmup`` steps, then falls by half a cosine (see `cosine`).

    Args:
        peak: The highest learning rate.
        steps: The steps of the training, those of the warm-up included.
        warmup: Steps in which the rate rises.
        end: The factor after the last step, in [0, 1].

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        ``get_cosine_schedule_with_warmup`` of Hugging Face's transformers, and
        ``warmup_cosine_decay_schedule`` of optax.

    Example:
        >>> warmup_cosine(1.0, steps=8, warmup=4)([0, 1, 4, 6, 8]).round(6).tolist()
        [0.0, 0.25, 1.0, 0.5, 0.0]
    """
    return _cosine("warmup_cosine", peak, steps, end, 0, warmup)


def warmup_linear(peak: float, *, steps: int, warmup: int, end: float = 0.0) -> Schedule:
    """Rises linearly from 0 in ``warmup`` steps, then falls linearly (see `polynomial`).

    Args:
        peak: The highest learning rate.
        steps: The steps of the training, those of the warm-up included.
        warmup: Steps in which the rate rises.
        end: The factor after the last step, in [0, 1].

    Raises:
        ModelError: If an argument is outside its range.

    Source:
        Devlin et al., "BERT", 2019, appendix A.2; ``get_linear_schedule_with_warmup`` of Hugging
        Face's transformers.

    Example:
        >>> warmup_linear(1.0, steps=6, warmup=2)([0, 1, 2, 4, 6]).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    return _polynomial("warmup_linear", peak, steps, 1.0, end, warmup)


_TINY = float(np.finfo(np.float64).tiny)
_LARGEST = float(np.finfo(np.float32).max)


def _polynomial(
    name: str, peak: float, steps: int, power: float, end: float, warmup: int
) -> Schedule:
    steps, warmup = _lengths(name, steps, warmup)
    length = steps - warmup
    power = _number(name, "power", power, _TINY, _LARGEST, "a finite number > 0")
    end = _share(name, "end", end)

    def factor(n: Any, xp: Any) -> Any:
        left = 1.0 - xp.minimum(n, float(length)) / length
        return end + (1.0 - end) * left**power

    own = {"power": power} if name == "polynomial" else {}
    return _schedule(name, peak, factor, warmup, steps=steps, **own, end=end)


def _cosine(name: str, peak: float, steps: int, end: float, restarts: int, warmup: int) -> Schedule:
    steps, warmup = _lengths(name, steps, warmup)
    restarts = _count(name, "restarts", restarts)
    length, cycles = steps - warmup, restarts + 1
    end = _share(name, "end", end)

    def factor(n: Any, xp: Any) -> Any:
        periods = n * float(cycles) / length
        share = xp.where(n < length, periods - xp.floor(periods), 1.0)
        return end + (1.0 - end) * (1.0 + xp.cos(math.pi * share)) / 2.0

    own = {"restarts": restarts} if name == "cosine" else {}
    return _schedule(name, peak, factor, warmup, steps=steps, **own, end=end)


def _schedule(
    name: str,
    peak: float,
    formula: Callable[[Any, Any], Any],
    warmup: int,
    **arguments: object,
) -> Schedule:
    """Returns the schedule of a formula of the steps after a warm-up, and an array namespace."""
    warmup = _count(name, "warmup", warmup)

    def factor(n: Any) -> Any:
        xp = n.__array_namespace__()
        if not warmup:
            return formula(n, xp)
        return xp.where(n < warmup, n / warmup, formula(xp.maximum(n - warmup, 0.0), xp))

    given = arguments | ({"warmup": warmup} if warmup else {})
    text = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return Schedule(peak, factor, f"{name}({text})")


def _lengths(name: str, steps: int, warmup: int) -> tuple[int, int]:
    """Returns the number of steps, and of those of the warm-up."""
    steps, first = _steps(name, "steps", steps), _count(name, "warmup", warmup)
    if first >= steps:
        raise ModelError(
            f"schedule {name}: warmup is {warmup!r}, of {steps} steps; fewer than all are accepted"
        )
    return steps, first


def _steps(name: str, argument: str, value: Any) -> int:
    return _count(name, argument, value, 1)


def _count(name: str, argument: str, value: Any, least: int = 0) -> int:
    """Returns a count as an integer of Python, which a Tensor divides as numpy's would not be."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not least <= value < 2**63:
        what = "an integer > 0" if least else "an integer >= 0"
        raise ModelError(f"schedule {name}: {argument} is {value!r}; {what} is accepted")
    return int(value)


def _share(name: str, argument: str, value: Any, *, least: float = 0.0) -> float:
    what = "a number in [0, 1]" if not least else "a number in (0, 1]"
    return _number(name, argument, value, least, 1.0, what)


def _number(name: str, argument: str, value: Any, least: float, most: float, what: str) -> float:
    number = real(value)
    if not least <= number <= most:
        raise ModelError(f"schedule {name}: {argument} is {value!r}; {what} is accepted")
    return number
