"""Cases that must be refused: invalid models, and the sentence that makes them so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ortops.conformance.case import Call, Case, Citation, Run, float32, parse
from ortops.conformance.gradients import said
from ortops.conformance.training import Entry, trainable

_VARIADIC = (
    "The specification describes the operands and does not say that other numbers of them are "
    "invalid. The case assumes it."
)
_UNDEFINED = "The specification does not say what happens. The case assumes that it is an error."


_SIGNATURE = Citation(
    "IR.md",
    "The number of inputs and outputs in a node, their types, the set of attributes specified in a "
    "node and their types MUST satisfy the constraints imposed by the signature of the node’s "
    "operator.",
)

_CONTROLS = {
    "gradient": "test_gradient_replay",
    "momentum": "test_momentum_second_update",
    "adam": "test_adam_second_update",
    "adagrad": "test_adagrad_second_update",
    "unknown": "test_adam_second_update",
}


def _refused(
    name: str, text: str, inputs: Mapping[str, Any], *cites: Citation, proposal: str = ""
) -> Case:
    """Returns a case of a graph in text form; lists of numbers are float32."""
    feeds = {
        key: np.asarray(value, None if isinstance(value, np.ndarray) else np.float32)
        for key, value in inputs.items()
    }
    return Case(
        f"test_refused_{name}",
        parse(text),
        cites,
        [Run(feeds)],
        proposal=proposal,
        refused=True,
        control=_CONTROLS[name.split("_")[0]],
    )


def _gradients() -> Iterator[Case]:
    x, z = [1.0, -2], [3.0, 0.5]
    head = "g (float[2] x, float[2] z) => (float[2] g)"
    body = "p = Mul (x, z) y = ReduceSum <keepdims = 0> (p)"
    xs = said("Input tensor names of the differentiated sub-graph.")
    count = said(
        "The i-th input is the value of the i-th tensor specified in the concatenated list of the "
        'attribute "xs" and the attribute "zs".'
    )
    target = said("The targeted tensor. It can be viewed as the output of the differentiated")
    table: dict[str, tuple[str, Citation, str]] = {
        "gradient_without_xs": ('Gradient <y = "y"> (x)', xs, ""),
        "gradient_without_y": ('Gradient <xs = ["x"]> (x)', target, ""),
        "gradient_too_few_inputs": ('Gradient <xs = ["x"], zs = ["z"], y = "y"> (x)', count, ""),
        "gradient_too_many_inputs": ('Gradient <xs = ["x"], y = "y"> (x, z)', count, ""),
        "gradient_unknown_x": ('Gradient <xs = ["unknown"], zs = ["z"], y = "y"> (x, z)', xs, ""),
        "gradient_unknown_z": ('Gradient <xs = ["x"], zs = ["unknown"], y = "y"> (x, z)', xs, ""),
        "gradient_unknown_y": (
            'Gradient <xs = ["x"], zs = ["z"], y = "unknown"> (x, z)',
            target,
            "",
        ),
        "gradient_unknown_attribute": (
            'Gradient <xs = ["x"], zs = ["z"], y = "y", ys = ["y"]> (x, z)',
            Citation(
                "IR.md",
                "the set of attributes specified in a node and their types MUST satisfy the "
                "constraints imposed by the signature of the node’s operator.",
            ),
            "",
        ),
        "gradient_x_twice": (
            'Gradient <xs = ["x", "x"], zs = ["z"], y = "y"> (x, x, z)',
            said("the minimal independent variable set"),
            _UNDEFINED,
        ),
        "gradient_x_also_in_zs": (
            'Gradient <xs = ["x"], zs = ["z", "x"], y = "y"> (x, z, x)',
            said("the minimal independent variable set"),
            _UNDEFINED,
        ),
        "gradient_other_shape": (
            'Gradient <xs = ["x"], zs = ["z"], y = "y"> (y, z)',
            said("We can feed different tensors to the identified graph."),
            _UNDEFINED,
        ),
    }
    for name, (node, cite, proposal) in table.items():
        text = f"{head} {{ {body} g = {node} }}"
        yield _refused(name, text, {"x": x, "z": z}, cite, proposal=proposal)


def _gradients_of_other_graphs() -> Iterator[Case]:
    x, z = [1.0, -2], [3.0, 0.5]
    yield _refused(
        "gradient_too_many_outputs",
        "g (float[2] x, float[2] z) => (float[2] g) {"
        " p = Mul (x, z) y = ReduceSum <keepdims = 0> (p)"
        ' g, h = Gradient <xs = ["x"], zs = ["z"], y = "y"> (x, z) }',
        {"x": x, "z": z},
        said("this Gradient only outputs dY/dW and dY/dZ."),
    )
    yield _refused(
        "gradient_dependent_xs",
        "g (float[2] x) => (float[2] g, float[2] h) { h_1 = Exp (x) p = Mul (x, h_1)"
        ' y = ReduceSum <keepdims = 0> (p) g, h = Gradient <xs = ["x", "h_1"], y = "y"> (x, h_1) }',
        {"x": x},
        said(
            'The reason is that "H" can be determined by tensors "W" and "X" and therefore "H" is '
            "not an independent variable."
        ),
    )
    yield _refused(
        "gradient_of_integer_x",
        'g (int64[2] x) => (int64[2] g) { y = Mul (x, x) g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": np.array([1, 2])},
        said("Allow inputs to be any kind of floating-point tensor."),
    )
    yield _refused(
        "gradient_other_type",
        "g (float[2] x, double[2] v) => (float[2] g) { y = Mul (x, x)"
        ' g = Gradient <xs = ["x"], y = "y"> (v) }',
        {"x": x, "v": np.array(x)},
        said("We can feed different tensors to the identified graph."),
        proposal=_UNDEFINED,
    )


def _momentum_nodes() -> dict[str, tuple[str, Citation, str]]:
    """Returns nodes, what they cite, and proposals, by the name of the case."""
    standard = 'alpha = 0.5, beta = 1.0, mode = "standard", norm_coefficient = 0.0'
    mode = Citation("Momentum", 'Its value should be either "nesterov" or "standard".')
    mine = "alpha = 0.5, beta = 1.0, norm_coefficient = 0.0"
    return {
        "momentum_mode": (
            f'Y, V = Momentum <{mine}, mode = "heavy"> (R, T, X, G, H)',
            mode,
            "",
        ),
        "momentum_without_mode": (f"Y, V = Momentum <{mine}> (R, T, X, G, H)", _SIGNATURE, ""),
        "momentum_without_alpha": (
            (
                'Y, V = Momentum <beta = 1.0, mode = "standard", norm_coefficient = 0.0>'
                " (R, T, X, G, H)"
            ),
            _SIGNATURE,
            "",
        ),
        "momentum_too_few_inputs": (
            f"Y, V = Momentum <{standard}> (R, T, X, G)",
            _SIGNATURE,
            _VARIADIC,
        ),
    }


def _other_optimizer_nodes() -> dict[str, tuple[str, Citation, str]]:
    """Returns nodes, what they cite, and proposals, by the name of the case."""
    signature = _SIGNATURE
    adam = Citation("Adam", "The tensors to be optimized, followed by their respective gradients")
    adagrad = Citation(
        "Adagrad", "The current values of optimized tensors, followed by their respective gradients"
    )
    scalar_t = Citation("Adam", 'The update count of "X". It should be a scalar.')
    rate = Citation("Adam", "Constrain input types to float scalars.")
    return {
        "adam_too_few_inputs": ("Y, V = Adam <alpha = 0.5> (R, T, X, G, H)", adam, _VARIADIC),
        "adam_too_many_outputs": (
            "Y, V, W, Z = Adam <alpha = 0.5> (R, T, X, G, H, H)",
            signature,
            _VARIADIC,
        ),
        "adagrad_too_many_inputs": (
            "Y, V = Adagrad <epsilon = 0.5> (R, T, X, G, H, H)",
            adagrad,
            _VARIADIC,
        ),
        "adam_unknown_attribute": (
            "Y, V, W = Adam <gamma = 0.5> (R, T, X, G, H, H)",
            signature,
            "",
        ),
        "adam_attribute_type": ("Y, V, W = Adam <alpha = 1> (R, T, X, G, H, H)", signature, ""),
        "adam_rate_integer": ("Y, V, W = Adam <alpha = 0.5> (T, T, X, G, H, H)", signature, ""),
        "adam_count_float": ("Y, V, W = Adam <alpha = 0.5> (R, R, X, G, H, H)", signature, ""),
        "adam_rate_vector": ("Y, V, W = Adam <alpha = 0.5> (X, T, X, G, H, H)", rate, ""),
        "adam_count_vector": ("Y, V, W = Adam <alpha = 0.5> (R, S, X, G, H, H)", scalar_t, ""),
        "adam_shapes_differ": (
            "Y, V, W = Adam <alpha = 0.5> (R, T, X, R, H, H)",
            Citation("Adam", "element-wise arithmetic operations with numpy-style broadcasting"),
            (
                'The specification says "numpy-style broadcasting" of the operators of its '
                "pseudo-code, and not whether it extends to the inputs. The case assumes that X, "
                "its gradient and its state have one shape."
            ),
        ),
        "unknown_optimizer": (
            "Y, V, W = AdamW <alpha = 0.5> (R, T, X, G, H, H)",
            Citation("IR.md", "MUST satisfy the constraints imposed by the signature of the"),
            "",
        ),
    }


def _optimizers() -> Iterator[Case]:
    x = [1.0, -2]
    for name, (node, cite, proposal) in {**_momentum_nodes(), **_other_optimizer_nodes()}.items():
        text = (
            "u (float R, int64 T, int64[2] S, float[2] X, float[2] G, float[2] H)"
            f" => (float[2] Y) {{ {node} }}"
        )
        feeds = {"R": 0.5, "T": np.asarray(1), "S": np.array([1, 2]), "X": x, "G": x, "H": [1.0, 4]}
        yield _refused(name, text, feeds, cite, proposal=proposal)
    half = (
        "u (float R, int64 T, float16[2] X, float16[2] H) => (float16[2] Y)"
        "{ Y, V, W = Adam <alpha = 0.5> (R, T, X, X, H, H) }"
    )
    half_feeds: dict[str, Any] = {"R": 0.5, "T": np.asarray(1)}
    half_feeds |= {name: np.array([1, 2], np.float16) for name in "XH"}
    yield _refused("adam_float16", half, half_feeds, _SIGNATURE)


def _trained(
    name: str,
    cite: Citation,
    entries: list[Entry],
    *,
    inference: str = "i (float[1] x) => (float[1] y) <float[1] w = {1.0}> { y = Mul (x, w) }",
    proposal: str = "",
    initializes: bool = False,
    twice: tuple[str, str] | None = None,
) -> Case:
    """Returns a case of training_info; ``twice`` is an update binding that is added."""
    model = trainable(inference, *entries)
    if twice:
        model.training_info[0].update_binding.add(key=twice[0], value=twice[1])
    feeds = {"x": float32([1])}
    call = Call("initialize") if initializes else Call("step", feeds)
    return Case(
        f"test_refused_training_{name}",
        model,
        [cite],
        calls=[call],
        proposal=proposal,
        refused=True,
        control="test_training_initialize_other_values" if initializes else "test_training_swap",
    )


def _proto(text: str) -> Citation:
    return Citation("onnx.proto", text)


def _training() -> Iterator[Case]:
    good = "t () => (float[1] w_new) <float[1] c = {2.0}> { w_new = Mul (w, c) }"
    keys = _proto(
        'The keys must appear in names of "ModelProto.graph.initializer" or '
        '"TrainingInfoProto.algorithm.initializer".'
    )
    values = _proto('The values must be output names of "algorithm" or "ModelProto.graph.output".')
    yield _trained("unknown_key", keys, [Entry(good, {"v": "w_new"})])
    yield _trained("key_is_input", keys, [Entry(good, {"x": "w_new"})])
    yield _trained("unknown_value", values, [Entry(good, {"w": "other"})])
    inner = "t () => (float[1] w_new) { s = Mul (w, w) w_new = Mul (w, s) }"
    yield _trained("value_is_no_output", values, [Entry(inner, {"w": "s"})])
    unique = _proto('We have only unique keys in all "update_binding"s')
    yield _trained("key_twice", unique, [Entry(good, {"w": "w_new"})], twice=("w", "w_new"))
    yield _trained(
        "key_in_two_entries",
        unique,
        [Entry(good, {"w": "w_new"}), Entry(good, {"w": "w_new"})],
        proposal="onnx.proto wants keys to be unique in all entries; IR.md, which lets any one "
        "entry run, only in each binding. The case assumes the former.",
    )
    normal = _proto("This combined graph must satisfy the normal ONNX conditions.")
    clash = "t () => (float[1] w_new) { y = Mul (w, w) w_new = Add (w, y) }"
    yield _trained("name_of_inference_again", normal, [Entry(clash, {"w": "w_new"})])
    clash = "t () => (float[1] w_new) <float[1] w = {5.0}> { w_new = Mul (w, w) }"
    yield _trained("initializer_of_inference_again", normal, [Entry(clash, {"w": "w_new"})])
    unknown = "t () => (float[1] w_new) { w_new = Mul (w, nothing) }"
    yield _trained("unknown_tensor", normal, [Entry(unknown, {"w": "w_new"})])
    yield _trained(
        "inference_reads_algorithm",
        _proto('inference node cannot reference inputs of "algorithm".'),
        [Entry("t (float[1] z) => (float[1] w_new) { w_new = Mul (w, z) }", {"w": "w_new"})],
        inference="i (float[1] x) => (float[1] y) <float[1] w = {1.0}> { y = Mul (z, w) }",
    )
    shape = "t () => (float[1, 1] w_new) <int64[2] s = {1, 1}> { w_new = Reshape (w, s) }"
    silent = "The specification does not say that a value has its variable's type and shape."
    yield _trained("other_shape", keys, [Entry(shape, {"w": "w_new"})], proposal=silent)
    kind = "t () => (double[1] w_new) { w_new = Cast <to = 11> (w) }"
    yield _trained("other_type", keys, [Entry(kind, {"w": "w_new"})], proposal=silent)


def _initializations() -> Iterator[Case]:
    good = "t () => (float[1] w_new) <float[1] c = {2.0}> { w_new = Mul (w, c) }"
    start = "s () => (float[1] first) { first = Constant <value = float[1] {9.0}> () }"
    updates = {"w": "w_new"}
    key = Citation(
        "IR.md",
        "Each name specified as a key in the binding MUST be the name of an initializer that "
        "appears in the main inference graph",
    )
    value = Citation(
        "IR.md",
        "Each name specified as a value in the binding MUST be the name of an output of the "
        "TrainingInfoProto.initialization graph.",
    )
    omitted = Citation(
        "IR.md",
        "A TrainingInfoProto.initialization MAY be omitted (only if there are no "
        "initialization_bindings).",
    )
    inputs = _proto("Initialization graph has no input and can have multiple outputs.")
    table = {
        "initialize_unknown_key": (key, start, {"v": "first"}),
        "initialize_unknown_value": (value, start, {"w": "other"}),
        "initialize_by_algorithm": (value, start, {"w": "w_new"}),
        "initialize_omitted": (omitted, "", {"w": "first"}),
        "initialize_with_input": (
            inputs,
            "s (float[1] a) => (float[1] first) { first = Neg (a) }",
            {"w": "first"},
        ),
    }
    for name, (cite, graph, bindings) in table.items():
        entry = Entry(good, updates, graph, bindings)
        yield _trained(name, cite, [entry], initializes=True)


def cases() -> Iterator[Case]:
    """Yields the cases."""
    yield from _gradients()
    yield from _gradients_of_other_graphs()
    yield from _optimizers()
    yield from _training()
    yield from _initializations()
