"""Shows what the tests detect: plants defects, one at a time, and runs tests on each.

Draws mutants of the modules in `ROOMS`: a changed operator, comparison, sign, condition or number,
or a dropped term. Each is written into a copy of the checkout, and the tests of its room run until
one fails, those of its file first. A mutant that survives is equivalent, or a test is missing.

Usage: python scripts/mutants.py [--seed 1] [--count 40] [--room NAME] [--suite] [--jobs 2]
"""

import argparse
import ast
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "autodiff/rules": ("test_rules_*", "test_gradients", "test_expansion", "test_onnx_node_cases"),
    "losses": ("test_losses*", "test_builder"),
    "optimizers": ("test_optimizer*", "test_clipping_and_groups", "test_training_session"),
    "training": (
        *("test_builder", "test_step_graph", "test_fit*", "test_data", "test_clipping_and_groups"),
        *("test_training_*", "test_predictions", "test_parameters", "test_precision"),
        *("test_export_step", "test_digits", "reliability/test_feeds", "reliability/test_resume"),
        *("test_callbacks", "reliability/test_features"),
    ),
    "execution": (
        *("test_split", "test_passes", "test_training_*", "test_scaled_sums", "test_compiled"),
        *("test_optimizer_trajectories", "test_memory", "test_step_graph", "test_distributed"),
        *("test_precision", "reliability/test_features"),
    ),
}
"""Folders of `ortops/` and the tests, in `tests/`, that are to detect defects in them."""

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
TIMEOUT = 1800
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


def draw(seed: int, count: int, rooms: list[str]) -> list[Mutant]:
    """Draws mutants, the same number of each room.

    Args:
        seed: Determines them.
        count: How many.
        rooms: Keys of `ROOMS`.
    """
    rng = random.Random(seed)
    found = []
    for number, room in enumerate(rooms):
        paths = sorted((ROOT / "ortops" / room).rglob("*.py"))
        every = [mutant for path in paths for mutant in mutants(path.relative_to(ROOT))]
        found += rng.sample(every, len(range(number, count, len(rooms))))
    return found


def tests_of(path: Path) -> list[str]:
    """Returns the files with the tests of a module's room, those that its name names first."""
    room = next(room for room in ROOMS if path.is_relative_to(Path("ortops", room)))
    files = [file for each in ROOMS[room] for file in sorted((ROOT / "tests").glob(f"{each}.py"))]
    word = path.stem.strip("_").rstrip("s")
    ordered = sorted(dict.fromkeys(files), key=lambda file: word not in file.stem)
    return [str(file.relative_to(ROOT)) for file in ordered]


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


def failure(folder: Path, arguments: list[str]) -> str:
    """Runs tests in a copy of the checkout, and returns the first that fails, or ""."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": str(folder / ".cache"),  # of machine code of updates
    }
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            shown, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"no end after {TIMEOUT} s"
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    lines = [line for line in shown.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return lines[0] if lines else f"pytest ended with {process.returncode}"


def main(arguments: list[str] | None = None) -> int:
    """Prints each mutant and whether it was killed; returns 1 if one survived."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--room", choices=ROOMS, action="append", help="only this one")
    parser.add_argument("--suite", action="store_true", help="survivors meet the whole suite")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    given = parser.parse_args(arguments)
    print(f"--seed {given.seed} --count {given.count}", flush=True)
    drawn = draw(given.seed, given.count, given.room or list(ROOMS))
    folders: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def judge(mutant: Mutant) -> str:
        folder, tests = folders.get(), tests_of(mutant.path)
        stages = [
            ["-m", "not slow", *tests],
            ["-m", "slow", *tests],
            *([[]] if given.suite else []),
        ]
        try:
            (folder / mutant.path).write_bytes(mutant.source())
            found = ""
            while stages and not found:
                found = failure(folder, stage := stages.pop(0))
            shutil.copy(ROOT / mutant.path, folder / mutant.path)
            again = ["--last-failed", "--last-failed-no-failures=none", *stage]
            if found and (wrong := failure(folder, again)):
                sys.exit(f"{wrong}, without a mutant")
            return found
        finally:
            folders.put(folder)

    survived = 0
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as pool:
        for number in range(given.jobs):
            folder = Path(temporary, str(number))
            copy(folder)
            folders.put(folder)
        for mutant, found in zip(drawn, pool.map(judge, drawn), strict=True):
            survived += not found
            print(f"{'killed  ' if found else 'SURVIVED'} {mutant}\n      {found}", flush=True)
    print(f"{len(drawn) - survived} killed, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
