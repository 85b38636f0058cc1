"""`derivatives.vmap` next to one run of onnxruntime for each entry, and to jax.vmap."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from dot_test import Case, normal
from onnx import helper, numpy_helper
from running import REFUSALS, plain_session, run_session
from violations import all_violations

import ortops
from models import lenet, lstm, mlp, resnet, transformer
from ortops import ArgumentError, Function, ModelError, Tape, derivatives, op
from ortops.derivatives.batching import RULES
from ortops.graph.autodiff.registry import ZeroRule
from ortops.graph.autodiff.rules.table import BUILT_IN

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
N = 3


def rows(table: Any) -> Iterator[Case]:
    if isinstance(table, list | tuple):
        for item in table:
            yield from rows(item)
    elif isinstance(table, Case):
        yield table


def cases() -> dict[tuple[str, str], list[Case]]:
    """Returns the cases of the tests of gradient rules by operator."""
    found: dict[tuple[str, str], list[Case]] = {}
    for path in sorted(Path(__file__).parent.glob("test_rules_*.py")):
        for name, table in vars(importlib.import_module(path.stem)).items():
            for case in rows(table) if name.isupper() else ():
                found.setdefault((case.domain, case.op), []).append(case)
    return found


CASES = cases()

UNFIT = {
    "Attention-qk": "onnxruntime infers the size 0 for the scores of past keys in a Scan",
}
"""Beginnings of names of cases that onnxruntime does not run in a Scan, and why."""

LOOPS = {
    *("AffineGrid", "CenterCropPad", "DFT", "DeformConv", "MaxRoiPool", "Range", "RoiAlign"),
    *("TensorScatter", "Unique"),
}
"""Operators without a batching rule or a definition in the standard domain: they run in a Scan."""

DEFINED = {"RotaryEmbedding"}
"""Operators without a batching rule that are replaced by their definitions, which need no Scan."""


def all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    nodes = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            nodes += all_nodes(attribute.g) if attribute.HasField("g") else []
    return nodes


def scans(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Scan" for node in all_nodes(model.graph))


def run_quietly(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    session = plain_session(model, log_severity_level=4, intra_op_num_threads=1)
    return run_session(session, feeds)


def model_of(case: Case, symbolic: bool) -> tuple[onnx.ModelProto, Feeds] | None:
    """Returns a model of one operator and its feeds, or None if onnxruntime has no kernel."""
    for narrow in (case.float32, True):
        model, feeds = _model_of(case, symbolic, narrow)
        try:
            results = run_quietly(model, feeds)
        except REFUSALS:
            continue
        del model.graph.output[:]
        for index, array in enumerate(results):
            dims = [f"y{index}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            model.graph.output.append(helper.make_tensor_value_info(f"y{index}", kind, dims))
        return model, feeds
    return None


def _model_of(case: Case, symbolic: bool, narrow: bool) -> tuple[onnx.ModelProto, Feeds]:
    inputs, initializers, names = [], [], []
    feeds: Feeds = {}
    for index, array in enumerate(case.inputs):
        if array is None:
            names.append("")
            continue
        if narrow and array.dtype == np.float64:
            array = array.astype(np.float32)
        name = f"x{index}"
        names.append(name)
        if index in case.constant:
            initializers.append(numpy_helper.from_array(array, name))
        else:
            feeds[name] = array
            dims = [f"{name}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            inputs.append(helper.make_tensor_value_info(name, kind, dims))
    outputs = [f"y{index}" for index in range(case.outputs)]
    node = helper.make_node(
        case.op, names, outputs, name="under_test", domain=case.domain, **case.attributes
    )
    imports = [helper.make_opsetid("", case.opset)]
    if case.domain:
        imports.append(helper.make_opsetid(case.domain, 1))
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([node], "case", inputs, results, initializers)
    return helper.make_model(graph, opset_imports=imports, ir_version=10), feeds


def entries(array: Array) -> list[Array]:
    """Returns arrays that are valid where one is."""
    if array.dtype.kind == "f":
        return [array * array.dtype.type(factor) for factor in (1, 0.9, 0.75)]
    return [array, array[::-1] if array.ndim else array, array]


def assert_close(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(found, expected)
        return
    tolerance = {8: 1e-9, 4: 1e-4, 2: 1e-2}[expected.dtype.itemsize]
    size = np.abs(expected[np.isfinite(expected)]).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * size)


def check(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    mapped: Mapping[str, int],
    *,
    size: int | None = None,
) -> onnx.ModelProto | None:
    """Compares a model with runs of the given one; None if it fails for an entry, or shapes differ.

    Args:
        model: The model of one entry.
        feeds: The inputs of one entry.
        mapped: The axes of the inputs that are mapped.
        size: See `derivatives.vmap`.
    """
    each = {
        name: entries(array) if name in mapped else [array] * N for name, array in feeds.items()
    }
    try:
        runs = [run_quietly(model, {n: e[index] for n, e in each.items()}) for index in range(N)]
    except REFUSALS:
        return None
    if any(len({result.shape for result in results}) > 1 for results in zip(*runs, strict=True)):
        return None
    result = derivatives.vmap(model, mapped, size=size)
    onnx.checker.check_model(result)
    stacked = {n: np.stack(each[n], mapped[n]) if n in mapped else a for n, a in feeds.items()}
    found = run_quietly(result, stacked)
    for array, results in zip(found, zip(*runs, strict=True), strict=True):
        assert_close(array, np.stack(results))
    return result


# ----------------------------------------------------------------------------- single operators


@pytest.mark.nightly(27)
@pytest.mark.slow
@pytest.mark.parametrize("key", CASES, ids=lambda key: key[1])
def test_an_operator_is_mapped(key: tuple[str, str]) -> None:
    checked = 0
    for number, case in enumerate(CASES[key]):
        made = model_of(case, symbolic=number % 2 == 1)
        if made is None or any(str(case).startswith(name) for name in UNFIT):
            continue
        model, feeds = made
        subsets = [list(feeds), *([name] for name in feeds)]
        names = subsets[number // 2 % len(subsets)]
        axes = {name: (number % (feeds[name].ndim + 1)) for name in names}
        result = check(model, feeds, axes)
        if result is None:  # such as for sizes that are mapped
            result = check(model, feeds, {next(iter(feeds)): 0})
        checked += result is not None
        if result is not None and not key[0]:
            assert key[1] not in LOOPS or scans(result) == 1
            assert key[1] not in DEFINED or scans(result) == 0
    assert checked or not any(map(_runs, CASES[key]))


def _runs(case: Case) -> bool:
    return model_of(case, symbolic=False) is not None


@pytest.mark.slow
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_convolutions_with_mapped_weights_are_grouped(op_type: str) -> None:
    cases = [case for case in CASES["", op_type] if case.name]
    for number, case in enumerate(cases):
        made = model_of(case, symbolic=False)
        if made is None or len(made[1]) < 2:
            continue
        model, feeds = made
        axes = [dict.fromkeys(feeds, 0), {"x1": 0}, {"x0": 0, "x1": 1}][number % 3]
        result = check(model, feeds, axes, size=N)
        assert result is not None
        assert scans(result) == 0


def test_operators_with_a_rule_are_counted_in_the_documentation() -> None:
    known = {key for key, rule in BUILT_IN.rules.items() if not isinstance(rule, ZeroRule)}
    ruled = {("", op_type) for op_type in RULES}
    counts = [len(ruled), len(ruled & known), len(known)]
    page = (Path(ortops.__file__).parent / "docs" / "functions.md").read_text(encoding="utf-8")
    text = "{} operators of the standard domain have a batching rule, among them {} of the {} op"
    assert text.format(*counts) in " ".join(page.split())
    assert not (LOOPS | DEFINED) & set(RULES)
    assert ruled <= BUILT_IN.rules.keys()


# ------------------------------------------------------------------------------------- networks


def slices(model: onnx.ModelProto, feeds: Mapping[str, Array], mapped: Sequence[str]) -> list[Any]:
    """Returns the outputs for each entry, stacked."""
    session = plain_session(model)
    count = len(feeds[mapped[0]])
    runs = [
        run_session(session, {n: a[index] if n in mapped else a for n, a in feeds.items()})
        for index in range(count)
    ]
    return [np.stack(results) for results in zip(*runs, strict=True)]


def images(*shape: int, seed: int = 0) -> Array:
    return normal(*shape, seed=seed, dtype=np.float32)


def normalizing_network() -> onnx.ModelProto:
    """A network of most kinds of layers that have a batching rule."""
    rng = np.random.default_rng(3)
    with Tape(name="network") as tape:

        def weight(name: str, *shape: int) -> Any:
            return tape.initializer(name, rng.normal(size=shape).astype(np.float32) / 3)

        ones, zeros = np.ones(6, np.float32), np.zeros(6, np.float32)
        x = tape.input("x", np.float32, ["batch", 3, 8, 8])
        x = op.Conv(x, weight("w1", 6, 3, 3, 3), weight("b1", 6), pads=[1, 1, 1, 1])
        x = op.BatchNormalization(x, ones, zeros, zeros, ones)
        x = op.MaxPool(op.Relu(x), kernel_shape=[2, 2], strides=[2, 2])
        x = op.InstanceNormalization(x, ones, zeros)
        x = op.GroupNormalization(x, ones, zeros, num_groups=2)
        x = op.ConvTranspose(x, weight("w2", 6, 4, 2, 2), strides=[2, 2])
        x = op.AveragePool(op.Pad(x, [0, 0, 1, 1, 0, 0, 0, 0]), kernel_shape=[3, 3])
        x = op.Reshape(x, op.Concat(op.Shape(x, end=1), [4, -1], axis=0))
        x = op.Transpose(x, perm=[0, 2, 1])[:, :5]
        x = op.LayerNormalization(x, weight("scale", 4))
        y = op.Einsum(x, x, equation="bij,bkj->bik")
        x = op.Softmax(y / 2.0, axis=-1) @ x
        x = op.Gemm(op.Flatten(x), weight("w3", 20, 7), weight("b3", 7))
        x = op.Where(x > 0, x, op.Clip(x, -1.0, 1.0)).astype(np.float64).astype(np.float32)
        tape.output(op.LogSoftmax(op.Concat(x, -x, axis=1), axis=1), "y")
        tape.output(op.ReduceMean(x, [1], keepdims=0), "mean")
    return tape.model()


NETWORKS: dict[str, tuple[Any, Feeds]] = {
    "mlp": (lambda: mlp.mlp((4, 16, 2)), {"images": images(5, 3, 4)}),
    "lenet": (lenet.lenet, {"images": images(5, 2, 1, 8, 8)}),
    "resnet": (resnet.resnet, {"images": images(2, 2, 1, 8, 8)}),
    "layers": (normalizing_network, {"x": images(5, 2, 3, 8, 8)}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_needs_no_scan(name: str) -> None:
    make, feeds = NETWORKS[name]
    model = make()
    (given,) = [value.name for value in model.graph.input]
    feeds = dict(zip([given], feeds.values(), strict=True))
    mapped = derivatives.vmap(model)
    onnx.checker.check_model(mapped, full_check=True)
    assert scans(mapped) == 0
    for found, expected in zip(
        run_session(plain_session(mapped), feeds), slices(model, feeds, [given]), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [transformer.transformer, lstm.lstm])
def test_sequences_of_vectors_need_no_scan(make: Any) -> None:
    model = make(features=5)
    feeds = {"tokens": images(3, 2, 6, 5)}
    mapped = derivatives.vmap(model)
    assert scans(mapped) == 0
    found = run_session(plain_session(mapped), feeds)
    for array, expected in zip(found, slices(model, feeds, ["tokens"]), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-5)


def test_recurrent_layers_need_no_scan() -> None:
    """Those of one gate and of three have fewer inputs than an LSTM."""
    with all_violations() as violation:
        for op_type, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4)):
            with violation(op_type), Tape(name="recurrent") as tape:
                x = tape.input("x", np.float32, ["time", "batch", 3])
                w, r = images(1, gates * 2, 3, seed=1), images(1, gates * 2, 2, seed=2)
                y, *_ = tape.emit(op_type, [x, w, r], {"hidden_size": 2}, outputs=1)
                tape.output(y, "y")
                feeds = {"x": images(4, 5, 2, 3)}
                mapped = derivatives.vmap(tape.model())
                assert scans(mapped) == 0
                found = run_session(plain_session(mapped), feeds)
                (expected,) = slices(tape.model(), feeds, ["x"])
                np.testing.assert_allclose(found[0], expected, rtol=1e-4, atol=1e-5)


def test_axes() -> None:
    """Places of the axis, and inputs and outputs without it."""
    with Tape(name="axes") as tape:
        x = tape.input("x", np.float32, ["n", 3])
        w = tape.input("w", np.float32, [3, 2])
        shift = tape.input("shift", np.float32, [])
        tape.output(x @ w + shift, "y")
        tape.output(w * 2.0, "double")
    model = tape.model()
    x, w, shift = images(4, 3, 5), images(3, 2), np.float32(0.5)
    expected = np.einsum("nkb,km->bnm", x, w) + 0.5
    f = Function(model)
    for in_axes in ((2, None, None), {"x": 2}, (-1, None, None), {"x": -1, "w": None}):
        y, double = f.vmap(in_axes, (0, None))(x, w, shift)
        np.testing.assert_allclose(y, expected, rtol=1e-5)
        np.testing.assert_array_equal(double, 2 * w)
    y, double = f.vmap({"x": 2}, -1)(x, w, shift)
    np.testing.assert_allclose(y, np.moveaxis(expected, 0, -1), rtol=1e-5)
    np.testing.assert_array_equal(double, np.repeat(2 * w[..., None], 5, -1))
    y, double = f.vmap({"x": 2}, {"y": 1})(x, w, shift)
    np.testing.assert_allclose(y, np.moveaxis(expected, 0, 1), rtol=1e-5)
    assert double.shape == (5, 3, 2)
    shown = repr(f.vmap({"x": 2}, (1, None)))
    assert "x: float32[n, 3, mapped]" in shown
    assert "y: float32[n, mapped, 2]" in shown
    y, _ = f.vmap({"shift": 0})(x[..., 0], w, np.zeros(0, np.float32))
    assert y.shape == (0, 4, 2)


@pytest.mark.parametrize(
    ("in_axes", "out_axes", "words"),
    [
        ((None, None), 0, "in_axes must map at least one input, got (None, None)"),
        ((0,), 0, "in_axes must have one axis for each of x, n, got 1"),
        ({"z": 0}, 0, "in_axes: no tensor 'z'"),
        ((0.5, None), 0, "in_axes: the axis of 'x' must be an integer, got 0.5"),
        (("0", None), 0, "in_axes: the axis of 'x' must be an integer, got '0'"),
        (True, 0, "in_axes: the axis of 'x' must be an integer, got True"),
        ((3, None), 0, "in_axes: the axis of 'x' must be between -2 and 1"),
        ((0, None), -4, "out_axes: the axis of 'y' must be between -2 and 1"),
        ((0, None), {"q": 0}, "out_axes: no tensor 'q'"),
    ],
)
def test_wrong_axes_are_named(in_axes: Any, out_axes: Any, words: str) -> None:
    with Tape(name="two") as tape:
        x = tape.input("x", np.float32, [3])
        n = tape.input("n", np.int64, [])
        tape.output(x * n.astype(np.float32), "y")
    model = tape.model()
    for call in (
        lambda: derivatives.vmap(model, in_axes, out_axes),
        lambda: Function(model).vmap(in_axes, out_axes),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert words in str(caught.value)


def test_an_output_that_differs_needs_an_axis() -> None:
    with pytest.raises(ModelError, match="output 'logits' depends on mapped inputs"):
        derivatives.vmap(mlp.mlp((4, 2)), 0, None)
    with pytest.raises(ModelError, match="training_info"):
        derivatives.vmap(
            ortops.build_training_model(mlp.mlp((4, 2)), loss="MeanSquaredError", optimizer="SGD")
        )
    with pytest.raises(ArgumentError, match="size must be an integer >= 0, got -1"):
        derivatives.vmap(mlp.mlp((4, 2)), size=-1)


def test_inputs_of_different_length_are_refused() -> None:
    with Tape(name="sum") as tape:
        x, z = (tape.input(name, np.float32, [3]) for name in "xz")
        tape.output(x + z, "y")
    with pytest.raises(ortops.FeedError, match="'z'"):
        Function(tape.model()).vmap()(images(4, 3), images(5, 3))


# ------------------------------------------------------------------ loops, sequences and others

BRANCHING = """
<ir_version: 10, opset_import: ["" : 21]>
branching (float[n] x, bool positive, int64 steps) => (float[n] y, float[] last, float[m] both)
<float[1] w = {2}>
{
    scaled = Mul (x, w)
    z = If (positive) <
        then_branch = one () => (float[n] a) { a = Exp (scaled) },
        else_branch = two () => (float[n] b) { b = Neg (x) }
    >
    shifted = Add (z, w)
    yes = Constant <value = bool {1}> ()
    y = Loop (steps, yes, shifted) <
        body = step (int64 i, bool go, float[n] h) => (bool on, float[n] h_new)
        { on = Identity (go) r = Tanh (h) h_new = Add (r, x) }
    >
    parts = SplitToSequence (y)
    back = Constant <value = int64 {-1}> ()
    end = SequenceAt (parts, back)
    half = Mul (end, w)
    pair = SequenceInsert (parts, half)
    taken = SequenceAt (pair, back)
    last = ReduceSum <keepdims = 0> (taken)
    joined = SequenceConstruct (x, scaled)
    short = Constant <value = bool {0}> ()
    both = If (short) <
        then_branch = first () => (float[m] c) { c = SequenceAt (joined, back) },
        else_branch = all () => (float[m] d) { d = ConcatFromSequence <axis = 0> (joined) }
    >
}
"""


def test_control_flow_and_sequences() -> None:
    model = onnx.parser.parse_model(BRANCHING)
    x, steps = images(4, 3), np.array([0, 3, 1, 2])
    yes = np.array([True, False, True, False])
    given = {"x": x, "positive": yes, "steps": steps}
    for mapped in (["x"], ["x", "positive", "steps"], ["positive"], ["steps", "x"]):
        feeds = {name: a if name in mapped else a[1] for name, a in given.items()}
        feeds = {name: np.asarray(a) for name, a in feeds.items()}
        found = derivatives.vmap(model, dict.fromkeys(mapped, 0))
        onnx.checker.check_model(found)
        results = run_session(plain_session(found), feeds)
        for array, expected in zip(results, slices(model, feeds, mapped), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-6)


def test_operators_are_replaced_by_definitions_unless_those_round_otherwise() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1, "ai.onnx.ml" : 3]>
    others (float[n, 3] x) => (float[n, 2] y)
    <float s = {0.1}, uint8 z = {128}, uint8[3, 2] w = {1, 2, 3, 4, 5, 200}>
    {
        a = com.microsoft.QuickGelu (x)
        b = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (a)
        q = QuantizeLinear (b, s, z)
        p = QLinearMatMul (q, s, z, w, s, z, s, z)
        y = DequantizeLinear (p, s, z)
    }
    """
    model = onnx.parser.parse_model(text)
    found = derivatives.vmap(model)
    looped = [node.op_type for node in all_nodes(found.graph) if node not in found.graph.node]
    assert sorted(looped) == ["QLinearMatMul", "Scaler"]
    assert scans(found) == 2
    assert "QuickGelu" not in {node.op_type for node in found.graph.node}
    feeds = {"x": images(4, 2, 3)}
    (array,) = run_session(plain_session(found), feeds)
    np.testing.assert_array_equal(array, slices(model, feeds, ["x"])[0])


