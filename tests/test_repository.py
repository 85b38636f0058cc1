"""What holds for the repository as a whole."""

import functools
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import conftest
import pytest
from packaging.version import Version

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "ortops" / "docs").rglob("*.md"))]

TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "benchmarks",
    "models",
    "ortops",
    "pyproject.toml",
    "scripts",
    "tests",
}
SCRIPTS = (
    *(".ci/run", "scripts/demo", "scripts/distribution", "scripts/test"),
    *("scripts/web_demo", "scripts/web_environment"),
)
# What other code may rely on; README.md describes them.
CONTRACT = {
    "InferenceSession",
    "TrainingSession",
    "build_training_model",
    "lower",
    "register_custom_ops",
    "step_graph",
}
DESCRIPTORS = (classmethod, functools.cached_property, property, staticmethod)
# Patterns that do not match their own spelling here.
MACHINE_SPECIFIC = re.compile(
    r"(?<![\w.])/(?:home|opt|root|tmp|work)/"
    r"|(?:pypi|pythonhosted|npmjs|debian)\.org"
    r"|\b(?:index|find)-(?:url|links)\b"
)


class Block(NamedTuple):
    """A Python example of a Markdown file and the line that its code starts on."""

    line: int
    code: str


def python_blocks(markdown: str) -> list[Block]:
    """Return the ```python blocks, but for those right below ``<!-- not run: reason -->``."""
    blocks = []
    lines = markdown.splitlines()
    start = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            above = lines[number - 1] if number else ""
            is_run = line.strip() == "```python" and not re.match(r"<!-- not run: \w", above)
            start = number + 1
        elif start is not None and line.strip() == "```":
            if is_run:
                blocks.append(Block(start + 1, "\n".join(lines[start:number])))
            start = None
    return blocks


def run_block(block: Block, page: Path = README) -> None:
    """Execute an example; a traceback shows the lines of its page."""
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    exec(code, {"__name__": "__main__"})


@pytest.fixture(scope="module")
def tracked() -> dict[str, str]:
    """Every file of the repository with its mode in git."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "--stage", "-z"], cwd=ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if listing.returncode:
        pytest.skip("not a git repository")
    files = {}
    for entry in listing.stdout.split("\0")[:-1]:
        details, path = entry.split("\t")
        files[path] = details.split()[0]
    return files


def test_top_level_holds_only_what_belongs_there(tracked):
    top_level = {path.split("/")[0] for path in tracked}
    assert {name for name in top_level if not name.startswith(".")} <= TOP_LEVEL


def test_scripts_are_executable(tracked):
    assert {path: tracked.get(path) for path in SCRIPTS} == dict.fromkeys(SCRIPTS, "100755")


def test_lowest_constraints_are_the_lower_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "scripts" / "lowest-constraints.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    bounds = dict(line.split(">=") for line in project["dependencies"])
    assert {name: Version(each) for name, each in lowest.items()} == {
        name: Version(each) for name, each in bounds.items()
    }


@pytest.mark.parametrize(
    ("requirement", "said"),
    [
        ("pytest>=1", ""),
        ("pytest>=1000", f"they need pytest>=1000, and {pytest.__version__} is installed"),
        ("no-such-package>=2", "they need no-such-package>=2 (./scripts/test --compare)"),
    ],
)
def test_what_a_test_needs_is_said(requirement: str, said: str):
    assert conftest.unmet(requirement) == (said and f"tests left out: {said}")


def test_no_file_depends_on_one_machine(tracked):
    found = []
    for path in tracked:
        file = ROOT / path
        if file.suffix in {".gz", ".npz", ".onnx", ".png"} or not file.exists():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_SPECIFIC.search(line):
                found.append(f"{path}:{number}: {line}")
    assert not found


@pytest.mark.parametrize("text", ["open('/" + "home/x')", "https://" + "pypi" + ".org/simple"])
def test_machine_specific_text_is_recognized(text):
    assert MACHINE_SPECIFIC.search(text)


def test_public_names_hold_the_contract():
    assert set(importlib.import_module("ortops").__all__) >= CONTRACT


def test_public_names_have_docstrings():
    ortops = importlib.import_module("ortops")
    undocumented = []
    for name in ortops.__all__:
        value = getattr(ortops, name)
        # Looked up on the object itself: an inherited docstring describes something else.
        documented = {name: value.__doc__}
        if inspect.isclass(value):
            documented |= {
                f"{name}.{member}": getattr(value, member).__doc__
                for member, kind in vars(value).items()
                # Plain attributes have no docstring; the class describes them.
                if not member.startswith("_") and (callable(kind) or isinstance(kind, DESCRIPTORS))
            }
        elif not (inspect.ismodule(value) or callable(value)):
            continue
        undocumented += [name for name, text in documented.items() if not (text or "").strip()]
    assert not undocumented


def test_import_is_light():
    heavy = "{'matplotlib', 'onnxruntime_extensions', 'onnxscript', 'torch'}"
    script = f"import sys, ortops; print(*sorted({heavy} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == []


MARKDOWN = """\
Text.

```python
first = 1
```

<!-- not run: needs a file -->
```python
second = missing
```

```sh
third
```

<!-- not run: -->
```python
fourth = 4

assert False
```
"""


def test_python_blocks_of_markdown():
    assert python_blocks(MARKDOWN) == [
        Block(4, "first = 1"),
        Block(18, "fourth = 4\n\nassert False"),
    ]


def test_failing_block_names_its_line():
    with pytest.raises(AssertionError) as failure:
        run_block(python_blocks(MARKDOWN)[1])
    assert failure.traceback[-1].lineno + 1 == 20


PAGES_WITH_BLOCKS = [page for page in PAGES if python_blocks(page.read_text(encoding="utf-8"))]


def test_the_readme_and_pages_have_examples():
    assert README in PAGES_WITH_BLOCKS
    assert len(PAGES_WITH_BLOCKS) > 4


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in python_blocks(page.read_text(encoding="utf-8")):
        run_block(block, page)


@pytest.mark.parametrize("script", ["operator_table.py", "reference.py"])
def test_generated_pages_are_up_to_date(script):
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    assert subprocess.run(command).returncode == 0, f"run scripts/{script}"
