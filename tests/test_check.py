"""``ortops check`` and ``ortops lower``."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from domain_models import model, node, value
from onnx import TensorProto, helper
from onnx.parser import parse_model
from running import run
from violations import all_violations

import ortops
from ortops import Tape, losses, op
from ortops.cli import main
from ortops.engine.check import check
from ortops.errors import ModelError
from ortops.graph import convert

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
    assert "opset 13, converted to 21 for training" in str(report)


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
    assert main(["check", str(path)]) == 2
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


# ------------------------------------------------------------------- what a training would do


def classifier(*, sigmoid: bool = False) -> onnx.ModelProto:
    with Tape() as tape:
        x = tape.input("x", F, ["N", 4])
        h = x @ tape.initializer("w", np.ones((4, 3), F)) + tape.initializer("b", np.ones(3, F))
        h = op.Clip(h, tape.initializer("low", F(-1)), None)
        z = h @ tape.initializer("v", np.ones((3, 2), F))
        z.value.name = "logits"
        tape.output(op.Sigmoid(z) if sigmoid else op.Softmax(z, axis=1), "y")
    return tape.model()


LOSSES = ["SoftmaxCrossEntropy", "MeanSquaredError", losses.L1("logits")]


@pytest.mark.nightly
@pytest.mark.parametrize("trainable", [None, ["v"], ["*"], ["low"], ["nothing"]])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_it_agrees_with_the_builder(loss, trainable, caplog):
    settings = {"loss": loss, "trainable": trainable}
    report = check(classifier(), **settings)
    if trainable == ["nothing"]:
        with pytest.raises(ortops.ModelError) as raised:
            ortops.build_training_model(classifier(), optimizer="SGD", **settings)
        assert report.problems == [str(raised.value)]
        return
    caplog.clear()
    built = ortops.build_training_model(classifier(), optimizer="SGD", **settings)
    keys = [binding.key for binding in built.training_info[0].update_binding]
    assert [*report.parameters, "step"] == sorted(keys, key=[*report.parameters, "step"].index)
    assert report.said == caplog.messages
    assert not report.problems
    others = {tensor.name for tensor in classifier().graph.initializer} - set(keys)
    assert set(report.reasons) == others


def test_one_pattern_may_be_a_string():
    assert list(check(classifier(), trainable="v").parameters) == ["v"]
    report = check(classifier(), trainable=3)
    assert report.problems == ["trainable must be a list of names and patterns, got 3"]


def test_the_report_as_text():
    assert (
        str(check(classifier()))
        == """\
opset 21
output y: FLOAT[N,2], probabilities from Softmax node 'Softmax' of 'logits'
losses that fit: SoftmaxCrossEntropy, MeanSquaredError, L1, and weighted sums
loss of this report: SoftmaxCrossEntropy
trainable parameters: 21 in 3 tensors
  w  FLOAT[4,3]
  b  FLOAT[3]
  v  FLOAT[3,2]
floating-point initializers that are not trained: 1
  low is the min of Clip node 'Clip'
