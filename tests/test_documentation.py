"""What holds for the pages of the documentation and for docstrings."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from violations import all_violations

import ortops

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "ortops" / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "ortops/**/*.md", "models/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")
MODULES = [
    "ortops.attribution",
    "ortops",
    "ortops.callbacks",
    "ortops.derivatives",
    "ortops.data",
    "ortops.distributed",
    "ortops.llm",
    "ortops.lora",
    "ortops.losses",
    "ortops.metrics",
    "ortops.optimizers",
    "ortops.reference",
    "ortops.schedules",
    pytest.param("ortops.sklearn", marks=pytest.mark.sklearn),
    "ortops.surgery",
    "ortops.weights",
]
WITHOUT_EXAMPLE: dict[str, str] = {
    "ortops.losses.Combined": "what a sum of losses gives; the example of Loss makes one",
    "ortops.losses.Computed": "what `compute` returns to the builder",
    "ortops.losses.Prediction": "a part of Computed",
    "ortops.losses.compute": "what the builder calls; its arguments are parts of a graph",
}
"""Public names without an example, and why."""


# ------------------------------------------------------------------------------------------ links


def without_code(markdown: str) -> str:
    """Returns a page without what stands in fences and backticks, where no links are."""
    fenced = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", fenced)


def headings(markdown: str) -> list[tuple[str, str]]:
    """Returns what can stand behind ``#``, as GitHub makes it of headings, and the headings."""
    fenced = re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    found = []
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ +(.+)$", fenced, flags=re.MULTILINE):
        text = "".join(c for c in heading.lower() if c.isalnum() or c in "_- ").replace(" ", "-")
        found.append((f"{text}-{seen[text]}" if seen[text] else text, heading))
        seen[text] += 1
    return found


def broken_links(page: Path) -> list[str]:
    """Returns the links of a page that lead nowhere."""
    broken = []
    markdown = page.read_text(encoding="utf-8")
    for target in LINK.findall(without_code(markdown)):
        if re.match(r"https?://", target):
            continue
        name, _, part = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (part and part not in dict(headings(file.read_text("utf-8")))):
            broken.append(target)
    return broken


def test_links_lead_somewhere() -> None:
    broken = {str(page.relative_to(ROOT)): broken_links(page) for page in PAGES}
    assert not {page: links for page, links in broken.items() if links}


def test_broken_links_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# Other", encoding="utf-8")
    text = """
# A heading, `code`

[a](other.md#other) [`b`](#a-heading-code) `[c](no)`

```text
[d](no)
```

[e](missing.md) [f](#no-heading) [`g`](other.md#no-such-part) ![h](no.png)
"""
    page.write_text(text, encoding="utf-8")
    assert broken_links(page) == ["missing.md", "#no-heading", "other.md#no-such-part", "no.png"]


def test_pages_of_the_package_need_nothing_else() -> None:
    """They ship without the rest of the repository."""
    for page in DOCS.rglob("*.md"):
        for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
            if not re.match(r"https?://", target):
                file = (page.parent / target.partition("#")[0]).resolve()
                assert file.is_relative_to(DOCS), f"{page}: {target}"


