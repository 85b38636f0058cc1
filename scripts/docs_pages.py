"""Collects what the documentation site consists of, for ./scripts/docs.

Usage: python scripts/docs_pages.py FOLDER

FOLDER gets the pages of ortops/docs, the reference and the changelog in pages/, and mkdocs.yml,
which takes its settings from scripts/mkdocs.yml and its navigation from the tables of
ortops/docs/README.md.
"""

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "ortops" / "docs"
_LINK = re.compile(r"\[([^\]]+)\]\(([\w-]+\.md)\)")


def navigation(index: str, present: set[str]) -> list[object]:
    """Returns the pages in the order of the index.

    Args:
        index: The text of the index, whose tables list pages by topic.
        present: The names of all pages, each of which the index is to list.
    """
    listed: dict[str, str] = {}
    sections: list[object] = [{"Overview": "index.md"}]
    for block in re.split(r"\n\s*\n", index):
        heading = re.match(r"\| *([^|]+?) *\| *\|\n", block)
        links = [(name, page) for name, page in _LINK.findall(block) if page not in listed]
        if heading and links:
            listed |= {page: name for name, page in links}
            title = heading[1].capitalize()
            sections.append({title: [{name: page} for name, page in links]})
    if missing := sorted(present - listed.keys() - {"README.md"}):
        sys.exit(f"{DOCS / 'README.md'}: its tables do not list {', '.join(missing)}")
    return sections


def main(folder: Path) -> None:
    """Writes the pages and the configuration."""
    import reference

    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, pages)
    index = (pages / "README.md").rename(pages / "index.md").read_text(encoding="utf-8")
    for page in pages.glob("*.md"):
        text = page.read_text(encoding="utf-8").replace("](README.md", "](index.md")
        page.write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "CHANGELOG.md", pages / "changelog.md")
    (pages / "reference").mkdir()
    described = []
    for name, text in reference.pages().items():
        # The second heading of a name: GitHub calls it name-1, Python's Markdown name_1.
        text = re.sub(r"\]\(#([a-z_]+)-(\d)\)", r"](#\1_\2)", text)
        (pages / "reference" / name).write_text(text, encoding="utf-8")
        module = name.removesuffix(".md")
        shown = "ortops" if module == "ortops" else f"ortops.{module}"
        title = "Command line" if name == reference.COMMAND_LINE else shown
        described.append({title: f"reference/{name}"})
    present = {page.name for page in DOCS.glob("*.md")}
    settings = {
        "INHERIT": str(ROOT / "scripts" / "mkdocs.yml"),
        "docs_dir": "pages",
        "site_dir": "site",
        "nav": [
            *navigation(index, present),
            {"Reference": described},
            {"Changes": "changelog.md"},
        ],
    }
    (folder / "mkdocs.yml").write_text(json.dumps(settings, indent=2))  # JSON is YAML


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(Path(sys.argv[1]).resolve())
