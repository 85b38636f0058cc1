"""Nothing that ortops reads is executed, and files are opened in one place: what the source calls.

ortops/docs/guarantees.md and .github/SECURITY.md promise it. tests/reliability/test_hostile.py and
test_fuzz.py try files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ortops"

# Modules that execute or unpickle what they read.
MODULES = {
    *("cloudpickle", "code", "codeop", "dill", "imp", "joblib", "marshal", "pickle"),
    *("runpy", "shelve", "xml", "yaml"),
}
# Functions of Python that execute text.
BUILTINS = {"__import__", "compile", "eval", "exec"}
# Calls that are safe with a value of an argument only, by their last name.
NEEDED = {
    "load": {"allow_pickle": False, "weights_only": True},
    "read_array": {"allow_pickle": False},
}
# What the package uses all the same, and why that executes nothing that was read.
EXCEPTIONS = {
    ("conformance/report.py", "import xml.etree"): "writes a report of JUnit, and reads no XML",
    ("derivatives/bridges/pytensor.py", "import pickle"): "the class of an error that is raised",
}


def found_in(source: str) -> Iterator[str]:
    """Yields what a source does that could execute what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else []
        else:
            names = []
        yield from (f"import {name}" for name in names if name.split(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in BUILTINS:
            yield called.id
        given = {
            each.arg: each.value.value
            for each in node.keywords
            if isinstance(each.value, ast.Constant)
        }
        if given.get("shell") or given.get("trust_remote_code") or given.get("allow_pickle"):
            yield ast.unparse(called) + " with an argument that executes"
        if isinstance(called, ast.Attribute):
            where, name = ast.unparse(called.value), called.attr
            if where in ("np", "numpy", "torch", "np.lib.format") and name in NEEDED:
                wanted = NEEDED[name]
                if not any(given.get(key) is value for key, value in wanted.items()):
                    yield f"{where}.{name} without {wanted}"
            if name in ("extractall", "Environment") or (where, name) == ("os", "system"):
                yield f"{where}.{name}"


# Calls that open a file for reading, by their last name, and by their owners where others have
# the name, too. `ortops.graph.files.opening` is where files are opened.
READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("open", "read_bytes", "read_text", "from_file", "fromfile", "memmap"), ()),
    **dict.fromkeys(("loadtxt", "genfromtxt", "safe_open", "load_file", "read_adapter"), ()),
    **dict.fromkeys(("Load", "load_model", "memory_map", "dataset", "read_table", "ZipFile"), ()),
    "read_schema": (),
    "load": ("np", "numpy", "torch", "onnx", "json", "pickle", "ir", "toml", "tomllib"),
    "mmap": ("mmap",),
    "ParquetFile": ("parquet",),
    "InferenceSession": ("onnxruntime",),
    **dict.fromkeys(("copy", "copy2", "copyfile", "copytree"), ("shutil",)),
}
# Functions of these names that open no file: an archive, a data set or sessions, by their owner.
NO_FILE = ("archive", "data", "plain", "self._sessions", "self.template.sessions", "sessions")
NO_FILE += ("weighed",)
# Arguments that are no path: what is opened already, or bytes.
NO_PATH = ("stream", "content", "serialize(message)", "tape.model().SerializeToString()")
# What the package opens in other ways, and why.
OPENED_ELSEWHERE = {
    ("cli/standard_streams.py", "os.open"): "the device that has no content",
    ("_common/cores.py", "file.read_text"): "of the system",
    ("conformance/files.py", "file.read_bytes"): "imports nothing else, and checks it itself",
    ("graph/files/atomic.py", "file.open"): "a temporary file of its own, to lock it",
    ("graph/files/atomic.py", "os.open"): "folders, and what it creates",
    (
        "graph/files/held_file.py",
        "os.open",
    ): "checks it itself, for `pread`; tests/test_held_file.py",
    ("graph/files/loading.py", "open"): "a pipe with a model, up to 2 GB",
    ("graph/files/loading.py", "os.open"): "the same",
    ("graph/files/opening.py", "os.open"): "the place itself",
    ("graph/safetensors.py", "mmap.mmap"): "of what open_regular opened",
    ("llm/rendering.py", "package.Tokenizer.from_file"): "what its caller has checked",
    ("engine/execution/compilation.py", "mmap.mmap"): "memory without a file",
    ("graph/files/atomic.py", "Path(source).open"): "what its caller chose",
    (
        "graph/passes/blocked/kernels.py",
        "onnx.load",
    ): "what onnxruntime wrote into a temporary folder",
    ("reference/training.py", "onnx.load"): "imports nothing else, and checks it itself",
    ("engine/training/arrow.py", "arrow.memory_map"): "after `_refuse_endless`",
    ("engine/training/arrow.py", "datasets.dataset"): "after `_refuse_endless`",
    ("engine/training/arrow.py", "parquet.read_schema"): "after `_refuse_endless`",
    ("engine/training/batch_size.py", "Path('/proc/self/statm').read_text"): "of the system",
    ("engine/training/export.py", "(source / name).read_bytes"): "a file of the package",
    ("engine/trainable/limited.py", "Path('/proc/self/statm').read_text"): "of the system",
    ("engine/trainable/model_run.py", "onnxruntime.InferenceSession"): "bytes",
}


