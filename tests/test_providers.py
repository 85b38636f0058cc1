"""Variables in the memory of a device, and providers besides the CPU's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import ortops
from models import llama, mlp
from models.lenet import lenet
from models.resnet import resnet
from ortops import TrainingSession, build_training_model, optimizers
from ortops.cli import main
from ortops.engine.execution import memory, onnxruntime_sessions, variant
from ortops.engine.execution.memory import Device, DeviceArray, device_of, fetch, put
from ortops.engine.execution.onnxruntime_sessions import Sessions
from ortops.engine.execution.providers import choose_providers
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.updates_in_graph import copy_last
from ortops.engine.inference import InferenceSession
from ortops.errors import ArgumentError, UnsupportedError
from ortops.llm import FineTuning
from tests.training_models import assert_same_arrays, classifier, labelled

AZURE = ["AzureExecutionProvider", "CPUExecutionProvider"]
"""Not the CPU provider alone, so that graphs hold no forms that are for it."""

ON_DEVICE = Settings(device=Device("cpu"))
"""What a device needs, in the only memory that every build has."""

IN_PLACE = replace(ON_DEVICE, joined=0)
"""The same for a model that is not small: updates overwrite variables, in a run of their own."""


def images(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    pixels = rng.random((rows, 1, 8, 8), np.float32)
    return {"images": pixels, "labels": rng.integers(0, 10, rows)}


MODELS = {
    "adam": (classifier(dropout=0.5), labelled((6,)), {"optimizer": "Adam"}),
    "momentum, a limit on the norm, an average": (
        classifier(),
        labelled((6,)),
        {
            "optimizer": optimizers.Momentum(0.1, alpha=0.9, beta=1.0),
            "clip_norm": 0.5,
            "ema_decay": 0.9,
        },
    ),
    "convolution": (lenet(channels=(4, 8), hidden=16), images(8), {"optimizer": "Adam"}),
    "running statistics": (
        resnet((1, 1), width=4),
        images(8),
        {"optimizer": "SGD"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_norm_of_gradients_on_a_device(accumulate: int) -> None:
    """It is missing only where updates overwrite the variables after the run of the gradients."""
    model, batch, arguments = MODELS["momentum, a limit on the norm, an average"]
    built = build_training_model(model, loss="SoftmaxCrossEntropy", **arguments)
    norms = []
    for settings in (None, ON_DEVICE, IN_PLACE):
        session = TrainingSession(built, settings=settings)
        options: dict[str, Any] = {"batch_size": 2, "progress": False, "stop_on_nan": False}
        history = session.fit(batch, accumulate=accumulate, **options)
        norms.append(history[0].get("gradient_norm"))
    assert norms[0] is not None
    assert norms[1:] == [norms[0], None]


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def work(request: pytest.FixtureRequest) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model, batch, arguments = request.param
    return build_training_model(model, loss="SoftmaxCrossEntropy", **arguments), batch


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is copied between numpy's memory and the device's."""
    found: list[str] = []

    def note(name: str) -> Any:
        original = getattr(memory, name)

        def call(place: Any, *values: Any) -> Any:
            if isinstance(place, DeviceArray):
                found.append(name)
            return original(place, *values)

        return call

    for place in ("variant.fetch", "variant.put", "variables.fetch", "memory.put"):
        monkeypatch.setattr(f"ortops.engine.execution.{place}", note(place.rsplit(".", 1)[-1]))
    return found


def by_name(session: TrainingSession) -> dict[str, np.ndarray]:
    return {name: session.state[name] for name in sorted(session.state)}


@pytest.fixture(params=[ON_DEVICE, IN_PLACE], ids=["one run", "in place"])
def on_device(request: pytest.FixtureRequest) -> Settings:
    return request.param


def pair(
    model: onnx.ModelProto | Path, on_device: Settings
) -> tuple[TrainingSession, TrainingSession]:
    """Returns sessions with variables in numpy's memory, and with such on a device."""
    return (
        TrainingSession(model, providers=AZURE),
        TrainingSession(model, providers=AZURE, settings=on_device),
    )


