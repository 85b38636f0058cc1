"""What `benchmarks.machine_report` measures: each function runs in a process of its own.

``python -m benchmarks.measurements FUNCTION ARGUMENTS`` is that process. The arguments are a JSON
object, and so is the last line that it prints: the result, or ``{"failed": why}``.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks import machine

if TYPE_CHECKING:
    import onnx

    from ortops.engine.execution.settings import Settings

__all__ = [
    *("BOUNDS", "FUNCTIONS", "LANGUAGE", "PACKAGES", "correctness", "describe", "language"),
    *("options_of", "products", "ranks", "speed"),
]

Result: TypeAlias = dict[str, Any]

PACKAGES = (
    *("numpy", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-ep-webgpu"),
    *("onnxruntime-extensions", "torch", "transformers", "peft", "onnxscript", "llvmlite"),
    *("mpi4py", "mpich"),
)

CPU = "CPUExecutionProvider"

_OPTIONS: Mapping[str, Mapping[str, str]] = {
    # The arena would otherwise take the next power of two, and TF32 is off in PyTorch, too.
    "CUDAExecutionProvider": {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"},
}

_WITHOUT_KERNELS = {"AzureExecutionProvider": "it calls a service and computes nothing itself"}

BOUNDS: Mapping[str, float] = {"float16": 2e-2, "float32": 2e-4, "float64": 2e-4}
"""How much losses and parameters may differ from the CPU's in float32, relative to the largest."""

STEPS, SAVED = 20, 10
"""The number of steps that are compared, and after how many the session is saved and resumed."""

LANGUAGE: Mapping[str, Mapping[str, int]] = {
    "0.1·10⁹": {"layers": 8, "hidden": 768, "heads": 12, "pairs": 4, "wide": 2048},
    "1.1·10⁹": {},
    "3·10⁹": {"layers": 26, "hidden": 3072, "heads": 24, "pairs": 8, "wide": 8192},
    "8·10⁹": {"layers": 32, "hidden": 4096, "heads": 32, "pairs": 8, "wide": 14336},
}
"""The sizes of language models, as far as they differ from `benchmarks.language.Sizes`."""


def options_of(provider: str) -> list[tuple[str, dict[str, str]]]:
    """Returns a provider with its options, as a session takes them."""
    return [(provider, dict(_OPTIONS.get(provider, {})))]


def describe() -> Result:
    """Returns what the machine is: versions, CPU, cores, card, driver, and which providers work.

    A provider works if a session that is made with it lists it first. The others have a reason.
    """
    card = machine.Card()
    found: Result = {
        "versions": machine.versions(PACKAGES),
        "cpu": machine.cpu(),
        "cores": _cores(),
        "card": card.name,
        "driver": card.driver,
        "card_megabytes": card.megabytes,
    }
    try:
        import onnxruntime
        from onnxruntime.capi import build_and_package_info
    except ImportError as error:
        return found | {"providers": {}, "unusable": {"all": f"no onnxruntime: {error}"}}
    found["versions"].pop("onnxruntime", None)  # of another installation, behind this one
    package = getattr(build_and_package_info, "package_name", "onnxruntime")
    found["versions"][package] = onnxruntime.__version__
    if found["versions"].get("torch"):
        found["torch"] = _torch_devices()
    from ortops.engine.execution.providers import WEBGPU, why_unusable

    found["providers"], found["unusable"] = [CPU], {}
    for name in dict.fromkeys([*onnxruntime.get_available_providers(), WEBGPU]):
        if name == CPU:
            continue
        try:
            why = _WITHOUT_KERNELS.get(name) or why_unusable(options_of(name)[0])
        except Exception as error:  # of whatever kind: the next provider may work
            why = _first_line(error)
        if why:
            found["unusable"][name] = why
        else:
            found["providers"].insert(-1, name)
    if not card.name and WEBGPU in found["providers"]:
        found["card"] = _webgpu_card()
    return found


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _torch_devices() -> str:
    """Returns the device on which PyTorch trains."""
    try:
        import torch
    except Exception as error:  # a library that it needs may be missing
        return f"cannot be imported: {_first_line(error)}"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _webgpu_card() -> str:
    """Returns the vendor of the device of WebGPU; "" for one in software."""
    import onnxruntime

    from ortops.engine.execution.providers import WEBGPU

    kinds = onnxruntime.OrtHardwareDeviceType
    for each in onnxruntime.get_ep_devices():
        if each.ep_name == WEBGPU and each.device.type != kinds.CPU:
            return f"{each.device.vendor or 'a card'} with WebGPU"
    return ""