def opened_in(source: str) -> Iterator[str]:
    """Yields the functions with which a source opens files for reading."""
    for node in (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call)):
        function = ast.unparse(node.func)
        owner, _, name = function.rpartition(".")
        first = ast.unparse(node.args[0]) if node.args else ""
        writes = any(isinstance(a, ast.Constant) and str(a.value)[:1] in "awx" for a in node.args)
        if name not in READS or (name == "open" and (writes or owner in NO_FILE)):
            continue
        is_path = first not in NO_PATH and not first.endswith("SerializeToString()")
        if is_path and owner in (READS[name] or (owner,)):
            yield function


@pytest.mark.slow
def test_files_are_opened_in_one_place() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), what)
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in opened_in(path.read_text(encoding="utf-8"))
    }
    assert sorted(found - set(OPENED_ELSEWHERE)) == []
    assert sorted(set(OPENED_ELSEWHERE) - found) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("open(path)", ["open"]),
        ("Path(a).open('rb')", ["Path(a).open"]),
        ("Path(a).open('wb')", []),
        ("path.open('ab')", []),
        ("archive.open(member)", []),
        ("json.load(x)", ["json.load"]),
        ("convert.load(x)", []),
        ("Tokenizer.from_file(x)", ["Tokenizer.from_file"]),
        ("onnxruntime.InferenceSession(path)", ["onnxruntime.InferenceSession"]),
        ("onnxruntime.InferenceSession(model.SerializeToString())", []),
    ],
)
def test_what_opens_files(source: str, expected: list[str]) -> None:
    assert list(opened_in(source)) == expected


@pytest.mark.slow
def test_nothing_that_is_read_is_executed() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), what)
        for path in sorted(PACKAGE.rglob("*.py"))
        for what in found_in(path.read_text(encoding="utf-8"))
    }
    assert found == set(EXCEPTIONS)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", "import pickle"),
        ("from yaml import load", "import yaml"),
        ("import xml.etree.ElementTree", "import xml.etree.ElementTree"),
        ("eval('1')", "eval"),
        ("np.load(path)", "np.load without {'allow_pickle': False, 'weights_only': True}"),
        ("np.load(path, allow_pickle=True)", "np.load with an argument that executes"),
        ("torch.load(path)", "torch.load without {'allow_pickle': False, 'weights_only': True}"),
        ("subprocess.run(text, shell=True)", "subprocess.run with an argument that executes"),
        ("archive.extractall()", "archive.extractall"),
        ("jinja2.Environment()", "jinja2.Environment"),
    ],
)
def test_each_is_found(source: str, expected: str) -> None:
    assert expected in list(found_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "re.compile('a')",
        "np.load(path, allow_pickle=False)",
        "torch.load(path, weights_only=True)",
        "json.load(stream)",
        "jinja2.sandbox.ImmutableSandboxedEnvironment()",
    ],
)
def test_what_is_safe_is_not_found(source: str) -> None:
    assert not list(found_in(source))
