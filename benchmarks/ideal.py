"""The ideal time of a step: the time of its matrix products alone, and of its memory traffic.

A profile says how long each node takes within a step. Ideally, a product takes as long as in a
session of its own, whose operands are in the caches, and every other node as long as the machine
needs to read its inputs and write its outputs. What a step takes besides is the cost of running
many nodes, of operands that are not in the caches, and of kernels that are slower than memory.
"""

from __future__ import annotations

import ast
import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.task import threads

if TYPE_CHECKING:
    import onnx
    import onnxruntime

    from ortops.engine.execution.settings import Settings

__all__ = [
    *("CACHED", "Ideal", "Part", "ideal", "is_product", "memory_speed", "session_options"),
    "traffic",
]

_PRODUCTS = frozenset({"Conv", "ConvTranspose", "FusedGemm", "FusedMatMul", "Gemm", "MatMul"})

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Shape", "Size", "Squeeze", "Unsqueeze"})
"""Operators that move no elements."""

_SELECTIONS = frozenset({"Expand", "Gather", "GatherElements", "GatherND", "Slice"})
"""Operators that read as many elements as they write, not their whole input."""

CACHED = 3 << 18
"""A node that reads and writes no more than this many bytes finds them in the caches."""

_OUTSIDE_CACHES = 1 << 24
"""The number of elements of vectors that no cache holds."""

_ROUNDS, _RUNS = 10, 3


@dataclass(frozen=True)
class Node:
    """A node that onnxruntime ran.

    Attributes:
        name: Its name after onnxruntime's optimizations.
        operator: Its operator.
        shapes: The shapes of its inputs.
        milliseconds: The median time per step, without the nodes in its subgraphs.
        runs: How often it runs per step.
        traffic: The bytes that it reads and writes per step.
    """

    name: str
    operator: str
    shapes: str
    milliseconds: float
    runs: int = 1
    traffic: int = 0


@dataclass(frozen=True)
class Part:
    """One kind of work in a step.

    Attributes:
        nodes: The number of nodes that do it.
        measured: The milliseconds that they take within a step.
        ideal: The milliseconds that they would take ideally.
    """

    nodes: int
    measured: float
    ideal: float


@dataclass(frozen=True)
class Ideal:
    """The ideal time of a step, in parts.

    Attributes:
        step: The milliseconds of a step that is not profiled.
        products: The matrix products and convolutions, each alone in a warm session.
        others: The other nodes of the forward and backward pass, at the speed of memory.
        update: The optimizer's update, at the speed of memory.
        bandwidth: The speed of memory, in bytes per second.
        cache_bandwidth: The caches' bandwidth, which counts for nodes with at most `CACHED` bytes.
    """

    step: float
    products: Part
    others: Part
    update: Part
    bandwidth: float
    cache_bandwidth: float

    @property
    def sum(self) -> float:
        """The milliseconds that all parts would take ideally."""
        return self.products.ideal + self.others.ideal + self.update.ideal


def is_product(node: Node) -> bool:
    """Returns whether a node is a matrix product or a convolution that sums over channels.

    A depthwise convolution of one element per channel only scales: it is limited by memory.
    """
    if node.operator not in _PRODUCTS:
        return False
    shapes = [ast.literal_eval(shape) for shape in node.shapes.split()]
    return node.operator != "Conv" or math.prod(shapes[1][1:]) > 1


def traffic(operator: str, read: int, written: int) -> int:
    """Returns how many bytes a node has to read and write.

    Args:
        operator: Its operator.
        read: The size of its inputs, in bytes.
        written: The size of its outputs, in bytes.
    """
    if operator in _VIEWS:
        return 0
    return written + (min(read, written) if operator in _SELECTIONS else read)


