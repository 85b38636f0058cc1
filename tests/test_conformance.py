"""The conformance suite: what it expects, what it finds, what it writes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import optimizer_oracle
import pytest
from onnx.backend.base import Backend
from onnx.reference import ReferenceEvaluator
from packaging.version import Version
from violations import all_violations

import ortops.backend
import ortops.reference
from ortops.conformance import Call, Case, Run, cases
from ortops.conformance.__main__ import main
from ortops.conformance.backends import OnnxRuntime, Reference
from ortops.conformance.files import read, write
from ortops.conformance.onnx_runner import FolderTest
from ortops.conformance.running import run
from ortops.reference.backend import NewOps
from ortops.reference.backend import Reference as CompleteReference

CASES = {case.name: case for case in cases()}
GROUPS = ("adagrad", "adam", "momentum", "gradient", "training", "refused")
DOMAIN = "ai.onnx.preview.training"


def of_group(group: str) -> list[Case]:
    return [case for case in cases() if case.group == group]


def failed(backend: Any, chosen: list[Case]) -> dict[str, str]:
    found = run(backend, chosen, cases())
    return {r.case.name: r.message for r in found if r.status == "failed"}


# ------------------------------------------------------------------------------------ the cases


def test_the_cases_have_names_of_their_own_and_all_groups() -> None:
    assert len(CASES) == len(cases()) > 250
    assert {case.group for case in cases()} == set(GROUPS)
    assert all(re.fullmatch("test_[a-z0-9_]+", name) for name in CASES)
    assert all(case.control in CASES for case in cases() if case.refused)
    assert not any(CASES[case.control].refused for case in cases() if case.refused)


def words(text: str) -> str:
    return " ".join(text.split())


def said(source: str) -> str:
    """Returns what a part of the specification says, with single spaces."""
    if source == "onnx.proto":
        text = (Path(onnx.__file__).parent / "onnx.proto").read_text(encoding="utf-8")
        return words(re.sub(r"^\s*//", "", text, flags=re.MULTILINE))
    schema = onnx.defs.get_schema(source, domain=DOMAIN)
    parts = [*schema.inputs, *schema.outputs, *schema.attributes.values(), *schema.type_constraints]
    return words(" ".join([schema.doc, *(part.description for part in parts)]))


def test_sentences_stand_in_the_specification() -> None:
    """Those of IR.md cannot be compared here: no package of onnx contains it."""
    texts = {name: said(name) for name in ("Adagrad", "Adam", "Gradient", "Momentum", "onnx.proto")}
    for case in cases():
        assert case.cites, case.name
        for cite in case.cites:
            assert cite.source == "IR.md" or cite.text in texts[cite.source], case.name


def test_the_page_lists_all_proposals() -> None:
    page = Path(ortops.__file__).parent / "docs" / "specification.md"
    text = page.read_text(encoding="utf-8")
    listed = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    assert {case.name for case in cases() if case.proposal} == listed
    assert f"a conformance suite of {len(cases())} cases" in text


def test_models_are_valid_where_they_are_not_refused() -> None:
    for case in cases():
        if not case.refused:
            onnx.checker.check_model(case.model)


@pytest.mark.parametrize("group", ["adagrad", "adam", "momentum"])
def test_values_of_optimizers_agree_with_the_oracle_of_the_package(group: str) -> None:
    checked = 0
    for case in of_group(group):
        (node, *others) = case.model.graph.node
        if others or node.domain != DOMAIN:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        schema = onnx.defs.get_schema(node.op_type, domain=DOMAIN)
        defaults = {
            name: onnx.helper.get_attribute_value(a.default_value)
            for name, a in schema.attributes.items()
            if not a.required
        }
        attributes = {
            key: value.decode() if isinstance(value, bytes) else value
            for key, value in {**defaults, **attributes}.items()
        }
        r, t, *tensors = (case.runs[0].inputs[name] for name in node.input)
        results = [case.runs[0].outputs[name] for name in node.output]
        count = len(tensors) - len(results)  # as many gradients as tensors
        for i in range(count):
            wanted = optimizer_oracle.expected(
                node.op_type, r=r, t=t, tensors=tensors[i::count], attributes=attributes
            )
            condition = optimizer_oracle.conditioning(int(t), attributes)
            for result, want in zip(results[i::count], wanted, strict=True):
                want.assert_close(result, condition)
        checked += 1
    assert checked > 20


FUNCTIONS = {
    "elu": "nn.functional.elu",
    "leakyrelu": "nn.functional.leaky_relu",
    "softplus": "nn.functional.softplus",
    "softsign": "nn.functional.softsign",
    "identity": "clone",
}


@pytest.mark.torch
def test_gradients_through_operators_agree_with_torch() -> None:
    import torch

    checked = 0
    for name, case in CASES.items():
        operator = name.removeprefix("test_gradient_through_")
        path = FUNCTIONS.get(operator, operator)
        function: Any = torch
        for part in path.split("."):
            function = getattr(function, part, None)
        if operator == name or function is None or set(case.runs[0].inputs) != {"x", "w"}:
            continue
        x, w = (torch.tensor(case.runs[0].inputs[key], dtype=torch.float64) for key in "xw")
        if x.ndim > 1:  # other arguments than those of ONNX
            continue
        x.requires_grad_()
        (function(x) * w).sum().backward()
        wanted = case.runs[0].outputs["g"]
        np.testing.assert_allclose(wanted, x.grad.numpy(), rtol=1e-6, atol=1e-7)
        checked += 1
    assert checked == 20


@pytest.mark.torch
def test_ten_steps_agree_with_torch() -> None:
    """Gradients come from autograd; Momentum with beta 1 and without norm is torch's SGD."""
    import torch

    case = CASES["test_training_gradient_descent"]
    w = torch.tensor([[0.5], [-1.0]], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.125)
    for call in case.calls[:10]:
        x, targets = (torch.tensor(call.inputs[k], dtype=torch.float64) for k in ("x", "targets"))
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(x @ w, targets)
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(call.outputs["loss"], loss.item(), rtol=1e-6)
        np.testing.assert_allclose(call.state["w"], w.detach().numpy(), rtol=1e-6)


