"""Changes to models before they are trained.

The oracles are stock onnxruntime on the model as it was, row by row, and numpy.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from domain_models import value
from onnx import TensorProto, helper, numpy_helper
from running import run

import ortops
from models import mlp
from ortops import surgery

FOLDER = Path(__file__).parents[1] / ".models"
ORIENTATION = FOLDER / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"
INT = TensorProto.INT64
rng = np.random.default_rng(7)


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    """Makes a node, named after its operator; names of tensors are words, _ is an absent input."""
    attributes.setdefault("name", kind.lower())
    return helper.make_node(
        kind,
        ["" if name == "_" else name for name in inputs.split()],
        outputs.split(),
        **attributes,
    )


def graph_model(
    nodes: list[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    *,
    inputs: Any = (("x", ["batch", 6]),),
    outputs: Any = (("y", ["batch", 3]),),
    opset: int = 17,
    kind: int = TensorProto.FLOAT,
    ir_version: int = 8,
) -> onnx.ModelProto:
    """Makes a model from nodes; an input or output is (name, shape) or (name, shape, type)."""
    names: set[str] = set()
    for each in nodes:
        each.name = f"{each.name}_{len(names)}" if each.name in names else each.name
        names.add(each.name)
    graph = helper.make_graph(
        nodes,
        "graph",
        [value(name, shape, *(rest or [kind])) for name, shape, *rest in inputs],
        [value(name, shape, *(rest or [kind])) for name, shape, *rest in outputs],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    imports.append(helper.make_opsetid("ai.onnx.ml", 3))
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for item in model.graph.node:
        if item.op_type == "Constant":
            found[item.output[0]] = numpy_helper.to_array(item.attribute[0].t)
    return found


def declared(described: onnx.ValueInfoProto) -> list[Any]:
    return [d.dim_param or d.dim_value for d in described.type.tensor_type.shape.dim]


def untouched(function: Any, model: onnx.ModelProto, *args: Any, **settings: Any) -> Any:
    """Calls a function of a model, and looks whether the model stays as it was."""
    before = model.SerializeToString()
    try:
        result = function(model, *args, **settings)
    finally:
        assert model.SerializeToString() == before
    imports = [[(o.domain, o.version) for o in each.opset_import] for each in (model, result)]
    assert imports[0] == imports[1]
    assert result.ir_version == model.ir_version
    onnx.checker.check_model(result)
    return result


# ------------------------------------------------------------------------------------- replace_head

LINEAR = [node("Gemm", "x w b", "y")]

# Each: nodes, weights, and what the old columns would be in the new weight (numpy's axis).
HEADS: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], dict[str, list[int]]]] = {
    "gemm": (
        [node("Gemm", "x w b", "y")],
        {"w": floats(6, 3), "b": floats(3)},
        {"w": [6, 5], "b": [5]},
    ),
    "gemm transposed": (
        [node("Gemm", "x w b", "y", transB=1)],
        {"w": floats(3, 6), "b": floats(1, 3)},
        {"w": [5, 6], "b": [1, 5]},
    ),
    "gemm, scalar bias": (
        [node("Gemm", "x w b", "y")],
        {"w": floats(6, 3), "b": floats(1)},
        {"w": [6, 5]},
    ),
    "weight on the left": (
        [node("Transpose", "x", "t"), node("Gemm", "w t", "c"), node("Transpose", "c", "y")],
        {"w": floats(3, 6)},
        {"w": [5, 6]},
    ),
    "matmul": ([node("MatMul", "x w", "y")], {"w": floats(6, 3)}, {"w": [6, 5]}),
    "matmul and bias": (
        [node("MatMul", "x w", "h"), node("Add", "h b", "y")],
        {"w": floats(6, 3), "b": floats(3)},
        {"w": [6, 5], "b": [5]},
    ),
    "bias and matmul": (
        [node("MatMul", "x w", "h"), node("Add", "b h", "s"), node("Softmax", "s", "y")],
        {"w": floats(6, 3), "b": floats(3)},
        {"w": [6, 5], "b": [5]},
    ),
    "matmul, weight on the left": (
        [
            node("Transpose", "x", "t"),
            node("MatMul", "w t", "c"),
            node("Add", "c b", "s"),
            node("Transpose", "s", "y"),
        ],
        {"w": floats(3, 6), "b": floats(3, 1)},
        {"w": [5, 6], "b": [5, 1]},
    ),
    "weight behind views": (
        [
            node("Identity", "w", "i"),
            node("Transpose", "i", "t", perm=[1, 0]),
            node("Gemm", "x t b", "y"),
        ],
        {"w": floats(3, 6), "b": floats(3)},
        {"w": [5, 6], "b": [5]},
    ),
    "fused": (
        [
            node("FusedGemm", "x v", "h", activation="Relu", domain="com.microsoft"),
            node("FusedMatMul", "h w", "y", transB=1, domain="com.microsoft"),
        ],
        {"v": floats(6, 6), "w": floats(3, 6)},
        {"w": [5, 6]},
    ),
    "constant nodes": (
        [
            node("Constant", "", "w", value=numpy_helper.from_array(floats(6, 3))),
            node("MatMul", "x w", "y"),
        ],
        {},
        {"w": [6, 5]},
    ),
    "reshaped with the number": (
        [
            node("Gemm", "x w", "g"),
            node("Reshape", "g s", "r"),
            node("LogSoftmax", "r", "l", axis=1),
            node("Reshape", "l t", "y"),
        ],
        {"w": floats(6, 3), "s": ints(0, 3, 1), "t": ints(-1, 3)},
        {"w": [6, 5], "s": None, "t": None},
    ),
    "reshaped behind an axis of 1": (
        [node("Gemm", "x w", "g"), node("Reshape", "g s", "r"), node("Reshape", "r t", "y")],
        {"w": floats(6, 3), "s": ints(0, 1, 3), "t": ints(-1, 3)},
        {"w": [6, 5], "s": None, "t": None},
    ),
    "squeezed, expanded, clipped": (
        [
            node("Unsqueeze", "x zero", "u"),
            node("MatMul", "u w", "m"),
            node("Expand", "m e", "f"),
            node("ReduceMean", "f", "r", axes=[0], keepdims=0),
            node("Clip", "r", "y"),
        ],
        {"w": floats(6, 3), "zero": ints(0), "e": ints(2, 1, 3)},
        {"w": [6, 5], "e": None},
    ),
    "softmax by hand": (
        [
            node("MatMul", "x w", "m"),
            node("Exp", "m", "e"),
            node("ReduceSum", "e one", "s"),
            node("Div", "e s", "y"),
        ],
        {"w": floats(6, 3), "one": ints(1)},
        {"w": [6, 5]},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str) -> None:
    nodes, weights, changed = HEADS[name]
    model = graph_model(nodes, weights)
    before, result = weights_of(model), untouched(surgery.replace_head, model, classes=5)
    after = weights_of(result)
    for key, shape in changed.items():
        if shape is not None:
            assert list(after[key].shape) == shape
    for key in before.keys() - changed.keys():
        np.testing.assert_array_equal(after[key], before[key])
    w = after["w"]
    assert 0.15 < np.abs(w).mean() * np.sqrt(6) < 0.85  # uniform in ±1/√6: the mean is half of it
    assert np.abs(w).max() <= 1 / np.sqrt(6)
    if changed.get("b"):
        assert not after["b"].any()
    x = floats(4, 6)
    (y,) = run(result, {"x": x})
    assert y.shape == (4, 5)
    assert declared(result.graph.output[0]) == ["batch", 5]
    assert run(model, {"x": x})[0].shape == (4, 3)


def test_what_the_new_head_computes() -> None:
    nodes, weights, _ = HEADS["bias and matmul"]
    result = surgery.replace_head(graph_model(nodes, weights), classes=5)
    x = floats(4, 6)
    exact = np.exp(x.astype(np.float64) @ weights_of(result)["w"])
    np.testing.assert_allclose(
        run(result, {"x": x})[0], exact / exact.sum(1, keepdims=True), rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_types_of_weights(dtype: Any) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    model = graph_model(LINEAR, {"w": floats(6, 3, dtype=dtype), "b": floats(3, dtype=dtype)})
    for described in (*model.graph.input, *model.graph.output):
        described.type.tensor_type.elem_type = kind
    result = untouched(surgery.replace_head, model, classes=2)
    assert {array.dtype for array in weights_of(result).values()} == {np.dtype(dtype)}
    assert run(result, {"x": floats(2, 6, dtype=dtype)})[0].shape == (2, 2)


def test_seeds() -> None:
    model = graph_model(LINEAR, {"w": floats(6, 3), "b": floats(3)})
    made = [weights_of(surgery.replace_head(model, classes=3, seed=s))["w"] for s in (1, 1, 2)]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).all()


@pytest.mark.parametrize("between", ["Identity (p)", "Cast<to=11> (p)", "Cast<to=11> (i)"])
def test_a_bias_behind_a_cast_or_a_copy(between: str) -> None:
    wide = "Cast" in between
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]>
        m (float[n, 3] x) => ({"double" if wide else "float"}[n, 4] y) {{
            p = MatMul (x, w)  i = Identity (p)  c = {between}  y = Add (c, b) }}"""
    )
    weights = np.ones((3, 4), np.float32), np.ones(4, np.float64 if wide else np.float32)
    for name, array in zip("wb", weights, strict=True):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    changed = surgery.replace_head(model, classes=7)
    shapes = {tensor.name: list(tensor.dims) for tensor in changed.graph.initializer}
    assert shapes == {"w": [3, 7], "b": [7]}
    x = np.ones((2, 3), np.float32)
    (y,) = run(changed, {"x": x})
    (w,) = (
        onnx.numpy_helper.to_array(each) for each in changed.graph.initializer if each.name == "w"
    )
    np.testing.assert_allclose(y, x @ w, rtol=1e-6)