def test_nodes_without_a_rule_share_a_scan() -> None:
    with Tape(name="shared") as tape:
        x = tape.input("x", np.float32, [8])
        y = op.Unique(op.Unique(x, sorted=1), sorted=1)
        other = op.Unique(op.Exp(x), sorted=1)
        tape.output(op.Unique(op.Neg(y)) + other, "y")
    found = derivatives.vmap(tape.model())
    assert scans(found) == 2
    feeds = {"x": images(4, 8)}
    (array,) = run_session(plain_session(found), feeds)
    np.testing.assert_array_equal(array, slices(tape.model(), feeds, ["x"])[0])


@pytest.mark.parametrize("mapped", [["x"], ["w"], ["start", "x"], ["x", "w", "start"]])
@pytest.mark.parametrize("axes", ["", ", scan_input_axes = [1], scan_output_axes = [-1]"])
def test_scans_and_branches_compute_all_entries_at_once(mapped: list[str], axes: str) -> None:
    """The only Scan is that of the model, and branches read mapped tensors from outside."""
    text = f"""
    <ir_version: 10, opset_import: ["" : 21]>
    recurrent (float[4, 4] x, float[4, 4] w, float[4] start, bool doubled)
        => (float[4] last, float[4, 4] all)
    {{
        last, all = Scan <num_scan_inputs = 1{axes}, body = step
            (float[4] h, float[4] slice) => (float[4] h_new, float[4] shown) {{
                sum = Add (h, slice)
                y = MatMul (sum, w)
                h_new = Tanh (y)
                shown = If (doubled) <
                    then_branch = one () => (float[4] a) {{ a = Add (h_new, h_new) }},
                    else_branch = two () => (float[4] b) {{ b = Softmax (slice) }}
                >
            }}> (start, x)
    }}
    """
    model = onnx.parser.parse_model(text)
    given = {"x": images(3, 4, 4), "w": images(3, 4, 4) / 2, "start": images(3, 4)}
    found = derivatives.vmap(model, dict.fromkeys(mapped, 0))
    onnx.checker.check_model(found, full_check=True)
    assert scans(found) == 1
    for doubled in (True, False):
        feeds = {name: a if name in mapped else a[1] for name, a in given.items()}
        feeds["doubled"] = np.array(doubled)
        results = run_session(plain_session(found), feeds)
        for array, expected in zip(results, slices(model, feeds, mapped), strict=True):
            np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)


