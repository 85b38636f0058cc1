"""Writes small files of all kinds that ortops writes, with the results expected from them.

Usage: python scripts/write_golden_files.py FOLDER [PART ...]

Each part is a zip file in FOLDER; all are written by default. Existing files are never
overwritten. tests/golden/README.md describes the files, and tests/test_golden_files.py opens them.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from safetensors.numpy import save_file

import ortops
from ortops import Tape, TrainingSession, build_training_model, callbacks, lora, losses, op
from ortops import optimizers as o
from ortops import schedules as s

Arrays = dict[str, Any]
LARGEST_FILE = 100_000


# ------------------------------------------------------------------------- models and batches


def classifier(dropout: float = 0.0, outputs: Sequence[str] = ("logits",)) -> onnx.ModelProto:
    """Two linear layers: 5 inputs, 4 hidden units, 3 classes for each output."""
    rng = np.random.default_rng(2)
    with Tape(name="classifier") as tape:
        x = tape.input("x", np.float32, ["batch", 5])
        w1 = tape.initializer("w1", rng.normal(size=(5, 4)).astype(np.float32))
        b1 = tape.initializer("b1", rng.normal(size=4).astype(np.float32))
        h = op.Tanh(x @ w1 + b1)
        if dropout:
            h = op.Dropout(h, np.array(dropout, np.float32))
        for name in outputs:
            w2 = tape.initializer(f"{name}.w2", rng.normal(size=(4, 3)).astype(np.float32))
            tape.output(h @ w2, name)
    return tape.model()


def linear(has_bias: bool = False) -> onnx.ModelProto:
    """A linear layer: 5 inputs, 3 classes."""
    rng = np.random.default_rng(1)
    with Tape(name="linear") as tape:
        x = tape.input("x", np.float32, ["batch", 5])
        w = tape.initializer("w", rng.normal(size=(5, 3)).astype(np.float32))
        logits = x @ w
        if has_bias:
            logits = logits + tape.initializer("b", rng.normal(size=3).astype(np.float32))
        tape.output(logits, "logits")
    return tape.model()


def normalizing() -> onnx.ModelProto:
    """Conv, BatchNormalization, Relu, Dropout and a mean: (N, 1, 4, 4) to 3 logits."""
    rng = np.random.default_rng(3)
    with Tape(name="normalizing") as tape:
        x = tape.input("x", np.float32, ["batch", 1, 4, 4])
        w = tape.initializer("conv.w", rng.normal(size=(3, 1, 3, 3)).astype(np.float32))
        given = [
            tape.initializer(f"bn.{name}", np.linspace(first, last, 3, dtype=np.float32))
            for name, first, last in (
                ("scale", 0.5, 1.5),
                ("bias", -1, 1),
                ("mean", -0.1, 0.1),
                ("var", 0.8, 1.2),
            )
        ]
        h = op.Relu(op.BatchNormalization(op.Conv(x, w, pads=[1] * 4), *given, momentum=0.8))
        h = op.Dropout(h, np.array(0.25, np.float32))
        tape.output(op.ReduceMean(h, [2, 3], keepdims=0), "logits")
    return tape.model()


def exact(dtype: Any = np.float32) -> onnx.ModelProto:
    """A linear layer whose steps on `exact_batch` need no rounding."""
    rng = np.random.default_rng(4)
    with Tape(name="exact") as tape:
        x = tape.input("x", dtype, ["batch", 3])
        w = tape.initializer("w", (rng.integers(-2, 3, (3, 2)) / 2).astype(dtype))
        b = tape.initializer("b", (rng.integers(-2, 3, 2) / 2).astype(dtype))
        tape.output(x @ w + b, "y")
    return tape.model()


def lifted() -> onnx.ModelProto:
    """A model whose weights are in Constant nodes of the graph and of a function."""
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
        lifted (float[batch, 2] x) => (float[batch, 2] y) {
            w = Constant <value = float[2, 2] {1, 2, 3, 4}> ()
            h = MatMul (x, w)
            y = local.Layer (h)
        }
        <domain: "local", opset_import: ["" : 21]>
        Layer (x) => (y) {
            w = Constant <value = float[2, 2] {0.5, -1, 0.25, 0.75}> ()
            b = Constant <value = float[2] {0.5, -0.5}> ()
            product = MatMul (x, w)
            y = Add (product, b)
        }""")
    model.producer_name = "ortops"
    return model


