"""Cases of Gradient, but for control flow and functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ortops.conformance.case import Array, Case, Citation, Run, parse


def said(text: str) -> Citation:
    """Cites the description of Gradient."""
    return Citation("Gradient", text)


DEFINITION = said(
    'The i-th output is the gradient of "y" with respect to the i-th tensor specified in the '
    'attribute "xs".'
)
_VALUES = said(
    'The tensors named in attributes "xs", "zs", and "y" define the differentiated computation '
    "graph, and the inputs to Gradient node define the values at which the gradient is computed."
)
CUT = said("Gradient operator can compute derivative against intermediate tensors.")
_ORDERS = said("It is possible to represent high-order differentiation using Gradient operators.")
_SKIPPED = said("All outputs are optional.")
_ANY_TYPE = said("Allow outputs to be any kind of tensor.")
_FLOATING = said("Allow inputs to be any kind of floating-point tensor.")
_ZS = said(
    "The i-th input is the value of the i-th tensor specified in the concatenated list of the "
    'attribute "xs" and the attribute "zs".'
)

SUM = (
    "The specification does not say what the gradient of a y that is not a scalar is. The case "
    "assumes that of the sum of its elements."
)
NO_PATH = (
    "The specification does not say what is returned for an x that y does not depend on, or only "
    "through operators whose results are piecewise constant. The case assumes zeros."
)
_INTERMEDIATE = (
    "The specification says both that intermediate tensors cannot appear in xs and that their "
    "gradient can be taken. The case assumes that the graph is cut at the tensors in xs and zs."
)
_OUTSIDE = (
    "The specification says that xs and zs determine y, but not whether initializers and other "
    "inputs have to be among zs. The case assumes that what is in neither keeps its value."
)
_KINK = (
    "The specification does not say what the gradient is where there is none. The case assumes "
    "the subgradient 0."
)


def gradient_case(
    name: str,
    text: str,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *cites: Citation,
    dtype: type[np.floating[Any]] = np.float32,
    **options: Any,
) -> Case:
    """Returns a case of a graph in text form.

    Args:
        name: The name, without ``test_gradient_``.
        text: The graph.
        inputs: Lists of numbers in the type ``dtype``, or arrays.
        outputs: The same; float64 arrays are rounded to ``dtype``.
        *cites: What it cites beside the definition of the outputs.
        dtype: The type of floating-point tensors.
        **options: Fields of Case.
    """

    def array(value: Any) -> Array:
        found = np.asarray(value)
        return found.astype(dtype) if found.dtype == np.float64 or found.size == 0 else found

    run = Run({k: array(v) for k, v in inputs.items()}, {k: array(v) for k, v in outputs.items()})
    cites = cites or (DEFINITION,)
    return Case(f"test_gradient_{name}", parse(text), cites, [run], **options)


def _of_the_specification() -> Iterator[Case]:
    """Yields the figures of the specification with one Gradient."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((1, 1, 3, 3)), rng.standard_normal((1, 1, 2, 2))
    z = rng.standard_normal((4, 1))
    patches = np.stack([x[0, 0, i : i + 2, j : j + 2] for i in range(2) for j in range(2)])
    h = np.tensordot(patches, w[0, 0], 2)[None]
    dw = np.tensordot(z[:, 0], patches, 1)[None, None]
    body = "H4 = Conv (X, W) H = Flatten (H4) Y = Gemm (H, Z)"
    kinds = "float[1, 1, 3, 3] X, float[1, 1, 2, 2] W, float[4, 1] Z"
    yield gradient_case(
        "conv_gemm",
        f"g ({kinds}) => (float[1, 1] Y, float[1, 1, 2, 2] dW, float[4, 1] dZ) {{ {body}"
        ' dW, dZ = Gradient <xs = ["W", "Z"], zs = ["X"], y = "Y"> (W, Z, X) }',
        {"X": x, "W": w, "Z": z},
        {"Y": h @ z, "dW": dw, "dZ": h.T},
        said("this Gradient only outputs dY/dW and dY/dZ."),
        _ZS,
    )
    yield gradient_case(
        "intermediate",
        f"g ({kinds}) => (float[1, 4] dH, float[4, 1] dZ) {{ {body}"
        ' dH, dZ = Gradient <xs = ["H", "Z"], y = "Y"> (H, Z) }',
        {"X": x, "W": w, "Z": z},
        {"dH": z.T, "dZ": h.T},
        CUT,
        proposal=_INTERMEDIATE,
    )
    h_1, z_1 = rng.standard_normal((1, 4)), rng.standard_normal((4, 1))
    yield gradient_case(
        "intermediate_at_other_values",
        f"g ({kinds}, float[1, 4] H_1, float[4, 1] Z_1) => (float[1, 4] dH, float[4, 1] dZ)"
        f' {{ {body} dH, dZ = Gradient <xs = ["H", "Z"], y = "Y"> (H_1, Z_1) }}',
        {"X": x, "W": w, "Z": z, "H_1": h_1, "Z_1": z_1},
        {"dH": z_1.T, "dZ": h_1.T},
        said(
            "one can compute the gradient of Y with respect to H at a specific value of H, H_1, "
            "by providing that value as an input to the Gradient node."
        ),
        proposal=_INTERMEDIATE,
    )


