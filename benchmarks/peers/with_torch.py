"""PyTorch: its modules or modules of transformers, the same weights, and fused optimizers."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks.peers import Step
from benchmarks.task import OPTIMIZERS, UPDATE, Task, threads
from models.torch_twins import module


def make(task: Task, optimizer: str, *, compiled: bool = False, device: str = "cpu") -> Step:
    """Returns the step function, eager or with loss and gradient compiled.

    Args:
        task: The task.
        optimizer: The optimizer, in its fused implementation, which PyTorch does not compile.
        compiled: Whether to use ``torch.compile``.
        device: Where to train. Products have no TF32, as by default for matrices.
    """
    torch.set_num_threads(threads())
    torch.backends.cudnn.allow_tf32 = False
    if task.network == UPDATE:
        return _update(task, optimizer)
    return _training(task, optimizer, compiled, device)


def _training(task: Task, optimizer: str, compiled: bool, device: str) -> Step:
    axis = -1
    if task.exported:
        from benchmarks import exported

        axis = exported.NETWORKS[task.network].axis
        network = exported.module(task.network, task.weights())
    else:
        network = module(task.network, task.weights(), heads=task.heads).train()
    network.to(device)
    update = _optimizer(optimizer, network.parameters())
    batches = itertools.cycle(task.batches())

    def loss_of(samples: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = network(samples).movedim(axis, -1).flatten(0, -2)
        return torch.nn.functional.cross_entropy(logits, labels.flatten())

    if compiled:
        loss_of = torch.compile(loss_of)

    def step() -> Any:
        samples, labels = (torch.from_numpy(each).to(device) for each in next(batches).values())
        loss = loss_of(samples, labels)
        update.zero_grad()
        loss.backward()
        update.step()
        return loss.item()

    return Step(step, dict)


def _update(task: Task, optimizer: str) -> Step:
    parameters = {name: torch.from_numpy(array) for name, array in task.weights().items()}
    batches = itertools.cycle(task.batches())
    update = _optimizer(optimizer, parameters.values())

    def step() -> None:
        feeds = next(batches)
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(feeds[f"{name}_gradient"])
        update.step()

    return Step(step, lambda: {name: each.numpy() for name, each in parameters.items()})


def _optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    settings = OPTIMIZERS[name]
    rate, fused = settings["learning_rate"], {"fused": True}
    if name == "Adam":
        betas = (settings["alpha"], settings["beta"])
        return torch.optim.Adam(parameters, rate, betas, settings["epsilon"], **fused)
    if name == "Momentum":
        return torch.optim.SGD(parameters, rate, settings["alpha"], **fused)
    return torch.optim.Adagrad(parameters, rate, eps=settings["epsilon"], **fused)
