"""The end of the interpreter, copies, and others' custom ops."""

from __future__ import annotations

import copy
import pickle
import random
import signal
import sys
import textwrap
from collections.abc import Callable

import pytest
from attacks import KINDS, SOAK, VICTIMS, run_code, run_python

from ortops import OrtopsError, TrainingSession

pytestmark = pytest.mark.slow  # each test starts processes

SMALL = [name for name in KINDS if "large" not in name]
"""A large session ends as one in chunks does."""

PRELUDE = """
    import atexit, threading
    import attacks
    from ortops import OrtopsError

    kind = attacks.VICTIMS[{victim!r}]
    session = kind.open()
    session.step(kind.batch(0))
    assert kind.count(session) == 1

    def step_or_say_why():
        done = kind.count(session)
        try:
            session.step(kind.batch(done))
        except OrtopsError as error:  # not that of a kernel: nothing is wrong with the feeds
            assert "exit" in str(error), error
            assert kind.count(session) == done
        else:
            assert kind.count(session) == done + 1
"""


def run_with(victim: str, code: str) -> str:
    """Runs code after the prelude, in which a session makes a step; returns what it printed."""
    return run_code(PRELUDE.format(victim=victim) + code).strip()


@pytest.mark.nightly(1)
@pytest.mark.parametrize("victim", SMALL)
def test_a_step_at_exit_is_made_or_says_why(victim: str) -> None:
    """By a function of atexit, when threads can no longer be asked for anything."""
    shown = run_with(
        victim,
        """
    def last():
        step_or_say_why()
        session.save("last.onnx")
        assert kind.whole_file("last.onnx") == kind.count(session)
        print("whole")

    atexit.register(last)
    """,
    )
    assert shown == "whole"


@pytest.mark.nightly(1)
@pytest.mark.parametrize("victim", SMALL)
def test_a_step_of_a_finalizer_is_made_or_says_why(victim: str) -> None:
    """That of a global, which runs when nothing can be imported any more."""
    shown = run_with(
        victim,
        """
    class Last:
        def __init__(self):
            self.work = step_or_say_why
            self.say = print

        def __del__(self):
            self.work()
            self.say("whole")

    last = Last()
    """,
    )
    assert shown == "whole"


@pytest.mark.nightly(1)
@pytest.mark.parametrize("victim", SMALL)
def test_a_daemon_that_steps_neither_holds_up_the_end_nor_aborts_it(victim: str) -> None:
    code = """
    begun = threading.Event()

    def work():
        while True:
            session.step(kind.batch(0))
            begun.set()

    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(30)
    print("begun")
    """
    for _ in range(SOAK):  # it aborts only where the end meets a run of onnxruntime
        assert run_with(victim, code) == "begun"


# ------------------------------------------------------------- threads that are in onnxruntime

SLOW_END = """
    import os, signal, sys, threading, time
    import numpy as np
    import onnxruntime
    import ortops
    from ortops import op

    class Slow:
        def __del__(self, sleep=time.sleep):
            sleep(0.5)  # threads that return from onnxruntime now are ended

    slow = Slow()

    with ortops.Tape(name="model") as tape:
        x = tape.input("x", np.float32, ["batch", 8])
        w = tape.initializer("w", np.zeros((8, 12), np.float32))
        constant = folded = tape.initializer("c", np.full((800, 800), 1e-3, np.float32))
        for _ in range(4):
            folded = folded @ constant
        tape.output(x @ w + op.ReduceMean(folded, keepdims=0), "y")
    inference = tape.model()
    model = ortops.build_training_model(
        inference, loss="MeanSquaredError", optimizer="SGD", trainable=["w"]
    )
    batch = {"x": np.ones((2, 8), np.float32), "targets": np.ones((2, 12), np.float32)}

    def interrupt_after(seconds):
        def interrupt():
            for delay in (seconds, 10):  # the first is lost where Python ignores exceptions
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt, daemon=True).start()
"""
"""What makes threads that are cut off in onnxruntime likely.

Sessions of the models spend most of their time on constants, in onnxruntime, and the program ends
slowly.
"""

MAKING = {
    "training session": "ortops.TrainingSession(model)",
    "inference session": "ortops.InferenceSession(inference)",
    "evaluation": "ortops.TrainingSession(model).evaluate(batch)",
    "initial values": "ortops.TrainingSession(model).reset()",
}
"""What makes sessions of onnxruntime."""

interrupts = pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT")


@pytest.mark.nightly(1)
@interrupts
@pytest.mark.parametrize("what", MAKING)
def test_ctrl_c_while_a_session_is_made_ends_the_process_as_elsewhere(what: str) -> None:
    """With KeyboardInterrupt and the status of SIGINT, not by an abort."""
    rng = random.Random(what)
    for _ in range(2 * SOAK):
        code = f"""
    interrupt_after({rng.uniform(0.01, 0.3)})
    while True:
        {MAKING[what]}
    """
        done = run_python(["-c", textwrap.dedent(SLOW_END + code)])
        assert done.returncode == -signal.SIGINT, done.stderr
        assert "KeyboardInterrupt" in done.stderr


