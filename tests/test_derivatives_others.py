"""Derivatives next to those of onnx-ad 0.3, on ONNX's own cases and on small models.

Where onnx-ad gives a derivative, ortops gives one too, and both agree but for the cases named here,
in which onnx-ad's is not the derivative. Conv with uneven pads and a stride, ReduceMean over empty
axes and ConvTranspose with groups are checked against differences in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import node_cases
import numpy as np
import onnx
import onnx_ad
import onnxruntime
import pytest
from node_cases import NodeCase, by_name
from running import REFUSALS
from test_derivatives import differences
from violations import all_violations

import ortops
from ortops import Tape, derivatives, op

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]
Feeds = dict[str, Any]
SEEDS = 2

CASES = {
    name: case
    for name, case in node_cases.node_cases().items()
    if not case.expanded and name not in node_cases.NOT_RUN
}

DIFFERENT = by_name(
    {
        "it takes the statistics that LayerNormalization puts out for constants": """
            layer_normalization_4d_axis0 layer_normalization_4d_axis1
            layer_normalization_4d_axis2 layer_normalization_4d_axis3
            layer_normalization_4d_axis_negative_4 layer_normalization_4d_axis_negative_3
            layer_normalization_4d_axis_negative_2 layer_normalization_4d_axis_negative_1
            layer_normalization_default_axis layer_normalization_2d_axis0
            layer_normalization_2d_axis1 layer_normalization_2d_axis_negative_2
            layer_normalization_2d_axis_negative_1 layer_normalization_3d_axis0_epsilon
            layer_normalization_3d_axis1_epsilon layer_normalization_3d_axis2_epsilon
            layer_normalization_3d_axis_negative_3_epsilon
            layer_normalization_3d_axis_negative_2_epsilon
            layer_normalization_3d_axis_negative_1_epsilon""",
        "it takes a determinant for a constant": "det_2d det_nd",
        "it takes what OneHot makes of its values for a constant": """
            onehot_with_axis onehot_negative_indices onehot_out_of_range_indices
            onehot_with_negative_axis""",
        "it takes the statistics that BatchNormalization reads for constants": """
            batchnorm_example batchnorm_epsilon""",
        "its derivative of Attention is NaN where a row is masked": """
            attention_causal_boolmask_nan_robustness
            attention_23_boolmask_fullymasked_row_nan_robustness
            attention_4d_causal_nonpad_negative_offset_structural_empty
            attention_23_fullymasked_qk_matmul_output_mode3_zero
            attention_24_fullymasked_qk_matmul_output_mode3_zero
            attention_24_qk_matmul_output_mode3_softmax_precision
            attention_local_window_gqa_rank4_mask""",
        "what is put out are scores of −∞, which have no derivative": """
            attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal
            attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal""",
        "it extrapolates tangents by the value that elements are extrapolated by": """
            resize_tf_crop_and_resize_extrapolation_value""",
        "it is not differentiable there: min is greater than max": "clip_min_greater_than_max",
        "it is not differentiable there: the norm of zeros": "l2normalization_axis_0",
        "it leaves out SpaceToDepth's mode": "spacetodepth_crd_mode_example",
        "negative numbers have no power beside a whole one": "pow",
    }
)
"""Cases in which the two differ, and why."""

WITHOUT = {
    "BatchNormalization",
    "CenterCropPad",
    "ConvTranspose",
    "CumProd",
    "CumSum",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "MeanVarianceNormalization",
    "MelWeightMatrix",
    "OptionalGetElement",
    "Pad",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceL1",
    "ReduceL2",
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
    "RoiAlign",
    "SequenceMap",
    "SplitToSequence",
    "Squeeze",
    "Unsqueeze",
    "SequenceAt",
    "ConcatFromSequence",
}
"""Operators of whose cases onnx-ad has no derivative that could be compared."""

COMPARED: dict[str, list[NodeCase]] = {}
for name, case in CASES.items():
    if case.op_type not in WITHOUT and name not in DIFFERENT:
        COMPARED.setdefault(case.op_type, []).append(case)


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """As onnx-ad tells to open its models: without onnxruntime's own fusions."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def theirs(
    kind: str, model: onnx.ModelProto, feeds: Feeds, values: Feeds
) -> tuple[dict[str, Array], dict[str, Array]] | None:
    """Returns onnx-ad's seeds and derivatives, with a leading axis; None where it has none.

    Args:
        kind: "forward" or "reverse".
        model: The model.
        feeds: Its inputs.
        values: Its outputs.
    """
    try:
        made = getattr(onnx_ad, kind)(model, layout="onnx")
        run = session(made)
    except Exception:  # it refuses it, or fails in many ways, or onnxruntime refuses what it makes
        return None
    rng = np.random.default_rng(3)
    prefix = "fwd_" if kind == "forward" else "adj_"
    likes = feeds if kind == "forward" else values
    names = [v.name for v in run.get_inputs() if v.name not in feeds]
    seeds = {}
    for name in (name.removeprefix(prefix) for name in names):
        drawn = rng.standard_normal((SEEDS, *likes[name].shape))
        seeds[name] = np.asarray(drawn, likes[name].dtype)
    puts_out = [v.name for v in run.get_outputs() if v.name not in values]
    given = {prefix + name: np.moveaxis(seed, 0, -1) for name, seed in seeds.items()}
    found = run.run(puts_out, feeds | given)
    return seeds, {
        name.removeprefix(prefix): np.moveaxis(array, -1, 0)
        for name, array in zip(puts_out, found, strict=True)
    }


