"""Every floating-point node case that ONNX ships, against differences and PyTorch's autograd.

For each case, y = Σ weight · output with fixed weights. Its gradient, run by onnxruntime in the
case's own types, is compared along random directions with central differences of onnx's reference
implementation in float64. Inputs are moved a little, because many examples sit on kinks. Cases that
expand an operator to others are cases of that operator. Where PyTorch is installed, its autograd
judges the gradient of the same model, too: see `node_cases_torch`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import node_cases
import node_cases_torch
import numpy as np
import onnx
import onnx.reference
import pytest
from checked import RULES
from conftest import is_missing
from node_cases import (
    NEWER,
    NOT_RUN,
    PARTS,
    REFUSED,
    Arrays,
    NodeCase,
    Runner,
    by_name,
    is_float,
)
from node_cases_torch import INEXPRESSIBLE, MASKED_ROWS, NO_FUNCTION, NOT_COMPARED, OTHERWISE
from onnx import TensorProto, helper, numpy_helper
from onnx.reference.op_run import RuntimeImplementationError, RuntimeTypeError

import ortops

STEPS = {
    "AffineGrid": 1e-2,
    "DeformConv": 5e-4,
    "DynamicQuantizeLinear": 1e-3,
    "Gelu": 1e-3,
    "GridSample": 5e-4,
    "GroupNormalization": 1e-3,
    "LinearAttention": 1e-2,
}
"""Where the reference computes in float32; 1e-5 otherwise."""
TOLERANCES = {"float64": 1e-6, "float32": 5e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Of the size of the terms; float32 carries what the operator rounds."""

DOMAINS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Acos": lambda x: 0.9 * x,
    "Acosh": lambda x: x + 0.1,
    "Asin": lambda x: 0.9 * x,
    "Atanh": lambda x: 0.9 * x,
    "Cast": lambda x: np.where(np.isfinite(x), x, 1),
    "CastLike": lambda x: np.where(np.isfinite(x), x, 1),
    "LpNormalization": lambda x: np.abs(x) + 0.01,  # the reference leaves |·| out of the 1-norm
    "MelWeightMatrix": lambda x: 0.99 * x + 1,
    "Pow": lambda x: np.abs(x) + 0.1,
    "Range": lambda x: x - 0.3,  # where the length does not jump
    "Unique": lambda x: x + np.arange(x.size).reshape(x.shape) / 8,  # apart in bfloat16, too
}
"""Where moving an input a little would leave the operator's domain, or the reference's."""

FIXED = {
    "Dropout": {"r"},
    "OneHot": {"indices", "depth"},
    "Resize": {"roi", "scales"},
    "Upsample": {"scales"},
}
"""Inputs that shapes, places or probabilities are computed of; they have no derivative."""

KNOWN = by_name(
    {
        "Softmax of a row of −∞ is NaN, and so is its derivative; see Attention": MASKED_ROWS,
        "the scores shown are −∞, or the least float; PyTorch judges the one not expanded": """
            attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal
            attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal_expanded
            attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal
            attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal_expanded""",
        "the reference draws another mask; PyTorch judges it with onnxruntime's": """
            training_dropout_default training_dropout_default_mask training_dropout
            training_dropout_mask""",
        "the reference takes no float64; what it expands to is checked, and PyTorch judges": "mvn",
        "the reference takes indices for another shape; PyTorch judges": """
            maxunpool_export_with_output_shape""",
        "the reference does not round the length of the output; PyTorch judges": """
            resize_downsample_scales_linear_align_corners
            resize_downsample_scales_cubic_align_corners""",
        "the reference stacks scalars of a loop to columns; Range itself is checked": """
            range_float_type_positive_delta_expanded range_float16_type_positive_delta_expanded
            range_bfloat16_type_positive_delta_expanded""",
        "a number modulo 0 is NaN, and so are differences": """
            mod_float_edge_cases_fmod_0_float16 mod_float_edge_cases_fmod_0_float32
            mod_float_edge_cases_fmod_0_float64""",
        "the reference has no Scatter; PyTorch judges": """
            scatter_without_axis scatter_with_axis""",
    }
)
"""Cases that this oracle cannot judge, and why."""

CASES = node_cases.node_cases()
UNLIKE = (AssertionError, RuntimeImplementationError, RuntimeTypeError)
"""What a comparison raises that cannot judge; the last two are the reference implementation's."""

