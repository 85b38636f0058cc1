"""Formulas that find sub-graphs: in each order of operands, with constants of each rank, in bodies.

What is replaced is compared with the model as it was, run by onnxruntime without optimizations.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from running import run
from violations import all_violations

import ortops
from ortops.cli import main
from ortops.engine import lowering
from ortops.engine.execution.settings import Settings
from ortops.graph import convert, matching, passes, squashing
from ortops.graph.matching import Search, is_near
from ortops.graph.passes import (
    attention,
    gelu,
    normal_form,
    products,
    rms_normalization,
    rotary,
    scattered_sums,
    swish,
)
from ortops.graph.passes.draft import Pass
from ortops.graph.passes.rewrite import Formula, PatternPass
from ortops.graph.passes.scaled_sums import has_gated_add
from tests.spies import lowered, lowered_ir

PASSES = (
    gelu.GELU,
    rms_normalization.RMS_NORMALIZATION,
    rotary.ROTARY,
    products.SCALES,
    attention.ATTENTION,
    scattered_sums.SCATTERED_SUMS,
    swish.SWISH,
)
"""Without the normal form, which folds constants."""


@dataclass(frozen=True)
class Case:
    """A pattern, in one of the ways to write it.

    Attributes:
        body: The nodes that compute y from x [2, 4].
        fused: The operator that replaces them, or that is gone.
        numbers: The constants of one element.
        left: How many nodes of the operator are left.
        passes: What may replace it.
    """

    body: str
    fused: str
    numbers: dict[str, float] = field(default_factory=dict)
    left: int = 1
    passes: tuple[Pass, ...] = PASSES


GELU = {"half": 0.5, "one": 1.0, "root": 2**0.5}
TANH = {"half": 0.5, "one": 1.0, "three": 3.0, "cubic": 0.044715, "scale": 0.7978845608028654}
MEAN = "last = Constant <value_ints = [-1]> () s = Pow (x, two) m = ReduceMean (s, last)"
CASES = {
    "Swish": Case("s = Sigmoid (x) y = Mul (x, s)", "QuickGelu"),
    "Gelu": Case(
        "a = Div (x, root) b = Erf (a) c = Add (b, one) d = Mul (x, c) y = Mul (d, half)",
        "Gelu",
        GELU,
    ),
    "Gelu of tanh": Case(
        "p = Pow (x, three) q = Mul (cubic, p) r = Add (x, q) s = Mul (r, scale) t = Tanh (s)"
        " u = Add (one, t) v = Mul (half, x) y = Mul (v, u)",
        "Gelu",
        TANH,
    ),
    "RMS": Case(
        f"{MEAN} v = Add (m, tiny) r = Sqrt (v) n = Div (x, r) y = Mul (n, w)",
        "SimplifiedLayerNormalization",
        {"two": 2.0, "tiny": 1e-5},
    ),
    "RMS of a reciprocal": Case(
        f"{MEAN} v = Add (m, tiny) r = Sqrt (v) i = Div (one, r) n = Mul (x, i) y = Mul (w, n)",
        "SimplifiedLayerNormalization",
        {"two": 2.0, "tiny": 1e-5, "one": 1.0},
    ),
    "gate": Case("b = Erf (x) d = Mul (b, half) y = Add (d, half)", "HardSigmoid", {"half": 0.5}),
    "scale before a product": Case(
        "s = Mul (x, half) y = MatMul (s, square)", "FusedMatMul", {"half": 0.5}
    ),
    "mask of zeros": Case(
        "zero = Constant <value = float[2, 4] {0, 0, 0, 0, 0, 0, 0, 0}> () s = Add (x, zero)"
        " y = Softmax (s)",
        "Add",
        left=0,
        passes=(normal_form.NORMAL_FORM,),
    ),
    "part of a sequence": Case(
        "n = Constant <value_int = 2> () first = Constant <value_int = 0> ()"
        " parts = SplitToSequence <axis = 0> (x, n) h = SequenceAt (parts, first) y = Neg (h)",
        "SequenceAt",
        left=0,
        passes=(normal_form.NORMAL_FORM,),
    ),
    "rows of a tied table": Case(
        "n = Constant <value_ints = [8]> () z = ConstantOfShape (n) i = Constant <value_ints ="
        " [1, 1, 6]> () u = Constant <value_floats = [1.0, 2.0, 3.0]> () shape = Constant"
        ' <value_ints = [2, 4]> () t = ScatterElements <reduction = "add"> (z, i, u)'
        " r = Reshape (t, shape) h = Neg (x) y = Add (r, h)",
        "ConstantOfShape",
        left=0,
    ),
    "sums of rows in attention": Case(
        "last = Constant <value_ints = [-1]> () o = MatMul (x, narrow) g = Tanh (o)"
        " t = Transpose <perm = [1, 0]> (narrow) d = MatMul (g, t) q = Mul (x, d)"
        " y = ReduceSum (q, last)",
        "Transpose",
        left=0,
    ),
    "rotary embedding": Case(
        "shape = Constant <value_ints = [1, 1, 2, 4]> () x4 = Reshape (x, shape)"
        " cos = Constant <value = float[2, 4] {0.5, 1, 0.5, 1, 0.25, 0, 0.25, 0}> ()"
        " sin = Constant <value = float[1, 4] {2, 3, 2, 3}> ()"
        " halves = Constant <value_ints = [2, 2]> () a, b = Split <axis = 3> (x4, halves)"
        " n = Neg (b) r = Concat <axis = -1> (n, a) c = Mul (x4, cos) s = Mul (r, sin)"
        " y4 = Add (c, s) back = Constant <value_ints = [2, 4]> () y = Reshape (y4, back)",
        "RotaryEmbedding",
    ),
    "difference in attention": Case(
        "last = Constant <value_ints = [-1]> () g = ReduceMax (x, last) r = ReduceMin (x, last)"
        " t = Transpose <perm = [1, 0]> (column) d = MatMul (g, t) y = Sub (d, r)",
        "Sub",
        left=0,
    ),
}
X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
W = np.array([1, -2, 0.5, 3], np.float32)
WEIGHTS = {"w": W, "square": np.outer(W, W), "narrow": np.outer(W, W)[:, :3], "column": W[:, None]}


def model(case: Case, shapes: dict[str, list[int]] | None = None) -> onnx.ModelProto:
    """Returns the model of a case, whose numbers have some shapes; () by default."""
    made = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 4] x) => (y) {{ {case.body} }}""")
    read = {name for node in made.graph.node for name in node.input}
    arrays = {name: array for name, array in WEIGHTS.items() if name in read}
    for name, number in case.numbers.items():
        arrays[name] = np.full((shapes or {}).get(name, []), number, np.float32)
    made.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    made.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", 1, None))
    return made