@pytest.mark.nightly(2)
@pytest.mark.slow
def test_steps_on_a_device_are_the_same(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]], on_device: Settings, tmp_path: Path
) -> None:
    model, batch = work
    ours, device = pair(model, on_device)
    assert all(
        isinstance(buffer, DeviceArray)
        for variable in device._execution.variables.values()
        for buffer in variable.buffers
    )
    for _ in range(3):
        assert_same_arrays(device.step(batch), ours.step(batch))
    assert_same_arrays(by_name(device), by_name(ours))
    assert device.evaluate([batch]) == ours.evaluate([batch])
    device.save(tmp_path / "device.onnx")
    assert_same_arrays(by_name(TrainingSession(tmp_path / "device.onnx")), by_name(ours))
    cpu = TrainingSession(model)
    for _ in range(3):
        cpu.step(batch)
    for name, value in cpu.state.items():
        np.testing.assert_allclose(device.state[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.nightly(2)
@pytest.mark.slow
def test_both_halves_of_a_step(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]], on_device: Settings
) -> None:
    model, batch = work
    ours, device = pair(model, on_device)
    for _ in range(2):
        found, expected = device.gradients(batch), ours.gradients(batch)
        assert_same_arrays(dict(found), dict(expected))
        device.apply(found)
        ours.apply(expected)
    assert_same_arrays(by_name(device), by_name(ours))
    assert_same_arrays(device.step(batch), ours.step(batch))


@pytest.mark.nightly(2)
@pytest.mark.quick(1)
def test_several_steps_in_a_run(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]], on_device: Settings
) -> None:
    model, batch = work
    ours, device = pair(model, on_device)
    np.testing.assert_array_equal(device.run_steps([batch] * 5), ours.run_steps([batch] * 5))
    assert_same_arrays(by_name(device), by_name(ours))


@pytest.mark.nightly(2)
@pytest.mark.slow
def test_state_is_set_and_reset(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]], on_device: Settings
) -> None:
    model, batch = work
    ours, device = pair(model, on_device)
    for session in (ours, device):
        session.step(batch)
        session.learning_rate = 0.25
        name = next(iter(session.parameters))
        session.state[name] = session.state[name] * 2
        session.step(batch)
    assert device.learning_rate == 0.25
    assert_same_arrays(by_name(device), by_name(ours))
    before = device.state[name]
    device.state[name] = np.zeros_like(before)
    assert before.any()  # what was read before stays as it was
    device.reset()
    assert_same_arrays(by_name(device), by_name(TrainingSession(model)))


@pytest.mark.nightly
@pytest.mark.quick(1)
def test_a_step_moves_no_variable(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]], on_device: Settings, moved: list[str]
) -> None:
    model, batch = work
    session = TrainingSession(model, settings=on_device)
    session.step(batch)
    del moved[:]
    shown = session.step(batch, outputs=["loss"])
    assert list(shown) == ["loss"]
    assert moved == []
    assert session.state["learning_rate"] > 0
    assert moved == ["fetch"]


@pytest.mark.quick(1)
def test_large_models_are_updated_in_place(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]],
) -> None:
    model, _ = work
    for settings, in_place in ((ON_DEVICE, False), (IN_PLACE, True)):
        session = TrainingSession(model, providers=AZURE, settings=settings)
        tensors = {
            name: variable.buffers[0] is variable.buffers[1]
            for name, variable in session._execution.variables.items()
            if session.state[name].ndim
        }
        assert tensors.keys() >= session.parameters.keys()
        assert set(tensors.values()) == {in_place}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [ON_DEVICE, IN_PLACE], ids=["one run", "in place"])
