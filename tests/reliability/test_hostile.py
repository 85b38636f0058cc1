"""Files that nobody means well with: ortops takes them, or refuses them by an error of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hostile_models
import numpy as np
import onnx
import pytest
from attacks import SOAK
from fuzz_run import changed_json
from hostile_models import (
    IMPORTS,
    REFUSED,
    constant,
    control_flow,
    external,
    model_of,
    power,
    unending_operator,
    with_initial,
    with_tensor,
)
from hostile_run import allowed, quiet
from onnx import helper
from training_models import TRAINING_DOMAIN, affine, forces

import ortops
from ortops.engine import lowering
from ortops.engine.check import check
from ortops.engine.trainable import child_process, initialization
from ortops.graph.files import loading
from ortops.graph.limits import LIMITS

RUN = Path(__file__).with_name("hostile_run.py")
SECONDS = 60  # that a case may take; none takes more than a few


def outcomes(folder: Path, names: Sequence[str]) -> dict[str, object]:
    """Returns what went wrong by the name of the case: in Python, or with the process."""
    found: dict[str, object] = {}
    pending = list(names)
    while pending:
        command = [sys.executable, str(RUN), str(folder), *pending]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            timed_out = False
            try:
                written, _ = process.communicate(timeout=SECONDS + 2 * len(pending))
            except subprocess.TimeoutExpired:
                process.kill()
                written, _ = process.communicate()
                timed_out = True
        lines = [json.loads(line) for line in written.splitlines() if line.endswith(b"]")]
        done = {name: wrong for name, wrong in lines if wrong != "begun"}
        found |= {name: wrong for name, wrong in done.items() if wrong}
        rest = [name for name in pending if name not in done]
        if rest == pending and len(rest) > 1:  # attributed by running the case alone
            found |= outcomes(folder, rest[:1])
            rest = rest[1:]
        elif rest == pending:
            what = "has not ended" if timed_out else f"ended the process: {process.returncode}"
            found[rest[0]] = what
            rest = []
        pending = rest
    return found


# ------------------------------------------------------------------------------------- mutations


def originals() -> dict[str, bytes]:
    trainable = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="Adam")
    return {
        "model": forces().SerializeToString(),
        "trainable": trainable.SerializeToString(),
        "step_graph": ortops.step_graph(trainable).SerializeToString(),
        "control_flow": control_flow().SerializeToString(),
        "composed": ortops.compose({"first": affine(), "second": forces()}).SerializeToString(),
    }


def mutated(original: bytes, rng: random.Random) -> bytes:
    """Returns bytes with one to four changes."""
    result = bytearray(original)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(result))
        match rng.randrange(6):
            case 0:
                result[place] ^= 1 << rng.randrange(8)
            case 1:
                result[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                result[place:place] = rng.randbytes(rng.choice((1, 2, 8)))
            case 3:
                del result[place : place + rng.choice((1, 2, 8, 64))]
            case 4:
                other = rng.randrange(len(result))
                result[place : place + 8] = result[other : other + 8]
            case 5 if rng.random() < 0.2:
                del result[place:]
            case _:
                result[place] = (result[place] + rng.choice((-1, 1))) % 256
        if not result:
            return bytes(result)
    return bytes(result)


def messages(message: Any) -> list[Any]:
    """Returns a message and all in it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else [value]:
                found += messages(inner)
    return found


