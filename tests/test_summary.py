"""The summary of `ortops check`: few lines for large models, all of them on request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import ortops
from ortops import op
from ortops.cli import main
from ortops.engine.check import check

HEIGHT = "2*((height//2 + 1)//2) + floor(height/4, 1)"


def large(blocks: int = 150) -> onnx.ModelProto:
    """A model with two parameters and one scalar constant in each of many blocks."""
    with ortops.Tape(name="large") as tape:
        x = tape.input("x", np.float32, ["batch", 2])
        for block in range(blocks):
            stage = f"stage{block % 3}.{block}"
            weight = np.eye(2, dtype=np.float32) * (1 + block / 100)
            x = x @ tape.initializer(f"{stage}.weight", weight)
            x = x + tape.initializer(f"{stage}.bias", np.full(2, block, np.float32))
            x = x * tape.initializer(f"{stage}.scale", np.float32(block + 2))
        tape.output(x, "y")
    return tape.model()


@pytest.mark.slow
def test_a_large_model_has_a_short_report() -> None:
    report = check(large())
    lines = str(report).splitlines()
    assert len(lines) < 60
    assert all(len(line) < 250 for line in lines)
    assert "trainable parameters: 900 in 300 tensors, by module (--all lists all)" in lines
    for stage in range(3):
        assert f"  stage{stage}  300 in 100 tensors" in lines
    assert any(line.startswith("  150 of this kind: stage0.0.scale is") for line in lines)
    everything = report.text(everything=True)
    assert all(f"  {name}  " in everything for name in report.parameters)
    assert all(f"  {name} " in everything for name in report.reasons)
    assert report.as_dict()["parameters"].keys() == report.parameters.keys()


@pytest.mark.slow
def test_all_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "large.onnx"
    onnx.save(large(), file)
    assert main(["check", str(file)]) == 0
    short = capsys.readouterr().out
    assert main(["check", str(file), "--all"]) == 0
    long = capsys.readouterr().out
    assert len(short.splitlines()) < 60 < 450 < len(long.splitlines())


def pixels(rank: int, last: str = "width") -> onnx.ModelProto:
    with ortops.Tape(name="pixels") as tape:
        x = tape.input("x", np.float32, ["batch", 3, HEIGHT, last][:rank])
        tape.output(
            op.Mul(x, tape.initializer("w", np.ones((3, *[1] * (rank - 2)), np.float32))), "y"
        )
    return tape.model()


def test_long_symbolic_dimensions_are_cut() -> None:
    report = check(pixels(4))
    line = next(line for line in str(report).splitlines() if line.startswith("output y"))
    assert line == "output y: FLOAT[batch,3,2*((height//2 + 1)//2) …,width]"
    assert f"output y: FLOAT[batch,3,{HEIGHT},width]" in report.text(everything=True)


@pytest.mark.slow
def test_losses_of_sequences_and_maps_fit() -> None:
    assert "CTC" in check(pixels(3)).fitting
    assert "Dice" in check(pixels(4)).fitting
    assert not {"CTC", "Dice"} & set(check(pixels(2)).fitting)
    assert "and weighted sums" in str(check(pixels(2)))
    for rank in (3, 4):
        for loss in check(pixels(rank)).fitting:
            if loss != "NextToken":  # whose classes are on the last axis
                assert not check(pixels(rank), loss=loss).problems
