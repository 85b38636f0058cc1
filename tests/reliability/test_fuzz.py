"""Files of every kind but models, changed at random: each is read, or refused by an error of ours.

test_hostile.py does the same with models. The cases are the same in every run, unless
ORTOPS_FUZZ_SEED says otherwise; `./scripts/test --soak` tries them for an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from attacks import SOAK
from fuzz_run import READERS
from training_models import affine

from models import llama
from ortops import lora

RUN = Path(__file__).with_name("fuzz_run.py")
SEED = os.environ.get("ORTOPS_FUZZ_SEED", "1")
CASES = 5 if SOAK == 1 else 10**9
HOUR = 3600


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of valid files for each kind."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("files")
    for kind in READERS:
        (folder / kind).mkdir()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 2)).astype(np.float32)
    labels = np.arange(6) % 3
    np.savez(folder / "npz" / "data.npz", x=x, labels=labels)
    rows = "\n".join(f"{a},{b},{c}" for (a, b), c in zip(x, labels, strict=True))
    (folder / "csv" / "data.csv").write_text(f"x1,x2,labels\n{rows}\n")
    table = pyarrow.table({"x": list(x), "labels": labels})
    pyarrow.parquet.write_table(table, folder / "parquet" / "data.parquet")
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir()
        image = Image.fromarray(rng.integers(0, 255, (9, 9, 3), np.uint8))
        for ending in ("png", "jpg", "bmp"):
            image.save(folder / "images" / name / f"1.{ending}")
    model = affine()
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    for kind in ("checkpoint", "checkpoint_npz", "checkpoint_torch"):
        onnx.save(model, folder / kind / "model.onnx")
    save_file(arrays, folder / "checkpoint" / "weights.safetensors")
    np.savez(folder / "checkpoint_npz" / "weights.npz", **arrays)
    adapted = lora.add(llama.llama(), rank=2)
    for kind in ("adapter", "peft"):
        onnx.save(adapted if kind == "adapter" else llama.llama(), folder / kind / "model.onnx")
    lora.save_adapter(adapted, folder / "adapter" / "trained.onnx_adapter")
    lora.to_peft(adapted, folder / "peft" / "peft")
    llama.write(folder / "llm")
    return folder


KINDS = [kind for kind in READERS if kind != "checkpoint_torch"]


@pytest.mark.slow
@pytest.mark.optional("pyarrow", "tables")
def test_unchanged_files_are_read(files: Path) -> None:
    for kind in KINDS:
        READERS[kind](files / kind)


@pytest.mark.slow
@pytest.mark.optional("pyarrow", "tables")
def test_changed_files_are_read_or_refused(files: Path) -> None:
    assert_refused(files, CASES, KINDS)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.optional("pyarrow", "tables")
def test_changed_files_of_torch_are_read_or_refused(files: Path) -> None:
    """Those of both formats of torch.save."""
    write_torch(files / "checkpoint_torch")
    READERS["checkpoint_torch"](files / "checkpoint_torch")
    assert_refused(files, 4 * CASES, ["checkpoint_torch"])


def write_torch(folder: Path) -> None:
    """Writes the weights of the model in a folder with torch.save, in both formats."""
    import torch

    model = onnx.load(folder / "model.onnx")
    state = {t.name: torch.tensor(onnx.numpy_helper.to_array(t)) for t in model.graph.initializer}
    state["half"] = next(iter(state.values())).bfloat16()
    state["sparse"] = torch.eye(3).to_sparse()
    torch.save({"state_dict": state, "epoch": 1}, folder / "new.pt")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)


def assert_refused(files: Path, cases: int, kinds: list[str]) -> None:
    """Asserts that changed files of some kinds raise what readers may raise, or nothing."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(RUN), str(files), SEED, str(cases), str(HOUR), *kinds]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HOUR + 600,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("]")]
    assert not [line for line in lines if line[0] == "wrong"]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    assert {line[1] for line in lines} == set(kinds)