def orders(made: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Yields a model with the operands of its sums and products in all orders."""
    places = [n for n, node in enumerate(made.graph.node) if node.op_type in ("Add", "Mul")]
    for turned in itertools.product((False, True), repeat=len(places)):
        copy = onnx.ModelProto()
        copy.CopyFrom(made)
        for place, turn in zip(places, turned, strict=True):
            if turn:
                node = copy.graph.node[place]
                node.input[:] = list(node.input)[::-1]
        yield copy


def operators(made: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in made.graph.node)


def plain(made: onnx.ModelProto, **feeds: Any) -> np.ndarray:
    """Returns y as onnxruntime computes it without optimizations."""
    (y,) = run(made, feeds, optimize=False)
    return y


@pytest.mark.slow
def test_each_order_of_operands_is_found() -> None:
    with all_violations() as check:
        for name, case in CASES.items():
            *_, last = ways = [lowered(each, *case.passes) for each in orders(model(case))]
            with check(name):
                assert [operators(each)[case.fused] for each in ways] == [case.left] * len(ways)
                wanted = plain(model(case), x=X)
                np.testing.assert_allclose(plain(last, x=X), wanted, rtol=1e-5, atol=1e-6)


def test_every_formula_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new formula needs a case here, so that its orders, ranks and bodies are tested."""
    found: set[str] = set()
    apply = Formula.apply

    def spied(self: Formula, *arguments: Any) -> Any:
        result = apply(self, *arguments)
        if result is not None and not isinstance(result, str):
            found.add(name_of(self))
        return result

    monkeypatch.setattr(Formula, "apply", spied)
    for case in CASES.values():
        lowered(model(case), *case.passes)
    assert found == set(map(name_of, patterns()))


@pytest.mark.slow
def test_numbers_that_add_axes_are_none_of_a_formula() -> None:
    with all_violations() as check:
        for (name, case), rank in itertools.product(CASES.items(), range(4)):
            for number in case.numbers:
                made = model(case, {number: [1] * rank})
                with check(f"{name}, {number} of rank {rank}"):
                    after = lowered(made, *case.passes)
                    assert operators(after)[case.fused] == (rank < 3)
                    found, wanted = plain(after, x=X), plain(made, x=X)
                    assert found.shape == wanted.shape
                    assert wanted.shape == ((2, 4) if rank < 3 else (1, 2, 4))
                    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_other_numbers_are_none_of_a_formula() -> None:
    """Those that float32 represents must be exact; others may be rounded."""
    with all_violations() as check:
        for name, case in CASES.items():
            for number, value in case.numbers.items():
                if number == "tiny" or case.fused == "FusedMatMul":  # any will do
                    continue
                other = {**case.numbers, number: value * (1 + 1e-5)}
                with check(f"{name}, {number}"):
                    after = lowered(model(Case(case.body, case.fused, other)), *case.passes)
                    assert operators(after)[case.fused] == 0
    assert is_near(float(np.float32(2**0.5)), 2**0.5)
    assert not is_near(float(np.nextafter(np.float32(2), np.float32(3))), 2)


# ---------------------------------------------------------------------------------------- bodies

BODIES = {
    "If": """g (float[2, 4] x, bool yes) => (float[2, 4] out) {
        out = If (yes) <
            then_branch = t () => (float[2, 4] y) { BODY },
            else_branch = e () => (float[2, 4] z) { z = Neg (x) }
        >
    }""",
    "Loop": """g (float[2, 4] x0, bool yes) => (float[2, 4] out) {
        count = Constant <value_int = 2> ()
        out = Loop (count, yes, x0) <
            body = b (int64 i0, bool going, float[2, 4] x) => (bool go, float[2, 4] y) {
                go = Identity (going) BODY
            }
        >
    }""",
    "Scan": """g (float[2, 4] x0, float[3, 2, 4] rows) => (float[2, 4] out, float[3, 2, 4] all) {
        out, all = Scan <num_scan_inputs = 1,
            body = b (float[2, 4] x, float[2, 4] row) => (float[2, 4] next, float[2, 4] y) {
                next = Max (x, row) BODY
            }
        > (x0, rows)
    }""",
}
FEEDS = {"x": X, "x0": X, "yes": np.array(True), "rows": np.ones((3, 2, 4), np.float32)}


def inside(text: str, case: Case) -> onnx.ModelProto:
    """Returns a model with a case in a body."""
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21]> {text.replace("BODY", case.body)}"""
    )
    made.graph.initializer.extend(model(case).graph.initializer)
    return made


@pytest.mark.slow
def test_bodies_are_rewritten() -> None:
    with all_violations() as check:
        for (where, text), (name, case) in itertools.product(BODIES.items(), CASES.items()):
            # What attention computes has another shape, so that it cannot be computed again.
            times = text.replace("value_int = 2", "value_int = 1") if "attention" in name else text
            made = inside(times, case)
            with check(f"{name} in {where}"):
                after = lowered(made, *case.passes)
                bodies = [
                    inner.op_type
                    for node in after.graph.node
                    for attribute in node.attribute
                    for inner in attribute.g.node
                ]
                assert bodies.count(case.fused) == case.left
                assert not case.left or case.fused not in operators(after)
                for found, wanted in zip(
                    run(after, FEEDS, optimize=False), run(made, FEEDS, optimize=False), strict=True
                ):
                    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


LAST = "last = Constant <value_ints = [-1]> ()"
PATTERNS = {
    "cross_entropy": "n = Constant <value_ints = [1, 0]> () y = SoftmaxCrossEntropyLoss (x, n)",
    "gated_sums": f"{LAST} m = ReduceSum (x, last) p = Mul (x, m) y = Add (p, x)",
    "max_pool": "s = Constant <value_ints = [1, 1, 2, 4]> () r = Reshape (x, s) p, i = MaxPool"
    " <kernel_shape = [2, 2], strides = [2, 2]> (r) y = Cast <to = 1> (i)",
    "numbers": f"{LAST} n = Constant <value_float = 2.0> () m = ReduceSum (x, last) y = Mul (m, n)",
    "row_sums": "n = Constant <value_ints = [0]> () y = ReduceSum <keepdims = 0> (x, n)",
    "scales": CASES["scale before a product"].body,
    "scattered_sums": CASES["rows of a tied table"].body,
    "transposes": "t = Transpose <perm = [1, 0]> (x) y = MatMul (t, x)",
}
"""What each pass changes that visits bodies."""


def test_each_pass_that_visits_bodies_changes_one() -> None:
    visiting = [e for e in passes.PASSES if isinstance(e, PatternPass) and e.visits_bodies]
    assert {each.name for each in visiting} == set(PATTERNS)
    with all_violations() as check:
        for each in visiting:
            case = Case(PATTERNS[each.name], "", {"half": 0.5})
            made = inside(BODIES["If"], case)
            branches = [attribute.g for attribute in made.graph.node[0].attribute]
            for value in (*made.graph.output, *(branch.output[0] for branch in branches)):
                value.type.tensor_type.ClearField("shape")
            if each.name == "gated_sums" and not has_gated_add():
                continue
            with check(each.name):
                after, before = lowered(made, each), lowered(made)
                assert after != before
                for found, wanted in zip(
                    run(after, FEEDS, optimize=False), run(made, FEEDS, optimize=False), strict=True
                ):
                    assert found.shape == wanted.shape
                    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_steps_through_bodies_are_those_without_passes() -> None:
    with all_violations() as check:
        for (where, text), name in itertools.product(BODIES.items(), ("Swish", "RMS")):
            made = inside(text, CASES[name])
            for output in made.graph.output:
                output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            made.graph.initializer.append(onnx.numpy_helper.from_array(W, "trained"))
            read = "x" if where == "If" else "x0"
            product = onnx.helper.make_node("Mul", ["given", "trained"], [read])
            made.graph.node.insert(0, product)
            made.graph.input[0].name = "given"
            with check(f"{name} in {where}"):
                trainable = ortops.build_training_model(
                    made,
                    loss=ortops.losses.MeanSquaredError(made.graph.output[-1].name),
                    optimizer="SGD",
                    trainable=["trained"],
                )
                feeds = {v.name: FEEDS[v.name] for v in made.graph.input[1:]} | {"given": X}
                shape = (3, 2, 4) if where == "Scan" else (2, 4)
                feeds["targets"] = np.zeros(shape, np.float32)
                sessions = (
                    ortops.TrainingSession(trainable, settings=settings)
                    for settings in (Settings(), Settings(passes=()))
                )
                found, wanted = (session.gradients(feeds)["trained"] for session in sessions)
                assert np.abs(wanted).min() > 0
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


OUTER = {
    "a part of the outer graph": """s = Sigmoid (x) out = If (yes) <
        then_branch = t () => (float[2, 4] y) { y = Mul (x, s) },
        else_branch = e () => (float[2, 4] z) { z = Neg (x) }>""",
    "a part that a body reads": """s = Sigmoid (x) y = Mul (x, s) w = If (yes) <
        then_branch = t () => (float[2, 4] v) { v = Neg (s) },
        else_branch = e () => (float[2, 4] z) { z = Neg (x) }>
        out = Add (y, w)""",
}


def test_readers_in_other_graphs_count() -> None:
    with all_violations() as check:
        for name, body in OUTER.items():
            made = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
                g (float[2, 4] x, bool yes) => (float[2, 4] out) {{ {body} }}""")
            with check(name):
                after = lowered_ir(lowering.prepare(convert.to_ir(made)), swish.SWISH)
                kinds = {node.op_type for node in after.graph.all_nodes()}
                assert "Sigmoid" in kinds
                assert "QuickGelu" not in kinds


