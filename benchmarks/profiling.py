"""Profiles a step of ortops with onnxruntime's profiler."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.ideal import Ideal, Node, ideal, traffic
from benchmarks.measure import worker
from benchmarks.peers import COMPILED, LOWERED, PEERS, Step
from benchmarks.works import WORKS, write

__all__ = ["PROFILED", "Node", "Profile", "markdown", "profile"]

WARM_UP = 3
SHOWN = 12

PROFILED = (LOWERED, COMPILED)
"""The peers that can be profiled."""

STATES: Mapping[str, int] = {"Adam": 2, "Momentum": 1, "Adagrad": 1}
"""The number of state tensors of each parameter, by optimizer."""


@dataclass(frozen=True)
class Profile:
    """The profile of a step.

    Attributes:
        milliseconds: The median time of a step, including the overhead of profiling.
        sessions: The number of onnxruntime sessions that run in each step.
        nodes: The nodes of these sessions, the most expensive first.
        ideal: The ideal time of the step.
        live: What results of nodes take at the peak of a step, in 10⁶ bytes by operator.
        kept: What parameters and the optimizer's moments take, in 10⁶ bytes.
    """

    milliseconds: float
    sessions: int
    nodes: Sequence[Node]
    ideal: Ideal
    live: Mapping[str, float]
    kept: float


def profile(
    folder: str,
    optimizer: str,
    steps: int,
    without: Sequence[str] = (),
    peer: str = LOWERED,
) -> Profile:
    """Profiles `TrainingSession.step`; called in a separate process.

    Args:
        folder: The workload, as a `benchmarks.task.Task`.
        optimizer: A name in `benchmarks.task.OPTIMIZERS`.
        steps: The number of steps.
        without: Passes to leave out.
        peer: `LOWERED` or `COMPILED` of `benchmarks.peers`.
    """
    import onnx
    import onnxruntime

    from benchmarks.peers.with_ortops import make
    from benchmarks.task import Task
    from ortops.engine.execution.settings import Settings

    numbers, create = count(), onnxruntime.InferenceSession.__init__
    task = Task.read(folder)

    def create_step() -> Step:
        settings = Settings().without(*without)
        return make(task, optimizer, **PEERS[peer].options, settings=settings)

    plain = create_step()
    for _ in range(WARM_UP):  # opens its sessions, which are not profiled
        plain.run()
    with tempfile.TemporaryDirectory() as place:

        def create_profiled(
            session: Any, model: Any, sess_options: Any = None, *rest: Any, **named: Any
        ) -> None:
            # onnxruntime's file names contain only the second, in which two sessions may start.
            sess_options = sess_options or onnxruntime.SessionOptions()
            file = Path(place) / f"{next(numbers)}"
            sess_options.enable_profiling = True
            sess_options.profile_file_prefix = str(file)
            probe = bool(sess_options.optimized_model_filepath)  # ortops reads its model itself
            if not probe:
                sess_options.optimized_model_filepath = f"{file}.onnx"
            create(session, model, sess_options, *rest, **named)
            if not probe:
                sess_options.optimized_model_filepath = ""

        onnxruntime.set_default_logger_severity(3)  # it warns about optimized models
        onnxruntime.InferenceSession.__init__ = create_profiled
        profiled = create_step()
        milliseconds = _milliseconds(profiled, steps)
        del profiled
        gc.collect()  # closes its sessions, which then write their files
        onnxruntime.InferenceSession.__init__ = create
        of_sessions, models, lives = [], [], []
        for file in Path(place).glob("*.json"):
            events = json.loads(file.read_text(encoding="utf-8"))
            if nodes := _nodes(events, WARM_UP + steps):
                of_sessions.append(nodes)
                models.append(onnx.load(Path(place) / f"{file.name.partition('_')[0]}.onnx"))
                lives.append(memory.live_megabytes(events, models[-1]))
    nodes = [node for nodes in of_sessions for node in nodes]
    weights = {(a.shape, a.tobytes()): a.nbytes for a in task.weights().values()}  # tied ones once
    parameters = sum(weights.values())
    updated = (2 * STATES[optimizer] + 3) * parameters if peer == COMPILED else None
    return Profile(
        milliseconds,
        len(of_sessions),
        sorted(nodes, key=lambda node: -node.milliseconds),
        ideal(nodes, models, plain.run, updated),
        max(lives, key=lambda live: sum(live.values())),
        (1 + STATES[optimizer]) * parameters / 1e6,
    )


def _milliseconds(step: Step, steps: int) -> float:
    """Returns the median time of a step after a warm-up."""
    seconds = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[WARM_UP:])


def _nodes(events: Sequence[Mapping[str, Any]], steps: int) -> list[Node]:
    """Returns the nodes of one session's profile; none if it did not run in each step.

    Args:
        events: The profile.
        steps: The number of steps, including the warm-up.
    """
    runs = [event for event in events if event["name"] == "model_run"]
    if len(runs) < steps:
        return []
    starts = sorted(float(run["ts"]) for run in runs)[:: len(runs) // steps]
    times: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * len(starts))
    counts: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    for event, own in _own_times(events):
        arguments = event["args"]
        shapes = " ".join(
            str(list(*each.values())).replace(" ", "") for each in arguments["input_type_shape"]
        )
        name = str(event["name"]).removesuffix("_kernel_time")
        key = name, arguments["op_name"], shapes
        step = sum(start <= float(event["ts"]) for start in starts) - 1
        times[key][step] += own / 1e3
        counts[key] += 1
        read = int(arguments["activation_size"]) + int(arguments["parameter_size"])
        moved[key] += traffic(arguments["op_name"], read, int(arguments["output_size"]))
    return [
        Node(*key, statistics.median(each[WARM_UP:]), counts[key] // steps, moved[key] // steps)
        for key, each in times.items()
    ]


def _own_times(
    events: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yields each run of a node with its microseconds, without the nodes in its subgraphs."""
    kernels = [
        event
        for event in events
        if event.get("cat") == "Node" and str(event["name"]).endswith("_kernel_time")
    ]
    inner = [0.0] * len(kernels)
    open_ones: list[int] = []
    kernels.sort(key=lambda event: (float(event["ts"]), -float(event["dur"])))
    for i, event in enumerate(kernels):
        while open_ones and _end(kernels[open_ones[-1]]) < _end(event):
            open_ones.pop()
        if open_ones:
            inner[open_ones[-1]] += float(event["dur"])
        open_ones.append(i)
    for event, of_inner in zip(kernels, inner, strict=True):
        yield event, max(0.0, float(event["dur"]) - of_inner)


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def markdown(
    works: Sequence[str],
    optimizer: str,
    steps: int,
    without: Sequence[str] = (),
    peer: str = LOWERED,
) -> str:
    """Returns tables of parts, operators and the most expensive nodes of each workload."""
    lines: list[str] = []
    for work in works:
        with tempfile.TemporaryDirectory() as folder, worker() as submit:
            submit(write, WORKS[work], folder, [optimizer]).result()
            found = submit(profile, folder, optimizer, steps, without, peer).result()
            stages = submit(memory.measure, folder, peer, optimizer, steps).result()
            lines += [*_section(work, found), "", *memory.lines(stages, found.live, found.kept), ""]
    return "\n".join(lines)


