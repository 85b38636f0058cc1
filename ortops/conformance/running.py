"""Running cases on a backend."""

from __future__ import annotations

import time
import unittest
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from ortops.conformance.case import Array, Call, Case

__all__ = ["Result", "TrainingRep", "run"]

Status: TypeAlias = Literal["passed", "failed", "unsupported"]


class TrainingRep(Protocol):
    """A model with ``training_info`` that a backend has prepared: the object of IR.md.

    A backend that has one gets a class method ``prepare_training(model, device="CPU")`` which
    returns it. ONNX's `Backend` has no such method. A model's variables have the values of their
    initializers when it is prepared.
    """

    def initialize(self) -> None:
        """Executes the initializations of all entries and assigns their outputs."""

    def step(self, inputs: Mapping[str, Array], entry: int | None = None) -> Mapping[str, Array]:
        """Executes the algorithm of one entry, or of all in order, and assigns their outputs.

        Args:
            inputs: Inputs of the inference graph and of the algorithm, by name.
            entry: The position of the entry; None for all.

        Returns:
            Outputs of the graph, by name, as far as the backend returns them.
        """

    def infer(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Runs the inference graph with the current values; returns its outputs, by name."""

    @property
    def state(self) -> Mapping[str, Array]:
        """The current values of the variables, by name."""


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes:
        case: The case.
        status: ``"unsupported"`` if the backend says that it does not take such models: it has no
            ``prepare_training``, its ``is_compatible`` returns False, it raises
            `unittest.SkipTest`, or it refuses the control of a refused case. ``"failed"``, too, if
            the case tests nothing: its files are broken, data is missing, or all would pass.
        message: Why it did not pass; for a refused case that passed, the error.
        seconds: How long it took.
    """

    case: Case
    status: Status
    message: str
    seconds: float


def _difference(case: Case, name: str, found: Any, wanted: Array) -> str:
    """Returns in what an array differs from the expected one, or an empty string."""
    found = np.asarray(found)
    if found.shape != wanted.shape:
        return f"{name}: shape {list(found.shape)}, expected {list(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"{name}: {found.dtype}, expected {wanted.dtype}"
    try:
        np.testing.assert_allclose(found, wanted, rtol=case.rtol, atol=case.atol)
    except AssertionError:
        with np.printoptions(precision=6, threshold=8):
            values = f"{found.ravel()}, expected {wanted.ravel()}"
        return f"{name}: {' '.join(values.split())}"
    return ""


class _Failure(Exception):  # noqa: N818
    """A result differs from the expected one: the model was not refused."""


def _compare(case: Case, found: Mapping[str, Any], wanted: Mapping[str, Array]) -> None:
    for name, array in wanted.items():
        if name not in found:
            raise _Failure(f"{name} is missing")
        if difference := _difference(case, name, found[name], array):
            raise _Failure(difference)


def _run_sets(backend: Any, case: Case) -> None:
    """Runs the data sets of the graph."""
    if not case.runs:
        return
    prepared = backend.prepare(case.model, "CPU")
    names = [value.name for value in case.model.graph.output]
    for run in case.runs:
        inputs = [run.inputs[value.name] for value in case.model.graph.input]
        found = list(prepared.run(inputs))
        if len(found) != len(names):
            raise _Failure(f"{len(found)} outputs, expected {len(names)}")
        _compare(case, dict(zip(names, found, strict=True)), run.outputs)


def _call(prepared: TrainingRep, call: Call) -> Mapping[str, Any]:
    if call.method == "initialize":
        prepared.initialize()
        return call.outputs
    if call.method == "infer":
        return prepared.infer(call.inputs)
    returned = prepared.step(call.inputs, call.entry)
    return {**call.outputs, **returned}  # a step may leave outputs out


def _run_calls(backend: Any, case: Case) -> None:
    """Makes the calls of a model with training_info."""
    if not case.calls:
        return
    if not hasattr(backend, "prepare_training"):
        raise unittest.SkipTest("the backend has no prepare_training")
    prepared = backend.prepare_training(case.model, "CPU")
    for number, call in enumerate(case.calls, 1):
        try:
            _compare(case, _call(prepared, call), call.outputs)
            _compare(case, prepared.state, call.state)
        except _Failure as failure:
            raise _Failure(f"call {number}, {call.method}: {failure}") from None


def _text(error: BaseException) -> str:
    lines = " ".join(str(error).split())
    name = type(error).__name__
    return lines if isinstance(error, _Failure | unittest.SkipTest) else f"{name}: {lines}"[:400]


class _Suite:
    """Cases on one backend."""

    def __init__(self, backend: Any, known: Iterable[Case]) -> None:
        self._backend = backend
        self._known = {case.name: case for case in known}
        self._controls: dict[str, bool] = {}

    @cached_property
    def _compatible(self) -> Any:
        return getattr(self._backend, "is_compatible", lambda model: True)

    def _execute(self, case: Case) -> tuple[Status | Literal["raised"], str]:
        """Returns what becomes of a case if its model is valid: "raised" is a kind of failure."""
        try:
            if not self._compatible(case.model):
                return "unsupported", "the backend says that the model is not compatible"
            _run_sets(self._backend, case)
            _run_calls(self._backend, case)
        except unittest.SkipTest as skipped:
            return "unsupported", _text(skipped)
        except _Failure as failure:
            return "failed", _text(failure)
        except Exception as error:
            return "raised", _text(error)
        return "passed", ""

    def _takes(self, name: str) -> bool:
        """Whether the backend takes the valid model of a control."""
        if name not in self._controls:
            self._controls[name] = self._execute(self._known[name])[0] == "passed"
        return self._controls[name]

    def _status(self, case: Case) -> tuple[Status, str]:
        if flaw := self._flaw(case):
            return "failed", flaw
        status, message = self._execute(case)
        if status == "unsupported":
            return status, message
        if not case.refused:
            return "failed" if status == "raised" else status, message
        if not self._takes(case.control):
            return "unsupported", f"does not pass the valid {case.control} either"
        if status != "raised":
            return "failed", f"was not refused, although: {''.join(c.text for c in case.cites[:1])}"
        return "passed", message

    def _flaw(self, case: Case) -> str:
        """Returns why a case, or what it relies on, tests nothing, or an empty string."""
        if case.flaw or not case.refused:
            return case.flaw
        control = self._known.get(case.control)
        if control is None or control.refused:
            return f"the control {case.control!r} is not among the valid cases"
        return control.flaw and f"the control {control.name} is no case: {control.flaw}"

    def run(self, case: Case) -> Result:
        start = time.perf_counter()
        status, message = self._status(case)
        return Result(case, status, message, time.perf_counter() - start)


def run(
    backend: Any, cases: Sequence[Case], known: Sequence[Case] | None = None
) -> Iterator[Result]:
    """Yields what becomes of each case.

    Args:
        backend: A class as `onnx.backend.base.Backend`.
        cases: The cases.
        known: Cases in which controls are looked up; ``cases`` by default.

    Example:
        >>> from ortops.conformance import cases
        >>> from ortops.conformance.backends import Reference
        >>> {result.status for result in run(Reference, cases()[:3])}
        {'passed'}
    """
    suite = _Suite(backend, known if known is not None else cases)
    for case in cases:
        yield suite.run(case)
