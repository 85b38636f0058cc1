"""Function: kinds of files and of inputs, each with what went wrong for it once."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import ortops
from ortops import Function

RNG = np.random.default_rng(3)


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> f {text}'
    )


def test_a_product_of_a_model_that_computes_shapes() -> None:
    """Vectors of zeros, whose transpose is taken, were folded into constants."""
    f = Function(
        parse("""(seq(float[m]) s, float[n] x) => (float[n] y)
        { a = ConcatFromSequence <axis = 0> (s)  b = ReduceSum <keepdims = 0> (a)
        c = Mul(b, x)  y = Tanh(c) }""")
    )
    s, x = [np.float32([1, 2]), np.float32([-1])], np.float32([0.1, 0.2])
    y, tangent = f.jvp((s, x), (None, np.float32([1, 2])))
    assert np.allclose(y, np.tanh(2 * x))
    assert np.allclose(tangent, (1 - np.tanh(2 * x) ** 2) * np.float32([2, 4]), rtol=1e-5)


def test_the_forward_pass_takes_no_sizes_from_seeds() -> None:
    model = parse("""(float[n, 2] x) => (float[n, 2] y, float[2] m, float[2] v)
        <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m0 = {0, 1}, float[2] v0 = {1, 2}>
        { y, m, v = BatchNormalization <training_mode = 1> (x, s, b, m0, v0) }""")
    f = Function(model).derivative("vjp")
    x = RNG.normal(size=(4, 2)).astype(np.float32)
    given = x, 0.5 * x, np.ones(2, np.float32), np.ones(2, np.float32)
    product, pullback = f.vjp(*given)
    assert np.array_equal(f(*given), f(*given))
    assert np.allclose(product, f(*given), rtol=1e-5, atol=1e-6)
    assert all(each.shape == like.shape for each, like in zip(pullback(x), given, strict=True))


def test_running_statistics_are_not_overwritten() -> None:
    """onnxruntime writes them into the memory of initializers, if they are not outputs."""
    f = Function(
        parse("""(float[n, 2] x) => (float[n, 2] y)
        <float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m0 = {0, 1}, float[2] v0 = {1, 2}>
        { z, m, v = BatchNormalization <training_mode = 1, momentum = 0.5> (x, s, b, m0, v0)
        y = Sub(z, m) }""")
    )
    x = RNG.normal(size=(4, 2)).astype(np.float32)
    scaled = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * np.float32([1, 2]) + np.float32([0, 1])
    for _ in range(3):
        expected = scaled - (0.5 * x.mean(0) + np.float32([0, 0.5]))
        assert np.allclose(f(x), expected, rtol=1e-4, atol=1e-5)
        assert np.allclose(f.vjp(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_weights_are_read_in_the_order_that_is_asked_for() -> None:
    """Also if they are inputs with a default value, which the file lists in front."""
    model = parse("""(float[2] a, float[2] b, float[2] x) => (float[2] y)
        { c = Mul(a, x)  y = Sub(c, b) }""")
    for name, value in (("a", [1, 2]), ("b", [3, 4])):
        model.graph.initializer.append(numpy_helper.from_array(np.float32(value), name))
    f, x = Function(model), np.float32([5, 6])
    a, b = np.float32([7, 8]), np.float32([9, 10])
    for names, given in ((["b", "a"], (b, a)), (["a", "b"], (a, b))):
        reading = f.reading(names)
        assert reading.inputs == ("x", *names)
        assert np.array_equal(reading(x, *given), a * x - b)


def test_no_rows() -> None:
    f = Function(
        parse("""(float[n, 3] x) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}>
        { a = MatMul(x, w)  y = Tanh(a) }""")
    )
    x = np.zeros((0, 3), np.float32)
    of_x, of_w = f.jacobian(x, wrt=["x", "w"])
    assert of_x.shape == (0, 2, 0, 3)
    assert of_w.shape == (0, 2, 3, 2)
    y, pullback = f.vjp(x, wrt=["x", "w"])
    assert [each.shape for each in pullback(y)] == [(0, 3), (3, 2)]
    assert f.jacobian(np.ones((1, 3), np.float32)).shape == (1, 2, 1, 3)


def test_jacobians_of_inputs_of_unknown_rank() -> None:
    model = parse("(float[n] x) => (float[n] y) { y = Tanh(x) }")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    f, x = Function(model), RNG.normal(size=(3, 2)).astype(np.float32)
    slopes = 1 - np.tanh(x) ** 2
    expected = np.diag(slopes.ravel()).reshape(3, 2, 3, 2)
    assert np.allclose(f.jacobian(x), expected, rtol=1e-4, atol=1e-6)
    assert np.allclose(f.jacobian(x[0]), expected[0, :, 0], rtol=1e-4, atol=1e-6)


def test_strings() -> None:
    f = Function(
        parse("""(string[n] s, float[n] x) => (float[n] y, string[n] t)
        { c = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b"], values_floats = [1.0, 2.0]> (s)
        y = Mul(c, x)  t = Identity(s) }""")
    )
    assert repr(f).startswith(
        "Function(s: string[n], x: float32[n]) -> y: float32[n], t: string[n]"
    )
    x = np.float32([3, 4])
    for s in (["a", "b"], np.array(["a", "b"]), np.array(["a", "b"], object)):
        (y, t), pullback = f.vjp(s, x)
        assert y.tolist() == [3, 8]
        assert t.tolist() == ["a", "b"]
        none, product = pullback((np.ones_like(y), None))
        assert none is None
        assert product.tolist() == [1, 2]
        assert f.jacobian(s, x).tolist() == [[1, 0], [0, 2]]
    with pytest.raises(ortops.FeedError, match="'s' must have strings, got the value 1"):
        f(np.array(["a", 1], object), x)
    with pytest.raises(ortops.ArgumentError, match=r"'s' must be floating-point .*, got string"):
        f.vjp(["a", "b"], x, wrt="s")


def test_sequences_and_optional_inputs() -> None:
    f = Function(
        parse("""(optional(float[n]) o, float[4] x) => (seq(float[2]) s, float[4] y)
        { two = Constant <value = int64 {2}> ()  s = SplitToSequence <axis = 0> (x, two)
        given = OptionalHasElement(o)  scale = Cast <to = 1> (given)  y = Mul(x, scale) }""")
    )
    x = np.float32([1, 2, 3, 4])
    for optional, scale in ((None, 0), (x, 1)):
        (s, y), pullback = f.vjp(optional, x)
        assert [part.tolist() for part in s] == [[1, 2], [3, 4]]
        assert y.tolist() == (scale * x).tolist()
        none, product = pullback((None, x))
        assert none is None
        assert product.tolist() == (scale * x).tolist()
    with pytest.raises(ortops.ArgumentError, match="'s' is not a tensor and has no derivative"):
        pullback((s, x))
    reading = Function(
        parse("""(seq(float[n]) s) => (float[m] y) { y = ConcatFromSequence <axis = 0> (s) }""")
    )
    assert reading([x, x]).tolist() == [*x, *x]
    with pytest.raises(ortops.FeedError, match=r"'s' must be a list of arrays, .* got an array"):
        reading(x)


ZIPPED = """(float[n, 3] x) => (int64[n] label, seq(map(int64, float)) maps)
    { label, p = ai.onnx.ml.LinearClassifier <classlabels_ints = [0, 1], multi_class = 1,
    coefficients = [1.0, 2.0, 3.0, -1.0, -2.0, 0.5], intercepts = [0.1, 0.2],
    post_transform = "SOFTMAX"> (x)
    maps = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (p) }"""


def test_maps() -> None:
    model, x = parse(ZIPPED), RNG.normal(size=(2, 3)).astype(np.float32)
    f = Function(model)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    label, maps = f(x)
    assert np.array_equal(label, expected[0])
    assert maps == expected[1]  # bit-equal, although weights in attributes can be replaced
    with pytest.raises(ortops.ArgumentError, match=r"no floating-point output .* outputs=\.\.\."):
        f.vjp(x)
    p, pullback = Function(model, outputs="p").vjp(x)
    assert np.allclose(pullback(np.ones_like(p))[0], 0, atol=1e-6)


def test_inputs_with_the_names_of_arguments() -> None:
    f = Function(parse("(float[n] self, float[n] wrt) => (float[n] y) { y = Mul(self, wrt) }"))
    a, b = np.float32([1, 2]), np.float32([3, 4])
    assert f(self=a, wrt=b).tolist() == [3, 8]
    assert f.vjp(a, b, wrt="self")[1](a)[0].tolist() == [3, 8]
    with pytest.raises(
        ortops.ArgumentError, match="pass the array for the input 'wrt' by position"
    ):
        f.jacobian(self=a, wrt=b)
