"""Writes the table of operators with a gradient into README.md, from the registry of rules."""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ortops.autodiff import ZERO_GRADIENT, rules
from ortops.expansion import definitions

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- operators: begin -->", "<!-- operators: end -->"


def table() -> str:
    """Returns the table as Markdown."""
    families: dict[str, list[str]] = defaultdict(list)
    for (domain, op_type), rule in {**definitions(), **rules()}.items():
        if rule.function.__module__.startswith("ortops.rules."):
            family = rule.function.__module__.rpartition(".")[2].replace("_", " ")
            families[family].append(f"{domain}::{op_type}" if domain else op_type)
    count = sum(len(names) for names in families.values())
    rows = [f"| family | {count} operators |", "| --- | --- |"]
    rows += [
        f"| {family} | {' '.join(sorted(names))} |" for family, names in sorted(families.items())
    ]
    rows.append(f"| zero gradient | {' '.join(sorted(ZERO_GRADIENT))} |")
    rows += [
        "",
        "Gradients are of any order. What is limited:",
        "",
        "| operator | limits |",
        "| --- | --- |",
    ]
    limits = {op_type: rule.limits for (_, op_type), rule in rules().items() if rule.limits}
    rows += [f"| {op_type} | {text} |" for op_type, text in sorted(limits.items())]
    return "\n".join(rows)


def updated(text: str) -> str:
    """Returns the text of the README with the table in its place."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    """Writes the table, or with ``--check`` tells whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if outdated")
    options = parser.parse_args()
    present = README.read_text(encoding="utf-8")
    wanted = updated(present)
    if options.check:
        return int(present != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
