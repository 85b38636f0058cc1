"""The walk that asks patterns what comes in the place of nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from running import run_by_name

from ortops import Tape, Tensor, op
from ortops.graph.files.serialization import to_proto
from ortops.graph.names import Names
from ortops.graph.passes.rewrite import Pattern, PatternPass, Result, pattern, rewrite
from tests.spies import finish

X = np.float32([-1, 2])


def built(build: Callable[[Tensor], Any]) -> ir.Model:
    """Returns a model of x, which puts out y0, y1, ..."""
    with Tape(name="built") as tape:
        results = build(tape.input("x", np.float32, [2]))
        for number, y in enumerate(results if isinstance(results, tuple) else (results,)):
            tape.output(y, f"y{number}")
    return ir.from_proto(tape.model())


def rewritten(build: Callable[[Tensor], Any], *patterns: Pattern) -> ir.Model:
    model = built(build)
    rewrite(model.graph, Names(model.graph), *patterns)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def results(model: ir.Model) -> list[list[float]]:
    """Returns what the model computes at X, by plain onnxruntime; the model must be legal."""
    return [array.tolist() for array in run_by_name(to_proto(model), {"x": X}).values()]


@pattern("Neg")
def abs_of_exp(node: ir.Node, tape: Tape) -> Result:
    (x,) = node.inputs
    assert x is not None
    return op.Abs(op.Exp(tape.tensor(x)))


@pattern("Neg", "Abs")
def input_of(node: ir.Node, tape: Tape) -> Result:
    (x,) = node.inputs
    assert x is not None
    return tape.tensor(x)


def test_new_nodes_stand_where_the_old_one_stood() -> None:
    model = rewritten(lambda x: op.Cos(op.Neg(op.Sin(x))), abs_of_exp)
    assert operators(model) == ["Sin", "Exp", "Abs", "Cos"]
    np.testing.assert_allclose(results(model), [np.cos(np.exp(np.sin(X)))], rtol=1e-6)


def test_new_nodes_are_named_after_the_old_one() -> None:
    model = built(lambda x: op.Cos(op.Neg(x)))
    old = next(iter(model.graph))
    old.name = "layer"
    value = old.outputs[0].name
    rewrite(model.graph, Names(model.graph), abs_of_exp)
    first, second, _ = model.graph
    assert [first.name, second.name] == ["layer/Exp", "layer/Abs"]
    assert second.outputs[0].name == value


def test_the_operator_names_what_comes_for_a_node_without_a_name() -> None:
    model = built(op.Neg)
    next(iter(model.graph)).name = ""
    rewrite(model.graph, Names(model.graph), abs_of_exp)
    assert [node.name for node in model.graph] == ["Neg/Exp", "Neg/Abs"]


def test_names_that_are_taken_get_a_number() -> None:
    model = built(lambda x: (op.Neg(x), op.Neg(x)))
    for node in model.graph:
        node.name = "twin"
    rewrite(model.graph, Names(model.graph), abs_of_exp)
    names = [node.name for node in model.graph]
    assert names == ["twin/Exp", "twin/Abs", "twin/Exp_1", "twin/Abs_1"]


def test_new_nodes_are_not_asked_about() -> None:
    @pattern("Neg")
    def doubled(node: ir.Node, tape: Tape) -> Result:
        (x,) = node.inputs
        assert x is not None
        return op.Neg(op.Neg(op.Neg(tape.tensor(x))))

    assert operators(rewritten(op.Neg, doubled)) == ["Neg"] * 3


def test_an_output_that_is_replaced_keeps_its_name() -> None:
    model = rewritten(op.Neg, abs_of_exp)
    assert [value.name for value in model.graph.outputs] == ["y0"]
    assert operators(model) == ["Exp", "Abs"]


def test_a_value_that_is_there_already_becomes_an_output() -> None:
    model = rewritten(lambda x: op.Neg(op.Exp(x)), input_of)
    assert operators(model) == ["Exp"]
    assert [value.name for value in model.graph.outputs] == ["y0"]
    np.testing.assert_allclose(results(model), [np.exp(X)], rtol=1e-6)


def test_an_input_becomes_an_output() -> None:
    model = rewritten(op.Neg, input_of)
    assert operators(model) == ["Identity"]
    assert [value.name for value in model.graph.inputs] == ["x"]
    assert [value.name for value in model.graph.outputs] == ["y0"]
    assert results(model) == [X.tolist()]


def test_an_initializer_becomes_an_output() -> None:
    with Tape(name="constant") as tape:
        tape.output(op.Neg(tape.initializer("w", X)), "y")
    model = ir.from_proto(tape.model())
    rewrite(model.graph, Names(model.graph), input_of)
    assert list(model.graph.initializers) == ["w"]
    assert run_by_name(to_proto(model), {})["y"].tolist() == X.tolist()


@pytest.mark.parametrize("order", [1, -1])
def test_an_output_becomes_another_one_too(order: int) -> None:
    model = rewritten(lambda x: (y := op.Exp(x), op.Neg(y))[::order], input_of)
    assert operators(model) == ["Exp", "Identity"]
    assert [value.name for value in model.graph.outputs] == ["y0", "y1"]
    np.testing.assert_allclose(results(model), [np.exp(X)] * 2, rtol=1e-6)


def test_an_output_that_is_read_instead_of_another_value() -> None:
    model = rewritten(lambda x: (y := op.Exp(x), op.Cos(op.Neg(y))), input_of)
    assert operators(model) == ["Exp", "Cos"]
    np.testing.assert_allclose(results(model), [np.exp(X), np.cos(np.exp(X))], rtol=1e-5)


def test_a_value_stands_for_two_outputs() -> None:
    model = rewritten(lambda x: (op.Neg(y := op.Exp(x)), op.Abs(y)), input_of)
    assert operators(model) == ["Exp", "Identity"]
    assert [value.name for value in model.graph.outputs] == ["y0", "y1"]
    np.testing.assert_allclose(results(model), [np.exp(X)] * 2, rtol=1e-6)


def test_what_nobody_reads_any_more_goes() -> None:
    @pattern("Mul")
    def left(node: ir.Node, tape: Tape) -> Result:
        a, _ = node.inputs
        assert a is not None
        return tape.tensor(a)

    model = rewritten(lambda x: op.Exp(x) * op.Cos(op.Sin(x) + 1.0), left)
    assert operators(model) == ["Exp"]


def test_a_node_that_is_replaced_goes_before_the_next_is_asked_about() -> None:
    readers = []

    @pattern("Neg", "Abs")
    def counts(node: ir.Node, tape: Tape) -> Result:
        (x,) = node.inputs
        assert x is not None
        readers.append(len(x.uses()))
        return op.Exp(tape.tensor(x))

    def build(x: Tensor) -> tuple[Tensor, Tensor]:
        y = op.Sin(x)
        return op.Neg(y), op.Abs(y)

    rewritten(build, counts)
    assert readers == [2, 2]  # the node itself, and what is there or has come for the other


def test_what_a_pattern_emits_in_vain_goes() -> None:
    @pattern("Neg")
    def tries(node: ir.Node, tape: Tape) -> Result:
        (x,) = node.inputs
        assert x is not None
        op.Exp(tape.tensor(x))
        return None

    assert operators(rewritten(op.Neg, tries)) == ["Neg"]


def test_a_pattern_may_remove_a_later_node() -> None:
    asked = []

    @pattern("Neg")
    def both_go(node: ir.Node, tape: Tape) -> Result:
        asked.append(node.name)
        (x,), ((reader, _),) = node.inputs, node.outputs[0].uses()
        assert x is not None
        reader.outputs[0].replace_all_uses_with(x)
        assert reader.graph is not None
        reader.graph.remove(reader, safe=True)
        return tape.tensor(x)

    model = rewritten(lambda x: op.Exp(op.Neg(op.Neg(x))), both_go)
    assert operators(model) == ["Exp"]
    assert len(asked) == 1
    np.testing.assert_allclose(results(model), [np.exp(X)], rtol=1e-6)


def test_the_first_pattern_with_an_answer_is_taken() -> None:
    asked = []

    @pattern("Neg", "Sin")
    def declines(node: ir.Node, tape: Tape) -> Result:
        asked.append(node.op_type)
        return None

    model = rewritten(lambda x: op.Neg(op.Sin(x)), declines, abs_of_exp, input_of)
    assert operators(model) == ["Sin", "Exp", "Abs"]
    assert asked == ["Sin", "Neg"]


def test_only_nodes_of_the_domain_are_asked_about() -> None:
    def identity(node: ir.Node, tape: Tape) -> Result:
        raise AssertionError(node)

    elsewhere = pattern("Neg", domain="com.example")(identity)
    assert operators(rewritten(op.Neg, elsewhere)) == ["Neg"]
    model = built(op.Neg)
    next(iter(model.graph)).domain = "com.example"
    rewrite(model.graph, Names(model.graph), pattern("Neg")(identity))
    with pytest.raises(AssertionError, match="Neg"):
        rewrite(model.graph, Names(model.graph), elsewhere)


@pattern("TopK")
def largest(node: ir.Node, tape: Tape) -> Result:
    x, _ = (tape.tensor(value) for value in node.inputs if value is not None)
    return [op.ReduceMax(x, keepdims=1), op.ArgMax(x, axis=0)]


@pytest.mark.parametrize(
    ("build", "left", "wanted"),
    [
        (lambda x: tuple(op.TopK(x, [1])), ["ReduceMax", "ArgMax"], [[2.0], [1]]),
        (lambda x: op.TopK(x, [1])[0], ["ReduceMax"], [[2.0]]),
        (lambda x: op.TopK(x, [1])[1], ["ArgMax"], [[1]]),
    ],
    ids=["both", "first", "second"],
)
def test_several_outputs(build: Callable[[Tensor], Any], left: list[str], wanted: Any) -> None:
    model = rewritten(build, largest)
    assert operators(model) == left
    assert results(model) == wanted


def test_an_output_that_is_absent() -> None:
    @pattern("TopK")
    def second_of_first(node: ir.Node, tape: Tape) -> Result:
        x, _ = (tape.tensor(value) for value in node.inputs if value is not None)
        first = op.Exp(x)
        return [first, op.Cast(op.ReduceMax(first, keepdims=1), to=ir.DataType.INT64)]

    model = built(lambda x: op.TopK(x, [1])[1])
    next(node for node in model.graph if node.op_type == "TopK").outputs[0].name = ""
    rewrite(model.graph, Names(model.graph), second_of_first)
    assert operators(model) == ["Exp", "ReduceMax", "Cast"]
    assert results(model) == [[int(np.exp(X.max()))]]


def test_a_result_of_unknown_shape_has_that_of_the_old_value() -> None:
    @pattern("Neg")
    def reshaped(node: ir.Node, tape: Tape) -> Result:
        (x,) = node.inputs
        assert x is not None
        y = tape.tensor(x)
        return op.Reshape(y, op.Cast(op.ReduceMax(op.Abs(y), keepdims=1), to=ir.DataType.INT64))

    model = rewritten(lambda x: op.Cos(op.Neg(x)), reshaped)
    (found,) = (node.outputs[0].shape for node in model.graph if node.op_type == "Reshape")
    assert found == ir.Shape([2])


def test_a_pass_of_patterns() -> None:
    model = finish(built(lambda x: op.Neg(op.Abs(x))), PatternPass("both", abs_of_exp, input_of))
    assert operators(model) == ["Exp", "Abs"]  # of what Abs has read
