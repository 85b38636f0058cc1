"""Updates that numba compiles give the bits of the standard operators, and say what they are.

The oracle is onnxruntime: the same session with ``kernels="onnx"``, and single nodes of it.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from running import plain_session
from test_precision import half
from training_models import affine, affine_batch, classifier, labelled

import ortops
from benchmarks import works
from ortops import TrainingSession, optimizers, schedules
from ortops.errors import OrtopsError, UnsupportedError
from ortops.execution import compilation
from ortops.execution.compilation import compile_all
from ortops.execution.settings import Settings
from ortops.execution.split import Group, Role
from ortops.execution.translation import translate
from ortops.optimizers import OPTIMIZERS
from ortops.passes import scaled_sums

WAYS = {
    "small": None,
    "one chunk": Settings(joined=-1),
    "chunks": Settings(joined=-1, chunk=256, threads=2),
}
STEPS = 4

compiled = pytest.mark.optional("numba", "compiled")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder for machine code that starts empty."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(compilation, "folder", lambda: folder / "ortops")
        yield folder / "ortops"


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles as programs do that have no Python to start: the same code, in half the time."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)


def assert_same_bits(model: onnx.ModelProto, batches: list[Any], **options: Any) -> TrainingSession:
    """Trains in both ways, and returns the compiled session."""
    plain = TrainingSession(model, **options)
    session = TrainingSession(model, kernels="compiled", **options)
    for number, batch in enumerate(batches):
        expected, found = plain.step(batch), session.step(batch)
        for name, array in expected.items():
            assert found[name].tobytes() == array.tobytes(), f"{name} in step {number}"
        for name, array in plain.state.items():
            assert session.state[name].tobytes() == array.tobytes(), f"{name} after {number}"
    assert plain.compiled == ()
    return session


def build(model: onnx.ModelProto, optimizer: Any, **options: Any) -> onnx.ModelProto:
    loss = options.pop("loss", "SoftmaxCrossEntropy")
    return ortops.build_training_model(model, loss=loss, optimizer=optimizer, **options)


def batches(scale: float = 1.0) -> list[Any]:
    found = []
    for number in range(STEPS):
        feeds = labelled((6,), seed=number)
        found.append({**feeds, "x": feeds["x"] * np.float32(scale)})
    return found


# ------------------------------------------------------------------------------------- same bits


@pytest.mark.usefixtures("in_this_process")
@compiled
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_gives_the_bits_of_standard_operators(name: str, way: str) -> None:
    model = build(classifier(hidden=64), OPTIMIZERS[name]())
    session = assert_same_bits(model, batches(), settings=WAYS[way])
    shapes = OPTIMIZERS[name]().state_shapes((2, 3))
    states = {"w1", "b1", "w2", *(f"w1.{state}" for state, shape in shapes.items() if shape)}
    if name in ("LAMB", "Adafactor"):  # norms and means of whole tensors
        assert session.compiled == ()
    elif name == "Muon":  # matrices are multiplied for its direction, and then moved along it
        assert {"w1", "b1", "w2"} <= set(session.compiled)
        assert "w1.V" not in session.compiled
    else:
        assert states <= set(session.compiled)
    assert "step" not in session.compiled


@compiled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adagrad", "Adam", "AdamW", "Lion"])
def test_float64(name: str, way: str) -> None:
    model = build(affine(dtype=np.float64), OPTIMIZERS[name](), loss="MeanSquaredError")
    feeds = [affine_batch(seed=seed, dtype=np.float64) for seed in range(STEPS)]
    session = assert_same_bits(model, feeds, settings=WAYS[way])
    assert {"w", "b"} <= set(session.compiled)
    assert session.state["w"].dtype == np.float64


@compiled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_parameters_of_16_bits_and_their_masters(kind: int, way: str) -> None:
    model = half(affine(), kind)
    options = {"clip_norm": 0.5, "clip_value": 0.25, "ema_decay": 0.5, "loss": "MeanSquaredError"}
    trainable = build(model, optimizers.Adam(0.02), **options)
    feeds = [
        {
            "x": np.round(4 * affine_batch(seed=seed)["x"]).astype(np.float32),
            "targets": affine_batch(seed=seed)["targets"],
        }
        for seed in range(STEPS)
    ]
    types = {t.name: t.type.tensor_type.elem_type for t in model.graph.input}
    if types["x"] == TensorProto.FLOAT16:
        feeds = [{**each, "x": each["x"].astype(np.float16)} for each in feeds]
    session = assert_same_bits(trainable, feeds, settings=WAYS[way])
    assert {"w", "w.master", "w.ema", "w.V", "w.H"} <= set(session.compiled)


@compiled
@pytest.mark.parametrize("way", WAYS)
def test_groups_schedule_clipping_decay_and_averages(way: str) -> None:
    rate = schedules.warmup_cosine(0.05, steps=10, warmup=2)
    model = build(
        classifier(hidden=64),
        optimizers.AdamW(rate, weight_decay=0.1),
        groups={"b*": {"weight_decay": 0.0, "learning_rate": 0.5}},
        clip_norm=0.05,
        clip_value=0.02,
        ema_decay=0.9,
    )
    session = assert_same_bits(model, batches(3.0), settings=WAYS[way])
    assert {"w1", "b1", "w1.ema", "b1.ema"} <= set(session.compiled)


@compiled
@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_are_no_numbers(way: str) -> None:
    feeds = batches()
    feeds[2]["x"][:, 0] = np.inf
    feeds[3]["x"][:, 1] = np.nan
    for optimizer in (optimizers.SGD(0.1), optimizers.AMSGrad(0.1), optimizers.Lion(0.1)):
        plain = TrainingSession(build(classifier(), optimizer), settings=WAYS[way])
        session = TrainingSession(plain._loaded.proto, kernels="compiled", settings=WAYS[way])
        for each in feeds:
            plain.step(each)
            session.step(each)
        for name, array in plain.state.items():
            np.testing.assert_array_equal(session.state[name], array, err_msg=name)


@compiled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_gradients_that_are_fed(name: str, way: str) -> None:
    work = works.Update(1500, tensors=3)
    feeds = [dict(each) for each in work.batches()] * 2
    for array in feeds[1].values():
        array.flags.writeable = False
    session = assert_same_bits(work.trainable(name), feeds, settings=WAYS[way])
    assert {"w0", "w1", "w2"} <= set(session.compiled)
    odd = {n: unaligned(array) for n, array in feeds[0].items()}
    other = TrainingSession(work.trainable(name), kernels="compiled", settings=WAYS[way])
    for each in (odd, *feeds[1:]):
        other.step(each)
    np.testing.assert_array_equal(other.state["w1"], session.state["w1"])


def unaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    result = memory.view(array.dtype)
    result[...] = array.reshape(-1)
    assert not result.flags.aligned
    return result.reshape(array.shape)


@compiled
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_applied_later(way: str) -> None:
    model = build(classifier(hidden=64), "Adam", clip_norm=0.1)
    whole, cut = (TrainingSession(model, kernels="compiled", settings=WAYS[way]) for _ in range(2))
    for each in batches():
        whole.step(each)
        cut.apply(cut.gradients(each))
    for name, array in whole.state.items():
        assert cut.state[name].tobytes() == array.tobytes(), name


@compiled
def test_run_steps_and_fit() -> None:
    model = build(classifier(), "Adam")
    one, other = (TrainingSession(model, kernels="compiled") for _ in range(2))
    losses = one.run_steps(batches())
    assert losses.tolist() == [other.step(each)["loss"].item() for each in batches()]


# --------------------------------------------------------------------------------- one operator

FLOATS = {TensorProto.FLOAT: np.float32, TensorProto.DOUBLE: np.float64}
MASKS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
NODES: dict[str, Any] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Max", "Min"), 2),
    **dict.fromkeys(("Sqrt", "Abs", "Neg", "Sign", "Identity"), 1),
    **dict.fromkeys(MASKS, 2),
}


def numbers(dtype: Any) -> np.ndarray[Any, Any]:
    info = np.finfo(dtype)
    special = [0, 1, 2.5, 0.1, info.tiny, info.smallest_subnormal, info.max, np.inf, np.nan]
    random = np.random.default_rng(0)
    wide = random.normal(size=500) * 10.0 ** random.integers(-30, 30, 500)
    return np.array([*special, *np.negative(special), *wide], dtype)


def run_both(
    nodes: list[onnx.NodeProto],
    inputs: list[np.ndarray[Any, Any]],
    kinds: list[int],
    result: int,
    scalars: int = 0,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns what onnxruntime and compiled code make of nodes that write "y" from a, b, c."""
    names = ["a", "b", "c"][: len(inputs)]
    size = max(array.size for array in inputs)
    shapes = [["n"]] * (len(inputs) - scalars) + [[]] * scalars
    infos = [
        helper.make_tensor_value_info(*each) for each in zip(names, kinds, shapes, strict=True)
    ]
    graph = helper.make_graph(
        nodes, "g", infos, [helper.make_tensor_value_info("y", result, ["n"])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (expected,) = plain_session(model).run(None, dict(zip(names, inputs, strict=True)))
    formula = ir.from_proto(model).graph
    for node in formula:
        for value in node.outputs:
            value.shape = value.shape or ir.Shape(["n"])
            if value.dtype is None:
                value.dtype = ir.DataType.BOOL if value.name == "less" else ir.DataType(result)
    tensors = len(inputs) - scalars
    roles = [
        Role((name,), ir.DataType(kind), index == 0, False)
        for index, (name, kind) in enumerate(zip(names[:tensors], kinds, strict=False))
    ]
    group = Group(formula, tuple(roles), ((size,),), tuple(names[tensors:]))
    translation = translate(group, in_place=False)
    output = np.zeros(size, helper.tensor_dtype_to_np_dtype(result))
    first, *others = [array.reshape(-1) for array in inputs]
    arguments = [first, output, *others, *translation.constants]
    compile_all([translation])[translation](
        *(each.view(np.uint16) if each.dtype.itemsize == 2 else each for each in arguments)
    )
    return expected, output


def assert_equal_numbers(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Asserts equal bits, but for those of NaN."""
    np.testing.assert_array_equal(found, expected)
    if found.dtype != bool:
        there = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[there]), np.signbit(expected[there]))


@pytest.mark.usefixtures("in_this_process")
@compiled
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("op_type", NODES)
def test_an_operator_gives_onnxruntimes_bits(op_type: str, kind: int) -> None:
    line = numbers(FLOATS[kind])
    count = NODES[op_type]
    grid = [np.repeat(line, line.size), np.tile(line, line.size)][:count]
    nodes = [helper.make_node(op_type, ["a", "b"][:count], ["y"])]
    if op_type in MASKS:
        nodes[0].output[0] = "mask"
        nodes.append(helper.make_node("Cast", ["mask"], ["y"], to=kind))
    expected, found = run_both(nodes, grid, [kind] * count, kind)
    assert_equal_numbers(found, expected)


@pytest.mark.usefixtures("in_this_process")
@compiled
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("op_type", ["Max", "Min", "Sub", "Div"])
@pytest.mark.parametrize("order", [["a", "b"], ["b", "a"]])
def test_an_operator_with_a_scalar(op_type: str, order: list[str], kind: int) -> None:
    line = numbers(FLOATS[kind])
    for scalar in line[:18]:
        node = helper.make_node(op_type, order, ["y"])
        expected, found = run_both([node], [line, np.array(scalar)], [kind] * 2, kind, 1)
        assert_equal_numbers(found, expected)


@pytest.mark.usefixtures("in_this_process")
@compiled
@pytest.mark.parametrize("kind", FLOATS)
def test_where_and_clip(kind: int) -> None:
    line = numbers(FLOATS[kind])
    a, b = np.repeat(line, line.size), np.tile(line, line.size)
    nodes = [
        helper.make_node("Less", ["a", "b"], ["less"]),
        helper.make_node("Where", ["less", "a", "b"], ["y"]),
    ]
    expected, found = run_both(nodes, [a, b], [kind, kind], kind)
    assert_equal_numbers(found, expected)
    clip = helper.make_node("Clip", ["a", "b", "c"], ["y"])
    for low in (-0.5, 0.0, -0.0):
        bounds = [np.array(low, line.dtype), np.array(0.25, line.dtype)]
        expected, found = run_both([clip], [line, *bounds], [kind] * 3, kind, 2)
        assert_equal_numbers(found, expected)


@pytest.mark.usefixtures("in_this_process")
@compiled
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (TensorProto.FLOAT, TensorProto.FLOAT16),
        (TensorProto.FLOAT, TensorProto.BFLOAT16),
        (TensorProto.FLOAT16, TensorProto.FLOAT),
        (TensorProto.BFLOAT16, TensorProto.FLOAT),
        (TensorProto.FLOAT, TensorProto.DOUBLE),
        (TensorProto.DOUBLE, TensorProto.FLOAT),
    ],
)
def test_casts_round_as_numpy_does(source: int, target: int) -> None:
    old, new = (helper.tensor_dtype_to_np_dtype(kind) for kind in (source, target))
    if old.itemsize == 2:
        line = np.arange(2**16).astype(np.uint16).view(old)
    else:  # all numbers of 16 bits, what lies between two of them, and the numbers beside that
        kind = new if new.itemsize == 2 else np.dtype(np.float16)
        with np.errstate(all="ignore"):
            wide = np.arange(2**16).astype(np.uint16).view(kind).astype(old)
            middle = (wide[1:] + wide[:-1]) / 2
            around = [middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)]
        line = np.concatenate([wide, *around, numbers(old)]).astype(old)
    kinds = ir.DataType(target), ir.DataType(source)  # a variable, and what its next value is of
    inputs = [
        ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(["n"]))
        for name, kind in zip("ab", kinds, strict=True)
    ]
    node = ir.Node("", "Cast", inputs[1:], [ir.AttrInt64("to", target)])
    node.outputs[0].type, node.outputs[0].shape = inputs[0].type, inputs[0].shape
    formula = ir.Graph(inputs, node.outputs, nodes=[node])
    roles = Role(("a",), kinds[0], True, False), Role(("b",), kinds[1], False, False)
    translation = translate(Group(formula, roles, ((line.size,),), ()), in_place=True)
    found = np.zeros(line.size, new)
    arguments = [
        each.view(np.uint16) if each.dtype.itemsize == 2 else each for each in (found, line)
    ]
    compile_all([translation])[translation](*arguments)
    with np.errstate(all="ignore"):
        expected = line.astype(new)
        assert_equal_numbers(found.astype(np.float64), expected.astype(np.float64))


# -------------------------------------------------------------------------------- what is not


def softened(r: Any, t: Any, x: Any, g: Any, v: Any) -> Any:
    xp = x.__array_namespace__()
    if len(x.shape) == 1:
        return x - r.astype(x.dtype) * g, v + g
    return x - r.astype(x.dtype) * g * xp.exp(-v * v), v + g


@compiled
@pytest.mark.parametrize("way", WAYS)
def test_an_operator_that_is_not_exact_stays_standard(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(
        classifier(hidden=64),
        optimizers.Custom(softened, learning_rate=0.1),
        clip_norm=0.1,
    )
    with caplog.at_level(logging.INFO, "ortops"):
        session = assert_same_bits(model, batches(), settings=WAYS[way])
    assert set(session.compiled) == {"b1", "b1.V"}
    (said,) = [text for text in caplog.messages if "are compiled" in text and "'w1'" in text]
    assert said.startswith("kernels: updates of 2 variables are compiled; ")
    assert "'w1' is not: Exp node '" in said
    assert "kernels of this operator have different results" in said
    assert "'step' is not: it is not elementwise" in said


@compiled
def test_nothing_to_compile_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    TrainingSession(build(classifier(), "LAMB"), kernels="compiled")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].startswith("kernels: updates of 0 variables are compiled")


def test_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(
        OrtopsError, match=r"^kernels='compiled' needs numba, which cannot be im"
    ) as found:
        TrainingSession(build(classifier(), "Adam"), kernels="compiled")
    assert str(found.value).endswith("; pip install ortops[compiled], or use kernels='onnx'")


# ------------------------------------------------------------------------------------ the cache


@compiled
def test_machine_code_is_kept(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    first = TrainingSession(build(classifier(), optimizers.Adam(0.1)), kernels="compiled")
    assert first.compiled

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", refuse)
    # Other constants, the same code.
    model = build(classifier(), optimizers.Adam(0.1, alpha=0.6, beta=0.75, epsilon=1e-3))
    before = {path.name for path in cache.rglob("*")}
    assert_same_bits(model, batches())
    assert {path.name for path in cache.rglob("*")} == before


@compiled
@pytest.mark.parametrize("harm", ["no folder", "torn", "no child"])
def test_without_what_is_kept(
    harm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "ortops"
    monkeypatch.setattr(compilation, "folder", lambda: folder)
    model = build(classifier(), optimizers.Momentum(0.1))
    if harm == "no folder":
        folder.write_bytes(b"a file")
    elif harm == "torn":
        TrainingSession(model, kernels="compiled")
        (code,) = (folder / "__pycache__").glob("*.nbc")
        code.write_bytes(code.read_bytes()[:100])
    else:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert {"w1", "w1.V"} <= set(assert_same_bits(model, batches()).compiled)
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    expected = {
        "no folder": "kernels: compiled updates are not cached ('",
        "torn": "again, because its code cannot be read (",
        "no child": "kernels: the process that compiles updates failed (",
    }
    assert len(warnings) == 1
    assert expected[harm] in warnings[0]


posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes and owners like POSIX")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)
STRANGER = 54321
ORIGINAL_FOLDER = compilation.folder


class Planted:
    """What somebody else puts into the cache: reading it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.fixture(scope="module")
def momentum(tmp_path_factory: pytest.TempPathFactory) -> tuple[onnx.ModelProto, Path]:
    """A model, and a cache that has the code of its update."""
    folder = tmp_path_factory.mktemp("momentum") / "ortops"
    model = build(classifier(), optimizers.Momentum(0.1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "folder", lambda: folder)
        TrainingSession(model, kernels="compiled")
    return model, folder


@pytest.fixture
def planted(
    momentum: tuple[onnx.ModelProto, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[onnx.ModelProto, Path, Path]:
    """A model, a cache in which somebody planted code, and the file that this code writes."""
    model, filled = momentum
    folder, trace = tmp_path / "ortops", tmp_path / "trace"
    shutil.copytree(filled, folder)
    (index,) = (folder / "__pycache__").glob("*.nbi")
    index.write_bytes(pickle.dumps(Planted(trace)))
    monkeypatch.setattr(compilation, "folder", lambda: folder)
    return model, folder, trace


def assert_compiled_without_cache(
    model: onnx.ModelProto, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    assert {"w1", "w1.V"} <= set(TrainingSession(model, kernels="compiled").compiled)
    (warning,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert warning.startswith("kernels: compiled updates are not cached (")
    assert why in warning


@compiled
@posix
def test_planted_code_would_be_run(planted: tuple[onnx.ModelProto, Path, Path]) -> None:
    """What the tests below keep from happening does happen in a folder that only the user has."""
    model, _, trace = planted
    TrainingSession(model, kernels="compiled")
    assert trace.exists()


@compiled
@posix
@pytest.mark.parametrize("mode", [0o770, 0o1777])
@pytest.mark.parametrize("what", [".", "__pycache__"])
def test_a_folder_that_others_may_write_to_is_not_used(
    what: str,
    mode: int,
    planted: tuple[onnx.ModelProto, Path, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, folder, trace = planted
    (folder / what).chmod(mode)
    assert_compiled_without_cache(model, caplog, f"others may write to '{folder / what}'")
    assert not trace.exists()


@compiled
@posix
@pytest.mark.parametrize("name", ["*.py", "*.done", "__pycache__/*.nbi", "__pycache__/*.nbc"])
@pytest.mark.parametrize("how", ["writable", "link", pytest.param("stranger's", marks=root)])
def test_a_file_that_others_may_have_written_is_not_used(
    name: str,
    how: str,
    planted: tuple[onnx.ModelProto, Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, folder, trace = planted
    (file,) = folder.glob(name)
    if how == "writable":
        file.chmod(0o620)
        why = f"others may write to '{file}'"
    elif how == "link":
        file.symlink_to(file.rename(tmp_path / "elsewhere"))
        why = f"'{file}' is not a regular file"
    else:
        os.chown(file, STRANGER, -1)
        why = f"'{file}' belongs to another user"
    assert_compiled_without_cache(model, caplog, why)
    assert not trace.exists()


@compiled
@posix
@pytest.mark.parametrize("what", [".", "__pycache__"])
@pytest.mark.parametrize("how", ["link", pytest.param("stranger's", marks=root)])
def test_a_folder_of_others_is_not_used(
    what: str,
    how: str,
    planted: tuple[onnx.ModelProto, Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, folder, trace = planted
    place = folder / what
    if how == "link":
        place.symlink_to(place.rename(tmp_path / "elsewhere"))
        why = f"'{place}' is not a folder, or is a symbolic link to one"
    else:
        os.chown(place, STRANGER, -1)
        why = f"'{place}' belongs to another user"
    assert_compiled_without_cache(model, caplog, why)
    assert not trace.exists()


@compiled
@posix
@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("behind_a_link", [False, True])
def test_parents_that_others_may_write_to_need_the_sticky_bit(
    behind_a_link: bool,
    mode: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "own").mkdir()
    (tmp_path / "link").symlink_to(shared / "own")
    shared.chmod(mode)
    name = "link/ortops" if behind_a_link else "shared/own/ortops"
    monkeypatch.setattr(compilation, "folder", lambda: tmp_path / name)
    model = build(classifier(), optimizers.Momentum(0.1))
    if mode == 0o777:
        assert_compiled_without_cache(model, caplog, f"others may write to '{shared}'")
    else:
        TrainingSession(model, kernels="compiled")
        assert list((tmp_path / name / "__pycache__").glob("*.nbc"))
        assert not [r for r in caplog.records if r.levelname == "WARNING"]


@compiled
@posix
def test_numbas_own_folder_is_checked_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import numba

    shared = tmp_path / "numba"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(shared))
    monkeypatch.setattr(compilation, "folder", lambda: tmp_path / "ortops")
    model = build(classifier(), optimizers.Momentum(0.1))
    assert_compiled_without_cache(model, caplog, f"others may write to '{shared}'")
    assert not [path for path in shared.rglob("*") if path.is_file()]


@compiled
@posix
def test_a_lax_umask_does_not_spoil_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compilation, "folder", lambda: tmp_path / "cache" / "ortops")
    monkeypatch.setattr(sys, "frozen", True, raising=False)  # no child process is made
    before = os.umask(0)
    try:
        TrainingSession(build(classifier(), optimizers.Momentum(0.1)), kernels="compiled")
    finally:
        os.umask(before)
    made = list((tmp_path / "cache").rglob("*"))
    assert {path.suffix for path in made} == {"", ".py", ".nbi", ".nbc"}
    assert not [path for path in (tmp_path / "cache", *made) if path.stat().st_mode & 0o022]


@compiled
@pytest.mark.parametrize("harm", ["no home", "relative", "not writable"])
def test_without_a_home_folder(
    harm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in containers that run with a user number that has no entry in /etc/passwd."""

    def home() -> Path:
        if harm == "no home":
            raise RuntimeError("Could not determine home directory.")
        return Path("home") if harm == "relative" else Path("/proc/nowhere")

    monkeypatch.setattr(compilation, "folder", ORIGINAL_FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", home)
    why = {
        "no home": "the user has no home folder",
        "relative": "the home folder 'home' is not an absolute path",
        "not writable": "/proc/nowhere",
    }
    compilation._warn_uncached.cache_clear()
    model = build(classifier(), optimizers.Momentum(0.1))
    assert_compiled_without_cache(model, caplog, why[harm])
    TrainingSession(model, kernels="compiled")  # which does not say it again
    assert_compiled_without_cache(model, caplog, why[harm])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", ["absolute", "relative"])
def test_the_folder(given: str, tmp_path: Path) -> None:
    cache = str(tmp_path) if given == "absolute" else "cache"  # relative ones are ignored
    expected = tmp_path / ("ortops" if given == "absolute" else ".cache/ortops")
    code = "from ortops.execution.compilation import folder; print(folder())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XDG_CACHE_HOME": cache, "HOME": str(tmp_path), "LOCALAPPDATA": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(expected)


def test_what_has_no_text() -> None:
    kind = ir.DataType.INT64
    formula = ir.Graph([ir.Value(name="a", type=ir.TensorType(kind))], [], nodes=[])
    group = Group(formula, (Role(("a",), kind, True, False),), ((1,),), ())
    with pytest.raises(UnsupportedError, match="it reads a tensor of type INT64"):
        translate(group, in_place=True)


@compiled
@pytest.mark.parametrize("blocks", [True, False])
def test_signs_of_zeros_are_those_of_the_kernel_that_is_here(
    blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution makes 0 of -0 where GatedAdd leaves it."""
    if blocks and scaled_sums.block_size() is None:
        pytest.skip("onnxruntime has no blocked convolution kernels here")
    if not blocks:
        monkeypatch.setattr(scaled_sums, "block_size", lambda: None)
    with ortops.Tape(name="scaled") as tape:
        w = tape.initializer("w", np.full(512, -0.0, np.float32))
        tape.output(tape.input("x", np.float32, ["batch", 512]) * w, "y")
    model = ortops.build_training_model(
        tape.model(), loss="MeanSquaredError", optimizer=optimizers.SGD(0.25)
    )
    zeros = np.zeros((2, 512), np.float32)
    found = []
    for kernels in ("onnx", "compiled"):
        session = TrainingSession(model, kernels=kernels, settings=Settings(joined=0))
        session.step({"x": zeros, "targets": zeros + 1})
        found.append(session.parameters["w"].tobytes())
    assert found[0] == found[1]
