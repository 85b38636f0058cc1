"""The Python custom ops, in sessions of plain onnxruntime."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from optimizer_cases import (
    ATTRIBUTE_SETS,
    FLOATS,
    OFFICIAL,
    a_update,
    assert_expected,
    float32,
    official_cases,
    with_defaults,
)

from ortops import optimizers
from ortops.engine import custom_ops
from ortops.engine.custom_ops import (
    DOMAIN,
    ErrorRecorder,
    errors_of_run,
    register_custom_ops,
    survives_as_text,
    take_errors,
)
from ortops.errors import KernelError
from ortops.optimizers import OPERATORS, Operator

# One node with attributes that survive as text; the second set of Adam has one that does not.
SETTINGS = {
    "Adagrad": ATTRIBUTE_SETS["Adagrad"],
    "Adam": [ATTRIBUTE_SETS["Adam"][0], {**ATTRIBUTE_SETS["Adam"][1], "beta": 0.75}],
    "Momentum": ATTRIBUTE_SETS["Momentum"],
}


def options(**settings: Any) -> onnxruntime.SessionOptions:
    chosen = onnxruntime.SessionOptions()
    for name, value in settings.items():
        setattr(chosen, name, value)
    register_custom_ops(chosen)
    return chosen


def model(
    name: str,
    attributes: dict[str, Any],
    *,
    count: int = 1,
    shape: tuple[int | str, ...] | None = None,
    r_dtype: Any = np.float32,
    x_dtype: Any = np.float32,
) -> bytes:
    """Returns a model of one-tensor nodes whose inputs are R, T, X0, G0, …, X1, G1, …"""
    r_type = helper.np_dtype_to_tensor_dtype(np.dtype(r_dtype))
    x_type = helper.np_dtype_to_tensor_dtype(np.dtype(x_dtype))
    states = OPERATORS[name].states
    inputs = [
        helper.make_tensor_value_info("R", r_type, []),
        helper.make_tensor_value_info("T", TensorProto.INT64, []),
    ]
    outputs, nodes = [], []
    for index in range(count):
        letters = [f"{letter}{index}" for letter in ("X", "G", *states)]
        new = [f"{letter}{index}_new" for letter in ("X", *states)]
        # Unless a shape is given, every tensor may have its own.
        inputs += [helper.make_tensor_value_info(letter, x_type, shape) for letter in letters]
        outputs += [helper.make_tensor_value_info(letter, x_type, shape) for letter in new]
        nodes.append(
            helper.make_node(
                name, ["R", "T", *letters], new, name=f"{name}{index}", domain=DOMAIN, **attributes
            )
        )
    graph = helper.make_graph(nodes, "updates", inputs, outputs)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


def session_of(name: str, attributes: dict[str, Any], **form: Any) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model(name, attributes, **form), options())


def feeds_of(name: str, *updates: dict[str, Any]) -> dict[str, Any]:
    feeds = {"R": updates[0]["r"], "T": updates[0]["t"]}
    for index, update in enumerate(updates):
        letters = ("X", "G", *OPERATORS[name].states)
        for letter, tensor in zip(letters, update["tensors"], strict=True):
            feeds[f"{letter}{index}"] = tensor
    return feeds


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the rule of Adam fail wherever X begins with a negative number."""

    def fragile(r: Any, t: Any, x: Any, g: Any, v: Any, h: Any, **attributes: Any) -> Any:
        if x[0] < 0:
            raise ZeroDivisionError("x is negative")
        return optimizers.adam(r, t, x, g, v, h, **attributes)

    take_errors()
    monkeypatch.setitem(OPERATORS, "Adam", _with_states_of_adam(fragile))
    yield
    assert take_errors() == []


def _with_states_of_adam(rule: Any) -> Operator:
    operator = Operator(rule)
    operator.__dict__["states"] = OPERATORS["Adam"].states
    return operator


def adam_feeds(sign: float = 1.0, *, size: int = 3, t: int = 2) -> dict[str, Any]:
    update = a_update("Adam", SETTINGS["Adam"][0], shape=(size,), t=t)
    update["tensors"][0] = np.float32(sign) * np.abs(update["tensors"][0])
    return feeds_of("Adam", update)


# --------------------------------------------------------------------------------------- values


