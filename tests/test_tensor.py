"""The operators, methods and indices of Tensors against numpy's, run by stock onnxruntime."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper
from running import run
from violations import all_violations

import ortops
from ortops import Tape, Tensor, op
from ortops.errors import ArgumentError, ModelError
from ortops.graph import inference
from ortops.graph.constants import constant_tensor

Function = Callable[..., Any]
FLOATS = ("float32", "float64")
SIGNED = ("int32", "int64")
UNSIGNED = ("uint8", "uint32", "uint64")


def array(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Returns random elements of either sign, without zeros, few of which are equal in kind."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    whole = rng.integers(1, 7, shape)
    if not dtype.startswith("uint"):
        whole *= rng.choice([-1, 1], shape)
    scaled = whole / 2 if dtype.startswith("float") else whole
    return scaled.astype(dtype)


def results(function: Function, *arrays: np.ndarray, symbolic: bool) -> list[np.ndarray]:
    """Runs what a function of Tensors emits."""
    with Tape(name="function") as tape:
        inputs = []
        for number, x in enumerate(arrays):
            sizes = [f"size{size}" for size in x.shape] if symbolic else x.shape
            inputs.append(tape.input(f"x{number}", x.dtype, sizes))
        made = function(*inputs)
        for number, y in enumerate(made if isinstance(made, tuple) else (made,)):
            tape.output(op.Identity(y), f"y{number}")
    return run(tape.model(), {f"x{number}": x for number, x in enumerate(arrays)})


def agrees(function: Function, *arrays: np.ndarray, dtype: bool = True) -> None:
    """Checks values and types against numpy, for sizes that are static and for symbols."""
    with np.errstate(all="ignore"):
        expected = function(*arrays)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for symbolic in (False, True):
        found = results(function, *arrays, symbolic=symbolic)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=dtype)


TWO: list[tuple[str, Function, tuple[str, ...]]] = [
    ("==", operator.eq, (*FLOATS, *SIGNED, "bool")),
    ("!=", operator.ne, (*FLOATS, *SIGNED, "bool")),
    ("<", operator.lt, (*FLOATS, *SIGNED, *UNSIGNED)),
    ("<=", operator.le, (*FLOATS, *SIGNED)),
    (">", operator.gt, (*FLOATS, *SIGNED)),
    (">=", operator.ge, (*FLOATS, *SIGNED)),
    ("+", operator.add, (*FLOATS, *SIGNED)),
    ("-", operator.sub, (*FLOATS, *SIGNED)),
    ("*", operator.mul, (*FLOATS, *SIGNED)),
    ("/", operator.truediv, FLOATS),
    ("//", operator.floordiv, (*FLOATS, *SIGNED, "uint64")),
    ("%", operator.mod, (*FLOATS, "float16", *SIGNED, *UNSIGNED)),
    ("divmod", divmod, (*FLOATS, *SIGNED)),
    ("&", operator.and_, ("bool", *SIGNED, *UNSIGNED)),
    ("|", operator.or_, ("bool", *SIGNED, *UNSIGNED)),
    ("^", operator.xor, ("bool", *SIGNED, *UNSIGNED)),
    ("<<", operator.lshift, UNSIGNED),
    (">>", operator.rshift, UNSIGNED),
]
binary = pytest.mark.parametrize(
    ("function", "dtypes"), [pytest.param(*row[1:], id=row[0]) for row in TWO]
)


@pytest.mark.quick(3)
@binary
def test_binary_operators(function: Function, dtypes: tuple[str, ...]) -> None:
    with all_violations() as check:
        for dtype in dtypes:
            with check(dtype):
                x, y = array(dtype, 5, 6), array(dtype, 5, 6, seed=1)
                agrees(function, x, y)
                agrees(function, x, array(dtype, 6, seed=2))  # broadcast


@pytest.mark.nightly(9)
@pytest.mark.quick(1)
@binary
def test_arrays_and_numbers_on_either_side(function: Function, dtypes: tuple[str, ...]) -> None:
    with all_violations() as check:
        for dtype in dtypes:
            x, y = array(dtype, 4, 3), array(dtype, 3, seed=1)
            scalar = y.dtype.type(y[0])
            for other in (y, scalar, scalar.item()):
                with check(f"{dtype}, tensor and {other!r}"):
                    agrees(lambda t, other=other: function(t, other), x)
                with check(f"{dtype}, {other!r} and tensor"):
                    agrees(lambda t, other=other: function(other, t), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_quotients_round_as_in_numpy(dtype: str) -> None:
    whole = array(dtype, 400, seed=3) * 3.7
    parts = array(dtype, 400, seed=4) * 0.1
    special = np.array([1.0, -1.0, 0.0, 6.0, np.inf, 5.0, -5.0, 3.0, -3.0], dtype)
    divisors = np.array([0.1, 0.1, 2.0, 0.1, 2.0, np.inf, np.inf, 0.0, 0.0], dtype)
    for x, y in ((whole.astype(dtype), parts.astype(dtype)), (special, divisors)):
        agrees(operator.floordiv, x, y)
        agrees(operator.mod, x, y)
    assert np.floor(special[0] / divisors[0]) != special[0] // divisors[0]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_at_the_end_of_their_range(dtype: str) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.array([least, least, most, most, 0], dtype)
    agrees(operator.floordiv, x, np.array([3, -3, 3, -3, -3], dtype))


def test_slopes_of_remainder_and_floor_division() -> None:
    with Tape(name="slopes") as tape:
        x, y = tape.input("x", np.float64, [3]), tape.input("y", np.float64, [3])
        tape.output(x % y + 5.0 * (x // y), "z")
    built = tape.model()
    domain = "ai.onnx.preview.training"
    built.graph.node.append(
        helper.make_node("Gradient", ["x", "y"], ["dx", "dy"], domain=domain, xs=["x", "y"], y="z")
    )
    built.graph.output.extend(helper.make_tensor_value_info(name, 11, [3]) for name in ("dx", "dy"))
    built.opset_import.append(helper.make_opsetid(domain, 1))
    feeds = {"x": np.array([5.3, -5.3, 5.3]), "y": np.array([2.0, 2.0, -2.0])}
    dx, dy = run(ortops.lower(built), feeds, ["dx", "dy"])
    np.testing.assert_array_equal(dx, [1, 1, 1])
    np.testing.assert_array_equal(dy, [-2, 3, 3])  # − floor(x / y)


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_shifts_beyond_the_width(dtype: str) -> None:
    x = np.array([1, 2, 200], dtype)
    count = np.array([1, 8 * x.itemsize - 1, 8 * x.itemsize], dtype)
    agrees(operator.lshift, x, count)
    agrees(operator.rshift, x, count)
    agrees(lambda t: t >> int(count[2]), x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_powers(dtype: str) -> None:
    x = abs(array(dtype, 4, 3))
    for function in (lambda t: t**2, lambda t: 2**t, lambda t: t**-1, lambda t: t ** x[0]):
        agrees(function, x)
    with Tape():
        assert (np.float32(2) ** Tape().input("x", np.float32, [2])).dtype == np.float32


@pytest.mark.parametrize("dtype", SIGNED)
def test_powers_of_integers(dtype: str) -> None:
    x = array(dtype, 4, 3)
    agrees(lambda t: t**3, x)
    agrees(lambda t: 2**t, abs(x))


@pytest.mark.parametrize(
    ("function", "dtypes"),
    [
        (operator.pos, (*FLOATS, *SIGNED)),
        (operator.neg, (*FLOATS, *SIGNED)),
        (operator.abs, (*FLOATS, *SIGNED)),
        (operator.invert, ("bool", *SIGNED, *UNSIGNED)),
    ],
)
def test_unary_operators(function: Function, dtypes: tuple[str, ...]) -> None:
    for dtype in dtypes:
        agrees(function, array(dtype, 4, 3))


def test_operators_in_place_make_new_tensors() -> None:
    def function(x: Any) -> Any:
        y = +x
        y = y + 0 if isinstance(y, np.ndarray) else y
        y += 2
        y *= 3
        y -= x
        y /= 2
        y %= 2
        return y, x

    agrees(function, array("float32", 4))


@pytest.mark.parametrize("shapes", [((2, 3), (3, 4)), ((3,), (3, 4)), ((2, 2, 3), (3,))])
def test_matrix_products(shapes: tuple[tuple[int, ...], ...]) -> None:
    a, b = (array("float32", *shape, seed=seed) for seed, shape in enumerate(shapes))
    agrees(operator.matmul, a, b)
    agrees(lambda t: t @ b, a)
    agrees(lambda t: a @ t, b)


def test_transposes_and_sizes() -> None:
    agrees(lambda t: t.T, array("float32", 2, 3))
    agrees(lambda t: t.mT, array("float32", 2, 3))
    agrees(lambda t: t.mT, array("float32", 4, 2, 3))
    tape = Tape()
    assert tape.input("x", np.float32, [2, 3]).size == 6
    assert tape.input("scalar", np.float32, []).size == 1
    assert tape.input("ones", np.float32, [1, 3, 1]).squeeze().shape == (3,)


REDUCTIONS = [None, 0, -1, (0, 2), (), np.int64(1)]


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["sum", "prod", "max", "min", "mean"])
def test_reductions(name: str, keepdims: bool) -> None:
    dtypes = FLOATS if name == "mean" else (*FLOATS, *SIGNED, "bool", "uint8")
    with all_violations() as check:
        for axis, dtype in itertools.product(REDUCTIONS, dtypes):

            def reduced(t: Any, axis: Any = axis) -> Any:
                return getattr(t, name)(axis=axis, keepdims=keepdims)

            with check(f"axis {axis}, {dtype}"):
                agrees(reduced, array(dtype, 2, 3, 2))


@pytest.mark.quick(2)
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_positions(name: str, keepdims: bool) -> None:
    for dtype in (*FLOATS, *SIGNED, "bool"):
        for axis in (None, 0, -1):
            agrees(lambda t: getattr(t, name)(axis=axis, keepdims=keepdims), array(dtype, 4, 5))  # noqa: B023


def test_a_mask_counts() -> None:
    agrees(lambda t: (t == 1.5).sum(axis=1), array("float32", 6, 7))


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.reshape(3, 4),
        lambda t: t.reshape((3, 4)),
        lambda t: t.reshape([3, -1]),
        lambda t: t.reshape(-1),
        lambda t: t.reshape(np.int64(2), -1, 3),
        lambda t: t.flatten(),
        lambda t: t.clip(-1, 1.5),
        lambda t: t.clip(min=-1),
        lambda t: t.clip(max=1),
        lambda t: t.clip(np.array([[-1], [0]], np.float32), 2.0),
        lambda t: t.astype(np.int64),
        lambda t: t[:1].squeeze(0),
        lambda t: t[:1, :, None].squeeze(axis=(0, 2)),
    ],
)
def test_shapes_and_limits(function: Function) -> None:
    agrees(function, array("float32", 2, 6))


def test_reshape_of_nothing_and_to_sizes_of_the_run() -> None:
    agrees(lambda t: t.reshape(4, 0, 2), np.zeros((0, 3), np.float32))
    x = array("float32", 2, 6)
    for shape in ((4, 3), (4, -1)):
        feeds = [x, np.array(shape[0])]
        found = results(lambda t, n, s=shape: t.reshape(n, s[1]), *feeds, symbolic=True)
        np.testing.assert_array_equal(found[0], x.reshape(shape))
        found = results(lambda t, s: t.reshape(s), x, np.array(shape), symbolic=False)
        np.testing.assert_array_equal(found[0], x.reshape(shape))


ROWS = np.array([[1, -1], [0, 2]])


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t[0],
        lambda t: t[-1, 1:],
        lambda t: t[..., 0],
        lambda t: t[:, None, ..., -1],
        lambda t: t[::-1, 1:3],
        lambda t: t[[2, 0, 0]],
        lambda t: t[ROWS],
        lambda t: t[:, abs(ROWS).astype(np.uint8), 1:],
        lambda t: t[None, [0, 2], ..., None],
        lambda t: t[..., np.array([3, 1])],
        lambda t: t[[]],
    ],
)
def test_indices(function: Function) -> None:
    agrees(function, array("float32", 3, 4, 5))


def test_indices_that_are_tensors() -> None:
    x = array("float32", 3, 4, 5)
    for dtype in (np.int64, np.int32, np.uint8):
        agrees(lambda t, i: t[i], x, np.array([2, 0, 1], dtype))
        agrees(lambda t, i: t[i], x, np.array(2, dtype))
        agrees(lambda t, i: t[:, 0, i], x, np.array(1, dtype))
        agrees(lambda t, i: t[i, None, 1:, i], x, np.array(2, dtype))
        agrees(lambda t, i: t[:, None, i, ..., None], x, np.array([[1, 3]], dtype))


def test_identity() -> None:
    with Tape() as tape:
        x, y = tape.input("x", np.float32, [2]), tape.input("y", np.float32, [2])
        assert isinstance(x == y, Tensor)
        assert {x: 1, y: 2}[y] == 2
        assert any(each is y for each in (x, y))


def test_the_array_namespace() -> None:
    x, y = abs(array("float32", 3, 4)), abs(array("float32", 3, 4, seed=1))

    def function(a: Any, b: Any) -> Any:
        xp = a.__array_namespace__()
        return (
            xp.concat([a, b], axis=1),
            xp.concat([a, b], axis=None),
            xp.stack([a, b], axis=-1),
            xp.expand_dims(a, axis=1),
            xp.permute_dims(a, (1, 0)),
            xp.squeeze(xp.sum(a, axis=0, keepdims=True), axis=0),
            xp.reshape(a, (4, -1)),
            xp.min(xp.minimum(a, b), axis=0),
            xp.max(xp.maximum(a, b)),
            xp.prod(a, axis=1),
            xp.clip(a, 1.0, 2.0),
            xp.matmul(a, b.T),
            xp.argmax(a, axis=1),
            xp.where(xp.equal(a, b), a, 0.0),
            xp.astype(xp.not_equal(a, b), xp.int64),
            xp.square(a),
            xp.floor_divide(a, b),
            xp.remainder(a, b),
            xp.logical_not(a < b),
            xp.pow(a, 2.0),
        )

    agrees(function, x, y)


REFUSED: list[tuple[str, Function, type[Exception], str]] = [
    ("i == 1.5", lambda x, i, b, u: i == 1.5, ModelError, "Equal: int64, .* represent 1.5"),
    ("i < nan", lambda x, i, b, u: i < np.nan, ModelError, "int64, .* represent nan"),
    ("i * 0.5", lambda x, i, b, u: i * 0.5, ModelError, "Mul: int64, .* represent 0.5"),
    ("u == 300", lambda x, i, b, u: u == 300, ModelError, "uint8, .* represent 300"),
    ("u + -1", lambda x, i, b, u: u + -1, ModelError, "uint8, .* represent -1"),
    ("b == 2", lambda x, i, b, u: b == 2, ModelError, "bool, .* represent 2"),
    ("list", lambda x, i, b, u: i > [1, 0.5], ModelError, r"int64, .* represent \[1, 0.5\]"),
    ("x == i", lambda x, i, b, u: x == i, ModelError, "inconsistent type"),
    ("x // i", lambda x, i, b, u: x // i, ModelError, "different types; cast one with .astype"),
    ("x == float64", lambda x, i, b, u: x == np.float64(1), ModelError, "inconsistent type"),
    ("x == None", lambda x, i, b, u: x == None, TypeError, "use `is`"),  # noqa: E711
    (
        "x != text",
        lambda x, i, b, u: x != "a",
        TypeError,
        "cannot compare .* with 'a'; == and != are",
    ),
    ("x + None", lambda x, i, b, u: x + None, TypeError, "unsupported operand"),
    ("text % x", lambda x, i, b, u: object() % x, TypeError, "unsupported operand"),
    (
        "i / 2",
        lambda x, i, b, u: i / 2,
        ModelError,
        "an integer dtype cannot represent .* use //, op",
    ),
    ("1 / i", lambda x, i, b, u: 1 / i, ModelError, "an integer dtype cannot represent"),
    ("i ** 0.5", lambda x, i, b, u: i**0.5, ModelError, "int64, .* represent 0.5"),
    ("i ** -1", lambda x, i, b, u: i**-1, ModelError, "the exponent of integers must be >= 0"),
    ("i ** x", lambda x, i, b, u: i**x, ModelError, "different types"),
    ("i ** d", lambda x, i, b, u: i ** x.astype(np.float64), ModelError, "different types"),
    ("1 ** d", lambda x, i, b, u: np.int64(2) ** x.astype(np.float64), ModelError, "different"),
    ("1.5 ** i", lambda x, i, b, u: 1.5**i, ModelError, "int64, .* represent 1.5"),
    ("~x", lambda x, i, b, u: ~x, ModelError, "~ requires booleans or integers, got Tensor"),
    ("x & x", lambda x, i, b, u: x & x, ModelError, "& requires booleans or integers, got Ten"),
    ("b | i", lambda x, i, b, u: b | i, ModelError, "different types"),
    ("i << 1", lambda x, i, b, u: i << 1, ModelError, "<< requires unsigned integers"),
    ("2 >> i", lambda x, i, b, u: 2 >> i, ModelError, ">> requires unsigned integers"),
    ("mean", lambda x, i, b, u: i.mean(), ModelError, r"int64.*mean requires a .* \.astype\(np.fl"),
    (
        "mean of b",
        lambda x, i, b, u: b.mean(),
        ModelError,
        "bool.* mean requires a floating-point dtype",
    ),
    (".T", lambda x, i, b, u: x[None].T, ModelError, r"\.T requires rank 2, got rank 3; use .mT"),
    (".mT", lambda x, i, b, u: x[0].mT, ModelError, r"\.mT requires rank >= 2, got rank 1"),
    (".size", lambda x, i, b, u: x.size, ModelError, r"size is unknown .* use op.Size\(x\)"),
    ("reshape", lambda x, i, b, u: x.reshape(0, -1), ModelError, "cannot infer -1 in the shape"),
    ("reshape to i", lambda x, i, b, u: x.reshape(u[0]), ModelError, "must be int64"),
    (
        "squeeze",
        lambda x, i, b, u: x.squeeze(),
        ModelError,
        "is not static; name the axes to remove in axis=",
    ),
    ("bool", lambda x, i, b, u: bool(x), TypeError, "no truth value .* use op.Where"),
    ("x in list", lambda x, i, b, u: x in [i], ModelError, "inconsistent type"),
    ("in list", lambda x, i, b, u: x in [x + 1], TypeError, "and `is` for identity"),
    ("in x", lambda x, i, b, u: 1 in x, TypeError, r"use \(x == item\).max\(\)"),
    ("float", lambda x, i, b, u: float(x), TypeError, r"no value while .* use .astype\(np.float32"),
    ("int", lambda x, i, b, u: int(x), TypeError, r"no value while .* use .astype\(np.int64"),
    ("range", lambda x, i, b, u: range(i), TypeError, "no value while the graph is built"),
    ("len", lambda x, i, b, u: len(x), TypeError, r"no len\(\); use .shape\[0\]"),
    ("iteration", lambda x, i, b, u: list(x), TypeError, "is not iterable"),
    ("asarray", lambda x, i, b, u: np.asarray(x), TypeError, "no value while .* op.<Operator>"),
    ("ufunc", lambda x, i, b, u: np.exp(x), TypeError, "does not support ufuncs"),
    ("item", lambda x, i, b, u: operator.setitem(x, 0, 1), TypeError, "use op.Where or op.Scatter"),
    ("dot", lambda x, i, b, u: x.dot(x), AttributeError, "no attribute 'dot'; use @"),
    ("softmax", lambda x, i, b, u: x.softmax(), AttributeError, "'softmax'; use op.<Operator>"),
    ("mask", lambda x, i, b, u: x[b], TypeError, "is boolean, .* use op.Where, or op.Compress"),
    ("a bool", lambda x, i, b, u: x[True], TypeError, "is boolean"),
    ("bools", lambda x, i, b, u: x[[True, False]], TypeError, "is boolean"),
    ("floats", lambda x, i, b, u: x[x], TypeError, r"must have an integer dtype, .* with .astype"),
    ("text", lambda x, i, b, u: x["a"], TypeError, "index must be integers, .* got 'a'"),
    ("two", lambda x, i, b, u: x[[0], [1]], TypeError, "cannot be combined with other"),
    ("mixed", lambda x, i, b, u: x[[0], 0], TypeError, "cannot be combined with other"),
]


def test_refusals() -> None:
    with all_violations() as check:
        for name, function, error, message in REFUSED:
            with check(name), Tape() as tape:
                x = tape.input("x", np.float32, ["n", 2])
                i = tape.input("i", np.int64, ["n", 2])
                b = tape.input("b", np.bool_, ["n", 2])
                u = tape.input("u", np.uint8, ["n", 2])
                with pytest.raises(error, match=message):
                    function(x, i, b, u)


def test_a_constant_with_a_wrong_attribute_is_refused() -> None:
    """onnx's checker does not look into training_info, where such a node may be."""
    node = ir.Node("", "Constant", [], [ir.AttrInt64s("value", [1, 2])], name="odd", num_outputs=1)
    with pytest.raises(ModelError, match="Constant node 'odd': Attribute 'value' is not of type"):
        constant_tensor(node.outputs[0])


