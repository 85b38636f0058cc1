"""One computation gives one training graph, whichever of PyTorch's exporters wrote the file."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from running import run

import ortops
from ortops import Tape, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.graph.autodiff.registry import Table
from ortops.graph.autodiff.rules import RULES
from ortops.graph.passes.normal_form import NORMAL_FORM
from ortops.losses import SoftmaxCrossEntropy
from ortops.optimizers import SGD
from tests.spies import Spy, lowered

WEIGHTS = ", ".join(map(str, np.random.default_rng(0).standard_normal(24).round(2).tolist()))


def parsed(body: str) -> onnx.ModelProto:
    """A model whose nodes compute h [batch, 6] from a [batch, 6]."""
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 4] x) => (float[batch, 6] y)
    <float[4, 6] w = {{{WEIGHTS}}},
     float[6] v = {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0}},
     float zero = {{0.0}}, float half = {{0.5}}, bool on = {{1}}, bool off = {{0}},
     double big = {{3.0}}, int64 one = {{1}}, int64 last = {{-1}}, int64 four = {{4}},
     int64[1] axes = {{1}},
     int64[3] parts = {{2, 3, 1}}, int64[3] cube = {{-1, 3, 2}}, int64[2] flat = {{-1, 6}}>
    {{ a = MatMul(x, w) {body} y = Mul(h, v) }}""")


FORMS = {
    "identity": ("h = Identity(a)", "Identity"),
    "cast_like": ("c = CastLike(big, a) h = Clip(a, zero, c)", "CastLike"),
    "cast_like_same": ("h = CastLike(a, x)", "CastLike"),
    "cast": ("h = Cast<to=1>(a)", "Cast"),
    "dropout_of_ratio_0": ("h = Dropout(a, zero, on)", "Dropout"),
    "transposes": (
        (
            "c = Reshape(a, cube) t = Transpose<perm=[0,2,1]>(c) u = Transpose<perm=[2,0,1]>(t) "
            "s = Transpose<perm=[1,0,2]>(u) h = Reshape(s, flat)"
        ),
        "Transpose",
    ),
    "sequence": (
        (
            "s = SplitToSequence<axis=1>(a, parts) b = SequenceAt(s, one) c = SequenceAt(s, last) "
            "h = Concat<axis=1>(c, b, c, c)"
        ),
        "SequenceAt",
    ),
    "sequence_of_4": (
        (
            "s = SplitToSequence<axis=-1>(a, four) b = SequenceAt(s, one) c = SequenceAt(s, last) "
            "h = Concat<axis=1>(b, c, b)"
        ),
        "SplitToSequence",
    ),
    "sequence_of_1": (
        (
            "s = SplitToSequence<axis=1, keepdims=0>(a) b = SequenceAt(s, one) "
            "c = SequenceAt(s, last) d = Unsqueeze(b, axes) e = Unsqueeze(c, axes) "
            "h = Concat<axis=1>(d, e, d, d, e, d)"
        ),
        "SequenceAt",
    ),
}


def trained(model: onnx.ModelProto, settings: Settings, feeds: Any) -> tuple[Counter[str], Any]:
    """Returns the operators of the step, and the losses of some steps."""
    spy = Spy()
    session = TrainingSession(
        build_training_model(model, loss="SoftmaxCrossEntropy", optimizer=SGD(0.01)),
        settings=spy.watching(settings),
    )
    losses = [float(session.step(feeds)["loss"]) for _ in range(3)]
    return Counter(spy.operators[-1]), losses


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    body, gone = FORMS[form]
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((5, 4), np.float32), "labels": rng.integers(0, 6, 5)}
    model = parsed(body)
    operators, losses = trained(model, Settings(), feeds)
    others, wanted = trained(model, Settings().without("normal_form"), feeds)
    assert operators[gone] == (gone in ("Cast", "Identity"))  # those of the loss
    assert others[gone] > operators[gone]
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert losses[-1] < losses[0]


def test_a_dropout_that_drops_stays() -> None:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((5, 4), np.float32), "labels": rng.integers(0, 6, 5)}
    _, losses = trained(parsed("h = Dropout(a, half, on)"), Settings(), feeds)
    _, plain = trained(parsed("h = Identity(a)"), Settings(), feeds)
    assert losses[0] != plain[0]


