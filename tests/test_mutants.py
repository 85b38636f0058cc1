"""scripts/mutants.py finds what tests miss."""

import ast
import subprocess
from pathlib import Path

import pytest

from scripts import mutants

MODULE = """
def step(x: int, rate: float = 1.0) -> float:
    if x < 0:
        raise ValueError(f"x is {x + 1}")
    return rate * x - unseen(x)


def unseen(x: int) -> int:
    return x and 0
"""
SMALL = """
LIMIT = 1

def step(x: int) -> int:
    return -x
"""
TEST = """
from ortops.losses.loss import step

def test_step():
    assert step(1) == -1
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "ortops/__init__.py": "",
        "ortops/losses/__init__.py": "",
        "ortops/losses/loss.py": MODULE,
        "tests/test_losses.py": TEST,
        "pyproject.toml": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    return tmp_path


def test_every_kind_of_mutant_is_made_of_code_that_runs(checkout: Path) -> None:
    made = mutants.mutants(Path("ortops/losses/loss.py"))
    assert [" ".join(str(each).splitlines()[1].split()) for each in made] == [
        "1.0 -> (2.0)",
        "x < 0 -> (x <= 0)",
        "0 -> (1)",
        "rate * x - unseen(x) -> (rate * x + unseen(x))",
        "rate * x - unseen(x) -> (rate * x)",
        "rate * x -> (rate / x)",
        "rate * x -> (rate)",
        "x and 0 -> (x or 0)",
        "x and 0 -> (x)",
        "0 -> (1)",
    ]
    for each in made:
        assert ast.dump(ast.parse(each.source())) != ast.dump(ast.parse(MODULE))


def test_a_seed_determines_the_mutants(checkout: Path) -> None:
    assert mutants.draw(5, 3, ["losses"]) == mutants.draw(5, 3, ["losses"])
    assert mutants.draw(5, 3, ["losses"]) != mutants.draw(6, 3, ["losses"])


@pytest.mark.slow
def test_mutants_that_no_test_detects_survive(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = checkout / "ortops/losses/loss.py"
    module.write_text(SMALL)
    assert mutants.main(["--seed", "0", "--count", "2", "--package", "losses"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("--seed 0 --count 2\n")
    for expected in (
        "SURVIVED ortops/losses/loss.py:2: LIMIT = 1\n      1  ->  (2)\n",
        "killed   ortops/losses/loss.py:5: return -x\n      -x  ->  (x)\n",
        " CPU-seconds; ./scripts/test: FAILED tests/test_losses.py::test_step - assert 1 == -1",
        "\n1 killed, 1 survived, 0 unclear; ",
    ):
        assert expected in shown
    assert module.read_text() == SMALL


@pytest.mark.slow
def test_tests_that_fail_without_a_mutant_kill_none(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "tests/test_losses.py").write_text("def test_step():\n    assert 0")
    assert mutants.main(["--count", "2", "--skip", "1", "--package", "losses"]) == 1
    shown = capsys.readouterr().out
    assert "\nUNCLEAR  ortops/losses/loss.py:" in shown
    assert "::test_step - assert 0, without a mutant\n0 killed, 0 survived, 1 unclear; " in shown


def test_every_module_belongs_to_a_package_and_every_name_in_it_is_there() -> None:
    inhabited = {mutants.package_of(path) for path in mutants.modules()}
    assert inhabited == set(mutants.PACKAGES)
    root, missing = mutants.ROOT, []
    for name, package in mutants.PACKAGES.items():
        missing += [
            (name, part) for part in package.modules if not (root / "ortops" / part).exists()
        ]
        for each in package.tests:
            missing += [] if list((root / "tests").glob(f"{each}.py")) else [(name, each)]
    assert missing == []


def test_a_module_without_a_package_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"ortops/new\.py is in no package"):
        mutants.package_of(Path("ortops/new.py"))


def test_the_nearest_tests_come_first() -> None:
    first = {
        "ortops/graph/passes/blocked/kernels.py": "tests/test_blocked.py",
        "ortops/graph/autodiff/rules/pooling.py": "tests/test_rules_pooling.py",
        "ortops/graph/files/held_file.py": "tests/test_held_file.py",
    }
    for path, file in first.items():
        near = mutants.tests_of(Path(path))
        assert near[0] == path
        assert len(near) == len(set(near))
        assert near[1] == file