def test_text_is_a_constant() -> None:
    texts = np.array([["a", "ü"], ["", "a"]])
    with Tape(name="texts") as tape:
        tape.output(op.Identity(texts), "y")
        tape.output(op.Identity(texts.astype(object)), "same")
        tape.output(op.Equal(tape.initializer("w", texts), "a"), "equal")
    y, same, equal = run(tape.model(), {})
    assert y.tolist() == same.tolist() == texts.tolist()
    assert equal.tolist() == (texts == "a").tolist()
    assert [node.op_type for node in tape.graph].count("Constant") == 2  # equal ones are shared
    with Tape() as tape, pytest.raises(ModelError, match=r"numbers or of strings, got .*None"):
        tape.constant([None])


def test_operators_of_ai_onnx_ml_have_the_newest_version() -> None:
    x = np.array([2, 1, 7])
    with Tape(name="encoder") as tape:
        of_x = tape.input("x", np.int64, ["n"])
        given = {"keys_int64s": [1, 2], "values_floats": [0.5, 3], "default_float": -1}
        tape.output(op.LabelEncoder(of_x, **given), "y")
        tape.output(op.LabelEncoder(of_x, domain="ai.onnx.ml", **given), "z")
    for found in run(tape.model(), {"x": x}):
        np.testing.assert_array_equal(found, np.array([3, 0.5, -1], np.float32))


