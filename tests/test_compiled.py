"""Updates that LLVM compiles give the bits of the standard operators, and say what they are.

The oracle is onnxruntime: the same session with ``kernels="onnx"``, and single nodes of it.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
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
from ortops.engine.execution import compilation, execution, template, update
from ortops.engine.execution.compilation import Call
from ortops.engine.execution.settings import Settings
from ortops.engine.execution.translation import translate
from ortops.engine.execution.update_groups import Group, Role
from ortops.errors import OrtopsError, UnsupportedError
from ortops.graph.passes import scaled_sums
from ortops.optimizers import OPTIMIZERS

WAYS = {
    "small": None,
    "one chunk": Settings(joined=-1),
    "chunks": Settings(joined=-1, chunk=256, threads=2),
}
STEPS = 4
BOOL = ir.DataType.BOOL

compiled = pytest.mark.optional("llvmlite", "fast")


def assert_same_bits(model: onnx.ModelProto, batches: list[Any], **options: Any) -> TrainingSession:
    """Trains in both ways, and returns the compiled session."""
    plain = TrainingSession(model, kernels="onnx", **options)
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


@pytest.mark.nightly(13)
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
    else:  # Adam8bit has float32 moments for few elements, without scales
        assert {n for n in states if not n.endswith("_SCALE")} <= set(session.compiled)
    assert "step" not in session.compiled


@pytest.mark.nightly
@pytest.mark.quick(2)
@compiled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["SGD", "Momentum", "Adagrad", "Adam", "AdamW", "Lion"])
def test_float64(name: str, way: str) -> None:
    model = build(affine(dtype=np.float64), OPTIMIZERS[name](), loss="MeanSquaredError")
    feeds = [affine_batch(seed=seed, dtype=np.float64) for seed in range(STEPS)]
    session = assert_same_bits(model, feeds, settings=WAYS[way])
    assert {"w", "b"} <= set(session.compiled)
    assert session.state["w"].dtype == np.float64


@pytest.mark.nightly
@pytest.mark.quick(1)
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


@pytest.mark.slow
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


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_are_no_numbers(way: str) -> None:
    feeds = batches()
    feeds[2]["x"][:, 0] = np.inf
    feeds[3]["x"][:, 1] = np.nan
    for optimizer in (optimizers.SGD(0.1), optimizers.AMSGrad(0.1), optimizers.Lion(0.1)):
        model = build(classifier(), optimizer)
        plain = TrainingSession(model, kernels="onnx", settings=WAYS[way])
        session = TrainingSession(model, kernels="compiled", settings=WAYS[way])
        for each in feeds:
            plain.step(each)
            session.step(each)
        for name, array in plain.state.items():
            np.testing.assert_array_equal(session.state[name], array, err_msg=name)


@pytest.mark.quick(2)
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


@pytest.mark.quick(1)
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
                value.dtype = BOOL if value.name in ("less", "mask") else ir.DataType(result)
    tensors = len(inputs) - scalars
    roles = [
        Role((name,), ir.DataType(kind), index == 0, False)
        for index, (name, kind) in enumerate(zip(names[:tensors], kinds, strict=False))
    ]
    group = Group(formula, tuple(roles), ((size,),), tuple(names[tensors:]))
    translation = translate(group, overwritten=())
    output = np.zeros(size, helper.tensor_dtype_to_np_dtype(result))
    first, *others = [array.reshape(-1) for array in inputs]
    arguments = [first, output, *others, *translation.constants]
    Call(compilation.compiled(translation), arguments, size)()
    return expected, output


def assert_equal_numbers(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Asserts equal bits, but for those of NaN."""
    np.testing.assert_array_equal(found, expected)
    if found.dtype != bool:
        there = ~np.isnan(expected)
        np.testing.assert_array_equal(np.signbit(found[there]), np.signbit(expected[there]))


@pytest.mark.quick(14)
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


@pytest.mark.quick(11)
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
    translation = translate(Group(formula, roles, ((line.size,),), ()), overwritten=[0])
    found = np.zeros(line.size, new)
    Call(compilation.compiled(translation), [found, line], line.size)()
    with np.errstate(all="ignore"):
        expected = line.astype(new)
        assert_equal_numbers(found.astype(np.float64), expected.astype(np.float64))


# -------------------------------------------------------------------------------- what is not


def softened(r: Any, t: Any, x: Any, g: Any, v: Any) -> Any:
    xp = x.__array_namespace__()
    if len(x.shape) == 1:
        return x - r.astype(x.dtype) * g, v + g
    return x - r.astype(x.dtype) * g * xp.exp(-v * v), v + g


@pytest.mark.quick(1)
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


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code was compiled yet, nor anything said about it."""
    for name in ("compiled", "_compiler"):
        found = getattr(compilation, name)
        monkeypatch.setattr(compilation, name, functools.cache(found.__wrapped__))
    monkeypatch.setattr(update, "compiled", compilation.compiled)
    monkeypatch.setattr(template, "compiled", compilation.compiled)
    execution._warn_not_compiled.cache_clear()


@pytest.mark.usefixtures("anew")
def test_llvmlite_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with pytest.raises(OrtopsError) as found:
        TrainingSession(build(classifier(), "Adam"), kernels="compiled")
    message = "kernels='compiled' needs llvmlite; pip install ortops[fast], or use kernels='onnx'"
    assert str(found.value) == message


@compiled
@pytest.mark.usefixtures("anew")
def test_llvmlite_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite

    monkeypatch.setattr(llvmlite, "__version__", "0.44.0")
    with pytest.raises(OrtopsError, match=r"needs llvmlite 0\.45 or later, got 0\.44\.0; "):
        TrainingSession(build(classifier(), "Adam"), kernels="compiled")


FORBIDDING = """
import ctypes, logging, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE
    print("not here")
    sys.exit()
import ortops
from models import line
from ortops.engine.execution.settings import Settings
logging.basicConfig(format="%(levelname)s %(message)s")
settings = Settings(compiled_after=(1, 0.0), compiled_share=-1.0)
model = line.session().model()
for kernels in ("auto", "compiled"):
    try:
        session = ortops.TrainingSession(model, kernels=kernels, settings=settings)
        for _ in range(3):
            session.step(line.BATCH)
        print(session.compiled)
    except ortops.OrtopsError as error:
        print(error)
"""


@pytest.mark.slow
@compiled
@pytest.mark.skipif(sys.platform != "linux", reason="Linux can forbid a process to do it")
def test_a_process_that_must_not_execute_what_it_wrote() -> None:
    """As systemd starts services with MemoryDenyWriteExecute: LLVM's code would end the process."""
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDING], capture_output=True, text=True, check=True
    )
    if done.stdout == "not here\n":
        pytest.skip("this kernel cannot forbid it")
    why = "the system does not let this process execute memory that it has written"
    assert done.stdout == f"()\nkernels='compiled': {why}; use kernels='onnx'\n"
    (said,) = done.stderr.splitlines()
    assert said.startswith("WARNING kernels: updates cannot be compiled (")
    assert why in said


def test_what_has_no_text() -> None:
    kind = ir.DataType.INT64
    formula = ir.Graph([ir.Value(name="a", type=ir.TensorType(kind))], [], nodes=[])
    group = Group(formula, (Role(("a",), kind, True, False),), ((1,),), ())
    with pytest.raises(UnsupportedError, match="it reads a tensor of type INT64"):
        translate(group, overwritten=[0])


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
