"""Inputs of optimizer updates, and ONNX's own cases, for the tests of every route."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import onnx
import pytest
from optimizer_oracle import conditioning, expected

from ortops.optimizers import OPERATORS, OPTIMIZERS, Adam, AdamW

FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]


def float32(value: float) -> float:
    return float(np.float32(value))


SQUARED = {"Adagrad": {"H"}, "Adam": {"H"}, "AdamW": {"H"}}


def assert_expected(name: str, results: Any, update: dict[str, Any]) -> None:
    wanted = expected(name, **update)
    assert len(results) == len(wanted)
    x = update["tensors"][0]
    for result, want in zip(results, wanted, strict=True):
        assert result.dtype == x.dtype
        want.assert_close(result, conditioning(int(update["t"]), update["attributes"]))


ATTRIBUTE_SETS: dict[str, list[dict[str, Any]]] = {
    "Adagrad": [
        {"norm_coefficient": 0.0, "decay_factor": 0.0, "epsilon": 1e-6},
        {"norm_coefficient": 0.01, "decay_factor": 0.1, "epsilon": 1e-3},
    ],
    "Adam": [
        {**Adam().attributes},
        {
            "norm_coefficient": 0.01,
            "norm_coefficient_post": 0.125,
            "alpha": 0.7,
            "beta": 0.123456789,
            "epsilon": 1e-3,
        },
    ],
    "Momentum": [
        {"norm_coefficient": 0.0, "alpha": 0.9, "beta": 1.0, "mode": "standard"},
        {"norm_coefficient": 0.01, "alpha": 0.5, "beta": 0.25, "mode": "nesterov"},
    ],
    "SGD": [{"norm_coefficient": 0.0}, {"norm_coefficient": 0.5}],
    "AdamW": [{**AdamW().attributes}, {**AdamW().attributes, "weight_decay": 0.0}],
}


def a_update(
    name: str,
    attributes: dict[str, Any],
    *,
    shape: tuple[int, ...] = (2, 3),
    t: int = 2,
    r_dtype: np.dtype[Any] = FLOATS[0],
    x_dtype: np.dtype[Any] = FLOATS[0],
) -> dict[str, Any]:
    """Returns inputs of an update with fixed random numbers."""
    rng = np.random.default_rng(7)
    states = OPTIMIZERS[name]().states
    tensors = [rng.normal(size=shape) for _ in ("X", "G", *states)]
    for index, state in enumerate(states, 2):
        if state in SQUARED.get(name, ()):
            tensors[index] = np.abs(tensors[index])
    return {
        "r": np.asarray(0.1, r_dtype),
        "t": np.asarray(t, np.int64),
        "tensors": [np.asarray(tensor, x_dtype) for tensor in tensors],
        "attributes": {
            key: float32(value) if isinstance(value, float) else value
            for key, value in attributes.items()
        },
    }


OFFICIAL = {
    "test_adagrad",
    "test_adagrad_multiple",
    "test_adam",
    "test_adam_multiple",
    "test_momentum",
    "test_momentum_multiple",
    "test_nesterov_momentum",
}


def official_cases() -> dict[str, dict[str, Any]]:
    """Returns ONNX's own test cases: node, inputs and outputs by name of the case."""
    cases: dict[str, dict[str, Any]] = {}

    def keep(node: onnx.NodeProto, *, name: str, **case: Any) -> None:
        cases[name] = {"node": node, **case}

    for name in OPERATORS:
        module = importlib.import_module(f"onnx.backend.test.case.node.{name.lower()}")
        exports = [
            function
            for key, function in inspect.getmembers(getattr(module, name))
            if key.startswith("export_")
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "expect", keep)
            for export in exports:
                export()
    return cases


def with_defaults(node: onnx.NodeProto) -> dict[str, Any]:
    """Returns the attributes of a node, those left out included, as the schema has them."""
    schema = onnx.defs.get_schema(node.op_type, 1, node.domain)
    defaults = [a.default_value for a in schema.attributes.values() if not a.required]
    values = {a.name: onnx.helper.get_attribute_value(a) for a in (*defaults, *node.attribute)}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}
