"""Opens and runs onnxruntime sessions, and converts their errors to errors of ortops."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy.typing as npt
import onnx_ir as ir
import onnxruntime

from ortops._common.arguments import choice
from ortops._common.cores import session_threads
from ortops.engine.execution.memory import Device, DeviceArray, Memory, device_of, ort_value
from ortops.engine.execution.placement import RECORDS, name_nodes
from ortops.engine.execution.providers import CPU, CUDA, WEBGPU, Provider
from ortops.engine.execution.settings import Settings
from ortops.engine.inference import InferenceSession, lend, open_lowered
from ortops.errors import FREE_BATCH, KernelError, OrtopsError, UnsupportedError, is_raised_by
from ortops.graph.files import external
from ortops.graph.passes import passes_for
from ortops.graph.passes.draft import Runtime

UpdateKernels: TypeAlias = Literal["auto", "onnx", "python", "compiled"]

_COPIED_OPTIONS = (
    "enable_profiling",
    "graph_optimization_level",
    "log_severity_level",
    "profile_file_prefix",
)


SESSIONS: Mapping[str, Runtime] = {WEBGPU: "webgpu_session", CUDA: "cuda_session"}
"""The runtime whose passes a session with a provider needs."""

_LENT = 2**24
"""Constants of at least this many bytes, such as frozen weights, are shared with onnxruntime."""

_HERE = {CPU, "AzureExecutionProvider"}
"""Providers without memory of their own."""


class Sessions:
    """Opens sessions with the user's options and providers.

    Args:
        kernels: The kernels for updates.
        options: The user's options.
        providers: The providers.
        settings: How steps are executed.

    Attributes:
        kernels: The kernels for updates: "onnx" for "auto".
        compiles_later: Whether updates may be compiled after some steps.
        settings: How steps are executed.
        threads: The number of threads for large updates.
        on_cpu: Whether only onnxruntime's CPU provider is used.
        passes: The graph rewrites for the providers.
        names: The names of the providers.
        device: The device for variables; None for numpy's memory.

    Raises:
        ArgumentError: If the kernels are unknown.
        UnsupportedError: If kernels other than ``"onnx"`` are requested for variables on a device.
    """

    def __init__(
        self,
        kernels: UpdateKernels,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Provider],
        settings: Settings,
    ) -> None:
        choice("kernels", kernels, get_args(UpdateKernels))
        self.kernels: UpdateKernels = "onnx" if kernels == "auto" else kernels
        self.settings = settings
        self._options = options
        self._providers = providers
        asked = 0 if options is None else options.intra_op_num_threads
        self.threads = 1 if kernels == "python" else asked or settings.threads
        self.device = settings.device or device_of(providers)
        self.on_cpu = self.device is None and [name for name, _ in providers] == [CPU]
        self.names = [name for name, _ in providers]
        # Compiled code keeps subnormal numbers.
        flushes = _entry(options, "session.set_denormal_as_zero") == "1"
        self.compiles_later = kernels == "auto" and self.on_cpu and not flushes
        runtime = next((SESSIONS[name] for name in self.names if name in SESSIONS), None)
        others = passes_for(runtime) if runtime else ()
        self.passes = settings.passes if self.on_cpu else others
        if self.device is not None and self.kernels != "onnx":
            raise UnsupportedError(
                f"kernels must be 'onnx' for variables on a '{self.device.kind}' device, got "
                f"'{kernels}', which runs on the CPU only"
            )

    def open(
        self,
        model: ir.Model,
        *,
        spin: bool = True,
        optimize: bool = True,
        single_thread: bool = False,
        anywhere: bool = True,
        disabled: Sequence[str] = (),
    ) -> InferenceSession:
        """Opens a session.

        Args:
            model: The model.
            spin: Whether threads may wait actively between runs.
            optimize: Whether onnxruntime may optimize the model, which takes time.
            single_thread: Whether a run uses one thread, because the caller has threads.
            anywhere: Whether to use all providers; otherwise, only the CPU.
            disabled: onnxruntime's optimizers that must not run on the model.

        Raises:
            UnsupportedError: If onnxruntime cannot load the model.
        """
        options = self._options
        # Sharing needs options of its own, and Python kernels need a complete model.
        lends = options is None and not single_thread and self.kernels != "python"
        proto, lent = external.move_out(model, _LENT if lends else None)
        is_ours = options is None
        if single_thread:
            options = _single_threaded(options)
        elif options is None:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = session_threads()
            if not optimize:
                options.graph_optimization_level = (
                    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                )
                options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED  # as written
            if self.settings.spin is not None:
                key = "session.intra_op.spin_duration_us"
                options.add_session_config_entry(key, str(self.settings.spin))
            if not spin:  # waiting threads would occupy the cores of the update
                options.add_session_config_entry("session.force_spinning_stop", "1")
            if lent:
                lend(options, lent)
        if is_ours:
            options.log_severity_level = 3  # warnings about a graph of ortops help nobody
            # Memory that is reserved for a much later node is never returned, and a pattern takes
            # all memory of a step once more. Neither makes steps faster.
            options.enable_mem_reuse = options.enable_mem_pattern = False
        if self.kernels == "python":
            return InferenceSession(proto, options, self._providers, kernels="python")
        if self.on_cpu or not anywhere:
            session = open_lowered(proto, options, self._providers if anywhere else [(CPU, {})])
        else:
            name_nodes(proto)
            _record_placement(options)
            session = open_lowered(proto, options, self._providers, disabled)
        session.lent = lent
        return session


def _record_placement(options: onnxruntime.SessionOptions) -> None:
    """Makes sessions record where their nodes run, which does no harm to other sessions."""
    if _entry(options, RECORDS) != "1":  # setting it again logs a warning
        options.add_session_config_entry(RECORDS, "1")


def _entry(options: onnxruntime.SessionOptions | None, name: str) -> str:
    """Returns an entry of session options; "" if there is none."""
    if options is not None:
        with contextlib.suppress(RuntimeError):  # raised by onnxruntime for a missing entry
            return str(options.get_session_config_entry(name))
    return ""


def inputs_here(session: onnxruntime.InferenceSession) -> set[str]:
    """Returns the inputs that a session reads in the CPU's memory, as far as is known.

    They include those that are read by nodes that a device has no kernel for.
    """
    names = [value.name for value in session.get_inputs()]
    if set(session.get_providers()) <= _HERE:
        return set(names)
    if not hasattr(session, "get_input_memory_infos"):  # before onnxruntime 1.23
        return set()
    infos = session.get_input_memory_infos()
    return {name for name, info in zip(names, infos, strict=True) if info.name == "Cpu"}


def inputs_elsewhere(
    session: onnxruntime.InferenceSession, memories: Mapping[str, Memory]
) -> list[str]:
    """Returns the inputs that a session may read elsewhere than where their memory is.

    onnxruntime copies such an input when it is bound, not when the session runs, so it must be
    bound before every run.

    Args:
        session: The session.
        memories: The memory of inputs by name.
    """
    here = inputs_here(session)
    known = set(session.get_providers()) <= _HERE or hasattr(session, "get_input_memory_infos")
    return [
        name
        for name, memory in memories.items()
        if not known or (name in here) != (not isinstance(memory, DeviceArray) or memory.is_here)
    ]


def outputs_on(device: Device, session: onnxruntime.InferenceSession) -> set[str]:
    """Returns the outputs that a session computes in the memory of a device, as far as is known."""
    if not hasattr(session, "get_output_memory_infos"):  # before onnxruntime 1.23
        return set()
    pairs = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
    return {value.name for value, info in pairs if info.name != "Cpu" or device.kind == "cpu"}


def _single_threaded(options: onnxruntime.SessionOptions | None) -> onnxruntime.SessionOptions:
    """Returns a copy of the options for a session with one thread."""
    result = onnxruntime.SessionOptions()
    if options is not None:
        for name in _COPIED_OPTIONS:
            setattr(result, name, getattr(options, name))
    result.intra_op_num_threads = 1
    return result


def run_session(
    session: onnxruntime.InferenceSession,
    feeds: Mapping[str, Memory],
    outputs: Sequence[str],
    options: onnxruntime.RunOptions | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Runs a session on tensors, whose memory it reads; returns outputs by name.

    Args:
        session: The session.
        feeds: Tensors by name; those that are not inputs are ignored.
        outputs: The names of the outputs to compute.
        options: The options of the run.

    Raises:
        KernelError: If the run failed.
    """
    arrays = {value.name: feeds[value.name] for value in session.get_inputs()}
    if any(array.dtype.kind == "O" for array in arrays.values()):  # strings, which have no OrtValue
        with errors_as_ours():
            return dict(zip(outputs, session.run(outputs, arrays, options), strict=True))
    inputs = {name: ort_value(array) for name, array in arrays.items()}
    with errors_as_ours():
        found = session.run_with_ort_values(outputs, inputs, options)
    return {name: value.numpy() for name, value in zip(outputs, found, strict=True)}


_SHAPES = re.compile("reshape|expand|broadcast|dimension|concat", re.IGNORECASE)
"""Words of messages about shapes, as of a Reshape to the size of the batch at export."""


@contextlib.contextmanager
def errors_as_ours() -> Iterator[None]:
    """Converts exceptions of onnxruntime in a run to a KernelError.

    Raises:
        KernelError: If a run failed.
    """
    try:
        yield
    except OrtopsError:
        raise
    except Exception as error:  # onnxruntime's classes have no common base class
        if not is_raised_by(error, "onnxruntime", "ortops"):
            raise
        is_of_shapes = _SHAPES.search(str(error)) is not None
        raise KernelError(
            f"onnxruntime: {str(error).strip()}; check values and shapes of the feeds"
            + (f"; if the batch size is fixed, {FREE_BATCH}" if is_of_shapes else "")
        ) from error
