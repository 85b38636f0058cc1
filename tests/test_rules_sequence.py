"""Sequences and optionals against differences of what onnxruntime computes in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checked import Checked
from domain_models import value
from onnx import TensorProto, helper
from test_rules_control_flow import ORDERS, arrays, check, subgraph

import ortops

D = TensorProto.DOUBLE
N = helper.make_node
CONSTRUCT = N("SequenceConstruct", ["a", "b", "c"], ["s"])
SHAPES = {"a": (2, 3), "b": (2, 3), "c": (2, 3)}
CHECKED = [
    Checked("ConcatFromSequence", ORDERS, [0]),
    Checked("Optional", ORDERS, [0]),
    Checked("OptionalGetElement", ORDERS, [0]),
    Checked("SequenceAt", ORDERS, [0]),
    Checked("SequenceConstruct", ORDERS, [0]),
    Checked("SequenceErase", ORDERS, [0]),
    Checked("SequenceInsert", ORDERS, [0, 1]),
    Checked("SequenceMap", ORDERS, [0, 1]),
    Checked("SplitToSequence", ORDERS, [0]),
]


def constant(name: str, number: int) -> onnx.NodeProto:
    return N("Constant", [], [name], value=onnx.numpy_helper.from_array(np.array(number)))


def squared(name: str) -> list[onnx.NodeProto]:
    return [N("Mul", [name, name], ["square"]), N("Sin", ["square"], ["y"])]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2, -1, -3])
def test_at(position: int, symbolic: bool) -> None:
    nodes = [CONSTRUCT, constant("p", position), N("SequenceAt", ["s", "p"], ["e"]), *squared("e")]
    check(nodes, arrays(**SHAPES), ["a", "b", "c"], symbolic=symbolic)


def test_at_a_position_that_is_fed() -> None:
    nodes = [CONSTRUCT, N("SequenceAt", ["s", "p"], ["e"]), *squared("e")]
    for position in (1, -1):
        check(nodes, {**arrays(**SHAPES), "p": np.array(position)}, ["a", "b", "c"])


def test_at_several_places_of_one_sequence() -> None:
    nodes = [
        CONSTRUCT,
        constant("p", 0),
        constant("q", 2),
        N("SequenceAt", ["s", "p"], ["e"]),
        N("SequenceAt", ["s", "q"], ["f"]),
        N("ConcatFromSequence", ["s"], ["k"], axis=0, new_axis=1),
        N("ReduceProd", ["k"], ["r"], keepdims=0),
        N("Mul", ["e", "f"], ["m"]),
        N("Mul", ["m", "r"], ["n"]),
        *squared("n"),
    ]
    check(nodes, arrays(**SHAPES), ["a", "b", "c"])


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("position", [None, 0, 2, 3, -1, -3])
def test_insert_and_erase(position: int | None, symbolic: bool) -> None:
    given = [] if position is None else ["p"]
    nodes = [
        CONSTRUCT,
        *([] if position is None else [constant("p", position)]),
        N("SequenceInsert", ["s", "d", *given], ["t"]),
        *([] if position in (None, 3) else [N("SequenceErase", ["t", "p"], ["u"])]),
        *([N("SequenceErase", ["t"], ["u"])] if position in (None, 3) else []),
        N("ConcatFromSequence", ["u"], ["k"], axis=1),
        *squared("k"),
    ]
    feeds = arrays(**SHAPES, d=(2, 3))
    check(nodes, feeds, ["a", "b", "c", "d"], symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(("axis", "new_axis"), [(0, 0), (1, 0), (-1, 0), (0, 1), (2, 1), (-1, 1)])
def test_concatenation(axis: int, new_axis: int, symbolic: bool) -> None:
    nodes = [
        CONSTRUCT,
        N("ConcatFromSequence", ["s"], ["k"], axis=axis, new_axis=new_axis),
        *squared("k"),
    ]
    shapes = dict(SHAPES)
    if not new_axis:  # sizes along the axis may differ
        shapes["b"] = (4, 3) if axis == 0 else (2, 4)
    check(nodes, arrays(**shapes), ["a", "b", "c"], symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("split", [None, 2, [1, 3, 1]])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_split(axis: int, split: int | list[int] | None, symbolic: bool) -> None:
    for keepdims in (0, 1) if split is None else (1,):
        nodes = [
            constant("p", 1),
            *([] if split is None else [constant("n", split)]),  # type: ignore[arg-type]
            N(
                "SplitToSequence",
                ["x", *([] if split is None else ["n"])],
                ["s"],
                axis=axis,
                keepdims=keepdims,
            ),
            N("SequenceAt", ["s", "p"], ["e"]),
            *squared("e"),
        ]
        check(nodes, arrays(x=(5, 5)), ["x"], symbolic=symbolic)


@pytest.mark.parametrize("symbolic", [False, True])
def test_map(symbolic: bool) -> None:
    body = subgraph(
        "body",
        [
            N("Mul", ["e", "t"], ["m"]),
            N("Mul", ["m", "w"], ["n"]),
            N("Sin", ["n"], ["o"]),
            N("Exp", ["m"], ["x"]),
        ],
        [value("e", None, D), value("t", None, D)],
        [value("o", None, D), value("x", None, D)],
    )
    nodes = [
        CONSTRUCT,
        N("SequenceMap", ["s", "d"], ["mapped", "exps"], body=body),
        N("ConcatFromSequence", ["mapped"], ["k"], axis=0),
        N("ConcatFromSequence", ["exps"], ["l"], axis=0),
        N("Mul", ["k", "l"], ["n1"]),
        *squared("n1"),
    ]
    feeds = arrays(**SHAPES, d=(2, 3), w=(2, 3))
    check(nodes, feeds, ["a", "b", "c", "d", "w"], symbolic=symbolic)


def test_optional() -> None:
    nodes = [
        N("Mul", ["a", "b"], ["m"]),
        N("Optional", ["m"], ["o"]),
        N("OptionalGetElement", ["o"], ["e"]),
        *squared("e"),
    ]
    check(nodes, arrays(a=(2, 3), b=(2, 3)), ["a", "b"])


def sequence_info(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_sequence_value_info(name, D, None)


@pytest.mark.parametrize("flag", [True, False])
def test_sequences_out_of_branches(flag: bool) -> None:
    then = subgraph(
        "then", [N("SequenceConstruct", ["a", "b", "a"], ["t"])], [], [sequence_info("t")]
    )
    other = subgraph("else", [N("SequenceConstruct", ["b"], ["e"])], [], [sequence_info("e")])
    nodes = [
        N("If", ["flag"], ["s"], then_branch=then, else_branch=other),
        N("ConcatFromSequence", ["s"], ["k"], axis=0),
        *squared("k"),
    ]
    check(nodes, {"flag": np.array(flag), **arrays(a=(2, 3), b=(2, 3))}, ["a", "b"])


def test_sequence_that_a_loop_carries_is_refused() -> None:
    body = subgraph(
        "body",
        [N("SequenceInsert", ["s", "a"], ["t"]), N("Identity", ["c"], ["d"])],
        [value("i", [], TensorProto.INT64), value("c", [], TensorProto.BOOL), sequence_info("s")],
        [value("d", [], TensorProto.BOOL), sequence_info("t")],
    )
    nodes = [
        constant("n", 2),
        N("SequenceEmpty", [], ["s0"], dtype=D),
        N("Loop", ["n", "", "s0"], ["sf"], name="loop", body=body),
        N("ConcatFromSequence", ["sf"], ["y"], axis=0),
    ]
    with pytest.raises(
        ortops.UnsupportedError, match=r"Loop node 'loop': 's' of its body is a seq"
    ):
        check(nodes, arrays(a=(2, 3)), ["a"])
