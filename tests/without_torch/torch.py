"""Stands in for torch in processes of tests that need none.

onnxruntime_extensions imports both where it can, which takes longer than what such a process does.
"""

raise ImportError("left out in this process (tests/without_torch)")
