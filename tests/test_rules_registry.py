"""The registry of rules against ONNX's schemas, and against what the other tests check."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np
import onnx
import pytest
from checked import RULES, ZERO_GRADIENT, checked
from dot_test import Case, lowered, normal
from violations import all_violations

from ortops.graph.autodiff.registry import Definition, NestedRule, Rule, StructuralRule

OPSET = 28
STANDARD = {
    op_type: rule
    for (domain, op_type), rule in RULES.items()
    if domain == "" and isinstance(rule, Rule)
}


def schema(op_type: str) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(op_type, OPSET)


def test_rules_follow_the_schemas() -> None:
    with all_violations() as check:
        for op_type, rule in STANDARD.items():
            with check(op_type):
                follows_schema(op_type, rule)


def follows_schema(op_type: str, rule: Rule) -> None:
    attributes = schema(op_type).attributes
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(rule.function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert rule.attributes == set(attributes)
    shares = op_type in SHARED or op_type == "ConvInteger"  # whose rule calls that of Conv
    assert shares or set(parameters) == rule.attributes
    for name, parameter in parameters.items():
        proto = attributes[name].default_value
        if not proto.name:
            assert (parameter.default is parameter.empty) == attributes[name].required, name
            continue
        default = onnx.helper.get_attribute_value(proto)
        if isinstance(default, float):
            assert np.float32(parameter.default) == np.float32(default), name
        elif isinstance(default, list):
            texts = [item.decode() if isinstance(item, bytes) else item for item in default]
            assert list(parameter.default) == texts, name
        elif isinstance(default, bytes):
            assert parameter.default == default.decode(), name
        else:
            assert parameter.default == default, name


WINDOWS = {"auto_pad": "NOTSET", "dilations": [1, 1], "pads": [0, 0, 0, 0], "strides": [1, 1]}
IMAGE = [normal(2, 3, 6, 5, dtype=np.float32)]
KERNEL = [*IMAGE, normal(3, 3, 2, 3, seed=1, dtype=np.float32)]
SHARED = {
    "Conv": (KERNEL, WINDOWS, {}),
    "ConvTranspose": (KERNEL, WINDOWS, {}),
    "AveragePool": (IMAGE, WINDOWS, {"kernel_shape": [2, 3]}),
    "LpPool": (IMAGE, WINDOWS, {"kernel_shape": [2, 3]}),
    "MaxPool": (IMAGE, WINDOWS, {"kernel_shape": [2, 3]}),
    **{
        op_type: (
            [
                normal(*shape, dtype=np.float32)
                for shape in ((4, 2, 3), (1, gates * 5, 3), (1, gates * 5, 5))
            ],
            {"direction": "forward", "activations": activations},
            {"hidden_size": 5},
        )
        for op_type, gates, activations in (
            ("GRU", 3, ["Sigmoid", "Tanh"]),
            ("LSTM", 4, ["Sigmoid", "Tanh", "Tanh"]),
            ("RNN", 1, ["Tanh"]),
        )
    },
}
"""Operators whose rules share attributes: inputs, the defaults of the attributes, and others."""


@pytest.mark.parametrize("op_type", SHARED)
def test_shared_attributes_have_defaults_of_schema(op_type: str) -> None:
    inputs, defaults, others = SHARED[op_type]
    for name, default in defaults.items():
        proto = schema(op_type).attributes[name].default_value
        if proto.name:
            given = onnx.helper.get_attribute_value(proto)
            texts = [item.decode() for item in (given if isinstance(given, list) else [given])]
            assert ([default] if isinstance(default, str) else default) == texts[: len(default)]
    emitted = [
        [
            (node.op_type, list(node.input), list(node.attribute))
            for node in lowered(Case(op_type, inputs, attributes), symbolic=False).graph.node
            if node.op_type != op_type
        ]
        for attributes in (others, {**others, **defaults})
    ]
    assert emitted[0] == emitted[1]


def test_rule_takes_every_input() -> None:
    for op_type, rule in STANDARD.items():
        parameters = inspect.signature(rule.function).parameters.values()
        if op_type in ("GRU", "LSTM", "RNN"):  # any number; all have tests but sequence_lens, 4
            assert set(checked()["", op_type].differentiated) == {
                index for index in range(len(schema(op_type).inputs)) if index != 4
            }
            continue
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            assert schema(op_type).max_input > len(schema(op_type).inputs), op_type
            continue
        first = 3 if isinstance(rule, NestedRule) else 2  # g and y, and before them the rules
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        inputs = schema(op_type).inputs
        assert len(positional) - first == len(inputs), op_type
        required = [p for p in positional if p.default is p.empty]
        assert len(required) - first <= schema(op_type).min_input, op_type


def test_zero_gradient_operators_exist() -> None:
    for op_type in ZERO_GRADIENT:
        assert not schema(op_type).deprecated, op_type


def test_zero_gradient_operators_have_no_differentiable_input() -> None:
    """What ONNX itself calls differentiable has a rule, or a step function's zero."""
    steps = {"Ceil", "Floor", "Hardmax", "Round", "Sign"}
    differentiable = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
    for op_type in ZERO_GRADIENT - steps:
        for formal in schema(op_type).inputs:
            assert formal.differentiation_category != differentiable, f"{op_type}: {formal.name}"


STEPS = {"Hardmax": "the largest element gets 1, so its gradient is zero"}
"""Operators whose gradient tests check to the first order only, besides those that go straight
through a rounding, where differences are no oracle."""


def test_orders_that_tests_check() -> None:
    tested = checked()
    with all_violations() as check:
        for key, registered in RULES.items():
            with check(key):
                found = tested.get(key)
                assert found is not None
                assert found.differentiated or isinstance(registered, StructuralRule)
                if registered.function.__module__ == "ortops.graph.autodiff.rules.elementwise":
                    assert found.orders >= 3
                elif key[1] not in STEPS and "first order" not in registered.limits:
                    assert found.orders >= 2


def test_tests_check_no_other_operators() -> None:
    assert not set(checked()) - set(RULES)


ILLEGAL = {
    "Attention": "inputs of rank 3 without the numbers of heads",
    "GRU": "activations and directions that the standard does not have",
    "LSTM": "the same",
    "RNN": "the same",
}
"""Operators of the standard domain that refuse only what is no legal model, and what it is."""


def test_what_a_rule_refuses_is_in_its_limits() -> None:
    found = [
        key
        for key, rule in RULES.items()
        if "UnsupportedError" in _names_reached(rule) and (key[0] or key[1] not in ILLEGAL)
        if not rule.limits
    ]
    assert not found


def _names_reached(registered: Rule | StructuralRule | Definition) -> set[str]:
    """Returns the names in the code of a rule and of what it calls in the package of rules."""
    pending, seen = [inspect.unwrap(registered.function)], set()
    names: set[str] = set()
    while pending:
        function = pending.pop()
        seen.add(function)
        for code in _code(function.__code__):
            names.update(code.co_names)
            for name in code.co_names:
                pending += [f for f in _functions(function.__globals__.get(name)) if f not in seen]
    return names


def _functions(value: Any) -> list[Any]:
    if not getattr(value, "__module__", "").startswith("ortops.graph.autodiff.rules"):
        return []
    members = vars(value).values() if inspect.isclass(value) else [value]
    return [member for member in members if inspect.isfunction(member)]


def _code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
