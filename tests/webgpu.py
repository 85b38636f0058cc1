"""The WebGPU device of tests: any that the machine has, or one in software.

`scripts/webgpu_environment` installs the one in software, the Vulkan driver of Debian's Chromium.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ROOTS = (Path("/"), REPOSITORY / ".webgpu")
DRIVER = "usr/lib/chromium/vk_swiftshader_icd.json"
LOADERS = "usr/lib/*/libvulkan.so.1"


@functools.cache  # every test asks, and looking for the library starts processes
def prepare() -> str:
    """Sets what the provider reads when it is registered; returns why there is no device, or "".

    With ``VK_ICD_FILENAMES`` in the environment, that driver is used instead.
    """
    if importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        return "training on WebGPU left out: not installed (pip install ortops[webgpu])"
    found = [root / DRIVER for root in ROOTS if (root / DRIVER).exists()]
    if not found and "VK_ICD_FILENAMES" not in os.environ:
        return "training on WebGPU left out: no device (./scripts/webgpu_environment)"
    if ctypes.util.find_library("vulkan") is None:
        loaders = sorted(ROOTS[1].glob(LOADERS))
        if not loaders:
            return "training on WebGPU left out: no libvulkan.so.1 (./scripts/webgpu_environment)"
        ctypes.CDLL(str(loaders[0]), ctypes.RTLD_GLOBAL)  # the provider finds it by its name
    if found:
        os.environ.setdefault("VK_ICD_FILENAMES", str(found[0]))
    os.environ.setdefault("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return ""
