"""Cases of models with ``training_info``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ortops.conformance.case import Array, Call, Case, Citation, Run, float32, parse
from ortops.conformance.formulas import adagrad, adam, momentum
from ortops.conformance.optimizers import float32_attributes

COMBINED = Citation(
    "onnx.proto",
    "An execution of the training algorithm step is performed by executing the graph obtained by "
    'combining the inference graph (namely "ModelProto.graph") and the "algorithm" graph.',
)
UPDATE = Citation(
    "IR.md",
    "The training step is performed by evaluating the Graph and assigning the outputs produced by "
    "the Graph to the state variables as specified in the update-binding.",
)
_INITIALIZE = Citation(
    "IR.md",
    "The initialization step is performed by evaluating the Graph, and assigning the outputs "
    "produced by the Graph to the _state variables_ of the training model as specified in the "
    "initialization-binding.",
)
_RESET = Citation(
    "onnx.proto",
    "The semantics of the initialization-step is that the initializers in ModelProto.graph and in "
    "TrainingInfoProto.algorithm are first initialized as specified by the initializers in the "
    'graph, and then updated by the "initialization_binding" in every instance in '
    "ModelProto.training_info.",
)
_SEQUENCE = Citation(
    "onnx.proto",
    "Sequentially executing all stored `TrainingInfoProto.algorithm`s and assigning their outputs "
    "following the corresponding `TrainingInfoProto.update_binding`s is one training iteration.",
)
_ANY_ONE = Citation(
    "IR.md",
    "For the training step, a runtime MAY allow users to invoke any one of the "
    "TrainingInfoProto.algorithm",
)
_INFERENCE = Citation(
    "IR.md",
    "an inference method to perform inference using the current values of the learned weights.",
)
_IGNORED = Citation(
    "IR.md",
    "An inference-only runtime can consume a training model ignoring the training-related "
    "extensions.",
)


@dataclass(frozen=True)
class Entry:
    """An entry of ``training_info``: graphs in text form, and bindings."""

    algorithm: str = ""
    updates: Mapping[str, str] = field(default_factory=dict)
    initialization: str = ""
    initial: Mapping[str, str] = field(default_factory=dict)


def trainable(inference: str, *entries: Entry) -> onnx.ModelProto:
    """Returns the model of an inference graph and entries of ``training_info``."""
    model = parse(inference)
    if not any(i.domain == "ai.onnx.preview.training" for i in model.opset_import):
        raise ValueError("the training domain is missing")
    for entry in entries:
        info = model.training_info.add()
        if entry.algorithm:
            info.algorithm.CopyFrom(parse(entry.algorithm).graph)
        if entry.initialization:
            info.initialization.CopyFrom(parse(entry.initialization).graph)
        for bindings, pairs in (
            (info.update_binding, entry.updates),
            (info.initialization_binding, entry.initial),
        ):
            for key, value in pairs.items():
                bindings.add(key=key, value=value)
    return model


def combined(model: onnx.ModelProto, entry: int = 0) -> onnx.ModelProto:
    """Returns a step as a model without ``training_info``.

    It is the concatenation that onnx.proto describes. Variables that the entry updates are inputs,
    behind those of the two graphs, and their new values outputs, behind those of the graphs.
    """
    flat = onnx.ModelProto()
    flat.CopyFrom(model)
    info = flat.training_info[entry]
    for name in ("input", "initializer", "output", "node", "value_info", "sparse_initializer"):
        getattr(flat.graph, name).extend(getattr(info.algorithm, name))
    initializers = {initializer.name: initializer for initializer in flat.graph.initializer}
    declared = {value.name for value in (*flat.graph.input, *flat.graph.output)}
    for pair in info.update_binding:
        tensor = initializers.pop(pair.key)
        if pair.key not in declared:
            kind = (tensor.data_type, list(tensor.dims))
            flat.graph.input.append(onnx.helper.make_tensor_value_info(pair.key, *kind))
        flat.graph.initializer.remove(tensor)
    del flat.training_info[:]
    return flat


# ------------------------------------------------------------------------------- linear regression

_LINE = (
    "line (float[n, 2] x) => (float[n, 1] y) <float[2, 1] w = {0.5, -1.0}> { y = MatMul (x, w) }"
)
_LOSS = (
    "e = Sub (y, targets) s = Mul (e, e) loss = ReduceMean <keepdims = 0> (s)"
    ' g = Gradient <xs = ["w"], zs = ["x", "targets"], y = "loss"> (w, x, targets)'
)
_LINE_OUTPUTS = "float loss, float[2, 1] w_new"


def _batches(count: int) -> list[dict[str, Array]]:
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, (count, 4, 2)).astype(np.float32)
    targets = x @ float32([[2.0], [1.0]]) + np.float32(0.25)
    return [{"x": a, "targets": b} for a, b in zip(x, targets, strict=True)]


def _line(w: Array, batch: Mapping[str, Array]) -> tuple[Array, Any, Array]:
    """Returns outputs, loss and gradient."""
    x, targets = (batch[name].astype(np.float64) for name in ("x", "targets"))
    y = x @ w
    e = y - targets
    return y, np.mean(e * e), 2 * x.T @ e / e.size


def rounded(values: Mapping[str, Any], integers: Sequence[str] = ("t",)) -> dict[str, Array]:
    """Returns arrays of float32, and of int64 for the names ``integers``."""
    return {
        name: np.asarray(value, np.int64 if name in integers else np.float32)
        for name, value in values.items()
    }


_OPTIMIZERS: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "gradient_descent": ("d = Mul (r, g) w_new = Sub (w, d)", None, {}, ""),
    "adagrad": (
        "w_new, h_new = Adagrad <decay_factor = 0.25, epsilon = 0.001> (r, t, w, g, h)",
        adagrad,
        {"decay_factor": 0.25, "epsilon": 0.001},
        "h",
    ),
    "adam": (
        (
            "w_new, v_new, h_new = Adam <alpha = 0.75, beta = 0.5, norm_coefficient_post = 0.125>"
            " (r, t, w, g, v, h)"
        ),
        adam,
        {"alpha": 0.75, "beta": 0.5, "norm_coefficient_post": 0.125},
        "vh",
    ),
    "momentum": (
        (
            'w_new, v_new = Momentum <alpha = 0.75, beta = 0.5, mode = "nesterov",'
            " norm_coefficient = 0.125> (r, t, w, g, v)"
        ),
        momentum,
        {"alpha": 0.75, "beta": 0.5, "mode": "nesterov", "norm_coefficient": 0.125},
        "v",
    ),
}


def _line_entry(node: str, states: str) -> Entry:
    """Returns the algorithm that trains the line, and an initialization that resets it."""
    variables = [*states, *("t" if states else "")]
    kinds = {"v": "float[2, 1]", "h": "float[2, 1]", "t": "int64"}
    starts = {"v": "{0.0, 0.0}", "h": "{0.0, 0.0}", "t": "{0}"}
    initializers = [f"{kinds[name]} {name} = {starts[name]}" for name in variables]
    outputs = "".join(f", {kinds[name]} {name}_new" for name in variables)
    count = "t_new = Add (t, one)" if states else ""
    declared = ", ".join([*initializers, "float r = {0.125}", "int64 one = {1}"])
    zeros = " ".join(
        f"{name}_0 = Constant <value = {kinds[name]} {starts[name]}> ()" for name in variables
    )
    firsts = "".join(f", {kinds[name]} {name}_0" for name in variables)
    return Entry(
        f"train (float[n, 1] targets) => ({_LINE_OUTPUTS}{outputs}) <{declared}>"
        f" {{ {_LOSS} {node} {count} }}",
        {"w": "w_new", **{name: f"{name}_new" for name in variables}},
        f"start () => (float[2, 1] w_0{firsts})"
        f" {{ w_0 = Constant <value = float[2, 1] {{0.5, -1.0}}> () {zeros} }}",
        {"w": "w_0", **{name: f"{name}_0" for name in variables}},
    )


def _trained(name: str, batches: list[dict[str, Array]]) -> Iterator[tuple[Call, dict[str, Array]]]:
    """Yields each step's call and the state before it."""
    _, formula, attributes, letters = _OPTIMIZERS[name]
    exact = float32_attributes(attributes)
    state: dict[str, Any] = {"w": np.array([[0.5], [-1.0]])}
    state |= {letter: np.zeros((2, 1)) for letter in letters}
    state |= {"t": 0} if letters else {}
    for batch in batches:
        before = rounded(state)
        y, loss, g = _line(state["w"], batch)
        if formula is None:
            results = [state["w"] - 0.125 * g]
        else:
            states = [state[letter] for letter in letters]
            results = formula(0.125, state["t"], state["w"], g, *states, **exact)
        new = dict(zip(("w", *letters), results, strict=True))
        state = {**new, **({"t": state["t"] + 1} if letters else {})}
        outputs = rounded({"y": y, "loss": loss, "w_new": state["w"]})
        yield Call("step", batch, outputs, rounded(state)), before


