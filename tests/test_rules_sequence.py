"""Sequences and optionals against differences of what onnxruntime computes in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from checked import Checked
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import run
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


@pytest.mark.nightly
@pytest.mark.quick(2)
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


@pytest.mark.nightly
@pytest.mark.quick(2)
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


@pytest.mark.nightly
@pytest.mark.quick(4)
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


@pytest.mark.nightly
@pytest.mark.quick(4)
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


@pytest.mark.slow
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


def carrying(
    nodes: list[onnx.NodeProto], *, start: str, tensors: bool = True, condition: str = "go"
) -> onnx.NodeProto:
    """Returns a Loop that carries a sequence, s to t, and a tensor, h to k."""
    body = subgraph(
        "body",
        [*nodes, *([N("Identity", ["go"], ["go_on"])] if condition == "go" else [])],
        [
            value("i", [], TensorProto.INT64),
            value("go", [], TensorProto.BOOL),
            sequence_info("s"),
            *([value("h", [2, 3], D)] if tensors else []),
        ],
        [
            value("go_on", [], TensorProto.BOOL),
            sequence_info("t"),
            *([value("k", [2, 3], D)] if tensors else []),
        ],
    )
    return N(
        "Loop",
        ["n", "", start, *(["a"] if tensors else [])],
        ["sf", *(["kf"] if tensors else [])],
        name="loop",
        body=body,
    )


APPEND = [
    N("Mul", ["h", "w"], ["m"]),
    N("Sin", ["m"], ["k"]),
    N("SequenceInsert", ["s", "k"], ["t"]),
]
EMPTY = [constant("n", 3), N("SequenceEmpty", [], ["s0"], dtype=D)]
JOINED = [N("ConcatFromSequence", ["sf"], ["joined"], axis=0), *squared("joined")]


@pytest.mark.parametrize("symbolic", [False, True])
def test_loop_that_appends_to_a_sequence(symbolic: bool) -> None:
    nodes = [*EMPTY, carrying(APPEND, start="s0"), *JOINED]
    check(nodes, arrays(a=(2, 3), w=(2, 3)), ["a", "w"], symbolic=symbolic)


def test_loop_that_appends_reads_no_sequence_in_the_backward_pass() -> None:
    """So that its time is linear in the number of iterations."""
    gradient = node("Gradient", ["w"], ["d"], xs=["w"], y="y")
    nodes = [*EMPTY, carrying(APPEND, start="s0"), *JOINED, gradient]
    lowered = ortops.lower(model(nodes, [value("a", [2, 3], D), value("w", [2, 3], D)], ["d"]))
    bodies = [n.attribute[0].g for n in lowered.graph.node if n.op_type == "Loop"]
    assert len(bodies) == 2
    assert not [n for body in bodies for n in body.node if n.op_type == "Loop"]


@pytest.mark.slow
def test_loop_that_reads_what_it_appended() -> None:
    inside = [
        N("SequenceAt", ["s", "i"], ["e"]),
        N("Mul", ["e", "h"], ["m"]),
        N("Mul", ["m", "w"], ["n1"]),
        N("Sin", ["n1"], ["k"]),
        N("SequenceInsert", ["s", "k"], ["t"]),
    ]
    nodes = [
        constant("n", 3),
        N("SequenceConstruct", ["b"], ["s0"]),
        carrying(inside, start="s0"),
        N("Mul", ["kf", "kf"], ["scaled"]),
        N("ConcatFromSequence", ["sf"], ["joined"], axis=0, new_axis=1),
        N("Mul", ["joined", "scaled"], ["both"]),
        *squared("both"),
    ]
    check(nodes, arrays(a=(2, 3), b=(2, 3), w=(2, 3)), ["a", "b", "w"])


@pytest.mark.slow
def test_loop_that_replaces_elements_of_a_sequence() -> None:
    inside = [
        N("SequenceAt", ["s", "i"], ["e"]),
        N("SequenceErase", ["s", "i"], ["less"]),
        N("Mul", ["e", "w"], ["m"]),
        N("Sin", ["m"], ["f"]),
        N("SequenceInsert", ["less", "f", "i"], ["t"]),
    ]
    nodes = [constant("n", 2), CONSTRUCT, carrying(inside, start="s", tensors=False), *JOINED]
    check(nodes, arrays(**SHAPES, w=(2, 3)), ["a", "b", "c", "w"])


@pytest.mark.slow
def test_loop_that_reads_a_sequence_from_outside() -> None:
    inside = [
        N("SequenceAt", ["outside", "i"], ["e"]),
        N("Mul", ["e", "h"], ["m"]),
        N("Tanh", ["m"], ["k"]),
        N("SequenceInsert", ["s", "m"], ["t"]),
    ]
    nodes = [
        *EMPTY,
        N("SequenceConstruct", ["a", "b", "c"], ["outside"]),
        carrying(inside, start="s0"),
        *JOINED,
    ]
    check(nodes, arrays(**SHAPES), ["a", "b", "c"])


def test_loop_that_carries_a_sequence_and_stops_early() -> None:
    stop = [
        N("ReduceSum", ["k"], ["total"], keepdims=0),
        N("Less", ["total", "limit"], ["go_on"]),
    ]
    inside = [N("Add", ["h", "w"], ["k"]), N("SequenceInsert", ["s", "k"], ["t"]), *stop]
    nodes = [
        constant("n", 50),
        N("SequenceEmpty", [], ["s0"], dtype=D),
        carrying(inside, start="s0", condition="stop"),
        *JOINED,
    ]
    feeds = {"a": np.zeros((2, 3)), "w": np.ones((2, 3)), "limit": np.array(20.0)}
    check(nodes, feeds, ["a", "w"])
    given = [value(name, array.shape, D) for name, array in feeds.items()]
    (y,) = run(model(nodes, given, ["y"]), feeds)
    assert y.shape == (2 * 4, 3)


def test_loop_without_iterations_that_carries_a_sequence() -> None:
    nodes = [constant("n", 0), CONSTRUCT, carrying(APPEND, start="s"), *JOINED]
    check(nodes, arrays(**SHAPES, w=(2, 3)), ["a", "b", "w"])


def test_optional_that_a_loop_carries_is_refused() -> None:
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(D, [2, 3]))
    body = subgraph(
        "body",
        [N("Identity", ["o"], ["p"]), N("Identity", ["c"], ["d"])],
        [
            value("i", [], TensorProto.INT64),
            value("c", [], TensorProto.BOOL),
            helper.make_value_info("o", kind),
        ],
        [value("d", [], TensorProto.BOOL), helper.make_value_info("p", kind)],
    )
    nodes = [
        constant("n", 2),
        N("Optional", ["a"], ["o0"]),
        N("Loop", ["n", "", "o0"], ["of"], name="loop", body=body),
        N("OptionalGetElement", ["of"], ["y"]),
    ]
    with pytest.raises(
        ortops.UnsupportedError,
        match=r"Loop node 'loop': no gradient for the optional 'o' in its body",
    ):
        check(nodes, arrays(a=(2, 3)), ["a"])


def test_sequence_that_the_body_of_a_map_captures_is_refused() -> None:
    body = subgraph(
        "body",
        [N("SequenceAt", ["s", "p"], ["other"]), N("Mul", ["e", "other"], ["o"])],
        [value("e", None, D)],
        [value("o", None, D)],
    )
    nodes = [
        CONSTRUCT,
        constant("p", 0),
        N("SequenceMap", ["s"], ["sf"], name="map", body=body),
        *JOINED,
    ]
    with pytest.raises(
        ortops.UnsupportedError,
        match=r"SequenceMap node 'map': no gradient for the outer sequence 's'",
    ):
        check(nodes, arrays(**SHAPES), ["a"])
