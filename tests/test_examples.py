"""The worked examples of models/examples, on a subset: each reaches the figure that it states."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "models" / "examples"
MODELS = Path(__file__).parents[1] / ".models"
NAMES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
NEEDS = {
    "data_parallel": [pytest.mark.torch],
    "detection": [pytest.mark.slow],
    "federated_flower": [
        pytest.mark.needs("flwr>=1.20"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # in what Flower imports
        pytest.mark.slow,
    ],
    "sklearn_pipeline": [pytest.mark.sklearn],
    "text_direction": [
        pytest.mark.optional("matplotlib", "plot"),
        pytest.mark.fetched(MODELS / "ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
        pytest.mark.slow,
    ],
}
AT_MOST = ("error", "perplexity")
"""How the names of figures end that are the better the smaller they are."""

EXAMPLES = [pytest.param(name, marks=NEEDS.get(name, [])) for name in NAMES]


# The first one is in .ci/run: one that takes a second.
@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EXAMPLES, key=lambda each: each.values != ("saliency",)))
def test_reaches_its_figure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    example = importlib.import_module(f"models.examples.{name}")
    figures = example.main(quick=True)
    assert example.QUICK
    for key, bound in example.QUICK.items():
        assert figures[key] <= bound if key.endswith(AT_MOST) else figures[key] >= bound, figures
    assert any(figure.isdigit() for figure in capsys.readouterr().out)


@pytest.mark.parametrize("name", EXAMPLES)
def test_tells_how_it_is_called(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as exit_info:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert exit_info.value.code == 0
    assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_is_short(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 80


def test_all_are_in_the_gallery() -> None:
    gallery = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"[{name}]({name}.py)" not in gallery] == []
