"""Losses against PyTorch's: values and gradients, with every option."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from violations import all_violations

from ortops import losses, op
from tests.loss_models import Array, loss_and_gradients

pytestmark = pytest.mark.torch

DTYPES = (np.float32, np.float64)
TOLERANCE = {
    np.float32: {"rtol": 2e-5, "atol": 2e-6},
    np.float64: {"rtol": 1e-10, "atol": 1e-12},
}

Function = Callable[..., Any]


class Case(NamedTuple):
    """A loss, the same of torch, and what it is called with.

    Attributes:
        name: What it is called.
        loss: The loss of ortops.
        reference: The same in torch: a function of torch, the outputs, then the feeds.
        outputs: Shape of each output.
        feeds: Draws what is fed, by name.
        squash: What ends the model.
    """

    name: str
    loss: losses.Loss
    reference: Function
    outputs: dict[str, tuple[int, ...]]
    feeds: Callable[[np.random.Generator], dict[str, Array]]
    squash: Function | None = None


CLASS_WEIGHTS = (0.5, 2.0, 0.0, 1.0, 3.0)


def labels(
    rng: np.random.Generator, *, shape: tuple[int, ...], ignored: int | None
) -> dict[str, Array]:
    """Labels of 5 classes, a third of which does not count."""
    drawn = rng.integers(0, 5, shape)
    if ignored is not None:
        drawn.reshape(-1)[::3] = ignored
    return {"labels": drawn}


def likelihood(
    torch: Any, y: Any, given: Any, *, function: str, place: int, weights: Any, **options: Any
) -> Any:
    """A loss of torch's, whose classes are on axis 1."""
    weight = None if weights is None else y.new_tensor(weights)
    moved = y.movedim(place, 1).contiguous()
    return getattr(torch.nn.functional, function)(moved, given, weight=weight, **options)


def soft_draws(rng: np.random.Generator, *, shape: tuple[int, ...], place: int) -> dict[str, Array]:
    """Probabilities of classes, some of which are 0."""
    drawn = rng.random(shape) * (rng.random(shape) < 0.6) + 1e-3
    return {"labels": drawn / drawn.sum(axis=place, keepdims=True)}


def soft_labels(torch: Any, y: Any, given: Any, *, place: int, **options: Any) -> Any:
    """The cross-entropy of probabilities in torch."""
    moved = given.movedim(place, 1).contiguous()
    return likelihood(torch, y, moved, function="cross_entropy", place=place, **options)


def class_cases() -> Iterator[Case]:
    """Losses of labels: wherever the classes are, and whatever counts how much."""
    shapes = {1: (6, 5), -1: (3, 4, 5), 2: (2, 3, 5, 4), None: (2, 5, 3, 4)}
    for (axis, shape), reduction, weights, ignored in product(
        shapes.items(), ("mean", "sum"), (None, CLASS_WEIGHTS), (None, 1, -100)
    ):
        place = 1 if axis is None else axis % len(shape)
        feeds = partial(labels, shape=(*shape[:place], *shape[place + 1 :]), ignored=ignored)
        options: Any = {"axis": axis, "reduction": reduction, "weights": weights}
        options["ignore_index"] = ignored
        theirs = {"place": place, "reduction": reduction, "weights": weights}
        theirs["ignore_index"] = -7 if ignored is None else ignored
        for smoothing in (0.0, 0.1):
            yield Case(
                f"cross-entropy {shape} {options} {smoothing}",
                losses.SoftmaxCrossEntropy(label_smoothing=smoothing, **options),
                partial(likelihood, function="cross_entropy", label_smoothing=smoothing, **theirs),
                {"y": shape},
                feeds,
            )
            if ignored is None:
                del (soft := dict(options))["ignore_index"]
                of_torch = {n: value for n, value in theirs.items() if n != "ignore_index"}
                yield Case(
                    f"cross-entropy of probabilities {shape} {options} {smoothing}",
                    losses.SoftmaxCrossEntropy(
                        probabilities=True, label_smoothing=smoothing, **soft
                    ),
                    partial(soft_labels, label_smoothing=smoothing, **of_torch),
                    {"y": shape},
                    partial(soft_draws, shape=shape, place=place),
                )
        yield Case(
            f"negative log-likelihood {shape} {options}",
            losses.NegativeLogLikelihood(**options),
            partial(likelihood, function="nll_loss", **theirs),
            {"y": shape},
            feeds,
        )
    for reduction, p, margin, weights in product(
        ("mean", "sum"), (1, 2), (1.0, 0.5), (None, CLASS_WEIGHTS)
    ):
        options = {"p": p, "margin": margin, "weights": weights, "reduction": reduction}
        yield Case(
            f"hinge {options}",
            losses.Hinge(**options),
            partial(likelihood, function="multi_margin_loss", place=1, **options),
            {"y": (7, 5)},
            partial(labels, shape=(7,), ignored=None),
        )


