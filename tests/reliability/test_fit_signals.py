"""SIGINT, SIGTERM and SIGHUP end `fit` after a step, and what was begun goes on from there."""

from __future__ import annotations

import sys

import pytest
from attacks import run_code

# Each test starts a process.
pytestmark = pytest.mark.slow

PRELUDE = """
    import logging, os, signal, sys, time
    import numpy as np
    import attacks
    from ortops import TrainingSession
    from ortops.engine.training.callback import Callback

    kind = attacks.VICTIMS["small"]
    batches = kind.batches(0, 12)
    arguments = dict(epochs=2, progress=False)
    said = []
    log = logging.Handler()
    log.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ortops").addHandler(log)

    class Send(Callback):
        def __init__(self, number, times=1):
            self.number, self.times, self.ends = number, times, []
        def on_step(self, record, session):
            if record.step == 17:
                for _ in range(self.times):
                    signal.raise_signal(self.number)
        def on_end(self, record, session):
            self.ends.append((record.epoch, record.batch, record.step, record.interrupted))

    class Save(Callback):
        saves = True
        def on_end(self, record, session):
            session.save("saved.onnx")

    def check_resumed(session):
        whole = kind.open()
        expected = whole.fit(batches, **arguments)
        found = session.fit(batches, resume=True, **arguments)
        assert found == expected
        assert session.steps_done == 24
        for name, array in whole.state.items():
            assert session.state[name].tobytes() == array.tobytes(), name
"""


def run_with(code: str) -> str:
    return run_code(PRELUDE + code).strip()


@pytest.mark.nightly(2)
@pytest.mark.parametrize(
    "name",
    [
        *("SIGINT", "SIGTERM"),
        pytest.param(
            "SIGHUP",
            marks=pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP"),
        ),
    ],
)
def test_a_signal_ends_it_after_the_step(name: str) -> None:
    code = """
    number, session, send = signal.NAME, kind.open(), Send(signal.NAME)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.NAME)
    before = [signal.getsignal(each) for each in numbers]
    try:
        session.fit(batches, callbacks=[Save(), send], **arguments)
    except (KeyboardInterrupt, SystemExit) as error:
        print(type(error).__name__, getattr(error, "code", ""))
    assert [signal.getsignal(each) for each in numbers] == before
    assert send.ends == [(2, 5, 17, "NAME")]
    assert session.steps_done == int(attacks.read("saved.onnx")["step"]) == 17
    assert said == [
        "training interrupted by NAME after step 17; call TrainingSession('saved.onnx').fit(…, "
        "resume=True) to continue"
    ], said
    check_resumed(TrainingSession("saved.onnx"))
    check_resumed(session)
    """
    shown = run_with(code.replace("NAME", name))
    statuses = {"SIGTERM": "SystemExit 143", "SIGHUP": "SystemExit 129"}
    assert shown == statuses.get(name, "KeyboardInterrupt")


def test_without_a_file_the_message_says_how_to_get_one() -> None:
    code = """
    session = kind.open()
    try:
        session.fit(batches, callbacks=[Send(signal.SIGINT)], **arguments)
    except KeyboardInterrupt:
        print(said[0])
    check_resumed(session)
    """
    assert run_with(code) == (
        "training interrupted by SIGINT after step 17; call fit(…, resume=True) of this session, "
        "or of the file that save(path) writes, to continue"
    )


def test_a_second_signal_arrives_at_once() -> None:
    code = """
    session, send = kind.open(), Send(signal.SIGINT, times=2)
    try:
        session.fit(batches, callbacks=[send], **arguments)
    except KeyboardInterrupt:
        print("at once")
    assert send.ends == [] and said == []
    check_resumed(session)
    """
    assert run_with(code) == "at once"


def test_a_signal_does_not_wait_for_an_evaluation() -> None:
    code = """
    session, send = kind.open(), Send(None, times=0)
    seen = []

    def metric(y_true, y_pred):
        seen.append(1)
        signal.raise_signal(signal.SIGINT)
        seen.append(2)
        return 0.0

    held_out = kind.batch(0)
    try:
        session.fit(batches, validation=held_out, metrics=[metric], callbacks=[send], **arguments)
    except KeyboardInterrupt:
        print(seen)
    assert send.ends == [(1, 12, 12, "SIGINT")], send.ends
    seen[:] = []
    metric.__code__ = (lambda y_true, y_pred: 0.0).__code__
    history = session.fit(
        batches, validation=held_out, metrics=[metric], resume=True, **arguments)
    assert [entry["validation_metric"] for entry in history] == [0.0, 0.0]
    assert session.steps_done == 24
    """
    assert run_with(code) == "[1]"