def distorted(original: bytes, rng: random.Random) -> bytes:
    """Returns a well-formed model with one to three fields that are changed, or gone, or double."""
    model = onnx.ModelProto()
    model.ParseFromString(original)
    texts = sorted({name for node in model.graph.node for name in (*node.input, node.op_type)})
    texts += ["", "nothing", "If", "Loop", "Identity", "Gradient", "Adam", "Constant"]
    numbers = (0, 1, -1, 2, 7, 8, 9, 16, 21, 2**31 - 1, -(2**31))
    for _ in range(rng.choice((1, 1, 2, 3))):
        message = rng.choice([each for each in messages(model) if each.ListFields()])
        field, value = rng.choice(message.ListFields())
        if rng.random() < 0.2:
            message.ClearField(field.name)
        elif field.message_type is not None:
            if not field.is_repeated:
                alike = [each for each in messages(model) if type(each) is type(value)]
                copied = rng.choice(alike).SerializeToString()  # it may hold the other
                value.ParseFromString(copied)
            elif rng.random() < 0.5:
                copied = rng.choice(value).SerializeToString()
                value.add().ParseFromString(copied)
            elif rng.random() < 0.5:
                del value[rng.randrange(len(value))]
            else:
                copied = rng.choice(value).SerializeToString()
                value[0].ParseFromString(copied)
        else:
            new: Any = rng.choice(numbers)
            if field.type == field.TYPE_STRING:
                new = rng.choice(texts)
            elif field.type == field.TYPE_BYTES:
                new = rng.choice((b"", b"loss", b"w", rng.randbytes(8)))
            elif field.type == field.TYPE_ENUM:
                new = rng.choice([each.number for each in field.enum_type.values])
            elif field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
                new = rng.choice((0.0, -1.0, 1e30, math.nan, math.inf))
            elif field.type == field.TYPE_UINT64:
                new = abs(new)
            if not field.is_repeated:
                setattr(message, field.name, new)
            elif rng.random() < 0.5:
                value.append(new)
            else:
                value[rng.randrange(len(value))] = new
    return bytes(model.SerializeToString())


NAMES = [
    "a\nFORGED: line",
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b2J",
    "\r",
    "\u202eleft",
    "é",
    "x" * 99,
]
NUMBERS = [0, -1, -2, 1, 2, 3, 7, 13, 16, 17, 23, 24, 26, 29, 999, 2**31 - 1, -(2**31)]


def twisted(original: bytes, rng: random.Random) -> bytes:
    """Returns a model with one to three fields that protobuf allows, and the standard does not.

    They are names with control characters, in all their places or in one, types and versions that
    do not exist, attributes by reference and of other types, negative dimensions, and fields that
    are gone.
    """
    model = onnx.ModelProto()
    model.ParseFromString(original)
    for _ in range(rng.choice((1, 1, 2, 3))):
        every = messages(model)
        attributes = [each for each in every if isinstance(each, onnx.AttributeProto)]
        match rng.randrange(8):
            case 0:  # another name wherever it is
                names = {each.name for each in every if hasattr(each, "name") and each.name}
                _rename(every, rng.choice(sorted(names)), rng.choice(NAMES))
            case 1 if attributes:  # by reference, outside of a function
                chosen = rng.choice(attributes)
                kept = onnx.AttributeProto(name=chosen.name, type=chosen.type)
                kept.ref_attr_name = rng.choice((chosen.name, "nothing", *NAMES))
                chosen.CopyFrom(kept)
            case 2 if attributes:  # of another type
                chosen = rng.choice(attributes)
                chosen.type = rng.randrange(15)
            case 3 if attributes:  # with the value of another
                chosen, name = rng.choice(attributes), rng.choice(attributes).name
                chosen.CopyFrom(rng.choice(attributes))
                chosen.name = name
            case 4:
                _set(rng.choice(every), int, rng.choice(NUMBERS), rng)
            case 5:
                _set(rng.choice(every), str, rng.choice(NAMES), rng)
            case 6:
                nodes = [each for each in every if isinstance(each, onnx.NodeProto)]
                chosen = rng.choice(nodes)
                fields = [chosen.input, chosen.output]
                del rng.choice(fields)[rng.randrange(2) :]
            case _:
                message = rng.choice([each for each in every if each.ListFields()])
                message.ClearField(rng.choice(message.ListFields())[0].name)
    return bytes(model.SerializeToString())


def _rename(every: Sequence[Any], old: str, new: str) -> None:
    for message in every:
        for field, value in message.ListFields():
            if field.type != field.TYPE_STRING:
                continue
            if not field.is_repeated:
                setattr(message, field.name, new if value == old else value)
                continue
            for index, text in enumerate(value):
                value[index] = new if text == old else text