def _ten_steps() -> Iterator[Case]:
    """Yields ten steps of each optimizer, as training_info and as combined graphs."""
    batches = _batches(10)
    for name, (node, _, _, letters) in _OPTIMIZERS.items():
        model = trainable(_LINE, _line_entry(node, letters))
        steps = list(_trained(name, batches))
        first = Run({"x": batches[0]["x"]}, {"y": steps[0][0].outputs["y"]})
        calls = [call for call, _ in steps]
        w = calls[-1].state["w"]
        y = batches[0]["x"].astype(np.float64) @ w.astype(np.float64)
        calls.append(Call("infer", {"x": batches[0]["x"]}, {"y": y.astype(np.float32)}))
        cites = [COMBINED, UPDATE, _INFERENCE, _IGNORED]
        yield Case(f"test_training_{name}", model, cites, [first], calls, rtol=1e-4, atol=1e-6)
        flat = combined(model)
        runs = []
        for call, before in steps:
            updated = {f"{key}_new": value for key, value in call.state.items()}
            runs.append(Run({**call.inputs, **before}, {**call.outputs, **updated}))
        ordered = [value.name for value in flat.graph.output]
        runs = [Run(r.inputs, {key: r.outputs[key] for key in ordered}) for r in runs]
        # each run begins with float32 state, so that errors do not add up
        yield Case(f"test_training_{name}_combined", flat, [COMBINED], runs, rtol=1e-4, atol=1e-5)


