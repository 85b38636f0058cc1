"""Rows on another axis than 0: arrays are cut and joined along the batch dimension."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import ortops
from ortops import ArgumentError, FeedError, ModelError, OrtopsError, TrainingSession
from ortops.cli import main
from ortops.graph.row_axes import row_axes

ROWS = 6


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 21]>\n' + text)


STATE = """g (float[batch, 4] x, float[3, batch, 2] h0) => (float[batch, 2] y)
<float[4,2] w = {1,0,0,1,1,1,0,0}, int64[1] axis = {0}>
{ a = MatMul(x, w) s = ReduceSum<keepdims=0>(h0, axis) y = Add(a, s) }"""
TIME = """g (float[batch, time, 4] x) => (float[time, batch, 2] y)
<float[4,2] w = {1,0,0,1,1,1,0,0}> { a = MatMul(x, w) y = Transpose<perm=[1,0,2]>(a) }"""
W = np.array([[1, 0], [0, 1], [1, 1], [0, 0]], np.float64)


def session(text: str, **arguments: Any) -> TrainingSession:
    arguments = {"loss": "MeanSquaredError", "optimizer": "SGD", **arguments}
    return TrainingSession(ortops.build_training_model(parsed(text), **arguments))


class Samples:
    """Samples by number."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.samples[number]


def drawn(*shape: int) -> Any:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def state_data() -> tuple[dict[str, Any], float]:
    """The data of STATE, and their loss in numpy."""
    data = {"x": drawn(ROWS, 4), "h0": drawn(3, ROWS, 2), "targets": drawn(ROWS, 2)}
    wide = {name: array.astype(np.float64) for name, array in data.items()}
    return data, float(((wide["x"] @ W + wide["h0"].sum(0) - wide["targets"]) ** 2).mean())


def time_data() -> tuple[dict[str, Any], Any]:
    """The data of TIME, and what it computes, in numpy."""
    data = {"x": drawn(ROWS, 5, 4), "targets": drawn(5, ROWS, 2)}
    return data, np.swapaxes(data["x"].astype(np.float64) @ W, 0, 1)


@pytest.mark.quick(3)
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 6, 32])
def test_a_state_is_cut_along_its_batch_dimension(batch_size: int) -> None:
    data, loss = state_data()
    found = session(STATE).evaluate(data, batch_size=batch_size)["loss"]
    assert found == pytest.approx(loss, rel=1e-6)


def test_a_state_with_rows_first_is_refused() -> None:
    """It was cut along axis 0 and read along axis 1, with batches of 3 rows."""
    data, _ = state_data()
    data["h0"] = np.swapaxes(data["h0"], 0, 1)
    for batch_size in (2, 3):
        with pytest.raises(
            FeedError, match=r"'h0' 3, .* of shape \[3, batch, 2\], are along axis 1"
        ):
            session(STATE).evaluate(data, batch_size=batch_size)