def test_outputs_that_are_inputs_or_constants_keep_their_names() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    ends (float[3] x, float[3] z) => (float[3] x, float[3] y, float[2] c, float[3] z, float[2] w)
    <float[2] w = {1, 2}>
    { y = Neg (x) c = Identity (w) }
    """
    model = onnx.parser.parse_model(text)
    found = derivatives.vmap(model, {"x": 0})
    assert [value.name for value in found.graph.output] == ["x", "y", "c", "z_1", "w_1"]
    assert [value.name for value in found.graph.input] == ["x", "z"]
    assert [value.name for value in found.graph.initializer] == ["w"]
    x, z = images(4, 3), images(3, seed=1)
    results = run_session(plain_session(found), {"x": x, "z": z})
    expected = (x, -x, [[1, 2]] * 4, [z] * 4, [[1, 2]] * 4)
    for array, each in zip(results, expected, strict=True):
        np.testing.assert_array_equal(array, each)


def test_sequences_at_the_ends_are_refused() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21]>
    sequence (float[n] x, seq(float[n]) s) => (seq(float[n]) y)
    { y = SequenceInsert (s, x) }
    """
    model = onnx.parser.parse_model(text)
    with pytest.raises(ModelError, match="in_axes: input 's' must be a tensor"):
        derivatives.vmap(model)
    with pytest.raises(ModelError, match="out_axes: output 'y' must be a tensor"):
        derivatives.vmap(model, {"x": 0})