def older() -> onnx.ModelProto:
    """A classifier of opset 11, where axes are attributes."""
    rng = np.random.default_rng(5)
    model = onnx.parser.parse_model("""
        <ir_version: 6, opset_import: ["" : 11]>
        older (float[batch, 1, 5] x) => (float[batch, 3] probabilities)
        <float[5, 3] w> {
            rows = Squeeze <axes = [1]> (x)
            product = MatMul (rows, w)
            probabilities = Softmax <axis = 1> (product)
        }""")
    weight = rng.normal(size=(5, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    model.producer_name = "ortops"
    return model


def forces() -> onnx.ModelProto:
    """An energy for each row and, by a Gradient node of the inference graph, its gradient."""
    rng = np.random.default_rng(6)
    domain = "ai.onnx.preview.training"
    with Tape(name="forces") as tape:
        x = tape.input("x", np.float32, ["batch", 3])
        w = tape.initializer("w", rng.normal(size=(3, 4)).astype(np.float32))
        v = tape.initializer("v", rng.normal(size=(4, 1)).astype(np.float32))
        tape.output(op.ReduceSum(op.Tanh(x @ w) @ v, [1], keepdims=0), "energy")
    model = tape.model()
    model.graph.node.append(
        onnx.helper.make_node(
            "Gradient", ["x"], ["slope"], "slopes", domain=domain, xs=["x"], y="energy"
        )
    )
    shape = ["batch", 3]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("slope", onnx.TensorProto.FLOAT, shape)
    )
    model.opset_import.add(domain=domain, version=1)
    return model


def layers(size: int = 32) -> onnx.ModelProto:
    """Two layers without bias, wide enough for quantization by blocks."""
    rng = np.random.default_rng(7)
    with Tape(name="layers") as tape:
        x = tape.input("x", np.float32, ["batch", size])
        w1 = tape.initializer("fc1.weight", rng.normal(size=(size, 16)).astype(np.float32))
        w2 = tape.initializer("fc2.weight", rng.normal(size=(16, 4)).astype(np.float32))
        tape.output(op.Tanh(x @ w1 / 8.0) @ w2, "y")
    return tape.model()


def quantized(form: str) -> onnx.ModelProto:
    """Returns `layers` with weights of 4 bits, written by onnxruntime's own tool."""
    from onnxruntime.quantization import QuantFormat
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(
        layers(),
        block_size=16,
        is_symmetric=True,
        quant_format=QuantFormat.QDQ if form == "dequantize" else QuantFormat.QOperator,
    )
    quantizer.process()
    return quantizer.model.model


def labelled(*shape: int, seed: int = 0, rows: int = 8) -> Arrays:
    """Returns random rows of x, and labels of three classes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, *shape)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, 3, rows)}


def with_targets(inputs: int, outputs: int, seed: int = 0, rows: int = 8) -> Arrays:
    """Returns random rows of x and targets."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(rows, inputs)).astype(np.float32),
        "targets": rng.normal(size=(rows, outputs)).astype(np.float32),
    }


