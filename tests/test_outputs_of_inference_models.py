"""``inference_model(outputs=)`` and ``ortops export --outputs``: the part that tensors need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from running import run
from torch_exports import exported
from training_models import affine, affine_batch, normalizing
from violations import all_violations

import ortops
from ortops import ArgumentError, ModelError, TrainingSession, UnsupportedError, lora
from ortops.cli import main
from ortops.docs import examples

X = np.random.default_rng(3).normal(size=(5, 4)).astype(np.float32)


def two_headed() -> onnx.ModelProto:
    """A body in a function, and two heads of which one has a branch; opset 13."""
    rng = np.random.default_rng(4)
    weights = {"body.w": (4, 3), "head.w": (3, 2), "other.w": (3, 1), "scale": (1,)}
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 13, "own" : 1]>
        two (float[N, 4] x, bool flag, float[2] unread) => (float[N, 2] y, float[N, 1] z) {
            a = MatMul (x, body.w)
            embedding = own.soften (a)
            y = MatMul (embedding, head.w)
            b = own.other (embedding, other.w)
            z = If (flag) <
                then_branch = t () => (float[N, 1] p) { inside = Mul (b, scale) p = Neg (inside) },
                else_branch = e () => (float[N, 1] q) { q = Identity (b) }
            >
        }
        <domain: "own", opset_import: ["" : 13]>
        soften (v) => (w) { t = Tanh (v) w = Identity (t) }
        <domain: "own", opset_import: ["" : 13]>
        other (v, m) => (w) { w = MatMul (v, m) }
        """.replace("body.w", "body_w")
        .replace("head.w", "head_w")
        .replace("other.w", "other_w")
    )
    for name, shape in weights.items():
        array = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name.replace(".", "_")))
    onnx.checker.check_model(model)
    return model


FEEDS = {"x": X, "flag": np.array(True), "unread": np.zeros(2, np.float32)}


def trained(model: onnx.ModelProto, steps: int = 2, **settings: Any) -> TrainingSession:
    settings = {"loss": "MeanSquaredError", "optimizer": "SGD"} | settings
    session = TrainingSession(ortops.build_training_model(model, **settings))
    for _ in range(steps):
        session.step({**{n: FEEDS[n] for n in ("x", "flag")}, "targets": np.ones((5, 2), "f4")})
    return session


def parts(model: onnx.ModelProto) -> tuple[list[str], set[str], set[str]]:
    return (
        [each.name for each in model.graph.output],
        {each.name for each in model.graph.input},
        {each.name for each in model.graph.initializer},
    )


@pytest.mark.slow
def test_what_other_outputs_need_is_left_out(tmp_path: Path) -> None:
    model = two_headed()
    session = trained(model)
    file = tmp_path / "model.onnx"
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    external = {"save_as_external_data": True, "size_threshold": 0, "location": "weights"}
    onnx.save(whole, file, **external)
    full = run(session.inference_model(model), FEEDS)
    expected = dict(zip(("y", "z"), full, strict=True))
    (expected["embedding"],) = run(
        ortops.surgery.name_output(session.inference_model(), "embedding"), FEEDS
    )[2:]
    cases: dict[str, tuple[Any, set[str], set[str]]] = {
        "embedding": ("embedding", {"x"}, {"body_w"}),
        "y": (["y"], {"x"}, {"body_w", "head_w"}),
        "z": (["z"], {"x", "flag"}, {"body_w", "other_w", "scale"}),
        "two": (["embedding", "y", "y"], {"x"}, {"body_w", "head_w"}),
        "all": (["z", "y"], {"x", "flag"}, {"body_w", "head_w", "other_w", "scale"}),
    }
    with all_violations() as check:
        for how, original in {"own": None, "original": model, "external": file}.items():
            for case, (outputs, inputs, weights) in cases.items():
                with check(f"{how} {case}"):
                    found = session.inference_model(original, outputs=outputs)
                    names = [outputs] if isinstance(outputs, str) else [*dict.fromkeys(outputs)]
                    assert parts(found) == (names, inputs, weights)
                    onnx.checker.check_model(found, full_check=True)
                    got = run(found, {name: FEEDS[name] for name in inputs})
                    for name, array in zip(names, got, strict=True):
                        np.testing.assert_array_equal(array, expected[name])
                    if original is not None:
                        assert {e.domain: e.version for e in found.opset_import}[""] == 13
                        called = {node.op_type for node in found.graph.node}
                        assert {each.name for each in found.functions} == called & {
                            "soften",
                            "other",
                        }