def test_small_variables_of_a_device_are_updated_together(settings: Settings) -> None:
    """By one formula, which takes a square root; a large variable by itself."""
    roots = {}
    for hidden in (16, 2048):  # the first weight has 64 · hidden elements
        model = build_training_model(
            mlp.mlp((64, hidden, 10)), loss="SoftmaxCrossEntropy", optimizer="Adam"
        )
        session = TrainingSession(model, providers=AZURE, settings=settings)
        batch = images(4)
        session.step({**batch, "images": batch["images"].reshape(4, 64)})
        operators = session.report().operators
        assert operators is not None
        roots[hidden] = operators["Sqrt"]
    bias_corrections = 1
    assert roots == {16: 1 + bias_corrections, 2048: 2 + bias_corrections}


def test_what_may_be_overwritten() -> None:
    """Not y: w is computed from its present value, and y from the present value of w."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 21]>
        step (float[2] x, float[2] y, float[2] w, float[2] u, float[2] v, float rate, float[2] g)
            => (float[2] x_new, float[2] y_new, float[2] w_new, float[2] both, float rate_new)
        { d = Mul (g, rate)  x_new = Sub (x, d)
          y_new = Sub (y, w)  w_new = Mul (w, y)
          both = Add (u, x_new)  rate_new = Neg (rate) }"""
    )
    updates = {"x": "x_new", "y": "y_new", "w": "w_new", "u": "both", "v": "both"}
    assert copy_last(model.graph, {**updates, "rate": "rate_new"}) == {"x"}
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    fed = {name: np.full(2, n, np.float32) for n, name in enumerate("gxywuv")}
    found = session.run(None, {**fed, "rate": np.array(0.5, np.float32)})
    expected = [1.0, -1.0, 6.0, 5.0, -0.5]  # in the order of the outputs
    assert [float(array.flat[0]) for array in found] == expected


@pytest.mark.slow
def test_graphs_for_a_device_have_no_forms_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ir.Model] = []
    open_ = Sessions.open

    def note(self: Sessions, model: ir.Model, **more: Any) -> InferenceSession:
        opened.append(model)
        return open_(self, model, **more)

    monkeypatch.setattr(Sessions, "open", note)
    model, batch, arguments = MODELS["convolution"]
    trainable = build_training_model(model, loss="SoftmaxCrossEntropy", **arguments)
    TrainingSession(trainable, settings=ON_DEVICE).step(batch)
    (graph,) = opened
    assert {node.domain for node in graph.graph} == {""}
    del opened[:]
    TrainingSession(trainable).step(batch)
    assert "com.microsoft" in {node.domain for each in opened for node in each.graph}


def test_python_kernels_are_refused() -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    with pytest.raises(
        UnsupportedError,
        match="kernels must be 'onnx' for variables on a 'cpu' device, got 'python', which runs on",
    ):
        TrainingSession(model, kernels="python", settings=ON_DEVICE)


def test_a_device_that_is_not_there() -> None:
    model = build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam")
    with pytest.raises(
        UnsupportedError,
        match=r"(?s)providers: device 3 of type 'cuda' has no memory for variables: .*; use a "
        r"build of onnxruntime and a machine that have the provider, or providers=\['CPU",
    ):
        TrainingSession(model, settings=Settings(device=Device("cuda", 3)))


def test_bfloat16_on_a_device_is_refused() -> None:
    import ml_dtypes

    value = np.zeros(2, ml_dtypes.bfloat16)
    with pytest.raises(UnsupportedError, match=r"bfloat16 cannot be written to memory of a 'cpu'"):
        DeviceArray(value, Device("cpu"))


