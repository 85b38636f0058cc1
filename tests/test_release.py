"""What a release consists of besides the package: workflows, recipe, site, public names."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import ortops

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
FILES = {
    "vendor.github-workflows": sorted((GITHUB / "workflows").glob("*.yml")),
    "vendor.github-issue-forms": [
        path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.stem != "config"
    ],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
}


def script(name: str) -> Any:
    """Returns a module of scripts/."""
    folder = str(ROOT / "scripts")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def yaml(path: Path) -> Any:
    return pytest.importorskip("ruamel.yaml").YAML(typ="safe").load(path)


@pytest.mark.slow
@pytest.mark.optional("check_jsonschema", "lint")
@pytest.mark.parametrize("schema", FILES)
def test_files_of_github_have_the_form_that_it_reads(schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    done = subprocess.run([*command, *FILES[schema]], capture_output=True, text=True, check=False)
    assert FILES[schema]
    assert done.returncode == 0, done.stdout


@pytest.mark.optional("check_jsonschema", "lint")
@pytest.mark.parametrize("path", FILES["vendor.github-workflows"], ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path: Path) -> None:
    """Scripts and optional groups exist, jobs need jobs, and a job that writes says so itself."""
    workflow = yaml(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        needed = job.get("needs", [])
        assert {needed} if isinstance(needed, str) else set(needed) <= workflow["jobs"].keys()
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            command = step.get("run", "")
            for called in re.findall(r"\./scripts/\w+", command):
                assert (ROOT / called).exists(), called
            for groups in re.findall(r'"\.\[([\w,]+)\]"', command):
                assert set(groups.split(",")) <= project["optional-dependencies"].keys()
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@v1"))


def test_workflows_test_what_the_classifiers_say() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    said = [each.rpartition(" ")[2] for each in project["classifiers"] if ":: 3." in each]
    text = (GITHUB / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert f"python: {json.dumps(said)}" in text


def test_the_recipe_has_the_bounds_of_the_package() -> None:
    """Except for onnxruntime-extensions, which may be missing."""
    text = (ROOT / "scripts" / "recipe.yaml").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    run = text.partition("  run:")[2].partition("tests:")[0]
    found = dict(line.split(" ", 1) for line in re.findall(r"- (.+)$", run, re.MULTILINE))
    wanted = {
        each.name: str(each.specifier)
        for each in map(Requirement, project["dependencies"])
        if each.marker is None
    }
    assert found == {"python": ">=${{ python_min }}", **wanted}
    assert f'python_min: "{project["requires-python"].removeprefix(">=")}"' in text


def test_versions_are_equal() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = json.loads((ROOT / "ortops" / "web" / "package.json").read_text(encoding="utf-8"))
    assert ortops.__version__ == project["version"] == package["version"]


def test_the_site_has_every_page() -> None:
    pages = script("docs_pages")
    index = (pages.DOCS / "README.md").read_text(encoding="utf-8")
    present = {path.name for path in pages.DOCS.glob("*.md")}
    overview, start, *_ = pages.navigation(index, present)
    assert overview == {"Overview": "index.md"}
    assert {"Concepts": "concepts.md"} in start["Start here"]
    with pytest.raises(SystemExit, match=r"do not list unlisted\.md"):
        pages.navigation(index, {*present, "unlisted.md"})


def test_public_names_and_signatures_are_those_of_the_snapshot() -> None:
    """The command writes what is new; what is gone or changed needs a line in CHANGELOG.md."""
    public = script("public_api")
    changes = public.differences()
    assert not changes, "\n".join(
        ["the public API has changed; if that is meant, run", f"    {public.COMMAND}", *changes]
    )


def test_a_changed_signature_differs_from_the_snapshot() -> None:
    public = script("public_api")

    def function(a, b=1, *rest, c, d=(2, "x"), e=print, **more):  # type: ignore[no-untyped-def]
        pass

    assert public._signature(function) == (
        "(a, b=1, *rest, c, d=(2, 'x'), e=<builtin_function_or_method>, **more)"
    )
    lines = public.sections()["ortops"]
    assert "ortops.lower(model, *, target=None)" in lines
    assert "ortops.ModelError: an exception, OrtopsError, ValueError" in lines