@pytest.mark.parametrize("pooled", [True, False])
def test_convolutional_heads(pooled: bool) -> None:
    nodes = [node("Conv", "x v", "h"), node("Conv", "h w b", "c", name="head")]
    if pooled:
        nodes += [node("GlobalAveragePool", "c", "p"), node("Flatten", "p", "y")]
    else:
        nodes += [node("Resize", "c _ _ sizes", "y", mode="linear")]
    weights = {"v": floats(4, 2, 3, 3), "w": floats(3, 4, 1, 1), "b": floats(3)}
    weights |= {} if pooled else {"sizes": ints(2, 3, 8, 8)}
    model = graph_model(
        nodes,
        weights,
        inputs=[("x", [2, 2, 6, 6])],
        outputs=[("y", [2, 3] if pooled else [2, 3, 8, 8])],
    )
    model.graph.value_info.append(value("c", [2, 3, 4, 4]))
    result = untouched(surgery.replace_head, model, classes=7)
    (y,) = run(result, {"x": floats(2, 2, 6, 6)})
    assert y.shape == ((2, 7) if pooled else (2, 7, 8, 8))
    assert declared(result.graph.output[0]) == list(y.shape)
    (described,) = [v for v in result.graph.value_info if v.name == "c"]
    assert declared(described) == [2, 7, 4, 4]
    assert np.abs(weights_of(result)["w"]).max() <= 1 / np.sqrt(4)