@pytest.mark.parametrize("shuffle", [False, True])
def test_training_takes_the_same_rows_of_all_arrays(shuffle: bool) -> None:
    """As a model whose state has the rows first."""
    data, _ = state_data()
    first = {**data, "h0": np.swapaxes(data["h0"], 0, 1)}
    rows_first = STATE.replace("float[3, batch, 2] h0", "float[batch, 3, 2] h0").replace(
        "axis = {0}", "axis = {1}"
    )
    weights = []
    for text, given in ((STATE, data), (rows_first, first)):
        made = session(text)
        made.fit(given, epochs=2, batch_size=4, shuffle=shuffle, seed=3, progress=False)
        weights.append(made.state["w"])
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-6)
    assert not np.allclose(weights[0], W)
    if not shuffle:
        w = W.copy()
        for part in (slice(4), slice(4, None)) * 2:
            x = data["x"][part].astype(np.float64)
            error = x @ w + data["h0"][:, part].sum(0) - data["targets"][part]
            w -= 0.01 * 2 * x.T @ error / error.size
        np.testing.assert_allclose(weights[0], w, rtol=1e-5, atol=1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize("batch_size", [2, 4, 5, 32])
def test_outputs_and_targets_with_time_first(batch_size: int) -> None:
    data, y = time_data()
    made = session(TIME)
    found = made.predict({"x": data["x"]}, outputs="y", batch_size=batch_size)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    loss = made.evaluate(data, batch_size=batch_size)["loss"]
    assert loss == pytest.approx(((y - data["targets"]) ** 2).mean(), rel=1e-6)
    assert made.row_axis("y") == 1


def test_labels_with_time_first() -> None:
    data, y = time_data()
    data["labels"] = np.random.default_rng(1).integers(0, 2, (5, ROWS))
    del data["targets"]
    loss = ortops.losses.SoftmaxCrossEntropy("y", axis=-1)
    made = session(TIME, loss=loss)
    assert made.inputs["labels"].dims == ("time", "batch")
    each = np.log(np.exp(y).sum(-1)) - np.take_along_axis(y, data["labels"][..., None], -1)[..., 0]
    found = made.evaluate(data, batch_size=4, metrics=[ortops.metrics.Accuracy(axis=-1)])
    assert found["loss"] == pytest.approx(each.mean(), rel=1e-6)
    assert found["accuracy"] == pytest.approx((y.argmax(-1) == data["labels"]).mean())
    made.fit(data, batch_size=4, progress=False)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch_size", [2, 4, 32])
@pytest.mark.parametrize("classes", [1, 2])
def test_metrics_with_time_first(batch_size: int, classes: int) -> None:
    """Questions are those of the second axis of a row, the time, as where rows come first."""
    model = (
        TIME
        if classes == 2
        else TIME.replace("[1,0,2]", "[1,2,0]").replace("batch, 2]", "2, batch]")
    )
    data, y = time_data()
    draw = np.random.default_rng(2)
    if classes == 2:  # on the last axis
        targets = draw.integers(0, 2, (5, ROWS, 2)).astype(np.float32)
        made = session(model, loss=ortops.losses.BinaryCrossEntropyWithLogits("y"))
        hits, truths = np.swapaxes(y > 0, 0, 1), np.swapaxes(targets, 0, 1) > 0
        both, either = (hits & truths).sum((0, 2)), hits.sum((0, 2)) + truths.sum((0, 2))
        named, f1 = {"targets": targets}, (2 * both / either).mean()
    else:  # on axis 1, before the rows
        labels = draw.integers(0, 2, (5, ROWS))
        made = session(model, loss=ortops.losses.SoftmaxCrossEntropy("y"))
        best = y.argmax(-1)
        named = {"labels": labels}
        f1 = 2 * (best & labels).sum() / (best.sum() + labels.sum())
    given = {"x": data["x"], **named}
    found = made.evaluate(given, batch_size=batch_size, metrics=["f1", "accuracy"])
    assert found["f1"] == pytest.approx(f1)
    kept = {"batch_size": batch_size, "shuffle": False, "progress": False}
    made.learning_rate = 1e-12
    last = made.fit(given, metrics=["f1"], train_metrics=True, **kept)[-1]
    assert last["f1"] == pytest.approx(f1)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch_size", [2, 5, 32])
@pytest.mark.parametrize("form", ["dict", "samples"])
@pytest.mark.parametrize("names", [("time", "batch"), ("T", "N")])
def test_weights_of_rows_with_time_first(
    batch_size: int, form: str, names: tuple[str, str]
) -> None:
    text = TIME.replace("time", names[0]).replace("batch", names[1])
    data, y = time_data()
    w = np.arange(1.0, ROWS + 1)
    errors = (y - data["targets"]) ** 2
    expected = (errors * w[:, None]).sum() / np.broadcast_to(w[:, None], errors.shape).sum()
    given: Any = data
    if form == "samples":
        given = Samples([(data["x"][i], data["targets"][:, i]) for i in range(ROWS)])
    made = session(text)
    found = made.evaluate(given, sample_weight=w, batch_size=batch_size, metrics=["mse"])
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["mse"] == pytest.approx(expected, rel=1e-6)
    made.fit(given, sample_weight=w, batch_size=batch_size, progress=False)
    built = session(
        text.replace("batch", "N"), loss=ortops.losses.MeanSquaredError(sample_weight="v")
    )
    if names[1] == "N":
        with pytest.raises(ArgumentError, match=r"'v' of shape \[T\] has no axis for the rows"):
            built.evaluate(given, sample_weight=w)


def test_samples_and_tables_have_rows_first() -> None:
    """A sample has no axis of rows: it is put where the input has it."""
    data, loss = state_data()

    class Samples:
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {n: np.take(a, number, axis=1 if n == "h0" else 0) for n, a in data.items()}

    assert session(STATE).evaluate(Samples(), batch_size=4)["loss"] == pytest.approx(loss, 1e-6)
    table = np.zeros(ROWS, [("x", "f4", (5, 4)), ("targets", "f4", (5, 2))])
    data, y = time_data()
    table["x"], table["targets"] = data["x"], np.swapaxes(data["targets"], 0, 1)
    found = session(TIME).evaluate(table, batch_size=4)["loss"]
    assert found == pytest.approx(((y - data["targets"]) ** 2).mean(), rel=1e-6)


def test_an_output_without_rows_is_refused() -> None:
    """Also if its first size equals the number of rows by chance."""
    made = session("""g (float[batch, time, 2] x) => (float[batch, time, 2] y, float[time] t)
    <float[2] w = {2, 2}, int64[2] a = {0, 2}> { y = Mul(x, w) t = ReduceSum<keepdims=0>(y, a) }""")
    for rows in (3, 5):
        with pytest.raises(OrtopsError, match="predict: one axis of 't' must have the rows"):
            made.predict({"x": drawn(rows, 5, 2)}, outputs="t")


def test_an_input_of_another_dimension_is_the_same_in_every_batch() -> None:
    made = session("""g (float[batch, time] x, float[time] t) => (float[batch, time] y)
    <float[6] w = {2, 2, 2, 2, 2, 2}> { a = Mul(x, w) y = Add(a, t) }""")
    x, t = drawn(6, 6), drawn(6)
    found = made.predict({"x": x, "t": t}, outputs="y", batch_size=4)
    np.testing.assert_allclose(found, 2 * x + t, rtol=1e-6)


def test_a_fixed_state_is_given_once() -> None:
    made = session(STATE.replace("float[3, batch, 2] h0", "float[3, 1, 2] h0"))
    data, _ = state_data()
    for wrong in (np.swapaxes(data["h0"], 0, 1), data["h0"]):
        with pytest.raises(FeedError, match=r"'h0' must have shape \[3, 1, 2\], got") as caught:
            made.evaluate({**data, "h0": wrong}, batch_size=3)
        assert "give one array for all batches" in str(caught.value)
        assert "batch_size=" not in str(caught.value)
    data["h0"] = data["h0"][:, :1]
    error = data["x"] @ W + data["h0"].sum(0) - data["targets"]
    assert made.evaluate(data, batch_size=4)["loss"] == pytest.approx((error**2).mean(), rel=1e-6)


def test_a_fixed_state_of_one_row_is_given_once() -> None:
    """Here the rows of what is given could be those of batches of one."""
    made = session(STATE.replace("float[3, batch, 2] h0", "float[1, 3, 2] h0"))
    data, _ = state_data()
    data["h0"] = np.swapaxes(data["h0"], 0, 1)
    message = r"'h0' has 6 rows, but the model takes \[1, 3, 2\]"
    with pytest.raises(FeedError, match=message) as caught:
        made.evaluate(data, batch_size=3)
    assert "give one array of this shape, batch_size=1, or a model" in str(caught.value)


def test_a_static_batch_on_another_axis() -> None:
    static = STATE.replace("batch", "2")
    data, loss = state_data()
    assert session(static).evaluate(data, batch_size=2)["loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    ("shapes", "axes", "batch"),
    [
        ({"x": ("s0", "s1"), "labels": ("s0", "s1")}, {"x": 0, "labels": 0}, {"s0"}),
        ({"x": ("s0", 4), "labels": ("y0",)}, {"x": 0, "labels": 0}, {"s0", "y0"}),
        ({"x": ("T", "N", 4), "h": (3, "N", 2)}, {"x": 1, "h": 1}, {"N"}),
        ({"x": ("T", "N", 4), "labels": ("N",)}, {"x": 1, "labels": 0}, {"N"}),
        ({"x": ("T", "N", 4), "targets": ("T", "N", 2)}, {"x": 1, "targets": 1}, {"N"}),
        ({"x": ("B", "N", 3), "targets": ("B", "N")}, {"x": 0, "targets": 0}, {"B"}),
        ({"x": ("nodes", 4), "e": (2, "edges"), "t": ("nodes",)}, {"x": 0, "t": 0}, {"nodes"}),
        ({"e": (2, "edges"), "x": ("nodes", 4)}, {"x": 0}, {"nodes"}),
        ({"x": (None, 4), "labels": None}, {"x": 0, "labels": 0}, set()),
        ({"x": (8, 3), "h": (2, 8, 4), "labels": (8,)}, {"x": 0, "h": 1, "labels": 0}, {8}),
        ({"x": (1, 3, 8, 8), "scale": (3,)}, {"x": 0}, {1}),
        ({"x": (1, 1, "T"), "targets": ("T",)}, {"x": 0}, {1}),
        ({"x": (1, "N", 3), "targets": (1, "N")}, {"x": 0, "targets": 0}, {1}),
        ({"x": (8, "T"), "labels": (8, "T")}, {"x": 0, "labels": 0}, {8}),
        ({"x": ("s0", "s1"), "m": ("s2", "s1")}, {"x": 0, "m": 0}, {"s0", "s2"}),
        ({"x": ("s0", "s1"), "p": (1, "s1"), "w": ("s1",)}, {"x": 0}, {"s0"}),
        ({"x": (1, "batch", 4), "h": (2, "batch", 4)}, {"x": 1, "h": 1}, {"batch"}),
    ],
)
def test_axes(shapes: Any, axes: dict[str, int], batch: set[int | str]) -> None:
    found = row_axes(shapes)
    assert found.axes == axes
    assert found.batch == batch
    assert not found.doubt


def test_outputs_tell_what_their_inputs_do_not() -> None:
    """After a mean over axis 0, the rows are what outputs and targets have in front."""
    pooled, other = {"x": ("s0", "s1", 4)}, ("s1", 3)
    assert row_axes({**pooled, "targets": other}, ["targets"]).axes == {"x": 1, "targets": 0}
    assert row_axes(pooled, outputs=[other]).axes == {"x": 1}
    for outputs in ([("s0", "s1", 2), other], [("y0", "y1")], []):
        assert row_axes(pooled, outputs=outputs).axes == {"x": 0}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("ids", "mask", "out"),
    [
        (("s10", "s12"), ("s86", "s12"), ("s10", "s12")),
        (("s10", "s12"), ("s86", "s21"), ("s10", "s12")),
        (("a_dynamic_axes_1", "a_dynamic_axes_2"), ("b_1", "b_2"), ("y_1", "y_2")),
    ],
)
def test_exporters_name_the_batch_in_each_input(
    ids: Any, mask: Any, out: Any, tmp_path: Path
) -> None:
    """As PyTorch's do; the symbol that inputs share may be that of the time."""
    text = f"""g (int64[{", ".join(ids)}] ids, float[{", ".join(mask)}] mask)
    => (float[{", ".join(out)}, 2] y) <float[4,2] w = {{1,0,0,1,1,1,0,0}}, int64[1] a = {{2}}>
    {{ e = Gather(w, ids) m = Unsqueeze(mask, a) y = Mul(e, m) }}"""
    draw = np.random.default_rng(1)
    data: Any = {"ids": draw.integers(0, 4, (ROWS, 9)), "mask": drawn(ROWS, 9)}
    y = W[data["ids"]] * data["mask"][..., None]
    targets = drawn(ROWS, 9, 2)
    made = session(text)
    found = made.predict(data, outputs="y", batch_size=4)
    np.testing.assert_allclose(found, y, rtol=1e-6)
    loss = made.evaluate({**data, "targets": targets}, batch_size=4)["loss"]
    assert loss == pytest.approx(((y - targets) ** 2).mean(), rel=1e-6)
    (epoch,) = made.fit({**data, "targets": targets}, batch_size=4, progress=False)
    assert epoch["steps"] == 2
    for model in (parsed(text), session(text).model()):
        onnx.save(model, tmp_path / "model.onnx")
        np.savez(tmp_path / "data.npz", **data)
        files = [str(tmp_path / "model.onnx"), "--data", str(tmp_path / "data.npz")]
        more = ["--output", str(tmp_path / "y.npz"), "--force"]
        assert main(["predict", *files, *more, "--batch-size", "4"]) == 0
        np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], y, rtol=1e-6)