def test_outputs_that_there_are_not() -> None:
    session = trained(two_headed())
    with all_violations() as check:
        for outputs, kind, message in (
            (["embeding"], ModelError, "has no tensor 'embeding'; did you mean 'embedding'?"),
            (["q_____"], ModelError, "has no tensor 'q_____'; known names: 'y', 'z', 'x'"),
            (["y", "inside"], UnsupportedError, "tensor 'inside' is inside its subgraph 't'"),
            (
                [],
                ArgumentError,
                r"outputs must be the name of a tensor or a list of names, got \[\]",
            ),
            ([3], ArgumentError, r"outputs must be the name .* got \[3\]"),
        ):
            with check(outputs), pytest.raises(kind, match=message):
                session.inference_model(outputs=outputs)  # type: ignore[arg-type]


def test_an_adapter_keeps_the_layers_that_are_left() -> None:
    adapted = lora.add(examples.mlp((4, 3, 2)), rank=2)
    session = TrainingSession(
        ortops.build_training_model(adapted, loss="MeanSquaredError", optimizer="SGD")
    )
    session.step({"images": X, "targets": np.ones((5, 2), np.float32)})
    merged = lora.merge(session.inference_model())
    hidden = merged.graph.node[-1].input[0]
    part = session.inference_model(outputs=[hidden])
    assert "fc2.lora_A.weight" not in parts(part)[2]
    (expected,) = run(ortops.surgery.name_output(merged, hidden), {"images": X})[1:]
    np.testing.assert_allclose(run(lora.merge(part), {"images": X})[0], expected, rtol=1e-6)
    first = session.inference_model(outputs=[adapted.graph.node[0].output[0]])
    plain = session.inference_model(outputs=["images"])
    assert not [e for e in plain.metadata_props if e.key == "ortops.lora"], first


def test_averages_and_layers_of_training() -> None:
    averaged = TrainingSession(
        ortops.build_training_model(
            affine(), loss="MeanSquaredError", optimizer="SGD", ema_decay=0.5
        )
    )
    averaged.step(affine_batch())
    product = averaged.inference_model(ema=True, outputs=[affine().graph.node[0].output[0]])
    (weight,) = product.graph.initializer
    np.testing.assert_array_equal(numpy_helper.to_array(weight), averaged.state["w.ema"])
    model = normalizing()
    session = TrainingSession(
        ortops.build_training_model(model, loss="SoftmaxCrossEntropy", optimizer="SGD")
    )
    (norm,) = (node for node in model.graph.node if node.op_type == "BatchNormalization")
    part = session.inference_model(model, outputs=norm.output[0])
    assert [len(n.output) for n in part.graph.node if n.op_type == "BatchNormalization"] == [1]


@pytest.mark.slow
def test_outputs_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(two_headed(), "model.onnx")
    session = trained(two_headed())
    session.save("trained.onnx")
    assert main(["export", "trained.onnx", "part.onnx", "--outputs", "embedding", "y"]) == 0
    part = session.inference_model(outputs=["embedding", "y"])
    assert onnx.load("part.onnx").SerializeToString() == part.SerializeToString()
    given = ["--original", "model.onnx", "--outputs", "embedding"]
    assert main(["export", "trained.onnx", "old.onnx", *given]) == 0
    assert parts(onnx.load("old.onnx")) == (["embedding"], {"x"}, {"body_w"})
    assert main(["export", "trained.onnx", "none.onnx", "--outputs", "embed"]) == 1
    assert "has no tensor 'embed'; did you mean 'embedding'?" in capsys.readouterr().err
    assert not Path("none.onnx").exists()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_the_encoder_of_an_export_is_that_of_torch(dynamo: bool) -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            embedding = torch.tanh(self.body(x))
            return self.head(embedding), embedding

    torch.manual_seed(0)
    net = Net()
    model = exported(net, {"x": torch.tensor(X)}, dynamo=dynamo, outputs=("y", "embedding"))
    session = TrainingSession(
        ortops.build_training_model(model, loss="MeanSquaredError", optimizer="SGD")
    )
    for original in (None, model):
        part = session.inference_model(original, outputs=["embedding"])
        assert not any("head" in name for name in parts(part)[2])
        with torch.no_grad():
            expected = net.eval()(torch.tensor(X))[1].numpy()
        np.testing.assert_allclose(run(part, {"x": X})[0], expected, rtol=1e-5, atol=1e-6)