# ------------------------------------------------------------------------------------ correctness


def _built(model: str) -> tuple[onnx.ModelProto, tuple[int, ...], Mapping[str, Any]]:
    """Returns a model, the shape of a sample, and how it is trained in float32."""
    from models.lenet import lenet
    from models.lstm import lstm
    from models.mlp import mlp
    from models.transformer import transformer

    adam_w = {"optimizer": "AdamW", "clip_norm": 1.0}
    return {
        "MLP": lambda: (mlp((64, 128, 10)), (64,), {"optimizer": "Adam"}),
        "LeNet": lambda: (lenet((1, 8, 8)), (1, 8, 8), {"optimizer": "Momentum"}),
        "transformer block": lambda: (transformer(depth=1), (8, 8), adam_w),
        "LSTM": lambda: (lstm(8, width=32), (8, 8), {"optimizer": "Momentum"}),
    }[model]()


def _in_type(model: onnx.ModelProto, dtype: str) -> onnx.ModelProto:
    """Returns a model with all its floats in another type."""
    import onnx_ir as ir

    from ortops.graph.element_types import replace_type

    held, new = ir.from_proto(model), ir.DataType.from_numpy(np.dtype(dtype))
    for old in {ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE} - {new}:
        replace_type(
            held.graph,
            old,
            new,
            lambda tensor: ir.tensor(tensor.numpy().astype(dtype), name=tensor.name),
        )
    return ir.to_proto(held)


