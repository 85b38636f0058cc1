"""A CUDA device that computes nothing, for onnxruntime's CUDA provider on a machine without a GPU.

The provider's library decides by itself which kernels it has, and needs CUDA's libraries to be
loaded. `build` writes libraries of these names, whose functions return 0 or, where the provider
reads a result, what ``cuda_double.c`` says. With them, sessions can be made and say where each node
is placed; what they compute means nothing. ``scripts/cuda_environment`` installs the provider's
package, and `environment` are the variables under which Python finds both.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ENVIRONMENT", "build", "environment", "is_there"]

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".cuda"
"""Where ``scripts/cuda_environment`` installs onnxruntime-gpu and what `build` writes."""

_SOURCE = Path(__file__).with_suffix(".c")
_PROVIDER = Path("packages", "onnxruntime", "capi", "libonnxruntime_providers_cuda.so")
_LOADED = {"cudnn": "libcudnn.so", "cufft": "libcufft.so"}
"""Libraries that the provider opens itself when a kernel needs them, by the prefix of functions."""


def is_there() -> bool:
    """Returns whether the provider and the libraries are installed."""
    return (ENVIRONMENT / "lib" / "libcudart.so.13").exists()


def environment() -> dict[str, str]:
    """Returns the environment variables of a process that uses the double."""
    packages, libraries = ENVIRONMENT / "packages", ENVIRONMENT / "lib"
    return {"LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": f"{packages}:{ROOT}"}


def functions_of(provider: Path) -> Mapping[str, set[str]]:
    """Returns the functions that the provider's library takes from each library of CUDA."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(provider)], capture_output=True, text=True, check=True
    )
    dynamic = subprocess.run(
        ["readelf", "-d", str(provider)], capture_output=True, text=True, check=True
    )
    needed = re.findall(r"\[(libcu\w+\.so\.\d+)\]", dynamic.stdout)
    found: dict[str, set[str]] = {library: set() for library in needed}
    for name, library in re.findall(r" U (\w+)(?:@(\S+))?", listed.stdout):
        if library in found:
            found[library].add(name)
        elif re.match(r"cu[A-Z]", name):
            found["libcuda.so.1"].add(name)
    content = provider.read_bytes()
    for prefix, library in _LOADED.items():
        names = re.findall(rb"\x00" + prefix.encode() + rb"([A-Z]\w+)(?=\x00)", content)
        found[library] = {prefix + name.decode() for name in names}
    return found


def build(folder: Path) -> None:
    """Writes the libraries that the provider in a folder needs to its folder ``lib``.

    Args:
        folder: What `ENVIRONMENT` is by default: onnxruntime-gpu is in its folder ``packages``.
    """
    source = _SOURCE.read_text(encoding="utf-8")
    own = set(re.findall(r"\b(\w+)\([^;{]*\) \{", source))
    libraries = folder / "lib"
    libraries.mkdir(exist_ok=True)
    for library, names in functions_of(folder / _PROVIDER).items():
        stem = library.partition(".")[0]
        makers = {name for name in names - own if re.match(r"cudnnCreate", name)}
        rest = [
            f"error {name}(void **handle) {{ return make(handle); }}" for name in sorted(makers)
        ]
        rest += [f"long {name}(void) {{ return 0; }}" for name in sorted(names - own - makers)]
        generated = libraries / f"{stem}.c"
        generated.write_text("\n".join([f"#define {stem.upper()}", source, *rest, ""]))
        versions = libraries / f"{stem}.map"
        versions.write_text(f"{library} {{ global: *; }};\n" if library[-1].isdigit() else "")
        options = [f"-Wl,-soname,{library}"]
        if stem in ("libcudart", "libcublas", "libcublasLt"):
            options.append(f"-Wl,--version-script={versions}")
        command = ["cc", "-shared", "-fPIC", "-w", "-o", str(libraries / library), *options]
        subprocess.run([*command, str(generated)], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if sys.argv[1:] else ENVIRONMENT)