def _initialization() -> Iterator[Case]:
    """Yields cases of initialization graphs."""
    batches = _batches(3)
    node, _, _, letters = _OPTIMIZERS["adam"]
    model = trainable(_LINE, _line_entry(node, letters))
    steps = [call for call, _ in _trained("adam", batches)]
    start = rounded({"w": [[0.5], [-1]], "v": [[0], [0]], "h": [[0], [0]], "t": 0})
    calls = [*steps, Call("initialize", state=start), *steps]
    cites = [_INITIALIZE, Citation("onnx.proto", "a use case is resetting the number of training")]
    yield Case("test_training_initialize_resets", model, cites, calls=calls, rtol=1e-4, atol=1e-6)

    entry = _line_entry(*_OPTIMIZERS["gradient_descent"][::3])
    other = Entry(
        entry.algorithm,
        entry.updates,
        "start () => (float[2, 1] random) { random = Constant <value = float[2, 1] {3.0, 4.0}> ()}",
        {"w": "random"},
    )
    model = trainable(_LINE, other)
    x = batches[0]["x"]

    def infer(w: Array) -> Call:
        return Call("infer", {"x": x}, {"y": (x.astype(np.float64) @ w).astype(np.float32)})

    untrained, initial = np.array([[0.5], [-1.0]]), np.array([[3.0], [4.0]])
    _, loss, g = _line(initial, batches[0])
    step = Call("step", batches[0], rounded({"loss": loss}), rounded({"w": initial - 0.125 * g}))
    calls = [infer(untrained), Call("initialize", state=rounded({"w": initial})), infer(initial)]
    cites = [
        _INITIALIZE,
        Citation(
            "IR.md",
            "All state variables are pre-initialized to the value specified in the corresponding "
            "initializer.",
        ),
    ]
    name = "test_training_initialize_other_values"
    yield Case(name, model, cites, calls=[*calls, step], rtol=1e-4, atol=1e-6)


