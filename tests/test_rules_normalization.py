"""Rules of normalizations against differences."""

import pytest
from dot_test import Case, check, normal, uniform


def batch_normalization(*shape: int, training_mode: int, **more) -> Case:
    channels = shape[1]
    inputs = [
        normal(*shape),
        normal(channels, seed=1),
        normal(channels, seed=2),
        normal(channels, seed=3),
        uniform(0.5, 2, channels, seed=4),
    ]
    attributes = {"training_mode": training_mode, "epsilon": 0.01, "momentum": 0.7}
    more = {"orders": 2, "outputs": 3 if training_mode else 1, **more}
    return Case("BatchNormalization", inputs, attributes, name=f"mode{training_mode}", **more)


CASES = [
    *(
        batch_normalization(*shape, training_mode=mode)
        for mode in (0, 1)
        for shape in [(4, 3), (2, 3, 4), (2, 3, 2, 3), (2, 2, 2, 1, 3)]
    ),
    Case("LayerNormalization", [normal(3, 5), normal(5, seed=1), normal(5, seed=2)], orders=2),
    Case(
        "LayerNormalization",
        [normal(2, 3, 4), normal(3, 4, seed=1)],
        {"axis": 1, "epsilon": 0.1},
        orders=2,
    ),
    Case(
        "LayerNormalization",
        [normal(2, 3, 4), normal(4, seed=1), normal(3, 1, seed=2)],
        {"axis": -2},
        name="broadcast",
    ),
]


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dot(case: Case, symbolic: bool) -> None:
    check(case, symbolic=symbolic)
