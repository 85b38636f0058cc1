"""Nothing that ortops reads is executed: what the source may not call, with the exceptions.

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
    ("functions/pytensor_op.py", "import pickle"): "the class of an error that is raised",
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