def _second_order_of_the_specification() -> Iterator[Case]:
    """Yields the figure with a Gradient of a Gradient.

    O = (X · W − L)²: dO/dX = 2 (X·W − L) W, d(dO/dW)/dX = 2 X W + 2 (X·W − L), d²O/dW² = 2 X².
    """
    a, b, c = 1.5, -2.0, 0.25
    error = a * b - c
    yield gradient_case(
        "second_order",
        "g (float[1, 1] X, float[1, 1] W, float[1, 1] L)"
        " => (float[1, 1] dX, float[1, 1] dW, float[1, 1] dWdX, float[1, 1] dWdW) {"
        "Y = Gemm (X, W) E = Sub (Y, L) O = Mul (E, E)"
        ' dX, dW = Gradient <xs = ["X", "W"], zs = ["L"], y = "O"> (X, W, L)'
        ' dWdX, dWdW = Gradient <xs = ["X", "W"], zs = ["L"], y = "dW"> (X, W, L) }',
        {"X": [[a]], "W": [[b]], "L": [[c]]},
        {
            "dX": [[2 * error * b]],
            "dW": [[2 * error * a]],
            "dWdX": [[2 * a * b + 2 * error]],
            "dWdW": [[2 * a * a]],
        },
        _ORDERS,
    )


def _of_values() -> Iterator[Case]:
    """Yields cases of what xs, zs and the inputs mean."""
    x, z, a, b = np.array([1.0, -2]), np.array([3.0, 0.5]), np.array([4.0, 5]), np.array([-6.0, 7])
    both = 'g, h = Gradient <xs = ["x", "z"], y = "y">'
    yield gradient_case(
        "replay",
        "g (float[2] x, float[2] z, float[2] a, float[2] b)"
        " => (float y, float[2] g, float[2] h) {"
        f"p = Mul (x, z) q = Mul (p, x) y = ReduceSum <keepdims = 0> (q) {both} (a, b) }}",
        {"x": x, "z": z, "a": a, "b": b},
        {"y": np.sum(x * x * z), "g": 2 * a * b, "h": a * a},
        _VALUES,
    )
    yield gradient_case(
        "replay_of_zs",
        "g (float[2] x, float[2] z, float[2] b) => (float[2] g) {"
        "p = Mul (x, z) q = Mul (p, z) y = ReduceSum <keepdims = 0> (q)"
        ' g = Gradient <xs = ["x"], zs = ["z"], y = "y"> (x, b) }',
        {"x": x, "z": z, "b": b},
        {"g": b * b},
        said('the 3rd input is substituted for all the occurrences of "C".'),
    )
    yield gradient_case(
        "replay_by_computed_values",
        "g (float[2] x) => (float[2] g) {"
        "y = Mul (x, x) twice = Add (x, x)"
        ' g = Gradient <xs = ["x"], y = "y"> (twice) }',
        {"x": x},
        {"g": 4 * x},
        _VALUES,
        proposal=SUM,
    )


