"""Writes what is public into tests/public_api.txt: names, signatures, options of the command line.

Usage: python scripts/public_api.py [--check]

What is listed is what other code may rely on; ortops/docs/stability.md says how it may change.
Annotations are left out, since they are written differently by different versions of Python.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import reference

SNAPSHOT = Path(__file__).parents[1] / "tests" / "public_api.txt"
COMMAND = "python scripts/public_api.py"
_PLAIN = (bool, int, float, str, bytes, type(None))


def _default(value: Any) -> str:
    """Returns a default as it is shown: values of simple types, and the types of all others."""
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_default, value))
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return repr(value) if isinstance(value, _PLAIN) else f"<{type(value).__name__}>"


def _signature(value: Any) -> str:
    """Returns the parameters of a function or class, without annotations."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # a class whose constructor is written in C
        return "(…)"
    empty = inspect.Parameter.empty
    parameters = [
        each.replace(annotation=empty, default=empty)
        for each in signature.parameters.values()
        if each.name not in ("self", "cls")
    ]
    shown, text = [], str(signature.replace(parameters=[], return_annotation=empty))
    defaults = {name: each.default for name, each in signature.parameters.items()}
    keywords = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keywords:
            shown.append("*")
        keywords |= each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        default = defaults[each.name]
        shown.append(str(each) if default is empty else f"{each.name}={_default(default)}")
    return text.replace("()", f"({', '.join(shown)})")


def _of_class(where: str, value: type) -> Iterator[str]:
    """Yields the lines of a class: its constructor, methods and properties."""
    if issubclass(value, BaseException):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"{where}: an exception, {bases}"
        return
    is_given = value.__name__ in reference.RETURNED  # by a session; nobody else makes one
    yield where if is_given else f"{where}{_signature(value)}"
    if dataclasses.is_dataclass(value):
        yield from (f"{where}.{field.name}" for field in dataclasses.fields(value))
    for name, member in reference.members(value).items():
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        is_called = inspect.isfunction(member)
        yield f"{where}.{name}{_signature(member) if is_called else ''}"


def of_module(module: ModuleType) -> list[str]:
    """Returns the lines of a module, in order."""
    lines: set[str] = set()
    for name in reference.names(module):
        where, value = f"{module.__name__}.{name}", reference.value_of(module, name)
        if inspect.isclass(value):
            lines.update(_of_class(where, value))
        else:
            lines.add(f"{where}{_signature(value)}" if inspect.isfunction(value) else where)
    return sorted(lines)


def of_commands() -> list[str]:
    """Returns the arguments of each command of `ortops`."""
    lines = set()
    for name, parser in reference.parsers().items():
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                said = "/".join(action.option_strings) or str(action.metavar or action.dest).upper()
                lines.add(f"$ {name} {said}")
    return sorted(lines)


def sections() -> dict[str, list[str]]:
    """Returns the lines by module; modules whose optional packages are missing are left out."""
    found = {module.__name__: of_module(module) for module in reference.modules()}
    return found | {"command line": of_commands()}


def read() -> dict[str, list[str]]:
    """Returns the sections of the snapshot."""
    parts = SNAPSHOT.read_text(encoding="utf-8").split("\n\n") if SNAPSHOT.exists() else []
    blocks = (part.strip().splitlines() for part in parts)
    return {lines[0].removeprefix("# "): lines[1:] for lines in blocks if lines}


def differences() -> list[str]:
    """Returns what is public and not in the snapshot (+), and what only the snapshot has (-)."""
    kept, found = read(), []
    for name, lines in sections().items():
        diff = difflib.unified_diff(kept.get(name, []), lines, n=0, lineterm="")
        found += [line for line in diff if not line.startswith(("---", "+++", "@@"))]
    return found


def main() -> int:
    """Writes the snapshot, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    if parser.parse_args().check:
        changes = differences()
        print("\n".join([*changes, f"write it with: {COMMAND}"] if changes else ["up to date"]))
        return int(bool(changes))
    both = read() | sections()
    order = [name for name in (*reference.MODULES, "command line") if name in both]
    blocks = ("\n".join([f"# {name}", *both[name]]) for name in order)
    SNAPSHOT.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
