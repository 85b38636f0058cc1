"""Writes the reference as Markdown, from signatures and docstrings.

A page for each public module: signatures, and docstrings in Markdown. What the command line says is
read from its parsers.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from ortops.errors import OrtopsError

FOLDER = Path(__file__).parents[1] / "build" / "reference"
MODULES = (
    "ortops",
    "ortops.losses",
    "ortops.optimizers",
    "ortops.schedules",
    "ortops.metrics",
    "ortops.callbacks",
    "ortops.surgery",
    "ortops.weights",
    "ortops.lora",
    "ortops.llm",
    "ortops.derivatives",
    "ortops.attribution",
    "ortops.data",
    "ortops.distributed",
    "ortops.reference",
    "ortops.sklearn",
)
RETURNED = {
    "Gradients": "ortops.engine.training.gradients",
    "History": "ortops.engine.training.history",
    "PackedUpdate": "ortops.engine.execution.settings",
    "SessionReport": "ortops.engine.execution.settings",
    "State": "ortops.engine.training.state",
    "open_data": "ortops.engine.training.data",
}
"""What has no public name, but is told of on the page of `ortops`: sessions give or read it."""
COMMAND_LINE = "command_line.md"
GENERATED = "<!-- Written by scripts/reference.py. -->"
SECTION = re.compile(r"(Args|Attributes|Example|Examples|Note|Raises|Returns|Source|Yields):")
LISTS = ("Args", "Attributes", "Raises")
DESCRIPTORS = (classmethod, functools.cached_property, property, staticmethod)


def modules() -> list[ModuleType]:
    """Returns the public modules, but for those whose optional packages are not installed."""
    found = []
    for name in MODULES:
        with contextlib.suppress(OrtopsError):
            found.append(importlib.import_module(name))
    return found


def names(module: ModuleType) -> list[str]:
    """Returns what a module has to offer, but for its submodules."""
    found = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    return [*found, *RETURNED] if module.__name__ == "ortops" else found


def value_of(module: ModuleType, name: str) -> Any:
    """Returns the object that a name of `names` refers to."""
    if module.__name__ == "ortops" and name in RETURNED:
        module = importlib.import_module(RETURNED[name])
    return getattr(module, name)


def members(value: type) -> dict[str, Any]:
    """Returns the public methods and properties of a class and of its private bases."""
    private = ("_", "Base")
    classes = [c for c in value.__mro__ if c is value or c.__name__.startswith(private)]
    return {
        name: member
        for each in reversed(classes)
        if each.__module__.startswith("ortops")
        for name, member in vars(each).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, DESCRIPTORS))
    }


def headings(module: ModuleType) -> Iterator[str]:
    """Yields what the page of a module describes, in its order."""
    for name in names(module):
        yield name
        value = value_of(module, name)
        if inspect.isclass(value):
            yield from (f"{name}.{inner}" for inner in members(value))


def page_of(module: str) -> str:
    """Returns the file name of a module's page."""
    return f"{module.rpartition('.')[2]}.md"