def _of_other_tensors() -> Iterator[Case]:
    """Yields cases of initializers, of tensors outside of xs and zs, and of y itself."""
    x, z, a = np.array([1.0, -2]), np.array([3.0, 0.5]), np.array([4.0, 5])
    yield gradient_case(
        "outside_of_xs_and_zs",
        "g (float[2] x, float[2] z, float[2] a) => (float[2] g) {"
        "s = Exp (z) p = Mul (x, s) q = Mul (p, x) y = ReduceSum <keepdims = 0> (q)"
        ' g = Gradient <xs = ["x"], y = "y"> (a) }',
        {"x": x, "z": z, "a": a},
        {"g": 2 * a * np.exp(z)},
        _VALUES,
        proposal=_OUTSIDE,
    )
    yield gradient_case(
        "initializer_in_xs",
        "g (float[2] x) => (float y, float[2] dw) <float[2] w = {2.0, -3.0}> {"
        "p = Mul (x, w) q = Mul (p, w) y = ReduceSum <keepdims = 0> (q)"
        ' dw = Gradient <xs = ["w"], zs = ["x"], y = "y"> (w, x) }',
        {"x": x},
        {"y": np.sum(x * np.array([4.0, 9])), "dw": 2 * x * np.array([2.0, -3])},
        _VALUES,
    )
    yield gradient_case(
        "y_in_xs",
        'g (float[2] x) => (float[2] g) {y = Mul (x, x) g = Gradient <xs = ["y"], y = "y"> (y) }',
        {"x": x},
        {"g": [1.0, 1.0]},
        CUT,
        proposal=_INTERMEDIATE,
    )


def _of_outputs() -> Iterator[Case]:
    """Yields cases of skipped outputs, shapes and types."""
    x, z = np.array([1.0, -2]), np.array([3.0, 0.5])
    head = "g (float[2] x, float[2] z) => (float[2] g)"
    body = "p = Mul (x, z) y = ReduceSum <keepdims = 0> (p)"
    node = 'Gradient <xs = ["x", "z"], y = "y"> (x, z)'
    feeds = {"x": x, "z": z}
    yield gradient_case(
        "skipped_first", f'{head} {{ {body} "", g = {node} }}', feeds, {"g": x}, _SKIPPED
    )
    yield gradient_case(
        "skipped_last", f'{head} {{ {body} g, "" = {node} }}', feeds, {"g": z}, _SKIPPED
    )
    yield gradient_case(
        "fewer_outputs",
        f"{head} {{ {body} g = {node} }}",
        feeds,
        {"g": z},
        _SKIPPED,
        proposal="The specification lets outputs be skipped by an empty name, and does not say "
        "that they may be left out at the end, as in other operators. The case assumes it.",
    )
    yield gradient_case(
        "y_is_matrix",
        "g (float[2, 2] x) => (float[2, 2] y, float[2, 2] g) {"
        'y = MatMul (x, x) g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": [[1.0, 2], [3, 4]]},
        {"y": [[7.0, 10], [15, 22]], "g": [[7.0, 11], [9, 13]]},
        proposal=SUM,
    )


def _of_types() -> Iterator[Case]:
    """Yields cases of other types than float32."""
    x, z = np.array([1.0, -2]), np.array([3.0, 0.5])
    for name, dtype, kind in (
        ("float64", np.float64, "double"),
        ("float16", np.float16, "float16"),
    ):
        yield gradient_case(
            name,
            f"g ({kind}[2] x, {kind}[2] z) => ({kind}[2] g, {kind}[2] h) {{"
            "p = Mul (x, z) q = Mul (p, x) y = ReduceSum <keepdims = 0> (q)"
            ' g, h = Gradient <xs = ["x", "z"], y = "y"> (x, z) }',
            {"x": x, "z": z},
            {"g": 2 * x * z, "h": x * x},
            _FLOATING,
            dtype=dtype,
            **({"rtol": 1e-12} if dtype is np.float64 else {"rtol": 1e-3}),
        )
    i = np.array([2, 0, 2])
    yield gradient_case(
        "integer_in_zs",
        "g (float[3] x, int64[3] i) => (float[3] g) {"
        "p = Gather (x, i) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q)"
        ' g = Gradient <xs = ["x"], zs = ["i"], y = "y"> (x, i) }',
        {"x": [1.0, 2, 3], "i": i},
        {"g": [2.0, 0, 12]},
        _ANY_TYPE,
    )
    yield gradient_case(
        "boolean_in_zs",
        "g (float[2] x, bool[2] c) => (float[2] g) {"
        "n = Neg (x) p = Where (c, x, n) y = ReduceSum <keepdims = 0> (p)"
        ' g = Gradient <xs = ["x"], zs = ["c"], y = "y"> (x, c) }',
        {"x": x, "c": np.array([True, False])},
        {"g": [1.0, -1]},
        _ANY_TYPE,
    )
    yield gradient_case(
        "integer_in_zs_at_other_values",
        "g (float[3] x, int64[3] i, int64[3] j) => (float[3] g) {"
        "p = Gather (x, i) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q)"
        ' g = Gradient <xs = ["x"], zs = ["i"], y = "y"> (x, j) }',
        {"x": [1.0, 2, 3], "i": i, "j": np.array([1, 1, 1])},
        {"g": [0.0, 12, 0]},
        _ANY_TYPE,
        _VALUES,
    )