def exact_batch(seed: int = 0, dtype: Any = np.float32, wide: Any = np.float32) -> Arrays:
    """Returns rows of small integers, and targets that are multiples of a half."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(-1, 2, (4, 3)).astype(dtype),
        "targets": (rng.integers(-4, 5, (4, 2)) / 2).astype(wide),
    }


def own_rule(r: Any, t: Any, x: Any, g: Any, v: Any, *, alpha: float = 0.5) -> Any:
    """A custom update rule: signs of a moving average."""
    v_new = alpha * v + (1 - alpha) * g
    return x - r.astype(x.dtype) * x.__array_namespace__().sign(v_new), v_new


def own_loss(y: Any, targets: Any) -> Any:
    """A loss whose gradient is the same at every weight, so that no step needs rounding."""
    return op.ReduceMean(y * targets, keepdims=0)


# ---------------------------------------------------------------------------- trainable files


@dataclass(frozen=True)
class Case:
    """A trainable file.

    Attributes:
        model: Makes the inference model.
        batch: Returns the batch of a step.
        settings: Further arguments of `build_training_model`.
        before: The number of steps before the file is written.
        after: The number of steps after that.
        is_exact: Whether no step needs rounding.
        dtype: The type of the inputs, of exact files.
        predicted: Which outputs are predicted; all if None.
        entries: The arguments of `ortops.add_training` for each further training algorithm.
    """

    model: Callable[..., onnx.ModelProto]
    batch: Callable[..., Arrays]
    settings: Mapping[str, Any]
    before: int = 2
    after: int = 3
    is_exact: bool = False
    dtype: Any = np.float32
    predicted: Sequence[str] | None = None
    entries: Sequence[Mapping[str, Any]] = ()


def exact_case(**settings: Any) -> Case:
    """Returns a case of numbers that need no rounding."""
    others = {name: settings.pop(name) for name in ("before", "after", "dtype") if name in settings}
    settings = {"loss": "MeanSquaredError", **settings}
    return Case(exact, exact_batch, settings, **{"before": 1, "after": 2, **others}, is_exact=True)


def classified(model: Callable[..., onnx.ModelProto] = classifier, **settings: Any) -> Case:
    """Returns a case of the classifier."""
    shape = {normalizing: (1, 4, 4), older: (1, 5)}.get(model, (5,))
    loss: Any = {"loss": "SoftmaxCrossEntropy"}
    return Case(model, lambda seed: labelled(*shape, seed=seed), {**loss, **settings})


def adapted(base: Callable[[], onnx.ModelProto]) -> Case:
    """Returns a case of an adapter, which alone is trained."""
    return Case(
        lambda: lora.add(base(), rank=2, alpha=4),
        lambda seed: with_targets(32, 4, seed, rows=4),
        {"loss": "MeanSquaredError", "optimizer": o.Adam(0.05)},
    )


SCHEDULES = {
    "constant": s.constant(0.125, warmup=3),
    "step": s.step(0.125, every=2, factor=0.5),
    "exponential": s.exponential(0.125, factor=0.75),
    "polynomial": s.polynomial(0.125, steps=8, power=2.0),
    "cosine": s.cosine(0.125, steps=8, restarts=1),
    "one_cycle": s.one_cycle(0.125, steps=8),
    "warmup_cosine": s.warmup_cosine(0.125, steps=8, warmup=2),
    "warmup_linear": s.warmup_linear(0.125, steps=8, warmup=2),
}
OPTIMIZERS = {
    **{
        name.lower(): classified(
            # These two optimizers treat matrices and vectors differently.
            functools.partial(linear, has_bias=name in ("Adafactor", "Muon")),
            optimizer=make(learning_rate=0.05),
        )
        for name, make in o.OPTIMIZERS.items()
    },
    "adam8bit": classified(linear, optimizer=o.Adam8bit(0.05, min_8bit_size=1)),
    "adam_after_correction": classified(
        linear, optimizer=o.Adam(0.05, epsilon_after_correction=True)
    ),
    "sgd_nesterov": classified(linear, optimizer=o.SGD(0.05, momentum=0.9, nesterov=True)),
}
SCHEDULED = {
    name: classified(linear, optimizer=o.SGD(schedule)) for name, schedule in SCHEDULES.items()
}
FEATURES = {
    "own_rule": classified(linear, optimizer=o.Custom(own_rule, learning_rate=0.05)),
    "groups_clipping_average": classified(
        optimizer=o.AdamW(s.warmup_linear(0.05, steps=20, warmup=3)),
        groups={"*": {"weight_decay": 0.0}, "w1": {"learning_rate": 0.2}},
        clip_norm=0.5,
        ema_decay=0.9,
    ),
    "dropout_batch_normalization": classified(normalizing, optimizer="Adam", seed=3),
    "two_losses": Case(
        lambda: classifier(outputs=("classes", "boxes")),
        lambda seed: {**labelled(5, seed=seed), "targets": with_targets(5, 3, seed)["targets"]},
        {
            "loss": 0.75 * losses.SoftmaxCrossEntropy("classes", label_smoothing=0.1)
            + 0.25 * losses.L1("boxes"),
            "optimizer": "Adam",
        },
    ),
    "lifted_weights": Case(
        lifted,
        lambda seed: with_targets(2, 2, seed),
        {"loss": "MeanSquaredError", "optimizer": o.Adam(0.05)},
    ),
    "external_data": classified(linear, optimizer="Adam"),
    "from_opset_11": classified(older, optimizer=o.Adam(0.05)),
    "gradient_in_graph": Case(
        forces,
        lambda seed: {"x": with_targets(3, 1, seed)["x"]},
        {
            "loss": lambda slope: op.ReduceMean(slope * slope, keepdims=0),
            "optimizer": o.SGD(0.05),
        },
        predicted=["energy"],
    ),
    "part_trained": classified(optimizer=o.Adam(0.05), trainable=["w1"]),
    "smoothed_weighted": classified(
        linear,
        loss=losses.SoftmaxCrossEntropy(label_smoothing=0.1, weights=[1.0, 2.0, 0.5]),
        optimizer=o.Adam(0.05),
    ),
    "quantile": Case(
        lambda: layers(5),
        lambda seed: {
            "x": with_targets(5, 4, seed)["x"],
            "targets": with_targets(5, 4, seed)["targets"][:, 0],
        },
        {"loss": losses.Quantile(quantiles=[0.1, 0.25, 0.5, 0.9]), "optimizer": o.SGD(0.05)},
    ),
    "two_entries": Case(
        classifier,
        lambda seed: labelled(5, seed=seed),
        {"loss": "SoftmaxCrossEntropy", "optimizer": o.Adam(0.05), "trainable": ["w1"]},
        entries=[
            {
                "loss": "SoftmaxCrossEntropy",
                "optimizer": o.Momentum(0.05),
                "trainable": ["logits.w2", "b1"],
                "name": "head",
            }
        ],
    ),
}
"""Files with several training algorithms."""

ADAPTERS = {
    "trainable_float": adapted(layers),
    "trainable_int4_matmul_nbits": adapted(lambda: quantized("matmul_nbits")),
    "trainable_int4_dequantize": adapted(lambda: quantized("dequantize")),
}
EXACT = {
    "sgd": exact_case(
        optimizer=o.SGD(0.5), clip_value=1.0, ema_decay=0.5, groups={"b": {"learning_rate": 0.25}}
    ),
    "momentum": exact_case(optimizer=o.Momentum(0.5, alpha=0.5)),
    "lion": exact_case(optimizer=o.Lion(0.25, 0.5, 0.75, weight_decay=0.5)),
    "float16": exact_case(optimizer=o.SGD(0.5), before=2, after=2, dtype=np.float16),
    "bfloat16": exact_case(optimizer=o.SGD(0.5), dtype="bfloat16"),
}


def write_trainable(folder: Path, cases: Mapping[str, Case]) -> None:
    """Writes trainable files, and the results of training each of them."""
    for name, case in cases.items():
        model, batches = made(case)
        trainable = build_training_model(model, **case.settings)
        for entry in case.entries:
            trainable = ortops.add_training(trainable, **entry)
        session = TrainingSession(trainable)
        for batch in batches[: case.before]:
            session.step(batch)
        path = folder / f"{name}.onnx"
        session.save(path)
        if name == "external_data":
            beside = {"save_as_external_data": True, "location": f"{name}.data"}
            path.unlink()
            onnx.save(session.model(), path, **beside, size_threshold=0)
        if name == "from_opset_11":
            onnx.save(model, folder / f"{name}.original.onnx")
        if case.is_exact:
            check_exact(case, name)
        arrays, about = expectations(TrainingSession(path), batches[case.before :], case.predicted)
        store(folder / f"{name}.expected.safetensors", arrays, {"exact": case.is_exact, **about})


def made(case: Case, dtype: Any = None) -> tuple[onnx.ModelProto, list[Arrays]]:
    """Returns the model of a case and the batches of all its steps, of another type if given."""
    count = case.before + case.after
    if not case.is_exact:
        return case.model(), [case.batch(seed=seed) for seed in range(count)]
    own = np.dtype(case.dtype if case.dtype != "bfloat16" else bfloat16())
    kind = np.dtype(dtype or own)
    wide = kind if kind.itemsize > 4 else np.dtype(np.float32)
    return case.model(kind), [case.batch(seed, kind, wide) for seed in range(count)]


def bfloat16() -> Any:
    """Returns numpy's type for bfloat16."""
    import ml_dtypes

    return ml_dtypes.bfloat16