def test_values_of_the_outer_graph_are_no_outputs_of_bodies() -> None:
    made = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 4] x, bool yes) => (float[2, 4] out, float[2, 4] also) {
            h = Relu (x)
            also = Neg (h)
            out = If (yes) <
                then_branch = t () => (float[2, 4] y) { y = Identity (h) },
                else_branch = e () => (float[2, 4] z) {
                    a = Transpose <perm = [1, 0]> (h)
                    z = Transpose <perm = [1, 0]> (a)
                }
            >
        }""")
    after = lowered(made, normal_form.NORMAL_FORM)
    for attribute in after.graph.node[-1].attribute:
        assert [node.op_type for node in attribute.g.node] == ["Identity"]
    for yes in (True, False):
        feeds = {"x": X, "yes": np.array(yes)}
        np.testing.assert_array_equal(run(after, feeds)[0], run(made, feeds, optimize=False)[0])


# ------------------------------------------------------------------------------------------ time


def name_of(each: Formula) -> str:
    return f"{each.replace.__module__}.{each.replace.__name__}"


def patterns() -> list[Formula]:
    """Returns all formulas of passes."""
    names = [each.name for each in pkgutil.iter_modules(passes.__path__, f"{passes.__name__}.")]
    members = (vars(importlib.import_module(name)).values() for name in names)
    return [each for some in members for each in some if isinstance(each, Formula)]


def formulas() -> list[matching.Form]:
    """Returns all formulas of passes, and of the ends of classifiers."""
    written = [each.written for each in patterns()]
    return [*written, *squashing._FORMS.values(), squashing._SHARE, squashing._PAIR]


LINKS: dict[str, Callable[[ir.Value, ir.Value], list[ir.Node]]] = {
    "products": lambda h, c: [ir.Node("", "Mul", [h, c])],
    "sums": lambda h, c: [ir.Node("", "Add", [c, h])],
    "squares": lambda h, c: [ir.Node("", "Mul", [h, h])],
    "moves": lambda h, c: [ir.Node("", "Sub", [h, h]), ir.Node("", "Flatten", [h])],
}


def asked(link: Callable[[ir.Value, ir.Value], list[ir.Node]], length: int) -> int:
    """Returns how often a search in each node of a chain looks at a node."""
    h, c = ir.Value(name="h"), ir.Value(name="c")
    nodes: list[ir.Node] = []
    while len(nodes) < length:
        nodes += link(h, c)
        h = nodes[-1].outputs[0]
    graph = ir.Graph([], [h], nodes=nodes, opset_imports={"": 21})
    count, written = Counter[str](), formulas()

    class Counted(Search):
        def node_of(self, *arguments: Any) -> ir.Node | None:
            count["nodes"] += 1
            return super().node_of(*arguments)

        def _multiplying(self, value: ir.Value) -> ir.Node | None:
            count["factors"] += 1
            return super()._multiplying(value)

    for node in graph:
        for each in written:
            if node.op_type in each.roots:
                list(Counted(each, node.outputs[0]))
    return count.total()


@pytest.mark.parametrize("length", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_time_is_linear_in_the_length_of_a_chain(length: int) -> None:
    assert len(formulas()) >= 12
    with all_violations() as check:
        for name, link in LINKS.items():
            with check(name):
                assert asked(link, length) < 6 * asked(link, length // 5)


# --------------------------------------------------------------------------------------- reasons

NEAR = {
    "gelu: Erf node 'b': constant factor 0.709219875 is not 0.707106781": Case(
        CASES["Gelu"].body, "", {**GELU, "root": 1.41}
    ),
    "gelu: Erf node 'b': Neg node 'n' reads it, too": Case(
        CASES["Gelu"].body.replace(
            "y = Mul (d, half)", "e = Mul (d, half) n = Neg (b) y = Sub (e, n)"
        ),
        "",
        GELU,
    ),
    "gelu: Tanh node 't': constant factor 0.800000012 is not 0.797884561": Case(
        CASES["Gelu of tanh"].body, "", {**TANH, "scale": 0.8}
    ),
    "swish: Sigmoid node 's': 'h' is not the input 'x'": Case(
        "h = Neg (x) s = Sigmoid (h) y = Mul (x, s)", "", {}
    ),
    "rms_normalization: Mul node 'y': the mean is not over the last axis": Case(
        CASES["RMS"].body.replace("-1", "0"), "", CASES["RMS"].numbers
    ),
    "rms_normalization: Pow node 's': constant 3 is not 2": Case(
        CASES["RMS"].body, "", {**CASES["RMS"].numbers, "two": 3.0}
    ),
    "rms_normalization: Add node 'v': constant of shape [1,1,1] adds axes": CASES["RMS"],
}


@pytest.mark.slow
def test_reasons_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "near.onnx"
    with all_violations() as check:
        for reason, case in NEAR.items():
            made = model(case, {"tiny": [1, 1, 1]} if "adds axes" in reason else {})
            made.graph.initializer.append(onnx.numpy_helper.from_array(W, "trained"))
            made.graph.node.insert(0, onnx.helper.make_node("Mul", ["given", "trained"], ["x"]))
            made.graph.input[0].name = "given"
            made.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            with check(reason):
                onnx.save(made, path)
                assert main(["check", str(path), "--verbose", "--trainable", "trained"]) == 0
                shown = capsys.readouterr().out
                assert f"\n  {reason}\n" in shown
    main(["check", str(path), "--trainable", "trained"])
    assert "rms_normalization" not in capsys.readouterr().out


def test_names_in_reasons_cannot_make_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = model(Case("h = Neg (x) s = Sigmoid (h) y = Mul (x, s)", "", {}))
    for node in made.graph.node:
        node.input[:] = ["h\n\x1b[31m" if name == "h" else name for name in node.input]
        node.output[:] = ["h\n\x1b[31m" if name == "h" else name for name in node.output]
    made.graph.initializer.append(onnx.numpy_helper.from_array(W, "trained"))
    made.graph.node.append(onnx.helper.make_node("Mul", ["y", "trained"], ["out"]))
    made.graph.output[0].name = "out"
    made.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    onnx.save(made, tmp_path / "near.onnx")
    main(["check", str(tmp_path / "near.onnx"), "--verbose"])
    assert "'h\\n\\x1b[31m' is not the input 'x'" in capsys.readouterr().out