@pytest.mark.quick(46)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("r_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("t", [0, 1, 1000])
@pytest.mark.parametrize("setting", [0, 1])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_follows_the_pseudo_code(
    name: str, setting: int, t: int, r_dtype: Any, x_dtype: Any
) -> None:
    attributes = SETTINGS[name][setting]
    update = a_update(name, attributes, t=t, r_dtype=r_dtype, x_dtype=x_dtype)
    session = session_of(name, attributes, r_dtype=r_dtype, x_dtype=x_dtype)
    assert_expected(name, session.run(None, feeds_of(name, update)), update)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_a_kernel_takes_any_shape(name: str, shape: tuple[int, ...]) -> None:
    attributes = SETTINGS[name][1]
    update = a_update(name, attributes, shape=shape)
    session = session_of(name, attributes, shape=shape)
    assert_expected(name, session.run(None, feeds_of(name, update)), update)


@pytest.mark.parametrize("size", [7, 8, 9])
def test_tensors_longer_than_a_block(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_ops, "_BLOCK", 4)
    attributes = SETTINGS["Adam"][1]
    update = a_update("Adam", attributes, shape=(2, size))
    session = session_of("Adam", attributes)
    assert_expected("Adam", session.run(None, feeds_of("Adam", update)), update)


@pytest.mark.parametrize("name", sorted(name for name in OFFICIAL if "multiple" not in name))
def test_an_official_case_passes_through_the_kernel(name: str) -> None:
    case = official_cases()[name]
    node = case["node"]
    session = session_of(node.op_type, with_defaults(node))
    names = [entry.name for entry in session.get_inputs()]
    results = session.run(None, dict(zip(names, case["inputs"], strict=True)))
    for result, want in zip(results, case["outputs"], strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-6)


def test_kernels_do_not_write_into_what_is_fed() -> None:
    feeds = adam_feeds()
    before = {name: array.copy() for name, array in feeds.items()}
    session = session_of("Adam", SETTINGS["Adam"][0])
    first, second = session.run(None, feeds), session.run(None, feeds)
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, before[name])
    for result, again in zip(first, second, strict=True):
        np.testing.assert_array_equal(result, again)


def test_a_value_that_two_nodes_read_is_updated_twice_from_the_same_start() -> None:
    """In place means in the kernel's own copy, also within a graph."""
    graph = onnx.load_from_string(model("Momentum", SETTINGS["Momentum"][0], count=2))
    graph.graph.node[1].input[2:] = graph.graph.node[0].input[2:]
    del graph.graph.input[5:]
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options())
    update = a_update("Momentum", SETTINGS["Momentum"][0])
    results = session.run(None, feeds_of("Momentum", update))
    assert_expected("Momentum", results[:2], update)
    assert_expected("Momentum", results[2:], update)


def test_infinity_and_nan_are_values() -> None:
    """A loss that diverged is no error of a kernel, and gives no warning."""
    feeds = adam_feeds()
    feeds["G0"] = np.array([np.inf, np.nan, 3e38], np.float32)
    with errors_of_run():
        x_new, v_new, h_new = session_of("Adam", SETTINGS["Adam"][0]).run(None, feeds)
    assert np.isnan(x_new[:2]).all()
    np.testing.assert_array_equal(h_new, [np.inf, np.nan, np.inf])
    assert np.isfinite(v_new[2])


def test_200_nodes() -> None:
    attributes = SETTINGS["Momentum"][1]
    rng = np.random.default_rng(1)
    updates = []
    for _ in range(200):
        update = a_update("Momentum", attributes)
        update["tensors"] = [rng.normal(size=(3,)).astype(np.float32) for _ in range(3)]
        updates.append(update)
    session = session_of("Momentum", attributes, count=200)
    results = session.run(None, feeds_of("Momentum", *updates))
    for index, update in enumerate(updates):
        assert_expected("Momentum", results[2 * index : 2 * index + 2], update)


# --------------------------------------------------------------------------- attributes as text


def test_survives_as_text_says_what_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    random = rng.random(150).astype(np.float32) ** 9
    rounded = [float(f"{value:.{digits}g}") for value in random[:60] for digits in (1, 3, 6)]
    special = [0.9, 0.999, 0.9999999, 1e-8, 1e-45, 3e38, -0.1, 0.0, 123456.0, 1234567.0, np.inf]
    values = [float32(value) for value in [*special, *rounded, *random]]
    arrived: dict[int, float] = {}

    def spy(r: Any, t: Any, x: Any, g: Any, h: Any, *, epsilon: float, **_: float) -> Any:
        arrived[int(x[0])] = epsilon
        return x, h

    operator = Operator(spy)
    operator.__dict__["states"] = ("H",)
    attributes = SETTINGS["Adagrad"][0]
    proto = onnx.load_from_string(model("Adagrad", attributes, count=len(values)))
    for node, value in zip(proto.graph.node, values, strict=True):
        next(a for a in node.attribute if a.name == "epsilon").f = value
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options())
    feeds = {"R": np.asarray(0.1, np.float32), "T": np.asarray(0, np.int64)}
    for index in range(len(values)):
        feeds |= {f"{letter}{index}": np.array([index], np.float32) for letter in "XGH"}
    monkeypatch.setitem(OPERATORS, "Adagrad", operator)
    with errors_of_run():
        session.run(None, feeds)
    assert [survives_as_text(value) for value in values] == [
        arrived[index] == value for index, value in enumerate(values)
    ]
    assert {survives_as_text(value) for value in rounded} == {True}
    assert {survives_as_text(value) for value in (0.123456789, 0.9999999, np.nan)} == {False}