def anchor(heading: str) -> str:
    """Returns what a link to a heading ends with."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# ------------------------------------------------------------------------------------ docstrings


class Links:
    """Where public names are described."""

    def __init__(self, found: list[ModuleType]) -> None:
        self.places = {name: (page_of(name), "") for name in MODULES[1:]}
        for module in found:
            page, taken = page_of(module.__name__), Counter[str]()
            for name in headings(module):
                part = anchor(name)
                place = (page, f"{part}-{taken[part]}" if taken[part] else part)
                taken[part] += 1
                self.places[f"{module.__name__}.{name}"] = place
                if module.__name__ == "ortops":
                    self.places[name] = place

    def text(self, text: str, module: ModuleType, owner: str) -> str:
        """Returns a docstring's text in Markdown: `name` becomes a link where it is public."""

        def link(match: re.Match[str]) -> str:
            code, name = match["code"], match["name"]
            if code is not None:
                return f"`{code}`"
            near = (f"{module.__name__}.{owner}.{name}", f"{module.__name__}.{name}", name)
            place = next((self.places[each] for each in near if each in self.places), None)
            if place is None:
                return f"`{name}`"
            page, part = place
            target = "" if page == page_of(module.__name__) and part else page
            return f"[`{name}`]({target}{'#' if part else ''}{part})"

        return re.sub(r"``(?P<code>.+?)``|`(?P<name>[^`]+)`", link, text, flags=re.DOTALL)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yields the paragraphs of a text with their kinds: text, pycon, or what stands as it is."""
    literal = False
    waiting: list[str] = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        indented = all(line.startswith("    ") for line in part.splitlines())
        if literal and indented:
            waiting.append(textwrap.dedent(part))
            continue
        if waiting:
            yield "text", "\n\n".join(waiting)
            waiting = []
        literal = part.rstrip().endswith("::")
        if part.lstrip().startswith(">>>"):
            yield "pycon", textwrap.dedent(part)
        elif part.startswith("==="):
            yield "text", part
        else:
            yield "", part.rstrip().removesuffix("::") + ":" if literal else part
    if waiting:
        yield "text", "\n\n".join(waiting)


def paragraphs(text: str, links: Links, module: ModuleType, owner: str) -> Iterator[str]:
    """Yields a text as paragraphs of Markdown."""
    for kind, part in blocks(text):
        if kind:
            yield f"```{kind}\n{part}\n```"
        else:
            yield links.text(textwrap.dedent(part), module, owner)


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yields the names of a list like ``Args:`` and what is said of each."""
    for part in re.split(r"\n(?=\S)", text):
        name, _, said = part.partition(":")
        first, *items = re.split(r"\n\s*- |\n\s*\n", said)
        lines = [" ".join(each.split()) for each in (first, *items)]
        yield name.strip(), "\n  - ".join(filter(None, lines))


def markdown(docstring: str, links: Links, module: ModuleType, owner: str = "") -> Iterator[str]:
    """Yields a Google-style docstring as paragraphs of Markdown."""
    sections: list[tuple[str, list[str]]] = [("", [])]
    for line in inspect.cleandoc(docstring).splitlines():
        if SECTION.fullmatch(line):
            sections.append((line.removesuffix(":"), []))
        else:
            sections[-1][1].append(line)
    for title, lines in sections:
        text = "\n".join(lines) if not title else textwrap.dedent("\n".join(lines))
        text = text.strip("\n")
        if not text:
            continue
        if title:
            yield f"**{title}**"
        if title in LISTS:
            yield "\n".join(
                f"- `{name}`: {links.text(said, module, owner)}" for name, said in entries(text)
            )
        else:
            yield from paragraphs(text, links, module, owner)


# ----------------------------------------------------------------------------------- signatures


def signature(value: Any, name: str) -> str:
    """Returns how something is called, in the words of its source."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    shown: list[str] = []
    kind = None
    parameters = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    for each in parameters:
        if kind is inspect.Parameter.POSITIONAL_ONLY and each.kind is not kind:
            shown.append("/")
        if each.kind is each.KEYWORD_ONLY and kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            shown.append("*")
        kind = each.kind
        text = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(kind, "") + each.name
        if each.annotation is not each.empty:
            text += f": {_annotation(each.annotation)}"
        if each.default is not each.empty:
            between = " = " if each.annotation is not each.empty else "="
            text += between + _default(each.default)
        shown.append(text)
    result = ""
    if not inspect.isclass(value) and found.return_annotation is not found.empty:
        result = f" -> {_annotation(found.return_annotation)}"
    line = f"{name}({', '.join(shown)}){result}"
    if len(line) <= 100:
        return line
    inner = "".join(f"    {each},\n" for each in shown)
    return f"{name}(\n{inner}){result}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _default(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__name__)
    text = repr(value)
    return "…" if text.startswith("<") else text


# ---------------------------------------------------------------------------------------- pages


def assignment(module: str, name: str) -> tuple[str, str]:
    """Returns a type alias, and the string below it or another constant, wherever it stands."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    body = ast.parse(source).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = following.value if isinstance(following, ast.Expr) else None
            said = str(value.value) if isinstance(value, ast.Constant) else ""
            is_alias = isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node)
            return (ast.get_source_segment(source, node) or "") if is_alias else "", said
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom) and any(a.name == name for a in node.names):
            return assignment(str(node.module), name)
    return "", ""


