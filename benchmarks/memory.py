"""What stands at the peak of memory: of each stage of a process, and in a step.

``python -m benchmarks.memory FOLDER PEER OPTIMIZER STEPS`` is such a process: a peer of ortops
trains the workload in the folder. It prints a JSON object.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.start import PROJECT, peak_megabytes

__all__ = ["STAGES", "lines", "live_megabytes", "measure"]

STAGES = ("imports", "model built", "session made", "first step", "later steps")

_VIEWS = {"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
_RESET = Path("/proc/self/clear_refs")


def measure(folder: str, peer: str, optimizer: str, steps: int) -> Mapping[str, float]:
    """Returns the peak memory of each stage, in 10⁶ bytes; called in a process of few threads."""
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", folder, peer, optimizer, str(steps)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, float] = json.loads(process.stdout)
    return answer


def main(folder: str, peer: str, optimizer: str, steps: str) -> None:
    """Runs the process."""
    from benchmarks.peers import PEERS, with_ortops
    from benchmarks.task import Task

    peaks: list[float] = []

    def end() -> None:
        peaks.append(peak_megabytes())
        if _RESET.exists():  # only on Linux; elsewhere, peaks include those of earlier stages
            _RESET.write_text("5", encoding="ascii")

    task = Task.read(folder)
    end()
    models = [with_ortops.trainable(task, optimizer)]
    end()
    with_ortops.trainable = lambda task, optimizer: models.pop()  # the session gets the only one
    step = PEERS[peer].make(task, optimizer)
    end()
    step.run()
    end()
    for _ in range(int(steps)):
        step.run()
    end()
    print(json.dumps(dict(zip(STAGES, peaks, strict=True))))


def live_megabytes(events: Sequence[Mapping[str, Any]], model: Any) -> Mapping[str, float]:
    """Returns what results of nodes take at the peak of a step, in 10⁶ bytes by operator.

    Each result is there until its last reader has run. Outputs of the graph do not count, because
    they are in memory of the session or of the update.

    Args:
        events: onnxruntime's profile of a session.
        model: The model that it ran, as onnxruntime has optimized it.
    """
    begin = max(float(event["ts"]) for event in events if event["name"] == "model_run")
    ran = [
        event
        for event in sorted(events, key=lambda event: float(event["ts"]))
        if event.get("cat") == "Node"
        and event["name"].endswith("_kernel_time")
        and float(event["ts"]) >= begin
    ]
    by_name = {node.name: node for node in model.graph.node}
    nodes, sizes, owner = [], {}, {}
    for event in ran:
        node = by_name.get(event["name"].removesuffix("_kernel_time"))
        if node is None:  # of a subgraph
            continue
        nodes.append(node)
        given = event["args"]["output_type_shape"]
        for name, typed in zip(filter(None, node.output), given, strict=False):
            sizes[name] = _size(typed)
        if node.op_type in _VIEWS:
            owner[node.output[0]] = owner.get(node.input[0], node.input[0])
    outputs = {owner.get(value.name, value.name) for value in model.graph.output}
    last: dict[str, int] = {}
    for place, node in enumerate(nodes):
        last.update((owner.get(name, name), place) for name in _read(node))
    live: dict[str, tuple[str, int]] = {}
    most: list[tuple[str, int]] = []
    total = peak = 0
    for place, node in enumerate(nodes):
        made = [n for n in node.output if n in sizes and n not in owner and n not in outputs]
        live |= {name: (node.op_type, sizes[name]) for name in made}
        total += sum(sizes[name] for name in made)
        if total > peak:
            peak, most = total, list(live.values())
        ended = {owner.get(name, name) for name in _read(node)} | set(made)
        for name in [name for name in ended if last.get(name, -1) <= place and name in live]:
            total -= live.pop(name)[1]
    found: Counter[str] = Counter()
    for operator, size in most:
        found[operator] += size
    return {operator: size / 1e6 for operator, size in found.most_common()}


def _size(typed: Mapping[str, Sequence[int]]) -> int:
    sizes = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "double": 8, "int64": 8}
    ((kind, shape),) = typed.items()
    return sizes.get(kind, 4) * math.prod(shape)


def _read(node: Any) -> Iterator[str]:
    yield from filter(None, node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read(inner)


def lines(stages: Mapping[str, float], live: Mapping[str, float], kept: float) -> Iterator[str]:
    """Yields what stands at the peak of memory, in 10⁶ bytes.

    Args:
        stages: What `measure` returns.
        live: What `live_megabytes` returns.
        kept: What parameters and moments take.
    """
    yield f"| {' | '.join(stages)} |"
    yield f"|{' --- |' * len(stages)}"
    yield f"| {' | '.join(f'{megabytes:.0f}' for megabytes in stages.values())} |"
    yield ""
    peak, imports = max(stages.values()), next(iter(stages.values()))
    parts = {"parameters and moments": kept, "results of nodes": sum(live.values())}
    rest = peak - imports - sum(parts.values())
    shown = ", ".join(f"{operator} {size:.0f}" for operator, size in live.items() if size >= 1)
    yield (
        f"Peak: {peak:.0f} MB, of which imports {imports:.0f}, "
        + ", ".join(f"{name} {size:.0f}" for name, size in parts.items())
        + f" ({shown or 'each below 1'}), and graphs, sessions, gradients and gaps between results "
        f"{rest:.0f}."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