ONE = """g (float[1,1,T] x) => (float[T] y) <float[1,1,3] w = {1,2,3}, int64[1] flat = {-1}>
{ c = Conv<pads=[1,1]>(x, w) y = Reshape(c, flat) }"""
ONE_WITH_ROWS = ONE.replace("float[T] y", "float[1,T,1] y").replace(
    "int64[1] flat = {-1}", "int64[3] flat = {1, -1, 1}"
)


@pytest.mark.slow
@pytest.mark.parametrize("text", [ONE, ONE_WITH_ROWS, ONE.replace("[T] y", "[Reshapey_dim_0] y")])
def test_a_model_of_one_row_reads_the_time_whole(text: str, tmp_path: Path) -> None:
    """Axis 0 is the batch, also where only the time has a symbol: 300 are more than a batch."""
    x = drawn(1, 1, 300)
    y = np.convolve(x[0, 0].astype(np.float64), [3, 2, 1], "same")
    y = y.reshape(1, 300, 1) if text == ONE_WITH_ROWS else y
    targets = drawn(*y.shape)
    data, made = {"x": x, "targets": targets}, session(text)
    np.testing.assert_allclose(made.predict({"x": x})["y"], y, rtol=1e-5, atol=1e-5)  # type: ignore[index]
    loss = ((y - targets) ** 2).mean()
    for form in (data, [data]):
        assert made.evaluate(form)["loss"] == pytest.approx(loss, rel=1e-6)
    weights = []
    for form in (data, [data]):
        again = session(text)
        again.fit(form, epochs=3, progress=False, seed=1)
        assert again.steps_done == 3
        weights.append(again.state["w"])
    np.testing.assert_array_equal(*weights)
    np.savez(tmp_path / "data.npz", x=x, targets=targets)
    onnx.save(parsed(text), tmp_path / "model.onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        files = ["model.onnx", "--data", "data.npz"]
        assert main(["predict", *files, "--output", "y.npz"]) == 0
        loss_and_rate = ["--loss", "MeanSquaredError", "--optimizer", "SGD", "--quiet"]
        assert main(["train", *files, "--epochs", "3", "--save", "t.onnx", *loss_and_rate]) == 0
        assert main(["eval", "t.onnx", "--data", "data.npz"]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], y, rtol=1e-5, atol=1e-5)
    found = TrainingSession(str(tmp_path / "t.onnx")).state["w"]
    np.testing.assert_array_equal(found, weights[0])


