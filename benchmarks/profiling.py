"""Profiles a step of ortops with onnxruntime's profiler."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import worker
from benchmarks.works import WORKS, write

__all__ = ["Node", "Profile", "markdown", "profile"]

WARM_UP = 3
SHOWN = 12


@dataclass(frozen=True)
class Node:
    """A node that onnxruntime ran.

    Attributes:
        name: Its name after onnxruntime's optimizations.
        operator: Its operator.
        shapes: The shapes of its inputs.
        milliseconds: The median time per step, without that of nodes in its subgraphs.
    """

    name: str
    operator: str
    shapes: str
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """The profile of a step.

    Attributes:
        milliseconds: The median time of a step, including the overhead of profiling.
        sessions: The number of onnxruntime sessions that run in each step.
        nodes: The nodes of these sessions, the most expensive first.
    """

    milliseconds: float
    sessions: int
    nodes: Sequence[Node]


def profile(folder: str, optimizer: str, steps: int, without: Sequence[str] = ()) -> Profile:
    """Profiles `TrainingSession.step` with standard operators; called in a separate process.

    Args:
        folder: The workload, as a `benchmarks.task.Task`.
        optimizer: A name in `benchmarks.task.OPTIMIZERS`.
        steps: The number of steps.
        without: Passes to leave out.
    """
    import onnxruntime

    from benchmarks.peers import LOWERED, PEERS
    from benchmarks.peers.with_ortops import make
    from benchmarks.task import THREADS, Task
    from ortops.execution.settings import Settings

    numbers, create = count(), onnxruntime.InferenceSession.__init__
    with tempfile.TemporaryDirectory() as place:

        def create_profiled(
            session: Any, model: Any, sess_options: Any = None, *rest: Any, **named: Any
        ) -> None:
            # onnxruntime's file names contain only the second, in which two sessions may start.
            sess_options = sess_options or onnxruntime.SessionOptions()
            sess_options.enable_profiling = True
            sess_options.profile_file_prefix = str(Path(place) / f"{next(numbers)}")
            create(session, model, sess_options, *rest, **named)

        onnxruntime.InferenceSession.__init__ = create_profiled
        sess_options = onnxruntime.SessionOptions()
        sess_options.intra_op_num_threads = THREADS
        step = make(
            Task.read(folder),
            optimizer,
            **PEERS[LOWERED].options,
            sess_options=sess_options,
            settings=Settings().without(*without),
        )
        seconds = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            step.run()
            seconds.append(time.perf_counter() - start)
        del step
        gc.collect()  # closes its sessions, which then write their files
        files = [json.loads(file.read_text(encoding="utf-8")) for file in Path(place).iterdir()]
    of_sessions = list(filter(None, (_nodes(events, WARM_UP + steps) for events in files)))
    nodes = [node for nodes in of_sessions for node in nodes]
    return Profile(
        1e3 * statistics.median(seconds[WARM_UP:]),
        len(of_sessions),
        sorted(nodes, key=lambda node: -node.milliseconds),
    )


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
    for event, own in _own_times(events):
        arguments = event["args"]
        shapes = " ".join(
            str(list(*each.values())).replace(" ", "") for each in arguments["input_type_shape"]
        )
        name = str(event["name"]).removesuffix("_kernel_time")
        step = sum(start <= float(event["ts"]) for start in starts) - 1
        times[name, arguments["op_name"], shapes][step] += own / 1e3
    return [Node(*key, statistics.median(each[WARM_UP:])) for key, each in times.items()]


def _own_times(
    events: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yields each run of a node with its microseconds, without those of nodes in its subgraphs."""
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


def markdown(works: Sequence[str], optimizer: str, steps: int, without: Sequence[str] = ()) -> str:
    """Returns tables of operators and of the most expensive nodes for each workload."""
    lines: list[str] = []
    for work in works:
        with tempfile.TemporaryDirectory() as folder, worker() as submit:
            submit(write, WORKS[work], folder, [optimizer]).result()
            found = submit(profile, folder, optimizer, steps, without).result()
            lines += [*_section(work, found), ""]
    return "\n".join(lines)


def _section(work: str, found: Profile) -> Iterator[str]:
    total = sum(node.milliseconds for node in found.nodes)
    sessions = "1 session" if found.sessions == 1 else f"{found.sessions} sessions"
    yield (
        f"## {work}: {found.milliseconds:.2f} ms per step while profiled, {total:.2f} of it in "
        f"{len(found.nodes)} nodes of {sessions}"
    )
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
