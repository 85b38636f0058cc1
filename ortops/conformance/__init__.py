"""A conformance suite of ONNX's ``ai.onnx.preview.training`` and ``training_info``.

``python -m ortops.conformance --backend module:Class`` runs it on an ONNX backend
(`onnx.backend.base.Backend`). The package imports nothing else of ortops.

Each case cites the sentence of the specification that it tests. Where the specification is silent
or contradicts itself, the case is a proposal and says what it assumes.
"""

from ortops.conformance.case import Call, Case, Citation, Run
from ortops.conformance.suite import cases

__all__ = ["Call", "Case", "Citation", "Run", "cases"]