def ours(
    kind: str, model: onnx.ModelProto, feeds: Feeds, seeds: Feeds, wanted: list[str]
) -> dict[str, Array]:
    """Returns the same derivatives by ortops."""
    make, prefix = (derivatives.jvp, "jvp_") if kind == "forward" else (derivatives.vjp, "vjp_")
    xs, ys = (list(seeds), wanted) if kind == "forward" else (wanted, list(seeds))
    run = session(make(model, xs=xs, y=ys, seeds=True, lowered=True))
    given = {f"seed_{name}": seed for name, seed in seeds.items()}
    names = [prefix + name for name in wanted]
    return dict(zip(wanted, run.run(names, feeds | given), strict=True))


def compare(kind: str, model: onnx.ModelProto, feeds: Feeds) -> bool:
    """Compares all derivatives that onnx-ad gives; tells whether it gives any."""
    names = [value.name for value in model.graph.output]
    try:
        values = dict(zip(names, session(model).run(names, feeds), strict=True))
    except (*REFUSALS, RuntimeError):  # optional outputs and bfloat16, which Python cannot have
        return False
    given = theirs(kind, model, feeds, values)
    if given is None:
        return False
    seeds, expected = given
    found = ours(kind, model, feeds, seeds, list(expected))
    for name, array in expected.items():
        half = array.dtype == np.float16 or any(s.dtype == np.float16 for s in seeds.values())
        tolerance = 2e-2 if half else 1e-3
        scale = max(1.0, float(np.abs(array[np.isfinite(array)]).max(initial=0.0)))
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance * scale)
    return True


def compare_case(case: NodeCase) -> int:
    """Returns how many of both kinds of derivatives onnx-ad gives."""
    model = node_cases.at_opset(case.model, node_cases.OPSET)
    return sum(compare(kind, model, case.feeds) for kind in ("forward", "reverse"))


@pytest.mark.nightly(5)
@pytest.mark.parametrize("operator", COMPARED)
def test_what_it_computes(operator: str) -> None:
    compared = 0
    with all_violations() as check:
        for case in COMPARED[operator]:
            with check(case.name):
                compared += compare_case(case)
    assert compared


@pytest.mark.nightly(7)
@node_cases.parametrized([name for name in DIFFERENT if name in CASES])
def test_it_is_different(name: str) -> None:
    with pytest.raises(AssertionError), np.errstate(invalid="ignore"):
        compare_case(CASES[name])


def test_it_computes_enough_to_compare() -> None:
    """The comparison is none of two refusals: of each kind of operator there are derivatives."""
    shown = "abs conv_with_strides_padding gemm_all_attributes softmax_axis_1 maxpool_2d_default"
    shown += " gather_0 lstm_defaults scan9_sum layer_normalization_default_axis pow_example"
    for name in shown.split():
        case = CASES[f"test_{name}"]
        values = dict(zip(case.outputs, session(case.model).run(None, case.feeds), strict=True))
        assert theirs("forward", case.model, case.feeds, values) is not None, name


# ----------------------------------------------------------------------------------------- models


def dense() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    with Tape(name="dense") as tape:
        x = tape.input("x", np.float32, [2, 5])
        for number, (rows, columns) in enumerate(itertools.pairwise((5, 16, 16, 3))):
            w = rng.standard_normal((rows, columns)).astype(np.float32) / np.float32(rows**0.5)
            x = op.Tanh(x @ tape.initializer(f"w{number}", w))
        tape.output(x, "y")
    return tape.model()