# ------------------------------------------------------------------------------- random numbers


def test_random_numbers_are_drawn_per_entry_if_the_operator_reads_mapped_tensors() -> None:
    with Tape(name="random") as tape:
        x = tape.input("x", np.float32, [50])
        tape.output(op.Dropout(x, 0.5, True), "dropped")
        tape.output(op.RandomNormalLike(x), "like")
        tape.output(op.Bernoulli(op.Clip(x, 0.5, 0.5)), "bernoulli")
        tape.output(op.Multinomial(op.Unsqueeze(x * 0.0, [0]), sample_size=40), "drawn")
        tape.output(x + op.RandomNormal(shape=[50]), "shared")
    found = derivatives.vmap(tape.model())
    assert scans(found) == 0
    names = [value.name for value in found.graph.output]
    results = run_session(plain_session(found), {"x": np.ones((2, 50), np.float32)})
    for name, (a, b) in zip(names, results, strict=True):
        assert np.array_equal(a, b) == (name == "shared"), name


# -------------------------------------------------------------------- derivatives, training, jax


def energy() -> onnx.ModelProto:
    """y = Σ tanh(x · w)², of one entry."""
    with Tape(name="energy") as tape:
        x = tape.input("x", np.float64, [3])
        w = tape.initializer("w", normal(3, 4))
        tape.output((op.Tanh(x @ w) ** 2).sum(), "y")
    return tape.model()


