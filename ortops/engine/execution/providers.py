"""Which execution providers sessions use: checks what a user asks for, and registers plugins."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnxruntime

from ortops._common.optional import optional_module
from ortops.errors import ArgumentError, OrtopsError, UnsupportedError, did_you_mean

Provider: TypeAlias = tuple[str, dict[str, str]]
"""The name of a provider and its options, as onnxruntime takes them."""

CPU = "CPUExecutionProvider"

WEBGPU = "WebGpuExecutionProvider"

CUDA = "CUDAExecutionProvider"

_ALIASES = {"webgpu": WEBGPU, "cuda": CUDA}

_NEED_CUDA = (CUDA, "TensorrtExecutionProvider")

_PLUGINS = {WEBGPU: "onnxruntime_ep_webgpu"}
"""Providers that a Python package brings as a plugin, and the package."""

_PLUGIN_NAME = "ortops_{}"
"""The name under which a plugin is registered with onnxruntime."""

_registered: set[str] = set()
"""Providers whose plugins are registered: to do it again fails, and their sessions then crash."""

_REFUSED = {
    "OpenVINO": (
        "its graphs cannot have variables among their inputs, and it computes in lower precision "
        "than float32; train on another provider, or run the step of ortops.export_step on it"
    )
}
"""Providers, by the beginning of their names, that cannot run steps correctly, and why."""

_CAPTURED = (
    "each step binds its batch anew, which a captured graph does not see, and onnxruntime runs a "
    "step more than once before it captures it"
)

_REFUSED_OPTIONS = {
    "enableInt64": "it computes int64 in 32 bits, so that seeds and sums could be wrong",
    "enableGraphCapture": _CAPTURED,
    "enable_cuda_graph": _CAPTURED,
    "trt_cuda_graph_enable": _CAPTURED,
}
"""Options of providers with which steps could be wrong, and why."""

_DEFAULTS = {CUDA: {"use_tf32": "0"}}
"""Options of providers that are set unless the user gives them."""

logger = logging.getLogger("ortops")


def choose_providers(
    providers: Sequence[Any] | None, options: onnxruntime.SessionOptions | None = None
) -> list[Provider]:
    """Returns the providers that sessions use, all of which work on this machine.

    onnxruntime itself would replace a provider that is missing by the CPU.

    Args:
        providers: Names, pairs of a name and options, or devices of `onnxruntime.get_ep_devices`;
            by default, the CPU. ``"webgpu"`` and ``"cuda"`` stand for onnxruntime's
            names of these providers.
        options: The user's options for sessions.

    Raises:
        ArgumentError: If a provider is unknown, or it is missing and CPUExecutionProvider is not
            listed behind it; or if the options have providers of their own.
        UnsupportedError: If a provider cannot run training steps correctly, or not with an option.

    Example:
        >>> choose_providers(None)
        [('CPUExecutionProvider', {})]
    """
    if options is not None and getattr(options, "has_providers", bool)():
        raise ArgumentError(
            "sess_options has providers of its own (add_provider_for_devices), which cannot be "
            "read from it; give the devices as providers=[…] instead"
        )
    if providers is None:
        return [(CPU, {})]
    if isinstance(providers, str | bytes) or not isinstance(providers, Sequence):
        raise ArgumentError(
            f"providers must be a list of names, got {providers!r}; for example providers=['{CPU}']"
        )
    asked = [_normalized(each) for each in providers] or [(CPU, {})]
    names = [name for name, _ in asked]
    usable: list[Provider] = []
    for number, (name, settings) in enumerate(asked):
        if name in names[:number]:
            raise ArgumentError(f"providers must be different from each other, got '{name}' twice")
        why = _why_unusable(name, settings)
        if not why:
            usable.append((name, settings))
        elif CPU in names[number + 1 :]:
            logger.warning("providers: %s; it is left out", why)
        else:
            raise ArgumentError(
                f"providers: {why}. {_available()}; to use the CPU if it is missing, list '{CPU}' "
                "behind it"
            )
    return usable


def why_unusable(provider: Any) -> str:
    """Returns why a provider cannot be used on this machine; "" if it can.

    A provider can be used if a session that is made with it lists it first.

    Args:
        provider: See `choose_providers`.

    Example:
        >>> why_unusable("CPUExecutionProvider")
        ''
    """
    try:
        return _why_unusable(*_normalized(provider))
    except OrtopsError as error:
        return str(error)


def _normalized(provider: Any) -> Provider:
    """Returns the full name of a known provider, and its options.

    Raises:
        ArgumentError: If it is not a provider.
        UnsupportedError: If it cannot run training steps correctly, or not with an option.
    """
    settings: Any = {}
    name = provider
    if isinstance(provider, tuple) and len(provider) == 2:
        name, settings = provider
    elif hasattr(provider, "ep_name"):  # a device
        name = provider.ep_name
        alike = [each for each in onnxruntime.get_ep_devices() if each.ep_name == name]
        if len(alike) > 1:
            raise UnsupportedError(
                f"providers: '{name}' has {len(alike)} devices, and a session cannot be given one "
                f"of them; give its name, which uses the one that the provider prefers"
            )
    if not isinstance(name, str) or not isinstance(settings, Mapping):
        raise ArgumentError(
            "providers must be names, pairs of a name and a dict of options, or devices of "
            f"onnxruntime.get_ep_devices(), got {provider!r:.80}"
        )
    name = _ALIASES.get(name.lower(), name)
    for prefix, why in _REFUSED.items():
        if name.lower().startswith(prefix.lower()):
            raise UnsupportedError(f"providers: '{name}' is not supported: {why}")
    known = {*_known(), *_ALIASES}
    if name not in known:
        raise ArgumentError(
            f"providers: there is no provider '{name}'. {_hint(name, known)}{_available()}"
        )
    given = {str(key): str(value) for key, value in settings.items()}
    for option, value in _DEFAULTS.get(name, {}).items():
        if given.setdefault(option, value) is value:
            logger.info(
                "providers: %s with %s=%s; pass it as an option to change it", name, option, value
            )
    for option, why in _REFUSED_OPTIONS.items():
        if given.get(option, "0").lower() not in ("0", "false"):
            raise UnsupportedError(
                f"providers: the option '{option}' is not supported: {why}; leave it out"
            )
    return name, given


def _hint(name: str, known: Iterable[str]) -> str:
    """Returns a hint if a name resembles a known one."""
    hint = did_you_mean(name, known)
    return f"Did{hint.removeprefix('did')} " if hint.startswith("did") else ""


def _available() -> str:
    return "Available are " + ", ".join(map(repr, onnxruntime.get_available_providers()))


def _known() -> set[str]:
    """Returns the providers that onnxruntime knows, available or not."""
    return {
        *onnxruntime.get_all_providers(),
        *onnxruntime.get_available_providers(),
        *_PLUGINS,
    }


def _why_unusable(name: str, settings: dict[str, str]) -> str:
    """Returns why a provider cannot be used on this machine; "" if it can."""
    if name == CPU:
        return ""
    if name in _NEED_CUDA:
        _load_cuda()
    if name not in onnxruntime.get_available_providers() and (why := _register(name)):
        return why
    return _why_it_fails(name, settings)


@functools.cache
def _load_cuda() -> None:
    """Loads CUDA and cuDNN from NVIDIA's packages, where the linker does not look."""
    if hasattr(onnxruntime, "preload_dlls"):
        # It prints what it does not find; the session that is tried next says what is missing.
        with contextlib.redirect_stdout(io.StringIO()):
            onnxruntime.preload_dlls()


