"""Says what has changed of what onnxruntime does not run: operators in other float types.

Run it when the minimum version of onnxruntime rises, or a new version comes out, with that version
installed. It runs the cases that tests/test_float_types.py leaves out, and prints each that is not
refused for the reason in the table there (last: onnxruntime 1.32). Take out of the table what runs.
What is refused besides fails in the tests.

Usage: python scripts/onnxruntime_limits.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import onnxruntime
from test_float_types import REASONS, by_operator, form_of, outcome


def main() -> int:
    """Prints what has changed, and returns the exit status."""
    counts = {"cases": 0, "changes": 0}
    for cases in by_operator(refused=True).values():
        for case, type_names in cases:
            for type_name in type_names:
                counts["cases"] += 1
                expected, found = REASONS[form_of(case), type_name], outcome(case, type_name)
                if found != expected:
                    counts["changes"] += 1
                    now = found.splitlines()[0] if found else "it runs"
                    print(f"{case} in {type_name}: was: {expected}; now: {now}")
    print(
        f"onnxruntime {onnxruntime.__version__}: {counts['cases']} cases that were refused, "
        f"{counts['changes']} changed"
    )
    return int(counts["changes"] > 0)


if __name__ == "__main__":
    sys.exit(main())
