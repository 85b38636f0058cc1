"""The pages of an export: what they say when they cannot start, and whether they can be read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from chromium import CHROMIUM, page_of, run_page
from training_models import affine, affine_batch
from violations import all_violations

import ortops
from models.lenet import lenet
from ortops import build_training_model, export_step
from ortops.graph.safetensors import write_safetensors

PAGES = Path(ortops.__file__).parent / "web"


@pytest.mark.slow
@pytest.mark.browser
def test_pages_say_what_is_missing(tmp_path: Path) -> None:
    """In plain words, with the remedy; no page waits for ever."""
    rest = "is missing next to this page (the server answers 404): "
    exported = f"{rest}put all files there that ortops export-step … --web wrote"
    no_worker = "worker.mjs, or a file that it needs, cannot be loaded: put all files of the export"
    expected = {
        ("step.json", "index"): f"step.json {exported}",
        ("step.json", "classifier"): "There is no model next to this page. Choose a folder that ",
        ("step.onnx", "classifier"): f"step.onnx {exported}",
        # test.safetensors is missing as well: the first is named, whichever answer comes first
        ("train.safetensors", "index"): f"train.safetensors {rest}write the data there, ",
        (
            "common.mjs",
            "index",
        ): "This page could not start, because the server does not have common",
        ("ortops.mjs", "classifier"): no_worker,
        ("ort", "index"): "onnxruntime-web, which runs the model, cannot be loaded from http://",
        ("ort/ort-wasm", "classifier"): "onnxruntime-web cannot start (no available backend found.",
    }
    net = lenet((3, 8, 8), channels=(2, 2), hidden=4, classes=3)
    model = build_training_model(net, loss="SoftmaxCrossEntropy", optimizer="SGD")
    export_step(model, tmp_path / "whole", web=True)
    whole = page_of(tmp_path / "whole", "missing.mjs")
    for name in {name for name, _ in expected}:
        folder = tmp_path / name.replace("/", " ")
        folder.mkdir()
        for file in whole.iterdir():
            if file.name != name.partition("/")[0]:
                (folder / file.name).symlink_to(file)
    module = "ort/ort.wasm.min.mjs"
    (tmp_path / "ort ort-wasm/ort").mkdir()
    (tmp_path / "ort ort-wasm" / module).symlink_to(whole / module)
    pages = {
        f"{name.replace('/', ' ')}/{page}.html": text for (name, page), text in expected.items()
    }
    # Where nothing is missing, a model whose targets are no classes is opened, without an accuracy.
    numbers = tmp_path / "numbers"
    other = build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    export_step(other, numbers, web=True)
    (numbers / "ort").symlink_to(whole / "ort")
    for name in ("train", "test"):
        write_safetensors(numbers / f"{name}.safetensors", affine_batch(4))
    pages["numbers/index.html"] = "4 training rows, 4 test rows, on the CPU (WebAssembly)."
    report, _ = run_page(tmp_path, f"whole/test.html?pages=../{',../'.join(pages)}", seconds=120)
    with all_violations() as check:
        for page, text in pages.items():
            with check(page):
                said, states = report[f"../{page}"]
                assert said.startswith(text)
                assert "Running" not in states


@pytest.mark.slow
@pytest.mark.browser
def test_a_page_that_is_opened_as_a_file_says_what_to_do(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    options = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--dump-dom")
    page = (PAGES / "classifier.html").as_uri()
    dumped = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={tmp_path}", page],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    said = "This page was opened as a file, and browsers do not run its scripts then. Open it from"
    assert f'data-kind="error">{said}' in dumped
    assert '<main hidden="">' in dumped
    assert "Run <code>python -m http.server</code> in the folder of this page." in dumped


def test_the_pages_load_nothing_from_elsewhere_and_start_alike() -> None:
    sources = {name: (PAGES / f"{name}.html").read_text() for name in ("index", "classifier")}
    policy = re.compile(r'Content-Security-Policy" content="([^"]*)"')
    fallback = re.compile(r'<div id="messages">.*<div id="fallback">.*?</div>', re.DOTALL)
    for name, source in sources.items():
        scripts = re.findall(r"<script\b.*", source)
        module = f'<script type="module" src="{name}.mjs"></script>'
        assert scripts == ['<script src="start.js"></script>', module]
        assert re.findall(r'(?:src|href)="([^"]*:[^"]*)"', source) == []
        assert re.search(r'\son\w+="|\sstyle="|<style', source) is None  # the policy refuses them
    first, second = (policy.findall(source) for source in sources.values())
    assert first == second
    starts = [
        found[0].replace(f"{name}.html", "")
        for name, source in sources.items()
        if (found := fallback.search(source))
    ]
    assert len(starts) == 2
    assert starts[0] == starts[1]


def luminance(color: str) -> float:
    """Returns the relative luminance of a color ``#rrggbb``, as WCAG 2.2 defines it."""
    shares = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
    return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_colors_have_contrast_in_light_and_dark() -> None:
    """4.5 for text, and 3 for the edges of what can be operated, as WCAG 2.2 AA asks."""
    style = (PAGES / "style.css").read_text()
    colors = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", style))
    text = [
        *((ink, ground) for ink in ("ink", "quiet") for ground in ("page", "card", "soft")),
        *((ink, "card") for ink in ("accent", "good", "bad", "warn")),
        *(("good", "soft"), ("bad", "soft"), ("accent", "page"), ("on-accent", "accent")),
    ]
    edges = [("edge", "card"), ("accent", "card"), ("accent", "page")]
    with all_violations() as check:
        for pairs, least in ((text, 4.5), (edges, 3.0)):
            for pair in pairs:
                for scheme, at in (("light", 0), ("dark", 1)):
                    with check(f"{pair}, {scheme}"):
                        values = sorted(luminance(colors[name].split(", ")[at]) for name in pair)
                        assert (values[1] + 0.05) / (values[0] + 0.05) >= least