def probabilities(x: Any) -> Any:
    return op.Sigmoid(x)


def shares(rng: np.random.Generator) -> dict[str, Array]:
    return {"targets": np.where(rng.random((4, 3)) < 0.5, rng.random((4, 3)), 1.0).round(1)}


def distributions(rng: np.random.Generator) -> dict[str, Array]:
    drawn = rng.random((4, 3)) * (rng.random((4, 3)) < 0.7)
    return {"targets": drawn / 3}


def numbers(rng: np.random.Generator) -> dict[str, Array]:
    return {"targets": rng.normal(size=(4, 3)) * 2}


def number_cases() -> Iterator[Case]:
    """Losses of numbers and of probabilities, element by element."""
    y = {"y": (4, 3)}
    per_class = (0.5, 2.0, 0.0)
    per_row = ((1.0,), (0.0,), (2.0,), (3.0,))
    for reduction in ("mean", "sum"):

        def add(
            name: str,
            loss: losses.Loss,
            function: str,
            feeds: Any,
            squash: Any = None,
            reduction: str = reduction,
            **options: Any,
        ) -> Case:
            def reference(torch: Any, y: Any, t: Any) -> Any:
                given = {
                    key: y.new_tensor(value) if isinstance(value, tuple) else value
                    for key, value in options.items()
                }
                y = y if squash is None else torch.sigmoid(y)
                return getattr(torch.nn.functional, function)(y, t, reduction=reduction, **given)

            return Case(f"{name} {options} {reduction}", loss, reference, y, feeds, squash)

        yield add("L1", losses.L1(reduction=reduction), "l1_loss", numbers)
        yield add(
            "mean squared error", losses.MeanSquaredError(reduction=reduction), "mse_loss", numbers
        )
        for delta in (0.3, 1.0, 100.0):
            loss = losses.Huber(delta=delta, reduction=reduction)
            yield add("Huber", loss, "huber_loss", numbers, delta=delta)
        for beta in (0.0, 0.3, 1.0, 100.0):
            smooth = losses.SmoothL1(beta=beta, reduction=reduction)
            yield add("smooth L1", smooth, "smooth_l1_loss", numbers, beta=beta)
        for weight in (None, per_class, per_row):
            likelihood = losses.BinaryCrossEntropy(weights=weight, reduction=reduction)
            yield add(
                "binary cross-entropy",
                likelihood,
                "binary_cross_entropy",
                shares,
                probabilities,
                weight=weight,
            )
            for positive in (None, (3.0,), per_class, per_row):
                logits = losses.BinaryCrossEntropyWithLogits(
                    weights=weight, positive_weight=positive, reduction=reduction
                )
                yield add(
                    "binary cross-entropy with logits",
                    logits,
                    "binary_cross_entropy_with_logits",
                    shares,
                    weight=weight,
                    pos_weight=positive,
                )
    for reduction in ("mean", "batchmean", "sum"):
        for log_target in (False, True):
            divergence = losses.KullbackLeibler(log_target=log_target, reduction=reduction)
            yield add(
                "Kullback-Leibler",
                divergence,
                "kl_div",
                numbers if log_target else distributions,
                reduction=reduction,
                log_target=log_target,
            )


