"""Channels removed from models.

A channel that is removed contributes nothing, so the oracle is the whole model with zeros in place
of all weights that were removed, in stock onnxruntime; two networks are also cut by hand in numpy.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from running import run
from test_surgery import declared, floats, graph_model, ints, node, untouched

import ortops
from models import digits, lenet, mlp, resnet, transformer
from ortops import surgery

CLASSIFIER = Path(__file__).parents[1] / ".models" / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"


def tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    found = {tensor.name: tensor for tensor in model.graph.initializer}
    for each in model.graph.node:
        if each.op_type == "Constant" and each.attribute[0].name == "value":
            found[each.output[0]] = each.attribute[0].t
    return found


def arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {name: numpy_helper.to_array(tensor) for name, tensor in tensors(model).items()}


def with_distinct_numbers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy in which all elements of a weight differ, so that they can be found again."""
    rng = np.random.default_rng(1)  # the channels that are removed contribute to each output
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in tensors(copy).values():
        array = numpy_helper.to_array(tensor)
        if array.dtype != np.float32 or array.size < 2:
            continue
        spread = float(array.std()) * 1.7
        steps = rng.permutation(array.size).reshape(array.shape) / array.size
        varied = array.ndim > 1 and spread > 1e-3
        new = (2 * steps - 1) * spread if varied else array + 0.1 * steps
        tensor.CopyFrom(numpy_helper.from_array(new.astype(np.float32), tensor.name))
    return copy


def with_zeros(model: onnx.ModelProto, pruned: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with zeros in place of the elements of weights that were removed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    left = arrays(pruned)
    count = 0
    for name, tensor in tensors(copy).items():
        array, kept = numpy_helper.to_array(tensor), left.get(name)
        if any(each.startswith(f"{name}.") for each in left):  # shared; readers have zeros
            continue
        if kept is not None and kept.shape != array.shape:
            mask = np.isin(array, kept)
            assert mask.sum() == kept.size, name
            zeros = np.where(mask, array, 0).astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(zeros, name))
            count += 1
    assert count
    return copy


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], **settings: Any) -> None:
    """Prunes a model and compares it with the whole one that has zeros."""
    model = with_distinct_numbers(model)
    pruned = untouched(surgery.prune, model, settings.pop("ratio", 0.5), **settings)
    onnx.checker.check_model(pruned, full_check=True)
    sizes = [sum(array.size for array in arrays(each).values()) for each in (pruned, model)]
    assert sizes[0] < sizes[1]
    expected, found, before = (
        run(each, feeds)[0] for each in (with_zeros(model, pruned), pruned, model)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.abs(found - before).max() > 1e-3  # the removed channels did contribute


IMAGES = {"images": floats(3, 1, 8, 8)}


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "settings", [{}, {"within": "model"}, {"multiple": 8, "ratio": 0.4}, {"ratio": 0.95}]
)
@pytest.mark.parametrize("model", [lenet.lenet(), resnet.resnet()], ids=["lenet", "resnet"])
def test_networks(model: onnx.ModelProto, settings: dict[str, Any]) -> None:
    check(model, IMAGES, **settings)


def test_a_transformer_keeps_what_is_normalized() -> None:
    model = transformer.transformer()
    check(model, {"tokens": floats(2, 8, 8)})
    groups = surgery.channel_groups(model)
    free = {name for group in groups if group.prunable for name in group.weights}
    assert {name.rsplit(".", 2)[-2] for name in free} == {"linear1", "self_attn"}
    assert all(bool(group.reason) == (group.prunable < group.channels) for group in groups)


@pytest.mark.slow
@pytest.mark.fetched(CLASSIFIER)
def test_the_classifier_of_an_ocr() -> None:
    check(onnx.load(CLASSIFIER), {"x": floats(2, 3, 48, 192)}, ratio=0.3)


