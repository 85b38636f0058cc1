"""What tells the base of an adapter from other models, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from lora_models import CASES, branches, normal, random_adapter, values, with_values
from onnx import TensorProto, helper, numpy_helper
from running import plain_session

import ortops
from ortops import ModelError, TrainingSession, lora

Edit = Callable[[onnx.ModelProto], object]

node, info = helper.make_node, helper.make_tensor_value_info


def model_of(
    nodes: Sequence[onnx.NodeProto],
    weights: dict[str, np.ndarray],
    opset: int = 21,
    shape: Sequence[object] = ("batch", 4),
    functions: Sequence[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "base",
        [info("x", TensorProto.FLOAT, shape)],
        [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions)


def square(opset: int = 21) -> onnx.ModelProto:
    """Layers of one shape, so that any can stand where another stands."""
    nodes = [
        node("Gemm", ["x", "fc1.weight", "bias"], ["a"], transB=1),
        node("Tanh", ["a"], ["b"]),
        node("MatMul", ["b", "fc2.weight"], ["c"]),
        node("Transpose", ["c"], ["d"], perm=[1, 0]),
        node("Transpose", ["d"], ["e"], perm=[1, 0]),
        node("Reshape", ["e", "shape"], ["f"]),
        node("MatMul", ["f", "fc3.weight"], ["y"]),
    ]
    weights = {f"fc{i}.weight": normal(4, 4, seed=i) for i in (1, 2, 3)}
    weights |= {"bias": normal(4, seed=4), "shape": np.array([-1, 4])}
    return model_of(nodes, weights, opset)


def written(model: onnx.ModelProto, path: Path) -> Path:
    lora.save_adapter(with_values(model, random_adapter(model)), path)
    return path


def swap_readers(model: onnx.ModelProto) -> None:
    first, second = (n for n in model.graph.node if {*n.input} & {"fc2.weight", "fc3.weight"})
    first.input[1], second.input[1] = second.input[1], first.input[1]


def swap_order(model: onnx.ModelProto) -> None:
    """Tanh comes behind the second layer."""
    nodes = {node.output[0]: node for node in model.graph.node}
    nodes["c"].input[0], nodes["b"].input[0], nodes["d"].input[0] = "a", "c", "b"
    order = [name for name in nodes if name != "b"]
    order.insert(order.index("c") + 1, "b")
    copies = [onnx.NodeProto.FromString(nodes[name].SerializeToString()) for name in order]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def set_attribute(op_type: str, name: str, value: object) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        found = next(n for n in model.graph.node if n.op_type == op_type)
        kept = [a for a in found.attribute if a.name != name]
        del found.attribute[:]
        found.attribute.extend([*kept, helper.make_attribute(name, value)])

    return edit


def set_tensor(name: str, array: np.ndarray) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(array, name))

    return edit


def set_operator(old: str, new: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        next(n for n in model.graph.node if n.op_type == old).op_type = new

    return edit


def exchange_names(model: onnx.ModelProto) -> None:
    """The same function, in which the second layer has the name of the third."""
    swap_readers(model)
    found = {t.name: t for t in model.graph.initializer}
    two, three = found["fc2.weight"], found["fc3.weight"]
    two.name, three.name = three.name, two.name


CHANGES: dict[str, Edit] = {
    "two layers are swapped": swap_readers,
    "names of two layers are exchanged": exchange_names,
    "an operator is elsewhere": swap_order,
    "an attribute is another": set_attribute("Gemm", "alpha", 0.5),
    "an attribute that was not there": set_attribute("Gemm", "transA", 1),
    "an axis": set_attribute("Transpose", "perm", [0, 1]),
    "an operator is another": set_operator("Tanh", "Sigmoid"),
    "integers": set_tensor("shape", np.array([4, -1])),
    "a weight": set_tensor("bias", normal(4, seed=9)),
}


@pytest.mark.parametrize("edit", CHANGES.values(), ids=CHANGES)
def test_another_base_is_told(edit: Edit, tmp_path: Path) -> None:
    path = written(lora.add(square(), rank=2), tmp_path / "a.onnx_adapter")
    other = square()
    edit(other)
    plain_session(other)  # which takes it
    with pytest.raises(
        ModelError, match="the adapter belongs to another base, with other nodes, inputs, out"
    ):
        lora.load_adapter(lora.add(other, rank=2), path)


@pytest.mark.parametrize("edit", CHANGES.values(), ids=CHANGES)
def test_a_base_that_was_changed_under_its_adapter_is_told(edit: Edit, tmp_path: Path) -> None:
    model = lora.add(square(), rank=2, targets=["fc1"])
    edit(model)
    for write in (lora.save_adapter, lora.to_peft):
        with pytest.raises(
            ModelError, match="its nodes, inputs, outputs or base weights have changed"
        ):
            write(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_what_a_branch_computes_counts(tmp_path: Path) -> None:
    path = written(lora.add(branches(), rank=2), tmp_path / "a.onnx_adapter")
    other = branches()
    for attribute in other.graph.node[0].attribute:
        attribute.name = {"then_branch": "else_branch"}.get(attribute.name, "then_branch")
    with pytest.raises(ModelError, match="the adapter belongs to another base"):
        lora.load_adapter(lora.add(other, rank=2), path)


# ------------------------------------------------------------------------- what stays the same


def function_model() -> onnx.ModelProto:
    """A function with a weight of its own, called twice."""
    weight = numpy_helper.from_array(normal(4, 4, seed=3))
    body = [
        node("Constant", [], ["w"], value=weight),
        node("MatMul", ["u", "w"], ["h"]),
        node("Elu", ["h"], ["v"], alpha=1.0),
    ]
    function = helper.make_function("mine", "F", ["u"], ["v"], body, [helper.make_opsetid("", 13)])
    nodes = [
        node("MatMul", ["x", "fc.weight"], ["a"]),
        node("F", ["a"], ["b"], domain="mine"),
        node("F", ["b"], ["y"], domain="mine"),
    ]
    return model_of(nodes, {"fc.weight": normal(4, 4)}, 13, functions=[function])


def old_forms(opset: int) -> onnx.ModelProto:
    """Operators whose settings are attributes in old opsets, and inputs in new ones."""
    nodes = [
        node("Gemm", ["x", "fc.weight", "bias"], ["a"], alpha=1.0, transB=1),
        node("Dropout", ["a"], ["b"], ratio=0.25),
        node("Unsqueeze", ["b"], ["c"], axes=[1]),
        node("Clip", ["c"], ["d"], min=-1.0, max=2.0),
        node("Squeeze", ["d"], ["e"], axes=[1]),
        node("Softmax", ["e"], ["f"], axis=1),
        node("ReduceSum", ["f"], ["g"], axes=[1], keepdims=1),
        node("Constant", [], ["one"], value=numpy_helper.from_array(normal(4, 4, seed=5))),
        node("MatMul", ["f", "one"], ["h"]),
        node("Identity", ["h"], ["i"]),
        node("Add", ["i", "g"], ["y"]),
    ]
    return model_of(nodes, {"fc.weight": normal(4, 4), "bias": normal(4)}, opset)


def resized() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "conv.weight"], ["a"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a", "s", "s", "m", "v"], ["b"], epsilon=1e-5),
        node("Upsample", ["b", "scales"], ["c"], mode="nearest"),
        node("Conv", ["c", "last.weight"], ["y"]),
    ]
    weights = {"conv.weight": normal(4, 3, 3, 3), "last.weight": normal(2, 4, 1, 1)}
    weights |= {"s": normal(4), "m": normal(4), "v": np.ones(4, np.float32)}
    weights["scales"] = np.array([1, 1, 2, 2], np.float32)
    return model_of(nodes, weights, 9, ["batch", 3, 6, 6])


def normalized_by_the_batch() -> onnx.ModelProto:
    nodes = [
        node("Conv", ["x", "conv.weight"], ["a"]),
        node("BatchNormalization", ["a", "s", "s", "m", "v"], ["y", "m2", "v2"], training_mode=1),
    ]
    weights = {"conv.weight": normal(4, 3, 3, 3), "s": normal(4), "m": normal(4)}
    return model_of(nodes, weights | {"v": np.ones(4, np.float32)}, 15, ["batch", 3, 6, 6])


def regression() -> onnx.ModelProto:
    """A node of ai.onnx.ml, for which standard ones stand once it was converted."""
    numbers = [float(number) for number in normal(4)]
    kind = "ai.onnx.ml"
    nodes = [
        node("MatMul", ["x", "fc.weight"], ["a"]),
        node("LinearRegressor", ["a"], ["y"], domain=kind, coefficients=numbers, intercepts=[0.5]),
    ]
    model = model_of(nodes, {"fc.weight": normal(4, 4)}, 13)
    model.opset_import.append(helper.make_opsetid(kind, 1))
    return model


BASES: dict[str, Callable[[], onnx.ModelProto]] = {
    **{f"opset {opset}": lambda opset=opset: square(opset) for opset in (7, 11, 13, 17, 21, 22)},
    **{f"old forms of {opset}": lambda opset=opset: old_forms(opset) for opset in (7, 10)},
    "function": function_model,
    "resized": resized,
    "normalized by the batch": normalized_by_the_batch,
    "regression": regression,
    **{name: CASES[name].model for name in ("Conv", "DequantizeLinear", "MatMul in float16")},
}


def with_external_data(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(
        model, path, save_as_external_data=True, size_threshold=0, location=f"{path.name}.data"
    )
    return path


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("make", BASES.values(), ids=BASES)
def test_the_base_is_the_same_after_a_training(
    make: Callable[[], onnx.ModelProto], tmp_path: Path
) -> None:
    """Whichever way it goes through ortops; in the end its file fits the base as it was."""
    base = make()
    model = lora.add(base, rank=2)
    built = ortops.build_training_model(
        model, loss="MeanSquaredError", optimizer="SGD", batch_normalization="frozen"
    )
    session = TrainingSession(built)
    session.save(tmp_path / "trained.onnx")
    forms: dict[str, Any] = {
        "trained": session.inference_model(),
        "original": session.inference_model(original=model),
        "trainable": built,
        "saved": tmp_path / "trained.onnx",
        "again": TrainingSession(tmp_path / "trained.onnx").inference_model(),
        "external": with_external_data(session.inference_model(), tmp_path / "external.onnx"),
    }
    outside = lora.add(with_external_data(make(), tmp_path / "base.onnx"), rank=2)
    onnx.save(outside, tmp_path / "adapted.onnx")
    wanted = values(model)
    for name, form in forms.items():
        path = tmp_path / f"{name}.onnx_adapter"
        lora.save_adapter(form, path)
        for given in (model, tmp_path / "adapted.onnx"):
            loaded = lora.load_adapter(given, path)
            found = {t.name: t for t in loaded.graph.initializer}
            for parameter in random_adapter(model):
                array = numpy_helper.to_array(found[parameter])
                np.testing.assert_array_equal(array, wanted[parameter])


def constants_as_nodes(model: onnx.ModelProto) -> None:
    for tensor in [t for t in model.graph.initializer if t.name in ("bias", "shape")]:
        model.graph.node.insert(0, node("Constant", [], [tensor.name], value=tensor))
        model.graph.initializer.remove(tensor)


def renamed_tensors(model: onnx.ModelProto) -> None:
    for each in model.graph.node:
        for names in (each.input, each.output):
            names[:] = [
                f"t_{name}" if len(name) == 1 and name not in "xy" else name for name in names
            ]


def through_identity(model: onnx.ModelProto) -> None:
    model.graph.node[1].input[0] = "same"
    model.graph.node.insert(1, node("Identity", ["a"], ["same"]))


SAME: dict[str, Edit] = {
    "Constant nodes in place of initializers": constants_as_nodes,
    "other names of tensors between": renamed_tensors,
    "Identity": through_identity,
    "a default that is written out": set_attribute("Gemm", "beta", 1.0),
    "another name of the graph": lambda model: setattr(model.graph, "name", "other"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("edit", SAME.values(), ids=SAME)
def test_what_makes_no_difference(edit: Edit, tmp_path: Path) -> None:
    path = written(lora.add(square(), rank=2), tmp_path / "a.onnx_adapter")
    other = square()
    edit(other)
    plain_session(other)  # which takes it
    lora.load_adapter(lora.add(other, rank=2), path)


def test_a_base_that_cannot_be_converted_has_an_adapter(tmp_path: Path) -> None:
    """The converter knows no way from Scan of opset 8; so such a base is taken as it is."""
    body = helper.make_graph(
        [node("Add", ["s", "i"], ["t"]), node("Identity", ["t"], ["o"])],
        "body",
        [info("s", 1, [4]), info("i", 1, [4])],
        [info("t", 1, [4]), info("o", 1, [4])],
    )
    layer, names = node("MatMul", ["x", "fc.weight"], ["rows"]), (["", "start", "rows"], ["l", "y"])
    weights = {"fc.weight": normal(4, 4), "start": np.zeros((2, 4), np.float32)}

    def base() -> onnx.ModelProto:
        scan = node("Scan", *names, num_scan_inputs=1, body=body)
        return model_of([layer, scan], weights, 8, [2, 3, 4])

    model = lora.add(base(), rank=2)
    path = written(model, tmp_path / "a.onnx_adapter")
    lora.load_adapter(model, path)
    body.node[0].op_type = "Sub"
    with pytest.raises(ModelError, match="the adapter belongs to another base"):
        lora.load_adapter(lora.add(base(), rank=2), path)


# --------------------------------------------------------------------------- other versions


def test_a_version_that_is_not_known_yet(tmp_path: Path) -> None:
    model = lora.add(square(), rank=1)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "ortops.lora")
    entry.value = entry.value.replace('"fingerprint": "2:', '"fingerprint": "3:')
    with pytest.raises(ModelError, match="has version 3, but this ortops knows version 2; update"):
        lora.save_adapter(model, tmp_path / "a")
    assert plain_session(lora.merge(model))