@pytest.mark.nightly(2)
@pytest.mark.parametrize("what", MAKING)
def test_a_daemon_that_makes_sessions_neither_holds_up_the_end_nor_aborts_it(what: str) -> None:
    code = f"""
    begun = threading.Event()

    def work():
        while True:
            {MAKING[what]}
            begun.set()

    threading.Thread(target=work, daemon=True).start()
    assert begun.wait(30)
    print("begun")
    """
    for _ in range(SOAK):
        assert run_code(SLOW_END + code).strip() == "begun"


def test_a_thread_that_fetches_batches_by_onnxruntime_does_not_abort_the_end() -> None:
    code = """
    from ortops.engine.training.prefetch import Prefetcher

    def batches():
        while True:
            yield onnxruntime.InferenceSession(inference.SerializeToString())

    fetched = Prefetcher(batches(), 100_000)
    next(fetched)
    print("begun")
    """
    for _ in range(SOAK):
        assert run_code(SLOW_END + code).strip() == "begun"


ENDLESS = """
    from ortops._common import uninterrupted

    uninterrupted.EXIT_SECONDS = {limit}
    interrupt_after(0.2)
    try:
        uninterrupted.run_uninterrupted(lambda: time.sleep(1000))
    except KeyboardInterrupt:
        {then}
"""


@interrupts
def test_exit_waits_for_a_thread_no_longer_than_it_says() -> None:
    code = textwrap.dedent(SLOW_END + ENDLESS.format(limit=1.5, then="print('interrupted')"))
    done = run_python(["-c", code])
    assert (done.returncode, done.stdout.strip()) == (0, "interrupted")
    assert done.stderr.count("waiting up to 1.5 s") == 1
    assert "has not finished in another thread after 1.5 s" in done.stderr


@interrupts
def test_a_second_ctrl_c_ends_the_wait() -> None:
    code = textwrap.dedent(SLOW_END + ENDLESS.format(limit=1000, then="interrupt_after(0.5)"))
    assert run_python(["-c", code]).returncode == -signal.SIGINT


# ----------------------------------------------------------------------------------- copies


def pickled(session: TrainingSession) -> TrainingSession:
    """Returns a session that went through pickle."""
    found: TrainingSession = pickle.loads(pickle.dumps(session))
    return found


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("victim", SMALL)
def test_a_copy_works_or_says_why(
    victim: str, way: Callable[[TrainingSession], TrainingSession]
) -> None:
    """One that works is a session of its own: two that share memory tear each other's steps."""
    kind = VICTIMS[victim]
    session = kind.open()
    session.step(kind.batch(0))
    copied, said = None, ""
    try:
        copied = way(session)
    except OrtopsError as error:
        said = str(error)
    if copied is None:
        assert "save" in said  # which gives a file, and that another session
    else:
        copied.step(kind.batch(1))
        assert (kind.count(copied), kind.count(session)) == (2, 1)
        assert (copied.steps_done, session.steps_done) == (2, 1)
    session.step(kind.batch(1))
    assert kind.count(session) == 2


OTHERS = """
    import onnxruntime, onnxruntime_extensions as extensions, ortops, attacks
    from ortops import OrtopsError

    kinds = extensions.PyCustomOpDef
    @extensions.onnx_op(
        op_type="ai.onnx.preview.training::Momentum",
        inputs=[kinds.dt_float, kinds.dt_int64, *[kinds.dt_float] * 3],
        outputs=[kinds.dt_float] * 2,
    )
    def momentum(*tensors):
        raise SystemExit("the kernel of another")

    kind = attacks.VICTIMS["python"]
    try:
        session = kind.open()
        session.step(kind.batch(0))
    except OrtopsError as error:
        assert "registered" in str(error), error
        assert "change the type" not in str(error), error  # nothing is wrong with the node
    else:
        assert kind.count(session) == 1
    plain = attacks.VICTIMS["small"].open()  # has no need of custom ops
    plain.step(kind.batch(0))
    assert kind.count(plain) == 1
"""


def test_anothers_kernel_of_the_domain_is_not_taken_for_ours() -> None:
    """A session with Python kernels works beside it or says why, one without them just works."""
    run_code(OTHERS)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_both_libraries_on_the_same_options_work_or_say_why(first: str) -> None:
    """Registered by the user and by ortops, in either order."""
    run_code(
        f"""
    import onnxruntime, onnxruntime_extensions as extensions, ortops, attacks
    from ortops import OrtopsError

    kinds = extensions.PyCustomOpDef
    @extensions.onnx_op(op_type="ai.onnx.contrib::Twice", inputs=[kinds.dt_float])
    def twice(x):
        return 2 * x

    options = onnxruntime.SessionOptions()
    works = [
        lambda: ortops.register_custom_ops(options),
        lambda: options.register_custom_ops_library(extensions.get_library_path()),
    ]
    for work in works if {first!r} == "ours" else reversed(works):
        work()
    kind = attacks.VICTIMS["python"]
    try:
        session = ortops.TrainingSession(
            attacks.trainable(kind.shape), kernels="python", sess_options=options
        )
        session.step(kind.batch(0))
    except OrtopsError as error:
        assert "registered" in str(error), error
        assert "change the type" not in str(error), error  # nothing is wrong with the node
    else:
        assert kind.count(session) == 1
    """
    )