ELSEWHERE = {
    "ConvInteger": ("ONNX's cases give integers", "test_rules_quantization.py"),
    "GlobalLpPool": ("ONNX has no case", "test_rules_pooling.py"),
    "If": ("ONNX's cases feed no floating point", "test_rules_control_flow.py"),
    "MatMulInteger": ("ONNX's case gives integers", "test_rules_quantization.py"),
    "MaxRoiPool": ("ONNX has no case", "test_rules_sampling.py"),
    "Optional": ("ONNX has no case", "test_rules_sequence.py"),
    "QLinearConv": ("ONNX's case gives integers", "test_rules_quantized.py"),
    "QLinearMatMul": ("ONNX's cases give integers", "test_rules_quantized.py"),
    "QuantizeLinear": ("ONNX's cases give integers", "test_rules_quantization.py"),
    "Trilu": ("ONNX's cases give integers", "test_rules_shape.py"),
}
"""Operators with a gradient but no case with floating point going in and out; who has them."""


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a copy that computes in float64 whatever it computed in floating point."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    _widen(result.graph)
    return result


def _widen(graph: onnx.GraphProto) -> None:
    narrow = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in narrow:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in _constants(graph):
        if tensor.data_type in narrow:
            wide = numpy_helper.to_array(tensor).astype(np.float64)
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for node in graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:  # by default of float32
            node.attribute.append(
                helper.make_attribute("value", numpy_helper.from_array(np.zeros(1)))
            )
        for attribute in list(node.attribute):
            if attribute.HasField("g"):
                _widen(attribute.g)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in narrow:
                attribute.i = TensorProto.DOUBLE
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                numbers = np.array(helper.get_attribute_value(attribute), np.float64)
                attribute.CopyFrom(helper.make_attribute("value", numpy_helper.from_array(numbers)))