@pytest.mark.slow
def test_a_model_of_one_row_refuses_several() -> None:
    x, made = drawn(6, 1, 9), session(ONE)
    data = {"x": x, "targets": drawn(9)}
    with pytest.raises(FeedError, match="'x' has 6 rows in batches of 256, but the model's batch"):
        made.predict({"x": x})
    for use in (made.evaluate, made.fit):
        with pytest.raises(FeedError, match=r"6 rows, but 'targets' of shape \[T\] has none"):
            use(data, batch_size=1)
    with pytest.raises(OrtopsError, match=r"'y' must have the rows of the batch, got shape \[9\]"):
        made.predict({"x": x}, batch_size=1)

    class Sequences:  # of which each is a sample, with its own targets
        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"x": x[number], "targets": x[number, 0]}

    for text in (ONE, ONE.replace("T", "9")):
        loss = session(text).evaluate(Sequences(), batch_size=1)["loss"]
        batches = [{"x": x[n : n + 1], "targets": x[n, 0]} for n in range(6)]
        assert loss == session(text).evaluate(batches)["loss"]
    with_rows = session(ONE_WITH_ROWS)
    y = np.stack([np.convolve(row[0], [3, 2, 1], "same") for row in x.astype(np.float64)])
    found = with_rows.predict({"x": x}, batch_size=1, outputs="y")
    np.testing.assert_allclose(found, y[..., None], rtol=1e-5, atol=1e-5)


