"""What a case of the suite is: a model, what it computes, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import onnx

Array: TypeAlias = npt.NDArray[Any]
Method: TypeAlias = Literal["initialize", "step", "infer"]

DOMAIN = "ai.onnx.preview.training"

_HEADER = f'<ir_version: 10, opset_import: ["": 21, "{DOMAIN}": 1, "local": 1]>'


def parse(text: str) -> onnx.ModelProto:
    """Returns the model of a graph in ONNX's text form, and of the functions after it.

    Operators of the training domain are written without their domain.
    """
    for name in ("Gradient", "Adagrad", "AdamW", "Adam", "Momentum"):
        text = text.replace(f"= {name} ", f"= {DOMAIN}.{name} ")
    model = onnx.parser.parse_model(f"{_HEADER}\n{text}")
    if not model.functions:
        del model.opset_import[-1]
    return model


@dataclass(frozen=True)
class Citation:
    """A sentence of the specification.

    Attributes:
        source: ``"Adam"`` and so on: the description of that operator, its inputs, outputs,
            attributes and types; ``"onnx.proto"``: the comments of that file; ``"IR.md"``.
        text: The sentence or a part of it, with single spaces.
    """

    source: Literal["Adagrad", "Adam", "Gradient", "IR.md", "Momentum", "onnx.proto"]
    text: str


@dataclass(frozen=True)
class Run:
    """Inputs of the graph, by name, and what it returns."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A call of a training model's initialization or step, and what holds after it.

    Attributes:
        method: ``"initialize"``, ``"step"`` or ``"infer"``, the three methods of IR.md.
        inputs: What is fed, by name.
        outputs: What is returned, by name: outputs of the inference graph and the algorithm. The
            specification does not say that a step returns anything: it may leave some out.
        state: The values of state variables after the call, by name.
        entry: The position of the only entry of ``training_info`` that is executed, or None for
            all, in order.
    """

    method: Method
    inputs: Mapping[str, Array] = field(default_factory=dict)
    outputs: Mapping[str, Array] = field(default_factory=dict)
    state: Mapping[str, Array] = field(default_factory=dict)
    entry: int | None = None


@dataclass(frozen=True)
class Case:
    """A case of the suite.

    Attributes:
        name: Begins with ``test_``, as in ONNX's own tests.
        model: The model.
        cites: The sentences that say what is expected.
        runs: Data sets of the graph; a refused case has inputs only.
        calls: Calls of a model with ``training_info``, in order.
        proposal: What the specification does not say, or contradicts, and the case assumes. Empty
            if the specification says it all.
        refused: Whether the model is invalid: it must not load, or not run.
        control: For a refused case, a case whose model is valid. Who refuses both does not
            implement what is tested, and has not found what is wrong.
        rtol: The largest error relative to the expected value.
        atol: The largest error beside that.
        broken: Why the files of the case cannot be read. Such a case fails.
    """

    name: str
    model: onnx.ModelProto
    cites: Sequence[Citation]
    runs: Sequence[Run] = ()
    calls: Sequence[Call] = ()
    proposal: str = ""
    refused: bool = False
    control: str = ""
    rtol: float = 1e-5
    atol: float = 1e-7
    broken: str = ""

    @property
    def group(self) -> str:
        """What is tested: the second word of the name."""
        return self.name.split("_")[1]

    @property
    def flaw(self) -> str:
        """Why the case would pass, or be refused, whatever a backend does; empty if it tests it."""
        return self.broken or next(self._flaws(), "")

    def _flaws(self) -> Iterator[str]:
        if not self.runs and not self.calls:
            yield "the case has no data: neither data sets nor calls"
        for name in ("rtol", "atol"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                yield f"{name} must be a number >= 0 and < 1, got {value!r}"
        if self.refused not in (False, True):
            yield f"refused must be true or false, got {self.refused!r}"
        graph, entries = self.model.graph, len(self.model.training_info)
        for number, run in enumerate(self.runs):
            if missing := [v.name for v in graph.input if v.name not in run.inputs]:
                yield f"data set {number} has no values of the inputs {missing}"
            missing = [v.name for v in graph.output if v.name not in run.outputs]
            if missing and not self.refused:
                yield f"data set {number} has no values of the outputs {missing}"
        for number, call in enumerate(self.calls, 1):
            if call.method not in get_args(Method):
                yield f"call {number} must be of {get_args(Method)}, got {call.method!r}"
            if call.entry is not None and call.entry not in range(entries):
                yield f"call {number} is of entry {call.entry!r}, but the model has {entries}"
            wanted = call.outputs if call.method == "infer" else {**call.outputs, **call.state}
            if not wanted and not self.refused:
                yield f"call {number}, {call.method}, expects nothing"
        given = [run.outputs for run in self.runs] + [call.outputs for call in self.calls]
        if self.refused and any(given):
            yield "a case that must be refused has outputs"


def float32(values: npt.ArrayLike) -> Array:
    """Returns numbers as a float32 array."""
    return np.asarray(values, np.float32)
