"""Compares `ortops.Function` with onnxruntime, and with other tools that compute gradients.

First, the time of a call of a small model next to that of `onnxruntime.InferenceSession.run`. Then
a loss and its gradient with respect to all weights: as a Function, as a module of PyTorch, in
PyTorch, JAX and onnx-ad. Each runs in a separate process, and processes take turns::

    python -m benchmarks.functions            # print Markdown tables
    python -m benchmarks.functions --write    # also write them to ortops/docs/functions.md

Fails if gradients differ.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks import measure, works
from benchmarks.peers import Step
from benchmarks.task import THREADS, Array

if TYPE_CHECKING:
    import onnx

__all__ = ["main"]

PAGE = Path(__file__).parents[1] / "ortops" / "docs" / "functions.md"
BEGIN, END = "<!-- benchmark: begin -->", "<!-- benchmark: end -->"

WORKS = (
    "MLP 784-128-10, batch 32",
    "LeNet 28×28, batch 64",
    "1 transformer block, d 256, sequence 128, batch 8",
)
TOLERANCE = 1e-2
"""The largest norm of a difference of gradients, relative to the norm of the gradient.

Rounding decides which of two almost equal elements is the largest of a pooling window.
"""

PACKAGES = ("onnxruntime", "torch", "jax", "onnx-ad")

Result: TypeAlias = tuple[Any, Mapping[str, Array]]
"""A loss, and the gradients of the weights."""


def work_of(name: str) -> works.TrainingStep:
    """Returns a network and its batches."""
    if name in works.WORKS:
        found = works.WORKS[name]
        assert isinstance(found, works.TrainingStep)
        return found
    return works.TrainingStep(partial(works.transformer, 1), (128, 64), 8)


def with_loss(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model whose output is the mean of the squares of its logits."""
    from onnx import helper

    (logits,) = model.graph.output
    model.graph.node.append(helper.make_node("Mul", [logits.name] * 2, ["squares"]))
    model.graph.node.append(helper.make_node("ReduceMean", ["squares"], ["loss"], keepdims=0))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", 1, []))
    return model


# ------------------------------------------------------------------------------------- the peers


def in_ortops(work: works.TrainingStep) -> Callable[[Array], Result]:
    """Returns `Function.value_and_grad`."""
    import ortops

    f = ortops.Function(with_loss(work.build()))
    names = list(f.parameters)

    def run(x: Array) -> Result:
        value, slopes = f.value_and_grad(x, wrt=names)
        return value, dict(zip(names, slopes, strict=True))

    return run


def in_a_module(work: works.TrainingStep) -> Callable[[Array], Result]:
    """Returns the backward pass of `Function.torch`, with the loss in PyTorch."""
    import ortops

    return _with_torch(ortops.Function(work.build()).torch())


def in_torch(work: works.TrainingStep) -> Callable[[Array], Result]:
    """Returns the backward pass of a module of PyTorch."""
    from models.torch_twins import module

    return _with_torch(module(work.network(), work.weights(), heads=work.heads))


def _with_torch(net: Any) -> Callable[[Array], Result]:
    import torch

    torch.set_num_threads(THREADS)
    weights = dict(net.named_parameters())

    def run(x: Array) -> Result:
        loss = net(torch.from_numpy(x)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()))
        return loss.item(), {n: s.numpy() for n, s in zip(weights, slopes, strict=True)}

    return run


def in_jax(work: works.TrainingStep) -> Callable[[Array], Result]:
    """Returns a compiled `jax.value_and_grad`."""
    import jax

    from benchmarks.peers import with_jax

    network: Any = {
        "mlp": with_jax._mlp,
        "lenet": with_jax._lenet,
        "transformer": partial(with_jax._transformer, heads=work.heads),
    }[work.network()]
    weights = {name: jax.numpy.array(array) for name, array in work.weights().items()}
    compute = jax.jit(jax.value_and_grad(lambda p, x: (network(p, x)[0] ** 2).mean()))

    def run(x: Array) -> Result:
        value, slopes = compute(weights, x)
        return value.item(), {name: np.asarray(each) for name, each in slopes.items()}

    return run


def in_onnx_ad(work: works.TrainingStep) -> Callable[[Array], Result]:
    """Returns a session of onnx-ad's reverse mode; weights must be inputs of it."""
    import onnx_ad
    import onnxruntime
    from onnx import helper

    model = with_loss(work.build())
    weights = work.weights()
    del model.graph.initializer[:]
    for name, array in weights.items():
        model.graph.input.append(helper.make_tensor_value_info(name, 1, array.shape))
    (samples, *_) = model.graph.input
    sizes = (work.batch, *work.sample)
    samples.CopyFrom(helper.make_tensor_value_info(samples.name, 1, sizes))
    del model.graph.value_info[:]
    options = onnxruntime.SessionOptions()  # its documentation says: without fusions
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    made = onnx_ad.reverse(model, layout="onnx")
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    one = np.ones(1, np.float32)
    outputs = ["loss", *(f"adj_{name}" for name in weights)]

    def run(x: Array) -> Result:
        value, *slopes = session.run(outputs, weights | {samples.name: x, "adj_loss": one})
        return value, {n: s[..., 0] for n, s in zip(weights, slopes, strict=True)}

    return run


