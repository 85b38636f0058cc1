"""What the suite prints and writes: a table, and JUnit's XML."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from ortops.conformance.running import Result


def _cell(results: Sequence[Result]) -> str:
    """Returns ``passed / all``, and how many are not supported."""
    counts = Counter(result.status for result in results)
    text = f"{counts['passed']} / {len(results)}"
    return f"{text} ({counts['unsupported']} unsupported)" if counts["unsupported"] else text


def table(results: Mapping[str, Sequence[Result]]) -> str:
    """Returns a table in Markdown: how many cases of each group each backend passes.

    Args:
        results: The results of the same cases, by the name of the backend.
    """
    groups: dict[str, None] = {}
    for found in results.values():
        groups |= dict.fromkeys(result.case.group for result in found)
    rows = [["cases", *results], ["---"] * (len(results) + 1)]
    for group in groups:
        own = [[r for r in found if r.case.group == group] for found in results.values()]
        rows.append([group, *map(_cell, own)])
    rows.append(["all", *map(_cell, results.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def junit(results: Mapping[str, Sequence[Result]], path: str | os.PathLike[str]) -> None:
    """Writes results as JUnit's XML, a suite for each backend.

    Args:
        results: The results, by the name of the backend.
        path: The file.
    """
    root = ElementTree.Element("testsuites")
    for backend, found in results.items():
        counts = Counter(result.status for result in found)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=backend,
            tests=str(len(found)),
            failures=str(counts["failed"]),
            errors="0",
            skipped=str(counts["unsupported"]),
            time=f"{sum(result.seconds for result in found):.3f}",
        )
        for result in found:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{backend}.{result.case.group}",
                name=result.case.name,
                time=f"{result.seconds:.3f}",
            )
            if result.status != "passed":
                tag = "failure" if result.status == "failed" else "skipped"
                ElementTree.SubElement(case, tag, message=_printable(result.message))
            lines = [f"{cite.source}: {cite.text}" for cite in result.case.cites]
            lines += [f"proposal: {result.case.proposal}"] if result.case.proposal else []
            ElementTree.SubElement(case, "system-out").text = "\n".join(lines)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """Returns a text without what XML cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)
