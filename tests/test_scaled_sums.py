"""Sums with a scaled summand as single nodes of onnxruntime's convolution kernels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from internals import packed_of
from training_models import classifier, labelled

import ortops
from ortops import TrainingSession
from ortops.engine.execution import update_groups
from ortops.engine.execution.settings import PackedUpdate, Settings
from ortops.graph.passes import scaled_sums
from ortops.graph.passes.blocked.kernels import block_size
from ortops.optimizers import SGD, Adagrad, Adam, AdamW, Momentum


@pytest.fixture(params=["Conv", "GatedAdd"], autouse=True)
def kernel(request: pytest.FixtureRequest) -> str:
    """The kernel that makes the sums: that of the blocked layout, and the one beside it."""
    if request.param == "Conv" and block_size() is None:
        pytest.skip("onnxruntime has no blocked convolution kernels here")
    if request.param == "GatedAdd":
        request.getfixturevalue("without_blocks")
        if not scaled_sums.has_kernel():
            pytest.skip("onnxruntime has no GatedAdd before version 1.31")
    return str(request.param)


def session_of(optimizer: Any, *, scaled_sums: bool = True) -> TrainingSession:
    model = ortops.build_training_model(
        classifier(hidden=64), loss="SoftmaxCrossEntropy", optimizer=optimizer
    )
    return TrainingSession(model, settings=Settings(joined=-1, scaled_sums=scaled_sums))


def update_of(session: TrainingSession) -> PackedUpdate:
    (update,) = session.report().packed
    return update


@pytest.mark.parametrize(
    ("optimizer", "sums", "others"),
    [
        (SGD(), 1, ""),
        (Momentum(), 1, "Mul Add"),  # alpha · V is added to, in V's memory
        (Momentum(mode="nesterov"), 2, "Mul Add"),
        (Adagrad(), 1, "Mul Add Sqrt Add Div"),
        (Adam(), 3, "Sub Mul Sub Sqrt Add Div"),
        (AdamW(), 3, "Mul Sub Mul Sub Sqrt Add Div"),
        (Adam(alpha=0.3), 3, "Mul Mul Sub Sqrt Add Div"),  # decays quickly
    ],
    ids=str,
)
def test_which_sums(optimizer: Any, sums: int, others: str) -> None:
    session = session_of(optimizer)
    update = update_of(session)
    nodes = dict(update.operators)
    assert nodes.pop("ScaledSum") == sums
    assert nodes == Counter(others.split())
    names = {name for role in update.variables for name in role}
    assert names <= set(session.report().in_place)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "optimizer",
    [SGD(), Momentum(), Adagrad(), Adam(), AdamW(), AdamW(epsilon_after_correction=True)],
    ids=str,
)
def test_steps_are_those_of_standard_operators(optimizer: Any) -> None:
    fused, plain = session_of(optimizer), session_of(optimizer, scaled_sums=False)
    assert "ScaledSum" in update_of(fused).operators
    assert "ScaledSum" not in update_of(plain).operators
    for seed in range(5):
        batch = labelled((6,), seed=seed)
        assert fused.step(batch)["loss"] == pytest.approx(plain.step(batch)["loss"], rel=1e-5)
    for name, array in plain.state.items():
        np.testing.assert_allclose(fused.state[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_sum_is_not_written_over_what_it_scales() -> None:
    (packed,) = packed_of(session_of(Adam()))
    formula = packed.group.formula
    total = next(node for node in formula if node.op_type == "ScaledSum")
    scaled, _, added = total.inputs
    assert scaled is not None
    assert added is not None
    assert update_groups.is_safe_in_place(added, total.outputs[0])
    assert not update_groups.is_safe_in_place(scaled, total.outputs[0])


def test_which_kernel(kernel: str) -> None:
    (packed,) = packed_of(session_of(SGD()))
    assert packed.model(1).graph.num_nodes() <= 3  # with the gate
    assert kernel in [node.op_type for node in packed.model(1).graph]


@pytest.mark.parametrize("kernel", ["GatedAdd"], indirect=True)
def test_a_gated_sum_is_that_of_standard_operators(kernel: str) -> None:
    """Bit for bit: no product is left unrounded, as the convolution's are."""
    fused, plain = session_of(SGD()), session_of(SGD(), scaled_sums=False)
    for seed in range(5):
        batch = labelled((6,), seed=seed)
        fused.step(batch)
        plain.step(batch)
    for name, array in plain.state.items():
        np.testing.assert_array_equal(fused.state[name], array, err_msg=name)


def test_without_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime before 1.31 on a machine without blocks."""
    monkeypatch.setattr(scaled_sums, "has_kernel", lambda: False)
    assert "ScaledSum" not in update_of(session_of(SGD())).operators
