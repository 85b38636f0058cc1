"""Settings that hold for every test."""

import importlib.util
import os

import hypothesis
import pytest

# No deadline: how long an example takes depends on the machine, not on the code's correctness.
hypothesis.settings.register_profile("default", deadline=None)
# The same examples in every run, so that a red run can be repeated.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``torch`` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        skip = pytest.mark.skip(reason="torch is not installed: ./scripts/test --compare")
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(skip)