def describe(module: ModuleType, name: str, links: Links) -> Iterator[str]:
    """Yields the paragraphs on one public name."""
    value = value_of(module, name)
    yield f"## {name}"
    if name in RETURNED:
        yield f"(`{RETURNED[name]}.{name}`)"
    if inspect.isclass(value) or inspect.isroutine(value):
        shown = "" if issubclass_of(value, Exception) else signature(value, name)
        if shown:
            yield f"```text\n{shown}\n```"
        bases = [
            b.__name__
            for b in getattr(value, "__bases__", ())
            if b.__name__[0] != "_" and b is not object
        ]
        if bases:
            yield f"Derived from {', '.join(f'`{base}`' for base in bases)}."
        yield from markdown(value.__doc__ or "", links, module, name)
    else:
        alias, said = assignment(module.__name__, name)
        if alias:
            yield f"```text\n{alias}\n```"
        yield from markdown(said or value.__doc__ or "", links, module)
    if inspect.isclass(value):
        for inner, member in members(value).items():
            yield f"### {name}.{inner}"
            called = getattr(value, inner)
            if not isinstance(member, property | functools.cached_property):
                yield f"```text\n{signature(called, inner)}\n```"
            yield from markdown(called.__doc__ or "", links, module, name)


def issubclass_of(value: Any, base: type) -> bool:
    """Returns whether a value is a class derived from another."""
    return inspect.isclass(value) and issubclass(value, base)


def page(module: ModuleType, links: Links) -> str:
    """Returns the page of a module."""
    parts = [GENERATED, f"# {module.__name__}"]
    parts += markdown(module.__doc__ or "", links, module)
    for name in names(module):
        parts += describe(module, name, links)
    return "\n\n".join(parts) + "\n"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parsers of the command and of its subcommands, by how they are called."""
    from ortops import cli

    found: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        found.append(parser)
        raise SystemExit

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", keep),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", keep),
        contextlib.suppress(SystemExit),
    ):
        cli.main([])
    named = {"ortops": found[0]}
    for prog in list(named):
        _add_subparsers(prog, named)
    return named


def _add_subparsers(prog: str, named: dict[str, argparse.ArgumentParser]) -> None:
    for action in named[prog]._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, parser in action.choices.items():
                named[f"{prog} {name}"] = parser
                _add_subparsers(f"{prog} {name}", named)


def command_line() -> str:
    """Returns the page of the command line."""
    parts = [GENERATED, "# The command `ortops`"]
    for prog, parser in parsers().items():
        actions = [a for a in parser._actions if a.help != argparse.SUPPRESS]
        inner = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
        positional = [a for a in actions if not a.option_strings and a not in inner]
        if prog != "ortops":
            parts.append(f"## {prog}")
        if inner and prog == "ortops":
            parts.append("```text\nortops [--version] COMMAND …\n```")
        elif not inner:
            shown = " ".join(_shown(action) for action in positional)
            parts.append(f"```text\n{prog} [options] {shown}".rstrip() + "\n```")
        if parser.description:
            parts.append(inspect.cleandoc(parser.description))
        lines = [_told(action) for action in positional]
        for action in inner:
            lines += [
                f"- [`{prog} {each.dest}`](#{anchor(f'{prog} {each.dest}')}): {each.help}"
                for each in action._choices_actions
            ]
        lines += [_told(action) for action in actions if action.option_strings]
        parts.append("\n".join(lines))
        if parser.epilog:
            if isinstance(parser.formatter_class, type) and issubclass(
                parser.formatter_class, argparse.RawDescriptionHelpFormatter
            ):
                parts.append(f"```text\n{inspect.cleandoc(parser.epilog)}\n```")
            else:
                parts.append(" ".join(parser.epilog.split()))
    return "\n\n".join(parts) + "\n"


def _shown(action: argparse.Action) -> str:
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}"
        if action.choices is not None
        else action.dest.upper()
        if action.option_strings
        else action.dest
    )
    value = value if isinstance(value, str) else " ".join(value)
    if action.nargs == 0:
        value = ""
    elif action.nargs in ("+", "*"):
        value += " …"
    elif action.nargs == "?":
        value = f"[{value}]"
    return " ".join(filter(None, [", ".join(action.option_strings), value]))


def _told(action: argparse.Action) -> str:
    text = action.help or ""
    known = {**vars(action), "prog": "ortops"}
    said = " ".join((text % known if "%" in text else text).split())
    return f"- `{_shown(action)}`{': ' if said else ''}{said}"


def pages() -> dict[str, str]:
    """Returns the text of each page by its file name."""
    found = modules()
    links = Links(found)
    texts = {page_of(module.__name__): page(module, links) for module in found}
    texts[COMMAND_LINE] = command_line()
    return texts


def main() -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="default: %(default)s")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
