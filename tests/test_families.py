"""Losses, optimizers and metrics are imported when they are first used, and all are listed."""

import importlib
import pkgutil
import subprocess
import sys

import pytest
from violations import all_violations

import ortops
from ortops import losses, metrics, optimizers


def test_each_file_and_each_of_its_names_is_listed() -> None:
    """The lists in packages are those of their files."""
    with all_violations() as check:
        for package in (losses, metrics, optimizers):
            for found in pkgutil.iter_modules(package.__path__):
                name = f"{package.__name__}.{found.name}"
                module = importlib.import_module(name)
                for each in getattr(module, "__all__", ()):
                    with check(f"{name}.{each}"):
                        assert each in package.__all__
                        assert getattr(package, each) is getattr(module, each)
                        assert each in dir(package)


def test_a_wrong_name_is_no_attribute() -> None:
    for package in (losses, metrics, optimizers):
        with pytest.raises(AttributeError, match=r"has no attribute 'MSELoss'"):
            _ = package.MSELoss
        with pytest.raises(ImportError):
            importlib.import_module(f"{package.__name__}.MSELoss")


def test_classes_have_their_public_names_and_explain_arguments() -> None:
    assert {loss.__module__ for loss in losses.LOSSES.values()} == {"ortops.losses"}
    for optimizer in optimizers.OPTIMIZERS.values():
        with pytest.raises(ortops.ArgumentError, match=r"use learning_rate="):
            optimizer(lr=0.1)  # type: ignore[call-arg]
    assert losses.LOSSES.get("compute") is None
    assert "resolve" not in losses.LOSSES


@pytest.mark.slow
def test_what_is_not_used_is_not_imported() -> None:
    code = """
import sys, ortops
from ortops import TrainingSession, build_training_model
loss, optimizer = ortops.losses.resolve("SoftmaxCrossEntropy"), ortops.optimizers.resolve("Adam")
assert type(loss) is ortops.losses.SoftmaxCrossEntropy
parts = ("losses", "optimizers", "metrics")
print(*sorted(m[7:] for m in sys.modules if m.startswith(tuple(f"ortops.{p}." for p in parts))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        *("losses.classification", "losses.compute", "losses.loss", "losses.scene"),
        *("losses.teacher", "metrics.metric", "optimizers.gradient_descent"),
        *("optimizers.moments", "optimizers.optimizer", "optimizers.squares"),
    ]
