"""Settings that hold for every test, and what is left out where something optional is missing."""

import functools
import gc
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
from packaging.requirements import Requirement

from ortops.graph.passes import blocked, scaled_sums
from ortops.graph.passes.blocked import kernels
from tests import gpu, webgpu
from tests.c.trainer import LIBRARY

# No deadline: how long an example takes depends on the machine, not on the code's correctness.
hypothesis.settings.register_profile("default", deadline=None)
# The same examples in every run, so that a red run can be repeated.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

FILES = {
    "conformance_peers.py": ("onnx_ad", "onnxsim"),
    "test_accuracy.py": ("torch", "onnxscript", "transformers"),
    "test_derivatives_others.py": ("onnx_ad",),
    "test_exports_everywhere.py": ("torch", "onnxscript", "transformers"),
    "test_exported_models.py": ("torch", "onnxscript", "transformers"),
    "test_lora_peft.py": ("torch", "onnxscript", "transformers", "peft"),
    "test_lora_language_models.py": ("torch", "transformers", "peft"),
    "test_llm_encoders.py": ("torch", "onnxscript", "transformers", "tokenizers", "peft"),
    "tuning_features.py": ("torch",),
    "test_function_torch.py": ("torch",),
    "test_optimized_exports.py": ("torch", "onnxscript", "transformers"),
    "jax_function.py": ("jax",),
    "pytensor_op.py": ("pytensor",),
    "sklearn.py": ("sklearn",),
    "test_sklearn_estimators.py": ("sklearn",),
    "test_weights_sklearn.py": ("sklearn", "skl2onnx"),
    "test_weights_torch.py": ("torch", "onnxscript", "transformers"),
    "torch_module.py": ("torch",),
    "torch_databases.py": ("torch", "expecttest"),
    "torch_operators.py": ("torch",),
}
"""Files that import optional packages at their top, and these packages."""

ALL_SLOW = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", re.MULTILINE)
"""What says that all tests of a file are slow."""

TORCH = "comparisons with PyTorch left out: torch is not installed (./scripts/test --compare)"
SKLEARN = "models of scikit-learn left out: skl2onnx is not installed (./scripts/test --compare)"
FETCHED = "models of others left out: not there (python scripts/fetch_models.py)"

JAVASCRIPT = "tests of the JavaScript driver left out: not there (./scripts/web_environment)"
BROWSER = "tests of the page left out: Chromium is not there (./scripts/web_environment)"
C = "tests of the trainer in C left out: no cc, or no libonnxruntime.so in onnxruntime's package"
PACKAGES = Path(__file__).parents[1] / ".web" / "node_modules" / "onnxruntime-web"

tests_left_out = pytest.StashKey[Counter[str]]()
generators = pytest.StashKey[dict[ModuleType, list[tuple[np.random.Generator, Any]]]]()
files_left_out = pytest.StashKey[dict[str, list[str]]]()


@functools.cache
def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


@functools.cache
def unmet(requirement: str) -> str:
    """Returns which version of a package tests need that is not installed, in words; else nothing.

    Args:
        requirement: As pip takes it, "onnxruntime>=1.27".
    """
    wanted = Requirement(requirement)
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"tests left out: they need {requirement} (./scripts/test --compare)"
    if wanted.specifier.contains(version, prereleases=True):
        return ""
    return f"tests left out: they need {requirement}, and {version} is installed"


def why_left_out(item: pytest.Item) -> str:
    """Returns what a test needs that is not there, as the summary says it; else nothing."""
    marks: dict[str, list[pytest.Mark]] = {}
    for mark in item.iter_markers():  # once: there are twenty thousand tests
        marks.setdefault(mark.name, []).append(mark)
    if "torch" in marks and is_missing("torch"):
        return TORCH
    if "sklearn" in marks and is_missing("skl2onnx"):
        return SKLEARN
    if "c" in marks and not (LIBRARY and shutil.which("cc")):
        return C
    if "webgpu" in marks and (reason := webgpu.prepare()):
        return reason
    if "gpu" in marks and (reason := gpu.prepare()):
        return reason
    if "browser" in marks or "javascript" in marks:
        if not (PACKAGES.exists() and shutil.which("node")):
            return JAVASCRIPT
        if "browser" in marks and not shutil.which("chromium"):
            return BROWSER
    for mark in marks.get("optional", ()):
        package, group = mark.args
        if is_missing(package):
            return f"tests of {package} left out: not installed (pip install ortops[{group}])"
    for mark in marks.get("needs", ()):
        if reason := unmet(mark.args[0]):
            return reason
    if any(not Path(mark.args[0]).exists() for mark in marks.get("fetched", ())):
        return FETCHED
    return ""


