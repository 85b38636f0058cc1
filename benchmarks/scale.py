"""Scaling of time and memory with depth, width and batch size, and the largest trainable model.

Measures steps of transformers, each in a separate process that reads a trainable file::

    python -m benchmarks.scale                 # everything: about ten minutes
    python -m benchmarks.scale --confirm 18    # also the largest models that fit in 18 GB

For each training method, a formula is fitted to small models. With P parameters of 4 bytes, depth L
and batch · length · width = A activations of 4 bytes per layer, the peak memory is::

    base + parameters · 4P + layers · 4A · L      (√L instead of L with recompute="sqrt")

The formula predicts the largest model for a memory limit. Three runs, larger than all models that
it was fitted to, check its accuracy.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import worker
from benchmarks.start import peak_megabytes

__all__ = ["POINTS", "WAYS", "Formula", "Measured", "Point", "Way", "fit", "largest", "main"]

LENGTH, HEAD = 128, 64
"""The sequence length, and the width of an attention head."""

STEPS = 3
"""The number of steps of a process; the first is not timed."""

SHARE = 64
"""The width per layer of the models that `largest` returns."""


@dataclass(frozen=True)
class Point:
    """A transformer and its batch size."""

    depth: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        """The number of parameters in matrices: 4 d² in attention and 8 d² in the MLP per layer."""
        return 12 * self.depth * self.width**2

    @property
    def activations(self) -> int:
        """The number of elements of one activation between layers."""
        return self.batch * LENGTH * self.width

    @property
    def operations(self) -> int:
        """The floating-point operations of a step in which all weights have gradients."""
        attention = 2 * 2 * self.depth * self.activations * LENGTH
        return 3 * (2 * self.parameters * self.batch * LENGTH + attention)


@dataclass(frozen=True)
class Way:
    """A training method.

    Attributes:
        optimizer: An optimizer of `ortops.optimizers`.
        rank: The rank of LoRA adapters, if only these are trained; 0 for full training.
        recompute: Whether to use ``recompute="sqrt"``.
        in_backward: Whether to use ``optimizer_in_backward=True``.
    """

    optimizer: str
    rank: int = 0
    recompute: bool = False
    in_backward: bool = False

    def layers(self, depth: int) -> float:
        """Returns the number of layers whose activations are kept, up to a constant factor."""
        return depth**0.5 if self.recompute else depth


@dataclass(frozen=True)
class Measured:
    """The seconds per step of a process, and its peak memory in 10⁶ bytes."""

    seconds: float
    megabytes: float


@dataclass(frozen=True)
class Formula:
    """The coefficients of the formula for a training method.

    Attributes:
        base: The base memory of a process, in 10⁶ bytes.
        parameters: The number of copies of all parameters.
        layers: The number of activation tensors kept per layer.
    """

    base: float
    parameters: float
    layers: float

    def megabytes(self, way: Way, point: Point) -> float:
        """Returns the predicted peak memory."""
        return float(np.dot((self.base, self.parameters, self.layers), _terms(way, point)))


WAYS: Mapping[str, Way] = {
    "SGD": Way("SGD"),
    "Momentum": Way("Momentum"),
    "Adam": Way("Adam"),
    "Adam, checkpoint": Way("Adam", recompute=True),
    "SGD in backward": Way("SGD", in_backward=True),
    "Adam in backward": Way("Adam", in_backward=True),
    "Adam8bit": Way("Adam8bit"),
    "Adam8bit in backward": Way("Adam8bit", in_backward=True),
    "Adam, LoRA": Way("Adam", rank=8),
    "Adam, LoRA, checkpoint": Way("Adam", rank=8, recompute=True),
}

POINTS = (
    *(Point(2, 512, 1), Point(2, 1024, 1), Point(6, 512, 1), Point(2, 512, 8)),
    *(Point(6, 512, 4), Point(4, 256, 8)),
)
"""The models for the fit: one of depth, width and batch varies, the others are fixed."""

CONFIRMED = ("Adam", "Adam, checkpoint", "Adam, LoRA")


def _terms(way: Way, point: Point) -> tuple[float, float, float]:
    """Returns the factors of the coefficients."""
    layers = way.layers(point.depth)
    return 1.0, 4e-6 * point.parameters, 4e-6 * point.activations * layers


def fit(way: Way, found: Mapping[Point, Measured]) -> Formula:
    """Fits the formula by least squares of relative errors."""
    terms = np.array([_terms(way, point) for point in found])
    megabytes = np.array([each.megabytes for each in found.values()])
    solution = np.linalg.lstsq(terms / megabytes[:, None], np.ones(len(found)), rcond=None)[0]
    return Formula(*map(float, solution))


def largest(formula: Formula, way: Way, megabytes: float, batch: int) -> Point:
    """Returns the largest model that fits in memory, with one layer per 64 features.

    Raises:
        ValueError: If not even the smallest model fits.
    """
    found = None
    for layers in itertools.count(1):
        point = Point(layers, SHARE * layers, batch)
        if formula.megabytes(way, point) > megabytes:
            break
        found = point
    if found is None:
        raise ValueError(f"cannot fit even one layer in {megabytes:.0f} MB")
    return found


# --------------------------------------------------------------------- in separate processes


def _write(point: Point, way: Way, path: str) -> None:
    """Writes a trainable file."""
    import ortops
    from models.transformer import transformer

    d = point.width
    model = transformer(
        HEAD, length=LENGTH, width=d, heads=d // HEAD, hidden=4 * d, depth=point.depth
    )
    if way.rank:
        model = ortops.lora.add(model, rank=way.rank)
    trainable = ortops.build_training_model(
        model, loss="SoftmaxCrossEntropy", optimizer=way.optimizer
    )
    del model
    ortops.save_model(trainable, path)


def _train(point: Point, way: Way, path: str) -> Measured:
    """Runs a few steps."""
    import ortops

    session = ortops.TrainingSession(
        path,
        recompute="sqrt" if way.recompute else None,
        optimizer_in_backward=way.in_backward,
    )
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.standard_normal((point.batch, LENGTH, HEAD), np.float32),
        "labels": rng.integers(10, size=point.batch),
    }
    seconds = []
    for _ in range(STEPS):
        start = time.perf_counter()
        session.step(batch)
        seconds.append(time.perf_counter() - start)
    return Measured(statistics.median(seconds[1:]), peak_megabytes())


def measure(point: Point, way: Way) -> Measured:
    """Measures training in a separate process, which reads a file that another one wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trainable.onnx")
        for task in (_write, _train):
            with worker() as submit:
                found: Any = submit(task, point, way, path).result()
    assert isinstance(found, Measured)
    return found


