"""Who does the work: ortops in its ways, PyTorch, JAX, numpy, and a loop in C.

A peer is a module of this package with a function ``make(task, optimizer, **options) -> Step``. To
add one, write it and name it in `PEERS`. Nothing of a peer is imported before it is asked to work.
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


@dataclass(frozen=True)
class Step:
    """What a peer makes of a task.

    Attributes:
        run: Makes one step, or several, with the next batches. Returns their losses (a number or
            several), those of an update nothing.
        parameters: Returns the present parameters by name, for tasks that have no loss.
        count: How many steps ``run`` makes.
    """

    run: Callable[[], Any]
    parameters: Callable[[], Mapping[str, Array]]
    count: int = 1


@dataclass(frozen=True)
class Peer:
    """Somebody who can do a work.

    Attributes:
        module: The module of this package.
        options: What its ``make`` is called with besides the task and the optimizer.
        package: What must be installed; empty if nothing.
        compilers: One of these commands must be there, if any is named.
        method: What `ortops.TrainingSession` must have, if anything.
        training: Whether it does whole training steps.
        update: Whether it does updates alone.
        exported: Whether it does training steps of exporters' files.
        optimizers: Those that it has.
        start: Whether its start and its memory are measured.
    """

    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""
    compilers: tuple[str, ...] = ()
    method: str = ""
    training: bool = True
    update: bool = True
    exported: bool = True
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    start: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is ortops."""
        return self.module in ("with_ortops", "with_step_graph")

    def does(self, network: str, optimizer: str, exported: bool = False) -> bool:
        """Tells whether a task is among what it does where nothing is missing."""
        kind = self.update if network == UPDATE else self.training
        return kind and optimizer in self.optimizers and (self.exported or not exported)

    def missing(self) -> str:
        """Says what it would need here; nothing where it can work."""
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        if self.compilers and not any(map(shutil.which, self.compilers)):
            return f"there is no {' or '.join(self.compilers)}"
        if self.method:
            import ortops

            if not hasattr(ortops.TrainingSession, self.method):
                return f"TrainingSession has no {self.method}"
        return ""

    def version(self) -> str:
        """Returns the version of its package; empty where it has none."""
        return metadata.version(self.package) if self.package else ""

    def make(self, task: Task, optimizer: str) -> Step:
        """Returns the step of a task that it `does`."""
        step: Step = import_module(f"{__name__}.{self.module}").make(
            task, optimizer, **self.options
        )
        return step


PEERS: Mapping[str, Peer] = {
    LOWERED: Peer("with_ortops", {"kernels": "onnx"}, "ortops", start=True),
    COMPILED: Peer("with_ortops", {"kernels": "compiled"}, "numba", exported=False, start=True),
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
    # Of compiling, the start is torch eager's and more.
    "torch.compile": Peer(
        "with_torch", {"compiled": True}, "torch", ("g++", "clang++"), update=False
    ),
    "JAX": Peer("with_jax", package="jax", optimizers=("Adam", "Momentum"), start=True),
    "numpy": Peer("with_numpy", package="numpy", training=False),
    C: Peer("with_c", compilers=COMPILERS, training=False, optimizers=("Adam",)),
}
"""Everybody who is measured, by the name that the tables show."""
