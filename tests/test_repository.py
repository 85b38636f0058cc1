"""What holds for the repository as a whole."""

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import conftest
import onnx
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import ortops
from models import mlp
from ortops.cli import main
from ortops.graph.passes import PASSES, Pass

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
    *(".ci/run", "scripts/demo", "scripts/distribution", "scripts/docs", "scripts/nightly"),
    *(
        "scripts/measure_machine",
        "scripts/release",
        "scripts/test",
        "scripts/web_demo",
        "scripts/web_environment",
        "scripts/webgpu_environment",
    ),
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
    """An example of a Markdown file and the line that its code starts on."""

    line: int
    code: str
    language: str = "python"


LANGUAGES = ("python", "console")


def examples(markdown: str) -> list[Block]:
    """Return the Python and console blocks that can run.

    Those below ``<!-- not run: reason -->`` cannot, and those below ``<!-- needs: package -->``
    only where the package is installed.
    """
    blocks = []
    lines = markdown.splitlines()
    start = None
    for number, line in enumerate(lines):
        if start is None and line.startswith("```"):
            above = lines[number - 1] if number else ""
            language = line.strip().removeprefix("```")
            needed = re.match(r"<!-- needs: (\w+) -->", above)
            is_run = language in LANGUAGES and not re.match(r"<!-- not run: \w", above)
            is_run = is_run and not (needed and conftest.is_missing(needed[1]))
            start = number + 1
        elif start is not None and line.strip() == "```":
            if is_run:
                blocks.append(Block(start + 1, "\n".join(lines[start:number]), language))
            start = None
    return blocks


def run_block(block: Block, page: Path = README) -> None:
    """Execute an example; a traceback shows the lines of its page."""
    if block.language == "console":
        for call, shown in commands(block.code):
            run_command(call, shown)
        return
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    exec(code, {"__name__": "__main__"})


def commands(console: str) -> list[tuple[str, str]]:
    """Return the calls of ortops in a console block, and what the page says that they print."""
    found = []
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        call, shown = re.fullmatch(r"((?:.*\\\n)*.*)\n?([\s\S]*)", part).groups()
        if call.startswith("ortops "):
            found.append((call.replace("\\\n", " "), shown.strip()))
    return found


def run_command(call: str, shown: str) -> None:
    """Call ortops; where a page shows what it prints, that is what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = main(shlex.split(call, comments=True)[1:])
    assert status == 0, call
    assert not shown or printed.getvalue().strip() == shown


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
    bounds = {
        (each.name, Version(specifier.version))
        for each in map(Requirement, project["dependencies"])
        for specifier in each.specifier
        if specifier.operator == ">="
    }
    assert {(name, Version(each)) for name, each in lowest.items()} == bounds


@pytest.mark.parametrize(
    ("system", "machine", "python", "expected"),
    [
        ("linux", "x86_64", "3.11", ">=0.15"),
        ("linux", "x86_64", "3.13", ">=0.15"),
        ("linux", "x86_64", "3.14", None),
        ("linux", "aarch64", "3.12", ">=0.15"),
        ("linux", "aarch64", "3.14", None),
        ("linux", "ppc64le", "3.11", None),
        ("darwin", "arm64", "3.13", ">=0.15"),
        ("darwin", "x86_64", "3.11", ">=0.15"),
        ("darwin", "arm64", "3.14", None),
        ("win32", "AMD64", "3.11", "!=0.15.2,>=0.15"),
        ("win32", "AMD64", "3.13", "!=0.15.2,>=0.15"),
        ("win32", "AMD64", "3.14", None),
        ("win32", "ARM64", "3.12", None),
    ],
)
def test_the_extension_is_required_where_it_has_wheels(system, machine, python, expected):
    """0.15.0 has wheels for Windows x64, 0.15.2 has not; neither has any for Python 3.14."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = {"sys_platform": system, "platform_machine": machine, "python_version": python}
    found = [
        str(each.specifier)
        for each in map(Requirement, project["dependencies"])
        if each.name == "onnxruntime-extensions" and each.marker.evaluate(there)
    ]
    assert found == ([] if expected is None else [expected])


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


@pytest.mark.slow
def test_no_file_depends_on_one_machine(tracked):
    found = []
    for path in tracked:
        file = ROOT / path
        if file.suffix in {".gz", ".npz", ".onnx", ".png"} or not file.exists():
            continue
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                texts = {f"{path}/{name}": archive.read(name).decode("latin-1") for name in names}
        else:
            texts = {path: file.read_text(encoding="utf-8")}
        for name, text in texts.items():
            for number, line in enumerate(text.splitlines(), 1):
                if MACHINE_SPECIFIC.search(line):
                    found.append(f"{name}:{number}: {line}")
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


