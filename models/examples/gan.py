"""A generator learns to draw points on a ring of eight clusters, against a discriminator (a GAN).

Both are in one file, with a training algorithm for each: ``training_info`` has the entries
``main``, which trains the generator, and ``discriminator``. onnxruntime makes steps of one or the
other on the same weights. The served file draws points from noise, with weights that are averages
over the last steps.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnxruntime

import ortops
from models.gan import gan

CENTERS = np.stack([np.cos(np.arange(8) * np.pi / 4), np.sin(np.arange(8) * np.pi / 4)], axis=1)
DEVIATION = 0.05
QUICK = {"near": 0.5, "clusters": 5}


def draw(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Returns points of the ring, and noise."""
    points = CENTERS[rng.integers(8, size=rows)] + DEVIATION * rng.standard_normal((rows, 2))
    noise = rng.standard_normal((rows, 2))
    return {"noise": noise.astype(np.float32), "real": points.astype(np.float32)}


def figures(points: np.ndarray) -> dict[str, float]:
    """Returns the share of points near a cluster, and how many clusters have their share of them.

    Near is within four standard deviations; a cluster counts with half of an eighth of the points.
    """
    distances = np.linalg.norm(points[:, None] - CENTERS, axis=2)
    near = distances.min(axis=1) < 4 * DEVIATION
    counts = np.bincount(distances.argmin(axis=1)[near], minlength=8)
    return {"near": float(near.mean()), "clusters": float((counts > len(points) / 16).sum())}


def main(quick: bool) -> dict[str, float]:
    """Trains both in turn; returns the figures of points that the served generator draws."""
    rng, start = np.random.default_rng(0), time.process_time()
    session, steps = ortops.TrainingSession(gan()), 2500 if quick else 12000
    for number in range(steps):
        for entry in ("discriminator", "main"):
            session.step(draw(rng, 256), entry=entry, outputs=["loss"])
        if (number + 1) % (steps // 4) == 0:
            for entry in session.learning_rates:
                session.learning_rates[entry] /= 2
    served = session.inference_model(ema=True)
    plain = onnxruntime.InferenceSession(served.SerializeToString())
    (points,) = plain.run(["fake"], draw(rng, 4000))
    found = figures(points)
    print(f"{2 * steps} steps in {time.process_time() - start:.0f} s of CPU time")
    print(
        f"near a cluster: {found['near']:.1%}; clusters that have points: {found['clusters']:.0f}"
    )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, a lower figure")
    main(parser.parse_args().quick)
