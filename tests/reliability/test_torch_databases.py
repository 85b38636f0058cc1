"""Gradients of all operators and modules in PyTorch's own tables, in files of both exporters.

A part is drawn, the same in every run; with ORTOPS_SOAK, all are compared, with more inputs.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from attacks import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.optional("expecttest", "compare")]

KNOWN = {
    "stft 1": "ONNX's inference of shapes takes no one-sided DFT of complex numbers",
    "tensordot 2": "onnxruntime's Einsum repeats axes of size 1, against the standard",
    "linalg.norm.subgradients_at_zero 2": "the file has powers with infinite derivatives",
}
"""Cases that are refused, or have no gradient in the file, and why."""

AT_ONCE = {"TorchScript": 20, "dynamo": 5} if SOAK == 1 else {"TorchScript": 100, "dynamo": 100}
"""How many operators and modules a test has; dynamo takes a second for each file."""


@pytest.mark.parametrize("part", range(1 if SOAK == 1 else 7))
@pytest.mark.parametrize("exporter", ["TorchScript", "dynamo"])
def test_gradients_are_those_of_pytorch(exporter: str, part: int) -> None:
    from torch_databases import MODULES, OPERATORS, cases_of, verdict

    names, count = [*OPERATORS, *MODULES], AT_ONCE[exporter]
    random.Random(exporter).shuffle(names)
    inputs = 2 if SOAK == 1 else 5
    found = {
        case.name: verdict(case, exporter)
        for name in names[part * count : (part + 1) * count]
        for case in cases_of(name, inputs)
    }
    kinds = Counter(said.partition(":")[0] for said in found.values())
    bad = {
        name: said
        for name, said in found.items()
        if not said.startswith(("right", "unusable")) and name not in KNOWN
    }
    assert not bad, bad
    assert kinds["right"] >= count / 4, kinds  # most of what the exporter can write
