"""What happens to a session in a forked process, and when it is dropped."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest
from attacks import KINDS, VICTIMS, run_code
from internals import execution_of

forks = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Lets nothing be freed but what no longer has a reference."""
    VICTIMS["python"].open()  # optional imports that fail in others' packages keep their callers
    gc.collect()
    gc.disable()
    yield
    gc.enable()


USES = ("made", "stepped", "repeated", "fitted", "cut", "evaluated", "saved")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("used", USES)
@pytest.mark.parametrize("victim", KINDS)
@pytest.mark.usefixtures("no_collector")
def test_a_dropped_session_is_gone_at_once(
    victim: str, used: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With its memory and its threads, with no wait for the collector of cycles."""
    kind = VICTIMS[victim]
    session = kind.open()
    if used == "stepped":
        session.step(kind.batch(0))
    elif used == "repeated":
        session.run_steps(kind.batches(0, 3))
    elif used == "fitted":
        session.fit(kind.batches(0, 3), progress=False)
    elif used == "cut":
        session.apply(session.gradients(kind.batch(0)))
    elif used == "evaluated":
        session.evaluate(kind.batches(0, 3))
    elif used == "saved":
        session.save(tmp_path_factory.mktemp("dropped") / "saved.onnx")
        session.reset()
    alive = weakref.ref(session), weakref.ref(execution_of(session))
    del session
    assert [reference() for reference in alive] == [None, None]


IN_FORKED_PROCESSES = """
    import gc, multiprocessing, sys, traceback
    import attacks
    from ortops import OrtopsError

    kind = attacks.VICTIMS[{victim!r}]
    LEFT = {{"step": 3, "run_steps": 7, "fit": 7, "evaluate": 2, "save": 2, "state": 9, "reset": 0}}

    def frees():
        global session
        del session
        gc.collect()

    def keeps():
        pass

    def trains_its_own():
        own = kind.open()
        own.run_steps(kind.batches(0, 3))
        assert kind.count(own) == 3

    def goes_on(name):
        try:
            attacks.OPERATIONS[name](kind, 2, 9, attacks.Path("saved.onnx")).run(session)
        except OrtopsError as error:
            assert "fork" in str(error), error
        else:
            assert kind.count(session) == LEFT[name]

    session = kind.open()
    session.step(kind.batch(0))
    session.evaluate(kind.batches(0, 1))
    session.step(kind.batch(1))
    for function, *arguments in {works}:
        process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
        process.start()
        process.join(20)
        ended = process.exitcode
        if ended is None:
            process.kill()
        if ended != 0:
            how = "hangs" if ended is None else f"ends with {{ended}}"
            print(function.__name__, *arguments, how)
    session.step(kind.batch(2))  # the parent goes on
    assert kind.count(session) == 3
"""


def run_forked(victim: str, works: str) -> None:
    """Runs functions, each in a process forked from one that has a session."""
    assert run_code(IN_FORKED_PROCESSES.format(victim=victim, works=works), timeout=250) == ""


@pytest.mark.nightly(2)
@pytest.mark.slow
@forks
@pytest.mark.parametrize("victim", KINDS)
def test_a_forked_process_ends_with_a_parents_session(victim: str) -> None:
    """Its threads are not there to be waited for, neither when it is freed nor at the end."""
    run_forked(victim, "[(frees,), (keeps,), (trains_its_own,)]")


@pytest.mark.nightly(2)
@pytest.mark.slow
@forks
@pytest.mark.parametrize("victim", KINDS)
def test_a_parents_session_in_a_forked_process_works_or_says_why(victim: str) -> None:
    run_forked(victim, "[(goes_on, name) for name in LEFT]")