def images() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    with Tape(name="images") as tape:
        x = tape.input("x", np.float32, [2, 3, 8, 8])
        for number, (into, out) in enumerate(itertools.pairwise((3, 4, 6))):
            k = (rng.standard_normal((out, into, 3, 3)) / 4).astype(np.float32)
            x = op.Softplus(op.Conv(x, tape.initializer(f"k{number}", k), pads=[1, 1, 1, 1]))
            x = op.AveragePool(x, kernel_shape=[2, 2], strides=[2, 2])
        w = rng.standard_normal((24, 3)).astype(np.float32)
        tape.output(op.Flatten(x) @ tape.initializer("w", w), "y")
    return tape.model()


def attention() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    with Tape(name="attention") as tape:
        x = tape.input("x", np.float32, [2, 4, 6])

        def weight(name: str) -> Any:
            return tape.initializer(name, rng.standard_normal((6, 6)).astype(np.float32) / 3)

        q, k, v = (x @ weight(name) for name in ("q", "k", "v"))
        h = op.Softmax(q @ op.Transpose(k, perm=[0, 2, 1])) @ v + x
        scale = tape.initializer("scale", np.ones(6, np.float32))
        tape.output(op.LayerNormalization(h, scale, axis=-1), "y")
    return tape.model()


def branches() -> onnx.ModelProto:
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        branches (float[2, 5] x) => (float[2, 5] y) <float zero = {0}> {
            total = ReduceSum <keepdims = 0> (x)
            positive = Greater (total, zero)
            y = If (positive) <
                then_branch = yes () => (float[2, 5] a) { a = Mul (x, x) },
                else_branch = no () => (float[2, 5] b) { b = Sin (x) } >
        }""")


def recurrence() -> onnx.ModelProto:
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        recurrence (float[5] start, float[3, 5] x) => (float[5] last, float[3, 5] y) {
            last, y = Scan <num_scan_inputs = 1, body = step (float[5] s, float[5] r)
                => (float[5] t, float[5] u) { p = Mul (s, r)  t = Sin (p)  u = Add (t, r) }>
                (start, x)
        }""")


def loop() -> onnx.ModelProto:
    return onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21]>
        loop (float[2, 5] x) => (float[2, 5] y) <int64 three = {3}, bool yes = {1}> {
            y = Loop (three, yes, x) <body = step (int64 i, bool c, float[2, 5] s)
                => (bool d, float[2, 5] t) { d = Identity (c)  t = Sin (s) }>
        }""")


@pytest.mark.parametrize("build", [dense, images, attention, branches, recurrence, loop])
def test_models(build: Callable[[], onnx.ModelProto]) -> None:
    model = build()
    rng = np.random.default_rng(1)
    feeds = {}
    for value in model.graph.input:
        shape = [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
    assert compare("forward", model, feeds)
    assert compare("reverse", model, feeds)


@pytest.mark.parametrize("build", [dense, attention, branches])
def test_forward_over_reverse(build: Callable[[], onnx.ModelProto]) -> None:
    """Both give products with the Hessian of seed · y by giving their own results to themselves."""
    model = build()
    rng = np.random.default_rng(2)
    shape = [dim.dim_value or 2 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    (y,) = session(model).run(None, {"x": x})
    u = rng.standard_normal(y.shape).astype(np.float32)
    their = onnx_ad.forward(
        onnx_ad.reverse(model, layout="onnx"), inputs=["x"], outputs=["adj_x"], layout="onnx"
    )
    given = {"x": x, "adj_y": u[..., None], "fwd_x": v[..., None]}
    expected = session(their).run(["fwd_adj_x"], given)[0].reshape(x.shape)
    own = derivatives.jvp(derivatives.vjp(model), xs="x", y="vjp_x", lowered=True)
    (found,) = session(own).run(["jvp_vjp_x"], {"x": x, "seed_y": u, "seed_x": v})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- what onnx-ad 0.3 gets wrong


def convolve(x: Array, w: Array, pads: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """The sum of products of ONNX's Conv, in two dimensions."""
    top, left, bottom, right = pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    rows = (x.shape[2] - w.shape[2]) // strides[0] + 1
    columns = (x.shape[3] - w.shape[3]) // strides[1] + 1
    y = np.zeros((len(x), len(w), rows, columns))
    for row, column in np.ndindex(rows, columns):
        top, left = row * strides[0], column * strides[1]
        window = x[:, :, top : top + w.shape[2], left : left + w.shape[3]]
        y[:, :, row, column] = np.einsum("nchw,ochw->no", window, w)
    return y


