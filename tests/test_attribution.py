"""Attributions, compared with captum on the same networks in PyTorch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import ortops
from models import lenet
from ortops import Tape, attribution, op

RNG = np.random.default_rng(5)
IMAGES = RNG.normal(size=(3, 2, 9, 7)).astype(np.float32)
WEIGHTS = {
    "w1": RNG.normal(size=(4, 2, 3, 3)),
    "b1": RNG.normal(size=4),
    "w2": RNG.normal(size=(5, 4, 3, 3)),
    "w3": RNG.normal(size=(6, 5)),
}


def network(channels_last: bool = False) -> onnx.ModelProto:
    """Returns a convolutional classifier, if asked with the layout of TensorFlow's converter."""
    with Tape(name="network") as tape:
        w1, b1, w2, w3 = (tape.initializer(n, a.astype(np.float32)) for n, a in WEIGHTS.items())
        x = tape.input("x", np.float32, ["n", 9, 7, 2] if channels_last else ["n", 2, 9, 7])
        images = op.Transpose(x, perm=[0, 3, 1, 2]) if channels_last else x
        hidden = op.Tanh(op.Conv(images, w1, b1, pads=[1, 1, 1, 1]))
        pooled = op.AveragePool(hidden, kernel_shape=[2, 2], strides=[2, 2])
        maps = op.Conv(pooled, w2)
        features = op.ReduceMean(op.Relu(maps), [2, 3], keepdims=0)
        tape.output(features @ op.Transpose(w3, perm=[1, 0]), "scores")
    return tape.model()


def run(model: onnx.ModelProto, **feeds: Any) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    assert session.get_outputs()[-1].name == "attribution"
    return session.run(["attribution"], feeds)[0]


def scores(x: Any) -> Any:
    session = onnxruntime.InferenceSession(network().SerializeToString())
    return session.run(None, {"x": x})[0]


CLASSES = scores(IMAGES).argmax(axis=1)


