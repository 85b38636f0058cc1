"""Cases of Gradient through If, Loop, Scan and functions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ortops.conformance.case import Case, Run
from ortops.conformance.gradients import NO_PATH, SUM, gradient_case, said

_SUBGRAPH = said(
    'By definition, the tensor "y" is a function of independent variables in "xs" and "zs".'
)
_SCOPE = (
    "The specification does not say in which scope xs, zs and y are looked up. The case assumes "
    "that of the node: names of its function, and names of outer graphs within a branch."
)

_NOT_EXECUTED = (
    "The specification does not mention operators with sub-graphs. The case assumes that what is "
    "not executed has no part in the gradient."
)


def _of_if() -> Iterator[Case]:
    x, z = np.array([1.0, -2]), np.array([3.0, 0.5])
    text = (
        "g (bool c, float[2] x, float[2] z) => (float y, float[2] g, float[2] h) {"
        "p = If (c) <"
        "  then_branch = then () => (float[2] a) { a = Mul (x, z) },"
        "  else_branch = other () => (float[2] b) { s = Mul (x, x) b = Add (s, z) }>"
        " y = ReduceSum <keepdims = 0> (p)"
        ' g, h = Gradient <xs = ["x", "z"], zs = ["c"], y = "y"> (x, z, c) }'
    )
    for name, flag, y, g, h in (
        ("if_then", True, np.sum(x * z), z, x),
        ("if_else", False, np.sum(x * x + z), 2 * x, np.ones(2)),
    ):
        feeds = {"c": np.asarray(flag), "x": x, "z": z}
        yield gradient_case(name, text, feeds, {"y": y, "g": g, "h": h}, _SUBGRAPH)
    yield gradient_case(
        "if_at_other_condition",
        "g (bool c, bool d, float[2] x) => (float[2] p, float[2] g) {"
        "p = If (c) <"
        "  then_branch = then () => (float[2] a) { a = Mul (x, x) },"
        "  else_branch = other () => (float[2] b) { b = Neg (x) }>"
        " y = ReduceSum <keepdims = 0> (p)"
        ' g = Gradient <xs = ["x"], zs = ["c"], y = "y"> (x, d) }',
        {"c": np.asarray(False), "d": np.asarray(True), "x": x},
        {"p": -x, "g": 2 * x},
        said('the 3rd input is substituted for all the occurrences of "C".'),
    )
    yield gradient_case(
        "if_not_executed",
        "g (bool c, float x) => (float y, float g) { y = If (c) <"
        "  then_branch = then () => (float a) { a = Log (x) },"
        "  else_branch = other () => (float b) { b = Mul (x, x) }>"
        ' g = Gradient <xs = ["x"], zs = ["c"], y = "y"> (x, c) }',
        {"c": np.asarray(False), "x": 0.0},
        {"y": 0.0, "g": 0.0},
        _SUBGRAPH,
        proposal=_NOT_EXECUTED,
    )
    yield gradient_case(
        "if_without_path",
        "g (bool c, float x, float z) => (float g, float h) { y = If (c) <"
        "  then_branch = then () => (float a) { a = Mul (x, x) },"
        "  else_branch = other () => (float b) { b = Mul (z, z) }>"
        ' g, h = Gradient <xs = ["x", "z"], zs = ["c"], y = "y"> (x, z, c) }',
        {"c": np.asarray(True), "x": 3.0, "z": 5.0},
        {"g": 6.0, "h": 0.0},
        _SUBGRAPH,
        proposal=NO_PATH,
    )


def _of_nested_if() -> Iterator[Case]:
    """Yields an If in an If, and the second order."""
    yield gradient_case(
        "if_in_if",
        "g (bool c, bool d, float x) => (float g) { y = If (c) <"
        "  then_branch = then () => (float a) { a = If (d) <"
        "    then_branch = inner () => (float i) { i = Mul (x, x) },"
        "    else_branch = none () => (float j) { j = Neg (x) }> },"
        "  else_branch = other () => (float b) { b = Identity (x) }>"
        ' g = Gradient <xs = ["x"], zs = ["c", "d"], y = "y"> (x, c, d) }',
        {"c": np.asarray(True), "d": np.asarray(True), "x": 3.0},
        {"g": 6.0},
        _SUBGRAPH,
    )
    case = gradient_case(
        "if_second_order",
        "g (bool c, float x) => (float a, float b) { y = If (c) <"
        "  then_branch = then () => (float p) { s = Mul (x, x) p = Mul (s, x) },"
        "  else_branch = other () => (float q) { q = Mul (x, x) }>"
        ' a = Gradient <xs = ["x"], zs = ["c"], y = "y"> (x, c)'
        ' b = Gradient <xs = ["x"], zs = ["c"], y = "a"> (x, c) }',
        {"c": np.asarray(True), "x": 2.0},
        {"a": 12.0, "b": 12.0},
        _SUBGRAPH,
    )
    other = Run(
        {"c": np.asarray(False), "x": np.asarray(2, np.float32)},
        {"a": np.asarray(4, np.float32), "b": np.asarray(2, np.float32)},
    )
    yield Case(case.name, case.model, case.cites, [*case.runs, other])


def _gradient_in_if() -> Iterator[Case]:
    text = (
        "g (bool c, float x) => (float g) { y = Mul (x, x) g = If (c) <"
        '  then_branch = then () => (float a) { a = Gradient <xs = ["x"], y = "y"> (x) },'
        "  else_branch = other () => (float b) { b = Identity (x) }> }"
    )
    for name, flag, found in (("in_if", True, 6.0), ("in_if_not_executed", False, 3.0)):
        feeds = {"c": np.asarray(flag), "x": 3.0}
        yield gradient_case(name, text, feeds, {"g": found}, proposal=_SCOPE)


def _of_loop() -> Iterator[Case]:
    text = (
        "g (int64 n, float[2] x, float[2] w) => (float y, float[2] g, float[2] h)"
        "<bool go = {1}> {"
        "p = Loop (n, go, x) <body = step (int64 i, bool c, float[2] a)"
        " => (bool o, float[2] b) { o = Identity (c) b = Mul (a, w) }>"
        " y = ReduceSum <keepdims = 0> (p)"
        ' g, h = Gradient <xs = ["x", "w"], zs = ["n"], y = "y"> (x, w, n) }'
    )
    x, w = np.array([1.5, -2]), np.array([0.5, 3])
    for n in (0, 1, 3):  # y = Σ x wⁿ
        yield gradient_case(
            f"loop_{n}",
            text,
            {"n": np.asarray(n), "x": x, "w": w},
            {"y": np.sum(x * w**n), "g": w**n, "h": n * x * w ** max(n - 1, 0)},
            _SUBGRAPH,
        )
    yield gradient_case(
        "loop_until",
        "g (float x) => (float y, float g) <int64 n = {20}, bool go = {1}, float limit = {10.0}> {"
        "y = Loop (n, go, x) <body = step (int64 i, bool c, float a) => (bool o, float b)"
        " { b = Mul (a, a) o = Less (b, limit) }>"
        ' g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": 1.5},  # 1.5 → 2.25 → 5.06 → 25.6: y = x⁸
        {"y": 1.5**8, "g": 8 * 1.5**7},
        _SUBGRAPH,
    )
    yield gradient_case(
        "loop_outputs",
        "g (float[1] x) => (float[m, 1] s, float[1] g) <int64 n = {3}, bool go = {1}> {"
        "p, s = Loop (n, go, x) <body = step (int64 i, bool c, float[1] a)"
        " => (bool o, float[1] b, float[1] d)"
        " { o = Identity (c) b = Mul (a, x) d = Identity (b) }>"
        " y = ReduceSum <keepdims = 0> (s)"
        ' g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"x": [2.0]},  # s = x², x³, x⁴
        {"s": [[4.0], [8], [16]], "g": [4.0 + 12 + 32]},
        _SUBGRAPH,
    )
    yield gradient_case(
        "loop_second_order",
        "g (float x) => (float a, float b) <int64 n = {3}, bool go = {1}, float one = {1.0}> {"
        "y = Loop (n, go, one) <body = step (int64 i, bool c, float p) => (bool o, float q)"
        " { o = Identity (c) q = Mul (p, x) }>"
        ' a = Gradient <xs = ["x"], y = "y"> (x)'
        ' b = Gradient <xs = ["x"], y = "a"> (x) }',
        {"x": 2.0},
        {"a": 12.0, "b": 12.0},
        _SUBGRAPH,
    )


def _of_scan() -> Iterator[Case]:
    s, w = np.array([[1.0, 2], [3, -1], [0.5, 4]]), np.array([0.5, -2.0])
    # h₀ = 0, hₜ = w hₜ₋₁ + sₜ; y = h₃ = w² s₁ + w s₂ + s₃
    yield gradient_case(
        "scan",
        "g (float[3, 2] s, float[2] w) => (float y, float[3, 2] g, float[2] h)"
        "<float[2] zero = {0.0, 0.0}> {"
        "last = Scan (zero, s) <num_scan_inputs = 1,"
        " body = step (float[2] a, float[2] t) => (float[2] b) { p = Mul (w, a) b = Add (p, t) }>"
        " y = ReduceSum <keepdims = 0> (last)"
        ' g, h = Gradient <xs = ["s", "w"], y = "y"> (s, w) }',
        {"s": s, "w": w},
        {
            "y": np.sum(w * w * s[0] + w * s[1] + s[2]),
            "g": np.stack([w * w, w, np.ones(2)]),
            "h": 2 * w * s[0] + s[1],
        },
        _SUBGRAPH,
    )
    yield gradient_case(
        "scan_outputs",
        "g (float[3, 2] s, float[2] x) => (float[3, 2] all, float[3, 2] g, float[2] h) {"
        "last, all = Scan (x, s) <num_scan_inputs = 1,"
        " body = step (float[2] a, float[2] t) => (float[2] b, float[2] d)"
        " { b = Add (a, t) d = Identity (b) }>"
        " y = ReduceSum <keepdims = 0> (all)"
        ' g, h = Gradient <xs = ["s", "x"], y = "y"> (s, x) }',
        {"s": s, "x": w},  # running sums
        {
            "all": w + np.cumsum(s, 0),
            "g": [[3.0, 3], [2, 2], [1, 1]],
            "h": [3.0, 3],
        },
        _SUBGRAPH,
    )


_FUNCTIONS = (
    '<domain: "local", opset_import: ["": 21]> square (a) => (b) { b = Mul (a, a) }'
    '<domain: "local", opset_import: ["": 21, "local": 1]>'
    "fourth (a) => (b) { s = local.square (a) b = local.square (s) }"
    '<domain: "local", opset_import: ["": 21]> scaled <factor> (a) => (b)'
    "{ f = Constant <value_float: float = @factor> () b = Mul (a, f) }"
)


def _of_functions() -> Iterator[Case]:
    x = np.array([1.5, -2])
    yield gradient_case(
        "function",
        "g (float[2] x) => (float[2] y, float[2] g) { y = local.square (x)"
        f' g = Gradient <xs = ["x"], y = "y"> (x) }} {_FUNCTIONS}',
        {"x": x},
        {"y": x * x, "g": 2 * x},
        _SUBGRAPH,
        proposal=SUM,
    )
    yield gradient_case(
        "function_in_function",
        "g (float x) => (float a, float b) { y = local.fourth (x)"
        ' a = Gradient <xs = ["x"], y = "y"> (x)'
        f' b = Gradient <xs = ["x"], y = "a"> (x) }} {_FUNCTIONS}',
        {"x": 1.5},
        {"a": 4 * 1.5**3, "b": 12 * 1.5**2},
        _SUBGRAPH,
    )
    yield gradient_case(
        "function_with_attribute",
        "g (float x) => (float g) { p = local.scaled <factor = 2.5> (x)"
        " q = local.scaled <factor = -1.0> (x) y = Mul (p, q)"
        f' g = Gradient <xs = ["x"], y = "y"> (x) }} {_FUNCTIONS}',
        {"x": 1.5},
        {"g": -7.5},
        _SUBGRAPH,
    )
    yield gradient_case(
        "in_function",
        "g (float a, float b) => (float g, float h) { g = local.slope (a) h = local.slope (b) }"
        '<domain: "local", opset_import: ["": 21, "ai.onnx.preview.training": 1]>'
        'slope (x) => (g) { y = Mul (x, x) g = Gradient <xs = ["x"], y = "y"> (x) }',
        {"a": 1.5, "b": -4.0},
        {"g": 3.0, "h": -8.0},
        proposal=_SCOPE,
    )


def cases() -> Iterator[Case]:
    """Yields the cases."""
    yield from _of_if()
    yield from _of_nested_if()
    yield from _gradient_in_if()
    yield from _of_loop()
    yield from _of_scan()
    yield from _of_functions()