# ----------------------------------------------------------------------------------------- tables


def growth(found: Mapping[Point, Measured], way: Way, formula: Formula) -> Iterator[str]:
    """Yields the table of measured and predicted values of a training method."""
    yield "| layers | width | batch | 10⁶ parameters | ms a step | GFLOP/s | MB | formula |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for point, each in found.items():
        predicted = formula.megabytes(way, point)
        yield (
            f"| {point.depth} | {point.width} | {point.batch} | {point.parameters / 1e6:.1f} | "
            f"{1e3 * each.seconds:.0f} | {point.operations / each.seconds / 1e9:.0f} | "
            f"{each.megabytes:.0f} | {predicted / each.megabytes:.2f} × |"
        )


def limits(formulae: Mapping[str, Formula], gigabytes: float, batches: Sequence[int]) -> list[str]:
    """Returns the table of formulas and of the largest models that they predict."""
    heads = " | ".join(f"largest in {gigabytes:g} GB, batch {batch}" for batch in batches)
    lines = [
        f"| way | MB of base | times parameters | tensors a layer | {heads} |",
        "| --- | --- | --- | --- |" + " --- |" * len(batches),
    ]
    for name, formula in formulae.items():
        cells = []
        for batch in batches:
            point = largest(formula, WAYS[name], 1e3 * gigabytes, batch)
            millions = f"{point.parameters / 1e6:.0f}"
            cells.append(f"{millions}·10⁶ ({point.depth} layers of {point.width})")
        numbers = f"{formula.base:.0f} | {formula.parameters:.2f} | {formula.layers:.1f}"
        lines.append(f"| {name} | {numbers} | {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, fits, predicts and confirms.

    Args:
        arguments: The command-line arguments; by default those of the process.

    Returns:
        The exit status: 1 if the memory of a confirming run differs by more than a tenth from the
        prediction.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument(
        "--limit", type=float, default=20, metavar="GB", help="the memory limit (default: 20)"
    )
    parser.add_argument(
        "--confirm",
        type=float,
        default=2.5,
        metavar="GB",
        help="the memory of the confirming runs (default: 2.5)",
    )
    parser.add_argument("--quick", action="store_true", help="only the smallest models")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="also write the tables to this file"
    )
    options = parser.parse_args(arguments)
    points = POINTS[:4] if options.quick else POINTS
    lines: list[str] = []
    formulae = {}
    for name, way in WAYS.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        found = {point: measure(point, way) for point in points}
        formulae[name] = fit(way, found)
        print(f"{name}: {formulae[name]}", file=sys.stderr, flush=True)
        lines += [f"### {name}", "", *growth(found, way, formulae[name]), ""]
    lines += [*limits(formulae, options.limit, (1, 8)), ""]
    lines += ["| way | model, batch 1 | predicted, MB | measured | ms a step |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    wrong = 0
    for name in CONFIRMED:
        way = WAYS[name]
        point = largest(formulae[name], way, 1e3 * options.confirm, 1)
        print(f"{name}: {point} ...", file=sys.stderr, flush=True)
        predicted, each = formulae[name].megabytes(way, point), measure(point, way)
        wrong += not 0.9 < each.megabytes / predicted < 1.1
        lines.append(
            f"| {name} | {point.parameters / 1e6:.0f}·10⁶, {point.depth} layers of {point.width} | "
            f"{predicted:.0f} | {each.megabytes:.0f} | {1e3 * each.seconds:.0f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
