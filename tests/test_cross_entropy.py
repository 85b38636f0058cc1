"""Losses taken apart for the graph of a step: the numbers of the formula, and what stays whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from running import run

from ortops import Tape, op
from ortops.graph.files.serialization import to_proto
from ortops.graph.passes.cross_entropy import CROSS_ENTROPY
from tests.spies import finish

LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


def expanded(
    kind: str, shape: Sequence[Any], dtype: Any = np.int64, outputs: int = 1, **attributes: Any
) -> ir.Model:
    with Tape(name="loss") as tape:
        scores = tape.input("scores", np.float32, shape)
        labels = tape.input("labels", dtype, [shape[0], *shape[2:]])
        results = tape.emit(kind, [scores, labels], attributes, outputs=outputs)
        for number, result in enumerate(results):
            tape.output(result, f"y{number}")
    return finish(ir.from_proto(tape.model()), CROSS_ENTROPY)


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph if node.op_type != "Constant")


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none", None])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(4, 3), ("batch", 3), (4, 3, 2, 5)])
def test_values(kind: str, reduction: str | None, dtype: Any, shape: tuple[Any, ...]) -> None:
    model = expanded(kind, shape, dtype, reduction=reduction)
    assert not operators(model).keys() & set(LOSSES)
    rng = np.random.default_rng(0)
    known = (4, *shape[1:])
    scores = rng.standard_normal(known).astype(np.float32)
    labels = rng.integers(0, 3, (4, *known[2:])).astype(dtype)
    (loss,) = run(to_proto(model), {"scores": scores, "labels": labels})

    wide = scores.astype(np.float64)
    if kind == "SoftmaxCrossEntropyLoss":
        wide = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    each = np.empty(labels.shape)
    for n, *rest in np.ndindex(labels.shape):
        each[n, *rest] = -wide[n, labels[n, *rest], *rest]
    expected = {"none": each, "sum": each.sum()}.get(reduction or "mean", each.mean())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_log_probabilities_are_put_out() -> None:
    model = expanded("SoftmaxCrossEntropyLoss", (4, 3), outputs=2)
    assert operators(model)["LogSoftmax"] == 1
    scores = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    _, log_probabilities = run(to_proto(model), {"scores": scores, "labels": np.zeros(4, np.int64)})
    expected = scores - np.log(np.exp(scores.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_probabilities, expected, rtol=1e-5, atol=1e-6)


def test_a_certain_class_that_is_no_label() -> None:
    model = expanded("SoftmaxCrossEntropyLoss", (1, 2))
    scores = np.array([[0, -np.inf]], np.float32)
    assert run(to_proto(model), {"scores": scores, "labels": np.array([0])}) == [0]


@pytest.mark.parametrize("kind", LOSSES)
def test_weights_and_ignored_labels_stay_in_one_node(kind: str) -> None:
    """Only the LogSoftmax is written apart: in onnxruntime's expansion it fails for 0 rows."""
    softmax = {"LogSoftmax": 1} if kind == "SoftmaxCrossEntropyLoss" else {}
    left = {"NegativeLogLikelihoodLoss": 1, **softmax}
    assert operators(expanded(kind, (4, 3), ignore_index=-1)) == left
    with Tape(name="weighted") as tape:
        scores = tape.input("scores", np.float32, [4, 3])
        labels = tape.input("labels", np.int64, [4])
        tape.output(getattr(op, kind)(scores, labels, np.ones(3, np.float32)), "loss")
    model = finish(ir.from_proto(tape.model()), CROSS_ENTROPY)
    assert operators(model) == left


def test_a_label_out_of_range_fails() -> None:
    model = expanded("SoftmaxCrossEntropyLoss", (1, 2))
    with pytest.raises(Exception, match="GatherElements"):
        run(to_proto(model), {"scores": np.zeros((1, 2), np.float32), "labels": np.array([2])})