# Each: nodes from x [batch, 6, 4, 4] to y, weights, and the weights that become smaller.
CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, np.ndarray], set[str]]] = {
    "residual and depthwise, with a multiplier": (
        [
            node("Conv", "x a", "p", pads=[1, 1, 1, 1]),
            node("Conv", "p b", "q"),
            node("Relu", "q", "r"),
            node("Add", "p r", "s"),
            node("Conv", "s d", "t", group=8),
            node("Conv", "t e", "y"),
        ],
        {
            "a": floats(8, 6, 3, 3),
            "b": floats(8, 8, 1, 1),
            "d": floats(16, 1, 1, 1),
            "e": floats(3, 16, 1, 1),
        },
        {"a", "b", "d", "e"},
    ),
    "grouped and transposed convolutions": (
        [
            node("Conv", "x a", "p"),
            node("Conv", "p b", "q", group=2),
            node("ConvTranspose", "q c cb", "r", strides=[2, 2]),
            node("ConvTranspose", "r d", "s", group=6),
            node("ConvTranspose", "s e", "t", group=2),
            node("Conv", "t f", "y"),
        ],
        {
            "a": floats(8, 6, 1, 1),
            "b": floats(12, 4, 1, 1),
            "c": floats(12, 6, 2, 2),
            "cb": floats(6),
            "d": floats(6, 1, 2, 2),
            "e": floats(6, 4, 1, 1),
            "f": floats(2, 8, 1, 1),
        },
        {"a", "b", "c", "cb", "d", "e", "f"},
    ),
    "concatenation, a shuffle and halves": (
        [
            node("Conv", "x a", "p"),
            node("Conv", "x b", "q"),
            node("Concat", "p q", "r", axis=1),
            node("Reshape", "r s1", "s"),
            node("Transpose", "s", "t", perm=[0, 2, 1, 3, 4]),
            node("Reshape", "t s2", "u"),
            node("Split", "u", "v w", axis=1, num_outputs=2),
            node("Sigmoid", "w", "g"),
            node("Mul", "v g", "h"),
            node("Slice", "h st en ax", "i"),
            node("Conv", "i c", "y"),
        ],
        {
            "a": floats(6, 6, 1, 1),
            "b": floats(10, 6, 1, 1),
            "s1": ints(0, 2, 8, 4, 4),
            "s2": ints(-1, 16, 4, 4),
            "st": ints(-6),
            "en": ints(2**62),
            "ax": ints(1),
            "c": floats(3, 6, 1, 1),
        },
        {"a", "b", "c"},
    ),
    "squeeze and excitation, normalization, flattening": (
        [
            node("Conv", "x a ab", "p"),
            node("BatchNormalization", "p s o m v", "q"),
            node("PRelu", "q sl", "r"),
            node("GlobalAveragePool", "r", "g"),
            node("Conv", "g b", "h"),
            node("Relu", "h", "i"),
            node("Conv", "i c", "j"),
            node("HardSigmoid", "j", "k"),
            node("Mul", "r k", "l"),
            node("InstanceNormalization", "l s2 o2", "n"),
            node("Flatten", "n", "f"),
            node("Gemm", "f w wb", "d", transB=1),
            node("Tanh", "d", "e"),
            node("MatMul", "e z", "y"),
        ],
        {
            "a": floats(8, 6, 3, 3),
            "ab": floats(8),
            "s": floats(8),
            "o": floats(8),
            "m": floats(8),
            "v": np.abs(floats(8)) + 1,
            "sl": np.abs(floats(8, 1, 1)),
            "b": floats(4, 8, 1, 1),
            "c": floats(8, 4, 1, 1),
            "s2": floats(8),
            "o2": floats(8),
            "w": floats(10, 32),
            "wb": floats(10),
            "z": floats(10, 3),
        },
        {*("a", "ab", "s", "o", "m", "v", "sl", "b", "c", "s2", "o2", "w", "wb", "z")},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.9])
def test_operators(name: str, ratio: float) -> None:
    nodes, weights, smaller = CASES[name]
    rank = 2 if nodes[-1].op_type == "MatMul" else 4
    model = graph_model(
        nodes,
        weights,
        inputs=(("x", ["batch", 6, 4, 4]),),
        outputs=(("y", [None] * rank),),
        opset=18,
    )
    check(model, {"x": floats(2, 6, 4, 4)}, ratio=ratio)
    left = arrays(surgery.prune(model, 0.5))
    assert {key for key in weights if key in left and left[key].size < weights[key].size} == smaller


