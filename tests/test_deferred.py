"""What is imported, and when."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ortops.deferred import import_without


def _in_new_process(program: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_a_training_session_needs_no_sympy_and_symbolic_dimensions_still_work() -> None:
    _in_new_process("""
        import sys
        import ortops
        ortops.TrainingSession, ortops.build_training_model, ortops.lower
        assert "sympy" not in sys.modules
        import onnx_ir
        dim = onnx_ir.SymbolicDim("max(N, 3)") + 1
        assert dim.evaluate({"N": 5}) == 6
        import sympy
        assert isinstance(sympy.Symbol("x") + 1, sympy.Expr)
    """)


def test_sympy_stays_what_it_is_where_it_was_imported_before() -> None:
    _in_new_process("""
        import sympy
        import ortops
        ortops.TrainingSession
        import onnx_ir._core
        assert onnx_ir._core.sympy is sympy
    """)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules: ``costly``, and what the tests add."""
    (tmp_path / "costly_module.py").write_text("class Base: pass\ndef double(x): return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("costly_module", "frugal_module", "needy_module"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_the_costly_module_is_imported_when_it_is_used(modules: Path) -> None:
    (modules / "frugal_module.py").write_text(
        "import costly_module\ntaken = costly_module.double\n"
        "def kind(x): return isinstance(x, costly_module.Base)\n"
    )
    import_without("frugal_module", "costly_module")
    assert "costly_module" not in sys.modules
    frugal = sys.modules["frugal_module"]
    assert frugal.taken(3) == 6
    assert not frugal.kind(3)
    assert sys.modules["costly_module"].double is frugal.costly_module.double


def test_a_module_that_needs_the_costly_one_at_once_gets_it(modules: Path) -> None:
    (modules / "needy_module.py").write_text(
        "import costly_module\nclass Derived(costly_module.Base): pass\n"
    )
    import_without("needy_module", "costly_module")
    import needy_module  # type: ignore[import-not-found]

    assert needy_module.Derived.__base__ is sys.modules["costly_module"].Base
