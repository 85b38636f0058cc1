"""Shows what the tests detect: plants defects, one at a time, and runs tests on each.

Draws mutants of the modules of `ortops/`: a changed operator, comparison, sign, condition or
number, or a dropped term, as many of each package in `PACKAGES`. Each is written into a copy of the
checkout, and the tests of its package run until one fails, the nearest first: the module's
doctests, files of tests with its name, files that import it. A mutant that survives is
equivalent, or a test is missing.

Usage: python scripts/mutants.py [--seed 1] [--count 40] [--skip 0] [--package NAME] [--suite]
                                  [--jobs 2]
"""

import argparse
import ast
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Package(NamedTuple):
    """A part of the package, and the tests that are to detect defects in it.

    Attributes:
        modules: Folders and modules of `ortops/`, without modules of another package that are named
            more exactly.
        tests: Files in `tests/`, as patterns without `.py`.
    """

    modules: tuple[str, ...]
    tests: tuple[str, ...]


def package(modules: str, tests: str) -> Package:
    """Returns a package, given the names with spaces between them."""
    return Package(tuple(modules.split()), tuple(tests.split()))


PACKAGES = {
    "rules": package(
        "graph/autodiff/rules",
        "test_rules_* test_gradient test_expansion test_onnx_node_cases* test_attention_blocks "
        "test_sliding_cache test_float_types",
    ),
    "autodiff": package(
        "graph/autodiff",
        "test_gradient test_expansion test_official_cases test_lower test_rules_registry "
        "test_rules_control_flow test_rules_sequence test_rules_elementwise test_scale "
        "test_flex_attention test_tensor test_float_types test_onnx_node_cases test_masked_rows "
        "test_passes test_cotangents",
    ),
    "graph": package(
        "graph",
        "test_tensor test_shapes test_edit test_folding test_old_models test_weights "
        "test_predictions test_logits_in_parts test_fix_inputs test_untie "
        "test_weights_names test_lora test_lora_hostile test_pruning test_parameters "
        "test_sklearn_models test_float_types test_targets test_step_graph test_faults "
        "test_deep_graphs test_ranks test_row_axes",
    ),
    "graph/files": package(
        "graph/files",
        "test_external test_held_file test_folders test_building_memory test_training_session "
        "test_export_step test_json_text reliability/test_files reliability/test_hostile",
    ),
    "passes": package(
        "graph/passes",
        "test_passes test_normal_form test_products test_gelu test_rewrite test_rounding "
        "test_max_pool test_cross_entropy test_chunked_logits test_rms_normalization "
        "test_scaled_gradients test_scaled_sums test_transposed test_rectified test_recompute "
        "test_attention_gradients test_training_recurrent test_training_shapes test_targets "
        "test_large_models test_blocked test_ranks reliability/test_groups_of_convolutions",
    ),
    "lowering": package(
        "engine/lowering.py engine/inference.py engine/custom_ops.py backend.py engine/__init__.py",
        "test_lower test_session test_targets test_custom_ops test_official_cases "
        "test_cubic_resize test_external test_held_file test_folders test_conformance "
        "test_warnings test_without_extensions reliability/test_exit reliability/test_threads",
    ),
    "execution": package(
        "engine/execution",
        "test_split test_passes test_training_* test_scaled_sums test_compiled* test_memory "
        "test_optimizer_trajectories test_optimizer_in_backward test_step_graph test_distributed "
        "test_precision test_providers test_strings test_reset_memory reliability/test_features",
    ),
    "trainable": package(
        "engine/trainable",
        "test_step_graph test_precision test_exact_products test_quantization_aware "
        "test_training_session test_with_trainable test_export_step test_other_tools test_weights "
        "test_builder test_surgery reliability/test_hostile",
    ),
    "building": package(
        "engine/building",
        "test_builder test_parameters test_clipping_and_groups test_building_memory test_entries "
        "test_constants test_predictions test_lora test_with_trainable test_quantization_aware",
    ),
    "training": package(
        "engine/training",
        "test_builder test_step_graph test_fit* test_data test_clipping_and_groups "
        "test_training_* test_predictions test_parameters test_precision test_export_step "
        "test_digits test_callbacks test_arrow test_anomalies test_batch_size test_collate "
        "test_gradients test_row_axes test_train_metrics test_validation_split test_entries "
        "test_fast_dev_run test_with_trainable test_constants_of_sessions test_logits_in_parts "
        "reliability/test_feeds reliability/test_resume reliability/test_features "
        "reliability/test_divergence reliability/test_fit_signals",
    ),
    "losses": package(
        "losses",
        "test_losses* test_builder test_sample_weight test_detection test_preference "
        "test_next_token test_ctc_training test_logits_in_parts",
    ),
    "optimizers": package(
        "optimizers",
        "test_optimizer* test_adam8bit* test_prodigy test_schedule_free "
        "test_clipping_and_groups test_training_session",
    ),
    "metrics": package("metrics", "test_metrics* test_train_metrics test_ctc_training test_fit"),
    "callbacks": package(
        "callbacks", "test_callbacks test_plateau test_tracking test_schedules_of_fit test_fit*"
    ),
    "data": package("data", "test_image_folder test_cli_data test_arrow test_collate"),
    "schedules": package(
        "schedules.py", "test_schedules test_schedules_of_fit test_plateau test_export_step"
    ),
    "lora": package("lora", "test_lora* test_compose test_exact_products test_weights_names"),
    "llm": package("llm", "test_llm* test_preference test_next_token test_language_models"),
    "weights": package(
        "weights", "test_weights_names test_weights_torch test_weights* test_lora_peft"
    ),
    "surgery": package(
        "surgery",
        "test_surgery test_postprocessing test_pruning test_untie test_fix_inputs "
        "test_detection_exports reliability/test_branches_of_several_shapes",
    ),
    "composition": package("engine/composition", "test_compose test_losses_teacher"),
    "derivatives": package(
        "derivatives",
        "test_derivatives test_derivatives_others test_per_sample test_vmap test_casadi "
        "test_function* test_cotangents reliability/test_functions",
    ),
    "conformance": package("conformance", "test_conformance test_conformance_peers"),
    "reference": package("reference", "test_reference test_conformance test_flex_attention"),
    "cli": package(
        "cli engine/check.py engine/summary.py __main__.py",
        "test_cli test_check test_summary test_cli_data test_llm test_lora test_export_step "
        "test_weights_names test_surgery",
    ),
    "distributed": package("distributed", "test_distributed* reliability/test_fork"),
    "attribution": package("attribution.py", "test_attribution"),
    "sklearn": package("sklearn.py", "test_sklearn_estimators"),
    "_common": package(
        "_common __init__.py errors.py docs",
        "test_arguments test_numbers test_other_names test_builder test_losses test_optimizers "
        "test_tensor test_fit test_data test_without_extensions test_providers test_untrusted "
        "test_garbage_collection test_delayed_imports reliability/test_signals "
        "reliability/test_fit_signals reliability/test_exit reliability/test_fork",
    ),
}
"""Each module belongs to one package."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
LEVELS = {
    "./scripts/test": "not slow",
    ".ci/run": "slow and not left_to_nightly",
    "./scripts/nightly": "left_to_nightly",
}
"""What runs tests, and their marks; the line of a mutant names the first that kills it."""
CACHE = ".cache"
"""Where tests in a copy of the checkout keep what other runs may use."""
TIMEOUT = 3600
"""Seconds after which tests of a mutant are ended; it counts as killed, which its line says."""


class Mutant(NamedTuple):
    """A defect: what stands in a module, and what it becomes."""

    path: Path
    line: int
    start: int
    end: int
    new: str

    def source(self) -> bytes:
        """The module with the defect."""
        before = (ROOT / self.path).read_bytes()
        return before[: self.start] + self.new.encode() + before[self.end :]

    def __str__(self) -> str:
        source = (ROOT / self.path).read_bytes()
        line = source.splitlines()[self.line - 1].strip().decode()
        old = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line}: {line}\n      {old}  ->  {self.new}"


def changes(node: ast.AST) -> Iterator[ast.expr]:
    """Yields what an expression may become."""
    match node:
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)](), right)  # type: ignore[arg-type]
            if isinstance(operator, ast.Add | ast.Sub | ast.Mult):
                yield left
        case ast.Compare(left, [operator], right):
            yield ast.Compare(left, [OPERATORS[type(operator)]()], right)  # type: ignore[list-item]
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(OPERATORS[type(operator)](), values)  # type: ignore[arg-type]
            yield values[0]
        case ast.UnaryOp(ast.USub() | ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what runs, without annotations, messages of errors, and f-strings."""
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(child, ast.Raise | ast.JoinedStr):
            continue
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST) and not isinstance(each, ast.Raise | ast.JoinedStr):
                yield each
                yield from expressions(each)


