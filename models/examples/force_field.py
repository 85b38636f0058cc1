"""A force field: a network for the energy of atoms learns from forces, its derivatives.

The energy is a sum over pairs of six atoms of a small network of their distance. The loss compares
energies and, by `ortops.grad`, forces of 200 clusters in a Lennard-Jones potential. The exported
file includes the derivatives: stock onnxruntime computes energies and forces.
The error of forces on new clusters is 39 % after training on energies alone, 0.5 % with forces.
"""

import argparse
import functools
import itertools
import math

import numpy as np
import onnx
import onnxruntime

import ortops
from models.layers import glorot, linear
from ortops import Tape, Tensor, op

QUICK = {"force_error": 0.1}
FIRST, SECOND = np.array(list(itertools.combinations(range(6), 2))).T  # the atoms of each pair


def clusters(count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns distorted octahedra, with energies and forces of 4 (r⁻¹² − r⁻⁶) between atoms."""
    corners = 2 ** (1 / 6) / math.sqrt(2) * np.concatenate([np.eye(3), -np.eye(3)])
    positions = corners + rng.normal(0, 0.05, (count, 6, 3))
    arrows = positions[:, :, None] - positions[:, None] + 1e9 * np.eye(6)[..., None]
    r = np.linalg.norm(arrows, axis=3, keepdims=True)  # infinite distance of an atom to itself
    energies = 2 * (r**-12 - r**-6).sum(axis=(1, 2))  # each pair occurs twice
    forces = (24 * (2 * r**-14 - r**-8) * arrows).sum(axis=2)
    arrays = {"positions": positions, "targets": energies, "forces": forces}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def network() -> onnx.ModelProto:
    """Builds a model from positions (batch, 6, 3) to energy (batch, 1)."""
    rng = np.random.default_rng(0)
    with Tape(name="force_field") as tape:
        positions = tape.input("positions", np.float32, ["batch", 6, 3])
        arrows = op.Gather(positions, FIRST, axis=1) - op.Gather(positions, SECOND, axis=1)
        x = (arrows**2).sum(axis=2, keepdims=True) ** -1.5
        for layer in ("fc1", "fc2"):
            x = op.Tanh(linear(x, layer, 32, rng, init=glorot))
        tape.output(linear(x, "fc3", 1, rng, init=glorot).sum(axis=1), "energy")
    return tape.model()


def loss(energy: Tensor, positions: Tensor, targets: Tensor, forces: Tensor, weight=1.0) -> Tensor:
    """Compares energies, and forces with a weight."""
    wrong = -ortops.grad(energy, positions) - forces
    return ((energy - targets) ** 2).mean() + weight * (wrong**2).mean()


def main(quick: bool) -> dict[str, float]:
    """Trains without and with forces, and serves forces in stock onnxruntime."""
    rng, figures = np.random.default_rng(0), {}
    train, test = clusters(200, rng), clusters(200, rng)
    inputs, epochs = {"forces": (np.float32, ["batch", 6, 3])}, 80 if quick else 1000
    adam = ortops.optimizers.Adam(ortops.schedules.cosine(1e-2, steps=epochs * 10))
    for name, weight in (("energies_alone", 0.0), ("force_error", 1.0)):
        compare = functools.partial(loss, weight=weight)
        model = ortops.build_training_model(network(), loss=compare, optimizer=adam, inputs=inputs)
        session = ortops.TrainingSession(model)
        session.fit(train, epochs=epochs, batch_size=20, progress=False)
        model = ortops.derivatives.gradient(session.inference_model(), lowered=True)
        plain = onnxruntime.InferenceSession(model.SerializeToString())
        (slopes,) = plain.run(["d_energy_d_positions"], {"positions": test["positions"]})
        figures[name] = float(abs(-slopes - test["forces"]).mean() / abs(test["forces"]).mean())
    print(", ".join(f"{name} {figure:.1%}" for name, figure in figures.items()))
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, a lower figure")
    main(parser.parse_args().quick)