# ------------------------------------------------------------------------------------------ masks

MASKS: dict[str, tuple[str, int, int]] = {
    # for each: nodes that compute s from the scores x, the columns that are masked, the Adds left
    "all": ("k = GreaterOrEqual(index, i0) e = Expand(k, size) m = Where(e, zero, low)", 0, 0),
    "none": ("k = Less(index, i0) e = Expand(k, size) m = Where(e, low, zero)", 0, 0),
    "some": ("k = GreaterOrEqual(index, i1) e = Expand(k, size) m = Where(e, zero, low)", 1, 1),
    "fed": ("k = GreaterOrEqual(x, low) m = Where(k, zero, low)", 0, 1),
    "constant": ("m = Identity(zeros)", 0, 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("ending", ["s = Add(x, m)", "s = Add(m, x)"])
def test_masks(name: str, ending: str) -> None:
    """A mask of zeros that is known before the step is not added to scores."""
    body, masked, adds = MASKS[name]
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 6] x) => (float[batch, 6] y)
    <int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i6 = {{6}}, float zero = {{0.0}},
     float[6] zeros = {{0.0, 0.0, 0.0, 0.0, 0.0, 0.0}}, float low = {{-1e30}}>
    {{ size = Shape(x) index = Range(i0, i6, i1) {body} {ending} y = Softmax(s) }}""")
    made = lowered(model, NORMAL_FORM)
    assert counts(made, "Add") == (adds,)
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    e = np.exp(x.astype(np.float64)) * (np.arange(6) >= masked)
    np.testing.assert_allclose(run(made, {"x": x})[0], e / e.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("other", ["y = Add(z, s)", "y = Mul(s, s)"])
def test_masks_that_others_read(other: str) -> None:
    """-0 + 0 is 0, so only a Softmax may read the scores instead."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 6] x) => (float[batch, 6] y, float[batch, 6] z)
    {{ size = Shape(x) m = ConstantOfShape(size) s = Add(x, m) z = Softmax(s) {other} }}""")
    made = lowered(model, NORMAL_FORM)
    assert counts(made, "Add")[0] == 1 + other.count("Add")


def test_a_variable_of_zeros() -> None:
    """It is not a mask, and is trained."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[batch, 2] x) => (float[batch, 2] y) <float[2] bias = {0.0, 0.0}>
    { s = Add(x, bias) y = Softmax(s) }""")
    trainable = build_training_model(
        model, loss="MeanSquaredError", optimizer=SGD(1.0), trainable=["bias"]
    )
    session = TrainingSession(trainable)
    x, targets = np.zeros((1, 2), np.float32), np.array([[1, 0]], np.float32)
    session.step({"x": x, "targets": targets})
    np.testing.assert_allclose(session.parameters["bias"], [0.25, -0.25], rtol=1e-6)


def test_a_mask_that_broadcasts() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    g (float[1, 6] x) => (float[3, 6] y)
    <int64[2] size = {3, 6}>
    { m = ConstantOfShape(size) s = Add(x, m) y = Softmax(s) }""")
    made = lowered(model, NORMAL_FORM)
    assert run(made, {"x": np.zeros((1, 6), np.float32)})[0].shape == (3, 6)


# ------------------------------------------------------------------------------- parts of an axis


def of_parts(body: str, dtype: str = "float") -> onnx.ModelProto:
    """A model of sum(h² v) and its gradient by x, whose nodes compute h from x [batch, 6]."""
    return onnx.parser.parse_model(f"""<ir_version: 10,
        opset_import: ["": 21, "ai.onnx.preview.training": 1]>
    g ({dtype}[batch, 6] x) => ({dtype} loss, {dtype}[batch, 6] dx)
    <int64[1] n0 = {{0}}, int64[1] n1 = {{1}}, int64[1] n2 = {{2}}, int64[1] n3 = {{3}},
     int64[1] n5 = {{5}}, int64[1] n6 = {{6}}, int64[1] last = {{-1}}, int64[1] m4 = {{-4}},
     int64[1] end = {{9223372036854775807}}, int64[3] parts = {{2, 3, 1}}, int64 two = {{2}},
     int64 i0 = {{0}}, int64 i1 = {{1}}, int64 i2 = {{2}}, int64 j1 = {{-1}},
     {dtype}[6] v = {{1.0, 2.0, 3.0, 4.0, 5.0, 6.0}}>
    {{ {body} s2 = Mul(h, h) s3 = Mul(s2, v) loss = ReduceSum<keepdims=0>(s3)
       dx = ai.onnx.preview.training.Gradient<xs=["x"], y="loss">(x) }}""")