@pytest.fixture(scope="module")
def twin() -> Any:
    """The network in PyTorch."""
    torch = pytest.importorskip("torch")

    class Network(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = torch.nn.Conv2d(2, 4, 3, padding=1)
            self.conv2 = torch.nn.Conv2d(4, 5, 3, bias=False)
            self.linear = torch.nn.Linear(5, 6, bias=False)
            values = {n: torch.tensor(a, dtype=torch.float32) for n, a in WEIGHTS.items()}
            with torch.no_grad():
                self.conv1.weight.copy_(values["w1"])
                self.conv1.bias.copy_(values["b1"])
                self.conv2.weight.copy_(values["w2"])
                self.linear.weight.copy_(values["w3"])

        def forward(self, x: Any) -> Any:
            hidden = torch.tanh(self.conv1(x))
            pooled = torch.nn.functional.avg_pool2d(hidden, 2)
            return self.linear(torch.relu(self.conv2(pooled)).mean((2, 3)))

    return Network().eval()


def forms(twin: Any) -> list[tuple[onnx.ModelProto, bool]]:
    """Returns the network as ortops writes it, with channels last, and as PyTorch exports it."""
    import torch

    file = io.BytesIO()
    axes = {"x": {0: "n"}}
    inputs = torch.tensor(IMAGES)
    torch.onnx.export(
        twin, (inputs,), file, input_names=["x"], dynamic_axes=axes, dynamo=False, opset_version=17
    )
    exported = onnx.load_from_string(file.getvalue())
    program = torch.onnx.export(
        twin, (inputs,), input_names=["x"], dynamic_shapes=({0: torch.export.Dim("n")},)
    )
    assert program is not None
    return [
        (network(), False),
        (network(channels_last=True), True),
        (exported, False),
        (program.model_proto, False),
    ]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("captum", "export")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_attributions_are_those_of_captum(twin: Any) -> None:
    import torch
    from captum import attr

    x, classes = torch.tensor(IMAGES, requires_grad=True), torch.tensor(CLASSES)
    fixed = torch.full((3,), 4)
    baseline = RNG.normal(size=IMAGES.shape).astype(np.float32)
    steepest = attr.Saliency(twin)
    integrated = attr.IntegratedGradients(twin)
    cam = attr.LayerGradCam(twin, twin.conv2)
    expected_maps = {}
    for name, chosen in (("argmax", classes), ("fixed", fixed)):
        maps = cam.attribute(x, target=chosen, relu_attributions=True)
        expected_maps[name] = (
            maps.detach().numpy(),
            (attr.LayerAttribution.interpolate(maps, (9, 7), "bilinear").detach().numpy()),
        )
    for model, channels_last in forms(twin):

        def moved(array: Any, back: bool = False, channels_last: bool = channels_last) -> Any:
            perm = ((0, 3, 1, 2) if back else (0, 2, 3, 1)) if channels_last else (0, 1, 2, 3)
            return np.ascontiguousarray(array.transpose(perm))

        images = moved(IMAGES)

        def close(found: Any, expected: Any, move: bool = True) -> bool:
            found = moved(found, back=True) if move else found
            expected = expected.detach().numpy() if hasattr(expected, "detach") else expected
            return np.allclose(found, expected, rtol=1e-4, atol=1e-6)

        assert close(run(attribution.saliency(model), x=images), steepest.attribute(x, classes))
        found = run(attribution.saliency(model, target=4, absolute=False), x=images)
        assert close(found, steepest.attribute(x, fixed, abs=False))
        found = run(
            attribution.saliency(model, target="input"), x=images, target=np.array([0, 1, 5])
        )
        assert close(found, steepest.attribute(x, torch.tensor([0, 1, 5])))

        found = run(attribution.integrated_gradients(model), x=images)
        assert close(found, integrated.attribute(x, target=classes))
        given = attribution.integrated_gradients(model, steps=7, baseline="input", target="input")
        found = run(given, x=images, target=CLASSES, baseline=moved(baseline))
        expected = integrated.attribute(x, torch.tensor(baseline), classes, n_steps=7)
        assert close(found, expected)
        found = run(attribution.integrated_gradients(model, baseline=0.5, target=4), x=images)
        assert close(found, integrated.attribute(x, 0.5, fixed))

        maps, upsampled = expected_maps["argmax"]
        assert close(run(attribution.grad_cam(model), x=images), upsampled, move=False)
        found = run(attribution.grad_cam(model, upsample=False), x=images)
        assert close(found, maps, move=False)
        found = run(attribution.grad_cam(model, target=4), x=images)
        assert close(found, expected_maps["fixed"][1], move=False)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("captum", "export")
def test_a_chosen_layer_is_that_of_captum(twin: Any) -> None:
    import torch
    from captum import attr

    model = network()
    nodes = {node.output[0]: node for node in model.graph.node}
    hidden = next(node for node in nodes.values() if node.op_type == "Tanh")
    conv = nodes[hidden.input[0]]
    cam = attr.LayerGradCam(twin, twin.conv1)
    expected = cam.attribute(torch.tensor(IMAGES), torch.tensor(CLASSES), relu_attributions=True)
    for layer in (conv.name, conv.output[0]):
        found = run(attribution.grad_cam(model, layer=layer), x=IMAGES)
        assert np.allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("captum", "export")
def test_the_mean_over_noise_is_that_of_captum(twin: Any) -> None:
    """Means of 2,000 noisy gradients agree within their standard errors."""
    import torch
    from captum import attr

    torch.manual_seed(0)
    x = torch.tensor(IMAGES[:1])
    spread = float(x.max() - x.min())
    tunnel = attr.NoiseTunnel(attr.Saliency(twin))
    expected = tunnel.attribute(
        x, nt_samples=2000, nt_samples_batch_size=500, stdevs=0.1 * spread, target=int(CLASSES[0])
    )
    model = attribution.smooth_grad(network(), samples=2000, noise=0.1, seed=3)
    found = run(model, x=IMAGES[:1])
    scale = np.abs(expected.detach().numpy()).max()
    assert np.abs(found - expected.detach().numpy()).max() < 0.05 * scale
    clean = run(attribution.saliency(network()), x=IMAGES[:1])
    assert np.abs(clean - expected.detach().numpy()).max() > 0.1 * scale
    assert np.array_equal(found, run(model, x=IMAGES[:1]))  # a new session with the same seed


def test_integrated_gradients_add_up_to_the_difference_of_scores() -> None:
    model = attribution.integrated_gradients(network(), steps=200, baseline=IMAGES[0] / 2, target=2)
    found = run(model, x=IMAGES).sum(axis=(1, 2, 3))
    start = np.broadcast_to(IMAGES[0] / 2, IMAGES.shape)
    assert np.allclose(found, scores(IMAGES)[:, 2] - scores(start.copy())[:, 2], rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.quick(2)
@pytest.mark.parametrize("opset", [21, 22, 24])
@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
def test_noise_is_normally_distributed(opset: int, dtype: str) -> None:
    """From opset 22 on, onnxruntime has no kernel of RandomNormalLike."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": {opset}]>
        squares ({dtype}[n, 5000] x) => ({dtype}[n] y) {{
            s = Mul (x, x)
            axes = Constant <value = int64[1] {{1}}> ()
            y = ReduceSum <keepdims = 0> (s, axes)
        }}""")
    made = attribution.smooth_grad(model, samples=1, noise=0.25, absolute=False, seed=3)
    numbers = {"float": np.float32, "double": np.float64, "float16": np.float16}
    x = np.stack([np.linspace(0, 4, 5000), np.linspace(0, 8, 5000)]).astype(numbers[dtype])
    sessions = [onnxruntime.InferenceSession(made.SerializeToString()) for _ in range(2)]
    first, second, again = (
        session.run(["attribution"], {"x": x})[0] for session in (sessions[0], *sessions)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, second)
    drawn = (first.astype(np.float64) / 2 - x) / [[1], [2]]
    for noise in drawn:
        assert abs(noise.mean()) < 0.06
        assert abs(noise.std() - 1) < 0.05
        assert abs((noise**4).mean() - 3) < 0.6
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.06


@pytest.mark.slow
def test_noise_without_samples_of_it_is_saliency() -> None:
    found = run(attribution.smooth_grad(network(), samples=3, noise=0), x=IMAGES)
    expected = run(attribution.saliency(network()), x=IMAGES)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_attributed_models_keep_their_outputs_and_only_have_standard_operators() -> None:
    for make in (
        attribution.saliency,
        attribution.integrated_gradients,
        attribution.smooth_grad,
        attribution.grad_cam,
    ):
        model = make(lenet.lenet())
        onnx.checker.check_model(model, full_check=True)
        assert [value.name for value in model.graph.output] == ["logits", "attribution"]
        assert not any(node.domain for node in model.graph.node)
        images = RNG.normal(size=(2, 1, 8, 8)).astype(np.float32)
        plain = onnxruntime.InferenceSession(lenet.lenet().SerializeToString())
        session = onnxruntime.InferenceSession(model.SerializeToString())
        logits, found = session.run(None, {"images": images})
        assert np.allclose(logits, plain.run(None, {"images": images})[0], rtol=1e-5, atol=1e-6)
        assert found.shape == (2, 1, 8, 8)


def test_a_regression_has_no_classes() -> None:
    with Tape(name="regression") as tape:
        x = tape.input("x", np.float32, ["n", 3])
        tape.output((x * x).sum(1), "y")
    model = tape.model()
    given = np.float32([[1, -2, 3], [0, 1, 0]])
    assert np.allclose(run(attribution.saliency(model), x=given), 2 * np.abs(given))
    assert np.allclose(run(attribution.integrated_gradients(model), x=given), given**2, rtol=1e-5)
    with pytest.raises(ortops.ArgumentError, match=r"target must be None for .*no classes"):
        attribution.saliency(model, target=0)
    with pytest.raises(ortops.ModelError, match="the model has no convolution; pass the name"):
        attribution.grad_cam(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 6}, "target must be an integer >= 0 and <= 5, got 6; or pass None or 'input'"),
        ({"target": "cat"}, "target must be an integer .*, got 'cat'"),
        ({"target": True}, "target must be an integer .*, got True"),
        ({"input": "z"}, "input: the main graph has no tensor 'z'"),
        ({"output": "z"}, "output: the main graph has no tensor 'z'"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ortops.ArgumentError, ortops.ModelError), match=message):
        attribution.saliency(network(), **arguments)


