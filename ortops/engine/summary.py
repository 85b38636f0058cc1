"""Short forms of long lists, for reports that people read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

SHOWN = 20
"""How many items of a list are shown."""

WIDTH = 100
"""How many characters a line of a table has at most."""

_LONGEST = 24  # of a dimension

_NUMBERED = re.compile(r"^(onnx::)?\w*?_?\d+$")


def visible(text: str, kept: str = "\t") -> str:
    r"""Returns a text with its control characters escaped, which could manipulate a terminal.

    Example:
        >>> visible("\x1b[31mred")
        '\\x1b[31mred'
    """
    return "".join(
        character if character.isprintable() or character in kept else ascii(character)[1:-1]
        for character in text
    )


def text_of(lines: Iterable[str]) -> str:
    """Returns lines as text, in which names from files cannot make further lines."""
    return "\n".join(map(visible, lines))


def short_shape(text: str) -> str:
    """Returns a text in which long dimensions are cut.

    Example:
        >>> short_shape("FLOAT[batch,2,2*((height//2 + 1)//2) + floor(width/4)]")
        'FLOAT[batch,2,2*((height//2 + 1)//2) …]'
    """
    begin, end = text.find("["), text.rfind("]")
    if begin < 0 or end < begin:
        return text
    dims = [dim.strip() for dim in _dimensions(text[begin + 1 : end])]
    short = (dim if len(dim) <= _LONGEST else dim[: _LONGEST - 1].rstrip() + " …" for dim in dims)
    return text[: begin + 1] + ",".join(short) + text[end:]


def first(lines: list[str], more: str = "--all lists all") -> list[str]:
    """Returns the first lines of a list, and a line that counts the others."""
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"  and {len(lines) - SHOWN} more ({more})"]


def by_module(kinds: Mapping[str, str]) -> list[str]:
    """Returns a line for each module: its parameters, the number of tensors, and one of them.

    Modules are the beginnings of names, as deep as `SHOWN` lines allow.

    Args:
        kinds: Types and shapes of parameters by name, such as ``"FLOAT[4,3]"``.

    Example:
        >>> kinds = {f"blocks.{i}.{j}.weight": "FLOAT[2,3]" for i in range(2) for j in range(20)}
        >>> by_module(kinds)
        ['  blocks.0  120 in 20 tensors', '  blocks.1  120 in 20 tensors']
    """
    paths = {name: _path(name) for name in kinds}
    depth = 1
    while len({path[: depth + 1] for path in paths.values()}) <= SHOWN and any(
        len(path) > depth for path in paths.values()
    ):
        depth += 1
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, path in paths.items():
        groups.setdefault(path[:depth], []).append(name)
    lines = []
    for module, names in groups.items():
        count = sum(_size(kinds[name]) for name in names)
        tensors = f"{len(names)} tensor{'s' * (len(names) > 1)}"
        lines.append(f"  {'.'.join(module) or 'others'}  {count:,} in {tensors}")
    return first(lines)


def module_of(name: str) -> str:
    """Returns the module in the name of a parameter; empty if there is none.

    Example:
        >>> module_of("body.0.weight"), module_of("onnx::MatMul_12")
        ('body.0', '')
    """
    return ".".join(_path(name))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with the columns of `TrainingSession.summary`.

    Args:
        rows: Four texts each: a name, of which the start is cut if it is too long, a text of which
            it is the end, a number, and a text of any length.

    Example:
        >>> table([("fc", "[N, 4]", "20", "yes"), ("x" * 90, "", "1", "no")])[1][:6]
        '…xxxxx'
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    wide = [min(most, max(len(row[i]) for row in rows)) for i, most in enumerate((36, 20, 15))]
    lines = []
    for name, kind, count, text in rows:
        name = name if len(name) <= wide[0] else f"…{name[1 - wide[0] :]}"
        cells = f"{name:{wide[0]}}  {cut(kind, wide[1]):{wide[1]}}  {count:>{wide[2]}}  {text}"
        lines.append(cells.rstrip())
    return lines


def cut(text: str, most: int = WIDTH) -> str:
    """Returns a text without its end if it is too long.

    Example:
        >>> cut("[batch,64,128,128]", 12)
        '[batch,64,1…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Returns a line for each kind of reason: how many names have it, and one of them.

    Example:
        >>> by_reason({f"s{i}": f"is the scales of Resize node 'r{i}'" for i in range(30)})
        ["  30 of this kind: s0 is the scales of Resize node 'r0'"]
    """
    kinds: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        kinds.setdefault(re.sub(r"'[^']*'|\d+", "", reason), []).append(name)
    lines = []
    for names in kinds.values():
        of = f"{len(names)} of this kind: " if len(names) > 1 else ""
        lines.append(f"  {of}{names[0]} {reasons[names[0]]}")
    return first(lines)


def _dimensions(text: str) -> Iterable[str]:
    """Yields dimensions, whose expressions may have commas in parentheses."""
    depth, begin = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    yield text[begin:]


def _path(name: str) -> tuple[str, ...]:
    """Returns the modules in a name; () if it has none, as in numbered names of exporters."""
    parts = re.split(r"[./]", name.strip("/"))
    if len(parts) == 1 and _NUMBERED.match(parts[0]):
        return ()
    return tuple(parts[:-1] or parts)


def _size(kind: str) -> int:
    found = re.search(r"\[([\d,]*)\]", kind)
    return math.prod(int(size) for size in found[1].split(",") if size) if found else 0