def counts(model: onnx.ModelProto, *operators: str) -> tuple[int, ...]:
    found = Counter(node.op_type for node in model.graph.node)
    return tuple(found[each] for each in operators)


PARTS: dict[str, tuple[str, int, list[int], tuple[int, int, int]]] = {
    "two": (
        "b = Slice(x, n0, n2, n1) c = Slice(x, n2, end, last) h = Concat<axis=1>(c, b)",
        1,
        [2, 3, 4, 5, 0, 1],
        (0, 2, 0),
    ),
    "three, from the end": (
        (
            "b = Slice(x, last, n6, n1, n1) c = Slice(x, n0, m4, n1, n1) "
            "d = Slice(x, m4, last, last) h = Concat<axis=-1>(b, c, d)"
        ),
        1,
        [5, 0, 1, 2, 3, 4],
        (0, 2, 0),
    ),
    "one twice": (
        (
            "b = Slice(x, n0, n2, n1) c = Slice(x, n2, n6, n1) d = Slice(x, n0, n2, n1) "
            "e = Slice(c, n0, n2, n1) h = Concat<axis=1>(b, e, d)"
        ),
        1,
        [0, 1, 2, 3, 0, 1],
        (1, 2, 1),  # e is a part of c alone
    ),
    "whole": ("h = Slice(x, n0, end, n1)", 1, [0, 1, 2, 3, 4, 5], (0, 0, 0)),
    "whole and parts": (
        (
            "a = Slice(x, n0, n6, n1) b = Slice(a, n0, n2, n1) c = Slice(x, n2, end, n1) "
            "h = Concat<axis=1>(c, b)"
        ),
        1,
        [2, 3, 4, 5, 0, 1],
        (0, 2, 0),
    ),
    "gap": (
        (
            "b = Slice(x, n0, n2, n1) c = Slice(x, n3, n6, n1) d = Slice(x, n3, n5, n1) "
            "f = Slice(d, n0, n1, n1) h = Concat<axis=1>(c, b, f)"
        ),
        1,
        [3, 4, 5, 0, 1, 3],
        (4, 1, 4),
    ),
    "overlap": (
        "b = Slice(x, n0, n3, n1) c = Slice(x, n2, n5, n1) h = Concat<axis=1>(c, b)",
        1,
        [2, 3, 4, 0, 1, 2],
        (2, 1, 2),
    ),
    "step": (
        "b = Slice(x, n0, n6, n1, n2) c = Slice(x, n1, n6, n1, n2) h = Concat<axis=1>(c, b)",
        1,
        [1, 3, 5, 0, 2, 4],
        (4, 1, 0),  # the gradient adds at positions, of which each is a Slice, too
    ),
    "rows, of unknown number": (
        "b = Slice(x, n0, n2) c = Slice(x, n2, end, n0) h = Concat<axis=0>(c, b)",
        0,
        [2, 3, 4, 0, 1],
        (2, 1, 2),
    ),
    "sequence": (
        (
            "s = SplitToSequence<axis=1>(x, parts) b = SequenceAt(s, i0) c = SequenceAt(s, i1) "
            "d = SequenceAt(s, j1) h = Concat<axis=1>(d, b, c)"
        ),
        1,
        [5, 0, 1, 2, 3, 4],
        (0, 2, 0),
    ),
    "sequence of equal parts": (
        (
            "s = SplitToSequence<axis=-1>(x, two) b = SequenceAt(s, i0) c = SequenceAt(s, i1) "
            "d = SequenceAt(s, i2) h = Concat<axis=1>(d, b, c)"
        ),
        1,
        [4, 5, 0, 1, 2, 3],
        (0, 2, 0),
    ),
    "sequence of which a part is not read": (
        (
            "s = SplitToSequence<axis=1>(x, two) b = SequenceAt(s, i0) c = SequenceAt(s, i1) "
            "h = Concat<axis=1>(b, c, b)"
        ),
        1,
        [0, 1, 2, 3, 0, 1],
        (2, 1, 2),
    ),
}
"""For each model the axis and the places of x in h, and the numbers of Slices, Splits and Pads; the
gradient of Concat is a Split."""