def test_errors_of_single_functions() -> None:
    with pytest.raises(ortops.ArgumentError, match="steps must be an integer >= 1, got 0"):
        attribution.integrated_gradients(network(), steps=0)
    with pytest.raises(ortops.ArgumentError, match=r"the shape \[3\], which cannot be broadcast"):
        attribution.integrated_gradients(network(), baseline=[1, 2, 3])
    with pytest.raises(ortops.ArgumentError, match="baseline must be a number, an array or"):
        attribution.integrated_gradients(network(), baseline="zeros")
    with pytest.raises(ortops.ArgumentError, match="samples must be an integer >= 1, got 0"):
        attribution.smooth_grad(network(), samples=0)
    with pytest.raises(ortops.ArgumentError, match="noise must be a finite number >= 0, got -1"):
        attribution.smooth_grad(network(), noise=-1)
    with pytest.raises(ortops.ModelError, match="no node or tensor 'conv9'"):
        attribution.grad_cam(network(), layer="conv9")
    with pytest.raises(
        ortops.ModelError, match=r"'scores' must be a floating-point tensor \[batch"
    ):
        attribution.grad_cam(network(), layer="scores")


FOLDER = Path(__file__).parents[1] / ".models"
TEXT_DIRECTION = FOLDER / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"


@pytest.mark.slow
@pytest.mark.fetched(TEXT_DIRECTION)
def test_a_served_classifier_is_explained() -> None:
    """A file that PaddlePaddle wrote: gradients as finite differences, and sums of attributions."""
    x = RNG.uniform(-1, 1, size=(2, 3, 48, 192)).astype(np.float32)
    f = ortops.Function(TEXT_DIRECTION)
    (name,), scores = f.inputs, f(x)
    slopes = run(attribution.saliency(TEXT_DIRECTION, target=0, absolute=False), **{name: x})
    direction = (slopes / np.abs(slopes).max(axis=(1, 2, 3), keepdims=True)).astype(np.float32)
    step = np.float32(1e-3)
    change = (f(x + step * direction) - f(x - step * direction))[:, 0] / (2 * step)
    assert np.allclose(change, (slopes * direction).sum(axis=(1, 2, 3)), rtol=0.02)
    start = np.float32(0.9) * x  # near, as the path to zeros has many kinks
    model = attribution.integrated_gradients(TEXT_DIRECTION, steps=20, baseline="input", target=0)
    found = run(model, **{name: x, "baseline": start}).sum(axis=(1, 2, 3))
    assert np.allclose(found, (scores - f(start))[:, 0], atol=1e-3)
    maps = run(attribution.grad_cam(TEXT_DIRECTION, target=0), **{name: x})
    assert maps.shape == (2, 1, 48, 192)
    assert maps.min() >= 0


