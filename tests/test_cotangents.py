"""Gradients by tensors that depend on each other, and of losses: closed forms and PyTorch."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from test_derivatives import all_nodes, both, outputs
from training_models import affine, affine_batch, classifier, foreign, labelled, normalizing

import ortops
from ortops import ArgumentError, ModelError, Tape, build_training_model, op
from ortops.derivatives import cotangents, gradient
from ortops.losses import MeanSquaredError, SoftmaxCrossEntropy

Array = np.ndarray[Any, Any]
X = np.array([[0.5, -1.0, 2.0]])


def chain(dtype: Any = np.float64) -> onnx.ModelProto:
    """h = 2 x², k = h + 3 x, y = k h w; and an output z of y."""
    with Tape(name="chain") as tape:
        x = tape.input("x", dtype, ["batch", 3])
        w = tape.initializer("w", np.array([1.0, 2.0, -1.0], dtype))
        h = tape.output(op.Mul(x * x, np.array(2, dtype)), "h")
        k = tape.output(h + 3 * x, "k")
        y = tape.output(k * h * w, "y")
        tape.output(y * y, "z")
    return tape.model()


def by_hand(x: Array) -> dict[str, Array]:
    w, h = np.array([1.0, 2.0, -1.0]), 2 * x * x
    k = h + 3 * x
    d_h = (h + k) * w  # h reaches y through k, too
    return {
        "x": d_h * 4 * x + h * w * 3,
        "h": d_h,
        "k": h * w,
        "w": (k * h).sum(0),
        "y": np.ones_like(x),
        "z": np.zeros_like(x),  # computed from y
    }


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_tensors_that_depend_on_one_another(dtype: Any) -> None:
    """Also weights, y itself, and a tensor that is computed from y; in any order."""
    expected = by_hand(X)
    names = ["k", "z", "x", "y", "w", "h"]
    found = both(cotangents, chain(dtype), {"x": X.astype(dtype)}, xs=names, y="y")
    assert list(found) == ["h", "k", "y", "z", *(f"d_y_d_{name}" for name in names)]
    tolerance = {np.float64: 1e-12, np.float32: 1e-6, np.float16: 1e-2}[dtype]
    for name in names:
        assert found[f"d_y_d_{name}"].dtype == dtype
        np.testing.assert_allclose(found[f"d_y_d_{name}"], expected[name], rtol=tolerance)


def test_one_backward_pass() -> None:
    """It has as many nodes as that of the first tensor alone, and one for ones of y."""
    rng = np.random.default_rng(0)
    with Tape(name="deep") as tape:
        h = tape.input("x", np.float32, ["batch", 4])
        for layer in range(6):
            weight = tape.initializer(f"w{layer}", rng.normal(size=(4, 4)).astype(np.float32))
            h = tape.output(op.Tanh(h @ weight), f"h{layer}")
    model = tape.model()
    layers = ["x", *(f"h{layer}" for layer in range(5))]

    def counted(made: onnx.ModelProto) -> Counter[str]:
        return Counter(node.op_type for node in made.graph.node)

    first = counted(gradient(model, xs="x", y="h5", lowered=True))
    assert first["MatMul"] + first["Gemm"] == 12
    made = cotangents(model, layers, y="h5", lowered=True)
    assert counted(made) == first
    nodes = cotangents(model, layers, y="h5")
    assert counted(ortops.lower(nodes)) == first
    assert counted(nodes)["Gradient"] == 6
    apart = [counted(gradient(model, xs=each, y="h5", lowered=True)) for each in layers]
    assert sum(each["Tanh"] for each in apart) > first["Tanh"]


def test_several_ys_and_the_default() -> None:
    found = both(cotangents, chain(), {"x": X}, xs=["x", "h"], y=["k", "y"])
    names = ["d_k_d_x", "d_k_d_h", "d_y_d_x", "d_y_d_h"]
    assert list(found)[4:] == names
    np.testing.assert_allclose(found["d_k_d_x"], 4 * X + 3)
    np.testing.assert_allclose(found["d_k_d_h"], np.ones_like(X))
    np.testing.assert_allclose(found["d_y_d_x"], by_hand(X)["x"])
    made = cotangents(chain(), "x")
    assert made.graph.output[-1].name == "d_h_d_x"


def test_second_order() -> None:
    """∂(∂y/∂k)/∂x = ∂(2 x² w)/∂x."""
    first = cotangents(chain(), ["x", "h", "k"], y="y", lowered=True)
    second = both(cotangents, first, {"x": X}, xs=["x", "h"], y="d_y_d_k")
    w = np.array([1.0, 2.0, -1.0])
    np.testing.assert_allclose(second["d_d_y_d_k_d_x"], 4 * X * w)
    np.testing.assert_allclose(second["d_d_y_d_k_d_h"], np.ones_like(X) * w)


def test_nothing_flows_through_rounding() -> None:
    """Nor through operators without a rule, before the tensors that are asked for."""
    with Tape(name="rounded") as tape:
        x = tape.input("x", np.float64, [3])
        h = tape.output(x.astype(np.int64).astype(np.float64), "h")
        tape.output(h * x, "y")
    x = np.array([1.5, 2.5, -3.5])
    found = both(cotangents, tape.model(), {"x": x}, xs=["h", "x"], y="y")
    np.testing.assert_array_equal(found["d_y_d_h"], x)
    np.testing.assert_array_equal(found["d_y_d_x"], np.trunc(x))


def looped(*, asks: bool = False) -> onnx.ModelProto:
    """h = 2x in the main graph; a Loop adds it twice to 0, as y."""
    with Tape(name="looped") as tape:
        x = tape.input("x", np.float32, [2])
        h = tape.output(x * 2.0, "h")
        sums = op.Identity(x * 0.0)
        body = tape.subgraph("body")
        body.input("i", np.int64, [])
        body.input("go", np.bool_, [])
        total = body.input("total", np.float32, [2])
        with body:
            body.output(op.Identity(np.array(True)), "go_on")
            inner = op.Mul(total, total)
            inner.value.name = "squared"
            body.output(total + h + 0.0 * inner, "total_next")
        import onnx_ir as ir

        count = op.Constant(value=np.array(2))
        node = ir.Node(
            "", "Loop", [count.value, None, sums.value], [ir.AttrGraph("body", body.graph)]
        )
        tape.append(node)
        node.outputs[0].type, node.outputs[0].shape = x.value.type, x.value.shape
        tape.output(tape.tensor(node.outputs[0]), "y")
    return tape.model()


def test_what_a_body_captures() -> None:
    """y is computed from h although no input of the Loop is."""
    found = both(cotangents, looped(), {"x": np.ones(2, np.float32)}, xs=["x", "h", "y"], y="y")
    np.testing.assert_array_equal(found["d_y_d_h"], [2, 2])
    np.testing.assert_array_equal(found["d_y_d_x"], [4, 4])
    with pytest.raises(ModelError, match=r"'y' is computed from 'h', and both are listed in xs"):
        gradient(looped(), xs=["h", "y"], y="y")


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"xs: tensor 'squared' is in the body of Loop node '.*', and "
    ):
        cotangents(looped(), ["squared"])
    with pytest.raises(ModelError, match=r"xs: the main graph has no tensor 'q'; "):
        cotangents(chain(), ["q"])
    with pytest.raises(ArgumentError, match=r"xs: 'h' is listed twice; list it once"):
        cotangents(chain(), ["h", "x", "h"])
    with pytest.raises(ArgumentError, match=r"xs is empty; name at least one tensor"):
        cotangents(chain(), [])
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    made = cotangents(model, ["x", "w1"])  # a trainable file stays one
    assert len(made.training_info) == 1
    with Tape(name="picked") as tape:
        rows = tape.input("rows", np.int64, [2])
        tape.output(op.Gather(tape.initializer("w", np.ones((3, 2), np.float32)), rows), "y")
    with pytest.raises(ModelError, match=r"xs: tensor 'rows' must be a floating-point tensor, got"):
        cotangents(tape.model(), ["rows", "w"])


def with_gradients(nodes: list[onnx.NodeProto], shown: list[str]) -> onnx.ModelProto:
    model = chain()
    model.graph.node.extend(nodes)
    for name in shown:
        value = helper.make_tensor_value_info(name, TensorProto.DOUBLE, ["batch", 3])
        model.graph.output.append(value)
    model.opset_import.add(domain="ai.onnx.preview.training", version=1)
    return model


def test_nodes_that_cannot_share_a_pass_stay_apart() -> None:
    """A tensor computed from the first gradient, and values that are fed."""

    def slope(fed: str, x: str, output: str) -> onnx.NodeProto:
        return helper.make_node(
            "Gradient", [fed], [output], domain="ai.onnx.preview.training", xs=[x], y="y"
        )

    nodes = [
        slope("h", "h", "dh"),
        helper.make_node("Add", ["dh", "x"], ["late"]),
        slope("late", "late", "dlate"),
        slope("late", "x", "elsewhere"),
        slope("x", "x", "dx"),
    ]
    model = with_gradients(nodes, ["dh", "dlate", "elsewhere", "dx"])
    expected = by_hand(X)
    for found in (outputs(model, {"x": X}), outputs(ortops.lower(model), {"x": X})):
        np.testing.assert_allclose(found["dh"], expected["h"])
        np.testing.assert_allclose(found["dlate"], np.zeros_like(X))
        np.testing.assert_allclose(found["elsewhere"], by_hand(expected["h"] + X)["x"])
        np.testing.assert_allclose(found["dx"], expected["x"])


# ------------------------------------------------------------------------------------ of a loss


def test_the_gradient_of_a_loss_in_numpy() -> None:
    """Mean squared error: 2/n (x w + b − t) wᵀ."""
    feeds = affine_batch(4)
    found = both(gradient, affine(), feeds, xs=["x", "w"], loss="MeanSquaredError")
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in affine().graph.initializer}
    error = feeds["x"] @ weights["w"] + weights["b"] - feeds["targets"]
    assert list(found) == ["y", "loss", "d_loss_d_x", "d_loss_d_w"]
    np.testing.assert_allclose(found["loss"], (error**2).mean(), rtol=1e-6)
    slope = 2 / error.size * error
    np.testing.assert_allclose(found["d_loss_d_x"], slope @ weights["w"].T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["d_loss_d_w"], feeds["x"].T @ slope, rtol=1e-5, atol=1e-6)
    made = gradient(affine(), loss="MeanSquaredError")  # not by the targets, which the loss added
    assert [value.name for value in made.graph.output] == ["y", "loss", "d_loss_d_x"]


@pytest.mark.parametrize("make", [normalizing, lambda: classifier(dropout=0.5)])
def test_a_trainable_file_has_its_own_loss(make: Any, tmp_path: Path) -> None:
    """Its present weights, without Dropout and batch statistics, as `evaluate`."""
    model = make()
    data = labelled((1, 4, 4) if make is normalizing else (6,), rows=6)
    loss = SoftmaxCrossEntropy(label_smoothing=0.1)
    session = ortops.TrainingSession(
        build_training_model(model, loss=loss, optimizer=ortops.optimizers.SGD(0.3))
    )
    session.fit(data, epochs=2, progress=False)
    session.save(tmp_path / "trained.onnx")
    found = both(gradient, tmp_path / "trained.onnx", data, xs="x", loss=True)
    assert list(found) == ["logits", "loss", "d_loss_d_x"]
    np.testing.assert_allclose(found["loss"], session.evaluate(data)["loss"], rtol=1e-6)
    other = both(gradient, session.inference_model(), data, xs="x", loss=loss)
    for name, array in other.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-7, err_msg=name)
    assert not gradient(tmp_path / "trained.onnx", loss=True).training_info
    again = both(gradient, tmp_path / "trained.onnx", data, xs="x", loss="Hinge")
    assert list(again) == ["logits", "loss", "d_loss_d_x"]


@pytest.mark.parametrize("own", [False, True])
def test_external_data_stay_in_their_file(own: bool, tmp_path: Path) -> None:
    model, data = classifier(hidden=64), labelled((6,), rows=4)
    expected = both(gradient, model, data, loss="SoftmaxCrossEntropy")
    if own:
        model = build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="Adam")
    places = {"location": "model.data", "size_threshold": 16}
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, **places)
    made = gradient(tmp_path / "model.onnx", loss=True if own else "SoftmaxCrossEntropy")
    tensors = [tensor for tensor in made.graph.initializer if tensor.name in ("w1", "w2", "b1")]
    assert [tensor.data_location for tensor in tensors] == [TensorProto.EXTERNAL] * 3
    ortops.save_model(made, tmp_path / "made.onnx")
    for name, array in outputs(tmp_path / "made.onnx", data).items():  # type: ignore[arg-type]
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)


def test_losses_with_inputs_sums_and_adapters() -> None:
    data = labelled((6,), rows=5) | {"weight": np.arange(5, dtype=np.float32)}
    loss = SoftmaxCrossEntropy(sample_weight="weight") + 0.5 * SoftmaxCrossEntropy()
    model = build_training_model(
        ortops.lora.add(classifier(), rank=2, alpha=2), loss=loss, optimizer="SGD"
    )
    found = both(gradient, model, data, loss=True)
    assert list(found) == ["logits", "loss", "d_loss_d_x"]
    both_ways = both(gradient, classifier(), data, loss=loss)  # a new adapter adds 0
    np.testing.assert_allclose(found["d_loss_d_x"], both_ways["d_loss_d_x"], rtol=1e-5, atol=1e-7)

    def scaled(y: ortops.Tensor, factor: ortops.Tensor) -> ortops.Tensor:
        return (y * factor).sum()

    declared = {"factor": (np.float32, ["batch", 2])}
    feeds = {"x": affine_batch(3)["x"], "factor": np.full((3, 2), 2, np.float32)}
    slopes = both(gradient, affine(), feeds, loss=scaled, inputs=declared)["d_loss_d_x"]
    w = onnx.numpy_helper.to_array(affine().graph.initializer[0])
    np.testing.assert_allclose(slopes, np.tile(2 * w.sum(1), (3, 1)), rtol=1e-6)


def test_an_algorithm_of_another_tool_has_a_loss_too() -> None:
    """y of its Gradient node."""
    domain = "ai.onnx.preview.training"
    nodes = [
        helper.make_node("Mul", ["y", "y"], ["squares"]),
        helper.make_node("ReduceSum", ["squares"], ["cost"], keepdims=0),
        helper.make_node("Gradient", ["w"], ["dw"], domain=domain, xs=["w"], y="cost"),
        helper.make_node("Sub", ["w", "dw"], ["w_new"]),
    ]
    shown = [helper.make_tensor_value_info("cost", TensorProto.FLOAT, [])]
    shown.append(helper.make_tensor_value_info("w_new", TensorProto.FLOAT, [2, 1]))
    model = foreign(nodes, outputs=shown, updates={"w": "w_new"})
    feeds = {"x": affine_batch(3)["x"][:, :2]}
    found = both(gradient, model, feeds, xs="x", loss=True)
    np.testing.assert_allclose(found["loss"], (found["y"] ** 2).sum(), rtol=1e-6)
    expected = 2 * found["y"] * np.array([0.5, -0.5], np.float32)
    np.testing.assert_allclose(found["d_loss_d_x"], expected, rtol=1e-6)


def test_wrong_losses_are_refused() -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD")
    with pytest.raises(ArgumentError, match=r"gradient: give y or loss, not both: each is what is"):
        gradient(classifier(), y="logits", loss="SoftmaxCrossEntropy")
    with pytest.raises(
        ArgumentError, match=r"gradient: inputs are those of a loss; pass loss=, too"
    ):
        gradient(classifier(), inputs={"labels": (np.int64, ["batch"])})
    with pytest.raises(
        ArgumentError, match=r"gradient: the loss of the file has its inputs; leave"
    ):
        gradient(model, loss=True, inputs={"labels": (np.int64, ["batch"])})
    with pytest.raises(ModelError, match=r"loss: the model has no training algorithm whose loss "):
        gradient(classifier(), loss=True)
    two = ortops.add_training(
        build_training_model(
            classifier(), loss="SoftmaxCrossEntropy", optimizer="SGD", trainable=["w1"]
        ),
        loss=MeanSquaredError(),
        optimizer="SGD",
        name="second",
        trainable=["w2"],
    )
    with pytest.raises(
        ModelError, match=r"loss: the model has 2 training algorithms, each with a "
    ):
        gradient(two, loss=True)
    with pytest.raises(ArgumentError, match=r"unknown loss 'Nothing'"):
        gradient(classifier(), loss="Nothing")


# --------------------------------------------------------------------- files of PyTorch's exporters


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # the exporters warn about themselves
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamo", [False, True])
def test_layers_of_exported_files(dynamo: bool, training: bool) -> None:
    """By `torch.autograd.grad` with all layers: the gradient of a score, and that of a loss."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(1, 3, 3, padding=1)
            # In training mode, dynamo writes BatchNormalization with running statistics.
            grouped = dynamo and training
            self.norm = torch.nn.GroupNorm(3, 3) if grouped else torch.nn.BatchNorm2d(3)
            self.second = torch.nn.Conv2d(3, 3, 3, padding=1)
            self.last = torch.nn.Linear(3, 4)

        def forward(self, x: Any) -> Any:
            a = self.first(x)
            b = torch.relu(self.norm(a))
            c = torch.nn.functional.gelu(self.second(b)) + a
            return self.last(c.mean((2, 3))), a, b, c

    torch.manual_seed(0)
    net = Net().train(training)
    x = torch.randn(5, 1, 6, 6, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 0])
    names = {"input_names": ["x"], "output_names": ["logits", "a", "b", "c"]}
    file = io.BytesIO()
    if dynamo:
        program = torch.onnx.export(net, (x.detach(),), dynamo=True, **names)
        assert program is not None
        model = program.model_proto
    else:
        mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
        arguments = {"training": mode, "do_constant_folding": False, "dynamo": False}
        torch.onnx.export(net, (x.detach(),), file, **names, **arguments)
        model = onnx.load_from_string(file.getvalue())
    logits, *layers = net(x)
    tensors = [x, *layers, net.second.weight]
    xs = ["x", "a", "b", "c", "second.weight"]
    loss = torch.nn.functional.cross_entropy(logits, labels)
    oracles = {
        "logits": torch.autograd.grad(logits.sum(), tensors, retain_graph=True),
        "loss": torch.autograd.grad(loss, tensors, retain_graph=True),
    }
    feeds = {"x": x.detach().numpy()}
    made = cotangents(model, xs, y="logits", lowered=True)
    found = outputs(made, feeds)
    convolutions = [n.op_type for n in all_nodes(made.graph) if n.op_type.startswith("Conv")]
    alone = gradient(model, xs=["x", "second.weight"], y="logits", lowered=True)
    assert convolutions == [
        n.op_type for n in all_nodes(alone.graph) if n.op_type.startswith("Conv")
    ]
    for name in xs:
        losses = gradient(model, xs=name, loss="SoftmaxCrossEntropy", lowered=True)
        of_loss = outputs(losses, {**feeds, "labels": labels.numpy()})
        found[f"d_loss_d_{name}"] = of_loss[f"d_loss_d_{name}"]
    np.testing.assert_allclose(of_loss["loss"], loss.item(), rtol=1e-5)
    for y, slopes in oracles.items():
        for name, slope in zip(xs, slopes, strict=True):
            got = found[f"d_{y}_d_{name}"]
            np.testing.assert_allclose(got, slope.numpy(), rtol=2e-4, atol=2e-6, err_msg=name)
