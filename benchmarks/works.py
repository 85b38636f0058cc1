"""The workloads, with targets: training steps, steps of exported files, and updates alone."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from benchmarks import exported
from benchmarks.task import BATCHES, OPTIMIZERS, UPDATE, Array, Task

if TYPE_CHECKING:
    import onnx

__all__ = [
    "DEPTHS",
    "DEPTH_WORKS",
    "WORKS",
    "Export",
    "TrainingStep",
    "Update",
    "Work",
    "find",
    "fits",
    "transformer",
    "write",
]


@dataclass(frozen=True)
class TrainingStep:
    """A training step of a classifier: forward, loss, backward, update.

    Batches are numpy arrays, and the loss is read in each step.

    Attributes:
        build: Returns the inference model with its initial weights.
        sample: The shape of the model's input, without the batch.
        batch: The batch size.
        target: The target ratio of the time of `TrainingSession.step` to the best peer's.
        run_steps: The same for `TrainingSession.run_steps`.
        heads: The number of attention heads, which cannot be inferred from shapes.
    """

    build: Callable[[], onnx.ModelProto]
    sample: tuple[int, ...]
    batch: int
    target: float | None = None
    run_steps: float | None = None
    heads: int = 4

    # Adam hides gradients of wrong scale and amplifies rounding. Momentum does neither, and it is
    # the same in the specification and in PyTorch, so it allows a tight tolerance. The timed steps
    # are checked as well, with a larger tolerance.
    checked_optimizer = "Momentum"
    # For float32, different orders of summation, and steps that amplify the differences.
    tolerance = 1e-4
    timed_tolerance = 3e-2
    memory_target = 0.6

    def network(self) -> str:
        """Returns the name of the model's graph."""
        return str(self.build().graph.name)

    def weights(self) -> dict[str, Array]:
        """Returns the initial weights by name."""
        from onnx import numpy_helper

        return {each.name: numpy_helper.to_array(each) for each in self.build().graph.initializer}

    def batches(self) -> list[dict[str, Array]]:
        """Returns batches of random samples and labels."""
        rng = np.random.default_rng(0)
        name = self.build().graph.input[0].name
        return [
            {
                name: rng.standard_normal((self.batch, *self.sample), np.float32),
                "labels": rng.integers(0, 10, self.batch),
            }
            for _ in range(BATCHES)
        ]

    def trainable(self, optimizer: str) -> onnx.ModelProto:
        """Returns the model with its training algorithm."""
        import ortops

        chosen = getattr(ortops.optimizers, optimizer)(**OPTIMIZERS[optimizer])
        return ortops.build_training_model(
            self.build(), loss="SoftmaxCrossEntropy", optimizer=chosen
        )


@dataclass(frozen=True)
class Export:
    """A training step of a real architecture, from an exporter's file.

    Start-up includes building the trainable model. It has the attributes of `TrainingStep`, and:

    Attributes:
        name: A network in `benchmarks.exported.NETWORKS`.
        exporter: An exporter in `benchmarks.exported.EXPORTERS`.
        tolerance: The tolerance of the checked steps.
    """

    name: str
    exporter: str
    batch: int
    target: float | None = None
    tolerance: float = TrainingStep.tolerance

    checked_optimizer = TrainingStep.checked_optimizer
    timed_tolerance = TrainingStep.timed_tolerance
    run_steps = None
    memory_target = 0.7
    heads = 0

    def missing(self) -> str:
        """Returns which package for the export is not installed; empty if all are."""
        packages = ("torch", "transformers", "onnxscript")
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"not installed: {', '.join(absent)}" if absent else ""

    def network(self) -> str:
        """Returns the name of the network."""
        return self.name

    def weights(self) -> dict[str, Array]:
        """Returns the initial weights by the names of PyTorch's module."""
        return exported.initial_weights(self.name)

    def batches(self) -> list[dict[str, Array]]:
        """Returns batches of random samples and labels; only a few, because they are large."""
        rng = np.random.default_rng(0)
        return [exported.NETWORKS[self.name].batch(rng, self.batch) for _ in range(4)]