# ------------------------------------------------------------------------------- several inputs

PRODUCT = """<ir_version: 10, opset_import: ["": 21]> g (float[n,3] a, double[n,3] b, float[n,3] c)
=> (float[n,3] y) { w = Cast<to=1>(b) s = Mul(w, w) p = Mul(a, s) y = Mul(p, c) }"""


def test_several_inputs_move_on_one_path() -> None:
    """Of a · b² · c, a has a third and b two thirds while c stays, else quarters and a half."""
    model = onnx.parser.parse_model(PRODUCT)
    draw = np.random.default_rng(0)
    a, c = draw.standard_normal((2, 4, 3), np.float32)
    b = draw.standard_normal((4, 3))
    chosen = np.zeros((4, 3))
    chosen[np.arange(4), (a * b**2 * c).argmax(1)] = 1
    whole = chosen * a * b**2 * c
    feeds = {"a": a, "b": b, "c": c}

    def check(explained: onnx.ModelProto, expected: dict[str, Any], **more: Any) -> None:
        names = [value.name for value in explained.graph.output[1:]]
        assert names == list(expected)
        session = onnxruntime.InferenceSession(explained.SerializeToString())
        for name, found in zip(names, session.run(names, feeds | more), strict=True):
            assert name != "attribution_b" or found.dtype == np.float64
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-6)

    of = attribution.integrated_gradients
    check(of(model, input=["a", "b"]), {"attribution_a": whole / 3, "attribution_b": whole * 2 / 3})
    quarters = {"attribution_a": whole / 4, "attribution_b": whole / 2, "attribution_c": whole / 4}
    check(of(model, input=["a", "b", "c"]), quarters)
    check(of(model, input=["b"]), {"attribution": whole})
    check(of(model, input="a", target="input"), {"attribution": whole}, target=chosen.argmax(1))
    # a moves from 1: the integral of (1 + t d) 2 t b and that of t² b², times the differences.
    parts = {"attribution_a": chosen * (a - 1) * b**2 * c / 3}
    parts["attribution_b"] = chosen * (1 + 2 * (a - 1) / 3) * b**2 * c
    check(of(model, input=["a", "b"], baseline={"a": 1.0}), parts)
    ones = np.ones((4, 3), np.float32)
    check(of(model, input=["a", "b"], baseline={"a": "input"}), parts, baseline_a=ones)
    slopes = {"attribution_a": np.abs(chosen * b**2 * c)}
    slopes["attribution_b"] = np.abs(2 * chosen * a * b * c)
    check(attribution.saliency(model, input=["a", "b"]), slopes)
    check(attribution.smooth_grad(model, input=["a", "b"], noise=0.0, samples=3), slopes)