def ideal(
    nodes: Sequence[Node],
    models: Sequence[onnx.ModelProto],
    step: Callable[[], object],
    updated: int | None = None,
) -> Ideal:
    """Measures the ideal time of a step, and the step itself.

    The step, the products and the memory take turns in rounds, because the speed of a machine
    changes within seconds. Equal products are measured once.

    Args:
        nodes: The nodes of its profile.
        models: The models that onnxruntime ran, after its optimizations, with the products.
        step: Runs a step that is not profiled.
        updated: If the update is not a part of ``models``: the bytes that it reads and writes.
            What the step takes outside of its nodes then counts as the update.
    """
    products, others, update = [], [], []
    for node in nodes:
        if is_product(node):
            products.append(node)
        else:
            (update if node.name.startswith("update/") else others).append(node)
    add, added = _additions(_OUTSIDE_CACHES)
    add_cached, added_cached = _additions(CACHED // 12, 32)
    ways: dict[Hashable, Callable[[], object]] = {
        "step": step,
        "add": add,
        "add cached": add_cached,
    }
    found, keys = _by_name(models), []
    for node in products:
        proto, constants, model = found[node.name]
        attributes = sorted(each.SerializeToString() for each in proto.attribute)
        key = (node.operator, node.shapes, proto.domain, *attributes)
        if key not in ways:
            ways[key] = _product(node, proto, constants, model)
        keys.append(key)
    milliseconds = _medians(ways)
    bandwidth = 1e3 * added / milliseconds["add"]
    cache_bandwidth = 1e3 * added_cached / milliseconds["add cached"]

    def limited_by_memory(part: Sequence[Node]) -> Part:
        seconds = sum(
            node.traffic / (cache_bandwidth if node.traffic <= CACHED * node.runs else bandwidth)
            for node in part
        )
        return Part(len(part), _total(part), 1e3 * seconds)

    alone = sum(node.runs * milliseconds[key] for node, key in zip(products, keys, strict=True))
    parts = limited_by_memory(update)
    if updated is not None:
        outside = milliseconds["step"] - _total(products) - _total(others)
        parts = Part(0, outside, 1e3 * updated / bandwidth)
    return Ideal(
        milliseconds["step"],
        Part(len(products), _total(products), alone),
        limited_by_memory(others),
        parts,
        bandwidth,
        cache_bandwidth,
    )


def memory_speed() -> float:
    """Returns the speed of memory in sums of large vectors, in bytes per second."""
    add, added = _additions(_OUTSIDE_CACHES)
    return 1e3 * added / _medians({"add": add})["add"]


def _additions(elements: int, repetitions: int = 1) -> tuple[Callable[[], object], int]:
    """Returns a function that adds two vectors repeatedly, and how many bytes it moves."""
    import onnx

    kinds = [onnx.helper.make_tensor_value_info(name, 1, [elements]) for name in ("x0", "y")]
    names = [f"x{i}" for i in range(repetitions + 1)]
    nodes = [
        onnx.helper.make_node("Add", [old, "y"], [new]) for old, new in itertools.pairwise(names)
    ]
    result = onnx.helper.make_tensor_value_info(names[-1], 1, [elements])
    graph = onnx.helper.make_graph(nodes, "sums", kinds, [result])
    opsets = [onnx.helper.make_opsetid("", 21)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    vector = np.ones(elements, np.float32)
    run = _runner(model, {"x0": vector, "y": vector.copy()}, names[-1:])
    return run, 3 * repetitions * vector.nbytes


def _medians(ways: Mapping[Hashable, Callable[[], object]]) -> dict[Hashable, float]:
    """Returns the median time of each function, in milliseconds."""
    seconds: dict[Hashable, list[float]] = {key: [] for key in ways}
    for _ in range(_ROUNDS):
        for key, run in ways.items():
            run()  # fills the caches
            for _ in range(_RUNS):
                start = time.perf_counter()
                run()
                seconds[key].append(time.perf_counter() - start)
    return {key: 1e3 * statistics.median(times) for key, times in seconds.items()}


def _total(nodes: Sequence[Node]) -> float:
    return sum(node.milliseconds for node in nodes)


def _by_name(
    models: Sequence[onnx.ModelProto],
) -> dict[str, tuple[onnx.NodeProto, frozenset[str], onnx.ModelProto]]:
    """Returns the nodes of models by name, with the names of constants next to them."""
    found = {}
    for model in models:
        for node, constants in _nodes_of(model.graph):
            found[node.name] = node, constants, model
    return found


def _nodes_of(graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, frozenset[str]]]:
    constants = frozenset(each.name for each in graph.initializer)
    for node in graph.node:
        yield node, constants
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes_of(attribute.g)


def _product(
    node: Node, proto: onnx.NodeProto, constants: frozenset[str], model: onnx.ModelProto
) -> Callable[[], object]:
    """Returns a function that runs a product alone."""
    import onnx

    shapes = iter([ast.literal_eval(shape) for shape in node.shapes.split()])
    rng = np.random.default_rng(0)
    feeds = {
        f"x{i}": rng.standard_normal(next(shapes), np.float32)
        for i, name in enumerate(proto.input)
        if name
    }
    copy = onnx.NodeProto()
    copy.CopyFrom(proto)
    del copy.input[:], copy.output[:]
    copy.input.extend(f"x{i}" if name else "" for i, name in enumerate(proto.input))
    copy.output.append("y")
    fixed = {f"x{i}" for i, name in enumerate(proto.input) if name in constants}
    kinds = {
        name: onnx.helper.make_tensor_value_info(name, 1, array.shape)
        for name, array in feeds.items()
    }
    alone = onnx.helper.make_model(
        onnx.helper.make_graph(
            [copy],
            "product",
            [kind for name, kind in kinds.items() if name not in fixed],
            [onnx.helper.make_tensor_value_info("y", 1, None)],
            [onnx.numpy_helper.from_array(feeds[name], name) for name in sorted(fixed)],
        ),
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    return _runner(alone, {k: v for k, v in feeds.items() if k not in fixed}, ["y"])


def session_options(settings: Settings) -> onnxruntime.SessionOptions:
    """Returns the options that ortops uses by default, which leaves given ones unchanged."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads()
    options.enable_mem_pattern = False
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(settings.spin))
    return options


def _runner(
    model: onnx.ModelProto, feeds: Mapping[str, Any], outputs: Sequence[str]
) -> Callable[[], object]:
    """Returns a function that runs a model as it is, with outputs that stay where they are."""
    import onnxruntime

    from ortops.engine.execution.settings import Settings

    options = session_options(Settings())
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()
    }
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    results = session.run_with_ort_values(list(outputs), values)
    for name, result in zip(outputs, results, strict=True):
        binding.bind_ortvalue_output(name, result)

    def run(feeds: Mapping[str, Any] = feeds) -> None:  # OrtValues do not keep arrays alive
        session.run_with_iobinding(binding)

    return run
