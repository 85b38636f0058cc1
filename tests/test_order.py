"""The order in which nodes of a step run: how much is in memory, counted from shapes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import ortops
from ortops import Tape, TrainingSession, op
from ortops.engine.execution.onnxruntime_sessions import Sessions
from ortops.engine.execution.settings import Settings
from ortops.engine.inference import InferenceSession
from ortops.graph.passes import order
from ortops.graph.passes.blocked.kernels import block_size

SIZES = {ir.DataType.BOOL: 1, ir.DataType.FLOAT: 4, ir.DataType.INT64: 8}


def most(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> int:
    """Returns the most bytes that results of nodes take, each until its last reader has run."""
    owner: dict[Any, Any] = {}
    for node in nodes:
        if node.op_type == "Reshape":  # a view
            owner[node.outputs[0]] = owner.get(node.inputs[0], node.inputs[0])
    last = {owner.get(v, v): place for place, node in enumerate(nodes) for v in node.inputs if v}
    kept = {owner.get(value, value) for value in outputs}
    sizes: dict[ir.Value, int] = {}
    peak = 0
    for place, node in enumerate(nodes):
        for value in node.outputs:
            assert value.shape is not None
            assert value.dtype is not None
            if value not in owner and node.op_type != "Constant":
                sizes[value] = int(np.prod(value.shape.numpy())) * SIZES[value.dtype]
        peak = max(peak, sum(sizes.values()))
        sizes = {v: n for v, n in sizes.items() if last.get(v, -1) > place or v in kept}
    return peak


def masked(layers: int) -> ir.Graph:
    """Returns layers of Relu with masks of the elements that each left as they were, read last."""
    with Tape(name="masked") as tape:
        x = tape.input("x", np.float32, [100])
        pairs = []
        for _ in range(layers):
            scaled = x * x
            x = op.Relu(scaled)
            pairs.append((scaled, x))
        for scaled, y in reversed(pairs):
            x = x * op.Equal(scaled, y).astype(np.float32)
            tape.output(op.ReduceSum(x * y, keepdims=0))  # the gradient of a weight
    order.put_last_results_first(tape.graph)
    return tape.graph


def test_masks_are_computed_before_what_they_are_made_of_is_kept() -> None:
    graph = masked(6)
    before = most(list(graph), graph.outputs)
    order.order_for_memory(graph)
    after = most(list(graph), graph.outputs)
    assert before >= 6 * 2 * 400  # both tensors of each mask
    assert after <= 6 * (400 + 100) + 3 * 400  # one and the mask, and what is being computed
    ir.to_proto(ir.Model(graph, ir_version=10))  # in topological order


def test_work_grows_linearly_with_the_readers_of_a_value() -> None:
    """Counted in instructions of Python, which are the same in every run."""

    def instructions(readers: int) -> int:
        with Tape(name="shared") as tape:
            x = tape.input("x", np.float32, [100])
            shared = op.Exp(x)
            for _ in range(readers):
                x = op.Relu(x * shared)
            tape.output(x)
        count = 0

        def trace(frame: Any, event: str, _: object) -> Any:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            order.order_for_memory(tape.graph)
        finally:
            sys.settrace(before)
        return count

    few, many = instructions(50), instructions(200)
    assert many < 4.5 * few, (few, many)  # one for each pair of readers shows as 6


def test_nothing_moves_without_gain() -> None:
    def large(x: Any) -> Any:  # results of eight times the size, made when they are read
        a = op.Exp(x)
        b = op.Sin(a)
        return op.Concat(*[a] * 8, axis=0) * op.Expand(op.ReduceSum(b, keepdims=1), [800])

    def read_again(x: Any) -> Any:  # the mask frees nothing, because a later node reads both
        a = op.Exp(x)
        b = op.Sin(a)
        c = op.Cos(b)
        return (a + b) * c * op.Equal(a, b).astype(np.float32)

    def random(x: Any) -> Any:  # numbers that are drawn depend on the order of draws
        a = op.Exp(x)
        return op.Cos(op.Sin(x)) * op.Bernoulli(a).astype(np.float32)

    moved = []
    for build in (large, read_again, random):
        with Tape(name="graph") as tape:
            tape.output(build(tape.input("x", np.float32, [100])), "y")
        before = [node for node in order._executed(tape.graph) if node.op_type != "Constant"]
        order.order_for_memory(tape.graph)
        if before != [node for node in tape.graph if node.op_type != "Constant"]:
            moved.append(build.__name__)
    assert not moved


def drawn(rng: np.random.Generator) -> ir.Graph:
    """Returns a graph of random nodes, whose results are of three sizes and two types."""
    kinds: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a + b,
        lambda a, b: op.Equal(a, b).astype(np.float32),
        lambda a, b: op.Relu(op.Reshape(a, [10, -1])).reshape(-1),
        lambda a, b: op.Where(op.Less(a, b), a, np.float32(0)),
        lambda a, b: op.Concat(a, b, axis=0) if a.shape == (100,) else op.Slice(a, [0], [100], [0]),
        lambda a, b: op.Reshape(a, [-1, 10]).reshape(-1) * op.ReduceMax(b, keepdims=1),
    ]
    with Tape(name="drawn") as tape:
        x = tape.input("x", np.float32, [100])
        tensors = [x, x * x]
        for _ in range(30):
            a = tensors[rng.integers(len(tensors))]
            same = [each for each in tensors if each.shape == a.shape]
            tensors.append(kinds[rng.integers(len(kinds))](a, same[rng.integers(len(same))]))
        for number, tensor in enumerate(tensors):
            if not tensor.value.uses() or rng.random() < 0.1:
                tape.output(op.Identity(tensor), f"y{number}")
    return tape.graph


@pytest.mark.parametrize("seed", range(12))
def test_orders_of_random_graphs_take_no_more_memory_and_compute_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    graph, x = drawn(rng), rng.standard_normal(100, np.float32).round(1)

    def results() -> list[Any]:
        model = ir.to_proto(ir.Model(graph, ir_version=10))
        onnx.checker.check_model(model)  # also the order of nodes
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        return [array.tobytes() for array in session.run(None, {"x": x})]

    before = most([*order._executed(graph)], graph.outputs)
    wanted, nodes = results(), {*graph}
    order.order_for_memory(graph)
    assert {*graph} == nodes
    assert most(list(graph), graph.outputs) <= before
    assert results() == wanted


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Returns a function that returns the nodes that sessions ran, in order."""
    profiles: list[str] = []
    create = onnxruntime.InferenceSession.__init__
    alive: list[Any] = []

    def profiled(session: Any, model: Any, options: Any = None, *rest: Any, **more: Any) -> None:
        options.enable_profiling = True
        options.profile_file_prefix = str(tmp_path / f"{len(alive)}")
        create(session, model, options, *rest, **more)
        alive.append(session)

    monkeypatch.setattr(onnxruntime.InferenceSession, "__init__", profiled)

    def nodes() -> list[str]:
        profiles.extend(session.end_profiling() for session in alive)
        alive.clear()
        events = [event for file in profiles for event in json.loads(Path(file).read_text())]
        ran = [event for event in events if event["name"].endswith("_kernel_time")]
        return [str(event["name"]).removesuffix("_kernel_time") for event in ran]

    return nodes


