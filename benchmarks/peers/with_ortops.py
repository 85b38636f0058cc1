"""ortops: a training session on the saved trainable model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ortops
from benchmarks import exported
from benchmarks.peers import Step
from benchmarks.task import OPTIMIZERS, UPDATE, Task, threads
from ortops import TrainingSession
from ortops.engine.execution.settings import Settings

if TYPE_CHECKING:
    import onnx

__all__ = ["make", "trainable"]


def trainable(task: Task, optimizer: str) -> Path | onnx.ModelProto:
    """Returns the trainable model: a file, or one built from an exporter's file."""
    if not task.exported:
        return task.trainable(optimizer)
    return ortops.build_training_model(
        task.file(),
        loss=ortops.losses.SoftmaxCrossEntropy(axis=exported.NETWORKS[task.network].axis),
        optimizer=getattr(ortops.optimizers, optimizer)(**OPTIMIZERS[optimizer]),
    )


def make(
    task: Task,
    optimizer: str,
    *,
    kernels: Any,
    run_steps: bool = False,
    sess_options: Any = None,
    settings: Settings | None = None,
    providers: Sequence[Any] | None = None,
) -> Step:
    """Returns the step function: `TrainingSession.step` or `TrainingSession.run_steps`.

    Args:
        task: The task.
        optimizer: The optimizer of the trainable model to load.
        kernels: See `ortops.TrainingSession`.
        run_steps: Whether a call runs one step for each batch.
        sess_options: See `ortops.TrainingSession`; the default is the fastest.
        settings: See `ortops.TrainingSession`.
        providers: See `ortops.TrainingSession`.
    """
    if sess_options is None and os.cpu_count() != threads():
        import onnxruntime

        sess_options = onnxruntime.SessionOptions()
        sess_options.intra_op_num_threads = threads()
    session = TrainingSession(
        trainable(task, optimizer),
        kernels=kernels,
        sess_options=sess_options,
        settings=settings,
        providers=providers,
    )
    batches = task.batches()
    feeds = itertools.cycle(batches)
    shown = ["loss"] if task.network != UPDATE else []

    def step() -> Any:
        outputs = session.step(next(feeds), outputs=shown)
        return outputs["loss"].item() if shown else None

    def steps() -> Any:
        return session.run_steps(batches)

    def parameters() -> Any:
        return {name: session.state[name] for name in task.weights()}

    if run_steps:
        return Step(steps, parameters, len(batches))
    return Step(step, parameters)
