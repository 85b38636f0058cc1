"""The models that models/ defines: legal, deterministic, right in value, and differentiable."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from running import run

import ortops
from models.layers import linear
from models.lenet import lenet
from models.lstm import lstm
from models.mlp import mlp
from models.resnet import resnet
from models.torch_twins import lstm_parameters, twin
from models.transformer import transformer

STATISTICS = ("running_mean", "running_var")


class Case(NamedTuple):
    build: Callable[..., onnx.ModelProto]
    sample: tuple[int, ...]  # the input's shape without the batch
    parameters: int  # counted by hand
    ids: int = 0  # the number of token ids, where the input is ids


def tokens_of_ids(**kwargs: int) -> onnx.ModelProto:
    return transformer(vocabulary=17, length=64, width=32, hidden=64, depth=1, **kwargs)


CASES = {
    "mlp": Case(mlp, (64,), 64 * 128 + 128 + 128 * 10 + 10),
    "lenet": Case(
        lenet,
        (1, 8, 8),
        (1 * 32 * 9 + 32) + (32 * 64 * 9 + 64) + (64 * 2 * 2 * 128 + 128) + (128 * 10 + 10),
    ),
    "resnet": Case(
        resnet,
        (1, 8, 8),
        (1 * 16 * 9 + 2 * 16)
        + (16 * 16 * 9 + 16 * 16 * 9 + 4 * 16)
        + (16 * 32 * 9 + 32 * 32 * 9 + 4 * 32 + 16 * 32 + 2 * 32)
        + (32 * 64 * 9 + 64 * 64 * 9 + 4 * 64 + 32 * 64 + 2 * 64)
        + (64 * 10 + 10),
    ),
    "transformer": Case(
        transformer,
        (8, 8),
        (8 * 64 + 64)
        + 8 * 64
        + 2 * (4 * 64 + 4 * (64 * 64 + 64) + (64 * 256 + 256) + (256 * 64 + 64))
        + 2 * 64
        + (64 * 10 + 10),
    ),
    "transformer of ids": Case(
        tokens_of_ids,
        (64,),
        17 * 32
        + 64 * 32
        + (4 * 32 + 4 * (32 * 32 + 32) + (32 * 64 + 64) + (64 * 32 + 32))
        + 2 * 32
        + (32 * 10 + 10),
        ids=17,
    ),
    "lstm": Case(
        lstm,
        (8, 8),
        4 * 64 * 8 + 4 * 64 * 64 + 8 * 64 + (64 * 10 + 10),
    ),
}
every_model = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def weights_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def trainable_of(model: onnx.ModelProto) -> list[str]:
    return [name for name in weights_of(model) if not name.endswith(STATISTICS)]


def shaken(model: onnx.ModelProto, seed: int = 1) -> onnx.ModelProto:
    """The model with other values, so that zeros and ones of the beginning hide nothing."""
    rng = np.random.default_rng(seed)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        value = numpy_helper.to_array(tensor)
        value = value + rng.uniform(0.05, 0.15, value.shape).astype(np.float32) * (
            rng.choice([-1, 1], value.shape).astype(np.float32) if value.ndim < 2 else 0
        )
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    return result


def samples(case: Case, batch: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    shape = (batch, *case.sample)
    if case.ids:
        return rng.integers(0, case.ids, shape)
    return rng.uniform(0, 1, shape).astype(np.float32)


def logits_of(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    (logits,) = run(model, {model.graph.input[0].name: x}, ["logits"])
    return logits


@every_model
def test_model_is_legal_and_takes_any_batch(case: Case) -> None:
    model = case.build()
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain for entry in model.opset_import} == {""}
    for batch in (1, 2, 7):
        logits = logits_of(model, samples(case, batch))
        assert logits.shape == (batch, 10)
        assert logits.dtype == np.float32
        assert np.isfinite(logits).all()


@every_model
def test_every_shape_is_known_up_to_symbols(case: Case) -> None:
    model = case.build()
    for value in (*model.graph.value_info, *model.graph.output):
        tensor = value.type.tensor_type
        assert tensor.HasField("shape"), value.name
        if tensor.elem_type == onnx.TensorProto.FLOAT and len(tensor.shape.dim) > 2:
            assert all(d.dim_param or d.dim_value for d in tensor.shape.dim), value.name


@every_model
def test_number_of_parameters(case: Case) -> None:
    model = case.build()
    weights = weights_of(model)
    assert sum(weights[name].size for name in trainable_of(model)) == case.parameters


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (mlp((784, 128, 10)), 101_770),
        (mlp((784, 1024, 1024, 10)), 1_863_690),
        (lenet((1, 28, 28)), 421_642),
        (resnet((3, 3, 3), image=(3, 32, 32)), 272_474),  # as is known of ResNet-20
        (
            transformer(256, length=128, width=256, hidden=1024),
            256 * 256 + 256 + 128 * 256 + 2 * 789_760 + 512 + 2570,
        ),
    ],
    ids=["small mlp", "large mlp", "lenet 28×28", "resnet-20", "transformer of width 256"],
)
def test_sizes_of_the_benchmarks(model: onnx.ModelProto, parameters: int) -> None:
    weights = weights_of(model)
    assert sum(weights[name].size for name in trainable_of(model)) == parameters


def test_names_are_those_of_pytorch() -> None:
    assert list(weights_of(lenet())) == [
        *("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"),
        *("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"),
    ]
    assert {
        "bn1.running_mean",
        "layer2.0.conv1.weight",
        "layer2.0.bn2.running_var",
        "layer2.0.downsample.0.weight",
        "layer2.0.downsample.1.bias",
    } <= set(weights_of(resnet()))
    assert {
        "encoder.layers.1.self_attn.in_proj_weight",
        "encoder.layers.1.self_attn.out_proj.bias",
        "encoder.layers.1.linear1.weight",
        "encoder.norm.weight",
    } <= set(weights_of(transformer()))


def test_nodes_are_named_after_their_layer() -> None:
    names = {node.name for node in resnet().graph.node}
    assert {"conv1/Conv", "layer3.0/Add", "layer3.0.downsample.0/Conv", "fc/Gemm"} <= names


@pytest.mark.quick(3)
@every_model
def test_seed_determines_the_weights(case: Case) -> None:
    assert case.build(seed=3) == case.build(seed=3)
    one, other = weights_of(case.build(seed=3)), weights_of(case.build(seed=4))
    for name, weight in one.items():
        drawn = len(np.unique(weight)) > 1
        assert drawn == (weight.ndim > 1), name
        assert drawn != np.array_equal(weight, other[name]), name


def test_variance_of_initial_weights() -> None:
    weights = weights_of(mlp((784, 1024, 1024, 10)))
    assert weights["fc2.weight"].var() == pytest.approx(2 / 1024, rel=0.02)
    weights = weights_of(lenet((1, 28, 28), channels=(64, 128)))
    assert weights["conv2.weight"].var() == pytest.approx(2 / (64 * 9), rel=0.02)
    weights = weights_of(transformer(length=512, width=256, hidden=1024))
    in_proj = weights["encoder.layers.0.self_attn.in_proj_weight"]
    assert in_proj.var() == pytest.approx(2 / (256 + 768), rel=0.02)
    assert np.abs(in_proj).max() <= math.sqrt(6 / (256 + 768)) + 1e-6
    assert weights["positions.weight"].std() == pytest.approx(0.02, rel=0.02)


# The same networks in numpy and float64, written from their definitions.


def np_conv(x: np.ndarray, w: np.ndarray, stride: int = 1) -> np.ndarray:
    pad = w.shape[2] // 2
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))
    return np.einsum("nchwij,ocij->nohw", windows[:, :, ::stride, ::stride], w)


def np_bias(b: np.ndarray) -> np.ndarray:
    return b[:, None, None]


def np_relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def np_pool(x: np.ndarray) -> np.ndarray:
    n, c, h, w = x.shape
    x = x[:, :, : h // 2 * 2, : w // 2 * 2]
    return x.reshape(n, c, h // 2, 2, w // 2, 2).max((3, 5))


def np_linear(x: np.ndarray, p: dict[str, np.ndarray], name: str) -> np.ndarray:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def np_mlp(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    return np_linear(np_relu(np_linear(x, p, "fc1")), p, "fc2")


def np_lenet(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    for name in ("conv1", "conv2"):
        x = np_pool(np_relu(np_conv(x, p[f"{name}.weight"]) + np_bias(p[f"{name}.bias"])))
    return np_linear(np_relu(np_linear(x.reshape(len(x), -1), p, "fc1")), p, "fc2")


def np_resnet(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        scale = p[f"{name}.weight"] / np.sqrt(p[f"{name}.running_var"] + 1e-5)
        return (x - np_bias(p[f"{name}.running_mean"])) * np_bias(scale) + np_bias(
            p[f"{name}.bias"]
        )

    x = np_relu(norm(np_conv(x, p["conv1.weight"]), "bn1"))
    for stage in (1, 2, 3):
        at, stride = f"layer{stage}.0", 1 if stage == 1 else 2
        y = np_relu(norm(np_conv(x, p[f"{at}.conv1.weight"], stride), f"{at}.bn1"))
        y = norm(np_conv(y, p[f"{at}.conv2.weight"]), f"{at}.bn2")
        if stage > 1:
            x = np_conv(x, p[f"{at}.downsample.0.weight"], stride)
            x = norm(x, f"{at}.downsample.1")
        x = np_relu(x + y)
    return np_linear(x.mean((2, 3)), p, "fc")


def np_transformer(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def attend(x: np.ndarray, name: str) -> np.ndarray:
        width, heads = x.shape[-1], 4
        size = width // heads
        packed = x @ p[f"{name}.in_proj_weight"].T + p[f"{name}.in_proj_bias"]
        mixed = np.zeros_like(x)
        for head in range(heads):
            here = slice(head * size, (head + 1) * size)
            q, k, v = (packed[..., i * width : (i + 1) * width][..., here] for i in range(3))
            weight = np.exp(np.einsum("bqd,bkd->bqk", q, k) / math.sqrt(size))
            weight /= weight.sum(-1, keepdims=True)
            mixed[..., here] = np.einsum("bqk,bkd->bqd", weight, v)
        return np_linear(mixed, p, f"{name}.out_proj")

    def gelu(x: np.ndarray) -> np.ndarray:
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    table = p["embedding.weight"]
    x = table[x] if x.ndim == 2 else np_linear(x, p, "embedding")
    x = x + p["positions.weight"][: x.shape[1]]
    for layer in range(sum(name.endswith("linear1.weight") for name in p)):
        at = f"encoder.layers.{layer}"
        x = x + attend(norm(x, f"{at}.norm1"), f"{at}.self_attn")
        hidden = gelu(np_linear(norm(x, f"{at}.norm2"), p, f"{at}.linear1"))
        x = x + np_linear(hidden, p, f"{at}.linear2")
    return np_linear(norm(x, "encoder.norm").mean(1), p, "classifier")


def np_lstm(p: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    weight, recurrence, bias = p["lstm.W"][0], p["lstm.R"][0], p["lstm.B"][0]
    hidden = cell = np.zeros((len(x), recurrence.shape[1]))
    for now in x.transpose(1, 0, 2):
        gates = now @ weight.T + hidden @ recurrence.T + bias[: len(weight)] + bias[len(weight) :]
        i, o, f, c = np.split(gates, 4, axis=1)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(c)
        hidden = sigmoid(o) * np.tanh(cell)
    return np_linear(hidden, p, "fc")


BY_HAND = {
    "mlp": np_mlp,
    "lenet": np_lenet,
    "resnet": np_resnet,
    "transformer": np_transformer,
    "lstm": np_lstm,
}


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@every_model
def test_values_against_numpy(case: Case) -> None:
    model = shaken(case.build())
    x = samples(case, 3)
    weights = {name: weight.astype(np.float64) for name, weight in weights_of(model).items()}
    expected = BY_HAND[model.graph.name](weights, x if case.ids else x.astype(np.float64))
    assert np.ptp(expected, axis=0).max() > 1e-2  # the logits tell the samples apart
    close(logits_of(model, x), expected)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("name", ["transformer", "transformer of ids"])
def test_transformer_takes_shorter_sequences(name: str, length: int) -> None:
    model = shaken(CASES[name].build())
    x = samples(CASES[name], 3)[:, :length]
    expected = np_transformer(weights_of(model), x)
    close(logits_of(model, x), expected)


def test_lenet_of_odd_sizes_leaves_the_last_row_out() -> None:
    model = shaken(lenet((2, 11, 9), channels=(4, 6), hidden=5))
    x = np.random.default_rng(0).uniform(0, 1, (3, 2, 11, 9)).astype(np.float32)
    close(logits_of(model, x), np_lenet(weights_of(model), x))


@pytest.mark.parametrize(
    ("build", "nodes"), [(lenet, 2), (transformer, 1 + 2 * 4)], ids=["lenet", "transformer"]
)
def test_dropout_does_nothing_in_the_inference_graph(
    build: Callable[..., onnx.ModelProto], nodes: int
) -> None:
    case = CASES[build.__name__]
    plain, dropping = build(), build(dropout_ratio=0.25)
    assert not any(node.op_type == "Dropout" for node in plain.graph.node)
    assert sum(node.op_type == "Dropout" for node in dropping.graph.node) == nodes
    x = samples(case, 2)
    np.testing.assert_array_equal(logits_of(plain, x), logits_of(dropping, x))


def test_a_width_that_the_heads_do_not_divide() -> None:
    with pytest.raises(ortops.ModelError, match=r"64 features .* between 7 heads; .* must divide"):
        transformer(heads=7)


def test_a_layer_on_a_symbolic_axis() -> None:
    with ortops.Tape() as tape:
        x = tape.input("x", np.float32, ["batch", "width"])
        with pytest.raises(ortops.ModelError, match=r"layer 'fc': axis -1 .* has size width; "):
            linear(x, "fc", 3, np.random.default_rng(0))
        assert tape.scope == ""


def test_an_image_that_pooling_uses_up() -> None:
    with pytest.raises(ortops.ModelError, match=r"layer 'pool2': .*, 64, 1, 1.* smaller than .*"):
        lenet((1, 3, 3))


# Gradients


def gradient_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a cross entropy and a Gradient node over all of its parameters."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    xs = trainable_of(model)
    names = [f"d {name}" for name in xs]
    graph, domain = result.graph, "ai.onnx.preview.training"
    result.opset_import.append(helper.make_opsetid(domain, 1))
    graph.input.append(helper.make_tensor_value_info("labels", onnx.TensorProto.INT64, ["batch"]))
    graph.node.append(
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "labels"], ["loss"], name="loss")
    )
    graph.node.append(
        helper.make_node("Gradient", xs, names, name="gradient", domain=domain, xs=xs, y="loss")
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    for name, x in zip(names, xs, strict=True):
        shape = weights_of(model)[x].shape
        graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    return result


def gradients(model: onnx.ModelProto, x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    lowered = ortops.lower(gradient_model(model))
    results = run(lowered, {lowered.graph.input[0].name: x, "labels": labels})
    return dict(zip(["loss", *trainable_of(model)], results, strict=True))


def np_loss(model: onnx.ModelProto, p: dict[str, np.ndarray], x: np.ndarray, labels: np.ndarray):
    logits = BY_HAND[model.graph.name](p, x)
    return np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(x)), labels])


@pytest.mark.slow
@every_model
def test_gradient_of_all_parameters(case: Case) -> None:
    """Each parameter's gradient against the change of the float64 loss along it."""
    model = shaken(case.build())
    x = samples(case, 4)
    labels = np.array([3, 1, 4, 1])
    found = gradients(model, x, labels)
    wide = {name: weight.astype(np.float64) for name, weight in weights_of(model).items()}
    x = x if case.ids else x.astype(np.float64)
    assert found.pop("loss") == pytest.approx(np_loss(model, wide, x, labels), rel=1e-5)
    for name, gradient in found.items():
        assert gradient.shape == wide[name].shape, name
        length = np.linalg.norm(gradient.astype(np.float64))
        step = 1e-6 / length * gradient
        ahead = np_loss(model, wide | {name: wide[name] + step}, x, labels)
        behind = np_loss(model, wide | {name: wide[name] - step}, x, labels)
        assert (ahead - behind) / 2e-6 == pytest.approx(length, rel=1e-3), name


