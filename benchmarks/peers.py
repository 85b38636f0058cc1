"""Who does the work: numpy, ortops in its two ways, and PyTorch.

A peer turns a work into a step: a function that makes one step when it is called and returns what a
person would read, the loss of a training step or the new value of a parameter. To add a peer, write
its two functions, or one of them, and name them in `PEERS`.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks.measure import THREADS
from benchmarks.works import OptimizerStep, TrainingStep, Work
from ortops import optimizers

if TYPE_CHECKING:
    import onnx
    import onnxruntime

__all__ = [
    "LOWERED",
    "OPTIMIZERS",
    "PEERS",
    "TORCH",
    "UPDATE_RATE",
    "Peer",
    "Step",
    "ortops_training_step",
    "session_options",
]

Step: TypeAlias = Callable[[], Any]

LOWERED = "standard operators"
TORCH = "torch eager, fused"

OPTIMIZERS: Mapping[str, tuple[Callable[[], optimizers.Optimizer], str, dict[str, float]]] = {
    "Adam": (optimizers.Adam, "Adam", {"eps": 1e-8}),
    "Momentum": (optimizers.Momentum, "SGD", {"momentum": 0.9}),
    "Adagrad": (optimizers.Adagrad, "Adagrad", {"eps": 1e-6}),
}
"""The optimizer of ortops at its defaults, and the one of PyTorch with the same settings."""

UPDATE_RATE = 0.1
"""The learning rate of single updates: a wrong one shows beside the rounding of the parameter."""


@dataclass(frozen=True)
class Peer:
    """Somebody who can do a work.

    Attributes:
        optimizer_step: Makes the step of an `OptimizerStep` with an optimizer of `OPTIMIZERS`.
        training_step: The same for a `TrainingStep`.
        package: What must be installed.
    """

    optimizer_step: Callable[[OptimizerStep, str], Step] | None = None
    training_step: Callable[[TrainingStep, str], Step] | None = None
    package: str = "ortops"

    def does(self, work: Work) -> bool:
        """Tells whether it can do a work here."""
        made_by = self.optimizer_step if isinstance(work, OptimizerStep) else self.training_step
        return made_by is not None and importlib.util.find_spec(self.package) is not None

    def step(self, work: Work, optimizer: str) -> Step:
        """Returns the step of a work that it `does`."""
        if isinstance(work, OptimizerStep):
            assert self.optimizer_step is not None
            return self.optimizer_step(work, optimizer)
        assert self.training_step is not None
        return self.training_step(work, optimizer)


# ---------------------------------------------------------------------------------------- numpy


def _numpy_optimizer_step(work: OptimizerStep, optimizer: str) -> Step:
    """The update rule on whole numpy arrays."""
    ours = OPTIMIZERS[optimizer][0]()
    x, gradients = work.arrays()
    values = [x, *(np.zeros_like(x) for _ in ours.states)]
    rate, counter = np.float32(UPDATE_RATE), itertools.count(ours.first_step)
    gradient = itertools.cycle(gradients)

    def step() -> Any:
        x, *state = values
        values[:] = ours.update(rate, np.int64(next(counter)), x, next(gradient), *state)
        return values[0]

    return step


# --------------------------------------------------------------------------------------- ortops


def session_options() -> onnxruntime.SessionOptions:
    """Returns what every session is made with."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    return options


def _value(array: Any) -> onnxruntime.OrtValue:
    """Returns a copy as an OrtValue, which owns its memory."""
    import onnxruntime

    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype)
    value.update_inplace(array)
    return value


def _optimizer_model(optimizer: optimizers.Optimizer, parameters: int) -> onnx.ModelProto:
    """Returns a model with one optimizer node, from R, T, X, G and state to X_new and new state."""
    from onnx import TensorProto, helper

    assert optimizer.operator is not None
    tensors = ["X", "G", *optimizer.states]
    inputs = [
        helper.make_tensor_value_info("R", TensorProto.FLOAT, []),
        helper.make_tensor_value_info("T", TensorProto.INT64, []),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [parameters]) for name in tensors),
    ]
    outputs = [
        helper.make_tensor_value_info(f"{name}_new", TensorProto.FLOAT, [parameters])
        for name in ("X", *optimizer.states)
    ]
    node = helper.make_node(
        optimizer.operator,
        [value.name for value in inputs],
        [value.name for value in outputs],
        domain="ai.onnx.preview.training",
        **optimizer.operator_attributes,
    )
    return helper.make_model(
        helper.make_graph([node], "update", inputs, outputs),
        opset_imports=[
            helper.make_opsetid("", 21),
            helper.make_opsetid("ai.onnx.preview.training", 1),
        ],
        ir_version=10,
    )