@pytest.mark.torch
def test_the_network_agrees_with_torch() -> None:
    import torch

    case = CASES["test_training_network"]
    start = {t.name: onnx.numpy_helper.to_array(t) for t in case.model.graph.initializer}
    w, b, u = (torch.tensor(start[name], dtype=torch.float64, requires_grad=True) for name in "wbu")
    # torch adds ε after it has corrected the bias, which 1e-6 hides where gradients are large
    optimizer = torch.optim.Adam([w, b, u], lr=0.125, eps=1e-9)
    for call in case.calls:
        x = torch.tensor(call.inputs["x"], dtype=torch.float64)
        loss = torch.nn.functional.cross_entropy(
            torch.tanh(x @ w + b) @ u, torch.tensor(call.inputs["labels"])
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(call.outputs["loss"], loss.item(), rtol=2e-2)
    np.testing.assert_allclose(call.state["w"], w.detach().numpy(), atol=2e-2)


# --------------------------------------------------------------------------------- on backends


# Before 1.23, ReferenceEvaluator has no Scan whose body reads tensors of the graph around it.
SCAN = [] if Version(onnx.__version__) >= Version("1.23") else ["test_gradient_scan"]


@pytest.mark.quick(3)
@pytest.mark.parametrize("group", GROUPS)
def test_the_reference_passes(group: str) -> None:
    chosen = [case for case in of_group(group) if case.name not in SCAN]
    results = list(run(CompleteReference, chosen, cases()))
    assert {r.case.name: r.message for r in results if r.status != "passed"} == {}


def test_the_evaluator_of_onnx_passes_with_the_operators() -> None:
    """But for nodes in functions of the model, to which it does not pass new operators on."""
    names = {*failed(NewOps, [*of_group("adam"), *of_group("gradient")])}
    assert names <= {"test_adam_in_function", "test_gradient_in_function", *SCAN}
    assert failed(NewOps, [*of_group("adagrad"), *of_group("momentum")]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_sessions_pass(group: str) -> None:
    results = list(run(ortops.backend.Session, of_group(group), cases()))
    assert {r.case.name: r.message for r in results if r.status != "passed"} == {}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_lowered_models_pass(group: str) -> None:
    results = list(run(ortops.backend.Lowered, of_group(group), cases()))
    assert {r.case.name: r.message for r in results if r.status == "failed"} == {}
    skipped = {r.message for r in results if r.status == "unsupported"}
    needs = "a step graph has no initialization"
    assert all(needs in m or "initialize_other_values" in m for m in skipped), skipped


def test_step_graphs_pass() -> None:
    names = ("test_training_a", "test_training_momentum", "test_training_sw", "test_training_sev")
    chosen = [case for case in cases() if case.name.startswith(names)]
    results = list(run(ortops.backend.StepGraph, chosen, cases()))
    assert {r.case.name: r.message for r in results if r.status == "failed"} == {}
    assert {r.case.name for r in results if r.status == "passed"} >= {
        *("test_training_adam", "test_training_adagrad", "test_training_momentum"),
        *("test_training_several_entries", "test_training_swap"),
    }


# ------------------------------------------------------------------------- what the suite finds


def changed(**methods: Callable[..., Any]) -> type[Backend]:
    """Returns a backend of the reference with other formulas of optimizers."""
    ops = [
        type(op.__name__, (op,), {"formula": staticmethod(methods[op.__name__])})
        if op.__name__ in methods
        else op
        for op in ortops.reference.OPS
    ]

    class Changed(Backend):
        @classmethod
        def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
            evaluator = ReferenceEvaluator(model, new_ops=ops)

            class Rep:
                def run(self, inputs: list[Any]) -> list[Any]:
                    return evaluator.run(
                        None, dict(zip(evaluator.input_names, inputs, strict=True))
                    )

            return Rep()

    return Changed


def defect(op_type: str, change: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a formula in which something was changed before or after it."""
    from ortops.reference.optimizers import adagrad, adam, momentum

    right = {"Adagrad": adagrad, "Adam": adam, "Momentum": momentum}[op_type]
    return lambda *tensors, **attributes: change(right, tensors, attributes)


def without(name: str) -> Callable[..., Any]:
    """Ignores an attribute."""
    return lambda right, tensors, attributes: right(*tensors, **{**attributes, name: 0.0})


def at_first_step(right: Any, tensors: Any, attributes: Any) -> Any:
    """Takes each step for the first one."""
    return right(tensors[0], 0, *tensors[2:], **attributes)


def flushed(right: Any, tensors: Any, attributes: Any) -> Any:
    """Takes subnormal numbers for 0."""
    found = right(*tensors, **attributes)
    return [np.where(abs(a) < np.finfo(a.dtype).tiny, a.dtype.type(0), a) for a in found]


DEFECTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "no bias correction": ("Adam", at_first_step, "test_adam_bias_corrections_2"),
    "no norm_coefficient": (
        "Adam",
        without("norm_coefficient"),
        "test_adam_norm_coefficient",
    ),
    "no norm_coefficient_post": (
        "Adam",
        without("norm_coefficient_post"),
        "test_adam_norm_coefficient_post",
    ),
    "no decay": ("Adagrad", without("decay_factor"), "test_adagrad_decay_1"),
    "beta only at T = 0": ("Momentum", at_first_step, "test_momentum_beta_1"),
    "no Nesterov": (
        "Momentum",
        lambda right, tensors, attributes: right(*tensors, **{**attributes, "mode": "standard"}),
        "test_momentum_nesterov_3",
    ),
    "float64 results": (
        "Adagrad",
        lambda right, tensors, attributes: [
            np.asarray(a, np.float64) for a in right(*tensors, **attributes)
        ],
        "test_adagrad_second_update",
    ),
    "subnormal numbers are 0": ("Momentum", flushed, "test_momentum_subnormal"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_found(name: str) -> None:
    op_type, change, case = DEFECTS[name]
    chosen = of_group(op_type.lower())
    assert case in failed(changed(**{op_type: defect(op_type, change)}), chosen)
    assert failed(changed(), [CASES[case]]) == {}


class Anything(Backend):
    """Takes all models, and returns what the case wants: none is refused."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
        class Rep:
            def run(self, inputs: list[Any]) -> list[Any]:
                for case in cases():
                    if case.model is model and case.runs:
                        return list(case.runs[0].outputs.values()) or [0] * len(model.graph.output)
                return []

        return Rep()


class Nothing(Backend):
    """Refuses all models."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
        raise RuntimeError("no such operator")


def test_who_takes_everything_does_not_refuse() -> None:
    chosen = [case for case in of_group("refused") if case.runs]
    found = failed(Anything, chosen)
    assert set(found) == {case.name for case in chosen}
    assert found["test_refused_momentum_mode"] == (
        'was not refused, although: Its value should be either "nesterov" or "standard".'
    )


def test_who_refuses_everything_passes_nothing() -> None:
    results = list(run(Nothing, list(cases())))
    assert {r.status for r in results} == {"failed", "unsupported"}
    refused = {r.message for r in results if r.case.refused and r.case.runs}
    assert "does not pass the valid test_adam_second_update either" in refused
    assert all(r.status == "unsupported" for r in results if r.case.refused)


def test_messages_say_what_differs() -> None:
    case = CASES["test_gradient_third_order"]
    model = case.model
    x = case.runs[0].inputs
    right = case.runs[0].outputs

    def message(**outputs: Any) -> str:
        wanted = {**right, **outputs}
        other = Case(case.name, model, case.cites, [Run(x, wanted)])
        return failed(NewOps, [other]).get(case.name, "")

    assert message() == ""
    assert message(a=np.float32(14)) == "a: [13.5], expected [14.]"
    assert message(a=np.float32([13.5])) == "a: shape [], expected [1]"
    assert message(a=np.asarray(13.5)) == "a: float32, expected float64"
    chosen = CASES["test_training_swap"]
    calls = [Call("step", chosen.calls[0].inputs, {}, {"w": np.float32([8])})]
    other = Case(chosen.name, chosen.model, chosen.cites, calls=calls)
    found = failed(CompleteReference, [other])[chosen.name]
    assert found == "call 1, step: w: [7.], expected [8.]"


def test_backends_that_know_nothing_of_training() -> None:
    chosen = of_group("gradient")[:3]
    for backend in (OnnxRuntime, Reference):
        assert len(failed(backend, chosen)) == 3
    [result] = run(OnnxRuntime, [CASES["test_training_swap"]])
    assert (result.status, result.message) == ("unsupported", "the backend has no prepare_training")


# --------------------------------------------------------------------------------------- files


def arrays(values: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {k: (str(a.dtype), a.shape, a.tobytes()) for k, a in values.items()}


@pytest.mark.slow
def test_files_hold_what_the_cases_are(tmp_path: Path) -> None:
    write(cases(), tmp_path / "a")
    found = {case.name: case for case in read(tmp_path / "a")}
    assert found.keys() == CASES.keys()
    for name, case in CASES.items():
        other = found[name]
        assert other.model == case.model
        assert list(other.cites) == list(case.cites)
        for field in ("proposal", "refused", "control", "rtol", "atol"):
            assert getattr(other, field) == getattr(case, field)
        for pair in zip(other.runs, case.runs, strict=True):
            assert arrays(pair[0].inputs) == arrays(pair[1].inputs)
            assert arrays(pair[0].outputs) == arrays(pair[1].outputs)
        for one, two in zip(other.calls, case.calls, strict=True):
            assert (one.method, one.entry) == (two.method, two.entry)
            assert arrays(one.state) == arrays(two.state)
            assert arrays(one.inputs) == arrays(two.inputs)
    write(cases(), tmp_path / "b")
    files = [path for path in sorted((tmp_path / "a").rglob("*")) if path.is_file()]
    for path in files:
        twin = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert twin.read_bytes() == path.read_bytes()
    assert sum(path.stat().st_size for path in files) < 5_000_000


@pytest.mark.slow
def test_the_runner_of_onnx_runs_the_files(tmp_path: Path) -> None:
    write(cases(), tmp_path / "training")
    tests = FolderTest(CompleteReference, tmp_path / "training", __name__).exclude("_cuda")
    for name in SCAN:
        tests.exclude(f"{name}_cpu")
    result = unittest.TestResult()
    tests.test_suite.run(result)
    assert result.testsRun == 2 * len(CASES)  # with those of CUDA, which are skipped
    assert result.errors == result.failures == result.unexpectedSuccesses == []
    refused = [case for case in cases() if case.refused and case.runs]
    assert len(result.expectedFailures) == len(refused)
    shutil.rmtree(tmp_path / "training" / PLAIN / SET)
    with pytest.raises(
        ValueError, match=f"^{PLAIN}: ValueError: 0 data sets, but data.json says 1"
    ):
        FolderTest(CompleteReference, tmp_path / "training", __name__)


# ------------------------------------------------------------------------------- the command


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backend = "ortops.reference.backend:Reference"
    plain = "ortops.conformance.backends:Reference"
    options = ["--backend", backend, "--only", "test_adagrad_*", "--without-proposals"]
    assert main(options) == 0
    table = capsys.readouterr().out
    passed = [case for case in of_group("adagrad") if not case.proposal]
    assert f"| all | {len(passed)} / {len(passed)} |\n" in table
    path = tmp_path / "results.xml"
    options = ["--backend", plain, "--backend", backend, "--only", "test_gradient_without_path"]
    assert main([*options, "--junit", str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{plain}: test_gradient_without_path (proposal): NotImplementedError: " in printed
    assert "| gradient | 0 / 1 | 1 / 1 |\n" in printed
    first, second = ElementTree.parse(path).getroot()
    assert (first.get("name"), first.get("tests"), first.get("failures")) == (plain, "1", "1")
    assert second.get("failures") == "0"
    failure = first.find("testcase/failure")
    assert failure is not None
    assert "NotImplementedError" in failure.get("message", "")
    output = first.findtext("testcase/system-out") or ""
    assert output.startswith("Gradient: ")
    assert "\nproposal: " in output


def test_the_command_runs_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "cases")
    assert main(["--write", folder, "--only", "test_momentum_*"]) == 0
    (tmp_path / "cases" / "test_momentum_beta_1" / "test_data_set_0" / "output_0.pb").write_bytes(
        onnx.numpy_helper.from_array(np.zeros((2, 3), np.float32), "X_new").SerializeToString()
    )
    backend = ["--backend", "ortops.reference.backend:Reference"]
    assert main([*backend, "--data", folder]) == 1
    assert "test_momentum_beta_1: X_new: [" in capsys.readouterr().out
    assert main([*backend, "--data", folder, "--quiet"]) == 1
    assert "X_new" not in capsys.readouterr().out


def edited(case: Path, **facts: Any) -> None:
    known = json.loads((case / "data.json").read_text())
    (case / "data.json").write_text(json.dumps(known | facts))


def too_wide(name: str, value: object) -> Callable[[Path], object]:
    return lambda p: (edited(p, **{name: value}), wrong(p / SET / "output_0.pb"))


def wrong(path: Path) -> None:
    """Changes the value of a tensor in a file by 7."""
    tensor = onnx.load_tensor(path)
    value = onnx.numpy_helper.to_array(tensor) + 7
    path.write_bytes(onnx.numpy_helper.from_array(value, tensor.name).SerializeToString())


PLAIN, REFUSED, TRAINING = (
    "test_adam_second_update",
    "test_refused_adam_float16",
    "test_training_swap",
)
SET, STEP = "test_data_set_0", "training_data_set_0/00_step"
FLAWS: list[tuple[str, Callable[[Path], object], str]] = [
    (PLAIN, lambda p: shutil.rmtree(p / SET), "0 data sets, but data.json says 1"),
    (PLAIN, lambda p: (edited(p, runs=0), shutil.rmtree(p / SET)), "has no data"),
    (PLAIN, lambda p: (p / SET / "output_0.pb").unlink(), "output_0.pb"),
    (PLAIN, lambda p: [f.unlink() for f in p.glob(f"{SET}/output*")], "no values of the outputs"),
    (
        PLAIN,
        lambda p: (p / SET / "output_2.pb").unlink(),
        "data set 0 has no values of the outputs",
    ),
    (PLAIN, lambda p: (p / SET / "input_1.pb").write_bytes(b"x"), "DecodeError"),
    (PLAIN, lambda p: (p / "model.onnx").unlink(), "FileNotFoundError"),
    (PLAIN, lambda p: (p / "model.onnx").write_bytes(b"x" * 9), "DecodeError"),
    (PLAIN, lambda p: (p / "data.json").unlink(), "FileNotFoundError"),
    (PLAIN, lambda p: (p / "data.json").write_text("{}"), "KeyError: "),
    (PLAIN, lambda p: (p / "data.json").write_text("{"), "JSONDecodeError"),
    (PLAIN, lambda p: (shutil.rmtree(p), p.write_text("")), "NotADirectoryError"),
    (PLAIN, lambda p: (p / "test_data_set_x").mkdir(), "ValueError: invalid literal"),
    *(
        (PLAIN, too_wide(name, value), f"{name} must be a number >= 0 and < 1, got {value!r}")
        for name in ("rtol", "atol")
        for value in (math.inf, math.nan, 1e30, -1.0, "0", None, True)
    ),
    (PLAIN, lambda p: edited(p, refused="no"), "refused must be true or false"),
    (PLAIN, lambda p: edited(p, refused=True), "must be refused has outputs"),
    (REFUSED, lambda p: (p / SET / "input_3.pb").unlink(), "no values of the inputs"),
    (REFUSED, lambda p: edited(p, control="test_x"), "control 'test_x' is not among"),
    (REFUSED, lambda p: edited(p, control=REFUSED), "is not among the valid cases"),
    (
        REFUSED,
        lambda p: (p.parent / PLAIN / "data.json").unlink(),
        f"the control {PLAIN} is no case",
    ),
    (
        TRAINING,
        lambda p: shutil.rmtree(p / "training_data_set_0"),
        "00_step has the input tensors []",
    ),
    (TRAINING, lambda p: (p / STEP / "state_1.pb").unlink(), "00_step has the state tensors ['w']"),
    (TRAINING, lambda p: edited(p, calls=[]), "the case has no data"),
    (TRAINING, lambda p: edited(p, calls=[{"method": "no", "entry": 0}]), "got 'no'"),
    (TRAINING, lambda p: edited(p, calls=[{"method": "step", "entry": 7}]), "entry 7"),
    (TRAINING, lambda p: edited(p, calls=[{"method": "infer", "entry": None}]), "expects"),
]


def test_what_tests_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the others run: a case alone is broken, not the run."""
    backend = ["--backend", "ortops.reference.backend:Reference", "--data"]
    with all_violations() as check:
        for number, (name, change, message) in enumerate(FLAWS):
            folder = tmp_path / str(number)
            write([CASES[each] for each in (PLAIN, REFUSED, TRAINING)], folder)
            change(folder / name)
            with check((name, message)):
                assert main([*backend, str(folder), "--only", name]) == 1
                printed = capsys.readouterr().out
                assert f": {name}: " in printed
                assert message in printed
                assert "| all | 0 / 1 |" in printed
    assert main([*backend, str(tmp_path / "0")]) == 1
    assert "| all | 1 / 3 |" in capsys.readouterr().out  # and not what needs it as a control
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path / "0"), "--write", str(tmp_path / "again")])
    assert f"--write: {PLAIN} cannot be written: ValueError: 0 data" in capsys.readouterr().err


