"""Operators of ai.onnx.ml against what they say, written in numpy, and against onnxruntime.

onnxruntime runs most of them in float32 only. So the forward values are compared with its kernel,
and the gradient, in float32, with differences in float64 of what is written here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checked import ZERO_ELSEWHERE, by_case, quick, without_gradient
from domain_models import model, node, value
from onnx import TensorProto, helper
from running import REFUSALS, plain_session, run
from test_rules_microsoft import Fused, differences, forward, mixed_difference, sigmoid, softmax

import ortops
from ortops.graph.autodiff.rules.table import BUILT_IN

ML = "ai.onnx.ml"
SEED = 41


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((SEED, seed)).standard_normal(shape)


def ml(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, op_type.lower(), domain=ML, **attributes)


def case(op: str, inputs: list[np.ndarray], function: Any, name: str = "", **options: Any) -> Fused:
    outputs = options.pop("outputs", 1)
    orders = options.pop("orders", 2)
    return Fused(op, inputs, function, options, outputs, ML, name, orders)


def rows(x: np.ndarray) -> np.ndarray:
    return x[None] if x.ndim == 1 else x


def normalized(x: np.ndarray, norm: str) -> np.ndarray:
    sizes = {
        "MAX": lambda: x.max(-1, keepdims=True),
        "L1": lambda: np.abs(x).sum(-1, keepdims=True),
        "L2": lambda: np.sqrt((x**2).sum(-1, keepdims=True)),
    }
    return x / sizes[norm]()


def normalizer_cases() -> list[Fused]:
    # The first row is of negative numbers, by the largest of which MAX divides as well.
    matrix, vector = normal(3, 4), normal(4, seed=1)
    matrix[0] = -np.abs(matrix[0]) - 0.5
    return [
        case(
            "Normalizer",
            [x],
            lambda x, norm=norm: normalized(x, norm),
            f"{norm}-{x.ndim}",
            norm=norm,
        )
        for norm in ("MAX", "L1", "L2")
        for x in (matrix, vector)
    ]


def winitzki(p: np.ndarray) -> np.ndarray:
    """The quantiles of the normal distribution as onnxruntime computes them."""
    t = 2 * p - 1
    log = np.log(1 - t * t)
    half = 2 / (math.pi * 0.147) + log / 2
    return math.sqrt(2) * np.sign(t) * np.sqrt(np.sqrt(half**2 - log / 0.147) - half)


def softmax_zero(scores: np.ndarray) -> np.ndarray:
    part = np.where(np.abs(scores) > 1e-7, np.exp(scores), 0)
    return part / part.sum(-1, keepdims=True)


TRANSFORMS: Mapping[str, Any] = {
    "NONE": lambda s: s,
    "LOGISTIC": sigmoid,
    "SOFTMAX": softmax,
    "SOFTMAX_ZERO": softmax_zero,
    "PROBIT": winitzki,
}

WEIGHTS = (normal(3, 4, seed=2) / 4).astype(np.float32)
BIAS = np.array([0.5, 0.25, 0.5], np.float32)


def linear(x: np.ndarray, count: int = 3) -> np.ndarray:
    return rows(x) @ WEIGHTS[:count].astype(np.float64).T + BIAS[:count]


def inputs_of(transform: str, *shape: int) -> np.ndarray:
    """Inputs; for PROBIT such that the scores are probabilities."""
    return normal(*shape, seed=3) * (0.2 if transform == "PROBIT" else 1)


def linear_cases() -> list[Fused]:
    found = []
    for name, transform in TRANSFORMS.items():
        parameters: dict[str, Any] = {"coefficients": WEIGHTS.ravel().tolist()}
        parameters |= {"intercepts": BIAS.tolist(), "post_transform": name}
        for shape in ((2, 4), (4,)):
            x = inputs_of(name, *shape)
            of_x = f"{name}-{len(shape)}"
            found += [
                case(
                    "LinearRegressor",
                    [x],
                    lambda x, f=transform: f(linear(x)),
                    of_x,
                    targets=3,
                    **parameters,
                ),
                case(
                    "LinearClassifier",
                    [x],
                    lambda x, f=transform: (None, f(linear(x))),
                    of_x,
                    outputs=[1],
                    classlabels_ints=[7, 8, 9],
                    **parameters,
                ),
            ]
        parameters |= {"coefficients": WEIGHTS[0].tolist(), "intercepts": BIAS[:1].tolist()}
        x = inputs_of(name, 3, 4)
        # The only transform that onnxruntime applies to a single score is PROBIT.
        single = transform if name == "PROBIT" else TRANSFORMS["NONE"]
        found.append(
            case(
                "LinearRegressor",
                [x],
                lambda x, f=single: f(linear(x, 1)),
                f"{name}-single",
                **parameters,
            )
        )
        if name != "PROBIT":

            def both(x: np.ndarray, logistic: bool = name == "LOGISTIC") -> Any:
                scores = linear(x, 1)
                if logistic:
                    return None, sigmoid(np.concatenate([-scores, scores], 1))
                return None, np.concatenate([1 - scores, scores], 1)

            found.append(
                case(
                    "LinearClassifier",
                    [x],
                    both,
                    f"{name}-binary",
                    outputs=[1],
                    classlabels_strings=["no", "yes"],
                    **parameters,
                )
            )
    return found


VECTORS = normal(5, 4, seed=4).astype(np.float32)
DUAL = normal(5, seed=5).astype(np.float32)
GAMMA, OFFSET, DEGREE = (float(np.float32(number)) for number in (0.3, 0.1, 3.0))
KERNELS: Mapping[str, Any] = {
    "LINEAR": lambda x: x @ VECTORS.T,
    "POLY": lambda x: (GAMMA * (x @ VECTORS.T) + OFFSET) ** DEGREE,
    "RBF": lambda x: np.exp(-GAMMA * ((x[:, None] - VECTORS) ** 2).sum(-1)),
    "SIGMOID": lambda x: np.tanh(GAMMA * (x @ VECTORS.T) + OFFSET),
}


def svm_cases() -> list[Fused]:
    shared: dict[str, Any] = {"kernel_params": [GAMMA, OFFSET, DEGREE], "rho": [0.25]}
    found = [
        case(
            "SVMRegressor",
            [normal(2, 4, seed=6)],
            lambda x, f=kernel: f(x) @ DUAL[:, None].astype(np.float64) + 0.25,
            name,
            kernel_type=name,
            n_supports=5,
            support_vectors=VECTORS.ravel().tolist(),
            coefficients=DUAL.tolist(),
            **shared,
        )
        for name, kernel in KERNELS.items()
    ]
    weights = VECTORS[0].astype(np.float64)
    found.append(
        case(
            "SVMRegressor",
            [normal(2, 4, seed=6)],
            lambda x: x @ weights[:, None] + 0.25,
            "weights",
            kernel_type="LINEAR",
            coefficients=weights.tolist(),
            **shared,
        )
    )
    return found


MISSING = np.eye(3, 4, dtype=bool)
"""Where the value to replace is; next to it, the function has a jump."""


COLUMNS = np.array([2, 0, 2])

CASES = [
    case("ArrayFeatureExtractor", [normal(3, 4), COLUMNS], lambda x, y: x[:, y], "2", orders=2),
    case("ArrayFeatureExtractor", [normal(4), COLUMNS], lambda x, y: x[None, y], "1"),
    case(
        "ArrayFeatureExtractor",
        [normal(2, 3, 4), COLUMNS.reshape(1, 3)],
        lambda x, y: x[:, :, y[0]],
        "3",
    ),
    case(
        "FeatureVectorizer",
        [normal(2, 3), normal(2, 2, seed=1), normal(2, 2, seed=2)],
        # As many columns as there are, fewer, and more, which are zeros.
        lambda a, b, c: np.concatenate([a, b[:, :1], c, np.zeros((2, 1))], 1),
        inputdimensions=[3, 1, 3],
    ),
    case(
        "FeatureVectorizer",
        [normal(3), normal(2, seed=1)],
        lambda a, b: np.concatenate([a, b])[None],
        "1",
        inputdimensions=[3, 2],
    ),
    case(
        "Imputer",
        [np.where(MISSING, 1.0, normal(3, 4, seed=7))],
        lambda x: np.where(MISSING, [5, 6, 7, 8], x),
        "each",
        imputed_value_floats=[5.0, 6.0, 7.0, 8.0],
        replaced_value_float=1.0,
    ),
    case(
        "Imputer",
        [np.where(MISSING[1], 1.0, normal(4))],
        lambda x: np.where(MISSING[1], 5, x),
        "one",
        imputed_value_floats=[5.0],
        replaced_value_float=1.0,
    ),
    *linear_cases(),
    *normalizer_cases(),
    case(
        "Scaler",
        [normal(3, 4)],
        lambda x: (x - np.array([1, 2, 3, 4])) * np.array([0.5, 2, -1, 0.25]),
        "each",
        offset=[1.0, 2.0, 3.0, 4.0],
        scale=[0.5, 2.0, -1.0, 0.25],
    ),
    case("Scaler", [normal(4)], lambda x: (x - 1.5) * 2, "one", offset=[1.5], scale=[2.0]),
    case("Scaler", [normal(2, 3, 4)], lambda x: (x - 1.5) * 2, "3", offset=[1.5], scale=[2.0]),
    *svm_cases(),
]
CASES = quick(
    CASES,
    """
    ArrayFeatureExtractor-3
    FeatureVectorizer
    Imputer-each
    LinearRegressor-PROBIT-1
    LinearRegressor-SOFTMAX_ZERO-2
    LinearClassifier-NONE-2
    LinearClassifier-NONE-binary
    LinearClassifier-LOGISTIC-binary
    Normalizer-MAX-2
    Scaler-3
    SVMRegressor-POLY
    SVMRegressor-LINEAR
    SVMRegressor-SIGMOID
    SVMRegressor-RBF
    """,
)


def prepared(case: Fused, *, symbolic: bool) -> Any:
    """As `forward`; onnxruntime wants the labels too."""
    nodes, *rest = forward(case, symbolic=symbolic)
    if case.op == "LinearClassifier":
        nodes[0].output[0] = "labels"
    return nodes, *rest


def whole(nodes, inputs, outputs, **options: Any) -> onnx.ModelProto:
    """A model that imports the domain."""
    return model(nodes, inputs, outputs, imports=[(ML, 3)], **options)


@pytest.mark.nightly
@pytest.mark.quick(18)
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@by_case(CASES)
def test_gradient(case: Fused, symbolic: bool) -> None:
    nodes, inputs, feeds, wide, total = prepared(case, symbolic=symbolic)
    xs = [f"x{i}" for i in case.differentiated]
    gradients = [f"d{x}" for x in xs]
    gradient = node("Gradient", xs, gradients, xs=xs, y="y")
    lowered = ortops.lower(whole([*nodes, gradient], inputs, ["y", *gradients]))
    assert not without_gradient(lowered), "of the next order"
    assert case.op in [n.op_type for n in lowered.graph.node], "kept in the forward pass"
    y, *found = run(lowered, feeds)
    plain = run(whole(nodes, inputs, ["y"]), feeds)[0]
    np.testing.assert_allclose(plain, total(wide), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(y, plain)
    for position, result in zip(case.differentiated, found, strict=True):
        expected = differences(total, wide, position)
        assert result.shape == expected.shape
        assert result.dtype == np.float32
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@by_case(CASES)
def test_second_order(case: Fused) -> None:
    """The gradient of Σ vᵢ · ∂y/∂xᵢ."""
    nodes, inputs, feeds, wide, total = prepared(case, symbolic=False)
    directions, terms, xs = {}, [], [f"x{i}" for i in case.differentiated]
    nodes.append(node("Gradient", xs, [f"first_{x}" for x in xs], xs=xs, y="y"))
    for i in case.differentiated:
        directions[i] = normal(*wide[i].shape, seed=90 + i)
        feeds[f"v{i}"] = directions[i].astype(np.float32)
        inputs.append(value(f"v{i}", directions[i].shape))
        nodes += [
            helper.make_node("Mul", [f"first_x{i}", f"v{i}"], [f"along{i}"]),
            helper.make_node("ReduceSum", [f"along{i}"], [f"term_{i}"], keepdims=0),
        ]
        terms.append(f"term_{i}")
    nodes.append(helper.make_node("Sum", terms, ["slope"]))
    nodes.append(node("Gradient", xs, [f"d{x}" for x in xs], xs=xs, y="slope"))
    found = run(ortops.lower(whole(nodes, inputs, [f"d{x}" for x in xs])), feeds)
    for i, gradient in zip(case.differentiated, found, strict=True):
        u = normal(*wide[i].shape, seed=70 + i)
        expected = mixed_difference(total, wide, [directions, {i: u}], 1e-4)
        scale = np.abs(gradient * u).sum() + abs(expected) + 1e-2
        assert abs((gradient * u).sum() - expected) <= 1e-3 * scale


@by_case(
    [c for c in CASES if c.op in ("ArrayFeatureExtractor", "FeatureVectorizer", "LinearClassifier")]
    + [c for c in CASES if c.op in ("Normalizer", "Scaler")]
)
def test_float64(case: Fused) -> None:
    """Inputs that onnxruntime takes in float64; the gradient has their type."""
    feeds = {
        f"x{i}": a.astype(np.float32).astype(np.float64) if a.dtype.kind == "f" else a
        for i, a in enumerate(case.inputs)
    }
    inputs = [value(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in feeds.items()]
    last = case.outputs[-1] if not isinstance(case.outputs, int) else 0
    nodes = [
        ml(case.op, list(feeds), [f"y{i}" for i in range(last + 1)], **case.attributes),
        helper.make_node("Exp", [f"y{last}"], ["y"]),
        node("Gradient", ["x0"], ["d"], xs=["x0"], y="y"),
    ]
    (d,) = run(ortops.lower(whole(nodes, inputs, ["d"])), feeds)

    def total(arrays) -> float:
        results = case.function(*arrays)
        return float(np.exp(results[-1] if last else results).sum())

    expected = differences(total, list(feeds.values()), 0)
    assert d.dtype == np.float64
    np.testing.assert_allclose(d, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


IN_INTEGERS = (
    *(c for c in CASES if c.op in ("ArrayFeatureExtractor", "FeatureVectorizer", "Normalizer")),
    *(c for c in CASES if c.op == "Scaler"),
    *(c for c in CASES if c.op == "LinearClassifier" and "PROBIT" not in c.name),
    case(
        "Imputer",
        [np.array([[0.0, 2.0], [1.0, 0.0]])],
        lambda x: np.where(x == 1, 5, x),
        imputed_value_int64s=[5, 6],
        replaced_value_int64=1,
    ),
)
KERNELS = {
    np.float32: CASES,
    np.float64: [c for c in IN_INTEGERS if c.op != "Imputer"],
    np.int64: IN_INTEGERS,
}
"""What onnxruntime runs, by type."""


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(c, dtype, marks=() if c.quick else pytest.mark.slow)
        for dtype, cases in KERNELS.items()
        for c in cases
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_definitions_say_what_onnxruntime_computes(case: Fused, dtype: type) -> None:
    """Values, types and shapes: the nodes of a definition against the operator that stays."""
    scale = 3 if dtype is np.int64 else 1
    feeds = {
        f"x{i}": (a * scale).astype(dtype) if a.dtype.kind == "f" else a
        for i, a in enumerate(case.inputs)
    }
    outputs = ["labels", "y"] if case.op == "LinearClassifier" else ["y"]
    operator = ml(case.op, list(feeds), outputs, **case.attributes)
    inputs = [value(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in feeds.items()]
    (expected,) = run(whole([operator], inputs, ["y"]), feeds)
    given = {a.name: helper.get_attribute_value(a) for a in operator.attribute}
    attributes = {n: v.decode() if isinstance(v, bytes) else v for n, v in given.items()}
    with ortops.Tape() as tape:
        xs = [tape.input(name, a.dtype, a.shape) for name, a in feeds.items()]
        results = BUILT_IN.rules[ML, case.op].function(*xs, **attributes)
        y = tape.output(results[-1] if isinstance(results, tuple) else results, "y")
    assert y.shape == expected.shape
    (found,) = run(tape.model(), feeds)
    assert found.dtype == expected.dtype
    # In the kernel's float32, what PROBIT takes the root of is off by 1e-7 next to a half.
    atol = 1e-4 if "PROBIT" in case.name else 1e-6
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=atol)


def test_rows_of_zeros_stay_as_they_are() -> None:
    """The gradient there is that of y = x, and is a number."""
    for norm in ("MAX", "L1", "L2"):
        nodes = [
            ml("Normalizer", ["x"], ["y"], norm=norm),
            node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
        ]
        y, d = run(
            ortops.lower(whole(nodes, [value("x", [1, 3])], ["y", "d"])),
            {"x": np.zeros((1, 3), np.float32)},
        )
        np.testing.assert_array_equal(y, np.zeros((1, 3)))
        np.testing.assert_array_equal(d, np.ones((1, 3)))


def test_scores_of_zero_take_no_part_in_softmax_zero() -> None:
    nodes = [
        ml(
            "LinearRegressor",
            ["x"],
            ["s"],
            targets=3,
            coefficients=np.eye(3).ravel().tolist(),
            post_transform="SOFTMAX_ZERO",
        ),
        helper.make_node("Mul", ["s", "s"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    x = np.array([[0.5, 0, 1.5]], np.float32)
    s, d = run(ortops.lower(whole(nodes, [value("x", [1, 3])], ["s", "d"])), {"x": x})
    np.testing.assert_allclose(s, softmax_zero(x.astype(np.float64)), rtol=1e-5)

    def total(arrays) -> float:  # of the two that are not zero
        return float((softmax(arrays[0]) ** 2).sum())

    expected = differences(total, [x[:, [0, 2]].astype(np.float64)], 0)
    np.testing.assert_allclose(d[:, [0, 2]], expected, rtol=1e-4)
    assert d[0, 1] == 0


def test_the_slope_of_probit_at_a_half() -> None:
    """There √ has no slope, and 1 − t² cancels; the derivative is √(2π)."""
    nodes = [
        ml("LinearRegressor", ["x"], ["y"], coefficients=[1.0], post_transform="PROBIT"),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    x = np.array([[0.5], [np.nextafter(np.float32(0.5), 1)], [0.49998]], np.float32)
    (d,) = run(ortops.lower(whole(nodes, [value("x", [3, 1])], ["d"])), {"x": x})
    np.testing.assert_allclose(d, np.full((3, 1), math.sqrt(2 * math.pi)), rtol=1e-4)


def test_missing_values_are_not_a_number() -> None:
    nodes = [
        ml(
            "Imputer",
            ["x"],
            ["y"],
            imputed_value_floats=[1.0, 2.0],
            replaced_value_float=float("nan"),
        ),
        helper.make_node("Mul", ["y", "y"], ["z"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="z"),
    ]
    x = np.array([[np.nan, 1], [3, np.nan]], np.float32)
    (d,) = run(ortops.lower(whole(nodes, [value("x", ["n", 2])], ["d"])), {"x": x})
    np.testing.assert_array_equal(d, [[0, 2], [6, 0]])


STEPS = {
    "Binarizer": {"threshold": 0.3},
    "LabelEncoder": {"keys_floats": [1.0, 2.0], "values_floats": [5.0, 6.0]},
    "OneHotEncoder": {"cats_int64s": [1, 2]},
}


@pytest.mark.parametrize("op_type", STEPS)
def test_steps(op_type: str) -> None:
    """Σ step(x) · exp(x): only the second factor has a derivative."""
    nodes = [
        ml(op_type, ["x"], ["step"], **STEPS[op_type]),
        helper.make_node("ReduceMax", ["step", "last"], ["value"], keepdims=0)
        if op_type == "OneHotEncoder"
        else helper.make_node("Identity", ["step"], ["value"]),
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Mul", ["value", "e"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    inputs = [value("x", ["n", 3])]
    proto = whole(nodes, inputs, ["value", "d"], initializers={"last": np.array([-1])})
    x = np.array([[1, 2, 3], [0, 2, 1]], np.float32)
    step, d = run(ortops.lower(proto), {"x": x})
    assert np.unique(step).size > 1
    np.testing.assert_allclose(d, step * np.exp(x), rtol=1e-5)


def described(name: str, kind: onnx.TypeProto) -> onnx.ValueInfoProto:
    return helper.make_value_info(name, kind)


def map_type(key: int, kind: int) -> onnx.TypeProto:
    return helper.make_map_type_proto(key, helper.make_tensor_type_proto(kind, None))


@pytest.mark.parametrize("opset", [9, 13, 21])
def test_inputs_that_are_maps(opset: int) -> None:
    words = map_type(TensorProto.STRING, TensorProto.FLOAT)
    numbers = map_type(TensorProto.INT64, TensorProto.FLOAT)
    nodes = [
        ml("DictVectorizer", ["words"], ["vector"], string_vocabulary=["a", "b", "c"]),
        ml("CastMap", ["numbers"], ["cast"], cast_to="TO_FLOAT"),
        helper.make_node("Add", ["vector", "cast"], ["factor"]),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    inputs = [value("x", [1, 3]), described("words", words), described("numbers", numbers)]
    proto = whole(nodes, inputs, ["y", "d"], opset=opset)
    before = proto.SerializeToString()
    lowered = ortops.lower(proto)
    assert proto.SerializeToString() == before
    assert [v.type for v in lowered.graph.input][1:] == [words, numbers]
    x = np.array([[1, 2, 3]], np.float32)
    feeds = {"x": x, "words": {"c": 4.0, "a": 5.0}, "numbers": {0: 1.0, 1: 2.0, 2: 3.0}}
    for session in (ortops.InferenceSession(proto), plain_session(lowered)):
        (d,) = session.run(["d"], feeds)
        np.testing.assert_array_equal(d.ravel(), [6, 2, 7])


def test_categories() -> None:
    """Strings become integers beside the path of the gradient."""
    nodes = [
        ml("CategoryMapper", ["words"], ["codes"], cats_strings=["a", "b"], cats_int64s=[3, 4]),
        helper.make_node("Cast", ["codes"], ["factor"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    inputs = [value("x", [2]), value("words", [2], TensorProto.STRING)]
    lowered = ortops.lower(whole(nodes, inputs, ["d"]))
    feeds = {"x": np.ones(2, np.float32), "words": np.array(["b", "a"], object)}
    (d,) = plain_session(lowered).run(None, feeds)
    np.testing.assert_array_equal(d, [4, 3])


def zip_map(opset: int, *more: onnx.NodeProto, y: str = "scores") -> onnx.ModelProto:
    nodes = [
        ml(
            "LinearClassifier",
            ["x"],
            ["label", "scores"],
            coefficients=[1.0, 2.0, 3.0, 4.0],
            intercepts=[0.5, 0.25],
            classlabels_ints=[7, 8],
            post_transform="SOFTMAX",
        ),
        ml("ZipMap", ["scores"], ["maps"], classlabels_int64s=[7, 8]),
        helper.make_node("Mul", ["scores", "scores"], ["squares"]),
        *more,
        node("Gradient", ["x"], ["d"], name="gradient", xs=["x"], y=y),
    ]
    proto = whole(nodes, [value("x", ["n", 2])], ["label", "d"], opset=opset)
    maps = helper.make_sequence_type_proto(map_type(TensorProto.INT64, TensorProto.FLOAT))
    proto.graph.output.append(described("maps", maps))
    return proto


@pytest.mark.parametrize("opset", [9, 12, 15, 18, 21, 24])
def test_outputs_that_are_maps(opset: int) -> None:
    proto = zip_map(opset, y="squares")
    before = proto.SerializeToString()
    lowered = ortops.lower(proto)
    assert proto.SerializeToString() == before
    assert lowered.graph.output[2] == proto.graph.output[2]
    x = np.array([[0.5, -0.25], [0.25, 0.75]], np.float32)
    scores = softmax(x.astype(np.float64) @ np.array([[1, 3], [2, 4]]) + [0.5, 0.25])

    def total(arrays) -> float:
        return float((softmax(arrays[0] @ np.array([[1, 3], [2, 4]]) + [0.5, 0.25]) ** 2).sum())

    expected = differences(total, [x.astype(np.float64)], 0)
    for session in (ortops.InferenceSession(proto), plain_session(lowered)):
        label, d, maps = session.run(["label", "d", "maps"], {"x": x})
        np.testing.assert_array_equal(label, [[7, 8][i] for i in scores.argmax(1)])
        np.testing.assert_allclose([[m[7], m[8]] for m in maps], scores, rtol=1e-5)
        np.testing.assert_allclose(d, expected, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_maps_is_refused() -> None:
    message = (
        r"Gradient node 'gradient': y 'maps' is a sequence of maps, "
        r"created by ZipMap node 'zipmap'; "
        r"use the tensor 'scores'"
    )
    with pytest.raises(ortops.ModelError, match=message):
        ortops.lower(zip_map(21, y="maps"))


def test_the_gradient_to_maps_is_refused() -> None:
    nodes = [
        ml("DictVectorizer", ["words"], ["y"], string_vocabulary=["a", "b"]),
        node("Gradient", ["words"], ["d"], name="gradient", xs=["words"], y="y"),
    ]
    words = map_type(TensorProto.STRING, TensorProto.FLOAT)
    proto = whole(nodes, [described("words", words)], ["d"])
    message = (
        r"Gradient node 'gradient': x 'words' must be a floating-point tensor, got a map; "
        r"list it in zs instead"
    )
    with pytest.raises(ortops.ModelError, match=message):
        ortops.lower(proto)


def test_every_step_is_tested() -> None:
    """Here, in the tests above, by name."""
    assert {op for domain, op in ZERO_ELSEWHERE if domain == ML} == {
        *STEPS,
        *("CastMap", "CategoryMapper", "DictVectorizer", "ZipMap"),
    }


def test_types_and_ranks_behind_what_onnx_infers_nothing_of() -> None:
    """Matrices of which nothing is said are multiplied and indexed."""
    weights = np.ones((2, 3), np.float32)
    nodes = [
        ml("Scaler", ["x"], ["a"], offset=[0.0], scale=[2.0]),
        ml("LinearRegressor", ["a"], ["b"], coefficients=[1.0, 2.0, 3.0, 4.0], targets=2),
        ml("Normalizer", ["b"], ["c"], norm="L1"),
        ml("FeatureVectorizer", ["c", "b"], ["e"], inputdimensions=[1, 1]),
        helper.make_node("MatMul", ["e", "w"], ["f"]),
        helper.make_node("Einsum", ["f"], ["y"], equation="ij->"),
        node("Gradient", ["x"], ["d"], xs=["x"], y="y"),
    ]
    proto = whole(nodes, [value("x", ["n", 2])], ["d"], initializers={"w": weights})
    x = np.array([[0.5, 1.0]], np.float32)
    (d,) = run(ortops.lower(proto), {"x": x})

    def total(arrays) -> float:
        b = 2 * arrays[0] @ np.array([[1, 3], [2, 4]])
        c = b / np.abs(b).sum(1, keepdims=True)
        return float(3 * (c[:, 0] + b[:, 0]).sum())

    expected = differences(total, [x.astype(np.float64)], 0)
    np.testing.assert_allclose(d, expected, rtol=1e-4)


TREE: dict[str, Any] = {
    "nodes_featureids": [0, 0, 0],
    "nodes_treeids": [0, 0, 0],
    "nodes_nodeids": [0, 1, 2],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
    "nodes_values": [0.5, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 0],
    "nodes_falsenodeids": [2, 0, 0],
}
REFUSED = [
    (
        ml(
            "TreeEnsembleRegressor",
            ["x"],
            ["y"],
            target_ids=[0, 0],
            target_treeids=[0, 0],
            target_nodeids=[1, 2],
            target_weights=[1.0, 2.0],
            n_targets=1,
            **TREE,
        ),
        (
            r"TreeEnsembleRegressor node 'treeensembleregressor': trees are piecewise constant, .*"
            r"carries no information; take the gradient of a smooth model, or "
            r"cut the graph after the node by listing its output in xs "
            r"\(asked for by Gradient node 'd'\)"
        ),
    ),
    (
        ml(
            "TreeEnsembleClassifier",
            ["x"],
            ["label", "y"],
            class_ids=[0, 1],
            class_treeids=[0, 0],
            class_nodeids=[1, 2],
            class_weights=[1.0, 1.0],
            classlabels_int64s=[0, 1],
            **TREE,
        ),
        r"TreeEnsembleClassifier node 'treeensembleclassifier': trees are piecewise constant",
    ),
    (
        ml(
            "SVMClassifier",
            ["x"],
            ["label", "y"],
            classlabels_ints=[0, 1],
            coefficients=[1.0, -1.0],
            kernel_params=[0.5, 0.0, 3.0],
            kernel_type="RBF",
            rho=[0.1],
            support_vectors=[1.0, 2.0, 3.0, 4.0],
            vectors_per_class=[1, 1],
        ),
        (
            r"SVMClassifier node 'svmclassifier': there is no gradient rule for an SVM's votes "
            r"between pairs of classes; use another kind of model \(SVMRegressor has a gradient\), "
            r"cut the graph after the node by listing its output in xs, or add a rule"
        ),
    ),
    (
        ml(
            "SVMRegressor",
            ["x"],
            ["y"],
            coefficients=[1.0, -1.0],
            kernel_params=[0.5, 0.0, 3.0],
            rho=[0.1],
            one_class=1,
        ),
        (
            r"SVMRegressor node 'svmregressor': no gradient for one_class=1, whose output is a "
            r"sign and piecewise constant; use one_class=0"
        ),
    ),
    (
        ml(
            "LinearClassifier",
            ["x"],
            ["label", "y"],
            classlabels_ints=[0, 1],
            coefficients=[1.0, -1.0],
            intercepts=[0.5],
            post_transform="PROBIT",
        ),
        (
            r"LinearClassifier node 'linearclassifier': no gradient for post_transform 'PROBIT' "
            r"with one score for two classes; use LOGISTIC"
        ),
    ),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED, ids=[n.op_type for n, _ in REFUSED])
def test_what_is_refused(refused: onnx.NodeProto, message: str) -> None:
    inputs = [value("x", ["n", 2])]
    x = np.ones((1, 2), np.float32)
    run(model([refused], inputs, ["y"], imports=[(ML, 1)]), {"x": x})  # a legal model
    nodes = [refused, node("Gradient", ["x"], ["d"], xs=["x"], y="y")]
    proto = model(nodes, inputs, ["y", "d"], imports=[(ML, 1)])
    for refuse in (ortops.lower, ortops.InferenceSession):
        with pytest.raises(ortops.UnsupportedError, match=message):
            refuse(proto)


def test_every_refusal_is_tested() -> None:
    """TreeEnsemble shares its reason with the operators that it came in the place of."""
    tested = {(ML, n.op_type) for n, _ in REFUSED}
    assert set(BUILT_IN.refusals) <= tested | {(ML, "TreeEnsemble")}
    assert len({BUILT_IN.refusals[ML, op] for op in ("TreeEnsemble", "TreeEnsembleRegressor")}) == 1


def test_a_tree_beside_the_path_of_a_gradient() -> None:
    """Only where a gradient would pass it is refused; its output has a type."""
    tree, _ = REFUSED[0]
    nodes = [
        tree,
        helper.make_node("Mul", ["y", "w"], ["z"]),
        node("Gradient", ["w"], ["d"], xs=["w"], y="z"),
    ]
    proto = model(nodes, [value("x", ["n", 2]), value("w", [1])], ["y", "d"], imports=[(ML, 1)])
    feeds = {"x": np.array([[0, 0], [1, 0]], np.float32), "w": np.ones(1, np.float32)}
    y, d = run(ortops.lower(proto), feeds)
    np.testing.assert_array_equal(y.ravel(), [1, 2])
    np.testing.assert_array_equal(d, [3])


def test_a_rule_of_the_users_own_goes_before_a_refusal(monkeypatch) -> None:
    monkeypatch.setattr(ortops.graph.autodiff.registry.USER, "rules", {})
    ortops.vjp("TreeEnsembleRegressor", domain=ML)(straight_through)
    nodes = [REFUSED[0][0], node("Gradient", ["x"], ["d"], xs=["x"], y="y")]
    proto = model(nodes, [value("x", ["n", 2])], ["d"], imports=[(ML, 1)])
    (d,) = run(ortops.lower(proto), {"x": np.ones((1, 2), np.float32)})
    np.testing.assert_array_equal(d, [[1, 1]])


def straight_through(
    g,
    y,
    x,
    *,
    n_targets,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_modes,
    nodes_nodeids,
    nodes_treeids,
    nodes_truenodeids,
    nodes_values,
    target_ids,
    target_nodeids,
    target_treeids,
    target_weights,
):
    return ortops.op.Expand(g, ortops.op.Shape(x))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            ml("Normalizer", ["x"], ["y"], norm="L3"),
            r"Normalizer node 'normalizer': norm must be MAX, L1 or L2, got 'L3'",
        ),
        (
            ml("LinearRegressor", ["x"], ["y"], coefficients=[1.0, 2.0], post_transform="EXP"),
            (
                r"LinearRegressor node 'linearregressor': post_transform must "
                r"be NONE, LOGISTIC, .* got 'EXP'"
            ),
        ),
        (
            ml("LinearRegressor", ["x"], ["y"], coefficients=[1.0, 2.0, 3.0], targets=2),
            (
                r"LinearRegressor node 'linearregressor': the number of coefficients must be a "
                r"multiple of the 2 scores, got 3"
            ),
        ),
        (
            ml("FeatureVectorizer", ["x", "x"], ["y"], inputdimensions=[2]),
            (
                r"FeatureVectorizer node 'featurevectorizer': inputdimensions must have one size "
                r"for each of the 2 inputs, got 1"
            ),
        ),
        (
            ml(
                "SVMRegressor",
                ["x"],
                ["y"],
                kernel_type="COSINE",
                kernel_params=[1.0, 1.0, 1.0],
                n_supports=1,
                support_vectors=[1.0, 2.0],
                coefficients=[1.0],
                rho=[0.0],
            ),
            (
                r"SVMRegressor node 'svmregressor': kernel_type must be LINEAR, "
                r"POLY, RBF or SIGMOID, got 'COSINE'"
            ),
        ),
    ],
    ids=lambda each: getattr(each, "op_type", None),
)
def test_what_is_illegal(wrong: onnx.NodeProto, message: str) -> None:
    nodes = [wrong, node("Gradient", ["x"], ["d"], xs=["x"], y="y")]
    with pytest.raises(ortops.ModelError, match=message):
        ortops.lower(whole(nodes, [value("x", [1, 2])], ["y", "d"]))
    with pytest.raises(REFUSALS):  # onnxruntime does not take them either
        run(whole([wrong], [value("x", [1, 2])], ["y"]), {"x": np.ones((1, 2), np.float32)})


def test_training_keeps_outputs_that_are_maps(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["scores"]),
        ml("ZipMap", ["scores"], ["maps"], classlabels_strings=["no", "yes"]),
    ]
    initializers = {"w": np.zeros((3, 2), np.float32)}
    proto = whole(nodes, [value("x", ["n", 3])], [], initializers=initializers)
    maps = helper.make_sequence_type_proto(map_type(TensorProto.STRING, TensorProto.FLOAT))
    proto.graph.output.extend([value("logits", ["n", 2]), described("maps", maps)])
    training = ortops.build_training_model(
        proto, loss="SoftmaxCrossEntropy", optimizer="Adam", trainable=["w"]
    )
    session = ortops.TrainingSession(training)
    x, labels = np.eye(3, dtype=np.float32), np.array([0, 1, 1])
    losses = [session.step({"x": x, "labels": labels})["loss"] for _ in range(50)]
    assert losses[-1] < losses[0]
    session.save(tmp_path / "trained.onnx")
    for trained in (onnx.load(tmp_path / "trained.onnx"), session.inference_model()):
        assert trained.graph.output[1] == proto.graph.output[1]
        (found,) = plain_session(trained).run(["maps"], {"x": x})
        assert [max(each, key=each.get) for each in found] == ["no", "yes", "yes"]