def test_names_are_not_used_twice() -> None:
    adds: list[Callable[[Tape], object]] = [
        lambda tape: tape.input("x", np.float32, [2]),
        lambda tape: tape.initializer("x", np.ones(2)),
    ]
    for first, second in itertools.product(adds, repeat=2):
        with Tape(name="twice") as tape:
            first(tape)
            with pytest.raises(ModelError, match=r"graph 'twice': .* 'x'; choose another name"):
                second(tape)


def test_indices_out_of_range() -> None:
    tape = Tape()
    x = tape.input("x", np.float32, [2, "n", 3])
    with tape, all_violations() as check:
        for key, message in {
            5: "index 5 is out of range for a dimension of 2 (axis 0)",
            -3: "index -3 is out of range for a dimension of 2 (axis 0)",
            np.int64(2): "index 2 is out of range for a dimension of 2 (axis 0)",
            (Ellipsis, 3): "index 3 is out of range for a dimension of 3 (axis 2)",
            (..., -4): "index -4 is out of range for a dimension of 3 (axis 2)",
            (None, 2): "index 2 is out of range for a dimension of 2 (axis 0)",
            (0, 0, 0, 0): "there are more indices than its 3 dimensions",
        }.items():
            with check(key), pytest.raises(ArgumentError, match=re.escape(message)):
                x[key]
        with check("array"), pytest.raises(ArgumentError, match="index 7 is out of range"):
            x[[1, 7]]
    assert x[-1, 100].shape == (3,)


def test_a_tape_and_the_cache_of_shapes_keep_no_copies() -> None:
    """Nor do they mistake one constant for another."""
    large = np.zeros(1000)
    with Tape() as tape:
        constants = [tape.constant(large), tape.constant(large + 1), tape.constant(large.copy())]
        assert constants[0].value is constants[2].value is not constants[1].value
        shapes = [op.Expand(np.float32(1), np.full(20, n)).shape for n in (1, 2)]
    assert shapes == [(1,) * 20, (2,) * 20]
    assert all(len(content) <= 64 for *_, content in tape._constants)
    before = set(inference._inferred)
    for number in range(3):
        with Tape():
            op.ReduceSum(np.full(1000, number, np.float32))
    added = [key for key in inference._inferred if key not in before]
    assert len(added) == 3
    assert max(len(repr(key)) for key in added) < 1000


def test_only_models_with_gradients_import_their_domain() -> None:
    with Tape(name="plain") as tape:
        tape.output(tape.input("x", np.float32, [2]) * 2.0, "y")
    assert [entry.domain for entry in tape.model().opset_import] == [""]
