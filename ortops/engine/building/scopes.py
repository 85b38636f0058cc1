"""The scopes of the nodes that read a weight, as exporters write them, and patterns of them."""

from __future__ import annotations

import ast
import difflib
import fnmatch
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ortops.errors import ModelError

_NAMES_OF_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")


@dataclass(frozen=True)
class ScopeNames:
    """The scopes of the nodes that read a weight.

    Attributes:
        readers: The scopes of each node that uses its values.
        movers: The scopes of nodes that only move or round its elements.
    """

    readers: tuple[frozenset[str], ...] = ()
    movers: frozenset[str] = frozenset()

    def elsewhere(self, pattern: str) -> list[str]:
        """Returns the scopes outside a pattern that read the weight, one for each node."""
        others = (scopes for scopes in self.readers if scopes and not _is_in(pattern, scopes))
        return [max(scopes, key=len) for scopes in others]

    def fit(self, pattern: str) -> bool:
        """Whether a pattern matches one of the scopes."""
        return any(_is_in(pattern, scopes) for scopes in (*self.readers, self.movers))


def scopes_of(node: ir.Node) -> frozenset[str]:
    """Returns the scopes of a node: its name, the enclosing scope, and those in its metadata."""
    found = set()
    if node.name:
        parts = node.name.strip("/").replace("/", ".")
        found.add(parts)
        if "." in parts:
            found.add(parts.rsplit(".", 1)[0])
    for key in _NAMES_OF_SCOPES:
        text = node.metadata_props.get(key, "")
        names = names_in(text) if text.startswith("[") else text.split("/")
        found.update(name.split(":")[0].strip() for name in names)
    return frozenset(found - {""})


def names_in(text: str) -> list[str]:
    """Returns the strings in a list literal of Python; an empty list for any other text."""
    try:
        found = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two for deep nesting
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def matches(pattern: str, name: str, scopes: ScopeNames) -> bool:
    """Whether a pattern matches an initializer, by its name or the scopes of its readers."""
    return fnmatch.fnmatchcase(name, pattern) or scopes.fit(pattern)


def matched(pattern: str, names: Collection[str], scopes: Mapping[str, ScopeNames]) -> list[str]:
    """Returns the names that a pattern matches; only itself if it is one of them."""
    if pattern in names:
        return [pattern]
    return [name for name in names if matches(pattern, name, scopes.get(name, ScopeNames()))]


def split(patterns: Iterable[str], names: Container[str]) -> tuple[list[str], list[str]]:
    """Returns the patterns that include, ``*`` if there are none, and what others exclude.

    Args:
        patterns: Names or patterns, in any order. One that begins with ``!`` excludes what the rest
            of it matches, unless it is a name.
        names: The names that there are.

    Raises:
        ModelError: If it is unclear whether a pattern is a name.

    Example:
        >>> split(["!*.bias", "fc.*", "!eye"], ["fc.weight", "fc.bias", "eye"])
        (['fc.*'], ['*.bias', 'eye'])
        >>> split(["!*.bias"], ["fc.weight", "fc.bias"])
        (['*'], ['*.bias'])
    """
    included, excluded = list[str](), list[str]()
    for pattern in patterns:
        if pattern in names or not pattern.startswith("!"):
            included.append(pattern)
        else:
            excluded.append(pattern[1:])
        if pattern.startswith("!") and pattern in names and pattern[1:] in names:
            raise ModelError(
                f"'{pattern}' is a name, and would exclude the name '{pattern[1:]}'; write "
                f"'?{pattern[1:]}' for the one, or '!{pattern[1:-1]}?' to exclude the other"
            )
    return included or ["*"], excluded


def nearest(pattern: str, names: Sequence[str], scopes: Mapping[str, ScopeNames]) -> str:
    """Returns a hint with up to three names or patterns like one that matches nothing, or ""."""
    found = {name: name for name in names}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts)):
            found.setdefault(".".join(parts[:end]), ".".join(parts[:end]) + ".*")
        for scope in frozenset[str]().union(*scopes.get(name, ScopeNames()).readers):
            parts = scope.split(".")
            for end in range(1, len(parts) + 1):
                found[".".join(parts[:end])] = ".".join(parts[:end])
    plain = pattern.strip("/").replace("/", ".").strip("*.")
    near = difflib.get_close_matches(plain, found, n=3)
    # A long path is also sought by its last part, as layers have the same parts.
    last = plain.rsplit(".", 1)[-1].lower()
    near = near or [each for each in found if len(last) > 2 and last in each.lower()][:3]
    if not near:
        return ""
    *most, final = (f"'{found[each]}'" for each in near)
    return f"did you mean {', '.join(most)} or {final}?" if most else f"did you mean {final}?"


def _is_in(pattern: str, scopes: Collection[str]) -> bool:
    """Whether a pattern matches one of some scopes or an enclosing scope."""
    dotted = pattern.strip("/").replace("/", ".")
    return any(
        scope == dotted or scope.startswith(f"{dotted}.") or fnmatch.fnmatchcase(scope, dotted)
        for scope in scopes
    )
