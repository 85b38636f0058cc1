"""Which nodes of a step onnxruntime's CUDA provider leaves to the CPU, without a GPU.

::

    ./scripts/cuda_environment
    python -m benchmarks.placement [--only WORDS] [--write]

Each network runs in a process of its own with the provider of `benchmarks.cuda_double`. A node that
computes shapes belongs on the CPU, where onnxruntime puts it on purpose. The others read or write
tensors that follow from the batch, a parameter or its state: for these the step waits for copies.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks import cuda_double
from benchmarks.task import Task
from benchmarks.works import WORKS, Export, Update, find, write

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

__all__ = ["Placement", "main", "place", "place_work", "reached"]

CPU = "CPUExecutionProvider"
PAGE = cuda_double.ROOT / "ortops" / "docs" / "providers.md"
WITHOUT_DATA = ("Shape", "Size")
"""Operators whose outputs say nothing about the values of their inputs."""


OF_SHAPES = ("Gather",)
"""Operators of nodes that onnxruntime's optimizer adds and that permute the sizes of a Shape."""


@dataclass(frozen=True)
class Placement:
    """Where the nodes of a step are.

    Attributes:
        nodes: How many nodes the graphs have, as onnxruntime has optimized them.
        shapes: How many of them run on the CPU and compute shapes.
        fallen: The others on the CPU: how many of each operator.
        error: Why the session could not be made; empty if it was.
    """

    nodes: int
    shapes: int
    fallen: dict[str, int]
    error: str = ""


def reached(graph: onnx.GraphProto, data: Collection[str] = ()) -> set[str]:
    """Returns the tensors of a graph that follow from the elements of its inputs of rank 1 and up.

    Args:
        graph: The graph.
        data: Such tensors of graphs around it.
    """
    found = set(data)
    for value in graph.input:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") or tensor.shape.dim:
            found.add(value.name)
    for node in graph.node:
        inner = [each.g for each in node.attribute if each.HasField("g")]
        inside = set().union(*(reached(each, found) for each in inner))
        found |= inside
        if node.op_type not in WITHOUT_DATA and (found.intersection(node.input) or inside - found):
            found.update(node.output)
    return found


def _nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def place(make: Callable[[], onnx.ModelProto], batch: Mapping[str, Any]) -> Placement:
    """Makes a session of a trainable model on CUDA, makes a step, and returns where its nodes are.

    Args:
        make: Returns the trainable model.
        batch: What is fed.
    """
    import ortops
    from ortops.engine.execution.onnxruntime_sessions import Sessions
    from ortops.graph.files.serialization import to_proto

    opened: list[tuple[onnx.ModelProto, Any]] = []
    make_session = Sessions.open

    def open_and_keep(self: Sessions, model: ir.Model, **options: Any) -> Any:
        proto = to_proto(model)
        session = make_session(self, model, **options)
        opened.append((proto, session))
        return session

    error = ""
    with mock.patch.object(Sessions, "open", open_and_keep):
        try:
            ortops.TrainingSession(make(), providers=["cuda"]).step(batch)
        except ortops.errors.KernelError:
            pass  # of a kernel that has computed nothing: the nodes are placed already
        except ortops.errors.OrtopsError as refused:
            error = str(refused).splitlines()[0]
    nodes, shapes, fallen = 0, 0, Counter[str]()
    for model, session in opened:
        data = reached(model.graph)
        by_name = {node.name or node.output[0]: node for node in _nodes(model.graph)}
        for part in session.get_provider_graph_assignment_info():
            for each in part.get_nodes():
                nodes += 1
                if part.ep_name != CPU:
                    continue
                node = by_name.get(each.name)
                if node is None:
                    is_shape = each.op_type in OF_SHAPES
                else:
                    is_shape = data.isdisjoint([*node.input, *node.output])
                if is_shape:
                    shapes += 1
                else:
                    fallen[each.op_type] += 1
    return Placement(nodes, shapes, dict(fallen.most_common()), error)


def place_work(folder: str, work: str) -> Placement:
    """Returns where the nodes of a step of a work are, which `write` has written to a folder."""
    from benchmarks.peers.with_ortops import trainable

    task = Task(folder, WORKS[work].network(), exported=isinstance(WORKS[work], Export))
    return place(lambda: trainable(task, "Adam"), task.batches()[0])


def _placed(work: str) -> Placement:
    """Returns what `place_work` finds in a process with the double."""
    with tempfile.TemporaryDirectory() as folder:
        write(WORKS[work], folder, ["Adam"])
        code = (
            "import dataclasses, json, sys; from benchmarks.placement import place_work;"
            "print(json.dumps(dataclasses.asdict(place_work(*sys.argv[1:]))))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, folder, work],
            env={**os.environ, **cuda_double.environment()},
            capture_output=True,
            text=True,
        )
    if done.returncode:
        return Placement(0, 0, {}, done.stderr.strip().splitlines()[-1])
    return Placement(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="words in the names of works, after commas")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    given = parser.parse_args(arguments)
    if not cuda_double.is_there():
        sys.exit("the CUDA provider is missing: run ./scripts/cuda_environment")
    lines = [
        "| network | nodes | shapes on the CPU | others on the CPU |",
        "| --- | --- | --- | --- |",
    ]
    for name in find([text for text in given.only.split(",") if text]):
        if isinstance(WORKS[name], Update):
            continue
        found = _placed(name)
        listed = ", ".join(f"{operator} {count}" for operator, count in found.fallen.items())
        others = found.error or (f"{sum(found.fallen.values())}: {listed}" if listed else "0")
        lines.append(f"| {name} | {found.nodes} | {found.shapes} | {others} |")
        print(lines[-1], flush=True)
    if given.write:
        text = PAGE.read_text(encoding="utf-8")
        block = "\n".join(["placement: begin -->", *lines, "<!-- placement: end"])
        pattern = re.compile("placement: begin -->.*?<!-- placement: end", re.DOTALL)
        PAGE.write_text(pattern.sub(lambda _: block, text), encoding="utf-8")


if __name__ == "__main__":
    main()