_COUNTER = "count (float[1] x) => (float[1] y) <float[1] w = {1.0}> { y = Mul (x, w) }"


def _of_initializers() -> Iterator[Case]:
    """Yields what the specification contradicts: variables that no initialization binds."""
    add = "train () => (float[1] w_new, int64 t_new) <int64 t = {5}, int64 one = {1}>"
    entry = Entry(
        f"{add} {{ w_new = Add (w, w) t_new = Add (t, one) }}",
        {"w": "w_new", "t": "t_new"},
        "start () => (int64 zero) { zero = Constant <value = int64 {0}> () }",
        {"t": "zero"},
    )
    x = float32([3])
    calls = [
        Call("step", {"x": x}, {"y": x}, rounded({"w": [2], "t": 6})),
        Call("step", {"x": x}, {"y": 2 * x}, rounded({"w": [4], "t": 7})),
        Call("initialize", state=rounded({"w": [1], "t": 0})),
        Call("step", {"x": x}, {"y": x}, rounded({"w": [2], "t": 1})),
    ]
    proposal = (
        "onnx.proto says that initialization resets initializers before it applies the bindings, "
        "IR.md only that it applies them. The case assumes the former: a variable that no "
        "initialization_binding names goes back to its initializer."
    )
    name = "test_training_initialize_unbound"
    yield Case(name, trainable(_COUNTER, entry), [_RESET], calls=calls, proposal=proposal)
    without = Entry(entry.algorithm, entry.updates)
    calls = [
        Call("step", {"x": x}, {}, rounded({"w": [2], "t": 6})),
        Call("initialize", state=rounded({"w": [1], "t": 5})),
    ]
    cites = [
        _RESET,
        Citation(
            "IR.md",
            "A TrainingInfoProto.initialization MAY be omitted (only if there are no "
            "initialization_bindings).",
        ),
    ]
    name = "test_training_initialize_omitted"
    yield Case(name, trainable(_COUNTER, without), cites, calls=calls, proposal=proposal)


# ------------------------------------------------------------------------------------- bindings


def _of_bindings() -> Iterator[Case]:
    """Yields cases of what bindings may name."""
    x = float32([3])
    swap = Entry(
        "swap () => (float[1] b_new, float[1] w_new) <float[1] b = {7.0}>"
        " { b_new = Identity (w) w_new = Identity (b) }",
        {"w": "w_new", "b": "b_new"},
    )
    calls = [
        Call("step", {"x": x}, {"y": x}, rounded({"w": [7], "b": [1]})),
        Call("step", {"x": x}, {"y": 7 * x}, rounded({"w": [1], "b": [7]})),
    ]
    yield Case("test_training_swap", trainable(_COUNTER, swap), [UPDATE, COMBINED], calls=calls)

    crossed = Entry(swap.algorithm, {"w": "w_new", "b": "w_new"})
    calls = [Call("step", {"x": x}, {"y": x}, rounded({"w": [7], "b": [7]}))]
    cites = [
        Citation(
            "IR.md",
            "each key is the name of a state variable, and the value is the name of an output of "
            "the (initialization) Graph.",
        )
    ]
    model = trainable(_COUNTER, crossed)
    proposal = (
        "The specification demands that keys are unique and does not say so of values. The case "
        "assumes that one output may update two variables."
    )
    yield Case("test_training_one_value_twice", model, cites, calls=calls, proposal=proposal)

    output = Entry(
        "keep () => (float[1] twice) <float[1] last = {0.0}> { twice = Add (last, last) }",
        {"last": "y"},
    )
    calls = [
        Call("step", {"x": x}, {"y": x, "twice": 0 * x}, {"last": x}),
        Call("step", {"x": 2 * x}, {"y": 2 * x, "twice": 2 * x}, {"last": 2 * x}),
    ]
    text = 'The values must be output names of "algorithm" or "ModelProto.graph.output".'
    cites = [Citation("onnx.proto", text)]
    proposal = (
        "onnx.proto lets update bindings name outputs of the inference graph, IR.md only outputs "
        "of the algorithm. The case assumes the former."
    )
    name = "test_training_output_of_inference"
    yield Case(name, trainable(_COUNTER, output), cites, calls=calls, proposal=proposal)


