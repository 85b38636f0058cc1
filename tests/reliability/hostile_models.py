"""Models that nobody means well with, each of which is to be refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from training_models import TRAINING_DOMAIN, affine, forces

import ortops

Make = Callable[[], onnx.ModelProto]

IMPORTS = [
    helper.make_opsetid("", 21),
    helper.make_opsetid(TRAINING_DOMAIN, 1),
    helper.make_opsetid("f", 1),
]


def trainable() -> onnx.ModelProto:
    return ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")


def value(name: str, dims: Sequence[object] | None = (2,), kind: int = 1) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, dims)


def gradient(xs: Sequence[str], y: str, outputs: Sequence[str], **more: Any) -> onnx.NodeProto:
    return helper.make_node(
        "Gradient", more.pop("inputs", xs), outputs, domain=TRAINING_DOMAIN, xs=xs, y=y, **more
    )


def model_of(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str] = ("y",), **parts: Any
) -> onnx.ModelProto:
    """Returns a model from "x" of the given nodes; a Gradient node makes every tool work on it."""
    graph = helper.make_graph(
        nodes,
        "hostile",
        [value("x"), *parts.get("inputs", [])],
        [value(name, None) for name in outputs],
        parts.get("initializers", []),
    )
    return helper.make_model(
        graph, ir_version=10, opset_imports=IMPORTS, functions=parts.get("functions", [])
    )


def with_gradient(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str] = ("y", "dx"), **parts: Any
) -> onnx.ModelProto:
    total = helper.make_node("ReduceSum", ["y"], ["total"], keepdims=0)
    return model_of([*nodes, total, gradient(["x"], "total", ["dx"])], outputs, **parts)


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **more: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, **more)


def edited(make: Make, edit: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = make()
    edit(model)
    return model


def tensor(name: str = "w", dims: Sequence[int] = (2,), **fields: Any) -> onnx.TensorProto:
    result = TensorProto(name=name, data_type=1, dims=dims)
    for field, content in fields.items():
        if isinstance(content, list):
            getattr(result, field).extend(content)
        else:
            setattr(result, field, content)
    return result


def external(location: str, **entries: str) -> onnx.TensorProto:
    result = tensor(data_location=TensorProto.EXTERNAL)
    for key, text in {"location": location, **entries}.items():
        result.external_data.add(key=key, value=text)
    return result


def with_tensor(given: onnx.TensorProto) -> onnx.ModelProto:
    return with_gradient([node("Mul", ["x", "w"], ["y"])], initializers=[given])


def metadata(model: onnx.ModelProto) -> onnx.StringStringEntryProto:
    return next(entry for entry in model.metadata_props if entry.key == "ortops.training")


def with_metadata(text: str) -> onnx.ModelProto:
    def edit(model: onnx.ModelProto) -> None:
        metadata(model).value = text

    return edited(trainable, edit)


def parts_of(**changed: object) -> onnx.ModelProto:
    model = trainable()
    parts = json.loads(metadata(model).value)
    return with_metadata(json.dumps(parts | changed))


def with_initial(
    nodes: Sequence[onnx.NodeProto],
    output: onnx.ValueInfoProto | None = None,
    key: str = "step",
    initializers: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """Returns a trainable model whose initialization computes "start", the start of a variable."""
    model = trainable()
    info = model.training_info[0]
    shown = output or value("start", (), TensorProto.INT64)
    info.initialization.CopyFrom(
        helper.make_graph(nodes, "initialization", [], [shown], initializers)
    )
    del info.initialization_binding[:]
    info.initialization_binding.add(key=key, value="start")
    return model


def constant(name: str, array: object) -> onnx.NodeProto:
    return node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array)))


def long_operator(op_type: str = "MatMul") -> onnx.ModelProto:
    """Returns a model whose initialization has an operator that takes seconds."""
    return with_initial(
        [
            constant("sizes", np.array([6000, 6000])),
            node("ConstantOfShape", ["sizes"], ["a"]),
            node(op_type, ["a", "a"], ["b"]),
            node("Size", ["b"], ["start"]),
        ]
    )


def long_function() -> onnx.ModelProto:
    """Returns that model with a function of the operator's name, which does not replace it."""
    model = long_operator("Gemm")
    body = [node("Add", ["a", "b"], ["c"])]
    opsets = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("", "Gemm", ["a", "b"], ["c"], body, opsets))
    return model