@pytest.mark.parametrize("dtype", ["float", "double"])
@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str, dtype: str) -> None:
    body, axis, places, expected = PARTS[name]
    model = lowered(of_parts(body, dtype), NORMAL_FORM)
    assert counts(model, "Slice", "Split", "Pad") == expected
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.dtype(dtype[:1]))
    loss, dx = run(model, {"x": x})
    wide, v = x.astype(np.float64), np.arange(1.0, 7.0)
    h, slope = wide.take(places, axis), np.zeros((5, 6))
    np.add.at(slope, (slice(None), places) if axis else (places,), 2 * h * v)
    tolerance = 1e-5 if dtype == "float" else 1e-13
    np.testing.assert_allclose(loss, np.sum(h * h * v), rtol=tolerance)
    np.testing.assert_allclose(dx, slope, rtol=tolerance)


def test_parts_of_size_1_without_their_axis() -> None:
    reads = " ".join(
        f"k{i} = Constant<value = int64 {{{i}}}>() p{i} = SequenceAt(s, k{i}) "
        f"q{i} = Unsqueeze(p{i}, n1)"
        for i in range(6)
    )
    order = [3, 1, 0, 5, 4, 2]
    h = ", ".join(f"q{i}" for i in order)
    body = f"s = SplitToSequence<axis=1, keepdims=0>(x) {reads} h = Concat<axis=1>({h})"
    model = lowered(of_parts(body), NORMAL_FORM)
    assert counts(model, "SequenceAt", "Slice", "Split", "Pad") == (0, 0, 2, 0)
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    _, dx = run(model, {"x": x})
    np.testing.assert_allclose(dx, 2 * x * (np.argsort(order) + 1.0), rtol=1e-5)


@pytest.mark.parametrize("whole", [True, False], ids=["", "gap"])
def test_single_indices(whole: bool) -> None:
    """As PyTorch's exporters take queries, keys and values from a stack of them."""
    places = [3, -5, 0, -1, 4, 2] if whole else [3, -5, 0, 3, 4, 2]
    reads = " ".join(
        f"k{i} = Constant<value = int64 {{{place}}}>() p{i} = Gather<axis=-1>(x, k{i}) "
        f"q{i} = Unsqueeze(p{i}, n1)"
        for i, place in enumerate(places)
    )
    h = ", ".join(f"q{i}" for i in range(6))
    model = lowered(of_parts(f"{reads} h = Concat<axis=1>({h})"), NORMAL_FORM)
    assert counts(model, "Gather", "Pad", "Split") == ((0, 0, 2) if whole else (6, 6, 1))
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    loss, dx = run(model, {"x": x})
    taken, slope = x.astype(np.float64)[:, places], np.zeros((2, 6))
    np.add.at(slope, (slice(None), np.array(places) % 6), 2 * taken * np.arange(1.0, 7.0))
    np.testing.assert_allclose(loss, np.sum(taken**2 * np.arange(1.0, 7.0)), rtol=1e-5)
    np.testing.assert_allclose(dx, slope, rtol=1e-5)


def test_an_index_and_a_slice() -> None:
    body = (
        "b = Slice(x, n1, n6, n1) a = Gather<axis=1>(x, i0) c = Unsqueeze(a, n1) "
        "h = Concat<axis=1>(b, c)"
    )
    model = lowered(of_parts(body), NORMAL_FORM)
    assert counts(model, "Gather", "Slice", "Pad", "Split") == (0, 0, 0, 2)
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    _, dx = run(model, {"x": x})
    np.testing.assert_allclose(dx, 2 * x * [6.0, 1.0, 2.0, 3.0, 4.0, 5.0], rtol=1e-5)


def test_parts_of_integers_stay_slices() -> None:
    body = (
        "i = Cast<to=7>(x) b = Slice(i, n0, n2, n1) c = Slice(i, n2, n6, n1) "
        "d = Concat<axis=1>(c, b) f = Cast<to=1>(d) h = Mul(x, f)"
    )
    assert counts(lowered(of_parts(body), NORMAL_FORM), "Slice", "Split") == (2, 0)