LSTM = """g (float[5,x_1,4] x, float[1,h_1,2] h) => (float[5,1,y_1,2] y, float[1,hn_1,2] hn)
<float[1,6,4] w, float[1,6,2] r> {{ {nodes} y, hn = GRU<hidden_size=2>({x}, w, r, , , {h}) }}"""


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("nodes", "x", "h"),
    [
        ("", "x", "h"),
        ("a = MatMul(x, eye) b = Identity(h)", "a", "b"),
    ],
)
def test_recurrent_layers_tell_where_the_rows_are(nodes: str, x: str, h: str) -> None:
    """In files whose exporter gives each dynamic axis a symbol of its own."""
    model = parsed(LSTM.format(nodes=nodes, x=x, h=h))
    arrays = {"w": drawn(1, 6, 4), "r": drawn(1, 6, 2), "eye": np.eye(4, dtype=np.float32)}
    del model.graph.initializer[:]
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    data = {"x": drawn(5, ROWS, 4), "h": drawn(1, ROWS, 2)}
    loss = ortops.losses.MeanSquaredError("y")
    made = TrainingSession(ortops.build_training_model(model, loss=loss, optimizer="SGD"))
    whole = ortops.InferenceSession(model).run(None, data)
    found = made.predict(data, batch_size=4)
    for name, y in zip(("y", "hn"), whole, strict=True):
        np.testing.assert_allclose(found[name], y, rtol=1e-5, atol=1e-6)  # type: ignore[index]
    targets = drawn(*whole[0].shape)
    (epoch,) = made.fit({**data, "targets": targets}, batch_size=4, progress=False)
    assert epoch["steps"] == 2


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # the exporters warn about themselves
@pytest.mark.parametrize("exporter", ["dynamo", "lists", "lists in training mode"])
def test_exported_files(exporter: str, tmp_path: Path) -> None:
    import torch

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 3)

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.head(self.table(ids) * mask[..., None])

    class States(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = torch.nn.LSTM(4, 8, 2), torch.nn.Linear(8, 3)

        def forward(self, x: Any, h: Any, c: Any) -> Any:
            y, (h, c) = self.layers(x, (h, c))
            return self.head(y), h, c

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv1d(1, 1, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return self.layer(x).flatten()

    state, words = torch.randn(2, 6, 8), torch.randint(0, 9, (6, 5))
    batch, both, time = {1: "n"}, {0: "n", 1: "t"}, {2: "t"}
    cases: list[tuple[torch.nn.Module, dict[str, Any], Any, dict[str, list[int]]]] = [
        (Words(), {"ids": words, "mask": torch.rand(6, 5)}, [both] * 2, {"y": [0, 1]}),
        (
            States(),
            {"x": torch.randn(5, 6, 4), "h": state, "c": 2 * state},
            [batch] * 3,
            {"y": [1], "hn": [1], "cn": [1]},
        ),
        (One(), {"x": torch.randn(1, 1, 300)}, [time], {"y": [0]}),
    ]
    for module, feeds, axes, out in cases:
        names: dict[str, Any] = {"input_names": list(feeds), "output_names": list(out)}
        file, given = tmp_path / "model.onnx", tuple(feeds.values())
        if exporter == "dynamo":
            sizes = [dict.fromkeys(each, torch.export.Dim.DYNAMIC) for each in axes]
            more: dict[str, Any] = {"dynamo": True, "dynamic_shapes": sizes, "verbose": False}
        else:
            modes = torch.onnx.TrainingMode
            mode = modes.TRAINING if "training" in exporter else modes.EVAL
            lists = {n: list(each) for n, each in zip(feeds, axes, strict=True)} | out
            more = {"dynamo": False, "dynamic_axes": lists, "training": mode}
        torch.onnx.export(module.eval(), given, str(file), **names, **more)
        with torch.no_grad():
            found = module(*given)
        wanted = [each.numpy() for each in (found if isinstance(found, tuple) else [found])]
        data = {name: each.numpy() for name, each in feeds.items()}
        loss = ortops.losses.MeanSquaredError("y")
        made = TrainingSession(ortops.build_training_model(file, loss=loss, optimizer="SGD"))
        size: dict[str, Any] = {} if isinstance(module, One) else {"batch_size": 4}
        np.savez(tmp_path / "data.npz", **data)
        options = [f"--{n.replace('_', '-')}={v}" for n, v in size.items()]
        command = ["predict", str(file), "--data", str(tmp_path / "data.npz"), *options]
        assert main([*command, "--output", str(tmp_path / "y.npz"), "--force"]) == 0
        for results in (made.predict(data, **size), np.load(tmp_path / "y.npz")):
            for name, y in zip(out, wanted, strict=True):
                np.testing.assert_allclose(results[name], y, rtol=1e-4, atol=1e-5)
        targets = drawn(*wanted[0].shape)
        found = made.evaluate({**data, "targets": targets}, **size)["loss"]
        assert found == pytest.approx(float(((wanted[0] - targets) ** 2).mean()), rel=1e-5)
        (epoch,) = made.fit({**data, "targets": targets}, progress=False, **size)
        assert epoch["steps"] == (1 if isinstance(module, One) else 2)


def test_what_is_uncertain_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    text = TIME.replace("[batch, time, 4]", "[time, width, 4]").replace(
        "time, batch", "width, time"
    )
    made = session(text)
    data, _ = time_data()
    with caplog.at_level(logging.WARNING, "ortops"):
        for _ in range(2):
            made.evaluate({"x": data["x"], "targets": data["targets"]}, batch_size=4)
    said = [record.message for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("data: the rows of a batch are taken along the dimension 'time', al")
    assert "also have 'width'; call the dimension of the rows 'batch' in the model" in said[0]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, y = time_data()
    onnx.save(parsed(TIME), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **data)
    train = ["train", "model.onnx", "--data", "data.npz", "--loss", "MeanSquaredError"]
    more = ["--batch-size", "2", "--validation", "0.5", "--save", "trained.onnx"]
    run = ["predict", "model.onnx", "--data", "data.npz", "--batch-size", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert main([*train, *more]) == 0, capsys.readouterr().err
        assert main(["eval", "trained.onnx", "--data", "data.npz", "--batch-size", "4"]) == 0
        assert main([*run, "--output", "y.npz"]) == 0, capsys.readouterr().err
        assert main([*run, "--output", "y.csv"]) == 0
    np.testing.assert_allclose(np.load(tmp_path / "y.npz")["y"], y, rtol=1e-5, atol=1e-6)
    table = np.loadtxt(tmp_path / "y.csv", delimiter=",", skiprows=1)
    rows = np.swapaxes(y, 0, 1).reshape(ROWS, -1)
    np.testing.assert_allclose(table, rows, rtol=1e-5, atol=1e-6)


@pytest.mark.sklearn
def test_estimators() -> None:
    from ortops.sklearn import OnnxRegressor

    text = """g (float[4, batch] x) => (float[2, batch] y) <float[2,4] w = {1,0,1,0,0,1,1,0}>
    { y = MatMul(w, x) }"""
    X, y = drawn(ROWS, 4), drawn(ROWS, 2)
    made = OnnxRegressor(parsed(text), optimizer="SGD", learning_rate=0.0, batch_size=4, epochs=1)
    found = made.fit(X, y).predict(X)
    np.testing.assert_allclose(found, X @ W, rtol=1e-5, atol=1e-6)
    loss = made.history_[-1]["loss"]
    assert loss == pytest.approx(((X @ W - y) ** 2).mean(), rel=1e-5)


WRONG_RANK = """g (float[batch, 4] x) => (float[batch] y) <float[4,1] w = {1,0,0,1}>
{ y = MatMul(x, w) }"""
WRONG_SIZE = """g (float[batch, 4] x) => (float[batch] y)
<float[4,2] w = {1,0,0,1,1,1,0,0}, int64[1] a = {0}>
{ b = MatMul(x, w) y = ReduceMean<keepdims=0>(b, a) }"""


def test_a_declared_rank_that_is_wrong_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"'y' is declared with the dimensions \[batch\], but its node"
    ):
        session(WRONG_RANK)


@pytest.mark.quick(1)
@pytest.mark.parametrize("loss", ["MeanSquaredError", "L1"])
def test_a_declared_size_that_is_wrong_is_refused_in_the_first_run(loss: str) -> None:
    """Targets of one row were broadcast to both numbers."""
    text = WRONG_SIZE
    uses: list[Any] = [
        lambda made, data: made.step(data),
        lambda made, data: made.fit([data], progress=False),
        lambda made, data: made.fit([data, data], accumulate=2, progress=False),
        lambda made, data: made.run_steps([data, data]),
        lambda made, data: made.gradients(data, outputs=[]),
        lambda made, data: made.evaluate([data]),
    ]
    for use in uses:
        made = session(text, loss=loss, inputs={"targets": (np.float32, ["n"])})
        data = {"x": drawn(1, 4), "targets": drawn(1)}
        with pytest.raises(
            ModelError, match=r"'y' is declared with shape \[batch\], but for this"
        ) as e:
            use(made, data)
        assert "batch it has shape [2]; " in str(e.value)
        np.testing.assert_array_equal(made.state["w"], W.astype(np.float32))
        made.step({"x": drawn(2, 4), "targets": drawn(2)})  # as declared


def test_the_first_step_returns_what_was_asked_for() -> None:
    data, _ = state_data()
    made = session(STATE)
    assert set(made.step(data, outputs=["loss"])) == {"loss"}
    made, again = session(STATE), session(STATE)
    losses = made.run_steps([data] * 3)
    assert losses.tolist() == [float(again.step(data)["loss"]) for _ in range(3)]