def _of_several_nodes() -> Iterator[Case]:
    """Yields cases of several Gradient nodes, of first and of higher orders."""
    x, z = np.array([1.0, -2]), np.array([3.0, 0.5])
    yield gradient_case(
        "several_nodes",
        "g (float[2] x, float[2] z) => (float[2] a, float[2] b, float[2] c) {"
        "p = Mul (x, z) q = Exp (p) y = ReduceSum <keepdims = 0> (p)"
        " w = ReduceSum <keepdims = 0> (q)"
        ' a = Gradient <xs = ["x"], zs = ["z"], y = "y"> (x, z)'
        ' b = Gradient <xs = ["z"], zs = ["x"], y = "y"> (z, x)'
        ' c = Gradient <xs = ["x"], zs = ["z"], y = "w"> (x, z) }',
        {"x": x, "z": z},
        {"a": z, "b": x, "c": z * np.exp(x * z)},
    )
    yield gradient_case(
        "third_order",
        "g (float x) => (float a, float b, float c) {"
        "s = Mul (x, x) y = Mul (s, s)"
        ' a = Gradient <xs = ["x"], y = "y"> (x)'
        ' b = Gradient <xs = ["x"], y = "a"> (x)'
        ' c = Gradient <xs = ["x"], y = "b"> (x) }',
        {"x": 1.5},
        {"a": 4 * 1.5**3, "b": 12 * 1.5**2, "c": 24 * 1.5},
        _ORDERS,
    )
    yield gradient_case(
        "second_order_at_other_values",
        "g (float x, float v) => (float a, float b) {"
        "s = Mul (x, x) y = Mul (s, x)"
        ' a = Gradient <xs = ["x"], y = "y"> (x)'
        ' b = Gradient <xs = ["x"], y = "a"> (v) }',
        {"x": 1.5, "v": -2.0},
        {"a": 3 * 1.5**2, "b": -12.0},
        _ORDERS,
        _VALUES,
    )


def _in_a_training_step() -> Iterator[Case]:
    """Yields cases in which a gradient is computed with."""
    x, z = np.array([1.0, -2]), np.array([3.0, 0.5])
    yield gradient_case(
        "of_a_penalty",
        "g (float[2] x, float[2] w) => (float[2] dw) {"
        "p = Mul (x, x) q = Mul (p, w) y = ReduceSum <keepdims = 0> (q)"
        ' dx = Gradient <xs = ["x"], zs = ["w"], y = "y"> (x, w)'
        " s = Mul (dx, dx) loss = ReduceSum <keepdims = 0> (s)"
        ' dw = Gradient <xs = ["w"], zs = ["x"], y = "loss"> (w, x) }',
        {"x": x, "w": z},
        {"dw": 8 * x * x * z},
        _ORDERS,
    )
    yield gradient_case(
        "then_momentum",
        "g (float[2] x, float[2] v, float r) => (float[2] x_new, float[2] v_new)"
        "<int64 t = {3}> { y = Mul (x, x)"
        ' g = Gradient <xs = ["x"], y = "y"> (x)'
        ' x_new, v_new = Momentum <alpha = 0.5, beta = 0.25, mode = "standard",'
        " norm_coefficient = 0.0> (r, t, x, g, v) }",
        {"x": x, "v": z, "r": 0.5},
        {"x_new": x - 0.5 * (0.5 * z + 0.5 * x), "v_new": 0.5 * z + 0.5 * x},
        proposal=SUM,
    )


