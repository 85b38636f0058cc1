"""The conformance suite on tools of others, which judge what it expects."""

from __future__ import annotations

import pytest

from ortops.conformance import cases
from ortops.conformance.running import run

GRADIENTS = [case for case in cases() if case.group == "gradient"]

REFUSED = {
    "test_gradient_y_in_xs": "a name that it needs is taken",
    "test_gradient_through_slice": "steps of Slice",
    "test_gradient_function": "functions of the model",
    "test_gradient_function_with_attribute": "functions of the model",
    "test_gradient_broadcasting_empty": "what it writes has no kernel for empty tensors",
}
"""What onnx-ad does not take."""


@pytest.mark.slow
@pytest.mark.optional("onnx_ad", "compare")
@pytest.mark.optional("onnxsim", "export")
def test_onnx_ad_agrees_with_the_gradients() -> None:
    from conformance_peers import OnnxAd

    results = {result.case.name: result for result in run(OnnxAd, GRADIENTS)}
    failed = {name: r.message for name, r in results.items() if r.status == "failed"}
    assert failed.keys() <= REFUSED.keys(), failed
    assert not any("expected" in message for message in failed.values()), failed
    assert sum(result.status == "passed" for result in results.values()) >= 85


@pytest.mark.slow
@pytest.mark.optional("onnx_ad", "compare")
@pytest.mark.optional("onnxsim", "export")
def test_onnxsim_keeps_optimizers_and_removes_what_gradients_refer_to() -> None:
    from conformance_peers import OnnxSim

    optimizers = [case for case in cases() if case.group in ("adagrad", "momentum")]
    assert {result.status for result in run(OnnxSim, optimizers)} == {"passed"}
    chosen = [case for case in GRADIENTS if case.name.startswith("test_gradient_through_s")]
    found = {result.status for result in run(OnnxSim, chosen)}
    assert found == {"failed"}