def spread(x: Array, w: Array, group: int, strides: tuple[int, ...]) -> Array:
    """The sum of products of ONNX's ConvTranspose, in two dimensions, without pads."""
    n, channels, rows, columns = x.shape
    _, out, height, width = w.shape
    size = ((rows - 1) * strides[0] + height, (columns - 1) * strides[1] + width)
    y = np.zeros((n, group * out, *size))
    inside = channels // group
    for g, row, column in np.ndindex(group, rows, columns):
        own = slice(g * inside, (g + 1) * inside)
        top, left = row * strides[0], column * strides[1]
        place = y[:, g * out : (g + 1) * out, top : top + height, left : left + width]
        place += np.einsum("nc,cohw->nohw", x[:, own, row, column], w[own])
    return y


def wrong_cases() -> dict[str, tuple[onnx.ModelProto, Feeds, Callable[..., Array]]]:
    """Models, their inputs, and the functions that they are."""
    rng = np.random.default_rng(5)
    found: dict[str, tuple[onnx.ModelProto, Feeds, Callable[..., Array]]] = {}
    x, w = rng.standard_normal((2, 2, 7, 6)), rng.standard_normal((3, 2, 3, 2))
    with Tape(name="conv") as tape:
        values = [tape.input("x", np.float32, x.shape), tape.input("w", np.float32, w.shape)]
        tape.output(op.Conv(*values, pads=[1, 0, 2, 1], strides=[3, 2]), "y")
    found["Conv"] = tape.model(), {"x": x, "w": w}, (
        lambda x, w: convolve(x, w, (1, 0, 2, 1), (3, 2))
    )  # fmt: skip
    with Tape(name="mean") as tape:
        value = tape.input("x", np.float32, [2, 3])
        axes = tape.initializer("axes", np.zeros(0, np.int64))
        tape.output(op.ReduceMean(value**2, axes, keepdims=0), "y")
    found["ReduceMean"] = tape.model(), {"x": x[0, 0, :2, :3]}, lambda x: np.asarray((x**2).mean())
    x, w = rng.standard_normal((2, 4, 3, 4)), rng.standard_normal((4, 3, 3, 2))
    with Tape(name="transposed") as tape:
        values = [tape.input("x", np.float32, x.shape), tape.input("w", np.float32, w.shape)]
        tape.output(op.ConvTranspose(*values, group=2, strides=[2, 1]), "y")
    found["ConvTranspose"] = tape.model(), {"x": x, "w": w}, lambda x, w: spread(x, w, 2, (2, 1))
    return found


@pytest.mark.parametrize("name", ["Conv", "ReduceMean", "ConvTranspose"])
def test_its_wrong_cases_are_right(name: str) -> None:
    model, exact, function = wrong_cases()[name]
    feeds = {key: array.astype(np.float32) for key, array in exact.items()}
    (y,) = session(model).run(["y"], feeds)
    np.testing.assert_allclose(y, function(*exact.values()), rtol=1e-4, atol=1e-5)

    rng = np.random.default_rng(6)
    jacobians = {}
    for key, array in exact.items():

        def along(moved: Array, key: str = key) -> Array:
            return function(**(exact | {key: moved}))

        jacobians[key] = differences(along, array, 1e-4)
    seeds = {key: rng.standard_normal(array.shape) for key, array in exact.items()}
    by_y = rng.standard_normal(y.shape)
    product = sum(np.tensordot(jacobians[key], seed, seed.ndim) for key, seed in seeds.items())
    close = {"rtol": 1e-4, "atol": 2e-5}
    run = session(derivatives.jvp(model, lowered=True))
    given = {f"seed_{key}": seed.astype(np.float32) for key, seed in seeds.items()}
    np.testing.assert_allclose(run.run(["jvp_y"], feeds | given)[0], product, **close)
    run = session(derivatives.vjp(model, lowered=True))
    found = run.run(
        [f"vjp_{key}" for key in exact], feeds | {"seed_y": np.asarray(by_y, np.float32)}
    )
    for key, value in zip(exact, found, strict=True):
        expected = np.tensordot(by_y, jacobians[key], by_y.ndim)
        np.testing.assert_allclose(value, expected, **close)
    run = session(derivatives.jacobian(model, lowered=True))
    for key, value in jacobians.items():
        np.testing.assert_allclose(run.run([f"d_y_d_{key}"], feeds)[0], value, **close)


def test_a_model_stays_what_it_was() -> None:
    model = dense()
    before = model.SerializeToString()
    ortops.lower(derivatives.jvp(model))
    assert model.SerializeToString() == before
