"""Attacks on a session by signals, and the oracle that tells whether what they leave is whole.

A *victim* is a session of a small linear model whose state after any number of steps is known
without ortops: `state_at` computes it in numpy. All products in it are by powers of two, and so
exact, which makes the rounded sums the same on every machine. `whole` reads off how many steps a
state has seen, or says how it is torn.

One process makes many *tries* on a victim (``python attacks.py VICTIM``, see `attack`). In each

1. a signal arrives once while an operation (`OPERATIONS`) runs, and its handler raises;
2. ``finally: session.save(path)`` runs, as in a program that wants to keep what it has;
3. what arrived has to be what the handler raised, and the state, the file and the step after that
   have to be those of a whole number of steps (`Try.problem`).

The signal comes in two ways. ``timer``: at a random time, as the system sends it. ``moment``: at
the n-th of the moments at which the interpreter can run a handler, which are the beginnings of
functions written in Python and the ends of those written in C; a profile function sees the same
ones. Many moments are no longer than a microsecond, so that timers hardly meet them.

The environment variable ORTOPS_SOAK, an integer, makes every attack that many times as long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx

import ortops
from ortops import Tape, op
from ortops.engine.execution.settings import Settings

SOAK = int(os.environ.get("ORTOPS_SOAK", "1"))
"""How many times as long as usual the attacks are."""

TRIES = {"timer": 2 * SOAK, "moment": 8 * SOAK}
"""How many tries there are of each operation and signal, by the way in which the signal comes."""

LONGEST = 300
"""How many steps a victim makes before it starts anew."""

HANGING = 30
"""Seconds after which a try, which takes milliseconds, counts as one that does not end."""

TESTS = Path(__file__).parent

Array = np.ndarray[Any, Any]


# ------------------------------------------------------------------------------------ the victim


@dataclass(frozen=True)
class Victim:
    """A kind of session.

    Attributes:
        shape: That of the weights.
        kernels: ``"auto"``, ``"onnx"``, ``"python"`` or ``"compiled"``.
        settings: How steps are executed.
    """

    shape: tuple[int, int] = (8, 12)
    kernels: Any = "onnx"
    settings: Settings | None = None

    def open(self, model: onnx.ModelProto | str | Path | None = None) -> ortops.TrainingSession:
        """Opens a session on a model or a file, by default on the model before its first step."""
        return ortops.TrainingSession(
            trainable(self.shape) if model is None else model,
            kernels=self.kernels,
            settings=self.settings,
        )

    def batch(self, done: int) -> dict[str, Array]:
        """Returns the batch of a step, given how many were made before it."""
        rows, columns = self.shape
        scale = 1 + done % 7
        x = np.stack([1 + np.arange(rows) % 3, 2 + np.arange(rows) % 2])
        targets = np.stack([scale + np.arange(columns) % 2, np.full(columns, scale)])
        return {"x": x.astype(np.float32), "targets": targets.astype(np.float32)}

    def batches(self, done: int, count: int) -> list[dict[str, Array]]:
        """Returns the batches of the next steps."""
        return [self.batch(number) for number in range(done, done + count)]

    def state_at(self, done: int) -> dict[str, Array]:
        """Returns the state after a number of steps."""
        rows, columns = self.shape
        values, velocities, totals, total_velocities = _recurrences()[done]
        cells = np.ix_(np.arange(rows) % 6, np.arange(columns) % 2)
        odd = np.arange(columns) % 2
        return {
            "w": values[cells],
            "w.V": velocities[cells],
            "b": totals[odd],
            "b.V": total_velocities[odd],
            "step": np.array(done),
        }

    def whole(self, arrays: Mapping[str, Array]) -> int:
        """Returns how many steps a state has seen.

        Raises:
            TornError: If it is not the state after any number of steps.
        """
        done = int(arrays["step"])
        if not 0 <= done < LONGEST + 100:
            raise TornError(f"step is {done}")
        wrong = [n for n, a in self.state_at(done).items() if not np.array_equal(arrays[n], a)]
        if wrong:
            raise TornError(f"{', '.join(wrong)} are not those after {done} steps")
        return done

    def whole_file(self, path: Path) -> int:
        """As `whole`, for a file."""
        return self.whole(read(path))

    def count(self, session: ortops.TrainingSession) -> int:
        """As `whole`, for a session."""
        return self.whole(dict(session.state))


VICTIMS = {
    "small": Victim(),
    "chunks": Victim(settings=Settings(joined=-1, chunk=16, threads=2)),
    "large": Victim((512, 520)),  # more than 2¹⁸ weights
    "python": Victim(kernels="python"),
    "large python": Victim((512, 520), kernels="python"),
    "compiled": Victim(kernels="compiled"),
    "compiled chunks": Victim(
        kernels="compiled", settings=Settings(joined=-1, chunk=16, threads=2)
    ),
    "compiled later": Victim(
        kernels="auto", settings=Settings(compiled_after=(7, 0.0), compiled_share=-1.0)
    ),
    "chunks compiled later": Victim(
        kernels="auto",
        settings=Settings(
            joined=-1, chunk=16, threads=2, compiled_after=(7, 0.0), compiled_share=-1.0
        ),
    ),
}
"""The kinds of sessions: one for each way in which steps are executed."""

KINDS = [
    name
    for name, kind in VICTIMS.items()
    if SOAK > 1 or name != "large python"
    if kind.kernels not in ("auto", "compiled") or importlib.util.find_spec("llvmlite")
]
"""The names of those that tests attack."""


class TornError(AssertionError):
    """A state that is not the one after any number of steps."""


@functools.cache
def trainable(shape: tuple[int, int]) -> onnx.ModelProto:
    """Returns y = x w + b with the loss Σ y · targets, to be trained by Momentum from zeros."""
    with Tape(name="linear") as tape:
        x = tape.input("x", np.float32, ["batch", shape[0]])
        w = tape.initializer("w", np.zeros(shape, np.float32))
        b = tape.initializer("b", np.zeros(shape[1:], np.float32))
        tape.output(x @ w + b, "y")
    return ortops.build_training_model(
        tape.model(),
        loss=lambda prediction, targets: op.ReduceSum(prediction * targets, keepdims=0),
        optimizer=ortops.optimizers.Momentum(2.0**-6, alpha=0.5, beta=1.0),
    )


@functools.cache
def _recurrences() -> list[tuple[Array, Array, Array, Array]]:
    """Returns w, its velocity, b and its velocity after 0, 1, … steps, for rows 0–5, columns 0–1.

    Weights of other rows and columns have the same batches, and so the same values.
    """
    small = Victim((6, 2))
    now = [np.zeros((6, 2), np.float32), np.zeros((6, 2), np.float32)]
    now += [np.zeros(2, np.float32), np.zeros(2, np.float32)]
    found = [tuple(now)]
    for done in range(LONGEST + 100):
        feeds = small.batch(done)
        slopes = feeds["x"].T @ feeds["targets"], feeds["targets"].sum(axis=0)  # small integers
        for place, slope in zip((0, 2), slopes, strict=True):
            velocity = now[place + 1] * np.float32(0.5) + slope
            now[place + 1] = velocity
            now[place] = now[place] - velocity * np.float32(2.0**-6)
        found.append(tuple(now))
    return found  # type: ignore[return-value]


def read(path: Path | str) -> dict[str, Array]:
    """Reads the state in a file, by onnx alone."""
    return read_model(onnx.load(path))


def read_model(model: onnx.ModelProto) -> dict[str, Array]:
    """Reads the state in a model, by onnx alone."""
    onnx.checker.check_model(model)
    graphs = [model.graph, *(info.algorithm for info in model.training_info)]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tensors}


# ------------------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Operation:
    """What is attacked.

    Attributes:
        run: Runs it, given a session.
        leaves: The numbers of steps that the session may have made afterwards.
        files: Those that the file ``saved.onnx`` may have.
    """

    run: Callable[[ortops.TrainingSession], object]
    leaves: set[int]
    files: set[int] = field(default_factory=set)


def _several(done: int) -> set[int]:
    return set(range(done, done + 6))


def _save(victim: Victim, done: int, other: int, path: Path) -> Operation:
    victim_file = victim.whole_file(path) if path.exists() else done
    return Operation(lambda session: session.save(path), {done}, {victim_file, done})


OPERATIONS: dict[str, Callable[[Victim, int, int, Path], Operation]] = {
    "step": lambda victim, done, other, path: Operation(
        lambda session: session.step(victim.batch(done)), {done, done + 1}
    ),
    "gradients and apply": lambda victim, done, other, path: Operation(
        lambda session: session.apply(session.gradients(victim.batch(done))), {done, done + 1}
    ),
    "step with reduce": lambda victim, done, other, path: Operation(
        lambda session: session.step(victim.batch(done), reduce=lambda gradients: None),
        {done, done + 1},
    ),
    "run_steps": lambda victim, done, other, path: Operation(
        lambda session: session.run_steps(victim.batches(done, 5)), _several(done)
    ),
    "fit": lambda victim, done, other, path: Operation(
        lambda session: session.fit(victim.batches(done, 5), progress=False), _several(done)
    ),
    "evaluate": lambda victim, done, other, path: Operation(
        lambda session: session.evaluate(victim.batches(done, 3)), {done}
    ),
    "save": _save,
    "state": lambda victim, done, other, path: Operation(
        lambda session: setattr(session, "state", victim.state_at(other)), {done, other}
    ),
    "reset": lambda victim, done, other, path: Operation(
        lambda session: session.reset(), {done, 0}
    ),
}
"""By name, given the steps that were made, another number of steps, and a file."""


# ------------------------------------------------------------------------------- signals and tries


class TookTooLongError(Exception):
    """What a handler raises that limits how long something may take."""


def _time_is_up(number: int, frame: FrameType | None) -> None:
    raise TookTooLongError(f"signal {number}")


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(f"signal {number}")


SIGNALS: dict[str, tuple[Any, type[BaseException]]] = {
    "SIGALRM": (_time_is_up, TookTooLongError),
    "SIGTERM": (_stop, SystemExit),
    "SIGINT": (signal.default_int_handler, KeyboardInterrupt),
}
"""By name the handler, and what it raises."""


@dataclass
class Try:
    """One attack.

    Attributes:
        operation: A name in `OPERATIONS`.
        signal: A name in `SIGNALS`.
        way: How the signal comes, ``"timer"`` or ``"moment"``.
        problem: What went wrong, if anything did.
    """

    operation: str
    signal: str
    way: str
    problem: str = ""


@dataclass(frozen=True)
class Ignored:
    """An exception that Python ignored, as it does in a callback of a weak reference.

    What a handler raises there is lost, which is nobody's fault where the callback is one of
    Python's own, as when it forgets a thread.

    Attributes:
        kind: Its class.
        where: What was called.
        in_package: Whether a function of the package was under way in it.
    """

    kind: type[BaseException] | None
    where: str
    in_package: bool

    @classmethod
    def read(cls, found: Any) -> Ignored:
        """Returns what `sys.unraisablehook` is told."""
        package = Path(ortops.__file__).parent
        files = [Path(frame.filename) for frame in traceback.extract_tb(found.exc_traceback)]
        ours = any(file.is_relative_to(package) for file in files)
        return cls(found.exc_type, f"{found.object!r} {[file.name for file in files]}", ours)


class _Sender:
    """A thread that sends the main thread signals.

    It is one for all tries: Python forgets threads that have ended in callbacks of weak references,
    in the main thread, and what a handler raises in one of these is lost, whoever it was meant for.
    """

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            delay, number = self.orders.get()
            time.sleep(delay)
            signal.pthread_kill(main, number)


class Attacker:
    """Makes tries on sessions of one kind.

    Args:
        victim: The kind.
        folder: Where files are written.
        seed: Determines what is random.
    """

    def __init__(self, victim: Victim, folder: Path, seed: int = 0) -> None:
        self._victim = victim
        self._folder = folder
        self._random = random.Random(seed)
        self._session = victim.open()
        self._done = 0
        self._install_handlers()
        self._ignored: list[Ignored] = []
        sys.unraisablehook = lambda found: self._ignored.append(Ignored.read(found))
        self._sender = _Sender()
        self._moments = {name: self._count_moments(name) for name in OPERATIONS}
        self._durations = {name: self._measure(name) for name in OPERATIONS}

    def _install_handlers(self) -> None:
        for name, (handler, _) in SIGNALS.items():
            signal.signal(getattr(signal, name), handler)

    def _operation(self, name: str) -> Operation:
        """Returns an operation that fits the present state."""
        if self._done >= LONGEST:
            self._session.state = self._victim.state_at(0)
            self._done = 0
        other = (self._done + self._random.randint(1, LONGEST)) % LONGEST
        path = self._folder / "saved.onnx"
        return OPERATIONS[name](self._victim, self._done, other, path)

    def _count_moments(self, name: str) -> int:
        """Counts the moments at which a signal could arrive during an operation."""
        count = 0
        for _ in range(2):  # what is made at the first time is made
            operation = self._operation(name)
            moments = itertools.count()
            with _profiled(lambda moments=moments: next(moments)):  # type: ignore[misc]
                operation.run(self._session)
            count = next(moments)
            self._done = self._victim.count(self._session)
        return count

    def _measure(self, name: str) -> float:
        """Returns how long an operation takes, in seconds."""
        operation = self._operation(name)
        begin = time.perf_counter()
        operation.run(self._session)
        duration = time.perf_counter() - begin
        self._done = self._victim.count(self._session)
        return duration

    def attempt(self, name: str, signal_name: str, way: str) -> Try:
        """Makes one try."""
        made = Try(name, signal_name, way)
        operation = self._operation(name)
        file = self._folder / "finally.onnx"
        file.unlink(missing_ok=True)
        caught: BaseException | None = None
        self._ignored.clear()
        try:
            try:
                if way == "moment":
                    self._run_until_a_moment(operation, signal_name, self._moments[name])
                else:
                    self._run_for_a_while(operation, signal_name, self._durations[name])
            finally:
                self._session.save(file)
        except BaseException as error:
            caught = error
        try:
            made.problem = _wrong_exception(signal_name, caught, self._ignored)
            self._check(operation, file)
        except Exception as error:
            made.problem += f"; {type(error).__name__}: {error}"
            self._session = self._victim.open()
            self._done = 0
        if made.problem:  # a handler that was left out of place would spoil the tries that follow
            self._install_handlers()
        return made

    def _run_until_a_moment(self, operation: Operation, signal_name: str, count: int) -> None:
        """Runs an operation; a signal arrives at one of the moments at which a handler can run."""
        number = getattr(signal, signal_name)
        left = iter([False] * self._random.randrange(count) + [True])

        def send() -> None:
            if next(left, False):
                signal.raise_signal(number)

        with _profiled(send):
            operation.run(self._session)
        if next(left, None) is not None:  # it took fewer moments than usual
            signal.raise_signal(number)

    def _run_for_a_while(self, operation: Operation, signal_name: str, duration: float) -> None:
        """Runs an operation; a signal arrives meanwhile, or soon after."""
        delay = self._random.uniform(1e-6, 1.2 * duration + 5e-5)
        if signal_name == "SIGALRM":
            signal.setitimer(signal.ITIMER_REAL, delay)
        else:
            self._sender.orders.put((delay, getattr(signal, signal_name)))
        operation.run(self._session)
        end = time.monotonic() + 10
        while time.monotonic() < end:  # the signal ends it
            time.sleep(1e-3)

    def _check(self, operation: Operation, file: Path) -> None:
        """Raises an error unless the session and its files are whole, and the session goes on."""
        victim, session = self._victim, self._session
        done = victim.count(session)
        if done not in operation.leaves:
            raise TornError(f"there are {done} steps, not one of {operation.leaves}")
        if (saved := victim.whole_file(file)) != done:
            raise TornError(f"the file saved at the end has {saved} steps, the session {done}")
        if session.steps_done != done:
            raise TornError(f"steps_done is {session.steps_done} after {done} steps")
        if operation.files:
            saved = victim.whole_file(self._folder / "saved.onnx")
            if saved not in operation.files:
                raise TornError(f"the file has {saved} steps, not one of {operation.files}")
        session.step(victim.batch(done))
        if (after := victim.count(session)) != done + 1:
            raise TornError(f"a step after {done} steps makes them {after}")
        self._done = done + 1


def _wrong_exception(
    signal_name: str, caught: BaseException | None, ignored: Sequence[Ignored]
) -> str:
    """Returns what is wrong with what arrived, if anything is.

    Args:
        signal_name: A name in `SIGNALS`.
        caught: What arrived.
        ignored: What Python ignored meanwhile.
    """
    expected = SIGNALS[signal_name][1]
    if type(caught) is expected:
        return ""
    lost = [each for each in ignored if each.kind is expected]
    if caught is None and lost and not any(each.in_package for each in lost):
        return ""
    where = "".join(f"; ignored in {each.where}" for each in lost)
    return f"{type(caught).__name__}({caught}) arrived in place of {expected.__name__}{where}"


@contextlib.contextmanager
def _profiled(function: Callable[[], object]) -> Iterator[None]:
    """Calls a function wherever the interpreter can run the handler of a signal."""

    def profile(frame: FrameType, event: str, argument: object) -> None:
        # A generator that is closed early begins anew here, but there no handler runs.
        begins = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR
        if begins or event == "c_return":
            function()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


# ------------------------------------------------------------------------------ processes of tries


@functools.cache
def attack(victim: str) -> list[Try]:
    """Makes all tries on sessions of a kind, in processes of their own.

    A try in which a process dies or hangs has that as its problem. It is the last one of its
    operation and signal; a new process goes on with the next ones.

    Args:
        victim: A name in `VICTIMS`.
    """
    tries: list[Try] = []
    left = [list(pair) for pair in itertools.product(OPERATIONS, SIGNALS)]
    while left:
        arguments = [str(TESTS / "attacks.py"), victim, json.dumps(left)]
        done = run_python(arguments, timeout=60 + 60 * SOAK)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        tries += [Try(**line) for line in lines if "problem" in line]
        if done.returncode == 0:
            break
        if not lines:
            raise AssertionError(_end(done))
        last = Try(**{"problem": "", **lines[-1]})
        last.problem = _end(done)
        tries.append(last)
        left = left[left.index([last.operation, last.signal]) + 1 :]
    return tries


def run_python(arguments: list[str], *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs Python where the package and the modules of tests can be imported.

    A process that does not end in time is killed; its return code is that of SIGKILL.
    """
    path = os.pathsep.join(
        [
            *map(str, (TESTS.parent / "without_torch", TESTS.parents[1], TESTS.parent, TESTS)),
            *filter(None, [os.getenv("PYTHONPATH")]),
        ]
    )
    command = [sys.executable, "-X", "faulthandler", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that what it forked ends with it
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            err = f"no end after {timeout} s\n{err}"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_code(code: str, *, timeout: float = 60) -> str:
    """Runs code next to this module; it must end well and in time.

    Returns:
        What it printed.
    """
    done = run_python(["-c", textwrap.dedent(code)], timeout=timeout)
    assert done.returncode == 0, _end(done)
    return done.stdout


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return f"the process ended with {done.returncode}: {done.stderr[:2000].strip()}"


def main(name: str, pairs: list[list[str]]) -> None:
    """Makes the tries on a kind of session, and prints a line before each and one after it.

    Args:
        name: A name in `VICTIMS`.
        pairs: Operations and signals.
    """
    with tempfile.TemporaryDirectory() as folder:
        attacker = Attacker(VICTIMS[name], Path(folder))
        sys.setswitchinterval(1e-4)  # a thread that sends a signal is not to wait for the other
        for operation, signal_name in pairs:
            for way, count in TRIES.items():
                for _ in range(count):
                    faulthandler.dump_traceback_later(HANGING, exit=True)
                    _say({"operation": operation, "signal": signal_name, "way": way})
                    _say(vars(attacker.attempt(operation, signal_name, way)))
        faulthandler.cancel_dump_traceback_later()


def _say(what: Mapping[str, str]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