def network(shape: tuple[int, ...], kernel: int, *, stride: int, clip: bool) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    with Tape(name="network") as tape:
        x = tape.input("x", np.float32, ["batch", *shape])
        channels = shape[0]
        for number in range(3):
            size = (32, channels, kernel, kernel) if number == 0 else (32, 32, 1, 1)
            w = tape.initializer(f"w{number}", 0.1 * rng.standard_normal(size, np.float32))
            x = op.Conv(x, w, strides=[stride if number == 0 else 1] * 2)
            if clip:
                x = op.Clip(x, np.float32(0), np.float32(6))
        tape.output(op.ReduceMean(x, [2, 3], keepdims=0), "y")
    return ortops.build_training_model(tape.model(), loss="SoftmaxCrossEntropy", optimizer="SGD")


@pytest.mark.skipif(block_size() is None, reason="onnxruntime has no blocked kernels here")
def test_steps_compute_masks_of_clip_in_the_forward_pass(
    executed: Callable[[], list[str]],
) -> None:
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((4, 16, 16, 16), np.float32),
        "labels": rng.integers(0, 32, 4),
    }
    session = TrainingSession(network((16, 16, 16), 1, stride=1, clip=True))
    session.step(feeds)
    ran = executed()
    masks = [place for place, name in enumerate(ran) if name.rpartition("/")[2].startswith("Equal")]
    last = max(place for place, name in enumerate(ran) if name.startswith("loss/"))
    assert len(masks) == 3
    assert masks[-1] < last


@pytest.mark.parametrize(("kernel", "stride"), [(4, 4), (3, 1)])
def test_the_gradient_of_the_first_weight_is_the_last_that_runs(
    kernel: int, stride: int, executed: Callable[[], list[str]]
) -> None:
    """A node that onnxruntime replaces would run first, when all cotangents are there."""
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((2, 3, 16, 16), np.float32),
        "labels": rng.integers(0, 32, 2),
    }
    model = network((3, 16, 16), kernel, stride=stride, clip=False)
    TrainingSession(model, settings=Settings(joined=0).without("blocked")).step(feeds)
    ran = [name for name in executed() if name.startswith("Gradient/")]
    convolutions = [name.split("/")[1] for name in ran if "onv" in name.split("/")[1]]
    assert len(dict.fromkeys(convolutions)) == 3
    # The last node of a layer runs before the first one of the layer before it.
    ends = {name: place for place, name in enumerate(convolutions)}
    assert list(ends) == sorted(ends, key=ends.__getitem__)


def test_sessions_free_memory_early_unless_options_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[tuple[bool, bool]] = set()
    create = InferenceSession._open

    def noted(session: Any, source: Any, options: Any, *rest: Any, **more: Any) -> None:
        seen.add((options.enable_mem_reuse, options.enable_mem_pattern))
        create(session, source, options, *rest, **more)

    monkeypatch.setattr(InferenceSession, "_open", noted)
    options = onnxruntime.SessionOptions()
    options.enable_mem_reuse = False
    model = network((3, 8, 8), 1, stride=1, clip=False)
    feeds = {"x": np.ones((2, 3, 8, 8), np.float32), "labels": np.zeros(2, np.int64)}
    for each, expected in ((None, (False, False)), (options, (False, True))):
        seen.clear()
        TrainingSession(model, sess_options=each).step(feeds)
        assert seen == {expected}


def test_sessions_keep_no_copy_of_their_graph() -> None:
    with Tape(name="square") as tape:
        x = tape.input("x", np.float32, [2])
        tape.output(x * x, "y")
    sessions = Sessions("onnx", None, [("CPUExecutionProvider", {})], Settings())
    session = sessions.open(ir.from_proto(tape.model()))
    assert not any(isinstance(value, bytes) for value in vars(session).values())
    np.testing.assert_array_equal(session.run(None, {"x": np.float32([2, 3])})[0], [4, 9])