def unending_operator() -> onnx.ModelProto:
    """Returns a model whose initialization has an operator that takes hours."""
    count = 3_000_000
    return with_initial(
        [
            constant("box_sizes", np.array([1, count, 4])),
            constant("score_sizes", np.array([1, 1, count])),
            constant("most", np.int64(count)),
            constant("overlap", np.float32(0.5)),
            node("ConstantOfShape", ["box_sizes"], ["boxes"]),
            node("ConstantOfShape", ["score_sizes"], ["scores"]),
            node("NonMaxSuppression", ["boxes", "scores", "most", "overlap"], ["chosen"]),
            node("Size", ["chosen"], ["start"]),
        ]
    )


def unknown_size() -> onnx.ModelProto:
    """Returns a model whose initialization takes 5 GiB, which only shows when it runs."""
    return with_initial(
        [
            constant("parts", np.full(1000, 1_342_178)),
            node("ReduceSum", ["parts"], ["size"], keepdims=1),
            node("ConstantOfShape", ["size"], ["all"]),
            node("Size", ["all"], ["start"]),
        ]
    )


def wrong_size() -> onnx.ModelProto:
    """Returns that model, which says that it takes four bytes."""
    model = unknown_size()
    model.training_info[0].initialization.value_info.append(value("all", (1,)))
    return model


def endless() -> onnx.ModelProto:
    body = helper.make_graph(
        [node("Identity", ["condition"], ["again"]), node("Add", ["s", "s"], ["next"])],
        "body",
        [value("i", (), 7), value("condition", (), 9), value("s", (), 7)],
        [value("again", (), 9), value("next", (), 7)],
    )
    return with_initial(
        [
            constant("true", True),
            constant("zero", np.int64(0)),
            node("Loop", ["", "true", "zero"], ["start"], body=body),
        ]
    )


