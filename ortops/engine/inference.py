"""InferenceSession: an onnxruntime session that also runs the training domain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import onnx
import onnxruntime

from ortops._common.arguments import choice
from ortops._common.numbers import Array
from ortops._common.uninterrupted import finished_at_exit, run_uninterrupted
from ortops.engine import custom_ops
from ortops.errors import KernelError, ModelError, UnsupportedError, is_raised_by
from ortops.graph.files import messages
from ortops.graph.files.loading import ModelLike, blame_model, is_file, load
from ortops.graph.files.messages import has_domain, nodes_within

if TYPE_CHECKING:
    import onnx_ir as ir

Kernels: TypeAlias = Literal["auto", "python", "onnx"]
"""How optimizer nodes run: as Python custom ops, as standard operators, or as is possible."""

_alive: weakref.WeakSet[InferenceSession] = weakref.WeakSet()


def _keep_forever() -> None:
    """Prevents a forked child from freeing the sessions of its parent.

    onnxruntime would wait for their threads, which do not exist in the child.
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
    ops or as standard operators; the results are equal up to rounding. Nodes with attributes of
    more than 6 significant digits always run as standard operators, because custom ops do not
    support them. A model without such nodes is passed to onnxruntime unchanged.

    Args:
        path_or_bytes: A path, bytes, or a ModelProto, which may exceed 2 GB; it is not modified.
        sess_options: As for onnxruntime. The library of Python custom ops is registered on them if
            it is needed.
        providers: As for onnxruntime; by default, the CPU.
        provider_options: As for onnxruntime.
        kernels: How optimizer nodes run: as Python custom ops (``"python"``), as standard operators
            (``"onnx"``), or as custom ops where onnxruntime-extensions can be imported and as
            standard operators elsewhere (``"auto"``).
        **kwargs: As for onnxruntime.

    Raises:
        ArgumentError: If ``kernels`` is none of them.
        ModelError: If the model, or a node of the domain in it, is invalid; or if it is a
            ModelProto of 2 GB or more and ``sess_options`` are given, which cannot refer to its
            data.
        KernelError: If other code has registered Python kernels for the domain, or the library of
            onnxruntime-extensions on the same ``sess_options``; or if a node is to run as a Python
            custom op (``kernels="python"``), but onnxruntime-extensions cannot be imported.
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

    lent: Mapping[str, Array]  # the memory of constants that onnxruntime reads where it is

    @blame_model
    @finished_at_exit
    def __init__(
        self,
        path_or_bytes: ModelLike,
        sess_options: onnxruntime.SessionOptions | None = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        kernels: Kernels = "auto",
        **kwargs: Any,
    ) -> None:
        choice("kernels", kernels, get_args(Kernels))
        proto, folder = load(path_or_bytes)
        self._kernel_nodes: dict[str, list[str]] = {}
        self._kernels_on_other_threads = False
        arrays: dict[str, Array] = {}
        source: str | bytes
        if has_domain(proto):
            lowered, arrays = self._lower(proto, folder, kernels)
            if has_domain(lowered):
                sess_options = sess_options or onnxruntime.SessionOptions()
                custom_ops.register_custom_ops(sess_options)
                parallel = onnxruntime.ExecutionMode.ORT_PARALLEL
                self._kernels_on_other_threads = sess_options.execution_mode == parallel
            folder = folder if _has_external_data(lowered) else None
            source = _message(lowered)
        elif isinstance(path_or_bytes, str | os.PathLike) and is_file(path_or_bytes):
            source, folder = os.fspath(path_or_bytes), None
        elif isinstance(path_or_bytes, bytes | bytearray | memoryview):
            source = bytes(path_or_bytes)
        else:
            folder = folder if _has_external_data(proto) else None
            source, arrays = _serialized(proto)
        self._open(source, sess_options, folder, arrays, providers, provider_options, **kwargs)

    def _lower(
        self, proto: onnx.ModelProto, folder: Path | None, kernels: Kernels
    ) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """Lowers a model, and notes which nodes have Python kernels.

        Returns:
            The model, and external initializers in memory.
        """
        # Not imported for a model that has no such nodes: onnx-ir takes longer than the rest.
        from ortops.engine.lowering import lower_ir, takes_python_kernel
        from ortops.graph import convert
        from ortops.graph.edit import all_nodes
        from ortops.graph.files import external

        def keep(node: ir.Node) -> bool:
            # In this order, since the extension is imported only for a node that it can run.
            return takes_python_kernel(node) and (kernels == "python" or custom_ops.are_available())

        lowered = lower_ir(convert.to_ir(proto, folder), keep=None if kernels == "onnx" else keep)
        for node in all_nodes(lowered.graph):
            if node.domain == custom_ops.DOMAIN:
                self._kernel_nodes.setdefault(node.op_type, []).append(node.name or "")
        return external.move_out(lowered)

    @finished_at_exit
    def _open(
        self,
        source: str | bytes,
        sess_options: onnxruntime.SessionOptions | None,
        folder: Path | None,
        arrays: Mapping[str, Array],
        *arguments: Any,
        **kwargs: Any,
    ) -> None:
        """Opens the onnxruntime session, and converts its exceptions to those of ortops."""
        self._folder = folder
        with _options_for(sess_options, folder, arrays) as self._options:
            try:
                super().__init__(source, self._options, *arguments, **kwargs)
            except Exception as error:  # onnxruntime's exceptions have no common base class
                if not is_raised_by(error, "onnxruntime", "ortops"):
                    raise
                if _CONFLICT in str(error):
                    raise KernelError(
                        "sess_options: the library of onnxruntime-extensions is already registered "
                        "on them, but ortops must register it with its own kernels; remove that "
                        'registration, or use kernels="onnx"'
                    ) from error
                if "support for domain ai.onnx is till opset" in str(error):
                    raise UnsupportedError(
                        f"model: {str(error).strip()} It needs a newer version than onnxruntime "
                        f"{onnxruntime.__version__}; upgrade onnxruntime, or convert the model to "
                        "an older opset with onnx.version_converter"
                    ) from error
                raise UnsupportedError(
                    f"onnxruntime: {str(error).strip()}; change the type of that node's tensors, "
                    "or use other providers"
                ) from error
        _alive.add(self)

    @finished_at_exit
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

        If a Python kernel fails, the callback is called with the error message and no results.
        """
        if not self._kernel_nodes:
            return super().run_async(output_names, input_feed, callback, user_data, run_options)
        recorder = custom_ops.ErrorRecorder(self._kernel_nodes, anywhere=True)

        held = [input_feed]  # onnxruntime does not keep the arrays of a pending run alive

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

    @finished_at_exit
    def _guarded(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._kernel_nodes:
            return run(*args, **kwargs)
        if sys.is_finalizing():
            raise KernelError(
                "session: Python kernels cannot run during interpreter shutdown; run the session "
                'earlier, for example in an atexit handler, or use kernels="onnx"'
            )
        anywhere = self._kernels_on_other_threads

        def guarded() -> Any:
            with custom_ops.errors_of_run(self._kernel_nodes, anywhere=anywhere):
                return run(*args, **kwargs)

        return run_uninterrupted(guarded)  # an exception from a signal handler would be fatal


def _serialized(proto: onnx.ModelProto) -> tuple[bytes, dict[str, Array]]:
    """Returns the bytes of a model, and the arrays that exceed their size limit, by name."""
    from ortops.graph import convert
    from ortops.graph.files import external

    if messages.data_size(proto) <= external.MESSAGE_LIMIT:
        return external.serialize(proto), {}
    light, arrays = external.move_out(convert.to_ir(proto))
    return external.serialize(light), arrays


def _message(proto: onnx.ModelProto) -> bytes:
    from ortops.graph.files import external

    return external.serialize(proto)


def _has_external_data(proto: onnx.ModelProto) -> bool:
    return any(tensor.external_data for tensor in proto.graph.initializer)


def open_lowered(
    model: onnx.ModelProto,
    sess_options: onnxruntime.SessionOptions | None,
    providers: Sequence[Any],
    disabled: Sequence[str] = (),
) -> InferenceSession:
    """Opens a session for a model that ortops has lowered, without checking it again.

    Args:
        model: The model, smaller than 2 GB, without nodes of the training domain.
        sess_options: As for onnxruntime.
        providers: As for onnxruntime.
        disabled: onnxruntime's optimizers that must not run on it.

    Raises:
        UnsupportedError: If onnxruntime cannot load the model.
    """
    session = InferenceSession.__new__(InferenceSession)
    session._kernel_nodes, session._kernels_on_other_threads = {}, False
    if any(node.op_type == "Resize" for node in nodes_within(model)):
        from ortops.graph import faults  # which imports onnx-ir; other models do without

        disabled = [*disabled, *faults.disabled_optimizers(model)]
    more: dict[str, Any] = {"disabled_optimizers": disabled} if disabled else {}
    more["enable_fallback"] = 0  # onnxruntime would print an error, and use the CPU
    session._open(_message(model), sess_options, None, {}, providers, None, **more)
    session._model_bytes = None  # onnxruntime keeps it for `set_providers`, which nobody calls
    return session


def lend(options: onnxruntime.SessionOptions, arrays: Mapping[str, Array]) -> None:
    """Adds in-memory data of external initializers to session options.

    Args:
        options: The options of one session.
        arrays: The data by initializer name.
    """
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()]
    options.add_external_initializers(list(arrays), values)


@contextlib.contextmanager
def _options_for(
    options: onnxruntime.SessionOptions | None,
    folder: Path | None,
    arrays: Mapping[str, Array],
) -> Iterator[onnxruntime.SessionOptions | None]:
    """Yields options that refer to a model's external data; the caller's are restored afterwards.

    Args:
        options: The options of the caller.
        folder: The folder of external data.
        arrays: External data in memory.
    """
    if arrays and options is not None:
        raise ModelError(
            "model: sess_options cannot be used with a ModelProto of 2 GB or more; omit "
            "sess_options, or save the model with ortops.save_model and pass the path"
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
    except RuntimeError:  # raised by onnxruntime for a missing entry
        before = ""  # equivalent to a missing entry, which cannot be restored
    chosen.add_session_config_entry(_FOLDER_KEY, str(folder))
    try:
        yield chosen
    finally:
        chosen.add_session_config_entry(_FOLDER_KEY, before)
