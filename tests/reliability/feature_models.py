"""What draws of features stand for: tiny models, losses, learning rates and forms of data."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.parser
from features import EXPORTED, ROWS, WITHOUT_LABELS, Draw
from onnx import numpy_helper

import ortops
from ortops import losses, op, schedules
from ortops.optimizers import OPTIMIZERS

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

CLASSES = 3

# ---------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A tiny model whose output ``y`` has `CLASSES` on axis 1.

    Attributes:
        inputs: Element type and sizes of each input behind the batch; integers are below 7.
        output: Element type, and sizes of ``y`` behind the classes.
        weights: Sizes of each weight. A name tells its type: that of the model, if it has a ``_``.
        body: The text of the nodes up to ``hidden``.
        head: The text of the nodes behind it, where Dropout may stand between.
        statistics: Values of what is no weight.
        axes: The axis of the rows in each input, where it is not the first.
    """

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    weights: Mapping[str, tuple[int, ...]]
    body: str
    head: str = "y0 = MatMul(kept, head_w)  y = Add(y0, head_b)"
    dtype: str = "float"
    output: tuple[int, ...] = ()
    statistics: Mapping[str, Sequence[float]] = field(default_factory=dict)
    axes: Mapping[str, int] = field(default_factory=dict)


_HEAD = {"head_w": (4, CLASSES), "head_b": (CLASSES,)}
_LAYERS = {"body_w": (4, 4), "body_b": (4,), **_HEAD}
_TANH = "a = MatMul(x, body_w)  b = Add(a, body_b)  hidden = Tanh(b)"


def _scaled(dtype: str) -> Model:
    return Model(
        {"x": (dtype, (4,))}, {"body_w": (4,), **_HEAD}, "hidden = Mul(x, body_w)", dtype=dtype
    )


def _perceptron(dtype: str = "float") -> Model:
    return Model({"x": (dtype, (4,))}, _LAYERS, _TANH, dtype=dtype)


def _convolutional(dtype: str) -> Model:
    return Model(
        {"x": (dtype, (1, 4, 4))},
        {"body_w": (4, 1, 3, 3), "body_b": (4,), **_HEAD},
        """a = Conv <pads = [1, 1, 1, 1]> (x, body_w)
        b = BatchNormalization <momentum = 0.8> (a, scale, body_b, mean, variance)
        hidden = Relu(b)""",
        """pooled = GlobalAveragePool(kept)  flat = Flatten(pooled)
        y0 = MatMul(flat, head_w)  y = Add(y0, head_b)""",
        dtype,
        statistics={"scale": [0.5, 1, 1.5, 1], "mean": [0, 0.1, -0.1, 0], "variance": [1, 2, 1, 2]},
    )


MODELS: dict[str, Model] = {
    "affine": _scaled("float"),
    "double": _scaled("double"),
    "classifier": _perceptron(),
    "lora": _perceptron(),
    "dora": _perceptron(),
    "half": _perceptron("float16"),
    "convolutional": _convolutional("float"),
    "half overflowing": _convolutional("float16"),
    "tokens": Model(
        {"ids": ("int64", (5,)), "mask": ("float", (5,))},
        {"table_w": (7, 4), "gru_w": (1, 12, 4), "gru_r": (1, 12, 4), "gru_b": (1, 24), **_HEAD},
        """a = Gather(table_w, ids)
        last = Constant <value = int64[1] {2}> ()
        b = Unsqueeze(mask, last)
        c = Mul(a, b)
        d = Transpose <perm = [1, 0, 2]> (c)
        all, final = GRU <hidden_size = 4> (d, gru_w, gru_r, gru_b)
        first = Constant <value = int64[1] {0}> ()
        hidden = Squeeze(final, first)""",
    ),
    "tagger": Model(
        {"x": ("float", (4, 5))},
        {"body_w": (4, 4, 3), "body_b": (4,), "head_w": (CLASSES, 4, 1), "head_b": (CLASSES,)},
        "a = Conv <pads = [1, 1]> (x, body_w, body_b)  hidden = Tanh(a)",
        "y = Conv(kept, head_w, head_b)",
        output=(5,),
    ),
    "stateful": Model(
        {"x": ("float", (4,)), "state": ("float", (2, 4))},
        _LAYERS,
        """a = MatMul(x, body_w)
        first = Constant <value = int64[1] {0}> ()
        s = ReduceSum <keepdims = 0> (state, first)
        b = Add(a, s)  c = Add(b, body_b)  hidden = Tanh(c)""",
        axes={"state": 1},
    ),
    "branching": Model(
        {"x": ("float", (4,))},
        _LAYERS,
        """largest = ReduceMax <keepdims = 0> (body_w)
        limit = Constant <value = float {1.0}> ()
        is_large = Greater(largest, limit)
        hidden = If(is_large) <
            then_branch = then () => (float[batch, 4] bent)
            {ta = MatMul(x, body_w)  bent = Tanh(ta)},
            else_branch = other () => (float[batch, 4] cut)
            {ea = MatMul(x, body_w)  eb = Add(ea, body_b)  cut = Relu(eb)}
        >""",
    ),
}