def _ortops_optimizer_step(work: OptimizerStep, optimizer: str, kernels: Any) -> Step:
    """An optimizer node in a session, as a training loop of one's own would run it."""
    import ortops

    ours = OPTIMIZERS[optimizer][0]()
    model = _optimizer_model(ours, work.parameters)
    session = ortops.InferenceSession(model, session_options(), kernels=kernels)
    x, gradients = work.arrays()
    variables = ["X", *ours.states]
    outputs = [f"{name}_new" for name in variables]
    values = {name: _value(np.zeros_like(x)) for name in ours.states}
    values |= {"R": _value(np.asarray(UPDATE_RATE, np.float32)), "X": _value(x)}
    counter = itertools.count(ours.first_step)
    gradient = itertools.cycle([_value(g) for g in gradients])

    def step() -> Any:
        values["T"] = _value(np.asarray(next(counter), np.int64))
        values["G"] = next(gradient)
        results = session.run_with_ort_values(outputs, values)
        values.update(zip(variables, results, strict=True))
        return values["X"]

    return step


def ortops_training_step(
    work: TrainingStep,
    optimizer: str,
    kernels: Any,
    options: onnxruntime.SessionOptions | None = None,
) -> Step:
    """TrainingSession.step."""
    import ortops

    model = work.build()
    trainable = ortops.build_training_model(
        model, loss="SoftmaxCrossEntropy", optimizer=OPTIMIZERS[optimizer][0]()
    )
    session = ortops.TrainingSession(
        trainable, kernels=kernels, sess_options=options or session_options()
    )
    name, batches = model.graph.input[0].name, work.batches()

    def step() -> Any:
        samples, labels = next(batches)
        return session.step({name: samples, "labels": labels})["loss"]

    return step


# ---------------------------------------------------------------------------------------- torch


def _torch_optimizer(optimizer: str, parameters: Any, rate: float) -> Any:
    import torch

    torch.set_num_threads(THREADS)
    _, name, settings = OPTIMIZERS[optimizer]
    return getattr(torch.optim, name)(parameters, lr=rate, fused=True, **settings)


def _torch_optimizer_step(work: OptimizerStep, optimizer: str) -> Step:
    """The fused optimizer on a tensor that has its gradient."""
    import torch

    start, gradients = work.arrays()
    x = torch.from_numpy(start)
    gradient = itertools.cycle(map(torch.from_numpy, gradients))
    update = _torch_optimizer(optimizer, [x], UPDATE_RATE)

    def step() -> Any:
        x.grad = next(gradient)
        update.step()
        return x

    return step


def _torch_training_step(work: TrainingStep, optimizer: str) -> Step:
    """An eager step of PyTorch's own modules with the same weights."""
    import torch

    from models.torch_twins import twin

    module = twin(work.build(), heads=work.heads).train()
    rate = OPTIMIZERS[optimizer][0]().learning_rate
    update = _torch_optimizer(optimizer, module.parameters(), rate)
    batches = work.batches()

    def step() -> Any:
        samples, labels = next(batches)
        logits = module(torch.from_numpy(samples))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
        update.zero_grad()
        loss.backward()
        update.step()
        return loss.item()

    return step


PEERS: Mapping[str, Peer] = {
    TORCH: Peer(_torch_optimizer_step, _torch_training_step, package="torch"),
    LOWERED: Peer(
        lambda work, optimizer: _ortops_optimizer_step(work, optimizer, "onnx"),
        lambda work, optimizer: ortops_training_step(work, optimizer, "onnx"),
    ),
    "Python custom ops": Peer(
        lambda work, optimizer: _ortops_optimizer_step(work, optimizer, "python"),
        lambda work, optimizer: ortops_training_step(work, optimizer, "python"),
    ),
    "numpy": Peer(_numpy_optimizer_step),
}
"""Everybody who is measured, by the name that the table shows."""
