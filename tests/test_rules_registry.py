"""The registry of rules against ONNX's schemas."""

from __future__ import annotations

import inspect

import numpy as np
import onnx
import pytest

from ortops.autodiff import ZERO_GRADIENT, Rule, rules

OPSET = 26
STANDARD = {
    op_type: rule
    for (domain, op_type), rule in rules().items()
    if domain == "" and not rule.structural
}


def schema(op_type: str) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(op_type, OPSET)


@pytest.mark.parametrize(("op_type", "rule"), sorted(STANDARD.items()), ids=sorted(STANDARD))
def test_rule_follows_schema(op_type: str, rule: Rule) -> None:
    attributes = schema(op_type).attributes
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(rule.function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert set(parameters) == set(attributes)
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


def test_rule_takes_every_input() -> None:
    for op_type, rule in STANDARD.items():
        parameters = inspect.signature(rule.function).parameters.values()
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            continue
        positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        inputs = schema(op_type).inputs
        assert len(positional) - 2 == len(inputs), op_type
        required = [p for p in positional if p.default is p.empty]
        assert len(required) - 2 <= schema(op_type).min_input, op_type


def test_zero_gradient_operators_exist() -> None:
    for op_type in ZERO_GRADIENT:
        assert not schema(op_type).deprecated, op_type


def test_no_operator_has_both_a_rule_and_zero_gradient() -> None:
    assert not ZERO_GRADIENT.intersection(STANDARD)


def test_zero_gradient_operators_have_no_differentiable_input() -> None:
    """What ONNX itself calls differentiable has a rule, or a step function's zero."""
    steps = {"Ceil", "Floor", "Hardmax", "Round", "Sign"}
    differentiable = onnx.defs.OpSchema.DifferentiationCategory.Differentiable
    for op_type in ZERO_GRADIENT - steps:
        for formal in schema(op_type).inputs:
            assert formal.differentiation_category != differentiable, f"{op_type}: {formal.name}"