def _section(work: str, found: Profile) -> Iterator[str]:
    total = sum(node.milliseconds for node in found.nodes)
    sessions = "1 session" if found.sessions == 1 else f"{found.sessions} sessions"
    yield (
        f"## {work}: {found.milliseconds:.2f} ms per step while profiled, {total:.2f} of it in "
        f"{len(found.nodes)} nodes of {sessions}"
    )
    yield ""
    yield from _parts(found.ideal)
    yield ""
    yield "| operator | nodes | ms | share |"
    yield "| --- | --- | --- | --- |"
    by_operator: dict[str, list[float]] = defaultdict(list)
    for node in found.nodes:
        by_operator[node.operator].append(node.milliseconds)
    ranked = sorted(by_operator.items(), key=lambda item: -sum(item[1]))
    for operator, each in ranked[:SHOWN]:
        yield f"| {operator} | {len(each)} | {sum(each):.2f} | {sum(each) / total:.0%} |"
    yield ""
    yield "| node | operator | ms | share | input shapes |"
    yield "| --- | --- | --- | --- | --- |"
    for node in found.nodes[:SHOWN]:
        share = node.milliseconds / total
        yield (
            f"| {node.name} | {node.operator} | {node.milliseconds:.2f} | {share:.0%} | "
            f"{node.shapes} |"
        )


def _parts(found: Ideal) -> Iterator[str]:
    """Yields a table of the parts of a step, measured and ideal."""
    memory, caches = found.bandwidth / 1e9, found.cache_bandwidth / 1e9
    yield f"| part | nodes | ms | ideal ms (memory: {memory:.0f} GB/s, caches: {caches:.0f} GB/s) |"
    yield "| --- | --- | --- | --- |"
    parts = {
        "matrix products and convolutions": found.products,
        "other nodes": found.others,
        "update": found.update,
    }
    for name, part in parts.items():
        yield f"| {name} | {part.nodes} | {part.measured:.2f} | {part.ideal:.2f} |"
    nodes = sum(part.nodes for part in parts.values())
    yield f"| step | {nodes} | {found.step:.2f} | {found.sum:.2f} |"