def _of_constants() -> Iterator[Case]:
    """Yields cases of initializers that no binding names, and of an empty algorithm."""
    x = float32([3])
    constant = Entry(
        "train (float[1] z) => (float[1] w_new) <float[1] c = {10.0}> {"
        "a = Mul (z, c) w_new = Add (w, a) }",
        {"w": "w_new"},
    )
    z = float32([0.5])
    calls = [Call("infer", {"x": x}, {"y": x}, {})]
    for count in (1, 2):
        state = rounded({"w": [1 + 5 * count]})
        calls.append(Call("step", {"x": x, "z": z}, {"w_new": state["w"]}, state))
    calls.append(Call("infer", {"x": x}, {"y": 11 * x}, {}))
    cites = [
        _INFERENCE,
        Citation(
            "onnx.proto",
            "inference graph can always be run independently without training information.",
        ),
    ]
    name = "test_training_constant_of_algorithm"
    yield Case(name, trainable(_COUNTER, constant), cites, calls=calls)

    calls = [Call("step", {"x": x}, {"y": x}), Call("infer", {"x": x}, {"y": x})]
    text = "Evaluating the default training step never update any initializers."
    cites = [Citation("onnx.proto", text)]
    yield Case("test_training_empty", trainable(_COUNTER, Entry()), cites, calls=calls)