# --------------------------------------------------------------------------------------- errors


@pytest.mark.usefixtures("failing")
def test_a_plain_session_shows_nan_and_the_error_can_be_taken() -> None:
    session = session_of("Adam", SETTINGS["Adam"][0])
    results = session.run(None, adam_feeds(-1))
    for result in results:
        assert result.shape == (3,)
        assert result.dtype == np.float32
        assert np.isnan(result).all()
    (error,) = take_errors()
    assert isinstance(error, KernelError)
    assert str(error) == (
        "Adam node (name unknown): the update rule raised ZeroDivisionError: x is negative,"
        " for R (), T (), X (3,), G (3,), V (3,), H (3,); the outputs of this run are invalid"
    )
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert np.isfinite(session.run(None, adam_feeds())[0]).all()


@pytest.mark.usefixtures("failing")
def test_a_guarded_run_raises_and_names_the_nodes() -> None:
    session = session_of("Adam", SETTINGS["Adam"][0])
    for nodes, where in [
        ({"Adam": ["update"], "Momentum": ["other"]}, "Adam node 'update'"),
        ({"Adam": ["a", "b"]}, r"Adam node \(one of 'a', 'b'\)"),
        ({"Adam": [str(number) for number in range(12)]}, r"\(one of '0', .*, '9', …\)"),
    ]:
        message = f"{where}: the update rule raised ZeroDivisionError"
        with pytest.raises(KernelError, match=message), errors_of_run(nodes):
            session.run(None, adam_feeds(-1))
    with errors_of_run({"Adam": ["update"]}):
        assert np.isfinite(session.run(None, adam_feeds())[0]).all()


@pytest.mark.usefixtures("failing")
def test_several_errors_of_one_run_are_counted() -> None:
    session = session_of("Adam", SETTINGS["Adam"][0], count=3)
    one = a_update("Adam", SETTINGS["Adam"][0], shape=(3,))
    one["tensors"][0] = -np.abs(one["tensors"][0])
    with pytest.raises(KernelError) as caught, errors_of_run():
        session.run(None, feeds_of("Adam", one, one, one))
    assert caught.value.__notes__ == ["2 more kernel calls failed in this run"]


@pytest.mark.parametrize(
    ("wrong", "shapes"),
    [
        ({"G0": (4,)}, r"R \(\), T \(\), X \(3,\), G \(4,\), V \(3,\), H \(3,\)"),
        ({"H0": (1,)}, r"X \(3,\), G \(3,\), V \(3,\), H \(1,\)"),
        ({"X0": ()}, r"X \(\), G \(3,\), V \(3,\), H \(3,\)"),
    ],
)
def test_shapes_that_differ_at_run_time(wrong: dict[str, Any], shapes: str) -> None:
    feeds = adam_feeds()
    feeds |= {name: np.ones(shape, np.float32) for name, shape in wrong.items()}
    session = session_of("Adam", SETTINGS["Adam"][0])
    message = f"shape mismatch: .*{shapes}; R and T must be scalars"
    with pytest.raises(KernelError, match=message), errors_of_run():
        session.run(None, feeds)
    with errors_of_run():
        session.run(None, adam_feeds())


@pytest.mark.parametrize("name", ["R", "T"])
def test_r_and_t_that_are_not_scalars(name: str) -> None:
    proto = onnx.load_from_string(model("Adam", SETTINGS["Adam"][0]))
    for entry in proto.graph.input[:2]:
        entry.type.tensor_type.ClearField("shape")
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options())
    feeds = adam_feeds()
    feeds[name] = feeds[name].reshape(1)
    message = rf"{name} \(1,\).*R and T must be scalars"
    with pytest.raises(KernelError, match=message), errors_of_run():
        session.run(None, feeds)