def _constants(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        if node.op_type in ("Constant", "ConstantOfShape"):
            yield from (a.t for a in node.attribute if a.HasField("t"))


def reference(case: NodeCase) -> Callable[[Arrays], Arrays]:
    """Returns the outputs by name as a function in float64."""
    evaluator = onnx.reference.ReferenceEvaluator(in_float64(case.model))
    names = [value.name for value in case.model.graph.output]

    def function(feeds: Arrays) -> Arrays:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reference implementation divides by zero
            results = dict(zip(names, evaluator.run(None, feeds), strict=True))
        flat: Arrays = {}
        for name, value in results.items():
            parts = value if isinstance(value, list) else None
            flat.update({name: value} if parts is None else _numbered(name, parts))
        return flat

    return function


def _numbered(name: str, parts: list[Any]) -> Arrays:
    return {f"{name}_{index}": part for index, part in enumerate(parts)}


def moved(case: NodeCase) -> Arrays:
    return node_cases.moved(case, DOMAINS, FIXED.get(case.op_type, ()))


def runner_of(case: NodeCase) -> Runner:
    hidden = node_cases_torch.draws(case) and len(case.graph.node[0].output) == 1
    return Runner(case, {1: "the_mask"} if hidden else None)


def compare(runner: Runner) -> None:
    """Compares the outputs with the reference's, and the gradients with its differences."""
    case = runner.case
    rng = np.random.default_rng(20)
    feeds = moved(case)
    outputs = runner.outputs(feeds)
    weights = runner.weights(outputs)
    function = reference(case)
    exact = {n: a.astype(np.float64) if is_float(a) else a for n, a in feeds.items()}
    computed = function(exact)
    for name in (weight.removeprefix("weight_") for weight in weights):
        size = np.abs(outputs[name][np.isfinite(outputs[name])]).max(initial=1e-3)
        np.testing.assert_allclose(
            computed[name], outputs[name], rtol=1e-2, atol=1e-4 * size, err_msg=case.name
        )
    _, gradients = runner.gradients(feeds, weights)

    def weighted_sum(given: Arrays) -> float:
        found = function(given)
        return sum(
            float(np.sum(np.asarray(found[name.removeprefix("weight_")], np.float64) * weight))
            for name, weight in weights.items()
        )

    step = STEPS.get(case.op_type, 1e-5)
    for x, gradient in gradients.items():
        if x in FIXED.get(case.op_type, ()):
            continue
        direction = rng.standard_normal(gradient.shape)
        ahead, behind = (
            weighted_sum({**exact, x: np.asarray(exact[x] + sign * step * direction)})
            for sign in (1, -1)
        )
        expected = (ahead - behind) / (2 * step)
        terms = gradient.astype(np.float64) * direction
        scale = np.abs(terms).sum() + abs(expected) + 5e-2
        assert abs(terms.sum() - expected) <= TOLERANCES[node_cases.narrowest(case, x)] * scale, (
            f"{case.name}, {x}: {terms.sum()}, differences give {expected}"
        )


def compare_with_torch(runner: Runner) -> None:
    """Asks PyTorch, which either agrees, or has no such form, or differs on purpose."""
    from torch_operators import Inexpressible

    case = runner.case
    if case.name in INEXPRESSIBLE:
        with pytest.raises(Inexpressible):
            node_cases_torch.compare(runner)
    elif case.name in NOT_COMPARED:
        with pytest.raises(AssertionError):
            node_cases_torch.compare(runner)
    elif case.op_type not in NO_FUNCTION:
        node_cases_torch.compare(runner)


@pytest.fixture(scope="module")
def torch_judges() -> Iterator[bool]:
    """Whether PyTorch is there; small tensors, so that threads only get in each other's way."""
    if is_missing("torch"):
        yield False
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield True
    torch.set_num_threads(before)


@pytest.mark.nightly(450)
@pytest.mark.quick(400)
@node_cases.parametrized([name for name in CASES if name not in NOT_RUN | REFUSED])
def test_gradient(name: str, torch_judges: bool) -> None:
    """Both oracles judge one session; what either says is in the message."""
    runner, wrong = runner_of(CASES[name]), []
    try:
        if name in KNOWN:
            with pytest.raises(UNLIKE), np.errstate(invalid="ignore"):  # some multiply −∞ by 0
                compare(runner)
        else:
            compare(runner)
    except (AssertionError, pytest.fail.Exception) as error:
        wrong.append(f"differences: {error}")
    try:
        if torch_judges:
            compare_with_torch(runner)
    except (AssertionError, pytest.fail.Exception) as error:
        wrong.append(f"PyTorch: {error}")
    assert not wrong, "\n".join([name, *wrong])


@pytest.mark.needs("onnxruntime<1.33")  # the list was made with 1.32
@node_cases.parametrized(NOT_RUN)
def test_onnxruntime_does_not_run(name: str) -> None:
    runner, feeds = Runner(CASES[name]), moved(CASES[name])
    outputs = runner.forward(feeds)
    if outputs is not None:
        with pytest.raises(AssertionError, match="not its gradient"):
            runner.gradients(feeds, runner.weights(outputs))


@node_cases.parametrized(REFUSED)
def test_the_gradient_is_refused(name: str) -> None:
    feeds = moved(CASES[name])
    runner = Runner(CASES[name])
    weights = runner.weights(runner.outputs(feeds))
    with pytest.raises(ortops.errors.OrtopsError):
        runner.gradients(feeds, weights)


def test_every_operator_has_a_case() -> None:
    found: set[str] = set()
    for case in CASES.values():
        if case.name not in NOT_RUN | REFUSED:
            found.update(_operators(case.graph))
    ours = {name for domain, name in RULES if domain == "" and onnx.defs.has(name)}
    assert ours - found == set(ELSEWHERE)


def _operators(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            yield from _operators(attribute.g)


@pytest.mark.torch
def test_pytorch_has_a_function_for_every_operator() -> None:
    import torch_operators

    of_cases = {case.op_type for case in CASES.values()}
    assert of_cases - set(torch_operators.OPERATORS) == set(NO_FUNCTION)
    assert set(torch_operators.OPERATORS) - of_cases <= PARTS


def test_every_exception_is_a_case() -> None:
    for names in (
        [*KNOWN, *(NOT_RUN.keys() - NEWER), *REFUSED],
        [*INEXPRESSIBLE, *OTHERWISE, *NOT_COMPARED],
    ):
        assert [name for name, count in Counter(names).items() if count > 1] == []
        assert {*names, *NEWER} <= set(CASES)
    assert not INEXPRESSIBLE.keys() & (NOT_RUN | REFUSED).keys()


@pytest.mark.parametrize("op_type", ELSEWHERE)
def test_the_rest_is_elsewhere(op_type: str) -> None:
    _, file = ELSEWHERE[op_type]
    assert f'"{op_type}"' in (Path(__file__).parent / file).read_text(encoding="utf-8")