def mutants(path: Path) -> list[Mutant]:
    """Returns all mutants of a module.

    Args:
        path: Its path in the checkout.
    """
    source = (ROOT / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return [
        Mutant(
            path,
            node.lineno,
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
            f"({ast.unparse(new)})",
        )
        for node in expressions(ast.parse(source))
        if isinstance(node, ast.expr) and node.end_lineno and node.end_col_offset
        for new in changes(node)
    ]


def package_of(path: Path) -> str:
    """Returns the package whose modules name a module most exactly.

    Args:
        path: Its path in the checkout.
    """
    named = [
        (len(part), name)
        for name, package in PACKAGES.items()
        for part in package.modules
        if path.is_relative_to(Path("ortops", part))
    ]
    if not named:
        raise LookupError(f"{path} is in no package: add it to PACKAGES, with its tests")
    return max(named)[1]


def modules() -> list[Path]:
    """Returns the paths of all modules of the package in the checkout."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / "ortops").rglob("*.py"))


def draw(seed: int, count: int, packages: list[str]) -> list[Mutant]:
    """Draws mutants, the same number of each package.

    Args:
        seed: Determines them.
        count: How many.
        packages: Keys of `PACKAGES`.
    """
    rng = random.Random(seed)
    found = []
    for number, name in enumerate(packages):
        paths = [path for path in modules() if package_of(path) == name]
        every = [mutant for path in paths for mutant in mutants(path)]
        found += rng.sample(every, len(range(number, count, len(packages))))
    return found


def tests_of(path: Path) -> list[str]:
    """Returns a module, for its doctests, and the files with its package's tests, nearest first.

    Args:
        path: Its path in the checkout.
    """
    patterns = PACKAGES[package_of(path)].tests
    files = [file for each in patterns for file in sorted((ROOT / "tests").glob(f"{each}.py"))]
    word, family = (name.strip("_").rstrip("s") for name in (path.stem, path.parent.name))
    dotted = re.escape(".".join(path.with_suffix("").parts))
    package, _, name = dotted.rpartition("\\.")
    imports = re.compile(rf"{dotted}\b|from {package} import .*\b{name}\b")

    def distance(file: Path) -> tuple[bool, ...]:
        text = file.read_text(encoding="utf-8")
        return word not in file.stem, not imports.search(text), family not in file.stem

    ordered = sorted(dict.fromkeys(files), key=distance)
    return [str(path), *(str(file.relative_to(ROOT)) for file in ordered)]


def copy(folder: Path) -> None:
    """Copies the files of the checkout that git knows, and links to what is downloaded."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    shown = subprocess.run(listed, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in filter(None, shown.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for name in (".models", ".web"):
        if (ROOT / name).is_dir() and not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def failure(folder: Path, arguments: list[str]) -> tuple[str, float]:
    """Runs tests in a copy of the checkout.

    Returns:
        The first test that fails, or "", and CPU-seconds.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(folder / CACHE),  # of machine code of updates
    }
    with tempfile.TemporaryFile("w+") as shown:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=shown,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timer = threading.Timer(TIMEOUT, os.killpg, [process.pid, signal.SIGKILL])
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        ended = not timer.is_alive()
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        shown.seek(0)
        lines = [line.rstrip() for line in shown if line.startswith(("FAILED", "ERROR"))]
    seconds = usage.ru_utime + usage.ru_stime
    if ended:
        return f"no end after {TIMEOUT} s", seconds
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return "", seconds
    return lines[0] if lines else f"pytest ended with {process.returncode}", seconds


def main(arguments: list[str] | None = None) -> int:
    """Prints each mutant and whether it was killed; returns 1 if one was not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--skip", type=int, default=0, help="so many of them, judged before")
    parser.add_argument("--package", choices=PACKAGES, action="append", help="only this one")
    parser.add_argument("--suite", action="store_true", help="survivors meet the whole suite")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    given = parser.parse_args(arguments)
    print(f"--seed {given.seed} --count {given.count}", flush=True)
    drawn = draw(given.seed, given.count, given.package or list(PACKAGES))[given.skip :]
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def judge(mutant: Mutant) -> tuple[str, str, float]:
        folder, tests = folders.get(), tests_of(mutant.path)
        stages = [(level, ["-m", marks, *tests]) for level, marks in LEVELS.items()]
        stages += [("the whole suite", [])] * given.suite
        try:
            (folder / mutant.path).write_bytes(mutant.source())
            found, took = "", 0.0
            while stages and not found:
                level, stage = stages.pop(0)
                found, more = failure(folder, stage)
                took += more
            shutil.copy(ROOT / mutant.path, folder / mutant.path)
            shutil.rmtree(folder / CACHE, ignore_errors=True)  # what the mutant made
            again = ["--last-failed", "--last-failed-no-failures=none", *stage]
            wrong = failure(folder, again)[0] if found else ""
            verdict = "UNCLEAR" if wrong else "killed" if found else "SURVIVED"
            why = f"{wrong}, without a mutant" if wrong else f"{level}: {found}" if found else ""
            return verdict, why, took
        finally:
            folders.put(folder)

    verdicts: Counter[str] = Counter()
    whole = 0.0
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as pool:
        for number in range(given.jobs):
            folder = Path(temporary, str(number))
            copy(folder)
            folders.put(folder)
        for mutant, (verdict, why, took) in zip(drawn, pool.map(judge, drawn), strict=True):
            verdicts[verdict] += 1
            whole += took
            print(f"{verdict:8} {mutant}\n      {took:.0f} CPU-seconds; {why}", flush=True)
    counts = ", ".join(
        f"{verdicts[verdict]} {verdict.lower()}" for verdict in ("killed", "SURVIVED", "UNCLEAR")
    )
    print(f"{counts}; {whole:.0f} CPU-seconds")
    return int(verdicts["killed"] < len(drawn))


if __name__ == "__main__":
    sys.exit(main())