_EXPORTED = {
    "convolutional": Model({"x": ("float", (1, 4, 4))}, {}, ""),
    "tokens": Model({"ids": ("int64", (5,))}, {}, ""),
}
MODELS |= {name: _EXPORTED[name.split()[0]] for name in EXPORTED}


@functools.cache
def _exported(name: str, *, dropout: bool, batch: int | None) -> bytes:
    """Exports a module in training mode.

    Args:
        name: A name of a model in `EXPORTED`.
        dropout: Whether it has a Dropout layer.
        batch: The size of its batch, if that is fixed.
    """
    import torch
    from torch import nn

    torch.manual_seed(0)
    dropped = [nn.Dropout(0.25)] if dropout else []

    class Last(nn.Module):
        """The last state of a recurrent layer."""

        def __init__(self) -> None:
            super().__init__()
            self.table, self.gru = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.gru(self.table(ids))[0][:, -1]

    rows = batch or 2
    module: nn.Module
    if name.startswith("tokens"):
        module, given, argument = Last(), torch.zeros(rows, 5, dtype=torch.int64), "ids"
    else:
        convolution = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
        module = nn.Sequential(*convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        given, argument = torch.zeros(rows, 1, 4, 4), "x"
    head = nn.Linear(4, CLASSES)
    module = nn.Sequential(OrderedDict(body=module, dropout=nn.Sequential(*dropped), head=head))
    settings: dict[str, Any] = {"input_names": [argument], "output_names": ["y"]}
    if name.endswith("by dynamo"):
        settings |= {"dynamo": True, "optimize": False, "verbose": False}
        if batch is None:
            settings["dynamic_shapes"] = ({0: "batch"},)
    else:
        training = torch.onnx.TrainingMode.TRAINING
        settings |= {"dynamo": False, "training": training, "do_constant_folding": False}
        if batch is None:
            settings["dynamic_axes"] = {argument: {0: "batch"}, "y": {0: "batch"}}
    file = io.BytesIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the exporters warn about themselves
        program = torch.onnx.export(module.train(), (given,), file, **settings)
    return file.getvalue() if program is None else program.model_proto.SerializeToString()


_NUMPY = {"float": np.float32, "double": np.float64, "float16": np.float16, "int64": np.int64}


def inference_model(draw: Draw) -> onnx.ModelProto:
    """Returns the model of a draw."""
    if draw.model in EXPORTED:
        batch_size = draw.batch_size if draw.fixed else None
        return onnx.load_from_string(_exported(draw.model, dropout=draw.dropout, batch=batch_size))
    model = MODELS[draw.model]
    rng = np.random.default_rng(draw.seed)
    batch = str(draw.batch_size) if draw.fixed else "batch"

    def declared(dtype: str, sizes: Iterable[int], name: str) -> str:
        dims = [*map(str, sizes)]
        dims.insert(model.axes.get(name, 0), batch)
        return f"{dtype}[{', '.join(dims)}] {name}"

    inputs = ", ".join(declared(*kind, name) for name, kind in model.inputs.items())
    dropped = "ratio = Constant <value = float {0.25}> ()  kept = Dropout(hidden, ratio)"
    between = dropped if draw.dropout else ""
    head = model.head if draw.dropout else model.head.replace("kept", "hidden")
    output = declared(model.dtype, (CLASSES, *model.output), "y")
    body = model.body.replace("[batch,", f"[{batch},")
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": {draw.opset}]>
        tiny ({inputs}) => ({output}) {{ {body} {between} {head} }}"""
    )
    dtype = _NUMPY[model.dtype]
    values = {name: rng.normal(size=sizes) for name, sizes in model.weights.items()}
    values |= {name: np.array(given) for name, given in model.statistics.items()}
    proto.graph.initializer.extend(
        numpy_helper.from_array(array.astype(dtype), name) for name, array in values.items()
    )
    if draw.model in ("lora", "dora"):
        settings = {"dropout": 0.25 * draw.dropout, "dora": draw.model == "dora"}
        return ortops.lora.add(proto, rank=2, alpha=4, seed=draw.seed, **settings)
    return proto


def _squares(y: Any) -> Any:
    return op.ReduceMean(y * y, keepdims=0)


LOSSES: dict[str, Callable[[], Any]] = {
    "MeanSquaredError": losses.MeanSquaredError,
    "Huber": lambda: losses.Huber(delta=0.5),
    "L1": losses.L1,
    "SoftmaxCrossEntropy": losses.SoftmaxCrossEntropy,
    "smoothed": lambda: losses.SoftmaxCrossEntropy(label_smoothing=0.1),
    "ignoring": lambda: losses.SoftmaxCrossEntropy(ignore_index=-100),
    "weighted": lambda: losses.SoftmaxCrossEntropy(weights=[*CLASS_WEIGHTS]),
    "sum of losses": lambda: 0.7 * losses.MeanSquaredError() + 0.3 * losses.Huber(),
    "sum of classes": lambda: (
        0.6 * losses.SoftmaxCrossEntropy(ignore_index=-100) + 0.4 * losses.MeanSquaredError()
    ),
    "summed": lambda: losses.MeanSquaredError(reduction="sum"),
    "function": lambda: _squares,
    "by output": lambda: {"y": losses.SoftmaxCrossEntropy(target="labels")},
}

CLASS_WEIGHTS = (0.5, 1.0, 2.0)

SUMMANDS = {"loss_SoftmaxCrossEntropy": 0.6, "loss_MeanSquaredError": 0.4}
"""The losses that "sum of classes" adds up, with their weights."""


ROW_WEIGHTS = (0.5, 1.0, 2.0, 0.25)

BY_CLASS = (2.0, 0.5, 1.0)
"""The weights of classes that fit is given."""


def loss_of(draw: Draw) -> Any:
    """Returns the loss of a draw."""
    found = LOSSES[draw.loss]()
    if not draw.sample_weight:
        return found
    if isinstance(found, dict):
        return {name: replace(each, sample_weight="weight") for name, each in found.items()}
    if not isinstance(found, losses.Combined):
        return replace(found, sample_weight="weight")
    return losses.Combined(
        summands=tuple((f, replace(each, sample_weight="weight")) for f, each in found.summands)
    )


def without_weights(draw: Draw, arrays: Arrays) -> tuple[Arrays, dict[str, Any]]:
    """Returns the data set that fit is given, and its arguments with the weights."""
    if draw.sample_weight not in ("array", "classes"):
        return arrays, {}
    others = {name: array for name, array in arrays.items() if name != "weight"}
    if draw.sample_weight == "array":
        return others, {"sample_weight": arrays["weight"]}
    return others, {"class_weight": dict(enumerate(BY_CLASS))}


def _row_weights(draw: Draw, arrays: Arrays, rng: np.random.Generator, rows: int) -> Array:
    if draw.sample_weight != "classes":
        found = rng.choice(ROW_WEIGHTS, rows)
    else:
        labels = arrays["labels"]
        found = np.where(labels < 0, 1.0, np.take(BY_CLASS, np.maximum(labels, 0)))
    return found.astype(np.float64 if draw.model == "double" else np.float32)


def weights_of(draw: Draw, batch: Arrays) -> list[float]:
    """Returns what the summands of a loss weigh in an average over batches.

    That is what counts of the labels of a batch, or its rows, where all of them do.
    """
    size = len(next(iter(batch.values())))
    each = batch.get("weight", np.ones(size)).astype(np.float64)
    rows = float(size if draw.loss == "summed" else each.sum())
    if "labels" in batch:
        labels = batch["labels"]
        each = each.reshape(-1, *[1] * (labels.ndim - 1))
    if draw.loss == "weighted":
        return [float((np.take(CLASS_WEIGHTS, labels) * each).sum())]
    if draw.loss == "ignoring":
        return [float(((labels != -100) * each).sum())]
    if draw.loss == "sum of classes":
        return [float(((labels != -100) * each).sum()), rows]
    return [rows]


RATE = 0.02

RATES: dict[str, Callable[[], Any]] = {
    "number": lambda: RATE,
    "by epoch": lambda: RATE,
    "constant": lambda: schedules.constant(RATE, warmup=2),
    "step": lambda: schedules.step(RATE, every=2, factor=0.5),
    "exponential": lambda: schedules.exponential(RATE, factor=0.8),
    "polynomial": lambda: schedules.polynomial(RATE, steps=6, power=2.0, end=0.001),
    "cosine": lambda: schedules.cosine(RATE, steps=6, restarts=1),
    "one_cycle": lambda: schedules.one_cycle(RATE, steps=6),
    "warmup_cosine": lambda: schedules.warmup_cosine(RATE, steps=6, warmup=2),
    "warmup_linear": lambda: schedules.warmup_linear(RATE, steps=6, warmup=1),
    "function of the step": lambda: lambda step: RATE / (1.0 + 0.5 * step),
    "sequence": lambda: schedules.sequence(
        schedules.constant(RATE, warmup=2), lambda step: 0.5 * RATE * 0.9**step, at=3
    ),
}


def rate_of_epoch(done: float) -> float:
    """Returns the learning rate of an epoch, given the share of those that are done."""
    return RATE * (1 - 0.5 * done)


def with_second_entry(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a trainable model with one more training_info entry."""
    optimizer = OPTIMIZERS["Adam"](learning_rate=0.1)
    return ortops.add_training(model, loss=_squares, optimizer=optimizer, name="other")


def collate_of(draw: Draw) -> Any:
    """Returns what fit makes batches of samples with."""

    def join(several: list[Arrays]) -> Arrays:
        columns = {name: np.stack([one[name] for one in several]) for name in several[0]}
        return {name: np.moveaxis(array, 0, axis_of(name)) for name, array in columns.items()}

    return {"collated": join, "list of samples": "pad"}.get(draw.data)


def optimizer_of(draw: Draw) -> Any:
    """Returns the optimizer of a draw. The smallest weights have moments of 8 bits as well."""
    settings = {"block_size": 16, "min_8bit_size": 1} if draw.optimizer == "Adam8bit" else {}
    return OPTIMIZERS[draw.optimizer](learning_rate=RATES[draw.rate](), **settings)


def build(draw: Draw, source: Any, *, unweighted: bool = False) -> onnx.ModelProto:
    """Returns the trainable model of a draw, given its inference model in any form.

    Args:
        draw: The draw.
        source: The inference model.
        unweighted: Whether its loss has no weights, although the draw has some.
    """
    clipping: dict[str, Any] = {
        **({"clip_norm": 0.5} if draw.clip in ("norm", "both") else {}),
        **({"clip_value": 0.05} if draw.clip in ("value", "both") else {}),
    }
    result = ortops.build_training_model(
        source,
        loss=LOSSES[draw.loss]() if unweighted else loss_of(draw),
        optimizer=optimizer_of(draw),
        trainable={"all": None, "some": ["head*"], "not some": ["!head?b*"]}[draw.trainable],
        groups={"head*": {"learning_rate": 0.05}} if draw.groups else None,
        ema_decay=0.9 if draw.ema else None,
        batch_normalization=draw.batch_normalization,  # type: ignore[arg-type]
        seed=draw.seed,
        **clipping,
    )
    if draw.model == "half overflowing":
        for tensor in result.training_info[0].algorithm.initializer:
            if tensor.name == "loss_scale":
                tensor.CopyFrom(numpy_helper.from_array(np.array(2.0**17, np.float32), tensor.name))
    return result


# ------------------------------------------------------------------------------------------ data


def arrays_of(draw: Draw, rows: int = ROWS) -> Arrays:
    """Returns the data set of a draw: an array for each input of the model, then of the loss."""
    model = MODELS[draw.model]
    rng = np.random.default_rng([draw.seed, rows])
    found: Arrays = {}
    for name, (dtype, sizes) in model.inputs.items():
        if dtype == "int64":
            found[name] = rng.integers(0, 7, (rows, *sizes))
        else:
            found[name] = rng.normal(size=(rows, *sizes)).astype(_NUMPY[dtype])
        found[name] = np.moveaxis(found[name], 0, model.axes.get(name, 0)).copy()
    if draw.loss == "function":
        return found
    if draw.loss not in WITHOUT_LABELS:
        labels = rng.integers(0, CLASSES, (rows, *model.output))
        if draw.loss in ("ignoring", "sum of classes"):
            labels[1:][rng.random(labels[1:].shape) < 0.4] = -100
        found["labels"] = labels
        if draw.sample_weight:
            found["weight"] = _row_weights(draw, found, rng, rows)
    if draw.loss in (*WITHOUT_LABELS, "sum of classes"):
        dtype = np.float64 if draw.model == "double" else np.float32
        shape = rows, CLASSES, *model.output
        found["targets"] = rng.normal(size=shape).astype(dtype)
        if draw.sample_weight and "weight" not in found:
            found["weight"] = _row_weights(draw, found, rng, rows)
    return found


def axis_of(name: str) -> int:
    """Returns the axis of the rows in an array of a data set."""
    return max(model.axes.get(name, 0) for model in MODELS.values())


def rows_first(arrays: Arrays) -> Arrays:
    """Returns arrays with their rows in front."""
    return {name: np.moveaxis(array, axis_of(name), 0) for name, array in arrays.items()}


def cut(arrays: Arrays, size: int, places: Any = None) -> list[Arrays]:
    """Cuts batches from arrays, by numpy alone.

    Args:
        arrays: The arrays.
        size: Rows in a batch.
        places: The order of the rows.
    """
    rows = len(next(iter(arrays.values())))
    places = np.arange(rows) if places is None else places
    return [
        {
            name: np.take(array, places[start : start + size], axis_of(name))
            for name, array in arrays.items()
        }
        for start in range(0, rows, size)
    ]


class Stored:
    """An array in a file, as h5py has them: it reads rows in ascending order only."""

    def __init__(self, values: Array) -> None:
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, places: Any) -> Array:
        rows = places[-1] if isinstance(places, tuple) else places
        assert isinstance(rows, slice) or np.all(np.diff(rows) > 0)
        return np.array(self._values[places])

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        raise AssertionError("all of it was read")