def test_a_wrong_number_of_outputs_is_no_refusal() -> None:
    class Silent(CompleteReference):
        @classmethod
        def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Any:
            if model is CASES[REFUSED].model:
                return SimpleNamespace(run=lambda inputs: [])
            return super().prepare(model, device, **kwargs)

    assert failed(Silent, [CASES[REFUSED]])[REFUSED].startswith("was not refused, although: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--backend", "numpy", "--data", "nowhere"],
            "--data must be a folder with cases, got 'now",
        ),
        ([], "--backend or --write is required"),
        (["--backend", "numpy"], "--backend must be MODULE:CLASS, got 'numpy'"),
        (["--backend", "nowhere:A"], "--backend nowhere:A: No module named 'nowhere'"),
        (["--backend", "numpy:A"], "--backend numpy:A: module 'numpy' has no attribute 'A'"),
        (["--backend", "numpy:array"], "it has no method prepare, as ONNX backends have"),
        (
            ["--write", "x", "--only", "no"],
            "such as 'test_adam_*', got 'no', which matches none of",
        ),
    ],
)
def test_the_command_refuses(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_suite_needs_nothing_else_of_the_package() -> None:
    listing = (
        "\nimport sys; print(sorted(m for m in sys.modules if m.startswith('ortops.')"
        " and not m.startswith('ortops.conformance')), 'onnxruntime' in sys.modules)"
    )

    def imported_by(code: str) -> str:
        command = [sys.executable, "-c", code + listing]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    suite = imported_by("import ortops.conformance.__main__, ortops.conformance.onnx_runner")
    assert suite == imported_by("import ortops")  # a package is imported before its modules
    assert suite.endswith("False\n")