@dataclass(frozen=True)
class Update:
    """An update of all parameters; gradients are numpy arrays.

    Attributes:
        parameters: The number of parameters.
        tensors: The number of tensors of equal size that they are split into.
        target: The target ratio of the time of `TrainingSession.step` to a loop in C.
    """

    parameters: int
    tensors: int = 1
    target: float | None = None

    # The timed optimizer is also the checked one, because the updates themselves are compared.
    checked_optimizer = None
    # Allows a few roundings of float32 in each update.
    tolerance = timed_tolerance = 1e-5
    run_steps = None
    memory_target = 0.6
    heads = 4

    def network(self) -> str:
        """Returns the name that means no network."""
        return UPDATE

    def weights(self) -> dict[str, Array]:
        """Returns the parameters before the first update, by name."""
        # As small as the steps, so that a wrong step is larger than the rounding of a parameter.
        scale = np.float32(1e-2)
        all_of_them = scale * np.random.default_rng(0).standard_normal(self.parameters, np.float32)
        return {f"w{i}": part for i, part in enumerate(np.split(all_of_them, self.tensors))}

    def batches(self) -> list[dict[str, Array]]:
        """Returns two sets of gradients, none of which is near zero.

        Near zero, the specification's Adam and PyTorch's differ, because ε is added before bias
        correction in one and after it in the other.
        """
        rng = np.random.default_rng(1)
        size = rng.random(self.parameters, np.float32) + np.float32(0.5)
        g = np.where(rng.random(self.parameters) < 0.5, size, -size)
        # Constant gradients would hide the coefficients of Adam.
        return [
            {f"w{i}_gradient": part for i, part in enumerate(np.split(each, self.tensors))}
            for each in (g, np.float32(0.5) * g[::-1])
        ]

    def trainable(self, optimizer: str) -> onnx.ModelProto:
        """Returns a model whose training algorithm is only the update."""
        from onnx import helper

        import ortops
        from ortops import Tape, op

        weights = self.weights()
        with Tape(name=UPDATE) as tape:
            parts = [tape.initializer(name, array) for name, array in weights.items()]
            sums = [op.ReduceSum(part, keepdims=0) for part in parts]
            tape.output(sums[0] if len(sums) == 1 else op.Sum(*sums), "y")
        chosen = getattr(ortops.optimizers, optimizer)(**OPTIMIZERS[optimizer])
        model = ortops.build_training_model(
            tape.model(), loss=lambda y: op.Identity(y), optimizer=chosen
        )
        # The nodes that compute gradients are removed; gradients become inputs.
        algorithm = model.training_info[0].algorithm
        gone = {"loss", *(f"{name}_gradient" for name in weights)}
        for values in (algorithm.node, algorithm.output, algorithm.value_info):
            kept = [
                value for value in values if gone.isdisjoint(getattr(value, "output", [value.name]))
            ]
            del values[:]
            values.extend(kept)
        algorithm.input.extend(
            helper.make_tensor_value_info(f"{name}_gradient", 1, array.shape)
            for name, array in weights.items()
        )
        del model.metadata_props[:]
        return model


Work: TypeAlias = TrainingStep | Export | Update


def _mlp(*sizes: int) -> onnx.ModelProto:
    from models.mlp import mlp

    return mlp(sizes)


def _lenet() -> onnx.ModelProto:
    from models.lenet import lenet

    return lenet((1, 28, 28))


def _resnet() -> onnx.ModelProto:
    from models.resnet import resnet

    return resnet((3, 3, 3), image=(3, 32, 32))


def transformer(depth: int) -> onnx.ModelProto:
    """Returns a transformer of d 256 with 4 heads, for sequences of 128."""
    from models.transformer import transformer

    return transformer(64, length=128, width=256, heads=4, hidden=1024, depth=depth)


def _lstm() -> onnx.ModelProto:
    from models.lstm import lstm

    return lstm(64, width=128)


_TRAINED = (
    ("ResNet-20 32×32, batch 32", "resnet20", 32, 0.7, 1e-4),
    ("BERT 6 layers d 384, 16×64", "bert", 16, 1.0, 1e-4),
    # Live normalization of 52 layers amplifies rounding: PyTorch's own loss after one step is off
    # by 1.2 % in float32.
    ("MobileNetV2 224, batch 8", "mobilenet", 8, 0.7, 3e-2),
    ("GPT-2 6 layers d 512, 4×128", "gpt2", 4, 1.0, 1e-4),
    ("ViT 6 layers d 192, 224/16, batch 8", "vit", 8, 1.0, 1e-4),
    ("ConvNeXt 48-96-192-384 128, batch 8", "convnext", 8, 1.0, 1e-4),
    ("U-Net 16-128 96, batch 4", "unet", 4, 1.0, 1e-5),
    ("Llama 6 layers d 384, 2×256", "llama", 2, 1.0, 1e-4),
    ("EfficientNet-B0 128, batch 8", "efficientnet", 8, 0.7, 1e-5),
    ("speech, 2 GRUs d 128, 8×200", "speech", 8, 1.0, 1e-6),
)
"""Networks that are exported in training mode: title, name, batch size, target and tolerance, which
is small where the loss changes little in a few steps."""