PEERS: Mapping[str, Callable[[works.TrainingStep], Callable[[Array], Result]]] = {
    "`Function.value_and_grad`": in_ortops,
    "`Function.torch`": in_a_module,
    "torch eager": in_torch,
    "JAX": in_jax,
    "onnx-ad": in_onnx_ad,
}


# ------------------------------------------------------------------------- in a peer's process


def start(name: str, peer: str) -> dict[str, Array] | str:
    """Creates the function that this process times; returns its gradients, or why it cannot."""
    work = work_of(name)
    batches = [next(iter(batch.values())) for batch in work.batches()]
    try:
        run = PEERS[peer](work)
        value, slopes = run(batches[0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    turn = iter(range(2**62))
    measure._step = Step(lambda: run(batches[next(turn) % len(batches)]), dict)
    return {name: np.array(each) for name, each in slopes.items()} | {"loss": np.array(value)}


def overheads(rounds: int, calls: int = 1000) -> tuple[float, float, float]:
    """Returns the median µs of a call: in onnxruntime, by Function and by its module."""
    import time

    import onnxruntime
    import torch

    import ortops

    work = works.TrainingStep(partial(works._mlp, 4, 16, 2), (4,), 1)
    model, x = work.build(), np.ones((1, 4), np.float32)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    f = ortops.Function(model)
    module, tensor = f.torch(trainable=False), torch.from_numpy(x)
    runs: list[Callable[[], Any]] = [
        lambda: session.run(None, {"images": x}),
        lambda: f(x),
        lambda: module(tensor),
    ]
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for each, run in zip(times, runs, strict=True):
            for _ in range(calls):
                begin = time.perf_counter()
                run()
                each.append(1e6 * (time.perf_counter() - begin))
    plain, called, as_module = map(statistics.median, times)
    return plain, called, as_module


# --------------------------------------------------------------------------- in this process


def gradients(name: str, effort: measure.Effort) -> tuple[dict[str, float | str], list[str]]:
    """Returns the median milliseconds of each peer, or why it cannot; and which results differ."""
    with ExitStack() as stack:
        submits = {peer: stack.enter_context(measure.worker()) for peer in PEERS}
        found = {peer: submits[peer](start, name, peer).result() for peer in PEERS}
        able = [peer for peer, each in found.items() if not isinstance(each, str)]
        expected = found["torch eager"]
        wrong = [
            f"{name}: {peer}: {key}"
            for peer in able
            for key, value in expected.items()
            if np.linalg.norm(found[peer][key] - value) > TOLERANCE * np.linalg.norm(value)
        ]
        counts = {
            p: submits[p](measure.warm_up, effort.warm_up, effort.turn).result() for p in able
        }
        times: dict[str, list[float]] = {peer: [] for peer in able}
        for number in range(effort.rounds):
            first = number % len(able)
            for peer in chain(able[first:], able[:first]):
                times[peer] += submits[peer](measure.time_steps, counts[peer]).result()
    medians = {peer: 1000 * statistics.median(each) for peer, each in times.items()}
    return {peer: medians.get(peer, str(found[peer])) for peer in PEERS}, wrong


def cpu() -> str:
    """Returns the name of the CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report(effort: measure.Effort) -> tuple[str, list[str]]:
    """Runs everything; returns Markdown, and which results differ."""
    with measure.worker() as submit:
        plain, called, as_module = submit(overheads, effort.rounds).result()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    lines = [
        f"{cpu()}, {THREADS} cores; {versions}.",
        "",
        (
            f"A call of a small model (MLP 4-16-2, one row) takes {plain:.0f} µs in "
            f"`InferenceSession.run`, {called:.0f} µs as a Function and {as_module:.0f} µs as a "
            "module of PyTorch with `trainable=False`."
        ),
        "",
        "Milliseconds for a loss and its gradient with respect to all weights (medians):",
        "",
        f"| network | {' | '.join(PEERS)} |",
        f"| --- |{' --- |' * len(PEERS)}",
    ]
    differing = []
    for name in WORKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found, wrong = gradients(name, effort)
        differing += wrong
        for peer, each in found.items():
            if isinstance(each, str):
                print(f"{peer}: {each:.300}", file=sys.stderr)
        cells = ["fails" if isinstance(each, str) else f"{each:.2f}" for each in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines), differing


def main(arguments: Sequence[str]) -> int:
    """Prints the tables; returns 1 if gradients differ."""
    text, differing = report(measure.QUICK if "--quick" in arguments else measure.Effort())
    print(text)
    for each in differing:
        print(f"differs: {each}", file=sys.stderr)
    if "--write" in arguments:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
