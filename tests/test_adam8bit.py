"""Adam8bit on arrays and in sessions, next to the paper's quantization in float64.

The oracle builds the map of dynamic tree quantization from its definition and looks codes up in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ArgumentError, Tape, TrainingSession, build_training_model, op
from ortops.engine.execution.settings import Settings
from ortops.optimizers import Adam, Adam8bit, adam8bit

Array = np.ndarray[Any, Any]

SHAPES = {"fc1": (32, 130), "fc2": (130, 40), "bias": (130,)}  # 4160 = 16 · 256 + 64 elements
ROWS = 16
ALPHA, BETA = float(np.float32(0.9)), float(np.float32(0.999))  # as in a file


def intervals(signed: bool) -> tuple[Array, Array]:
    """Returns the boundaries of the intervals of non-negative shares, and their middles."""
    edges, middles = [], []
    for exponent in range(-6, 1):
        count = 2 ** (exponent + 6) * (1 if signed else 2)
        ends = np.linspace(0.1, 1, count + 1) * 10.0**exponent
        edges += list(ends[:-1])
        middles += list((ends[:-1] + ends[1:]) / 2)
    return np.array([*edges, 1.0]), np.array([0.0, *middles, 1.0])


def shares(signed: bool) -> Array:
    _, middles = intervals(signed)
    return np.array([*-middles[-2:0:-1], *middles]) if signed else middles


def quantized(values: Array, terms: Array, signed: bool) -> tuple[Array, Array, Array]:
    """Returns codes, scales, and how close values are to the ends of intervals, next to terms."""
    scale = np.abs(values).max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        share = np.where(scale > 0, values / scale, 0)
    edges, _ = intervals(signed)
    number = np.searchsorted(edges, np.abs(share), side="right")
    with np.errstate(all="ignore"):
        margin = np.min(np.abs(np.abs(share)[..., None] - edges), axis=-1) * scale / terms
    if signed:
        number = np.where(share < 0, 127 - np.minimum(number, 127), 127 + number)
    else:
        number = np.where(share > 0, np.maximum(number, 1), 0)
    return number, scale, margin


def expected(
    r: float, t: int, x: Array, g: Array, v: Array, v_scale: Array, h: Array, h_scale: Array
) -> tuple[Array, ...]:
    """Returns the next values, and for each element whether its codes are certain."""
    rows, columns = v.shape
    padded = np.zeros(rows * columns), np.zeros(rows * columns)
    for place, array in zip(padded, (x, g), strict=True):
        place[: x.size] = array.ravel()
    wide_x, wide_g = (place.reshape(rows, columns) for place in padded)
    old, new = ALPHA * shares(True)[v] * v_scale, (1 - ALPHA) * wide_g
    m = old + new
    n = BETA * shares(False)[h] * h_scale + (1 - BETA) * wide_g**2
    step = r / (1 - ALPHA**t) * m / (np.sqrt(n / (1 - BETA**t)) + 1e-8)
    v_new, v_max, first = quantized(m, np.abs(old) + np.abs(new), True)
    h_new, h_max, second = quantized(n, n, False)
    x_new = (wide_x - step).ravel()[: x.size].reshape(x.shape)
    return x_new, v_new, v_max, h_new, h_max, np.minimum(first, second)


def assert_follows(before: dict[str, Array], after: dict[str, Array], t: int, g: Array) -> None:
    """Asserts that states named as arguments of the rule follow the paper."""
    names = ("x", "v", "v_scale", "h", "h_scale")
    inputs = {n: a if a.dtype == np.uint8 else a.astype(np.float64) for n, a in before.items()}
    wanted = dict(
        zip((*names, "margin"), expected(1e-3, t, g=g.astype(np.float64), **inputs), strict=True)
    )
    precise = 1e-6 if before["x"].dtype == np.float32 else 1e-7  # shares are float32
    certain = ~(wanted["margin"] < 10 * precise)  # NaN in the zeros that fill up a block
    assert certain.mean() > 0.97
    for name in names:
        assert after[name].dtype == before[name].dtype
        if after[name].dtype == np.uint8:
            differs = after[name].astype(int) - wanted[name]
            assert np.abs(differs).max() <= 1
            np.testing.assert_array_equal(differs[certain], 0)
        elif name == "x":
            size = np.abs(before["x"]).max()
            np.testing.assert_allclose(after["x"], wanted["x"], rtol=0, atol=precise * size)
        else:
            np.testing.assert_allclose(after[name], wanted[name], rtol=10 * precise)


def test_codes_stand_for_the_shares_of_the_paper() -> None:
    """Read through the rule: without a gradient, moments are the old ones times their decay."""
    codes, scale = np.arange(256, dtype=np.uint8)[None], np.ones((1, 1))
    x, none = np.zeros(256), np.zeros(256)
    low = adam8bit(
        np.float64(1), np.int64(0), x, none, codes, scale, codes, scale, epsilon=1.0, beta=0.0
    )[0]
    assert len(set(shares(True))) == len(set(shares(False))) == 256
    np.testing.assert_allclose(-low / 0.9, shares(True), rtol=1e-6)
    both = adam8bit(
        np.float64(1), np.int64(0), x, none, codes, scale, codes, scale, alpha=1 - 1e-9, beta=1.0
    )
    np.testing.assert_array_equal(both[1][0, 1:], codes[0, 1:])  # -1 has no code of its own
    np.testing.assert_array_equal(both[3], codes)


@pytest.mark.nightly
@pytest.mark.quick(1)
@pytest.mark.parametrize("block", [64, 256, 2048])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(40, 130), (4096,), (3, 2, 1000)])
def test_arrays_follow_the_paper(shape: tuple[int, ...], dtype: Any, block: int) -> None:
    rng = np.random.default_rng(0)
    optimizer = Adam8bit(block_size=block)
    x = rng.normal(size=shape).astype(dtype)
    dtypes = optimizer.state_dtypes(x.dtype)
    state = {n: np.zeros(s, dtypes[n]) for n, s in optimizer.state_shapes(shape).items()}
    spread = 10 ** rng.uniform(-4, 0, shape)  # blocks hold gradients of different sizes
    for t in range(1, 9):
        g = (spread * rng.normal(size=shape)).astype(dtype)
        before = {"x": x, **{name.lower(): array for name, array in state.items()}}
        new = optimizer.update(np.asarray(1e-3, dtype), np.int64(t), x, g, *state.values())
        x, state = new[0], dict(zip(state, new[1:], strict=True))
        after = {"x": x, **{name.lower(): array for name, array in state.items()}}
        assert_follows(before, after, t, g)


@pytest.mark.parametrize("factor", [1e-4, 1e-6])
def test_an_update_is_small_if_a_gradient_vanishes(factor: float) -> None:
    """Also where it was small next to others in its block, so that its square has no code.

    The ratio of the moments is at most (1 - α) / √(1 - β) then, as without quantization.
    """
    optimizer = Adam8bit(min_8bit_size=1)
    x, g = np.zeros(256, np.float32), np.full(256, factor, np.float32)
    g[0] = 1
    shapes, dtypes = optimizer.state_shapes(x.shape), optimizer.state_dtypes(x.dtype)
    state = [np.zeros(shape, dtypes[name]) for name, shape in shapes.items()]
    for t in range(1, 20):
        new = optimizer.update(np.float32(1), np.int64(t), x, g, *state)
        assert np.abs(new[0] - x).max() < 1.1 * (1 - ALPHA) / np.sqrt(1 - BETA)
        x, *state = new
        g[1:] = 0


def a_model(dtype: Any = np.float32) -> onnx.ModelProto:
    rng = np.random.default_rng(3)
    with Tape(name="layers") as tape:
        x = tape.input("x", dtype, ["batch", SHAPES["fc1"][0]])
        fc1, fc2, bias = (
            tape.initializer(name, (rng.normal(size=shape) / 6).astype(dtype))
            for name, shape in SHAPES.items()
        )
        tape.output(op.Tanh(x @ fc1 + bias) @ fc2, "y")
    return tape.model()


def batches(count: int, dtype: Any = np.float32) -> list[dict[str, Array]]:
    rng = np.random.default_rng(4)
    target = rng.normal(size=(SHAPES["fc1"][0], SHAPES["fc2"][1]))
    found = []
    for _ in range(count):
        x = rng.normal(size=(ROWS, len(target)))
        found.append({"x": x.astype(dtype), "targets": np.tanh(x @ target).astype(dtype)})
    return found


def build(optimizer: Any = None, dtype: Any = np.float32, **settings: Any) -> onnx.ModelProto:
    optimizer = optimizer or Adam8bit()
    return build_training_model(
        a_model(dtype), loss="MeanSquaredError", optimizer=optimizer, **settings
    )


WAYS: dict[str, dict[str, Any]] = {
    "joined": {},
    "apart": {"settings": Settings(joined=-1)},
    "python": {"kernels": "python"},
}


@pytest.mark.nightly(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sessions_follow_the_paper(way: str) -> None:
    session = TrainingSession(build(), **WAYS[way])

    def state(name: str) -> dict[str, Array]:
        names = ("V", "V_SCALE", "H", "H_SCALE")
        rest = {key.lower(): session.state[f"{name}.{key}"].copy() for key in names}
        return {"x": session.state[name].copy(), **rest}

    for t, batch in enumerate(batches(6), 1):
        before = {name: state(name) for name in ("fc1", "fc2")}
        gradients = session.gradients(batch)
        session.step(batch)
        for name, old in before.items():
            assert_follows(old, state(name), t, gradients[name])


@pytest.mark.slow
def test_small_parameters_keep_float32_moments_as_adam_has_them() -> None:
    other = Adam(epsilon_after_correction=True)
    sessions = [TrainingSession(build(o)) for o in (Adam8bit(min_8bit_size=5000), other)]
    for batch in batches(3):
        for session in sessions:
            session.step(batch)
    first, second = (session.state for session in sessions)
    kinds = {name: array.dtype for name, array in first.items() if name.endswith((".V", ".H"))}
    assert kinds == {
        **dict.fromkeys(("fc1.V", "fc1.H", "bias.V", "bias.H"), np.float32),
        **dict.fromkeys(("fc2.V", "fc2.H"), np.uint8),
    }
    none = TrainingSession(build(Adam8bit(min_8bit_size=2**31)))
    for batch in batches(3):
        none.step(batch)
    assert none.state.keys() == second.keys()
    for name, array in second.items():
        np.testing.assert_array_equal(none.state[name], array)


def test_state_takes_a_quarter_of_adams_memory() -> None:
    def size(model: onnx.ModelProto) -> int:
        parts = model.training_info[0].algorithm.initializer
        return sum(onnx.numpy_helper.to_array(part).nbytes for part in parts)

    own, adams = (size(build(o, trainable=["fc*"])) for o in (Adam8bit(), Adam()))
    assert own / adams < 0.27  # 2 · (1 + 4 / 256) of 8 bytes, and parts of blocks


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ema_decay": 0.5, "clip_norm": 0.1},
        {"groups": {"fc2": {"learning_rate": 2e-3, "weight_decay": 0.125, "block_size": 64}}},
    ],
    ids=["plain", "averages and clipping", "groups"],
)
def test_resumes_exactly(way: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """And its gradients can be taken and applied, several steps be made at once, and be reset."""
    model, given = build(**settings), batches(6)
    unbroken = TrainingSession(model, **WAYS[way])
    first = {name: array.copy() for name, array in unbroken.state.items()}
    unbroken.run_steps(given[:3])
    unbroken.save(tmp_path / "saved.onnx")
    resumed = TrainingSession(tmp_path / "saved.onnx", **WAYS[way])
    for batch in given[3:]:
        unbroken.step(batch)
        resumed.apply(resumed.gradients(batch))
    assert unbroken.state["fc2.V"].dtype == np.uint8
    for name, array in unbroken.state.items():
        np.testing.assert_array_equal(resumed.state[name], array, strict=True)
    unbroken.reset()
    for name, array in first.items():
        np.testing.assert_array_equal(unbroken.state[name], array, strict=True)


def test_float16_keeps_masters_and_skips_what_overflows() -> None:
    session = TrainingSession(build(dtype=np.float16))
    batch = batches(1, np.float16)[0]
    before = session.state["fc2.V"].copy()
    session.step({**batch, "targets": np.full_like(batch["targets"], np.inf)})
    assert session.steps_done == 0
    np.testing.assert_array_equal(session.state["fc2.V"], before)
    while session.steps_done < 2:
        session.step(batch)
    assert session.state["fc2.master"].dtype == np.float32
    assert session.state["fc2.V_SCALE"].dtype == np.float32
    assert (session.state["fc2.V_SCALE"] > 0).all()


@pytest.mark.slow
@pytest.mark.optional("llvmlite", "fast")
def test_compiled_updates_say_what_they_leave(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ortops"):
        session = TrainingSession(build(), kernels="compiled")
    assert "'fc2' is not: it is not elementwise" in caplog.text
    assert "updates of 3 variables are compiled" in caplog.text  # the bias and its moments
    other = TrainingSession(build())
    for batch in batches(3):
        session.step(batch)
        other.step(batch)
    for name in SHAPES:
        np.testing.assert_allclose(session.state[name], other.state[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_step_graph_runs_without_ortops() -> None:
    model, batch = build(), batches(1)[0]
    session = TrainingSession(model)
    session.step(batch)
    graph = ortops.lower(ortops.step_graph(model, defaults=True))
    import onnxruntime

    plain = onnxruntime.InferenceSession(graph.SerializeToString())
    names = [value.name for value in plain.get_outputs()]
    found = dict(zip(names, plain.run(names, batch), strict=True))
    for name in ("fc2", "fc2.V", "fc2.H_SCALE"):
        assert found[f"{name}_new"].dtype == session.state[name].dtype
        np.testing.assert_allclose(found[f"{name}_new"], session.state[name], rtol=1e-5)


@pytest.mark.nightly(1)
@pytest.mark.slow
@pytest.mark.parametrize("block", [256, 2048])
def test_loss_is_that_of_adam(block: int) -> None:
    """Within one percent, after 300 steps that bring it down to a tenth."""
    losses = []
    for optimizer in (Adam8bit(3e-3, block_size=block), Adam(3e-3, epsilon_after_correction=True)):
        session = TrainingSession(build(optimizer))
        history = [float(session.step(batch)["loss"]) for batch in batches(300)]
        losses.append((history[0], np.mean(history[-50:])))
    (start, own), (_, adams) = losses
    assert adams < start / 4
    assert own == pytest.approx(adams, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1}, r"Adam8bit: alpha must be a finite number >= 0 and < 1, got 1.0"),
        ({"epsilon": 0}, r"Adam8bit: epsilon must be a finite number > 0, got 0.0"),
        ({"block_size": 8}, r"block_size must be an integer >= 16 and <= 65536, got 8"),
        ({"block_size": 256.0}, r"block_size must be an integer >= 16 and <= 65536, got 256.0"),
        ({"min_8bit_size": 0}, r"min_8bit_size must be an integer >= 1 and <= 2147483648, got 0"),
    ],
)
def test_values_outside_their_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Adam8bit(**settings)