def check_exact(case: Case, name: str) -> None:
    """Checks that float64 gives the same numbers, so that nothing was rounded."""
    (model, batches), (wide, wide_batches) = made(case), made(case, np.float64)
    session = TrainingSession(build_training_model(model, **case.settings))
    other = TrainingSession(build_training_model(wide, **case.settings))
    made_steps = 0
    for batch, wide_batch in zip(batches, wide_batches, strict=True):
        loss, before = session.step(batch)["loss"], session.steps_done
        if before == made_steps:  # float16 has skipped the step
            continue
        made_steps = before
        assert loss == other.step(wide_batch)["loss"], (name, made_steps)
    assert made_steps >= 2, name
    # For 16-bit parameters, these are the float32 values before rounding.
    for variable, array in other.parameters.items():
        np.testing.assert_array_equal(session.parameters[variable], array, err_msg=variable)


def expectations(
    session: TrainingSession, batches: list[Arrays], predicted: Sequence[str] | None = None
) -> tuple[Arrays, dict[str, Any]]:
    """Returns the state and results of a session: arrays, and JSON-serializable values."""
    arrays = prefixed("state", session.state)
    for number, batch in enumerate(batches):
        arrays |= prefixed(f"feeds/{number}", batch)
    arrays |= prefixed("predicted", session.predict(batches[0], outputs=predicted))
    about = {
        "steps_done": session.steps_done,
        "learning_rate": session.peak_learning_rate,
        "inputs": list(session.inputs),
        "parameters": list(session.parameters),
        "evaluated": session.evaluate(batches[0]),
        "averages": None,
    }
    if any(name.endswith(".ema") for name in session.state):
        about["averages"] = session.evaluate(batches[0], ema=True)
    shown = [session.step(batch) for batch in batches]
    arrays["loss"] = np.array([each["loss"] for each in shown])
    about["outputs"] = sorted(shown[0])
    about["steps_done_after"] = session.steps_done
    arrays |= prefixed("after", session.state)
    session.reset()
    about["steps_done_reset"] = session.steps_done
    reset = prefixed("reset", session.state)  # unchanged variables are left out
    same = [
        n for n in reset if np.array_equal(reset[n], arrays[f"state/{n.removeprefix('reset/')}"])
    ]
    arrays |= {name: array for name, array in reset.items() if name not in same}
    return arrays, about


