"""Imports point one way: from the command line down to the graph, and never in a circle."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ortops"
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

LAYERS = {
    "": (
        *("errors", "_common", "conformance", "reference", "schedules"),
        "graph",
        *("losses", "metrics", "optimizers", "surgery"),
        "engine",
        *("derivatives", "attribution", "backend", "callbacks", "distributed", "lora", "sklearn"),
        *("weights", "data", "llm", "__init__", "docs", "cli", "__main__"),
    ),
    "graph": (
        *("constants", "names", "operators", "inference", "tape", "arithmetic", "tensor"),
        *("shapes", "convert", "autodiff", "passes"),
    ),
    "engine": ("lowering", "execution", "trainable", "building", "training"),
}
"""The order of a package's members: each imports only from those before it.

At the top, all are named, and no other entry is. In other packages, the members that are not named
may import and be imported as long as there is no circle.
"""

ALONE = ("conformance", "reference")
"""Packages that import nothing of the others: what they judge must not be what they judge by."""


IMPORT = re.compile(
    r"^[ \t]*(from[ \t]+ortops\b[\w.]*[ \t]+import[ \t]+(?:\([^)]*\)|[^#\n]*)"
    r"|import[ \t]+ortops\b[^#\n]*)",
    re.MULTILINE,
)
"""An import of the package's modules: to parse these alone is forty times faster."""


def imports(path: Path) -> set[str]:
    """Returns the modules of the package that a file imports, wherever it does so."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^[ \t]*from[ \t]+\.", text, re.MULTILINE), f"{path} imports by dots"
    for statement in IMPORT.findall(text):
        (node,) = ast.parse(statement).body
        if isinstance(node, ast.ImportFrom):
            base = (node.module or "").removeprefix("ortops").lstrip(".")
            found.update(f"{base}.{alias.name}".lstrip(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name.removeprefix("ortops").lstrip(".") for alias in node.names)
    return {module_of(name) for name in found}


def module_of(name: str) -> str:
    """Returns the module that a dotted name is, or belongs to."""
    while name:
        for module in (name, f"{name}.__init__"):
            if module in MODULES:
                return module
        name = name.rpartition(".")[0]
    return "__init__"


@functools.cache
def imported() -> dict[str, set[str]]:
    """Returns what each module imports, without itself."""
    return {module: imports(path) - {module} for module, path in MODULES.items()}


def members(package: str, edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Returns what each member of a package, a module or a package, imports of the others."""
    prefix = f"{package}." if package else ""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in edges.items():
        if module.startswith(prefix):
            own = module.removeprefix(prefix).split(".")[0]
            inside = (other for other in others if other.startswith(prefix))
            names = {other.removeprefix(prefix).split(".")[0] for other in inside}
            found[own] |= names - {own}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[str]:
    """Returns circles, of modules or of the members of a package."""
    packages = {module.rpartition(".")[0] for module in edges}
    graphs = {"modules": edges, **{f"ortops.{each}": members(each, edges) for each in packages}}
    found = []
    for name, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            found.append(f"{name}: {' -> '.join(reversed(error.args[1]))}")
    return found


def upward(edges: Mapping[str, set[str]]) -> list[str]:
    """Returns the imports of members of a package from those after them."""
    found = []
    for package, order in LAYERS.items():
        for own, others in members(package, edges).items():
            for other in others & set(order) if own in order else ():
                if order.index(other) > order.index(own):
                    prefix = f"ortops.{package}." if package else "ortops."
                    found.append(f"{prefix}{own} imports {prefix}{other}")
    return found


def test_no_modules_and_no_packages_import_each_other() -> None:
    assert not circles(imported())


def test_imports_point_downwards() -> None:
    assert not upward(imported())


def test_every_entry_has_its_layer() -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    entries -= {"__pycache__", "web"}
    assert entries == set(LAYERS[""])
    assert len(entries - {"__init__", "__main__"}) + len(["web"]) <= 24


def test_oracles_import_nothing_that_they_judge() -> None:
    for package in ALONE:
        assert members("", imported())[package] == set(), package


def test_circles_and_directions_are_seen() -> None:
    assert "graph.tensor" in imports(PACKAGE / "losses" / "regression.py")
    assert "graph.convert" in imports(PACKAGE / "engine" / "check.py")
    assert "cli.__init__" in imports(PACKAGE / "__main__.py")
    (line,) = circles({"a.x": {"b.x"}, "b.x": set(), "b.y": {"a.x"}, "errors": set()})
    assert line in ("ortops.: a -> b -> a", "ortops.: b -> a -> b")
    assert circles({"a": {"b"}, "b": {"a"}})[0].startswith("modules: ")
    assert upward({"graph.tensor": {"graph.passes.gelu"}, "losses.loss": {"graph.tensor"}}) == [
        "ortops.graph.tensor imports ortops.graph.passes"
    ]
    assert upward({"graph.edit": {"engine.lowering"}}) == ["ortops.graph imports ortops.engine"]


@pytest.mark.slow
def test_no_import_waits_in_a_function() -> None:
    """But for what the public face imports on demand."""
    found = []
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        indented = re.search(r"^[ \t]+(?:from|import)[ \t]+ortops\b", text, re.MULTILINE)
        if module in ("__init__", "cli.__init__", "engine.inference") or not indented:
            continue
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                kinds = (ast.Import, ast.ImportFrom)
                inner = (node for node in ast.walk(function) if isinstance(node, kinds))
                ours = [n for n in inner if "ortops" in ast.unparse(n)]
                found += [f"{module}: {ast.unparse(each)}" for each in ours]
    assert not found, "\n".join(found)


def test_the_classes_that_run_a_step_are_told_apart() -> None:
    package = "engine.execution"
    told = (
        ast.get_docstring(ast.parse(MODULES[f"{package}.__init__"].read_text(encoding="utf-8")))
        or ""
    )
    classes = {
        node.name
        for name, path in MODULES.items()
        if name.startswith(f"{package}.")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }
    named = {each for each in told.split("`")[1::2] if each[0].isupper()}
    assert named == classes
