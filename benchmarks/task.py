"""A workload as files, with the same initial weights and batches for every peer.

Imports only numpy, so that the start-up time of a process is the peer's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["BATCHES", "OPTIMIZERS", "THREADS", "UPDATE", "Array", "Task", "threads"]

Array: TypeAlias = npt.NDArray[Any]

THREADS = 2
"""The number of threads of each peer, unless a measurement says otherwise."""


def threads() -> int:
    """Returns the number of threads of this process, which `benchmarks.measure.worker` sets."""
    return int(os.environ.get("OMP_NUM_THREADS", THREADS))


UPDATE = "update"
"""The name of the network of a workload that only updates parameters, with given gradients."""

BATCHES = 16
"""The number of different batches of a workload, which are repeated in order."""

OPTIMIZERS: Mapping[str, Mapping[str, float]] = {
    "Adam": {"learning_rate": 1e-3, "alpha": 0.9, "beta": 0.999, "epsilon": 1e-8},
    "Momentum": {"learning_rate": 1e-2, "alpha": 0.9},
    "Adagrad": {"learning_rate": 1e-2, "epsilon": 1e-6},
}
"""The optimizers and their settings, with ONNX's names."""


@dataclass(frozen=True)
class Task:
    """A workload in a folder.

    Attributes:
        folder: The folder.
        network: The network: ``mlp``, ``lenet``, ``resnet``, ``transformer``, ``lstm``, a name in
            `benchmarks.exported.NETWORKS`, or `UPDATE`.
        heads: The number of attention heads, which cannot be inferred from shapes.
        limit: The number of different batches, if not all.
        exported: Whether the folder has an exporter's file instead of trainable models; peers then
            build the trainable model themselves.
    """

    folder: str
    network: str
    heads: int = 4
    limit: int | None = None
    exported: bool = False

    @classmethod
    def read(cls, folder: str) -> Task:
        """Reads a task from a folder that `write` has filled."""
        return cls(**json.loads((Path(folder) / "task.json").read_text(encoding="utf-8")))

    def write(self, weights: Mapping[str, Array], batches: Sequence[Mapping[str, Array]]) -> None:
        """Writes everything except the trainable models."""
        folder = Path(self.folder)
        (folder / "task.json").write_text(json.dumps(asdict(self)), encoding="utf-8")
        np.savez(folder / "weights.npz", **weights)
        for number, feeds in enumerate(batches):
            np.savez(folder / f"batch{number}.npz", **feeds)

    def weights(self) -> dict[str, Array]:
        """Returns the initial parameters and statistics, float32, by name."""
        return _arrays(Path(self.folder) / "weights.npz")

    def batches(self) -> list[dict[str, Array]]:
        """Returns the batches, each a dict of arrays by input.

        The feeds of a training step are the samples, float32 (batch, …) or int64 ids, and
        ``labels``, int64 (batch, …), in this order; the batches of an update are
        ``<parameter>_gradient``.
        """
        count = len(list(Path(self.folder).glob("batch*.npz")))
        names = [f"batch{number}.npz" for number in range(count)][: self.limit]
        return [_arrays(Path(self.folder) / name) for name in names]

    def trainable(self, optimizer: str) -> Path:
        """Returns the path of the trainable ONNX model with an optimizer of `OPTIMIZERS`."""
        return Path(self.folder) / f"{optimizer}.onnx"

    def file(self) -> Path:
        """Returns the path of the exporter's file."""
        return Path(self.folder) / "exported.onnx"


def _arrays(path: Path) -> dict[str, Array]:
    with np.load(path) as file:
        return dict(file.items())