def embedding_cases() -> Iterator[Case]:
    """Losses of several outputs."""
    pair = {"a": (6, 4), "b": (6, 4)}
    triple = {**pair, "c": (6, 4)}
    for reduction in ("mean", "sum"):
        for margin in (0.0, 0.4, -0.5):

            def cosine(
                torch: Any, a: Any, b: Any, t: Any, *, m: Any = margin, r: Any = reduction
            ) -> Any:
                return torch.nn.functional.cosine_embedding_loss(a, b, t, margin=m, reduction=r)

            yield Case(
                f"cosine embedding {margin} {reduction}",
                losses.CosineEmbedding(first="a", second="b", margin=margin, reduction=reduction),
                cosine,
                pair,
                lambda rng: {"targets": np.array([1.0, -1, -1, 1, -1, 0])},
            )
        for p, swap, eps, margin in (
            *((2, False, 1e-6, 1.0), (2, True, 1e-6, 3.0), (1, False, 1e-3, 2.0)),
            *((3, True, 1e-6, 1.0), (1.5, False, 1e-6, 0.2), (float("inf"), True, 1e-6, 1.0)),
        ):
            options = {"p": p, "swap": swap, "eps": eps, "margin": margin, "reduction": reduction}

            def triplet(torch: Any, a: Any, b: Any, c: Any, *, options: Any = options) -> Any:
                return torch.nn.functional.triplet_margin_loss(a, b, c, **options)

            yield Case(
                f"triplet {options}",
                losses.Triplet(anchor="a", positive="b", negative="c", **options),
                triplet,
                triple,
                lambda rng: {},
            )


def arc_face(
    torch: Any, y: Any, given: Any, *, margin: float, scale: float, weights: Any, **options: Any
) -> Any:
    """The definition, by angles."""
    cosine = torch.tanh(y)
    angle = torch.acos(cosine) + margin
    beyond = cosine - margin * np.sin(margin)
    moved = torch.where(angle <= np.pi, torch.cos(angle), beyond)
    own = torch.nn.functional.one_hot(given.clamp(min=0), 5).bool()
    own = own.movedim(-1, 1)
    logits = scale * torch.where(own, moved, cosine)
    weight = None if weights is None else y.new_tensor(weights)
    return torch.nn.functional.cross_entropy(logits, given, weight=weight, **options)


def spread_cases() -> Iterator[Case]:
    """Likelihoods of distributions, quantiles, and angles."""

    def numbers(rng: np.random.Generator) -> dict[str, Array]:
        return {"targets": rng.normal(size=(6, 4))}

    def counts(rng: np.random.Generator) -> dict[str, Array]:
        return {"targets": rng.poisson(2.0, (6, 4)).astype(np.float64)}

    two = {"mean": (6, 4), "spread": (6, 4)}
    for reduction, full in product(("mean", "sum"), (False, True)):
        options: Any = {"reduction": reduction, "full": full}

        def gaussian(torch: Any, m: Any, s: Any, t: Any, *, options: Any = options) -> Any:
            return torch.nn.functional.gaussian_nll_loss(m.exp(), t, s.exp(), **options)

        def of_logarithm(torch: Any, m: Any, s: Any, t: Any, *, options: Any = options) -> Any:
            return torch.nn.functional.gaussian_nll_loss(m, t, s.exp(), eps=1e-30, **options)

        yield Case(
            f"Gaussian {options}",
            losses.GaussianNLL("mean", variance="spread", **options),
            *(gaussian, two, numbers, op.Exp),
        )
        yield Case(
            f"Gaussian, logarithm {options}",
            losses.GaussianNLL("mean", log_variance="spread", **options),
            *(of_logarithm, two, numbers),
        )
        for log_input in (False, True):

            def poisson(
                torch: Any, y: Any, t: Any, *, options: Any = options, log_input: bool = log_input
            ) -> Any:
                y = y if log_input else y.exp()
                function = torch.nn.functional.poisson_nll_loss
                return function(y, t, log_input=log_input, **options)

            yield Case(
                f"Poisson {options} {log_input}",
                losses.PoissonNLL(log_input=log_input, **options),
                *(poisson, {"y": (6, 4)}, counts, None if log_input else op.Exp),
            )
    for reduction, quantiles in product(("mean", "sum"), (0.5, 0.9, (0.1, 0.5, 0.95))):
        several = isinstance(quantiles, tuple)

        def pinball(
            torch: Any, y: Any, t: Any, *, q: Any = quantiles, reduction: str = reduction
        ) -> Any:
            q = y.new_tensor(q)
            difference = (t[..., None] if q.ndim else t) - y
            found = torch.where(difference > 0, q * difference, (q - 1) * difference)
            return getattr(found, reduction)()

        yield Case(
            f"quantiles {quantiles} {reduction}",
            losses.Quantile(quantiles=quantiles, reduction=reduction),
            *(pinball, {"y": (6, 4, 3) if several else (6, 4)}, numbers),
        )
    for margin, ignored, weights, smoothing in (
        *((0.5, None, None, 0.0), (0.0, None, None, 0.0), (2.5, None, CLASS_WEIGHTS, 0.0)),
        *((0.5, -100, CLASS_WEIGHTS, 0.1), (1.2, 1, None, 0.0)),
    ):
        angles = {"margin": margin, "scale": 8.0, "weights": weights}
        shape = (6, 5) if smoothing == 0 else (4, 5, 3)
        yield Case(
            f"ArcFace {angles} {ignored} {smoothing}",
            losses.ArcFace(ignore_index=ignored, label_smoothing=smoothing, **angles),
            partial(
                arc_face,
                ignore_index=-7 if ignored is None else ignored,
                label_smoothing=smoothing,
                **angles,
            ),
            {"y": shape},
            partial(labels, shape=(shape[0], *shape[2:]), ignored=ignored),
            op.Tanh,
        )