class Samples:
    """A data set of samples, like PyTorch's."""

    def __init__(self, arrays: Arrays, *, named: bool = False) -> None:
        self.arrays, self.named = rows_first(arrays), named

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, place: int) -> Any:
        sample = {name: array[place] for name, array in self.arrays.items()}
        return sample if self.named else tuple(sample.values())


class RefilledSamples(Samples):
    """A data set that gives each sample in the same memory."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__(arrays)
        self.buffers = {name: np.empty_like(array[0]) for name, array in self.arrays.items()}

    def __getitem__(self, place: int) -> Any:
        for name, array in self.arrays.items():
            self.buffers[name][...] = array[place]
        return tuple(self.buffers.values())


class Sequenced:
    """A sequence of batches, like Keras's."""

    def __init__(self, batches: list[Arrays]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, place: int) -> Any:
        return self.batches[place]


class RefilledSequence(Sequenced):
    """A sequence that gives each batch in the same memory."""

    def __init__(self, batches: list[Arrays]) -> None:
        super().__init__(batches)
        self.memory = _Memory(batches)

    def __getitem__(self, place: int) -> Any:
        return self.memory.fill(self.batches[place])


class _Memory:
    """Buffers for a batch, which are filled again and again."""

    def __init__(self, batches: list[Arrays]) -> None:
        self.buffers = {name: np.empty_like(array) for name, array in batches[0].items()}

    def fill(self, batch: Arrays) -> Arrays:
        found = {}
        for name, array in batch.items():
            found[name] = self.buffers[name][tuple(map(slice, array.shape))]
            found[name][...] = array
        return found