BLOCKED = """
    import ctypes, threading

    def in_python():
        time.sleep(1000)

    def in_c():
        ctypes.CDLL(None).sleep(1000)

    def in_a_lock():
        threading.Event().wait()

    def in_a_read():
        os.read(os.pipe()[0], 1)

    def kill(number, session, steps):  # when all that is there has been trained on
        def wait():
            while session.steps_done < steps:
                time.sleep(0.001)
            time.sleep(0.05)
            os.kill(os.getpid(), number)
        threading.Thread(target=wait, daemon=True).start()

    def blocking(block, last=5):  # batches of an epoch, of which the second never ends
        def generate(epoch):
            for number, batch in enumerate(batches):
                if epoch == 2 and number == last:
                    block()
                yield batch
        return generate

    class Blocking:
        def __init__(self, block):
            self.block, self.read = block, 0
        def __len__(self):
            return len(batches)
        def __getitem__(self, number):
            self.read += 1
            if self.read == 1 + 12 + 6:  # one is read to see what it is
                self.block()
            return batches[number]

    def ends(data, *, name="SIGINT", steps=17, place=(2, 5), **more):
        session, send = kind.open(), Send(None, times=0)
        kill(getattr(signal, name), session, steps)
        try:
            session.fit(data, callbacks=[send], **arguments, **more)
        except (KeyboardInterrupt, SystemExit) as error:
            assert type(error) is {"SIGINT": KeyboardInterrupt}.get(name, SystemExit)
        else:
            raise AssertionError("it did not end")
        assert send.ends == [(*place, steps, name)], send.ends
        expected = f"training interrupted by {name} after step {steps}; call "
        assert said[-1].startswith(expected), said
        return session
"""

WAYS = ["in_python", "in_c", "in_a_lock", "in_a_read"]


def run_blocked(code: str) -> None:
    run_code(PRELUDE + BLOCKED + code)


