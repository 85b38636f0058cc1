"""Where a lowered training step spends its time, by onnxruntime's own profile."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import worker
from benchmarks.works import WORKS, TrainingStep

__all__ = ["Node", "markdown", "profile"]

WARM_UP = 3
SHOWN = 12


@dataclass(frozen=True)
class Node:
    """A node of the graph that onnxruntime ran.

    Attributes:
        name: Its name after onnxruntime's optimizations.
        operator: Its operator.
        shapes: The shapes of its inputs.
        milliseconds: The median time in a step.
    """

    name: str
    operator: str
    shapes: str
    milliseconds: float


def profile(work: str, optimizer: str, steps: int) -> list[Node]:
    """Profiles the lowered form of a training step; called in a process of its own.

    Args:
        work: A name of `benchmarks.works.WORKS`.
        optimizer: A name of `benchmarks.peers.OPTIMIZERS`.
        steps: How many steps to take the median of.
    """
    from benchmarks import peers

    training = WORKS[work]
    assert isinstance(training, TrainingStep)
    with tempfile.TemporaryDirectory() as folder:
        options = peers.session_options()
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "step")
        step = peers.ortops_training_step(training, optimizer, "onnx", options)
        for _ in range(WARM_UP + steps):
            step()
        del step  # with its session, which then writes the file
        (file,) = Path(folder).iterdir()
        return _nodes(json.loads(file.read_text(encoding="utf-8")))


def _nodes(events: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Returns the nodes of a profile, the costliest first."""
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event in events:
        name = str(event["name"])
        if event.get("cat") != "Node" or not name.endswith("_kernel_time"):
            continue
        arguments = event["args"]
        shapes = " ".join(
            str(list(*each.values())).replace(" ", "") for each in arguments["input_type_shape"]
        )
        key = (name.removesuffix("_kernel_time"), arguments["op_name"], shapes)
        times[key].append(float(event["dur"]) / 1e3)
    nodes = [Node(*key, statistics.median(each[WARM_UP:])) for key, each in times.items()]
    return sorted(nodes, key=lambda node: -node.milliseconds)


def markdown(works: Sequence[str], optimizer: str, steps: int) -> str:
    """Returns, for each training step, tables of operators and of the costliest nodes."""
    lines: list[str] = []
    for work in works:
        if isinstance(WORKS[work], TrainingStep):
            with worker() as submit:
                nodes = submit(profile, work, optimizer, steps).result()
            lines += [*_section(work, nodes), ""]
    return "\n".join(lines)


def _section(work: str, nodes: Sequence[Node]) -> Iterator[str]:
    total = sum(node.milliseconds for node in nodes)
    yield f"## {work}: {total:.2f} ms in {len(nodes)} nodes"
    yield ""
    yield "| operator | nodes | ms | share |"
    yield "| --- | --- | --- | --- |"
    by_operator: dict[str, list[float]] = defaultdict(list)
    for node in nodes:
        by_operator[node.operator].append(node.milliseconds)
    ranked = sorted(by_operator.items(), key=lambda item: -sum(item[1]))
    for operator, each in ranked[:SHOWN]:
        yield f"| {operator} | {len(each)} | {sum(each):.2f} | {sum(each) / total:.0%} |"
    yield ""
    yield "| node | operator | ms | input shapes |"
    yield "| --- | --- | --- | --- |"
    for node in nodes[:SHOWN]:
        yield f"| {node.name} | {node.operator} | {node.milliseconds:.2f} | {node.shapes} |"
