"""Several threads at one session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from attacks import KINDS, SOAK, VICTIMS, Victim, read_model

from ortops import TrainingSession

STEPS = 20


def work(victim: Victim, session: TrainingSession, path: Path) -> dict[str, Callable[[], object]]:
    """Returns what threads do, each many times, by name; every batch is that of step 0."""
    batch = victim.batch(0)
    return {
        "step": lambda: session.step(batch),
        "run_steps": lambda: session.run_steps([batch] * 3),
        "fit": lambda: session.fit([batch] * 2, progress=False),
        "evaluate": lambda: session.evaluate(batch),
        "save": lambda: session.save(path),
        "state": lambda: session.state["w"],
        "model": lambda: session.model(),
    }


MADE = {"step": 1, "run_steps": 3, "fit": 2}
"""How many steps each makes."""


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("victim", KINDS)
def test_threads_see_whole_steps_and_lose_none(victim: str, tmp_path: Path) -> None:
    """What they see are states that one thread alone goes through, and all steps are counted."""
    kind = VICTIMS[victim]
    alone = kind.open()
    total = STEPS * sum(MADE.values())
    states = [alone.state["w"].tobytes()]
    velocities = [alone.state["w.V"].tobytes()]
    losses = [alone.evaluate(kind.batch(0))["loss"]]
    for _ in range(total):
        alone.step(kind.batch(0))
        states.append(alone.state["w"].tobytes())
        velocities.append(alone.state["w.V"].tobytes())
        losses.append(alone.evaluate(kind.batch(0))["loss"])
    for round_ in range(SOAK):
        session = kind.open()
        works = work(kind, session, tmp_path / f"{round_}.onnx")
        begin = threading.Barrier(len(works))

        def repeated(
            name: str,
            begin: threading.Barrier = begin,
            works: dict[str, Callable[[], object]] = works,
        ) -> list[object]:
            begin.wait()
            return [works[name]() for _ in range(STEPS)]

        with ThreadPoolExecutor(len(works)) as pool:
            seen = dict(zip(works, pool.map(repeated, works), strict=True))
        assert session.steps_done == total
        assert session.state["w"].tobytes() == states[total]
        assert session.state["w.V"].tobytes() == velocities[total]
        assert {each["loss"] for each in seen["evaluate"]} <= set(losses)  # type: ignore[index]
        assert {each.tobytes() for each in seen["state"]} <= set(states)  # type: ignore[attr-defined]
        for model in seen["model"]:
            found = read_model(model)  # type: ignore[arg-type]
            done = int(found["step"])
            assert found["w"].tobytes() == states[done]
            assert found["w.V"].tobytes() == velocities[done]
        assert np.isfinite(session.step(kind.batch(0))["loss"])