TWO = PARTS["two"][0]


def test_parts_that_are_outputs() -> None:
    model = of_parts(f"{TWO} c2 = Slice(x, n2, n6, n1)")
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", size])
        for name, size in (("b", 2), ("c", 4), ("c2", 4))
    )
    made = lowered(model, NORMAL_FORM)
    assert counts(made, "Slice", "Split", "Pad") == (0, 2, 0)
    assert [each.name for each in made.graph.output] == ["loss", "dx", "b", "c", "c2"]
    x = np.arange(18, dtype=np.float32).reshape(3, 6)
    _, _, *found = run(made, {"x": x})
    for one, other in zip(found, (x[:, :2], x[:, 2:], x[:, 2:]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "named",
    [
        "b = Slice(x, n0, n2, n1) c = Slice(x, n2, n6, n1) h = Concat<axis=1>(b, c)",
        "c = Slice(x, n2, n6, n1) b = Slice(x, n0, n2, n1) h = Concat<axis=1>(b, c)",
        "b = Slice(x, n0, end, n1) h = Identity(b)",
        "b = Transpose<perm=[1,0]>(x) h = Transpose<perm=[1,0]>(b)",
    ],
)
def test_a_tensor_by_which_is_differentiated_stays(named: str) -> None:
    model = of_parts(named)
    model.graph.node[-1].CopyFrom(
        onnx.helper.make_node(
            "Gradient", ["b"], ["dx"], domain="ai.onnx.preview.training", xs=["b"], y="loss"
        )
    )
    model.graph.output[1].type.tensor_type.ClearField("shape")
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    _, db = run(lowered(model, NORMAL_FORM), {"x": x})
    slope = 2 * x * np.arange(1.0, 7.0)
    expected = slope.T if "Transpose" in named else slope[:, : db.shape[1]]
    assert db.shape[1] == (2 if "c =" in named else 5 if "Transpose" in named else 6)
    np.testing.assert_allclose(db, expected, rtol=1e-5)


def test_parts_stay_slices_if_the_user_has_a_rule_for_split() -> None:
    table = Table()

    @table.vjp("Split")
    def none(g: Any, y: Any, x: Any, sizes: Any = None, *, axis: int = 0) -> Any:
        raise AssertionError

    body = "b = Slice(x, n0, n3, n1) c = Slice(x, n3, n6, n1) d = Mul(b, c) h = MatMul(d, w)"
    model = of_parts(body)
    w = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    made = lowered(model, NORMAL_FORM, rules=RULES.below(table))
    assert counts(made, "Slice", "Split") == (2, 0)
    assert counts(lowered(model, NORMAL_FORM), "Slice", "Split") == (0, 1)


# ------------------------------------------------------------------------------- losses of rows


def loss_of(
    shape: Sequence[Any], weights: Any = None, *, second: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """A model of a loss and its gradient by the scores."""
    with Tape(name="loss") as tape:
        scores = tape.input("scores", np.float32, shape)
        labels = tape.input("labels", np.int64, [shape[0], *shape[2:]])
        factors = [] if weights is None else [np.asarray(weights, np.float32)]
        loss, *others = tape.emit(
            "SoftmaxCrossEntropyLoss",
            [scores, labels, *factors],
            attributes,
            outputs=1 + second,
        )
        tape.output(loss, "loss")
        (slope,) = ortops.grad(loss, [scores])
        tape.output(slope, "slope")
        for each in others:
            tape.output(each, "log_p")
    return tape.model()


def rank_of_loss(model: onnx.ModelProto) -> int:
    """Returns the rank of the scores that a loss reads."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    (node,) = (each for each in inferred.node if each.op_type == "SoftmaxCrossEntropyLoss")
    (found,) = (v for v in (*inferred.value_info, *inferred.input) if v.name == node.input[0])
    return len(found.type.tensor_type.shape.dim)


@pytest.mark.nightly
@pytest.mark.quick(23)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", None])
@pytest.mark.parametrize("ignored", [None, 1, -100])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(3, 4, 5), ("batch", 4, 2, "width"), (2, 4, 1, 3, 2)])
def test_losses_of_rows(
    shape: tuple[Any, ...], weighted: bool, ignored: int | None, reduction: str | None
) -> None:
    weights = [0.5, 2.0, 1.0, 3.0] if weighted else None
    attributes = {"reduction": reduction, "ignore_index": ignored}
    model = lowered(loss_of(shape, weights, **attributes), NORMAL_FORM)
    assert rank_of_loss(model) == 2
    draw = np.random.default_rng(0)
    sizes = [3 if isinstance(size, str) else size for size in shape]
    scores = draw.standard_normal(sizes).astype(np.float32)
    labels = draw.integers(0, 4, (sizes[0], *sizes[2:]))
    if ignored is not None:
        labels[0, ..., 0] = ignored
    loss, slope = run(model, {"scores": scores, "labels": labels})

    wide = np.moveaxis(scores.astype(np.float64), 1, -1)
    p = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    counted = labels != ignored
    one_hot = np.eye(4)[np.where(counted, labels, 0)]
    rates = counted * (one_hot @ np.array(weights or [1.0] * 4))
    each = -np.log((p * one_hot).sum(-1)) * rates
    total = rates.sum() if reduction in ("mean", None) else 1.0
    expected = each if reduction == "none" else each.sum() / total
    by_scores = np.moveaxis((p - one_hot) * (rates / total)[..., None], -1, 1)
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(slope, by_scores, rtol=1e-4, atol=1e-7)


def test_a_transpose_before_a_loss_is_undone() -> None:
    """As in a language model whose logits (N, T, C) a loss reads as (N, C, T)."""
    draw = np.random.default_rng(0)
    with Tape(name="tiny") as tape:
        x = tape.input("x", np.float32, ["batch", "time", 8])
        w = tape.initializer("w", draw.standard_normal((8, 8), np.float32))
        head = tape.initializer("head", draw.standard_normal((8, 4096), np.float32))
        tape.output(op.Transpose(op.Tanh(x @ w) @ head, perm=[0, 2, 1]), "logits")
    loss = SoftmaxCrossEntropy(axis=1)
    model = build_training_model(tape.model(), loss=loss, optimizer="SGD", trainable=["w"])
    feeds = {
        "x": draw.standard_normal((3, 5, 8), np.float32),
        "labels": draw.integers(0, 4096, (3, 5)),
    }
    found = []
    for without in ((), ("normal_form",)):
        spy = Spy()
        settings = spy.watching(Settings().without(*without))
        session = TrainingSession(model, outputs=[], settings=settings)
        found.append([float(session.step(feeds)["loss"]) for _ in range(3)])
        assert ("Scan" in spy.operators[-1]) is not bool(without)  # chunks of logits
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_a_loss_whose_log_probabilities_are_read_stays() -> None:
    model = lowered(loss_of((3, 4, 5), second=True), NORMAL_FORM)
    assert rank_of_loss(model) == 3
    assert counts(model, "Transpose") == (0,)


def test_a_loss_with_label_smoothing_stays() -> None:
    """Both of its parts read one LogSoftmax, once onnxruntime has merged them."""
    with Tape(name="smooth") as tape:
        x = tape.input("x", np.float32, ["batch", 4, 5])
        tape.output(x * tape.initializer("w", np.ones((4, 5), np.float32)), "y")
    loss = SoftmaxCrossEntropy(axis=1, label_smoothing=0.1)
    draw = np.random.default_rng(0)
    feeds = {"x": draw.standard_normal((3, 4, 5), np.float32), "labels": np.zeros((3, 5), np.int64)}
    spy = Spy()
    model = build_training_model(tape.model(), loss=loss, optimizer="SGD")
    TrainingSession(model, settings=spy.watching(Settings())).step(feeds)
    assert "Transpose" not in spy.operators[-1]


# ------------------------------------------------------------------------------- both exporters


def residual() -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(8, 8, 3, 1, 1, bias=False) for _ in range(2))
            self.norm, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.norm(self.first(x)))
            return torch.relu(self.other(self.second(y)) + x)

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6)]
    stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
    return nn.Sequential(stem, nn.BatchNorm2d(8), nn.ReLU(), Block(), *head), (2, 3, 8, 8)


def mobile() -> tuple[Any, Any]:
    from torch import nn

    layers: list[nn.Module] = []
    for size in (3, 8):
        depthwise = nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False)
        layers += [nn.Conv2d(size, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), depthwise]
        layers += [nn.BatchNorm2d(8), nn.ReLU6()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(8, 6)]
    return nn.Sequential(*layers, *head), (2, 3, 8, 8)


def u_shaped() -> tuple[Any, Any]:
    import torch
    from torch import nn

    def double(inputs: int, outputs: int) -> nn.Sequential:
        first = nn.Conv2d(inputs, outputs, 3, 1, 1, bias=False)
        return nn.Sequential(first, nn.BatchNorm2d(outputs), nn.ReLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.bottom, self.up = double(3, 16), double(16, 32), double(32, 16)
            self.pool, self.wide = nn.MaxPool2d(2), nn.ConvTranspose2d(32, 16, 2, 2)
            self.head = nn.Conv2d(16, 6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skipped = self.down(x)
            y = self.wide(self.bottom(self.pool(skipped)))
            return self.head(self.up(torch.cat([y, skipped], 1)))

    return Net(), (2, 3, 8, 8)


def encoder() -> tuple[Any, Any]:
    from torch import nn

    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(80, 6)), (2, 5, 16)


def rotary() -> tuple[Any, Any]:
    import torch
    from torch import nn

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.together, self.head = nn.Linear(8, 20), nn.Linear(60, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.together(x).split([8, 8, 4], dim=-1)
            q, k = q.reshape(-1, 5, 8), k.reshape(-1, 5, 8)
            q, k = (torch.cat([-each[..., 4:], each[..., :4]], -1) for each in (q, k))
            first, second = (q * k)[:, :, :].chunk(2, 2)
            return self.head(torch.cat([second, v, first], 2).flatten(1))

    return Parts(), (2, 5, 8)


@pytest.fixture
def _quiet_exporters() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def exported(make: Callable[[], tuple[Any, Any]], exporter: str) -> tuple[onnx.ModelProto, Any]:
    """Returns a file in training mode, as users export it, and a batch."""
    import torch

    torch.manual_seed(0)
    module, shape = make()
    module.train()
    x = torch.randn(shape)
    common: dict[str, Any] = {"input_names": ["x"], "output_names": ["y"]}
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        if exporter == "dynamo":
            sizes = ({0: torch.export.Dim("batch")},)
            settings = {
                "dynamo": True,
                "optimize": False,
                "dynamic_shapes": sizes,
                "verbose": False,
            }
            made = torch.onnx.export(module, (x,), **common, **settings)
            assert made is not None
            return made.model_proto, x.numpy()
        settings = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
        axes = {"x": {0: "batch"}, "y": {0: "batch"}}
        settings |= {"dynamo": False, "dynamic_axes": axes, "opset_version": 17}
        torch.onnx.export(module, (x,), file, **common, **settings)
    return onnx.load_from_string(file.getvalue()), x.numpy()


SLOW = {"Where", "Greater", "GreaterOrEqual", "And", "CastLike", "Dropout"}
"""Operators of one thread, or that do nothing."""

HEAVY = {"Conv", "ConvTranspose", "MatMul", "Gemm", "FusedMatMul", "HardSigmoid", "Equal"}
HEAVY |= {"BatchNormalization", "LayerNormalization", "Softmax", "Transpose", "ReorderInput"}
HEAVY |= {"Pad", "Split"}


@pytest.mark.nightly(1)
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("_quiet_exporters")
@pytest.mark.parametrize("make", [residual, mobile, u_shaped, encoder, rotary])
def test_both_exporters_give_the_same_step(make: Callable[[], tuple[Any, Any]]) -> None:
    counted, found = [], []
    for exporter in ("TorchScript", "dynamo"):
        model, x = exported(make, exporter)
        shape = (len(x), *x.shape[2:]) if make is u_shaped else (len(x),)
        labels = np.random.default_rng(0).integers(0, 6, shape)
        operators, losses = trained(model, Settings(), {"x": x, "labels": labels})
        operators["Where"] -= 3 * operators["MaxUnpool"]  # those that find the maxima
        slow = {name: count for name, count in operators.items() if name in SLOW and count}
        assert not slow
        counted.append({name: operators[name] for name in HEAVY})
        found.append(losses)
    assert counted[0] == counted[1]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