class Loader:
    """Batches that can be iterated over once for each epoch, like PyTorch's loaders."""

    def __init__(self, batches: list[Arrays], *, refilled: bool = False) -> None:
        self.batches, self.refilled = batches, refilled

    def __iter__(self) -> Iterator[Any]:
        memory = _Memory(self.batches)
        for batch in self.batches:
            yield memory.fill(batch) if self.refilled else batch


class StoredTable:
    """As much of Hugging Face's datasets as is used: rows are read when they are asked for."""

    format = MappingProxyType({"type": "numpy"})

    def __init__(self, columns: Arrays) -> None:
        self.held, self.column_names = columns, list(columns)

    def with_format(self, kind: str) -> StoredTable:
        raise AssertionError("it has one")

    def select_columns(self, names: list[str]) -> StoredTable:
        return StoredTable({name: self.held[name] for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.held.values())))

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all of it was read")

    def __getitem__(self, key: str | slice | list[int]) -> Any:
        if isinstance(key, str):
            return self.held[key]
        return {name: column[key] for name, column in self.held.items()}


def _on_disk(arrays: Arrays, folder: Path) -> Arrays:
    found = {}
    for name, array in arrays.items():
        path = folder / f"{name}{'x'.join(map(str, array.shape))}.npy"
        if not path.exists():
            np.save(path, array)
        found[name] = np.load(path, mmap_mode="r")
    return found