CASES = [*class_cases(), *number_cases(), *embedding_cases(), *spread_cases()]


def draw(case: Case, dtype: Any, seed: int = 0) -> tuple[dict[str, Array], dict[str, Array]]:
    rng = np.random.default_rng(seed)
    outputs = {name: rng.normal(size=shape).astype(dtype) for name, shape in case.outputs.items()}
    feeds = case.feeds(rng)
    return outputs, {
        name: given.astype(dtype) if given.dtype.kind == "f" else given
        for name, given in feeds.items()
    }


@pytest.mark.nightly(7)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")  # torch, of its KLDivLoss
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(dict.fromkeys(case.loss.name for case in CASES)))
def test_values_and_gradients_are_those_of_torch(name: str, dtype: Any) -> None:
    with all_violations() as check:
        for case in CASES:
            if case.loss.name == name:
                with check(case.name):
                    is_that_of_torch(case, dtype)


def is_that_of_torch(case: Case, dtype: Any) -> None:
    import torch

    outputs, feeds = draw(case, dtype)
    tensors = {name: torch.tensor(y, requires_grad=True) for name, y in outputs.items()}
    given = [torch.tensor(array) for array in feeds.values()]
    expected = case.reference(torch, *tensors.values(), *given)
    expected.backward()
    value, gradients = loss_and_gradients(case.loss, outputs, feeds, case.squash)
    np.testing.assert_allclose(value, expected.item(), **TOLERANCE[dtype])
    for name, tensor in tensors.items():
        assert np.any(tensor.grad.numpy() != 0)
        np.testing.assert_allclose(gradients[name], tensor.grad, **TOLERANCE[dtype], err_msg=name)


# ---------------------------------------------------------------------------------------- CTC


def ctc_case(kind: str, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """Logits (T, N, C), labels (N, S) and both lengths."""
    times, rows, classes, most = 7, 5, 4, 3
    logits = rng.normal(size=(times, rows, classes))
    labels = rng.integers(1, classes, (rows, most))
    inputs, targets = np.array([7, 7, 5, 6, 7]), np.array([3, 2, 3, 1, 3])
    match kind:
        case "empty targets":
            targets = np.array([0, 2, 0, 1, 0])
        case "all targets empty":
            targets = np.zeros(5, np.int64)
        case "no labels at all":
            labels, targets = labels[:, :0], np.zeros(5, np.int64)
        case "repeated labels":
            labels[:] = [[1, 1, 2], [3, 3, 3], [1, 2, 2], [2, 1, 2], [1, 1, 1]]
        case "targets that just fit":
            labels[:] = [[1, 1, 2], [3, 3, 3], [1, 2, 2], [2, 1, 2], [1, 2, 3]]
            inputs = np.array([4, 2, 4, 1, 3])
            targets = np.array([3, 1, 3, 1, 3])
        case "targets that do not fit":
            labels[:] = [[1, 1, 2], [3, 3, 3], [1, 2, 2], [2, 1, 2], [1, 2, 3]]
            inputs = np.array([3, 7, 2, 6, 1])
        case "logits far apart":
            logits *= 20
        case "empty inputs":
            inputs, targets = np.array([0, 7, 0, 6, 7]), np.array([0, 2, 0, 1, 0])
        case "padding of any number":
            labels[1, 2:], labels[3, 1:] = -100, 99
    return logits, labels, inputs, targets


CTC_KINDS = (
    *("plain", "empty targets", "all targets empty", "no labels at all", "repeated labels"),
    *("targets that just fit", "targets that do not fit", "logits far apart", "empty inputs"),
    "padding of any number",
)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CTC_KINDS)
def test_ctc_is_that_of_torch(kind: str, dtype: Any) -> None:
    with all_violations() as check:
        for blank, first, reduction in itertools.product((0, 3), (False, True), ("mean", "sum")):
            with check(f"blank {blank}, batch first {first}, {reduction}"):
                is_ctc_of_torch(kind, blank, first, reduction, dtype)