@pytest.mark.slow
def test_what_is_lowered_runs_without_the_libraries_that_lower(tmp_path):
    """Of onnx-ir and sympy, the import takes longer than that of everything else together."""
    script = """
import sys
import onnx
import ortops

graph = onnx.parser.parse_graph("g (float[2] x) => (float[2] y) { y = Mul (x, x) }")
model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
model.ir_version = 10
onnx.save(model, sys.argv[1])
for source in (sys.argv[1], model.SerializeToString()):
    (y,) = ortops.InferenceSession(source).run(None, {"x": [2.0, 3.0]})
    assert y.tolist() == [4.0, 9.0]
print(*sorted({"onnx_ir", "sympy", "onnxruntime_extensions"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model.onnx")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


@pytest.mark.slow
def test_no_module_stands_in_for_another_while_ortops_is_imported():
    """What another thread imports meanwhile is the module itself, and stays so."""
    script = """
import importlib.machinery, sys

class Watch:
    seen = {}

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.seen.update(sys.modules)

sys.meta_path.insert(0, Watch)
import ortops
for name in ortops.__all__:
    getattr(ortops, name)
found = importlib.machinery.PathFinder.find_spec
unlike = {name for name, each in Watch.seen.items() if sys.modules.get(name) is not each}
bare = {name for name, each in Watch.seen.items() if getattr(each, "__spec__", None) is None}
print(*sorted(unlike | {name for name in bare if "." not in name and found(name)}))
"""
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

<!-- needs: no_such_package -->
```python
import no_such_package
```

<!-- needs: numpy -->
```python
import numpy
```

```sh
third
```

<!-- not run: -->
```python
fourth = 4

assert False
```

```console
$ ortops --version
```
"""


def test_examples_of_markdown():
    assert examples(MARKDOWN) == [
        Block(4, "first = 1"),
        Block(19, "import numpy"),
        Block(28, "fourth = 4\n\nassert False"),
        Block(34, "$ ortops --version", "console"),
    ]


def test_failing_block_names_its_line():
    with pytest.raises(AssertionError) as failure:
        run_block(examples(MARKDOWN)[2])
    assert failure.traceback[-1].lineno + 1 == 30


CONSOLE = """\
$ pip install .    # not a call of ortops
$ ortops check a.onnx \\
    --json
[]
done

$ ortops eval a.onnx   # a comment
"""


def test_commands_of_a_console_block():
    assert commands(CONSOLE) == [
        ("ortops check a.onnx      --json", "[]\ndone"),
        ("ortops eval a.onnx   # a comment", ""),
    ]


def test_a_page_that_shows_another_output_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp.mlp((4, 2)), "mlp.onnx")
    run_command("ortops check mlp.onnx", "")
    with pytest.raises(AssertionError):
        run_command("ortops check mlp.onnx", "opset 3")
    with pytest.raises(AssertionError, match="ortops check"):
        run_command("ortops check missing.onnx", "")


PAGES_WITH_EXAMPLES = [page for page in PAGES if examples(page.read_text(encoding="utf-8"))]


def test_the_readme_and_pages_have_examples():
    assert README in PAGES_WITH_EXAMPLES
    assert len(PAGES_WITH_EXAMPLES) > 4


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES, ids=lambda page: page.stem)
def test_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in examples(page.read_text(encoding="utf-8")):
        run_block(block, page)


USER_PAGES = [README, *sorted((ROOT / "ortops" / "docs").glob("*.md"))]


