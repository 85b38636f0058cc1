"""Counts lines of code: lines with a token, without docstrings and imports.

Usage: python scripts/lines_of_code.py [FOLDER]     (a checkout; by default, this one)

Prints the lines of each package of `ortops/`, and the files, classes and function bodies that are
longer than they should be.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONGEST = {"file": 500, "class": 350, "function": 50}
"""Lines of code; of functions, of their bodies."""

_IGNORED = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of(text: str) -> set[int]:
    """Returns the numbers of the lines of code of a module."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _IGNORED:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found - skipped


def too_long(name: str, text: str) -> list[str]:
    """Returns what is too long in a module, with its lines of code."""
    lines = lines_of(text)
    parts = [("file", name, len(lines))]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            inside = range(node.lineno, (node.end_lineno or 0) + 1)
            parts.append(("class", f"{name}: {node.name}", len(lines.intersection(inside))))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            parts.append(("function", f"{name}: {node.name}", len(lines.intersection(inside))))
    return [f"{kind} {where}: {count}" for kind, where, count in parts if count > LONGEST[kind]]


def main(root: Path = ROOT) -> None:
    """Prints the lines of each package, and what is too long."""
    counts: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long: list[str] = []
    for path in sorted((root / "ortops").rglob("*.py")):
        parts = path.relative_to(root / "ortops").parts
        inner = parts[0] in ("graph", "engine") and len(parts) > 2
        package = "/".join(parts[: 2 if inner else 1]) if len(parts) > 1 else "modules at the top"
        text = path.read_text(encoding="utf-8")
        counts[package] += len(lines_of(text))
        files[package] += 1
        long += too_long(str(path.relative_to(root)), text)
    for package, count in counts.most_common():
        print(f"{count:6} {files[package]:4} {package}")
    print(f"{counts.total():6} {files.total():4} together")
    print(f"\nlonger than {LONGEST}:", *sorted(long), sep="\n    ")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
