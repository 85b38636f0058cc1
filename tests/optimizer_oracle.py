"""The optimizers of the specification once more: its pseudo-code on single numbers, in float64.

At the end stand trajectories of the other optimizers, whole arrays at a time.

Nothing of ortops is used. Next to each result stands a bound of the rounding errors that a correct
implementation in a given precision may make: each result is a sum, and what is rounded is in
proportion to the magnitudes of its terms, which may cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Numbers = list[tuple[float, float]]  # each result with the sum of the magnitudes of its terms

ROUNDINGS = 16  # more than any result goes through


@dataclass(frozen=True)
class Expected:
    value: Array
    magnitude: Array

    def assert_close(self, actual: npt.NDArray[np.generic], conditioning: float = 0.0) -> None:
        """Asserts equality up to rounding in the dtype of ``actual``."""
        assert isinstance(actual, np.ndarray)
        assert actual.shape == self.value.shape
        relative = np.finfo(actual.dtype).eps + np.finfo(np.float64).eps * conditioning
        error = np.abs(actual.astype(np.float64) - self.value)
        allowed = ROUNDINGS * relative * self.magnitude + np.finfo(actual.dtype).tiny
        worst = np.max(error / allowed, initial=0.0)
        assert worst <= 1, f"error of {worst:.3g} times what rounding allows"


def _one_adagrad(r, t, x, g, h, *, norm_coefficient, decay_factor, epsilon) -> Numbers:
    r = r / (1 + t * decay_factor)
    g_regularized = norm_coefficient * x + g
    g_terms = abs(norm_coefficient * x) + abs(g)
    h_new = h + g_regularized * g_regularized
    h_adaptive = math.sqrt(h_new) + epsilon
    x_new = x - r * g_regularized / h_adaptive
    return [(x_new, abs(x) + r * g_terms / h_adaptive), (h_new, h + g_terms**2)]


def _corrected(r, t, h, alpha, beta, epsilon) -> tuple[float, float]:
    """What a step of Adam is multiplied with and divided by, as algorithm 1 of the paper says."""
    return r / (1 - alpha**t), math.sqrt(h / (1 - beta**t)) + epsilon


def _one_adam(
    r,
    t,
    x,
    g,
    v,
    h,
    *,
    norm_coefficient,
    norm_coefficient_post,
    alpha,
    beta,
    epsilon,
    epsilon_after_correction=False,
) -> Numbers:
    g_regularized = norm_coefficient * x + g
    g_terms = abs(norm_coefficient * x) + abs(g)
    v_new = alpha * v + (1 - alpha) * g_regularized
    v_terms = abs(alpha * v) + (1 - alpha) * g_terms
    h_new = beta * h + (1 - beta) * g_regularized * g_regularized
    h_terms = beta * h + (1 - beta) * g_terms**2
    h_sqrt = math.sqrt(h_new) + epsilon
    r_adjusted = r
    if t > 0:
        r_adjusted = r * math.sqrt(1 - beta**t) / (1 - alpha**t)
    if epsilon_after_correction:
        r_adjusted, h_sqrt = _corrected(r, t, h_new, alpha, beta, epsilon)
    x_new = x - r_adjusted * v_new / h_sqrt
    x_terms = abs(x) + r_adjusted * v_terms / h_sqrt
    post = 1 - norm_coefficient_post
    return [(post * x_new, abs(post) * x_terms), (v_new, v_terms), (h_new, h_terms)]


def _one_momentum(r, t, x, g, v, *, norm_coefficient, alpha, beta, mode) -> Numbers:
    g_regularized = norm_coefficient * x + g
    g_terms = abs(norm_coefficient * x) + abs(g)
    beta_adjusted = beta if t > 0 else 1.0
    v_new = alpha * v + beta_adjusted * g_regularized
    v_terms = abs(alpha * v) + beta_adjusted * g_terms
    if mode == "nesterov":
        x_new = x - r * (g_regularized + alpha * v_new)
        x_terms = abs(x) + r * (g_terms + alpha * v_terms)
    else:
        x_new = x - r * v_new
        x_terms = abs(x) + r * v_terms
    return [(x_new, x_terms), (v_new, v_terms)]


def _one_sgd(
    r, t, x, g, *, norm_coefficient, momentum=0.0, dampening=0.0, nesterov=False
) -> Numbers:
    del t
    assert {momentum, dampening, nesterov} == {0}
    terms = abs(norm_coefficient * x) + abs(g)
    return [(x - r * (norm_coefficient * x + g), abs(x) + r * terms)]


def _one_adamw(
    r, t, x, g, v, h, *, alpha, beta, epsilon, weight_decay, epsilon_after_correction=False
) -> Numbers:
    v_new = alpha * v + (1 - alpha) * g
    v_terms = abs(alpha * v) + (1 - alpha) * abs(g)
    h_new = beta * h + (1 - beta) * g * g
    step = r
    if t > 0:
        step = r * math.sqrt(1 - beta**t) / (1 - alpha**t)
    divisor = math.sqrt(h_new) + epsilon
    if epsilon_after_correction:
        step, divisor = _corrected(r, t, h_new, alpha, beta, epsilon)
    x_new = x - r * weight_decay * x - step * v_new / divisor
    x_terms = abs(x) + r * weight_decay * abs(x) + step * v_terms / divisor
    return [(x_new, x_terms), (v_new, v_terms), (h_new, h_new)]


_ORACLES: dict[str, Callable[..., Numbers]] = {
    "Adagrad": _one_adagrad,
    "Adam": _one_adam,
    "AdamW": _one_adamw,
    "Momentum": _one_momentum,
    "SGD": _one_sgd,
}


def expected(
    name: str,
    r: npt.NDArray[np.generic],
    t: npt.NDArray[np.generic],
    tensors: Sequence[npt.NDArray[np.generic]],
    attributes: dict[str, float | str],
) -> list[Expected]:
    """Returns what an update gives, one entry for X_new and each new state."""
    shape, size = tensors[0].shape, tensors[0].size
    columns = [[float(number) for number in array.reshape(-1)] for array in tensors]
    outputs = len(tensors) - 1
    values = [np.zeros(size) for _ in range(outputs)]
    magnitudes = [np.zeros(size) for _ in range(outputs)]
    for index in range(size):
        row = [column[index] for column in columns]
        results = _ORACLES[name](float(r), int(t), *row, **attributes)
        for output, (value, magnitude) in enumerate(results):
            values[output][index] = value
            magnitudes[output][index] = magnitude
    return [
        Expected(value.reshape(shape), magnitude.reshape(shape))
        for value, magnitude in zip(values, magnitudes, strict=True)
    ]


def conditioning(t: int, attributes: dict[str, float | str]) -> float:
    """Returns how much 1 - alpha^T and 1 - beta^T enlarge the rounding of the power."""
    if t <= 0:
        return 0.0
    decays = [float(attributes.get(name, 0.0)) for name in ("alpha", "beta")]
    powers = [decay**t for decay in decays if decay < 1]
    return sum(power / (1 - power) for power in powers)


# ----------------------------------------------------------------------------- trajectories


def _sgd(x, gradients, rate, *, momentum=0.0, dampening=0.0, nesterov=False, l2=0.0):
    buffer = None
    for g in gradients:
        g = g + l2 * x
        step = g
        if momentum:
            buffer = g if buffer is None else momentum * buffer + (1 - dampening) * g
            step = g + momentum * buffer if nesterov else buffer
        x = x - rate * step
    return x


def _rmsprop(x, gradients, rate, *, rho, epsilon, momentum=0.0, centered=False, l2=0.0):
    square, mean, buffer = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for g in gradients:
        g = g + l2 * x
        square += (1 - rho) * (g**2 - square)
        mean += (1 - rho) * (g - mean)
        variance = square - mean**2 if centered else square
        buffer = momentum * buffer + g / (np.sqrt(variance) + epsilon)
        x = x - rate * buffer
    return x


def _adadelta(x, gradients, rate, *, rho, epsilon, l2=0.0):
    square, moved = np.zeros_like(x), np.zeros_like(x)
    for g in gradients:
        g = g + l2 * x
        square += (1 - rho) * (g**2 - square)
        step = g * np.sqrt((moved + epsilon) / (square + epsilon))
        moved += (1 - rho) * (step**2 - moved)
        x = x - rate * step
    return x


def _moments(x, gradients, rate, beta1, beta2, l2, decay):
    """Yields t, x after decay, the gradient, and both running means, and takes the new x back."""
    mean, square = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        x = x * (1 - rate * decay)
        g = g + l2 * x
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g**2
        x = yield t, x, g, mean, square


def _over_moments(x, gradients, rate, *, beta1, beta2, stepped, l2=0.0, decay=0.0):
    steps = _moments(x, gradients, rate, beta1, beta2, l2, decay)
    given = next(steps)
    try:
        while True:
            x = stepped(*given)
            given = steps.send(x)
    except StopIteration:
        return x


def _amsgrad(x, gradients, rate, *, epsilon, **settings):
    beta1, beta2 = settings["beta1"], settings["beta2"]
    largest = np.zeros_like(x)

    def stepped(t, x, g, mean, square):
        nonlocal largest
        largest = np.maximum(largest, square)
        root = np.sqrt(largest / (1 - beta2**t)) + epsilon
        return x - rate * mean / (1 - beta1**t) / root

    return _over_moments(x, gradients, rate, stepped=stepped, **settings)


def _adamw(x, gradients, rate, *, epsilon, **settings):
    beta1, beta2 = settings["beta1"], settings["beta2"]

    def stepped(t, x, g, mean, square):
        return x - rate * mean / (1 - beta1**t) / (np.sqrt(square / (1 - beta2**t)) + epsilon)

    return _over_moments(x, gradients, rate, stepped=stepped, **settings)


def _nadam(x, gradients, rate, *, epsilon, momentum_decay, **settings):
    beta1, beta2 = settings["beta1"], settings["beta2"]
    product = 1.0

    def stepped(t, x, g, mean, square):
        nonlocal product
        now, after = (beta1 * (1 - 0.96 ** (i * momentum_decay) / 2) for i in (t, t + 1))
        product *= now
        step = (1 - now) * g / (1 - product) + after * mean / (1 - product * after)
        return x - rate * step / (np.sqrt(square / (1 - beta2**t)) + epsilon)

    return _over_moments(x, gradients, rate, stepped=stepped, **settings)


def _radam(x, gradients, rate, *, epsilon, **settings):
    beta1, beta2 = settings["beta1"], settings["beta2"]
    most = 2 / (1 - beta2) - 1

    def stepped(t, x, g, mean, square):
        step = mean / (1 - beta1**t)
        known = most - 2 * t * beta2**t / (1 - beta2**t)
        if known > 5:
            rectified = (known - 4) * (known - 2) * most / ((most - 4) * (most - 2) * known)
            step *= math.sqrt(rectified) * math.sqrt(1 - beta2**t) / (np.sqrt(square) + epsilon)
        return x - rate * step

    return _over_moments(x, gradients, rate, stepped=stepped, **settings)


def _adamax(x, gradients, rate, *, beta1, beta2, epsilon, l2=0.0):
    mean, largest = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        g = g + l2 * x
        mean = beta1 * mean + (1 - beta1) * g
        largest = np.maximum(beta2 * largest, np.abs(g) + epsilon)
        x = x - rate / (1 - beta1**t) * mean / largest
    return x


def _lion(x, gradients, rate, *, beta1, beta2, decay):
    mean = np.zeros_like(x)
    for g in gradients:
        direction = np.sign(beta1 * mean + (1 - beta1) * g)
        x = x - rate * (direction + decay * x)
        mean = beta2 * mean + (1 - beta2) * g
    return x


def _lamb(x, gradients, rate, *, epsilon, decay, **settings):
    beta1, beta2 = settings["beta1"], settings["beta2"]

    def stepped(t, x, g, mean, square):
        step = mean / (1 - beta1**t) / (np.sqrt(square / (1 - beta2**t)) + epsilon) + decay * x
        lengths = np.linalg.norm(x.reshape(-1)), np.linalg.norm(step.reshape(-1))
        return x - rate * (lengths[0] / lengths[1] if all(lengths) else 1.0) * step

    return _over_moments(x, gradients, rate, stepped=stepped, **settings)


def _adafactor(
    x,
    gradients,
    rate,
    *,
    beta2_decay,
    eps,
    d=1.0,
    decay=0.0,
    relative=True,
    scaled=True,
    factored=True,
):
    row, column, square = 0.0, 0.0, np.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        weight = t**beta2_decay
        scale = max(eps[1], math.sqrt(np.mean(x**2))) if scaled else 1.0
        scale *= min(rate, 1 / math.sqrt(t)) if relative else rate
        x = x * (1 - rate * decay)
        if x.ndim > 1 and factored:
            row = row + weight * (np.mean(g**2, axis=-1) - row)
            column = column + weight * (np.mean(g**2, axis=-2) - column)
            total = np.maximum(np.mean(row, axis=-1), eps[0])
            square = row[..., :, None] * column[..., None, :] / total[..., None, None]
        else:
            square = square + weight * (g**2 - square)
        step = g / np.maximum(np.sqrt(square), eps[0])
        step = step / max(1.0, math.sqrt(np.mean(step**2)) / d)
        x = x - scale * step
    return x


def _muon(x, gradients, rate, *, momentum, nesterov, steps, adjustment, epsilon, decay, adamw):
    if x.ndim != 2:
        return _adamw(x, gradients, rate, decay=decay, **adamw)
    mean = np.zeros_like(x)
    for g in gradients:
        mean = momentum * mean + (1 - momentum) * g
        direction = momentum * mean + (1 - momentum) * g if nesterov else mean
        # Applied to the singular values: the polynomial is odd.
        left, values, right = np.linalg.svd(direction, full_matrices=False)
        values = values / max(math.sqrt(np.sum(values**2)), epsilon)
        for _ in range(steps):
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        scale = math.sqrt(max(1, x.shape[0] / x.shape[1]))
        if adjustment == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(x.shape))
        x = x * (1 - rate * decay) - rate * scale * (left * values) @ right
    return x


def schedule_free(
    x, gradients, rates, *, beta1, beta2, epsilon, decay=0.0, r=0.0, power=2.0
) -> tuple[Array, Array]:
    """Returns where gradients are taken, and the average; as the paper's algorithm 1 has it.

    The average is computed at the end, from all iterates and their weights.
    """
    y, z, square = x, x, np.zeros_like(x)
    iterates, weights = [], []
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        square = beta2 * square + (1 - beta2) * g**2
        step = g / (np.sqrt(square / (1 - beta2**t)) + epsilon) + decay * y
        z = z - rate * step
        iterates.append(z)
        weights.append(t**r * max(rates[:t]) ** power)
        pairs = zip(weights, iterates, strict=True)
        average = sum(w * each for w, each in pairs) / sum(weights) if sum(weights) else z
        y = (1 - beta1) * z + beta1 * average
    return y, average


def _schedule_free(x, gradients, rate, **settings):
    return schedule_free(x, gradients, [rate] * len(gradients), **settings)[0]


_TRAJECTORIES: dict[str, Callable[..., Array]] = {
    "SGD": _sgd,
    "RMSprop": _rmsprop,
    "Adadelta": _adadelta,
    "AMSGrad": _amsgrad,
    "NAdam": _nadam,
    "RAdam": _radam,
    "Adamax": _adamax,
    "Lion": _lion,
    "LAMB": _lamb,
    "Adafactor": _adafactor,
    "Muon": _muon,
    "ScheduleFreeAdamW": _schedule_free,
}


def trajectory(
    name: str,
    start: npt.NDArray[np.generic],
    gradients: Sequence[npt.NDArray[np.generic]],
    rate: float,
    **settings: object,
) -> Array:
    """Returns where the gradients lead a parameter."""
    wide = [np.asarray(g, np.float64) for g in gradients]
    return np.asarray(_TRAJECTORIES[name](np.array(start, np.float64), wide, rate, **settings))