def prefixed(prefix: str, arrays: Mapping[str, Any]) -> Arrays:
    """Returns copies of arrays, with a prefix before their names."""
    return {f"{prefix}/{name}": np.array(array) for name, array in arrays.items()}


def store(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Writes arrays, and JSON-serializable values next to them; bfloat16 as its bits."""
    stored = {name: np.array(array, order="C") for name, array in arrays.items()}
    bits = [name for name, array in stored.items() if array.dtype == bfloat16()]
    stored |= {name: stored[name].view(np.uint16) for name in bits}
    text = json.dumps({**about, "bfloat16": bits}, sort_keys=True)
    save_file(stored, path, metadata={"about": text})


# ------------------------------------------------------------------------- trainings to resume


class Killed(BaseException):
    """Ends a training immediately after a file was saved."""


@contextlib.contextmanager
def killed_after_saving(step: int, file: str) -> Iterator[None]:
    """Ends a training as a kill would, after a file was saved at a given step."""
    save = TrainingSession.save
    is_dead = False

    def save_and_die(self: TrainingSession, path: Any) -> None:
        nonlocal is_dead
        if is_dead:
            raise Killed
        save(self, path)
        if Path(path).name == file and self.steps_done == step:
            is_dead = True
            raise Killed

    TrainingSession.save = save_and_die  # type: ignore[method-assign]
    try:
        yield
    except Killed:
        pass
    else:
        raise AssertionError(f"{file} was not saved at step {step}")
    finally:
        TrainingSession.save = save  # type: ignore[method-assign]


class Losses(callbacks.Callback):
    """Records the loss of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, record: Any, session: Any) -> None:
        """Records a loss."""
        self.losses.append(record.values["loss"])