def _after_inference() -> Iterator[Case]:
    """Yields the figure of onnx.proto: MatMul → Sigmoid → Add."""
    inference = (
        "sigmoid (float[1, 2] tensor_a) => (float[1, 1] tensor_d)"
        "<float[2, 1] tensor_b = {0.5, -0.25}> {"
        "tensor_c = MatMul (tensor_a, tensor_b) tensor_d = Sigmoid (tensor_c) }"
    )
    entry = Entry(
        "train () => (float[1, 1] tensor_e, float[2, 1] b_new) {"
        "tensor_e = Add (tensor_d, tensor_c)"
        ' g = Gradient <xs = ["tensor_b"], zs = ["tensor_a"], y = "tensor_e"> (tensor_b, tensor_a)'
        " b_new = Sub (tensor_b, g) }",
        {"tensor_b": "b_new"},
    )
    a, b = np.array([[1.0, -2.0]]), np.array([[0.5], [-0.25]])
    calls = []
    for _ in range(10):
        c = a @ b
        d = 1 / (1 + np.exp(-c))
        b = b - a.T * (d * (1 - d) + 1)
        outputs = rounded({"tensor_d": d, "tensor_e": c + d})
        calls.append(Call("step", rounded({"tensor_a": a}), outputs, rounded({"tensor_b": b})))
    cites = [
        Citation(
            "onnx.proto",
            'Notice that an input of a node in the "algorithm" graph may reference the output of a '
            "node in the inference graph (but not the other way round).",
        )
    ]
    model = trainable(inference, entry)
    yield Case("test_training_after_inference", model, cites, calls=calls, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------- several entries

_PRODUCT = (
    "product (float x) => (float y) <float a = {1.0}, float b = {2.0}> "
    "{ p = Mul (a, b) y = Mul (p, x) }"
)


def _block(own: str) -> Entry:
    """Returns an algorithm that moves one factor; all use the same names for their tensors."""
    return Entry(
        f"train_{own} (float target) => (float loss, float new) <float r = {{0.125}}> {{"
        "e = Sub (y, target) loss = Mul (e, e)"
        f' g = Gradient <xs = ["{own}"], zs = ["x", "target"], y = "loss"> ({own}, x, target)'
        f" d = Mul (r, g) new = Sub ({own}, d) }}",
        {own: "new"},
    )


def _several_entries() -> Iterator[Case]:
    model = trainable(_PRODUCT, _block("a"), _block("b"))
    x, target = 0.5, 4.0
    feeds = rounded({"x": x, "target": target})

    def moved(a: float, b: float, own: str) -> tuple[float, float]:
        slope = 2 * (a * b * x - target) * x
        return (a - 0.125 * slope * b, b) if own == "a" else (a, b - 0.125 * slope * a)

    a, b = 1.0, 2.0
    calls = []
    for _ in range(10):
        a, b = moved(*moved(a, b, "a"), "b")
        calls.append(Call("step", feeds, {}, rounded({"a": a, "b": b})))
    cites = [
        _SEQUENCE,
        Citation(
            "onnx.proto",
            "If the targeted training algorithm contains consecutive update steps (such as block "
            "coordinate descent methods), the user needs to create a TrainingInfoProto for each "
            "step.",
        ),
    ]
    proposal = (
        'onnx.proto says that variables "may be immediately updated" after each algorithm. The '
        "case assumes that they are: a later entry reads what an earlier one has assigned."
    )
    name = "test_training_several_entries"
    options: dict[str, Any] = {"proposal": proposal, "rtol": 1e-4, "atol": 1e-6}
    yield Case(name, model, cites, calls=calls, **options)

    a, b = 1.0, 2.0
    calls = []
    for entry in (1, 1, 0, 1, 0, 0, 1, 0, 1, 1):
        a, b = moved(a, b, "ab"[entry])
        calls.append(Call("step", feeds, {}, rounded({"a": a, "b": b}), entry=entry))
    proposal = (
        'onnx.proto calls all entries in order one iteration, IR.md says that a runtime "MAY" run '
        "any one of them. The case assumes that it can."
    )
    name = "test_training_one_of_several_entries"
    options["proposal"] = proposal
    yield Case(name, model, [_ANY_ONE], calls=calls, **options)


def _initialized_entries() -> Iterator[Case]:
    """Yields two entries with an initialization each."""
    first = Entry(
        "one () => (float new) <float s = {1.0}> { new = Add (a, s) }",
        {"a": "new"},
        "start_one () => (float first) { first = Constant <value = float {10.0}> () }",
        {"a": "first"},
    )
    second = Entry(
        "two () => (float new) <float s = {100.0}> { new = Add (b, s) }",
        {"b": "new"},
        "start_two () => (float first) { first = Constant <value = float {20.0}> () }",
        {"b": "first"},
    )
    feeds = rounded({"x": 1})
    calls = [
        Call("step", feeds, {}, rounded({"a": 2, "b": 102})),
        Call("initialize", state=rounded({"a": 10, "b": 20})),
        Call("step", feeds, {}, rounded({"a": 11, "b": 120})),
    ]
    cites = [
        Citation(
            "IR.md",
            "If the training model has more than one instance of TrainingInfoProto, the "
            "initialization step corresponding to each is performed in order.",
        ),
        Citation("onnx.proto", 'the "algorithm.initializer" in the same TrainingInfoProto.'),
    ]
    name = "test_training_initialize_several_entries"
    proposal = (
        "The specification does not say whether graphs of different entries share their names. "
        "The case assumes that they do not: each is combined with the inference graph alone."
    )
    model = trainable(_PRODUCT, first, second)
    yield Case(name, model, cites, calls=calls, proposal=proposal)


def cases() -> Iterator[Case]:
    """Yields the cases."""
    yield from _ten_steps()
    yield from _initialization()
    yield from _of_initializers()
    yield from _of_bindings()
    yield from _of_constants()
    yield from _after_inference()
    yield from _several_entries()
    yield from _initialized_entries()