def test_a_residual_and_depthwise_network_by_hand() -> None:
    nodes, weights, _ = CASES["residual and depthwise, with a multiplier"]
    model = graph_model(
        nodes, weights, inputs=(("x", ["batch", 6, 4, 4]),), outputs=(("y", [None] * 4),)
    )
    a, b, d, e = (weights[key].astype(np.float64) for key in "abde")

    def relative(weight: np.ndarray, axis: int) -> np.ndarray:
        others = tuple(each for each in range(4) if each != axis)
        sums = (weight**2).sum(axis=others)
        return sums / sums.mean()

    wide = relative(d, 0), relative(e, 1)  # two channels of each unit
    parts = [relative(a, 0), relative(b, 0), relative(b, 1)]
    score = (sum(parts) + sum(each.reshape(8, 2).sum(axis=1) for each in wide)) / 7
    kept = np.sort(np.argsort(score)[3:])
    both = np.stack([2 * kept, 2 * kept + 1], axis=1).reshape(-1)
    found = arrays(surgery.prune(model, 0.4))
    np.testing.assert_array_equal(found["a"], weights["a"][kept])
    np.testing.assert_array_equal(found["b"], weights["b"][kept][:, kept])
    np.testing.assert_array_equal(found["d"], weights["d"][both])
    np.testing.assert_array_equal(found["e"], weights["e"][:, both])
    group = [each.attribute for each in surgery.prune(model, 0.4).graph.node][4]
    assert [each.i for each in group if each.name == "group"] == [5]


def test_vectors_that_layers_share_do_not_tie_them() -> None:
    nodes = [
        node("Gemm", "x a v", "p"),
        node("Relu", "p", "q"),
        node("Gemm", "q b v", "r"),
        node("Relu", "r", "s"),
        node("Gemm", "s c", "y"),
    ]
    weights = {"a": floats(6, 4), "b": floats(4, 4), "c": floats(4, 3), "v": floats(4)}
    model = graph_model(nodes, weights)
    assert [group.weights for group in surgery.channel_groups(model)][:2] == [("a",), ("b",)]
    pruned = surgery.prune(model, {"b": 0.5})
    assert {n: a.shape for n, a in arrays(pruned).items()} == {
        "a": (6, 4),
        "b": (4, 2),
        "c": (2, 3),
        "v": (4,),
        "v.1": (2,),
    }
    kept = [list(weights["v"]).index(each) for each in arrays(pruned)["v.1"]]
    np.testing.assert_array_equal(arrays(pruned)["c"], weights["c"][kept])
    same = surgery.prune(model, {"a": 0.5})
    assert declared(same.graph.output[0]) == ["batch", 3]


# Each: nodes after `h = Conv(x, w)`, and what the reason says.
FIXED = {
    "output": ([node("Identity", "h", "y")], "output 'y'"),
    "normalized": ([node("LayerNormalization", "h s", "y", axis=1)], "mixes"),
    "reduced": ([node("ReduceMean", "h", "y", axes=[1])], "reduces"),
    "with the input": (
        [node("Add", "h x", "z"), node("Conv", "z k", "y")],
        "no weights along axis 1",
    ),
    "unknown": ([node("DepthToSpace", "h", "y", blocksize=2)], "not followed"),
    "size": (
        [
            node("Shape", "h", "n"),
            node("Gather", "n one", "c"),
            node("Cast", "c", "f", to=1),
            node("Div", "h f", "g"),
            node("Conv", "g k", "y"),
        ],
        "computes with their number",
    ),
    "a size that repeats a number": (
        [
            node("Shape", "h", "n"),
            node("Gather", "n one", "c"),
            node("Expand", "t c", "e"),
            node("Unsqueeze", "e last", "u"),
            node("Add", "h u", "g"),
            node("Conv", "g k", "y"),
        ],
        "computes with their number",
    ),
    "by index": ([node("Gather", "h idx", "g", axis=1), node("Conv", "g k2", "y")], "by index"),
    "padded": ([node("Pad", "h pads", "g"), node("Conv", "g k3", "y")], "pads"),
}


@pytest.mark.parametrize("name", FIXED)
def test_channels_that_must_stay(name: str) -> None:
    after, said = FIXED[name]
    weights = {
        "w": floats(6, 6, 1, 1),
        "s": floats(6, 4, 4),
        "k": floats(2, 6, 1, 1),
        "k2": floats(2, 2, 1, 1),
        "k3": floats(2, 7, 1, 1),
        "one": ints(1),
        "t": floats(1),
        "last": ints(1, 2),
        "idx": ints(3, 1),
        "pads": ints(0, 1, 0, 0, 0, 0, 0, 0),
    }
    used = {name for each in after for name in each.input}
    model = graph_model(
        [node("Conv", "x w", "h"), *after],
        {key: weights[key] for key in weights if key in used or key == "w"},
        inputs=(("x", ["batch", 6, 4, 4]),),
        outputs=(("y", [None] * 4),),
    )
    group = surgery.channel_groups(model)[0]
    assert (group.weights[0], group.channels, group.prunable) == ("w", 6, 0)
    assert said in group.reason
    with pytest.raises(ortops.UnsupportedError, match="no channel can be removed"):
        surgery.prune(model, 0.5)