def _file_of_arrays(arrays: Arrays, folder: Path) -> Any:
    """Returns a mapping that reads an array from a file whenever it is asked for."""
    path = folder / f"{len(next(iter(arrays.values())))}-{'-'.join(arrays)}.npz"
    if not path.exists():
        np.savez(path, **arrays)  # type: ignore[arg-type]
    return np.load(path)


def _strided(arrays: Arrays) -> Arrays:
    """Returns the same rows as every second one of larger arrays that cannot be written."""
    found = {}
    for name, array in arrays.items():
        large = np.asfortranarray(np.repeat(array, 2, axis=0))
        large.setflags(write=False)
        found[name] = large[::2]
    return found


def _records(arrays: Arrays) -> Array:
    arrays = rows_first(arrays)
    kinds: Any = [(name, array.dtype, array.shape[1:]) for name, array in arrays.items()]
    found = np.empty(len(next(iter(arrays.values()))), kinds)
    for name, array in arrays.items():
        found[name] = array
    return found


def _frame(arrays: Arrays) -> Any:
    import pandas

    return pandas.DataFrame({name: list(array) for name, array in rows_first(arrays).items()})


def _arrow(arrays: Arrays) -> Any:
    import pyarrow

    return pyarrow.table({name: array.tolist() for name, array in rows_first(arrays).items()})