def test_a_rule_with_too_few_results_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = _with_states_of_adam(lambda r, t, x, *rest, **attributes: (x,))
    monkeypatch.setitem(OPERATORS, "Adam", rule)
    session = session_of("Adam", SETTINGS["Adam"][0])
    with pytest.raises(KernelError, match="ValueError: zip"), errors_of_run():
        session.run(None, adam_feeds())


@pytest.mark.parametrize("request_to_stop", [KeyboardInterrupt, SystemExit])
def test_a_request_to_stop_is_raised_as_it_is(
    request_to_stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise request_to_stop

    monkeypatch.setitem(OPERATORS, "Adam", _with_states_of_adam(stop))
    session = session_of("Adam", SETTINGS["Adam"][0])
    with pytest.raises(request_to_stop), errors_of_run():
        session.run(None, adam_feeds())


@pytest.mark.usefixtures("failing")
def test_guards_can_be_nested() -> None:
    session = session_of("Adam", SETTINGS["Adam"][0])

    def run_guarded(sign: float) -> None:
        with errors_of_run():
            session.run(None, adam_feeds(sign))

    def run_after_another() -> None:
        with errors_of_run():
            run_guarded(1)
            session.run(None, adam_feeds(-1))

    with errors_of_run():
        with pytest.raises(KernelError):
            run_guarded(-1)
        run_guarded(1)
    with pytest.raises(KernelError) as caught:
        run_after_another()
    assert not hasattr(caught.value, "__notes__")  # the inner run added nothing


def test_an_error_of_onnxruntime_passes_a_guard() -> None:
    session = session_of("Adam", SETTINGS["Adam"][0])
    with pytest.raises(ValueError, match="X0"), errors_of_run():
        session.run(None, {})
    with errors_of_run():
        session.run(None, adam_feeds())


# -------------------------------------------------------------------------------------- threads


@pytest.mark.quick(1)
@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("shared", [True, False], ids=["one session", "two sessions"])
def test_concurrent_runs_get_their_own_errors(shared: bool) -> None:
    good = session_of("Adam", SETTINGS["Adam"][0])
    bad = good if shared else session_of("Adam", SETTINGS["Adam"][0])
    start = threading.Barrier(2)
    feeds = adam_feeds(size=1000)
    wanted = good.run(None, feeds)

    def train() -> None:
        start.wait()
        for _ in range(200):
            with errors_of_run():
                results = good.run(None, feeds)
            for result, want in zip(results, wanted, strict=True):
                np.testing.assert_array_equal(result, want)

    def fail() -> None:
        start.wait()
        for _ in range(200):
            with pytest.raises(KernelError), errors_of_run():
                bad.run(None, adam_feeds(-1, size=10))

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(train), pool.submit(fail)]:
            done.result()


@pytest.mark.usefixtures("failing")
def test_parallel_execution_loses_no_error() -> None:
    chosen = options(execution_mode=onnxruntime.ExecutionMode.ORT_PARALLEL, inter_op_num_threads=2)
    session = onnxruntime.InferenceSession(model("Adam", SETTINGS["Adam"][0], count=8), chosen)
    one = a_update("Adam", SETTINGS["Adam"][0], shape=(3,))
    one["tensors"][0] = np.abs(one["tensors"][0])
    feeds = feeds_of("Adam", *[one] * 8)
    with errors_of_run(anywhere=True):
        session.run(None, feeds)
    feeds["X5"] = -feeds["X5"]
    for anywhere in (True, False):
        with pytest.raises(KernelError), errors_of_run(anywhere=anywhere):
            session.run(None, feeds)


@pytest.mark.usefixtures("failing")
def test_an_asynchronous_run_has_a_recorder_of_its_own() -> None:
    session = onnxruntime.InferenceSession(
        model("Adam", SETTINGS["Adam"][0]), options(intra_op_num_threads=2)
    )
    recorder = ErrorRecorder({"Adam": ["update"]}, anywhere=True)
    finished = threading.Event()
    feeds = adam_feeds(-1)  # onnxruntime does not keep the arrays alive
    session.run_async(None, feeds, lambda *_: finished.set(), None)  # not listened to
    assert finished.wait(60)
    assert len(take_errors()) == 1

    finished.clear()
    recorder.start()
    session.run_async(None, feeds, lambda *_: finished.set(), None)
    with errors_of_run():  # a run of this thread is not blamed
        session_of("Adam", SETTINGS["Adam"][0]).run(None, adam_feeds())
    assert finished.wait(60)
    error = recorder.finish()
    assert isinstance(error, KernelError)
    assert str(error).startswith("Adam node 'update': the update rule raised Zero")