@dataclass(frozen=True)
class Resumed:
    """A training that was interrupted.

    Attributes:
        settings: The arguments of `build_training_model`.
        fit: The JSON-serializable arguments of `fit`.
        step: The step after which it is interrupted.
        callbacks: Names of callbacks, and their arguments.
        every: The number of steps between checkpoints; None to save after each epoch.
        is_exact: Whether no step needs rounding.
        has_batches: Whether the data are given as batches.
        has_validation: Whether there are validation data.
        schedule: The first rate of a schedule of epochs, which falls to 0; or None.
    """

    settings: Mapping[str, Any]
    fit: Mapping[str, Any]
    step: int
    callbacks: Sequence[tuple[str, Mapping[str, Any]]] = ()
    every: int | None = None
    is_exact: bool = False
    has_batches: bool = False
    has_validation: bool = False
    schedule: float | None = None

    def model(self) -> onnx.ModelProto:
        """Returns the trainable model."""
        given = exact() if self.is_exact else classifier(dropout=0.25)
        return build_training_model(given, **self.settings)

    def rows(self, seed: int) -> Arrays:
        """Returns 18 rows: five batches of 4, the last of 2."""
        if not self.is_exact:
            return labelled(5, seed=seed, rows=18)
        batches = [exact_batch(seed + number) for number in range(5)]
        return {n: np.concatenate([b[n] for b in batches])[:18] for n in batches[0]}


ADAM: Mapping[str, Any] = {"loss": "SoftmaxCrossEntropy", "optimizer": o.Adam(0.05), "seed": 7}
UNROUNDED: Mapping[str, Any] = {"loss": own_loss, "optimizer": o.SGD(0.125)}
FIT: Mapping[str, Any] = {"epochs": 3, "batch_size": 4, "seed": 5}
RESUMED = {
    "middle_of_epoch": Resumed(
        ADAM,
        {**FIT, "epochs": 8, "metrics": ["accuracy"]},
        step=13,
        callbacks=[
            ("EarlyStopping", {"patience": 2, "minimum_change": 0.25, "restore_best": "stop.onnx"}),
            ("BestModel", {"path": "best.onnx", "monitor": "loss"}),
            ("CSVLog", {"path": "log.csv"}),
        ],
        every=13,
        has_validation=True,
    ),
    "end_of_epoch": Resumed(
        {**ADAM, "optimizer": o.Adam(s.warmup_linear(0.05, steps=15, warmup=3))}, FIT, step=10
    ),
    "finished": Resumed(ADAM, FIT, step=15, every=100),
    "accumulated": Resumed(ADAM, {**FIT, "accumulate": 2}, step=5, every=5),
    "batches": Resumed(ADAM, FIT, step=7, every=7, has_batches=True),
    "schedule_of_epochs": Resumed(ADAM, FIT, step=8, every=8, schedule=0.125),
    "exact_middle": Resumed(UNROUNDED, FIT, step=8, every=4, is_exact=True),
    "exact_accumulated": Resumed(
        UNROUNDED, {**FIT, "accumulate": 2}, step=4, every=2, is_exact=True
    ),
}