def test_what_is_kept() -> None:
    model = lenet.lenet()
    pruned = arrays(surgery.prune(model, 0.5, keep=["conv1.weight"]))
    assert pruned["conv1.weight"].shape[0] == 32
    assert pruned["conv2.weight"].shape == (32, 32, 3, 3)
    hidden = next(each for each in model.graph.node if "fc1" in each.name).output[0]
    assert arrays(surgery.prune(model, 0.5, keep=hidden))["fc2.weight"].shape == (10, 128)
    pruned = arrays(surgery.prune(model, {"conv2.*": 0.75, "fc*": 0.25}))
    shapes = [pruned[f"{name}.weight"].shape for name in ("conv1", "conv2", "fc1")]
    assert shapes == [(32, 1, 3, 3), (16, 32, 3, 3), (96, 64)]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": 0}, "ratio must be"),
        ({"ratio": 1.0}, "ratio must be"),
        ({"ratio": -0.5}, "ratio must be"),
        ({"ratio": True}, "ratio must be"),
        ({"ratio": {}}, "ratio must be a number or name"),
        ({"ratio": {"conv9.*": 0.5}}, "no layer has a weight 'conv9.\\*'"),
        ({"ratio": 0.001}, "removes no channel"),
        ({"ratio": 0.5, "multiple": 0}, "multiple must be"),
        ({"ratio": 0.5, "within": "layer"}, "within must be"),
        ({"ratio": {"fc1*": 0.5}, "within": "model"}, "ratio must be a number"),
        ({"ratio": 0.5, "scores": "random"}, "scores must be"),
        ({"ratio": 0.5, "scores": "taylor"}, "gradients must be given"),
        ({"ratio": 0.5, "gradients": {}}, "gradients must be given"),
        ({"ratio": 0.5, "scores": "taylor", "gradients": []}, "at least one batch"),
        ({"ratio": 0.5, "scores": "taylor", "gradients": 3}, "gradients must be a dict"),
        ({"ratio": 0.5, "scores": "taylor", "gradients": [3]}, "gradients must be a dict"),
        ({"ratio": 0.5, "scores": "taylor", "gradients": {}}, "is missing"),
        ({"ratio": 0.5, "keep": ["conv3.weight"]}, "no weight or tensor 'conv3.weight'"),
        ({"ratio": 0.5, "keep": 3}, "keep must be a list"),
    ],
)
def test_wrong_arguments(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ortops.ArgumentError, match=said):
        surgery.prune(lenet.lenet(), **settings)