def correctness(
    model: str, provider: str, dtype: str = "float32", settings: Settings | None = None
) -> Result:
    """Compares steps on a provider with those on the CPU without onnxruntime's optimizations.

    Args:
        model: The name of a model.
        provider: The name of the provider.
        dtype: The type of the model on the provider. On the CPU, it has the same values in float32.
        settings: See `ortops.TrainingSession`.

    Returns:
        The largest differences of ``losses`` and ``parameters``, relative to the largest value, and
        their ``bound``; whether a session that was saved and resumed made ``resumed`` equal losses
        within the bound, and ``resumed_bits`` equal bits; ``agrees``, if all that holds; how many
        ``nodes`` a step has, and which of them run ``on_cpu``, by operator.
    """
    import onnxruntime

    import ortops

    inference, shape, arguments = _built(model)
    if dtype != "float32":
        inference = _in_type(inference, dtype)
        # Squares of gradients, as in Adam, are too small for float16.
        arguments = {"optimizer": ortops.optimizers.Momentum(0.003)}
    rng = np.random.default_rng(0)
    name = inference.graph.input[0].name
    batches = [
        {
            name: rng.standard_normal((16, *shape), np.float32).astype(dtype),
            "labels": rng.integers(0, 10, 16),
        }
        for _ in range(4)
    ]

    def trainable(kind: str) -> onnx.ModelProto:
        # From float16 to float32, so that both begin with the same values.
        given = inference if kind == dtype else _in_type(inference, "float32")
        return ortops.build_training_model(given, loss="SoftmaxCrossEntropy", **arguments)

    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    cpu = ortops.TrainingSession(trainable("float32"), sess_options=plain, kernels="onnx")
    in_float32 = [
        {key: array.astype(np.float32) if key == name else array for key, array in batch.items()}
        for batch in batches
    ]
    expected = _losses(cpu, in_float32, range(STEPS))
    providers = options_of(provider)
    session = ortops.TrainingSession(trainable(dtype), providers=providers, settings=settings)
    losses = _losses(session, batches, range(SAVED))
    with tempfile.TemporaryDirectory() as folder:
        session.save(f"{folder}/saved.onnx")
        resumed = ortops.TrainingSession(
            f"{folder}/saved.onnx", providers=providers, settings=settings
        )
    losses += _losses(session, batches, range(SAVED, STEPS))
    again = _losses(resumed, batches, range(SAVED, STEPS))
    bound = BOUNDS[dtype]
    parameters = [
        np.concatenate([each.parameters[key].ravel() for key in sorted(cpu.parameters)])
        for each in (session, cpu)
    ]
    found: Result = {
        "losses": _difference(losses, expected),
        "parameters": _difference(*parameters),
        "bound": bound,
        "resumed": _difference(again, losses[SAVED:]) <= bound,
        "resumed_bits": again == losses[SAVED:],
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    found["agrees"] = (
        max(found["losses"], found["parameters"]) <= bound
        and found["resumed"]
        and losses[-1] < losses[0]
    )
    return found | _placed(session)


def _losses(session: Any, batches: Sequence[Mapping[str, Any]], numbers: range) -> list[float]:
    return [
        float(session.step(batches[number % len(batches)], outputs=["loss"])["loss"])
        for number in numbers
    ]


def _difference(found: Any, expected: Any) -> float:
    """Returns the largest difference, relative to the largest value; infinite for NaN."""
    a, b = (np.asarray(each, np.float64) for each in (found, expected))
    if np.isnan(a).any():
        return float("inf")
    return float(np.abs(a - b).max() / np.abs(b).max())


def _placed(session: Any) -> Result:
    from ortops.errors import OrtopsError

    try:
        nodes = session._execution.nodes()
    except OrtopsError as error:
        return {"nodes": 0, "on_cpu": {}, "placement": _first_line(error)}
    fallen = collections.Counter(node.operator for node in nodes if node.provider == CPU)
    return {"nodes": len(nodes), "on_cpu": dict(fallen.most_common())}


# ------------------------------------------------------------------------------------------ speed


def speed(
    work: str,
    folder: str,
    provider: str,
    device: str = "cpu",
    threads: int = 0,
    times: int = 1,
    compiled: bool = False,
    quick: bool = False,
) -> Result:
    """Times steps of ortops and of PyTorch, in turns.

    Args:
        work: A name in `benchmarks.works.WORKS`.
        folder: Where the workload is, or is to be written.
        provider: Where ortops trains.
        device: Where PyTorch trains.
        threads: The number of threads of each; by default one for each core.
        times: The factor of the batch size.
        compiled: Whether ``torch.compile`` takes part.
        quick: Whether to measure only that it works.

    Returns:
        The median ``milliseconds`` by peer; the median ``ratio`` of ortops to each other peer, by
        peer; the largest ``difference`` of the first losses, relative to the largest loss; and
        ``missing``, the reasons of peers that could not take part.
    """
    from benchmarks import measure, works
    from benchmarks.peers import COMPILED, LOWERED, PEERS, TORCH
    from benchmarks.task import Task

    chosen = works.WORKS[work]
    if isinstance(chosen, works.Export) and (reason := chosen.missing()):
        return {"failed": reason}
    threads = threads or _cores()
    task = Path(folder)
    if not (task / "task.json").exists():
        task.mkdir(parents=True)
        larger = replace(chosen, batch=times * chosen.batch)  # type: ignore[type-var, union-attr]
        with measure.worker(threads) as submit:
            submit(works.write, larger, folder, ["Adam"]).result()
    network = Task.read(folder)
    ours = COMPILED if provider == CPU and not PEERS[COMPILED].missing() else LOWERED
    peers = [ours, TORCH, *(["torch.compile"] if compiled else [])]
    missing = {peer: why for peer in peers if (why := PEERS[peer].missing())}
    contestants = {
        peer: measure.Contestant(
            folder,
            peer,
            "Adam",
            threads=threads,
            options={"providers": options_of(provider)} if peer == ours else {"device": device},
        )
        for peer in peers
        if peer not in missing and PEERS[peer].does(network.network, "Adam", network.exported)
    }
    effort = measure.QUICK if quick else measure.Effort(rounds=7, turn=0.2)
    found = measure.measure(contestants, effort)
    others = [peer for peer in found if peer != ours]
    return {
        "milliseconds": {p: 1e3 * statistics.median(r.seconds) for p, r in found.items()},
        "ratio": {p: statistics.median(found[ours].ratios(found[p])) for p in others},
        "difference": max((found[ours].timed_difference(found[p]) for p in others), default=None),
        "threads": threads,
        "missing": missing,
    }


def ranks(folder: str, threads: int, work: str = "") -> Result:
    """Times steps of two MPI processes with half of the batch and of the threads each, and of one.

    Args:
        folder: A workload that `speed` has written.
        threads: The number of threads of both processes together.
        work: The name of the workload, which is written if it is not there yet.

    Returns:
        The median ``milliseconds`` by case, such as ``2x8``, and the ``ratio`` of two processes to
        one by the case of the latter.
    """
    from benchmarks import distributed, measure, works

    if not distributed.mpiexec():
        return {"failed": "mpiexec was not found (pip install ortops[distributed])"}
    if not Path(folder, "task.json").exists():
        Path(folder).mkdir(parents=True)
        with measure.worker(threads) as submit:
            submit(works.write, works.WORKS[work], folder, ["Adam"]).result()
    two, one = f"2x{threads // 2}", f"1x{threads}"
    found = {case: 1e3 * distributed.start(folder, case)["seconds"] for case in (two, one)}
    return {"milliseconds": found, "ratio": {one: found[two] / found[one]}}


def products(threads: int) -> Result:
    """Returns the speeds of matrix products, in GFLOP/s, and of memory, in GB/s."""
    from benchmarks import ideal, measure

    with measure.worker(threads) as submit:
        found = submit(machine.product_speeds).result()
        return {"products": found, "memory": submit(ideal.memory_speed).result() / 1e9}


# --------------------------------------------------------------------------------------- language


def language(
    size: str,
    length: int,
    folder: str,
    peer: str = "ortops",
    provider: str = CPU,
    device: str = "cpu",
    dtype: str = "float16",
    steps: int = 6,
    sizes: Mapping[str, int] | None = None,
) -> Result:
    """Times LoRA steps of a language model in int4, or of one in bfloat16 with PyTorch and PEFT.

    Args:
        size: A key of `LANGUAGE`.
        length: The number of tokens.
        folder: Where the model is, or is to be written.
        peer: ``ortops`` or ``torch``.
        provider: Where ortops trains.
        device: Where PyTorch trains.
        dtype: The type of what is not quantized.
        steps: The number of steps; the first is not counted.
        sizes: Sizes other than `LANGUAGE`, for tests.

    Returns:
        ``seconds`` per step, ``tokens`` per second, and ``megabytes``, the peak of the process in
        the memory of the machine.
    """
    from benchmarks import language as models

    given = {"context": 2048, **LANGUAGE[size], **(sizes or {})}
    options = [f"--{name}={value}" for name, value in given.items()]
    settings = models.parse(
        [folder, *options, f"--dtype={dtype}", f"--length={length}", f"--steps={steps}"]
    )
    settings = argparse.Namespace(
        **vars(settings) | {"peer": peer, "providers": options_of(provider), "device": device}
    )
    held = models.sizes_of(settings)
    if peer == "ortops" and not (settings.folder / "genai_config.json").exists():
        models.write(folder, held)
    return models.run(settings) | {"parameters": held.parameters}


FUNCTIONS: Mapping[str, Callable[..., Result]] = {
    each.__name__: each for each in (correctness, describe, language, products, ranks, speed)
}


def _first_line(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main(name: str, arguments: str) -> None:
    """Runs one measurement; prints the result as JSON."""
    try:
        found = FUNCTIONS[name](**json.loads(arguments))
    except Exception as error:
        traceback.print_exc()
        found = {"failed": _first_line(error)[:400]}
    print(json.dumps(found, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main(*itertools.islice(sys.argv, 1, 3))