def _set(message: Any, kind: type, value: Any, rng: random.Random) -> None:
    """Sets a field of a message, which may not have had it."""
    fields = list(message.DESCRIPTOR.fields)
    for field in rng.sample(fields, len(fields)):
        text = field.type == field.TYPE_STRING
        number = field.type in (field.TYPE_INT32, field.TYPE_INT64, field.TYPE_ENUM)
        if not (text if kind is str else number):
            continue
        if field.enum_type is not None:  # whose other values do not come out of a file
            value = rng.choice(field.enum_type.values).number
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
        return


def misdescribed(original: bytes, rng: random.Random) -> bytes:
    """Returns a model with a value of its metadata that is other JSON."""
    model = onnx.ModelProto()
    model.ParseFromString(original)
    for _ in range(rng.choice((1, 1, 2))):
        if model.metadata_props:
            entry = rng.choice(model.metadata_props)
            with contextlib.suppress(ValueError):  # no JSON, or text that is no UTF-8
                entry.value = changed_json(entry.value.encode(), rng).decode()
    return bytes(model.SerializeToString())


CHANGES = {"bytes": mutated, "fields": distorted, "forms": twisted, "metadata": misdescribed}
KINDS = ("model", "trainable", "step_graph", "control_flow", "composed")


@pytest.mark.nightly(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_is_taken_or_refused(kind: str, tmp_path: Path) -> None:
    original, names = originals()[kind], []
    for change, make in CHANGES.items():
        if change == "metadata" and kind not in ("trainable", "composed"):
            continue
        rng = random.Random(kind)
        for number in range(3 if SOAK == 1 else 30 * SOAK):
            names.append(f"{change}{number}")
            (tmp_path / f"{names[-1]}.onnx").write_bytes(make(original, rng))
    assert not outcomes(tmp_path, names)


# --------------------------------------------------------------------------------- hostile models


def write(name: str, path: Path) -> bool:
    """Writes a hostile model, and returns whether it has training_info."""
    made = REFUSED[name][0]()
    path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return isinstance(made, onnx.ModelProto) and bool(made.training_info)


@pytest.mark.nightly(0)
@pytest.mark.slow
def test_hostile_models_do_no_harm(tmp_path: Path) -> None:
    names = list(REFUSED)
    for number, name in enumerate(names):
        write(name, tmp_path / f"{number}.onnx")
    found = outcomes(tmp_path, [str(number) for number in range(len(names))])
    assert not {names[int(number)]: wrong for number, wrong in found.items()}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", REFUSED)
def test_hostile_models_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LIMITS, "initialization_seconds", 0.5)
    path = tmp_path / "model.onnx"
    is_trainable = write(name, path)
    act = train if is_trainable else infer
    with pytest.raises(ortops.OrtopsError, match=REFUSED[name][1]):
        act(path)


def train(path: Path) -> None:
    ortops.TrainingSession(path).reset()


def infer(path: Path) -> None:
    ortops.InferenceSession(path, sess_options=quiet())


def called(inner: onnx.NodeProto, kinds: dict[str, int], **given: object) -> onnx.ModelProto:
    """Returns a model of a function, whose node has attributes of the calls."""
    for name, kind in kinds.items():
        inner.attribute.add(name=name, type=kind, ref_attr_name=name)
    call = helper.make_node("F", inner.input, ["y"], domain="f", **given)
    weights = [onnx.numpy_helper.from_array(np.eye(2, dtype=np.float32) + 1, "w")]
    model = model_of([call], initializers=weights)
    model.graph.input[0].CopyFrom(hostile_models.value("x", (2, 2)))
    body = helper.make_function("f", "F", inner.input, ["z"], [inner], IMPORTS, list(kinds))
    model.functions.append(body)
    return model