def write_resumed(folder: Path) -> None:
    """Writes files of interrupted trainings, and the results of resuming them."""
    for name, case in RESUMED.items():
        path = folder / name
        path.mkdir()
        rows = case.rows(seed=0)
        data: Any = rows
        if case.has_batches:
            data = [{n: a[at : at + 4] for n, a in rows.items()} for at in range(0, 18, 4)]
        validation = case.rows(seed=50) if case.has_validation else None
        settings: dict[str, Any] = {**case.fit, "progress": False, "validation": validation}
        if case.schedule is not None:
            settings["schedule"] = lambda done, first=case.schedule: first * (1 - done)
        checkpoint = ("Checkpoint", {"path": "trained.onnx", "every": case.every})
        described = [*case.callbacks, checkpoint]
        with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
            with killed_after_saving(case.step, "trained.onnx"):
                TrainingSession(case.model()).fit(data, **settings, callbacks=opened(described))
            for file in Path().iterdir():
                shutil.copy(file, path)
            session = TrainingSession("trained.onnx")
            arrays = prefixed("rows", rows) | prefixed("state", session.state)
            if validation is not None:
                arrays |= prefixed("validation", validation)
            about = {
                "exact": case.is_exact,
                "fit": dict(case.fit),
                "schedule": case.schedule,
                "callbacks": described,
                "batches": case.has_batches,
                "steps_done": session.steps_done,
                "history": list(session.history),
            }
            recorded = Losses()
            given = [*opened(described), recorded]
            history = session.fit(data, resume=True, **settings, callbacks=given)
            arrays["loss"] = np.array(recorded.losses)
            arrays |= prefixed("after", session.state)
            about |= {
                "steps_done_after": session.steps_done,
                "history_after": list(history),
                "log": log_of(Path("log.csv")),
            }
            if Path("best.onnx").exists():
                arrays |= prefixed("best", TrainingSession("best.onnx").state)
        with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
            unbroken = TrainingSession(case.model())
            unbroken.fit(data, **settings, callbacks=opened(case.callbacks))
        for variable, array in unbroken.state.items():
            np.testing.assert_array_equal(arrays[f"after/{variable}"], array)
        store(path / "expected.safetensors", arrays, about)


def opened(described: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Any]:
    """Returns the described callbacks."""
    return [getattr(callbacks, name)(**arguments) for name, arguments in described]


def log_of(path: Path) -> list[dict[str, str]] | None:
    """Returns the rows of a log without times; None if there is no log."""
    if not path.exists():
        return None
    with path.open(newline="", encoding="utf-8") as stream:
        return [{n: v for n, v in row.items() if n != "seconds"} for row in csv.DictReader(stream)]