def test_examples_need_nothing_but_the_package():
    """`models` is a folder of a clone, and not installed."""
    found = [
        f"{page.name}: {block.code}"
        for page in USER_PAGES
        for block in examples(page.read_text(encoding="utf-8"))
        if re.search(r"^(from|import) models\b", block.code, re.MULTILINE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_the_table_of_operators_is_up_to_date():
    command = [sys.executable, str(ROOT / "scripts" / "operator_table.py"), "--check"]
    assert subprocess.run(command).returncode == 0, "run scripts/operator_table.py"


def top_imports(path: Path) -> set[str]:
    """Returns the packages that a module imports when it is imported, above all functions."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    try:  # the head alone is read ten times faster
        tree = ast.parse(re.split(r"^(?:@|def |class )", text, maxsplit=1, flags=re.MULTILINE)[0])
    except SyntaxError:  # it ends in a text with code
        tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_what_the_package_imports_is_declared() -> None:
    """What a module imports at its top is a dependency, and each optional group is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    others = {"pillow": "PIL", "scikit-learn": "sklearn", "mlflow-skinny": "mlflow"}
    others |= {"protobuf": "google"}

    def imported(requirements: list[str]) -> set[str]:
        names = {Requirement(each).name for each in requirements} - {"ortops"}
        return {others.get(name, name).replace("-", "_") for name in names}

    modules = sorted((ROOT / "ortops").rglob("*.py"))
    tops = {name for path in modules for name in top_imports(path)} - {"ortops", "__future__"}
    bridges = {"jax", "numba", "pytensor", "sklearn", "torch"}  # of modules for these
    assert tops - sys.stdlib_module_names - imported(project["dependencies"]) <= bridges
    groups = project["optional-dependencies"]
    for group in ("test", "docs", "lint", "compare", "export", "genai"):  # for those who work on it
        groups.pop(group)
    text = "\n".join(path.read_text(encoding="utf-8") for path in modules)
    unused = {
        name
        for name in set().union(*map(imported, groups.values()))
        if not re.search(rf"^\s*(import|from) {name}\b|\"{name}[.\"]", text, re.MULTILINE)
    }
    # SQLite for MLflow, MPI for mpi4py, and pandas, whose frames a user passes
    assert unused <= {"alembic", "mpich", "pandas", "sqlalchemy"}


def test_optional_packages_are_imported_by_one_function() -> None:
    """Only it says what is missing, and the groups that package, pages and tests name exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = set(project["optional-dependencies"])
    wrong, caught = [], []
    pages = [ROOT / "README.md", *(ROOT / "ortops").rglob("*.md")]
    tests = (ROOT / "tests").rglob("test_*.py")
    for path in [*pages, *tests, *(ROOT / "ortops").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"ortops\[([a-z][a-z,\s]*)\]", text)
        found = {each.strip() for names in named for each in names.split(",")}
        found |= set(re.findall(r"mark\.optional\(\"[\w.]+\", \"(\w+)\"\)", text))
        own_words = re.search("optional_module|missing_package|ImportE|ModuleNotF", text)
        if own_words and path.suffix == ".py" and path.is_relative_to(ROOT / "ortops"):
            tree = ast.parse(text)
            calls = (each for each in ast.walk(tree) if isinstance(each, ast.Call))
            names = ("optional_module", "missing_package")
            own = [call for call in calls if getattr(call.func, "id", None) in names]
            third = (call.args[2] for call in own if len(call.args) > 2)
            found |= {each.value for each in third if isinstance(each, ast.Constant)}
            handlers = (each for each in ast.walk(tree) if isinstance(each, ast.ExceptHandler))
            if any(re.search("ImportE|ModuleNotF", ast.unparse(e.type or e)) for e in handlers):
                caught.append(path.relative_to(ROOT / "ortops").as_posix())
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(found - groups)]
    assert not wrong, "\n".join(["groups that pyproject.toml lacks", *wrong])
    assert set(caught) == {
        *("_common/optional.py", "sklearn.py"),  # whose classes are subclasses of scikit-learn's
        *("graph/files/atomic.py", "graph/files/held_file.py", "llm/tuning.py"),  # the system's
        *("engine/trainable/limited.py", "llm/rendering.py"),  # run without the package
        *("engine/custom_ops.py", "conformance/__main__.py"),  # a dependency; what a user names
    }


@pytest.mark.slow
def test_files_that_import_optional_packages_are_listed() -> None:
    """Otherwise, ./scripts/test fails while it collects tests, where a package is missing."""
    optional = {package for packages in conftest.FILES.values() for package in packages}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        missing = (top_imports(path) & optional) - set(conftest.FILES.get(path.name, ()))
        assert not missing, f"list {sorted(missing)} for {path.name} in FILES of tests/conftest.py"


def test_slow_files_are_left_out_only_where_no_slow_test_is_wanted() -> None:
    """`tests/conftest.py` does not import them then."""
    wanted = {
        **dict.fromkeys(["not slow", "torch and not slow", "not slow and not torch"], True),
        **dict.fromkeys(["", "slow", "not slower", "not slow or torch", "not (not slow)"], False),
    }
    assert {text: conftest.wants_no_slow_tests(text) for text in wanted} == wanted
    slow = ["pytestmark = pytest.mark.slow", "pytestmark = [\n    a.b,\n    pytest.mark.slow,\n]"]
    some = [
        "pytestmark = a.b",
        "pytestmark = pytest.mark.slower",
        "@pytest.mark.slow",
    ]
    found = [bool(conftest.ALL_SLOW.search(f"import x\n\n{text}\n")) for text in (*slow, *some)]
    assert found == [True, True, False, False, False]


def test_what_there_is_to_choose_is_declared_where_it_is_defined() -> None:
    """What its file does not list, or is in a file that is not read, could not be used."""
    bases = {"losses": ortops.losses.Loss, "metrics": ortops.metrics.StreamingMetric}
    bases |= {"optimizers": ortops.optimizers.Optimizer}
    helpers = ("losses.loss", "metrics.metric", "metrics.functions", "optimizers.optimizer")
    parts = ("ClassLoss", "MulticlassLoss", "PerClass")  # of which others are made
    missing = []
    for package, base in bases.items():
        for path in sorted((ROOT / "ortops" / package).glob("[!_]*.py")):
            module = importlib.import_module(f"ortops.{package}.{path.stem}")
            defined = ast.parse(path.read_text(encoding="utf-8")).body
            names = [each.name for each in defined if isinstance(each, ast.ClassDef)]
            found = [n for n in names if issubclass(getattr(module, n), base) and n[0] != "_"]
            listed = {*getattr(module, "__all__", ()), *parts}
            if f"{package}.{path.stem}" not in helpers:
                missing += [f"{path.stem}: {name}" for name in found if name not in listed]
            missing += [
                f"ortops.{package}: {name}"
                for name in getattr(module, "__all__", ())
                if name not in importlib.import_module(f"ortops.{package}").__all__
            ]
    for path in sorted((ROOT / "ortops" / "graph" / "passes").rglob("[!_]*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, Pass) and value not in PASSES:
                missing.append(f"{name}: pass '{value.name}'")
    assert not missing, "\n".join(missing)