def test_attributes_that_calls_give_are_blamed_on_the_model() -> None:
    """The checker of onnx looks at functions without their calls."""
    reference = onnx.AttributeProto
    gemm = {"alpha": reference.FLOAT, "transB": reference.INT}
    softmax = helper.make_node("Softmax", ["x"], ["z"])
    slopes = helper.make_node("Gradient", ["x"], ["z"], domain=TRAINING_DOMAIN, y="x")
    for model in (
        called(helper.make_node("Gemm", ["x", "w"], ["z"]), gemm, alpha="text", transB=[1, 2]),
        called(softmax, {"axis": reference.INT}, axis=1.5),
        called(slopes, {"xs": reference.STRINGS}),
    ):
        with pytest.raises(ortops.ModelError, match=r"check it with onnx\.checker\.check_model"):
            check(model)
    valid = called(helper.make_node("Gemm", ["x", "w"], ["z"]), gemm, alpha=2.0, transB=1)
    assert check(valid).parameters


def test_slices_of_empty_axes_do_not_end_the_process() -> None:
    """With negative steps, for which the inference of onnx aborts; also where a node makes them."""
    numbers = {"start": -1, "stop": -9, "axis": 0, "step": -1, "zero": 0, "one": 1}
    constants = [constant(name, np.array([number])) for name, number in numbers.items()]
    for dim in (0, -3, None):
        empty = helper.make_node("Slice", ["x", "zero", "zero", "axis", "one"], ["empty"])
        turned = helper.make_node(
            "Slice", ["x" if dim is not None else "empty", "start", "stop", "axis", "step"], ["y"]
        )
        model = model_of([*constants, empty, turned])
        sizes = (2 if dim is None else dim, 3)
        model.graph.input[0].CopyFrom(hostile_models.value("x", sizes))
        allowed(functools.partial(check, model))


# ------------------------------------------------------------------------------------------ files


def secret_beside(folder: Path) -> bytes:
    """Makes files that no model may read beside a model's folder, and returns the model."""
    (folder / "model").mkdir()
    (folder / "secret").write_bytes(np.arange(2, dtype=np.float32).tobytes())
    return with_tensor(external("data")).SerializeToString()


def pipe(data: Path, secret: Path) -> None:
    os.mkfifo(data)


def device(data: Path, secret: Path) -> None:
    data.symlink_to("/dev/zero")


def link(data: Path, secret: Path) -> None:
    data.symlink_to(secret)


def second_name(data: Path, secret: Path) -> None:
    data.hardlink_to(secret)


def folder_instead(data: Path, secret: Path) -> None:
    data.mkdir()