def test_a_derivative_is_mapped_and_a_map_is_differentiated() -> None:
    x = normal(5, 3, seed=1)
    single, mapped = Function(energy()), Function(energy()).vmap()
    gradients = np.stack([single.value_and_grad(row)[1] for row in x])
    gradient = derivatives.gradient(energy())
    onnx.checker.check_model(derivatives.vmap(gradient))
    _, found = Function(derivatives.vmap(gradient))(x)
    np.testing.assert_allclose(found, gradients, rtol=1e-12)
    y, pullback = mapped.vjp(x)
    np.testing.assert_allclose(pullback(np.ones_like(y))[0], gradients, rtol=1e-12)
    hessians = np.stack([single.hessian(row) for row in x])
    found = Function(derivatives.vmap(derivatives.jacobian(gradient, y="d_y_d_x")))(x)[-1]
    np.testing.assert_allclose(found, hessians, rtol=1e-10)
    tangents = normal(5, 3, seed=2)
    _, pushed = mapped.jvp((x,), (tangents,))
    np.testing.assert_allclose(pushed, (gradients * tangents).sum(1), rtol=1e-12)


def test_a_map_is_mapped_again_and_over_weights() -> None:
    x, f = normal(2, 5, 3, seed=1), Function(energy())
    expected = np.array([[f(row) for row in rows] for rows in x])
    np.testing.assert_allclose(f.vmap().vmap(1, 1)(x.swapaxes(0, 1)), expected.swapaxes(0, 1))
    np.testing.assert_allclose(f.vmap((0,)).vmap(0)(x), expected, rtol=1e-12)
    weights = normal(2, 3, 4, seed=5)
    ensemble = f.reading(["w"]).vmap({"w": 0, "x": None})
    found = ensemble(x[0, 0], weights)
    each = [f.with_parameters({"w": w})(x[0, 0]) for w in weights]
    np.testing.assert_allclose(found, each, rtol=1e-12)
    other = f.with_parameters({"w": weights[1]}).vmap()(x[0])
    np.testing.assert_allclose(other, [f.with_parameters({"w": weights[1]})(r) for r in x[0]])


