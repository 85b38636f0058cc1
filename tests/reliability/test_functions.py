"""Function: any kind of model, method and option, compared with finite differences.

The oracle runs the model in stock onnxruntime alone, at inputs and weights moved along random
directions. ORTOPS_FUNCTIONS_DRAWS says how many combinations are drawn, and ORTOPS_FUNCTIONS_SEED
which ones.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from attacks import SOAK
from onnx import numpy_helper
from running import plain_session

from ortops import Function, ModelError

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

DRAWS = int(os.environ.get("ORTOPS_FUNCTIONS_DRAWS", str(40 * SOAK)))
"""How many combinations are drawn in addition to those of each kind of model."""

SEED = int(os.environ.get("ORTOPS_FUNCTIONS_SEED", "0"))
"""Determines which ones."""

_OPSETS = '["": 21, "ai.onnx.ml": 3, "com.microsoft": 1, "local": 1]'

KINDS = {
    "dense": """(T[n, 3] x) => (T[n, 2] y) <T[3, 2] w = {1, -2, 0.3, 0.4, 0.5, -0.6}>
        { a = MatMul(x, w)  y = Tanh(a) }""",
    "odd names": """(T[n] "x:0", T[n] seed_y, T[n] self) => (T[n] y)
        <T vjp_seed_y = {0.5}>
        { "jvp_y" = Mul("x:0", seed_y)  "a.b/c" = Mul(jvp_y, vjp_seed_y)
        d = Add("a.b/c", self)  y = Tanh(d) }""",
    "tied weight": """(T[n, 2] x) => (T[n, 2] y) <T[2, 2] w = {0.1, 0.2, -0.3, 0.4}>
        { a = MatMul(x, w)  b = Tanh(a)  wt = Transpose(w)  y = MatMul(b, wt) }""",
    "weight in a Constant": """(T[n, 2] x) => (T[n, 2] y)
        { w = Constant <value = T[2, 2] {1, 2, -3, 4}> ()  wt = Transpose(w)
        a = MatMul(x, wt)  y = Tanh(a) }""",
    "local function": """(T[n, 2] x) => (T[n, 2] y) <T[2, 2] w = {1, 2, -3, 4}>
        { a = local.layer(x, w)  y = local.layer(a, w) }
        <domain: "local", opset_import: ["": 21]> layer (p, q)  => (r)
        { c = Constant <value = T {0.5}> ()  s = MatMul(p, q)  t = Mul(s, c)  r = Tanh(t) }""",
    "scalar input": """(T x, T[2] z) => (T[2] y) { a = Mul(x, z)  y = Tanh(a) }""",
    "unused input": """(T[n] x, T[n] z) => (T[n] y) { y = Tanh(x) }""",
    "output is an input": """(T[n] x) => (T[n] x, T[n] y) { y = Tanh(x) }""",
    "output is a weight": """(T[n] x) => (T[2] w, T[n] y) <T[2] w = {1, 2}>
        { s = ReduceSum <keepdims = 0> (w)  a = Mul(x, s)  y = Tanh(a) }""",
    "output is a constant": """(T[n] x) => (T[n] y, T[2] c)
        { y = Tanh(x)  c = Constant <value = T[2] {1, 2}> () }""",
    "integers": """(int64[n] i, T[n, 2] x) => (T[n, 2] y, int64[n] j, bool[n, 2] k)
        <T[7, 2] table = {1, 2, 3, 4, 5, 6, 7, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7}>
        { rows = Gather(table, i)  a = Mul(rows, x)  y = Tanh(a)  j = Neg(i)
        zero = Constant <value = T {0}> ()  k = Greater(x, zero) }""",
    "strings": """(string[n] s, T[n] x) => (T[n] y, string[n] t)
        { l = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_floats = [1.0, 2.0]> (s)
        c = CastLike(l, x)  a = Mul(c, x)  y = Tanh(a)  t = Identity(s) }""",
    "sequence input": """(seq(T[m]) s, T[n] x) => (T[n] y)
        { a = ConcatFromSequence <axis = 0> (s)  b = ReduceSum <keepdims = 0> (a)
        c = Mul(b, x)  y = Tanh(c) }""",
    "sequence output": """(T[4] x) => (seq(T[2]) s, T[4] y)
        { two = Constant <value = int64 {2}> ()  s = SplitToSequence <axis = 0> (x, two)
        first = SequenceAt(s, zero)  a = Concat <axis = 0> (first, first)  b = Mul(a, x)
        zero = Constant <value = int64 {0}> ()  y = Tanh(b) }""".replace(
        "zero = Constant <value = int64 {0}> ()  y", "y"
    ).replace("two = C", "zero = Constant <value = int64 {0}> ()  two = C"),
    "optional input": """(optional(T[n]) o, T[n] x) => (T[n] y)
        { a = OptionalGetElement(o)  b = Mul(a, x)  y = Tanh(b) }""",
    "maps": """(float[n, 3] x) => (int64[n] label, seq(map(int64, float)) maps, float[n, 2] y)
        { label, y = ai.onnx.ml.LinearClassifier <classlabels_ints = [0, 1], multi_class = 1,
        coefficients = [1.0, 2.0, 3.0, -1.0, -2.0, 0.5], intercepts = [0.1, 0.2],
        post_transform = "SOFTMAX"> (x)
        maps = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (y) }""",
    "computed shape": """(T[n, 2] x) => (T[n, 2] y)
        { s = Shape(x)  e = Constant <value = T[1] {0.5}> ()  a = Expand(e, s)  b = Mul(a, x)
        c = Tanh(b)  y = Reshape(c, s) }""",
    "statistics": """(T[n, 2] x) => (T[n, 2] y, T[2] m, T[2] v)
        <T[2] s = {1, 2}, T[2] b = {0, 1}, T[2] m0 = {0, 1}, T[2] v0 = {1, 2}>
        { y, m, v = BatchNormalization <training_mode = 1> (x, s, b, m0, v0) }""",
    "two types": """(double[n] x, float[n] z) => (double[n] y, float[n] u)
        { a = Cast <to = 1> (x)  b = Mul(a, z)  u = Tanh(b)  c = Cast <to = 11> (b)
        y = Mul(c, x) }""",
    "branches": """(bool c, T[n] x) => (T[n] y) <T[1] w = {3}>
        { y = If(c) <then_branch = yes () => (T[n] p) { p = Mul(x, w) },
        else_branch = no () => (T[n] q) { q = Tanh(x) }> }""",
    "loop": """(T[n] x) => (T[n] y) <T[1] w = {0.5}>
        { times = Constant <value = int64 {3}> ()  go = Constant <value = bool {1}> ()
        y = Loop(times, go, x) <body = step (int64 i, bool c, T[n] before) =>
        (bool d, T[n] after) { d = Identity(c)  e = Mul(before, w)  after = Tanh(e) }> }""",
    "convolution": """(float[n, 1, 5, 5] x) => (float[n, 2] y)
        <float[2, 1, 2, 2] w = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6, -0.7, 0.8}, float[2] b = {1, 2}>
        { a = Conv(x, w, b)  c = Tanh(a)  d = GlobalAveragePool(c)  y = Flatten(d) }""",
    "quantized weights": """(float[n, 2] x) => (float[n, 2] y)
        <float s = {0.05}, int8 z = {0}, int8[2, 2] q = {10, -20, 30, 40}>
        { w = DequantizeLinear(q, s, z)  first = Constant <value = int64 {0}> ()
        row = Gather(w, first)  a = Mul(x, row)  y = Tanh(a) }""",
    "half weights": """(float[n, 2] x) => (float[n, 2] y)
        <float16[2, 2] h = {15360, 16384, 49664, 17408}>
        { w = Cast <to = 1> (h)  a = MatMul(x, w)  y = Tanh(a) }""",
}
"""Models by the kind of file, where T is the type of numbers."""

EDITS: Mapping[str, Callable[[onnx.ModelProto], None]] = {
    "none": lambda model: None,
    "defaults are inputs first": lambda model: _expose(model),
    "unknown ranks": lambda model: _forget(model, ranks=True),
    "unknown sizes": lambda model: _forget(model, ranks=False),
}
"""Changes of a file that mean the same function."""

METHODS = (
    *("call", "vjp", "jvp", "jacobian", "value_and_grad", "hessian", "hvp", "reading"),
    *("derivative vjp", "derivative jvp", "vjp of vjp"),
)


@dataclass(frozen=True)
class Draw:
    """A combination: a kind of model and how it is called."""

    kind: str = "dense"
    method: str = "vjp"
    edit: str = "none"
    rows: int = 3
    double: bool = True
    weights: bool = True
    replaced: bool = False
    seed: int = 0


def _expose(model: onnx.ModelProto) -> None:
    """Makes initializers inputs with a default value, in front of the others."""
    inputs = list(model.graph.input)
    del model.graph.input[:]
    for each in model.graph.initializer:
        value = onnx.helper.make_tensor_value_info(each.name, each.data_type, list(each.dims))
        model.graph.input.append(value)
    model.graph.input.extend(inputs)


def _forget(model: onnx.ModelProto, *, ranks: bool) -> None:
    """Removes the shapes of inputs and outputs, or the names of their symbolic sizes."""
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.tensor_type
        if value.type.HasField("tensor_type") and len(kind.shape.dim):
            if ranks:
                kind.ClearField("shape")
                continue
            for dim in kind.shape.dim:
                dim.ClearField("dim_param")


def model_of(draw: Draw) -> onnx.ModelProto:
    text = f"<ir_version: 10, opset_import: {_OPSETS}> f {KINDS[draw.kind]}"
    for before in ("T[", "T ", "T{"):
        text = text.replace(f" {before}", f" {'double' if draw.double else 'float'}{before[1]}")
        text = text.replace(f"({before}", f"({'double' if draw.double else 'float'}{before[1]}")
        text = text.replace(f"<{before}", f"<{'double' if draw.double else 'float'}{before[1]}")
    model = onnx.parser.parse_model(text)
    EDITS[draw.edit](model)
    return model


def inputs_of(draw: Draw, model: onnx.ModelProto) -> Arrays:
    """Returns random inputs, in the order of the file."""
    rng = np.random.default_rng(draw.seed)
    defaults = {each.name for each in model.graph.initializer}
    plain = model_of(Draw(draw.kind, double=draw.double))
    found: dict[str, Any] = {}
    for value in plain.graph.input:
        if value.name in defaults:
            continue
        kind = value.type
        if kind.HasField("sequence_type"):
            dtype = _dtype(kind.sequence_type.elem_type.tensor_type.elem_type)
            found[value.name] = [rng.normal(size=2).astype(dtype) for _ in range(2)]
            continue
        tensor = kind.tensor_type
        if kind.HasField("optional_type"):
            tensor = kind.optional_type.elem_type.tensor_type
        shape = [dim.dim_value or draw.rows for dim in tensor.shape.dim]
        if tensor.elem_type == onnx.TensorProto.STRING:
            found[value.name] = rng.choice(["a", "b"], shape).astype(object)
        elif tensor.elem_type == onnx.TensorProto.INT64:
            found[value.name] = rng.integers(0, 7, shape)
        elif tensor.elem_type == onnx.TensorProto.BOOL:
            found[value.name] = np.asarray(rng.integers(0, 2, shape)).astype(bool)
        else:
            found[value.name] = np.asarray(rng.normal(size=shape)).astype(_dtype(tensor.elem_type))
    return found


def _dtype(kind: int) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(kind)


def with_values(model: onnx.ModelProto, values: Mapping[str, Array]) -> onnx.ModelProto:
    """Returns the model with other values of initializers and Constant nodes."""
    result = onnx.ModelProto.FromString(model.SerializeToString())
    for name, array in values.items():
        tensor = numpy_helper.from_array(array, name)
        found = [each for each in result.graph.initializer if each.name == name]
        found += [n.attribute[0].t for n in result.graph.node if list(n.output) == [name]]
        assert len(found) == 1, name
        found[0].CopyFrom(tensor)
    return result


@functools.lru_cache(maxsize=8)
def _session(content: bytes) -> onnxruntime.InferenceSession:
    return plain_session(content)


def stock(model: onnx.ModelProto, values: Mapping[str, Any]) -> list[Any]:
    """Returns the outputs of stock onnxruntime for inputs and weights."""
    inputs = {v.name for v in model.graph.input} - {v.name for v in model.graph.initializer}
    weights = {name: array for name, array in values.items() if name not in inputs}
    moved = with_values(model, weights)
    for node in moved.graph.node:  # onnxruntime overwrites what is not an output
        if node.op_type == "BatchNormalization":
            moved.graph.output.extend(
                onnx.ValueInfoProto(name=name)
                for name in node.output
                if name not in {v.name for v in moved.graph.output}
            )
    names = [value.name for value in model.graph.output]
    found = _session(moved.SerializeToString())
    return found.run(names, {name: values[name] for name in inputs})


def is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def _one_thread() -> onnxruntime.SessionOptions:
    """Returns the options of `plain_session`, with which results are bit-equal."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return options