def test_side_branches_and_other_outputs(caplog: pytest.LogCaptureFixture) -> None:
    nodes = [
        node("Gemm", "x v", "box"),
        node("Gemm", "x w b", "logits", name="fc"),
        node("Softmax", "logits", "p"),
        node("ArgMax", "p", "label", axis=1, keepdims=0),
        node("TopK", "p k", "best which"),
    ]
    weights = {"v": floats(6, 4), "w": floats(6, 3), "b": floats(3), "k": ints(2)}
    outputs = [("label", ["batch"], INT), ("box", ["batch", 4]), ("p", ["batch", 3])]
    outputs += [("best", ["batch", 2]), ("which", ["batch", 2], INT)]
    model = graph_model(nodes, weights, outputs=outputs)
    with caplog.at_level(logging.WARNING, "ortops"):
        result = untouched(surgery.replace_head, model, classes=8, output="p")
    (record,) = caplog.records
    assert record.getMessage() == (
        "Gemm node 'fc': changed from 3 to 8 classes: weight 'w' [6, 3] → [6, 8] uniform in "
        "±0.408; bias 'b' [3] → [8] zeros; output 'p' [batch, 3] → [batch, 8]"
    )
    label, box, p, best, which = run(result, {"x": floats(4, 6)})
    assert (box.shape, p.shape, best.shape) == ((4, 4), (4, 8), (4, 2))
    np.testing.assert_array_equal(label, p.argmax(1))
    np.testing.assert_array_equal(which[:, 0], label)
    assert weights_of(surgery.replace_head(model, classes=8, output="box"))["v"].shape == (6, 8)
    with pytest.raises(ortops.UnsupportedError, match="selects the top 2 of 1 classes"):
        surgery.replace_head(model, classes=1, output="p")


def refused(nodes: list[onnx.NodeProto], weights: Any = None, **settings: Any) -> onnx.ModelProto:
    given = {"w": floats(6, 3), "three": floats(3), "u": floats(3, 2), "t": ints(0, 1, 2)}
    return graph_model(nodes, {**given, **(weights or {})}, **settings)


def with_function() -> onnx.ModelProto:
    body = [helper.make_node("MatMul", ["a", "b"], ["c"])]
    model = refused([node("Own", "x w", "y", domain="own")])
    model.opset_import.append(helper.make_opsetid("own", 1))
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("own", "Own", ["a", "b"], ["c"], body, imports))
    return model