def is_ctc_of_torch(kind: str, blank: int, batch_first: bool, reduction: Any, dtype: Any) -> None:
    import torch

    logits, labels, inputs, targets = ctc_case(kind, np.random.default_rng(1))
    logits = logits.astype(dtype)
    labels = np.where(labels == blank, 0, labels)  # blank itself is no label
    y = torch.tensor(logits, requires_grad=True)
    no_infinity = kind == "targets that do not fit"
    expected = torch.nn.functional.ctc_loss(
        y.log_softmax(2),
        torch.tensor(labels),
        torch.tensor(inputs),
        torch.tensor(targets),
        blank=blank,
        reduction=reduction,
        zero_infinity=no_infinity,
    )
    expected.backward()
    loss = losses.CTC(
        blank=blank, batch_first=batch_first, reduction=reduction, zero_infinity=no_infinity
    )
    feeds = {"labels": labels, "input_lengths": inputs, "target_lengths": targets}
    swapped = logits.swapaxes(0, 1) if batch_first else logits
    value, gradients = loss_and_gradients(
        loss, {"y": swapped}, feeds, lambda x: op.LogSoftmax(x, axis=2)
    )
    gradient = gradients["y"].swapaxes(0, 1) if batch_first else gradients["y"]
    np.testing.assert_allclose(value, expected.item(), **TOLERANCE[dtype])
    np.testing.assert_allclose(gradient, y.grad, **TOLERANCE[dtype])


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(10))
def test_ctc_of_random_sizes(seed: int) -> None:
    import torch

    rng = np.random.default_rng(seed)
    times, rows, classes, most = (int(rng.integers(1, high)) for high in (30, 6, 8, 12))
    logits = rng.normal(size=(times, rows, classes + 1)) * 3
    labels = rng.integers(1, classes + 1, (rows, most))
    inputs, targets = rng.integers(0, times + 1, rows), rng.integers(0, most + 1, rows)
    y = torch.tensor(logits, requires_grad=True)
    expected = torch.nn.functional.ctc_loss(
        y.log_softmax(2),
        *(torch.tensor(each) for each in (labels, inputs, targets)),
        zero_infinity=True,
    )
    expected.backward()
    feeds = {"labels": labels, "input_lengths": inputs, "target_lengths": targets}
    value, gradients = loss_and_gradients(
        losses.CTC(zero_infinity=True), {"y": logits}, feeds, lambda x: op.LogSoftmax(x, axis=2)
    )
    np.testing.assert_allclose(value, expected.item(), **TOLERANCE[np.float64])
    np.testing.assert_allclose(gradients["y"], y.grad, **TOLERANCE[np.float64])


# -------------------------------------------------------------------------- where nothing counts


@pytest.mark.quick(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_nothing_counts(reduction: Any, smoothing: float) -> None:
    import torch

    y = np.random.default_rng(0).normal(size=(4, 5))
    tensor = torch.tensor(y, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        tensor,
        torch.full((4,), 9),
        ignore_index=9,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    expected.backward()
    assert np.isnan(expected.item()) == (reduction == "mean")  # where it is 0 here
    loss = losses.SoftmaxCrossEntropy(
        ignore_index=9, reduction=reduction, label_smoothing=smoothing
    )
    value, gradients = loss_and_gradients(loss, {"y": y}, {"labels": np.full(4, 9)})
    assert value == 0
    np.testing.assert_array_equal(gradients["y"], tensor.grad)
