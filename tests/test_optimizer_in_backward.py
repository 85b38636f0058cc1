"""Updates in the backward pass: the same bits, in less memory, and only after the last reader.

Whether a writer waits is read from the graph that onnxruntime runs, as it wrote it to a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from internals import binding_of, graph_of, memory_of, session_of
from memory_peaks import counts_peaks, deep, peak

import ortops
from ortops import ArgumentError, Tape, TrainingSession, UnsupportedError, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.variant import Binding
from ortops.graph.constants import IR_VERSION
from ortops.graph.files.serialization import to_proto
from ortops.optimizers import Adam, Adam8bit, Momentum

WIDTH, DEPTH, ROWS = 192, 3, 6  # 192² elements, more than a variable needs to be updated early
VIEWS = ("Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten")
APART = Settings(joined=-1)
"""Small models are otherwise updated as without the option."""


def a_model(*, dropout: bool = False, shared: bool = False) -> onnx.ModelProto:
    """Returns layers with skip connections; with ``shared``, two of them have one weight."""
    rng = np.random.default_rng(0)
    with Tape(name="layers") as tape:
        x = tape.input("x", np.float32, ["batch", WIDTH])
        weights = [
            tape.initializer(f"w{i}", rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 14)
            for i in range(DEPTH)
        ]
        for number, weight in enumerate([*weights, weights[0]] if shared else weights):
            bias = tape.initializer(f"b{number}", rng.normal(size=WIDTH).astype(np.float32))
            hidden = op.Tanh(x @ weight + bias)
            if dropout:
                hidden, _ = op.Dropout(hidden, np.float32(0.25), outputs=2)
            x = op.LayerNormalization(
                x + hidden, tape.initializer(f"scale{number}", np.ones(WIDTH, np.float32))
            )
        tape.output(x, "y")
    return tape.model()


def batches(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    return [
        {name: rng.standard_normal((ROWS, WIDTH), np.float32) for name in ("x", "targets")}
        for _ in range(count)
    ]


def build(optimizer: Any = "Adam", model: Any = None, **settings: Any) -> onnx.ModelProto:
    return build_training_model(
        model or a_model(), loss="MeanSquaredError", optimizer=optimizer, **settings
    )


def session(model: Any, **settings: Any) -> TrainingSession:
    return TrainingSession(model, **{"optimizer_in_backward": True, "settings": APART, **settings})


def assert_equal(first: TrainingSession, second: TrainingSession) -> None:
    assert first.state.keys() == second.state.keys()
    for name, array in first.state.items():
        np.testing.assert_array_equal(second.state[name], array, strict=True, err_msg=name)


RATE = ortops.schedules.cosine(1e-2, steps=5)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({"optimizer": name}, {}) for name in sorted(ortops.optimizers.OPTIMIZERS)},
    "averages": ({"ema_decay": 0.75}, {}),
    "groups": ({"groups": {"w1": {"learning_rate": 1e-2, "norm_coefficient": 0.5}}}, {}),
    "schedule": ({"optimizer": Adam(RATE), "clip_value": 0.01}, {}),
    "dropout": ({"model": a_model(dropout=True)}, {}),
    "shared weight": ({"model": a_model(shared=True)}, {}),
    "recompute": ({"model": a_model(dropout=True)}, {"recompute": "sqrt"}),
    "some": ({"trainable": ["w1", "b*"]}, {}),
}
del CASES["Prodigy"]


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_other_sessions(name: str, tmp_path: Path) -> None:
    """Also after saving, in `run_steps`, in the middle of an evaluation, and after `reset`."""
    building, running = CASES[name]
    model = build(**building)
    ordinary = session(model, optimizer_in_backward=False, **running)
    early = session(model, **running)
    for batch in batches(3):
        first, second = (each.step(batch) for each in (ordinary, early))
        for key, array in first.items():
            np.testing.assert_array_equal(second[key], array)
    assert_equal(ordinary, early)
    early.save(tmp_path / "saved.onnx")
    early = session(tmp_path / "saved.onnx", **running)
    np.testing.assert_array_equal(early.run_steps(batches(2)), ordinary.run_steps(batches(2)))
    assert_equal(ordinary, early)
    early.reset()
    ordinary.reset()
    early.step(batches(1)[0])
    assert early.steps_done == 1


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_large_variables_are_updated_in_pieces(rows: int) -> None:
    settings = Settings(joined=-1, chunk=WIDTH * WIDTH // rows)
    model = build()
    sessions = [session(model, settings=settings, optimizer_in_backward=e) for e in (0 > 1, True)]
    chunks = [each.chunks for each in sessions[1].report().packed if each.in_graph]
    assert chunks == [rows] * DEPTH
    for batch in batches(3):
        for each in sessions:
            each.step(batch)
    assert_equal(*sessions)


def optimized(trained: TrainingSession, path: Path) -> onnx.GraphProto:
    """Returns the graph that onnxruntime runs in a step."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    proto = to_proto(ir.Model(graph_of(trained), ir_version=IR_VERSION))
    onnxruntime.InferenceSession(proto.SerializeToString(), options)
    return onnx.load(path).graph