@pytest.mark.parametrize(
    ("providers", "expected"),
    [
        (["CPUExecutionProvider"], None),
        (AZURE, None),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], Device("cuda")),
        ([("CUDAExecutionProvider", {"device_id": "2"})], Device("cuda", 2)),
        (["DmlExecutionProvider"], Device("dml")),
        (["CPUExecutionProvider", "CUDAExecutionProvider"], None),
        (["TensorrtExecutionProvider", "CANNExecutionProvider"], Device("cann")),
    ],
)
def test_the_device_is_that_of_the_first_provider_of_the_build(
    providers: list[Any], expected: Device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_of(["CUDAExecutionProvider"]) is None
    built = ["CUDAExecutionProvider", "DmlExecutionProvider", "CANNExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*built, *AZURE])
    assert device_of(providers) == expected


def test_memory_of_a_device() -> None:
    given = np.arange(6, dtype=np.float64).reshape(2, 3).T
    place = DeviceArray(given, Device("cpu"))
    read = fetch(place)
    np.testing.assert_array_equal(read, given)
    given[...] = 7.0
    put(place, np.float64(2))
    np.testing.assert_array_equal(fetch(place), np.full((3, 2), 2.0))
    np.testing.assert_array_equal(read, np.arange(6.0).reshape(2, 3).T)
    assert (place.dtype, place.shape, place.size) == (np.float64, (3, 2), 6)


def adam() -> onnx.ModelProto:
    return build_training_model(classifier(), loss="SoftmaxCrossEntropy", optimizer="Adam")


@pytest.mark.parametrize(
    ("providers", "message"),
    [
        (
            ["CUDAExecutionProvider"],
            "'CUDAExecutionProvider' is not available in .*Available are .*'CPUExecutionProvider'",
        ),
        (
            ["CPUExecutionProvider", ("CUDAExecutionProvider", {"device_id": 1})],
            r"'CUDAExecutionProvider' is not available",
        ),
        (["CUDAExecutionProvider", "AzureExecutionProvider"], "'CUDAExecutionProvider' is not"),
        (
            ["Nonsense", "CPUExecutionProvider"],
            "no provider 'Nonsense'. Available are .*'CPUEx",
        ),
        (["CUDAExecutionProvder"], r"Did you mean 'CUDAExecutionProvider'\? Available are"),
        ("webgpu", "providers must be a list of names, got 'webgpu'; for example"),
        ({"webgpu": {}}, "providers must be a list of names, got {"),
        ([1], "providers must be names, pairs of a name and a dict of options, or devices of .* 1"),
        ([("CPUExecutionProvider", 1)], "providers must be names, pairs"),
        (
            ["CPUExecutionProvider"] * 2,
            "different from each other, got 'CPUExecutionProvider' twic",
        ),
    ],
)
def test_a_provider_that_is_missing_or_unknown(providers: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrainingSession(adam(), providers=providers)
    with pytest.raises(ArgumentError, match=message):
        ortops.Function(classifier(), providers=providers)


def test_the_cpu_stands_in_for_a_missing_provider_if_it_is_listed_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch = labelled((6,))
    session = TrainingSession(adam(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    expected = TrainingSession(adam())
    for _ in range(3):
        assert_same_arrays(session.step(batch), expected.step(batch))
    assert session.evaluate([batch]) == expected.evaluate([batch])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "providers: 'CUDAExecutionProvider' is not available in this installation of onnxruntime; "
        "it is left out"
    )


def test_a_provider_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the build of onnxruntime, but the machine has no such device."""
    known = [*onnxruntime.get_available_providers(), "CUDAExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: known)
    monkeypatch.setattr(
        "onnxruntime.capi.onnxruntime_inference_collection.C.get_available_providers",
        lambda: known,
    )
    with pytest.raises(
        ArgumentError, match=r"'CUDAExecutionProvider' does not work on this machin"
    ):
        choose_providers(["CUDAExecutionProvider"])


@pytest.mark.parametrize(
    "name", ["OpenVINOExecutionProvider", "OpenVINOExecutionProvider.AUTO", "openvino"]
)
def test_openvino_is_refused(name: str) -> None:
    """Also as a device of its plugin, and before the plugin is registered."""
    message = f"'{name}' is not supported: its graphs cannot"
    for provider in (name, (name, {"precision": "FP32"}), SimpleNamespace(ep_name=name)):
        with pytest.raises(UnsupportedError, match=message):
            TrainingSession(adam(), providers=[provider, "CPUExecutionProvider"])
    with pytest.raises(UnsupportedError, match=message):
        ortops.Function(classifier(), providers=[name])


@pytest.mark.needs("onnxruntime>=1.23")
def test_providers_of_session_options_are_refused() -> None:
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices(onnxruntime.get_ep_devices()[:1], {})
    for providers in (None, ["CPUExecutionProvider"]):
        with pytest.raises(ArgumentError, match=r"sess_options has providers of its own"):
            TrainingSession(adam(), sess_options=options, providers=providers)


@pytest.mark.needs("onnxruntime>=1.23")
def test_a_device_is_a_provider() -> None:
    cpu = [d for d in onnxruntime.get_ep_devices() if d.ep_name == "CPUExecutionProvider"]
    assert choose_providers(cpu) == [("CPUExecutionProvider", {})]
    batch = labelled((6,))
    found = TrainingSession(adam(), providers=cpu).step(batch)
    assert_same_arrays(found, TrainingSession(adam()).step(batch))


class CopyingBinding:
    """A binding of a provider with memory of its own: tensors elsewhere are copied when bound.

    Args:
        binding: The true binding.
        here: The inputs that the session reads in the CPU's memory.
        on_device: The addresses of the memory that stands for the device's.
    """

    def __init__(self, binding: onnxruntime.IOBinding, here: set[str], on_device: set[int]) -> None:
        self.binding, self.here, self.on_device = binding, here, on_device
        self.copies: dict[str, onnxruntime.OrtValue] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.binding, name)

    def bind_ortvalue_input(self, name: str, value: onnxruntime.OrtValue) -> None:
        if (value.data_ptr() in self.on_device) == (name in self.here):
            value = onnxruntime.OrtValue.ortvalue_from_numpy(value.numpy().copy())
        self.copies[name] = value  # onnxruntime does not keep it alive
        self.binding.bind_ortvalue_input(name, value)


@pytest.fixture
def with_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes Azure's provider one with memory of its own, but for `step`, for lack of a kernel."""
    on_device: set[int] = set()
    create, bind, run = (
        DeviceArray.__init__,
        InferenceSession.io_binding,
        InferenceSession.run_with_iobinding,
    )

    def created(self: DeviceArray, *arguments: Any) -> None:
        create(self, *arguments)
        self.is_here = False
        on_device.add(self.value.data_ptr())

    monkeypatch.setattr(DeviceArray, "__init__", created)
    monkeypatch.setattr(onnxruntime_sessions, "_HERE", {"CPUExecutionProvider"})
    monkeypatch.setattr(
        InferenceSession,
        "get_input_memory_infos",
        lambda self: [
            SimpleNamespace(name="Cpu" if each.name == "step" else "Device")
            for each in self.get_inputs()
        ],
        raising=False,  # onnxruntime before 1.23
    )

    def bound(self: InferenceSession) -> Any:
        if self.get_providers() == ["CPUExecutionProvider"]:
            return bind(self)
        return CopyingBinding(bind(self), {"step"}, on_device)

    monkeypatch.setattr(InferenceSession, "io_binding", bound)
    monkeypatch.setattr(
        InferenceSession,
        "run_with_iobinding",
        lambda self, each: run(self, getattr(each, "binding", each)),
    )


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [None, ON_DEVICE, IN_PLACE], ids=["here", "on the device", "in place"]
)
@pytest.mark.usefixtures("with_its_own_memory")
def test_inputs_that_are_copied_when_they_are_bound(
    work: tuple[onnx.ModelProto, dict[str, np.ndarray]],
    settings: Settings | None,
) -> None:
    model, batch = work
    cpu = TrainingSession(model)
    device = TrainingSession(model, providers=AZURE, settings=settings)
    with pytest.MonkeyPatch.context() as patch:  # as if inputs were bound once
        patch.setattr(variant, "inputs_elsewhere", lambda session, memories: [])
        stale = TrainingSession(model, providers=AZURE, settings=settings)
    for _ in range(6):
        expected, found = cpu.step(batch), device.step(batch)
        wrong = stale.step(batch)
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)
    assert device.steps_done == 6
    # The double shows what it is for.
    if settings is None:
        assert abs(wrong["loss"] - expected["loss"]) > 1e-3
    elif "step" in stale.state:
        assert stale.steps_done < 6
    assert_same_arrays(dict(device.gradients(batch)), dict(device.gradients(batch)))
    assert device.evaluate([batch])["loss"] == pytest.approx(cpu.evaluate([batch])["loss"], 1e-4)


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [None, ON_DEVICE, IN_PLACE], ids=["here", "on the device", "in place"]
)
@pytest.mark.usefixtures("with_its_own_memory")
def test_fit_on_a_device_with_memory_of_its_own(settings: Settings | None, tmp_path: Path) -> None:
    """Accumulated gradients, averages, a search for anomalies, and a training in two parts."""
    model = build_training_model(
        classifier(dropout=0.5),
        loss="SoftmaxCrossEntropy",
        optimizer=optimizers.AdamW(ortops.schedules.cosine(0.01, steps=12)),
        ema_decay=0.9,
        clip_norm=0.5,
    )
    data = {name: np.concatenate([array] * 4)[:24] for name, array in labelled((6,)).items()}
    more: dict[str, Any] = {"epochs": 3, "batch_size": 3, "accumulate": 2, "progress": False}
    found = {}
    for name, arguments in (("cpu", {}), ("device", {"providers": AZURE, "settings": settings})):
        whole = TrainingSession(model, **arguments)
        whole.fit(data, **more)
        part = TrainingSession(model, **arguments)
        part.fit(data, max_steps=5, **more)
        part.save(tmp_path / f"{name}.onnx")
        resumed = TrainingSession(tmp_path / f"{name}.onnx", **arguments)
        resumed.fit(data, resume=True, detect_anomaly=True, **more)
        assert_same_arrays(by_name(resumed), by_name(whole))
        whole.fit(data, epochs=2, batch_size=6, detect_anomaly=True, progress=False)
        found[name] = {**by_name(whole), **whole.evaluate(data, ema=True)}
    for name, value in found["cpu"].items():
        np.testing.assert_allclose(found["device"][name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("provider", "option"),
    [
        ("webgpu", "enableInt64"),
        ("webgpu", "enableGraphCapture"),
        ("cuda", "enable_cuda_graph"),
        ("TensorrtExecutionProvider", "trt_cuda_graph_enable"),
    ],
)
def test_options_with_which_steps_could_be_wrong(provider: str, option: str) -> None:
    message = f"the option '{option}' is not supported: .*; leave it out$"
    with pytest.raises(UnsupportedError, match=message):
        choose_providers([(provider, {option: 1})])


@pytest.mark.slow
def test_a_language_model_is_tuned_on_a_provider(tmp_path: Path) -> None:
    rows = [{"input_ids": [65, 66, 67, 68, 256]}]
    base = llama.write(tmp_path / "base")
    found = []
    for providers in (None, AZURE):
        tuning = FineTuning(base, 4, 4, learning_rate=0.03, providers=providers)
        found.append(tuning.fit(rows, epochs=2, progress=False)[-1]["loss"])
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert dict(tuning.session.providers).keys() == set(AZURE)
    tuning.save(tmp_path / "tuned")
    again = FineTuning.load(tmp_path / "tuned", providers=AZURE)
    assert dict(again.session.providers).keys() == set(AZURE)
    with pytest.raises(ArgumentError, match="there is no provider 'NoExecutionProvider'"):
        FineTuning(base, providers=["NoExecutionProvider"])


@pytest.mark.slow
def test_the_command_line_tunes_on_a_provider(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"input_ids": [65, 66, 67, 68, 256]}\n')
    arguments = ["tune", str(llama.write(tmp_path / "base")), str(data)]
    arguments += ["--save", str(tmp_path / "tuned"), "--providers"]
    assert main([*arguments, "NoExecutionProvider"]) != 0
    assert "there is no provider 'NoExecutionProvider'" in capsys.readouterr().err
    assert main([*arguments, *AZURE]) == 0
