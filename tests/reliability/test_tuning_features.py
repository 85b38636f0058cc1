"""Any combination of options of `FineTuning`: losses and logits are those of PyTorch.

Which options there are, and what has to hold, says `tuning_features`. ORTOPS_FEATURES_SEED says
which combinations are drawn. A failure shows the simplest combination that fails:

    PYTHONPATH=tests:tests/reliability python -c "from tuning_features import *; check(Tuning(…))"
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import pytest
from attacks import SOAK
from feature_checks import failure_of

from ortops import OrtopsError
from ortops.llm.options import OF_LOSS, SHARED_FIT, TUNING, TUNING_FIT

pytestmark = pytest.mark.torch

SEED = int(os.environ.get("ORTOPS_FEATURES_SEED", "0"))
"""Determines which combinations are drawn."""

DRAWS = 150
"""How many combinations are drawn, which have every pair of values."""


@functools.cache
def drawn(seed: int) -> list[Any]:
    from tuning_features import SPACE

    return [*SPACE.draws(seed, DRAWS * SOAK)]


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("number", range(DRAWS * SOAK))
def test_any_combination_of_options(number: int) -> None:
    from tuning_features import SPACE, check

    failure = failure_of(drawn(SEED)[number], SPACE, check)
    assert failure is None, f"ORTOPS_FEATURES_SEED={SEED}\n{failure}"


@pytest.mark.slow
def test_every_pair_of_values_is_drawn() -> None:
    from tuning_features import SPACE

    missing = SPACE.legal_pairs()
    for draw in drawn(SEED):
        missing -= SPACE.pairs_of(draw)
    assert not missing


@pytest.mark.slow
def test_each_argument_is_an_axis_or_has_a_reason() -> None:
    from tuning_features import AXES, WITHOUT_AXIS

    known = {*TUNING, *OF_LOSS, *TUNING_FIT, *SHARED_FIT}
    assert known == {*(known & {*AXES}), *WITHOUT_AXIS}
    assert not {*WITHOUT_AXIS} & {*AXES}


REFUSED = [
    ({"rank": None, "loss": "DPO"}, "loss must be NextToken if rank=None"),
    ({"rank": None, "model": "int4"}, "rank=None trains all weights, but 'model.layers.0.attn.qkv"),
    ({"modules_to_save": "lm_head", "model": "int4"}, "'lm_head"),
    ({"modules_to_save": "lm_head", "loss": "DPO"}, "whole weights are trained"),
    ({"optimizer": "SGD", "weight_decay": True}, "weight_decay: optimizer SGD has none"),
    ({"padding": "left"}, "padding must be 'right', as "),
]
"""Combinations that are refused, with what is said."""


@pytest.mark.slow
@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_what_cannot_be_combined_is_refused(given: dict[str, Any], message: str) -> None:
    from tuning_features import SPACE, Tuning, check

    draw = Tuning(**given)
    assert not SPACE.is_legal(draw)
    with pytest.raises(OrtopsError, match=re.escape(message)):
        check(draw)


ONCE_WRONG = [{"loss": "DPO", "targets": "ends"}]  # the operator in front of it was unknown


@pytest.mark.slow
@pytest.mark.parametrize("given", ONCE_WRONG, ids=str)
def test_combinations_that_were_once_wrong(given: dict[str, Any]) -> None:
    from tuning_features import Tuning, check

    check(Tuning(**given))
