"""How time and memory grow with depth, width and batch, and how large a model trains.

Steps of transformers are measured, each in a process of its own that reads a trainable file::

    python -m benchmarks.scale                 # the whole: some ten minutes
    python -m benchmarks.scale --confirm 18    # the largest that fit in 18 GB, too

From small models a formula is fitted for each way to train. With P parameters of 4 bytes, depth L
and batch · length · width = A activations of 4 bytes in a layer, the most memory is::

    base + parameters · 4P + layers · 4A · L      (√L in the place of L with recompute="sqrt")

It predicts the largest model for a limit, and three runs, larger than any that it was fitted to,
tell how right it is.
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
"""Tokens of a sequence, and the width of an attention head."""

STEPS = 3
"""Steps of a process; the first is not timed."""

SHARE = 64
"""A layer for so many features, in the models that `largest` finds."""


@dataclass(frozen=True)
class Point:
    """A transformer and its batch."""

    depth: int
    width: int
    batch: int

    @property
    def parameters(self) -> int:
        """The parameters in matrices: 4 d² of attention and 8 d² behind it, in each layer."""
        return 12 * self.depth * self.width**2

    @property
    def activations(self) -> int:
        """The elements of one tensor between layers."""
        return self.batch * LENGTH * self.width

    @property
    def operations(self) -> int:
        """Multiplications and additions of a step in which every weight gets a gradient."""
        attention = 2 * 2 * self.depth * self.activations * LENGTH
        return 3 * (2 * self.parameters * self.batch * LENGTH + attention)


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        optimizer: An optimizer of `ortops.optimizers`.
        rank: That of adapters, which are trained alone; 0 for none.
        recompute: Whether ``recompute="sqrt"``.
    """

    optimizer: str
    rank: int = 0
    recompute: bool = False

    def layers(self, depth: int) -> float:
        """Returns for how many layers activations are held, but for a factor."""
        return depth**0.5 if self.recompute else depth


@dataclass(frozen=True)
class Measured:
    """What a process took: seconds of a step, and its most memory in 10⁶ bytes."""

    seconds: float
    megabytes: float


@dataclass(frozen=True)
class Formula:
    """The coefficients of a way's formula.

    Attributes:
        base: 10⁶ bytes that every process takes.
        parameters: How many times all parameters are held.
        layers: How many tensors of activations are held of a layer.
    """

    base: float
    parameters: float
    layers: float

    def megabytes(self, way: Way, point: Point) -> float:
        """Returns the most memory of a training."""
        return float(np.dot((self.base, self.parameters, self.layers), _terms(way, point)))


WAYS: Mapping[str, Way] = {
    "SGD": Way("SGD"),
    "Momentum": Way("Momentum"),
    "Adam": Way("Adam"),
    "Adam, checkpoint": Way("Adam", recompute=True),
    "Adam, LoRA": Way("Adam", rank=8),
    "Adam, LoRA, checkpoint": Way("Adam", rank=8, recompute=True),
}

POINTS = (
    *(Point(2, 512, 1), Point(2, 1024, 1), Point(6, 512, 1), Point(2, 512, 8)),
    *(Point(6, 512, 4), Point(4, 256, 8)),
)
"""What the formulae are fitted to: each of depth, width and batch grows with the others fixed."""

CONFIRMED = ("Adam", "Adam, checkpoint", "Adam, LoRA")


def _terms(way: Way, point: Point) -> tuple[float, float, float]:
    """Returns what the coefficients are multiplied by."""
    layers = way.layers(point.depth)
    return 1.0, 4e-6 * point.parameters, 4e-6 * point.activations * layers


def fit(way: Way, found: Mapping[Point, Measured]) -> Formula:
    """Returns the formula with the least squares of relative errors."""
    terms = np.array([_terms(way, point) for point in found])
    megabytes = np.array([each.megabytes for each in found.values()])
    solution = np.linalg.lstsq(terms / megabytes[:, None], np.ones(len(found)), rcond=None)[0]
    return Formula(*map(float, solution))


def largest(formula: Formula, way: Way, megabytes: float, batch: int) -> Point:
    """Returns the largest model whose training fits, with a layer for each 64 of its width.

    Raises:
        ValueError: If not even the smallest fits.
    """
    found = None
    for layers in itertools.count(1):
        point = Point(layers, SHARE * layers, batch)
        if formula.megabytes(way, point) > megabytes:
            break
        found = point
    if found is None:
        raise ValueError(f"not even one layer fits in {megabytes:.0f} MB")
    return found


# --------------------------------------------------------------------- in processes of their own


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
    """Makes some steps."""
    import ortops

    session = ortops.TrainingSession(path, recompute="sqrt" if way.recompute else None)
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
    """Measures a training in a process of its own, which reads what another one wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trainable.onnx")
        for task in (_write, _train):
            with worker() as submit:
                found: Any = submit(task, point, way, path).result()
    assert isinstance(found, Measured)
    return found


# ----------------------------------------------------------------------------------------- tables


def growth(found: Mapping[Point, Measured], way: Way, formula: Formula) -> Iterator[str]:
    """Yields the table of what was measured of a way, beside what its formula says."""
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
    """Returns the table of the largest models: formulae, and what they predict by batch."""
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
        arguments: Those of the command line, by default the process's own.

    Returns:
        The exit code: 1 where a confirming run took over a tenth more or less than predicted.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--limit", type=float, default=20, metavar="GB", help="default: 20")
    parser.add_argument(
        "--confirm", type=float, default=2.5, metavar="GB", help="how large the three runs are"
    )
    parser.add_argument("--quick", action="store_true", help="only the smallest models: a trial")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables there")
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