HEAD = node("MatMul", "x w", "h", name="head")
REFUSED: dict[str, tuple[onnx.ModelProto, str]] = {
    "slice": (
        refused([HEAD, node("Slice", "h s e a", "y")], {"s": ints(0), "e": ints(2), "a": ints(1)}),
        "Slice node 'slice': it selects some .* on the 3 classes of MatMul node 'head'",
    ),
    "gather": (
        refused([HEAD, node("Gather", "h t", "y", axis=1)]),
        "Gather node 'gather': it selects some",
    ),
    "split": (
        refused([HEAD, node("Split", "h s", "y z", axis=-1)], {"s": ints(1, 2)}),
        "Split node 'split': it selects some",
    ),
    "weighted sum": (
        refused([HEAD, node("Mul", "h three", "m"), node("ReduceSum", "m", "y")]),
        "Mul node 'mul': it combines the classes with 'three' \\[3\\]",
    ),
    "residual": (
        refused(
            [node("MatMul", "x q", "h", name="last"), node("Add", "h x", "y")], {"q": floats(6, 6)}
        ),
        "Add node 'add': it combines the classes with 'x' \\[batch, 6\\], .* 6 classes of MatMul",
    ),
    "concat": (
        refused(
            [HEAD, node("Identity", "x", "i"), node("Concat", "h i", "y", axis=1)],
        ),
        "Concat node 'concat': it selects some of the classes, or appends others",
    ),
    "normalization": (
        refused([HEAD, node("LayerNormalization", "h three", "y")]),
        "LayerNormalization node 'layernormalization': it mixes the classes",
    ),
    "labels": (
        refused([HEAD, node("ArgMax", "h", "n", axis=1), node("Gather", "t n", "y")]),
        "Gather node 'gather': it looks up a class index",
    ),
    "names": (
        refused(
            [
                HEAD,
                node("ZipMap", "h", "y", domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
            ]
        ),
        "ZipMap node 'zipmap': ortops.surgery cannot change the class tables of an operator",
    ),
    "linear classifier": (
        refused(
            [
                node(
                    "LinearClassifier",
                    "x",
                    "label y",
                    domain="ai.onnx.ml",
                    coefficients=[0.1] * 18,
                    classlabels_ints=[0, 1, 2],
                )
            ]
        ),
        "LinearClassifier node 'linearclassifier': ortops.surgery cannot change the class tables",
    ),
    "tied": (
        refused(
            [node("Gather", "w ids", "e"), node("MatMul", "e w", "y", name="head")],
            {"ids": ints(0), "w": floats(3, 3)},
        ),
        "MatMul node 'head': its weight 'w' is also read by Gather node 'gather'",
    ),
    "quantized": (
        refused(
            [node("DequantizeLinear", "q s", "d"), node("Gemm", "x d", "y")],
            {"q": rng.integers(-9, 9, (6, 3)).astype(np.int8), "s": np.array(0.1, np.float32)},
        ),
        "Gemm node 'gemm': its weight is quantized; replace the head of the float model",
    ),
    "dropped axis": (
        refused(
            [node("MatMul", "x o", "h", name="head"), node("Squeeze", "h one", "y")],
            {"o": floats(6, 1), "one": ints(1)},
        ),
        "Squeeze node 'squeeze': it removes the class axis",
    ),
    "merged": (
        refused([HEAD, node("Reshape", "h s", "y")], {"s": ints(-1)}),
        r"Reshape node 'reshape': its shape \[-1\] merges the class axis with others",
    ),
    "branch": (
        refused(
            [
                HEAD,
                node(
                    "If",
                    "c",
                    "y",
                    **{
                        name: helper.make_graph(
                            [node("Neg", "h", name)], name, [], [value(name, None)]
                        )
                        for name in ("then_branch", "else_branch")
                    },
                ),
            ],
            {"c": np.array(True)},
        ),
        "If node 'if': it reads the classes",
    ),
    "recurrent": (
        refused(
            [node("RNN", "x3 W R", "y", hidden_size=3)],
            {"W": floats(1, 3, 6), "R": floats(1, 3, 3)},
            inputs=[("x3", [2, 1, 6])],
            outputs=[("y", [2, 1, 1, 3])],
        ),
        "RNN node 'rnn': the head before output 'y' must be one of Conv, FusedConv",
    ),
    "expanded": (
        refused(
            [*LINEAR, node("Shape", "y", "size"), node("Expand", "b size", "spread")],
            {"w": floats(6, 3), "b": floats(3)},
            outputs=[("y", ["batch", 3]), ("spread", ["batch", 3])],
        ),
        r"Expand node 'expand': it expands \[3\], which depends on the 3 classes",
    ),
    "depthwise": (
        refused(
            [node("Conv", "x k", "y", group=3)],
            {"k": floats(3, 1, 1, 1)},
            inputs=[("x", [2, 3, 4, 4])],
            outputs=[("y", [2, 3, 4, 4])],
        ),
        "Conv node 'conv': a head must have group=1 and a constant weight, got group=3",
    ),
    "inside a function": (
        with_function(),
        "Own node 'own': the last layer before output 'y' may be inside this node; inline",
    ),
    "no layer": (refused([node("Relu", "x", "y")]), "output 'y': there is no Conv, FusedConv"),
    "no float": (
        refused([node("ArgMax", "x", "y", axis=1)], outputs=[("y", ["batch", 1], INT)]),
        "model: it has no floating-point output",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_replace_head_refuses(name: str) -> None:
    model, message = REFUSED[name]
    before = model.SerializeToString()
    with pytest.raises((ortops.UnsupportedError, ortops.ModelError), match=message):
        surgery.replace_head(model, classes=5)
    assert model.SerializeToString() == before


@pytest.mark.parametrize("classes", [0, -1, 2.0, True, "3"])
def test_bad_numbers_of_classes(classes: Any) -> None:
    with pytest.raises(
        ortops.ArgumentError, match=f"classes must be an integer >= 1, got {classes!r}"
    ):
        surgery.replace_head(mlp.mlp((4, 8, 2)), classes=classes)


def test_unknown_output() -> None:
    model = graph_model(LINEAR, {"w": floats(6, 3), "b": floats(3)})
    with pytest.raises(ortops.ModelError, match="the model has no output 'yy'; did you mean 'y'"):
        surgery.replace_head(model, classes=2, output="yy")


@pytest.mark.parametrize("function", [surgery.replace_head, surgery.free_batch])
def test_models_that_are_trained_already(function: Any) -> None:
    model = ortops.build_training_model(
        mlp.mlp((4, 8, 2)), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )
    with pytest.raises(
        ortops.ModelError, match=r"it has training_info, .*before build_training_model"
    ):
        function(model, **({"classes": 3} if function is surgery.replace_head else {}))


def test_training_with_a_new_head() -> None:
    model = graph_model(
        [node("Gemm", "x v", "g"), node("Relu", "g", "r"), node("Gemm", "r w b", "y", name="fc")],
        {"v": floats(6, 16), "w": floats(16, 3), "b": floats(3)},
    )
    changed = surgery.replace_head(model, classes=4)
    x = floats(32, 6)
    trained = ortops.build_training_model(
        changed,
        loss="SoftmaxCrossEntropy",
        optimizer=ortops.optimizers.Adam(learning_rate=0.01),
    )
    session = ortops.TrainingSession(trained)
    feeds = {"x": x, "labels": x[:, :4].argmax(1)}
    losses = [float(session.step(feeds)["loss"]) for _ in range(60)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
@pytest.mark.fetched(ORIENTATION)
def test_a_real_classifier() -> None:
    model = onnx.load(ORIENTATION)
    result = untouched(surgery.replace_head, model, classes=4)
    before, after = weights_of(model), weights_of(result)
    assert before.keys() == after.keys()
    changed = {k for k in before if before[k].shape != after[k].shape}
    assert changed == {"fc_0.w_0", "fc_0.b_0"}
    for key in before.keys() - changed:
        np.testing.assert_array_equal(after[key], before[key])
    x = floats(8, 3, 48, 96)
    (p,) = run(result, {"x": x})
    assert p.shape == (8, 4)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    assert declared(result.graph.output[0])[1] == 4
    labels = np.arange(8) % 4
    x += labels[:, None, None, None].astype(np.float32)
    logits = surgery.name_output(result, "linear_1.tmp_1", name="logits")
    trained = ortops.build_training_model(
        logits,
        loss=ortops.losses.SoftmaxCrossEntropy(output="logits"),
        optimizer="Adam",
        trainable=["fc_0.*"],
    )
    session = ortops.TrainingSession(trained)
    losses = [float(session.step({"x": x, "labels": labels})["loss"]) for _ in range(15)]
    assert losses[-1] < losses[0]


# --------------------------------------------------------------------------------------- free_batch


def agrees(
    model: onnx.ModelProto,
    *,
    axis: int = 0,
    batch: int = 1,
    numbers: int | None = None,
    **settings: Any,
) -> onnx.ModelProto:
    """Frees the batch; batches of several sizes must give what the model gives for each row."""
    result: onnx.ModelProto = untouched(surgery.free_batch, model, **settings)
    (described,) = model.graph.input
    shape = [dim if isinstance(dim, int) and dim else 4 for dim in declared(described)]
    shape[axis] = 1
    for rows in (1, 3, 4):
        each = [floats(*shape) for _ in range(rows)]
        if numbers is not None:
            each = [rng.integers(0, numbers, shape) for _ in range(rows)]
        alone = [run(model, {described.name: np.repeat(x, batch, axis)}) for x in each]
        together = run(result, {described.name: np.concatenate(each, axis)})
        for place, y in enumerate(together):
            expected = np.concatenate([a[place][: a[place].shape[0] // batch] for a in alone])
            np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    assert declared(result.graph.input[0])[axis] == settings.get("dimension", "batch")
    assert declared(result.graph.output[0])[0] == settings.get("dimension", "batch")
    return result


def attention(batch: int, time: int, heads: int, opset: int = 13) -> onnx.ModelProto:
    """Classifies by one layer of attention; its Reshapes hold the batch."""
    size = 4 * heads
    nodes, weights = [], {"split": ints(batch, time, heads, 4), "join": ints(batch, time, size)}
    for each in "qkv":
        nodes += [
            node("MatMul", f"x {each}_weight", f"{each}_flat"),
            node("Reshape", f"{each}_flat split", f"{each}_heads"),
            node(
                "Transpose",
                f"{each}_heads",
                each,
                perm=[0, 2, 3, 1] if each == "k" else [0, 2, 1, 3],
            ),
        ]
        weights[f"{each}_weight"] = floats(size, size)
    nodes += [
        node("MatMul", "q k", "scores"),
        node("Softmax", "scores", "p", axis=-1),
        node("MatMul", "p v", "read"),
        node("Transpose", "read", "swapped", perm=[0, 2, 1, 3]),
        node("Reshape", "swapped join", "joined"),
        node("ReduceMean", "joined", "pooled", axes=[1], keepdims=0),
        node("Gemm", "pooled w", "y"),
    ]
    return graph_model(
        nodes,
        weights | {"w": floats(size, 3)},
        inputs=[("x", [batch, time, size])],
        outputs=[("y", [batch, 3])],
        opset=opset,
    )


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize(("batch", "time", "heads"), [(1, 5, 2), (1, 1, 1), (2, 2, 2), (3, 5, 2)])
@pytest.mark.parametrize("opset", [11, 13, 17])
def test_attention(batch: int, time: int, heads: int, opset: int) -> None:
    result = agrees(attention(batch, time, heads, opset), batch=batch)
    agrees_with_another_head = surgery.replace_head(result, classes=9)
    x = floats(4, time, 4 * heads)
    assert run(agrees_with_another_head, {"x": x})[0].shape == (4, 9)


def test_a_batch_behind_time() -> None:
    """[time, batch, size] is split into heads that are merged with the batch, and back."""
    nodes = [
        node("Reshape", "x heads", "h"),
        node("Transpose", "h", "t", perm=[1, 0, 2]),
        node("Transpose", "h", "u", perm=[1, 2, 0]),
        node("MatMul", "t u", "s"),
        node("Softmax", "s", "p", axis=-1),
        node("MatMul", "p t", "r"),
        node("Transpose", "r", "b", perm=[1, 0, 2]),
        node("Reshape", "b flat", "f"),
        node("Gemm", "f w", "g"),
        node("Reshape", "g unflat", "v"),
        node("ReduceSum", "v zero", "y", keepdims=0),
    ]
    weights = {"heads": ints(5, 2, 4), "flat": ints(5, 8), "unflat": ints(5, 1, 3)}
    model = graph_model(
        nodes,
        weights | {"w": floats(8, 3), "zero": ints(0)},
        inputs=[("x", [5, 1, 8])],
        outputs=[("y", [1, 3])],
    )
    agrees(model, axis=1, inputs={"x": 1})


RECURRENT = {
    "LSTM": ("x W R b n h c", 4),
    "GRU": ("x W R b n h", 3),
    "RNN": ("x W R b n h", 1),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", RECURRENT)
def test_constant_initial_states(kind: str, batch: int) -> None:
    inputs, gates = RECURRENT[kind]
    state = np.repeat(floats(1, 1, 4), batch, 1)
    nodes = [
        node("Transpose", "x", "t", perm=[1, 0, 2]),
        node(kind, inputs.replace("x", "t", 1), "_ last", hidden_size=4),
        node("Squeeze", "last zero", "y"),
    ]
    nodes[1].output[0] = ""
    weights = {
        "W": floats(1, 4 * gates, 3),
        "R": floats(1, 4 * gates, 4),
        "b": floats(1, 8 * gates),
        "n": np.array([4] * batch, np.int32),
        "h": state,
        "c": state / 2,
        "zero": ints(0),
    }
    model = graph_model(
        nodes,
        {name: a for name, a in weights.items() if name in (*inputs.split(), "zero")},
        inputs=[("x", [batch, 5, 3])],
        outputs=[("y", [batch, 4])],
    )
    result = agrees(model, batch=batch)
    assert sum(each.op_type == "Expand" for each in result.graph.node) == len(inputs.split()) - 4


SMALL: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], list[int], list[int]]] = {
    "a class token": (
        [node("Concat", "token x", "y", axis=1)],
        {"token": floats(1, 1, 4)},
        [1, 3, 4],
        [1, 4, 4],
    ),
    "a state filled by shape": (
        [
            node("ConstantOfShape", "s", "zeros"),
            node("Concat", "x zeros", "y", axis=2),
        ],
        {"s": ints(1, 3, 2)},
        [1, 3, 4],
        [1, 3, 6],
    ),
    "sizes of an image": (
        [node("Resize", "x _ _ s", "y", mode="nearest")],
        {"s": ints(1, 2, 8, 8)},
        [1, 2, 4, 4],
        [1, 2, 8, 8],
    ),
    "flattened": ([node("Reshape", "x s", "y")], {"s": ints(1, -1)}, [1, 2, 3], [1, 6]),
    "another axis is open": (
        [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Reshape", "t s", "y")],
        {"s": ints(1, -1, 2, 1)},
        [1, 2, 3],
        [1, 3, 2, 1],
    ),
    "two open axes": (
        [
            node("Transpose", "x", "t", perm=[1, 0, 2]),
            node("Reshape", "t s", "u"),
            node("Transpose", "u", "y", perm=[1, 0, 2]),
        ],
        {"s": ints(2, 3, -1)},
        [1, 2, 12],
        [3, 2, 4],
    ),
    "a size that is read": (
        [
            node("Shape", "x", "s"),
            node("Gather", "s zero", "n"),
            node("Concat", "n rest", "r", axis=0),
            node("Reshape", "x r", "y"),
        ],
        {"zero": ints(0), "rest": ints(6)},
        [1, 2, 3],
        [1, 6],
    ),
    "expanded": (
        [node("Expand", "x s", "y")],
        {"s": ints(1, 2, 3)},
        [1, 1, 3],
        [1, 2, 3],
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("ir_version", [3, 8])
def test_constants_that_hold_the_batch(name: str, ir_version: int) -> None:
    nodes, weights, before, after = SMALL[name]
    model = graph_model(nodes, weights, inputs=[("x", before)], outputs=[("y", after)])
    if ir_version == 3:  # initializers are inputs there
        model.ir_version = 3
        for tensor in model.graph.initializer:
            model.graph.input.append(value(tensor.name, tensor.dims, tensor.data_type))
    result = untouched(surgery.free_batch, model, dimension="rows")
    for rows in (1, 3, 4):
        x = floats(rows, *before[1:])
        expected = np.concatenate([run(model, {"x": x[i : i + 1]})[0] for i in range(rows)])
        np.testing.assert_array_equal(run(result, {"x": x})[0], expected)
    assert declared(result.graph.input[0]) == ["rows", *before[1:]]


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    nodes, weights, before, after = SMALL["flattened"]
    model = graph_model(nodes, weights, inputs=[("x", before)], outputs=[("y", after)])
    with caplog.at_level(logging.WARNING, "ortops"):
        surgery.free_batch(model)
    (record,) = caplog.records
    assert record.getMessage() == (
        "made the batch size of 1 dynamic, verified with 5 rows: Reshape node 'reshape' "
        "[1, -1] → [batch, -1]; input 'x' [1, 2, 3] → [batch, 2, 3]; output 'y' [1, 6] → [batch, 6]"
    )


def test_a_batch_with_a_name_behind_which_is_none() -> None:
    nodes, weights, before, after = SMALL["flattened"]
    model = graph_model(nodes, weights, inputs=[("x", ["N", *before[1:]])], outputs=[("y", after)])
    result = surgery.free_batch(model, dimension="N")
    assert run(result, {"x": floats(3, 2, 3)})[0].shape == (3, 6)
    assert [declared(v) for v in (*result.graph.input, *result.graph.output)] == [
        ["N", 2, 3],
        ["N", 6],
    ]


def test_sizes_and_numbers_of_inputs() -> None:
    """Token numbers, a length that is not known, and an input that has no batch."""
    nodes = [
        node("Gather", "table ids", "e"),
        node("Mul", "e scale", "m"),
        node("ReduceMean", "m", "y", axes=[1], keepdims=0),
    ]
    model = graph_model(
        nodes,
        {"table": floats(3, 4)},
        inputs=[("ids", [1, "time"], INT), ("scale", [4])],
        outputs=[("y", [1, 4])],
    )
    result = untouched(surgery.free_batch, model)
    feeds = {"ids": rng.integers(0, 3, (5, 6)), "scale": floats(4)}
    (y,) = run(result, feeds)
    for row in range(5):
        (alone,) = run(model, feeds | {"ids": feeds["ids"][row : row + 1]})
        np.testing.assert_allclose(y[row], alone[0], rtol=1e-5)
    assert declared(result.graph.input[0]) == ["batch", "time"]
    assert declared(result.graph.input[1]) == [4]


def test_external_data(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = attention(1, 5, 2)
    onnx.save_model(model, path, save_as_external_data=True, location="weights", size_threshold=200)
    for result in (surgery.free_batch(path), surgery.replace_head(path, classes=3)):
        places = {t.name: t.data_location for t in result.graph.initializer}
        assert places["q_weight"] == TensorProto.EXTERNAL
        onnx.save(result, tmp_path / "changed.onnx")
        assert run(tmp_path / "changed.onnx", {"x": floats(1, 5, 8)})[0].shape == (1, 3)


def recurrent_step(batch: int | str, states: int | str) -> onnx.ModelProto:
    """A step of an LSTM whose states are inputs and outputs."""
    nodes = [
        node("Unsqueeze", "x zero", "t"),
        node("LSTM", "t W R _ _ h c", "out h_next c_next", hidden_size=4),
        node("Squeeze", "out both", "y"),
    ]
    state = [1, states, 4]
    return graph_model(
        nodes,
        {"W": floats(1, 16, 3), "R": floats(1, 16, 4), "zero": ints(0), "both": ints(0, 1)},
        inputs=[("x", [batch, 3]), ("h", state), ("c", state)],
        outputs=[("y", [batch, 4]), ("h_next", state), ("c_next", state)],
    )


@pytest.mark.parametrize("name", ["", "rows"])
def test_states_that_are_fed(name: str) -> None:
    model = recurrent_step(name or 1, name or 1)
    places = None if name else {"x": 0, "h": 1, "c": 1}
    result = untouched(surgery.free_batch, model, inputs=places, dimension="rows")
    x, h, c = floats(5, 3), floats(1, 5, 4), floats(1, 5, 4)
    y, h_next, c_next = run(result, {"x": x, "h": h, "c": c})
    for row in range(5):
        one = slice(row, row + 1)
        alone = run(model, {"x": x[one], "h": h[:, one], "c": c[:, one]})
        np.testing.assert_allclose(y[one], alone[0], rtol=1e-5)
        np.testing.assert_allclose(h_next[:, one], alone[1], rtol=1e-5)
        np.testing.assert_allclose(c_next[:, one], alone[2], rtol=1e-5)
    assert [declared(described) for described in result.graph.output] == [
        ["rows", 4],
        [1, "rows", 4],
        [1, "rows", 4],
    ]


def test_states_that_are_fed_and_not_named() -> None:
    """They would be one for all rows, and come back as one for each."""
    message = r"LSTM node 'lstm': .*also depends on input 'h', which has no batch: see inputs="
    with pytest.raises(ortops.UnsupportedError, match=message):
        surgery.free_batch(recurrent_step(1, 1), inputs=["x"])


NOT_FREE: dict[str, tuple[onnx.ModelProto, str]] = {
    "squeezed": (
        refused([node("Squeeze", "x zero", "y")], {"zero": ints(0)}, inputs=[("x", [1, 4])]),
        "Squeeze node 'squeeze': with a batch of 3 rows instead of 1, onnxruntime rejects it",
    ),
    "mixed": (
        refused([node("Softmax", "x", "y", axis=0)], inputs=[("x", [1, 4])]),
        r"Softmax node 'softmax': with a batch of 3 rows .* its result \[3, 4\] does not match",
    ),
    "sum of the batch": (
        refused([node("ReduceSum", "x", "y")], inputs=[("x", [1, 4])]),
        r"ReduceSum node 'reducesum': with a batch of 3 rows",
    ),
    "random": (
        refused([node("RandomNormalLike", "x", "y")], inputs=[("x", [1, 4])]),
        "RandomNormalLike node 'randomnormallike': its output is random",
    ),
    "sequence": (
        refused(
            [node("SequenceConstruct", "x x", "s"), node("ConcatFromSequence", "s", "y", axis=1)],
            inputs=[("x", [1, 4])],
        ),
        "SequenceConstruct node 'sequenceconstruct': its output is a sequence, so a dynamic batch",
    ),
    "rows that differ": (
        refused([node("Add", "x rows", "y")], {"rows": floats(2, 4)}, inputs=[("x", [2, 4])]),
        "Add node 'add': with a batch of 3 rows instead of 2, onnxruntime rejects it",
    ),
    "size": (
        refused([node("Shape", "x", "y")], inputs=[("x", [1, 4])], outputs=[("y", [2], INT)]),
        "output 'y' depends on the batch size but has no batch axis",
    ),
    "text": (
        refused(
            [node("Identity", "x", "y")],
            inputs=[("x", [1, 4], TensorProto.STRING)],
            outputs=[("y", [1, 4], TensorProto.STRING)],
        ),
        "input 'x' must be numeric or boolean, got STRING",
    ),
    "not runnable": (
        refused([node("MatMul", "x u", "y")], inputs=[("x", [1, 4])]),
        "model: onnxruntime cannot run it",
    ),
    "no input": (refused([node("Identity", "w", "y")], inputs=[]), "model: it has no inputs"),
    "scalar": (
        refused([node("Identity", "x", "y")], inputs=[("x", [])]),
        r"input 'x': its shape \[\] has no axis 0",
    ),
}


@pytest.mark.parametrize("name", NOT_FREE)
def test_what_free_batch_refuses(name: str) -> None:
    model, message = NOT_FREE[name]
    before = model.SerializeToString()
    if name not in ("size", "text"):
        model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises((ortops.UnsupportedError, ortops.ModelError), match=message):
        surgery.free_batch(model)
    assert name not in ("size", "text") or model.SerializeToString() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": ["q"]}, "the model has no input 'q'; known names: 'x', 'z'"),
        ({"inputs": {"x": 5}}, r"input 'x': its shape \[2, 3\] has no axis 5"),
        ({"inputs": []}, "inputs must name at least one input with a batch axis"),
        (
            {"inputs": ["x", "z"]},
            "input 'z': its axis 0 has size 4, but the batch axis of 'x' has size 2",
        ),
        (
            {"dimension": "time"},
            "dimension 'time' is already the name of axis 1 of input 'z'; give another",
        ),
        ({"inputs": {"x": 1, "z": 7}}, r"input 'z': its shape \[4, time\] has no axis 7"),
    ],
)
def test_inputs_that_cannot_be_freed(settings: dict[str, Any], message: str) -> None:
    model = graph_model(
        [node("Identity", "x", "y"), node("Identity", "z", "v")],
        {},
        inputs=[("x", [2, 3]), ("z", [4, "time"])],
        outputs=[("y", [2, 3]), ("v", [4, "time"])],
    )
    kind = ortops.ModelError if settings.get("inputs", True) else ortops.ArgumentError
    with pytest.raises(kind, match=message):
        surgery.free_batch(model, **settings)


# -------------------------------------------------------------------------------------- name_output


def test_name_output(caplog: pytest.LogCaptureFixture) -> None:
    model = graph_model(
        [node("Gemm", "x v", "g"), node("Relu", "g", "r"), node("Gemm", "r w", "y")],
        {"v": floats(6, 4), "w": floats(4, 3)},
    )
    with caplog.at_level(logging.WARNING, "ortops"):
        result = untouched(surgery.name_output, model, "r")
    assert [record.getMessage() for record in caplog.records] == [
        "tensor 'r' is output 'r': FLOAT [batch, 4]"
    ]
    assert [declared(v) for v in result.graph.output] == [["batch", 3], ["batch", 4]]
    x = floats(2, 6)
    expected = np.maximum(x @ weights_of(model)["v"], 0)
    np.testing.assert_allclose(run(result, {"x": x}, ["r"])[0], expected, rtol=1e-5)

    renamed = untouched(surgery.name_output, model, "r", name="features")
    np.testing.assert_allclose(run(renamed, {"x": x}, ["features"])[0], expected, rtol=1e-5)
    assert untouched(surgery.name_output, model, "y") == model
    both = untouched(surgery.name_output, model, "y", name="logits")
    y, logits = run(both, {"x": x})
    np.testing.assert_array_equal(y, logits)


@pytest.mark.parametrize("tensor", ["x", "v"])
def test_inputs_and_weights_as_outputs(tensor: str) -> None:
    model = graph_model([node("Gemm", "x v", "y")], {"v": floats(6, 3)})
    x = floats(2, 6)
    expected = {"x": x, "v": weights_of(model)["v"]}[tensor]
    for name in (None, "copy"):
        result = untouched(surgery.name_output, model, tensor, name=name)
        np.testing.assert_array_equal(run(result, {"x": x})[1], expected)


def test_tensors_that_cannot_be_put_out() -> None:
    branches = {
        branch: helper.make_graph(
            [node("Neg", "x", f"inner_{branch}")], branch, [], [value(f"inner_{branch}", None)]
        )
        for branch in ("then_branch", "else_branch")
    }
    double = helper.make_function(
        "own",
        "Double",
        ["a"],
        ["b"],
        [
            helper.make_node("Identity", ["a"], ["hidden"]),
            helper.make_node("Add", ["a", "hidden"], ["b"]),
        ],
        [helper.make_opsetid("", 17)],
    )
    model = graph_model(
        [node("If", "c", "middle", **branches), node("Double", "middle", "y", domain="own")],
        {"c": np.array(True)},
    )
    model.functions.append(double)
    model.opset_import.append(helper.make_opsetid("own", 1))
    for tensor, kind, message in (
        ("midle", ortops.ModelError, "the model has no tensor 'midle'; did you mean 'middle'"),
        (
            "inner_else_branch",
            ortops.UnsupportedError,
            "If node 'if': tensor 'inner_else_branch' is",
        ),
        ("hidden", ortops.UnsupportedError, "tensor 'hidden' is inside the function 'Double'"),
    ):
        with pytest.raises(kind, match=message):
            surgery.name_output(model, tensor)
    with pytest.raises(ortops.ModelError, match="name 'c' is already used by a tensor or node"):
        surgery.name_output(model, "middle", name="c")


def test_outputs_of_a_model_that_is_trained() -> None:
    model = ortops.build_training_model(
        mlp.mlp((4, 8, 2)), loss="SoftmaxCrossEntropy", optimizer="Adam"
    )
    hidden = model.graph.node[0].output[0]
    result = surgery.name_output(model, hidden, name="hidden")
    assert list(result.training_info) == list(model.training_info)
    with pytest.raises(ortops.ModelError, match="name 'loss' is already used by a tensor"):
        surgery.name_output(model, hidden, name="loss")


# -------------------------------------------------------------------------------- torch's exporters


def exported(module: Any, example: Any, dynamo: bool) -> onnx.ModelProto:
    """Exports a module for the batch of the example."""
    import torch

    file = io.BytesIO()
    settings = (
        {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "opset_version": 17}
    )
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        made = torch.onnx.export(module.eval(), (example,), file, **settings)
    return made.model_proto if made is not None else onnx.load_from_string(file.getvalue())


def torch_module(kind: str, batch: int) -> tuple[Any, Any, int]:
    """Returns a classifier, an input and how many classes there are."""
    import torch
    from torch import nn

    class Transformer(nn.Module):
        def __init__(self, batch_first: bool) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 5)
            self.token = nn.Parameter(torch.randn(1, 1, 16))
            self.layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=batch_first)
            self.batch_first = batch_first

        def forward(self, ids: Any) -> Any:
            x = torch.cat([self.token.expand(ids.shape[0], -1, -1), self.embedding(ids)], 1)
            if self.batch_first:
                return self.head(self.layer(x)[:, 0])
            return self.head(self.layer(x.transpose(0, 1))[0])

    class Recurrent(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.recurrent = kind(6, 8, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Any) -> Any:
            return torch.log_softmax(self.head(self.recurrent(x)[0][:, -1]), -1)

    torch.manual_seed(0)
    match kind:
        case "mlp":
            layers = (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            return nn.Sequential(*layers), torch.randn(batch, 6), 3
        case "cnn":
            features = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
            head = (nn.Flatten(), nn.Linear(32, 7), nn.Softmax(-1))
            return nn.Sequential(*features, *head), torch.randn(batch, 3, 12, 12), 7
        case "lstm":
            return Recurrent(nn.LSTM), torch.randn(batch, 5, 6), 4
        case "gru":
            return Recurrent(nn.GRU), torch.randn(batch, 5, 6), 4
        case _:
            ids = torch.randint(0, 20, (batch, 5))
            return Transformer(kind == "transformer"), ids, 5


@pytest.mark.nightly(3)
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "kind", ["mlp", "cnn", "lstm", "gru", "transformer", "transformer, time first"]
)
def test_exported_classifiers(kind: str, batch: int, dynamo: bool) -> None:
    if dynamo:
        pytest.importorskip("onnxscript", reason="torch's newer exporter needs it")
    import torch

    module, example, classes = torch_module(kind, batch)
    model = exported(module, example, dynamo)
    freed = untouched(surgery.free_batch, model)
    name = model.graph.input[0].name
    more = torch.cat([example.roll(step, 1) for step in range(3)])
    (y,) = run(freed, {name: more.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(y, module(more).numpy(), rtol=1e-4, atol=1e-5)
    changed = untouched(surgery.replace_head, freed, classes=classes + 2)
    assert run(changed, {name: more.numpy()})[0].shape == (3 * batch, classes + 2)
    sizes = {a.shape for a in weights_of(changed).values()}
    assert any(classes + 2 in shape for shape in sizes)


@pytest.mark.parametrize(("x", "k"), [("n", "n"), ("a_1", "b_1"), ("1", "1")])
def test_a_hidden_batch_is_freed_whatever_inputs_call_it(x: str, k: str) -> None:
    """PyTorch gives the batch of each input a name of its own for `dynamic_axes` as lists."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{x},4] x, float[{k},4] k) => (float[y_1,8] y) <int64[2] s = {{1,8}}>
    {{ a = Concat<axis=1>(x, k) y = Reshape(a, s) }}""")
    freed = ortops.surgery.free_batch(model)
    feeds = {name: np.random.default_rng(0).random((3, 4), np.float32) for name in ("x", "k")}
    (y,) = run(freed, feeds)
    np.testing.assert_array_equal(y, np.concatenate([feeds["x"], feeds["k"]], axis=1))