differentiable inputs: x
loss SoftmaxCrossEntropy reads 'logits', the logits before Softmax node 'Softmax', not 'y'
no problems: ready to train"""
    )


def test_a_loss_that_fits():
    assert check(classifier(sigmoid=True)).loss == "BinaryCrossEntropyWithLogits"
    assert check(classifier()).loss == "SoftmaxCrossEntropy"
    assert check(network()).loss == "MeanSquaredError"


def test_a_trainable_file_is_told_by_what_it_trains():
    built = ortops.build_training_model(
        classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam", trainable=["v"]
    )
    report = check(built)
    assert list(report.parameters) == ["v"]
    assert report.problems == []
    before = built.SerializeToString(deterministic=True)
    check(built)
    assert built.SerializeToString(deterministic=True) == before


def test_nothing_to_train_stands_in_the_way(tmp_path, capsys):
    proto = model([helper.make_node("Relu", ["x"], ["y"])], [value("x", [2])], ["y"])
    report = check(proto)
    (problem,) = report.problems
    assert problem.startswith("trainable: the loss depends on no floating-point initializer; name")
    onnx.save(proto, tmp_path / "none.onnx")
    assert main(["check", str(tmp_path / "none.onnx")]) == 1
    assert "trainable: the loss depends on no floating" in capsys.readouterr().out


def test_json_of_files_and_folders(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "models" / "inner"
    folder.mkdir(parents=True)
    onnx.save(classifier(), folder / "a.onnx")
    onnx.save(network(strange=True), tmp_path / "models" / "b.onnx")
    (folder / "read.txt").write_text("no model")
    fine = tmp_path / "fine.onnx"
    onnx.save(classifier(), fine)
    assert main(["check", "--json", str(fine)]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["file"] == str(fine)
    assert one["parameters"] == {"w": "FLOAT[4,3]", "b": "FLOAT[3]", "v": "FLOAT[3,2]"}
    assert one["reasons"] == {"low": "is the min of Clip node 'Clip'"}
    assert one["problems"] == []
    assert main(["check", "--json", str(tmp_path / "models"), str(fine)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [Path(each["file"]).name for each in found] == ["b.onnx", "a.onnx", "fine.onnx"]
    assert found[0]["problems"]
    (folder / "broken.onnx").write_text("no model")
    assert main(["check", "--json", str(tmp_path / "models"), str(tmp_path / "none.onnx")]) == 2
    captured = capsys.readouterr()
    errors = {Path(e["file"]).name: e["error"] for e in json.loads(captured.out) if "error" in e}
    assert set(errors) == {"broken.onnx", "none.onnx"}
    assert "not an ONNX model" in errors["broken.onnx"]
    assert "No such file" in errors["none.onnx"]
    stdin = io.TextIOWrapper(io.BytesIO(fine.read_bytes()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["check", "-", "--loss", "MeanSquaredError", "--trainable", "v"]) == 0
    printed = capsys.readouterr().out
    assert "loss of this report: MeanSquaredError" in printed
    assert "  w is not named in trainable" in printed


@pytest.mark.parametrize("folder", ["empty", "model.onnx"])
def test_a_folder_without_models(folder, tmp_path, capsys):
    (tmp_path / folder / "inner.onnx").mkdir(parents=True)
    assert main(["check", str(tmp_path / folder)]) == 2
    said = capsys.readouterr().err
    assert said == (f"ortops: folder '{tmp_path / folder}' contains no .onnx file; give a model\n")


def test_files_are_told_apart(tmp_path, capsys):
    for name in ("a.onnx", "b.onnx"):
        onnx.save(classifier(), tmp_path / name)
    (tmp_path / "c.onnx").write_text("no model")
    assert main(["check", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert f"{tmp_path / 'a.onnx'}:\nopset 21" in captured.out
    assert f"{tmp_path / 'b.onnx'}:\nopset 21" in captured.out
    assert "not an ONNX model" in captured.err


# --------------------------------------------------------------------- Gradient nodes of its own


def test_a_file_that_stock_onnxruntime_does_not_run_says_so(tmp_path, caplog):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Tanh", ["z"], ["y"]),
        node("Gradient", ["x"], ["dx"], xs=["x"], y="y"),
    ]
    proto = model(nodes, [value("x", [2, 3])], ["y", "dx"], initializers={"w": np.ones((3, 1), F)})
    built = ortops.build_training_model(proto, loss=losses.L1("dx"), optimizer="SGD")
    assert [m for m in caplog.messages if "only after ortops.lower" in m]
    session = ortops.TrainingSession(built)
    caplog.clear()
    for _ in range(2):
        session.save(tmp_path / "trained.onnx")
    (said,) = caplog.messages
    assert said.endswith(
        f"ortops.lower('{tmp_path / 'trained.onnx'}') returns a model for stock onnxruntime"
    )
    x = np.ones((2, 3), F)
    lowered = run(ortops.lower(tmp_path / "trained.onnx"), {"x": x})
    own = ortops.InferenceSession(tmp_path / "trained.onnx").run(None, {"x": x})
    for a, b in zip(lowered, own, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


BRANCHES = """y = If (c) <then_branch = a () => (float[n, 2] t) {{ t = Add (x, w) }},
    else_branch = b () => (float[n, 2] u) {{ {0} }}>"""
FUNCTION = """q = f.F <k = 0.1> (x)  y = Add (q, w) }}
    <opset_import: ["": 21], domain: "f"> F <k> (a) => (b) {{ {0}"""
INVALID = {
    "a misspelt name": (
        "q = Mul (x, w)  y = Add (q, missing)",
        "'y' reads 'missing', which is not",
    ),
    "not on the way to the output": ("q = Neg (missing)  y = Add (x, w)", "reads 'missing', which"),
    "in a branch": (BRANCHES.format("u = Add (x, missing)"), "'u' reads 'missing', which is not"),
    "of the other branch": (BRANCHES.format("u = Add (x, t)"), "'u' reads 't', which is not"),
    "output of a branch": (BRANCHES.format("v = Add (x, w)"), "output 'u' is not defined"),
    "output": ("q = Add (x, w)", "output 'y' is not defined; known names: 'c', 'q'"),
    "in a function": (FUNCTION.format("b = Add (a, w)"), "'b' reads 'w', which is not defined"),
    "output of a function": (FUNCTION.format("c = Neg (a)"), "function 'F': output 'b' is not"),
    "an attribute by reference": (
        "q = Add (x, w)  y = LeakyRelu <alpha: float = @k> (q)",
        "LeakyRelu node 'y': attribute 'alpha' refers to the attribute 'k' outside a function",
    ),
    "by reference in a branch": (
        BRANCHES.format("u = LeakyRelu <alpha: float = @k> (x)"),
        "LeakyRelu node 'u': attribute 'alpha' refers to the attribute 'k' outside a function",
    ),
    "a reference to another attribute": (
        FUNCTION.format("b = LeakyRelu <alpha: float = @other> (a)"),
        "LeakyRelu node 'b': attribute 'alpha' refers to the attribute 'other' in a function",
    ),
}


def parsed(nodes: str) -> onnx.ModelProto:
    text = """<ir_version: 10, opset_import: ["": 21, "f": 1]>
        g (float[n, 2] x, bool c) => (float[n, 2] y) <float[2] w = {1, 2}> { NODES }"""
    return parse_model(text.replace("NODES", nodes.replace("{{", "{").replace("}}", "}")))


def untyped(change) -> onnx.ModelProto:
    proto = parsed("y = Add (x, w)")
    change(proto.graph.input)
    return proto


def test_invalid_models_are_refused_as_the_builder_refuses_them() -> None:
    models = {name: (parsed(nodes), message) for name, (nodes, message) in INVALID.items()}
    for name, change in {
        "no type": lambda inputs: inputs[0].ClearField("type"),
        "no element type": lambda inputs: inputs[0].type.tensor_type.ClearField("elem_type"),
    }.items():
        models[name] = (untyped(change), "input 'x': it has no type; declare one")
    models["not read"] = (untyped(lambda i: i[1].ClearField("type")), "input 'c': it has no type")
    with all_violations() as row:
        for name, (proto, message) in models.items():
            for function in (check, ortops.Function, build):
                with row(f"{name}, {function.__name__}"):
                    with pytest.raises(ModelError) as caught:
                        function(proto)
                    assert message in str(caught.value)


def build(proto: onnx.ModelProto) -> onnx.ModelProto:
    return ortops.build_training_model(proto, loss="MeanSquaredError", optimizer="SGD")


def test_what_is_legal_though_unusual_is_checked() -> None:
    """Names of the graph around a branch, and attributes that a function has."""
    for nodes in (
        BRANCHES.format("u = Mul (x, w)"),
        FUNCTION.format("b = LeakyRelu <alpha: float = @k> (a)"),
    ):
        assert check(parsed(nodes)).problems == []


def trees(rows: int = 1) -> onnx.ModelProto:
    """A forest of one leaf, stored several times, behind a Scaler."""
    scaler = helper.make_node("Scaler", ["x"], ["s"], domain="ai.onnx.ml", scale=[2.0] * 3)
    tree = helper.make_node(
        "TreeEnsembleRegressor",
        ["s"],
        ["y"],
        name="forest",
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[*range(rows)],
        nodes_nodeids=[0] * rows,
        nodes_featureids=[0] * rows,
        nodes_modes=["LEAF"] * rows,
        nodes_values=[0.0] * rows,
        nodes_truenodeids=[0] * rows,
        nodes_falsenodeids=[0] * rows,
        target_treeids=[*range(rows)],
        target_nodeids=[0] * rows,
        target_ids=[0] * rows,
        target_weights=[0.5] * rows,
    )
    found = model([scaler, tree], [value("x", ["n", 3])], ["y"], imports=[("ai.onnx.ml", 3)])
    found.graph.output[0].CopyFrom(value("y", ["n", 1]))
    return found


def test_trees_are_refused_before_their_numbers_are_read(monkeypatch):
    """Attributes take gigabytes as numbers of Python; the weights are sought first."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("the model was converted")

    monkeypatch.setattr(convert, "to_ir", read)
    report = check(trees(3))
    (problem,) = report.problems
    assert problem.startswith("TreeEnsembleRegressor node 'forest': trees are piecewise constant")
    assert (report.inputs, report.other_inputs) == ([], ["x"])
    assert report.outputs == {"y": "FLOAT[n,1]"}
    assert report.opset == 21
    expected = r"the loss depends on no weight, only on TreeEnsembleRegressor node 'forest': trees"
    with pytest.raises(ortops.ModelError, match=expected):
        ortops.build_training_model(trees(3), loss="L1", optimizer="SGD")


def test_trees_beside_weights_end_gradients():
    proto = trees()
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3, 3], np.eye(3).ravel() + 1)
    proto.graph.initializer.append(weight)
    proto.graph.node.insert(0, helper.make_node("MatMul", ["x", "w"], ["h"]))
    proto.graph.node[1].input[0] = "h"
    report = check(proto)
    assert (report.inputs, report.other_inputs) == ([], ["x"])
    (problem,) = report.problems
    assert problem.startswith("TreeEnsembleRegressor node 'forest': trees are piecewise constant")