def _parquet(arrays: Arrays, folder: Path) -> Path:
    """Writes a file of several row groups, of whose types only the bits of floats matter."""
    import pyarrow
    from pyarrow import parquet

    path = folder / f"{len(next(iter(arrays.values())))}-{'-'.join(arrays)}.parquet"
    if not path.exists():
        kinds = {name: pyarrow.from_numpy_dtype(array.dtype) for name, array in arrays.items()}
        for name, array in rows_first(arrays).items():
            for _ in array.shape[1:]:
                kinds[name] = pyarrow.list_(kinds[name])
        columns = {n: pyarrow.array(a.tolist(), kinds[n]) for n, a in rows_first(arrays).items()}
        parquet.write_table(pyarrow.table(columns), path, row_group_size=4)
    return path


def _sparse(arrays: Arrays) -> Any:
    import scipy.sparse

    return {
        name: scipy.sparse.csr_array(array) if name == "x" else array
        for name, array in arrays.items()
    }


ROWS_AS: dict[str, Callable[[Arrays, Path], Any]] = {
    "dict": lambda a, _: a,
    "tuple": lambda a, _: tuple(a.values()),
    "lists": lambda a, _: {name: array.tolist() for name, array in a.items()},
    "strided": lambda a, _: _strided(a),
    "memory map": _on_disk,
    "file of arrays": _file_of_arrays,
    "stored": lambda a, _: {name: Stored(array) for name, array in a.items()},
    "records": lambda a, _: _records(a),
    "function of rows": lambda a, _: lambda: a,
    "samples": lambda a, _: Samples(a),
    "samples by name": lambda a, _: Samples(a, named=True),
    "refilled samples": lambda a, _: RefilledSamples(a),
    "stored table": lambda a, _: StoredTable(rows_first(a)),
    "collated": lambda a, _: Samples(a, named=True),
    "list of samples": lambda a, _: [*map(Samples(a).__getitem__, range(len(Samples(a))))],
    "parquet": _parquet,
    "single array": lambda a, _: a["x"],
    "pandas": lambda a, _: _frame(a),
    "pyarrow": lambda a, _: _arrow(a),
    "sparse": lambda a, _: _sparse(a),
}
"""Data sets of rows, from arrays and a folder for files."""