@pytest.mark.quick(2)
@pytest.mark.torch
@every_model
def test_values_and_gradients_against_torch(case: Case) -> None:
    import torch

    model = shaken(case.build())
    x, labels = samples(case, 4), np.array([3, 1, 4, 1])
    module = twin(model)
    logits = module(torch.from_numpy(x))
    close(logits_of(model, x), logits.detach().numpy())
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
    found = gradients(model, x, labels)
    if model.graph.name == "lstm":
        found = lstm_parameters(found)
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert set(expected) == set(found) - {"loss"}
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(
            found[name], gradient.numpy(), rtol=1e-3, atol=1e-4 * scale, err_msg=name
        )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp((784, 1024, 1024, 10)), (784,)),
        (lenet((1, 28, 28)), (1, 28, 28)),
        (resnet((3, 3, 3), image=(3, 32, 32)), (3, 32, 32)),
        (transformer(256, length=128, width=256, hidden=1024), (128, 256)),
        (lstm(64, width=128), (50, 64)),
    ],
    ids=["mlp", "lenet", "resnet-20", "transformer", "lstm"],
)
def test_values_of_the_benchmarks_against_torch(
    model: onnx.ModelProto, shape: tuple[int, ...]
) -> None:
    import torch

    x = np.random.default_rng(0).uniform(0, 1, (2, *shape)).astype(np.float32)
    with torch.no_grad():
        expected = twin(model)(torch.from_numpy(x)).numpy()
    close(logits_of(model, x), expected)