def function(name: str, nodes: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("f", name, ["a"], ["b"], nodes, IMPORTS)


def call(name: str, given: str = "a", taken: str = "b") -> onnx.NodeProto:
    return node(name, [given], [taken], domain="f")


def calls(functions: Sequence[onnx.FunctionProto], first: str) -> onnx.ModelProto:
    return with_gradient([call(first, "x", "y")], functions=functions)


def control_flow() -> onnx.ModelProto:
    """A legal model: If and Loop around calls of a function, and a gradient through all of it."""

    def branch(kind: str) -> onnx.GraphProto:
        return helper.make_graph([node(kind, ["x"], ["v"])], kind, [], [value("v", None)])

    body = helper.make_graph(
        [node("Identity", ["go"], ["again"]), call("F", "s", "next")],
        "body",
        [value("i", (), 7), value("go", (), 9), value("s")],
        [value("again", (), 9), value("next")],
    )
    return with_gradient(
        [
            constant("three", np.int64(3)),
            constant("true", True),
            node("If", ["true"], ["s0"], then_branch=branch("Tanh"), else_branch=branch("Neg")),
            node("Loop", ["three", "true", "s0"], ["y"], body=body),
        ],
        functions=[function("F", [node("Mul", ["a", "a"], ["b"])])],
    )


def power(width: int, depth: int) -> onnx.ModelProto:
    """Functions that call the one before so many times: width ** depth nodes."""

    def chain(kind: str) -> list[onnx.NodeProto]:
        names = ["a", *(f"t{number}" for number in range(1, width)), "b"]
        domain = "" if kind == "Neg" else "f"
        pairs = itertools.pairwise(names)
        return [node(kind, [one], [other], domain=domain) for one, other in pairs]

    functions = [
        function(f"F{number}", chain(f"F{number - 1}" if number else "Neg"))
        for number in range(depth)
    ]
    return calls(functions, f"F{depth - 1}")


def nested(depth: int) -> onnx.ModelProto:
    inner = helper.make_graph([constant("v", [1.0])], "inner", [], [value("v", None)])
    for _ in range(depth):
        branch = node("If", ["c"], ["v"], then_branch=inner, else_branch=inner)
        inner = helper.make_graph([branch], "inner", [], [value("v", None)])
        del branch.attribute[1:]  # one branch is enough, and two take 2 ** depth bytes
        inner.node[0].CopyFrom(branch)
    return with_gradient([*inner.node, node("Mul", ["x", "v"], ["y"])], inputs=[value("c", (), 9)])


def nested_type(depth: int) -> onnx.ModelProto:
    kind = onnx.TypeProto()
    kind.tensor_type.elem_type = 1
    for _ in range(depth):
        kind = helper.make_sequence_type_proto(kind)
    model = forces()
    model.graph.input.append(onnx.ValueInfoProto(name="deep", type=kind))
    return model


def utf8(model: onnx.ModelProto, name: str) -> bytes:
    """Returns the bytes of a model in which a name is no text."""
    data = model.SerializeToString()
    assert name.encode() in data
    return data.replace(name.encode(), b"\xff" * len(name))


def sparse() -> onnx.ModelProto:
    def edit(model: onnx.ModelProto) -> None:
        model.graph.sparse_initializer.add(
            values=tensor("w", [1], float_data=[1.0]),
            indices=TensorProto(name="i", data_type=7, dims=[1], int64_data=[5]),
            dims=[2],
        )

    return edited(lambda: with_gradient([node("Mul", ["x", "w"], ["y"])]), edit)


def bound(key: str | bytes, output: str) -> onnx.ModelProto:
    return edited(trainable, lambda m: m.training_info[0].update_binding.add(key=key, value=output))


def attribute(model: onnx.ModelProto, name: str, **fields: Any) -> onnx.ModelProto:
    """Returns a model whose last node has an attribute of the given fields."""
    given = model.graph.node[-1].attribute
    for index in [i for i, each in enumerate(given) if each.name == name]:
        del given[index]
    given.append(onnx.AttributeProto(name=name, **fields))
    return model


FLOAT, STRING, STRINGS, GRAPH = (
    onnx.AttributeProto.FLOAT,
    onnx.AttributeProto.STRING,
    onnx.AttributeProto.STRINGS,
    onnx.AttributeProto.GRAPH,
)

REFUSED: dict[str, tuple[Callable[[], onnx.ModelProto | bytes], str]] = {
    # what a file cannot be
    "type of elements": (
        lambda: with_gradient([node("Neg", ["x"], ["y"])], inputs=[value("z", kind=999)]),
        "value 'z': its element type 999 does not exist; declare another",
    ),
    "no name in UTF-8": (lambda: utf8(forces(), "slope"), "UTF-8"),
    "no text in UTF-8": (lambda: utf8(affine(), "somebody"), "UTF-8|no training_info"),
    "negative dimension": (
        lambda: with_tensor(tensor(dims=[-1])),
        r">= 0, got \[-1\]",
    ),
    "two negative dimensions": (
        lambda: with_tensor(tensor(dims=[-1, -2], float_data=[1.0, 2.0])),
        r"dimensions must be >= 0, got \[-1, -2\]",
    ),
    "more than there is": (
        lambda: with_tensor(tensor(dims=[10**6, 10**6], float_data=[1.0])),
        "require 1000000000000 elements",
    ),
    "more bytes than there are": (
        lambda: with_tensor(tensor(dims=[2**40], raw_data=bytes(8))),
        "of data, got 8",
    ),
    "more elements than numbers count": (
        lambda: with_tensor(tensor(dims=[2**62] * 4, raw_data=bytes(8))),
        "of data, got 8",
    ),
    "no data": (lambda: with_tensor(tensor()), "of data, got 0"),
    "no type": (lambda: with_tensor(tensor(data_type=0, raw_data=bytes(8))), "DataType, got 0"),
    "unknown type": (
        lambda: with_tensor(tensor(data_type=99, raw_data=bytes(8))),
        "DataType, got 99",
    ),
    "sparse": (sparse, "sparse initializers are not supported"),
    "deep graphs": (lambda: nested(31), "nesting depth 31 exceeds the limit of 30"),
    "deep types": (lambda: nested_type(40), "of its type must be less than 30"),
    # external data
    "absolute path": (
        lambda: with_tensor(external("/etc/hostname")),
        "must be in the model's f",
    ),
    "path upwards": (lambda: with_tensor(external("../data")), "must be in the model's f"),
    "path down and up": (
        lambda: with_tensor(external("a/../../data")),
        "must be in the model's f",
    ),
    "empty path": (lambda: with_tensor(external("")), "must be in the model's f"),
    "path with a NUL": (lambda: with_tensor(external("a\0b")), "must be in the model's f"),
    "long path": (lambda: with_tensor(external("a" * 5000)), "as a relative path"),
    "negative offset": (
        lambda: with_tensor(external("data", offset="-4")),
        "offset must be a number.*, got '-4'",
    ),
    "no offset": (
        lambda: with_tensor(external("data", offset="x")),
        "offset must be a number.*, got 'x'",
    ),
    "huge offset": (
        lambda: with_tensor(external("data", offset="9" * 5000)),
        "offset must be a number.*, got '999",
    ),
    "negative length": (
        lambda: with_tensor(external("data", length="-8")),
        "length must be a number.*, got '-8'",
    ),
    "another length": (
        lambda: with_tensor(external("data", length="80")),
        "require 8 bytes, got length 80",
    ),
    "external strings": (
        lambda: with_tensor(edited_tensor(external("data"), data_type=8)),
        "must not be strings",
    ),
    # functions
    "function that calls itself": (
        lambda: calls([function("F", [call("F")])], "F"),
        "is recursive",
    ),
    "functions that call each other": (
        lambda: calls([function("F", [call("G")]), function("G", [call("F")])], "F"),
        "is recursive",
    ),
    "10 ** 6 calls": (lambda: power(10, 6), "would have 1,"),
    "10 ** 40 calls": (lambda: power(10, 40), "would have 1"),
    "deep calls": (lambda: power(1, 2000), "nested more than 100 deep"),
    "function with too many inputs": (
        lambda: with_gradient(
            [node("F", ["x", "x"], ["y"], domain="f")],
            functions=[function("F", [node("Neg", ["a"], ["b"])])],
        ),
        "inputs",
    ),
    "function of another opset": (
        lambda: calls(
            [
                helper.make_function(
                    "f",
                    "F",
                    ["a"],
                    ["b"],
                    [node("Neg", ["a"], ["b"])],
                    [helper.make_opsetid("", 13)],
                )
            ],
            "F",
        ),
        "[Oo]pset",
    ),
    # graphs
    "cycle": (
        lambda: with_gradient([node("Add", ["x", "z"], ["y"]), node("Neg", ["y"], ["z"])]),
        "contains a cycle",
    ),
    "node that reads itself": (
        lambda: with_gradient([node("Add", ["x", "y"], ["y"])]),
        "contains a cycle",
    ),
    "tensor computed twice": (
        lambda: with_gradient([node("Neg", ["x"], ["y"]), node("Abs", ["x"], ["y"])]),
        "'y' is redeclared",
    ),
    "input computed": (
        lambda: with_gradient([node("Neg", ["x"], ["x"]), node("Abs", ["x"], ["y"])]),
        "'x' is redeclared",
    ),
    "tensor of nobody": (
        lambda: with_gradient([node("Add", ["x", "nobody"], ["y"])]),
        "reads 'nobody', which is not defined",
    ),
    "output of nobody": (
        lambda: with_gradient([node("Neg", ["x"], ["y"])], ["nobody"]),
        "output 'nobody' is not defined",
    ),
    "no operator": (lambda: with_gradient([node("", ["x"], ["y"])]), "no gradient rule"),
    "no inputs": (lambda: with_gradient([node("Add", [], ["y"])]), "Add"),
    "too many inputs": (lambda: with_gradient([node("Neg", ["x"] * 5, ["y"])]), "input size 5"),
    "too many outputs": (
        lambda: with_gradient([node("Neg", ["x"], ["y", *(f"o{n}" for n in range(9))])]),
        "Neg",
    ),
    "attribute of no type": (
        lambda: with_gradient([attribute_node("Cast", "to", type=0)]),
        "Mismatched attribute type",
    ),
    "attribute of another type": (
        lambda: with_gradient([attribute_node("Cast", "to", type=STRING, s=b"x")]),
        "Cast",
    ),
    "attribute of an unknown number": (
        lambda: with_gradient([attribute_node("Cast", "to", type=2, i=999)]),
        "does not specify a valid type",
    ),
    "graph for a number": (
        lambda: with_gradient(
            [attribute_node("Softmax", "axis", type=GRAPH, g=onnx.GraphProto(name="g"))]
        ),
        "Softmax",
    ),
    "If without branches": (
        lambda: with_gradient([node("If", ["c"], ["y"])], inputs=[value("c", (), 9)]),
        "'else_branch' is missing",
    ),
    "If with an empty branch": (
        lambda: with_gradient(
            [
                node(
                    "If",
                    ["c"],
                    ["y"],
                    then_branch=onnx.GraphProto(name="t"),
                    else_branch=onnx.GraphProto(name="e"),
                )
            ],
            inputs=[value("c", (), 9)],
        ),
        "If node has 1 but subgraphs produce 0",
    ),
    "Loop without a body": (
        lambda: with_gradient([node("Loop", ["", "", "x"], ["y"])]),
        "'body' is missing",
    ),
    "Loop with an empty body": (
        lambda: with_gradient([node("Loop", ["", "", "x"], ["y"], body=onnx.GraphProto(name="b"))]),
        "Graph has 0 inputs",
    ),
    "Scan without inputs": (
        lambda: with_gradient(
            [node("Scan", ["x"], ["y"], num_scan_inputs=7, body=onnx.GraphProto(name="b"))]
        ),
        "num_scan_inputs",
    ),
    "axis beyond": (
        lambda: with_gradient([node("Softmax", ["x"], ["y"], axis=7)]),
        "'axis' must be",
    ),
    "permutation of nothing": (
        lambda: with_gradient([node("Transpose", ["x"], ["y"], perm=[5, -3, 5])]),
        "Invalid attribute perm",
    ),
    # nodes of the domain
    "Gradient of nothing": (
        lambda: attribute(forces(), "xs", type=STRINGS),
        "xs is empty",
    ),
    "Gradient without y": (
        lambda: model_of(
            [node("Gradient", ["x"], ["dx"], domain=TRAINING_DOMAIN, xs=["x"])], ["dx"]
        ),
        "missing required attribute 'y'",
    ),
    "Gradient of a number": (
        lambda: attribute(forces(), "y", type=FLOAT, f=1.0),
        "must be of type STRING, got FLOAT",
    ),
    "Gradient of itself": (
        lambda: model_of([gradient(["x"], "dx", ["dx"])], ["dx"]),
        "has no tensor 'dx', which is listed in y",
    ),
    "Gradient of a name that is no text": (
        lambda: attribute(forces(), "y", type=STRING, s=b"\xff\xfe"),
        "UTF-8",
    ),
    "Adam without tensors": (
        lambda: model_of([node("Adam", ["x"], ["y"], domain=TRAINING_DOMAIN)]),
        "Adam node",
    ),
    "Adam of one number": (
        lambda: model_of(
            [node("Adam", ["x"] * 6, ["y"], domain=TRAINING_DOMAIN, alpha="much", beta=0.9)]
        ),
        "Adam node",
    ),
    # training_info
    "binding of nothing": (lambda: bound("nothing", "w_new"), "not an initializer"),
    "binding to nothing": (lambda: bound("b", "nothing"), "updated twice|no output"),
    "binding of an empty name": (lambda: bound("", ""), "not an initializer"),
    "algorithm with a name of the graph": (
        lambda: edited(
            trainable,
            lambda m: m.training_info[0].algorithm.initializer[0].__setattr__("name", "w"),
        ),
        "reads 'learning_rate', which is not defined",
    ),
    "algorithm that reads nothing": (
        lambda: edited(
            trainable, lambda m: m.training_info[0].algorithm.node[0].input.__setitem__(0, "none")
        ),
        "reads 'none'",
    ),
    "metadata that are no JSON": (lambda: with_metadata("{"), "metadata_props"),
    "metadata that are a list": (lambda: with_metadata("[]"), "must be an object, got a list"),
    "metadata that are deep": (lambda: with_metadata("[" * 10**5), "metadata_props"),
    "metadata that are deep objects": (lambda: with_metadata('{"a":' * 10**5), "metadata_props"),
    "metadata with a huge number": (lambda: with_metadata("1" * 10**5), "metadata_props"),
    "metadata that are huge": (lambda: with_metadata(" " * (2**24 + 1)), "must have at most"),
    "copies that are a list": (lambda: parts_of(training_copies=[1]), "training_copies"),
    "copies of numbers": (lambda: parts_of(training_copies={"a": 1}), "training_copies"),
    "loss that is a list": (lambda: parts_of(loss=[]), "loss"),
    "rate that is an object": (lambda: parts_of(learning_rate={}), "learning_rate"),
    "step that is null": (lambda: parts_of(step=None), "step"),
    # initialization
    "initialization without end": (endless, "did not end within"),
    "initialization of 4 TB": (
        lambda: with_initial(
            [
                constant("shape", np.array([10**12])),
                node("ConstantOfShape", ["shape"], ["all"]),
                node("ReduceSum", ["all"], ["sum"], keepdims=0),
                node("Cast", ["sum"], ["start"], to=7),
            ]
        ),
        "bytes, got 4,000,000,000,000",
    ),
    "initialization of another shape": (
        lambda: with_initial(
            [
                constant("shape", np.array([10**12])),
                node("ConstantOfShape", ["shape"], ["start"]),
            ],
            value("start", [10**12]),
            "w.V",
        ),
        "the shape of a variable cannot change",
    ),
    "initialization with a input": (
        lambda: edited(
            lambda: with_initial([node("Identity", ["given"], ["start"])]),
            lambda m: m.training_info[0].initialization.input.append(value("given", (), 7)),
        ),
        "has an input 'given'",
    ),
    "initialization with a long operator": (long_operator, "did not end within"),
    "initialization with a long function": (long_function, "did not end within"),
    "initialization of sizes that are not known": (
        unknown_size,
        "needs more than 4,294,967,296 bytes of memory",
    ),
    "initialization of sizes that are lies": (
        wrong_size,
        "needs more than 4,294,967,296 bytes of memory",
    ),
    "initialization that fails": (
        lambda: with_initial(
            [
                constant("five", np.array([5])),
                constant("data", np.arange(3)),
                node("Gather", ["data", "five"], ["some"]),
                node("ReduceSum", ["some"], ["start"], keepdims=0),
            ]
        ),
        "Gather",
    ),
    "initialization of nothing": (
        lambda: with_initial([node("Nothing", [], ["start"])]),
        "Nothing",
    ),
}
"""For each name a file, and what the error says."""


def edited_tensor(given: onnx.TensorProto, **fields: Any) -> onnx.TensorProto:
    for field, content in fields.items():
        setattr(given, field, content)
    return given


def attribute_node(kind: str, name: str, **fields: Any) -> onnx.NodeProto:
    result = node(kind, ["x"], ["y"])
    result.attribute.append(onnx.AttributeProto(name=name, **fields))
    return result