def _without_path() -> Iterator[Case]:
    """Yields cases in which y does not depend on x, and of kinks."""
    x, z = np.array([1.0, -2]), np.array([3.0, 0.5])
    yield gradient_case(
        "without_path",
        "g (float[2] x, float[2] z) => (float[2] g, float[2] h) { y = Mul (x, x)"
        ' g, h = Gradient <xs = ["x", "z"], y = "y"> (x, z) }',
        {"x": x, "z": z},
        {"g": 2 * x, "h": [0.0, 0]},
        proposal=NO_PATH,
    )
    yield gradient_case(
        "through_comparison",
        "g (float[2] x, float[2] z) => (float[2] g, float[2] h) {"
        "c = Greater (x, z) m = Cast <to = 1> (c) y = Mul (m, z)"
        ' g, h = Gradient <xs = ["x", "z"], y = "y"> (x, z) }',
        {"x": x, "z": -z},
        {"g": [0.0, 0], "h": [1.0, 0]},
        proposal=NO_PATH,
    )
    yield gradient_case(
        "through_arg_max",
        "g (float[3] x) => (float[3] g) {"
        "i = ArgMax <axis = 0> (x) m = Gather (x, i) y = Mul (m, m)"
        ' g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": [1.0, 5, 2]},
        {"g": [0.0, 10, 0]},
        proposal=NO_PATH,
    )
    for name in ("Relu", "Abs"):
        slope = {"Relu": [0.0, 0, 1], "Abs": [-1.0, 0, 1]}[name]
        yield gradient_case(
            f"{name.lower()}_at_0",
            f"g (float[3] x) => (float[3] g) {{ y = {name} (x)"
            ' g = Gradient <xs = ["x"], y = "y"> (x) }',
            {"x": [-1.0, 0, 2]},
            {"g": slope},
            proposal=_KINK,
        )


def _of_broadcasting() -> Iterator[Case]:
    """Yields cases in which an operand is repeated."""
    a, b = np.array([[1.0], [-2.0]]), np.array([3.0, 0.5, 4])
    yield gradient_case(
        "broadcasting",
        "g (float[2, 1] a, float[3] b) => (float[2, 1] g, float[3] h) {"
        "p = Mul (a, b) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q)"
        ' g, h = Gradient <xs = ["a", "b"], y = "y"> (a, b) }',
        {"a": a, "b": b},
        {"g": 2 * a * np.sum(b * b), "h": 2 * b * np.sum(a * a)},
    )
    yield gradient_case(
        "broadcasting_of_scalar",
        "g (float a, float[3] b) => (float g, float[3] h) {"
        "p = Sub (a, b) q = Mul (p, p) y = ReduceSum <keepdims = 0> (q)"
        ' g, h = Gradient <xs = ["a", "b"], y = "y"> (a, b) }',
        {"a": 2.0, "b": b},
        {"g": np.sum(2 * (2 - b)), "h": -2 * (2 - b)},
    )
    text = (
        "g (float[n, m] a, float[m] b) => (float[n, m] g, float[m] h) {"
        "p = Mul (a, b) q = Mul (p, b) y = ReduceSum <keepdims = 0> (q)"
        ' g, h = Gradient <xs = ["a", "b"], y = "y"> (a, b) }'
    )
    rows = np.arange(6.0).reshape(2, 3)
    wanted = {"g": np.broadcast_to(b * b, (2, 3)), "h": 2 * b * rows.sum(0)}
    yield gradient_case("broadcasting_of_dynamic_shapes", text, {"a": rows, "b": b}, wanted)
    rows = rows[:, :1]  # sizes that are equal by name are 1 in this run
    wanted = {"g": np.full((2, 1), 9.0), "h": 6.0 * rows.sum(0)}
    feeds = {"a": rows, "b": b[:1]}
    yield gradient_case("broadcasting_of_size_1", text, feeds, wanted)
    yield gradient_case(
        "broadcasting_empty",
        "g (float[n] a, float b) => (float[n] g, float h) {"
        "p = Mul (a, b) y = ReduceSum <keepdims = 0> (p)"
        ' g, h = Gradient <xs = ["a", "b"], y = "y"> (a, b) }',
        {"a": np.zeros(0), "b": 2.0},
        {"g": np.zeros(0), "h": 0.0},
    )


def cases() -> Iterator[Case]:
    """Yields the cases."""
    yield from _of_the_specification()
    yield from _second_order_of_the_specification()
    yield from _of_values()
    yield from _of_other_tensors()
    yield from _of_outputs()
    yield from _of_types()
    yield from _of_several_nodes()
    yield from _in_a_training_step()
    yield from _without_path()
    yield from _of_broadcasting()
