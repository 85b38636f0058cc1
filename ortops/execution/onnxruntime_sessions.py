"""Opening and running onnxruntime sessions, so that what goes wrong is an error of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy.typing as npt
import onnx
import onnxruntime

from ortops.errors import KernelError, OrtopsError, UnsupportedError, is_raised_by
from ortops.execution.memory import Device, device_of
from ortops.inference import InferenceSession, Kernels, lend, open_lowered

__all__ = ["Sessions", "UpdateKernels", "errors_as_ours"]

UpdateKernels: TypeAlias = Literal["onnx", "python", "compiled"]

_COPIED_OPTIONS = (
    "enable_profiling",
    "graph_optimization_level",
    "log_severity_level",
    "profile_file_prefix",
)


class Sessions:
    """Opens sessions with the user's options and providers.

    Args:
        kernels: What runs updates.
        options: The user's options.
        providers: The providers.
        threads: How many threads share the chunks of large updates, where the options do not say.
        spin: For how many microseconds threads wait actively for work, likewise.
        save_memory: Whether to reuse less memory, so that tensors are freed as early as possible.
        device: Where variables lie; where the providers say by default.

    Attributes:
        threads: How many threads share the chunks of large updates.
        on_cpu: Whether onnxruntime's CPU provider runs everything.
        device: The device whose memory variables lie in; None for numpy's memory.

    Raises:
        OrtopsError: If there are no such kernels.
        UnsupportedError: If other kernels than ``"onnx"`` are asked for and variables lie on a
            device.
    """

    def __init__(
        self,
        kernels: UpdateKernels,
        options: onnxruntime.SessionOptions | None,
        providers: Sequence[Any],
        *,
        threads: int,
        spin: int | None,
        save_memory: bool,
        device: Device | None = None,
    ) -> None:
        if kernels not in ("onnx", "python", "compiled"):
            raise OrtopsError(
                f"kernels is {kernels!r}; 'onnx', 'python' and 'compiled' are accepted"
            )
        self._kernels: Kernels = "python" if kernels == "python" else "onnx"
        self._options = options
        self._providers = providers
        self._save_memory = save_memory
        self._spin = spin
        asked = 0 if options is None else options.intra_op_num_threads
        self.threads = 1 if kernels == "python" else asked or threads
        self.device = device or device_of(providers)
        self.on_cpu = self.device is None and list(providers) == ["CPUExecutionProvider"]
        if self.device is not None and kernels != "onnx":
            raise UnsupportedError(
                f"kernels is '{kernels}', which run on the CPU, and variables lie on a "
                f"'{self.device.kind}' device; 'onnx' is accepted there"
            )

    @property
    def lends(self) -> bool:
        """Whether sessions take external initializers in memory, which makes fewer copies of them.

        They need options of their own, and Python kernels a model that is whole.
        """
        return self._options is None and self._kernels == "onnx"

    def open(
        self,
        model: onnx.ModelProto,
        *,
        spin: bool = True,
        optimize: bool = True,
        single_thread: bool = False,
        lent: Mapping[str, npt.NDArray[Any]] | None = None,
    ) -> InferenceSession:
        """Opens a session.

        Args:
            model: The model.
            spin: Whether threads may wait actively between runs.
            optimize: Whether onnxruntime may rewrite the model, which takes time.
            single_thread: Whether a run has one thread: those of the caller share the work.
            lent: External initializers in memory, where `lends`; they have to outlive the session.

        Raises:
            UnsupportedError: If onnxruntime cannot load the model.
        """
        options = self._options
        if single_thread:
            options = _single_threaded(options)
        elif options is None:
            options = onnxruntime.SessionOptions()
            if self._save_memory:  # memory reserved for a much later node is never returned
                options.enable_mem_reuse = False
            options.enable_mem_pattern = False  # a plan beside the first run's memory, no faster
            if not optimize:
                options.graph_optimization_level = (
                    onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
                )
            if self._spin is not None:
                key = "session.intra_op.spin_duration_us"
                options.add_session_config_entry(key, str(self._spin))
            if not spin:  # threads that wait for work would take the cores of the update
                options.add_session_config_entry("session.force_spinning_stop", "1")
            if lent:
                lend(options, lent)
        if self._kernels == "python":
            return InferenceSession(model, options, self._providers, kernels=self._kernels)
        return open_lowered(model, options, self._providers)


def _single_threaded(options: onnxruntime.SessionOptions | None) -> onnxruntime.SessionOptions:
    """Returns options like the given ones for a session with one thread."""
    result = onnxruntime.SessionOptions()
    if options is not None:
        for name in _COPIED_OPTIONS:
            setattr(result, name, getattr(options, name))
    result.intra_op_num_threads = 1
    return result


@contextlib.contextmanager
def errors_as_ours() -> Iterator[None]:
    """Makes what onnxruntime raises in a run an error of ours.

    Raises:
        KernelError: If a run failed.
    """
    try:
        yield
    except OrtopsError:
        raise
    except Exception as error:  # onnxruntime's classes have no common base of their own
        if not is_raised_by(error, "onnxruntime", "ortops"):
            raise
        raise KernelError(
            f"onnxruntime: {str(error).strip()}; check values and shapes of the feeds"
        ) from error