@pytest.mark.parametrize("loss", ["SoftmaxCrossEntropy", "MeanSquaredError"])
def test_an_input_without_a_shape_is_named_at_once(loss):
    proto = network()
    for described in (proto.graph.input[0], proto.graph.output[0]):
        described.type.tensor_type.ClearField("shape")
    expected = "model: input 'x' has no shape, which its gradients need; declare one, such as"
    with pytest.raises(ortops.ModelError, match=expected):
        ortops.build_training_model(proto, loss=loss, optimizer="SGD")
    (problem,) = check(proto, loss=loss).problems
    assert problem.startswith(expected)


def test_an_input_without_a_shape_is_no_problem_where_a_node_gives_it_one():
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["h"]),
        helper.make_node("MatMul", ["h", "w"], ["y"]),
    ]
    arrays = {"w": np.ones((2, 3), F), "shape": np.array([-1, 2])}
    proto = model(nodes, [value("x", ["n", 2])], ["y"], initializers=arrays)
    proto.graph.output[0].CopyFrom(value("y", ["n", 3]))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    built = ortops.build_training_model(proto, loss="MeanSquaredError", optimizer="SGD")
    feeds = {"x": np.ones((4, 2), F), "targets": np.zeros((4, 3), F)}
    assert ortops.TrainingSession(built).step(feeds)["loss"] == 4