def test_a_map_is_trained() -> None:
    with Tape(name="one") as tape:
        x = tape.input("x", np.float32, [3])
        w = tape.initializer("w", np.zeros((3, 2), np.float32))
        tape.output(op.MatMul(x, w), "y")
    model = derivatives.vmap(tape.model())
    trainable = ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.5)
    )
    session = ortops.TrainingSession(trainable)
    x = images(20, 3)
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    losses = [session.step({"x": x, "targets": x @ w})["loss"] for _ in range(50)]
    assert losses[-1] < losses[0] / 100


@pytest.mark.slow
@pytest.mark.optional("jax", "compare")
def test_next_to_jax() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    def network(x: Any, w: Any) -> Any:
        h = jax.nn.softmax(jnp.tanh(x @ w), axis=-1)
        return jnp.cumsum(h, axis=0).sum(axis=0), jnp.transpose(h)[1:]

    with Tape(name="network") as tape:
        x = tape.input("x", np.float32, [4, 3])
        w = tape.input("w", np.float32, [3, 5])
        h = op.Softmax(op.Tanh(x @ w))
        tape.output(op.CumSum(h, 0).sum(axis=0), "s")
        tape.output(op.Transpose(h)[1:], "t")
    f = Function(tape.model())
    x, w = images(4, 6, 3), images(3, 5)
    for in_axes, out_axes, args in (
        ((1, None), 0, (x, w)),
        ((1, None), (1, 2), (x, w)),
        ((None, 2), 1, (x[:, 0], images(3, 5, 6))),
        ((1, 0), (-1, -2), (x, images(6, 3, 5))),
    ):
        expected = jax.vmap(network, in_axes, out_axes)(*args)
        for array, other in zip(f.vmap(in_axes, out_axes)(*args), expected, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)
