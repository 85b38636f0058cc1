"""InferenceSession: an onnxruntime session that runs the training domain too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy.typing as npt
import onnx
import onnxruntime

from ortops import custom_ops
from ortops.errors import KernelError, ModelError, OrtopsError, UnsupportedError, is_raised_by
from ortops.graph import convert, external
from ortops.graph.convert import ModelLike
from ortops.graph.edit import all_nodes
from ortops.lowering import has_domain, lower_ir, takes_python_kernel
from ortops.uninterrupted import run_uninterrupted

__all__ = ["InferenceSession", "Kernels", "lend", "open_lowered"]

Kernels: TypeAlias = Literal["python", "onnx"]
"""Whether optimizer nodes run as Python custom ops or as standard operators."""

_alive: weakref.WeakSet[InferenceSession] = weakref.WeakSet()


def _keep_forever() -> None:
    """Lets a forked child never free the sessions of its parent.

    onnxruntime would wait for the end of their threads, which the child does not have.
    """
    for session in _alive:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session._sess))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_forever)

_CONFLICT = "Conflicting with a registered kernel"

_FOLDER_KEY = "session.model_external_initializers_file_folder_path"


class InferenceSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """An `onnxruntime.InferenceSession` that runs models with nodes of the training domain.

    Gradient nodes run as standard operators. Adagrad, Adam and Momentum nodes run as Python custom
    ops or as standard operators, with equal numbers up to rounding; those that a custom op cannot
    take (attributes with more than 6 digits) always run as standard operators. A model without
    such nodes is passed to onnxruntime as it is.

    Args:
        path_or_bytes: A path, bytes, or a ModelProto, which may be of more than 2 GB; not changed.
        sess_options: As for onnxruntime. The library of Python custom ops is registered
            on it where it is needed.
        providers: As for onnxruntime; the CPU by default.
        provider_options: As for onnxruntime.
        kernels: ``"python"`` or ``"onnx"``, for optimizer nodes.
        **kwargs: As for onnxruntime.

    Raises:
        ModelError: If the model, or a node of the domain in it, is not legal, or it is a ModelProto
            of 2 GB or more and ``sess_options`` are given, which cannot refer to its data.
        KernelError: If other code has registered Python kernels for the domain, or
            onnxruntime-extensions' library on the same ``sess_options``.
        UnsupportedError: If an operator that a gradient passes through has no rule.

    Example:
        >>> import numpy as np
        >>> import onnx
        >>> model = onnx.parser.parse_model('<ir_version: 10, opset_import: '
        ...     '["": 21, "ai.onnx.preview.training": 1]> m (float[2] x) => (float[2] dx) {'
        ...     'y = Mul (x, x) dx = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x) }')
        >>> InferenceSession(model).run(None, {"x": np.array([1, 3], np.float32)})
        [array([2., 6.], dtype=float32)]
    """

    @convert.blame_model
    def __init__(
        self,
        path_or_bytes: ModelLike,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        kernels: Kernels = "python",
        **kwargs: Any,
    ) -> None:
        if kernels not in ("python", "onnx"):
            raise OrtopsError(f"kernels is {kernels!r}; 'python' and 'onnx' are accepted")
        proto, folder = convert.load(path_or_bytes)
        self._kernel_nodes: dict[str, list[str]] = {}
        self._kernels_on_other_threads = False
        arrays: dict[str, npt.NDArray[Any]] = {}
        source: str | bytes
        if has_domain(proto):
            keep = takes_python_kernel if kernels == "python" else None
            in_memory = lower_ir(convert.to_ir(proto, folder), keep=keep)
            for node in all_nodes(in_memory.graph):
                if node.domain == custom_ops.DOMAIN:
                    self._kernel_nodes.setdefault(node.op_type, []).append(node.name or "")
            lowered, arrays = external.move_out(in_memory)
            if has_domain(lowered):
                sess_options = sess_options or onnxruntime.SessionOptions()
                custom_ops.register_custom_ops(sess_options)
                parallel = onnxruntime.ExecutionMode.ORT_PARALLEL
                self._kernels_on_other_threads = sess_options.execution_mode == parallel
            if not any(tensor.external_data for tensor in lowered.graph.initializer):
                folder = None
            source = external.serialize(lowered)
        elif isinstance(path_or_bytes, str | os.PathLike):
            source, folder = os.fspath(path_or_bytes), None
        elif external.data_size(proto) <= external.MESSAGE_LIMIT:
            source = external.serialize(proto)
        else:
            light, arrays = external.move_out(convert.to_ir(proto))
            source = external.serialize(light)
        self._open(source, sess_options, folder, arrays, providers, provider_options, **kwargs)

    def _open(
        self,
        source: str | bytes,
        sess_options: onnxruntime.SessionOptions | None,
        folder: Path | None,
        arrays: Mapping[str, npt.NDArray[Any]],
        *arguments: Any,
        **kwargs: Any,
    ) -> None:
        """Opens the session of onnxruntime; what that raises becomes an error of ours."""
        self._folder = folder
        with _options_for(sess_options, folder, arrays) as self._options:
            try:
                super().__init__(source, self._options, *arguments, **kwargs)
            except Exception as error:  # onnxruntime's classes have no common base of their own
                if not is_raised_by(error, "onnxruntime", "ortops"):
                    raise
                if _CONFLICT in str(error):
                    raise KernelError(
                        "sess_options: onnxruntime-extensions' library is registered on them "
                        "already, and ortops registers it with its kernels; leave the first "
                        'registration out, or give kernels="onnx"'
                    ) from error
                if "support for domain ai.onnx is till opset" in str(error):
                    raise UnsupportedError(
                        f"model: {str(error).strip()} It needs a newer onnxruntime, and "
                        f"{onnxruntime.__version__} is installed; upgrade it, or convert the model "
                        "down with onnx.version_converter"
                    ) from error
                raise UnsupportedError(
                    f"onnxruntime: {str(error).strip()}; change the type of that node's tensors, "
                    "or choose other providers"
                ) from error
        _alive.add(self)

    def set_providers(self, *args: Any, **kwargs: Any) -> None:
        """As `onnxruntime.InferenceSession.set_providers`."""
        with _options_for(self._options, self._folder, {}):
            super().set_providers(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """As `onnxruntime.InferenceSession.run`.

        Raises:
            KernelError: If a Python kernel failed.
        """
        return self._guarded(super().run, args, kwargs)

    def run_with_ort_values(self, *args: Any, **kwargs: Any) -> Any:
        """As `onnxruntime.InferenceSession.run_with_ort_values`.

        Raises:
            KernelError: If a Python kernel failed.
        """
        return self._guarded(super().run_with_ort_values, args, kwargs)

    def run_with_iobinding(self, *args: Any, **kwargs: Any) -> Any:
        """As `onnxruntime.InferenceSession.run_with_iobinding`.

        Raises:
            KernelError: If a Python kernel failed.
        """
        return self._guarded(super().run_with_iobinding, args, kwargs)

    def run_async(
        self,
        output_names: Sequence[str] | None,
        input_feed: Any,
        callback: Callable[[Any, Any, str], Any],
        user_data: Any,
        run_options: Any = None,
    ) -> Any:
        """As `onnxruntime.InferenceSession.run_async`.

        Where a Python kernel failed, the callback gets the message as its error, and no results.
        """
        if not self._kernel_nodes:
            return super().run_async(output_names, input_feed, callback, user_data, run_options)
        recorder = custom_ops.ErrorRecorder(self._kernel_nodes, anywhere=True)

        held = [input_feed]  # onnxruntime does not keep the arrays of a run that it has begun

        def checked(results: Any, data: Any, message: str) -> None:
            held.clear()
            failure = recorder.finish()
            if failure is None:
                callback(results, data, message)
            else:
                callback(None, data, str(failure))

        recorder.start()
        try:
            return super().run_async(output_names, input_feed, checked, user_data, run_options)
        except BaseException:
            recorder.finish()
            raise

    def _guarded(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._kernel_nodes:
            return run(*args, **kwargs)
        if sys.is_finalizing():
            raise KernelError(
                "session: Python kernels cannot run at the very exit of the interpreter; run it "
                'before, for example in a function of atexit, or give kernels="onnx"'
            )
        anywhere = self._kernels_on_other_threads

        def guarded() -> Any:
            with custom_ops.errors_of_run(self._kernel_nodes, anywhere=anywhere):
                return run(*args, **kwargs)

        return run_uninterrupted(guarded)  # what a handler raised in a kernel would end the process


def open_lowered(
    model: onnx.ModelProto,
    sess_options: onnxruntime.SessionOptions | None,
    providers: Sequence[Any],
) -> InferenceSession:
    """Opens a session for a model that ortops has lowered, which is not checked again.

    Args:
        model: The model, of less than 2 GB, without nodes of the training domain.
        sess_options: As for onnxruntime.
        providers: As for onnxruntime.

    Raises:
        UnsupportedError: If onnxruntime cannot load the model.
    """
    session = InferenceSession.__new__(InferenceSession)
    session._kernel_nodes, session._kernels_on_other_threads = {}, False
    session._open(external.serialize(model), sess_options, None, {}, providers, None)
    return session


def lend(options: onnxruntime.SessionOptions, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Lets options say where external initializers lie in memory.

    Args:
        options: Options for one session.
        arrays: The data, by the names of initializers.
    """
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), values)


@contextlib.contextmanager
def _options_for(
    options: onnxruntime.SessionOptions | None,
    folder: Path | None,
    arrays: Mapping[str, npt.NDArray[Any]],
) -> Iterator[onnxruntime.SessionOptions | None]:
    """Gives options that say where the data of a model are; those of the caller only meanwhile.

    Args:
        options: The caller's.
        folder: The folder of external data.
        arrays: External data in memory.
    """
    if arrays and options is not None:
        raise ModelError(
            "model: it is a ModelProto of 2 GB or more, whose data can be given to onnxruntime "
            "only with options of their own; leave out sess_options, or write the model with "
            "ortops.save_model and give the path"
        )
    if folder is None and not arrays:
        yield options
        return
    chosen = options or onnxruntime.SessionOptions()
    if arrays:
        lend(chosen, arrays)
    if folder is None:
        yield chosen
        return
    try:
        before = chosen.get_session_config_entry(_FOLDER_KEY)
    except RuntimeError:  # onnxruntime's own, where there is no such entry
        before = ""  # means the same; an entry cannot be removed
    chosen.add_session_config_entry(_FOLDER_KEY, str(folder))
    try:
        yield chosen
    finally:
        chosen.add_session_config_entry(_FOLDER_KEY, before)