def test_models_that_are_refused() -> None:
    model = mlp.mlp((4, 16, 2))
    trainable = ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="Adam")
    with pytest.raises(ortops.ModelError, match="training_info"):
        surgery.prune(trainable, 0.5)
    with pytest.raises(ortops.ModelError, match="LoRA"):
        surgery.prune(ortops.lora.add(model, rank=2), 0.5)
    quantized = graph_model(
        [node("DequantizeLinear", "q s", "w"), node("MatMul", "x w", "y")],
        {"q": np.zeros((6, 3), np.int8), "s": np.float32(1)},
    )
    with pytest.raises(ortops.UnsupportedError, match="quantized"):
        surgery.prune(quantized, 0.5)
    function = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "own": 1]>
        g (float[n, 2] x) => (float[n, 2] y) { y = own.f (x) }
        <domain: "own", opset_import: ["": 17]> f (x) => (y) { y = Relu (x) }"""
    )
    with pytest.raises(ortops.UnsupportedError, match="function 'f'"):
        surgery.prune(function, 0.5)


# ------------------------------------------------------------------------------------------ taylor


def loss(model: onnx.ModelProto, samples: digits.Samples) -> float:
    """Returns the cross-entropy, computed by numpy in float64."""
    logits = run(model, {"images": samples.images})[0].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), samples.labels]
    return float(np.mean(np.log(np.exp(logits).sum(axis=1)) - chosen))


@pytest.mark.slow
def test_taylor_removes_what_changes_the_loss_least() -> None:
    """The oracle scales the weights that read a channel, and looks how the loss changes."""
    model = lenet.lenet(channels=(4, 6), hidden=8)
    train = digits.load().train
    samples = digits.Samples(train.images[:64], train.labels[:64])
    session = ortops.TrainingSession(
        ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="Adam")
    )
    gradients = session.gradients({"images": samples.images, "labels": samples.labels})
    pruned = arrays(surgery.prune(model, 0.5, scores="taylor", gradients=gradients))
    weights = arrays(model)
    changes = []
    for channel in range(4):
        ends = []
        for factor in (1.01, 0.99):
            changed = onnx.ModelProto()
            changed.CopyFrom(model)
            scaled = weights["conv2.weight"].copy()
            scaled[:, channel] *= factor
            new = numpy_helper.from_array(scaled, "conv2.weight")
            tensors(changed)["conv2.weight"].CopyFrom(new)
            ends.append(loss(changed, samples))
        changes.append(abs(ends[0] - ends[1]))
    kept = np.sort(np.argsort(changes)[2:])
    np.testing.assert_array_equal(pruned["conv1.weight"], weights["conv1.weight"][kept])
    parts = [gradients, gradients]
    again = surgery.prune(model, 0.5, scores="taylor", gradients=iter(parts))
    np.testing.assert_array_equal(arrays(again)["conv1.weight"], pruned["conv1.weight"])
    wrong = {name: np.full_like(array, np.nan) for name, array in gradients.items()}
    with pytest.raises(ortops.ArgumentError, match="not all finite"):
        surgery.prune(model, 0.5, scores="taylor", gradients=wrong)


@pytest.mark.slow
def test_a_pruned_model_trains() -> None:
    data = digits.load()
    feeds = {"images": data.train.images, "labels": data.train.labels}

    def trained(model: onnx.ModelProto, epochs: int) -> onnx.ModelProto:
        session = ortops.TrainingSession(
            ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="Adam")
        )
        session.fit(feeds, epochs=epochs, batch_size=32)
        return session.inference_model(original=model)

    def accuracy(model: onnx.ModelProto) -> float:
        logits = run(model, {"images": data.test.images})[0]
        return float(np.mean(logits.argmax(axis=1) == data.test.labels))

    whole = trained(lenet.lenet(), 6)
    pruned = surgery.prune(whole, 0.7)
    assert pruned.ByteSize() < 0.2 * whole.ByteSize()
    after = accuracy(trained(pruned, 8))
    assert accuracy(pruned) < after
    assert after > 0.9


# ---------------------------------------------------------------------------------------- exporters


def network() -> Any:
    """A small MobileNetV2 with a gate, two branches and a channel shuffle."""
    from torch import nn

    def block(inside: int, outside: int, stride: int) -> Any:
        wide = 4 * inside
        return nn.Sequential(
            nn.Conv2d(inside, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, outside, 1, bias=False),
            nn.BatchNorm2d(outside),
        )

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            stem = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.PReLU(8)]
            self.stem = nn.Sequential(*stem)
            self.blocks = nn.ModuleList([block(8, 8, 1), block(8, 12, 2), block(12, 12, 1)])
            self.drop = nn.Dropout(0.1)
            self.classifier = nn.Linear(12, 5)

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            x = x + self.blocks[0](x)
            x = self.blocks[1](x)
            x = x + self.blocks[2](x)
            return self.classifier(self.drop(x.mean((2, 3))))

    return Network().eval()


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["script", "script training", "dynamo", "dynamo raw"])
def test_exporters(kind: str) -> None:
    import torch

    torch.manual_seed(0)
    module, x = network(), torch.randn(2, 3, 32, 32)
    if kind.startswith("dynamo"):
        program = torch.onnx.export(
            module,
            (x,),
            dynamo=True,
            optimize=kind == "dynamo",
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            input_names=["x"],
            verbose=False,
        )
        assert program is not None
        model = program.model_proto
    else:
        file, mode = io.BytesIO(), torch.onnx.TrainingMode
        torch.onnx.export(
            module.train(kind == "script training"),
            (x,),
            file,
            dynamo=False,
            training=mode.TRAINING if kind == "script training" else mode.EVAL,
            do_constant_folding=kind == "script",
            input_names=["x"],
            dynamic_axes={"x": {0: "batch"}},
        )
        model = onnx.load_from_string(file.getvalue())
    groups = surgery.channel_groups(model)
    assert sum(group.prunable for group in groups) == 8 + 12 + 32 + 32 + 48, groups
    if kind == "script training":  # the oracle needs a function without random numbers
        for each in model.graph.node:
            if each.op_type == "Dropout":
                del each.input[2:]
    check(model, {"x": floats(2, 3, 32, 32)})