def short_file(data: Path, secret: Path) -> None:
    data.write_bytes(bytes(7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (pipe, "must be a regular file"),
        (device, "must not be behind a link"),
        (link, "must not be behind a link"),
        (second_name, "must be a regular file without hard links"),
        (folder_instead, "must be a regular file"),
        (short_file, "end at byte 8, but the file has 7 bytes"),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_external_data_are_a_file_below_the_models_folder(
    make: Callable[[Path, Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model" / "0.onnx"
    model = secret_beside(tmp_path)
    path.write_bytes(model)
    make(path.with_name("data"), tmp_path / "secret")
    assert not outcomes(path.parent, ["0"])
    for act in (ortops.lower, infer, check):
        with pytest.raises(ortops.ModelError, match=message):
            act(path)


PATHS: dict[str, Callable[[Path], object]] = {
    "lower": ortops.lower,
    "infer": infer,
    "check": check,
    "build": lambda path: ortops.build_training_model(path, loss="Huber", optimizer="SGD"),
    "train": ortops.TrainingSession,
}
"""What reads a model, given its path."""

unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such files")


def written_to_a_pipe(model: onnx.ModelProto, path: Path) -> threading.Thread:
    """Makes a pipe, and returns the thread that writes a model to it, once."""
    os.mkfifo(path)
    content = model.SerializeToString()
    writer = threading.Thread(target=path.write_bytes, args=(content,), daemon=True)
    writer.start()
    return writer


@unix
@pytest.mark.parametrize("act", PATHS)
def test_a_model_comes_through_a_pipe(act: str, tmp_path: Path) -> None:
    writer = written_to_a_pipe(
        trainable_of() if act == "train" else affine(), tmp_path / "model.onnx"
    )
    PATHS[act](tmp_path / "model.onnx")
    writer.join()


@unix
def test_an_illegal_model_that_comes_through_a_pipe_is_refused(tmp_path: Path) -> None:
    model = trainable_of()
    model.training_info[0].algorithm.node[0].input[0] = "nothing"
    written_to_a_pipe(model, tmp_path / "model.onnx")
    with pytest.raises(ortops.ModelError):
        ortops.TrainingSession(tmp_path / "model.onnx")


@unix
def test_a_pipe_without_a_writer_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PATIENCE", 0.0)
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(ortops.ModelError, match="is a pipe into which nothing is written; pass a"):
        ortops.lower(tmp_path / "model.onnx")


@unix
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
@pytest.mark.parametrize("act", PATHS)
def test_a_device_is_no_model(act: str, device: str, tmp_path: Path) -> None:
    for path in (Path(device), tmp_path / "model.onnx"):
        if path != Path(device):
            path.symlink_to(device)
        with pytest.raises(ortops.ModelError, match="is a device"):
            PATHS[act](path)


@pytest.mark.parametrize("act", PATHS)
def test_a_file_of_2_gb_is_no_model(act: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as stream:
        stream.truncate(2**31)  # it takes no room
    with pytest.raises(ortops.ModelError, match="exceeds 2 GB"):
        PATHS[act](path)


@unix
def test_a_pipe_without_end_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MOST_BYTES", 2**20)
    path = tmp_path / "model.onnx"
    os.mkfifo(path)

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), path.open("wb") as stream:
            while True:
                stream.write(bytes(2**16))

    threading.Thread(target=write, daemon=True).start()
    with pytest.raises(ortops.ModelError, match="exceeds 2 GB"):
        ortops.lower(path)


def test_external_data_below_the_models_folder_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "data").write_bytes(np.array([0, 3, 5], np.float32).tobytes())
    path.write_bytes(with_tensor(external("below/data", offset="4")).SerializeToString())
    feeds = {"x": np.ones(2, np.float32)}
    slope = ortops.InferenceSession(path).run(["dx"], feeds)[0]
    np.testing.assert_array_equal(slope, [3, 5])


def test_a_file_cannot_name_the_data_of_another_tensor(tmp_path: Path) -> None:
    path = tmp_path / "trainable.onnx"
    model = trainable_of(secret=np.full(400, 7, np.float32))
    thief = model.graph.initializer.add(name="thief", data_type=1, dims=[400])
    thief.data_location = onnx.TensorProto.EXTERNAL
    for number in range(20):  # whichever it is that names the secret's data
        del thief.external_data[:]
        thief.external_data.add(key="location", value=f"ortops.detached/{number}")
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ortops.ModelError, match="'thief': cannot read its external data"):
            ortops.TrainingSession(path)


def trainable_of(**arrays: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """Returns a trainable model with further initializers."""
    model = ortops.build_training_model(affine(), loss="MeanSquaredError", optimizer="SGD")
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


# ----------------------------------------------------------------------------------------- limits


@pytest.mark.slow
def test_limits_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = power(10, 3)
    monkeypatch.setattr(LIMITS, "inlined_nodes", 1000)
    with pytest.raises(ortops.ModelError, match="would have 1,113 nodes"):
        ortops.lower(model)
    monkeypatch.setattr(LIMITS, "inlined_nodes", 2000)
    lowered = ortops.lower(model)
    slope = ortops.InferenceSession(lowered).run(["dx"], {"x": np.ones(2, np.float32)})[0]
    np.testing.assert_array_equal(slope, [1, 1])  # 1000 times Neg
    names = [output for node in lowered.graph.node for output in node.output]
    assert len(names) == len(set(names))


def test_what_an_initialization_computes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    three = [constant("start", np.int64(3))]
    session = ortops.TrainingSession(with_initial(three))
    session.reset()
    assert session.steps_done == 3
    large = [constant("all", np.ones(1000, np.int64))]
    large += [onnx.helper.make_node("ReduceSum", ["all"], ["start"], keepdims=0)]
    session = ortops.TrainingSession(with_initial(large))
    monkeypatch.setattr(LIMITS, "initialization_bytes", 7999)
    with pytest.raises(ortops.ModelError, match="must have at most 7,999 bytes, got 8,000 "):
        session.reset()
    monkeypatch.setattr(LIMITS, "initialization_bytes", 8000)
    session.reset()
    assert session.steps_done == 1000


@pytest.mark.slow
def test_an_initialization_is_ended_in_the_midst_of_an_operator(tmp_path: Path) -> None:
    (tmp_path / "0.onnx").write_bytes(unending_operator().SerializeToString())
    assert not outcomes(tmp_path, ["0"])


def orthogonal() -> tuple[onnx.ModelProto, np.ndarray[Any, Any]]:
    """Returns a model whose initialization has a matrix product, and the start of its variable."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(5, 2)).astype(np.float32)
    nodes = [constant("a", a), constant("b", b), helper.make_node("MatMul", ["a", "b"], ["start"])]
    model = with_initial(nodes, helper.make_tensor_value_info("start", 1, [3, 2]), "w")
    (weight,) = [tensor for tensor in model.graph.initializer if tensor.name == "w"]
    assert list(weight.dims) == [3, 2]
    return model, a @ b


@pytest.mark.slow
def test_an_initialization_in_another_process_gives_the_same_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, expected = orthogonal()
    session = ortops.TrainingSession(model)
    session.reset()
    np.testing.assert_allclose(session.state["w"], expected, rtol=1e-6)
    monkeypatch.setattr(LIMITS, "initialization_seconds", math.inf)
    monkeypatch.setattr(
        initialization, "run_in_child", None
    )  # in this process, where it is trusted
    session.state["w"] = np.zeros((3, 2), np.float32)
    session.reset()
    np.testing.assert_allclose(session.state["w"], expected, rtol=1e-6)


@pytest.mark.slow
def test_models_of_ours_are_initialized_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialization, "run_in_child", None)
    for optimizer in (*ortops.optimizers.OPTIMIZERS, "SGD"):
        averages_itself = optimizer == "ScheduleFreeAdamW"
        model = ortops.build_training_model(
            affine(),
            loss="MeanSquaredError",
            optimizer=optimizer,
            ema_decay=None if averages_itself else 0.9,
        )
        ortops.TrainingSession(model).reset()


def test_an_initialization_whose_process_dies_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = ortops.TrainingSession(orthogonal()[0])
    session.state["w"] = np.ones((3, 2), np.float32)
    (tmp_path / "dies.py").write_text("import os\ndef answer(request, body):\n    os.abort()\n")
    monkeypatch.setattr(child_process, "_RUN_MODEL", tmp_path / "dies.py")
    with pytest.raises(ortops.ModelError, match=r"initialization failed: .* ended with status"):
        session.reset()
    np.testing.assert_array_equal(session.state["w"], np.ones((3, 2)))


def test_an_initialization_that_no_process_can_run_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = ortops.TrainingSession(orthogonal()[0])
    for executable, message in (("", "has none"), ("/nowhere/python", "which cannot be started")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(ortops.UnsupportedError, match=message):
            session.reset()


def test_options_stay_as_they_were() -> None:
    options = quiet()
    level = options.graph_optimization_level
    ortops.TrainingSession(
        with_initial([constant("start", np.int64(3))]), sess_options=options
    ).reset()
    assert options.graph_optimization_level == level


def test_a_mistake_of_ours_is_not_blamed_on_a_legal_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("of ours")

    monkeypatch.setattr(lowering, "has_domain", fail)
    with pytest.raises(AssertionError, match="of ours"):
        ortops.lower(affine())
