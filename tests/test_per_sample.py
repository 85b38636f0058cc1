"""Gradients of each row, next to a run for each row, torch.func and closed forms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from running import plain_session, run_session

import ortops
from models import lenet, lstm, mlp, resnet, transformer
from ortops import ArgumentError, ModelError, Tape, derivatives, losses, op
from ortops.graph.tensor import Tensor

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
ROWS = 4


def vectors(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def labels(count: int = ROWS, classes: int = 2) -> Array:
    return np.arange(count) % classes


def scans(model: onnx.ModelProto) -> int:
    return sum(node.op_type == "Scan" for node in model.graph.node)


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> Feeds:
    names = [value.name for value in model.graph.output]
    return dict(zip(names, run_session(plain_session(model), feeds), strict=True))


def of_rows(model: onnx.ModelProto, feeds: Feeds, **arguments: Any) -> Feeds:
    """Returns the gradients of batches of one row, of which the loss is part of the model."""
    trainable = ortops.build_training_model(model, optimizer="SGD", **arguments)
    session = ortops.TrainingSession(trainable)
    found: dict[str, list[Array]] = {}
    for row in range(len(next(iter(feeds.values())))):
        gradients = session.gradients({n: a[row : row + 1] for n, a in feeds.items()})
        for name, gradient in gradients.items():
            found.setdefault(f"d_loss_d_{name}", []).append(np.array(gradient))
    return {name: np.stack(gradients) for name, gradients in found.items()}


def with_loss(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Adds the cross-entropy of an output, as an output "loss"."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    node = onnx.helper.make_node(
        "SoftmaxCrossEntropyLoss", [name, "labels"], ["loss"], reduction="mean"
    )
    made.graph.node.append(node)
    kind = onnx.TensorProto
    made.graph.input.append(onnx.helper.make_tensor_value_info("labels", kind.INT64, ["batch"]))
    made.graph.output.append(onnx.helper.make_tensor_value_info("loss", kind.FLOAT, []))
    return made


MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "mlp": (lambda: mlp.mlp((4, 16, 2)), (4,)),
    "lenet": (lenet.lenet, (1, 8, 8)),
    "resnet": (resnet.resnet, (1, 8, 8)),
    "transformer": (transformer.transformer, (8, 8)),
    "lstm": (lstm.lstm, (8, 8)),
}


@pytest.mark.nightly(3)
@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MODELS)
def test_next_to_one_run_for_each_row(name: str) -> None:
    make, shape = MODELS[name]
    model = make()
    model.ClearField("training_info")
    (given,) = [value.name for value in model.graph.input]
    feeds = {given: vectors(ROWS, *shape), "labels": labels()}
    found = derivatives.per_sample_gradient(model, loss="SoftmaxCrossEntropy")
    onnx.checker.check_model(found, full_check=True)
    assert [value.name for value in found.graph.input] == [given, "labels"]
    assert scans(found) == (2 if name == "lstm" else 0)  # over time
    results = run(found, feeds)
    single = with_loss(model, model.graph.output[0].name)
    names = [n.removeprefix("d_loss_d_") for n in results]
    assert names
    gradient = derivatives.gradient(single, xs=names, y="loss", lowered=True)
    session = plain_session(gradient)
    for row in range(ROWS):
        one = {name: array[row : row + 1] for name, array in feeds.items()}
        expected = run_session(session, one, list(results))
        for array, other in zip(results.values(), expected, strict=True):
            assert array[row].shape == other.shape
            size = np.abs(other).max(initial=1e-3)
            np.testing.assert_allclose(array[row], other, rtol=1e-3, atol=1e-5 * size + 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_clipped_rows_are_summed(max_norm: float) -> None:
    model = lenet.lenet()
    feeds = {"images": vectors(ROWS, 1, 8, 8), "labels": labels()}
    rows = run(derivatives.per_sample_gradient(model, loss="SoftmaxCrossEntropy"), feeds)
    summed = derivatives.per_sample_gradient(model, loss="SoftmaxCrossEntropy", max_norm=max_norm)
    onnx.checker.check_model(summed, full_check=True)
    norms = np.sqrt(
        sum((a.astype(np.float64).reshape(ROWS, -1) ** 2).sum(1) for a in rows.values())
    )
    factors = np.minimum(1, max_norm / (norms + 1e-6))
    found = run(summed, feeds)
    assert list(found) == list(rows)
    for name, array in found.items():
        expected = np.tensordot(factors, rows[name], 1)
        np.testing.assert_allclose(array, expected, rtol=1e-4, atol=1e-6)
    if max_norm == 0.1:
        assert (norms > max_norm).all()
        total = np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in found.values()))
        assert total <= ROWS * max_norm


def regression() -> onnx.ModelProto:
    """Two inputs with rows, one without, and a scalar weight."""
    with Tape(name="regression") as tape:
        x = tape.input("x", np.float32, ["n", 3])
        z = tape.input("z", np.float32, ["n"])
        scale = tape.input("scale", np.float32, [3])
        h = (x * scale) @ tape.initializer("w", vectors(3, 2, seed=1)) + op.Unsqueeze(z, [1])
        tape.output(h * tape.initializer("b", vectors(2, seed=2)), "y")
        tape.output(op.Sigmoid(h), "p")
    return tape.model()


def distance(y: Tensor, p: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return ((y - targets) ** 2).mean(axis=1).sum() + (op.Unsqueeze(mask, [1]) * p).sum()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "loss",
    [
        "MeanSquaredError",
        losses.MeanSquaredError(reduction="sum"),
        0.5 * losses.L1("y", target="t") + 2.0 * losses.BinaryCrossEntropy("p", target="u"),
        distance,
    ],
    ids=["name", "sum", "two", "function"],
)
def test_losses_and_inputs(loss: Any) -> None:
    feeds = {"x": vectors(ROWS, 3), "z": vectors(ROWS), "targets": vectors(ROWS, 2, seed=3)}
    inputs = None
    if loss is distance:
        feeds["mask"] = vectors(ROWS, seed=4)
        inputs = {"mask": (np.float32, ["n"])}
    elif not isinstance(loss, str) and "t" in str(loss):
        feeds |= {"t": feeds["targets"], "u": np.abs(np.tanh(feeds["targets"]))}
    model = regression()
    scale = np.array([1, 2, -1], np.float32)
    found = derivatives.per_sample_gradient(model, loss=loss, inputs=inputs)
    assert scans(found) == 0
    names = {value.name for value in found.graph.input}
    feeds = {name: array for name, array in feeds.items() if name in names}
    assert names == {*feeds, "scale"}
    results = run(found, {**feeds, "scale": scale})
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss=loss, optimizer="SGD", inputs=inputs)
    )
    for row in range(ROWS):
        one = {name: array[row : row + 1] for name, array in feeds.items()}
        gradients = session.gradients({**one, "scale": scale})
        for name, array in results.items():
            expected = gradients[name.removeprefix("d_loss_d_")]
            np.testing.assert_allclose(array[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_of_an_embedding_and_trainable() -> None:
    model = transformer.transformer(vocabulary=7)
    feeds = {"tokens": np.random.default_rng(0).integers(0, 7, (ROWS, 6)), "labels": labels()}
    found = derivatives.per_sample_gradient(
        model, loss="SoftmaxCrossEntropy", trainable=["embedding*"]
    )
    results = run(found, feeds)
    expected = of_rows(model, feeds, loss="SoftmaxCrossEntropy", trainable=["embedding*"])
    assert results.keys() == expected.keys()
    for name, array in results.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.torch
def test_next_to_torch() -> None:
    torch = pytest.importorskip("torch")
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, padding=1),
        torch.nn.GroupNorm(2, 4),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(144, 3),
    )
    w = {name: value.detach().numpy() for name, value in network.named_parameters()}
    with Tape(name="network") as tape:
        x = tape.input("x", np.float32, ["batch", 1, 6, 6])
        p = {name: tape.initializer(name, value) for name, value in w.items()}
        h = op.Conv(x, p["0.weight"], p["0.bias"], pads=[1, 1, 1, 1])
        h = op.Tanh(op.GroupNormalization(h, p["1.weight"], p["1.bias"], num_groups=2))
        tape.output(op.Gemm(op.Flatten(h), p["4.weight"], p["4.bias"], transB=1), "logits")
    feeds = {"x": vectors(ROWS, 1, 6, 6), "labels": labels(ROWS, 3)}

    def loss(parameters: Any, x: Any, label: Any) -> Any:
        logits = torch.func.functional_call(network, parameters, (x[None],))
        return torch.nn.functional.cross_entropy(logits, label[None])

    parameters = {name: value.detach() for name, value in network.named_parameters()}
    expected = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(
        parameters, torch.tensor(feeds["x"]), torch.tensor(feeds["labels"])
    )
    found = derivatives.per_sample_gradient(tape.model(), loss="SoftmaxCrossEntropy")
    assert scans(found) == 0
    for name, array in run(found, feeds).items():
        other = expected[name.removeprefix("d_loss_d_")].numpy()
        np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-6)


def test_models_that_couple_rows_are_refused() -> None:
    with Tape(name="normalized") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        w = tape.initializer("w", vectors(3, 3))
        one, zero = np.ones(3, np.float32), np.zeros(3, np.float32)
        y = op.BatchNormalization(x @ w, one, zero, zero, one, training_mode=1, outputs=3)
        tape.output(y[0], "y")
    with pytest.raises(ModelError, match=r"BatchNormalization node .* statistics of the batch"):
        derivatives.per_sample_gradient(tape.model(), loss="MeanSquaredError")
    with Tape(name="pairs") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        tape.output(x @ tape.initializer("w", vectors(3, 3)), "a")
        tape.output(x @ tape.initializer("v", vectors(3, 3)), "b")
    with pytest.raises(ModelError, match=r"InfoNCE.*depends on other rows"):
        derivatives.per_sample_gradient(tape.model(), loss=losses.InfoNCE(query="a", key="b"))


def test_wrong_arguments_are_named() -> None:
    model = mlp.mlp((4, 2))
    for wrong in (0, -1.0, "1", float("nan")):
        with pytest.raises(ArgumentError, match="max_norm"):
            derivatives.per_sample_gradient(model, loss="SoftmaxCrossEntropy", max_norm=wrong)  # type: ignore[arg-type]
    fixed = copy.deepcopy(model)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 8
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 8
    with pytest.raises(ModelError, match=r"'images' has a fixed batch size of 8; .*free_batch"):
        derivatives.per_sample_gradient(fixed, loss="SoftmaxCrossEntropy")

    def scaled(y: Tensor, factor: Tensor) -> Tensor:
        return (y * factor).sum()

    with pytest.raises(ModelError, match="input 'factor' must have one entry per row"):
        derivatives.per_sample_gradient(
            regression(), loss=scaled, inputs={"factor": (np.float32, [])}
        )


def test_a_batch_of_one_that_is_fixed_becomes_dynamic() -> None:
    model = mlp.mlp((4, 2))
    fixed = copy.deepcopy(model)
    fixed.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    fixed.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 1
    feeds = {"images": vectors(ROWS, 4), "labels": labels()}
    first, other = (
        run(derivatives.per_sample_gradient(each, loss="SoftmaxCrossEntropy"), feeds)
        for each in (model, fixed)
    )
    for name, array in first.items():
        np.testing.assert_array_equal(array, other[name])


@pytest.mark.parametrize(
    ("x", "h"), [("s1,4", "s2,3,2"), ("batch,4", "3,batch,2"), ("x_1,4", "h_1,3,2")]
)
def test_rows_are_those_of_fit(x: str, h: str) -> None:
    """Inputs whose batch has another symbol were shared by all rows, as were states."""
    axis = 0 if h.endswith("3,2") else 1
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
    g (float[{x}] x, float[{h}] h) => (float[{x.replace("4", "2")}] y)
    <float[4,2] w = {{1,0,0,1,1,1,0,0}}, int64[1] axis = {{{1 - axis}}}>
    {{ a = MatMul(x, w) s = ReduceSum<keepdims=0>(h, axis) y = Mul(a, s) }}""")
    draw = np.random.default_rng(0)
    given, targets = draw.standard_normal((5, 4), np.float32), draw.standard_normal((5, 2))
    state = draw.standard_normal((5, 3, 2), np.float32)
    derived = ortops.derivatives.per_sample_gradient(model, loss="MeanSquaredError")
    feeds = {"x": given, "h": np.moveaxis(state, 0, axis), "targets": targets.astype(np.float32)}
    session = plain_session(derived)
    (found,) = session.run(["d_loss_d_w"], feeds)
    w = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], np.float64)
    sums = state.astype(np.float64).sum(1)
    slope = ((given @ w) * sums - targets) * sums  # the mean over two columns, of a square
    np.testing.assert_allclose(found, given[:, :, None] * slope[:, None], rtol=1e-4, atol=1e-5)