def address(memory: Any) -> int:
    return int(memory.__array_interface__["data"][0])


def read(node: onnx.NodeProto) -> set[str]:
    """Returns all names that a node and its subgraphs read."""
    names = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= read(inner)
    return names


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adam8bit", "LAMB", "Adafactor"])
def test_what_writes_a_variable_follows_from_all_that_read_it(
    optimizer: str, tmp_path: Path
) -> None:
    trained = session(build(optimizer, a_model(shared=True)))
    trained.step(batches(1)[0])
    binding = binding_of(trained)
    graph = optimized(trained, tmp_path / "step.onnx")
    writers = {name: node for node in graph.node for name in node.output}
    before: dict[str, set[str]] = {}  # the outputs of all ancestors, by output
    for node in graph.node:
        found = set(node.output)
        for name in read(node):
            found |= before.get(name, set())
        before |= dict.fromkeys(node.output, found)

    checked = 0
    for output, target in binding.written.items():
        alike = {n for n, m in binding.read.items() if address(m) == address(target)}
        if not alike or target.size < WIDTH * WIDTH:
            continue
        aliases = set(alike)  # what may have the memory of the variable
        for node in graph.node:
            if node.op_type in VIEWS and node.input[0] in aliases:
                aliases |= set(node.output)
        for node in graph.node:
            if read(node) & aliases and node.output[0] not in aliases:
                assert set(node.output) & before[output] or node is writers[output], node.name
                checked += 1
    assert checked > 2 * DEPTH


def test_gradients_do_not_exist_together() -> None:
    """Each large variable is written in the graph, and no gradient is an output."""
    trained = session(build())
    trained.step(batches(1)[0])
    report = trained.report()
    assert report.optimizer_in_backward
    packed = [name for each in report.packed for role in each.variables for name in role]
    early = [each for each in report.packed if each.in_graph]
    assert [each.shapes for each in early] == [((WIDTH, WIDTH),)] * DEPTH
    assert {role for each in early for role in each.variables} == {
        (f"w{number}{moment}",) for number in range(DEPTH) for moment in ("", ".V", ".H")
    }
    assert set(packed) <= set(report.in_place)
    binding = binding_of(trained)
    addresses = {address(memory_of(trained, name)) for name in packed}
    large = [target for target in binding.written.values() if target.size >= WIDTH * WIDTH]
    assert len(large) == 3 * DEPTH  # the next values of a weight and two moments
    assert {address(target) for target in large} <= addresses
    sizes = {
        value.name: int(np.prod(value.shape.numpy()))
        for value in graph_of(trained).outputs
        if value.shape is not None and value.shape.is_static()
    }
    outputs = {name for name, size in sizes.items() if size >= WIDTH * WIDTH}
    assert outputs == {n for n, target in binding.written.items() if target.size >= WIDTH * WIDTH}


def test_onnxruntime_optimizes_the_graph_as_without_it() -> None:
    """Sums in updates run in kernels for convolutions, and must not count as such."""
    with Tape(name="linear") as tape:
        x = tape.input("x", np.float32, ["batch", WIDTH])
        tape.output(x @ tape.initializer("w", 2 * np.eye(WIDTH, dtype=np.float32)), "y")
    model = build(model=tape.model(), ema_decay=0.75)
    levels = []
    for early in (False, True):
        trained = session(model, optimizer_in_backward=early)
        trained.step(batches(1)[0])
        assert [each.in_graph for each in trained.report().packed] == [early]
        options = session_of(trained).get_session_options()
        levels.append(options.graph_optimization_level)
    assert levels == [onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL] * 2


def test_small_models_are_updated_as_before() -> None:
    trained = TrainingSession(build(), optimizer_in_backward=True)
    report = trained.report()
    assert not report.optimizer_in_backward
    assert [each.in_graph for each in report.packed] == [True]
    trained.gradients(batches(1)[0])


