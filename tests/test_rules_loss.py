"""Rules of softmax and the classification losses against differences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from checked import Checked, by_case, quick
from dot_test import DOMAIN, Case, check, normal, uniform
from onnx import helper
from running import run

import ortops

CHECKED = [Checked("Hardmax", 1, [0])]
LOSSES = ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"]


def labels(classes: int, *shape: int, dtype: type = np.int64, ignored: int | None = None):
    """Returns random class numbers; every third one is the ignored one, if there is one."""
    numbers = np.random.default_rng(20).integers(0, classes, shape).astype(dtype)
    if ignored is not None:
        numbers.reshape(-1)[::3] = ignored
    return numbers


def loss_cases() -> list[Case]:
    cases = []
    for op, reduction, weighted, ignored, dims in itertools.product(
        LOSSES, ["none", "mean", "sum"], [False, True], [None, -1, 2], [(), (2, 3)]
    ):
        inputs = [
            normal(5, 3, *dims),
            labels(3, 5, *dims, ignored=ignored, dtype=np.int32 if ignored == 2 else np.int64),
            *([uniform(0.5, 2, 3, seed=1)] if weighted else []),
        ]
        attributes = {"reduction": reduction}
        if ignored is not None:
            attributes["ignore_index"] = ignored
        name = f"{reduction}-{ignored}" + "-weighted" * weighted
        outputs = 2 if op == "SoftmaxCrossEntropyLoss" and dims else 1
        cases.append(Case(op, inputs, attributes, outputs=outputs, orders=2, name=name))
    return cases


CASES = [
    Case("Softmax", [normal(3, 4)], orders=3),
    Case("Softmax", [normal(2, 3, 4)], {"axis": 1}, orders=2),
    Case("LogSoftmax", [normal(3, 4)], orders=3),
    Case("LogSoftmax", [normal(2, 3, 4)], {"axis": 0}, orders=2),
    *loss_cases(),
]
CASES = quick(
    CASES,
    """
    Softmax-3x4
    LogSoftmax-3x4
    SoftmaxCrossEntropyLoss-none--1-weighted-5x3x2x3_5x2x3_3
    NegativeLogLikelihoodLoss-mean--1-weighted-5x3x2x3_5x2x3_3
    NegativeLogLikelihoodLoss-mean-None-5x3x2x3_5x2x3
    """,
)


@pytest.mark.nightly
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


def gradient(
    op: str, inputs: list[np.ndarray], attributes: dict[str, object], *, y: str = "y0"
) -> list[np.ndarray]:
    """Returns an operator's outputs and the gradient of one with respect to the first input."""
    names = [f"x{index}" for index in range(len(inputs))]
    count = 2 if op == "SoftmaxCrossEntropyLoss" else 1
    outputs = [f"y{index}" for index in range(count)]
    graph = helper.make_graph(
        [
            helper.make_node(op, names, outputs, **attributes),
            helper.make_node("Gradient", ["x0"], ["dx"], domain=DOMAIN, xs=["x0"], y=y),
        ],
        "case",
        [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            for name, array in zip(names, inputs, strict=True)
        ],
        [helper.make_empty_tensor_value_info(name) for name in [*outputs, "dx"]],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = ortops.lower(helper.make_model(graph, opset_imports=imports, ir_version=10))
    return run(model, dict(zip(names, inputs, strict=True)))


def test_hardmax_passes_nothing() -> None:
    _, dx = gradient("Hardmax", [normal(2, 3).astype(np.float32)], {})
    np.testing.assert_array_equal(dx, np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_flows_where_all_samples_are_ignored(op: str, weighted: bool) -> None:
    inputs = [normal(4, 3), np.full(4, -100), *([np.ones(3)] if weighted else [])]
    loss, *_, dx = gradient(op, inputs, {"ignore_index": -100})
    assert np.isnan(loss)
    np.testing.assert_array_equal(dx, np.zeros((4, 3)))


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("label", [3, 10**9, -4, -(10**12)])
def test_label_out_of_range_is_an_error_and_no_crash(op: str, label: int) -> None:
    with pytest.raises(Exception, match=r"GatherElements|out of (range|bounds)"):
        gradient(op, [normal(2, 3), np.array([0, label])], {})


def test_large_scores_do_not_overflow() -> None:
    scores = np.array([[1e4, 0.0, -1e4], [-1e4, 0.0, 1e4]], np.float32)
    _, _, dx = gradient("SoftmaxCrossEntropyLoss", [scores, np.array([1, 2])], {})
    np.testing.assert_array_equal(dx, np.array([[0.5, -0.5, 0], [0, 0, 0]], np.float32))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("op", LOSSES)
def test_narrow_types_agree_with_float64(op: str, dtype: type) -> None:
    inputs = [normal(4, 3), labels(3, 4, ignored=-1), uniform(0.5, 2, 3)]
    *_, expected = gradient(op, inputs, {"ignore_index": -1})
    narrow = [a.astype(dtype) if a.dtype.kind == "f" else a for a in inputs]
    *_, found = gradient(op, narrow, {"ignore_index": -1})
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, atol=8 * np.finfo(dtype).eps)


@pytest.mark.parametrize("ignored", [None, -1])
@pytest.mark.parametrize("weighted", [False, True])
def test_float16_counts_beyond_its_largest_number(ignored: int | None, weighted: bool) -> None:
    count = 100_000
    inputs = [np.zeros((count, 2), np.float16), np.zeros(count, np.int64)]
    inputs += [np.ones(2, np.float16)] if weighted else []
    attributes = {} if ignored is None else {"ignore_index": ignored}
    *_, dx = gradient("NegativeLogLikelihoodLoss", inputs, attributes)
    np.testing.assert_allclose(dx[:, 0], np.full(count, -1 / count), rtol=0.01)


def test_gradient_of_the_log_probabilities_alone() -> None:
    scores = np.array([[0.0, 0.0, 0.0, 0.0], [0.0, np.log(2), -1e3, 0.0]])
    _, _, dx = gradient("SoftmaxCrossEntropyLoss", [scores, np.array([0, 1])], {}, y="y1")
    # 1 − 4·softmax
    np.testing.assert_allclose(dx, [[0, 0, 0, 0], [0, -1, 1, 0]], atol=1e-12)


def test_empty_batch() -> None:
    inputs = [np.zeros((0, 3), np.float32), np.zeros(0, np.int64)]
    loss, dx = gradient("NegativeLogLikelihoodLoss", inputs, {"reduction": "sum"})
    assert loss == 0
    assert dx.shape == (0, 3)


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [None, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_agrees_with_torch(
    reduction: str, ignored: int | None, weighted: bool
) -> None:
    import torch

    scores, classes = normal(6, 4, 3), labels(4, 6, 3, ignored=ignored)
    weights = uniform(0.5, 2, 4)
    x = torch.tensor(scores, requires_grad=True)
    expected = torch.nn.functional.cross_entropy(
        x,
        torch.tensor(classes),
        weight=torch.tensor(weights) if weighted else None,
        ignore_index=-100 if ignored is None else ignored,
        reduction=reduction,
    )
    expected.sum().backward()
    attributes = {"reduction": reduction} | ({} if ignored is None else {"ignore_index": ignored})
    inputs = [scores, classes, *([weights] if weighted else [])]
    loss, _, dx = gradient("SoftmaxCrossEntropyLoss", inputs, attributes)
    np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-12, atol=1e-15)
