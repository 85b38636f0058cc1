"""Lowering: what is kept, what goes, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import pytest
from domain_models import DOMAIN, model, node, value
from onnx import TensorProto, helper
from running import run

import ortops

F = np.float32


def adam_model(**attributes):
    names = ["R", "T", "X", "G", "V", "H"]
    inputs = [value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, ["n"]) for name in names[2:]]
    update = node("Adam", names, ["X_new", "V_new", "H_new"], name="update", **attributes)
    return model([update], inputs, ["X_new", "V_new", "H_new"])


def domains(proto: onnx.ModelProto) -> set[str]:
    """Returns the domains of all nodes, of sub-graphs and functions too."""

    def of(nodes):
        for item in nodes:
            yield item.domain
            for attribute in item.attribute:
                for graph in (attribute.g, *attribute.graphs):
                    yield from of(graph.node)

    return {*of(proto.graph.node), *(d for f in proto.functions for d in of(f.node))}


def test_argument_is_not_changed_and_names_stay():
    proto = adam_model()
    proto.metadata_props.add(key="author", value="somebody")
    proto.graph.doc_string = "an update"
    before = proto.SerializeToString()
    lowered = ortops.lower(proto)
    assert proto.SerializeToString() == before
    assert domains(lowered) == {""}
    assert [entry.domain for entry in lowered.opset_import] == [""]
    assert list(lowered.graph.input) == list(proto.graph.input)
    assert [o.name for o in lowered.graph.output] == [o.name for o in proto.graph.output]
    assert lowered.metadata_props == proto.metadata_props
    assert lowered.graph.name == proto.graph.name
    assert lowered.graph.doc_string == proto.graph.doc_string
    assert all(item.name.startswith("update/") for item in lowered.graph.node)


def test_idempotent():
    once = ortops.lower(adam_model())
    assert ortops.lower(once).SerializeToString() == once.SerializeToString()


def test_a_model_without_the_domain_is_returned_as_it_is():
    proto = model([helper.make_node("Neg", ["a"], ["b"])], [value("a")], ["b"], opset=11)
    assert ortops.lower(proto).SerializeToString() == proto.SerializeToString()


def test_full_check_passes_where_it_did():
    proto = adam_model()
    for output in proto.graph.output:
        output.CopyFrom(value(output.name, ["n"]))
    onnx.checker.check_model(proto, full_check=True)
    onnx.checker.check_model(ortops.lower(proto), full_check=True)


def test_path_and_bytes(tmp_path):
    proto = adam_model()
    path = tmp_path / "adam.onnx"
    onnx.save(proto, path)
    expected = ortops.lower(proto)
    assert ortops.lower(path) == expected
    assert ortops.lower(str(path)) == expected
    assert ortops.lower(proto.SerializeToString()) == expected


def test_training_info_stays():
    proto = adam_model()
    proto.training_info.add().update_binding.add(key="X", value="X_new")
    assert ortops.lower(proto).training_info == proto.training_info


def test_initializers_stay():
    proto = adam_model()
    proto.graph.initializer.append(onnx.numpy_helper.from_array(F([1, 2]), "V"))
    lowered = ortops.lower(proto)
    assert lowered.graph.initializer == proto.graph.initializer


def test_optimizer_in_a_model_local_function():
    body = [
        node(
            "Momentum",
            ["r", "t", "x", "g", "v"],
            ["x2", "v2"],
            alpha=0.5,
            beta=1.0,
            norm_coefficient=0.0,
            mode="standard",
        )
    ]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    function = helper.make_function(
        "local", "Update", ["r", "t", "x", "g", "v"], ["x2", "v2"], body, imports
    )
    call = helper.make_node("Update", ["R", "T", "X", "G", "V"], ["X2", "V2"], domain="local")
    inputs = [value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, [1]) for name in "XGV"]
    proto = model([call], inputs, ["X2", "V2"], functions=[function], imports=[("local", 1)])
    lowered = ortops.lower(proto)
    assert domains(lowered) == {""}
    feeds = {"R": F(0.5), "T": np.int64(0), "X": F([1]), "G": F([2]), "V": F([4])}
    assert run(lowered, feeds) == [[-1], [4]]


def test_optimizer_in_a_branch():
    update = node("Adagrad", ["R", "T", "X", "G", "H"], ["X2", "H2"])
    branch = helper.make_graph([update], "then", [], [value("X2", [1])])
    keep = helper.make_graph(
        [helper.make_node("Identity", ["X"], ["same"])], "else", [], [value("same", [1])]
    )
    choose = helper.make_node("If", ["flag"], ["result"], then_branch=branch, else_branch=keep)
    inputs = [value("flag", (), TensorProto.BOOL), value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, [1]) for name in "XGH"]
    lowered = ortops.lower(model([choose], inputs, ["result"]))
    assert domains(lowered) == {""}
    feeds = {"R": F(0.5), "T": np.int64(0), "X": F([1]), "G": F([3]), "H": F([16])}
    assert run(lowered, {"flag": np.bool_(False), **feeds}) == [[1]]
    np.testing.assert_allclose(run(lowered, {"flag": np.bool_(True), **feeds}), [[0.7]], rtol=1e-6)


def test_old_opset_is_converted_and_said(caplog):
    nodes = [
        helper.make_node("Squeeze", ["a"], ["b"], axes=[0]),  # a form of opset 11
        helper.make_node("Mul", ["b", "b"], ["y"]),
        node("Gradient", ["a"], ["da"], xs=["a"], y="y"),
    ]
    proto = model(nodes, [value("a", [1, 2])], ["da"], opset=11)
    with caplog.at_level(logging.WARNING, "ortops"):
        lowered = ortops.lower(proto)
    assert "converted from opset 11 to 21" in caplog.text
    assert [entry.version for entry in lowered.opset_import] == [21]
    np.testing.assert_array_equal(run(lowered, {"a": F([[2, 3]])})[0], [[4, 6]])


def test_a_model_without_a_default_import_gets_one():
    proto = adam_model()
    del proto.opset_import[0]
    lowered = ortops.lower(proto)
    assert [entry.domain for entry in lowered.opset_import] == [""]
    onnx.checker.check_model(lowered)


def test_external_data_stay_external(tmp_path):
    weights = np.arange(1000, dtype=F)
    nodes = [
        helper.make_node("Mul", ["x", "w"], ["y"]),
        node("Gradient", ["x"], ["dx"], xs=["x"], y="y"),
    ]
    proto = model(nodes, [value("x", [1000])], ["dx"], initializers={"w": weights})
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    lowered = ortops.lower(path)
    (tensor,) = lowered.graph.initializer
    assert {entry.key: entry.value for entry in tensor.external_data}["location"] == "w.bin"
    session = ortops.InferenceSession(path)
    np.testing.assert_array_equal(session.run(None, {"x": np.zeros(1000, F)})[0], weights)


def test_outputs_that_are_skipped():
    names = ["R", "T", "X", "G", "V", "H"]
    inputs = [value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, [1]) for name in names[2:]]
    update = node("Adam", names, ["", "V_new"], alpha=0.5)
    lowered = ortops.lower(model([update], inputs, ["V_new"]))
    assert not any(item.op_type == "Sqrt" for item in lowered.graph.node)
    feeds = {name: F([2]) for name in names[2:]} | {"R": F(1), "T": np.int64(1), "G": F([4])}
    assert run(lowered, feeds) == [[3]]


@pytest.mark.parametrize("outputs", [["X_new"], ["X_new", ""], ["X_new", "", ""]])
def test_outputs_that_are_skipped_at_the_end(outputs, caplog):
    names = ["R", "T", "X", "G", "V", "H"]
    inputs = [value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, [1]) for name in names[2:]]
    proto = model([node("Adam", names, outputs)], inputs, ["X_new"])
    (found,) = ortops.lower(proto).graph.output
    assert found.type.tensor_type.elem_type == TensorProto.FLOAT
    assert not caplog.records  # of an inference that failed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a model at all", "18 bytes: not an ONNX model"),
        (b"", "0 bytes: not an ONNX model (it has no graph); pass a .onnx file"),
        (3, "model must be a ModelProto, bytes, or a path, got a int"),
        ("nowhere.onnx", "file 'nowhere.onnx': No such file or directory; pass the path of"),
    ],
)
def test_not_a_model(data, message):
    with pytest.raises(ortops.ModelError) as raised:
        ortops.lower(data)
    assert message in str(raised.value)


def update_model(
    op_type="Adam", *, inputs=None, outputs=None, types=None, shapes=None, **attributes
):
    names = {"Adam": "RTXGVH", "Adagrad": "RTXGH", "Momentum": "RTXGV"}.get(op_type, "RTXGVH")
    inputs = list(names) if inputs is None else inputs
    outputs = [f"{name}_new" for name in names if name not in "RTG"] if outputs is None else outputs
    kinds = {"T": TensorProto.INT64} | (types or {})
    sizes = {"R": (), "T": ()} | (shapes or {})
    described = [
        value(name, sizes.get(name, [3]), kinds.get(name, TensorProto.FLOAT))
        for name in dict.fromkeys(inputs)
        if name
    ]
    update = node(op_type, inputs, outputs, name="update", **attributes)
    return model([update], described, [name for name in outputs if name])


MOMENTUM = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.0, "mode": "standard"}
TWO = ["R", "T", "X", "X2", "G", "G2", "V", "V2", "H", "H2"]

BAD = {
    "unknown operator": (
        update_model("AdamW"),
        "AdamW node 'update': domain 'ai.onnx.preview.training' has no operator AdamW; did you",
    ),
    "unknown mode": (
        update_model("Momentum", **{**MOMENTUM, "mode": "heavy"}),
        "Momentum node 'update': mode must be 'standard' or 'nesterov', got 'heavy'",
    ),
    "missing required attribute": (
        update_model("Momentum", **{k: v for k, v in MOMENTUM.items() if k != "beta"}),
        "Momentum node 'update': missing required attribute 'beta'",
    ),
    "unknown attribute": (
        update_model(epsilonn=1.0),
        "Adam node 'update': unknown attribute 'epsilonn'; did you mean 'epsilon'?",
    ),
    "attribute of the wrong type": (
        update_model(alpha=1),
        "Adam node 'update': attribute 'alpha' must be of type FLOAT, got INT",
    ),
    "too few inputs": (
        update_model(inputs=list("RTXGV")),
        "expected 2 + 4n inputs for n tensors (R, T, then n each of X, G, V, H), got 5",
    ),
    "no tensors": (
        update_model(inputs=list("RT"), outputs=["X_new"]),
        "Adam node 'update': expected 2 + 4n inputs for n tensors (R, T, then n each of",
    ),
    "absent input": (
        update_model(inputs=["R", "T", "X", "", "V", "H"]),
        "Adam node 'update': input 3 is missing (''); all inputs are required",
    ),
    "too many outputs": (
        update_model(outputs=["a", "b", "c", "d"]),
        (
            "Adam node 'update': expected at most 3 outputs for 1 "
            "optimized tensors (1 each of X_new, "
            "V_new, H_new), got 4"
        ),
    ),
    "R not a scalar": (
        update_model(shapes={"R": [1]}),
        "Adam node 'update': R must be a scalar (0-d), got shape [1]",
    ),
    "T not a scalar": (
        update_model(shapes={"T": [2]}),
        "Adam node 'update': T must be a scalar (0-d), got shape [2]",
    ),
    "T of the wrong type": (
        update_model(types={"T": TensorProto.INT32}),
        "Adam node 'update': T must be of type INT64, got INT32",
    ),
    "R of the wrong type": (
        update_model(types={"R": TensorProto.FLOAT16}),
        "Adam node 'update': R must be of type FLOAT or DOUBLE, got FLOAT16",
    ),
    "tensor of the wrong type": (
        update_model(types=dict.fromkeys("XGVH", TensorProto.INT64)),
        "Adam node 'update': X 'X' must be of type FLOAT or DOUBLE, got INT64",
    ),
    "shapes within a group": (
        update_model(shapes={"G": [4]}),
        (
            "Adam node 'update': G 'G' has shape [4], but X 'X' has shape "
            "[3]; X, G, V, H must have equal"
        ),
    ),
    "types within a group": (
        update_model(types={"G": TensorProto.DOUBLE}),
        "Adam node 'update': all tensors must have the same type, got DOUBLE and FLOAT",
    ),
    "types of two groups": (
        update_model(
            inputs=TWO,
            outputs=["a", "b"],
            types=dict.fromkeys(["X2", "G2", "V2", "H2"], TensorProto.DOUBLE),
        ),
        "Adam node 'update': all tensors must have the same type, got DOUBLE and FLOAT",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_optimizer_node(case):
    proto, message = BAD[case]
    before = proto.SerializeToString()
    for attempt in (ortops.lower, ortops.InferenceSession):
        with pytest.raises(ortops.ModelError) as raised:
            attempt(proto)
        assert message in str(raised.value)
    assert proto.SerializeToString() == before


def test_shapes_that_only_a_run_tells_are_not_broadcast():
    names = ["R", "T", "X", "G", "V"]
    settings = {"alpha": 0.5, "beta": 1.0, "norm_coefficient": 0.0, "mode": "standard"}
    inputs = [value("R"), value("T", (), TensorProto.INT64)]
    inputs += [value(name, [f"size of {name}"]) for name in names[2:]]
    lowered = ortops.lower(
        model([node("Momentum", names, ["X_new"], **settings)], inputs, ["X_new"])
    )
    feeds = {"R": F(1), "T": np.int64(0), "X": F([5, 6]), "G": F([1, 2]), "V": F([2, 4])}
    np.testing.assert_array_equal(run(lowered, feeds), [[3, 2]])
    with pytest.raises(Exception, match="Reshape"):
        run(lowered, feeds | {"G": F([1])})


def test_sparse_initializers_are_refused_by_name():
    nodes = [
        helper.make_node("Mul", ["a", "w"], ["y"]),
        node("Gradient", ["a"], ["da"], xs=["a"], y="y"),
    ]
    proto = model(nodes, [value("a", [3])], ["da"])
    proto.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            onnx.numpy_helper.from_array(F([4]), "w"),
            onnx.numpy_helper.from_array(np.array([1]), "places"),
            [3],
        )
    )
    with pytest.raises(
        ortops.UnsupportedError, match="initializer 'w': sparse initializers are not"
    ):
        ortops.lower(proto)


def test_a_cycle_is_refused():
    nodes = [
        node("Gradient", ["a"], ["da"], xs=["a"], y="db"),
        node("Gradient", ["a"], ["db"], xs=["a"], y="da"),
    ]
    with pytest.raises(ortops.ModelError, match="cycle"):
        ortops.lower(model(nodes, [value("a")], ["da"]))


def test_scan_of_opset_8_is_refused():
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["t"]), helper.make_node("Identity", ["t"], ["u"])],
        "body",
        [value("s", [2]), value("x", [2])],
        [value("t", [2]), value("u", [2])],
    )
    nodes = [
        helper.make_node("Scan", ["", "a", "b"], ["y", "z"], body=body, num_scan_inputs=1),
        node("Gradient", ["a"], ["da"], name="gradient", xs=["a"], y="y"),
    ]
    proto = model(nodes, [value("a", [1, 2]), value("b", [1, 3, 2])], ["da"], opset=8)
    with pytest.raises(ortops.ModelError, match="Scan node 'y': Scan of opset 8 has a batch axis"):
        ortops.lower(proto)
