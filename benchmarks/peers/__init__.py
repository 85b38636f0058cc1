"""The peers: several ways to run ortops, PyTorch, JAX, numpy, and a loop in C.

A peer is a module of this package with a function ``make(task, optimizer, **options) -> Step``,
listed in `PEERS`. Its module is imported only when it runs.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

from benchmarks.task import OPTIMIZERS, UPDATE, Array, Task

__all__ = [
    *("COMPILED", "COMPILERS", "LOWERED", "PEERS", "PYTHON", "RUN_STEPS", "STEP_GRAPH"),
    *("TORCH", "C", "Peer", "Step"),
]

LOWERED = "ortops, standard operators"
COMPILED = "ortops, compiled updates"
PYTHON = "ortops, Python custom ops"
RUN_STEPS = "ortops, run_steps"
STEP_GRAPH = "ortops, step graph in onnxruntime"
TORCH = "torch eager"
C = "loop in C"

COMPILERS = ("cc", "gcc", "clang")

_IN_JAX = ("bert", "mobilenet", "gpt2", "bert in training mode", "gpt2 in training mode")
"""The networks of `benchmarks.exported` that are written in JAX."""


@dataclass(frozen=True)
class Step:
    """A peer's implementation of a task.

    Attributes:
        run: Runs one or several steps with the next batches. Returns their losses (one number or
            several), or nothing for updates.
        parameters: Returns the current parameters by name, for tasks without a loss.
        count: The number of steps of ``run``.
    """

    run: Callable[[], Any]
    parameters: Callable[[], Mapping[str, Array]]
    count: int = 1


@dataclass(frozen=True)
class Peer:
    """A peer and its capabilities.

    Attributes:
        module: The module of this package.
        options: Further arguments of its ``make``.
        package: The package that must be installed; empty if none.
        compilers: Commands, one of which must be available, if any are listed.
        method: A method that `ortops.TrainingSession` must have, if any.
        training: Whether it supports training steps.
        update: Whether it supports updates alone.
        exported: Whether it supports training steps of exporters' files.
        networks: The networks that exporters' files may have; all if none are listed.
        optimizers: The optimizers that it supports.
        start: Whether its start-up time and memory are measured.
    """

    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    compilers: tuple[str, ...] = ()
    method: str = ""
    training: bool = True
    update: bool = True
    exported: bool = True
    networks: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    start: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is ortops."""
        return self.module in ("with_ortops", "with_step_graph")

    def does(self, network: str, optimizer: str, exported: bool = False) -> bool:
        """Returns whether it supports a task, if its requirements are installed."""
        kind = self.update if network == UPDATE else self.training
        if exported:
            fits = network in (self.networks or (network,))
            kind = kind and self.exported and fits
        return kind and optimizer in self.optimizers

    def missing(self) -> str:
        """Returns which requirement is missing; empty if none."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.compilers and not any(map(shutil.which, self.compilers)):
            return f"{' or '.join(self.compilers)} not found"
        if self.method:
            import ortops

            if not hasattr(ortops.TrainingSession, self.method):
                return f"TrainingSession has no {self.method}"
        return ""

    def version(self) -> str:
        """Returns the version of its package; empty if it has none."""
        return metadata.version(self.package) if self.package else ""

    def make(self, task: Task, optimizer: str, **more: Any) -> Step:
        """Returns the step function of a task that it supports.

        Args:
            task: The task.
            optimizer: The optimizer.
            **more: Further arguments of its module's ``make``.
        """
        step: Step = import_module(f"{__name__}.{self.module}").make(
            task, optimizer, **self.options, **more
        )
        return step


PEERS: Mapping[str, Peer] = {
    LOWERED: Peer("with_ortops", {"kernels": "onnx"}, "ortops", start=True),
    COMPILED: Peer("with_ortops", {"kernels": "compiled"}, "llvmlite", start=True),
    PYTHON: Peer("with_ortops", {"kernels": "python"}, "ortops", exported=False),
    RUN_STEPS: Peer(
        "with_ortops",
        {"kernels": "onnx", "run_steps": True},
        "ortops",
        method="run_steps",
        update=False,
        exported=False,
    ),
    STEP_GRAPH: Peer("with_step_graph", {"target": "onnxruntime"}, "onnxruntime", update=False),
    "ortops, step graph for any runtime": Peer(
        "with_step_graph", {"target": None}, "onnxruntime", update=False, exported=False
    ),
    TORCH: Peer("with_torch", package="torch", start=True),
    # Start-up would be eager PyTorch's plus compilation.
    "torch.compile": Peer(
        "with_torch", {"compiled": True}, "torch", ("g++", "clang++"), update=False
    ),
    "JAX": Peer(
        "with_jax",
        package="jax",
        networks=_IN_JAX,
        optimizers=("Adam", "Momentum"),
        start=True,
    ),
    "numpy": Peer("with_numpy", package="numpy", training=False),
    C: Peer("with_c", compilers=COMPILERS, training=False, optimizers=("Adam",)),
}
"""All peers, by their names in tables."""