# --------------------------------------------- what can end a process, in processes of their own


def run_python(code: str) -> None:
    """Runs code next to these tests' own modules; it must end well and without a warning."""
    here = Path(__file__).parent
    folders = (here / "without_torch", here.parent, here)
    path = os.pathsep.join([*map(str, folders), *filter(None, [os.getenv("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_extension_is_imported_at_first_need() -> None:
    run_python("""
        import sys
        import onnxruntime
        import ortops.engine.custom_ops
        assert "onnxruntime_extensions" not in sys.modules
        ortops.engine.custom_ops.register_custom_ops(onnxruntime.SessionOptions())
        assert "onnxruntime_extensions" in sys.modules
    """)


@pytest.mark.slow
def test_an_exception_in_a_kernel_leaves_the_process_alive() -> None:
    run_python("""
        import numpy as np
        from ortops.engine import custom_ops
        from ortops.optimizers import OPERATORS
        from test_custom_ops import SETTINGS, _with_states_of_adam, adam_feeds, session_of

        def broken(*tensors, **attributes):
            raise RuntimeError("broken")

        session = session_of("Adam", SETTINGS["Adam"][0])
        right, OPERATORS["Adam"] = OPERATORS["Adam"], _with_states_of_adam(broken)
        assert np.isnan(session.run(None, adam_feeds())[0]).all()
        OPERATORS["Adam"] = right
        assert np.isfinite(session.run(None, adam_feeds())[0]).all()
        assert "RuntimeError: broken" in str(custom_ops.take_errors()[0])
    """)


@pytest.mark.slow
def test_sessions_created_later_leave_the_first_one_running() -> None:
    run_python("""
        import gc
        import importlib
        import numpy as np
        from ortops.engine import custom_ops
        from test_custom_ops import SETTINGS, adam_feeds, feeds_of, options, session_of
        from optimizer_cases import a_update

        first = session_of("Adam", SETTINGS["Adam"][0])
        wanted = first.run(None, adam_feeds())[0]
        for round in range(3):
            custom_ops.register_custom_ops(options())
            for name, settings in SETTINGS.items():
                other = session_of(name, settings[0], count=5)
                update = a_update(name, settings[0])
                other.run(None, feeds_of(name, *[update] * 5))
                assert (first.run(None, adam_feeds())[0] == wanted).all()
            del other
            gc.collect()
            importlib.reload(custom_ops)
        assert (first.run(None, adam_feeds())[0] == wanted).all()
        assert custom_ops.take_errors() == []
    """)


@pytest.mark.slow
def test_sessions_created_in_threads_at_once() -> None:
    run_python("""
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from test_custom_ops import SETTINGS, adam_feeds, session_of

        start = threading.Barrier(4)

        def train(_):
            start.wait()
            session = session_of("Adam", SETTINGS["Adam"][0])
            return [session.run(None, adam_feeds())[0].tolist() for _ in range(50)]

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(train, range(4)))
        assert all(result == results[0][0] for run in results for result in run)
    """)


def test_registering_twice_is_harmless() -> None:
    chosen = options()
    register_custom_ops(chosen)
    attributes = SETTINGS["Adagrad"][0]
    session = onnxruntime.InferenceSession(model("Adagrad", attributes), chosen)
    update = a_update("Adagrad", attributes)
    assert_expected("Adagrad", session.run(None, feeds_of("Adagrad", update)), update)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot send itself Ctrl-C there")
def test_an_interrupt_in_a_kernel_comes_out_of_the_run() -> None:
    """The kernel itself sends the signal, so it arrives while Python runs inside the session."""
    run_python("""
        import os
        import signal
        import ortops
        from ortops import optimizers
        from ortops.optimizers import OPERATORS
        from test_custom_ops import SETTINGS, _with_states_of_adam, adam_feeds, model

        finished = []

        def interrupted(*tensors, **attributes):
            os.kill(os.getpid(), signal.SIGINT)
            results = optimizers.adam(*tensors, **attributes)
            finished.append(True)
            return results

        session = ortops.InferenceSession(model("Adam", SETTINGS["Adam"][0]))
        own, OPERATORS["Adam"] = OPERATORS["Adam"], _with_states_of_adam(interrupted)
        for _ in range(3):
            try:
                session.run(None, adam_feeds())
            except KeyboardInterrupt:
                continue
            raise AssertionError("the interrupt got lost")
        OPERATORS["Adam"] = own
        session.run(None, adam_feeds())
        assert len(finished) == 3  # each run went on to its end
    """)