class Case:
    """A draw with its model, values and random directions."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.model = draw, model_of(draw)
        self.scalar = draw.method in ("value_and_grad", "hessian", "hvp")
        if self.scalar:
            _add_loss(self.model)
        self.xs = inputs_of(draw, self.model)
        f = Function(self.model, sess_options=_one_thread())
        # Weights in attributes are not moved.
        stored = {v.name for v in self.model.graph.initializer}
        stored |= {n.output[0] for n in self.model.graph.node if n.op_type == "Constant"}
        if draw.replaced:
            scale = {name: array.dtype.type(0.75) for name, array in f.parameters.items()}
            changed = {name: scale[name] * f.parameters[name] for name in stored & scale.keys()}
            self.model = with_values(self.model, changed)
            f = f.with_parameters(changed)
        self.f = f
        tensors = [v.name for v in self.model.graph.input if v.type.HasField("tensor_type")]
        names = [name for name, x in self.xs.items() if is_float(x) and name in tensors]
        weights = {
            name: array.copy()
            for name, array in f.parameters.items()
            if name in stored and array.itemsize > 2
        }
        self.wrt = [*names, *weights] if draw.weights else names
        self.values: dict[str, Any] = {**self.xs, **weights}
        rng = np.random.default_rng(draw.seed + 1)
        self.ys = stock(self.model, self.values)
        self.us = [
            rng.normal(size=y.shape).astype(y.dtype) if is_float(y) else None for y in self.ys
        ]
        self.vs, self.others = (
            [
                np.asarray(rng.normal(size=self.values[n].shape)).astype(self.values[n].dtype)
                for n in self.wrt
            ]
            for _ in range(2)
        )
        used = [*(self.values[name] for name in self.wrt), *filter(is_float, self.ys)]
        self.is_double = {each.dtype for each in used} == {np.dtype(np.float64)}
        self.step, self.bound = (1e-4, 1e-5) if self.is_double else (1e-2, 2e-2)

    def moved(self, *moves: tuple[float, Sequence[Array]]) -> float:
        """Returns Σ outputs · u, with the values moved along directions."""
        values = dict(self.values)
        for scale, vectors in moves:
            for name, vector in zip(self.wrt, vectors, strict=True):
                values[name] = np.asarray(values[name] + values[name].dtype.type(scale) * vector)
        outputs = stock(self.model, values)
        return sum(_dot(u, y) for u, y in zip(self.us, outputs, strict=True) if u is not None)

    def slope(self) -> float:
        """Returns the directional derivative of Σ outputs · u along v."""
        h = self.step
        return (self.moved((h, self.vs)) - self.moved((-h, self.vs))) / (2 * h)

    def curvature(self) -> float:
        """Returns the second derivative along v and another direction."""
        h, v, w = self.step, self.vs, self.others
        terms = (a * b * self.moved((a * h, v), (b * h, w)) for a in (1, -1) for b in (1, -1))
        return sum(terms) / (4 * h * h)

    def close(self, found: float, expected: float) -> None:
        size = sum(float(np.abs(v).sum()) for v in self.vs)
        assert found == pytest.approx(expected, rel=self.bound, abs=self.bound * (1 + size))


def _add_loss(model: onnx.ModelProto) -> None:
    """Replaces the outputs by the sum of squares of the last floating-point one."""
    outputs = [v for v in model.graph.output if v.type.tensor_type.elem_type in (1, 11)]
    last = outputs[-1]
    node = onnx.helper.make_node("ReduceSumSquare", [last.name], ["loss"], keepdims=0)
    model.graph.node.append(node)
    value = onnx.helper.make_tensor_value_info("loss", last.type.tensor_type.elem_type, [])
    del model.graph.output[:]
    model.graph.output.append(value)


def _dot(a: Array, b: Array) -> float:
    return float((a.astype(np.float64) * b.astype(np.float64)).sum())


def _all(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


def _same(found: Any, expected: Any, *, exactly: bool) -> None:
    """Compares outputs."""
    for a, b in zip(_all(found), expected, strict=True):
        if is_float(b) and not exactly:
            assert a.dtype == b.dtype
            assert np.allclose(a, b, rtol=1e-5, atol=1e-6)
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert np.array_equal(a, b)
        elif exactly or not isinstance(b[0], dict):
            assert repr(a) == repr(b)
        else:  # maps
            pairs = zip(a, b, strict=True)
            assert all(x == pytest.approx(y, rel=1e-5) for x, y in pairs)


def check(draw: Draw) -> None:
    """Checks one combination."""
    case = Case(draw)
    f, xs, wrt = case.f, list(case.xs.values()), case.wrt
    floats = [u for u in case.us if u is not None]
    if draw.method == "call":
        _same(f(*xs), case.ys, exactly=not draw.replaced)
        return
    if draw.method == "reading":
        names = list(f.parameters)[::-1]
        found = f.reading(names)(*xs, *(f.parameters[name] for name in names))
        _same(found, case.ys, exactly=False)
        return
    if not wrt or (draw.kind == "statistics" and draw.rows < 2):  # their variance is 0
        return
    slope = case.slope()
    if draw.method == "vjp":
        ys, pullback = f.vjp(*xs, wrt=wrt)
        _same(ys, case.ys, exactly=False)
        products = pullback(tuple(case.us))
        again = pullback(tuple(case.us))
        assert all(np.array_equal(a, b) for a, b in zip(products, again, strict=True))
        case.close(sum(map(_dot, products, case.vs)), slope)
    elif draw.method == "jvp":
        ys, tangents = f.jvp(xs, case.vs, wrt=wrt)
        _same(ys, case.ys, exactly=False)
        pairs = zip(case.us, _all(tangents), strict=True)
        case.close(sum(_dot(u, t) for u, t in pairs if u is not None), slope)
    elif draw.method == "jacobian":
        rows = f.jacobian(*xs, wrt=wrt)
        rows = rows if len(floats) > 1 else (rows,)
        total = 0.0
        for u, row in zip(floats, rows, strict=True):
            for matrix, v in zip(_all(row), case.vs, strict=True):
                assert matrix.shape == (*u.shape, *v.shape)
                total += _dot(np.tensordot(u, matrix, u.ndim), v)
        case.close(total, slope)
    elif draw.method == "value_and_grad":
        value, gradient = f.value_and_grad(*xs, wrt=wrt)
        assert np.allclose(value, case.ys[0], rtol=1e-5)
        case.close(float(case.us[0]) * sum(map(_dot, _all(gradient), case.vs)), slope)
    elif draw.method in ("hessian", "hvp"):
        _check_second(case)
    elif draw.method == "derivative vjp":
        products = f.derivative("vjp", wrt)(*xs, *floats)
        case.close(sum(map(_dot, _all(products), case.vs)), slope)
    elif draw.method == "derivative jvp":
        tangents = f.derivative("jvp", wrt)(*xs, *case.vs)
        case.close(sum(map(_dot, floats, _all(tangents))), slope)
    else:
        derived = f.derivative("vjp", wrt)
        _, pullback = derived.vjp(*xs, *floats, wrt=wrt)
        vectors = tuple(v if n in case.wrt else None for n, v in zip(wrt, case.vs, strict=True))
        products = pullback(vectors[0] if len(vectors) == 1 else vectors)
        if case.is_double:
            case.close(sum(map(_dot, products, case.others)), case.curvature())


def _check_second(case: Case) -> None:
    f, xs, wrt = case.f, list(case.xs.values()), case.wrt
    blocks = f.hessian(*xs, wrt=wrt)
    blocks = blocks if len(wrt) > 1 else ((blocks,),)
    products = _all(f.hvp(xs, case.vs, wrt=wrt))
    total = 0.0
    for i, row in enumerate(blocks):
        expected = sum(
            np.tensordot(block, v, v.ndim) for block, v in zip(row, case.vs, strict=True)
        )
        scale = 1 + np.abs(expected).max(initial=0)
        assert np.allclose(products[i], expected, rtol=1e-4, atol=1e-4 * scale)
        total += _dot(expected, case.others[i])
        for j, block in enumerate(row):
            axes = case.vs[j].ndim
            size = case.vs[j].size
            matrix = block.reshape(case.vs[i].size, size)
            other = blocks[j][i].reshape(size, case.vs[i].size)
            assert block.ndim == axes + case.vs[i].ndim
            assert np.allclose(matrix, other.T, rtol=1e-4, atol=1e-4 * scale)
    if case.is_double:
        case.close(float(case.us[0]) * total, case.curvature())


def problem_of(draw: Draw) -> str | None:
    """Returns what is wrong with a combination."""
    try:
        check(draw)
    except ModelError as error:
        if draw.edit == "unknown ranks" and "its rank is unknown; add a value_info" in str(error):
            return None  # for a product, for example
        return f"{draw}: {error}"
    except Exception as error:
        return f"{draw}: {type(error).__name__}: {error}"
    return None


def drawn(seed: int, count: int) -> list[Draw]:
    rng = np.random.default_rng(seed)

    def one(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    return [
        Draw(
            kind=one(list(KINDS)),
            method=one(METHODS),
            edit=one(list(EDITS)),
            rows=one((3, 2, 4, 1, 0)),
            double=one((True, True, False)),
            weights=one((True, False)),
            replaced=one((True, False)),
            seed=seed * 1000 + number,
        )
        for number in range(count)
    ]


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_model(kind: str) -> None:
    """With two methods, and with all if tests may take long."""
    first = list(KINDS).index(kind) % len(METHODS)
    methods = METHODS if SOAK > 1 else (METHODS[first], METHODS[first - 4])
    problems = [problem_of(Draw(kind, method)) for method in methods]
    assert not any(problems), "\n".join(filter(None, problems))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, DRAWS, 20))
def test_any_combination(start: int) -> None:
    problems = [problem_of(draw) for draw in drawn(SEED, DRAWS)[start : start + 20]]
    assert not any(problems), f"ORTOPS_FUNCTIONS_SEED={SEED}\n" + "\n".join(filter(None, problems))