@pytest.mark.nightly(2)
@pytest.mark.parametrize("block", WAYS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_signal_does_not_wait_for_data(block: str, prefetch: int) -> None:
    """The next batch never comes; the session stands at a whole step, and goes on from it."""
    run_blocked(
        f"""
    for name in ("SIGINT", "SIGTERM"):
        check_resumed(ends(blocking({block}), name=name, prefetch={prefetch}))
    check_resumed(ends(Blocking({block}), prefetch={prefetch}))
    """
    )


def test_a_signal_does_not_wait_for_the_first_batch() -> None:
    """Of the first epoch, and of a later one."""
    run_blocked(
        """
    def never():
        in_python()
        yield
    for prefetch in (0, 2):
        check_resumed(ends(lambda: never(), steps=0, place=(1, 0), prefetch=prefetch))
        check_resumed(ends(blocking(in_python, 0), steps=12, place=(1, 12), prefetch=prefetch))
    """
    )


@pytest.mark.nightly(1)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_signal_does_not_wait_for_the_data_of_an_evaluation(prefetch: int) -> None:
    run_blocked(
        f"""
    def held_out():
        yield batches[0]
        in_c()
    session = ends(
        lambda: iter(batches), steps=12, place=(1, 12), validation=held_out, prefetch={prefetch})
    assert session.history == []
    check_resumed(session)
    """
    )


@pytest.mark.nightly(1)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_signal_between_accumulated_batches(prefetch: int) -> None:
    """What was read since the last step is read again."""
    run_blocked(
        f"""
    session = ends(blocking(in_python, 8), steps=6, place=(2, 6), accumulate=3, prefetch={prefetch})
    whole = kind.open()
    expected = whole.fit(batches, accumulate=3, **arguments)
    assert session.fit(batches, accumulate=3, resume=True, **arguments) == expected
    assert session.steps_done == 8
    for name, array in whole.state.items():
        assert session.state[name].tobytes() == array.tobytes(), name
    """
    )


@pytest.mark.nightly(2)
@pytest.mark.parametrize(
    "reaction", ["pass", "return", "raise RuntimeError('reading was cut off')", "raise KeyError"]
)
def test_data_that_catch_what_a_signal_raises(reaction: str) -> None:
    """Whatever they make of it, no batch that came after the signal is trained on."""
    run_blocked(
        f"""
    def generate(epoch):
        for number, batch in enumerate(batches):
            try:
                if epoch == 2 and number == 5:
                    in_python()
            except BaseException:
                {reaction}
            yield batch
    check_resumed(ends(generate))
    """
    )


def test_an_error_of_the_data_is_raised_as_ever() -> None:
    run_blocked(
        """
    class Mine(BaseException):
        pass
    def generate():
        yield batches[0]
        raise error
    for error in (Mine(), KeyboardInterrupt(), SystemExit(3), ValueError()):
        for prefetch in (0, 2):
            session, send = kind.open(), Send(None, times=0)
            try:
                session.fit(generate, callbacks=[send], prefetch=prefetch, **arguments)
            except BaseException as found:
                assert found is error
            assert session.steps_done == 1 and send.ends == [] and said == []
    """
    )


def test_a_handler_of_the_program_stays_its_own() -> None:
    code = """
    class Mine(Exception):
        pass

    def handler(number, frame):
        raise Mine

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    session, send = kind.open(), Send(signal.SIGTERM)
    session.fit(batches, callbacks=[send], epochs=2, progress=False)
    assert send.ends == [(2, 12, 24, "")]
    session, send = kind.open(), Send(signal.SIGINT)
    try:
        session.fit(batches, callbacks=[send], **arguments)
    except Mine:
        print("mine")
    assert signal.getsignal(signal.SIGINT) is handler
    assert send.ends == []
    check_resumed(session)
    """
    assert run_with(code) == "mine"


def test_in_another_thread_no_handler_is_touched() -> None:
    code = """
    import threading
    before = signal.getsignal(signal.SIGINT)
    seen = []

    class Look(Callback):
        def on_step(self, record, session):
            seen.append(signal.getsignal(signal.SIGINT) is before)

    session = kind.open()
    thread = threading.Thread(target=lambda: session.fit(batches, callbacks=[Look()], **arguments))
    thread.start()
    thread.join()
    print(len(seen), all(seen))
    """
    assert run_with(code) == "24 True"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that waits")
def test_a_process_that_is_told_to_end_does_so_by_itself() -> None:
    """From the outside, at any moment; the next process goes on."""
    code = """
    import random, subprocess, textwrap

    child = textwrap.dedent('''
        import pathlib, sys, time
        import attacks
        from ortops import TrainingSession
        from ortops.engine.training.callback import Callback

        class Save(Callback):
            saves = True
            def on_step(self, record, session):
                print(record.step, flush=True)
                time.sleep(0.002)
                if record.step >= 190:  # not over before the signal is sent
                    sys.stdin.read()
            def on_end(self, record, session):
                session.save("saved.onnx")

        kind = attacks.VICTIMS["small"]
        path = pathlib.Path("saved.onnx")
        session = kind.open(path if path.exists() else None)
        session.fit(
            kind.batches(0, 100), epochs=2, resume=True, callbacks=[Save()], progress=False)
    ''')
    ends = []
    for end in [143, 143, 143, 0]:
        process = subprocess.Popen(
            [sys.executable, "-c", child],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        time.sleep(random.uniform(0.01, 0.15))
        if end:
            process.terminate()
        process.communicate(timeout=60)
        ends.append(process.returncode)
    assert ends == [143, 143, 143, 0]
    session = TrainingSession("saved.onnx")
    whole = kind.open()
    expected = whole.fit(kind.batches(0, 100), epochs=2, progress=False)
    assert session.fit(kind.batches(0, 100), epochs=2, resume=True, progress=False) == expected
    assert session.state["w"].tobytes() == whole.state["w"].tobytes()
    print("whole")
    """
    assert run_with(code) == "whole"


def test_a_signal_that_comes_while_its_end_is_decided_is_not_forgotten() -> None:
    """As while several processes agree: then it ends the training after the next step."""
    code = """
    from dataclasses import replace
    from ortops.engine.training.trainer import Shared
    session, asked = kind.open(), []
    strategy = session._step_strategy()
    def agree(stopped, name, found):
        asked.append(name)
        if len(asked) == 6:
            signal.raise_signal(signal.SIGINT)
        return stopped, name, True
    shared = Shared(agree, lambda what, found: None, lambda total: total.result())
    session._step_strategy = lambda: replace(strategy, shared=shared)
    try:
        session.fit(batches, **arguments)
    except KeyboardInterrupt:
        print(session.steps_done < 12, asked[5:])
    """
    assert run_with(code).startswith("True ['', 'SIGINT'")


def test_a_handler_that_was_left_behind_takes_no_signal_of_another_fit() -> None:
    """An exception of another signal's handler may keep a call from taking its own away."""
    run_code(
        PRELUDE
        + """
    from ortops.engine.training import fitting
    from ortops.engine.training.interruption import Interruption

    class Left(Exception):
        pass

    def leave(self):
        raise Left

    release = Interruption.release
    for number, expected in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        session = kind.open()
        Interruption.release = leave
        try:
            session.fit(batches, **arguments)
        except Left:
            pass
        Interruption.release = release
        assert isinstance(signal.getsignal(number).__self__, Interruption)
        session = kind.open()
        send = Send(number)
        try:
            session.fit(batches, callbacks=[send], **arguments)
        except expected:
            pass
        else:
            raise AssertionError(f"{number} was lost")
        assert send.ends == [(2, 5, 17, signal.Signals(number).name)], send.ends
        assert not isinstance(getattr(signal.getsignal(number), "__self__", None), Interruption)
    """
    )