def wants_no_slow_tests(expression: str) -> bool:
    """Returns whether the argument of -m certainly leaves out all slow tests."""
    is_plain = not re.search(r"\bor\b|[()]", expression)
    return is_plain and "not slow" in (part.strip() for part in expression.split(" and "))


def leave_out_blocks(patch: pytest.MonkeyPatch) -> None:
    """Makes this a machine for which onnxruntime has no convolution kernels with blocks."""
    for module in (blocked, kernels, scaled_sums):
        patch.setattr(module, "block_size", lambda: None)


@pytest.fixture
def without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_blocks(monkeypatch)


@pytest.fixture(scope="session", autouse=True)
def signals_arrive() -> Generator[None, None, None]:
    """Signals arrive, also where the shell ignores them, as in ``nohup … &``.

    A process ignores what the one that started it ignores. Only handlers are not handed on: so with
    one that does nothing, tests go on when the terminal is closed, and what they start gets SIGHUP.
    """
    handlers = {
        "SIGINT": signal.default_int_handler,
        "SIGTERM": signal.SIG_DFL,
        "SIGHUP": lambda number, frame: None,
    }
    numbers = {getattr(signal, name, None): handler for name, handler in handlers.items()}
    ignored = [n for n in numbers if n is not None and signal.getsignal(n) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, numbers[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def generators_of(module: ModuleType) -> Iterator[np.random.Generator]:
    """Yields the generators of a module, and of those from which it has functions."""
    names = {id(vars(module)): vars(module)}
    for value in vars(module).values():
        if isinstance(value, FunctionType):
            names[id(value.__globals__)] = value.__globals__
    for each in names.values():
        yield from (value for value in each.values() if isinstance(value, np.random.Generator))


def draw_as_alone(item: pytest.Item) -> None:
    """Lets a test draw from the generators of its module what it draws if it is the only one."""
    for generator, state in item.config.stash[generators].get(getattr(item, "module", None), ()):
        generator.bit_generator.state = state


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    draw_as_alone(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    draw_as_alone(item)  # whichever test it was that made the fixtures of the module


class LeftOut(pytest.File):
    """A file of which nothing is collected; without it, pytest would say that there is no file."""

    def collect(self) -> list[pytest.Item]:
        return []


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("ORTOPS_WITHOUT_BLOCKS"):
        leave_out_blocks(pytest.MonkeyPatch())
    config.stash[tests_left_out] = Counter()
    config.stash[files_left_out] = {}
    config.pluginmanager.register(Importable())
    config.pluginmanager.register(Slowing())
    # Nothing of what is collected is garbage, and each sweep through a million objects takes long.
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    session.config.stash[generators] = {
        module: [(each, each.bit_generator.state) for each in generators_of(module)]
        for module in modules
    }
    gc.freeze()
    # Python's own thresholds sweep, every few tests, through all that tests import later: through
    # half a million objects of PyTorch, JAX and others, in a third of a second.
    gc.set_threshold(3000, 15, 100)
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist hands on what it left out."""
    if hasattr(session.config, "workeroutput"):
        stash = session.config.stash
        session.config.workeroutput["left_out"] = dict(stash[tests_left_out]), stash[files_left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process collects all tests, and so leaves out the same ones."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        stash = node.config.stash
        stash[tests_left_out], stash[files_left_out] = left_out


class Importable:
    """A plugin, as a conftest's own hook is not called for files outside of its folder."""

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(
        self, file_path: Path, parent: pytest.Collector
    ) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
        """Leaves out files that cannot be imported, or that nothing is wanted of."""
        collectors = yield
        if not collectors:
            return collectors
        missing = [package for package in FILES.get(file_path.name, ()) if is_missing(package)]
        if missing:
            if file_path.name.startswith("test_"):
                parent.config.stash[files_left_out][file_path.name] = missing
            return [LeftOut.from_parent(parent, path=file_path)]
        # To import a file, and what it compares with, takes longer than to read it.
        text = file_path.read_text(encoding="utf-8")
        if wants_no_slow_tests(parent.config.option.markexpr) and ALL_SLOW.search(text):
            return [LeftOut.from_parent(parent, path=file_path)]
        if ">>>" not in text:  # leaves out the collector of doctests
            collectors = [collector for collector in collectors if type(collector) is pytest.Module]
        return collectors or [LeftOut.from_parent(parent, path=file_path)]


def spread(count: int, of: int) -> set[int]:
    """Returns so many of the first numbers, from the first to the last, at even distances."""
    return {round(i * (of - 1) / max(count - 1, 1)) for i in range(count)}


def parameters(item: pytest.Item) -> set[tuple[str, Any]]:
    """Returns the parameters of a case, by value where it can be compared, else by identity."""
    found: set[tuple[str, Any]] = set()
    for name, value in item.callspec.params.items():  # type: ignore[attr-defined]
        try:
            hash(value)
        except TypeError:
            found.add((name, id(value)))
        else:
            found.add((name, (type(value), value)))
    return found


def cover(items: list[pytest.Item]) -> set[int]:
    """Returns the numbers of a few cases in which each value of each parameter occurs.

    Of cases that add as many values, the one with the rarest is taken: so values alternate.
    """
    each = [parameters(item) for item in items]
    left = set().union(*each)
    kept: set[int] = set()
    uses: Counter[tuple[str, Any]] = Counter()
    while left:
        ranks = [(-len(values & left), sum(map(uses.__getitem__, values))) for values in each]
        best = ranks.index(min(ranks))
        kept.add(best)
        left -= each[best]
        uses.update(each[best])
    return kept


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks the cases of tests marked ``quick(count)`` slow, but for so many of them.

    The others of tests marked ``nightly(count)`` are marked slow and ``left_to_nightly``; those of
    ``nightly`` without a count are all but a few in which each value of each parameter occurs.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("quick") or item.get_closest_marker("nightly"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        kept: dict[str, set[int]] = {}
        for name in ("quick", "nightly"):
            if mark := each[0].get_closest_marker(name):
                count = min(mark.args[0], len(each)) if mark.args else None
                kept[name] = cover(each) if count is None else spread(count, of=len(each))
        for number, item in enumerate(each):
            if number in kept.get("quick", ()):
                continue
            if "quick" in kept or number not in kept["nightly"]:
                item.add_marker(pytest.mark.slow)
            if "nightly" in kept and number not in kept["nightly"]:
                item.add_marker(pytest.mark.left_to_nightly)


class Slowing:
    """A plugin that marks tests before they are selected by their marks."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_slow(items)


@pytest.hookimpl(trylast=True)  # after -k and -m, so that only what was asked for is counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that cannot run."""
    reasons = {item: why_left_out(item) for item in items}
    config.stash[tests_left_out].update(reason for reason in reasons.values() if reason)
    config.hook.pytest_deselected(items=[item for item in items if reasons[item]])
    items[:] = [item for item in items if not reasons[item]]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Says what was left out: a line for the files, and one for each reason of tests."""
    if files := config.stash[files_left_out]:
        missing = dict.fromkeys(package for packages in files.values() for package in packages)
        terminalreporter.write_line(
            f"{', '.join(files)} left out: not installed: {', '.join(missing)} "
            "(./scripts/test --compare)"
        )
    for reason, count in config.stash[tests_left_out].items():
        terminalreporter.write_line(f"{count} {reason}")
