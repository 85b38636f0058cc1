"""One computation gives one training graph, whichever of PyTorch's exporters wrote the file."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from ortops import TrainingSession, build_training_model
from ortops.execution.settings import Settings
from ortops.optimizers import SGD
from tests.spies import Spy

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
            self.down, self.bottom, self.up = double(3, 8), double(8, 16), double(16, 8)
            self.pool, self.wide = nn.MaxPool2d(2), nn.ConvTranspose2d(16, 8, 2, 2)
            self.head = nn.Conv2d(8, 6, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skipped = self.down(x)
            y = self.wide(self.bottom(self.pool(skipped)))
            return self.head(self.up(torch.cat([y, skipped], 1)))

    return Net(), (2, 3, 8, 8)


def encoder() -> tuple[Any, Any]:
    from torch import nn

    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(80, 6)), (2, 5, 16)


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


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.usefixtures("_quiet_exporters")
@pytest.mark.parametrize("make", [residual, mobile, u_shaped, encoder])
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