def _register(name: str) -> str:
    """Registers a provider that is a plugin; returns why it cannot be used."""
    missing = f"'{name}' is not available in this installation of onnxruntime"
    if name not in _PLUGINS:
        return missing
    distribution = _PLUGINS[name].replace("_", "-")
    try:
        plugin = optional_module(f"{missing}: it", _PLUGINS[name], "webgpu", distribution)
    except OrtopsError as error:
        return str(error)
    if not hasattr(onnxruntime, "register_execution_provider_library"):
        return f"{missing}: {distribution} needs a newer onnxruntime than {onnxruntime.__version__}"
    if name not in _registered:
        try:
            onnxruntime.register_execution_provider_library(
                _PLUGIN_NAME.format(_PLUGINS[name]), plugin.get_library_path()
            )
        except Exception as error:  # onnxruntime's classes have no common base class
            return f"{missing}: {distribution} cannot be registered ({_first_line(error)})"
        _registered.add(name)
    if name not in onnxruntime.get_available_providers():
        return f"'{name}' has found no device on this machine"
    return ""


def _why_it_fails(name: str, settings: dict[str, str]) -> str:
    """Tries a provider in a session; returns why it cannot be used."""
    try:
        session = _probe("y = Identity (x)", name, settings)
    except Exception as error:  # as above
        return f"'{name}' does not work on this machine ({_first_line(error)})"
    if session.get_providers()[0] != name:
        return f"'{name}' does not work on this machine; onnxruntime has replaced it"
    return ""


def _probe(node: str, name: str, settings: dict[str, str]) -> onnxruntime.InferenceSession:
    """Opens a session that computes y from x in one node."""
    graph = onnx.parser.parse_graph(f"probe (float[1] x) => (y) {{ {node} }}")
    model = onnx.helper.make_model(
        graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)]
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # With its own fallback, onnxruntime would print the error and use the CPU.
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=[(name, settings)], enable_fallback=0
    )


def check_float16() -> None:
    """Checks that the WebGPU device computes in float16, an optional feature of WebGPU.

    Raises:
        UnsupportedError: If it does not.
    """
    if not _computes_in_float16():
        raise UnsupportedError(
            "providers: the WebGPU device of this machine has no float16 (the feature "
            "'shader-f16'), but the model has float16 tensors; use a float32 model, or "
            f"providers=['{CPU}']"
        )


@functools.cache
def _computes_in_float16() -> bool:
    session = _probe("y = Cast <to = 10> (x)", WEBGPU, {})
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    try:
        session.run(None, {"x": np.ones(1, np.float32)}, options)
    except Exception:  # as above
        return False
    return True


def _first_line(error: Exception) -> str:
    with contextlib.suppress(IndexError):
        return str(error).strip().splitlines()[0].rstrip(".")
    return type(error).__name__