@pytest.mark.slow  # it starts a process that imports all modules
def test_the_reference_is_written_from_the_docstrings(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "reference.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    pages = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.glob("*.md")}
    assert {"ortops.md", "losses.md", "optimizers.md", "command_line.md"} <= pages.keys()
    assert "`session.fit" in pages["ortops.md"] or "TrainingSession.fit" in pages["ortops.md"]
    for name, text in pages.items():
        assert broken_links(tmp_path / name) == []
        for said, file, part in re.findall(r"\[`([^`]+)`\]\(([\w.]*)#([\w-]+)\)", text):
            heading = dict(headings(pages[file or name]))[part]
            assert heading.split(".")[-1] == said.split(".")[-1], f"{said} leads to {heading}"


def test_names_in_pages_exist() -> None:
    with all_violations() as check:
        for page in (ROOT / "README.md", *DOCS.glob("*.md")):
            text = page.read_text(encoding="utf-8")
            names = set(re.findall(r"(?<![\w./\"])ortops((?:\.[A-Za-z_]\w*)+)(?!\w)", text))
            there = importlib.util.find_spec("sklearn") is not None
            for name in sorted(names):
                with check(f"ortops{name} in {page.name}"):
                    if there or not name.startswith(".sklearn"):
                        look_up(name)


def look_up(name: str) -> None:
    """Raises an error if ``ortops<name>`` does not exist."""
    value: Any = importlib.import_module("ortops")
    for part in name.removeprefix(".").split("."):
        if not hasattr(value, part):
            assert inspect.ismodule(value)
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            value = getattr(value, part)


def test_methods_in_the_page_for_newcomers_exist() -> None:
    text = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    session = importlib.import_module("ortops").TrainingSession
    names = set(re.findall(r"\bsession\.([a-z_]+)", text))
    assert {"step", "save", "state", "predict", "gradients"} <= names
    assert {name for name in names if not hasattr(session, name)} == set()


CALLS = {  # of the page for newcomers: what stands there, and what has to be true of it
    'session.predict({"images": x})["logits"]': "CALL.shape == (8, 2)",
    "validation_split=0.2": "session.fit(batch, CALL, progress=False)",
    "session.evaluate([batch])": '"loss" in CALL',
    'session.step(batch, outputs=["loss"])': 'list(CALL) == ["loss"]',
    'gradients = session.gradients(batch)`, `gradients["fc2.weight"]': (
        'session.gradients(batch)["fc2.weight"].shape == (16, 2)'
    ),
    'session.state["w"]` of a trained weight': 'session.state["fc2.weight"].shape == (16, 2)',
    "initializers of `session.inference_model()`": (
        '"fc1.weight" not in session.state and "fc1.weight" in '
        "{each.name for each in session.inference_model().graph.initializer}"
    ),
    "is a list with a packed array for each type": (
        "[each.shape for each in session.gradients(batch).flat] == [(32,)]"
    ),
    'groups={"*.bias": {"weight_decay": 0.0}}': (
        "ortops.build_training_model(model, loss=loss, optimizer='AdamW', "
        'groups={"fc2*": {"weight_decay": 0.0}})'
    ),
    "ortops.find_batch_size(session, data)": "ortops.find_batch_size(session, batch) == 8",
    "fit(accumulate=k)": "session.fit([batch, batch], accumulate=2, progress=False)",
    "fit(detect_anomaly=True)": "session.fit(batch, detect_anomaly=True, progress=False)",
    "fit(fast_dev_run=True)": "session.fit(batch, fast_dev_run=True, progress=False)",
    'TrainingSession(model, recompute="sqrt")': (
        'ortops.TrainingSession(session.save("t.onnx") or "t.onnx", recompute="sqrt")'
    ),
    "`ortops.surgery.name_output`; then `step` returns it": (
        '"Relu_output" in ortops.TrainingSession(ortops.build_training_model('
        'ortops.surgery.name_output(model, "Relu_output"), loss=loss, optimizer="SGD")).step(batch)'
    ),
    'session.inference_model(original="model.onnx")': "CALL.graph.output[0].name == 'logits'",
    "SoftmaxCrossEntropy(weights=[…])": "ortops.losses.SoftmaxCrossEntropy(weights=[1, 2])",
}


def test_calls_of_the_page_for_newcomers_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are written: the tables of the page are no examples, which run by themselves."""
    import ortops

    monkeypatch.chdir(tmp_path)
    text = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], {})  # writes model.onnx
    x = np.random.default_rng(0).standard_normal((8, 4), np.float32)
    model, loss = "model.onnx", "SoftmaxCrossEntropy"
    names: dict[str, Any] = {"ortops": ortops, "model": model, "loss": loss, "x": x}
    names["batch"] = {"images": x, "labels": np.arange(8) % 2}
    trainable = ortops.build_training_model(model, loss=loss, optimizer="Adam", trainable=["fc2*"])
    names["session"] = ortops.TrainingSession(trainable)
    with all_violations() as check:
        for call, expression in CALLS.items():
            with check(call):
                assert call in text
                assert eval(expression.replace("CALL", call), names)


def test_examples_of_docstrings_need_only_the_package() -> None:
    """An installation has no `models`."""
    package = Path(importlib.import_module("ortops").__file__ or "").parent
    needs = re.compile(r"^\s*(?:>>>|\.\.\.)\s+(?:from|import)\s+(?:models|tests|benchmarks)\b")
    lines = [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if needs.match(line)
    ]
    assert lines == []


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    text = index.read_text(encoding="utf-8")
    linked = {(DOCS / target.partition("#")[0]).resolve() for target in LINK.findall(text)}
    assert {page for page in DOCS.rglob("*.md") if page != index} <= linked


NO_TOPIC = (
    *("operators.md", "other_tools.md", "persona.md", "specification.md", "stability.md"),
    "tools_and_preferences.md",
)
"""Pages in the table of topics that are references, reports or worked examples."""


def test_pages_on_a_topic_end_with_their_limits() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    topics = LINK.findall(index[index.index("| topics |") :])
    pages = {name for name in topics if (DOCS / name).is_file()} - {*NO_TOPIC, "speed.md"}
    assert len(pages) > 15
    last = {
        name: headings((DOCS / name).read_text(encoding="utf-8"))[-1][1] for name in sorted(pages)
    }
    assert not {name: heading for name, heading in last.items() if not heading.startswith("Limits")}


def test_pages_ship_with_the_package() -> None:
    pages = resources.files("ortops") / "docs"
    assert (pages / "README.md").is_file()
    assert "\n| Conv | rule |" in (pages / "operators.md").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 125


# ------------------------------------------------------------------------------------- docstrings


def documented(name: str) -> dict[str, Any]:
    """Returns the classes and functions of a public module, and the methods of its session."""
    module = importlib.import_module(name)
    found: dict[str, Any] = {}
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            found[f"{module.__name__}.{name}"] = value
        if name == "TrainingSession":
            for inner, member in vars(value).items():
                if not inner.startswith("_"):
                    found[f"{module.__name__}.{name}.{inner}"] = member
    return found


def test_all_public_modules_are_looked_at() -> None:
    ortops = importlib.import_module("ortops")
    modules = {name for name in ortops.__all__ if inspect.ismodule(getattr(ortops, name))}
    assert modules
    assert {f"ortops.{name}" for name in modules} <= {
        each for each in MODULES if isinstance(each, str)
    }


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_an_example(module: str) -> None:
    missing = [
        name
        for name, value in documented(module).items()
        if not re.search(r"^ *Examples?:\n(.|\n)*>>> ", value.__doc__ or "", re.MULTILINE)
    ]
    assert [name for name in missing if name not in WITHOUT_EXAMPLE] == []


def test_reasons_are_needed() -> None:
    for name in WITHOUT_EXAMPLE:
        module = re.match(r"[a-z.]*[a-z](?=\.)", name)  # a class begins with a capital letter
        assert module
        value = documented(module[0])[name]
        assert ">>>" not in (value.__doc__ or ""), f"{name} has an example now"


def test_tests_of_the_guarantees_are_there() -> None:
    folder = ROOT / "tests"
    defined: dict[str, set[str]] = {}
    for path in folder.rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        defined[path.name] = set(names)
    page = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 40
    assert named <= set().union(*defined.values())
    for file, tests in re.findall(r"`(?:tests/)?(?:reliability/)?(test_\w+\.py)`(: [^;|]*)?", page):
        assert set(re.findall(r"`(test_\w+)`", tests)) <= defined[file], file


def test_pages_name_what_there_is_to_choose() -> None:
    """A new loss, optimizer, metric, schedule, callback or change to models is on its page."""
    missing = []
    for page, module, names in (
        ("losses", ortops.losses, ortops.losses.LOSSES),
        ("training", ortops.optimizers, ortops.optimizers.OPTIMIZERS),
        ("training", ortops.metrics, ortops.metrics.METRICS),
        ("training", ortops.schedules, ortops.schedules.__all__),
        ("training", ortops.callbacks, ortops.callbacks.__all__),
        ("surgery", ortops.surgery, ortops.surgery.__all__),
    ):
        text = re.sub(r"```.*?```", "", (DOCS / f"{page}.md").read_text("utf-8"), flags=re.DOTALL)
        shown = {
            word for code in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"\w+", code)
        }
        left = sorted({*names} - {*NOT_CHOSEN} - shown)
        missing += [f"{page}.md does not show {module.__name__}.{name}" for name in left]
    assert not missing, "\n".join(missing)


NOT_CHOSEN = ("Schedule", "check_steps", "Callback", "Record", "LearningRateCurve", "ChannelGroup")
"""What functions take or return, and base classes."""
