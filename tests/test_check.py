"""``ortops check`` and ``ortops lower``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import run

import ortops
from ortops.check import check
from ortops.cli import main

F = np.float32


def network(*, opset=21, strange=False):
    first = (
        helper.make_node("Strange", ["x"], ["h"], name="odd", domain="com.example")
        if strange
        else helper.make_node("Relu", ["x"], ["h"], name="relu")
    )
    nodes = [
        helper.make_node("Gather", ["x", "index"], ["row"]),
        helper.make_node("ArgMax", ["frozen"], ["place"]),
        first,
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    return model(
        nodes,
        [value("x", ["n", 2]), value("index", (), TensorProto.INT64)],
        ["y", "place"],
        initializers={
            "w": np.ones((2, 3), F),
            "frozen": np.ones(4, F),
            "number": np.ones(1, np.int64),
        },
        opset=opset,
        imports=[("com.example", 1)],
    )


def test_report():
    report = check(network())
    assert report.parameters == {"w": "FLOAT[2,3]"}
    assert report.parameter_count == 6
    assert report.constants == ["frozen"]
    assert report.inputs == ["x"]
    assert report.other_inputs == ["index"]
    assert report.problems == []
    assert report.converted_to is None


def test_conversion_is_told():
    report = check(network(opset=13))
    assert (report.opset, report.converted_to) == (13, 21)
    assert "opset 13, converted to 21 before it is differentiated" in str(report)


def test_operator_without_a_rule_is_named():
    report = check(network(strange=True))
    assert report.problems == [
        "Strange node 'odd': there is no gradient rule for Strange of domain 'com.example'"
    ]


def test_operator_without_a_rule_in_a_branch_is_named():
    inner = helper.make_node("Strange", ["x"], ["s"], name="odd", domain="com.example")
    then = helper.make_graph([inner], "then", [], [value("s", None)])
    other = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["n"])], "else", [], [value("n", None)]
    )
    choose = helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=other)
    proto = model(
        [choose],
        [value("flag", (), TensorProto.BOOL), value("x", [2])],
        ["y"],
        imports=[("com.example", 1)],
    )
    proto.graph.output[0].CopyFrom(value("y", [2]))
    assert any("Strange node 'odd'" in problem for problem in check(proto).problems)


@pytest.mark.parametrize("strange", [False, True])
def test_command(tmp_path, capsys, strange):
    path = tmp_path / "model.onnx"
    onnx.save(network(strange=strange), path)
    assert main(["check", str(path)]) == int(strange)
    printed = capsys.readouterr().out
    assert "w  FLOAT[2,3]" in printed or strange
    assert ("there is no gradient rule" in printed) == strange


def test_command_on_a_file_that_is_none(tmp_path, capsys):
    path = tmp_path / "text.onnx"
    path.write_text("not a model")
    assert main(["check", str(path)]) == 1
    assert "not an ONNX model" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"ortops {ortops.__version__}\n"


def test_lower_command(tmp_path):
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["y"]),
        node("Gradient", ["a"], ["da"], xs=["a"], y="y"),
    ]
    path, output = tmp_path / "model.onnx", tmp_path / "lowered.onnx"
    onnx.save(model(nodes, [value("a")], ["da"]), path)
    assert main(["lower", str(path), str(output)]) == 0
    assert run(onnx.load(output), {"a": F(3)}) == [6]
    assert onnx.load(output) == ortops.lower(path)


def test_lower_command_into_another_folder(tmp_path):
    nodes = [
        helper.make_node("Mul", ["a", "w"], ["y"]),
        node("Gradient", ["a"], ["da"], xs=["a"], y="y"),
    ]
    path, output = tmp_path / "model.onnx", tmp_path / "other" / "lowered.onnx"
    proto = model(nodes, [value("a")], ["da"], initializers={"w": F([3, 4])})
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert main(["lower", str(path), str(output)]) == 1  # there is no such folder
    output.parent.mkdir()
    assert main(["lower", str(path), str(output)]) == 0
    assert run(onnx.load(output), {"a": F(1)}) == [7]


@pytest.mark.parametrize("op_type", ["Exp", "Strange"])
def test_model_with_nodes_of_the_training_domain(op_type):
    domain = "" if op_type == "Exp" else "com.example"
    nodes = [
        helper.make_node(op_type, ["a"], ["h"], name="odd", domain=domain),
        helper.make_node("Mul", ["h", "w"], ["y"]),
        node("Gradient", ["a"], ["da"], xs=["a"], y="y", name="gradient"),
    ]
    proto = model(
        nodes,
        [value("a", [2])],
        ["da"],
        initializers={"w": F([3, 4])},
        imports=[("com.example", 1)],
    )
    report = check(proto)
    if op_type == "Exp":
        assert not report.problems
        assert list(report.parameters) == ["w"]
    else:
        (problem,) = report.problems
        assert "Strange node 'odd': there is no gradient rule" in problem
        assert "Gradient node 'gradient'" in problem