def test_wrong_lists_of_inputs() -> None:
    model = onnx.parser.parse_model(PRODUCT)
    for given, message in (([], "input is empty"), (["a", "a"], "input: 'a' is listed twice")):
        with pytest.raises(ortops.ArgumentError, match=message):
            attribution.integrated_gradients(model, input=given)
    with pytest.raises(ortops.ArgumentError, match="baseline: 'c' is no input to explain; "):
        attribution.integrated_gradients(model, input=["a", "b"], baseline={"c": 1.0})
    with pytest.raises(ortops.ArgumentError, match="input must be"):
        attribution.grad_cam(network(), input=["x"])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # the exporters warn about themselves
@pytest.mark.parametrize("dynamo", [False, True])
def test_several_inputs_of_exported_files(dynamo: bool) -> None:
    """Captum's formula for a tuple of inputs, by PyTorch's autograd in float64."""
    import torch

    class Two(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 5), torch.nn.Linear(3, 5)

        def forward(self, a: Any, b: Any) -> Any:
            return torch.tanh(self.a(a)) * torch.sigmoid(self.b(b))

    torch.manual_seed(0)
    twin, inputs = Two(), (torch.randn(6, 4), torch.randn(6, 3))
    names: dict[str, Any] = {"input_names": ["a", "b"], "output_names": ["y"], "dynamo": dynamo}
    file = io.BytesIO()
    program = torch.onnx.export(twin, inputs, *[file] * (not dynamo), **names)
    model = program.model_proto if dynamo else onnx.load_from_string(file.getvalue())
    explained = attribution.integrated_gradients(model, input=["a", "b"], target=2, baseline=0.5)
    session = onnxruntime.InferenceSession(explained.SerializeToString())
    feeds = dict(zip("ab", (each.numpy() for each in inputs), strict=True))
    found = session.run(["attribution_a", "attribution_b"], feeds)
    twin, wide = twin.double(), [each.double() for each in inputs]
    nodes, weights = np.polynomial.legendre.leggauss(200)
    expected = [torch.zeros_like(each) for each in wide]
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        points = [(0.5 + node * (each - 0.5)).requires_grad_() for each in wide]
        slopes = torch.autograd.grad(twin(*points)[:, 2].sum(), points)
        for total, slope, each in zip(expected, slopes, wide, strict=True):
            total += weight * slope * (each - 0.5)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-4, atol=1e-5)
