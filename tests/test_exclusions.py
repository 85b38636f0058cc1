"""Patterns that begin with "!": what they leave out of trainable, groups and adapters' targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from test_lora_fused import fused, layers
from torch_exports import exported
from violations import all_violations

import ortops
from ortops import ModelError, Tape, TrainingSession, build_training_model, lora
from ortops.cli import main
from ortops.engine.check import check

F = np.float32
FEEDS = {"x": np.ones((2, 3), F), "targets": np.zeros((2, 3), F)}


def blocks(*more: str) -> onnx.ModelProto:
    """Three layers, the first and the last with one matrix, and a product with the identity."""
    with Tape() as tape:
        h = tape.input("x", F, ["N", 3])
        eye = tape.initializer("eye", np.eye(3, dtype=F))
        tied = tape.initializer("tied", np.arange(9, dtype=F).reshape(3, 3) / 7)
        for place in ("one", "two", "three", *more):
            own = tape.initializer(f"{place}.w", np.arange(9, 0, -1).reshape(3, 3).astype(F) / 9)
            h = h @ (tied if place in ("one", "three") else own)
            h = h + tape.initializer(f"{place}.bias", np.array([1, -1, 2], F) / 3)
        tape.output(h @ eye, "y")
    model = tape.model()
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    for node, place in zip(products, ("one", "two", "three", *more), strict=False):
        node.name = f"/{place}/MatMul"
    return model


def trained(model: onnx.ModelProto, trainable: Any, **settings: Any) -> set[str]:
    settings = {"loss": "MeanSquaredError", "optimizer": "SGD"} | settings
    built = build_training_model(model, trainable=trainable, **settings)
    return {binding.key for binding in built.training_info[0].update_binding} - {"step"}


BIASES = {"one.bias", "two.bias", "three.bias"}
ALL = BIASES | {"tied", "two.w"}


def test_what_is_left_to_train() -> None:
    with all_violations() as checked:
        for patterns, expected in (
            (["*", "!eye", "!*.bias"], ALL - BIASES),
            (["!*.bias", "!eye", "*"], ALL - BIASES),
            (["!*.bias"], ALL - BIASES),
            ("!*.bias", ALL - BIASES),
            (["eye", "!*.bias", "*"], ALL - BIASES | {"eye"}),
            (["!tied"], ALL - {"tied"}),
            (["!two"], ALL - {"two.w"}),  # by the scope of its reader
            (["!/two/*"], ALL - {"two.w"}),
            (["!one"], ALL - {"tied"}),  # by the scope of one of its readers
            (["two", "three.*", "!*.bias", "two.bias", "!three*"], None),
            (["!*.bias", "!*w", "!tied"], None),
        ):
            with checked(patterns):
                if expected is None:
                    with pytest.raises(ModelError, match="is left to train, because '"):
                        trained(blocks(), patterns)
                else:
                    assert trained(blocks(), patterns) == expected


def test_what_is_said_of_exclusions(caplog: pytest.LogCaptureFixture) -> None:
    trained(blocks(), ["!one"])
    (said,) = (m for m in caplog.messages if m.startswith("trainable"))
    assert said == (
        "trainable: '!one' excludes 'tied', which is also read by nodes elsewhere "
        "(1, such as 'three.MatMul')"
    )
    caplog.clear()
    trained(blocks(), ["!*.bias", "!tied"])  # what is excluded by name is expected
    assert not [m for m in caplog.messages if m.startswith("trainable")]
    report = check(blocks(), loss="MeanSquaredError", trainable=["!*.bias"])
    assert report.reasons["one.bias"] == "is excluded by '!*.bias'"


def test_exclusions_that_are_refused() -> None:
    with all_violations() as checked:
        for patterns, message in (
            (["*", "!ties"], "trainable: '!ties' excludes no initializer; did you mean 'tied'?"),
            (["!"], "trainable: '!' excludes no initializer; "),
            (
                ["one.bias", "!*.bias"],
                "nothing of 'one.bias' is left to train, because 'one.bias' is",
            ),
            (["!*"], "nothing of '\\*' is left to train"),
        ):
            with checked(patterns), pytest.raises(ModelError, match=message):
                trained(blocks(), patterns)
        for key, message in (
            ("!tie", "groups: '!tie' excludes no parameter that is trained; did you"),
            ("!*", "groups: '!\\*' excludes every parameter that is trained"),
        ):
            with checked(key), pytest.raises(ModelError, match=message):
                trained(blocks(), None, groups={key: {"learning_rate": 0.5}})
        for targets, message in (
            (["!fc"], "targets: '!fc' matches no weight of a MatMul"),
            (["qkv_proj", "!qkv_proj"], "nothing of 'qkv_proj' is left to adapt, because of !qkv"),
        ):
            with checked(targets), pytest.raises(ModelError, match=message):
                lora.add(fused(), targets=targets)


def test_a_name_that_begins_with_an_exclamation_mark() -> None:
    def renamed(old: str) -> onnx.ModelProto:
        model = blocks()
        for names in (n.input for n in model.graph.node):
            names[:] = ["!tied" if name == old else name for name in names]
        next(t for t in model.graph.initializer if t.name == old).name = "!tied"
        return model

    assert trained(renamed("tied"), ["!tied"]) == {"!tied"}
    assert trained(renamed("tied"), ["!!tied", "!*.bias"]) == {"two.w"}
    with pytest.raises(ModelError, match="'!tied' is a name, and would exclude the name 'tied'"):
        trained(renamed("two.w"), ["!tied"])
    assert trained(renamed("two.w"), ["?tied"]) == {"!tied"}
    assert "tied" not in trained(renamed("two.w"), ["!tie?"])


def test_groups_of_all_others() -> None:
    model = blocks()
    groups = {"!*.bias": {"learning_rate": 0.0}}
    session = TrainingSession(
        build_training_model(
            model, loss="MeanSquaredError", optimizer=ortops.optimizers.SGD(0.1), groups=groups
        )
    )
    before = session.parameters
    session.step(FEEDS)
    moved = {n for n, a in session.parameters.items() if not np.array_equal(a, before[n])}
    assert moved == BIASES


def test_targets_of_adapters() -> None:
    scope = "layers.0.attn."
    with all_violations() as checked:
        for targets, expected in (
            (["!q_proj"], {f"{scope}k_proj", f"{scope}v_proj"}),
            (["all-linear", "!q_proj", "!v_proj"], {f"{scope}k_proj"}),
            (["q_proj", "!layers.0.attn.k_proj", "v_proj"], {f"{scope}q_proj", f"{scope}v_proj"}),
        ):
            with checked(targets):
                assert layers(lora.add(fused(), targets=targets)) == expected


def test_other_weights_of_a_session() -> None:
    model = build_training_model(blocks(), loss="MeanSquaredError", optimizer="SGD")
    session = TrainingSession(model).with_trainable(["!*.bias"])
    assert set(session.parameters) == ALL - BIASES
    other = ortops.add_training(
        build_training_model(
            blocks(), loss="MeanSquaredError", optimizer="SGD", trainable=["!tied"]
        ),
        loss="MeanSquaredError",
        optimizer="SGD",
        name="second",
        trainable=["!*.bias", "!two.w"],
    )
    updated = [{b.key for b in info.update_binding} for info in other.training_info]
    assert updated[1] - {"second.step"} == {"tied"}


@pytest.mark.slow
def test_exclusions_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(blocks(), "model.onnx")
    np.savez("data.npz", **FEEDS)
    loss = ["--loss", "MeanSquaredError"]
    excluding = ["--trainable", "!*.bias", "--trainable", "*"]
    assert main(["check", "model.onnx", *loss, *excluding]) == 0
    assert "is excluded by '!*.bias'" in capsys.readouterr().out
    assert main(["build", "model.onnx", "built.onnx", *loss, *excluding]) == 0
    assert set(TrainingSession("built.onnx").parameters) == ALL - BIASES
    train = ["train", "model.onnx", "--data", "data.npz", *loss, "--save", "t.onnx", "--quiet"]
    assert main([*train, *excluding, "--epochs", "1"]) == 0
    assert main([*train, *excluding, "--epochs", "2", "--resume"]) == 0
    assert TrainingSession("t.onnx").steps_done == 2
    assert main([*train, "--trainable", "*", "--epochs", "3", "--resume"]) == 1
    assert "started with ['!*.bias', '*']" in capsys.readouterr().err
    adapt = ["lora", "add", "model.onnx", "adapted.onnx", "--targets"]
    assert main([*adapt, "!eye", "!two", "!three"]) == 0
    assert layers(onnx.load("adapted.onnx")) == {"one"}
    assert main([*adapt, "!six"]) == 1


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("dynamo", [False, True])
def test_exports_in_training_mode_train_what_torch_trains(dynamo: bool) -> None:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.trunk(x)))

    torch.manual_seed(0)
    net = Net()
    x, y = torch.randn(8, 2), torch.randn(8, 2)
    session = TrainingSession(
        build_training_model(
            exported(net, {"x": x}, dynamo=dynamo),
            loss="MeanSquaredError",
            optimizer=ortops.optimizers.SGD(0.1),
            trainable=["!trunk.*.bias", "!*trunk.0", "!head"],
        )
    )
    for name, parameter in net.named_parameters():
        kept = name.startswith("trunk.") and not name.startswith("trunk.0")
        parameter.requires_grad_(kept and not name.endswith("bias"))
    left = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(left, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        got = session.step({"x": x.numpy(), "targets": y.numpy()})["loss"]
        np.testing.assert_allclose(got, loss.item(), rtol=1e-5)
    assert sum(a.size for a in session.parameters.values()) == sum(p.numel() for p in left)
