"""The npm package of the driver: packed, installed into a fresh project, bundled, and run."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest
from chromium import MODULES, WEB, run_page

import ortops
from models.lenet import lenet
from ortops import TrainingSession, build_training_model, export_step

ROOT = Path(__file__).parents[1]
SOURCE = Path(ortops.__file__).parent / "web"
PACKAGES = WEB / "node_modules"
BUNDLERS = ["webpack", "esbuild", "vite"]
BATCH = {"images": np.full((2, 1, 8, 8), 0.5, np.float32), "labels": np.array([1, 2])}


def run(*command: str | Path, folder: Path) -> str:
    """Runs a command, and returns what it printed."""
    found = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return build_training_model(lenet(), loss="SoftmaxCrossEntropy", optimizer="Adam")


@pytest.fixture(scope="module")
def project(model: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project into which the packed package is installed, with a step beside it."""
    if not (PACKAGES / "webpack").exists():
        pytest.skip("the bundlers are not there (./scripts/web_environment)")
    folder = tmp_path_factory.mktemp("project")
    (archive,) = json.loads(run("npm", "pack", "--json", SOURCE, folder=folder))
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    options = ("--offline", "--no-audit", "--no-fund", "--omit=peer", "--legacy-peer-deps")
    run("npm", "install", *options, folder / archive["filename"], folder=folder)
    for name in ("onnxruntime-web", "onnxruntime-node", "onnxruntime-common"):
        (folder / "node_modules" / name).symlink_to(PACKAGES / name)
    (folder / "library.js").write_text('export * from "ortops";\n')
    shutil.copy(MODULES / "worker.mjs", folder / "worker.js")
    shutil.copy(MODULES / "starts_worker.mjs", folder / "page.js")
    shutil.copy(MODULES / "types.mts", folder / "types.mts")
    export_step(model, folder / "step")
    (folder / "ort").symlink_to(PACKAGES / "onnxruntime-web" / "dist")
    return folder


@pytest.fixture(scope="module")
def loss(model: onnx.ModelProto) -> float:
    return float(TrainingSession(model).step(BATCH)["loss"])


@pytest.mark.slow
@pytest.mark.javascript
def test_the_package_has_the_driver_and_nothing_else(project: Path) -> None:
    (archive,) = project.glob("*.tgz")
    with tarfile.open(archive) as packed:
        found = {Path(name).name for name in packed.getnames()}
    assert found == {"package.json", "README.md", "ortops.mjs", "ortops.d.mts"}


def test_the_package_has_the_version_of_ortops() -> None:
    described = json.loads((SOURCE / "package.json").read_text())
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert described["version"] == tomllib.load(file)["project"]["version"]


@pytest.mark.nightly(1)
@pytest.mark.javascript
@pytest.mark.slow
@pytest.mark.parametrize("bundler", sorted(BUNDLERS))
def test_bundlers_take_the_package(bundler: str, project: Path, loss: float) -> None:
    printed = run("node", MODULES / "bundle.mjs", WEB, bundler, project, folder=project)
    assert float(printed.split()[-1]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.nightly(1)
@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.parametrize("bundler", BUNDLERS)
def test_a_bundle_trains_in_a_worker(bundler: str, project: Path, loss: float) -> None:
    run("node", MODULES / "bundle.mjs", WEB, bundler, project, folder=project)
    (project / f"{bundler}.html").write_text(
        f"<!doctype html><script type=module src={bundler}/page.js></script>"
    )
    report, _ = run_page(project, f"{bundler}.html", seconds=60)
    assert report["loss"] == pytest.approx(loss, rel=1e-5)
    assert report["bytes"] == (project / "step" / "model.onnx").stat().st_size
    assert report["refused"] == "FeedError"


@pytest.mark.javascript
@pytest.mark.slow
def test_typescript_accepts_the_types(project: Path) -> None:
    """That is TypeScript 5.7 or later, where a Blob takes only arrays in an ArrayBuffer."""
    run(
        *("node", PACKAGES / "typescript" / "bin" / "tsc", "--noEmit", "--strict"),
        *("--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"),
        *("--lib", "es2022,dom", "--skipLibCheck", "types.mts"),
        folder=project,
    )