@pytest.mark.slow
def test_two_buffers_are_used_in_turn() -> None:
    """Lion reads its old mean after the new one could be there."""
    model = build("Lion")
    ordinary, early = session(model, optimizer_in_backward=False), session(model)
    report = early.report()
    packed = {name for each in report.packed for role in each.variables for name in role}
    assert packed & set(report.in_turn) >= {f"w{number}.V" for number in range(DEPTH)}
    for batch in batches(3):
        ordinary.step(batch)
        early.step(batch)
    assert_equal(ordinary, early)


@pytest.mark.slow
def test_a_step_that_fails_says_that_variables_are_between_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = session(build())
    trained.step(batches(1)[0])
    with monkeypatch.context() as failing:
        failing.setattr(Binding, "update", lambda binding, feeds: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained.step(batches(1)[0])
    with pytest.raises(ortops.OrtopsError, match="left the variables between two steps"):
        trained.step(batches(1)[0])
    trained.reset()
    assert_equal(trained, session(build()))


class Two:
    """Says that there is another process."""

    rank, size = 0, 2

    def sum(self, array: Any) -> None:
        raise AssertionError

    def broadcast(self, array: Any) -> None:
        raise AssertionError


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "use",
    [
        lambda s, batch: s.gradients(batch),
        lambda s, batch: s.apply({}),
        lambda s, batch: s.step(batch, reduce=lambda gradients: None),
        lambda s, batch: s.fit([batch] * 4, accumulate=2, progress=False),
        lambda s, batch: ortops.distributed.join(s, Two()),
    ],
    ids=["gradients", "apply", "reduce", "accumulate", "distributed"],
)
def test_what_needs_all_gradients_is_refused(use: Any) -> None:
    trained = session(build())
    with pytest.raises(ortops.OrtopsError, match="leave out optimizer_in_backward"):
        use(trained, batches(1)[0])


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "building", [{"clip_norm": 1.0}, {"optimizer": "Prodigy"}], ids=["clip_norm", "Prodigy"]
)
def test_updates_that_read_other_gradients_are_refused(building: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"the update of '\w+' reads the gradients of 9 par"):
        session(build(**building))


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"optimizer_in_backward .* kernels='python'"):
        session(build(), kernels="python")
    with pytest.raises(ArgumentError, match="optimizer_in_backward must be True or False, got 1"):
        session(build(), optimizer_in_backward=1)
    both = ortops.add_training(
        build(trainable=["w1"]),
        loss="MeanSquaredError",
        optimizer=Momentum(),
        trainable=["w0"],
        name="other",
    )
    with pytest.raises(UnsupportedError, match=r"2 training_info entries; choose one"):
        session(both)
    session(both, entry="other").step(batches(1)[0])


@pytest.mark.slow
@pytest.mark.optional("llvmlite", "fast")
def test_the_rest_may_be_compiled() -> None:
    model = build(Adam8bit(min_8bit_size=2**31))
    ordinary, early = (
        session(model, optimizer_in_backward=False),
        session(model, kernels="compiled"),
    )
    assert "b0" in early.compiled
    assert "w0" not in early.compiled
    for batch in batches(2):
        ordinary.step(batch)
        early.step(batch)
    assert_equal(ordinary, early)


@pytest.mark.slow
def test_fit_trains() -> None:
    data = {name: np.concatenate([b[name] for b in batches(4)]) for name in ("x", "targets")}
    sessions = [session(build(), optimizer_in_backward=e) for e in (False, True)]
    for each in sessions:
        each.fit(data, epochs=2, batch_size=ROWS, validation=data, progress=False)
    assert sessions[1].steps_done == 8
    assert_equal(*sessions)


SETUP = """
import sys
import numpy as np
import ortops

path, early = sys.argv[1], sys.argv[2] == "True"
session = ortops.TrainingSession(path, optimizer_in_backward=early)
feeds = {name: np.ones((2, 1024), np.float32) for name in ("x", "targets")}
"""
STEPS = """
for _ in range(3):
    session.step(feeds, outputs=["loss"])
"""


@pytest.mark.slow
@counts_peaks
def test_the_peak_lacks_the_gradients(tmp_path: Path) -> None:
    """Of 16 weights of 4 MiB, whose gradients exist together in ordinary steps."""
    width, count = 1024, 16
    path = tmp_path / "deep.onnx"
    ortops.save_model(build("SGD", deep(width, count)), path)
    peaks = [peak(SETUP, STEPS, str(path), str(early)) for early in (False, True)]
    assert peaks[0] > 0.8 * count * width * width * 4 / 1024
    assert peaks[1] < 0.4 * peaks[0]
