"""The suite in the runner of `onnx.backend.test`."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from ortops.conformance.files import read

__all__ = ["FolderTest"]


class FolderTest(Runner):
    """ONNX's ``BackendTest`` for the cases of a folder, in place of those of onnx.

    The data sets of graphs run; ONNX's runner knows no ``training_info``, so of such models it runs
    the inference graph. Cases that must be refused are expected failures.

    Args:
        backend: A class as `onnx.backend.base.Backend`.
        folder: A folder that `ortops.conformance.files.write` has written.
        parent_module: The name of the module that the test classes are in.

    Raises:
        ValueError: If a case tests nothing: ONNX's runner would pass it.

    Example:
        >>> import tempfile, unittest
        >>> from ortops.conformance import cases
        >>> from ortops.conformance.backends import Reference
        >>> from ortops.conformance.files import write
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(cases()[:2], folder)
        ...     result = unittest.TestResult()
        ...     _ = FolderTest(Reference, folder).exclude("_cuda").test_suite.run(result)
        >>> result.testsRun, result.errors, result.failures
        (4, [], [])
    """

    def __init__(
        self,
        backend: Any,
        folder: str | os.PathLike[str],
        parent_module: str | None = None,
    ) -> None:
        self.backend = backend
        self._parent_module = parent_module
        self._include_patterns = set()
        self._exclude_patterns = set()
        self._xfail_patterns = set()
        self._test_kwargs = {}
        self._test_items = defaultdict(dict)
        home = Path(folder)
        for each in read(home):
            if each.flaw:
                raise ValueError(f"{each.name}: {each.flaw}")
        for case in load_model_tests(data_dir=str(home.parent), kind=home.name):
            self._add_model_test(case, "Training")
        self.xfail("^test_refused_(?!training)")