def _in_training_mode() -> dict[str, Work]:
    found: dict[str, Work] = {}
    for title, name, *settings in _TRAINED:
        for exporter in exported.EXPORTERS:
            if exporter == "dynamo" or name not in ("gpt2", "llama"):  # TorchScript fails there
                work = Export(f"{name} in training mode", exporter, *settings)
                found[f"{title}, training mode, {exporter}'s file"] = work
    return found


WORKS: Mapping[str, Work] = {
    "MLP 784-128-10, batch 32": TrainingStep(
        partial(_mlp, 784, 128, 10), (784,), 32, target=0.6, run_steps=0.35
    ),
    "MLP 784-1024-1024-10, batch 128": TrainingStep(
        partial(_mlp, 784, 1024, 1024, 10), (784,), 128, target=1.0
    ),
    "LeNet 28×28, batch 64": TrainingStep(_lenet, (1, 28, 28), 64, target=0.85),
    "ResNet-20 32×32, batch 32": TrainingStep(_resnet, (3, 32, 32), 32, target=1.0),
    "2 transformer blocks, d 256, sequence 128, batch 8": TrainingStep(
        partial(transformer, 2), (128, 64), 8, target=0.9
    ),
    "LSTM 64→128, sequence 50, batch 32": TrainingStep(_lstm, (50, 64), 32, target=1.0),
    "BERT 6 layers d 384, 16×64, TorchScript's file": Export("bert", "TorchScript", 16, 0.7),
    "BERT 6 layers d 384, 16×64, dynamo's file": Export("bert", "dynamo", 16, 0.7),
    "MobileNetV2 224, batch 8, TorchScript's file": Export("mobilenet", "TorchScript", 8, 0.8),
    "MobileNetV2 224, batch 8, dynamo's file": Export("mobilenet", "dynamo", 8, 0.8),
    # The TorchScript exporter cannot write it.
    "GPT-2 6 layers d 512, 4×128, dynamo's file": Export("gpt2", "dynamo", 4, 0.7),
    **_in_training_mode(),
    "update of 1e6 parameters": Update(10**6),
    "update of 1e7 parameters": Update(10**7, target=2.0),
    "update of 1e7 parameters in 100 tensors": Update(10**7, tensors=100, target=2.0),
}
"""All workloads that are compared with peers, by their names in tables."""

DEPTHS = (4, 8, 16, 32, 64)

DEPTH_WORKS: Mapping[str, Work] = {
    f"MLP of {depth} layers": TrainingStep(partial(_mlp, 64, *[64] * (depth - 1), 10), (64,), 32)
    for depth in DEPTHS
}
"""Workloads that show whether the time is linear in depth; the layers fit in the cache."""


def write(work: Work, folder: str, optimizers: Iterable[str]) -> None:
    """Writes a workload to a folder, as a `benchmarks.task.Task`.

    Args:
        work: The workload.
        folder: An empty folder.
        optimizers: Names in `benchmarks.task.OPTIMIZERS`.
    """
    task = Task(folder, work.network(), work.heads, exported=isinstance(work, Export))
    task.write(work.weights(), work.batches())
    if isinstance(work, Export):
        exported.export(work.name, work.exporter, task.file())
        return
    for optimizer in optimizers:
        task.trainable(optimizer).write_bytes(work.trainable(optimizer).SerializeToString())


def fits(name: str, texts: Sequence[str]) -> bool:
    """Whether a name contains one of the texts at the start of a word, ignoring case.

    Any name fits if there are no texts.
    """
    starts = (rf"(?<![^\W_]){re.escape(text)}" for text in texts or [""])
    return any(re.search(start, name, re.IGNORECASE) for start in starts)


def find(texts: Sequence[str]) -> list[str]:
    """Returns the names in `WORKS` that `fits` accepts."""
    return [name for name in WORKS if fits(name, texts)]