def write_command_line(folder: Path) -> None:
    """Writes an interrupted training of the command line, and the result of resuming it."""
    from ortops.cli import main

    rng = np.random.default_rng(8)
    points = rng.normal(size=(24, 2)).astype(np.float32)
    names = np.array(["east", "north", "rest"])
    labels = names[np.argmax([points[:, 0], points[:, 1], -points.sum(axis=1)], axis=0)]
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 18], producer_name: "ortops">
        points (float[batch, 2] points) => (float[batch, 3] probabilities)
        <float[2, 3] w = {1, 0, 0.5, 0, 1, 0.5}> {
            logits = MatMul (points, w)
            probabilities = Softmax (logits)
        }""")
    command = [
        *("train", "model.onnx", "--data", "train.csv", "--validation", "0.25"),
        *("--loss", "SoftmaxCrossEntropy", "--optimizer", "AdamW(weight_decay=0.1)"),
        *("--learning-rate", "warmup_linear(0.1, warmup=2)", "--clip-norm", "1"),
        *("--epochs", "4", "--batch-size", "4", "--metrics", "accuracy"),
        *("--early-stopping", "3", "--best", "best.onnx", "--log", "log.csv"),
        *("--checkpoint-steps", "7", "--save", "trained.onnx", "--quiet"),
    ]
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        onnx.save(model, "model.onnx")
        with Path("train.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["x", "y", "labels"])
            writer.writerows([*map(str, p), n] for p, n in zip(points, labels, strict=True))
        with killed_after_saving(7, "trained.onnx"):
            main(command)
        for file in Path().iterdir():
            shutil.copy(file, folder)
        session = TrainingSession("trained.onnx")
        arrays = prefixed("state", session.state)
        about = {"command": command, "history": list(session.history), "steps_done": 7}
        assert main([*command, "--resume"]) == 0
        session = TrainingSession("trained.onnx")
        arrays |= prefixed("after", session.state)
        arrays["points"] = points
        arrays["predicted"] = session.predict({"points": points})["probabilities"]
        about |= {
            "exact": False,
            "history_after": list(session.history),
            "steps_done_after": session.steps_done,
            "log": log_of(Path("log.csv")),
        }
        store(folder / "expected.safetensors", arrays, about)


# ------------------------------------------------------------------------------------ adapters


def write_lora(folder: Path) -> None:
    """Writes trainable models with adapters, bases, adapters of onnxruntime and folders of PEFT."""
    write_trainable(folder, ADAPTERS)
    for name in ("float", "int4_matmul_nbits", "int4_dequantize"):
        path = folder / name
        path.mkdir()
        base = layers() if name == "float" else quantized(name.removeprefix("int4_"))
        onnx.save(base, path / "base.onnx")
        model = lora.add(base, rank=2, alpha=4)
        onnx.save(model, path / "with_adapter.onnx")
        trainable = build_training_model(model, loss="MeanSquaredError", optimizer=o.Adam(0.25))
        session = TrainingSession(trainable)
        batch = with_targets(32, 4, rows=4)
        session.run_steps([batch] * 4)
        trained = session.inference_model(model)
        lora.save_adapter(trained, path / "trained.onnx_adapter")
        lora.to_peft(trained, path / "peft")
        plain = session_of(base).run(None, {"x": batch["x"]})[0]
        adapted = session_of(trained).run(None, {"x": batch["x"]})[0]
        assert abs(plain - adapted).max() > 0.1
        arrays = {"x": batch["x"], "base": plain, "adapted": adapted}
        arrays |= prefixed("adapter", session.parameters)
        store(path / "expected.safetensors", arrays, {})


def session_of(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """Opens a stock onnxruntime session."""
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


# ------------------------------------------------------------------------------ exported steps


def write_steps(folder: Path) -> None:
    """Writes folders of `export_step` and a step graph, and the results of their steps."""
    session = TrainingSession(
        build_training_model(
            normalizing(),
            loss="SoftmaxCrossEntropy",
            optimizer=o.Adam(s.warmup_linear(0.05, steps=9, warmup=2)),
            ema_decay=0.9,
            seed=3,
        )
    )
    batches = [labelled(1, 4, 4, seed=seed) for seed in range(5)]
    for batch in batches[:2]:
        session.step(batch)
    model = session.model()
    arrays, about = expectations(TrainingSession(model), batches[2:])
    for target in (None, "onnxruntime"):
        path = folder / f"exported_{'any' if target is None else target}"
        ortops.export_step(model, path, target=target)  # type: ignore[arg-type]
        store(path / "expected.safetensors", arrays, {"exact": False, **about})
    small, kept = made(OPTIMIZERS["adam"])
    session = TrainingSession(build_training_model(small, **OPTIMIZERS["adam"].settings))
    for batch in kept[:2]:
        session.step(batch)
    path = folder / "step_graph"
    path.mkdir()
    onnx.save(ortops.step_graph(session.model()), path / "step.onnx")
    arrays, about = expectations(session, kept[2:])
    store(path / "expected.safetensors", arrays, {"exact": False, **about})


# ------------------------------------------------------------------------------------ the folder

PARTS: dict[str, Callable[[Path], None]] = {
    "optimizers": functools.partial(write_trainable, cases=OPTIMIZERS),
    "schedules": functools.partial(write_trainable, cases=SCHEDULED),
    "features": functools.partial(write_trainable, cases=FEATURES),
    "exact": functools.partial(write_trainable, cases=EXACT),
    "resume": write_resumed,
    "command_line": write_command_line,
    "lora": write_lora,
    "steps": write_steps,
}


def archive(folder: Path, path: Path) -> None:
    """Writes a folder to a zip file without time stamps or other data of the machine."""
    with zipfile.ZipFile(path, "x") as file:
        for each in sorted(folder.rglob("*")):
            if each.is_file():
                entry = zipfile.ZipInfo(each.relative_to(folder).as_posix())
                entry.create_system, entry.external_attr = 3, 0o644 << 16
                file.writestr(entry, each.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)


def main() -> int:
    """Writes the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder for the zip files")
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    paths = {name: options.folder / f"{name}.zip" for name in options.parts or PARTS}
    if present := [str(path) for path in paths.values() if path.exists()]:
        parser.error(f"{', '.join(present)} already exists; golden files are never overwritten")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        with tempfile.TemporaryDirectory() as folder:
            PARTS[name](Path(folder))
            archive(Path(folder), path)
        print(f"{path}: {path.stat().st_size:,} bytes", file=sys.stderr)
    if sizes := [path for path in paths.values() if path.stat().st_size > LARGEST_FILE]:
        print(f"too large: {', '.join(map(str, sizes))}", file=sys.stderr)
    return int(bool(sizes))


if __name__ == "__main__":
    sys.exit(main())