BATCHES_AS: dict[str, Callable[[list[Arrays]], Any]] = {
    "list of batches": lambda b: b,
    "tuple of batches": tuple,
    "list of tuples": lambda b: [tuple(batch.values()) for batch in b],
    "loader": Loader,
    "refilled loader": lambda b: Loader(b, refilled=True),
    "generator": lambda b: lambda: (batch for batch in b),
    "generator of an epoch": lambda b: lambda epoch: iter(rotated(b, epoch)),
    "iterator": iter,
    "sequence": Sequenced,
    "refilled sequence": RefilledSequence,
}
"""Data sets of batches, from dicts of arrays."""


def rotated(batches: list[Arrays], epoch: int) -> list[Arrays]:
    """Returns batches in an order that tells the epoch."""
    first = epoch % len(batches)
    return batches[first:] + batches[:first]


def batches_of(draw: Draw, arrays: Arrays, epoch: int, steps: int) -> list[Arrays]:
    """Returns the batches of an epoch, cut by numpy alone.

    Args:
        draw: The draw.
        arrays: The data set.
        epoch: The epoch, from 1.
        steps: How many steps were finished before it, which with the seed determines the order.
    """
    if draw.shuffle and draw.has_rows:
        rows = len(next(iter(arrays.values())))
        places = np.random.default_rng((draw.seed, steps)).permutation(rows)
        batches = cut(arrays, draw.batch_size, places)
    else:
        batches = cut(arrays, draw.batch_size)
    if draw.drop_last:
        del batches[len(next(iter(arrays.values()))) // draw.batch_size :]
    return rotated(batches, epoch) if draw.data == "generator of an epoch" else batches


def in_form(draw: Draw, arrays: Arrays, folder: Path, *, moved: bool = False) -> Any:
    """Returns arrays in the form of a draw.

    Args:
        draw: The draw.
        arrays: The arrays.
        folder: A folder for files.
        moved: Whether they are in a plain form instead, which gives the same batches.
    """
    if draw.has_rows:
        return ROWS_AS["dict" if moved else draw.data](arrays, folder)
    return BATCHES_AS["loader" if moved else draw.data](cut(arrays, draw.batch_size))
