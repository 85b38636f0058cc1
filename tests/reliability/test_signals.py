"""Whatever a handler of signals raises arrives as it is, and leaves a whole step."""

from __future__ import annotations

import numpy as np
import pytest
from attacks import KINDS, OPERATIONS, SIGNALS, TRIES, VICTIMS, TornError, attack


@pytest.mark.nightly(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPERATIONS))
@pytest.mark.parametrize("victim", KINDS)
def test_a_signal_arrives_and_leaves_a_whole_step(victim: str, name: str) -> None:
    """Of SIGINT, SIGTERM and SIGALRM, at any moment, and the session saves and goes on."""
    tries = [each for each in attack(victim) if each.operation == name]
    failed = [f"{each.signal} by {each.way}: {each.problem}" for each in tries if each.problem]
    shown = "\n".join(failed[:5])
    assert not failed, f"{len(failed)} of {len(tries)} tries failed, such as\n{shown}"
    assert len(tries) == len(SIGNALS) * sum(TRIES.values())


@pytest.mark.quick(2)
@pytest.mark.parametrize("victim", KINDS)
def test_the_oracle_is_right_and_sees_what_is_torn(victim: str) -> None:
    """Without it, the test above could pass on anything."""
    kind = VICTIMS[victim]
    session = kind.open()
    for done in range(12):
        assert kind.count(session) == done
        session.step(kind.batch(done))
    state = dict(session.state)
    for name in ("w", "w.V", "b", "b.V", "step"):
        array = np.array(state[name])
        array[(-1,) * array.ndim] = kind.state_at(11)[name][(-1,) * array.ndim]
        with pytest.raises(TornError):
            kind.whole(state | {name: array})
